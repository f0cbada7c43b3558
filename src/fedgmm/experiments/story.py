"""Second part of ``fedgmm demo``: methods compared, a new client, novel samples; with its picture.

Three federations are used: the paper's synthetic mixture, for which the best possible accuracy is known;
handwritten digits that are made heterogeneous as in the paper; and offices that give the same digits
different labels, which a new client's weights have to find out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.examples import SIDE, WHITE, Digits, heterogeneous_digits
from fedgmm.data.synthetic import synthetic
from fedgmm.methods.base import TITLES
from fedgmm.model.model import FederatedModel
from fedgmm.model.novelty import NoveltyMetrics, novelty_metrics
from fedgmm.report.plots import COLOURS, INK, quiet, save_figure
from fedgmm.runs.comparison import LEARNER_TITLES, LEARNERS, Notify, compare
from fedgmm.runs.ranking import Ranking, rank
from fedgmm.training.in_process import train

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FloatArray = NDArray[np.float64]

_GRID = (10**-0.5, 10**-1.0, 10**-1.5, 10**-2.0)
METHODS = ("local", "fedavg", "fedavg+", "fedem", "fedgmm")
_GREY = "#8A9AA6"
_IMAGES_SHOWN = 5
_FALSE_ALARMS = 0.05
_OFFICES, _LATER = 12, 4
LABELLED_ROWS = (1, 2, 3, 5, 10, 20, 40)


@dataclass(frozen=True)
class Newcomer:
    """Accuracy of a client that did not take part in training."""

    rows: int  # number of labelled rows that its weights were learned from
    before: float  # accuracy on its other rows with the federation's weights
    labelled: float  # accuracy on them with its own weights


@dataclass(frozen=True)
class NewOffices:
    """Accuracy of offices that join later and label the same images by one of two lists."""

    offices: int  # number of new offices; accuracies are means over them
    before: float  # accuracy with the federation's weights
    labelled: list[float]  # accuracy with weights learned from ``LABELLED_ROWS`` labelled images
    unlabelled: list[float]  # accuracy with weights learned from as many images without labels
    alone: list[float]  # accuracy of logistic regression on the same labelled images
    milliseconds: float  # median time that learning the weights took

    def at(self, rows: int) -> tuple[float, float, float]:
        """Return the accuracies with labels, without labels and alone, from this number of rows."""
        place = LABELLED_ROWS.index(rows)
        return self.labelled[place], self.unlabelled[place], self.alone[place]


@dataclass(frozen=True)
class Novelty:
    """Scores of known images and of shrunken, novel ones."""

    known: FloatArray  # ``log P(x)`` of test images, ``(n,)``
    novel: FloatArray  # ``log P(x)`` of novel images, ``(n,)``
    metrics: NoveltyMetrics  # separation of the two groups by ``log P(x)``
    false_alarms: float  # share of known images that were flagged
    found: float  # share of novel images that were flagged
    asked: float  # the requested false-alarm rate


@dataclass(frozen=True)
class Story:
    """Results of all parts of the demonstration."""

    synthetic: Ranking
    bayes: float
    digits: Ranking
    images: Digits
    newcomer: Newcomer
    offices: NewOffices
    novelty: Novelty


def run_story(
    seed: int = 0,
    notify: Notify = lambda _: None,
    *,
    methods: Sequence[str] = METHODS,
    rounds: int = 50,
) -> Story:
    """Compare the methods on two federations, then adapt new clients and detect novel images.

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
    notify("new offices")
    return Story(
        rank([on_synthetic], [seed]),
        federation.bayes_accuracy(),
        rank([on_digits], [seed]),
        digits,
        adapt_newcomer(model, digits),
        join_offices(seed, rounds),
        find_novel_images(model, digits),
    )


def adapt_newcomer(model: FederatedModel, digits: Digits) -> Newcomer:
    """Learn a new client's weights from half of its rows and test on the other half."""
    x, y = digits.newcomer
    half = len(x) // 2
    before = float((model.predict(x[half:]) == y[half:]).mean())
    model.adapt("newcomer", x[:half], y[:half])
    labelled = float((model.predict(x[half:], "newcomer") == y[half:]).mean())
    return Newcomer(half, before, labelled)


def join_offices(seed: int = 0, rounds: int = 50) -> NewOffices:
    """Train offices that use two lists of labels for the same images; then four more offices join.

    Every second office adds three to each digit, so no input shows which list is right. Weights are
    learned from the first images of a new office and tested on the second half of its images.
    """
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression

    generator = np.random.default_rng(seed)
    images, digits = load_digits(return_X_y=True)
    images = images.astype(np.float32)
    office = generator.integers(_OFFICES + _LATER, size=len(images))
    labels = np.where(office % 2, (digits + 3) % 10, digits)
    taking_part = office < _OFFICES
    dataset = FederatedDataset.from_arrays(
        images[taking_part], labels[taking_part], office[taking_part], seed=seed
    )
    model = train(dataset, components=1, learners=2, reg_covar=0.1, rounds=rounds, seed=seed)
    before, seconds = [], []
    accuracy = np.empty((3, _LATER, len(LABELLED_ROWS)))  # with labels, without labels, alone
    for late in range(_LATER):
        own = office == _OFFICES + late
        x, y = images[own], labels[own]
        half = len(x) // 2
        truth = y[half:]
        before.append((model.predict(x[half:]) == truth).mean())
        for place, rows in enumerate(LABELLED_ROWS):
            started = time.perf_counter()
            model.adapt("labelled", x[:rows], y[:rows])
            seconds.append(time.perf_counter() - started)
            model.adapt("unlabelled", x[:rows])
            own_guess = np.full(len(truth), y[0])  # from images of a single class
            if len(np.unique(y[:rows])) > 1:
                fitted = LogisticRegression(max_iter=1000).fit(x[:rows] / WHITE, y[:rows])
                own_guess = fitted.predict(x[half:] / WHITE)
            guesses = [model.predict(x[half:], name) for name in ("labelled", "unlabelled")]
            accuracy[:, late, place] = [(guess == truth).mean() for guess in (*guesses, own_guess)]
    labelled, unlabelled, alone = accuracy.mean(1).tolist()
    wait = 1000 * float(np.median(seconds))
    return NewOffices(_LATER, float(np.mean(before)), labelled, unlabelled, alone, wait)


def find_novel_images(model: FederatedModel, digits: Digits) -> Novelty:
    """Score test images, and the same images at half their size, rotated and flipped."""
    rows = digits.dataset.test
    known = rows.inputs.numpy()
    novel = shrink(known)
    on_known = model.novelty(known, false_alarm_rate=_FALSE_ALARMS)
    on_novel = model.novelty(novel, false_alarm_rate=_FALSE_ALARMS)
    return Novelty(
        on_known.scores,
        on_novel.scores,
        novelty_metrics(on_known.scores, on_novel.scores),
        float(on_known.novel.mean()),
        float(on_novel.novel.mean()),
        _FALSE_ALARMS,
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
    """Draw accuracies on two federations, new clients, novel images, and images of each kind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 7.4), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(1.15, 1.0), hspace=0.04)
    above, below = parts
    synthetic_axes, digits_axes = above.subplots(1, 2)
    _draw_accuracies(synthetic_axes, story.synthetic, story.bayes)
    synthetic_axes.set_title(f"Synthetic mixture (best possible: {100 * story.bayes:.1f} %)")
    _draw_accuracies(digits_axes, story.digits)
    digits_axes.set_title("Handwritten digits, half of them changed")
    offices_axes, images_axes, novelty_axes = below.subplots(1, 3, width_ratios=(1.15, 0.8, 1.15))
    _draw_offices(offices_axes, story.offices)
    _draw_images(images_axes, story)
    _draw_novelty(novelty_axes, story.novelty)
    return save_figure(figure, path)


def _draw_accuracies(axes: Axes, ranking: Ranking, best: float | None = None) -> None:
    """Draw two bars per method, one per learner, the best method on top; ``best`` is a dashed line.

    FedGMM is in colour. The learner that validation rows chose is darker and has a 95 % interval.
    """
    standings = sorted(ranking.standings, key=lambda one: one.value.mean)
    height = 0.8 / len(LEARNERS)
    for row, one in enumerate(standings):
        colour = COLOURS[0] if one.algorithm == "fedgmm" else _GREY
        for number, kind in enumerate(LEARNERS):
            place = row + (0.5 - number) * height
            value = 100.0 * one.by_learner[kind]
            chosen = kind in one.learners
            axes.barh(place, value, 0.9 * height, color=colour, alpha=1.0 if chosen else 0.45)
            if chosen:
                reach = [[value - 100.0 * one.value.low], [100.0 * one.value.high - value]]
                axes.errorbar(value, place, xerr=reach, color=INK, capsize=2, linewidth=1)
            ink = "white" if chosen else INK
            label = f"{value:.1f}  {LEARNER_TITLES[kind]}"
            axes.text(1.5, place, label, va="center", color=ink, fontsize=9)
    tied = ranking.tied if len(ranking.tied) > 1 else []
    names = [TITLES[one.algorithm] + ("\n(tie)" if one in tied else "") for one in standings]
    axes.set_yticks(range(len(standings)), names)
    if best is not None:
        axes.axvline(100.0 * best, color=COLOURS[1], linestyle="--", linewidth=1.5)
    axes.set_xlim(0, 101)
    axes.set_xlabel("test accuracy (%), mean over clients", color=INK)
    quiet(axes, ("top", "right", "left"))


def _draw_offices(axes: Axes, offices: NewOffices) -> None:
    """Draw the accuracy of new offices by the number of their labelled images."""
    curves = (  # values, colour, style, and the place of the label
        (offices.labelled, COLOURS[0], "o-", "its weights, from labelled images", (1, -11)),
        (offices.alone, _GREY, "s-", "a model of its own,\nfrom the same images", (10, -16)),
        (offices.unlabelled, COLOURS[1], "^--", "its weights, from images alone", (1, 3)),
    )
    for values, colour, style, label, (rows, offset) in curves:
        heights = 100 * np.array(values)
        axes.plot(LABELLED_ROWS, heights, style, color=colour)
        height = heights[LABELLED_ROWS.index(rows)] + offset
        axes.text(1.1 * rows, height, label, color=INK if colour == _GREY else colour, fontsize=9)
    axes.set_xscale("log")
    axes.set_xticks(LABELLED_ROWS, [str(rows) for rows in LABELLED_ROWS])
    axes.minorticks_off()
    axes.set_ylim(0, 101)
    axes.set_xlabel("images that the new office has", color=INK)
    axes.set_ylabel("test accuracy (%)", color=INK)
    axes.set_title("New offices: same digits, other labels")
    quiet(axes, ("top", "right"))


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
        ["plain", "changed,\nother\nlabels", "novel"],
    )
    axes.set_xticks([])
    axes.set_title("Digits: plain, changed, novel")
    quiet(axes, ("top", "right", "left"))


def _draw_novelty(axes: Axes, novelty: Novelty) -> None:
    scores = np.concatenate([novelty.known, novelty.novel])
    low, high = np.quantile(scores, [0.01, 1.0])
    edges = np.linspace(low, high, 50).tolist()
    for values, colour, label in (
        (novelty.known, COLOURS[0], "known"),
        (novelty.novel, COLOURS[1], "novel"),
    ):
        axes.hist(values.clip(low, high), edges, color=colour, alpha=0.75, label=label)
    axes.set_title(f"Novel images: {100 * novelty.found:.0f} % found")
    axes.set_xlabel(
        f"log P(x), AUROC {novelty.metrics.auroc:.3f}\n"
        f"{100 * novelty.false_alarms:.1f} % false alarms of {100 * novelty.asked:.0f} % asked",
        color=INK,
    )
    axes.set_ylabel("images", color=INK)
    axes.legend(frameon=False)
    quiet(axes, ("top", "right"))
