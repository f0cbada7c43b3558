"""Pictures. matplotlib is loaded when one is drawn, and never opens a window."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedgmm.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text
    from matplotlib.typing import LineStyleType

    from fedgmm.experiments.demo import DemoResult

FloatArray = NDArray[np.float64]

# Told apart with any kind of colour vision (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#444444")
INK = "#333333"
_MOST_CLIENTS_WITH_NUMBERS = 16


def plot_demo(result: DemoResult, path: Path) -> Path:
    """Draw the rows with the shared Gaussians and, beside them, the weights of every client.

    Args:
        result: what :func:`fedgmm.experiments.demo.run_demo` returned.
        path: where the PNG goes; its folder is made if it is missing.

    Returns:
        ``path``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    rows_axes, weights_axes = figure.subplots(1, 2, width_ratios=(1.25, 1.0))
    rows = np.concatenate(list(result.data.rows.values()))
    draw_rows(rows_axes, rows, result.labels)
    for component, (mean, covariance) in enumerate(
        zip(result.means, result.covariances, strict=True)
    ):
        draw_ellipses(rows_axes, mean, covariance, colour_of(component))
        label_component(rows_axes, mean, component)
    clients = len(result.data.rows)
    rows_axes.set_title(
        f"{counted(len(rows), 'row')} of {counted(clients, 'client')}, and the Gaussians they share",
        pad=12,
    )
    draw_weights(
        weights_axes, list(map(str, result.data.rows)), result.weights, result.data.weights
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    return path


def colour_of(component: int) -> str:
    """The colour of a component; they repeat after eight."""
    return COLOURS[component % len(COLOURS)]


def draw_rows(axes: Axes, rows: FloatArray, labels: NDArray[np.int64]) -> None:
    """Rows ``(N, 2)`` as points, coloured by their component ``(N,)``."""
    colours = np.array([colour_of(component) for component in range(labels.max() + 1)])
    size = float(np.clip(20_000 / len(rows), 1.0, 8.0))
    axes.scatter(rows[:, 0], rows[:, 1], s=size, c=colours[labels], alpha=0.35, linewidths=0)
    axes.set_aspect("equal", adjustable="datalim")
    _quiet(axes)


def draw_ellipses(
    axes: Axes, mean: FloatArray, covariance: FloatArray, colour: str, style: LineStyleType = "-"
) -> None:
    """One and two standard deviations of a Gaussian in the plane."""
    from matplotlib.patches import Ellipse

    variances, directions = np.linalg.eigh(covariance)
    angle = float(np.degrees(np.arctan2(directions[1, 1], directions[0, 1])))
    for deviations, width in ((1, 2.2), (2, 1.2)):
        length, breadth = 2 * deviations * np.sqrt(variances[::-1])
        axes.add_patch(
            Ellipse(
                (float(mean[0]), float(mean[1])),
                float(length),
                float(breadth),
                angle=angle,
                fill=False,
                edgecolor=colour,
                linewidth=width,
                linestyle=style,
            )
        )


def label_component(axes: Axes, mean: FloatArray, component: int) -> None:
    """The number of a component at its mean."""
    x, y = float(mean[0]), float(mean[1])
    text = axes.text(x, y, str(component + 1), ha="center", va="center")
    _write_in_circle(text, component)


def _write_in_circle(text: Text, component: int) -> None:
    """White on a disc of the component's colour, the same mark in every panel."""
    text.set(color="white", fontweight="bold")
    text.set_bbox(
        {"boxstyle": "circle,pad=0.3", "facecolor": colour_of(component), "edgecolor": "white"}
    )


def draw_weights(
    axes: Axes, clients: list[str], learned: FloatArray, true: FloatArray | None = None
) -> None:
    """A heat map of weights ``(C, M)``: a column has its component's colour, a cell its weight.

    With few clients every cell tells its number and, where known, the true one in brackets.
    """
    from matplotlib.colors import to_rgb

    components = learned.shape[1]
    colours = np.array([to_rgb(colour_of(component)) for component in range(components)])
    strength = learned[..., None]
    axes.imshow(1 - strength * (1 - colours), aspect="auto", interpolation="nearest")
    axes.set_xticks(range(components), [str(component + 1) for component in range(components)])
    axes.xaxis.tick_top()
    title = "Learned weights $\\pi_c$ of each client"
    few = len(clients) <= _MOST_CLIENTS_WITH_NUMBERS
    axes.set_title(title + ("  (true)" if few and true is not None else ""), pad=12)
    if few:
        axes.set_yticks(range(len(clients)), clients)
        _write_weights(axes, learned, true)
    else:
        axes.set_ylabel(counted(len(clients), "client"))
        axes.set_yticks([])
    _quiet(axes)
    for component, label in enumerate(axes.get_xticklabels()):
        _write_in_circle(label, component)
    if few:  # white lines between the cells
        axes.set_xticks(np.arange(components - 1) + 0.5, minor=True)
        axes.set_yticks(np.arange(len(clients) - 1) + 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=2)


def _write_weights(axes: Axes, learned: FloatArray, true: FloatArray | None) -> None:
    for (client, component), weight in np.ndenumerate(learned):
        text = f"{weight:.2f}"
        if true is not None:
            text += f"  ({true[client, component]:.2f})"
        colour = "white" if weight > 0.7 else INK
        axes.text(component, client, text, ha="center", va="center", color=colour, fontsize=9)


def _quiet(axes: Axes) -> None:
    """No frame and no tick marks: the eye should find the data."""
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(which="both", length=0, colors=INK)
