"""Pictures of the demonstration and of the paper's illustration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedgmm.methods.base import TITLES
from fedgmm.report.plots import COLOURS, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedgmm.experiments.illustration import Illustration
    from fedgmm.experiments.story import Novelty, Story
    from fedgmm.runs.comparison import Comparison

_PALE = "#B8C4CE"
_IMAGES_SHOWN = 6


def plot_story(story: Story, path: Path) -> Path:
    """Accuracies on both federations, some images, and the densities of known and novel ones."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 7.0), layout="constrained")
    axes = figure.subplot_mosaic([["synthetic", "digits"], ["images", "novelty"]])
    draw_accuracies(axes["synthetic"], story.synthetic, {"best possible": story.bayes})
    axes["synthetic"].set_title("Synthetic mixture: test accuracy (%), mean over clients", pad=16)
    draw_accuracies(axes["digits"], story.digits, {})
    axes["digits"].set_title("Handwritten digits, half of them changed", pad=16)
    _draw_images(axes["images"], story)
    _draw_novelty(axes["novelty"], story.novelty)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    return path


def draw_accuracies(axes: Axes, comparison: Comparison, lines: Mapping[str, float]) -> None:
    """One bar a method, FedGMM in colour, and dashed lines for what cannot be beaten."""
    names = [TITLES[one.algorithm] for one in comparison.contestants]
    values = [100.0 * one.summary["mean_accuracy"] for one in comparison.contestants]
    colours = [COLOURS[0] if name == TITLES["fedgmm"] else _PALE for name in names]
    bars = axes.barh(names, values, color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=3, color=INK)
    for label, value in lines.items():
        axes.axvline(100.0 * value, color=COLOURS[1], linestyle="--", linewidth=1.5)
        top = len(names) - 0.45
        axes.text(100.0 * value, top, f"{label} {100.0 * value:.1f}", color=COLOURS[1], ha="center")
    axes.set_xlim(0, 112)
    axes.set_xticks([])
    _frameless(axes)


def _draw_images(axes: Axes, story: Story) -> None:
    """Images as they were, changed ones, and novel ones, a row each."""
    from fedgmm.data.examples import SIDE
    from fedgmm.experiments.story import shrink

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
        ["as they are", "changed,\nother labels", "novel"],
    )
    axes.set_xticks([])
    axes.set_title("What the clients hold, and what nobody has seen")
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


def plot_illustration(result: Illustration, path: Path) -> Path:
    """``P(y = 1|x)`` of two methods beside the truth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"fedem": "FedEM: same inputs everywhere", "fedgmm": "FedGMM: densities decide"}
    for axes, (name, curve) in zip(panels, result.curves.items(), strict=True):
        axes.plot(result.grid, result.truth, color=_PALE, linewidth=5, label="truth")
        axes.plot(result.grid, curve, color=COLOURS[0], linewidth=1.8, label="learned")
        axes.set_title(f"{titles[name]} ({100 * result.accuracy[name]:.1f} %)")
        axes.set_xlabel("x")
        _frameless(axes)
    panels[0].set_ylabel("P(y = 1 | x)")
    panels[1].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    return path


def _frameless(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, colors=INK)
