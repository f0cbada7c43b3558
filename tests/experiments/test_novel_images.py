"""What makes images novel, and labels wrong."""

from __future__ import annotations

import numpy as np
import pytest

from fedgmm.experiments.novel_images import (
    novel_images,
    other_labels,
    resized_about_centre,
    slightly_changed,
)


@pytest.mark.parametrize(("scale", "edge"), [(0.5, 7), (0.8, 3)])
@pytest.mark.parametrize("background", [0, 255])
def test_smaller_images_lie_in_the_middle_of_their_background(rng, scale, edge, background):
    images = np.full((3, 1, 28, 28), background, dtype=np.uint8)
    images[:, :, 2:26, 2:26] = rng.integers(100, 156, size=(3, 1, 24, 24))
    small = resized_about_centre(images, scale)
    assert small.dtype == np.uint8
    assert small.shape == images.shape
    frame = np.ones((28, 28), dtype=bool)
    frame[edge:-edge, edge:-edge] = False
    assert (small[:, 0, frame] == background).all()
    inside = small[:, 0, edge + 2 : -edge - 2, edge + 2 : -edge - 2]
    assert (np.abs(inside.astype(int) - 128) < 40).all()


def test_half_the_size_is_the_mean_of_four_pixels_but_for_smoothing():
    images = np.zeros((1, 1, 28, 28), dtype=np.uint8)
    images[..., 8:20, 4:16] = 200
    small = resized_about_centre(images, 0.5)[0, 0]
    blocks = images[0, 0].reshape(14, 2, 14, 2).mean((1, 3))
    flat = np.abs(small[7:21, 7:21] - blocks)
    assert flat.max() <= 48  # an eighth of the step leaks over each edge
    assert (small[12:16, 10:14] == 200).all()


def centre_of(image):
    """Line and column of the bright pixels' middle, counted from the middle of the image."""
    return [float(places.mean()) - 13.5 for places in np.nonzero(image > 100)]


def test_novel_images_are_turned_and_flipped():
    images = np.zeros((1, 1, 28, 28), dtype=np.uint8)
    images[0, 0, 4:8, 16:20] = 255
    assert centre_of(images[0, 0]) == [-8, 4]
    # turned against the clock: 4 above, 8 to the left; flipped: to the right; at half the distance
    assert centre_of(novel_images(images)[0, 0]) == [-2, 4]
    changed = centre_of(slightly_changed(images)[0, 0])  # not flipped
    np.testing.assert_allclose(changed, [-4 * 22 / 28, -8 * 22 / 28], atol=0.5)


def test_other_sizes_are_refused():
    with pytest.raises(ValueError, match="scale must lie above 0"):
        resized_about_centre(np.zeros((1, 1, 4, 4), dtype=np.uint8), 1.5)


def test_other_labels_are_other_for_every_class(rng):
    for classes in (2, 5, 10):
        for _ in range(20):
            renamed = other_labels(classes, rng)
            assert sorted(renamed) == list(range(classes))
            assert (renamed != np.arange(classes)).all()
