"""Real processes: ``torchrun -m fedgmm fit`` gives the run of one process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fedgmm.model.saving import load
from fedgmm.runs.fitting import fit, resume
from forked import command, forks

OPTIONS = {"components": 2, "learners": 2, "dtype": "float64", "checkpoint_every": 1}
ROUNDS = 6


def arguments(files, out, rounds):
    sets = ["dtype=float64", "tol=0.0"]
    return [
        *("fit", str(files), "--label", "y", "--out", str(out), "--rounds", str(rounds)),
        *("--components", "2", "--learners", "2", "--checkpoint-every", "1"),
        *(part for text in sets for part in ("--set", text)),
    ]


def two_ranks(folder, *arguments):
    """Run the two processes that torchrun would start, without its own imports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    logs, ranks = [folder / "log 0", folder / "log 1"], []
    for rank, log in enumerate(logs):
        own = {**here, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(forks.Process(target=command, args=(list(arguments), own, log), daemon=True))
        ranks[-1].start()
    for process in ranks:
        process.join(200)
    assert logs[1].read_text(encoding="utf-8") == ""  # only rank 0 prints
    return max(process.exitcode for process in ranks), logs[0].read_text(encoding="utf-8")


def torchrun(ranks, *command):
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*launcher, "--standalone", "-m", "fedgmm", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def by_torchrun(_, *command):
    process = torchrun(2, *command)
    printed, notes = process.communicate(timeout=200)
    return process.returncode, printed + notes


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files of three clients."""
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    for name in ("oslo", "rome", "bonn"):
        x = rng.normal(size=(60, 3))
        y = (x @ rng.normal(size=3) > 0).astype(int)
        table = np.column_stack([x, y])
        header, formats = "a,b,c,y", ["%.6f"] * 3 + ["%d"]
        np.savetxt(folder / f"{name}.csv", table, formats, ",", header=header, comments="")
    return folder


def assert_same_model(one, other):
    a, b = (load(home / "model").prediction for home in (one, other))
    torch.testing.assert_close(a.client_weights, b.client_weights, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(a.learners, b.learners, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(a.gaussians.means, b.gaussians.means, rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
@pytest.mark.parametrize("launch", [two_ranks, pytest.param(by_torchrun, marks=pytest.mark.slow)])
def test_fit_on_two_processes(files, tmp_path, launch):
    code, printed = launch(tmp_path, *arguments(files, tmp_path / "two", ROUNDS))
    assert code == 0, printed
    assert printed.count("Run:") == 1
    fit(files, "y", tmp_path / "one", rounds=ROUNDS, tol=0.0, **OPTIONS)
    assert_same_model(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_a_wrong_column_is_one_sentence(files, tmp_path):
    process = torchrun(2, "fit", str(files), "--label", "nothing", "--out", str(tmp_path / "run"))
    _, notes = process.communicate(timeout=60)
    assert process.returncode == 1
    assert [line[:6] for line in notes.splitlines()].count("Error:") == 1


def children(process):
    """The ranks of a launcher, in their order."""
    tasks = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return sorted(map(int, tasks.read_text(encoding="utf-8").split()))


def wait_for_rounds(home, process):
    history = home / "history.jsonl"
    for _ in range(600):
        if history.is_file() and history.read_text(encoding="utf-8").count("\n") > 3:
            return
        assert process.poll() is None
        time.sleep(0.05)
    raise AssertionError("no rounds")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["interrupt", "kill"])
def test_an_interrupted_run_resumes_with_other_ranks(files, tmp_path, end):
    rounds = 500
    process = torchrun(4, *arguments(files, tmp_path / "four", rounds))
    wait_for_rounds(tmp_path / "four", process)
    if end == "interrupt":
        process.send_signal(signal.SIGINT)
    else:
        os.kill(children(process)[-1], signal.SIGKILL)
    _, notes = process.communicate(timeout=60)
    assert process.returncode != 0
    if end == "interrupt":
        assert "fedgmm resume" in notes
    assert "Traceback" not in notes.partition("torch/distributed")[0]
    again = torchrun(2, "resume", str(tmp_path / "four"))
    fit(files, "y", tmp_path / "one", rounds=rounds, tol=0.0, **OPTIONS)
    _, notes = again.communicate(timeout=120)
    assert again.returncode == 0, notes
    assert resume(tmp_path / "four").model.history[-1]["round"] == rounds
    assert_same_model(tmp_path / "one", tmp_path / "four")
