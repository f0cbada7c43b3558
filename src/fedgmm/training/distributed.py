"""Training on several processes of one owner, started by ``torchrun``: ``torch.distributed``.

Rank 0 leads: it alone reads files, runs the loop, prints and writes. It deals the clients to all ranks,
itself included, and hands each rank the training rows of its clients. In every round it broadcasts the
shared part, all ranks run ``client_step`` on their own clients, and the sums are reduced. The other ranks
follow: they wait for requests, and hold nothing but rows that cannot be made again. So a run can resume
with any number of ranks, and Ctrl-C concerns rank 0 alone.

Processes exchange tensors and JSON, over gloo; sums on GPUs are reduced by NCCL.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

from fedgmm.core.streaming import lanes_only
from fedgmm.core.sums import Sums
from fedgmm.data.dataset import LabelledRows
from fedgmm.data.federated import ClientRows
from fedgmm.methods.base import LEARNERS, AnyMethod, DivergedError, SupervisedMethod
from fedgmm.model.model import FederatedModel
from fedgmm.model.saving import load, save
from fedgmm.nets.devices import resolve_device
from fedgmm.training.build import build, build_warm_up, learner_network
from fedgmm.training.checkpoint import Phase
from fedgmm.training.local import LocalClients, Participation, StackedClients
from fedgmm.training.loop import Replies
from fedgmm.training.options import TrainingOptions
from fedgmm.training.state_arrays import StateDecoder, take_apart

Result = TypeVar("Result")
Named = Mapping[str, Tensor]
Layout = dict[str, tuple[str, list[int]]]
"""Type and shape of tensors by name, for JSON."""

_PATIENCE = timedelta(
    days=7
)  # rank 0 may read files for long; a process that ends is noticed at once


class RanksError(RuntimeError):
    """A rank that failed or was lost."""


class LeaderError(RanksError):
    """An error on rank 0, which reports it."""


class _ElsewhereError(Exception):
    """A request that some rank could not fulfil, so all ranks drop it."""


# ---------------------------------------------------------------------- processes


class Ranks:
    """The processes of one ``torchrun``.

    Attributes:
        rank: number of this process.
        size: how many there are.
        bytes: sent and received by this process so far.
        leads: this process is within :func:`leading`.
        lost: another process is gone, so nothing can be sent any more.
        result: given to the ranks that follow, at the end.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.bytes, self.leads, self.lost = 0, False, False
        self.result: FederatedModel | None = None

    # the four operations, all on this object's own process groups

    def connect(self) -> None:
        """Join the process groups; every rank must call this."""
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_PATIENCE)
            atexit.register(dist.destroy_process_group)  # otherwise its threads abort the process
        self._gloo = dist.new_group(backend="gloo", timeout=_PATIENCE)
        here = int(os.environ.get("LOCAL_RANK", 0))
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        own_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= local
        if own_gpu:
            torch.cuda.set_device(here)
        self._nccl = dist.new_group(backend="nccl") if own_gpu else None

    def _broadcast(self, tensor: Tensor) -> None:
        import torch.distributed as dist

        dist.broadcast(tensor, 0, group=self._gloo)

    def _add(self, tensor: Tensor) -> None:
        import torch.distributed as dist

        on_gpu = tensor.device.type == "cuda" and self._nccl is not None
        dist.all_reduce(tensor, group=self._nccl if on_gpu else self._gloo)

    def _send(self, tensor: Tensor, rank: int) -> None:
        import torch.distributed as dist

        dist.send(tensor, rank, group=self._gloo)

    def _receive(self, tensor: Tensor, rank: int) -> None:
        import torch.distributed as dist

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
        vector = torch.cat([sums[name].double().flatten() for name in added])
        on_gpu = vector.device.type != "cpu" and getattr(self, "_nccl", None) is not None
        parts = self._do(self._add, vector if on_gpu else vector.cpu()).to(vector.device)
        sizes = [sums[name].numel() for name in added]
        values = {
            name: part.reshape(sums[name].shape).to(sums[name].dtype)
            for name, part in zip(added, torch.split(parts, sizes), strict=True)
        }
        entries = {name: sums[name] for name in sorted(sums.gathered)}
        return Sums({**values, **self.collect(entries, edges)}, sums.gathered)

    def agree(self, entries: int, error: Exception | None = None) -> list[int]:
        """Return the edges of all ranks' entries, and raise on all ranks if one of them failed."""
        reason = {"diverged": isinstance(error, ArithmeticError), "reason": _reason(error)}
        text = b"" if error is None else json.dumps(reason).encode()
        table = torch.zeros(2, self.size, dtype=torch.int64)
        table[:, self.rank] = torch.tensor([entries, len(text)])
        counts, lengths = self._do(self._add, table).tolist()
        if not any(lengths):
            return [0, *np.cumsum(counts).tolist()]
        if self.rank and text:
            self._do(self._send, torch.frombuffer(bytearray(text), dtype=torch.uint8), 0)
        if self.rank:
            raise _ElsewhereError
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


def _reason(error: Exception | None) -> str:
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
def leading(ranks: Ranks) -> Iterator[bool]:
    """Lead the other ranks, on rank 0, and let them end afterwards; the value is false if nested."""
    if ranks.leads:
        yield False
        return
    ranks.leads = True
    problem: str | None = None
    try:
        yield True
    except BaseException as error:
        problem = _reason(error) if isinstance(error, Exception) else "interrupted"
        raise
    finally:
        ranks.leads = False
        model, ranks.result = ranks.result, None
        if not ranks.lost:
            with interrupts_held():
                ranks.announce({"kind": "end", "problem": problem}, _packed(model))


def lead_or_follow(
    run: Callable[[], Result], after: Callable[[FederatedModel | None], Result], learner: Any = None
) -> Result:
    """Call ``run`` on rank 0, and meanwhile fulfil its requests on the other ranks.

    Args:
        run: trains; if this call is the outermost one and the result is a model, all ranks get it.
        after: makes the result of the other ranks, from the model of rank 0 if there is one.
        learner: the learner of the other ranks if it is a function, which cannot be sent.
    """
    ranks = join()
    if ranks.rank:
        return after(follow(ranks, learner))
    with leading(ranks) as outermost:
        found = run()
        if outermost and isinstance(found, FederatedModel):
            ranks.result = found
    return found


def _packed(model: FederatedModel | None) -> dict[str, Tensor]:
    """Return the files of a saved model as bytes."""
    if model is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder)
        return {
            path.name: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            for path in Path(folder).iterdir()
        }


def _unpacked(files: Named, learner: Any) -> FederatedModel | None:
    """Return the model that :func:`_packed` packed."""
    if not files:
        return None
    with tempfile.TemporaryDirectory() as folder:
        for name, value in files.items():
            (Path(folder) / name).write_bytes(value.numpy().tobytes())
        return load(folder, learner=None if isinstance(learner, str) else learner)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back until an exchange is complete, because half of one would stop all ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen:
        raise KeyboardInterrupt


# ---------------------------------------------------------------------- clients of a rank


def deal(rows_per_client: Sequence[int], ranks: int) -> list[int]:
    """Return the first client of each rank, and the number of clients as the last entry.

    Ranks have consecutive clients and about as many rows as each other. The first has at least one
    client; others have none if there are too few.
    """
    total = np.concatenate([[0], np.cumsum(rows_per_client)])
    wanted = total[-1] * np.arange(1, ranks) / ranks
    inner = np.searchsorted(total, wanted)
    inner -= (wanted - total[np.maximum(inner - 1, 0)] < total[inner] - wanted) & (inner > 0)
    return [0, *np.maximum(inner, 1).tolist(), len(rows_per_client)]


@dataclass(frozen=True)
class _Asked(Participation):
    """The clients that take part, as rank 0 has drawn them; ``None`` means all."""

    codes: Tensor | None = None

    def clients(self, names: tuple[Any, ...], round_number: int) -> Tensor | None:
        return self.codes


@dataclass
class Share:
    """The clients of one rank, and their part of every request.

    Attributes:
        ranks: all processes.
        edges: the first client of each rank, and the number of clients.
        rows: of the clients of this rank.
        methods: of both phases.
        personal: of these clients, as the last request left it.
    """

    ranks: Ranks
    edges: list[int]
    rows: LabelledRows
    methods: dict[Phase, AnyMethod]
    personal: Any = None

    def fulfil(self, facts: Mapping[str, Any], shared: Any) -> tuple[Any, Sums]:
        """Run a step or the work after the last round; return all clients' parts on rank 0."""
        method, error, found = self.methods[facts["phase"]], None, None
        try:
            found = self._own(method, facts, shared)
        except Exception as problem:  # rank 0 reports it; here, it may be one of many ranks
            error = problem
        personal, sums = found or (self.personal, Sums({}))
        entries = len(next((sums[name] for name in sums.gathered), ()))
        edges = self.ranks.agree(entries, error)
        if sums:
            sums = self.ranks.total(sums, edges)
        self.personal = personal
        return unnamed(self.ranks.collect(named(personal), self.edges)), sums

    def _own(self, method: AnyMethod, facts: Mapping[str, Any], shared: Any) -> tuple[Any, Sums]:
        """Return the personal parts and the sums of the clients of this rank."""
        rows, personal = self.rows, self.personal
        if facts["kind"] == "finish":
            return (method.finish(shared, personal, rows) if len(rows.names) else personal), Sums(
                {}
            )
        clients = facts["clients"]
        first, last = self.edges[self.ranks.rank : self.ranks.rank + 2]
        if clients is not None:
            inside = [code - first for code in clients if first <= code < last]
            clients = torch.tensor(inside, dtype=torch.int64)
        if first == last or (clients is not None and not len(clients)):
            return personal, no_sums(method, rows.features.columns, rows.device)
        stacked = StackedClients(rows, _Asked(codes=clients))
        replies = stacked.step(method, shared, personal, facts["number"])
        assert replies is not None
        return replies.personal, replies.sums


def no_sums(method: AnyMethod, columns: int, device: torch.device) -> Sums:
    """Return the sums of no client: zeros, and no gathered entries."""
    declared = method.declare_sums(columns)
    gathered = [name for name, one in declared.items() if one.gathered]
    zeros = {n: torch.zeros(one.shape, dtype=torch.float64) for n, one in declared.items()}
    for name in gathered:
        if name.startswith(LEARNERS):
            zeros[name] = zeros[name].to(method.training.dtype)
    one = method.of_client(Sums(zeros, gathered), 0)
    values = {name: value[:0] if name in one.gathered else value for name, value in one.items()}
    return Sums({name: value.to(device) for name, value in values.items()}, one.gathered)


def named(personal: Any) -> dict[str, Tensor]:
    """Return personal parts as named tensors."""
    return personal if isinstance(personal, dict) else {"": personal}


def unnamed(tensors: dict[str, Tensor]) -> Any:
    """Return personal parts from the tensors of :func:`named`."""
    return tensors[""] if set(tensors) == {""} else tensors


# ---------------------------------------------------------------------- rank 0


@dataclass(frozen=True)
class RankClients(LocalClients):
    """Clients that are dealt to ranks, as rank 0 sees them; it holds all rows, too, for the start.

    Attributes:
        share: the clients of rank 0.
        known: the personal parts of all clients that the ranks hold already.
    """

    share: Share = field(kw_only=True)
    known: list[Any] = field(default_factory=list)

    @classmethod
    def dealt(
        cls,
        ranks: Ranks,
        local: LocalClients,
        options: TrainingOptions,
        classes: int,
        methods: dict[Phase, AnyMethod],
    ) -> RankClients:
        """Deal clients to ranks and hand out their training rows."""
        rows: LabelledRows = local.rows  # type: ignore[assignment]
        edges = deal(rows.features.rows_per_client.tolist(), ranks.size)
        places = rows.offsets[torch.tensor(edges, device=rows.device)].tolist()
        parts = {"inputs": rows.inputs, "labels": rows.labels, "codes": rows.codes}
        if not rows.features_are_inputs:
            parts["features"] = torch.cat(rows.features.chunks)
        if rows.weights is not None:
            parts["weights"] = rows.weights
        facts = {
            "kind": "job",
            "options": options.record(),
            "classes": classes,
            "names": [n if isinstance(n, str | int) else str(n) for n in rows.names],
            "edges": edges,
            "places": places,
            "rows": layout_of(parts),
        }
        with interrupts_held():
            ranks.announce(facts)
            ranks.hand_out(parts, places)
            ranks.agree(0)
        own = _rows_of({n: v[: places[1]] for n, v in parts.items()}, rows.names[: edges[1]], 0)
        share = Share(ranks, edges, own, methods)
        return cls(local.rows, local.participation, models=local.models, share=share)

    def step(self, method: Any, shared: Any, personal: Any, number: int) -> Replies | None:
        """Run a round on all ranks."""
        clients = self.participation.clients(self.rows.names, number)
        if clients is not None and not len(clients):
            return None
        asked = None if clients is None else clients.tolist()
        facts = {"kind": "step", "number": number, "clients": asked}
        return Replies(*self._request(facts, method, shared, personal))

    def finish(self, method: AnyMethod, shared: Any, personal: Any) -> Any:
        """Run the work after the last round on all ranks."""
        if type(method).finish is SupervisedMethod.finish:
            return personal
        return self._request({"kind": "finish"}, method, shared, personal)[0]

    def _request(
        self, facts: dict[str, Any], method: AnyMethod, shared: Any, personal: Any
    ) -> tuple[Any, Sums]:
        share, parts = self.share, named(personal)
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        take_apart("shared", shared, tensors, values)
        phase = next(phase for phase, one in share.methods.items() if one is method)
        new = not any(one is personal for one in self.known)
        self.known.clear()
        facts = {**facts, "phase": phase, "values": values}
        facts["personal"] = layout_of(parts) if new else None
        with interrupts_held():
            share.ranks.announce(facts, tensors)
            if new:
                share.ranks.hand_out(parts, share.edges)
                share.personal = unnamed({n: v[: share.edges[1]] for n, v in parts.items()})
            found = share.fulfil(facts, shared)
        self.known.append(found[0])
        return found


def _rows_of(parts: Named, names: Sequence[Any], first: int) -> LabelledRows:
    """Return the rows of a rank, whose first client has the code ``first`` on rank 0."""
    inputs = parts["inputs"]
    seen = parts.get("features", inputs.flatten(1))
    features = ClientRows((seen,), parts["codes"] - first, tuple(names), parts.get("weights"))
    return LabelledRows(features, inputs, parts["labels"], "features" not in parts)


# ---------------------------------------------------------------------- the other ranks


def follow(ranks: Ranks, learner: Any = None) -> FederatedModel | None:
    """Fulfil the requests of rank 0 until it ends, and return its model if it sends one.

    Raises:
        LeaderError: rank 0 failed.
        RanksError: a rank is gone.
    """
    share: Share | None = None
    with _ignoring_interrupts(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 0 gives the same warnings
        while True:
            facts, tensors = ranks.listen()
            if facts["kind"] == "end":
                break
            try:
                if facts["kind"] == "job":
                    share = _share(ranks, facts, learner)
                else:
                    assert share is not None
                    _fulfil(share, facts, tensors)
            except _ElsewhereError:  # rank 0 raises the reason
                continue
    if facts["problem"] is not None:
        raise LeaderError(f"Rank 0: {facts['problem']}")
    return _unpacked(tensors, learner)


def _share(ranks: Ranks, facts: dict[str, Any], learner: Any) -> Share | None:
    """Return the share of this rank in a training run, with the rows that rank 0 hands out."""
    parts = ranks.receive(facts["rows"], facts["places"])
    first, last = facts["edges"][ranks.rank : ranks.rank + 2]
    error, share = None, None
    try:
        known = {one.name for one in fields(TrainingOptions)}
        options = TrainingOptions(**{k: v for k, v in facts["options"].items() if k in known})
        if options.learner == "custom":
            if learner is None or isinstance(learner, str):
                raise ValueError(
                    "the learner is a function, which cannot be sent; give it to train()."
                )
            options = replace(options, learner=learner)
        device = resolve_device(options.device)
        rows = _rows_of(
            {name: value.to(device) for name, value in parts.items()},
            facts["names"][first:last],
            first,
        )
        net = learner_network(options, tuple(rows.inputs.shape[1:]), np.arange(facts["classes"]))
        methods: dict[Phase, AnyMethod] = {
            "main": build(options, net),
            "warmup": build_warm_up(options, net),
        }
        share = Share(ranks, facts["edges"], rows, methods)
    except Exception as problem:  # rank 0 reports it
        error = problem
    ranks.agree(0, error)
    return share


def _fulfil(share: Share, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Take part in one request."""
    method, device = share.methods[facts["phase"]], share.rows.device
    net = method.training.net
    if facts["personal"] is not None:
        parts = share.ranks.receive(facts["personal"], share.edges)
        share.personal = unnamed({name: value.to(device) for name, value in parts.items()})
    hint, _ = get_args(get_type_hints(type(method).init)["return"])
    here = {name: value.to(device) for name, value in tensors.items()}
    shared = StateDecoder(here, facts["values"], net.parameter_shapes).decode(hint, "shared")
    with lanes_only() if device.type == "cpu" and net.hints.in_lanes else nullcontext():
        share.fulfil(facts, shared)


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Leave Ctrl-C to rank 0, which ends the others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
