"""Networks on noised sums of clipped gradients: gradients of rows, methods, inputs, resume."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedgmm import FederatedDataset, Privacy, load, train
from fedgmm.core.gaussians import gaussians
from fedgmm.data.synthetic import synthetic
from fedgmm.privacy.ledger import Ledger
from fedgmm.privacy.private_em import PrivateRows
from fedgmm.privacy.private_method import ROUND
from fedgmm.privacy.private_networks import (
    _WANDER,
    PrivateNetworks,
    centres_of,
    private_method,
)
from fedgmm.training import private
from fedgmm.training.build import build, learner_network
from fedgmm.training.options import TrainingOptions

LOOSE = Privacy(epsilon=1000.0, delta=1e-5, bounds=(-6, 6), rounds=12)
QUICK = {"components": 2, "learners": 2, "learner": "mlp", "lr": 0.5}


@pytest.fixture(scope="module")
def federation():
    return synthetic(6, 200, dimensions=3, components=2, separation=2.0, seed=0)


def small_module():
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2))


def network(algorithm, learner, shape=(3,), clip_norm=None):
    options = TrainingOptions(
        algorithm=algorithm,
        components=2,
        learners=2,
        learner=learner,
        clip_norm=clip_norm,
        covariance_type="spherical",
        dtype="float64",
    )
    net = learner_network(options, shape, np.arange(2))
    columns = len(shape) == 1
    return private_method(build(options, net), LOOSE, columns=columns, descent=learner == "linear")


def rows_like(shape, n=7):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, *shape, generator=generator, dtype=torch.float64) * 2 - 1
    weights = torch.linspace(0.2, 1.0, n, dtype=torch.float64)
    return PrivateRows(x.flatten(1), torch.arange(n) % 2, weights)


@pytest.mark.parametrize(
    ("algorithm", "learner", "shape"),
    [
        ("fedavg", "mlp", (3,)),
        ("fedgmm", "mlp", (3,)),
        ("fedem", small_module, (3,)),
        ("fedavg", "cnn", (1, 8, 8)),
    ],
)
def test_gradients_of_rows_are_those_of_a_loop(algorithm, learner, shape, monkeypatch):
    """Each row's gradient, weighted by its responsibilities, clipped, and added up, in small blocks."""
    method = network(algorithm, learner, shape, clip_norm=0.5)
    assert isinstance(method, PrivateNetworks)
    rows, m2 = rows_like(shape), method.base.learners
    shared = method.blank(int(np.prod(shape)))
    monkeypatch.setattr("fedgmm.privacy.private_networks._NUMBERS", 1)  # one row per block
    found = method.contributions(ROUND, shared, rows)["gradient"]
    expected = torch.zeros_like(found)
    for x, y, weight in zip(*rows, strict=True):
        params = {n: v.clone().requires_grad_() for n, v in shared.learners.items()}
        logits = method.training.net.logits(params, x.reshape(1, *shape))[0]
        log_y = torch.log_softmax(logits, -1)[:, y]
        joint = shared.weights.reshape(-1, m2).log() + log_y.detach()  # all Gaussians are equal
        q = torch.softmax(joint.flatten(), 0).reshape(-1, m2).sum(0)
        gradients = torch.autograd.grad(-(q * log_y).sum(), list(params.values()))
        flat = torch.cat([one.flatten() for one in gradients])
        expected += weight * flat * min(1.0, 0.5 / float(flat.norm()))
    torch.testing.assert_close(found, expected)
    assert float(found.norm()) > 0.1


def test_linear_learners_descend_around_their_centres():
    """Rows' gradients of ``W (z - c) + b'`` are clipped, and a step along them is one of ``W z + b``."""
    method, rows = network("fedgmm", "linear", clip_norm=0.5), rows_like((3,))
    centres = torch.tensor([[2.0, 0.0, 1.0], [0.0, -1.0, 0.0]]).double()
    weight = torch.linspace(-1, 1, 12).double().reshape(2, 2, 3)
    bias = torch.tensor([[0.1, -0.2], [0.3, 0.0]]).double()
    shared = method.blank(3)
    pairs = torch.tensor([0.6, 1e-9, 1e-9, 0.4]).double()  # each learner has its own Gaussian
    means = gaussians(centres, torch.ones(2).double(), "spherical")
    learners = {"0.weight": weight, "0.bias": bias}
    shared = replace(shared, gaussians=means, weights=pairs, learners=learners)
    found = method.contributions(ROUND, shared, rows)["gradient"]
    expected = torch.zeros_like(found)
    shifted = (bias + torch.einsum("mkd,md->mk", weight, centres)).requires_grad_()
    around = weight.clone().requires_grad_()
    for x, y, own in zip(*rows, strict=True):
        logits = torch.einsum("mkd,md->mk", around, x - centres) + shifted
        log_y = torch.log_softmax(logits, -1)[:, y]
        log_x = -0.5 * (x - centres).square().sum(1)
        joint = pairs.log().reshape(2, 2) + log_x[:, None] + log_y.detach()
        q = torch.softmax(joint.flatten(), 0).reshape(2, 2).sum(0)
        gradients = torch.autograd.grad(-(q * log_y).sum(), [around, shifted])
        flat = torch.cat([one.flatten() for one in gradients])
        expected += own * flat * min(1.0, 0.5 / float(flat.norm()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)

    step = method._around_zero(found, centres)
    after = weight - step[:12].reshape(2, 2, 3), bias - step[12:].reshape(2, 2)
    moved = weight - found[:12].reshape(2, 2, 3), shifted - found[12:].reshape(2, 2)
    x = rows.inputs
    torch.testing.assert_close(
        torch.einsum("mkd,nd->nmk", after[0], x) + after[1],
        torch.einsum("mkd,nmd->nmk", moved[0], x[:, None] - centres) + moved[1],
    )


def test_centres_of_learners_are_not_whitened():
    shared = network("fedgmm", "linear").blank(3)
    means = torch.tensor(
        [[1.0, 0.5, -1.0], [-0.5, 0.0, 1.5]]
    ).double()  # of inputs as learners see them
    mixed = torch.tensor([[1.0, 0.5, 0.0], [0.0, 2.0, -0.5], [0.3, 0.0, 0.7]]).double()
    whitener = mixed @ mixed.mT
    pairs = torch.tensor([0.5, 1e-12, 1e-12, 0.5]).double()  # each learner has its own Gaussian
    shared = replace(
        shared,
        coordinates=replace(shared.coordinates, whitener=whitener),
        gaussians=replace(shared.gaussians, means=means @ whitener),
        weights=pairs,
    )
    torch.testing.assert_close(centres_of(shared), means)
    broken = replace(shared.coordinates, whitener=torch.full_like(whitener, 1e-6))
    assert bool(torch.isfinite(centres_of(replace(shared, coordinates=broken))).all())


@pytest.mark.parametrize("learner", ["linear", "mlp"])
@pytest.mark.parametrize("size", [1e3, 1e200])
def test_a_row_counts_for_one_with_any_parameters(size, learner):
    """A server that chooses parameters cannot make a row's sums large or not finite."""
    method, rows = network("fedgmm", learner), rows_like((3,))
    shared = method.blank(3)
    far = torch.full_like(shared.gaussians.means, 1e6)
    shared = replace(shared, gaussians=replace(shared.gaussians, means=far))
    wild = {name: size * (value + 1.0) for name, value in shared.learners.items()}
    layout = method.layout(ROUND, 3)
    for at in range(len(rows.labels)):
        row = PrivateRows(*(part[at : at + 1] for part in rows))
        row = row._replace(weights=torch.ones(1).double())
        sums = method.contributions(ROUND, replace(shared, learners=wild), row)
        assert np.linalg.norm(layout.vector(sums)) <= 1.0 + 1e-9


@pytest.mark.parametrize("algorithm", ["fedavg", "fedem", "fedgmm"])
def test_networks_learn_with_a_large_budget(federation, algorithm):
    model = train(federation.dataset, algorithm, **QUICK, privacy=LOOSE)
    assert model.privacy["spent"] == pytest.approx(1000.0, rel=1e-6)
    assert model.privacy["releases"] == 12 + (3 if algorithm == "fedgmm" else 1)
    least = 0.85 if algorithm == "fedgmm" else 0.6
    assert model.evaluate("test", federation.dataset).mean_accuracy > least


@pytest.mark.parametrize("algorithm", ["fedavg", "fedgmm"])
def test_linear_learners_learn_by_gradient_steps(federation, algorithm):
    sizes = {"components": 2, "learners": 2, "covariance_type": "spherical"}
    model = train(
        federation.dataset, algorithm, solver="sgd", **sizes, privacy=replace(LOOSE, rounds=None)
    )
    assert model.privacy["releases"] == 50 + (3 if algorithm == "fedgmm" else 1)
    if algorithm == "fedgmm":  # one learner cannot fit two components
        assert model.evaluate("test", federation.dataset).mean_accuracy > 0.85


def test_noise_alone_hardly_moves_linear_learners(federation):
    """The steps follow the noise: a budget that hides everything leaves weights of limited size."""
    tiny = replace(LOOSE, epsilon=0.01, rounds=None)
    with pytest.warns(private.NoiseWarning):
        model = train(federation.dataset, "fedavg", solver="sgd", privacy=tiny)
    weights = model.prediction.learners["0.weight"]
    assert 0.0 < float(weights.abs().max()) < 5 * _WANDER


@pytest.mark.parametrize("unit", ["person", "client"])
def test_units_of_networks(federation, unit):
    rows = federation.dataset.train
    data = FederatedDataset.from_arrays(
        rows.inputs.numpy(),
        rows.labels.numpy(),
        rows.codes.numpy(),
        persons=np.arange(len(rows)) // 3,
    )
    model = train(data, "fedavg", **QUICK, privacy=replace(LOOSE, unit=unit, rounds=2))
    assert model.privacy["releases"] == 3 * (2 if unit == "client" else 1)
    assert f"per {unit}" in model.budget


@pytest.mark.filterwarnings("ignore::fedgmm.training.private.NoiseWarning")  # few images
@pytest.mark.parametrize("as_bytes", [False, True])
def test_images(as_bytes, tmp_path):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 48)
    x = rng.uniform(0, 100, (48, 1, 8, 8))
    x[y == 1, :, :4] += 100.0
    x = x.astype(np.uint8 if as_bytes else np.float32)
    data = FederatedDataset.from_arrays(x, y, np.arange(48) % 4)
    budget = replace(LOOSE, bounds=(0, 255), rounds=6)
    model = train(data, "fedavg", learner="cnn", lr=0.3, privacy=budget)
    assert model.privacy["releases"] == 6  # no moments of columns
    assert model.evaluate("test", data).mean_accuracy > 0.9
    model.public().save(tmp_path / "public")
    shown = load(tmp_path / "public").predict_proba(x[:3])
    np.testing.assert_allclose(shown, model.predict_proba(x[:3]), rtol=1e-5)


def test_gaussians_need_columns():
    data = FederatedDataset.from_arrays(np.zeros((20, 1, 4, 4)), np.arange(20) % 2)
    with pytest.raises(ValueError, match="fedavg or fedem"):
        train(data, "fedgmm", learner="cnn", privacy=replace(LOOSE, delta=1e-3))


def test_a_module_of_ones_own(federation):
    budget = replace(LOOSE, rounds=3)
    model = train(federation.dataset, "fedavg", learner=small_module, privacy=budget)
    assert len(model.history) == 3


def test_networks_have_more_rounds(federation):
    budget = replace(LOOSE, rounds=None)
    linear = train(federation.dataset, "fedavg", privacy=budget)
    assert len(linear.history) == 8
    assert network("fedavg", "mlp").plan()[-1][1] == pytest.approx(0.96 / 12)
    net = train(federation.dataset, "fedavg", learner="mlp", rounds=7, privacy=budget)
    assert len(net.history) == 7  # and 50, if the run has so many


def test_a_resumed_run_repeats_no_release(federation, tmp_path):
    options = {**QUICK, "privacy": replace(LOOSE, rounds=4), "checkpoint": tmp_path / "run"}
    train(federation.dataset, "fedem", until=2, **options)
    assert len(Ledger.found(tmp_path).entries()) == 3
    model = train(federation.dataset, "fedem", **options)
    assert [one.what for one in Ledger.found(tmp_path).entries()] == ["columns", *[ROUND] * 4]
    again = train(federation.dataset, "fedem", **options)
    for name, value in model.prediction.learners.items():
        assert torch.equal(again.prediction.learners[name], value)


def test_a_resumed_run_is_the_uninterrupted_one(federation, tmp_path, monkeypatch):
    """Without noise both end with the same numbers, so the momentum is in the checkpoint."""
    monkeypatch.setattr(private, "noisy", lambda total, *_: total)
    options = {**QUICK, "privacy": replace(LOOSE, rounds=4)}
    train(federation.dataset, "fedavg", until=2, checkpoint=tmp_path / "run", **options)
    resumed = train(federation.dataset, "fedavg", checkpoint=tmp_path / "run", **options)
    whole = train(federation.dataset, "fedavg", **options)
    for name, value in whole.prediction.learners.items():
        torch.testing.assert_close(resumed.prediction.learners[name], value)
