"""Comparison of methods: the same grid for all, no use of test rows, and the rows compared on."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import fedgmm
from fedgmm.data.dataset import FederatedDataset
from fedgmm.runs import comparison
from fedgmm.runs.comparison import (
    PAPER_GRID,
    POOLED,
    compare,
    data_to_compare,
    neighbours,
    pooled_references,
    tune,
)
from fedgmm.runs.run import open_run
from fedgmm.training.in_process import train
from fedgmm.training.options import ALGORITHMS, TrainingOptions
from small_runs import SITES, write_sites
from supervised import federation, two_groups

FAST = {"rounds": 4, "components": 2, "learners": 2}
FEDAVG = TrainingOptions(algorithm="fedavg")


def easy(rng, rows=240):
    x = rng.normal(size=(rows, 3))
    y = (x[:, 0] + 0.3 * rng.normal(size=rows) > 0).astype(int)
    return FederatedDataset.from_arrays(x, y, np.arange(rows) % 4)


# ---------------------------------------------------------------------- learning rates


def test_the_paper_s_grid():
    np.testing.assert_allclose(PAPER_GRID, [10**-0.5, 0.1, 10**-1.5, 0.01, 10**-2.5, 0.001])


def test_the_best_rate_on_validation_rows_is_chosen(rng):
    data = easy(rng)
    found = tune(data, FEDAVG, grid=(1e-4, 1e-2, 0.5), rounds=8, extend=False)
    assert found.best == 0.5
    assert list(found.scores) == [1e-4, 1e-2, 0.5]
    for lr, score in found.scores.items():
        model = train(data, "fedavg", lr=lr, rounds=8)
        assert score == -model.evaluate("validation").mean_log_loss
    assert found.scores[0.5] == max(found.scores.values())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_test_rows_do_not_touch_the_choice(rng, algorithm):
    data = easy(rng)
    options = TrainingOptions(algorithm=algorithm, solver="sgd", components=2, learners=2)
    first = tune(data, options, grid=(0.03, 0.3), rounds=2)
    data.test.inputs.fill_(1e6)
    data.test.labels.copy_(1 - data.test.labels)
    again = tune(data, options, grid=(0.03, 0.3), rounds=2)
    assert again.scores == first.scores


def test_a_rate_that_diverges_is_never_chosen(rng):
    data = easy(rng)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = tune(data, replace(FEDAVG, learner="mlp"), grid=(1e7, 0.1), rounds=5)
    assert found.scores[1e7] == -float("inf")
    assert found.best == 0.1


def test_options_reach_the_trials(rng):
    data = easy(rng)
    options = replace(FEDAVG, learner="mlp", seed=3)
    found = tune(data, options, grid=(0.1,), rounds=2)
    expected = train(data, "fedavg", options=options, lr=0.1, rounds=2)
    assert found.scores[0.1] == -expected.evaluate("validation").mean_log_loss


def test_a_trial_warms_up_for_as_long_in_proportion(rng, monkeypatch):
    seen = []
    plain = comparison.train

    def watched(*args, **changes):
        seen.append((changes["options"].warmup, changes["options"].rounds))
        return plain(*args, **changes)

    monkeypatch.setattr(comparison, "train", watched)
    options = TrainingOptions(algorithm="fedem", rounds=40, warmup=20, solver="sgd", learners=2)
    tune(easy(rng), options, grid=(0.1, 0.01), rounds=4, extend=False)
    assert seen == [(2, 4)] * 2


def test_numbers_of_numpy_are_numbers(rng):
    found = tune(easy(rng), FEDAVG, grid=(np.float64(0.1),), rounds=2)
    assert found.best == 0.1


def test_a_grid_grows_while_its_best_rate_is_at_an_edge(rng):
    """With the rates below, the best one used to be the largest, 0.01."""
    data = easy(rng)
    found = tune(data, FEDAVG, grid=(0.01, 0.001), rounds=4)
    rates = sorted(found.scores)
    np.testing.assert_allclose(np.diff(np.log10(rates)), 1.0)
    assert max(rates) == 10.0 or rates[0] < found.best < rates[-1]
    assert found.best > 0.01
    assert found.scores[found.best] == max(found.scores.values())


def test_the_next_rate_beyond_an_edge():
    assert neighbours(0.1, [1.0, 0.1, 0.01]) == [0.01, 1.0]
    assert neighbours(1.0, [1.0, 0.1]) == [0.1, 10.0]
    assert neighbours(10.0, [10.0, 1.0]) == [1.0]  # no further
    assert neighbours(1e-5, [1e-5, 1e-4]) == [1e-4]
    assert neighbours(1.0, [1.0, 0.1], extend=False) == [0.1]
    assert neighbours(0.3, [0.3]) == []  # the only rate was given


# ---------------------------------------------------------------------- comparison


def test_all_methods_are_compared_with_all_learners(rng):
    data = federation(rng, sizes=(30, 40, 35))
    told = []
    result = compare(data, grid=(0.3,), tuning_rounds=1, notify=told.append, **FAST)
    assert [one.algorithm for one in result.contestants] == list(ALGORITHMS)
    for one in result.contestants:
        assert {one.learner, *(other.learner for other in one.others)} == {"linear", "mlp"}
        assert all(one.score >= other.score for other in one.others)
        for tried in (one, *one.others):
            exact = one.algorithm in ("fedgmm", "fedem") and tried.learner == "linear"
            assert (tried.tuning is None) == exact  # exact steps have no rate
            assert tried.summary == tried.model.evaluate("test").summary()
            assert tried.model.options["learner"] == tried.learner
            assert tried.score == -tried.model.evaluate("validation").mean_log_loss
    assert "FedAvg, MLP: training with rate 0.3" in told
    assert "FedAvg, MLP: trying rate 0.3 for 1 round" in told


def test_test_rows_choose_neither_rate_nor_learner(rng):
    def choices():
        data = easy(np.random.default_rng(0))
        yield data
        result = compare(data, ["fedavg"], grid=(0.1, 1.0), rounds=3, tuning_rounds=1)
        (one,) = result.contestants
        yield one.learner, one.tuning, one.score

    first = tuple(choices())[1]
    again = choices()
    data = next(again)
    data.test.inputs.fill_(1e6)
    data.test.labels.copy_(1 - data.test.labels)
    assert next(again) == first


def test_full_runs_decide_among_neighbouring_rates(rng):
    """A short run prefers a larger rate than a full run does."""
    data = easy(rng)
    result = compare(
        data, ["local"], learner_kinds=["mlp"], grid=(1.0, 0.3), rounds=30, tuning_rounds=2
    )
    (one,) = result.contestants
    tuning = one.tuning
    assert one.model.options["lr"] == tuning.best
    assert tuning.in_full[tuning.best] == max(tuning.in_full.values())
    for lr in neighbours(tuning.best, {*tuning.scores, *tuning.in_full}):
        assert lr in tuning.in_full
    again = train(data, "local", learner="mlp", lr=tuning.best, rounds=30)
    assert one.summary == again.evaluate("test").summary()


def test_the_protocol_of_the_paper_trains_once_with_a_rate_of_the_grid(rng):
    result = compare(
        easy(rng),
        ["fedavg"],
        learner_kinds=["linear"],
        grid=(0.001, 0.002),
        extend=False,
        tuning_rounds=1,
        rounds=2,
    )
    (one,) = result.contestants
    assert (one.learner, one.others) == ("linear", ())
    assert set(one.tuning.scores) == {0.001, 0.002}
    assert set(one.tuning.in_full) == {one.tuning.best}


def test_pooled_references_are_scikit_learn_s(rng):
    data = easy(rng)
    result = compare(data, ["fedgmm"], learner_kinds=["linear"], pooled=True, **FAST)
    assert set(result.pooled) == set(POOLED)
    x, y = data.train.inputs.numpy(), data.train.labels.numpy()
    model = HistGradientBoostingClassifier(random_state=0).fit(x, y)
    right = model.predict(data.test.inputs.numpy()) == data.test.labels.numpy()
    assert result.pooled["boosting"].weighted_accuracy == pytest.approx(right.mean())


def test_pooled_references_of_numbers_are_scikit_learn_s(rng):
    x = rng.normal(size=(90, 2))
    y = x @ [1.0, 2.0] + rng.normal(size=90)
    data = FederatedDataset.from_arrays(x, y, np.arange(90) % 3, task="regression")
    found = pooled_references(data)
    model = make_pipeline(StandardScaler(), Ridge()).fit(data.train.inputs, data.train.labels)
    predicted = model.predict(data.test.inputs)
    assert found["ridge"].pooled["r2"] == pytest.approx(r2_score(data.test.labels, predicted))
    assert found["boosting"].pooled["rmse"] > 0


def test_label_frequencies_are_for_those_who_do_not_know_them(rng):
    data = federation(rng, sizes=(30, 40, 35))
    methods = ("local", "pfedme", "fedavg", "fedgmm")
    result = compare(
        data,
        methods,
        learner_kinds=["linear"],
        grid=(0.1,),
        tuning_rounds=1,
        personal_labels=True,
        **FAST,
    )
    counts = [one.model.prediction.labels is not None for one in result.contestants]
    assert counts == [False, False, True, True]


def test_gradient_steps_are_tuned_for_every_method_alike(rng):
    data = federation(rng, sizes=(30, 40, 35))
    grid = {"learner_kinds": ["linear"], "grid": (0.03, 0.3), "tuning_rounds": 2}
    result = compare(data, ("fedgmm", "fedavg"), solver="sgd", **grid, **FAST)
    for one in result.contestants:
        assert set(one.tuning.scores) >= {0.03, 0.3}


def test_without_a_grid_the_given_rate_is_kept(rng):
    data = federation(rng, sizes=(30, 40))
    options = TrainingOptions(lr=0.07)
    result = compare(data, ["fedavg"], learner_kinds=["mlp"], grid=None, options=options, rounds=2)
    (one,) = result.contestants
    assert one.tuning is None
    assert one.model.options["lr"] == 0.07


def test_the_record_is_plain_json(rng):
    data = federation(rng, sizes=(30, 40))
    kinds = ["linear"]
    result = compare(
        data, ("fedgmm", "local"), learner_kinds=kinds, grid=(0.1,), tuning_rounds=1, **FAST
    )
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
        learner_kinds=["linear"],
        grid=(0.1, 0.3),
        extend=False,
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
    other = data_to_compare([str(home)], seed=5)
    assert other.options.seed == 5
    assert len(other.dataset.test) == len(data.dataset.test)
    assert not other.dataset.test.inputs.equal(data.dataset.test.inputs)  # another split
    again = data.again(5)
    assert again.dataset.test.inputs.equal(other.dataset.test.inputs)
    assert again.options == other.options


def test_rows_of_files(tmp_path):
    files = write_sites(tmp_path)
    data = data_to_compare([str(tmp_path / "*.csv")], label="state", seed=3, sizes={"learners": 2})
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
    assert options == replace(run.config.options(), patience=options.patience, refit=False)
    assert (options.components, options.learners) != (3, 3)
    given = data_to_compare([str(tmp_path / "sites")], label="state", sizes={"learners": 2})
    assert (given.options.components, given.options.learners) == (3, 2)


def test_built_in_rows():
    data = data_to_compare(["digits"])
    assert data.dataset.input_shape == (64,)
    assert data.bayes is None
    assert data_to_compare(["synthetic"], seed=2).bayes > 0.9
