"""The server of a federation: it knows requests and replies, but not how they travel.

A run waits for the sites, agrees on columns, starts, runs the rounds, and hands out the model. It writes
a checkpoint after every round. A server that is started again continues with the next round, and ends
as if it had not stopped. Before the first checkpoint it repeats the requests of the earlier attempt from
its record (:class:`fedgmm.federation.folders.StartRecord`), because sites refuse any others.

==============  ================================================================================
request         reply, beside the site's name and, after ``hello``, its number of training rows
==============  ================================================================================
``hello``       its version of fedgmm and its consents; once, while all agree: rows, and for each
                column counts of missing values and categories, or mean and squares
                (:mod:`fedgmm.data.tables.summaries`)
``covariance``  sums of the columns and of their products; only for ``pca``
``start``       sums and sums of squares of the columns, and a few centroids with at least two rows
                each; methods with Gaussians only
``assigned``    counts and moments of the rows nearest to each mean of the start; likewise
``round``       the sums that the method declares (:meth:`SupervisedMethod.declare_sums`); the accuracy on
                validation rows only if the site shares it
``score``       sums of log-likelihoods of its validation rows; only for ``patience`` and for the
                choice of sizes
``finish``      nothing; metrics of its test rows only if the site shares them
``model``       nothing; a site that only adapts receives the finished model
``refused``     nothing; the site receives the reason why it cannot take part
==============  ================================================================================

With secure aggregation ``hello`` asks for the name only, and replies of ``covariance``, ``start``,
``assigned``, ``round`` and ``score`` are one masked vector each. Further requests are:

============  ================================================================================
``release``   a noisy sum of a private run, masked; such a run has no other sums
``moments``   masked sums of the declared columns, for the preprocessing
``cells``     masked numbers of rows in a grid, in place of centroids
``keys``      public keys of the site, signed
``shares``    encrypted shares of its secrets for the other sites
``unmask``    its shares that open the sum over the named survivors
============  ================================================================================
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedgmm.core.pca import PCA
from fedgmm.core.sums import SumsError
from fedgmm.data.tables.agreement import DisagreementError, agree, agree_on_kinds
from fedgmm.data.tables.preprocessing import Preprocessing
from fedgmm.data.tables.summaries import ClientSummary
from fedgmm.federation.declared import DeclaredColumns, declared_preprocessing
from fedgmm.federation.folders import (
    ServerFolder,
    check_home,
    checked_metrics,
    numbers_of,
)
from fedgmm.federation.job import (
    Job,
    check_additive,
    check_for_tables,
    check_noised,
    has_gaussians,
    shared_model,
)
from fedgmm.federation.masking import MaskedExchange, ServerMasks, check_total, read_total
from fedgmm.federation.members import Member, Members
from fedgmm.federation.messages import Failure, Message, Notify, Transport, hash_of
from fedgmm.federation.private import PrivateTraining
from fedgmm.federation.remote import RemoteTraining
from fedgmm.federation.settings import FederationError, FederationSettings
from fedgmm.federation.summaries import SummaryError, summary_from_record, table_record
from fedgmm.methods.base import DivergedError
from fedgmm.privacy.influence import bounded_summaries
from fedgmm.privacy.site_sets import FEW_SITES, fewest_survivors
from fedgmm.runs.fitting import usual_pca
from fedgmm.runs.folder import RunError, RunFolder
from fedgmm.training.checkpoint import CheckpointError
from fedgmm.training.options import TrainingOptions
from fedgmm.training.selection import Evidence, choose_sizes, label_noise
from fedgmm.wording import counted


def run_federation(
    settings: FederationSettings,
    transport: Transport,
    out: Path,
    *,
    notify: Notify = lambda _: None,
) -> None:
    """Train with the sites and write the run folder; resume if an earlier attempt left progress.

    Raises ``FederationError`` with the reason why it cannot start or continue.
    """
    folder = ServerFolder(Path(out))
    try:
        with folder.run.lock():
            check_home(folder.run)
            if folder.run.is_finished:
                notify("the run is finished already")
                return
            server = _Server(settings, transport, folder, notify)
            try:
                server.run()
            except FederationError as error:
                # the sites need not wait any longer; the transport itself may be the reason
                with contextlib.suppress(FederationError):
                    server.members.dismiss(str(error))
                raise
    except (RunError, CheckpointError) as error:
        raise FederationError(str(error)) from None


def check_start(settings: FederationSettings, out: Path) -> None:
    """Raise ``FederationError`` for options or a folder that cannot be used, before a port is opened."""
    check_home(RunFolder(Path(out)))
    _check_options(settings)


def serve_model(
    settings: FederationSettings,
    transport: Transport,
    out: Path,
    *,
    notify: Notify = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Hand the model of a finished run to sites that join later, or missed its end, until ``stop()``."""
    folder = ServerFolder(Path(out))
    if not folder.run.is_finished or folder.stored() is None:
        raise FederationError(f"{out} does not hold a finished federation.")
    server = _Server(settings, transport, folder, notify)
    training = server.resume()
    training.loop.resume()
    while not stop():
        if not server.hand_out(training):
            server.members.pause()


def run_or_serve(
    settings: FederationSettings, transport: Transport, out: Path, serve: bool, *, notify: Notify
) -> None:
    """Train if the run is not finished; then serve the model of a finished run, or if ``serve``."""
    finished = RunFolder(out).is_finished
    if not finished:
        run_federation(settings, transport, out, notify=notify)
    if finished or serve:
        notify("The run is finished; serving its model to sites that join with --adapt-only.")
        serve_model(settings, transport, out, notify=notify)


class _Server:
    """One run of the server."""

    def __init__(
        self,
        settings: FederationSettings,
        transport: Transport,
        folder: ServerFolder,
        notify: Notify,
    ) -> None:
        self.settings, self.folder = settings, folder
        self.members = Members(settings, transport, notify)
        self.members.record = folder.start
        if settings.is_masked:
            least = settings.privacy.fewest_changes
            self.members.masks = ServerMasks(self.members, least, folder.run.home)
        self.notify = self.members.notify

    def run(self) -> None:
        """Run the federation from the first site to the report; resume if there is a checkpoint."""
        stored = self.folder.stored()
        if stored is None:
            training = self._begin()
        else:
            training = self.resume()
            self.notify(f"resuming after round {int(stored.facts['round'])}")
            self.members.reunite()
        training.train()
        self._finish(training)

    def _begin(self) -> RemoteTraining:
        record, asked = self.folder.start, _digest_of(self.settings)
        if record.get("settings") != asked:
            if record.get("run"):
                self.notify("the settings changed before the first round; starting a new run")
            record.restart({"settings": asked, "run": secrets.token_hex(8)})
        self.members.run = str(record.get("run"))
        if self.settings.is_masked and self.settings.clients < FEW_SITES:
            self.notify(
                f"With {self.settings.clients} clients a sum may show much about each; secure aggregation "
                f"protects better from {FEW_SITES} clients on."
            )
        job, notes = prepare(self.members)
        self.folder.begin(self.settings, job)
        try:
            training = self._training(job)
        except ValueError as error:  # options that do not suit the learner
            raise FederationError(str(error)) from None
        training.notes = notes
        return training

    def resume(self) -> RemoteTraining:
        """Return the training run of the checkpoint, or raise ``FederationError``."""
        try:
            stored = self.folder.stored()
            assert stored is not None
            known = stored.facts["options"]["federation"]
            job = Job.from_record(known["job"], "")
            job = replace(job, table=replace(job.table, client=None))
            job = job.with_projection(self.folder.projection())
            stored.progress(job.method_of(stored.phase))
        except (CheckpointError, LookupError, TypeError, ValueError) as error:
            raise FederationError(
                f"Cannot resume from {self.folder.run.checkpoint}: {error} Choose another folder "
                "to start again."
            ) from None
        self._check_same(job)
        done = int(stored.facts["round"])
        rounds = max(self.settings.config.options().rounds, done)
        job = replace(job, options=replace(job.options, rounds=rounds))
        training = self._training(job)
        training.restore(known)
        return training

    def _training(self, job: Job) -> RemoteTraining:
        kind = RemoteTraining if job.privacy is None else PrivateTraining
        return kind(job, self.members, self.folder)

    def _check_same(self, job: Job) -> None:
        """Raise unless the settings are those of the run in the folder, except rounds and device."""
        config, home = self.settings.config, self.folder.run.home
        asked, then = config.options().record(), job.options.record()
        decided = [] if "pca" in config.training else ["pca"]
        for name in [*config.open_choices(), *decided]:
            asked[name] = then[name]
        for name, value in asked.items():
            if name not in ("rounds", "device") and then[name] != value:
                raise FederationError(
                    f"{home} holds a federation with {name}={then[name]!r}, not {value!r}; give the "
                    "same to resume, or choose another folder."
                )
        if config.table != job.table:
            raise FederationError(
                f"{home} holds a federation whose tables were read with other options; give the same "
                "[data] to resume, or choose another folder."
            )

    # ------------------------------------------------------------------ the end

    def _finish(self, training: RemoteTraining) -> None:
        """Hand out the model and write the run folder; sites that are away get theirs later."""
        self.notify("handing out the model")
        deadline = time.monotonic() + self.settings.round_timeout
        while True:
            asked = self.hand_out(training)
            left = [m.name for m in self.members.members.values() if not m.finished]
            if not left or time.monotonic() >= deadline:
                break
            if not asked:
                self.members.pause()
        notes = list(training.notes)
        if left:
            notes.append(
                f"These clients have not fetched their model yet: {', '.join(sorted(left))}."
            )
            self.notify(notes[-1])
        if training.stopped:
            notes.append(f"Training stopped early: {training.stopped}")
        loop = training.loop
        history = [numbers_of(entry, times=False) for entry in loop.history]
        model = shared_model(
            training.job,
            loop.current,
            loop.outcome[0],
            training.codes,
            history,
            training.stopped,
        )
        if model is not None and model.privacy is not None:
            notes.insert(0, f"Differential privacy: {model.budget}.")
            self.notify(notes[0])
        if model is None:
            notes.append("This method shares no model; each client has its own.")
        members = self.members.members
        facts = {"stopped": training.stopped, "notes": notes, "traffic": training.total_traffic()}
        self.folder.finish(
            model,
            training.job,
            loop.history,
            {m.name: m.metrics for m in members.values() if m.metrics},
            {name: members[name].rows or 0 for name in self.members.names},
            facts,
        )
        self.notify(f"finished: {self.folder.run.home} holds the model and the report")

    def hand_out(self, training: RemoteTraining) -> bool:
        """Give the model to sites that lack it or only adapt; return whether any was asked."""
        members = self.members
        waiting = [n for n in members.connected() if not members.members[n].finished]
        requests = {name: training.request("finish", name) for name in waiting}
        models = {node: training.request("model", None) for node in members.waiting_for_model()}
        if not requests and not models and not members.greetings_due():
            return False
        before = set(members.members)
        fetched = False
        for who, reply in members.ask(requests, greet=False, nodes=models):
            name = who if who in requests else members.name_of(who)
            if isinstance(reply, Failure):
                self.notify(f"{name} has not received the model: {reply.reason}")
            elif who in requests:
                member = members.members[name]
                member.finished = fetched = True
                shared = reply.facts.get("metrics")
                if member.share_metrics and isinstance(shared, dict):
                    member.metrics = checked_metrics(shared.get("clients"))
            if who in models:
                members.served(who)
                if isinstance(reply, Message):
                    self.notify(f"{name} has the model and adapts")
        for name in set(members.members) - before:
            members.refuse(name, "the training is over; start again with --adapt-only")
        if fetched:
            training.loop.save()
        return True


# ---------------------------------------------------------------------- before the rounds


def _check_options(settings: FederationSettings) -> None:
    """Raise ``FederationError`` for options that a federation cannot have."""
    try:
        check_for_tables(settings.config.options())
        if settings.privacy.is_noised:
            check_noised(settings.privacy, settings.config.options(), settings.config.table)
            most = fewest_survivors(settings.quorum) - 1
            if settings.privacy.tolerated > most:
                raise ValueError(
                    f"[privacy] tolerated={settings.privacy.tolerated} sites may collude, but with "
                    f"{settings.quorum} sites in a round at most {most} can."
                )
        if settings.is_masked:
            DeclaredColumns.of(settings.privacy, settings.config.table)
            check_additive(settings.config.options())
    except ValueError as error:
        raise FederationError(str(error)) from None


def _digest_of(settings: FederationSettings) -> str:
    """Return a hash of the settings that decide requests before the first round."""
    config = settings.config
    values: list[Any] = [settings.plan(), config.options().record(), config.open_choices()]
    values += [table_record(config.table), settings.precision, settings.min_rows]
    return hash_of(json.loads(json.dumps(values, default=str)))


def prepare(members: Members) -> tuple[Job, list[str]]:
    """Wait for the sites, agree on the preprocessing, and choose what the settings leave open.

    Returns the training run and notes for the report. A server that died after the agreement takes it from
    the record.
    """
    settings, record, noised = members.settings, members.record, members.settings.privacy.is_noised
    _check_options(settings)
    agreed = record.get("agreement")
    if agreed is None:
        wait_for(members, settings.clients)
        if noised:  # no row decides the preprocessing
            preprocessing = declared_preprocessing(settings.privacy, settings.config.table)
            agreed = _agreement(members, preprocessing, [], [])
        else:
            agreed = _agree_masked(members) if members.masks is not None else _agree(members)
        record.keep("agreement", value=agreed)
    else:
        for name, rows in agreed["members"].items():
            members.members[name] = Member(name, rows=rows)
        members.notify("resuming before the first round")
        members.reunite()
    preprocessing = Preprocessing.from_record(agreed["preprocessing"])
    options, table = settings.config.options(), settings.config.table
    columns = counted(len(preprocessing.columns), "column, which becomes", "columns, which become")
    line = f"{'declared' if noised else 'agreed on'} {columns} {len(preprocessing.feature_names)}"
    if table.label is not None:
        line += f", and {counted(len(preprocessing.labels.classes), 'class', 'classes')}"
    members.notify(line)
    job = Job(options, table, preprocessing, settings.precision)
    if noised:  # nothing is chosen from rows
        return replace(job, privacy=settings.privacy), []
    if "pca" not in settings.config.training and has_gaussians(options):
        options = replace(options, pca=usual_pca(len(preprocessing.vectors), agreed["rows"]))
    job = replace(job, options=options, min_rows=settings.min_rows)
    if options.pca is not None:
        job = replace(job, projection=_principal_components(members, job, agreed["rows"]))
    options, more = _chosen_options(members, job, agreed)
    notes = [*agreed["notes"], *more]
    for note in notes:
        members.notify(note)
    return replace(job, options=options), notes


def _agreement(
    members: Members,
    preprocessing: Preprocessing,
    notes: Sequence[str],
    tables: Sequence[ClientSummary],
) -> dict[str, Any]:
    """Return what all sites agreed on, as plain values.

    Beside the preprocessing these are notes for the report, the training rows of all sites, the noise of
    the labels for the choice of sizes, and the training rows of each member.
    """
    labels = sum((Counter(summary.labels) for summary in tables), Counter[str]())
    share = members.settings.config.table.split[0]
    return {
        "preprocessing": preprocessing.record(),
        "notes": list(notes),
        "rows": training_rows([summary.rows for summary in tables], share),
        "noise": label_noise([*labels.values()]) if tables else 0.0,
        "members": {name: members.members[name].rows for name in members.names},
    }


def _agree(members: Members) -> dict[str, Any]:
    """Agree on the preprocessing from the summaries of the sites."""
    settings, table = members.settings, members.settings.config.table
    while True:
        summaries = {
            name: member.summary
            for name in members.names
            if (member := members.members[name]).summary is not None
        }
        try:
            settled = _with_common_kinds(members, summaries)
            settled, bounds = bounded_summaries(settled, settings.max_share)
            preprocessing, notes = agree(settled, table)
            break
        except DisagreementError as error:
            if len(members.members) - 1 < settings.quorum or error.client not in members.members:
                raise FederationError(f"The tables do not fit together: {error}") from None
            members.refuse(error.client, error.problem)
        except ValueError as error:
            raise FederationError(str(error)) from None
    for name, summary in summaries.items():
        members.members[name].rows = training_rows([summary.rows], table.split[0])
    return _agreement(members, preprocessing, [*bounds, *notes], [*settled.values()])


def _principal_components(members: Members, job: Job, rows: int) -> PCA:
    """Return the principal components that the Gaussians see, from sums over the sites."""
    most = min(rows, len(job.reduced))
    if job.options.pca is not None and job.options.pca > most:
        raise FederationError(
            f"pca={job.options.pca} is more than {counted(rows, 'training row')} of "
            f"{counted(len(job.reduced), 'column')} can have; use at most {most}."
        )
    try:
        found = RemoteTraining(job, members, None).principal_components()
    except (DivergedError, ValueError) as error:
        raise FederationError(f"The principal components failed: {error}") from None
    members.notify(
        f"the Gaussians see {counted(job.options.pca or 0, 'principal component')} of "
        f"{counted(len(job.reduced), 'column')}, and {job.columns - len(job.reduced)} beside them"
    )
    return found


def _agree_masked(members: Members) -> dict[str, Any]:
    """Agree on the preprocessing from the total of masked sums over declared columns."""
    settings, table = members.settings, members.settings.config.table
    declared = DeclaredColumns.of(settings.privacy, table)
    declaration = declared.declare_sums()
    facts = {"table": table_record(table), "min_rows": settings.min_rows}
    request = Message("moments", {}, members.facts(**facts, **settings.privacy_facts()))
    exchange = MaskedExchange(members, "columns", lambda _: request)
    failed = exchange.run()
    if failed is not None:
        raise FederationError(failed)
    total = read_total(exchange, declaration)
    try:
        check_total(total, declaration, float(total["rows"]))
        summary = declared.summary(total)
        # only declared columns are in the total, so none is left to ignore
        plain = replace(table, ignore=(), id=(), categorical=tuple(declared.categories))
        preprocessing, notes = agree({"the federation": summary}, plain)
    except (SumsError, ValueError) as error:
        raise FederationError(f"The tables do not fit together: {error}") from None
    # a site may lack a column, which the total does not show
    columns = tuple(replace(one, optional=bool(one.outputs)) for one in preprocessing.columns)
    preprocessing = replace(preprocessing, columns=columns, ids=table.id)
    return _agreement(members, preprocessing, notes, [summary])


def wait_for(members: Members, wanted: int) -> None:
    """Greet nodes until ``wanted`` members can take part in the agreement on columns."""
    timeout = members.settings.start_timeout
    started = time.monotonic()
    while True:
        masked, found = members.settings.is_masked, sorted(members.members.items())
        ready = [name for name, m in found if masked or m.summary is not None]
        if len(ready) >= wanted:
            return
        members.remind(
            f"waiting for {wanted - len(ready)} more of {counted(wanted, 'client')}"
            + (f"; connected: {', '.join(ready)}" if ready else "")
        )
        if timeout is not None and time.monotonic() - started > timeout:
            raise FederationError(
                f"Only {len(ready)} of {counted(wanted, 'client')} came within {timeout:g} s; "
                "start the others, or lower clients in [federation]."
            )
        members.greet_or_pause(agree=True)


def _with_common_kinds(
    members: Members, summaries: dict[str, ClientSummary]
) -> dict[str, ClientSummary]:
    """Return summaries after sites with other kinds of values have read some columns as text."""

    def read_again(columns: dict[str, set[str]]) -> dict[str, ClientSummary]:
        requests = {name: members.hello(True, wanted) for name, wanted in columns.items()}
        found: dict[str, ClientSummary] = {}
        for name, reply in members.ask(requests):
            try:
                if isinstance(reply, Failure):
                    raise SummaryError(reply.reason)
                found[name] = summary_from_record(reply.facts.get("summary"))
            except SummaryError as error:
                raise FederationError(f"{name} could not read its table again: {error}") from None
        return found

    return agree_on_kinds(summaries, members.settings.config.table, read_again)


def training_rows(rows: Iterable[int], share: float) -> int:
    """Return the number of training rows of all clients, as the split will have it."""
    return int(sum(max(1, int(np.round(share * own))) for own in rows))


def _chosen_options(
    members: Members, job: Job, agreed: Mapping[str, Any]
) -> tuple[TrainingOptions, list[str]]:
    """Return options with everything that was left open, and notes about the choice."""
    config, options = members.settings.config, job.options
    notes = []
    if config.sizes_are_open and options.algorithm == "fedgmm":
        components, learners = options.sizes
        notes.append(
            f"The size of the mixture was not given: {counted(components, 'Gaussian')} "
            f'and {counted(learners, "learner")} are used. Say components = "auto" and '
            'learners = "auto" to choose by short runs with the sites.'
        )

    def score(trial: TrainingOptions, evidence: Evidence) -> float:
        return _trial_score(members, replace(job, options=trial), evidence)

    try:
        chosen, found = choose_sizes(
            options,
            [name for name in config.open_choices() if name != "refit"],  # rows stay at the sites
            rows=agreed["rows"],
            columns=job.columns,
            score=score,
            noise=agreed["noise"],
            notify=members.notify,
        )
    except ValueError as error:
        raise FederationError(str(error)) from None
    if found is not None:
        notes.append(
            f"{counted(found.components, 'Gaussian')} and {counted(found.learners, 'learner')} were "
            f"chosen by the validation rows of {counted(len(found.scores), 'short run')}."
        )
    return chosen, notes


def _trial_score(members: Members, job: Job, evidence: Evidence) -> float:
    """Train with the sites under another run id, and return the mean validation log-likelihood.

    The id follows from the trial, so that a restarted server repeats the requests of an unfinished trial;
    the score of a finished one is in the record.
    """
    record = members.record
    trial = hash_of([members.run, evidence, job.options.record()])[:16]
    known = record.get("trials", trial)
    if known is not None:
        return float(known)
    run, members.run = members.run, trial
    training = RemoteTraining(job, members, None, title="trial: ")
    try:
        training.train()
        sums = None if training.stopped else training.scores()
    except DivergedError:
        sums = None
    finally:
        members.run = run
    score = -math.inf if sums is None else sums[evidence] / sums["rows"]
    record.keep("trials", trial, value=score)
    record.end_start(trial)
    return score
