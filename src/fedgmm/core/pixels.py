"""Images as bytes, until a batch needs numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def as_numbers(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Inputs as networks read them.

    The bytes of images ``(..., n, channels, height, width)`` become numbers in [-1, 1]; everything else
    stays what it is.
    """
    numbers = inputs.to(dtype)
    image = inputs.dtype == torch.uint8 and inputs.dim() >= 4
    return numbers.div_(127.5).sub_(1.0) if image else numbers
