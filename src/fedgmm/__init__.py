"""Personalised federated learning under mixtures of distributions.

Importing the package is cheap: torch and scikit-learn are loaded when a name that needs them is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from fedgmm.data.dataset import FederatedDataset
    from fedgmm.estimators import FederatedGaussianMixture, FedGMMClassifier, FedGMMRegressor
    from fedgmm.estimators.selection import ComponentSelection, select_components
    from fedgmm.model.model import FederatedModel
    from fedgmm.model.saving import load
    from fedgmm.privacy.settings import Privacy
    from fedgmm.runs import FederatedRun, RunConfig, fit, open_run, resume
    from fedgmm.training.in_process import train
    from fedgmm.training.options import TrainingOptions

_HOMES = {
    "FederatedDataset": "fedgmm.data.dataset",
    "FederatedModel": "fedgmm.model.model",
    "FedGMMClassifier": "fedgmm.estimators",
    "FedGMMRegressor": "fedgmm.estimators",
    "TrainingOptions": "fedgmm.training.options",
    "FederatedRun": "fedgmm.runs",
    "RunConfig": "fedgmm.runs",
    "Privacy": "fedgmm.privacy.settings",
    "fit": "fedgmm.runs",
    "load": "fedgmm.model.saving",
    "open_run": "fedgmm.runs",
    "resume": "fedgmm.runs",
    "train": "fedgmm.training.in_process",
    "FederatedGaussianMixture": "fedgmm.estimators",
    "ComponentSelection": "fedgmm.estimators.selection",
    "select_components": "fedgmm.estimators.selection",
}

__all__ = [
    "ComponentSelection",
    "FedGMMClassifier",
    "FedGMMRegressor",
    "FederatedDataset",
    "FederatedGaussianMixture",
    "FederatedModel",
    "FederatedRun",
    "Privacy",
    "RunConfig",
    "TrainingOptions",
    "__version__",
    "fit",
    "load",
    "open_run",
    "resume",
    "select_components",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fedgmm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
