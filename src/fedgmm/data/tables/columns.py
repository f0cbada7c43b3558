"""Columns of a file, converted once from Arrow to NumPy: numbers, or codes of distinct texts."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fedgmm.support.scratch import (
    active,
    copied,
    empty,
    gathered,
    kept,
    row_blocks,
    scratch_file,
    touched,
    where,
)

Kind = Literal["empty", "number", "date", "boolean", "text"]
"""The kind of a column's values. All values of an ``empty`` column are missing, so it fits any kind."""

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
CodeArray = NDArray[np.int32]

MISSING = frozenset((
    "", "NA", "N/A", "n/a", "na", "#N/A", "#NA", "<NA>", "?", "nan", "NaN", "NAN", "-nan", "-NaN",
    "null", "NULL", "Null", "None",
))  # fmt: skip
"""Texts that mean a missing value."""

TRUTH = ("false", "true")

DAY_FIRST, MONTH_FIRST = "day first", "month first"
"""The orders in which a date such as ``3/4/2020`` can be read."""

_DAY_MONTH_YEAR = (
    r"^(?P<a>\d{1,2})[./-](?P<b>\d{1,2})[./-](?P<y>\d{4})(?:[ T](?P<t>\d{1,2}:\d{2}(?::\d{2})?))?$"
)

_NUMBER_OR_DATE = (
    r"^([+-]?(\d+[.,]?\d*|[.,]\d+)([eE][+-]?\d+)?|\d{1,4}[./-]\d{1,2}[./-]\d{1,4}([ T].*)?)$"
)

LARGEST = 1e140
"""Largest number in training; squares of larger ones could overflow and spoil the whole column."""

_TEXTS = (  # old programs store text as bytes
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
)
_MICROSECONDS_PER_DAY = 86_400e6
_MOST_PLACES = 9  # after the point; 2^31 has ten digits
_NO_NUMBER = -(2**31)
_MOST_WORDS = 100  # of a column; a text column may have millions
_MOST_SEARCHED = 65_536  # distinct texts that are looked up chunk by chunk
_FIRST_LOOK = 8  # most text fails in the first values, which is faster than casting all of them
_WHOLE_WITH_POINT = re.compile(r"([+-]?\d+)\.0*")


@dataclass(frozen=True)
class FileFormat:
    """Format of files, where the reader cannot see it: the options of :class:`TableOptions`.

    With ``names`` the first line holds values, too, unless it repeats these names. A file without a header
    may lack the column ``label``.
    """

    no_header: bool = False
    names: tuple[str, ...] = ()
    missing_values: tuple[str, ...] = ()
    date_format: str | None = None
    label: str | None = field(default=None, compare=False)

    @property
    def missing_numbers(self) -> list[float]:
        """The missing values that are numbers."""
        found = []
        for text in self.missing_values:
            with contextlib.suppress(ValueError):
                found.append(float(text))
        return found

    def means_missing(self, texts: pa.StringArray) -> pa.BooleanArray:
        """Return which texts mean a missing value; ``-9`` is also written ``-9.0``."""
        found = pc.is_in(texts, value_set=pa.array([*MISSING, *self.missing_values]))
        whole = [f"{int(n)}" for n in self.missing_numbers if n.is_integer()]
        if whole:
            pattern = rf"^(?:{'|'.join(map(re.escape, whole))})(?:\.0*)?$"
            found = pc.or_(found, pc.match_substring_regex(texts, pattern))
        return found


PLAIN = FileFormat()


@dataclass(frozen=True)
class Decimals:
    """Numbers with few digits, kept exactly in half of the memory of float64.

    ``decimals[rows]`` are the float64 values of some rows. Most columns of tables are such numbers, and all
    columns of all clients are in memory until the clients have agreed on the preprocessing.

    Attributes:
        whole: the numbers times ``10^places``, ``(n,)``; ``-2^31`` where missing.
        places: digits after the point.
    """

    whole: CodeArray
    places: int

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, rows: slice | IntArray) -> FloatArray:
        # the quotient is the float64 nearest to the decimal number, as the parser's is
        whole = self.whole[rows]
        numbers = whole / 10.0**self.places
        numbers[whole == _NO_NUMBER] = np.nan
        return numbers

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> FloatArray:
        return self[:]

    @classmethod
    def of(cls, numbers: FloatArray, out: CodeArray) -> Decimals | None:
        """Return numbers ``(n,)``, written to ``out``; ``None`` if some of them have many digits."""
        for places in range(_MOST_PLACES + 1):
            if _as_whole(numbers[:_FIRST_LOOK], places) is None:
                continue
            for place in row_blocks(len(numbers)):
                whole = _as_whole(numbers[place], places)
                if whole is None:
                    break
                out[place] = whole
            else:
                return cls(out, places)
        return None


def _as_whole(numbers: FloatArray, places: int) -> FloatArray | None:
    """Return the numbers times ``10^places`` if all of them become whole, else ``None``."""
    scale = 10.0**places
    with np.errstate(over="ignore"):
        whole = np.rint(numbers * scale)
    whole[np.isnan(numbers)] = _NO_NUMBER
    fits = (whole / scale == numbers) & (np.abs(whole) < -_NO_NUMBER) | (whole == _NO_NUMBER)
    return whole if fits.all() else None


@dataclass(frozen=True)
class ColumnValues:
    """The values of one column, ``n`` rows.

    Attributes:
        kind: kind of the values; text that holds only numbers, truth values or dates counts as those.
        numbers: ``(n,)`` float64 or :class:`Decimals`, NaN where missing; ``None`` for text. Dates are days
            since 1970, times are fractions of a day, truth values are 0 and 1, infinities are missing.
        codes: ``(n,)`` indices into ``texts``, -1 where missing; ``None`` for numbers and dates that
            were not read as text.
        texts: the distinct texts without surrounding blanks.
        as_written: whether ``texts`` are exactly as the file writes them. A parsed number does not keep
            its text: ``007`` and ``7``, or ``1.50`` and ``1.5``, become equal.
        orders: for dates such as ``31.12.1960`` the days ``(n,)`` in each order in which all of them
            can be read; ``numbers`` are those of the first order. Empty for other values.
    """

    kind: Kind
    numbers: FloatArray | Decimals | None
    codes: CodeArray | None
    texts: pa.StringArray
    as_written: bool
    orders: Mapping[str, FloatArray] = field(default_factory=dict)

    @classmethod
    def absent(cls, rows: int) -> ColumnValues:
        """Return a column without any value."""
        codes = np.broadcast_to(np.int32(-1), rows)  # take no memory
        numbers = np.broadcast_to(np.float64(np.nan), rows)
        return cls("empty", numbers, codes, pa.array([], pa.string()), True)

    def on_disk(self) -> ColumnValues:
        """Return the same values with large arrays in scratch files, see :mod:`fedgmm.support.scratch`."""
        return replace(
            self,
            numbers=kept(self.numbers) if isinstance(self.numbers, np.ndarray) else self.numbers,
            codes=None if self.codes is None else kept(self.codes),
            orders={order: kept(days) for order, days in self.orders.items()},
        )

    def as_texts(self) -> NDArray[np.object_]:
        """Return the text of each row ``(n,)``, ``None`` where missing."""
        codes, texts = self.categories()
        return np.array([*texts, None], dtype=object)[codes]

    def categories(self) -> tuple[CodeArray, list[str]]:
        """Return the codes and their texts."""
        assert self.codes is not None
        return self.codes, self.texts.to_pylist()

    def counts(self, rows: IntArray | None = None) -> tuple[int, IntArray]:
        """Return how many values are missing, and how often each text occurs; ``None`` is all rows."""
        assert self.codes is not None
        counts = np.zeros(len(self.texts) + 1, dtype=np.int64)  # missing values come first
        for place in row_blocks(len(self.codes if rows is None else rows)):
            np.add.at(counts, self.codes[place if rows is None else rows[place]] + 1, 1)
        return int(counts[0]), counts[1:]

    def text_counts(self, rows: IntArray) -> tuple[int, dict[str, int]]:
        """Return how many values of some rows are missing, and how often each of their texts occurs."""
        missing, counts = self.counts(rows)
        codes = np.flatnonzero(counts)
        texts = self.texts.take(codes).to_pylist()
        return missing, dict(zip(texts, counts[codes].tolist(), strict=True))

    def present(self, rows: IntArray) -> IntArray:
        """Return those of some rows whose texts are not missing."""
        codes = self.codes
        assert codes is not None
        return gathered(rows, where(lambda place: codes[rows[place]] >= 0, len(rows)))

    def numbers_and_words(self) -> tuple[int, int, Counter[str]]:
        """Return how many values are numbers or dates, how many words, and frequent words."""
        _, counts = self.counts()
        alike = np.asarray(pc.match_substring_regex(self.texts, _NUMBER_OR_DATE), dtype=bool)
        words = np.flatnonzero(~alike)
        most = words[np.argsort(-counts[words], kind="stable")[:_MOST_WORDS]]
        texts = self.texts.take(most).to_pylist()
        frequent = Counter(dict(zip(texts, counts[most].tolist(), strict=True)))
        return int(counts[alike].sum()), int(counts[words].sum()), frequent


def without_point(text: str) -> str:
    """Return ``1`` for ``1.0``, because programs write whole numbers both ways."""
    found = _WHOLE_WITH_POINT.fullmatch(text)
    return text if found is None else found[1]


def stored_kind(kind: pa.DataType) -> Kind | None:
    """Return the kind that an Arrow type stands for; ``None`` for lists, structures and the like."""
    types = pa.types
    found: dict[Kind, bool] = {
        "empty": types.is_null(kind),
        "boolean": types.is_boolean(kind),
        "number": types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind),
        "date": types.is_temporal(kind) and not types.is_interval(kind),
        "text": any(holds(kind) for holds in _TEXTS),
    }
    return next((name for name, fits in found.items() if fits), None)


def column_values(
    values: pa.ChunkedArray,
    written: FileFormat = PLAIN,
    *,
    as_text: bool = False,
    out: Sequence[NDArray[Any]] = (),
) -> ColumnValues:
    """Convert a column of an Arrow table whose type has a :func:`stored_kind`.

    Values of types of numbers, dates or truth values are written to one of the arrays of ``out``, a float64
    and an int32 one, ``(n,)`` each.
    """
    kind = stored_kind(values.type)
    assert kind is not None
    if values.null_count == len(values):
        return ColumnValues.absent(len(values))
    if as_text or kind == "text":
        return _text_values(values, written)
    # dates may look like whole numbers, such as 20241231
    digits = re.fullmatch(r"(%[YmdHMSj])+", written.date_format or "")
    if digits and pa.types.is_integer(values.type):
        texts = _text_values(values, written)
        if texts.kind == "date":
            return texts
    numbers = empty(len(values), np.float64)
    first = 0
    for chunk in values.chunks:  # so that temporaries stay small
        own = _days(chunk) if kind == "date" else _finite(chunk.cast(pa.float64(), safe=False))
        numbers[first : first + len(chunk)] = own
        first += len(chunk)
        touched(chunk.nbytes + 8 * len(chunk))
    if kind == "number" and written.missing_values:
        present = 0
        for place in row_blocks(len(numbers)):
            numbers[place][np.isin(numbers[place], written.missing_numbers)] = np.nan
            present += int(np.count_nonzero(~np.isnan(numbers[place])))
        if not present:
            return ColumnValues.absent(len(values))
    codes, texts = None, pa.array([], pa.string())
    if kind == "boolean":
        codes, texts = empty(len(numbers), np.int32), pa.array(TRUTH)
        for place in row_blocks(len(numbers)):
            codes[place] = np.where(np.isnan(numbers[place]), -1, numbers[place])
    if not out:
        return ColumnValues(kind, numbers, codes, texts, False)
    decimals = Decimals.of(numbers, out[1])
    if decimals is None:
        out[0][:] = numbers
    return ColumnValues(kind, decimals or out[0], codes, texts, False)


def table_on_disk(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """Return batches as one table whose values are in a scratch file."""

    def write(file: IO[bytes]) -> None:
        with pa.ipc.new_file(pa.PythonFile(file, "w"), schema) as writer:
            for batch in batches:
                writer.write_batch(batch)

    with pa.ipc.open_file(pa.py_buffer(scratch_file(write))) as reader:
        return reader.read_all()


def _text_values(values: pa.ChunkedArray, written: FileFormat) -> ColumnValues:
    """Encode texts; only the distinct ones are trimmed and cast."""
    codes, texts = _text_codes(values)
    trimmed = pc.utf8_trim_whitespace(texts)
    clean = pc.if_else(written.means_missing(trimmed), pa.scalar(None, pa.string()), trimmed)
    if not clean.equals(texts):
        again = clean.dictionary_encode()
        lookup = np.append(np.asarray(again.indices.fill_null(-1), dtype=np.int32), np.int32(-1))
        codes, texts = gathered(lookup, codes), again.dictionary
    kind, numbers = _kind_and_numbers(texts, written.date_format)
    orders = {} if numbers is not None else _orders(texts)
    if orders:
        kind, numbers = "date", next(iter(orders.values()))
    if numbers is not None:
        numbers = gathered(np.append(numbers, np.nan), codes)
    orders = {order: gathered(np.append(days, np.nan), codes) for order, days in orders.items()}
    return ColumnValues(kind, numbers, codes, texts, True, orders)


def _text_codes(values: pa.ChunkedArray) -> tuple[CodeArray, pa.StringArray]:
    """Return codes of the distinct texts, -1 where missing, and these texts in the order of the rows."""
    if active():
        texts = pa.array([], pa.string())
        for chunk in values.chunks:
            texts = pc.unique(pa.chunked_array([texts, chunk.cast(pa.string()).drop_null()]))
            if len(texts) > _MOST_SEARCHED:
                break
        else:
            codes: CodeArray = empty(len(values), np.int32)
            first = 0
            for chunk in values.chunks:
                own = pc.index_in(chunk.cast(pa.string()), value_set=texts).fill_null(-1)
                codes[first : first + len(chunk)] = np.asarray(own)
                first += len(chunk)
                touched(chunk.nbytes)
            return codes, texts
    encoded = values.cast(pa.string()).dictionary_encode().combine_chunks()
    return np.asarray(encoded.indices.fill_null(-1), dtype=np.int32), encoded.dictionary


def kind_of_text(text: str) -> Kind:
    """Return the kind of a single text."""
    texts = pa.array([text], pa.string())
    return "date" if _orders(texts) else _kind_and_numbers(texts)[0]


def _kind_and_numbers(
    texts: pa.StringArray, date_format: str | None = None
) -> tuple[Kind, FloatArray | None]:
    """Return the kind that fits all texts, and their numbers unless they are text."""
    if not len(texts):
        return "empty", np.empty(0)
    if date_format is not None:
        dates = pc.strptime(texts, date_format, "us", error_is_null=True)
        if not dates.null_count:
            return "date", _days(dates)
    found = _cast(texts, pa.float64())
    if found is not None:
        return "number", _finite(found)
    lowered = pc.utf8_lower(texts)
    if pc.all(pc.is_in(lowered, value_set=pa.array(TRUTH))).as_py():
        return "boolean", _finite(pc.equal(lowered, "true").cast(pa.float64()))
    found = _cast(texts, pa.timestamp("us"))
    if found is None and (zoned := _cast(texts, pa.timestamp("us", tz="UTC"))) is not None:
        found = zoned.cast(pa.timestamp("us"))
    if found is None:  # Arrow cannot cast text to a time, so a time is read as one of the first day
        found = _cast(pc.binary_join_element_wise("1970-01-01", texts, " "), pa.timestamp("us"))
    return ("text", None) if found is None else ("date", _days(found))


def _finite(values: pa.Array | pa.ChunkedArray) -> FloatArray:
    """Return float64 values with NaN for missing and infinite ones."""
    return without_beyond(np.asarray(values, dtype=np.float64), np.finfo(np.float64).max)


def without_beyond(numbers: FloatArray, largest: float = LARGEST) -> FloatArray:
    """Return numbers with NaN for those whose size is above ``largest``."""
    found = numbers
    for place in row_blocks(len(numbers)):
        beyond = np.abs(numbers[place]) > largest
        if beyond.any():
            if found is numbers:
                found = copied(numbers)
            found[place][beyond] = np.nan
    return found


def _days(values: pa.Array | pa.ChunkedArray) -> FloatArray:
    kind = pa.timestamp("us")
    if pa.types.is_time(values.type) or pa.types.is_duration(values.type):
        kind = pa.time64("us") if pa.types.is_time(values.type) else pa.duration("us")
    whole = values.cast(kind, safe=False).cast(pa.int64())
    microseconds: FloatArray = np.asarray(whole, dtype=np.float64)
    return microseconds / _MICROSECONDS_PER_DAY


def _cast(values: pa.Array, kind: pa.DataType) -> pa.Array | None:
    try:
        pc.cast(values[:_FIRST_LOOK], kind)
        return pc.cast(values, kind)
    except pa.ArrowInvalid:
        return None


def _orders(texts: pa.StringArray) -> dict[str, FloatArray]:
    """Return dates such as ``31.12.1960`` as days, in each order in which all of them can be read."""
    if not len(texts) or not pc.all(pc.match_substring_regex(texts, _DAY_MONTH_YEAR)).as_py():
        return {}
    parts = pc.extract_regex(texts, _DAY_MONTH_YEAR)
    a, b = (pc.utf8_lpad(parts.field(name), 2, "0") for name in ("a", "b"))
    year, clock = parts.field("y"), pc.utf8_lpad(parts.field("t"), 5, "0")
    clock = pc.if_else(pc.equal(parts.field("t"), ""), "00:00", clock)
    found = {}
    for order, month, day in ((DAY_FIRST, b, a), (MONTH_FIRST, a, b)):
        dates = pc.binary_join_element_wise(year, month, day, "-")
        read = _cast(pc.binary_join_element_wise(dates, clock, " "), pa.timestamp("us"))
        if read is not None:
            found[order] = _days(read)
    return found
