"""Before the rounds: wait for the sites, agree on columns, choose what was left open."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedgmm.data.tables.agreement import DisagreementError, agree
from fedgmm.data.tables.first_pass import settle_kinds
from fedgmm.data.tables.summaries import ClientSummary
from fedgmm.federation.assembly import Assembly
from fedgmm.federation.jobs import Job, check_for_tables
from fedgmm.federation.settings import FederationError, FederationSettings
from fedgmm.federation.summaries_on_wire import SummaryError, summary_from_record
from fedgmm.federation.transport import Failure
from fedgmm.training.options import TrainingOptions
from fedgmm.training.selection import choose_sizes
from fedgmm.wording import counted

_TELL_AGAIN = 30.0  # seconds after which it is said again whom the server waits for


@dataclass(frozen=True)
class Prepared:
    """What all sites agreed on.

    Attributes:
        job: the training.
        notes: what is worth knowing.
    """

    job: Job
    notes: list[str]


def check_options(settings: FederationSettings) -> None:
    """Raise ``FederationError`` for options that no federation can have."""
    try:
        check_for_tables(settings.config.options())
    except ValueError as error:
        raise FederationError(str(error)) from None


def prepare(assembly: Assembly, poll: float) -> Prepared:
    """Wait until all sites are there and agree on the preprocessing.

    Raises:
        FederationError: too few sites came, or their tables do not fit together.
    """
    settings, table = assembly.settings, assembly.settings.config.table
    check_options(settings)
    wait_for(assembly, settings.clients, poll)
    while True:
        summaries = {
            name: member.summary
            for name in assembly.names
            if (member := assembly.members[name]).summary is not None
        }
        try:
            settled = _settled(assembly, summaries)
            preprocessing, notes = agree(settled, table)
            break
        except DisagreementError as error:
            if len(assembly.members) - 1 < settings.quorum or error.client not in assembly.members:
                raise FederationError(f"The tables do not fit together: {error}") from None
            assembly.refuse(error.client, error.problem)
        except ValueError as error:
            raise FederationError(str(error)) from None
    rows = training_rows([s.rows for s in settled.values()], table.split[0])
    width = len(preprocessing.feature_names)
    chosen, more = _chosen(assembly, rows, width)
    notes = [*notes, *more]
    for note in notes:
        assembly.notify(note)
    job = Job(chosen, table, preprocessing, settings.precision, settings.min_rows)
    columns = counted(len(preprocessing.columns), "column, which becomes", "columns, which become")
    told = f"agreed on {columns} {width}"
    if table.label is not None:
        told += f", and {counted(len(preprocessing.labels.classes), 'class', 'classes')}"
    assembly.notify(told)
    return Prepared(job, notes)


def wait_for(assembly: Assembly, wanted: int, poll: float) -> None:
    """Greet nodes until there are so many members with a summary."""
    timeout = assembly.settings.start_timeout
    started = told_at = time.monotonic()
    told = ""
    while True:
        ready = [name for name, m in sorted(assembly.members.items()) if m.summary is not None]
        if len(ready) >= wanted:
            return
        now = time.monotonic()
        line = f"waiting for {wanted - len(ready)} more of {counted(wanted, 'client')}" + (
            f"; here are {', '.join(ready)}" if ready else ""
        )
        if line != told or now - told_at > _TELL_AGAIN:
            assembly.notify(line)
            told, told_at = line, now
        if timeout is not None and now - started > timeout:
            raise FederationError(
                f"Only {len(ready)} of {counted(wanted, 'client')} came within {timeout:g} s; "
                "start the others, or ask for fewer with clients."
            )
        if assembly.greetings_due():
            assembly.ask({}, greet=True)
        else:
            time.sleep(poll)


def _settled(assembly: Assembly, summaries: dict[str, ClientSummary]) -> dict[str, ClientSummary]:
    """Summaries after sites with other kinds of values read some columns as text."""

    def read_again(columns: dict[str, set[str]]) -> dict[str, ClientSummary]:
        questions = {name: assembly.hello(True, wanted) for name, wanted in columns.items()}
        found: dict[str, ClientSummary] = {}
        for name, answer in assembly.ask(questions).items():
            try:
                if isinstance(answer, Failure):
                    raise SummaryError(answer.reason)
                found[name] = summary_from_record(answer.facts.get("summary"))
            except SummaryError as error:
                raise FederationError(f"{name} could not read its table again: {error}") from None
        return found

    return settle_kinds(summaries, assembly.settings.config.table, read_again)


def training_rows(rows: Iterable[int], share: float) -> int:
    """How many rows all clients train on, as the split will have it."""
    return int(sum(max(1, int(np.round(share * own))) for own in rows))


def _chosen(assembly: Assembly, rows: int, width: int) -> tuple[TrainingOptions, list[str]]:
    """The training options with what was left open filled in, and what is worth knowing of it."""
    config, notes = assembly.settings.config, []
    options = config.options()
    open_sizes = config.sizes_are_open or {"components", "learners"} & set(config.open_choices())
    if open_sizes and options.algorithm == "fedgmm":
        notes.append(
            f"The size of the mixture was left open: {counted(options.components, 'Gaussian')} "
            f"and {counted(options.learners, 'learner')} are taken. Trials on the data need one "
            "machine; say components and learners."
        )
    # sizes that were left open keep their defaults: trials need all rows on one machine
    try:
        chosen, _ = choose_sizes(
            options, {"covariance_type"} & {*config.open_choices()}, rows=rows, columns=width
        )
    except ValueError as error:
        raise FederationError(str(error)) from None
    return chosen, notes
