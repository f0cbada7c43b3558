"""Fast layers for stacked networks on NVIDIA cards, as differentiable functions.

Each does what a few calls of torch do, with a fraction of the memory traffic. :func:`usable` says whether
they can serve a tensor; callers have the plain way beside it, and that way is the one that is tested
against everything else. Tests hold the two together, on a card or in Triton's interpreter.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDTHS = (16, 32, 64, 128)  # channels that fit a tile of a product
_TILE = 1024
_TILE_OF_TAPS = 512  # four pixels a thread: more would spread a warp's single reads over more lines
_PIXELS_A_PRODUCT = 128
NO_ACTIVATION, RELU, RELU6 = -1.0, 0.0, 6.0
"""What follows a normalisation, named by its ceiling."""


@cache
def _triton_is_there() -> bool:
    return find_spec("triton") is not None


def usable(values: Tensor) -> bool:
    """Whether the kernels can read this tensor."""
    return values.is_cuda and values.dtype in _DTYPES and _triton_is_there()


def usable_channels(images: Tensor, weight: Tensor) -> bool:
    """The same for :func:`convolve`, which wants round numbers of channels and 3×3 filters."""
    wanted = weight.shape[1] in _WIDTHS and weight.shape[2] in _WIDTHS
    return usable(images) and wanted and tuple(weight.shape[-2:]) == (3, 3)


def _tile(pixels: int, most: int = _TILE) -> int:
    """A power of two that holds the pixels, up to ``most``."""
    return min(most, max(32, 1 << (pixels - 1).bit_length()))


# ---------------------------------------------------------------------- one filter a channel


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, stride: int) -> Tensor:
        from fedgmm.core import triton_kernels as kernels

        images, weight = images.contiguous(), weight.contiguous()
        groups, channels, rows, height, width = images.shape
        shape = ((height - 1) // stride + 1, (width - 1) // stride + 1)
        out = images.new_empty(groups, channels, rows, *shape)
        pixels = rows * shape[0] * shape[1]
        tile = _tile(pixels, _TILE_OF_TAPS)
        kernels.depthwise[(groups * channels, -(-pixels // tile))](
            images, weight, out, pixels, height, width, *shape, stride, tile
        )
        ctx.save_for_backward(images, weight)
        ctx.stride = stride
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        from fedgmm.core import triton_kernels as kernels

        images, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        groups, channels, rows, height, width = images.shape
        sizes = (height, width, *gradient.shape[-2:], ctx.stride)
        own_images = own_weight = None
        if ctx.needs_input_grad[0]:
            own_images = torch.empty_like(images)
            pixels = rows * height * width
            tile = _tile(pixels, _TILE_OF_TAPS)
            kernels.depthwise_images[(groups * channels, -(-pixels // tile))](
                gradient, weight, own_images, pixels, *sizes, tile
            )
        if ctx.needs_input_grad[1]:
            own_weight = torch.empty_like(weight)
            pixels = rows * gradient.shape[-2] * gradient.shape[-1]
            kernels.depthwise_weights[(groups * channels,)](
                images, gradient, own_weight, pixels, *sizes, _tile(pixels, _TILE_OF_TAPS)
            )
        return own_images, own_weight, None


def depthwise(images: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Each channel by its own 3×3 filter, padded by one.

    Args:
        images: ``(G, c, n, h, w)``.
        weight: ``(G, c, 1, 3, 3)``.
        stride: down and right.

    Returns:
        ``(G, c, n, h', w')``.
    """
    out: Tensor = _Depthwise.apply(images, weight, stride)  # type: ignore[no-untyped-call]
    return out


# ---------------------------------------------------------------------- batch normalisation


class BatchStatistics(NamedTuple):
    """Mean and variance of every channel, of a batch or running over many, ``(G, c)`` each."""

    mean: Tensor
    variance: Tensor


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        weight: Tensor,
        bias: Tensor,
        counts: Tensor | None,
        running: BatchStatistics,
        momentum: float,
        eps: float,
        ceiling: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from fedgmm.core import triton_kernels as kernels

        images, weight, bias = images.contiguous(), weight.contiguous(), bias.contiguous()
        groups, channels, rows = images.shape[:3]
        place = images.shape[3] * images.shape[4]
        out = torch.empty_like(images)
        old = [value.float().contiguous() for value in running]
        mean, variance, new_mean, new_variance = (torch.empty_like(old[0]) for _ in range(4))
        there = weight if counts is None else counts.to(torch.int32).contiguous()
        pixels = rows * place
        options = (counts is not None, ceiling, place, _tile(pixels))
        sizes = (pixels, channels, eps)
        kernels.normalise[(groups * channels,)](
            images, there, weight, bias, *old,
            out, mean, variance, new_mean, new_variance, *sizes, momentum, *options,
        )  # fmt: skip
        ctx.save_for_backward(images, there, weight, bias, mean, variance)
        ctx.sizes, ctx.options = sizes, options
        ctx.mark_non_differentiable(new_mean, new_variance)
        ctx.set_materialize_grads(False)  # no zeros for what has no gradient
        return out, new_mean, new_variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from fedgmm.core import triton_kernels as kernels

        images, there, weight, bias, mean, variance = ctx.saved_tensors
        own = torch.empty_like(images)
        own_weight, own_bias = torch.empty_like(mean), torch.empty_like(mean)
        kernels.normalise_backward[(mean.numel(),)](
            images, there, weight, bias, mean, variance, gradients[0].contiguous(),
            own, own_weight, own_bias, *ctx.sizes, *ctx.options,
        )  # fmt: skip
        scales = own_weight.to(weight.dtype), own_bias.to(bias.dtype)
        return own, *scales, None, None, None, None, None


def normalised(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    counts: Tensor | None,
    running: BatchStatistics,
    momentum: float,
    eps: float,
    ceiling: float = NO_ACTIVATION,
) -> tuple[Tensor, BatchStatistics]:
    """Batch normalisation by the rows that are there, then ReLU or nothing.

    Args:
        images: ``(G, c, n, h, w)``.
        weight: ``(G, c)``.
        bias: ``(G, c)``.
        counts: how many rows are there, ``(G,)``, and they come first; ``None`` means all.
        running: statistics of earlier batches.
        momentum: how far they move towards those of this one.
        eps: added to variances.
        ceiling: ``NO_ACTIVATION``, ``RELU`` or ``RELU6``.

    Returns:
        The images, and the running statistics after them, in float32.
    """
    out, mean, variance = _Normalised.apply(  # type: ignore[no-untyped-call]
        images, weight, bias, counts, running, momentum, eps, ceiling
    )
    return out, BatchStatistics(mean, variance)


def scaled(images: Tensor, scale: Tensor, shift: Tensor, ceiling: float = NO_ACTIVATION) -> Tensor:
    """``images · scale + shift`` and ReLU or nothing, without gradients; scales are ``(G, c)``."""
    from fedgmm.core import triton_kernels as kernels

    images = images.contiguous()
    out = torch.empty_like(images)
    pixels = images.shape[2] * images.shape[3] * images.shape[4]
    tile = _tile(pixels)
    kernels.scale_and_shift[(scale.numel(), -(-pixels // tile))](
        images, scale.float().contiguous(), shift.float().contiguous(), out, pixels, ceiling, tile
    )
    return out


# ---------------------------------------------------------------------- the small network


class _PooledRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        from fedgmm.core import triton_kernels as kernels

        images = images.contiguous()
        height, width = images.shape[-2:]
        out = images.new_empty(*images.shape[:-2], height // 2, width // 2)
        places = torch.empty(out.shape, dtype=torch.uint8, device=out.device)
        ctx.sizes = (height, width, height // 2, width // 2)
        kernels.pooled_relu[(-(-out.numel() // _TILE),)](
            images, out, places, out.numel(), *ctx.sizes, _TILE
        )
        ctx.save_for_backward(places)
        ctx.shape = images.shape
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        from fedgmm.core import triton_kernels as kernels

        own = gradients[0].new_empty(ctx.shape)
        kernels.pooled_relu_backward[(-(-own.numel() // _TILE),)](
            gradients[0].contiguous(), *ctx.saved_tensors, own, own.numel(), *ctx.sizes, _TILE
        )
        return own


def pooled_relu(images: Tensor) -> Tensor:
    """The largest of every 2×2 pixels and of zero: ``(..., h, w)`` to ``(..., h/2, w/2)``."""
    out: Tensor = _PooledRelu.apply(images)  # type: ignore[no-untyped-call]
    return out


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        images = images.contiguous()
        taps = weight.permute(0, 3, 4, 1, 2).flatten(1, 2).contiguous()  # (G, 9, c', c)
        ctx.save_for_backward(images, taps)
        ctx.has_bias = bias is not None
        return _filtered(images, taps, bias)

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        from fedgmm.core import triton_kernels as kernels

        images, taps = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        own_images = own_weight = own_bias = None
        if ctx.needs_input_grad[0]:  # the same with the filters turned round and transposed
            own_images = _filtered(gradient, taps.flip(1).mT.contiguous(), None)
        if ctx.needs_input_grad[1]:
            groups, _, targets, sources = taps.shape
            own = torch.empty_like(taps)
            pixels = images.shape[2] * images.shape[3] * images.shape[4]
            kernels.convolution_weights[(9, groups)](
                images, gradient, own, pixels, *images.shape[-2:], sources, targets,
                _precision(images), _PIXELS_A_PRODUCT,
            )  # fmt: skip
            own_weight = own.reshape(groups, 3, 3, targets, sources).permute(0, 3, 4, 1, 2)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            own_bias = gradient.sum((2, 3, 4))
        return own_images, own_weight, own_bias


def _filtered(images: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    """Filters ``(G, 9, c', c)`` on images ``(G, c, n, h, w)``."""
    from fedgmm.core import triton_kernels as kernels

    groups, sources, rows, height, width = images.shape
    targets = taps.shape[2]
    out = images.new_empty(groups, targets, rows, height, width)
    pixels = rows * height * width
    kernels.convolution[(-(-pixels // _PIXELS_A_PRODUCT), groups)](
        images, taps, taps if bias is None else bias.contiguous(), out, pixels,
        height, width, sources, targets, bias is not None, _precision(images), _PIXELS_A_PRODUCT,
    )  # fmt: skip
    return out


def _precision(images: Tensor) -> str:
    """All of float32, unless the user has allowed TF32."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def convolve(images: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """3×3 convolutions with stride one, padded by one; see :func:`usable_channels`.

    Args:
        images: ``(G, c, n, h, w)``.
        weight: ``(G, c', c, 3, 3)``.
        bias: ``(G, c')``.

    Returns:
        ``(G, c', n, h, w)``.
    """
    out: Tensor = _Convolved.apply(images, weight, bias)  # type: ignore[no-untyped-call]
    return out
