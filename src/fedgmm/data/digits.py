"""Handwritten digits, made heterogeneous as the paper does: real data without a download."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.partition import dirichlet_by_label, joint_shift

WHITE = 16.0
"""Largest grey value of scikit-learn's digits."""

SIDE = 8


@dataclass(frozen=True)
class Digits:
    """The digits of several clients.

    Attributes:
        dataset: rows are images of 8 × 8, flattened.
        newcomer: rows and labels of a client that is not in ``dataset``.
        images: all images as the clients hold them, ``(N, 64)``.
        changed: which images were transformed and relabelled, ``(N,)``.
    """

    dataset: FederatedDataset
    newcomer: tuple[NDArray[np.float32], NDArray[np.int64]]
    images: NDArray[np.float32]
    changed: NDArray[np.bool_]


def heterogeneous_digits(clients: int = 12, alpha: float = 0.4, seed: int = 0) -> Digits:
    """Half of the images turned, flipped and inverted, with permuted labels; Dirichlet over clients.

    Each client also leans towards changed or unchanged images. One more client is kept apart.

    Args:
        clients: that take part.
        alpha: of the Dirichlet distribution over clients, for each digit and kind of image.
        seed: of everything.
    """
    raw = load_digits()
    images = raw.images.astype(np.float32)
    shifted, labels, changed = joint_shift(images, raw.target, WHITE, seed)
    kinds = labels + 10 * changed
    owner = dirichlet_by_label(kinds, clients + 1, alpha, seed)
    x = shifted.reshape(len(shifted), -1).astype(np.float32)
    apart = owner == clients
    dataset = FederatedDataset.from_arrays(
        x[~apart],
        labels[~apart],
        np.array([f"client {c + 1:02d}" for c in owner[~apart]]),
        seed=seed,
    )
    return Digits(dataset, (x[apart], labels[apart]), x, changed)
