"""Stacked networks against a loop over clients and learners with plain modules."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from fedgmm.core.params import stack
from fedgmm.nets.convolutional import ConvNet, Convolutional, convolve, patches
from fedgmm.nets.networks import Dense, as_numbers, network
from supervised import load_dense, module_of

CLASSES, LEARNERS = 4, 3


class Gated(nn.Module):
    """A custom module with a scalar parameter, normalisation, and a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.layer = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.out = nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.out(self.norm(torch.tanh(self.layer(self.layer(x)) * self.scale)))


KINDS = {
    "linear": ("linear", (5,), lambda: module_of((5, CLASSES)).float()),
    "linear on images": ("linear", (1, 2, 3), lambda: module_of((6, CLASSES)).float()),
    "mlp": ("mlp", (5,), lambda: module_of((5, 64, CLASSES)).float()),
    "cnn": ("cnn", (2, 8, 8), lambda: ConvNet(2, 8, CLASSES)),
    "custom": (Gated, (5,), Gated),
}


def plain(net, build, params, index):
    module = build().eval()
    if isinstance(net, Dense):
        return load_dense(module, params, *index)
    module.load_state_dict({name: value[index] for name, value in params.items()})
    return module


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clients", [(), (2,), (2, 3)])
def test_logits_equal_a_loop_over_modules(kind, clients):
    learner, shape, build = KINDS[kind]
    net = network(learner, shape, CLASSES)
    generator = torch.Generator().manual_seed(1)
    drawn = stack([net.initial(generator) for _ in range(math.prod(clients) * LEARNERS)])
    params = {n: v.reshape(*clients, LEARNERS, *v.shape[1:]) for n, v in drawn.items()}
    inputs = torch.randn(*clients, 7, *shape, generator=generator)

    actual = net.logits(params, inputs)

    assert actual.shape == (*clients, 7, LEARNERS, CLASSES)
    for own in np.ndindex(*clients):
        for m in range(LEARNERS):
            module = plain(net, build, params, (*own, m))
            x = inputs[own].flatten(1) if isinstance(net, Dense) else inputs[own]
            with torch.no_grad():
                torch.testing.assert_close(
                    actual[(*own, slice(None), m)], module(x), atol=2e-6, rtol=1e-5
                )


@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_of_a_learner_have_the_declared_shapes(kind):
    learner, shape, _ = KINDS[kind]
    net = network(learner, shape, CLASSES)
    drawn = net.initial(torch.Generator().manual_seed(0))
    assert {name: tuple(value.shape) for name, value in drawn.items()} == net.parameter_shapes


@pytest.mark.parametrize("kind", KINDS)
def test_a_random_start_depends_on_its_generator_only(kind):
    learner, shape, _ = KINDS[kind]
    net = network(learner, shape, CLASSES)
    before = torch.random.get_rng_state()
    generator = torch.Generator().manual_seed(3)
    first, second = net.initial(generator), net.initial(generator)
    again = net.initial(torch.Generator().manual_seed(3))
    assert torch.equal(before, torch.random.get_rng_state())
    for name, value in first.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, again[name])
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_linear_layers_have_the_initialisation_of_torch():
    params = Dense(400, 3, hidden=(50,)).initial(torch.Generator().manual_seed(0))
    for name, fan_in in (("0.weight", 400), ("0.bias", 400), ("1.weight", 50)):
        bound = fan_in**-0.5
        assert params[name].abs().max() <= bound
        assert params[name].abs().max() > 0.8 * bound  # uniform up to the bound
        if params[name].numel() > 100:
            assert abs(float(params[name].mean())) < 0.1 * bound


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 40)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(40, 2)

    def forward(self, x):
        return self.out(self.drop(torch.relu(self.layer(x))))


def test_dropout_of_a_module_is_active_in_training_only():
    net = network(Dropping, (5,), 2)
    params = stack([net.initial(torch.Generator().manual_seed(0))])
    x = torch.randn(6, 5)
    module = Dropping().eval()
    module.load_state_dict({name: value[0] for name, value in params.items()})
    with torch.no_grad():
        torch.testing.assert_close(net.logits(params, x)[:, 0], module(x))
    assert torch.equal(net.logits(params, x), net.logits(params, x))
    noisy = net.logits(params, x, training=True)
    assert not torch.equal(noisy, net.logits(params, x, training=True))


def test_learners_drop_different_units():
    net = network(Dropping, (5,), 2)
    one = net.initial(torch.Generator().manual_seed(0))
    out = net.logits(stack([one, one]), torch.ones(4, 5), training=True)
    assert not torch.equal(out[:, 0], out[:, 1])


@pytest.mark.parametrize("kind", ["linear", "mlp", "cnn"])
def test_networks_by_name_can_be_copied_and_pickled(kind):
    learner, shape, _ = KINDS[kind]
    net = network(learner, shape, CLASSES)
    params = stack([net.initial(torch.Generator().manual_seed(0))])
    x = torch.randn(2, *shape)
    expected = net.logits(params, x)
    for twin in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        assert torch.equal(twin.logits(params, x), expected)


# ---------------------------------------------------------------------- bad names and shapes


@pytest.mark.parametrize("shape", [(5,), (1, 8, 9), (1, 3, 3), (8, 8)])
def test_a_cnn_needs_square_images(shape):
    with pytest.raises(ValueError, match="square"):
        network("cnn", shape, 2)


@pytest.mark.parametrize("learner", ["forest", 3, None])
def test_an_unknown_learner_is_named(learner):
    with pytest.raises(ValueError, match=repr(learner)):
        network(learner, (5,), 2)


# ---------------------------------------------------------------------- the small convolutional network


def drawn_params(net, clients, learners, seed=0):
    generator = torch.Generator().manual_seed(seed)
    own = [stack([net.initial(generator) for _ in range(learners)]) for _ in range(clients)]
    return {name: torch.stack([one[name] for one in own]).double() for name in own[0]}


def module_with(net, params, client, learner):
    module = net.module().double().eval()
    module.load_state_dict({name: value[client, learner] for name, value in params.items()})
    return module


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 12), (1, 7)])
def test_batched_products_give_the_logits_of_single_modules(channels, size):
    net = Convolutional(channels, size, 5)
    params = drawn_params(net, 2, 3)
    images = torch.randn(2, 4, channels, size, size, dtype=torch.float64)
    found = net.stacked_logits(params, images)
    assert found.shape == (2, 4, 3, 5)
    for client in range(2):
        for learner in range(3):
            expected = module_with(net, params, client, learner)(images[client])
            torch.testing.assert_close(found[client, :, learner], expected, rtol=1e-10, atol=1e-10)


def test_batched_products_give_the_gradients_of_the_module():
    net = Convolutional(2, 8, 3)
    params = {name: value.requires_grad_() for name, value in drawn_params(net, 2, 2).items()}
    images = torch.randn(2, 5, 2, 8, 8, dtype=torch.float64)
    ours = torch.autograd.grad(
        net.stacked_logits(params, images).square().sum(), list(params.values())
    )
    theirs = torch.autograd.grad(net.logits(params, images).square().sum(), list(params.values()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_batched_products_of_shared_learners_have_no_client_axis():
    net = Convolutional(1, 8, 3)
    params = {name: value[0] for name, value in drawn_params(net, 1, 2).items()}
    images = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(
        net.stacked_logits(params, images), net.logits(params, images), rtol=1e-10, atol=1e-10
    )


SHAPES = [((3, 3), (1, 1), (1, 1)), ((3, 3), (2, 2), (1, 1)), ((5, 2), (1, 2), (0, 1))]


@pytest.mark.parametrize(("size", "stride", "padding"), SHAPES, ids=str)
def test_backward_pass_of_patches_is_the_derivative(size, stride, padding):
    images = torch.randn(1, 2, 1, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: patches(x, size, stride, padding), (images,))


@pytest.mark.parametrize(("size", "stride", "padding"), SHAPES, ids=str)
def test_convolve_equals_torch(size, stride, padding):
    images = torch.randn(2, 3, 4, 6, 5, dtype=torch.float64)
    weight = torch.randn(2, 7, 3, *size, dtype=torch.float64)
    found = convolve(images, weight, stride, padding)
    for group in range(2):
        own = images[group].transpose(0, 1)
        expected = torch.nn.functional.conv2d(own, weight[group], None, stride, padding)
        torch.testing.assert_close(found[group].transpose(0, 1), expected)


def test_half_precision_products_return_logits_in_the_dtype_of_the_parameters():
    net = Convolutional(1, 8, 3, compute=torch.bfloat16)
    params = {name: value[0].float() for name, value in drawn_params(net, 1, 2).items()}
    images = torch.randn(6, 1, 8, 8)
    approximate = net.stacked_logits(params, images)
    exact = Convolutional(1, 8, 3).stacked_logits(params, images)
    assert approximate.dtype == torch.float32
    assert 0 < (approximate - exact).abs().max() < 0.05


def test_cnn_by_name():
    assert network("cnn", (1, 28, 28), 62) == Convolutional(1, 28, 62)


# ---------------------------------------------------------------------- inputs


def test_bytes_of_images_are_scaled_to_minus_one_and_one():
    images = torch.tensor([0, 255], dtype=torch.uint8).reshape(1, 1, 1, 2)
    assert as_numbers(images, torch.float32).flatten().tolist() == [-1.0, 1.0]
    assert images.flatten().tolist() == [0, 255]


def test_bytes_of_tables_and_floats_are_not_scaled():
    table = torch.tensor([[0, 255]], dtype=torch.uint8)
    assert as_numbers(table, torch.float64).tolist() == [[0.0, 255.0]]
    images = torch.full((1, 1, 2, 2), 0.5)
    assert torch.equal(as_numbers(images, torch.float32), images)
