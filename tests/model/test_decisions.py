"""Classes from probabilities: a threshold, or the smallest expected cost."""

from __future__ import annotations

import numpy as np
import pytest

from fedgmm.model.decisions import Decision, default_positive

PROBABILITIES = np.array([[0.9, 0.1], [0.8, 0.2], [0.75, 0.25], [0.2, 0.8]])


def choose(decision, probabilities=PROBABILITIES):
    return decision.choose(np.log(probabilities)).tolist()


def test_the_threshold_itself_is_enough():
    assert choose(Decision.of("ab", positive="b", threshold=0.25)) == [0, 0, 1, 1]
    assert choose(Decision.of("ab", positive="a", threshold=0.85)) == [0, 1, 1, 1]
    assert choose(Decision.of("ab")) == [0, 0, 0, 1]


def test_a_missed_case_that_costs_four_alarms_moves_the_threshold():
    decision = Decision.of("ab", positive="b", cost=4)
    assert decision.threshold == pytest.approx(1 / 5)
    assert Decision.of("ab", positive="b", cost={"fn": 8, "fp": 2}).threshold == pytest.approx(0.2)
    assert Decision.of("ab", positive="b", cost={"fp": 3}).threshold == pytest.approx(0.75)
    assert choose(Decision.of("ab", cost={"b": 3.5})) == [0, 0, 1, 1]  # the same with class costs


def test_the_smallest_expected_cost_of_several_classes(rng):
    probabilities = rng.dirichlet(np.ones(3), size=200)
    costs = np.array([1.0, 5.0, 2.0])
    decision = Decision.of("abc", cost={"b": 5, "c": 2})
    missed = costs * (1 - np.eye(3))  # of predicting the row's class where the column's is true
    expected = (probabilities @ missed.T).argmin(1)
    assert choose(decision, probabilities) == expected.tolist()


@pytest.mark.parametrize(
    ("classes", "given", "word"),
    [
        ("abc", {"threshold": 0.2}, "two classes"),
        ("abc", {"cost": 10}, "Name the classes"),
        ("abc", {"positive": "a"}, "two classes"),
        ("ab", {"threshold": 0.2}, "not known"),
        ("ab", {"positive": "z"}, "one of"),
        ("ab", {"positive": "a", "threshold": 20}, "between"),
        ("ab", {"positive": "a", "threshold": float("nan")}, "between"),
        ("ab", {"positive": "a", "threshold": 0.2, "cost": 2}, "exclude"),
        ("ab", {"positive": "a", "cost": -1}, "positive number"),
        ("ab", {"cost": {"z": 2}}, "unknown class"),
    ],
)
def test_rules_that_do_not_fit(classes, given, word):
    with pytest.raises(ValueError, match=word):
        Decision.of(classes, **given)


@pytest.mark.parametrize(
    ("classes", "counts", "index"),
    [
        ((0, 1), (3, 7), 1),
        ((0.0, 1.0), (3, 7), 1),
        ((False, True), (3, 7), 1),
        (("yes", "no"), (7, 3), 0),
        (("FALSE", "TRUE"), (3, 7), 1),
        (("ill", "well"), (3, 7), 0),
        (("ill", "well"), (5, 5), 1),
        ((1, 2), (3, 7), 0),
    ],
)
def test_one_true_and_yes_are_positive_and_otherwise_the_rarer_class(classes, counts, index):
    assert default_positive(classes, counts) == index
