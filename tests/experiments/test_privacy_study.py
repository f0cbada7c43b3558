from __future__ import annotations

import json

import pytest
import torch

from fedgmm.data.synthetic import synthetic
from fedgmm.experiments import privacy
from fedgmm.experiments.privacy import METHODS, PrivacyStudy, dp_fedavg, reproduce_privacy
from fedgmm.privacy.settings import Privacy


def test_dp_fedavg_learns_with_a_large_budget(monkeypatch):
    monkeypatch.setattr(privacy, "_CLIPS", (1.0,))
    monkeypatch.setattr(privacy, "_RATES", (3.0,))
    monkeypatch.setattr(privacy, "_ROUNDS", (20,))
    data = synthetic(5, 400, dimensions=3, components=1, seed=0).dataset
    budget = Privacy(epsilon=50.0, delta=1e-6, bounds=(-6, 6))
    assert dp_fedavg(data, budget) > 0.9


def test_clipped_gradients_equal_autograd():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, dtype=torch.float64, generator=generator)
    truth = torch.nn.functional.one_hot(torch.tensor([0, 1, 0, 1, 1, 0]), 2).double()
    found = privacy._descend(x, truth, clip=0.5, rate=1.0, rounds=1, mu=1e3)
    total = torch.zeros(3, 2, dtype=torch.float64)
    for row, own in zip(x, truth, strict=True):
        weights = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
        loss = -(torch.log_softmax(row @ weights, 0) * own).sum()
        (gradient,) = torch.autograd.grad(loss, weights)
        total += gradient * min(1.0, 0.5 / float(gradient.norm()))
    torch.testing.assert_close(found, -total / 6, atol=2e-3, rtol=0)


@pytest.mark.slow
def test_a_small_study_writes_table_and_figure(tmp_path):
    study = PrivacyStudy(clients=6, rows=100, seeds=(0,), epsilons=(8.0,), delta=1e-5)
    found = reproduce_privacy(tmp_path, study)
    assert [set(methods) for methods in found.values()] == [set(METHODS)] * 3
    assert (tmp_path / "privacy.png").stat().st_size > 0
    assert "DP-FedAvg" in (tmp_path / "privacy.md").read_text()
    assert json.loads((tmp_path / "privacy.json").read_text())["study"]["rows"] == 100
