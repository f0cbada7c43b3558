"""Parameters of learners as named tensors, stacked along client and learner axes."""

from __future__ import annotations

import torch
from torch import Tensor

Params = dict[str, Tensor]
"""Named tensors: ``(...)`` for one learner, ``(M, ...)`` for several, ``(C, M, ...)`` per client."""


NOISE = "noise.variance"
"""The parameter ``σ²`` of a learner that predicts numbers: ``P_θ(y|x) = N(y; f_θ(x), σ²)``."""


def is_statistic(name: str) -> bool:
    """Return whether a parameter is a running statistic of batch normalisation, or ``σ²``.

    Statistics are averaged like other parameters, but no gradient trains them.
    """
    return name == NOISE or name.rpartition(".")[2] in ("running_mean", "running_var")


def stack(params: list[Params]) -> Params:
    """Return the parameters of several learners along a new first axis."""
    return {name: torch.stack([own[name] for own in params]) for name in params[0]}


def count_learners(params: Params) -> int:
    """Return ``M``, the length of the first axis."""
    return len(next(iter(params.values())))


def expand_clients(params: Params, clients: int) -> Params:
    """Copy the same parameters for every client: ``(M, ...)`` to ``(C, M, ...)``."""
    return {name: value.expand(clients, *value.shape).clone() for name, value in params.items()}


def take_clients(params: Params, index: Tensor | slice) -> Params:
    """Return the parameters of some clients, along the first axis."""
    return {name: value[index] for name, value in params.items()}


def weighted_sum(params: Params, weights: Tensor) -> Params:
    """Return ``Σ_c w_c(m) θ_mc`` in float64: ``(C, M, ...)`` and ``(C, M)`` to ``(M, ...)``."""
    sums = {}
    for name, value in params.items():
        total = torch.einsum("cm,cmp->mp", weights.double(), _vectors(value).double())
        sums[name] = total.reshape(value.shape[1:])
    return sums


def add_params(sums: list[Params]) -> Params:
    """Return the sum of several sets of parameters, added in their order."""
    return {name: torch.stack([own[name] for own in sums]).sum(0) for name in sums[0]}


def flatten(params: Params) -> Tensor:
    """Return all trained parameters of each client and learner as a vector: ``(C, M, P)`` float64."""
    trained = [value for name, value in params.items() if not is_statistic(name)]
    return torch.cat([_vectors(value).double() for value in trained], dim=-1)


def per_entry(weights: Tensor, value: Tensor) -> Tensor:
    """Reshape ``(M,)`` so that it multiplies the first axis of ``value``, ``(M, ...)``."""
    return weights.reshape(-1, *(1,) * (value.dim() - 1))


def _vectors(value: Tensor) -> Tensor:
    """``(C, M, ...)`` as ``(C, M, p)``; a parameter may be a single number."""
    return value.reshape(*value.shape[:2], -1)
