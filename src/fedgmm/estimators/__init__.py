"""Estimators for scikit-learn: personalised classification and regression, and a federated mixture."""

from fedgmm.estimators.base import NoClientsWarning
from fedgmm.estimators.classifier import FedGMMClassifier
from fedgmm.estimators.gaussian_mixture import FederatedGaussianMixture
from fedgmm.estimators.regressor import FedGMMRegressor

__all__ = [
    "FedGMMClassifier",
    "FedGMMRegressor",
    "FederatedGaussianMixture",
    "NoClientsWarning",
]
