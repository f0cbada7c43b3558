"""One function a chart: plain contents in, a plotly figure out.

Colours of the page (ink, grid, background) are set in the browser, because they change with light and
dark. Colours that mean something are set here: a method or a component has the same one everywhere.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.report.contents import (
    MOST_CLIENTS_IN_CHARTS,
    AdaptationRecord,
    DensityScatter,
    Reliability,
    ReportContents,
    Series,
    WeightMap,
    evenly,
)
from fedgmm.report.plots import COLOURS
from fedgmm.report.projection import ellipse

FloatArray = NDArray[np.float64]

ACCENT = "#4C78DB"
"""The method the report is about."""

# Rivals, told apart with any kind of colour vision (Tol); none is a component's colour.
_RIVALS = ("#CC6677", "#B59F3B", "#44AA99", "#AA4499", "#7FB8D6", "#7A7A2E", "#882255")
_RIVAL_SYMBOLS = ("diamond", "square", "triangle-up", "cross", "star", "hexagon", "pentagon")
_COMPONENTS = COLOURS[:6]  # the last two vanish on a white or on a black page
_NOVEL = "#D81B60"
_GREY = "#8A8F98"
_DASHES = ("solid", "dash", "dot", "dashdot")

_FEW_ROUNDS = 10
_MOST_NAMED_CLIENTS = 40
_MOST_NAMED_PAIRS = 24
_LONGEST_NAME = 40
_LONGEST_AXIS_TITLE = 45  # what the height of the chart has room for


def component_colour(component: int) -> str:
    """The colour of a Gaussian; colours repeat after the last."""
    return _COMPONENTS[component % len(_COMPONENTS)]


def rival_colour(baseline: int) -> str:
    """The colour of another method; colours repeat after the last."""
    return _RIVALS[baseline % len(_RIVALS)]


def safe_text(text: str, longest: int = _LONGEST_NAME) -> str:
    """A given text for plotly, which would read tags in it; long ones are cut."""
    shown = re.sub(r"\s+", " ", text)
    if len(shown) > longest:
        shown = shown[: longest - 1] + "…"
    return html.escape(shown, quote=False)


def _figure(height: int, **layout: Any) -> Any:
    import plotly.graph_objects as go

    return go.Figure(layout=_layout(height, **layout))


def _panels(heights: Sequence[float], height: int, **options: Any) -> Any:
    """Panels below each other."""
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=len(heights), cols=1, row_heights=list(heights), **options)
    figure.update_layout(_layout(height))
    figure.update_annotations(x=0, xanchor="left", font_size=13)  # titles of the panels
    return figure


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


# ---------------------------------------------------------------------- rounds


def convergence(series: Sequence[Series]) -> Any:
    """One panel for each number that was noted over the rounds."""
    import plotly.graph_objects as go

    figure = _panels(
        [1.0] * len(series),
        max(110 + 190 * len(series), 460),
        shared_xaxes=True,
        vertical_spacing=0.14,
        subplot_titles=[one.title for one in series],
    )
    for row, one in enumerate(series, start=1):
        share = "accuracy" in one.title.lower()
        figure.add_trace(
            go.Scatter(
                x=one.rounds,
                y=one.values,
                mode="lines+markers",
                line={"color": ACCENT, "width": 2},
                marker={"size": 5},
                hovertemplate=f"round %{{x}}<br>%{{y:{'.1%' if share else '.4f'}}}<extra></extra>",
                showlegend=False,
            ),
            row=row,
            col=1,
        )
        if share:
            figure.update_yaxes(tickformat=".0%", range=share_range(one.values), row=row, col=1)
    figure.update_xaxes(title_text="round", row=len(series), col=1)
    if max(one.rounds.max() for one in series) <= _FEW_ROUNDS:
        figure.update_xaxes(dtick=1)  # there is no round one and a half
    return figure


# ---------------------------------------------------------------------- accuracies


def accuracies(contents: ReportContents) -> Any:
    """Clients from the least to the most accurate, and the baselines' accuracies above and below."""
    import plotly.graph_objects as go

    own = contents.clients.accuracy
    order = np.argsort(own, kind="stable")[: int(np.isfinite(own).sum())]
    order = order[evenly(len(order), MOST_CLIENTS_IN_CHARTS)]
    names = [safe_text(contents.clients.names[client]) for client in order]
    few = len(order) <= _MOST_NAMED_CLIENTS
    figure = _figure(420)
    hover = "%{customdata}<br>%{fullData.name}: %{y:.1%}<extra></extra>"
    for baseline, (method, values) in enumerate(contents.baselines.items()):
        figure.add_trace(
            go.Scatter(
                x=np.arange(len(order)),
                y=values[order],
                customdata=names,
                name=safe_text(method),
                mode="markers",
                marker={
                    "color": rival_colour(baseline),
                    "symbol": _RIVAL_SYMBOLS[baseline % len(_RIVAL_SYMBOLS)],
                    "size": 9 if few else 5,
                    "opacity": 0.9 if few else 0.55,
                },
                hovertemplate=hover,
            )
        )
    figure.add_trace(
        go.Scatter(
            x=np.arange(len(order)),
            y=own[order],
            customdata=names,
            name=safe_text(contents.method),
            mode="lines+markers",
            line={"color": ACCENT, "width": 2.5},
            marker={"size": 8 if few else 4},
            hovertemplate=hover,
        )
    )
    figure.update_layout(showlegend=True)
    figure.update_yaxes(title_text="test accuracy", tickformat=".0%")
    if few:
        figure.update_xaxes(
            tickvals=np.arange(len(order)), ticktext=names, automargin=True, zeroline=False
        )
    else:
        figure.update_xaxes(title_text=f"clients, sorted by {safe_text(contents.method)}")
        figure.update_xaxes(showticklabels=False, showgrid=False, zeroline=False)
    return figure


# ---------------------------------------------------------------------- weights


def weights(shown: WeightMap, names: Sequence[str], components: int) -> Any:
    """A row a client, a column a pair of component and learner."""
    import plotly.graph_objects as go

    rows, columns = shown.values.shape
    labels = [safe_text(names[client]) for client in shown.clients]
    figure = _figure(
        min(max(140 + 24 * rows, 260), 680), margin={"l": 56, "r": 8, "t": 44, "b": 16}
    )
    figure.add_trace(
        go.Heatmap(
            x=np.arange(columns),
            y=np.arange(rows),
            z=shown.values,
            customdata=[[f"{label}<br>{pair}" for pair in shown.pairs] for label in labels],
            hovertemplate="%{customdata}<br>weight %{z:.3f}<extra></extra>",
            coloraxis="coloraxis",
            xgap=1,
            ygap=1 if rows <= _MOST_NAMED_CLIENTS else 0,
        )
    )
    figure.update_layout(
        coloraxis={
            "cmin": 0,
            "cmax": 1,
            "colorbar": {"title": {"text": "weight"}, "thickness": 12, "outlinewidth": 0},
        }
    )
    per_component = columns // max(components, 1)
    step = 1 if columns <= _MOST_NAMED_PAIRS else per_component
    figure.update_xaxes(
        side="top",
        tickvals=np.arange(0, columns, step) + (step - 1) / 2,
        ticktext=[
            _in_colour(pair if step == 1 else pair.split("·")[0], column // per_component)
            if components > 1
            else pair
            for column, pair in zip(range(0, columns, step), shown.pairs[::step], strict=True)
        ],
        showgrid=False,
        zeroline=False,
    )
    figure.update_yaxes(autorange="reversed", showgrid=False, zeroline=False, automargin=True)
    if rows <= _MOST_NAMED_CLIENTS:
        figure.update_yaxes(tickvals=np.arange(rows), ticktext=labels)
    else:
        figure.update_yaxes(title_text="clients, similar ones together", showticklabels=False)
    return figure


def _in_colour(text: str, component: int) -> str:
    return f'<span style="color:{component_colour(component)}"><b>{text}</b></span>'


# ---------------------------------------------------------------------- projection


def projection(contents: ReportContents) -> Any:
    """Gaussians as ellipses of two standard deviations, clients as points."""
    import plotly.graph_objects as go

    plane = contents.projection
    assert plane is not None
    figure = _figure(520)
    for component, (mean, covariance) in enumerate(
        zip(plane.means, plane.covariances, strict=True)
    ):
        outline = ellipse(mean, covariance)
        colour = component_colour(component)
        figure.add_trace(
            go.Scatter(
                x=outline[:, 0],
                y=outline[:, 1],
                mode="lines",
                fill="toself",
                fillcolor=_pale(colour),
                line={"color": colour, "width": 1.5},
                hoverinfo="skip",
            )
        )
        top = outline[outline[:, 1].argmax()]
        figure.add_annotation(
            x=top[0],
            y=top[1],
            text=_in_colour(f"G{component + 1}", component),
            showarrow=False,
            yshift=10,
        )
    shown = evenly(len(plane.clients), MOST_CLIENTS_IN_CHARTS)
    table = contents.clients
    figure.add_trace(
        go.Scatter(
            x=plane.clients[shown, 0],
            y=plane.clients[shown, 1],
            customdata=[
                [safe_text(table.names[c]), f"{table.rows[c]:,}", percent(table.accuracy[c])]
                for c in shown
            ],
            mode="markers",
            marker={
                "size": 9 if len(shown) <= _MOST_NAMED_CLIENTS else 6,
                "color": [component_colour(int(m)) for m in plane.strongest[shown]],
                "line": {"color": "#ffffff", "width": 1},
            },
            hovertemplate="%{customdata[0]}<br>%{customdata[1]} rows<br>"
            "accuracy %{customdata[2]}<extra></extra>",
        )
    )
    figure.add_trace(
        go.Scatter(
            x=plane.means[:, 0],
            y=plane.means[:, 1],
            customdata=[
                f"Gaussian {m + 1}<br>{share:.1%} of all rows"
                for m, share in enumerate(plane.shares)
            ],
            mode="markers",
            marker={
                "symbol": "cross",
                "size": 11,
                "color": [component_colour(m) for m in range(len(plane.means))],
                "line": {"color": "#ffffff", "width": 1},
            },
            hovertemplate="%{customdata}<extra></extra>",
        )
    )
    figure.update_layout(showlegend=False)
    first, second = (safe_text(title, _LONGEST_AXIS_TITLE) for title in plane.axis_titles)
    figure.update_xaxes(title_text=first, zeroline=False)
    figure.update_yaxes(title_text=second, zeroline=False, scaleanchor="x", scaleratio=1)
    return figure


def _pale(colour: str) -> str:
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.12)"


def share_range(shares: Sequence[float] | FloatArray) -> list[float]:
    """An axis around shares that is never so narrow that small changes look large."""
    low, high = float(np.min(shares)), float(np.max(shares))
    spare = max(0.05, 0.1 * (high - low))
    return [max(low - spare, -0.02), min(high + spare, 1.02)]


def percent(share: float) -> str:
    """A share as text; a dash where it is not known."""
    return f"{share:.1%}" if np.isfinite(share) else "–"


# ---------------------------------------------------------------------- calibration


def calibration(found: Reliability) -> Any:
    """Confidence against accuracy, and how many rows there are of each confidence."""
    import plotly.graph_objects as go

    figure = _panels([0.74, 0.26], 460, shared_xaxes=True, vertical_spacing=0.06)
    figure.add_trace(
        go.Scatter(
            x=[0, 1],
            y=[0, 1],
            mode="lines",
            line={"color": _GREY, "dash": "dash", "width": 1.5},
            name="honest",
            hoverinfo="skip",
        ),
        row=1,
        col=1,
    )
    figure.add_trace(
        go.Scatter(
            x=found.confidence,
            y=found.accuracy,
            customdata=found.counts,
            mode="lines+markers",
            line={"color": ACCENT, "width": 2},
            marker={"size": 9},
            name="this model",
            hovertemplate="says %{x:.1%}<br>is right in %{y:.1%}<br>%{customdata:,} rows"
            "<extra></extra>",
        ),
        row=1,
        col=1,
    )
    figure.add_trace(
        go.Bar(
            x=found.lower + 0.05,
            y=found.counts,
            width=0.09,
            marker={"color": ACCENT, "opacity": 0.6},
            hovertemplate="%{y:,} rows<extra></extra>",
            showlegend=False,
        ),
        row=2,
        col=1,
    )
    figure.update_yaxes(
        title_text="share right", tickformat=".0%", range=[-0.02, 1.04], row=1, col=1
    )
    figure.update_yaxes(title_text="rows", row=2, col=1)
    figure.update_xaxes(tickformat=".0%", range=[0, 1.02])
    figure.update_xaxes(title_text="confidence of the prediction", row=2, col=1)
    return figure


# ---------------------------------------------------------------------- densities


def densities(found: DensityScatter, names: Sequence[str]) -> Any:
    """How usual a row looks against how usual its label is; novel rows stand out."""
    import plotly.graph_objects as go

    figure = _figure(480)
    lowest_x, lowest_y = rim(found.log_x), rim(found.log_y)
    novel = np.zeros(len(found.log_x), bool) if found.novel is None else found.novel
    kinds = (
        ("usual", ~novel, {"color": ACCENT, "size": 5, "opacity": 0.5}),
        ("novel", novel, {"color": _NOVEL, "size": 8, "opacity": 0.85, "symbol": "x"}),
    )
    for name, here, marker in kinds:
        if not here.any():
            continue
        figure.add_trace(
            go.Scatter(
                x=found.log_x[here].clip(min=lowest_x),
                y=found.log_y[here].clip(min=lowest_y),
                # a row at the rim tells where it really is
                customdata=[
                    [safe_text(names[client]), f"{x:.2f}", f"{y:.2f}"]
                    for client, x, y in zip(
                        found.clients[here], found.log_x[here], found.log_y[here], strict=True
                    )
                ],
                mode="markers",
                marker=marker,
                name=name,
                hovertemplate="%{customdata[0]}<br>log P(x) %{customdata[1]}<br>"
                "log P(y|x) %{customdata[2]}<extra>%{fullData.name}</extra>",
            )
        )
    figure.update_layout(showlegend=found.novel is not None)
    figure.update_xaxes(title_text="log P(x): how usual the inputs look", zeroline=False)
    figure.update_yaxes(title_text="log P(y|x): how usual the label is", zeroline=False)
    return figure


def rim(values: FloatArray) -> float:
    """Where the axis ends: far outliers are drawn there, so that they do not flatten the rest."""
    low, high = np.quantile(values, [0.05, 0.95])
    return float(max(values.min(), low - 1.5 * (high - low) - 1.0))


# ---------------------------------------------------------------------- a client that comes later


def adaptation(records: Sequence[AdaptationRecord]) -> Any:
    """Accuracy over the rows a newcomer gives, and the log-likelihood while its weights settle."""
    import plotly.graph_objects as go

    with_accuracy = any(one.accuracy for one in records)
    with_steps = any(one.log_likelihoods for one in records)
    titles = ["Accuracy after so many of its rows"] * with_accuracy
    titles += ["Log-likelihood while its weights settle"] * with_steps
    figure = _panels(
        [1.0] * max(len(titles), 1),
        120 + 220 * max(len(titles), 1),
        vertical_spacing=0.24,
        subplot_titles=titles,
    )
    for number, record in enumerate(records):
        line = {"color": ACCENT, "width": 2, "dash": _DASHES[number % len(_DASHES)]}
        # the name stands in the legend where there are several
        common = {"name": safe_text(record.client), "line": line, "legendgroup": str(number)}
        if record.accuracy:
            figure.add_trace(
                go.Scatter(
                    x=list(map(str, record.rows)),
                    y=record.accuracy,
                    mode="lines+markers",
                    marker={"size": 8},
                    hovertemplate="%{x} rows<br>accuracy %{y:.1%}<extra>%{fullData.name}</extra>",
                    showlegend=len(records) > 1,
                    **common,
                ),
                row=1,
                col=1,
            )
        if record.log_likelihoods:
            figure.add_trace(
                go.Scatter(
                    x=np.arange(len(record.log_likelihoods)),
                    y=record.log_likelihoods,
                    mode="lines+markers",
                    marker={"size": 4},
                    hovertemplate="iteration %{x}<br>%{y:.4f}<extra>%{fullData.name}</extra>",
                    showlegend=len(records) > 1 and not record.accuracy,
                    **common,
                ),
                row=len(titles),
                col=1,
            )
    if with_accuracy:
        counts = sorted({count for one in records if one.accuracy for count in one.rows})
        order = list(map(str, counts))
        figure.update_xaxes(
            type="category", categoryorder="array", categoryarray=order, row=1, col=1
        )
        figure.update_xaxes(title_text="rows of the client", row=1, col=1)
        told = [value for one in records for value in one.accuracy or ()]
        figure.update_yaxes(tickformat=".0%", range=share_range(told), row=1, col=1)
    if with_steps:
        figure.update_xaxes(title_text="iteration", row=len(titles), col=1)
    return figure
