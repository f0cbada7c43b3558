"""Comparison of methods: the same grid for all, no use of test rows, and the rows compared on."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest

import fedgmm
from fedgmm.data.dataset import FederatedDataset
from fedgmm.runs import comparison
from fedgmm.runs.comparison import PAPER_GRID, compare, data_to_compare, tune
from fedgmm.runs.run import open_run
from fedgmm.training.local import train
from fedgmm.training.options import ALGORITHMS, TrainingOptions
from small_runs import SITES, write_sites
from supervised import federation, two_groups

FAST = {"rounds": 4, "components": 2, "learners": 2}


def easy(rng, rows=240):
    x = rng.normal(size=(rows, 3))
    y = (x[:, 0] + 0.3 * rng.normal(size=rows) > 0).astype(int)
    return FederatedDataset.from_arrays(x, y, np.arange(rows) % 4)


# ---------------------------------------------------------------------- learning rates


def test_the_paper_s_grid():
    np.testing.assert_allclose(PAPER_GRID, [10**-0.5, 0.1, 10**-1.5, 0.01, 10**-2.5, 0.001])


def test_the_best_rate_on_validation_rows_is_chosen(rng):
    data = easy(rng)
    found = tune(data, "fedavg", grid=(1e-4, 1e-2, 0.5), rounds=8)
    assert found.best == 0.5
    assert list(found.scores) == [1e-4, 1e-2, 0.5]
    for lr, score in found.scores.items():
        model = train(data, "fedavg", lr=lr, rounds=8)
        assert score == -model.evaluate("validation").mean_log_loss
    assert found.scores[0.5] == max(found.scores.values())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_test_rows_do_not_touch_the_choice(rng, algorithm):
    data = easy(rng)
    options = {"grid": (1e-3, 0.3), "rounds": 3, "solver": "sgd", "components": 2, "learners": 2}
    first = tune(data, algorithm, **options)
    data.test.inputs.fill_(1e6)
    data.test.labels.copy_(1 - data.test.labels)
    again = tune(data, algorithm, **options)
    assert again.scores == first.scores


def test_a_rate_that_diverges_is_never_chosen(rng):
    data = easy(rng)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = tune(data, "fedavg", grid=(1e7, 0.1), rounds=5, learner="mlp")
    assert found.scores[1e7] == -float("inf")
    assert found.best == 0.1


def test_options_reach_the_trials(rng):
    data = easy(rng)
    options = TrainingOptions(learner="mlp", seed=3)
    found = tune(data, "fedavg", grid=(0.1,), rounds=2, options=options)
    expected = train(data, "fedavg", options=options, lr=0.1, rounds=2)
    assert found.scores[0.1] == -expected.evaluate("validation").mean_log_loss


def test_a_trial_warms_up_for_as_long_in_proportion(rng, monkeypatch):
    seen = []
    plain = comparison.train

    def watched(*args, **changes):
        seen.append((changes["options"].warmup, changes["rounds"]))
        return plain(*args, **changes)

    monkeypatch.setattr(comparison, "train", watched)
    options = TrainingOptions(algorithm="fedem", rounds=40, warmup=20, solver="sgd", learners=2)
    tune(easy(rng), "fedem", grid=(0.1, 0.01), rounds=4, options=options)
    assert seen == [(2, 4)] * 2


def test_numbers_of_numpy_are_numbers(rng):
    found = tune(easy(rng), "fedavg", grid=(np.float64(0.1),), rounds=2, seed=np.int64(3))
    assert found.best == 0.1


# ---------------------------------------------------------------------- comparison


def test_all_methods_are_compared(rng):
    data = federation(rng, sizes=(30, 40, 35))
    told = []
    result = compare(data, grid=(0.03, 0.3), tuning_rounds=2, notify=told.append, **FAST)
    assert [one.algorithm for one in result.contestants] == list(ALGORITHMS)
    for one in result.contestants:
        exact = one.algorithm in ("fedgmm", "fedem")
        assert (one.tuning is None) == exact  # exact steps have no rate
        assert one.summary == one.model.evaluate("test").summary()
        assert len(one.model.history) <= 4
        if one.tuning is not None:
            assert set(one.tuning.scores) == {0.03, 0.3}
            assert one.model.options["lr"] == one.tuning.best
        assert f"{one.algorithm}: training" in told
    assert "fedavg: choosing the learning rate" in told


def test_label_frequencies_are_for_those_who_do_not_know_them(rng):
    data = federation(rng, sizes=(30, 40, 35))
    methods = ("local", "pfedme", "fedavg", "fedgmm")
    result = compare(data, methods, grid=(0.1,), tuning_rounds=1, personal_labels=True, **FAST)
    counts = [one.model.prediction.labels is not None for one in result.contestants]
    assert counts == [False, False, True, True]


def test_gradient_steps_are_tuned_for_every_method_alike(rng):
    data = federation(rng, sizes=(30, 40, 35))
    result = compare(
        data, ("fedgmm", "fedavg"), grid=(0.03, 0.3), tuning_rounds=2, solver="sgd", **FAST
    )
    for one in result.contestants:
        assert set(one.tuning.scores) == {0.03, 0.3}


def test_without_a_grid_the_given_rate_is_kept(rng):
    data = federation(rng, sizes=(30, 40))
    result = compare(data, ["fedavg"], grid=None, options=TrainingOptions(lr=0.07), rounds=2)
    (one,) = result.contestants
    assert one.tuning is None
    assert one.model.options["lr"] == 0.07


def test_the_table_is_plain_json(rng):
    data = federation(rng, sizes=(30, 40))
    result = compare(data, ("fedgmm", "local"), grid=(0.1,), tuning_rounds=1, **FAST)
    rows = json.loads(json.dumps(result.record()))
    assert [row["algorithm"] for row in rows] == ["fedgmm", "local"]
    for row in rows:
        assert 0 <= row["mean_accuracy"] <= 1
        assert row["seconds"] > 0
    assert rows[0]["lr"] is None
    assert rows[1]["tuning"].keys() == {"0.1"}


def test_who_knows_several_rules_comes_first(rng):
    data = two_groups(rng, clients=8, rows=150)
    result = compare(
        data,
        ("fedavg", "fedem", "clustered"),
        grid=(0.1, 0.3),
        tuning_rounds=5,
        rounds=30,
        learners=2,
    )
    accuracy = {one.algorithm: one.summary["mean_accuracy"] for one in result.contestants}
    assert accuracy["fedem"] > accuracy["fedavg"] + 0.2
    assert accuracy["clustered"] > accuracy["fedavg"] + 0.2


def test_ctrl_c_ends_the_whole_series(rng, monkeypatch):
    """Not only the training that was under way."""
    calls = []

    def interrupted(*args, **kwargs):
        calls.append(args)
        model = train(*args, **kwargs)
        model.stopped = "interrupted"
        return model

    monkeypatch.setattr("fedgmm.runs.comparison.train", interrupted)
    data = federation(rng, sizes=(30, 40))
    with pytest.raises(KeyboardInterrupt):
        compare(data, ("fedavg", "local"), grid=(0.1, 0.3), tuning_rounds=1, rounds=1)
    assert len(calls) == 1


# ---------------------------------------------------------------------- rows


def test_rows_of_a_run_are_the_run_s_own(finished):
    home = finished / "run"
    data = data_to_compare([str(home)])
    run = open_run(home)
    assert data.home == home
    assert data.dataset.names == run.data().names
    assert data.dataset.test.inputs.equal(run.data().test.inputs)
    assert data.options.components == 2
    assert data.options.seed == run.config.options().seed
    assert data_to_compare([str(home)], seed=5).options.seed == 5


def test_rows_of_files(tmp_path):
    files = write_sites(tmp_path)
    data = data_to_compare([str(tmp_path / "*.csv")], label="state", seed=3)
    assert sorted(data.dataset.names) == sorted(SITES)
    assert data.options.seed == 3
    assert not data.options.standardise  # that is done already
    assert data.home is None
    with pytest.raises(ValueError, match="--label"):
        data_to_compare([str(files[0])])


def test_files_are_compared_with_the_sizes_that_fit_would_choose(tmp_path):
    write_sites(tmp_path / "sites")
    run = fedgmm.fit(tmp_path / "sites", "state", tmp_path / "run")
    options = data_to_compare([str(tmp_path / "sites")], label="state").options
    assert options == replace(run.config.options(), patience=options.patience)
    assert (options.components, options.learners) != (3, 3)
    given = data_to_compare([str(tmp_path / "sites")], label="state", sizes={"learners": 2})
    assert (given.options.components, given.options.learners) == (3, 2)


def test_built_in_rows():
    data = data_to_compare(["digits"])
    assert data.dataset.input_shape == (64,)
    assert data.bayes is None
    assert data_to_compare(["synthetic"], seed=2).bayes > 0.9


def test_results_are_kept_with_the_run(finished):
    data = data_to_compare([str(finished / "run")])
    found = compare(
        data.dataset, ["local", "fedgmm"], grid=(0.1,), tuning_rounds=1, options=data.options
    )
    path = found.write(data.home)
    assert path == finished / "run" / "comparison.json"
    record = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert [entry["algorithm"] for entry in record] == ["local", "fedgmm"]
    for entry, one in zip(record, found.contestants, strict=True):
        assert set(entry["clients"]) == set(SITES)
        assert entry["clients"] == one.accuracies()
        assert entry["mean_accuracy"] == one.evaluation.mean_accuracy
