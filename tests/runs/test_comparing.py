"""Methods on the rows of files, of a run, or built in."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import fedgmm
from fedgmm.runs.comparing import data_to_compare, write_comparison
from fedgmm.runs.comparison import compare
from fedgmm.runs.run import open_run
from small_runs import SITES, write_sites


def test_rows_of_a_run_are_the_run_s_own(finished):
    home = finished / "run"
    data = data_to_compare([str(home)], None, None)
    run = open_run(home)
    assert data.home == home
    assert data.dataset.names == run.data().names
    assert data.dataset.test.inputs.equal(run.data().test.inputs)
    assert data.options.components == 2
    assert data.options.seed == run.config.options().seed
    assert data_to_compare([str(home)], None, None, seed=5).options.seed == 5


def test_rows_of_files(tmp_path):
    files = write_sites(tmp_path)
    data = data_to_compare([str(tmp_path / "*.csv")], "state", None, seed=3)
    assert sorted(data.dataset.names) == sorted(SITES)
    assert data.options.seed == 3
    assert not data.options.standardise  # that is done already
    assert data.home is None
    with pytest.raises(ValueError, match="--label"):
        data_to_compare([str(files[0])], None, None)


def test_files_are_compared_with_the_sizes_that_fit_would_choose(tmp_path):
    write_sites(tmp_path / "sites")
    run = fedgmm.fit(tmp_path / "sites", "state", tmp_path / "run")
    options = data_to_compare([str(tmp_path / "sites")], "state", None).options
    assert options == replace(run.config.options(), patience=options.patience)
    assert (options.components, options.learners) != (3, 3)
    given = data_to_compare([str(tmp_path / "sites")], "state", None, sizes={"learners": 2})
    assert (given.options.components, given.options.learners) == (3, 2)


def test_built_in_rows():
    data = data_to_compare(["digits"], None, None)
    assert data.dataset.input_shape == (64,)
    assert data.bayes is None
    assert data_to_compare(["synthetic"], None, None, seed=2).bayes > 0.9


def test_results_are_kept_with_the_run(finished):
    data = data_to_compare([str(finished / "run")], None, None)
    found = compare(
        data.dataset, ["local", "fedgmm"], grid=(0.1,), tuning_rounds=1, options=data.options
    )
    path = write_comparison(found, data.home)
    assert path == finished / "run" / "comparison.json"
    record = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert [entry["algorithm"] for entry in record] == ["local", "fedgmm"]
    for entry, one in zip(record, found.contestants, strict=True):
        assert set(entry["clients"]) == set(SITES)
        assert entry["clients"] == one.accuracies()
        assert entry["mean_accuracy"] == one.evaluation.mean_accuracy
