"""Parts that the estimators share: the client of each row, training, predictions, threads."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from joblib import effective_n_jobs  # type: ignore[import-untyped]
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, is_regressor
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import _safe_indexing, check_random_state
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, check_X_y, validate_data

from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.inputs import encode_clients, row_weights
from fedgmm.model.model import FederatedModel
from fedgmm.support.checks import (
    array_of_names,
    check_choice,
    check_flag,
    check_integer,
    check_number,
)
from fedgmm.support.streaming import threads
from fedgmm.training.checkpoint import Checkpoint, CheckpointError
from fedgmm.training.in_process import OnTrainingRound, train
from fedgmm.training.loop import as_callbacks
from fedgmm.training.options import ALGORITHMS, TrainingOptions
from fedgmm.wording import counted

FloatArray = NDArray[np.float64]
Id = Hashable | None
"""A known client for all rows; ``None`` uses the federation's weights."""
Ids = ArrayLike | None
"""One client per row."""
DTYPES = [np.float64, np.float32, np.uint8]


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

        ``reset`` records the columns of ``X``; otherwise they must equal those of the fit. With labels
        ``y`` the first result is a pair of rows and labels. ``checks`` are arguments of ``check_array``.
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
    """Return a data frame or an array ``X`` without a column, and that column, ``(n,)``."""
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


def _has_density(estimator: Any) -> bool:
    if estimator.algorithm != "fedgmm":
        raise AttributeError(
            f"algorithm={estimator.algorithm!r} has no density of the inputs; use 'fedgmm'."
        )
    return True


class TrainedEstimator(TakesClients, BaseEstimator):  # type: ignore[misc]
    """The part of a classifier or regressor that trains a model, and predicts with it."""

    model_: FederatedModel
    _progress: bytes  # of a warm start

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        clients: Ids = None,
    ) -> Self:
        """Fit to rows with labels or numbers.

        Parameters
        ----------
        X : array-like (n_rows, n_features) or (n_rows, channels, height, width)
        y : array-like (n_rows,)
        sample_weight : array-like (n_rows,), default=None
            A row of weight ``w`` counts like ``w`` copies of it, for Gaussians, learners and label
            frequencies alike; rows of weight zero are left out.
        clients : array-like (n_rows,), default=None
            One client id per row. ``None`` means one client, or the ids in ``client_column``.
        """
        refuse_mapping(X)
        self._check_clients()
        numeric = is_regressor(self)
        checks = {"dtype": DTYPES, "allow_nd": True, "ensure_min_samples": 2, "y_numeric": numeric}
        (X, y), clients = self._split_clients(X, clients, reset=True, y=y, **checks)
        if not numeric:
            check_classification_targets(y)
        weights, class_weight = sample_weight, getattr(self, "class_weight", None)
        if class_weight is not None:
            weights = compute_sample_weight(class_weight, y)
            if sample_weight is not None:
                weights = weights * row_weights(sample_weight, len(weights))
        check_choice("algorithm", self.algorithm, ALGORITHMS)
        sizes = {"n_components": self.n_components, "n_learners": self.n_learners}
        for name, size in sizes.items():
            if size != "auto":
                check_integer(name, size, 1)
        check_number("validation_fraction", self.validation_fraction, above=0, below=1)
        needed = self.patience is not None or "auto" in sizes.values()
        held_out = self.validation_fraction if needed else 0.0
        check_flag("warm_start", self.warm_start)
        resume = self.warm_start and hasattr(self, "_progress")
        if not resume:
            self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        dataset = FederatedDataset.from_arrays(
            X,
            y,
            clients,
            task="regression" if numeric else "classification",
            split=(1.0 - held_out, held_out, 0.0),
            seed=self._seed,
            sample_weight=weights,
        )
        if not numeric:
            self.classes_ = dataset.classes
            if len(self.classes_) < 2:
                one = self.classes_.tolist()[0]
                raise ValueError(f"Classifier can't train when only one class is present: {one!r}.")
        with threads(thread_count(self.n_jobs)):
            self._keep(self._train(dataset, resume=resume))
        return self

    def _train(self, dataset: FederatedDataset, *, resume: bool) -> FederatedModel:
        """Train, from the progress of the last fit if asked to ``resume``."""
        renamed = {"components": "n_components", "learners": "n_learners", "seed": "_seed"}
        options = {
            field.name: getattr(self, renamed.get(field.name, field.name))
            for field in fields(TrainingOptions)
        }
        options |= {"on_round": self._callbacks(), "privacy": self.privacy}
        if self.privacy is not None and self.privacy.is_noised and self.warm_start:
            raise ValueError("warm_start cannot continue a fit with epsilon: its budget is spent.")
        if not self.warm_start:
            self.__dict__.pop("_progress", None)
            return train(dataset, **options)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "progress"
            if resume:
                path.write_bytes(self._progress)
            try:
                # the progress at the end is enough
                model = train(dataset, checkpoint=Checkpoint(path, every=10**9), **options)
            except CheckpointError as error:
                reason = str(error).replace(str(path), "the last fit").split(";")[0]
                raise ValueError(
                    f"warm_start needs the same rows and options: {reason}; set warm_start=False to "
                    "start again."
                ) from None
            self._progress = path.read_bytes()
        return model

    def _callbacks(self) -> list[OnTrainingRound]:
        """Return the user's callbacks, and one that prints rounds."""
        for name, least in {"verbose": 0, "verbose_interval": 1}.items():
            check_integer(name, getattr(self, name), least)

        def show(entry: dict[str, float]) -> None:
            number = int(entry["round"])
            if number == 1 or number % self.verbose_interval == 0:
                time = f", {entry['seconds']:.2f} s" if self.verbose > 1 else ""
                print(f"round {number}: log-likelihood {entry['log_likelihood']:.6f}{time}")

        return [*as_callbacks(self.on_round), *([show] if self.verbose else [])]

    def predict(self, X: ArrayLike, *, client: Id = None, clients: Ids = None) -> NDArray[Any]:
        """Return the most likely class, or the mean ``E[y|x]`` of numbers, of every row, ``(n_rows,)``.

        ``client`` is one known id for all rows, ``clients`` is one per row. Rows without an id use the
        federation's weights.
        """
        return self._fitted().predict(*self._rows(X, client, clients))

    def score(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        client: Id = None,
        clients: Ids = None,
    ) -> float:
        """Return the accuracy, or R² of numbers."""
        predicted = self.predict(X, client=client, clients=clients)
        metric = r2_score if is_regressor(self) else accuracy_score
        return float(metric(y, predicted, sample_weight=sample_weight))

    @available_if(_has_density)  # type: ignore[untyped-decorator]
    def score_samples(self, X: ArrayLike, *, client: Id = None, clients: Ids = None) -> FloatArray:
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
        self.model_, self.history_ = model, model.history
        self.clients_ = array_of_names(model.names)
        self.n_iter_ = len(model.history)
        self._warned = False

    def _fitted(self) -> FederatedModel:
        check_is_fitted(self)
        return self.model_

    def _rows(self, X: ArrayLike, client: Id, clients: Ids) -> tuple[NDArray[Any], Any]:
        """Return checked rows, and their clients as the model takes them."""
        refuse_mapping(X)
        ids = chosen_clients(client, clients)
        rows, ids = self._split_clients(X, ids, reset=False, dtype=DTYPES, allow_nd=True)
        found = self.model_.prediction
        weights = found.client_weights
        personal = found.labels is not None or weights is None or weights.shape[1] > 1
        if ids is None and len(self.clients_) > 1 and personal:
            self._warn_without_clients()
        return rows, self._known_clients(ids)


def keep_parameters(estimator: object, given: Mapping[str, Any]) -> None:
    """Store ``locals()`` of a constructor under their names, where scikit-learn looks for them."""
    vars(estimator).update({name: value for name, value in given.items() if name != "self"})


def refuse_mapping(X: Any) -> None:
    """Raise if rows are given as ``{client: rows}``, which scikit-learn cannot split."""
    if isinstance(X, Mapping) and not hasattr(X, "shape"):  # some sparse matrices are mappings
        raise TypeError(
            "X is a mapping; pass one array with clients=ids, or train a model with "
            "fedgmm.train(FederatedDataset.from_clients({client: (X, y)}))."
        )
