"""Representations of an encoder's rows."""

from __future__ import annotations

import numpy as np
import torch
from safetensors.torch import save_file

from fedgmm.data.encoders import PixelEncoder, ResNet18Encoder
from fedgmm.experiments.paper.representations import (
    REPRESENTATIONS,
    Layout,
    Represented,
    StageEncoder,
    layout_of,
)
from fedgmm.experiments.paper.representations import represented as represented_tensor
from fedgmm.nets.backbones import ResNet18


def represented(rows, *args):
    return represented_tensor(torch.from_numpy(rows), *args).numpy()


def test_representations(rng):
    codes = rng.normal(size=(6, 5)).astype(np.float32)
    codes[0] = 0
    direction = represented(codes, "direction")
    np.testing.assert_allclose(np.linalg.norm(direction[1:], axis=1), 1, rtol=1e-6)
    both = represented(codes, "direction and length")
    # nothing is lost
    np.testing.assert_allclose(both[:, :-1] * np.exp(both[:, -1:]), codes, atol=1e-6)
    np.testing.assert_array_equal(represented(codes, "plain"), codes)
    # of two stages
    np.testing.assert_array_equal(represented(codes, "plain", Layout((2, 3))), codes[:, 2:])
    np.testing.assert_array_equal(
        represented(codes, "direction", Layout((2, 3))), represented(codes[:, 2:], "direction")
    )
    how = "direction and length"
    np.testing.assert_array_equal(
        represented(codes, "stages", Layout((2, 3))),
        np.hstack([represented(codes[:, :2], how), represented(codes[:, 2:], how)]),
    )
    np.testing.assert_array_equal(represented(codes, "stages"), represented(codes, how))
    # with deviations behind the means
    layout, wide = Layout((2, 3), (1, 3)), np.hstack([codes, codes[:, :4] ** 2])
    for other in ("plain", "direction", "stages"):
        np.testing.assert_array_equal(
            represented(wide, other, layout), represented(codes, other, Layout((2, 3)))
        )
    sizes = np.abs(codes)
    np.testing.assert_allclose(
        represented(wide, "deviations", layout),
        np.hstack([represented(sizes[:, :1], how), represented(sizes[:, 1:4], how)]),
        rtol=1e-5,
    )
    np.testing.assert_array_equal(represented(codes, "deviations"), represented(codes, how))
    assert all(np.isfinite(represented(codes, how)).all() for how in REPRESENTATIONS)


def test_each_representation_has_its_own_name():
    """Otherwise the cache would mix them up."""
    base = PixelEncoder()
    assert len({base.name, *(Represented(base, how).name for how in REPRESENTATIONS)}) == 6


def test_stages_of_the_network(rng, tmp_path):
    torch.manual_seed(0)
    network = ResNet18(classes=10)
    save_file(dict(network.state_dict()), tmp_path / "weights.safetensors")
    base = ResNet18Encoder(tmp_path / "weights.safetensors", size=32, device="cpu")
    images = torch.from_numpy(rng.integers(256, size=(3, 1, 28, 28)).astype(np.uint8))
    stages = StageEncoder(base)
    found = stages.encode(images).numpy()
    layout = layout_of(stages)
    assert found.shape == (3, sum(layout.means) + sum(layout.deviations))
    assert np.isfinite(found).all()  # the last stage has a single place
    np.testing.assert_allclose(found[:, 384:896], base.encode(images), rtol=1e-5, atol=1e-6)
    assert stages.name != base.name
    means, deviations = [], []
    for name in ("layer1", "layer2", "layer3", "layer4"):

        def note(_, __, out):
            means.append(out.mean((2, 3)).numpy())
            deviations.append(out.flatten(2).numpy().std(2))

        getattr(base._network, name).register_forward_hook(note)
    base.encode(images)
    np.testing.assert_allclose(found, np.hstack([*means[1:], *deviations]), rtol=1e-5, atol=1e-6)
