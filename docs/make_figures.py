"""Compute the numbers and the picture of aggregation.md, and draw the demo's pictures for the README.

python docs/make_figures.py
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from sklearn.mixture import GaussianMixture

from fedgmm import FederatedGaussianMixture
from fedgmm.experiments.demo import plot_demo, run_demo
from fedgmm.experiments.story import plot_story, run_story
from fedgmm.report.plots import COLOURS, INK, draw_ellipses

IMAGES = Path(__file__).parent / "images"
FloatArray = NDArray[np.float64]

ROUNDS = 30
EXACT, PAPER, POOLED = "exact", "paper", "scikit-learn, pooled"

# Two components in the plane: one long and flat, one round above it.
MEANS = np.array([[0.0, 0.0], [0.0, 4.5]])
VARIANCES = np.array([[9.0, 0.49], [1.0, 1.0]])


@dataclass(frozen=True)
class Case:
    """Rows of some clients, and held-out rows that no fit uses."""

    name: str
    rows: FloatArray
    clients: NDArray[np.int64]
    held_out: FloatArray


@dataclass(frozen=True)
class Outcome:
    """The mixture found with one way of aggregating."""

    means: FloatArray
    covariances: FloatArray
    held_out: float
    by_round: list[float]


def draw(rows: int, generator: np.random.Generator) -> tuple[FloatArray, NDArray[np.int64]]:
    """Draw rows ``(N, 2)`` and their components, two thirds from the long one."""
    labels = (generator.uniform(size=rows) < 1 / 3).astype(np.int64)
    noise = generator.standard_normal((rows, 2))
    return MEANS[labels] + noise * np.sqrt(VARIANCES[labels]), labels


def sliced_clients(blur: float, clients: int = 6, rows: int = 1800) -> Case:
    """Give every client one part of the long component, cut along the first column.

    ``blur`` is the standard deviation of the cuts: with 0 the parts do not overlap.
    """
    generator = np.random.default_rng(0)
    x, labels = draw(rows, generator)
    owner = generator.integers(clients, size=rows)
    long = np.flatnonzero(labels == 0)
    along = long[np.argsort(x[long, 0] + blur * generator.standard_normal(len(long)))]
    owner[along] = np.arange(len(along)) * clients // len(along)
    name = f"{clients} clients, each with a part of the long component, cuts blurred by {blur:g}"
    return Case(name, x, owner, draw(20_000, generator)[0])


def mixed_clients(clients: int, rows_each: int) -> Case:
    """Make clients that differ only in their weights of the components."""
    generator = np.random.default_rng(1)
    owner = np.repeat(np.arange(clients), rows_each)
    share = generator.dirichlet([0.4, 0.4], size=clients)[:, 1]
    labels = (generator.uniform(size=len(owner)) < share[owner]).astype(np.int64)
    noise = generator.standard_normal((len(owner), 2))
    x = MEANS[labels] + noise * np.sqrt(VARIANCES[labels])
    name = f"only weights differ, {clients:,} clients of {rows_each:,} rows"
    return Case(name, x, owner, draw(20_000, generator)[0])


def fit_all(case: Case) -> dict[str, Outcome]:
    """Fit three mixtures with common weights from the same start for the same number of rounds."""
    start: dict[str, Any] = {
        "weights_init": [0.5, 0.5],
        "means_init": MEANS + 0.5,
        "precisions_init": np.stack([np.eye(2)] * 2),
        "max_iter": ROUNDS,
        "tol": 0.0,
    }
    models: dict[str, Any] = {
        way: FederatedGaussianMixture(2, shared_weights=True, aggregation=way, **start).fit(
            case.rows, clients=case.clients
        )
        for way in (EXACT, PAPER)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models[POOLED] = GaussianMixture(2, **start).fit(case.rows)
    return {
        way: Outcome(
            model.means_, model.covariances_, model.score(case.held_out), model.lower_bounds_
        )
        for way, model in models.items()
    }


def print_case(case: Case, found: dict[str, Outcome], console: Console) -> None:
    """Print variances of both components, held-out log-likelihood, and rounds that decreased it."""
    table = Table(title=case.name, title_justify="left")
    table.add_column("aggregation")
    for heading in (
        "long axis",
        "short axis",
        "round",
        "held-out",
        "rounds that fell",
        "off exact",
    ):
        table.add_column(heading, justify="right")
    table.add_row("truth", f"{VARIANCES[0, 0]:.3f}", f"{VARIANCES[0, 1]:.3f}", "1.000", "", "", "")
    for way, outcome in found.items():
        difference = outcome.covariances - found[EXACT].covariances
        off = np.abs(difference).max() / np.abs(found[EXACT].covariances).max()
        fell = int((np.diff(outcome.by_round) < -1e-12).sum())
        table.add_row(
            way,
            f"{outcome.covariances[0, 0, 0]:.3f}",
            f"{outcome.covariances[0, 1, 1]:.3f}",
            f"{np.trace(outcome.covariances[1]) / 2:.3f}",
            f"{outcome.held_out:.3f}",
            f"{fell} of {ROUNDS - 1}",
            f"{off:.1e}",
        )
    console.print(table)


def draw_case(case: Case, found: dict[str, Outcome], path: Path) -> Path:
    """Draw rows by client with the three mixtures, and the log-likelihood by round."""
    figure = Figure(figsize=(10.0, 4.0), layout="constrained")
    plane, curve = figure.subplots(1, 2, width_ratios=(1.6, 1.0))
    shades = np.array(["#9ecae1", "#fdae6b", "#a1d99b", "#bcbddc", "#f4a6bf", "#bdbdbd"])
    plane.scatter(*case.rows.T, s=7, c=shades[case.clients % len(shades)], linewidths=0)
    styles: dict[str, tuple[str, Any]] = {
        EXACT: (COLOURS[0], "-"),
        PAPER: (COLOURS[1], "-"),
        POOLED: (INK, (0, (1, 3))),
    }
    for way, (colour, style) in styles.items():
        label = {EXACT: 'aggregation="exact"', PAPER: 'aggregation="paper"'}.get(way, way)
        for mean, covariance in zip(found[way].means, found[way].covariances, strict=True):
            draw_ellipses(plane, mean, covariance, colour, style)
        plane.plot([], [], color=colour, linestyle=style, linewidth=2, label=label)
        curve.plot(range(1, ROUNDS + 1), found[way].by_round, color=colour, linestyle=style, lw=2)
    plane.set_aspect("equal", adjustable="datalim")
    plane.set_title("Six clients, each with a part of the long component", color=INK)
    figure.legend(
        *plane.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
    )
    curve.set_title("Log-likelihood per row, by round", color=INK)
    for axes in (plane, curve):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100)
    return path


def main() -> None:
    """Print the numbers of the page and write the pictures."""
    console = Console(width=110)
    drawn = sliced_clients(blur=1.0)
    cases = (drawn, sliced_clients(blur=0.0), mixed_clients(20, 500), mixed_clients(1000, 10))
    found = {case.name: fit_all(case) for case in cases}
    for case in cases:
        print_case(case, found[case.name], console)
    for picture in (
        draw_case(drawn, found[drawn.name], IMAGES / "aggregation.png"),
        plot_demo(run_demo(), IMAGES / "demo.png"),
        plot_story(run_story(), IMAGES / "story.png"),
    ):
        console.print(f"{picture.name}: {picture.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
