"""Pictures are drawn without a window and show the values they were given."""

import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedgmm.report import plots
from fedgmm.report.plots import (
    COLOURS,
    colour_of,
    draw_ellipses,
    draw_weights,
    plot_adaptation,
    plot_curves,
)


def test_ellipses_lie_where_the_gaussian_does():
    axes = Figure().subplots()
    covariance = np.array([[4.0, 0.0], [0.0, 1.0]])
    draw_ellipses(axes, np.array([1.0, 2.0]), covariance, "black")
    one, two = axes.patches
    assert one.center == (1.0, 2.0)
    assert (one.width, one.height) == pytest.approx((4.0, 2.0))  # one deviation to each side
    assert (two.width, two.height) == pytest.approx((8.0, 4.0))
    assert one.angle % 180 == pytest.approx(0.0)


@pytest.mark.parametrize("degrees", [0, 30, 90, 135])
def test_ellipses_turn_with_the_gaussian(degrees):
    axes = Figure().subplots()
    turn = np.deg2rad(degrees)
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    draw_ellipses(axes, np.zeros(2), rotation @ np.diag([9.0, 1.0]) @ rotation.T, "black")
    assert axes.patches[0].angle % 180 == pytest.approx(degrees, abs=1e-6)


def test_weights_are_written_into_their_cells():
    axes = Figure().subplots()
    draw_weights(axes, ["a", "b"], np.array([[0.25, 0.75], [1.0, 0.0]]), np.full((2, 2), 0.5))
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts[(1, 0)] == "0.75  (0.50)"
    assert texts[(0, 1)] == "1.00  (0.50)"


def test_many_clients_have_no_numbers():
    axes = Figure().subplots()
    draw_weights(axes, [str(c) for c in range(100)], np.full((100, 3), 1 / 3))
    assert not axes.texts
    assert axes.get_ylabel() == "100 clients"


def test_colours_repeat():
    assert colour_of(len(COLOURS)) == colour_of(0)


def test_importing_plots_does_not_load_matplotlib():
    code = "import sys, fedgmm.report.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------------- figures of the studies


@pytest.fixture
def axes(monkeypatch):
    """Collect the axes of the figures that are drawn, in their order."""
    drawn = []

    def keep(figure, path):
        drawn.extend(figure.axes)
        return path

    monkeypatch.setattr(plots, "save_figure", keep)
    return drawn


@pytest.mark.parametrize("points", [1, 3, 40])
def test_curves_of_few_points_have_marks(axes, tmp_path, points):
    """A single point draws no line, so it needs a mark."""
    curve = [value for k in range(points) for value in (None, 0.5 + k / 100)]
    plot_curves({"FedAvg": [curve]}, "some", tmp_path / "curves.png")
    (line,) = axes[0].lines
    np.testing.assert_array_equal(line.get_xdata(), 2 * np.arange(1, points + 1))
    np.testing.assert_allclose(line.get_ydata(), 50 + np.arange(points))
    assert (line.get_marker() == "o") == (points < 40)


def test_curves_of_seeds_are_cut_to_the_shortest_and_averaged(axes, tmp_path):
    plot_curves({"FedAvg": [[0.2, 0.4, 0.9], [0.4, 0.6]]}, "some", tmp_path / "curves.png")
    np.testing.assert_allclose(axes[0].lines[0].get_ydata(), [30, 50])


def test_new_clients_have_a_colour_per_method_and_a_line_per_source(axes, tmp_path):
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
