"""Numbers with their nouns."""

from __future__ import annotations

import pytest

from fedgmm.wording import counted


@pytest.mark.parametrize(
    ("number", "told"),
    [(0, "0 classes"), (1, "1 class"), (2, "2 classes"), (12_345, "12,345 classes")],
)
def test_a_number_and_its_noun(number, told):
    assert counted(number, "class", "classes") == told


def test_most_nouns_take_an_s():
    assert [counted(number, "row") for number in (1, 2)] == ["1 row", "2 rows"]
