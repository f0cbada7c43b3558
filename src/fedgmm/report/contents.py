"""What the report of a run shows, as plain values: gathered once, drawn elsewhere."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.report.projection import Projection, project

if TYPE_CHECKING:
    from fedgmm.data.dataset import FederatedDataset, LabelledRows
    from fedgmm.inference.metrics import Evaluation
    from fedgmm.inference.model import FederatedModel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

FALSE_ALARM_RATE = 0.05
MOST_POINTS = 3000
MOST_CLIENTS_IN_HEAT_MAP = 500
MOST_CLIENTS_IN_CHARTS = 1000

_CONFIDENCE_BINS = 10
_ROWS_OF_A_NEWCOMER = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_LOWEST_LOG_PROBABILITY = -700.0  # an impossible label; its logarithm would not be a number

# What a series of the history is called on the page, in the order of the panels.
_SERIES = {
    "log_likelihood": "Log-likelihood of the training rows",
    "validation_accuracy": "Accuracy on validation rows",
    "validation_log_likelihood": "Log-likelihood of validation labels",
}


@dataclass(frozen=True)
class ClientTable:
    """One entry a client, in the order of the data set.

    Attributes:
        names: as shown.
        rows: in all splits, ``(C,)``.
        train_rows: ``(C,)``.
        accuracy: on test rows, ``(C,)``; NaN for a client without any, here and below.
        log_loss: ``(C,)``.
        calibration_error: ``(C,)``.
        strongest: the pair of component and learner with the largest weight; ``None`` without weights.
        share: the weight of that pair, ``(C,)``.
        novel_share: share of the test rows that are flagged as novel, ``(C,)``; ``None`` without flags.
        row_accuracy: share of all test rows that were predicted correctly; NaN without any.
    """

    names: tuple[str, ...]
    rows: IntArray
    train_rows: IntArray
    accuracy: FloatArray
    log_loss: FloatArray
    calibration_error: FloatArray
    strongest: tuple[str, ...] | None = None
    share: FloatArray | None = None
    novel_share: FloatArray | None = None
    row_accuracy: float = math.nan


@dataclass(frozen=True)
class Series:
    """A number that was noted after each round.

    Attributes:
        title: what it is.
        rounds: ``(R,)``.
        values: ``(R,)``.
    """

    title: str
    rounds: FloatArray
    values: FloatArray


@dataclass(frozen=True)
class WeightMap:
    """Weights ``π_c`` of clients, similar clients beside each other.

    Attributes:
        clients: which clients of the table, ``(S,)``.
        pairs: names of the pairs of component and learner.
        values: ``(S, pairs)``.
    """

    clients: IntArray
    pairs: tuple[str, ...]
    values: FloatArray


@dataclass(frozen=True)
class Reliability:
    """How often predictions of a given confidence are right.

    Attributes:
        confidence: mean of each bin that has rows, ``(B,)``.
        accuracy: share that is right, ``(B,)``.
        counts: rows, ``(B,)``.
        lower: where each bin begins, ``(B,)``; a bin is 0.1 wide.
        error: mean gap between the two, over rows.
    """

    confidence: FloatArray
    accuracy: FloatArray
    counts: IntArray
    lower: FloatArray
    error: float


@dataclass(frozen=True)
class DensityScatter:
    """``log P(x)`` and ``log P(y|x)`` of test rows under their own client's weights.

    Attributes:
        log_x: ``(n,)``.
        log_y: ``(n,)``.
        novel: flagged by ``log P(x)`` under the federation's weights, ``(n,)``; ``None`` without flags.
        clients: which clients of the table, ``(n,)``.
        total: how many test rows there are.
        total_novel: how many of them are flagged.
    """

    log_x: FloatArray
    log_y: FloatArray
    novel: NDArray[np.bool_] | None
    clients: IntArray
    total: int
    total_novel: int


@dataclass(frozen=True)
class AdaptationRecord:
    """How a client joined by its weights alone.

    Attributes:
        client: its name.
        rows: how many of its rows were used, one entry a trial; zero is the federation's own weights.
        accuracy: on its test rows after each trial; ``None`` if there are no labels to compare with.
        log_likelihoods: mean over its rows before each iteration of the last trial.
        labelled: its labels were used.
    """

    client: str
    rows: list[int]
    accuracy: list[float] | None
    log_likelihoods: list[float]
    labelled: bool


@dataclass(frozen=True)
class ReportContents:
    """All that the page shows; a part that does not apply is ``None`` and ``absent`` says why.

    Attributes:
        title: of the page.
        method: the method's name as the paper writes it.
        classes: how many.
        components: ``M1``; zero without Gaussians.
        learners: ``M2``, or the number of assigned learners.
        clients: one entry each.
        convergence: one series a panel.
        rivals: accuracy of the clients under other methods, ``(C,)`` each; NaN where unknown.
        weights: for the heat map.
        projection: Gaussians and clients in a plane; its clients are those of the table.
        reliability: of test rows.
        densities: of test rows.
        adaptations: of unseen clients.
        replayed: the adaptation is that of a known client, played again.
        configuration: what the run was asked for.
        environment: what it ran on.
        notes: warnings and remarks.
        absent: part -> why it is not there.
    """

    title: str
    method: str
    classes: int
    components: int
    learners: int
    clients: ClientTable
    convergence: tuple[Series, ...] = ()
    rivals: Mapping[str, FloatArray] = field(default_factory=dict)
    weights: WeightMap | None = None
    projection: Projection | None = None
    reliability: Reliability | None = None
    densities: DensityScatter | None = None
    adaptations: tuple[AdaptationRecord, ...] = ()
    replayed: bool = False
    configuration: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def mean_accuracy(self) -> float:
        """Over clients that have test rows; NaN if there is none."""
        return mean_of(self.clients.accuracy)

    @property
    def worst_client(self) -> int | None:
        """Who has the lowest accuracy."""
        known = np.isfinite(self.clients.accuracy)
        return int(np.nanargmin(self.clients.accuracy)) if known.any() else None

    @property
    def best_rival(self) -> str | None:
        """The other method with the highest mean accuracy."""
        means = {name: mean_of(values) for name, values in self.rivals.items()}
        known = [name for name, mean in means.items() if np.isfinite(mean)]
        return max(known, key=lambda name: means[name], default=None)


def mean_of(values: FloatArray) -> float:
    """Mean of the numbers that are known; NaN if none is."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def gather(
    model: FederatedModel,
    dataset: FederatedDataset,
    *,
    title: str,
    history: list[dict[str, float]],
    configuration: Mapping[str, Any],
    feature_names: Sequence[str] | None = None,
    rivals: Mapping[str, Evaluation | Mapping[Any, float]] | None = None,
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
        rivals: method -> its evaluation on the same clients, or client -> accuracy.
        adaptations: of unseen clients; without any, a known client is played again.
        notes: warnings and remarks for the reader.
    """
    from fedgmm.experiments.results import TITLES, environment

    absent: dict[str, str] = {}
    own = replace(model)  # calibration and adaptation below stay in this copy
    method = TITLES.get(model.algorithm, model.algorithm)
    clients = _client_table(own, dataset)
    test = _TestRows.of(own, dataset) if len(dataset.test) else None
    reliability = densities = None
    if test is None:
        why = "The data set has no test rows, so predictions could not be checked."
        absent |= {"accuracy": why, "calibration": why, "densities": why}
    else:
        reliability = reliability_of(test.confidence, test.right)
        densities, clients = _densities(own, dataset, test, clients, absent)
    weights, clients = _weight_map(own, dataset, clients, absent)
    records, replayed = tuple(adaptations), False
    if not records:
        replay = _replay(own, dataset, absent)
        records, replayed = (replay,) if replay else (), replay is not None
    return ReportContents(
        title=title,
        method=method,
        classes=len(model.classes),
        components=0 if model.prediction.gaussians is None else model.n_components,
        learners=model.n_learners,
        clients=clients,
        convergence=convergence(history, absent),
        rivals={
            TITLES.get(name, name): _aligned(told, dataset.names)
            for name, told in (rivals or {}).items()
        },
        weights=weights,
        projection=_projection(own, dataset, feature_names, absent),
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


# ---------------------------------------------------------------------- test rows


@dataclass(frozen=True)
class _TestRows:
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
    def of(cls, model: FederatedModel, dataset: FederatedDataset) -> _TestRows:
        rows = dataset.test
        codes = rows.codes.cpu().numpy()
        # names may be tuples, of which NumPy would make a matrix
        names = np.fromiter(rows.names, dtype=object, count=len(rows.names))
        inputs, features = rows.inputs.cpu().numpy(), _features(model, rows)
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


def _features(model: FederatedModel, rows: LabelledRows) -> NDArray[Any] | None:
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


def _densities(
    model: FederatedModel,
    dataset: FederatedDataset,
    test: _TestRows,
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


def evenly(total: int, most: int) -> IntArray:
    """At most ``most`` positions out of ``total``, spread evenly, the same every time."""
    if total <= most:
        return np.arange(total)
    return np.linspace(0, total - 1, most).round().astype(np.int64)


# ---------------------------------------------------------------------- weights


def _mixes(model: FederatedModel) -> bool:
    """Whether clients have weights that say something: a single pair always has weight one."""
    weights = model.prediction.client_weights
    return weights is not None and weights.shape[1] > 1


def _own_weights(model: FederatedModel, dataset: FederatedDataset) -> FloatArray:
    """``π_c(m1, m2)`` of the data set's clients, ``(C, M1, M2)``."""
    position = {name: code for code, name in enumerate(model.names)}
    return np.asarray(model.client_weights[[position[name] for name in dataset.names]])


def pair_names(components: int, learners: int) -> tuple[str, ...]:
    """Names of ``(m1, m2)``, counted from one; what there is only one of is left out."""
    if components == 1:
        return tuple(f"L{m2 + 1}" for m2 in range(learners))
    if learners == 1:
        return tuple(f"G{m1 + 1}" for m1 in range(components))
    return tuple(f"G{m1 + 1}·L{m2 + 1}" for m1 in range(components) for m2 in range(learners))


def _weight_map(
    model: FederatedModel,
    dataset: FederatedDataset,
    clients: ClientTable,
    absent: dict[str, str],
) -> tuple[WeightMap | None, ClientTable]:
    """The heat map, and the table with each client's strongest pair."""
    if not _mixes(model):
        absent["weights"] = (
            "This method gives no client weights of its own: there is nothing to mix, "
            "or every client is assigned to one learner."
        )
        return None, clients
    weights = _own_weights(model, dataset)
    pairs = pair_names(*weights.shape[1:])
    flat = weights.reshape(len(weights), -1)
    strongest = flat.argmax(-1)
    clients = replace(clients, strongest=tuple(pairs[k] for k in strongest), share=flat.max(-1))
    shown = evenly(len(flat), MOST_CLIENTS_IN_HEAT_MAP)
    shown = shown[similar_beside_each_other(flat[shown])]
    return WeightMap(shown, pairs, flat[shown]), clients


def similar_beside_each_other(values: FloatArray) -> IntArray:
    """An order of the rows ``(n, k)`` in which similar ones are neighbours."""
    from scipy.cluster.hierarchy import leaves_list, linkage

    if len(values) < 3:
        return np.arange(len(values))
    tree = linkage(values, method="average", optimal_ordering=True)
    return np.asarray(leaves_list(tree), dtype=np.int64)


def _projection(
    model: FederatedModel,
    dataset: FederatedDataset,
    feature_names: Sequence[str] | None,
    absent: dict[str, str],
) -> Projection | None:
    gaussians = model.prediction.gaussians
    if gaussians is None:
        absent["projection"] = "This method has no Gaussians to show."
        return None
    means = gaussians.means.cpu().numpy()
    if means.shape[1] < 2:
        absent["projection"] = "The Gaussians see a single column, so there is no plane to show."
        return None
    if feature_names is None and model.features_are_inputs:
        feature_names = dataset.column_names
    if feature_names is not None and len(feature_names) != means.shape[1]:
        raise ValueError(
            f"feature_names has {len(feature_names)} names, but the Gaussians see "
            f"{means.shape[1]} columns; give one name a column."
        )
    return project(
        means,
        gaussians.covariances.cpu().numpy(),
        gaussians.covariance_type,
        model.weights.sum(-1),
        _own_weights(model, dataset).sum(-1),
        feature_names,
    )


# ---------------------------------------------------------------------- a client that comes later


def _replay(
    model: FederatedModel, dataset: FederatedDataset, absent: dict[str, str]
) -> AdaptationRecord | None:
    """A known client of usual size joins once more, with more and more of its training rows."""
    if not _mixes(model):
        absent["adaptation"] = (
            "This method has no mixture weights, and those are all that a new client would learn."
        )
        return None
    known = np.isin(dataset.classes, model.classes)
    sizes = dataset.train.features.rows_per_client.cpu().numpy()
    candidates = np.flatnonzero(dataset.test.features.rows_per_client.cpu().numpy() > 0)
    if not len(candidates):
        absent["adaptation"] = "No client has test rows on which a newcomer could be checked."
        return None
    by_size = candidates[np.argsort(sizes[candidates], kind="stable")]
    code = int(by_size[(len(by_size) - 1) // 2])
    name = dataset.names[code]
    train, test = dataset.train.client(code), dataset.test.client(code)
    labels, truth = (dataset.classes[rows.labels.cpu().numpy()] for rows in (train, test))
    inputs, features = train.inputs.cpu().numpy(), _features(model, train)
    # rows may be sorted by label: mix them, the same way every time
    order = np.random.default_rng(0).permutation(len(train))
    order = order[known[train.labels.cpu().numpy()[order]]]
    counts = sorted({min(n, len(order)) for n in (*_ROWS_OF_A_NEWCOMER, len(order))} - {0})
    visited = replace(model)  # the client's trained weights stay in the other copy

    def accuracy(client: Hashable | None) -> float:
        seen = _features(model, test)
        owners = np.fromiter([client] * len(test), dtype=object, count=len(test))
        predicted = visited.predict(test.inputs.cpu().numpy(), owners, features=seen)
        return float((predicted == truth).mean())

    accuracies, log_likelihoods = [accuracy(None)], list[float]()
    for count in counts:
        some = order[:count]
        own = None if features is None else features[some]
        joined = visited.adapt(name, inputs[some], labels[some], features=own)
        log_likelihoods = joined.log_likelihoods
        accuracies.append(accuracy(name))
    return AdaptationRecord(str(name), [0, *counts], accuracies, log_likelihoods, labelled=True)


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
