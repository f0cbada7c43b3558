"""Real processes that are killed, interrupted, or meet each other in one folder."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

from fedgmm.cli.output import RoundsBar
from small_runs import bytes_of, fails, invoke, start, wait_for_rounds, works, write_sites

ROUNDS = 120
OPTIONS = ["--label", "state", "--components", "2", "--learners", "2", "--set", "tol=none"]
OPTIONS += ["--rounds", str(ROUNDS), "--checkpoint-every", "7"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The files, and a run on them that nothing disturbed."""
    base = tmp_path_factory.mktemp("whole")
    write_sites(base / "data")
    works("fit", base / "data", *OPTIONS, "--out", base / "run")
    return base


def rounds_of(home):
    return (home / "history.jsonl").read_bytes().count(b"\n")


def test_a_run_that_is_killed_and_interrupted_ends_with_the_same_bits(whole, tmp_path, monkeypatch):
    """Until it is killed, it keeps others out of its folder."""
    home = tmp_path / "a run"
    process = start("fit", whole / "data", *OPTIONS, "--out", home)
    try:
        wait_for_rounds(home, process, 10)
        process.send_signal(signal.SIGSTOP)  # so that it is still there when others come
        assert "Another process is working" in fails("resume", home)
        assert "Another process is working" in fails(
            "fit", whole / "data", *OPTIONS, "--out", home, "--overwrite"
        )
    finally:
        process.kill()
        process.communicate()
    assert 10 <= rounds_of(home) < ROUNDS - 10
    assert "fedgmm resume" in fails("evaluate", home)

    # Ctrl-C, in this process, ends the resumed run with 130
    def interrupt(_, entry):
        if entry["round"] == ROUNDS - 10:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(RoundsBar, "show", interrupt)
        result = invoke("resume", home)
    assert result.exit_code == 130
    assert result.stdout == ""
    assert f"fedgmm resume {home}" in result.stderr
    assert rounds_of(home) == ROUNDS - 10
    works("resume", home)
    assert bytes_of(home / "model") == bytes_of(whole / "run" / "model")
    assert rounds_of(home) == ROUNDS


@pytest.mark.slow
def test_ctrl_c_ends_a_process_with_130_and_the_run_can_be_resumed(whole, tmp_path):
    home = tmp_path / "run"
    process = start("fit", whole / "data", *OPTIONS, "--out", home)
    wait_for_rounds(home, process, 10)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert f"fedgmm resume {home}" in err
    assert "Traceback" not in err
    assert ".py" not in err
    works("resume", home)
    assert bytes_of(home / "model") == bytes_of(whole / "run" / "model")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_kills_at_random_moments(whole, tmp_path, seed):
    """Kill, resume, kill the resumed one, …: the end is always the same."""
    rng = np.random.default_rng(seed)
    home = tmp_path / "run"
    begun = time.monotonic()
    process = start("fit", whole / "data", *OPTIONS, "--out", home)
    assert process.wait(timeout=120) == 0
    seconds = time.monotonic() - begun
    works("fit", whole / "data", *OPTIONS, "--out", home, "--overwrite")
    assert bytes_of(home / "model") == bytes_of(whole / "run" / "model")
    home = tmp_path / "killed"
    for _ in range(8):
        command = ["resume", home]
        if not (home / "config.toml").is_file():
            command = ["fit", whole / "data", *OPTIONS, "--out", home]
        before = rounds_of(home) if (home / "history.jsonl").is_file() else 0
        process = start(*command)
        # most moments lie in the training, some before and some in the last steps
        time.sleep(float(rng.uniform(0.4, 1.05)) * seconds)
        process.kill()
        process.communicate()
        after = rounds_of(home) if (home / "history.jsonl").is_file() else 0
        assert after >= before - 7
    works(*(["resume", home] if (home / "config.toml").is_file() else command))
    assert bytes_of(home / "model") == bytes_of(whole / "run" / "model")
    assert rounds_of(home) == ROUNDS
    assert not list(home.rglob("*.part"))
