"""What the study on novel images leaves behind: scores, a table beside the paper's, and figures."""

from __future__ import annotations

import io
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.experiments.image_trials import stopped_early
from fedgmm.experiments.novelty_study import NoveltyStudy
from fedgmm.experiments.results import markdown_table, mean_and_spread, printed
from fedgmm.experiments.trial_files import DamagedRecordError
from fedgmm.files import write_atomically
from fedgmm.methods.base import TITLES
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
_SCORE = {"fedgmm": "log P(x)"}
_CHOICE = (
    " What the Gaussians see and how many there are was chosen on validation rows of the first seed, by "
    "how well the density tells a known class that it was not shown from the others; novel images had "
    "no part in it."
)


@dataclass(frozen=True)
class NoveltyOutcome:
    """What was found.

    Attributes:
        metrics: of each method: AUROC, average precision and Max-F1, a value a seed each.
        left_out: AUROC of each score against each kind of outlier of the scatter plot.
        perturbed: AUROC of FedGMM's scores against small changes, first seed.
        details: everything that was recorded.
    """

    metrics: dict[str, dict[str, list[float]]]
    left_out: dict[str, float]
    perturbed: dict[str, float]
    details: list[dict[str, Any]]


# ---------------------------------------------------------------------- scores


def save_scores(path: Path, scores: Scores) -> None:
    """Keep scores for the figures, in single precision."""
    content = io.BytesIO()
    np.savez_compressed(content, **{name: own.astype(np.float32) for name, own in scores.items()})  # type: ignore[arg-type]
    write_atomically(path, content.getvalue())


def load_scores(path: Path) -> Scores:
    """What :func:`save_scores` kept.

    Raises:
        DamagedRecordError: the file is not there, or is not what was written.
    """
    try:
        with np.load(path, allow_pickle=False) as held:
            return {name: held[name].astype(np.float64) for name in held.files}
    except (OSError, ValueError, TypeError, EOFError, zlib.error, zipfile.BadZipFile):
        record = path.with_suffix(".json")
        raise DamagedRecordError(
            f"{path} is missing or damaged; delete {record.name} beside it, and both are made again."
        ) from None


def joint_scores(scores: Scores) -> Scores:
    """``log P(x, y)`` of the three groups of small changes."""
    return {
        "known": scores["known"] + scores["known_y"],
        "changed": scores["changed_x"] + scores["changed_x_y"],
        "relabelled": scores["known"] + scores["relabelled_y"],
    }


# ---------------------------------------------------------------------- tables and figures


def draw_figures(folder: Path, name: str, study: NoveltyStudy) -> None:
    """Histograms and scatter plots of the first seed, from the scores on file.

    Args:
        folder: where they go.
        name: what they are called; the trials are in the folder of that name.
        study: what was run.
    """
    from fedgmm.report.plots import plot_groups, plot_likelihoods

    trials, seed = folder / name, study.seeds[0]
    shown = [method for method in _WITH_HISTOGRAM if method in study.methods]
    held = {method: load_scores(trials / f"{method}-{seed}.npz") for method in shown}
    if held:
        panels = {
            f"{TITLES[method]}: {_SCORE.get(method, 'highest log-probability')}": {
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
            "smaller and turned: log P(x, y)": {"known": joint["known"], "novel": joint["changed"]},
            "other labels: log P(x, y)": {"known": joint["known"], "novel": joint["relabelled"]},
        },
        folder / f"{name}-perturbed.png",
    )
    plot_groups(
        {
            "known": (own["known"], own["known_y"]),
            "other labels": (own["known"], own["relabelled_y"]),
        },
        "Known images under their own and under other labels",
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


def results_in_markdown(study: NoveltyStudy, outcome: NoveltyOutcome) -> str:
    """The table beside the paper's, and those of a class left out and of small changes."""
    as_in_paper = study.dataset == "mnist" and study.changes != "none"
    rows = [
        [
            TITLES[method],
            *(mean_and_spread(values) for values in own.values()),
            " / ".join(map(printed, PAPER_METRICS[method])) if as_in_paper else printed(None),
        ]
        for method, own in outcome.metrics.items()
    ]
    known = {
        "separate": "A quarter of the known images is turned, flipped and inverted, another quarter "
        "relabelled (the paper's appendix).",
        "joint": "Half of the known images is turned, flipped, inverted and relabelled.",
        "none": "Known images and labels as they are.",
    }[study.changes]
    text = (
        f"# {study.dataset}: known test images against novel ones ({study.track} track)\n\n"
        + markdown_table(["method", *(f"{title} (%)" for title in METRICS.values()), "paper"], rows)
        + f"\nNovel images are test images at half their size, turned by 90 degrees and flipped. {known} "
        "FedGMM scores by log P(x) under the federation's weights, without a label; the others by their "
        "highest class probability, personalised ones by the highest among clients. "
        f"{study.protocol()}{stopped_early(outcome.details)}\n"
    )
    if "fedgmm" in outcome.metrics:
        text += (
            f"\nFedGMM has {counted(study.components, 'Gaussian')} (reg_covar {study.reg_covar:g}) on "
            f"{counted(study.features, 'principal component')} of {study.encoder} features "
            f"({study.representation}).{_CHOICE if study.density_is_chosen else ''}\n"
        )
    for title, table in (
        (f"FedGMM without class {study.left_out} in training", outcome.left_out),
        (
            "FedGMM against images at 0.8 of their size and turned, or other labels",
            outcome.perturbed,
        ),
    ):
        if table:
            text += f"\n## {title}\n\n" + markdown_table(
                ["outliers and score", "AUROC (%)"],
                [[kind.replace("|", "\\|"), f"{100 * value:.2f}"] for kind, value in table.items()],
            )
    return text
