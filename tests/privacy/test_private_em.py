"""Equations of private training: what noisy sums are made of, and how noise is kept from spreading."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from fedgmm import FederatedDataset, Privacy, train
from fedgmm.core.em import responsibilities
from fedgmm.core.gaussians import gaussians
from fedgmm.core.newton import newton_sums
from fedgmm.privacy.noisy_sums import NoisySums, Part, triangle
from fedgmm.privacy.private_em import (
    MeanGradient,
    Mixture,
    expected_sums,
    next_gaussians,
    own_weights,
    relative,
    shrunk,
    unscaled,
    whitened,
)
from fedgmm.privacy.private_method import NormBins


def test_values_are_shrunk_by_as_much_as_they_are_noise():
    values = torch.tensor([1.0, 3.0]).double()  # deviation one around two
    torch.testing.assert_close(shrunk(values, 0.0), values)
    torch.testing.assert_close(shrunk(values, 0.5**0.5), torch.tensor([1.5, 2.5]).double())
    torch.testing.assert_close(shrunk(values, 5.0), torch.tensor([2.0, 2.0]).double())
    nothing = torch.zeros(()).double()
    torch.testing.assert_close(shrunk(values, 5.0, nothing), torch.zeros(2).double())


def test_gradients_that_differ_by_noise_are_averaged_and_others_replaced():
    one, noise = torch.ones(1, 2, 3).double(), torch.tensor([4.0]).double()
    alike = MeanGradient(one, noise).updated(MeanGradient(1.5 * one, noise / 3))
    torch.testing.assert_close(alike.values, 1.375 * one)  # weights 1 and 3
    torch.testing.assert_close(alike.variance, torch.tensor([1.0]).double())
    moved = MeanGradient(one, noise * 1e-6).updated(MeanGradient(2.0 * one, noise * 1e-6))
    torch.testing.assert_close(moved.values, 2.0 * one, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
@pytest.mark.parametrize("centred", [False, True])
def test_gaussians_that_differ_by_noise_are_averaged_and_others_replaced(kind, centred):
    d, n = 3, torch.tensor([1000.0, 2000.0]).double()
    eye = torch.eye(d).double()
    shapes = {"full": eye.expand(2, d, d), "tied": eye, "diag": torch.ones(2, d).double()}
    ones = shapes.get(kind, torch.ones(2).double())
    means = torch.tensor([[1.0, 0.0, 0.0], [0.0, -1.0, 0.0]]).double()
    current = gaussians(means, ones, kind)

    def sums_of(scale):
        """Return the sums of rows with the current means and a multiple of the covariances."""
        first = n[:, None] * means
        outer = means[:, :, None] * means[:, None] + scale * eye
        second = n[:, None, None] * outer
        second = {
            "full": second,
            "tied": second.sum(0),
            "diag": second.diagonal(dim1=1, dim2=2),
        }.get(kind, second.diagonal(dim1=1, dim2=2).sum(-1))
        if centred:
            first, second = relative(first, second, n, current, sign=-1.0)
        return {"first": first, "second": triangle(second) if kind in ("full", "tied") else second}

    def updated(scale, before, noise):
        deviation = {"first": noise, "second": noise}
        return next_gaussians(sums_of(scale), deviation, n, current, before, 0.0, centred=centred)

    alone, noise = updated(1.2, None, 100.0)
    torch.testing.assert_close(alone.covariances, 1.2 * ones)
    torch.testing.assert_close(noise[0], (100.0 / n).square())
    both, less = updated(1.02, noise, 100.0)  # a difference that noise explains
    torch.testing.assert_close(both.covariances, 1.01 * ones)
    torch.testing.assert_close(less, noise / 2)
    _, exact = updated(1.2, None, 1e-3)
    moved, _ = updated(1.2, exact, 1e-3)
    torch.testing.assert_close(moved.covariances, 1.2 * ones, rtol=0, atol=1e-6)


def test_weights_of_clients_follow_from_their_rows():
    generator = torch.Generator().manual_seed(0)
    log_p = 30.0 * torch.randn(50, 4, dtype=torch.float64, generator=generator)
    codes = torch.arange(50) % 3
    start = torch.tensor([0.4, 0.3, 0.2, 0.1]).double()
    found = own_weights(log_p, codes, start.expand(3, -1), 5)
    for client in range(3):
        own, weights = log_p[codes == client], start
        for _ in range(5):
            q, _ = responsibilities(own + weights.log())
            weights = (q.sum(0) + start) / (len(own) + 1)
        torch.testing.assert_close(found[client], weights)


def test_clients_are_clipped_to_a_length_just_above_most_of_them():
    bins = NormBins(NoisySums((Part("a", (2,), 8.0, 1.0),)))
    lengths = [*np.linspace(0.9, 1.1, 85), *np.linspace(2.0, 100.0, 15)]
    total = sum(bins.contributions({"a": torch.tensor([x, 0.0]).double()})["a"] for x in lengths)
    [part] = bins.clipped_layout({"a": total}, {"a": 0.1}, 0.8).parts
    assert 1.1 <= part.bound < 1.1 * 2**0.25


@pytest.mark.parametrize("sharpness", [0.5, 30.0])
@pytest.mark.parametrize("kind", ["full", "diag"])
def test_two_classes_in_closed_form_agree_with_draws(kind, sharpness, monkeypatch):
    """Without shortening, the integrals equal the mean over many draws within its error."""
    monkeypatch.setattr("fedgmm.privacy.private_em.gradient_radius", lambda _: 1e9)
    d, count, generator = 3, 200_000, torch.Generator().manual_seed(0)
    root = torch.randn(2, d, d, dtype=torch.float64, generator=generator)
    covariances = root @ root.mT + torch.eye(d, dtype=torch.float64)
    if kind == "diag":
        covariances = covariances.diagonal(dim1=1, dim2=2)
    means = torch.randn(2, d, dtype=torch.float64, generator=generator)
    weight = sharpness * torch.randn(1, 2, d, dtype=torch.float64, generator=generator)
    learners = {"0.weight": weight, "0.bias": torch.tensor([[0.3, -0.3]]).double()}
    shares = torch.tensor([0.4, 0.6]).double()
    mixture = Mixture(gaussians(means, covariances, kind), shares, learners)
    found = expected_sums(mixture, torch.ones(1).double(), 0)(learners)

    full = torch.diag_embed(covariances) if kind == "diag" else covariances
    normal = torch.randn(2, count, d, dtype=torch.float64, generator=generator)
    draws = means[:, None] + normal @ torch.linalg.cholesky(full).mT
    weights = (shares / count).repeat_interleave(count)[:, None]
    draws = draws.reshape(-1, d)
    first = torch.zeros(len(draws), dtype=torch.int64)
    wanted = newton_sums(mixture.logits(draws), draws, first, weights)
    for name in ("gradient", "hessian", "second", "weight"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert float((one - other).abs().max()) < 0.02 * float(other.abs().max())


@pytest.mark.parametrize("noise", [1e-9, 1e5])
def test_only_directions_that_noise_does_not_hide_are_whitened(noise):
    true = torch.diag(torch.tensor([1.6, 0.4]).double())
    noisy = {
        "rows": torch.tensor([1000.0]).double(),
        "first": torch.zeros(2).double(),
        "second": torch.tensor([1600.0, 0.0, 400.0]).double(),
    }
    deviation = {"first": noise, "second": noise}
    found = whitened(unscaled(2, 1), noisy, deviation, centred=False, whiten=True)
    wanted = torch.diag(true.diagonal().rsqrt()) if noise < 1 else torch.eye(2).double()
    torch.testing.assert_close(found.whitener, wanted)


@pytest.mark.filterwarnings("ignore::fedgmm.training.private.NoiseWarning")
def test_few_rows_of_many_columns_are_learned(monkeypatch):
    """A noisy covariance, or the noise of biases and of early rounds, used to spoil this run."""
    monkeypatch.setattr("fedgmm.privacy.private_em._FEWEST_SAMPLES", 500)
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 4, 1500)
    middles = generator.choice([-0.4, 0.4], (4, 40))
    x = (middles[labels] + generator.normal(0, 0.5, (1500, 40))).clip(-1, 1).astype(np.float32)
    data = FederatedDataset.from_arrays(x, labels, np.arange(1500) % 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = train(data, "fedavg", privacy=Privacy(epsilon=1, delta=1e-5, bounds=(-1, 1)))
    assert model.evaluate("test", data).mean_accuracy > 0.9
