"""Options of a training run: their defaults, their meaning and their checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fedgmm.core.checks import check_choice, check_flag, check_integer, check_non_negative
from fedgmm.core.em import AGGREGATIONS
from fedgmm.core.gaussians import COVARIANCE_TYPES
from fedgmm.core.servers import SERVER_KINDS
from fedgmm.methods.base import DENSITY, SHARED_LEARNERS
from fedgmm.methods.fedgmm import LEARNER_STARTS
from fedgmm.methods.local_training import SCHEDULES
from fedgmm.nets.networks import ModuleFactory

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


@dataclass(frozen=True)
class TrainingOptions:
    """Options of a training run, with defaults that work.

    Attributes:
        algorithm: one of ``ALGORITHMS``, or ``"gmm"`` to fit only the density of rows without labels.
        rounds: the largest number of rounds.
        components: ``M1``, the number of Gaussians.
        learners: ``M2``, the number of learners.
        learner: ``"linear"``, ``"mlp"``, ``"cnn"``, ``"mobilenet"`` (MobileNet-V2, colour images) or a
            function that makes a ``torch.nn.Module``.
        solver: ``"sgd"``, ``"newton"`` (linear learners only) or ``"auto"``: Newton steps for linear
            learners of the mixture methods, SGD otherwise. FedProx, Local, Clustered FL and pFedMe are
            defined by their gradient steps, so they always use SGD.
        start: how learners start: ``"tied"`` to the Gaussians, ``"split"`` from one learner,
            ``"random"``, or ``"auto"``: tied for FedGMM, random otherwise.
        warmup: rounds that first train one shared learner (FedAvg); they count as rounds.
        lr: learning rate of local SGD.
        momentum: momentum of local SGD; it starts at zero in every round.
        weight_decay: weight decay of local SGD.
        clip_norm: largest norm of a gradient in local SGD, for each client and learner separately;
            larger gradients are scaled down. ``None`` does not clip.
        schedule: of the learning rate: ``"constant"``; ``"cooldown"``, constant until the last fifth of
            the rounds and then falling towards zero; ``"cosine"``; or ``"sqrt"``.
        augment: crop and flip images at random in every step.
        pretrained: a file with torchvision's weights that the learners start from (``"mobilenet"``).
        local_epochs: passes over a client's rows per round.
        batch_size: rows per step.
        covariance_type: shape of the Gaussians' covariances.
        aggregation: ``"exact"`` or ``"paper"``.
        reg_covar: added to every variance; inputs are standardised.
        ridge: ridge penalty of Newton steps.
        independence: number of rows that a client's overall learner weights count for within each
            Gaussian of FedGMM. With 0 every Gaussian has its own learner weights; a large number makes
            learners independent of Gaussians.
        personal_labels: after the last round, count how frequent each label is at each client
            (methods of ``SHARED_LEARNERS``), see :meth:`FederatedModel.learn_labels`. The history and
            ``patience`` use the model without these frequencies.
        server: ``"average"``, ``"momentum"`` or ``"adam"``; the last two follow ``schedule``, except
            with Newton steps, which have no schedule.
        server_lr: step size of the server; ``None`` is 1, and 0.01 for Adam.
        server_momentum: momentum of the server.
        participation: share of the clients that take part in a round.
        patience: stop after this many rounds without a better validation log-likelihood, and keep
            the best round; ``None`` does not stop early.
        tol: stop when the training log-likelihood changes by less than this in a round; ``None`` never
            stops.
        proximal: strength of FedProx's penalty.
        finetune_epochs: passes over a client's rows in the fine-tuning of FedAvg+.
        penalty: ``λ`` of pFedMe.
        inner_steps: inner steps of pFedMe.
        mixing: ``β`` of pFedMe.
        standardise: scale columns to mean zero and variance one, using sums over clients.
        seed: seed of all random numbers.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        dtype: floating-point type of the learners and of the Gaussians' products.
        precision: ``"full"``, or ``"mixed"``: on a GPU, the products of convolutional learners use
            bfloat16, which takes two thirds of the time; parameters keep their type.
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
        """Return the warning for a run that diverged: the reason, what was kept, and what may help."""
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
        """Return the options as plain values, for saving."""
        values = asdict(self)
        if not isinstance(self.learner, str):
            values["learner"] = "custom"
        return values


def _check_positive(name: str, value: Any) -> None:
    check_non_negative(name, value)
    if value == 0:
        raise ValueError(f"{name} must be positive, got {value!r}.")
