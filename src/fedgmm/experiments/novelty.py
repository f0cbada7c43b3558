"""Novel images: Table 3, likelihoods of known and novel ones, a digit left out, and small changes.

Novel images are test images at half their size, turned and flipped. FedGMM is asked for ``log P(x)``, which
needs no label; all others for their highest class probability. What FedGMM's Gaussians see is chosen
without novel images.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedgmm.data.dataset import LabelledRows
from fedgmm.data.embeddings import FeatureMap, Features, Images
from fedgmm.experiments.image_trials import (
    facts_of,
    features_of,
    of_method,
    run_study,
    tabulated,
    write_study,
)
from fedgmm.experiments.novel_images import IntArray, novel_images, other_labels, slightly_changed
from fedgmm.experiments.novelty_density import DENSITY, choose_density, density_on_file
from fedgmm.experiments.novelty_results import (
    METRICS,
    FloatArray,
    NoveltyOutcome,
    Scores,
    draw_figures,
    joint_scores,
    results_in_markdown,
    save_scores,
)
from fedgmm.experiments.novelty_study import KnownImages, NoveltyStudy, leave_out, prepare_novelty
from fedgmm.experiments.trial_files import (
    Trial,
    check_data,
    chosen_of,
    on_file,
    recorded,
    trained,
)
from fedgmm.experiments.workplace import Workplace
from fedgmm.model.model import FederatedModel
from fedgmm.model.novelty import novelty_metrics


def reproduce_novelty(folder: Path, study: NoveltyStudy, workplace: Workplace) -> NoveltyOutcome:
    """Table 3 and its figures; what is in ``folder`` already is not done again.

    Args:
        folder: for JSON, Markdown and the figures.
        study: what is run.
        workplace: where data are found and kept, and who is told.
    """
    trials, details = run_study(
        folder,
        "novelty",
        study,
        workplace,
        prepare_novelty,
        _one_trial,
        settle=choose_density if "fedgmm" in study.methods else None,
    )
    # also where FedGMM is another program's: whoever ends tells of all that is there
    sized = density_on_file(trials, study)
    first = study.seeds[0]
    without = f"left-out-{first}"
    if "fedgmm" in study.methods:
        assert sized is not None
        workplace.notify(f"class {study.left_out} left out")
        chosen = chosen_of(of_method(details, "fedgmm")[0])
        trial = Trial(trials, without, sized, "fedgmm", first, chosen)
        same_images = replace(
            workplace, on_images=lambda images: check_data(trials, images.fingerprint)
        )
        recorded(trials, without, partial(_left_out_trial, trial, same_images), "auroc")
    needed = [without, *([DENSITY] if study.density_is_chosen else [])]
    told, details = tabulated(trials, sized or study, {"fedgmm": needed})
    study = replace(study, methods=told.methods)
    metrics = {
        method: {metric: [one[metric] for one in of_method(details, method)] for metric in METRICS}
        for method in study.methods
    }
    left_out: dict[str, float] = {}
    perturbed: dict[str, float] = {}
    if "fedgmm" in study.methods and (scatter := on_file(trials, without)):
        left_out = scatter["auroc"]
        perturbed = of_method(details, "fedgmm")[0]["perturbed"]
    outcome = NoveltyOutcome(metrics, left_out, perturbed, details)
    found = {"chosen": sized.density if sized else {}, **asdict(outcome)}
    write_study(folder, trials, study, found, results_in_markdown(told, outcome))
    draw_figures(folder, trials.name, study)
    return outcome


# ---------------------------------------------------------------------- scores


def familiarity(
    model: FederatedModel, images: Images, features: Features | None = None
) -> FloatArray:
    """Scores that are low for novel images, ``(n,)``, without labels and without a client.

    ``log P(x)`` where there is a density, which sees ``features``. Otherwise the logarithm of the
    highest class probability: of the global model where that is all there is, else the highest among
    clients.
    """
    prediction = model.prediction
    if prediction.gaussians is not None:
        return model.score_samples(images, features=features)
    if prediction.assignment is None and model.n_learners == 1:
        return model.novelty_scores(images, score="confidence")
    clients = range(len(model.names))
    if prediction.assignment is not None:  # clients that share a learner say the same
        clients = np.unique(prediction.assignment.cpu().numpy(), return_index=True)[1].tolist()
    best = np.full(len(images), -np.inf)
    for client in clients:
        own = model.novelty_scores(images, client=model.names[client], score="confidence")
        best = np.maximum(best, own)
    return best


# ---------------------------------------------------------------------- trials


def _one_trial(trial: Trial[NoveltyStudy], federation: KnownImages) -> dict[str, Any]:
    """Train, then score test images as they are and as novel ones."""
    rows, feature_map = federation.dataset.test, federation.feature_map
    model = trained(trial, federation.dataset)
    images = rows.inputs.numpy()
    strange = novel_images(images)
    of_density: dict[str, Any] = {}
    if model.prediction.gaussians is None:
        scores = {"known": familiarity(model, images), "novel": familiarity(model, strange)}
    else:
        assert feature_map is not None
        scores = {
            "known": familiarity(model, images, features_of(rows)),
            "novel": familiarity(model, strange, feature_map(strange)),
            **_perturbed_scores(model, rows, feature_map, trial.seed),
        }
        of_density = {**trial.study.density, "perturbed": _perturbed_auroc(scores)}
    save_scores(trial.folder / f"{trial.name}.npz", scores)
    return {
        **trial.facts,
        **of_density,
        **asdict(novelty_metrics(scores["known"], scores["novel"])),
        "test": model.evaluate("test").summary(),
        **facts_of(model),
    }


def _perturbed_scores(
    model: FederatedModel, rows: LabelledRows, feature_map: FeatureMap, seed: int
) -> Scores:
    """``log P(x)`` and ``log P(y|x)`` of test rows, of changed images, and under other labels."""
    images, features = rows.inputs.numpy(), features_of(rows)
    labels = rows.labels.numpy()
    changed = slightly_changed(images)
    changed_features = feature_map(changed)
    renamed = other_labels(len(model.classes), np.random.default_rng([seed, 4]))
    return {
        "known_y": _conditional(model, images, labels, features),
        "changed_x": model.score_samples(changed, features=changed_features),
        "changed_x_y": _conditional(model, changed, labels, changed_features),
        "relabelled_y": _conditional(model, images, renamed[labels], features),
    }


def _auroc(known: FloatArray, novel: FloatArray) -> float:
    return novelty_metrics(known, novel).auroc


def _perturbed_auroc(scores: Scores) -> dict[str, float]:
    joint = joint_scores(scores)
    return {
        "changed images, log P(x)": _auroc(scores["known"], scores["changed_x"]),
        "changed images, log P(x, y)": _auroc(joint["known"], joint["changed"]),
        "other labels, log P(y|x)": _auroc(scores["known_y"], scores["relabelled_y"]),
        "other labels, log P(x, y)": _auroc(joint["known"], joint["relabelled"]),
    }


def _left_out_trial(trial: Trial[NoveltyStudy], workplace: Workplace) -> dict[str, Any]:
    """FedGMM without one class, and what it says of normal rows and of two kinds of outliers."""
    absent = trial.study.left_out
    case = leave_out(trial.study, trial.seed, workplace)
    rows = case.encoded.dataset.test
    model = trained(trial, case.encoded.dataset)
    images, features, labels = rows.inputs.numpy(), features_of(rows), rows.labels.numpy()
    strange_features = case.encoded.feature_map(case.strangers)
    strange_labels = np.full(len(case.strangers), absent)
    scores = {
        "normal_x": model.score_samples(images, features=features),
        "normal_y": _conditional(model, images, labels, features),
        "relabelled_y": _conditional(model, images, case.new_labels[labels], features),
        "stranger_x": model.score_samples(case.strangers, features=strange_features),
        "stranger_y": _conditional(model, case.strangers, strange_labels, strange_features),
    }
    save_scores(trial.folder / f"{trial.name}.npz", scores)
    return {
        "auroc": {
            f"class {absent}, log P(x)": _auroc(scores["normal_x"], scores["stranger_x"]),
            "other labels, log P(y|x)": _auroc(scores["normal_y"], scores["relabelled_y"]),
        },
        "test": model.evaluate("test").summary(),
        **facts_of(model),
    }


def _conditional(
    model: FederatedModel, images: Images, codes: IntArray, features: Features
) -> FloatArray:
    """``log P(y|x)`` of rows whose labels are the classes with these ``codes``, ``(n,)``."""
    return model.log_conditional(images, model.classes[codes], features=features)
