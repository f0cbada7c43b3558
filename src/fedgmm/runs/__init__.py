"""Runs on disk: from files to a folder that holds the model and everything about it."""

from fedgmm.runs.config import RunConfig
from fedgmm.runs.fitting import fit, resume
from fedgmm.runs.run import FederatedRun, open_run

__all__ = ["FederatedRun", "RunConfig", "fit", "open_run", "resume"]
