from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pytest

from fedgmm.support.checks import (
    Count,
    Flag,
    Positive,
    Texts,
    array_of_names,
    check_choice,
    check_fields,
    check_flag,
    check_integer,
    check_known,
    check_number,
    given_array,
    integer,
    one_of,
    optional_fields,
)


@pytest.mark.parametrize("value", [1, 5, np.int8(3), np.uint64(2)])
def test_integers(value):
    check_integer("n", value, 1)


def test_a_switch_may_be_an_integer_from_zero():
    check_integer("verbose", True, 0)
    with pytest.raises(TypeError, match="n must be an integer, got True"):
        check_integer("n", True, 1)


@pytest.mark.parametrize("value", [0, 0.0, 1e-300, 3, np.float32(2)])
def test_non_negative(value):
    check_number("tol", value, least=0)


@pytest.mark.parametrize("value", [True, "1", None, 1j, [1]])
def test_not_a_number(value):
    with pytest.raises(TypeError, match="tol must be a number"):
        check_number("tol", value, least=0)


@pytest.mark.parametrize(
    ("bounds", "allowed", "refused", "words"),
    [
        ({"least": 0}, (0, 1e300), (-1e-9, np.inf, np.nan), "finite and not negative"),
        ({"above": 0}, (1e-300, 2), (0, -1, np.inf), "finite and positive"),
        ({"least": 0, "below": 1}, (0, 0.999), (1, -0.1, np.nan), "at least 0 and less than 1"),
        ({"above": 0, "most": 1}, (1, np.float32(0.5)), (0, 1.1), "more than 0 and at most 1"),
        ({}, (-5, 5), (np.inf, -np.inf, np.nan), "finite"),
    ],
)
def test_numbers_within_bounds(bounds, allowed, refused, words):
    for value in allowed:
        check_number("x", value, **bounds)
    for value in refused:
        with pytest.raises(ValueError, match=f"^x must be {words}, got {value!r}"):
            check_number("x", value, **bounds)


@dataclass(frozen=True)
class Options:
    rounds: Count = 3
    lr: Positive | None = None
    seed: Annotated[int, integer(0, below=10)] = 0
    kind: Annotated[str, one_of("a", "b")] = "a"
    wide: Flag = False
    names: Texts = ()
    free: object = None


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rounds": 0}, ValueError),
        ({"rounds": True}, TypeError),
        ({"rounds": None}, TypeError),
        ({"lr": 0.0}, ValueError),
        ({"lr": "fast"}, TypeError),
        ({"seed": 10}, ValueError),
        ({"kind": "c"}, ValueError),
        ({"kind": None}, ValueError),
        ({"wide": 1}, TypeError),
        ({"names": "abc"}, TypeError),
        ({"names": ("a", 1)}, TypeError),
    ],
    ids=str,
)
def test_a_field_with_a_wrong_value_is_named(changes, error):
    with pytest.raises(error, match=next(iter(changes))):
        check_fields(Options(**changes))


@pytest.mark.parametrize(
    "changes",
    [{}, {"lr": 1}, {"lr": np.float32(1)}, {"rounds": np.int64(2)}, {"names": ["a"]}, {"seed": 9}],
    ids=str,
)
def test_fields_with_right_values(changes):
    check_fields(Options(**changes))


def test_fields_that_may_be_none():
    assert optional_fields(Options) == {"lr"}


def test_an_unknown_name_is_reported_with_the_nearest_one():
    check_known("There is no option", "lr", ("lr", "rounds"))
    with pytest.raises(ValueError, match=r"'round'; did you mean 'rounds'\?"):
        check_known("There is no option", "round", ("lr", "rounds"))
    with pytest.raises(ValueError, match="'magic'; choose from lr, rounds"):
        check_known("There is no option", "magic", ("rounds", "lr"))


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


@pytest.mark.parametrize(
    "names", [["a", "b"], [1, 2], ["a", 1], [("a", 1), ("b", 2)], [1.5, 2.5], [("a", 1)], [2**70]]
)
def test_names_come_back_as_they_were(names):
    array = array_of_names(names)
    assert array.shape == (len(names),)
    assert array.tolist() == names
    assert [type(name) for name in array.tolist()] == [type(name) for name in names]
