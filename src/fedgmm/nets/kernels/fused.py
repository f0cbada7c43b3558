"""Differentiable functions for stacked networks on NVIDIA GPUs, computed by Triton kernels.

Each function replaces a few calls of torch with a fraction of their memory traffic. :func:`usable` says
whether the kernels support a tensor; otherwise callers use plain torch. The tests compare the kernels
with plain torch, on a GPU or in Triton's interpreter. The kernels are in ``triton_layers`` and
``triton_blocks``, which are imported on first use because Triton is optional.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDTHS = (16, 32, 64)  # numbers of channels that fit a tile of a product
_MAX_COLOURS = 4
_TILE = 1024
_DEPTHWISE_TILE = 512  # four pixels per thread; more would spread reads over more cache lines
_BLOCK_DTYPES = (torch.bfloat16, torch.float16)  # in float32 the sums do not fit into the registers
# positions per program: of the output, and of the gradient of the weights
_PIXEL_TILE, _PIXEL_GRADIENT_TILE = 128, 64
_CHANNEL_TILE, _CHANNEL_GRADIENT_TILE = 64, 32  # on an H200 faster than twice as many
NO_ACTIVATION, RELU, RELU6 = -1.0, 0.0, 6.0
"""Activation after a normalisation, encoded as its ceiling; ``RELU`` has none."""


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def usable(values: Tensor) -> bool:
    """Whether the kernels support this tensor."""
    return values.is_cuda and values.dtype in _DTYPES and _has_triton()


def _tile(pixels: int, most: int = _TILE) -> int:
    """Return the power of two that holds the pixels, but at most ``most``."""
    return min(most, max(32, 1 << (pixels - 1).bit_length()))


# ---------------------------------------------------------------------- depthwise convolution


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, stride: int) -> Tensor:
        from fedgmm.nets.kernels import triton_layers as kernels

        images, weight = images.contiguous(), weight.contiguous()
        groups, channels, rows, height, width = images.shape
        shape = ((height - 1) // stride + 1, (width - 1) // stride + 1)
        out = images.new_empty(groups, channels, rows, *shape)
        pixels = rows * shape[0] * shape[1]
        tile = _tile(pixels, _DEPTHWISE_TILE)
        kernels.depthwise[(groups * channels, -(-pixels // tile))](
            images, weight, out, pixels, height, width, *shape, stride, tile
        )
        ctx.save_for_backward(images, weight)
        ctx.stride = stride
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        from fedgmm.nets.kernels import triton_layers as kernels

        images, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        groups, channels, rows, height, width = images.shape
        sizes = (height, width, *gradient.shape[-2:], ctx.stride)
        own_images = own_weight = None
        if ctx.needs_input_grad[0]:
            own_images = torch.empty_like(images)
            pixels = rows * height * width
            tile = _tile(pixels, _DEPTHWISE_TILE)
            kernels.depthwise_images[(groups * channels, -(-pixels // tile))](
                gradient, weight, own_images, pixels, *sizes, tile
            )
        if ctx.needs_input_grad[1]:
            own_weight = torch.empty_like(weight)
            pixels = rows * gradient.shape[-2] * gradient.shape[-1]
            kernels.depthwise_weights[(groups * channels,)](
                images, gradient, own_weight, pixels, *sizes, _tile(pixels, _DEPTHWISE_TILE)
            )
        return own_images, own_weight, None


def depthwise(images: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Convolve each channel of images ``(G, c, n, h, w)`` with its own filter ``(G, c, 1, 3, 3)``.

    Images are padded by one, and ``stride`` is vertical and horizontal: ``(G, c, n, h', w')``.
    """
    out: Tensor = _Depthwise.apply(images, weight, stride)  # type: ignore[no-untyped-call]
    return out


# ---------------------------------------------------------------------- batch normalisation


class BatchStatistics(NamedTuple):
    """Mean and variance of every channel, of a batch or running, ``(G, c)`` each."""

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
        from fedgmm.nets.kernels import triton_layers as kernels

        images, weight, bias = images.contiguous(), weight.contiguous(), bias.contiguous()
        groups, channels, rows = images.shape[:3]
        row_pixels = images.shape[3] * images.shape[4]
        out = torch.empty_like(images)
        old = [value.float().contiguous() for value in running]
        mean, variance, new_mean, new_variance = (torch.empty_like(old[0]) for _ in range(4))
        # without padding the kernel does not read this argument
        rows_present = weight if counts is None else counts.to(torch.int32).contiguous()
        pixels = rows * row_pixels
        options = (counts is not None, ceiling, row_pixels, _tile(pixels))
        sizes = (pixels, channels, eps)
        kernels.normalise[(groups * channels,)](
            images, rows_present, weight, bias, *old,
            out, mean, variance, new_mean, new_variance, *sizes, momentum, *options,
        )  # fmt: skip
        ctx.save_for_backward(images, rows_present, weight, bias, mean, variance)
        ctx.sizes, ctx.options = sizes, options
        ctx.mark_non_differentiable(new_mean, new_variance)
        ctx.set_materialize_grads(False)  # do not allocate zeros for outputs without a gradient
        return out, new_mean, new_variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from fedgmm.nets.kernels import triton_layers as kernels

        images, rows_present, weight, bias, mean, variance = ctx.saved_tensors
        own = torch.empty_like(images)
        own_weight, own_bias = torch.empty_like(mean), torch.empty_like(mean)
        kernels.normalise_backward[(mean.numel(),)](
            images, rows_present, weight, bias, mean, variance, gradients[0].contiguous(),
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
    """Normalise images ``(G, c, n, h, w)`` by the statistics of the rows without padding.

    Then apply the activation: ``NO_ACTIVATION``, ``RELU`` or ``RELU6``. Weight and bias are
    ``(G, c)``; ``counts`` are the rows per group, ``(G,)``, which padding follows (``None`` means
    no padding). Also return the new running statistics, in float32, in which this batch has the
    weight ``momentum``.
    """
    out, mean, variance = _Normalised.apply(  # type: ignore[no-untyped-call]
        images, weight, bias, counts, running, momentum, eps, ceiling
    )
    return out, BatchStatistics(mean, variance)


def scaled(images: Tensor, scale: Tensor, shift: Tensor, ceiling: float = NO_ACTIVATION) -> Tensor:
    """Return ``activation(images · scale + shift)`` without gradients; scale and shift are ``(G, c)``."""
    from fedgmm.nets.kernels import triton_layers as kernels

    images = images.contiguous()
    out = torch.empty_like(images)
    pixels = images.shape[2] * images.shape[3] * images.shape[4]
    tile = _tile(pixels)
    kernels.scale_and_shift[(scale.numel(), -(-pixels // tile))](
        images, scale.float().contiguous(), shift.float().contiguous(), out, pixels, ceiling, tile
    )
    return out


# ---------------------------------------------------------------------- the small convolutional network


def usable_blocks(images: Tensor, weight: Tensor, next_weight: Tensor) -> bool:
    """Whether :func:`pixel_block` and then :func:`channel_block` support images ``(A, n, c, h, w)``.

    They require a 16-bit dtype, at most 4 colours, 16, 32 or 64 channels, 3×3 filters and at least
    4×4 pixels, and they have no gradient with respect to the images.
    """
    fit = (
        images.dtype in _BLOCK_DTYPES
        and images.shape[2] <= _MAX_COLOURS
        and weight.shape[1] in _WIDTHS
        and next_weight.shape[1] in _WIDTHS
        and weight.shape[-2:] == next_weight.shape[-2:] == (3, 3)
        and min(images.shape[-2:]) >= 4
    )
    return usable(images) and fit and not images.requires_grad


class _PixelBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        from fedgmm.nets.kernels import triton_blocks as kernels

        images, weight, bias = images.contiguous(), weight.contiguous(), bias.contiguous()
        rows, colours, height, width = images.shape[1:]
        groups, targets = weight.shape[:2]
        out, corners = _pooled_results(images, groups, rows, height, width, targets)
        places = rows * out.shape[2] * out.shape[3]
        ctx.places = places
        window = 16 if colours == 1 else 64  # 4×4 pixels per colour, padded to a power of two
        learners = groups // len(images)
        ctx.sizes = learners, colours, targets, height, width, window, _precision()
        kernels.pixel_block[(-(-places // _PIXEL_TILE), groups)](
            images, weight, bias, out, corners, places, *ctx.sizes, _PIXEL_TILE
        )
        ctx.save_for_backward(images, corners)
        ctx.dtype = weight.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        from fedgmm.nets.kernels import triton_blocks as kernels

        images, corners = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        colours, targets, window = ctx.sizes[1], ctx.sizes[2], ctx.sizes[5]
        groups = len(gradient)
        seen = gradient.new_empty(groups, 4, window, targets, dtype=torch.float32)
        own_bias = gradient.new_empty(groups, targets, dtype=torch.float32)
        kernels.pixel_block_weights[(groups,)](
            images, gradient, corners, seen, own_bias, ctx.places, *ctx.sizes, _PIXEL_GRADIENT_TILE,
            num_stages=2,
        )  # fmt: skip
        corner = seen[:, :, : 16 * colours].reshape(groups, 2, 2, colours, 4, 4, targets)
        # at each corner the filter covers another 3×3 part of the 4×4 window
        own = sum(
            corner[:, down, right, :, down : down + 3, right : right + 3]
            for down in range(2)
            for right in range(2)
        )
        assert isinstance(own, Tensor)
        return None, own.permute(0, 4, 1, 2, 3).to(ctx.dtype), own_bias.to(ctx.dtype)


def pixel_block(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve images (3×3, padded by one), add the bias, pool 2×2 pixels and apply ReLU.

    Images ``(A, n, c, h, w)``, weight ``(G, c', c, 3, 3)`` and bias ``(G, c')`` give
    ``(G, n, h/2, w/2, c')``, channels last; ``G / A`` consecutive groups share the same images.
    """
    out: Tensor = _PixelBlock.apply(images, weight, bias)  # type: ignore[no-untyped-call]
    return out


class _ChannelBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        from fedgmm.nets.kernels import triton_blocks as kernels

        images, bias = images.contiguous(), bias.contiguous()
        groups, rows, height, width, sources = images.shape
        targets = weight.shape[1]
        taps = weight.permute(0, 3, 4, 2, 1).contiguous()  # (G, 3, 3, c, c')
        out, corners = _pooled_results(images, groups, rows, height, width, targets)
        places = rows * out.shape[2] * out.shape[3]
        ctx.sizes = sources, targets, height, width, _precision()
        kernels.channel_block[(-(-places // _CHANNEL_TILE), groups)](
            images, taps, bias, out, corners, places, *ctx.sizes, _CHANNEL_TILE
        )
        ctx.save_for_backward(images, weight, corners)
        ctx.places = places
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        from fedgmm.nets.kernels import triton_blocks as kernels

        images, weight, corners = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        groups, rows, height, width, sources = images.shape
        targets = weight.shape[1]
        own_images = None
        if ctx.needs_input_grad[0]:
            own_images = torch.empty_like(images)
            blocks = rows * -(-height // 2) * -(-width // 2)
            taps = weight.permute(0, 3, 4, 1, 2).contiguous()  # (G, 3, 3, c', c)
            kernels.channel_block_images[(-(-blocks // _CHANNEL_TILE), groups)](
                gradient, corners, taps, own_images, rows, *ctx.sizes, _CHANNEL_TILE
            )
        own = weight.new_empty(groups, 3, 3, sources, targets)
        own_bias = gradient.new_empty(groups, targets, dtype=torch.float32)
        kernels.channel_block_weights[(3, groups)](
            images, gradient, corners, own, own_bias, ctx.places, *ctx.sizes, _CHANNEL_GRADIENT_TILE
        )
        return own_images, own.permute(0, 4, 3, 1, 2), own_bias.to(weight.dtype)


def channel_block(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Do the same as :func:`pixel_block` for many channels, with images ``(G, n, h, w, c)``."""
    out: Tensor = _ChannelBlock.apply(images, weight, bias)  # type: ignore[no-untyped-call]
    return out


def _pooled_results(
    images: Tensor, groups: int, rows: int, height: int, width: int, targets: int
) -> tuple[Tensor, Tensor]:
    """Allocate the output of a block, and the index of the largest pixel of every 2×2."""
    out = images.new_empty(groups, rows, height // 2, width // 2, targets)
    return out, torch.empty(out.shape, dtype=torch.uint8, device=out.device)


def _precision() -> str:
    """Return the precision of float32 products: exact, unless the user has allowed TF32."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
