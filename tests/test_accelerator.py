"""On a graphics card the same numbers as on the CPU; skipped where there is none."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from fedgmm import FedGMMClassifier
from fedgmm.data.dataset import FederatedDataset
from fedgmm.inference.saving import load
from fedgmm.training import ALGORITHMS, train
from supervised import federation, images

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

OPTIONS = {
    "rounds": 5,
    "dtype": "float64",
    "components": 2,
    "learners": 2,
    "batch_size": 8,
    "participation": 0.8,
    "tol": None,
    "patience": 9,
}


def data_set(**options):
    return federation(np.random.default_rng(0), sizes=(20, 40, 17, 26), classes=3, **options)


def pair(data, algorithm, **options):
    return (
        train(data, algorithm, device=name, **{**OPTIONS, **options}) for name in ("cpu", "cuda")
    )


@pytest.mark.parametrize(
    ("algorithm", "solver"),
    [*product(ALGORITHMS, ["sgd"]), *product(["fedgmm", "fedem", "fedavg"], ["newton"])],
)
def test_training_and_prediction(tmp_path, algorithm, solver):
    data = data_set()
    here, there = pair(data, algorithm, solver=solver)
    back = load(there.save(tmp_path))
    x = data.test.inputs.numpy()
    for name in data.names:
        expected = here.predict_proba(x, name)
        np.testing.assert_allclose(there.predict_proba(x, name), expected, atol=1e-8)
        np.testing.assert_allclose(back.predict_proba(x, name), expected, atol=1e-8)
    assert there.evaluate().mean_log_loss == pytest.approx(here.evaluate().mean_log_loss)


@pytest.mark.parametrize("own", [False, True])
def test_densities_novelty_and_new_clients(own):
    rng = np.random.default_rng(1)
    x = 50.0 + 20.0 * rng.normal(size=(200, 3))
    y = (x[:, 0] > 50).astype(int)
    seen = rng.normal(size=(200, 2)) if own else None
    data = FederatedDataset.from_arrays(x, y, np.arange(200) % 4, features=seen)
    here, there = pair(data, "fedgmm")
    extra = {"features": seen}
    np.testing.assert_allclose(
        there.score_samples(x, **extra), here.score_samples(x, **extra), atol=1e-7
    )
    np.testing.assert_allclose(
        there.novelty(x, **extra).p_values, here.novelty(x, **extra).p_values, atol=1e-9
    )
    assert there.client_novelty(x, **extra) == here.client_novelty(x, **extra)
    for labels in (y, None):
        found, expected = (m.adapt("new", x, labels, **extra) for m in (there, here))
        np.testing.assert_allclose(found.weights, expected.weights, atol=1e-8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_pictures(algorithm):
    data = images(np.random.default_rng(0))
    options = {**OPTIONS, "rounds": 2, "dtype": "float32", "learner": "cnn"}
    model = train(data, algorithm, device="cuda", **options)
    assert np.isfinite(model.evaluate().log_loss).all()


def test_selected_clients_and_the_estimator():
    data = data_set()
    here, there = pair(data.select(["oslo", "kiev"]), "fedgmm")
    x = data.test.inputs.numpy()
    np.testing.assert_allclose(
        there.predict_proba(x, "oslo"), here.predict_proba(x, "oslo"), atol=1e-8
    )
    labels = data.test.labels.numpy()
    model = FedGMMClassifier(2, 2, rounds=3).fit(x, labels)  # device="auto" finds the card
    assert next(iter(model.model_.prediction.learners.values())).device.type == "cuda"
    assert model.predict(x).shape == labels.shape
