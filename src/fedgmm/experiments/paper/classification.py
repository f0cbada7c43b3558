"""Table 2 on images: all methods, tuned alike, on clients that differ in inputs and labels."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from fedgmm.experiments.settings import MIXTURES, ImageStudy
from fedgmm.experiments.study import (
    StudyContext,
    complete_methods,
    describe_divergence,
    describe_options,
    of_method,
    prepare_federation,
    run_study,
    training_facts,
    write_study,
)
from fedgmm.experiments.tables import markdown_table, mean_and_spread, paper_value
from fedgmm.experiments.trials import Federation, Record, Trial
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
    """Results of a classification study."""

    # test accuracy by method, one value per seed, mean over clients in the last round
    accuracy: dict[str, list[float]]
    details: list[Record]  # results of all trials


def reproduce_classification(
    folder: Path, study: ImageStudy, context: StudyContext
) -> ImageOutcome:
    """Run the study and write one row of Table 2 and its curves into ``folder``."""
    from fedgmm.report.plots import plot_curves

    trials, _ = run_study(folder, "classification", study, context, prepare_federation, _run_trial)
    study, details = complete_methods(trials, study)
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
    plot_curves(curves, title, folder / f"{trials.path.name}.png")
    return outcome


def _run_trial(trial: Trial[ImageStudy], federation: Federation) -> Record:
    model = trial.train(federation.dataset)
    return {**trial.facts, **model.evaluate("test").summary(), **training_facts(model)}


def _describe_models(study: ImageStudy) -> str:
    """Describe the Gaussians and the learners in sentences."""
    parts = []
    if "fedgmm" in study.methods:
        parts.append(
            f"FedGMM has {counted(study.components, 'Gaussian')} on "
            f"{counted(study.features, 'principal component')} of {study.encoder} features."
        )
    if any(method in study.methods for method in MIXTURES):
        parts.append(f"Mixtures have {counted(study.learners, 'learner')}.")
    learner = f"of the kind {study.network!r}"
    if study.network == "mobilenet":
        start = "pretrained on ImageNet" if study.pretrained else "from a random start"
        learner = f"a MobileNet-V2 {start}, with random crops and flips"
    return " ".join([*parts, f"Every learner is {learner}."])


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
                paper_value(paper.get(method)),
                describe_options(own[0]),
                f"{seconds:.2f}",
            ]
        )
    shift = (
        "Half of the images are rotated by 90 degrees, flipped and inverted, with permuted labels."
        if study.shift
        else "Images and labels are unchanged."
    )
    header = ["method", "accuracy (%)", "paper (%)", "learning rate", "s per round"]
    return (
        f"# {study.dataset}: test accuracy, mean over clients ({study.track} track)\n\n"
        + markdown_table(header, rows)
        + f"\n{study.protocol()} {shift} {_describe_models(study)}"
        f"{describe_divergence(outcome.details)}\n"
    )
