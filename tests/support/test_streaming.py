from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

from fedgmm.support import streaming
from fedgmm.support.streaming import accumulate, block_rows, blocks_of, lanes_only

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(1, 70))
def test_blocks_cover_every_row_exactly_once_and_in_order(lengths, rows):
    blocks = blocks_of(lengths, rows)
    visited = [(chunk, row) for chunk, start, stop in blocks for row in range(start, stop)]
    assert visited == [(chunk, row) for chunk, n in enumerate(lengths) for row in range(n)]
    for chunk, length in enumerate(lengths):
        sizes = [stop - start for owner, start, stop in blocks if owner == chunk]
        assert all(0 < size <= rows for size in sizes)
        assert max(sizes, default=0) - min(sizes, default=0) <= 1
        assert len(sizes) == -(-length // rows)


@given(st.integers(1, 200), st.integers(1, 2000))
def test_a_block_has_rows_and_fits_memory(components, columns):
    rows = block_rows(components, columns, CPU)
    assert 1 <= rows <= 8192
    # Its size does not depend on the data's: a few MB, or a few hundred rows.
    assert components * columns * rows <= max(512 * 1024, 192 * components * columns)


def summed(values, blocks):
    """Sum of the rows of ``values`` over all lanes."""

    def start():
        return torch.zeros((), dtype=torch.float64)

    def add(total, block):
        _, first, last = block
        total.add_(values[first:last].sum())

    lanes = accumulate(blocks, start, add, CPU)
    return torch.stack(lanes).sum().item(), len(lanes)


def test_lanes_agree_up_to_rounding_and_repeat_to_the_bit(rng, threads):
    values = torch.from_numpy(rng.normal(size=5000))
    blocks = blocks_of([5000], 64)
    threads(1)
    alone, lanes = summed(values, blocks)
    assert lanes == 1
    threads(2)
    together, lanes = summed(values, blocks)
    assert lanes == 2
    assert together == pytest.approx(values.sum().item(), rel=1e-12)
    assert alone == pytest.approx(together, rel=1e-12)
    assert all(summed(values, blocks)[0] == together for _ in range(5))


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("pieces", [0, 1, 2, 3, 7])
def test_every_block_is_visited_once_whatever_the_lanes(threads, number, pieces):
    threads(number)
    blocks = [(0, i, i + 1) for i in range(pieces)]
    lanes = accumulate(blocks, list, lambda seen, block: seen.append(block), CPU)
    assert [block for seen in lanes for block in seen] == blocks
    assert 1 <= len(lanes) <= max(1, min(number, pieces))  # how many are worth a thread is tuning


@pytest.mark.parametrize("number", [1, 2])
def test_threads_are_one_inside_and_restored_outside(threads, number):
    threads(number)
    blas_before = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    inside = []

    def look(_, __):
        blas = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
        inside.append((torch.get_num_threads(), *blas))

    accumulate(blocks_of([40], 10), lambda: None, look, CPU)
    assert all(count == 1 for counts in inside for count in counts)
    assert torch.get_num_threads() == number
    blas_after = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    assert blas_after == blas_before


def test_no_lane_has_a_team_of_openmp():
    """OpenMP keeps a number for each thread, and one that is new begins with that of the environment."""
    script = textwrap.dedent(
        """
        import torch
        from threadpoolctl import threadpool_info
        from fedgmm.support.streaming import accumulate

        torch.set_num_threads(2)
        seen = set()
        look = lambda _, block: seen.update(
            pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "openmp"
        )
        lanes = accumulate(range(4), list, look, torch.device("cpu"))
        print(len(lanes), sorted(seen))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout in ("2 [1]\n", "2 []\n")  # torch may have been built without it


def test_within_lanes_only_passes_keep_their_lanes(threads):
    threads(2)
    with lanes_only():
        assert torch.get_num_threads() == 1
        lanes = accumulate(blocks_of([400], 10), list, lambda seen, block: seen.append(block), CPU)
        assert len(lanes) == 2
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), lanes_only():
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("bad", [0, 5, 9])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_in_a_block_comes_out_and_threads_are_restored(threads, number, bad, error):
    threads(number)

    def add(_, block):
        if block[1] == bad:
            raise error

    with pytest.raises(error):
        accumulate([(0, i, i + 1) for i in range(10)], lambda: None, add, CPU)
    assert torch.get_num_threads() == number


@pytest.mark.parametrize("lane", [0, 1])
def test_a_lane_that_fails_stops_the_others(threads, lane):
    threads(2)
    visited = []

    def add(_, block):
        if block[1] == lane * 100:
            raise KeyboardInterrupt
        visited.append(block)
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        accumulate([(0, i, i + 1) for i in range(200)], lambda: None, add, CPU)
    assert len(visited) < 50  # the other lane alone has 100


def test_ctrl_c_while_the_main_thread_waits_stops_the_lanes(threads):
    threads(2)
    visited, main = [], threading.main_thread().ident
    sent = threading.Event()

    def add(_, block):
        visited.append(block)
        if not sent.is_set():
            sent.set()
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        accumulate([(0, i, i + 1) for i in range(400)], lambda: None, add, CPU)
    seen = len(visited)
    assert seen < 200
    time.sleep(0.05)
    assert len(visited) == seen  # no lane runs on in the background
    assert torch.get_num_threads() == 2


def test_of_several_lanes_that_fail_the_first_is_raised(threads):
    """Whichever comes first in time: the same call tells the same."""
    threads(3)
    begun, failed = threading.Event(), threading.Event()

    def add(_, block):
        if block == 2:  # of the second lane
            begun.set()
            assert failed.wait(20)
            raise ValueError("second")
        if block == 4:  # of the third
            assert begun.wait(20)
            failed.set()
            raise ValueError("third")

    with pytest.raises(ValueError, match="second"):
        accumulate(range(6), list, add, CPU)


class Watched:
    """Blocks that take a while; knows how many lanes are within one."""

    def __init__(self):
        self.inside, self.lock, self.begun = 0, threading.Lock(), threading.Event()

    def add(self, _, block):
        with self.lock:
            self.inside += 1
        self.begun.set()
        try:
            time.sleep(0.5)
        finally:
            with self.lock:
                self.inside -= 1


def test_ctrl_c_again_and_again_leaves_no_lane_behind(threads):
    """While a thread is joined, Ctrl-C makes CPython take it for ended."""
    threads(2)
    watched, main = Watched(), threading.main_thread().ident

    def press():
        while watched.inside < 2:
            time.sleep(0.001)
        for _ in range(3):
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.02)

    finger = threading.Thread(target=press)
    finger.start()
    with pytest.raises(KeyboardInterrupt):
        accumulate(range(400), list, watched.add, CPU)
    assert watched.inside == 0
    finger.join()
    assert torch.get_num_threads() == 2


def test_a_thread_whose_start_is_interrupted_does_not_outlive_the_call(threads, monkeypatch):
    threads(2)
    watched, start = Watched(), streaming.start_new_thread

    def interrupted(*work):
        start(*work)
        watched.begun.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(streaming, "start_new_thread", interrupted)
    with pytest.raises(KeyboardInterrupt):
        accumulate(range(400), list, watched.add, CPU)
    assert watched.inside == 0


def test_a_thread_that_comes_late_does_nothing(threads, monkeypatch):
    threads(2)
    late, visited = [], []

    def interrupted(*work):
        late.append(work)
        raise KeyboardInterrupt

    monkeypatch.setattr(streaming, "start_new_thread", interrupted)
    with pytest.raises(KeyboardInterrupt):
        accumulate(range(400), list, lambda _, block: visited.append(block), CPU)
    ((work, arguments),) = late
    work(*arguments)
    assert visited == []


@pytest.mark.parametrize("fails", [False, True])
def test_threads_keep_nothing_of_the_work(threads, monkeypatch, fails):
    """Python may end before a thread does, which must not drop the last reference to a tensor then."""
    threads(2)
    kept, begin = [], streaming.start_new_thread

    def watched(*work):
        kept.append(work)
        return begin(*work)

    monkeypatch.setattr(streaming, "start_new_thread", watched)

    class Sums(list):
        """Can be referred to weakly."""

    def add(sums, block):
        sums.append(block)
        if fails and block == 399:  # in the last lane
            raise ZeroDivisionError

    references = []

    def start():
        sums = Sums()
        references.append(weakref.ref(sums))
        return sums

    try:
        accumulate(range(400), start, add, CPU)
    except ZeroDivisionError:
        assert fails
    assert len(kept) == 1
    assert len(references) == 2
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_at_any_instruction(threads, presses):
    """No lane is left behind, nothing hangs, and what comes out is Ctrl-C or the result."""
    threads(2)
    inside, watching, count = [], False, 0
    started = threading.Event()

    def add(_, block):
        nonlocal watching
        if block < 2:  # of the first lane: it waits for the other, and then Ctrl-C may come
            assert started.wait(60)  # on a busy machine the other lane may be over by now
            watching = True
            if presses == 2:
                raise KeyboardInterrupt
        else:
            inside.append(block)
            started.set()
            time.sleep(0.004)
            inside.pop()

    def trace(frame, event, _):
        nonlocal count, watching
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if watching and event == "opcode":
            count += 1
            if count == point:
                watching = False
                raise KeyboardInterrupt
        return trace

    def only_here(frame, event, _):
        return trace if frame.f_code.co_filename == streaming.__file__ else None

    for point in range(1, 1000):
        watching, count, seen = False, 0, None
        started.clear()
        before = sys.gettrace()
        sys.settrace(only_here)
        try:
            seen = accumulate(range(4), list, add, CPU)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert not inside, point
        if count < point:
            break
        # on its way out of lanes_only, Ctrl-C may come before these are put back
        torch.set_num_threads(2)
        streaming._lanes.set(None)
    assert 30 < point < 999
    assert (seen is None) == (presses == 2)


def test_daemons_do_not_run_lanes_themselves(threads):
    """A daemon within torch aborts Python at its end; a thread that is none is waited for."""
    threads(2)
    seen, found = [], []

    def add(_, block):
        seen.append((threading.current_thread().daemon, threading.get_ident()))

    def call():
        found.append(accumulate(range(40), list, add, CPU))

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join()
    assert len(found[0]) == 2
    assert {daemon for daemon, _ in seen} == {False}
    assert caller.ident not in {ident for _, ident in seen}


def test_lanes_are_alike_whatever_the_caller_s_modes(threads):
    threads(2)
    one, dtypes, inference = torch.ones(2, 2), [], []

    def start():
        sums = torch.zeros(1)
        inference.append(sums.is_inference())
        return sums

    def add(_, block):
        dtypes.append((one @ one).dtype)

    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        accumulate(range(40), start, add, CPU)
    assert set(dtypes) == {torch.float32}
    assert inference == [False, False]


def test_lanes_have_no_lanes_of_their_own(threads):
    threads(2)
    inner = []

    def add(_, block):
        inner.append(len(accumulate(range(40), list, lambda seen, one: seen.append(one), CPU)))

    assert len(accumulate(range(10), list, add, CPU)) == 2
    assert inner == [1] * 10


def test_blocks_run_without_autograd():
    modes = []
    accumulate(
        blocks_of([20], 5),
        lambda: None,
        lambda *_: modes.append(torch.is_inference_mode_enabled()),
        CPU,
    )
    assert modes == [True] * 4


@pytest.mark.parametrize("number", [1, 4, 9])
def test_blocks_dealt_in_turn(threads, number):
    threads(2)
    shares = accumulate(
        range(number), list, lambda own, block: own.append(block), torch.device("cpu"), in_turn=True
    )
    assert sorted(block for share in shares for block in share) == list(range(number))
    if len(shares) == 2:
        assert shares == [list(range(0, number, 2)), list(range(1, number, 2))]
