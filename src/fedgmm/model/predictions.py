"""Rows of a fitted model: checked, scaled, and evaluated for equation (3).

Shapes: ``n`` rows, ``C`` clients, ``M1`` Gaussians, ``M2`` learners, ``K`` classes. A client's code is its
position among the model's clients. Code -1 stands for rows without a client; tables of clients have one
more row for it, the last.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedgmm.core.em import responsibilities
from fedgmm.core.gaussians import log_densities, log_densities_without, residuals
from fedgmm.core.moments import Scaling, scaled
from fedgmm.core.params import Params, count_learners
from fedgmm.core.pca import PCA
from fedgmm.core.predictive import (
    NumberPredictions,
    log_class_probabilities,
    log_learner_weights,
    log_marginal,
)
from fedgmm.core.scratch import blocks_in, empty_beside
from fedgmm.core.streaming import Block, accumulate, blocks_of
from fedgmm.data.dataset import LabelledRows
from fedgmm.data.inputs import numeric, order_columns
from fedgmm.methods.base import Prediction
from fedgmm.nets.learners import log_outputs
from fedgmm.nets.modules import ModuleNetwork
from fedgmm.nets.networks import as_numbers, function_of
from fedgmm.wording import counted

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_ROWS_OF_A_LEARNER = 65_536
_ROWS_AT_ONCE = 4096  # residuals take components × columns numbers per row


# ---------------------------------------------------------------------- the terms of equation (3)


def log_weights(prediction: Prediction) -> Tensor:
    """Return ``log π_c`` of every client and, last, of the federation: ``(C + 1, M1, M2)``.

    A client that is assigned to a learner has all its weight there, with ``M1 = 1``.
    """
    learners = count_learners(prediction.learners)
    if prediction.assignment is not None:
        assigned = _assigned_learners(prediction)
        places = torch.arange(learners, device=assigned.device)
        return (assigned[:, None] == places).double().log()[:, None]
    assert prediction.client_weights is not None
    assert prediction.weights is not None
    table = torch.cat([prediction.client_weights, prediction.weights[None]])
    return table.log().reshape(len(table), -1, learners)


def log_gaussians(prediction: Prediction, features: Tensor) -> Tensor | None:
    """Return ``log N(x_i; μ_m1, Σ_m1)`` of features ``(n, d)``: ``(n, M1)``; ``None`` without Gaussians."""
    gaussians = prediction.gaussians
    if gaussians is None:
        return None
    out = empty_beside(features, (len(features), len(gaussians.means)), torch.float64)

    def evaluate(rows: slice) -> None:
        difference = residuals(features[rows], gaussians.means, torch.float64)
        out[rows] = log_densities(difference, gaussians)

    _for_blocks(len(features), evaluate, features.device)
    return out


def log_learners(prediction: Prediction, x: Tensor, learners: Params | None = None) -> Tensor:
    """Return ``log P_θm2(y|x_i)`` of every class, ``(n, M2, K)`` float64.

    Learners of numbers give ``f_θm2(x_i)`` and ``σ²_m2`` instead, ``(n, M2, 2)``.

    Args:
        prediction: the fitted parameters.
        x: inputs, ``(n, *shape)``.
        learners: parameters ``(M2, ...)`` to use instead of all learners.
    """
    params = prediction.learners if learners is None else learners
    with torch.inference_mode():
        inputs = as_numbers(x, next(iter(params.values())).dtype)
        return log_outputs(prediction.net, params, inputs)


# ---------------------------------------------------------------------- rows and their predictions


@dataclass(frozen=True)
class EvaluatedRows:
    """Rows for which the Gaussians of a model were evaluated, once.

    Attributes:
        prediction: the fitted parameters.
        x: scaled inputs of the learners, ``(n, *shape)``.
        log_x: ``log N(x_i; μ_m1, Σ_m1)`` of the scaled rows, ``(n, M1)``; ``None`` without Gaussians.
        log_volume: difference of ``log_x`` to the log density in the units of the unscaled rows.
    """

    prediction: Prediction
    x: Tensor
    log_x: Tensor | None
    log_volume: float = 0.0

    def __len__(self) -> int:
        """Return ``n``."""
        return len(self.x)

    def log_density(self, codes: IntArray) -> FloatArray:
        """Return ``log P_c(x)`` in the units of the unscaled rows, ``(n,)``."""
        log_x, log_pi = self.log_x, log_weights(self.prediction)
        assert log_x is not None
        who = torch.from_numpy(codes).to(log_x.device)
        out = np.empty(len(self))

        def write(rows: slice) -> None:
            out[rows] = log_marginal(log_pi[who[rows]], log_x[rows]).cpu().numpy()

        _for_blocks(len(self), write, log_x.device)
        return out - self.log_volume

    def most_likely_gaussians(self) -> IntArray:
        """Return the Gaussian that most likely holds each row under the federation's weights, ``(n,)``."""
        assert self.log_x is not None
        log_pi = log_weights(self.prediction)[-1].logsumexp(-1)
        return np.asarray((self.log_x + log_pi).argmax(-1).cpu().numpy())

    def log_density_without_itself(self, codes: IntArray) -> FloatArray:
        """Return ``log P_c(x_i)`` of training rows as if each had not been trained on, ``(n,)``.

        Each row is taken out of the Gaussians and of the weights of its client. Rows of clients that
        are not here would only add to the Gaussians, so without them the correction is too large.
        """
        log_x, shared = self.log_x, self.prediction.gaussians
        assert log_x is not None
        assert shared is not None
        who = torch.from_numpy(codes).to(log_x.device)
        own = log_weights(self.prediction)[who].logsumexp(-1)
        q, _ = responsibilities(own + log_x)
        rows = torch.bincount(who, minlength=int(who.max()) + 1)[who, None]
        kept = ((rows * own.exp() - q).clamp_min(0.0) / (rows - 1).clamp_min(1)).log()
        without = log_densities_without(log_x, shared, q.sum(0).clamp_min(1.0), q)
        return (kept + without).logsumexp(-1).cpu().numpy() - self.log_volume

    def log_proba(self, codes: IntArray) -> FloatArray:
        """Return ``log P_c(y|x)`` of every class, equation (3), ``(n, K)``."""
        shape = (len(self), self.prediction.net.classes)
        out = empty_beside(self.x, shape, torch.float64).cpu().numpy()
        who = torch.from_numpy(codes).to(self.x.device)
        if self.prediction.assignment is not None:
            self._write_assigned(out, who)
        else:
            self._write_mixed(out, who)
        return out

    def numbers(self, codes: IntArray) -> NumberPredictions:
        """Return ``P_c(y|x)`` of standardised numbers, equation (3)."""
        prediction, log_x = self.prediction, self.log_x
        who = torch.from_numpy(codes).to(self.x.device)
        if prediction.assignment is not None:
            outputs = empty_beside(self.x, (len(self), 1, 2), torch.float64)
            for _, rows, learner in self._by_learner(who):
                outputs[rows] = log_learners(prediction, self.x[rows], learner)
            return NumberPredictions(torch.zeros_like(outputs[..., 0]), *outputs.unbind(-1))
        log_pi = log_weights(prediction)
        outputs = empty_beside(self.x, (len(self), log_pi.shape[-1], 2), log_pi.dtype)
        weights = empty_beside(self.x, (len(self), log_pi.shape[-1]), log_pi.dtype)

        def write(rows: slice) -> None:
            own = None if log_x is None else log_x[rows]
            weights[rows] = log_learner_weights(log_pi[who[rows]], own)
            outputs[rows] = log_learners(prediction, self.x[rows])

        _for_blocks(len(self), write, self.x.device)
        return NumberPredictions(weights, *outputs.unbind(-1))

    def _by_learner(self, who: Tensor) -> Iterator[tuple[int, Tensor, Params]]:
        """Yield the place of each assigned learner, some of its rows, and its parameters ``(1, ...)``."""
        learner_of = _assigned_learners(self.prediction)[who]
        for place in torch.unique(learner_of).tolist():
            rows = torch.nonzero(learner_of == place).flatten()
            learners = self.prediction.learners.items()
            learner = {name: value[place : place + 1] for name, value in learners}
            for first in range(0, len(rows), _ROWS_OF_A_LEARNER):
                yield place, rows[first : first + _ROWS_OF_A_LEARNER], learner

    def _write_mixed(self, out: FloatArray, who: Tensor) -> None:
        """Mix all learners by the weights of each row's client."""
        prediction, log_x, log_pi = self.prediction, self.log_x, log_weights(self.prediction)
        ratios: Tensor | None = None
        if (
            prediction.labels is not None
        ):  # only of clients that have rows: there may be many others
            present, place = torch.unique(who, return_inverse=True)
            own = prediction.labels.log_ratios(present)
            ratios = own.view(len(own), *log_pi.shape[1:], own.shape[-1])

        def write(rows: slice) -> None:
            log_proba = log_class_probabilities(
                log_pi[who[rows]],
                None if log_x is None else log_x[rows],
                log_learners(prediction, self.x[rows]),
                None if ratios is None else ratios[place[rows]],
            )
            out[rows] = log_proba.cpu().numpy()

        _for_blocks(len(self), write, self.x.device)

    def _write_assigned(self, out: FloatArray, who: Tensor) -> None:
        """Use the learner that each row's client is assigned to, or the default learner."""
        prediction = self.prediction
        for place, rows, learner in self._by_learner(who):
            log_proba = log_learners(prediction, self.x[rows], learner)[:, 0]
            if prediction.labels is not None:
                ratios = prediction.labels.log_ratios(who[rows])[:, place]
                log_proba = torch.log_softmax(log_proba + ratios, -1)
            out[rows.cpu().numpy()] = log_proba.cpu().numpy()


@dataclass(frozen=True)
class RowEvaluator:
    """Checks and scales rows, and evaluates the Gaussians of a fitted model for them.

    Attributes:
        prediction: the fitted parameters.
        input_shape: shape of one row.
        scaling: scaling of the inputs, or ``None``.
        features_are_inputs: whether the Gaussians use the scaled inputs and not separate features.
        column_names: of the inputs; tables are put into this order. ``None`` if there are no names.
        projection: principal components of the scaled inputs that the Gaussians see, or ``None``.
    """

    prediction: Prediction
    input_shape: tuple[int, ...]
    scaling: Scaling | None
    features_are_inputs: bool
    column_names: tuple[str, ...] | None = None
    projection: PCA | None = None

    def from_arrays(self, X: ArrayLike, features: ArrayLike | None) -> EvaluatedRows:
        """Evaluate inputs ``(n, *shape)`` and, where the model needs them, features ``(n, d)``."""
        inputs = numeric(order_columns(X, self.column_names, "X"), "X")
        self._check(inputs.shape[1:], features is not None)
        x = _finite_tensor(inputs, "X")
        gaussians = self.prediction.gaussians
        if features is None or gaussians is None:
            return self._evaluate(x, None)
        separate = numeric(features, "features")
        if separate.shape != (len(x), gaussians.means.shape[1]):
            expected = (len(x), gaussians.means.shape[1])
            raise ValueError(f"features must have shape {expected}, got {separate.shape}.")
        return self._evaluate(x, _finite_tensor(separate, "features"))

    def from_split(self, rows: LabelledRows) -> EvaluatedRows:
        """Evaluate rows of a data set, which were checked when it was made."""
        separate = not (rows.features_are_inputs or self.prediction.gaussians is None)
        self._check(tuple(rows.inputs.shape[1:]), separate)
        return self._evaluate(rows.inputs, torch.cat(rows.features.chunks) if separate else None)

    def _check(self, shape: tuple[int, ...], separate: bool) -> None:
        if shape != self.input_shape:
            raise ValueError(f"Rows must have shape {self.input_shape}, got {shape}.")
        if self.prediction.gaussians is None or separate != self.features_are_inputs:
            return
        if separate:
            raise ValueError("The Gaussians of this model use the inputs; do not pass features.")
        raise ValueError("The Gaussians of this model use separate features; pass features=.")

    def _evaluate(self, inputs: Tensor, features: Tensor | None) -> EvaluatedRows:
        parameter = next(iter(self.prediction.learners.values()))
        x, log_volume = inputs.to(parameter.device), 0.0
        function = function_of(self.prediction.net)
        if isinstance(function, ModuleNetwork):
            function.check_integers(x)
        if self.scaling is not None:
            x = scaled(x, self.scaling, parameter.dtype)
            log_volume = self.scaling.log_volume if self.features_are_inputs else 0.0
        seen = x.flatten(1) if features is None else features.to(parameter.device)
        if self.projection is not None:
            seen, log_volume = self.projection.apply(x).to(x.dtype), 0.0
        for rows in (x, seen):
            _check_size(rows, parameter.dtype)
        return EvaluatedRows(self.prediction, x, log_gaussians(self.prediction, seen), log_volume)


# ---------------------------------------------------------------------- labels and clients by name


def class_codes(y: ArrayLike, rows: int, classes: NDArray[Any]) -> IntArray:
    """Return the position of each row's label among ``classes``, ``(n,)``.

    Raises:
        ValueError: not one label per row, or an unknown label.
    """
    labels = np.asarray(y)
    if labels.shape != (rows,):
        raise ValueError(
            f"y must hold one label per row: {counted(rows, 'row')}, y has shape {labels.shape}."
        )
    position = {label: index for index, label in enumerate(classes.tolist())}
    unknown = [label for label in labels.tolist() if label not in position]
    if unknown:
        raise ValueError(
            f"Label {unknown[0]!r} was not seen in training; the classes are {classes.tolist()[:20]}."
        )
    return np.array([position[label] for label in labels.tolist()], dtype=np.int64)


def numbers_of(y: ArrayLike, rows: int) -> FloatArray:
    """Return numbers to predict, ``(n,)``.

    Raises:
        ValueError: not one finite number per row.
    """
    try:
        numbers = np.asarray(y, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError("y must hold numbers, because the model predicts numbers.") from None
    if numbers.shape != (rows,) or not np.isfinite(numbers).all():
        raise ValueError(
            f"y must hold one finite number per row: {counted(rows, 'row')}, y has shape "
            f"{numbers.shape}."
        )
    return numbers


def client_codes(rows: LabelledRows, names: Sequence[Hashable]) -> IntArray:
    """Return the position of each row's client among ``names``, ``(n,)``.

    Raises:
        ValueError: an unknown client.
    """
    position = {name: code for code, name in enumerate(names)}
    unknown = [name for name in rows.names if name not in position]
    if unknown:
        raise ValueError(
            f"Unknown client {unknown[0]!r}: the model knows {counted(len(names), 'client')}. "
            "Add it with adapt()."
        )
    codes = np.array([position[name] for name in rows.names], dtype=np.int64)
    return np.asarray(codes[rows.codes.cpu().numpy()])


# ---------------------------------------------------------------------- helpers


def probabilities(log_proba: FloatArray) -> FloatArray:
    """Return probabilities ``(n, K)`` in [0, 1] of which each row sums to one up to one rounding."""
    proba = np.exp(log_proba)
    # no entry exceeds the sum of its row in floating point, so no quotient exceeds one
    return np.asarray(proba / proba.sum(-1, keepdims=True))


def _assigned_learners(prediction: Prediction) -> Tensor:
    """Return the learner of every client and, last, the default learner, ``(C + 1,)``; -1 if missing."""
    assignment, default = prediction.assignment, prediction.default_learner
    assert assignment is not None
    return torch.cat([assignment, assignment.new_tensor([-1 if default is None else default])])


def _for_blocks(rows: int, visit: Callable[[slice], None], device: torch.device) -> None:
    """Call ``visit`` for blocks of rows on all threads, so that temporaries stay small."""

    def visit_block(_: None, block: Block) -> None:
        visit(slice(block[1], block[2]))

    accumulate(blocks_of([rows], _ROWS_AT_ONCE), lambda: None, visit_block, device)


def _check_size(rows: Tensor, dtype: torch.dtype) -> None:
    """Raise if a number is so large that a learner or a density could overflow."""
    largest = min(torch.finfo(dtype).max ** 0.75, 1e150)
    if not rows.is_floating_point() or not rows.numel():
        return
    if not all(bool((block.abs() < largest).all()) for block in blocks_in(rows)):
        row = int(torch.nonzero(~(rows.flatten(1).abs() < largest))[0, 0])
        raise ValueError(f"Row {row} has a number that is too large to compute with; correct it.")


def _finite_tensor(rows: NDArray[Any], name: str) -> Tensor:
    """Return rows as a tensor, or raise for NaN and infinity."""
    if not np.isfinite(rows).all():
        row, column = np.argwhere(~np.isfinite(rows.reshape(len(rows), -1)))[0].tolist()
        raise ValueError(f"Input {name} contains NaN or infinity: row {row}, column {column}.")
    return torch.from_numpy(np.ascontiguousarray(rows))
