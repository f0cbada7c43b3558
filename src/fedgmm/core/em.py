"""The EM algorithm of the paper: the E-step, the M-step of ``π_c``, and the server's equations.

A round of FedGMM::

    client c    (E)  q_i(m1, m2) ∝ π_c(m1, m2) · N(x_i; μ_m1, Σ_m1) · P_θm2(y_i|x_i)
                (M)  γ_c(m) = Σ_i q_i(m)        π_c(m) = γ_c(m) / N_c
                     and sums over its rows: moments of the Gaussians, learners or their gradients
    server           π(m) = Σ_c γ_c(m) / Σ_c N_c
                     μ_m, Σ_m  from moments summed over clients
                     θ_m = Σ_c γ_c(m) θ_mc / Σ_c γ_c(m)

Every equation of the paper's server is a ratio of sums over clients. ``responsibilities`` and
``client_weights`` take any leading axes.

The densities ``log N`` and the weighted moments are in :mod:`fedgmm.core.gaussians`, the likelihoods
``log P_θ(y|x)`` in :mod:`fedgmm.nets.learners`. A client's learners ``θ_mc``, the argmax of (M), come
from :func:`fedgmm.nets.sgd.train_local`, or by exact steps from :mod:`fedgmm.core.newton`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fedgmm.core.gaussians import CovarianceType, Gaussians, Moments, gaussians, occupied
from fedgmm.core.moments import inverse_counts, outer
from fedgmm.core.params import Params, per_entry
from fedgmm.core.sums import ALIVE
from fedgmm.support.linalg import exp

Aggregation = Literal["exact", "paper"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)

# ---------------------------------------------------------------------- (E): responsibilities


def add_likelihoods(log_pi: Tensor, log_x: Tensor | None, log_y: Tensor | None = None) -> Tensor:
    """Return ``log π_c(m1, m2) + log N(x_i; μ_m1, Σ_m1) + log P_θm2(y_i|x_i)``, ``(n, M1, M2)``.

    Shapes are ``(n, M1, M2)``, ``(n, M1)`` and ``(n, M2)``; a term that is ``None`` is left out.
    The sum overwrites ``log_pi`` and keeps its layout in memory, because new tensors would slow
    down every E-step.
    """
    if log_x is not None:
        log_pi += log_x.unsqueeze(-1)
    if log_y is not None:
        log_pi += log_y.unsqueeze(-2)
    return log_pi


def responsibilities(log_joint: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``q_i(m) ∝ π_c(m) · P_m(s_i)``, normalised in log space: equation (E).

    From ``log π_c(m) + log P_m(s_i)``, ``(..., n, M)``, whose last axis runs over the pairs
    ``(m1, m2)`` if there are learners: ``q``, ``(..., n, M)``, and ``log Σ_m π_c(m) P_m(s_i)``,
    ``(..., n)``.
    """
    largest = log_joint.amax(-1, keepdim=True)
    q = exp(log_joint - largest)
    total = q.sum(-1, keepdim=True)
    return q.div_(total), total.log_().add_(largest).squeeze(-1)


# ---------------------------------------------------------------------- (M): weights of a client


def client_weights(counts: Tensor, rows: Tensor) -> Tensor:
    """Return ``π_c(m) = γ_c(m) / N_c`` with ``γ_c(m) = Σ_i q_i(m)``: equation (M).

    ``counts`` are ``γ_c(m)``, ``(..., C, M)``, and ``rows`` are ``N_c``, ``(..., C)``, positive.
    Each row of the result, ``(..., C, M)``, sums to one.
    """
    weights = counts / rows.unsqueeze(-1)
    # Normalise again, so that rounding in the responsibilities does not accumulate over rounds.
    return weights / weights.sum(-1, keepdim=True)


def towards_independence(counts: Tensor, learners: int, rows: float) -> Tensor:
    """Shrink each Gaussian's learner counts towards the client's overall shares of the learners.

    ``π_c(m2|m1) = (γ_c(m1, m2) + a π_c(m2)) / (γ_c(m1) + a)``, because a Gaussian that holds few of
    a client's rows says little about learners. ``a = 0`` changes nothing. With ``a → ∞`` learners
    do not depend on Gaussians, so labels are modelled as in FedEM.

    ``counts`` are ``γ_c(m1, m2)``, flattened, ``(..., C, M1 · M2)``, and ``rows`` is ``a``. The
    result has the same shape and the same sums over learners.
    """
    joint = counts.reshape(*counts.shape[:-1], -1, learners)
    of_gaussians = joint.sum(-1, keepdim=True)
    of_learners = joint.sum(-2, keepdim=True)
    shares = of_learners / of_learners.sum(-1, keepdim=True).clamp_min(1e-300)
    pulled = (joint + rows * shares) * of_gaussians / (of_gaussians + rows).clamp_min(1e-300)
    return pulled.reshape(counts.shape)


def over_learners(joint: Tensor, learners: int) -> Tensor:
    """Return ``Σ_m2 q(m1, m2)``: ``(..., M1 · M2)`` to ``(..., M1)``."""
    if learners == 1:
        return joint
    rows_last = joint.mT  # responsibilities have this layout in memory, so sums run along many rows
    return rows_last.reshape(-1, learners, rows_last.shape[-1]).sum(1).mT


# ---------------------------------------------------------------------- the server: π, μ and Σ


def federation_weights(counts: Tensor) -> Tensor:
    """Return the federation's own weights ``π(m) = Σ_c γ_c(m) / Σ_c N_c``, from ``Σ_c γ_c``, ``(M,)``."""
    return counts / counts.sum()


def update_gaussians(moments: Moments, current: Gaussians, reg_covar: float) -> Gaussians:
    """Return the Gaussians that maximise the expected log-likelihood: ``μ_m`` and ``Σ_m``.

    With ``n = Σ q`` and ``δ = Σ q (x - μ) / n``, summed over the rows of all clients::

        μ' = μ + δ        Σ' = Σ q (x - μ)(x - μ)ᵀ / n - δ δᵀ + reg_covar · I

    The means equal the paper's ``μ_m = Σ_c γ_c μ_mc / Σ_c γ_c``. ``moments`` are around
    ``current.means``, the means of the last round. A component without rows keeps its parameters.
    """
    kind = current.covariance_type
    total = moments.counts.sum()
    alive = occupied(moments.counts)
    counts = torch.where(alive, moments.counts, 1.0)
    shift = torch.where(alive[:, None], moments.first / counts[:, None], 0.0)
    means = current.means + shift
    if kind == "identity":
        return Gaussians(means, current.covariances, current.precisions_cholesky, kind)

    centred = moments.second - outer(shift, torch.where(alive, counts, 0.0), kind)
    match kind:
        case "full":
            covariances = centred / counts[:, None, None]
            covariances = (covariances + covariances.mT) / 2
            covariances.diagonal(dim1=-2, dim2=-1).add_(reg_covar)
            covariances = torch.where(alive[:, None, None], covariances, current.covariances)
        case "tied":
            covariances = (centred + centred.mT) / 2 / total
            covariances.diagonal().add_(reg_covar)
        case "diag":
            covariances = centred.clamp_min(0.0) / counts[:, None] + reg_covar
            covariances = torch.where(alive[:, None], covariances, current.covariances)
        case _:
            d = current.means.shape[-1]
            covariances = centred.clamp_min(0.0) / (d * counts) + reg_covar
            covariances = torch.where(alive, covariances, current.covariances)
    return gaussians(means, covariances, kind)


def within_clients(
    second: Tensor, client_counts: Tensor, client_first: Tensor, kind: CovarianceType
) -> Tensor:
    """Return ``Σ_c γ_c Σ_mc``, each client's scatter around the client's *own* mean ``μ_mc``.

    The paper averages these: ``Σ_m = Σ_c γ_c Σ_mc / Σ_c γ_c``. The scatter between clients is lost,
    so ``aggregation="exact"`` is the default. ``second`` is summed over clients and around the
    current means; ``client_counts`` are ``γ_c(m)``, ``(C, M)``, and ``client_first``
    ``Σ_i q_i(m) (x_i - μ_m)``, ``(C, M, d)``.
    """
    return second - outer(client_first, inverse_counts(client_counts), kind).sum(0)


def paper_moments(moments: Moments, kind: CovarianceType) -> Moments:
    """Prepare sums of :func:`within_clients` for :func:`update_gaussians`.

    That function subtracts the scatter between the old and the new shared means. Scatters around the
    clients' own means do not contain it, so it is added here.
    """
    shift = outer(moments.first, inverse_counts(moments.counts), kind)
    return replace(moments, second=moments.second + shift)


# ---------------------------------------------------------------------- the server: θ


def average_learners(sums: Params, counts: Tensor, current: Params) -> Params:
    """Return ``θ_m = Σ_c γ_c(m) θ_mc / Σ_c γ_c(m)``, ``(M, ...)`` float64.

    ``sums`` are ``Σ_c γ_c(m) θ_mc``, ``(M, ...)``, and ``counts`` ``Σ_c γ_c(m)``, ``(M,)``. A
    learner without rows keeps the parameters of the last round, ``current``.
    """
    found = {}
    for name, value in sums.items():
        n = per_entry(counts, value)
        found[name] = torch.where(n > ALIVE, value / n.clamp_min(1e-300), current[name].double())
    return found
