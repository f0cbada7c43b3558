"""The layout of a run folder, its lock, and files that are whole or named as damaged."""

from __future__ import annotations

import json

import pytest

from fedgmm.runs.folder import (
    RunError,
    RunFolder,
    as_json,
    check_files_unchanged,
    fingerprints,
    read_history,
    read_json,
    write_json,
)

STRANGE = [
    "",
    ".",
    "..",
    "../up",
    "a/b",
    "a\\b",
    "C:",
    "ünï",
    "x" * 500,
    "ü" * 300,
    "a b",
    "-",
    "%2F",
]


def test_every_client_has_a_file_of_its_own_inside_the_folder(tmp_path):
    folder = RunFolder(tmp_path)
    paths = [folder.client(name) for name in [*STRANGE, "y" * 499 + "x", "y" * 499 + "z", "Oslo"]]
    assert len(set(paths)) == len(paths)
    for path in paths:
        assert path.parent == tmp_path / "clients" / "weights"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")  # the file system takes the name
        assert path.resolve().parent == path.parent.resolve()


def test_plain_names_stay_plain(tmp_path):
    assert RunFolder(tmp_path).client("site_oslo").name == "site_oslo.json"


def test_the_lock_is_for_one_and_is_given_back(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.lock():
        with pytest.raises(RunError, match="Another process"), folder.lock():
            pytest.fail("two at once")
        assert (tmp_path / "run").is_dir()
    with folder.lock():
        pass


def test_a_lock_is_given_back_after_an_error(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(ZeroDivisionError), folder.lock():
        _ = 1 / 0
    with folder.lock():
        pass


def test_a_file_instead_of_a_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RunError, match="is a file"), RunFolder(tmp_path / "run").lock():
        pytest.fail("locked")
    with pytest.raises(RunError, match="Cannot write into"), RunFolder(tmp_path / "run/x").lock():
        pytest.fail("locked")


def test_a_missing_run_is_reported(tmp_path):
    with pytest.raises(RunError, match="nowhere"):
        RunFolder(tmp_path / "nowhere").need_run()
    with pytest.raises(RunError, match=r"config\.toml"):
        RunFolder(tmp_path).need_run()
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(RunError, match="fedgmm resume"):
        RunFolder(tmp_path).need_finished()


def test_json_has_no_nan(tmp_path):
    value = {"a": float("nan"), "b": [1.0, float("inf"), (2, -float("inf"))], "c": {"d": "ü"}}
    text = as_json(value)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": None,
        "b": [1.0, None, [2, None]],
        "c": {"d": "ü"},
    }
    assert "ü" in text
    write_json(tmp_path / "new" / "a.json", value)
    assert read_json(tmp_path / "new" / "a.json")["a"] is None


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000])
def test_damaged_json_is_named(tmp_path, text):
    path = tmp_path / "metrics.json"
    path.write_text(text)
    with pytest.raises(RunError, match=r"metrics\.json"):
        read_json(path)
    path.unlink()
    with pytest.raises(RunError, match=r"metrics\.json"):
        read_json(path)


def test_the_history_ends_where_a_crash_cut_it(tmp_path):
    path = tmp_path / "history.jsonl"
    assert read_history(path) == []
    path.write_bytes(b'{"round": 1.0}\n{"round": 2.0}\n{"rou')
    assert [entry["round"] for entry in read_history(path)] == [1.0, 2.0]
    path.write_bytes(b'{"round": 1.0}\n[]\n{"round": 3.0}\n')
    assert [entry["round"] for entry in read_history(path)] == [1.0]
    path.write_bytes(b"\xff\xfe")
    assert read_history(path) == []


def test_files_that_changed_or_vanished(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.home.mkdir()
    check_files_unchanged(folder)  # nothing was read yet
    file = tmp_path / "a.csv"
    file.write_text("x,y\n1,2\n")
    write_json(folder.environment, {"files": fingerprints([file])})
    check_files_unchanged(folder)
    file.write_text("x,y\n1,3\n")
    with pytest.raises(RunError, match=r"a\.csv changed"):
        check_files_unchanged(folder)
    file.unlink()
    with pytest.raises(RunError, match=r"a\.csv is missing"):
        check_files_unchanged(folder)


def test_what_to_do_depends_on_how_far_a_run_came(tmp_path):
    folder = RunFolder(tmp_path)
    folder.config.write_text("")
    with pytest.raises(RunError, match="fedgmm fit"):
        folder.need_finished()
    folder.checkpoint.parent.mkdir()
    folder.checkpoint.write_bytes(b"")
    with pytest.raises(RunError, match="fedgmm resume"):
        folder.need_finished()
    folder.metrics.write_text("{}")
    folder.need_finished()
