"""How a training ends: by itself, by Ctrl-C, or by numbers that are not finite."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.synthetic import synthetic
from fedgmm.methods.fedgmm import FedAvgPlus
from fedgmm.training.in_process import DivergenceWarning, train
from fedgmm.training.options import ALGORITHMS
from supervised import FAST, federation, predictions

# ---------------------------------------------------------------------- how a run ends


def noisy(rng):
    """Few rows, many columns, labels at random: the validation rows suffer from too much training."""
    x = rng.normal(size=(120, 12))
    y = (x[:, 0] + 2.0 * rng.normal(size=120) > 0).astype(int)
    return FederatedDataset.from_arrays(x, y, np.arange(120) % 3, split=(0.4, 0.4, 0.2))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_patience_keeps_the_best_round(rng, algorithm):
    data = noisy(rng)
    options = {"lr": 0.5, "batch_size": 8, "rounds": 40, "tol": None, "learners": 2}
    model = train(data, algorithm, patience=5, components=1, **options)
    scores = [entry["validation_log_likelihood"] for entry in model.history]
    best = int(np.argmax(scores))
    assert len(scores) < 40
    assert len(scores) == best + 1 + 5
    assert -model.evaluate("validation").mean_log_loss == pytest.approx(max(scores), abs=1e-6)


def test_callbacks_see_the_validation_score_of_their_round(rng):
    seen = []
    model = train(noisy(rng), patience=3, on_round=[lambda entry: seen.append(dict(entry))], **FAST)
    assert seen == model.history
    assert all("validation_log_likelihood" in entry for entry in seen)


def test_patience_does_not_change_what_is_learned_on_the_way(rng):
    data = noisy(rng)
    options = {"lr": 0.5, "batch_size": 8, "tol": None}
    watched = train(data, "fedavg+", patience=50, rounds=6, **options)
    free = train(data, "fedavg+", rounds=6, **options)
    assert [e["log_likelihood"] for e in watched.history] == [
        e["log_likelihood"] for e in free.history
    ]


def test_a_settled_likelihood_ends_the_run(rng):
    data = federation(rng, sizes=(40, 50))
    model = train(data, components=2, learners=2, rounds=500, tol=1e-4)
    values = [entry["log_likelihood"] for entry in model.history]
    assert len(values) < 500
    changes = np.abs(np.diff(values))
    assert (changes[-3:] < 1e-4).all()
    assert changes[-4] >= 1e-4  # it was not over a round before
    one_learner = train(data, "fedavg", rounds=500, tol=1e-4, solver="newton")
    changes = np.abs(np.diff([entry["log_likelihood"] for entry in one_learner.history]))
    assert changes[-1] < 1e-4 <= changes[-2]


def opposite_labels(seed):
    """Two clients that agree and one with the opposite labels: EM rests on a plateau at first."""
    rng = np.random.default_rng(seed)
    x, names = rng.normal(size=(1200, 4)), np.repeat(["oslo", "bergen", "tromso"], 400)
    y = np.where(names == "tromso", x[:, 0] < 0, x[:, 0] > 0)
    return FederatedDataset.from_arrays(x, y, names, seed=seed)


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (5, {"patience": 3}),
        (11, {"patience": 1}),
        (6, {"patience": 3, "learner": "mlp"}),
        (47, {}),  # the training log-likelihood changes by less than tol on the plateau
        (3, {"start": "split", "warmup": 5}),
    ],
    ids=str,
)
def test_a_plateau_is_not_the_end(seed, options):
    model = train(opposite_labels(seed), components=1, learners=2, seed=seed, rounds=40, **options)
    assert model.evaluate("test").weighted_accuracy > 0.85


def test_patience_saves_rounds_after_the_plateau():
    data = synthetic(8, 60, dimensions=8, seed=0).dataset
    model = train(data, patience=3, tol=None, rounds=60)
    free = train(data, tol=None, rounds=60)
    assert len(model.history) < 40
    lost = free.evaluate().weighted_accuracy - model.evaluate().weighted_accuracy
    assert lost < 0.02


def test_refit_trains_learners_on_validation_rows(rng):
    """One learner with exact steps is logistic regression, on the rows of both splits."""
    data = federation(rng, sizes=(60, 70, 50))
    options = {"components": 2, "learners": 1, "ridge": 2.0, "dtype": "float64", "rounds": 60}
    plain = train(data, **options)
    model = train(data, refit=True, **options)
    both = [data.train, data.validation]
    x = np.concatenate([model.scaling.apply(rows.inputs, torch.float64) for rows in both])
    y = np.concatenate([rows.labels for rows in both])
    # the penalty is on the weights of both classes, so it is half as large for their difference
    exact = LogisticRegression(C=2 / 2.0, tol=1e-10, max_iter=10_000).fit(x, y)
    test = model.scaling.apply(data.test.inputs, torch.float64)
    np.testing.assert_allclose(
        model.predict_proba(data.test.inputs.numpy()), exact.predict_proba(test), atol=1e-4
    )
    # the density and its calibration are those of the training rows
    plain.calibrate()
    x = data.test.inputs.numpy()
    np.testing.assert_array_equal(model.score_samples(x), plain.score_samples(x))
    for name, scores in plain.calibration.items():
        np.testing.assert_array_equal(model.calibration[name], scores)
    assert model.history[-1]["log_likelihood"] == plain.history[-1]["log_likelihood"]


@pytest.mark.parametrize("options", [{"learner": "mlp"}, {"algorithm": "fedavg+"}])
def test_refit_is_for_exact_steps(rng, options):
    data, x = federation(rng), np.zeros((1, 3))
    options = {**FAST, **options}
    refit = train(data, refit=True, **options)
    np.testing.assert_array_equal(
        refit.predict_proba(x, "oslo"), train(data, **options).predict_proba(x, "oslo")
    )


def test_refit_of_numbers(rng):
    x = rng.normal(size=(90, 2))
    y = x @ [2.0, -1.0] + 0.1 * rng.normal(size=90)
    data = FederatedDataset.from_arrays(x, y, np.arange(90) % 2, task="regression")
    options = {"components": 1, "learners": 1, "rounds": 20}
    plain, refit = (train(data, refit=value, **options) for value in (False, True))
    assert not np.array_equal(plain.predict(x, 0), refit.predict(x, 0))
    np.testing.assert_allclose(refit.predict(x, 0), y, atol=0.6)


def interrupt_after(number):
    """Somebody presses Ctrl-C when that round has ended."""

    def stop(entry):
        if entry["round"] == number:
            raise KeyboardInterrupt

    return stop


def test_ctrl_c_keeps_the_last_finished_round(rng):
    data = federation(rng)
    with pytest.warns(RuntimeWarning, match="interrupted"):
        model = train(data, on_round=[interrupt_after(3)], **{**FAST, "rounds": 50})
    assert model.stopped == "interrupted"
    assert len(model.history) == 3
    expected = train(data, tol=None, **{**FAST, "rounds": 3})
    assert np.array_equal(predictions(model, data), predictions(expected, data))


def test_ctrl_c_in_the_warm_up_ends_the_run_there(rng):
    data = federation(rng)
    with pytest.warns(RuntimeWarning, match="interrupted"):
        model = train(data, on_round=[interrupt_after(2)], warmup=5, **{**FAST, "rounds": 50})
    assert model.stopped == "interrupted"
    assert len(model.history) == 2
    assert np.isfinite(predictions(model, data)).all()


def test_history_tells_every_round(rng):
    seen = []
    model = train(federation(rng), on_round=[seen.append], **FAST)
    assert seen == model.history
    for number, entry in enumerate(model.history, start=1):
        assert entry["round"] == number
        assert np.isfinite(entry["log_likelihood"])
        assert entry["seconds"] > 0


# ---------------------------------------------------------------------- divergence


@pytest.mark.parametrize("algorithm", ["fedavg", pytest.param("pfedme", marks=pytest.mark.slow)])
def test_a_limit_to_gradients_trains_where_clients_have_two_images(rng, algorithm):
    """Batch normalisation of two rows has gradients of a million and more."""
    pictures = rng.integers(0, 256, size=(8, 3, 16, 16)).astype(np.uint8)
    data = FederatedDataset.from_arrays(pictures, np.arange(8) % 2, np.arange(8) % 2)
    options = {"learner": "mobilenet", "lr": 0.01, "rounds": 2}
    with pytest.warns(DivergenceWarning, match="clip_norm, such as 10"):
        train(data, algorithm, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limited = train(data, algorithm, **options, clip_norm=1.0)
    assert limited.stopped is None


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_diverging_learner_stops_with_client_round_and_hint(rng, algorithm):
    data = federation(rng, sizes=(40, 50, 30))
    with pytest.warns(DivergenceWarning, match="client.*good state.*smaller learning rate") as seen:
        model = train(data, algorithm, learner="mlp", lr=1e6, **{**FAST, "rounds": 30})
    message = str(seen[0].message)
    assert any(repr(name) in message for name in data.names)
    assert re.search(r"round \d+|the end", message)
    assert "lr=1e+06" in message
    assert "clip_norm" in message
    assert "diverged" in model.stopped
    for value in model.prediction.learners.values():
        assert torch.isfinite(value).all()
    assert np.isfinite(predictions(model, data)).all()
    assert np.isfinite(model.evaluate().mean_log_loss)


def test_the_culprit_is_the_client_whose_rows_explode(rng):
    clients = {name: (rng.normal(size=(30, 2)), np.arange(30) % 2) for name in ("a", "b", "c")}
    clients["b"][0][:] *= 1e30
    data = FederatedDataset.from_clients(clients)
    with pytest.warns(DivergenceWarning, match="round 1: training diverged on client 'b'"):
        model = train(data, "fedavg", standardise=False, rounds=3)
    assert model.history == []
    assert torch.isfinite(model.prediction.learners["0.weight"]).all()


def test_tuning_at_home_that_diverges_leaves_the_global_learner(rng):
    """FedAvg+ is fine for many rounds and then one client's tuning explodes."""
    data = federation(rng, sizes=(40, 50, 30))
    with pytest.warns(DivergenceWarning, match="the end: training diverged on client"):
        model = train(
            data, "fedavg+", rounds=1, finetune_epochs=400, weight_decay=21.0, lr=0.1, batch_size=99
        )
    average = train(data, "fedavg", rounds=1, weight_decay=21.0, lr=0.1, batch_size=99)
    assert "diverged" in model.stopped
    assert np.array_equal(predictions(model, data), predictions(average, data))


def test_tuning_at_home_that_is_interrupted_leaves_the_global_learner(rng, monkeypatch):
    data = federation(rng, sizes=(40, 50, 30))
    average = train(data, "fedavg", rounds=1)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(FedAvgPlus, "finish", interrupt)
    with pytest.warns(RuntimeWarning, match="was interrupted"):
        model = train(data, "fedavg+", rounds=1)
    assert model.stopped == "interrupted"
    assert np.array_equal(predictions(model, data), predictions(average, data))


def test_divergence_in_the_warm_up_ends_the_run_there(rng):
    data = federation(rng)
    with pytest.warns(DivergenceWarning) as seen:
        model = train(data, learner="mlp", lr=1e6, warmup=20, **{**FAST, "rounds": 30})
    assert len(seen) == 1
    assert "diverged" in model.stopped
    assert np.isfinite(predictions(model, data)).all()


def test_a_good_learning_rate_warns_of_nothing(rng):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for algorithm in ALGORITHMS:
            train(federation(rng, sizes=(40, 50)), algorithm, **FAST)


def test_patience_watches_a_density_of_clients_whose_names_are_tuples(rng):
    rows = {("north", site): rng.normal(size=(20, 2)) for site in range(2)}
    data = FederatedDataset.from_clients({name: (x, np.zeros(20, int)) for name, x in rows.items()})
    model = train(data, "gmm", components=2, rounds=4, patience=2)
    assert model.names == [*rows]
    assert data.validation.owners.tolist() == [("north", 0)] * 4 + [("north", 1)] * 4
