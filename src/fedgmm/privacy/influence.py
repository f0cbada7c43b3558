"""Bounds on the influence of one site: on its weight, on the size of its sums, and on its summary.

A site may lie about everything that it sends. Checks find numbers that no rows could have made
(:func:`fedgmm.core.sums.check_sums`); this module bounds numbers that are possible but unlike those of the
other sites, the *cohort*:

- a site counts for a limited share of all rows (:func:`row_weights`);
- sums per row that are much larger than the cohort's median are scaled down (:class:`Cohort`);
- numbers of a column that are much wider than the cohort's are left out of its scale
  (:func:`bounded_summaries`).

All sums are linear in rows, and the server uses ratios of sums. So multiplying a site's sums by one factor
keeps the ratios and gives the site less weight. The median needs a majority of honest sites, and at least
``FEWEST`` sites.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from tempfile import SpooledTemporaryFile
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgmm.core.params import per_entry
from fedgmm.core.sums import Declaration, Sum, Sums, Total
from fedgmm.data.tables.errors import quoted
from fedgmm.data.tables.summaries import ClientSummary, ColumnSummary
from fedgmm.methods.base import LEARNERS
from fedgmm.privacy.settings import Robust

_FIT = "log_likelihood"
_IN_MEMORY = 64 * 1024 * 1024  # bytes of sums that wait in memory

FEWEST = 3
"""Fewest sites with a median that one of them cannot move at will."""

_SHARE = 3.0  # times the median site that a site counts for at most, unless a share is given
_FEWEST_WEIGHED = 6  # below, the sizes of honest sites say too little about each other
_INCREDIBLE = 100.0  # times the median site: such a number of rows is not believed
_MANY_NORM, _FEW_NORM = 3.0, 10.0  # see ``Cohort.max_norm``
_SMALL_STEP = 0.05  # gradient per row, in units of the inputs, below which learners have converged
_FLOOR = 0.02  # of the largest median so far: below, a median is the noise of a converged run
_TRIM = 0.2  # share of the rows that a trimmed mean leaves out on each side
_CENTRING_STEPS = 5
_WIDEST = 10.0  # times the median deviation of a column that a site's numbers may have
# a log-likelihood per row is outlying beyond so many times the median and its deviation
_FAR = 10.0


# ---------------------------------------------------------------------- weights


def row_weights(rows: Mapping[str, int], max_share: float | None = None) -> dict[str, float]:
    """Return the factor, at most one, by which the rows of each site count.

    Args:
        rows: of each site.
        max_share: largest share of all rows that a site counts for. It is at least an equal share,
            ``1/n``. ``None`` lets a site count for three times the median site, which is a share of
            ``3 / (n + 2)`` beside equal sites. The sizes of fewer than six honest sites say little
            about each other, so there is no such limit. More than 100 times the median's rows are not
            believed, however many sites there are: the site counts for the median or less. The more rows it
            declares, the less it counts.
    """
    if not rows:
        return {}
    if max_share is None:
        if len(rows) < FEWEST:
            return dict.fromkeys(rows, 1.0)
        usual = median(rows.values())
        limit = _SHARE * usual if len(rows) >= _FEWEST_WEIGHED else math.inf
        believed = _INCREDIBLE * usual
    else:
        share = max(max_share, 1 / len(rows))
        limit = _limit(sorted(rows.values(), reverse=True), share)
        usual = believed = math.inf

    def counted(own: int) -> float:
        return usual * (believed / own) if own > believed else min(own, limit)

    return {name: counted(own) / own if own else 1.0 for name, own in rows.items()}


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
    and Hessians are left out, because second moments bound them and rows elsewhere are allowed. ``current``
    are the learners that the site was sent.
    """
    found: dict[Size, float] = {}
    moved: dict[str, float] = {}
    for name, one in declaration.items():
        if one.rows is None or one.size_of not in (None, name):
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
class Medians:
    """Medians over the sites of the sizes in earlier exchanges.

    Attributes:
        last: of the last exchange.
        largest: of all exchanges. A size far below it is that of a converged run, and says nothing.
    """

    last: dict[Size, float] = field(default_factory=dict)
    largest: dict[Size, float] = field(default_factory=dict)

    def record(self) -> list[list[str | int | float]]:
        """Return plain values, for a checkpoint."""
        return [[*size, value, self.largest[size]] for size, value in self.last.items()]

    @classmethod
    def from_record(cls, record: Iterable[Sequence[Any]]) -> Medians:
        """Return the medians of a checkpoint."""
        found = cls()
        for *size, last, largest in record:
            key = Size(*size)
            found.last[key], found.largest[key] = float(last), float(largest)
        return found


class _Site(NamedTuple):
    name: str
    sums: Callable[[], Sums]
    rows: int
    weight: float
    current: Mapping[str, Tensor]
    sizes: dict[Size, float]
    fit: float | None  # log-likelihood per row


@dataclass
class Cohort:
    """The total of the sites' sums in one exchange, in which no site counts for too much.

    Which sums are too large is known when the sizes of all sites are, so sums wait until then: up to
    ``_IN_MEMORY`` bytes in memory, and more in a temporary file. They are added in the order of the
    names, so the order of arrival decides nothing.

    Attributes:
        max_norm: multiple of the median size per row above which sums are scaled down, below the
            median; ``None`` means 3, and 10 with fewer than six sites, whose median says less.
        robust: how the sums are combined: added, or by :func:`combine`, for which all replies of the
            exchange are held.
        medians: of earlier exchanges; the result updates them.
        bounded: why a site counts less, by its name.
    """

    declaration: Declaration
    max_norm: float | None = None
    robust: Robust = "none"
    medians: Medians = field(default_factory=Medians)
    bounded: dict[str, str] = field(default_factory=dict)
    _sizes: dict[Size, list[float]] = field(default_factory=dict)
    _held: list[_Site] = field(default_factory=list)
    _shelf: Any = field(
        default_factory=lambda: SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115
    )

    def __post_init__(self) -> None:
        weakref.finalize(self, self._shelf.close)  # also if the exchange fails

    def add(
        self,
        name: str,
        sums: Sums,
        rows: int,
        weight: float = 1.0,
        current: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take the sums of one more site, which were checked.

        Its rows count by ``weight``, see :func:`row_weights`. It was sent the learners ``current``.
        """
        current = current or {}
        own = sizes(sums, self.declaration, current)
        for size, value in own.items():
            self._sizes.setdefault(size, []).append(value)
        fit = float(sums[_FIT]) / rows if _FIT in sums else None
        self._held.append(_Site(name, self._shelved(sums), rows, weight, current, own, fit))

    def _shelved(self, sums: Sums) -> Callable[[], Sums]:
        """Put sums into the file; return a function that reads them."""
        start, gathered = self._shelf.seek(0, 2), sums.gathered
        arrays = {name: value.detach().cpu().contiguous().numpy() for name, value in sums.items()}
        layout = {name: (one.dtype, one.shape, one.nbytes) for name, one in arrays.items()}
        self._shelf.writelines(one.tobytes() for one in arrays.values())

        def read() -> Sums:
            self._shelf.seek(start)
            found = {
                name: torch.from_numpy(
                    np.frombuffer(bytearray(self._shelf.read(size)), dtype).reshape(shape)
                )
                for name, (dtype, shape, size) in layout.items()
            }
            return Sums(found, gathered)

        return read

    def result(self) -> Sums:
        """Return the sums over all sites; there must be at least one."""
        usual = {size: median(values) for size, values in self._sizes.items()}
        limits = {size: self._limits(size, usual) for size in usual}
        settled, total, sites = [], Total(), sorted(self._held, key=lambda one: one.name)
        for site in sites:
            sums = self._bounded(site, limits)
            total.add(sums)
            if self.robust != "none":
                settled.append(sums)
        for size, own in usual.items():
            self.medians.last[size] = own
            self.medians.largest[size] = max(self.medians.largest.get(size, 0.0), own)
        found = dict(total.result())
        if self.robust != "none":
            found = dict(combine(settled, self.declaration, self.robust))
        if _FIT in found:
            found[_FIT] = torch.full_like(found[_FIT], self._log_likelihood(sites))
        return Sums(found, sums.gathered)

    def _limits(self, size: Size, usual: Mapping[Size, float]) -> tuple[float, float]:
        """Return the median size, and the largest that counts fully: any without a median.

        Steps of a converged run count as a smallest size.
        """
        sites, own = len(self._sizes[size]), usual[size]
        if sites < FEWEST:
            if size not in self.medians.last:
                return own, math.inf
            own = self.medians.last[size]
        group = [value for other, value in usual.items() if other.group == size.group]
        floor = _FLOOR * self.medians.largest.get(size, 0.0)
        # the group of a single size has no other unit
        reference = max(own, floor, _SMALL_STEP * max(group) if len(group) > 1 else 0.0)
        usual_norm = _MANY_NORM if sites >= _FEWEST_WEIGHED else _FEW_NORM
        return reference, (self.max_norm or usual_norm) * reference

    def _bounded(self, site: _Site, limits: Mapping[Size, tuple[float, float]]) -> Sums:
        factors: dict[str, float] = {}
        for size, value in site.sizes.items():
            reference, largest = limits[size]
            if value <= largest:
                continue
            ratio = reference / value
            # ratio^degree would leave the size of the median; less is left of a larger lie, so that a
            # site gains nothing by it
            factors[size.group] = min(ratio ** (size.degree + 1), factors.get(size.group, 1.0))
            self.bounded[site.name] = (
                f"its {size.what} are {1 / ratio:.3g} times as large as the median of the sites"
            )
        sums = site.sums()
        values = {name: self._scaled(name, value, site, factors) for name, value in sums.items()}
        return Sums(values, sums.gathered)

    def _scaled(
        self, name: str, value: Tensor, site: _Site, factors: Mapping[str, float]
    ) -> Tensor:
        one = self.declaration.get(name)
        if one is None:  # the code of a client
            return value
        own = factors.get(one.rows or name, 1.0)
        if one.gathered and one.as_mean:
            here = site.current.get(name)
            return value if here is None or own == 1.0 else here + own * (value - here)
        factor = site.weight if one.gathered else site.weight * own
        return value if factor == 1.0 else value * factor

    def _log_likelihood(self, sites: Sequence[_Site]) -> float:
        """Return the log-likelihood over all sites, with the median in the place of outlying ones."""
        means, total = [site.fit for site in sites if site.fit is not None], []
        for site, mean in zip(sites, means, strict=True):
            usual = usual_instead(mean, means)
            total.append(site.weight * site.rows * (mean if usual is None else usual))
            if usual is not None:
                self.bounded[site.name] = (
                    f"its log-likelihood per row is {mean:.3g}, and the median of the sites {usual:.3g}"
                )
        return math.fsum(total)


# ---------------------------------------------------------------------- robust means


def combine(sites: Sequence[Sums], declaration: Declaration, robust: Robust) -> Sums:
    """Return sums over sites in which robust means stand for the means of all rows.

    The sums of a group, which share the counts of their rows, become the robust mean of the sites' means
    times the counts of all sites. Counts and log-likelihoods are added.

    Args:
        sites: the sums of each site.
        declaration: of the method; without gathered entries.
        robust: ``"trimmed"`` is the mean of each coordinate without the fifth of the rows, on each side,
            that belongs to sites with extreme values (Yin et al. 2018). ``"centred"`` moves from the most
            central site towards the others, each by at most the median distance (Karimireddy et al. 2021).
    """
    values = {name: torch.stack([own[name] for own in sites]) for name in sites[0]}
    found = {name: value.sum(0) for name, value in values.items()}
    groups: dict[tuple[str, bool], list[str]] = {}
    for name, one in declaration.items():
        if one.rows is not None and one.rows != name:
            groups.setdefault((one.rows, one.pooled), []).append(name)
    for (rows, pooled), names in groups.items():
        weights = values[rows].sum(1, keepdim=True) if pooled else values[rows]  # (C, M)
        means = [_means(values[name], weights, pooled) for name in names]
        total = weights.sum(0)
        if robust == "centred":
            share = _central_shares(means, weights)
            robust_means = [(_spread(share, own) * own).sum(0) for own in means]
        else:
            robust_means = [_trimmed(own, weights) for own in means]
        for name, mean in zip(names, robust_means, strict=True):
            summed = mean * _spread(total, mean)
            summed = summed[0] if pooled else summed
            found[name] = semidefinite(summed) if declaration[name].semidefinite else summed
    return Sums(found)


def _spread(weights: Tensor, values: Tensor) -> Tensor:
    """Return weights with trailing axes, so that they multiply values, such as ``(C, M, ...)``."""
    return weights.reshape(*weights.shape, *[1] * (values.ndim - weights.ndim))


def _means(values: Tensor, weights: Tensor, pooled: bool) -> Tensor:
    """Return the mean over the rows of each site, ``(C, M, ...)``; zero without rows."""
    values = values[:, None] if pooled else values
    rows = _spread(weights, values)
    return torch.where(rows > 0, values / rows.clamp_min(1e-300), 0.0)


def _trimmed(means: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of each coordinate over the rows that are left between both cuts, ``(M, ...)``.

    ``means`` of the sites are ``(C, M, ...)``, their rows are ``weights``, ``(C, M)``.
    """
    ordered, order = means.sort(0)
    own = _spread(weights, means).expand_as(means).gather(0, order)
    upper = own.cumsum(0)
    total = upper[-1]
    kept = upper.minimum((1 - _TRIM) * total) - (upper - own).maximum(_TRIM * total)
    kept = kept.clamp_min(0.0)
    return (kept * ordered).sum(0) / kept.sum(0).clamp_min(1e-300)


def _central_shares(means: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Return the share of each site in the centred mean, ``(C, M)``; the shares sum to one.

    ``v ← v + Σ_c w_c min(1, τ / ‖x_c - v‖) (x_c - v)``, where ``x_c`` holds all means of a site in units of
    their median length. ``v`` starts at the most central site and stays a mean of sites, so it is
    positive semidefinite wherever they are.
    """
    flat = [own.flatten(2) if own.ndim > 2 else own[..., None] for own in means]
    lengths = [torch.linalg.vector_norm(own, dim=-1).median(0).values for own in flat]
    x = torch.cat(
        [
            own / length.clamp_min(1e-300)[:, None]
            for own, length in zip(flat, lengths, strict=True)
        ],
        -1,
    ).transpose(0, 1)  # (M, C, F)
    w = (weights / weights.sum(0).clamp_min(1e-300)).mT  # (M, C)
    distances = torch.cdist(x, x)
    far = torch.where(w > 0, (distances * w[:, None]).sum(-1), torch.inf)
    shares = torch.zeros_like(w)
    shares.scatter_(1, far.argmin(1, keepdim=True), 1.0)
    for _ in range(_CENTRING_STEPS):
        centre = (shares[..., None] * x).sum(1, keepdim=True)
        length = torch.linalg.vector_norm(x - centre, dim=-1)
        radius = _weighted_median(length, w)[:, None]
        moved = w * torch.where(length > radius, radius / length.clamp_min(1e-300), 1.0)
        shares = (1.0 - moved.sum(1, keepdim=True)) * shares + moved
    return shares.mT


def _weighted_median(values: Tensor, weights: Tensor) -> Tensor:
    """Return the smallest value that at least half of the weight does not exceed, along the last axis."""
    ordered, order = values.sort(-1)
    reached = weights.gather(-1, order).cumsum(-1) >= 0.5 * weights.sum(-1, keepdim=True)
    return ordered.gather(-1, reached.int().argmax(-1, keepdim=True))[..., 0]


def semidefinite(matrices: Tensor) -> Tensor:
    """Return the nearest positive semidefinite matrices, ``(..., n, n)``."""
    eigenvalues, vectors = torch.linalg.eigh((matrices + matrices.mT) / 2)
    found: Tensor = (vectors * eigenvalues.clamp_min(0.0)[..., None, :]) @ vectors.mT
    return found


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
            notes.append(
                f"{name} declares {summaries[name].rows} rows, which count as {found[name].rows}, because "
                "no site may count for more; raise max_share if the number is right."
            )
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
    whole = {c: (one.count, one.mean, one.squares, one.mean_rest) for c, one in own.items()}
    changed = {
        client: replace(own[client], count=n, mean=mean, squares=squares, mean_rest=rest)
        for client, (n, mean, squares, rest) in _wide_moments(whole).items()
    }
    for order in sorted({order for one in own.values() for order in one.orders}):
        some = {client: one.orders[order] for client, one in own.items() if order in one.orders}
        for client, moments in _wide_moments(some).items():
            one = changed.get(client, own[client])
            changed[client] = replace(one, orders={**one.orders, order: moments})
    return changed


Moments = tuple[int, float, float, float]


def _wide_moments(own: Mapping[str, Moments]) -> dict[str, Moments]:
    present = {client: moments for client, moments in own.items() if moments[0] > 0}
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
