"""Settings of privacy: the budget, whom it protects, and what is declared about the data."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedgmm.support.checks import (
    Count,
    Flag,
    NonNegativeInt,
    Positive,
    Text,
    check_fields,
    check_texts,
    number,
    one_of,
)

Robust = Literal["none", "trimmed", "centred"]
ROBUST: tuple[str, ...] = get_args(Robust)
"""Ways to combine the sums of sites, see :func:`fedgmm.privacy.influence.combine`."""

UNITS = ("row", "person", "client")
"""Units that a budget can protect: one row, all rows of a person, or all rows of a client."""

LINEAR_ROUNDS, NETWORK_ROUNDS = 8, 50
"""Numbers of noised rounds if the settings name none."""

USUAL_DELTA = 1e-5
"""Largest ``delta`` that is accepted for more units than one over it, with a warning."""

Bounds = tuple[float, float]
FloatArray = NDArray[np.float64]


class PrivacyError(ValueError):
    """Private training that cannot run with these settings, with the reason."""


@dataclass(frozen=True)
class Privacy:
    """Settings of privacy.

    With ``epsilon``, training is differentially private: all that leaves the clients has the same
    distribution, up to ``epsilon`` and ``delta``, whether or not one unit is among the data. Bounds
    and categories are declared, because learning them from the data would reveal extreme rows.

    Attributes:
        epsilon: budget of the whole run; ``None`` adds no noise.
        delta: probability with which the bound by ``epsilon`` may fail; should be less than one over
            the number of protected units, see :meth:`check_units`.
        unit: ``"row"``, ``"person"`` or ``"client"``; the budget hides whether one such unit is among
            the data.
        bounds: smallest and largest value of the columns: one pair for all columns, one pair per
            column, or pairs by name of column. Values outside are clipped.
        categories: values of categorical columns, and of the label, by name of column. Other values
            count as missing.
        person: column that names the person of a row; it is not used as an input.
        rounds: noised rounds; more rounds have more noise each. ``None`` means 8 for linear learners and
            50 for networks and ``solver="sgd"``, or as many as the run has, if these are fewer.
        secure_aggregation: sites mask their sums, so a server sees only the total.
        tolerated: sites that may reveal their part of the noise without weakening it, over a network;
            dropouts that secure aggregation allows are tolerated in any case.
        min_change: fewest sites in which two sums under masks may differ; the difference between sums
            over almost the same sites would show single ones. Noisy sums may differ by any number.
    """

    epsilon: Positive | None = None
    delta: Annotated[float, number(above=0, below=1)] | None = None
    unit: Annotated[str, one_of(*UNITS)] = "row"
    bounds: Any = None
    categories: Mapping[str, Sequence[str]] | None = None
    person: Text | None = None
    rounds: Count | None = None
    secure_aggregation: Flag = False
    tolerated: NonNegativeInt = 0
    min_change: Count = 2

    def __post_init__(self) -> None:
        check_fields(self)
        if self.bounds is not None:
            object.__setattr__(self, "bounds", _plain_bounds(self.bounds))
        if self.categories is not None:
            if not isinstance(self.categories, Mapping):
                raise TypeError(
                    f"categories must map columns to lists of values, got {self.categories!r}."
                )
            for column, values in self.categories.items():
                check_texts(f"categories of {column!r}", values)
            plain = {str(name): tuple(values) for name, values in self.categories.items()}
            object.__setattr__(self, "categories", plain)
        if self.epsilon is None:
            if self.secure_aggregation and self.min_change < 2:
                raise PrivacyError(
                    "min_change=1 needs epsilon: without noise the difference between two sums would "
                    "show the one site in which they differ."
                )
            return
        if self.delta is None:
            raise PrivacyError(
                f"epsilon={self.epsilon:g} needs delta (--delta), much smaller than one over the number of "
                "rows, persons or clients that are protected, such as 1e-5."
            )
        if self.bounds is None:
            raise PrivacyError(
                "epsilon needs bounds (--bounds age=0:120, or 0:200 for all columns): the smallest and the "
                "largest value of each column, from public knowledge and not from the data."
            )

    @property
    def is_noised(self) -> bool:
        """Whether training is differentially private."""
        return self.epsilon is not None

    @property
    def fewest_changes(self) -> int:
        """Fewest sites in which two opened sums may differ; noise hides single sites."""
        return 1 if self.is_noised else self.min_change

    def check_units(self, units: int, largest: int = 0) -> None:
        """Raise or warn if ``delta`` is too large for the number of protected units.

        A mechanism that publishes each unit as it is with probability ``delta`` keeps every ``epsilon``.
        It would publish ``delta`` times their number, so one over this number is refused for the units of
        any client, and for all units unless ``delta`` is as small as is usual. That warns only: sites
        whose sums are masked do not know the number of all rows.

        Args:
            units: number of rows, persons or clients in the run.
            largest: most units of one client.
        """
        if self.delta is None or not self.is_noised or self.delta < 1.0 / max(units, 1):
            return
        refused = self.delta > USUAL_DELTA or self.delta >= 1.0 / max(largest, 1)
        count = max(largest, 1) if self.delta >= 1.0 / max(largest, 1) else max(units, 1)
        text = (
            f"delta={self.delta:g} {'must' if refused else 'should'} be less than 1/{count} "
            f"({1.0 / count:.2g}), because a larger delta allows to publish one {self.unit} as it is."
        )
        if refused:
            raise PrivacyError(text)
        warnings.warn(text, stacklevel=3)

    def limits(
        self, columns: int, names: Sequence[str] | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Return the smallest and the largest value of each column, ``(d,)`` each.

        Bounds that are given by name need the ``names`` of the columns; a column without bounds raises
        ``PrivacyError``.
        """
        if isinstance(self.bounds, dict):
            missing = [name for name in names or () if name not in self.bounds]
            if names is None or missing:
                what = f"column {missing[0]!r} has" if missing else "the columns have no names, so"
                raise PrivacyError(f"bounds: {what} no bounds; declare a pair for every column.")
            pairs: Any = [self.bounds[name] for name in names]
        elif self.bounds is not None and isinstance(self.bounds[0], tuple):
            pairs = self.bounds
            if len(pairs) != columns:
                raise PrivacyError(
                    f"bounds has {len(pairs)} pairs for {columns} columns; declare a pair for every "
                    "column, or one pair for all."
                )
        else:
            pairs = [self.bounds] * columns
        low, high = np.array(pairs, dtype=np.float64).reshape(columns, 2).T
        return low, high

    def record(self) -> dict[str, Any]:
        """Return the settings as plain values, for saving; :meth:`from_record` reads them."""
        record = {name: value for name, value in vars(self).items() if value is not None}
        if isinstance(self.bounds, tuple):
            record["bounds"] = np.array(self.bounds).tolist()
        elif isinstance(self.bounds, dict):
            record["bounds"] = {name: list(pair) for name, pair in self.bounds.items()}
        if self.categories is not None:
            record["categories"] = {n: list(values) for n, values in self.categories.items()}
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Privacy:
        """Return the settings from plain values, such as the section ``[privacy]`` of a TOML file."""
        return cls(**record)


def _plain_bounds(bounds: Any) -> Bounds | tuple[Bounds, ...] | dict[str, Bounds]:
    """Return bounds as plain tuples."""
    if isinstance(bounds, Mapping):
        return {str(name): _pair(f"bounds of {name!r}", pair) for name, pair in bounds.items()}
    try:
        flat = np.ndim(bounds) == 1
    except ValueError:
        flat = False
    if flat:
        return _pair("bounds", bounds)
    try:
        return tuple(_pair(f"bounds[{place}]", pair) for place, pair in enumerate(bounds))
    except TypeError:
        raise TypeError(
            f"bounds must be a pair of numbers, one pair per column, or pairs by name, got {bounds!r}."
        ) from None


def _pair(name: str, value: Any) -> Bounds:
    try:
        low, high = (float(one) for one in value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a pair of numbers, got {value!r}.") from None
    if not (np.isfinite([low, high]).all() and low < high):
        raise PrivacyError(f"{name} must be finite, with the smaller value first, got {value!r}.")
    return low, high
