"""Personalised federated classification as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin

from fedgmm.estimators.base import Id, Ids, TrainedEstimator, keep_parameters
from fedgmm.privacy.settings import Privacy
from fedgmm.training.in_process import OnTrainingRound

FloatArray = NDArray[np.float64]


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
        keep_parameters(self, locals())

    def predict_proba(self, X: ArrayLike, *, client: Id = None, clients: Ids = None) -> FloatArray:
        """Return ``P_c(y|x)`` of every class, ``(n_rows, n_classes)``; see :meth:`predict`."""
        return self._fitted().predict_proba(*self._rows(X, client, clients))

    def predict_log_proba(
        self, X: ArrayLike, *, client: Id = None, clients: Ids = None
    ) -> FloatArray:
        """Return ``log P_c(y|x)`` of every class, ``(n_rows, n_classes)``; see :meth:`predict`."""
        return self._fitted().predict_log_proba(*self._rows(X, client, clients))
