"""Table 3 and its figures: known against novel images, a class left out, and small changes.

Novel images are test images at half their size, rotated and flipped. FedGMM scores images by ``log P(x)``,
which needs no label; the other methods score by their highest class probability.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.data.dataset import LabelledRows
from fedgmm.data.embeddings import FeatureMap, Features, Images
from fedgmm.experiments.paper.novelty_setup import (
    DENSITY,
    IntArray,
    KnownImages,
    NoveltyStudy,
    choose_density,
    density_on_file,
    leave_out,
    novel_images,
    other_labels,
    prepare_novelty,
    slightly_changed,
)
from fedgmm.experiments.study import (
    Results,
    StudyContext,
    features_of,
    run_study,
    training_facts,
)
from fedgmm.experiments.tables import markdown_table, mean_and_spread, paper_value
from fedgmm.experiments.trials import DamagedRecordError, Record, Trial, tuned_options
from fedgmm.files import write_atomically
from fedgmm.methods.base import TITLES
from fedgmm.model.model import FederatedModel
from fedgmm.model.novelty import novelty_metrics
from fedgmm.wording import counted

FloatArray = NDArray[np.float64]
Scores = dict[str, FloatArray]

METRICS = {"auroc": "AUROC", "average_precision": "AP", "max_f1": "Max-F1"}

PAPER_METRICS = {
    "local": (50.74, 60.14, 66.67),
    "fedavg": (66.55, 68.05, 66.67),
    "fedprox": (75.23, 76.24, 71.90),
    "fedavg+": (66.65, 68.09, 66.67),
    "clustered": (50.74, 60.14, 66.67),
    "pfedme": (73.32, 77.91, 68.30),
    "fedem": (86.04, 90.02, 80.25),
    "fedgmm": (99.21, 99.60, 99.49),
}
"""AUROC, average precision and Max-F1 in the paper's Table 3, on MNIST."""

_WITH_HISTOGRAM = ("fedgmm", "fedem", "fedavg")


def reproduce_novelty(folder: Path, study: NoveltyStudy, context: StudyContext) -> Record:
    """Run the study and write Table 3 and its figures into ``folder``.

    Returns:
        The results: ``metrics`` of ``METRICS`` by method and seed, and AUROCs of each score against each
        kind of outlier: ``left_out`` of the scatter plot, ``perturbed`` of the first seed.
    """
    has_density = "fedgmm" in study.methods
    complete = choose_density if has_density else None
    results = run_study(folder, "novelty", study, context, prepare_novelty, _run_trial, complete)
    trials = results.trials
    # may also have been chosen by another program that shares the folder
    completed = density_on_file(trials, study)
    first = study.seeds[0]
    without = f"left-out-{first}"
    if has_density:
        assert completed is not None
        context.notify(f"class {study.left_out} left out")
        chosen = tuned_options(results.of("fedgmm")[0])
        trial = Trial(trials, without, completed, "fedgmm", first, chosen)
        checked = replace(context, on_images=lambda images: trials.check_data(images.fingerprint))
        trials.run_once(without, partial(_run_left_out, trial, checked), "auroc")
    needed = [without, *([DENSITY] if study.density_is_chosen else [])]
    tabulated = Results.complete(folder, trials, completed or study, {"fedgmm": needed})
    methods = tabulated.study.methods
    found: Record = {
        "chosen": completed.density if completed else {},
        "metrics": {
            method: {metric: tabulated.values(method, metric) for metric in METRICS}
            for method in methods
        },
        "left_out": {},
        "perturbed": {},
    }
    if "fedgmm" in methods and (scatter := trials.read(without)):
        found["left_out"] = scatter["auroc"]
        found["perturbed"] = tabulated.of("fedgmm")[0]["perturbed"]
    markdown = results_in_markdown(tabulated, found)
    # the file holds the study as it was given, without the chosen density
    written = replace(tabulated, study=replace(study, methods=methods))
    found = written.write(found, markdown)
    draw_figures(folder, trials.path.name, written.study)
    return found


# ---------------------------------------------------------------------- trials


def familiarity(
    model: FederatedModel, images: Images, features: Features | None = None
) -> FloatArray:
    """Return scores that are low for novel images, ``(n,)``, without labels and without a client.

    A model with a density returns ``log P(x)`` of ``features``. Other models return the logarithm of the
    highest class probability: of the global model if there is one, otherwise the highest among clients.
    """
    prediction = model.prediction
    if prediction.gaussians is not None:
        return model.score_samples(images, features=features)
    if prediction.assignment is None and model.n_learners == 1:
        return model.novelty_scores(images, score="confidence")
    clients = range(len(model.names))
    if prediction.assignment is not None:  # clients that share a learner have the same scores
        clients = np.unique(prediction.assignment.cpu().numpy(), return_index=True)[1].tolist()
    best = np.full(len(images), -np.inf)
    for client in clients:
        own = model.novelty_scores(images, client=model.names[client], score="confidence")
        best = np.maximum(best, own)
    return best


def _run_trial(trial: Trial[NoveltyStudy], federation: KnownImages) -> Record:
    """Train, then score test images and the novel images made of them."""
    rows, feature_map = federation.dataset.test, federation.feature_map
    model = trial.train(federation.dataset)
    images = rows.inputs.numpy()
    novel = novel_images(images)
    of_density: dict[str, Any] = {}
    if model.prediction.gaussians is None:
        scores = {"known": familiarity(model, images), "novel": familiarity(model, novel)}
    else:
        assert feature_map is not None
        scores = {
            "known": familiarity(model, images, features_of(rows)),
            "novel": familiarity(model, novel, feature_map(novel)),
            **_perturbed_scores(model, rows, feature_map, trial.seed),
        }
        joint = joint_scores(scores)
        of_density = {
            **trial.study.density,
            "perturbed": {
                "changed images, log P(x)": _auroc(scores["known"], scores["changed_x"]),
                "changed images, log P(x, y)": _auroc(joint["known"], joint["changed"]),
                "other labels, log P(y|x)": _auroc(scores["known_y"], scores["relabelled_y"]),
                "other labels, log P(x, y)": _auroc(joint["known"], joint["relabelled"]),
            },
        }
    save_scores(trial.folder.path / f"{trial.name}.npz", scores)
    return {
        **trial.facts,
        **of_density,
        **asdict(novelty_metrics(scores["known"], scores["novel"])),
        "test": model.evaluate("test").summary(),
        **training_facts(model),
    }


def _perturbed_scores(
    model: FederatedModel, rows: LabelledRows, feature_map: FeatureMap, seed: int
) -> Scores:
    """Return scores of slightly changed images, and ``log P(y|x)`` under true and other labels."""
    images, features = rows.inputs.numpy(), features_of(rows)
    labels = rows.labels.numpy()
    changed = slightly_changed(images)
    changed_features = feature_map(changed)
    renamed = other_labels(len(model.classes), np.random.default_rng([seed, 4]))
    return {
        "known_y": _log_conditional(model, images, labels, features),
        "changed_x": model.score_samples(changed, features=changed_features),
        "changed_x_y": _log_conditional(model, changed, labels, changed_features),
        "relabelled_y": _log_conditional(model, images, renamed[labels], features),
    }


def _run_left_out(trial: Trial[NoveltyStudy], context: StudyContext) -> Record:
    """Train FedGMM without one class, then score normal rows and two kinds of outliers."""
    absent = trial.study.left_out
    case = leave_out(trial.study, trial.seed, context)
    rows = case.encoded.dataset.test
    model = trial.train(case.encoded.dataset)
    images, features, labels = rows.inputs.numpy(), features_of(rows), rows.labels.numpy()
    strange_features = case.encoded.feature_map(case.strangers)
    strange_labels = np.full(len(case.strangers), absent)
    scores = {
        "normal_x": model.score_samples(images, features=features),
        "normal_y": _log_conditional(model, images, labels, features),
        "relabelled_y": _log_conditional(model, images, case.new_labels[labels], features),
        "stranger_x": model.score_samples(case.strangers, features=strange_features),
        "stranger_y": _log_conditional(model, case.strangers, strange_labels, strange_features),
    }
    save_scores(trial.folder.path / f"{trial.name}.npz", scores)
    return {
        "auroc": {
            f"class {absent}, log P(x)": _auroc(scores["normal_x"], scores["stranger_x"]),
            "other labels, log P(y|x)": _auroc(scores["normal_y"], scores["relabelled_y"]),
        },
        "test": model.evaluate("test").summary(),
        **training_facts(model),
    }


def _log_conditional(
    model: FederatedModel, images: Images, codes: IntArray, features: Features
) -> FloatArray:
    """Return ``log P(y|x)`` for labels given as class codes, ``(n,)``."""
    return model.log_conditional(images, model.classes[codes], features=features)


def _auroc(known: FloatArray, novel: FloatArray) -> float:
    return novelty_metrics(known, novel).auroc


# ---------------------------------------------------------------------- scores on file


def save_scores(path: Path, scores: Scores) -> None:
    """Write scores for the figures, in single precision."""
    content = io.BytesIO()
    np.savez_compressed(content, **{name: own.astype(np.float32) for name, own in scores.items()})  # type: ignore[arg-type]
    write_atomically(path, content.getvalue())


def load_scores(path: Path) -> Scores:
    """Read the scores that :func:`save_scores` wrote.

    Raises:
        DamagedRecordError: the file is missing or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as held:
            return {name: held[name].astype(np.float64) for name in held.files}
    except (OSError, ValueError, TypeError, EOFError, zlib.error, zipfile.BadZipFile):
        record = path.with_suffix(".json")
        raise DamagedRecordError(
            f"{path} is missing or damaged; delete {record.name} beside it, and both are computed again."
        ) from None


def joint_scores(scores: Scores) -> Scores:
    """Return ``log P(x, y)`` of known rows, of changed images, and under other labels."""
    return {
        "known": scores["known"] + scores["known_y"],
        "changed": scores["changed_x"] + scores["changed_x_y"],
        "relabelled": scores["known"] + scores["relabelled_y"],
    }


# ---------------------------------------------------------------------- figures and tables


def draw_figures(folder: Path, name: str, study: NoveltyStudy) -> None:
    """Draw histograms and scatter plots of the first seed from the scores in ``folder / name``.

    The figures are written into ``folder``, and their names start with ``name``.
    """
    from fedgmm.report.plots import plot_groups, plot_likelihoods

    trials, seed = folder / name, study.seeds[0]
    shown = [method for method in _WITH_HISTOGRAM if method in study.methods]
    held = {method: load_scores(trials / f"{method}-{seed}.npz") for method in shown}
    if held:
        panels = {
            f"{TITLES[method]}: {'log P(x)' if method == 'fedgmm' else 'highest log-probability'}": {
                "known": own["known"],
                "novel": own["novel"],
            }
            for method, own in held.items()
        }
        plot_likelihoods(panels, folder / f"{name}-likelihoods.png")
    if "fedgmm" not in held:
        return
    own, joint = held["fedgmm"], joint_scores(held["fedgmm"])
    plot_likelihoods(
        {
            "smaller and rotated: log P(x, y)": {
                "known": joint["known"],
                "novel": joint["changed"],
            },
            "other labels: log P(x, y)": {"known": joint["known"], "novel": joint["relabelled"]},
        },
        folder / f"{name}-perturbed.png",
    )
    plot_groups(
        {
            "known": (own["known"], own["known_y"]),
            "other labels": (own["known"], own["relabelled_y"]),
        },
        "Known images with their own and with other labels",
        folder / f"{name}-relabelled.png",
    )
    left = load_scores(trials / f"left-out-{seed}.npz")
    plot_groups(
        {
            "normal": (left["normal_x"], left["normal_y"]),
            "other labels": (left["normal_x"], left["relabelled_y"]),
            f"class {study.left_out}, never seen": (left["stranger_x"], left["stranger_y"]),
        },
        f"FedGMM trained without class {study.left_out}",
        folder / f"{name}-left-out.png",
    )


def results_in_markdown(results: Results[NoveltyStudy], found: Record) -> str:
    """Return the table beside the paper's numbers, and those of a class left out and small changes."""
    study = results.study
    as_in_paper = study.dataset == "mnist" and study.changes != "none"
    rows = [
        [
            TITLES[method],
            *(mean_and_spread(values) for values in own.values()),
            " / ".join(map(paper_value, PAPER_METRICS[method]))
            if as_in_paper
            else paper_value(None),
        ]
        for method, own in found["metrics"].items()
    ]
    known = {
        "separate": "A quarter of the known images is rotated, flipped and inverted, another quarter "
        "relabelled (the paper's appendix).",
        "joint": "Half of the known images are rotated, flipped, inverted and relabelled.",
        "none": "Known images and labels are unchanged.",
    }[study.changes]
    text = (
        f"# {study.dataset}: known test images against novel ones ({study.track} track)\n\n"
        + markdown_table(["method", *(f"{title} (%)" for title in METRICS.values()), "paper"], rows)
        + f"\nNovel images are test images at half their size, rotated by 90 degrees and flipped. {known} "
        "FedGMM scores by log P(x) with the federation's weights, without a label; the others score by "
        "their highest class probability, personalised ones by the highest among clients. "
        f"{study.protocol()}{results.divergence()}\n"
    )
    if "fedgmm" in found["metrics"]:
        choice = (
            " Representation, features, Gaussians and reg_covar were chosen on validation rows of the "
            "first seed, by how well a density separates a known class that it was not fitted to from "
            "the others; novel images were not used."
            if study.density_is_chosen
            else ""
        )
        text += (
            f"\nFedGMM has {counted(study.components, 'Gaussian')} (reg_covar {study.reg_covar:g}) on "
            f"{counted(study.features, 'principal component')} of {study.encoder} features "
            f"({study.representation}).{choice}\n"
        )
    for title, table in (
        (f"FedGMM without class {study.left_out} in training", found["left_out"]),
        (
            "FedGMM against images at 0.8 of their size and rotated, or other labels",
            found["perturbed"],
        ),
    ):
        if table:
            text += f"\n## {title}\n\n" + markdown_table(
                ["outliers and score", "AUROC (%)"],
                [[kind.replace("|", "\\|"), f"{100 * value:.2f}"] for kind, value in table.items()],
            )
    return text
