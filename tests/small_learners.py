"""Small learners, ragged clients and their shuffled rows."""

from __future__ import annotations

import numpy as np
import torch

from fedgmm.core.params import stack

SIZES = (5, 23, 1, 12)


def drawn(net, count, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    params = stack([net.initial(generator) for _ in range(count)])
    return {name: value.to(dtype) for name, value in params.items()}


def rows(rng, sizes=SIZES, columns=3, classes=2, learners=2):
    """Inputs, labels, weights of learners and offsets of ragged clients."""
    n = sum(sizes)
    x = torch.from_numpy(rng.normal(size=(n, columns)))
    y = torch.from_numpy(rng.integers(classes, size=n))
    w = torch.from_numpy(rng.dirichlet(np.ones(learners), size=n))
    return x, y, w, torch.tensor([0, *np.cumsum(sizes)])


def shuffles(rng, sizes, epochs):
    """Permutations of all rows that keep each client's together."""
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return [
        torch.from_numpy(
            np.concatenate([o + rng.permutation(n) for o, n in zip(offsets, sizes, strict=False)])
        )
        for _ in range(epochs)
    ]
