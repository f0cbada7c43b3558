"""Personalised federated regression as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils import check_random_state

from fedgmm.core.checks import check_choice, check_number
from fedgmm.data.dataset import FederatedDataset
from fedgmm.estimators.base import DTYPES, PredictsByModel, refuse_mapping
from fedgmm.training.local import train
from fedgmm.training.options import ALGORITHMS

FloatArray = NDArray[np.float64]


class FedGMMRegressor(PredictsByModel, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Personalised regression for the rows of several clients.

    All clients share ``n_components`` Gaussians and ``n_learners`` learners with normal noise; each client
    mixes them with its own weights.

    Parameters
    ----------
    n_components : int or "auto", default=3
        Number of Gaussians ``M1``. ``"auto"`` chooses by held-out rows.
    n_learners : int or "auto", default=3
        Number of learners ``M2``. ``"auto"`` chooses by held-out rows.
    learner : {"linear", "mlp"} or callable, default="linear"
        Network of the learners, or a function that returns a ``torch.nn.Module`` with one output.
    algorithm : str, default="fedgmm"
        Any method of :func:`fedgmm.train`.
    rounds : int, default=100
        Largest number of rounds.
    lr : float, default=0.1
        Learning rate of learners that train by SGD.
    ridge : float, default=1.0
        Penalty of linear learners, for standardised columns.
    patience : int or None, default=None
        Stop after this many rounds without a better log-likelihood of held-out rows.
    validation_fraction : float, default=0.2
        Share of each client's rows that ``patience`` and ``"auto"`` hold out.
    training_options : dict or None, default=None
        Further fields of :class:`fedgmm.TrainingOptions`, such as ``{"batch_size": 32}``.
    client_column : str, int or None, default=None
        Column of ``X`` that holds client ids.
    unknown_clients : {"error", "federation"}, default="error"
        Whether rows of unknown clients raise, or use the federation's weights.
    random_state : int, RandomState or None, default=None
        Seed of all random numbers.

    Attributes
    ----------
    model_ : FederatedModel
    clients_ : array of the clients
    n_iter_ : int, the number of rounds
    """

    def __init__(
        self,
        n_components: int | Literal["auto"] = 3,
        n_learners: int | Literal["auto"] = 3,
        *,
        learner: Any = "linear",
        algorithm: str = "fedgmm",
        rounds: int = 100,
        lr: float = 0.1,
        ridge: float = 1.0,
        patience: int | None = None,
        validation_fraction: float = 0.2,
        training_options: Mapping[str, Any] | None = None,
        client_column: str | int | None = None,
        unknown_clients: str = "error",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.n_components = n_components
        self.n_learners = n_learners
        self.learner = learner
        self.algorithm = algorithm
        self.rounds = rounds
        self.lr = lr
        self.ridge = ridge
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.training_options = training_options
        self.client_column = client_column
        self.unknown_clients = unknown_clients
        self.random_state = random_state

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        clients: ArrayLike | None = None,
    ) -> Self:
        """Fit to rows with numbers.

        Parameters
        ----------
        X : array-like (n_rows, n_features)
        y : array-like (n_rows,)
        sample_weight : array-like (n_rows,), default=None
            A row of weight ``w`` counts like ``w`` copies of it.
        clients : array-like (n_rows,), default=None
            One client id per row. ``None`` means one client, or the ids in ``client_column``.
        """
        refuse_mapping(X)
        self._check_clients()
        (X, y), clients = self._split_clients(
            X,
            clients,
            reset=True,
            y=y,
            dtype=DTYPES,
            allow_nd=True,
            ensure_min_samples=2,
            y_numeric=True,
        )
        check_choice("algorithm", self.algorithm, ALGORITHMS)
        check_number("validation_fraction", self.validation_fraction, above=0, below=1)
        needed = self.patience is not None or "auto" in (self.n_components, self.n_learners)
        held_out = self.validation_fraction if needed else 0.0
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        dataset = FederatedDataset.from_arrays(
            X,
            y,
            clients,
            task="regression",
            split=(1.0 - held_out, held_out, 0.0),
            seed=seed,
            sample_weight=sample_weight,
        )
        model = train(
            dataset,
            self.algorithm,
            components=self.n_components,
            learners=self.n_learners,
            learner=self.learner,
            rounds=self.rounds,
            lr=self.lr,
            ridge=self.ridge,
            patience=self.patience,
            seed=seed,
            **(self.training_options or {}),
        )
        self._keep(model)
        return self

    def predict(
        self, X: ArrayLike, *, client: Hashable | None = None, clients: ArrayLike | None = None
    ) -> FloatArray:
        """Return the mean ``E[y|x]`` of every row, ``(n_rows,)``.

        ``client`` is one known id for all rows, ``clients`` is one per row. Rows without an id use the
        federation's weights.
        """
        return self._fitted().predict(*self._rows(X, client, clients))

    def predict_interval(
        self,
        X: ArrayLike,
        level: float = 0.9,
        *,
        client: Hashable | None = None,
        clients: ArrayLike | None = None,
    ) -> FloatArray:
        """Return the interval that holds ``y`` with probability ``level``, ``(n_rows, 2)``."""
        return self._fitted().predict_interval(*self._rows(X, client, clients), level)

    def score(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        client: Hashable | None = None,
        clients: ArrayLike | None = None,
    ) -> float:
        """Return R²."""
        predicted = self.predict(X, client=client, clients=clients)
        return float(r2_score(y, predicted, sample_weight=sample_weight))
