"""Other ways to read an encoder's numbers: their direction, their length, and several stages.

An encoder's numbers shrink with the object in the picture. Gaussians that see them plainly find small
objects near the middle of all others; the direction of the numbers tells them apart. How much a channel
varies over the places of a picture tells them apart better still than its mean.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedgmm.core.checks import check_choice
from fedgmm.data.embeddings import Encoder, Features, Images, ResNet18Encoder, encode_images
from fedgmm.nets.backbones import ResNet18

REPRESENTATIONS = ("plain", "direction", "direction and length", "stages", "deviations")
"""What becomes of an encoder's numbers: nothing; length one; length one, and the length's logarithm; the
last of these for each stage of the network, where the encoder tells of several; and the same for the square
roots of the channels' standard deviations over places, where it tells of those."""

_NO_LENGTH = 1e-6


@dataclass(frozen=True)
class Layout:
    """How an encoder's row is made up: means of some stages, then deviations of some.

    Attributes:
        means: numbers of each stage, the last the encoder's own; empty means that all numbers are.
        deviations: numbers of each stage; may be empty.
    """

    means: tuple[int, ...] = ()
    deviations: tuple[int, ...] = ()


_STAGES = Layout((128, 256, 512), (64, 128, 256, 512))


class _Stages(torch.nn.Module):
    """Means and deviations over all places after the stages of a ResNet-18."""

    def __init__(self, network: ResNet18) -> None:
        super().__init__()
        self.network = network
        self.feature_size = sum(_STAGES.means) + sum(_STAGES.deviations)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows ``(n, 1856)`` of images ``(n, 3, height, width)``."""
        net = self.network
        x = net.maxpool(torch.relu(net.bn1(net.conv1(x))))
        stages = []
        for layer in (net.layer1, net.layer2, net.layer3, net.layer4):
            x = layer(x)
            stages.append(x)
        means = [stage.mean((2, 3)) for stage in stages[1:]]
        return torch.cat([*means, *(stage.std((2, 3), correction=0) for stage in stages)], dim=1)


class StageEncoder:
    """A ResNet-18 encoder that tells what all stages of the network see, not only the last.

    Attributes:
        layout: of its rows.
    """

    layout = _STAGES

    def __init__(self, base: ResNet18Encoder) -> None:
        self._encoder = copy(base)
        self._encoder._network = _Stages(base._network)  # type: ignore[assignment]
        self.name = f"means of stages 2 to 4 and deviations of 1 to 4 of {base.name}"

    def encode(self, images: Images) -> Features:
        """Rows ``(n, 1856)`` of images ``(n, channels, height, width)``."""
        return self._encoder.encode(images)


def represented(codes: Features, how: str, layout: Layout | None = None) -> Features:
    """An encoder's rows as one of ``REPRESENTATIONS``, ``(n, k)``.

    Args:
        codes: ``(n, d)``.
        how: which representation; ``"stages"`` takes the means of all stages, ``"deviations"`` their
            deviations if there are any, and all others the means of the last.
        layout: of the rows; ``None`` means that all numbers are the encoder's own.
    """
    check_choice("representation", how, REPRESENTATIONS)
    layout = layout or Layout()
    means = layout.means or (codes.shape[1],)
    stages = np.split(codes, np.cumsum((*means, *layout.deviations))[:-1], axis=1)
    own = stages[len(means) - 1]
    if how == "plain":
        return own
    seen = stages[: len(means)] if how in ("stages", "deviations") else [own]
    if how == "deviations" and layout.deviations:
        seen = [np.sqrt(stage) for stage in stages[len(means) :]]
    parts = []
    for stage in seen:
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
        return represented(codes, self.how, layout_of(self.base))


def layout_of(base: Encoder) -> Layout | None:
    """How an encoder's rows are made up; ``None`` where all numbers are alike."""
    return base.layout if isinstance(base, StageEncoder) else None
