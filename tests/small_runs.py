"""Small files of sites, runs on them, and the command line in this process and as real ones."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import typer
from click.testing import CliRunner

SITES = {"oslo": 90, "bergen": 60, "tromso": 50}
SMALL = {"components": 2, "learners": 2, "rounds": 4}
SMALL_OPTIONS = ["--components", "2", "--learners", "2", "--rounds", "4"]


def draw_rows(rng, rows, turned=False):
    """Two measurements, a category with gaps, and a label that follows from them."""
    x = rng.normal(size=(rows, 2)) + (2.0 if turned else 0.0)
    ward = rng.choice(["north", "south", "west"], size=rows)
    ill = (x[:, 0] - x[:, 1] > 0) ^ turned
    return [
        {
            "age": f"{50 + 10 * a:.2f}",
            "dose": "" if rng.random() < 0.05 else f"{b:.3f}",
            "ward": str(w),
            "state": "ill" if i else "well",
        }
        for (a, b), w, i in zip(x.tolist(), ward, ill.tolist(), strict=True)
    ]


def write_csv(path, rows, without=(), **options):
    names = [name for name in rows[0] if name not in without]
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", **options)
        writer.writeheader()
        writer.writerows(rows)
    return Path(path)


def write_sites(folder, sizes=None, seed=0):
    """One file a site; every second one has its labels the other way round."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_csv(folder / f"{name}.csv", draw_rows(rng, rows, turned=number % 2 == 1))
        for number, (name, rows) in enumerate((sizes or SITES).items())
    ]


class Runner(CliRunner):
    """A runner that builds the tree of commands once; typer's own builds it for every call."""

    def invoke(self, app, *arguments, **options):
        return super().invoke(_command(app), *arguments, **options)


@cache
def _command(app):
    return typer.main.get_command(app)


RUNNER = Runner()


def invoke(*arguments):
    """A command in this process; whatever goes wrong must be a sentence, not a traceback."""
    from fedgmm.cli import app

    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def works(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result


def fails(*arguments, code=1):
    """The sentence that a command ends with."""
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    if code == 1:
        assert result.stderr.startswith("Error: "), result.stderr
        assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.removeprefix("Error: ").strip()


def start(*arguments, cwd=None, code="from fedgmm.cli import main; main()"):
    """A command, or other code, as a process of its own, with the buffers of Python's defaults."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )


def wait_for_rounds(home, process, rounds, seconds=60.0):
    """Until a real process has done so many rounds."""
    deadline = time.monotonic() + seconds
    history = Path(home) / "history.jsonl"
    while time.monotonic() < deadline:
        if history.is_file() and history.read_bytes().count(b"\n") >= rounds:
            return
        if process.poll() is not None:
            pytest.fail(f"the process ended too soon: {process.communicate()}")
        time.sleep(0.002)
    pytest.fail("the rounds did not come")


def bytes_of(folder):
    """Every file below a folder with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="session")
def finished_home(tmp_path_factory):
    """A finished run and its files, made once; tests that change it take a copy."""
    import fedgmm

    base = tmp_path_factory.mktemp("finished")
    write_sites(base / "data")
    rng = np.random.default_rng(1)
    rows = draw_rows(rng, 40)
    write_csv(base / "new.csv", rows, without=("state",))
    write_csv(base / "newcomer.csv", rows)
    fedgmm.fit([base / "data"], "state", base / "run", **SMALL)
    return base


@pytest.fixture
def finished(finished_home, tmp_path):
    """The run in ``run``, a copy; ``new.csv`` and ``newcomer.csv`` beside it."""
    import shutil

    for name in ("run", "new.csv", "newcomer.csv"):
        source = finished_home / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    return tmp_path
