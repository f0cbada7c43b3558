"""Exact steps of linear learners against autograd and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from torch.autograd.functional import hessian, jacobian
from torch.nn.functional import cross_entropy

from fedgmm.core.newton import (
    LeastSquaresSums,
    contrasts,
    least_squares_step,
    least_squares_sums,
    newton_step,
    newton_sums,
)
from fedgmm.core.params import NOISE
from fedgmm.nets.learners import log_likelihoods
from fedgmm.nets.networks import Dense, Regression
from small_learners import drawn, rows


def weighted_loss(beta, x, y, w, classes):
    """``Σ w CE`` of a linear learner whose logits are ``contrasts @ β``."""
    logits = (
        torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
        @ (contrasts(classes) @ beta.reshape(classes - 1, -1)).mT
    )
    return (w * cross_entropy(logits, y, reduction="none")).sum()


def sums_of(net, params, x, y, w):
    return newton_sums(net.logits(params, x), x, y, w)


def beta_of(params, m):
    both = torch.cat([params["0.weight"][m], params["0.bias"][m][:, None]], 1)
    return (contrasts(both.shape[0]).mT @ both).reshape(-1)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_contrasts_are_orthonormal_and_sum_to_zero(classes):
    basis = contrasts(classes)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(classes - 1, dtype=basis.dtype))
    torch.testing.assert_close(basis.sum(0), torch.zeros(classes - 1, dtype=basis.dtype))


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_newton_sums_are_what_autograd_finds(rng, classes):
    net = Dense(3, classes)
    params = drawn(net, 2)
    x, y, w, _ = rows(rng, classes=classes)
    sums = sums_of(net, params, x, y, w)
    for m in range(2):
        beta = beta_of(params, m)

        def loss(b, m=m):
            return weighted_loss(b, x, y, w[:, m], classes)

        torch.testing.assert_close(sums.gradient[m], jacobian(loss, beta), atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(sums.hessian[m], hessian(loss, beta), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(sums.weight, w.sum(0))


def test_newton_sums_add_up_over_clients(rng):
    net = Dense(3, 3)
    params = drawn(net, 2)
    x, y, w, offsets = rows(rng, classes=3)
    whole = sums_of(net, params, x, y, w)
    parts = [
        sums_of(net, params, x[a:b], y[a:b], w[a:b])
        for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ]
    for name in ("gradient", "hessian", "second", "weight"):
        total = sum(getattr(part, name) for part in parts)
        torch.testing.assert_close(total, getattr(whole, name), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_newton_steps_end_where_scikit_learn_ends(rng, classes):
    net, ridge = Dense(3, classes), 0.7
    x, y, w, _ = rows(rng, sizes=(80, 60), classes=classes)
    x = x + torch.tensor([1.0, 0.0, 0.0])
    y = (x @ torch.from_numpy(rng.normal(size=(3, classes)))).argmax(1) * (
        torch.from_numpy(rng.random(140)) < 0.8
    )
    params = drawn(net, 2)
    for _ in range(30):
        params = newton_step(params, sums_of(net, params, x, y, w), ridge)
    actual = torch.log_softmax(net.logits(params, x), -1)
    for m in range(2):
        # two classes: β is the contrast z₁ - z₀ over √2, and scikit-learn penalises z₁ - z₀ itself
        strength = 2.0 / ridge if classes == 2 else 1.0 / ridge
        peer = LogisticRegression(C=strength, tol=1e-10, max_iter=10_000)
        peer.fit(x.numpy(), y.numpy(), sample_weight=w[:, m].numpy())
        # its bias is free, ours is held by 1e-3
        np.testing.assert_allclose(
            actual[:, m].numpy(), peer.predict_log_proba(x.numpy()), atol=2e-3
        )


@pytest.mark.parametrize("classes", [2, 4])
def test_newton_steps_end_at_the_penalised_optimum(rng, classes):
    net, ridge = Dense(3, classes), 0.7
    x, y, w, _ = rows(rng, classes=classes)
    params = drawn(net, 2)
    for _ in range(30):
        params = newton_step(params, sums_of(net, params, x, y, w), ridge)
    penalty = torch.full((classes - 1, 4), ridge, dtype=torch.float64)
    penalty[:, -1] = 1e-3

    for m in range(2):
        found = beta_of(params, m).clone().requires_grad_()
        value = weighted_loss(found, x, y, w[:, m], classes)
        value = value + 0.5 * (penalty.reshape(-1) * found.square()).sum()
        (gradient,) = torch.autograd.grad(value, found)
        assert float(gradient.abs().max()) < 1e-9


@pytest.mark.parametrize("classes", [2, 3])
def test_a_step_is_damped_by_how_far_it_would_move_the_logits(rng, classes):
    net, ridge = Dense(3, classes), 0.7
    x, y, w, _ = rows(rng, classes=classes)
    params = drawn(net, 2)
    moved = newton_step(params, sums_of(net, params, x, y, w), ridge)
    penalty = torch.full((classes - 1, 4), ridge, dtype=torch.float64)
    penalty[:, -1] = 1e-3
    penalty = penalty.reshape(-1)
    for m in range(2):
        beta = beta_of(params, m)

        def loss(b, m=m):
            ridge_term = 0.5 * (penalty * b.square()).sum()
            return weighted_loss(b, x, y, w[:, m], classes) + ridge_term

        full = torch.linalg.solve(hessian(loss, beta), jacobian(loss, beta))
        ones = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
        change = (ones @ full.reshape(classes - 1, -1).mT).square().sum(1)  # of the logits, squared
        delta = ((w[:, m] * change).sum() / w[:, m].sum()).sqrt()
        expected = beta - torch.log1p(delta) / delta * full
        torch.testing.assert_close(beta_of(moved, m), expected, atol=1e-10, rtol=0)


def test_newton_steps_come_back_from_far_away(rng):
    """Learners that are sure of the wrong answer have next to no curvature: full steps explode."""
    net, ridge = Dense(3, 2), 1.0
    x, _, w, _ = rows(rng, sizes=(200,))
    y = (x[:, 0] + 0.5 * torch.from_numpy(rng.normal(size=200)) > 0).long()
    params = drawn(net, 2)
    params["0.weight"][:, 1, 0] = -30.0
    far = params
    for _ in range(60):
        params = newton_step(params, sums_of(net, params, x, y, w), ridge)
    near = drawn(net, 2)
    for _ in range(60):
        near = newton_step(near, sums_of(net, near, x, y, w), ridge)
    before, after = (
        -(w * log_likelihoods(net, own, x, y)).sum(0) / w.sum(0) for own in (far, params)
    )
    assert (before > 5).all()
    assert (after < 0.5).all()
    torch.testing.assert_close(log_odds(params)["0.weight"], log_odds(near)["0.weight"])


@pytest.mark.parametrize("ridge", [0.0, 1.0])
def test_an_exact_step_survives_what_has_no_curvature(rng, ridge):
    """A constant column, and a learner without rows, which stays where it is."""
    net = Dense(3, 2)
    x, y, w, _ = rows(rng)
    x[:, 1] = 0.0
    w[:, 0] = 0.0
    params = drawn(net, 2)
    moved = newton_step(params, sums_of(net, params, x, y, w), ridge)
    before, after = log_odds(params), log_odds(moved)  # what logits have in common means nothing
    for name in params:
        torch.testing.assert_close(after[name][0], before[name][0])
        assert torch.isfinite(moved[name]).all()
        assert not torch.equal(after[name][1], before[name][1])


def log_odds(params):
    return {name: value[:, 1] - value[:, 0] for name, value in params.items()}


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("ridge", [1e-9, 3.0])
def test_least_squares_are_weighted_ridge_regressions(rng, ridge):
    x, w = rng.normal(size=(50, 3)), rng.random((50, 2))
    y = x @ [1.0, -2.0, 0.5] + 4.0 + rng.normal(size=50)
    net = Regression(Dense(3, 1))
    params = {
        "0.weight": torch.from_numpy(rng.normal(size=(2, 1, 3))),
        "0.bias": torch.from_numpy(rng.normal(size=(2, 1))),
        NOISE: torch.ones(2, dtype=torch.float64),
    }
    parts = [
        vars(
            least_squares_sums(
                net.logits(params, torch.from_numpy(x[part])),
                *(torch.from_numpy(value[part]) for value in (x, y, w)),
            )
        )
        for part in (slice(0, 20), slice(20, 50))
    ]
    sums = LeastSquaresSums(**{name: parts[0][name] + parts[1][name] for name in parts[0]})
    found = least_squares_step(params, sums, ridge)
    for m in range(2):
        oracle = Ridge(ridge).fit(x, y, sample_weight=w[:, m])
        np.testing.assert_allclose(found["0.weight"][m, 0], oracle.coef_, atol=1e-8)
        np.testing.assert_allclose(found["0.bias"][m, 0], oracle.intercept_, atol=1e-8)
        variance = np.average((y - oracle.predict(x)) ** 2, weights=w[:, m])
        assert float(found[NOISE][m]) == pytest.approx(variance, rel=1e-8)


def test_a_learner_of_numbers_without_rows_keeps_its_parameters():
    params = {
        "0.weight": torch.ones(2, 1, 1, dtype=torch.float64),
        "0.bias": torch.ones(2, 1, dtype=torch.float64),
        NOISE: torch.full((2,), 0.5, dtype=torch.float64),
    }
    x, y = torch.ones(4, 1, dtype=torch.float64), torch.full((4,), 3.0, dtype=torch.float64)
    w = torch.tensor([[0.0, 1.0]] * 4, dtype=torch.float64)
    outputs = Regression(Dense(1, 1)).logits(params, x)
    found = least_squares_step(params, least_squares_sums(outputs, x, y, w), 1.0)
    for name, value in params.items():
        assert torch.equal(found[name][0], value[0])
        assert torch.isfinite(found[name]).all()
    assert float(found[NOISE][1]) == pytest.approx(0.0, abs=1e-6)


def test_many_classes_give_the_same_sums(monkeypatch):
    torch.manual_seed(0)
    n, m, k, d = 90, 3, 21, 4
    rows = (
        3 * torch.randn(n, m, k, dtype=torch.float64),
        torch.randn(n, d, dtype=torch.float64),
        torch.randint(k, (n,)),
        torch.rand(n, m, dtype=torch.float64),
    )
    at_once = newton_sums(*rows)
    monkeypatch.setattr("fedgmm.core.newton._MANY_CLASSES", k)
    in_pairs = newton_sums(*rows)
    for name, value in vars(in_pairs).items():
        torch.testing.assert_close(vars(at_once)[name], value, rtol=1e-12, atol=1e-12)
