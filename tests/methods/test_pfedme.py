"""pFedMe: its round written out, and its limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fedgmm.training.in_process import train
from supervised import federation, rows_of

SAME = {"dtype": "float64", "standardise": False, "tol": None, "seed": 1, "batch_size": 1000}


def start_of(data):
    model = train(data, "pfedme", rounds=1, answers=lambda *_: False, **SAME)
    return {name: value[-1] for name, value in model.prediction.learners.items()}


def learners_of(model):
    """The global learner, and every client's own."""
    parts = model.prediction.learners
    return (
        {name: value[-1] for name, value in parts.items()},
        {name: value[:-1] for name, value in parts.items()},
    )


def looped(data, rounds, *, lr, penalty, inner_steps, inner_lr, mixing):
    """The algorithm with one batch a round, clients one at a time."""
    w = start_of(data)
    rows = data.train
    for _ in range(rounds):
        total = {name: torch.zeros_like(value) for name, value in w.items()}
        personal = []
        for c in range(len(rows.names)):
            x, y = map(torch.from_numpy, rows_of(rows, c))
            theta = {name: value.clone() for name, value in w.items()}
            for _ in range(inner_steps):
                own = {name: value.clone().requires_grad_() for name, value in theta.items()}
                loss = cross_entropy(x @ own["0.weight"].T + own["0.bias"], y)
                gradients = torch.autograd.grad(loss, list(own.values()))
                theta = {
                    name: theta[name] - inner_lr * (g + penalty * (theta[name] - w[name]))
                    for name, g in zip(own, gradients, strict=True)
                }
            personal.append(theta)
            for name in w:
                local = w[name] - lr * penalty * (w[name] - theta[name])
                total[name] += len(x) / len(rows) * local
        w = {name: (1 - mixing) * w[name] + mixing * total[name] for name in w}
    return w, personal


@pytest.mark.parametrize("mixing", [1.0, 0.4, 1.5])
def test_rounds_are_those_of_the_paper(rng, mixing):
    data = federation(rng)
    options = {"lr": 0.05, "penalty": 4.0, "inner_steps": 6, "mixing": mixing}
    model = train(data, "pfedme", rounds=3, **options, **SAME)
    expected, personal = looped(data, 3, inner_lr=0.05, **options)
    found, own = learners_of(model)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-10, rtol=0)
        for c in range(len(data.names)):
            torch.testing.assert_close(own[name][c], personal[c][name], atol=1e-10, rtol=0)


def test_the_personal_learner_is_the_proximal_point_of_the_global_one(rng):
    """``∇f(θ) + λ (θ - w) = 0`` on the client's rows, after many inner steps."""
    data = federation(rng)
    model = train(data, "pfedme", rounds=1, penalty=3.0, inner_steps=800, lr=0.1, **SAME)
    w = start_of(data)
    _, own = learners_of(model)
    for c in range(len(data.names)):
        x, y = map(torch.from_numpy, rows_of(data.train, c))
        theta = {name: own[name][c].clone().requires_grad_() for name in w}
        loss = cross_entropy(x @ theta["0.weight"].T + theta["0.bias"], y)
        for name, gradient in zip(
            theta, torch.autograd.grad(loss, list(theta.values())), strict=True
        ):
            rest = gradient + 3.0 * (theta[name].detach() - w[name])
            assert float(rest.abs().max()) < 1e-8
            assert float((theta[name].detach() - w[name]).abs().max()) > 1e-4


def test_a_large_penalty_leaves_nothing_personal(rng):
    data = federation(rng)
    gaps = []
    for penalty in (1.0, 100.0, 1e6):
        model = train(data, "pfedme", rounds=1, penalty=penalty, lr=0.1 / penalty, **SAME)
        start = start_of(data)
        _, own = learners_of(model)
        gaps.append(max(float((own[name] - start[name]).abs().max()) for name in own))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-5


def test_without_mixing_the_server_does_not_move(rng):
    data = federation(rng)
    model = train(data, "pfedme", rounds=3, mixing=0.0, **SAME)
    found, own = learners_of(model)
    for name, value in start_of(data).items():
        torch.testing.assert_close(found[name], value, atol=1e-15, rtol=0)
        assert float((own[name] - value).abs().max()) > 1e-4  # clients do


def test_clients_that_never_answer_keep_the_start(rng):
    data = federation(rng)
    model = train(data, "pfedme", rounds=3, answers=lambda _, name: name != "bonn", **SAME)
    _, own = learners_of(model)
    code = data.names.index("bonn")
    for name, value in start_of(data).items():
        assert torch.equal(own[name][code], value)
        assert not torch.equal(own[name][0], value)


def test_prediction_is_personal_and_global_without_a_client(rng):
    data = federation(rng)
    model = train(data, "pfedme", rounds=3, lr=0.1, **SAME)
    x = data.test.inputs.numpy()
    found, own = learners_of(model)
    for client, learner in ((None, found), ("kiev", {n: v[3] for n, v in own.items()})):
        logits = x @ learner["0.weight"].numpy().T + learner["0.bias"].numpy()
        expected = np.exp(logits - logits.max(1, keepdims=True))
        expected /= expected.sum(1, keepdims=True)
        np.testing.assert_allclose(model.predict_proba(x, client), expected, atol=1e-12)
