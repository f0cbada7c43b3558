"""Conversion of table columns to the matrix that learners see, and of labels to classes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from fedgmm.core.moments import Scaling
from fedgmm.data.dataset import TASKS
from fedgmm.data.inputs import looks_continuous
from fedgmm.data.tables.columns import (
    PLAIN,
    TRUTH,
    ColumnValues,
    Decimals,
    FileFormat,
    FloatArray,
    IntArray,
    Kind,
    kind_of_text,
    without_point,
)
from fedgmm.data.tables.errors import TableError, ValueKindError, listed, quoted, similar_name
from fedgmm.data.tables.summaries import look_like_names
from fedgmm.support.checks import (
    Flag,
    NonNegativeInt,
    Text,
    Texts,
    check_fields,
    integer,
    number,
    one_of,
)
from fedgmm.support.scratch import as_bytes, gathered, row_blocks, where
from fedgmm.wording import first_few

Role = Literal["number", "date", "category", "ignored"]

OTHER = "(other)"
MISSING_NAME = "(missing)"
NO_LABEL = "(none)"
"""The class of all rows if no column is to be predicted."""

UNKNOWN = -1
"""The code of a label that is missing, or that no client had in training."""

KIND_NAMES: dict[Kind, str] = {
    "number": "numbers",
    "date": "dates",
    "boolean": "true and false",
    "text": "text",
}
_BLOCK_ROWS = 16_384
_FARTHEST = 1e12  # standard deviations; among n training rows none lies farther than √n
_MOST_CLASSES = 1000
_LARGEST_NUMBER = 2.0**53


def _check_split(name: str, value: Any) -> None:
    """Raise unless ``value`` holds the shares of training, validation and test rows."""
    fits = isinstance(value, (list, tuple)) and len(value) == 3
    valid = fits and all(type(one) in (int, float) and one >= 0 for one in value)
    if not valid or abs(sum(value) - 1.0) > 1e-9 or not value[0]:
        raise ValueError(
            f"{name} must be three shares, of training, validation and test rows, that sum to 1, "
            f"got {value!r}."
        )


Encoded = FloatArray | Decimals | IntArray
"""Numbers of rows, or indices of their categories."""


@dataclass(frozen=True)
class TableOptions:
    """Options for reading tables.

    Attributes:
        label: the column to predict; ``None`` without one.
        client_column: the column that names the client; ``None`` means one file per client.
        categorical: number columns whose values are names of groups.
        ignore: columns to leave out.
        max_categories: most categories of one column; the rarest are joined.
        indicator_from: share of missing values from which on a column gets an indicator of them.
        split: shares of training, validation and test rows within each client.
        seed: seed of the split.
        client: name of the client if there is only one file; ``None`` means the file's name.
        no_header: the first line of files holds values; columns are called ``column_1`` and so on.
        names: names of the columns of files without a header, in their order.
        missing_values: further texts or numbers that mean a missing value, such as ``-9``.
        date_format: format of dates, such as ``%d.%m.%Y``; ``None`` recognises them.
        id: columns that identify rows: never an input, but in the output of predictions.
        task: ``"classification"`` or ``"regression"``; ``"auto"`` is classification, and raises if the
            labels look like measurements.
        memory: tables that need more memory, such as ``"2GB"``, are kept in scratch files and read in
            blocks; ``None`` means half of the memory that is available. Results do not depend on it.
    """

    label: Text | None
    client_column: Text | None = None
    categorical: Texts = ()
    ignore: Texts = ()
    max_categories: Annotated[int, integer(2)] = 50
    indicator_from: Annotated[float, number(least=0, most=1)] = 0.01
    split: Annotated[tuple[float, float, float], _check_split] = (0.6, 0.2, 0.2)
    seed: NonNegativeInt = 0
    client: Text | None = None
    task: Annotated[str, one_of(*TASKS)] = "auto"
    no_header: Flag = False
    names: Texts = ()
    missing_values: Texts = ()
    date_format: Text | None = None
    id: Texts = ()
    memory: Text | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.memory is not None:
            as_bytes(self.memory)
        if self.client is not None and self.client_column is not None:
            raise ValueError("client and client_column exclude each other; omit one of them.")
        if self.label is not None and self.client_column == self.label:
            raise ValueError(f"Column {self.label!r} cannot be both the label and the client.")
        for name in (self.label, self.client_column):
            if name is not None and name in self.left_out:
                raise ValueError(
                    f"Column {name!r} is the label or the client; do not ignore it, and do not declare it "
                    "an id."
                )
        twice = [name for name, count in Counter(self.names).items() if count > 1]
        if twice:
            raise ValueError(f"names has {twice[0]!r} twice; each column needs its own name.")
        if self.date_format is not None and "%" not in self.date_format:
            raise ValueError(
                f"date_format must be written like %d.%m.%Y or %Y-%m-%d, got {self.date_format!r}."
            )

    @property
    def left_out(self) -> tuple[str, ...]:
        """The columns that are not inputs: ignored ones and ids."""
        return (*self.ignore, *self.id)

    @property
    def written(self) -> FileFormat:
        """The format of the files."""
        return FileFormat(
            self.no_header, self.names, self.missing_values, self.date_format, self.label
        )


# ---------------------------------------------------------------------- labels


@dataclass(frozen=True)
class Labels:
    """The label column and its classes.

    Attributes:
        name: name of the column.
        classes: sorted truth values, whole numbers, numbers or texts; empty for numbers to predict.
        scaling: mean and deviation of numbers to predict; ``None`` for classes.
    """

    name: str
    classes: tuple[Any, ...]
    scaling: tuple[float, float] | None = None

    @classmethod
    def agreed(cls, name: str, counts: Iterable[Mapping[str, int]], task: str = "auto") -> Labels:
        """Return the union of all clients' labels; the task ``"auto"`` raises for measurements.

        ``counts`` are, for each client, how often each label occurs, as it is written.
        """
        counts = list(counts)
        read = as_classes(text for own in counts for text in own)
        classes = tuple(sorted(set(read.values())))
        rows = sum(sum(own.values()) for own in counts)
        texts = bool(classes) and isinstance(classes[0], str)
        unlike_classes = (
            look_like_names(len(classes), rows)
            if texts
            else looks_continuous(np.array(classes), rows)
        )
        if task == "auto" and (unlike_classes or len(classes) > _MOST_CLASSES):
            like, remedy = "a measurement", "--task regression predicts numbers"
            if texts:
                like, remedy = "names, dates or free text", "--label names another column"
            raise ValueError(
                f"The label column {name!r} has {len(classes):,} different values, such as "
                f"{quoted(classes[0])} and {quoted(classes[1])}; it looks like {like}, not like classes: "
                f"{remedy}, --task classification makes every value a class (task in [data])."
            )
        if len(classes) < 2:
            only = f"only the class {quoted(classes[0])}" if classes else "no values"
            raise ValueError(
                f"The label column {name!r} has {only} in all files; classification needs two classes."
            )
        return cls(name, classes)

    @classmethod
    def of_numbers(cls, name: str, mean: float, variance: float) -> Labels:
        """Return a column of numbers to predict, with its mean and variance over all clients."""
        if not (math.isfinite(mean) and 0 < variance < math.inf):
            problem = "only one value" if variance == 0 else "numbers that are too large"
            raise ValueError(f"The label column {name!r} has {problem} in all files.")
        return cls(name, (), (mean, math.sqrt(variance)))

    @classmethod
    def absent(cls) -> Labels:
        """Return labels for data without a label column: one class for all rows."""
        return cls("", (NO_LABEL,))

    @property
    def target(self) -> Scaling | None:
        """Mean and deviation of numbers to predict, as tensors; ``None`` for classes."""
        if self.scaling is None:
            return None
        mean, deviation = torch.tensor(self.scaling, dtype=torch.float64)
        return Scaling(mean, deviation)

    @property
    def array(self) -> NDArray[Any]:
        """The classes as an array, ``(K,)``."""
        return np.array(self.classes)

    def encode(self, texts: Iterable[str]) -> tuple[IntArray, list[str]]:
        """Return the class index of each text, and the texts that are not classes.

        The index of these is :data:`UNKNOWN`.
        """
        read = _label_reader([str(c) for c in self.classes])
        place = {label: index for index, label in enumerate(self.classes)}
        indices, unknown = [], []
        for text in texts:
            try:
                label = read(text)
            except ValueError:
                label = text
            indices.append(place.get(label, UNKNOWN))
            if indices[-1] == UNKNOWN:
                unknown.append(text)
        return np.array(indices, dtype=np.int64), unknown

    def encode_column(self, values: ColumnValues) -> tuple[IntArray | FloatArray, list[str]]:
        """Return the class index, or number to predict, of each row ``(n,)``, and unknown texts."""
        if self.scaling is not None:
            return numbers_to_predict(values, self.name), []
        codes, texts = values.categories()
        indices, unknown = self.encode(texts)
        lookup = np.append(indices, UNKNOWN)  # the code of a missing value is -1
        return gathered(lookup, codes), unknown

    def record(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        scaling = {} if self.scaling is None else {"scaling": list(self.scaling)}
        return {"name": self.name, "classes": list(self.classes), **scaling}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Labels:
        """Invert :meth:`record`."""
        scaling = record.get("scaling")
        if scaling is not None:
            mean, deviation = map(float, scaling)
            return cls.of_numbers(str(record["name"]), mean, deviation**2)
        return cls(str(record["name"]), tuple(record["classes"]))


def is_known(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which labels of rows are classes, or numbers to predict, ``(n,)``."""
    return np.asarray(labels != UNKNOWN) if labels.dtype.kind == "i" else ~np.isnan(labels)


def known_rows(labels: NDArray[Any]) -> IntArray:
    """Return the indices of the rows whose labels are known."""
    return where(lambda place: is_known(labels[place]), len(labels))


def numbers_to_predict(values: ColumnValues, name: str) -> FloatArray:
    """Return a label column as numbers, NaN where missing."""
    if values.kind not in ("number", "empty") or values.numbers is None:
        problem = f"the label column {quoted(name)} holds {KIND_NAMES[values.kind]}"
        raise ValueKindError(f"{problem}, but regression needs numbers.", problem)
    return np.asarray(values.numbers)


def as_classes(texts: Iterable[str]) -> dict[str, Any]:
    """Return the class that each text stands for, given all texts that occur."""
    known = sorted(set(texts))
    read = _label_reader(known)
    return {text: read(text) for text in known}


def _label_reader(texts: list[str]) -> Callable[[str], Any]:
    """Return the first of whole number, number, truth value and text that can read all labels."""
    readers: tuple[Callable[[str], Any], ...] = (_whole, _number, _truth)
    for read in readers:
        try:
            for text in texts:
                read(text)
        except ValueError:
            continue
        return read
    return str


def _truth(text: str) -> bool:
    """Read a truth value; next to true and false, ``0`` and ``1`` count as truth values."""
    if text.lower() not in ("true", "1", "1.0", "false", "0", "0.0"):
        raise ValueError(text)
    return text.lower() in ("true", "1", "1.0")


def _whole(text: str) -> int:
    """Read ``1`` and ``1.0`` as 1, because programs write whole numbers both ways; ``007`` is text."""
    found = re.fullmatch(r"([+-]?(?:0|[1-9]\d*))(?:\.0*)?", text, flags=re.ASCII)
    if found is None or abs(int(found[1])) >= 2**63:  # does not fit into an array of integers
        raise ValueError(text)
    return int(found[1])


def _number(text: str) -> float:
    written = r"[+-]?(?:0|[1-9]\d*|(?=\.))(?:\.\d*)?(?:[eE][+-]?\d+)?"
    # distinct texts may be the same number if it is too large
    if not re.fullmatch(written, text, flags=re.ASCII) or abs(float(text)) > _LARGEST_NUMBER:
        raise ValueError(text)
    return float(text)


# ---------------------------------------------------------------------- columns


@dataclass(frozen=True)
class Column:
    """The conversion of one column.

    Attributes:
        name: name in the file.
        role: ``"number"`` and ``"date"`` are standardised; ``"category"`` becomes one column per
            category, or one column if there are two; ``"ignored"`` is not used and may be missing.
        mean: mean over all clients; it replaces missing values.
        scale: standard deviation, or one if all values are equal.
        categories: sorted, with ``"(other)"`` last if the rarest were joined.
        indicator: whether a column of zeros and ones marks missing values.
        reason: the reason why the column is ignored.
        optional: some client lacked the column in training, so later files may lack it, too.
        order: how dates such as ``3/4/2020`` are read: ``"day first"`` or ``"month first"``; empty if
            training had none.
        vector: the column of vectors that this number is an entry of; empty for other columns.
    """

    name: str
    role: Role
    mean: float = 0.0
    scale: float = 1.0
    categories: tuple[str, ...] = ()
    indicator: bool = False
    reason: str = ""
    optional: bool = False
    order: str = ""
    vector: str = ""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the matrix columns that it becomes."""
        if self.role == "ignored":
            return ()
        missing = (f"{self.name}={MISSING_NAME}",) if self.indicator else ()
        if self.role != "category":
            return (self.name, *missing)
        shown = self.categories[1:] if len(self.categories) == 2 else self.categories
        return (*(f"{self.name}={category}" for category in shown), *missing)

    def needs_text(self, values: ColumnValues | None) -> bool:
        """Return whether the column must be read as text; ``values`` are those that are kept."""
        if self.role != "category":
            return False
        # truth values are the same category however they are written
        return values is None or not (
            values.as_written or (values.kind == "boolean" and self.categories == TRUTH)
        )

    def encode(self, values: ColumnValues) -> tuple[Encoded, int]:
        """Return numbers or indices of categories ``(n,)``, and the number of unknown categories.

        The index of an unknown category is ``len(categories)``, that of a missing value one more.

        Raises:
            ValueKindError: values of another kind than in training.
        """
        if self.role == "category":
            return self._encode_categories(values)
        # some clients write 0 and 1, others false and true
        fitting = ("date", "empty") if self.role == "date" else ("number", "boolean", "empty")
        if values.kind not in fitting:
            texts = values.texts.to_pylist() if values.kind == "text" else []
            example = next((text for text in texts if kind_of_text(text) not in fitting), None)
            such = "" if example is None else f" such as {quoted(example)}"
            known = KIND_NAMES["date" if self.role == "date" else "number"]
            raise self._kind_error(values.kind, such, known)
        orders = values.orders
        if not orders:
            assert values.numbers is not None
            return values.numbers, 0
        if self.order in orders:
            return orders[self.order], 0
        if not self.order and len(orders) == 1:
            return next(iter(orders.values())), 0
        known = f"training had the {self.order}" if self.order else "training did not say which"
        problem = f"the column {quoted(self.name)} holds dates with the {' or the '.join(orders)}"
        raise ValueKindError(
            f"{problem}, but {known}; write dates as 2024-12-31.", f"{problem}, but {known}"
        )

    def fill(self, encoded: NDArray[Any], out: FloatArray) -> None:
        """Write encoded rows ``(n,)`` into ``out``, ``(len(outputs), n)``."""
        if self.role == "category":
            first = 1 if len(self.categories) == 2 else 0
            for row, index in enumerate(range(first, len(self.categories))):
                out[row] = encoded == index
            missing = encoded == len(self.categories) + 1
        else:
            missing = np.isnan(encoded)
            np.subtract(encoded, self.mean, out=out[0])
            out[0] /= self.scale
            np.clip(out[0], -_FARTHEST, _FARTHEST, out=out[0])
            out[0][missing] = 0.0
        if self.indicator:
            out[-1] = missing

    def _kind_error(self, kind: Kind, such: str, known: str) -> ValueKindError:
        problem = f"the column {quoted(self.name)} holds {KIND_NAMES[kind]}"
        remedy = "correct these values, or leave them empty"
        if known == KIND_NAMES["date"]:
            remedy = "write dates as 2024-12-31"
        full = f"{problem}{such}, but training had {known}; {remedy}."
        return ValueKindError(full, f"{problem}, but training had {known}")

    def _encode_categories(self, values: ColumnValues) -> tuple[IntArray, int]:
        codes, texts = values.categories()
        texts = [without_point(text) for text in texts]
        if self.categories == TRUTH:
            written = {"0": "false", "1": "true"}
            texts = [written.get(text, text.lower()) for text in texts]
        place = {category: index for index, category in enumerate(self.categories)}
        if texts and not any(text in place for text in texts) and OTHER not in place:
            # new texts may be new categories, but numbers are another kind of column
            known = {kind_of_text(category) for category in self.categories}
            if values.kind in ("number", "date") and values.kind not in known:
                raise self._kind_error(values.kind, "", listed(self.categories))
        unknown = place.get(OTHER, len(self.categories))
        missing = len(self.categories) + 1
        lookup = np.array([*(place.get(text, unknown) for text in texts), missing], dtype=np.int64)
        encoded = gathered(lookup, codes)  # the code of a missing value is -1: the last entry
        return encoded, sum(
            int(np.count_nonzero(encoded[place] == len(self.categories)))
            for place in row_blocks(len(encoded))
        )


@dataclass(frozen=True)
class EncodedRows:
    """The rows of a file, ready to be written as a matrix.

    Attributes:
        columns: the conversions with outputs.
        encoded: of each, the encoded rows ``(n,)``.
        unknown: number of values per column that are categories which no client had in training.
    """

    columns: list[Column]
    encoded: list[Encoded]
    unknown: dict[str, int]

    def blocks(self) -> Iterator[NDArray[np.float32]]:
        """Yield the matrix in blocks of rows ``(b, d)``, so that no second copy of it is held."""
        width = sum(len(column.outputs) for column in self.columns)
        rows = len(self.encoded[0])
        for start in range(0, rows, _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, rows)
            out = np.empty((width, stop - start))
            first = 0
            for column, encoded in zip(self.columns, self.encoded, strict=True):
                size = len(column.outputs)
                column.fill(encoded[start:stop], out[first : first + size])
                first += size
            yield np.ascontiguousarray(out.T, dtype=np.float32)


@dataclass(frozen=True)
class Preprocessing:
    """The conversion of files to the matrix and the classes of a model.

    Attributes:
        columns: in the order of the first client's file.
        labels: the label column and its classes.
        client_column: the column that names the client, or ``None``.
        ids: columns that identify rows; later files may have them.
        written: how the files are written.
    """

    columns: tuple[Column, ...]
    labels: Labels
    client_column: str | None = None
    ids: tuple[str, ...] = ()
    written: FileFormat = PLAIN

    @property
    def used(self) -> list[Column]:
        """The columns that are not ignored."""
        return [column for column in self.columns if column.outputs]

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the columns of the matrix, ``(d,)``."""
        return tuple(output for column in self.columns for output in column.outputs)

    @property
    def feature_groups(self) -> dict[str, list[int]]:
        """Columns of the matrix that each column of the files becomes; a vector is one group."""
        groups: dict[str, list[int]] = {}
        first = 0
        for column in self.used:
            own = groups.setdefault(column.vector or column.name, [])
            own += range(first, first + len(column.outputs))
            first += len(column.outputs)
        return groups

    @property
    def vectors(self) -> tuple[int, ...]:
        """Columns of the matrix that are entries of vectors."""
        entries = {column.name for column in self.used if column.vector and column.role == "number"}
        return tuple(j for j, name in enumerate(self.feature_names) if name in entries)

    def text_columns(self, kept: Mapping[str, ColumnValues]) -> set[str]:
        """Return the columns that must be read as text, in spite of the values that are kept."""
        return {c.name for c in self.used if c.needs_text(kept.get(c.name))}

    def check_header(
        self,
        path: Path | str,
        names: Collection[str],
        *,
        label_needed: bool = False,
        vectors: Collection[str] = (),
    ) -> list[str]:
        """Return notes about columns of a file that are absent, or unknown and therefore ignored.

        ``names`` are its columns, with every entry of its columns of ``vectors``.
        """
        here = set(names)
        known = {column.name for column in self.columns}
        absent = [column for column in self.used if column.name not in here]
        others = {self.labels.name, self.client_column or "", *self.ids}
        unknown = [name for name in names if name not in known | others]
        needed = [
            column.vector or column.name
            for column in absent
            if not (column.optional or column.indicator) or len(absent) == len(self.used)
        ]
        other = [name for name in vectors if f"{name}_0" not in known]
        embedded = [column.vector for column in absent if column.vector in needed]
        if embedded and other:
            problem = (
                f"its column of vectors {quoted(other[0])} was embedded with another encoder than "
                f"{quoted(embedded[0])} of the model; embed it again with the same encoder, weights "
                "and size"
            )
            raise TableError(path, f"{problem}.", public=problem)
        if needed:
            needed = [*dict.fromkeys(needed)]
            many, near = len(needed) > 1, _similar(needed, unknown)
            raise TableError(
                path,
                f"{'columns are' if many else 'a column is'} missing that the model needs: "
                f"{first_few(map(quoted, needed), 8)}{near}; correct the header, or give a file with all "
                "columns of training.",
            )
        if label_needed and self.labels.name not in here:
            raise TableError(path, f"the label column {quoted(self.labels.name)} is missing.")
        file, lacking = Path(path).name, [*dict.fromkeys(c.vector or c.name for c in absent)]
        near = _similar(lacking, unknown)
        found = {
            f"{listed(lacking)} not in the file; counted as missing values{near}.": absent,
            f"{listed(unknown)} not used, because training had no such column.": unknown,
        }
        return [f"{file}: {note}" for note, columns in found.items() if columns]

    def encode(
        self, path: Path | str, columns: Mapping[str, ColumnValues], rows: int
    ) -> EncodedRows:
        """Encode the ``rows`` of a file; categories must be kept as text. Absent columns are missing."""
        absent = ColumnValues.absent(rows)
        encoded, unknown = [], {}
        for column in self.used:
            try:
                own, count = column.encode(columns.get(column.name, absent))
            except ValueKindError as error:
                raise TableError(path, str(error), public=error.public) from None
            encoded.append(own)
            if count:
                unknown[column.name] = count
        return EncodedRows(self.used, encoded, unknown)

    def record(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "columns": [asdict(column) for column in self.columns],
            "labels": self.labels.record(),
            "client_column": self.client_column,
            "ids": list(self.ids),
            "written": asdict(self.written),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Preprocessing:
        """Invert :meth:`record`."""
        columns = tuple(
            Column(**{**column, "categories": tuple(column["categories"])})
            for column in record["columns"]
        )
        for column in columns:
            if column.role not in get_args(Role) or not (
                math.isfinite(column.mean) and 0 < column.scale < math.inf
            ):
                raise ValueError(f"the preprocessing of column {column.name!r} is not valid")
        written: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in record.get("written", {}).items()
        }
        return cls(
            columns,
            Labels.from_record(record["labels"]),
            record["client_column"],
            tuple(record.get("ids", ())),
            FileFormat(**written),
        )


def _similar(absent: Sequence[str], unknown: Sequence[str]) -> str:
    """Return hints about unknown columns of a file with names similar to absent ones."""
    hints = dict.fromkeys(similar_name(name, unknown) for name in absent)
    return "".join(hints)
