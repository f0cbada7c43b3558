from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgmm.data.federated import client_rows

D = 3
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def federation(lengths, clients=4, seed=0):
    """Matrices of these lengths, a client for each row, and all rows in one array."""
    rng = np.random.default_rng(seed)
    matrices = [rng.normal(size=(n, D)) for n in lengths]
    codes = rng.integers(clients, size=sum(lengths))
    return matrices, codes, np.concatenate(matrices)


def make(lengths, clients=4, seed=0):
    matrices, codes, everything = federation(lengths, clients, seed)
    return client_rows(matrices, codes, [f"c{k}" for k in range(clients)]), codes, everything


@pytest.mark.usefixtures("small_chunks")
@given(sizes, st.integers(1, 6))
def test_rows_codes_and_positions(lengths, clients):
    rows, codes, everything = make(lengths, clients)
    assert len(rows) == len(codes)
    assert rows.columns == D
    assert rows.rows_per_client.tolist() == [int((codes == k).sum()) for k in range(clients)]
    assert torch.equal(torch.cat(rows.chunks), torch.from_numpy(everything))
    assert len(rows.chunks) >= sum(n >= 8 for n in lengths)
    seen = dict.fromkeys(range(clients), 0)
    for code, position in zip(codes.tolist(), rows.positions.tolist(), strict=True):
        assert position == seen[code]
        seen[code] += 1


@pytest.mark.usefixtures("small_chunks")
@given(sizes, st.data())
def test_take(lengths, data):
    rows, _, everything = make(lengths)
    wanted = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=20))
    found = rows.take(torch.tensor(wanted, dtype=torch.int64))
    assert found.dtype == torch.float64
    assert np.array_equal(found.numpy(), everything[wanted].reshape(-1, D))


@pytest.mark.usefixtures("small_chunks")
@given(sizes, st.sets(st.integers(0, 3), min_size=1))
def test_select(lengths, wanted):
    rows, codes, everything = make(lengths)
    present = sorted(wanted & set(codes.tolist()))
    if not present:
        return
    part = rows.select(torch.tensor(present))
    here = np.isin(codes, present)
    assert part.names == tuple(f"c{k}" for k in present)
    assert np.array_equal(torch.cat(part.chunks).numpy(), everything[here])
    assert [present[code] for code in part.codes.tolist()] == codes[here].tolist()
    assert np.array_equal(part.positions, rows.positions[here])
    assert np.array_equal(part.keys, rows.keys[present])


@given(sizes, st.integers(1, 10))
@pytest.mark.usefixtures("small_blocks", "small_chunks")
def test_blocks_read_everything_once(lengths, components):
    rows, codes, everything = make(lengths)
    seen = np.zeros(len(rows), dtype=int)
    for block in rows.blocks(components):
        x, block_codes, place = rows.read(block)
        seen[place] += 1
        assert len(x) <= 32
        assert x.is_contiguous()
        assert np.array_equal(x.numpy(), everything[place])
        assert np.array_equal(block_codes.numpy(), codes[place])
    assert (seen == 1).all()


@pytest.mark.usefixtures("small_chunks")
@given(sizes, st.booleans(), st.data())
def test_positions_of_a_run_of_rows(lengths, grouped, data):
    matrices, codes, _ = federation(lengths)
    rows = client_rows(matrices, np.sort(codes) if grouped else codes, range(4))
    first = data.draw(st.integers(0, len(rows)))
    place = slice(first, data.draw(st.integers(first, len(rows))))
    assert np.array_equal(rows.positions_at(place), rows.positions[place])


@pytest.mark.usefixtures("small_chunks")
@given(sizes, st.integers(0, 999))
def test_keep(lengths, seed):
    rows, codes, everything = make(lengths)
    wanted = np.random.default_rng(seed).uniform(size=len(rows)) < 0.5
    part = rows.keep(torch.from_numpy(wanted))
    assert part.names == rows.names
    assert np.array_equal(torch.cat(part.chunks).numpy(), everything[wanted])
    assert np.array_equal(part.codes.numpy(), codes[wanted])
    read = [part.read(block)[0] for block in part.blocks(2)]
    assert sum(map(len, read)) == wanted.sum()


# ---------------------------------------------------------------------- memory


def shares(tensor, array):
    return np.shares_memory(tensor.numpy(), array)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
def test_large_matrices_are_views(rng, dtype, order):
    matrices = [np.asarray(rng.normal(size=(n, D)), dtype, order) for n in (2000, 1024)]
    rows = client_rows(matrices, np.repeat([0, 1], [2000, 1024]), ["a", "b"])
    assert len(rows.chunks) == 2
    assert all(map(shares, rows.chunks, matrices))
    assert all(chunk.numpy().dtype == dtype for chunk in rows.chunks)


def test_one_matrix_is_a_view_however_small(rng):
    matrix = rng.normal(size=(5, D))
    assert shares(client_rows([matrix], np.zeros(5, dtype=np.int64), ["a"]).chunks[0], matrix)


def test_slices_of_the_callers_array_are_views(rng):
    big = rng.normal(size=(6000, 2 * D))
    part = big[::2, :D]
    assert shares(client_rows([part], np.zeros(3000, dtype=np.int64), ["a"]).chunks[0], big)


def test_read_only_matrices_are_views_without_a_warning(rng, recwarn):
    matrix = rng.normal(size=(2000, D))
    matrix.flags.writeable = False
    assert shares(client_rows([matrix], np.zeros(2000, dtype=np.int64), ["a"]).chunks[0], matrix)
    assert not recwarn.list


def test_small_matrices_are_merged_between_large_ones(rng):
    lengths = [10, 20, 1500, 30, 1, 5]
    matrices = [rng.normal(size=(n, D)) for n in lengths]
    rows = client_rows(matrices, np.repeat(np.arange(6), lengths), range(6))
    assert [len(chunk) for chunk in rows.chunks] == [30, 1500, 36]
    assert shares(rows.chunks[1], matrices[2])
    assert np.array_equal(torch.cat(rows.chunks).numpy(), np.concatenate(matrices))


def test_many_small_matrices_do_not_become_one_huge_copy(rng):
    matrices = [rng.normal(size=(100, D)) for _ in range(400)]
    rows = client_rows(matrices, np.repeat(np.arange(400), 100), range(400))
    assert len(rows.chunks) > 1
    assert max(map(len, rows.chunks)) <= 17 * 1024


@pytest.mark.parametrize(
    "matrix",
    [
        np.arange(12.0).reshape(4, 3)[::-1],
        np.arange(12.0).reshape(4, 3)[:, ::-1],
        np.zeros(4, dtype=[("tag", "i1"), ("x", "f8", 3)])["x"],
        np.broadcast_to(np.arange(3.0), (4, 3)),
    ],
    ids=["rows reversed", "columns reversed", "record field", "broadcast"],
)
def test_any_strides(matrix):
    rows = client_rows([matrix], np.zeros(4, dtype=np.int64), ["a"])
    assert np.array_equal(rows.chunks[0].numpy(), matrix)
    assert np.array_equal(rows.read(rows.blocks(1)[0])[0].numpy(), matrix)


def test_to_the_same_device_is_itself(rng):
    rows, *_ = make([5, 6])
    assert rows.to(torch.device("cpu")) is rows
