"""Files that version 0.1 wrote can still be used: runs, models, checkpoints, federations."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import fedgmm
from fedgmm.data.synthetic import synthetic
from fedgmm.training.checkpoint import Checkpoint
from in_memory_sites import InMemorySites, federate

OLD = Path(__file__).parent / "version_0_1"
METHODS = ("fedgmm", "fedavg+", "clustered", "pfedme", "local")
OPTIONS = {"components": 2, "learners": 2, "rounds": 6, "tol": None, "dtype": "float64"}


@pytest.fixture
def old(tmp_path):
    """A copy of the old files, whose paths lead into the copy."""
    home = tmp_path / "old"
    shutil.copytree(OLD, home)
    for path in (home / "run" / "config.toml", home / "run" / "environment.json"):
        path.write_text(path.read_text().replace("HOME", str(home)))
    return home


@pytest.fixture(scope="module")
def dataset():
    return synthetic(clients=4, rows=30, dimensions=3, seed=5).dataset


def test_an_old_run_predicts_and_resumes(old):
    run = fedgmm.open_run(old / "run")
    predictions = run.predict(old / "data" / "oslo.csv", client="oslo")
    assert len(predictions.labels) == 40
    longer = fedgmm.resume(old / "run", rounds=6)
    assert len(longer.model.history) == 6


@pytest.mark.parametrize("method", METHODS)
def test_an_old_model_loads(old, dataset, method):
    model = fedgmm.load(old / "model_folders" / method)
    rows = dataset.test.inputs.numpy()
    found = model.predict_proba(rows, client=dataset.names[0])
    assert np.allclose(found.sum(1), 1)


@pytest.mark.parametrize("method", METHODS)
def test_an_old_checkpoint_resumes_to_the_same_model(old, dataset, method):
    warmup = 1 if method == "fedgmm" else 0
    path = old / "checkpoints" / f"{method}.safetensors"
    found = fedgmm.train(dataset, method, warmup=warmup, checkpoint=Checkpoint(path), **OPTIONS)
    expected = fedgmm.load(old / "model_folders" / method)
    for name, value in expected.prediction.learners.items():
        assert np.allclose(found.prediction.learners[name], value, rtol=1e-10, atol=1e-10)


def test_an_old_federation_resumes(old):
    files = sorted((old / "data").glob("*.csv"))
    sites = InMemorySites(files, old / "federation")
    options = {"components": 2, "learners": 2, "rounds": 8, "tol": None}
    federate(files, old / "federation", sites=sites, **options)
    model = fedgmm.load(old / "federation" / "server" / "model")
    assert len(model.history) == 8
