import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgmm.privacy.fixed_point import LARGEST, RangeError, from_fixed, steps_of, to_fixed


@given(st.lists(st.floats(-1e10, 1e10), min_size=1, max_size=30))
def test_a_sum_of_elements_is_the_sum_of_the_rounded_numbers(values):
    with np.errstate(over="ignore"):
        total = np.add.reduce([to_fixed([v], sites=len(values)) for v in values])
    exact = sum(round(v * 2**24) for v in values)
    assert int(total.view(np.int64)[0]) == exact
    np.testing.assert_allclose(from_fixed(total), exact / 2**24, rtol=1e-15)


def test_numbers_survive_to_half_a_step():
    values = np.random.default_rng(0).normal(scale=1e3, size=(7, 5))
    assert np.abs(from_fixed(to_fixed(values)) - values).max() <= 2.0**-25
    assert from_fixed(to_fixed(values)).shape == (7, 5)
    assert steps_of(1.5) == 1.5 * 2**24


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(value):
    with pytest.raises(RangeError, match="finite"):
        to_fixed([0.0, value])


def test_values_whose_sum_could_wrap_around_are_refused():
    to_fixed([LARGEST / 10 * 0.999], sites=10)
    with pytest.raises(RangeError, match="exceeds"):
        to_fixed([-LARGEST / 10], sites=10)


def test_elements_of_another_type_are_refused():
    with pytest.raises(TypeError, match="uint64"):
        from_fixed(np.zeros(3))
