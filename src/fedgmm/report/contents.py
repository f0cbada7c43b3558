"""The values that a report shows: gathered in ``gathering.py``, drawn in ``charts.py`` and ``page.py``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedgmm.support.paired import Estimate, over_splits

if TYPE_CHECKING:
    from fedgmm.model.metrics import Evaluation

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
    """One entry per client, in the order of the data set."""

    names: tuple[str, ...]  # as shown
    rows: IntArray  # in all splits, ``(C,)``
    train_rows: IntArray  # ``(C,)``
    # on test rows, ``(C,)``; NaN for a client without test rows, here and below. A report of
    # numbers has ``R²`` here and wherever else accuracies are shown.
    accuracy: FloatArray
    log_loss: FloatArray  # ``(C,)``
    calibration_error: FloatArray  # ``(C,)``
    # the pair of component and learner with the largest weight; ``None`` without weights
    strongest: tuple[str, ...] | None = None
    share: FloatArray | None = None  # the weight of that pair, ``(C,)``
    # share of the test rows that are flagged as novel, ``(C,)``; ``None`` without flags
    novel_share: FloatArray | None = None
    # on test rows, ``(C,)``; ``None`` if it is not known, here and below
    auc: FloatArray | None = None
    average_precision: FloatArray | None = None  # ``(C,)``
    rmse: FloatArray | None = None  # of predicted numbers, ``(C,)``
    # 95 % interval of the accuracy, ``(C, 2)``; NaN where it is unknown
    interval: FloatArray | None = None


@dataclass(frozen=True)
class DecidingColumns:
    """The columns that matter most, the first one most of all."""

    names: tuple[str, ...]  # of the columns
    mean: FloatArray  # importance, mean over clients, ``(columns,)``
    least: FloatArray  # importance at the client where it is smallest, ``(columns,)``
    most: FloatArray  # importance at the client where it is largest, ``(columns,)``
    total: int  # number of columns, of which the arrays hold some
    meaning: str  # of the values, as part of a sentence


@dataclass(frozen=True)
class Series:
    """A value that was recorded after each round."""

    title: str  # of its panel
    rounds: FloatArray  # ``(R,)``
    values: FloatArray  # ``(R,)``


@dataclass(frozen=True)
class WeightMap:
    """Weights ``π_c`` of clients, similar clients next to each other."""

    clients: IntArray  # positions in the table, ``(S,)``
    pairs: tuple[str, ...]  # names of the pairs of component and learner
    values: FloatArray  # ``(S, pairs)``


@dataclass(frozen=True)
class Projection:
    """Gaussians and clients in two dimensions, in the coordinates of the model."""

    axes: FloatArray  # orthonormal directions of the plane, ``(d, 2)``
    means: FloatArray  # of the Gaussians, ``(M1, 2)``
    covariances: FloatArray  # of the Gaussians within the plane, ``(M1, 2, 2)``
    shares: FloatArray  # the federation's weight of each Gaussian, ``(M1,)``
    clients: FloatArray  # the mixture mean ``Σ_m1 π_c(m1) μ_m1`` of each client, ``(C, 2)``
    strongest: IntArray  # the Gaussian with the largest weight of each client, ``(C,)``
    captured: float  # share of the spread that lies in the plane, between 0 and 1
    separates: bool  # whether the means determined the plane; otherwise the largest variance did
    axis_titles: tuple[str, str]  # names of the columns that dominate each axis
    # columns whose missing values are most of what the Gaussians differ in; empty otherwise
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reliability:
    """Accuracy of predictions by their confidence, in bins that are 0.1 wide.

    For numbers: the share of rows that intervals hold, by the level of the intervals.
    """

    confidence: FloatArray  # mean of each bin that has rows, ``(B,)``
    accuracy: FloatArray  # share of right predictions, ``(B,)``
    counts: IntArray  # rows, ``(B,)``
    lower: FloatArray  # lower edge of each bin, ``(B,)``
    error: float  # mean gap between confidence and accuracy, over rows


@dataclass(frozen=True)
class DensityScatter:
    """``log P(x)`` and ``log P(y|x)`` of test rows under their own client's weights."""

    log_x: FloatArray  # ``(n,)``
    log_y: FloatArray  # ``(n,)``
    # flagged by ``log P(x)`` under the federation's weights, ``(n,)``; ``None`` without flags
    novel: NDArray[np.bool_] | None
    clients: IntArray  # positions in the table, ``(n,)``
    total: int  # number of test rows, of which the arrays hold a sample
    total_novel: int  # number of test rows that are flagged


@dataclass(frozen=True)
class AdaptationRecord:
    """A client that joined after training by learning its weights alone."""

    client: str  # its name
    # number of its rows that were used, one entry per trial; zero means the federation's own
    # weights
    rows: list[int]
    # on its test rows after each trial; ``None`` without labels to compare with
    accuracy: list[float] | None
    log_likelihoods: list[float]  # mean over its rows before each iteration of the last trial
    labelled: bool  # whether its labels were used


@dataclass(frozen=True)
class Example:
    """An image or a text of a client."""

    name: str  # its id at the site
    label: str  # its label as text; empty without one
    picture: str  # address of a thumbnail, with its bytes; empty for a text
    text: str  # beginning of the text, or the reason why it cannot be shown
    remark: str = ""  # shown below it


@dataclass(frozen=True)
class ExampleGroup:
    """Examples of a client, of a Gaussian or of a learner."""

    title: str  # of the group
    kind: str  # ``"client"``, ``"Gaussian"`` or ``"learner"``
    weights: Mapping[str, float]  # the largest weights, by the names of their pairs
    rows: Mapping[str, tuple[Example, ...]]  # examples, by the title of their row


@dataclass(frozen=True)
class ReportContents:
    """All values on the page; a part that does not apply is ``None`` or empty."""

    title: str  # of the page
    method: str  # the method's name as the paper writes it
    classes: int  # number of classes; zero for numbers
    components: int  # ``M1``; zero without Gaussians
    learners: int  # ``M2``, or the number of assigned learners
    clients: ClientTable  # one entry each
    convergence: tuple[Series, ...] = ()  # one series per panel
    # accuracy of the clients under other methods, ``(C,)`` each; NaN where unknown
    baselines: Mapping[str, FloatArray] = field(default_factory=dict)
    # accuracy of the report's method minus that of another, for each baseline; tested over
    # splits or rows by a comparison, otherwise over clients
    differences: Mapping[str, Estimate] = field(default_factory=dict)
    evaluation: Evaluation | None = None  # of all test rows
    deciding: DecidingColumns | None = None  # the columns that matter most for the predictions
    weights: WeightMap | None = None  # for the heat map
    # Gaussians and clients in a plane; its clients are those of the table
    projection: Projection | None = None
    reliability: Reliability | None = None  # of test rows
    densities: DensityScatter | None = None  # of test rows
    adaptations: tuple[AdaptationRecord, ...] = ()  # of clients that joined after training
    replayed: bool = False  # whether the adaptation is that of a known client which joined again
    configuration: Mapping[str, str] = field(default_factory=dict)  # settings of the run
    environment: Mapping[str, str] = field(default_factory=dict)  # versions and hardware
    notes: tuple[str, ...] = ()  # warnings and remarks
    # images or texts, if their owner wants them in the report
    examples: tuple[ExampleGroup, ...] = ()
    impersonal: str = ""  # says why all clients get the same predictions, if they do
    # section -> the reason why it has no chart
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


def percent(share: float, digits: int = 1) -> str:
    """Return a share as text; a dash if it is unknown."""
    return f"{share:.{digits}%}" if np.isfinite(share) else "–"
