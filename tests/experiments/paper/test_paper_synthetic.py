"""The paper's synthetic experiments and its illustration, scaled down."""

import json

import numpy as np
import pytest

from fedgmm.experiments.paper.synthetic import (
    Size,
    illustrate,
    reproduce_gaussian,
    reproduce_illustration,
    reproduce_non_gaussian,
)

SMALL = Size(clients=9, rows=300, seeds=(0,), rounds=12, tuning_rounds=1, grid=(0.1,),
             methods=("fedavg", "fedem", "fedgmm"))  # fmt: skip


def test_gaussian_table(tmp_path):
    outcome = reproduce_gaussian(tmp_path, SMALL)
    accuracy = {name: values[0] for name, values in outcome.accuracy.items()}
    assert outcome.bayes[0] >= accuracy["fedgmm"] > accuracy["fedem"] > accuracy["fedavg"]
    assert outcome.bayes[0] - accuracy["fedgmm"] < 0.06
    record = json.loads((tmp_path / "synthetic.json").read_text())
    assert record["environment"]["fedgmm"]
    assert "72.02" in (tmp_path / "synthetic.md").read_text()


def test_non_gaussian_tables(tmp_path):
    outcomes = reproduce_non_gaussian(tmp_path, SMALL)
    assert [o.setting for o in outcomes] == ["beta", "beta/partial", "laplace", "laplace/partial"]
    for outcome in outcomes:
        best = max(values[0] for values in outcome.accuracy.values())
        assert outcome.accuracy["fedgmm"][0] == best, outcome.setting
    assert "not given" in (tmp_path / "nongaussian.md").read_text()


def test_illustration(tmp_path):
    result = reproduce_illustration(tmp_path)
    assert result.accuracy["bayes"] - result.accuracy["fedgmm"] < 0.02
    assert result.accuracy["fedem"] < 0.8
    assert (tmp_path / "illustration.png").stat().st_size > 5_000
    assert np.abs(result.curves["fedgmm"] - result.truth).mean() < 0.1


def test_illustration_is_deterministic():
    first, second = illustrate(2, 50, seed=5), illustrate(2, 50, seed=5)
    assert np.array_equal(first.curves["fedgmm"], second.curves["fedgmm"])


@pytest.mark.parametrize(
    "change",
    [
        {"methods": ("fedavg", "fedavg")},
        {"methods": ("magic",)},
        {"methods": ()},
        {"seeds": (3, 3)},
        {"seeds": ()},
    ],
    ids=str,
)
def test_bad_sizes_are_refused_by_name(change):
    (name,) = change
    with pytest.raises(ValueError, match=name):
        Size(**change)
