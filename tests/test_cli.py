"""The command line, in process and as a real command."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedgmm import __version__
from fedgmm.cli import app

runner = CliRunner()


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from fedgmm.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_version():
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"fedgmm {__version__}"


def test_help_lists_the_demo():
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output


def test_help_is_quick():
    def seconds() -> float:
        began = time.perf_counter()
        assert run_command("--help").returncode == 0
        return time.perf_counter() - began

    assert min(seconds() for _ in range(3)) < 0.5


def test_importing_the_cli_loads_nothing_heavy():
    code = "import sys, fedgmm.cli; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "sklearn", "scipy", "numpy", "matplotlib"} & set(loaded)


def test_demo_prints_a_table_and_draws_a_picture(tmp_path):
    out = tmp_path / "new" / "folder"
    result = runner.invoke(app, ["demo", "--out", str(out), "--clients", "3", "--seed", "1"])
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "client 3" in words
    assert "true weights" in words
    assert "log-likelihood" in words
    assert "scikit-learn" in words
    assert f"Picture: {out / 'demo.png'}" in words.replace("\n", "")
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_demo_as_a_real_command(tmp_path):
    done = run_command("demo", "--out", str(tmp_path), "--clients", "2")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo.png").exists()


def test_an_error_is_one_sentence(tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    done = run_command("demo", "--out", str(in_the_way))
    assert done.returncode == 1
    assert "File exists" in done.stderr
    assert "Traceback" not in done.stderr


def test_debug_shows_where_an_error_came_from(tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    done = run_command("--debug", "demo", "--out", str(in_the_way))
    assert done.returncode != 0
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("arguments", [["--clients", "0"], ["--seed", "-1"], ["--clients", "x"]])
def test_bad_options_are_refused(arguments, tmp_path):
    result = runner.invoke(app, ["demo", "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert not Path(tmp_path / "out").exists()


def test_an_error_without_a_message_is_named(monkeypatch, tmp_path):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError

    monkeypatch.setattr("fedgmm.experiments.demo.run_demo", fail)
    result = runner.invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "RuntimeError" in result.output


def test_compare_prints_a_table_and_writes_json(tmp_path):
    file = tmp_path / "results.json"
    arguments = ["compare", "digits", "--methods", "fedavg,fedgmm", "--rounds", "3"]
    result = runner.invoke(app, [*arguments, "--tuning-rounds", "1", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "FedGMM" in result.output
    record = json.loads(file.read_text())
    assert [one["algorithm"] for one in record] == ["fedavg", "fedgmm"]
    assert record[0]["lr"] in [float(rate) for rate in record[0]["tuning"]]


def test_compare_refuses_an_unknown_method():
    result = runner.invoke(app, ["compare", "digits", "--methods", "fedmagic"])
    assert result.exit_code == 1
    assert "fedmagic" in result.output
    assert "Traceback" not in result.output


def test_tune_shows_every_rate(tmp_path):
    file = tmp_path / "tuning.json"
    arguments = ["tune", "digits", "--grid", "0.1,0.01", "--rounds", "1", "--json", str(file)]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert set(json.loads(file.read_text())["scores"]) == {"0.1", "0.01"}


def test_reproduce_writes_table_and_json(tmp_path):
    arguments = ["reproduce", "synthetic", "--out", str(tmp_path), "--clients", "5", "--rows", "60"]
    result = runner.invoke(
        app, [*arguments, "--seeds", "1", "--rounds", "2", "--tuning-rounds", "1"]
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "synthetic.json").exists()
    assert "Bayes" in (tmp_path / "synthetic.md").read_text()
