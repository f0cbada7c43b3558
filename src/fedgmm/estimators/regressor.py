"""Personalised federated regression as a scikit-learn estimator."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin

from fedgmm.estimators.base import Id, Ids, TrainedEstimator

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

    def predict_interval(
        self, X: ArrayLike, level: float = 0.9, *, client: Id = None, clients: Ids = None
    ) -> FloatArray:
        """Return the interval that holds ``y`` with probability ``level``, ``(n_rows, 2)``."""
        return self._fitted().predict_interval(*self._rows(X, client, clients), level)
