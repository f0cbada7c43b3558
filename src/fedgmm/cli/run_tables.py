"""Terminal tables about files and runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from fedgmm.wording import counted

if TYPE_CHECKING:
    from fedgmm.data.tables.inspection import Inspection
    from fedgmm.model.metrics import Evaluation
    from fedgmm.runs.run import Adapted

_MOST_LINES = 60
_MOST_CLASSES = 6


def inspection_tables(found: Inspection) -> list[Table]:
    """Return tables of the clients and of the columns of files."""
    return [_clients_table(found), _columns_table(found)]


def _clients_table(found: Inspection) -> Table:
    rows = sum(client.rows for client in found.clients)
    table = Table(title=f"{counted(len(found.clients), 'client')}, {counted(rows, 'row')}")
    _add_names(table, "client")
    labels = list(found.classes)[:_MOST_CLASSES]
    for column in ("rows", "missing", *(f"class {label}" for label in labels)):
        table.add_column(escape(column), justify="right")
    if len(found.classes) > len(labels):
        table.add_column("other classes", justify="right")
    table.add_column("inputs differ by", justify="right")
    if labels:
        table.add_column("labels differ by", justify="right")
    for client in found.clients[:_MOST_LINES]:
        cells = [escape(client.name), f"{client.rows:,}", _percent(client.missing)]
        cells += [f"{client.classes.get(label, 0):,}" for label in labels]
        if len(found.classes) > len(labels):
            shown = sum(client.classes.get(label, 0) for label in labels)
            cells.append(f"{sum(client.classes.values()) - shown:,}")
        cells.append(f"{client.marginal_shift:.2f} dev.")
        if labels:
            cells.append(_percent(client.label_shift))
        table.add_row(*cells)
    _add_rest(table, len(found.clients))
    table.caption = (
        "inputs: distance of the client's means from those of all clients, in standard deviations; "
        "labels: share of rows that would need another label to match all clients"
    )
    return table


def _columns_table(found: Inspection) -> Table:
    total = sum(column.outputs for column in found.columns)
    columns = counted(len(found.columns), "column, which becomes", "columns, which become")
    table = Table(title=f"{columns} {total}")
    _add_names(table, "column")
    table.add_column("used as", no_wrap=True)
    table.add_column("missing", justify="right", no_wrap=True)
    table.add_column("becomes", justify="right", no_wrap=True)
    table.add_column("detail", overflow="fold")
    for column in found.columns[:_MOST_LINES]:
        table.add_row(
            escape(column.name),
            column.role,
            _percent(column.missing),
            str(column.outputs),
            escape(column.detail),
            style="dim" if column.role == "ignored" else None,
        )
    _add_rest(table, len(found.columns))
    return table


def metrics_table(metrics: dict[str, Any]) -> Table:
    """Return the metrics of a finished run per split; without labels, per client."""
    table = Table(title=f"{metrics['algorithm']}, {counted(metrics['rounds'], 'round')}")
    clients = metrics.get("clients", {})
    if any("log_density" in own for own in clients.values()):
        for column in ("client", "rows", "log-density"):
            table.add_column(column, justify="left" if column == "client" else "right")
        for name, own in list(clients.items())[:_MOST_LINES]:
            table.add_row(escape(str(name)), f"{own['rows']:,}", f"{own['log_density']:.3f}")
        _add_rest(table, len(clients))
        return table
    for column in ("rows", "accuracy", "of all rows", "worst tenth", "worst client", "log-loss"):
        table.add_column(column, justify="left" if column == "rows" else "right")
    for split in ("train", "validation", "test"):
        own = metrics.get(split)
        if own is not None:
            table.add_row(
                split,
                _percent(own["mean_accuracy"]),
                _percent(own["weighted_accuracy"]),
                _percent(own["worst_decile"]),
                _percent(own["worst_accuracy"]),
                f"{own['mean_log_loss']:.3f}",
            )
    table.caption = "means over clients; every client has the same weight"
    chosen = metrics.get("selection")
    if chosen is not None:
        sizes = (chosen["components"], "Gaussian"), (chosen["learners"], "learner")
        text = " and ".join(counted(*size) for size in sizes)
        table.caption += f"; {text}, chosen on validation rows"
    return table


def evaluation_table(found: Evaluation) -> Table:
    """Return the metrics of every client, the worst first, and their means."""
    table = Table(title=counted(len(found.clients), "client"))
    _add_names(table, "client")
    for column in ("rows", "accuracy", "log-loss", "calibration error"):
        table.add_column(column, justify="right")
    for index in np.argsort(found.accuracy, kind="stable")[:_MOST_LINES].tolist():
        table.add_row(
            escape(str(found.clients[index])),
            f"{found.rows[index]:,}",
            _percent(found.accuracy[index]),
            f"{found.log_loss[index]:.3f}",
            f"{found.calibration_error[index]:.3f}",
        )
    _add_rest(table, len(found.clients))
    table.add_section()
    total = found.summary()
    table.add_row(
        "mean over clients",
        "",
        _percent(total["mean_accuracy"]),
        f"{total['mean_log_loss']:.3f}",
        f"{total['mean_calibration_error']:.3f}",
        style="bold",
    )
    table.add_row(
        "mean over rows", f"{int(found.rows.sum()):,}", _percent(total["weighted_accuracy"]), "", ""
    )
    table.add_row("nine of ten clients reach", "", _percent(total["worst_decile"]), "", "")
    return table


def adaptation_table(found: Adapted) -> Table:
    """Return the weights of a new client and the gain in accuracy."""
    name = escape(str(found.adaptation.client))
    used = "labelled" if found.labelled else "unlabelled"
    title = f"{name} joined with {counted(found.rows, used + ' row')}"
    table = Table(title=title, min_width=48)  # wide enough for the title if there is one learner
    table.add_column("Gaussian", justify="right")
    weights = found.adaptation.weights
    for learner in range(weights.shape[1]):
        table.add_column(f"learner {learner + 1}", justify="right")
    for component, row in enumerate(weights):
        table.add_row(str(component + 1), *(f"{weight:.3f}" for weight in row))
    if found.curve:
        first, last = found.curve[0], found.curve[-1]
        table.caption = (
            f"accuracy on held-out rows: {_percent(first['accuracy'])} with the federation's weights, "
            f"{_percent(last['accuracy'])} with its own from {counted(round(last['rows']), 'row')}"
        )
    return table


def _add_names(table: Table, of: str) -> None:
    """Add a column of names; they are folded on a narrow screen, because a cut name is ambiguous."""
    table.add_column(of, overflow="fold")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _add_rest(table: Table, lines: int) -> None:
    if lines > _MOST_LINES:
        table.add_row(f"… {lines - _MOST_LINES} more", *[""] * (len(table.columns) - 1))
