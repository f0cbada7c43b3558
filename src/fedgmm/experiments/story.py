"""Second part of ``fedgmm demo``: methods compared, a new client, novel samples; with its picture.

Two federations are used: the paper's synthetic mixture, for which the best possible accuracy is known, and
handwritten digits that are made heterogeneous as in the paper.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.data.examples import SIDE, WHITE, Digits, heterogeneous_digits
from fedgmm.data.synthetic import synthetic
from fedgmm.methods.base import TITLES
from fedgmm.model.model import FederatedModel
from fedgmm.model.novelty import NoveltyMetrics, novelty_metrics
from fedgmm.report.plots import COLOURS, INK
from fedgmm.runs.comparison import LEARNER_TITLES, LEARNERS, Notify, compare
from fedgmm.runs.ranking import Ranking, Standing, rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FloatArray = NDArray[np.float64]

_GRID = (10**-0.5, 10**-1.0, 10**-1.5, 10**-2.0)
METHODS = ("local", "fedavg", "fedavg+", "fedem", "fedgmm")
_GREY = "#8A9AA6"
_IMAGES_SHOWN = 6


@dataclass(frozen=True)
class Newcomer:
    """Accuracy of a client that did not take part in training.

    Attributes:
        rows: number of rows that its weights were learned from.
        milliseconds: time that learning the weights took.
        before: accuracy on its other rows with the federation's weights.
        labelled: accuracy with weights learned from labelled rows.
        unlabelled: accuracy with weights learned from the inputs alone.
    """

    rows: int
    milliseconds: float
    before: float
    labelled: float
    unlabelled: float


@dataclass(frozen=True)
class Novelty:
    """Scores of known images and of shrunken, novel ones.

    Attributes:
        known: ``log P(x)`` of test images, ``(n,)``.
        novel: ``log P(x)`` of novel images, ``(n,)``.
        metrics: separation of the two groups by ``log P(x)``.
        false_alarms: share of known images that were flagged.
        found: share of novel images that were flagged.
        asked: the requested false-alarm rate.
    """

    known: FloatArray
    novel: FloatArray
    metrics: NoveltyMetrics
    false_alarms: float
    found: float
    asked: float


@dataclass(frozen=True)
class Story:
    """Results of all parts of the demonstration."""

    synthetic: Ranking
    bayes: float
    digits: Ranking
    images: Digits
    newcomer: Newcomer
    novelty: Novelty


def run_story(
    seed: int = 0,
    notify: Notify = lambda _: None,
    *,
    methods: Sequence[str] = METHODS,
    rounds: int = 50,
) -> Story:
    """Compare the methods on both federations, then adapt a new client and detect novel images.

    Args:
        seed: of all random numbers.
        notify: called with a line before each step.
        methods: to compare; FedGMM must be one of them.
        rounds: of each training run.
    """
    shared: dict[str, Any] = {"grid": _GRID, "rounds": rounds, "seed": seed}
    notify("synthetic clients")
    federation = synthetic(20, 600, seed=seed)
    on_synthetic = compare(
        federation.dataset,
        methods,
        notify=lambda line: notify(f"synthetic clients, {line}"),
        **shared,
    )
    notify("handwritten digits")
    digits = heterogeneous_digits(seed=seed)
    on_digits = compare(
        digits.dataset,
        methods,
        components=2,
        learners=2,
        reg_covar=0.1,  # 64 columns and a thousand rows: pixels that are rarely set vary little
        notify=lambda line: notify(f"handwritten digits, {line}"),
        **shared,
    )
    model = next(one.model for one in on_digits.contestants if one.algorithm == "fedgmm")
    return Story(
        rank([on_synthetic], [seed]),
        federation.bayes_accuracy(),
        rank([on_digits], [seed]),
        digits,
        adapt_newcomer(model, digits),
        find_novel_images(model, digits),
    )


def adapt_newcomer(model: FederatedModel, digits: Digits) -> Newcomer:
    """Learn a new client's weights from half of its rows and test on the other half."""
    x, y = digits.newcomer
    half = len(x) // 2
    before = float((model.predict(x[half:]) == y[half:]).mean())
    started = time.perf_counter()
    model.adapt("newcomer", x[:half], y[:half])
    seconds = time.perf_counter() - started
    labelled = float((model.predict(x[half:], "newcomer") == y[half:]).mean())
    model.adapt("newcomer without labels", x[:half])
    unlabelled = float((model.predict(x[half:], "newcomer without labels") == y[half:]).mean())
    return Newcomer(half, 1000 * seconds, before, labelled, unlabelled)


def find_novel_images(model: FederatedModel, digits: Digits, asked: float = 0.05) -> Novelty:
    """Score test images, and the same images at half their size, rotated and flipped."""
    rows = digits.dataset.test
    known = rows.inputs.numpy()
    novel = shrink(known)
    on_known = model.novelty(known, false_alarm_rate=asked)
    on_novel = model.novelty(novel, false_alarm_rate=asked)
    return Novelty(
        on_known.scores,
        on_novel.scores,
        novelty_metrics(on_known.scores, on_novel.scores),
        float(on_known.novel.mean()),
        float(on_novel.novel.mean()),
        asked,
    )


def shrink(images: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return images ``(n, 64)`` at half their size, rotated and flipped, on their own background."""
    squares = images.reshape(-1, SIDE, SIDE)
    small = squares.reshape(-1, SIDE // 2, 2, SIDE // 2, 2).mean((2, 4))
    light = squares[:, 0, 0] > WHITE / 2
    canvas = np.where(light[:, None, None], WHITE, 0.0) * np.ones((1, SIDE, SIDE))
    edge = SIDE // 4
    canvas[:, edge:-edge, edge:-edge] = np.rot90(small, axes=(1, 2))[:, :, ::-1]
    return canvas.reshape(len(images), -1).astype(np.float32)


def plot_story(story: Story, path: Path) -> Path:
    """Draw accuracies on both federations, some images, and the scores of known and novel images."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 7.6), layout="constrained")
    axes = figure.subplot_mosaic([["synthetic", "digits"], ["images", "novelty"]])
    _draw_accuracies(axes["synthetic"], story.synthetic, {"best possible": story.bayes})
    axes["synthetic"].set_title("Synthetic mixture: test accuracy (%), mean over clients", pad=16)
    _draw_accuracies(axes["digits"], story.digits, {})
    axes["digits"].set_title("Handwritten digits, half of them changed", pad=16)
    _draw_images(axes["images"], story)
    _draw_novelty(axes["novelty"], story.novelty)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    return path


def _draw_accuracies(axes: Axes, ranking: Ranking, lines: Mapping[str, float]) -> None:
    """Draw two bars per method, one per learner, and a dashed line for each value in ``lines``.

    FedGMM is in colour. The learner that validation rows chose has a 95 % interval.
    """
    standings = ranking.standings
    height = 0.8 / len(LEARNERS)
    for row, one in enumerate(standings):
        colour = COLOURS[0] if one.algorithm == "fedgmm" else _GREY
        for number, kind in enumerate(LEARNERS):
            place = row + (number - 0.5) * height
            value = 100.0 * one.by_learner[kind]
            chosen = kind in one.learners
            axes.barh(place, value, 0.9 * height, color=colour, alpha=1.0 if chosen else 0.45)
            reach = 50.0 * (one.value.high - one.value.low) if chosen else 0.0
            axes.errorbar(value, place, xerr=reach or None, color=INK, capsize=2, linewidth=1)
            label = f"{value:.1f} {LEARNER_TITLES[kind]}"
            text = axes.text(value + reach + 1.5, place, label, va="center", color=INK, fontsize=9)
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    names = [
        TITLES[one.algorithm] + ("\n(tie)" if _ties(ranking, one) else "") for one in standings
    ]
    axes.set_yticks(range(len(standings)), names)
    for label, value in lines.items():
        axes.axvline(100.0 * value, color=COLOURS[1], linestyle="--", linewidth=1.5)
        top = len(names) - 0.45
        axes.text(100.0 * value, top, f"{label} {100.0 * value:.1f}", color=COLOURS[1], ha="center")
    axes.set_xlim(0, 122)
    axes.set_xticks([])
    _frameless(axes)


def _ties(ranking: Ranking, one: Standing) -> bool:
    return len(ranking.tied) > 1 and one in ranking.tied


def _draw_images(axes: Axes, story: Story) -> None:
    """Draw one line each of plain, changed and novel images."""
    images, changed = story.images.images, story.images.changed
    plain = images[~changed][:_IMAGES_SHOWN]
    rows = [plain, images[changed][:_IMAGES_SHOWN], shrink(plain)]
    sheet = np.concatenate(
        [
            np.concatenate(
                [np.pad(image.reshape(SIDE, SIDE), 1, constant_values=8) for image in row], 1
            )
            for row in rows
        ]
    )
    axes.imshow(sheet, cmap="gray_r", interpolation="nearest")
    height = SIDE + 2
    axes.set_yticks(
        [height * (k + 0.5) - 0.5 for k in range(3)],
        ["plain", "changed,\nother labels", "novel"],
    )
    axes.set_xticks([])
    axes.set_title("Images of the clients, and novel images")
    _frameless(axes)


def _draw_novelty(axes: Axes, novelty: Novelty) -> None:
    scores = np.concatenate([novelty.known, novelty.novel])
    low, high = np.quantile(scores, [0.01, 1.0])
    edges = np.linspace(low, high, 50).tolist()
    for values, colour, label in (
        (novelty.known, COLOURS[0], "known"),
        (novelty.novel, COLOURS[1], "novel"),
    ):
        axes.hist(values.clip(low, high), edges, color=colour, alpha=0.75, label=label)
    axes.set_title(
        f"log P(x) of known and novel images: AUROC {novelty.metrics.auroc:.3f},\n"
        f"{100 * novelty.found:.0f} % found at {100 * novelty.asked:.0f} % false alarms"
    )
    axes.set_yticks([])
    axes.legend(frameon=False)
    _frameless(axes)


def _frameless(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, colors=INK)
