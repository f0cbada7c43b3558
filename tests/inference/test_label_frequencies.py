"""Clients that have labels more or less often than the federation: corrected without training."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedgmm.core.labels import label_frequencies
from fedgmm.data.dataset import FederatedDataset
from fedgmm.federation.checkpoint import Checkpoint
from fedgmm.inference.saving import load
from fedgmm.training import train

OPTIONS = {"rounds": 4, "components": 2, "learners": 2, "tol": None}


def skewed(rng, clients=4, rows=400):
    """Two classes that overlap; every other client has nine in ten rows of the first."""
    x, y, who = [], [], []
    for client in range(clients):
        labels = (rng.random(rows) < (0.9 if client % 2 else 0.1)).astype(int)
        x.append(rng.normal(size=(rows, 2)) + 0.7 * labels[:, None])
        y.append(labels)
        who.append(np.full(rows, client))
    return FederatedDataset.from_arrays(np.vstack(x), np.concatenate(y), np.concatenate(who))


@pytest.mark.parametrize("algorithm", ["fedgmm", "fedem", "fedavg", "fedprox"])
def test_clients_gain_by_their_own_frequencies(rng, algorithm):
    data = skewed(rng)
    options = {**OPTIONS, "components": 1, "learners": 1}
    plain = train(data, algorithm, **options)
    own = train(data, algorithm, personal_labels=True, **options)
    assert own.evaluate("test").mean_accuracy > plain.evaluate("test").mean_accuracy + 0.1
    assert own.evaluate("test").mean_log_loss < plain.evaluate("test").mean_log_loss - 0.1
    x = data.test.inputs.numpy()
    np.testing.assert_allclose(own.predict_proba(x), plain.predict_proba(x))  # without a client
    assert not np.allclose(own.predict_proba(x, 0), plain.predict_proba(x, 0))
    np.testing.assert_allclose(own.predict_proba(x, 0).sum(1), 1.0)


def test_frequencies_are_expected_rows(rng):
    """Against responsibilities by hand."""
    data = skewed(rng)
    model = train(data, personal_labels=True, **OPTIONS)
    rows = data.train
    x, labels = rows.inputs.numpy(), rows.labels.numpy()
    log_x = model._log_gaussians(model._prepare(x, None)[1]).numpy()
    log_y = model._log_learners(model._prepare(x, None)[0]).numpy()[np.arange(len(x)), :, labels]
    pi = model.client_weights[rows.codes.numpy()]
    q = pi * np.exp(log_x[..., None] + log_y[:, None])
    q = (q / q.sum((1, 2), keepdims=True)).reshape(len(x), -1)
    counts = np.zeros((4, 4, 2))
    for row, label, code in zip(q, labels, rows.codes.numpy(), strict=True):
        counts[code, :, label] += row
    expected = label_frequencies(torch.from_numpy(counts))
    np.testing.assert_allclose(model.prediction.labels.clients, expected.clients)
    np.testing.assert_allclose(model.prediction.labels.federation, expected.federation)


def test_newcomers_have_frequencies_too(rng):
    data = skewed(rng)
    model = train(data, personal_labels=True, **OPTIONS)
    y = np.zeros(60, dtype=int)
    x = rng.normal(size=(60, 2))
    nobody = model.predict_proba(x)[:, 0].mean()
    model.adapt("new", x, y)
    assert model.predict_proba(x, "new")[:, 0].mean() > nobody + 0.1
    model.adapt("new", x, 1 - y)  # known by now
    assert len(model.prediction.labels.clients) == len(model.names) == 5
    assert model.predict_proba(x, "new")[:, 0].mean() < nobody - 0.1


def test_newcomers_without_labels_gain_too(rng):
    data = skewed(rng)
    options = {**OPTIONS, "components": 1, "learners": 1}
    accuracy = {}
    for own in (False, True):
        model = train(data, personal_labels=own, **options)
        fresh = np.random.default_rng(7)
        labels = (fresh.random(800) < 0.95).astype(int)
        x = fresh.normal(size=(800, 2)) + 0.7 * labels[:, None]
        model.adapt("new", x[:400])
        accuracy[own] = (model.predict(x[400:], "new") == labels[400:]).mean()
    assert accuracy[True] > accuracy[False] + 0.1


def test_saved_models_remember(rng, tmp_path):
    data = skewed(rng)
    model = train(data, personal_labels=True, **OPTIONS)
    again = load(model.save(tmp_path / "model"))
    x = data.test.inputs.numpy()
    np.testing.assert_array_equal(model.predict_proba(x, 1), again.predict_proba(x, 1))
    plain = train(data, **OPTIONS)
    assert load(plain.save(tmp_path / "plain")).prediction.labels is None


def test_a_finished_training_gets_them_without_a_round(rng, tmp_path):
    data = skewed(rng)
    checkpoint = Checkpoint(tmp_path / "c")
    train(data, checkpoint=checkpoint, **OPTIONS)
    told = []
    model = train(
        data, checkpoint=checkpoint, on_round=[told.append], personal_labels=True, **OPTIONS
    )
    assert not told
    once = train(data, personal_labels=True, **OPTIONS)
    torch.testing.assert_close(model.prediction.labels.clients, once.prediction.labels.clients)


def test_methods_that_train_at_home_have_no_use_for_them(rng):
    with pytest.raises(ValueError, match=r"personal_labels .*'local' learns at home"):
        train(skewed(rng), "local", personal_labels=True, **OPTIONS)
    local = train(skewed(rng), "local", **OPTIONS)
    with pytest.raises(ValueError, match="does not mix learners"):
        local.learn_labels()
