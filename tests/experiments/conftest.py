"""Data sets of images in little, for every study on them."""

from __future__ import annotations

import pytest

from tiny_images import write_femnist, write_mnist


@pytest.fixture
def femnist(tmp_path):
    """A data folder with FEMNIST in little."""
    write_femnist(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def mnist(tmp_path, monkeypatch):
    """A data folder with MNIST in little."""
    write_mnist(tmp_path / "data", monkeypatch)
    return tmp_path / "data"
