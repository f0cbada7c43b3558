"""Terminal tables about files and runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from fedgmm.report.contents import FEW_CLIENTS, mean_of
from fedgmm.wording import counted, percent

if TYPE_CHECKING:
    from fedgmm.data.tables.inspection import Inspection
    from fedgmm.model.importance import Importance
    from fedgmm.model.metrics import Evaluation
    from fedgmm.runs.run import Adapted, Detection

_MOST_LINES = 60
_MOST_CLASSES = 6
_MOST_EFFECTS = 3


def inspection_tables(found: Inspection) -> list[Table]:
    """Return tables of the clients, the classes and the columns of files."""
    classes = [_classes_table(found)] if found.base_rates else []
    return [_clients_table(found), *classes, _columns_table(found)]


def _classes_table(found: Inspection) -> Table:
    classes = counted(len(found.classes), "class", "classes")
    table = Table(title=classes)
    _add_names(table, "class")
    _add_numbers(table, "of all rows", "lowest", "highest")
    for rate in found.base_rates:
        extremes = [
            f"{percent(share)} {escape(name)}" for name, share in (rate.lowest, rate.highest)
        ]
        table.add_row(escape(rate.label), percent(rate.share), *extremes)
    if len(found.classes) > len(found.base_rates):
        table.caption = f"{len(found.classes) - len(found.base_rates)} more"
    return table


def _clients_table(found: Inspection) -> Table:
    rows = sum(client.rows for client in found.clients)
    table = Table(title=f"{counted(len(found.clients), 'client')}, {counted(rows, 'row')}")
    _add_names(table, "client")
    # without base rates the classes cannot be learned, so their counts do not matter
    labels = list(found.classes)[:_MOST_CLASSES] if found.base_rates else []
    of_numbers = any(client.target is not None for client in found.clients)
    _add_numbers(table, "rows", "missing", *(escape(f"class {label}") for label in labels))
    others = bool(labels) and len(found.classes) > len(labels)
    _add_numbers(table, *["other classes"] * others, "inputs differ by")
    _add_numbers(table, *["labels differ by"] * bool(labels))
    _add_numbers(table, *["mean of the label", "deviation"] * of_numbers)
    for client in found.clients[:_MOST_LINES]:
        cells = [escape(client.name), f"{client.rows:,}", percent(client.missing)]
        cells += [f"{client.classes.get(label, 0):,}" for label in labels]
        if others:
            shown = sum(client.classes.get(label, 0) for label in labels)
            cells.append(f"{sum(client.classes.values()) - shown:,}")
        cells.append(f"{client.marginal_shift:.2f} dev.")
        if labels:
            cells.append(percent(client.label_shift))
        if client.target is not None:
            cells += [f"{number:.4g}" for number in client.target]
        table.add_row(*cells)
    _add_rest(table, len(found.clients))
    table.caption = (
        "inputs: distance of the client's means from those of all clients, in standard deviations"
    )
    if labels:
        table.caption += (
            "; labels: share of rows that would need another label to match all clients"
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
            percent(column.missing),
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
        _add_names(table, "client")
        _add_numbers(table, "rows", "log-density")
        for name, own in list(clients.items())[:_MOST_LINES]:
            table.add_row(escape(str(name)), f"{own['rows']:,}", f"{own['log_density']:.3f}")
        _add_rest(table, len(clients))
        return table
    columns = {
        "mean_accuracy": "accuracy",
        "weighted_accuracy": "of all rows",
        "worst_decile": "worst tenth",
        "worst_accuracy": "worst client",
        "mean_log_loss": "log-loss",
    }
    if len(clients) < FEW_CLIENTS:
        del columns["worst_decile"]
    if metrics.get("leading_metric") == "average_precision":
        names = ("average_precision", "base_rate", "auc", "mean_accuracy", "mean_log_loss")
        columns = {name: columns.get(name, _title(name)) for name in names}
    if metrics.get("leading_metric") == "rmse":
        names = ("rmse", "r2", "coverage", "worst_rmse", "mean_log_loss")
        columns = {name: columns.get(name, _title(name)) for name in names}
    table.add_column("rows")
    _add_numbers(table, *columns.values())
    for split in ("train", "validation", "test"):
        own = metrics.get(split)
        if own is not None:
            table.add_row(split, *(_shown(name, own[name]) for name in columns))
    table.caption = "means over clients; every client has the same weight"
    if "rmse" in columns:
        table.caption = "of all rows together; the log-loss is a mean over clients"
    if "average_precision" in columns:
        table.caption = (
            "average precision, base rate and AUC of all rows; otherwise means over clients"
        )
    chosen = metrics.get("selection")
    if chosen is not None:
        sizes = (chosen["components"], "Gaussian"), (chosen["learners"], "learner")
        text = " and ".join(counted(*size) for size in sizes)
        table.caption += f"; {text}, chosen on validation rows"
    return table


_PERCENT = {"sensitivity", "specificity", "base_rate", "worst_decile", "coverage"}  # and accuracies


def _title(metric: str) -> str:
    from fedgmm.report.page import metric_title

    titles = {"worst_rmse": "worst client", "coverage": "coverage"}
    return titles.get(metric) or metric_title(metric)


def _shown(metric: str, value: float | None) -> str:
    """Return a metric as text; a dash if it is undefined."""
    if value is None or not np.isfinite(value):
        return "–"
    return percent(value) if metric in _PERCENT or metric.endswith("accuracy") else f"{value:.3f}"


def evaluation_table(found: Evaluation) -> Table:
    """Return the metrics of every client, the worst first, and their means."""
    table = Table(title=counted(len(found.clients), "client"))
    _add_names(table, "client")
    leading = found.leading_metric
    columns = ["accuracy", "auc", "log_loss", "calibration_error"]
    if leading == "average_precision":
        columns = [leading, "base_rate", "auc", "sensitivity"]
    if leading == "rmse":
        columns = list(found.metrics)
    columns = [name for name in columns if name in found.metrics]
    for column in ("rows", *map(_title, columns)):
        widest = max(map(len, column.split()))  # a title breaks between words only
        table.add_column(column, justify="right", min_width=widest)
    values = found.metrics[leading]
    order = -values if leading == "rmse" else values  # a large error is bad
    worst_first = np.argsort(order, kind="stable")  # undefined ones come last
    for index in worst_first[:_MOST_LINES].tolist():
        cells = [_shown(name, found.metrics[name][index]) for name in columns]
        table.add_row(escape(str(found.clients[index])), f"{found.rows[index]:,}", *cells)
    _add_rest(table, len(found.clients))
    table.add_section()
    rows = [_shown(name, found.pooled.get(name, np.nan)) for name in columns]
    total = ["all rows together", f"{int(found.rows.sum()):,}", *rows]
    if leading == "average_precision":  # a client with a few positive rows says little on its own
        table.add_row(*total, style="bold")
    else:
        means = [_shown(name, mean_of(found.metrics[name])) for name in columns]
        table.add_row("mean over clients", "", *means, style="bold")
        table.add_row(*total)
    if leading == "accuracy" and len(found.clients) >= FEW_CLIENTS:
        rest = [""] * (len(columns) - 1)
        table.add_row("nine of ten clients reach", "", percent(found.worst_decile), *rest)
    if any(np.isnan(found.metrics[name]).any() for name in columns):
        lack = "have one value" if leading == "rmse" else "lack a class"
        table.caption = f"–: undefined, because the rows of the client {lack}"
    return table


def pooled_table(found: Evaluation) -> Table | None:
    """Return the metrics of all rows together with their intervals; ``None`` without intervals."""
    if not found.pooled_intervals:
        return None
    threshold = None if found.predicted is None else found.predicted.decision.threshold
    title = "all rows together"
    if found.positive is not None:
        title += f", positive class {escape(str(found.positive))}"
    if threshold is not None:
        title += f", predicted from a probability of {threshold:.3g} on"
    table = Table(title=title)
    table.add_column("metric")
    _add_numbers(table, "value", "95 % interval")
    first = [name for name in (found.leading_metric, "base_rate") if name in found.pooled]
    for name in [*first, *(one for one in found.pooled if one not in first)]:
        ends = found.pooled_intervals.get(name, ())
        interval = " to ".join(_shown(name, end) for end in ends if np.isfinite(end))
        table.add_row(_title(name), _shown(name, found.pooled[name]), interval)
    return table


def confusion_table(found: Evaluation) -> Table | None:
    """Return how often each class was predicted as each class; ``None`` for many classes."""
    rows = found.predicted
    if rows is None or len(rows.classes) > _MOST_CLASSES:
        return None
    table = Table(title="true class by predicted class")
    table.add_column("rows of")
    _add_numbers(table, *(f"predicted {escape(str(name))}" for name in rows.classes))
    for name, counts in zip(rows.classes, found.confusion_matrix().tolist(), strict=True):
        table.add_row(escape(str(name)), *(f"{count:,}" for count in counts))
    return table


def importance_table(found: Importance) -> Table:
    """Return the columns by their importance, with the signs of coefficients if there are any."""
    table = Table(title="which columns decide")
    _add_names(table, "column")
    _add_numbers(table, "importance", "spread over clients")
    signed = None if found.coefficients is None else found.coefficients.mean(0)
    if signed is not None:
        target = "prediction" if found.of_numbers else "log-odds of the positive class"
        table.add_column(f"effect on the {target}", overflow="fold")
    for column in found.order[:_MOST_LINES]:
        name = found.columns[column]
        cells = [escape(name), f"{found.mean[column]:.3f}", f"{found.spread[column]:.3f}"]
        if signed is not None:
            own = [j for j, f in enumerate(found.features) if f == name or f.startswith(f"{name}=")]
            # the value itself comes before its indicator of missing values
            own = sorted(own, key=lambda j: (found.features[j] != name, -abs(signed[j])))
            effects = (
                f"{found.features[j].removeprefix(name).lstrip('=')} {signed[j]:+.2f}"
                for j in own[:_MOST_EFFECTS]
            )
            cells.append(escape(", ".join(effects).strip()))
        table.add_row(*cells)
    _add_rest(table, len(found.columns))
    table.caption = f"mean over clients of {found.meaning}"
    if signed is not None:
        table.caption += "; effects are per standard deviation"
    return table


def adaptation_table(found: Adapted) -> Table:
    """Return the weights of a new client and the gain in accuracy."""
    name = escape(str(found.adaptation.client))
    used = "labelled" if found.labelled else "unlabelled"
    title = f"{name} joined with {counted(found.rows, used + ' row')}"
    table = Table(title=title, min_width=48)  # wide enough for the title if there is one learner
    weights = found.adaptation.weights
    _add_numbers(table, "Gaussian", *(f"learner {m2 + 1}" for m2 in range(weights.shape[1])))
    for component, row in enumerate(weights):
        table.add_row(str(component + 1), *(f"{weight:.3f}" for weight in row))
    if found.curve:
        first, last = found.curve[0], found.curve[-1]
        table.caption = (
            f"accuracy on held-out rows: {percent(first['accuracy'])} with the federation's weights, "
            f"{percent(last['accuracy'])} with its own from {counted(round(last['rows']), 'row')}"
        )
    return table


def detection_table(found: Detection) -> Table:
    """Return a table with the number of novel rows of each client."""
    table = Table(title="novel rows")
    _add_names(table, "client")
    _add_numbers(table, "rows", "by its own threshold", "by that of all clients")
    for own in found.clients[:_MOST_LINES]:
        shares = (own[key] / own["rows"] for key in ("novel", "novel_for_all_clients"))
        table.add_row(escape(str(own["client"])), f"{own['rows']:,}", *map(percent, shares))
    _add_rest(table, len(found.clients))
    return table


def _add_names(table: Table, of: str) -> None:
    """Add a column of names; they are folded on a narrow screen, because a cut name is ambiguous."""
    table.add_column(of, overflow="fold")


def _add_numbers(table: Table, *titles: str) -> None:
    for title in titles:
        table.add_column(title, justify="right")


def _add_rest(table: Table, lines: int) -> None:
    if lines > _MOST_LINES:
        table.add_row(f"… {lines - _MOST_LINES} more", *[""] * (len(table.columns) - 1))
