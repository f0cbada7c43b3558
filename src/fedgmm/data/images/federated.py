"""Images in the hands of clients, as the paper deals them: partition, joint shift, 60/20/20."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedgmm.core.randomness import client_keys
from fedgmm.data.dataset import (
    PAPER_SPLIT,
    SPLITS,
    FederatedDataset,
    LabelledRows,
    split_rows,
)
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
from fedgmm.wording import counted

IntArray = NDArray[np.int64]

PAPER_CLIENTS = {"mnist": 80, "cifar10": 80, "cifar100": 100}
"""How many clients a data set has by default; FEMNIST has its writers."""

_ALPHA_FINE = 10.0  # of FedEM's CIFAR-100, which the paper follows
_ROWS_AT_ONCE = 4096  # images transformed in one go


@dataclass(frozen=True, eq=False)
class FederatedImages:
    """Images of many clients, and what was done to them.

    Attributes:
        name: of the data set.
        dataset: the clients; inputs are bytes ``(N, channels, height, width)``, and the Gaussians see
            the same memory, flattened.
        class_names: ``(K,)``, in the order of the labels.
        changed: for each split, which of its rows were transformed and relabelled, ``(N,)``.
        rows: for each split, the place of its rows in the data set as it was loaded, ``(N,)``.
        new_labels: what each class is called in changed rows, ``(K,)``.
        description: what was made, in a few lines.
    """

    name: str
    dataset: FederatedDataset
    class_names: tuple[str, ...]
    changed: Mapping[str, NDArray[np.bool_]]
    rows: Mapping[str, IntArray]
    new_labels: IntArray
    description: str

    def __repr__(self) -> str:
        """The description, under the type's name."""
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
    """Deal images over clients in the data set's own way, and shift half of them.

    Images with superclasses are dealt by Pachinko allocation, images with writers stay with them, all
    others are dealt by label from a Dirichlet distribution. The joint shift is drawn image by image
    and knows nothing of clients: the partition sees the classes before they are renamed.

    Args:
        data: what :func:`fedgmm.data.images.files.load_images` returned.
        clients: how many; ``None`` means the paper's number. Of writers, that many are drawn.
        alpha: of the Dirichlet distribution over clients or, in Pachinko allocation, over superclasses;
            writers have no use for it.
        shift: half of the images are turned by 90 degrees, flipped and inverted, with their labels
            under one random permutation.
        fraction: share of the images to use, drawn at random; of writers, whole ones are drawn.
        seed: of everything.

    Returns:
        Clients whose rows are split into 60 % training, 20 % validation and 20 % test.
    """
    check_fraction(fraction)
    # independent draws, whatever each step consumes
    sample_seed, deal_seed, shift_seed = np.random.SeedSequence(seed).generate_state(3).tolist()
    if data.writers is not None and data.writer_names is not None:
        used = _draw_writers(data.writers, clients, fraction, sample_seed)
        owner = natural(data.writers[used])
        names = [data.writer_names[code] for code in np.unique(data.writers[used])]
        how = "by writer"
    else:
        used = _draw_rows(len(data), fraction, sample_seed)
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
    train, validation, test = (
        _labelled(data.images, used[part], changed[part], labels[part], owner[part], names)
        for part in parts
    )
    sizes = ", ".join(f"{name} {len(part):,}" for name, part in zip(SPLITS, parts, strict=True))
    altered = (
        f"{counted(int(changed.sum()), 'image')} turned by 90 degrees, flipped, inverted and relabelled"
        if shift
        else "images as they are"
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
    """Raise unless it is a share of the images that leaves some."""
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must lie above 0 and not above 1, got {fraction!r}.")


def _draw_rows(rows: int, fraction: float, seed: int) -> IntArray:
    """Sorted numbers of a random share of the rows, at least one."""
    if fraction == 1:
        return np.arange(rows)
    kept = max(1, round(fraction * rows))
    return np.sort(np.random.default_rng(seed).choice(rows, kept, replace=False))


def _draw_writers(writers: IntArray, clients: int | None, fraction: float, seed: int) -> IntArray:
    """Rows of writers drawn at random, all rows of each.

    Writers are added while they fit into ``fraction`` of the rows; then ``clients`` of them stay.
    """
    known, counts = np.unique(writers, return_counts=True)
    order = np.random.default_rng(seed).permutation(len(known))
    fit = int((counts[order].cumsum() <= fraction * len(writers)).sum())
    fit = max(1, fit)
    if clients is not None:
        if not 1 <= clients <= fit:
            raise ValueError(
                f"clients must lie between 1 and the {counted(fit, 'writer')}, got {clients}."
            )
        fit = clients
    return np.flatnonzero(np.isin(writers, known[order[:fit]]))


def _labelled(
    images: NDArray[np.uint8],
    rows: IntArray,
    changed: NDArray[np.bool_],
    labels: IntArray,
    codes: IntArray,
    names: list[str],
) -> LabelledRows:
    """One split. Its images are copied once, and those that change are changed in that copy.

    ``FederatedDataset.from_arrays`` would also keep every pixel as float32, four times the memory.
    """
    own = images[rows]
    places = np.flatnonzero(changed)
    for first in range(0, len(places), _ROWS_AT_ONCE):
        some = places[first : first + _ROWS_AT_ONCE]
        own[some] = transform_images(own[some], WHITE)
    inputs = torch.from_numpy(own)
    seen = ClientRows((inputs.flatten(1),), torch.from_numpy(codes), tuple(names))
    return LabelledRows(seen, inputs, torch.from_numpy(labels))
