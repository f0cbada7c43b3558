"""The report as one HTML file that needs nothing else: no network, no second file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from fedgmm.files import write_atomically
from fedgmm.report.charts import ACCENT, percent, rival_colour
from fedgmm.report.contents import ClientTable, ReportContents, mean_of
from fedgmm.report.sections import Section, sections_of, verdict
from fedgmm.wording import counted

# Addresses in plotly.js (maps, licences), other than the names of XML's own vocabularies.
_ADDRESS = re.compile(r"https?://(?!www\.w3\.org/)[^\s\"'`<>\\)]*")


def write_report(contents: ReportContents, path: str | Path) -> Path:
    """Write the page; its folder is made if it is missing."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, render(contents).encode("utf-8"))
    return target


def render(contents: ReportContents) -> str:
    """The whole page."""
    parts = sections_of(contents)
    figures = {part.key: json.loads(part.draw().to_json()) for part in parts if part.draw}
    scripts = [_plotly(), _asset("report.js")]
    title = _text(contents.title)
    body = "\n".join(
        [
            _header(contents),
            _notes(contents.notes),
            _contents_list(parts),
            '<main class="grid">',
            *(_section(part, contents) for part in parts),
            _client_table(contents),
            _settings(contents),
            "</main>",
        ]
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{_asset("report.css")}
</style>
</head>
<body>
{body}
<noscript><p class="note">Charts, sorting and filtering need JavaScript.</p></noscript>
<script type="application/json" id="figures">{_json_in_html(figures)}</script>
{"".join(f"<script>{script}</script>" for script in scripts)}
</body>
</html>
"""


# ---------------------------------------------------------------------- what keeps the page closed


def _text(value: object) -> str:
    """A given text as HTML that shows it; what no browser can show becomes a question mark."""
    shown = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "�", str(value))
    return html.escape(shown.encode("utf-8", "replace").decode("utf-8"))


def _json_in_html(values: Any) -> str:
    """JSON that neither ends the script it stands in nor opens a comment."""
    text = json.dumps(values, separators=(",", ":"))  # beyond ASCII all is escaped already
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


@cache
def _plotly() -> str:
    """plotly.js without any address it could call."""
    from plotly.offline import get_plotlyjs

    return _ADDRESS.sub("about:blank", _one_line_ending(get_plotlyjs()))


@cache
def _asset(name: str) -> str:
    folder = resources.files("fedgmm.report") / "assets"
    return _one_line_ending((folder / name).read_text(encoding="utf-8"))


def _one_line_ending(text: str) -> str:
    """As a browser reads it, so that the hash of a script is the browser's."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _policy(scripts: Iterable[str]) -> str:
    """Nothing may be loaded, and only these scripts may run."""
    hashes = " ".join(
        "'sha256-" + base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() + "'"
        for one in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


# ---------------------------------------------------------------------- parts


def _of_rows(table: ClientTable) -> str:
    """A client with one row counts as much as a large one in the mean, so the rows are told, too."""
    if not math.isfinite(table.row_accuracy):
        return "of clients, on test rows"
    return f"of clients, on test rows; {percent(table.row_accuracy)} of all test rows"


def _header(contents: ReportContents) -> str:
    table = contents.clients
    worst, baseline = contents.worst_client, contents.best_rival
    model = (
        f"{counted(contents.learners, 'learner')}, {counted(contents.classes, 'class', 'classes')}"
    )
    if contents.components:
        model = f"{counted(contents.components, 'Gaussian')}, {model}"
    figures = [
        ("Method", _text(contents.method), model),
        ("Clients", f"{len(table.names):,}", f"{counted(int(table.rows.sum()), 'row')} in all"),
        ("Mean accuracy", percent(contents.mean_accuracy), _of_rows(table)),
        (
            "Worst client",
            "–" if worst is None else percent(table.accuracy[worst]),
            "" if worst is None else _text(table.names[worst]),
        ),
        (
            "Best baseline",
            "–" if baseline is None else percent(mean_of(contents.baselines[baseline])),
            "none was run" if baseline is None else _text(baseline),
        ),
    ]
    cards = "".join(
        f'<div class="card"><dt>{name}</dt><dd>{value}<small>{detail}</small></dd></div>'
        for name, value, detail in figures
    )
    return f"""<header>
<div class="top"><p class="kind">Report of a federated run</p>
<button type="button" id="theme" aria-live="polite">Dark</button></div>
<h1>{_text(contents.title)}</h1>
<p class="verdict">{_text(verdict(contents))}</p>
<dl class="cards">{cards}</dl>
</header>"""


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{_text(note)}</li>" for note in notes)
    return f'<aside class="note" aria-label="Notes"><h2>Notes</h2><ul>{items}</ul></aside>'


def _contents_list(parts: Sequence[Section]) -> str:
    names = {part.key: part.key.capitalize() for part in parts if part.draw}
    names |= {"clients": "All clients", "settings": "Settings"}
    links = "".join(f'<a href="#{key}">{name}</a>' for key, name in names.items())
    return f'<nav aria-label="Parts of the page">{links}</nav>'


def _section(part: Section, contents: ReportContents) -> str:
    if part.draw is None:
        body = f'<p class="absent">{_text(part.caption)}</p>'
    else:
        body = f'<p>{_text(part.caption)}</p><div class="chart" id="chart-{part.key}"></div>'
        body += _method_table(contents) if part.key == "accuracy" and contents.baselines else ""
    width = " wide" if part.wide else ""
    return f'<section id="{part.key}" class="panel{width}"><h2>{_text(part.heading)}</h2>{body}</section>'


def _method_table(contents: ReportContents) -> str:
    """The methods side by side."""
    own = contents.clients.accuracy
    methods = [(contents.method, own, ACCENT)]
    methods += [(n, v, rival_colour(k)) for k, (n, v) in enumerate(contents.baselines.items())]
    rows = ""
    for name, values, colour in methods:
        known = values[np.isfinite(values)]
        both = np.isfinite(own) & np.isfinite(values)
        worst, tenth = (known.min(), np.quantile(known, 0.1)) if len(known) else (np.nan,) * 2
        beaten = "" if values is own else f"{int((own > values)[both].sum()):,}"
        lost = "" if values is own else f"{int((own < values)[both].sum()):,}"
        rows += (
            f'<tr><th scope="row"><i style="background:{colour}"></i>{_text(name)}</th>'
            f"<td>{percent(mean_of(values))}</td><td>{percent(float(tenth))}</td>"
            f"<td>{percent(float(worst))}</td><td>{beaten}</td><td>{lost}</td></tr>"
        )
    return f"""<div class="box"><table class="methods">
<thead><tr><th scope="col">method</th><th scope="col">mean of clients</th>
<th scope="col">nine of ten reach</th><th scope="col">worst client</th>
<th scope="col">clients it serves worse</th><th scope="col">better</th></tr></thead>
<tbody>{rows}</tbody></table></div>"""


# ---------------------------------------------------------------------- every client


def _client_table(contents: ReportContents) -> str:
    table = contents.clients
    columns: list[tuple[str, list[str]]] = [
        ("client", list(map(_text, table.names))),
        ("rows", [f"{count:,}" for count in table.rows]),
        ("training rows", [f"{count:,}" for count in table.train_rows]),
        ("test accuracy", list(map(percent, table.accuracy))),
        ("log-loss", _decimals(table.log_loss)),
        ("calibration error", _decimals(table.calibration_error)),
    ]
    if table.strongest is not None and table.share is not None:
        columns += [
            ("strongest component", list(map(_text, table.strongest))),
            ("its share", list(map(percent, table.share))),
        ]
    if table.novel_share is not None:
        columns.append(("novel rows", list(map(percent, table.novel_share))))
    texts = ("client", "strongest component")
    heads = "".join(
        f'<th scope="col" aria-sort="none" data-kind="{"text" if name in texts else "number"}">'
        f'<button type="button">{name}</button></th>'
        for name, _ in columns
    )
    rows = "\n".join(
        f'<tr><th scope="row">{name}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
        for name, *cells in zip(*(cells for _, cells in columns), strict=True)
    )
    count = counted(len(table.names), "client")
    return f"""<section id="clients" class="panel wide"><h2>All clients</h2>
<p>Every figure of every client. Click a heading to sort by it, once more to turn the order round.
Log-loss and calibration error are better when they are small.</p>
<div class="tools"><label for="filter">Filter</label>
<input type="search" id="filter" placeholder="part of a name or of a figure" autocomplete="off">
<output id="count" for="filter" aria-live="polite">{count}</output></div>
<div class="box tall" tabindex="0" role="region" aria-label="Table of all clients">
<table id="table"><thead><tr>{heads}</tr></thead>
<tbody>
{rows}
</tbody></table></div></section>"""


def _decimals(values: Iterable[float]) -> list[str]:
    return [f"{value:.3f}" if np.isfinite(value) else "–" for value in values]


def _settings(contents: ReportContents) -> str:
    groups = (
        ("What was asked for", contents.configuration),
        ("What it ran on", contents.environment),
    )
    lists = "".join(
        f"<div><h3>{heading}</h3><dl>"
        + "".join(f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in values.items())
        + "</dl></div>"
        for heading, values in groups
        if values
    )
    return f"""<section id="settings" class="panel wide"><h2>Settings</h2>
<p>What the run was asked for, and what it ran on.</p><div class="settings">{lists}</div></section>"""
