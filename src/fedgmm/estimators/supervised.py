"""Personalised federated classification and regression as scikit-learn estimators."""

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, is_regressor
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from fedgmm.core.checks import array_of_names, check_choice, check_flag, check_integer, check_number
from fedgmm.core.streaming import threads
from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.inputs import row_weights
from fedgmm.estimators.base import (
    Id,
    Ids,
    TakesClients,
    chosen_clients,
    keep_parameters,
    thread_count,
)
from fedgmm.model.model import FederatedModel
from fedgmm.privacy.settings import Privacy
from fedgmm.training.checkpoint import Checkpoint, CheckpointError
from fedgmm.training.local import OnTrainingRound, train
from fedgmm.training.loop import as_callbacks
from fedgmm.training.options import ALGORITHMS, TrainingOptions

FloatArray = NDArray[np.float64]
DTYPES = [np.float64, np.float32, np.uint8]


def _has_density(estimator: Any) -> bool:
    if estimator.algorithm != "fedgmm":
        raise AttributeError(
            f"algorithm={estimator.algorithm!r} has no density of the inputs; use 'fedgmm'."
        )
    return True


class TrainedEstimator(TakesClients, BaseEstimator):  # type: ignore[misc]
    """The part of a classifier or regressor that trains a model, and predicts with it.

    Attributes:
        model_: the trained model.
        history_: one dictionary per round.
        n_iter_: number of rounds.
    """

    model_: FederatedModel
    _progress: bytes  # of a warm start

    def __init__(
        self,
        n_components: int | Literal["auto"] = 3,
        n_learners: int | Literal["auto"] = 3,
        *,
        learner: Any = "linear",
        algorithm: str = "fedgmm",
        rounds: int = 100,
        local_epochs: int = 1,
        batch_size: int = 128,
        lr: float = 0.1,
        solver: str = "auto",
        start: str = "auto",
        warmup: int = 0,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
        schedule: str = "constant",
        augment: bool = False,
        pretrained: str | None = None,
        covariance_type: str = "full",
        aggregation: str = "exact",
        pca: int | None = None,
        reg_covar: float = 1e-2,
        ridge: float = 1.0,
        independence: float = 0.0,
        personal_labels: bool | Literal["auto"] = "auto",
        refit: bool = False,
        server: str = "average",
        server_lr: float | None = None,
        server_momentum: float = 0.9,
        participation: float = 1.0,
        patience: int | None = None,
        tol: float | None = 1e-6,
        proximal: float = 0.1,
        finetune_epochs: int = 1,
        penalty: float = 15.0,
        inner_steps: int = 5,
        mixing: float = 1.0,
        standardise: bool = True,
        device: str = "auto",
        dtype: str = "float32",
        precision: str = "full",
        validation_fraction: float = 0.2,
        client_column: str | int | None = None,
        unknown_clients: str = "error",
        random_state: int | np.random.RandomState | None = None,
        warm_start: bool = False,
        n_jobs: int | None = None,
        verbose: int = 0,
        verbose_interval: int = 10,
        on_round: OnTrainingRound | Iterable[OnTrainingRound] | None = None,
        privacy: Privacy | None = None,
    ) -> None:
        keep_parameters(self, locals())

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
        """Train, from the progress of the last fit if there is one to ``resume``."""
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


def extended_signature(init: Callable[..., None], base: Callable[..., None]) -> inspect.Signature:
    """Return the signature of a constructor that passes all its ``**parameters`` to another one."""
    own, passed_on = (list(inspect.signature(one).parameters.values()) for one in (init, base))
    return inspect.Signature([*passed_on, *(one for one in own[:-1] if one not in passed_on)])


def refuse_mapping(X: Any) -> None:
    """Raise if rows are given as ``{client: rows}``, which scikit-learn cannot split."""
    if isinstance(X, Mapping) and not hasattr(X, "shape"):  # some sparse matrices are mappings
        raise TypeError(
            "X is a mapping; pass one array with clients=ids, or train a model with "
            "fedgmm.train(FederatedDataset.from_clients({client: (X, y)}))."
        )


class FedGMMClassifier(TrainedEstimator, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Personalised classifier for the rows of several clients.

    All clients share ``n_components`` Gaussians and ``n_learners`` learners; each client mixes them
    with its own weights, so clients may differ in their inputs and in how labels depend on them.

    All fields of :class:`fedgmm.TrainingOptions` are parameters, with the same meaning and defaults, which
    are described there; only ``components``, ``learners`` and ``seed`` have the names that scikit-learn
    uses, and ``device`` is ``"auto"``. The most important ones, and those of scikit-learn, are:

    Parameters
    ----------
    n_components : int or "auto", default=3
        Number of Gaussians ``M1``; ``"auto"`` chooses it by held-out rows.
    n_learners : int or "auto", default=3
        Number of learners ``M2``; ``"auto"`` chooses it by held-out rows.
    learner : {"linear", "mlp", "cnn", "mobilenet"} or callable, default="linear"
        Network of the learners, or a function that returns a ``torch.nn.Module``.
    algorithm : str, default="fedgmm"
        Also ``"fedem"``, ``"fedavg"``, ``"fedprox"``, ``"fedavg+"``, ``"local"``, ``"clustered"``,
        ``"pfedme"``.
    rounds : int, default=100
    lr : float, default=0.1
        Learning rate of local gradient steps; linear learners of FedGMM and FedEM take exact steps.
    reg_covar : float, default=1e-2
        Added to every variance of the standardised inputs.
    personal_labels : bool or "auto", default="auto"
        After the last round, estimate the label frequencies of each client and correct its predictions
        by them, also for clients that :meth:`adapt` adds. ``"auto"`` does so if held-out rows gain by it
        more than by chance. If none are held out, the training rows decide, each left out of the counts,
        from 150 rows on.
    patience : int or None, default=None
        Stop after this many rounds without a better validation log-likelihood.
    tol : float or None, default=1e-6
        Stop when the training log-likelihood changes by less in a round.
    validation_fraction : float, default=0.2
        Share of every client's rows that is held out, if ``patience`` is set or a size is ``"auto"``.
    class_weight : dict, "balanced" or None, default=None
        Weight of the rows of each class, times ``sample_weight``. ``"balanced"`` gives all classes the
        same summed weight. The density follows the weights, too.
    client_column : str, int or None, default=None
        Column of ``X`` that holds the client of each row: a name of a data frame's column, or an index,
        negative from the end. It is not an input of the model. With it, all tools of scikit-learn give
        each row the weights of its client; ``clients`` cannot be passed then.
    unknown_clients : {"error", "federation"}, default="error"
        Predictions for clients that ``fit`` did not see: an error, or the federation's weights.
    random_state : int, RandomState or None, default=None
    warm_start : bool, default=False
        Continue the last ``fit`` on the same rows and options up to ``rounds`` rounds in all. The result
        is the same as that of one uninterrupted run.
    n_jobs : int or None, default=None
        Number of threads; -1 uses all cores, ``None`` those that torch uses.
    verbose : int, default=0
        1 prints the log-likelihood of every ``verbose_interval``-th round, 2 also its time.
    verbose_interval : int, default=10
    on_round : callable, iterable of callables or None, default=None
        Called after every round with its entry of ``history_``.
    privacy : fedgmm.Privacy or None, default=None
        Train with differential privacy, see :func:`fedgmm.train`; ``model_.privacy`` has what was spent.

    Attributes
    ----------
    classes_ : ndarray (n_classes,)
    clients_ : ndarray (n_clients,)
    model_ : FederatedModel
        The fitted model, with densities, adaptation and novelty detection.
    history_ : list of dict
        One entry per round: ``round``, ``log_likelihood``, ``seconds``.
    n_features_in_ : int
        Number of columns of ``X``, with the client column.
    feature_names_in_ : ndarray (n_features,)
        Only where ``X`` has string column names.
    n_iter_ : int
        Number of rounds.

    Examples
    --------
    >>> import numpy as np
    >>> from fedgmm import FedGMMClassifier
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(400, 2)); clients = np.repeat(["oslo", "bergen"], 200)
    >>> y = np.where(clients == "oslo", X[:, 0] > 0, X[:, 0] < 0).astype(int)
    >>> model = FedGMMClassifier(1, 2, random_state=0).fit(X, y, clients=clients)
    >>> bool(model.score(X, y, clients=clients) > 0.9)
    True

    The client as a column, so that cross-validation keeps it:

    >>> from sklearn.model_selection import cross_val_score
    >>> table = np.column_stack([X, np.repeat([0, 1], 200)])
    >>> model = FedGMMClassifier(1, 2, client_column=-1, random_state=0)
    >>> bool(cross_val_score(model, table, y, scoring="accuracy").min() > 0.9)
    True
    """

    def __init__(
        self,
        n_components: int | Literal["auto"] = 3,
        n_learners: int | Literal["auto"] = 3,
        *,
        class_weight: dict[Any, float] | Literal["balanced"] | None = None,
        **parameters: Any,
    ) -> None:
        super().__init__(n_components, n_learners, **parameters)
        self.class_weight = class_weight

    # scikit-learn reads the names of all parameters from the signature
    __init__.__signature__ = extended_signature(__init__, TrainedEstimator.__init__)  # type: ignore[attr-defined]

    def predict_proba(self, X: ArrayLike, *, client: Id = None, clients: Ids = None) -> FloatArray:
        """Return ``P_c(y|x)`` of every class, ``(n_rows, n_classes)``; see :meth:`predict`."""
        return self._fitted().predict_proba(*self._rows(X, client, clients))

    def predict_log_proba(
        self, X: ArrayLike, *, client: Id = None, clients: Ids = None
    ) -> FloatArray:
        """Return ``log P_c(y|x)`` of every class, ``(n_rows, n_classes)``; see :meth:`predict`."""
        return self._fitted().predict_log_proba(*self._rows(X, client, clients))


class FedGMMRegressor(TrainedEstimator, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Personalised regression for the rows of several clients.

    All clients share ``n_components`` Gaussians and ``n_learners`` learners with normal noise; each client
    mixes them with its own weights.

    The parameters are those of :class:`fedgmm.FedGMMClassifier` without ``class_weight``. A function as
    ``learner`` returns a ``torch.nn.Module`` with one output. ``personal_labels`` is for classes only.

    Attributes
    ----------
    model_ : FederatedModel
    clients_ : ndarray (n_clients,)
    history_ : list of dict, one entry per round
    n_iter_ : int, the number of rounds
    """

    def predict_interval(
        self, X: ArrayLike, level: float = 0.9, *, client: Id = None, clients: Ids = None
    ) -> FloatArray:
        """Return the interval that holds ``y`` with probability ``level``, ``(n_rows, 2)``."""
        return self._fitted().predict_interval(*self._rows(X, client, clients), level)
