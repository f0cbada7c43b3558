"""Downloads of image data sets from their official servers, with checksums."""

from __future__ import annotations

import hashlib
import tarfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from fedgmm.files import write_atomically

Progress = Callable[[str, int, int], None]
"""Called with a file's name, the number of bytes received so far, and the number of all bytes."""

_BLOCK_BYTES = 1024 * 1024
_TIMEOUT_SECONDS = 60


class DownloadError(ValueError):
    """A download that failed; the message names the file and a remedy."""


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


def download(name: str, data_dir: Path, progress: Progress | None = None) -> None:
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
