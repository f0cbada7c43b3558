"""Training: options, the round loop, checkpoints, and the choice of sizes."""

from fedgmm.training.checkpoint import Checkpoint
from fedgmm.training.local import (
    ALGORITHMS,
    DENSITY,
    DivergenceWarning,
    OnTrainingRound,
    TrainingOptions,
    build,
    train,
)

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
