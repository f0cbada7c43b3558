"""A checkpoint that was trained once, for all tests that read or damage it; quick federations of files."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from small_checkpoints import SMALL

from fedgmm.federation.checkpoint import Checkpoint
from fedgmm.training import train
from small_runs import write_sites
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


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One CSV file a site."""
    return write_sites(tmp_path_factory.mktemp("data"))


@pytest.fixture
def quick_looks(monkeypatch):
    """The server hardly waits between two looks at who is there."""
    monkeypatch.setattr("fedgmm.federation.coordinator._POLL", 0.001)


@pytest.fixture(scope="module")
def blank_reports():
    """What a report shows is gathered and its file written, but the page is blank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedgmm.report.page.render", lambda contents: "")
        yield
