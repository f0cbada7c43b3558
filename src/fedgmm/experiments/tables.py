"""Tables of results: Markdown and JSON files, and tables for the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fedgmm.methods.base import TITLES
from fedgmm.nets.devices import environment
from fedgmm.runs.comparison import Comparison, Tuning


def mean_and_spread(values: Sequence[float], digits: int = 2) -> str:
    """Format shares as percentages, ``mean ± standard deviation``; one value has no deviation."""
    percent = 100.0 * np.asarray(values, dtype=np.float64)
    if len(percent) == 1:
        return f"{percent[0]:.{digits}f}"
    return f"{percent.mean():.{digits}f} ± {percent.std(ddof=1):.{digits}f}"


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


def comparison_table(comparison: Comparison, title: str, bayes: float | None = None) -> Table:
    """Return accuracy, log-loss, rounds, seconds and learning rate of each method for the terminal."""
    table = Table(title=title)
    table.add_column("method")
    for column in ("accuracy", "worst tenth", "log-loss", "rounds", "seconds", "learning rate"):
        table.add_column(column, justify="right")
    best = max(one.summary["mean_accuracy"] for one in comparison.contestants)
    for one in comparison.contestants:
        accuracy = one.summary["mean_accuracy"]
        table.add_row(
            TITLES[one.algorithm],
            f"{100 * accuracy:.2f}",
            f"{100 * one.summary['worst_decile']:.2f}",
            f"{one.summary['mean_log_loss']:.3f}",
            str(len(one.model.history)),
            f"{one.seconds:.1f}",
            f"{one.tuning.best:.3g}" if one.tuning else "exact steps",
            style="bold" if accuracy == best else None,
        )
    if bayes is not None:
        table.add_row("best possible", f"{100 * bayes:.2f}", style="dim")
    return table


def tuning_table(tuning: Tuning, title: str) -> Table:
    """Return the validation log-likelihood of each learning rate for the terminal."""
    table = Table(title=title)
    table.add_column("learning rate", justify="right")
    table.add_column("validation log-likelihood", justify="right")
    for rate, score in tuning.scores.items():
        shown = f"{score:.4f}" if np.isfinite(score) else "diverged"
        table.add_row(f"{rate:.3g}", shown, style="bold" if rate == tuning.best else None)
    return table
