"""Tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from fedgmm.methods.base import TITLES

if TYPE_CHECKING:
    from fedgmm.experiments.demo import DemoResult
    from fedgmm.runs.comparison import Comparison, Tuning


def demo_table(result: DemoResult, most_clients: int = 12) -> Table:
    """Every client's rows, its true and its learned weights, and the error between them."""
    errors = result.weight_errors
    table = Table(title="What each client's data are made of")
    table.add_column("client")
    table.add_column("rows", justify="right")
    table.add_column("true weights", justify="right")
    table.add_column("learned weights", justify="right")
    table.add_column("error", justify="right")
    for number, (name, rows) in enumerate(list(result.data.rows.items())[:most_clients]):
        table.add_row(
            str(name),
            f"{len(rows):,}",
            _weights(result.data.weights[number]),
            _weights(result.weights[number]),
            f"{errors[number]:.3f}",
        )
    hidden = len(errors) - most_clients
    if hidden > 0:
        table.add_row(f"… {hidden} more", "", "", "", "")
    table.add_section()
    total = sum(map(len, result.data.rows.values()))
    table.add_row("all", f"{total:,}", "", "", f"{errors.mean():.3f}")
    table.caption = "error: half the sum of absolute differences; 0 is right, 1 is worst"
    return table


def _weights(weights: NDArray[np.float64]) -> str:
    return "  ".join(f"{weight:.2f}" for weight in weights)


def comparison_table(comparison: Comparison, title: str, bayes: float | None = None) -> Table:
    """Every method's accuracy, log-loss, rounds, seconds and learning rate."""
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
    """The validation log-likelihood of every learning rate."""
    table = Table(title=title)
    table.add_column("learning rate", justify="right")
    table.add_column("validation log-likelihood", justify="right")
    for rate, score in tuning.scores.items():
        told = f"{score:.4f}" if np.isfinite(score) else "diverged"
        table.add_row(f"{rate:.3g}", told, style="bold" if rate == tuning.best else None)
    return table
