"""Bytes of images become numbers; nothing else changes."""

import torch

from fedgmm.nets.pixels import MARGIN, as_numbers, crop_and_flip


def test_bytes_of_images_are_scaled():
    images = torch.tensor([0, 255], dtype=torch.uint8).reshape(1, 1, 1, 2)
    assert as_numbers(images, torch.float32).flatten().tolist() == [-1.0, 1.0]
    assert images.flatten().tolist() == [0, 255]


def test_bytes_of_tables_and_numbers_stay():
    table = torch.tensor([[0, 255]], dtype=torch.uint8)
    assert as_numbers(table, torch.float64).tolist() == [[0.0, 255.0]]
    images = torch.full((1, 1, 2, 2), 0.5)
    assert torch.equal(as_numbers(images, torch.float32), images)


def test_crops_and_flips_are_those_of_a_plain_loop():
    size = 9
    images = torch.arange(1, 2 * 3 * size * size + 1).reshape(1, 2, 3, size, size).double()
    seen = set()
    for seed in range(60):
        torch.manual_seed(seed)
        for before, after in zip(images[0], crop_and_flip(images)[0], strict=True):
            matches = [
                (down, right, flip)
                for down in range(-MARGIN, MARGIN + 1)
                for right in range(-MARGIN, MARGIN + 1)
                for flip in (False, True)
                if torch.equal(after, moved(before, down, right, flip))
            ]
            assert len(matches) == 1
            seen.update(matches)
    assert {flip for *_, flip in seen} == {False, True}
    assert {down for down, *_ in seen} == set(range(-MARGIN, MARGIN + 1))


def moved(image, down, right, flip):
    """The picture in a frame of zeros, cut out ``down`` and ``right`` of its place."""
    size = image.shape[-1]
    wide = torch.zeros(len(image), size + 2 * MARGIN, size + 2 * MARGIN, dtype=image.dtype)
    wide[:, MARGIN:-MARGIN, MARGIN:-MARGIN] = image
    cut = wide[:, MARGIN + down : MARGIN + down + size, MARGIN + right : MARGIN + right + size]
    return cut.flip(-1) if flip else cut


def test_bytes_stay_bytes():
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    assert crop_and_flip(images).dtype == torch.uint8
