"""Bounds on the influence of one site: on its weight, on the size of its sums, and on its summary.

A site may lie about everything that it sends. Checks find numbers that no rows could have made
(:func:`fedgmm.core.sums.check_sums`); this module bounds numbers that are possible but unlike those of the
other sites, the *cohort*:

- a site counts for a limited share of all rows (:func:`row_weights`);
- sums per row that are much larger than the cohort's median are scaled down to it (:class:`Cohort`);
- numbers of a column that are much wider than the cohort's are left out of its scale
  (:func:`bounded_summaries`).

All sums are linear in rows, and the server uses ratios of sums. So multiplying a site's sums by one factor
keeps the ratios and gives the site less weight. The median needs a majority of honest sites, and at least
``FEWEST`` sites.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedgmm.core.params import per_entry
from fedgmm.core.sums import Declaration, Sum, Sums, Total
from fedgmm.data.tables.errors import quoted
from fedgmm.data.tables.summaries import ClientSummary, ColumnSummary
from fedgmm.methods.base import LEARNERS

Robust = Literal["none", "trimmed", "centred"]
ROBUST: tuple[str, ...] = get_args(Robust)

FEWEST = 3
"""Fewest sites with a median that one of them cannot move at will."""

_SHARE = 3.0  # times the median site that a site counts for at most, unless a share is given
_FEWEST_WEIGHED = 6  # below, the sizes of honest sites say too little about each other
_INCREDIBLE = 100.0  # times the median site: limited however few sites there are
_HELD = 16  # replies that wait for a median; the memory of a round does not grow with the sites
_MANY_NORM, _FEW_NORM = 4.0, 10.0  # see ``Cohort.max_norm``
_SMALL_STEP = 0.05  # gradient per row, in units of the inputs, below which learners have converged
_FLOOR = 0.02  # of the largest median so far: below, a median is the noise of a converged run
_WIDEST = 10.0  # times the median deviation of a column that a site's numbers may have
_FAR = (
    10.0  # a log-likelihood per row is outlying beyond so many times the median and its deviation
)


# ---------------------------------------------------------------------- weights


def row_weights(rows: Mapping[str, int], max_share: float | None = None) -> dict[str, float]:
    """Return the factor, at most one, by which the rows of each site count.

    Args:
        rows: of each site.
        max_share: largest share of all rows that a site counts for. It is at least an equal share,
            ``1/n``. ``None`` lets a site count for three times the median site, which is a share of
            ``3 / (n + 2)`` beside equal sites. The sizes of fewer than six honest sites say little
            about each other, so there only a site with 100 times the median's rows is limited.
    """
    if not rows:
        return {}
    if max_share is None:
        usual = median(rows.values())
        limit = _SHARE * usual
        free = limit if len(rows) >= _FEWEST_WEIGHED else _INCREDIBLE * usual
        free = free if len(rows) >= FEWEST else math.inf
    else:
        share = max(max_share, 1 / len(rows))
        limit = free = _limit(sorted(rows.values(), reverse=True), share)
    return {name: limit / own if own > free else 1.0 for name, own in rows.items()}


def _limit(rows: list[int], share: float) -> float:
    """Return ``L`` such that ``min(N_c, L)`` is at most ``share`` of ``Σ_c min(N_c, L)``.

    The rows ``N_c`` are in falling order. With the ``k`` largest sites at the limit,
    ``L = share (S + k L)``, where ``S`` is the sum of the rest.
    """
    rest = float(sum(rows))
    for k, largest in enumerate(rows):
        if k * share >= 1:
            break
        limit = share * rest / (1 - k * share)
        if limit >= largest:
            return limit
        rest -= largest
    return float(rows[-1])


# ---------------------------------------------------------------------- sizes of sums


class Size(NamedTuple):
    """The name of one size of a site's sums.

    Attributes:
        group: name of the sum that counts its rows.
        what: names it in messages.
        degree: how it grows with the distance of rows.
    """

    group: str
    what: str
    degree: int


def degree(one: Sum) -> int:
    """Return the power of the distance of a row with which its contribution can grow."""
    if one.sensitivity is None:
        return 0
    return round(math.log2(one.sensitivity(2e6) / one.sensitivity(1e6)))


def sizes(sums: Sums, declaration: Declaration, current: Mapping[str, Tensor]) -> dict[Size, float]:
    """Return the size per row of each sum, as a distance: ``(‖sum‖ / rows)^(1 / degree)``.

    Means, which are learners, count together and as distances from the current ones. First moments
    are left out, because second moments bound them (Cauchy and Schwarz) and rows elsewhere are allowed.

    Args:
        sums: of one site.
        declaration: of the method.
        current: the learners that the site was sent.
    """
    found: dict[Size, float] = {}
    moved: dict[str, float] = {}
    for name, one in declaration.items():
        if one.rows is None:
            continue
        counts = sums[one.rows]
        rows = float(counts.sum())
        if not rows > 0:
            continue
        if one.as_mean:
            here = current.get(name)
            if here is None:
                continue
            if one.gathered:
                change = sums[name].double() - here.double()
            else:
                change = (sums[name] - per_entry(counts, here) * here.double()) / rows
            moved[one.rows] = moved.get(one.rows, 0.0) + float(change.square().sum())
        elif (power := degree(one)) > 1 or (power and name.startswith(LEARNERS)):
            norm = float(torch.linalg.vector_norm(sums[name])) / rows
            found[Size(one.rows, name, power)] = norm ** (1 / power)
    return found | {Size(group, "learners", 1): math.sqrt(own) for group, own in moved.items()}


# ---------------------------------------------------------------------- one exchange


@dataclass
class _Held:
    name: str
    sums: Sums
    rows: int
    weight: float
    current: Mapping[str, Tensor]
    sizes: dict[Size, float]


@dataclass
class Cohort:
    """The total of the sites' sums in one exchange, in which no site counts for too much.

    The first replies wait until there are enough of them for a median, and are then added. Later ones
    are compared with the median of those so far and added as they arrive.

    Attributes:
        declaration: of the sums.
        max_norm: multiple of the median size per row above which sums are scaled down to the median;
            ``None`` means 4, and 10 with fewer than six sites, whose median says less.
        largest: the largest median of each size in earlier exchanges. A median that is far below it
            is that of a converged run, in which sizes say nothing.
        bounded: why the sums of a site were scaled, by its name.
    """

    declaration: Declaration
    max_norm: float | None = None
    largest: dict[Size, float] = field(default_factory=dict)
    bounded: dict[str, str] = field(default_factory=dict)
    _total: Total = field(default_factory=Total)
    _sizes: dict[Size, list[float]] = field(default_factory=dict)
    _fits: list[float] = field(default_factory=list)
    _held: list[_Held] = field(default_factory=list)

    def add(
        self,
        name: str,
        sums: Sums,
        rows: int,
        weight: float = 1.0,
        current: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take the sums of one more site, which were checked.

        Args:
            name: of the site.
            sums: over its rows.
            rows: that it declared.
            weight: by which its rows count, see :func:`row_weights`.
            current: the learners that it was sent.
        """
        current = current or {}
        own = sizes(sums, self.declaration, current)
        for size, value in own.items():
            self._sizes.setdefault(size, []).append(value)
        if "log_likelihood" in sums:
            self._fits.append(float(sums["log_likelihood"]) / rows)
        self._held.append(_Held(name, sums, rows, weight, current, own))
        if len(self._held) >= _HELD or self._total.clients:
            self._settle()

    def result(self) -> Sums:
        """Return the sums over all sites; there must be at least one."""
        self._settle()
        for size, values in self._sizes.items():
            self.largest[size] = max(self.largest.get(size, 0.0), median(values))
        return self._total.result()

    def _settle(self) -> None:
        for held in self._held:
            self._total.add(self._bounded(held))
        self._held.clear()

    def _bounded(self, held: _Held) -> Sums:
        factors: dict[str, float] = {}
        for size, value in held.sizes.items():
            cohort = self._sizes[size]
            reference = max(median(cohort), self._floor(size))
            if len(cohort) < FEWEST or not value > self._max_norm(len(cohort)) * reference > 0:
                continue
            factor = (reference / value) ** size.degree
            factors[size.group] = min(factor, factors.get(size.group, 1.0))
            self.bounded[held.name] = (
                f"its {size.what} are {value / reference:.3g} times as large as the median of the sites"
            )
        values = {
            name: self._scaled(name, value, held, factors) for name, value in held.sums.items()
        }
        return Sums(values, held.sums.gathered)

    def _max_norm(self, sites: int) -> float:
        if self.max_norm is not None:
            return self.max_norm
        return _MANY_NORM if sites >= _FEWEST_WEIGHED else _FEW_NORM

    def _floor(self, size: Size) -> float:
        """Return the smallest size that counts: steps get small as a run converges, and mean nothing."""
        group = [median(v) for other, v in self._sizes.items() if other.group == size.group]
        return max(_FLOOR * self.largest.get(size, 0.0), _SMALL_STEP * max(group))

    def _scaled(
        self, name: str, value: Tensor, held: _Held, factors: Mapping[str, float]
    ) -> Tensor:
        one = self.declaration.get(name)
        if one is None:  # the code of a client
            return value
        if one.gathered and one.as_mean:
            here = held.current.get(name)
            factor = factors.get(str(one.rows), 1.0)
            return value if here is None or factor == 1.0 else here + factor * (value - here)
        if name == "log_likelihood":
            value = self._likely(value, held)
        factor = held.weight
        if not one.gathered:
            factor *= factors.get(one.rows or name, 1.0)
        return value if factor == 1.0 else value * factor

    def _likely(self, value: Tensor, held: _Held) -> Tensor:
        """Return a log-likelihood, or the median's in its place if it is outlying."""
        own = float(value) / held.rows
        usual = usual_instead(own, self._fits)
        if usual is None:
            return value
        self.bounded[held.name] = (
            f"its log-likelihood per row is {own:.3g}, and the median of the sites {usual:.3g}"
        )
        return torch.full_like(value, usual * held.rows)


# ---------------------------------------------------------------------- likelihoods


def usual_instead(own: float, cohort: Sequence[float]) -> float | None:
    """Return the median of the cohort to use instead of an outlying mean log-likelihood, or ``None``.

    A log-likelihood per row is outlying if it differs from the median by more than ten times the size of
    the median and the cohort's median deviation.
    """
    if len(cohort) < FEWEST:
        return None
    usual = median(cohort)
    spread = median(abs(one - usual) for one in cohort)
    return None if abs(own - usual) <= _FAR * (1.0 + abs(usual) + spread) else usual


def likely_scores(
    scores: Mapping[str, Mapping[str, float]], weights: Mapping[str, float]
) -> dict[str, float]:
    """Return the sums over sites of their validation scores, without the influence of outlying ones.

    Args:
        scores: for each site ``clients`` (one or zero), ``rows``, ``log_loss`` (a mean over rows), and sums
            over rows under other names.
        weights: by which the rows of each site count, see :func:`row_weights`.
    """
    present = {name: own for name, own in scores.items() if own["clients"]}
    found = dict.fromkeys(next(iter(scores.values())), 0.0)
    for key in found:
        if key == "clients":
            found[key] = float(len(present))
            continue
        whole = key in ("rows", "log_loss")
        means = {n: own[key] if whole else own[key] / own["rows"] for n, own in present.items()}
        for name, own in means.items():
            usual = None if key == "rows" else usual_instead(own, list(means.values()))
            mean = own if usual is None else usual
            weight = 1.0 if key == "log_loss" else weights.get(name, 1.0)
            found[key] += weight * mean * (1.0 if whole else present[name]["rows"])
    return found


# ---------------------------------------------------------------------- summaries of tables


def bounded_summaries(
    summaries: Mapping[str, ClientSummary], max_share: float | None = None
) -> tuple[dict[str, ClientSummary], list[str]]:
    """Return summaries with bounded weights and scales, and notes about those that were changed.

    The numbers of a column count for its mean and scale unless they are much wider than those of the
    other sites: with ``m`` the median mean, ``squares / count + (mean - m)²`` must be at most 100 times
    the median. Wider ones are replaced by the medians.
    """
    weights = row_weights({name: own.rows for name, own in summaries.items()}, max_share)
    found, notes = dict(summaries), []
    for name, weight in weights.items():
        if weight < 1.0:
            found[name] = _scaled_summary(summaries[name], weight)
            notes.append(_too_many(name, summaries[name].rows, found[name].rows))
    columns = dict.fromkeys(name for own in summaries.values() for name in own.columns)
    for column in columns:
        own = {c: s.columns[column] for c, s in found.items() if column in s.columns}
        for client, changed in _wide(own).items():
            found[client] = replace(
                found[client], columns={**found[client].columns, column: changed}
            )
            notes.append(_too_wide(client, f"Column {quoted(column)}"))
    targets = {c: s.target for c, s in found.items() if s.target is not None}
    for client, changed in _wide(targets).items():
        found[client] = replace(found[client], target=changed)
        notes.append(_too_wide(client, "The column to predict"))
    return found, notes


def _too_many(name: str, rows: int, counted: int) -> str:
    return (
        f"{name} declares {rows} rows, which count as {counted}, because no site may count for more; "
        "raise max_share if the number is right."
    )


def _too_wide(client: str, column: str) -> str:
    return (
        f"{column}: the numbers of {client} are more than {_WIDEST:g} times as wide as those of most "
        "sites, so they do not count for its scale; check their unit there."
    )


def _scaled_summary(own: ClientSummary, weight: float) -> ClientSummary:
    """Return a summary of fewer rows with the same ratios."""

    def scaled(count: int) -> int:
        return max(1, round(weight * count)) if count else 0

    def column(one: ColumnSummary) -> ColumnSummary:
        count = scaled(one.count)
        ratio = count / one.count if one.count else 1.0
        texts = None
        if one.categories is not None:
            texts = {text: scaled(n) for text, n in one.categories.items()}
        orders = {
            order: (scaled(n), mean, squares * (scaled(n) / n if n else 1.0), rest)
            for order, (n, mean, squares, rest) in one.orders.items()
        }
        return replace(
            one,
            missing=scaled(one.missing),
            count=count,
            squares=one.squares * ratio,
            categories=texts,
            orders=orders,
        )

    return replace(
        own,
        rows=scaled(own.rows),
        unlabelled=scaled(own.unlabelled),
        columns={name: column(one) for name, one in own.columns.items()},
        labels={text: scaled(n) for text, n in own.labels.items()},
        target=None if own.target is None else column(own.target),
    )


def _wide(own: Mapping[str, ColumnSummary]) -> dict[str, ColumnSummary]:
    """Return replacements of the summaries whose numbers are much wider than those of most sites."""
    found = dict(_wide_in(own, lambda one: (one.count, one.mean, one.squares, one.mean_rest)))
    changed = {
        client: replace(own[client], count=n, mean=mean, squares=squares, mean_rest=rest)
        for client, (n, mean, squares, rest) in found.items()
    }
    for order in sorted({order for one in own.values() for order in one.orders}):
        some = {client: one for client, one in own.items() if order in one.orders}
        for client, moments in _wide_in(some, lambda one, order=order: one.orders[order]).items():  # type: ignore[misc]
            one = changed.get(client, own[client])
            changed[client] = replace(one, orders={**one.orders, order: moments})
    return changed


Moments = tuple[int, float, float, float]


def _wide_in(
    own: Mapping[str, ColumnSummary], moments_of: Callable[[ColumnSummary], Moments]
) -> dict[str, Moments]:
    present = {client: m for client, one in own.items() if (m := moments_of(one))[0] > 0}
    if len(present) < FEWEST:
        return {}
    centre = median(mean for _, mean, _, _ in present.values())
    spread = {
        c: _square(mean - centre) + squares / n for c, (n, mean, squares, _) in present.items()
    }
    usual = median(spread.values())
    variance = median(squares / n for n, _, squares, _ in present.values())
    if not (0 < usual < math.inf and math.isfinite(centre)):
        return {}
    return {
        client: (present[client][0], centre, variance * present[client][0], 0.0)
        for client, value in spread.items()
        if not value <= _WIDEST**2 * usual
    }


def _square(value: float) -> float:
    return value * value  # ``**`` raises for large floats
