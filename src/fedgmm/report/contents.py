"""What the report of a run shows, as plain values: gathered in one place, drawn in another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedgmm.report.projection import Projection

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

FALSE_ALARM_RATE = 0.05
MOST_POINTS = 3000
MOST_CLIENTS_IN_HEAT_MAP = 500
MOST_CLIENTS_IN_CHARTS = 1000


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
        baselines: accuracy of the clients under other methods, ``(C,)`` each; NaN where unknown.
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
    baselines: Mapping[str, FloatArray] = field(default_factory=dict)
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
    def best_baseline(self) -> str | None:
        """The other method with the highest mean accuracy."""
        means = {name: mean_of(values) for name, values in self.baselines.items()}
        known = [name for name, mean in means.items() if np.isfinite(mean)]
        return max(known, key=lambda name: means[name], default=None)


def mean_of(values: FloatArray) -> float:
    """Mean of the numbers that are known; NaN if none is."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def evenly(total: int, most: int) -> IntArray:
    """At most ``most`` positions out of ``total``, spread evenly, the same every time."""
    if total <= most:
        return np.arange(total)
    return np.linspace(0, total - 1, most).round().astype(np.int64)
