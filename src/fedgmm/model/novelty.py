"""Novel rows: split-conformal p-values of rows, and a test of a whole file.

A row is novel if its p-value is at most the false-alarm rate. So the threshold of its score is a low
quantile of the scores of held-out rows: of all clients (:func:`conformal_p_values`) or of one client
(:func:`client_p_values`). The rate then holds for new rows that are drawn like the held-out ones, however
well the model fits. :func:`flag_novel_rows` compares, and :func:`file_test` tests a whole file.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedgmm.data.dataset import LabelledRows
from fedgmm.data.inputs import NO_CLIENT
from fedgmm.model.predictions import EvaluatedRows, evaluate_split
from fedgmm.support.scratch import (
    concatenated,
    counts_of,
    empty,
    gathered,
    row_blocks,
    stable_order,
    where,
)
from fedgmm.wording import counted

if TYPE_CHECKING:
    from fedgmm.model.model import FederatedModel

FloatArray = NDArray[np.float64]

Score = Literal["x", "y", "joint", "confidence"]
"""``log P(x)``, ``log P(y|x)``, ``log P(x, y)``, or the largest ``log P(y|x)`` of any class."""

SCORES: tuple[str, ...] = get_args(Score)

OWN = "own_"
"""Prefix of scores with the weights of each row's client."""

ROW_CALIBRATIONS = (*SCORES, *(OWN + score for score in SCORES), "client", "gaussian")
_SHAPE = ("location", "scale", "standard", "standard_client")
CALIBRATIONS = (*ROW_CALIBRATIONS, *_SHAPE, "clients")
"""Arrays of a calibration. Per held-out row: the scores with the federation's weights and with those of
its client, the code of the client, and the most likely Gaussian. Per client: ``location`` and ``scale`` of
its own ``log P(x)``. ``standard``: own ``log P(x)`` of rows of all clients, standardised by them, and
``standard_client`` the code of the client of each, which earlier versions did not write. They wrote
``clients``, which is not used."""

_MANY = 1000  # held-out rows of a client that suffice for a threshold: the rate varies by 0.7 %
_FEW = 8  # rows that location and scale need
_LEAST = 20  # held-out rows of a Gaussian that is compared on its own
_DRAWS = 1999  # random relabellings of the test of a file
_MOST_TESTED = 2000  # rows that the test of a file looks at, of the file and of the held-out ones


@dataclass(frozen=True)
class NoveltyResult:
    """Rows that were tested for novelty.

    Attributes:
        scores: ``(n,)``; high means familiar.
        p_values: split-conformal p-values, ``(n,)``.
        novel: ``p_values <= false_alarm_rate``, ``(n,)``.
        false_alarm_rate: share of ordinary rows that may be flagged.
        batch: test of all rows together; ``None`` if it was not requested.
    """

    scores: FloatArray
    p_values: FloatArray
    novel: NDArray[np.bool_]
    false_alarm_rate: float
    batch: FileTest | None = None

    @property
    def batch_p_value(self) -> float | None:
        """The p-value of all rows together; ``None`` if it was not requested."""
        return None if self.batch is None else self.batch.p_value


@dataclass(frozen=True)
class FileTest:
    """Test of the rows of a file, together.

    Attributes:
        p_value: small if rows are less familiar than held-out rows.
        smallest: the smallest p-value that these numbers of rows allow.
    """

    p_value: float
    smallest: float


@dataclass(frozen=True)
class FalseAlarms:
    """Share of a client's held-out rows that are flagged.

    Attributes:
        rows: number of the rows.
        pooled: share flagged by the threshold of all clients.
        own: share flagged by the client's own threshold; ``None`` if the client has none.
    """

    rows: int
    pooled: float
    own: float | None


def calibration_of(
    model: FederatedModel, held_out: LabelledRows, labels: Tensor, trained: LabelledRows | None
) -> dict[str, NDArray[Any]]:
    """Return the scores of held-out rows with labels ``(n,)``, see ``CALIBRATIONS``.

    Clients with too few held-out rows for a threshold of their own use their ``trained`` rows, too.
    """
    rows = evaluate_split(model, held_out)
    codes, clients = rows.codes.cpu().numpy(), len(model.names)
    found: dict[str, NDArray[Any]] = {"client": codes}
    for prefix, own in (("", rows.of(NO_CLIENT)), (OWN, rows)):
        conditional, confidence = own.log_conditional(labels)
        found[prefix + "y"] = conditional
        if confidence is not None:
            found[prefix + "confidence"] = confidence
        if rows.log_x is not None:
            density = own.log_density()
            joint = empty(len(density), np.float64)
            for place in row_blocks(len(joint)):
                joint[place] = density[place] + conditional[place]
            found |= {prefix + "x": density, prefix + "joint": joint}
    if rows.log_x is None:
        return found
    found["gaussian"] = rows.most_likely_gaussians()
    scores, few = found[OWN + "x"], counts_of(codes, clients) < _MANY
    if trained is not None and few.any():
        others = evaluate_split(model, trained)
        who = others.codes.cpu().numpy()
        some = where(lambda place: few[who[place]], len(who))
        scores = concatenated([scores, gathered(others.log_density_without_itself(), some)])
        codes = concatenated([codes, gathered(who, some)])
    shape = standardise(scores, codes, clients)
    if len(shape[2]):
        found |= dict(zip(_SHAPE, shape, strict=True))
    return found


def flag_novel_rows(
    calibration: Mapping[str, NDArray[Any]],
    score: Score,
    scores: FloatArray,
    codes: NDArray[np.int64],
    false_alarm_rate: float,
    names: Sequence[Hashable] = (),
) -> NoveltyResult:
    """Flag the rows whose conformal p-value is at most ``false_alarm_rate``.

    Rows with scores ``(n,)`` that belong to no client, with code ``NO_CLIENT``, are compared with the
    held-out rows of all clients, others with those of their client. Warns if there are too few held-out
    rows for any row without a client to be flagged. ``names`` of the clients are for errors.
    """
    p_values = np.empty(len(scores))
    common = codes == NO_CLIENT
    if common.any() or not len(codes):
        p_values[common] = conformal_p_values(calibration[score], scores[common])
        held_out = len(calibration[score])
        smallest = 1.0 / (1.0 + held_out)
        if smallest > false_alarm_rate:
            warnings.warn(
                f"No row can be flagged: with {counted(held_out, 'held-out row')} the smallest p-value "
                f"is {smallest:.3g}, but false_alarm_rate is {false_alarm_rate:g}; hold out more rows or "
                "raise the rate.",
                UserWarning,
                stacklevel=3,
            )
    for code in np.unique(codes[~common]).tolist():
        own = client_p_values(calibration, score, scores[codes == code], code)
        if own is None:
            raise ValueError(
                f"Client {names[code]!r} has too few held-out scores of its own; call "
                "calibrate(dataset) with its rows, or omit the client."
            )
        p_values[codes == code] = own
    return NoveltyResult(scores, p_values, p_values <= false_alarm_rate, false_alarm_rate)


def conformal_p_values(calibration: ArrayLike, scores: ArrayLike) -> FloatArray:
    """Return ``p = (1 + #{calibration ≤ score}) / (1 + m)`` of scores ``(n,)``, small for low scores.

    Rows drawn like the ``m`` held-out ones have ``P(p ≤ α) ≤ α``.
    """
    held_out = np.sort(np.asarray(calibration, dtype=np.float64))
    if not len(held_out):
        raise ValueError("There are no calibration scores; hold out some rows for calibration.")
    below = np.searchsorted(held_out, np.asarray(scores, dtype=np.float64), side="right")
    return np.asarray((1.0 + below) / (1.0 + len(held_out)))


# ---------------------------------------------------------------------- thresholds of single clients


def standardise(
    scores: FloatArray, codes: NDArray[np.int64], clients: int
) -> tuple[FloatArray, FloatArray, FloatArray, NDArray[np.int64]]:
    """Return location and scale of each client's scores ``(C,)``, standardised scores, and their clients.

    Clients with fewer than eight rows have NaN, and their rows are left out of the others, ``(n',)``.
    """
    location, scale = np.full((2, clients), np.nan)
    counts, order = counts_of(codes, clients), stable_order(codes, clients)
    ends = np.cumsum(counts)
    for code in np.flatnonzero(counts >= _FEW).tolist():
        own = gathered(scores, order[ends[code] - counts[code] : ends[code]])
        location[code], scale[code] = own.mean(), max(own.std(ddof=1), 1e-12)
    known = where(lambda place: np.isfinite(location[codes[place]]), len(codes))
    standard = empty(len(known), np.float64)
    for place in row_blocks(len(known)):
        rows, own = known[place], codes[known[place]]
        standard[place] = (scores[rows] - location[own]) / scale[own]
    return location, scale, standard, gathered(codes, known)


def client_p_values(
    calibration: Mapping[str, NDArray[Any]], score: Score, scores: FloatArray, code: int
) -> FloatArray | None:
    """Return p-values of rows of one client from its scores, ``(n,)``; ``None`` without held-out rows.

    A client with 1,000 held-out rows is compared with these: split-conformal p-values, so the expected
    rate is the chosen one and differs from it by 0.7 % (one standard deviation at 5 %). With ``m`` rows
    it would differ by ``√(α (1 - α) / (m + 2))``: 5 % for 20 rows, 1.5 % for 200. A client with fewer
    rows is compared in ``log P(x)`` with rows of all clients, after each client's scores were
    standardised by its own location and scale, and with all of its own rows. The p-value is the mean of
    both: the first varies less, and the second does not assume that the scores of clients differ in
    location and scale only. A row that scores below all rows of its client gets the first
    p-value if that is smaller. Other scores have no such common shape, so they are compared with the
    client's few held-out rows alone.
    """
    if "client" not in calibration:
        return None
    held_out = calibration[OWN + score][calibration["client"] == code]
    location = calibration.get("location", np.zeros(0))
    if score == "x" and len(held_out) < _MANY and code < len(location):
        if not np.isfinite(location[code]):
            return None
        standard = (scores - location[code]) / calibration["scale"][code]
        p_values = conformal_p_values(calibration["standard"], standard)
        if "standard_client" in calibration:
            own = calibration["standard"][calibration["standard_client"] == code]
            mean = (p_values + conformal_p_values(own, standard)) / 2
            # below all own rows the mean would exceed small rates, however far away the row is
            beyond = standard < own.min(initial=np.inf)
            p_values = np.where(beyond, np.minimum(p_values, mean), mean)
        return p_values
    return conformal_p_values(held_out, scores) if len(held_out) else None


def count_false_alarms(
    calibration: Mapping[str, NDArray[Any]],
    score: Score,
    pooled: FloatArray,
    own: FloatArray,
    codes: NDArray[np.int64],
    false_alarm_rate: float,
) -> dict[int, FalseAlarms]:
    """Return the share of ordinary rows that are flagged, by the code of each client.

    ``pooled`` are scores with the federation's weights, ``own`` with those of the row's client, ``(n,)``.
    """
    flagged = conformal_p_values(calibration[score], pooled) <= false_alarm_rate
    rates = {}
    for code in np.unique(codes).tolist():
        here = codes == code
        p_values = client_p_values(calibration, score, own[here], code)
        by_itself = None if p_values is None else float((p_values <= false_alarm_rate).mean())
        rates[code] = FalseAlarms(int(here.sum()), float(flagged[here].mean()), by_itself)
    return rates


# ---------------------------------------------------------------------- whole files


def compare_file(
    calibration: Mapping[str, NDArray[Any]],
    score: Score,
    scores: FloatArray,
    rows: EvaluatedRows,
) -> FileTest:
    """Compare rows with scores ``(n,)`` with held-out rows of their client or, without one, Gaussian."""
    codes = rows.codes.cpu().numpy()
    known = codes != NO_CLIENT
    if known.any():
        if "client" not in calibration:
            raise ValueError("There are no scores of single clients; call calibrate(dataset).")
        strata = calibration["client"], codes[known]
        return file_test(calibration[OWN + score], scores[known], strata, least=0)
    if rows.log_x is None or "gaussian" not in calibration:  # written by an earlier version
        return file_test(calibration[score], scores)
    gaussians = rows.most_likely_gaussians()
    return file_test(calibration[score], scores, (calibration["gaussian"], gaussians))


def file_test(
    calibration: FloatArray,
    scores: FloatArray,
    strata: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    *,
    least: int = _LEAST,
    draws: int = _DRAWS,
) -> FileTest:
    """Test whether the rows of a file are drawn like held-out rows, against less familiar ones.

    The statistic is ``Σ_i p_i^(-1/2)`` over the rows of the file, large if some or all of them are unusual;
    ``p_i`` is the rank of row ``i`` among the file's and the held-out rows. Such p-values depend on each
    other, so the sum is compared with its values after the same rows were dealt at random to file and
    held-out rows. So the size is exact up to the draws: ``P(p ≤ α) ≤ α``, for any scores and numbers of
    rows. With strata, rows are ranked and dealt within each, so shares of the strata do not matter.

    The p-value is at least ``1 / (1 + draws)``, and at least ``1 / C(m + n, n)`` for ``n`` rows and ``m``
    held-out rows. So a file of one row can reach 5 % from 19 held-out rows on, see
    :func:`smallest_file`.

    ``strata`` has those of the held-out rows ``(m,)`` and of the file's rows ``(n,)``. Strata with fewer
    than ``least`` held-out rows are joined.
    """
    from scipy.special import gammaln
    from scipy.stats import rankdata

    rng = np.random.default_rng(0)
    some_known, some_new = (
        rng.permutation(len(own))[:_MOST_TESTED] for own in (calibration, scores)
    )
    calibration, scores = calibration[some_known], scores[some_new]
    if strata is None:
        known, new = np.zeros_like(some_known), np.zeros_like(some_new)
    else:
        known, new = _joined_strata(strata[0][some_known], strata[1][some_new], least)
    seen, dealt, log_ways = 0.0, np.zeros(draws), 0.0
    for stratum in np.unique(new).tolist():
        own, others = scores[new == stratum], calibration[known == stratum]
        n, total = len(own), len(own) + len(others)
        if not len(others):
            continue
        ranks = rankdata(np.concatenate([own, others]), method="max")
        values = (ranks / (total + 1)) ** -0.5
        seen += values[:n].sum()
        fewer = min(n, total - n)  # deal the smaller of the two parts
        for first in range(0, draws, 500):
            part = slice(first, min(first + 500, draws))
            mixed = rng.random((part.stop - part.start, total), dtype=np.float32)
            chosen = values[mixed.argpartition(fewer - 1, axis=1)[:, :fewer]].sum(1)
            dealt[part] += chosen if fewer == n else values.sum() - chosen
        log_ways += gammaln(total + 1) - gammaln(n + 1) - gammaln(total - n + 1)
    tolerance = 1e-9 * (1 + abs(seen))
    p_value = (1 + int((dealt >= seen - tolerance).sum())) / (1 + draws)
    return FileTest(p_value, float(max(np.exp(-log_ways), 1 / (1 + draws))))


def _joined_strata(
    known: NDArray[np.int64], new: NDArray[np.int64], least: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join strata with fewer than ``least`` held-out rows, and with them the largest if they need it."""
    names, place = np.unique(np.concatenate([known, new]), return_inverse=True)
    sizes = np.bincount(place[: len(known)], minlength=len(names))
    small = sizes < least
    if small.any() and sizes[small].sum() < least:
        small[sizes.argmax()] = True
    joined = np.where(small, -1, names)[place]
    return joined[: len(known)], joined[len(known) :]


def smallest_file(held_out: int, level: float = 0.05) -> int | None:
    """Return the smallest number of rows whose :func:`file_test` can be at most ``level``.

    That is the smallest ``n`` with ``1 / C(m + n, n) ≤ level``; ``None`` without held-out rows.
    """
    if held_out < 1:
        return None
    rows, ways = 1, held_out + 1
    while ways * level < 1:
        rows += 1
        ways = ways * (held_out + rows) // rows
    return rows


# ---------------------------------------------------------------------- quality of scores


@dataclass(frozen=True)
class NoveltyMetrics:
    """Quality of scores that separate novel rows, the positive class, from known ones."""

    auroc: float
    average_precision: float
    max_f1: float


def novelty_metrics(known: ArrayLike, novel: ArrayLike) -> NoveltyMetrics:
    """Return AUROC, average precision and Max-F1 of scores that are low for novel rows."""
    from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score

    known, novel = np.asarray(known, dtype=np.float64), np.asarray(novel, dtype=np.float64)
    truth = np.concatenate([np.zeros(len(known)), np.ones(len(novel))])
    strangeness = -np.concatenate([known, novel])
    precision, recall, _ = precision_recall_curve(truth, strangeness)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-300)
    return NoveltyMetrics(
        float(roc_auc_score(truth, strangeness)),
        float(average_precision_score(truth, strangeness)),
        float(f1.max()),
    )
