"""How test rows are predicted, for the report: confidence, correctness, densities, flags."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.report.contents import (
    FALSE_ALARM_RATE,
    MOST_POINTS,
    ClientTable,
    DensityScatter,
    Reliability,
    evenly,
)

if TYPE_CHECKING:
    from fedgmm.data.dataset import FederatedDataset, LabelledRows
    from fedgmm.model.model import FederatedModel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_CONFIDENCE_BINS = 10
_LOWEST_LOG_PROBABILITY = -700.0  # an impossible label; its logarithm would not be a number


@dataclass(frozen=True)
class PredictedRows:
    """Predictions of test rows under their own client's weights.

    Attributes:
        inputs: ``(N, *shape)``.
        features: what the Gaussians see, if that is not the inputs, ``(N, d)``.
        owners: the client of each row, as the model knows it, ``(N,)``.
        codes: the same as a position in the table, ``(N,)``.
        confidence: of the predicted class, ``(N,)``.
        right: the predicted class is the true one, ``(N,)``.
        log_y: of the true class, ``(N,)``.
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
        """The test rows of a data set that has some."""
        rows = dataset.test
        codes = rows.codes.cpu().numpy()
        # names may be tuples, of which NumPy would make a matrix
        names = np.fromiter(rows.names, dtype=object, count=len(rows.names))
        inputs, features = rows.inputs.cpu().numpy(), features_of(model, rows)
        proba = model.predict_proba(inputs, names[codes], features=features)
        # a class that training never saw has probability zero
        position = {label: index for index, label in enumerate(model.classes.tolist())}
        column = np.array([position.get(label, -1) for label in dataset.classes.tolist()])
        truth = column[rows.labels.cpu().numpy()]
        of_truth = np.where(truth >= 0, proba[np.arange(len(proba)), truth], 0.0)
        with np.errstate(divide="ignore"):
            log_y = np.log(of_truth).clip(min=_LOWEST_LOG_PROBABILITY)
        return cls(
            inputs,
            features,
            names[codes],
            codes,
            proba.max(-1),
            proba.argmax(-1) == truth,
            log_y,
        )


def features_of(model: FederatedModel, rows: LabelledRows) -> NDArray[Any] | None:
    """What the Gaussians see of the rows; ``None`` if that is the inputs."""
    if rows.features_are_inputs or model.prediction.gaussians is None:
        return None
    return np.concatenate([chunk.cpu().numpy() for chunk in rows.features.chunks])


def reliability_of(confidence: FloatArray, right: NDArray[np.bool_]) -> Reliability:
    """Bins of equal width over the confidence ``(N,)`` of predictions that are right or not."""
    bins = np.minimum((confidence * _CONFIDENCE_BINS).astype(np.int64), _CONFIDENCE_BINS - 1)
    counts = np.bincount(bins, minlength=_CONFIDENCE_BINS)
    filled = np.flatnonzero(counts)
    counts = counts[filled]
    told = np.bincount(bins, weights=confidence, minlength=_CONFIDENCE_BINS)[filled] / counts
    true = np.bincount(bins, weights=right, minlength=_CONFIDENCE_BINS)[filled] / counts
    error = float(np.average(np.abs(told - true), weights=counts))
    return Reliability(told, true, counts, filled / _CONFIDENCE_BINS, error)


def density_scatter(
    model: FederatedModel,
    dataset: FederatedDataset,
    test: PredictedRows,
    clients: ClientTable,
    absent: dict[str, str],
) -> tuple[DensityScatter | None, ClientTable]:
    """The scatter, and the table with each client's share of novel rows."""
    if model.prediction.gaussians is None:
        absent["densities"] = (
            "This method does not model what the inputs look like, so there is no log P(x) and no "
            "sample can be called novel by it."
        )
        return None, clients
    log_x = model.score_samples(test.inputs, test.owners, features=test.features)
    novel = None
    if not model.calibration and len(dataset.validation):
        model.calibrate(dataset)
    if "x" in model.calibration:
        found = model.novelty(
            test.inputs, score="x", false_alarm_rate=FALSE_ALARM_RATE, features=test.features
        )
        novel = found.novel
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
