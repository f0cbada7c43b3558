"""Predictions of test rows for the report: calibration, densities, and the replay of a new client."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.report.contents import (
    FALSE_ALARM_RATE,
    MOST_POINTS,
    AdaptationRecord,
    ClientTable,
    DensityScatter,
    Reliability,
    evenly,
)
from fedgmm.report.mixture import has_mixture_weights

if TYPE_CHECKING:
    from fedgmm.data.dataset import FederatedDataset, LabelledRows
    from fedgmm.model.model import FederatedModel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_CONFIDENCE_BINS = 10
_LOWEST_LOG_PROBABILITY = -700.0  # stands for log(0)
_ROWS_OF_A_NEWCOMER = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


@dataclass(frozen=True)
class PredictedRows:
    """Predictions of test rows under their own client's weights.

    Attributes:
        inputs: ``(N, *shape)``.
        features: columns of the Gaussians if they differ from the inputs, ``(N, d)``.
        owners: the client of each row, as the model knows it, ``(N,)``.
        codes: the position of that client in the table, ``(N,)``.
        confidence: probability of the predicted class, ``(N,)``; NaN for numbers.
        right: whether the predicted class is the true one, ``(N,)``; false for numbers.
        log_y: log-probability of the true class, or log density of the number, ``(N,)``.
    """

    inputs: NDArray[Any]
    features: NDArray[Any] | None
    owners: NDArray[Any]
    codes: IntArray
    confidence: FloatArray
    right: NDArray[np.bool_]
    log_y: FloatArray

    @classmethod
    def of(cls, model: FederatedModel, dataset: FederatedDataset) -> PredictedRows:
        """Predict the test rows of a data set that has some."""
        rows = dataset.test
        codes = rows.codes.cpu().numpy()
        # Names may be tuples, from which np.array would make a matrix.
        names = np.fromiter(rows.names, dtype=object, count=len(rows.names))
        inputs, features = rows.inputs.cpu().numpy(), features_of(model, rows)
        if model.target is not None:
            numbers = rows.labels.cpu().numpy()
            log_y = model.log_conditional(inputs, numbers, names[codes], features=features)
            unknown = np.full(len(numbers), np.nan)
            return cls(inputs, features, names[codes], codes, unknown, unknown > 0, log_y)
        probabilities = model.predict_proba(inputs, names[codes], features=features)
        # A class that is unknown to the model has probability zero.
        position = {label: index for index, label in enumerate(model.classes.tolist())}
        column = np.array([position.get(label, -1) for label in dataset.classes.tolist()])
        truth = column[rows.labels.cpu().numpy()]
        of_truth = np.where(truth >= 0, probabilities[np.arange(len(truth)), truth], 0.0)
        with np.errstate(divide="ignore"):
            log_y = np.log(of_truth).clip(min=_LOWEST_LOG_PROBABILITY)
        return cls(
            inputs,
            features,
            names[codes],
            codes,
            probabilities.max(-1),
            probabilities.argmax(-1) == truth,
            log_y,
        )


def features_of(model: FederatedModel, rows: LabelledRows) -> NDArray[Any] | None:
    """Return the columns of the Gaussians; ``None`` if they are the inputs or are not needed."""
    if rows.features_are_inputs or model.prediction.gaussians is None:
        return None
    return np.concatenate([chunk.cpu().numpy() for chunk in rows.features.chunks])


def reliability_of(confidence: FloatArray, right: NDArray[np.bool_]) -> Reliability:
    """Compare confidence and accuracy in bins of equal width.

    Args:
        confidence: of each prediction, ``(N,)``.
        right: whether it is right, ``(N,)``.
    """
    bins = np.minimum((confidence * _CONFIDENCE_BINS).astype(np.int64), _CONFIDENCE_BINS - 1)
    filled, place, counts = np.unique(bins, return_inverse=True, return_counts=True)
    mean_confidence = np.bincount(place, weights=confidence) / counts
    accuracy = np.bincount(place, weights=right) / counts
    error = float(np.average(np.abs(mean_confidence - accuracy), weights=counts))
    return Reliability(mean_confidence, accuracy, counts, filled / _CONFIDENCE_BINS, error)


def reliability_of_intervals(
    model: FederatedModel, dataset: FederatedDataset, test: PredictedRows
) -> Reliability:
    """Return the share of test rows that intervals of ten to ninety percent hold."""
    from fedgmm.model.metrics import interval_of  # loads torch

    found = model.predict_distribution(test.inputs, test.owners, features=test.features)
    y = dataset.test.labels.cpu().numpy()
    levels = np.arange(1, _CONFIDENCE_BINS) / _CONFIDENCE_BINS
    ends = [interval_of(found, level).T for level in levels.tolist()]
    held = np.array([((low <= y) & (y <= high)).mean() for low, high in ends])
    counts = np.full(len(levels), len(y))
    return Reliability(levels, held, counts, levels, float(np.abs(levels - held).mean()))


def density_scatter(
    model: FederatedModel,
    dataset: FederatedDataset,
    test: PredictedRows,
    clients: ClientTable,
    absent: dict[str, str],
) -> tuple[DensityScatter | None, ClientTable]:
    """Return the scatter plot's values, and the table with each client's share of novel rows.

    A model without calibration is calibrated on the validation rows, which changes the model.
    """
    if model.prediction.gaussians is None:
        absent["densities"] = (
            "This method does not model the inputs, so there is no log P(x) and no row can be "
            "flagged as novel."
        )
        return None, clients
    log_x = model.score_samples(test.inputs, test.owners, features=test.features)
    novel = None
    if not model.calibration and len(dataset.validation):
        model.calibrate(dataset)
    if "x" in model.calibration:
        novel = model.novelty(
            test.inputs, score="x", false_alarm_rate=FALSE_ALARM_RATE, features=test.features
        ).novel
        sizes = np.bincount(test.codes, minlength=len(clients.names))
        flagged = np.bincount(test.codes, weights=novel, minlength=len(clients.names))
        share = np.where(sizes > 0, flagged / np.maximum(sizes, 1), np.nan)
        clients = replace(clients, novel_share=share)
    shown = evenly(len(log_x), MOST_POINTS)
    scatter = DensityScatter(
        log_x[shown],
        test.log_y[shown],
        None if novel is None else novel[shown],
        test.codes[shown],
        len(log_x),
        0 if novel is None else int(novel.sum()),
    )
    return scatter, clients


def r2_of(truth: FloatArray, predicted: FloatArray) -> float:
    """Return ``R²`` of predicted numbers; NaN if all numbers are equal."""
    spread = ((truth - truth.mean()) ** 2).sum()
    return float(1.0 - ((truth - predicted) ** 2).sum() / spread) if spread > 0 else math.nan


def replay_newcomer(
    model: FederatedModel, dataset: FederatedDataset, absent: dict[str, str]
) -> AdaptationRecord | None:
    """Let the client of median size join again, with more and more of its training rows."""
    if not has_mixture_weights(model):
        absent["adaptation"] = (
            "This method has no mixture weights, and those are all that a new client would learn."
        )
        return None
    sizes = dataset.train.features.rows_per_client.cpu().numpy()
    candidates = np.flatnonzero(dataset.test.features.rows_per_client.cpu().numpy() > 0)
    if not len(candidates):
        absent["adaptation"] = "No client has test rows on which to check a new client."
        return None
    by_size = candidates[np.argsort(sizes[candidates], kind="stable")]
    code = int(by_size[(len(by_size) - 1) // 2])
    name = dataset.names[code]
    train, test = dataset.train.client(code), dataset.test.client(code)
    labels, truth = (dataset.labels_of(rows) for rows in (train, test))
    inputs, features = train.inputs.cpu().numpy(), features_of(model, train)
    # Shuffle with a fixed seed because rows may be sorted by label; drop labels unknown to the model.
    order = np.random.default_rng(0).permutation(len(train))
    if model.target is None:
        order = order[np.isin(labels[order], model.classes)]
    counts = sorted({min(n, len(order)) for n in (*_ROWS_OF_A_NEWCOMER, len(order))} - {0})
    copy = replace(model)  # adapting the copy keeps the client's trained weights

    def accuracy(client: Hashable | None) -> float:
        owners = np.fromiter([client] * len(test), dtype=object, count=len(test))
        predicted = copy.predict(
            test.inputs.cpu().numpy(), owners, features=features_of(model, test)
        )
        if model.target is not None:
            return r2_of(truth, predicted)
        return float((predicted == truth).mean())

    accuracies, log_likelihoods = [accuracy(None)], list[float]()
    for count in counts:
        some = order[:count]
        seen = None if features is None else features[some]
        log_likelihoods = copy.adapt(
            name, inputs[some], labels[some], features=seen
        ).log_likelihoods
        accuracies.append(accuracy(name))
    return AdaptationRecord(str(name), [0, *counts], accuracies, log_likelihoods, labelled=True)
