"""Privacy against accuracy.

``Privacy(epsilon, delta, bounds)`` adds noise to the sums of the clients, so that the shared model
hides whether one row was among the data. A smaller ``epsilon`` hides more and costs accuracy; more
rows pay for it. Bounds are public knowledge, never taken from the data.
"""

import argparse
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from fedgmm import FederatedDataset, Privacy, train

BUDGETS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def clients_of(rows: int) -> FederatedDataset:
    """Draw six clients with different shares of two kinds of rows, which follow opposite rules."""
    rng = np.random.default_rng(0)
    client = rng.integers(6, size=rows)
    second = rng.random(rows) < np.linspace(0.1, 0.9, 6)[client]
    deviation = rng.normal(size=(rows, 3))
    X = np.where(second, 0.4, -0.4)[:, None] + 0.2 * deviation
    y = (deviation[:, 0] + deviation[:, 1] + 0.3 * rng.normal(size=rows) > 0) ^ second
    return FederatedDataset.from_arrays(X, y, client)


def main(out: Path) -> None:
    """Train with several budgets and numbers of rows, and draw the accuracies."""
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for number, rows in enumerate((3000, 30000)):
        dataset = clients_of(rows)
        options = {"components": 2, "learners": 2}
        plain = train(dataset, rounds=20, **options).evaluate("test").mean_accuracy
        accuracies = []
        for epsilon in BUDGETS:
            privacy = Privacy(epsilon=epsilon, delta=1e-6, bounds=(-1, 1))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # small budgets warn of their noise
                runs = [train(dataset, privacy=privacy, seed=seed, **options) for seed in range(3)]
            accuracies.append([100 * run.evaluate("test").mean_accuracy for run in runs])
        colour = f"C{number}"
        axes.plot(
            BUDGETS,
            np.mean(accuracies, 1),
            "o-",
            color=colour,
            label=f"{rows:,} rows, mean of 3 seeds",
        )
        axes.plot(np.repeat(BUDGETS, 3), np.ravel(accuracies), ".", color=colour, alpha=0.4)
        axes.axhline(
            100 * plain, color=colour, linestyle=":", label=f"{rows:,} rows, without noise"
        )
        print(rows, round(100 * plain, 1), np.mean(accuracies, 1).round(1).tolist())
    axes.set(
        xscale="log",
        xlabel="ε of the whole run (smaller is more private)",
        ylabel="test accuracy (%)",
    )
    axes.set_xticks(BUDGETS, [str(budget) for budget in BUDGETS])
    axes.minorticks_off()
    axes.legend(fontsize=9)
    figure.savefig(out, dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("privacy.png"), help="the picture")
    main(parser.parse_args().out)
