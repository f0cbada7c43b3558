"""Triton kernels for layers of MobileNet-V2 and similar networks; ``fused.py`` calls them.

Images are stored as ``(planes, pixels)``: a plane is one channel of one client and learner, and its pixels
are those of all rows of the batch, ``pixels = n · height · width``. Products are summed in float32.

Names: ``place`` numbers the pixels of a plane, ``there`` masks places that exist, ``slope`` is a gradient.
"""

import triton
import triton.language as tl

# ---------------------------------------------------------------------- depthwise convolution


# The nine taps of a filter are unrolled, so the compiler knows each tap's address offset and only the
# border needs a mask. Computing the positions again for every tap took longer than all memory traffic.


@triton.jit
def _inside(there, above, below, left, right, TAP: tl.constexpr):
    """Mask the pixels whose neighbour at a tap exists; ``above`` masks pixels that have a row above."""
    if TAP < 3:
        there = there & above
    if TAP >= 6:
        there = there & below
    if TAP % 3 == 0:
        there = there & left
    if TAP % 3 == 2:
        there = there & right
    return there


@triton.jit
def depthwise(
    images, weight, out, pixels,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ``out[p, n, y, x] = Σ weight[p, dy, dx] · images[p, n, s·y + dy - 1, s·x + dx - 1]``."""
    plane = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < pixels
    image, row, column = place // (OH * OW), (place // OW) % OH, place % OW
    y, x = row * STRIDE, column * STRIDE
    above, below, left, right = y > 0, y + 1 < H, x > 0, x + 1 < W
    centre = images + plane * (pixels // (OH * OW)) * (H * W) + image * (H * W) + y * W + x
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(9):
        inside = _inside(there, above, below, left, right, tap)
        seen = tl.load(centre + ((tap // 3 - 1) * W + tap % 3 - 1), mask=inside, other=0.0)
        total += seen.to(tl.float32) * tl.load(weight + plane * 9 + tap).to(tl.float32)
    tl.store(out + plane * pixels + place, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def depthwise_images(
    gradient, weight, out, pixels,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the images, ``pixels = n · H · W``, from the gradient of the output."""
    plane = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < pixels
    image, row, column = place // (H * W), (place // W) % H, place % W
    source = gradient + plane * (pixels // (H * W)) * (OH * OW) + image * (OH * OW)
    total = tl.zeros([BLOCK], tl.float32)
    if STRIDE == 1:  # the same convolution with the filter reversed
        above, below, left, right = row > 0, row + 1 < H, column > 0, column + 1 < W
        centre = source + row * W + column
        for tap in tl.static_range(9):
            inside = _inside(there, above, below, left, right, tap)
            seen = tl.load(centre + ((tap // 3 - 1) * W + tap % 3 - 1), mask=inside, other=0.0)
            total += seen.to(tl.float32) * tl.load(weight + plane * 9 + 8 - tap).to(tl.float32)
    else:
        for tap in tl.static_range(9):
            y, x = row + 1 - tap // 3, column + 1 - tap % 3
            inside = there & (y >= 0) & (x >= 0) & (y // STRIDE < OH) & (x // STRIDE < OW)
            inside = inside & (y % STRIDE == 0) & (x % STRIDE == 0)
            seen = tl.load(source + (y // STRIDE) * OW + x // STRIDE, mask=inside, other=0.0)
            total += seen.to(tl.float32) * tl.load(weight + plane * 9 + tap).to(tl.float32)
    tl.store(out + plane * pixels + place, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _neighbour(
    centre, slope, there, above, below, left, right, W: tl.constexpr, TAP: tl.constexpr
):  # fmt: skip
    """Return the gradients times the pixels at a tap."""
    inside = _inside(there, above, below, left, right, TAP)
    seen = tl.load(centre + ((TAP // 3 - 1) * W + TAP % 3 - 1), mask=inside, other=0.0)
    return slope * seen.to(tl.float32)


@triton.jit
def depthwise_weights(
    images, gradient, out, pixels,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a plane's nine weights; nine sums, so that pixels are read once."""
    plane = tl.program_id(0).to(tl.int64)
    source = images + plane * (pixels // (OH * OW)) * (H * W)
    a = tl.zeros([BLOCK], tl.float32)
    b, c, d, e, f, g, h, i = a, a, a, a, a, a, a, a
    for first in range(0, pixels, BLOCK):
        place = first + tl.arange(0, BLOCK)
        there = place < pixels
        image, row, column = place // (OH * OW), (place // OW) % OH, place % OW
        y, x = row * STRIDE, column * STRIDE
        above, below, left, right = y > 0, y + 1 < H, x > 0, x + 1 < W
        spot = source + image * (H * W) + y * W + x
        slope = tl.load(gradient + plane * pixels + place, mask=there, other=0.0).to(tl.float32)
        a += _neighbour(spot, slope, there, above, below, left, right, W, 0)
        b += _neighbour(spot, slope, there, above, below, left, right, W, 1)
        c += _neighbour(spot, slope, there, above, below, left, right, W, 2)
        d += _neighbour(spot, slope, there, above, below, left, right, W, 3)
        e += _neighbour(spot, slope, there, above, below, left, right, W, 4)
        f += _neighbour(spot, slope, there, above, below, left, right, W, 5)
        g += _neighbour(spot, slope, there, above, below, left, right, W, 6)
        h += _neighbour(spot, slope, there, above, below, left, right, W, 7)
        i += _neighbour(spot, slope, there, above, below, left, right, W, 8)
    out += plane * 9
    tl.store(out, tl.sum(a, axis=0).to(out.dtype.element_ty))
    tl.store(out + 1, tl.sum(b, axis=0).to(out.dtype.element_ty))
    tl.store(out + 2, tl.sum(c, axis=0).to(out.dtype.element_ty))
    tl.store(out + 3, tl.sum(d, axis=0).to(out.dtype.element_ty))
    tl.store(out + 4, tl.sum(e, axis=0).to(out.dtype.element_ty))
    tl.store(out + 5, tl.sum(f, axis=0).to(out.dtype.element_ty))
    tl.store(out + 6, tl.sum(g, axis=0).to(out.dtype.element_ty))
    tl.store(out + 7, tl.sum(h, axis=0).to(out.dtype.element_ty))
    tl.store(out + 8, tl.sum(i, axis=0).to(out.dtype.element_ty))


# ---------------------------------------------------------------------- batch normalisation


@triton.jit
def _activated(z, HIGHEST: tl.constexpr):
    """Apply the identity for ``HIGHEST < 0``, ReLU for 0, else ReLU with a ceiling."""
    if HIGHEST >= 0:
        z = tl.maximum(z, 0.0)
    if HIGHEST > 0:
        z = tl.minimum(z, HIGHEST)
    return z


@triton.jit
def _slope(z, gradient, HIGHEST: tl.constexpr):
    """Return the gradient before the activation."""
    if HIGHEST >= 0:
        gradient = tl.where(z > 0.0, gradient, 0.0)
    if HIGHEST > 0:
        gradient = tl.where(z < HIGHEST, gradient, 0.0)
    return gradient


@triton.jit
def _known_pixels(counts, plane, pixels, channels, PADDED: tl.constexpr, PLACE: tl.constexpr):
    """Return the number of pixels of a plane without padding; ``PLACE`` is the number of pixels per row."""
    if PADDED:
        pixels = tl.load(counts + plane // channels) * PLACE
    return pixels


@triton.jit
def normalise(
    images, counts, weight, bias, old_mean, old_variance,
    out, means, variances, new_mean, new_variance, pixels, channels, eps, momentum,
    PADDED: tl.constexpr, HIGHEST: tl.constexpr, PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise each plane by mean and variance of its rows without padding, then apply the activation.

    Running statistics move towards those of the batch, with the unbiased variance. ``counts`` is ``(G,)``
    and read only if ``PADDED``.
    """
    plane = tl.program_id(0).to(tl.int64)
    images += plane * pixels
    out += plane * pixels
    known = _known_pixels(counts, plane, pixels, channels, PADDED, PLACE)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, known, BLOCK):
        place = first + tl.arange(0, BLOCK)
        total += tl.load(images + place, mask=place < known, other=0.0).to(tl.float32)
    count = tl.maximum(tl.cast(known, tl.float32), 1.0)
    mean = tl.sum(total, axis=0) / count
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, known, BLOCK):
        place = first + tl.arange(0, BLOCK)
        there = place < known
        centred = tl.load(images + place, mask=there, other=0.0).to(tl.float32) - mean
        total += tl.where(there, centred * centred, 0.0)
    variance = tl.sum(total, axis=0) / count
    scale = tl.load(weight + plane).to(tl.float32) / tl.sqrt(variance + eps)
    shift = tl.load(bias + plane).to(tl.float32)
    for first in range(0, pixels, BLOCK):
        place = first + tl.arange(0, BLOCK)
        centred = tl.load(images + place, mask=place < known, other=0.0).to(tl.float32) - mean
        z = _activated(centred * scale + shift, HIGHEST)
        if PADDED:  # otherwise padding would grow from layer to layer
            z = tl.where(place < known, z, 0.0)
        tl.store(out + place, z.to(out.dtype.element_ty), mask=place < pixels)
    tl.store(means + plane, mean)
    tl.store(variances + plane, variance)
    old = tl.load(old_mean + plane)
    tl.store(new_mean + plane, old + momentum * (mean - old))
    old = tl.load(old_variance + plane)
    unbiased = variance * count / tl.maximum(count - 1.0, 1.0)
    tl.store(new_variance + plane, old + momentum * (unbiased - old))


@triton.jit
def normalise_backward(
    images, counts, weight, bias, means, variances, gradient, out, out_weight, out_bias,
    pixels, channels, eps,
    PADDED: tl.constexpr, HIGHEST: tl.constexpr, PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of images, scales and shifts; padding has gradient zero."""
    plane = tl.program_id(0).to(tl.int64)
    images += plane * pixels
    gradient += plane * pixels
    out += plane * pixels
    known = _known_pixels(counts, plane, pixels, channels, PADDED, PLACE)
    mean, own_weight = tl.load(means + plane), tl.load(weight + plane).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.load(variances + plane) + eps)
    shift = tl.load(bias + plane).to(tl.float32)
    slopes = tl.zeros([BLOCK], tl.float32)
    products = tl.zeros([BLOCK], tl.float32)
    for first in range(0, known, BLOCK):
        place = first + tl.arange(0, BLOCK)
        there = place < known
        unit = (tl.load(images + place, mask=there, other=0.0).to(tl.float32) - mean) * inverse
        slope = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32)
        slope = _slope(unit * own_weight + shift, slope, HIGHEST)
        slopes += slope
        products += slope * unit
    count = tl.maximum(tl.cast(known, tl.float32), 1.0)
    total, product = tl.sum(slopes, axis=0), tl.sum(products, axis=0)
    for first in range(0, pixels, BLOCK):
        place = first + tl.arange(0, BLOCK)
        there = place < known
        unit = (tl.load(images + place, mask=there, other=0.0).to(tl.float32) - mean) * inverse
        slope = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32)
        slope = _slope(unit * own_weight + shift, slope, HIGHEST)
        back = own_weight * inverse * (slope - (total + unit * product) / count)
        if PADDED:
            back = tl.where(there, back, 0.0)
        tl.store(out + place, back.to(out.dtype.element_ty), mask=place < pixels)
    tl.store(out_weight + plane, product)
    tl.store(out_bias + plane, total)


@triton.jit
def scale_and_shift(
    images, scale, shift, out, pixels, HIGHEST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute ``activation(images · scale + shift)`` with one scale and shift per plane."""
    plane = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < pixels
    seen = tl.load(images + plane * pixels + place, mask=there, other=0.0).to(tl.float32)
    z = _activated(seen * tl.load(scale + plane) + tl.load(shift + plane), HIGHEST)
    tl.store(out + plane * pixels + place, z.to(out.dtype.element_ty), mask=there)
