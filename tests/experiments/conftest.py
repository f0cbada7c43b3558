"""Small image data sets for the studies."""

from __future__ import annotations

import pytest

from fedgmm.experiments import settings
from fedgmm.report import plots
from tiny_images import write_femnist, write_mnist


@pytest.fixture
def painted():
    """Let pictures be rendered in a test that looks at them."""


@pytest.fixture(autouse=True)
def unrendered(request, monkeypatch):
    """Compose pictures but render them only for tests that look at them."""
    if "painted" not in request.fixturenames:

        def save(figure, path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            return path

        monkeypatch.setattr(plots, "save_figure", save)


@pytest.fixture(scope="module")
def few_rates():
    """Let studies on images try two learning rates in place of five or six."""
    with pytest.MonkeyPatch.context() as patch:
        for grid in ("PAPER_GRID", "_TUNED_GRID"):
            patch.setattr(settings, grid, (10.0**-0.5, 0.1))
        yield


@pytest.fixture(scope="session")
def femnist(tmp_path_factory):
    """A data folder with a small FEMNIST; tests do not change it."""
    folder = tmp_path_factory.mktemp("femnist")
    write_femnist(folder)
    return folder


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    """A data folder with a small MNIST; tests do not change it."""
    folder = tmp_path_factory.mktemp("mnist")
    with pytest.MonkeyPatch.context() as patch:
        write_mnist(folder, patch)
        yield folder
