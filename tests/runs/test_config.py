"""What a TOML file may say, and what a run records of it."""

from __future__ import annotations

import tomllib

import pytest

from fedgmm.data.tables.preprocessing import TableOptions
from fedgmm.runs.config import RunConfig, config_from, read_config
from fedgmm.training.options import TrainingOptions


def sections(data=None, training=None, run=None):
    return {
        "data": {"files": ["a.csv"], "label": "y", **(data or {})},
        "training": training or {},
        "run": run or {},
    }


def test_what_is_not_said_has_its_default():
    config = config_from(sections())
    assert config.files == ("a.csv",)
    assert config.table == TableOptions("y")
    assert config.checkpoint_every == 5
    # tables are standardised when they are read
    assert config.options() == TrainingOptions(standardise=False)


def test_a_single_file_or_column_needs_no_list():
    config = config_from(sections({"files": "site_*.csv", "ignore": "id", "categorical": "ward"}))
    assert config.files == ("site_*.csv",)
    assert config.table.ignore == ("id",)
    assert config.table.categorical == ("ward",)


def test_one_seed_serves_both_unless_two_are_given():
    assert config_from(sections({"seed": 7})).options().seed == 7
    assert config_from(sections({"seed": 7}, {"seed": 8})).options().seed == 8


def test_none_is_a_word_where_an_option_may_be_nothing():
    config = config_from(sections(training={"tol": "none", "patience": "none"}))
    assert config.options().tol is None
    assert config.options().patience is None
    with pytest.raises(ValueError, match="schedule"):
        config_from(sections(training={"schedule": "none"}))


def test_what_is_left_open():
    assert config_from(sections()).open_choices() == ["covariance_type"]
    wanted = {"components": "auto", "learners": "auto", "covariance_type": "diag"}
    assert config_from(sections(training=wanted)).open_choices() == ["components", "learners"]


def test_sizes_of_which_nothing_was_said_stay_unsaid_until_the_data_are_there():
    config = config_from(sections()).complete()
    assert config.sizes_are_open
    assert not {"components", "learners"} & set(tomllib.loads(config.toml())["training"])
    for one in ("components", "learners"):
        given = config_from(sections(training={one: 2})).complete()
        assert not given.sizes_are_open
        assert given.training["components"] + given.training["learners"] == 5


def test_the_record_is_complete_and_reads_back_the_same(tmp_path):
    training = {"rounds": 7, "components": "auto", "patience": None, "lr": 0.03}
    config = RunConfig(("a b.csv", 'quo"te.csv'), TableOptions("y", "site", seed=3), training, 2)
    complete = config.complete()
    path = tmp_path / "config.toml"
    path.write_text(complete.toml(), encoding="utf-8")
    again = config_from(read_config(path))
    assert again.options() == complete.options() == config.options()
    assert again.table == config.table
    assert again.files == config.files
    assert again.checkpoint_every == 2
    assert again.open_choices() == config.open_choices() == ["components", "covariance_type"]
    assert again.complete().toml() == complete.toml()
    written = set(tomllib.loads(complete.toml())["training"])
    assert written == set(TrainingOptions.__dataclass_fields__) - {"standardise"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"files": 5}}, "files must be a list of names"),
        ({"data": {"files": [5]}}, "files must be a list of names"),
        ({"data": {"files": []}}, "No files were given"),
        ({"data": {"label": 7}}, "label must be the name of a column"),
        ({"data": {"label": ""}}, "No label column"),
        ({"data": {"client_column": 7}}, "client_column must be the name"),
        ({"data": {"categorical": 5}}, "categorical must be a list"),
        ({"data": {"ignore": [5]}}, "ignore must be a list"),
        ({"data": {"split": 3}}, "split must be three shares"),
        ({"data": {"split": [0.5, 0.5]}}, "split must be three shares"),
        ({"data": {"split": ["a", "b", "c"]}}, "split must be three shares"),
        ({"data": {"split": [1.5, -0.5, 0.0]}}, "split must be three shares"),
        ({"data": {"split": [0.6, 0.2, 0.3]}}, "sum to 1"),
        ({"data": {"split": [float("nan"), 0.5, 0.5]}}, "split must be three shares"),
        ({"data": {"split": [0.0, 0.5, 0.5]}}, "split must be three shares"),
        ({"data": {"max_categories": "x"}}, "max_categories must be an integer"),
        ({"data": {"indicator_from": "x"}}, "indicator_from must be a number"),
        ({"data": {"seed": -1}}, "seed must be at least 0"),
        ({"training": {"rounds": "many"}}, "rounds must be an integer, got 'many'"),
        ({"training": {"rounds": 2.5}}, "rounds must be an integer"),
        ({"training": {"components": "several"}}, "components must be an integer"),
        ({"training": {"covariance_type": "round"}}, "covariance_type must be one of"),
        ({"training": {"lr": "fast"}}, "lr must be a number"),
        ({"training": {"algorithm": {"x": 1}}}, "algorithm must be one of"),
        ({"training": {"learner": "cnn"}}, "learner must be one of"),
        ({"training": {"device": 5}}, "device must be"),
        ({"training": {"dtype": ["f"]}}, "dtype must be one of"),
        ({"training": {"magic": 1}}, "no training option 'magic'"),
        ({"training": {"standardise": True}}, "no training option 'standardise'"),
        ({"run": {"checkpoint_every": 0}}, "checkpoint_every must be at least 1"),
        ({"run": {"checkpoint_every": "often"}}, "checkpoint_every must be an integer"),
        ({"run": {"checkpoint_every": True}}, "checkpoint_every must be an integer"),
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_named(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        config_from(sections(**change))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("= =", "is not a TOML file"),
        ("[cooking]\n", r"no section \[cooking\]"),
        ("rounds = 3\n", r"no section \[rounds\]"),
        ("[training]\nmagic = 1\n", "has no option 'magic'"),
        ("[data]\nfile = 'a'\n", "has no option 'file'"),
        ("[run]\nout = 'a'\n", "has no option 'out'"),
    ],
)
def test_a_file_that_says_something_else(tmp_path, text, message):
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a TOML file"):
        read_config(path)
