"""The round loop: who takes part, step, look, stop."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedgmm.core.randomness import client_keys, row_uniforms
from fedgmm.methods.base import Data, DivergedError, Method, Personal, RoundInfo, Shared, Update

_PARTICIPATION_STREAM = 307

OnRound = Callable[[int, RoundInfo], None]
"""Called after every round with its number, counted from one, and what it told."""

Answers = Callable[[int, Hashable], bool]
"""Whether a client answers in a round."""

StateOf = TypeVar("StateOf")


@dataclass
class Run(Generic[Shared, Personal]):
    """Where a run stands. ``shared`` and ``personal`` are those of the last finished round.

    Attributes:
        shared: what the server broadcasts.
        personal: what clients keep, along a leading axis.
        history: one entry a round.
        round: number of the last finished round.
        judged: the stopping rules have looked at that round; Ctrl-C can come before they have.
        converged: a stopping rule was met.
        interrupted: Ctrl-C ended the run.
        diverged: what went wrong, if training produced numbers that are not finite.
    """

    shared: Shared
    personal: Personal
    history: list[RoundInfo] = field(default_factory=list)
    round: int = 0
    judged: bool = True
    converged: bool = False
    interrupted: bool = False
    diverged: str | None = None

    def finish_round(
        self, number: int, shared: Shared, personal: Personal, info: RoundInfo
    ) -> None:
        """Keep what a round made, all of it or nothing."""
        # plain assignments, and the only call comes last: Ctrl-C is not seen between them
        self.shared, self.personal, self.round, self.judged = shared, personal, number, False
        self.history.append(info)


StopRule = Callable[[int, Run[Shared, Personal]], bool]
"""Whether a run ends with the round of this number."""


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round.

    Attributes:
        fraction: share of the clients that the server asks, drawn anew every round.
        answers: which of them answer; ``None`` means all.
        seed: of the draw, which belongs to a client's name and the round.
    """

    fraction: float = 1.0
    answers: Answers | None = None
    seed: int = 0

    def clients(self, names: tuple[Hashable, ...], round_number: int) -> Tensor | None:
        """Sorted codes of the clients whose answers count; ``None`` means everybody."""
        if self.fraction >= 1.0 and self.answers is None:
            return None
        codes = np.arange(len(names))
        if self.fraction < 1.0:
            keys, zero = client_keys(names), np.zeros(len(names), dtype=np.int64)
            lots = row_uniforms(self.seed, _PARTICIPATION_STREAM + round_number, keys, zero)
            asked = max(1, round(self.fraction * len(names)))
            codes = np.sort(np.argsort(lots, kind="stable")[:asked])
        if self.answers is not None:
            there = [code for code in codes if self.answers(round_number, names[code])]
            codes = np.array(there, dtype=np.int64)
        return torch.from_numpy(codes.astype(np.int64))


def run_rounds(
    method: Method[Shared, Personal, Update, Data],
    shared: Shared,
    personal: Personal,
    rows: Data,
    *,
    max_rounds: int,
    tol: float | None,
    on_round: Iterable[OnRound] = (),
    participation: Participation | None = None,
    stop: StopRule[Shared, Personal] | None = None,
    first_round: int = 1,
) -> Run[Shared, Personal]:
    """Rounds from a start, until the mean log-likelihood settles or ``max_rounds`` is reached.

    Args:
        method: what a round does.
        shared: start of what the server broadcasts.
        personal: start of what clients keep.
        rows: the clients' rows.
        max_rounds: most rounds.
        tol: see :func:`continue_rounds`, as for all that follows.
        on_round: called after every round.
        participation: who takes part.
        stop: another stopping rule.
        first_round: number of the first round.
    """
    return continue_rounds(
        method,
        Run(shared, personal, round=first_round - 1),
        rows,
        last_round=first_round - 1 + max_rounds,
        tol=tol,
        on_round=on_round,
        participation=participation,
        stop=stop,
    )


def continue_rounds(
    method: Method[Shared, Personal, Update, Data],
    run: Run[Shared, Personal],
    rows: Data,
    *,
    last_round: int,
    tol: float | None,
    on_round: Iterable[OnRound] = (),
    participation: Participation | None = None,
    stop: StopRule[Shared, Personal] | None = None,
) -> Run[Shared, Personal]:
    """Go on with a run, in place, from wherever it stands.

    Ctrl-C ends the run after the last finished round, and so does divergence; the caller sees it in
    ``interrupted`` and ``diverged``.

    Args:
        method: what a round does.
        run: where the run stands; one that has converged stays as it is.
        rows: the clients' rows.
        last_round: number of the last round.
        tol: stop when the mean log-likelihood changes by less; ``None`` switches this rule off.
        on_round: called after every round, once the stopping rules have looked at it.
        participation: who takes part; ``None`` means everybody, always.
        stop: another stopping rule, asked after every round, also after one that ``tol`` ends.
    """
    participation = participation or Participation()
    callbacks = tuple(on_round)

    def judge() -> None:
        run.converged = tol is not None and settled(run.history, tol)
        if stop is not None and stop(run.round, run):
            run.converged = True
        run.judged = True
        for callback in callbacks:
            callback(run.round, run.history[-1])

    number = run.round
    try:
        if not run.judged:
            judge()
        for number in range(run.round + 1, last_round + 1):
            if run.converged:
                break
            clients = participation.clients(rows.names, number)
            if clients is not None and not len(clients):
                continue  # nobody answered: the round is lost, the model stays
            personal, update = _ask(method, run, rows, clients, number)
            shared, info = method.server_step(run.shared, update, number)
            run.finish_round(number, shared, personal, info)
            judge()
    except KeyboardInterrupt:
        run.interrupted = True
    except DivergedError as error:
        run.diverged = f"round {number}: {error}"
    return run


def settled(history: list[RoundInfo], tol: float) -> bool:
    """Whether the mean log-likelihood changed by less than ``tol`` in the last round."""
    return len(history) > 1 and abs(history[-1].log_likelihood - history[-2].log_likelihood) < tol


def _ask(
    method: Method[Shared, Personal, Update, Data],
    run: Run[Shared, Personal],
    rows: Data,
    clients: Tensor | None,
    number: int,
) -> tuple[Personal, Update]:
    """The step of the clients that take part; the others keep what they have."""
    if clients is None:
        return method.client_step(run.shared, run.personal, rows, number)
    own, update = method.client_step(
        run.shared, _take(run.personal, clients), rows.select(clients), number
    )
    return _put(run.personal, clients, own), update


def _take(state: StateOf, clients: Tensor) -> StateOf:
    """The state of some clients; state is a tensor or a dictionary of tensors with a client axis."""
    taken: Any = {name: value[clients] for name, value in _as_dict(state).items()}
    return taken if isinstance(state, dict) else taken[""]  # type: ignore[no-any-return]


def _put(state: StateOf, clients: Tensor, new: StateOf) -> StateOf:
    """``state`` with the clients' part replaced."""
    held, fresh = _as_dict(state), _as_dict(new)
    result: Any = {}
    for name, value in held.items():
        result[name] = value.clone()
        result[name][clients] = fresh[name]
    return result if isinstance(state, dict) else result[""]  # type: ignore[no-any-return]


def _as_dict(state: Any) -> dict[str, Tensor]:
    return state if isinstance(state, dict) else {"": state}
