"""CUDA graphs: repeated work on a GPU is recorded once and replayed.

A round of stacked training is thousands of small kernels, and starting them one by one takes longer than
running them. Rounds differ in their numbers, not in their shapes, so CUDA can record one and replay it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

Work = Callable[[Sequence[Tensor]], list[Tensor]]
"""A function of tensors that runs the same kernels for all values and never waits for the GPU."""


_MAX_RECORDINGS = 8  # each recording holds its own copy of the inputs
_MAX_KEYS = 10_000


@dataclass(frozen=True)
class _Recording:
    graph: Any
    inputs: list[Tensor]
    outputs: list[Tensor]
    keep_alive: Any


class Recorder:
    """The CUDA graphs of one network, which share their memory.

    The tensors that a replay returns are valid until the next replay.
    """

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._recordings: dict[Hashable, _Recording] = {}
        self._pool: Any = None

    def run(
        self, key: Hashable, work: Work, inputs: Sequence[Tensor], keep_alive: Any
    ) -> list[Tensor]:
        """Return ``work(inputs)``: run it the first time, record it the second time, then replay it.

        Args:
            key: identifies everything, besides the shapes of the inputs, that decides which kernels run
                and which memory they access.
            work: the function to run.
            inputs: its arguments.
            keep_alive: objects to hold as long as the recording, such as tensors whose memory it reads.
        """
        key = (key, tuple((tuple(value.shape), value.dtype) for value in inputs))
        if key not in self._seen:
            if len(self._seen) < _MAX_KEYS:
                self._seen.add(key)
            return work(inputs)
        if key not in self._recordings:
            if len(self._recordings) == _MAX_RECORDINGS:
                return work(inputs)
            self._recordings[key] = self._record(work, inputs, keep_alive)
        recording = self._recordings[key]
        torch._foreach_copy_(recording.inputs, list(inputs))
        recording.graph.replay()
        return recording.outputs

    def _record(self, work: Work, inputs: Sequence[Tensor], keep_alive: Any) -> _Recording:
        own = [value.clone() for value in inputs]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = work(own)
        return _Recording(graph, own, outputs, keep_alive)


_RECORDERS: WeakKeyDictionary[Any, Recorder] = WeakKeyDictionary()


def recorder_of(network: Any) -> Recorder:
    """Return the recorder of a network; its memory is freed together with the network."""
    if network not in _RECORDERS:
        _RECORDERS[network] = Recorder()
    return _RECORDERS[network]


def forget_recordings(network: Any) -> None:
    """Free the memory of a network's recordings while the network itself is kept."""
    _RECORDERS.pop(network, None)
