"""Configurations: defaults, open choices, wrong values, and what a run writes to config.toml."""

from __future__ import annotations

import tomllib
from dataclasses import fields

import pytest

from fedgmm.data.tables.preprocessing import TableOptions
from fedgmm.federation.settings import FederationSettings
from fedgmm.runs.config import FEDERATION, RunConfig, config_from, read_config
from fedgmm.training.options import TrainingOptions


def sections(data=None, training=None, run=None):
    return {
        "data": {"files": ["a.csv"], "label": "y", **(data or {})},
        "training": training or {},
        "run": run or {},
    }


def test_defaults():
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


def test_none_is_a_text_where_an_option_may_be_none():
    config = config_from(sections(training={"tol": "none", "patience": "none"}))
    assert config.options().tol is None
    assert config.options().patience is None
    with pytest.raises(ValueError, match="schedule"):
        config_from(sections(training={"schedule": "none"}))


def test_open_choices():
    assert config_from(sections()).open_choices() == ["covariance_type", "ridge", "refit"]
    wanted = {"components": "auto", "learners": "auto", "covariance_type": "diag", "ridge": 2.0}
    open_choices = config_from(sections(training=wanted)).open_choices()
    assert open_choices == ["components", "learners", "refit"]


def test_sizes_that_were_not_given_stay_out_until_the_data_are_read():
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
    expected = ["components", "covariance_type", "ridge", "refit"]
    assert again.open_choices() == config.open_choices() == expected
    assert again.complete().toml() == complete.toml()
    # principal components are decided by the data, if they are not given
    written = set(tomllib.loads(complete.toml())["training"])
    assert written == set(TrainingOptions.__dataclass_fields__) - {"pca", "standardise"}


@pytest.mark.parametrize(
    ("section", "option", "value", "error"),
    [
        ("data", "files", 5, TypeError),
        ("data", "files", [5], TypeError),
        ("data", "files", [], ValueError),
        ("data", "label", 7, TypeError),
        ("data", "label", "", ValueError),
        ("data", "client_column", 7, TypeError),
        ("data", "categorical", 5, TypeError),
        ("data", "ignore", [5], TypeError),
        ("data", "split", 3, ValueError),
        ("data", "split", [0.5, 0.5], ValueError),
        ("data", "split", ["a", "b", "c"], ValueError),
        ("data", "split", [1.5, -0.5, 0.0], ValueError),
        ("data", "split", [0.6, 0.2, 0.3], ValueError),
        ("data", "split", [float("nan"), 0.5, 0.5], ValueError),
        ("data", "split", [0.0, 0.5, 0.5], ValueError),
        ("data", "max_categories", "x", TypeError),
        ("data", "indicator_from", "x", TypeError),
        ("data", "seed", -1, ValueError),
        ("training", "rounds", "many", TypeError),
        ("training", "rounds", 2.5, TypeError),
        ("training", "components", "several", TypeError),
        ("training", "covariance_type", "round", ValueError),
        ("training", "lr", "fast", TypeError),
        ("training", "algorithm", {"x": 1}, ValueError),
        ("training", "learner", "cnn", ValueError),
        ("training", "device", 5, TypeError),
        ("training", "dtype", ["f"], ValueError),
        ("training", "magic", 1, ValueError),
        ("training", "standardise", True, ValueError),
        ("run", "checkpoint_every", 0, ValueError),
        ("run", "checkpoint_every", "often", TypeError),
        ("run", "checkpoint_every", True, TypeError),
    ],
    ids=str,
)
def test_a_wrong_value_is_reported_with_its_option(section, option, value, error):
    with pytest.raises(error, match=option):
        config_from(sections(**{section: {option: value}}))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"= =", "TOML"),
        (b"\xff\xfe\x00", "TOML"),
        (b"[cooking]\n", "cooking"),
        (b"rounds = 3\n", "rounds"),
        (b"[training]\nmagic = 1\n", "magic"),
        (b"[training]\nround = 1\n", "did you mean 'rounds'"),
        (b"[data]\nfile = 'a'\n", "did you mean 'files'"),
        (b"[run]\nout = 'a'\n", "checkpoint_every"),
        (b"[federation]\nmin_client = 2\n", "did you mean 'min_clients'"),
    ],
)
def test_a_wrong_file_is_reported_with_its_path(tmp_path, content, word):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=word) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_the_options_of_a_federation_are_those_of_its_settings():
    assert {one.name for one in fields(FederationSettings)} - {"config", "privacy"} == FEDERATION
