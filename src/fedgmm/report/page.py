"""The report as one HTML file that opens offline: no network, no second file.

The words and the layout of the page are in ``templates/``. This module computes the values that the
templates show, and makes sure that no text of a user can act in the page. Its data come from
:mod:`fedgmm.report.gathering`; :mod:`fedgmm.runs.reporting` calls both for a run folder.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgmm.files import write_atomically
from fedgmm.report.contents import (
    FALSE_ALARM_RATE,
    FEW_CLIENTS,
    MOST_CLIENTS_IN_CHARTS,
    MOST_POINTS,
    ReportContents,
    evenly,
    mean_of,
    percent,
)
from fedgmm.wording import counted

if TYPE_CHECKING:
    from jinja2 import Environment

# Addresses in plotly.js (maps, licences), other than the names of XML's own vocabularies.
_ADDRESS = re.compile(r"https?://(?!www\.w3\.org/)[^\s\"'`<>\\)]*")
_SHARES = {"accuracy", "balanced_accuracy", "sensitivity", "specificity", "base_rate", "coverage"}
_METRIC_TITLES = {
    "auc": "AUC",
    "log_loss": "log-loss",
    "brier": "Brier score",
    "rmse": "RMSE",
    "r2": "R²",
    "coverage": "inside 90% intervals",
}
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def write_report(contents: ReportContents, path: str | Path) -> Path:
    """Write the page and return its path; a missing folder is created."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, render(contents).encode("utf-8"))
    return target


def render(contents: ReportContents) -> str:
    """Return the whole page as HTML."""
    from fedgmm.report.charts import draw_charts

    figures = {key: json.loads(figure.to_json()) for key, figure in draw_charts(contents).items()}
    scripts = [_plotly(), _file("report.js")]
    page = templates().get_template("page.html")
    return page.render(
        contents=contents,
        verdict=verdict(contents),
        methods=_compared_methods(contents),
        metrics=_metric_rows(contents),
        figures=figures,
        tables=_chart_tables(contents),
        policy=_policy(scripts),
        style=_file("report.css"),
        scripts=scripts,
    )


def render_watch(name: str) -> tuple[str, str]:
    """Return the live page of a run as HTML, and the policy to send with it."""
    script = _file("watch.js")
    page = templates().get_template("watch.html")
    policy = f"{_policy([script])}; connect-src 'self'; frame-ancestors 'none'"
    return page.render(name=name, style=_file("report.css"), script=script), policy


def _printable(value: Any) -> Any:
    """Replace characters that no browser shows or that UTF-8 cannot encode; keep trusted markup."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    shown = _CONTROL_CHARACTER.sub("\N{REPLACEMENT CHARACTER}", value)
    return shown.encode("utf-8", "replace").decode("utf-8")


@cache
def templates(finalize: Callable[[Any], Any] = _printable, autoescape: bool = True) -> Environment:
    """Return the templates; ``finalize`` makes a value safe, ``autoescape`` is for HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # only reports need it

    environment = Environment(
        loader=PackageLoader("fedgmm.report"),
        autoescape=autoescape,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {
        "counted": counted,
        "percent": percent,
        "thousands": lambda number: f"{number:,}",
        "decimal": lambda number: f"{number:.3f}" if np.isfinite(number) else "–",
    }
    environment.globals |= {
        "mean_of": mean_of,
        "FALSE_ALARM_RATE": FALSE_ALARM_RATE,
        "FEW_CLIENTS": FEW_CLIENTS,
        "MOST_CLIENTS_IN_CHARTS": MOST_CLIENTS_IN_CHARTS,
        "MOST_POINTS": MOST_POINTS,
    }
    return environment


# ---------------------------------------------------------------------- scripts and their policy


@cache
def _plotly() -> str:
    """Return plotly.js without the addresses it could contact."""
    from plotly.offline import get_plotlyjs

    return _ADDRESS.sub("about:blank", _unix_line_ends(get_plotlyjs()))


@cache
def _file(name: str) -> str:
    """Return the text of a file in ``templates/`` that is not a template."""
    folder = resources.files("fedgmm.report") / "templates"
    return _unix_line_ends((folder / name).read_text(encoding="utf-8"))


def _unix_line_ends(text: str) -> str:
    """Return the text as a browser reads it, because a browser hashes scripts in that form."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _policy(scripts: Iterable[str]) -> str:
    """Return a content security policy: load nothing, and run only these scripts."""
    hashes = " ".join(
        "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"
        for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


# ---------------------------------------------------------------------- charts as tables

_Table = tuple[list[str], list[list[str]]]
_MOST_LINES = 200  # of a table beside a chart


def _chart_tables(contents: ReportContents) -> dict[str, _Table]:
    """Return heading and lines of a table for each chart, for readers who do not see the chart."""
    table, names, found = contents.clients, contents.clients.names, {}
    measure = "R²" if contents.numbers else "accuracy"
    known = np.flatnonzero(np.isfinite(table.accuracy))
    order = known[np.argsort(-table.accuracy[known], kind="stable")]
    ends = np.full((len(names), 2), np.nan) if table.interval is None else table.interval
    found["accuracy"] = (
        ["client", measure, "95% interval", *contents.baselines],
        [
            [
                names[c],
                percent(table.accuracy[c]),
                " to ".join(map(percent, ends[c])),
                *(percent(values[c]) for values in contents.baselines.values()),
            ]
            for c in order[evenly(len(order), _MOST_LINES)]
        ],
    )
    values = [
        dict(zip(one.rounds.tolist(), one.values, strict=True)) for one in contents.convergence
    ]
    rounds = sorted({number for one in values for number in one})
    found["convergence"] = (
        ["round", *(one.title for one in contents.convergence)],
        [
            [f"{number:.0f}", *(f"{one[number]:.4f}" if number in one else "–" for one in values)]
            for number in (rounds[k] for k in evenly(len(rounds), _MOST_LINES))
        ],
    )
    if (seen := contents.reliability) is not None:
        lines = zip(seen.confidence, seen.accuracy, seen.counts, strict=True)
        found["calibration"] = (
            ["level", "inside", "rows"] if contents.numbers else ["confidence", measure, "rows"],
            [[percent(a), percent(b), f"{n:,}"] for a, b, n in lines],
        )
    if (columns := contents.deciding) is not None:
        numbers = np.stack([columns.mean, columns.least, columns.most], -1)
        found["columns"] = (
            ["column", "mean", "least", "most"],
            [
                [n, *(f"{v:.3f}" for v in own)]
                for n, own in zip(columns.names, numbers, strict=True)
            ],
        )
    if (weights := contents.weights) is not None:
        shown = evenly(len(weights.clients), _MOST_LINES)
        found["weights"] = (
            ["client", *weights.pairs],
            [[names[weights.clients[k]], *(f"{v:.2f}" for v in weights.values[k])] for k in shown],
        )
    if (plane := contents.projection) is not None:
        nearest = np.bincount(plane.strongest, minlength=len(plane.shares))
        found["projection"] = (
            ["Gaussian", "share of all rows", "clients with its colour"],
            [[f"G{m + 1}", percent(s), f"{nearest[m]:,}"] for m, s in enumerate(plane.shares)],
        )
    if (rows := contents.densities) is not None:
        marked = np.zeros(len(rows.log_x), bool) if rows.novel is None else rows.novel
        found["densities"] = (
            ["rows", "number", "median of log P(x)", "median of log P(y|x)"],
            [
                [
                    kind,
                    f"{here.sum():,}",
                    *(f"{np.median(v[here]):.2f}" for v in (rows.log_x, rows.log_y)),
                ]
                for kind, here in (("usual", ~marked), ("novel", marked))
                if here.any()
            ],
        )
    joined = [
        [one.client, f"{rows:,}", percent(accuracy)]
        for one in contents.adaptations
        for rows, accuracy in zip(one.rows, one.accuracy or [np.nan] * len(one.rows), strict=True)
    ]
    found["adaptation"] = (["client", "rows", measure], joined)
    return found


# ---------------------------------------------------------------------- comparison of methods


def _compared_methods(contents: ReportContents) -> list[dict[str, Any]]:
    """Summarise the accuracies of each method over clients, the report's own method first."""
    from fedgmm.report.charts import ACCENT, baseline_colour

    own = contents.clients.accuracy
    methods = [(contents.method, own), *contents.baselines.items()]
    compared = []
    for number, (name, values) in enumerate(methods):
        known, lead = values[np.isfinite(values)], ""
        if number:
            ahead = contents.lead(name)  # in percentage points
            tie = " (tie)" if ahead.within_noise else ""
            lead = f"{100 * ahead.mean:+.1f}{tie}" if np.isfinite(ahead.mean) else "–"
        compared.append(
            {
                "name": name,
                "colour": baseline_colour(number - 1) if number else ACCENT,
                "clients": len(known),
                "mean": mean_of(values),
                "tenth": np.quantile(known, 0.1) if len(known) >= FEW_CLIENTS else np.nan,
                "worst": known.min() if len(known) else np.nan,
                "below": int((own > values).sum()),  # false where either is unknown
                "above": int((own < values).sum()),
                "lead": lead,
            }
        )
    return compared


def _metric_rows(contents: ReportContents) -> list[dict[str, str]]:
    """Return name, value and interval of each metric of all test rows, the main one first."""
    if contents.evaluation is None:
        return []
    values, intervals = contents.evaluation.pooled, contents.evaluation.pooled_intervals
    first = [name for name in (contents.evaluation.leading_metric, "base_rate") if name in values]
    return [
        {
            "name": metric_title(name),
            "value": metric_text(name, values[name]),
            "interval": " to ".join(
                metric_text(name, end) for end in intervals.get(name, ()) if np.isfinite(end)
            ),
        }
        for name in dict.fromkeys([*first, *values])
    ]


def metric_title(name: str) -> str:
    """Return the words for a metric."""
    return _METRIC_TITLES.get(name, name.replace("_", " "))


def metric_text(name: str, value: float) -> str:
    """Return the value of a metric as text; a dash if it is not defined."""
    if name in _SHARES:
        return percent(value)
    return f"{value:{'.4g' if name == 'rmse' else '.3f'}}" if np.isfinite(value) else "–"


def verdict(contents: ReportContents) -> str:
    """Summarise in one sentence whether the method is worth using, for readers who decide."""
    own, baseline = contents.mean_accuracy, contents.best_baseline
    if not np.isfinite(own):
        return "There were no test rows, so this page cannot say how good the predictions are."
    if baseline is None:
        found = f"{contents.method} predicts {own:.1%} of an average client's test rows correctly."
        if contents.evaluation is not None and contents.evaluation.leading_metric != "accuracy":
            found = contents.evaluation.headline()
        return (
            f"{found} No other method was run, so this page cannot say whether a simpler one would do "
            "as well."
        )
    values = contents.baselines[baseline]
    both = np.isfinite(values) & np.isfinite(contents.clients.accuracy)
    at_least = (contents.clients.accuracy >= values)[both].sum()
    as_well = f"{int(at_least):,} of {counted(int(both.sum()), 'client')}"
    lead = contents.lead(baseline)
    points = 100.0 * lead.mean
    if not np.isfinite(lead.low):
        return (
            f"{contents.method} and {baseline}, the best of the other methods, differ by {points:+.1f} "
            f"percentage points on average; {as_well} do at least as well with {contents.method}. "
            f"{counted(int(both.sum()), 'client')} are too few to rule out chance; fedgmm compare "
            "tests it on their rows."
        )
    interval = f"(95% interval {100 * lead.low:+.1f} to {100 * lead.high:+.1f})"
    if lead.within_noise:
        return (
            f"A tie: {contents.method} and {baseline}, the best of the other methods, differ by no "
            f"more than noise, {points:+.1f} percentage points {interval}; {as_well} do at least as "
            f"well with {contents.method}."
        )
    if points > 0:
        return (
            f"An average client gains {points:.1f} percentage points over {baseline}, the best of the "
            f"other methods {interval}, and {as_well} do at least as well."
        )
    return (
        f"{baseline} is better here: an average client would gain {-points:.1f} percentage points with "
        f"it {interval}, though {as_well} do at least as well with {contents.method}."
    )
