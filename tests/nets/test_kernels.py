"""GPU kernels compared with plain torch, on a GPU or else in Triton's interpreter.

The interpreter runs the same code in NumPy, slowly.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedgmm.core.params import is_statistic
from fedgmm.nets import stacked
from fedgmm.nets.convolutional import Convolutional
from fedgmm.nets.kernels import fused as kernels
from fedgmm.nets.sgd import SGD, TrainingRows, plan_batches, train_local

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def relative_distance(found, expected):
    """Return the relative distance in the norm."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-12))


BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# the interpreter multiplies in NumPy, which does not have bfloat16
PRODUCT_BOUNDS = BOUNDS if DEVICE.type == "cuda" else {torch.float32: 1e-5, torch.float16: 5e-3}


def gradients(function, *given):
    own = [value.detach().clone().requires_grad_() for value in given]
    out = function(*own)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, own, slope.to(out))]


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(DEVICE)


def every_shape_in_float32(names, shapes, bounds, half=0):
    """Parametrise over all shapes; in 16 bits only the first ``half`` are quick, and the rest are slow."""
    cases = [
        pytest.param(
            *shape, dtype, marks=[pytest.mark.slow] * (dtype.itemsize == 2 and number >= half)
        )
        for dtype in bounds
        for number, shape in enumerate(shapes)
    ]
    return pytest.mark.parametrize((*names, "dtype"), cases)


@every_shape_in_float32(
    ("shape", "stride"),
    [
        ((2, 3, 5, 7, 7), 1),
        ((2, 3, 5, 8, 8), 2),
        ((3, 2, 4, 2, 2), 2),
        ((2, 2, 5, 1, 1), 1),
        ((1, 2, 30, 5, 6), 1),  # several tiles, not square
        ((1, 2, 40, 5, 6), 2),
        ((1, 1, 1, 1, 1), 2),
    ],
    BOUNDS,
    half=1,
)
def test_depthwise_kernel(shape, stride, dtype):
    groups, channels, rows, height, width = shape

    def plain(images, weight):
        flat = images.permute(2, 0, 1, 3, 4).reshape(rows, groups * channels, height, width)
        out = functional.conv2d(
            flat, weight.flatten(0, 1), stride=stride, padding=1, groups=groups * channels
        )
        return out.reshape(rows, groups, channels, *out.shape[-2:]).permute(1, 2, 0, 3, 4)

    given = normal(*shape).to(dtype), normal(groups, channels, 1, 3, 3).to(dtype)
    found = gradients(lambda x, w: kernels.depthwise(x, w, stride), *given)
    expected = gradients(plain, *(value.double() for value in given))
    assert max(map(relative_distance, found, expected)) < BOUNDS[dtype]


@pytest.mark.parametrize("ceiling", [kernels.NO_ACTIVATION, kernels.RELU, kernels.RELU6])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_batch_normalisation_kernel(ceiling, padded, dtype):
    counts = torch.tensor([1, 6, 4], device=DEVICE) if padded else None
    present = 1.0
    if counts is not None:
        present = (torch.arange(6, device=DEVICE) < counts[:, None])[:, None, :, None, None]
    images = (3 * normal(3, 2, 6, 5, 5) + 1).to(dtype)
    given = images, normal(3, 2).abs() * 3, normal(3, 2)
    chosen = None if ceiling < 0 else ceiling

    def plain(images, weight, bias):
        out, _ = stacked._normalise_by_batch(images, counts, weight, bias, 1e-5)
        return stacked._activate(out, chosen) * present

    running, new = kernels.BatchStatistics(normal(3, 2), normal(3, 2).abs()), []

    def fast(images, weight, bias):
        out, statistics = kernels.normalised(
            images, weight, bias, counts, running, 0.1, 1e-5, ceiling
        )
        new.extend(statistics)
        return out

    found = gradients(fast, *given)
    expected = gradients(plain, *(value.double() for value in given))
    assert max(map(relative_distance, found, expected)) < BOUNDS[dtype]
    _, own = stacked._normalise_by_batch(given[0], counts, *given[1:], 1e-5)
    expected = stacked._moving_average(running, own, stacked._unbiased(given[0], counts), 0.1)
    assert max(map(relative_distance, new, expected)) < 1e-5


def block(images, weight, bias):
    """Convolution, pooling and ReLU in a loop over groups, channels first."""
    return torch.stack(
        [
            functional.max_pool2d(functional.conv2d(x, w, b, padding=1), 2).relu()
            for x, w, b in zip(images, weight, bias, strict=True)
        ]
    )


@every_shape_in_float32(
    ("colours", "height", "width"),
    [(1, 8, 8), (2, 5, 5), (3, 6, 9), (4, 4, 4), (1, 7, 4)],
    PRODUCT_BOUNDS,
    half=1,
)
def test_pixel_block_kernel(colours, height, width, dtype):
    """Two clients with three learners each, which share their client's images, in two tiles."""
    images = normal(2, 9, colours, height, width).to(dtype)
    given = normal(6, 16, colours, 3, 3).to(dtype), normal(6, 16).to(dtype)
    found = gradients(lambda w, b: kernels.pixel_block(images, w, b), *given)
    shared = images.double().repeat_interleave(3, 0)
    expected = gradients(
        lambda w, b: block(shared, w, b).permute(0, 1, 3, 4, 2), *(v.double() for v in given)
    )
    assert max(map(relative_distance, found, expected)) < PRODUCT_BOUNDS[dtype]


@every_shape_in_float32(
    ("groups", "rows", "height", "width"),
    [(2, 5, 5, 6), (1, 8, 6, 7), (1, 3, 2, 2)],
    PRODUCT_BOUNDS,
)
def test_channel_block_kernel(groups, rows, height, width, dtype):
    """The second case needs more than one tile; heights and widths are even and odd."""
    images = normal(groups, rows, height, width, 16)
    given = [
        value.to(dtype) for value in (images, normal(groups, 32, 16, 3, 3), normal(groups, 32))
    ]
    found = gradients(kernels.channel_block, *given)
    expected = gradients(
        lambda x, w, b: block(x.permute(0, 1, 4, 2, 3), w, b).permute(0, 1, 3, 4, 2),
        *(value.double() for value in given),
    )
    assert max(map(relative_distance, found, expected)) < PRODUCT_BOUNDS[dtype]


def test_blocks_propagate_nan():
    """Otherwise a diverged learner would predict as if it were sound."""
    images, weight, bias = normal(1, 2, 1, 4, 4), normal(1, 16, 1, 3, 3), normal(1, 16)
    weight[0, 3, 0, 1, 1] = torch.nan
    out = kernels.pixel_block(images, weight, bias)
    assert out[..., 3].isnan().all()
    assert not out[..., :3].isnan().any()


def test_ties_go_to_the_first_corner_and_zeros_have_no_gradient():
    """As torch's pooling does."""
    images = torch.ones(1, 1, 4, 4, 16, device=DEVICE)
    weight = torch.zeros(1, 16, 16, 3, 3, device=DEVICE)
    weight[:, :, :, 1, 1] = 1.0  # the filter is the identity: four equal pixels
    bias = torch.zeros(1, 16, device=DEVICE)
    bias[:, 8:] = -16.0  # half of the outputs are exactly zero
    given = images, weight, bias
    found = gradients(kernels.channel_block, *given)
    expected = gradients(
        lambda x, w, b: block(x.permute(0, 1, 4, 2, 3), w, b).permute(0, 1, 3, 4, 2),
        *(value.double() for value in given),
    )
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(own, right.to(own), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("colours", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_small_network_with_and_without_kernels(colours, monkeypatch):
    half = next(dtype for dtype in PRODUCT_BOUNDS if dtype.itemsize == 2)
    net = Convolutional(colours, 9, 5, compute=half)
    generator = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn((2, 1, *shape), generator=generator).to(DEVICE) * 0.2
        for name, shape in net.parameter_shapes.items()
    }
    images = torch.rand(2, 7, colours, 9, 9, generator=generator).to(DEVICE)
    exact = replace(net, compute=torch.float64)

    def logits(own_net, *own):
        return own_net.stacked_logits(dict(zip(params, own, strict=True)), images)

    expected = gradients(partial(logits, exact), *params.values())
    monkeypatch.setattr(kernels, "usable", lambda _: False)
    plain = gradients(partial(logits, net), *params.values())
    monkeypatch.setattr(kernels, "usable", lambda _: True)
    found = gradients(partial(logits, net), *params.values())
    # With 16 bits another of two similar pixels may be pooled, so plain torch sets the tolerance.
    rounding = max(map(relative_distance, plain, expected))
    assert 0 < rounding < 0.2
    assert max(map(relative_distance, found, expected)) < 1.5 * rounding
    filters = params["features.0.weight"][0], params["features.3.weight"][0]
    assert kernels.usable_blocks(images.to(half), *filters)
    # not supported: float32, and gradients of the images
    assert not kernels.usable_blocks(images, *filters)
    assert not kernels.usable_blocks(images.to(half).requires_grad_(), *filters)


def test_scaling_kernel():
    images, scale, shift = normal(2, 3, 4, 5, 5), normal(2, 3), normal(2, 3).abs()
    expected = images * scale[..., None, None, None] + shift[..., None, None, None]
    found = kernels.scaled(images, scale, shift, kernels.RELU6)
    torch.testing.assert_close(found, expected.clamp(0, 6))
    torch.testing.assert_close(kernels.scaled(images, scale, shift), expected)


class Bottleneck(nn.Module):
    """A small network with the layers of MobileNet-V2."""

    def __init__(self):
        super().__init__()

        def block(wide, out, stride):
            return [
                nn.Conv2d(2, wide, 1, bias=False),
                nn.BatchNorm2d(wide),
                nn.ReLU6(),
                nn.Conv2d(wide, wide, 3, stride=stride, padding=1, groups=wide, bias=False),
                nn.BatchNorm2d(wide),
                nn.ReLU6(),
                nn.Conv2d(wide, out, 1, bias=False),
                nn.BatchNorm2d(out),
            ]

        self.features = nn.Sequential(
            nn.Conv2d(3, 2, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2),
            nn.ReLU6(),
            *block(3, 2, 1),
            *block(3, 3, 2),
        )
        self.classifier = nn.Linear(3, 3)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


def test_training_with_and_without_kernels(monkeypatch):
    """Clients of several sizes, so that batches are padded; compares parameters and predictions."""
    net, generator = stacked.Stacked(Bottleneck, (3, 8, 8), 3), torch.Generator().manual_seed(1)
    start = {
        name: value.expand(2, 1, *value.shape).clone()
        for name, value in net.initial(generator).items()
    }
    for name, value in start.items():
        if not is_statistic(name):
            value += 0.1 * torch.randn(value.shape, generator=generator)
    inputs = torch.randn(9, 3, 8, 8, generator=generator).to(DEVICE)
    labels = torch.randint(3, (9,), generator=generator).to(DEVICE)
    weights = torch.rand(9, 1, generator=generator).to(DEVICE)
    offsets, order = torch.tensor([0, 7, 9]).to(DEVICE), torch.arange(9).to(DEVICE)
    plan = plan_batches(offsets, torch.arange(2).to(DEVICE), [order], 4, even=True)
    assert not all(step.full for step in plan.steps)
    start = {name: value.to(DEVICE) for name, value in start.items()}
    rows, outcome = TrainingRows(inputs, labels, weights), []
    for fast in (False, True):
        monkeypatch.setattr(kernels, "usable", lambda _, fast=fast: fast)
        after = train_local(net, start, rows, plan, SGD(lr=0.05, momentum=0.9))
        logits = net.logits({name: value[0] for name, value in after.items()}, inputs)
        outcome.append(([after[name] - start[name] for name in start], logits))
    (plain, logits), (fast, fast_logits) = outcome
    assert (
        relative_distance(
            torch.cat([v.flatten() for v in fast]), torch.cat([v.flatten() for v in plain])
        )
        < 1e-4
    )
    torch.testing.assert_close(fast_logits, logits, rtol=1e-4, atol=1e-5)
