"""Features of images for the Gaussians: a frozen encoder, then federated PCA.

::

    encoded = encode_federation(dataset, encoder("resnet18", data_dir), cache=folder)
    model = train(encoded.dataset, ...)
    unseen = encoded.feature_map.attach(unseen_clients)

Every client encodes its own images, once. The principal components come only from sums over the
clients' training rows. Encoded images stay on the encoder's device until they are features.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.core.pca import PCA, fit_pca, moments_of
from fedgmm.data.dataset import SPLITS, FederatedDataset
from fedgmm.data.encoders import Encoder, check_images, device_of, encoded
from fedgmm.data.federated import ClientRows
from fedgmm.files import write_atomically
from fedgmm.support.checks import check_flag, check_integer
from fedgmm.wording import counted

Images = NDArray[np.uint8]
Features = NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Called with the number of images encoded so far and the number of all images."""


# ---------------------------------------------------------------------- encoding with a cache


def encode_images(images: Tensor, encoder: Encoder, cache: str | Path | None = None) -> Tensor:
    """Return rows ``(n, d)`` of images ``(n, channels, height, width)``, from the cache if they are there.

    The cache is a folder with one file per collection of images (a client's), in any order.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load, save

    images = check_images(images)
    digests = [hashlib.sha256(image).digest() for image in images.cpu().numpy()]
    # Distinct images in one order: the same batches and so the same bits in every call.
    distinct = sorted(set(digests))
    first_row = {digest: row for row, digest in reversed(list(enumerate(digests)))}
    ordered = images[[first_row[digest] for digest in distinct]]
    rows: Tensor | None = None
    if cache is not None:
        facts = f"1 {encoder.name} {tuple(images.shape[1:])} ".encode()
        key = hashlib.sha256(facts + b"".join(distinct)).hexdigest()
        file = Path(cache) / f"{key}.safetensors"
        with contextlib.suppress(OSError, SafetensorError, KeyError):  # missing or damaged
            held = load(file.read_bytes())
            codes, checksum = held["codes"], held["sha256"].tobytes()
            fits = codes.dtype == np.float32 and codes.ndim == 2 and len(codes) == len(distinct)
            if fits and checksum == hashlib.sha256(codes.data).digest():
                rows = torch.from_numpy(codes).to(device_of(encoder))
    if rows is None:
        rows = encoded(ordered, encoder)
        if cache is not None:
            codes = np.ascontiguousarray(rows.cpu().numpy())
            digest = np.frombuffer(hashlib.sha256(codes.data).digest(), dtype=np.uint8)
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(file, save({"codes": codes, "sha256": digest}), shared=True)
            except OSError as error:  # only time is lost
                warnings.warn(
                    f"The encoded images could not be kept in {file.parent} ({error}); they will be "
                    "encoded again next time.",
                    stacklevel=2,
                )
    place = {digest: row for row, digest in enumerate(distinct)}
    return rows[[place[digest] for digest in digests]]


# ---------------------------------------------------------------------- federated PCA


def federated_pca(clients: Sequence[Tensor], components: int) -> PCA:
    """Return the principal components of the clients' pooled rows ``(n_c, d)``, from sums alone."""
    # First the common mean, Σ_c Σ_i x / Σ_c n_c, then the moments around it.
    count = max(1, sum(len(rows) for rows in clients))
    centre = reduce(add, (rows.sum(0, dtype=torch.float64) for rows in clients)) / count
    return fit_pca(reduce(add, (moments_of(rows, centre) for rows in clients)), components)


@dataclass(frozen=True)
class FeatureMap:
    """The map from images to features, made by :func:`encode_federation`, which explains its settings."""

    encoder: Encoder
    pca: PCA
    whiten: bool = False
    scale: bool = False
    cache: Path | None = None

    def __call__(self, images: Images) -> Features:
        """Return features ``(n, k)`` of images ``(n, channels, height, width)``."""
        rows = encode_images(torch.from_numpy(np.asarray(images)), self.encoder, self.cache)
        return self.project(rows).cpu().numpy()

    def project(self, rows: Tensor) -> Tensor:
        """Return features ``(n, k)`` of encoded images ``(n, d)``, on the same device."""
        features = self.pca.apply(rows, whiten=self.whiten)
        largest = float(self.pca.variances[0].sqrt())
        if self.scale and not self.whiten and largest > 0:
            features = features / largest
        return features.float()

    def attach(
        self, dataset: FederatedDataset, progress: Progress | None = None
    ) -> FederatedDataset:
        """Return a data set of images with the features of this map, which stays the same.

        So the clients may be new ones.
        """
        rows = encode_splits(dataset, self.encoder, self.cache, progress)
        return with_features(dataset, *(self.project(rows[name]) for name in SPLITS))


@dataclass(frozen=True)
class EncodedFederation:
    """Images for the learners with features for the Gaussians, and the map that made them."""

    dataset: FederatedDataset
    feature_map: FeatureMap


def encode_federation(
    dataset: FederatedDataset,
    encoder: Encoder,
    *,
    components: int = 48,
    whiten: bool = False,
    scale: bool = False,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> EncodedFederation:
    """Encode every client's images and fit federated PCA on the training rows.

    Args:
        dataset: inputs are images, uint8 ``(N, channels, height, width)``.
        encoder: see :func:`encoder`.
        components: number of features, ``k``.
        whiten: give every feature variance one.
        scale: divide all features by the deviation of the first, so that distances keep their
            proportions and ``reg_covar`` is relative to the largest variance.
        cache: a folder for encoded images; ``None`` means no cache.
        progress: called after every client.
    """
    check_integer("components", components, 1)
    check_flag("whiten", whiten)
    check_flag("scale", scale)
    folder = None if cache is None else Path(cache)
    rows = encode_splits(dataset, encoder, folder, progress)
    sizes: list[int] = dataset.train.features.rows_per_client.tolist()
    pca = federated_pca(torch.split(rows["train"], sizes), components)
    feature_map = FeatureMap(encoder, pca, whiten, scale, folder)
    features = [feature_map.project(rows[name]) for name in SPLITS]
    return EncodedFederation(with_features(dataset, *features), feature_map)


def encode_splits(
    dataset: FederatedDataset, encoder: Encoder, cache: Path | None, progress: Progress | None
) -> dict[str, Tensor]:
    """Return the encoded images of each split, ``(N, d)``, on the encoder's device.

    The images of a client are encoded together, because the cache has one file per client. Without a
    cache and without ``progress``, all images are encoded at once, which is faster on an accelerator.
    """
    splits = [dataset.split(name) for name in SPLITS]
    if cache is None and progress is None:
        rows = encoded(check_images(torch.cat([one.inputs for one in splits])), encoder)
        pieces = torch.split(rows, [len(one) for one in splits])
        return dict(zip(SPLITS, pieces, strict=True))
    total, done = sum(len(one) for one in splits), 0
    own_images = [torch.split(one.inputs, one.features.rows_per_client.tolist()) for one in splits]
    parts: list[list[Tensor]] = [[], [], []]
    for own in zip(*own_images, strict=True):
        sizes = [len(images) for images in own]
        if not sum(sizes):
            continue
        rows = encode_images(torch.cat(own), encoder, cache)
        for part, piece in zip(parts, torch.split(rows, sizes), strict=True):
            part.append(piece)
        done += len(rows)
        if progress is not None:
            progress(done, total)
    return {name: torch.cat(part) for name, part in zip(SPLITS, parts, strict=True)}


def with_features(
    dataset: FederatedDataset, train: Tensor, validation: Tensor, test: Tensor
) -> FederatedDataset:
    """Return the same data set with other features ``(N, k)`` of each split, in the order of its rows."""
    changed = {}
    for name, features in zip(SPLITS, (train, validation, test), strict=True):
        rows = dataset.split(name)
        if features.ndim != 2 or len(features) != len(rows):
            raise ValueError(
                f"The features of split {name!r} must be a matrix with "
                f"{counted(len(rows), 'row')}, got shape {tuple(features.shape)}."
            )
        if features.shape[1] != train.shape[1]:
            raise ValueError(
                f"The features of split {name!r} have {counted(features.shape[1], 'column')}, "
                f"but those of the training rows have {train.shape[1]}."
            )
        if not bool(torch.isfinite(features).all()):
            raise ValueError(f"The features of split {name!r} contain NaN or infinity.")
        seen = ClientRows(
            (features.contiguous().to(rows.device),), rows.codes, rows.names, rows.weights
        )
        changed[name] = replace(rows, features=seen, features_are_inputs=False)
    return replace(dataset, **changed)  # type: ignore[arg-type]
