from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest, pearsonr

from fedgmm.support.randomness import client_keys, row_uniforms

N = 20_000


def draw(seed=0, stream=0, name="oslo", rows=N):
    keys = np.repeat(client_keys([name]), rows)
    return row_uniforms(seed, stream, keys, np.arange(rows))


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**31 - 2])
@pytest.mark.parametrize("stream", [0, 1, 7])
def test_draws_are_uniform(seed, stream):
    found = draw(seed, stream)
    assert ((found > 0) & (found < 1)).all()
    assert kstest(found, "uniform").pvalue > 1e-3


def test_draws_of_many_clients_at_one_place_are_uniform():
    keys = client_keys(range(N))
    assert kstest(row_uniforms(3, 0, keys, np.zeros(N, dtype=np.int64)), "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"stream": 1}, {"name": "bergen"}], ids=["seed", "stream", "client"]
)
def test_another_seed_stream_or_client_is_independent(other):
    a, b = draw(), draw(**other)
    assert len(np.intersect1d(a, b)) == 0
    assert abs(pearsonr(a, b).statistic) < 4 / np.sqrt(N)
    cells = np.histogram2d(a, b, bins=8, range=[[0, 1], [0, 1]])[0]
    assert chisquare(cells.ravel()).pvalue > 1e-3


def test_no_seed_and_stream_stand_in_for_others():
    draws = [draw(seed, stream, rows=1).item() for seed in range(30) for stream in range(30)]
    assert len(set(draws)) == 900


def test_neighbours_are_independent():
    a = draw()
    assert abs(pearsonr(a[:-1], a[1:]).statistic) < 4 / np.sqrt(N)


@given(st.permutations(list(range(12))), st.integers(0, 2**31 - 1), st.integers(0, 50))
def test_a_draw_belongs_to_its_row(order, seed, stream):
    keys = client_keys(["a"] * 5 + ["b"] * 7)
    positions = np.array([*range(5), *range(7)])
    order = np.array(order)
    straight = row_uniforms(seed, stream, keys, positions)
    assert np.array_equal(
        straight[order], row_uniforms(seed, stream, keys[order], positions[order])
    )


def test_keys_go_by_name():
    keys = client_keys(["a", "b", 1, ("x", 2)])
    assert keys.dtype == np.uint64
    assert len(set(keys.tolist())) == 4
    assert client_keys(["b"])[0] == keys[1]
