"""Table 2 on images: all methods, tuned alike, on clients that differ in inputs and labels."""

from __future__ import annotations

from pathlib import Path

from fedgmm.experiments.settings import MIXTURES, ImageStudy
from fedgmm.experiments.study import (
    Results,
    StudyContext,
    describe_options,
    prepare_federation,
    run_study,
    training_facts,
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


def reproduce_classification(folder: Path, study: ImageStudy, context: StudyContext) -> Record:
    """Run the study and write one row of Table 2 and its curves into ``folder``; return the results."""
    from fedgmm.report.plots import plot_curves

    results = run_study(folder, "classification", study, context, prepare_federation, _run_trial)
    found = results.write({"accuracy": results.accuracies()}, _markdown(results))
    curves = {TITLES[method]: results.values(method, "curve") for method in results.study.methods}
    plot_curves(curves, f"{study.dataset}: accuracy on validation rows", results.picture)
    return found


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


def _markdown(results: Results[ImageStudy]) -> str:
    study = results.study
    paper = PAPER_ACCURACY.get(study.dataset, {}) if study.shift else {}
    rows = []
    for method, values in results.accuracies().items():
        own = results.of(method)
        seconds = sum(one["seconds"] for one in own) / max(1, sum(one["rounds"] for one in own))
        given, options = paper_value(paper.get(method)), describe_options(own[0])
        rows.append([TITLES[method], mean_and_spread(values), given, options, f"{seconds:.2f}"])
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
        f"{results.divergence()}\n"
    )
