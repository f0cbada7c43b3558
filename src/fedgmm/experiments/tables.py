"""Tables of results as Markdown and JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedgmm.nets.devices import environment


def mean_and_spread(values: Sequence[float]) -> str:
    """Format shares as percentages, ``mean ± standard deviation``; one value has no deviation."""
    percent = 100.0 * np.asarray(values, dtype=np.float64)
    if len(percent) == 1:
        return f"{percent[0]:.2f}"
    return f"{percent.mean():.2f} ± {percent.std(ddof=1):.2f}"


def paper_value(value: float | None) -> str:
    """Format a number of the paper, or "not given" for ``None``."""
    return "not given" if value is None else f"{value:.2f}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with the first column aligned left and the others right."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_results(folder: Path, name: str, record: dict[str, Any], markdown: str) -> None:
    """Write ``name.json``, with the environment added, and ``name.md`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {**record, "environment": environment()}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / f"{name}.md").write_text(markdown)
