"""The one-dimensional illustration of the paper's introduction.

Two components: ``N(-2, 1.5)`` with ``y = 1{x < -2}`` and ``N(2, 1.5)`` with ``y = 1{x < 2}``. A method
that assumes the same input distribution everywhere mixes both rules with the same weights at every ``x``.
The density shows which rule applies at a given ``x``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from fedgmm.data.dataset import FederatedDataset
from fedgmm.experiments.tables import markdown_table, write_results
from fedgmm.report.plots import COLOURS, INK
from fedgmm.training.local import train

FloatArray = NDArray[np.float64]

CENTRES = np.array([-2.0, 2.0])
DEVIATION = float(np.sqrt(1.5))


@dataclass(frozen=True)
class Illustration:
    """Class probabilities of two methods on a line.

    Attributes:
        grid: points on the line, ``(n,)``.
        truth: ``P(y = 1|x)`` of a client with equal weights, ``(n,)``.
        curves: ``P(y = 1|x)`` by method, ``(n,)`` each.
        accuracy: test accuracy by method, and under ``"bayes"`` that of Bayes' rule.
    """

    grid: FloatArray
    truth: FloatArray
    curves: dict[str, FloatArray]
    accuracy: dict[str, float]


def illustrate(clients: int = 20, rows: int = 500, seed: int = 0) -> Illustration:
    """Fit FedEM and FedGMM to clients that have equal weights for both components."""
    generator = np.random.default_rng(seed)
    total = clients * rows
    z = generator.integers(2, size=total)
    x = generator.normal(CENTRES[z], DEVIATION)
    y = (x < CENTRES[z]).astype(np.int64)
    dataset = FederatedDataset.from_arrays(
        x[:, None], y, np.repeat(np.arange(clients), rows), seed=seed
    )
    grid = np.linspace(-7.0, 7.0, 561)
    curves, accuracy = {}, {}
    for name in ("fedem", "fedgmm"):
        model = train(dataset, name, components=2, learners=2, rounds=200, seed=seed)
        curves[name] = model.predict_proba(grid[:, None])[:, 1]
        accuracy[name] = model.evaluate("test").mean_accuracy
    test = dataset.test.inputs.numpy()[:, 0]
    right = (_truth(test) > 0.5).astype(np.int64) == dataset.test.labels.numpy()
    accuracy["bayes"] = float(right.mean())
    return Illustration(grid, _truth(grid), curves, accuracy)


def _truth(x: FloatArray) -> FloatArray:
    densities = norm.pdf(x[:, None], CENTRES, DEVIATION)
    return np.asarray((densities * (x[:, None] < CENTRES)).sum(-1) / densities.sum(-1))


def reproduce_illustration(folder: Path, seed: int = 0) -> Illustration:
    """Write the figure and its numbers into a folder."""
    result = illustrate(seed=seed)
    names = {"fedem": "FedEM", "fedgmm": "FedGMM", "bayes": "Bayes, true parameters"}
    markdown = "# Two rules on a line: test accuracy\n\n" + markdown_table(
        ["method", "accuracy (%)"],
        [[names[name], f"{100 * value:.2f}"] for name, value in result.accuracy.items()],
    )
    write_results(folder, "illustration", {"seed": seed, "accuracy": result.accuracy}, markdown)
    plot_illustration(result, folder / "illustration.png")
    return result


def plot_illustration(result: Illustration, path: Path) -> Path:
    """Draw ``P(y = 1|x)`` of both methods and the truth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = {
        "fedem": "FedEM: one input density for all",
        "fedgmm": "FedGMM: a density per component",
    }
    for axes, (name, curve) in zip(panels, result.curves.items(), strict=True):
        axes.plot(result.grid, result.truth, color="#B8C4CE", linewidth=5, label="truth")
        axes.plot(result.grid, curve, color=COLOURS[0], linewidth=1.8, label="learned")
        axes.set_title(f"{titles[name]} ({100 * result.accuracy[name]:.1f} %)")
        axes.set_xlabel("x")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0, colors=INK)
    panels[0].set_ylabel("P(y = 1 | x)")
    panels[1].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    return path
