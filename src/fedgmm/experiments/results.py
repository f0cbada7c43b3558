"""Results on disk: JSON for machines, a Markdown table for people, with what made them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedgmm.core.checks import check_choice, check_distinct
from fedgmm.methods.base import TITLES
from fedgmm.nets.devices import environment


def check_methods_and_seeds(methods: Sequence[str], seeds: Sequence[int]) -> None:
    """Raise ``ValueError`` unless there are some of both, each once, and the methods are known."""
    for name, values in (("methods", methods), ("seeds", seeds)):
        if not values:
            raise ValueError(f"{name} is empty; give at least one.")
        # a second value of the same trial would look like a spread
        check_distinct(name, values)
    for method in methods:
        check_choice("methods", method, tuple(TITLES))


def mean_and_spread(values: Sequence[float], digits: int = 2) -> str:
    """Percentages as ``mean ± deviation``; the deviation only where there are several."""
    percent = 100.0 * np.asarray(values, dtype=np.float64)
    if len(percent) == 1:
        return f"{percent[0]:.{digits}f}"
    return f"{percent.mean():.{digits}f} ± {percent.std(ddof=1):.{digits}f}"


def printed(value: float | None) -> str:
    """A figure of the paper's, or that it gives none."""
    return "not given" if value is None else f"{value:.2f}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, first column left, the others right."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_results(folder: Path, name: str, record: dict[str, Any], markdown: str) -> None:
    """Write ``name.json`` and ``name.md`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {**record, "environment": environment()}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / f"{name}.md").write_text(markdown)
