"""Estimators for scikit-learn: a personalised classifier and a federated Gaussian mixture."""

from fedgmm.estimators.base import NoClientsWarning
from fedgmm.estimators.classifier import FedGMMClassifier
from fedgmm.estimators.gaussian_mixture import FederatedGaussianMixture

__all__ = ["FedGMMClassifier", "FederatedGaussianMixture", "NoClientsWarning"]
