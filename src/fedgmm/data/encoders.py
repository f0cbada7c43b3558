"""Frozen encoders: each image or text becomes a row of numbers.

An encoder is any object with a ``name``, which identifies its weights and preprocessing, and a method
``encode``. Nothing is downloaded unless ``download=True``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fedgmm.nets.backbones import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    ResNet18,
    WeightsError,
    load_weights,
    weights_file,
)
from fedgmm.nets.devices import resolve_device
from fedgmm.support.checks import check_choice, check_integer
from fedgmm.wording import counted

ENCODERS = ("resnet18", "pixels")
"""Encoders of images that need no further package."""

TIMM, SENTENCES, WORDLLAMA = "timm:", "sentence-transformers:", "wordllama"
PRECISIONS = ("float32", "bfloat16")


class Encoder(Protocol):
    """An encoder turns each image into a row of numbers, independently of the other images.

    An encoder of texts has the attribute ``reads = "texts"`` and takes a list of texts. An encoder on
    an accelerator has an attribute ``device``.
    """

    @property
    def name(self) -> str:
        """A text that identifies the numbers, weights included; part of the key of the cache."""
        ...

    def encode(self, images: Tensor) -> Tensor:
        """Return rows ``(n, d)`` float32 of images ``(n, channels, height, width)`` uint8."""
        ...


def device_of(encoder: Encoder) -> torch.device:
    """Return the device of an encoder's rows."""
    return torch.device(getattr(encoder, "device", "cpu"))


def reads_texts(encoder: Any) -> bool:
    """Return whether an encoder takes texts and not images."""
    return getattr(encoder, "reads", "images") == "texts"


def encoded(items: Any, encoder: Any) -> Tensor:
    """Encode images or texts and check the result, because users may bring their own encoders."""
    rows = torch.as_tensor(encoder.encode(items))
    what = "text" if reads_texts(encoder) else "image"
    if rows.ndim != 2 or len(rows) != len(items):
        raise ValueError(
            f"Encoder {encoder.name!r} must give one row for each of "
            f"{counted(len(items), what)}, got shape {tuple(rows.shape)}."
        )
    if not bool(torch.isfinite(rows).all()):
        raise ValueError(f"Encoder {encoder.name!r} gave NaN or infinity.")
    return rows.float()


def check_images(images: Tensor) -> Tensor:
    """Return the images after a check that they are bytes ``(n, channels, height, width)``."""
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(
            "Encoders read images as bytes (uint8) of shape (n, channels, height, width), got "
            f"{str(images.dtype).removeprefix('torch.')} of shape {tuple(images.shape)}."
        )
    return images.contiguous()


def encoder(
    name: str,
    data_dir: str | Path | None = None,
    *,
    weights: str | Path | None = None,
    size: int | None = None,
    device: str = "auto",
    dtype: str = "float32",
    download: bool = False,
) -> Any:
    """Return an encoder by its name.

    Args:
        name: ``"resnet18"`` (needs a file of weights), ``"pixels"``, ``"timm:NAME"``, ``"wordllama"`` or
            ``"sentence-transformers:NAME_OR_FOLDER"``.
        data_dir: the folder with ``weights/resnet18_imagenet.safetensors``; ``None`` takes the environment
            variable ``FEDGMM_DATA``.
        weights: the file of weights itself, for ``"resnet18"`` and ``"timm:NAME"``.
        size: side in pixels of the images that a network sees; ``None`` is 224, or what timm's network
            was trained with.
        device: the device of the network.
        dtype: ``"float32"`` or ``"bfloat16"``, see :class:`NetworkEncoder`.
        download: allow timm and sentence-transformers to download weights.

    Raises:
        WeightsError: weights that are missing or do not fit.
        ImportError: a package that is not installed.
    """
    if name == WORDLLAMA:
        return WordLlamaEncoder()
    if name.startswith(SENTENCES):
        return SentenceEncoder(name.removeprefix(SENTENCES), device, download)
    if name.startswith(TIMM):
        return timm_encoder(name.removeprefix(TIMM), weights, size, device, dtype, download)
    if name not in ENCODERS:
        known = ", ".join((*ENCODERS, f"{TIMM}NAME", WORDLLAMA, f"{SENTENCES}NAME"))
        raise ValueError(f"Unknown encoder {name!r}; use one of {known}.")
    if name == "pixels":
        return PixelEncoder(size)
    folder = data_dir or os.environ.get("FEDGMM_DATA")
    if not folder and weights is None:
        raise WeightsError(
            "Encoder 'resnet18' needs pretrained weights; name a safetensors file with torchvision's "
            f"names (weights), set FEDGMM_DATA or give data_dir, with the file "
            f"{weights_file(name, Path('FOLDER'))}, or use encoder 'pixels', which needs none."
        )
    try:
        file = weights or weights_file(name, Path(folder or "."))
        return ResNet18Encoder(file, size=size or 224, device=device, dtype=dtype)
    except WeightsError as error:
        reason = str(error).removesuffix(".")
        raise WeightsError(f"{reason}, or use encoder 'pixels', which needs none.") from None


# ---------------------------------------------------------------------- images


class PixelEncoder:
    """The pixels themselves, flattened and scaled to [0, 1]; needs no weights.

    Args:
        size: side in pixels to which files of images are resized; images in arrays keep their size.
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = size or 16
        self.name = "pixels" if size is None else f"pixels {size}px"

    def encode(self, images: Tensor) -> Tensor:
        """Return rows ``(n, channels · height · width)``."""
        return check_images(images).cpu().flatten(1).float() / 255


class NetworkEncoder:
    """A frozen network whose output for an image is its row.

    Args:
        network: maps ``(n, 3, size, size)`` to ``(n, d)``.
        name: identifies architecture and weights; size and precision are added to it.
        size: images are resized to ``size × size`` pixels, bilinearly.
        mean: of red, green and blue in [0, 1] that the network expects.
        deviation: of the same.
        device: ``"cpu"``, ``"cuda"``, ``"auto"``.
        batch_size: number of images that pass through the network together; ``None`` means 64 on a CPU,
            whose caches hold no more, and 512 on an accelerator.
        dtype: ``"float32"``, or ``"bfloat16"`` for convolutions in half precision, which are faster on
            accelerators and accurate to about two digits.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        name: str,
        *,
        size: int = 224,
        mean: Sequence[float] = IMAGENET_MEAN,
        deviation: Sequence[float] = IMAGENET_DEVIATION,
        device: str = "auto",
        batch_size: int | None = None,
        dtype: str = "float32",
    ) -> None:
        check_integer("size", size, 1)
        check_choice("dtype", dtype, PRECISIONS)
        self.size, self.dtype, self.device = size, dtype, resolve_device(device)
        if batch_size is None:
            batch_size = 64 if self.device.type == "cpu" else 512
        check_integer("batch_size", batch_size, 1)
        self.batch_size = batch_size
        kind, _, rest = name.partition(" ")
        self.name = f"{kind} {size}px {dtype} {rest}"
        self._mean, self._deviation = tuple(mean), tuple(deviation)
        self._network = network.eval().requires_grad_(False)
        self._network.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def encode(self, images: Tensor) -> Tensor:
        """Return rows ``(n, d)`` on the encoder's device; a grey image is three equal channels."""
        images = check_images(images)
        if images.shape[1] not in (1, 3):
            raise ValueError(
                f"{self.name.split()[0]} reads images with 1 or 3 channels, got {images.shape[1]} "
                f"(images of shape {tuple(images.shape[1:])})."
            )
        half = self.dtype == "bfloat16"
        # full float32, which CUDA does not use by default
        exact = self.device.type == "cuda" and not half
        with (
            torch.inference_mode(),
            torch.backends.cudnn.flags(allow_tf32=False) if exact else nullcontext(),
            torch.autocast(self.device.type, torch.bfloat16, enabled=half),
        ):
            rows = [
                self._network(self._prepared(batch)).float()
                for batch in torch.split(images, self.batch_size)
            ]
        return torch.cat(rows)

    def _prepared(self, batch: Tensor) -> Tensor:
        """Return bytes ``(n, 1 or 3, height, width)`` scaled as in the network's training."""
        x = batch.to(self.device).float() / 255
        if x.shape[2:] != (self.size, self.size):
            shrinks = min(x.shape[2:]) > self.size
            x = torch.nn.functional.interpolate(
                x, (self.size, self.size), mode="bilinear", antialias=shrinks
            )
        mean = x.new_tensor(self._mean)[:, None, None]
        deviation = x.new_tensor(self._deviation)[:, None, None]
        return ((x - mean) / deviation).contiguous(memory_format=torch.channels_last)


class ResNet18Encoder(NetworkEncoder):
    """The 512 features of a frozen ImageNet ResNet-18 before its classifier.

    Args:
        weights: a safetensors file with torchvision's names. It is required, because random weights
            say little about images.
        **settings: size, device, batch size and precision, see :class:`NetworkEncoder`.
    """

    def __init__(self, weights: str | Path | None, **settings: Any) -> None:
        if weights is None:
            raise WeightsError(
                "ResNet18Encoder needs a file of pretrained weights, because random weights say little "
                "about images; give weights=FILE or use PixelEncoder."
            )
        network = ResNet18(classes=None)
        super().__init__(network, f"resnet18 {load_weights(network, weights)}", **settings)


def timm_encoder(
    name: str, weights: str | Path | None, size: int | None, device: str, dtype: str, download: bool
) -> NetworkEncoder:
    """Return a network of the package timm without its classifier."""
    timm: Any = _package("timm", f"{TIMM}{name}", "vision")
    if weights is None and not download:
        raise WeightsError(
            f"Encoder '{TIMM}{name}' needs weights; name a file (weights) or allow the download."
        )
    try:
        network = timm.create_model(
            name, pretrained=weights is None, num_classes=0, checkpoint_path=str(weights or "")
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise WeightsError(f"Encoder '{TIMM}{name}' cannot be loaded ({reason}).") from None
    facts = timm.data.resolve_model_data_config(network)
    size = size or int(facts["input_size"][-1])
    colours = {"mean": facts["mean"], "deviation": facts["std"]}
    full_name = f"{TIMM}{name} {_digest(network)}"
    return NetworkEncoder(network, full_name, size=size, **colours, device=device, dtype=dtype)


# ---------------------------------------------------------------------- texts


class WordLlamaEncoder:
    """Averages of word vectors, 256 numbers per text, scaled to length one; fast on a CPU.

    The weights come with the package wordllama, so nothing is downloaded.
    """

    reads = "texts"

    def __init__(self) -> None:
        package: Any = _package("wordllama", WORDLLAMA, "text")
        home = Path(package.__file__).parent
        self._model = package.WordLlama.load(cache_dir=home, disable_download=True)
        numbers = torch.from_numpy(self._model.embedding)
        self.name = f"{WORDLLAMA} {numbers.shape[1]} {_hash_of([numbers])}"

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return rows ``(n, 256)``."""
        return torch.from_numpy(self._model.embed(list(texts), norm=True))


class SentenceEncoder:
    """A model of the package sentence-transformers.

    Args:
        model: a folder, or a name that is in the local cache.
        device: ``"cpu"``, ``"cuda"``, ``"auto"``.
        download: allow the download of a model that is not there.
    """

    reads = "texts"

    def __init__(self, model: str, device: str = "auto", download: bool = False) -> None:
        package: Any = _package("sentence_transformers", f"{SENTENCES}{model}", "text")
        try:
            self._model = package.SentenceTransformer(
                model, device=str(resolve_device(device)), local_files_only=not download
            )
        except OSError as error:
            reason = str(error).splitlines()[0]
            raise WeightsError(
                f"Encoder '{SENTENCES}{model}' cannot be loaded ({reason}); name a folder or allow the "
                "download."
            ) from None
        self.name = f"{SENTENCES}{Path(model).name} {_digest(self._model)}"

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return rows ``(n, d)``."""
        rows = self._model.encode(list(texts), convert_to_tensor=True, show_progress_bar=False)
        return torch.as_tensor(rows).cpu()


def _package(module: str, encoder: str, extra: str) -> Any:
    """Import a package that not every installation has."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(
            f"Encoder {encoder!r} needs the package {module.replace('_', '-')}; install it with "
            f"pip install 'fedgmm[{extra}]'."
        ) from None


def _digest(network: torch.nn.Module) -> str:
    """Return a hash of all weights of a network."""
    return _hash_of([value for _, value in sorted(network.state_dict().items())])


def _hash_of(arrays: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(array.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
