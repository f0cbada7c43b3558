"""Preprocessing from declared columns: a protected site sends masked sums and no text.

Without protection a site lists its columns and categories. With secure aggregation the server declares
them in ``[privacy]``: number columns by their ``bounds``, categories and classes by their values. A
site then adds up moments and counts of these, and the agreement on one preprocessing uses the total.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from fedgmm.core.sums import Sum, Sums, row_counts
from fedgmm.data.tables.agreement import declared
from fedgmm.data.tables.columns import TRUTH
from fedgmm.data.tables.preprocessing import Preprocessing, TableOptions
from fedgmm.data.tables.summaries import ClientSummary, ColumnSummary
from fedgmm.privacy.settings import Privacy, PrivacyError

_VECTOR = re.compile(r"(.+)\[([1-9]\d{0,4})\]")


class UndeclaredError(ValueError):
    """A table that does not fit the declared columns, with the reason."""


@dataclass(frozen=True)
class DeclaredColumns:
    """The columns that a run declares.

    Attributes:
        bounds: smallest and largest value of the number columns.
        categories: values of the categorical columns.
        classes: values of the label; empty without a label, and if it is a number.
        target: bounds of a label that is a number.
        vectors: columns of vectors and their lengths, declared as ``name[length]``; ``bounds`` has every
            entry.
    """

    bounds: Mapping[str, tuple[float, float]]
    categories: Mapping[str, tuple[str, ...]]
    classes: tuple[str, ...] = ()
    target: tuple[float, float] | None = None
    vectors: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, privacy: Privacy, table: TableOptions) -> DeclaredColumns:
        """Return what the settings declare about the columns of a table, or raise ``PrivacyError``."""
        if privacy.bounds is not None and not isinstance(privacy.bounds, Mapping):
            raise PrivacyError(
                "[privacy] bounds must name the columns in a federation, such as "
                "bounds = {age = [0, 120]}, because sites with secure aggregation send no names."
            )
        bounds, vectors = bounds_of_columns(privacy.bounds or {})
        categories = {name: tuple(texts) for name, texts in (privacy.categories or {}).items()}
        target: tuple[float, float] | None = None
        classes: tuple[str, ...] = ()
        if table.label is not None and table.task == "regression":
            target = bounds.pop(table.label, None)
            if target is None:
                raise PrivacyError(
                    f"[privacy] bounds must have the numbers to predict, {table.label!r}."
                )
        elif table.label is not None:
            classes = categories.pop(table.label, ())
            if len(classes) < 2:
                raise PrivacyError(
                    f"[privacy] categories must list the classes of the label {table.label!r}, because "
                    "sites with secure aggregation send no texts."
                )
        columns = {*bounds, *categories} - set(table.left_out)
        if not columns:
            raise PrivacyError(
                "secure_aggregation needs declared columns: bounds for numbers and categories for texts, "
                "in [privacy]."
            )
        both = sorted(set(bounds) & set(categories))
        if both:
            raise PrivacyError(f"{both[0]!r} has bounds and categories; declare one of them.")
        return cls(
            {name: pair for name, pair in bounds.items() if name in columns},
            {name: texts for name, texts in categories.items() if name in columns},
            classes,
            target,
            {name: length for name, length in vectors.items() if f"{name}_0" in columns},
        )

    @property
    def names(self) -> tuple[str, ...]:
        """All columns, numbers first."""
        return (*self.bounds, *self.categories)

    def undeclared(self, summary: ClientSummary) -> dict[str, int]:
        """Return the number of values per column that are not among its declared categories."""
        found = {}
        for name, texts in self.categories.items():
            own = summary.columns.get(name)
            present = 0 if own is None else summary.rows - own.missing
            if count := present - sum(_counts(own, texts)):
                found[name] = count
        return found

    def declare_sums(self) -> dict[str, Sum]:
        """Declare the sums of a table."""
        numbers = len(self.bounds) + (self.target is not None)
        texts = sum(map(len, self.categories.values()))
        return {
            "rows": row_counts(),
            "numbers/counts": row_counts(numbers),
            "numbers/first": Sum((numbers,), largest=1e6),
            "numbers/second": Sum((numbers,), lowest=0.0, largest=1e12),
            "present": row_counts(len(self.categories)),
            "categories": row_counts(texts),
            "classes": row_counts(len(self.classes)),
        }

    def sums(self, summary: ClientSummary) -> Sums:
        """Return the sums of one client's table, or raise ``UndeclaredError``."""
        moments = [_moments(self._numbers(summary, name), own) for name, own in self.bounds.items()]
        if self.target is not None and summary.target is not None:
            moments.append(_moments(summary.target, self.target))
        present, counts = [], []
        for name, texts in self.categories.items():
            own = summary.columns.get(name)
            counts += _counts(own, texts)
            present.append(0 if own is None else summary.rows - own.missing)
        classes = [summary.labels.get(text, 0) for text in self.classes]
        columns = list(zip(*moments, strict=True)) if moments else [(), (), ()]
        values = {
            "rows": summary.rows,
            "numbers/counts": columns[0],
            "numbers/first": columns[1],
            "numbers/second": columns[2],
            "present": present,
            "categories": counts,
            "classes": classes,
        }
        return Sums({n: torch.tensor(v, dtype=torch.float64) for n, v in values.items()})

    def _numbers(self, summary: ClientSummary, name: str) -> ColumnSummary:
        own = summary.columns.get(name)
        if own is None or own.kind == "empty":
            return ColumnSummary("number", summary.rows)
        if own.kind == "boolean":
            yes, no = _counts(own, TRUTH)[::-1]
            mean = yes / max(1, yes + no)
            return ColumnSummary("number", own.missing, yes + no, mean, yes * (1.0 - mean))
        if own.kind != "number":
            raise UndeclaredError(
                f"the column {name!r} holds no numbers, but the server declares bounds for it"
            )
        return own

    def summary(self, total: Mapping[str, torch.Tensor]) -> ClientSummary:
        """Return the summary of all rows together, from the sums over all clients."""
        rows = round(float(total["rows"]))
        pairs = [*self.bounds.values(), *([self.target] if self.target is not None else [])]
        numbers = [
            _pooled(
                rows,
                pair,
                *(float(total[f"numbers/{n}"][at]) for n in ("counts", "first", "second")),
            )
            for at, pair in enumerate(pairs)
        ]
        target = numbers.pop() if self.target is not None else None
        columns = dict(zip(self.bounds, numbers, strict=True))
        counts = [round(count) for count in total["categories"].tolist()]
        for (name, texts), present in zip(
            self.categories.items(), total["present"].tolist(), strict=True
        ):
            found = {text: counts.pop(0) for text in texts}
            listed = {text: count for text, count in found.items() if count > 0}
            columns[name] = ColumnSummary("text", rows - round(present), categories=listed)
        labels = {
            text: round(count)
            for text, count in zip(self.classes, total["classes"].tolist(), strict=True)
            if round(count) > 0
        }
        return ClientSummary(rows, 0, columns, labels, target, self.vectors)


def bounds_of_columns(
    given: Mapping[str, tuple[float, float]],
) -> tuple[dict[str, tuple[float, float]], dict[str, int]]:
    """Return bounds of columns, of vectors for every entry, and the lengths of vectors."""
    bounds, vectors = {}, {}
    for name, pair in given.items():
        found = _VECTOR.fullmatch(name)
        if found is None:
            bounds[name] = pair
        else:
            vectors[found[1]] = int(found[2])
            bounds |= {f"{found[1]}_{entry}": pair for entry in range(int(found[2]))}
    return bounds, vectors


def declared_preprocessing(privacy: Privacy, table: TableOptions) -> Preprocessing:
    """Return a preprocessing that follows from the declarations alone, for sums with noise."""
    own = DeclaredColumns.of(privacy, table)
    texts = dict(own.categories)
    if table.label is not None:
        texts[table.label] = own.classes
    found = declared(own.names, table, own.bounds, texts)
    # a site may lack a column
    return replace(found, columns=tuple(replace(one, optional=True) for one in found.columns))


def _counts(own: ColumnSummary | None, texts: tuple[str, ...]) -> list[int]:
    """Return how often each declared text occurs."""
    found = {} if own is None or own.categories is None else own.categories
    if own is not None and own.kind == "boolean":
        lowered: dict[str, int] = {}
        for text, count in found.items():
            lowered[text.lower()] = lowered.get(text.lower(), 0) + count
        return [lowered.get(text.lower(), 0) for text in texts]
    return [found.get(text, 0) for text in texts]


def _moments(own: ColumnSummary, pair: tuple[float, float]) -> tuple[float, float, float]:
    """Return count, sum and sum of squares of numbers within the bounds ``[-1, 1]``."""
    middle, half = (pair[0] + pair[1]) / 2, (pair[1] - pair[0]) / 2
    if not own.count:
        return 0.0, 0.0, 0.0
    if not math.isfinite(own.mean) or not math.isfinite(own.squares):
        raise UndeclaredError("a column has numbers that are too large")
    mean = ((own.mean - middle) + own.mean_rest) / half
    return float(own.count), own.count * mean, own.squares / half**2 + own.count * mean**2


def _pooled(
    rows: int, pair: tuple[float, float], count: float, first: float, second: float
) -> ColumnSummary:
    """Return the summary of numbers from their sums within the bounds."""
    middle, half = (pair[0] + pair[1]) / 2, (pair[1] - pair[0]) / 2
    n = round(count)
    if not n:
        return ColumnSummary("empty", rows)
    mean = first / n
    squares = max(0.0, second - n * mean**2) * half**2
    return ColumnSummary("number", rows - n, n, middle + half * mean, squares)
