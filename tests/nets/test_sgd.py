"""Stacked training against torch's own optimiser, one client and learner at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import nn
from torch.nn.functional import cross_entropy

from fedgmm.core.params import expand_clients, flatten, take_clients
from fedgmm.nets.networks import Dense, network
from fedgmm.nets.sgd import (
    MARGIN,
    SGD,
    TrainingRows,
    batch_loss,
    crop_and_flip,
    plan_batches,
    train_local,
    train_moreau,
)
from small_learners import SIZES, drawn, rows, shuffles
from supervised import batches_of, dense_params, load_dense, module_of, plain_sgd

# ---------------------------------------------------------------------- batches


@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any),
    batch=st.integers(1, 25),
    epochs=st.integers(1, 3),
    data=st.data(),
)
def test_every_row_is_seen_once_per_epoch_by_its_own_client(sizes, batch, epochs, data):
    rng = np.random.default_rng(0)
    offsets = torch.tensor([0, *np.cumsum(sizes)])
    present = [c for c, n in enumerate(sizes) if n]
    clients = sorted(data.draw(st.sets(st.sampled_from(present), min_size=1)))
    plan = plan_batches(offsets, torch.tensor(clients), shuffles(rng, sizes, epochs), batch)

    assert sorted(plan.clients.tolist()) == clients
    steps_per_epoch = len(plan.steps) // epochs
    for epoch in range(epochs):
        seen = {client: [] for client in clients}
        for step in plan.steps[epoch * steps_per_epoch : (epoch + 1) * steps_per_epoch]:
            assert step.rows.shape == step.mask.shape
            assert step.mask.any(1).all()  # no client has an empty batch
            assert step.rows.shape[1] <= batch
            for client, numbers, mask in zip(
                plan.clients.tolist(), step.rows, step.mask, strict=False
            ):
                seen[client] += numbers[mask].tolist()
        for client in clients:
            own = range(int(offsets[client]), int(offsets[client + 1]))
            assert sorted(seen[client]) == list(own)


@pytest.mark.parametrize("even", [False, True])
def test_padding_to_a_multiple_adds_no_rows(rng, even):
    offsets, orders = torch.tensor([0, *np.cumsum(SIZES)]), shuffles(rng, SIZES, 1)
    plain = plan_batches(offsets, torch.arange(4), orders, 6, even)
    padded = plan_batches(offsets, torch.arange(4), orders, 6, even, multiple=4)
    for step, other in zip(plain.steps, padded.steps, strict=True):
        assert other.rows.shape[1] % 4 == 0
        assert 0 <= other.rows.shape[1] - step.rows.shape[1] < 4
        for own, mask, rows_of, mask_of in zip(
            step.rows, step.mask, other.rows, other.mask, strict=True
        ):
            assert own[mask].tolist() == rows_of[mask_of].tolist()
        assert other.full == bool(other.mask.all())
        if other.counts is not None:  # padding comes last
            columns = torch.arange(other.mask.shape[1])
            assert torch.equal(other.mask, columns < other.counts[:, None])


def test_only_the_last_batch_of_a_client_is_short(rng):
    offsets = torch.tensor([0, *np.cumsum(SIZES)])
    plan = plan_batches(offsets, torch.arange(4), shuffles(rng, SIZES, 1), 6)
    widths = torch.stack(
        [torch.nn.functional.pad(s.mask.sum(1), (0, 4 - len(s.mask))) for s in plan.steps]
    )
    for place, client in enumerate(plan.clients.tolist()):
        full, rest = divmod(SIZES[client], 6)
        own = widths[:, place]
        assert own[own > 0].tolist() == [6] * full + ([rest] if rest else [])


# ---------------------------------------------------------------------- stacked training


def looped(x, y, w, offsets, orders, params, widths, options):
    """Train each client and learner separately with torch's SGD: ``{(client, learner): params}``."""
    result = {}
    for c in range(len(offsets) - 1):
        first, last = int(offsets[c]), int(offsets[c + 1])
        batches = [
            b for order in orders for b in batches_of(order[first:last] - first, options.batch_size)
        ]
        for m in range(len(next(iter(params.values())))):
            module = load_dense(module_of(widths), params, m)
            plain_sgd(
                module,
                x[first:last],
                y[first:last],
                batches,
                lr=options.lr,
                momentum=options.momentum,
                weight_decay=options.weight_decay,
                proximal=options.proximal,
                clip_norm=options.clip_norm,
                weights=None if w is None else w[first:last, m],
            )
            result[c, m] = dense_params(module)
    return result


def stacked(x, y, w, offsets, orders, params, net, options):
    clients = torch.arange(len(offsets) - 1)
    plan = plan_batches(offsets, clients, orders, options.batch_size)
    start = expand_clients(params, len(clients))
    anchor = start if options.proximal else None
    trained = train_local(net, start, TrainingRows(x, y, w), plan, options, anchor)
    return {
        (c, m): {name: value[place, m] for name, value in trained.items()}
        for place, c in enumerate(plan.clients.tolist())
        for m in range(len(next(iter(params.values()))))
    }


def assert_same(actual, expected, atol=1e-10):
    assert actual.keys() == expected.keys()
    for key in expected:
        for name in expected[key]:
            torch.testing.assert_close(actual[key][name], expected[key][name], atol=atol, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        SGD(lr=0.3, batch_size=4),
        SGD(lr=0.3, momentum=0.9, batch_size=4, epochs=3),
        SGD(lr=0.3, weight_decay=0.1, batch_size=7, epochs=2),
        SGD(lr=0.3, proximal=0.5, batch_size=4, epochs=2),
        SGD(0.2, momentum=0.5, weight_decay=0.01, proximal=0.2, batch_size=5, epochs=2),
        SGD(lr=0.3, batch_size=1000),
        SGD(lr=0.3, momentum=0.9, clip_norm=0.3, batch_size=4, epochs=3),
        SGD(0.3, weight_decay=0.1, proximal=0.2, clip_norm=0.1, batch_size=4),
    ],
    ids=["plain", "momentum", "decay", "proximal", "all", "full batch", "clipped", "clipped, all"],
)
@pytest.mark.parametrize("hidden", [(), (6,)], ids=["linear", "mlp"])
@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("weighted", [True, False])
def test_stacked_training_equals_a_loop_over_clients_and_learners(
    rng, options, hidden, classes, weighted
):
    net = Dense(3, classes, hidden)
    params = drawn(net, 2)
    x, y, w, offsets = rows(rng, classes=classes)
    w = w if weighted else None
    orders = shuffles(rng, SIZES, options.epochs)
    expected = looped(x, y, w, offsets, orders, params, net.widths, options)
    assert_same(stacked(x, y, w, offsets, orders, params, net, options), expected)
    for name, value in params.items():  # the initial parameters are not modified
        assert torch.equal(value, drawn(net, 2)[name])


def test_a_custom_module_is_trained_like_a_dense_network(rng):
    net, options = Dense(3, 2, (6,)), SGD(lr=0.3, momentum=0.9, batch_size=4, epochs=2)
    x, y, w, offsets = rows(rng)
    orders = shuffles(rng, SIZES, 2)
    names = {"0.weight": "0.weight", "0.bias": "0.bias", "1.weight": "2.weight", "1.bias": "2.bias"}
    params = drawn(net, 2)
    module = network(lambda: module_of(net.widths).float(), (3,), 2)
    renamed = {names[name]: value for name, value in params.items()}
    expected = stacked(x, y, w, offsets, orders, params, net, options)
    actual = stacked(x, y, w, offsets, orders, renamed, module, options)
    back = {key: {name: own[names[name]] for name in names} for key, own in actual.items()}
    assert_same(back, expected, atol=1e-12)


class Idle(nn.Module):
    """A module with an unused parameter and a scalar parameter."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        return self.scale * self.out(x)


def test_an_unused_parameter_does_not_change(rng):
    net = network(Idle, (3,), 2)
    x, y, w, offsets = rows(rng)
    params = drawn(net, 2)
    orders = shuffles(rng, SIZES, 1)
    trained = stacked(x, y, w, offsets, orders, params, net, SGD(lr=0.5, batch_size=8))
    for own in trained.values():
        assert torch.equal(own["unused"], torch.ones(2, dtype=torch.float64))
        assert float(own["scale"]) != 1.0


def test_a_clipped_step_has_at_most_the_given_norm(rng):
    net, limit = network(Idle, (3,), 2), 0.05
    x, y, _, offsets = rows(rng)
    x = x * torch.tensor([1e-6, 1e9])[(torch.arange(len(x)) >= offsets[1]).long()].unsqueeze(1)
    params, whole = drawn(net, 2), [torch.arange(len(x))]
    options = SGD(lr=1.0, batch_size=1000, clip_norm=limit)
    plain = stacked(x, y, None, offsets, whole, params, net, replace(options, clip_norm=None))
    clipped = stacked(x, y, None, offsets, whole, params, net, options)
    for key, own in clipped.items():
        start = {name: value[key[1]] for name, value in params.items()}
        moved, free = (
            torch.sqrt(sum(((after[name] - start[name]) ** 2).sum() for name in start))
            for after in (own, plain[key])
        )
        assert float(moved) == pytest.approx(min(limit, float(free)), rel=1e-4)


# ---------------------------------------------------------------------- weights of rows


def one_client(rng, n=30):
    x, y, w, offsets = rows(rng, sizes=(n,))
    return x, y, w, offsets


def test_weights_follow_their_rows_through_a_shuffle(rng):
    """Permuted rows, labels and weights with batches of the same rows give the same learners."""
    net, options = Dense(3, 2), SGD(lr=0.5, batch_size=8, epochs=2)
    x, y, w, offsets = one_client(rng)
    orders = shuffles(rng, (30,), 2)
    expected = stacked(x, y, w, offsets, orders, drawn(net, 2), net, options)
    mixed = torch.from_numpy(rng.permutation(30))
    place = torch.argsort(mixed)
    moved = [place[order] for order in orders]
    actual = stacked(x[mixed], y[mixed], w[mixed], offsets, moved, drawn(net, 2), net, options)
    assert_same(actual, expected, atol=1e-12)


def test_permuted_weights_change_the_learners(rng):
    """The test above can fail: if only the weights are permuted, the learners differ."""
    net, options = Dense(3, 2), SGD(lr=0.5, batch_size=8, epochs=2)
    x, y, w, offsets = one_client(rng)
    orders = shuffles(rng, (30,), 2)
    expected = stacked(x, y, w, offsets, orders, drawn(net, 2), net, options)
    mixed = torch.from_numpy(rng.permutation(30))
    actual = stacked(x, y, w[mixed], offsets, orders, drawn(net, 2), net, options)
    gap = max(
        float((actual[key][name] - expected[key][name]).abs().max())
        for key in expected
        for name in expected[key]
    )
    assert gap > 1e-2


def test_a_row_with_weight_zero_has_no_effect(rng):
    """The labels of rows with weight zero for a learner do not matter to it."""
    net, options = Dense(3, 2), SGD(lr=0.5, batch_size=8, epochs=2)
    x, y, _, offsets = one_client(rng)
    mine = torch.from_numpy(rng.random(30) < 0.5)
    w = torch.stack([mine, ~mine], dim=1).double()
    orders = shuffles(rng, (30,), 2)
    expected = stacked(x, y, w, offsets, orders, drawn(net, 2), net, options)
    wrong = y.clone()
    wrong[~mine] = 1 - wrong[~mine]
    actual = stacked(x, wrong, w, offsets, orders, drawn(net, 2), net, options)
    for name in expected[0, 0]:
        assert torch.equal(actual[0, 0][name], expected[0, 0][name])
    assert not torch.equal(actual[0, 1]["0.weight"], expected[0, 1]["0.weight"])


def test_weights_are_normalised_within_the_batch_of_a_client(rng):
    net, options = Dense(3, 2), SGD(lr=0.5, momentum=0.9, batch_size=8, epochs=2)
    x, y, w, offsets = rows(rng)
    orders = shuffles(rng, SIZES, 2)
    expected = stacked(x, y, w, offsets, orders, drawn(net, 2), net, options)
    small = w * torch.tensor([0.01, 1.0], dtype=w.dtype)
    actual = stacked(x, y, small, offsets, orders, drawn(net, 2), net, options)
    assert_same(actual, expected, atol=1e-12)


def test_a_learner_without_any_weight_in_a_batch_does_not_move(rng):
    net, options = Dense(3, 2), SGD(lr=0.5, batch_size=8)
    x, y, w, offsets = rows(rng)
    w[:, 0] = 0.0
    trained = stacked(x, y, w, offsets, shuffles(rng, SIZES, 1), drawn(net, 2), net, options)
    for c in range(len(SIZES)):
        for name, value in drawn(net, 2).items():
            assert torch.equal(trained[c, 0][name], value[0])
            assert torch.isfinite(trained[c, 1][name]).all()


def test_the_loss_of_a_batch_is_a_weighted_mean(rng):
    net = Dense(3, 2)
    x, y, w, offsets = rows(rng)
    plan = plan_batches(offsets, torch.arange(4), shuffles(rng, SIZES, 1), 5)
    params = expand_clients(drawn(net, 2), 4)
    step = plan.steps[1]
    active = take_clients(params, slice(0, len(step.rows)))
    losses, _ = batch_loss(net, active, TrainingRows(x, y, w), step)
    for place, (numbers, mask) in enumerate(zip(step.rows, step.mask, strict=True)):
        own = numbers[mask]
        for m in range(2):
            logits = net.logits(take_clients(params, slice(0, 1)), x[own][None])[0, :, m]
            ce = cross_entropy(logits, y[own], reduction="none")
            expected = (w[own, m] * ce).sum() / w[own, m].sum()
            torch.testing.assert_close(losses[place, m], expected)


# ---------------------------------------------------------------------- pFedMe's inner problem


def moreau(rng, steps, **changes):
    """Train with one full batch per client and ``steps`` inner steps."""
    net = Dense(3, 2)
    x, y, _, offsets = rows(rng)
    plan = plan_batches(offsets, torch.arange(4), shuffles(rng, SIZES, 1), 1000)
    options = {"penalty": 2.0, "inner_steps": steps, "inner_lr": 0.1, **changes}
    start = expand_clients(drawn(net, 1), 4)
    local, personal = train_moreau(net, start, TrainingRows(x, y), plan, SGD(lr=0.05), **options)
    return x, y, offsets, plan, start, local, personal


def test_the_personal_learner_is_the_proximal_point(rng):
    """``argmin f(θ) + λ/2 ‖θ - w‖²``, compared with scipy's minimiser."""
    x, y, offsets, plan, start, _, personal = moreau(rng, 2000)
    for place, c in enumerate(plan.clients.tolist()):
        own, labels = x[offsets[c] : offsets[c + 1]], y[offsets[c] : offsets[c + 1]]
        w = flatten(start)[place, 0]

        def objective(theta, own=own, labels=labels, w=w):
            theta = torch.from_numpy(theta).requires_grad_()
            logits = own @ theta[:6].reshape(2, 3).mT + theta[6:]
            value = cross_entropy(logits, labels) + 2.0 / 2 * (theta - w).square().sum()
            (gradient,) = torch.autograd.grad(value, theta)
            return float(value.detach()), gradient.numpy()

        best = minimize(objective, w.numpy(), jac=True, tol=1e-14, options={"gtol": 1e-10})
        found = flatten(personal)[place, 0].numpy()
        np.testing.assert_allclose(found, best.x, atol=1e-6)


def test_the_local_learner_moves_towards_the_personal_one(rng):
    """``w ← w - η λ (w - θ̃)``."""
    *_, start, local, personal = moreau(rng, 5)
    for name, value in start.items():
        expected = value - 0.05 * 2.0 * (value - personal[name])
        torch.testing.assert_close(local[name], expected)
        assert not torch.equal(local[name], value)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_several_batches_equal_a_plain_loop(rng, clip_norm):
    """Clients of different sizes with small batches, compared with one client at a time."""
    net = Dense(3, 2)
    x, y, _, offsets = rows(rng)
    orders = shuffles(rng, SIZES, 2)
    plan = plan_batches(offsets, torch.arange(4), orders, 4)
    start = drawn(net, 1)
    options = SGD(lr=0.1, batch_size=4, clip_norm=clip_norm)
    local, personal = train_moreau(
        net, expand_clients(start, 4), TrainingRows(x, y), plan, options, 3.0, 4, 0.07
    )
    for place, c in enumerate(plan.clients.tolist()):
        first, last = int(offsets[c]), int(offsets[c + 1])
        w, theta = module_of((3, 2)), module_of((3, 2))
        load_dense(w, start, 0)
        load_dense(theta, start, 0)
        for order in orders:
            for batch in batches_of(order[first:last], 4):
                for _ in range(4):
                    theta.zero_grad()
                    cross_entropy(theta(x[batch]), y[batch]).backward()
                    if clip_norm is not None:
                        nn.utils.clip_grad_norm_(theta.parameters(), clip_norm)
                    with torch.no_grad():
                        for own, centre in zip(theta.parameters(), w.parameters(), strict=True):
                            own -= 0.07 * (own.grad + 3.0 * (own - centre))
                with torch.no_grad():
                    for centre, own in zip(w.parameters(), theta.parameters(), strict=True):
                        centre -= 0.1 * 3.0 * (centre - own)
        for name in start:
            torch.testing.assert_close(
                personal[name][place, 0], dense_params(theta)[name], atol=1e-10, rtol=0
            )
            torch.testing.assert_close(
                local[name][place, 0], dense_params(w)[name], atol=1e-10, rtol=0
            )


# ---------------------------------------------------------------------- augmentation


def test_every_crop_and_flip_is_a_shift_and_a_mirror_image():
    size = 9
    images = torch.arange(1, 2 * 3 * size * size + 1).reshape(1, 2, 3, size, size).double()
    seen = set()
    for seed in range(60):
        torch.manual_seed(seed)
        for before, after in zip(images[0], crop_and_flip(images)[0], strict=True):
            matches = [
                (down, right, flip)
                for down in range(-MARGIN, MARGIN + 1)
                for right in range(-MARGIN, MARGIN + 1)
                for flip in (False, True)
                if torch.equal(after, moved(before, down, right, flip))
            ]
            assert len(matches) == 1
            seen.update(matches)
    assert {flip for *_, flip in seen} == {False, True}
    assert {down for down, *_ in seen} == set(range(-MARGIN, MARGIN + 1))


def moved(image, down, right, flip):
    """Cut the image, in a frame of zeros, ``down`` and ``right`` of its position."""
    size = image.shape[-1]
    wide = torch.zeros(len(image), size + 2 * MARGIN, size + 2 * MARGIN, dtype=image.dtype)
    wide[:, MARGIN:-MARGIN, MARGIN:-MARGIN] = image
    cut = wide[:, MARGIN + down : MARGIN + down + size, MARGIN + right : MARGIN + right + size]
    return cut.flip(-1) if flip else cut


def test_crops_of_bytes_are_bytes():
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    assert crop_and_flip(images).dtype == torch.uint8
