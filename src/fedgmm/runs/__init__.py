"""Run folders: configure, train, resume, compare, and use a finished model."""

from fedgmm.runs.config import RunConfig
from fedgmm.runs.fitting import fit, resume
from fedgmm.runs.run import FederatedRun, open_run

__all__ = ["FederatedRun", "RunConfig", "fit", "open_run", "resume"]
