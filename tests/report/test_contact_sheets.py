"""A contact sheet shows the clients' images and the steps of the transform."""

from __future__ import annotations

import matplotlib.image
import numpy as np
import pytest

from fedgmm.data.images.federated import federated_images
from fedgmm.data.images.files import ImageData
from fedgmm.report.plots import contact_sheet, strips_of, transform_sheet


def some_images(channels=3, classes=12, side=8):
    generator = np.random.default_rng(1)
    images = generator.integers(256, size=(360, channels, side, side)).astype(np.uint8)
    names = tuple(f"thing_{k}" for k in range(classes))
    return ImageData("cifar10", images, np.arange(360) % classes, names)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dealt", [True, False])
def test_a_sheet_is_written(tmp_path, channels, dealt):
    data = some_images(channels)
    source = federated_images(data, clients=3) if dealt else data
    path = contact_sheet(source, tmp_path / "new" / "sheet.png", columns=4)
    picture = matplotlib.image.imread(path)
    assert picture.shape[0] > 100
    assert picture.shape[1] > 200
    assert path.stat().st_size < 150_000


def test_the_pixels_of_an_image_are_on_the_sheet(tmp_path):
    """One bright image of a single class: red on top, blue below, as in the file."""
    images = np.zeros((1, 3, 8, 8), dtype=np.uint8)
    images[0, 0, :4], images[0, 2, 4:] = 255, 255
    data = ImageData("cifar10", images, np.zeros(1, dtype=np.int64), ("flag",))
    picture = matplotlib.image.imread(contact_sheet(data, tmp_path / "sheet.png"))[..., :3]
    red = np.argwhere((picture == (1, 0, 0)).all(-1))
    blue = np.argwhere((picture == (0, 0, 1)).all(-1))
    assert red[:, 0].min() < blue[:, 0].min()  # upright: red comes first from the top
    yellow = (picture == (1, 1, 0)).all(-1)  # blue inverted
    cyan = (picture == (0, 1, 1)).all(-1)  # red inverted
    assert yellow.any()
    assert cyan.any()
    # turned, then flipped: what was on top is on the right
    assert np.argwhere(yellow)[:, 1].max() < np.argwhere(cyan)[:, 1].min()


def test_changed_images_have_their_old_name_first_and_their_new_one_last():
    data = some_images()
    made = federated_images(data, clients=3, seed=1)
    alone, before, turned, flipped, held = strips_of(made, columns=5)
    assert len(held.images) == 5
    for image, caption in zip(alone.images, alone.captions, strict=True):
        assert caption == data.class_names[label_of(data, image)]
    for image, old, new in zip(before.images, before.captions, held.captions, strict=True):
        label = label_of(data, image)  # it is an image of the file
        assert old == data.class_names[label]
        assert new == data.class_names[made.new_labels[label]]
    np.testing.assert_array_equal(held.images, 255 - flipped.images)
    np.testing.assert_array_equal(flipped.images, turned.images[..., ::-1])
    np.testing.assert_array_equal(turned.images[2, 1], np.rot90(before.images[2, 1]))


def label_of(data, image):
    (row,) = np.flatnonzero((data.images == image).all(axis=(1, 2, 3)))
    return data.labels[row]


def test_classes_are_spread_over_all_there_are():
    (first, *_) = strips_of(some_images(), columns=4)
    assert first.captions == ["thing_0", "thing_4", "thing_7", "thing_11"]
    (first, *_) = strips_of(some_images(classes=3), columns=10)
    assert first.captions == ["thing_0", "thing_1", "thing_2"]


def test_without_a_shift_there_is_one_strip():
    assert len(strips_of(federated_images(some_images(), clients=3, shift=False))) == 1


def test_a_sheet_of_transforms_shows_each_below_the_images(tmp_path):
    """Red as it is, blue as the transform has it: two strips, one below the other."""
    images = np.zeros((2, 3, 8, 8), dtype=np.uint8)
    images[:, 0] = 255
    data = ImageData("cifar10", images, np.array([0, 1]), ("a", "b"))
    blue = {"channels turned round": lambda seen: seen[:, ::-1]}
    picture = matplotlib.image.imread(transform_sheet(data, blue, tmp_path / "sheet.png"))[..., :3]
    first = np.argwhere((picture == (1, 0, 0)).all(-1))
    second = np.argwhere((picture == (0, 0, 1)).all(-1))
    assert len(first) == len(second) > 2 * 8 * 8
    assert first[:, 0].max() < second[:, 0].min()
    assert set(first[:, 1]) == set(second[:, 1])
