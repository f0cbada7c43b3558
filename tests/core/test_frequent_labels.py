"""Frequencies of labels: against counting by hand, Bayes' rule, and limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgmm.core.labels import PRIOR_ROWS, label_counts, label_frequencies
from fedgmm.core.predictive import log_class_probabilities


def drawn(seed, rows=40, clients=3, pairs=4, classes=5):
    generator = torch.Generator().manual_seed(seed)
    q = torch.rand(rows, pairs, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (rows,), generator=generator)
    codes = torch.randint(clients, (rows,), generator=generator)
    counts = torch.zeros(clients, pairs, classes, dtype=torch.float64)
    return q / q.sum(1, keepdim=True), labels, codes, counts


def test_counts_by_a_plain_loop():
    q, labels, codes, counts = drawn(0)
    label_counts(q[:25], labels[:25], codes[:25], counts)
    label_counts(q[25:], labels[25:], codes[25:], counts)  # rows may come in parts
    expected = torch.zeros_like(counts)
    for row, label, code in zip(q, labels, codes, strict=True):
        expected[code, :, label] += row
    torch.testing.assert_close(counts, expected)


@given(st.integers(0, 1000))
def test_frequencies_are_frequencies(seed):
    q, labels, codes, counts = drawn(seed)
    label_counts(q, labels, codes, counts)
    found = label_frequencies(counts, counts.sum(0))
    for value in (found.clients, found.federation):
        assert (value > 0).all()
        torch.testing.assert_close(value.sum(-1), torch.ones_like(value[..., 0]))
    assert not found.log_ratios()[-1].any()  # nobody's client


def test_frequencies_by_hand():
    counts = torch.tensor([[[30.0, 10.0]], [[0.0, 0.0]]], dtype=torch.float64)
    found = label_frequencies(counts, torch.tensor([[3.0, 1.0]], dtype=torch.float64))
    np.testing.assert_allclose(found.federation, [[0.75, 0.25]], atol=1e-4)
    np.testing.assert_allclose(found.clients[0], [[0.75, 0.25]], atol=1e-4)
    np.testing.assert_allclose(found.log_ratios()[1], 0.0, atol=1e-12)  # without rows
    more = found.with_client(None, torch.tensor([[0.0, 30.0]], dtype=torch.float64))
    own = (PRIOR_ROWS * 0.75) / (30 + PRIOR_ROWS)
    np.testing.assert_allclose(more.clients[2], [[own, 1 - own]], atol=1e-4)
    again = more.with_client(2, None)
    np.testing.assert_allclose(again.log_ratios()[2], 0.0, atol=1e-12)
    torch.testing.assert_close(more.clients[:2], found.clients)


@pytest.mark.parametrize("density", [True, False])
def test_corrected_classes_by_brute_force(density):
    rows, m1, m2, classes = 7, 2 if density else 1, 3, 4
    generator = torch.Generator().manual_seed(1)
    log_pi, log_x, log_y, log_ratios = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((rows, m1, m2), (rows, m1), (rows, m2, classes), (rows, m1, m2, classes))
    )
    log_pi, log_y = log_pi.flatten(1).log_softmax(-1).view_as(log_pi), log_y.log_softmax(-1)
    seen = log_x if density else None
    found = log_class_probabilities(log_pi, seen, log_y, log_ratios)
    expected = torch.zeros(rows, classes, dtype=torch.float64)
    for i in range(rows):
        for a in range(m1):
            for b in range(m2):
                weight = log_pi[i, a, b] + (log_x[i, a] if density else 0.0)
                expected[i] += (weight + log_y[i, b] + log_ratios[i, a, b]).exp()
    expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(found.exp(), expected)
    plain = log_class_probabilities(log_pi, seen, log_y)
    nothing = torch.zeros_like(log_ratios)
    torch.testing.assert_close(log_class_probabilities(log_pi, seen, log_y, nothing), plain)


def test_the_correction_is_bayes_rule():
    """One learner that is right for the federation becomes right for a client with other classes."""
    frequency, own = torch.tensor([0.5, 0.5]).double(), torch.tensor([0.9, 0.1]).double()
    likelihood = torch.tensor([[0.2, 0.7], [0.6, 0.1]]).double()  # P(x|y) of two values of x
    shared = (likelihood * frequency) / (likelihood * frequency).sum(-1, keepdim=True)
    right = (likelihood * own) / (likelihood * own).sum(-1, keepdim=True)
    ratios = (own.log() - frequency.log()).expand(2, 1, 1, 2)
    zero = torch.zeros(2, 1, 1, dtype=torch.float64)
    found = log_class_probabilities(zero, None, shared.log()[:, None], ratios)
    torch.testing.assert_close(found.exp(), right)
