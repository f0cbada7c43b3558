"""Pictures of pictures: what the images of a data set look like before and after a transform.

A transform that scrambles pixels trains without an error message; only eyes find it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedgmm.data.images.federated import FederatedImages
from fedgmm.data.images.files import WHITE, ImageData
from fedgmm.data.partition import transform_images
from fedgmm.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ByteArray = NDArray[np.uint8]

INK, FRAME = "#333333", "#bbbbbb"
_COLUMNS = 10
_DOTS_A_PIXEL = 2  # whole numbers keep pixels square and the file small
_DPI = 100


@dataclass(frozen=True)
class Strip:
    """A row of the sheet.

    Attributes:
        title: what was done to the images.
        images: ``(n, channels, height, width)``.
        captions: one under each image.
    """

    title: str
    images: ByteArray
    captions: tuple[str, ...]


def contact_sheet(source: FederatedImages | ImageData, path: Path, columns: int = _COLUMNS) -> Path:
    """Draw images of several classes, before, during and after the transform.

    A federation shows images that were left alone and images that were changed, each with the label
    that its client has; the steps between are made anew. A data set shows the steps alone.

    Args:
        source: what :func:`fedgmm.data.images.federated.federated_images` or
            :func:`fedgmm.data.images.files.load_images` returned.
        path: where the PNG goes; its folder is made if it is missing.
        columns: one class each, spread over all of them.

    Returns:
        ``path``.
    """
    return _drawn(strips_of(source, columns), _heading(source), path)


def transform_sheet(
    data: ImageData,
    transforms: Mapping[str, Callable[[ByteArray], ByteArray]],
    path: Path,
    columns: int = _COLUMNS,
) -> Path:
    """Draw images of several classes as they are, and below them what each transform makes of them.

    Args:
        data: what :func:`fedgmm.data.images.files.load_images` returned.
        transforms: by what they do; images ``(n, channels, height, width)`` in and out.
        path: where the PNG goes; its folder is made if it is missing.
        columns: one class each, spread over all of them.

    Returns:
        ``path``.
    """
    chosen = _one_a_class(data.labels, len(data.class_names), columns)
    images = data.images[chosen]
    captions = _names(data.class_names, data.labels[chosen])
    blank = ("",) * len(images)
    strips = [Strip("as it is in the file", images, captions)]
    strips += [Strip(title, change(images), blank) for title, change in transforms.items()]
    return _drawn(strips, f"{data.name}: transforms", path)


def _drawn(strips: Sequence[Strip], heading: str, path: Path) -> Path:
    from matplotlib.figure import Figure

    across = max(len(strip.images) for strip in strips)
    height, width = strips[0].images.shape[-2:]
    # in dots: images, gaps between them, a margin for titles, a line for captions
    cell_width, cell_height = _DOTS_A_PIXEL * width + 12, _DOTS_A_PIXEL * height + 22
    margin, top = 130, 34
    total = (margin + across * cell_width, top + len(strips) * cell_height)
    figure = Figure(figsize=(total[0] / _DPI, total[1] / _DPI), dpi=_DPI)
    figure.text(6 / total[0], 1 - 12 / total[1], heading, va="top", color=INK, size=9)
    for line, strip in enumerate(strips):
        y = total[1] - top - line * cell_height - _DOTS_A_PIXEL * height
        middle = y + _DOTS_A_PIXEL * height / 2
        figure.text(6 / total[0], middle / total[1], strip.title, va="center", color=INK, size=7.5)
        for column, (image, caption) in enumerate(zip(strip.images, strip.captions, strict=True)):
            x = margin + column * cell_width
            box = (x, y, _DOTS_A_PIXEL * width, _DOTS_A_PIXEL * height)
            axes = figure.add_axes(
                (box[0] / total[0], box[1] / total[1], box[2] / total[0], box[3] / total[1])
            )
            _draw(axes, image, caption)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, pil_kwargs={"optimize": True})
    return path


def strips_of(source: FederatedImages | ImageData, columns: int = _COLUMNS) -> list[Strip]:
    """The rows of the sheet, from top to bottom."""
    if isinstance(source, ImageData):
        names, labels = source.class_names, source.labels
        chosen = _one_a_class(labels, len(names), columns)
        return _steps(source.images[chosen], [names[k] for k in labels[chosen]])
    names, rows = source.class_names, source.dataset.train
    changed, labels = source.changed["train"], rows.labels.numpy()
    images = rows.inputs.numpy()
    alone = np.flatnonzero(~changed)
    strips = []
    if len(alone):
        chosen = alone[_one_a_class(labels[alone], len(names), columns)]
        strips.append(
            Strip("left alone,\nwith its label", images[chosen], _names(names, labels[chosen]))
        )
    held = np.flatnonzero(changed)
    if len(held):
        true_labels = np.argsort(source.new_labels)[labels[held]]
        picked = _one_a_class(true_labels, len(names), columns)
        chosen = held[picked]
        # the transform undoes itself
        before = transform_images(images[chosen], WHITE)
        strips += _steps(before, [names[k] for k in true_labels[picked]])[:-1]
        strips.append(
            Strip(
                "and inverted,\nas its client holds it,\nwith its new label",
                images[chosen],
                _names(names, labels[chosen]),
            )
        )
    return strips


def _steps(images: ByteArray, captions: list[str]) -> list[Strip]:
    """The transform one step after the other; the last strip is the transform itself."""
    turned = np.rot90(images, axes=(-2, -1))
    blank = ("",) * len(images)
    return [
        Strip("as it is in the file", images, tuple(captions)),
        Strip("turned by 90 degrees", turned, blank),
        Strip("and flipped", turned[..., ::-1], blank),
        Strip("and inverted", transform_images(images, WHITE), tuple(captions)),
    ]


def _one_a_class(labels: NDArray[np.int64], classes: int, columns: int) -> NDArray[np.int64]:
    """A row of each of ``columns`` classes, spread over those that occur, ``(n,)``."""
    present = np.flatnonzero(np.bincount(labels, minlength=classes))
    spread = np.linspace(0, len(present) - 1, min(columns, len(present))).round().astype(int)
    return np.array([np.flatnonzero(labels == k)[0] for k in present[spread]])


def _names(names: tuple[str, ...], labels: NDArray[np.int64]) -> tuple[str, ...]:
    return tuple(names[k] for k in labels)


def _heading(source: FederatedImages | ImageData) -> str:
    if isinstance(source, ImageData):
        return f"{source.name}: the joint shift, step by step"
    return (
        f"{source.name}: what {counted(len(source.dataset.names), 'client holds', 'clients hold')}"
    )


def _draw(axes: Axes, image: ByteArray, caption: str) -> None:
    """One image: ``(channels, height, width)`` becomes ``(height, width, channels)``."""
    shown = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    axes.imshow(shown, cmap="gray", vmin=0, vmax=WHITE, interpolation="nearest", aspect="auto")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set(color=FRAME, linewidth=0.7)  # a white background needs an edge
    if caption:
        axes.text(
            0.5, -0.04, caption.replace("_", " ")[:14], transform=axes.transAxes,
            ha="center", va="top", size=6.5, color=INK,
        )  # fmt: skip
