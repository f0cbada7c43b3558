"""Local training of stacked learners by gradient steps, shared by all methods.

:func:`fedgmm.nets.sgd.train_local` makes the steps. This module groups clients, so that they fit into
memory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from fedgmm.core.params import (
    NOISE,
    Params,
    add_params,
    count_learners,
    expand_clients,
    stack,
    take_clients,
    weighted_sum,
)
from fedgmm.data.dataset import LabelledRows
from fedgmm.methods.base import LARGEST_WEIGHT, DivergedError
from fedgmm.nets.devices import accelerator_memory, out_of_memory_reason, use_less_memory
from fedgmm.nets.kernels.recording import forget_recordings
from fedgmm.nets.networks import Network
from fedgmm.nets.sgd import (
    SGD,
    BatchPlan,
    TrainingRows,
    noise_variances,
    padded_rows,
    plan_batches,
    train_local,
)
from fedgmm.support.streaming import accumulate
from fedgmm.wording import counted

Schedule = Literal["constant", "cooldown", "cosine", "sqrt"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
Result = TypeVar("Result")

_ROUND_STRIDE = 1_000_003  # between the seeds of rounds
_ROWS_OF_A_PRODUCT = 8  # GPUs multiply matrices of other sizes several times as slowly
_STEP_NUMBERS = 512 * 1024  # inputs of one step of a group: they stay in a core's cache
_ROWS_AT_ONCE = 512  # of a client, where residuals are computed
_COOLING_SHARE = 1 / 5  # of the rounds, at the end


@dataclass(frozen=True)
class LocalTraining:
    """Settings of local training, and the passes over clients."""

    net: Network
    sgd: SGD = field(default_factory=SGD)
    # of the learning rate over rounds; ``"cooldown"`` falls towards zero in the last fifth
    schedule: Schedule = "constant"
    rounds: int = 100  # length of the run, for schedules that know its end
    seed: int = 0  # of shuffles and random starts
    dtype: torch.dtype = torch.float32  # of the parameters
    # most bytes for the copies of the learners that clients hold at once, on a CPU
    memory: int = 512 * 1024 * 1024

    def options(self, round_number: int) -> SGD:
        """Return the optimiser of one round, counted from one."""
        return replace(self.sgd, lr=self.sgd.lr * self.rate_share(round_number))

    def rate_share(self, round_number: int) -> float:
        """Return the learning rate of a round, counted from one, as a share of the full one."""
        match self.schedule:
            case "constant":
                return 1.0
            case "cooldown":
                falling = max(1, round(self.rounds * _COOLING_SHARE))
                left = max(1, self.rounds + 1 - round_number)  # including this round
                return min(1.0, left / (falling + 1))
            case "cosine":
                done = min(round_number, self.rounds) - 1  # beyond the end the last rate stays
                return 0.5 * (1.0 + math.cos(math.pi * done / self.rounds))
            case _:
                return 1.0 / math.sqrt(round_number)

    def initial(self, learners: int, device: torch.device, given: Params | None = None) -> Params:
        """Return ``(M, ...)`` learners to start from: independent draws, or copies of a given one."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = [self.net.initial(generator) for _ in range(learners)] if given is None else []
        params = stack(drawn or [given or {}] * learners)
        return {name: value.to(device, self.dtype) for name, value in params.items()}

    def orders(self, rows: LabelledRows, round_number: int, options: SGD) -> list[Tensor]:
        """Return one shuffle of every client's rows per epoch, ``(N,)`` each."""
        return [rows.shuffled(self.seed, round_number, epoch) for epoch in range(options.epochs)]

    def groups(self, rows: LabelledRows, params: Params) -> list[Tensor]:
        """Return codes of clients that have rows, in groups that train side by side.

        Clients with the most rows come first, because clients of similar sizes need less padding.
        Copies of ``params`` fit the memory; on a CPU a step of the group fits the cache.
        """
        one = sum(value.numel() * value.element_size() for value in params.values())
        copies = 4 * one  # parameters, gradients, momentum, a temporary
        if rows.device.type == "cpu":
            size = max(1, self.memory // copies)
        else:
            padded = padded_rows(self.sgd.batch_size, _ROWS_OF_A_PRODUCT)
            learners = count_learners(params)
            batch = padded * learners * self.net.activations_per_row * self.dtype.itemsize
            size = max(1, accelerator_memory(rows.device) // (copies + batch))
            size = min(size, self.net.hints.max_clients or size)
        if self._in_lanes(rows):
            numbers = self.sgd.batch_size * math.prod(rows.inputs.shape[1:])
            size = min(size, max(1, _STEP_NUMBERS // numbers))
        counts = rows.features.rows_per_client
        present = torch.argsort(counts, descending=True, stable=True)[: int((counts > 0).sum())]
        return [present[first : first + size] for first in range(0, len(present), size)]

    def plan(
        self, rows: LabelledRows, clients: Tensor, orders: list[Tensor], options: SGD
    ) -> BatchPlan:
        """Return the batches of some clients; batches are even where their statistics matter."""
        even = self.net.hints.even_batches
        multiple = _ROWS_OF_A_PRODUCT if even and rows.device.type == "cuda" else 1
        size, augment = options.batch_size, options.augment
        return plan_batches(rows.offsets, clients, orders, size, even, augment, multiple)

    def _in_lanes(self, rows: LabelledRows) -> bool:
        """Return whether groups train on one thread each; large networks use all threads at once."""
        return rows.device.type == "cpu" and self.net.hints.in_lanes

    def over_groups(
        self,
        rows: LabelledRows,
        params: Params,
        round_number: int,
        visit: Callable[[list[Result], Tensor], None],
    ) -> list[Result]:
        """Call ``visit`` with a list to append to and each group's codes; return all results.

        If the memory of a GPU runs out, all groups start again in smaller ones. So ``visit`` must not
        change anything that it will need again.
        """
        groups = self.groups(rows, params)
        if self._in_lanes(rows):
            lanes = accumulate(groups, list[Result], visit, rows.device, True, in_turn=True)
            return [result for lane in lanes for result in lane]
        while True:
            results: list[Result] = []
            try:
                # dropout draws from the global generator, which gets its own state back afterwards
                with torch.random.fork_rng():
                    torch.manual_seed(self.seed + _ROUND_STRIDE * round_number)
                    for group in groups:
                        visit(results, group)
                return results
            except torch.cuda.OutOfMemoryError as error:
                reason = out_of_memory_reason(error)
            # outside the handler, which would keep the tensors that did not fit
            if len(groups[0]) == 1:
                raise torch.cuda.OutOfMemoryError(
                    f"The memory of {rows.device} is too small to train one client ({reason}); close "
                    "other programs that use it, or choose a smaller batch_size or device='cpu'."
                )
            del results
            forget_recordings(self.net)
            torch.cuda.empty_cache()
            too_large = len(groups[0])
            while len((groups := self.groups(rows, params))[0]) >= too_large:
                use_less_memory(rows.device)
            warnings.warn(
                f"The memory of {rows.device} ran out ({reason}); training continues with at most "
                f"{counted(len(groups[0]), 'client')} at a time.",
                stacklevel=2,
            )

    def train_shared(
        self,
        shared: Params,
        rows: LabelledRows,
        weights: Tensor | None,
        counts: Tensor,
        round_number: int,
    ) -> Params:
        """Train copies of shared learners on every client; return ``Σ_c γ_c(m) θ_mc``, ``(M, ...)``.

        ``shared`` are ``θ_m``, ``(M, ...)``, ``weights`` the responsibilities of the learners,
        ``(N, M)`` (``None`` means one), and ``counts`` ``γ_c(m)``, ``(C, M)``. The shuffle and the
        schedule depend on the round. Sums are float64.
        """
        options = self.options(round_number)
        orders = self.orders(rows, round_number, options)

        def visit(sums: list[Params], clients: Tensor) -> None:
            start = expand_clients(shared, len(clients))
            plan = self.plan(rows, clients, orders, options)
            anchor = start if options.proximal else None
            trained = self.train(start, rows, weights, plan, options, anchor)
            # of the learner that all clients share, because each fits its own rows better
            trained = self.with_noise(trained, rows, plan.clients, weights, at=start)
            sums.append(weighted_sum(trained, counts[plan.clients]))

        return add_params(self.over_groups(rows, shared, round_number, visit))

    def train_personal(
        self,
        personal: Params,
        rows: LabelledRows,
        round_number: int,
        sgd: SGD | None = None,
        *,
        averaged: bool = False,
    ) -> Params:
        """Train every client's own learners, ``(C, M, ...)``.

        ``averaged`` says that several clients started from the same learner and will be averaged, so
        ``σ²`` is that of the start, see :meth:`train_shared`.
        """
        options = sgd or self.options(round_number)
        orders = self.orders(rows, round_number, options)
        result = {name: value.clone() for name, value in personal.items()}

        def visit(_: list[None], clients: Tensor) -> None:
            plan = self.plan(rows, clients, orders, options)
            start = take_clients(personal, plan.clients)
            trained = self.train(start, rows, None, plan, options)
            trained = self.with_noise(trained, rows, plan.clients, at=start if averaged else None)
            for name, value in trained.items():
                result[name][plan.clients] = value  # groups do not overlap

        one = {name: value[0] for name, value in personal.items()}
        self.over_groups(rows, one, round_number, visit)
        return result

    def weighted(self, rows: LabelledRows, weights: Tensor | None = None) -> TrainingRows:
        """Return rows with responsibilities times their own weights, ``(N, M)``.

        ``None`` means the latter alone.
        """
        if weights is None and rows.weights is not None:
            weights = rows.weights.to(self.dtype)[:, None]
        return TrainingRows(rows.inputs, rows.labels, weights)

    def with_noise(
        self,
        params: Params,
        rows: LabelledRows,
        clients: Tensor,
        weights: Tensor | None = None,
        at: Params | None = None,
    ) -> Params:
        """Return parameters with the ``σ²`` of their residuals; learners of classes do not change.

        ``params`` are ``(A, M, ...)``, of ``A`` clients with these codes, and ``weights`` those of
        :meth:`weighted`. The residuals are those of the learners ``at``, if given.
        """
        if self.net.classes:
            return params
        everything = torch.arange(len(rows), device=rows.device)
        plan = plan_batches(rows.offsets, clients, [everything], _ROWS_AT_ONCE)
        variances = noise_variances(self.net, at or params, self.weighted(rows, weights), plan)
        return {**params, NOISE: variances.to(self.dtype)}

    def train(
        self,
        start: Params,
        rows: LabelledRows,
        weights: Tensor | None,
        plan: BatchPlan,
        options: SGD,
        anchor: Params | None = None,
    ) -> Params:
        """Train by a plan of batches, and raise if the result is not finite."""
        trained = train_local(self.net, start, self.weighted(rows, weights), plan, options, anchor)
        check_finite(trained, plan.clients, rows)
        return trained


def check_finite(params: Params, clients: Tensor, rows: LabelledRows) -> None:
    """Raise :class:`DivergedError` for the first client whose parameters are not finite."""
    largest = [
        torch.linalg.vector_norm((value.sqrt() if n == NOISE else value).flatten(1), math.inf, -1)
        for n, value in params.items()
        if value.numel()
    ]
    good = (torch.stack(largest) < LARGEST_WEIGHT).all(0)  # NaN is not less than anything
    if not bool(good.all()):
        raise DivergedError(rows.names[int(clients[int(torch.nonzero(~good)[0])])])
