"""Training with all clients in this process: ``train(dataset, algorithm) -> FederatedModel``."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Never

import numpy as np
import torch

from fedgmm.core.moments import Scaling, scaled, scaling_of
from fedgmm.core.params import Params
from fedgmm.core.pca import PCA, fit_pca, moments_of
from fedgmm.data.dataset import FederatedDataset, LabelledRows
from fedgmm.data.federated import ClientRows
from fedgmm.files import sha256_of
from fedgmm.methods.base import (
    DENSITY,
    SHARED_LEARNERS,
    AnyMethod,
    DivergedError,
    Prediction,
    RoundInfo,
)
from fedgmm.methods.batch_statistics import recompute_statistics
from fedgmm.methods.gmm import overall_gaussian
from fedgmm.model.adaptation import with_prior
from fedgmm.model.decisions import default_positive
from fedgmm.model.model import FederatedModel
from fedgmm.nets.devices import reset_memory_shares, resolve_device, resolve_dtype
from fedgmm.nets.kernels.recording import forget_recordings
from fedgmm.nets.modules import ModuleNetwork
from fedgmm.nets.networks import ModuleFactory, function_of
from fedgmm.privacy.private_networks import private_method
from fedgmm.privacy.settings import Privacy
from fedgmm.support.checks import check_integer, check_known
from fedgmm.support.streaming import lanes_only
from fedgmm.training.build import build, build_warm_up, learner_network, pretrained_learner
from fedgmm.training.checkpoint import (
    DENSITY_OPTIONS,
    WEIGHTS,
    Checkpoint,
    Phase,
    Progress,
    fingerprint,
    read_checkpoint,
    save_progress,
)
from fedgmm.training.loop import (
    Participates,
    Participation,
    Run,
    StackedClients,
    Training,
    as_callbacks,
    run_rounds,
)
from fedgmm.training.options import TrainingOptions
from fedgmm.training.private import (
    Account,
    PrivateClients,
    check_private,
    declared_scaling,
    descends,
    private_rounds,
    unit_weights,
    warn_of_noise,
)
from fedgmm.wording import counted

OnTrainingRound = Callable[[dict[str, float]], None]
"""Called after every round with its entry of the history."""

INTERRUPTED = "interrupted"
"""The reason why a model's training stopped, after Ctrl-C."""

UNSET: Any = type("Unset", (), {"__repr__": lambda _: "<as in options>"})()
"""Default of the keywords of :func:`train`: not given, so that ``None`` is a value of its own."""

_WATCHED_ROWS = 20_000
_REFIT_ROUNDS, _REFIT_TOL = 20, 1e-6
_DECIDING_ROWS = 30  # validation rows; fewer say little about label frequencies
_COUNTED_ROWS = 150  # training rows that may decide in place of validation rows, each left out

_ELSEWHERE = {"random_state": "seed", "max_iter": "rounds"}
"""Names of scikit-learn that are far from ours."""


class DivergenceWarning(UserWarning):
    """Training stopped because a client's learner was not finite."""


@dataclass(frozen=True)
class LocalClients(StackedClients):
    """Stacked clients of a data set, for a whole training run."""

    # makes a model from the prediction that a method would leave, for scores
    models: Callable[[Prediction], FederatedModel] = field(kw_only=True)

    def start(self, method: AnyMethod, learner: Params | None) -> tuple[Any, Any]:
        """Return the method's start."""
        return method.init(self.rows, learner)  # type: ignore[arg-type]

    def finish(self, method: AnyMethod, shared: Any, personal: Any) -> Any:
        """Return the personal parts after the work that follows the last round."""
        return method.finish(shared, personal, self.rows)  # type: ignore[arg-type]

    def score(self, method: AnyMethod, shared: Any, personal: Any) -> float:
        """Return the validation log-likelihood of the model if this round were the last."""
        own = self.finish(method, shared, personal)
        model = self.models(method.prediction(shared, own))
        if model.algorithm == DENSITY and model.dataset is not None:
            rows = model.dataset.validation
            return float(model.score_samples(rows.inputs.cpu().numpy(), rows.owners).mean())
        return -model.evaluate("validation").mean_log_loss

    def accepted(self, number: int, info: RoundInfo) -> dict[str, Any]:
        """Return nothing to add to the history."""
        return {}

    def remember_best(self) -> None:
        """Do nothing, because the loop holds the personal parts of the best round."""


def train(  # noqa: D417 (the options are described in TrainingOptions)
    dataset: FederatedDataset,
    algorithm: str | None = None,
    *,
    options: TrainingOptions | None = None,
    answers: Participates | None = None,
    on_round: OnTrainingRound | Iterable[OnTrainingRound] | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
    watch_accuracy: bool | int = False,
    until: int | None = None,
    privacy: Privacy | None = None,
    rounds: int = UNSET,
    components: int | Literal["auto"] = UNSET,
    learners: int | Literal["auto"] = UNSET,
    learner: str | ModuleFactory = UNSET,
    solver: str = UNSET,
    start: str = UNSET,
    warmup: int = UNSET,
    lr: float = UNSET,
    momentum: float = UNSET,
    weight_decay: float = UNSET,
    clip_norm: float | None = UNSET,
    schedule: str = UNSET,
    augment: bool = UNSET,
    pretrained: str | None = UNSET,
    local_epochs: int = UNSET,
    batch_size: int = UNSET,
    covariance_type: str = UNSET,
    aggregation: str = UNSET,
    pca: int | None = UNSET,
    reg_covar: float = UNSET,
    ridge: float = UNSET,
    independence: float = UNSET,
    personal_labels: bool | Literal["auto"] = UNSET,
    refit: bool = UNSET,
    server: str = UNSET,
    server_lr: float | None = UNSET,
    server_momentum: float = UNSET,
    participation: float = UNSET,
    patience: int | None = UNSET,
    tol: float | None = UNSET,
    proximal: float = UNSET,
    finetune_epochs: int = UNSET,
    penalty: float = UNSET,
    inner_steps: int = UNSET,
    mixing: float = UNSET,
    standardise: bool = UNSET,
    seed: int = UNSET,
    device: str = UNSET,
    dtype: str = UNSET,
    precision: str = UNSET,
    **unknown: Never,
) -> FederatedModel:
    """Train a method on the clients' training rows.

    In a script that ``torchrun`` starts, every process calls this function with the same options. The data
    set of rank 0 counts; its clients are dealt to all ranks, and all get the same model. Callbacks,
    warnings and the checkpoint are those of rank 0.

    Every field of :class:`TrainingOptions` is a keyword of this function, too, such as ``rounds=50``;
    its meaning and its default are described there. ``components="auto"`` and ``learners="auto"``
    choose the numbers, and ``ridge`` if it is not given, by short runs, and the model's options hold them.

    Args:
        dataset: the clients.
        algorithm: one of ``ALGORITHMS``; ``None`` takes the one of ``options``, which is FedGMM by
            default.
        options: a complete set of options; ``algorithm`` and keywords that are given override it.
        answers: which clients reply in a round; the others are left out of its sums.
        on_round: a function, or several, called after every round with its entry of the history: ``round``,
            ``log_likelihood``, ``seconds``, and what is watched.
        checkpoint: a file for the progress, written at the start, every few rounds (``Checkpoint`` sets
            how many; a path means five) and at the end.
            If the file exists, training resumes from it and ends with the same bits as an
            uninterrupted run (on a CPU, with as many threads). The data, ``answers`` and all options
            except ``rounds``, ``device``, ``personal_labels`` and ``refit`` must be the same. A finished
            run continues if ``rounds`` is raised. Rounds that are done stay as they are, even if another
            number of rounds would have changed them: with a schedule that depends on the last round,
            a warm-up as long as the run, or the patience of FedAvg+.
        watch_accuracy: add ``validation_accuracy`` to every entry of the history, or to every second,
            third and so on and to the last of the ``rounds``. The accuracy is that of all rows of a
            fixed sample of at most 20,000 validation rows, before any tuning at home. Models of numbers
            have none.
        until: end this call after that round, although ``rounds`` plan for more; with a checkpoint
            another call continues as if the first had not ended. A call that ends within the warm-up
            returns the model of its shared learner.
        privacy: train with differential privacy, if it has an ``epsilon``. The bound holds for everything
            that clients share: all parameters except their own weights, which each client learns at home
            after the last round. The history has ``epsilon`` after each round, the model's ``privacy``
            what was spent. Noise does not follow ``seed``, so two runs differ.
        rounds, ..., precision: the options, see :class:`TrainingOptions`.
        **unknown: raises ``TypeError`` with the nearest known name.

    Returns:
        The model of the last round, or of the best one if ``patience`` is set. Ctrl-C and divergence
        end training early with a warning and keep the last good state. After Ctrl-C the model lacks
        everything that needs another pass over all rows, such as label frequencies.

    Raises:
        CheckpointError: the checkpoint is damaged or belongs to another run.
    """
    given = {
        name: value
        for name, value in locals().items()
        if name in TrainingOptions.__dataclass_fields__ and value is not UNSET
    }
    for name in unknown:
        if name in _ELSEWHERE:
            raise TypeError(f"train() has no option {name!r}; use {_ELSEWHERE[name]!r}.")
        known = list(inspect.signature(train).parameters)[:-1]
        check_known("train() has no option", name, known, TypeError)
    if not isinstance(dataset, FederatedDataset):
        raise TypeError(
            f"train() needs a FederatedDataset, got {type(dataset).__name__}; make one with "
            "FederatedDataset.from_arrays(X, y, clients)."
        )
    if isinstance(checkpoint, (str, Path)):
        checkpoint = Checkpoint(Path(checkpoint))
    if not isinstance(checkpoint, Checkpoint | None):
        raise TypeError(f"checkpoint must be the path of a file, got {checkpoint!r}.")
    if algorithm is None:
        del given["algorithm"]
    # torch's generators do not accept NumPy's numbers, such as those of a grid
    given = {k: v.item() if isinstance(v, np.generic) else v for k, v in given.items()}
    chosen = replace(options or TrainingOptions(), **given)
    chosen.check()
    if not isinstance(privacy, Privacy | None):
        raise TypeError(f"privacy must be a fedgmm.Privacy, got {privacy!r}.")
    budget = privacy if privacy is not None and privacy.is_noised else None
    if budget is not None:
        if watch_accuracy:
            raise ValueError("watch_accuracy scores rows without noise; leave it out with epsilon.")
        if several_ranks():
            raise ValueError("epsilon is for one process; start the training without torchrun.")
        check_private(dataset, chosen, budget)
        noised = private_rounds(chosen, budget)
        # a log-likelihood full of noise must not end the run
        chosen, budget = replace(chosen, rounds=noised, tol=None), replace(budget, rounds=noised)
    if until is not None:
        check_integer("until", until, 1)
    callbacks = as_callbacks(on_round)

    def run() -> FederatedModel:
        from fedgmm.training.selection import with_sizes  # it trains, too

        free = ["ridge"] if options is None and "ridge" not in given else []
        complete = with_sizes(
            chosen, dataset, None if checkpoint is None else checkpoint.path, free
        )
        ends = (answers, callbacks, checkpoint, int(watch_accuracy), until, budget)
        job = _LocalTraining(dataset, complete, *ends)
        net = job.net
        # small networks gain nothing from threads inside an operation
        quiet = resolve_device(chosen.device).type == "cpu" and net.hints.in_lanes
        try:
            with lanes_only() if quiet else nullcontext():
                return job.run()
        finally:
            if net.hints.recorded:  # otherwise a kept model would hold half of a GPU's memory
                forget_recordings(net)
            reset_memory_shares()

    if not several_ranks():
        return run()
    from fedgmm.training.distributed import lead_or_follow

    def received(model: FederatedModel | None) -> FederatedModel:
        assert model is not None
        return replace(model, dataset=dataset)

    return lead_or_follow(run, received, chosen.learner)


def several_ranks() -> bool:
    """Return whether this process is one of several that ``torchrun`` started."""
    known = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)
    return known and os.environ["WORLD_SIZE"] != "1"


def _principal_components(
    rows: LabelledRows, options: TrainingOptions, vectors: tuple[int, ...]
) -> PCA | None:
    """Return the map of scaled rows to what the Gaussians see, if the options have ``pca``.

    Columns of vectors are reduced, and other columns stand beside their components; without vectors all
    columns are reduced.
    """
    if options.pca is None:
        return None
    shape = tuple(rows.inputs.shape[1:])
    if len(shape) != 1 or not rows.features_are_inputs:
        raise ValueError(
            f"pca={options.pca} needs rows of numbers without separate features, got shape {shape}."
        )
    block = vectors or tuple(range(*shape))
    most = min(len(rows), len(block))
    if options.pca > most:
        raise ValueError(
            f"pca={options.pca} is more than {counted(len(rows), 'training row')} of "
            f"{counted(len(block), 'column')} can have; use at most {most}."
        )
    centre = torch.zeros(len(block), dtype=torch.float64)
    return fit_pca(moments_of(rows.inputs, centre, vectors), options.pca).within(block, *shape)


def projected(rows: LabelledRows, projection: PCA | None) -> LabelledRows:
    """Return scaled rows whose Gaussians see principal components, if there is a projection."""
    if projection is None:
        return rows
    seen = projection.apply(rows.inputs, dtype=rows.inputs.dtype)
    features = ClientRows((seen,), rows.codes, rows.names, rows.weights)
    return replace(rows, features=features, features_are_inputs=False)


def check_training(dataset: FederatedDataset, options: TrainingOptions) -> None:
    """Raise if options do not fit each other, the data, the device, or the file of weights.

    This is most of what :func:`train` would raise before its first round; nothing is trained.
    """
    options.check()
    resolve_device(options.device)
    net = learner_network(options, dataset.input_shape, dataset.classes)
    pretrained_learner(options, net)


class _LocalTraining:
    """One call of :func:`train`: the data in scaled coordinates, the loop, and the model it leaves."""

    def __init__(
        self,
        dataset: FederatedDataset,
        options: TrainingOptions,
        answers: Participates | None,
        on_round: tuple[OnTrainingRound, ...],
        checkpoint: Checkpoint | None,
        watch_accuracy: int,
        until: int | None,
        privacy: Privacy | None = None,
    ) -> None:
        self.dataset, self.options, self.watch_accuracy = dataset, options, watch_accuracy
        self.net = learner_network(options, dataset.input_shape, dataset.classes)
        device = resolve_device(options.device)
        function = function_of(self.net)
        custom = function if isinstance(function, ModuleNetwork) else None
        columns = options.standardise and len(dataset.input_shape) == 1
        if custom is not None and custom.integer_inputs:
            columns = False  # integers would not stay integers
        self.scaling: Scaling | None = None
        if privacy is not None:
            self.scaling = declared_scaling(privacy, dataset)
        elif columns:
            raw = dataset.train
            overall = overall_gaussian(ClientRows((raw.inputs,), raw.codes, raw.names, raw.weights))
            self.scaling = scaling_of(overall.means[0].cpu(), overall.covariances[0].cpu())
        rows = self._scaled(dataset, device)
        self.projection = _principal_components(rows, options, dataset.vectors)
        self.rows = projected(rows, self.projection)
        if custom is not None and options.algorithm != DENSITY:
            custom.check(self.rows.inputs)
        method, warm_up = build(options, self.net), build_warm_up(options, self.net)
        participation = Participation(options.participation, answers, options.seed)
        self.clients: LocalClients | PrivateClients = LocalClients(
            self.rows, participation, models=self._scored_model
        )
        self.private: PrivateClients | None = None
        if privacy is not None:
            columns = len(dataset.input_shape) == 1
            base: Any = method
            method = private_method(base, privacy, columns=columns, descent=descends(options))
            warn_of_noise(method, dataset)
            path = None if checkpoint is None else checkpoint.path
            account = Account(privacy, path, "" if path is None else fingerprint(dataset))
            weights = unit_weights(privacy, self.rows.codes.cpu(), dataset.persons)
            self.private = PrivateClients(self.rows, privacy, account, weights)
            self.clients = self.private
        elif several_ranks():
            from fedgmm.training.distributed import RankClients
            from fedgmm.training.ranks import join

            methods: dict[Phase, AnyMethod] = {"main": method, "warmup": warm_up}
            own, classes = self.clients, len(dataset.classes)
            self.clients = RankClients.dealt(join(), own, options, classes, methods)
        self.loop = Training(
            method,
            warm_up,
            self.clients,
            options,
            pretrained_learner(options, self.net),
            until=until,
            on_round=on_round,
            watch=self._watch if watch_accuracy else None,
        )
        if self.private is not None:
            self.private.loop = self.loop
        if checkpoint is not None:
            self.loop.store, self.path = self, checkpoint.path
            # no release may be seen before it is on the disk
            self.loop.save_every = checkpoint.every if privacy is None else 1

    def run(self) -> FederatedModel:
        """Train, and return the model."""
        loop, stopped = self.loop, None
        loop.train()
        if loop.run.interrupted:
            stopped = self._interrupted()
        elif loop.run.diverged is not None:
            stopped = self._diverged(loop.run.diverged)
        if loop.phase == "warmup":
            if stopped is None:  # the call ends within the warm-up
                return self._finished(loop.warm_up, *loop.outcome, None)
            loop.begin_method(save=False)
        shared, personal = loop.outcome
        try:
            personal = self.clients.finish(loop.method, shared, personal)
        except DivergedError as error:
            stopped = stopped or self._diverged(f"the end: {error}")
        except KeyboardInterrupt:  # no client is tuned, and the result of the rounds is kept
            stopped = self._interrupted()
        return self._finished(loop.method, shared, personal, stopped)

    def _finished(
        self, method: AnyMethod, shared: Any, personal: Any, stopped: str | None
    ) -> FederatedModel:
        """Return the model of a call.

        After Ctrl-C it skips passes over all rows, because the user does not want to wait for them.
        """
        if self.private is not None:
            return self._private_model(method, shared, personal, stopped)
        model = self._model(method.prediction(shared, personal), stopped)
        if stopped == INTERRUPTED:
            return model
        try:
            model.prediction = recompute_statistics(model.prediction, self.rows)
            rows = self.rows.features.rows_per_client
            model.prediction = with_prior(model.prediction, rows)
            wanted = self.options.personal_labels
            if wanted and (wanted != "auto" or self._may_learn_labels):
                model.learn_labels(if_better=wanted == "auto")
            self._refit(model, method, shared, personal)
        except KeyboardInterrupt:
            model.stopped = self._interrupted()
        return model

    def _private_model(
        self, method: Any, shared: Any, personal: Any, stopped: str | None
    ) -> FederatedModel:
        """Return the model of a private call, without anything that rows decide without noise."""
        assert self.private is not None
        declared = self.scaling
        if declared is not None:
            self.scaling = method.scaling(shared, declared)
        model = self._model(method.prediction(shared, personal), stopped)
        self.scaling = declared
        if model.positive is not None:  # counts of labels must not decide
            classes = model.classes.tolist()
            model.positive = classes[default_positive(classes, (1, 1))]
        model.privacy = self.private.facts()
        return model

    def _refit(self, model: FederatedModel, method: AnyMethod, shared: Any, personal: Any) -> None:
        """Train the learners of the model on validation rows, too, if the options say so."""
        validation = self.dataset.validation
        possible = len(validation) and validation.features_are_inputs and model.stopped is None
        if not self.options.refit or method.learners_only is None or not possible:
            return
        model.calibrate()
        held_out = replace(self.dataset, train=validation)
        device = self.rows.device
        own = self.rows if self.projection is None else self._scaled(self.dataset, device)
        rows = projected(own.join(self._scaled(held_out, device)), self.projection)
        run = run_rounds(
            method.learners_only,
            Run(shared, personal),
            StackedClients(rows),
            last_round=_REFIT_ROUNDS,
            tol=_REFIT_TOL,
        )
        if run.interrupted:
            raise KeyboardInterrupt
        model.prediction = replace(model.prediction, learners=run.shared.learners)

    def _scaled(self, dataset: FederatedDataset, device: torch.device) -> LabelledRows:
        """Return the training rows of a data set in scaled coordinates."""
        dtype = resolve_dtype(self.options.dtype)
        rows = dataset.training_rows(device, dtype)
        if self.scaling is None:
            return rows
        return rows.with_inputs(scaled(rows.inputs, self.scaling, dtype))

    @property
    def _may_learn_labels(self) -> bool:
        """Whether there are enough rows to decide about label frequencies."""
        data = self.dataset
        enough = len(data.validation) >= _DECIDING_ROWS
        if not len(data.validation):
            enough = len(data.train) >= _COUNTED_ROWS
        shared = self.options.algorithm in SHARED_LEARNERS
        return shared and enough and len(data.names) > 1 and data.task == "classification"

    def _model(self, prediction: Prediction, stopped: str | None = None) -> FederatedModel:
        return FederatedModel(
            self.options.algorithm,
            prediction,
            list(self.dataset.names),
            self.dataset.classes,
            self.dataset.input_shape,
            self.scaling,
            self._record,
            self.loop.history,
            stopped,
            features_are_inputs=self.dataset.train.features_are_inputs,
            dataset=self.dataset,
            column_names=self.dataset.column_names,
            target=self.dataset.target,
            projection=self.projection,
        )

    @property
    def _record(self) -> dict[str, Any]:
        """The options for the model, with what was left open as it is before label frequencies."""
        record = self.options.record()
        return {**record, "personal_labels": record["personal_labels"] is True}

    def _scored_model(self, prediction: Prediction) -> FederatedModel:
        return self._model(recompute_statistics(prediction, self.rows))

    # ------------------------------------------------------------------ watching

    def _watch(self, method: AnyMethod, run: Run[Any, Any]) -> dict[str, float]:
        """Return the accuracy on the watched rows, before any tuning at home, if it is due."""
        due = run.round == self.options.rounds or run.round % self.watch_accuracy == 0
        if not due or not len(self._watched.validation) or self.dataset.task == "regression":
            return {}
        model = self._scored_model(method.prediction(run.shared, run.personal))
        found = model.evaluate("validation", self._watched)
        return {"validation_accuracy": found.weighted_accuracy}

    @cached_property
    def _watched(self) -> FederatedDataset:
        """The data set with every k-th validation row, on the device."""
        rows = self.dataset.validation
        step = max(1, -(-len(rows) // _WATCHED_ROWS))
        wanted = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        wanted[::step] = True
        return replace(self.dataset, validation=rows.keep(wanted).to(self.rows.device))

    # ------------------------------------------------------------------ early ends

    def _interrupted(self) -> str:
        text = "Training was interrupted; the last finished round is kept."
        warnings.warn(text, RuntimeWarning, stacklevel=5)
        return INTERRUPTED

    def _diverged(self, where: str) -> str:
        reason = self.options.after_divergence(where)
        warnings.warn(f"Training stopped in {reason}", DivergenceWarning, stacklevel=5)
        return reason

    # ------------------------------------------------------------------ the checkpoint

    def save(self, progress: Progress) -> None:
        """Write the progress with the options and the fingerprint of the data."""
        save_progress(self.path, replace(progress, options=self._settings, data=self._data))

    def load(self) -> Progress | None:
        """Return the progress in the file, if there is a file, which must belong to this run."""
        if not self.path.exists():
            return None
        stored, loop = read_checkpoint(self.path), self.loop
        # older checkpoints of methods without Gaussians cover features, too
        free = DENSITY_OPTIONS if loop.method.mixture is None else ()
        stored.check_settings(self._settings, self._data, fingerprint(self.dataset), free=free)
        method = loop.warm_up if stored.phase == "warmup" else loop.method
        return stored.progress(method, self.rows.device)

    @cached_property
    def _data(self) -> str:
        """The fingerprint of the rows that the method sees; features are for Gaussians only."""
        return fingerprint(self.dataset, features=self.loop.method.mixture is not None)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The options as plain values, and checksums of the file of weights and of frozen layers."""
        weights = self.options.pretrained
        options = self.options.record().items()
        record = {n: v.item() if isinstance(v, np.generic) else v for n, v in options}
        net = function_of(self.net)
        if isinstance(net, ModuleNetwork) and net.constants:
            record["frozen layers"] = net.fingerprint
        if self.private is not None:
            record["privacy"] = self.private.privacy.record()
        return record | {WEIGHTS: None if weights is None else sha256_of(Path(weights))}
