"""The heat map of weights and the plane of the Gaussians, from given parameters."""

from __future__ import annotations

import numpy as np
import pytest

from fedgmm.data.tables.preprocessing import Column
from fedgmm.report.charts import ellipse
from fedgmm.report.gathering import order_by_similarity, project


def test_similar_clients_are_neighbours():
    values = np.array([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1], [0.1, 0.9]])
    order = order_by_similarity(values).tolist()
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset({0, 2}), frozenset({1, 3})}


@pytest.mark.parametrize("covariance_type", ["full", "tied", "diag", "spherical"])
def test_the_plane_of_every_covariance_type(covariance_type, rng):
    components, columns = 4, 4  # as many as columns: a matrix could be taken for variances
    means = rng.normal(size=(components, columns))
    root = rng.normal(size=(components, columns, columns))
    full = root @ root.transpose(0, 2, 1)
    stored = {
        "full": full,
        "tied": full[0],
        "diag": np.einsum("mii->mi", full),
        "spherical": full[:, 0, 0],
    }[covariance_type]
    square = {
        "full": full,
        "tied": np.stack([full[0]] * components),
        "diag": np.stack([np.diag(np.diag(one)) for one in full]),
        "spherical": np.stack([one[0, 0] * np.eye(columns) for one in full]),
    }[covariance_type]
    shares = rng.dirichlet(np.ones(components))
    plane = project(means, stored, covariance_type, shares, np.eye(components))
    np.testing.assert_allclose(plane.axes.T @ plane.axes, np.eye(2), atol=1e-12)
    for component in range(components):
        inside = plane.axes.T @ square[component] @ plane.axes
        np.testing.assert_allclose(plane.covariances[component], inside, atol=1e-12)
    # a client wholly of one component lies on its mean
    np.testing.assert_allclose(plane.clients, plane.means, atol=1e-12)
    assert 0 < plane.captured < 1


def test_the_plane_holds_the_direction_that_separates():
    means = np.array([[0.0, 0.0, -5.0], [0.0, 0.0, 5.0]])
    covariances = np.array([np.diag([1.0, 9.0, 1.0])] * 2)
    plane = project(means, covariances, "full", np.full(2, 0.5), np.eye(2), ["a", "b", "c"])
    np.testing.assert_allclose(np.abs(plane.axes.T), [[0, 0, 1], [0, 1, 0]], atol=1e-9)
    assert plane.axis_titles == ("more c", "more b")
    assert plane.captured == pytest.approx(1.0)


def test_one_gaussian_is_shown_where_it_is_widest():
    plane = project(
        np.ones((1, 3)), np.array([[1.0, 9.0, 4.0]]), "diag", np.ones(1), np.ones((2, 1))
    )
    np.testing.assert_allclose(np.abs(plane.axes.T), [[0, 1, 0], [0, 0, 1]], atol=1e-9)
    assert not plane.separates
    assert plane.captured == pytest.approx(13 / 14)


def test_an_ellipse_lies_two_deviations_out():
    outline = ellipse(np.array([1.0, 2.0]), np.diag([4.0, 1.0]))
    np.testing.assert_allclose(outline.max(0), [5.0, 4.0], atol=1e-2)
    np.testing.assert_allclose(outline.min(0), [-3.0, 0.0], atol=1e-2)


def test_gaussians_that_follow_missing_values_are_noticed():
    """The mark of a missing value must end as the preprocessing writes it."""
    column = Column("glucose", "number", indicator=True)
    names = [*column.outputs, "age"]
    means = np.array([[0.1, 0.0, 0.0], [-0.1, 3.0, 0.3], [0.0, -2.0, -0.4]])
    shares = np.full(3, 1 / 3)
    plane = project(means, np.ones((3, 3)), "diag", shares, np.eye(3), names)
    assert plane.missing == ("glucose",)
    assert plane.axis_titles[0] == "more glucose missing"
    assert (
        project(np.roll(means, 1, 1), np.ones((3, 3)), "diag", shares, np.eye(3), names).missing
        == ()
    )
