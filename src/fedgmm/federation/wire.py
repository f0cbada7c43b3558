"""Sums and broadcasts as named arrays, and back, written against a method's declaration.

Sums are float64; of a symmetric matrix only the lower triangle travels. Learners travel in the
precision of the training run, or in float16 on request. A client sends ``θ_mc`` and the server
multiplies by ``γ_c(m)``: this loses nothing, because the client computed ``θ_mc`` in that precision.
Learners without rows are not sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.core.params import per_entry
from fedgmm.core.sums import Declaration, Sum

Arrays = dict[str, NDArray[Any]]

_START = "start/"


class WireError(ValueError):
    """Arrays that do not fit a declaration, or numbers that cannot be sent, with the reason."""


def encode(
    values: Mapping[str, Tensor], declaration: Declaration, learner_dtype: torch.dtype
) -> Arrays:
    """Return declared sums of one client, or a broadcast, as arrays.

    Raises ``WireError`` for a learner that is too large for its precision on the wire.
    """
    arrays: Arrays = {}
    for name, one in declaration.items():
        value = values[name]
        if one.as_mean:
            if _is_weighted(one):
                counts = values[str(one.rows)]
                kept = counts > 0
                value = value[kept] / per_entry(counts[kept], value)
            value = value.to(learner_dtype)
            if not bool(torch.isfinite(value).all()):
                raise WireError("a learner is too large for float16; use precision = 'float32'")
        else:
            value = _half(value, one).double()
        arrays[name] = as_array(value)
    return arrays


def decode(
    arrays: Mapping[str, NDArray[Any]],
    declaration: Declaration,
    learner_dtype: torch.dtype,
    training_dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the declared values of received arrays: the inverse of :func:`encode`.

    Raises ``WireError`` for arrays that are missing, not declared, not finite or of another shape or dtype.
    """
    left = set(arrays) - set(declaration)
    if left:
        raise WireError(f"{min(left)} was not requested")
    values: dict[str, Tensor] = {}
    # counts come first, because the shapes of means depend on them
    for name, one in sorted(declaration.items(), key=lambda item: item[1].as_mean):
        if not one.as_mean:
            values[name] = _whole(_array(arrays, name, _sent_shape(one), torch.float64), one)
            continue
        counts = values[str(one.rows)] if _is_weighted(one) else None
        shape = one.shape if counts is None else (int((counts > 0).sum()), *one.shape[1:])
        mean = _array(arrays, name, shape, learner_dtype).to(training_dtype)
        if counts is None:
            values[name] = mean
            continue
        total = torch.zeros(one.shape, dtype=torch.float64)
        total[counts > 0] = per_entry(counts[counts > 0], mean) * mean.double()
        values[name] = total
    return values


def _is_weighted(one: Sum) -> bool:
    """Return whether a learner's sum is divided by its rows for the wire."""
    return one.rows is not None and not one.gathered


def _half(value: Tensor, one: Sum) -> Tensor:
    """Return a sum as it travels: of symmetric matrices only the lower triangles."""
    if not one.semidefinite:
        return value
    rows, columns = torch.tril_indices(value.shape[-1], value.shape[-1])
    return value[..., rows, columns]


def _sent_shape(one: Sum) -> tuple[int, ...]:
    """Return the shape in which a sum travels."""
    if not one.semidefinite:
        return one.shape
    size = one.shape[-1]
    return (*one.shape[:-2], size * (size + 1) // 2)


def _whole(half: Tensor, one: Sum) -> Tensor:
    """Return a sum from the form in which it travels."""
    if not one.semidefinite:
        return half
    rows, columns = torch.tril_indices(one.shape[-1], one.shape[-1])
    whole = half.new_zeros(one.shape)
    whole[..., rows, columns] = half
    whole[..., columns, rows] = half
    return whole


def _array(
    arrays: Mapping[str, NDArray[Any]], name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    if name not in arrays:
        raise WireError(f"{name} is missing")
    value = as_tensor(arrays[name])
    if value.dtype != dtype:
        raise WireError(f"{name} is {arrays[name].dtype}, not {str(dtype).removeprefix('torch.')}")
    if tuple(value.shape) != shape:
        raise WireError(f"{name} has shape {tuple(value.shape)}, not {shape}")
    if not bool(torch.isfinite(value).all()):
        raise WireError(f"{name} is not finite")
    return value


def as_array(value: Tensor) -> NDArray[Any]:
    """Return a tensor's numbers in C order."""
    return np.array(value.detach().cpu().numpy(), order="C")


def as_tensor(value: NDArray[Any]) -> Tensor:
    """Return a copy, because a received array may be read-only."""
    return torch.from_numpy(np.array(value, order="C"))


# ---------------------------------------------------------------------- one vector


def pack(sums: Mapping[str, Tensor], declaration: Declaration) -> NDArray[np.float64]:
    """Return all declared sums as one vector, whose length does not depend on the rows.

    Learners travel as weighted sums here, because a mean cannot be added.
    """
    parts = []
    for name, one in declaration.items():
        if one.gathered:
            raise WireError(f"{name} is not a sum, so it cannot be masked")
        parts.append(_half(sums[name].double().cpu(), one).reshape(-1).numpy())
    return np.concatenate(parts)


def unpack(vector: NDArray[np.float64], declaration: Declaration) -> dict[str, Tensor]:
    """Return the declared sums of a vector: the inverse of :func:`pack`, or raise ``WireError``."""
    whole = torch.from_numpy(np.array(vector))
    values: dict[str, Tensor] = {}
    at = 0
    for name, one in declaration.items():
        shape = _sent_shape(one)
        count = math.prod(shape)
        part = whole[at : at + count]
        at += count
        if len(part) < count:
            break
        values[name] = _whole(part.reshape(shape), one)
    if at != len(whole):
        raise WireError(f"a vector of {len(whole)} numbers does not fit the declaration")
    return values


# ---------------------------------------------------------------------- personal parts


def put_personal(arrays: Arrays, personal: Any) -> None:
    """Add a client's first personal part, if the client cannot make it from the broadcast."""
    for name, value in _personal_parts(personal).items():
        if value.is_floating_point():  # the code of a cluster is not a start
            arrays[_START + name] = as_array(value)


def take_personal(arrays: Arrays, newcomer: Any) -> Any:
    """Remove the personal part from a message and return it; without one, return a newcomer's."""
    sent = {name: arrays.pop(name) for name in list(arrays) if name.startswith(_START)}
    parts = _personal_parts(newcomer)
    if not all(_START + name in sent for name in parts):
        return newcomer
    found = {}
    for name, value in parts.items():
        array = sent[_START + name]
        if array.shape != tuple(value.shape) or not np.isfinite(array).all():
            raise WireError(f"{_START + name} is not finite or has shape {array.shape}")
        found[name] = as_tensor(array).to(value.dtype)
    return found if isinstance(newcomer, dict) else found["weights"]


def _personal_parts(personal: Any) -> dict[str, Tensor]:
    return personal if isinstance(personal, dict) else {"weights": personal}
