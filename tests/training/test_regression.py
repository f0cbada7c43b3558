"""Learners of numbers: training, prediction, intervals, evaluation, saving, new clients, novelty."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge
from torch import nn

from fedgmm import FederatedDataset, load, train
from fedgmm.training.checkpoint import Checkpoint
from fedgmm.training.options import ALGORITHMS

NOISE = 0.3
SLOPES = np.array([[2.0, -1.0, 0.0], [-2.0, 1.0, 1.0]])


def regimes(rows=80, clients=4, seed=0, purity=1.0):
    """Clients whose ``y`` follows one of two planted lines, 10 ± ``x · slopes``, almost always."""
    rng = np.random.default_rng(seed)
    owners = np.repeat([f"c{i}" for i in range(clients)], rows)
    mostly = np.repeat(np.arange(clients) % 2, rows)
    regime = np.where(rng.random(len(owners)) < purity, mostly, 1 - mostly)
    x = rng.normal(size=(len(owners), 3)) * [1.0, 2.0, 0.5] + [0.0, 3.0, -1.0]
    y = 10.0 + (x * SLOPES[regime]).sum(1) + NOISE * rng.normal(size=len(owners))
    return x, y, owners


@pytest.fixture(scope="module")
def dataset():
    return FederatedDataset.from_arrays(*regimes(), task="regression")


@pytest.fixture(scope="module")
def model(dataset):
    return train(dataset, components=2, learners=2, rounds=40, dtype="float64")


# ---------------------------------------------------------------------- the equations


@pytest.mark.parametrize("ridge", [0.0, 5.0])
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("fedgmm", {"components": 1, "learners": 1}), ("fedavg", {"solver": "newton"})],
)
def test_one_learner_is_least_squares(algorithm, options, ridge):
    x, y, _ = regimes(rows=60, clients=1)
    data = FederatedDataset.from_arrays(x, y, task="regression", split=(1.0, 0.0, 0.0))
    found = train(data, algorithm, **options, ridge=ridge, rounds=2, dtype="float64")
    scaled = (x - x.mean(0)) / x.std(0)
    oracle = Ridge(ridge) if ridge else LinearRegression()
    expected = oracle.fit(scaled, y).predict(scaled)
    np.testing.assert_allclose(found.predict(x), expected, atol=1e-8)
    # the noise has the variance of the residuals, and the interval follows from it
    deviation = np.sqrt(np.mean((y - expected) ** 2))
    ends = expected[:, None] + 1.6448536269514722 * deviation * np.array([-1.0, 1.0])
    np.testing.assert_allclose(found.predict_interval(x), ends, atol=1e-8)
    loss = np.mean(0.5 * ((y - expected) / deviation) ** 2) + np.log(deviation * np.sqrt(2 * np.pi))
    assert found.evaluate("train").mean_log_loss == pytest.approx(loss)


def test_clients_together_are_least_squares_of_all_rows(dataset):
    found = train(dataset, "fedavg", solver="newton", ridge=0.0, rounds=2, dtype="float64")
    x, y = dataset.train.inputs.numpy(), dataset.train.labels.numpy()
    expected = LinearRegression().fit(x, y).predict(x)
    np.testing.assert_allclose(found.predict(x), expected, atol=1e-8)


def test_two_regimes_are_found(dataset, model):
    found = model.evaluate()
    assert found.pooled["rmse"] < 1.25 * NOISE
    assert found.pooled["r2"] > 0.97
    pooled = train(dataset, "fedavg", solver="newton", rounds=3).evaluate()
    assert pooled.pooled["rmse"] > 5 * NOISE
    learners = model.client_weights.sum(1)  # (C, M2)
    assert (learners.max(-1) > 0.95).all()
    assert len(set(learners.argmax(-1)[::2])) == len(set(learners.argmax(-1)[1::2])) == 1


def test_intervals_hold_fresh_rows(model):
    x, y, owners = regimes(rows=1500, seed=7)
    for level in (0.5, 0.9):
        low, high = model.predict_interval(x, clients=owners, level=level).T
        assert np.mean((low <= y) & (y <= high)) == pytest.approx(level, abs=0.03)


@pytest.mark.parametrize("options", [{}, {"refit": True}], ids=["held out", "refit"])
def test_intervals_of_few_rows_are_wide_enough(options):
    """Ten columns and 72 training rows: by ``σ²`` of the training rows 90 % intervals hold 71 %."""
    rng, beta, held = np.random.default_rng(0), np.linspace(-1.0, 1.0, 10), []

    def draw(rows):
        x, owners = rng.normal(size=(rows, 10)), np.arange(rows) % 3
        return x, x @ beta * np.where(owners == 0, 1, -1) + rng.normal(size=rows), owners

    for seed in range(8):
        data = FederatedDataset.from_arrays(*draw(120), task="regression", seed=seed)
        found = train(data, "fedem", learners=2, rounds=15, seed=seed, **options)
        x, y, owners = draw(500)
        low, high = found.predict_interval(x, clients=owners).T
        held.append(np.mean((low <= y) & (y <= high)))
    assert np.mean(held) == pytest.approx(0.92, abs=0.04)


@pytest.mark.parametrize("algorithm", ["fedgmm", "fedem"])
def test_log_likelihood_never_falls(algorithm):
    data = FederatedDataset.from_arrays(*regimes(purity=0.7, seed=3), task="regression")
    found = train(
        data, algorithm, learners=3, components=2, ridge=0.0, reg_covar=0.0, tol=None, rounds=30,
        dtype="float64",
    )  # fmt: skip
    history = [entry["log_likelihood"] for entry in found.history]
    assert np.diff(history).min() > -1e-9
    assert history[-1] > history[0] + 0.1


def test_densities_are_those_of_the_mixture(model):
    x, _, owners = regimes(rows=2, seed=1)
    grid = np.linspace(-40.0, 60.0, 20001)
    for row, owner in zip(x, owners, strict=True):
        rows = np.repeat(row[None], len(grid), 0)
        density = np.exp(model.log_conditional(rows, grid, owner))
        assert np.trapezoid(density, grid) == pytest.approx(1.0, abs=1e-6)
        assert np.trapezoid(density * grid, grid) == pytest.approx(
            float(model.predict(row[None], owner)[0]), abs=1e-5
        )
        low, high = model.predict_interval(row[None], owner, 0.8)[0]
        inside = (grid >= low) & (grid <= high)
        assert np.trapezoid(density[inside], grid[inside]) == pytest.approx(0.8, abs=0.02)
    joint = model.log_joint(x, np.zeros(len(x)), clients=owners)
    apart = model.log_conditional(x, np.zeros(len(x)), clients=owners)
    np.testing.assert_allclose(joint, apart + model.score_samples(x, clients=owners))


def test_units_of_y_do_not_matter(dataset, model):
    x, y, owners = regimes()
    other = FederatedDataset.from_arrays(x, 1e6 * y - 3e7, owners, task="regression")
    found = train(other, components=2, learners=2, rounds=40, dtype="float64")
    expected = 1e6 * model.predict(x, clients=owners) - 3e7
    np.testing.assert_allclose(found.predict(x, clients=owners), expected, rtol=1e-6)
    assert found.evaluate().pooled["r2"] == pytest.approx(model.evaluate().pooled["r2"], abs=1e-6)


# ---------------------------------------------------------------------- methods and learners


def small_network():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_method_predicts_numbers(dataset, algorithm):
    options = {"batch_size": 16, "finetune_epochs": 10, "penalty": 1.0}
    found = train(dataset, algorithm, components=1, learners=2, rounds=8, **options)
    constant = dataset.test.labels.std()
    alone = algorithm in ("fedavg", "fedprox")
    assert found.evaluate().pooled["rmse"] < (1.2 if alone else 0.8) * constant
    assert np.isfinite(found.predict_interval(*regimes(rows=3)[:1], "c0")).all()
    if not alone:  # the variance belongs to the learners
        assert 0.75 < found.evaluate("train").pooled["coverage"] <= 1.0


@pytest.mark.parametrize("learner", ["mlp", small_network])
def test_other_learners(dataset, learner, tmp_path):
    found = train(dataset, learner=learner, components=1, learners=2, rounds=40, lr=0.1, seed=1)
    assert found.evaluate().pooled["r2"] > 0.8
    assert 0.8 < found.evaluate("train").pooled["coverage"] < 0.97
    again = load(found.save(tmp_path), learner=learner if callable(learner) else None)
    x = dataset.test.inputs.numpy()
    np.testing.assert_array_equal(again.predict(x, "c1"), found.predict(x, "c1"))


def test_a_module_needs_one_output(dataset):
    with pytest.raises(ValueError, match="one number per row, shape"):
        train(dataset, learner=lambda: nn.Linear(3, 2), rounds=1)
    with pytest.raises(ValueError, match="normalisation"):
        train(dataset, learner=lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), rounds=1)
    with pytest.raises(ValueError, match="personal_labels"):
        train(dataset, personal_labels=True, rounds=1)


def test_a_run_resumes_with_the_same_bits(dataset, tmp_path):
    options = {"components": 1, "learners": 2, "learner": "mlp", "dtype": "float32"}
    whole = train(dataset, rounds=4, **options)
    checkpoint = Checkpoint(tmp_path / "progress", every=1)
    train(dataset, rounds=4, until=2, checkpoint=checkpoint, **options)
    found = train(dataset, rounds=4, checkpoint=checkpoint, **options)
    for name, value in whole.prediction.learners.items():
        assert torch.equal(found.prediction.learners[name], value)


def test_no_accuracy_is_watched(dataset):
    found = train(dataset, components=1, learners=1, rounds=1, watch_accuracy=True)
    assert "validation_accuracy" not in found.history[-1]


# ---------------------------------------------------------------------- the model


@pytest.mark.parametrize("score", ["y", "joint"])
def test_false_alarms_of_numbers(model, score):
    found = model.false_alarm_rates(score=score, false_alarm_rate=0.1)
    assert np.mean([one.pooled for one in found.values()]) == pytest.approx(0.1, abs=0.1)


def test_saved_and_loaded(model, tmp_path):
    model.calibrate()
    model.save(tmp_path)
    again = load(tmp_path)
    x, y, owners = regimes(rows=3)
    assert again.task == "regression"
    np.testing.assert_array_equal(
        again.predict(x, clients=owners), model.predict(x, clients=owners)
    )
    np.testing.assert_array_equal(
        again.predict_interval(x, clients=owners), model.predict_interval(x, clients=owners)
    )
    np.testing.assert_array_equal(
        again.predict_interval(x, "c0", 0.5), model.predict_interval(x, "c0", 0.5)
    )
    assert (
        again.novelty(x, y, score="y").novel.tolist()
        == model.novelty(x, y, score="y").novel.tolist()
    )
    assert "numbers" in repr(again)


def test_a_new_client_finds_its_regime(model):
    x, y, _ = regimes(rows=30, clients=1, seed=5)
    copy = replace(model)
    before = np.sqrt(np.mean((copy.predict(x) - y) ** 2))
    copy.adapt("new", x[:15], y[:15])
    after = np.sqrt(np.mean((copy.predict(x[15:], "new") - y[15:]) ** 2))
    assert after < 1.5 * NOISE < before


def test_novel_numbers_are_flagged(model):
    x, y, _ = regimes(rows=100, seed=6)
    strange = model.novelty(x, y + 50.0, score="y")
    assert strange.novel.all()
    assert model.novelty(x, y, score="joint").novel.mean() < 0.2
    with pytest.raises(ValueError, match="confidence"):
        model.novelty(x, score="confidence")


def test_what_is_only_for_classes(model, dataset):
    x, _, owners = regimes(rows=2)
    for call in (model.predict_proba, model.predict_log_proba):
        with pytest.raises(ValueError, match="numbers"):
            call(x)
    with pytest.raises(ValueError, match="numbers"):
        model.learn_labels()
    with pytest.raises(ValueError, match="threshold"):
        model.predict(x, threshold=0.5)
    with pytest.raises(ValueError, match="level"):
        model.predict_interval(x, level=90)
    with pytest.raises(ValueError, match="numbers"):
        model.log_conditional(x, ["a"] * len(x))
    with pytest.raises(ValueError, match="finite"):
        model.log_conditional(x, [np.nan] * len(x))
    classes = FederatedDataset.from_arrays(x, np.arange(len(x)) % 2, owners)
    with pytest.raises(ValueError, match="classification"):
        model.evaluate("train", classes)
    classifier = train(classes, components=1, learners=1, rounds=1)
    with pytest.raises(ValueError, match="numbers"):
        classifier.predict_interval(x)


def test_evaluation(model, dataset):
    found = model.evaluate("train")
    x, y = dataset.train.inputs.numpy(), dataset.train.labels.numpy()
    owners = np.array([dataset.names[code] for code in dataset.train.codes.tolist()])
    predicted = model.predict(x, clients=owners)
    assert found.pooled["rmse"] == pytest.approx(np.sqrt(np.mean((y - predicted) ** 2)))
    assert found.pooled["r2"] == pytest.approx(1 - np.mean((y - predicted) ** 2) / y.var())
    for index, name in enumerate(found.clients):
        own = owners == name
        error = np.mean((y - predicted)[own] ** 2)
        assert found.rmse[index] == pytest.approx(np.sqrt(error))
        assert found.r2[index] == pytest.approx(1 - error / y[own].var())
        loss = -model.log_conditional(x[own], y[own], name).mean()
        assert found.log_loss[index] == pytest.approx(loss)
    for name in ("rmse", "r2"):
        low, high = found.pooled_intervals[name]
        assert low < found.pooled[name] < high
        assert (found.intervals[name][:, 0] < found.intervals[name][:, 1]).all()
    record = found.record()
    assert record["pooled"]["intervals"]["rmse"] == list(found.pooled_intervals["rmse"])
    assert f"{found.pooled_intervals['rmse'][0]:.4g}" in record["headline"]
    assert set(record["clients"]) == set(dataset.names)
    assert record["pooled"]["coverage"] == found.pooled["coverage"]
    assert {"rmse", "r2", "coverage"} <= set(found.summary())
    assert "R²" in repr(found)


def test_importance_of_columns(model):
    for kind in ("coefficients", "permutation"):
        found = model.importance(kind=kind)
        assert found.kind == kind
        assert found.order[0] == 1  # the column of the largest part of y
    assert model.importance().kind == "coefficients"


def test_real_data_are_not_worse_than_pooled_ridge():
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    sites = np.digitize(x[:, 0], np.quantile(x[:, 0], [0.25, 0.5, 0.75]))  # dealt by age
    gaps = []
    for seed in range(5):
        data = FederatedDataset.from_arrays(x, y, sites, task="regression", seed=seed)
        found = train(data, components=2, learners=1, rounds=30).evaluate()
        oracle = Ridge(1e-2).fit(data.train.inputs.numpy(), data.train.labels.numpy())
        gaps.append(
            found.pooled["r2"] - oracle.score(data.test.inputs.numpy(), data.test.labels.numpy())
        )
    assert np.mean(gaps) > -0.03
