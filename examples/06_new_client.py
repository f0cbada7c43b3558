"""A new client joins with a few labelled rows.

Some sites ask whether a handwritten digit is even, others whether it is at least five. Images do
not show who asks. A new site learns only its weights: a few labelled images say which question it
has.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

from fedgmm import FederatedDataset, train

ROWS = (1, 2, 3, 5, 10, 20, 40)


def main(out: Path) -> None:
    """Train eight sites, let four more join, and draw their accuracy by labelled rows."""
    X, digit = load_digits(return_X_y=True)
    site = np.random.default_rng(0).integers(12, size=len(X))
    y = np.where(site % 2, digit % 2 == 0, digit >= 5)
    old = site < 8
    dataset = FederatedDataset.from_arrays(X[old], y[old], site[old])
    model = train(dataset, components=1, learners=2, reg_covar=0.1, rounds=30)
    print(model.evaluate("test").headline())

    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for newcomer in range(8, 12):
        rows, labels = X[site == newcomer], y[site == newcomer]
        right = [(model.predict(rows[60:]) == labels[60:]).mean()]
        for count in ROWS:
            model.adapt("new", rows[:count], labels[:count])
            right.append((model.predict(rows[60:], "new") == labels[60:]).mean())
        question = "even?" if newcomer % 2 else "at least five?"
        axes.plot(
            range(len(right)), 100 * np.array(right), "o-", label=f"site {newcomer}: {question}"
        )
    axes.set_xticks(range(len(ROWS) + 1), ["0", *map(str, ROWS)])
    axes.set(
        xlabel="labelled images of the new site",
        ylabel="right on its other images (%)",
        ylim=(30, 101),
    )
    axes.legend(loc="lower right")
    figure.savefig(out, dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("new_client.png"), help="the picture")
    main(parser.parse_args().out)
