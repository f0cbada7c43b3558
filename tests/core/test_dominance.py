"""Sums that no single row dominates."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgmm.core.dominance import cap_shares, common_entries


def cap(weights, parts, fewest, rounding=0.0):
    parts = torch.as_tensor(parts)
    return cap_shares(
        torch.as_tensor(weights), parts, fewest, torch.full((parts.shape[-1],), rounding).double()
    )


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), fewest=st.sampled_from([2.0, 5.0, 7.5]))
def test_no_row_has_more_than_its_share_of_a_sum(seed, fewest):
    rng = np.random.default_rng(seed)
    weights = rng.uniform(size=(30, 2))
    parts = np.exp(3.0 * rng.normal(size=(30, 2, 3)))
    found = cap(weights, parts, fewest)
    assert (found <= torch.as_tensor(weights)).all()
    added = found[..., None] * torch.as_tensor(parts)
    assert (added.amax(0) <= added.sum(0) / fewest * (1 + 1e-6)).all()


def test_the_cap_is_the_largest_possible():
    """Of 9, 3, 1, 1, 1 and at least three rows the first counts as much as two others: 3, 3, 1, 1, 1."""
    found = cap(np.ones((5, 1)), np.array([9.0, 3, 1, 1, 1]).reshape(5, 1, 1), 3.0)
    np.testing.assert_allclose(found.flatten() * torch.tensor([9.0, 3, 1, 1, 1]), [3, 3, 1, 1, 1])


def test_rows_that_share_evenly_keep_their_weights():
    weights = np.random.default_rng(0).uniform(0.9, 1.0, (20, 1))
    np.testing.assert_array_equal(cap(weights, np.ones((20, 1, 1)), 5.0), weights)


def test_a_sum_of_one_row_and_rounding_errors_is_left_out():
    parts = np.zeros((20, 1, 1))
    parts[3] = 0.25
    assert not cap(np.ones((20, 1)), parts, 5.0).flatten()[3]
    parts[parts == 0] = 1e-17
    assert not cap(np.ones((20, 1)), parts, 5.0, rounding=1e-9).any()


@pytest.mark.parametrize(
    ("counts", "kept"),
    [
        ([40.0, 3.0, 7.0], [True, False, True]),
        ([40.0, 0.0, 7.0], [True, False, True]),
        ([3.0, 4.0, 2.0], [True, True, False]),  # rows of the last one go to the others
        ([2.0], [True]),
    ],
)
def test_rare_entries_are_left_out_a_half_at_a_time(counts, kept):
    assert common_entries(torch.tensor(counts), 5.0).tolist() == kept
