"""Prose is plain English: words that made sentences hard to read are not used."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if "results" not in path.parts or path.name == "README.md"
)
MODULES = sorted((ROOT / "src").rglob("*.py")) + sorted((ROOT / "benchmarks").glob("*.py"))

WORDS = re.compile(
    r"\b(tell|tells|told|telling|nobody|everybody|whoever|whatever|rivals?|mended|mend|mends|anew"
    r"|is none|are none|of no kind|beyond all bounds|trainings|a training(?! (run|row|set|site|loss|step"
    r"|split|data|example|input|client|option|method|log|algorithm|image|round|time|table|part|code)))\b",
    re.IGNORECASE,
)
HEADLESS = re.compile(r"^(What|Who|Whom|Whose|Where|When|Why|How)\b(?![^\n]*\?)")


def prose_of(path):
    """Docstrings, comments and string literals of a module, or the lines of a page."""
    text = path.read_text(encoding="utf-8")
    return text if path.suffix == ".md" else re.sub(r"\.tell\(\)|\bis None\b", "", text)


@pytest.mark.parametrize("path", [*MODULES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_word_of_the_list_is_used(path):
    found = [
        f"{number}: {line.strip()}"
        for number, line in enumerate(prose_of(path).splitlines(), 1)
        if WORDS.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_begin_with_an_imperative_or_a_noun(path):
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            line = (ast.get_docstring(node) or "").split("\n")[0]
            if HEADLESS.match(line):
                found.append(f"{getattr(node, 'lineno', 1)}: {line}")
    assert not found, "\n".join(found)
