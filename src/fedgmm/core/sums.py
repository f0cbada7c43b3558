"""``Sums``: named sums over rows, which clients send and the server adds.

Every training method lists its sums in ``declare_sums``, see
:meth:`fedgmm.methods.fedgmm.FedGMM.declare_sums`. A :class:`Sum` declares the shape of a sum, the values
that rows can produce, how much one row can change it, and how it travels. The wire format, the checks of
received updates and the masks use this declaration, so they work for every method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgmm.core.params import Params, per_entry

ALIVE = 1e-9
"""A mean is sent only if more expected rows than this stand behind it; below, it is rounding error."""


class SumsError(ValueError):
    """Sums that no rows could have made, with the reason."""


@dataclass(frozen=True)
class Sum:
    """The declaration of one sum."""

    shape: tuple[int, ...]  # of the whole sum
    # name of the sum that counts the rows behind each entry of the first axis; ``None`` if all rows
    # of a client stand behind all entries. Entries without rows are zero.
    rows: str | None = None
    # the sum runs over all entries that ``rows`` counts, so it has no axis for them (tied
    # covariances)
    pooled: bool = False
    lowest: float = -math.inf  # smallest value that an entry can have
    # largest absolute value that one row can add to an entry. The range of a fixed-point number
    # follows from it.
    largest: float = math.inf
    # relative error that the client's arithmetic may leave, in units of the largest entry
    rounding: float = 0.0
    # name of the sum whose largest entry is the unit of ``rounding``, for a matrix that is a
    # difference of larger ones; ``None`` means this sum itself
    size_of: str | None = None
    # the last two axes are a symmetric positive semidefinite matrix, so a triangle travels
    semidefinite: bool = False
    # the sum travels as its mean over ``rows``, in the precision of the learners. This loses
    # nothing, because the client computed the mean in that precision.
    as_mean: bool = False
    # maps a bound on ``‖x - μ‖`` to the largest Euclidean norm of one row's contribution; ``None``
    # if no bound on rows bounds it
    sensitivity: Callable[[float], float] | None = None
    # not a sum: entries of different clients are kept apart along the first axis. The server's
    # memory then grows with the number of clients, and masks cannot hide the entries.
    gathered: bool = False


def row_counts(*shape: int) -> Sum:
    """Declare expected numbers of rows: one row adds numbers from zero to one that sum to one."""
    return Sum(shape, lowest=0.0, largest=1.0, sensitivity=lambda clip: 1.0)


Declaration = Mapping[str, Sum]
"""All sums of a method by name."""


class Sums(Mapping[str, Tensor]):
    """Named sums over the rows of one or several clients; ``gathered`` ones are kept apart per client."""

    def __init__(self, values: Mapping[str, Tensor], gathered: Iterable[str] = ()) -> None:
        self._values = dict(values)
        self.gathered = frozenset(gathered)

    def __getitem__(self, name: str) -> Tensor:
        """Return one sum."""
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return the number of sums."""
        return len(self._values)

    def __add__(self, other: Sums) -> Sums:
        """Return the sums over the rows of both; gathered entries are put one after the other."""
        added = {
            name: torch.cat([value, other[name]]) if name in self.gathered else value + other[name]
            for name, value in self.items()
        }
        return Sums(added, self.gathered)

    def below(self, prefix: str) -> Params:
        """Return the sums whose names start with ``prefix``, without it."""
        return {n.removeprefix(prefix): v for n, v in self.items() if n.startswith(prefix)}


class Total:
    """Sums of many clients, added as they arrive.

    The memory does not grow with the number of clients, except for entries that are gathered.
    Rounding errors are added up beside the sums (two-sum of Knuth), so the order of arrival changes
    the result by less than one unit in the last place, and almost never at all.
    """

    def __init__(self) -> None:
        self.clients = 0
        self._total: Sums | None = None
        self._rests: dict[str, Tensor] = {}

    def add(self, sums: Sums) -> None:
        """Add the sums of one more client."""
        self.clients += 1
        if self._total is None:
            self._total = Sums({n: v.clone() for n, v in sums.items()}, sums.gathered)
            added = sums.keys() - sums.gathered
            self._rests = {name: torch.zeros_like(sums[name]) for name in added}
            return
        before, self._total = self._total, self._total + sums
        for name, rest in self._rests.items():
            a, b, total = before[name], sums[name], self._total[name]
            taken = total - a
            rest += (a - (total - taken)) + (b - taken)

    def result(self) -> Sums:
        """Return the sums over all clients that were added; there must be at least one."""
        assert self._total is not None
        values = {n: v + self._rests[n] if n in self._rests else v for n, v in self._total.items()}
        return Sums(values, self._total.gathered)


def withhold(sums: Sums, declaration: Declaration, min_rows: float) -> Sums:
    """Set entries of one client that stand for fewer than ``min_rows`` rows to zero, and their counts, too.

    The ratio of the sums over clients then stays right. A pooled sum is kept whole or not at all,
    and its group with it. Gathered entries are kept, because no ratio makes up for a missing one.
    """
    values = dict(sums)
    groups: dict[str, list[str]] = {}
    for name, one in declaration.items():
        if one.rows is not None and not one.gathered:
            groups.setdefault(one.rows, []).append(name)
    for counts_name, names in groups.items():
        counts = sums[counts_name]
        kept = counts >= min_rows
        if any(declaration[name].as_mean for name in names):
            kept &= counts > ALIVE
        if any(declaration[name].pooled for name in names):
            kept = kept.all().expand_as(kept)
        for name in names:
            mask = kept.all() if declaration[name].pooled else per_entry(kept, sums[name])
            values[name] = torch.where(mask, sums[name], 0.0)
        values[counts_name] = torch.where(kept, counts, 0.0)
    return Sums(values, sums.gathered)


def check_sums(sums: Sums, declaration: Declaration, rows: int) -> None:
    """Raise :class:`SumsError` for sums of one client that ``rows`` rows could not have made.

    Shapes are as declared. A method checks in addition how its sums must agree with each other.
    """
    for name, one in declaration.items():
        value = sums[name]
        if not value.numel():
            continue
        if not bool(torch.isfinite(value).all()):
            raise SumsError(f"{name} is not finite")
        if bool((value < one.lowest - one.rounding * float(value.abs().max())).any()):
            raise SumsError(f"{name} is less than {one.lowest:g} ({float(value.min()):.3g})")
        behind = torch.tensor(rows * (1.0 + 1e-4) + 1e-6, dtype=torch.float64)
        if one.rows is not None:
            counts = sums[one.rows]
            behind = counts.sum() if one.pooled else per_entry(counts, value)
            if bool(((behind == 0) & (value != 0)).any()):
                raise SumsError(f"{name} has entries without rows")
            # a relative error, because the mean of an entry with hardly any row is bounded, too
            behind = behind * (1.0 + 1e-3) + 1e-30
        if one.gathered:
            behind = torch.ones(())  # an entry of one client is not multiplied by its rows
        if math.isfinite(one.largest) and bool((value.abs() > one.largest * behind).any()):
            raise SumsError(f"{name} exceeds what {rows} rows can add up to")
        if one.semidefinite:
            check_semidefinite(name, sums[one.size_of or name], value, one.rounding)


def check_semidefinite(what: str, whole: Tensor, matrix: Tensor, slack: float) -> None:
    """Raise :class:`SumsError` if a symmetric matrix ``(..., n, n)`` has a negative eigenvalue.

    ``slack`` is the size of rounding errors relative to the largest entry of ``whole``,
    ``(..., k, k)``.
    """
    size = whole.abs().amax((-2, -1)) + 1e-12
    lowest = torch.linalg.eigvalsh(matrix / size[..., None, None])[..., 0]
    if bool((lowest < -slack * matrix.shape[-1]).any()):
        raise SumsError(f"{what} is not positive semidefinite")
