"""Overview of the files of a federation: clients, columns, and warnings before training."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from fedgmm.data.tables.agreement import DisagreementError, agree_on_columns, spelling_notes
from fedgmm.data.tables.columns import FloatArray
from fedgmm.data.tables.errors import joined, listed, quoted
from fedgmm.data.tables.loading import Tables
from fedgmm.data.tables.preprocessing import Column, Labels, as_classes
from fedgmm.data.tables.summaries import ClientSummary
from fedgmm.wording import counted, first_few, percent

_FEW_ROWS = 20
_FAR = 1.0  # standard deviations
_MANY_MISSING = 0.5
_FEW_POSITIVE = 0.2  # of two classes, as in evaluate
_RARE_CLASS = 0.05
_MOST_BASE_RATES = 10
_MOST_LISTED_CLASSES = 20  # of labels that cannot be learned
_MOST_GROUPS = 3
_CODES = (-1.0, -9.0, -99.0, -999.0, -9999.0, 99.0, 999.0, 9999.0, 99999.0)
_FEW_CODES = 3
_ID_NAME = re.compile(r"(^|[\W_])(id|nr|no|number|key|index|mrn)$", re.IGNORECASE)
_OTHER_LABELS = 0.5  # total variation distance


@dataclass(frozen=True)
class ClientFacts:
    """One client compared with all clients.

    Attributes:
        name, rows: the client, and its number of rows.
        missing: share of missing values.
        classes: how often each class occurs.
        marginal_shift: distance of the means of its number columns from those of all clients, in
            standard deviations: root mean square over columns.
        farthest_column: the column with the largest distance, and that distance.
        label_shift: total variation distance between its labels and those of all clients, 0 to 1.
        target: mean and deviation of its numbers to predict; ``None`` for classes.
    """

    name: str
    rows: int
    missing: float
    classes: dict[str, int]
    marginal_shift: float
    farthest_column: tuple[str, float] | None
    label_shift: float
    target: tuple[float, float] | None = None


@dataclass(frozen=True)
class ColumnFacts:
    """One column over all clients.

    Attributes:
        name, role: the column, and its role in the preprocessing, or ``"vector"``.
        missing: share of missing values.
        outputs: number of matrix columns that it becomes.
        detail: mean and deviation, categories, or the reason why it is not used.
    """

    name: str
    role: str
    missing: float
    outputs: int
    detail: str


@dataclass(frozen=True)
class BaseRate:
    """The share of one class in all rows, and at the clients where it is lowest and highest."""

    label: str
    share: float
    lowest: tuple[str, float]
    highest: tuple[str, float]


@dataclass(frozen=True)
class Inspection:
    """Facts about clients and columns, and warnings about likely problems."""

    clients: list[ClientFacts]
    columns: list[ColumnFacts]
    classes: dict[str, int]
    warnings: list[str]
    base_rates: list[BaseRate]

    def record(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def inspect_tables(tables: Tables) -> Inspection:
    """Describe files that :func:`read_tables` read, from their summaries alone."""
    summaries = tables.summaries
    try:
        columns, notes = agree_on_columns(summaries, tables.options)
    except DisagreementError as error:
        raise tables.disagreement(error) from None
    owned: dict[str, Counter[str]] = {client: Counter() for client in summaries}
    of_numbers = tables.options.task == "regression"
    if tables.options.label is not None and not of_numbers:  # 1 and 1.0 may be the same class
        read = as_classes(text for own in summaries.values() for text in own.labels)
        for client, own in summaries.items():
            for text, count in own.labels.items():
                owned[client][str(read[text])] += count
    classes: Counter[str] = sum(owned.values(), Counter())
    rows = sum(summary.rows for summary in summaries.values())
    clients = [
        _client(name, own, columns, owned[name], classes, tables.options.left_out)
        for name, own in summaries.items()
    ]
    facts = _column_facts(columns, summaries, rows)
    problems = []
    if tables.options.label is not None and not of_numbers:
        counts = [own.labels for own in summaries.values()]
        try:
            Labels.agreed(tables.options.label, counts, tables.options.task)
        except ValueError as error:  # why the labels cannot be learned
            problems = [str(error)]
    of_classes = {} if problems and len(classes) > _MOST_LISTED_CLASSES else classes
    problems += spelling_notes(f"The label {quoted(tables.options.label)}", of_classes, "classes")
    warnings = [
        *tables.notes,
        *(note for note in notes if note not in tables.notes),
        *problems,
        *_number_warnings(tables, columns),
        *_warnings(clients, facts, summaries, of_classes),
    ]
    shown = sorted(of_classes)[:_MOST_BASE_RATES]
    rates = [_base_rate(label, clients, of_classes) for label in shown]
    return Inspection(clients, facts, dict(sorted(classes.items())), warnings, rates)


def _client(
    name: str,
    own: ClientSummary,
    columns: list[Column],
    labels: Mapping[str, int],
    classes: Mapping[str, int],
    ignore: Collection[str],
) -> ClientFacts:
    looked_at = [c for name, c in own.columns.items() if name not in ignore]
    missing = sum(column.missing for column in looked_at) / max(1, own.rows * len(looked_at))
    gaps = {}
    for column in columns:
        here = own.columns.get(column.name)
        if column.role in ("number", "date") and here is not None and here.count:
            gaps[column.name] = (here.mean - column.mean) / column.scale
    shift = math.sqrt(sum(gap**2 for gap in gaps.values()) / len(gaps)) if gaps else 0.0
    farthest = max(gaps, key=lambda column: abs(gaps[column]), default=None)
    target = own.target
    mine, all_ = sum(labels.values()), sum(classes.values())
    other = sum(abs(labels.get(n, 0) / mine - classes[n] / all_) for n in classes) if mine else 0.0
    return ClientFacts(
        name,
        own.rows,
        missing,
        dict(sorted(labels.items())),
        shift,
        None if farthest is None else (farthest, gaps[farthest]),
        0.5 * other,  # total variation
        None if target is None else (target.mean, math.sqrt(target.squares / target.count)),
    )


def _column_facts(
    columns: list[Column], summaries: Mapping[str, ClientSummary], rows: int
) -> list[ColumnFacts]:
    """Return one line per column; a column of vectors is one."""
    lengths = Counter(column.vector for column in columns)
    found: dict[str, ColumnFacts] = {}
    for column in columns:
        missing = sum(
            own.columns[column.name].missing if column.name in own.columns else own.rows
            for own in summaries.values()
        )
        name, role, outputs = column.name, str(column.role), len(column.outputs)
        match column.role:
            case "number":
                detail = f"mean {column.mean:.4g}, deviation {column.scale:.4g}"
            case "date":
                detail = f"days, deviation {column.scale:.4g}"
            case "category":
                detail = first_few((quoted(category)[1:-1] for category in column.categories), 6)
            case _:
                detail = column.reason
        if column.vector:  # a missing vector lacks all of its entries, so any entry gives the share
            name = column.vector
            outputs += found[name].outputs if name in found else 0
            role, detail = "vector" if outputs else "ignored", counted(lengths[name], "number")
        found[name] = ColumnFacts(name, role, missing / max(rows, 1), outputs, detail)
    return list(found.values())


def _base_rate(label: str, clients: list[ClientFacts], classes: Mapping[str, int]) -> BaseRate:
    rates = [(c.name, c.classes.get(label, 0) / c.rows) for c in clients if c.rows]
    lowest, highest = (choose(rates, key=itemgetter(1)) for choose in (min, max))
    return BaseRate(label, classes[label] / sum(classes.values()), lowest, highest)


def _warnings(
    clients: list[ClientFacts],
    columns: list[ColumnFacts],
    summaries: Mapping[str, ClientSummary],
    classes: Mapping[str, int],
) -> list[str]:
    used = [facts for facts in columns if facts.role != "ignored"]
    # warnings about all clients come first, because callers may show only the first few
    sparse = [
        f"{quoted(facts.name)} ({100 * facts.missing:.0f} %)"
        for facts in used
        if facts.missing > _MANY_MISSING
    ]
    found = [f"Columns that lack many of their values: {joined(sparse)}."] if sparse else []
    found += _class_warnings(clients, classes)
    few = [f"{c.name} ({c.rows})" for c in clients if c.rows < _FEW_ROWS]
    if few:
        found.append(f"Fewer than {_FEW_ROWS} rows: {joined(few)}; their figures will be noisy.")
    for facts in used:
        entry = f"{facts.name}_0" if facts.role == "vector" else facts.name
        without = [
            c.name
            for c in clients
            if entry in summaries[c.name].columns
            and summaries[c.name].columns[entry].missing >= c.rows
        ]
        if without:
            found.append(f"Column {quoted(facts.name)} has no value at {joined(without)}.")
    far = [
        f"{c.name} in {quoted(c.farthest_column[0])} ({c.farthest_column[1]:+.1f})"
        for c in clients
        if c.farthest_column and abs(c.farthest_column[1]) > _FAR
    ]
    if far:
        found.append(f"More than {_FAR:g} deviation from the mean of all clients: {joined(far)}.")
    other = [f"{c.name} ({c.label_shift:.2f})" for c in clients if c.label_shift > _OTHER_LABELS]
    if other and classes:
        found.append(f"Other labels than most clients (shift above 0.5): {joined(other)}.")
    return found


def _class_warnings(clients: list[ClientFacts], classes: Mapping[str, int]) -> list[str]:
    total = sum(classes.values())
    found, single = [], []
    for label in sorted(classes):
        owners = [client.name for client in clients if label in client.classes]
        if len(owners) == 1 < len(clients):
            single.append(f"{quoted(label)} at {owners[0]}")
    if single:
        found.append(f"Classes that only one client has: {joined(single)}.")
    few = _FEW_POSITIVE if len(classes) == 2 else _RARE_CLASS
    rare = [label for label, count in classes.items() if count < few * total]
    if rare and len(classes) > 1:
        label = min(rare, key=lambda name: (classes[name], name))
        rate = _base_rate(label, clients, classes)
        lowest, highest = (
            f"{percent(share)} at {name}" for name, share in (rate.lowest, rate.highest)
        )
        better = (
            f"average precision: evaluate --positive {label} shows it first"
            if len(classes) == 2
            else "balanced accuracy and the confusion matrix of evaluate"
        )
        more = f" (and {len(rare) - 1} more classes under 5 %)" if len(rare) > 1 else ""
        found.append(
            f"Class {quoted(label)} is rare{more}: {percent(rate.share)} of all rows, from {lowest} to "
            f"{highest}. A model that never finds it has an accuracy of {percent(1 - rate.share)}, so look "
            f"at {better}."
        )
    lacking: dict[tuple[str, ...], list[str]] = {}
    for client in clients:
        absent = tuple(sorted(label for label in classes if label not in client.classes))
        if absent:
            lacking.setdefault(absent, []).append(client.name)
    if len(lacking) <= _MOST_GROUPS:
        found += [
            f"No row of class {first_few(map(quoted, absent), 3)}: {joined(names)}."
            for absent, names in lacking.items()
        ]
    else:
        names = [name for group in lacking.values() for name in group]
        found.append(f"Clients without rows of some class: {joined(names)}.")
    return found


def _number_warnings(tables: Tables, columns: list[Column]) -> list[str]:
    """Return warnings about numbers that look like ids, or like codes for missing values."""
    ids: list[str] = []
    codes: dict[float, list[str]] = {}
    for column in columns:
        if column.role != "number" or column.vector:
            continue
        parts = [own.file.columns.get(column.name) for own in tables.files]
        numbers = [np.asarray(p.numbers) for p in parts if p is not None and p.numbers is not None]
        if _looks_like_id(column.name, [part for part in numbers if len(part)]):
            ids.append(
                f"Column {quoted(column.name)} has another whole number in every row and looks like an id, "
                f"but is used as a number; add --id {column.name}."
            )
        for code in _codes(np.concatenate(numbers)):
            codes.setdefault(code, []).append(column.name)
    return ids + [
        f"{code:g} occurs repeatedly in {listed(names)}, far from all other values; if it means a missing "
        f"value, add --missing-values {code:g}."
        for code, names in codes.items()
    ]


def _codes(numbers: FloatArray) -> list[float]:
    """Return the usual codes for missing values that occur several times, outside of all other values."""
    found = []
    for code in _CODES:
        here = numbers == code
        others = numbers[~here & ~np.isnan(numbers)]
        if here.sum() < _FEW_CODES or len(np.unique(others)) < 2:
            continue
        low, high = others.min(), others.max()
        if low >= 0 > code or (code > 0 and code > high + 2 * (high - low)):
            found.append(code)
    return found


def _looks_like_id(name: str, numbers: list[FloatArray]) -> bool:
    """Return whether whole numbers never repeat and count upwards, or have the name of an id."""
    if sum(map(len, numbers)) < _FEW_ROWS:
        return False
    for part in numbers:  # a missing value is not equal to itself
        if (part != np.floor(part)).any() or len(np.unique(part)) < len(part):
            return False
    return bool(_ID_NAME.search(name)) or all((np.diff(part) == 1).all() for part in numbers)
