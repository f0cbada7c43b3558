"""Parquet and npz files, read in batches."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedgmm.data.tables.errors import TableError, quoted
from fedgmm.wording import counted

_BATCH_ROWS = 65_536
_INDEX = re.compile(r"__index_level_\d+__")  # what pandas calls an index without a name


# ---------------------------------------------------------------------- Parquet


def parquet_header(path: Path) -> list[str]:
    """Names of the columns, as they are written."""
    from pyarrow import parquet

    names = parquet.read_schema(path).names
    return ["" if _INDEX.fullmatch(name) else str(name) for name in names]


def parquet_batches(path: Path, wanted: Collection[str]) -> Iterator[pa.RecordBatch]:
    """Some columns, in the order of the file."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=list(wanted)):
            # some versions of the reader also bring a column "a.b" when asked for "a"
            mine = [name for name in batch.schema.names if name in wanted]
            yield pa.RecordBatch.from_arrays([_plain(batch.column(name)) for name in mine], mine)


def _plain(values: pa.Array) -> pa.Array:
    """Values as they are, whatever way they are stored."""
    if isinstance(values, pa.DictionaryArray):
        values = values.dictionary_decode()
    elif isinstance(values, pa.RunEndEncodedArray):
        values = pc.run_end_decode(values)
    return values


# ---------------------------------------------------------------------- npz


def npz_header(path: Path) -> list[str]:
    """Names of the columns that the arrays become."""
    return list(_npz_columns(path))


def npz_batches(path: Path, wanted: Collection[str]) -> Iterator[pa.RecordBatch]:
    """Some columns, in the order of the file."""
    columns = _npz_columns(path)
    if not columns:
        raise TableError(path, "it holds no array.")
    first, rows = next((name, len(values)) for name, values in columns.items())
    for name, values in columns.items():
        if len(values) != rows:
            raise TableError(
                path,
                f"{quoted(name)} has {counted(len(values), 'row')} where {quoted(first)} has {rows}.",
            )
    mine = {name: _arrow(path, name, values) for name, values in columns.items() if name in wanted}
    for start in range(0, rows, _BATCH_ROWS):
        part = [values[start : start + _BATCH_ROWS] for values in mine.values()]
        yield pa.RecordBatch.from_arrays(part, list(mine))


def _npz_columns(path: Path) -> dict[str, Any]:
    """One-dimensional arrays under their names; ``X`` of two dimensions as ``X_0`` and so on."""
    columns: dict[str, Any] = {}
    for name, values in _npz_arrays(path).items():
        if values.ndim == 1:
            own = {name: values}
        elif values.ndim == 2:
            own = {f"{name}_{j}": values[:, j] for j in range(values.shape[1])}
        else:
            raise TableError(
                path,
                f"{quoted(name)} has {counted(values.ndim, 'dimension')}; tables have one or two.",
            )
        twice = [column for column in own if column in columns]
        if twice:
            raise TableError(
                path, f"two arrays become the column {quoted(twice[0])}; rename one of them."
            )
        columns |= own
    return columns


def _npz_arrays(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {}
            for name in archive.files:
                arrays[name] = archive[name]
            return arrays
    except OSError:
        raise
    except Exception as error:  # a broken archive fails in many ways, all of them the file's fault
        if "Object arrays" in str(error):
            raise TableError(
                path, f"{quoted(name)} holds Python objects; save numbers or texts instead."
            ) from None
        raise TableError(path, "it is not a readable npz file.") from None


def _arrow(path: Path, name: str, values: Any) -> pa.Array:
    try:
        if values.dtype.kind == "S":
            values = np.char.decode(values, "utf-8")
        return pa.array(values.astype(values.dtype.newbyteorder("=")))
    except (pa.ArrowException, UnicodeError, ValueError):
        raise TableError(
            path, f"{quoted(name)} is of type {values.dtype}, which is no table value."
        ) from None
