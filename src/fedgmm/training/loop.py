"""The round loop: warm-up, start, rounds, stopping, patience, checkpoints and resume.

There is no other loop. :class:`Clients` hides where the clients are: stacked in this process
(:mod:`fedgmm.training.in_process`) or sites of a federation (:mod:`fedgmm.federation.remote`).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedgmm.core.params import Params, take_clients
from fedgmm.core.sums import Sums
from fedgmm.methods.base import (
    DENSITY,
    AnyMethod,
    DivergedError,
    Method,
    NamedRows,
    Personal,
    RoundInfo,
    Shared,
)
from fedgmm.support.randomness import client_keys, row_uniforms
from fedgmm.training.checkpoint import Best, Phase, Progress
from fedgmm.training.options import TrainingOptions
from fedgmm.training.state_arrays import all_finite

Callback = TypeVar("Callback")

Participates = Callable[[int, Hashable], bool]
"""Returns whether a client replies in a round."""

OnRound = Callable[[int, RoundInfo], None]
"""Called after every round with its number, counted from one, and its diagnostics."""

_PARTICIPATION_STREAM = 307
_GAIN = 1e-6  # of the validation log-likelihood that makes a round better than the best one

# EM leaves a symmetric start slowly: the log-likelihood hardly changes for some rounds, and then its
# gains grow. So a mixture must stand still for several rounds before it counts as converged.
_MIXTURES = ("fedgmm", "fedem", DENSITY)
_STILL_ROUNDS = 3
_STILL = 3e-5  # training log-likelihood gained per round, at most, by a mixture that stands still
_WORSE = 0.01  # validation log-likelihood lost by a mixture that overfits


@dataclass
class Run(Generic[Shared, Personal]):
    """The state of a run after its last finished round."""

    shared: Shared  # the server's broadcast
    personal: Personal  # the clients' own parts, along a leading axis
    history: list[RoundInfo] = field(default_factory=list)  # diagnostics, one per round
    round: int = 0  # number of the last finished round
    judged: bool = True  # the stopping rules have seen that round; Ctrl-C can come before they have
    converged: bool = False  # a stopping rule was met
    interrupted: bool = False  # Ctrl-C ended the run
    diverged: str | None = None  # the reason, if training produced numbers that are not finite


class Replies(NamedTuple):
    """The outcome of a round at the clients: their personal parts, and the total of their sums."""

    personal: Any
    sums: Sums


class Steps(Protocol):
    """Clients that can run a round."""

    def step(self, method: Any, shared: Any, personal: Any, number: int) -> Replies | None:
        """Run the round ``number`` on the clients that take part.

        ``None`` means that no client replied, so that the round is lost. A client whose numbers are not
        finite raises :class:`DivergedError`.
        """


class Clients(Steps, Protocol):
    """Clients that can be trained, in this process or elsewhere."""

    def start(self, method: AnyMethod, learner: Params | None) -> tuple[Any, Any]:
        """Return the shared and the personal parts that a phase starts with."""

    def accepted(self, number: int, info: RoundInfo) -> dict[str, Any]:
        """Note that a round counts; return facts for its entry in the history."""

    def score(self, method: AnyMethod, shared: Any, personal: Any) -> float:
        """Return the mean validation log-likelihood of the model that these parts make."""

    def remember_best(self) -> None:
        """Note that the last round is the best so far, so its personal parts are needed later."""


# ---------------------------------------------------------------------- clients in this process


@dataclass(frozen=True)
class Participation:
    """The clients that take part in a round."""

    fraction: float = 1.0  # share of the clients that the server asks, drawn again in every round
    answers: Participates | None = None  # which of them reply; ``None`` means all
    seed: int = 0  # of the draw, which depends on a client's name and the round

    def clients(self, names: tuple[Hashable, ...], round_number: int) -> Tensor | None:
        """Return sorted codes of the clients whose replies count; ``None`` means all."""
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


@dataclass(frozen=True)
class StackedClients:
    """Clients whose rows are stacked in this process, so one client step runs all of them."""

    rows: NamedRows  # of all clients
    # the clients that take part in a round
    participation: Participation = field(default_factory=Participation)

    def step(self, method: Any, shared: Any, personal: Any, number: int) -> Replies | None:
        """Run a round on the clients that take part; the others keep their personal parts."""
        clients = self.participation.clients(self.rows.names, number)
        if clients is not None and not len(clients):
            return None
        return step_of(clients, self.rows, method, shared, personal, number)


def step_of(
    clients: Tensor | None, rows: NamedRows, method: Any, shared: Any, personal: Any, number: int
) -> Replies:
    """Run a round on some clients, given by codes, or on all; the others keep their personal parts."""
    if clients is None:
        return Replies(*method.client_step(shared, personal, rows, number))
    parts = {name: value.clone() for name, value in named(personal).items()}
    taking_part = unnamed(take_clients(parts, clients))
    own, sums = method.client_step(shared, taking_part, rows.select(clients), number)
    for name, value in named(own).items():
        parts[name][clients] = value
    return Replies(unnamed(parts), sums)


def named(personal: Any) -> dict[str, Tensor]:
    """Return personal parts, a tensor or a dictionary with a client axis, as named tensors."""
    return personal if isinstance(personal, dict) else {"": personal}


def unnamed(tensors: dict[str, Tensor]) -> Any:
    """Return personal parts from the tensors of :func:`named`."""
    return tensors[""] if set(tensors) == {""} else tensors


# ---------------------------------------------------------------------- the rounds of a phase


class Store(Protocol):
    """A place for the progress of a run."""

    def save(self, progress: Progress) -> None:
        """Write the progress."""

    def load(self) -> Progress | None:
        """Return the progress of an earlier attempt, if there is one."""


StopRule = Callable[[Run[Any, Any]], bool]
"""Returns whether a run ends with its last round."""


def as_callbacks(on_round: Callback | Iterable[Callback] | None) -> tuple[Callback, ...]:
    """Return one callback, several or none as a tuple; anything else raises ``TypeError``."""
    if on_round is None:
        return ()
    several = isinstance(on_round, Iterable) and not callable(on_round)
    found: tuple[Any, ...] = tuple(on_round) if several else (on_round,)  # type: ignore[arg-type]
    for callback in found:
        if not callable(callback):
            raise TypeError(
                f"on_round must be a function or a list of functions, got {callback!r}."
            )
    return found


def run_rounds(
    method: Method[Shared, Personal, Any],
    run: Run[Shared, Personal],
    clients: Steps,
    *,
    last_round: int,
    tol: float | None,
    still_rounds: int = 1,
    on_round: Iterable[OnRound] = (),
    stop: StopRule | None = None,
) -> Run[Shared, Personal]:
    """Run the rounds that are left, in place, from the state of ``run``.

    Ctrl-C and divergence end the run after the last finished round; ``run.interrupted`` and
    ``run.diverged`` record them. A run that has converged stays as it is.

    Args:
        method: the two steps of a round.
        run: the state.
        clients: run the client steps.
        last_round: number of the last round.
        tol: stop when the mean log-likelihood changes by less; ``None`` switches this rule off.
        still_rounds: number of rounds in a row that must change it by less.
        on_round: called after every round, when the stopping rules have seen it.
        stop: another stopping rule, evaluated after every round, also after one that ``tol`` ends.
    """
    callbacks = tuple(on_round)

    def judge() -> None:
        run.converged = tol is not None and has_converged(run.history, tol, still_rounds)
        if stop is not None and stop(run):
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
            replies = clients.step(method, run.shared, run.personal, number)
            if replies is None:
                continue  # no client replied, so the round is lost and the model stays
            shared, info = method.server_step(run.shared, replies.sums, number)
            if not all_finite(shared):
                raise DivergedError
            # all of it or nothing: plain assignments, and the only call comes last, because Ctrl-C is
            # not seen between them
            personal = replies.personal
            run.shared, run.personal, run.round, run.judged = shared, personal, number, False
            run.history.append(info)
            judge()
    except KeyboardInterrupt:
        run.interrupted = True
    except DivergedError as error:
        run.diverged = f"round {number}: {error}"
    return run


def has_converged(history: list[RoundInfo], tol: float, rounds: int = 1) -> bool:
    """Return whether the mean log-likelihood changed by less than ``tol`` in each of the last rounds.

    If there are several ``rounds``, the changes must not be growing either.
    """
    if len(history) <= rounds:
        return False
    last = history[-1].log_likelihood
    # numbers so large that float64 cannot show a change of tol do not count as converged
    resolves = tol == 0 or abs(last) * sys.float_info.epsilon < tol
    return (
        resolves
        and all(change < tol for change in _changes(history, rounds))
        and (rounds == 1 or not _is_speeding_up(history))
    )


def _changes(history: list[RoundInfo], rounds: int) -> list[float]:
    """Return the sizes of the last changes of the mean log-likelihood."""
    values = [info.log_likelihood for info in history[-rounds - 1 :]]
    return [abs(after - before) for before, after in pairwise(values)]


def _is_speeding_up(history: list[RoundInfo]) -> bool:
    """Return whether the last change is larger than the one before, as when EM leaves a plateau."""
    before, last = _changes(history, 2)
    return last > before


@dataclass
class Training:
    """One training run: a warm-up if there is one, then the rounds of the method."""

    method: AnyMethod  # the method to train
    warm_up: AnyMethod  # FedAvg with the same options, for the rounds before
    clients: Clients  # run the client steps
    options: TrainingOptions  # decide the run
    # a trained learner to start from, ``(...)`` without a learner axis
    learner: Params | None = None
    store: Store | None = None  # keeps the progress; ``None`` keeps nothing
    save_every: int = 1  # rounds between two saved states
    until: int | None = None  # the last round of this call, if the options plan for more
    # called after every round with its entry of the history
    on_round: tuple[Callable[[dict[str, Any]], None], ...] = ()
    # returns further numbers for the entry of a round
    watch: Callable[[AnyMethod, Run[Any, Any]], dict[str, float]] | None = None
    # one entry per round, of both phases
    history: list[dict[str, Any]] = field(default_factory=list)
    best: Best | None = None  # the best round so far, if ``patience`` is set
    phase: Phase = "main"  # the warm-up or the method's own rounds
    first_round: int = 1  # number of the phase's first round
    run: Run[Any, Any] = field(default_factory=lambda: Run(None, None))  # the state of the phase

    @property
    def current(self) -> AnyMethod:
        """The method of this phase."""
        return self.warm_up if self.phase == "warmup" else self.method

    @property
    def ended_early(self) -> bool:
        """Whether Ctrl-C or divergence ended the run."""
        return self.run.interrupted or self.run.diverged is not None

    @property
    def last_round(self) -> int:
        """Number of the last round of this call."""
        return min(self.options.rounds, self.until or self.options.rounds)

    @property
    def warm_up_rounds(self) -> int:
        """Number of rounds of the warm-up; at least one round is left for the method."""
        return min(self.options.warmup, self.options.rounds - 1)

    # ------------------------------------------------------------------ from the start to the end

    def train(self) -> None:
        """Run all rounds that are left, from the stored progress or from a start."""
        if not self.resume():
            self.begin("warmup" if self.warm_up_rounds else "main", 0, self.learner)
        if self.phase == "warmup":
            self._rounds(min(self.warm_up_rounds, self.last_round), tol=None)
            if self.ended_early or self.last_round < self.warm_up_rounds:
                return
            self.begin_method()
        self._rounds(self.last_round, self.options.tol)

    def begin(self, phase: Phase, done: int, learner: Params | None, *, save: bool = True) -> None:
        """Start a phase after ``done`` rounds."""
        self.phase, self.first_round = phase, done + 1
        shared, personal = self.clients.start(self.current, learner)
        self.run = Run(shared, personal, round=done)
        if save:
            self.save()

    def begin_method(self, *, save: bool = True) -> None:
        """Start the method's own rounds from the learner of the warm-up."""
        learner = {name: value[0] for name, value in self.run.shared.learners.items()}
        self.begin("main", max(self.run.round, self.warm_up_rounds), learner, save=save)

    @property
    def outcome(self) -> tuple[Any, Any]:
        """The shared and the personal parts of the best round, or of the last one."""
        if self.best is not None:
            return self.best.shared, self.best.personal
        return self.run.shared, self.run.personal

    # ------------------------------------------------------------------ rounds

    def _rounds(self, last_round: int, tol: float | None) -> None:
        """Run the rounds that are left of a phase, and save now and then and at the end."""
        run = self.run
        before = self.history[-1]["seconds"] if self.history else 0.0
        started = time.perf_counter() - before
        saved = (run.round, run.judged)

        def judge(run: Run[Any, Any]) -> bool:
            entry = self._entry(started)
            if self.watch is not None:
                entry.update(self.watch(self.current, run))
            patience = self.options.patience
            if patience is None or self.phase == "warmup" or run.converged:
                return False
            return self._patience_is_over(entry, patience)

        def save(number: int, _: RoundInfo) -> None:
            nonlocal saved
            if number - saved[0] >= self.save_every:
                self.save()
                saved = (number, True)

        def report(_: int, __: RoundInfo) -> None:
            for callback in self.on_round:
                callback(self.history[-1])

        run_rounds(
            self.current,
            run,
            self.clients,
            last_round=last_round,
            tol=tol,
            still_rounds=_STILL_ROUNDS if self.options.algorithm in _MIXTURES else 1,
            on_round=[save, report],
            stop=judge,
        )
        if run.history:
            self._entry(started)  # Ctrl-C may have come between a round and its entry
        if saved != (run.round, run.judged):
            self.save()

    def _entry(self, started: float) -> dict[str, Any]:
        """Return the last round's entry of the history, and add it first if it is missing."""
        run = self.run
        if not self.history or self.history[-1]["round"] != run.round:
            info = run.history[-1]
            entry = {"round": float(run.round), "log_likelihood": info.log_likelihood}
            entry["seconds"] = time.perf_counter() - started
            self.history.append({**entry, **self.clients.accepted(run.round, info)})
        return self.history[-1]

    def _patience_is_over(self, entry: dict[str, Any], patience: int) -> bool:
        """Score the model of this round, remember it if it is the best, and return whether to stop.

        A mixture that is not better than its best round also has to be clearly worse, or its training
        log-likelihood has to stand still; otherwise it may be on a plateau that EM will leave.
        """
        run = self.run
        score = self.clients.score(self.current, run.shared, run.personal)
        score = score if math.isfinite(score) else -math.inf
        entry["validation_log_likelihood"] = score
        if self.best is None or score > self.best.score + _GAIN:
            self.best = Best(score, run.round, run.shared, run.personal)
            self.clients.remember_best()
        if run.round - self.best.round < patience:
            return False
        if self.options.algorithm not in _MIXTURES or score < self.best.score - _WORSE:
            return True
        rounds = max(patience, _STILL_ROUNDS)
        if len(run.history) <= rounds or _is_speeding_up(run.history):
            return False
        gained = run.history[-1].log_likelihood - run.history[-1 - rounds].log_likelihood
        return gained < rounds * _STILL

    # ------------------------------------------------------------------ checkpoints

    def save(self) -> None:
        """Write the progress to the store, if there is one."""
        if self.store is None:
            return
        run, first = self.run, self.first_round
        state = (self.phase, run.round, run.shared, run.personal, self.history, self.best, first)
        self.store.save(Progress(*state, run.judged, run.converged))

    def resume(self) -> bool:
        """Take the stored progress; return whether there is any."""
        progress = None if self.store is None else self.store.load()
        if progress is None:
            return False
        self.phase, self.first_round = progress.phase, progress.first_round
        self.history[:], self.best = progress.history, progress.best
        own = [entry for entry in self.history if entry["round"] >= self.first_round]
        infos = [RoundInfo(entry["log_likelihood"]) for entry in own]
        flags = progress.judged, progress.converged
        self.run = Run(progress.shared, progress.personal, infos, progress.round, *flags)
        return True
