"""CSV and TSV files of many dialects, read in batches."""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from fedgmm.data.tables.errors import ConversionError, TableError
from fedgmm.wording import counted

MISSING = (
    "", "NA", "N/A", "n/a", "na", "#N/A", "#NA", "<NA>", "?", "nan", "NaN", "NAN", "-nan", "-NaN",
    "null", "NULL", "Null", "None",
)  # fmt: skip
"""What a missing value is written as."""

_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")
_SEPARATORS = ",;\t|"
_SAMPLE_BYTES = 256 * 1024
_WHOLE_FILE_BYTES = 48 * 1024 * 1024  # larger files are streamed, smaller ones read at once
_BLOCK_BYTES = 4 * 1024 * 1024
_BATCH_ROWS = 65_536
_MOST_CONTROLS = 0.01  # share of control characters that a text may hold
_EXPLAINED = 120  # characters of the reader's own words in a message
_NOT_A_TEXT = "it is not a text file; is its ending right?"


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


# ---------------------------------------------------------------------- the dialect


def sniff(path: Path) -> Dialect:
    """Look at the beginning of a text file.

    Raises:
        TableError: an empty file, no text, or no header.
    """
    with _bytes_of(path) as file:
        return _dialect(path, _read_some(path, file, _SAMPLE_BYTES))


def _dialect(path: Path, sample: bytes) -> Dialect:
    text, encoding = _decode(path, sample)
    text = _without_blank_start(text)
    if not text.strip():
        raise TableError(path, "the file is empty.")
    first = re.split(r"[\r\n]", text, maxsplit=1)[0]
    separator = "\t" if ".tsv" in path.name.lower() else _separator(first)
    header = _header(path, text, separator)
    if all(_is_number(name) for name in header):
        raise TableError(
            path, "it seems to have no header: the first line holds numbers where names belong."
        )
    comma = separator != "," and _has_decimal_commas(text, separator)
    return Dialect(header, separator, "," if comma else ".", encoding, '"' in text)


def _without_blank_start(text: str) -> str:
    return re.sub(r"\A(?:[ \t]*(?:\r\n|\r|\n))+", "", text)


def _header(path: Path, text: str, separator: str) -> tuple[str, ...]:
    """The names, found by the reader itself, so that it finds the same ones later."""
    from pyarrow import csv as arrow_csv

    sample = _first_line(text).encode()
    try:
        with arrow_csv.open_csv(
            _reader(sample),
            arrow_csv.ReadOptions(block_size=len(sample) + 1, use_threads=False),
            arrow_csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        ) as reader:
            return tuple(reader.schema.names)
    except pa.ArrowException:  # there is text, but the reader finds no end of the first line
        raise TableError(path, "a quote is opened in its first line and never closed.") from None


def _reader(data: bytes) -> pa.BufferReader:
    """Bytes in memory that belong to the reader.

    Its threads may let go of them after the last row, when Python is about to end; bytes of Python's
    own would then end the program with a crash, once in a while.
    """
    own = pa.allocate_buffer(len(data))
    np.frombuffer(own, dtype=np.uint8)[:] = np.frombuffer(data, dtype=np.uint8)
    return pa.BufferReader(own)


def _first_line(text: str) -> str:
    """The text to the first line end that is not within quotes."""
    quotes = start = 0
    for end in re.finditer(r"[\r\n]", text):
        quotes += text.count('"', start, end.start())
        start = end.start()
        if quotes % 2 == 0:
            return text[: end.end()]
    return text + "\n"  # a lone header may lack its line end


def _decode(path: Path, sample: bytes) -> tuple[str, str]:
    if sample.startswith((b"\xff\xfe", b"\xfe\xff")):
        return sample.decode("utf-16", errors="ignore"), "utf-16"
    controls = len(sample) - len(sample.translate(None, bytes([*range(9), *range(14, 32)])))
    if b"\x00" in sample or controls > _MOST_CONTROLS * len(sample):
        raise TableError(path, _NOT_A_TEXT)
    try:
        return sample.decode("utf-8-sig"), "utf8"
    except UnicodeDecodeError as error:
        if len(sample) == _SAMPLE_BYTES and error.start >= len(sample) - 4:
            # the sample ends within a character
            return sample[: error.start].decode("utf-8-sig"), "utf8"
    try:
        return sample.decode("cp1252"), "cp1252"
    except UnicodeDecodeError:
        return sample.decode("latin-1"), "latin-1"


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


def _has_decimal_commas(text: str, separator: str) -> bool:
    """Whether ``1,5`` is a number; without a sign of it, where semicolons make room for commas."""
    around = rf'(?:^|[{separator}"\s])[+-]?\d+{{}}\d+(?=$|[{separator}"\s])'
    commas = len(re.findall(around.format(","), text, flags=re.MULTILINE))
    points = len(re.findall(around.format(r"\."), text, flags=re.MULTILINE))
    return commas > points or (separator == ";" and commas == points)


# ---------------------------------------------------------------------- bytes


def _bytes_of(path: Path) -> IO[bytes]:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def _read_some(path: Path, file: IO[bytes], size: int) -> bytes:
    try:
        return file.read(size)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise TableError(path, "it is not a whole gzip file; compress it anew.") from None


def _whole(path: Path) -> bytes | None:
    """All bytes of a file; ``None`` where there are too many."""
    if path.stat().st_size > _WHOLE_FILE_BYTES:
        return None
    with _bytes_of(path) as file:
        found = _read_some(path, file, _WHOLE_FILE_BYTES + 1)
    return found if len(found) <= _WHOLE_FILE_BYTES else None


# ---------------------------------------------------------------------- reading


def text_batches(
    path: Path, wanted: Mapping[str, str], as_text: Collection[str]
) -> Iterator[pa.RecordBatch]:
    """Some columns of a text file.

    Args:
        path: the file.
        wanted: the names of the columns, and what the file calls them.
        as_text: columns whose values are wanted as they are written.

    Raises:
        ConversionError: a value that does not fit the type of its column.
        TableError: a file that cannot be read.
    """
    known = {wanted[name]: pa.string() for name in as_text if name in wanted}
    names = list(wanted.values())
    try:
        data = _whole(path)
        if data is None:
            dialect = replace(sniff(path), long_values=True)
            read = _streamed(path, dialect, known, names)
        else:
            dialect, data = _as_utf8(path, data)
            read = _parsed(data, dialect, known, names)
        for batch in read:
            columns = batch.columns
            if dialect.decimal_point == ",":
                columns = [_with_points(column) for column in columns]
            yield pa.RecordBatch.from_arrays(columns, list(wanted))
    except UnicodeError:
        raise TableError(
            path, "it holds characters of several encodings; save all of it as UTF-8."
        ) from None
    except pa.ArrowException as error:
        raise _conversion(path, error, dialect.header) or TableError(
            path, _explain(error)
        ) from None


def _as_utf8(path: Path, data: bytes) -> tuple[Dialect, bytes]:
    """The dialect, from all bytes where that matters, and the bytes as the reader wants them."""
    dialect = _dialect(path, data[:_SAMPLE_BYTES])
    if dialect.encoding == "utf8" and not data.isascii():
        try:
            data.decode("utf8")
        except UnicodeDecodeError:
            if not data[:_SAMPLE_BYTES].isascii():
                raise
            dialect = replace(dialect, encoding="cp1252")  # the first sign of it is further down
    if dialect.encoding != "utf8":
        data = data.decode(dialect.encoding, errors="replace").encode()
    data = data.removeprefix(b"\xef\xbb\xbf")
    if data[:1].isspace():
        data = _without_blank_start(data.decode()).encode()
    quotes = data.count(b'"')
    if quotes % 2:
        _check_quotes(path, data.decode(), dialect.separator)
    if b"\x00" in data:
        raise TableError(path, _NOT_A_TEXT)
    return replace(dialect, long_values=quotes > 0), data


def _check_quotes(path: Path, text: str, separator: str) -> None:
    """The reader takes all that follows an open quote for one value; rows would be lost."""
    try:
        for _ in csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True):
            pass
    except csv.Error as error:
        if "unexpected end" in str(error) or "field larger" in str(error):
            raise TableError(path, "a quote is opened and never closed.") from None


def _options(
    dialect: Dialect, known: Mapping[str, pa.DataType], names: list[str]
) -> dict[str, Any]:
    from pyarrow import csv as arrow_csv

    return {
        "parse_options": arrow_csv.ParseOptions(
            delimiter=dialect.separator, newlines_in_values=dialect.long_values
        ),
        "convert_options": arrow_csv.ConvertOptions(
            column_types=known,
            include_columns=names,
            null_values=list(MISSING),
            strings_can_be_null=True,
            true_values=list(_TRUE),
            false_values=list(_FALSE),
            decimal_point=dialect.decimal_point,
        ),
    }


def _parsed(
    data: bytes, dialect: Dialect, known: Mapping[str, pa.DataType], names: list[str]
) -> Iterator[pa.RecordBatch]:
    """All rows at once: types are inferred from all of them."""
    from pyarrow import csv as arrow_csv

    def read(block_bytes: int) -> pa.Table:
        return arrow_csv.read_csv(
            _reader(data),
            read_options=arrow_csv.ReadOptions(block_size=block_bytes),
            **_options(dialect, known, names),
        )

    if not data.endswith((b"\n", b"\r")):
        data += b"\n"  # the reader wants it after a lone header
    try:
        table = read(_BLOCK_BYTES)
    except pa.ArrowInvalid as error:
        if "straddling" not in str(error):
            raise
        table = read(len(data) + 1)  # a value is longer than a block
    yield from table.combine_chunks().to_batches(max_chunksize=_BATCH_ROWS)


def _streamed(
    path: Path, dialect: Dialect, known: Mapping[str, pa.DataType], names: list[str]
) -> Iterator[pa.RecordBatch]:
    """Block by block: types are inferred from the first block, numbers may be fractions later."""
    from pyarrow import csv as arrow_csv

    compression = "gzip" if path.name.lower().endswith(".gz") else None

    def open_with(types: Mapping[str, pa.DataType]) -> Any:
        return arrow_csv.open_csv(
            pa.input_stream(str(path), compression=compression),
            read_options=arrow_csv.ReadOptions(block_size=_BLOCK_BYTES, encoding=dialect.encoding),
            **_options(dialect, types, names),
        )

    with open_with(known) as reader:
        inferred = dict(zip(names, reader.schema.types, strict=True))
    types = {name: _safe_type(kind) for name, kind in inferred.items()} | dict(known)
    with open_with(types) as reader:
        yield from reader


def _safe_type(inferred: pa.DataType) -> pa.DataType:
    """A type that values further down will hardly break."""
    if pa.types.is_integer(inferred) or pa.types.is_floating(inferred):
        return pa.float64()
    return pa.string()  # dates, booleans and empty columns are looked at again as text


def _with_points(values: pa.Array) -> pa.Array:
    """Numbers with a decimal comma that were read as text, with a point as other files write them."""
    import pyarrow.compute as pc

    if not pa.types.is_string(values.type):
        return values
    return pc.replace_substring_regex(values, r"^\s*([+-]?\d+),(\d+)\s*$", r"\1.\2")


# ---------------------------------------------------------------------- what went wrong


def _conversion(path: Path, error: Exception, header: tuple[str, ...]) -> ConversionError | None:
    """A value that does not fit, if that is what the error is about."""
    found = re.match(r"In CSV column #(\d+): .*?(?:invalid value '(.*)')?$", str(error), re.DOTALL)
    if found is None or "UTF8" in str(error) or int(found[1]) >= len(header):
        return None
    return ConversionError(path, header[int(found[1])].strip(), found[2] or "")


def _explain(error: Exception) -> str:
    """The reader's complaint in one line."""
    text = " ".join(str(error).split()).removeprefix("CSV parse error: ")
    if "Empty CSV file" in text:
        return "the file is empty."
    if "UTF8" in text:
        return "it holds characters that are not UTF-8; save it as UTF-8."
    if "include_columns" in text:
        return "its header is not in the first line; take out what stands before it."
    if "straddling object" in text or "out of sync" in text:
        return "a quote is opened and never closed, or a line is too long."
    if match := re.match(r"(?:Row #(\d+): )?Expected (\d+) columns, got (\d+)", text):
        row, expected, got = match.groups()
        where = f"row {row} (the header is row 1)" if row else "a row"
        columns = counted(int(expected), "column")
        return f"{where} has {counted(int(got), 'value')} where the header has {columns}."
    return f"it cannot be read: {text[:_EXPLAINED].rstrip('.')}."
