"""The rounds of a federation: ask, check, combine, step, write down."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from fedgmm.core.params import Params
from fedgmm.core.randomness import client_keys
from fedgmm.data.dataset import LabelledRows
from fedgmm.federation.assembly import Assembly, Member
from fedgmm.federation.exchanges import Exchange, declared_rows, shared_validation
from fedgmm.federation.jobs import PROTOCOL, Job
from fedgmm.federation.messages import Message
from fedgmm.federation.remote_start import (
    RemoteRows,
    SiteStart,
    StartingRows,
    UnseenRows,
    checked_assigned,
    checked_start,
)
from fedgmm.federation.round_log import RoundLog
from fedgmm.federation.server_folder import ServerFolder
from fedgmm.federation.settings import FederationError
from fedgmm.federation.updates import checked_update
from fedgmm.federation.wire import Arrays, broadcast, frame_of, put_personal
from fedgmm.methods.centroids import start_sample
from fedgmm.methods.clustered import ClusteredShared, ClusteredUpdate
from fedgmm.methods.fedgmm import FedGMM
from fedgmm.methods.gmm import MixtureUpdate
from fedgmm.methods.local import Local
from fedgmm.training.checkpoint import AnyMethod, CheckpointError, Phase, Progress
from fedgmm.training.loop import Participation, Run, settled
from fedgmm.training.state_arrays import all_finite


@dataclass
class FederatedTraining:
    """One training with sites.

    Attributes:
        job: what is trained.
        assembly: the sites.
        folder: of the server.
        poll: seconds between two looks at who is there.
        notes: what is worth knowing.
        phase: the warm-up, or the training proper.
        first_round: number of the phase's first round.
        run_state: where it stands; ``personal`` is what a newcomer starts with.
        log: the rounds of both phases.
        stopped: why training ended before its last round.
    """

    job: Job
    assembly: Assembly
    folder: ServerFolder
    poll: float
    notes: list[str] = field(default_factory=list)
    phase: Phase = "main"
    first_round: int = 1
    run_state: Run[Any, Any] = field(default_factory=lambda: Run(None, None))
    log: RoundLog = field(default_factory=RoundLog)
    stopped: str | None = None
    _cluster_names: tuple[str, ...] = ()
    _sent: tuple[Any, dict[int | None, Arrays]] | None = None

    @property
    def method(self) -> AnyMethod:
        """The method of this phase."""
        return self.job.method_of(self.phase)

    @property
    def shared(self) -> Any:
        """What the server broadcasts."""
        return self.run_state.shared

    # ------------------------------------------------------------------ where it starts

    def start(self) -> None:
        """The method's start, or that of its warm-up."""
        if self._warm_up_rounds:
            self._first("warmup", done=0, learner=None)
        else:
            self._first("main", done=0, learner=None)

    @property
    def _warm_up_rounds(self) -> int:
        return min(self.job.options.warmup, self.job.options.rounds - 1)

    def _first(self, phase: Phase, done: int, learner: Params | None) -> None:
        self.phase, self.first_round = phase, done + 1
        for member in self.assembly.members.values():
            member.since, member.founder = 0, True
        rows = StartingRows(self._starting_rows(), self.assembly.names)
        shared, _ = self.method.init(cast("LabelledRows", rows), learner)
        self.run_state = Run(shared, self.method.newcomer(shared, learner), round=done)
        self._cluster_names = self.assembly.names
        self.log.add_start(self.assembly.take_traffic())
        self.save()

    def _starting_rows(self) -> RemoteRows | UnseenRows:
        frame, columns = frame_of(self.method), self.job.columns
        if not isinstance(frame, FedGMM) or not frame.density:
            return UnseenRows(columns)
        mixture, names = frame.gaussians, self.assembly.names
        clusters = mixture.components
        chosen, most = start_sample(client_keys(names), clusters, self.job.options.seed)
        asked = {names[code] for code in chosen.tolist()}
        told: dict[str, SiteStart] = {}

        def start_question(name: str) -> Message:
            facts = {"clusters": clusters, "most_rows": most if name in asked else 0}
            return self._message("start", {}, facts)

        def note_start(member: Member, answer: Message) -> None:
            rows = declared_rows(member, answer)
            told[member.name] = checked_start(answer, rows, columns, clusters)
            member.rows = rows

        self._exchange("start", start_question, note_start).run()

        def ask_assigned(arrays: Arrays) -> list[MixtureUpdate]:
            found: dict[str, MixtureUpdate] = {}
            kind, exact = mixture.covariance_type, mixture.dtype == torch.float64

            def note(member: Member, answer: Message) -> None:
                rows = declared_rows(member, answer)
                update = checked_assigned(answer, rows, clusters, kind, columns, exact)
                found[member.name], member.rows = update, rows

            self._exchange("start", lambda _: self._message("assigned", arrays, {}), note).run()
            return [found[name] for name in sorted(found)]

        return RemoteRows(columns, [told[name] for name in sorted(told)], ask_assigned)

    # ------------------------------------------------------------------ rounds

    def run(self) -> None:
        """All rounds that are left."""
        options = self.job.options
        if self.phase == "warmup":
            self._go_on(self._warm_up_rounds, tol=None)
            if self.stopped:
                return
            learner = {name: value[0] for name, value in self.shared.learners.items()}
            self._first("main", max(self.run_state.round, self._warm_up_rounds), learner)
        self._go_on(options.rounds, options.tol)

    def _go_on(self, last_round: int, tol: float | None) -> None:
        run = self.run_state
        while run.round < last_round and not run.converged and not self.stopped:
            self._round(run.round + 1)
            run.converged = tol is not None and settled(run.history, tol)
            self.save()

    def _round(self, number: int) -> None:
        run, started = self.run_state, time.perf_counter()
        self._admit_to_clusters()
        updates: dict[str, Any] = {}
        validation: dict[str, object] = {}

        def note(member: Member, answer: Message) -> None:
            rows = declared_rows(member, answer)
            updates[member.name] = checked_update(
                self.method,
                answer.arrays,
                rows=rows,
                columns=self.job.columns,
                precision=self.job.precision,
            )
            member.rows = rows
            if member.share_metrics:
                validation[member.name] = answer.facts.get("validation")

        exchange = self._exchange(
            f"round {number}", lambda name: self.question("round", name), note, number
        )
        failed = exchange.run()
        self.log.add_validation(number - 1, *shared_validation(validation))
        if failed is not None:
            self._stop(failed)
            return
        self._admit_to_clusters()
        # in the order of names, as one process has them
        update = self.method.combine([self._coded(name, updates[name]) for name in sorted(updates)])
        shared, info = self.method.server_step(run.shared, update, number)
        if not all_finite(shared):
            self._stop(f"round {number}: the model was not finite any more")
            return
        run.finish_round(number, shared, run.personal, info)
        for name in updates:
            self.assembly.members[name].since = number
        traffic, seconds = self.assembly.take_traffic(), time.perf_counter() - started
        line = self.log.add(number, info, len(updates), exchange.dropped, traffic, seconds)
        self.assembly.notify(line)

    def _stop(self, reason: str) -> None:
        self.stopped = self.job.options.after_divergence(reason)
        self.assembly.notify(self.stopped)

    def _exchange(
        self,
        what: str,
        question: Callable[[str], Message],
        note: Callable[[Member, Message], None],
        number: int | None = None,
    ) -> Exchange:
        """An exchange with everybody, or with those who take part in a round."""

        def chosen(names: tuple[str, ...]) -> tuple[str, ...]:
            return names if number is None else self._participants(names, number)

        late = bool(self.log.entries)
        return Exchange(self.assembly, what, question, note, chosen, self.poll, may_refuse=late)

    def _participants(self, names: tuple[str, ...], number: int) -> tuple[str, ...]:
        options = self.job.options
        codes = Participation(options.participation, None, options.seed).clients(names, number)
        return names if codes is None else tuple(names[code] for code in codes.tolist())

    def _code(self, name: str) -> int:
        """A client's place among the clusters, where there are any."""
        clustered = isinstance(self.shared, ClusteredShared)
        return self._cluster_names.index(name) if clustered else 0

    def _coded(self, name: str, update: Any) -> Any:
        """An update with its client's code, which may change while an exchange waits for others."""
        if not isinstance(update, ClusteredUpdate):
            return update
        return replace(update, clients=torch.tensor([self._code(name)]))

    def _admit_to_clusters(self) -> None:
        """Clients that are new begin in the largest cluster; codes follow the order of names."""
        shared, names = self.shared, self.assembly.names
        if not isinstance(shared, ClusteredShared):
            return
        known: list[str] = list(self._cluster_names)
        if tuple(known) == names:
            return
        largest = int(torch.bincount(shared.clusters).argmax()) if len(shared.clusters) else 0
        place = {name: int(shared.clusters[code]) for code, name in enumerate(known)}
        clusters = torch.tensor([place.get(name, largest) for name in names])
        self.run_state.shared = replace(shared, clusters=clusters)
        self._cluster_names = names

    # ------------------------------------------------------------------ questions

    def question(self, kind: str, name: str | None) -> Message:
        """A round, or the end of the run, for a member; the finished model for anybody."""
        self._admit_to_clusters()
        code = None if name is None else self._code(name)
        arrays = dict(self._broadcast(code))
        since = 0 if name is None else self.assembly.members[name].since
        if name is not None and since == 0 and self._starts_elsewhere(name):
            put_personal(arrays, self.run_state.personal)
        facts: dict[str, Any] = {
            "phase": self.phase,
            "round": self.run_state.round + (kind == "round"),
            "since": since,
        }
        if kind == "finish" and self.stopped:
            facts["notes"] = [f"Training stopped early: {self.stopped}"]
        return self._message(kind, arrays, facts)

    def _broadcast(self, code: int | None) -> Arrays:
        """What all clients get, or those of one cluster; made once a round, however many they are."""
        shared, key = self.shared, code
        if isinstance(shared, ClusteredShared) and code is not None:
            key = int(shared.clusters[code])
        if self._sent is None or self._sent[0] is not shared:
            self._sent = (shared, {})
        made = self._sent[1]
        if key not in made:
            made[key] = broadcast(self.method, shared, self.job.precision, code)
        return made[key]

    def _starts_elsewhere(self, name: str) -> bool:
        """Whether a client's first personal part cannot be told from what is broadcast now."""
        if isinstance(self.method, Local):
            return True
        first = self.run_state.round < self.first_round
        return self.assembly.members[name].founder and not first and self.shared is not None

    def _message(self, kind: str, arrays: Arrays, facts: Mapping[str, Any]) -> Message:
        common = {"protocol": PROTOCOL, "run": self.assembly.run, **self.job.facts}
        return Message(kind, arrays, {**common, **facts})

    # ------------------------------------------------------------------ checkpoints

    def save(self) -> None:
        """Write down where the run stands."""
        run = self.run_state
        members = {name: m.record() for name, m in self.assembly.members.items()}
        known: dict[str, Any] = {
            "federation": {
                "run": self.assembly.run,
                "job": self.job.record(),
                "members": members,
                "clusters": list(self._cluster_names),
                "notes": self.notes,
                "stopped": self.stopped,
                "start_bytes": self.log.start,
            }
        }
        progress = Progress(
            self.phase,
            run.round,
            run.shared,
            run.personal,
            self.log.numbers(),
            None,
            self.first_round,
            True,
            run.converged,
            known,
        )
        self.folder.save(progress, self.log.entries)

    @classmethod
    def resumed(cls, assembly: Assembly, folder: ServerFolder, poll: float) -> FederatedTraining:
        """Where a checkpoint stands.

        Raises:
            FederationError: a checkpoint that is damaged, or of another federation.
        """
        try:
            stored = folder.stored()
            assert stored is not None
            known = stored.facts["options"]["federation"]
            job = Job.from_record(known["job"], "")
            job = replace(job, table=replace(job.table, client=None))
            progress = stored.progress(job.method_of(stored.phase))
        except (CheckpointError, LookupError, TypeError, ValueError) as error:
            raise FederationError(
                f"Cannot go on from {folder.run.checkpoint}: {error} Choose another folder to start "
                "again."
            ) from None
        _check_same(assembly, job, folder)
        rounds = max(assembly.settings.config.options().rounds, progress.round)
        job = replace(job, options=replace(job.options, rounds=rounds))
        assembly.run = str(known["run"])
        for name, told in known["members"].items():
            assembly.members[name] = Member(
                name,
                rows=told["rows"],
                since=int(told["since"]),
                finished=bool(told["finished"]),
                founder=bool(told["founder"]),
                figures=told["figures"],
            )
        training = cls(job, assembly, folder, poll, list(known["notes"]), progress.phase)
        training.first_round, training.run_state = progress.first_round, progress.run
        entries = folder.history(progress.round) or [dict(e) for e in progress.history]
        training.log = RoundLog(entries, dict(known["start_bytes"]))
        training.stopped = known["stopped"]
        training._cluster_names = tuple(known["clusters"])
        return training


def _check_same(assembly: Assembly, job: Job, folder: ServerFolder) -> None:
    """Raise unless the settings are those of the run in the folder, but for rounds and device."""
    config = assembly.settings.config
    asked, then = config.options().record(), job.options.record()
    if "covariance_type" in config.open_choices():
        asked["covariance_type"] = then["covariance_type"]
    for name, value in asked.items():
        if name not in ("rounds", "device") and then[name] != value:
            raise FederationError(
                f"{folder.run.home} holds a federation with {name}={then[name]!r}, not {value!r}; give the "
                "same to go on, or choose another folder."
            )
    if config.table != job.table:
        raise FederationError(
            f"{folder.run.home} holds a federation whose tables were read with other options; give the "
            "same [data] to go on, or choose another folder."
        )
