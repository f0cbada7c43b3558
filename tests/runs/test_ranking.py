"""Ranking of methods: intervals, paired tests, ties, and what is stored."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedgmm.data.dataset import FederatedDataset
from fedgmm.runs.comparison import compare, data_to_compare
from fedgmm.runs.ranking import Ranking, compare_splits, rank
from fedgmm.support.paired import over_splits
from small_runs import SITES
from supervised import two_groups

QUICK = {"grid": (0.3,), "tuning_rounds": 1, "rounds": 30, "components": 1, "learners": 2}


def entry(algorithm, accuracy, learner="linear", **others):
    kinds = [entry(algorithm, value, kind) for kind, value in others.items()]
    record = {"algorithm": algorithm, "learner": learner, "mean_accuracy": accuracy, "lr": 0.1}
    return {**record, "mean_log_loss": 0.5, "clients": {"a": accuracy}, "others": kinds}


def several(*splits):
    """Return a ranking of several splits with given accuracies of two methods."""
    found = [[entry("fedavg", one, "mlp", linear=0.5), entry("fedgmm", two)] for one, two in splits]
    return Ranking(tuple(range(len(splits))), found, {}, "mean_accuracy", 1 / 3, {})


@pytest.fixture(scope="module")
def one_split():
    data = two_groups(np.random.default_rng(0), clients=6, rows=120)
    comparison = compare(data, ("fedavg", "fedprox", "fedem"), learner_kinds=["linear"], **QUICK)
    return comparison, rank([comparison])


# ---------------------------------------------------------------------- one split


def test_one_split_is_paired_over_its_test_rows(one_split):
    """The interval is that of a plain bootstrap which draws the rows of both methods together."""
    comparison, ranking = one_split
    average, _, mixture = (one.evaluation for one in comparison.contestants)
    difference = ranking.value("fedem", "fedavg")
    assert difference.mean == pytest.approx(mixture.mean_accuracy - average.mean_accuracy)
    one, other = (e.predicted.decided == e.predicted.labels for e in (mixture, average))
    gains = one.astype(float) - other
    rng = np.random.default_rng(1)
    codes = mixture.predicted.codes
    own = [gains[codes == c] for c in range(len(mixture.clients))]
    plain = [np.mean([rng.choice(v, len(v)).mean() for v in own]) for _ in range(2000)]
    np.testing.assert_allclose(
        [difference.low, difference.high], np.quantile(plain, [0.025, 0.975]), atol=0.02
    )
    assert ranking.value("fedem").mean == pytest.approx(mixture.mean_accuracy)
    assert "not repeated" in ranking.unit


def test_a_rare_class_is_ranked_by_average_precision(rng):
    x = rng.normal(size=(900, 2))
    y = x[:, 0] + 0.5 * rng.normal(size=900) > 1.6
    data = FederatedDataset.from_arrays(x, y, np.arange(900) % 3)
    comparison = compare(data, ("fedavg", "local"), learner_kinds=["linear"], pooled=True, **QUICK)
    ranking = rank([comparison])
    assert ranking.metric == "average_precision"
    average = comparison.contestants[0].evaluation
    assert ranking.value("fedavg").mean == average.pooled["average_precision"]
    low, high = average.pooled_intervals["average_precision"]
    assert (ranking.value("fedavg").low, ranking.value("fedavg").high) == pytest.approx((low, high))
    assert "average precision" in ranking.headline()
    assert ranking.record()["metric"] == "average_precision"
    assert 0 < ranking.pooled["boosting"]["average_precision"] <= 1


def test_a_rare_class_is_ranked_on_many_rows_too(rng, monkeypatch):
    y = (rng.random(600) < 0.1).astype(int)
    data = FederatedDataset.from_arrays(
        rng.normal(size=(600, 2)) + y[:, None], y, np.arange(600) % 3
    )
    comparison = compare(data, ("fedavg", "local"), learner_kinds=["linear"], **QUICK)
    few = rank([comparison])
    monkeypatch.setattr("fedgmm.model.bootstrap._MOST_RANKED", 0)
    assert rank([comparison]).record() == few.record()
    monkeypatch.setattr("fedgmm.model.bootstrap._MOST_PLANNED", 50)
    many = rank([comparison])
    assert many.metric == "average_precision"
    assert many.value("fedavg").high == pytest.approx(few.value("fedavg").high, abs=0.05)


def test_equal_methods_tie_and_a_worse_one_does_not(one_split):
    """FedProx with a weak penalty predicts like FedAvg; both fail where clients disagree."""
    _, ranking = one_split
    average, proximal, mixture = ranking.standings
    assert ranking.best is mixture
    assert ranking.tied == [mixture]
    assert not average.lead.within_noise
    assert average.lead.high < 0
    assert ranking.headline().startswith("FedEM (linear) is best with")
    assert ranking.value("fedavg", "fedprox").within_noise
    assert proximal.title == "FedProx (linear)"


# ---------------------------------------------------------------------- several splits


def test_several_splits_are_paired_over_splits():
    ranking = several((0.90, 0.91), (0.80, 0.83), (0.85, 0.86))
    difference = ranking.value("fedgmm", "fedavg")
    expected = over_splits(np.array([0.01, 0.03, 0.01]), 1 / 3)
    assert difference.mean == pytest.approx(expected.mean)
    assert difference.p_value == pytest.approx(expected.p_value)
    assert "3 splits" in ranking.unit


def test_a_difference_within_noise_is_a_tie_everywhere():
    tie = several((0.90, 0.91), (0.84, 0.83), (0.85, 0.86))
    assert tie.headline().startswith("A tie: FedGMM (linear) 86.7 % and FedAvg (MLP) 86.3 %")
    record = tie.record()
    assert (record["best"], record["tied"]) == ("fedgmm", ["fedgmm", "fedavg"])
    average, mixture = record["methods"]
    assert average["tied_with_best"]
    assert average["against"]["fedgmm"]["tie"]
    assert mixture["against"]["fedavg"]["difference"] == pytest.approx(0.01 / 3)
    assert average["by_learner"] == pytest.approx({"linear": 0.5, "mlp": 0.863333}, abs=1e-5)
    clear = several((0.70, 0.91), (0.64, 0.83), (0.65, 0.86))
    assert "20.3 points above FedAvg (MLP)" in clear.headline()
    assert not clear.record()["methods"][0]["tied_with_best"]


def test_learners_of_all_splits_are_counted():
    ranking = several((0.9, 0.9), (0.8, 0.9))
    ranking.splits[1][0]["learner"] = "linear"
    assert ranking.standings[0].learners == {"mlp": 1, "linear": 1}
    assert ranking.standings[0].title == "FedAvg (MLP or linear)"


def test_two_splits_are_too_few(finished):
    """The t interval of two values spans 12.7 standard errors on either side."""
    with pytest.raises(ValueError, match="too few"):
        compare_splits(data_to_compare([str(finished / "run")]), ["local"], 2)


# ---------------------------------------------------------------------- files


def test_results_are_kept_with_the_run(finished):
    data = data_to_compare([str(finished / "run")])
    told = []
    ranking = compare_splits(
        data,
        ["local", "fedgmm"],
        3,
        learner_kinds=["linear"],
        grid=(0.1,),
        tuning_rounds=1,
        pooled=True,
        notify=told.append,
    )
    seed = data.options.seed
    assert ranking.seeds == (seed, seed + 1, seed + 2)
    assert any(line.startswith("split 2 of 3, Local, linear") for line in told)
    path = ranking.write(data.home)
    assert path == finished / "run" / "comparison.json"
    record = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert [one["algorithm"] for one in record["methods"]] == ["local", "fedgmm"]
    assert len(record["splits"]) == 3
    for one, first in zip(record["methods"], record["splits"][0], strict=True):
        assert set(one["clients"]) == set(SITES)
        assert one["clients"] == first["clients"]
    local = [split[0]["mean_accuracy"] for split in record["splits"]]
    assert record["methods"][0]["mean_accuracy"] == pytest.approx(np.mean(local))
    assert set(record["pooled"]) == {"logistic", "boosting"}
