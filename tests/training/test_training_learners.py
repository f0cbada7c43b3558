"""Learners in training: those that have names, modules of one's own, and where they start from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from fedgmm.data.dataset import FederatedDataset
from fedgmm.nets.kernels.recording import recorder_of
from fedgmm.training.in_process import train
from fedgmm.training.options import ALGORITHMS
from supervised import FAST, federation, images, predictions

# ---------------------------------------------------------------------- kinds of learners


@pytest.mark.parametrize("learner", ["linear", "mlp", "cnn"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_learner_runs_in_every_method(rng, algorithm, learner):
    data = images(rng, rows=12)
    model = train(data, algorithm, learner=learner, **FAST)
    assert np.isfinite(predictions(model, data)).all()


def test_a_cnn_learns_small_pictures(rng):
    data = images(rng, rows=40)
    model = train(data, "fedavg", learner="cnn", rounds=8, lr=0.3, batch_size=16)
    assert model.evaluate().mean_accuracy > 0.9


def test_a_module_of_ones_own(rng):
    data = federation(rng, sizes=(60, 50))
    model = train(
        data, learner=lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), **FAST
    )
    assert set(model.prediction.learners) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert model.options["learner"] == "custom"


@dataclass
class Factory:
    """Makes learners; such an object has no hash."""

    classes: int = 2

    def __call__(self):
        return nn.Linear(3, self.classes)


def test_learners_from_a_factory_without_a_hash(rng):
    held = type("Network", (), {})()
    recorder_of(held)  # as if a network was being trained on a card
    model = train(federation(rng), "fedavg", **{**FAST, "learner": Factory()})
    assert len(model.history) == FAST["rounds"]


def test_dropout_is_off_when_a_model_is_asked(rng):
    data = federation(rng, sizes=(60, 50))
    model = train(
        data,
        "fedavg",
        learner=lambda: nn.Sequential(nn.Linear(3, 30), nn.Dropout(0.5), nn.Linear(30, 2)),
        rounds=2,
    )
    x = data.test.inputs.numpy()
    assert np.array_equal(model.predict_proba(x), model.predict_proba(x))


def test_crops_and_flips_change_training_and_need_images(rng):
    data = images(rng)
    options = {**FAST, "learner": "cnn", "start": "random"}
    plain, changed = (train(data, "fedavg", augment=a, **options) for a in (False, True))
    again = train(data, "fedavg", augment=True, **options)
    name = next(iter(plain.prediction.learners))
    of = [m.prediction.learners[name] for m in (plain, changed, again)]
    assert not torch.equal(of[0], of[1])
    assert torch.equal(of[1], of[2])  # draws belong to the seed
    with pytest.raises(ValueError, match="augment"):
        train(federation(rng), augment=True, **FAST)


@pytest.mark.usefixtures("thin_mobilenet")
def test_a_model_that_is_kept_keeps_no_recordings(rng, monkeypatch):
    """They hold as much memory of a card as training did."""
    forgotten = []
    monkeypatch.setattr("fedgmm.training.in_process.forget_recordings", forgotten.append)
    data = FederatedDataset.from_arrays(
        rng.integers(0, 256, size=(12, 3, 8, 8)).astype(np.uint8),
        np.arange(12) % 2,
        np.arange(12) // 6,
    )
    options = {**FAST, "learner": "mobilenet", "lr": 1e-4, "rounds": 1}
    model = train(data, "fedavg", **options)
    assert forgotten == [model.prediction.net]
    with pytest.raises(ZeroDivisionError):
        train(data, "fedavg", on_round=[lambda entry: entry["round"] / 0], **options)
    assert len(forgotten) == 2


# ---------------------------------------------------------------------- starts


@pytest.mark.parametrize("start", ["tied", "split", "random"])
@pytest.mark.parametrize("algorithm", ["fedgmm", "fedem"])
def test_learners_can_start_in_every_way(rng, algorithm, start):
    data = federation(rng, sizes=(40, 40))
    assert np.isfinite(predictions(train(data, algorithm, start=start, **FAST), data)).all()


def test_pretrained_weights_are_for_mobilenet(rng, tmp_path):
    with pytest.raises(ValueError, match="needs learner='mobilenet'"):
        train(federation(rng), pretrained="weights.safetensors", **FAST)


@pytest.mark.usefixtures("thin_mobilenet")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_learners_start_from_given_weights(rng, tmp_path, algorithm):
    from safetensors.torch import save_file

    from fedgmm.nets.backbones import MobileNetV2, read_plain_pixels

    torch.manual_seed(3)
    module = MobileNetV2(2)
    save_file(module.state_dict(), tmp_path / "weights.safetensors")
    read_plain_pixels(module)
    pictures = rng.integers(0, 256, size=(8, 3, 8, 8)).astype(np.uint8)
    data = FederatedDataset.from_arrays(
        pictures, np.arange(8) // 4, np.arange(8) % 2, features=rng.normal(size=(8, 2))
    )
    model = train(
        data,
        algorithm,
        learner="mobilenet",
        pretrained=str(tmp_path / "weights.safetensors"),
        **{**FAST, "rounds": 1, "lr": 1e-9, "components": 1, "finetune_epochs": 0},
    )
    weight = module.state_dict()["features.3.conv.1.0.weight"]
    for own in model.prediction.learners["features.3.conv.1.0.weight"]:
        # copies are apart by a fiftieth of the weights' spread
        assert (own - weight).std() < 0.05 * weight.std()


# ---------------------------------------------------------------------- warm-up


def test_warm_up_rounds_are_fedavg_and_count(rng):
    data = federation(rng, sizes=(40, 50, 30))
    seen = []
    model = train(
        data,
        components=2,
        learners=2,
        rounds=6,
        warmup=4,
        tol=None,
        on_round=[lambda entry: seen.append(entry["round"])],
    )
    assert seen == [1, 2, 3, 4, 5, 6]
    average = train(data, "fedavg", rounds=4, tol=None)
    expected = [entry["log_likelihood"] for entry in average.history]
    np.testing.assert_allclose(
        [entry["log_likelihood"] for entry in model.history[:4]], expected, rtol=1e-6
    )
    seconds = [entry["seconds"] for entry in model.history]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_method_can_start_from_a_shared_learner(rng, algorithm):
    data = federation(rng, sizes=(40, 50, 30))
    common = {"dtype": "float64", "tol": None, "lr": 0.3}
    first = train(data, "fedavg", rounds=5, **common).prediction.learners["0.weight"][0]
    # one round with a rate of nearly nothing leaves the learners at their start
    model = train(
        data,
        algorithm,
        rounds=6,
        warmup=5,
        answers=lambda number, _: number <= 5,
        finetune_epochs=0,
        components=2,
        **common,
    )
    for learner in model.prediction.learners["0.weight"]:
        spread = 0.2 if algorithm in ("fedgmm", "fedem") else 1e-12
        assert float((learner - first).abs().max()) <= spread


def test_a_warm_up_longer_than_the_run_leaves_one_round(rng):
    model = train(federation(rng), warmup=99, tol=None, **{**FAST, "rounds": 3})
    assert len(model.history) == 3
