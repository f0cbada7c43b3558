"""Checks of user input: rows, labels and client ids become arrays, or an error names the client."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from fedgmm.data.federated import ClientRows, client_rows
from fedgmm.support.checks import given_array
from fedgmm.wording import counted, first_few

NO_CLIENT = -1
"""Code of a row without a client."""

_MOST_FRACTIONS = 20  # different numbers such as 0.5 that may be classes
_SURELY_CLASSES = 100  # different whole numbers that may be classes, however few rows there are
_MOST_CLASSES = 1000  # different whole numbers that may be classes, however many rows there are

Pairs = list[tuple[Hashable, Any]]


def as_pairs(X: Any) -> Pairs | None:
    """Return ``(client, rows)`` pairs if ``X`` is a mapping or an iterable of pairs, else ``None``."""
    if hasattr(X, "shape") or hasattr(X, "__array__") or isinstance(X, str):
        return None  # arrays and tables; some sparse matrices are mappings too
    if isinstance(X, Mapping):
        return list(X.items())
    if isinstance(X, Sequence):
        first = X[0] if len(X) else None
        if not isinstance(first, (tuple, list)) or len(first) != 2:
            return None
        # a name with rows; a row of two numbers is not a pair
        rows = isinstance(first[1], (list, tuple)) or len(getattr(first[1], "shape", ())) > 0
        return list(X) if rows and isinstance(first[0], Hashable) else None
    if isinstance(X, Iterable):
        return list(X)
    return None


def matrices_of_pairs(pairs: Pairs) -> tuple[list[NDArray[np.floating]], list[Hashable]]:
    """Return numeric matrices with the same number of columns, and the clients' names.

    Raises:
        ValueError: no client, a repeated client, an empty client, or different numbers of columns.
        TypeError: an entry that is not a pair.
    """
    if not pairs:
        raise ValueError("X holds no client; pass at least one (client, rows) pair.")
    matrices: list[NDArray[np.floating]] = []
    names: list[Hashable] = []
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(
                f"Expected (client, rows) pairs, got {type(pair).__name__}: {pair!r:.60}."
            )
        name, rows = pair
        matrices.append(_matrix(rows, name))
        names.append(name)
    check_once(names)
    columns = matrices[0].shape[1]
    for name, matrix in zip(names, matrices, strict=True):
        if matrix.shape[1] != columns:
            raise ValueError(
                f"Client {name!r} has {counted(matrix.shape[1], 'column')}, but client {names[0]!r} has "
                f"{columns}; all clients need the same columns."
            )
    return matrices, names


def check_once(names: list[Hashable]) -> None:
    """Raise for a client that appears twice."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"Client {twice!r} appears more than once; join its rows first.")


def columns_of_pairs(pairs: Pairs) -> list[str] | None:
    """Return the column names of the clients' tables; ``None`` if no client has column names.

    Raises:
        ValueError: two tables whose columns differ in name or order.
    """
    first: tuple[Hashable, list[str]] | None = None
    for name, rows in pairs:
        columns = list(column_names(rows) or ())
        if not columns:
            continue
        if first is None:
            first = name, columns
        elif columns != first[1]:
            raise ValueError(
                f"Client {name!r} has the columns {columns}, but client {first[0]!r} has "
                f"{first[1]}; all clients need the same columns in the same order."
            )
    return None if first is None else first[1]


def column_names(rows: Any) -> tuple[str, ...] | None:
    """Return the column names of a table; ``None`` for an array, or if a name is not a string."""
    names = getattr(rows, "column_names", None)  # of pyarrow, whose ``columns`` are the data
    names = tuple(getattr(rows, "columns", ()) if names is None else names)
    return names if names and all(isinstance(name, str) for name in names) else None


def order_columns(rows: Any, expected: Sequence[str] | None, what: str) -> Any:
    """Return rows with their columns in the expected order.

    Rows without column names are returned as they are, because their columns are known by position.

    Raises:
        ValueError: a column is missing, unknown, or there twice; the message calls the rows ``what``.
    """
    names = column_names(rows)
    if names is None or expected is None or names == tuple(expected):
        return rows
    order = column_order(names, expected, what)
    return np.asarray(rows)[:, order]


def column_order(names: Sequence[str], expected: Sequence[str], what: str) -> list[int]:
    """Return the position in ``names`` of each expected name; see :func:`order_columns`."""
    problems = [
        f"{text} {first_few(map(repr, found), 10)}"
        for text, found in (
            ("lacks", [name for name in expected if name not in names]),
            ("has unknown columns:", [name for name in names if name not in expected]),
            ("has more than once:", [n for n in dict.fromkeys(names) if list(names).count(n) > 1]),
        )
        if found
    ]
    if problems:
        raise ValueError(
            f"{what} must have the columns of the fit, but it {' and '.join(problems)}."
        )
    return [list(names).index(name) for name in expected]


def _matrix(rows: Any, name: Hashable) -> NDArray[np.floating]:
    what = f"Client {name!r}"
    if isinstance(rows, tuple) and any(np.ndim(part) > 1 for part in rows):
        raise TypeError(f"{what} has a tuple of arrays; give one array of rows.")
    found = (
        np.empty((0, 1)) if isinstance(rows, (list, tuple)) and not rows else numeric(rows, what)
    )
    if not len(found):
        raise ValueError(f"{what} is empty; leave it out or give it at least one row.")
    if found.ndim != 2:
        raise ValueError(f"{what}: expected a 2D array of rows and columns, got {found.ndim}D.")
    if not found.shape[1]:
        raise ValueError(f"{what} has no columns.")
    return found.astype(np.float64) if found.dtype == np.uint8 else found


def numeric(values: Any, what: str) -> NDArray[Any]:
    """Return rows as float32, float64 or uint8, ``(n, ...)``; errors name them ``what``."""
    if hasattr(values, "toarray") and hasattr(values, "nnz"):  # of SciPy, which is not imported
        raise TypeError(f"{what} is a sparse matrix; convert it to an array with .toarray().")
    if isinstance(values, Mapping):
        raise TypeError(f"{what} is a mapping; pass an array or a data frame, (n, columns).")
    try:
        rows = np.asarray(values)
    except ValueError as error:  # lists of several lengths
        raise ValueError(f"{what} holds data that are not numeric: {error}.") from None
    if rows.ndim < 2:
        raise ValueError(
            f"{what} must have rows and columns (2D), got {rows.ndim}D of shape {rows.shape}."
        )
    if rows.dtype in (np.float32, np.float64) or (rows.dtype == np.uint8 and rows.ndim != 3):
        return rows  # batches of bytes with three axes would look like images
    try:
        if rows.dtype.kind in "cmMV":  # NumPy would cast dates and drop imaginary parts
            raise ValueError(f"they are of type {rows.dtype}")
        if rows.dtype.kind == "O":  # None and pandas' NA are missing numbers
            rows = np.where(np.frompyfunc(is_missing, 1, 1)(rows).astype(bool), np.nan, rows)
        return rows.astype(np.float64)
    except (TypeError, ValueError) as error:
        where, names = "", column_names(values)
        for place, column in enumerate(rows.T if rows.dtype.kind == "O" and rows.ndim == 2 else ()):
            try:
                column.astype(np.float64)
            except (TypeError, ValueError):
                where = f", in column {place if names is None else repr(names[place])}"
                break
        raise ValueError(
            f"{what} holds data that are not numeric{where}: {error}. "
            "Encode categories and dates as numbers, or train on files, where fedgmm fit does it."
        ) from None


def encode_clients(clients: ArrayLike, rows: int) -> tuple[NDArray[np.int64], list[Hashable]]:
    """Return the code of each row's client ``(N,)``, and the distinct clients.

    Clients are sorted if their ids can be compared. A missing id becomes ``NO_CLIENT``.

    Raises:
        ValueError: not one id per row.
    """
    ids = np.asarray(clients)
    if isinstance(clients, (list, tuple)) and ids.ndim == 1 and ids.dtype.kind in "US":
        kind = str if ids.dtype.kind == "U" else bytes
        if not all(isinstance(name, kind) for name in clients):
            ids = np.empty(len(clients), dtype=object)  # NumPy turns NaN next to a text into "nan"
            ids[:] = clients
    if ids.ndim != 1:
        raise ValueError(f"clients must hold one id per row (1D), got shape {ids.shape}.")
    if len(ids) != rows:
        raise ValueError(
            f"clients has {counted(len(ids), 'entry', 'entries')}, but X has "
            f"{counted(rows, 'row')}; give one id per row."
        )
    if not rows:
        return np.zeros(0, dtype=np.int64), []
    # Rows of a client are usually consecutive, so work on runs of equal ids.
    try:
        changes = np.flatnonzero(ids[1:] != ids[:-1]) + 1
    except TypeError:  # pandas' NA cannot be compared
        changes = np.arange(1, len(ids))
    starts = np.concatenate([[0], changes])
    run_ids = ids[starts].tolist()
    known = [name for name in run_ids if not is_missing(name)]
    try:
        names = sorted(set(known))
    except TypeError:  # names of several types keep the order of their first appearance
        names = list(dict.fromkeys(known))
    code_of = {name: code for code, name in enumerate(names)}
    run_codes = np.array([code_of.get(name, NO_CLIENT) for name in run_ids], dtype=np.int64)
    return np.repeat(run_codes, np.diff(np.append(starts, rows))), names


def looks_continuous(values: NDArray[Any], rows: int) -> bool:
    """Return whether distinct labels look like measurements rather than classes.

    Truth values, dates and texts are always classes, unless all texts are numbers and some of them
    fractions. So are up to 20 fractions, such as 0.5, and whole numbers of which there are at most 100,
    or at most 1000 with four rows each on average. ``values`` ``(K,)`` are the distinct labels of rows.
    """
    if values.dtype.kind == "O" and all(type(value) in (int, float) for value in values.tolist()):
        values = values.astype(np.float64)
    if values.dtype.kind in "UO" and all(isinstance(value, str) for value in values.tolist()):
        try:
            numbers = values.astype(np.float64)
        except ValueError:
            return False
        return bool((numbers != np.floor(numbers)).any()) and len(numbers) > _MOST_FRACTIONS
    if values.dtype.kind not in "fiu":
        return False
    if values.dtype.kind == "f" and (values != np.floor(values)).any():
        return len(values) > _MOST_FRACTIONS
    return len(values) > max(_SURELY_CLASSES, min(rows // 4, _MOST_CLASSES))


def encode_labels(
    labels: NDArray[Any], codes: NDArray[np.int64], names: Sequence[Hashable], task: str
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the sorted classes, and the class index of each label; numbers have no classes."""
    if task == "regression":
        try:
            if labels.dtype.kind not in "fiuOU":
                raise ValueError(f"it is of type {labels.dtype}")
            labels = labels.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"y must hold numbers for task='regression': {error}; use task='classification' for "
                "labels."
            ) from None
    if labels.dtype.kind == "f":
        bad = ~np.isfinite(labels)
    elif labels.dtype.kind == "O":
        bad = np.array([is_missing(label) for label in labels.tolist()], dtype=bool)
    else:
        bad = labels != labels  # NaT, the missing date, differs from itself
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(
            f"y contains NaN or a missing label: client {names[codes[row]]!r}, row {row}."
        )
    if task == "regression":
        return np.empty(0), labels
    try:
        classes, encoded = np.unique(labels, return_inverse=True)
    except TypeError:
        kinds = sorted({type(label).__name__ for label in labels.tolist()})
        raise ValueError(
            f"y holds labels of types that cannot be sorted together ({', '.join(kinds)}); use one type."
        ) from None
    if task == "auto" and looks_continuous(classes, len(labels)):
        raise ValueError(
            f"y looks continuous: it has {len(classes):,} different numbers in "
            f"{counted(len(labels), 'row')}, such as {classes[0]} and {classes[1]}. Pass "
            "task='regression' to predict numbers, or task='classification' to make every number a "
            "class."
        )
    return classes, encoded.astype(np.int64)


def row_weights(sample_weight: ArrayLike, rows: int) -> NDArray[np.float64]:
    """Return the weights of ``rows`` rows, which must not be negative, nor all zero."""
    weights = given_array("sample_weight", sample_weight, (rows,))
    if (weights < 0).any():
        raise ValueError(f"sample_weight must not be negative, got {weights.min():g}.")
    if not weights.any():
        raise ValueError("sample_weight is zero for all rows; at least one row must count.")
    return weights


def is_missing(name: Any) -> bool:
    """Return whether a client's id is ``None``, NaN, NaT or NA."""
    # only NaN differs from itself; pandas' NA cannot be compared
    return name is None or type(name).__name__ in ("NAType", "NaTType") or bool(name != name)


def checked_rows(
    matrices: Sequence[NDArray[np.floating]],
    codes: NDArray[np.int64],
    names: Sequence[Hashable],
    column_names: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float64,
) -> ClientRows:
    """Return stacked rows after a check that all values can be squared in precision ``dtype``.

    ``matrices`` are ``(n_k, d)``, together ``N`` rows, and ``codes`` their clients ``(N,)``. An error names
    the client and the column of a bad value.
    """
    if (codes == NO_CLIENT).any():
        row = int(np.argmax(codes == NO_CLIENT))
        raise ValueError(f"Row {row} has no client (its id is missing); give every row a client.")
    rows = client_rows(matrices, codes, names)
    largest = torch.finfo(dtype).max ** 0.5 * 1e-4
    first = 0
    for chunk in rows.chunks:
        smallest, greatest = torch.aminmax(chunk)  # NaN stays NaN
        if not (abs(float(smallest)) < largest and abs(float(greatest)) < largest):
            row, column = torch.nonzero(~(chunk.abs() < largest))[0].tolist()
            value, precision = float(chunk[row, column]), str(dtype).removeprefix("torch.")
            what = f"{value:.3g}, a value too large to square in {precision}; rescale it"
            if not np.isfinite(value):
                what = "NaN" if np.isnan(value) else "infinity"
            client = names[int(codes[first + row])]
            where = column_names[column] if column_names is not None else column
            raise ValueError(
                f"Input X contains {what}: client {client!r}, column {where!r}, row {first + row}."
            )
        first += len(chunk)
    return rows


def codes_of_known_clients(clients: Any, rows: int, known: Sequence[Hashable]) -> NDArray[np.int64]:
    """Return the index in ``known`` of each row's client, ``(N,)``; ``NO_CLIENT`` without one.

    ``clients`` is one id per row, one id for all ``rows``, or ``None``.
    """
    if clients is None:
        return np.full(rows, NO_CLIENT, dtype=np.int64)
    position = {name: code for code, name in enumerate(known)}
    if np.ndim(clients) == 0:
        own = clients.item() if isinstance(clients, np.generic) else clients
        names, codes = [own], np.zeros(rows, dtype=np.int64)
        if is_missing(own):
            return np.full(rows, NO_CLIENT, dtype=np.int64)
    else:
        codes, names = encode_clients(clients, rows)
    unknown = [name for name in names if name not in position]
    if unknown:
        shown = first_few(map(repr, known), 5)
        raise ValueError(
            f"Unknown client {unknown[0]!r}: the model knows {counted(len(known), 'client')} ({shown}). "
            "To use the weights of the whole federation, omit the client, or set "
            "unknown_clients='federation' in an estimator."
        )
    lookup = np.array([*(position[name] for name in names), NO_CLIENT], dtype=np.int64)
    return np.asarray(lookup[codes])
