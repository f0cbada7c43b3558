"""Standardising columns with sums alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """``z = (x - mean) / scale``, column by column.

    Attributes:
        mean: ``(d,)`` float64.
        scale: ``(d,)`` float64, positive.
    """

    mean: Tensor
    scale: Tensor

    def apply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Scaled rows, ``(..., d)``."""
        return ((x.double() - self.mean.to(x.device)) / self.scale.to(x.device)).to(dtype)

    @property
    def log_volume(self) -> float:
        """``Σ log scale``: densities of ``x`` are those of ``z`` less this."""
        return float(self.scale.log().sum())


def scaling_of(mean: Tensor, variance: Tensor) -> Scaling:
    """Scaling to mean zero and variance one; a constant column is only shifted."""
    constant = variance <= 1e-24 * (1.0 + mean.square())
    return Scaling(mean, torch.where(constant, 1.0, variance.clamp_min(1e-300).sqrt()))
