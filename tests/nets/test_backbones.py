"""Backbones: torchvision's names and shapes, an independent forward pass, weights from files."""

from __future__ import annotations

import hashlib
import os
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from fedgmm.nets.backbones import (
    MobileNetV2,
    ResNet18,
    WeightsError,
    load_weights,
    weights_file,
)

DATA = os.environ.get("FEDGMM_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="FEDGMM_DATA is not set: no pretrained weights")


@contextmanager
def undrawn():
    """Make networks that neither allocate nor draw their parameters."""
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        for name in ("kaiming_normal_", "kaiming_uniform_", "normal_", "uniform_"):
            patch.setattr(nn.init, name, lambda value, *_, **__: value)
        yield


def parameters(module):
    return sum(value.numel() for value in module.parameters())


def randomised(module, seed=0):
    """Draw all values at random, including running statistics, as after training."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in module.state_dict().items():
        if name.endswith(("running_mean", "bias")):
            value.copy_(0.3 * torch.randn(value.shape, generator=generator))
        elif name.endswith("running_var") or (value.dim() == 1 and name.endswith("weight")):
            value.copy_(0.5 + torch.rand(value.shape, generator=generator))
    return module.eval()


def listing(state, head):
    """Return a hash of the body's names and shapes."""
    lines = sorted(
        f"{name} {tuple(value.shape)}"
        for name, value in state.items()
        if not name.endswith("num_batches_tracked") and not name.startswith(head)
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


# ---------------------------------------------------------------------- as torchvision has them


@pytest.mark.parametrize(
    ("module", "count", "entries"),
    [
        (lambda: ResNet18(1000), 11_689_512, 122),
        (lambda: ResNet18(None), 11_176_512, 120),
        (lambda: MobileNetV2(1000), 3_504_872, 314),
        (lambda: MobileNetV2(None), 2_223_872, 312),
        (lambda: MobileNetV2(1000, width=0.5), 1_968_680, 314),
        (lambda: MobileNetV2(1000, width=1.4), 6_108_776, 314),
    ],
)
def test_sizes_are_the_published_ones(module, count, entries):
    with undrawn():
        module = module()
    assert parameters(module) == count
    assert len(module.state_dict()) == entries


def test_names_and_shapes_are_torchvisions():
    # fingerprints of state dicts that torchvision wrote
    with undrawn():
        resnet, mobilenet = ResNet18(7).state_dict(), MobileNetV2(7).state_dict()
    assert listing(resnet, "fc.") == (
        "43a9b5e01e6dc88a5c2823318a45f378a255da51cc35a8f3b7b4f30eab2aa350"
    )
    assert listing(mobilenet, "classifier.") == (
        "ddfa7f160ae84a36015799ebc729f89dbc50f2bd6dff89b72f9d6b545e71dc9a"
    )
    assert resnet["fc.weight"].shape == (7, 512)
    assert resnet["fc.bias"].shape == (7,)
    assert mobilenet["classifier.1.weight"].shape == (7, 1280)
    assert mobilenet["classifier.1.bias"].shape == (7,)


# ---------------------------------------------------------------------- the forward pass


def normalised(state, name, x):
    names = ("running_mean", "running_var", "weight", "bias")
    return functional.batch_norm(x, *(state[f"{name}.{part}"] for part in names))


def resnet_by_hand(state, x):
    """He et al., table 1, column "18-layer"."""
    x = functional.relu(
        normalised(state, "bn1", functional.conv2d(x, state["conv1.weight"], stride=2, padding=3))
    )
    x = functional.max_pool2d(x, 3, stride=2, padding=1)
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            at = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            out = functional.conv2d(x, state[f"{at}.conv1.weight"], stride=stride, padding=1)
            out = functional.relu(normalised(state, f"{at}.bn1", out))
            out = normalised(
                state, f"{at}.bn2", functional.conv2d(out, state[f"{at}.conv2.weight"], padding=1)
            )
            if stride == 2:
                x = functional.conv2d(x, state[f"{at}.downsample.0.weight"], stride=2)
                x = normalised(state, f"{at}.downsample.1", x)
            x = functional.relu(x + out)
    x = functional.adaptive_avg_pool2d(x, 1).flatten(1)
    return functional.linear(x, state["fc.weight"], state["fc.bias"])


MOBILE_STRIDES = [1, 2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1]


def mobilenet_by_hand(state, x):
    """Sandler et al., table 2, read off the weights; one stride for each of the 17 blocks."""

    def step(x, conv, norm, stride=1, act=True):
        weight = state[f"{conv}.weight"]
        depthwise = weight.shape[1] == 1
        groups = weight.shape[0] if depthwise else 1
        x = functional.conv2d(
            x, weight, stride=stride, padding=weight.shape[-1] // 2, groups=groups
        )
        x = normalised(state, norm, x)
        return x.clamp(0, 6) if act else x

    x = step(x, "features.0.0", "features.0.1", 2)
    for block, stride in enumerate(MOBILE_STRIDES, start=1):
        at, out = f"features.{block}.conv", x
        last = 0
        if block > 1:
            out = step(out, f"{at}.0.0", f"{at}.0.1")
            last = 1
        out = step(out, f"{at}.{last}.0", f"{at}.{last}.1", stride)
        out = step(out, f"{at}.{last + 1}", f"{at}.{last + 2}", act=False)
        x = x + out if stride == 1 and x.shape[1] == out.shape[1] else out
    x = step(x, "features.18.0", "features.18.1")
    x = functional.adaptive_avg_pool2d(x, 1).flatten(1)
    return functional.linear(x, state["classifier.1.weight"], state["classifier.1.bias"])


@pytest.fixture(scope="module", params=[ResNet18, MobileNetV2])
def whole(request):
    return randomised(request.param(5)).double()


BY_HAND = {ResNet18: resnet_by_hand, MobileNetV2: mobilenet_by_hand}


@pytest.mark.parametrize("size", [32, 57])
def test_a_network_equals_its_published_table(whole, size):
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    with torch.no_grad():
        expected = BY_HAND[type(whole)](whole.state_dict(), x)
        torch.testing.assert_close(whole(x), expected)


def test_without_a_head_the_output_is_the_features(whole):
    build = type(whole)
    with undrawn():
        body = build(None)
    values = {n: v for n, v in whole.state_dict().items() if not n.startswith(build.head_prefix)}
    body.load_state_dict(values, assign=True)
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        features = body.eval()(x)
        state = whole.state_dict()
        head = [state[f"{build.head_prefix}{part}"] for part in ("weight", "bias")]
        torch.testing.assert_close(functional.linear(features, *head), whole(x))
    assert features.shape == (3, body.feature_size)


@pytest.mark.parametrize("build", [ResNet18, MobileNetV2])
def test_the_seed_decides_the_output(build):
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        module = build(4).eval()
        with torch.no_grad():
            outputs.append(module(torch.ones(2, 3, 32, 32)))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("build", [ResNet18, MobileNetV2])
def test_gradients_reach_every_parameter(build):
    module = build(4)
    loss = functional.cross_entropy(module(torch.randn(4, 3, 32, 32)), torch.tensor([0, 1, 2, 3]))
    loss.backward()
    assert all(value.grad is not None for value in module.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResNet18(0), "classes"),
        (lambda: MobileNetV2(0), "classes"),
        (lambda: MobileNetV2(2, width=0), "width"),
    ],
)
def test_impossible_networks_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------------- weights from a file


def written(module, path, **changes):
    state = {n: v.clone() for n, v in module.state_dict().items()} | changes
    save_file({n: v for n, v in state.items() if v is not None}, path)
    return path


@pytest.fixture(scope="module")
def trained():
    return randomised(MobileNetV2(6, width=0.25), seed=3)


@pytest.mark.parametrize("classes", [6, 4, None])
def test_weights_fill_the_body_and_a_head_that_fits(trained, tmp_path, classes):
    path = written(trained, tmp_path / "w.safetensors")
    module = MobileNetV2(classes, width=0.25)
    before = {n: v.clone() for n, v in module.state_dict().items()}
    assert load_weights(module, path) == hashlib.sha256(path.read_bytes()).hexdigest()
    in_file = trained.state_dict()
    for name, value in module.state_dict().items():
        kept = classes == 4 and name.startswith("classifier.1.")
        assert torch.equal(value, (before if kept else in_file)[name]), name


def test_a_file_without_a_head_does_not_change_the_head(trained, tmp_path):
    gone = {"classifier.1.weight": None, "classifier.1.bias": None}
    path = written(trained, tmp_path / "w.safetensors", **gone)
    module = MobileNetV2(6, width=0.25)
    before = {name: module.state_dict()[name].clone() for name in gone}
    load_weights(module, path)
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    load_weights(MobileNetV2(width=0.25), path)


def test_half_precision_and_missing_counters_are_accepted(trained, tmp_path):
    state = trained.state_dict()
    half = {n: v.half() for n, v in state.items() if v.is_floating_point()}
    save_file(half, tmp_path / "w.safetensors")
    module = MobileNetV2(6, width=0.25)
    load_weights(module, tmp_path / "w.safetensors")
    found = module.state_dict()
    for name, value in half.items():
        assert torch.equal(found[name], value.float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features.18.1.running_var": None}, "missing"),
        ({"features.0.0.weight": torch.zeros(8, 1, 3, 3)}, "shape"),
        ({"features.0.1.bias": torch.full((8,), np.nan)}, "NaN"),
        ({"features.0.1.bias": torch.zeros(8, dtype=torch.int64)}, "int64"),
        ({"layer9.weight": torch.zeros(1)}, "layer9"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_change_nothing(
    trained, tmp_path, changes, message
):
    path = written(trained, tmp_path / "w.safetensors", **changes)
    module = MobileNetV2(6, width=0.25)
    before = {n: v.clone() for n, v in module.state_dict().items()}
    with pytest.raises(WeightsError, match=message) as caught:
        load_weights(module, path)
    assert str(path) in str(caught.value)
    assert "torchvision.models.mobilenet_v2" in str(caught.value)
    assert all(torch.equal(v, before[n]) for n, v in module.state_dict().items())


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "folder"])
def test_a_file_that_cannot_be_read_is_named(trained, tmp_path, damage):
    path = tmp_path / "w.safetensors"
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        data = written(trained, path).read_bytes()
        path.write_bytes(b"" if damage == "empty" else data[: len(data) // 2])
    with pytest.raises(WeightsError, match="safetensors"):
        load_weights(MobileNetV2(6, width=0.25), path)


def test_weights_of_another_network_are_refused(trained, tmp_path):
    path = written(trained, tmp_path / "w.safetensors")
    with undrawn():
        module = ResNet18(6)
    with pytest.raises(WeightsError, match="does not fit"):
        load_weights(module, path)


def test_weights_lie_in_the_data_folder():
    expected = Path("d/weights/resnet18_imagenet.safetensors")
    assert weights_file("resnet18", Path("d")) == expected
    with pytest.raises(ValueError, match="backbone"):
        weights_file("vgg", Path("d"))


# ---------------------------------------------------------------------- real weights


IMAGENET = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]


def separability(module: nn.Module, images, labels):
    """Return the share of images that are nearest to the mean of their own class, in the other half."""
    x = (torch.from_numpy(images).float() / 255 - IMAGENET[0]) / IMAGENET[1]
    with torch.inference_mode():
        features = module.eval()(functional.interpolate(x, (64, 64), mode="bilinear"))
    features = (features - features.mean(0)) / features.std(0).clamp_min(1e-6)
    half = len(x) // 2
    means = torch.stack([features[:half][labels[:half] == k].mean(0) for k in range(10)])
    nearest = torch.cdist(features[half:], means).argmin(1).numpy()
    return float((nearest == labels[half:]).mean())


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize(("build", "name"), [(ResNet18, "resnet18"), (MobileNetV2, "mobilenet_v2")])
def test_pretrained_features_separate_classes_and_random_ones_do_not(build, name):
    path = weights_file(name, Path(DATA))
    photographs = Path(DATA) / "cifar-10-batches-bin" / "test_batch.bin"
    if not path.exists() or not photographs.exists():
        pytest.skip(f"{path.name} or {photographs.name} is not in FEDGMM_DATA")
    records = np.fromfile(photographs, dtype=np.uint8, count=400 * 3073).reshape(400, 3073)
    labels, images = records[:, 0], records[:, 1:].reshape(400, 3, 32, 32)
    torch.manual_seed(0)
    module = build(None)
    untrained = separability(module, images, labels)
    load_weights(module, path)
    pretrained = separability(module, images, labels)
    print(f"{name}: pretrained {pretrained:.3f}, random {untrained:.3f}")
    assert untrained < 0.35  # chance is 0.1
    assert pretrained > 0.5
