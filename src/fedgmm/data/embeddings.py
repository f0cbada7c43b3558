"""What the Gaussians see of an image: a frozen encoder, then federated PCA.

::

    encoded = encode_federation(dataset, encoder("resnet18", data_dir), cache=folder)
    model = train(encoded.dataset, ...)
    unseen = encoded.feature_map.attach(unseen_clients)

Every client encodes its own images, once. The principal components come from sums over the clients'
training rows, and from nothing else.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.core.checks import check_choice, check_flag, check_integer
from fedgmm.core.pca import PCA, fit_pca, moments_of
from fedgmm.data.dataset import SPLITS, FederatedDataset, LabelledRows
from fedgmm.data.federated import ClientRows
from fedgmm.files import write_atomically
from fedgmm.nets.backbones import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    ResNet18,
    WeightsError,
    load_weights,
    weights_file,
)
from fedgmm.nets.devices import resolve_device
from fedgmm.wording import counted

Images = NDArray[np.uint8]
Features = NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Called with the number of images that are encoded and the number of all."""

ENCODERS = ("resnet18", "pixels")
PRECISIONS = ("float32", "bfloat16")


class Encoder(Protocol):
    """Anything that turns an image into a row of numbers, each image by itself."""

    @property
    def name(self) -> str:
        """Says all that decides the numbers, weights included; it is part of the cache's key."""
        ...

    def encode(self, images: Images) -> Features:
        """Rows ``(n, d)`` float32 of images ``(n, channels, height, width)`` uint8."""
        ...


# ---------------------------------------------------------------------- encoders


class PixelEncoder:
    """The pixels themselves, flattened and scaled to [0, 1]; needs no weights."""

    name = "pixels"

    def encode(self, images: Images) -> Features:
        """Rows ``(n, channels · height · width)``."""
        flat = _checked(images).reshape(len(images), -1)
        return np.divide(flat, np.float32(255), dtype=np.float32)


class ResNet18Encoder:
    """The 512 numbers that a frozen ImageNet ResNet-18 has for an image before its classifier.

    Args:
        weights: a safetensors file with torchvision's names; there is no default, and never a
            network with random weights.
        size: images are resized to ``size × size`` pixels, bilinearly.
        device: ``"cpu"``, ``"cuda"``, ``"auto"``.
        batch_size: images that pass through the network together.
        dtype: ``"float32"``, or ``"bfloat16"`` for convolutions in half precision, which is faster on
            accelerators and good to about two digits.
    """

    def __init__(
        self,
        weights: str | Path | None,
        *,
        size: int = 224,
        device: str = "auto",
        batch_size: int = 512,
        dtype: str = "float32",
    ) -> None:
        check_integer("size", size, 1)
        check_integer("batch_size", batch_size, 1)
        check_choice("dtype", dtype, PRECISIONS)
        if weights is None:
            raise WeightsError(
                "ResNet18Encoder needs a file of pretrained weights, since random ones say little "
                "about images; give weights=FILE or use PixelEncoder."
            )
        self.size, self.batch_size, self.dtype = size, batch_size, dtype
        self.device = resolve_device(device)
        network = ResNet18(classes=None)
        loaded = load_weights(network, weights)
        self.name = f"resnet18 {size}px {dtype} {loaded.sha256}"
        self._network = network.eval().requires_grad_(False)
        self._network.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def encode(self, images: Images) -> Features:
        """Rows ``(n, 512)``; grey images count as three equal channels."""
        images = _checked(images)
        if images.shape[1] not in (1, 3):
            raise ValueError(
                f"ResNet-18 reads images with 1 or 3 channels, got {images.shape[1]} "
                f"(images of shape {images.shape[1:]})."
            )
        out = np.empty((len(images), self._network.feature_size), dtype=np.float32)
        with torch.inference_mode(), self._precision():
            for start in range(0, len(images), self.batch_size):
                batch = torch.from_numpy(images[start : start + self.batch_size])
                rows = self._network(self._prepared(batch))
                out[start : start + self.batch_size] = rows.float().cpu().numpy()
        return out

    def _prepared(self, batch: Tensor) -> Tensor:
        """Bytes ``(n, 1 or 3, height, width)`` as the network was trained to see them."""
        x = batch.to(self.device).float() / 255
        if x.shape[2:] != (self.size, self.size):
            shrinks = min(x.shape[2:]) > self.size
            x = torch.nn.functional.interpolate(
                x, (self.size, self.size), mode="bilinear", antialias=shrinks
            )
        mean = x.new_tensor(IMAGENET_MEAN)[:, None, None]
        deviation = x.new_tensor(IMAGENET_DEVIATION)[:, None, None]
        return ((x - mean) / deviation).contiguous(memory_format=torch.channels_last)

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """Half precision if it was asked for; else all of float32, which CUDA's default is not."""
        half = self.dtype == "bfloat16"
        exact = (
            torch.backends.cudnn.flags(allow_tf32=False)
            if self.device.type == "cuda" and not half
            else nullcontext()
        )
        with exact, torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            yield


def encoder(
    name: str,
    data_dir: str | Path | None = None,
    *,
    size: int = 224,
    device: str = "auto",
    dtype: str = "float32",
) -> Encoder:
    """An encoder by its name.

    Args:
        name: ``"resnet18"`` (its weights must be in the data folder) or ``"pixels"``.
        data_dir: the data folder; ``None`` takes the environment variable ``FEDGMM_DATA``.
        size: pixels a side that ResNet-18 sees.
        device: where it runs.
        dtype: ``"float32"`` or ``"bfloat16"``, see :class:`ResNet18Encoder`.

    Raises:
        WeightsError: the weights are not there, or do not fit.
    """
    check_choice("encoder", name, ENCODERS)
    if name == "pixels":
        return PixelEncoder()
    folder = data_dir or os.environ.get("FEDGMM_DATA")
    if not folder:
        raise WeightsError(
            "Encoder 'resnet18' needs pretrained weights, and no data folder is set; set FEDGMM_DATA "
            f"or give data_dir, with the file {weights_file(name, Path('FOLDER'))}, or use "
            "encoder 'pixels', which needs none."
        )
    try:
        return ResNet18Encoder(
            weights_file(name, Path(folder)), size=size, device=device, dtype=dtype
        )
    except WeightsError as error:
        reason = str(error).removesuffix(".")
        raise WeightsError(f"{reason}, or use encoder 'pixels', which needs none.") from None


def _checked(images: NDArray[Any]) -> Images:
    """The images, if they are bytes ``(n, channels, height, width)``."""
    if images.dtype != np.uint8 or images.ndim != 4:
        raise ValueError(
            "Encoders read images as bytes (uint8) of shape (n, channels, height, width), got "
            f"{images.dtype} of shape {images.shape}."
        )
    return np.ascontiguousarray(images)


# ---------------------------------------------------------------------- encoding with a cache


def encode_images(images: Images, encoder: Encoder, cache: str | Path | None = None) -> Features:
    """Rows ``(n, d)`` of images ``(n, channels, height, width)``, from the cache if they are there.

    The cache holds one file for one collection of images (a client's), in whatever order they come.

    Args:
        images: uint8.
        encoder: what encodes them.
        cache: a folder; ``None`` keeps nothing.
    """
    images = _checked(images)
    digests = [hashlib.sha256(image).digest() for image in images]
    # One order for a collection: the same batches, hence the same bits, and repeats only once.
    distinct = sorted(set(digests))
    place = {digest: k for k, digest in enumerate(distinct)}
    first_seen: dict[bytes, int] = {}
    for row, digest in enumerate(digests):
        first_seen.setdefault(digest, row)
    ordered = [first_seen[digest] for digest in distinct]

    file: Path | None = None
    codes: Features | None = None
    if cache is not None:
        facts = f"1 {encoder.name} {images.shape[1:]} ".encode()
        key = hashlib.sha256(facts + b"".join(distinct)).hexdigest()
        file = Path(cache) / f"{key}.safetensors"
        codes = _read_codes(file, len(distinct))
    if codes is None:
        codes = _encoded(images[ordered], encoder)
        if file is not None:
            _write_codes(file, codes)
    rows: Features = codes[[place[digest] for digest in digests]]
    return rows


def _encoded(images: Images, encoder: Encoder) -> Features:
    """What the encoder says, checked: it may be anybody's."""
    codes = np.asarray(encoder.encode(images))
    if codes.ndim != 2 or len(codes) != len(images):
        raise ValueError(
            f"Encoder {encoder.name!r} must give one row for each of "
            f"{counted(len(images), 'image')}, got an array of shape {codes.shape}."
        )
    if not np.isfinite(codes).all():
        raise ValueError(f"Encoder {encoder.name!r} gave NaN or infinity.")
    return codes.astype(np.float32, copy=False)


def _read_codes(file: Path, rows: int) -> Features | None:
    """Cached rows ``(rows, d)``, or ``None`` where there are none that can be trusted."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        held = load(file.read_bytes())
        codes, checksum = held["codes"], held["sha256"]
    except (OSError, SafetensorError, KeyError):
        return None
    whole = codes.dtype == np.float32 and codes.ndim == 2 and len(codes) == rows
    return codes if whole and checksum.tobytes() == hashlib.sha256(codes.data).digest() else None


def _write_codes(file: Path, codes: Features) -> None:
    """Keep rows for the next time; a cache that cannot be written costs only time."""
    from safetensors.numpy import save

    codes = np.ascontiguousarray(codes)
    checksum = np.frombuffer(hashlib.sha256(codes.data).digest(), dtype=np.uint8)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, save({"codes": codes, "sha256": checksum}), shared=True)
    except OSError as error:
        warnings.warn(
            f"The encoded images could not be kept in {file.parent} ({error}); they will be encoded "
            "again next time.",
            stacklevel=3,
        )


# ---------------------------------------------------------------------- federated PCA


def federated_pca(clients: Sequence[Tensor], components: int) -> PCA:
    """Principal components of the clients' pooled rows, from sums over clients alone.

    Args:
        clients: the rows of each, ``(n_c, d)``; some may have none.
        components: ``k``.
    """
    # First the common mean, Σ_c Σ_i x / Σ_c n_c, then the moments around it.
    count = max(1, sum(len(rows) for rows in clients))
    centre = reduce(add, (rows.sum(0, dtype=torch.float64) for rows in clients)) / count
    return fit_pca(reduce(add, (moments_of(rows, centre) for rows in clients)), components)


@dataclass(frozen=True)
class FeatureMap:
    """From images to what the Gaussians see; made by :func:`encode_federation`.

    Attributes:
        encoder: the first step.
        pca: the second.
        whiten: every feature has variance one over the training rows.
        scale: all features are divided by one number, so that the first has variance one.
        cache: the folder of encoded images, or ``None``.
    """

    encoder: Encoder
    pca: PCA
    whiten: bool = False
    scale: bool = False
    cache: Path | None = None

    def __call__(self, images: Images) -> Features:
        """Features ``(n, k)`` of images ``(n, channels, height, width)``."""
        return self.project(encode_images(images, self.encoder, self.cache))

    def project(self, codes: Features) -> Features:
        """Features ``(n, k)`` of encoded images ``(n, d)``."""
        features = self.pca.apply(torch.from_numpy(codes), whiten=self.whiten)
        largest = float(self.pca.variances[0].sqrt())
        if self.scale and not self.whiten and largest > 0:
            features = features / largest
        return features.float().numpy()

    def attach(
        self, dataset: FederatedDataset, progress: Progress | None = None
    ) -> FederatedDataset:
        """A data set of images, perhaps of clients that were not here before, with these features."""
        codes = encode_splits(dataset, self.encoder, self.cache, progress)
        return with_features(dataset, *(self.project(codes[name]) for name in SPLITS))


@dataclass(frozen=True)
class EncodedFederation:
    """A data set with features for the Gaussians, and how they were made.

    Attributes:
        dataset: the images for the learners, the features for the Gaussians.
        feature_map: gives the features of further images.
    """

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
        components: features that are kept, ``k``.
        whiten: give every feature variance one.
        scale: divide all features by the deviation of the first: distances keep their proportions and
            ``reg_covar`` counts in shares of the largest variance.
        cache: a folder for encoded images; ``None`` keeps nothing.
        progress: called after every client.
    """
    check_integer("components", components, 1)
    check_flag("whiten", whiten)
    check_flag("scale", scale)
    folder = None if cache is None else Path(cache)
    codes = encode_splits(dataset, encoder, folder, progress)
    training = torch.from_numpy(codes["train"]).to(getattr(encoder, "device", "cpu"))
    pca = federated_pca(torch.split(training, _rows_of_clients(dataset.train)), components)
    feature_map = FeatureMap(encoder, pca, whiten, scale, folder)
    features = [feature_map.project(codes[name]) for name in SPLITS]
    return EncodedFederation(with_features(dataset, *features), feature_map)


def _rows_of_clients(rows: LabelledRows) -> list[int]:
    counts: list[int] = rows.features.rows_per_client.tolist()
    return counts


def encode_splits(
    dataset: FederatedDataset, encoder: Encoder, cache: Path | None, progress: Progress | None
) -> dict[str, Features]:
    """The encoded images of each split ``(N, d)``: every client's in one go, as the cache keeps them.

    Without a cache and without ``progress`` all are encoded in one go, which is faster on an accelerator.

    Args:
        dataset: inputs are images, uint8 ``(N, channels, height, width)``.
        encoder: see :func:`encoder`.
        cache: a folder for encoded images; ``None`` keeps nothing.
        progress: called after every client.
    """
    splits = [dataset.split(name) for name in SPLITS]
    if cache is None and progress is None:
        images = np.concatenate([rows.inputs.cpu().numpy() for rows in splits])
        edges = np.cumsum([len(rows) for rows in splits])[:-1]
        pieces = np.split(_encoded(_checked(images), encoder), edges)
        return dict(zip(SPLITS, pieces, strict=True))
    total, done = sum(len(rows) for rows in splits), 0
    offsets = [rows.offsets.tolist() for rows in splits]
    parts: list[list[Features]] = [[], [], []]
    for client in range(len(dataset.names)):
        own = [
            rows.inputs[start[client] : start[client + 1]].cpu().numpy()
            for rows, start in zip(splits, offsets, strict=True)
        ]
        edges = np.cumsum([len(images) for images in own])
        if not edges[-1]:
            continue
        codes = encode_images(np.concatenate(own), encoder, cache)
        for part, piece in zip(parts, np.split(codes, edges[:-1]), strict=True):
            part.append(piece)
        done += int(edges[-1])
        if progress is not None:
            progress(done, total)
    return {name: np.concatenate(part) for name, part in zip(SPLITS, parts, strict=True)}


def with_features(
    dataset: FederatedDataset, train: Features, validation: Features, test: Features
) -> FederatedDataset:
    """The same data set with other features for the Gaussians.

    Args:
        dataset: as it is.
        train: features ``(N, k)`` of the training rows, in their order.
        validation: the same of the validation rows.
        test: the same of the test rows.
    """
    changed = {}
    for name, features in zip(SPLITS, (train, validation, test), strict=True):
        rows = dataset.split(name)
        if features.ndim != 2 or len(features) != len(rows):
            raise ValueError(
                f"The features of split {name!r} must be a matrix with "
                f"{counted(len(rows), 'row')}, got shape {features.shape}."
            )
        if features.shape[1] != train.shape[1]:
            raise ValueError(
                f"The features of split {name!r} have {counted(features.shape[1], 'column')}, "
                f"but those of the training rows have {train.shape[1]}."
            )
        if not np.isfinite(features).all():
            raise ValueError(f"The features of split {name!r} contain NaN or infinity.")
        seen = torch.from_numpy(np.ascontiguousarray(features)).to(rows.device)
        changed[name] = replace(
            rows, features=ClientRows((seen,), rows.codes, rows.names), features_are_inputs=False
        )
    return replace(dataset, **changed)  # type: ignore[arg-type]
