"""Overview of the files of a federation: clients, columns, and warnings before training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedgmm.data.tables.agreement import DisagreementError, agree_on_columns
from fedgmm.data.tables.errors import quoted
from fedgmm.data.tables.loading import Tables
from fedgmm.data.tables.preprocessing import Column, Labels, as_classes
from fedgmm.data.tables.summaries import ClientSummary
from fedgmm.wording import counted

_FEW_ROWS = 20
_FAR = 1.0  # standard deviations
_MANY_MISSING = 0.5
_RARE_CLASS = 0.01
_FEW_POSITIVE = 0.2  # as in evaluate
_OTHER_LABELS = 0.5  # total variation distance


@dataclass(frozen=True)
class ClientFacts:
    """One client compared with all clients.

    Attributes:
        name: the client.
        rows: number of rows.
        missing: share of missing values.
        classes: how often each class occurs.
        marginal_shift: distance of the means of its number columns from those of all clients, in
            standard deviations: root mean square over columns.
        farthest_column: the column with the largest distance, and that distance.
        label_shift: total variation distance between its labels and those of all clients, 0 to 1.
    """

    name: str
    rows: int
    missing: float
    classes: dict[str, int]
    marginal_shift: float
    farthest_column: tuple[str, float] | None
    label_shift: float


@dataclass(frozen=True)
class ColumnFacts:
    """One column over all clients.

    Attributes:
        name: the column.
        role: its role in the preprocessing.
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
class Inspection:
    """Facts about clients and columns, and warnings about likely problems."""

    clients: list[ClientFacts]
    columns: list[ColumnFacts]
    classes: dict[str, int]
    warnings: list[str]

    def record(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def inspect_tables(tables: Tables) -> Inspection:
    """Describe files that :func:`read_tables` read, from their summaries alone."""
    summaries = tables.summaries
    try:
        columns, notes = agree_on_columns(summaries, tables.options)
    except DisagreementError as error:
        raise tables.error(error.client, error.problem) from None
    owned = _classes_of(tables)
    classes: Counter[str] = sum(owned.values(), Counter())
    rows = sum(summary.rows for summary in summaries.values())
    clients = [
        _client(name, own, columns, owned[name], classes, tables.options.left_out)
        for name, own in summaries.items()
    ]
    facts = [_column(column, summaries, rows) for column in columns]
    warnings = [
        *tables.notes,
        *(note for note in notes if note not in tables.notes),
        *_label_problems(tables),
        *_warnings(clients, facts, summaries, classes),
    ]
    return Inspection(clients, facts, dict(sorted(classes.items())), warnings)


def _classes_of(tables: Tables) -> dict[str, Counter[str]]:
    """Count the classes of each client; ``1`` and ``1.0`` may be the same class."""
    counts: dict[str, Counter[str]] = {client: Counter() for client in tables.summaries}
    if tables.options.label is None:
        return counts
    classes = as_classes(text for own in tables.summaries.values() for text in own.labels)
    for client, own in tables.summaries.items():
        for text, count in own.labels.items():
            counts[client][str(classes[text])] += count
    return counts


def _label_problems(tables: Tables) -> list[str]:
    """Return the reason why the labels cannot be learned, if there is one."""
    label, task = tables.options.label, tables.options.task
    if label is None:
        return []
    try:
        Labels.agreed(label, [own.labels for own in tables.summaries.values()], task)
    except ValueError as error:
        return [str(error)]
    return []


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
        mine = own.columns.get(column.name)
        if column.role in ("number", "date") and mine is not None and mine.count:
            gaps[column.name] = (mine.mean - column.mean) / column.scale
    shift = math.sqrt(sum(gap**2 for gap in gaps.values()) / len(gaps)) if gaps else 0.0
    farthest = max(gaps, key=lambda column: abs(gaps[column]), default=None)
    return ClientFacts(
        name,
        own.rows,
        missing,
        dict(sorted(labels.items())),
        shift,
        None if farthest is None else (farthest, gaps[farthest]),
        _total_variation(labels, classes),
    )


def _total_variation(own: Mapping[str, int], whole: Mapping[str, int]) -> float:
    mine, all_ = sum(own.values()), sum(whole.values())
    if not mine or not all_:
        return 0.0
    return 0.5 * sum(abs(own.get(label, 0) / mine - whole[label] / all_) for label in whole)


def _column(column: Column, summaries: Mapping[str, ClientSummary], rows: int) -> ColumnFacts:
    missing = sum(
        own.columns[column.name].missing if column.name in own.columns else own.rows
        for own in summaries.values()
    )
    match column.role:
        case "number":
            detail = f"mean {column.mean:.4g}, deviation {column.scale:.4g}"
        case "date":
            detail = f"days, deviation {column.scale:.4g}"
        case "category":
            shown = ", ".join(quoted(category)[1:-1] for category in column.categories[:6])
            detail = shown + (", …" if len(column.categories) > 6 else "")
        case _:
            detail = column.reason
    share = missing / max(rows, 1)
    return ColumnFacts(column.name, column.role, share, len(column.outputs), detail)


def _warnings(
    clients: list[ClientFacts],
    columns: list[ColumnFacts],
    summaries: Mapping[str, ClientSummary],
    classes: Mapping[str, int],
) -> list[str]:
    found = []
    used = {facts.name for facts in columns if facts.role != "ignored"}
    # warnings about all clients come first, because callers may show only the first few
    found += [
        f"Column {quoted(facts.name)} lacks {100 * facts.missing:.0f} % of its values."
        for facts in columns
        if facts.name in used and facts.missing > _MANY_MISSING
    ]
    total = sum(classes.values())
    if len(classes) == 2 and min(classes.values()) < _FEW_POSITIVE * total:
        rarer = min(classes, key=lambda label: classes[label])
        found.append(
            f"Only {100 * classes[rarer] / total:.1f} % of the rows are of class {quoted(rarer)}, so "
            "accuracy says little; evaluate leads with average precision."
        )
    for label, count in classes.items():
        owners = [client.name for client in clients if label in client.classes]
        if len(owners) == 1 and len(clients) > 1:
            found.append(f"Class {quoted(label)} occurs only at {owners[0]}.")
        elif count < _RARE_CLASS * total:
            found.append(f"Class {quoted(label)} is rare: {count} of {counted(total, 'row')}.")
    for client in clients:
        if client.rows < _FEW_ROWS:
            found.append(
                f"{client.name} has only {counted(client.rows, 'row')}; its figures will be noisy."
            )
        absent = sorted(label for label in classes if label not in client.classes)
        if absent:
            found.append(f"{client.name} has no row of class {_some(absent)}.")
        found += [
            f"{client.name} has no value in column {quoted(column)}."
            for column, own in summaries[client.name].columns.items()
            if column in used and own.missing >= client.rows
        ]
        if client.farthest_column and abs(client.farthest_column[1]) > _FAR:
            column, gap = client.farthest_column
            found.append(
                f"{client.name} lies {gap:+.1f} standard deviations from the mean of all clients in column "
                f"{quoted(column)}."
            )
        if client.label_shift > _OTHER_LABELS:
            found.append(
                f"{client.name} has other labels than most clients (shift {client.label_shift:.2f})."
            )
    return found


def _some(labels: list[str]) -> str:
    return ", ".join(map(quoted, labels[:3])) + (", …" if len(labels) > 3 else "")
