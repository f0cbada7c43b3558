"""Contact sheets: images of a data set before and after a transform.

A transform that scrambles pixels trains without an error, so somebody has to look at its images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedgmm.data.images.federated import FederatedImages
from fedgmm.data.images.files import WHITE, ImageData
from fedgmm.data.partition import transform_images
from fedgmm.report.plots import INK
from fedgmm.wording import counted

ByteArray = NDArray[np.uint8]
IntArray = NDArray[np.int64]

_FRAME = "#bbbbbb"
_COLUMNS = 10
_SCALE = 2  # dots per pixel; a whole number keeps pixels square and the file small


@dataclass(frozen=True)
class Strip:
    """One row of the sheet.

    Attributes:
        title: the step that the images show.
        images: ``(n, channels, height, width)``.
        captions: one below each image; none if empty.
    """

    title: str
    images: ByteArray
    captions: Sequence[str] = ()


def contact_sheet(source: FederatedImages | ImageData, path: Path, columns: int = _COLUMNS) -> Path:
    """Draw images of several classes before, during and after the transform.

    A federation shows images that were left alone and images that were changed, each with the label
    that its client has. A data set shows the steps of the transform alone.

    Args:
        source: images from :func:`fedgmm.data.images.federated.federated_images` or
            :func:`fedgmm.data.images.files.load_images`.
        path: where the PNG is written; a missing folder is created.
        columns: number of classes, spread over all of them; one image per class.

    Returns:
        ``path``.
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

    Args:
        data: images from :func:`fedgmm.data.images.files.load_images`.
        transforms: functions of images ``(n, channels, height, width)``, by their titles.
        path: where the PNG is written; a missing folder is created.
        columns: number of classes, spread over all of them; one image per class.

    Returns:
        ``path``.
    """
    chosen = _one_per_class(data.labels, columns)
    images = data.images[chosen]
    names = [data.class_names[label] for label in data.labels[chosen]]
    strips = [Strip("as it is in the file", images, names)]
    strips += [Strip(title, transform(images)) for title, transform in transforms.items()]
    return _draw_sheet(strips, f"{data.name}: transforms", path)


# ---------------------------------------------------------------------- choosing the images


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


# ---------------------------------------------------------------------- drawing


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
