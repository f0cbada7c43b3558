"""Bounds on the influence of one site, against brute force and closed forms."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgmm.core.sums import Sum, Sums, Total, row_counts
from fedgmm.data.tables.summaries import ClientSummary, ColumnSummary
from fedgmm.privacy.influence import (
    Cohort,
    Medians,
    bounded_summaries,
    combine,
    degree,
    likely_scores,
    row_weights,
    usual_instead,
)

DECLARATION = {
    "counts": row_counts(2),
    "log_likelihood": Sum(()),
    "moments/second": Sum((2, 3), rows="counts", sensitivity=lambda clip: clip**2),
    "learner_counts": row_counts(1),
    "learners/weight": Sum((1, 4), rows="learner_counts", as_mean=True),
}
CURRENT = {"learners/weight": torch.zeros(1, 4).double()}


def sums_of(rows=50.0, second=1.0, step=0.1, fit=-2.0):
    return Sums(
        {
            "counts": torch.tensor([rows / 2, rows / 2]).double(),
            "log_likelihood": torch.tensor(fit * rows).double(),
            "moments/second": rows / 2 * second * torch.ones(2, 3).double(),
            "learner_counts": torch.tensor([rows]).double(),
            "learners/weight": rows * step * torch.ones(1, 4).double(),
        }
    )


def total_of(sites, **options):
    cohort = Cohort(DECLARATION, **options)
    for number, sums in enumerate(sites):
        cohort.add(f"site {number}", sums, 50, current=CURRENT)
    return cohort, cohort.result()


# ---------------------------------------------------------------------- weights


@given(
    rows=st.lists(st.integers(1, 10**9), min_size=1, max_size=9),
    share=st.floats(0.05, 1.0),
)
def test_no_site_counts_for_more_than_its_share(rows, share):
    named = {str(number): own for number, own in enumerate(rows)}
    weights = row_weights(named, share)
    counted = [weights[name] * own for name, own in named.items()]
    share = max(share, 1 / len(rows))
    assert max(counted) <= share * sum(counted) * (1 + 1e-9)
    # the limit is not lower than needed: those that are cut have exactly the largest share
    if any(weight < 1 for weight in weights.values()):
        assert max(counted) == pytest.approx(share * sum(counted))
    assert all(
        weight == 1 or counted[int(name)] == pytest.approx(max(counted))
        for name, weight in weights.items()
    )


def test_a_site_counts_for_three_times_the_median_by_default():
    honest = dict(zip("abcde", (80, 90, 100, 110, 120), strict=True))
    assert set(row_weights(honest).values()) == {1.0}
    weights = row_weights({**honest, "large": 10**4})
    assert weights["large"] * 10**4 == pytest.approx(3 * 105)
    assert all(weights[name] == 1.0 for name in honest)


def test_few_sites_may_differ_in_size_unless_it_is_incredible():
    assert set(row_weights({"a": 1, "b": 2, "c": 12, "d": 30, "e": 150}).values()) == {1.0}
    counted = [n * row_weights({"a": 10, "b": 10, "c": n})["c"] for n in (1000, 1001, 10**7)]
    assert counted == pytest.approx([1000, 10, 1e-3], rel=1e-2)
    assert set(row_weights({"a": 10, "b": 10**7}).values()) == {1.0}
    assert row_weights({}) == {}


# ---------------------------------------------------------------------- sums


def test_sums_of_like_sites_are_added_unchanged():
    sites = [
        sums_of(rows, second, step)
        for rows, second, step in ((50, 1, 0.1), (40, 3, 0.2), (60, 0.5, -0.3))
    ]
    plain = Total()
    for sums in sites:
        plain.add(sums)
    cohort, found = total_of(sites)
    for name, value in plain.result().items():
        assert float((value - found[name]).abs().max()) < 1e-12, name
    assert cohort.bounded == {}


@pytest.mark.parametrize("sites", [5, 40])
@pytest.mark.parametrize("first", [True, False])
def test_sums_that_are_much_larger_than_the_median_hardly_count(sites, first):
    honest, liar = [sums_of()] * sites, sums_of(second=1e40, step=-1e6)
    cohort, found = total_of([liar, *honest] if first else [*honest, liar])
    (reason,) = cohort.bounded.values()
    assert "median" in reason
    # the sums of a group are scaled as a whole, so almost nothing is left of so large a lie
    for name, own in honest[0].items():
        if name not in ("counts", "log_likelihood"):
            assert float((found[name] - sites * own).abs().max()) < 1e-3, name
    assert float(found["log_likelihood"]) == pytest.approx(-100.0 * (sites + 1))


def test_two_sites_have_no_majority():
    cohort, found = total_of([sums_of(), sums_of(second=1e40)])
    assert cohort.bounded == {}
    assert float(found["moments/second"].max()) > 1e40


def test_steps_of_a_converged_run_are_not_compared():
    usual = Medians()
    total_of([sums_of(step=1.0)] * 6, medians=usual)
    cohort, _ = total_of([sums_of(step=1e-9)] * 5 + [sums_of(step=1e-3)], medians=usual)
    assert cohort.bounded == {}
    cohort, _ = total_of([sums_of(step=1e-9)] * 5 + [sums_of(step=1.0)], medians=usual)
    assert list(cohort.bounded) == ["site 5"]


def test_an_outlying_log_likelihood_becomes_the_median():
    cohort, found = total_of(
        [sums_of(fit=-2.0), sums_of(fit=-9.0), sums_of(fit=-3.0), sums_of(fit=1e29)]
    )
    assert float(found["log_likelihood"]) == pytest.approx(50 * (-2.0 - 9.0 - 3.0 - 2.5))
    assert list(cohort.bounded) == ["site 3"]
    assert usual_instead(-40.0, [-3.0, -5.0, -40.0]) is None
    assert usual_instead(1e9, [1e9, 0.0]) is None


def test_degrees_follow_from_the_declaration():
    assert degree(row_counts(2)) == 0
    assert degree(Sum((), sensitivity=lambda clip: math.sqrt(2 * (clip**2 + 1)))) == 1
    assert degree(Sum((), sensitivity=lambda clip: clip * math.sqrt(clip**2 + 1))) == 2


def test_scores_are_weighed_and_outlying_ones_ignored():
    score = {"clients": 1.0, "rows": 10.0, "log_loss": 0.5, "labels": -5.0}
    liar = {"clients": 1.0, "rows": 10.0**9, "log_loss": 1e14, "labels": 1e14}
    empty = dict.fromkeys(score, 0.0)
    scores = {"a": score, "b": score, "c": score, "d": empty, "mallory": liar}
    found = likely_scores(scores, {"mallory": 1e-8})
    assert found == pytest.approx({"clients": 4.0, "rows": 40.0, "log_loss": 2.0, "labels": -20.0})


# ---------------------------------------------------------------------- robust means


@pytest.mark.parametrize("robust", ["trimmed", "centred"])
def test_robust_means_of_equal_sites_are_those_of_the_rows(robust):
    sites = [sums_of(rows, 2.0, 0.3) for rows in (50, 40, 60)]
    _, found = total_of(sites, robust=robust)
    for name in DECLARATION:
        if name != "log_likelihood":  # fits are taken per declared row
            assert float((found[name] - sum(own[name] for own in sites)).abs().max()) < 1e-9, name


def test_a_trimmed_mean_leaves_out_extreme_coordinates():
    steps = (0.1, 0.2, 0.3, 0.4, -0.9)
    _, found = total_of([sums_of(step=step) for step in steps], robust="trimmed")
    mean = (
        found["learners/weight"] / found["learner_counts"]
    )  # a fifth of the rows goes on each side
    assert float((mean - 0.2).abs().max()) < 1e-9


def test_a_centred_mean_moves_towards_each_site_by_a_bounded_step():
    steps = (0.09, 0.1, 0.1, 0.11, -0.9)
    _, found = total_of([sums_of(step=step) for step in steps], robust="centred")
    mean = found["learners/weight"] / found["learner_counts"]
    assert float((mean - 0.1).abs().max()) < 0.02


def test_robust_means_of_matrices_stay_semidefinite():
    declaration = {
        "counts": row_counts(1),
        "second": Sum((1, 3, 3), rows="counts", semidefinite=True),
    }
    generator = torch.Generator().manual_seed(0)
    sites = []
    for _ in range(7):
        x = torch.randn(2, 3, generator=generator).double()
        sites.append(Sums({"counts": torch.tensor([2.0]).double(), "second": (x.mT @ x)[None]}))
    for robust in ("trimmed", "centred"):
        found = combine(sites, declaration, robust)["second"]
        assert float(torch.linalg.eigvalsh(found).min()) > -1e-9


# ---------------------------------------------------------------------- summaries


def summary(rows=100, mean=5.0, squares=400.0, **more):
    column = ColumnSummary("number", 0, rows, mean, squares, **more)
    return ClientSummary(rows, 0, {"age": column}, {"ill": rows // 2, "well": rows - rows // 2})


def test_summaries_of_like_sites_stay_as_they_are():
    honest = {"a": summary(), "b": summary(mean=9.0), "c": summary(squares=4000.0)}
    assert bounded_summaries(honest) == (honest, [])


@pytest.mark.parametrize(
    "lie", [{"squares": 1e40}, {"squares": math.inf}, {"mean": 1e300}, {"mean": -1e4}]
)
def test_numbers_that_are_too_wide_do_not_count(lie):
    honest = {"a": summary(), "b": summary(mean=9.0), "c": summary(squares=4000.0)}
    found, notes = bounded_summaries({**honest, "mallory": summary(**lie)})
    assert {name: found[name] for name in honest} == honest
    assert 5.0 <= found["mallory"].columns["age"].mean <= 9.0
    assert found["mallory"].columns["age"].squares <= 4000.0
    (note,) = notes
    assert "mallory" in note


def test_dates_in_both_orders_are_bounded():
    def dates(mean):
        return ColumnSummary("date", 0, 0, orders={"day first": (9, mean, 9.0, 0.0)})

    own = {
        name: ClientSummary(9, 0, {"day": dates(m)}, {"x": 9})
        for name, m in zip("abcd", (1.0, 2.0, 3.0, 1e9), strict=True)
    }
    found, _ = bounded_summaries(own)
    assert found["d"].columns["day"].orders["day first"] == (9, 2.5, 9.0, 0.0)
    assert found["a"] == own["a"]


def test_rows_of_a_summary_are_capped_with_all_its_counts():
    honest = {name: summary() for name in "abcde"}
    lie = summary(1000, squares=4000.0, categories={"x": 1000})
    found, notes = bounded_summaries({**honest, "mallory": lie})
    own = found["mallory"]
    assert own.rows == own.columns["age"].count == own.columns["age"].categories["x"] == 300
    assert own.labels == {"ill": 150, "well": 150}
    assert own.columns["age"].squares == pytest.approx(1200.0)
    assert "max_share" in notes[0]


def test_the_file_of_waiting_sums_is_closed_if_an_exchange_is_given_up(collect):
    def begin():
        cohort = Cohort({}, 3.0, "none", Medians())
        cohort._held.append(lambda: cohort)  # a cycle, as readers of sums make one
        return cohort._shelf

    shelf = begin()
    collect()
    assert shelf.closed
