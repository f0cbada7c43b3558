"""The values that a report shows: gathered in ``gathering.py``, drawn in ``charts.py`` and ``page.py``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedgmm.core.paired import Estimate, over_splits

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

FALSE_ALARM_RATE = 0.05
MOST_POINTS = 3000
MOST_CLIENTS_IN_HEAT_MAP = 500
MOST_CLIENTS_IN_CHARTS = 1000
MOST_COLUMNS = 20
FEW_CLIENTS = 10
"""With fewer clients, quantiles and tests over clients mean nothing and are left out."""


@dataclass(frozen=True)
class ClientTable:
    """One entry per client, in the order of the data set.

    Attributes:
        names: as shown.
        rows: in all splits, ``(C,)``.
        train_rows: ``(C,)``.
        accuracy: on test rows, ``(C,)``; NaN for a client without test rows, here and below. A report of
            numbers has ``R²`` here and wherever else accuracies are shown.
        log_loss: ``(C,)``.
        calibration_error: ``(C,)``.
        strongest: the pair of component and learner with the largest weight; ``None`` without weights.
        share: the weight of that pair, ``(C,)``.
        novel_share: share of the test rows that are flagged as novel, ``(C,)``; ``None`` without flags.
        row_accuracy: share of all test rows that were predicted correctly; NaN without test rows.
        auc: on test rows, ``(C,)``; ``None`` if it is not known, here and below.
        average_precision: ``(C,)``.
        rmse: of predicted numbers, ``(C,)``.
        interval: 95 % interval of the accuracy, ``(C, 2)``; NaN where it is unknown.
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
    auc: FloatArray | None = None
    average_precision: FloatArray | None = None
    rmse: FloatArray | None = None
    interval: FloatArray | None = None


@dataclass(frozen=True)
class TestMetrics:
    """Metrics of all test rows together.

    Attributes:
        headline: a sentence with the main metric.
        leading: name of the main metric: ``"accuracy"``, ``"average_precision"`` if a class is rare, or
            ``"rmse"`` of numbers.
        values: metric -> its value.
        intervals: metric -> its 95 % interval, where there is one.
        positive: the positive class of two; ``None`` with several classes.
        constant_accuracy: mean accuracy of guessing each client's most frequent class.
    """

    __test__ = False  # pytest would collect it

    headline: str
    leading: str
    values: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    positive: str | None
    constant_accuracy: float


@dataclass(frozen=True)
class DecidingColumns:
    """The columns that matter most, the first one most of all.

    Attributes:
        names: of the columns.
        mean: importance, mean over clients, ``(columns,)``.
        least: importance at the client where it is smallest, ``(columns,)``.
        most: importance at the client where it is largest, ``(columns,)``.
        total: number of columns, of which the arrays hold some.
        meaning: of the values, as part of a sentence.
    """

    names: tuple[str, ...]
    mean: FloatArray
    least: FloatArray
    most: FloatArray
    total: int
    meaning: str


@dataclass(frozen=True)
class Series:
    """A value that was recorded after each round.

    Attributes:
        title: of its panel.
        rounds: ``(R,)``.
        values: ``(R,)``.
    """

    title: str
    rounds: FloatArray
    values: FloatArray


@dataclass(frozen=True)
class WeightMap:
    """Weights ``π_c`` of clients, similar clients next to each other.

    Attributes:
        clients: positions in the table, ``(S,)``.
        pairs: names of the pairs of component and learner.
        values: ``(S, pairs)``.
    """

    clients: IntArray
    pairs: tuple[str, ...]
    values: FloatArray


@dataclass(frozen=True)
class Projection:
    """Gaussians and clients in two dimensions, in the coordinates of the model.

    Attributes:
        axes: orthonormal directions of the plane, ``(d, 2)``.
        means: of the Gaussians, ``(M1, 2)``.
        covariances: of the Gaussians within the plane, ``(M1, 2, 2)``.
        shares: the federation's weight of each Gaussian, ``(M1,)``.
        clients: the mixture mean ``Σ_m1 π_c(m1) μ_m1`` of each client, ``(C, 2)``.
        strongest: the Gaussian with the largest weight of each client, ``(C,)``.
        captured: share of the spread that lies in the plane, between 0 and 1.
        separates: whether the means determined the plane; otherwise the largest variance did.
        axis_titles: names of the columns that dominate each axis.
        missing: columns whose missing values are most of what the Gaussians differ in; empty otherwise.
    """

    axes: FloatArray
    means: FloatArray
    covariances: FloatArray
    shares: FloatArray
    clients: FloatArray
    strongest: IntArray
    captured: float
    separates: bool
    axis_titles: tuple[str, str]
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reliability:
    """Accuracy of predictions by their confidence, in bins that are 0.1 wide.

    For numbers: the share of rows that intervals hold, by the level of the intervals.

    Attributes:
        confidence: mean of each bin that has rows, ``(B,)``.
        accuracy: share of right predictions, ``(B,)``.
        counts: rows, ``(B,)``.
        lower: lower edge of each bin, ``(B,)``.
        error: mean gap between confidence and accuracy, over rows.
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
        clients: positions in the table, ``(n,)``.
        total: number of test rows, of which the arrays hold a sample.
        total_novel: number of test rows that are flagged.
    """

    log_x: FloatArray
    log_y: FloatArray
    novel: NDArray[np.bool_] | None
    clients: IntArray
    total: int
    total_novel: int


@dataclass(frozen=True)
class AdaptationRecord:
    """A client that joined after training by learning its weights alone.

    Attributes:
        client: its name.
        rows: number of its rows that were used, one entry per trial; zero means the federation's
            own weights.
        accuracy: on its test rows after each trial; ``None`` without labels to compare with.
        log_likelihoods: mean over its rows before each iteration of the last trial.
        labelled: whether its labels were used.
    """

    client: str
    rows: list[int]
    accuracy: list[float] | None
    log_likelihoods: list[float]
    labelled: bool


@dataclass(frozen=True)
class Example:
    """An image or a text of a client.

    Attributes:
        name: its id at the site.
        label: its label as text; empty without one.
        picture: address of a thumbnail, with its bytes; empty for a text.
        text: beginning of the text, or the reason why it cannot be shown.
        remark: shown below it.
    """

    name: str
    label: str
    picture: str
    text: str
    remark: str = ""


@dataclass(frozen=True)
class ExampleGroup:
    """Examples of a client, of a Gaussian or of a learner.

    Attributes:
        title: of the group.
        kind: ``"client"``, ``"Gaussian"`` or ``"learner"``.
        weights: the largest weights, by the names of their pairs.
        rows: examples, by the title of their row.
    """

    title: str
    kind: str
    weights: Mapping[str, float]
    rows: Mapping[str, tuple[Example, ...]]


@dataclass(frozen=True)
class ReportContents:
    """All values on the page; a part that does not apply is ``None`` or empty.

    Attributes:
        title: of the page.
        method: the method's name as the paper writes it.
        classes: number of classes; zero for numbers.
        components: ``M1``; zero without Gaussians.
        learners: ``M2``, or the number of assigned learners.
        clients: one entry each.
        convergence: one series per panel.
        baselines: accuracy of the clients under other methods, ``(C,)`` each; NaN where unknown.
        differences: accuracy of the report's method minus that of another, for each baseline; tested
            over splits or rows by a comparison, otherwise over clients.
        metrics: of all test rows together.
        deciding: the columns that matter most for the predictions.
        weights: for the heat map.
        projection: Gaussians and clients in a plane; its clients are those of the table.
        reliability: of test rows.
        densities: of test rows.
        adaptations: of clients that joined after training.
        replayed: whether the adaptation is that of a known client which joined again.
        configuration: settings of the run.
        environment: versions and hardware.
        notes: warnings and remarks.
        examples: images or texts, if their owner wants them in the report.
        impersonal: says why all clients get the same predictions, if they do.
        absent: section -> the reason why it has no chart.
    """

    title: str
    method: str
    classes: int
    components: int
    learners: int
    clients: ClientTable
    convergence: tuple[Series, ...] = ()
    baselines: Mapping[str, FloatArray] = field(default_factory=dict)
    differences: Mapping[str, Estimate] = field(default_factory=dict)
    metrics: TestMetrics | None = None
    deciding: DecidingColumns | None = None
    weights: WeightMap | None = None
    projection: Projection | None = None
    reliability: Reliability | None = None
    densities: DensityScatter | None = None
    adaptations: tuple[AdaptationRecord, ...] = ()
    replayed: bool = False
    configuration: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    examples: tuple[ExampleGroup, ...] = ()
    impersonal: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def numbers(self) -> bool:
        """Whether the model predicts numbers."""
        return self.classes == 0

    @property
    def mean_accuracy(self) -> float:
        """Mean over clients that have test rows; NaN without any."""
        return mean_of(self.clients.accuracy)

    @property
    def worst_client(self) -> int | None:
        """Position of the client with the lowest accuracy; ``None`` without test rows."""
        known = np.isfinite(self.clients.accuracy)
        return int(np.nanargmin(self.clients.accuracy)) if known.any() else None

    @property
    def best_baseline(self) -> str | None:
        """Name of the other method with the highest mean accuracy; ``None`` without any."""
        ahead = {name: self.lead(name).mean for name in self.baselines}
        known = [name for name, lead in ahead.items() if np.isfinite(lead)]
        return min(known, key=lambda name: ahead[name], default=None)

    def lead(self, baseline: str) -> Estimate:
        """Return the accuracy of the report's method minus that of a baseline.

        Its interval is NaN if no comparison tested it and there are too few clients for a test.
        """
        if baseline in self.differences:
            return self.differences[baseline]
        values = self.clients.accuracy - self.baselines[baseline]
        known = values[np.isfinite(values)]
        if len(known) < FEW_CLIENTS:
            return Estimate(mean_of(known), math.nan, math.nan, 1.0)
        return over_splits(known)


def mean_of(values: FloatArray) -> float:
    """Return the mean of the finite values; NaN without any."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def evenly(total: int, most: int) -> IntArray:
    """Return at most ``most`` positions out of ``total``, spread evenly and always the same."""
    if total <= most:
        return np.arange(total)
    return np.linspace(0, total - 1, most).round().astype(np.int64)
