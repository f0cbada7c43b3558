"""A checkpoint that was trained once, for all tests that read or damage it."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from fedgmm.training import Checkpoint, train
from small_checkpoints import SMALL
from supervised import federation


@pytest.fixture(scope="session")
def trained_checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "whole"
    data = federation(np.random.default_rng(3), sizes=(20, 30))
    options = {**SMALL, "server": "momentum", "patience": 3, "rounds": 2}
    train(data, checkpoint=Checkpoint(path), **options)
    return path


@pytest.fixture
def whole(trained_checkpoint, tmp_path):
    """A checkpoint of FedGMM with everything in it, the test's own."""
    return shutil.copy(trained_checkpoint, tmp_path / "whole")
