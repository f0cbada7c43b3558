"""Files of rows: CSV, TSV, Parquet and npz, read in batches."""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from fedgmm.data.tables.binary_files import (
    npz_batches,
    npz_header,
    parquet_batches,
    parquet_header,
)
from fedgmm.data.tables.columns import stored_kind
from fedgmm.data.tables.errors import ConversionError, TableError, listed, quoted
from fedgmm.data.tables.text_files import MISSING, sniff, text_batches

__all__ = [
    "MISSING",
    "ConversionError",
    "Notify",
    "TableError",
    "client_name",
    "find_tables",
    "read_batches",
    "read_header",
]

_SUFFIXES = (".csv", ".tsv", ".parquet", ".npz", ".csv.gz", ".tsv.gz")

Notify = Callable[[str], None]
"""Called with a line that says what is being done."""


# ---------------------------------------------------------------------- which files


def find_tables(sources: Iterable[str | Path]) -> list[Path]:
    """Files from names, folders and patterns such as ``site_*.csv``, each once.

    Raises:
        TableError: a source that leads to no table.
    """
    found: list[Path] = []
    for source in sources:
        try:
            found += _tables_of(source)
        except OSError as error:
            raise TableError(source, f"it cannot be opened ({error.strerror}).") from None
    if not found:
        raise ValueError("No files were given; name at least one, such as site_*.csv.")
    once: dict[Path, Path] = {}
    for path in found:
        once.setdefault(path.absolute(), path)
    return list(once.values())


def _tables_of(source: str | Path) -> list[Path]:
    path = Path(source)
    if path.is_dir():
        here = sorted(child for child in path.iterdir() if _is_table(child) and child.is_file())
        if not here:
            raise TableError(path, f"the folder holds no table ({', '.join(_SUFFIXES)}).")
        return here
    here = [path] if path.is_file() else _matching(str(source))
    if not here:
        raise TableError(source, "there is no such file; check the name.")
    for child in here:
        if not _is_table(child):
            raise TableError(
                child, f"this kind of file cannot be read; use one of {', '.join(_SUFFIXES)}."
            )
    return here


def _matching(pattern: str) -> list[Path]:
    if "\x00" in pattern:  # no file has such a name
        return []
    found = (Path(name) for name in glob.glob(pattern, recursive=True))  # noqa: PTH207 - any folder
    return sorted(path for path in found if path.is_file())


def client_name(path: Path) -> str:
    """The client whose rows a file holds: ``oslo`` for ``data/oslo.csv.gz``."""
    name = path.name
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if name.lower().endswith(suffix):
            return name[: -len(suffix)] or name
    return path.stem


def _is_table(path: Path) -> bool:
    return path.name.lower().endswith(_SUFFIXES) and not path.name.startswith(".")


# ---------------------------------------------------------------------- reading


def read_header(path: Path) -> dict[str, str]:
    """Names of the columns without surrounding blanks, and what the file calls them.

    A column without a name is an index that some program wrote; it is left out.

    Raises:
        TableError: a file that cannot be read, or two columns of one name.
    """
    lowered = path.name.lower()
    try:
        if lowered.endswith(".parquet"):
            raw = parquet_header(path)
        elif lowered.endswith(".npz"):
            raw = npz_header(path)
        else:
            raw = list(sniff(path).header)
    except TableError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None
    return {name: old for name, old in zip(_checked_names(path, raw), raw, strict=True) if name}


def _checked_names(path: Path, names: Collection[str]) -> list[str]:
    """Column names without surrounding blanks; they must differ where they are not empty."""
    stripped = [str(name).removeprefix("\ufeff").strip() for name in names]
    seen: set[str] = set()
    for name in stripped:
        if name and name in seen:
            raise TableError(path, f"the column {quoted(name)} appears twice; rename one of them.")
        seen.add(name)
    if not any(stripped):
        raise TableError(path, f"no column has a name (the first line is {listed(list(names))}).")
    return stripped


def read_batches(
    path: Path,
    *,
    as_text: Collection[str] = (),
    only: Collection[str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Rows of a file, some thousands at a time; every batch has the same columns.

    Args:
        path: the file; its ending says what it is.
        as_text: columns whose values are wanted as they are written.
        only: the columns that are wanted; ``None`` means all. A column that is not there is no error.

    Raises:
        TableError: a file that cannot be read, with the reason in one sentence.
    """
    header = read_header(path)
    wanted = {name: raw for name, raw in header.items() if only is None or name in only}
    if not wanted:
        return
    lowered = path.name.lower()
    try:
        if lowered.endswith(".parquet"):
            batches = _renamed(parquet_batches(path, list(wanted.values())), wanted)
        elif lowered.endswith(".npz"):
            batches = _renamed(npz_batches(path, list(wanted.values())), wanted)
        else:
            batches = text_batches(path, wanted, as_text)
        for batch in batches:
            if len(batch):
                yield _cleaned(batch, as_text)
    except TableError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None


def _renamed(
    batches: Iterator[pa.RecordBatch], wanted: Mapping[str, str]
) -> Iterator[pa.RecordBatch]:
    new = {raw: name for name, raw in wanted.items()}
    for batch in batches:
        yield batch.rename_columns([new[raw] for raw in batch.schema.names])


def _unreadable(path: Path, error: Exception) -> TableError:
    if isinstance(error, OSError) and error.strerror:
        return TableError(path, f"it cannot be read ({error.strerror}).")
    return TableError(path, "it is damaged, or no file of the kind that its ending says.")


# ---------------------------------------------------------------------- cleaning


def _cleaned(batch: pa.RecordBatch, as_text: Collection[str]) -> pa.RecordBatch:
    """Text without surrounding blanks, missing where it says so; other types as text if wanted."""
    columns = []
    for field, values in zip(batch.schema, batch.columns, strict=True):
        kind = field.type
        if _is_stored_text(kind) or (field.name in as_text and _is_plain(kind)):
            values = values.cast(pa.string())
        columns.append(_without_blanks(values) if pa.types.is_string(values.type) else values)
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _is_stored_text(kind: pa.DataType) -> bool:
    """Texts of any make; old programs do not say that their bytes are text."""
    types = pa.types
    return bool(
        types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


def _is_plain(kind: pa.DataType) -> bool:
    return stored_kind(kind) not in (None, "empty")


def _without_blanks(values: pa.Array) -> pa.Array:
    trimmed = pc.utf8_trim_whitespace(values)
    missing = pc.is_in(trimmed, value_set=pa.array(MISSING))
    return pc.if_else(missing, pa.scalar(None, pa.string()), trimmed)
