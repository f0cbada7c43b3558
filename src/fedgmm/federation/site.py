"""A site of a federation: one data owner, which replies to requests about its own rows.

A site can lose its memory at any time: its state is in its folder, and every request carries the rest.
So a site may be killed at any time, and each request may meet a new process.

:mod:`fedgmm.federation.server` lists what a site sends for each request. In a round that is the sums of
the method's ``declare_sums``, such as :meth:`fedgmm.methods.fedgmm.FedGMM.declare_sums`. No row leaves a
site, and no metric of its model unless it shares metrics. For ``patience`` and the choice of sizes a site
sends sums of log-likelihoods of its validation rows, if these are at least ``min_rows``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedgmm import __version__
from fedgmm.core.sums import Declaration, Sums, withhold
from fedgmm.data.dataset import LabelledRows
from fedgmm.data.tables.columns import FileFormat
from fedgmm.data.tables.errors import TableError
from fedgmm.data.tables.preprocessing import TableOptions
from fedgmm.data.tables.summaries import ClientSummary, look_like_names
from fedgmm.federation.declared import DeclaredColumns, bounds_of_columns
from fedgmm.federation.folders import RUN_ID, SiteFolder, write_results
from fedgmm.federation.job import SCORE, SHARED_METRICS, Job, shared_model
from fedgmm.federation.masking import MASK_REQUESTS, SiteMasks
from fedgmm.federation.messages import (
    PROJECTION,
    PROTOCOL,
    Message,
    MessageError,
    Notify,
    check_message,
    coded,
    digest_of,
    one_line,
)
from fedgmm.federation.policy import TRAINING_REQUESTS, LimitError, Policy
from fedgmm.federation.private import SiteNoise, planned_release, too_large_delta
from fedgmm.federation.settings import SiteSettings
from fedgmm.federation.site_table import SiteTable
from fedgmm.federation.start import assigned_sums, cell_sums, centroid_arrays, overall_sums
from fedgmm.federation.summaries import SummaryError, summary_record, table_from_record
from fedgmm.federation.wire import (
    Arrays,
    WireError,
    decode,
    encode,
    pack,
    take_personal,
)
from fedgmm.methods.base import DENSITY, AnyMethod, DivergedError
from fedgmm.methods.gmm import FederatedGMM, sums_of_all
from fedgmm.nets.devices import resolve_device
from fedgmm.privacy.disclosure import ImplausibleModelError, RowWeights, check_model
from fedgmm.privacy.fixed_point import to_fixed
from fedgmm.privacy.ledger import LedgerError
from fedgmm.privacy.settings import PrivacyError
from fedgmm.runs.fitting import NOT_COVERED
from fedgmm.runs.folder import RunError, read_history, read_json
from fedgmm.runs.run import open_run
from fedgmm.support.streaming import lanes_only
from fedgmm.training.checkpoint import Phase, Progress
from fedgmm.training.in_process import projected
from fedgmm.training.state_arrays import StateError
from fedgmm.wording import counted

Content = tuple[Arrays, dict[str, Any]]

_LARGEST_SCORE = 1e14
_WEIGHED = ("run", "phase", "round", "since", "clusters", "most_rows")


class SiteError(RuntimeError):
    """The reason why a site cannot reply, in words that the server may see.

    Attributes:
        code: of ``ERROR_CODES``, sent instead of the words if the run is protected; ``None`` if the
            words are about the request alone.
    """

    def __init__(self, reason: str, code: str | None = None) -> None:
        super().__init__(reason)
        self.code = code


class UnfitError(ValueError):
    """The reason why this site can never take part, so that asking again does not help."""


class Site:
    """One data owner.

    Attributes:
        finished: it has its model, and nothing is left to do.
        refused: why the server refuses it now; ``None`` again with the next other request, for
            example if a dead connection held the name.
        unusable: why it can never take part, such as an error in its table.
    """

    def __init__(self, settings: SiteSettings, *, notify: Notify = lambda _: None) -> None:
        """Find the site's table, or raise ``ValueError``."""
        self.settings = settings
        self.notify = notify
        written = FileFormat(**settings.file_format)
        self.table = SiteTable.found(
            settings.data, settings.name, notify, written, settings.categorical
        )
        self.name = self.table.name
        self.finished = False
        self.refused: str | None = None
        self.unusable: str | None = None
        self._folder = SiteFolder(settings.out)
        self._folder.check()
        self._plan_shown = self._undeclared_shown = False
        self._described: tuple[Message, Job] | None = None  # the last request, parsed
        self._policy = Policy(settings)
        if settings.forget:
            self._policy.forget()
        self._row_weights = RowWeights(settings.out / "row_weights.key", settings.blur)
        self._policy.ledger.entries()  # raises if it is damaged or an older copy
        self._masks = SiteMasks(self.name, settings, self._policy, self._folder.keep_commitment)
        self._noise = SiteNoise(self.table, self._folder, self._policy, self._masks, notify)

    def reply(self, request: Message) -> Message:
        """Reply to one request, and record what leaves; called for one request at a time.

        Raises:
            SiteError: why there is no reply; the text holds no value of a row.
        """
        try:
            try:
                reply = self._reply(request)
            except SiteError as error:
                self._policy.record(request, None, str(error))
                if error.code is None or not self._policy.is_protected(request):
                    raise
                raise SiteError(coded(error.code), error.code) from None
            self._policy.record(request, reply)
        except OSError as error:
            self.notify(f"The record of requests cannot be written: {error}")
            raise SiteError("its own folder cannot be used; its log says why", "folder") from None
        return reply

    def _reply(self, request: Message) -> Message:
        """Return the reply; everything that the site's rules forbid raises ``SiteError``."""
        self.refused = self.unusable = None
        handlers: dict[str, Callable[[Message], Content]] = {
            "hello": self._hello,
            "moments": self._moments,
            **dict.fromkeys(MASK_REQUESTS, lambda request: (self._masks.reply(request), {})),
            "covariance": self._covariance,
            "cells": self._cells,
            "start": self._start,
            "assigned": self._assigned,
            "round": self._round,
            "release": self._release,
            "score": self._score,
            "finish": self._finish,
            "model": self._adapt,
            "refused": self._refused,
        }
        try:
            check_message(request)
            if request.kind not in handlers:
                raise MessageError(
                    f"unknown request {request.kind!r}; install the server's version of fedgmm here"
                )
            if request.facts.get("protocol") != PROTOCOL:
                raise MessageError(
                    f"it has fedgmm {__version__}, which does not speak the server's protocol; use "
                    "the same version everywhere."
                )
            if request.kind not in ("hello", "model", "refused") and self.settings.adapt_only:
                raise MessageError(
                    "it only adapts to finished models, and does not take part in training."
                )
            with self._folder.run.lock():
                if request.kind in TRAINING_REQUESTS:
                    job = self._job(request)  # malformed requests are not counted
                    _place(request)
                    if request.kind == "release":
                        planned_release(job, request)
                self._policy.check(request)
                self._check_masks(request)
                if self._is_masked and isinstance(self._policy.privacy.bounds, Mapping):
                    self.table.bounds, _ = bounds_of_columns(self._policy.privacy.bounds)
                arrays, facts = handlers[request.kind](request)
            if request.kind == "model":  # takes the lock itself
                open_run(self.settings.out).adapt(self.name, self.table.path, notify=self.notify)
                self.finished = True
                self.notify(f"adapted: the model is in {self.settings.out}")
        except DivergedError as error:
            hidden = self._policy.is_protected(request)
            arrays, facts = {}, {"diverged": coded("diverged") if hidden else str(error)}
        except Exception as error:  # a site must outlive every request
            raise self._explained(error) from None
        facts = {"name": self.name, "ticket": request.facts.get("ticket"), **facts}
        return Message("reply", arrays, facts)

    def _explained(self, error: Exception) -> SiteError:
        """Log an error; return the one that the server may see, without a path or a value of a row."""
        text = str(error)
        if isinstance(error, (LimitError, LedgerError, TableError, UnfitError)):
            self.unusable = text
        elif isinstance(error, (ImplausibleModelError, MessageError)):
            return SiteError(text)
        known = isinstance(error, (ValueError, RunError, OSError, LedgerError))
        self.notify(text if known else f"{type(error).__name__}: {text}")
        if isinstance(error, LimitError):
            return SiteError(text)
        if isinstance(error, LedgerError):
            return SiteError("its ledger of privacy cannot be used; its log says why", "ledger")
        if isinstance(error, (SummaryError, WireError)):
            return SiteError(text, "sums")
        if isinstance(error, (RunError, StateError, OSError)):  # whose texts name folders
            reason = "its own folder or file cannot be used; its log says why"
            return SiteError(reason, "folder")
        if isinstance(error, ValueError):
            # without a path and without a value of a row
            public = error.public if isinstance(error, TableError) else text.rstrip(".")
            return SiteError(public, "table")
        return SiteError(f"{type(error).__name__} at the site; see its log", "internal")

    # ------------------------------------------------------------------ before the rounds

    def _hello(self, request: Message) -> Content:
        """Return its name and, while the federation agrees on columns, its table's summary."""
        facts: dict[str, Any] = {
            "version": __version__,
            "adapt_only": self.settings.adapt_only,
            "share_metrics": self.settings.share_metrics,
        }
        if self._is_masked:
            self._check_delta(request)
            self._show_plan(request.facts.get("plan"))
        elif request.facts.get("agree") and not self.settings.adapt_only:
            table = self._asked_table(request)
            columns = [str(name) for name in request.facts.get("as_categories", [])]
            summary = self.table.summary(table, columns)
            self._check_rows(summary.rows, request.whole("min_rows"))
            # the server chooses which column is the label
            if look_like_names(len(summary.labels), summary.rows):
                raise UnfitError(
                    f"the label column {table.label!r} has too many different values to be classes, so "
                    "they are not sent; choose another label"
                )
            rare = {
                text
                for text, count in summary.labels.items()
                if count < self.settings.min_count and text not in self.settings.labels
            }
            if rare and summary.target is None:
                self.notify(f"labels of few rows: {', '.join(sorted(rare))}")
                raise UnfitError(
                    f"the label column {table.label!r} has labels of fewer than "
                    f"{self.settings.min_count} rows, whose texts are not sent; its owner can list them "
                    "with --labels, or start the client with a smaller --min-count"
                )
            facts["summary"] = summary_record(summary, self.settings.min_count)
            self._show_plan(request.facts.get("plan"))
        if self.settings.adapt_only:
            self.notify("waiting for the end of the training, and its model")
        return {}, facts

    def _check_delta(self, request: Message) -> None:
        """Raise if the plan's ``delta`` allows to publish one of this site's rows as it is."""
        privacy = self._policy.privacy
        if privacy.unit != "row" or not privacy.is_noised or request.facts.get("table") is None:
            return
        table = self._asked_table(request)
        try:
            rows = int(self.table.summary(table, []).rows * table.split[0])
            privacy.check_units(rows, rows)
        except PrivacyError:
            raise too_large_delta(privacy) from None

    def _show_plan(self, plan: Any) -> None:
        """Log what the site agrees to with its first summary."""
        if isinstance(plan, dict) and not self._plan_shown:
            self._plan_shown = True
            trials = ", after short runs that choose its size" if plan.get("trials") else ""
            self.notify(
                f"agreed to a run of {plan.get('algorithm')} with at most {plan.get('rounds')} rounds"
                f"{trials}; the record of all requests is in {self._policy.log}"
            )
            if self._is_masked and self.settings.peers is None:
                self.notify(
                    "masks protect this site only against a server that follows the protocol, because it "
                    "could invent the other sites; give their public keys with --peers"
                )

    def _moments(self, request: Message) -> Content:
        """Return masked sums of the declared columns, for the agreement on the preprocessing."""
        table = self._asked_table(request)
        declared, summary = self._declared(table)
        self._check_rows(summary.rows, request.whole("min_rows"))
        return self._sealed(request, declared.sums(summary), declared.declare_sums())

    def _declared(self, table: TableOptions) -> tuple[DeclaredColumns, ClientSummary]:
        """Return the declared columns and the site's summary; log once what the run does not use."""
        declared = DeclaredColumns.of(self._policy.privacy, table)
        summary = self.table.summary(table, list(declared.categories))
        if self._undeclared_shown:
            return declared, summary
        self._undeclared_shown = True
        entries = {f"{name}_{i}" for name, width in summary.vectors.items() for i in range(width)}
        present = {*summary.columns, *summary.vectors} - entries - set(table.left_out)
        unused = sorted(present - {*declared.names, *declared.vectors})
        if unused:
            self.notify(
                f"columns that the server does not declare are not used: {', '.join(unused)}"
            )
        for name, count in declared.undeclared(summary).items():
            self.notify(
                f"column {name!r}: {counted(count, 'value is', 'values are')} not among its declared "
                "categories and count as none of them"
            )
        return declared, summary

    def _covariance(self, request: Message) -> Content:
        """Return second moments of the standardised columns that are reduced, for principal components.

        Weights of rows depend on nothing in the request, so a server that asks again learns nothing.
        """
        job, rows = self._training_rows(request, exact=True)
        rows = self._row_weights.apply(rows, digest_of(Message(request.kind), ()))
        block = list(job.reduced)
        chunks = tuple(chunk[:, block] for chunk in rows.features.chunks)
        zero = torch.zeros(1, len(block), dtype=torch.float64, device=rows.device)
        declaration = FederatedGMM(1, "full").declare_sums(len(block))
        sums = sums_of_all(replace(rows.features, chunks=chunks), zero, "full")
        sums = withhold(sums, declaration, self._least(job))
        return self._sent(request, sums, declaration, len(rows))

    def _cells(self, request: Message) -> Content:
        """Return masked counts of rows in a grid, for the start of the Gaussians."""
        job, rows = self._training_rows(request)
        return self._sent(request, *cell_sums(request, job, rows))

    # ------------------------------------------------------------------ masks

    @property
    def _is_masked(self) -> bool:
        return self._policy.privacy.secure_aggregation

    def _check_masks(self, request: Message) -> None:
        """Raise unless the plan has the masks that the owner or the request wants."""
        if self._is_masked:
            return
        if request.kind in (*MASK_REQUESTS, "moments", "cells"):
            raise MessageError("the plan of this run has no secure aggregation.")
        asks = request.kind in TRAINING_REQUESTS or request.facts.get("agree")
        if asks and self.settings.min_sites is not None:
            raise LimitError(
                "the server's run has no secure aggregation, and this site's owner set --min-sites, so it "
                "sends masked sums only."
            )

    def _sent(
        self, request: Message, sums: Sums, declaration: Declaration, rows: int = 0
    ) -> Content:
        """Return sums as they leave: as one masked vector, or as arrays beside the number of rows."""
        if self._is_masked:
            return self._sealed(request, sums, declaration)
        arrays = encode(sums, declaration, self._job(request).learner_dtype)
        return arrays, {"rows": rows} if rows else {}

    def _sealed(self, request: Message, sums: Sums, declaration: Declaration) -> Content:
        return self._masks.seal(request, lambda n: to_fixed(pack(sums, declaration), n)), {}

    def _start(self, request: Message) -> Content:
        """Return sums of all columns, and without masks local centroids, for the start."""
        job, rows = self._training_rows(request)
        whole = overall_sums(rows, job.features, masked=self._is_masked)
        arrays, facts = self._sent(request, *whole, len(rows))
        if not self._is_masked:
            own = self.settings.min_rows
            arrays |= centroid_arrays(request, job, rows, own, self._least(job))
        return arrays, facts

    def _assigned(self, request: Message) -> Content:
        """Return sums of the rows nearest to each of the start's means."""
        job, rows = self._training_rows(request)
        sums, declaration = assigned_sums(request, job, rows, self.settings.min_rows)
        sums = withhold(sums, declaration, self._least(job))
        return self._sent(request, sums, declaration, len(rows))

    # ------------------------------------------------------------------ rounds

    def _round(self, request: Message) -> Content:
        """Run one round of the method on the site's rows."""
        started = time.perf_counter()
        job, rows = self._training_rows(request)
        run, phase, number, since = _place(request)
        method: AnyMethod | None = job.method_of(phase)
        if self.settings.min_rows:  # no sum rests on fewer rows
            method = job.method_of(phase).with_fewest_rows(self.settings.min_rows)
        if method is None:
            raise UnfitError(
                "single rows may dominate the learners that this algorithm sends; if you trust the "
                "server, start the client with --min-rows 0"
            )
        self._folder.begin(run)
        shared, personal = self._state(request, job, phase)
        metrics: dict[str, Any] = {}
        with self._quietly(job):
            labelled = job.options.algorithm != DENSITY
            shares = self.settings.share_metrics and not self._is_masked
            if shares and labelled and number > 1 and since:
                before = method.prediction(shared, personal)
                metrics["validation"] = self._validation(job, before)
            moved, sums = method.client_step(shared, personal, rows, number)
        fit, seconds = float(sums["log_likelihood"]) / len(rows), time.perf_counter() - started
        declaration = method.declare_sums(job.features)
        sums = withhold(sums, declaration, self._least(job))
        arrays, facts = self._sent(request, sums, declaration, len(rows))
        progress = Progress(phase, number, shared, moved)
        self._folder.keep(run, progress, since, request.whole("keep"))
        entry = {"round": float(number), "log_likelihood": fit, "seconds": seconds}
        self._folder.add_history(entry)
        self.notify(f"round {number}: replied in {seconds:.1f} s")
        return arrays, {**facts, **metrics}

    def _release(self, request: Message) -> Content:
        """Return one release of the plan, with this site's part of the noise."""
        started = time.perf_counter()
        job, rows = self._training_rows(request, exact=True)
        run, phase, _, _ = _place(request)
        self._folder.begin(run)
        shared, _ = self._state(request, job, phase)
        return self._noise.reply(request, job, rows, shared, started), {}

    def _state(self, request: Message, job: Job, phase: Phase) -> tuple[Any, Any]:
        """Return the shared part of a request, and the personal part that belongs to it.

        The personal part is the one after the last round that counted, or that of a newcomer.
        """
        method, arrays = job.method_of(phase), dict(request.arrays)
        declaration = method.declare_broadcast(job.features)
        sent = {name: arrays.pop(name) for name in declaration if name in arrays}
        shared = method.received(
            decode(sent, declaration, job.learner_dtype, job.training_dtype), job.features
        )
        if job.privacy is not None:
            return shared, method.newcomer(shared)
        run, _, _, since = _place(request)
        personal = self._folder.personal(run, phase, since, method)
        if personal is None:
            if since:
                self.notify(f"the state after round {since} is missing; starting as a newcomer")
            personal = take_personal(arrays, method.newcomer(shared))
        if self.settings.min_rows:
            check_model(method.prediction(shared, personal))
        return shared, personal

    def _validation(self, job: Job, prediction: Any) -> dict[str, float]:
        """Return how many of the site's validation rows the received model gets right."""
        dataset, _ = self.table.load(job.table, job.preprocessing)
        if not len(dataset.validation) or dataset.target is not None:  # numbers have no accuracy
            return {"rows": 0, "right": 0.0}
        found = job.model(prediction, [self.name], dataset=dataset).evaluate("validation")
        return {"rows": int(found.rows[0]), "right": float(found.accuracy[0] * found.rows[0])}

    def _score(self, request: Message) -> Content:
        """Return sums of log-likelihoods of the validation rows under the received model."""
        job, rows = self._training_rows(request, exact=True)
        _, phase, _, _ = _place(request)
        method: AnyMethod = job.method_of(phase)
        dataset, _ = self.table.load(job.table, job.preprocessing)
        count = len(dataset.validation)
        if count < self._least(job):
            count = 0  # sums over so few rows are withheld
        values = dict.fromkeys(SCORE, 0.0)
        if count:
            shared, personal = self._state(request, job, phase)
            with self._quietly(job):
                own = method.finish(shared, personal, rows)
                model = job.model(method.prediction(shared, own), [self.name], dataset=dataset)
                values |= {"clients": 1.0, "rows": float(count)}
                x = dataset.validation.inputs.cpu().numpy()
                weights = np.ones(count)
                if self._row_weights.spread:
                    digest = digest_of(request, _WEIGHED)
                    weights = self._row_weights.draw(digest, count).numpy()
                if job.options.algorithm != DENSITY:
                    labels = dataset.labels_of(dataset.validation)
                    found = (weights * model.log_conditional(x, labels, self.name)).sum()
                    if dataset.target is None:  # a probability is one at most, up to rounding
                        found = min(found, 0.0)
                    values |= {"labels": float(found), "log_loss": -float(found) / count}
                if method.mixture is not None:
                    values["inputs"] = float((weights * model.score_samples(x, self.name)).sum())
        if any(map(math.isnan, values.values())):
            raise DivergedError(self.name)
        bounded = {
            name: torch.tensor(value, dtype=torch.float64).clamp(-_LARGEST_SCORE, _LARGEST_SCORE)
            for name, value in values.items()
        }
        return self._sent(request, Sums(bounded), SCORE)

    # ------------------------------------------------------------------ the end

    def _finish(self, request: Message) -> Content:
        """Make the personalised model and write the site's folder."""
        job, rows = self._training_rows(request, exact=True)
        run, phase, _, _ = _place(request)
        self._folder.begin(run)
        method = job.method_of(phase)
        dataset, tables = self.table.load(job.table, job.preprocessing)
        shared, personal = self._state(request, job, phase)
        with self._quietly(job):
            personal = method.finish(shared, personal, rows)
            model = job.model(
                method.prediction(shared, personal),
                [self.name],
                dataset=dataset,
                history=read_history(self._folder.run.history),
                **job.private_parts(shared),
            )
            self._folder.write_config(job, self.table.path, self.name, self.settings.embedding)
            notes = [str(note) for note in request.facts.get("notes", [])]
            if model.privacy is not None:
                notes.insert(0, f"Differential privacy: {model.budget}. {NOT_COVERED}")
            self._folder.write_model(model, tables, notes)
        self.finished = True
        self.notify(f"finished: the model is in {self.settings.out}")
        if self._is_masked:
            return {}, {}
        facts: dict[str, Any] = {"rows": len(rows)}
        if self.settings.share_metrics and dataset.target is None:
            own = read_json(self._folder.run.metrics)["clients"].get(self.name, {})
            own = {name: own[name] for name in ("rows", *SHARED_METRICS) if name in own}
            facts["metrics"] = {"clients": own}
        return {}, facts

    def _adapt(self, request: Message) -> Content:
        """Take a finished model, for which the site learns its own weights; nothing is sent."""
        job = self._job(request)
        _, phase, _, _ = _place(request)
        method = job.method_of(phase)
        shared, _ = self._state(request, job, phase)
        model = shared_model(job, method, shared, ())
        if model is None or model.prediction.client_weights is None:
            raise UnfitError(
                f"{job.options.algorithm} has no weights that a new site could learn on its own."
            )
        self._folder.write_config(job, self.table.path, self.name, self.settings.embedding)
        facts = {"adapted": True, "notes": []}
        write_results(self._folder.run, job.options.algorithm, model, facts)
        return {}, {}

    def _refused(self, request: Message) -> Content:
        """Take the reason why the server refuses this site."""
        self.refused = one_line(str(request.facts.get("reason", "no reason was given"))[:500])
        self.notify(f"the server refused this site: {self.refused}")
        return {}, {}

    # ------------------------------------------------------------------ helpers

    def _asked_table(self, request: Message) -> TableOptions:
        """Return the table options of a request, with those of this site in their place."""
        table = table_from_record(request.facts.get("table"), self.name)
        return replace(table, **self.settings.file_format)

    def _check_rows(self, rows: int, asked: int, what: str = "rows") -> None:
        """Raise if the site has fewer rows than its owner or the server asks for."""
        least = max(self.settings.min_rows, asked)
        if rows < least:
            raise UnfitError(
                f"it has fewer {what} than min_rows={least}; its owner can start the client with a "
                "smaller --min-rows"
            )

    def _job(self, request: Message) -> Job:
        """Return the training run that a request describes, with the options of this site."""
        if self._described is None or self._described[0] is not request:
            job = Job.from_record(request.facts, self.name)
            if request.kind != "covariance" and job.options.pca is not None:
                sent = {n: a for n, a in request.arrays.items() if n.startswith(PROJECTION)}
                job = job.with_projection(sent or self._folder.projection())
                if job.projection_digest != request.facts.get("projection"):
                    raise MessageError("other principal components are here; send them again.")
                if sent:  # the server sends them once
                    self._folder.keep_projection(sent)
            table = replace(job.table, **self.settings.file_format)
            preprocessing = replace(job.preprocessing, written=table.written)
            job = replace(job, table=table, preprocessing=preprocessing)
            self._described = request, job
        return self._described[1]

    def _training_rows(self, request: Message, *, exact: bool = False) -> tuple[Job, LabelledRows]:
        """Return the run and the training rows, with random weights unless they stay here."""
        job = self._job(request)
        dataset, _ = self.table.load(job.table, job.preprocessing)
        try:
            device = resolve_device(job.options.device)
        except (RuntimeError, ValueError) as error:
            raise UnfitError(f"the federation wants an accelerator: {error}") from None
        if job.privacy is None:  # noise hides how many rows there are, and a refusal would show it
            self._check_rows(len(dataset.train), job.min_rows, "training rows")
        elif request.kind == "release" and not self._undeclared_shown:
            self._declared(job.table)
        rows = projected(dataset.training_rows(device, job.training_dtype), job.projection)
        if exact:
            return job, rows
        return job, self._row_weights.apply(rows, digest_of(request, _WEIGHED))

    def _least(self, job: Job) -> int:
        return max(self.settings.min_rows, job.min_rows)

    def _quietly(self, job: Job) -> Any:
        """Return a context without threads inside operations, which small networks gain nothing from."""
        net = job.method.training.net
        quiet = resolve_device(job.options.device).type == "cpu" and net.hints.in_lanes
        return lanes_only() if quiet else nullcontext()


def _place(request: Message) -> tuple[str, Phase, int, int]:
    """Return the run, the phase, the round, and the last round of this site that counted."""
    run, phase = request.facts.get("run"), request.facts.get("phase")
    if not isinstance(run, str) or not RUN_ID.fullmatch(run):
        raise MessageError("the request does not name its run.")
    number, since = request.whole("round"), request.whole("since")
    return run, "warmup" if phase == "warmup" else "main", number, since
