"""Local training of stacked learners, as every method with gradient steps uses it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fedgmm.algorithms.base import DivergedError
from fedgmm.core.learners import (
    SGD,
    BatchPlan,
    expand_clients,
    flatten,
    plan_batches,
    stack,
    take_clients,
    train_local,
)
from fedgmm.core.networks import Network, Params
from fedgmm.data.dataset import LabelledRows

Schedule = Literal["constant", "cosine", "sqrt"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


@dataclass(frozen=True)
class LocalTraining:
    """How clients train their copies of the learners.

    Attributes:
        net: the network.
        sgd: the optimiser.
        schedule: of the learning rate over rounds.
        rounds: length of the run, for the cosine.
        seed: of shuffles and random starts.
        dtype: of the parameters.
        memory: most bytes for the copies of the learners that clients hold at once.
    """

    net: Network
    sgd: SGD = field(default_factory=SGD)
    schedule: Schedule = "constant"
    rounds: int = 100
    seed: int = 0
    dtype: torch.dtype = torch.float32
    memory: int = 512 * 1024 * 1024

    def options(self, round_number: int) -> SGD:
        """The optimiser of one round, counted from one."""
        match self.schedule:
            case "constant":
                factor = 1.0
            case "cosine":
                factor = 0.5 * (1.0 + math.cos(math.pi * (round_number - 1) / self.rounds))
            case _:
                factor = 1.0 / math.sqrt(round_number)
        return replace(self.sgd, lr=self.sgd.lr * factor)

    def initial(self, learners: int, device: torch.device, given: Params | None = None) -> Params:
        """Start of ``learners`` learners, ``(M, ...)``: independent draws, or copies of a given one."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = [self.net.initial(generator) for _ in range(learners)] if given is None else []
        params = stack(drawn or [given or {}] * learners)
        return {name: value.to(device, self.dtype) for name, value in params.items()}

    def plan(
        self, rows: LabelledRows, clients: Tensor, round_number: int, options: SGD
    ) -> BatchPlan:
        """Batches of some clients for one round."""
        orders = [rows.shuffled(self.seed, round_number, epoch) for epoch in range(options.epochs)]
        return plan_batches(rows.offsets, clients, orders, options.batch_size)

    def groups(self, rows: LabelledRows, params: Params) -> Iterator[Tensor]:
        """Codes of clients that have rows, in groups whose copies of ``params`` fit the memory."""
        one = sum(value.numel() * value.element_size() for value in params.values())
        size = max(1, self.memory // (4 * one))  # parameters, gradients, momentum, a temporary
        present = torch.nonzero(rows.features.rows_per_client > 0).flatten()
        for first in range(0, len(present), size):
            yield present[first : first + size]

    def train_shared(
        self, shared: Params, rows: LabelledRows, weights: Tensor | None, round_number: int
    ) -> Iterator[tuple[Tensor, Params]]:
        """Every client trains its copies of shared learners ``(M, ...)``.

        Yields:
            Client codes ``(A,)`` and their trained parameters ``(A, M, ...)``.
        """
        options = self.options(round_number)
        for clients in self.groups(rows, shared):
            start = expand_clients(shared, len(clients))
            plan = self.plan(rows, clients, round_number, options)
            anchor = start if options.proximal else None
            trained = self.train(start, rows, weights, plan, options, anchor)
            yield plan.clients, trained

    def train_personal(
        self, personal: Params, rows: LabelledRows, round_number: int, sgd: SGD | None = None
    ) -> Params:
        """Every client trains learners of its own, ``(C, M, ...)``."""
        options = sgd or self.options(round_number)
        result = {name: value.clone() for name, value in personal.items()}
        one = {name: value[0] for name, value in personal.items()}
        for clients in self.groups(rows, one):
            plan = self.plan(rows, clients, round_number, options)
            trained = self.train(take_clients(personal, plan.clients), rows, None, plan, options)
            for name, value in trained.items():
                result[name][plan.clients] = value
        return result

    def train(
        self,
        start: Params,
        rows: LabelledRows,
        weights: Tensor | None,
        plan: BatchPlan,
        options: SGD,
        anchor: Params | None = None,
    ) -> Params:
        """Run a plan and see to it that the outcome is finite."""
        with torch.random.fork_rng(devices=[]):  # dropout draws from the global generator
            torch.manual_seed(self.seed)
            trained = train_local(
                self.net, start, rows.inputs, rows.labels, weights, plan, options, anchor
            )
        check_finite(trained, plan.clients, rows)
        return trained


def check_finite(params: Params, clients: Tensor, rows: LabelledRows) -> None:
    """Raise :class:`DivergedError` for the first client whose ``(A, M, ...)`` are not finite."""
    finite = torch.isfinite(flatten(params)).all(-1).all(-1)
    if not bool(finite.all()):
        raise DivergedError(rows.names[int(clients[int(torch.nonzero(~finite)[0])])])
