from __future__ import annotations

import numpy as np
import torch

from fedgmm.core.mstep import client_weights
from oracles import assert_close


def test_client_weights_are_the_mean_responsibilities(rng):
    clients = [rng.dirichlet(np.ones(3), size=n) for n in (1, 7, 40)]
    counts = torch.from_numpy(np.stack([q.sum(0) for q in clients]))
    found = client_weights(counts, torch.tensor([1, 7, 40]))
    assert_close(found, np.stack([q.mean(0) for q in clients]), 1e-14)
    assert_close(found.sum(-1), np.ones(3), 1e-15)


def test_rounding_in_the_counts_is_taken_out():
    counts = torch.tensor([[3.0 + 1e-9, 1.0]], dtype=torch.float64)
    assert client_weights(counts, torch.tensor([4])).sum().item() == 1.0


def test_leading_dimensions(rng):
    counts = rng.uniform(1, 2, size=(2, 4, 3))
    found = client_weights(torch.from_numpy(counts), torch.from_numpy(counts.sum(-1)))
    assert_close(found, counts / counts.sum(-1, keepdims=True), 1e-14)
