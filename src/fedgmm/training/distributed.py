"""Training on several processes of one owner, started by ``torchrun``: ``torch.distributed``.

Rank 0 leads: it alone reads files, runs the loop, prints and writes. It deals the clients to all ranks,
itself included, and hands each rank the training rows of its clients. In every round it broadcasts the
shared part, all ranks run ``client_step`` on their own clients, and the sums are reduced. The other ranks
follow: they wait for requests, and hold nothing but rows that cannot be made again. So a run can resume
with any number of ranks, and Ctrl-C concerns rank 0 alone.

:mod:`fedgmm.training.ranks` has the messages.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from fedgmm.core.gaussians import Gaussians
from fedgmm.core.params import Params
from fedgmm.core.sums import Sums
from fedgmm.data.dataset import LabelledRows
from fedgmm.data.federated import ClientRows
from fedgmm.methods.base import LEARNERS, AnyMethod, SupervisedMethod
from fedgmm.methods.centroids import Centroids, local_centroids, start_sample
from fedgmm.methods.gmm import Assignment, FederatedGMM, gaussian_of, sums_of_all
from fedgmm.model.model import FederatedModel
from fedgmm.model.saving import load, save
from fedgmm.nets.devices import resolve_device
from fedgmm.support.randomness import client_keys
from fedgmm.support.streaming import lanes_only
from fedgmm.training.build import build, build_warm_up, learner_network
from fedgmm.training.checkpoint import Phase
from fedgmm.training.in_process import LocalClients
from fedgmm.training.loop import Replies, named, step_of, unnamed
from fedgmm.training.options import TrainingOptions
from fedgmm.training.ranks import (
    ElsewhereError,
    LeaderError,
    Named,
    Ranks,
    interrupts_held,
    join,
    layout_of,
    reason_of,
)
from fedgmm.training.state_arrays import StateDecoder, hints_of, take_apart

Result = TypeVar("Result")


@contextmanager
def leading(ranks: Ranks) -> Iterator[bool]:
    """Lead the other ranks, on rank 0, and let them end afterwards; the value is false if nested."""
    with ranks.one_thread():
        if ranks.leads:
            yield False
            return
        ranks.leads, problem = True, None
        try:
            yield True
        except BaseException as error:
            problem = reason_of(error) if isinstance(error, Exception) else "interrupted"
            raise
        finally:
            ranks.leads = False
            model, ranks.result = ranks.result, None
            packed: dict[str, Tensor] = {}
            try:
                packed = _packed(model)
            except ValueError as error:  # names that no file can hold; rank 0 has its model
                problem = problem or str(error)
            if not ranks.lost:
                with interrupts_held():
                    ranks.announce({"kind": "end", "problem": problem}, packed)


def lead_or_follow(
    run: Callable[[], Result], after: Callable[[FederatedModel | None], Result], learner: Any = None
) -> Result:
    """Call ``run`` on rank 0, and meanwhile fulfil its requests on the other ranks.

    If this call is the outermost one and ``run`` returns a model, all ranks get it, and ``after`` makes
    the result of the other ranks from it. Only a ``learner`` that is a function must be given on them.
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


@dataclass
class Share:
    """The clients of one rank, and their part of every request."""

    ranks: Ranks  # all processes
    edges: list[int]  # the first client of each rank, and the number of clients
    rows: LabelledRows  # of the clients of this rank
    methods: dict[Phase, AnyMethod]  # of both phases
    personal: Any = None  # of these clients, as the last request left it

    def fulfil(self, facts: Mapping[str, Any], shared: Any) -> tuple[Any, Sums]:
        """Take part in a request; return all clients' personal parts and sums, on rank 0."""
        error, found = None, None
        try:
            found = self._own(facts, shared)
        except Exception as problem:  # rank 0 reports it; here, it may be one of many ranks
            error = problem
        personal, sums = found or (None, Sums({}))
        entries = len(next((sums[name] for name in sums.gathered), ()))
        edges = self.ranks.agree(entries, error)
        sums = self.ranks.total(sums, edges)
        if personal is None:
            return None, sums
        self.personal = personal
        return unnamed(self.ranks.collect(named(personal), self.edges)), sums

    def _own(self, facts: Mapping[str, Any], shared: Any) -> tuple[Any, Sums]:
        """Return the personal parts, if the request changes them, and the sums of this rank."""
        method, rows = self.methods[facts["phase"]], self.rows
        first, last = self.edges[self.ranks.rank : self.ranks.rank + 2]
        asked = facts.get("clients")
        clients = torch.arange(last - first)
        if asked is not None:
            inside = [code - first for code in asked if first <= code < last]
            clients = torch.tensor(inside, dtype=torch.int64)
        match facts["kind"]:
            case "finish" if last == first:
                return self.personal, Sums({})
            case "finish":
                return method.finish(shared, self.personal, rows), Sums({})
            case "step" if not len(clients):
                return self.personal, no_sums(method, rows.features.columns, rows.device)
            case "step":
                some = None if asked is None else clients
                return step_of(some, rows, method, shared, self.personal, facts["number"])
            case "all":
                return None, sums_of_all(rows.features, shared)
            case "assigned":
                assert method.mixture is not None
                exact = replace(method.mixture, aggregation="exact")
                how = facts["assignment"], facts["seed"]
                return None, exact.sums_of_assigned(rows.features, shared, *how)
        points, counts = torch.zeros(0, rows.features.columns).double(), torch.zeros(0).double()
        if len(clients):
            whole = len(clients) == last - first
            chosen = rows.features if whole else rows.features.select(clients)
            own = local_centroids(chosen, facts["clusters"], facts["seed"], facts["most_rows"])
            points, counts = torch.from_numpy(own.points), torch.from_numpy(own.counts)
        return None, Sums({"points": points, "counts": counts}, gathered=("points", "counts"))


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


# ---------------------------------------------------------------------- rank 0


@dataclass(frozen=True)
class RankClients(LocalClients):
    """Clients that are dealt to ranks, as rank 0 sees them; it holds all rows, too."""

    share: Share = field(kw_only=True)  # the clients of rank 0
    # the personal parts of all clients that the ranks hold already
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

    def start(self, method: AnyMethod, learner: Params | None) -> tuple[Any, Any]:
        """Return the method's start, from sums and centroids of all ranks."""
        rows = SimpleNamespace(
            features=_StartRows(self, method), names=self.rows.names, device=self.share.rows.device
        )
        return method.init(rows, learner)  # type: ignore[arg-type]

    def step(self, method: Any, shared: Any, personal: Any, number: int) -> Replies | None:
        """Run a round on all ranks."""
        clients = self.participation.clients(self.rows.names, number)
        if clients is not None and not len(clients):
            return None
        asked = None if clients is None else clients.tolist()
        facts = {"number": number, "clients": asked}
        return Replies(*self.request("step", method, shared, personal, **facts))

    def finish(self, method: AnyMethod, shared: Any, personal: Any) -> Any:
        """Run the work after the last round on all ranks."""
        if type(method).finish is SupervisedMethod.finish:
            return personal
        return self.request("finish", method, shared, personal)[0]

    def request(
        self, kind: str, method: AnyMethod, shared: Any, personal: Any = None, **facts: Any
    ) -> tuple[Any, Sums]:
        """Let all ranks fulfil a request; ``personal`` is sent unless they hold it already."""
        share, new = self.share, None
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        take_apart("shared", shared, tensors, values)
        phase = next(phase for phase, one in share.methods.items() if one is method)
        if not any(one is personal for one in (None, *self.known)):
            new = named(personal)
        self.known.clear()
        facts |= {"kind": kind, "phase": phase, "values": values}
        facts["personal"] = None if new is None else layout_of(new)
        with interrupts_held():
            share.ranks.announce(facts, tensors)
            if new is not None:
                share.ranks.hand_out(new, share.edges)
                share.personal = unnamed({n: v[: share.edges[1]] for n, v in new.items()})
            found = share.fulfil(facts, shared)
        self.known.append(found[0])
        return found


@dataclass(frozen=True)
class _StartRows:
    """The rows of all ranks, as the start of the Gaussians needs them."""

    clients: RankClients
    method: AnyMethod

    @property
    def columns(self) -> int:
        return self.clients.share.rows.features.columns

    @property
    def device(self) -> torch.device:
        return self.clients.share.rows.device

    def overall(self) -> Gaussians:
        mean = torch.zeros(1, self.columns, dtype=torch.float64, device=self.device)
        whole = gaussian_of(self._ask("all", mean), mean)
        return gaussian_of(self._ask("all", whole.means), whole.means)

    def centroids(self, clusters: int, seed: int) -> Centroids:
        chosen, most = start_sample(client_keys(self.clients.rows.names), clusters, seed)
        facts = {"clusters": clusters, "seed": seed, "most_rows": most, "clients": chosen.tolist()}
        found = self._ask("centroids", None, **facts)
        return Centroids(found["points"].numpy(), found["counts"].numpy())

    def assigned(
        self, method: FederatedGMM, current: Gaussians, assignment: Assignment, seed: int
    ) -> Sums:
        return self._ask("assigned", current, assignment=assignment, seed=seed)

    def _ask(self, kind: str, shared: Any, **facts: Any) -> Sums:
        return self.clients.request(kind, self.method, shared, **facts)[1]


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
    with ranks.one_thread(), interrupts_held(forget=True), warnings.catch_warnings():
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
            except ElsewhereError:  # rank 0 raises the reason
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
        here = {name: value.to(device) for name, value in parts.items()}
        rows = _rows_of(here, facts["names"][first:last], first)
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
    hint, _ = get_args(hints_of(type(method).init)["return"])
    hint = {"all": Tensor, "assigned": Gaussians, "centroids": None}.get(facts["kind"], hint)
    here = {name: value.to(device) for name, value in tensors.items()}
    shared = StateDecoder(here, facts["values"], net.parameter_shapes).decode(hint, "shared")
    with lanes_only() if device.type == "cpu" and net.hints.in_lanes else nullcontext():
        share.fulfil(facts, shared)
