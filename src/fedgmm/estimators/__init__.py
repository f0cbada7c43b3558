"""The scikit-learn face of the package."""

from fedgmm.estimators.classifier import FedGMMClassifier
from fedgmm.estimators.gaussian_mixture import FederatedGaussianMixture

__all__ = ["FedGMMClassifier", "FederatedGaussianMixture"]
