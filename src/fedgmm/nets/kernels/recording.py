"""Work that an accelerator repeats, recorded once and replayed.

A round of stacked training is thousands of small kernels; starting them one by one takes longer than
running them. Rounds differ in numbers, not in shapes, so CUDA can record one and replay it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

Work = Callable[[Sequence[Tensor]], list[Tensor]]
"""Tensors to tensors: the same kernels whatever the numbers, and nothing waits for the card."""


_MOST_RECORDINGS = 8  # each holds its own copy of what is given
_MOST_KEYS = 10_000


@dataclass(frozen=True)
class _Recording:
    graph: Any
    given: list[Tensor]
    found: list[Tensor]
    kept: Any


class Recorder:
    """Recordings of one network, which share their memory.

    What a replay returns is valid until the next replay.
    """

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._recordings: dict[Hashable, _Recording] = {}
        self._pool: Any = None

    def run(self, key: Hashable, work: Work, given: Sequence[Tensor], kept: Any) -> list[Tensor]:
        """Do the work: the first time as it is, the second time recording, and then by replaying.

        Args:
            key: says all that decides which kernels run and which memory they touch, besides the
                shapes of what is given.
            work: what is done.
            given: its tensors.
            kept: held for as long as the recording, such as tensors whose memory it reads.
        """
        key = (key, tuple((tuple(value.shape), value.dtype) for value in given))
        if key not in self._seen:
            if len(self._seen) < _MOST_KEYS:
                self._seen.add(key)
            return work(given)
        if key not in self._recordings:
            if len(self._recordings) == _MOST_RECORDINGS:
                return work(given)
            self._recordings[key] = self._record(work, given, kept)
        recording = self._recordings[key]
        torch._foreach_copy_(recording.given, list(given))
        recording.graph.replay()
        return recording.found

    def _record(self, work: Work, given: Sequence[Tensor], kept: Any) -> _Recording:
        own = [value.clone() for value in given]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            found = work(own)
        return _Recording(graph, own, found, kept)


_RECORDERS: WeakKeyDictionary[Any, Recorder] = WeakKeyDictionary()


def recorder_of(network: Any) -> Recorder:
    """The recorder of a network; its memory goes when the network goes."""
    if network not in _RECORDERS:
        _RECORDERS[network] = Recorder()
    return _RECORDERS[network]


def forget_recordings(network: Any) -> None:
    """Give the memory of a network's recordings back, though the network itself is kept."""
    _RECORDERS.pop(network, None)
