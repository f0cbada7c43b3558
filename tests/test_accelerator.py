"""On a graphics card the same numbers as on the CPU; skipped where there is none."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedgmm import FedGMMClassifier
from fedgmm.algorithms.local_training import LocalTraining
from fedgmm.core import kernels, sgd, stacked
from fedgmm.core.backbones import MobileNetV2
from fedgmm.core.learners import log_likelihoods
from fedgmm.core.networks import is_statistic
from fedgmm.core.pixels import as_numbers
from fedgmm.core.sgd import SGD
from fedgmm.data.dataset import FederatedDataset
from fedgmm.inference.saving import load
from fedgmm.training import ALGORITHMS, train
from supervised import federation, images

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

OPTIONS = {
    "rounds": 5,
    "dtype": "float64",
    "components": 2,
    "learners": 2,
    "batch_size": 8,
    "participation": 0.8,
    "tol": None,
    "patience": 9,
}


def data_set(**options):
    return federation(np.random.default_rng(0), sizes=(20, 40, 17, 26), classes=3, **options)


def pair(data, algorithm, **options):
    return (
        train(data, algorithm, device=name, **{**OPTIONS, **options}) for name in ("cpu", "cuda")
    )


@pytest.mark.parametrize(
    ("algorithm", "solver"),
    [*product(ALGORITHMS, ["sgd"]), *product(["fedgmm", "fedem", "fedavg"], ["newton"])],
)
def test_training_and_prediction(tmp_path, algorithm, solver):
    data = data_set()
    here, there = pair(data, algorithm, solver=solver)
    back = load(there.save(tmp_path))
    x = data.test.inputs.numpy()
    for name in data.names:
        expected = here.predict_proba(x, name)
        np.testing.assert_allclose(there.predict_proba(x, name), expected, atol=1e-8)
        np.testing.assert_allclose(back.predict_proba(x, name), expected, atol=1e-8)
    assert there.evaluate().mean_log_loss == pytest.approx(here.evaluate().mean_log_loss)


@pytest.mark.parametrize("own", [False, True])
def test_densities_novelty_and_new_clients(own):
    rng = np.random.default_rng(1)
    x = 50.0 + 20.0 * rng.normal(size=(200, 3))
    y = (x[:, 0] > 50).astype(int)
    seen = rng.normal(size=(200, 2)) if own else None
    data = FederatedDataset.from_arrays(x, y, np.arange(200) % 4, features=seen)
    here, there = pair(data, "fedgmm")
    extra = {"features": seen}
    np.testing.assert_allclose(
        there.score_samples(x, **extra), here.score_samples(x, **extra), atol=1e-7
    )
    np.testing.assert_allclose(
        there.novelty(x, **extra).p_values, here.novelty(x, **extra).p_values, atol=1e-9
    )
    assert there.client_novelty(x, **extra) == here.client_novelty(x, **extra)
    for labels in (y, None):
        found, expected = (m.adapt("new", x, labels, **extra) for m in (there, here))
        np.testing.assert_allclose(found.weights, expected.weights, atol=1e-8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_pictures(algorithm):
    data = images(np.random.default_rng(0))
    options = {**OPTIONS, "rounds": 2, "dtype": "float32", "learner": "cnn"}
    model = train(data, algorithm, device="cuda", **options)
    assert np.isfinite(model.evaluate().log_loss).all()


def test_selected_clients_and_the_estimator():
    data = data_set()
    here, there = pair(data.select(["oslo", "kiev"]), "fedgmm")
    x = data.test.inputs.numpy()
    np.testing.assert_allclose(
        there.predict_proba(x, "oslo"), here.predict_proba(x, "oslo"), atol=1e-8
    )
    labels = data.test.labels.numpy()
    model = FedGMMClassifier(2, 2, rounds=3).fit(x, labels)  # device="auto" finds the card
    assert next(iter(model.model_.prediction.learners.values())).device.type == "cuda"
    assert model.predict(x).shape == labels.shape


# ---------------------------------------------------------------------- kernels and recordings

DEVICE = torch.device("cuda")


def far(found, expected):
    """Relative distance in the norm."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-12))


def gradients(function, *given):
    own = [value.detach().clone().requires_grad_() for value in given]
    out = function(*own)
    generator = torch.Generator("cuda").manual_seed(1)
    slope = torch.randn(out.shape, generator=generator, device="cuda", dtype=torch.float64)
    return [out, *torch.autograd.grad(out, own, slope.to(out.dtype))]


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).cuda()


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((2, 3, 5, 7, 7), 1), ((2, 3, 5, 8, 8), 2), ((3, 2, 4, 2, 2), 2), ((2, 2, 5, 1, 1), 1)],
)
def test_kernel_of_filters_of_single_channels(shape, stride):
    groups, channels, rows, height, width = shape

    def plain(images, weight):
        flat = images.permute(2, 0, 1, 3, 4).reshape(rows, groups * channels, height, width)
        out = functional.conv2d(
            flat, weight.flatten(0, 1), stride=stride, padding=1, groups=groups * channels
        )
        return out.reshape(rows, groups, channels, *out.shape[-2:]).permute(1, 2, 0, 3, 4)

    given = normal(*shape), normal(groups, channels, 1, 3, 3)
    found = gradients(lambda x, w: kernels.depthwise(x, w, stride), *given)
    expected = gradients(plain, *(value.double() for value in given))
    assert max(map(far, found, expected)) < 1e-5


@pytest.mark.parametrize("ceiling", [kernels.NO_ACTIVATION, kernels.RELU, kernels.RELU6])
@pytest.mark.parametrize("padded", [False, True])
def test_kernel_of_normalisation(ceiling, padded):
    counts = torch.tensor([1, 6, 4], device="cuda") if padded else None
    there = 1.0
    if counts is not None:
        there = (torch.arange(6, device="cuda") < counts[:, None])[:, None, :, None, None]
    given = 3 * normal(3, 4, 6, 5, 5) + 1, normal(3, 4).abs() * 3, normal(3, 4)
    chosen = None if ceiling < 0 else ceiling

    def plain(images, weight, bias):
        out, _ = stacked._by_own_statistics(images, counts, weight, bias, 1e-5)
        return stacked._activated(out, chosen) * there

    running = kernels.BatchStatistics(normal(3, 4), normal(3, 4).abs())
    found = gradients(
        lambda x, w, b: kernels.normalised(x, w, b, counts, running, 0.1, 1e-5, ceiling)[0],
        *given,
    )
    expected = gradients(plain, *(value.double() for value in given))
    assert max(map(far, found, expected)) < 1e-5
    _, moved = kernels.normalised(*given, counts, running, 0.1, 1e-5, ceiling)
    _, own = stacked._by_own_statistics(given[0], counts, *given[1:], 1e-5)
    after = stacked._moved(running, own, stacked._unbiased(given[0], counts), 0.1)
    assert max(map(far, moved, after)) < 1e-5


@pytest.mark.parametrize("size", [8, 7])
def test_kernel_of_pooling(size):
    def plain(images):
        out = functional.max_pool2d(images.flatten(1, 2), 2).relu()
        return out.reshape(*images.shape[:3], size // 2, size // 2)

    given = normal(3, 4, 5, size, size)
    found, expected = gradients(kernels.pooled_relu, given), gradients(plain, given.double())
    assert max(map(far, found, expected)) < 1e-6


def test_kernel_of_convolutions():
    def plain(images, weight, bias):
        parts = [
            functional.conv2d(x.transpose(0, 1), w, b, padding=1).transpose(0, 1)
            for x, w, b in zip(images, weight, bias, strict=True)
        ]
        return torch.stack(parts)

    given = normal(2, 16, 3, 7, 7), normal(2, 32, 16, 3, 3), normal(2, 32)
    found = gradients(kernels.convolve, *given)
    expected = gradients(plain, *(value.double() for value in given))
    assert max(map(far, found, expected)) < 1e-5


def stacked_mobilenet():
    return stacked.Stacked(partial(MobileNetV2, 3, dropout=0.0), (3, 32, 32), 3)


def test_recorded_rounds_are_those_that_run_as_they_are(monkeypatch):
    """The first round runs as it is, the second is recorded, later ones are replayed."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, size=(40, 3, 32, 32)).astype(np.uint8)
    data = FederatedDataset.from_arrays(
        pictures, np.arange(40) % 3, np.arange(40) % 2, features=rng.normal(size=(40, 2))
    )
    rows = data.train.to(torch.device("cuda"))
    counts = torch.ones(2, 2, dtype=torch.float64, device="cuda")
    results = []
    for recorded in (True, False):
        if not recorded:
            monkeypatch.setattr(sgd, "recorder_of", lambda _: AsItIs())
        training = LocalTraining(stacked_mobilenet(), SGD(lr=0.01, batch_size=8, momentum=0.9))
        params = training.initial(2, torch.device("cuda"))
        for number in (1, 2, 3, 4):
            sums = training.train_shared(params, rows, None, counts, number)
            params = {name: (value / 2).float() for name, value in sums.items()}
        results.append(params)
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-4, atol=1e-5, msg=name)


class AsItIs:
    """Records nothing."""

    def run(self, _key, work, given, kept):
        return work(given)


def test_a_step_of_a_deep_network_is_that_of_a_cpu():
    """Float32 loses a hundredth within one step of an untrained network, on a CPU too."""
    net, generator = stacked_mobilenet(), torch.Generator().manual_seed(0)
    own = [net.initial(generator) for _ in range(2)]
    start = {n: torch.stack([one[n] for one in own]).expand(2, 2, *own[0][n].shape) for n in own[0]}
    inputs = torch.randint(0, 256, (60, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.randint(3, (60,), generator=generator)
    weights = torch.rand(60, 2, generator=generator)
    offsets, clients, order = torch.tensor([0, 32, 60]), torch.arange(2), torch.arange(60)
    moves = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        params = {name: value.to(device, dtype).clone() for name, value in start.items()}
        plan = sgd.plan_batches(
            offsets.to(device), clients.to(device), [order.to(device)], 64, even=True
        )
        after = sgd.train_local(
            net,
            params,
            inputs.to(device),
            labels.to(device),
            weights.to(device, dtype),
            plan,
            SGD(lr=0.05),
        )
        moves.append({name: (after[name] - params[name]).cpu() for name in after})
    for statistics, bound in ((False, 0.05), (True, 1e-4)):
        expected, found = (
            torch.cat([v.flatten() for n, v in move.items() if is_statistic(n) == statistics])
            for move in moves
        )
        assert far(found, expected) < bound


class Small(torch.nn.Module):
    """Tells bright pictures from dark ones."""

    def __init__(self):
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU6(),
            torch.nn.Dropout(0.2),
        )
        self.classifier = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


def test_recorded_rounds_crop_and_drop_anew_and_learn():
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 2
    pictures = rng.integers(0, 100, size=(60, 3, 8, 8)).astype(np.uint8)
    pictures[labels == 1] += 120
    data = FederatedDataset.from_arrays(
        pictures, labels, np.arange(60) // 30, features=rng.normal(size=(60, 2))
    )
    rows = data.train.to(DEVICE)
    net = stacked.Stacked(Small, (3, 8, 8), 2)
    training = LocalTraining(net, SGD(lr=0.5, batch_size=16, augment=True))
    counts = torch.ones(2, 1, dtype=torch.float64, device=DEVICE)

    def after(params, number):
        sums = training.train_shared(params, rows, None, counts, number)
        return {name: (value / 2).float() for name, value in sums.items()}

    params = training.initial(1, DEVICE)
    for number in range(1, 25):
        params = after(params, number)
    inputs = as_numbers(rows.inputs, torch.float32)
    assert log_likelihoods(net, params, inputs, rows.labels).mean() > -0.3
    same, again, other = (after(params, number) for number in (30, 30, 31))
    weight = "classifier.weight"
    torch.testing.assert_close(same[weight], again[weight])
    assert not torch.allclose(same[weight], other[weight], atol=1e-4)
