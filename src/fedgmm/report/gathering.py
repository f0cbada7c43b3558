"""Gather the contents of a report from a fitted model and its clients."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.report.contents import (
    MOST_COLUMNS,
    AdaptationRecord,
    ClientTable,
    DecidingColumns,
    ExampleGroup,
    ReportContents,
    Series,
    TestMetrics,
)
from fedgmm.report.mixture import projection_of, weight_map
from fedgmm.report.predictions import (
    PredictedRows,
    density_scatter,
    reliability_of,
    reliability_of_intervals,
    replay_newcomer,
)

if TYPE_CHECKING:
    from fedgmm.core.paired import Estimate
    from fedgmm.data.dataset import FederatedDataset
    from fedgmm.model.metrics import Evaluation
    from fedgmm.model.model import FederatedModel

FloatArray = NDArray[np.float64]

# Titles of the series of the history, in the order of the panels.
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
    columns: Mapping[str, Sequence[int]] | None = None,
    baselines: Mapping[str, Evaluation | Mapping[Any, float]] | None = None,
    differences: Mapping[str, Estimate] | None = None,
    adaptations: Sequence[AdaptationRecord] = (),
    notes: Sequence[str] = (),
    examples: Sequence[ExampleGroup] = (),
) -> ReportContents:
    """Return all values of the page; the model itself does not change.

    Args:
        model: a fitted model that knows the clients of ``dataset``.
        dataset: the clients; accuracies and densities are those of its test rows.
        title: of the page.
        history: one dictionary per round, as training records it.
        configuration: settings of the run; names of nested settings are joined with dots.
        feature_names: of the columns the Gaussians see; the data set's own names by default.
        columns: columns of the inputs that belong together, by name; each on its own by default.
        baselines: method -> its evaluation on the same clients, or client -> accuracy.
        differences: method -> accuracy of the report's method minus that method's, with its test.
        adaptations: of clients that joined after training; without any, a known client joins again.
        notes: warnings and remarks for the reader.
        examples: images or texts to show; see ``fedgmm.report.examples``.
    """
    from fedgmm.methods.base import TITLES
    from fedgmm.nets.devices import environment

    absent: dict[str, str] = {}
    model = replace(model)  # only this copy is calibrated below
    evaluation = model.evaluate("test", dataset) if len(dataset.test) else None
    clients = _client_table(dataset, evaluation)
    reliability = densities = None
    if len(dataset.test):
        test = PredictedRows.of(model, dataset)
        reliability = (
            reliability_of(test.confidence, test.right)
            if model.target is None
            else reliability_of_intervals(model, dataset, test)
        )
        densities, clients = density_scatter(model, dataset, test, clients, absent)
    else:
        reason = "The data set has no test rows, so predictions could not be checked."
        absent |= {"accuracy": reason, "calibration": reason, "densities": reason}
    weights, clients = weight_map(model, dataset, clients, absent)
    if model.n_learners == 1 and not model.prediction.labels:
        # a flat curve would suggest that more rows might help
        absent["adaptation"] = (
            "There is nothing to adapt with one learner: all clients share its rule for the label, so "
            "a new client gets the same predictions with any weights."
        )
        adaptations, replay = (), None
    else:
        replay = None if adaptations else replay_newcomer(model, dataset, absent)
    return ReportContents(
        title=title,
        method=TITLES.get(model.algorithm, model.algorithm),
        classes=len(model.classes),
        components=0 if model.prediction.gaussians is None else model.n_components,
        learners=model.n_learners,
        clients=clients,
        convergence=convergence(history, absent),
        baselines={
            TITLES.get(name, name): _accuracy_by_client(result, dataset.names)
            for name, result in (baselines or {}).items()
        },
        differences={TITLES.get(name, name): one for name, one in (differences or {}).items()},
        metrics=None if evaluation is None else _test_metrics(evaluation),
        deciding=_deciding_columns(model, dataset, columns, absent),
        weights=weights,
        projection=projection_of(model, dataset, feature_names, absent),
        reliability=reliability,
        densities=densities,
        adaptations=tuple(adaptations) if replay is None else (replay,),
        replayed=replay is not None,
        configuration=flattened(configuration),
        environment=flattened(environment()),
        notes=tuple(note for note in notes if note != model.impersonal),
        examples=tuple(examples),
        impersonal=model.impersonal,
        absent=absent,
    )


def _client_table(dataset: FederatedDataset, evaluation: Evaluation | None) -> ClientTable:
    train, validation, test = (
        split.features.rows_per_client.cpu().numpy()
        for split in (dataset.train, dataset.validation, dataset.test)
    )
    numbers, known, intervals = dataset.target is not None, {}, {}
    if evaluation is not None:
        known = {**evaluation.metrics, "calibration_error": evaluation.calibration_error}
        intervals = evaluation.intervals

    def filled(values: Any, *shape: int) -> FloatArray:
        found = np.full((len(test), *shape), np.nan)
        found[test > 0] = values
        return found

    def score(name: str) -> FloatArray:
        return filled(known.get(name, np.nan))

    shown = "r2" if numbers else "accuracy"
    table = ClientTable(
        distinct_names(dataset.names),
        train + validation + test,
        train,
        score(shown),
        score("log_loss"),
        score("calibration_error"),
        interval=filled(intervals[shown], 2) if shown in intervals else None,
    )
    if numbers:
        return replace(table, rmse=score("rmse"))
    accuracy = math.nan if evaluation is None else evaluation.weighted_accuracy
    precision = score("average_precision")
    return replace(table, row_accuracy=accuracy, auc=score("auc"), average_precision=precision)


def _test_metrics(evaluation: Evaluation) -> TestMetrics:
    headline, leading, values = evaluation.headline(), evaluation.leading_metric, evaluation.pooled
    if leading == "rmse":
        return TestMetrics(headline, leading, values, {}, None, math.nan)
    positive = None if evaluation.positive is None else str(evaluation.positive)
    intervals, constant = evaluation.pooled_intervals, evaluation.constant_accuracy
    return TestMetrics(headline, leading, values, intervals, positive, constant)


def _deciding_columns(
    model: FederatedModel,
    dataset: FederatedDataset,
    columns: Mapping[str, Sequence[int]] | None,
    absent: dict[str, str],
) -> DecidingColumns | None:
    if len(model.input_shape) != 1 or not model.features_are_inputs:
        absent["columns"] = "The inputs are not a table of columns."
        return None
    if columns is not None and len(columns) == 1:
        absent["columns"] = (
            "All inputs are one column or one vector, so there is nothing to compare."
        )
        return None
    split = "test" if len(dataset.test) else "train"
    found = model.importance(split, dataset, columns=columns, repeats=3)
    shown = found.order[:MOST_COLUMNS]
    known = found.values[np.isfinite(found.values).all(1)][:, shown]
    if not len(known):
        absent["columns"] = "No client has enough rows to compare columns."
        return None
    return DecidingColumns(
        tuple(found.columns[column] for column in shown),
        known.mean(0),
        known.min(0),
        known.max(0),
        len(found.columns),
        found.meaning,
    )


def distinct_names(names: Sequence[Hashable]) -> tuple[str, ...]:
    """Return names as text; with quotes if two would look the same, such as ``1`` and ``"1"``."""
    plain = tuple(map(str, names))
    return plain if len(set(plain)) == len(plain) else tuple(map(repr, names))


def _accuracy_by_client(
    result: Evaluation | Mapping[Any, float], names: Sequence[Hashable]
) -> FloatArray:
    """Return the accuracy of each client, ``(C,)``; NaN where it is unknown."""
    if not isinstance(result, Mapping):
        result = dict(zip(result.clients, result.accuracy.tolist(), strict=True))
    return np.array([result.get(name, np.nan) for name in names], dtype=np.float64)


def convergence(
    history: Sequence[Mapping[str, float]], absent: dict[str, str]
) -> tuple[Series, ...]:
    """Return the values that were recorded over the rounds; without any, ``absent`` says so."""
    series = []
    for key, title in _SERIES.items():
        recorded = [
            (entry.get("round", float(number)), entry[key])
            for number, entry in enumerate(history, start=1)
            if np.isfinite(entry.get(key, np.nan))
        ]
        if recorded:
            rounds, values = np.array(recorded, dtype=np.float64).T
            series.append(Series(title, rounds, values))
    if not series:
        absent["convergence"] = "No values were recorded during training."
    return tuple(series)


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as one mapping from dotted names to texts."""
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
        return ", ".join(map(_as_text, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
