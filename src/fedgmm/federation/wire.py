"""What a method's server broadcasts and what a client sends back, as named arrays.

Statistics are float64; symmetric matrices travel as their lower triangles. Learners travel in the
precision of the training, which is float32 unless float64 was asked for, or in float16 on request. A
client sends ``θ_mc`` rather than ``γ_c(m) θ_mc``: it loses nothing in float32, and the server
multiplies again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.core.gaussians import CovarianceType, gaussians
from fedgmm.core.params import Params
from fedgmm.core.servers import ServerState
from fedgmm.federation.messages import MessageError
from fedgmm.federation.settings import WirePrecision
from fedgmm.methods.clustered import ClusteredFL, ClusteredShared, ClusteredUpdate
from fedgmm.methods.fedavg import FedAvgPlus
from fedgmm.methods.fedgmm import FedGMM, FedGMMShared, FedGMMUpdate
from fedgmm.methods.gmm import MixtureShared
from fedgmm.methods.local import Fit
from fedgmm.methods.local_training import LocalTraining
from fedgmm.methods.pfedme import PFedMe, PFedMeShared, PFedMeUpdate
from fedgmm.training.checkpoint import AnyMethod
from fedgmm.wording import counted

Arrays = dict[str, NDArray[Any]]

ALIVE = 1e-9
"""Expected rows above which a learner is trained on a client, and sent back."""

_LEARNERS = "learners/"
_START = "start/"


class WireError(ValueError):
    """Numbers that cannot be sent as they were asked to be."""


def frame_of(method: AnyMethod) -> Any:
    """The method whose rounds these are: FedAvg+ is FedAvg until the last one."""
    return method.average if isinstance(method, FedAvgPlus) else method


def training_of(method: AnyMethod) -> LocalTraining:
    """Local training of a method's learners."""
    training: LocalTraining = frame_of(method).training
    return training


def wire_dtype(training: LocalTraining, precision: WirePrecision) -> torch.dtype:
    """How learners travel."""
    return torch.float16 if precision == "float16" else training.dtype


def second_shape(kind: CovarianceType, components: int, columns: int) -> tuple[int, ...]:
    """Shape of covariances and of second moments on the wire, where matrices are :func:`folded`."""
    m, d = components, columns
    half = triangle(d)
    return {"full": (m, half), "tied": (half,), "diag": (m, d)}.get(kind, (m,))


def triangle(size: int) -> int:
    """How many numbers make a symmetric matrix of this size."""
    return size * (size + 1) // 2


def folded(value: Tensor) -> Tensor:
    """The lower triangles of symmetric matrices: ``(..., n, n)`` to ``(..., n (n + 1) / 2)``."""
    rows, columns = torch.tril_indices(value.shape[-1], value.shape[-1])
    return value[..., rows, columns]


def unfolded(value: Tensor, size: int) -> Tensor:
    """The inverse of :func:`folded`, ``(..., n, n)``."""
    rows, columns = torch.tril_indices(size, size)
    whole = value.new_zeros(*value.shape[:-1], size, size)
    whole[..., rows, columns] = value
    whole[..., columns, rows] = value
    return whole


def folded_second(value: Tensor, kind: CovarianceType) -> Tensor:
    """Covariances or second moments as they travel."""
    return folded(value) if kind in ("full", "tied") else value


def unfolded_second(value: Tensor, kind: CovarianceType, columns: int) -> Tensor:
    """The inverse of :func:`folded_second`."""
    return unfolded(value, columns) if kind in ("full", "tied") else value


def as_array(value: Tensor) -> NDArray[Any]:
    """A tensor's numbers in C order."""
    return np.array(value.detach().cpu().numpy(), order="C")


def as_tensor(value: NDArray[Any]) -> Tensor:
    """A copy, since what came over the wire may be read-only."""
    return torch.from_numpy(np.array(value, order="C"))


# ---------------------------------------------------------------------- learners


def put_learners(arrays: Arrays, learners: Params, dtype: torch.dtype) -> None:
    """Add stacked learners, ``(M, ...)``, in a precision."""
    for name, value in learners.items():
        cast = value.to(dtype)
        if not bool(torch.isfinite(cast).all()):
            raise WireError(
                "A learner's weights are too large for float16; use precision = 'float32'."
            )
        arrays[_LEARNERS + name] = as_array(cast)


def take_learners(
    arrays: Mapping[str, NDArray[Any]], training: LocalTraining, count: int
) -> Params:
    """Stacked learners, ``(count, ...)``, in the precision of the training."""
    found = {}
    for name, shape in training.net.parameter_shapes.items():
        array = _need(arrays, _LEARNERS + name)
        if array.shape != (count, *shape) or array.dtype.kind != "f":
            raise MessageError(
                f"array {_LEARNERS + name!r} is {array.dtype} {array.shape}, which is not "
                f"{counted(count, 'learner')} of shape {shape}."
            )
        found[name] = as_tensor(array).to(training.dtype)
    return found


def _need(arrays: Mapping[str, NDArray[Any]], name: str) -> NDArray[Any]:
    if name not in arrays:
        raise MessageError(f"array {name!r} is missing.")
    return arrays[name]


# ---------------------------------------------------------------------- the server's broadcast


def broadcast(
    method: AnyMethod, shared: Any, precision: WirePrecision, code: int | None = None
) -> Arrays:
    """What the server sends: parameters, without the state of its optimiser.

    Args:
        method: the method.
        shared: its shared state.
        precision: of the learners.
        code: of the client, whose cluster's learner it is; ``None`` means the largest cluster.
    """
    frame, arrays = frame_of(method), Arrays()
    if shared is None:
        return arrays
    dtype = wire_dtype(frame.training, precision)
    learners = shared.learners
    if isinstance(frame, ClusteredFL):
        count = len(next(iter(learners.values())))
        largest = int(torch.bincount(shared.clusters, minlength=count).argmax())
        own = largest if code is None else int(shared.clusters[code])
        learners = {name: value[own : own + 1] for name, value in learners.items()}
    put_learners(arrays, learners, dtype)
    if isinstance(frame, FedGMM):
        arrays["weights"] = as_array(shared.mixture.weights)
        if frame.density:
            arrays["gaussians/means"] = as_array(shared.mixture.gaussians.means)
            covariances = shared.mixture.gaussians.covariances
            kind = frame.gaussians.covariance_type
            arrays["gaussians/covariances"] = as_array(folded_second(covariances, kind))
    return arrays


def received(method: AnyMethod, arrays: Mapping[str, NDArray[Any]], columns: int) -> Any:
    """The shared state that a client was sent.

    Raises:
        MessageError: arrays that are missing or of the wrong shape.
    """
    frame = frame_of(method)
    if isinstance(frame, FedGMM):
        m1, m2 = frame.gaussians.components, frame.learners
        weights = _statistics(arrays, "weights", (m1 * m2,))
        kind = frame.gaussians.covariance_type
        if frame.density:
            means = _statistics(arrays, "gaussians/means", (m1, columns))
            shape = second_shape(kind, m1, columns)
            sent = _statistics(arrays, "gaussians/covariances", shape)
            covariances = unfolded_second(sent, kind, columns)
        else:
            means = torch.zeros(m1, columns, dtype=torch.float64)
            covariances = torch.ones(m1, dtype=torch.float64)
        mixture = MixtureShared(gaussians(means, covariances, kind), weights)
        return FedGMMShared(mixture, take_learners(arrays, frame.training, m2), ServerState())
    if isinstance(frame, ClusteredFL):
        learners = take_learners(arrays, frame.training, 1)
        return ClusteredShared(learners, torch.zeros(1, dtype=torch.int64), 0.0, ServerState())
    if isinstance(frame, PFedMe):
        return PFedMeShared(take_learners(arrays, frame.training, 1), ServerState())
    return None


def _statistics(arrays: Mapping[str, NDArray[Any]], name: str, shape: tuple[int, ...]) -> Tensor:
    array = _need(arrays, name)
    if array.shape != shape or array.dtype != np.float64 or not np.isfinite(array).all():
        raise MessageError(f"array {name!r} is not finite float64 of shape {shape}.")
    return as_tensor(array)


def put_personal(arrays: Arrays, personal: Any) -> None:
    """Add what a client's personal part starts with, where that is not what a newcomer has now."""
    for name, value in _personal_parts(personal).items():
        if value.is_floating_point():  # a code of a cluster is nobody's start
            arrays[_START + name] = as_array(value)


def take_personal(arrays: Mapping[str, NDArray[Any]], newcomer: Any) -> Any:
    """The personal start that was sent, or else that of a newcomer, which has the same shapes."""
    parts = _personal_parts(newcomer)
    if not all(_START + name in arrays for name in parts):
        return newcomer
    found = {}
    for name, value in parts.items():
        array = arrays[_START + name]
        if array.shape != tuple(value.shape) or not np.isfinite(array).all():
            raise MessageError(f"array {_START + name!r} is not finite of shape {array.shape}.")
        found[name] = as_tensor(array).to(value.dtype)
    return found if isinstance(newcomer, dict) else found["weights"]


def _personal_parts(personal: Any) -> dict[str, Tensor]:
    return personal if isinstance(personal, dict) else {"weights": personal}


# ---------------------------------------------------------------------- a client's update


def update_arrays(
    method: AnyMethod, update: Any, precision: WirePrecision, min_rows: int = 0
) -> Arrays:
    """What one client sends of its update.

    Args:
        method: the method.
        update: of one client.
        precision: of the learners.
        min_rows: moments of components, and learners, with fewer expected rows are withheld.
    """
    frame, arrays = frame_of(method), Arrays()
    dtype = wire_dtype(frame.training, precision)
    match update:
        case FedGMMUpdate():
            _put_mixture(arrays, frame, update, min_rows)
            _put_learner_sums(arrays, update, dtype, min_rows)
        case ClusteredUpdate():
            learners = {name: value[0] for name, value in update.learners.items()}
            put_learners(arrays, learners, dtype)
            arrays["log_likelihood"] = as_array(update.fit.log_likelihood)
        case PFedMeUpdate():
            put_learners(arrays, {n: v / update.rows for n, v in update.learners.items()}, dtype)
            arrays["log_likelihood"] = as_array(update.fit.log_likelihood)
        case Fit():
            arrays["log_likelihood"] = as_array(update.log_likelihood)
        case _:
            raise TypeError(f"There is no way to send a {type(update).__name__}.")
    return arrays


def _put_mixture(arrays: Arrays, frame: FedGMM, update: FedGMMUpdate, min_rows: int) -> None:
    mixture = update.mixture
    arrays["counts"] = as_array(mixture.counts[0])
    arrays["log_likelihood"] = as_array(mixture.log_likelihood)
    if frame.density:
        put_moments(arrays, mixture.moments, frame.gaussians.covariance_type, min_rows)


def put_moments(arrays: Arrays, moments: Any, kind: CovarianceType, min_rows: int) -> None:
    """Add a client's moments; those of components with fewer expected rows are withheld.

    A component that is withheld also leaves the count of its rows out, so that the ratio of the sums
    over clients stays right. Tied covariances know one sum over all components: it is sent whole or
    not at all.
    """
    kept = moments.counts >= min_rows
    if kind == "tied":
        kept = kept.all().expand_as(kept)
        second = torch.where(kept.all(), moments.second, 0.0)
    else:
        second = torch.where(_like(kept, moments.second), moments.second, 0.0)
    arrays["gaussians/counts"] = as_array(torch.where(kept, moments.counts, 0.0))
    arrays["gaussians/first"] = as_array(torch.where(kept[:, None], moments.first, 0.0))
    arrays["gaussians/second"] = as_array(folded_second(second, kind))


def _like(mask: Tensor, value: Tensor) -> Tensor:
    """``(M,)`` with as many axes as ``value`` ``(M, ...)``."""
    return mask.reshape(-1, *(1,) * (value.dim() - 1))


def _put_learner_sums(
    arrays: Arrays, update: FedGMMUpdate, dtype: torch.dtype, min_rows: int
) -> None:
    """Add learners with rows enough: none at all, and they are not trained; few, and they stay."""
    sent = (update.learner_counts > ALIVE) & (update.learner_counts >= min_rows)
    if update.newton is not None:
        for name in ("gradient", "hessian", "second", "weight"):
            value = getattr(update.newton, name)
            value = folded(value) if name in ("hessian", "second") else value
            arrays[f"newton/{name}"] = as_array(torch.where(_like(sent, value), value, 0.0))
        return
    assert update.learners is not None
    arrays["sent"] = as_array(sent)
    counts = update.learner_counts[sent]
    # Σ_c γ_c(m) θ_mc has one client here: θ_mc again, exact in float32
    learners = {name: v[sent] / _like(counts, v) for name, v in update.learners.items()}
    put_learners(arrays, learners, dtype)
