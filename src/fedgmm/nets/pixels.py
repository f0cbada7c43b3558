"""Images as bytes, until a batch needs numbers."""

from __future__ import annotations

import torch
from torch import Tensor

MARGIN = 4
"""Pixels by which a random crop moves an image at most."""


def crop_and_flip(images: Tensor) -> Tensor:
    """Each image moved by up to ``MARGIN`` pixels, black coming in, and half of them mirrored.

    Draws are those of torch's generator for the device.

    Args:
        images: ``(..., channels, height, width)``.
    """
    *lead, channels, height, width = images.shape
    flat = images.reshape(-1, channels, height * width)
    device, rows = images.device, len(flat)
    down, right = torch.randint(-MARGIN, MARGIN + 1, (2, rows, 1, 1), device=device)
    mirrored = torch.rand(rows, 1, 1, device=device) < 0.5
    y = torch.arange(height, device=device)[:, None] + down
    x = torch.arange(width, device=device)
    x = torch.where(mirrored, width - 1 - x, x) + right
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)  # (rows, height, width)
    places = y.clamp(0, height - 1) * width + x.clamp(0, width - 1)
    moved = flat.gather(2, places.reshape(rows, 1, -1).expand(-1, channels, -1))
    moved = torch.where(inside.reshape(rows, 1, -1), moved, torch.zeros_like(moved))
    return moved.reshape(*lead, channels, height, width)


def as_numbers(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Inputs as networks read them.

    The bytes of images ``(..., n, channels, height, width)`` become numbers in [-1, 1]; everything else
    stays what it is.
    """
    numbers = inputs.to(dtype)
    image = inputs.dtype == torch.uint8 and inputs.dim() >= 4
    return numbers.div_(127.5).sub_(1.0) if image else numbers
