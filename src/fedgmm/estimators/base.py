"""Parts that all estimators share: the client of each row, threads, parameters."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from joblib import effective_n_jobs  # type: ignore[import-untyped]
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import check_array, check_X_y, validate_data

from fedgmm.core.checks import check_choice, check_integer
from fedgmm.data.inputs import encode_clients
from fedgmm.wording import counted

Id = Hashable | None
"""A known client for all rows; ``None`` uses the federation's weights."""
Ids = ArrayLike | None
"""One client per row."""


class NoClientsWarning(UserWarning):
    """A model of several clients predicts rows without their clients."""


class TakesClients:
    """The part of an estimator that knows which client a row belongs to."""

    # name or index of the column of ``X`` that holds client ids, or ``None``
    client_column: str | int | None
    unknown_clients: str  # ``"error"`` or ``"federation"``
    clients_: NDArray[Any]  # the clients of the fit

    def _check_clients(self) -> None:
        """Check the parameters about clients."""
        column = self.client_column
        if column is not None and (
            isinstance(column, bool) or not isinstance(column, (str, int, np.integer))
        ):
            raise TypeError(
                f"client_column must be the name or the index of a column, got {column!r}."
            )
        check_choice("unknown_clients", self.unknown_clients, ("error", "federation"))

    def _split_clients(
        self, X: Any, clients: Ids, *, reset: bool, y: Any = "no_validation", **checks: Any
    ) -> tuple[Any, ArrayLike | None]:
        """Return checked rows without the client column, and the ids of their clients.

        Args:
            X: rows, with the client column if there is one.
            clients: ids that are given beside ``X``.
            reset: record the columns of ``X``; otherwise they must equal those of the fit.
            y: labels; if they are given, the first result is a pair of rows and labels.
            **checks: arguments of scikit-learn's ``check_array``.

        Raises:
            ValueError: ids in a column and beside ``X``, or a column that ``X`` does not have.
        """
        column = self.client_column
        if column is None:
            return validate_data(self, X, y, reset=reset, **checks), clients
        if clients is not None:
            raise ValueError(
                f"client_column={column!r} names the client of every row; do not pass clients as well."
            )
        validate_data(self, X, y, reset=reset, skip_check_array=True)
        rows, ids = split_column(X, column)
        checks["estimator"] = self
        if isinstance(y, str):
            return check_array(rows, input_name="X", **checks), ids
        return check_X_y(rows, y, **checks), ids

    def _known_clients(self, clients: Any) -> Any:
        """Return ids with ``None`` in place of unknown ones, if these use the federation's weights."""
        if clients is None or self.unknown_clients == "error":
            return clients
        known = set(self.clients_.tolist())
        if np.ndim(clients) == 0:
            own = clients.item() if isinstance(clients, np.generic) else clients
            return own if own in known else None
        codes, names = encode_clients(clients, len(clients))
        found: NDArray[Any] = np.full(len(names) + 1, None, dtype=object)
        found[:-1] = [name if name in known else None for name in names]
        return found[codes]

    def _warn_without_clients(self) -> None:
        """Warn once per fit that the federation's weights are used for all rows."""
        if self.__dict__.get("_warned", False):
            return
        self.__dict__["_warned"] = True
        warnings.warn(
            f"The model was fitted to {len(self.clients_)} clients and predicts without clients, so it "
            "uses the federation's weights for all rows. Pass clients=, or set client_column= so that "
            "scikit-learn's scorers and meta-estimators keep the client of each row.",
            NoClientsWarning,
            stacklevel=5,
        )


def split_column(X: Any, column: str | int) -> tuple[Any, NDArray[Any]]:
    """Return ``X`` without one of its columns, and that column, ``(n,)``.

    Args:
        X: a data frame or an array, ``(n, d)``.
        column: a name of a data frame's column, or an index, negative from the end.

    Raises:
        ValueError: no such column.
    """
    if hasattr(X, "toarray"):
        raise TypeError("X: sparse input is not supported; call .toarray().")
    if not hasattr(X, "shape"):
        X = np.asarray(X, dtype=object)  # numbers beside names stay numbers
    if len(X.shape) != 2:
        raise ValueError(f"client_column needs rows and columns, got X of shape {tuple(X.shape)}.")
    count = X.shape[1]
    index = column_index(list(getattr(X, "columns", ())), count, column)
    ids = np.asarray(_safe_indexing(X, index, axis=1))
    if ids.dtype.kind == "f" and np.array_equal(ids, np.round(ids)):
        ids = ids.astype(np.int64)  # an array of numbers has no integers beside its floats
    rest = [place for place in range(count) if place != index]
    return _safe_indexing(X, rest, axis=1), ids


def column_index(names: Sequence[Any], count: int, column: str | int) -> int:
    """Return the index of a column among ``count`` columns with these names, if they have any."""
    if isinstance(column, str):
        if column in names:
            return list(names).index(column)
        what = (
            f"X has the columns {list(names)}" if names else "X has no column names; give an index"
        )
        raise ValueError(f"client_column={column!r} is not a column: {what}.")
    if -count <= column < count:
        return int(column) % count
    raise ValueError(f"client_column={column} is out of range: X has {counted(count, 'column')}.")


def chosen_clients(client: Id, clients: Ids) -> Any:
    """Return ``clients``, one id per row, or ``client``, one id for all rows; not both."""
    if client is not None and clients is not None:
        raise ValueError(
            "client and clients are both given; pass client for one client of all rows, or clients for "
            "one id per row."
        )
    return client if clients is None else clients


def thread_count(n_jobs: int | None) -> int | None:
    """Return the number of threads of ``n_jobs``, counted as scikit-learn does; ``None`` is open."""
    if n_jobs is None:
        return None
    check_integer("n_jobs", n_jobs, -1_000_000)
    if n_jobs == 0:
        raise ValueError("n_jobs must not be 0; use -1 for all cores.")
    return int(effective_n_jobs(n_jobs))


def keep_parameters(estimator: object, given: Mapping[str, Any]) -> None:
    """Store the arguments of a constructor under their names, where scikit-learn looks for them.

    Args:
        estimator: the object that is made.
        given: ``locals()`` of its constructor.
    """
    vars(estimator).update({name: value for name, value in given.items() if name != "self"})
