"""First part of ``fedgmm demo``: a federated Gaussian mixture in a few seconds, as a table and a picture.

The clients resemble the paper's synthetic ones: they share Gaussians, and each draws its weights ``π_c``
from a Dirichlet distribution with ``α = 0.4``. Rows have two columns so that they can be drawn.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from fedgmm.estimators import FederatedGaussianMixture
from fedgmm.report.plots import (
    colour_of,
    draw_ellipses,
    draw_rows,
    draw_weights,
    label_component,
    new_figure,
    save_figure,
)
from fedgmm.training.loop import OnRound
from fedgmm.wording import counted

FloatArray = NDArray[np.float64]

MOST_ROUNDS = 200
_DIRICHLET_ALPHA = 0.4
_FEWEST_ROWS, _MOST_ROWS = 150, 600
_ROUNDS_OF_COMPARISON = 20

# Four Gaussians in the plane: mean, standard deviations along the axes, rotation in degrees.
_SHAPES = (
    ((-3.6, 1.6), (1.9, 0.55), 40),
    ((0.6, -2.2), (2.2, 0.6), -12),
    ((4.2, 1.2), (0.95, 0.85), 0),
    ((0.3, 2.4), (1.6, 0.5), -60),
)


@dataclass(frozen=True)
class DemoData:
    """Rows of all clients and the parameters that they were drawn with."""

    rows: dict[Hashable, FloatArray]  # training rows of each client, ``(N_c, 2)``
    # the same number of rows per client, not used by any fit
    fresh_rows: dict[Hashable, FloatArray]
    weights: FloatArray  # true ``π_c``, ``(C, M)``
    means: FloatArray  # true ``μ``, ``(M, 2)``


@dataclass(frozen=True)
class DemoResult:
    """The fitted mixture, with its components in the order of the true ones."""

    data: DemoData  # the clients
    rounds: int  # number of rounds run
    # whether the log-likelihood changed by less than the tolerance in the last round
    converged: bool
    means: FloatArray  # learned ``μ``, ``(M, 2)``
    covariances: FloatArray  # learned ``Σ``, ``(M, 2, 2)``
    weights: FloatArray  # learned ``π_c``, ``(C, M)``
    # the most likely component of every row, client after client, ``(N,)``
    labels: NDArray[np.int64]
    log_likelihood: float  # mean over the fresh rows, each client with its own weights
    common_log_likelihood: float  # mean over the fresh rows with one common set of weights
    # the largest difference over rounds between the mean log-likelihood of the federated fit with
    # common weights and that of scikit-learn on the pooled rows
    pooled_difference: float

    @property
    def weight_errors(self) -> FloatArray:
        """Total variation distance between learned and true weights, ``(C,)``, from 0 to 1."""
        return np.asarray(np.abs(self.weights - self.data.weights).sum(-1) / 2)


def run_demo(clients: int = 8, seed: int = 0, on_round: Iterable[OnRound] = ()) -> DemoResult:
    """Draw clients, fit the mixture, and compare it with a fit on the pooled rows.

    Args:
        clients: number of clients.
        seed: of the data and of the fit.
        on_round: callbacks after every round, for example a progress bar.
    """
    data = make_clients(clients, seed)
    model = FederatedGaussianMixture(
        len(data.means), tol=1e-5, max_iter=MOST_ROUNDS, random_state=seed
    ).fit_with_callbacks(data.rows, on_round=on_round)
    # match each true component to a learned one by the distances of their means
    distances = np.linalg.norm(data.means[:, None] - model.means_[None], axis=-1)
    order = np.asarray(linear_sum_assignment(distances)[1])
    place = np.argsort(order)
    common, difference = _compare_with_pooled(model, data)
    return DemoResult(
        data=data,
        rounds=model.n_iter_,
        converged=model.converged_,
        means=model.means_[order],
        covariances=model.covariances_[order],
        weights=model.client_weights_[:, order],
        labels=place[model.predict(data.rows)],
        log_likelihood=model.score(data.fresh_rows),
        common_log_likelihood=common.score(data.fresh_rows),
        pooled_difference=difference,
    )


def make_clients(clients: int, seed: int) -> DemoData:
    """Draw clients that share four Gaussians and have different weights."""
    generator = np.random.default_rng(seed)
    means, factors = _shared_gaussians()
    names: list[Hashable] = [f"client {number}" for number in range(1, clients + 1)]
    weights = generator.dirichlet([_DIRICHLET_ALPHA] * len(means), size=clients)
    sizes = generator.integers(_FEWEST_ROWS, _MOST_ROWS, size=clients, endpoint=True)

    def draw(size: int, client_weights: FloatArray) -> FloatArray:
        labels = generator.choice(len(means), size=size, p=client_weights)
        noise = generator.standard_normal((size, 2, 1))
        return np.asarray(means[labels] + (factors[labels] @ noise)[..., 0])

    rows, fresh_rows = (
        {name: draw(*client) for name, *client in zip(names, sizes, weights, strict=True)}
        for _ in range(2)
    )
    return DemoData(rows, fresh_rows, weights, means)


def _shared_gaussians() -> tuple[FloatArray, FloatArray]:
    """Return means ``(M, 2)`` and factors ``A`` ``(M, 2, 2)`` with ``Σ = A Aᵀ``."""
    turns = np.deg2rad([turn for _, _, turn in _SHAPES])
    rotations = np.array([[np.cos(turns), -np.sin(turns)], [np.sin(turns), np.cos(turns)]])
    deviations = np.array([deviation for _, deviation, _ in _SHAPES])
    factors = rotations.transpose(2, 0, 1) * deviations[:, None, :]
    return np.array([mean for mean, _, _ in _SHAPES]), factors


def _compare_with_pooled(
    model: FederatedGaussianMixture, data: DemoData
) -> tuple[FederatedGaussianMixture, float]:
    """Return a fit with one common ``π`` and its largest difference from a fit on the pooled rows.

    Both fits start from the same parameters, moved away from the optimum, and run the same rounds.
    """
    whiteners = model.precisions_cholesky_
    start: dict[str, Any] = {
        "weights_init": np.full(len(model.weights_), 1 / len(model.weights_)),
        "means_init": model.means_ + 0.5,
        "precisions_init": whiteners @ np.swapaxes(whiteners, -1, -2),
        "max_iter": _ROUNDS_OF_COMPARISON,
        "tol": 0.0,
    }
    m = model.n_components
    common = FederatedGaussianMixture(m, shared_weights=True, **start).fit(data.rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        pooled = GaussianMixture(m, **start).fit(np.concatenate(list(data.rows.values())))
    difference = np.abs(np.subtract(common.lower_bounds_, pooled.lower_bounds_)).max()
    return common, float(difference)


def plot_demo(result: DemoResult, path: Path) -> Path:
    """Draw the rows with the shared Gaussians and, beside them, the weights of every client."""
    figure, (rows_axes, weights_axes) = new_figure((10.5, 4.6), 1, 2, width_ratios=(1.25, 1.0))
    rows = np.concatenate(list(result.data.rows.values()))
    draw_rows(rows_axes, rows, result.labels)
    for component, (mean, covariance) in enumerate(
        zip(result.means, result.covariances, strict=True)
    ):
        draw_ellipses(rows_axes, mean, covariance, colour_of(component))
        label_component(rows_axes, mean, component)
    clients = len(result.data.rows)
    rows_axes.set_title(
        f"{counted(len(rows), 'row')} of {counted(clients, 'client')}, and the Gaussians they share",
        pad=12,
    )
    draw_weights(
        weights_axes, list(map(str, result.data.rows)), result.weights, result.data.weights
    )
    return save_figure(figure, path, dpi=100)
