"""The round loop: step, look, stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fedgmm.algorithms.base import Method, RoundInfo
from fedgmm.data.federated import ClientRows

Shared = TypeVar("Shared")
Personal = TypeVar("Personal")
Update = TypeVar("Update")

OnRound = Callable[[int, RoundInfo], None]
"""Called after every round with its number, counted from one, and what it told."""


@dataclass
class Run(Generic[Shared, Personal]):
    """Where a run stands. ``shared`` and ``personal`` are those of the last finished round."""

    shared: Shared
    personal: Personal
    history: list[RoundInfo] = field(default_factory=list)
    converged: bool = False
    interrupted: bool = False


def run_rounds(
    method: Method[Shared, Personal, Update],
    shared: Shared,
    personal: Personal,
    rows: ClientRows,
    *,
    max_rounds: int,
    tol: float,
    on_round: Iterable[OnRound] = (),
) -> Run[Shared, Personal]:
    """Rounds until the mean log-likelihood changes by less than ``tol`` or ``max_rounds`` is reached.

    Ctrl-C ends the run after the last finished round; the caller sees it in ``interrupted``.
    """
    run = Run(shared, personal)
    try:
        for number in range(1, max_rounds + 1):
            personal, update = method.client_step(run.shared, run.personal, rows)
            shared, info = method.server_step(run.shared, update)
            run.shared, run.personal = shared, personal
            run.history.append(info)
            for callback in on_round:
                callback(number, info)
            if number > 1 and abs(info.log_likelihood - run.history[-2].log_likelihood) < tol:
                run.converged = True
                break
    except KeyboardInterrupt:
        run.interrupted = True
    return run
