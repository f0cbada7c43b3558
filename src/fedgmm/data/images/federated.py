"""Image data sets dealt over clients as in the paper: partition, joint shift, and splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedgmm.data.dataset import PAPER_SPLIT, SPLITS, FederatedDataset, LabelledRows, split_rows
from fedgmm.data.federated import ClientRows
from fedgmm.data.images.files import WHITE, ImageData
from fedgmm.data.partition import (
    describe,
    dirichlet_by_label,
    draw_joint_shift,
    natural,
    pachinko,
    transform_images,
)
from fedgmm.support.randomness import client_keys
from fedgmm.wording import counted

IntArray = NDArray[np.int64]

PAPER_CLIENTS = {"mnist": 80, "cifar10": 80, "cifar100": 100}
"""Default number of clients of each data set; the clients of FEMNIST are its writers."""

_ALPHA_FINE = 10.0  # as in FedEM's CIFAR-100, which the paper follows
_BLOCK_ROWS = 4096  # images transformed at once


@dataclass(frozen=True, eq=False)
class FederatedImages:
    """Images of many clients, and a record of their changes.

    Attributes:
        name: name of the data set.
        dataset: the clients; inputs are bytes ``(N, channels, height, width)``, and the features are the
            same memory, flattened.
        class_names: ``(K,)``, in the order of the labels.
        changed: for each split, which of its rows were transformed and relabelled, ``(N,)``.
        rows: for each split, the indices of its rows in the loaded data set, ``(N,)``.
        new_labels: the label of each class in changed rows, ``(K,)``.
        description: a few lines for people.
    """

    name: str
    dataset: FederatedDataset
    class_names: tuple[str, ...]
    changed: Mapping[str, NDArray[np.bool_]]
    rows: Mapping[str, IntArray]
    new_labels: IntArray
    description: str

    def __repr__(self) -> str:
        """Return the description."""
        return f"FederatedImages {self.description}"


def federated_images(
    data: ImageData,
    *,
    clients: int | None = None,
    alpha: float = 0.4,
    shift: bool = True,
    fraction: float = 1.0,
    seed: int = 0,
) -> FederatedImages:
    """Deal images over clients, and apply the joint shift to half of them.

    Images with superclasses are dealt by Pachinko allocation, images with writers stay with their
    writers, and all others are dealt by label from a Dirichlet distribution. The joint shift is drawn
    per image, independently of the client, and the partition uses the labels before the shift.

    Args:
        data: from :func:`fedgmm.data.images.files.load_images`.
        clients: number of clients; ``None`` means the paper's number. Writers are drawn at random.
        alpha: parameter of the Dirichlet distribution over clients or, in Pachinko allocation, over
            superclasses; not used with writers.
        shift: whether half of the images are rotated by 90 degrees, flipped and inverted, and their
            labels permuted by one random permutation.
        fraction: share of the images to use, drawn at random; writers are drawn as a whole.
        seed: seed of all draws.

    Returns:
        Clients with splits of 60 % training, 20 % validation and 20 % test rows.
    """
    check_fraction(fraction)
    # independent seeds, so that no step depends on the draws of another
    sample_seed, deal_seed, shift_seed = np.random.SeedSequence(seed).generate_state(3).tolist()
    if data.writers is not None and data.writer_names is not None:
        used = _draw_writers(data.writers, clients, fraction, sample_seed)
        owner = natural(data.writers[used])
        names = [data.writer_names[code] for code in np.unique(data.writers[used])]
        how = "by writer"
    else:
        used = np.arange(len(data))
        if fraction < 1:
            kept = max(1, round(fraction * len(data)))
            draw = np.random.default_rng(sample_seed).choice(len(data), kept, replace=False)
            used = np.sort(draw)
        wanted = clients if clients is not None else PAPER_CLIENTS.get(data.name, 80)
        if data.coarse is not None:
            coarse, fine = data.coarse[used], data.labels[used]
            owner = pachinko(coarse, fine, wanted, alpha, _ALPHA_FINE, deal_seed)
            how = f"by Pachinko allocation (alpha {alpha:g} and {_ALPHA_FINE:g})"
        else:
            owner = dirichlet_by_label(data.labels[used], wanted, alpha, deal_seed)
            how = f"by label, Dirichlet (alpha {alpha:g})"
        digits = len(str(wanted))
        names = [f"client {client + 1:0{digits}d}" for client in range(wanted)]

    changed, new_labels = draw_joint_shift(len(used), len(data.class_names), shift_seed)
    if not shift:
        changed[:] = False
    labels = np.where(changed, new_labels[data.labels[used]], data.labels[used])
    parts = split_rows(owner, client_keys(names), PAPER_SPLIT, seed)
    splits = []
    for part in parts:
        # copied once and as bytes; from_arrays would also keep every pixel as float32
        own = data.images[used[part]]
        places = np.flatnonzero(changed[part])
        for first in range(0, len(places), _BLOCK_ROWS):
            some = places[first : first + _BLOCK_ROWS]
            own[some] = transform_images(own[some], WHITE)
        inputs = torch.from_numpy(own)
        features = ClientRows((inputs.flatten(1),), torch.from_numpy(owner[part]), tuple(names))
        splits.append(LabelledRows(features, inputs, torch.from_numpy(labels[part])))
    train, validation, test = splits
    sizes = ", ".join(f"{name} {len(part):,}" for name, part in zip(SPLITS, parts, strict=True))
    altered = (
        f"{counted(int(changed.sum()), 'image')} rotated by 90 degrees, flipped, inverted and relabelled"
        if shift
        else "images unchanged"
    )
    description = (
        f"{data.name}, dealt {how}\n  {describe(owner, data.labels[used])}\n  {sizes}\n  {altered}"
    )
    return FederatedImages(
        data.name,
        FederatedDataset(train, validation, test, tuple(names), np.arange(len(data.class_names))),
        data.class_names,
        {name: changed[part] for name, part in zip(SPLITS, parts, strict=True)},
        {name: used[part] for name, part in zip(SPLITS, parts, strict=True)},
        new_labels,
        description,
    )


def check_fraction(fraction: float) -> None:
    """Raise ``ValueError`` for a share of images outside ``(0, 1]``."""
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1, got {fraction!r}.")


def _draw_writers(writers: IntArray, clients: int | None, fraction: float, seed: int) -> IntArray:
    """Return the indices of all rows of writers drawn at random.

    Writers are drawn until they have ``fraction`` of the rows; then the first ``clients`` are kept.
    """
    known, counts = np.unique(writers, return_counts=True)
    order = np.random.default_rng(seed).permutation(len(known))
    fit = max(1, int((counts[order].cumsum() <= fraction * len(writers)).sum()))
    if clients is not None:
        if not 1 <= clients <= fit:
            raise ValueError(
                f"clients must lie between 1 and the {counted(fit, 'writer')}, got {clients}."
            )
        fit = clients
    return np.flatnonzero(np.isin(writers, known[order[:fit]]))
