"""Stacked convolutions give the module's own numbers."""

import pytest
import torch

from fedgmm.core.params import stack
from fedgmm.nets.convolutions import Convolutional, convolve, patches
from fedgmm.nets.networks import network


def stacked(net, clients, learners, seed=0):
    generator = torch.Generator().manual_seed(seed)
    own = [stack([net.initial(generator) for _ in range(learners)]) for _ in range(clients)]
    return {name: torch.stack([one[name] for one in own]).double() for name in own[0]}


def modules(net, params, client, learner):
    module = net.module().double().eval()
    module.load_state_dict({name: value[client, learner] for name, value in params.items()})
    return module


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 12), (1, 7)])
def test_logits_are_those_of_one_module_after_the_other(channels, size):
    net = Convolutional(channels, size, 5)
    params = stacked(net, 2, 3)
    images = torch.randn(2, 4, channels, size, size, dtype=torch.float64)
    found = net.stacked_logits(params, images)
    assert found.shape == (2, 4, 3, 5)
    for client in range(2):
        for learner in range(3):
            expected = modules(net, params, client, learner)(images[client])
            torch.testing.assert_close(found[client, :, learner], expected, rtol=1e-10, atol=1e-10)


def test_gradients_are_those_of_the_module():
    net = Convolutional(2, 8, 3)
    params = {name: value.requires_grad_() for name, value in stacked(net, 2, 2).items()}
    images = torch.randn(2, 5, 2, 8, 8, dtype=torch.float64)
    ours = torch.autograd.grad(
        net.stacked_logits(params, images).square().sum(), list(params.values())
    )
    theirs = torch.autograd.grad(net.logits(params, images).square().sum(), list(params.values()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_shared_learners_have_no_client_axis():
    net = Convolutional(1, 8, 3)
    params = {name: value[0] for name, value in stacked(net, 1, 2).items()}
    images = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(
        net.stacked_logits(params, images), net.logits(params, images), rtol=1e-10, atol=1e-10
    )


SHAPES = [((3, 3), (1, 1), (1, 1)), ((3, 3), (2, 2), (1, 1)), ((5, 2), (1, 2), (0, 1))]


@pytest.mark.parametrize(("size", "stride", "padding"), SHAPES, ids=str)
def test_the_way_back_through_patches_is_the_derivative(size, stride, padding):
    images = torch.randn(2, 2, 1, 6, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: patches(x, size, stride, padding), (images,))


@pytest.mark.parametrize(("size", "stride", "padding"), SHAPES, ids=str)
def test_a_convolution_is_torchs_own(size, stride, padding):
    images = torch.randn(2, 3, 4, 6, 5, dtype=torch.float64)
    weight = torch.randn(2, 7, 3, *size, dtype=torch.float64)
    found = convolve(images, weight, stride, padding)
    for group in range(2):
        own = images[group].transpose(0, 1)
        expected = torch.nn.functional.conv2d(own, weight[group], None, stride, padding)
        torch.testing.assert_close(found[group].transpose(0, 1), expected)


def test_dropout_drops_in_training_only():
    net = Convolutional(1, 8, 3, dropout=0.5)
    params = {name: value[0] for name, value in stacked(net, 1, 1).items()}
    images = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    calm = net.stacked_logits(params, images)
    assert torch.equal(calm, net.stacked_logits(params, images))
    assert not torch.equal(calm, net.stacked_logits(params, images, training=True))


def test_products_in_half_precision_leave_parameters_and_logits_as_they_are():
    net = Convolutional(1, 8, 3, compute=torch.bfloat16)
    params = {name: value[0].float() for name, value in stacked(net, 1, 2).items()}
    images = torch.randn(6, 1, 8, 8)
    rough = net.stacked_logits(params, images)
    exact = Convolutional(1, 8, 3).stacked_logits(params, images)
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).abs().max() < 0.05


def test_the_name_cnn_means_this_network():
    assert network("cnn", (1, 28, 28), 62) == Convolutional(1, 28, 62)
