"""The accuracy that is watched while a model is trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedgmm.data.dataset import FederatedDataset
from fedgmm.training.in_process import train
from fedgmm.training.options import ALGORITHMS
from supervised import FAST, federation


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_watched_accuracy_is_that_of_the_validation_rows(rng, algorithm):
    data = federation(rng, sizes=(60, 50, 40), classes=3)
    options = {**FAST, "rounds": 5, "warmup": 2, "tol": None, "finetune_epochs": 0}
    options["personal_labels"] = False  # rounds are watched without label frequencies
    seen = []
    model = train(
        data,
        algorithm,
        watch_accuracy=True,
        on_round=[lambda entry: seen.append(entry["validation_accuracy"])],
        **options,
    )
    assert seen == [entry["validation_accuracy"] for entry in model.history]
    assert len(seen) == 5
    assert seen[-1] == pytest.approx(model.evaluate("validation").weighted_accuracy)
    after_warm_up = train(data, "fedavg", **{**options, "rounds": 2, "warmup": 0})
    assert seen[1] == pytest.approx(after_warm_up.evaluate("validation").weighted_accuracy)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_watching_changes_nothing(rng, algorithm):
    data = federation(rng, sizes=(30, 20))

    def learner():
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    options = {**FAST, "learner": learner}
    torch.manual_seed(0)
    plain = train(data, algorithm, **options)
    torch.manual_seed(0)
    watched = train(data, algorithm, watch_accuracy=True, **options)
    for name, value in plain.prediction.learners.items():
        assert torch.equal(value, watched.prediction.learners[name])
    for entry, other in zip(plain.history, watched.history, strict=True):
        assert set(other) - set(entry) == {"validation_accuracy"}
        assert entry["log_likelihood"] == other["log_likelihood"]


def test_watching_looks_at_a_bounded_sample(rng, monkeypatch):
    """Every k-th row, so that the sample is the same every time and all clients are in it."""
    monkeypatch.setattr("fedgmm.training.in_process._WATCHED_ROWS", 10)
    x = rng.normal(size=(200, 3))
    data = FederatedDataset.from_arrays(
        x, (x[:, 0] > 0).astype(int), np.arange(200) % 4, features=x[:, :2]
    )
    model = train(data, watch_accuracy=True, tol=None, **FAST)
    rows = data.validation
    assert len(rows) == 40
    picked = slice(0, None, 4)
    right = [
        model.predict(x[None], name, features=seen[None])[0] == label
        for x, seen, label, name in zip(
            rows.inputs.numpy()[picked],
            torch.cat(rows.features.chunks).numpy()[picked],
            rows.labels.numpy()[picked],
            [rows.names[code] for code in rows.codes[picked]],
            strict=True,
        )
    ]
    assert len(right) == 10
    assert model.history[-1]["validation_accuracy"] == pytest.approx(np.mean(right))


def test_watching_now_and_then(rng):
    model = train(federation(rng), watch_accuracy=2, tol=None, **{**FAST, "rounds": 5})
    assert ["validation_accuracy" in e for e in model.history] == [False, True, False, True, True]


def test_without_validation_rows_there_is_nothing_to_watch(rng):
    data = federation(rng, split=(0.8, 0.0, 0.2))
    model = train(data, watch_accuracy=True, **FAST)
    assert all(set(e) == {"round", "log_likelihood", "seconds"} for e in model.history)
