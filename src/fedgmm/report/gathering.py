"""Gather the contents of a report from a fitted model and its clients."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.report.contents import (
    FALSE_ALARM_RATE,
    MOST_CLIENTS_IN_HEAT_MAP,
    MOST_COLUMNS,
    MOST_POINTS,
    AdaptationRecord,
    ClientTable,
    DecidingColumns,
    DensityScatter,
    ExampleGroup,
    FloatArray,
    IntArray,
    Projection,
    Reliability,
    ReportContents,
    Series,
    WeightMap,
    evenly,
)
from fedgmm.wording import counted

if TYPE_CHECKING:
    from fedgmm.data.dataset import FederatedDataset, LabelledRows
    from fedgmm.model.metrics import Evaluation
    from fedgmm.model.model import FederatedModel
    from fedgmm.support.paired import Estimate

# Titles of the series of the history, in the order of the panels.
_SERIES = {
    "log_likelihood": "Log-likelihood of the training rows",
    "validation_accuracy": "Accuracy on validation rows",
    "validation_log_likelihood": "Log-likelihood of validation labels",
}
_CONFIDENCE_BINS = 10
_ROWS_OF_A_NEWCOMER = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_NAMED_PER_AXIS = 3
_MISSING = "=(missing)"  # ends the name of a column that marks missing values


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

    found = _Gathering(replace(model), dataset)  # only this copy is calibrated
    weights, densities = found.weight_map(), found.densities()  # both complete the table of clients
    if model.n_learners == 1 and not model.prediction.labels:
        # a flat curve would suggest that more rows might help
        found.absent["adaptation"] = (
            "There is nothing to adapt with one learner: all clients share its rule for the label, so "
            "a new client gets the same predictions with any weights."
        )
        adaptations, replay = (), None
    else:
        replay = None if adaptations else found.replayed_newcomer()
    return ReportContents(
        title=title,
        method=TITLES.get(model.algorithm, model.algorithm),
        classes=len(model.classes),
        components=0 if model.prediction.gaussians is None else model.n_components,
        learners=model.n_learners,
        clients=found.clients,
        convergence=convergence(history, found.absent),
        baselines={
            TITLES.get(name, name): _accuracy_by_client(result, dataset.names)
            for name, result in (baselines or {}).items()
        },
        differences={TITLES.get(name, name): one for name, one in (differences or {}).items()},
        evaluation=found.evaluation,
        deciding=found.deciding_columns(columns),
        weights=weights,
        projection=found.projection(feature_names),
        reliability=found.reliability(),
        densities=densities,
        adaptations=tuple(adaptations) if replay is None else (replay,),
        replayed=replay is not None,
        configuration=flattened(configuration),
        environment=flattened(environment()),
        notes=tuple(note for note in notes if note != model.impersonal),
        examples=tuple(examples),
        impersonal=model.impersonal,
        absent=found.absent,
    )


class _Gathering:
    """The parts of a report that come from the model and its clients.

    Attributes:
        clients: the table, which :meth:`weight_map` and :meth:`densities` complete.
        absent: section -> the reason why it has no chart.
    """

    def __init__(self, model: FederatedModel, dataset: FederatedDataset) -> None:
        self.model, self.dataset, self.absent = model, dataset, dict[str, str]()
        self.evaluation = model.evaluate("test", dataset) if len(dataset.test) else None
        self.clients = self._client_table()
        rows = dataset.test
        self.inputs = rows.inputs.cpu().numpy()
        self.features = features_of(model, rows) if len(rows) else None
        self.labels, self.codes = rows.labels.cpu().numpy(), rows.codes.cpu().numpy()
        self.owners = rows.owners  # the client of each test row, as the model knows it
        if self.evaluation is None:
            reason = "The data set has no test rows, so predictions could not be checked."
            self.absent |= {"accuracy": reason, "calibration": reason, "densities": reason}

    def _client_table(self) -> ClientTable:
        """Return what the evaluation says about every client."""
        dataset, evaluation = self.dataset, self.evaluation
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
        return ClientTable(
            distinct_names(dataset.names),
            train + validation + test,
            train,
            score(shown),
            score("log_loss"),
            score("calibration_error"),
            auc=None if numbers else score("auc"),
            average_precision=None if numbers else score("average_precision"),
            rmse=score("rmse") if numbers else None,
            interval=filled(intervals[shown], 2) if shown in intervals else None,
        )

    def deciding_columns(
        self, columns: Mapping[str, Sequence[int]] | None
    ) -> DecidingColumns | None:
        """Return the columns that matter most; without ``columns`` each stands for itself."""
        model, dataset, absent = self.model, self.dataset, self.absent
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

    def reliability(self) -> Reliability | None:
        """Return accuracy by confidence, or the share of numbers in intervals of 10 to 90 percent."""
        from fedgmm.model.metrics import interval_of  # loads torch

        if self.evaluation is None:
            return None
        if (seen := self.evaluation.predicted) is not None:
            log_p = seen.log_probabilities
            return reliability_of(np.exp(log_p.max(-1)), log_p.argmax(-1) == seen.labels)
        found = self.model.predict_distribution(self.inputs, self.owners, features=self.features)
        levels = np.arange(1, _CONFIDENCE_BINS) / _CONFIDENCE_BINS
        ends = [interval_of(found, level).T for level in levels.tolist()]
        held = np.array(
            [((low <= self.labels) & (self.labels <= high)).mean() for low, high in ends]
        )
        counts = np.full(len(levels), len(self.labels))
        return Reliability(levels, held, counts, levels, float(np.abs(levels - held).mean()))

    def densities(self) -> DensityScatter | None:
        """Return the values of the scatter plot, and complete the table with shares of novel rows.

        A model without calibration is calibrated on the validation rows, which changes the model.
        """
        from fedgmm.model.metrics import row_losses

        if self.evaluation is None:
            return None
        model, rows = self.model, self.inputs
        more: dict[str, Any] = {"features": self.features}
        if model.prediction.gaussians is None:
            self.absent["densities"] = (
                "This method does not model the inputs, so there is no log P(x) and no row can be "
                "flagged as novel."
            )
            return None
        if (seen := self.evaluation.predicted) is not None:
            log_y = -row_losses(seen.log_probabilities, seen.labels)
        else:
            log_y = model.log_conditional(rows, self.labels, self.owners, **more)
        log_x, novel = model.score_samples(rows, self.owners, **more), None
        if not model.calibration and len(self.dataset.validation):
            model.calibrate(self.dataset)
        if "x" in model.calibration:
            novel = model.novelty(rows, score="x", false_alarm_rate=FALSE_ALARM_RATE, **more).novel
            sizes = np.bincount(self.codes, minlength=len(self.clients.names))
            flagged = np.bincount(self.codes, weights=novel, minlength=len(self.clients.names))
            share = np.where(sizes > 0, flagged / np.maximum(sizes, 1), np.nan)
            self.clients = replace(self.clients, novel_share=share)
        shown = evenly(len(log_x), MOST_POINTS)
        return DensityScatter(
            log_x[shown],
            log_y[shown],
            None if novel is None else novel[shown],
            self.codes[shown],
            len(log_x),
            0 if novel is None else int(novel.sum()),
        )

    def replayed_newcomer(self) -> AdaptationRecord | None:
        """Let the client of median size join again, with more and more of its training rows."""
        model, dataset, absent = self.model, self.dataset, self.absent
        if not self._has_mixture_weights:
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
            if model.target is None:
                return float((predicted == truth).mean())
            spread = ((truth - truth.mean()) ** 2).sum()  # R² is undefined if all numbers are equal
            return (
                float(1.0 - ((truth - predicted) ** 2).sum() / spread) if spread > 0 else math.nan
            )

        accuracies, log_likelihoods = [accuracy(None)], list[float]()
        for count in counts:
            some = order[:count]
            seen = None if features is None else features[some]
            log_likelihoods = copy.adapt(
                name, inputs[some], labels[some], features=seen
            ).log_likelihoods
            accuracies.append(accuracy(name))
        return AdaptationRecord(str(name), [0, *counts], accuracies, log_likelihoods, labelled=True)

    @property
    def _has_mixture_weights(self) -> bool:
        """Whether clients mix several pairs; the weight of a single pair is always one."""
        weights = self.model.prediction.client_weights
        return weights is not None and weights.shape[1] > 1

    @property
    def _weights(self) -> FloatArray:
        """``π_c(m1, m2)`` of the data set's clients, ``(C, M1, M2)``."""
        position = {name: code for code, name in enumerate(self.model.names)}
        return np.asarray(
            self.model.client_weights[[position[name] for name in self.dataset.names]]
        )

    def weight_map(self) -> WeightMap | None:
        """Return the heat map, and complete the table with each client's strongest pair."""
        if not self._has_mixture_weights:
            self.absent["weights"] = (
                "Clients have no mixture weights under this method: there is a single learner, or each "
                "client is assigned to one."
            )
            return None
        weights = self._weights
        pairs = pair_names(*weights.shape[1:])
        flat = weights.reshape(len(weights), -1)
        strongest = tuple(pairs[pair] for pair in flat.argmax(-1))
        self.clients = replace(self.clients, strongest=strongest, share=flat.max(-1))
        shown = evenly(len(flat), MOST_CLIENTS_IN_HEAT_MAP)
        shown = shown[order_by_similarity(flat[shown])]
        return WeightMap(shown, pairs, flat[shown])

    def projection(self, feature_names: Sequence[str] | None) -> Projection | None:
        """Return Gaussians and clients in a plane; ``None`` if the model has no such plane."""
        model, dataset, absent = self.model, self.dataset, self.absent
        gaussians = model.prediction.gaussians
        if gaussians is None:
            absent["projection"] = "This method has no Gaussians to show."
            return None
        means = gaussians.means.cpu().numpy()
        if means.shape[1] < 2:
            absent["projection"] = (
                "The Gaussians see a single column, so there is no plane to show."
            )
            return None
        if model.projection is not None:
            known = dataset.column_names or [f"x{j}" for j in range(model.projection.mean.shape[0])]
            beside = model.projection.components[model.options["pca"] :].argmax(1).tolist()
            feature_names = [
                f"component {j + 1} of the vectors" for j in range(model.options["pca"])
            ]
            feature_names += [known[column] for column in beside]
        elif feature_names is None and model.features_are_inputs:
            feature_names = dataset.column_names
        if feature_names is not None and len(feature_names) != means.shape[1]:
            raise ValueError(
                f"feature_names has {counted(len(feature_names), 'name')}, but the Gaussians see "
                f"{counted(means.shape[1], 'column')}; give one name per column."
            )
        return project(
            means,
            gaussians.covariances.cpu().numpy(),
            gaussians.covariance_type,
            model.weights.sum(-1),
            self._weights.sum(-1),
            feature_names,
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
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_as_text, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def features_of(model: FederatedModel, rows: LabelledRows) -> NDArray[Any] | None:
    """Return the columns of the Gaussians; ``None`` if they are the inputs or are not needed."""
    if rows.features_are_inputs or model.prediction.gaussians is None:
        return None
    return np.concatenate([chunk.cpu().numpy() for chunk in rows.features.chunks])


def reliability_of(confidence: FloatArray, right: NDArray[np.bool_]) -> Reliability:
    """Compare confidence and accuracy of predictions ``(N,)`` in bins of equal width."""
    bins = np.minimum((confidence * _CONFIDENCE_BINS).astype(np.int64), _CONFIDENCE_BINS - 1)
    filled, place, counts = np.unique(bins, return_inverse=True, return_counts=True)
    mean_confidence = np.bincount(place, weights=confidence) / counts
    accuracy = np.bincount(place, weights=right) / counts
    error = float(np.average(np.abs(mean_confidence - accuracy), weights=counts))
    return Reliability(mean_confidence, accuracy, counts, filled / _CONFIDENCE_BINS, error)


def pair_names(components: int, learners: int) -> tuple[str, ...]:
    """Return names of all ``(m1, m2)``, counted from one; a single component or learner is omitted."""
    if components == 1:
        return tuple(f"L{m2 + 1}" for m2 in range(learners))
    if learners == 1:
        return tuple(f"G{m1 + 1}" for m1 in range(components))
    return tuple(f"G{m1 + 1}·L{m2 + 1}" for m1 in range(components) for m2 in range(learners))


def order_by_similarity(values: FloatArray) -> IntArray:
    """Return an order of the rows ``(n, k)`` in which similar rows are neighbours, ``(n,)``."""
    from scipy.cluster.hierarchy import leaves_list, linkage

    if len(values) < 3:
        return np.arange(len(values))
    tree = linkage(values, method="average", optimal_ordering=True)
    return np.asarray(leaves_list(tree), dtype=np.int64)


# ---------------------------------------------------------------------- the plane of the Gaussians


def project(
    means: FloatArray,
    covariances: FloatArray,
    covariance_type: str,
    shares: FloatArray,
    client_shares: FloatArray,
    feature_names: Sequence[str] | None = None,
) -> Projection:
    """Project Gaussians and clients onto the plane in which the means differ most.

    If the means ``(M1, d)`` span only a line or a point, directions of the largest variance complete the
    plane. ``shares`` ``(M1,)`` are the federation's, and ``client_shares`` ``(C, M1)`` those of clients.
    The ``feature_names`` of the ``d`` columns are for the titles of the axes.
    """
    shares = shares / shares.sum()
    centre = shares @ means
    deviations = (means - centre) * np.sqrt(shares)[:, None]
    _, spreads, directions = np.linalg.svd(deviations, full_matrices=False)
    rank = int((spreads > 1e-9 * (1.0 + np.abs(means).max())).sum())
    axes = directions[: min(rank, 2)].T

    def matrix(component: int) -> FloatArray:  # one at a time, because they may be large
        own = covariances if covariance_type == "tied" else covariances[component]
        return own if own.ndim == 2 else np.diag(np.broadcast_to(own, means.shape[1]))

    within = np.asarray(sum(share * matrix(m) for m, share in enumerate(shares)))  # Σ_m π(m) Σ_m
    if rank < 2:
        axes = np.hstack([axes, _widest_directions(within, axes)[:, : 2 - rank]])
    # An axis and its mirror image are equivalent: make the largest entry positive.
    largest = axes[np.abs(axes).argmax(0), [0, 1]]
    axes = np.asarray(axes * np.where(largest < 0, -1.0, 1.0))
    spread = deviations.T @ deviations if rank else within
    captured = np.trace(axes.T @ spread @ axes) / max(float(np.trace(spread)), 1e-300)
    first, second = (_axis_title(axes[:, k], k + 1, feature_names) for k in (0, 1))
    of_missing = [j for j, name in enumerate(feature_names or ()) if name.endswith(_MISSING)]
    between = np.square(deviations).sum(0)  # how much each column separates the means
    follows = rank > 0 and between[of_missing].sum() > between.sum() / 2
    largest_first = sorted(of_missing, key=lambda j: -between[j])[
        : _NAMED_PER_AXIS if follows else 0
    ]
    return Projection(
        axes=axes,
        means=(means - centre) @ axes,
        covariances=np.stack([axes.T @ matrix(m) @ axes for m in range(len(means))]),
        shares=shares,
        clients=(client_shares @ means - centre) @ axes,
        strongest=client_shares.argmax(-1),
        captured=float(min(captured, 1.0)),
        separates=rank > 0,
        axis_titles=(first, second),
        missing=tuple((feature_names or ())[j].removesuffix(_MISSING) for j in largest_first),
    )


def _widest_directions(covariance: FloatArray, taken: FloatArray) -> FloatArray:
    """Return directions orthogonal to ``taken`` ``(d, k)``, those of the largest variance first."""
    others = np.eye(len(covariance)) - taken @ taken.T
    values, vectors = np.linalg.eigh(others @ covariance @ others)
    # A taken direction and a constant column both have variance zero here: put the taken ones last.
    order = np.argsort(-(values - np.square(taken.T @ vectors).sum(0)))
    return np.asarray(vectors[:, order])


def _axis_title(axis: FloatArray, number: int, feature_names: Sequence[str] | None) -> str:
    if feature_names is None:
        return f"direction {number}"
    strongest = np.argsort(-np.abs(axis))[:_NAMED_PER_AXIS]
    named = [k for k in strongest if abs(axis[k]) > 0.3 * abs(axis[strongest[0]])]
    names = {k: feature_names[k].replace(_MISSING, " missing") for k in named}
    more = ", ".join(names[k] for k in named if axis[k] > 0)
    less = ", ".join(names[k] for k in named if axis[k] < 0)
    return " · ".join(f"{word} {text}" for word, text in (("more", more), ("less", less)) if text)
