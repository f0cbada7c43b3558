"""The scikit-learn face of the package."""

from fedgmm.estimators.gaussian_mixture import FederatedGaussianMixture

__all__ = ["FederatedGaussianMixture"]
