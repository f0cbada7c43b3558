"""Sums over rows in blocks that fit a core's cache, on as many threads as torch may use.

The temporaries of one block are a few times ``components × block × columns``; they never grow with
the number of rows. Blocks are dealt to *lanes* in contiguous, fixed ranges and each lane owns its
accumulator, so the same call on the same number of threads gives the same bits.
"""

from __future__ import annotations

import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import cache
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import torch
from threadpoolctl import ThreadpoolController

from fedgmm.support.scratch import touched

Block = tuple[int, int, int]
"""A run of rows: chunk, first row, last row (exclusive), counted within the chunk."""

Accumulator = TypeVar("Accumulator")
Item = TypeVar("Item")

# A block's temporaries should stay in the caches, and BLAS has fast kernels for products of up to
# about a million multiplications (half of ``rows × columns²``), twice as many in float32: measured
# for d = 2 … 512.
_BLOCK_BYTES = 4 * 1024 * 1024
_SMALL_PRODUCT_BYTES = 8 * 1_600_000
_FEWEST_ROWS, _MOST_ROWS = 192, 8192
_ACCELERATOR_NUMBERS = 32 * 1024 * 1024
_BLOCKS_A_LANE = 2  # less is not worth a thread

_lanes: ContextVar[int | None] = ContextVar("lanes", default=None)


def block_rows(components: int, columns: int, device: torch.device, item_bytes: int = 8) -> int:
    """Return the number of rows of a block, for ``components`` residuals of ``columns`` numbers."""
    if device.type != "cpu":
        return max(_FEWEST_ROWS, _ACCELERATOR_NUMBERS // (components * columns))
    fits = _BLOCK_BYTES // (components * columns * item_bytes)
    rows = min(fits, _SMALL_PRODUCT_BYTES // (columns**2 * item_bytes))
    return max(_FEWEST_ROWS, min(rows, _MOST_ROWS))


def blocks_of(chunk_lengths: Sequence[int], rows: int) -> list[Block]:
    """Cut chunks of the given lengths into blocks of nearly equal size, at most ``rows`` long."""
    blocks: list[Block] = []
    for chunk, length in enumerate(chunk_lengths):
        pieces = -(-length // rows)
        edges = [length * piece // pieces for piece in range(pieces + 1)] if pieces else []
        blocks += [(chunk, start, stop) for start, stop in pairwise(edges)]
    return blocks


def accumulate(
    blocks: Sequence[Item],
    start: Callable[[], Accumulator],
    add_block: Callable[[Accumulator, Item], None],
    device: torch.device,
    gradients: bool = False,
    in_turn: bool = False,
) -> list[Accumulator]:
    """Run ``add_block`` over all blocks and return one accumulator per lane, in order.

    Lanes are threads on the CPU; elsewhere there is one. ``start`` makes an empty accumulator, and
    ``add_block`` adds one block, or another item, to it in place; ``gradients`` says that it
    differentiates. Blocks that follow each other belong to one lane. With ``in_turn`` they are
    dealt to the lanes in turn, for blocks of which the first are the largest.
    """
    threads = _lanes.get() or torch.get_num_threads()
    lanes = max(1, min(threads, len(blocks) // _BLOCKS_A_LANE) if device.type == "cpu" else 1)
    stop: list[bool] = []  # anything in it means so

    def run(lane: int) -> Accumulator:
        # the first lane has the caller's modes, which the others do not see
        with torch.inference_mode(mode=False):
            accumulator = start()
        whole = slice(len(blocks) * lane // lanes, len(blocks) * (lane + 1) // lanes)
        share = blocks[lane::lanes] if in_turn else blocks[whole]
        with torch.autocast("cpu", enabled=False), torch.inference_mode(mode=not gradients):
            for block in share:
                if stop:
                    break
                try:
                    add_block(accumulator, block)
                    touched(_BLOCK_BYTES)
                except BaseException:
                    stop.append(True)  # the other lanes' work is lost anyway
                    raise
        return accumulator

    if len(blocks) <= 1:  # changing the BLAS threads would gain nothing
        return [run(0)]
    with lanes_only():
        if lanes == 1:
            return [run(0)]
        crew = _Crew(run, stop)
        try:
            try:
                return crew.work(lanes)
            finally:
                crew.leave()
        finally:  # Ctrl-C may have come on the way there
            crew.leave()


class _Crew(Generic[Accumulator]):
    """The threads that run lanes, together with the caller.

    Ctrl-C may come between any two instructions, and Python may exit soon after it. A thread that is
    inside torch then, or drops the last reference to a tensor, aborts the program. So the caller waits
    until all threads have dropped the work, which takes as long as one block. Pools, threads and events
    of ``threading`` cannot be used, because Ctrl-C inside their code can leave a lock locked for ever or
    a thread without an owner, and CPython considers a thread finished if Ctrl-C interrupts its join.
    """

    def __init__(self, run: Callable[[int], Accumulator], stop: list[bool]) -> None:
        self._run: Callable[[int], Accumulator] | None = run
        self._stop = stop
        self._found: dict[int, Accumulator] = {}
        self._errors: dict[int, BaseException] = {}
        self._begun: list[int] = []  # appending needs no lock
        self._ended: list[int] = []
        self._news: SimpleQueue[int] = SimpleQueue()  # wakes the waiting caller

    def work(self, lanes: int) -> list[Accumulator]:
        """Return the accumulators of all lanes, in order."""
        if threading.current_thread() is threading.main_thread():
            for lane in range(1, lanes):
                start_new_thread(self._in_a_thread, (lane,))
            copy_context().run(self._one, 0)
            threads = lanes - 1
        else:  # Ctrl-C does not come here, but a daemon caller must not be inside torch at the exit
            for lane in range(lanes):
                threading.Thread(target=self._in_a_thread, args=(lane,), daemon=False).start()
            threads = lanes
        while len(self._ended) < threads:
            self._wait()
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._found[lane] for lane in range(lanes)]

    def leave(self) -> None:
        """Stop the threads and wait for them; a thread that starts late finds no work."""
        interrupt: BaseException | None = None
        while True:
            try:
                self._stop.append(True)
                self._run = None
                while len(self._ended) < len(self._begun):
                    self._wait()
                self._found, self._errors = {}, {}  # otherwise the last thread would drop them
                break
            except BaseException as error:  # raised after all threads have dropped the work
                interrupt = error
        try:
            if interrupt is not None:
                raise interrupt
        finally:
            del interrupt  # it refers to this frame

    def _wait(self) -> None:
        with suppress(Empty):
            self._news.get(timeout=0.1)

    def _in_a_thread(self, lane: int) -> None:
        self._begun.append(lane)  # first: leave() waits for this thread or has removed the work
        try:
            self._one(lane)
        except BaseException as error:
            self._errors[lane] = error
        finally:
            self._ended.append(lane)
            self._news.put(lane)

    def _one(self, lane: int) -> None:
        run = self._run
        if run is None:
            return
        _lanes.set(1)  # a pass inside a lane does not start lanes
        # OpenMP keeps this number per thread; without this call every product would start its own team
        torch.set_num_threads(1)
        self._found[lane] = run(lane)


@contextmanager
def lanes_only() -> Iterator[None]:
    """Give all threads to lanes, so that torch and BLAS do not start threads.

    Threads inside small operations spend most of their time waiting for each other, above all on a busy
    machine. Inside another such context this does nothing.
    """
    if _lanes.get() is not None:
        yield
        return
    threads = torch.get_num_threads()
    token = _lanes.set(threads)
    torch.set_num_threads(1)
    try:
        with _blas().limit(limits=1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(threads)
        _lanes.reset(token)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Let torch, and so all lanes, use ``count`` threads; ``None`` leaves their number as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()
