"""The small convolutional network for stacked parameters, as batched matrix products.

``torch.func.vmap`` turns a stack of convolutions into one grouped convolution, which graphics cards
run far below their speed. Here every convolution is a product of weights and patches::

    weights  (G, c', 9·c)   @   patches  (G, 9·c, n·h·w)        G: clients × learners

Channels come before images, ``(G, c, n, h, w)``, so that a product needs no rearranging after the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import dropout, max_pool2d, pad, relu

from fedgmm.core.params import Params
from fedgmm.nets.kernels import fused as kernels
from fedgmm.nets.networks import ConvNet, Handling, Vectorised

Pair = tuple[int, int]
"""Down and right."""


class _Patches(torch.autograd.Function):
    """``(G, c, n, h, w)`` to ``(G, k·k·c, n, h', w')``: each pixel's neighbours, zeros outside.

    Autograd would make a tensor of the full size for each of the slices on the way back.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
        wide = pad(images, (padding[1], padding[1], padding[0], padding[0]))
        ctx.slices = _slices(wide.shape[-2:], size, stride)
        ctx.wide, ctx.padding = wide.shape, padding
        return torch.stack([wide[..., down, right] for down, right in ctx.slices], 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = _split(gradients[0], 1, len(ctx.slices))
        wide = gradient.new_zeros(ctx.wide)
        for tap, (down, right) in enumerate(ctx.slices):
            wide[..., down, right] += gradient[:, tap]
        (top, left), (height, width) = ctx.padding, ctx.wide[-2:]
        return wide[..., top : height - top, left : width - left], None, None, None


def _slices(wide: Sequence[int], size: Pair, stride: Pair) -> list[tuple[slice, slice]]:
    """Where the first, second, … neighbour of every place lies in padded images."""
    rows, columns = (
        [slice(first, whole - own + first + 1, step) for first in range(own)]
        for whole, own, step in zip(wide, size, stride, strict=True)
    )
    return [(down, right) for down in rows for right in columns]


def _split(values: Tensor, axis: int, first: int, second: int = -1) -> Tensor:
    """One axis as two."""
    return values.reshape(*values.shape[:axis], first, second, *values.shape[axis + 1 :])


def patches(
    images: Tensor, size: Pair = (3, 3), stride: Pair = (1, 1), padding: Pair = (1, 1)
) -> Tensor:
    """Every place's neighbourhood: ``(G, c, n, h, w)`` to ``(G, k·k·c, n, h', w')``."""
    found: Tensor = _Patches.apply(images, size, stride, padding)  # type: ignore[no-untyped-call]
    return found


def convolve(
    images: Tensor, weight: Tensor, stride: Pair = (1, 1), padding: Pair = (1, 1)
) -> Tensor:
    """Convolutions, one a group, without a bias.

    Args:
        images: ``(G, c, n, h, w)``.
        weight: ``(G, c', c, k, k)``.
        stride: of the places.
        padding: zeros around the images.

    Returns:
        ``(G, c', n, h', w')``.
    """
    size = (weight.shape[-2], weight.shape[-1])
    kernel = weight.permute(0, 1, 3, 4, 2).flatten(2)  # (G, c', k·k·c), in the order of patches
    seen = patches(images, size, stride, padding)
    out = torch.bmm(kernel, seen.flatten(2))
    return out.reshape(*out.shape[:2], *seen.shape[2:])


def _pooled(images: Tensor, bias: Tensor) -> Tensor:
    """The largest of every 2×2 pixels, plus the bias ``(G, c)``, and of zero.

    The bias comes after the largest, which it does not change: there are a quarter as many numbers.
    """
    pooled = max_pool2d(images.flatten(1, 2), 2)
    pooled = pooled.reshape(*images.shape[:3], *pooled.shape[-2:])
    return relu(pooled + bias[..., None, None, None])


@dataclass(frozen=True)
class Convolutional:
    """:class:`ConvNet` for stacked parameters; the same names, the same numbers.

    Attributes:
        channels: of the images.
        size: their height and width.
        classes: ``K``.
        dropout: share of activations that training drops.
        compute: dtype of the products; parameters stay as they are.
    """

    # enough to fill a card, all with about as many rows
    handling: ClassVar[Handling] = Handling(most_clients=64)

    channels: int
    size: int
    classes: int
    dropout: float = 0.0
    compute: torch.dtype | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one image."""
        return (self.channels, self.size, self.size)

    @property
    def row_numbers(self) -> int:
        """The patches of the second convolution, and what lies around them."""
        return 3 * 9 * 32 * (self.size // 2) ** 2

    @cached_property
    def _plain(self) -> Vectorised:
        return Vectorised(self.module, self.input_shape, self.classes)

    def module(self) -> ConvNet:
        """One network of this kind."""
        return ConvNet(self.channels, self.size, self.classes, self.dropout)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """As the module declares them."""
        return self._plain.parameter_shapes

    def initial(self, generator: torch.Generator) -> Params:
        """The module's own initialisation, seeded by the generator."""
        return self._plain.initial(generator)

    def logits(self, params: Params, inputs: Tensor, training: bool = False) -> Tensor:
        """Logits ``(*C, n, M, K)``; on a CPU its own convolutions are faster."""
        if inputs.device.type == "cpu":
            return self._plain.logits(params, inputs, training)
        return self.stacked_logits(params, inputs, training)

    def stacked_logits(self, params: Params, inputs: Tensor, training: bool = False) -> Tensor:
        """The same by batched products."""
        own = params["features.0.weight"]
        lead, learners = own.shape[:-5], own.shape[-5]
        dtype = self.compute or own.dtype
        stacked = {name: value.flatten(0, len(lead)).to(dtype) for name, value in params.items()}
        rows = inputs.shape[len(lead)]
        images = inputs.reshape(-1, rows, self.channels, self.size, self.size).to(dtype)
        hidden = dropout(self._features(stacked, images), self.dropout, training)
        for layer in ("classifier.0", "classifier.3"):
            bias, weight = stacked[f"{layer}.bias"].unsqueeze(1), stacked[f"{layer}.weight"]
            hidden = torch.baddbmm(bias, hidden, weight.mT)
            if layer == "classifier.0":
                hidden = dropout(relu(hidden), self.dropout, training)
        logits = hidden.reshape(*lead, learners, rows, self.classes).transpose(-3, -2)
        return logits.to(own.dtype)

    def _features(self, stacked: Params, images: Tensor) -> Tensor:
        """Both convolutions, ``(A·M, n, c·h·w)`` as the module flattens, of images ``(A, n, c, h, w)``."""
        first, second = (
            (stacked[f"features.{k}.weight"], stacked[f"features.{k}.bias"]) for k in (0, 3)
        )
        if kernels.usable_blocks(images, first[0], second[0]):
            hidden = kernels.channel_block(kernels.pixel_block(images, *first), *second)
            return hidden.permute(0, 1, 4, 2, 3).flatten(2)
        # learners read the same images: their first convolutions are one
        weight = _split(first[0], 0, len(images)).flatten(1, 2)
        hidden = convolve(images.transpose(1, 2), weight)
        hidden = _pooled(hidden.reshape(len(first[0]), -1, *hidden.shape[2:]), first[1])
        hidden = _pooled(convolve(hidden, second[0]), second[1])
        return hidden.transpose(1, 2).flatten(2)
