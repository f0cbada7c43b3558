"""Checkpoints know the options and the data that they are of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedgmm.data.dataset import FederatedDataset
from fedgmm.training import checkpoint as checkpoints
from fedgmm.training import in_process
from fedgmm.training.checkpoint import (
    FREE_OPTIONS,
    Checkpoint,
    OtherTrainingError,
    StoredProgress,
    fingerprint,
)
from fedgmm.training.in_process import train
from fedgmm.training.options import ALGORITHMS, TrainingOptions
from small_checkpoints import SMALL, assert_same_model, copies_of
from supervised import federation


def test_the_same_file_for_another_training(tmp_path, rng):
    data, checkpoint = federation(rng), Checkpoint(tmp_path / "c")
    base = TrainingOptions(**{**SMALL, "rounds": 2})
    train(data, options=base, checkpoint=checkpoint)
    others = {
        "algorithm": "fedem",
        "components": 3,
        "learners": 3,
        "learner": "mlp",
        "solver": "sgd",
        "start": "split",
        "warmup": 1,
        "covariance_type": "diag",
        "aggregation": "paper",
        "server": "adam",
        "server_lr": 0.5,
        "clip_norm": 2.0,
        "schedule": "sqrt",
        "patience": 3,
        "pca": 1,
        "tol": 0.1,
        "standardise": False,
        "seed": 1,
        "dtype": "float64",
        "precision": "mixed",
    }
    for name in TrainingOptions.__dataclass_fields__:
        if name in (*FREE_OPTIONS, "augment", "pretrained"):  # the last two are for images
            continue
        value = others.get(name)
        if value is None:  # the others are numbers
            number = getattr(base, name)
            value = number + 1 if isinstance(number, int) else number / 2 + 0.01
        with pytest.raises(OtherTrainingError, match=f" {name}="):
            train(data, options=replace(base, **{name: value}), checkpoint=checkpoint)
    # plain numbers of NumPy are the same numbers
    same = replace(base, seed=np.int64(0), lr=np.float64(0.1), components=np.int32(2))
    train(data, options=same, checkpoint=checkpoint)


@pytest.mark.usefixtures("thin_mobilenet")
def test_pretrained_weights_may_lie_elsewhere(tmp_path, rng):
    from safetensors.torch import save_file

    from fedgmm.nets.backbones import MobileNetV2

    for name in ("one", "two"):
        save_file(MobileNetV2(2).state_dict(), tmp_path / name)
    # two rows a client are too few for batch normalisation: gradients of a million
    pictures = rng.integers(0, 256, size=(24, 3, 32, 32)).astype(np.uint8)
    data = FederatedDataset.from_arrays(pictures, np.arange(24) % 2, np.arange(24) % 2)
    options = {"algorithm": "local", "learner": "mobilenet", "lr": 1e-4}
    options["checkpoint"] = Checkpoint(tmp_path / "c")
    train(data, pretrained=str(tmp_path / "one"), rounds=1, **options)
    (tmp_path / "one").rename(tmp_path / "moved")
    train(data, pretrained=str(tmp_path / "moved"), rounds=2, **options)
    for other in (None, str(tmp_path / "two")):
        with pytest.raises(OtherTrainingError, match=r"pretrained='sha256 \w+'"):
            train(data, pretrained=other, rounds=3, **options)


def test_weights_of_an_older_checkpoint_are_known_by_their_place():
    old = StoredProgress(Path("c"), {"options": {"pretrained": "one"}, "data": "d"}, {})
    old.check_settings({"pretrained": "one", "pretrained_sha256": "1"}, "d")
    with pytest.raises(OtherTrainingError, match="pretrained='one'"):
        old.check_settings({"pretrained": "two", "pretrained_sha256": "1"}, "d")


def test_the_same_file_for_other_data(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 3))
    y, who = (x[:, 0] > 0).astype(int), np.arange(60) % 3
    data = FederatedDataset.from_arrays(x, y, who)
    checkpoint = Checkpoint(tmp_path / "c")
    train(data, rounds=1, checkpoint=checkpoint, **SMALL)
    train(FederatedDataset.from_arrays(x, y, who), rounds=2, checkpoint=checkpoint, **SMALL)
    for other in (
        FederatedDataset.from_arrays(x + 1e-9, y, who),
        FederatedDataset.from_arrays(x, 1 - y, who),
        FederatedDataset.from_arrays(x, y + 1, who),
        FederatedDataset.from_arrays(x, y, who + 1),
        FederatedDataset.from_arrays(x, y, who % 2),
        FederatedDataset.from_arrays(x, y, who, features=x[:, :2]),
        FederatedDataset.from_arrays(x, y, who, seed=1),
        FederatedDataset.from_arrays(x[:-3], y[:-3], who[:-3]),
    ):
        assert fingerprint(other) != fingerprint(data)
        with pytest.raises(OtherTrainingError, match="other data"):
            train(other, rounds=3, checkpoint=checkpoint, **SMALL)


def test_a_data_set_has_one_fingerprint_whatever_is_hashed_at_once(rng, monkeypatch):
    x = rng.normal(size=(90, 3))
    data = FederatedDataset.from_arrays(x, (x[:, 0] > 0).astype(int), np.arange(90) % 3)
    monkeypatch.setattr(checkpoints, "_SAMPLED_ROWS", 20)
    whole = fingerprint(data)
    monkeypatch.setattr(checkpoints, "_HASHED_BYTES", 100)
    assert fingerprint(data) == whole


def test_features_of_their_own_go_on(tmp_path, rng):
    x, seen = rng.normal(size=(90, 3)), rng.normal(size=(90, 2))
    y, who = (x[:, 0] > 0).astype(int), np.arange(90) % 3
    data = FederatedDataset.from_arrays(x, y, who, features=seen)
    other = FederatedDataset.from_arrays(x, y, who, features=seen + 1.0)
    assert fingerprint(data) != fingerprint(other)
    options = {**SMALL, "rounds": 4}
    model, _, rounds, _ = copies_of(tmp_path, data, "fedgmm", **options)
    assert_same_model(train(data, checkpoint=Checkpoint(rounds[1]), **options), model)


@pytest.mark.parametrize(
    ("algorithm", "patience"),
    [
        *((name, None) for name in ALGORITHMS if name != "fedgmm"),
        *(("fedem", 5), ("local", 5)),
    ],
)
def test_features_are_nothing_to_methods_without_gaussians(tmp_path, rng, algorithm, patience):
    """Whoever trains them may or may not have encoded the images."""
    x, seen = rng.normal(size=(90, 3)), rng.normal(size=(90, 2))
    y, who = (x[:, 0] > 0).astype(int), np.arange(90) % 3
    plain = FederatedDataset.from_arrays(x, y, who)
    encoded = FederatedDataset.from_arrays(x, y, who, features=seen)
    options = {**SMALL, "rounds": 4, "solver": "sgd", "patience": patience}
    model = train(plain, algorithm, **options)
    for first, second in ((plain, encoded), (encoded, plain)):
        path = Checkpoint(tmp_path / f"{first is plain}")
        train(first, algorithm, checkpoint=path, until=2, **options)
        again = train(second, algorithm, checkpoint=path, **options)
        assert len(again.history) == 4
        for name, value in model.prediction.learners.items():
            assert torch.equal(value, again.prediction.learners[name])


@pytest.mark.parametrize("algorithm", ["fedem", "fedavg+", "local"])
def test_options_of_gaussians_are_nothing_to_methods_without_them(tmp_path, rng, algorithm):
    data, checkpoint = federation(rng), Checkpoint(tmp_path / "c")
    train(data, algorithm, rounds=1, checkpoint=checkpoint, components=2)
    others = {"components": 3, "covariance_type": "diag", "reg_covar": 0.5}
    train(data, algorithm, rounds=2, checkpoint=checkpoint, **others)


def test_an_older_checkpoint_tells_of_features_that_nobody_saw(tmp_path, rng, monkeypatch):
    x, seen = rng.normal(size=(90, 3)), rng.normal(size=(90, 2))
    y, who = (x[:, 0] > 0).astype(int), np.arange(90) % 3
    data = FederatedDataset.from_arrays(x, y, who, features=seen)
    checkpoint = Checkpoint(tmp_path / "c")
    with monkeypatch.context() as patch:
        patch.setattr(in_process, "fingerprint", lambda data, features=True: fingerprint(data))
        train(data, "fedavg", rounds=1, checkpoint=checkpoint, **SMALL)
    train(data, "fedavg", rounds=2, checkpoint=checkpoint, **SMALL)
