"""A learner of your own: any torch module.

Two groups of clients draw their moons with opposite labels. The learner is a small network with
sine features, which ``train`` takes as a function without arguments. Each client gets its own
mixture of two such networks.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import make_moons
from torch import nn

from fedgmm import FederatedDataset, train


class Waves(nn.Module):
    """A network of one hidden layer whose activation is a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, 24)
        self.out = nn.Linear(24, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits ``(n, 2)`` of rows ``(n, 2)``."""
        return self.out(torch.sin(2 * self.hidden(x)))


def main(out: Path) -> None:
    """Train two mixed networks and draw the decisions of two clients."""
    X, moon = make_moons(1600, noise=0.2, random_state=0)
    clients = np.repeat([f"client {c}" for c in range(8)], 200)
    y = np.where(np.repeat(np.arange(8), 200) % 2, 1 - moon, moon)
    dataset = FederatedDataset.from_arrays(X, y, clients)
    model = train(
        dataset, learner=Waves, components=1, learners=2, rounds=40, lr=0.3, local_epochs=3
    )
    print(model.evaluate("test").headline())

    across, up = np.meshgrid(np.linspace(-2, 3, 90), np.linspace(-1.6, 2, 70))
    grid = np.column_stack([across.ravel(), up.ravel()])
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for one, name in zip(axes, ("client 0", "client 1"), strict=True):
        chance = model.predict_proba(grid, name)[:, 1].reshape(across.shape)
        one.contourf(across, up, chance, levels=np.linspace(0, 1, 11), cmap="RdBu", alpha=0.7)
        here = clients == name
        one.scatter(*X[here].T, c=y[here], cmap="RdBu", s=14, edgecolors="black", linewidths=0.4)
        one.set(title=f"{name}: P(y = 1 | x)", xlabel="first input", ylabel="second input")
    figure.savefig(out, dpi=70)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("custom_learner.png"), help="the picture")
    main(parser.parse_args().out)
