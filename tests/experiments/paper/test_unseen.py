"""Held-out clients: no training run uses their rows, and they learn only their weights."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from fedgmm.experiments import study as engine
from fedgmm.experiments import trials
from fedgmm.experiments.paper import unseen
from fedgmm.experiments.paper.unseen import (
    UnseenStudy,
    accuracy_of,
    adapted_accuracy,
    hold_out_clients,
    reproduce_unseen,
    tuned_model,
)
from fedgmm.experiments.study import StudyContext
from fedgmm.experiments.trials import tuned_options
from fedgmm.training.in_process import train
from tiny_images import FAST, write_femnist

pytestmark = pytest.mark.usefixtures("few_rates")
NAME = "unseen-femnist-tuned"
FREQUENCIES = ("labels, frequencies", "no labels, frequencies")
SMALL = UnseenStudy(track="tuned", iterations=(1, 4), held_out=0.4, **FAST)


def fitted(study, held_out, method, rounds=8):
    options = replace(study.options(method, 0), lr=0.1, rounds=rounds, start="random", warmup=0)
    return train(held_out.dataset, options=options), options


def seen_by_gaussians(rows):
    return torch.cat(rows.features.chunks).numpy()


# ---------------------------------------------------------------------- the held-out clients


def test_held_out_clients_are_complete_and_split_in_two(tmp_path):
    pictures, labels, owners = write_femnist(tmp_path, rows=41)
    held_out = hold_out_clients(replace(SMALL, shift=False), 0, StudyContext(tmp_path))
    names = [newcomer.name for newcomer in held_out.newcomers]
    assert len(names) == 2
    assert sorted([*names, *held_out.dataset.names]) == [f"f{writer:04d}" for writer in range(5)]
    training = {
        image.tobytes()
        for split in ("train", "validation", "test")
        for image in held_out.dataset.split(split).inputs.numpy()
    }
    for newcomer in held_out.newcomers:
        own = owners == int(newcomer.name[1:])
        assert len(newcomer.adaptation) == 20
        assert len(newcomer.test) == 21
        parts = (newcomer.adaptation, newcomer.test)
        found = [image.tobytes() for part in parts for image in part.inputs.numpy()]
        assert sorted(found) == sorted(image.tobytes() for image in pictures[own])
        assert not training & set(found)
        found_labels = np.concatenate([part.labels.numpy() for part in parts])
        by_image = dict(zip(found, found_labels, strict=True))
        for image, label in zip(pictures[own], labels[own], strict=True):
            assert by_image[image.tobytes()] == label


def test_another_seed_holds_out_other_clients(femnist):
    study = replace(SMALL, methods=("fedavg",))  # which needs no features
    drawn = {
        tuple(one.name for one in hold_out_clients(study, seed, StudyContext(femnist)).newcomers)
        for seed in range(6)
    }
    assert len(drawn) > 1


def test_principal_components_do_not_depend_on_them(tmp_path):
    pictures, labels, owners = write_femnist(tmp_path)
    before = hold_out_clients(SMALL, 0, StudyContext(tmp_path))
    away = [int(newcomer.name[1:]) for newcomer in before.newcomers]
    pictures[np.isin(owners, away)] ^= 0xFF
    np.savez(
        tmp_path / "femnist" / "little.npz",
        images=pictures,
        labels=labels,
        writers=owners,
        writer_names=np.array([f"f{writer:04d}" for writer in range(5)]),
    )
    after = hold_out_clients(SMALL, 0, StudyContext(tmp_path))
    for split in ("train", "validation", "test"):
        np.testing.assert_array_equal(
            seen_by_gaussians(before.dataset.split(split)),
            seen_by_gaussians(after.dataset.split(split)),
        )
    changed = [seen_by_gaussians(one.newcomers[0].test) for one in (before, after)]
    assert not np.allclose(*changed)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, femnist, few_rates):
    """A finished study: its folder, its outcome, and the data sets of all training runs."""
    seen = []

    def watched(dataset, *args, **kwargs):
        seen.append(dataset)
        return train(dataset, *args, **kwargs)

    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "train", watched)
        outcome = reproduce_unseen(folder, SMALL, StudyContext(femnist))
    return folder, outcome, seen


def test_no_training_run_sees_them(finished):
    _, outcome, seen = finished
    away = set(outcome["details"][0]["newcomers"])
    assert len(away) == 2
    # four choices, half of them for longer, two to the end, and the trial of each method;
    # FedGMM with and without independence, and three of them with and without label frequencies
    assert len(seen) == len(SMALL.methods) * (4 + 2 + 2 + 1) + 2 + 3 * 2
    for dataset in seen:
        assert not away & set(dataset.names)
        for split in ("train", "validation", "test"):
            assert not away & set(dataset.split(split).names)


# ---------------------------------------------------------------------- adaptation


@pytest.mark.parametrize("labelled", [True, False])
def test_weights_by_hand(femnist, labelled):
    held_out = hold_out_clients(SMALL, 0, StudyContext(femnist))
    model, _ = fitted(SMALL, held_out, "fedgmm")
    newcomer, gaussians = held_out.newcomers[0], model.prediction.gaussians

    def logs(rows):
        seen = seen_by_gaussians(rows).astype(np.float64)
        log_x = np.stack(
            [
                multivariate_normal(mean, covariance).logpdf(seen)
                for mean, covariance in zip(
                    gaussians.means.double().numpy(),
                    gaussians.covariances.double().numpy(),
                    strict=True,
                )
            ],
            axis=1,
        )
        numbers = rows.inputs.float() / 127.5 - 1
        logits = model.prediction.net.logits(model.prediction.learners, numbers).detach()
        return log_x, torch.log_softmax(logits.double(), -1).numpy()  # (n, M1), (n, M2, K)

    known = list(model.names)
    x, y = newcomer.adaptation.inputs.numpy(), newcomer.adaptation.labels.numpy()
    seen = seen_by_gaussians(newcomer.adaptation)
    accuracy = adapted_accuracy(model, newcomer, labelled, 7)
    assert model.names == known  # the client was not kept
    weights = model.adapt("new", x, y if labelled else None, features=seen, max_rounds=7).weights
    log_x, log_y = logs(newcomer.test)
    mixed = np.log(weights) + log_x[:, :, None]
    classes = logsumexp(mixed[..., None] + log_y[:, None], axis=(1, 2))
    expected = (classes.argmax(-1) == newcomer.test.labels.numpy()).mean()

    assert accuracy == expected
    if labelled:
        return
    start = model.weights + 1e-3 / 4
    start = start / start.sum()
    log_x, _ = logs(newcomer.adaptation)
    own, prior = start.sum(1), model.prediction.prior_rows
    for _ in range(7):
        q = np.log(own) + log_x
        q = np.exp(q - logsumexp(q, axis=1, keepdims=True)).sum(0) + prior * start.sum(1)
        own = q / q.sum()
    # without labels the learners' shares within a Gaussian stay the federation's
    by_hand = own[:, None] * start / start.sum(1, keepdims=True)
    np.testing.assert_allclose(weights, by_hand, atol=1e-5)


def test_tuning_is_one_epoch_from_the_global_learner(femnist):
    held_out = hold_out_clients(SMALL, 0, StudyContext(femnist))
    study = replace(SMALL, track="paper")
    model, options = fitted(study, held_out, "fedavg+")
    tuned = tuned_model(model, held_out.adaptation, options)
    assert tuned.names == [newcomer.name for newcomer in held_out.newcomers]
    place = model.prediction.default_learner
    for code, newcomer in enumerate(held_out.newcomers):
        # 20 rows, a batch of 128: one epoch is one step
        params = {
            name: value[place : place + 1].clone().requires_grad_()
            for name, value in model.prediction.learners.items()
        }
        numbers = newcomer.adaptation.inputs.float() / 127.5 - 1
        logits = model.prediction.net.logits(params, numbers)[:, 0]
        loss = torch.nn.functional.cross_entropy(logits, newcomer.adaptation.labels)
        loss.backward()
        for name, value in params.items():
            expected = (value - options.lr * value.grad).detach()[0]
            torch.testing.assert_close(tuned.prediction.learners[name][code], expected)
    with pytest.raises(ValueError, match="Unknown client"):
        accuracy_of(tuned, held_out.newcomers[0].test, held_out.dataset.names[0])


# ---------------------------------------------------------------------- the study


def test_table_and_curve(finished, femnist, monkeypatch):
    folder, outcome, _ = finished
    details = {one["method"]: one for one in outcome["details"]}
    others = {m: [w for w in one["unseen"] if w not in FREQUENCIES] for m, one in details.items()}
    assert others == {
        "fedavg": ["as it is"],
        "fedavg+": ["as it is", "tuned"],
        "fedem": ["as it is", "labels"],
        "fedgmm": ["as it is", "labels", "no labels"],
    }
    for one in details.values():
        assert (FREQUENCIES[0] in one["unseen"]) == one.get("personal_labels", False)
        assert list(outcome["accuracy"][one["method"]]) == list(one["unseen"])
    assert any(one.get("personal_labels") for one in details.values())  # else the test is too weak
    gmm = details["fedgmm"]
    assert all(len(curve) == 2 for curve in gmm["adaptation_curves"].values())
    assert list(gmm["adaptation_curves"]) == list(gmm["unseen"])[1:]
    held_out = hold_out_clients(SMALL, 0, StudyContext(femnist))
    chosen = tuned_options(gmm)
    model = train(held_out.dataset, options=replace(SMALL.options("fedgmm", 0), **chosen))
    plain = replace(model, prediction=replace(model.prediction, labels=None))
    for way in list(gmm["unseen"])[1:]:
        start, labelled = model if way in FREQUENCIES else plain, way.startswith("labels")
        by_client = [adapted_accuracy(start, one, labelled) for one in held_out.newcomers]
        assert gmm["unseen"][way] == by_client
        assert outcome["accuracy"]["fedgmm"][way] == [pytest.approx(np.mean(by_client))]
    assert gmm["unseen"]["as it is"] == [
        accuracy_of(model, one.test, None) for one in held_out.newcomers
    ]

    table = (folder / f"{NAME}.md").read_text()
    assert table.count("\n| ") == 1 + sum(len(one["unseen"]) for one in details.values())
    row = next(line for line in table.splitlines() if "| FedGMM | weights from labelled" in line)
    assert "| 78.51 |" in row
    assert f"{100 * outcome['accuracy']['fedgmm']['labels'][0]:.2f}" in row
    assert "51.00" in next(line for line in table.splitlines() if "tuned on the adaptation" in line)
    record = json.loads((folder / f"{NAME}.json").read_text())
    assert record["accuracy"] == outcome["accuracy"]
    assert 5_000 < (folder / f"{NAME}.png").stat().st_size < 150_000

    monkeypatch.setattr(trials, "train", None)
    monkeypatch.setattr(engine, "load_images", None)
    assert reproduce_unseen(folder, SMALL, StudyContext(femnist)) == outcome


def test_methods_without_gaussians_need_no_encoder(tmp_path, femnist, monkeypatch):
    some = replace(SMALL, methods=("fedavg", "fedavg+", "fedem"))
    whole = reproduce_unseen(
        tmp_path / "whole", replace(SMALL, track="paper"), StudyContext(femnist)
    )
    monkeypatch.setattr(engine, "encoder", None)
    alone = reproduce_unseen(
        tmp_path / "alone", replace(some, track="paper"), StudyContext(femnist)
    )
    assert alone["accuracy"] == {method: whole["accuracy"][method] for method in some.methods}


def test_every_complete_method_is_in_the_table(tmp_path, femnist):
    for method in ("fedem", "fedavg"):
        study = replace(SMALL, methods=(method,), track="paper")
        outcome = reproduce_unseen(tmp_path, study, StudyContext(femnist))
    assert list(outcome["accuracy"]) == ["fedavg", "fedem"]
    table = (tmp_path / "unseen-femnist-paper.md").read_text()
    assert table.index("| FedAvg |") < table.index("| FedEM |")


def test_ways_that_not_all_seeds_have_are_not_in_the_table(tmp_path, femnist, monkeypatch):
    """Whether labels of newcomers can be guessed depends on the rows of a seed."""
    study = replace(SMALL, methods=("fedgmm",), seeds=(0, 1))
    given = iter([list(FREQUENCIES), [FREQUENCIES[0]]])
    monkeypatch.setattr(unseen, "_adaptations", lambda *_: next(given))
    outcome = reproduce_unseen(tmp_path, study, StudyContext(femnist))
    assert list(outcome["accuracy"]["fedgmm"]) == ["as it is", FREQUENCIES[0]]
    table = (tmp_path / f"unseen-{study.label}.md").read_text()
    assert "rows without labels has no row, because only seed 0 has it." in table


def test_without_mixtures_there_is_no_curve(tmp_path, femnist):
    study = replace(SMALL, methods=("fedavg",), track="paper")
    reproduce_unseen(tmp_path, study, StudyContext(femnist))
    assert (tmp_path / f"unseen-{study.label}.md").exists()
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    "change", [{"methods": ("local",)}, {"held_out": 1.0}, {"iterations": (0,)}], ids=str
)
def test_bad_settings_are_refused_by_name(change):
    (name,) = change
    with pytest.raises(ValueError, match=name):
        UnseenStudy(**change)


def test_too_few_clients(femnist):
    with pytest.raises(ValueError, match=r"held_out=0\.05 of 5 clients"):
        hold_out_clients(replace(SMALL, held_out=0.05), 0, StudyContext(femnist))


def test_too_few_rows(tmp_path):
    write_femnist(tmp_path, rows=1)
    with pytest.raises(ValueError, match="too few for two halves"):
        hold_out_clients(replace(SMALL, features=1), 0, StudyContext(tmp_path))


def test_no_rows_to_judge_the_training_by(tmp_path):
    """Refused before any training run."""
    write_femnist(tmp_path, rows=2)  # one to train, one in another split
    with pytest.raises(ValueError, match="none has a test row"):
        hold_out_clients(replace(SMALL, features=1), 0, StudyContext(tmp_path))
