"""Which columns decide: coefficients of linear learners, or the loss after shuffling a column."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.data.dataset import LabelledRows
from fedgmm.methods.base import Prediction
from fedgmm.model.metrics import finite_losses
from fedgmm.model.predictions import client_codes, evaluate_arrays, evaluate_split
from fedgmm.nets.networks import Dense, function_of
from fedgmm.support.checks import check_choice

if TYPE_CHECKING:
    from fedgmm.model.model import FederatedModel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

KINDS = ("auto", "coefficients", "permutation")

_MEANINGS = {
    "coefficients": "how far the column moves the log-odds: the standard deviation of its part of them",
    "numbers": "how far the column moves the prediction: the standard deviation of its part of it",
    "permutation": "how much the log-loss grows if the values of the column are shuffled among the rows "
    "of a client",
}

_MOST_ROWS, _FEWEST_ROWS = 10_000, 500
_MOST_PREDICTIONS = 10_000_000  # because every shuffle of a column needs new predictions


@dataclass(frozen=True)
class Importance:
    """The weight of each column in the predictions of each client.

    Attributes:
        kind: ``"coefficients"`` or ``"permutation"``; see :attr:`meaning`.
        columns: names of the columns; one-hot categories and indicators of missing values belong to theirs.
        clients: names of the clients.
        values: ``(C, columns)``; larger values matter more, NaN for a client with too few rows.
        features: names of the columns of the inputs, ``(d,)``.
        coefficients: change of the log-odds of the positive class, or of the number to predict, per
            standard deviation of each input, mixed by the weights of each client, ``(C, d)``; ``None``
            without linear learners or with several classes.
        of_numbers: whether the model predicts numbers.
    """

    kind: str
    columns: tuple[str, ...]
    clients: tuple[Hashable, ...]
    values: FloatArray
    features: tuple[str, ...]
    coefficients: FloatArray | None = None
    of_numbers: bool = False

    @property
    def meaning(self) -> str:
        """The meaning of the values."""
        numbers = self.of_numbers and self.kind == "coefficients"
        return _MEANINGS["numbers" if numbers else self.kind]

    @property
    def _known(self) -> FloatArray:
        known = self.values[np.isfinite(self.values).all(1)]
        return known if len(known) else np.full((1, len(self.columns)), np.nan)

    @property
    def mean(self) -> FloatArray:
        """Mean over the clients whose values are known, ``(columns,)``; NaN without any."""
        return np.asarray(self._known.mean(0))

    @property
    def spread(self) -> FloatArray:
        """Standard deviation over clients, ``(columns,)``."""
        return np.asarray(self._known.std(0))

    @property
    def order(self) -> list[int]:
        """Positions of the columns, the most important first."""
        return [int(column) for column in np.argsort(-self.mean, kind="stable")]

    def record(self) -> dict[str, Any]:
        """Return plain values, for JSON; the most important column comes first."""
        clients, columns = [str(client) for client in self.clients], {}
        for column in self.order:
            columns[self.columns[column]] = {
                "mean": float(self.mean[column]),
                "spread": float(self.spread[column]),
                "clients": dict(zip(clients, self.values[:, column].tolist(), strict=True)),
            }
        record: dict[str, Any] = {"kind": self.kind, "meaning": self.meaning, "columns": columns}
        if self.coefficients is not None:
            means = self.coefficients.mean(0)
            record["coefficients"] = dict(zip(self.features, means.tolist(), strict=True))
        return record


def importance_of(
    model: FederatedModel,
    rows: LabelledRows,
    labels: Tensor,
    columns: Mapping[str, Sequence[int]] | None,
    kind: str,
    repeats: int,
    seed: int,
) -> Importance:
    """Return which columns decide, see :meth:`FederatedModel.importance`."""
    check_choice("kind", kind, KINDS)
    if len(model.input_shape) != 1 or not model.features_are_inputs:
        raise ValueError(f"importance needs rows of columns, not of shape {model.input_shape}.")
    net, of_numbers = function_of(model.prediction.net), model.target is not None
    linear = isinstance(net, Dense) and not net.hidden
    if kind == "coefficients" and not linear:
        raise ValueError("Only linear learners have coefficients; use kind='permutation'.")
    features = model.column_names or tuple(f"x{j}" for j in range(model.input_shape[0]))
    groups = {name: [j] for j, name in enumerate(features)} if columns is None else columns
    codes = client_codes(rows, model.names)
    present, clients = np.unique(codes, return_inverse=True)
    names = tuple(model.names[code] for code in present)
    if kind != "permutation" and linear:
        x = evaluate_split(model, rows).x.double().cpu().numpy()
        weight = model.prediction.learners["0.weight"].double().cpu().numpy()  # (G, K, d)
        if model.target is not None:
            scores = weight * float(model.target.scale)
        elif len(model.classes) == 2:
            positive = model.decision().positive
            positive = 1 if positive is None else positive
            scores = (weight[:, positive] - weight[:, 1 - positive])[:, None]
        else:
            scores = weight - weight.mean(1, keepdims=True)
        values, signed = _from_coefficients(model.prediction, scores, x, groups, present)
        kind = "coefficients"
        return Importance(kind, tuple(groups), names, values, features, signed, of_numbers)
    # all rows, or evenly spread ones if that would take too long
    most = min(_MOST_ROWS, max(_FEWEST_ROWS, _MOST_PREDICTIONS // (repeats * len(groups))))
    shown = np.linspace(0, len(rows) - 1, min(len(rows), most)).round().astype(np.int64)
    own_labels = labels[torch.from_numpy(shown)]

    def losses_of(inputs: NDArray[Any]) -> FloatArray:
        evaluated = evaluate_arrays(model, inputs, None).of(codes[shown])
        log_p, _ = evaluated.log_conditional(own_labels)
        return -log_p if of_numbers else finite_losses(log_p)

    inputs = rows.inputs.cpu().numpy()[shown]
    values = _from_permutations(
        losses_of, inputs, groups, clients[shown], len(names), repeats, seed
    )
    kind = "permutation"
    return Importance(kind, tuple(groups), names, values, features, of_numbers=of_numbers)


def _from_coefficients(
    prediction: Prediction,
    scores: FloatArray,
    x: FloatArray,
    groups: Mapping[str, Sequence[int]],
    codes: IntArray,
) -> tuple[FloatArray, FloatArray | None]:
    """Return the importance of each group of columns, and signed coefficients if there is one score.

    Learner ``m`` adds ``Σ_j w_mj x_j`` over the columns ``j`` of a group to the log-odds, to the number
    to predict, or to the score of each class; ``scores``, ``(G, K, d)``, are these ``w``. The standard
    deviation of this part over the scaled rows ``x`` ``(n, d)`` is the importance of the group for the
    learner, and the shares of the learners at the clients ``codes`` ``(C,)`` mix the learners:
    ``(C, groups)``.
    """
    learners = np.arange(len(scores))
    if prediction.assignment is not None:  # share of each learner at each client, (C, G)
        shares = (prediction.assignment.cpu().numpy()[codes, None] == learners).astype(np.float64)
    else:
        assert prediction.client_weights is not None
        pairs = prediction.client_weights.cpu().numpy()[codes]
        shares = pairs.reshape(len(codes), -1, len(scores)).sum(1)
    parts = []
    for columns in groups.values():
        own = x[:, list(columns)]
        covariance = np.cov(own, rowvar=False, bias=True).reshape(len(columns), len(columns))
        chosen = scores[:, :, list(columns)]
        variance = np.einsum("gki,ij,gkj->gk", chosen, covariance, chosen)
        parts.append(np.sqrt(np.maximum(variance, 0.0).mean(1)))
    values = shares @ np.stack(parts, axis=1)
    return values, shares @ (scores[:, 0] * x.std(0)) if scores.shape[1] == 1 else None


def _from_permutations(
    losses_of: Callable[[NDArray[Any]], FloatArray],
    inputs: NDArray[Any],
    groups: Mapping[str, Sequence[int]],
    clients: IntArray,
    count: int,
    repeats: int,
    seed: int,
) -> FloatArray:
    """Return the growth of each client's mean loss if a group of columns is shuffled, ``(C, groups)``.

    ``losses_of`` returns the loss of each row of ``inputs`` ``(n, d)``. The columns of a group are shuffled
    together, among the rows of each of ``count`` clients.
    """
    rng = np.random.default_rng(seed)
    sizes = np.bincount(clients, minlength=count)
    before, sorted_rows = losses_of(inputs), np.argsort(clients, kind="stable")
    values = np.zeros((count, len(groups)))
    for place, columns in enumerate(groups.values()):
        chosen = list(columns)
        for _ in range(repeats):
            shuffled = inputs.copy()
            source = np.lexsort((rng.random(len(inputs)), clients))
            shuffled[sorted_rows[:, None], chosen] = inputs[source[:, None], chosen]
            growth = losses_of(shuffled) - before
            values[:, place] += np.bincount(clients, growth, minlength=count)
    values /= np.maximum(sizes, 1)[:, None] * repeats
    values[sizes < 2] = np.nan  # nothing can be exchanged
    return values
