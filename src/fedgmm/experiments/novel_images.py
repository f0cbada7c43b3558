"""Changes that make images novel, or labels wrong."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fedgmm.data.embeddings import Images
from fedgmm.data.images.files import WHITE

IntArray = NDArray[np.int64]


def resized_about_centre(images: Images, scale: float) -> Images:
    """Images at ``scale`` times their size, at most one, in the middle of their own background.

    The background is black or white, whatever most of an image's rim is closer to.

    Args:
        images: ``(n, channels, side, side)`` uint8.
        scale: in (0, 1].
    """
    if not 0 < scale <= 1:
        raise ValueError(f"scale must lie above 0 and not above 1, got {scale!r}.")
    side = images.shape[-1]
    edge = (side - round(side * scale)) // 2  # the same on all sides
    inner = side - 2 * edge
    small = torch.nn.functional.interpolate(
        torch.from_numpy(images).float(), (inner, inner), mode="bilinear", antialias=True
    )
    rim = np.concatenate(
        [images[..., 0, :], images[..., -1, :], images[..., :, 0], images[..., :, -1]], axis=-1
    )
    light = np.median(rim, axis=-1) > WHITE / 2  # (n, channels)
    canvas = np.where(light[..., None, None], WHITE, 0) * np.ones((side, side))
    canvas[..., edge : side - edge, edge : side - edge] = small.round().numpy()
    return canvas.astype(np.uint8)


def turned(images: Images) -> Images:
    """Images turned by 90 degrees."""
    return np.ascontiguousarray(np.rot90(images, axes=(-2, -1)))


def novel_images(images: Images) -> Images:
    """Half the size, turned by 90 degrees, flipped left to right."""
    return np.ascontiguousarray(turned(resized_about_centre(images, 0.5))[..., ::-1])


def slightly_changed(images: Images) -> Images:
    """Four fifths of the size, turned by 90 degrees."""
    return turned(resized_about_centre(images, 0.8))


def other_labels(classes: int, generator: np.random.Generator) -> IntArray:
    """A random permutation ``(K,)`` that leaves no class where it was."""
    order = generator.permutation(classes)
    renamed = np.empty(classes, dtype=np.int64)
    renamed[order] = np.roll(order, 1)
    return renamed
