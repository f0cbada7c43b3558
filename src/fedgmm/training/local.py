"""``train(dataset, algorithm) -> FederatedModel``: one door to every method."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from fedgmm.core.checks import check_choice, check_flag, check_integer, check_non_negative
from fedgmm.core.em import AGGREGATIONS
from fedgmm.core.gaussians import COVARIANCE_TYPES
from fedgmm.core.moments import Scaling, scaling_of
from fedgmm.core.params import Params
from fedgmm.core.servers import SERVER_KINDS, ServerOptimiser
from fedgmm.core.streaming import lanes_only
from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.federated import ClientRows
from fedgmm.methods.fedavg import FedAvgPlus, without_density
from fedgmm.methods.base import DENSITY, SHARED_LEARNERS, SupervisedMethod
from fedgmm.methods.clustered import ClusteredFL
from fedgmm.methods.fedgmm import LEARNER_STARTS, FedGMM
from fedgmm.methods.gmm import FederatedGMM
from fedgmm.methods.local import Local
from fedgmm.methods.local_training import SCHEDULES, LocalTraining
from fedgmm.methods.pfedme import PFedMe
from fedgmm.model.model import FederatedModel
from fedgmm.nets.devices import forget_smaller_shares, resolve_device, resolve_dtype
from fedgmm.nets.kernels.recording import forget_recordings
from fedgmm.nets.networks import Dense, ModuleFactory, Network, network
from fedgmm.nets.sgd import SGD
from fedgmm.nets.stacked import Stacked
from fedgmm.training.checkpoint import Checkpoint
from fedgmm.training.loop import Answers
from fedgmm.training.run import DivergenceWarning, OnTrainingRound, TrainingRun

__all__ = [
    "ALGORITHMS",
    "DENSITY",
    "Checkpoint",
    "DivergenceWarning",
    "OnTrainingRound",
    "TrainingOptions",
    "build",
    "train",
]

ALGORITHMS = (
    "fedgmm",
    "fedem",
    "fedavg",
    "fedprox",
    "fedavg+",
    "local",
    "clustered",
    "pfedme",
)

_WITH_EXACT_STEPS = ("fedgmm", "fedem", "fedavg", "fedavg+")


@dataclass(frozen=True)
class TrainingOptions:
    """Everything that decides a run, with defaults that work.

    Attributes:
        algorithm: one of ``ALGORITHMS``, or ``"gmm"`` for the density of rows without labels.
        rounds: most rounds.
        components: ``M1`` Gaussians.
        learners: ``M2`` learners.
        learner: ``"linear"``, ``"mlp"``, ``"cnn"``, ``"mobilenet"`` (MobileNet-V2, colour images) or a
            function that makes a ``torch.nn.Module``.
        solver: of the learners: ``"sgd"``, ``"newton"`` (linear only), or ``"auto"``: exact steps
            for linear learners of the mixture methods, gradient steps otherwise. Methods that are
            defined by their gradient steps (FedProx, Local, Clustered FL, pFedMe) always take them.
        start: of the learners: ``"tied"`` to the Gaussians, ``"split"`` from one, ``"random"``; or
            ``"auto"``: tied for FedGMM, random otherwise.
        warmup: rounds of one shared learner (FedAvg) that come first and count as rounds.
        lr: learning rate of local SGD.
        momentum: within a client's round.
        weight_decay: of local SGD.
        clip_norm: largest norm of a gradient in local SGD, of each client and learner by itself; larger
            ones are scaled down. ``None`` takes them as they are.
        schedule: of the learning rate: ``"constant"``; ``"cooldown"``, constant but for the last fifth
            of the rounds, in which it falls towards zero; ``"cosine"``; or ``"sqrt"``.
        augment: random crops and flips of images, anew in every step.
        pretrained: a file with torchvision's weights that the learners start from (``"mobilenet"``).
        local_epochs: passes over a client's rows in a round.
        batch_size: rows a step.
        covariance_type: of the Gaussians.
        aggregation: ``"exact"`` or ``"paper"``.
        reg_covar: added to every variance; inputs are standardised.
        ridge: penalty of exact steps.
        independence: how many rows a client's own shares of the learners count for within each
            Gaussian of FedGMM: 0 lets every Gaussian have learners of its own, a large number makes
            learners independent of Gaussians.
        personal_labels: after the last round, let it count how frequent labels are at each client
            (methods of ``SHARED_LEARNERS``), see :meth:`FederatedModel.learn_labels`; what is watched
            and ``patience`` see the model without.
        server: ``"average"``, ``"momentum"`` or ``"adam"``; the last two follow ``schedule``
            (exact steps have none).
        server_lr: step size of the server; ``None`` is 1, and 0.01 for Adam.
        server_momentum: its momentum.
        participation: share of the clients that take part in a round.
        patience: stop after this many rounds without a better validation log-likelihood, and keep
            the best round; ``None`` runs to the end.
        tol: stop when the training log-likelihood changes by less in a round; ``None`` never does.
        proximal: strength of FedProx.
        finetune_epochs: of FedAvg+.
        penalty: ``λ`` of pFedMe.
        inner_steps: of pFedMe.
        mixing: ``β`` of pFedMe.
        standardise: scale columns to mean zero and variance one, from sums over clients.
        seed: of everything random.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        dtype: of the learners and of the Gaussians' products.
        precision: ``"full"``, or ``"mixed"``: on an accelerator, the products of convolutional learners
            in bfloat16, two thirds of the time; parameters stay as they are.
    """

    algorithm: str = "fedgmm"
    rounds: int = 100
    components: int = 3
    learners: int = 3
    learner: str | ModuleFactory = "linear"
    solver: str = "auto"
    start: str = "auto"
    warmup: int = 0
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    schedule: str = "constant"
    augment: bool = False
    pretrained: str | None = None
    local_epochs: int = 1
    batch_size: int = 128
    covariance_type: str = "full"
    aggregation: str = "exact"
    reg_covar: float = 1e-2
    ridge: float = 1.0
    independence: float = 0.0
    personal_labels: bool = False
    server: str = "average"
    server_lr: float | None = None
    server_momentum: float = 0.9
    participation: float = 1.0
    patience: int | None = None
    tol: float | None = 1e-6
    proximal: float = 0.1
    finetune_epochs: int = 1
    penalty: float = 15.0
    inner_steps: int = 5
    mixing: float = 1.0
    standardise: bool = True
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    precision: str = "full"

    def check(self) -> None:
        """Raise ``ValueError`` or ``TypeError`` with the option's name and value."""
        for name in (
            "rounds",
            "components",
            "learners",
            "batch_size",
            "local_epochs",
            "inner_steps",
        ):
            check_integer(name, getattr(self, name), 1)
        for name in ("warmup", "seed", "finetune_epochs"):
            check_integer(name, getattr(self, name), 0)
        if self.seed >= 2**32:
            raise ValueError(f"seed must be less than 2**32, got {self.seed!r}.")
        for name in ("weight_decay", "reg_covar", "ridge", "independence", "proximal", "mixing"):
            check_non_negative(name, getattr(self, name))
        for name in ("lr", "penalty", "participation"):
            _check_positive(name, getattr(self, name))
        for name in ("server_lr", "clip_norm"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.tol is not None:
            check_non_negative("tol", self.tol)
        for name in ("momentum", "server_momentum"):
            check_non_negative(name, getattr(self, name))
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be less than 1, got {getattr(self, name)!r}.")
        if self.participation > 1:
            raise ValueError(f"participation must lie in (0, 1], got {self.participation!r}.")
        check_flag("standardise", self.standardise)
        check_flag("augment", self.augment)
        check_flag("personal_labels", self.personal_labels)
        if self.patience is not None:
            check_integer("patience", self.patience, 1)
        check_choice("algorithm", self.algorithm, (*ALGORITHMS, DENSITY))
        check_choice("solver", self.solver, ("auto", "sgd", "newton"))
        check_choice("start", self.start, ("auto", *LEARNER_STARTS))
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("server", self.server, SERVER_KINDS)
        check_choice("covariance_type", self.covariance_type, COVARIANCE_TYPES)
        check_choice("aggregation", self.aggregation, AGGREGATIONS)
        check_choice("precision", self.precision, ("full", "mixed"))
        if self.personal_labels and self.algorithm not in SHARED_LEARNERS:
            raise ValueError(
                f"personal_labels is for {', '.join(SHARED_LEARNERS)}, whose learners know nothing of a "
                f"client's labels, not for {self.algorithm!r}."
            )

    def after_divergence(self, reason: str) -> str:
        """What people are told when training has diverged: why, what is left, and what may help."""
        other = (
            "or a limit to gradients (clip_norm, such as 10)"
            if self.clip_norm is None
            else f"or a smaller clip_norm than {self.clip_norm:g}"
        )
        return (
            f"{reason}; the last good state is kept. A smaller learning rate than lr={self.lr:g} should "
            f"help, {other}."
        )

    def record(self) -> dict[str, Any]:
        """The options as plain values, for saving."""
        values = asdict(self)
        if not isinstance(self.learner, str):
            values["learner"] = "custom"
        return values


def _check_positive(name: str, value: Any) -> None:
    check_non_negative(name, value)
    if value == 0:
        raise ValueError(f"{name} must be positive, got {value!r}.")


def train(
    dataset: FederatedDataset,
    algorithm: str | None = None,
    *,
    options: TrainingOptions | None = None,
    answers: Answers | None = None,
    on_round: Iterable[OnTrainingRound] = (),
    checkpoint: Checkpoint | None = None,
    watch_accuracy: bool | int = False,
    until: int | None = None,
    **changes: Any,
) -> FederatedModel:
    """Train a method on the clients' training rows.

    Args:
        dataset: the clients.
        algorithm: one of ``ALGORITHMS``; ``None`` is the one of ``options``, FedGMM without them.
        options: a complete set of options; ``algorithm`` and ``changes`` are laid over it.
        answers: which clients answer in a round; those that do not are left out of its aggregate.
        on_round: called after every round with its entry of the history: ``round``,
            ``log_likelihood``, ``seconds``, and what is watched.
        checkpoint: where progress is written: at the start, every few rounds, and at the end. If
            the file is there already, training goes on from it, without a start of its own, and
            ends with the same bits as one that was never interrupted (on the CPU, with as many
            threads). The data, ``answers`` and all options but ``rounds``, ``device`` and
            ``personal_labels`` must be the same. A training that has finished goes on if ``rounds``
            is raised; rounds that are done stay as they are, even where another number of rounds would
            have changed them: with a schedule that knows the last round, a warm-up as long as the run,
            or the patience of FedAvg+.
        watch_accuracy: add ``validation_accuracy`` to entries of the history, to all, or to every
            second, third and so on and to the last of the ``rounds``: over all rows of a fixed sample,
            at most 20,000 validation rows, and before any tuning at home.
        until: end this call after that round, though ``rounds`` plan for more; with a checkpoint another
            call goes on as if there had been no end. One that ends before the last round of the
            warm-up leaves the model of its shared learner.
        **changes: any field of :class:`TrainingOptions`, such as ``rounds=50``.

    Returns:
        The model of the last round, or of the best one where ``patience`` is set. Ctrl-C and
        divergence end training early with a warning and leave the last good state; after Ctrl-C without
        what passes over all rows would add, such as label frequencies.

    Raises:
        CheckpointError: a checkpoint that is damaged, or of another training.
    """
    unknown = set(changes) - set(TrainingOptions.__dataclass_fields__)
    if unknown:
        raise TypeError(f"train() has no option {sorted(unknown)[0]!r}.")
    if algorithm is not None:
        changes["algorithm"] = algorithm
    # NumPy's numbers, such as those of a grid, are not taken by torch's generators
    changes = {k: v.item() if isinstance(v, np.generic) else v for k, v in changes.items()}
    chosen = replace(options or TrainingOptions(), **changes)
    chosen.check()
    if until is not None:
        check_integer("until", until, 1)
    device, dtype = resolve_device(chosen.device), resolve_dtype(chosen.dtype)
    net = _network(dataset, chosen)
    scaling = _scaling(dataset) if chosen.standardise and len(dataset.input_shape) == 1 else None
    scaled = _scaled(dataset, scaling, dtype, device)
    job = TrainingRun(
        chosen,
        build(chosen, net),
        build(replace(chosen, algorithm="fedavg", solver="sgd"), net),
        scaled,
        scaling,
        dataset,
        answers,
        tuple(on_round),
        checkpoint,
        int(watch_accuracy),
        _pretrained(chosen, net),
        until,
    )
    # small networks gain nothing from threads inside an operation
    quiet = device.type == "cpu" and net.handling.in_lanes
    try:
        with lanes_only() if quiet else nullcontext():
            return job.run()
    finally:
        if net.handling.recorded:  # or a model that is kept would keep half of a card's memory
            forget_recordings(net)
        forget_smaller_shares()


def check_training(dataset: FederatedDataset, options: TrainingOptions) -> None:
    """Raise where options do not fit each other, the data, the device, or the file of weights.

    That is most of what :func:`train` would raise before its first round; nothing is trained.

    Args:
        dataset: the clients.
        options: how they would train.
    """
    options.check()
    resolve_device(options.device)
    _pretrained(options, _network(dataset, options))


def _network(dataset: FederatedDataset, options: TrainingOptions) -> Network:
    """The learners' network, if the data suit it."""
    if len(dataset.classes) < 2 and options.algorithm != DENSITY:
        raise ValueError(
            f"There is only one class ({dataset.classes[0]!r}) in the data; classification needs two."
        )
    compute = torch.bfloat16 if options.precision == "mixed" else None
    net = network(options.learner, dataset.input_shape, len(dataset.classes), compute)
    if options.augment and len(dataset.input_shape) != 3:
        raise ValueError("augment=True crops and flips images; these inputs are none.")
    return net


def _pretrained(options: TrainingOptions, net: Network) -> Params | None:
    """The learner that training starts from, if a file of weights is given."""
    if options.pretrained is None:
        return None
    if not isinstance(net, Stacked):
        raise ValueError(
            f"pretrained={options.pretrained!r} needs learner='mobilenet', got {options.learner!r}."
        )
    generator = torch.Generator().manual_seed(options.seed)
    return net.pretrained(Path(options.pretrained), generator)


def build(options: TrainingOptions, net: Network) -> SupervisedMethod[Any, Any, Any]:
    """The method that options describe."""
    sgd = SGD(
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        clip_norm=options.clip_norm,
        proximal=options.proximal if options.algorithm == "fedprox" else 0.0,
        batch_size=options.batch_size,
        epochs=options.local_epochs,
        augment=options.augment,
    )
    dtype = resolve_dtype(options.dtype)
    training = LocalTraining(
        net,
        sgd,
        options.schedule,  # type: ignore[arg-type]
        options.rounds,
        options.seed,
        dtype,
    )
    server = ServerOptimiser(
        options.server,  # type: ignore[arg-type]
        options.server_lr or (0.01 if options.server == "adam" else 1.0),
        options.server_momentum,
    )
    solver = _solver(options, net)
    start = options.start
    if start == "auto":
        start = "tied" if options.algorithm == "fedgmm" else "random"
    mixture = FedGMM(
        training,
        options.learners,
        FederatedGMM(
            options.components,
            options.covariance_type,  # type: ignore[arg-type]
            options.aggregation,  # type: ignore[arg-type]
            reg_covar=options.reg_covar,
            dtype=dtype,
        ),
        start=start,  # type: ignore[arg-type]
        solver=solver,  # type: ignore[arg-type]
        ridge=options.ridge,
        independence=options.independence,
        server=server,
    )
    method: Any
    match options.algorithm:
        case "fedgmm":
            method = mixture
        case "gmm":
            # one learner of one class is certain of it: log P(y|x) = 0, and nothing is learned
            nothing = replace(training, sgd=replace(sgd, epochs=0))
            method = replace(mixture, training=nothing, learners=1, solver="sgd", start="random")
        case "fedem":
            method = without_density(mixture, options.learners)
        case "fedavg" | "fedprox":
            method = without_density(mixture, 1)
        case "fedavg+":
            method = FedAvgPlus(without_density(mixture, 1), options.finetune_epochs)
        case "local":
            method = Local(training)
        case "clustered":
            method = ClusteredFL(training, server=server)
        case _:
            method = PFedMe(
                training, options.penalty, options.inner_steps, mixing=options.mixing, server=server
            )
    return cast("SupervisedMethod[Any, Any, Any]", method)


def _solver(options: TrainingOptions, net: Network) -> str:
    """How the learners of a method are fitted, ``"sgd"`` or ``"newton"``."""
    if not isinstance(net, Dense) or net.hidden:
        if options.solver == "newton":
            raise ValueError("solver='newton' is exact for linear learners only; use solver='sgd'.")
        return "sgd"
    if options.solver == "auto":
        # an exact step solves a system of (K-1)(d+1) unknowns for every learner
        small = (net.classes - 1) * (net.columns + 1) <= 1000
        return "newton" if small and options.algorithm in ("fedgmm", "fedem") else "sgd"
    return options.solver if options.algorithm in _WITH_EXACT_STEPS else "sgd"


def _scaling(dataset: FederatedDataset) -> Scaling:
    """Means and deviations of the training inputs, from sums over clients."""
    rows = dataset.train
    own = ClientRows((rows.inputs,), rows.codes, rows.names)
    overall = FederatedGMM(1).overall(own)
    return scaling_of(overall.means[0].cpu(), overall.covariances[0].cpu())


def _scaled(
    dataset: FederatedDataset, scaling: Scaling | None, dtype: torch.dtype, device: torch.device
) -> FederatedDataset:
    """Training rows in scaled coordinates on the device; the other splits stay as they are."""
    train = dataset.train.to(device)
    if scaling is not None:
        train = train.with_inputs(scaling.apply(train.inputs, dtype))
    return replace(dataset, train=train)
