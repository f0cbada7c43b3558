"""Sums of clients: adding them in any order, withholding entries, and sums that no rows could make."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedgmm.core.sums import (
    ALIVE,
    Sum,
    Sums,
    SumsError,
    Total,
    check_semidefinite,
    check_sums,
    row_counts,
    withhold,
)

EPS = np.finfo(float).eps


def sums(gathered=(), **values):
    found = {
        name: torch.as_tensor(np.asarray(value), dtype=torch.float64)
        for name, value in values.items()
    }
    return Sums(found, gathered)


def assert_same_bits(actual, expected):
    assert set(actual) == set(expected)
    assert actual.gathered == expected.gathered
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


# ---------------------------------------------------------------------- adding


def client(rng, code):
    """Numbers that float64 adds without rounding, and an entry that is kept apart."""
    return Sums(
        {
            "counts": torch.from_numpy(rng.integers(-50, 50, size=3) / 8),
            "moments/second": torch.from_numpy(rng.integers(-50, 50, size=(2, 3)) / 8),
            "one": torch.tensor(float(rng.integers(100)), dtype=torch.float64),
            "codes": torch.tensor([code]),
            "learners": torch.from_numpy(rng.normal(size=(1, 4))),
        },
        gathered=["codes", "learners"],
    )


def test_addition_is_associative_and_gathered_entries_concatenate(rng):
    a, b, c = (client(rng, code) for code in (5, 3, 8))
    whole = (a + b) + c
    assert_same_bits(whole, a + (b + c))
    for name in ("counts", "moments/second", "one"):
        assert torch.equal(whole[name], a[name] + b[name] + c[name])
    assert whole["codes"].tolist() == [5, 3, 8]
    assert torch.equal(whole["learners"], torch.cat([a["learners"], b["learners"], c["learners"]]))
    assert whole["codes"].dtype == torch.int64


def test_addition_is_commutative_except_for_the_order_of_gathered_entries(rng):
    a, b = client(rng, 5), client(rng, 3)
    one, other = a + b, b + a
    for name in ("counts", "moments/second", "one"):
        assert torch.equal(one[name], other[name])
    order = torch.tensor([1, 0])
    for name in ("codes", "learners"):
        assert torch.equal(one[name], other[name][order])


def test_adding_changes_neither_side(rng):
    a, b = client(rng, 1), client(rng, 2)
    before = {name: value.clone() for name, value in a.items()}
    total = Total()
    total.add(a)
    total.add(b)
    total.add(b)
    assert_same_bits(a, Sums(before, a.gathered))
    assert total.clients == 3
    assert_same_bits(total.result(), a + b + b)


def test_sums_are_a_mapping_with_names_below_a_prefix(rng):
    found = client(rng, 0)
    assert len(found) == 5
    assert list(found)[:2] == ["counts", "moments/second"]
    assert list(found.below("moments/")) == ["second"]
    assert found.below("moments/")["second"] is found["moments/second"]


def ulps(actual, expected):
    return abs(actual - expected) / math.ulp(expected)


values = st.floats(-1e6, 1e6).filter(lambda value: value == 0 or abs(value) > 1e-200)


@given(
    arrays(np.float64, st.integers(1, 40), elements=values),
    st.randoms(use_true_random=False),
)
def test_the_order_of_arrival_is_lost_in_the_last_bit(numbers, shuffle):
    exact = math.fsum(numbers)
    # the bound of a sum with compensation: one rounding, and squares of roundings
    size = float(np.abs(numbers).sum())
    bound = math.ulp(exact) + (len(numbers) * EPS) ** 2 * size
    for _ in range(3):
        total = Total()
        for value in numbers:
            total.add(sums(x=value))
        assert abs(total.result()["x"].item() - exact) <= bound
        numbers = numbers.copy()
        shuffle.shuffle(numbers)


def test_real_clients_give_the_same_bits_in_any_order(rng):
    """300 clients of very different sizes, as math.fsum rounds their sums, in twenty orders."""
    sizes = 10.0 ** rng.uniform(-6, 6, size=(300, 1))
    numbers = rng.normal(size=(300, 50)) * sizes
    expected = torch.tensor([math.fsum(column) for column in numbers.T], dtype=torch.float64)
    plain = []
    for _ in range(20):
        numbers = rng.permutation(numbers)
        total = Total()
        for row in numbers:
            total.add(sums(x=row))
        assert torch.equal(total.result()["x"], expected)
        plain.append(numbers.cumsum(0)[-1])
    assert np.ptp(plain, axis=0).max() > 0  # plain addition does depend on the order


def test_what_cancels_is_not_lost():
    total = Total()
    for value in (1e16, 1.0, -1e16, 1.0):
        total.add(sums(x=value))
    assert total.result()["x"].item() == 2.0


def test_a_total_does_not_keep_its_clients(rng):
    total, sent = Total(), []
    for _ in range(20):
        one = sums(x=rng.normal(size=7), y=1.0)
        sent += [weakref.ref(value) for value in one.values()]
        total.add(one)
    del one
    assert not any(reference() is not None for reference in sent)
    held = [*total._total.values(), *total._rests.values()]
    assert sum(value.numel() for value in held) == 2 * 8  # each sum and its rounding errors


def test_gathered_entries_grow_with_the_clients(rng):
    total = Total()
    for code in range(20):
        total.add(client(rng, code))
    assert total.result()["codes"].tolist() == list(range(20))
    assert total.result()["learners"].shape == (20, 4)


# ---------------------------------------------------------------------- withholding

MOMENTS = {
    "counts": row_counts(3),
    "n": row_counts(3),
    "first": Sum((3, 3), rows="n"),
    "second": Sum((3, 3, 3), rows="n"),
    "learner_counts": row_counts(2),
    "learners/w": Sum((2, 5), rows="learner_counts", as_mean=True),
    "log_likelihood": Sum(()),
}
TIED = {**MOMENTS, "second": Sum((3, 3), rows="n", pooled=True)}


def made(rng, declaration, **values):
    """Sums of the declared shapes, with entries that are not zero."""
    drawn = {name: rng.uniform(1, 2, size=one.shape) for name, one in declaration.items()}
    gathered = [name for name, one in declaration.items() if one.gathered]
    return sums(**{**drawn, **values}, gathered=gathered)


def test_entries_of_few_rows_are_withheld_group_by_group(rng):
    sent = made(rng, MOMENTS, n=[9.0, 4.9, 5.0], learner_counts=[2.0, 17.0])
    kept = withhold(sent, MOMENTS, 5)
    assert kept["n"].tolist() == [9.0, 0.0, 5.0]
    assert kept["learner_counts"].tolist() == [0.0, 17.0]
    for name in ("first", "second"):
        assert not kept[name][1].any()
        assert torch.equal(kept[name][[0, 2]], sent[name][[0, 2]])
    assert not kept["learners/w"][0].any()
    assert torch.equal(kept["learners/w"][1], sent["learners/w"][1])
    for name in ("counts", "log_likelihood"):  # these do not say what single rows are like
        assert torch.equal(kept[name], sent[name])
    assert sent["n"].tolist() == [9.0, 4.9, 5.0]


def test_a_pooled_sum_is_kept_whole_or_not_at_all(rng):
    """As many columns as components, so that shapes alone could not say what is pooled."""
    enough = made(rng, TIED, n=[9.0, 6.0, 5.0], learner_counts=[9.0, 9.0])
    assert_same_bits(withhold(enough, TIED, 5), enough)
    few = withhold(made(rng, TIED, n=[9.0, 4.9, 5.0], learner_counts=[9.0, 9.0]), TIED, 5)
    for name in ("n", "first", "second"):
        assert not few[name].any()
    assert few["learners/w"].all()


def test_nothing_is_withheld_without_a_limit_but_means_of_nothing(rng):
    sent = made(rng, MOMENTS, n=[1e-12, 0.0, 5.0], learner_counts=[ALIVE / 2, 3.0])
    kept = withhold(sent, MOMENTS, 0)
    for name in ("n", "first", "second"):
        assert torch.equal(kept[name], sent[name])
    assert kept["learner_counts"].tolist() == [0.0, 3.0]
    assert not kept["learners/w"][0].any()


def test_gathered_entries_are_not_withheld(rng):
    declaration = {
        "rows": Sum((1,), gathered=True),
        "w": Sum((1, 4), rows="rows", as_mean=True, gathered=True),
    }
    sent = made(rng, declaration, rows=[3.0])
    assert_same_bits(withhold(sent, declaration, 10), sent)


@given(st.integers(0, 10_000), st.floats(0, 30))
def test_ratios_stay_right_when_clients_withhold(seed, min_rows):
    """Clients that all have the same means: the ratio does not depend on who withholds them."""
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(3, 3))
    total = Total()
    for _ in range(5):
        n = rng.uniform(0, 40, size=3)
        sent = made(rng, MOMENTS, n=n, first=n[:, None] * means)
        total.add(withhold(sent, MOMENTS, min_rows))
    found = total.result()
    for m in range(3):
        if found["n"][m] > 0:
            np.testing.assert_allclose(found["first"][m] / found["n"][m], means[m], rtol=1e-12)
        else:
            assert not found["first"][m].any()


# ---------------------------------------------------------------------- impossible sums

CHECKED = {
    "counts": row_counts(3),
    "first": Sum((3, 2), rows="counts", largest=10.0),
    "variances": Sum((3, 2), rows="counts", lowest=0.0, rounding=1e-8),
    "second": Sum((3, 2, 2), rows="counts", largest=100.0, rounding=1e-8, semidefinite=True),
    "tied": Sum(
        (3, 3), rows="counts", pooled=True, largest=100.0, rounding=1e-8, semidefinite=True
    ),
    "fit": Sum((), largest=5.0),
    "nothing": Sum((3, 0), rows="counts", largest=1.0),
    "free": Sum((2,)),
}


def sums_of_rows(rng, rows=20, absent=()):
    """Sums that rows do make; ``absent`` components have no rows."""
    q = rng.dirichlet(np.ones(3), size=rows)
    q[:, list(absent)] = 0.0
    q /= q.sum(1, keepdims=True)
    x, z = rng.uniform(-5, 5, size=(rows, 3, 2)), rng.uniform(-5, 5, size=(rows, 3))
    return sums(
        counts=q.sum(0),
        first=np.einsum("nm,nmd->md", q, x),
        variances=np.einsum("nm,nmd->md", q, x**2),
        second=np.einsum("nm,nmd,nme->mde", q, x, x),
        tied=np.einsum("nd,ne->de", z, z),
        fit=-4.0 * rows,
        nothing=np.zeros((3, 0)),
        free=rng.normal(size=2) * 1e20,
    )


@given(st.integers(0, 10_000), st.integers(1, 60), st.sets(st.integers(0, 2), max_size=2))
def test_what_rows_make_is_accepted(seed, rows, absent):
    found = sums_of_rows(np.random.default_rng(seed), rows, absent)
    check_sums(found, CHECKED, rows)


def changed(found, name, place, value):
    values = {key: own.clone() for key, own in found.items()}
    values[name][place] = value
    return Sums(values)


IMPOSSIBLE = {
    "negative count": ("counts", (1,), -0.5, "less than 0"),
    "count of more rows than there are": ("counts", (1,), 21.0, "exceeds"),
    "a count that is not a number": ("counts", (0,), np.nan, "not finite"),
    "infinite moment": ("first", (0, 1), np.inf, "not finite"),
    "not a number where anything goes": ("free", (1,), np.nan, "not finite"),
    "moment that is too large": ("first", (2, 0), 10.1 * 20, "exceeds"),
    "moment that is too large and negative": ("first", (2, 0), -10.1 * 20, "exceeds"),
    "fit that is too large": ("fit", (), -5.1 * 20, "exceeds"),
    "negative variance": ("variances", (0, 0), -1e-3, "less than 0"),
    "negative diagonal": ("second", (1, 0, 0), -1.0, "semidefinite"),
    "correlation above one": ("second", (1, ..., [1, 0], [0, 1]), 99.0, "semidefinite"),
    "tied matrix with a negative diagonal": ("tied", (0, 0), -1.0, "semidefinite"),
}


@pytest.mark.parametrize("which", IMPOSSIBLE)
def test_impossible_sums_are_refused(rng, which):
    name, place, value, reason = IMPOSSIBLE[which]
    found = sums_of_rows(rng)
    check_sums(found, CHECKED, 20)
    with pytest.raises(SumsError, match=f"{name}.*{reason}"):
        check_sums(changed(found, name, place, value), CHECKED, 20)


@pytest.mark.parametrize("name", ["first", "variances", "second"])
def test_entries_without_rows_are_refused(rng, name):
    found = sums_of_rows(rng, absent=[1])
    check_sums(found, CHECKED, 20)
    with pytest.raises(SumsError, match=f"{name} has entries without rows"):
        check_sums(changed(found, name, (1, 0), 1e-6), CHECKED, 20)


def test_a_pooled_sum_needs_rows_of_some_component(rng):
    found = sums_of_rows(rng, absent=[0, 1])
    check_sums(found, CHECKED, 20)  # the rows of the third component stand behind all of it
    empty = {name: torch.zeros_like(value) for name, value in found.items()}
    check_sums(Sums(empty), CHECKED, 20)
    with pytest.raises(SumsError, match="tied has entries without rows"):
        check_sums(Sums({**empty, "tied": found["tied"]}), CHECKED, 20)


def test_gathered_entries_are_not_multiplied_by_their_rows():
    declaration = {
        "rows": Sum((1,), lowest=0.0, gathered=True),
        "w": Sum((1, 2), rows="rows", largest=3.0, gathered=True),
    }
    check_sums(sums(rows=[9.0], w=[[2.9, -2.9]]), declaration, 9)
    with pytest.raises(SumsError, match="w exceeds"):
        check_sums(sums(rows=[9.0], w=[[2.9, -3.1]]), declaration, 9)
    with pytest.raises(SumsError, match="w has entries without rows"):
        check_sums(sums(rows=[0.0], w=[[2.9, -2.9]]), declaration, 9)


def test_a_mean_of_hardly_any_row_is_bounded_too(rng):
    found = changed(sums_of_rows(rng, absent=[1]), "counts", (1,), 1e-7)
    check_sums(changed(found, "first", (1, 0), 9e-7), CHECKED, 20)
    with pytest.raises(SumsError, match="first exceeds"):
        check_sums(changed(found, "first", (1, 0), 1.1e-6), CHECKED, 20)


def test_rounding_errors_are_not_refused():
    """A matrix of rank one, and a variance of zero, a hair below what they should be."""
    x = np.array([1e3, 1.0])
    second = np.stack([np.outer(x, x)] * 3) - np.diag([0.0, 1e-5])
    variances = np.full((3, 2), 1e4)
    variances[1, 1] = -1e-5
    found = sums_of_rows(np.random.default_rng(0))
    found = Sums({**found, **sums(second=second * 1e-4, variances=variances)})
    check_sums(found, CHECKED, 20)
    variances[1, 1] = -1e-3
    with pytest.raises(SumsError, match="variances"):
        check_sums(Sums({**found, **sums(variances=variances)}), CHECKED, 20)


def test_the_size_of_rounding_errors_may_come_from_other_sums():
    small = torch.diag(torch.tensor([1.0, -1e-6], dtype=torch.float64))
    with pytest.raises(SumsError, match="moments is not positive semidefinite"):
        check_semidefinite("moments", small, small, 1e-8)
    check_semidefinite("moments", 1e3 * small, small, 1e-8)

    declaration = {"whole": Sum((2, 2)), "small": Sum((2, 2), rounding=1e-8, semidefinite=True)}
    with pytest.raises(SumsError, match="small"):
        check_sums(Sums({"whole": 1e3 * small, "small": small}), declaration, 1)
    declaration["small"] = replace(declaration["small"], size_of="whole")
    check_sums(Sums({"whole": 1e3 * small, "small": small}), declaration, 1)


def test_counts_of_rows_declare_what_one_row_adds():
    one = row_counts(2, 3)
    assert one.shape == (2, 3)
    assert (one.lowest, one.largest, one.sensitivity(7.0)) == (0.0, 1.0, 1.0)
