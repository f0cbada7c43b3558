"""Equations of private training: a client's sums, their sensitivity, and the next parameters.

All sums are over rows that were clipped to a ball, with the public parameters of the last release. If
rows or persons are protected, the E-step uses the weights ``π`` of the federation and not those of a
client: a client's own ``π_c`` depends on all its rows, so one row would change the responsibilities of the
others, and their sums. If whole clients are protected, the sums of a client are clipped together. So the
E-step uses ``π_c``, which the client learns in each round from its rows and the public parameters.

=============  ==========================================================  =========================
release        sums                                                        gives
=============  ==========================================================  =========================
``columns``    ``Σ x``, ``Σ x²`` within the declared bounds                scale of every column
``covariance`` ``Σ z``, ``Σ z zᵀ`` of standardised rows                    whitening, directions
``histogram``  rows per cell of a grid in the leading directions           first Gaussians
``round``      ``Σ q``, ``Σ q z``, ``Σ q z zᵀ``, ``Σ q (p - y) zᵀ``        Gaussians and learners
=============  ==========================================================  =========================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedgmm.core.em import add_likelihoods, responsibilities, update_gaussians
from fedgmm.core.gaussians import (
    CovarianceType,
    Gaussians,
    gaussians,
    log_densities,
    residuals,
    weighted_moments,
)
from fedgmm.core.newton import NewtonSums, contrasts, newton_step, newton_sums
from fedgmm.core.params import Params, per_entry
from fedgmm.privacy.noisy_sums import clip_rows, from_triangle, triangle

_SMALLEST_VARIANCE = 1e-4  # of a column within [-1, 1]
_LOWEST, _HIGHEST = 0.02, 16.0  # eigenvalues of a Gaussian's covariance in whitened coordinates
_CELLS_PER_DIRECTION = {1: 24, 2: 24, 3: 12}
_REACH = 3.0  # deviations that the histogram covers; rows beyond count for its outer cells
_SAMPLES = 10_000  # drawn from each released Gaussian for the curvature, over the squared contrasts
_FEWEST_SAMPLES = 2000
_CELL_ROUNDS = 50  # of EM on the histogram
_STEPS = 60
_REACHED = 0.8  # length to which rows are shortened in gradients, relative to the usual length
_PENALTY = 2.0  # per row, of learners whose gradients are half noise
_LOOSE = 1e-5  # of the penalty of exact steps: it is relative to few rows, and units under noise are many
_CLOSE = 1e-3  # change of the parameters at which Newton's method ends


class PrivateRows(NamedTuple):
    """Rows of one or several clients.

    Attributes:
        inputs: ``(n, d)``, float64, within ``[-1, 1]``.
        labels: ``(n,)``.
        weights: ``(n,)``; those of one unit add up to one at most.
    """

    inputs: Tensor
    labels: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Coordinates:
    """Public coordinates ``z = W (x - mean) / scale``, clipped to a ball.

    Attributes:
        mean: ``(d,)``.
        scale: ``(d,)``.
        covariance: of the standardised rows, repaired, ``(d, d)``.
        whitener: ``W``, symmetric, ``(d, d)``.
        projection: from standardised rows to the leading directions with unit variance, ``(d, k)``.
    """

    mean: Tensor
    scale: Tensor
    covariance: Tensor
    whitener: Tensor
    projection: Tensor

    def standardise(self, inputs: Tensor) -> Tensor:
        """Return standardised rows, clipped to a ball."""
        return clip_rows((inputs - self.mean) / self.scale, radius(len(self.mean)))

    def apply(self, inputs: Tensor) -> Tensor:
        """Return whitened rows, clipped to a ball."""
        whitened = (inputs - self.mean) / self.scale @ self.whitener
        return clip_rows(whitened, radius(len(self.mean)))


def radius(columns: int) -> float:
    """Return the radius of the ball: a row of ``d`` independent columns of variance one has length √d."""
    return math.sqrt(columns) + 1.0


def gradient_radius(columns: int) -> float:
    """Return the length to which a row with its constant is shortened in a gradient.

    Most rows are longer. That gives them other weights in the sum, and hardly moves where it vanishes.
    """
    return _REACHED * math.sqrt(columns + 1.0)


def unscaled(columns: int, directions: int) -> Coordinates:
    """Return coordinates before any release."""
    eye = torch.eye(columns, dtype=torch.float64)
    zero, one = eye.new_zeros(columns), eye.new_ones(columns)
    return Coordinates(zero, one, eye, eye, eye[:, :directions])


# ---------------------------------------------------------------------- columns


def column_sums(rows: PrivateRows) -> dict[str, Tensor]:
    """Return ``Σ w``, ``Σ w x`` and ``Σ w x²``."""
    x, w = rows.inputs, rows.weights[:, None]
    return {
        "rows": rows.weights.sum()[None],
        "first": (w * x).sum(0),
        "second": (w * x.square()).sum(0),
    }


def standardised(
    current: Coordinates, noisy: Mapping[str, Tensor], deviation: Mapping[str, float]
) -> Coordinates:
    """Return coordinates with mean zero, and with variances that are one on average.

    Means and variances are shrunk to those of all columns by as much as the noise hides their
    differences, so that few rows are centred and scaled by one number each. Columns are divided by the
    root of their deviation (Pareto scaling): those with little spread, such as the edge of an image, mostly
    add noise to gradients. With many rows the covariance removes what is left of the differences.
    """
    n = noisy["rows"].clamp_min(1.0)
    error = deviation["first"] / float(n)
    raw = noisy["first"] / n
    mean = shrunk(raw, error).clamp(-1.0, 1.0)
    # the square of a noisy mean is too large by the variance of its noise
    variance = noisy["second"] / n - raw.square() + error**2
    noise = math.hypot(
        deviation["second"] / float(n), 2.0 * error * float(raw.square().mean()) ** 0.5
    )
    floor = max(_SMALLEST_VARIANCE, min(0.1, noise))
    spread = shrunk(variance, noise).clamp(floor, 1.0).sqrt()
    return replace(current, mean=mean, scale=(spread * spread.mean()).sqrt())


def shrunk(values: Tensor, noise: float, middle: Tensor | None = None) -> Tensor:
    """Return values ``(d,)`` shrunk to ``middle``, or to their mean, by as much as they are noise.

    ``noise`` is its deviation (James and Stein).
    """
    middle = values.mean() if middle is None else middle
    spread = float((values - middle).square().mean())
    return middle + max(0.0, 1.0 - noise**2 / max(spread, 1e-300)) * (values - middle)


# ---------------------------------------------------------------------- covariance


def covariance_sums(
    coordinates: Coordinates, rows: PrivateRows, centred: bool
) -> dict[str, Tensor]:
    """Return ``Σ w``, ``Σ w z`` and ``Σ w z zᵀ``, or ``Σ w (z zᵀ - I)`` if ``centred``."""
    z, w = coordinates.standardise(rows.inputs), rows.weights[:, None]
    second = z.mT @ (w * z)
    if centred:
        second = second - rows.weights.sum() * torch.eye(len(second), dtype=z.dtype)
    return {
        "rows": rows.weights.sum()[None],
        "first": (w * z).sum(0),
        "second": triangle(second),
    }


def whitened(
    current: Coordinates,
    noisy: Mapping[str, Tensor],
    deviation: Mapping[str, float],
    *,
    centred: bool,
    whiten: bool,
) -> Coordinates:
    """Return coordinates in which the rows have covariance one, and the leading directions.

    The matrix is shrunk towards a sphere by as much as noise made it (James and Stein). Directions whose
    eigenvalues may be noise alone are not stretched, because that would amplify the noise. So with few
    rows nothing is whitened.

    Without ``whiten`` only the directions are found, for Gaussians whose axes are the columns.
    """
    d, k = current.projection.shape
    n = noisy["rows"].clamp_min(1.0)
    second = from_triangle(noisy["second"], d)
    if centred:
        second = second + n * torch.eye(d, dtype=second.dtype)
    mean = shrunk(noisy["first"] / n, deviation["first"] / float(n), noisy["first"].new_zeros(()))
    covariance = second / n - torch.outer(mean, mean)
    noise = deviation["second"] / float(n)
    # the largest eigenvalue of a symmetric matrix of noise is about √(2d) deviations of the triangle
    level = noise * math.sqrt(2.0 * d)
    values, vectors = torch.linalg.eigh(covariance)
    middle = values.mean().clamp_min(0.05)
    spread = float((values - middle).square().sum())  # that of all numbers of the matrix
    kept = max(0.0, 1.0 - noise**2 * (d * (d + 1) / 2) / max(spread, 1e-300))
    stretch = values.clamp(min(max(0.05, level), float(d)), float(d)).rsqrt()
    values = (middle + kept * (values - middle)).clamp(0.05, float(d))
    # on average over the directions the variance is one
    stretch = stretch * (d / (values * stretch.square()).sum()).sqrt()
    whitener = (vectors * stretch) @ vectors.mT
    leading = vectors[:, -k:].flip(-1) if k else vectors[:, :0]
    return Coordinates(
        # the clipped mean moves, too, so that whitened rows have mean zero
        current.mean + current.scale * mean,
        current.scale,
        (vectors * values) @ vectors.mT,
        whitener if whiten else torch.eye(d, dtype=torch.float64),
        leading * values.flip(-1)[:k].rsqrt(),
    )


# ---------------------------------------------------------------------- histogram


def cells(directions: int) -> int:
    """Return the number of cells of the histogram."""
    return int(_CELLS_PER_DIRECTION[directions] ** directions)


def histogram_sums(coordinates: Coordinates, rows: PrivateRows) -> dict[str, Tensor]:
    """Return the number of rows in every cell of a grid in the leading directions."""
    k = coordinates.projection.shape[1]
    per_direction = _CELLS_PER_DIRECTION[k]
    y = coordinates.standardise(rows.inputs) @ coordinates.projection
    place = ((y + _REACH) / (2 * _REACH) * per_direction).long().clamp(0, per_direction - 1)
    cell = place[:, 0]
    for axis in range(1, k):
        cell = cell * per_direction + place[:, axis]
    counts = torch.zeros(cells(k), dtype=torch.float64)
    return {"cells": counts.index_add_(0, cell, rows.weights)}


def clustered(
    coordinates: Coordinates,
    noisy: Mapping[str, Tensor],
    deviation: Mapping[str, float],
    components: int,
    kind: CovarianceType,
    seed: int,
) -> tuple[Gaussians, Tensor]:
    """Return Gaussians and weights ``(M,)`` that fit the histogram.

    A small mixture is fitted to the cells by k-means and EM, in the leading directions. In all other
    directions the Gaussians have the covariance of all rows.
    """
    d, k = coordinates.projection.shape
    eye = torch.eye(d, dtype=torch.float64)
    whole = coordinates.whitener @ coordinates.covariance @ coordinates.whitener
    if not k:
        means = eye.new_zeros(components, d)
        return _of_kind(means, whole.expand(components, d, d), kind), eye.new_ones(components)
    weights, small = _fit_cells(noisy["cells"], deviation["cells"], k, components, seed)
    # z = W z₁, and the leading directions of z₁ have the deviations that ``projection`` divides by
    lengths = torch.linalg.vector_norm(coordinates.projection, dim=0)
    axes = coordinates.whitener @ (coordinates.projection / lengths.square())  # (d, k)
    missing = torch.eye(k, dtype=torch.float64) - small.covariances
    covariances = whole - axes @ missing @ axes.mT
    return _of_kind(small.means @ axes.mT, covariances, kind), weights


def _fit_cells(
    counts: Tensor, deviation: float, k: int, components: int, seed: int
) -> tuple[Tensor, Gaussians]:
    """Return weights and full Gaussians of a mixture of the cells, ``k`` columns."""
    from sklearn.cluster import KMeans

    per_direction = _CELLS_PER_DIRECTION[k]
    middles = (torch.arange(per_direction).double() + 0.5) / per_direction * 2 * _REACH - _REACH
    points = torch.cartesian_prod(*[middles] * k).reshape(-1, k)
    # a cell that noise alone may have filled counts for nothing
    filled = torch.where(counts > 2.0 * deviation, counts, 0.0)
    if int((filled > 0).sum()) < components:
        filled = counts.clamp_min(0.0) + 1e-9
    here = filled > 0
    points, filled = points[here], filled[here]
    found = KMeans(components, n_init=10, random_state=seed).fit(
        points.numpy(), sample_weight=filled.numpy()
    )
    width = 2 * _REACH / per_direction
    spread = torch.eye(k, dtype=torch.float64).mul(0.1).expand(components, k, k)
    current = gaussians(torch.from_numpy(found.cluster_centers_), spread, "full")
    weights = torch.full((components,), 1.0 / components, dtype=torch.float64)
    for _ in range(_CELL_ROUNDS):
        difference = residuals(points, current.means)
        q, _ = responsibilities(log_densities(difference, current) + weights.log())
        moments, _ = weighted_moments(difference, q * filled[:, None], "full")
        current = update_gaussians(moments, current, width**2 / 12)
        weights = (moments.counts / moments.counts.sum()).clamp_min(1e-3)
        weights = weights / weights.sum()
    return weights, current


def _of_kind(means: Tensor, covariances: Tensor, kind: CovarianceType) -> Gaussians:
    """Return Gaussians of a covariance type from full matrices ``(M, d, d)``, which are repaired."""
    full = repaired(covariances)
    variances = full.diagonal(dim1=-2, dim2=-1)
    match kind:
        case "full":
            found = full
        case "tied":
            found = full.mean(0)
        case "diag":
            found = variances
        case "spherical":
            found = variances.mean(-1)
        case _:
            found = torch.ones(len(means), dtype=torch.float64)
    return gaussians(means, found, kind)


def repaired(matrices: Tensor) -> Tensor:
    """Return symmetric matrices ``(..., d, d)`` with eigenvalues within public limits."""
    values, vectors = torch.linalg.eigh((matrices + matrices.mT) / 2)
    clamped = values.clamp(_LOWEST, _HIGHEST)
    product: Tensor = (vectors * clamped.unsqueeze(-2)) @ vectors.mT
    return product


# ---------------------------------------------------------------------- rounds


@dataclass(frozen=True)
class Mixture:
    """The public parameters that a round's E-step uses.

    Attributes:
        gaussians: in whitened coordinates; without a density they only give the curvature.
        weights: ``π(m1, m2)`` of the federation, flattened, ``(M1 · M2,)``.
        learners: linear, float64, in whitened coordinates: ``0.weight`` ``(M2, K, d)``, ``0.bias``.
    """

    gaussians: Gaussians
    weights: Tensor
    learners: Params

    @property
    def count(self) -> int:
        """``M2``."""
        return len(self.learners["0.bias"])

    def logits(self, z: Tensor) -> Tensor:
        """Return the logits of every learner, ``(n, M2, K)``."""
        product = torch.einsum("nd,mkd->nmk", z, self.learners["0.weight"])
        return product + self.learners["0.bias"]


def log_likelihood_range(columns: int, classes: int, density: bool) -> tuple[float, float]:
    """Return the middle of the range to which a row's log-likelihood is clipped, and its half width."""
    if density:
        return -0.5 * columns * (1.0 + math.log(2.0 * math.pi)), float(columns)
    return -math.log(max(classes, 2)), math.log(max(classes, 2))


def own_weights(log_p: Tensor, codes: Tensor, weights: Tensor, rounds: int) -> Tensor:
    """Return clients' weights ``π_c``, ``(C, M1 · M2)``, learned by EM from the federation's.

    The federation's weights, repeated for each client, count for one row of each. ``log_p`` are
    ``log N(x; m1) + log P_m2(y|x)`` of the rows, ``(n, M1, M2)``, and ``codes`` their clients.
    """
    log_p = log_p.flatten(1)
    p = (log_p - log_p.amax(1, keepdim=True)).exp()
    found = weights
    for _ in range(rounds):
        q = p * found[codes]
        q = q / q.sum(1, keepdim=True)
        found = weights.index_add(0, codes, q)
        found = found / found.sum(1, keepdim=True)
    return found


def log_joint(current: Gaussians, weights: Tensor, z: Tensor | None, log_y: Tensor) -> Tensor:
    """Return ``log π(m1, m2) + log N(z; m1) + log P_m2(y|x)``, ``(n, M1, M2)``.

    Weights are flattened, and ``log_y`` are ``(n, M2)``. Without whitened rows ``z`` the Gaussians take no
    part.
    """
    log_x = None if z is None else log_densities(residuals(z, current.means), current)
    log_pi = weights.log().reshape(-1, log_y.shape[1])
    return add_likelihoods(log_pi.expand(len(log_y), -1, -1).clone(), log_x, log_y)


def round_sums(
    current: Gaussians,
    weights: Tensor,
    z: Tensor | None,
    log_y: Tensor,
    of_rows: Tensor,
    limits: tuple[float, float],
    *,
    centred: bool,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the sums of a round over some rows except the gradient, and ``q``, ``(n, M1, M2)``.

    ``counts`` are ``Σ q(m1, m2)``; ``first`` and ``second`` are moments of each Gaussian around zero. If
    ``centred``, they are relative to the current Gaussians, so that they are small. The arguments are those
    of :func:`log_joint`, the weights of the rows, and :func:`log_likelihood_range`.
    """
    joint = log_joint(current, weights, z, log_y)
    q, evidence = responsibilities(joint.flatten(1))
    q = q.reshape(joint.shape)
    weighted = q * of_rows[:, None, None]
    middle, half = limits
    found = {
        "counts": weighted.flatten(1).sum(0),
        "log_likelihood": ((evidence - middle).clamp(-half, half) * of_rows).sum()[None],
    }
    if z is not None:
        around = residuals(z, torch.zeros_like(current.means))
        moments, _ = weighted_moments(around, weighted.sum(2), current.covariance_type)
        first, second = moments.first, moments.second
        if centred:
            first, second = relative(first, second, moments.counts, current, sign=-1.0)
        found["first"] = first
        kind = current.covariance_type
        found["second"] = triangle(second) if kind in ("full", "tied") else second
    return found, q


def linear_gradient(z: Tensor, log_p: Tensor, labels: Tensor, q: Tensor) -> Tensor:
    """Return the gradient of the cross-entropy in contrasts of the classes, ``(M2, K-1, d+1)``.

    ``log_p`` are ``log P_m2(k|x)``, ``(n, M2, K)``; ``q`` weigh rows for each learner, ``(n, M2)``.
    """
    n, m2, classes = log_p.shape
    # ∂CE/∂β = Bᵀ (p - y) zᵀ
    error = clip_rows(log_p.exp() - one_hot(labels, classes).double()[:, None], 1.0)
    error = error @ contrasts(classes) * q[..., None]
    with_one = clip_rows(torch.cat([z, z.new_ones(n, 1)], -1), gradient_radius(z.shape[1]))
    return (error.flatten(1).mT @ with_one).reshape(m2, classes - 1, -1)


def relative(
    first: Tensor, second: Tensor, counts: Tensor, current: Gaussians, *, sign: float
) -> tuple[Tensor, Tensor]:
    """Subtract from moments what the current Gaussians expect (``sign=-1``), or add it again (``sign=1``).

    ``Σ q (z - μ)`` and ``Σ q (z zᵀ - μ μᵀ - Σ)`` are close to zero for every client whose rows the
    Gaussians describe, whichever of them it has.
    """
    kind = current.covariance_type
    means, n = current.means, counts
    match kind:
        case "full":
            expected = means[:, :, None] * means[:, None] + current.covariances
            add = n[:, None, None] * expected
        case "tied":
            add = torch.einsum("m,md,me->de", n, means, means) + n.sum() * current.covariances
        case "diag":
            add = n[:, None] * (means.square() + current.covariances)
        case _:
            add = n * (means.square().sum(-1) + means.shape[-1] * current.covariances)
    return first + sign * n[:, None] * means, second + sign * add


def averaged(
    old: Tensor, old_variance: Tensor, new: Tensor, new_variance: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the mean of two noisy estimates weighted by their noise, and the variance of its noise.

    Estimates also differ because parameters moved in between. What they differ by more than their noise
    counts as noise of the older one, so with many rows the newest counts alone. Estimates are
    ``(M, ...)``, and variances of the noise in one of their values ``(M,)``.
    """
    difference = new - old
    expected = old_variance + new_variance
    drift = (difference.square().reshape(len(new), -1).mean(1) - expected).clamp_min(0.0)
    older = old_variance + drift
    gain = older / (older + new_variance)
    return old + per_entry(gain, difference) * difference, gain * new_variance


def next_gaussians(
    noisy: Mapping[str, Tensor],
    deviation: Mapping[str, float],
    counts: Tensor,
    current: Gaussians,
    before: Tensor | None,
    reg_covar: float,
    *,
    centred: bool,
) -> tuple[Gaussians, Tensor]:
    """Return the Gaussians of the noisy sums of a round, with repaired covariances, and their noise.

    They are averaged with the current Gaussians if ``before`` is given: the variance of the noise in one
    value of these means and covariances, ``(2, M1)``. A component with fewer rows than the noise could have
    made keeps its parameters. ``counts`` are ``Σ q(m1)``, ``(M1,)``, positive; ``centred`` is as in
    :func:`round_sums`.
    """
    d, kind = current.means.shape[1], current.covariance_type
    first, second = noisy["first"], noisy["second"]
    if kind in ("full", "tied"):
        second = from_triangle(second, d)
    if centred:
        first, second = relative(first, second, counts, current, sign=1.0)
    # the noise of a mean must be smaller than the radius of the ball
    alive = counts * radius(d) > 2.0 * deviation["first"] * math.sqrt(d)
    n = counts.clamp_min(1.0)
    means = clip_rows(first / n[:, None], radius(d))
    centre = means[:, :, None] * means[:, None]
    noise = deviation["second"] / n
    match kind:
        case "full":
            found = second / n[:, None, None] - centre
        case "tied":
            total = n.sum()
            found = second / total - (n[:, None, None] * centre).sum(0) / total
            found, noise = found[None], deviation["second"] / total.expand(1)
        case "diag":
            found = second / n[:, None] - means.square()
        case "spherical":
            found, noise = (second / n - means.square().sum(-1)) / d, noise / d
        case _:
            found = current.covariances
    if kind in ("full", "tied"):  # an entry off the diagonal has less noise by √2
        noise = noise * math.sqrt((d + 1) / (2 * d))
    old = current.covariances[None] if kind == "tied" else current.covariances
    variances = (deviation["first"] / n).square(), noise.square()
    if before is not None:
        means, of_means = averaged(current.means, before[0], means, variances[0])
        found, of_covariances = averaged(old, before[1, : len(old)], found, variances[1])
        variances = of_means, of_covariances
    if kind in ("full", "tied"):
        found = repaired(found)
        found.diagonal(dim1=-2, dim2=-1).add_(reg_covar)
    elif kind != "identity":
        found = found.clamp(_LOWEST, _HIGHEST) + reg_covar
    means = torch.where(alive[:, None], means, current.means)
    if kind != "tied":
        found = torch.where(per_entry(alive, found), found, old)
    kept = torch.stack([one.expand(len(means)) for one in variances])
    if before is not None:
        kept = torch.where(alive, kept, before)
    return gaussians(means, found[0] if kind == "tied" else found, kind), kept


@dataclass(frozen=True)
class MeanGradient:
    """Gradient per row at the learners as they are, averaged over the rounds so far.

    Attributes:
        values: ``(M2, K-1, d+1)``.
        variance: of the noise in one of the values, ``(M2,)``.
    """

    values: Tensor
    variance: Tensor

    def updated(self, new: MeanGradient) -> MeanGradient:
        """Return the mean of this gradient and a new one, see :func:`averaged`."""
        return MeanGradient(*averaged(self.values, self.variance, new.values, new.variance))


def next_learners(
    mixture: Mixture,
    gradient: Tensor,
    deviation: float,
    counts: Tensor,
    before: MeanGradient | None,
    ridge: float,
    seed: int,
) -> tuple[Params, MeanGradient]:
    """Return the learners at which a noisy gradient would vanish, by the released Gaussians.

    The server knows the distribution of the inputs, so it needs no Hessian of the clients. With
    ``p_θ(z)`` the probabilities of the classes, it solves for ``θ'``::

        n E[(p_θ'(z) - p_θ(z)) zᵀ] + Σ q (p_θ(z) - y) zᵀ + ridge θ' = 0

    If the Gaussians are wrong, steps are too long or too short, but the solution is still where the
    gradient vanishes. What is left of the gradient at ``θ'`` is what the next round should see there, so
    its gradient is averaged with this one.

    ``mixture`` has new Gaussians and weights, and the learners of the round. ``gradient`` is
    ``(M2, K-1, d+1)``, with noise of this ``deviation``; ``counts`` are ``n``, ``(M2,)``, positive. Earlier
    rounds expect the gradient ``before`` here. Noise raises the penalty ``ridge``. The draws are public.

    Returns the learners, and the gradient that is left at them.
    """
    m2 = mixture.count
    n = counts.clamp_min(1.0)[:, None, None]
    mean = MeanGradient(gradient / n, (deviation / n[:, 0, 0]).square())
    if before is not None:
        mean = before.updated(mean)
    expected = expected_sums(mixture, counts, seed)
    # the part of the gradient that the labels decide
    labels = (mean.values * n).reshape(m2, -1) - expected(mixture.learners).gradient
    signal = (labels / n[:, 0]).square().mean(1) - mean.variance
    noise_to_signal = mean.variance / torch.maximum(signal, mean.variance / 10.0).clamp_min(1e-300)
    penalty = max(_LOOSE * ridge, _PENALTY * float((noise_to_signal * n[:, 0, 0]).mean()))
    learners = mixture.learners
    for _ in range(_STEPS):
        sums = expected(learners)
        # the noise of a bias is as large as that of a weight
        new = newton_step(
            learners, replace(sums, gradient=sums.gradient + labels), penalty, penalty
        )
        change = max(float((new[name] - learners[name]).abs().max()) for name in new)
        learners = new
        if change < _CLOSE:
            break
    left = (expected(learners).gradient + labels).reshape(gradient.shape) / n
    return learners, MeanGradient(left, mean.variance)


def expected_sums(mixture: Mixture, counts: Tensor, seed: int) -> Callable[[Params], NewtonSums]:
    """Return a function from learners to the Newton sums that the Gaussians expect of one class.

    Rows, ``counts`` ``(M2,)`` of each learner, have the first class, and count as much as they are
    shortened in gradients. For two classes the expectation is a sum of integrals over one logit; more
    classes need draws.
    """
    d = mixture.gaussians.means.shape[1]
    if mixture.learners["0.bias"].shape[1] == 2:
        return partial(_two_classes, mixture, counts)
    draws, weights = draws_of(mixture, seed)
    lengths = (draws.square().sum(-1) + 1.0).sqrt()
    weights = weights * (gradient_radius(d) / lengths).clamp_max(1.0)[:, None] * counts
    first = torch.zeros(len(draws), dtype=torch.int64)

    def of_draws(learners: Params) -> NewtonSums:
        logits = replace(mixture, learners=learners).logits(draws)
        return newton_sums(logits, draws, first, weights)

    return of_draws


def _two_classes(mixture: Mixture, counts: Tensor, learners: Params) -> NewtonSums:
    """Return the expected Newton sums of two classes.

    With ``β`` in contrasts of the classes, the difference of the logits is ``t = √2 βᵀz``, where ``z``
    ends with a one. For a Gaussian, ``z = μ + k u + rest`` with ``k = Σβ / √(βᵀΣβ)``, and the rest is
    independent of the standard normal ``u``. So all expectations are integrals over ``u``.
    """
    current = mixture.gaussians
    m1, d = current.means.shape
    mean = torch.cat([current.means, current.means.new_ones(m1, 1)], 1)
    covariance = mean.new_zeros(m1, d + 1, d + 1)
    covariance[:, :d, :d] = full_covariances(current)
    second = covariance + mean[:, :, None] * mean[:, None]
    usual = second.diagonal(dim1=1, dim2=2).sum(1).sqrt()
    joint = mixture.weights.reshape(m1, -1)
    share = joint / joint.sum(0).clamp_min(1e-300) * counts
    w = share * (gradient_radius(d) / usual).clamp_max(1.0)[:, None]  # (M1, M2)

    theta = torch.cat([learners["0.weight"], learners["0.bias"][..., None]], -1)
    beta = torch.einsum("k,mkp->mp", contrasts(2)[:, 0], theta)
    spread = torch.einsum("ape,me->amp", covariance, beta)
    deviation = (spread * beta).sum(-1).clamp_min(1e-12).sqrt()
    k = spread / deviation[..., None]
    middle = (mean @ beta.mT)[..., None]
    # the logistic function changes near t = 0, the density near u = 0
    edge = torch.linspace(-24.0, 24.0, 385, dtype=torch.float64) / math.sqrt(2.0)
    edge = ((edge - middle) / deviation[..., None]).clamp(-8.0, 8.0)
    u = torch.linspace(-8.0, 8.0, 641, dtype=torch.float64).expand(*edge.shape[:2], -1)
    u = torch.cat([u, edge], -1).sort(-1).values
    density = torch.exp(-u.square() / 2.0) / math.sqrt(2.0 * math.pi)
    p = torch.sigmoid(math.sqrt(2.0) * (middle + deviation[..., None] * u))

    def mean_of(values: Tensor) -> Tensor:
        return w * torch.trapezoid(values * density, u)

    error, curvature = (p - 1.0) * math.sqrt(2.0), 2.0 * p * (1.0 - p)
    h0, h1, h2 = (mean_of(curvature * u**power) for power in range(3))
    gradient = mean_of(error).mT @ mean + torch.einsum("am,amp->mp", mean_of(error * u), k)
    cross = torch.einsum("am,amp,ae->mpe", h1, k, mean)
    hessian = (
        torch.einsum("am,ape->mpe", h0, second)
        + torch.einsum("am,amp,ame->mpe", h2 - h0, k, k)
        + cross
        + cross.mT
    )
    return NewtonSums(gradient, hessian, torch.einsum("am,ape->mpe", w, second), w.sum(0))


def full_covariances(current: Gaussians) -> Tensor:
    """Return the covariance matrices of Gaussians of any type, ``(M1, d, d)``."""
    m1, d = current.means.shape
    match current.covariance_type:
        case "full" | "tied":
            return current.covariances.expand(m1, d, d)
        case "diag":
            return torch.diag_embed(current.covariances)
        case _:
            return torch.diag_embed(current.covariances[:, None].expand(m1, d))


def draws_of(mixture: Mixture, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs drawn from the Gaussians ``(n, d)``, and their weights for the learners ``(n, M2)``."""
    current = mixture.gaussians
    m1, d = current.means.shape
    # a Hessian of K classes has (K - 1)² blocks
    pairs = max(1, mixture.learners["0.bias"].shape[1] - 1)
    count = max(_FEWEST_SAMPLES, _SAMPLES // pairs**2)
    normal = torch.from_numpy(np.random.default_rng(seed).standard_normal((m1, count, d)))
    spread = normal @ torch.linalg.cholesky(full_covariances(current)).mT
    draws = clip_rows((current.means[:, None] + spread).reshape(-1, d), radius(d))
    joint = mixture.weights.reshape(m1, -1)
    share = joint / joint.sum(0).clamp_min(1e-300) / count
    return draws, share.repeat_interleave(count, 0)
