"""The server side of a federation: it knows questions and answers, but nothing of how they travel.

A run is: wait for the sites, agree on columns, start, rounds, the end. After every round a checkpoint
is written. A server that is started again goes on with the next round, and ends as if nothing had
happened.

============  ================================================================================
question      what a site answers, and so all that the server learns of it
============  ================================================================================
``hello``     its name; once, while all agree: rows, and for each column counts of missing values
              and categories, or mean and squares (:mod:`fedgmm.data.tables.summaries`)
``start``     overall means and variances, a few centroids with at least two rows each; FedGMM only
``assigned``  counts and moments of the rows nearest to each mean of the start; FedGMM only
``round``     ``γ_c`` (which is ``N_c π_c``), moments, log-likelihood, and gradient and Hessian sums
              or trained learners; the accuracy on validation rows only if the site shares it
``finish``    nothing; figures of its test rows only if the site shares them
``model``     nothing: a site that only adapts takes the finished model
``refused``   nothing: the site is told why it cannot take part
============  ================================================================================
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fedgmm.federation.assembly import Assembly, Notify
from fedgmm.federation.messages import Message
from fedgmm.federation.preparation import check_options, prepare
from fedgmm.federation.rounds import FederatedTraining
from fedgmm.federation.server_folder import Outcome, ServerFolder, check_home, checked_figures
from fedgmm.federation.settings import FederationError, FederationSettings
from fedgmm.federation.shared_model import shared_model
from fedgmm.federation.transport import Failure, Sites
from fedgmm.runs.folder import RunError, RunFolder
from fedgmm.training.checkpoint import CheckpointError

__all__ = [
    "Failure",
    "FederationError",
    "FederationSettings",
    "Sites",
    "check_start",
    "run_federation",
    "serve_model",
]

_POLL = 0.5  # seconds between two looks at who is there


def run_federation(
    settings: FederationSettings, sites: Sites, out: Path, *, notify: Notify = lambda _: None
) -> None:
    """Train with the sites and write the run folder; goes on with what an earlier attempt left.

    Args:
        settings: what decides the federation.
        sites: the transport.
        out: the run folder.
        notify: called with a line about what happens.

    Raises:
        FederationError: why it cannot start or go on, in plain words.
    """
    folder = ServerFolder(Path(out))
    try:
        with folder.run.lock():
            check_home(folder.run)
            if folder.run.is_finished:
                notify("the run is finished already")
                return
            _Server(settings, sites, folder, notify).run_or_dismiss()
    except (RunError, CheckpointError) as error:
        raise FederationError(str(error)) from None


def check_start(settings: FederationSettings, out: Path) -> None:
    """Look at everything that can be known before any door is opened or any file is written.

    Raises:
        FederationError: options that no federation can have, or a folder with other things.
    """
    check_home(RunFolder(Path(out)))
    check_options(settings)


def serve_model(
    settings: FederationSettings,
    sites: Sites,
    out: Path,
    *,
    notify: Notify = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Hand the model of a finished run to sites that join later, or missed its end, until ``stop()``.

    Raises:
        FederationError: there is no finished run.
    """
    folder = ServerFolder(Path(out))
    if not folder.run.is_finished or folder.stored() is None:
        raise FederationError(f"{out} holds no finished federation.")
    server = _Server(settings, sites, folder, notify)
    training = server.resume()
    while not stop():
        if not server.hand_out(training):
            time.sleep(_POLL)


@dataclass
class _Server:
    """One run of the server."""

    settings: FederationSettings
    sites: Sites
    folder: ServerFolder
    notify: Notify
    assembly: Assembly = field(init=False)

    def __post_init__(self) -> None:
        self.assembly = Assembly(self.settings, self.sites, self.notify)
        self.notify = self.assembly.notify

    def run_or_dismiss(self) -> None:
        """Run; where that cannot be, the sites need not wait for ever: they are told why."""
        try:
            self.run()
        except FederationError as error:
            with contextlib.suppress(FederationError):  # the transport itself may be the reason
                self.assembly.dismiss(str(error))
            raise

    def run(self) -> None:
        """Everything from the first greeting to the report."""
        if self.folder.stored() is None:
            training = self._begin()
        else:
            training = self.resume()
            self.notify(f"going on after round {training.run_state.round}")
            self.assembly.reunite(_POLL)
        training.run()
        self._finish(training)

    def _begin(self) -> FederatedTraining:
        self.assembly.run = secrets.token_hex(8)
        prepared = prepare(self.assembly, _POLL)
        self.folder.begin(self.settings, prepared.job)
        training = FederatedTraining(
            prepared.job, self.assembly, self.folder, _POLL, prepared.notes
        )
        training.start()
        return training

    def resume(self) -> FederatedTraining:
        """Where the checkpoint stands."""
        return FederatedTraining.resumed(self.assembly, self.folder, _POLL)

    # ------------------------------------------------------------------ the end

    def _finish(self, training: FederatedTraining) -> None:
        """Hand out the model and write the run folder; sites that are away get theirs later."""
        self.notify("handing out the model")
        deadline = time.monotonic() + self.settings.round_timeout
        while True:
            asked = self.hand_out(training)
            left = [m.name for m in self.assembly.members.values() if not m.finished]
            if not left or time.monotonic() >= deadline:
                break
            if not asked:
                time.sleep(_POLL)
        notes = list(training.notes)
        if left:
            notes.append(
                f"These clients have not fetched their model yet: {', '.join(sorted(left))}."
            )
            self.notify(notes[-1])
        if training.stopped:
            notes.append(f"Training stopped early: {training.stopped}")
        names = self.assembly.names
        history = training.log.numbers(times=False)
        model = shared_model(
            training.job, training.method, training.shared, names, history, training.stopped
        )
        if model is None:
            notes.append("This method shares no model; each client has its own.")
        clients = {name: self.assembly.members[name].rows or 0 for name in names}
        facts = {
            "stopped": training.stopped,
            "notes": notes,
            "traffic": training.log.total_traffic(),
        }
        figures = {m.name: m.figures for m in self.assembly.members.values() if m.figures}
        outcome = Outcome(model, training.job, training.log.entries, figures, clients, facts)
        self.folder.finish(outcome)
        self.notify(f"finished: {self.folder.run.home} holds the model and the report")

    def hand_out(self, training: FederatedTraining) -> bool:
        """Give the model to members that have none and to those who only want to adapt.

        Returns whether anybody was asked.
        """
        assembly = self.assembly
        waiting = [n for n in assembly.connected() if not assembly.members[n].finished]
        questions = {name: training.question("finish", name) for name in waiting}
        adapting = assembly.waiting_for_model()
        models = {node: training.question("model", None) for node in adapting}
        if not questions and not models and not assembly.greetings_due():
            return False
        before = set(assembly.members)
        answers = assembly.ask(questions, greet=False, nodes=models)
        for name in set(assembly.members) - before:
            assembly.refuse(name, "the training is over; start again with --adapt-only")
        for who, answer in answers.items():
            name = who if who in questions else assembly.name_of(who)
            if isinstance(answer, Failure):
                self.notify(f"{name} has not got the model: {answer.reason}")
            elif who in questions:
                self._note_finished(name, answer)
            if who in models:
                assembly.served(who)
                if isinstance(answer, Message):
                    self.notify(f"{name} has the model and adapts")
        if any(not isinstance(answer, Failure) for answer in answers.values()) and questions:
            training.save()
        return True

    def _note_finished(self, name: str, answer: Message) -> None:
        member = self.assembly.members[name]
        member.finished = True
        told = answer.facts.get("metrics")
        if member.share_metrics and isinstance(told, dict):
            member.figures = checked_figures(told.get("clients"))
