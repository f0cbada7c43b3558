"""Estimators for scikit-learn: personalised classification and regression, and a federated mixture."""

from fedgmm.estimators.base import NoClientsWarning
from fedgmm.estimators.gaussian_mixture import FederatedGaussianMixture
from fedgmm.estimators.supervised import FedGMMClassifier, FedGMMRegressor

__all__ = [
    "FedGMMClassifier",
    "FedGMMRegressor",
    "FederatedGaussianMixture",
    "NoClientsWarning",
]
