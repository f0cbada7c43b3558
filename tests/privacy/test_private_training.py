"""Private training through ``train``: budget, history, files, refusals, resume."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from fedgmm import FederatedDataset, Privacy, load, train
from fedgmm.data.synthetic import synthetic
from fedgmm.privacy.accounting import compose, epsilon_of
from fedgmm.privacy.ledger import LEDGER, RUN_WITNESS, Ledger, LedgerError
from fedgmm.privacy.settings import PrivacyError
from fedgmm.training.private import Account

LOOSE = Privacy(epsilon=200.0, delta=1e-5, bounds=(-6, 6), rounds=3)


@pytest.fixture(scope="module", autouse=True)
def few_draws():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedgmm.privacy.private_em._SAMPLES", 500)
        patch.setattr("fedgmm.privacy.private_em._FEWEST_SAMPLES", 500)
        yield


@pytest.fixture(scope="module")
def federation():
    return synthetic(10, 300, dimensions=4, components=2, separation=2.0, seed=0)


@pytest.fixture(scope="module")
def model(federation):
    return train(federation.dataset, "fedgmm", components=2, learners=2, privacy=LOOSE)


def test_a_large_budget_learns(federation, model):
    bayes = federation.bayes_accuracy()
    assert model.evaluate("test", federation.dataset).mean_accuracy > bayes - 0.06


def test_the_budget_is_spent_and_reported(model, tmp_path):
    assert model.privacy["spent"] == pytest.approx(200.0, rel=1e-6)
    assert model.privacy["releases"] == 6  # columns, covariance, histogram, three rounds
    spent = [entry["epsilon"] for entry in model.history]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(200.0, rel=1e-6)
    assert "200 of 200" in repr(model)
    model.save(tmp_path / "model")
    assert load(tmp_path / "model").privacy == json.loads(json.dumps(model.privacy))


def test_a_public_model_holds_nothing_that_rows_decide_without_noise(federation, model, tmp_path):
    own = replace(model)
    own.learn_labels()
    own.calibrate()
    own.public().save(tmp_path / "public")
    [file] = (tmp_path / "public").glob("*.safetensors")
    found = load_file(file)
    shared = {"weights", "gaussians", "learners", "scaling", "client_weights"}
    assert {name.split("/")[0] for name in found} == shared
    assert found["client_weights"].size == 0
    facts = json.loads((tmp_path / "public" / "model.json").read_text())
    assert facts["names"] == []
    assert set(facts["history"][0]) == {"round", "log_likelihood", "epsilon"}
    rows = federation.dataset.test.inputs[:5].numpy()
    shown = load(tmp_path / "public")
    np.testing.assert_array_equal(shown.predict_proba(rows), model.predict_proba(rows))
    with pytest.raises(ValueError, match="client"):
        shown.predict_proba(rows, client=model.names[0])


def test_an_account_survives_a_line_that_was_cut_off(tmp_path):
    account = Account(LOOSE, tmp_path / "run")
    mu = account.charge("columns", 0.5)
    with account.ledger.path.open("a") as file:
        file.write('{"release": "cova')
    account = Account(LOOSE, tmp_path / "run")
    assert account.mus == [mu]
    account.charge("covariance", 0.5)
    assert len(Account(LOOSE, tmp_path / "run").mus) == 2
    assert Account(LOOSE, tmp_path / "another run").mus == []


@pytest.mark.parametrize("change", ["edited", "older copy", "deleted"])
def test_a_ledger_that_cannot_be_trusted_stops_a_run(federation, tmp_path, change, monkeypatch):
    options = {"components": 2, "learners": 2, "privacy": LOOSE}
    file, path = tmp_path / "run.safetensors", tmp_path / LEDGER
    train(federation.dataset, until=1, checkpoint=file, **options)
    lines = path.read_text().splitlines(keepends=True)
    if change == "deleted":
        path.unlink()
    else:
        cut = lines[:-1]
        path.write_text("".join(cut if change == "older copy" else [*cut, lines[-1][:-9] + "\n"]))
    monkeypatch.setattr("fedgmm.training.private.noisy", None)  # any release would fail
    with pytest.raises(LedgerError, match="restore the newest copy"):
        train(federation.dataset, checkpoint=file, **options)


@pytest.mark.parametrize("algorithm", ["fedem", "fedavg", "gmm"])
def test_methods_of_sums(federation, algorithm):
    data = federation.dataset
    if algorithm == "gmm":
        rows = data.train
        data = FederatedDataset.from_arrays(
            rows.inputs.numpy(), np.zeros(len(rows)), rows.codes.numpy()
        )
    model = train(data, algorithm, components=2, learners=2, privacy=LOOSE)
    assert model.privacy["spent"] <= 200.0 * (1 + 1e-9)
    assert len(model.history) == 3
    if algorithm == "fedavg":
        assert model.evaluate("test", data).mean_accuracy > 0.6


@pytest.mark.parametrize("kind", ["tied", "diag", "spherical", "identity"])
def test_covariance_types(federation, kind):
    model = train(federation.dataset, components=2, learners=2, covariance_type=kind, privacy=LOOSE)
    assert model.prediction.gaussians.covariance_type == kind
    assert model.evaluate("test", federation.dataset).mean_accuracy > 0.7


def test_two_runs_with_one_seed_differ(federation):
    private = replace(LOOSE, rounds=1)
    first, second = (
        train(federation.dataset, components=2, learners=2, seed=3, privacy=private).prediction
        for _ in range(2)
    )
    assert not torch.equal(first.gaussians.means, second.gaussians.means)


@pytest.mark.parametrize("unit", ["person", "client"])
def test_units(federation, unit):
    rows = federation.dataset.train
    data = FederatedDataset.from_arrays(
        rows.inputs.numpy(),
        rows.labels.numpy(),
        rows.codes.numpy(),
        persons=np.arange(len(rows)) // 3,
        split=(0.8, 0, 0.2),
    )
    model = train(data, components=2, learners=2, privacy=replace(LOOSE, unit=unit))
    assert model.privacy["unit"] == unit
    assert model.privacy["spent"] == pytest.approx(200.0, rel=1e-6)
    assert model.evaluate("test", data).mean_accuracy > 0.5


def batch_normalised():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


class Tokens(nn.Module):
    integer_inputs = True

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 2)

    def forward(self, x):
        return self.table(x).mean(1)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"algorithm": "local"}, "local"),
        ({"algorithm": "clustered"}, "sums"),
        ({"learner": batch_normalised}, "batch normalisation"),
        ({"learner": lambda: Tokens(), "algorithm": "fedavg"}, "integers"),
        ({"patience": 3}, "patience"),
        ({"warmup": 3}, "warmup"),
        ({"refit": True}, "refit"),
        ({"components": "auto"}, "auto"),
        ({"personal_labels": True}, "personal_labels"),
        ({"participation": 0.5}, "participation"),
        ({"aggregation": "paper"}, "paper"),
        ({"pca": 2}, "pca"),
        ({"pretrained": "weights.pth"}, "pretrained"),
        ({"watch_accuracy": True}, "watch_accuracy"),
        ({"privacy": replace(LOOSE, delta=0.01)}, "delta"),
        ({"privacy": replace(LOOSE, unit="person")}, "person"),
        ({"privacy": replace(LOOSE, bounds={"age": (0, 1)})}, "bounds"),
    ],
)
def test_what_cannot_be_private_is_refused_before_anything_runs(
    federation, options, word, monkeypatch
):
    monkeypatch.setattr("fedgmm.training.private.noisy", None)  # any release would fail
    with pytest.raises(ValueError, match=word):
        train(federation.dataset, **{"privacy": LOOSE, **options})


def test_a_budget_is_not_needed(federation):
    model = train(federation.dataset, components=2, learners=2, rounds=2, privacy=Privacy())
    assert model.privacy is None


# ---------------------------------------------------------------------- resume


def mus_in(folder):
    return [one.release.mu for one in Ledger.found(folder).entries()]


def test_a_run_that_resumes_repeats_no_release(federation, tmp_path):
    file = tmp_path / "run.safetensors"
    options = {"components": 2, "learners": 2, "privacy": LOOSE, "checkpoint": file}
    train(federation.dataset, until=1, **options)
    assert len(mus_in(tmp_path)) == 4
    model = train(federation.dataset, **options)
    mus = mus_in(tmp_path)
    assert len(mus) == 6
    assert epsilon_of(compose(mus), LOOSE.delta) <= 200.0 * (1 + 1e-9)
    again = train(federation.dataset, **options)
    assert len(mus_in(tmp_path)) == 6
    assert torch.equal(again.prediction.gaussians.means, model.prediction.gaussians.means)


def test_a_release_that_was_lost_is_counted(federation, tmp_path, monkeypatch):
    """A run killed between a release and its checkpoint pays for the release, and stays in budget."""
    file = tmp_path / "run.safetensors"
    options = {"components": 2, "learners": 2, "privacy": LOOSE, "checkpoint": file}
    from fedgmm.training import loop

    saves = []

    def killed(self):
        saves.append(self.run.round)
        if self.run.round == 2:
            raise OSError("killed")
        original(self)

    original = loop.Training.save
    monkeypatch.setattr(loop.Training, "save", killed)
    with pytest.raises(OSError, match="killed"):
        train(federation.dataset, **options)
    assert len(mus_in(tmp_path)) == 5  # the second round was counted
    monkeypatch.setattr(loop.Training, "save", original)
    model = train(federation.dataset, **options)
    mus = mus_in(tmp_path)
    assert len(mus) == 7
    assert model.privacy["releases"] == 7
    assert epsilon_of(compose(mus), LOOSE.delta) <= 200.0 * (1 + 1e-9)


def test_a_lost_ledger_counts_the_releases_of_the_checkpoint(federation, tmp_path):
    """As if the run had been started by a version without a ledger."""
    file = tmp_path / "run.safetensors"
    options = {"components": 2, "learners": 2, "privacy": LOOSE, "checkpoint": file}
    train(federation.dataset, until=1, **options)
    for name in (LEDGER, RUN_WITNESS):
        (tmp_path / name).unlink()
    model = train(federation.dataset, **options)
    assert len(mus_in(tmp_path)) == 3  # one for all before, and two rounds
    assert model.privacy["spent"] == pytest.approx(200.0, rel=1e-6)


def test_a_deleted_checkpoint_does_not_renew_the_budget(federation, tmp_path):
    file = tmp_path / "run.safetensors"
    options = {"components": 2, "learners": 2, "privacy": LOOSE, "checkpoint": file}
    train(federation.dataset, **options)
    file.unlink()
    with pytest.raises(PrivacyError, match="spent"):
        train(federation.dataset, **options)


def test_another_budget_is_another_run(federation, tmp_path):
    file = tmp_path / "run.safetensors"
    options = {"components": 2, "learners": 2, "checkpoint": file}
    train(federation.dataset, until=1, privacy=LOOSE, **options)
    with pytest.raises(ValueError, match="privacy"):
        train(federation.dataset, privacy=replace(LOOSE, epsilon=300.0), **options)
