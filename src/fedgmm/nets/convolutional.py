"""The small convolutional network, and convolutions for stacked parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, pad, relu

from fedgmm.core.params import Params
from fedgmm.nets.kernels import fused as kernels
from fedgmm.nets.modules import ModuleNetwork
from fedgmm.nets.networks import TrainingHints

Pair = tuple[int, int]
"""Vertical and horizontal value of a convolution's option."""


class ConvNet(nn.Module):
    """Two convolutions (3×3, max pooling) and two dense layers, for small images."""

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(64 * (size // 4) ** 2, 128),
            nn.ReLU(),
            nn.Identity(),  # keeps the name of the next layer, which files of models have
            nn.Linear(128, classes),
        )
        # He's initialisation: with torch's default, signals shrink from layer to layer and the first
        # rounds learn nothing.
        for name, value in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(value)
            elif not name.startswith("classifier.3"):
                nn.init.kaiming_normal_(value, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``(n, K)`` of images ``(n, channels, size, size)``."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


class _Patches(torch.autograd.Function):
    """Autograd function of :func:`patches`.

    Its own backward pass adds slices in place; autograd would allocate a full tensor per slice.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
        padded = pad(images, (padding[1], padding[1], padding[0], padding[0]))
        # The first, second, … neighbour of every position is a strided slice of the padded images.
        rows, columns = (
            [slice(first, whole - own + first + 1, step) for first in range(own)]
            for whole, own, step in zip(padded.shape[-2:], size, stride, strict=True)
        )
        ctx.slices = [(down, right) for down in rows for right in columns]
        ctx.padded, ctx.padding = padded.shape, padding
        neighbours = [padded[..., down, right] for down, right in ctx.slices]
        return torch.stack(neighbours, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradients[0]
        gradient = gradient.reshape(len(gradient), len(ctx.slices), -1, *gradient.shape[2:])
        padded = gradient.new_zeros(ctx.padded)
        for tap, (down, right) in enumerate(ctx.slices):
            padded[..., down, right] += gradient[:, tap]
        (top, left), (height, width) = ctx.padding, ctx.padded[-2:]
        return padded[..., top : height - top, left : width - left], None, None, None


def patches(
    images: Tensor, size: Pair = (3, 3), stride: Pair = (1, 1), padding: Pair = (1, 1)
) -> Tensor:
    """Return the neighbourhood of every position, with zeros outside of the image.

    Images ``(G, c, n, h, w)`` become ``(G, k·k·c, n, h', w')``.
    """
    found: Tensor = _Patches.apply(images, size, stride, padding)  # type: ignore[no-untyped-call]
    return found


def convolve(
    images: Tensor, weight: Tensor, stride: Pair = (1, 1), padding: Pair = (1, 1)
) -> Tensor:
    """Convolve the images of every group with the group's own filters, without a bias.

    ``torch.func.vmap`` turns a stack of convolutions into one grouped convolution, which GPUs run
    far below their speed. Here every convolution is a matrix product of weights and patches::

        weights  (G, c', k·k·c)   @   patches  (G, k·k·c, n·h'·w')        G: clients × learners

    Images are ``(G, c, n, h, w)`` and weights ``(G, c', c, k, k)``; the result is
    ``(G, c', n, h', w')``. Channels come before images, so the output of one product is the input
    of the next without a copy.
    """
    size = (weight.shape[-2], weight.shape[-1])
    kernel = weight.permute(0, 1, 3, 4, 2).flatten(2)  # (G, c', k·k·c), in the order of patches
    seen = patches(images, size, stride, padding)
    out = torch.bmm(kernel, seen.flatten(2))
    return out.reshape(*out.shape[:2], *seen.shape[2:])


def _max_pool_relu(images: Tensor, bias: Tensor) -> Tensor:
    """Pool 2×2 pixels, add the bias ``(G, c)`` and apply ReLU.

    The bias is added after pooling because it does not change which pixel is the largest, and there
    are a quarter as many numbers.
    """
    pooled = max_pool2d(images.flatten(1, 2), 2)
    pooled = pooled.reshape(*images.shape[:3], *pooled.shape[-2:])
    return relu(pooled + bias[..., None, None, None])


@dataclass(frozen=True)
class Convolutional:
    """:class:`ConvNet` for stacked parameters, with the same parameter names and results."""

    # 64 clients fill a GPU. Larger groups would add padding, because their clients differ more in size.
    hints: ClassVar[TrainingHints] = TrainingHints(max_clients=64)

    channels: int  # channels of the images
    size: int  # height and width of the images
    classes: int
    # dtype of the products; ``None`` means the dtype of the parameters
    compute: torch.dtype | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one image."""
        return (self.channels, self.size, self.size)

    @property
    def activations_per_row(self) -> int:
        """Size of the patches of the second convolution, its inputs and its outputs."""
        return 3 * 9 * 32 * (self.size // 2) ** 2

    def module(self) -> ConvNet:
        """Make one network of this kind."""
        return ConvNet(self.channels, self.size, self.classes)

    @cached_property
    def _by_module(self) -> ModuleNetwork:
        return ModuleNetwork(self.module, self.input_shape, self.classes)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes that the module declares."""
        with torch.device("meta"):  # allocates nothing: shapes from a file may be huge
            return {n: tuple(value.shape) for n, value in self.module().named_parameters()}

    def initial(self, generator: torch.Generator) -> Params:
        """Draw the module's own initialisation, seeded by the generator."""
        return self._by_module.initial(generator)

    def logits(self, params: Params, inputs: Tensor, training: bool = False) -> Tensor:
        """Return the logits ``(*C, n, M, K)``; on a CPU by torch's convolutions, which are faster there."""
        if inputs.device.type == "cpu":
            return self._by_module.logits(params, inputs, training)
        return self.stacked_logits(params, inputs)

    def stacked_logits(self, params: Params, inputs: Tensor) -> Tensor:
        """Return the logits ``(*C, n, M, K)`` by batched matrix products."""
        own = params["features.0.weight"]
        lead, learners = own.shape[:-5], own.shape[-5]
        dtype = self.compute or own.dtype
        stacked = {name: value.flatten(0, len(lead)).to(dtype) for name, value in params.items()}
        rows = inputs.shape[len(lead)]
        images = inputs.reshape(-1, rows, self.channels, self.size, self.size).to(dtype)
        hidden = self._features(stacked, images)
        for layer in ("classifier.0", "classifier.3"):
            bias, weight = stacked[f"{layer}.bias"].unsqueeze(1), stacked[f"{layer}.weight"]
            hidden = torch.baddbmm(bias, hidden, weight.mT)
            if layer == "classifier.0":
                hidden = relu(hidden)
        logits = hidden.reshape(*lead, learners, rows, self.classes).transpose(-3, -2)
        return logits.to(own.dtype)

    def _features(self, stacked: Params, images: Tensor) -> Tensor:
        """Return the output of both convolutions, ``(A·M, n, c·h·w)``, of images ``(A, n, c, h, w)``."""
        first, second = ([stacked[f"features.{k}.{n}"] for n in ("weight", "bias")] for k in (0, 3))
        if kernels.usable_blocks(images, first[0], second[0]):
            hidden = kernels.channel_block(kernels.pixel_block(images, *first), *second)
            return hidden.permute(0, 1, 4, 2, 3).flatten(2)
        # All learners of a client read the same images, so their first convolutions are one product.
        weight = first[0].reshape(len(images), -1, *first[0].shape[2:])
        hidden = convolve(images.transpose(1, 2), weight)
        hidden = _max_pool_relu(hidden.reshape(len(first[0]), -1, *hidden.shape[2:]), first[1])
        hidden = _max_pool_relu(convolve(hidden, second[0]), second[1])
        return hidden.transpose(1, 2).flatten(2)
