"""Which columns decide: coefficients of linear learners, or the loss after shuffling a column."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.methods.base import Prediction
from fedgmm.nets.networks import Dense

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

KINDS = ("auto", "coefficients", "permutation")

_MEANINGS = {
    "coefficients": "how far the column moves the log-odds: the standard deviation of its part of them",
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
        coefficients: change of the log-odds of the positive class per standard deviation of each input,
            mixed by the weights of each client, ``(C, d)``; ``None`` without linear learners or with
            several classes.
    """

    kind: str
    columns: tuple[str, ...]
    clients: tuple[Hashable, ...]
    values: FloatArray
    features: tuple[str, ...]
    coefficients: FloatArray | None = None

    @property
    def meaning(self) -> str:
        """The meaning of the values."""
        return _MEANINGS[self.kind]

    @property
    def mean(self) -> FloatArray:
        """Mean over the clients whose values are known, ``(columns,)``; NaN without any."""
        known = self.values[np.isfinite(self.values).all(1)]
        return known.mean(0) if len(known) else np.full(len(self.columns), np.nan)

    @property
    def spread(self) -> FloatArray:
        """Standard deviation over clients, ``(columns,)``."""
        known = self.values[np.isfinite(self.values).all(1)]
        return known.std(0) if len(known) else np.full(len(self.columns), np.nan)

    @property
    def order(self) -> list[int]:
        """Positions of the columns, the most important first."""
        return [int(column) for column in np.argsort(-self.mean, kind="stable")]

    def record(self) -> dict[str, Any]:
        """Return plain values, for JSON; the most important column comes first."""
        record: dict[str, Any] = {
            "kind": self.kind,
            "meaning": self.meaning,
            "columns": {
                self.columns[column]: {
                    "mean": float(self.mean[column]),
                    "spread": float(self.spread[column]),
                    "clients": {
                        str(client): float(value)
                        for client, value in zip(self.clients, self.values[:, column], strict=True)
                    },
                }
                for column in self.order
            },
        }
        if self.coefficients is not None:
            means = self.coefficients.mean(0)
            record["coefficients"] = dict(zip(self.features, means.tolist(), strict=True))
        return record


def is_linear(prediction: Prediction) -> bool:
    """Whether the learners are linear, so that their coefficients say which columns decide."""
    return isinstance(prediction.net, Dense) and not prediction.net.hidden


def from_coefficients(
    prediction: Prediction,
    x: FloatArray,
    groups: Mapping[str, Sequence[int]],
    codes: IntArray,
    positive: int | None,
) -> tuple[FloatArray, FloatArray | None]:
    """Return the importance of each group of columns, and signed coefficients of two classes.

    Learner ``m`` adds ``Σ_j w_mj x_j`` over the columns ``j`` of a group to the log-odds, or to the score
    of each class. The standard deviation of this part over the rows is the importance of the group for the
    learner, and the shares of the learners at a client mix the learners: ``(C, groups)``.

    Args:
        prediction: parameters with linear learners.
        x: scaled rows, ``(n, d)``.
        groups: columns of the inputs by name.
        codes: the clients, as positions in the model, ``(C,)``.
        positive: the positive class if there are two classes.
    """
    weight = prediction.learners["0.weight"].double().cpu().numpy()  # (G, K, d)
    if positive is None:
        scores = weight - weight.mean(1, keepdims=True)
    else:
        scores = (weight[:, positive] - weight[:, 1 - positive])[:, None]
    shares = _learner_shares(prediction, codes)
    parts = []
    for columns in groups.values():
        own = x[:, list(columns)]
        covariance = np.cov(own, rowvar=False, bias=True).reshape(len(columns), len(columns))
        chosen = scores[:, :, list(columns)]
        variance = np.einsum("gki,ij,gkj->gk", chosen, covariance, chosen)
        parts.append(np.sqrt(np.maximum(variance, 0.0).mean(1)))
    values = shares @ np.stack(parts, axis=1)
    return values, None if positive is None else shares @ (scores[:, 0] * x.std(0))


def _learner_shares(prediction: Prediction, codes: IntArray) -> FloatArray:
    """Return the share of each learner at each client, ``(C, G)``."""
    learners = len(prediction.learners["0.weight"])
    if prediction.assignment is not None:
        return np.asarray(np.eye(learners)[prediction.assignment.cpu().numpy()[codes]])
    assert prediction.client_weights is not None
    weights = prediction.client_weights.cpu().numpy()[codes]
    return np.asarray(weights.reshape(len(codes), -1, learners).sum(1))


def from_permutations(
    losses_of: Callable[[NDArray[Any]], FloatArray],
    inputs: NDArray[Any],
    groups: Mapping[str, Sequence[int]],
    clients: IntArray,
    count: int,
    *,
    repeats: int,
    seed: int,
) -> FloatArray:
    """Return the growth of each client's mean loss if a group of columns is shuffled, ``(C, groups)``.

    Args:
        losses_of: returns the loss of each row, given inputs ``(n, d)``.
        inputs: the rows, ``(n, d)``.
        groups: columns of the inputs by name; the columns of a group are shuffled together.
        clients: client of each row; rows are exchanged within a client only, ``(n,)``.
        count: number of clients.
        repeats: number of shuffles whose mean is taken.
        seed: of the shuffles.
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


def some_rows(rows: int, shuffles: int) -> IntArray:
    """Return positions of rows to shuffle: all, or evenly spread ones if that would take too long."""
    most = min(_MOST_ROWS, max(_FEWEST_ROWS, _MOST_PREDICTIONS // shuffles))
    return np.linspace(0, rows - 1, min(rows, most)).round().astype(np.int64)
