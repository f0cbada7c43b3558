"""Ranking of compared methods over one or several splits: intervals, paired tests, and ties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.methods.base import TITLES
from fedgmm.model.bootstrap import resample, resample_r2
from fedgmm.model.metrics import Evaluation, RegressionEvaluation
from fedgmm.runs.comparison import (
    LEARNER_TITLES,
    LEARNERS,
    Comparison,
    DataToCompare,
    Notify,
    compare,
)
from fedgmm.runs.folder import RunFolder, write_json
from fedgmm.support.paired import Estimate, over_resamples, over_splits
from fedgmm.wording import counted


@dataclass(frozen=True)
class Standing:
    """A method in a ranking."""

    algorithm: str  # name of the method
    # kind of learner -> number of splits in which validation rows chose it
    learners: dict[str, int]
    value: Estimate  # its metric, mean over splits; see :class:`Ranking`
    lead: Estimate  # its value minus that of the best method, paired
    by_learner: dict[str, float]  # mean value with each kind of learner
    summary: dict[str, float]  # metrics over all clients, means over splits
    rates: list[float | None]  # the chosen learning rate of each split; ``None`` for exact steps

    @property
    def title(self) -> str:
        """Name of the method and of its learner, such as "FedAvg (MLP)"."""
        kinds = [LEARNER_TITLES.get(kind, kind) for kind in self.learners]
        return f"{TITLES[self.algorithm]} ({' or '.join(kinds)})"


@dataclass(frozen=True)
class Ranking:
    """Methods ranked by a metric, with intervals and paired tests.

    The metric is the mean accuracy over clients. It is the average precision of all test rows together if
    there are two classes and one of them is rare, and their ``R²`` if labels are numbers.
    """

    seeds: tuple[int, ...]  # seed of each split
    splits: list[list[dict[str, Any]]]  # the record of the comparison on each split
    # method -> the metric under resamples of the test rows of the first split, ``(B,)``
    resampled: dict[str, NDArray[np.float64]]
    metric: str  # ``"mean_accuracy"``, ``"average_precision"`` or ``"r2"``
    test_per_training_row: float  # number of test rows over that of training rows
    pooled: dict[str, dict[str, float]]  # metrics of the models of ``POOLED``, means over splits

    @property
    def unit(self) -> str:
        """Sentence that says what the intervals mean."""
        if len(self.seeds) == 1:
            return (
                "Intervals (95 %) and ties: bootstrap over the test rows of each client. The split "
                "was not repeated, so chance in the split and in training is not included."
            )
        return (
            f"Intervals (95 %) and ties: {len(self.seeds)} splits, each tuned and trained again; t "
            f"with {counted(len(self.seeds) - 1, 'degree')} of freedom on one value per split, "
            "widened because splits overlap."
        )

    def _values(self, algorithm: str) -> NDArray[np.float64]:
        """Return a method's metric on each split, ``(S,)``."""
        return np.array([one[self.metric] for one in self._records(algorithm)])

    def _records(self, algorithm: str) -> list[dict[str, Any]]:
        return [one for split in self.splits for one in split if one["algorithm"] == algorithm]

    def value(self, first: str, second: str | None = None) -> Estimate:
        """Return the metric of a method, minus that of another on the same rows if there is one."""
        values = self._values(first) - (0.0 if second is None else self._values(second))
        if len(self.seeds) > 1:
            return over_splits(values, self.test_per_training_row)
        resampled = self.resampled[first] - (0.0 if second is None else self.resampled[second])
        return over_resamples(float(values[0]), resampled)

    @cached_property
    def standings(self) -> list[Standing]:
        """The methods in the order of their runs."""
        names = [one["algorithm"] for one in self.splits[0]]
        best = max(names, key=lambda name: self._values(name).mean())
        return [self._standing(name, best) for name in names]

    def _standing(self, algorithm: str, best: str) -> Standing:
        own = self._records(algorithm)
        every = [entry for one in own for entry in (one, *one.get("others", []))]
        seen = {entry["learner"] for entry in every}
        kinds = [kind for kind in LEARNERS if kind in seen] + sorted(seen.difference(LEARNERS))
        metrics = [name for name, value in own[0].items() if isinstance(value, float)]
        return Standing(
            algorithm,
            dict(Counter(one["learner"] for one in own).most_common()),
            self.value(algorithm),
            self.value(algorithm, best),
            {
                kind: float(np.mean([e[self.metric] for e in every if e["learner"] == kind]))
                for kind in kinds
            },
            {name: float(np.mean([one[name] for one in own])) for name in metrics if name != "lr"},
            [one["lr"] for one in own],
        )

    @property
    def best(self) -> Standing:
        """The method with the highest value."""
        return max(self.standings, key=lambda one: one.value.mean)

    @property
    def tied(self) -> list[Standing]:
        """Methods whose difference from the best is within noise, best first; with the best."""
        within = [one for one in self.standings if one.lead.within_noise]
        return sorted(within, key=lambda one: -one.value.mean)

    def headline(self) -> str:
        """Return the result in a sentence; a difference within noise is a tie."""
        if self.metric == "mean_accuracy":
            return self._verdict()
        if self.metric == "r2":
            return f"By R², the share of the variance that is explained: {self._verdict()}"
        rate = self.best.summary["base_rate"]
        return (
            f"By average precision (a constant guess reaches {100 * rate:.1f} %): {self._verdict()}"
        )

    def _verdict(self) -> str:
        tied, best = self.tied, self.best
        if len(self.standings) == 1:
            return f"{best.title} reaches {100 * best.value.mean:.1f} %."
        if len(tied) > 1:
            names = [f"{one.title} {100 * one.value.mean:.1f} %" for one in tied]
            return f"A tie: {', '.join(names[:-1])} and {names[-1]} differ by no more than noise."
        others = [one for one in self.standings if one is not best]
        second = max(others, key=lambda one: one.value.mean)
        low, high = -100 * second.lead.high, -100 * second.lead.low
        return (
            f"{best.title} is best with {100 * best.value.mean:.1f} %, "
            f"{-100 * second.lead.mean:.1f} points above {second.title} "
            f"(95 % interval {low:.1f} to {high:.1f})."
        )

    def record(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        first = {one["algorithm"]: one for one in self.splits[0]}
        names = list(first)
        methods = [
            {
                "algorithm": one.algorithm,
                "learner": next(iter(one.learners)),
                "learners": one.learners,
                **one.summary,
                "interval": [one.value.low, one.value.high],
                "tied_with_best": one.lead.within_noise,
                "by_learner": one.by_learner,
                "against": {
                    other: self.value(one.algorithm, other).record()
                    for other in names
                    if other != one.algorithm
                },
                "clients": first[one.algorithm]["clients"],
            }
            for one in self.standings
        ]
        return {
            "headline": self.headline(),
            "metric": self.metric,
            "intervals": self.unit,
            "best": self.best.algorithm,
            "tied": [one.algorithm for one in self.tied],
            "seeds": list(self.seeds),
            "methods": methods,
            "pooled": self.pooled,
            "splits": self.splits,
        }

    def write(self, folder: Path) -> Path:
        """Write ``comparison.json`` into a folder."""
        path = RunFolder(folder).comparison
        write_json(path, self.record())
        return path


def rank(comparisons: Iterable[Comparison], seeds: Sequence[int] = (0,)) -> Ranking:
    """Rank methods by comparisons of the same methods on several splits; models are not kept."""
    splits: list[list[dict[str, Any]]] = []
    pooled, ratios = [], []
    resampled: dict[str, NDArray[np.float64]] = {}
    metric = "mean_accuracy"
    for comparison in comparisons:
        if not splits:
            found = {one.algorithm: one.evaluation for one in comparison.contestants}
            leading = next(iter(found.values())).leading_metric
            metric = {"average_precision": leading, "rmse": "r2"}.get(leading, metric)
            resampled = {name: _resampled(one, metric) for name, one in found.items()}
        splits.append(comparison.record(clients=True))
        pooled.append({name: one.summary() for name, one in comparison.pooled.items()})
        ratios.append(comparison.test_per_training_row)
    means = {
        name: {key: float(np.mean([one[name][key] for one in pooled])) for key in pooled[0][name]}
        for name in pooled[0]
    }
    return Ranking(tuple(seeds), splits, resampled, metric, float(np.mean(ratios)), means)


def _resampled(evaluation: Evaluation, metric: str) -> NDArray[np.float64]:
    """Return the metric of a ranking under resamples of the test rows, ``(B,)``."""
    if isinstance(evaluation, RegressionEvaluation):
        return resample_r2(*evaluation.row_errors)
    assert evaluation.predicted is not None
    rare = metric == "average_precision"
    own, together = resample(evaluation.predicted.scored, ranks=rare or None)
    return together[metric][:, 0] if rare else own["accuracy"].mean(1)


def compare_splits(
    data: DataToCompare,
    algorithms: Sequence[str],
    seeds: int = 1,
    *,
    notify: Notify = lambda _: None,
    **options: Any,
) -> Ranking:
    """Compare methods on several splits of the same data, and rank them.

    Args:
        data: the rows; other splits are drawn by :attr:`DataToCompare.again`.
        algorithms: the methods.
        seeds: number of splits, not two: their interval would span twelve standard errors.
        notify: called with a line before each step.
        **options: of :func:`compare`.
    """
    if seeds == 2:
        raise ValueError(
            "Two splits are too few for intervals; use --seeds 3 or more, or --seeds 1, which resamples "
            "the test rows of one split."
        )
    first = data.options.seed
    numbers = range(first, first + seeds)

    def comparisons() -> Iterator[Comparison]:
        for seed in numbers:
            here = f"split {seed - first + 1} of {seeds}, " if seeds > 1 else ""
            own = data if seed == first else data.again(seed)
            yield compare(
                own.dataset,
                algorithms,
                options=own.options,
                notify=lambda line, here=here: notify(f"{here}{line}"),  # type: ignore[misc]
                **options,
            )

    return rank(comparisons(), numbers)
