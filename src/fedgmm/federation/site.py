"""The client side of a federation: one site, which answers questions about its own rows.

A site keeps nothing in memory that it could not do without: what matters is in its own folder, and
every question tells the rest. It may be killed at any time, and each question may meet a new process.
No row leaves it, and no figure of how good its model is, unless it was told to share them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedgmm import __version__
from fedgmm.core.gaussians import gaussians
from fedgmm.core.streaming import lanes_only
from fedgmm.data.dataset import FederatedDataset, LabelledRows
from fedgmm.data.tables.errors import TableError
from fedgmm.data.tables.summaries import look_like_names
from fedgmm.federation.jobs import PROTOCOL, Job
from fedgmm.federation.messages import Message, MessageError, check_message, one_line
from fedgmm.federation.settings import SiteSettings
from fedgmm.federation.shared_model import shared_model, write_shared_model
from fedgmm.federation.site_folder import RUN_ID, SiteFolder
from fedgmm.federation.site_table import SiteTable, public_reason
from fedgmm.federation.summaries_on_wire import (
    SummaryError,
    summary_record,
    table_from_record,
)
from fedgmm.federation.wire import (
    Arrays,
    WireError,
    as_array,
    as_tensor,
    frame_of,
    put_moments,
    received,
    take_personal,
    training_of,
    update_arrays,
)
from fedgmm.methods.base import DENSITY, DivergedError
from fedgmm.methods.centroids import local_centroids
from fedgmm.methods.gmm import FederatedGMM
from fedgmm.model.model import FederatedModel
from fedgmm.nets.devices import resolve_device
from fedgmm.runs.folder import RunError
from fedgmm.runs.run import open_run
from fedgmm.training.checkpoint import Phase, Progress
from fedgmm.training.state_arrays import StateError

__all__ = ["Site", "SiteError", "SiteSettings"]

Answer = tuple[Arrays, dict[str, Any]]


class SiteError(RuntimeError):
    """Why a site cannot answer, in plain words that may be shown at the server."""


class UnfitError(ValueError):
    """What this site lacks to take part; asking it again does not help."""


class Site:
    """One data owner.

    Attributes:
        settings: what it was told at its start.
        name: what it is called.
        finished: it has its model, and nothing is left to do.
        refused: why the server does not want it now; ``None`` again as soon as it asks something
            else, as where a name was taken by a connection that had died.
        unusable: why it can never take part, such as what is wrong with its table.
    """

    def __init__(
        self, settings: SiteSettings, *, notify: Callable[[str], None] = lambda _: None
    ) -> None:
        """Find the site's table.

        Raises:
            ValueError: no table, or several, or one that cannot be read; a folder of another run.
        """
        self.settings = settings
        self.notify = notify
        self.table = SiteTable.found(settings.data, settings.name, notify)
        self.name = self.table.name
        self.finished = False
        self.refused: str | None = None
        self.unusable: str | None = None
        self._folder = SiteFolder(settings.out)
        self._folder.check()

    def answer(self, question: Message) -> Message:
        """Answer one question; called one at a time.

        Raises:
            SiteError: why there is no answer; the text holds no value of a row.
        """
        self.refused = self.unusable = None
        answers: dict[str, Callable[[Message], Answer]] = {
            "hello": self._hello,
            "start": self._start,
            "assigned": self._assigned,
            "round": self._round,
            "finish": self._finish,
            "model": self._adapt,
            "refused": self._refused,
        }
        try:
            check_message(question)
            if question.kind not in answers:
                raise MessageError(f"there is no question {question.kind!r}; is fedgmm older here?")
            if question.facts.get("protocol") != PROTOCOL:
                raise MessageError(
                    f"it has fedgmm {__version__}, which does not speak the server's protocol; use "
                    "the same version everywhere."
                )
            if question.kind not in ("hello", "model", "refused") and self.settings.adapt_only:
                raise MessageError(
                    "it only adapts to finished models, and takes part in no training."
                )
            with self._folder.run.lock():
                arrays, facts = answers[question.kind](question)
            if question.kind == "model":  # takes the lock itself
                open_run(self.settings.out).adapt(self.name, self.table.path, notify=self.notify)
                self.finished = True
                self.notify(f"adapted: the model is in {self.settings.out}")
        except DivergedError as error:
            arrays, facts = {}, {"diverged": str(error)}
        except (MessageError, SummaryError, WireError) as error:
            raise SiteError(str(error)) from None
        except (RunError, StateError, OSError) as error:  # whose texts name folders
            self.notify(str(error))
            raise SiteError("its own folder or file cannot be used; its log says why") from None
        except (TableError, UnfitError) as error:
            self.unusable = str(error)
            self.notify(self.unusable)
            raise SiteError(public_reason(error)) from None
        except ValueError as error:
            self.notify(str(error))
            raise SiteError(public_reason(error)) from None
        except Exception as error:  # a site must outlive whatever a question brings
            self.notify(f"{type(error).__name__}: {error}")
            raise SiteError(f"an error of kind {type(error).__name__}; its log says more") from None
        facts = {"name": self.name, "ticket": question.facts.get("ticket"), **facts}
        return Message("answer", arrays, facts)

    # ------------------------------------------------------------------ before the rounds

    def _hello(self, question: Message) -> Answer:
        """Who it is and, while the federation agrees on columns, the summary of its table."""
        facts: dict[str, Any] = {
            "version": __version__,
            "adapt_only": self.settings.adapt_only,
            "share_metrics": self.settings.share_metrics,
        }
        if question.facts.get("agree") and not self.settings.adapt_only:
            table = table_from_record(question.facts.get("table"), self.name)
            columns = [str(name) for name in question.facts.get("as_categories", [])]
            summary = self.table.summary(table, columns)
            least = max(self.settings.min_rows, _whole(question, "min_rows"))
            if summary.rows < least:
                raise UnfitError(f"it has fewer rows than min_rows={least}")
            if look_like_names(
                len(summary.labels), summary.rows
            ):  # whatever the server calls a label
                raise UnfitError(
                    f"the values of the label column {table.label!r} are names, numbers of persons or "
                    "measurements rather than classes, and stay here"
                )
            facts["summary"] = summary_record(summary)
        if self.settings.adapt_only:
            self.notify("waiting for the end of the training, and its model")
        return {}, facts

    def _start(self, question: Message) -> Answer:
        """Overall means and variances, and local centroids, for the start of the Gaussians."""
        job, rows = self._training_rows(question)
        whole = FederatedGMM(1).overall(rows.features)
        arrays: Arrays = {
            "overall/mean": as_array(whole.means[0]),
            "overall/variances": as_array(whole.covariances[0]),
        }
        clusters, most = _whole(question, "clusters"), _whole(question, "most_rows")
        points, counts = np.empty((0, job.columns)), np.empty(0)
        if clusters > 1 and most > 0:
            sent = local_centroids(rows.features, clusters, job.options.seed, most)
            enough = sent.counts >= self._least(job)
            points, counts = sent.points[enough], sent.counts[enough]
        arrays["centroids/points"] = np.ascontiguousarray(points, dtype=np.float64)
        arrays["centroids/counts"] = np.ascontiguousarray(counts, dtype=np.float64)
        return arrays, {"rows": len(rows)}

    def _assigned(self, question: Message) -> Answer:
        """Sums of the rows nearest to each of the start's means."""
        job, rows = self._training_rows(question)
        frame = frame_of(job.method).gaussians
        means = question.arrays.get("means")
        if means is None or means.shape != (frame.components, job.columns):
            raise MessageError("the means of the start are missing or of the wrong shape.")
        kind = frame.covariance_type
        # only the means decide who is nearest
        spread = torch.ones((), dtype=torch.float64)
        match kind:
            case "full":
                spread = torch.eye(job.columns, dtype=torch.float64).expand(len(means), -1, -1)
            case "tied":
                spread = torch.eye(job.columns, dtype=torch.float64)
            case "diag":
                spread = spread.expand(len(means), job.columns)
            case _:
                spread = spread.expand(len(means))
        current = gaussians(as_tensor(means).double(), spread, kind)
        method = replace(frame, aggregation="exact")
        update = method.sums_of_assigned(rows.features, current, "nearest", job.options.seed)
        arrays: Arrays = {"counts": as_array(update.counts[0])}
        put_moments(arrays, update.moments, kind, self._least(job))
        return arrays, {"rows": len(rows)}

    # ------------------------------------------------------------------ rounds

    def _round(self, question: Message) -> Answer:
        """One round of the method on the site's rows."""
        started = time.perf_counter()
        job, rows = self._training_rows(question)
        run, phase, number, since = _place(question)
        method = job.method_of(phase)
        self._folder.begin(run)
        shared = received(method, question.arrays, job.columns)
        personal = self._personal(question, job, phase, shared)
        facts: dict[str, Any] = {"rows": len(rows)}
        entry = {"round": float(number)}
        with self._quietly(job):
            labelled = job.options.algorithm != DENSITY
            if self.settings.share_metrics and labelled and number > 1 and since:
                facts["validation"] = self._watch(job, phase, shared, personal)
            moved, update = method.client_step(shared, personal, rows, number)
        fit: Any = getattr(update, "mixture", None) or getattr(update, "fit", update)
        entry["log_likelihood"] = float(fit.log_likelihood) / len(rows)
        entry["seconds"] = time.perf_counter() - started
        least = self._least(job)
        arrays = update_arrays(method, update, job.precision, least)
        self._folder.keep(run, Progress(phase, number, shared, moved), since)
        self._folder.add_history(entry)
        self.notify(f"round {number}: answered in {entry['seconds']:.1f} s")
        return arrays, facts

    def _personal(self, question: Message, job: Job, phase: Phase, shared: Any) -> Any:
        """What the site kept after the last round that counted, or what a newcomer starts with."""
        run, _, _, since = _place(question)
        method = job.method_of(phase)
        found = self._folder.personal(run, phase, since, method)
        if found is not None:
            return found
        if since:
            self.notify(f"nothing is left of round {since} here; starting as a newcomer")
        newcomer = method.newcomer(shared)
        return take_personal(question.arrays, newcomer)

    def _watch(self, job: Job, phase: Phase, shared: Any, personal: Any) -> dict[str, float]:
        """How good the model that came in is on the site's validation rows."""
        dataset, _ = self.table.load(job.table, job.preprocessing)
        if not len(dataset.validation):
            return {"rows": 0, "right": 0.0, "log_loss": 0.0}
        model = self._model(job, dataset, job.method_of(phase).prediction(shared, personal))
        found = model.evaluate("validation")
        rows = int(found.rows[0])
        return {
            "rows": rows,
            "right": float(found.accuracy[0]) * rows,
            "log_loss": float(found.log_loss[0]),
        }

    # ------------------------------------------------------------------ the end

    def _finish(self, question: Message) -> Answer:
        """Make the personalised model and write the site's folder."""
        job, rows = self._training_rows(question)
        run, phase, _, _ = _place(question)
        self._folder.begin(run)
        method = job.method_of(phase)
        dataset, tables = self.table.load(job.table, job.preprocessing)
        shared = received(method, question.arrays, job.columns)
        personal = self._personal(question, job, phase, shared)
        with self._quietly(job):
            personal = method.finish(shared, personal, rows)
            model = self._model(job, dataset, method.prediction(shared, personal))
            model = replace(model, history=self._folder.history())
            self._folder.write_config(job, self.table.path, self.name)
            notes = [str(note) for note in question.facts.get("notes", [])]
            self._folder.write_model(model, tables, notes)
        self.finished = True
        self.notify(f"finished: the model is in {self.settings.out}")
        metrics = self._folder.metrics()
        shared_metrics = {
            split: metrics[split] for split in ("train", "validation", "test") if split in metrics
        }
        facts: dict[str, Any] = {"rows": len(rows)}
        if self.settings.share_metrics:
            facts["metrics"] = {"clients": metrics["clients"].get(self.name), **shared_metrics}
        return {}, facts

    def _adapt(self, question: Message) -> Answer:
        """Take a finished model, for which the site learns its weights; nothing is told of its rows."""
        job = Job.from_record(question.facts, self.name)
        _, phase, _, _ = _place(question)
        method = job.method_of(phase)
        shared = received(method, question.arrays, job.columns)
        model = shared_model(job, method, shared, ())
        if model is None or model.prediction.client_weights is None:
            raise UnfitError(
                f"{job.options.algorithm} has no weights that a new site could learn on its own."
            )
        self._folder.write_config(job, self.table.path, self.name)
        write_shared_model(self._folder.run, model, {"adapted": True, "notes": []})
        return {}, {}

    def _refused(self, question: Message) -> Answer:
        """The server does not want this site, and says why."""
        self.refused = one_line(str(question.facts.get("reason", "no reason was given"))[:500])
        self.notify(f"the server refused this site: {self.refused}")
        return {}, {}

    # ------------------------------------------------------------------ helpers

    def _training_rows(self, question: Message) -> tuple[Job, LabelledRows]:
        job = Job.from_record(question.facts, self.name)
        dataset, _ = self.table.load(job.table, job.preprocessing)
        try:
            device = resolve_device(job.options.device)
        except (RuntimeError, ValueError) as error:
            raise UnfitError(f"the federation wants an accelerator: {error}") from None
        return job, dataset.train.to(device)

    def _model(self, job: Job, dataset: FederatedDataset, prediction: Any) -> FederatedModel:
        return FederatedModel(
            job.options.algorithm,
            prediction,
            [self.name],
            dataset.classes,
            dataset.input_shape,
            options=job.options.record(),
            dataset=dataset,
        )

    def _least(self, job: Job) -> int:
        return max(self.settings.min_rows, job.min_rows)

    def _quietly(self, job: Job) -> Any:
        """Small networks gain nothing from threads inside an operation."""
        net = training_of(job.method).net
        quiet = resolve_device(job.options.device).type == "cpu" and net.handling.in_lanes
        return lanes_only() if quiet else nullcontext()


def _whole(question: Message, name: str) -> int:
    value = question.facts.get(name, 0)
    if type(value) is not int or value < 0:
        raise MessageError(f"{name} is {value!r}, which is no whole number.")
    return value


def _place(question: Message) -> tuple[str, Phase, int, int]:
    """The run, the phase, the round, and the last round of this site that counted."""
    run, phase = question.facts.get("run"), question.facts.get("phase")
    if not isinstance(run, str) or not RUN_ID.fullmatch(run):
        raise MessageError("the question does not say which run it belongs to.")
    number, since = _whole(question, "round"), _whole(question, "since")
    return run, "warmup" if phase == "warmup" else "main", number, since
