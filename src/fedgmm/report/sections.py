"""The parts of the page in order: a heading, words for a reader who is no specialist, a chart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgmm.report import charts
from fedgmm.report.contents import (
    FALSE_ALARM_RATE,
    MOST_CLIENTS_IN_CHARTS,
    MOST_POINTS,
    ReportContents,
    mean_of,
)
from fedgmm.wording import counted


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        key: its place in the address bar and in ``ReportContents.absent``.
        heading: in a few words.
        caption: plain text.
        draw: makes the chart; ``None`` if the part does not apply, and ``caption`` says why.
        wide: takes the whole width of the page.
    """

    key: str
    heading: str
    caption: str
    draw: Callable[[], Any] | None
    wide: bool = False


def sections_of(contents: ReportContents) -> list[Section]:
    """All parts with a chart, in the order of the page."""
    table, here = contents.clients, contents
    return [
        _section(
            here,
            "accuracy",
            "How good the predictions are, client by client",
            _about_accuracy,
            lambda: charts.accuracies(here),
            bool(np.isfinite(table.accuracy).any()),
            wide=True,
        ),
        _section(
            here,
            "convergence",
            "How training went",
            _about_convergence,
            lambda: charts.convergence(here.convergence),
            bool(here.convergence),
        ),
        _section(
            here,
            "calibration",
            "Whether its confidence can be trusted",
            _about_calibration,
            lambda: charts.calibration(here.reliability),  # type: ignore[arg-type]
            here.reliability is not None,
        ),
        _section(
            here,
            "weights",
            "What each client's data are made of",
            _about_weights,
            lambda: charts.weights(here.weights, table.names, here.components),  # type: ignore[arg-type]
            here.weights is not None,
            wide=True,
        ),
        _section(
            here,
            "projection",
            "The Gaussians and the clients on a map",
            _about_projection,
            lambda: charts.projection(here),
            here.projection is not None,
        ),
        _section(
            here,
            "densities",
            "Samples unlike anything seen",
            _about_densities,
            lambda: charts.densities(here.densities, table.names),  # type: ignore[arg-type]
            here.densities is not None,
        ),
        _section(
            here,
            "adaptation",
            "A client that comes later",
            _about_adaptation,
            lambda: charts.adaptation(here.adaptations),
            bool(here.adaptations),
            wide=True,
        ),
    ]


def _section(
    contents: ReportContents,
    key: str,
    heading: str,
    about: Callable[[ReportContents], str],
    draw: Callable[[], Any],
    applies: bool,
    wide: bool = False,
) -> Section:
    if applies:
        return Section(key, heading, about(contents), draw, wide)
    return Section(key, heading, contents.absent.get(key, "There is nothing to show here."), None)


# ---------------------------------------------------------------------- the whole in one sentence


def verdict(contents: ReportContents) -> str:
    """What the figures mean for somebody who has to decide."""
    own, baseline = contents.mean_accuracy, contents.best_rival
    if not np.isfinite(own):
        return "There were no test rows, so this page cannot say how good the predictions are."
    if baseline is None:
        return (
            f"{contents.method} predicts {own:.1%} of an average client's test rows correctly. No "
            "other method was run, so this page cannot say whether a simpler one would do as well."
        )
    values = contents.baselines[baseline]
    both = np.isfinite(values) & np.isfinite(contents.clients.accuracy)
    mine, theirs = contents.clients.accuracy[both], values[both]
    points = 100.0 * (mean_of(mine) - mean_of(theirs))
    at_least = f"{int((mine >= theirs).sum()):,} of {counted(int(both.sum()), 'client')}"
    if abs(points) < 0.05:
        return (
            f"{contents.method} and {baseline} are equally good for an average client; {at_least} do "
            f"at least as well with {contents.method}."
        )
    if points > 0:
        return (
            f"An average client gains {points:.1f} percentage points over {baseline}, the best of the "
            f"other methods, and {at_least} do at least as well."
        )
    return (
        f"{baseline} is better here: an average client would gain {-points:.1f} percentage points with "
        f"it, though {at_least} do at least as well with {contents.method}."
    )


# ---------------------------------------------------------------------- captions


def _some_clients(shown: int, total: int) -> str:
    """A sentence where not all clients are shown; empty where they are."""
    return f" Shown are {shown:,} of {total:,} clients, spread evenly." if shown < total else ""


def _about_accuracy(contents: ReportContents) -> str:
    known = int(np.isfinite(contents.clients.accuracy).sum())
    text = (
        "Share of test rows that were predicted correctly, for every client, from the client that "
        f"fares worst with {contents.method} on the left to the one that fares best on the right."
    )
    if contents.baselines:
        text += " Marks below the line are clients that another method serves worse."
    else:
        text += " No other method was run to compare with."
    return text + _some_clients(MOST_CLIENTS_IN_CHARTS, known)


def _about_convergence(contents: ReportContents) -> str:
    return (
        "In each round the clients learn from their own rows and the server combines what they "
        "send. Curves that have become flat mean that more rounds would change little."
    )


def _about_calibration(contents: ReportContents) -> str:
    found = contents.reliability
    assert found is not None
    return (
        "Of all predictions made with 80% confidence, 80% should be right: the closer to the "
        "dashed line, the better. Below the line the model is too sure of itself, above it too "
        f"modest. On average the two differ by {100 * found.error:.1f} percentage points."
    )


def _about_weights(contents: ReportContents) -> str:
    shown = contents.weights
    assert shown is not None
    kinds = (
        "kind of rule for the label (L)"
        if contents.components < 2
        else "kind of input (a Gaussian, G)"
        if "·" not in shown.pairs[0]
        else "pair of a kind of input (a Gaussian, G) and a rule for the label (a learner, L)"
    )
    text = (
        f"A row is a client, a column a {kinds} that all clients share. The more a cell stands "
        "out, the more of the client's data are of this kind; clients with the same pattern are alike."
    )
    return text + _some_clients(len(shown.clients), len(contents.clients.names))


def _about_projection(contents: ReportContents) -> str:
    plane = contents.projection
    assert plane is not None
    text = (
        "Each ellipse holds most of the data of one Gaussian. A point is a client: it lies near "
        "the Gaussians that make up most of its data, and has the colour of the strongest. "
    )
    basis = "the distances between the Gaussians" if plane.separates else "the spread of the data"
    text += (
        f"The data have more directions than two; this view keeps {plane.captured:.0%} of {basis}."
    )
    return text + _some_clients(MOST_CLIENTS_IN_CHARTS, len(plane.clients))


def _about_densities(contents: ReportContents) -> str:
    found = contents.densities
    assert found is not None
    text = (
        "Each mark is a test row: on the left its inputs look unusual, at the bottom its label is "
        "a surprise. Rows that lie far out stand at the edge; hover over them for their values. "
    )
    if found.novel is None:
        text += "There are no held-out rows to set a threshold with, so no row is flagged."
    else:
        text += (
            f"Flagged as novel are {found.total_novel:,} of {counted(found.total, 'row')}; about "
            f"{FALSE_ALARM_RATE:.0%} would be flagged if all were of the usual kind."
        )
    if found.total > MOST_POINTS:
        text += f" Shown are {MOST_POINTS:,} rows, spread evenly over the clients."
    return text


def _about_adaptation(contents: ReportContents) -> str:
    if contents.replayed:
        return (
            "A client that joins after training learns only its own weights, from a few labelled "
            "rows; nothing else changes. To show how many it needs, "
            f"the client “{contents.adaptations[0].client}” was treated as if it had just come. Its "
            "rows did take part in the training of the shared parameters, so a true newcomer may fare less "
            "well. Zero rows means the federation's own weights."
        )
    with_labels = all(one.labelled for one in contents.adaptations)
    return (
        "Clients that joined after training and learned only their own weights, "
        + ("from labelled rows" if with_labels else "some of them without labels")
        + "; nothing else changed."
    )
