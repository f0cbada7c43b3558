"""A federated Gaussian mixture in a few seconds: synthetic clients, one fit, and what it found.

The clients are the paper's synthetic ones, in two columns so that they can be drawn: shared Gaussians,
and weights ``π_c`` of each client from a Dirichlet distribution with ``α = 0.4``.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from fedgmm.estimators import FederatedGaussianMixture
from fedgmm.training.loop import OnRound

FloatArray = NDArray[np.float64]

MOST_ROUNDS = 200
_DIRICHLET_ALPHA = 0.4
_FEWEST_ROWS, _MOST_ROWS = 150, 600
_ROUNDS_OF_COMPARISON = 20

# Four Gaussians in the plane: mean, the deviations along their two axes, and the turn in degrees.
_SHAPES = (
    ((-3.6, 1.6), (1.9, 0.55), 40),
    ((0.6, -2.2), (2.2, 0.6), -12),
    ((4.2, 1.2), (0.95, 0.85), 0),
    ((0.3, 2.4), (1.6, 0.5), -60),
)


@dataclass(frozen=True)
class DemoData:
    """What the clients hold, and the truth behind it.

    Attributes:
        rows: of each client, ``(N_c, 2)``.
        fresh_rows: as many again that no fit sees.
        weights: ``π_c`` that the rows were drawn with, ``(C, M)``.
        means: ``μ``, ``(M, 2)``.
    """

    rows: dict[Hashable, FloatArray]
    fresh_rows: dict[Hashable, FloatArray]
    weights: FloatArray
    means: FloatArray


@dataclass(frozen=True)
class DemoResult:
    """What the federation learned; components stand in the order of the true ones.

    Attributes:
        data: the clients.
        rounds: how many rounds were run.
        converged: whether the last round changed little.
        means: ``μ``, ``(M, 2)``.
        covariances: ``Σ``, ``(M, 2, 2)``.
        weights: learned ``π_c``, ``(C, M)``.
        labels: the most likely component of every row, client after client, ``(N,)``.
        log_likelihood: mean over rows no fit saw, each client with its own weights.
        common_log_likelihood: the same rows with one common set of weights.
        pooled_difference: the largest difference, over rounds, of the mean log-likelihood between
            the federated fit with common weights and scikit-learn's on the pooled rows.
    """

    data: DemoData
    rounds: int
    converged: bool
    means: FloatArray
    covariances: FloatArray
    weights: FloatArray
    labels: NDArray[np.int64]
    log_likelihood: float
    common_log_likelihood: float
    pooled_difference: float

    @property
    def weight_errors(self) -> FloatArray:
        """Total variation distance of learned and true weights, ``(C,)``: 0 is right, 1 is worst."""
        return np.asarray(np.abs(self.weights - self.data.weights).sum(-1) / 2)


def run_demo(clients: int = 8, seed: int = 0, on_round: Iterable[OnRound] = ()) -> DemoResult:
    """Make clients, fit them together, and compare with a fit on the pooled rows.

    Args:
        clients: how many.
        seed: of the data and of the fit.
        on_round: called after every round, for a progress bar.
    """
    data = make_clients(clients, seed)
    model = FederatedGaussianMixture(
        len(data.means), tol=1e-5, max_iter=MOST_ROUNDS, random_state=seed
    ).fit_with_callbacks(data.rows, on_round=on_round)
    order = _order_of_truth(model.means_, data.means)
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
    """Clients that share four Gaussians and mix them differently."""
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
    """Means ``(M, 2)`` and factors ``A`` ``(M, 2, 2)`` with ``Σ = A Aᵀ``."""
    turns = np.deg2rad([turn for _, _, turn in _SHAPES])
    rotations = np.array([[np.cos(turns), -np.sin(turns)], [np.sin(turns), np.cos(turns)]])
    deviations = np.array([deviation for _, deviation, _ in _SHAPES])
    factors = rotations.transpose(2, 0, 1) * deviations[:, None, :]
    return np.array([mean for mean, _, _ in _SHAPES]), factors


def _order_of_truth(learned: FloatArray, true: FloatArray) -> NDArray[np.int64]:
    """Which learned component belongs to each true one, by the distances of their means, ``(M,)``."""
    distances = np.linalg.norm(true[:, None] - learned[None], axis=-1)
    return np.asarray(linear_sum_assignment(distances)[1])


def _compare_with_pooled(
    model: FederatedGaussianMixture, data: DemoData
) -> tuple[FederatedGaussianMixture, float]:
    """The model with one common ``π``, and how far it is from scikit-learn's on the pooled rows.

    Both start from the same parameters, some way off, and run the same rounds. Pooling needs all
    rows in one place; it stands here only as the yardstick.
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
