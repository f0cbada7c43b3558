"""Files that are complete or absent, folders of one user, and checksums."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def sha256_of(path: Path) -> str:
    """Return the SHA-256 checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def private_folder(path: Path) -> None:
    """Make a folder that other users cannot read; a folder that exists stays as it is."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True, mode=0o700)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to errors of the disk that have none, such as a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_atomically(
    path: Path, data: bytes | Iterable[bytes | memoryview], *, shared: bool = False
) -> None:
    """Write a file so that readers see the old content or the new one, never a part.

    The data are written to a draft beside the file, flushed to disk, and renamed. The draft has a
    fixed name, so that the next attempt replaces what a crash leaves.

    Args:
        path: the file.
        data: the new content, whole or in pieces.
        shared: several programs may write the file at once, so each needs its own draft.
    """
    draft = _draft_of(path, shared)
    try:
        _write_to_disk(draft, data)
        draft.replace(path)
    except BaseException:  # a full disk, or Ctrl-C
        draft.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def write_once(path: Path, data: bytes) -> None:
    """Write a file unless it exists, also if several programs try at the same time.

    Readers see the complete file or none. The first program wins; the others change nothing and can
    read the file to see the result.
    """
    draft = _draft_of(path, shared=True)
    try:
        _write_to_disk(draft, data)
        with suppress(FileExistsError):
            _link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    _flush_folder(path.parent)


def _link(draft: Path, path: Path) -> None:
    """Name the draft; raise ``FileExistsError`` if the name is taken, which a rename would replace."""
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links; a reader may then see a part
        content, file = draft.read_bytes(), path.open("xb")
        try:
            with file:
                file.write(content)
        except BaseException:  # a full disk, or Ctrl-C
            path.unlink(missing_ok=True)
            raise


def _draft_of(path: Path, shared: bool) -> Path:
    owner = f".{os.getpid()}" if shared else ""
    return path.with_name(f"{path.name}{owner}.part")


def _write_to_disk(path: Path, data: bytes | Iterable[bytes | memoryview]) -> None:
    with naming(path), path.open("wb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Flush a new name to disk, so that it survives a power cut, if the platform can open a folder."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    with suppress(OSError):  # some file systems cannot; the file itself is safe
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
