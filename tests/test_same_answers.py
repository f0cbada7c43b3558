"""All methods give the parameters that version 0.1 gave, to ten digits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import same_answers

EXPECTED = json.loads((Path(__file__).parent / "same_answers.json").read_text())


# Digits are trained with the same methods as synthetic clients, with more columns and classes.
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=[pytest.mark.slow] * (part == "digits"))
        for part in same_answers.PARTS
    ],
)
def test_same_answers_as_version_0_1(part):
    found, expected = same_answers.PARTS[part](), EXPECTED[part]
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        np.testing.assert_allclose(found[name], numbers, rtol=1e-10, atol=1e-10, err_msg=name)
