"""Training: options, the round loop, checkpoints, and the choice of sizes."""

from fedgmm.methods.base import DENSITY
from fedgmm.training.build import build
from fedgmm.training.checkpoint import Checkpoint
from fedgmm.training.in_process import DivergenceWarning, OnTrainingRound, train
from fedgmm.training.options import ALGORITHMS, TrainingOptions

__all__ = [
    "ALGORITHMS",
    "DENSITY",
    "Checkpoint",
    "DivergenceWarning",
    "OnTrainingRound",
    "TrainingOptions",
    "build",
    "train",
]
