"""Metrics of weighted rows, for all clients at once, and their bootstrap intervals.

scikit-learn computes one metric of one client at a time. A bootstrap needs every metric of every client
under hundreds of weights, so the metrics are written here over two leading axes: resamples and groups of
rows (the clients, or all rows together). Only ranks of scores need rows; all other metrics follow from sums
over the rows of each client and class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.support.scratch import counts_of, gathered, ordered, row_blocks, where

FloatArray = NDArray[Any]  # float64; float32 within a bootstrap
IntArray = NDArray[np.int64]
Values = dict[str, FloatArray]

RESAMPLES = 1000
"""Largest number of resamples; there are fewer for many rows, where intervals are narrow anyway."""

_FEWEST_RESAMPLES = 200
_MOST_WORK = 20_000_000  # resampled rows, about half a second
_MOST_RANKED = 40_000_000  # above, there are no intervals of metrics that need ranks
_MOST_PLANNED = 250_000  # rows whose ranks are planned; above, groups are sorted one by one
_AT_ONCE = 100_000  # numbers of a block, which stays in the cache
_LEVEL = 0.95
Rankings = list[tuple["_Ranking", ...]]
Parts = Iterable[tuple[slice, NDArray[Any]]]
"""Weights ``(B, n)`` of the rows in ``B`` samples, in one or more runs of the rows."""


@dataclass(frozen=True)
class ScoredRows:
    """Predictions of rows, sorted by client and class."""

    codes: IntArray  # client of each row, sorted; every client has rows, ``(n,)``
    labels: IntArray  # true class of each row, sorted within each client, ``(n,)``
    right: NDArray[np.bool_]  # whether the predicted class is the true one, ``(n,)``
    loss: FloatArray  # ``-log P(y|x)``, ``(n,)``
    brier: FloatArray  # squared error of the probabilities, ``(n,)``
    scores: FloatArray  # log-probabilities of the classes whose ranks are measured, ``(n, R)``
    ranked: tuple[int, ...]  # the class of each of these columns, ``(R,)``
    positive: int | None  # the positive class if there are two classes

    def __len__(self) -> int:
        return len(self.codes)

    @cached_property
    def known(self) -> IntArray:
        """The classes that rows have, sorted, ``(K,)``."""
        blocks = row_blocks(len(self), _MOST_PLANNED)
        return np.unique(np.concatenate([np.unique(self.labels[place]) for place in blocks]))

    def at(self, place: slice) -> ScoredRows:
        """Return some of the rows."""
        names = ("codes", "labels", "right", "loss", "brier", "scores")
        return replace(self, **{name: getattr(self, name)[place] for name in names})


# ---------------------------------------------------------------------- metrics of weighted rows


def metrics_of(rows: ScoredRows) -> tuple[Values, Values]:
    """Return the metrics of each client, ``(C,)`` each, and of all rows together, ``(1,)`` each."""
    large = len(rows) > _MOST_PLANNED
    own, pooled = _metrics(rows, [] if large else _rankings(rows), _each_once(rows))
    if large:
        starts = np.searchsorted(rows.codes, np.arange(rows.codes[-1] + 1))
        own |= _areas(rows, [slice(*ends) for ends in pairwise([*starts, len(rows)])])
        pooled |= _areas(rows, [slice(0, len(rows))])
    first_own, first_pooled = ({k: v[0] for k, v in found.items()} for found in (own, pooled))
    return first_own, first_pooled


def _each_once(rows: ScoredRows) -> Parts:
    for place in row_blocks(len(rows), _MOST_PLANNED):
        yield place, np.broadcast_to(1.0, (1, place.stop - place.start))


def _areas(rows: ScoredRows, groups: list[slice]) -> Values:
    """Return AUC and average precision of groups of rows, ``(1, G)``, sorting one group at a time.

    :class:`_Ranking` does this for many weights and groups at once, with a dozen numbers per row.
    """
    found = np.full((len(rows.ranked), 2, 1, len(groups)), np.nan)
    for column, label in enumerate(rows.ranked):
        for number, group in enumerate(groups):
            scores, labels = rows.scores[group, column], rows.labels[group]
            mine = where(lambda place: labels[place] == label, len(labels))  # noqa: B023
            others = where(lambda place: labels[place] != label, len(labels))  # noqa: B023
            p, n = ordered(gathered(scores, mine)), ordered(gathered(scores, others))
            if not len(p) or not len(n):
                continue
            area = precision = 0.0
            for place in row_blocks(len(p)):
                own = p[place]
                below = np.searchsorted(n, own)
                area += float((below + np.searchsorted(n, own, "right")).sum()) / 2
                p_above = len(p) - np.searchsorted(p, own)
                precision += float((p_above / (p_above + len(n) - below)).sum())
            found[column, :, 0, number] = area / len(p) / len(n), precision / len(p)
    auc, average = (_mean_of_defined(tuple(found[:, k])) for k in range(2))
    return {"auc": auc, "average_precision": average}


def _rankings(rows: ScoredRows) -> Rankings:
    """Return the ranks of each ranked class within clients and among all rows."""
    everything = np.broadcast_to(np.int64(0), len(rows))
    return [
        tuple(
            _Ranking.of(groups, rows.scores[:, column], rows.labels == label)
            for groups in (rows.codes, everything)
        )
        for column, label in enumerate(rows.ranked)
    ]


def _metrics(rows: ScoredRows, rankings: Rankings, parts: Parts) -> tuple[Values, Values]:
    """Return the metrics of each client, ``(B, C)``, and of all rows together, ``(B, 1)``.

    ``parts`` say how often each of the ``B`` bootstrap samples holds a row; ``rankings`` need them at once.
    """
    if rankings:
        parts = list(parts)
        whole = np.concatenate([weights for _, weights in parts], axis=1)
    own = _sums(rows, parts)
    pooled = {name: value.sum(1, keepdims=True) for name, value in own.items()}
    positive = None if rows.positive is None else rows.known == rows.positive
    found = _from_sums(own, positive), _from_sums(pooled, positive)
    for place, metrics in enumerate(found):
        ranked = [ranking[place].areas(whole) for ranking in rankings]
        if ranked:
            # a class has an area only if the group has rows of it and rows of other classes
            areas = map(_mean_of_defined, zip(*ranked, strict=True))
            metrics["auc"], metrics["average_precision"] = areas
    return found


def _sums(rows: ScoredRows, parts: Parts) -> Values:
    """Return sums over the rows of each client and known class, ``(B, C, K)`` each."""
    found: Values = {}
    for place, weights in parts:
        own = rows.at(place)
        # first row of each pair of client and class that occurs
        cells = _starts(own.codes, own.labels)
        code, label = own.codes[cells], np.searchsorted(rows.known, own.labels[cells])
        factors = {"rows": None, "right": own.right, "loss": own.loss, "brier": own.brier}
        for name, factor in factors.items():
            values = weights if factor is None else weights * factor.astype(weights.dtype)
            shape = (len(weights), rows.codes[-1] + 1, len(rows.known))
            total = found.setdefault(name, np.zeros(shape, weights.dtype))
            total[:, code, label] += np.add.reduceat(values, cells, axis=1)
    return found


def _from_sums(sums: Values, positive: NDArray[np.bool_] | None) -> Values:
    """Return the metrics that need only sums over the rows of groups and classes, ``(B, G, K)`` each."""
    rows, right, count = sums["rows"], sums["right"], sums["rows"].sum(-1)
    hits = np.nan_to_num(_ratio(right, rows)).sum(-1)
    found = {
        "accuracy": _ratio(right.sum(-1), count),
        # mean share of right predictions over the classes that there are
        "balanced_accuracy": _ratio(hits, (rows > 0).sum(-1)),
        "log_loss": _ratio(sums["loss"].sum(-1), count),
        "brier": _ratio(sums["brier"].sum(-1), count),
    }
    if positive is not None:
        for name, own in (("sensitivity", positive), ("specificity", ~positive)):
            found[name] = _ratio((right * own).sum(-1), (rows * own).sum(-1))
    return found


@dataclass(frozen=True)
class _Ranking:
    """Rows sorted by the score of a class within groups.

    A step holds rows of one group that need no order among them: rows with equal scores, and neighbours
    none of which belongs to the class.
    """

    order: IntArray  # the rows, ``(n,)``
    positive: FloatArray  # whether each of them belongs to the class, ``(n,)``
    steps: IntArray  # first row of each step, ``(s,)``
    groups: IntArray  # first step of each group, ``(G,)``
    group_of: IntArray  # group of each step, ``(s,)``

    @classmethod
    def of(cls, codes: IntArray, scores: FloatArray, positive: NDArray[np.bool_]) -> _Ranking:
        order = np.lexsort((scores, codes))
        codes, scores = codes[order], scores[order]
        ties = _starts(codes, scores)
        has_positive = np.add.reduceat(positive[order], ties) > 0
        new = np.ones(len(ties), dtype=bool)
        new[1:] = has_positive[1:] | has_positive[:-1] | (np.diff(codes[ties]) > 0)
        steps = ties[new]
        groups = _starts(codes[steps])
        sizes = np.diff(np.append(groups, len(steps)))
        return cls(
            order,
            positive[order].astype(np.float64),
            steps,
            groups,
            np.repeat(np.arange(len(groups)), sizes),
        )

    def areas(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return AUC and average precision of each group, ``(B, G)``; NaN without both kinds of rows."""
        sorted_weights = weights[:, self.order]
        p = np.add.reduceat(
            sorted_weights * self.positive.astype(weights.dtype), self.steps, axis=1
        )
        n = np.add.reduceat(sorted_weights, self.steps, axis=1) - p
        all_p, all_n = (np.add.reduceat(one, self.groups, axis=1) for one in (p, n))
        below_p, below_n = self._below(p), self._below(n)
        # AUC = Σ_s p_s (n below s + n_s / 2) / (P N)
        auc = _ratio(np.add.reduceat(p * (below_n + n / 2), self.groups, axis=1), all_p * all_n)
        # average precision = Σ_s p_s / P · (p from s upwards) / (p and n from s upwards)
        p_above = all_p[:, self.group_of] - below_p
        above = p_above + all_n[:, self.group_of] - below_n
        precision = np.divide(p_above, above, out=np.zeros_like(above), where=above > 0)
        average = _ratio(np.add.reduceat(p * precision, self.groups, axis=1), all_p)
        average[np.isnan(auc)] = np.nan
        return auc, average

    def _below(self, values: FloatArray) -> FloatArray:
        """Return the sum over the lower steps of the same group, ``(B, s)``."""
        before = values.cumsum(axis=1) - values
        return np.asarray(before - before[:, self.groups][:, self.group_of])


def _starts(*keys: NDArray[np.generic]) -> IntArray:
    """Return the positions where any of some sorted arrays takes a new value."""
    new = np.ones(len(keys[0]), dtype=bool)
    new[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return np.flatnonzero(new)


def _ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """Return a ratio that is NaN where the denominator is zero."""
    missing = np.full(numerator.shape, np.nan, numerator.dtype)
    return np.divide(numerator, denominator, out=missing, where=denominator > 0)


def _mean_of_defined(values: tuple[FloatArray, ...]) -> FloatArray:
    stacked = np.stack(values)
    return _ratio(np.nansum(stacked, axis=0), np.isfinite(stacked).sum(axis=0))


# ---------------------------------------------------------------------- bootstrap


def bootstrap(rows: ScoredRows) -> tuple[Values, Values]:
    """Return 95 % percentile intervals of each client ``(C, 2)`` and of all rows ``(1, 2)``.

    Each resample draws as many rows of each client as the client has, with replacement. Resamples where a
    metric is undefined, such as the AUC of rows of one class, are left out. Where all resamples agree,
    because every row is right or every row is wrong, shares of rows have the exact binomial bound, and
    other metrics have no interval (NaN).
    """
    own, pooled = resample(rows)
    counts = _sums(rows, _each_once(rows))["rows"][0]
    counted, every = {"accuracy": counts.sum(-1)}, counts.sum(0)
    together = {"accuracy": np.array([every.sum()])}
    if rows.positive is not None:
        for name, here in (
            ("sensitivity", rows.known == rows.positive),
            ("specificity", rows.known != rows.positive),
        ):
            counted[name] = counts[:, here].sum(-1)
            together[name] = np.array([every[here].sum()])
    return _intervals(own, counted), _intervals(pooled, together)


def _intervals(resampled: Values, counted: Values) -> Values:
    """Return the middle 95 % of the defined values of each metric, ``(G, 2)``.

    Intervals without width are replaced: of ``n`` rows all are right with probability ``p^n``. ``counted``
    has ``n`` of the metrics that are shares of rows, ``(G,)`` each.
    """
    found = {}
    for name, drawn in resampled.items():
        low, high = _middle(drawn)
        flat = np.isclose(low, high, rtol=0, atol=1e-6)
        if name in counted:
            bound = ((1 - _LEVEL) / 2) ** (1 / np.maximum(counted[name], 1))
            low, high = (
                np.where(flat & (low > 0.5), bound, low),
                np.where(flat & (high < 0.5), 1 - bound, high),
            )
        else:
            low, high = np.where(flat, np.nan, low), np.where(flat, np.nan, high)
        found[name] = np.stack([low, high], -1)
    return found


def _middle(drawn: FloatArray) -> FloatArray:
    """Return the ends of the middle 95 % of the defined values ``(B, G)`` of each group, ``(2, G)``."""
    values = np.sort(drawn, axis=0)  # NaN comes last
    last = np.maximum(np.isfinite(values).sum(axis=0)[:, None] - 1, 0)
    place = last * np.array([(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    first, group = np.floor(place).astype(np.int64), np.arange(values.shape[1])[:, None]
    lower, upper = values[first, group], values[np.minimum(first + 1, last), group]
    return np.asarray((lower + (place - first) * (upper - lower)).T, dtype=np.float64)


def resample(rows: ScoredRows, *, ranks: bool | None = None) -> tuple[Values, Values]:
    """Return the metrics of each client ``(B, C)`` and of all rows ``(B, 1)`` under ``B`` resamples.

    Metrics that need ``ranks`` are left out by default if there are many rows.
    """
    n, widths = len(rows), max(len(rows.ranked), 1)
    large = n > _MOST_PLANNED
    if ranks is None:
        ranks = not large and n * widths * _FEWEST_RESAMPLES <= _MOST_RANKED
    work = n * (widths if ranks else 1)
    resamples = min(RESAMPLES, max(_FEWEST_RESAMPLES, _MOST_WORK // work))
    rankings = _rankings(rows) if ranks else []
    # float32 counts few rows exactly, and halves the time
    kind = np.float64 if large else np.float32
    drawn = (
        ((place, weights.astype(kind)) for place, weights in parts)
        for parts in _draws(rows.codes, resamples)
    )
    own, pooled = zip(*(_metrics(rows, rankings, parts) for parts in drawn), strict=True)
    return _joined(own), _joined(pooled)


def resample_r2(codes: IntArray, y: FloatArray, errors: FloatArray) -> FloatArray:
    """Return ``R²`` of all rows under resamples of the rows of each client, ``(B,)``.

    Rows are sorted by client. ``y`` are the numbers, and ``errors`` squared errors of their predictions,
    ``(n,)`` each.
    """
    sums = [own.sum(1, keepdims=True) for own in _sums_of_numbers(codes, y, errors)]
    return np.asarray(_of_numbers(np.concatenate(sums))["r2"][:, 0])


def bootstrap_numbers(codes: IntArray, y: FloatArray, errors: FloatArray) -> tuple[Values, Values]:
    """Return 95 % intervals of RMSE and R² of each client ``(C, 2)`` and of all rows ``(1, 2)``.

    The arguments are those of :func:`resample_r2`. A client with one row has no interval (NaN).
    """
    own, pooled = [], []
    for sums in _sums_of_numbers(codes, y, errors):
        own.append(_of_numbers(sums))
        pooled.append(_of_numbers(sums.sum(1, keepdims=True)))
    several = (counts_of(codes, int(codes[-1]) + 1) > 1, np.array([len(y) > 1]))
    intervals = []
    for drawn, known in zip((_joined(own), _joined(pooled)), several, strict=True):
        ends = {name: _middle(values).T for name, values in drawn.items()}
        intervals.append({name: np.where(known[:, None], e, np.nan) for name, e in ends.items()})
    return intervals[0], intervals[1]


def _sums_of_numbers(codes: IntArray, y: FloatArray, errors: FloatArray) -> Iterator[FloatArray]:
    """Yield ``Σ (1, y, y², error)`` of each client in blocks of resamples, ``(b, C, 4)``."""
    resamples = min(RESAMPLES, max(_FEWEST_RESAMPLES, _MOST_WORK // len(y)))
    centre = sum(y[place].sum() for place in row_blocks(len(y), _MOST_PLANNED)) / len(y)
    for parts in _draws(codes, resamples):
        total = np.zeros(())
        for place, weights in parts:
            own, starts = y[place] - centre, _starts(codes[place])
            values = [np.ones(len(own)), own, own**2, errors[place]]
            sums = np.zeros((len(weights), codes[-1] + 1, len(values)))
            for k, one in enumerate(values):
                sums[:, codes[place][starts], k] = np.add.reduceat(weights * one, starts, axis=1)
            total = total + sums
        yield total


def _of_numbers(sums: FloatArray) -> Values:
    """Return RMSE and R² from the sums of :func:`_sums_of_numbers`, ``(B, G)`` each."""
    count, total, squares, error = np.moveaxis(sums, -1, 0)
    spread = squares - total**2 / count
    spread = np.where(spread > 1e-12 * squares, spread, 0.0)  # equal numbers, up to rounding
    return {"rmse": np.sqrt(error / count), "r2": 1.0 - _ratio(error, spread)}


def _draws(codes: IntArray, resamples: int) -> Iterator[Parts]:
    """Yield blocks of resamples: how often each row was drawn among those of its client.

    The seed is fixed, so rows that several methods predict are resampled alike.
    """
    n, rng = len(codes), np.random.default_rng(0)
    sizes = counts_of(codes, int(codes[-1]) + 1)
    if n > _MOST_PLANNED:
        yield from (_drawn_parts(codes, sizes, rng) for _ in range(resamples))
        return
    size_of, start_of = sizes[codes], (sizes.cumsum() - sizes)[codes]
    block = max(1, _AT_ONCE // n)
    for first in range(0, resamples, block):
        count = min(block, resamples - first)
        drawn = (rng.random((count, n)) * size_of).astype(np.int64) + start_of
        drawn += n * np.arange(count)[:, None]
        yield [(slice(0, n), np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n))]


def _drawn_parts(codes: IntArray, sizes: IntArray, rng: np.random.Generator) -> Parts:
    """Yield one resample of many rows, part by part.

    Of a client with rows in several parts, a part gets a binomial number of the draws that are left.
    """
    draws, left = sizes.copy(), sizes.copy()
    for place in row_blocks(len(codes), _MOST_PLANNED):
        here = slice(codes[place.start], codes[place.stop - 1] + 1)
        rows = np.bincount(codes[place] - here.start)
        count = rng.binomial(draws[here], rows / left[here])
        draws[here] -= count
        left[here] -= rows
        drawn = (rng.random(count.sum()) * np.repeat(rows, count)).astype(np.int64)
        drawn += np.repeat(rows.cumsum() - rows, count)
        yield place, np.bincount(drawn, minlength=place.stop - place.start)[None]


def _joined(blocks: Sequence[Values]) -> Values:
    return {name: np.concatenate([one[name] for one in blocks]) for name in blocks[0]}
