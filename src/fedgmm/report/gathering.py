"""From a fitted model and its clients to all that the report shows."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.report.contents import AdaptationRecord, ClientTable, ReportContents, Series
from fedgmm.report.predictions import PredictedRows, density_scatter, reliability_of
from fedgmm.report.replay import replay_newcomer
from fedgmm.report.weights import projection_of, weight_map

if TYPE_CHECKING:
    from fedgmm.data.dataset import FederatedDataset
    from fedgmm.model.metrics import Evaluation
    from fedgmm.model.model import FederatedModel

FloatArray = NDArray[np.float64]

# What a series of the history is called on the page, in the order of the panels.
_SERIES = {
    "log_likelihood": "Log-likelihood of the training rows",
    "validation_accuracy": "Accuracy on validation rows",
    "validation_log_likelihood": "Log-likelihood of validation labels",
}


def gather(
    model: FederatedModel,
    dataset: FederatedDataset,
    *,
    title: str,
    history: list[dict[str, float]],
    configuration: Mapping[str, Any],
    feature_names: Sequence[str] | None = None,
    baselines: Mapping[str, Evaluation | Mapping[Any, float]] | None = None,
    adaptations: Sequence[AdaptationRecord] = (),
    notes: Sequence[str] = (),
) -> ReportContents:
    """Everything the page shows; the model that is passed in does not change.

    Args:
        model: a fitted model that knows the clients of ``dataset``.
        dataset: the clients; accuracies and densities are those of its test rows.
        title: of the page.
        history: one dictionary a round, as training leaves it.
        configuration: what the run was asked for; nested settings are joined with dots.
        feature_names: of the columns the Gaussians see; the data set's own names if left out.
        baselines: method -> its evaluation on the same clients, or client -> accuracy.
        adaptations: of unseen clients; without any, a known client is played again.
        notes: warnings and remarks for the reader.
    """
    from fedgmm.methods.base import TITLES
    from fedgmm.nets.devices import environment

    absent: dict[str, str] = {}
    own = replace(model)  # calibration and adaptation below stay in this copy
    method = TITLES.get(model.algorithm, model.algorithm)
    clients = _client_table(own, dataset)
    test = PredictedRows.of(own, dataset) if len(dataset.test) else None
    reliability = densities = None
    if test is None:
        why = "The data set has no test rows, so predictions could not be checked."
        absent |= {"accuracy": why, "calibration": why, "densities": why}
    else:
        reliability = reliability_of(test.confidence, test.right)
        densities, clients = density_scatter(own, dataset, test, clients, absent)
    weights, clients = weight_map(own, dataset, clients, absent)
    records, replayed = tuple(adaptations), False
    if not records:
        replay = replay_newcomer(own, dataset, absent)
        records, replayed = (replay,) if replay else (), replay is not None
    return ReportContents(
        title=title,
        method=method,
        classes=len(model.classes),
        components=0 if model.prediction.gaussians is None else model.n_components,
        learners=model.n_learners,
        clients=clients,
        convergence=convergence(history, absent),
        baselines={
            TITLES.get(name, name): _aligned(told, dataset.names)
            for name, told in (baselines or {}).items()
        },
        weights=weights,
        projection=projection_of(own, dataset, feature_names, absent),
        reliability=reliability,
        densities=densities,
        adaptations=records,
        replayed=replayed,
        configuration=flattened(configuration),
        environment=flattened(environment()),
        notes=tuple(notes),
        absent=absent,
    )


# ---------------------------------------------------------------------- clients


def _client_table(model: FederatedModel, dataset: FederatedDataset) -> ClientTable:
    sizes = [
        split.features.rows_per_client.cpu().numpy()
        for split in (dataset.train, dataset.validation, dataset.test)
    ]
    scores = np.full((3, len(dataset.names)), np.nan)
    row_accuracy = math.nan
    if len(dataset.test):
        result = model.evaluate("test", dataset)
        row_accuracy = result.weighted_accuracy
        here = sizes[2] > 0
        scores[:, here] = result.accuracy, result.log_loss, result.calibration_error
    rows = np.sum(sizes, axis=0)
    names = distinct_names(dataset.names)
    accuracy, log_loss, calibration_error = scores
    return ClientTable(
        names,
        rows,
        sizes[0],
        accuracy,
        log_loss,
        calibration_error,
        row_accuracy=row_accuracy,
    )


def distinct_names(names: Sequence[Hashable]) -> tuple[str, ...]:
    """Names as text; where two look the same, such as ``1`` and ``"1"``, as Python writes them."""
    plain = [str(name) for name in names]
    return tuple(plain) if len(set(plain)) == len(plain) else tuple(map(repr, names))


def _aligned(told: Evaluation | Mapping[Any, float], names: Sequence[Hashable]) -> FloatArray:
    """Accuracy of each client, ``(C,)``; NaN where it is not told."""
    if not isinstance(told, Mapping):
        told = dict(zip(told.clients, told.accuracy.tolist(), strict=True))
    return np.array([told.get(name, np.nan) for name in names], dtype=np.float64)


# ---------------------------------------------------------------------- rounds


def convergence(
    history: Sequence[Mapping[str, float]], absent: dict[str, str]
) -> tuple[Series, ...]:
    """What was noted after each round; ``absent`` is told where there is nothing."""
    series = []
    for key, title in _SERIES.items():
        noted = [
            (entry.get("round", float(number)), entry[key])
            for number, entry in enumerate(history, start=1)
            if np.isfinite(entry.get(key, np.nan))
        ]
        if noted:
            rounds, values = np.array(noted, dtype=np.float64).T
            series.append(Series(title, rounds, values))
    if not series:
        absent["convergence"] = "No figures of the single rounds were kept."
    return tuple(series)


# ---------------------------------------------------------------------- settings


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as one list of name and text."""
    result: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            result |= flattened(value, f"{prefix}{name}.")
        else:
            result[f"{prefix}{name}"] = _as_text(value)
    return result


def _as_text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_as_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
