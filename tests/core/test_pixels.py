"""Bytes of images become numbers; nothing else changes."""

import torch

from fedgmm.core.pixels import as_numbers


def test_bytes_of_images_are_scaled():
    images = torch.tensor([0, 255], dtype=torch.uint8).reshape(1, 1, 1, 2)
    assert as_numbers(images, torch.float32).flatten().tolist() == [-1.0, 1.0]
    assert images.flatten().tolist() == [0, 255]


def test_bytes_of_tables_and_numbers_stay():
    table = torch.tensor([[0, 255]], dtype=torch.uint8)
    assert as_numbers(table, torch.float64).tolist() == [[0.0, 255.0]]
    images = torch.full((1, 1, 2, 2), 0.5)
    assert torch.equal(as_numbers(images, torch.float32), images)
