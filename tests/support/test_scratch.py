"""Arrays in scratch files."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from fedgmm.support import scratch
from fedgmm.support.scratch import as_bytes, available_memory, empty, empty_beside, folder_of, kept


@pytest.fixture
def large(rng):
    return rng.normal(size=(40_000, 3))


def test_without_a_folder_arrays_stay_in_memory(large):
    assert not scratch.active()
    assert kept(large) is large
    assert folder_of(torch.from_numpy(empty((40_000, 3), np.float64))) is None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_of_released_arrays_goes_back_to_the_system():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident()
    arrays = [scratch.released_at_once((50, 10_000), np.float64) for _ in range(10)]
    for array in arrays:
        array[:] = 1.0
    assert resident() - before > 30_000_000
    arrays.clear()
    del array
    assert resident() - before < 5_000_000


def test_small_arrays_are_not_mapped_because_a_process_may_map_few_pieces():
    small, large = (scratch.released_at_once((2, n), np.float64) for n in (3, 100_000))
    assert [array.shape for array in (small, large)] == [(2, 3), (2, 100_000)]
    base = large
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert small.base is None
    assert base.base is not None


def test_memory_where_a_file_was_mapped_is_not_in_that_file(large, tmp_path):
    with scratch.scratch(tmp_path):
        array = kept(large)
    memory = np.ones(3)
    lost = scratch._Map(lambda: None, memory.ctypes.data, memory.ctypes.data + 1, tmp_path)
    scratch._maps.append(lost)
    try:
        assert folder_of(torch.from_numpy(memory)) is None
        assert folder_of(torch.from_numpy(array)) == tmp_path
    finally:
        scratch._maps.remove(lost)


def test_arrays_in_a_file_hold_the_same_numbers_and_leave_no_file(large, tmp_path):
    with scratch.scratch(tmp_path):
        copy = kept(large)
        small = empty(4, np.int32)
    assert folder_of(torch.from_numpy(copy)) == tmp_path
    assert folder_of(torch.from_numpy(small)) is None
    scratch.touched(10**9)  # gives all pages back
    np.testing.assert_array_equal(copy, large)
    assert list(tmp_path.iterdir()) == []


def test_an_array_in_a_file_is_kept_as_it_is_unless_it_is_copied(large, tmp_path):
    with scratch.scratch(tmp_path):
        array = kept(large)
        assert kept(array) is array
        other = scratch.copied(array)
    assert not np.shares_memory(other, array)
    np.testing.assert_array_equal(other, large)


def test_two_arrays_of_one_file_do_not_overlap(tmp_path):
    with scratch.scratch(tmp_path):
        one, other = empty(10_001, np.float32), empty(10_000, np.int64)
    one[:], other[:] = 1.0, 2
    assert one.min() == one.max() == 1.0
    assert other.min() == other.max() == 2


def test_maps_are_forgotten_with_their_arrays(large, tmp_path, monkeypatch, collect):
    monkeypatch.setattr(scratch, "_maps", [])
    for _ in range(3):
        with scratch.scratch(tmp_path):
            array = kept(large)
        del array
    collect()
    assert sum(one.file() is not None for one in scratch._maps) == 0
    assert len(scratch._maps) == 1


def test_tensors_beside_one_in_a_file_are_in_the_same_folder(large, tmp_path):
    with scratch.scratch(tmp_path):
        rows = torch.from_numpy(kept(large))
    assert folder_of(empty_beside(rows, (2, 40_000), torch.float32)) == tmp_path
    assert folder_of(empty_beside(torch.from_numpy(large), (2, 40_000), torch.float32)) is None
    mask = rows[:, 0] > 0
    assert folder_of(scratch.taken(rows, mask)) == tmp_path
    np.testing.assert_array_equal(scratch.taken(rows, mask), large[large[:, 0] > 0])
    order = torch.arange(len(rows) - 1, -1, -1)
    np.testing.assert_array_equal(scratch.taken(rows, order), large[::-1])


@pytest.mark.parametrize("in_files", [False, True])
def test_passes_over_rows_give_what_numpy_gives_at_once(rng, tmp_path, monkeypatch, in_files):
    monkeypatch.setattr(scratch, "_BLOCK_ROWS", 1000)
    monkeypatch.setattr(scratch, "_SORTED_AT_ONCE", 3000)
    codes = rng.integers(0, 7, 40_000)
    values = rng.normal(size=(7, 2))
    numbers = rng.normal(size=40_000).round(2)  # some are equal
    with scratch.scratch(tmp_path) if in_files else nullcontext():
        taken = scratch.gathered(values, codes)
        order = scratch.stable_order(codes, 8)
        ones = scratch.where(lambda place: codes[place] == 1, len(codes))
        counts = scratch.counts_of(codes, 8)
        sums = scratch.sums_of(numbers.__getitem__, codes, 8)
        ordered = scratch.ordered(numbers)
        twice = scratch.concatenated([codes, codes])
    np.testing.assert_array_equal(taken, values[codes])
    np.testing.assert_array_equal(order, np.argsort(codes, kind="stable"))
    np.testing.assert_array_equal(ones, np.flatnonzero(codes == 1))
    np.testing.assert_array_equal(counts, np.bincount(codes, minlength=8))
    np.testing.assert_allclose(sums, np.bincount(codes, numbers, minlength=8), rtol=1e-10)
    np.testing.assert_array_equal(ordered, np.sort(numbers))
    np.testing.assert_array_equal(twice, np.concatenate([codes, codes]))
    for array in (taken, order, ordered, twice):
        assert folder_of(torch.from_numpy(array)) == (tmp_path if in_files else None)


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with scratch.scratch(tmp_path), pytest.raises(OSError, match=f"space.*{tmp_path.name}"):
        empty(100_000, np.float64)


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 * 10**9), ("1.5 kb", 1500), ("1e6", 10**6), ("0", 0)]
)
def test_sizes(text, size):
    assert as_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "2XB", "-1GB", "1..5GB", "1e40"])
def test_other_texts_are_not_sizes(text):
    with pytest.raises(ValueError, match="memory"):
        as_bytes(text)


def test_some_memory_is_available():
    assert 10**6 < available_memory() < 2**60
