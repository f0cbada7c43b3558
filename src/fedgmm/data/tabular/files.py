"""Files of rows: CSV, TSV, Parquet and npz, read in batches."""

from __future__ import annotations

import csv
import glob
import gzip
import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

MISSING = (
    "", "NA", "N/A", "n/a", "na", "#N/A", "#NA", "<NA>", "?", "nan", "NaN", "NAN", "-nan", "-NaN",
    "null", "NULL", "Null", "None",
)  # fmt: skip
"""What a missing value is written as."""

_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")
_SUFFIXES = (".csv", ".tsv", ".parquet", ".npz", ".csv.gz", ".tsv.gz")
_SEPARATORS = ",;\t|"
_SAMPLE_BYTES = 256 * 1024
_WHOLE_FILE_BYTES = 48 * 1024 * 1024  # larger files are streamed, smaller ones read at once
_BLOCK_BYTES = 4 * 1024 * 1024
_BATCH_ROWS = 65_536
_EXPLAINED = 200  # characters of a reader's own words in a message


class TableError(ValueError):
    """A file that cannot be used, with its name, what is wrong and where."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = Path(path)


# ---------------------------------------------------------------------- which files


def find_tables(sources: Iterable[str | Path]) -> list[Path]:
    """Files from names, folders and patterns such as ``site_*.csv``, each once.

    Raises:
        TableError: a source that leads to no table.
    """
    found: list[Path] = []
    for source in sources:
        path = Path(source)
        if path.is_dir():
            here = sorted(child for child in path.iterdir() if _is_table(child))
            if not here:
                raise TableError(path, f"the folder holds no table ({', '.join(_SUFFIXES)}).")
        elif path.is_file():
            here = [path]
        else:
            here = sorted(Path(name) for name in glob.glob(str(source)))  # noqa: PTH207 - any folder
            here = [child for child in here if child.is_file()]
            if not here:
                raise TableError(source, "there is no such file; check the name.")
        for child in here:
            if not _is_table(child):
                raise TableError(
                    child, f"this kind of file cannot be read; use one of {', '.join(_SUFFIXES)}."
                )
        found += here
    if not found:
        raise ValueError("No files were given; name at least one, such as site_*.csv.")
    return list(dict.fromkeys(found))


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


def read_batches(
    path: Path,
    *,
    as_text: Collection[str] = (),
    types: Mapping[str, pa.DataType] | None = None,
    only: Collection[str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Rows of a file, some thousands at a time; every batch has the same columns.

    Args:
        path: the file; its ending says what it is.
        as_text: columns whose values are wanted as they are written.
        types: types of columns of a text file, where they are known already.
        only: the columns that are wanted; ``None`` means all. A column that is not there is no error.

    Raises:
        TableError: a file that cannot be read, with the reason in one sentence.
    """
    lowered = path.name.lower()
    try:
        if lowered.endswith(".parquet"):
            batches = _parquet_batches(path, only)
        elif lowered.endswith(".npz"):
            batches = _npz_batches(path)
        else:
            batches = _text_batches(path, frozenset(as_text), dict(types or {}), only)
        for batch in batches:
            yield _as_written(batch, as_text)
    except TableError:
        raise
    except pa.ArrowInvalid as error:
        raise TableError(path, _explain(error)) from None
    except OSError as error:
        raise TableError(path, f"it cannot be read ({error.strerror or error}).") from None


def _as_written(batch: pa.RecordBatch, as_text: Collection[str]) -> pa.RecordBatch:
    """Typed columns (of Parquet and npz) as text, where that is asked for."""
    for index, field in enumerate(batch.schema):
        if field.name in as_text and not _is_text(field.type) and not pa.types.is_null(field.type):
            values = batch.column(index).cast(pa.string())
            batch = batch.set_column(index, field.name, values)
    return batch


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _explain(error: pa.ArrowInvalid) -> str:
    """A reader's complaint in one line."""
    text = " ".join(str(error).split())
    # the streaming reader numbers columns from zero, rows from one
    text = text.removeprefix("CSV parse error: ")
    if text == "Empty CSV file":
        return "the file is empty."
    if "straddling object" in text or "out of sync" in text:
        return "a quote is opened and never closed, or a line is too long."
    if match := re.match(r"(?:Row #(\d+): )?Expected (\d+) columns, got (\d+)", text):
        row, expected, got = match.groups()
        where = f"row {row} (the header is row 1)" if row else "a row"
        return f"{where} has {got} values where the header has {expected} columns."
    return f"it cannot be read: {text[:_EXPLAINED].rstrip('.')}."


def _named(path: Path, names: Iterable[str]) -> list[str]:
    """Column names without surrounding blanks; they must differ."""
    stripped = [str(name).strip().removeprefix("\ufeff") for name in names]
    seen: set[str] = set()
    for name in stripped:
        if name and name in seen:
            raise TableError(path, f"the column {name!r} appears twice; rename one of them.")
        seen.add(name)
    return stripped


# ---------------------------------------------------------------------- Parquet and npz


def _parquet_batches(path: Path, only: Collection[str] | None) -> Iterator[pa.RecordBatch]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        raw = file.schema_arrow.names
        names = _named(path, raw)
        wanted = [old for old, new in zip(raw, names, strict=True) if only is None or new in only]
        clean = dict(zip(raw, names, strict=True))
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=wanted):
            plain = [
                column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column
                for column in batch.columns
            ]
            yield pa.RecordBatch.from_arrays(plain, [clean[name] for name in batch.schema.names])


def _npz_batches(path: Path) -> Iterator[pa.RecordBatch]:
    columns = _npz_columns(path)
    lengths = {name: len(values) for name, values in columns.items()}
    if not lengths:
        raise TableError(path, "it holds no array.")
    rows = next(iter(lengths.values()))
    for name, length in lengths.items():
        if length != rows:
            first = next(iter(lengths))
            raise TableError(path, f"{name!r} has {length} rows where {first!r} has {rows}.")
    names = _named(path, columns)
    for start in range(0, max(rows, 1), _BATCH_ROWS):
        part = [pa.array(values[start : start + _BATCH_ROWS]) for values in columns.values()]
        yield pa.RecordBatch.from_arrays(part, names)


def _npz_columns(path: Path) -> dict[str, Any]:
    """One-dimensional arrays under their names; ``X`` of two dimensions as ``X_0`` and so on."""
    columns: dict[str, Any] = {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                values = archive[name]
                if values.ndim == 1:
                    columns[name] = values
                elif values.ndim == 2:
                    columns |= {f"{name}_{j}": values[:, j] for j in range(values.shape[1])}
                else:
                    raise TableError(
                        path, f"{name!r} has {values.ndim} dimensions; tables have one or two."
                    )
    except TableError:
        raise
    except Exception as error:  # a broken archive fails in many ways, all of them the file's fault
        raise TableError(path, f"it is not a readable npz file ({_short(error)}).") from None
    return columns


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:_EXPLAINED].rstrip(".") or type(error).__name__


# ---------------------------------------------------------------------- text files


@dataclass(frozen=True)
class Dialect:
    """How a text file is written.

    Attributes:
        header: column names as they stand in the first line.
        separator: between values.
        decimal_point: ``"."`` or ``","``.
        encoding: of the characters.
        long_values: a quoted value may hold line breaks.
    """

    header: tuple[str, ...]
    separator: str = ","
    decimal_point: str = "."
    encoding: str = "utf8"
    long_values: bool = False


def sniff(path: Path) -> Dialect:
    """Look at the beginning of a text file."""
    with _bytes_of(path) as file:
        sample = file.read(_SAMPLE_BYTES)
    if not sample.strip():
        raise TableError(path, "the file is empty.")
    text, encoding = _decode(path, sample)
    lines = text.splitlines()
    first = next(line for line in lines if line.strip())
    separator = "\t" if ".tsv" in path.name.lower() else _separator(first)
    header = tuple(next(csv.reader(io.StringIO(text.lstrip("\r\n")), delimiter=separator)))
    if all(_is_number(name) for name in header):
        raise TableError(
            path, "it seems to have no header: the first line holds numbers where names belong."
        )
    comma = separator != "," and _has_decimal_commas(lines[1:200], separator)
    return Dialect(header, separator, "," if comma else ".", encoding, '"' in text)


def _bytes_of(path: Path) -> IO[bytes]:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def _decode(path: Path, sample: bytes) -> tuple[str, str]:
    if sample.startswith((b"\xff\xfe", b"\xfe\xff")):
        return sample.decode("utf-16", errors="ignore"), "utf-16"
    if b"\x00" in sample:
        raise TableError(path, "it is not a text file; is its ending right?")
    try:
        # the sample may end within a character
        return sample.decode("utf-8-sig", errors="strict"), "utf8"
    except UnicodeDecodeError as error:
        if error.start >= len(sample) - 4:
            return sample[: error.start].decode("utf-8-sig"), "utf8"
        return sample.decode("cp1252", errors="replace"), "cp1252"


def _separator(line: str) -> str:
    """The separator that stands most often in the header, outside quotes."""
    outside = re.sub(r'"[^"]*"', "", line)
    return max(_SEPARATORS, key=lambda mark: (outside.count(mark), -_SEPARATORS.index(mark)))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _has_decimal_commas(lines: list[str], separator: str) -> bool:
    values = [value.strip(' "') for line in lines for value in line.split(separator)]
    commas = sum(bool(re.fullmatch(r"[+-]?\d+,\d+", value)) for value in values)
    points = sum(bool(re.fullmatch(r"[+-]?\d+\.\d+", value)) for value in values)
    return commas > points


def _text_batches(
    path: Path, as_text: frozenset[str], types: dict[str, pa.DataType], only: Collection[str] | None
) -> Iterator[pa.RecordBatch]:
    dialect = sniff(path)
    names = _named(path, dialect.header)
    raw = dict(zip(names, dialect.header, strict=True))
    known = {name: kind for name, kind in types.items() if name in raw}
    known |= {name: pa.string() for name in as_text if name in raw}
    # a column without a name is an index that some program wrote
    wanted = [name for name in names if name and (only is None or name in only)]
    if not wanted:
        return
    large = path.stat().st_size > _WHOLE_FILE_BYTES or path.name.lower().endswith(".gz")
    read = _streamed if large else _read_whole
    for batch in read(path, dialect, raw, known, wanted):
        yield batch.rename_columns(wanted)


def _options(
    dialect: Dialect, raw: dict[str, str], known: dict[str, pa.DataType], wanted: list[str]
) -> dict[str, Any]:
    from pyarrow import csv as arrow_csv

    return {
        "read_options": arrow_csv.ReadOptions(block_size=_BLOCK_BYTES, encoding=dialect.encoding),
        "parse_options": arrow_csv.ParseOptions(
            delimiter=dialect.separator, newlines_in_values=dialect.long_values
        ),
        "convert_options": arrow_csv.ConvertOptions(
            column_types={raw[name]: kind for name, kind in known.items()},
            include_columns=[raw[name] for name in wanted],
            null_values=list(MISSING),
            strings_can_be_null=True,
            true_values=list(_TRUE),
            false_values=list(_FALSE),
            decimal_point=dialect.decimal_point,
        ),
    }


def _read_whole(
    path: Path,
    dialect: Dialect,
    raw: dict[str, str],
    known: dict[str, pa.DataType],
    wanted: list[str],
) -> Iterator[pa.RecordBatch]:
    """The whole file at once: types are inferred from all of its rows."""
    from pyarrow import csv as arrow_csv

    with pa.OSFile(str(path), "rb") as file:
        table = arrow_csv.read_csv(file, **_options(dialect, raw, known, wanted))
    yield from table.combine_chunks().to_batches(max_chunksize=_BATCH_ROWS)


def _streamed(
    path: Path,
    dialect: Dialect,
    raw: dict[str, str],
    known: dict[str, pa.DataType],
    wanted: list[str],
) -> Iterator[pa.RecordBatch]:
    """Block by block: types are inferred from the first block, numbers may be fractions later."""
    from pyarrow import csv as arrow_csv

    def open_with(types: dict[str, pa.DataType]) -> Any:
        stream = pa.input_stream(str(path), compression="detect")
        return arrow_csv.open_csv(stream, **_options(dialect, raw, types, wanted))

    with open_with(known) as reader:
        inferred = dict(zip(wanted, reader.schema.types, strict=True))
    types = {name: _safe_type(kind) for name, kind in inferred.items()} | known
    with open_with(types) as reader:
        yield from reader


def _safe_type(inferred: pa.DataType) -> pa.DataType:
    """A type that values further down will hardly break."""
    if pa.types.is_integer(inferred) or pa.types.is_floating(inferred):
        return pa.float64()
    return pa.string()  # dates, booleans and empty columns are looked at again as text


def is_conversion(error: TableError) -> bool:
    """Whether a value did not fit its column's type."""
    return "In CSV column #" in str(error)


def broken_column(error: TableError, header: Iterable[str]) -> str | None:
    """The column whose values do not fit its type, if that is what the error is about."""
    match = re.search(r"In CSV column #(\d+)", str(error))
    names = list(header)
    return names[int(match[1])] if match and int(match[1]) < len(names) else None


Tell = Callable[[str], None]
"""Called with a line that says what is being done."""
