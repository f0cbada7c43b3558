"""Personalised federated classification as a scikit-learn estimator."""

from __future__ import annotations

import tempfile
from collections.abc import Hashable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets

from fedgmm.core.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_number,
)
from fedgmm.core.streaming import threads
from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.inputs import row_weights
from fedgmm.estimators.base import (
    DTYPES,
    PredictsByModel,
    refuse_mapping,
    thread_count,
)
from fedgmm.model.model import FederatedModel
from fedgmm.privacy.settings import Privacy
from fedgmm.training.checkpoint import Checkpoint, CheckpointError
from fedgmm.training.local import OnTrainingRound, train
from fedgmm.training.loop import as_callbacks
from fedgmm.training.options import ALGORITHMS, TrainingOptions

FloatArray = NDArray[np.float64]
_RENAMED = {"components": "n_components", "learners": "n_learners"}


class FedGMMClassifier(PredictsByModel, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Personalised classifier for the rows of several clients.

    All clients share ``n_components`` Gaussians and ``n_learners`` learners; each client mixes them
    with its own weights, so clients may differ in their inputs and in how labels depend on them.

    All fields of :class:`fedgmm.TrainingOptions` are parameters, with the same meaning; only
    ``components``, ``learners`` and ``seed`` have the names that scikit-learn uses.

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
    schedule : {"constant", "cooldown", "cosine", "sqrt"}, default="constant"
        Of the learning rate.
    augment : bool, default=False
        Crop and flip images at random.
    pretrained : str or None, default=None
        File with torchvision's weights, for ``learner="mobilenet"``.
    covariance_type : {"full", "tied", "diag", "spherical", "identity"}, default="full"
    aggregation : {"exact", "paper"}, default="exact"
    pca : int or None, default=None
        Number of principal components of the inputs that the Gaussians see.
    reg_covar : float, default=1e-2
        Added to every variance of the standardised inputs.
    ridge : float, default=1.0
        Penalty of exact steps.
    independence : float, default=0.0
        Number of rows that a client's overall learner weights count for within each Gaussian.
    personal_labels : bool or "auto", default="auto"
        After the last round, estimate the label frequencies of each client and correct its predictions
        by them, also for clients that :meth:`adapt` adds. Nothing is trained, and predictions without a
        client do not change. For FedGMM, FedEM, FedAvg, FedProx and Clustered FL. ``"auto"`` does so if
        held-out rows gain by it more than by chance. If none are held out, the training rows decide,
        each left out of the counts, from 150 rows on.
    refit : bool, default=False
        After the last round, train linear learners on the held-out rows as well, if there are any.
    server : {"average", "momentum", "adam"}, default="average"
    server_lr : float or None, default=None
    server_momentum : float, default=0.9
    participation : float, default=1.0
        Share of the clients that take part in a round.
    patience : int or None, default=None
        Stop after this many rounds without a better validation log-likelihood.
    tol : float or None, default=1e-6
        Stop when the training log-likelihood changes by less in a round.
    proximal : float, default=0.1
        Strength of FedProx's penalty.
    finetune_epochs : int, default=1
        Passes over a client's rows in the fine-tuning of FedAvg+.
    penalty : float, default=15.0
    inner_steps : int, default=5
    mixing : float, default=1.0
        Three options of pFedMe.
    standardise : bool, default=True
        Scale columns to mean zero and variance one.
    device : str, default="auto"
    dtype : {"float32", "float64"}, default="float32"
    precision : {"full", "mixed"}, default="full"
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

    _seed: int
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
        class_weight: dict[Any, float] | Literal["balanced"] | None = None,
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
        self.schedule = schedule
        self.augment = augment
        self.pretrained = pretrained
        self.covariance_type = covariance_type
        self.aggregation = aggregation
        self.pca = pca
        self.reg_covar = reg_covar
        self.ridge = ridge
        self.independence = independence
        self.personal_labels = personal_labels
        self.refit = refit
        self.server = server
        self.server_lr = server_lr
        self.server_momentum = server_momentum
        self.participation = participation
        self.patience = patience
        self.tol = tol
        self.proximal = proximal
        self.finetune_epochs = finetune_epochs
        self.penalty = penalty
        self.inner_steps = inner_steps
        self.mixing = mixing
        self.standardise = standardise
        self.device = device
        self.dtype = dtype
        self.precision = precision
        self.validation_fraction = validation_fraction
        self.class_weight = class_weight
        self.client_column = client_column
        self.unknown_clients = unknown_clients
        self.random_state = random_state
        self.warm_start = warm_start
        self.n_jobs = n_jobs
        self.verbose = verbose
        self.verbose_interval = verbose_interval
        self.on_round = on_round
        self.privacy = privacy

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        clients: ArrayLike | None = None,
    ) -> Self:
        """Fit to labelled rows.

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
        (X, y), clients = self._split_clients(
            X, clients, reset=True, y=y, dtype=DTYPES, allow_nd=True, ensure_min_samples=2
        )
        check_classification_targets(y)
        weights = sample_weight
        if self.class_weight is not None:
            weights = compute_sample_weight(self.class_weight, y)
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
        seed = self._seed if resume else check_random_state(self.random_state).randint(2**31 - 1)
        self._seed = int(seed)
        split = (1.0 - held_out, held_out, 0.0)
        dataset = FederatedDataset.from_arrays(
            X,
            y,
            clients,
            task="classification",
            split=split,
            seed=self._seed,
            sample_weight=weights,
        )
        self.classes_ = dataset.classes
        if len(self.classes_) < 2:
            raise ValueError(
                f"Classifier can't train when only one class is present: {self.classes_.tolist()[0]!r}."
            )
        options = {
            field.name: getattr(self, _RENAMED.get(field.name, field.name))
            for field in fields(TrainingOptions)
            if field.name != "seed"
        }
        with threads(thread_count(self.n_jobs)):
            model = self._train(dataset, options, resume=resume)
        self.history_ = model.history
        self._keep(model)
        return self

    def _train(
        self, dataset: FederatedDataset, options: dict[str, Any], *, resume: bool
    ) -> FederatedModel:
        """Train, from the progress of the last fit if there is one to ``resume``."""
        options = {
            "seed": self._seed,
            "on_round": self._callbacks(),
            "privacy": self.privacy,
            **options,
        }
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

    def predict_proba(
        self, X: ArrayLike, *, client: Hashable | None = None, clients: ArrayLike | None = None
    ) -> FloatArray:
        """Return ``P_c(y|x)`` of every class, ``(n_rows, n_classes)``.

        ``client`` is one known id for all rows, ``clients`` is one per row. Rows without an id use the
        federation's weights.
        """
        return self._fitted().predict_proba(*self._rows(X, client, clients))

    def predict_log_proba(
        self, X: ArrayLike, *, client: Hashable | None = None, clients: ArrayLike | None = None
    ) -> FloatArray:
        """Return ``log P_c(y|x)`` of every class, ``(n_rows, n_classes)``."""
        return self._fitted().predict_log_proba(*self._rows(X, client, clients))

    def predict(
        self, X: ArrayLike, *, client: Hashable | None = None, clients: ArrayLike | None = None
    ) -> NDArray[Any]:
        """Return the most likely class of every row, ``(n_rows,)``."""
        return self._fitted().predict(*self._rows(X, client, clients))

    def score(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        client: Hashable | None = None,
        clients: ArrayLike | None = None,
    ) -> float:
        """Return the accuracy."""
        predicted = self.predict(X, client=client, clients=clients)
        return float(accuracy_score(y, predicted, sample_weight=sample_weight))
