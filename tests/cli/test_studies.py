"""Commands that demonstrate, compare and reproduce; help and errors of all commands."""

import json
import re
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from sklearn import ensemble
from typer.main import get_command

from fedgmm import __version__
from fedgmm.cli import app
from fedgmm.runs import comparison
from small_runs import RUNNER, SMALL, fails, works, write_sites

COMMANDS = [
    "inspect",
    "fit",
    "resume",
    "evaluate",
    "predict",
    "adapt",
    "detect",
    "report",
    "card",
    "export",
    "compare",
    "demo",
    "tune",
    "reproduce",
]


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from fedgmm.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_version():
    result = RUNNER.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"fedgmm {__version__}"


def test_the_package_is_the_command():
    command = [sys.executable, "-m", "fedgmm", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"fedgmm {__version__}"


def test_help_lists_every_command():
    result = RUNNER.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in COMMANDS:
        assert command in result.output
    assert "130" in result.output  # exit codes


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command):
    result = RUNNER.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Example: fedgmm {command}" in " ".join(result.output.split())
    for parameter in get_command(app).commands[command].params:
        assert parameter.help, parameter.name


def test_help_is_quick():
    def seconds() -> float:
        """Processor time, because other programs may keep the machine busy."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run_command("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    assert any(seconds() < 0.5 for _ in range(3))


@pytest.mark.parametrize("code", ["import fedgmm.cli", "HELP"])
def test_help_loads_nothing_heavy(code):
    if code == "HELP":
        code = (
            "from typer.testing import CliRunner; from fedgmm.cli import app; "
            "assert CliRunner().invoke(app, ['fit', '--help']).exit_code == 0"
        )
    loaded = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    heavy = {"torch", "sklearn", "scipy", "numpy", "matplotlib", "pyarrow", "plotly", "pandas"}
    assert not heavy & set(loaded)


def test_demo_prints_a_table_and_draws_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr("fedgmm.cli.studies._run_story", lambda *_: None)  # has tests of its own
    out = tmp_path / "new" / "folder"
    result = RUNNER.invoke(app, ["demo", "--out", str(out), "--clients", "3", "--seed", "1"])
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "client 3" in words
    assert "true weights" in words
    assert "log-likelihood" in words
    assert "scikit-learn" in words
    assert f"Picture: {out / 'demo.png'}" in words.replace("\n", "")
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_demo_as_a_real_command(tmp_path):
    done = run_command("demo", "--out", str(tmp_path), "--clients", "2")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo.png").exists()
    assert (tmp_path / "story.png").exists()


def test_demo_writes_example_files(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "hospitals"
    monkeypatch.chdir(tmp_path)
    written = works("demo", "--write-files", folder).stdout.split()
    assert sorted(written) == sorted(str(path) for path in folder.iterdir())
    assert not (tmp_path / "demo").exists()


def test_an_error_is_one_sentence(tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    done = run_command("demo", "--out", str(in_the_way))
    assert done.returncode == 1
    assert done.stderr == f"Error: File exists: {in_the_way}\n"
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "CUDA out of memory. Tried to allocate 520.00 MiB. GPU 0 has 139.80 GiB, and so on.",
            "CUDA out of memory. Tried to allocate 520.00 MiB. Close other programs on the GPU, or "
            "use another --device.",
        ),
        ("The memory of cuda does not suffice; so.", "The memory of cuda does not suffice; so."),
    ],
)
def test_a_full_gpu_is_reported_with_a_remedy(monkeypatch, tmp_path, message, expected):
    def full(*_, **__):
        raise torch.cuda.OutOfMemoryError(message)

    monkeypatch.setattr("fedgmm.experiments.demo.run_demo", full)
    result = RUNNER.invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr == f"Error: {expected}\n"


def test_debug_shows_where_an_error_came_from(tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    done = run_command("--debug", "demo", "--out", str(in_the_way))
    assert done.returncode != 0
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("arguments", [["--clients", "0"], ["--seed", "-1"], ["--clients", "x"]])
def test_bad_options_are_refused(arguments, tmp_path):
    result = RUNNER.invoke(app, ["demo", "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert not Path(tmp_path / "out").exists()


def test_an_error_without_a_message_is_named(monkeypatch, tmp_path):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError

    monkeypatch.setattr("fedgmm.experiments.demo.run_demo", fail)
    result = RUNNER.invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "RuntimeError" in result.output


def test_an_error_without_a_file_names_none(monkeypatch, tmp_path):
    def fail(*_: object, **__: object) -> None:
        raise OSError(2, "Failed to open 'p.csv'")

    monkeypatch.setattr("fedgmm.experiments.demo.run_demo", fail)
    assert fails("demo", "--out", tmp_path) == "Failed to open 'p.csv'"


# ---------------------------------------------------------------------- compare


@pytest.fixture
def quick(monkeypatch):
    """Compare methods with two rates, and with little boosting on the pooled rows."""
    monkeypatch.setitem(comparison.compare.__kwdefaults__, "grid", (0.1, 0.01))
    few = partial(ensemble.HistGradientBoostingClassifier, max_iter=2)
    monkeypatch.setattr(ensemble, "HistGradientBoostingClassifier", few)


@pytest.mark.usefixtures("quick")
def test_compare_prints_a_table_and_who_ties(tmp_path):
    write_sites(tmp_path)
    arguments = ["compare", tmp_path, "--label", "state", "--methods", "fedavg,fedprox"]
    arguments += ["--rounds", "2", "--learners", "2"]
    shown = " ".join(
        works(*arguments, "--tuning-rounds", "1", "--learner", "linear").stdout.split()
    )
    assert "FedProx" in shown
    assert "A tie: " in shown
    assert "not repeated" in shown
    assert "pooled (rows shared; for orientation)" in shown


@pytest.mark.usefixtures("quick")
def test_compare_prints_json_and_writes_it_to_out(tmp_path):
    write_sites(tmp_path / "data")
    arguments = ["compare", tmp_path / "data", "--label", "state", "--methods", "fedavg, fedgmm"]
    arguments += ["--rounds", "2", "--tuning-rounds", "1", "--seeds", "3", "--learners", "2"]
    arguments += ["--out", tmp_path / "new", "--json"]
    record = json.loads(works(*arguments).stdout, parse_constant=pytest.fail)
    assert [one["algorithm"] for one in record["methods"]] == ["fedavg", "fedgmm"]
    for one in record["methods"]:
        assert set(one["by_learner"]) == {"linear", "mlp"}
        assert one["tied_with_best"] == (one["algorithm"] in record["tied"])
    first = record["splits"][0][0]
    assert first["lr"] in [float(rate) for rate in first["tuning_in_full"]]
    assert record["seeds"] == [0, 1, 2]
    assert json.loads((tmp_path / "new" / "comparison.json").read_text()) == record
    assert set(record["methods"][0]["clients"]) == {"oslo", "bergen", "tromso"}


@pytest.mark.usefixtures("quick")
def test_compare_keeps_its_results_with_a_run(finished):
    arguments = ["--methods", "local,fedgmm", "--rounds", "2", "--tuning-rounds", "1"]
    result = works("compare", finished / "run", *arguments, "--learner", "linear")
    assert "comparison.json" in result.stdout
    works("report", finished / "run")
    assert "Local" in (finished / "run" / "report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("quick")
def test_compare_on_a_run_gives_the_run_s_own_figures_again(finished):
    arguments = ["--methods", "fedgmm", "--learner", "linear", "--json"]
    record = json.loads(works("compare", finished / "run", *arguments).stdout)
    (again,) = record["splits"][0]
    metrics = json.loads((finished / "run" / "metrics.json").read_text())
    assert again["rounds"] == metrics["rounds"] == SMALL["rounds"]
    assert {name: again[name] for name in metrics["test"]} == pytest.approx(metrics["test"])


def test_compare_refuses_what_it_cannot_compare(tmp_path):
    assert "fedmagic" in fails("compare", "digits", "--methods", "fedmagic")
    assert "oracle" in fails("compare", "digits", "--methods", "fedavg", "--learner", "oracle")
    assert "built in" in fails("compare", "digits", "--ignore", "x")
    assert "--label" in fails("compare", tmp_path)
    assert "no such file" in fails("compare", tmp_path / "x.csv", "--label", "y")


def test_a_run_is_compared_as_it_was_trained(finished):
    for option in ("--label", "--client-column", "--ignore", "--categorical"):
        assert "leave out --label" in fails("compare", finished / "run", option, "age")


@pytest.mark.usefixtures("quick")
def test_compare_reads_files_as_fit_does(tmp_path):
    write_sites(tmp_path)
    arguments = ["compare", tmp_path, "--label", "state", "--methods", "local", "--rounds", "1"]
    arguments += ["--learner", "linear", "--tuning-rounds", "1", "--learners", "1"]
    arguments += ["--ignore", "age"]
    whole = works(*arguments[:-2]).stdout
    without = works(*arguments).stdout
    assert int(re.search(r"inputs +(\d+)", whole)[1]) > int(re.search(r"inputs +(\d+)", without)[1])


# ---------------------------------------------------------------------- tune, reproduce


def test_tune_shows_every_rate():
    arguments = ["tune", "digits", "--grid", "0.1,0.01", "--rounds", "1"]
    assert "0.01" in works(*arguments).stdout
    found = json.loads(works(*arguments, "--json").stdout, parse_constant=pytest.fail)
    assert set(found["scores"]) > {"0.1", "0.01"}  # the best rate was at the edge
    assert found["lr"] > 0.1


def test_tune_refuses_rates_that_are_not_numbers():
    assert "--grid" in fails("tune", "digits", "--grid", "fast", code=2)


def test_reproduce_writes_table_and_json(tmp_path):
    arguments = ["reproduce", "synthetic", "--out", str(tmp_path), "--clients", "5", "--rows", "60"]
    works(*arguments, "--seeds", "1", "--rounds", "2", "--tuning-rounds", "1")
    assert (tmp_path / "synthetic.json").exists()
    assert "Bayes" in (tmp_path / "synthetic.md").read_text()
