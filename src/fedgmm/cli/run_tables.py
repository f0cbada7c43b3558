"""Terminal tables about files, runs and comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedgmm.report.contents import FEW_CLIENTS, mean_of
from fedgmm.report.page import metric_title
from fedgmm.wording import counted, percent

if TYPE_CHECKING:
    from fedgmm.data.tables.inspection import Inspection
    from fedgmm.experiments.demo import DemoResult
    from fedgmm.model.importance import Importance
    from fedgmm.model.metrics import Evaluation
    from fedgmm.runs.comparison import Tuning
    from fedgmm.runs.ranking import Ranking
    from fedgmm.runs.run import Adapted, Detection

_MOST_LINES = 60
_MOST_CLASSES = 6
_MOST_EFFECTS = 3
_PERCENT = {"sensitivity", "specificity", "base_rate", "worst_decile", "coverage"}  # and accuracies
_TITLES = {
    "mean_accuracy": "accuracy",
    "weighted_accuracy": "of all rows",
    "worst_decile": "worst tenth",
    "worst_accuracy": "worst client",
    "worst_rmse": "worst client",
    "mean_log_loss": "log-loss",
    "coverage": "coverage",
}
# Metrics of a split by the leading metric, and the caption of their table.
_OF_SPLIT: dict[str, tuple[tuple[str, ...], str]] = {
    "accuracy": (
        ("mean_accuracy", "weighted_accuracy", "worst_decile", "worst_accuracy", "mean_log_loss"),
        "means over clients; every client has the same weight",
    ),
    "average_precision": (
        ("average_precision", "base_rate", "auc", "mean_accuracy", "mean_log_loss"),
        "average precision, base rate and AUC of all rows; otherwise means over clients",
    ),
    "rmse": (
        ("rmse", "r2", "coverage", "worst_rmse", "mean_log_loss"),
        "of all rows together; the log-loss is a mean over clients",
    ),
}


def _table(
    title: str,
    names: str,
    numbers: Sequence[str],
    lines: Sequence[Sequence[str]],
    most: int = _MOST_LINES,
    **options: Any,
) -> Table:
    """Return a table of a column of names and columns of numbers; all texts are escaped.

    Lines beyond ``most`` are counted. Names are folded on a narrow screen, because a cut name is
    ambiguous.
    """
    table = Table(title=escape(title), **options)
    table.add_column(names, overflow="fold")
    for one in numbers:
        table.add_column(escape(one), justify="right")
    for line in lines[:most]:
        table.add_row(*map(escape, line))
    if len(lines) > most:
        table.add_row(f"… {len(lines) - most} more", *[""] * len(numbers))
    return table


def _title(metric: str) -> str:
    return _TITLES.get(metric) or metric_title(metric)


def _shown(metric: str, value: float | None) -> str:
    """Return a metric as text; a dash if it is undefined."""
    if value is None or not np.isfinite(value):
        return "–"
    return percent(value) if metric in _PERCENT or metric.endswith("accuracy") else f"{value:.3f}"


# ---------------------------------------------------------------------- files


def inspection_tables(found: Inspection) -> list[Table]:
    """Return tables of the clients, the classes and the columns of files."""
    tables = [_clients_table(found)]
    if found.base_rates:
        rates = [
            (
                rate.label,
                percent(rate.share),
                *(f"{percent(share)} {name}" for name, share in (rate.lowest, rate.highest)),
            )
            for rate in found.base_rates
        ]
        title = counted(len(found.classes), "class", "classes")
        tables.append(_table(title, "class", ("of all rows", "lowest", "highest"), rates))
        if len(found.classes) > len(rates):
            tables[-1].caption = f"{len(found.classes) - len(rates)} more"
    total = sum(column.outputs for column in found.columns)
    columns = counted(len(found.columns), "column, which becomes", "columns, which become")
    lines = [
        (one.name, one.role, percent(one.missing), str(one.outputs), one.detail)
        for one in found.columns
    ]
    titles = ("used as", "missing", "becomes", "detail")
    table = _table(f"{columns} {total}", "column", titles, lines)
    for own in table.columns[1:4]:
        own.no_wrap = True
    table.columns[1].justify = table.columns[4].justify = "left"
    table.columns[4].overflow = "fold"
    for row, one in zip(table.rows, found.columns, strict=False):  # long tables are cut
        row.style = "dim" if one.role == "ignored" else None
    return [*tables, table]


def _clients_table(found: Inspection) -> Table:
    # without base rates the classes cannot be learned, so their counts do not matter
    labels = list(found.classes)[:_MOST_CLASSES] if found.base_rates else []
    others = bool(labels) and len(found.classes) > len(labels)
    of_numbers = any(client.target is not None for client in found.clients)
    titles = ["rows", "missing", *(f"class {label}" for label in labels)]
    titles += [
        *["other classes"] * others,
        "inputs differ by",
        *["labels differ by"] * bool(labels),
    ]
    titles += ["mean of the label", "deviation"] * of_numbers
    lines = []
    for client in found.clients:
        cells = [client.name, f"{client.rows:,}", percent(client.missing)]
        counts = [client.classes.get(label, 0) for label in labels]
        cells += [f"{count:,}" for count in counts]
        cells += [f"{sum(client.classes.values()) - sum(counts):,}"] * others
        cells.append(f"{client.marginal_shift:.2f} dev.")
        cells += [percent(client.label_shift)] * bool(labels)
        if client.target is not None:
            cells += [f"{number:.4g}" for number in client.target]
        lines.append(cells)
    rows = counted(sum(client.rows for client in found.clients), "row")
    caption = (
        "inputs: distance of the client's means from those of all clients, in standard deviations"
    )
    if labels:
        caption += "; labels: share of rows that would need another label to match all clients"
    title = f"{counted(len(found.clients), 'client')}, {rows}"
    return _table(title, "client", titles, lines, caption=caption)


# ---------------------------------------------------------------------- runs


def metrics_table(metrics: dict[str, Any]) -> Table:
    """Return the metrics of a finished run per split; without labels, per client."""
    title = f"{metrics['algorithm']}, {counted(metrics['rounds'], 'round')}"
    clients = metrics.get("clients", {})
    if any("log_density" in own for own in clients.values()):
        densities = [
            (str(name), f"{own['rows']:,}", f"{own['log_density']:.3f}")
            for name, own in clients.items()
        ]
        return _table(title, "client", ("rows", "log-density"), densities)
    names, caption = _OF_SPLIT[metrics.get("leading_metric") or "accuracy"]
    if len(clients) < FEW_CLIENTS:
        names = tuple(name for name in names if name != "worst_decile")
    lines = [
        (split, *(_shown(name, metrics[split][name]) for name in names))
        for split in ("train", "validation", "test")
        if metrics.get(split) is not None
    ]
    if (chosen := metrics.get("selection")) is not None:
        sizes = (chosen["components"], "Gaussian"), (chosen["learners"], "learner")
        text = " and ".join(counted(*size) for size in sizes)
        caption += f"; {text}, chosen on held-out rows"
    return _table(title, "rows", list(map(_title, names)), lines, caption=caption)


def evaluation_table(found: Evaluation) -> Table:
    """Return the metrics of every client, the worst first, and their means."""
    leading = found.leading_metric
    wanted = {
        "average_precision": [leading, "base_rate", "auc", "sensitivity"],
        "rmse": list(found.metrics),
    }.get(leading, ["accuracy", "auc", "log_loss", "calibration_error"])
    columns = [name for name in wanted if name in found.metrics]
    values = found.metrics[leading]
    order = -values if leading == "rmse" else values  # a large error is bad
    lines = [
        (
            str(found.clients[index]),
            f"{found.rows[index]:,}",
            *(_shown(name, found.metrics[name][index]) for name in columns),
        )
        for index in np.argsort(order, kind="stable").tolist()  # undefined ones come last
    ]
    titles = ["rows", *map(_title, columns)]
    table = _table(counted(len(found.clients), "client"), "client", titles, lines)
    for column, title in zip(table.columns[1:], titles, strict=True):
        column.min_width = max(map(len, title.split()))  # a title breaks between words only
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
        title += f", positive class {found.positive}"
    if threshold is not None:
        title += f", predicted from a probability of {threshold:.3g} on"
    first = [name for name in (found.leading_metric, "base_rate") if name in found.pooled]
    lines = []
    for name in dict.fromkeys([*first, *found.pooled]):
        ends = found.pooled_intervals.get(name, ())
        interval = " to ".join(_shown(name, end) for end in ends if np.isfinite(end))
        lines.append((_title(name), _shown(name, found.pooled[name]), interval))
    return _table(title, "metric", ("value", "95 % interval"), lines)


def confusion_table(found: Evaluation) -> Table | None:
    """Return how often each class was predicted as each class; ``None`` for many classes."""
    rows = found.predicted
    if rows is None or len(rows.classes) > _MOST_CLASSES:
        return None
    lines = [
        (str(name), *(f"{count:,}" for count in counts))
        for name, counts in zip(rows.classes, found.confusion_matrix().tolist(), strict=True)
    ]
    titles = [f"predicted {name}" for name in rows.classes]
    return _table("true class by predicted class", "rows of", titles, lines)


def importance_table(found: Importance) -> Table:
    """Return the columns by their importance, with the signs of coefficients if there are any."""
    titles, caption = ["importance", "spread over clients"], f"mean over clients of {found.meaning}"
    signed = None if found.coefficients is None else found.coefficients.mean(0)
    if signed is not None:
        target = "prediction" if found.of_numbers else "log-odds of the positive class"
        titles.append(f"effect on the {target}")
        caption += "; effects are per standard deviation"
    lines = []
    for column in found.order:
        name = found.columns[column]
        cells = [name, f"{found.mean[column]:.3f}", f"{found.spread[column]:.3f}"]
        if signed is not None:
            own = [j for j, f in enumerate(found.features) if f == name or f.startswith(f"{name}=")]
            # the value itself comes before its indicator of missing values
            own = sorted(own, key=lambda j: (found.features[j] != name, -abs(signed[j])))
            effects = (
                f"{found.features[j].removeprefix(name).lstrip('=')} {signed[j]:+.2f}"
                for j in own[:_MOST_EFFECTS]
            )
            cells.append(", ".join(effects).strip())
        lines.append(cells)
    table = _table("which columns decide", "column", titles, lines, caption=caption)
    if signed is not None:
        table.columns[-1].justify, table.columns[-1].overflow = "left", "fold"
    return table


def adaptation_table(found: Adapted) -> Table:
    """Return the weights of a new client and the gain in accuracy."""
    used = "labelled" if found.labelled else "unlabelled"
    title = f"{found.adaptation.client} joined with {counted(found.rows, used + ' row')}"
    weights, caption = found.adaptation.weights, None
    if found.curve:
        first, last = found.curve[0], found.curve[-1]
        caption = (
            f"accuracy on held-out rows: {percent(first['accuracy'])} with the federation's weights, "
            f"{percent(last['accuracy'])} with its own from {counted(round(last['rows']), 'row')}"
        )
    lines = [(str(m1 + 1), *(f"{one:.3f}" for one in row)) for m1, row in enumerate(weights)]
    titles = [f"learner {m2 + 1}" for m2 in range(weights.shape[1])]
    # wide enough for the title if there is one learner
    table = _table(title, "Gaussian", titles, lines, min_width=48, caption=caption)
    table.columns[0].justify = "right"
    return table


def detection_table(found: Detection) -> Table:
    """Return a table with the number of novel rows of each client."""
    lines = [
        (
            str(own["client"]),
            f"{own['rows']:,}",
            *(percent(own[key] / own["rows"]) for key in ("novel", "novel_for_all_clients")),
        )
        for own in found.clients
    ]
    titles = ("rows", "by its own threshold", "by that of all clients")
    return _table("novel rows", "client", titles, lines)


# ---------------------------------------------------------------------- demonstration, comparisons


def demo_table(found: DemoResult, most: int = 12) -> Table:
    """Return the rows, true and learned weights, and their error of each client."""
    lines = [
        (
            str(name),
            f"{len(rows):,}",
            *("  ".join(f"{weight:.2f}" for weight in own) for own in weights),
            f"{error:.3f}",
        )
        for (name, rows), error, *weights in zip(
            found.data.rows.items(),
            found.weight_errors,
            found.data.weights,
            found.weights,
            strict=True,
        )
    ]
    titles = ("rows", "true weights", "learned weights", "error")
    caption = "error: half the sum of absolute differences, from 0 (equal) to 1"
    table = _table(
        "Components of each client's data", "client", titles, lines, most, caption=caption
    )
    table.add_section()
    total = sum(map(len, found.data.rows.values()))
    table.add_row("all", f"{total:,}", "", "", f"{found.weight_errors.mean():.3f}")
    return table


def comparison_table(ranking: Ranking, title: str, bayes: float | None = None) -> Table:
    """Return a ranking: metric, distance to the best, and each learner.

    A star marks the kind of learner that validation rows chose.
    """
    from fedgmm.methods.base import TITLES
    from fedgmm.runs.comparison import LEARNER_TITLES

    standings = ranking.standings
    kinds = list(dict.fromkeys(kind for one in standings for kind in one.by_learner))
    kinds = kinds if len(kinds) > 1 else []
    numbers = ranking.metric == "r2"
    metric = {"mean_accuracy": "accuracy", "r2": "R² (%)"}.get(ranking.metric, "avg. precision")
    titles = [metric, "to best", *(LEARNER_TITLES.get(kind, kind) for kind in kinds)]
    titles += ["RMSE" if numbers else "log-loss", "rate"]

    def error(metrics: Mapping[str, float]) -> str:
        return f"{metrics['rmse']:.4g}" if numbers else f"{metrics['mean_log_loss']:.3f}"

    lines = []
    for one in standings:
        lead = "tie" if one.lead.within_noise else f"{100 * one.lead.mean:+.1f}"
        rates = ["exact" if rate is None else f"{rate:.2g}" for rate in one.rates]
        shares = (
            f"{100 * one.by_learner[kind]:.1f}{'*' if kind in one.learners else ' '}"
            for kind in kinds
        )
        lines.append(
            (
                TITLES[one.algorithm],
                f"{100 * one.value.mean:.1f} ± {50 * (one.value.high - one.value.low):.1f}",
                "best" if one is ranking.best else lead,
                *shares,
                error(one.summary),
                " ".join(dict.fromkeys(rates)),
            )
        )
    layout: dict[str, Any] = {"caption": ranking.unit, "caption_justify": "left"}
    table = _table(title, "method", titles, lines, box=SIMPLE_HEAD, **layout)
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row, one in zip(table.rows, standings, strict=True):
        row.style = "bold" if one.lead.within_noise else None
    table.add_section()
    for name, metrics in ranking.pooled.items():
        value, blank = f"{100 * metrics[ranking.metric]:.1f}", [""] * (1 + len(kinds))
        table.add_row(f"pooled: {name}", value, *blank, error(metrics), style="dim")
    if bayes is not None:
        table.add_row("best possible", f"{100 * bayes:.1f}", style="dim")
    return table


def tuning_table(tuning: Tuning, title: str) -> Table:
    """Return the validation log-likelihood of each learning rate."""
    lines = [
        (f"{rate:.3g}", f"{score:.4f}" if np.isfinite(score) else "diverged")
        for rate, score in tuning.scores.items()
    ]
    table = _table(title, "learning rate", ["validation log-likelihood"], lines)
    table.columns[0].justify = "right"
    for row, rate in zip(table.rows, tuning.scores, strict=False):
        row.style = "bold" if rate == tuning.best else None
    return table
