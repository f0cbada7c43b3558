"""Label frequencies of clients: predictions corrected without training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedgmm.core.labels import label_frequencies
from fedgmm.data.dataset import FederatedDataset
from fedgmm.methods.base import SHARED_LEARNERS, Prediction
from fedgmm.model import adaptation as module
from fedgmm.model.predictions import evaluate_arrays, log_learners
from fedgmm.model.saving import load
from fedgmm.support import scratch
from fedgmm.training.checkpoint import Checkpoint
from fedgmm.training.in_process import train

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


@pytest.mark.parametrize("algorithm", SHARED_LEARNERS)
def test_clients_gain_by_their_own_frequencies(rng, algorithm):
    data = skewed(rng)
    options = {**OPTIONS, "components": 1, "learners": 1}
    plain = train(data, algorithm, personal_labels=False, **options)
    own = train(data, algorithm, personal_labels=True, **options)
    assert own.evaluate("test").mean_accuracy > plain.evaluate("test").mean_accuracy + 0.1
    assert own.evaluate("test").mean_log_loss < plain.evaluate("test").mean_log_loss - 0.1
    x = data.test.inputs.numpy()
    np.testing.assert_allclose(own.predict_proba(x), plain.predict_proba(x))  # without a client
    assert not np.allclose(own.predict_proba(x, 0), plain.predict_proba(x, 0))
    np.testing.assert_allclose(own.predict_proba(x, 0).sum(1), 1.0)


@pytest.mark.parametrize("algorithm", SHARED_LEARNERS)
def test_validation_rows_decide_by_default(rng, algorithm):
    options = {**OPTIONS, "components": 1, "learners": 1}
    model = train(skewed(rng), algorithm, **options)
    assert model.options["personal_labels"] is True
    assert model.prediction.labels is not None
    assert not model.impersonal
    fair = FederatedDataset.from_arrays(
        rng.normal(size=(400, 2)), np.arange(400) % 2, np.arange(400) // 2 % 4
    )
    model = train(fair, algorithm, **options)
    assert model.options["personal_labels"] is False
    assert model.prediction.labels is None


def test_of_many_rows_some_decide(rng, monkeypatch):
    data, judged = skewed(rng), []
    scores = module.prior_scores
    monkeypatch.setattr(
        module, "prior_scores", lambda *terms: judged.append(len(terms[-1])) or scores(*terms)
    )
    everyone = train(data, "fedavg", **OPTIONS)
    assert sum(judged) == len(data.train) + len(data.validation)
    judged.clear()
    monkeypatch.setattr(module, "_MOST_JUDGES", 100)
    some = train(data, "fedavg", **OPTIONS)
    assert sum(judged) <= 200
    x = data.test.inputs.numpy()  # all rows are counted
    gap = some.predict_proba(x, 0) - everyone.predict_proba(x, 0)
    assert some.options["personal_labels"] is True
    assert np.abs(gap).max() < 0.05


@pytest.mark.parametrize("options", [{"algorithm": "local"}, {"algorithm": "gmm"}, {"rounds": 1}])
def test_label_frequencies_stay_out_where_they_cannot_be(rng, options):
    rows = 400 if "algorithm" in options else 20  # the last has too few validation rows
    model = train(skewed(rng, rows=rows), **{**OPTIONS, **options})
    assert model.options["personal_labels"] is False
    assert model.prediction.labels is None


def test_one_learner_is_not_personal(rng):
    data = skewed(rng)
    one = train(data, personal_labels=False, **{**OPTIONS, "learners": 1})
    assert "--learners 3" in one.impersonal
    one.learn_labels()
    assert not one.impersonal
    average = train(data, "fedavg", personal_labels=False, **{**OPTIONS, "learners": 1})
    assert "--algorithm fedgmm --learners 3" in average.impersonal  # it has no learners to add
    for algorithm, learners in (("fedgmm", 2), ("local", 1), ("gmm", 1)):
        other = {**OPTIONS, "learners": learners, "personal_labels": False}
        assert not train(data, algorithm, **other).impersonal


def test_frequencies_are_expected_rows(rng):
    """Against responsibilities by hand."""
    data = skewed(rng)
    model = train(data, personal_labels=True, **OPTIONS)
    rows = data.train
    x, labels = rows.inputs.numpy(), rows.labels.numpy()
    evaluated = evaluate_arrays(model, x, None)
    log_x = evaluated.log_x.numpy()
    everything = log_learners(model.prediction, evaluated.x).exp().numpy()
    log_y = np.log(everything)[np.arange(len(x)), :, labels]
    pi = model.client_weights[rows.codes.numpy()]
    prior = pi * np.exp(log_x[..., None])
    asked = prior / prior.sum((1, 2), keepdims=True)
    said = np.einsum("nab,nbk->nabk", asked, everything).reshape(len(x), 4, 2)
    q = prior * np.exp(log_y[:, None])
    q = (q / q.sum((1, 2), keepdims=True)).reshape(len(x), -1)
    counts, answers = np.zeros((2, 4, 4, 2))
    for row, label, code, answer in zip(q, labels, rows.codes.numpy(), said, strict=True):
        counts[code, :, label] += row
        answers[code] += answer
    sums = torch.from_numpy(counts), torch.from_numpy(answers)
    own = model.prediction.labels
    expected = label_frequencies(*sums, own.prior_rows, relative=own.relative)
    np.testing.assert_allclose(model.prediction.labels.clients, expected.clients)
    np.testing.assert_allclose(model.prediction.labels.federation, expected.federation)


def test_new_clients_have_frequencies_too(rng):
    options = {**OPTIONS, "components": 1, "learners": 1}  # so that weights do not matter
    model = train(skewed(rng), personal_labels=True, **options)
    y = np.zeros(60, dtype=int)
    x = rng.normal(size=(60, 2))
    common = model.predict_proba(x)[:, 0].mean()
    model.adapt("new", x, y)
    assert model.predict_proba(x, "new")[:, 0].mean() > common + 0.1
    model.adapt("new", x, 1 - y)  # known by now
    assert len(model.prediction.labels.clients) == len(model.names) == 5
    assert model.predict_proba(x, "new")[:, 0].mean() < common - 0.1
    model.adapt("silent", x)  # the learners predict the first label for its rows
    assert model.predict_proba(x, "silent")[:, 0].mean() > common + 0.1


def test_many_rows_of_a_new_client_are_counted_in_blocks(rng, monkeypatch):
    model = train(skewed(rng), personal_labels=True, **OPTIONS)
    y = np.arange(1200) % 2
    x = rng.normal(size=(1200, 2)) + 0.7 * y[:, None]
    model.adapt("new", x, y)
    whole = model.predict_proba(x[:9], "new")
    monkeypatch.setattr(scratch, "_BLOCK_ROWS", 100)
    model.adapt("new", x, y)
    np.testing.assert_allclose(model.predict_proba(x[:9], "new"), whole, rtol=1e-6)


@pytest.mark.parametrize("algorithm", ["fedgmm", "fedem", "fedavg"])
def test_new_clients_without_labels_gain_by_guesses(rng, algorithm):
    options = {**OPTIONS, "components": 1, "learners": 1, "rounds": 20}  # weights do not matter
    model = train(skewed(rng), algorithm, personal_labels=True, **options)
    y = (rng.random(800) < 0.9).astype(int)
    x = rng.normal(size=(800, 2)) + 0.7 * y[:, None]
    model.adapt("silent", x[:400])
    model.adapt("labelled", x[:400], y[:400])
    common, silent, labelled = (
        (model.predict(x[400:], who) == y[400:]).mean() for who in (None, "silent", "labelled")
    )
    assert common + 0.05 < silent <= labelled + 0.02


def test_learners_that_know_nothing_do_not_guess(rng):
    """FedAvg after four rounds answers clients of one class with the other, by a little."""
    model = train(skewed(rng), "fedavg", personal_labels=True, **OPTIONS)
    assert model.prediction.labels.guess_rows == 0
    with pytest.raises(ValueError, match="guess"):
        model.adapt("silent", rng.normal(size=(30, 2)))


def moved(rng, clients=20, rows=200, by=1.0):
    """One rule for all clients; only their inputs lie elsewhere, so that labels differ in number."""
    centres = by * rng.normal(size=clients)
    codes = np.repeat(np.arange(clients), rows)
    x = np.stack([centres[codes] + rng.normal(size=len(codes)), rng.normal(size=len(codes))], 1)
    y = (rng.random(len(x)) < 1 / (1 + np.exp(-1.5 * x[:, 0]))).astype(int)
    return FederatedDataset.from_arrays(x, y, codes)


@pytest.mark.parametrize("algorithm", ["fedgmm", "fedem", "fedavg"])
def test_inputs_that_differ_are_not_taken_for_labels_that_differ(rng, algorithm):
    options = {"rounds": 12, "components": 2, "learners": 2, "tol": None}
    plain, own = (
        train(moved(np.random.default_rng(5)), algorithm, personal_labels=value, **options)
        for value in (False, True)
    )
    assert own.evaluate("test").mean_log_loss < plain.evaluate("test").mean_log_loss + 0.01
    if own.prediction.labels.guess_rows:  # newcomers, who lie elsewhere again
        gains = []
        for client in range(12):
            new = moved(rng, clients=1)
            x, y = new.train.inputs.numpy(), new.train.labels.numpy()
            for model in (plain, own):
                if model is own or algorithm == "fedgmm":
                    model.adapt(f"new {client}", x)
            x, y = new.test.inputs.numpy(), new.test.labels.numpy()
            known = f"new {client}" if algorithm == "fedgmm" else None
            gains.append(
                own.log_conditional(x, y, f"new {client}").mean()
                - plain.log_conditional(x, y, known).mean()
            )
        assert np.mean(gains) > -0.01


def test_guesses_are_not_made_on_a_chance_gain(monkeypatch):
    """Here clients gain by them, but no more than by chance."""
    options = {"rounds": 30, "components": 2, "learners": 2, "tol": None}
    model = train(
        moved(np.random.default_rng(2), by=2.0), "fedem", personal_labels=False, **options
    )
    again = replace(model)
    model.learn_labels()
    assert model.prediction.labels.guess_rows == 0
    monkeypatch.setattr(module, "_STANDARD_ERRORS", 0.0)
    again.learn_labels()
    assert again.prediction.labels.guess_rows > 0


def test_without_validation_rows_training_rows_decide(rng):
    """Each is left out of its client's counts, or few rows and many labels would look like a shift."""
    labels = rng.integers(12, size=3000)
    x = rng.normal(size=(3000, 2))  # inputs say nothing about labels
    codes = np.repeat(np.arange(150), 20)
    data = FederatedDataset.from_arrays(x, labels, codes)
    nothing = np.zeros(len(data.validation), dtype=bool)
    data = replace(data, validation=data.validation.keep(nothing))
    alike = train(data, "fedavg", personal_labels=True, rounds=5, tol=None)
    assert alike.prediction.labels.prior_rows >= 100


def test_a_known_client_without_labels_keeps_its_frequencies(rng):
    data = skewed(rng)
    model = train(data, personal_labels=True, **OPTIONS)
    before = model.prediction.labels.clients.clone()
    model.adapt(0, data.test.inputs.numpy()[data.test.codes.numpy() == 1])
    assert torch.equal(model.prediction.labels.clients, before)


def test_adapting_without_labels_needs_gaussians_or_frequencies(rng):
    x = rng.normal(size=(30, 2))
    plain = train(skewed(rng), "fedem", personal_labels=False, **OPTIONS)
    with pytest.raises(ValueError, match="pass y"):
        plain.adapt("silent", x)


def test_rare_labels_do_not_drown_the_learner(rng):
    """Two Gaussians with classes of their own: a label that one never has must not win there."""
    options = {"components": 2, "learners": 1, "rounds": 20, "tol": None}
    centre = np.arange(6)[:, None] * np.array([1.5, 0.0]) + np.repeat([[0, 0], [4, 9]], 3, axis=0)
    parts = []
    for client in range(8):
        labels = rng.choice(6, size=300, p=rng.dirichlet(np.ones(6)))
        parts.append((centre[labels] + rng.normal(size=(300, 2)), labels, np.full(300, client)))
    data = FederatedDataset.from_arrays(
        *(np.concatenate(part) for part in zip(*parts, strict=True))
    )
    plain, own = (train(data, personal_labels=value, **options) for value in (False, True))
    assert own.evaluate("test").mean_accuracy > plain.evaluate("test").mean_accuracy
    labels = rng.choice(6, size=600, p=[0.3, 0.2, 0.1, 0.1, 0.2, 0.1])
    x = centre[labels] + rng.normal(size=(600, 2))
    for model in (plain, own):
        model.adapt("new", x[:300], labels[:300])
        model.adapt("silent", x[:300])
    for client in ("new", "silent"):
        right = [(model.predict(x[300:], client) == labels[300:]).mean() for model in (plain, own)]
        assert right[1] > right[0] - 0.03


def test_a_label_that_no_training_row_has_does_not_drown_the_others(rng):
    """A newcomer has three rows of it; the learner's answers, not counts, say how rare it thinks it is."""
    centres = 2.0 * np.array([[0, 0], [1, 0], [0, 1]])

    def drawn(labels):
        return rng.normal(size=(len(labels), 2)) + centres[labels]

    y = rng.integers(0, 3, 900)
    data = FederatedDataset.from_arrays(drawn(y), y, rng.integers(0, 3, 900))
    known = data.train.keep(data.train.labels != 2)
    options = {"components": 1, "learners": 1, "rounds": 20, "tol": None}
    model = train(replace(data, train=known), personal_labels=True, **options)
    y = np.repeat([0, 1, 2], [100, 97, 3])
    x = drawn(y)
    model.adapt("new", x, y)
    assert (model.predict(x, "new") == y).mean() > 0.75


def test_counting_again_keeps_clients_without_rows(rng):
    data = skewed(rng)
    model = train(data, personal_labels=True, **OPTIONS)
    x = rng.normal(size=(60, 2))
    model.adapt("new", x, np.zeros(60, dtype=int))
    before = model.prediction.labels
    model.learn_labels()
    torch.testing.assert_close(model.prediction.labels.clients, before.clients)
    model.learn_labels(data.select([0]))
    again = model.prediction.labels
    torch.testing.assert_close(again.clients, before.clients)
    assert torch.equal(
        again.federation, before.federation
    )  # the ratio of who is away stays as well
    assert model.options["personal_labels"]


def test_labels_are_matched_by_name(rng):
    """Another data set may number its classes differently, and must not have others."""
    data = skewed(rng)
    model = train(data, personal_labels=False, **OPTIONS)
    ones = data.train.labels.numpy() == 1
    again = FederatedDataset.from_arrays(
        data.train.inputs.numpy()[ones], np.ones(ones.sum()), data.train.codes.numpy()[ones]
    )
    model.learn_labels(again)
    x = data.test.inputs.numpy()
    assert model.predict_proba(x, 0)[:, 1].mean() > model.predict_proba(x)[:, 1].mean() + 0.1
    others = FederatedDataset.from_arrays(
        data.train.inputs.numpy(), data.train.labels.numpy() + 7, data.train.codes.numpy()
    )
    with pytest.raises(ValueError, match="Label"):
        model.learn_labels(others)


def test_each_cluster_has_frequencies_of_its_own(rng):
    """Two clusters whose learners disagree: by hand, for the clients of each."""
    data = skewed(rng)
    model = train(data, "clustered", personal_labels=False, **OPTIONS)
    one = {name: value[:1] for name, value in model.prediction.learners.items()}
    two = {name: torch.cat([value, -value]) for name, value in one.items()}
    cluster = torch.tensor([0, 1, 0, 1])
    net = model.prediction.net
    model.prediction = Prediction(net, two, assignment=cluster, default_learner=1)
    rows = data.train
    x = evaluate_arrays(model, rows.inputs.numpy(), None).x
    answers = log_learners(model.prediction, x).exp().numpy()
    before = model.predict_proba(data.test.inputs.numpy(), data.test.codes.numpy())
    model.learn_labels()
    after = model.predict_proba(data.test.inputs.numpy(), data.test.codes.numpy())
    codes, labels = rows.codes.numpy(), rows.labels.numpy()
    for client, place in enumerate(cluster.tolist()):
        members = np.isin(codes, np.flatnonzero(cluster.numpy() == place))
        known = answers[members, place].mean(0)
        counts = np.bincount(labels[codes == client], minlength=2)
        prior = model.prediction.labels.prior_rows
        own = (counts + prior * known) / (counts.sum() + prior)
        if model.prediction.labels.relative:
            said = answers[codes == client, place].sum(0)
            own = known * (counts + prior * known) / (said + prior * known)
        here = data.test.codes.numpy() == client
        expected = before[here] * own / known
        np.testing.assert_allclose(
            after[here], expected / expected.sum(1, keepdims=True), rtol=1e-6
        )


@pytest.mark.parametrize("algorithm", ["fedgmm", "clustered"])
def test_saved_models_remember(rng, tmp_path, algorithm):
    data = skewed(rng)
    model = train(data, algorithm, personal_labels=True, **OPTIONS)
    again = load(model.save(tmp_path / "model"))
    x = data.test.inputs.numpy()
    np.testing.assert_array_equal(model.predict_proba(x, 1), again.predict_proba(x, 1))
    plain = train(data, personal_labels=False, **OPTIONS)
    assert load(plain.save(tmp_path / "plain")).prediction.labels is None


def test_a_finished_run_gets_them_without_a_round(rng, tmp_path):
    data = skewed(rng)
    checkpoint = Checkpoint(tmp_path / "c")
    train(data, checkpoint=checkpoint, personal_labels=False, **OPTIONS)
    rounds = []
    model = train(
        data, checkpoint=checkpoint, on_round=[rounds.append], personal_labels=True, **OPTIONS
    )
    assert not rounds
    once = train(data, personal_labels=True, **OPTIONS)
    torch.testing.assert_close(model.prediction.labels.clients, once.prediction.labels.clients)


def test_methods_with_personal_learners_refuse_them(rng):
    with pytest.raises(ValueError, match="personal_labels"):
        train(skewed(rng), "local", personal_labels=True, **OPTIONS)
    local = train(skewed(rng), "local", **OPTIONS)
    with pytest.raises(ValueError, match="learn_labels"):
        local.learn_labels()
    with pytest.raises(ValueError, match="algorithm"):
        train(skewed(rng), "nothing", personal_labels=True)
    with pytest.raises(ValueError, match="without labels"):
        train(skewed(rng), "gmm", rounds=2).learn_labels()
