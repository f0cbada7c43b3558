"""Novel images in little: how they are scored, and the table and figures of the study."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_novelty import FIXED, SMALL

from fedgmm.experiments import novelty_study, trial_files, workplace
from fedgmm.experiments.novel_images import novel_images, slightly_changed
from fedgmm.experiments.novelty import familiarity, reproduce_novelty
from fedgmm.experiments.novelty_density import choose_density
from fedgmm.experiments.novelty_study import deal_images, with_study_features
from fedgmm.experiments.workplace import Workplace
from fedgmm.methods.base import TITLES
from fedgmm.training.local import train
from tiny_images import write_mnist

NAME = "novelty-mnist-tuned"


def auroc_by_counting(known, novel):
    """How often a novel row scores below a known one; ties count half."""
    below = (novel[:, None] < known).mean()
    return below + 0.5 * (novel[:, None] == known).mean()


@pytest.mark.parametrize("method", list(TITLES))
def test_scores_by_hand(mnist, method):
    workplace = Workplace(mnist)
    federation = with_study_features(FIXED, deal_images(FIXED, 0, workplace), workplace)
    model = train(federation.dataset, options=FIXED.options(method, 0))
    rows = federation.dataset.test
    images = rows.inputs.numpy()
    features = torch.cat(rows.features.chunks).numpy()
    found = familiarity(model, images, features)
    if method == "fedgmm":
        expected = model.score_samples(images, features=features)
    elif method in ("fedavg", "fedprox"):
        expected = np.log(model.predict_proba(images).max(-1))
    else:
        by_client = [model.predict_proba(images, client).max(-1) for client in model.names]
        assert len({tuple(own) for own in by_client}) > 1 or method in ("clustered", "fedem")
        expected = np.log(np.max(by_client, axis=0))
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.usefixtures("painted")
def test_table_and_figures(tmp_path, mnist, monkeypatch):
    study = replace(FIXED, methods=("fedavg", "fedem", "fedgmm"))
    outcome = reproduce_novelty(tmp_path / "out", study, Workplace(mnist))
    trials = tmp_path / "out" / NAME
    for method, metrics in outcome.metrics.items():
        with np.load(trials / f"{method}-0.npz") as scores:
            counted = auroc_by_counting(scores["known"], scores["novel"])
            assert len(scores["known"]) == len(scores["novel"])
        assert metrics["auroc"][0] == pytest.approx(counted, abs=1e-6)
    with np.load(trials / "left-out-0.npz") as scores:
        assert outcome.left_out["class 1, log P(x)"] == pytest.approx(
            auroc_by_counting(scores["normal_x"], scores["stranger_x"])
        )
        assert outcome.left_out["other labels, log P(y|x)"] == pytest.approx(
            auroc_by_counting(scores["normal_y"], scores["relabelled_y"])
        )
    with np.load(trials / "fedgmm-0.npz") as scores:
        joint = auroc_by_counting(
            scores["known"] + scores["known_y"], scores["changed_x"] + scores["changed_x_y"]
        )
        assert outcome.perturbed["changed images, log P(x, y)"] == pytest.approx(joint, abs=1e-3)

    table = (tmp_path / "out" / f"{NAME}.md").read_text()
    assert "99.21 / 99.60 / 99.49" in table
    assert "was chosen" not in table
    for line in table.splitlines():
        if line.startswith("| "):
            assert line.replace("\\|", "").count("|") in (3, 6), line  # no cell is torn
    record = json.loads((tmp_path / "out" / f"{NAME}.json").read_text())
    assert record["chosen"]["representation"] == "direction"
    pictures = sorted((tmp_path / "out").glob("*.png"))
    assert [picture.stem.removeprefix(f"{NAME}-") for picture in pictures] == [
        "left-out",
        "likelihoods",
        "perturbed",
        "relabelled",
    ]
    assert all(3_000 < picture.stat().st_size < 150_000 for picture in pictures)

    monkeypatch.setattr(trial_files, "train", None)
    with monkeypatch.context() as patch:
        patch.setattr(workplace, "load_images", None)
        assert reproduce_novelty(tmp_path / "out", study, Workplace(mnist)) == outcome

    # what is trained without a class comes from the same images, too
    (tmp_path / "out" / "novelty-mnist-tuned" / "left-out-0.json").unlink()
    write_mnist(tmp_path / "other", monkeypatch, seed=1)
    with pytest.raises(ValueError, match="on other images than those of this data folder"):
        reproduce_novelty(tmp_path / "out", study, Workplace(tmp_path / "other"))


def test_what_cannot_be_trained_is_told_before_a_density_is_chosen(tmp_path, mnist):
    (tmp_path / "weights").write_bytes(b"for a MobileNet-V2")
    unfit = replace(SMALL, pretrained=str(tmp_path / "weights"))
    with pytest.raises(ValueError, match="needs learner='mobilenet', got 'mlp'"):
        reproduce_novelty(tmp_path / "out", unfit, Workplace(mnist))
    assert not list((tmp_path / "out").rglob("*.json"))


def test_what_is_scored(tmp_path, mnist):
    study = replace(FIXED, methods=("fedgmm",))
    workplace = Workplace(mnist)
    outcome = reproduce_novelty(tmp_path, study, workplace)
    chosen = choose_density(tmp_path, study, workplace)
    federation = with_study_features(chosen, deal_images(chosen, 0, workplace), workplace)
    options = replace(chosen.options("fedgmm", 0), lr=outcome.details[0]["lr"])
    model = train(federation.dataset, options=options)
    images = federation.dataset.test.inputs.numpy()
    with np.load(tmp_path / NAME / "fedgmm-0.npz") as scores:
        for name, changed in (
            ("known", images),
            ("novel", novel_images(images)),
            ("changed_x", slightly_changed(images)),
        ):
            expected = model.score_samples(changed, features=federation.feature_map(changed))
            np.testing.assert_allclose(scores[name], expected, rtol=1e-4, atol=1e-3)
        labels = federation.dataset.test.labels.numpy()
        features = federation.feature_map(images)
        expected = model.log_conditional(images, labels, features=features)
        np.testing.assert_allclose(scores["known_y"], expected, rtol=1e-4, atol=1e-3)
        assert not np.allclose(scores["relabelled_y"], expected, atol=1e-2)


def test_a_class_nobody_knew_is_found(mnist, tmp_path):
    """Its bar lies where no other has one."""
    outcome = reproduce_novelty(
        tmp_path, replace(FIXED, methods=("fedgmm",), rounds=4), Workplace(mnist)
    )
    assert outcome.left_out["class 1, log P(x)"] > 0.95


def test_methods_without_gaussians_need_no_encoder(tmp_path, mnist, monkeypatch):
    """And no density is chosen for them; their scores are what they are beside FedGMM."""
    study = replace(SMALL, methods=("local", "fedem", "fedgmm"), track="paper")
    whole = reproduce_novelty(tmp_path / "whole", study, Workplace(mnist))
    monkeypatch.setattr(novelty_study, "encoder", None)
    some = replace(study, methods=("local", "fedem"))
    alone = reproduce_novelty(tmp_path / "alone", some, Workplace(mnist))
    assert alone.metrics == {method: whole.metrics[method] for method in some.methods}
    assert not alone.left_out
    name = "novelty-mnist-paper"
    assert not (tmp_path / "alone" / name / "density.json").exists()
    assert json.loads((tmp_path / "alone" / f"{name}.json").read_text())["chosen"] == {}
    assert [picture.stem for picture in (tmp_path / "alone").glob("*.png")] == [
        f"{name}-likelihoods"
    ]


def test_methods_may_come_one_by_one(tmp_path, mnist):
    """Whoever comes after FedGMM tells of its density, whoever comes before leaves it open."""
    study = replace(SMALL, track="paper")
    record = tmp_path / "novelty-mnist-paper.json"
    seen = []
    for method in ("fedavg", "fedgmm", "local"):
        outcome = reproduce_novelty(tmp_path, replace(study, methods=(method,)), Workplace(mnist))
        seen.append((list(outcome.metrics), json.loads(record.read_text())["chosen"]))
    density = json.loads((tmp_path / "novelty-mnist-paper" / "density.json").read_text())["best"]
    assert seen == [
        (["fedavg"], {}),
        (["fedavg", "fedgmm"], density),
        (["local", "fedavg", "fedgmm"], density),
    ]
    assert "FedGMM has 2 Gaussians" in record.with_suffix(".md").read_text()


def test_a_training_goes_on_when_a_density_was_chosen_meanwhile(tmp_path, mnist, monkeypatch):
    """It is of FedAvg, which has none."""
    study = replace(SMALL, methods=("fedavg",), track="paper", components=5)
    plain = trial_files.train

    def interrupted(*args, **kwargs):
        plain(*args, **{**kwargs, "until": 1})
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trial_files, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reproduce_novelty(tmp_path, study, Workplace(mnist))
    reproduce_novelty(tmp_path, replace(study, methods=("fedgmm",)), Workplace(mnist))
    both = replace(study, methods=("fedavg", "fedgmm"))
    outcome = reproduce_novelty(tmp_path, both, Workplace(mnist))
    assert list(outcome.metrics) == ["fedavg", "fedgmm"]


def test_every_method_that_is_whole_on_file_is_in_the_table(tmp_path, mnist, monkeypatch):
    study = replace(FIXED, methods=("fedgmm",), track="paper")
    name = "novelty-mnist-paper"
    alone = reproduce_novelty(tmp_path, study, Workplace(mnist))
    both = reproduce_novelty(tmp_path, replace(study, methods=("fedavg",)), Workplace(mnist))
    assert list(both.metrics) == ["fedavg", "fedgmm"]
    assert both.left_out == alone.left_out
    assert both.perturbed == alone.perturbed
    assert "without class 1 in training" in (tmp_path / f"{name}.md").read_text()

    (tmp_path / name / "left-out-0.json").unlink()  # another program is at it
    monkeypatch.setattr(trial_files, "train", None)
    rest = reproduce_novelty(tmp_path, replace(study, methods=("fedavg",)), Workplace(mnist))
    assert list(rest.metrics) == ["fedavg"]
    assert not rest.left_out
