from __future__ import annotations

import numpy as np
import pytest

from fedgmm.core.checks import (
    array_of_names,
    check_choice,
    check_flag,
    check_integer,
    check_non_negative,
    given_array,
    inverse_of_precisions,
)
from oracles import assert_close, random_covariances


@pytest.mark.parametrize("value", [1, 5, np.int8(3), np.uint64(2)])
def test_integers(value):
    check_integer("n", value, 1)


def test_a_switch_may_be_an_integer_from_zero():
    check_integer("verbose", True, 0)
    with pytest.raises(TypeError, match="n must be an integer, got True"):
        check_integer("n", True, 1)


@pytest.mark.parametrize("value", [0, 0.0, 1e-300, 3, np.float32(2)])
def test_non_negative(value):
    check_non_negative("tol", value)


@pytest.mark.parametrize("value", [True, "1", None, 1j, [1]])
def test_not_a_number(value):
    with pytest.raises(TypeError, match="tol must be a number"):
        check_non_negative("tol", value)


def test_flags_and_choices():
    check_flag("warm_start", True)
    check_flag("warm_start", np.False_)
    with pytest.raises(TypeError, match="warm_start must be True or False, got 'yes'"):
        check_flag("warm_start", "yes")
    check_choice("kind", "a", ("a", "b"))
    with pytest.raises(ValueError, match=r"kind must be one of \['a', 'b'\], got \['a'\]"):
        check_choice("kind", ["a"], ("a", "b"))


def test_given_arrays_are_copies():
    value = np.ones(3)
    array = given_array("weights_init", value, (3,))
    assert array.dtype == np.float64
    assert not np.shares_memory(array, value)
    assert given_array("weights_init", [1, 2], (2,)).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
def test_inverse_of_precisions(rng, kind):
    covariances = random_covariances(rng, kind, 3, 4)
    precisions = np.linalg.inv(covariances) if kind in ("full", "tied") else 1 / covariances
    assert_close(inverse_of_precisions(precisions, kind), covariances, 1e-12)


@pytest.mark.parametrize(
    "names", [["a", "b"], [1, 2], ["a", 1], [("a", 1), ("b", 2)], [1.5, 2.5], [("a", 1)], [2**70]]
)
def test_names_come_back_as_they_were(names):
    array = array_of_names(names)
    assert array.shape == (len(names),)
    assert array.tolist() == names
    assert [type(name) for name in array.tolist()] == [type(name) for name in names]
