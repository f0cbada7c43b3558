"""Ranks that are threads of this process, with the same protocol as processes of ``torchrun``."""

from __future__ import annotations

import queue
import threading

import torch

from fedgmm.training import distributed, in_process, ranks


class ThreadRanks(ranks.Ranks):
    """One rank; its four operations go through queues that all ranks share."""

    def __init__(self, rank, size, wires, barrier, sums):
        super().__init__(rank, size)
        self._wires, self._barrier, self._sums = wires, barrier, sums

    def _send(self, tensor, rank):
        self._wires[self.rank, rank].put(tensor.clone())

    def _receive(self, tensor, rank):
        sent = self._wires[rank, self.rank].get(timeout=20)
        assert (sent.dtype, sent.shape) == (tensor.dtype, tensor.shape)
        tensor.copy_(sent)

    def _broadcast(self, tensor):
        for rank in range(1, self.size) if not self.rank else ():
            self._send(tensor, rank)
        if self.rank:
            self._receive(tensor, 0)

    def _add(self, tensor):
        self._sums[self.rank] = tensor.clone()
        self._barrier.wait(timeout=20)
        tensor.copy_(torch.stack(list(self._sums)).sum(0))
        self._barrier.wait(timeout=20)


def on_ranks(monkeypatch, size, work):
    """Run ``work(rank)`` on several ranks and return what each returns or raises."""
    barrier, sums = threading.Barrier(size), [None] * size
    wires = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    here = threading.local()
    found = [None] * size

    def run(rank):
        here.ranks = ThreadRanks(rank, size, wires, barrier, sums)
        try:
            found[rank] = work(rank)
        except Exception as error:
            found[rank] = error

    with monkeypatch.context() as patched:
        for module in (distributed, ranks):
            patched.setattr(module, "join", lambda: here.ranks)
        patched.setattr(in_process, "several_ranks", lambda: True)
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(1, size)]
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            thread.join(timeout=30)
    return found
