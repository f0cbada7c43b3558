"""The whole story in under a minute: methods compared, an unseen client, novel samples.

Two federations: the paper's synthetic mixture, whose best possible accuracy is known, and real
handwritten digits made heterogeneous as in the paper.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgmm.data.examples import SIDE, WHITE, Digits, heterogeneous_digits
from fedgmm.data.synthetic import synthetic
from fedgmm.methods.base import TITLES
from fedgmm.model.model import FederatedModel
from fedgmm.model.novelty import NoveltyMetrics, novelty_metrics
from fedgmm.runs.comparison import Comparison, Notify, compare

FloatArray = NDArray[np.float64]

_GRID = (10**-0.5, 10**-1.0, 10**-1.5, 10**-2.0)
_QUICK = ("local", "fedavg", "fedem", "fedgmm")


@dataclass(frozen=True)
class Newcomer:
    """A client that was not there in training.

    Attributes:
        rows: that its weights were learned from.
        milliseconds: that learning took.
        before: accuracy on its other rows with the federation's weights.
        labelled: with weights learned from labelled rows.
        unlabelled: with weights learned from the inputs alone.
    """

    rows: int
    milliseconds: float
    before: float
    labelled: float
    unlabelled: float


@dataclass(frozen=True)
class Novelty:
    """Known images beside shrunken ones that nobody has seen.

    Attributes:
        known: ``log P(x)`` of test images, ``(n,)``.
        novel: of novel ones, ``(n,)``.
        metrics: of telling them apart by ``log P(x)``.
        false_alarms: share of known images that were flagged.
        found: share of novel images that were flagged.
        asked: false-alarm rate that was asked for.
    """

    known: FloatArray
    novel: FloatArray
    metrics: NoveltyMetrics
    false_alarms: float
    found: float
    asked: float


@dataclass(frozen=True)
class Story:
    """Everything the demonstration shows."""

    synthetic: Comparison
    bayes: float
    digits: Comparison
    images: Digits
    newcomer: Newcomer
    novelty: Novelty


def tell_story(seed: int = 0, notify: Notify = lambda _: None) -> Story:
    """Run all acts."""
    notify("synthetic clients")
    federation = synthetic(40, 600, seed=seed)
    on_synthetic = compare(
        federation.dataset,
        _QUICK,
        grid=_GRID,
        tuning_rounds=5,
        rounds=40,
        seed=seed,
        notify=lambda line: notify(f"synthetic clients, {line}"),
    )
    notify("handwritten digits")
    digits = heterogeneous_digits(seed=seed)
    on_digits = compare(
        digits.dataset,
        TITLES,
        grid=_GRID,
        tuning_rounds=10,
        rounds=40,
        seed=seed,
        components=2,
        learners=2,
        reg_covar=0.1,  # 64 columns, a thousand rows: rare pixels need a wide berth
        notify=lambda line: notify(f"handwritten digits, {line}"),
    )
    model = on_digits.contestants[-1].model
    return Story(
        on_synthetic,
        federation.bayes_accuracy(),
        on_digits,
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
    """Test images as they are, and the same images at half their size, turned and flipped."""
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
    """Images ``(n, 64)`` at half their size on the background of their corners, turned and flipped."""
    squares = images.reshape(-1, SIDE, SIDE)
    small = squares.reshape(-1, SIDE // 2, 2, SIDE // 2, 2).mean((2, 4))
    light = squares[:, 0, 0] > WHITE / 2
    canvas = np.where(light[:, None, None], WHITE, 0.0) * np.ones((1, SIDE, SIDE))
    edge = SIDE // 4
    canvas[:, edge:-edge, edge:-edge] = np.rot90(small, axes=(1, 2))[:, :, ::-1]
    return canvas.reshape(len(images), -1).astype(np.float32)
