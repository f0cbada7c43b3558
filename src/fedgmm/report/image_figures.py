"""Pictures of the studies on images; each stays below 150 kB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedgmm.report.plots import INK, colour_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FloatArray = NDArray[np.float64]

_DPI = 90
_BINS = 50
_MOST_POINTS = 1200  # of a group in a scatter plot
_FEW_POINTS = 8
_LINES = ("o-", "s--", "^:", "v-.")
_TAIL = 1.0  # percent at either end that share the last bar


def plot_curves(
    runs: Mapping[str, Sequence[Sequence[float | None]]], title: str, path: Path
) -> Path:
    """Accuracy over rounds: a line a method, the mean over seeds.

    Args:
        runs: for each method, one curve a seed; where seeds differ in length, the shortest counts.
        title: of the figure.
        path: where the PNG goes.
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = _figure((7.5, 4.6))
    for place, (name, curves) in enumerate(runs.items()):
        length = min(map(len, curves))
        values = np.array([curve[:length] for curve in curves], dtype=np.float64)
        mean = 100 * values.mean(0)
        rounds = 1 + np.flatnonzero(np.isfinite(mean))  # those that were watched
        axes.plot(
            rounds,
            mean[rounds - 1],
            label=name,
            color=colour_of(place),
            linewidth=1.6,
            marker="o" if len(rounds) < _FEW_POINTS else None,  # a single one makes no line
            markersize=4,
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round", color=INK)
    axes.set_ylabel("accuracy (%)", color=INK)
    return _finished(figure, axes, title, path)


def plot_adaptation(
    iterations: Sequence[int],
    curves: Mapping[tuple[str, str], Sequence[float]],
    title: str,
    path: Path,
) -> Path:
    """Accuracy of new clients against EM iterations of their weights.

    A method has a colour, and what new clients learn from a kind of line.

    Args:
        iterations: from 0, the federation's own weights, on.
        curves: for each method and what is learnt from, one accuracy for each of them.
        title: of the figure.
        path: where the PNG goes.
    """
    figure, axes = _figure((8.2, 4.2))
    methods, sources = (list(dict.fromkeys(names)) for names in zip(*curves, strict=True))
    for (method, source), values in curves.items():
        axes.plot(
            iterations,
            100 * np.asarray(values),
            _LINES[sources.index(source) % len(_LINES)],
            label=f"{method}, {source}",
            color=colour_of(methods.index(method)),
            markersize=4,
        )
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks(list(iterations), list(map(str, iterations)), minor=False)
    axes.set_xlabel("EM iterations of the weights", color=INK)
    axes.set_ylabel("test accuracy (%)", color=INK)
    # beside the curves: nine of them leave no room within
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _finished(figure, axes, title, path, legend=False)


def plot_heat_map(
    values: FloatArray, components: Sequence[int], learners: Sequence[int], title: str, path: Path
) -> Path:
    """A grid of percentages ``(M1 choices, M2 choices)`` with their numbers."""
    figure, axes = _figure((6.0, 4.8))
    axes.imshow(values, cmap="Blues", aspect="auto")
    middle = (float(values.min()) + float(values.max())) / 2
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if value > middle else INK
        axes.text(column, row, f"{value:.1f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(learners)), list(map(str, learners)))
    axes.set_yticks(range(len(components)), list(map(str, components)))
    axes.set_xlabel("learners M2", color=INK)
    axes.set_ylabel("Gaussians M1", color=INK)
    return _finished(figure, axes, title, path, legend=False)


def plot_likelihoods(panels: Mapping[str, Mapping[str, FloatArray]], path: Path) -> Path:
    """A histogram a panel: scores of known and novel rows, both from 0 to 1.

    Args:
        panels: for each title, the scores of each group, ``(n,)``.
        path: where the PNG goes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(panels), 3.4), layout="constrained")
    for axes, (title, groups) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        low, high = np.percentile(np.concatenate(list(groups.values())), [_TAIL, 100 - _TAIL])
        width = float(high - low) or 1.0
        for place, (name, scores) in enumerate(groups.items()):
            shown = np.clip((scores - low) / width, 0, 1)
            share = np.full(len(shown), 1 / len(shown))
            bins = np.linspace(0, 1, _BINS + 1)
            axes.hist(shown, bins, weights=share, alpha=0.65, label=name, color=colour_of(place))
        axes.set_title(title, color=INK)
        axes.set_xlabel("score, scaled to lie between 0 and 1", color=INK)
        axes.legend(frameon=False)
        _quiet(axes)
    return _saved(figure, path)


def plot_groups(
    groups: Mapping[str, tuple[FloatArray, FloatArray]], title: str, path: Path
) -> Path:
    """``log P(x)`` against ``log P(y|x)``, a colour a group.

    Args:
        groups: for each name, both scores of its rows, ``(n,)`` each.
        title: of the figure.
        path: where the PNG goes.
    """
    figure, axes = _figure((6.8, 4.8))
    for place, (name, (x, y)) in enumerate(groups.items()):
        step = max(1, len(x) // _MOST_POINTS)
        axes.scatter(
            x[::step], y[::step], s=7, alpha=0.45, linewidths=0, label=name, color=colour_of(place)
        )
    axes.set_xlabel("log P(x)", color=INK)
    axes.set_ylabel("log P(y|x)", color=INK)
    return _finished(figure, axes, title, path, marker_scale=3.0)


def _figure(size: tuple[float, float]) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


def _finished(
    figure: Figure,
    axes: Axes,
    title: str,
    path: Path,
    legend: bool = True,
    marker_scale: float = 1.0,
) -> Path:
    axes.set_title(title, color=INK)
    if legend:
        axes.legend(frameon=False, markerscale=marker_scale)
    _quiet(axes)
    return _saved(figure, path)


def _saved(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    return path


def _quiet(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(which="both", length=0, colors=INK)
