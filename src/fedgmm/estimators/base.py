"""Parts that the estimators share: the client of each row, callbacks and threads."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from joblib import effective_n_jobs  # type: ignore[import-untyped]
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import _safe_indexing
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_array, check_is_fitted, check_X_y, validate_data

from fedgmm.core.checks import array_of_names, check_choice, check_integer
from fedgmm.data.inputs import encode_clients
from fedgmm.model.model import FederatedModel
from fedgmm.wording import counted

FloatArray = NDArray[np.float64]
DTYPES = [np.float64, np.float32, np.uint8]


class NoClientsWarning(UserWarning):
    """A model of several clients predicts rows without their clients."""


class TakesClients:
    """The part of an estimator that knows which client a row belongs to.

    Attributes:
        client_column: name or index of the column of ``X`` that holds client ids, or ``None``.
        unknown_clients: ``"error"`` or ``"federation"``.
        clients_: the clients of the fit.
    """

    client_column: str | int | None
    unknown_clients: str
    clients_: NDArray[Any]

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
        self,
        X: Any,
        clients: ArrayLike | None,
        *,
        reset: bool,
        y: Any = "no_validation",
        **checks: Any,
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


def chosen_clients(client: Hashable | None, clients: ArrayLike | None) -> Any:
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


def _has_density(estimator: Any) -> bool:
    if estimator.algorithm != "fedgmm":
        raise AttributeError(
            f"algorithm={estimator.algorithm!r} has no density of the inputs; use 'fedgmm'."
        )
    return True


class PredictsByModel(TakesClients):
    """The part of an estimator that answers from a trained model.

    Attributes:
        model_: the trained model.
    """

    model_: FederatedModel

    @available_if(_has_density)  # type: ignore[untyped-decorator]
    def score_samples(
        self, X: ArrayLike, *, client: Hashable | None = None, clients: ArrayLike | None = None
    ) -> FloatArray:
        """Return ``log P_c(x)`` of every row, ``(n_rows,)``: low for rows unlike anything seen.

        Requires ``algorithm="fedgmm"``.
        """
        return self._fitted().score_samples(*self._rows(X, client, clients))

    def adapt(self, client: Hashable, X: ArrayLike, y: ArrayLike | None = None) -> Self:
        """Add a client by learning only its weights, from labelled or unlabelled rows.

        A warning says if nothing could change or nothing has.
        """
        model = self._fitted()
        rows, _ = self._split_clients(X, None, reset=False, dtype=DTYPES, allow_nd=True)
        note = model.adapt(client, rows, y).note
        if note is not None:
            warnings.warn(note, stacklevel=2)
        self.clients_ = array_of_names(model.names)
        return self

    def _keep(self, model: FederatedModel) -> None:
        """Store a fitted model, without the rows."""
        model.dataset = None
        self.model_ = model
        self.clients_ = array_of_names(model.names)
        self.n_iter_ = len(model.history)
        self._warned = False

    def _fitted(self) -> FederatedModel:
        check_is_fitted(self)
        return self.model_

    def _rows(
        self, X: ArrayLike, client: Hashable | None, clients: ArrayLike | None
    ) -> tuple[NDArray[Any], Any]:
        """Return checked rows, and their clients as the model takes them."""
        refuse_mapping(X)
        ids = chosen_clients(client, clients)
        rows, ids = self._split_clients(X, ids, reset=False, dtype=DTYPES, allow_nd=True)
        if ids is None and len(self.clients_) > 1 and self._is_personal:
            self._warn_without_clients()
        return rows, self._known_clients(ids)

    @property
    def _is_personal(self) -> bool:
        """Whether predictions may differ between clients."""
        found = self.model_.prediction
        weights = found.client_weights
        return found.labels is not None or weights is None or weights.shape[1] > 1


def refuse_mapping(X: Any) -> None:
    """Raise if rows are given as ``{client: rows}``, which scikit-learn cannot split."""
    if isinstance(X, Mapping) and not hasattr(X, "shape"):  # some sparse matrices are mappings
        raise TypeError(
            "X is a mapping; pass one array with clients=ids, or train a model with "
            "fedgmm.train(FederatedDataset.from_clients({client: (X, y)}))."
        )
