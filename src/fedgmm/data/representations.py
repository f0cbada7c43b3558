"""Other ways to read an encoder's numbers: their direction, their length, and several stages.

An encoder's numbers shrink with the object in the picture. Gaussians that see them plainly find small
objects near the middle of all others; the direction of the numbers tells them apart.
"""

from __future__ import annotations

from copy import copy
from pathlib import Path

import numpy as np
import torch

from fedgmm.core.backbones import ResNet18
from fedgmm.data.encoder import Encoder, Features, Images, ResNet18Encoder, encode_images

REPRESENTATIONS = ("plain", "direction", "direction and length", "stages")
"""What becomes of an encoder's numbers: nothing; length one; length one, and the length's logarithm; the
last of these for each stage of the network, where the encoder tells of several."""

_NO_LENGTH = 1e-6
_STAGE_WIDTHS = (128, 256, 512)


class _Stages(torch.nn.Module):
    """The averages over all places after the last three stages of a ResNet-18."""

    def __init__(self, network: ResNet18) -> None:
        super().__init__()
        self.network = network
        self.feature_size = sum(_STAGE_WIDTHS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows ``(n, 896)`` of images ``(n, 3, height, width)``; the last 512 are the encoder's own."""
        net = self.network
        x = net.layer1(net.maxpool(torch.relu(net.bn1(net.conv1(x)))))
        second = net.layer2(x)
        third = net.layer3(second)
        fourth = net.layer4(third)
        return torch.cat([stage.mean((2, 3)) for stage in (second, third, fourth)], dim=1)


class StageEncoder:
    """A ResNet-18 encoder that tells what three stages of the network see, not only the last.

    Attributes:
        widths: numbers of each stage.
    """

    widths = _STAGE_WIDTHS

    def __init__(self, base: ResNet18Encoder) -> None:
        self._encoder = copy(base)
        self._encoder._network = _Stages(base._network)  # type: ignore[assignment]
        self.name = f"stages 2 to 4 of {base.name}"

    def encode(self, images: Images) -> Features:
        """Rows ``(n, 896)`` of images ``(n, channels, height, width)``."""
        return self._encoder.encode(images)


def represented(codes: Features, how: str, widths: tuple[int, ...] = ()) -> Features:
    """An encoder's rows as one of ``REPRESENTATIONS``, ``(n, k)``.

    Args:
        codes: ``(n, d)``.
        how: which representation; all but ``"stages"`` take the last stage only.
        widths: numbers of each stage; none means that all are of one.
    """
    widths = widths or (codes.shape[1],)
    stages = np.split(codes, np.cumsum(widths)[:-1], axis=1)
    if how == "plain":
        return stages[-1]
    parts = []
    for stage in stages if how == "stages" else stages[-1:]:
        lengths = np.maximum(np.linalg.norm(stage, axis=1, keepdims=True), _NO_LENGTH)
        parts += [stage / lengths] + ([] if how == "direction" else [np.log(lengths)])
    return np.hstack(parts).astype(np.float32)


class Represented:
    """An encoder with another representation of its rows.

    Attributes:
        base: the encoder.
        how: one of ``REPRESENTATIONS``.
        cache: a folder for what the encoder says, whatever becomes of it; ``None`` keeps nothing.
    """

    def __init__(self, base: Encoder, how: str, cache: Path | None = None) -> None:
        self.base, self.how, self.cache = base, how, cache
        self.name = f"{how}, {base.name}"

    def encode(self, images: Images) -> Features:
        """Rows of images ``(n, channels, height, width)``."""
        codes = encode_images(images, self.base, self.cache)
        return represented(codes, self.how, stage_widths(self.base))


def stage_widths(base: Encoder) -> tuple[int, ...]:
    """Numbers of each stage that an encoder tells of; none means that all are of one."""
    return base.widths if isinstance(base, StageEncoder) else ()
