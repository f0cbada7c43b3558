"""Partitions of pooled rows into clients that differ in labels, inputs, or the meaning of labels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedgmm.wording import counted

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def dirichlet_by_label(
    labels: NDArray[np.integer], clients: int, alpha: float = 0.4, seed: int = 0
) -> IntArray:
    """Deal the rows of each class over clients with shares from ``Dir(alpha)``.

    There is one draw per class. A client without rows then gets one row of the largest client.

    Args:
        labels: classes, ``(N,)``.
        clients: number of clients ``C``, at most ``N``.
        alpha: small values give clients few classes.
        seed: seed of the draws.

    Returns:
        The client of each row, ``(N,)``.
    """
    labels = np.asarray(labels)
    _check(clients, len(labels), alpha=alpha)
    generator = np.random.default_rng(seed)
    owner = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        # for a tiny alpha a Dirichlet draw underflows to zeros, while logs of gamma draws do not
        logs = _log_gammas(alpha, clients, generator)
        shares = np.exp(logs - logs.max())
        shares /= shares.sum()
        edges = np.round(np.cumsum(shares) * len(rows)).astype(np.int64)
        owner[rows] = np.searchsorted(edges, np.arange(len(rows)), side="right").clip(
            max=clients - 1
        )
    counts = np.bincount(owner, minlength=clients)
    for client in np.flatnonzero(counts == 0):
        richest = int(counts.argmax())
        owner[generator.choice(np.flatnonzero(owner == richest))] = client
        counts[richest] -= 1
        counts[client] = 1
    return owner


def _log_gammas(alpha: float, size: int, generator: np.random.Generator) -> FloatArray:
    """Return draws of ``log Gamma(α)``, ``(size,)``, by ``Gamma(α) = Gamma(α + 1) · U^(1/α)``."""
    alpha = min(max(alpha, 1e-300), 1e300)  # more extreme values overflow
    logs = np.log(generator.gamma(alpha + 1.0, size=size))
    logs += np.log(generator.uniform(size=size)) / alpha
    return np.asarray(logs)


def _check(clients: int, rows: int, **alphas: float) -> None:
    if not 1 <= clients <= rows:
        raise ValueError(
            f"clients must lie between 1 and the {counted(rows, 'row')}, got {clients}."
        )
    for name, alpha in alphas.items():
        if not alpha > 0:
            raise ValueError(f"{name} must be positive, got {alpha!r}.")


def pachinko(
    coarse: NDArray[np.integer],
    fine: NDArray[np.integer],
    clients: int,
    alpha_coarse: float = 0.1,
    alpha_fine: float = 10.0,
    seed: int = 0,
) -> IntArray:
    """Deal rows by Pachinko allocation (Reddi et al. 2021).

    A client draws a distribution over coarse labels and, for each coarse label, one over its fine
    labels. It then draws its rows one by one without replacement. A label without rows leaves the
    distribution, which is renormalised. All rows are dealt, and the sizes of clients differ by at most
    one. Clients draw one after the other, so the last ones get the rows that are left.

    Args:
        coarse: superclasses, ``(N,)``.
        fine: classes, ``(N,)``.
        clients: number of clients ``C``, at most ``N``.
        alpha_coarse: parameter of the distribution over coarse labels; small values give a client few.
        alpha_fine: parameter of the distribution over the fine labels of a coarse label.
        seed: seed of the draws.

    Returns:
        The client of each row, ``(N,)``.
    """
    coarse, fine = np.asarray(coarse), np.asarray(fine)
    if coarse.shape != fine.shape or coarse.ndim != 1:
        raise ValueError(
            "coarse and fine must hold one label per row, "
            f"got shapes {coarse.shape} and {fine.shape}."
        )
    rows = len(fine)
    _check(clients, rows, alpha_coarse=alpha_coarse, alpha_fine=alpha_fine)
    generator = np.random.default_rng(seed)
    piles = [  # the rows of each fine label of each coarse label, in random order
        [
            generator.permutation(np.flatnonzero((coarse == label) & (fine == own)))
            for own in np.unique(fine[coarse == label])
        ]
        for label in np.unique(coarse)
    ]
    left = [np.array([len(pile) for pile in own]) for own in piles]
    owner = np.empty(rows, dtype=np.int64)
    for client in range(clients):
        size = rows // clients + (client < rows % clients)
        room = np.array([own.sum() for own in left])
        logs = _log_gammas(alpha_coarse, len(piles), generator)
        from_coarse = _draw_counts(size, logs, room, generator)
        for k in np.flatnonzero(from_coarse):
            # coarse labels without rows for this client need no draw
            logs = _log_gammas(alpha_fine, len(piles[k]), generator)
            counts = _draw_counts(int(from_coarse[k]), logs, left[k], generator)
            for pile, top, count in zip(piles[k], left[k], counts, strict=True):
                owner[pile[top - count : top]] = client
            left[k] = left[k] - counts
    return owner


def _draw_counts(
    draws: int, logs: FloatArray, room: IntArray, generator: np.random.Generator
) -> IntArray:
    """Return how often labels with log weights ``logs`` and ``room`` rows are drawn, each ``(L,)``.

    Draws of a label without rows are repeated among the other labels, which is the same as
    renormalising after each draw. Every pass but the last exhausts a label, so the loop ends.
    """
    taken = np.zeros(len(room), dtype=np.int64)
    while missing := draws - int(taken.sum()):
        open_labels = np.flatnonzero(room > taken)
        weights = np.exp(logs[open_labels] - logs[open_labels].max())
        edges = weights.cumsum()
        drawn = np.searchsorted(edges / edges[-1], generator.random(missing), side="right")
        taken[open_labels] += np.bincount(drawn, minlength=len(open_labels))
        taken = np.minimum(taken, room)
    return taken


def natural(writers: ArrayLike) -> IntArray:
    """Return the client of each row ``(N,)`` if each writer is a client; clients are sorted by id."""
    writers = np.asarray(writers)
    if writers.ndim != 1 or not len(writers):
        raise ValueError(f"writers must hold one id per row, got shape {writers.shape}.")
    return np.unique(writers, return_inverse=True)[1].astype(np.int64)


def describe(owner: IntArray, labels: NDArray[np.integer]) -> str:
    """Describe clients ``owner`` and classes ``labels`` of rows, ``(N,)`` each, in one line."""

    def spread(counts: IntArray) -> str:
        return f"{counts.min():,} to {counts.max():,} (median {np.median(counts):,.10g})"

    _, codes = np.unique(owner, return_inverse=True)
    pairs = np.unique(np.stack([codes, labels]), axis=1)
    rows, classes = np.bincount(codes), np.bincount(pairs[0])
    return (
        f"{counted(len(rows), 'client')} with {counted(len(codes), 'row')}; "
        f"rows per client: {spread(rows)}; classes per client: {spread(classes)}"
    )


def transform_images(images: NDArray[Any], largest: float) -> NDArray[Any]:
    """Rotate images by 90 degrees, flip them left to right, and invert them (the paper's ``T``).

    Applied twice, it returns the original images.

    Args:
        images: ``(N, ..., height, width)``, square, of any number type, which is kept.
        largest: the value of white; inversion subtracts from it.
    """
    if images.ndim < 3 or images.shape[-1] != images.shape[-2]:
        raise ValueError(f"images must have shape (N, ..., side, side), got {images.shape}.")
    if images.dtype.kind == "u" and images.size and images.max() > largest:
        raise ValueError(
            f"largest is {largest:g}, but an image holds {images.max()}; give the value of white."
        )
    turned = np.rot90(images, axes=(-2, -1))
    # white has the type of the images, so that bytes stay bytes
    return np.ascontiguousarray(images.dtype.type(largest) - turned[..., ::-1])


def draw_joint_shift(rows: int, classes: int, seed: int = 0) -> tuple[NDArray[np.bool_], IntArray]:
    """Draw which half of the rows to change, ``(N,)``, and the new label of each class, ``(K,)``."""
    generator = np.random.default_rng(seed)
    changed = generator.permutation(rows) < rows // 2
    return changed, generator.permutation(classes)


def joint_shift(
    images: NDArray[Any], labels: NDArray[np.integer], largest: float, seed: int = 0
) -> tuple[NDArray[Any], IntArray, NDArray[np.bool_]]:
    """Transform half of the images, and permute their labels by one random permutation.

    Returns:
        Images ``(N, ..., height, width)``, labels, and which rows were changed, ``(N,)``.
    """
    changed, permutation = draw_joint_shift(len(images), int(labels.max()) + 1, seed)
    new_images, new_labels = images.copy(), labels.astype(np.int64)
    new_images[changed] = transform_images(images[changed], largest)
    new_labels[changed] = permutation[labels[changed]]
    return new_images, new_labels, changed
