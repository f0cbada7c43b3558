"""Sums that leave with noise: one vector per release, to which a unit adds a vector of length one at most.

A release has parts, such as counts and moments. A part is divided by the largest length that one unit can
give it, and multiplied by the root of its share of the release. The shares add up to one, so the whole
vector of one unit has length one at most: its L2 sensitivity is one, and one deviation serves all numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.privacy.noise import grid_sensitivity

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Part:
    """One named array of a release.

    Attributes:
        bound: largest Euclidean length of one unit's contribution.
        share: part of the release's ``μ²`` that pays for the array.
    """

    name: str
    shape: tuple[int, ...]
    bound: float
    share: float

    @property
    def numbers(self) -> int:
        """Number of numbers in the part."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class NoisySums:
    """The parts of one release."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        total = sum(part.share for part in self.parts)
        if not math.isclose(total, 1.0):
            raise ValueError(
                f"The shares of a release add up to {total:g}; they must add up to one."
            )

    @property
    def numbers(self) -> int:
        """Number of numbers in the vector."""
        return sum(part.numbers for part in self.parts)

    @property
    def sensitivity(self) -> float:
        """Largest change of the total, after rounding to the grid, when one unit comes or goes."""
        return grid_sensitivity(1.0, self.numbers)

    def vector(self, sums: Mapping[str, Tensor]) -> FloatArray:
        """Return sums as one vector, in units of the bounds."""
        return np.concatenate(
            [
                sums[one.name].double().cpu().numpy().reshape(-1) * math.sqrt(one.share) / one.bound
                for one in self.parts
            ]
        )

    def read(self, total: FloatArray) -> dict[str, Tensor]:
        """Return the named arrays of a vector."""
        found, first = {}, 0
        for one in self.parts:
            values = total[first : first + one.numbers] * one.bound / math.sqrt(one.share)
            found[one.name] = torch.from_numpy(values).reshape(one.shape)
            first += one.numbers
        return found

    def deviations(self, sigma: float) -> dict[str, float]:
        """Return the deviation of the noise of each part, if the vector has noise of ``sigma``."""
        return {one.name: sigma * one.bound / math.sqrt(one.share) for one in self.parts}

    def clipped(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return one unit's sums, with every part scaled down to its bound."""
        return {one.name: shorten(sums[one.name], one.bound) for one in self.parts}


def shorten(values: Tensor, most: float) -> Tensor:
    """Return an array scaled down to length ``most``, if it is longer."""
    length = float(torch.linalg.vector_norm(values.double()))
    return values if length <= most else values * (most / length * (1.0 - 1e-12))


def clip_rows(x: Tensor, radius: float) -> Tensor:
    """Return rows ``(n, d)`` with those outside a ball scaled down to its surface."""
    lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (radius / lengths.clamp_min(1e-300)).clamp_max(1.0)


def triangle(matrices: Tensor) -> Tensor:
    """Return symmetric matrices ``(..., d, d)`` as vectors ``(..., d(d+1)/2)`` of the same length.

    Entries off the diagonal are multiplied by ``√2``, because each stands for two.
    """
    rows, columns, scale = _places(matrices.shape[-1])
    return matrices[..., rows, columns] * scale.to(matrices)


def from_triangle(vectors: Tensor, size: int) -> Tensor:
    """Return the symmetric matrices of :func:`triangle`."""
    rows, columns, scale = _places(size)
    values = vectors / scale.to(vectors)
    matrices = vectors.new_zeros(*vectors.shape[:-1], size, size)
    matrices[..., rows, columns] = values
    matrices[..., columns, rows] = values
    return matrices


def _places(size: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = torch.tril_indices(size, size)
    scale = torch.where(rows == columns, 1.0, math.sqrt(2.0)).double()
    return rows, columns, scale
