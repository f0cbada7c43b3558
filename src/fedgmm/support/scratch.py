"""Arrays in scratch files, mapped into memory, for tables that are larger than memory.

Within :func:`scratch`, :func:`empty` makes large arrays whose numbers are in a file. The files have no
name, so their space is free again as soon as no array uses them, even if the process is killed. The
system reads pages when they are used. Pages that were used count as memory of the process until
:func:`touched` gives them back, which happens after every few blocks of rows.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any
from weakref import ref

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

_SMALLEST = 16 * 1024  # bytes; smaller arrays stay in memory
_SMALLEST_MAP = 128 * 1024  # bytes of an array that is mapped, but not to a file
_COMMON_FILE = 128 * 1024 * 1024  # bytes; smaller arrays share a file, because files are limited
_MOST_MAPPED = 64 * 1024 * 1024  # bytes that may be used before pages are given back
_BLOCK_ROWS = 16_384
_SORTED_AT_ONCE = 250_000
_SUMMED_AT_ONCE = 250_000
_BYTES_PER_ROW = 64  # of a few mapped arrays that one pass over rows uses

_UNITS = {"b": 0, "kb": 1, "mb": 2, "gb": 3, "tb": 4}


@dataclass
class _Place:
    """A folder for scratch files, and the unused rest of the file that small arrays share."""

    folder: Path
    rest: NDArray[np.uint8]


_place: ContextVar[_Place | None] = ContextVar("place", default=None)


@dataclass(frozen=True)
class _Map:
    """A mapped file: its addresses, and the folder it is in."""

    file: ref[mmap.mmap]
    first: int
    last: int
    folder: Path


_maps: list[_Map] = []
_used = 0  # bytes since pages were given back; lanes may lose some counts, which does not matter


@contextmanager
def scratch(folder: str | Path | None) -> Iterator[None]:
    """Keep large arrays in files of a folder; ``None`` keeps them in memory."""
    token = _place.set(None if folder is None else _Place(Path(folder), np.empty(0, np.uint8)))
    try:
        yield
    finally:
        _place.reset(token)


def active() -> bool:
    """Return whether large arrays are kept in files."""
    return _place.get() is not None


def empty(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array like ``np.empty``, in a file if it is large and :func:`scratch` says so."""
    shape = (shape,) if isinstance(shape, int) else shape
    kind, place = np.dtype(dtype), _place.get()
    size = math.prod(shape) * kind.itemsize
    if place is None or size < _SMALLEST:
        return np.empty(shape, kind)
    if size > len(place.rest):
        wanted = max(size, _COMMON_FILE)

        def reserve(file: IO[bytes]) -> None:
            if hasattr(os, "posix_fallocate"):  # otherwise a full disk would kill the process later
                os.posix_fallocate(file.fileno(), 0, wanted)
            else:
                file.truncate(wanted)

        place.rest = np.frombuffer(scratch_file(reserve), np.uint8)
    own, place.rest = place.rest[:size], place.rest[-(-size // 64) * 64 :]
    return own.view(kind).reshape(shape)


def released_at_once(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array like ``np.empty`` whose memory goes back to the system as soon as it is not used.

    Memory of many small arrays of NumPy usually stays with the process, so the columns of a file are rows
    of one array. Below 128 kB it is an ordinary one, because a process can map about 65,000 arrays only.
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if size < _SMALLEST_MAP:
        return np.empty(shape, kind)
    return np.frombuffer(mmap.mmap(-1, size), kind).reshape(shape)


def kept(values: NDArray[Any]) -> NDArray[Any]:
    """Return an array, or a copy of it in a file if it is large and :func:`scratch` says so."""
    small = values.nbytes < _SMALLEST or 0 in values.strides
    if not active() or small or _folder_at(values.ctypes.data) is not None:
        return values
    return copied(values)


def copied(values: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of an array, in a file if it is large and :func:`scratch` says so."""
    out = empty(values.shape, values.dtype)
    for place in row_blocks(len(values)):
        out[place] = values[place]
        touched(2 * out[place].nbytes)
    return out


def row_blocks(rows: int, at_once: int | None = None) -> Iterator[slice]:
    """Yield runs of rows, so that temporaries stay small and pages are given back."""
    size = at_once or _BLOCK_ROWS
    for first in range(0, rows, size):
        yield slice(first, min(first + size, rows))
        touched(_BYTES_PER_ROW * size)


def gathered(values: NDArray[Any], rows: NDArray[np.integer]) -> NDArray[Any]:
    """Return ``values[rows]`` for indices ``(n,)``, in a file if large and :func:`scratch` says so."""
    if not active():
        return np.asarray(values[rows])
    out = empty((len(rows), *values.shape[1:]), values.dtype)
    for place in row_blocks(len(rows)):
        out[place] = values[rows[place]]
        touched(out[place].nbytes)
    return out


def where(wanted: Callable[[slice], NDArray[np.bool_]], rows: int) -> NDArray[np.int64]:
    """Return the indices of the rows for which ``wanted``, called with runs of rows, is true."""
    if not active():
        return np.flatnonzero(wanted(slice(0, rows)))
    mask = empty(rows, np.bool_)
    for place in row_blocks(rows):
        mask[place] = wanted(place)
    out, first = empty(int(np.count_nonzero(mask)), np.int64), 0
    for place in row_blocks(rows):
        own = np.flatnonzero(mask[place])
        out[first : first + len(own)] = own + place.start
        first += len(own)
    return out


def counts_of(codes: NDArray[np.integer], groups: int) -> NDArray[np.int64]:
    """Return ``np.bincount(codes, minlength=groups)`` of codes below ``groups``, in blocks."""
    counts = np.zeros(groups, dtype=np.int64)
    for place in row_blocks(len(codes)):
        counts += np.bincount(codes[place], minlength=groups)
    return counts


def sums_of(
    values: Callable[[slice], NDArray[Any]], codes: NDArray[np.integer], groups: int
) -> NDArray[np.float64]:
    """Return the sum of each group of rows, ``(groups,)``; ``values`` is called with runs of rows."""
    total = np.zeros(groups)
    for place in row_blocks(len(codes), _SUMMED_AT_ONCE):
        total += np.bincount(codes[place], values(place), minlength=groups)
    return total


def concatenated(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Return arrays one behind the other, in a file if large and :func:`scratch` says so.

    They are removed from the list one by one.
    """
    out, first = empty(sum(map(len, parts)), parts[0].dtype), 0
    while parts:
        part = parts.pop(0)
        for place in row_blocks(len(part)):
            out[first + place.start : first + place.stop] = part[place]
        first += len(part)
    return out


def dealt(
    parts: Callable[[], Iterator[tuple[NDArray[Any], NDArray[np.integer]]]], groups: int
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return values sorted by group, otherwise in their order, and the end of each group.

    Each call of ``parts`` yields blocks of the values ``(n,)`` and of their groups, which are below
    ``groups``. The values are in a file if they are large and :func:`scratch` says so.
    """
    counts, kind = np.zeros(groups, dtype=np.int64), np.dtype(np.int64)
    for own, group in parts():
        counts += np.bincount(group, minlength=groups)
        kind = own.dtype
    ends = np.cumsum(counts)
    free, out = ends - counts, empty(int(counts.sum()), kind)  # the next place of each group
    for own, group in parts():
        order = np.argsort(group, kind="stable")
        ranked = group[order]
        rank = np.arange(len(own)) - np.searchsorted(ranked, ranked)  # within the group
        out[free[ranked] + rank] = own[order]
        free += np.bincount(group, minlength=groups)
    return out, ends


def stable_order(codes: NDArray[np.integer], groups: int) -> NDArray[np.int64]:
    """Return ``np.argsort(codes, kind="stable")`` of codes ``(n,)`` below ``groups``; a file if large."""
    if not active():
        return np.argsort(codes, kind="stable")

    def parts() -> Iterator[tuple[NDArray[np.int64], NDArray[np.integer]]]:
        for place in row_blocks(len(codes)):
            yield np.arange(place.start, place.stop), codes[place]

    return dealt(parts, groups)[0]


def ordered(values: NDArray[Any]) -> NDArray[Any]:
    """Return ``np.sort(values)`` of numbers ``(n,)``, in a file if large and :func:`scratch` says so.

    Large arrays are dealt to buckets between quantiles of a sample. Then each bucket is sorted.
    """
    buckets = -(-len(values) // _SORTED_AT_ONCE)
    if not active() or buckets < 2:
        return np.sort(values)
    step = 1 + len(values) // _BLOCK_ROWS
    sample = np.sort(np.concatenate([values[p][::step] for p in row_blocks(len(values))]))
    edges = sample[np.arange(1, buckets) * len(sample) // buckets]

    def parts() -> Iterator[tuple[NDArray[Any], NDArray[np.integer]]]:
        for place in row_blocks(len(values)):
            yield values[place], np.searchsorted(edges, values[place])

    out, ends = dealt(parts, buckets)
    for first, last in pairwise([0, *ends.tolist()]):
        out[first:last].sort()
        touched(out[first:last].nbytes)
    return out


def scratch_file(write: Callable[[IO[bytes]], None]) -> mmap.mmap:
    """Make a scratch file with ``write`` and return it mapped into memory."""
    place = _place.get()
    assert place is not None
    folder = place.folder
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            write(file)
            file.flush()
            found = mmap.mmap(file.fileno(), 0)
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror}, for tables larger than memory", str(folder)
        ) from error
    first = np.frombuffer(found, np.uint8).ctypes.data
    _maps[:] = [one for one in _maps if one.file() is not None]
    _maps.append(_Map(ref(found), first, first + len(found), folder))
    return found


def touched(size: int) -> None:
    """Note that ``size`` bytes of mapped files were used, and give pages back after many."""
    global _used
    if not _maps:
        return
    _used += size
    if _used < _MOST_MAPPED or not hasattr(mmap, "MADV_DONTNEED"):
        return
    _used = 0
    for one in _maps:
        found = one.file()
        if found is not None:
            with suppress(ValueError):  # closed meanwhile
                found.madvise(mmap.MADV_DONTNEED)  # of a shared file: nothing is lost


# ---------------------------------------------------------------------- tensors beside others


def folder_of(values: Tensor) -> Path | None:
    """Return the scratch folder of a tensor; ``None`` if it is in memory."""
    return _folder_at(values.data_ptr()) if values.device.type == "cpu" else None


def _folder_at(address: int) -> Path | None:
    for one in _maps:
        # other arrays may be where a file was mapped that is no longer used
        if one.first <= address < one.last and one.file() is not None:
            return one.folder
    return None


def empty_beside(values: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor like ``values.new_empty``, in a file if ``values`` are in one."""
    folder = folder_of(values)
    if folder is None:
        return values.new_empty(shape, dtype=dtype)
    with scratch(folder):
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        return torch.from_numpy(empty(shape, kind))


def taken(values: Tensor, rows: Tensor) -> Tensor:
    """Return ``values[rows]`` for a mask or indices ``(n,)``, in a file if ``values`` are in one."""
    if folder_of(values) is None:
        return values[rows]
    if rows.dtype == torch.bool:  # all pages are read, in their order
        out, first = empty_beside(values, (int(rows.sum()), *values.shape[1:]), values.dtype), 0
        for block, wanted in zip(blocks_in(values), blocks_in(rows), strict=True):
            own = block[wanted]
            out[first : first + len(own)] = own
            first += len(own)
        return out
    out = empty_beside(values, (len(rows), *values.shape[1:]), values.dtype)
    for into, own in zip(blocks_in(out), blocks_in(rows), strict=True):
        into.copy_(values[own])
    return out


def blocks_in(values: Tensor) -> Iterator[Tensor]:
    """Yield blocks of rows, one after the other, as views."""
    for first in range(0, len(values), _BLOCK_ROWS):
        block = values[first : first + _BLOCK_ROWS]
        yield block
        touched(2 * block.nbytes)


# ---------------------------------------------------------------------- sizes


def as_bytes(text: str) -> int:
    """Return the number of bytes that ``2GB``, ``500 MB`` or ``1e9`` stands for.

    Raises:
        ValueError: the text is not a size.
    """
    found = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kmgt]?b)?\s*", text.lower())
    try:
        size = float(found[1]) * 1000 ** _UNITS[found[2] or "b"] if found else -1.0
    except ValueError:
        size = -1.0
    if not 0 <= size < 2**63:
        raise ValueError(f"memory must be a size such as 2GB or 500MB, got {text!r}.")
    return int(size)


def available_memory() -> int:
    """Return the number of bytes that this process can still use without swapping."""
    sizes = []
    with suppress(OSError, AttributeError, IndexError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes.append(next(int(t.split()[1]) * 1024 for t in lines if t.startswith("MemAvailable")))
    with suppress(OSError, ValueError):  # of a container
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        sizes.append(limit - int((group / "memory.current").read_text()))
    with suppress(OSError, AttributeError, ValueError):
        if not sizes:
            sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(sizes, default=2**63))
