"""Tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

if TYPE_CHECKING:
    from fedgmm.experiments.demo import DemoResult


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
