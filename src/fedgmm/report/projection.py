"""The shared Gaussians and the clients in a plane, from parameters alone: no row is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_NAMED_PER_AXIS = 3


@dataclass(frozen=True)
class Projection:
    """Gaussians and clients in two dimensions, in the coordinates of the model.

    Attributes:
        axes: orthonormal directions of the plane, ``(d, 2)``.
        means: of the Gaussians, ``(M1, 2)``.
        covariances: of the Gaussians within the plane, ``(M1, 2, 2)``.
        shares: the federation's weight of each Gaussian, ``(M1,)``.
        clients: the mixture mean ``Σ_m1 π_c(m1) μ_m1`` of each client, ``(C, 2)``.
        strongest: the Gaussian with the largest weight of each client, ``(C,)``.
        captured: share of the spread that lies in the plane, between 0 and 1.
        separates: the plane was chosen by the means; otherwise by the largest variance.
        axis_titles: what the axes are made of.
    """

    axes: FloatArray
    means: FloatArray
    covariances: FloatArray
    shares: FloatArray
    clients: FloatArray
    strongest: NDArray[np.int64]
    captured: float
    separates: bool
    axis_titles: tuple[str, str]


def project(
    means: FloatArray,
    covariances: FloatArray,
    covariance_type: str,
    shares: FloatArray,
    client_shares: FloatArray,
    feature_names: Sequence[str] | None = None,
) -> Projection:
    """Lay the plane through the means; where they span only a line or a point, variance decides.

    Args:
        means: ``(M1, d)``, with at least two columns.
        covariances: shaped by their type, as :class:`fedgmm.core.gaussians.Gaussians` keeps them.
        covariance_type: one of its types.
        shares: the federation's ``π(m1)``, ``(M1,)``.
        client_shares: each client's ``π_c(m1)``, ``(C, M1)``.
        feature_names: of the ``d`` columns, for the titles of the axes.
    """
    shares = shares / shares.sum()
    centre = shares @ means
    apart = (means - centre) * np.sqrt(shares)[:, None]
    _, spreads, directions = np.linalg.svd(apart, full_matrices=False)
    told_apart = int((spreads > 1e-9 * (1.0 + np.abs(means).max())).sum())
    axes = directions[: min(told_apart, 2)].T
    within = _pooled(covariances, covariance_type, shares, means.shape[1])
    if axes.shape[1] < 2:
        axes = np.hstack([axes, _widest(within, axes)[:, : 2 - axes.shape[1]]])
    axes = _with_positive_leaders(axes)
    spread = apart.T @ apart if told_apart else within
    captured = np.trace(axes.T @ spread @ axes) / max(float(np.trace(spread)), 1e-300)
    first, second = (_axis_title(axes[:, k], k + 1, feature_names) for k in (0, 1))
    return Projection(
        axes,
        (means - centre) @ axes,
        _in_plane(covariances, covariance_type, axes, len(means)),
        shares,
        (client_shares @ means - centre) @ axes,
        client_shares.argmax(-1),
        float(min(captured, 1.0)),
        told_apart > 0,
        (first, second),
    )


def _pooled(
    covariances: FloatArray, covariance_type: str, shares: FloatArray, columns: int
) -> FloatArray:
    """``Σ_m π(m) Σ_m``, ``(d, d)``."""
    match covariance_type:
        case "full":
            return np.asarray(np.tensordot(shares, covariances, 1))
        case "tied":
            return covariances
        case _:  # variances of the columns, or one for all of them
            return np.asarray(np.diag(np.ones(columns) * (shares @ covariances)))


def _in_plane(
    covariances: FloatArray, covariance_type: str, axes: FloatArray, components: int
) -> FloatArray:
    """``Aᵀ Σ_m A`` for axes ``A`` ``(d, 2)``: ``(M1, 2, 2)``."""
    match covariance_type:
        case "full" | "tied":
            inside = axes.T @ covariances @ axes
        case "diag":
            inside = (axes.T * covariances[:, None]) @ axes
        case _:
            inside = covariances[:, None, None] * np.eye(2)
    return np.asarray(np.broadcast_to(inside, (components, 2, 2)))


def _widest(covariance: FloatArray, taken: FloatArray) -> FloatArray:
    """Directions of the largest variance at right angles to ``taken`` ``(d, k)``, widest first."""
    others = np.eye(len(covariance)) - taken @ taken.T
    values, vectors = np.linalg.eigh(others @ covariance @ others)
    # what is taken has variance zero here, and a constant column too: push the taken ones last
    order = np.argsort(-(values - np.square(taken.T @ vectors).sum(0)))
    return np.asarray(vectors[:, order])


def _with_positive_leaders(axes: FloatArray) -> FloatArray:
    """An axis and its mirror image are the same: let the largest entry be positive, always."""
    leaders = np.abs(axes).argmax(0)
    return np.asarray(axes * np.where(axes[leaders, range(axes.shape[1])] < 0, -1.0, 1.0))


def _axis_title(axis: FloatArray, number: int, feature_names: Sequence[str] | None) -> str:
    if feature_names is None:
        return f"direction {number}"
    strongest = np.argsort(-np.abs(axis))[:_NAMED_PER_AXIS]
    kept = [k for k in strongest if abs(axis[k]) > 0.3 * abs(axis[strongest[0]])]
    return "  ".join(f"{'+' if axis[k] > 0 else '−'} {feature_names[k]}" for k in kept)


def ellipse(mean: FloatArray, covariance: FloatArray, deviations: float = 2.0) -> FloatArray:
    """Points ``(61, 2)`` on the line of so many standard deviations around ``mean``."""
    values, vectors = np.linalg.eigh(covariance)
    turn = np.linspace(0.0, 2.0 * np.pi, 61)
    circle = np.stack([np.cos(turn), np.sin(turn)], axis=-1)
    radii = deviations * np.sqrt(values.clip(min=0.0))
    return np.asarray(mean + (circle * radii) @ vectors.T)
