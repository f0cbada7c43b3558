"""Independent answers: plain NumPy and SciPy, one client and one component at a time.

Nothing here imports fedgmm. It is slow and literal on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

KINDS = ("full", "tied", "diag", "spherical")
ALL_KINDS = (*KINDS, "identity")


def assert_close(actual, expected, rtol=1e-8):
    """Largest difference relative to the largest expected number."""
    actual, expected = np.asarray(actual, dtype=float), np.asarray(expected, dtype=float)
    assert actual.shape == expected.shape
    scale = max(float(np.abs(expected).max(initial=0.0)), np.finfo(float).tiny)
    worst = float(np.abs(actual - expected).max(initial=0.0)) / scale
    assert worst <= rtol, f"relative difference {worst:.3g} > {rtol:.3g}"


def assert_finite(model):
    """No fitted number is NaN or infinite."""
    for name in (
        "means_",
        "covariances_",
        "precisions_cholesky_",
        "weights_",
        "client_weights_",
        "lower_bounds_",
    ):
        assert np.isfinite(getattr(model, name)).all(), name
    np.testing.assert_allclose(model.weights_.sum(), 1.0, rtol=1e-9)
    np.testing.assert_allclose(model.client_weights_.sum(axis=1), 1.0, rtol=1e-9)


# ---------------------------------------------------------------------- data


def blobs(rng, rows=600, columns=3, components=3, separation=2.0):
    """Overlapping Gaussian blobs with different shapes: rows ``(N, d)`` and labels ``(N,)``."""
    centres = rng.normal(size=(components, columns)) * separation
    shapes = rng.normal(size=(components, columns, columns)) / np.sqrt(columns) + np.eye(columns)
    labels = rng.integers(components, size=rows)
    noise = rng.normal(size=(rows, columns))
    return centres[labels] + np.einsum("nd,nde->ne", noise, shapes[labels]), labels


def ragged_ids(rng, rows, clients):
    """A client for each row: every client at least one row, sizes very different, interleaved."""
    shares = rng.dirichlet(np.full(clients, 0.3))
    ids = np.concatenate([np.arange(clients), rng.choice(clients, size=rows - clients, p=shares)])
    return rng.permutation(ids)


def as_dict(X, ids):
    """``{client: rows}`` from rows and ids."""
    return {name: X[ids == name] for name in np.unique(ids).tolist()}


def random_covariances(rng, kind, components, columns):
    """Covariances in the shape of ``kind``, well conditioned."""
    if kind in ("full", "tied"):
        factors = rng.normal(size=(components, columns, columns))
        full = factors @ np.swapaxes(factors, -1, -2) / columns + np.eye(columns)
        return full if kind == "full" else full[0]
    if kind == "diag":
        return rng.uniform(0.3, 3.0, size=(components, columns))
    return rng.uniform(0.3, 3.0, size=components) if kind == "spherical" else np.ones(components)


def random_start(rng, X, kind, components):
    """Weights, means and precisions to start from, as scikit-learn takes them."""
    columns = X.shape[1]
    weights = rng.dirichlet(np.full(components, 5.0))
    means = X[rng.choice(len(X), components, replace=False)] + 0.1
    covariances = random_covariances(rng, kind, components, columns) * X.var()
    precisions = np.linalg.inv(covariances) if kind in ("full", "tied") else 1.0 / covariances
    return {"weights_init": weights, "means_init": means, "precisions_init": precisions}


# ---------------------------------------------------------------------- the model


def full_covariances(covariances, kind, components, columns):
    """``(M, d, d)`` from any kind's shape."""
    covariances = np.asarray(covariances, dtype=float)
    if kind == "full":
        return covariances
    if kind == "tied":
        return np.stack([covariances] * components)
    if kind == "diag":
        return np.stack([np.diag(row) for row in covariances])
    return np.stack([value * np.eye(columns) for value in covariances])


def reduce_covariances(full, counts, kind, reg_covar):
    """The kind's covariances from the full ones ``(M, d, d)`` and the counts ``(M,)``."""
    columns = full.shape[-1]
    if kind == "full":
        return full + reg_covar * np.eye(columns)
    if kind == "tied":
        pooled = sum(n * s for n, s in zip(counts, full, strict=True)) / counts.sum()
        return pooled + reg_covar * np.eye(columns)
    if kind == "diag":
        return np.stack([np.diag(s) for s in full]) + reg_covar
    if kind == "spherical":
        return np.array([np.trace(s) / columns for s in full]) + reg_covar
    return np.ones(len(full))


def second_moments_of_kind(second, kind):
    """What a covariance type keeps of second moments ``(..., M, d, d)``."""
    return {
        "full": second,
        "tied": second.sum(-3),
        "diag": np.diagonal(second, axis1=-2, axis2=-1),
    }.get(kind, np.trace(second, axis1=-2, axis2=-1))


def log_joint(X, weights, means, full):
    """``log π(m) + log N(x; μ_m, Σ_m)``, ``(N, M)``."""
    with np.errstate(divide="ignore"):
        return np.stack(
            [
                np.log(weights[m])
                + multivariate_normal(means[m], full[m], allow_singular=True).logpdf(X).reshape(-1)
                for m in range(len(means))
            ],
            axis=-1,
        )


@dataclass
class Looped:
    """What the loop over clients ends with."""

    means: np.ndarray
    covariances: np.ndarray
    client_weights: np.ndarray
    weights: np.ndarray
    bounds: list


def looped_em(
    clients,
    weights,
    means,
    covariances,
    kind,
    *,
    rounds,
    aggregation="exact",
    shared_weights=False,
    reg_covar=1e-6,
):
    """The paper's unsupervised algorithm, literally: clients one at a time, rows as they are.

    Args:
        clients: list of rows ``(N_c, d)``.
        weights, means, covariances: the start, in the shapes of scikit-learn.
        kind: covariance type.
        rounds: how many.
        aggregation: the paper's covariance equation, or the exact one on all clients' rows.
        shared_weights: one π for all.
        reg_covar: added to variances.
    """
    components, columns = means.shape
    own = [np.array(weights) for _ in clients]
    total_rows = sum(len(x) for x in clients)
    bounds = []
    for _ in range(rounds):
        full = full_covariances(covariances, kind, components, columns)
        gammas, client_means, client_covs, responsibilities, evidence = [], [], [], [], 0.0
        for c, x in enumerate(clients):
            joint = log_joint(x, own[c], means, full)
            log_evidence = logsumexp(joint, axis=1)
            q = np.exp(joint - log_evidence[:, None])
            gamma = q.sum(axis=0)
            mu = np.zeros((components, columns))
            sigma = np.zeros((components, columns, columns))
            for m in range(components):
                if gamma[m] > 0:
                    mu[m] = (q[:, m, None] * x).sum(axis=0) / gamma[m]
                    for i in range(len(x)):
                        sigma[m] += q[i, m] * np.outer(x[i] - mu[m], x[i] - mu[m]) / gamma[m]
            gammas.append(gamma)
            client_means.append(mu)
            client_covs.append(sigma)
            responsibilities.append(q)
            evidence += log_evidence.sum()
        counts = np.sum(gammas, axis=0)
        means = sum(g[:, None] * mu for g, mu in zip(gammas, client_means, strict=True))
        means = means / counts[:, None]
        new = np.zeros((components, columns, columns))
        for m in range(components):
            if aggregation == "paper":
                for g, sigma in zip(gammas, client_covs, strict=True):
                    new[m] += g[m] * sigma[m] / counts[m]
            else:
                for q, x in zip(responsibilities, clients, strict=True):
                    centred = x - means[m]
                    new[m] += (q[:, m, None] * centred).T @ centred / counts[m]
        covariances = reduce_covariances(new, counts, kind, reg_covar)
        weights = counts / total_rows
        own = [
            weights if shared_weights else g / len(x) for g, x in zip(gammas, clients, strict=True)
        ]
        bounds.append(evidence / total_rows)
    return Looped(means, covariances, np.stack(own), weights, bounds)
