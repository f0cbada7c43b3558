"""How pooled rows become clients that differ: by label, by inputs, by the meaning of labels."""

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
    _check_clients(clients, len(labels))
    _check_positive(alpha, "alpha")
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


def _log_dirichlet(alpha: float, size: int, generator: np.random.Generator) -> FloatArray:
    """A Dirichlet draw that is exact for every ``alpha``, ``(size,)``."""
    logs = _log_gammas(alpha, size, generator)
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


def _log_gammas(alpha: float, size: int, generator: np.random.Generator) -> FloatArray:
    """``log Gamma(α)`` draws, ``(size,)``: ``Gamma(α) = Gamma(α + 1) · U^(1/α)`` never underflows."""
    alpha = min(max(alpha, 1e-300), 1e300)  # beyond these the arithmetic itself gives out
    logs = np.log(generator.gamma(alpha + 1.0, size=size))
    logs += np.log(generator.uniform(size=size)) / alpha
    return np.asarray(logs)


def _check_clients(clients: int, rows: int) -> None:
    if not 1 <= clients <= rows:
        raise ValueError(
            f"clients must lie between 1 and the {counted(rows, 'row')}, got {clients}."
        )


def _check_positive(alpha: float, name: str) -> None:
    if not alpha > 0:
        raise ValueError(f"{name} must be positive, got {alpha!r}.")


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


def pachinko(
    coarse: NDArray[np.integer],
    fine: NDArray[np.integer],
    clients: int,
    alpha_coarse: float = 0.1,
    alpha_fine: float = 10.0,
    seed: int = 0,
) -> IntArray:
    """Pachinko allocation (Reddi et al. 2021): the client of each row, ``(N,)``.

    A client draws a distribution over coarse labels and, within each coarse label, one over its fine
    labels; then its rows, one after the other and without replacement. A label that has run out
    leaves the distribution, which is renormalised. Every row is dealt and all clients have as many,
    give or take one. Clients are served in turn, so the last ones take what is left.

    Args:
        coarse: superclasses, ``(N,)``.
        fine: classes, ``(N,)``.
        clients: ``C``, at most ``N``.
        alpha_coarse: of ``Dir(alpha_coarse)`` over coarse labels; small values give a client few.
        alpha_fine: of ``Dir(alpha_fine)`` over the fine labels of a coarse one.
        seed: of the draws.
    """
    coarse, fine = np.asarray(coarse), np.asarray(fine)
    if coarse.shape != fine.shape or coarse.ndim != 1:
        raise ValueError(
            "coarse and fine must hold one label per row, "
            f"got shapes {coarse.shape} and {fine.shape}."
        )
    rows = len(fine)
    _check_clients(clients, rows)
    _check_positive(alpha_coarse, "alpha_coarse")
    _check_positive(alpha_fine, "alpha_fine")
    generator = np.random.default_rng(seed)
    piles = [_shuffled_piles(fine, coarse == label, generator) for label in np.unique(coarse)]
    left = [np.array([len(pile) for pile in own]) for own in piles]
    owner = np.empty(rows, dtype=np.int64)
    for client in range(clients):
        size = rows // clients + (client < rows % clients)
        room = np.array([own.sum() for own in left])
        logs = _log_gammas(alpha_coarse, len(piles), generator)
        from_coarse = _draw_counts(size, logs, room, generator)
        for k in np.flatnonzero(from_coarse):
            # other coarse labels give this client nothing, so their distributions need no draw
            logs = _log_gammas(alpha_fine, len(piles[k]), generator)
            counts = _draw_counts(int(from_coarse[k]), logs, left[k], generator)
            for pile, top, count in zip(piles[k], left[k], counts, strict=True):
                owner[pile[top - count : top]] = client
            left[k] = left[k] - counts
    return owner


def _shuffled_piles(
    labels: NDArray[np.integer], here: NDArray[np.bool_], generator: np.random.Generator
) -> list[IntArray]:
    """Row numbers of each label among the rows ``here`` ``(N,)``, in random order."""
    return [
        generator.permutation(np.flatnonzero(here & (labels == label)))
        for label in np.unique(labels[here])
    ]


def _draw_counts(
    draws: int, logs: FloatArray, room: IntArray, generator: np.random.Generator
) -> IntArray:
    """How often each label comes up in draws without replacement, ``(L,)``.

    Draws of a label that has run out are made again among the others, in proportion: the same as to
    renormalise after each draw. Every pass but the last uses a label up, so it ends.

    Args:
        draws: how many, at most ``room.sum()``.
        logs: logarithms of the labels' weights, ``(L,)``.
        room: rows there are of each label, ``(L,)``.
        generator: of the draws.
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
    """Whoever wrote a row holds it: the client of each row, ``(N,)``, in the sorted order of ids."""
    writers = np.asarray(writers)
    if writers.ndim != 1 or not len(writers):
        raise ValueError(f"writers must hold one id per row, got shape {writers.shape}.")
    return np.unique(writers, return_inverse=True)[1].astype(np.int64)


def describe(owner: IntArray, labels: NDArray[np.integer]) -> str:
    """What a partition made, in a line: clients, rows a client, classes a client.

    Args:
        owner: the client of each row, ``(N,)``.
        labels: the class of each row, ``(N,)``.
    """
    _, codes = np.unique(owner, return_inverse=True)
    pairs = np.unique(np.stack([codes, labels]), axis=1)
    rows, classes = np.bincount(codes), np.bincount(pairs[0])
    return (
        f"{counted(len(rows), 'client')} with {counted(len(codes), 'row')}; "
        f"rows a client: {_spread(rows)}; classes a client: {_spread(classes)}"
    )


def _spread(counts: IntArray) -> str:
    return f"{counts.min():,} to {counts.max():,} (median {np.median(counts):,.10g})"


def transform_images(images: NDArray[Any], largest: float) -> NDArray[Any]:
    """The paper's ``T``: turned by 90 degrees, flipped left to right, and inverted.

    Applied twice it gives the images back.

    Args:
        images: ``(N, ..., height, width)``, square, of any number type, which is kept.
        largest: the value of white, from which inversion subtracts.
    """
    if images.ndim < 3 or images.shape[-1] != images.shape[-2]:
        raise ValueError(f"images must be (N, ..., side, side) to be turned, got {images.shape}.")
    if images.dtype.kind == "u" and images.size and images.max() > largest:
        raise ValueError(
            f"largest is {largest:g}, but an image holds {images.max()}; give the value of white."
        )
    turned = np.rot90(images, axes=(-2, -1))
    # white in the images' own type: bytes stay bytes, and no copy in float64 is made
    return np.ascontiguousarray(images.dtype.type(largest) - turned[..., ::-1])


def draw_joint_shift(rows: int, classes: int, seed: int = 0) -> tuple[NDArray[np.bool_], IntArray]:
    """Which half of the rows is to be changed, ``(N,)``, and the new label of each class, ``(K,)``."""
    generator = np.random.default_rng(seed)
    changed = generator.permutation(rows) < rows // 2
    return changed, generator.permutation(classes)


def joint_shift(
    images: NDArray[Any], labels: NDArray[np.integer], largest: float, seed: int = 0
) -> tuple[NDArray[Any], IntArray, NDArray[np.bool_]]:
    """Half of the images transformed, with their labels under one random permutation.

    Args:
        images: ``(N, ..., height, width)``.
        labels: ``0 … K-1``, ``(N,)``.
        largest: the value of white.
        seed: of the choice of images and of the permutation.

    Returns:
        Images, labels, and which rows were changed, ``(N,)``.
    """
    changed, permutation = draw_joint_shift(len(images), int(labels.max()) + 1, seed)
    new_images, new_labels = images.copy(), labels.astype(np.int64)
    new_images[changed] = transform_images(images[changed], largest)
    new_labels[changed] = permutation[labels[changed]]
    return new_images, new_labels, changed
