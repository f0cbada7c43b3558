"""Charts hold the values they were given."""

from __future__ import annotations

import html
import re
from dataclasses import replace

import numpy as np
import pytest

from fedgmm.report import charts
from fedgmm.report.contents import AdaptationRecord, Series, WeightMap


def test_far_outliers_are_drawn_at_the_edge(contents, rng):
    log_x = np.append(rng.normal(size=99), -1e9)
    found = replace(
        contents.densities,
        log_x=log_x,
        log_y=np.zeros(100),
        novel=np.arange(100) == 99,
        clients=np.zeros(100, dtype=int),
    )
    usual, novel = charts.densities(found, ["a"]).data
    assert len(usual.x) == 99
    assert novel.x[0] > -20  # drawn near the others
    assert novel.customdata[0][1] == "-1000000000.00"  # the true value
    assert novel.marker.symbol != usual.marker.symbol


def test_a_client_that_adapted_without_test_rows():
    record = AdaptationRecord("new", [12], None, [-3.0, -2.0, -1.5], labelled=False)
    figure = charts.adaptation([record])
    assert [list(one.y) for one in figure.data] == [[-3.0, -2.0, -1.5]]


def test_many_pairs_have_one_label_per_gaussian():
    pairs = tuple(f"G{m1}·L{m2}" for m1 in range(1, 7) for m2 in range(1, 6))
    figure = charts.weights(WeightMap(np.arange(2), pairs, np.zeros((2, 30))), ["a", "b"], 6)
    assert [re.sub("<.*?>", "", text) for text in figure.layout.xaxis.ticktext] == [
        f"G{m}" for m in range(1, 7)
    ]
    assert list(figure.layout.xaxis.tickvals[:2]) == [2, 7]


def test_each_series_has_its_panel():
    rounds = np.arange(3.0)
    figure = charts.convergence(
        [Series("Log-likelihood", rounds, rounds), Series("Accuracy", rounds, rounds / 4)]
    )
    assert figure.layout.yaxis2.tickformat == "~%"  # 99.5% is not shown as 100%
    assert figure.layout.yaxis.tickformat is None


def test_long_texts_are_cut_before_they_are_escaped():
    shown = charts.safe_text("<" * 100)
    assert html.unescape(shown) == "<" * 39 + "…"


def test_figures_hold_the_values(contents):
    figure = charts.accuracies(contents)
    own = figure.data[-1]
    assert own.name == "FedGMM"
    assert list(own.x) == sorted(contents.clients.accuracy)
    first = contents.clients.names.index(own.customdata[0][0])
    assert figure.data[0].x[0] == contents.baselines["FedAvg"][first]
    assert own.mode == "markers"  # no line between clients, which have no order
    ends = contents.clients.interval[first]
    assert [own.x[0] - own.error_x.arrayminus[0], own.x[0] + own.error_x.array[0]] == pytest.approx(
        ends.tolist()
    )
    places = np.array([one.y for one in figure.data])
    assert len(np.unique(places)) == places.size  # equal values do not hide each other


def test_marks_at_one_place_are_spread(rng):
    points = np.concatenate([np.zeros((5, 2)), rng.normal(size=(3, 2)) + 10])
    found = charts.spread_out(points, 0.1)
    assert np.array_equal(found[0], points[0])
    assert np.array_equal(found[5:], points[5:])
    distances = np.linalg.norm(found[:5, None] - found[None, :5], axis=-1)[np.triu_indices(5, 1)]
    assert distances.min() > 0.09
    assert distances.max() < 0.5


def test_axes_of_shares_have_no_tick_beyond_all_or_nothing():
    low, high = charts.share_range([0.0, 1.0])
    assert -0.02 < low < 0
    assert 1 < high < 1.02
