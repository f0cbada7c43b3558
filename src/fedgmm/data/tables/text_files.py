"""CSV and TSV files of many dialects: sniffed once, then parsed once by Arrow."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedgmm.data.tables.columns import MISSING, PLAIN, FileFormat, table_on_disk
from fedgmm.data.tables.errors import HeaderError, TableError, listed
from fedgmm.support.scratch import active
from fedgmm.wording import counted

_TRUE, _FALSE = ["true", "True", "TRUE"], ["false", "False", "FALSE"]
_SEPARATORS = ",;\t|"
_SAMPLE_BYTES = 256 * 1024
_SAMPLE_ROWS = 200
_COMPARED_ROWS = 50  # with the first line
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
        header: column names: as they stand in the first line, as given, or ``column_1`` and so on.
        separator: the character between values; ``" "`` means one or more blanks.
        decimal_point: ``"."`` or ``","``.
        encoding: the encoding of the characters.
        has_header: whether the first line holds the names.
        looks_headless: whether the first line looks like values although it is read as names.
    """

    header: tuple[str, ...]
    separator: str = ","
    decimal_point: str = "."
    encoding: str = "utf8"
    has_header: bool = True
    looks_headless: bool = False


# ---------------------------------------------------------------------- the dialect


def sniff(path: Path, written: FileFormat = PLAIN) -> Dialect:
    """Return the dialect of a text file from its first bytes, and what is known about its format.

    Raises:
        TableError: an empty file, a file that is not text, or a file without a header.
    """
    text, encoding = _decode(path, _read(path, _SAMPLE_BYTES))
    text = _without_blank_lines(text)
    if not text.strip():
        raise TableError(path, "the file is empty.")
    separator = "\t" if ".tsv" in path.name.lower() else _separator(text)
    if separator == " ":
        text = _with_single_blanks(text)
    first = _header(path, text, separator)
    header = _given_names(path, first, written)
    point = "."
    if separator != ",":  # is 1,5 a number? without evidence, semicolons suggest that it is
        around = rf'(?:^|[{separator}"\s])[+-]?\d+{{}}\d+(?=$|[{separator}"\s])'
        commas = len(re.findall(around.format(","), text, flags=re.MULTILINE))
        points = len(re.findall(around.format(r"\."), text, flags=re.MULTILINE))
        if commas > points or (separator == ";" and commas == points):
            point = ","
    if header is not None:
        return Dialect(header, separator, point, encoding, has_header=False)
    lines = text.splitlines()[1 : _COMPARED_ROWS + 1]  # the last one may be cut
    rows = [row for row in csv.reader(lines, delimiter=separator) if row]
    is_data = not written.names and _looks_like_data(first, rows, point)
    if is_data and (all(map(_is_number, first)) or len(set(first)) < len(first)):
        raise no_header(path, first)
    return Dialect(first, separator, point, encoding, looks_headless=is_data)


def no_header(path: Path, first: Sequence[str]) -> HeaderError:
    """Return the error about a file whose first line holds values."""
    problem = "it has no header: the first line looks like data"
    return HeaderError(
        path,
        f"{problem} ({listed(first)}); use --no-header, which calls the columns column_1, column_2 and so "
        "on, or name them with --names.",
        public=problem,
    )


def _given_names(path: Path, first: tuple[str, ...], written: FileFormat) -> tuple[str, ...] | None:
    """Return the names of the columns of a file without a header; ``None`` if it has one."""
    names = written.names
    if not names:
        made = tuple(f"column_{number}" for number in range(1, len(first) + 1))
        return made if written.no_header else None
    if {name.strip() for name in first} <= set(names):
        return None
    if len(first) == len(names) - 1 and written.label in names:
        names = tuple(name for name in names if name != written.label)
    if len(first) != len(names):
        columns, given = counted(len(first), "column"), counted(len(names), "name")
        raise TableError(path, f"it has {columns}, but {given} were given (--names).")
    return names


def _looks_like_data(first: Sequence[str], rows: list[list[str]], point: str) -> bool:
    """Return whether the first line looks like the rows below it rather than like names."""
    first = [value.strip() for value in first]
    if all(map(_is_number, first)):
        return True
    numbers = [float(value) for value in first if value.isdecimal()]
    if len(numbers) > 1 and all(b - a == 1 for a, b in itertools.pairwise(numbers)):
        return False  # columns that a program has numbered
    alike = looked_at = 0
    for column, value in enumerate(first):
        below = [row[column].strip() for row in rows if column < len(row)]
        below = [text for text in below if text not in MISSING]
        if value and below:
            looked_at += 1
            alike += _is_like(value, below, point)
    return looked_at > 0 and alike > 0.5 * looked_at


def _is_like(value: str, below: list[str], point: str) -> bool:
    """Return whether a value fits those below it: a number in their range, or a text like them."""
    if value in MISSING or value in below:
        return True
    try:
        own = float(value.replace(point, "."))
        numbers = [float(text.replace(point, ".")) for text in below]
        return min(numbers) <= own <= max(numbers)
    except ValueError:
        shape = re.compile(re.sub(r"\d+", r"\\d+", re.escape(value)))
        return shape.pattern != re.escape(value) and any(map(shape.fullmatch, below))


def _with_single_blanks(text: str) -> str:
    """Return lines with one blank between values and none around them."""
    if '"' in text:
        text = re.sub(r'"[^"]*"|[ \t]+', lambda m: m[0] if m[0][0] == '"' else " ", text)
        return re.sub(r"^ | $", "", text, flags=re.MULTILINE)
    return "\n".join(" ".join(line.split()) for line in text.splitlines()) + "\n"


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


def _separator(text: str) -> str:
    """Return the most frequent separator of the first line, outside quotes."""
    lines = [re.sub(r'"[^"]*"', "q", line) for line in text.splitlines()[:_SAMPLE_ROWS]]
    counts = {mark: lines[0].count(mark) for mark in _SEPARATORS}
    if not any(counts.values()):
        values = {len(line.split()) for line in lines[: max(1, len(lines) - 1)] if line.strip()}
        return " " if len(values) == 1 and values.pop() > 1 else ","
    if re.search(r"\d,\d", lines[0]) and any(counts[mark] for mark in ";\t|"):
        counts[","] = 0  # decimal commas of a file without a header
    return max(_SEPARATORS, key=lambda mark: (counts[mark], -_SEPARATORS.index(mark)))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------------- bytes


def _read(path: Path, size: int) -> bytes:
    """Return the first bytes of a file, decompressed; all of them for a negative size."""
    try:
        with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
            return file.read(size)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise TableError(path, "it is not a complete gzip file; compress it again.") from None


def _whole_file(path: Path, dialect: Dialect) -> bytes | None:
    """Return all bytes of a file; ``None`` for a file that is to be streamed."""
    if dialect.separator == " ":  # its blanks must be joined before it is parsed
        return _read(path, -1)
    if path.stat().st_size > _WHOLE_FILE_BYTES:
        return None
    found = _read(path, _WHOLE_FILE_BYTES + 1)
    return found if len(found) <= _WHOLE_FILE_BYTES else None


def _as_utf8(path: Path, data: bytes, dialect: Dialect) -> bytes:
    """Return the file as UTF-8 from its header on; raise ``UnicodeError`` for several encodings."""
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
    if dialect.separator == " ":
        data = _with_single_blanks(data.decode()).encode()
    if data.count(b'"') % 2:  # Arrow would read all rows after an open quote as one value
        text = io.StringIO(data.decode(), newline="")
        try:
            for _ in csv.reader(text, delimiter=dialect.separator, strict=True):
                pass
        except csv.Error as error:
            if "unexpected end" in str(error) or "field larger" in str(error):
                raise TableError(path, _UNCLOSED) from None
    if b"\x00" in data:
        raise TableError(path, _NOT_TEXT)
    # Arrow needs a line end after a lone header
    return data if data.endswith((b"\n", b"\r")) else data + b"\n"


# ---------------------------------------------------------------------- parsing


def parse_text(
    path: Path,
    dialect: Dialect,
    names: Mapping[str, str],
    as_text: Collection[str],
    missing: Collection[str] = (),
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
        missing: further texts that mean a missing value.
    """
    from pyarrow import csv as arrow_csv

    types = {names[name]: pa.string() for name in as_text if name in names}
    data: bytes | None = None

    def options() -> dict[str, Any]:
        return {
            "read_options": arrow_csv.ReadOptions(
                block_size=_BLOCK_BYTES,
                encoding=dialect.encoding if data is None else "utf8",
                column_names=None if dialect.has_header else list(dialect.header),
            ),
            "parse_options": arrow_csv.ParseOptions(
                delimiter=dialect.separator, newlines_in_values=data is None or b'"' in data
            ),
            "convert_options": arrow_csv.ConvertOptions(
                column_types=types,
                include_columns=list(names.values()),
                null_values=[*MISSING, *missing],
                strings_can_be_null=True,
                true_values=_TRUE,
                false_values=_FALSE,
                decimal_point=dialect.decimal_point,
            ),
        }

    def stream() -> pa.NativeFile:
        compression = "gzip" if path.name.lower().endswith(".gz") else None
        return pa.input_stream(str(path), compression=compression)

    def parse() -> pa.Table:
        settings = options()
        if data is None and not active():
            return arrow_csv.read_csv(stream(), **settings)
        if data is None:
            with arrow_csv.open_csv(stream(), **settings) as reader:
                return table_on_disk(reader.schema, reader)
        try:
            return arrow_csv.read_csv(_arrow_bytes(data), **settings)
        except pa.ArrowInvalid as error:
            if "straddling" not in str(error):
                raise
            settings["read_options"].block_size = len(data) + 1  # a value is longer than a block
            return arrow_csv.read_csv(_arrow_bytes(data), **settings)

    try:
        data = _whole_file(path, dialect)
        if data is not None:
            data = _as_utf8(path, data, dialect)
        else:
            with arrow_csv.open_csv(stream(), **options()) as reader:
                for name, kind in zip(names.values(), reader.schema.types, strict=True):
                    number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
                    types.setdefault(name, pa.float64() if number else pa.string())
        while True:
            try:
                table = parse()
                break
            except pa.ArrowInvalid as error:
                found = re.match(r"In CSV column #(\d+): ", str(error))
                if found is None or "UTF8" in str(error) or int(found[1]) >= len(dialect.header):
                    raise
                column = dialect.header[int(found[1])]  # it has a value that is not of its type
                if types.get(column) == pa.string():
                    raise
                types[column] = pa.string()
    except UnicodeError:
        raise TableError(
            path, "it holds characters of several encodings; save all of it as UTF-8."
        ) from None
    except pa.ArrowException as error:
        raise _explained(path, error, dialect) from None
    columns = table.columns
    if dialect.decimal_point == ",":  # texts get a decimal point in numbers, as in other files
        comma, point = r"^\s*([+-]?\d+),(\d+)\s*$", r"\1.\2"
        columns = [
            pc.replace_substring_regex(column, comma, point)
            if pa.types.is_string(column.type)
            else column
            for column in columns
        ]
    return pa.table(columns, list(names))


# ---------------------------------------------------------------------- errors


def _explained(path: Path, error: Exception, dialect: Dialect) -> TableError:
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
        header = " (the header is row 1)" if dialect.has_header else ""
        where = f"row {row}{header}" if row else "a row"
        first = "the header" if dialect.has_header else "the first row"
        columns = counted(int(expected), "column")
        problem = f"{where} has {counted(int(got), 'value')}, but {first} has {columns}"
        if int(got) == int(expected) + 1:
            problem += "; remove a separator at the end of rows, or name the first column, too"
        return TableError(path, f"{problem}.")
    shown = f"it cannot be parsed: {text[:_MOST_EXPLAINED].rstrip('.')}."
    return TableError(path, shown, public="it cannot be parsed")
