"""Novel rows with a guaranteed false-alarm rate.

The threshold comes from held-out rows, so ordinary rows are flagged at the rate that was asked
for, whether or not the Gaussians fit: here the inputs are not Gaussian at all. Novel rows come
from a place that no client has.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from fedgmm import FederatedDataset, train


def draw(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw rows on a ring, and their labels."""
    angle = rng.uniform(0, 2 * np.pi, rows)
    radius = 3 + rng.exponential(0.3, rows)
    return np.column_stack([radius * np.cos(angle), radius * np.sin(angle)]), angle < np.pi


def main(out: Path) -> None:
    """Compare asked and realised rates on fresh rows, and on novel rows inside the ring."""
    rng = np.random.default_rng(0)
    X, y = draw(rng, 3000)
    dataset = FederatedDataset.from_arrays(X, y, np.repeat([f"site {c}" for c in range(6)], 500))
    model = train(dataset, components=4, learners=1, rounds=20)
    fresh, _ = draw(rng, 5000)
    novel = rng.normal(0, 0.7, (1000, 2))
    asked = np.array([0.01, 0.02, 0.05, 0.1, 0.2])
    shares = {
        name: [model.novelty(rows, false_alarm_rate=rate).novel.mean() for rate in asked]
        for name, rows in (("ordinary rows", fresh), ("novel rows", novel))
    }

    figure, (plane, rates) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    plane.scatter(*fresh[:800].T, s=4, label="ordinary")
    plane.scatter(*novel[:200].T, s=4, label="novel")
    plane.set(xlabel="first input", ylabel="second input", aspect="equal")
    plane.legend()
    for name, values in shares.items():
        rates.plot(100 * asked, 100 * np.array(values), "o-", label=name)
    rates.plot([1, 100], [1, 100], "k:", label="asked = realised")
    rates.set(
        xscale="log",
        yscale="log",
        xlabel="false alarms asked for (%)",
        xlim=(0.8, 30),
        ylim=(0.5, 130),
    )
    rates.set_ylabel("rows flagged (%)")
    rates.legend()
    figure.savefig(out, dpi=80)
    print({name: np.round(values, 3).tolist() for name, values in shares.items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("novelty.png"), help="the picture")
    main(parser.parse_args().out)
