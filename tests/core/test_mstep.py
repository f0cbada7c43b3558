from __future__ import annotations

import numpy as np
import torch

from fedgmm.core.em import client_weights, towards_independence
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


def test_learners_are_pulled_towards_independence_of_gaussians(rng):
    counts = torch.from_numpy(rng.uniform(1, 20, size=(5, 3, 2)))
    flat = counts.reshape(5, 6)
    assert_close(towards_independence(flat, 2, 0.0), flat, 1e-14)
    product = counts.sum(2, keepdim=True) * counts.sum(1, keepdim=True)
    product = (product / counts.sum((1, 2), keepdim=True)).reshape(5, 6)
    assert_close(towards_independence(flat, 2, 1e12), product, 1e-9)
    some = towards_independence(flat, 2, 7.0)
    gaussians = counts.sum(2)
    assert_close(some.reshape(5, 3, 2).sum(2), gaussians, 1e-12)  # these keep their rows
    shares = counts.sum(1) / counts.sum((1, 2))[:, None]
    expected = (counts + 7 * shares[:, None]) / (gaussians + 7)[..., None] * gaussians[..., None]
    assert_close(some, expected.reshape(5, 6), 1e-12)
    empty = torch.zeros(1, 6, dtype=torch.float64)
    assert bool(torch.isfinite(towards_independence(empty, 2, 0.0)).all())
