"""Personalised federated classification as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from fedgmm.core.checks import array_of_names, check_choice, check_integer, check_non_negative
from fedgmm.model.model import FederatedModel

FloatArray = NDArray[np.float64]
_DTYPES = [np.float64, np.float32, np.uint8]


def _has_density(classifier: FedGMMClassifier) -> bool:
    if classifier.algorithm != "fedgmm":
        raise AttributeError(
            f"algorithm={classifier.algorithm!r} has no density of the inputs; use 'fedgmm'."
        )
    return True


class FedGMMClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Personalised classifier for the rows of several clients.

    All clients share ``n_components`` Gaussians and ``n_learners`` learners; each client mixes them
    with its own weights, so clients may differ in their inputs and in how labels depend on them.

    Parameters
    ----------
    n_components : int, default=3
        Number of Gaussians ``M1``.
    n_learners : int, default=3
        Number of learners ``M2``.
    learner : {"linear", "mlp", "cnn"} or callable, default="linear"
        Network of the learners, or a function that returns a ``torch.nn.Module``.
    algorithm : str, default="fedgmm"
        Also ``"fedem"``, ``"fedavg"``, ``"fedprox"``, ``"fedavg+"``, ``"local"``, ``"clustered"``,
        ``"pfedme"``.
    rounds : int, default=100
    local_epochs : int, default=1
    batch_size : int, default=128
    lr : float, default=0.1
        Learning rate of local gradient steps; linear learners of FedGMM and FedEM take exact steps.
    solver : {"auto", "sgd", "newton"}, default="auto"
    start : {"auto", "tied", "split", "random"}, default="auto"
        Initial learners.
    warmup : int, default=0
        Rounds that train one shared learner, from which all learners then start.
    momentum, weight_decay : float, default=0.0
    clip_norm : float or None, default=None
        Largest norm of a gradient in local steps; larger gradients are scaled down. Exact steps are not
        limited.
    personal_labels : bool, default=False
        After the last round, estimate the label frequencies of each client and correct its predictions
        by them, also for clients that :meth:`adapt` adds. Nothing is trained, and predictions without a
        client do not change. For FedGMM, FedEM, FedAvg, FedProx and Clustered FL.
    server : {"average", "momentum", "adam"}, default="average"
    participation : float, default=1.0
        Share of the clients that take part in a round.
    patience : int or None, default=None
        Stop after this many rounds without a better validation log-likelihood.
    validation_fraction : float, default=0.2
        Share of every client's rows that is held out, if ``patience`` is set.
    covariance_type : {"full", "tied", "diag", "spherical"}, default="full"
    reg_covar : float, default=1e-2
        Added to every variance of the standardised inputs.
    device : str, default="auto"
    dtype : {"float32", "float64"}, default="float32"
    random_state : int, RandomState or None, default=None

    Attributes
    ----------
    classes_ : ndarray (n_classes,)
    clients_ : ndarray (n_clients,)
    model_ : FederatedModel
        The fitted model, with densities, adaptation and novelty detection.
    n_features_in_ : int
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
    """

    def __init__(
        self,
        n_components: int = 3,
        n_learners: int = 3,
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
        personal_labels: bool = False,
        server: str = "average",
        participation: float = 1.0,
        patience: int | None = None,
        validation_fraction: float = 0.2,
        covariance_type: str = "full",
        reg_covar: float = 1e-2,
        device: str = "auto",
        dtype: str = "float32",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.n_components = n_components
        self.n_learners = n_learners
        self.learner = learner
        self.algorithm = algorithm
        self.rounds = rounds
        self.local_epochs = local_epochs
        self.batch_size = batch_size
        self.lr = lr
        self.solver = solver
        self.start = start
        self.warmup = warmup
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.clip_norm = clip_norm
        self.personal_labels = personal_labels
        self.server = server
        self.participation = participation
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.covariance_type = covariance_type
        self.reg_covar = reg_covar
        self.device = device
        self.dtype = dtype
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike, *, clients: ArrayLike | None = None) -> Self:
        """Fit to labelled rows.

        Parameters
        ----------
        X : array-like (n_rows, n_features) or (n_rows, channels, height, width)
        y : array-like (n_rows,)
        clients : array-like (n_rows,), default=None
            One client id per row. ``None`` means one client.
        """
        from fedgmm.data.dataset import FederatedDataset
        from fedgmm.training.local import train
        from fedgmm.training.options import ALGORITHMS

        X, y = validate_data(self, X, y, dtype=_DTYPES, allow_nd=True, ensure_min_samples=2)
        check_classification_targets(y)
        check_choice("algorithm", self.algorithm, ALGORITHMS)
        check_integer("n_components", self.n_components, 1)
        check_integer("n_learners", self.n_learners, 1)
        check_non_negative("validation_fraction", self.validation_fraction)  # its type
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction must lie between 0 and 1, got {self.validation_fraction!r}."
            )
        held_out = self.validation_fraction if self.patience is not None else 0.0
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        split = (1.0 - held_out, held_out, 0.0)
        dataset = FederatedDataset.from_arrays(
            X, y, clients, task="classification", split=split, seed=seed
        )
        self.classes_ = dataset.classes
        if len(self.classes_) < 2:
            raise ValueError(
                f"Classifier can't train when only one class is present: {self.classes_[0]!r}."
            )
        options = self.get_params(deep=False)
        for name in ("n_components", "n_learners", "validation_fraction", "random_state"):
            del options[name]
        self.model_: FederatedModel = train(
            dataset,
            components=self.n_components,
            learners=self.n_learners,
            seed=seed,
            **options,
        )
        self.model_.dataset = None  # so that the estimator does not keep the rows
        self.clients_ = array_of_names(self.model_.names)
        self.n_iter_ = len(self.model_.history)
        return self

    def predict_proba(self, X: ArrayLike, *, clients: ArrayLike | None = None) -> FloatArray:
        """Return ``P_c(y|x)`` of every class, ``(n_rows, n_classes)``.

        ``clients`` is one known id per row, or one for all rows; ``None`` uses the federation's weights.
        """
        return self._fitted().predict_proba(self._rows(X), clients)

    def predict(self, X: ArrayLike, *, clients: ArrayLike | None = None) -> NDArray[Any]:
        """Return the most likely class of every row, ``(n_rows,)``."""
        return self._fitted().predict(self._rows(X), clients)

    def score(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        clients: ArrayLike | None = None,
    ) -> float:
        """Return the accuracy."""
        return float(
            accuracy_score(y, self.predict(X, clients=clients), sample_weight=sample_weight)
        )

    @available_if(_has_density)  # type: ignore[untyped-decorator]
    def score_samples(self, X: ArrayLike, *, clients: ArrayLike | None = None) -> FloatArray:
        """Return ``log P_c(x)`` of every row, ``(n_rows,)``: low for rows unlike anything seen.

        Requires ``algorithm="fedgmm"``.
        """
        return self._fitted().score_samples(self._rows(X), clients)

    def adapt(self, client: Hashable, X: ArrayLike, y: ArrayLike | None = None) -> Self:
        """Add a client by learning only its weights, from labelled or unlabelled rows."""
        self._fitted().adapt(client, self._rows(X), y)
        self.clients_ = array_of_names(self.model_.names)
        return self

    def _fitted(self) -> FederatedModel:
        check_is_fitted(self)
        return self.model_

    def _rows(self, X: ArrayLike) -> NDArray[Any]:
        return np.asarray(validate_data(self, X, reset=False, dtype=_DTYPES, allow_nd=True))
