"""Files of rows (CSV, TSV, Parquet, npz): find them, and read each column once."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedgmm.data.tables.columns import (
    PLAIN,
    ColumnValues,
    FileFormat,
    column_values,
    stored_kind,
    table_on_disk,
)
from fedgmm.data.tables.errors import TableError, listed, quoted
from fedgmm.data.tables.text_files import Dialect, parse_text, sniff
from fedgmm.support.scratch import active, released_at_once
from fedgmm.wording import counted

_SUFFIXES = (".csv", ".tsv", ".parquet", ".npz", ".csv.gz", ".tsv.gz")
_OTHER_TEXT = (".txt", ".dat", ".data", ".txt.gz", ".dat.gz", ".data.gz")
"""Endings of text files that are read if they are named, but not looked for in folders."""

_BATCH_ROWS = 16_384  # of a Parquet file, where it is not read at once

Place = tuple[str, int | None]
"""The name of a column in a file and, for a column of vectors, an entry."""

_INDEX = re.compile(r"__index_level_\d+__")  # the name that pandas gives to an unnamed index

Notify = Callable[[str], None]
"""Called with one line before each step."""


# ---------------------------------------------------------------------- find files


def find_tables(sources: Iterable[str | Path]) -> list[Path]:
    """Return the files that names, folders and patterns such as ``site_*.csv`` lead to, each once.

    Raises:
        TableError: a source without any table.
    """
    found: list[Path] = []
    for source in sources:
        try:
            found += _tables_of(source)
        except OSError as error:
            raise TableError(source, f"it cannot be opened ({error.strerror}).") from None
    if not found:
        raise ValueError("No files were given; name at least one, such as site_*.csv.")
    return list({path.absolute(): path for path in found}.values())


def path_of(source: str | Path) -> Path:
    """Return the path of a file, or raise ``TypeError`` if a table in memory is given instead."""
    if not isinstance(source, (str, PathLike)):
        raise TypeError(
            f"The path of a file is needed, got {type(source).__name__}; write the table to a file first."
        )
    return Path(source)


def _tables_of(source: str | Path) -> list[Path]:
    path = path_of(source)
    if path.is_dir():
        here = sorted(child for child in path.iterdir() if _is_table(child) and child.is_file())
        if not here:
            raise TableError(
                path,
                f"the folder holds no table ({', '.join(_SUFFIXES)}); for images, fit takes --images, and "
                "fedgmm embed turns them into tables.",
            )
        return here
    here = [path] if path.is_file() else []
    if not here and "\x00" not in str(source):  # not allowed in a file name, so glob would raise
        matching = map(Path, glob.glob(str(source), recursive=True))  # noqa: PTH207 - any folder
        here = sorted(path for path in matching if path.is_file())
    if not here:
        raise TableError(source, "there is no such file; check the name.")
    for child in here:
        if not _is_table(child, (*_SUFFIXES, *_OTHER_TEXT)):
            raise TableError(
                child, f"this kind of file cannot be read; use one of {', '.join(_SUFFIXES)}."
            )
    return here


def client_name(path: Path) -> str:
    """Return the client whose rows a file holds: ``oslo`` for ``data/oslo.csv.gz``."""
    name = path.name
    for suffix in sorted((*_SUFFIXES, *_OTHER_TEXT), key=len, reverse=True):
        if name.lower().endswith(suffix):
            return name[: -len(suffix)] or name
    return path.stem


def _is_table(path: Path, endings: tuple[str, ...] = _SUFFIXES) -> bool:
    return path.name.lower().endswith(endings) and not path.name.startswith(".")


def memory_needed(path: Path) -> int:
    """Return about how many bytes of memory training on a file takes if it is not kept on disk.

    A number takes about 24 bytes: parsed, as a column, and in the splits. In text it takes about 8.
    """
    size, lowered = path.stat().st_size, path.name.lower()
    try:
        if lowered.endswith(".parquet"):
            from pyarrow import parquet

            found = parquet.read_metadata(path)
            groups = map(found.row_group, range(found.num_row_groups))
            columns = range(found.num_columns)  # a vector has as many values as entries
            return 24 * sum(int(group.column(j).num_values) for group in groups for j in columns)
    except (OSError, pa.ArrowException):  # the reader explains it
        return size
    return (12 if lowered.endswith(".gz") else 3) * size


# ---------------------------------------------------------------------- read files


class TableFile:
    """One file whose header is read at once and whose columns are read on demand and kept.

    Attributes:
        path: the file; its ending says how it is stored.
        header: names of the columns without surrounding blanks, and their places in the file. A column
            without a name is left out, because it is an index that some program wrote.
            Each entry of a column of vectors ``v`` is here a column: ``v_0``, ``v_1`` and so on.
        columns: the values of the columns that were read.
        rows: number of rows, known after the first read.
        vectors: columns of vectors and their lengths.
        written: what is known about the format of the file.
    """

    def __init__(
        self, path: Path, notify: Notify = lambda _: None, written: FileFormat = PLAIN
    ) -> None:
        """Read the header; ``notify`` is called with a line before the file is parsed."""
        self.path, self.written, self._notify = path, written, notify
        self.columns: dict[str, ColumnValues] = {}
        self.rows = 0
        self.vectors: dict[str, int] = {}
        self._dialect: Dialect | None = None
        self._state = self._current_state()
        headers = {".parquet": _parquet_header, ".npz": _npz_header}
        try:
            if path.suffix.lower() in headers:
                columns = headers[path.suffix.lower()](path)
            else:
                self._dialect = sniff(path, written)
                columns = [(name, None) for name in self._dialect.header]
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(path, error) from None
        self.header: dict[str, Place] = {}
        for place, width in columns:
            name = place.removeprefix("\ufeff").strip()
            own: dict[str, Place] = {name: (place, None)}
            if width is not None:
                self.vectors[name] = width
                own = {f"{name}_{j}": (place, j) for j in range(width)}
            for one in own:
                if one in self.header:
                    raise TableError(
                        path, f"the column {quoted(one)} appears twice; rename one of them."
                    )
            if name:
                self.header |= own
        if not self.header:
            first = listed([place for place, _ in columns])
            raise TableError(
                path, f"no column has a name (the first line is {first}); write the names into it."
            )

    @property
    def looks_headless(self) -> bool:
        """Whether the first line looks like values although it is read as the header."""
        return self._dialect is not None and self._dialect.looks_headless

    def ignore_vectors(self, names: Collection[str]) -> None:
        """Count some columns of vectors as single columns, which cannot be read."""
        for name in [name for name in self.vectors if name in names]:
            for entry in range(self.vectors.pop(name)):
                del self.header[f"{name}_{entry}"]
            self.header[name] = (name, None)

    def read(
        self, names: Collection[str], as_text: Collection[str] = (), *, compact: bool = False
    ) -> None:
        """Read columns that are not kept yet, in one pass over the file.

        A column that is kept as numbers is read again if it is in ``as_text``, because numbers do not
        keep how they were written. Names that the file does not have are skipped. ``compact`` saves memory
        while many files are kept, see :class:`~fedgmm.data.tables.columns.Decimals`, but takes time.
        """
        wanted = {
            name: place
            for name, place in self.header.items()
            if name in names
            and (
                name not in self.columns or (name in as_text and not self.columns[name].as_written)
            )
        }
        if not wanted:
            return
        self.check_unchanged()
        again = [name for name in wanted if name in self.columns]
        reason = f" again: {listed(again)} is needed as text" if again else ""
        self._notify(f"reading {self.path.name}{reason}")
        try:
            if self._dialect is not None:
                names_there = {name: place for name, (place, _) in wanted.items()}
                missing = self.written.missing_values
                table = parse_text(self.path, self._dialect, names_there, as_text, missing)
            else:
                load = _read_npz if self.path.suffix.lower() == ".npz" else _read_parquet
                table = load(self.path, wanted)
            if not table.num_rows:
                raise TableError(self.path, "it has no rows.")
            self.rows = table.num_rows
            # a column uses the pages of one of these arrays only
            kinds = (np.float64, np.int32) if compact and not active() else ()
            room = [released_at_once((len(wanted), self.rows), kind) for kind in kinds]
            columns = table.columns[::-1]
            del table  # each column is released after it is converted
            for place, name in enumerate(wanted):
                values = columns.pop()
                kind = stored_kind(values.type)
                if kind is None:
                    shown = quoted(str(values.type))[1:-1]
                    problem = (
                        f"the column {quoted(name)} holds {shown}, which is not a type for tables."
                    )
                    raise TableError(self.path, problem)
                text = name in as_text and kind != "empty"
                out = [array[place] for array in room]
                found = column_values(values, self.written, as_text=text, out=out)
                self.columns[name] = found.on_disk()
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(self.path, error) from None

    def check_unchanged(self) -> None:
        """Raise :class:`TableError` if the file changed since its header was read."""
        if self._current_state() != self._state:
            raise TableError(
                self.path, "it changed while it was read; try again when no program writes to it."
            )

    def is_unchanged(self) -> bool:
        """Return whether the file is still there as it was when its header was read."""
        try:
            return self._current_state() == self._state
        except TableError:
            return False

    def _current_state(self) -> tuple[int, int]:
        """Return the size of the file and the time of its last change."""
        try:
            found = self.path.stat()
        except OSError as error:
            raise _unreadable(self.path, error) from None
        return found.st_size, found.st_mtime_ns


def _unreadable(path: Path, error: Exception) -> TableError:
    if isinstance(error, OSError) and error.strerror:
        return TableError(path, f"it cannot be read ({error.strerror}).")
    return TableError(path, "it is damaged, or it is not the kind of file that its ending says.")


# ---------------------------------------------------------------------- Parquet


def _parquet_header(path: Path) -> list[tuple[str, int | None]]:
    """Return the names of all columns and, for columns of vectors, their lengths."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        return [
            (
                "" if _INDEX.fullmatch(field.name) else str(field.name),
                _vector_width(path, field, file),
            )
            for field in file.schema_arrow
        ]


def _vector_width(path: Path, field: pa.Field, file: Any) -> int | None:
    """Return the length of the vectors of a column; ``None`` for a column without vectors."""
    kind, types = field.type, pa.types
    fixed = types.is_fixed_size_list(kind)
    if not (fixed or types.is_list(kind) or types.is_large_list(kind)):
        return None
    if not (types.is_floating(kind.value_type) or types.is_integer(kind.value_type)):
        return None
    if fixed:
        return int(kind.list_size)
    for batch in file.iter_batches(1024, columns=[field.name]):
        lengths = pc.unique(pc.list_value_length(batch.column(0)).drop_null()).to_pylist()
        if len(lengths) > 1:
            raise _other_lengths(path, field.name, lengths)
        if lengths:
            return int(lengths[0])
    return None


def _other_lengths(path: Path, name: str, lengths: Collection[int]) -> TableError:
    few, many = sorted(lengths)[0], sorted(lengths)[-1]
    return TableError(
        path,
        f"the vectors of column {quoted(name)} have different lengths, such as {few} and {many}; "
        "vectors must have one length.",
    )


def _read_parquet(path: Path, places: Mapping[str, Place]) -> pa.Table:
    from pyarrow import parquet

    # the columns in the file, and whether they hold vectors
    stored = {column: entry is not None for column, entry in places.values()}

    def plain(found: pa.Table) -> pa.Table:
        # asked for "a", some versions of the reader also bring a column "a.b"
        held: dict[str, Any] = {name: _decoded(found.column(name)) for name in stored}
        held |= {name: _entries(path, name, held[name]) for name in stored if stored[name]}
        return pa.table({n: held[c] if j is None else held[c][j] for n, (c, j) in places.items()})

    # read ahead, a file would be in memory as a whole before its last batch
    with parquet.ParquetFile(path, pre_buffer=not active()) as file:
        if not active():
            return plain(file.read(columns=list(stored)))
        batches = file.iter_batches(_BATCH_ROWS, columns=list(stored))
        tables = (plain(pa.Table.from_batches([batch])) for batch in batches)
        schema = plain(file.schema_arrow.empty_table()).schema
        return table_on_disk(schema, (part for table in tables for part in table.to_batches()))


def _entries(path: Path, name: str, vectors: pa.ChunkedArray) -> list[pa.Array]:
    """Return a column of vectors as one column per entry; a missing vector has no entries."""
    vectors = vectors.combine_chunks()
    if isinstance(vectors, pa.ChunkedArray):
        vectors = vectors.chunk(0) if vectors.num_chunks else pa.array([], vectors.type)
    lengths = pc.unique(pc.list_value_length(vectors).drop_null()).to_pylist()
    if len(lengths) > 1:
        raise _other_lengths(path, name, lengths)
    width = vectors.type.list_size if pa.types.is_fixed_size_list(vectors.type) else None
    width = width if width is not None else (lengths[0] if lengths else 0)
    flat = pc.list_flatten(vectors)  # without the missing vectors
    numbers = flat.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, width)
    whole = np.full((len(vectors), width), np.nan, dtype=np.float32)
    whole[vectors.is_valid().to_numpy(zero_copy_only=False)] = numbers
    return [pa.array(column) for column in np.ascontiguousarray(whole.T)]


def _decoded(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return plain values for dictionary and run-end encoded ones."""
    if pa.types.is_dictionary(values.type):
        return values.cast(values.type.value_type)
    if pa.types.is_run_end_encoded(values.type):
        return pa.chunked_array([pc.run_end_decode(chunk) for chunk in values.chunks])
    return values


# ---------------------------------------------------------------------- npz


def _npz_header(path: Path) -> list[tuple[str, int | None]]:
    """Return the names of all arrays and, for matrices, their numbers of columns."""
    arrays = _npz_arrays(path)
    for name, values in arrays.items():
        if values.ndim not in (1, 2):
            raise TableError(
                path,
                f"{quoted(name)} has {counted(values.ndim, 'dimension')}; tables have one or two.",
            )
    return [(n, None if values.ndim == 1 else values.shape[1]) for n, values in arrays.items()]


def _read_npz(path: Path, places: Mapping[str, Place]) -> pa.Table:
    arrays = _npz_arrays(path)
    first, rows = next((name, len(values)) for name, values in arrays.items())
    for name, values in arrays.items():
        if len(values) != rows:
            raise TableError(
                path,
                f"{quoted(name)} has {counted(len(values), 'row')}, but {quoted(first)} has {rows}.",
            )
    return pa.table(
        {
            name: _arrow(path, name, arrays[c] if j is None else arrays[c][:, j])
            for name, (c, j) in places.items()
        }
    )


def _npz_arrays(path: Path) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    name = ""
    try:
        with np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                arrays[name] = archive[name]
    except OSError:
        raise
    except Exception as error:  # a damaged archive fails in many ways
        if "Object arrays" in str(error):
            raise TableError(
                path, f"{quoted(name)} holds Python objects; save numbers or texts instead."
            ) from None
        raise TableError(path, "it is not a readable npz file.") from None
    return arrays


def _arrow(path: Path, name: str, values: Any) -> pa.Array:
    try:
        if values.dtype.kind == "S":
            values = np.char.decode(values, "utf-8")
        return pa.array(values.astype(values.dtype.newbyteorder("=")))
    except (pa.ArrowException, UnicodeError, ValueError):
        raise TableError(
            path, f"{quoted(name)} is of type {values.dtype}, which is not a type for tables."
        ) from None
