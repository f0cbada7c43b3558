"""Processes of one ``torchrun``, and what they send each other: tensors and JSON.

Rank 0 leads and the others follow, see :mod:`fedgmm.training.distributed`. Messages go over gloo; sums on
GPUs are added by NCCL.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fedgmm.core.sums import Sums
from fedgmm.methods.base import DivergedError

if TYPE_CHECKING:
    from fedgmm.model.model import FederatedModel

Named = Mapping[str, Tensor]
Layout = dict[str, tuple[str, list[int]]]
"""Type and shape of tensors by name, for JSON."""

# rank 0 may read files for long; a process that ends is noticed at once
_PATIENCE = timedelta(days=7)


class RanksError(RuntimeError):
    """A rank that failed or was lost."""


class LeaderError(RanksError):
    """An error on rank 0, which reports it."""


class ElsewhereError(Exception):
    """A request that some rank could not fulfil, so all ranks drop it."""


# ---------------------------------------------------------------------- processes


class Ranks:
    """The processes of one ``torchrun``."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size  # the number of this process, and how many there are
        self.bytes = 0  # sent and received by this process so far
        self.leads = False  # this process is within ``leading``
        self.lost = False  # another process is gone, so nothing can be sent any more
        self.result: FederatedModel | None = None  # given to the ranks that follow, at the end
        self._nccl: Any = None
        self._busy = threading.RLock()

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Raise if another thread of this process trains, because the messages of both would mix."""
        if not self._busy.acquire(blocking=False):
            raise RanksError("Another thread trains already; under torchrun, train in one thread.")
        try:
            yield
        finally:
            self._busy.release()

    # the four operations, all on this object's own process groups

    def connect(self) -> None:
        """Join the process groups; every rank must call this."""
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_PATIENCE)
            atexit.register(dist.destroy_process_group)  # otherwise its threads abort the process
        self._gloo = dist.new_group(backend="gloo", timeout=_PATIENCE)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        without = torch.tensor(int(torch.cuda.device_count() < local))
        dist.all_reduce(without, group=self._gloo)
        if not without:  # every rank has a GPU of its own
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            self._nccl = dist.new_group(backend="nccl")

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, 0, group=self._gloo)

    def _add(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._gloo if tensor.device.type == "cpu" else self._nccl)

    def _send(self, tensor: Tensor, rank: int) -> None:
        dist.send(tensor, rank, group=self._gloo)

    def _receive(self, tensor: Tensor, rank: int) -> None:
        dist.recv(tensor, rank, group=self._gloo)

    def _do(self, operation: Callable[..., None], tensor: Tensor, *peer: int) -> Tensor:
        """Run one operation, count its bytes, and say in one sentence if a process is gone."""
        try:
            operation(tensor, *peer)
        except RuntimeError as error:
            self.lost = True
            raise RanksError(
                f"Rank {self.rank} lost the connection to another rank, which ended or was killed; look "
                f"at its messages, and start all ranks again ({str(error).splitlines()[0]})."
            ) from None
        self.bytes += tensor.numel() * tensor.element_size()
        return tensor

    # messages made of them

    def announce(self, facts: Mapping[str, Any], tensors: Named | None = None) -> None:
        """Send JSON and tensors from rank 0 to all other ranks."""
        tensors = {n: v.detach().cpu().contiguous() for n, v in (tensors or {}).items()}
        text = json.dumps({**facts, "tensors": layout_of(tensors, whole=True)}).encode()
        body = [value.flatten().view(torch.uint8) for value in tensors.values()]
        blob = torch.cat([torch.frombuffer(bytearray(text), dtype=torch.uint8), *body])
        self._do(self._broadcast, torch.tensor([len(text), len(blob)]))
        self._do(self._broadcast, blob)

    def listen(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what rank 0 sends next by :meth:`announce`."""
        sizes = self._do(self._broadcast, torch.zeros(2, dtype=torch.int64))
        start, length = sizes.tolist()
        blob = self._do(self._broadcast, torch.empty(length, dtype=torch.uint8))
        facts = json.loads(blob[:start].numpy().tobytes())
        tensors = {}
        for name, (kind, shape) in facts.pop("tensors").items():
            empty = torch.empty(shape, dtype=getattr(torch, kind))
            stop = start + empty.numel() * empty.element_size()
            tensors[name] = blob[start:stop].clone().view(empty.dtype).reshape(shape)
            start = stop
        return facts, tensors

    def hand_out(self, tensors: Named, edges: Sequence[int]) -> None:
        """Send rank ``r`` the entries from ``edges[r]`` to ``edges[r + 1]`` of the first axis."""
        for rank, (first, last) in enumerate(pairwise(edges)):
            for value in tensors.values():
                if rank and last > first:
                    self._do(self._send, value[first:last].detach().cpu().contiguous(), rank)

    def receive(self, layout: Layout, edges: Sequence[int]) -> dict[str, Tensor]:
        """Return the entries that rank 0 hands out to this rank."""
        entries = edges[self.rank + 1] - edges[self.rank]
        tensors = {
            name: torch.empty(entries, *shape, dtype=getattr(torch, kind))
            for name, (kind, shape) in layout.items()
        }
        for value in tensors.values():
            if entries:
                self._do(self._receive, value, 0)
        return tensors

    def collect(self, own: Named, edges: Sequence[int]) -> dict[str, Tensor]:
        """Return the entries of all ranks along the first axis, in order; on rank 0 only."""
        if self.rank:
            for value in own.values():
                if len(value):
                    self._do(self._send, value.detach().cpu().contiguous(), 0)
            return {}
        whole = {n: v.new_empty(edges[-1], *v.shape[1:], device="cpu") for n, v in own.items()}
        for rank, (first, last) in enumerate(pairwise(edges)):
            for name, value in whole.items():
                if not rank:
                    value[:last] = own[name]
                elif last > first:
                    self._do(self._receive, value[first:last], rank)
        return {name: value.to(own[name].device) for name, value in whole.items()}

    def total(self, sums: Sums, edges: Sequence[int]) -> Sums:
        """Return the sums over all ranks; gathered entries are in the order of ranks, on rank 0."""
        added = [name for name in sorted(sums) if name not in sums.gathered]
        values = {}
        if added:
            vector = torch.cat([sums[name].double().flatten() for name in added])
            vector = self._do(self._add, vector.cpu() if self._nccl is None else vector)
            parts = torch.split(vector, [sums[name].numel() for name in added])
            pairs = zip(added, parts, strict=True)
            values = {n: part.reshape(sums[n].shape).to(sums[n]) for n, part in pairs}
        entries = {name: sums[name] for name in sorted(sums.gathered)}
        return Sums({**values, **self.collect(entries, edges)}, sums.gathered)

    def agree(self, entries: int, error: Exception | None = None) -> list[int]:
        """Return the edges of all ranks' entries, and raise on all ranks if one of them failed."""
        reason = {"diverged": isinstance(error, ArithmeticError), "reason": reason_of(error)}
        text = b"" if error is None else json.dumps(reason).encode()
        table = torch.zeros(2, self.size, dtype=torch.int64)
        table[:, self.rank] = torch.tensor([entries, len(text)])
        counts, lengths = self._do(self._add, table).tolist()
        if not any(lengths):
            return [0, *np.cumsum(counts).tolist()]
        if self.rank and text:
            self._do(self._send, torch.frombuffer(bytearray(text), dtype=torch.uint8), 0)
        if self.rank:
            raise ElsewhereError
        texts = {0: text} if text else {}
        for rank in range(1, self.size):
            if lengths[rank]:
                blob = torch.empty(lengths[rank], dtype=torch.uint8)
                texts[rank] = self._do(self._receive, blob, rank).numpy().tobytes()
        if error is not None:
            raise error
        rank, found = next((rank, json.loads(text)) for rank, text in texts.items())
        if found["diverged"]:
            raise DivergedError(reason=found["reason"])
        raise RanksError(f"Rank {rank}: {found['reason']}")


def reason_of(error: Exception | None) -> str:
    """Return the text of an error."""
    return str(error) or type(error).__name__


def layout_of(tensors: Named, *, whole: bool = False) -> Layout:
    """Return types and shapes for JSON; without the first axis, unless ``whole``."""
    return {
        name: (str(value.dtype).removeprefix("torch."), list(value.shape[not whole :]))
        for name, value in tensors.items()
    }


@cache
def join() -> Ranks:
    """Return the ranks of this ``torchrun``, and connect to them in the first call."""
    ranks = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    ranks.connect()
    return ranks


@contextmanager
def interrupts_held(forget: bool = False) -> Iterator[None]:
    """Hold Ctrl-C back until an exchange is complete, because half of one would stop all ranks.

    Ranks that follow ``forget`` it, because Ctrl-C on rank 0 ends them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen and not forget:
        raise KeyboardInterrupt
