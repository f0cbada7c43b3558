"""Data sets of images in little, for every study on them."""

from __future__ import annotations

import pytest

from fedgmm.report import plots
from tiny_images import write_femnist, write_mnist


@pytest.fixture
def painted():
    """The test looks at pictures."""


@pytest.fixture(autouse=True)
def sketched(request, monkeypatch):
    """Pictures are put together, but painted only for tests that look at them."""
    if "painted" not in request.fixturenames:

        def save(figure, path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            return path

        monkeypatch.setattr(plots, "_save", save)


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
