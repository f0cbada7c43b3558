"""Triton kernels for the blocks of the small convolutional network; ``fused.py`` calls them.

A block is a 3×3 convolution, 2×2 max pooling and ReLU. The four pixels of a pooled position read a window
of 4×4 pixels, so a program holds four sums per position, one per corner of the 2×2, and reads every window
once. It stores only the largest of the four sums and its corner, 0 to 3 (4 means that ReLU gave zero).
Channels are last in memory, because programs read all channels of a pixel. Products are summed in float32.

Names: ``place`` numbers the pooled positions of all images, ``there`` masks places that exist, ``spot`` is
an offset in memory, ``slope`` a gradient, ``which`` the corner of the largest value.
"""

import triton
import triton.language as tl

# ---------------------------------------------------------------------- pooling


@triton.jit
def _largest(a, b, c, d):
    """Return the largest of four corners and zero, and its index; NaN counts as the largest."""
    best = tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL)
    which = tl.where(a > 0.0, 0, 4)
    which = tl.where(b > best, 1, which)
    best = tl.maximum(best, b, propagate_nan=tl.PropagateNan.ALL)
    which = tl.where(c > best, 2, which)
    best = tl.maximum(best, c, propagate_nan=tl.PropagateNan.ALL)
    which = tl.where(d > best, 3, which)
    return tl.maximum(best, d, propagate_nan=tl.PropagateNan.ALL), which


@triton.jit
def _store_largest(
    a, b, c, d, bias, out, corners, group, place, places, CO: tl.constexpr
):  # fmt: skip
    """Add the bias to four corners ``(BLOCK, CO)``, and store the largest and its index."""
    target = tl.arange(0, CO)
    own = tl.load(bias + group * CO + target).to(tl.float32)[None, :]
    best, which = _largest(a + own, b + own, c + own, d + own)
    spot = (group * places + place)[:, None] * CO + target[None, :]
    there = (place < places)[:, None]
    tl.store(out + spot, best.to(out.dtype.element_ty), mask=there)
    tl.store(corners + spot, which.to(tl.uint8), mask=there)


# ---------------------------------------------------------------------- blocks on pixels


@triton.jit
def _windows(
    images, place, places, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KW: tl.constexpr
):  # fmt: skip
    """Load the window of each place of images ``(n, C, H, W)``: ``(BLOCK, KW)``, ordered ``(C, 4, 4)``."""
    OH: tl.constexpr = H // 2
    OW: tl.constexpr = W // 2
    k = tl.arange(0, KW)
    channel, down, right = k // 16, (k // 4) % 4, k % 4
    image, row, column = place // (OH * OW), (place // OW) % OH, place % OW
    y = 2 * row[:, None] - 1 + down[None, :]
    x = 2 * column[:, None] - 1 + right[None, :]
    inside = (place < places)[:, None] & (k < 16 * C)[None, :]
    inside = inside & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    spot = (image[:, None] * C + channel[None, :]) * (H * W) + y * W + x
    return tl.load(images + spot, mask=inside, other=0.0)


@triton.jit
def _corner_filters(
    weight, C: tl.constexpr, CO: tl.constexpr, KW: tl.constexpr, CORNER: tl.constexpr
):  # fmt: skip
    """Load filters ``(CO, C, 3, 3)`` in the order of windows, ``(KW, CO)``, shifted to one corner."""
    k, target = tl.arange(0, KW), tl.arange(0, CO)
    channel, down, right = k // 16, (k // 4) % 4 - CORNER // 2, k % 4 - CORNER % 2
    inside = (k < 16 * C) & (down >= 0) & (down < 3) & (right >= 0) & (right < 3)
    spot = target[None, :] * (C * 9) + (channel * 9 + down * 3 + right)[:, None]
    return tl.load(weight + spot, mask=inside[:, None], other=0.0)


@triton.jit
def pixel_block(
    images, weight, bias, out, corners, places,
    SHARED: tl.constexpr, C: tl.constexpr, CO: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    KW: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a block of few colours: one product with the whole window per corner.

    Images ``(G / SHARED, n, C, H, W)``, filters ``(G, CO, C, 3, 3)``, ``places = n · H/2 · W/2``.
    """
    group = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    images += (group // SHARED) * (places // ((H // 2) * (W // 2))) * (C * H * W)
    weight += group * (CO * C * 9)
    seen = _windows(images, place, places, C, H, W, KW)
    a = tl.dot(seen, _corner_filters(weight, C, CO, KW, 0), input_precision=PRECISION)
    b = tl.dot(seen, _corner_filters(weight, C, CO, KW, 1), input_precision=PRECISION)
    c = tl.dot(seen, _corner_filters(weight, C, CO, KW, 2), input_precision=PRECISION)
    d = tl.dot(seen, _corner_filters(weight, C, CO, KW, 3), input_precision=PRECISION)
    _store_largest(a, b, c, d, bias, out, corners, group, place, places, CO)


@triton.jit
def pixel_block_weights(
    images, gradient, corners, out, out_bias, places,
    SHARED: tl.constexpr, C: tl.constexpr, CO: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    KW: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute gradients of a group's biases, and of its filters as a window per corner ``(4, KW, CO)``."""
    group = tl.program_id(0).to(tl.int64)
    k, target = tl.arange(0, KW), tl.arange(0, CO)
    images += (group // SHARED) * (places // ((H // 2) * (W // 2))) * (C * H * W)
    gradient += group * places * CO
    corners += group * places * CO
    a = tl.zeros([KW, CO], tl.float32)
    b, c, d = a, a, a
    shift = tl.zeros([CO], tl.float32)
    for first in range(0, places, BLOCK):
        place = first + tl.arange(0, BLOCK)
        spot = place[:, None] * CO + target[None, :]
        there = (place < places)[:, None]
        slope = tl.load(gradient + spot, mask=there, other=0.0)
        which = tl.load(corners + spot, mask=there, other=4)
        seen = tl.trans(_windows(images, place, places, C, H, W, KW))
        none = tl.zeros_like(slope)
        a += tl.dot(seen, tl.where(which == 0, slope, none), input_precision=PRECISION)
        b += tl.dot(seen, tl.where(which == 1, slope, none), input_precision=PRECISION)
        c += tl.dot(seen, tl.where(which == 2, slope, none), input_precision=PRECISION)
        d += tl.dot(seen, tl.where(which == 3, slope, none), input_precision=PRECISION)
        shift += tl.sum(tl.where(which < 4, slope, none).to(tl.float32), axis=0)
    spot = k[:, None] * CO + target[None, :]
    out += group * (4 * KW * CO)
    tl.store(out + spot, a)
    tl.store(out + KW * CO + spot, b)
    tl.store(out + 2 * KW * CO + spot, c)
    tl.store(out + 3 * KW * CO + spot, d)
    tl.store(out_bias + group * CO + target, shift)


# ---------------------------------------------------------------------- blocks on many channels


@triton.jit
def _filters(weight, C: tl.constexpr, CO: tl.constexpr, TAP: tl.constexpr):
    """Load one tap of filters ``(9, C, CO)``."""
    source, target = tl.arange(0, C), tl.arange(0, CO)
    return tl.load(weight + TAP * C * CO + source[:, None] * CO + target[None, :])


@triton.jit
def channel_block(
    images, weight, bias, out, corners, places,
    C: tl.constexpr, CO: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a block of many channels: images ``(G, n, H, W, C)``, filters ``(G, 9, C, CO)``."""
    OH: tl.constexpr = H // 2
    OW: tl.constexpr = W // 2
    group = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image, row, column = place // (OH * OW), (place // OW) % OH, place % OW
    images += group * (places // (OH * OW)) * (H * W * C)
    weight += group * (9 * C * CO)
    source = tl.arange(0, C)
    a = tl.zeros([BLOCK, CO], tl.float32)
    b, c, d = a, a, a
    for window in tl.static_range(16):
        y, x = 2 * row - 1 + window // 4, 2 * column - 1 + window % 4
        inside = (place < places) & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        pixel = image * (H * W) + y * W + x
        seen = tl.load(
            images + pixel[:, None] * C + source[None, :], mask=inside[:, None], other=0.0
        )
        # for corner a this pixel is tap ``window // 4 * 3 + window % 4``; for b one, for c three earlier
        if window // 4 < 3 and window % 4 < 3:
            taps = _filters(weight, C, CO, window // 4 * 3 + window % 4)
            a += tl.dot(seen, taps, input_precision=PRECISION)
        if window // 4 < 3 and window % 4 > 0:
            taps = _filters(weight, C, CO, window // 4 * 3 + window % 4 - 1)
            b += tl.dot(seen, taps, input_precision=PRECISION)
        if window // 4 > 0 and window % 4 < 3:
            taps = _filters(weight, C, CO, window // 4 * 3 + window % 4 - 3)
            c += tl.dot(seen, taps, input_precision=PRECISION)
        if window // 4 > 0 and window % 4 > 0:
            taps = _filters(weight, C, CO, window // 4 * 3 + window % 4 - 4)
            d += tl.dot(seen, taps, input_precision=PRECISION)
    _store_largest(a, b, c, d, bias, out, corners, group, place, places, CO)


@triton.jit
def _store_pixel(
    out, values, image, y, x, there, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    inside = there & (y < H) & (x < W)
    spot = (image * (H * W) + y * W + x)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(out + spot, values.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def channel_block_images(
    gradient, corners, weight, out, rows,
    C: tl.constexpr, CO: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the images, 2×2 pixels per place; filters ``(G, 9, CO, C)``.

    Four pixels are again reached from a window of 4×4. Only the pixel that was the largest of its 2×2 has
    a gradient.
    """
    OH: tl.constexpr = H // 2
    OW: tl.constexpr = W // 2
    DOWN: tl.constexpr = (H + 1) // 2
    RIGHT: tl.constexpr = (W + 1) // 2
    group = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < rows * DOWN * RIGHT
    image, row, column = place // (DOWN * RIGHT), (place // RIGHT) % DOWN, place % RIGHT
    gradient += group * rows * (OH * OW * CO)
    corners += group * rows * (OH * OW * CO)
    weight += group * (9 * C * CO)
    out += group * rows * (H * W * C)
    target = tl.arange(0, CO)
    a = tl.zeros([BLOCK, C], tl.float32)
    b, c, d = a, a, a
    for window in tl.static_range(16):
        above = row + (window // 4 + 1) // 2 - 1
        left = column + (window % 4 + 1) // 2 - 1
        inside = there & (above >= 0) & (above < OH) & (left >= 0) & (left < OW)
        spot = (image * (OH * OW) + above * OW + left)[:, None] * CO + target[None, :]
        slope = tl.load(gradient + spot, mask=inside[:, None], other=0.0)
        which = tl.load(corners + spot, mask=inside[:, None], other=4)
        corner = (window // 4 + 1) % 2 * 2 + (window % 4 + 1) % 2
        slope = tl.where(which == corner, slope, tl.zeros_like(slope))
        # pixel a is reached through tap ``(2 - window // 4) * 3 + 2 - window % 4``
        if window // 4 < 3 and window % 4 < 3:
            taps = _filters(weight, CO, C, 8 - window // 4 * 3 - window % 4)
            a += tl.dot(slope, taps, input_precision=PRECISION)
        if window // 4 < 3 and window % 4 > 0:
            taps = _filters(weight, CO, C, 9 - window // 4 * 3 - window % 4)
            b += tl.dot(slope, taps, input_precision=PRECISION)
        if window // 4 > 0 and window % 4 < 3:
            taps = _filters(weight, CO, C, 11 - window // 4 * 3 - window % 4)
            c += tl.dot(slope, taps, input_precision=PRECISION)
        if window // 4 > 0 and window % 4 > 0:
            taps = _filters(weight, CO, C, 12 - window // 4 * 3 - window % 4)
            d += tl.dot(slope, taps, input_precision=PRECISION)
    y, x = 2 * row, 2 * column
    _store_pixel(out, a, image, y, x, there, C, H, W)
    _store_pixel(out, b, image, y, x + 1, there, C, H, W)
    _store_pixel(out, c, image, y + 1, x, there, C, H, W)
    _store_pixel(out, d, image, y + 1, x + 1, there, C, H, W)


@triton.jit
def channel_block_weights(
    images, gradient, corners, out, out_bias, places,
    C: tl.constexpr, CO: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a group's filters ``(9, C, CO)``, three taps per program, and biases."""
    OH: tl.constexpr = H // 2
    OW: tl.constexpr = W // 2
    line, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    source, target = tl.arange(0, C), tl.arange(0, CO)
    images += group * (places // (OH * OW)) * (H * W * C)
    gradient += group * places * CO
    corners += group * places * CO
    left = tl.zeros([C, CO], tl.float32)
    middle, right = left, left
    shift = tl.zeros([CO], tl.float32)
    for first in range(0, places, BLOCK):
        place = first + tl.arange(0, BLOCK)
        there = place < places
        image, row, column = place // (OH * OW), (place // OW) % OH, place % OW
        spot = place[:, None] * CO + target[None, :]
        slopes = tl.load(gradient + spot, mask=there[:, None], other=0.0)
        which = tl.load(corners + spot, mask=there[:, None], other=4)
        none = tl.zeros_like(slopes)
        shift += tl.sum(tl.where(which < 4, slopes, none).to(tl.float32), axis=0)
        for down in tl.static_range(2):
            y = 2 * row + down + line - 1
            for across in tl.static_range(4):
                x = 2 * column + across - 1
                inside = there & (y >= 0) & (y < H) & (x >= 0) & (x < W)
                pixel = image * (H * W) + y * W + x
                seen = tl.load(
                    images + pixel[None, :] * C + source[:, None], mask=inside[None, :], other=0.0
                )
                if across < 3:  # for the left corner this pixel is tap ``across``
                    slope = tl.where(which == 2 * down, slopes, none)
                    if across == 0:
                        left += tl.dot(seen, slope, input_precision=PRECISION)
                    if across == 1:
                        middle += tl.dot(seen, slope, input_precision=PRECISION)
                    if across == 2:
                        right += tl.dot(seen, slope, input_precision=PRECISION)
                if across > 0:  # for the right corner it is one tap earlier
                    slope = tl.where(which == 2 * down + 1, slopes, none)
                    if across == 1:
                        left += tl.dot(seen, slope, input_precision=PRECISION)
                    if across == 2:
                        middle += tl.dot(seen, slope, input_precision=PRECISION)
                    if across == 3:
                        right += tl.dot(seen, slope, input_precision=PRECISION)
    spot = (group * 9 + line * 3) * (C * CO) + source[:, None] * CO + target[None, :]
    tl.store(out + spot, left.to(out.dtype.element_ty))
    tl.store(out + C * CO + spot, middle.to(out.dtype.element_ty))
    tl.store(out + 2 * C * CO + spot, right.to(out.dtype.element_ty))
    if line == 0:
        tl.store(out_bias + group * CO + target, shift)
