"""What all tests share: a deterministic hypothesis, small data, and torch's threads put back."""

from __future__ import annotations

import os
from functools import partial

# Small problems on many threads mostly wait for each other, worst on a busy machine. Tests that are
# about threads ask for them with the fixture below.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# Derandomised: a run of the suite says something about the code, not about the day's luck.
settings.register_profile(
    "fedgmm",
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("fedgmm")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported: see test_kernels.py


@pytest.fixture(scope="session", autouse=True)
def disk():
    """Nobody waits for the disk: files here need not outlive a power cut. A handle must be open.

    Yields the real ``os.fsync``.
    """
    fsync = os.fsync
    os.fsync = os.fstat
    yield fsync
    os.fsync = fsync


@pytest.fixture
def rng():
    return np.random.default_rng(20230723)


@pytest.fixture
def threads():
    """Set the number of torch's threads; the old number comes back after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def small_chunks(monkeypatch):
    """Clients of eight rows or more keep their own arrays, so that small data have many chunks."""
    monkeypatch.setattr("fedgmm.data.federated._OWN_CHUNK_ROWS", 8)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of at most 32 rows, so that small data run through several blocks and lanes."""
    monkeypatch.setattr("fedgmm.core.streaming._FEWEST_ROWS", 8)
    monkeypatch.setattr("fedgmm.core.streaming._MOST_ROWS", 32)


@pytest.fixture
def thin_mobilenet(monkeypatch):
    """``learner="mobilenet"`` has all its layers, but a quarter of their channels."""
    from fedgmm.nets import backbones, stacked

    assert stacked.MobileNetV2 is backbones.MobileNetV2  # that module asks for the class itself
    monkeypatch.setattr(backbones, "MobileNetV2", partial(backbones.MobileNetV2, width=0.25))
