from __future__ import annotations

import numpy as np
import pytest

import fedgmm
from fedgmm.privacy.settings import Privacy, PrivacyError

GOOD = {"epsilon": 1.0, "delta": 1e-5, "bounds": (-1.0, 1.0)}


def test_privacy_is_a_name_of_the_package():
    assert fedgmm.Privacy is Privacy
    assert not fedgmm.Privacy().is_noised


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"epsilon": 0}, ValueError, "epsilon"),
        ({"epsilon": -1.0}, ValueError, "epsilon"),
        ({"epsilon": "1"}, TypeError, "epsilon"),
        ({"delta": None}, PrivacyError, "delta"),
        ({"delta": 1.0}, ValueError, "delta"),
        ({"bounds": None}, PrivacyError, "bounds"),
        ({"bounds": (1.0, 0.0)}, PrivacyError, "smaller"),
        ({"bounds": (0.0, float("inf"))}, PrivacyError, "finite"),
        ({"bounds": 3}, TypeError, "bounds"),
        ({"bounds": {"age": (0, 1, 2)}}, TypeError, "age"),
        ({"unit": "rows"}, ValueError, "'row'"),
        ({"rounds": 0}, ValueError, "rounds"),
        ({"categories": ["a"]}, TypeError, "categories"),
        ({"categories": {"sex": "fm"}}, TypeError, "sex"),
    ],
)
def test_bad_settings_are_refused(change, error, word):
    with pytest.raises(error, match=word):
        Privacy(**{**GOOD, **change})


def test_delta_must_be_less_than_one_over_the_units():
    privacy = Privacy(epsilon=1.0, delta=1e-3, bounds=(-1, 1))
    privacy.check_units(999)
    with pytest.raises(PrivacyError, match="1/1000"):
        privacy.check_units(1000)


def test_a_usual_delta_warns_among_many_clients_and_is_refused_for_one_large_client():
    privacy = Privacy(epsilon=1.0, delta=1e-5, bounds=(-1, 1))
    with pytest.warns(UserWarning, match="1/540000"):
        privacy.check_units(540_000, largest=1_900)
    with pytest.raises(PrivacyError, match="1/100000"):
        privacy.check_units(540_000, largest=100_000)


@pytest.mark.parametrize(
    "bounds", [(0, 2), [(0, 2), (0, 2)], np.array([[0, 2], [0, 2]]), {"a": (0, 2), "b": [0, 2]}]
)
def test_limits_of_columns(bounds):
    privacy = Privacy(epsilon=1.0, delta=1e-5, bounds=bounds)
    low, high = privacy.limits(2, ["a", "b"])
    np.testing.assert_array_equal(low, [0, 0])
    np.testing.assert_array_equal(high, [2, 2])
    assert Privacy.from_record(privacy.record()) == privacy


def test_a_column_without_bounds_is_refused():
    with pytest.raises(PrivacyError, match="'b'"):
        Privacy(epsilon=1.0, delta=1e-5, bounds={"a": (0, 1)}).limits(2, ["a", "b"])
    with pytest.raises(PrivacyError, match="3 columns"):
        Privacy(epsilon=1.0, delta=1e-5, bounds=[(0, 1)] * 2).limits(3)
