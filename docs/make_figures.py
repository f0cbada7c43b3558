"""Draw the pictures of the documentation, and compute the numbers of aggregation.md: ``make figures``.

``python docs/make_figures.py concepts`` draws those of concepts.md alone.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from sklearn.mixture import GaussianMixture

from fedgmm import FederatedDataset, FederatedGaussianMixture, train
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


# ---------------------------------------------------------------------- concepts.md

CENTRES = np.array([[0.0, 0.0], [4.5, 0.5], [1.5, 4.0]])
FACTORS = np.array([[[1.1, 0.5], [0.0, 0.6]], [[0.8, 0.0], [0.4, 0.9]], [[1.2, -0.6], [0.0, 0.5]]])


def rows_of(shares: list[float], rows: int, seed: int) -> tuple[FloatArray, NDArray[np.int64]]:
    """Draw rows ``(rows, 2)`` of a client with these shares of three Gaussians, and their sources."""
    generator = np.random.default_rng(seed)
    source = generator.choice(3, rows, p=shares)
    noise = generator.standard_normal((rows, 2, 1))
    return CENTRES[source] + (FACTORS[source] @ noise)[..., 0], source


def sketch(columns: int = 1, height: float = 2.6) -> tuple[Figure, list[Axes]]:
    """Return a small figure and its axes without a frame."""
    figure = Figure(figsize=(7.0, height), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, columns)).tolist()
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(colors=INK)
    return figure, axes


def draw_mixture() -> Figure:
    """Draw two clients with different shares of the same three Gaussians."""
    figure, axes = sketch(2)
    for one, name, shares in zip(
        axes, ("client A", "client B"), ([0.7, 0.25, 0.05], [0.1, 0.3, 0.6]), strict=True
    ):
        rows, source = rows_of(shares, 250, 1)
        one.scatter(*rows.T, s=6, c=[COLOURS[m] for m in source], alpha=0.6, linewidths=0)
        for m, (mean, factor) in enumerate(zip(CENTRES, FACTORS, strict=True)):
            draw_ellipses(one, mean, factor @ factor.T, COLOURS[m])
        one.set(title=name, xlabel="first input", ylabel="second input", xlim=(-4, 8), ylim=(-3, 7))
    return figure


def draw_weights_bars() -> Figure:
    """Draw the weights of some clients as stacked bars."""
    figure, (axes,) = sketch()
    names = ["oslo", "trondheim", "stavanger", "tromso", "drammen", "bodo"]
    weights = np.random.default_rng(4).dirichlet([0.6] * 3, len(names))
    left = np.zeros(len(names))
    for m in range(3):
        axes.barh(
            names[::-1], weights[::-1, m], left=left[::-1], color=COLOURS[m], label=f"pair {m + 1}"
        )
        left += weights[:, m]
    axes.set(xlabel="weight of each pair of Gaussian and learner", xlim=(0, 1))
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def draw_round() -> Figure:
    """Draw a server, three clients and the messages of a round."""
    figure, (axes,) = sketch(height=3.0)
    axes.set(xlim=(0, 10), ylim=(0, 5))
    axes.axis("off")

    def box(x: float, y: float, width: float, text: str, colour: str) -> None:
        shape = FancyBboxPatch(
            (x, y), width, 0.9, boxstyle="round,pad=0.12", fc=colour, ec=INK, lw=0.8
        )
        axes.add_patch(shape)
        axes.text(x + width / 2, y + 0.45, text, ha="center", va="center", fontsize=9.5, color=INK)

    box(2.6, 3.7, 4.8, "server: adds the sums, computes\nnew Gaussians and learners", "#dbeafe")
    for x, name in ((0.3, "oslo"), (3.75, "bergen"), (7.2, "tromso")):
        box(x, 0.3, 2.5, f"{name}: rows and\nits weights stay here", "#fde68a")
        for shift, style in ((-0.2, "-|>"), (0.2, "<|-")):
            middle = x + 1.25 + shift
            arrow = FancyArrowPatch(
                (middle, 1.35),
                (4.4 + (x - 0.3) / 6.9 * 1.2 + shift, 3.55),
                arrowstyle=style,
                mutation_scale=12,
                color=COLOURS[0] if shift < 0 else COLOURS[1],
                lw=1.4,
            )
            axes.add_patch(arrow)
    axes.text(0.6, 2.5, "sums", color=COLOURS[0], fontsize=10)
    axes.text(9.4, 2.5, "shared parameters", color=COLOURS[1], fontsize=10, ha="right")
    return figure


def draw_density() -> Figure:
    """Draw contours of a client's density over its rows."""
    figure, (axes,) = sketch(height=3.0)
    rows, _ = rows_of([0.6, 0.3, 0.1], 300, 2)
    model = FederatedGaussianMixture(3, random_state=0).fit({"oslo": rows})
    across, up = np.meshgrid(np.linspace(-5, 9, 80), np.linspace(-4, 7, 60))
    grid = np.column_stack([across.ravel(), up.ravel()])
    height = model.score_samples(grid, client="oslo").reshape(across.shape)
    drawn = axes.contourf(
        across, up, height, levels=[-16, -12, -9, -7, -5, -4, -3, -2], cmap="Blues", extend="min"
    )
    axes.scatter(*rows.T, s=5, color=INK, alpha=0.5, linewidths=0)
    axes.scatter([7.5], [5.5], marker="x", s=60, color=COLOURS[1])
    axes.annotate("novel: low density", (7.3, 5.5), ha="right", va="center", color=COLOURS[1])
    axes.set(xlabel="first input", ylabel="second input")
    figure.colorbar(drawn, label="log P(x)")
    return figure


def draw_new_client() -> Figure:
    """Draw the weights of a new client by the number of its labelled rows."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(1200, 4))
    clients = np.repeat(["oslo", "bergen", "tromso"], 400)
    y = np.where(clients == "tromso", x[:, 0] < 0, x[:, 0] > 0)
    model = train(FederatedDataset.from_arrays(x, y, clients), components=1, learners=2, rounds=30)
    new = generator.normal(size=(540, 4))
    labels = new[:, 0] < 0  # the labels of tromso
    counts = [0, 1, 2, 3, 5, 8, 12, 20, 40]
    weights, right = [], []
    for rows in counts:
        if rows:
            adapted = model.adapt("narvik", new[:rows], labels[:rows])
            weights.append(adapted.weights.ravel())
        else:
            weights.append(np.average(model.client_weights, axis=0).ravel())
        right.append((model.predict(new[40:], "narvik" if rows else None) == labels[40:]).mean())
    figure, axes = sketch(2)
    for m, values in enumerate(np.array(weights).T):
        axes[0].plot(range(len(counts)), values, "o-", color=COLOURS[m], label=f"learner {m + 1}")
    axes[0].set(title="weights of the new client", ylim=(0, 1.02), ylabel="weight")
    axes[0].legend(frameon=False)
    axes[1].plot(range(len(counts)), 100 * np.array(right), "o-", color=COLOURS[2])
    axes[1].set(title="right predictions", ylim=(0, 102), ylabel="% of 500 other rows")
    for one in axes:
        one.set_xticks(range(len(counts)), [str(rows) for rows in counts])
        one.set_xlabel("labelled rows")
    return figure


def draw_novelty() -> Figure:
    """Draw the densities of held-out rows, the threshold, and novel rows."""
    figure, (axes,) = sketch()
    rows, _ = rows_of([0.5, 0.3, 0.2], 900, 3)
    model = FederatedGaussianMixture(3, random_state=0).fit({"oslo": rows[:600]})
    held_out = model.score_samples(rows[600:], client="oslo")
    novel = model.score_samples(rows[:80] + np.array([1.0, -3.0]), client="oslo").clip(-15)
    threshold = float(np.quantile(held_out, 0.05))
    edges = np.linspace(-15, -1, 57).tolist()
    axes.hist(held_out.clip(-15), edges, color=COLOURS[0], alpha=0.8, label="held-out rows")
    axes.hist(novel, edges, color=COLOURS[1], alpha=0.8, label="novel rows")
    axes.axvline(threshold, color=INK, linestyle="--")
    text = "5 % of held-out rows\nare left of this line"
    height = axes.get_ylim()[1]
    axes.text(threshold - 0.15, 0.8 * height, text, ha="right", color=INK, fontsize=9)
    axes.set(xlabel="log P(x)", ylabel="rows")
    axes.legend(frameon=False, loc="upper left")
    return figure


def draw_concepts() -> list[Path]:
    """Write the pictures of concepts.md as SVG files that are the same on every run."""
    pictures = {
        "mixture": draw_mixture,
        "weights": draw_weights_bars,
        "round": draw_round,
        "density": draw_density,
        "new-client": draw_new_client,
        "novelty": draw_novelty,
    }
    folder = IMAGES / "concepts"
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with rc_context({"svg.hashsalt": "fedgmm", "font.size": 10.0, "axes.titlesize": 11.0}):
        for name, drawing in pictures.items():
            written.append(folder / f"{name}.svg")
            drawing().savefig(written[-1], metadata={"Date": None})
    return written


def main() -> None:
    """Print the numbers of aggregation.md and write all pictures."""
    console = Console(width=110)
    for picture in draw_concepts():
        console.print(f"{picture.name}: {picture.stat().st_size / 1024:.0f} KB")
    if sys.argv[1:] == ["concepts"]:
        return
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
