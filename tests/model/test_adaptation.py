"""New clients: weights that are shrunk towards the federation's help, and a few rows do no harm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fedgmm.core.predictive import STRENGTHS, new_client_weights, prior_strength, shares_of_models
from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.examples import draw_patients
from fedgmm.data.synthetic import synthetic
from fedgmm.model.saving import load
from fedgmm.training.in_process import train
from supervised import federation, tiny

# ---------------------------------------------------------------------- equations


@pytest.mark.parametrize("strength", [0.5, 4.0, 100.0])
def test_weights_are_the_mode_under_a_dirichlet_prior(rng, strength):
    """Against a general optimiser of ``Σ_i log Σ_m π_c(m) P_m(s_i) + a Σ_m π(m) log π_c(m)``."""
    log_likelihood, start = 2 * rng.normal(size=(30, 3)), rng.dirichlet(np.full(3, 5.0))

    def loss(logits):
        log_pi = logits - np.logaddexp.reduce(logits)
        rows = np.logaddexp.reduce(log_likelihood + log_pi, axis=1).sum()
        return -rows - strength * start @ log_pi

    best = minimize(loss, np.log(start), tol=1e-12).x
    expected = np.exp(best - np.logaddexp.reduce(best))
    weights, _ = new_client_weights(
        torch.from_numpy(log_likelihood),
        torch.from_numpy(start),
        2000,
        tol=0.0,
        strength=strength,
    )
    np.testing.assert_allclose(weights, expected, atol=1e-5)


def test_several_fits_at_once_are_the_single_fits(rng):
    log_likelihood = torch.from_numpy(2 * rng.normal(size=(12, 4)))
    start = torch.from_numpy(rng.dirichlet(np.ones(4)))
    rows = torch.from_numpy(rng.integers(2, size=(3, 12)).astype(float))
    strengths = torch.tensor([[1.0], [20.0]]).double()
    options = {"max_rounds": 30, "tol": -1.0}
    together, _ = new_client_weights(
        log_likelihood, start, strength=strengths, rows=rows.expand(2, 3, 12), **options
    )
    assert together.shape == (2, 3, 4)
    for k, strength in enumerate(strengths.flatten().tolist()):
        for f in range(3):
            some = log_likelihood[rows[f] > 0]
            alone, _ = new_client_weights(some, start, strength=strength, **options)
            np.testing.assert_allclose(together[k, f], alone, atol=1e-12)


@pytest.mark.parametrize("strength", [2.0, 16.0, 128.0])
def test_the_strength_of_drawn_clients_is_found(strength):
    rng = np.random.default_rng(int(strength))
    mean = np.array([0.5, 0.3, 0.15, 0.05])
    pi = rng.dirichlet(strength * mean, size=300)
    counts = np.stack([rng.multinomial(80, own) for own in pi]).astype(float)
    found = prior_strength(torch.from_numpy(counts), torch.from_numpy(mean))
    assert abs(np.log2(found / strength)) <= 1
    assert found in STRENGTHS


def test_models_share_by_the_labels_that_they_predict():
    log_p = torch.tensor([[0.5, 0.25], [0.5, 0.25]]).double().log()
    np.testing.assert_allclose(shares_of_models(log_p), [0.8, 0.2])


# ---------------------------------------------------------------------- help and harm


def clinic(rng, weight, rows, flipped=False):
    """A site of a clinical table: 13 columns, a few of them binary, and labels that are hard to see."""
    x = rng.normal(size=(rows, 13)) + 0.4 * rng.normal(size=13)
    x[:, 8:] = x[:, 8:] > 0.3
    margin = (x - x.mean(0)) @ (-weight if flipped else weight) + 0.3 * rng.normal()
    return x, (rng.random(rows) < 1 / (1 + np.exp(-margin))).astype(int)


def gains(model, sites, counts=(5, 20, 100), tests=200):
    """Accuracy of adapted weights less that of the federation's, ``(sites, counts)``."""
    out = []
    for x, y in sites:
        rows, truth = x[-tests:], y[-tests:]
        before = (model.predict(rows) == truth).mean()
        own = []
        for count in counts:
            model.adapt("new", x[:count], y[:count])
            own.append((model.predict(rows, "new") == truth).mean() - before)
        out.append(own)
    return np.array(out)


def clinical_gains(seed, new_sites, flip=False):
    rng = np.random.default_rng(seed)
    weight = 0.6 * rng.normal(size=13)
    sizes = (303, 294, 123, 200)
    known = {f"s{c}": clinic(rng, weight, n, flip and c % 2 > 0) for c, n in enumerate(sizes)}
    options = {"components": 3, "learners": 3, "rounds": 30, "covariance_type": "diag"}
    model = train(FederatedDataset.from_clients(known, seed=seed), **options)
    return gains(model, [clinic(rng, weight, 400, flip and c % 2 > 0) for c in range(new_sites)])


def test_few_rows_do_no_harm_where_sites_hardly_differ():
    found = np.concatenate([clinical_gains(seed, 8) for seed in range(2)])
    assert (found.mean(0) > -0.01).all()


def test_five_patients_do_no_harm_to_a_new_hospital():
    """Hospitals with other shares of patients; maximum likelihood cost thirteen points here."""
    rng = np.random.default_rng(0)

    def hospital(rows):
        patients = draw_patients(rng, rng.dirichlet(np.full(3, 0.6)), rows)
        names = ("age", "systolic", "heart_rate", "glucose", "bmi")
        return np.array([[float(r[n]) for n in names] for r in patients.rows]), patients.ill

    data = FederatedDataset.from_clients({c: hospital(260) for c in range(6)})
    found = gains(train(data, rounds=10), [hospital(300) for _ in range(8)])
    assert (found.mean(0) > -0.01).all()


def test_rows_help_where_sites_differ():
    found = np.concatenate([clinical_gains(seed, 6, flip=True) for seed in range(2)]).mean(0)
    assert found[1] > 0.05
    assert found[2] > 0.1


@pytest.mark.slow
def test_no_harm_and_full_help_in_ten_splits():
    alike = np.concatenate([clinical_gains(seed, 20) for seed in range(10)]).mean(0)
    assert (alike > -0.01).all()
    differ = np.concatenate([clinical_gains(seed, 20, flip=True) for seed in range(10)]).mean(0)
    assert differ[2] > 0.15


def test_opposite_labels_are_learned_from_five_rows():
    """The README's federation: one client uses the opposite labels, and so does the new one."""
    rng = np.random.default_rng(0)
    x, clients = rng.normal(size=(1200, 4)), np.repeat(["oslo", "bergen", "tromso"], 400)
    y = np.where(clients == "tromso", x[:, 0] < 0, x[:, 0] > 0)
    data = FederatedDataset.from_arrays(x, y, clients)
    model = train(data, components=1, learners=2, rounds=30)
    new = rng.normal(size=(500, 4))
    (found,) = gains(model, [(new, new[:, 0] < 0)], counts=(5, 20))
    assert found[0] > 0.85
    assert found[1] > 0.9


def test_few_rows_without_labels_do_no_harm():
    truth = synthetic(16, 200, dimensions=8, seed=1)
    model = train(truth.dataset.select(list(range(8))), rounds=20)
    changes = []
    for c in range(8, 16):
        own = truth.dataset.select([c])
        rows, labels = own.train.inputs.numpy(), own.train.labels.numpy()
        model.adapt("new", own.test.inputs.numpy()[:5])
        changes.append((model.predict(rows, "new") == labels).mean())
        changes[-1] -= (model.predict(rows) == labels).mean()
    assert np.mean(changes) > -0.01


def test_five_labels_of_one_class_do_not_make_it_certain():
    """Label frequencies of a new client are believed as far as left-out labels confirm them."""
    data = tiny(6, 200, columns=2, separation=2.0)
    model = train(data, rounds=8, personal_labels=True)
    model.prediction = replace(
        model.prediction, labels=replace(model.prediction.labels, prior_rows=0.3)
    )
    x = data.train.inputs.numpy()[:100]
    model.adapt("alternating", x, np.arange(100) % 2)
    federation_s = model.prediction.labels.federation
    np.testing.assert_allclose(
        model.prediction.labels.clients[-1], federation_s, atol=0.2
    )  # noise says nothing, so the federation's frequencies stay
    zeros = x[model.predict(x) == 1][:30]
    model.adapt("all zero", zeros, np.zeros(len(zeros), dtype=int))
    assert (model.predict(zeros, "all zero") == 0).mean() > 0.9


# ---------------------------------------------------------------------- the prior, and notes


def test_the_prior_is_estimated_and_saved(tmp_path, rng):
    model = train(tiny(), rounds=2)
    counts = model.client_weights.reshape(6, -1) * 36
    mean = torch.from_numpy(model.weights.reshape(-1))
    assert model.prediction.prior_rows in STRENGTHS
    assert model.prediction.prior_rows == pytest.approx(
        prior_strength(torch.from_numpy(counts), mean + 1e-6), rel=1.1
    )
    assert load(model.save(tmp_path)).prediction.prior_rows == model.prediction.prior_rows
    assert train(federation(rng, sizes=(40,)), rounds=1).prediction.prior_rows is None
    assert train(federation(rng), "local", rounds=1).prediction.prior_rows is None


@pytest.mark.parametrize(
    ("sizes", "word"), [((1, 1), "Nothing can change"), ((2, 1), "one learner"), ((2, 2), None)]
)
def test_a_note_says_that_nothing_can_change(rng, sizes, word):
    data = federation(rng, sizes=(60, 60))
    model = train(data, components=sizes[0], learners=sizes[1], rounds=2)
    x = data.test.inputs.numpy() + 3
    note = model.adapt("new", x, data.test.labels.numpy()).note
    assert note is None if word is None else word in note


def test_a_note_says_that_nothing_has_changed():
    data = tiny(4, 100)
    model = train(data, components=1, learners=2, rounds=1)
    model.prediction = replace(model.prediction, prior_rows=1e9)
    x, y = data.test.inputs.numpy(), data.test.labels.numpy()
    assert "Nothing has changed" in model.adapt("new", x[:20], y[:20]).note


def test_a_note_says_that_a_known_client_has_new_weights():
    data = synthetic(4, 200, components=2, dimensions=3, seed=0).dataset
    model = train(data, components=2, learners=2, rounds=20)
    x, y = data.test.inputs.numpy(), data.test.labels.numpy()
    assert "replaced" not in (model.adapt("new", x, y).note or "")
    assert "replaced" in model.adapt("new", x[:20], y[:20]).note
