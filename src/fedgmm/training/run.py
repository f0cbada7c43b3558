"""One training: the warm-up, the rounds, what is watched and written down on the way, and its end."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedgmm.core.moments import Scaling
from fedgmm.core.params import Params
from fedgmm.data.dataset import FederatedDataset, LabelledRows
from fedgmm.files import sha256_of
from fedgmm.methods.base import DivergedError, Prediction, RoundInfo
from fedgmm.methods.batch_statistics import settled
from fedgmm.methods.fedgmm import FedGMM
from fedgmm.model.model import FederatedModel
from fedgmm.training.checkpoint import (
    DENSITY_OPTIONS,
    WEIGHTS,
    AnyMethod,
    Best,
    Checkpoint,
    Phase,
    Progress,
    fingerprint,
    frame_of,
    read_checkpoint,
    save_progress,
)
from fedgmm.training.loop import Answers, Participation, Run, continue_rounds

if TYPE_CHECKING:
    from fedgmm.training.local import TrainingOptions

OnTrainingRound = Callable[[dict[str, float]], None]
"""Called after every round with its entry of the history."""

INTERRUPTED = "interrupted"
"""Why a model's training stopped, after Ctrl-C."""

_WATCHED_ROWS = 20_000


class DivergenceWarning(UserWarning):
    """Training stopped because a client's learner was no longer finite."""


@dataclass(frozen=True)
class _Part:
    """The warm-up, or the training proper: a method and where its rounds stand."""

    phase: Phase
    method: AnyMethod
    run: Run[Any, Any]
    first_round: int


@dataclass
class TrainingRun:
    """One training.

    Attributes:
        options: everything that decides it.
        method: what is trained.
        warm_up: FedAvg with the same options, for the rounds before.
        scaled: the data with training rows in scaled coordinates, on the device.
        scaling: of the inputs.
        dataset: the data as they came.
        answers: which clients answer in a round.
        on_round: called after every round.
        checkpoint: where progress is written, and read if there is any.
        watch_accuracy: every so many rounds, and after the last that was planned, the history tells the
            accuracy on validation rows; zero means never.
        learner: a trained learner to start from, ``(...)`` without a learner axis.
        until: the last round of this call, where the options plan for more.
        history: one entry a round.
        best: the best round so far, where there is patience.
    """

    options: TrainingOptions
    method: AnyMethod
    warm_up: AnyMethod
    scaled: FederatedDataset
    scaling: Scaling | None
    dataset: FederatedDataset
    answers: Answers | None
    on_round: tuple[OnTrainingRound, ...]
    checkpoint: Checkpoint | None = None
    watch_accuracy: int = 0
    learner: Params | None = None
    until: int | None = None
    history: list[dict[str, float]] = field(default_factory=list)
    best: Best | None = None

    def run(self) -> FederatedModel:
        """Train, or go on with what a checkpoint holds."""
        part = self._resume() or self._start()
        why = None
        last_round = min(self.options.rounds, self.until or self.options.rounds)
        if part.phase == "warmup":
            warmed = self._go_on(part, min(self._warm_up_rounds, last_round), tol=None)
            why = self._why_stopped(warmed.interrupted, warmed.diverged)
            if why is None and last_round < self._warm_up_rounds:
                return self._finished(self.warm_up, warmed.shared, warmed.personal, None)
            part = self._start_main(warmed, keep=why is None)
        if why is None:
            run = self._go_on(part, last_round, tol=self.options.tol)
            why = self._why_stopped(run.interrupted, run.diverged)
        shared, personal = part.run.shared, part.run.personal
        if self.best is not None:
            shared, personal = self.best.shared, self.best.personal
        try:
            personal = self.method.finish(shared, personal, self.scaled.train)
        except DivergedError as error:
            why = why or self._why_stopped(False, f"the end: {error}")
        except KeyboardInterrupt:  # nobody is tuned; what the rounds made is kept
            why = self._why_stopped(True, None)
        return self._finished(self.method, shared, personal, why)

    # ------------------------------------------------------------------ where it starts

    @property
    def _warm_up_rounds(self) -> int:
        return min(self.options.warmup, self.options.rounds - 1)

    def _start(self) -> _Part:
        if not self._warm_up_rounds:
            return self._start_main(None)
        part = self._first("warmup", self.warm_up, done=0, learner=self.learner)
        self._save(part)
        return part

    def _start_main(self, warmed: Run[Any, Any] | None, keep: bool = True) -> _Part:
        """The method's own start; ``keep`` says whether it is worth a checkpoint."""
        if warmed is None:
            part = self._first("main", self.method, done=0, learner=self.learner)
        else:
            learner = {name: value[0] for name, value in warmed.shared.learners.items()}
            done = max(warmed.round, self._warm_up_rounds)
            part = self._first("main", self.method, done, learner)
        if keep:
            self._save(part)
        return part

    def _first(self, phase: Phase, method: AnyMethod, done: int, learner: Params | None) -> _Part:
        shared, personal = method.init(self.scaled.train, learner)
        return _Part(phase, method, Run(shared, personal, round=done), done + 1)

    # ------------------------------------------------------------------ rounds

    def _go_on(self, part: _Part, last_round: int, tol: float | None) -> Run[Any, Any]:
        """The rounds that are left of a part, with a checkpoint now and then and at the end."""
        run, options = part.run, self.options
        before = self.history[-1]["seconds"] if self.history else 0.0
        started = time.perf_counter() - before
        saved = (run.round, run.judged)

        def look(_: int, run: Run[Any, Any]) -> bool:
            entry = self._entry(run, started)
            last = run.round == options.rounds
            watch = self.watch_accuracy and (last or run.round % self.watch_accuracy == 0)
            if watch and len(self._watched.validation):
                entry["validation_accuracy"] = self._accuracy(part.method, run)
            if options.patience is None or part.phase == "warmup" or run.converged:
                return False
            return self._patience_is_over(part, entry, options.patience)

        def save(number: int, _: RoundInfo) -> None:
            nonlocal saved
            if self.checkpoint is not None and number - saved[0] >= self.checkpoint.every:
                self._save(part)
                saved = (number, True)

        def notify(_: int, __: RoundInfo) -> None:
            for callback in self.on_round:
                callback(self.history[-1])

        continue_rounds(
            part.method,
            run,
            self.scaled.train,
            last_round=last_round,
            tol=tol,
            on_round=[save, notify],
            participation=Participation(options.participation, self.answers, options.seed),
            stop=look,
        )
        if run.history:
            self._entry(run, started)  # Ctrl-C may have come between a round and its entry
        if saved != (run.round, run.judged):
            self._save(part)
        return run

    def _entry(self, run: Run[Any, Any], started: float) -> dict[str, float]:
        """The last round's entry of the history, made if it is not there yet."""
        if not self.history or self.history[-1]["round"] != run.round:
            self.history.append(
                {
                    "round": float(run.round),
                    "log_likelihood": run.history[-1].log_likelihood,
                    "seconds": time.perf_counter() - started,
                }
            )
        return self.history[-1]

    def _patience_is_over(self, part: _Part, entry: dict[str, float], patience: int) -> bool:
        """Score the model that would be left if this were the last round, and remember the best."""
        run = part.run
        own = part.method.finish(run.shared, run.personal, self.scaled.train)
        model = self._model_of_round(part.method, run.shared, own)
        score = -model.evaluate("validation").mean_log_loss
        entry["validation_log_likelihood"] = score
        if self.best is None or score > self.best.score + 1e-6:
            self.best = Best(score, run.round, run.shared, run.personal)
        return run.round - self.best.round >= patience

    def _accuracy(self, method: AnyMethod, run: Run[Any, Any]) -> float:
        """Share of the watched rows that are predicted right, before any tuning at home."""
        model = self._model_of_round(method, run.shared, run.personal)
        return model.evaluate("validation", self._watched).weighted_accuracy

    @cached_property
    def _watched(self) -> FederatedDataset:
        """The data set with every k-th validation row, on the device."""
        rows = self.dataset.validation
        step = max(1, -(-len(rows) // _WATCHED_ROWS))
        wanted = torch.arange(len(rows), device=rows.device) % step == 0
        some = rows.keep(wanted).to(self.scaled.train.device)
        return replace(self.dataset, validation=some)

    # ------------------------------------------------------------------ checkpoints

    @cached_property
    def _data(self) -> str:
        """The fingerprint of what the method sees: features are for Gaussians alone."""
        return fingerprint(self.dataset, features=self._has_density)

    @property
    def _has_density(self) -> bool:
        return isinstance(self.method, FedGMM) and self.method.density

    @cached_property
    def _record(self) -> dict[str, Any]:
        """The options as JSON can hold them, and what the file of weights holds."""
        weights = self.options.pretrained
        return {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in self.options.record().items()
        } | {WEIGHTS: None if weights is None else sha256_of(Path(weights))}

    def _save(self, part: _Part) -> None:
        if self.checkpoint is None:
            return
        run = part.run
        progress = Progress(
            part.phase,
            run.round,
            run.shared,
            run.personal,
            self.history,
            self.best,
            part.first_round,
            run.judged,
            run.converged,
            self._record,
            self._data,
        )
        save_progress(self.checkpoint.path, progress)

    def _resume(self) -> _Part | None:
        """Where the checkpoint stands, if there is one."""
        if self.checkpoint is None or not self.checkpoint.path.exists():
            return None
        stored = read_checkpoint(self.checkpoint.path)
        # older checkpoints of methods without Gaussians were about features, too
        free = () if self._has_density else DENSITY_OPTIONS
        stored.check_settings(self._record, self._data, fingerprint(self.dataset), free=free)
        method = self.warm_up if stored.phase == "warmup" else self.method
        progress = stored.progress(method, self.scaled.train.device)
        self.history, self.best = progress.history, progress.best
        run = progress.run
        run.shared = _facing(method, run.shared, self.scaled.train)
        return _Part(progress.phase, method, run, progress.first_round)

    # ------------------------------------------------------------------ how it ends

    def _why_stopped(self, interrupted: bool, diverged: str | None) -> str | None:
        if interrupted:
            warnings.warn(
                "Training was interrupted; the last finished round is kept.",
                RuntimeWarning,
                stacklevel=4,
            )
            return INTERRUPTED
        if diverged:
            reason = self.options.after_divergence(diverged)
            warnings.warn(f"Training stopped in {reason}", DivergenceWarning, stacklevel=4)
            return reason
        return None

    def _finished(
        self, method: AnyMethod, shared: Any, personal: Any, stopped: str | None
    ) -> FederatedModel:
        """The model that a call leaves behind.

        Whoever presses Ctrl-C does not want to wait for passes over all rows, nor to lose what was trained.
        """
        model = self._model(method.prediction(shared, personal), stopped)
        if stopped == INTERRUPTED:
            return model
        try:
            model.prediction = settled(model.prediction, self.scaled.train)
            if self.options.personal_labels:
                model.learn_labels()
        except KeyboardInterrupt:
            model.stopped = self._why_stopped(interrupted=True, diverged=None)
        return model

    def _model_of_round(self, method: AnyMethod, shared: Any, personal: Any) -> FederatedModel:
        """The model that would be left if this were the last round."""
        prediction = method.prediction(shared, personal)
        return self._model(settled(prediction, self.scaled.train), None)

    def _model(self, prediction: Prediction, stopped: str | None) -> FederatedModel:
        return FederatedModel(
            self.options.algorithm,
            prediction,
            list(self.dataset.names),
            self.dataset.classes,
            self.dataset.input_shape,
            self.scaling,
            self.options.record(),
            self.history,
            stopped,
            features_are_inputs=self.dataset.train.features_are_inputs,
            dataset=self.dataset,
        )


def _facing(method: AnyMethod, shared: Any, rows: LabelledRows) -> Any:
    """A state that may have been trained with other features than ``rows`` have.

    Without a density the one Gaussian says nothing of any row, wherever its mean ``(1, d)`` lies; that only
    has to have as many columns as the features.
    """
    frame = frame_of(method)
    if not isinstance(frame, FedGMM) or frame.density:
        return shared
    old = shared.mixture.gaussians
    columns = rows.features.columns
    if old.means.shape[-1] == columns:
        return shared
    own = replace(old, means=old.means.new_zeros(len(old.means), columns))
    return replace(shared, mixture=replace(shared.mixture, gaussians=own))
