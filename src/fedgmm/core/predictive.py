"""Predictions of the fitted mixture, equation (3) of the paper, and the weights of a new client.

Everything is in log space. Shapes: ``n`` rows, ``M1`` Gaussians, ``M2`` learners, ``K`` classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgmm.core.gaussians import log_normal
from fedgmm.core.moments import Scaling
from fedgmm.support.scratch import blocks_in, empty_beside, ordered

_SMALLEST_SHARE = 1e-15  # of a tail; its normal score is -7.9
_HALVINGS = 60  # of an interval around a quantile; more would not change a float64


def log_class_probabilities(
    log_pi: Tensor, log_x: Tensor | None, log_y: Tensor, log_ratios: Tensor | None = None
) -> Tensor:
    """Return ``log P_c(y|x)`` of every class, ``(n, K)``: equation (3).

    ``P_c(y|x) = Σ π_c(m1, m2) N(x; μ_m1, Σ_m1) P_θm2(y|x) / Σ π_c(m1, m2) N(x; μ_m1, Σ_m1)``

    ``log_pi`` is that of each row's client, ``(n, M1, M2)``, ``log_x`` is
    ``log N(x_i; μ_m1, Σ_m1)``, ``(n, M1)`` (``None`` without Gaussians), and ``log_y`` is
    ``log P_θm2(y|x_i)``, ``(n, M2, K)``. ``log_ratios`` correct for the label frequencies of each
    row's client, see :mod:`fedgmm.core.labels`: ``log P_c(y|m1, m2) - log P(y|m1, m2)``,
    ``(n, M1, M2, K)``.
    """
    if log_ratios is not None:
        joint = log_pi if log_x is None else log_pi + log_x.unsqueeze(-1)
        joint = joint - joint.logsumexp((-2, -1), keepdim=True)
        corrected = joint.unsqueeze(-1) + log_y.unsqueeze(-3) + log_ratios
        return torch.log_softmax(corrected.logsumexp((-3, -2)), -1)
    learner = log_learner_weights(log_pi, log_x)
    # normalised once more, because rounding may leave a sum slightly above one
    return torch.log_softmax(torch.logsumexp(learner.unsqueeze(-1) + log_y, dim=-2), -1)


def log_learner_weights(log_pi: Tensor, log_x: Tensor | None) -> Tensor:
    """Return ``log P_c(m2|x)``, ``(n, M2)``: Gaussians decide how much each learner counts for a row."""
    learner = (log_pi if log_x is None else log_pi + log_x.unsqueeze(-1)).logsumexp(-2)
    return learner - learner.logsumexp(-1, keepdim=True)


@dataclass(frozen=True)
class NumberPredictions:
    """Equation (3) for numbers: ``P_c(y|x) = Σ_m P_c(m|x) N(y; f_θm(x), σ²_m)`` of every row."""

    log_weights: Tensor  # ``log P_c(m|x)``, ``(n, M2)``
    means: Tensor  # ``f_θm(x)``, ``(n, M2)``
    variances: Tensor  # ``σ²_m``, ``(n, M2)``
    # :meth:`normal_scores` of held-out rows, ``(h,)``, for the calibration of intervals; ``None``
    # without held-out rows
    held_out: Tensor | None = None

    def unscaled(self, scaling: Scaling) -> NumberPredictions:
        """Return predictions of ``y`` from those of ``(y - mean) / scale``."""
        mean, scale = scaling.mean.to(self.means), scaling.scale.to(self.means)
        shape = tuple(self.means.shape)
        found = [empty_beside(self.means, shape, mean.dtype) for _ in range(2)]
        terms = (self.means, self.variances, *found)
        for old_means, old_variances, means, variances in zip(*map(blocks_in, terms), strict=True):
            torch.mul(old_means, scale, out=means).add_(mean)
            torch.mul(old_variances, scale**2, out=variances)
        return replace(self, means=found[0], variances=found[1])

    def rows(self, place: slice) -> NumberPredictions:
        """Return the predictions of some rows."""
        own = (self.log_weights[place], self.means[place], self.variances[place])
        return NumberPredictions(*own, self.held_out)

    @property
    def mean(self) -> Tensor:
        """``E[y|x] = Σ_m P_c(m|x) f_θm(x)``, ``(n,)``."""
        mean: Tensor = (self.log_weights.exp() * self.means).sum(-1)
        return mean

    @property
    def variance(self) -> Tensor:
        """``Var[y|x] = Σ_m P_c(m|x) (σ²_m + (f_θm(x) - E[y|x])²)``, ``(n,)``."""
        spread = (self.means - self.mean.unsqueeze(-1)).square()
        variance: Tensor = (self.log_weights.exp() * (self.variances + spread)).sum(-1)
        return variance

    def log_density(self, y: Tensor) -> Tensor:
        """Return ``log P_c(y|x)`` of numbers ``(n,)``, ``(n,)``."""
        own = log_normal(y.unsqueeze(-1), self.means, self.variances)
        return torch.logsumexp(self.log_weights + own, dim=-1)

    def normal_scores(self, y: Tensor) -> Tensor:
        """Return ``Φ⁻¹(P_c(Y ≤ y|x))`` of numbers ``(n,)``: standard normal if the model is right."""
        scores = empty_beside(self.means, (len(y),), self.means.dtype)
        terms = (self.means, self.variances, self.log_weights, y, scores)
        for means, variances, log_weights, own, out in zip(*map(blocks_in, terms), strict=True):
            numbers = own.to(means.device).unsqueeze(-1)
            below = torch.special.ndtr((numbers - means) / variances.sqrt())
            share = (log_weights.exp() * below).sum(-1)
            out.copy_(torch.special.ndtri(share.clamp(_SMALLEST_SHARE, 1.0 - _SMALLEST_SHARE)))
        return scores

    def interval(self, level: float, z: float | None = None) -> tuple[Tensor, Tensor]:
        """Return the ends of the interval that holds ``y`` with probability ``level``, ``(n,)`` each.

        ``z`` is :meth:`normal_score` of the level, if it is known.
        """
        z = self.normal_score(level) if z is None else z
        share = float(torch.special.ndtr(torch.tensor(z, dtype=torch.float64)))
        return self.quantile(1.0 - share), self.quantile(share)

    def normal_score(self, level: float) -> float:
        """Return the ``z`` of the ends of intervals that hold ``y`` with probability ``level``.

        The ends are the quantiles ``Φ(±z)``. By the model ``Φ(z) = (1 + level) / 2``; but ``σ²`` is that of
        the training rows, which is too small if they are few. So with enough held-out rows ``z`` is taken
        from them by split-conformal prediction: the ``⌈(h + 1) · level⌉``-th smallest of their ``|z_i|``.
        Then rows drawn like the held-out ones lie inside with at least this probability, however well
        the model fits.
        """
        z = float(torch.special.ndtri(torch.tensor((1.0 + level) / 2.0, dtype=torch.float64)))
        if self.held_out is not None:
            rank = math.ceil((len(self.held_out) + 1) * level)
            if rank <= len(self.held_out):
                z = float(ordered(self.held_out.abs().cpu().numpy())[rank - 1])
        return z

    def quantile(self, share: float) -> Tensor:
        """Return the ``y`` below which a share of ``P_c(y|x)`` lies, ``(n,)``, by bisection.

        It lies between the smallest and the largest quantile of the row's learners.
        """
        weights, deviations = self.log_weights.exp(), self.variances.sqrt()
        level = torch.tensor(share, dtype=self.means.dtype, device=self.means.device)
        own = self.means + deviations * torch.special.ndtri(level)
        low, high = own.amin(-1), own.amax(-1)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            below = torch.special.ndtr((middle.unsqueeze(-1) - self.means) / deviations)
            less = (weights * below).sum(-1) < level
            low, high = torch.where(less, middle, low), torch.where(less, high, middle)
        quantile: Tensor = (low + high) / 2
        return quantile


def log_marginal(log_pi: Tensor, log_x: Tensor) -> Tensor:
    """Return ``log P_c(x) = log Σ_m1 N(x; μ_m1, Σ_m1) Σ_m2 π_c(m1, m2)``, ``(n,)``.

    ``log_pi`` is that of each row's client, ``(n, M1, M2)``, and ``log_x`` is ``(n, M1)``.
    """
    return torch.logsumexp(log_pi.logsumexp(-1) + log_x, dim=-1)


def new_client_weights(
    log_likelihood: Tensor,
    start: Tensor,
    max_rounds: int = 200,
    tol: float = 1e-8,
    *,
    strength: float | Tensor = 0.0,
    rows: Tensor | None = None,
    prior: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, list[float]]:
    """Fit the weights ``π_c`` of a new client by EM, with all Gaussians and learners fixed.

    ``π_c(m) ∝ Σ_i q_i(m) + a π(m)`` with ``q_i(m) ∝ π_c(m) P_m(s_i)``: the mode under a Dirichlet
    prior around the federation's weights, which count for ``a`` rows. Without a prior (``a = 0``)
    the log-likelihood never falls. Several fits run at once if ``strength`` or ``rows`` has leading
    axes.

    Args:
        log_likelihood: ``log P_m(s_i)``, ``(n, M)``.
        start: the federation's weights ``π``, ``(M,)``, which are the start; zero stays zero.
        max_rounds: maximal number of iterations.
        tol: stop when the mean log-likelihood changes by less.
        strength: ``a``, ``(...)``.
        rows: one for rows that count and zero for others, ``(..., n)``; ``None`` means all rows.
        prior: further prior, a function of the counts, ``(..., M)`` to ``(..., M)``.

    Returns:
        The weights ``(..., M)`` and the mean log-likelihood before every iteration.
    """
    # Likelihoods relative to the row's best component need one exponential for all iterations.
    # Components of weight zero are left out, because beside them the others could underflow.
    possible = log_likelihood.masked_fill(start <= 0, -torch.inf)
    largest = possible.amax(-1, keepdim=True)
    relative = torch.exp(possible - largest)
    counted = relative.new_ones(len(relative)) if rows is None else rows
    prior_counts = torch.as_tensor(strength).to(start)[..., None] * start
    offset = (counted * largest.squeeze(-1)).sum(-1)
    total = counted.sum(-1).clamp_min(1.0)
    weights, history = start.expand_as(counted[..., :1] + prior_counts), list[float]()
    for _ in range(max_rounds):
        evidence = (weights @ relative.mT).clamp_min(torch.finfo(relative.dtype).tiny)
        history.append(float((((counted * evidence.log()).sum(-1) + offset) / total).mean()))
        # Σ_i π_c(m) P_m(s_i) / Σ_m' π_c(m') P_m'(s_i) + a π(m)
        counts = weights * ((counted / evidence) @ relative) + prior_counts
        weights = counts if prior is None else prior(counts)
        weights = weights / weights.sum(-1, keepdim=True)
        if len(history) > 1 and abs(history[-1] - history[-2]) < tol:
            break
    return weights, history


STRENGTHS: tuple[float, ...] = tuple(2.0**power for power in range(8))
"""Candidates of :func:`prior_strength`, in rows."""


def prior_strength(counts: Tensor, mean: Tensor) -> float:
    """Return the one of ``STRENGTHS`` under which the clients' counts are most likely.

    A client's weights are drawn from a Dirichlet distribution around ``π`` with strength ``a``, and
    its rows from its weights (Dirichlet-multinomial), so a small ``a`` means that clients differ a
    lot::

        Σ_c [log Γ(a) - log Γ(N_c + a) + Σ_m (log Γ(γ_c(m) + a π(m)) - log Γ(a π(m)))]

    ``counts`` are ``γ_c(m) = N_c π_c(m)``, ``(C, M)``, and ``mean`` is ``π``, positive, ``(M,)``.
    """
    a = torch.tensor(STRENGTHS).to(counts)[:, None]
    of_pairs = torch.lgamma(counts + (a * mean)[:, None]) - torch.lgamma(a * mean)[:, None]
    of_rows = torch.lgamma(a) - torch.lgamma(counts.sum(-1) + a)
    return STRENGTHS[int((of_pairs.sum(-1) + of_rows).sum(-1).argmax())]


def shares_of_models(log_p: Tensor) -> Tensor:
    """Return ``v_k ∝ exp Σ_i log P_k(y_i|x_i)``, the shares in an average of models, ``(k,)``.

    ``log_p``, ``(n, k)``, is that of models that were fitted without row ``i``.
    """
    return torch.softmax(log_p.sum(0), 0)
