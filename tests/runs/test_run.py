"""A finished run: its results are those of the model, and nothing else changes."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import fedgmm
from fedgmm.data.tables.errors import TableError
from fedgmm.data.tables.loading import read_rows
from fedgmm.runs.folder import RunError
from small_runs import SMALL, bytes_of, draw_rows, works, write_csv, write_sites


@pytest.fixture
def run(finished):
    return fedgmm.open_run(finished / "run")


# ---------------------------------------------------------------------- opening


@pytest.mark.parametrize("content", [b"", b"\xff\x00garbage", b"[]", b"{}", b'{"columns": 3}'])
def test_damaged_preprocessing_is_named(finished, content):
    path = finished / "run" / "clients" / "preprocessing.json"
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"preprocessing\.json"):
        fedgmm.open_run(finished / "run")


def test_preprocessing_of_another_run_is_refused(finished):
    path = finished / "run" / "clients" / "preprocessing.json"
    record = json.loads(path.read_text())
    record["columns"] = record["columns"][:-1]
    path.write_text(json.dumps(record))
    with pytest.raises(RunError, match="does not fit"):
        fedgmm.open_run(finished / "run")


def test_a_damaged_model_is_named(finished):
    (numbers,) = (finished / "run" / "model").glob("*.safetensors")
    numbers.write_bytes(numbers.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged"):
        fedgmm.open_run(finished / "run")
    (finished / "run" / "model" / "model.json").unlink()
    with pytest.raises(ValueError, match=r"model\.json"):
        fedgmm.open_run(finished / "run")


# ---------------------------------------------------------------------- predict


def test_a_file_named_like_a_client_gives_a_note(run, finished):
    shutil.copy(finished / "new.csv", finished / "oslo.csv")
    (note,) = run.predict(finished / "oslo.csv").notes
    assert "--client oslo" in note
    assert run.predict(finished / "oslo.csv", "oslo").notes == []
    assert run.predict(finished / "new.csv").notes == []
    assert "--client oslo" in run.detect(finished / "oslo.csv").notes[0]


def test_predictions_are_the_model_s_bits(run, finished):
    rows = read_rows(finished / "new.csv", run.preprocessing)
    for client in ("oslo", None):
        found = run.predict(finished / "new.csv", client)
        np.testing.assert_array_equal(
            found.probabilities, run.model.predict_proba(rows.matrix, client)
        )
        np.testing.assert_array_equal(found.labels, run.model.predict(rows.matrix, client))
        np.testing.assert_array_equal(
            found.log_density, run.model.score_samples(rows.matrix, client)
        )
        columns = found.columns()
        assert list(columns) == [
            "row",
            "prediction",
            "probability",
            "p(ill)",
            "p(well)",
            "log_density",
        ]
        np.testing.assert_array_equal(columns["row"], np.arange(1, 41))
        np.testing.assert_array_equal(columns["probability"], found.probabilities.max(1))


def test_a_label_column_changes_nothing(run, finished):
    with_label = run.predict(finished / "newcomer.csv", "oslo")
    without = run.predict(finished / "new.csv", "oslo")
    np.testing.assert_array_equal(with_label.probabilities, without.probabilities)


def test_names_may_be_shortened_where_that_is_clear(run):
    run.model.names = ["site_oslo", "site_bergen", "north-bergen"]
    assert run.client_named("site_oslo") == "site_oslo"
    assert run.client_named("oslo") == "site_oslo"
    with pytest.raises(ValueError, match="bergen"):
        run.client_named("bergen")
    with pytest.raises(ValueError, match="did you mean 'site_oslo'"):
        run.client_named("site_osl")
    with pytest.raises(ValueError, match="fedgmm adapt"):
        run.client_named("")
    run.model.names = [f"c{i}" for i in range(20)]
    with pytest.raises(ValueError, match=r"known are c0, .*, …"):
        run.client_named("zzz")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("age,dose,ward\n", "no rows"),
        ("age,dose\n1,2\n", "'ward'"),
        ("age,dose,ward\nold,2,north\n", "'age'"),
        ("age,dose,ward\n1,2,north\n1,2\n", "has 2 values"),
    ],
)
def test_files_that_do_not_fit(run, tmp_path, text, message):
    path = tmp_path / "odd.csv"
    path.write_text(text)
    for ask in (run.predict, run.detect, lambda file: run.adapt("x", file)):
        with pytest.raises(TableError, match=message) as caught:
            ask(path)
        assert "odd.csv" in str(caught.value)


def test_unknown_columns_are_ignored_with_a_note(run, tmp_path):
    path = tmp_path / "more.csv"
    path.write_text("age,dose,ward,extra\n1,2,north,3\n")
    found = run.predict(path)
    assert len(found.labels) == 1
    assert any("extra" in note for note in found.notes)


def test_all_missing_columns_are_named_with_similar_ones(run, tmp_path):
    path = tmp_path / "odd.csv"
    path.write_text("Age,dosis\n1,2\n")
    with pytest.raises(TableError, match=r"'age'.*'ward'.*did you mean 'Age'"):
        run.predict(path)
    path.write_text("age,dosse,ward\n1,2,north\n")
    (lacking, _) = run.predict(path).notes  # dose has missing values in training
    assert "did you mean 'dosse'" in lacking


def test_a_table_in_memory_is_refused_in_place_of_a_file(run):
    for ask in (run.predict, run.detect, lambda rows: run.evaluate([rows], "oslo")):
        with pytest.raises(TypeError, match="path"):
            ask(np.zeros((3, 3)))


def test_the_text_of_a_run_is_short(run, finished):
    assert str(finished / "run") in repr(run)
    assert len(repr(run)) < 400


def test_a_single_row_will_do(run, tmp_path):
    path = tmp_path / "one.csv"
    path.write_text("age,dose,ward\n50,,north\n")
    assert len(run.predict(path).labels) == 1
    found = run.detect(path)
    assert len(found.result.novel) == 1
    assert 0 < found.batch_p_value <= 1
    adapted = run.adapt("one", path)
    assert adapted.rows == 1
    assert adapted.adaptation.weights.sum() == pytest.approx(1.0)


# ---------------------------------------------------------------------- evaluate


def test_evaluating_a_file_equals_evaluating_by_hand(run, finished):
    path = finished / "oslo.csv"
    path.write_bytes((finished / "newcomer.csv").read_bytes())
    found = run.evaluate([path])
    rows = read_rows(path, run.preprocessing)
    right = run.model.predict(rows.matrix, "oslo") == run.model.classes[rows.labels]
    assert found.clients == ("oslo",)
    assert found.accuracy[0] == right.mean()
    proba = run.model.predict_proba(rows.matrix, "oslo")[np.arange(40), rows.labels]
    assert found.log_loss[0] == pytest.approx(-np.log(proba).mean(), rel=1e-12)


def test_several_files_and_clients_that_joined(run, finished):
    rng = np.random.default_rng(5)
    first = write_csv(finished / "oslo.csv", draw_rows(rng, 30))
    run.adapt("narvik", finished / "newcomer.csv")
    second = write_csv(finished / "narvik.csv", draw_rows(rng, 20))
    found = run.evaluate([first, second])
    assert found.clients == ("oslo", "narvik")
    assert found.rows.tolist() == [30, 20]
    assert found.accuracy[1] == run.evaluate([second]).accuracy[0]


def test_rows_without_a_label_are_left_out_and_unknown_ones_refused(run, finished):
    path = finished / "oslo.csv"
    rows = draw_rows(np.random.default_rng(5), 10)
    rows[3]["state"] = ""
    assert run.evaluate([write_csv(path, rows)]).rows.tolist() == [9]
    rows[4]["state"] = "undead"
    with pytest.raises(TableError, match="undead"):
        run.evaluate([write_csv(path, rows)])
    with pytest.raises(TableError, match="label"):
        run.evaluate([write_csv(path, [{**row, "state": ""} for row in rows])])
    with pytest.raises(TableError, match="state"):
        run.evaluate([write_csv(path, rows, without=("state",))])
    with pytest.raises(ValueError, match="stranger"):
        run.evaluate([write_csv(finished / "stranger.csv", rows[:3])])


def test_a_file_of_any_name_is_evaluated_for_a_client(run, finished):
    rows = draw_rows(np.random.default_rng(5), 10)
    other = run.evaluate([write_csv(finished / "oslo_2025.csv", rows)], "oslo")
    own = run.evaluate([write_csv(finished / "oslo.csv", rows)])
    assert other.clients == ("oslo",)
    assert other.log_loss == own.log_loss
    with pytest.raises(ValueError, match="stranger"):
        run.evaluate([finished / "oslo.csv"], "stranger")


def test_evaluation_notes_what_a_file_lacks_and_that_it_was_trained_on(run, finished):
    rows = draw_rows(np.random.default_rng(5), 10)
    path = write_csv(finished / "oslo.csv", rows, without=("dose",))
    with pytest.warns(UserWarning, match="dose"):
        run.evaluate([path])
    trained = next(iter(json.loads(run.folder.environment.read_text())["files"]))
    shutil.copy(trained, finished / "copy.csv")
    with pytest.warns(UserWarning, match="used in training"):
        run.evaluate([finished / "copy.csv"], "oslo")


def test_an_unknown_split_is_refused(run):
    with pytest.raises(ValueError, match="exam"):
        run.evaluate(split="exam")


def test_the_training_s_files_must_be_the_same(tmp_path):
    files = write_sites(tmp_path / "data", {"a": 30, "b": 30})
    fedgmm.fit(files, "state", tmp_path / "run", **SMALL)
    with files[0].open("a") as file:
        file.write("1,2,north,ill\r\n")
    run = fedgmm.open_run(tmp_path / "run")
    for ask in (run.evaluate, run.report):
        with pytest.raises(RunError, match=r"a\.csv changed"):
            ask()


# ---------------------------------------------------------------------- adapt


def test_a_new_client_changes_no_other_client(run, finished):
    before = run.model.client_weights.copy()
    others = {
        name: data
        for name, data in bytes_of(finished / "run").items()
        if not name.startswith(("model/", ".lock"))
    }
    predicted = run.predict(finished / "new.csv", "oslo").probabilities
    adapted = run.adapt("narvik", finished / "newcomer.csv")
    again = fedgmm.open_run(finished / "run")
    assert again.model.names == ["bergen", "oslo", "tromso", "narvik"]
    np.testing.assert_array_equal(again.model.client_weights[:3], before)
    np.testing.assert_array_equal(again.model.client_weights[3], adapted.adaptation.weights)
    np.testing.assert_array_equal(
        again.predict(finished / "new.csv", "oslo").probabilities, predicted
    )
    after = bytes_of(finished / "run")
    assert {name: after[name] for name in others} == others
    record = json.loads(run.folder.client("narvik").read_text())
    assert record["took_part"] is False
    assert record["labelled"] is True
    np.testing.assert_array_equal(record["weights"], adapted.adaptation.weights)
    assert [point["rows"] for point in adapted.curve] == [0, 5, 10, 20]
    assert "" not in again.model.names  # the trial client of the curve


def test_labels_are_used_where_they_are(run, finished):
    unlabelled = run.adapt("a", finished / "new.csv")
    assert not unlabelled.labelled
    assert unlabelled.curve == []
    rows = draw_rows(np.random.default_rng(1), 40)
    strange = [{**row, "state": "undead"} for row in rows]
    without_use = run.adapt("b", write_csv(finished / "b.csv", strange))
    assert not without_use.labelled
    assert any("undead" in note for note in without_use.notes)
    np.testing.assert_array_equal(without_use.adaptation.weights, unlabelled.adaptation.weights)
    mixed = run.adapt("c", write_csv(finished / "c.csv", rows[:30] + strange[30:]))
    assert mixed.labelled
    assert mixed.rows == 30
    assert any("10 rows without a label" in note for note in mixed.notes)


def test_joining_twice_gives_the_weights_of_the_second_time(run, finished):
    run.adapt("narvik", finished / "new.csv")
    second = run.adapt("narvik", finished / "newcomer.csv")
    again = fedgmm.open_run(finished / "run")
    assert again.model.names.count("narvik") == 1
    np.testing.assert_array_equal(again.model.client_weights[-1], second.adaptation.weights)


def test_a_client_that_took_part_keeps_its_weights_without_replace(run, finished):
    before = bytes_of(finished / "run" / "model")
    with pytest.raises(RunError, match="--replace"):
        run.adapt("oslo", finished / "newcomer.csv")
    assert bytes_of(finished / "run" / "model") == before
    run.adapt("oslo", finished / "newcomer.csv", replace_known=True)
    assert fedgmm.open_run(finished / "run").model.names == ["bergen", "oslo", "tromso"]
    run.adapt("oslo", finished / "new.csv")  # it did not take part any more


@pytest.mark.parametrize("name", ["..", "a/b", "x" * 300, "Oslo", "smørås", " ", ""])
def test_names_of_newcomers(run, finished, name):
    if not name.strip():
        with pytest.raises(ValueError, match="name"):
            run.adapt(name, finished / "new.csv")
        return
    run.adapt(name, finished / "new.csv")
    again = fedgmm.open_run(finished / "run")
    assert again.model.names[-1] == name
    assert len(again.predict(finished / "new.csv", name).labels) == 40
    assert again.folder.client(name).is_file()


def test_after_a_crash_a_client_can_join_again(run, finished, monkeypatch):
    def crash(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fedgmm.model.model.FederatedModel.save", crash)
        with pytest.raises(OSError, match="No space"):
            run.adapt("narvik", finished / "new.csv")
    again = fedgmm.open_run(finished / "run")
    assert "narvik" not in again.model.names
    again.adapt("narvik", finished / "new.csv")
    assert "narvik" in fedgmm.open_run(finished / "run").model.names


def test_only_the_newcomer_s_rows_are_used_where_a_file_names_several(tmp_path):
    rng = np.random.default_rng(0)
    rows = {name: draw_rows(rng, 30, turned=name == "b") for name in "abcd"}
    named = {name: [{**row, "site": name} for row in own] for name, own in rows.items()}
    known = write_csv(tmp_path / "known.csv", named["a"] + named["b"])
    later = write_csv(tmp_path / "later.csv", named["c"] + named["d"])
    alone = write_csv(tmp_path / "alone.csv", named["c"])
    run = fedgmm.fit(known, "state", tmp_path / "run", client_column="site", **SMALL)
    joined = run.adapt("c", later)
    assert joined.rows == 30
    np.testing.assert_array_equal(
        joined.adaptation.weights, run.adapt("other name", alone).adaptation.weights
    )
    with pytest.raises(TableError, match="'z'"):
        run.adapt("z", later)


def test_a_row_without_a_client_is_named(tmp_path):
    rows = [
        {**row, "site": "ab"[i % 2]}
        for i, row in enumerate(draw_rows(np.random.default_rng(0), 60))
    ]
    path = write_csv(tmp_path / "known.csv", rows)
    run = fedgmm.fit(path, "state", tmp_path / "run", client_column="site", **SMALL)
    rows[2]["site"] = ""
    later = write_csv(tmp_path / "later.csv", rows)
    for call in (run.predict, lambda path: run.evaluate([path])):
        with pytest.raises(TableError, match=r"later\.csv: row 3"):
            call(later)
    assert len(run.predict(later, "a").labels) == 60


def test_joins_of_two_open_runs_add_up(finished):
    first, second = fedgmm.open_run(finished / "run"), fedgmm.open_run(finished / "run")
    first.adapt("a", finished / "new.csv")
    second.adapt("b", finished / "new.csv")
    assert fedgmm.open_run(finished / "run").model.names[-2:] == ["a", "b"]


# ---------------------------------------------------------------------- detect


def test_novel_rows_are_found(run, finished):
    rows = draw_rows(np.random.default_rng(3), 100)
    for row in rows[::4]:
        row["age"] = "900"
    found = run.detect(write_csv(finished / "batch.csv", rows, without=("state",)))
    assert found.result.novel[::4].all()
    assert found.result.novel.mean() < 0.45
    matrix = read_rows(finished / "batch.csv", run.preprocessing).matrix
    np.testing.assert_array_equal(found.result.scores, run.model.score_samples(matrix))
    assert list(found.columns()) == ["row", "score", "p_value", "novel"]


def test_a_training_site_is_not_novel_and_a_file_of_novel_rows_is(run, finished):
    """The p-value of a file was its rank among the clients, one quarter at least with three of them."""
    assert run.detect(finished / "new.csv").batch_p_value > 0.05  # rows like those of oslo
    rows = draw_rows(np.random.default_rng(3), 10)
    for row in rows:
        row["age"] = "300"
    strange = run.detect(write_csv(finished / "strange.csv", rows))
    assert strange.batch_p_value < 0.001
    assert run.detect(finished / "strange.csv", "oslo").batch_p_value < 0.001


def test_rows_are_compared_with_those_of_a_client(run, finished):
    found = run.detect(finished / "new.csv", "oslo")
    matrix = read_rows(finished / "new.csv", run.preprocessing).matrix
    expected = run.model.novelty(matrix, client="oslo")
    np.testing.assert_array_equal(found.result.p_values, expected.p_values)
    with pytest.raises(ValueError, match="not known"):
        run.detect(finished / "new.csv", "paris")


def test_a_file_of_several_clients_has_a_table_of_them(tmp_path):
    rng = np.random.default_rng(0)
    sites = ("oslo", "bergen")
    rows = [{**row, "site": site} for site in sites for row in draw_rows(rng, 60, site == "bergen")]
    known = write_csv(tmp_path / "all.csv", rows)
    run = fedgmm.fit(known, "state", tmp_path / "run", client_column="site", **SMALL)
    rows += [{**row, "site": "narvik"} for row in draw_rows(rng, 5)]
    path = write_csv(tmp_path / "more.csv", rows)
    found = run.detect(path)
    assert [(own["client"], own["rows"]) for own in found.clients] == [
        ("oslo", 60),
        ("bergen", 60),
        ("narvik", 5),
    ]
    assert sum(own["novel"] for own in found.clients) == found.result.novel.sum()
    assert any("narvik" in note for note in found.notes)
    shown = works("detect", tmp_path / "run", path, "--out", tmp_path / "s.csv").stderr
    assert "by its own threshold" in shown
    assert "held-out rows of their clients" in shown
    # a run of an earlier version has no scores of single clients; its files are read again
    run.model.calibration = {"x": run.model.calibration["x"], "clients": np.zeros(2)}
    np.testing.assert_array_equal(run.detect(path).result.p_values, found.result.p_values)


def test_a_client_that_joined_has_no_threshold_of_its_own(run, finished):
    run.adapt("kiel", finished / "new.csv")
    with pytest.raises(RunError, match="--client"):
        run.detect(finished / "new.csv", "kiel")


def test_too_few_rows_to_judge_a_file_are_noted(run, finished):
    run.model.calibration = {
        name: scores[:3] if len(scores) > 3 else scores
        for name, scores in run.model.calibration.items()
    }
    rows = draw_rows(np.random.default_rng(3), 1)
    with pytest.warns(UserWarning, match="No row can be flagged"):
        found = run.detect(write_csv(finished / "one.csv", rows))
    assert any("too few rows" in note for note in found.notes)


def test_scores_that_look_at_labels_need_them(run, finished):
    assert len(run.detect(finished / "newcomer.csv", score="joint").result.novel) == 40
    with pytest.raises(TableError, match="state"):
        run.detect(finished / "new.csv", score="y")
    rows = draw_rows(np.random.default_rng(3), 5)
    rows[2]["state"] = "undead"
    with pytest.raises(TableError, match="row 3"):
        run.detect(write_csv(finished / "odd.csv", rows), score="y")


def test_wrong_arguments_are_refused(run, finished):
    with pytest.raises(ValueError, match="score"):
        run.detect(finished / "new.csv", score="z")
    for rate in (0.0, 1.0, 7.0, float("nan")):
        with pytest.raises(ValueError, match="false_alarm_rate"):
            run.detect(finished / "new.csv", false_alarm_rate=rate)


# ---------------------------------------------------------------------- each row is evaluated once


@pytest.fixture
def evaluated(monkeypatch):
    """The number of rows in each evaluation of the Gaussians."""
    from fedgmm.model import predictions

    rows = []
    original = predictions.log_densities

    def counted(difference, gaussians):
        rows.append(difference.shape[-2])
        return original(difference, gaussians)

    monkeypatch.setattr(predictions, "log_densities", counted)
    return rows


@pytest.mark.parametrize(
    "call",
    [
        lambda run, path: run.predict(path, "oslo"),
        lambda run, path: run.detect(path),
        lambda run, path: run.detect(path, score="joint"),
    ],
)
def test_each_row_of_a_file_is_evaluated_once(run, finished, evaluated, call):
    call(run, finished / "newcomer.csv")
    assert sum(evaluated) == 40


def test_files_are_evaluated_in_log_space(run, finished):
    """Steep learners make probabilities underflow; the loss must not depend on that."""
    for value in run.model.prediction.learners.values():
        value.mul_(1e5)
    path = shutil.copy(finished / "newcomer.csv", finished / "oslo.csv")
    rows = read_rows(path, run.preprocessing, label_needed=True)
    labels = run.model.classes[rows.labels]
    expected = np.maximum(run.model.log_conditional(rows.matrix, labels, "oslo"), -700.0)
    assert expected.min() == -700.0
    assert run.evaluate([path]).log_loss[0] == pytest.approx(-expected.mean(), rel=1e-12)
