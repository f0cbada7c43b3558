"""``fit`` and ``resume``: the files of a run folder, and that runs can be repeated and resumed."""

from __future__ import annotations

import json
import shutil
import time

import numpy as np
import pytest
from sklearn.datasets import load_wine
from sklearn.linear_model import LogisticRegression

import fedgmm
from fedgmm.data.tables.errors import TableError
from fedgmm.runs.config import config_from, read_config
from fedgmm.runs.fitting import fit_config
from fedgmm.runs.folder import RunError, read_history
from small_runs import SITES, SMALL, bytes_of, draw_rows, write_csv, write_sites


@pytest.fixture
def sites(tmp_path):
    write_sites(tmp_path / "data")
    return tmp_path / "data"


def test_the_folder_holds_everything(finished):
    home = finished / "run"
    assert {path.name for path in home.iterdir()} - {".lock"} == {
        "config.toml",
        "environment.json",
        "history.jsonl",
        "checkpoint",
        "model",
        "clients",
        "metrics.json",
    }
    history = [json.loads(line) for line in (home / "history.jsonl").read_text().splitlines()]
    assert [entry["round"] for entry in history] == [1, 2, 3, 4]
    assert all({"log_likelihood", "validation_accuracy", "seconds"} <= set(e) for e in history)
    metrics = json.loads((home / "metrics.json").read_text(), parse_constant=pytest.fail)
    assert metrics["rounds"] == 4
    assert set(metrics["clients"]) == set(SITES)
    assert sum(one["rows"] for one in metrics["clients"].values()) == 40  # a fifth of 200
    files = json.loads((home / "environment.json").read_text())["files"]
    assert sorted(name.rsplit("/", 1)[1] for name in files) == sorted(f"{s}.csv" for s in SITES)
    assert not list(home.rglob("*.part"))


def test_metrics_and_weights_are_the_model_s_own(finished):
    run = fedgmm.open_run(finished / "run")
    metrics = run.metrics
    for split in ("train", "validation", "test"):
        assert run.evaluate(split=split).summary() == metrics[split]
    for code, name in enumerate(run.model.names):
        record = json.loads(run.folder.client(name).read_text())
        assert record["client"] == name
        assert record["took_part"] is True
        assert record["rows"] == SITES[name]
        np.testing.assert_array_equal(record["weights"], run.model.client_weights[code])


def test_a_run_is_repeated_exactly_from_its_configuration(finished):
    config = config_from(read_config(finished / "run" / "config.toml"))
    assert config.open_choices() == []
    fit_config(config, finished / "again")
    assert bytes_of(finished / "again" / "model") == bytes_of(finished / "run" / "model")
    assert (finished / "again" / "config.toml").read_bytes() == (
        finished / "run" / "config.toml"
    ).read_bytes()


def test_another_seed_is_another_run(sites, finished):
    other = fedgmm.fit([sites], "state", finished / "other", seed=1, **SMALL)
    assert bytes_of(finished / "other" / "model") != bytes_of(finished / "run" / "model")
    assert other.config.table.seed == other.config.options().seed == 1


def test_numbers_are_chosen_and_recorded(sites, tmp_path):
    run = fedgmm.fit(
        sites / "*.csv", "state", tmp_path / "run", components="auto", learners="auto", rounds=5
    )
    selection = run.metrics["selection"]
    assert run.config.open_choices() == []
    assert run.config.options().components == selection["components"] == run.model.n_components
    assert run.config.options().learners == selection["learners"] == run.model.n_learners
    assert len(selection["tried"]) > 1
    interrupted(tmp_path / "resumed", sites, 3, components="auto", learners="auto", rounds=5)
    assert fedgmm.resume(tmp_path / "resumed").metrics["selection"] == selection
    again = fit_config(run.config, tmp_path / "again")
    assert again.metrics["selection"] is None
    assert bytes_of(tmp_path / "again" / "model") == bytes_of(tmp_path / "run" / "model")


def test_a_run_that_ended_while_sizes_were_chosen_is_resumed(sites, tmp_path):
    def end(line):
        if line.startswith("trying 2"):
            raise KeyboardInterrupt

    whole = fedgmm.fit(sites, "state", tmp_path / "whole", rounds=5)
    with pytest.raises(KeyboardInterrupt):
        fedgmm.fit(sites, "state", tmp_path / "ended", rounds=5, notify=end)
    resumed = fedgmm.resume(tmp_path / "ended")
    assert resumed.metrics["selection"] == whole.metrics["selection"]
    assert bytes_of(tmp_path / "ended" / "model") == bytes_of(tmp_path / "whole" / "model")
    assert resumed.config.toml() == whole.config.toml()


def test_trials_are_not_counted_as_reading(sites, tmp_path):
    def slow(line):
        time.sleep(0.02 if line.startswith("trying") else 0.0)

    run = fedgmm.fit(sites, "state", tmp_path / "run", rounds=1, notify=slow)
    trials = len(run.metrics["selection"]["tried"])
    assert run.metrics["seconds"]["choosing"] >= 0.02 * trials
    given = fedgmm.fit(sites, "state", tmp_path / "given", **SMALL)
    assert given.metrics["seconds"]["choosing"] < 0.02


def test_small_files_are_not_given_more_learners_than_they_can_teach(tmp_path):
    """Wine, 107 training rows: three learners that were not asked for cost ten points."""
    wine = load_wine()
    (tmp_path / "wine").mkdir()
    site = np.random.default_rng(7).choice(3, len(wine.target), p=[0.2, 0.1, 0.7])
    for code in range(3):
        rows = [
            {**{f"x{k}": v for k, v in enumerate(x)}, "kind": wine.target_names[y]}
            for x, y in zip(wine.data[site == code], wine.target[site == code], strict=True)
        ]
        write_csv(tmp_path / "wine" / f"site{code}.csv", rows)
    run = fedgmm.fit(tmp_path / "wine", "kind", tmp_path / "run")
    data = run.data()
    pooled = LogisticRegression(max_iter=1000).fit(data.train.inputs, data.train.labels)
    theirs = pooled.score(data.test.inputs, data.test.labels)
    assert run.metrics["test"]["weighted_accuracy"] >= theirs - 0.03
    assert run.config.options().components == run.metrics["selection"]["components"]
    assert not run.config.sizes_are_open


def test_numpy_s_numbers_and_a_single_path_will_do(sites, tmp_path):
    options = {**SMALL, "rounds": np.int64(2), "lr": np.float32(0.1)}
    run = fedgmm.fit(sites, "state", str(tmp_path / "run"), **options)
    assert run.metrics["rounds"] == 2


# ---------------------------------------------------------------------- what is in the way


def test_a_run_is_not_replaced_unless_that_is_asked_for(sites, finished):
    before = bytes_of(finished / "run")
    with pytest.raises(RunError, match="--overwrite"):
        fedgmm.fit([sites], "state", finished / "run", **SMALL)
    assert bytes_of(finished / "run") == before
    fedgmm.fit([sites], "state", finished / "run", overwrite=True, seed=1, **SMALL)
    assert bytes_of(finished / "run" / "model") != {
        name.removeprefix("model/"): data for name, data in before.items() if "model/" in name
    }


def test_files_that_cannot_be_used_do_not_cost_the_run_that_is_there(sites, finished):
    before = bytes_of(finished / "run")
    with pytest.raises(TableError, match="stat"):
        fedgmm.fit([sites], "stat", finished / "run", overwrite=True, **SMALL)
    assert bytes_of(finished / "run") == before


def test_after_an_error_the_folder_can_be_used_again(sites, tmp_path):
    with pytest.raises(TableError):
        fedgmm.fit([sites], "stat", tmp_path / "run", **SMALL)
    with pytest.raises(ValueError, match="components"):
        fedgmm.fit([sites], "state", tmp_path / "run", components=1000)
    run = fedgmm.fit([sites], "state", tmp_path / "run", **SMALL)
    assert run.metrics["rounds"] == 4


def test_an_attempt_that_ended_at_once_is_no_obstacle(sites, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / "config.toml.part").write_text("[da")
    fedgmm.fit([sites], "state", tmp_path / "run", **SMALL)


def test_a_folder_with_other_files_is_not_changed(sites):
    before = bytes_of(sites)
    with pytest.raises(RunError, match="not empty"):
        fedgmm.fit([sites], "state", sites, overwrite=True, **SMALL)
    after = bytes_of(sites)
    after.pop(".lock", None)
    assert after == before


def test_an_unknown_device_is_reported_first(sites, tmp_path):
    with pytest.raises(ValueError, match="quantum"):
        fedgmm.fit([sites], "state", tmp_path / "run", device="quantum")
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------- resume


class Killed(BaseException):
    """Nothing catches it, so nothing more is written."""


def killer(after):
    def kill(entry):
        if entry["round"] == after:
            raise Killed

    return kill


def interrupted(home, sites, after, **options):
    """A run that is stopped after so many rounds."""
    with pytest.raises(Killed):
        fedgmm.fit([sites], "state", home, on_round=[killer(after)], **options)


def test_the_history_has_every_round_once_at_any_time(sites, tmp_path):
    options = {**SMALL, "rounds": 12, "tol": None, "checkpoint_every": 3}
    home = tmp_path / "run"
    interrupted(home, sites, 8, **options)
    with pytest.raises(Killed):
        fedgmm.resume(home, on_round=[killer(7)])
    assert [entry["round"] for entry in read_history(home / "history.jsonl")] == list(range(1, 8))


@pytest.mark.parametrize("after", [1, 5, 7])
def test_a_resumed_run_ends_with_the_same_bits(sites, tmp_path, after):
    options = {**SMALL, "rounds": 12, "tol": None, "checkpoint_every": 3}
    whole = fedgmm.fit([sites], "state", tmp_path / "whole", **options)
    interrupted(tmp_path / "run", sites, after, **options)
    with pytest.raises(RunError, match="fedgmm resume"):
        fedgmm.open_run(tmp_path / "run")
    done = []
    run = fedgmm.resume(tmp_path / "run", on_round=[lambda entry: done.append(entry["round"])])
    assert done[0] == 1 + after // 3 * 3  # at most three rounds are lost
    assert bytes_of(tmp_path / "run" / "model") == bytes_of(tmp_path / "whole" / "model")
    rounds = [json.loads(x)["round"] for x in run.folder.history.read_text().splitlines()]
    assert rounds == list(range(1, 13))
    for name in ("train", "validation", "test", "clients", "notes"):
        assert run.metrics[name] == whole.metrics[name]


def test_a_run_that_never_began_its_first_round(monkeypatch, sites, tmp_path):
    from fedgmm.runs import fitting

    def crash(*_, **__):
        raise MemoryError

    for step in ("read_tables", "agreement", "choose_sizes", "train", "finish_run"):
        home = tmp_path / step
        with monkeypatch.context() as patch:
            patch.setattr(fitting, step, crash)
            with pytest.raises(MemoryError):
                fedgmm.fit([sites], "state", home, **SMALL)
        fedgmm.resume(home)
    models = [
        bytes_of(tmp_path / step / "model")
        for step in ("read_tables", "choose_sizes", "finish_run")
    ]
    assert models[0] == models[1] == models[2]


def test_a_finished_run_is_left_as_it_is(finished):
    before = bytes_of(finished / "run")
    run = fedgmm.resume(finished / "run")
    assert run.metrics["rounds"] == 4
    assert bytes_of(finished / "run") == before


def test_a_finished_run_continues_with_more_rounds(sites, tmp_path):
    options = {**SMALL, "tol": None}
    fedgmm.fit([sites], "state", tmp_path / "long", **{**options, "rounds": 7})
    fedgmm.fit([sites], "state", tmp_path / "run", **options)
    run = fedgmm.resume(tmp_path / "run", rounds=7)
    assert run.metrics["rounds"] == 7
    assert run.config.options().rounds == 7
    assert bytes_of(tmp_path / "run" / "model") == bytes_of(tmp_path / "long" / "model")
    with pytest.raises(ValueError, match="--rounds"):
        fedgmm.resume(tmp_path / "run", rounds=3)


def test_clients_that_joined_must_join_the_new_model(finished):
    run = fedgmm.open_run(finished / "run")
    run.adapt("narvik", finished / "newcomer.csv")
    run.report()
    again = fedgmm.resume(finished / "run", rounds=6)
    assert "narvik" not in again.model.names
    assert any("narvik" in note for note in again.metrics["notes"])
    assert not run.folder.client("narvik").exists()
    assert not run.folder.report.exists()


def test_resume_refuses_other_files(sites, tmp_path):
    interrupted(tmp_path / "run", sites, 2, **SMALL)
    content = (sites / "oslo.csv").read_bytes()
    (sites / "oslo.csv").write_bytes(content.replace(b"ill", b"well", 1))
    with pytest.raises(RunError, match=r"oslo\.csv changed"):
        fedgmm.resume(tmp_path / "run")
    (sites / "oslo.csv").unlink()
    with pytest.raises(RunError, match=r"oslo\.csv is missing"):
        fedgmm.resume(tmp_path / "run")
    (sites / "oslo.csv").write_bytes(content)
    fedgmm.resume(tmp_path / "run")


@pytest.mark.parametrize(
    "damage", ["config.toml", "environment.json", "checkpoint/progress.safetensors"]
)
@pytest.mark.parametrize("content", [b"", b"\xff\x00garbage", b"[]"])
def test_resume_names_what_is_damaged(sites, tmp_path, damage, content):
    interrupted(tmp_path / "run", sites, 2, **SMALL)
    (tmp_path / "run" / damage).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        fedgmm.resume(tmp_path / "run")
    name = damage.rsplit("/", 1)[-1]
    assert name in str(caught.value) or "No files were given" in str(caught.value)


def test_a_damaged_checkpoint_does_not_cost_a_model(sites, tmp_path):
    run = fedgmm.fit([sites], "state", tmp_path / "run", **SMALL)
    run.folder.checkpoint.write_bytes(b"garbage")
    with pytest.raises(ValueError, match="damaged"):
        fedgmm.resume(tmp_path / "run", rounds=SMALL["rounds"] + 1)
    assert fedgmm.open_run(tmp_path / "run").metrics == run.metrics


def test_a_damaged_history_is_replaced(sites, tmp_path):
    interrupted(tmp_path / "run", sites, 3, **SMALL)
    (tmp_path / "run" / "history.jsonl").write_bytes(b"\xff\xff\n{")
    run = fedgmm.resume(tmp_path / "run")
    lines = run.folder.history.read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4]


def test_resume_where_there_is_nothing(tmp_path):
    with pytest.raises(RunError, match="nowhere"):
        fedgmm.resume(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"config\.toml"):
        fedgmm.resume(tmp_path)


# ---------------------------------------------------------------------- odd data


def test_without_validation_or_test_rows(sites, tmp_path):
    text = f"[data]\nfiles = ['{sites}']\nlabel = 'state'\nsplit = [1.0, 0.0, 0.0]\n"
    (tmp_path / "run.toml").write_text(text + "[training]\nrounds = 2\n")
    run = fit_config(config_from(read_config(tmp_path / "run.toml")), tmp_path / "run")
    assert "test" not in run.metrics
    assert set(run.metrics["clients"]) == set(SITES)
    with pytest.raises(RunError, match="held-out"):
        run.detect(sites / "oslo.csv")


@pytest.mark.parametrize("algorithm", ["local", "fedem", "clustered", "fedavg+"])
def test_methods_without_mixture_or_density(sites, tmp_path, algorithm):
    run = fedgmm.fit([sites], "state", tmp_path / "run", algorithm=algorithm, **SMALL)
    record = json.loads(run.folder.client("oslo").read_text())
    assert (record["weights"] is None) == (algorithm != "fedem")
    assert run.predict(sites / "oslo.csv", "oslo").log_density is None
    with pytest.raises(RunError, match=algorithm.replace("+", r"\+")):
        run.detect(sites / "oslo.csv")
    if algorithm == "local":
        with pytest.raises(ValueError, match="--client"):
            run.predict(sites / "oslo.csv")
    else:
        assert len(run.detect(sites / "oslo.csv", score="confidence").result.novel) == 90


def test_clients_from_a_column_with_strange_names(tmp_path):
    names = ["..", "a/b", "Oslo", "oslo", "x" * 300, "smørås", 'quo"te', "-"]
    rng = np.random.default_rng(0)
    rows = []
    for name in names:
        rows += [{**row, "site": name} for row in draw_rows(rng, 20)]
    path = write_csv(tmp_path / "all.csv", rows)
    run = fedgmm.fit(path, "state", tmp_path / "run", client_column="site", **SMALL)
    assert sorted(run.model.names) == sorted(names)
    weights = run.folder.clients / "weights"
    records = [json.loads(file.read_text(encoding="utf-8")) for file in weights.iterdir()]
    assert sorted(record["client"] for record in records) == sorted(names)
    assert {path.name for path in tmp_path.iterdir()} == {"all.csv", "run"}
    # rows find their client's weights by the column
    found = run.predict(path)
    assert len(found.labels) == len(rows)
    shutil.copytree(tmp_path / "run", tmp_path / "moved run [1]")
    again = fedgmm.open_run(tmp_path / "moved run [1]").predict(path)
    np.testing.assert_array_equal(again.probabilities, found.probabilities)
