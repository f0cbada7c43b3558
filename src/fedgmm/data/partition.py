"""How pooled rows become clients that differ: by label, by inputs, by the meaning of labels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def dirichlet_by_label(
    labels: NDArray[np.integer], clients: int, alpha: float = 0.4, seed: int = 0
) -> IntArray:
    """Deal the rows of each class over clients with shares from ``Dir(alpha)``: the client of each row.

    Every client gets at least one row where there are enough; it takes one draw a class and ends for
    every ``alpha`` and every number of clients.

    Args:
        labels: classes, ``(N,)``.
        clients: ``C``, at most ``N``.
        alpha: small values give clients few classes.
        seed: of the draws.
    """
    labels = np.asarray(labels)
    if not 1 <= clients <= len(labels):
        raise ValueError(f"clients must lie between 1 and the {len(labels)} rows, got {clients}.")
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha!r}.")
    generator = np.random.default_rng(seed)
    owner = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        # at tiny alpha a Dirichlet draw underflows to all zeros; gamma draws in logs do not
        shares = _log_dirichlet(alpha, clients, generator)
        edges = np.round(np.cumsum(shares) * len(rows)).astype(np.int64)
        owner[rows] = np.searchsorted(edges, np.arange(len(rows)), side="right").clip(
            max=clients - 1
        )
    return _no_empty_client(owner, clients, generator)


def _log_dirichlet(alpha: float, size: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """A Dirichlet draw that is exact for every ``alpha``: ``Gamma(α) = Gamma(α + 1) · U^(1/α)``."""
    logs = np.log(generator.gamma(alpha + 1.0, size=size))
    logs += np.log(generator.uniform(size=size)) / alpha
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


def _no_empty_client(owner: IntArray, clients: int, generator: np.random.Generator) -> IntArray:
    """Give each client without rows one row of the client that has the most."""
    counts = np.bincount(owner, minlength=clients)
    for client in np.flatnonzero(counts == 0):
        richest = int(counts.argmax())
        row = generator.choice(np.flatnonzero(owner == richest))
        owner[row] = client
        counts[richest] -= 1
        counts[client] = 1
    return owner


def transform_images(images: NDArray[np.floating], largest: float) -> NDArray[np.floating]:
    """The paper's ``T``: turned by 90 degrees, flipped left to right, and inverted.

    Args:
        images: ``(N, ..., height, width)``, square.
        largest: the value of white, from which inversion subtracts.
    """
    turned = np.rot90(images, axes=(-2, -1))
    return np.ascontiguousarray(largest - turned[..., ::-1])


def joint_shift(
    images: NDArray[np.floating], labels: NDArray[np.integer], largest: float, seed: int = 0
) -> tuple[NDArray[np.floating], IntArray, NDArray[np.bool_]]:
    """Half of the images transformed, with their labels under one random permutation.

    Args:
        images: ``(N, ..., height, width)``.
        labels: ``0 … K-1``, ``(N,)``.
        largest: the value of white.
        seed: of the choice of images and of the permutation.

    Returns:
        Images, labels, and which rows were changed, ``(N,)``.
    """
    generator = np.random.default_rng(seed)
    changed = generator.permutation(len(images)) < len(images) // 2
    permutation = generator.permutation(int(labels.max()) + 1)
    new_images, new_labels = images.copy(), labels.astype(np.int64)
    new_images[changed] = transform_images(images[changed], largest)
    new_labels[changed] = permutation[labels[changed]]
    return new_images, new_labels, changed
