"""Small trainings with checkpoints, and what their files and models hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load as tensors_of
from torch import Tensor

from fedgmm.training import checkpoint as module
from fedgmm.training.checkpoint import Checkpoint
from fedgmm.training.in_process import train
from supervised import federation, two_groups

SMALL = {"components": 2, "learners": 2, "batch_size": 8, "tol": None}


def facts_of(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()[module._FACTS])


def content(path):
    """All that a checkpoint holds but the time it took."""
    facts = facts_of(path)
    for entry in facts["history"]:
        del entry["seconds"]
    for name in ("checksum", "options"):
        del facts[name]
    return facts, tensors_of(Path(path).read_bytes())


def assert_same_file(actual, expected):
    facts, tensors = content(actual)
    expected_facts, expected_tensors = content(expected)
    assert facts == expected_facts
    assert set(tensors) == set(expected_tensors)
    for name, value in expected_tensors.items():
        assert tensors[name].dtype == value.dtype, name
        assert torch.equal(tensors[name], value), name


def assert_same_model(actual, expected):
    for ours, theirs in (
        (actual.prediction, expected.prediction),
        (actual.prediction.gaussians, expected.prediction.gaussians),
    ):
        for name, value in ({} if theirs is None else vars(theirs)).items():
            own = getattr(ours, name)
            if isinstance(value, dict):
                assert list(own) == list(value)
                assert all(torch.equal(own[key], value[key]) for key in value), name
            elif isinstance(value, Tensor):
                assert torch.equal(own, value), name
    without_time = [
        [{k: v for k, v in entry.items() if k != "seconds"} for entry in model.history]
        for model in (actual, expected)
    ]
    assert without_time[0] == without_time[1]
    seconds = [entry["seconds"] for entry in actual.history]
    assert seconds == sorted(seconds)
    assert actual.stopped == expected.stopped


def copies_of(tmp_path, data, algorithm, **options):
    """A training, its last checkpoint, and copies of all checkpoints on the way."""
    copies = []

    def copy_to(name):
        def copy(entry):
            copies.append(tmp_path / f"{name} {entry['round']:.0f}")
            shutil.copy(tmp_path / name, copies[-1])

        return copy

    for name, every in (("often", 1), ("rarely", 1000)):
        model = train(
            data,
            algorithm,
            checkpoint=Checkpoint(tmp_path / name, every),
            on_round=[copy_to(name)],
            **options,
        )
    # of those that are written rarely, only the starts are new
    starts = {facts_of(path)["round"]: path for path in copies if "rarely" in path.name}
    return model, tmp_path / "often", [p for p in copies if "often" in p.name], [*starts.values()]


def data_set(algorithm="fedgmm"):
    rng = np.random.default_rng(5)
    if algorithm == "clustered":
        return two_groups(rng, clients=5, rows=30, columns=3)  # so that clusters split
    return federation(rng, sizes=(20, 40, 17, 26, 9))
