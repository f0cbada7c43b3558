"""A client's update, checked before it may touch the model.

Whoever sends numbers that no rows could have made is left out of the round: numbers that are not
finite, arrays that are missing or of another shape, counts that do not add up to the declared rows,
moments and curvatures that are not positive semidefinite, learners beyond all bounds. What passes
keeps the model finite. It does not prove that the rows exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.core.gaussians import CovarianceType, Moments
from fedgmm.core.newton import NewtonSums
from fedgmm.core.params import Params
from fedgmm.federation.settings import WirePrecision
from fedgmm.federation.wire import (
    as_tensor,
    frame_of,
    second_shape,
    triangle,
    unfolded,
    unfolded_second,
    wire_dtype,
)
from fedgmm.methods.clustered import ClusteredFL, ClusteredUpdate
from fedgmm.methods.fedgmm import FedGMM, FedGMMUpdate
from fedgmm.methods.gmm import MixtureUpdate
from fedgmm.methods.local import Fit
from fedgmm.methods.pfedme import PFedMe, PFedMeUpdate
from fedgmm.nets.networks import Dense
from fedgmm.training.checkpoint import AnyMethod
from fedgmm.wording import counted

_LARGEST_WEIGHT = 1e8  # the bound of local training, beyond which float32 overflows
_FARTHEST = 1e12  # deviations; preprocessing clips there
_LARGEST_FIT = 1e30

_NUMPY_DTYPES = {
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}


class UpdateError(ValueError):
    """Why an update is not used."""


class Received:
    """The arrays of an answer, each taken once and checked; none may be left over."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._arrays = dict(arrays)

    def take(self, name: str, shape: tuple[int, ...], dtype: Any = np.float64) -> NDArray[Any]:
        """An array that must be there, of this shape and dtype, and finite."""
        if name not in self._arrays:
            raise UpdateError(f"{name} is missing")
        array = self._arrays.pop(name)
        if array.dtype != np.dtype(dtype):
            raise UpdateError(f"{name} is {array.dtype}, not {np.dtype(dtype)}")
        if array.shape != shape:
            raise UpdateError(f"{name} has shape {array.shape}, not {shape}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise UpdateError(f"{name} is not finite")
        return array

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of an array that is still there."""
        if name not in self._arrays:
            raise UpdateError(f"{name} is missing")
        return tuple(self._arrays[name].shape)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The same as a float64 tensor."""
        return as_tensor(self.take(name, shape))

    def done(self) -> None:
        """Raise if something is left that nobody asked for."""
        if self._arrays:
            raise UpdateError(f"{sorted(self._arrays)[0]} was not asked for")


def checked_update(
    method: AnyMethod,
    arrays: Mapping[str, NDArray[Any]],
    *,
    rows: int,
    columns: int,
    precision: WirePrecision,
) -> Any:
    """The update of one client, from what it sent.

    Args:
        method: the method.
        arrays: of the answer.
        rows: training rows that the client declared.
        columns: of the inputs.
        precision: of the learners.

    Raises:
        UpdateError: an update that no rows could have made.
    """
    frame, given = frame_of(method), Received(arrays)
    update: Any
    if isinstance(frame, FedGMM):
        update = _mixture_update(frame, given, rows, columns, precision)
    else:
        fit = Fit(_fit(given, rows), rows)
        if isinstance(frame, ClusteredFL):
            learners = {n: v[None] for n, v in _learners(given, frame, precision, 1).items()}
            count = torch.tensor([float(rows)], dtype=torch.float64)
            update = ClusteredUpdate(torch.zeros(1, dtype=torch.int64), learners, count, fit)
        elif isinstance(frame, PFedMe):
            learners = _learners(given, frame, precision, 1)
            sums = {name: value.double() * rows for name, value in learners.items()}
            update = PFedMeUpdate(sums, torch.tensor(float(rows), dtype=torch.float64), fit)
        else:
            update = fit
    given.done()
    return update


def _mixture_update(
    frame: FedGMM, given: Received, rows: int, columns: int, precision: WirePrecision
) -> FedGMMUpdate:
    m1, m2 = frame.gaussians.components, frame.learners
    counts = checked_counts(given.tensor("counts", (m1 * m2,)), rows)
    fit = _fit(given, rows, of_density=frame.density)
    own = counts.reshape(m1, m2)
    if frame.density:
        moments = checked_moments(
            given,
            frame.gaussians.covariance_type,
            own.sum(-1),
            columns,
            exact=frame.gaussians.dtype == torch.float64,
        )
    else:  # the one component says nothing about rows
        moments = Moments(
            own.sum(-1),
            torch.zeros(m1, columns, dtype=torch.float64),
            torch.zeros(m1, dtype=torch.float64),
        )
    mixture = MixtureUpdate(counts[None], moments, fit)
    if frame.solver == "newton":
        newton = _newton(given, frame, own.sum(0))
        return FedGMMUpdate(mixture, newton.weight, newton=newton)
    learners, sent = _learner_sums(given, frame, own.sum(0), precision)
    return FedGMMUpdate(mixture, torch.where(sent, own.sum(0), 0.0), learners)


def checked_counts(counts: Tensor, rows: int) -> Tensor:
    """``γ_c``, ``(M,)``, which must be positive and add up to the declared rows."""
    slack = 1e-4 * rows + 1e-6
    if float(counts.min()) < 0:
        raise UpdateError(f"a count is negative ({float(counts.min()):.3g})")
    if float(counts.max()) > rows + slack:
        raise UpdateError(
            f"a count is {float(counts.max()):.6g}, but it declared {counted(rows, 'row')}"
        )
    if abs(float(counts.sum()) - rows) > slack:
        raise UpdateError(
            f"its counts add up to {float(counts.sum()):.6g}, but it declared {counted(rows, 'row')}"
        )
    return counts


def _fit(given: Received, rows: int, of_density: bool = False) -> Tensor:
    """The summed log-likelihood; that of labels alone is at most zero."""
    fit = given.tensor("log_likelihood", ())
    if abs(float(fit)) > _LARGEST_FIT:
        raise UpdateError(f"its log-likelihood is {float(fit):.3g}, beyond all bounds")
    if not of_density and float(fit) > 1e-3 * rows:
        raise UpdateError(f"its log-likelihood of labels is positive ({float(fit):.3g})")
    return fit


# ---------------------------------------------------------------------- moments


def checked_moments(
    given: Received, kind: CovarianceType, counts: Tensor, columns: int, *, exact: bool
) -> Moments:
    """A client's moments; components that it withheld are zero throughout.

    Args:
        given: the arrays.
        kind: decides the shape of the second moment.
        counts: ``γ_c(m1)`` as the client's own counts have it, ``(M1,)``.
        columns: ``d``.
        exact: whether products were taken in float64.
    """
    m = len(counts)
    kept = given.tensor("gaussians/counts", (m,))
    first = given.tensor("gaussians/first", (m, columns))
    sent = given.tensor("gaussians/second", second_shape(kind, m, columns))
    second = unfolded_second(sent, kind, columns)
    withheld = kept == 0
    fits = withheld | ((kept - counts).abs() <= 1e-6 * (1.0 + counts))
    if not bool(fits.all()):
        raise UpdateError("the counts of its moments are not those of its responsibilities")
    per_component = second.reshape(m, -1) if kind != "tied" else second.reshape(1, -1)
    nothing = withheld if kind != "tied" else withheld.all()[None]
    if bool((first[withheld] != 0).any()) or bool((per_component[nothing] != 0).any()):
        raise UpdateError("a component has moments but no rows")
    mean = first.abs().amax(-1) / kept.clamp_min(1e-300)
    if bool((mean[~withheld] > 2 * _FARTHEST).any()):
        raise UpdateError("a first moment is beyond all bounds")
    if bool((second.abs() > (2 * _FARTHEST) ** 2 * columns * (1.0 + kept.sum())).any()):
        raise UpdateError("a second moment is beyond all bounds")
    _check_scatter(kind, Moments(kept, first, second), 1e-8 if exact else 1e-4)
    return Moments(kept, first, second)


def _check_scatter(kind: CovarianceType, moments: Moments, slack: float) -> None:
    """``Σ q (x - μ_mc)(x - μ_mc)ᵀ``, around the client's own means, is positive semidefinite."""
    inverse = torch.where(moments.counts > 0, 1.0 / moments.counts.clamp_min(1e-300), 0.0)
    first, second = moments.first, moments.second
    match kind:
        case "full" | "tied":
            outer = first[:, :, None] * first[:, None, :] * inverse[:, None, None]
            if kind == "tied":
                outer = outer.sum(0)
            check_semidefinite("a second moment", second, second - outer, slack)
            return
        case "diag":
            spread = second - first.square() * inverse[:, None]
        case _:
            spread = second - first.square().sum(-1) * inverse
    if bool((spread < -slack * (second.abs() + 1e-12)).any()):
        raise UpdateError("a second moment is not positive semidefinite around its mean")


def check_semidefinite(what: str, whole: Tensor, matrix: Tensor, slack: float) -> None:
    """Raise unless a symmetric ``matrix`` ``(..., n, n)`` has no negative eigenvalue.

    ``whole`` gives the size of what rounding may leave: ``slack`` times its largest entry.
    """
    size = whole.abs().amax((-2, -1)) + 1e-12
    lowest = torch.linalg.eigvalsh(matrix / size[..., None, None])[..., 0]
    if bool((lowest < -slack * matrix.shape[-1]).any()):
        raise UpdateError(f"{what} is not positive semidefinite")


# ---------------------------------------------------------------------- learners


def _learners(given: Received, frame: Any, precision: WirePrecision, count: int) -> Params:
    """``count`` learners, in the precision of the training."""
    training = frame.training
    dtype = _NUMPY_DTYPES[wire_dtype(training, precision)]
    found = {}
    for name, shape in training.net.parameter_shapes.items():
        array = given.take(f"learners/{name}", (count, *shape), dtype)
        if array.size and float(np.abs(array).max()) >= _LARGEST_WEIGHT:
            raise UpdateError(f"learners/{name} is beyond all bounds")
        found[name] = as_tensor(array).to(training.dtype)
    return found


def _learner_sums(
    given: Received, frame: FedGMM, counts: Tensor, precision: WirePrecision
) -> tuple[Params, Tensor]:
    """``γ_c(m) θ_mc``, ``(M2, ...)`` float64, and which learners were sent, ``(M2,)``.

    Those that were not sent have no weight: no rows belong to them here, or too few to be told.
    """
    sent = torch.from_numpy(given.take("sent", (frame.learners,), np.bool_).copy())
    found = {}
    for name, value in _learners(given, frame, precision, int(sent.sum())).items():
        total = torch.zeros(frame.learners, *value.shape[1:], dtype=torch.float64)
        weight = counts[sent].reshape(-1, *(1,) * (value.dim() - 1))
        total[sent] = weight * value.double()
        found[name] = total
    return found, sent


def _newton(given: Received, frame: FedGMM, counts: Tensor) -> NewtonSums:
    """Gradient and Hessian of cross-entropies: bounded by the inputs' own second moments."""
    net = frame.training.net
    assert isinstance(net, Dense)
    m, r, p = frame.learners, net.classes - 1, net.columns + 1
    gradient = given.tensor("newton/gradient", (m, r * p))
    hessian = unfolded(given.tensor("newton/hessian", (m, triangle(r * p))), r * p)
    second = unfolded(given.tensor("newton/second", (m, triangle(p))), p)
    weight = given.tensor("newton/weight", (m,))
    withheld = weight == 0
    if bool((withheld[:, None] & (gradient != 0)).any()) or bool((second[withheld] != 0).any()):
        raise UpdateError("a learner has sums but no rows")
    if bool(((weight - counts).abs()[~withheld] > 1e-3 * (1.0 + counts.max())).any()):
        raise UpdateError("the weights of its learners are not those of its responsibilities")
    if bool((second.abs() > _FARTHEST**2 * (1.0 + weight.sum())).any()):
        raise UpdateError("newton/second is beyond all bounds")
    if bool(((second[:, -1, -1] - weight).abs() > 1e-6 * (1.0 + weight)).any()):
        raise UpdateError("newton/second does not count the rows")
    check_semidefinite("newton/second", second, second, 1e-8)
    check_semidefinite("newton/hessian", hessian, hessian, 1e-8)
    # |p - y| ≤ √2 and curvature ≤ 1/2: what the inputs allow, by Cauchy and Schwarz
    squares = second.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).repeat(1, r)
    slack = 1e-3 * squares + 1e-6
    if bool((gradient.abs() > 1.5 * (weight[:, None] * squares).sqrt() + slack).any()):
        raise UpdateError("newton/gradient is larger than its inputs allow")
    if bool((hessian.diagonal(dim1=-2, dim2=-1) > 0.5 * squares + slack).any()):
        raise UpdateError("newton/hessian is larger than its inputs allow")
    return NewtonSums(gradient, hessian, second, weight)
