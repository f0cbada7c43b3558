"""Numbers with their nouns, and lists of names."""

from __future__ import annotations

import pytest

from fedgmm.wording import counted, first_few


@pytest.mark.parametrize(
    ("number", "told"),
    [(0, "0 classes"), (1, "1 class"), (2, "2 classes"), (12_345, "12,345 classes")],
)
def test_a_number_and_its_noun(number, told):
    assert counted(number, "class", "classes") == told


def test_most_nouns_take_an_s():
    assert [counted(number, "row") for number in (1, 2)] == ["1 row", "2 rows"]


@pytest.mark.parametrize(("names", "shown"), [("", ""), ("ab", "a, b"), ("abc", "a, b, …")])
def test_the_first_few_names(names, shown):
    assert first_few(iter(names), 2) == shown
