"""Pictures of the demo and of the studies, and contact sheets of images.

matplotlib and Pillow are imported when a picture is drawn, and never open a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.data.images.files import WHITE, ImageData
from fedgmm.data.partition import transform_images
from fedgmm.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.typing import LineStyleType

    from fedgmm.data.images.federated import FederatedImages

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
ByteArray = NDArray[np.uint8]

# Distinguishable with any kind of colour vision (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#444444")
INK = "#333333"
_MOST_CLIENTS_WITH_NUMBERS = 16
_DPI = 90  # keeps the pictures of the studies below 150 kB
_BINS = 50
_MOST_POINTS = 1200  # per group of a scatter plot
_FEW_POINTS = 8
_LINES = ("o-", "s--", "^:", "v-.")
_FRAME = "#bbbbbb"  # around the images of a contact sheet
_COLUMNS = 10
_SCALE = 2  # dots per pixel; a whole number keeps pixels square and the file small
_TAIL = 1.0  # percent at either end that are drawn in the last bar


def colour_of(component: int) -> str:
    """Return the colour of a component; colours repeat after eight."""
    return COLOURS[component % len(COLOURS)]


def draw_rows(axes: Axes, rows: FloatArray, labels: NDArray[np.int64]) -> None:
    """Draw rows ``(N, 2)`` as points in the colours of their components ``(N,)``."""
    colours = np.array([colour_of(component) for component in range(labels.max() + 1)])
    size = float(np.clip(20_000 / len(rows), 1.0, 8.0))
    axes.scatter(rows[:, 0], rows[:, 1], s=size, c=colours[labels], alpha=0.35, linewidths=0)
    axes.set_aspect("equal", adjustable="datalim")
    quiet(axes)


def draw_ellipses(
    axes: Axes, mean: FloatArray, covariance: FloatArray, colour: str, style: LineStyleType = "-"
) -> None:
    """Draw one and two standard deviations of a Gaussian in the plane."""
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
    """Write the number of a component at its mean."""
    x, y = float(mean[0]), float(mean[1])
    text = axes.text(x, y, str(component + 1), ha="center", va="center")
    _write_in_circle(text, component)


def _write_in_circle(text: Text, component: int) -> None:
    """Set a text in white on a disc of the component's colour."""
    text.set(color="white", fontweight="bold")
    text.set_bbox(
        {"boxstyle": "circle,pad=0.3", "facecolor": colour_of(component), "edgecolor": "white"}
    )


def draw_weights(
    axes: Axes, clients: list[str], learned: FloatArray, true: FloatArray | None = None
) -> None:
    """Draw a heat map of weights ``(C, M)``, each column in the colour of its component.

    With few clients every cell shows its weight and, if given, the true weight in brackets.
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
        for (client, component), weight in np.ndenumerate(learned):
            text = f"{weight:.2f}"
            if true is not None:
                text += f"  ({true[client, component]:.2f})"
            colour = "white" if weight > 0.7 else INK
            axes.text(component, client, text, ha="center", va="center", color=colour, fontsize=9)
    else:
        axes.set_ylabel(counted(len(clients), "client"))
        axes.set_yticks([])
    quiet(axes)
    for component, label in enumerate(axes.get_xticklabels()):
        _write_in_circle(label, component)
    if few:  # white lines between the cells
        axes.set_xticks(np.arange(components - 1) + 0.5, minor=True)
        axes.set_yticks(np.arange(len(clients) - 1) + 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=2)


# ---------------------------------------------------------------------- figures of the studies


def plot_curves(
    runs: Mapping[str, Sequence[Sequence[float | None]]], title: str, path: Path
) -> Path:
    """Draw accuracy over rounds: one line per method, the mean over seeds.

    ``runs`` has a curve per seed of each method; longer curves are cut to the shortest. The PNG is written
    to ``path``, here and below.
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure((7.5, 4.6))
    for number, (name, curves) in enumerate(runs.items()):
        length = min(map(len, curves))
        values = np.array([curve[:length] for curve in curves], dtype=np.float64)
        mean = 100 * values.mean(0)
        rounds = 1 + np.flatnonzero(np.isfinite(mean))  # the rounds that were evaluated
        axes.plot(
            rounds,
            mean[rounds - 1],
            label=name,
            color=colour_of(number),
            linewidth=1.6,
            marker="o" if len(rounds) < _FEW_POINTS else None,  # one point alone draws no line
            markersize=4,
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _finish(figure, axes, title, "round", "accuracy (%)", path)


def plot_adaptation(
    iterations: Sequence[int],
    curves: Mapping[tuple[str, str], Sequence[float]],
    title: str,
    path: Path,
) -> Path:
    """Draw the accuracy of new clients against the EM iterations of their weights.

    Iteration 0 means the federation's own weights. ``curves`` has an accuracy per iteration for each method
    (a colour) and kind of data learned from (a line style).
    """
    figure, axes = new_figure((8.2, 4.2))
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
    # Beside the curves, because nine entries do not fit between them.
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    labels = ("EM iterations of the weights", "test accuracy (%)")
    return _finish(figure, axes, title, *labels, path, legend=False)


def plot_heat_map(
    values: FloatArray, components: Sequence[int], learners: Sequence[int], title: str, path: Path
) -> Path:
    """Draw a grid of percentages ``(M1 choices, M2 choices)`` with their numbers."""
    figure, axes = new_figure((6.0, 4.8))
    axes.imshow(values, cmap="Blues", aspect="auto")
    middle = (float(values.min()) + float(values.max())) / 2
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if value > middle else INK
        axes.text(column, row, f"{value:.1f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(learners)), list(map(str, learners)))
    axes.set_yticks(range(len(components)), list(map(str, components)))
    return _finish(figure, axes, title, "learners M2", "Gaussians M1", path, legend=False)


def plot_likelihoods(panels: Mapping[str, Mapping[str, FloatArray]], path: Path) -> Path:
    """Draw one histogram per panel: scores ``(n,)`` of groups of rows, scaled to lie in [0, 1]."""
    figure, grid = new_figure((4.2 * len(panels), 3.4), 1, len(panels), squeeze=False)
    for axes, (title, groups) in zip(grid[0], panels.items(), strict=True):
        low, high = np.percentile(np.concatenate(list(groups.values())), [_TAIL, 100 - _TAIL])
        width = float(high - low) or 1.0
        for number, (name, scores) in enumerate(groups.items()):
            shown = np.clip((scores - low) / width, 0, 1)
            share = np.full(len(shown), 1 / len(shown))
            bins = np.linspace(0, 1, _BINS + 1)
            axes.hist(shown, bins, weights=share, alpha=0.65, label=name, color=colour_of(number))
        axes.set_title(title, color=INK)
        axes.set_xlabel("score, scaled to lie between 0 and 1", color=INK)
        axes.legend(frameon=False)
        quiet(axes, ("top", "right"))
    return save_figure(figure, path)


def plot_groups(
    groups: Mapping[str, tuple[FloatArray, FloatArray]], title: str, path: Path
) -> Path:
    """Draw both scores of rows, ``log P(x)`` and ``log P(y|x)``, ``(n,)`` each, one colour per group."""
    figure, axes = new_figure((6.8, 4.8))
    for number, (name, (x, y)) in enumerate(groups.items()):
        step = max(1, len(x) // _MOST_POINTS)
        axes.scatter(
            x[::step], y[::step], s=7, alpha=0.45, linewidths=0, label=name, color=colour_of(number)
        )
    return _finish(figure, axes, title, "log P(x)", "log P(y|x)", path, marker_scale=3.0)


def new_figure(size: tuple[float, float], *grid: int, **options: Any) -> tuple[Figure, Any]:
    """Return a figure and its axes, which are an array for a grid of several."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(*grid, **options)


def _finish(
    figure: Figure,
    axes: Axes,
    title: str,
    x_label: str,
    y_label: str,
    path: Path,
    legend: bool = True,
    marker_scale: float = 1.0,
) -> Path:
    """Write titles and legend, and save the figure."""
    axes.set_title(title, color=INK)
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    if legend:
        axes.legend(frameon=False, markerscale=marker_scale)
    quiet(axes, ("top", "right"))
    return save_figure(figure, path)


def save_figure(figure: Figure, path: Path, dpi: int = _DPI) -> Path:
    """Write a figure as PNG and return the path; a missing folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    return path


def quiet(axes: Axes, sides: Sequence[str] = ("top", "right", "bottom", "left")) -> None:
    """Remove these sides of the frame and all tick marks, which distract from the data."""
    for side in sides:
        axes.spines[side].set_visible(False)
    axes.tick_params(which="both", length=0, colors=INK)


# ---------------------------------------------------------------------- contact sheets

# A transform that scrambles pixels trains without an error, so somebody has to look at its images.


@dataclass(frozen=True)
class Strip:
    """One row of the sheet."""

    title: str  # the step that the images show
    images: ByteArray  # ``(n, channels, height, width)``
    captions: Sequence[str] = ()  # one below each image; none if empty


def contact_sheet(source: FederatedImages | ImageData, path: Path, columns: int = _COLUMNS) -> Path:
    """Draw images of several classes before, during and after the transform.

    A federation shows images that were left alone and images that were changed, each with the label
    that its client has. A data set shows the steps of the transform alone.

    Args:
        source: images from :func:`fedgmm.data.images.federated.federated_images` or
            :func:`fedgmm.data.images.files.load_images`.
        path: where the PNG is written, which is returned; a missing folder is created.
        columns: number of classes, spread over all of them; one image per class.
    """
    if isinstance(source, ImageData):
        heading = f"{source.name}: the joint shift, step by step"
    else:
        clients = counted(len(source.dataset.names), "client holds", "clients hold")
        heading = f"{source.name}: what {clients}"
    return _draw_sheet(strips_of(source, columns), heading, path)


def transform_sheet(
    data: ImageData,
    transforms: Mapping[str, Callable[[ByteArray], ByteArray]],
    path: Path,
    columns: int = _COLUMNS,
) -> Path:
    """Draw images of several classes and, below them, the result of each transform.

    ``transforms`` are functions of images ``(n, channels, height, width)``, by their titles. The rest is as
    in :func:`contact_sheet`.
    """
    first, *_ = strips_of(data, columns)
    strips = [first, *(Strip(title, make(first.images)) for title, make in transforms.items())]
    return _draw_sheet(strips, f"{data.name}: transforms", path)


def strips_of(source: FederatedImages | ImageData, columns: int = _COLUMNS) -> list[Strip]:
    """Return the rows of the sheet, from top to bottom."""
    if isinstance(source, ImageData):
        chosen = _one_per_class(source.labels, columns)
        names = [source.class_names[label] for label in source.labels[chosen]]
        return _steps(source.images[chosen], names)
    images, labels = source.dataset.train.inputs.numpy(), source.dataset.train.labels.numpy()
    changed = source.changed["train"]

    def names_of(labels: IntArray) -> list[str]:
        return [source.class_names[label] for label in labels]

    strips = []
    if not changed.all():
        kept = np.flatnonzero(~changed)
        kept = kept[_one_per_class(labels[kept], columns)]
        strips.append(Strip("left alone,\nwith its label", images[kept], names_of(labels[kept])))
    if changed.any():
        shifted = np.flatnonzero(changed)
        old_labels = np.argsort(source.new_labels)[labels[shifted]]
        chosen = _one_per_class(old_labels, columns)
        shifted = shifted[chosen]
        original = transform_images(images[shifted], WHITE)  # the transform is its own inverse
        strips += _steps(original, names_of(old_labels[chosen]))[:-1]
        title = "and inverted,\nas its client holds it,\nwith its new label"
        strips.append(Strip(title, images[shifted], names_of(labels[shifted])))
    return strips


def _steps(images: ByteArray, captions: Sequence[str]) -> list[Strip]:
    """Return one strip per step of the transform; the last strip is the whole transform."""
    turned = np.rot90(images, axes=(-2, -1))
    return [
        Strip("as it is in the file", images, captions),
        Strip("turned by 90 degrees", turned),
        Strip("and flipped", turned[..., ::-1]),
        Strip("and inverted", transform_images(images, WHITE), captions),
    ]


def _one_per_class(labels: IntArray, columns: int) -> IntArray:
    """Return the first row of each of ``columns`` classes, spread over those that occur, ``(n,)``."""
    _, first_rows = np.unique(labels, return_index=True)
    count = min(columns, len(first_rows))
    spread = np.linspace(0, len(first_rows) - 1, count).round().astype(int)
    return np.asarray(first_rows[spread], dtype=np.int64)


def _draw_sheet(strips: Sequence[Strip], heading: str, path: Path) -> Path:
    from PIL import Image, ImageDraw

    # All lengths are in dots: a margin for titles, then images with gaps and lines for captions.
    margin, top = 130, 34
    height, width = (_SCALE * pixels for pixels in strips[0].images.shape[-2:])
    cell_height, cell_width = height + 22, width + 12
    longest = max(len(strip.images) for strip in strips)
    size = (margin + cell_width * longest, top + cell_height * len(strips))
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((6, 8), heading, INK, font_size=13)
    for line, strip in enumerate(strips):
        y = top + line * cell_height
        draw.text((6, y + height / 2), strip.title, INK, anchor="lm", font_size=11)
        captions = strip.captions or [""] * len(strip.images)
        for column, (image, caption) in enumerate(zip(strip.images, captions, strict=True)):
            x = margin + column * cell_width
            pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
            shown = Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")
            sheet.paste(shown.resize((width, height), Image.Resampling.NEAREST), (x, y))
            draw.rectangle((x - 1, y - 1, x + width, y + height), outline=_FRAME)
            text = caption.replace("_", " ")[:14]
            draw.text((x + width / 2, y + height + 3), text, INK, anchor="ma", font_size=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, optimize=True)
    return path
