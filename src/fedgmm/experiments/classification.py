"""Table 2 on real images: eight methods, tuned alike, on clients that differ in inputs and labels."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedgmm.experiments.image_study import MIXTURES, ImageStudy, prepare_federation
from fedgmm.experiments.image_trials import (
    chosen,
    facts_of,
    of_method,
    run_study,
    stopped_early,
    tabulated,
    write_study,
)
from fedgmm.experiments.image_tuning import Federation
from fedgmm.experiments.results import markdown_table, mean_and_spread, printed
from fedgmm.experiments.trial_files import Trial, trained
from fedgmm.experiments.workplace import Workplace
from fedgmm.methods.base import TITLES
from fedgmm.wording import counted

PAPER_ACCURACY = {
    "cifar10": {"local": 19.96, "fedavg": 45.53, "fedprox": 37.0, "fedavg+": 34.33,
                "clustered": 38.81, "pfedme": 23.51, "fedem": 49.12, "fedgmm": 52.96},
    "cifar100": {"local": 13.36, "fedavg": 17.71, "fedprox": 7.95, "fedavg+": 11.51,
                 "clustered": 12.46, "pfedme": 9.92, "fedem": 17.28, "fedgmm": 22.33},
    "femnist": {"local": 62.39, "fedavg": 75.08, "fedprox": 32.84, "fedavg+": 57.99,
                "clustered": 75.04, "pfedme": 39.45, "fedem": 75.56, "fedgmm": 79.49},
}  # fmt: skip
"""Test accuracy in the paper's Table 2."""


@dataclass(frozen=True)
class ImageOutcome:
    """Test accuracies of a study: one value a seed, mean over clients, last round."""

    accuracy: dict[str, list[float]]
    details: list[dict[str, Any]]


def reproduce_classification(folder: Path, study: ImageStudy, workplace: Workplace) -> ImageOutcome:
    """One row of Table 2; what is in ``folder`` already is not done again.

    Args:
        folder: for JSON, Markdown and the figure.
        study: what is run.
        workplace: where data are found and kept, and who is told.
    """
    from fedgmm.report.plots import plot_curves

    trials, _ = run_study(
        folder, "classification", study, workplace, prepare_federation, _one_training
    )
    study, details = tabulated(trials, study)
    accuracy = {
        method: [one["mean_accuracy"] for one in of_method(details, method)]
        for method in study.methods
    }
    outcome = ImageOutcome(accuracy, details)
    write_study(folder, trials, study, asdict(outcome), _markdown(study, outcome))
    curves = {
        TITLES[method]: [one["curve"] for one in of_method(details, method)]
        for method in study.methods
    }
    title = f"{study.dataset}: accuracy on validation rows"
    plot_curves(curves, title, folder / f"{trials.name}.png")
    return outcome


def _one_training(trial: Trial[ImageStudy], federation: Federation) -> dict[str, Any]:
    model = trained(trial, federation.dataset)
    evaluation = model.evaluate("test")
    return {
        **trial.facts,
        **evaluation.summary(),
        **facts_of(model),
    }


def _models(study: ImageStudy) -> str:
    """How many Gaussians and learners the methods have, where they have several, and of which kind."""
    parts = []
    if "fedgmm" in study.methods:
        parts.append(
            f"FedGMM has {counted(study.components, 'Gaussian')} on "
            f"{counted(study.features, 'principal component')} of "
            f"{study.encoder} features."
        )
    if any(method in study.methods for method in MIXTURES):
        parts.append(f"Mixtures have {counted(study.learners, 'learner')}.")
    return " ".join([*parts, f"Every learner is {_learner(study)}."])


def _learner(study: ImageStudy) -> str:
    if study.network != "mobilenet":
        return f"of the kind {study.network!r}"
    start = "pretrained on ImageNet" if study.pretrained else "from a random start"
    return f"a MobileNet-V2 {start}, with random crops and flips"


def _markdown(study: ImageStudy, outcome: ImageOutcome) -> str:
    paper = PAPER_ACCURACY.get(study.dataset, {}) if study.shift else {}
    rows = []
    for method, values in outcome.accuracy.items():
        own = of_method(outcome.details, method)
        seconds = sum(one["seconds"] for one in own) / max(1, sum(one["rounds"] for one in own))
        rows.append(
            [
                TITLES[method],
                mean_and_spread(values),
                printed(paper.get(method)),
                chosen(own[0]),
                f"{seconds:.2f}",
            ]
        )
    shift = (
        "Half of the images are turned by 90 degrees, flipped and inverted, with permuted labels."
        if study.shift
        else "Images and labels as they are."
    )
    return (
        f"# {study.dataset}: test accuracy, mean over clients ({study.track} track)\n\n"
        + markdown_table(
            ["method", "accuracy (%)", "paper (%)", "learning rate", "s a round"], rows
        )
        + f"\n{study.protocol()} {shift} {_models(study)}"
        f"{stopped_early(outcome.details)}\n"
    )
