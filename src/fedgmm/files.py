"""Files that are whole or not there, and what they hold in a few digits."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

_HASH_BYTES = 1 << 20


def sha256_of(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_atomically(path: Path, data: bytes, *, shared: bool = False) -> None:
    """Write, flush to disk, rename: readers see the old file or the new one, never a half.

    The draft lies beside the file, under a fixed name: what a crash leaves behind is written over
    by the next try.

    Args:
        path: the file.
        data: what is written.
        shared: several programs may write the file at once; each then has a draft of its own.
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
    """Write a file that several programs may try to make at once: the first has its way, others nothing.

    Readers see the whole file or none. Who comes first is for the caller to see, by reading it.
    """
    draft = _draft_of(path, shared=True)
    try:
        _write_to_disk(draft, data)
        with suppress(FileExistsError):
            _name_once(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    _flush_folder(path.parent)


def _name_once(draft: Path, path: Path) -> None:
    """Raise ``FileExistsError`` where the name is taken; a plain renaming would take it away."""
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # some file systems have no links; there a reader may catch a half
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


def _write_to_disk(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Make the new name last through a power cut, where the platform can open a folder."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    with suppress(OSError):  # some file systems have no such call; the file itself is safe
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
