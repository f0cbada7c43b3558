"""The paper's experiments from the command line."""

import inspect
import json
from pathlib import Path

import pytest

import tiny_images
from fedgmm.cli import app
from fedgmm.experiments import settings
from fedgmm.experiments.paper import synthetic
from small_runs import RUNNER

SMALL = ["--rounds", "2", "--tuning-rounds", "1", "--seeds", "1", "--encoder", "pixels"]
SMALL += ["--learner", "linear", "--device", "cpu"]


@pytest.fixture(autouse=True)
def few_rates(monkeypatch):
    """Let studies try two learning rates."""
    monkeypatch.setattr(settings, "PAPER_GRID", (0.1, 0.01))


@pytest.mark.parametrize("experiment", ["classification", "unseen"])
def test_an_experiment_on_images_writes_its_table(experiment, tmp_path):
    tiny_images.write_femnist(tmp_path / "data")
    arguments = ["reproduce", experiment, "--dataset", "femnist", "--methods", "fedavg,fedgmm"]
    arguments += ["--data-dir", str(tmp_path / "data"), "--out", str(tmp_path / "out"), *SMALL]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "FedGMM" in result.output
    table = tmp_path / "out" / f"{experiment}-femnist-paper.md"
    assert "79.49" in table.read_text() or "78.51" in table.read_text()


def test_the_data_folder_may_come_from_the_environment(tmp_path, monkeypatch):
    tiny_images.write_femnist(tmp_path / "data")
    monkeypatch.setenv("FEDGMM_DATA", str(tmp_path / "data"))
    arguments = ["reproduce", "classification", "--methods", "fedavg", "--out", str(tmp_path / "o")]
    assert RUNNER.invoke(app, [*arguments, *SMALL]).exit_code == 0


def test_without_a_data_folder_it_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDGMM_DATA", raising=False)
    result = RUNNER.invoke(app, ["reproduce", "classification", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "FEDGMM_DATA" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "wrong", [["--dataset", "imagenet"], ["--track", "fast"], ["--methods", "magic"]], ids=str
)
def test_unknown_names_are_reported(wrong, tmp_path):
    result = RUNNER.invoke(app, ["reproduce", "classification", "--out", str(tmp_path), *wrong])
    assert result.exit_code == 1
    assert wrong[1] in result.output


def test_options_of_images_are_refused_elsewhere(tmp_path):
    arguments = ["reproduce", "synthetic", "--out", str(tmp_path), "--dataset", "femnist"]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 2
    assert "classification" in result.output


def test_nothing_is_fetched_unless_asked_for(tmp_path, monkeypatch):
    asked = []

    def fetched(name, folder, progress=None):
        asked.append((name, folder))

    monkeypatch.setattr("fedgmm.data.images.files.fetch_files", fetched)
    arguments = ["reproduce", "classification", "--dataset", "mnist", "--out", str(tmp_path / "o")]
    arguments += ["--data-dir", str(tmp_path / "data")]
    assert RUNNER.invoke(app, arguments).exit_code == 1
    assert asked == []
    assert RUNNER.invoke(app, [*arguments, "--download"]).exit_code == 1  # there is still no file
    assert [name for name, _ in asked] == ["mnist"]


def test_sizes_reach_the_study(tmp_path):
    tiny_images.write_femnist(tmp_path / "data")
    arguments = ["reproduce", "classification", "--methods", "fedavg", "--out", str(tmp_path / "o")]
    arguments += ["--data-dir", str(tmp_path / "data"), *SMALL]
    sizes = ["--components", "2", "--learners", "1", "--image-size", "16"]
    result = RUNNER.invoke(app, [*arguments, *sizes, "--encoder-dtype", "float32"])
    assert result.exit_code == 0, result.output
    study = json.loads((tmp_path / "o" / "classification-femnist-paper" / "study.json").read_text())
    asked = {"components": 2, "learners": 1, "image_size": 16, "encoder_dtype": "float32"}
    assert {name: study[name] for name in asked} == asked


def test_a_flag_of_images_is_named_as_it_was_typed(tmp_path):
    arguments = ["reproduce", "synthetic", "--out", str(tmp_path), "--image-size", "16"]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 2
    assert "--image-size" in result.output


@pytest.mark.parametrize(
    ("experiment", "option"),
    [
        ("classification", ["--rows", "100"]),
        ("novelty", ["--no-shift"]),
        ("novelty", ["--shift"]),
        ("synthetic", ["--data-dir", "data"]),
        ("nongaussian", ["--download"]),
        ("illustration", ["--seeds", "3"]),
        ("illustration", ["--methods", "foo"]),
        ("illustration", ["--device", "nope"]),
    ],
    ids=str,
)
def test_an_option_of_another_experiment_is_refused(experiment, option, tmp_path):
    result = RUNNER.invoke(app, ["reproduce", experiment, "--out", str(tmp_path / "o"), *option])
    assert result.exit_code == 2
    assert f"{option[0]} is for" in result.output
    assert f"not for {experiment}" in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "o").exists()


def test_a_data_folder_in_the_environment_is_ignored_without_images(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDGMM_DATA", str(tmp_path))

    def write(out):
        (out / "illustration.md").write_text("A table.")

    monkeypatch.setattr(synthetic, "reproduce_illustration", write)
    assert RUNNER.invoke(app, ["reproduce", "illustration", "--out", str(tmp_path)]).exit_code == 0


def test_every_option_belongs_to_an_experiment():
    from fedgmm.cli import studies

    names = set(inspect.signature(studies.reproduce).parameters)
    assert names - {"ctx", "experiment", "out"} == set().union(*studies._OPTIONS.values())


def test_a_number_of_gaussians_leaves_novelty_nothing_to_choose(tmp_path, monkeypatch):
    seen = []

    def reproduced(out, study, _):
        seen.append(study)
        (out / f"novelty-{study.label}.md").write_text("# done")

    monkeypatch.setattr("fedgmm.experiments.paper.novelty.reproduce_novelty", reproduced)
    arguments = ["reproduce", "novelty", "--out", str(tmp_path), "--components", "7"]
    assert RUNNER.invoke(app, arguments).exit_code == 0
    _, sizes = seen[0].density_choices
    assert {size["components"] for size in sizes} == {7}


@pytest.mark.parametrize(
    ("options", "kept"),
    [([], "o/encoded"), (["--cache", "c"], "c"), (["--encoder", "pixels"], None)],
    ids=str,
)
def test_encoded_images_are_kept_beside_the_results(tmp_path, monkeypatch, options, kept):
    """Unless they are mere pixels, which are faster read than kept."""
    monkeypatch.chdir(tmp_path)
    seen = []

    def look(out, study, context):
        seen.append(context.cache)
        raise ValueError("that is all")

    monkeypatch.setattr("fedgmm.experiments.paper.classification.reproduce_classification", look)
    result = RUNNER.invoke(app, ["reproduce", "classification", "--out", "o", *options])
    assert "that is all" in result.output
    assert seen == [None if kept is None else Path(kept)]
