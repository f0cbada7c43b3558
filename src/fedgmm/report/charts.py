"""The charts of the report: one function per chart takes plain values and returns a plotly figure.

Colours of the page (ink, grid, background) are set in the browser because they differ between light
and dark. Colours that carry meaning are set here: a method or a component has the same colour in all
charts. Importing this module loads plotly, so other modules import it only to draw.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fedgmm.report.contents import (
    MOST_CLIENTS_IN_CHARTS,
    AdaptationRecord,
    DecidingColumns,
    DensityScatter,
    FloatArray,
    Reliability,
    ReportContents,
    Series,
    WeightMap,
    evenly,
    percent,
)
from fedgmm.report.plots import COLOURS

ACCENT = "#4C78DB"
"""The colour of the method that the report is about."""

# Distinguishable with any kind of colour vision (Paul Tol); none is a component's colour.
_BASELINES = ("#CC6677", "#B59F3B", "#44AA99", "#AA4499", "#7FB8D6", "#7A7A2E", "#882255")
_BASELINE_SYMBOLS = (
    "diamond", "square", "triangle-up", "cross", "star", "hexagon", "pentagon",
)  # fmt: skip
_COMPONENTS = COLOURS[:6]  # the last two are invisible on a white or on a black page
_NOVEL = "#D81B60"
_GREY = "#8A8F98"
_DASHES = ("solid", "dash", "dot", "dashdot")

_FEW_ROUNDS = 10
_MOST_NAMED_CLIENTS = 40
_MOST_NAMED_PAIRS = 24
_LONGEST_NAME = 40
_LONGEST_AXIS_TITLE = 43  # characters that fit the height of the chart


def draw_charts(contents: ReportContents) -> dict[str, Any]:
    """Return the charts that apply, by the id of their section, in the order of the page."""
    names = contents.clients.names
    drawn: dict[str, Any] = {}
    if np.isfinite(contents.clients.accuracy).any():
        drawn["accuracy"] = accuracies(contents)
    if contents.convergence:
        drawn["convergence"] = convergence(contents.convergence)
    if contents.reliability is not None:
        drawn["calibration"] = calibration(contents.reliability, contents.numbers)
    if contents.deciding is not None:
        drawn["columns"] = deciding_columns(contents.deciding)
    if contents.weights is not None:
        drawn["weights"] = weights(contents.weights, names, contents.components)
    if contents.projection is not None:
        drawn["projection"] = projection(contents)
    if contents.densities is not None:
        drawn["densities"] = densities(contents.densities, names)
    if contents.adaptations:
        drawn["adaptation"] = adaptation(contents.adaptations, contents.numbers)
    return drawn


# ---------------------------------------------------------------------- shared by all charts


def component_colour(component: int) -> str:
    """Return the colour of a Gaussian; colours repeat."""
    return _COMPONENTS[component % len(_COMPONENTS)]


def baseline_colour(baseline: int) -> str:
    """Return the colour of another method; colours repeat."""
    return _BASELINES[baseline % len(_BASELINES)]


def safe_text(text: str, longest: int = _LONGEST_NAME) -> str:
    """Return a user's text on one line, cut and escaped, because plotly interprets tags."""
    shown = re.sub(r"\s+", " ", text)
    if len(shown) > longest:
        shown = shown[: longest - 1] + "…"
    return html.escape(shown, quote=False)


def share_range(shares: Sequence[float] | FloatArray) -> list[float]:
    """Return the range of an axis, wide enough that small changes do not look large."""
    low, high = float(np.min(shares)), float(np.max(shares))
    spare = max(0.05, 0.1 * (high - low))
    return [max(low - spare, -0.01), min(high + spare, 1.01)]  # without ticks beyond 0 and 100 %


def _layout(height: int, **layout: Any) -> dict[str, Any]:
    return {
        "template": None,
        "height": height,
        "margin": {"l": 56, "r": 16, "t": 40, "b": 48},
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13},
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        **layout,
    }


def _panels(heights: Sequence[float], height: int, **options: Any) -> Any:
    """Return a figure with panels below each other; ``heights`` are relative."""
    figure = make_subplots(rows=len(heights), cols=1, row_heights=list(heights), **options)
    figure.update_layout(_layout(height))
    figure.update_annotations(x=0, xanchor="left", font_size=13)  # titles of the panels
    return figure


def spread_out(points: FloatArray, step: float) -> FloatArray:
    """Return points ``(n, 2)`` of which those in the same square of side ``step`` form a spiral."""
    _, group = np.unique(np.round(points / step), axis=0, return_inverse=True)
    place = np.zeros(len(points))
    for number in np.unique(group):
        here = np.flatnonzero(group.ravel() == number)
        place[here] = np.arange(len(here))
    angle, radius = place * np.pi * (3.0 - np.sqrt(5.0)), step * np.sqrt(place)
    return np.asarray(points + radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], -1))


def _in_colour(text: str, component: int) -> str:
    return f'<span style="color:{component_colour(component)}"><b>{text}</b></span>'


# ---------------------------------------------------------------------- one function per chart


def accuracies(contents: ReportContents) -> Any:
    """Draw the clients from the least accurate, at the bottom, with intervals and the baselines."""
    own = contents.clients.accuracy
    order = np.argsort(own, kind="stable")[: int(np.isfinite(own).sum())]
    order = order[evenly(len(order), MOST_CLIENTS_IN_CHARTS)]
    names = [safe_text(contents.clients.names[client]) for client in order]
    few, methods = len(order) <= _MOST_NAMED_CLIENTS, len(contents.baselines) + 1
    height = 120 + len(order) * max(28, 14 * methods) if few else 640
    figure = go.Figure(layout=_layout(height, showlegend=methods > 1))
    # marks of one client stand below each other, so that equal values do not hide each other
    offsets = np.linspace(0.28, -0.28, methods) if few and methods > 1 else np.zeros(methods)
    interval = contents.clients.interval
    ends = np.full((len(order), 2), np.nan) if interval is None else interval[order]
    reach = [
        f"<br>95% interval {low:.1%} to {high:.1%}" if np.isfinite(low) else ""
        for low, high in ends
    ]

    def draw(
        number: int, method: str, values: FloatArray, texts: Sequence[str], **marks: Any
    ) -> None:
        figure.add_scatter(
            x=values,
            y=np.arange(len(order)) + offsets[number],
            name=safe_text(method),
            mode="markers",
            customdata=list(zip(names, texts, strict=True)),
            hovertemplate="%{customdata[0]}<br>%{fullData.name}: %{x:.1%}%{customdata[1]}<extra></extra>",
            **marks,
        )

    for number, (method, values) in enumerate(contents.baselines.items()):
        marker = {
            "color": baseline_colour(number),
            "symbol": _BASELINE_SYMBOLS[number % len(_BASELINE_SYMBOLS)],
            "size": 9 if few else 5,
            "opacity": 0.9 if few else 0.55,
        }
        draw(number, method, values[order], [""] * len(order), marker=marker)
    bars = {
        "type": "data",
        "array": ends[:, 1] - own[order],
        "arrayminus": own[order] - ends[:, 0],
        "thickness": 2 if few else 0.7,
        "width": 0,
    }
    marker = {"color": ACCENT, "size": 10 if few else 4}
    draw(methods - 1, contents.method, own[order], reach, marker=marker, error_x=bars)
    title = "R² on test rows" if contents.numbers else "accuracy on test rows"
    figure.update_xaxes(title_text=title, tickformat="~%", zeroline=False)
    figure.update_yaxes(zeroline=False, automargin=True, range=[-0.7, len(order) - 0.3])
    if few:
        # lines between the clients, not through them, show which marks belong together
        between = {"tickvals": np.arange(len(order) + 1) - 0.5, "showgrid": True}
        figure.update_yaxes(
            tickvals=np.arange(len(order)), ticktext=names, showgrid=False, minor=between
        )
    else:
        title = f"clients, sorted by {safe_text(contents.method)}"
        figure.update_yaxes(title_text=title, showticklabels=False, showgrid=False)
    return figure


def convergence(series: Sequence[Series]) -> Any:
    """Draw one panel for each value that was recorded over the rounds."""
    figure = _panels(
        [1.0] * len(series),
        max(110 + 190 * len(series), 460),
        shared_xaxes=True,
        vertical_spacing=0.14,
        subplot_titles=[one.title for one in series],
    )
    for row, one in enumerate(series, start=1):
        share = "accuracy" in one.title.lower()
        figure.add_scatter(
            x=one.rounds,
            y=one.values,
            mode="lines+markers",
            line={"color": ACCENT, "width": 2},
            marker={"size": 5},
            hovertemplate=f"round %{{x}}<br>%{{y:{'.1%' if share else '.4f'}}}<extra></extra>",
            showlegend=False,
            row=row,
            col=1,
        )
        if share:
            figure.update_yaxes(tickformat="~%", range=share_range(one.values), row=row, col=1)
    figure.update_xaxes(title_text="round", row=len(series), col=1)
    if max(one.rounds.max() for one in series) <= _FEW_ROUNDS:
        figure.update_xaxes(dtick=1)  # otherwise plotly labels fractions of a round
    return figure


def calibration(found: Reliability, numbers: bool = False) -> Any:
    """Draw accuracy against confidence and, below, the number of rows by confidence.

    For numbers draw the share of rows inside of intervals against their level.
    """
    own, by = ("inside", "level") if numbers else ("accuracy", "confidence")
    heights = [1.0] if numbers else [0.74, 0.26]
    figure = _panels(heights, 460, shared_xaxes=True, vertical_spacing=0.06)
    figure.add_scatter(
        x=[0, 1],
        y=[0, 1],
        mode="lines",
        line={"color": _GREY, "dash": "dash", "width": 1.5},
        name="ideal",
        hoverinfo="skip",
        row=1,
        col=1,
    )
    figure.add_scatter(
        x=found.confidence,
        y=found.accuracy,
        customdata=found.counts,
        mode="lines+markers",
        line={"color": ACCENT, "width": 2},
        marker={"size": 9},
        name="this model",
        hovertemplate=f"{by} %{{x:.1%}}<br>{own} %{{y:.1%}}<br>%{{customdata:,}} rows<extra></extra>",
        row=1,
        col=1,
    )
    if not numbers:
        figure.add_bar(
            x=found.lower + 0.05,
            y=found.counts,
            width=0.09,
            marker={"color": ACCENT, "opacity": 0.6},
            hovertemplate="%{y:,} rows<extra></extra>",
            showlegend=False,
            row=2,
            col=1,
        )
    title = "share of rows inside" if numbers else "accuracy"
    figure.update_yaxes(title_text=title, tickformat=".0%", range=[-0.02, 1.04], row=1, col=1)
    if not numbers:
        figure.update_yaxes(title_text="rows", row=2, col=1)
    figure.update_xaxes(tickformat=".0%", range=[0, 1.02])
    below = "level of the interval" if numbers else "confidence of the prediction"
    figure.update_xaxes(title_text=below, row=len(heights), col=1)
    return figure


def deciding_columns(found: DecidingColumns) -> Any:
    """Draw a bar per column, the most important on top, with the range over clients."""
    names = [safe_text(name) for name in found.names]
    figure = go.Figure(layout=_layout(max(140 + 26 * len(names), 260), showlegend=False))
    figure.add_bar(
        x=found.mean,
        y=np.arange(len(names)),
        orientation="h",
        customdata=[
            [name, f"{low:.3f} to {high:.3f}"]
            for name, low, high in zip(names, found.least, found.most, strict=True)
        ],
        error_x={
            "type": "data",
            "array": found.most - found.mean,
            "arrayminus": found.mean - found.least,
            "color": _GREY,
            "thickness": 1.5,
        },
        marker={"color": ACCENT, "opacity": 0.8},
        hovertemplate="%{customdata[0]}<br>%{x:.3f} on average<br>%{customdata[1]} over clients"
        "<extra></extra>",
    )
    figure.update_xaxes(title_text="importance: mean and range over clients")
    figure.update_yaxes(
        autorange="reversed",
        tickvals=np.arange(len(names)),
        ticktext=names,
        automargin=True,
        showgrid=False,
    )
    return figure


def weights(shown: WeightMap, names: Sequence[str], components: int) -> Any:
    """Draw a heat map: one row per client, one column per pair of component and learner."""
    rows, columns = shown.values.shape
    labels = [safe_text(names[client]) for client in shown.clients]
    few = rows <= _MOST_NAMED_CLIENTS
    colour_bar = {"title": {"text": "weight"}, "thickness": 12, "outlinewidth": 0}
    figure = go.Figure(
        layout=_layout(
            min(max(140 + 24 * rows, 260), 680),
            margin={"l": 56, "r": 8, "t": 44, "b": 16},
            coloraxis={"cmin": 0, "cmax": 1, "colorbar": colour_bar},
        )
    )
    figure.add_heatmap(
        x=np.arange(columns),
        y=np.arange(rows),
        z=shown.values,
        customdata=[[f"{label}<br>{pair}" for pair in shown.pairs] for label in labels],
        hovertemplate="%{customdata}<br>weight %{z:.3f}<extra></extra>",
        coloraxis="coloraxis",
        xgap=1,
        ygap=1 if few else 0,
    )
    learners = columns // max(components, 1)
    step = 1 if columns <= _MOST_NAMED_PAIRS else learners  # label each pair, or each Gaussian
    titles = [pair if step == 1 else pair.split("·")[0] for pair in shown.pairs[::step]]
    if components > 1:
        titles = [_in_colour(one, k * step // learners) for k, one in enumerate(titles)]
    figure.update_xaxes(
        side="top",
        tickvals=np.arange(0, columns, step) + (step - 1) / 2,
        ticktext=titles,
        showgrid=False,
        zeroline=False,
    )
    figure.update_yaxes(autorange="reversed", showgrid=False, zeroline=False, automargin=True)
    if few:
        figure.update_yaxes(tickvals=np.arange(rows), ticktext=labels)
    else:
        figure.update_yaxes(title_text="clients, similar ones together", showticklabels=False)
    return figure


def projection(contents: ReportContents) -> Any:
    """Draw Gaussians as ellipses of two standard deviations, and clients as points."""
    plane, table = contents.projection, contents.clients
    assert plane is not None
    figure = go.Figure(layout=_layout(520, showlegend=False))
    colours = [component_colour(component) for component in range(len(plane.means))]
    for component, colour in enumerate(colours):
        outline = ellipse(plane.means[component], plane.covariances[component])
        red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
        figure.add_scatter(
            x=outline[:, 0],
            y=outline[:, 1],
            mode="lines",
            fill="toself",
            fillcolor=f"rgba({red},{green},{blue},0.12)",
            line={"color": colour, "width": 1.5},
            hoverinfo="skip",
        )
        top = outline[outline[:, 1].argmax()]
        text = _in_colour(f"G{component + 1}", component)
        figure.add_annotation(x=top[0], y=top[1], text=text, showarrow=False, yshift=10)
    shown = evenly(len(plane.clients), MOST_CLIENTS_IN_CHARTS)
    outlines = np.concatenate(
        [ellipse(*pair) for pair in zip(plane.means, plane.covariances, strict=True)]
    )
    places = spread_out(plane.clients[shown], 0.025 * float(np.ptp(outlines, axis=0).max()))
    edge = {"color": "#ffffff", "width": 1}
    figure.add_scatter(
        x=places[:, 0],
        y=places[:, 1],
        customdata=[
            [safe_text(table.names[c]), f"{table.rows[c]:,}", percent(table.accuracy[c])]
            for c in shown
        ],
        mode="markers",
        marker={
            "size": 9 if len(shown) <= _MOST_NAMED_CLIENTS else 6,
            "color": [colours[m] for m in plane.strongest[shown]],
            "line": edge,
        },
        hovertemplate="%{customdata[0]}<br>%{customdata[1]} rows<br>"
        f"{'R²' if contents.numbers else 'accuracy'} %{{customdata[2]}}<extra></extra>",
    )
    figure.add_scatter(
        x=plane.means[:, 0],
        y=plane.means[:, 1],
        customdata=[
            f"Gaussian {m + 1}<br>{share:.1%} of all rows" for m, share in enumerate(plane.shares)
        ],
        mode="markers",
        marker={"symbol": "cross", "size": 11, "color": colours, "line": edge},
        hovertemplate="%{customdata}<extra></extra>",
    )
    first, second = (safe_text(title, _LONGEST_AXIS_TITLE) for title in plane.axis_titles)
    figure.update_xaxes(title_text=f"{first} →", zeroline=False)
    figure.update_yaxes(title_text=f"{second} →", zeroline=False, scaleanchor="x", scaleratio=1)
    return figure


def ellipse(mean: FloatArray, covariance: FloatArray, deviations: float = 2.0) -> FloatArray:
    """Return points ``(61, 2)`` that lie ``deviations`` standard deviations from ``mean``."""
    values, vectors = np.linalg.eigh(covariance)
    angle = np.linspace(0.0, 2.0 * np.pi, 61)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    radii = deviations * np.sqrt(values.clip(min=0.0))
    return np.asarray(mean + (circle * radii) @ vectors.T)


def densities(found: DensityScatter, names: Sequence[str]) -> Any:
    """Draw ``log P(x)`` against ``log P(y|x)`` of test rows; novel rows stand out."""
    figure = go.Figure(layout=_layout(480, showlegend=found.novel is not None))
    lowest_x, lowest_y = _lowest_drawn(found.log_x), _lowest_drawn(found.log_y)
    novel = np.zeros(len(found.log_x), bool) if found.novel is None else found.novel
    kinds = (
        ("usual", ~novel, {"color": ACCENT, "size": 5, "opacity": 0.5}),
        ("novel", novel, {"color": _NOVEL, "size": 8, "opacity": 0.85, "symbol": "x"}),
    )
    for name, here, marker in kinds:
        if not here.any():
            continue
        log_x, log_y = found.log_x[here], found.log_y[here]
        figure.add_scatter(
            x=log_x.clip(min=lowest_x),
            y=log_y.clip(min=lowest_y),
            # the true values, also of rows that are drawn at the edge
            customdata=[
                [safe_text(names[client]), f"{x:.2f}", f"{y:.2f}"]
                for client, x, y in zip(found.clients[here], log_x, log_y, strict=True)
            ],
            mode="markers",
            marker=marker,
            name=name,
            hovertemplate="%{customdata[0]}<br>log P(x) %{customdata[1]}<br>"
            "log P(y|x) %{customdata[2]}<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(title_text="log P(x): how usual the inputs look", zeroline=False)
    figure.update_yaxes(title_text="log P(y|x): how usual the label is", zeroline=False)
    return figure


def _lowest_drawn(values: FloatArray) -> float:
    """Return the end of an axis; lower values are drawn there so that they do not flatten the rest."""
    low, high = np.quantile(values, [0.05, 0.95])
    return float(max(values.min(), low - 1.5 * (high - low) - 1.0))


def adaptation(records: Sequence[AdaptationRecord], numbers: bool = False) -> Any:
    """Draw accuracy, or R², by the number of a new client's rows, and log-likelihood by EM iteration."""
    measure = "R²" if numbers else "accuracy"
    with_accuracy = [one for one in records if one.accuracy]
    with_steps = [one for one in records if one.log_likelihoods]
    titles = [f"{measure.capitalize()} by the number of its rows"] * bool(with_accuracy)
    titles += ["Log-likelihood by EM iteration"] * bool(with_steps)
    figure = _panels(
        [1.0] * max(len(titles), 1),
        120 + 220 * max(len(titles), 1),
        vertical_spacing=0.24,
        subplot_titles=titles,
    )
    for number, record in enumerate(records):
        common = {
            "name": safe_text(record.client),
            "mode": "lines+markers",
            "line": {"color": ACCENT, "width": 2, "dash": _DASHES[number % len(_DASHES)]},
            "legendgroup": str(number),
            "col": 1,
        }
        if record.accuracy:
            figure.add_scatter(
                x=list(map(str, record.rows)),
                y=record.accuracy,
                marker={"size": 8},
                hovertemplate=f"%{{x}} rows<br>{measure} %{{y:.1%}}<extra>%{{fullData.name}}</extra>",
                showlegend=len(records) > 1,
                row=1,
                **common,
            )
        if record.log_likelihoods:
            figure.add_scatter(
                x=np.arange(len(record.log_likelihoods)),
                y=record.log_likelihoods,
                marker={"size": 4},
                hovertemplate="iteration %{x}<br>%{y:.4f}<extra>%{fullData.name}</extra>",
                showlegend=len(records) > 1 and not record.accuracy,
                row=len(titles),
                **common,
            )
    if with_accuracy:
        counts = sorted({count for one in with_accuracy for count in one.rows})
        known = [value for one in with_accuracy for value in one.accuracy or ()]
        figure.update_xaxes(
            title_text="rows of the client",
            type="category",
            categoryorder="array",
            categoryarray=list(map(str, counts)),
            row=1,
            col=1,
        )
        limits = None if numbers else share_range(known)  # R² may be below zero
        figure.update_yaxes(tickformat="~%", range=limits, row=1, col=1)
    if with_steps:
        steps = max(len(one.log_likelihoods) for one in with_steps)
        ticks = 1 if steps <= _FEW_ROUNDS else None
        figure.update_xaxes(title_text="iteration", dtick=ticks, row=len(titles), col=1)
    return figure
