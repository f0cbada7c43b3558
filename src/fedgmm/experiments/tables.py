"""Tables of results: Markdown and JSON files, and tables for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedgmm.methods.base import TITLES
from fedgmm.nets.devices import environment
from fedgmm.runs.comparison import LEARNER_TITLES, Tuning
from fedgmm.runs.ranking import Ranking, Standing


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


def comparison_table(ranking: Ranking, title: str, bayes: float | None = None) -> Table:
    """Return the ranking for the terminal: metric, distance to the best, and each learner."""
    standings = ranking.standings
    kinds = list(dict.fromkeys(kind for one in standings for kind in one.by_learner))
    table = Table(title=title, box=SIMPLE_HEAD, caption=ranking.unit, caption_justify="left")
    table.add_column("method", no_wrap=True)
    titles = [LEARNER_TITLES.get(kind, kind) for kind in kinds]
    per_learner = titles if len(kinds) > 1 else []
    metric = {"mean_accuracy": "accuracy", "r2": "R² (%)"}.get(ranking.metric, "avg. precision")
    error = ("rmse", "RMSE") if ranking.metric == "r2" else ("mean_log_loss", "log-loss")

    def shown_error(metrics: Mapping[str, float]) -> str:
        return f"{metrics[error[0]]:{'.4g' if ranking.metric == 'r2' else '.3f'}}"

    for column in (metric, "to best", *per_learner, error[1], "rate"):
        table.add_column(column, justify="right", no_wrap=column != "rate")
    for one in standings:
        best = one is ranking.best
        lead = "tie" if one.lead.within_noise else f"{100 * one.lead.mean:+.1f}"
        rates = ["exact" if rate is None else f"{rate:.2g}" for rate in one.rates]
        table.add_row(
            TITLES[one.algorithm],
            f"{100 * one.value.mean:.1f} ± {50 * (one.value.high - one.value.low):.1f}",
            "best" if best else lead,
            *(_share(one, kind) for kind in kinds if per_learner),
            shown_error(one.summary),
            " ".join(dict.fromkeys(rates)),
            style="bold" if one.lead.within_noise else None,
        )
    table.add_section()
    for name, metrics in ranking.pooled.items():
        value, blank = f"{100 * metrics[ranking.metric]:.1f}", [""] * (1 + len(per_learner))
        table.add_row(f"pooled: {name}", value, *blank, shown_error(metrics), style="dim")
    if bayes is not None:
        table.add_row("best possible", f"{100 * bayes:.1f}", style="dim")
    return table


def _share(one: Standing, kind: str) -> str:
    """Return the metric with a kind of learner, marked if validation rows chose it."""
    mark = "*" if kind in one.learners else " "
    return f"{100 * one.by_learner[kind]:.1f}{mark}"


def tuning_table(tuning: Tuning, title: str) -> Table:
    """Return the validation log-likelihood of each learning rate for the terminal."""
    table = Table(title=title)
    table.add_column("learning rate", justify="right")
    table.add_column("validation log-likelihood", justify="right")
    for rate, score in tuning.scores.items():
        shown = f"{score:.4f}" if np.isfinite(score) else "diverged"
        table.add_row(f"{rate:.3g}", shown, style="bold" if rate == tuning.best else None)
    return table
