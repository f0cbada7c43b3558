"""Figures of the studies on images show what they were given."""

from __future__ import annotations

import numpy as np
import pytest

from fedgmm.report import image_figures
from fedgmm.report.image_figures import plot_adaptation, plot_curves


@pytest.fixture
def axes(monkeypatch):
    """The axes of the figures that are drawn, in their order."""
    drawn = []

    def keep(figure, path):
        drawn.extend(figure.axes)
        return path

    monkeypatch.setattr(image_figures, "_saved", keep)
    return drawn


@pytest.mark.parametrize("points", [1, 3, 40])
def test_curves_of_few_points_have_marks(axes, tmp_path, points):
    """A single one makes no line, and would not be seen."""
    curve = [value for k in range(points) for value in (None, 0.5 + k / 100)]
    plot_curves({"FedAvg": [curve]}, "some", tmp_path / "curves.png")
    (line,) = axes[0].lines
    np.testing.assert_array_equal(line.get_xdata(), 2 * np.arange(1, points + 1))
    np.testing.assert_allclose(line.get_ydata(), 50 + np.arange(points))
    assert (line.get_marker() == "o") == (points < 40)


def test_curves_of_seeds_are_averaged_as_far_as_all_go(axes, tmp_path):
    plot_curves({"FedAvg": [[0.2, 0.4, 0.9], [0.4, 0.6]]}, "some", tmp_path / "curves.png")
    np.testing.assert_allclose(axes[0].lines[0].get_ydata(), [30, 50])


def test_newcomers_have_a_colour_a_method_and_a_line_a_source(axes, tmp_path):
    curves = {
        (method, source): [0.5, 0.6, 0.7]
        for method in ("FedEM", "FedGMM")
        for source in ("labels", "labels, frequencies", "no labels")
    }
    plot_adaptation([0, 1, 50], curves, "some", tmp_path / "newcomers.png")
    lines = axes[0].lines
    assert [line.get_label() for line in lines][:2] == [
        "FedEM, labels",
        "FedEM, labels, frequencies",
    ]
    assert len({line.get_color() for line in lines[:3]}) == 1
    assert len({line.get_color() for line in lines}) == 2
    assert len({line.get_linestyle() for line in lines[:3]}) == 3
    assert lines[0].get_linestyle() == lines[3].get_linestyle()
    assert len(axes[0].get_legend().get_texts()) == 6
