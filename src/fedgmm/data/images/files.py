"""MNIST, CIFAR-10, CIFAR-100 and FEMNIST from their standard files, without pickle.

=========  ======================================================================  ================
name       files in the data folder                                                255 is
=========  ======================================================================  ================
mnist      ``MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte``, or ``.gz``  ink
cifar10    ``cifar-10-batches-bin/{data_batch_1 … data_batch_5, test_batch}.bin``  white
cifar100   ``cifar-100-binary/{train,test}.bin`` and the names of the labels       white
femnist    ``femnist/*.npz``, or LEAF's JSON files under ``femnist``               background
=========  ======================================================================  ================

Training and test files are pooled, as in the paper, because each client splits its own rows. Missing files
can be downloaded from their official servers, with checksums.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import operator
import os
import tarfile
import urllib.request
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedgmm.files import write_atomically
from fedgmm.support.checks import check_choice
from fedgmm.wording import counted, first_few

ImageName = Literal["mnist", "cifar10", "cifar100", "femnist"]
IMAGE_NAMES: tuple[str, ...] = get_args(ImageName)
DATA_VARIABLE = "FEDGMM_DATA"
"""The environment variable that names the data folder."""

WHITE = 255
"""Largest value of a byte; inversion subtracts from it."""

Progress = Callable[[str, int, int], None]
"""Called with a file's name, the number of bytes received so far, and the number of all bytes."""

ByteArray = NDArray[np.uint8]
IntArray = NDArray[np.int64]

DIGITS = tuple("0123456789")
CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
FEMNIST_CLASSES = (*DIGITS, *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"abcdefghijklmnopqrstuvwxyz")

_MNIST_ROWS = {"train": 60_000, "t10k": 10_000}
_CIFAR10_ROWS = {**{f"data_batch_{i}.bin": 10_000 for i in range(1, 6)}, "test_batch.bin": 10_000}
_CIFAR100_ROWS = {"train.bin": 50_000, "test.bin": 10_000}
_GREY_SIDE, _COLOUR_SIDE = 28, 32
_MOST_BLANK = 0.01  # largest share of blank images, because a writer may leave a field empty
_IDX_IMAGES, _IDX_LABELS = 0x803, 0x801  # bytes in three dimensions, bytes in one

_BLOCK_BYTES = 1024 * 1024  # of a download
_TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Source:
    """A file on an official server: its size in bytes and its checksum.

    Attributes:
        folder: where to put it, relative to the data folder.
        members: files to extract from a tar archive; empty keeps the file itself.
    """

    url: str
    size: int
    sha256: str
    folder: str
    members: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.url.rpartition("/")[2]


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"  # the author's page no longer has them
_CIFAR = "https://www.cs.toronto.edu/~kriz/"

_MNIST_FILES = (
    ("train-images", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    ("train-labels", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    ("t10k-images", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    ("t10k-labels", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)

SOURCES: dict[str, tuple[Source, ...]] = {
    "mnist": tuple(
        Source(
            f"{_MNIST}{name}-idx{3 if 'images' in name else 1}-ubyte.gz",
            size,
            checksum,
            "MNIST/raw",
        )
        for name, size, checksum in _MNIST_FILES
    ),
    "cifar10": (
        Source(
            _CIFAR + "cifar-10-binary.tar.gz",
            170_052_171,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            "cifar-10-batches-bin",
            (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
        ),
    ),
    "cifar100": (
        Source(
            _CIFAR + "cifar-100-binary.tar.gz",
            168_513_733,
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            "cifar-100-binary",
            ("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt"),
        ),
    ),
}
"""The files of each data set. FEMNIST has no official file, because LEAF's script makes it."""

_FETCH = "load with download=True (--download on the command line)"
_HOW_TO_GET = {
    **{
        name: (
            f"unpack {sources[0].url} into the data folder, or {_FETCH}"
            if sources[0].members
            else f"get it from {sources[0].url.rpartition('/')[0]}/, or {_FETCH}"
        )
        for name, sources in SOURCES.items()
    },
    "femnist": (
        "make it with LEAF's data/femnist/preprocess.sh -s niid --sf 0.15 -k 0 -t sample "
        "(https://github.com/TalwalkarLab/leaf)"
    ),
}


class ImageFileError(ValueError):
    """A problem with the files of a data set; the message names the file and a remedy."""


class MissingFileError(ImageFileError):
    """A file that is not in the data folder."""


class DamagedFileError(ImageFileError):
    """A file that does not hold the data set."""


class DownloadError(ImageFileError):
    """A download that failed; the message names the file and a remedy."""


@dataclass(frozen=True, eq=False)
class ImageData:
    """All images of a data set, as bytes.

    Attributes:
        name: name of the data set.
        images: ``(N, channels, height, width)`` uint8, as in the files: MNIST is white ink on black
            (0), FEMNIST black ink on white (255).
        labels: classes, ``(N,)`` int64.
        class_names: ``(K,)``, in the order of the labels.
        coarse: superclasses, ``(N,)`` int64, or ``None``.
        writers: the writer of each image, an index into ``writer_names``, ``(N,)`` int64, or ``None``.
        writer_names: the writers, or ``None``.
    """

    name: str
    images: ByteArray
    labels: IntArray
    class_names: tuple[str, ...]
    coarse: IntArray | None = None
    writers: IntArray | None = None
    writer_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4 or not len(self.images):
            raise ValueError(
                f"images of {self.name} must be uint8 (N, channels, height, width), got "
                f"{self.images.dtype} {self.images.shape}."
            )
        if (self.writers is None) != (self.writer_names is None):
            raise ValueError(f"{self.name} needs both writers and writer_names, or neither.")
        for what, codes, kinds in (
            ("labels", self.labels, len(self.class_names)),
            ("coarse labels", self.coarse, math.inf),
            ("writers", self.writers, len(self.writer_names or ())),
        ):
            if codes is None:
                continue
            if codes.dtype != np.int64 or codes.shape != (len(self.images),):
                raise ValueError(
                    f"{what} of {self.name} must be int64 ({len(self.images)},), got {codes.dtype} "
                    f"{codes.shape}."
                )
            if codes.min() < 0 or codes.max() >= kinds:
                raise ValueError(
                    f"{what} of {self.name} must be at least 0 and below the number of names, {kinds}."
                )

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    @property
    def fingerprint(self) -> str:
        """A checksum of all images, labels and writers."""
        digest = hashlib.sha256(repr((self.class_names, self.writer_names)).encode())
        for array in (self.images, self.labels, self.coarse, self.writers):
            digest.update(b"none" if array is None else np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def __repr__(self) -> str:
        """Return a few lines with the number of images, their size and their classes."""
        shape = "×".join(map(str, self.images.shape[1:]))
        lines = [
            f"ImageData {self.name}: {counted(len(self), 'image')} of {shape} bytes",
            f"  classes  {len(self.class_names)}: {first_few(self.class_names, 10)}",
        ]
        if self.coarse is not None:
            lines.append(
                f"  coarse   {counted(len(np.unique(self.coarse)), 'superclass', 'superclasses')}"
            )
        if self.writer_names is not None:
            lines.append(f"  writers  {len(self.writer_names)}: {first_few(self.writer_names, 10)}")
        return "\n".join(lines)


def load_images(
    name: ImageName,
    data_dir: Path | str | None = None,
    *,
    download: bool = False,
    progress: Progress | None = None,
) -> ImageData:
    """Read a data set from its standard files.

    Args:
        name: ``"mnist"``, ``"cifar10"``, ``"cifar100"`` or ``"femnist"``.
        data_dir: the data folder; ``None`` means the one that ``FEDGMM_DATA`` names.
        download: download missing files from their official servers first.
        progress: called with a file's name, the bytes received so far, and all bytes.

    Raises:
        ImageFileError: no data folder, a failed download, or a missing or damaged file.
    """
    check_choice("name", name, IMAGE_NAMES)
    given = data_dir if data_dir is not None else os.environ.get(DATA_VARIABLE)
    if not given:
        raise ImageFileError(
            f"No data folder is set: pass data_dir (--data-dir on the command line), or set "
            f"{DATA_VARIABLE} to the folder that holds the data sets."
        )
    folder = Path(given).expanduser()
    if download and name in SOURCES:
        fetch_files(name, folder, progress)
    readers = {
        "mnist": _read_mnist,
        "cifar10": _read_cifar10,
        "cifar100": _read_cifar100,
        "femnist": _read_femnist,
    }
    try:
        return readers[name](folder)
    except (MissingFileError, DamagedFileError) as error:
        raise type(error)(f"{error} {_HOW_TO_GET[name]}.") from None


# ---------------------------------------------------------------------- downloads


def fetch_files(name: str, data_dir: Path, progress: Progress | None = None) -> None:
    """Download the files of a data set, a key of ``SOURCES``, that are missing in the data folder."""
    for source in SOURCES[name]:
        folder = data_dir / source.folder
        wanted = [folder / member for member in source.members or (source.name,)]
        plain = [path.with_name(path.name.removesuffix(".gz")) for path in wanted]
        if all(a.exists() or b.exists() for a, b in zip(wanted, plain, strict=True)):
            continue  # they are there, compressed or not
        folder.mkdir(parents=True, exist_ok=True)
        if source.members:
            archive = folder / source.name
            _fetch(source, archive, progress)
            with tarfile.open(archive) as tar:
                for member in tar:  # names alone, so that no path of the archive is used
                    own = Path(member.name).name
                    content = tar.extractfile(member) if own in source.members else None
                    if content is not None:
                        write_atomically(folder / own, content.read())
            archive.unlink()
        else:
            _fetch(source, folder / source.name, progress)


def _fetch(source: Source, path: Path, progress: Progress | None) -> None:
    """Download to a temporary name, check the file, and only then rename it."""
    draft = path.with_name(path.name + ".part")
    digest, received = hashlib.sha256(), 0
    try:
        with (
            urllib.request.urlopen(source.url, timeout=_TIMEOUT_SECONDS) as response,
            draft.open("wb") as file,
        ):
            # stop after the official size, so that a server cannot fill the disk
            while received <= source.size and (block := response.read(_BLOCK_BYTES)):
                file.write(block)
                digest.update(block)
                received += len(block)
                if progress is not None:
                    progress(source.name, received, source.size)
        if received != source.size or digest.hexdigest() != source.sha256:
            raise DownloadError(
                f"{source.url} is not the official file ({received:,} of {source.size:,} bytes, or "
                f"another checksum); try again, or download it by hand into {path.parent}."
            )
        draft.replace(path)
    except (OSError, HTTPException) as error:  # a broken connection, or a full disk
        raise DownloadError(
            f"{source.url} could not be downloaded ({error}); try again, or download it by hand into "
            f"{path.parent}."
        ) from None
    finally:
        draft.unlink(missing_ok=True)


# ---------------------------------------------------------------------- MNIST


def _read_mnist(folder: Path) -> ImageData:
    images, labels = [], []
    for part, rows in _MNIST_ROWS.items():
        shape = (rows, _GREY_SIDE, _GREY_SIDE)
        path, own = _read_idx(folder, f"{part}-images-idx3-ubyte", _IDX_IMAGES, shape)
        _check_pixels(own, path, "mnist")
        images.append(own)
        path, own = _read_idx(folder, f"{part}-labels-idx1-ubyte", _IDX_LABELS, (rows,))
        _check_labels(own, len(DIGITS), path)
        labels.append(own)
    return ImageData("mnist", np.concatenate(images)[:, None], _joined(labels), DIGITS)


def _read_idx(
    folder: Path, name: str, magic: int, shape: tuple[int, ...]
) -> tuple[Path, ByteArray]:
    """Return the path of an idx file, plain or compressed, and its bytes; its header is checked."""
    path = folder / "MNIST" / "raw" / name
    if not path.exists():
        path = path.with_name(f"{name}.gz")
    if not path.exists():
        raise _missing(path)
    header = np.array([magic, *shape], dtype=">u4").tobytes()
    size = math.prod(shape)
    if path.suffix != ".gz":
        _check_size(path, len(header) + size)
        content: ByteArray = np.memmap(path, dtype=np.uint8, mode="r")
    else:
        try:
            with gzip.open(path) as file:  # one more byte, to notice a longer file
                content = np.frombuffer(file.read(len(header) + size + 1), dtype=np.uint8)
        except (OSError, EOFError, zlib.error) as error:
            raise _damaged(path, f"it cannot be decompressed ({error})") from None
    found = content[: len(header)].tobytes()
    if found != header:
        expected = f"magic number {magic:#06x} and dimensions {' × '.join(map(str, shape))}"
        raise _damaged(path, f"its header is {found.hex()}, not {expected}")
    if len(content) != len(header) + size:
        raise _damaged(path, f"it does not hold the {size:,} bytes that its header declares")
    return path, content[len(header) :].reshape(shape)


# ---------------------------------------------------------------------- CIFAR


def _read_cifar10(folder: Path) -> ImageData:
    images, (labels,) = _read_cifar(
        folder / "cifar-10-batches-bin", _CIFAR10_ROWS, (len(CIFAR10_CLASSES),), "cifar10"
    )
    return ImageData("cifar10", images, labels, CIFAR10_CLASSES)


def _read_cifar100(folder: Path) -> ImageData:
    own = folder / "cifar-100-binary"
    images, (coarse, fine) = _read_cifar(own, _CIFAR100_ROWS, (20, 100), "cifar100")
    superclasses_of = np.unique(np.stack([fine, coarse]), axis=1)[0]
    if len(np.unique(superclasses_of)) < len(superclasses_of):
        problem = "over train.bin and test.bin, a class has more than one superclass"
        raise _damaged(own, problem)
    path = own / "fine_label_names.txt"
    if not path.exists():
        raise _missing(path)
    names = tuple(path.read_text(encoding="utf-8", errors="replace").split())
    if not len(names) == len(set(names)) == 100:
        different = f"{len(set(names))} of them different"
        problem = f"it holds {counted(len(names), 'class name')}, {different}, instead of 100"
        raise _damaged(path, problem)
    return ImageData("cifar100", images, fine, names, coarse)


def _read_cifar(
    folder: Path, rows_of: dict[str, int], classes: tuple[int, ...], name: str
) -> tuple[ByteArray, list[IntArray]]:
    """Return images ``(N, 3, 32, 32)`` and, for each label byte of a record, labels ``(N,)``.

    The label bytes precede 3072 bytes of pixels: the red, green and blue plane, row by row.
    """
    shape = (3, _COLOUR_SIDE, _COLOUR_SIDE)
    width = len(classes) + math.prod(shape)
    parts = []
    for file, rows in rows_of.items():
        path = folder / file
        if not path.exists():
            raise _missing(path)
        _check_size(path, rows * width)
        records = np.memmap(path, dtype=np.uint8, mode="r").reshape(rows, width)
        for byte, count in enumerate(classes):
            _check_labels(records[:, byte], count, path)
        _check_pixels(records[:, len(classes) :], path, name)
        parts.append(records)
    images = np.concatenate([part[:, len(classes) :] for part in parts]).reshape(-1, *shape)
    return images, [_joined([part[:, byte] for part in parts]) for byte in range(len(classes))]


# ---------------------------------------------------------------------- FEMNIST


def _read_femnist(folder: Path) -> ImageData:
    own = folder / "femnist"
    packed = sorted(own.glob("*.npz"))
    if len(packed) > 1:
        names = ", ".join(path.name for path in packed)
        raise ImageFileError(f"{own} holds several data sets ({names}); keep one.")
    return _read_femnist_npz(packed[0]) if packed else _read_leaf(_leaf_files(own))


def _read_femnist_npz(path: Path) -> ImageData:
    """Read ``images (N, 28, 28)``, ``labels (N,)``, ``writers (N,)`` and ``writer_names (W,)``."""
    try:
        with np.load(path, allow_pickle=False) as packed:
            images, labels, writers, names = (
                packed[key] for key in ("images", "labels", "writers", "writer_names")
            )
    except (OSError, ValueError, KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise _damaged(path, f"it cannot be read ({str(error).rstrip('.')})") from None
    except TypeError:  # a single array, which has no names
        raise _damaged(path, "it is not an archive of named arrays") from None
    if images.dtype != np.uint8 or images.shape[1:] != (_GREY_SIDE, _GREY_SIDE):
        problem = f"its images are {images.dtype} {images.shape}, not uint8 (N, 28, 28)"
        raise _damaged(path, problem)
    _check_pixels(images, path, "femnist")
    for key, codes in (("labels", labels), ("writers", writers)):
        if codes.dtype.kind not in "iu" or codes.shape != (len(images),):
            problem = f"its {key} must be {counted(len(images), 'integer')}, one per image"
            raise _damaged(path, problem)
    if names.ndim != 1 or len(np.unique(names)) != len(names):
        raise _damaged(path, "its writer_names must be distinct, one per writer")
    _check_labels(labels, len(FEMNIST_CLASSES), path)
    _check_labels(writers, len(names), path, "writer")
    return _of_writers(images[:, None], labels, writers, map(str, names))


def _of_writers(
    images: ByteArray, labels: NDArray[Any], writers: NDArray[Any], names: Iterable[str]
) -> ImageData:
    codes = labels.astype(np.int64), writers.astype(np.int64)
    return ImageData("femnist", images, codes[0], FEMNIST_CLASSES, None, codes[1], tuple(names))


def _leaf_files(folder: Path) -> list[Path]:
    """Return LEAF's files: training and test files, else the sample, else all data."""
    for root in (folder, folder / "data"):
        for parts in (("train", "test"), ("sampled_data",), ("all_data",), ("",)):
            found = {part: sorted((root / part).glob("*.json")) for part in parts}
            if any(found.values()):
                for part, files in found.items():
                    if not files:  # one half alone would look complete
                        raise _missing(root / part / "*.json")
                return [path for files in found.values() for path in files]
    raise _missing(folder / "femnist.npz or LEAF's *.json")


def _read_leaf(files: Sequence[Path]) -> ImageData:
    """Read LEAF's JSON: ``users``, and for each user ``x`` in [0, 1] and ``y``; 1.0 is background."""
    images: list[ByteArray] = []
    labels: list[IntArray] = []
    owners: list[str] = []
    for path in files:
        try:
            with path.open(encoding="utf-8") as file:
                # the hook converts one user at a time, so only one user's floats are in memory
                content = json.load(file, object_hook=_user_as_bytes)
            rows_of = content["user_data"]
            users = list(map(str, content["users"]))
            counts = list(map(operator.index, content["num_samples"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise _damaged(path, f"it is not LEAF's JSON ({error})") from None
        agree = isinstance(rows_of, dict) and sorted(users) == sorted(rows_of)
        if not agree or len(counts) != len(users):
            problem = "its users, num_samples and user_data do not agree"
            raise _damaged(path, problem)
        for user, count in zip(users, counts, strict=True):
            if not isinstance(rows_of[user], tuple) or len(rows_of[user][0]) != count:
                problem = f"user {user} does not have {counted(count, 'image')} with labels"
                raise _damaged(path, problem)
            own_images, own_labels = rows_of[user]
            if not len(own_labels):
                continue  # a user without images is not a client
            _check_labels(own_labels, len(FEMNIST_CLASSES), path)
            images.append(own_images)
            labels.append(own_labels)
            owners += [user] * len(own_images)
    if not images:
        raise _damaged(files[0], "it has no users with images")
    names, writers = np.unique(np.array(owners), return_inverse=True)
    return _of_writers(np.concatenate(images), np.concatenate(labels), writers, names.tolist())


def _user_as_bytes(content: dict[str, Any]) -> Any:
    """Return images ``(n, 1, 28, 28)`` and labels ``(n,)`` of a user, and other objects unchanged."""
    if content.keys() != {"x", "y"}:
        return content
    pixels = np.array(content["x"])
    if pixels.size and pixels.dtype.kind not in "fi":
        raise ValueError("a pixel is not a number")
    pixels = pixels.astype(np.float32)
    if len(pixels) and pixels.shape[1:] != (_GREY_SIDE**2,):
        raise ValueError(f"images have shape {pixels.shape[1:]}, not {_GREY_SIDE**2} pixels")
    if not ((pixels >= 0) & (pixels <= 1)).all():
        raise ValueError("a pixel lies outside [0, 1]")
    labels = np.array(content["y"])
    if labels.shape != (len(pixels),):
        raise ValueError(
            f"a user has {counted(len(pixels), 'image')} but {counted(labels.size, 'label')}"
        )
    if len(labels) and labels.dtype.kind != "i":
        raise ValueError("a label is not an integer")
    square = (len(pixels), 1, _GREY_SIDE, _GREY_SIDE)
    return np.rint(pixels * WHITE).astype(np.uint8).reshape(square), labels.astype(np.int64)


# ---------------------------------------------------------------------- checks and errors


def _joined(parts: Sequence[NDArray[np.integer]]) -> IntArray:
    return np.concatenate(parts).astype(np.int64)


def _check_labels(
    labels: NDArray[np.integer], classes: int, path: Path, what: str = "label"
) -> None:
    if not len(labels) or labels.min() < 0 or labels.max() >= classes:
        found = f"{what}s {labels.min()} to {labels.max()}" if len(labels) else f"no {what}s"
        raise _damaged(path, f"it holds {found}, not 0 to {classes - 1}")


def _check_pixels(images: NDArray[np.uint8], path: Path, name: str) -> None:
    """Raise for bytes that cannot be images; warn if many images have a single colour."""
    rows = images.reshape(len(images), -1)
    if not len(rows):
        raise _damaged(path, "it holds no images")
    lowest, highest = rows.min(1), rows.max(1)
    if highest.max() == 1:
        raise _damaged(path, f"its pixels are 0 or 1, not 0 to {WHITE}")
    empty = len(rows) - int(np.flatnonzero(highest).max(initial=-1)) - 1
    if empty:  # the disk was full while the file was written
        zeros = counted(empty, "image is", "images are")
        raise _damaged(path, f"its last {zeros} all zeros")
    blank = lowest == highest
    if blank.sum() <= _MOST_BLANK * len(rows):
        return
    warnings.warn(
        f"{int(blank.sum()):,} of the {counted(len(rows), 'image')} in {path} have a single colour; if "
        f"that is wrong, {_HOW_TO_GET[name]}.",
        stacklevel=2,
    )


def _check_size(path: Path, size: int) -> None:
    found = path.stat().st_size
    if found != size:
        raise _damaged(path, f"it has {found:,} bytes, not {size:,}")


def _missing(path: Path) -> MissingFileError:
    """Return the error of a file that is not there; :func:`load_images` adds how to get it."""
    return MissingFileError(f"{path} is missing;")


def _damaged(path: Path, problem: str) -> DamagedFileError:
    """Return the error of a file that is not valid; :func:`load_images` adds how to get it."""
    return DamagedFileError(f"{path} is damaged: {problem}; delete it and")
