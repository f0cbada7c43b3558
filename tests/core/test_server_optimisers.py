"""Server optimisers against the formulas, written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedgmm.core.server_optimisers import SERVER_KINDS, ServerOptimiser, ServerState


def rounds(rng, count=4):
    """The clients' averages of several rounds, for parameters of two shapes."""
    return [
        {"w": torch.from_numpy(rng.normal(size=(2, 3))), "b": torch.from_numpy(rng.normal(size=2))}
        for _ in range(count)
    ]


def run(server, start, averages):
    state, current = ServerState(), start
    for average in averages:
        current, state = server.step(current, average, state)
    return current, state


def test_the_average_is_taken_as_it_is(rng):
    start, *averages = rounds(rng)
    moved, state = ServerOptimiser().step(start, averages[0], ServerState())
    for name in start:
        assert torch.equal(moved[name], averages[0][name])
    assert state == ServerState()


def test_a_partial_step_towards_the_average(rng):
    start, average, *_ = rounds(rng)
    moved, _ = ServerOptimiser("average", lr=0.3).step(start, average, ServerState())
    for name in start:
        torch.testing.assert_close(moved[name], 0.7 * start[name] + 0.3 * average[name])


def test_momentum(rng):
    start, *averages = rounds(rng)
    moved, state = run(ServerOptimiser("momentum", lr=0.5, momentum=0.8), start, averages)
    for name in start:
        theta, v = start[name].numpy().copy(), 0.0
        for average in averages:
            v = 0.8 * v + (average[name].numpy() - theta)
            theta = theta + 0.5 * v
        np.testing.assert_allclose(moved[name], theta, rtol=1e-13)
    assert state.steps == len(averages)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_follows_a_rate_that_falls_as_torch_s_own_does(rng, momentum):
    """Clients that take one step of a quadratic's gradient: with the server this is torch's optimiser."""
    shares, rate = [1.0, 1.0, 0.6, 0.2, 0.05], 0.1
    theta = torch.nn.Parameter(torch.from_numpy(rng.normal(size=(2, 3))))
    goal, curvature = torch.from_numpy(rng.normal(size=(2, 3))), torch.tensor([0.5, 2, 7]).double()
    ours, state = {"w": theta.detach().clone()}, ServerState()
    server = ServerOptimiser("momentum", momentum=momentum)
    optimiser = torch.optim.SGD([theta], lr=rate, momentum=momentum)
    for share in shares:
        average = {"w": ours["w"] - share * rate * curvature * (ours["w"] - goal)}
        ours, state = server.step(ours, average, state, share)
        optimiser.param_groups[0]["lr"] = share * rate
        optimiser.zero_grad()
        (curvature * (theta - goal).square() / 2).sum().backward()
        optimiser.step()
        torch.testing.assert_close(ours["w"], theta.detach(), rtol=1e-12, atol=0)


def test_an_average_is_the_same_at_every_rate(rng):
    start, average, *_ = rounds(rng)
    server = ServerOptimiser("average", lr=0.3)
    whole, _ = server.step(start, average, ServerState())
    part, _ = server.step(start, average, ServerState(), share=0.7)
    for name in start:
        assert torch.equal(part[name], whole[name])


def test_adam_moves_by_the_share_of_its_step_that_the_rate_has(rng):
    start, average, *_ = rounds(rng)
    server = ServerOptimiser("adam", lr=0.1)
    whole, state = server.step(start, average, ServerState())
    nearer = {name: (4 * start[name] + average[name]) / 5 for name in start}
    part, remembered = server.step(start, nearer, ServerState(), share=0.2)
    for name in start:
        torch.testing.assert_close(part[name] - start[name], 0.2 * (whole[name] - start[name]))
        torch.testing.assert_close(remembered.first[name], state.first[name])
        torch.testing.assert_close(remembered.second[name], state.second[name])


def test_adam(rng):
    """FedAdam of Reddi et al.: no correction of the bias, a floor under the denominator."""
    start, *averages = rounds(rng)
    server = ServerOptimiser("adam", lr=0.1, momentum=0.8, decay=0.95, floor=1e-2)
    moved, _ = run(server, start, averages)
    for name in start:
        theta, m, v = start[name].numpy().copy(), 0.0, 0.0
        for average in averages:
            delta = average[name].numpy() - theta
            m = 0.8 * m + 0.2 * delta
            v = 0.95 * v + 0.05 * delta**2
            theta = theta + 0.1 * m / (np.sqrt(v) + 1e-2)
        np.testing.assert_allclose(moved[name], theta, rtol=1e-12)


@pytest.mark.parametrize("kind", SERVER_KINDS)
def test_nothing_moves_where_clients_agree_and_the_type_stays(rng, kind):
    start = {name: value.float() for name, value in rounds(rng)[0].items()}
    average = {name: value.double() for name, value in start.items()}
    moved, _ = ServerOptimiser(kind, lr=0.5).step(start, average, ServerState())
    for name in start:
        assert moved[name].dtype == torch.float32
        assert torch.equal(moved[name], start[name])


@pytest.mark.parametrize("kind", SERVER_KINDS)
def test_a_step_leaves_its_arguments_alone(rng, kind):
    start, *averages = rounds(rng)
    server = ServerOptimiser(kind, lr=0.5)
    _, state = server.step(start, averages[0], ServerState())
    copies = [{n: v.clone() for n, v in d.items()} for d in (start, averages[1], state.first)]
    server.step(start, averages[1], state)
    for before, after in zip(copies, (start, averages[1], state.first), strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
