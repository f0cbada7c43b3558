"""Stacked modules give the results of a loop over modules, including batch statistics."""

from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedgmm.core.params import is_statistic, stack
from fedgmm.nets.backbones import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    MobileNetV2,
    ResNet18,
    _Residual,
)
from fedgmm.nets.convolutional import ConvNet
from fedgmm.nets.networks import as_numbers, network
from fedgmm.nets.sgd import SGD, TrainingRows, plan_batches, train_local
from fedgmm.nets.stacked import Stacked

CLIENTS, LEARNERS, ROWS = 2, 2, 6


class Small(nn.Module):
    """A module with every kind of layer."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU6(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 4, 1),
            nn.MaxPool2d(2),
            nn.Identity(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.0),
        )
        self.head = nn.Linear(4, 5, bias=False)

    def forward(self, x):
        return self.head(self.body(x))


class SmallResNet(nn.Module):
    """The layers of ResNet-18 with few channels: its stem, and residual blocks of both kinds."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.blocks = nn.Sequential(_Residual(4, 4, 1), _Residual(4, 6, 2), _Residual(6, 6, 1))
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        return self.fc(self.blocks(x).mean((2, 3)))


MODULES = {
    "small": (Small, (3, 8, 8)),
    "mobilenet": (partial(MobileNetV2, 5, width=0.1, dropout=0.0), (3, 16, 16)),
    "resnet": (SmallResNet, (3, 16, 16)),
    "cnn": (partial(ConvNet, 1, 8, 5), (1, 8, 8)),
}


@pytest.fixture(scope="module", params=MODULES, ids=str)
def case(request):
    factory, shape = MODULES[request.param]
    net = Stacked(factory, shape, 5)
    generator = torch.Generator().manual_seed(0)
    own = [stack([net.initial(generator) for _ in range(LEARNERS)]) for _ in range(CLIENTS)]
    params = {name: torch.stack([one[name] for one in own]).double() for name in own[0]}
    torch.manual_seed(1)
    for name, value in params.items():
        if is_statistic(name):  # other values than those of a new module
            value.uniform_(0.5, 1.5)
    images = torch.randn(CLIENTS, ROWS, *shape, dtype=torch.float64)
    return net, params, images


def set_momentum(module, number):
    """Set the momentum of running statistics as in batch ``number`` of a round."""
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = max(0.1, 1 / number)
    return module


def module_of(net, params, client, learner, training, number=1):
    module = set_momentum(net.factory().double(), number)
    own = {name: value[client, learner] for name, value in params.items()}
    module.load_state_dict(own, strict=False)
    return module.train(training)


def every_batch():
    """Every module with every kind of batch; the largest one quickly with two of them only."""
    kinds = {
        "all rows-evaluation": (None, 1, False),
        "all rows-training": (None, 1, True),
        "padding-evaluation": ([6, 4], 3, False),
        "padding-training": ([6, 4], 3, True),
        # evaluation has no momentum, which depends on the number of the batch
        "late-evaluation": ([6, 4], 30, False),
        "late-training": ([6, 4], 30, True),
    }
    for name in MODULES:
        quick = {"all rows-evaluation", "padding-training"}
        quick = quick if name == "mobilenet" else kinds.keys() - {"late-evaluation"}
        for kind, values in kinds.items():
            marks = [] if kind in quick else pytest.mark.slow
            yield pytest.param(name, *values, id=f"{name}-{kind}", marks=marks)


@pytest.mark.parametrize(
    ("case", "row_counts", "number", "training"), list(every_batch()), indirect=["case"]
)
def test_logits_gradients_and_statistics_equal_the_module(case, row_counts, number, training):
    net, params, images = case
    params = {n: v if is_statistic(n) else v.detach().requires_grad_() for n, v in params.items()}
    mask = None
    if row_counts is not None:
        mask = torch.arange(ROWS) < torch.tensor(row_counts)[:, None]
    counts = None if mask is None else mask.sum(1)
    logits, statistics = net.forward(params, images, training, counts, number)
    keep = torch.ones(CLIENTS, ROWS, dtype=torch.bool) if mask is None else mask
    trained = [name for name in params if not is_statistic(name)]
    loss = (logits.square() * keep[..., None, None]).sum()
    gradients = torch.autograd.grad(loss, [params[n] for n in trained], materialize_grads=True)
    scale = max(float(gradient.abs().max()) for gradient in gradients)
    for client in range(CLIENTS):
        for learner in range(LEARNERS):
            module = module_of(net, params, client, learner, training, number)
            expected = module(images[client][keep[client]])
            found = logits[client, :, learner][keep[client]]
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
            own = torch.autograd.grad(expected.square().sum(), list(module.parameters()))
            names = [name for name, _ in module.named_parameters()]
            for name, gradient in zip(names, own, strict=True):
                ours = gradients[trained.index(name)][client, learner]
                assert float((ours - gradient).abs().max()) < 1e-7 * scale, name
            state = module.state_dict()
            for name, value in statistics.items():
                torch.testing.assert_close(value[client, learner], state[name])
    has_statistics = any(is_statistic(name) for name in params)
    assert bool(statistics) == (training and has_statistics)


def test_shared_learners_have_no_client_axis(case):
    net, params, images = case
    shared = {name: value[0] for name, value in params.items()}
    torch.testing.assert_close(net.logits(shared, images[0]), net.logits(params, images)[0])


def test_resnet18_is_supported():
    net = Stacked(partial(ResNet18, 5), (3, 16, 16), 5)
    params = {name: value[None] for name, value in net.initial(torch.Generator()).items()}
    images = torch.randn(2, 3, 16, 16)
    module = ResNet18(5).eval()
    module.load_state_dict({name: value[0] for name, value in params.items()}, strict=False)
    with torch.no_grad():
        found = net.logits(params, images)[:, 0]
        torch.testing.assert_close(found, module(images), rtol=1e-4, atol=1e-4)


def test_local_training_equals_a_plain_loop():
    """Padding of clients with fewer rows changes neither gradients nor statistics."""
    net = Stacked(Small, (3, 8, 8), 5)
    generator = torch.Generator().manual_seed(0)
    first = {name: value.double() for name, value in net.initial(generator).items()}
    torch.manual_seed(0)
    sizes = [7, 4]
    inputs = torch.randn(sum(sizes), 3, 8, 8, dtype=torch.float64)
    labels = torch.randint(5, (sum(sizes),))
    weights = torch.rand(sum(sizes), 1, dtype=torch.float64)
    offsets = torch.tensor([0, 7, 11])
    order = torch.arange(sum(sizes))
    plan = plan_batches(offsets, torch.arange(2), [order, order], 3)
    start = {name: value.expand(2, 1, *value.shape).clone() for name, value in first.items()}
    options = SGD(lr=0.1, momentum=0.9, batch_size=3)
    found = train_local(net, start, TrainingRows(inputs, labels, weights), plan, options)
    for client, (begin, end) in enumerate([(0, 7), (7, 11)]):
        module = Small().double().train()
        module.load_state_dict(first, strict=False)
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for epoch in range(2):
            for number, start_row in enumerate(range(begin, end, 3), 3 * epoch + 1):
                set_momentum(module, number)
                rows = slice(start_row, min(start_row + 3, end))
                loss = nn.functional.cross_entropy(
                    module(inputs[rows]), labels[rows], reduction="none"
                )
                share = weights[rows, 0] / weights[rows, 0].sum()
                optimiser.zero_grad()
                (share * loss).sum().backward()
                optimiser.step()
        state = module.state_dict()
        for name, value in found.items():
            torch.testing.assert_close(value[client, 0], state[name])


class Unsupported(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 5, 3)

    def forward(self, x):
        return torch.sin(self.layer(x)).mean((2, 3))


def test_an_unsupported_operation_is_refused_before_training():
    net = Stacked(Unsupported, (3, 8, 8), 5)
    with pytest.raises(ValueError, match="operation"):
        net.initial(torch.Generator())


@pytest.mark.parametrize(
    ("layer", "word"),
    [
        (nn.Conv2d(4, 8, 3, groups=2), "2 groups"),
        (nn.Conv2d(4, 4, 3, dilation=2), "padding"),
        (nn.Tanh(), "Tanh"),
    ],
    ids=str,
)
def test_an_unsupported_layer_is_named(layer, word):
    net = Stacked(lambda: nn.Sequential(layer), (4, 8, 8), 5)
    with pytest.raises(ValueError, match=word):
        net.initial(torch.Generator())


def test_mobilenet_by_name():
    assert isinstance(network("mobilenet", (3, 32, 32), 10), Stacked)
    with pytest.raises(ValueError, match="colour"):
        network("mobilenet", (1, 28, 28), 10)


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("sizes", [[7, 4, 3], [6, 6], [2, 1], [9, 3, 3, 1]], ids=str)
def test_every_row_is_seen_once_and_even_batches_differ_by_one_row(sizes, even):
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    order = torch.arange(sum(sizes))
    plan = plan_batches(offsets, torch.arange(len(sizes)), [order], 3, even)
    assert len(plan.steps) == -(-max(sizes) // 3)
    seen, batches = [], {}
    for step in plan.steps:
        assert step.full == bool(step.mask.all())
        codes = plan.clients[step.clients]
        for client, rows, mask in zip(codes.tolist(), step.rows, step.mask, strict=True):
            own = rows[mask].tolist()
            assert all(offsets[client] <= row < offsets[client + 1] for row in own)
            batches.setdefault(client, []).append(len(own))
            seen += own
    assert sorted(seen) == order.tolist()
    assert all(max(own) <= 3 for own in batches.values())
    if even:
        assert all(max(own) - min(own) <= 1 for own in batches.values())
    else:
        assert all(set(own[:-1]) <= {3} for own in batches.values())


class Deep(nn.Module):
    """Twenty normalisations without an activation between them."""

    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4)]
        for _ in range(19):
            layers += [nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3)))


def test_padding_next_to_a_single_row_stays_finite():
    """A single pixel has variance zero, so padding would be scaled up in every layer."""
    net = Stacked(Deep, (3, 1, 1), 2)
    params = {n: v.expand(2, 1, *v.shape) for n, v in net.initial(torch.Generator()).items()}
    inputs = torch.randn(6, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    plan = plan_batches(torch.tensor([0, 5, 6]), torch.arange(2), [torch.arange(6)], 8)
    rows = TrainingRows(inputs, torch.zeros(6).long())
    found = train_local(net, params, rows, plan, SGD(lr=0.1))
    assert all(bool(torch.isfinite(value).all()) for value in found.values())


def test_single_rows_train_with_and_without_padding():
    """The last layers have one number per channel, which torch refuses to normalise."""
    net = Stacked(partial(MobileNetV2, 5, width=0.25, dropout=0.0), (3, 32, 32), 5)
    one = net.initial(torch.Generator().manual_seed(0))
    params = {name: value.expand(2, 1, *value.shape).double() for name, value in one.items()}
    images = torch.randn(2, 1, 3, 32, 32, dtype=torch.float64)
    alone, statistics = net.forward(params, images, True, None)
    beside = torch.cat([images, torch.zeros_like(images)], dim=1)
    padded, expected = net.forward(params, beside, True, torch.tensor([1, 1]))
    torch.testing.assert_close(alone, padded[:, :1])
    for name, value in statistics.items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("counts", [None, [1, 3]], ids=["alone", "beside others"])
def test_a_single_number_does_not_replace_the_running_variance(counts):
    """A variance of zero would scale up all later inputs."""
    net = Stacked(partial(MobileNetV2, 5, width=0.25, dropout=0.0), (3, 32, 32), 5)
    one = net.initial(torch.Generator().manual_seed(0))
    params = {name: value.expand(2, 1, *value.shape).double() for name, value in one.items()}
    images = torch.randn(2, 1 if counts is None else 3, 3, 32, 32, dtype=torch.float64)
    there = None if counts is None else torch.tensor(counts)
    _, statistics = net.forward(params, images, True, there)
    last = [name for name in statistics if name.endswith("running_var")][-1]
    torch.testing.assert_close(statistics[last][0], params[last][0])  # one pixel is left there
    assert counts is None or not torch.allclose(statistics[last][1], params[last][1])
    assert all(bool((v > 0).all()) for n, v in statistics.items() if n.endswith("running_var"))


def test_pretrained_weights_read_plain_pixels(tmp_path):
    """The network of the file on scaled images and ours on pixels in [-1, 1] agree."""
    torch.manual_seed(0)
    module = MobileNetV2(7).eval()
    for name, value in module.named_buffers():
        if name.endswith("running_mean"):
            value.copy_(0.1 * torch.randn_like(value))
    save_file(module.state_dict(), tmp_path / "weights.safetensors")
    net = Stacked(partial(MobileNetV2, 7), (3, 64, 64), 7)
    own = net.pretrained(tmp_path / "weights.safetensors", torch.Generator())
    bytes_ = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
    mean, deviation = (torch.tensor(v)[:, None, None] for v in (IMAGENET_MEAN, IMAGENET_DEVIATION))
    params = {name: value[None] for name, value in own.items()}
    ours = MobileNetV2(7).eval()
    ours.load_state_dict({n: v[0] for n, v in params.items()}, strict=False)
    scaled = (bytes_ / 255 - mean) / deviation
    first, theirs = ours.features[0], module.features[0]
    # without the border, where padding is mid-grey for one and ImageNet's mean for the other
    inner = (slice(None), slice(None), slice(2, -2), slice(2, -2))
    plain = as_numbers(bytes_, torch.float32)
    torch.testing.assert_close(first(plain)[inner], theirs(scaled)[inner], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(own["classifier.1.weight"], module.classifier[1].weight)
    with pytest.raises(ValueError, match="Small"):
        Stacked(Small, (3, 8, 8), 5).pretrained(tmp_path / "weights.safetensors", torch.Generator())
