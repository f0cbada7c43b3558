"""Table 3: the scores of known and novel images, the table and the figures."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_novelty import FIXED, SMALL

from fedgmm.experiments import study as engine
from fedgmm.experiments import trials
from fedgmm.experiments.paper import novelty_setup
from fedgmm.experiments.paper.novelty import (
    METRICS,
    familiarity,
    joint_scores,
    load_scores,
    reproduce_novelty,
    results_in_markdown,
    save_scores,
)
from fedgmm.experiments.paper.novelty_setup import (
    known_images,
    novel_images,
    slightly_changed,
    with_study_features,
)
from fedgmm.experiments.study import Results, StudyContext
from fedgmm.experiments.trials import (
    DamagedRecordError,
    StudyFolderError,
    TrialFolder,
    tuned_options,
)
from fedgmm.methods.base import TITLES
from fedgmm.training.in_process import train
from tiny_images import write_mnist

pytestmark = pytest.mark.usefixtures("few_rates")
NAME = "novelty-mnist-tuned"
PAPER = "novelty-mnist-paper"

# ---------------------------------------------------------------------- scores


def auroc_by_counting(known, novel):
    """Return how often a novel row scores below a known one; ties count half."""
    below = (novel[:, None] < known).mean()
    return below + 0.5 * (novel[:, None] == known).mean()


@pytest.fixture(scope="module")
def federation(mnist):
    """The clients of the first seed with the features of the only density."""
    context, study = StudyContext(mnist), replace(FIXED, representation="direction")
    return with_study_features(study, known_images(study, 0, context), context)


@pytest.mark.parametrize("method", list(TITLES))
def test_scores_by_hand(federation, method):
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


def test_scores_are_restored(tmp_path, rng):
    scores = {"known": rng.normal(size=5), "novel": np.array([-np.inf, -1e30])}
    save_scores(tmp_path / "scores.npz", scores)
    held = load_scores(tmp_path / "scores.npz")
    assert list(held) == list(scores)
    for name, own in scores.items():
        assert held[name].dtype == np.float64
        np.testing.assert_allclose(held[name], own, rtol=1e-6)


def test_joint_scores_are_sums_of_logarithms():
    scores = {"known": 1, "known_y": 10, "changed_x": 2, "changed_x_y": 20, "relabelled_y": 40}
    scores = {name: np.array([float(value)]) for name, value in scores.items()}
    joint = {name: own.item() for name, own in joint_scores(scores).items()}
    assert joint == {"known": 11, "changed": 22, "relabelled": 41}


@pytest.mark.parametrize("content", [None, b"", b"abc", b"PK\x03\x04 no archive"])
def test_missing_or_damaged_scores_are_named(tmp_path, content):
    file = tmp_path / "fedgmm-0.npz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DamagedRecordError, match=r"fedgmm-0\.npz .* delete fedgmm-0\.json"):
        load_scores(file)


# ---------------------------------------------------------------------- the table's text


def table_of(study):
    metrics = {"fedgmm": {metric: [0.5] for metric in METRICS}}
    results = Results(Path(), TrialFolder(Path()), study, [])
    return results_in_markdown(results, {"metrics": metrics, "left_out": {}, "perturbed": {}})


@pytest.mark.parametrize(
    ("change", "given"),
    [
        ({}, "99.21 / 99.60 / 99.49"),
        ({"dataset": "femnist"}, "not given"),  # the paper's numbers are for MNIST
        ({"changes": "none"}, "not given"),
    ],
)
def test_the_paper_s_numbers_are_only_beside_its_own_setting(change, given):
    table = table_of(replace(SMALL, **change))
    row = next(line for line in table.splitlines() if line.startswith("| FedGMM"))
    assert row.split(" | ")[-1] == f"{given} |"


def test_a_choice_is_described_if_there_was_one():
    assert "were chosen on validation rows" in table_of(SMALL)
    assert "were chosen on validation rows" not in table_of(FIXED)


# ---------------------------------------------------------------------- the study


@pytest.fixture(scope="module")
def finished(tmp_path_factory, mnist, few_rates):
    """A finished study on three methods: its settings, its folder, which tests copy, its outcome."""
    study = replace(FIXED, methods=("fedavg", "fedem", "fedgmm"))
    folder = tmp_path_factory.mktemp("finished")
    return study, folder, reproduce_novelty(folder, study, StudyContext(mnist))


def test_metrics_are_those_of_the_scores_on_file(finished):
    _, folder, outcome = finished
    for method, metrics in outcome["metrics"].items():
        with np.load(folder / NAME / f"{method}-0.npz") as scores:
            counted = auroc_by_counting(scores["known"], scores["novel"])
            assert len(scores["known"]) == len(scores["novel"])
        assert metrics["auroc"][0] == pytest.approx(counted, abs=1e-6)
    with np.load(folder / NAME / "left-out-0.npz") as scores:
        assert outcome["left_out"]["class 1, log P(x)"] == pytest.approx(
            auroc_by_counting(scores["normal_x"], scores["stranger_x"])
        )
        assert outcome["left_out"]["other labels, log P(y|x)"] == pytest.approx(
            auroc_by_counting(scores["normal_y"], scores["relabelled_y"])
        )
    with np.load(folder / NAME / "fedgmm-0.npz") as scores:
        joint = auroc_by_counting(
            scores["known"] + scores["known_y"], scores["changed_x"] + scores["changed_x_y"]
        )
        assert outcome["perturbed"]["changed images, log P(x, y)"] == pytest.approx(joint, abs=1e-3)


def test_table_and_figures(finished):
    _, folder, _ = finished
    table = (folder / f"{NAME}.md").read_text()
    assert "99.21 / 99.60 / 99.49" in table
    assert "were chosen" not in table
    for line in table.splitlines():
        if line.startswith("| "):
            assert line.replace("\\|", "").count("|") in (3, 6), line  # no cell is split
    record = json.loads((folder / f"{NAME}.json").read_text())
    assert record["chosen"]["representation"] == "direction"
    pictures = sorted(folder.glob("*.png"))
    assert [picture.stem.removeprefix(f"{NAME}-") for picture in pictures] == [
        "left-out",
        "likelihoods",
        "perturbed",
        "relabelled",
    ]
    assert all(3_000 < picture.stat().st_size < 150_000 for picture in pictures)


def test_a_finished_study_is_not_run_again(tmp_path, mnist, finished, monkeypatch):
    study, folder, outcome = finished
    shutil.copytree(folder, tmp_path / "out")
    monkeypatch.setattr(trials, "train", None)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "load_images", None)
        assert reproduce_novelty(tmp_path / "out", study, StudyContext(mnist)) == outcome

    # the run without a class must use the same images, too
    (tmp_path / "out" / NAME / "left-out-0.json").unlink()
    write_mnist(tmp_path / "other", monkeypatch, seed=1)
    with pytest.raises(StudyFolderError, match="other images"):
        reproduce_novelty(tmp_path / "out", study, StudyContext(tmp_path / "other"))


def test_scores_of_the_study_by_hand(finished, federation):
    study, folder, outcome = finished
    options = replace(study.options("fedgmm", 0), **tuned_options(outcome["details"][-1]))
    assert options.algorithm == outcome["details"][-1]["method"] == "fedgmm"
    model = train(federation.dataset, options=options)
    images = federation.dataset.test.inputs.numpy()
    with np.load(folder / NAME / "fedgmm-0.npz") as scores:
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


def test_an_unknown_class_is_found(mnist, tmp_path):
    """Its bar lies at a place where no other class has one."""
    study = replace(FIXED, methods=("fedgmm",), rounds=4, track="paper")
    outcome = reproduce_novelty(tmp_path, study, StudyContext(mnist))
    assert outcome["left_out"]["class 1, log P(x)"] > 0.95


def test_a_learner_that_does_not_suit_is_refused_before_a_density_is_chosen(tmp_path, mnist):
    (tmp_path / "weights").write_bytes(b"for a MobileNet-V2")
    unfit = replace(SMALL, pretrained=str(tmp_path / "weights"))
    with pytest.raises(ValueError, match="mobilenet"):
        reproduce_novelty(tmp_path / "out", unfit, StudyContext(mnist))
    assert not list((tmp_path / "out").rglob("*.json"))


# ---------------------------------------------------------------------- methods one by one


@pytest.fixture
def quick_choice(monkeypatch):
    """Choose a density without fitting any."""
    monkeypatch.setattr(
        novelty_setup,
        "missing_class_auroc",
        lambda study, *_: 0.6 + 0.1 * (study.representation == "direction"),
    )


@pytest.mark.usefixtures("quick_choice")
def test_methods_without_gaussians_need_no_encoder(tmp_path, mnist, monkeypatch):
    """No density is chosen for them; their scores are the same as beside FedGMM."""
    study = replace(SMALL, methods=("local", "fedem", "fedgmm"), track="paper")
    whole = reproduce_novelty(tmp_path / "whole", study, StudyContext(mnist))
    monkeypatch.setattr(novelty_setup, "encoder", None)
    some = replace(study, methods=("local", "fedem"))
    alone = reproduce_novelty(tmp_path / "alone", some, StudyContext(mnist))
    assert alone["metrics"] == {method: whole["metrics"][method] for method in some.methods}
    assert not alone["left_out"]
    assert not (tmp_path / "alone" / PAPER / "density.json").exists()
    assert json.loads((tmp_path / "alone" / f"{PAPER}.json").read_text())["chosen"] == {}
    assert [picture.stem for picture in (tmp_path / "alone").glob("*.png")] == [
        f"{PAPER}-likelihoods"
    ]


@pytest.mark.usefixtures("quick_choice")
def test_methods_may_come_one_by_one(tmp_path, mnist, monkeypatch):
    """Results after FedGMM name its density, results before it do not."""
    study = replace(SMALL, track="paper")
    record = tmp_path / f"{PAPER}.json"
    seen, outcomes = [], {}
    for method in ("fedavg", "fedgmm", "local"):
        one = replace(study, methods=(method,))
        outcomes[method] = reproduce_novelty(tmp_path, one, StudyContext(mnist))
        chosen = json.loads(record.read_text())["chosen"]
        seen.append((list(outcomes[method]["metrics"]), chosen))
    density = json.loads((tmp_path / PAPER / "density.json").read_text())["best"]
    assert seen == [
        (["fedavg"], {}),
        (["fedavg", "fedgmm"], density),
        (["local", "fedavg", "fedgmm"], density),
    ]
    table = record.with_suffix(".md").read_text()
    assert "FedGMM has 2 Gaussians" in table
    assert "without class 1 in training" in table
    assert outcomes["local"]["left_out"] == outcomes["fedgmm"]["left_out"] != {}
    assert outcomes["local"]["perturbed"] == outcomes["fedgmm"]["perturbed"] != {}

    (tmp_path / PAPER / "left-out-0.json").unlink()  # another program is still running it
    monkeypatch.setattr(trials, "train", None)
    rest = reproduce_novelty(tmp_path, replace(study, methods=("fedavg",)), StudyContext(mnist))
    assert list(rest["metrics"]) == ["local", "fedavg"]
    assert not rest["left_out"]


@pytest.mark.usefixtures("quick_choice")
def test_a_run_resumes_after_a_density_was_chosen(tmp_path, mnist, monkeypatch):
    """FedAvg has no density, so its checkpoint stays valid."""
    study = replace(SMALL, methods=("fedavg",), track="paper", components=5)
    plain = trials.train

    def interrupted(*args, **kwargs):
        plain(*args, **{**kwargs, "until": 1})
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trials, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reproduce_novelty(tmp_path, study, StudyContext(mnist))
    assert list(tmp_path.rglob("fedavg*.safetensors"))
    reproduce_novelty(tmp_path, replace(study, methods=("fedgmm",)), StudyContext(mnist))
    both = replace(study, methods=("fedavg", "fedgmm"))
    outcome = reproduce_novelty(tmp_path, both, StudyContext(mnist))
    assert list(outcome["metrics"]) == ["fedavg", "fedgmm"]
