"""Check and scale rows, and evaluate the terms of equation (3) for them.

The equation itself is :func:`fedgmm.core.predictive.log_class_probabilities`.

Shapes: ``n`` rows, ``C`` clients, ``M1`` Gaussians, ``M2`` learners, ``K`` classes. A client's code is its
position among the model's clients. Code -1 stands for rows without a client; tables of clients have one
more row for it, the last.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedgmm.core.em import responsibilities
from fedgmm.core.gaussians import log_densities, log_densities_without, residuals
from fedgmm.core.moments import scaled
from fedgmm.core.params import Params, count_learners
from fedgmm.core.predictive import (
    NumberPredictions,
    log_class_probabilities,
    log_learner_weights,
    log_marginal,
)
from fedgmm.data.dataset import FederatedDataset, LabelledRows
from fedgmm.data.inputs import NO_CLIENT, numeric, order_columns
from fedgmm.methods.base import Prediction
from fedgmm.nets.learners import log_outputs
from fedgmm.nets.modules import ModuleNetwork
from fedgmm.nets.networks import as_numbers, function_of
from fedgmm.support.scratch import blocks_in, empty, empty_beside, gathered, row_blocks
from fedgmm.support.streaming import Block, accumulate, blocks_of
from fedgmm.wording import counted

if TYPE_CHECKING:
    from fedgmm.model.model import FederatedModel

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
    """Return ``log P_θm2(y|x_i)`` of all or of the given ``learners``, ``(n, M2, K)`` float64.

    Learners of numbers give ``f_θm2(x_i)`` and ``σ²_m2`` instead, ``(n, M2, 2)``.
    """
    params = prediction.learners if learners is None else learners
    with torch.inference_mode():
        inputs = as_numbers(x, next(iter(params.values())).dtype)
        return log_outputs(prediction.net, params, inputs)


# ---------------------------------------------------------------------- rows and their predictions


@dataclass(frozen=True)
class EvaluatedRows:
    """Rows with their clients, for which the Gaussians of a model were evaluated, once."""

    model: FederatedModel  # the fitted model
    x: Tensor  # scaled inputs of the learners, ``(n, *shape)``
    # ``log N(x_i; μ_m1, Σ_m1)`` of the scaled rows, ``(n, M1)``; ``None`` without Gaussians
    log_x: Tensor | None
    # difference of ``log_x`` to the log density in the units of the unscaled rows
    log_volume: float
    codes: Tensor  # the client of each row, ``(n,)``

    def __len__(self) -> int:
        """Return ``n``."""
        return len(self.x)

    def of(self, codes: IntArray | int) -> EvaluatedRows:
        """Return the same rows, of the clients ``(n,)`` or of one client."""
        one = torch.tensor([codes]) if isinstance(codes, int) else torch.from_numpy(codes)
        return replace(self, codes=one.to(self.x.device).expand(len(self)))

    def log_density(self) -> FloatArray:
        """Return ``log P_c(x)`` in the units of the unscaled rows, ``(n,)``."""
        log_x, log_pi = self.log_x, log_weights(self.model.prediction)
        assert log_x is not None
        out = empty(len(self), np.float64)

        def write(rows: slice) -> None:
            found = log_marginal(log_pi[self.codes[rows]], log_x[rows]) - self.log_volume
            out[rows] = found.cpu().numpy()

        _for_blocks(len(self), write, log_x.device)
        return out

    def most_likely_gaussians(self) -> IntArray:
        """Return the Gaussian that most likely holds each row under the federation's weights, ``(n,)``."""
        log_x, out = self.log_x, empty(len(self), np.int64)
        assert log_x is not None
        log_pi = log_weights(self.model.prediction)[-1].logsumexp(-1)
        for rows in row_blocks(len(self)):
            out[rows] = (log_x[rows] + log_pi).argmax(-1).cpu().numpy()
        return out

    def log_density_without_itself(self) -> FloatArray:
        """Return ``log P_c(x_i)`` of training rows as if each had not been trained on, ``(n,)``.

        Each row is taken out of the Gaussians and of the weights of its client. Rows of clients that
        are not here would only add to the Gaussians, so without them the correction is too large.
        """
        log_x, shared, who = self.log_x, self.model.prediction.gaussians, self.codes
        assert log_x is not None
        assert shared is not None
        log_pi = log_weights(self.model.prediction).logsumexp(-1)
        total, counts = log_pi.new_zeros(log_pi.shape[1]), torch.zeros(len(log_pi)).long()
        counts, out = counts.to(who.device), empty(len(self), np.float64)
        for place in row_blocks(len(self)):
            total += responsibilities(log_pi[who[place]] + log_x[place])[0].sum(0)
            counts += torch.bincount(who[place], minlength=len(counts))
        for place in row_blocks(len(self)):
            own, rows = log_pi[who[place]], counts[who[place], None]
            q, _ = responsibilities(own + log_x[place])
            kept = ((rows * own.exp() - q).clamp_min(0.0) / (rows - 1).clamp_min(1)).log()
            without = log_densities_without(log_x[place], shared, total.clamp_min(1.0), q)
            found = (kept + without).logsumexp(-1) - self.log_volume
            out[place] = found.cpu().numpy()
        return out

    def log_proba(self) -> FloatArray:
        """Return ``log P_c(y|x)`` of every class, equation (3), ``(n, K)``."""
        if self.model.target is not None:
            raise ValueError(
                "The model predicts numbers, not classes; use predict or predict_interval."
            )
        out = empty_beside(self.x, (len(self), self.model.prediction.net.classes), torch.float64)

        def write(part: _Part) -> None:
            log_y = log_learners(self.model.prediction, self.x[part.rows], part.learners)
            out[part.rows] = log_class_probabilities(part.log_pi, part.log_x, log_y, part.ratios)

        self._for_parts(write)
        return np.asarray(out.cpu().numpy())

    def numbers(self) -> NumberPredictions:
        """Return ``P_c(y|x)`` of numbers, equation (3)."""
        prediction, target = self.model.prediction, self.model.target
        if target is None:
            raise ValueError("The model predicts classes, not numbers; use predict_proba.")
        mixed = prediction.assignment is None
        shape = (len(self), count_learners(prediction.learners) if mixed else 1)
        weights = empty_beside(self.x, shape, torch.float64)
        outputs = empty_beside(self.x, (*shape, 2), torch.float64)

        def write(part: _Part) -> None:
            weights[part.rows] = log_learner_weights(part.log_pi, part.log_x)
            outputs[part.rows] = log_learners(prediction, self.x[part.rows], part.learners)

        self._for_parts(write)
        found = NumberPredictions(weights, *outputs.unbind(-1)).unscaled(target)
        scores = self.model.interval_scores
        return found if scores is None else replace(found, held_out=torch.from_numpy(scores))

    def log_conditional(self, labels: Tensor) -> tuple[FloatArray, FloatArray | None]:
        """Return ``log P_c(y|x)`` of labels ``(n,)``, and the largest of any class; numbers have none.

        Labels are those of :func:`given_labels` or :func:`labels_of`.
        """
        if self.model.target is not None:
            found, of_labels = self.numbers(), empty(len(self), np.float64)
            for place in row_blocks(len(self)):
                own = labels[place].to(self.x.device)
                of_labels[place] = found.rows(place).log_density(own).cpu().numpy()
            return of_labels, None
        log_proba, codes = self.log_proba(), labels.cpu().numpy()
        of_labels, largest = empty(len(self), np.float64), empty(len(self), np.float64)
        for place in row_blocks(len(self)):
            of_labels[place] = at_codes(log_proba[place], codes[place])
            largest[place] = log_proba[place].max(-1)
        return of_labels, largest

    def _for_parts(self, visit: Callable[[_Part], None]) -> None:
        """Call ``visit`` for parts of the rows, each with the terms of equation (3) that it needs."""
        prediction, log_x, who = self.model.prediction, self.log_x, self.codes
        if not self.model.has_common_model and bool((who == NO_CLIENT).any()):
            raise ValueError(f"{self.model.algorithm} has no common model; name a client.")
        ratios, place = None, who
        if prediction.labels is not None:
            # only of clients that have rows, because there may be many others
            here = who.new_zeros(len(prediction.labels.clients) + 1)
            for block in blocks_in(who):
                here[block] = 1
            present, place = torch.nonzero(here)[:, 0], here.cumsum(0) - 1
            codes = torch.where(present < len(here) - 1, present, NO_CLIENT)
            ratios = prediction.labels.log_ratios(codes)
        if prediction.assignment is None:  # all learners, mixed by the weights of each row's client
            log_pi = log_weights(prediction)
            table = None if ratios is None else ratios.view(len(ratios), *log_pi.shape[1:], -1)

            def visit_block(rows: slice) -> None:
                own_x = None if log_x is None else log_x[rows]
                own_ratios = None if table is None else table[place[who[rows]]]
                visit(_Part(rows, prediction.learners, log_pi[who[rows]], own_x, own_ratios))

            _for_blocks(len(self), visit_block, self.x.device)
            return
        learner_of = _assigned_learners(prediction)[who]
        for number in torch.unique(learner_of).tolist():
            learner = {k: value[number : number + 1] for k, value in prediction.learners.items()}
            for rows in torch.split(torch.nonzero(learner_of == number)[:, 0], _ROWS_OF_A_LEARNER):
                own = None if ratios is None else ratios[place[who[rows]], number][:, None, None]
                nothing = torch.zeros(len(rows), 1, 1, dtype=torch.float64, device=who.device)
                visit(_Part(rows, learner, nothing, None, own))


class _Part(NamedTuple):
    """Some rows, their learners ``(M2, ...)``, ``log π_c``, ``log N`` and label ratios."""

    rows: slice | Tensor
    learners: Params
    log_pi: Tensor
    log_x: Tensor | None
    ratios: Tensor | None


def evaluate_arrays(
    model: FederatedModel, X: ArrayLike, features: ArrayLike | None
) -> EvaluatedRows:
    """Check, scale and evaluate inputs ``(n, *shape)``, and features ``(n, d)`` if the model needs them."""
    inputs = numeric(order_columns(X, model.column_names, "X"), "X")
    _check_shape(model, inputs.shape[1:], features is not None)
    x = _finite_tensor(inputs, "X")
    gaussians = model.prediction.gaussians
    if features is None or gaussians is None:
        return _evaluate(model, x, None)
    separate = numeric(features, "features")
    expected = (len(x), gaussians.means.shape[1])
    if separate.shape != expected:
        raise ValueError(f"features must have shape {expected}, got {separate.shape}.")
    return _evaluate(model, x, _finite_tensor(separate, "features"))


def evaluate_split(model: FederatedModel, rows: LabelledRows) -> EvaluatedRows:
    """Evaluate rows of a data set, which were checked when it was made."""
    separate = not (rows.features_are_inputs or model.prediction.gaussians is None)
    _check_shape(model, tuple(rows.inputs.shape[1:]), separate)
    found = _evaluate(model, rows.inputs, torch.cat(rows.features.chunks) if separate else None)
    return found.of(client_codes(rows, model.names))


def _check_shape(model: FederatedModel, shape: tuple[int, ...], separate: bool) -> None:
    if shape != model.input_shape:
        raise ValueError(f"Rows must have shape {model.input_shape}, got {shape}.")
    if model.prediction.gaussians is None or separate != model.features_are_inputs:
        return
    if separate:
        raise ValueError("The Gaussians of this model use the inputs; do not pass features.")
    raise ValueError("The Gaussians of this model use separate features; pass features=.")


def _evaluate(model: FederatedModel, inputs: Tensor, features: Tensor | None) -> EvaluatedRows:
    parameter = next(iter(model.prediction.learners.values()))
    x, log_volume = inputs.to(parameter.device), 0.0
    function = function_of(model.prediction.net)
    if isinstance(function, ModuleNetwork):
        function.check_integers(x)
    if model.scaling is not None:
        x = scaled(x, model.scaling, parameter.dtype)
        log_volume = model.scaling.log_volume if model.features_are_inputs else 0.0
    seen = x.flatten(1) if features is None else features.to(parameter.device)
    if model.projection is not None:
        seen, log_volume = model.projection.apply(x, dtype=x.dtype), 0.0
    largest = min(torch.finfo(parameter.dtype).max ** 0.75, 1e150)
    for rows in (x, seen):
        if not rows.is_floating_point():
            continue
        if not all(bool((block.abs() < largest).all()) for block in blocks_in(rows)):
            row = int(torch.nonzero(~(rows.flatten(1).abs() < largest))[0, 0])
            raise ValueError(
                f"Row {row} has a number that is too large to compute with; correct it."
            )
    log_x, no_client = log_gaussians(model.prediction, seen), torch.tensor([NO_CLIENT])
    return EvaluatedRows(model, x, log_x, log_volume, no_client.to(x.device).expand(len(x)))


# ---------------------------------------------------------------------- labels and clients by name


def given_labels(model: FederatedModel, y: ArrayLike, rows: int) -> Tensor:
    """Return the position of each row's label among the classes, or its number, ``(n,)``.

    Raises:
        ValueError: not one label or finite number per row, or an unknown label.
    """
    if model.target is not None:
        try:
            numbers = np.asarray(y, dtype=np.float64)
        except (TypeError, ValueError):
            raise ValueError("y must hold numbers, because the model predicts numbers.") from None
        if numbers.shape != (rows,) or not np.isfinite(numbers).all():
            raise ValueError(
                f"y must hold one finite number per row: {counted(rows, 'row')}, y has shape "
                f"{numbers.shape}."
            )
        return torch.from_numpy(numbers)
    labels, classes = np.asarray(y), model.classes.tolist()
    if labels.shape != (rows,):
        raise ValueError(
            f"y must hold one label per row: {counted(rows, 'row')}, y has shape {labels.shape}."
        )
    position = {label: index for index, label in enumerate(classes)}
    unknown = [label for label in labels.tolist() if label not in position]
    if unknown:
        raise ValueError(
            f"Label {unknown[0]!r} was not seen in training; the classes are {classes[:20]}."
        )
    return torch.tensor([position[label] for label in labels.tolist()], dtype=torch.int64)


def labels_of(model: FederatedModel, rows: LabelledRows, data: FederatedDataset) -> Tensor:
    """Return the position of each row's label among the classes, or its number, ``(n,)``.

    Position ``K`` stands for a class that is not in the training data. It has probability zero, so its
    rows count as wrong, with the largest loss.
    """
    if model.target is not None:
        return rows.labels
    position = {label: index for index, label in enumerate(model.classes.tolist())}
    lookup = [position.get(label, len(position)) for label in data.classes.tolist()]
    return torch.from_numpy(gathered(np.array(lookup), rows.labels.cpu().numpy()))


def at_codes(log_proba: FloatArray, labels: IntArray) -> FloatArray:
    """Return the entries ``(n,)`` of ``(n, K)`` at labels; minus infinity for label ``K``, not a class."""
    classes = log_proba.shape[1]
    found = log_proba[np.arange(len(labels)), np.minimum(labels, classes - 1)]
    return np.where(labels < classes, found, -np.inf)


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
    return gathered(codes, rows.codes.cpu().numpy())


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
    learners = next(iter(prediction.learners.values()))
    found = torch.cat([assignment, assignment.new_tensor([-1 if default is None else default])])
    return found.to(learners.device)


def _for_blocks(rows: int, visit: Callable[[slice], None], device: torch.device) -> None:
    """Call ``visit`` for blocks of rows on all threads, so that temporaries stay small."""

    def visit_block(_: None, block: Block) -> None:
        visit(slice(block[1], block[2]))

    accumulate(blocks_of([rows], _ROWS_AT_ONCE), lambda: None, visit_block, device)


def _finite_tensor(rows: NDArray[Any], name: str) -> Tensor:
    """Return rows as a tensor, or raise for NaN and infinity."""
    if not np.isfinite(rows).all():
        row, column = np.argwhere(~np.isfinite(rows.reshape(len(rows), -1)))[0].tolist()
        raise ValueError(f"Input {name} contains NaN or infinity: row {row}, column {column}.")
    return torch.from_numpy(np.ascontiguousarray(rows))
