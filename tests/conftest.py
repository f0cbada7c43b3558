"""Settings and fixtures for all tests.

Tests do not depend on the environment they run in: examples are deterministic, the working folder is
empty, Ctrl-C works, and the number of torch's threads is restored.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
from functools import cache, partial
from hashlib import sha256
from importlib import metadata
from pathlib import Path

# Threads slow small problems down, most on a busy machine. Tests that need several threads set their
# number with the fixture ``threads``.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A thread that waits for others sleeps, because spinning takes CPU time from other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Plugins of Hypothesis import trio, which takes three times as long as Hypothesis.
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# Every run records the versions of its packages, and reading them takes milliseconds each time.
metadata.version = cache(metadata.version)

# Files of tests lie in memory where there is room. Many of them replace another file, and a disk then
# writes the new one at once, which takes twenty times as long.
MEMORY = Path("/dev/shm")
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Some tests start Python in another folder, where a relative path would lead elsewhere.
if "PYTHONPATH" in os.environ:
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in paths)

# Examples are the same in every run, so that a failure says something about the code. `make test-slow`
# repeats all tests that use examples with the second profile.
settings.register_profile(
    "fedgmm",
    deadline=None,
    derandomize=True,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("fedgmm"), max_examples=300)
settings.load_profile("fedgmm")


def pytest_collection():
    """Prepare a process that collects tests; the one that only distributes them need not import torch."""
    gc.disable()  # modules and tests stay to the end
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = (
            "1"  # read when Triton is first imported: see test_kernels.py
        )


def pytest_collection_finish():
    """Leave out modules and tests, which stay to the end, when garbage is collected, and do so seldom."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # young objects seldom die in cycles
    gc.enable()
    # Libraries report what is left over as a leak, so everything is collected at the end.
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session", autouse=True)
def empty_folder(tmp_path_factory):
    """Run all tests in an empty folder, so that files in the caller's folder make no difference."""
    caller, folder = Path.cwd(), tmp_path_factory.mktemp("empty")
    os.chdir(folder)
    yield folder
    os.chdir(caller)


@pytest.fixture(autouse=True)
def _nothing_written_there(empty_folder):
    """Fail a test that writes into the working folder."""
    yield
    found = list(empty_folder.iterdir())
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert not found


@pytest.fixture(scope="session", autouse=True)
def ctrl_c():
    """Let Ctrl-C interrupt the tests and the processes they start.

    A shell that starts the tests in the background has them ignore SIGINT, and child processes
    inherit that. A signal with a handler is reset to its default in a new program.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def disk():
    """Do not wait for the disk, because test files need not outlive a power cut.

    ``os.fstat`` stands in, because it also fails for a closed file. Yields the real ``os.fsync``.
    """
    fsync = os.fsync
    os.fsync = os.fstat
    yield fsync
    os.fsync = fsync


@pytest.fixture(scope="session", autouse=True)
def small_scratch_files():
    """Reserve little space for scratch files, because a file in memory is filled with zeros at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedgmm.support.scratch._COMMON_FILE", 1 << 20)
        yield


@pytest.fixture(scope="session", autouse=True)
def known_eigenvectors():
    """Keep the eigenvectors of large matrices: studies of the same small images need them often."""
    import torch

    real, known = torch.linalg.eigh, {}

    def eigh(matrix):
        if matrix.device.type != "cpu" or matrix.shape[-1] < 256:
            return real(matrix)
        key = matrix.dtype, sha256(matrix.numpy().tobytes()).digest()
        if key not in known:
            if len(known) == 64:
                known.clear()
            known[key] = real(matrix)
        return known[key]

    torch.linalg.eigh = eigh
    yield
    torch.linalg.eigh = real


@pytest.fixture(scope="session", autouse=True)
def few_resamples():
    """Make as few bootstrap resamples as large data have, because every run ends with intervals."""
    from fedgmm.model import bootstrap

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bootstrap, "RESAMPLES", bootstrap._FEWEST_RESAMPLES)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_fold():
    """Score sizes by validation rows alone, as on large data, after few rounds, without :func:`folds`."""
    from fedgmm.training import selection

    usual = {name: getattr(selection, name) for name in ("_FEW_ROWS", "_TRIAL_ROUNDS")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_FEW_ROWS", 0)
        patch.setattr(selection, "_TRIAL_ROUNDS", 8)
        yield usual


@pytest.fixture
def folds(one_fold, monkeypatch):
    """Cross-validate the scores of sizes on few rows after as many rounds as outside the tests."""
    for name, value in one_fold.items():
        monkeypatch.setattr(f"fedgmm.training.selection.{name}", value)


@pytest.fixture
def collect():
    """Collect the garbage of this test; looking at all older objects takes half a second."""
    gc.freeze()
    return gc.collect


@pytest.fixture
def rng():
    return np.random.default_rng(20230723)


@pytest.fixture
def threads():
    """Set the number of torch's threads; the old number comes back after the test."""
    import torch

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
    monkeypatch.setattr("fedgmm.support.streaming._FEWEST_ROWS", 8)
    monkeypatch.setattr("fedgmm.support.streaming._MOST_ROWS", 32)


@pytest.fixture
def thin_mobilenet(monkeypatch):
    """``learner="mobilenet"`` has a block of each kind and a quarter of the channels."""
    from fedgmm.nets import backbones, stacked

    assert stacked.MobileNetV2 is backbones.MobileNetV2  # that module asks for the class itself
    monkeypatch.setattr(backbones, "MobileNetV2", partial(backbones.MobileNetV2, width=0.25))
    monkeypatch.setattr(backbones, "_STAGES", ((1, 16, 1, 1), (6, 24, 2, 2)))
