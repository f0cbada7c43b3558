"""Files that come after training, as the model expects them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedgmm.data.tables.columns import categories
from fedgmm.data.tables.errors import ConversionError, TableError, quoted
from fedgmm.data.tables.files import Notify, find_tables, read_batches, read_header
from fedgmm.data.tables.first_pass import Codes, IntArray
from fedgmm.data.tables.preprocessing import Preprocessing
from fedgmm.wording import counted


@dataclass(frozen=True)
class Rows:
    """Rows of a file that came after training.

    Attributes:
        matrix: ``(n, d)`` float32.
        labels: class indices, ``(n,)``, -1 where a label is missing; ``None`` without a label column.
        clients: of each row, where the file has the client column; else ``None``.
        unknown_labels: texts that were no class in training.
        notes: what is worth knowing.
    """

    matrix: NDArray[np.float32]
    labels: IntArray | None
    clients: list[str] | None
    unknown_labels: list[str]
    notes: list[str]


def read_rows(
    path: Path,
    preprocessing: Preprocessing,
    *,
    label_needed: bool = False,
    notify: Notify = lambda _: None,
) -> Rows:
    """A later file as the model expects it; columns are found by name.

    Raises:
        TableError: a column that is missing, not known, or of another kind than in training.
    """
    find_tables([path])
    notify(f"reading {path.name}")
    header = read_header(path)
    preprocessing.check_header(path, header, label_needed=label_needed)
    as_text = {column.name for column in preprocessing.columns if column.role == "category"}
    as_text |= {preprocessing.labels.name, preprocessing.client_column or ""}
    while True:
        try:
            return _rows(path, preprocessing, header, as_text)
        except ConversionError as error:
            # a value further down is no number; as text the whole column is looked at
            if error.column in as_text:
                raise
            as_text.add(error.column)


def _rows(
    path: Path, preprocessing: Preprocessing, header: Collection[str], as_text: Collection[str]
) -> Rows:
    label, client = preprocessing.labels.name, preprocessing.client_column
    wanted = {column.name for column in preprocessing.columns if column.outputs}
    wanted |= {label, client or label}
    before = preprocessing.unknown_categories()
    parts, labels, clients, strange = [], [], Codes(), set()
    for batch in read_batches(path, as_text=as_text, only=wanted):
        parts.append(preprocessing.transform(path, batch))
        if label in header:
            own, odd = preprocessing.labels.encode(batch.column(label))
            labels.append(own)
            strange |= set(odd)
        if client is not None and client in header:
            clients.add(*categories(batch.column(client)))
    if not parts:
        raise TableError(path, "it has no rows.")
    named = None
    if clients.texts:
        named = [clients.texts[code] if code >= 0 else "" for code in clients.codes().tolist()]
    notes = [
        f"{path.name}: column {quoted(column)} has {counted(count - before.get(column, 0), 'value')} that "
        "no client had in training."
        for column, count in preprocessing.unknown_categories().items()
        if count > before.get(column, 0)
    ]
    return Rows(
        np.concatenate(parts),
        np.concatenate(labels) if labels else None,
        named,
        sorted(strange),
        notes,
    )
