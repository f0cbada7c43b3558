"""Representations of an encoder's rows: direction, length, and several stages of the network.

The numbers of an encoder shrink with the object in the image. So Gaussians on the plain numbers put
small objects near the mean of all others, while the direction of the numbers separates them. The
variation of a channel over the places of an image separates them better than its mean.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedgmm.data.embeddings import encode_images
from fedgmm.data.encoders import Encoder, ResNet18Encoder, device_of
from fedgmm.nets.backbones import ResNet18
from fedgmm.support.checks import check_choice

REPRESENTATIONS = ("plain", "direction", "direction and length", "stages", "deviations")
"""Ways to represent a row.

``plain``: the encoder's numbers. ``direction``: scaled to length one. ``direction and length``: also the
logarithm of the length. ``stages``: direction and length of each stage of the network. ``deviations``:
the same for the square roots of the channels' standard deviations over the places of an image.
"""

_NO_LENGTH = 1e-6


@dataclass(frozen=True)
class Layout:
    """The parts of an encoder's row: means of some stages, then deviations of some stages."""

    # number of columns per stage; the last stage is the encoder's own output. Empty means
    # that all columns are.
    means: tuple[int, ...] = ()
    deviations: tuple[int, ...] = ()  # number of columns per stage; may be empty


_PLAIN = Layout()
_STAGES = Layout((128, 256, 512), (64, 128, 256, 512))


class _Stages(torch.nn.Module):
    """Means and deviations over all places after the stages of a ResNet-18."""

    def __init__(self, network: ResNet18) -> None:
        super().__init__()
        self.network = network
        self.feature_size = sum(_STAGES.means) + sum(_STAGES.deviations)

    def forward(self, x: Tensor) -> Tensor:
        """Return rows ``(n, 1856)`` of images ``(n, 3, height, width)``."""
        net, stages = self.network, []
        x = net.maxpool(torch.relu(net.bn1(net.conv1(x))))
        for layer in (net.layer1, net.layer2, net.layer3, net.layer4):
            x = layer(x)
            stages.append(x)
        means = [stage.mean((2, 3)) for stage in stages[1:]]
        return torch.cat([*means, *(stage.std((2, 3), correction=0) for stage in stages)], dim=1)


class StageEncoder:
    """A ResNet-18 encoder with the output of all stages of the network, not only the last."""

    def __init__(self, base: ResNet18Encoder) -> None:
        self._encoder = copy(base)
        self._encoder._network = _Stages(base._network)  # type: ignore[arg-type]
        self.device = base.device
        self.name = f"means of stages 2 to 4 and deviations of 1 to 4 of {base.name}"

    def encode(self, images: Tensor) -> Tensor:
        """Return rows ``(n, 1856)`` of images ``(n, channels, height, width)``."""
        return self._encoder.encode(images)


def represented(rows: Tensor, how: str, layout: Layout = _PLAIN) -> Tensor:
    """Return an encoder's rows ``(n, d)`` in one of ``REPRESENTATIONS``, ``(n, k)``.

    ``"stages"`` uses the means of all stages, ``"deviations"`` their deviations if the layout has them, and
    the others use the means of the last stage.
    """
    check_choice("representation", how, REPRESENTATIONS)
    means = layout.means or (rows.shape[1],)
    stages = torch.split(rows, [*means, *layout.deviations], dim=1)
    own = stages[len(means) - 1]
    if how == "plain":
        return own
    seen = stages[: len(means)] if how in ("stages", "deviations") else (own,)
    if how == "deviations" and layout.deviations:
        seen = tuple(stage.sqrt() for stage in stages[len(means) :])
    parts: list[Tensor] = []
    for stage in seen:
        lengths = torch.linalg.vector_norm(stage, dim=1, keepdim=True).clamp_min(_NO_LENGTH)
        parts += [stage / lengths] if how == "direction" else [stage / lengths, lengths.log()]
    return torch.cat(parts, dim=1)


class Represented:
    """An encoder with another representation of its rows, one of ``REPRESENTATIONS``.

    ``cache`` is a folder for the rows of ``base``, which all representations share.
    """

    def __init__(self, base: Encoder, how: str, cache: Path | None = None) -> None:
        self.base, self.how, self.cache = base, how, cache
        self.device = device_of(base)
        self.name = f"{how}, {base.name}"

    def encode(self, images: Tensor) -> Tensor:
        """Return rows of images ``(n, channels, height, width)``."""
        rows = encode_images(images, self.base, self.cache)
        return represented(rows, self.how, layout_of(self.base))


def layout_of(base: Encoder) -> Layout:
    """Return the parts of an encoder's rows."""
    return _STAGES if isinstance(base, StageEncoder) else _PLAIN
