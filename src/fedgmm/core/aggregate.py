"""The server's equations: every one is a ratio of sums over clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fedgmm.core.gaussians import CovarianceType, Gaussians, Moments, maximise
from fedgmm.core.moments import outer

Aggregation = Literal["exact", "paper"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


def within_client_moments(
    moments: Moments, client_counts: Tensor, client_first: Tensor, covariance_type: CovarianceType
) -> Moments:
    """Take the scatter between clients out of the second moments.

    The paper averages each client's covariance around the client's *own* mean ``μ_mc``::

        Σ_m = Σ_c γ_c Σ_mc / Σ_c γ_c

    which is the exact second moment less ``Σ_c γ_c (μ_mc - μ_m)(μ_mc - μ_m)ᵀ``.

    Args:
        moments: summed over clients, around the current means.
        client_counts: ``γ_c(m)``, ``(C, M)``.
        client_first: ``Σ_i q_i(m) (x_i - μ_m)`` of each client, ``(C, M, d)``.
        covariance_type: decides the shape of the second moment.
    """
    inverse = torch.where(client_counts > 0, 1.0 / client_counts.clamp_min(1e-300), 0.0)
    between_clients = outer(client_first, inverse, covariance_type).sum(0)
    # maximise() subtracts the shift of the shared mean, which the clients' own means already hold.
    shift = torch.where(moments.counts > 0, 1.0 / moments.counts.clamp_min(1e-300), 0.0)
    between_rounds = outer(moments.first, shift, covariance_type)
    return replace(moments, second=moments.second - between_clients + between_rounds)


def aggregate_gaussians(moments: Moments, shared: Gaussians, reg_covar: float) -> Gaussians:
    """``μ_m = Σ_c γ_c μ_mc / Σ_c γ_c`` and ``Σ_m`` from moments summed over clients."""
    return maximise(moments, shared, reg_covar)


def aggregate_weights(client_counts: Tensor) -> Tensor:
    """``π(m) = Σ_c γ_c(m) / Σ_c N_c``: the federation's own weights, ``(M,)`` from ``(C, M)``."""
    total = client_counts.sum(0)
    return total / total.sum()
