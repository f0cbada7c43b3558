"""CSV and TSV files of many dialects: sniffed once, then parsed once by Arrow."""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedgmm.data.tables.columns import MISSING
from fedgmm.data.tables.errors import TableError
from fedgmm.wording import counted

_TRUE, _FALSE = ["true", "True", "TRUE"], ["false", "False", "FALSE"]
_SEPARATORS = ",;\t|"
_SAMPLE_BYTES = 256 * 1024
_WHOLE_FILE_BYTES = 48 * 1024 * 1024  # larger files are streamed from disk
_BLOCK_BYTES = 4 * 1024 * 1024
_MOST_CONTROLS = 0.01  # largest share of control characters in a text file
_MOST_EXPLAINED = 120  # characters of the parser's own message
_NOT_TEXT = "it is not a text file; check its ending."
_UNCLOSED = "a quote is opened and never closed."


@dataclass(frozen=True)
class Dialect:
    """The way a text file is written.

    Attributes:
        header: column names as they stand in the first line.
        separator: the character between values.
        decimal_point: ``"."`` or ``","``.
        encoding: the encoding of the characters.
    """

    header: tuple[str, ...]
    separator: str = ","
    decimal_point: str = "."
    encoding: str = "utf8"


# ---------------------------------------------------------------------- the dialect


def sniff(path: Path) -> Dialect:
    """Return the dialect of a text file from its first bytes.

    Raises:
        TableError: an empty file, a file that is not text, or a file without a header.
    """
    with _open(path) as file:
        text, encoding = _decode(path, _read(path, file, _SAMPLE_BYTES))
    text = _without_blank_lines(text)
    if not text.strip():
        raise TableError(path, "the file is empty.")
    first = re.split(r"[\r\n]", text, maxsplit=1)[0]
    separator = "\t" if ".tsv" in path.name.lower() else _separator(first)
    header = _header(path, text, separator)
    if all(_is_number(name) for name in header):
        raise TableError(
            path, "it has no header: the first line holds numbers instead of column names."
        )
    comma = separator != "," and _has_decimal_commas(text, separator)
    return Dialect(header, separator, "," if comma else ".", encoding)


def _without_blank_lines(text: str) -> str:
    """Return the text from its first line that is not blank."""
    return re.sub(r"\A(?:[ \t]*(?:\r\n|\r|\n))+", "", text)


def _header(path: Path, text: str, separator: str) -> tuple[str, ...]:
    """Return the column names as Arrow reads them, so that the parser later finds the same ones."""
    from pyarrow import csv as arrow_csv

    sample = _first_line(text).encode()
    try:
        with arrow_csv.open_csv(
            _arrow_bytes(sample),
            arrow_csv.ReadOptions(block_size=len(sample) + 1, use_threads=False),
            arrow_csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        ) as reader:
            return tuple(reader.schema.names)
    except pa.ArrowException:  # the parser finds no end of the first line
        raise TableError(path, _UNCLOSED) from None


def _arrow_bytes(data: bytes) -> pa.BufferReader:
    """Return a copy of the bytes that Arrow owns.

    Arrow's threads may release the bytes while Python is shutting down. If Python owned them, that
    would crash the process now and then.
    """
    own = pa.allocate_buffer(len(data))
    np.frombuffer(own, dtype=np.uint8)[:] = np.frombuffer(data, dtype=np.uint8)
    return pa.BufferReader(own)


def _first_line(text: str) -> str:
    """Return the text to the first line end that is not within quotes."""
    quotes = start = 0
    for end in re.finditer(r"[\r\n]", text):
        quotes += text.count('"', start, end.start())
        start = end.start()
        if quotes % 2 == 0:
            return text[: end.end()]
    return text + "\n"  # a file with only a header may lack the line end


def _decode(path: Path, sample: bytes) -> tuple[str, str]:
    """Return the sample as text, and its encoding."""
    if sample.startswith((b"\xff\xfe", b"\xfe\xff")):
        return sample.decode("utf-16", errors="ignore"), "utf-16"
    controls = len(sample) - len(sample.translate(None, bytes([*range(9), *range(14, 32)])))
    if b"\x00" in sample or controls > _MOST_CONTROLS * len(sample):
        raise TableError(path, _NOT_TEXT)
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
    """Return the most frequent separator of the header, outside quotes."""
    outside = re.sub(r'"[^"]*"', "", line)
    return max(_SEPARATORS, key=lambda mark: (outside.count(mark), -_SEPARATORS.index(mark)))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _has_decimal_commas(text: str, separator: str) -> bool:
    """Return whether ``1,5`` is a number; without evidence, semicolons suggest that it is."""
    around = rf'(?:^|[{separator}"\s])[+-]?\d+{{}}\d+(?=$|[{separator}"\s])'
    commas = len(re.findall(around.format(","), text, flags=re.MULTILINE))
    points = len(re.findall(around.format(r"\."), text, flags=re.MULTILINE))
    return commas > points or (separator == ";" and commas == points)


# ---------------------------------------------------------------------- bytes


def _open(path: Path) -> IO[bytes]:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def _read(path: Path, file: IO[bytes], size: int) -> bytes:
    try:
        return file.read(size)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise TableError(path, "it is not a complete gzip file; compress it again.") from None


def _whole_file(path: Path) -> bytes | None:
    """Return all bytes of a file; ``None`` for a file that is to be streamed."""
    if path.stat().st_size > _WHOLE_FILE_BYTES:
        return None
    with _open(path) as file:
        found = _read(path, file, _WHOLE_FILE_BYTES + 1)
    return found if len(found) <= _WHOLE_FILE_BYTES else None


def _as_utf8(path: Path, data: bytes, dialect: Dialect) -> bytes:
    """Return the file as UTF-8 from its header on.

    Raises:
        TableError: binary data, or a quote that is never closed.
        UnicodeError: characters of several encodings.
    """
    encoding = dialect.encoding
    if encoding == "utf8" and not data.isascii():
        try:
            data.decode("utf8")
        except UnicodeDecodeError:
            if not data[:_SAMPLE_BYTES].isascii():
                raise
            encoding = "cp1252"  # its first letter beyond ASCII comes after the sample
    if encoding != "utf8":
        data = data.decode(encoding, errors="replace").encode()
    data = data.removeprefix(b"\xef\xbb\xbf")
    if data[:1].isspace():
        data = _without_blank_lines(data.decode()).encode()
    if data.count(b'"') % 2:
        _check_quotes(path, data.decode(), dialect.separator)
    if b"\x00" in data:
        raise TableError(path, _NOT_TEXT)
    # Arrow needs a line end after a lone header
    return data if data.endswith((b"\n", b"\r")) else data + b"\n"


def _check_quotes(path: Path, text: str, separator: str) -> None:
    """Raise for an open quote, because Arrow would read all rows after it as one value."""
    try:
        for _ in csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True):
            pass
    except csv.Error as error:
        if "unexpected end" in str(error) or "field larger" in str(error):
            raise TableError(path, _UNCLOSED) from None


# ---------------------------------------------------------------------- parsing


def parse_text(
    path: Path, dialect: Dialect, names: Mapping[str, str], as_text: Collection[str]
) -> pa.Table:
    """Parse some columns of a text file.

    A small file is read at once, and Arrow infers types from all of its rows. A large file is streamed,
    and types come from its first block: numbers, or else text. If a value further down is not a number,
    the file is parsed again with that column as text, because parsed numbers do not keep their text.

    Args:
        path: the file.
        dialect: from :func:`sniff`.
        names: the columns to parse, and their names in the file.
        as_text: columns whose values are kept as they are written.

    Raises:
        TableError: a file that cannot be parsed.
    """
    types = {names[name]: pa.string() for name in as_text if name in names}
    try:
        data = _whole_file(path)
        if data is None:
            types = {**_types_of_first_block(path, dialect, types, list(names.values())), **types}
        else:
            data = _as_utf8(path, data, dialect)
        while True:
            try:
                table = _parse(path, data, dialect, types, list(names.values()))
                break
            except pa.ArrowInvalid as error:
                column = _column_that_failed(error, dialect.header)
                if column is None or types.get(column) == pa.string():
                    raise
                types[column] = pa.string()
    except UnicodeError:
        raise TableError(
            path, "it holds characters of several encodings; save all of it as UTF-8."
        ) from None
    except pa.ArrowException as error:
        raise _explained(path, error) from None
    columns = table.columns
    if dialect.decimal_point == ",":
        columns = [_with_points(column) for column in columns]
    return pa.table(columns, list(names))


def _parse(
    path: Path,
    data: bytes | None,
    dialect: Dialect,
    types: Mapping[str, pa.DataType],
    names: list[str],
) -> pa.Table:
    """Parse all rows: of ``data``, or streamed from the file if it is ``None``."""
    from pyarrow import csv as arrow_csv

    if data is None:
        return arrow_csv.read_csv(_stream(path), **_options(dialect, types, names))
    quotes = b'"' in data
    options = _options(replace(dialect, encoding="utf8"), types, names, quotes)
    try:
        return arrow_csv.read_csv(_arrow_bytes(data), **options)
    except pa.ArrowInvalid as error:
        if "straddling" not in str(error):
            raise
        options["read_options"].block_size = len(data) + 1  # a value is longer than a block
        return arrow_csv.read_csv(_arrow_bytes(data), **options)


def _stream(path: Path) -> pa.NativeFile:
    compression = "gzip" if path.name.lower().endswith(".gz") else None
    return pa.input_stream(str(path), compression=compression)


def _options(
    dialect: Dialect, types: Mapping[str, pa.DataType], names: list[str], quotes: bool = True
) -> dict[str, Any]:
    from pyarrow import csv as arrow_csv

    return {
        "read_options": arrow_csv.ReadOptions(block_size=_BLOCK_BYTES, encoding=dialect.encoding),
        "parse_options": arrow_csv.ParseOptions(
            delimiter=dialect.separator, newlines_in_values=quotes
        ),
        "convert_options": arrow_csv.ConvertOptions(
            column_types=types,
            include_columns=names,
            null_values=list(MISSING),
            strings_can_be_null=True,
            true_values=_TRUE,
            false_values=_FALSE,
            decimal_point=dialect.decimal_point,
        ),
    }


def _types_of_first_block(
    path: Path, dialect: Dialect, types: Mapping[str, pa.DataType], names: list[str]
) -> dict[str, pa.DataType]:
    """Return float64 for columns of numbers and text for all others, from the first block alone."""
    from pyarrow import csv as arrow_csv

    with arrow_csv.open_csv(_stream(path), **_options(dialect, types, names)) as reader:
        found = zip(names, reader.schema.types, strict=True)
        return {
            name: pa.float64()
            if pa.types.is_integer(kind) or pa.types.is_floating(kind)
            else pa.string()
            for name, kind in found
        }


def _with_points(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return text with a decimal point in numbers, as other files write them."""
    if not pa.types.is_string(values.type):
        return values
    return pc.replace_substring_regex(values, r"^\s*([+-]?\d+),(\d+)\s*$", r"\1.\2")


# ---------------------------------------------------------------------- errors


def _column_that_failed(error: Exception, header: tuple[str, ...]) -> str | None:
    """Return the column with a value that is not of its type; ``None`` for any other error."""
    found = re.match(r"In CSV column #(\d+): ", str(error))
    if found is None or "UTF8" in str(error) or int(found[1]) >= len(header):
        return None
    return header[int(found[1])]


def _explained(path: Path, error: Exception) -> TableError:
    """Return Arrow's complaint in one line; rows that it quotes are not public."""
    text = " ".join(str(error).split()).removeprefix("CSV parse error: ")
    if "Empty CSV file" in text:
        return TableError(path, "the file is empty.")
    if "UTF8" in text:
        return TableError(path, "it holds characters that are not UTF-8; save it as UTF-8.")
    if "include_columns" in text:
        return TableError(path, "its header is not in the first line; remove the lines before it.")
    if "straddling object" in text or "out of sync" in text:
        return TableError(path, "a quote is opened and never closed, or a line is too long.")
    if match := re.match(r"(?:Row #(\d+): )?Expected (\d+) columns, got (\d+)", text):
        row, expected, got = match.groups()
        where = f"row {row} (the header is row 1)" if row else "a row"
        columns = counted(int(expected), "column")
        problem = f"{where} has {counted(int(got), 'value')}, but the header has {columns}."
        return TableError(path, problem)
    shown = f"it cannot be parsed: {text[:_MOST_EXPLAINED].rstrip('.')}."
    return TableError(path, shown, public="it cannot be parsed")
