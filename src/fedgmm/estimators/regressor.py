"""Personalised federated regression as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin

from fedgmm.estimators.base import Id, Ids, TrainedEstimator, keep_parameters
from fedgmm.privacy.settings import Privacy
from fedgmm.training.in_process import OnTrainingRound

FloatArray = NDArray[np.float64]


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

    def predict_interval(
        self, X: ArrayLike, level: float = 0.9, *, client: Id = None, clients: Ids = None
    ) -> FloatArray:
        """Return the interval that holds ``y`` with probability ``level``, ``(n_rows, 2)``."""
        return self._fitted().predict_interval(*self._rows(X, client, clients), level)
