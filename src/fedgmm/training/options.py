"""Options of a training run: their defaults, their meaning and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fedgmm.core.em import AGGREGATIONS
from fedgmm.core.gaussians import COVARIANCE_TYPES
from fedgmm.core.server_optimisers import SERVER_KINDS
from fedgmm.methods.base import DENSITY, SHARED_LEARNERS
from fedgmm.methods.fedgmm import LEARNER_STARTS
from fedgmm.methods.local_training import SCHEDULES
from fedgmm.nets.networks import ModuleFactory
from fedgmm.support.checks import (
    Count,
    Flag,
    NonNegative,
    NonNegativeInt,
    Positive,
    check_fields,
    integer,
    number,
    one_of,
)

ALGORITHMS = ("fedgmm", "fedem", "fedavg", "fedprox", "fedavg+", "local", "clustered", "pfedme")


@dataclass(frozen=True)
class TrainingOptions:
    """Options of a training run, with defaults that work.

    Attributes:
        algorithm: one of ``ALGORITHMS``, or ``"gmm"`` to fit only the density of rows without labels.
        rounds: the largest number of rounds.
        components: ``M1``, the number of Gaussians, or ``"auto"``: chosen by the validation rows.
        learners: ``M2``, the number of learners, or ``"auto"``: chosen by the validation rows.
        learner: ``"linear"``, ``"mlp"``, ``"cnn"``, ``"mobilenet"`` (MobileNet-V2, colour images) or a
            function that makes a ``torch.nn.Module``; its frozen layers and buffers stay as they are made.
        solver: ``"sgd"``, ``"newton"`` (linear learners only) or ``"auto"``: Newton steps for linear
            learners of the mixture methods, SGD otherwise. FedProx, Local, Clustered FL and pFedMe are
            defined by their gradient steps, so they always use SGD. With a budget of privacy, ``"auto"``
            is Newton's method, and ``"sgd"`` is for few rows of many classes.
        start: how learners start: ``"tied"`` to the Gaussians, ``"split"`` from one learner,
            ``"random"``, or ``"auto"``: tied for FedGMM with several Gaussians, random otherwise.
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
        pca: number of principal components that the Gaussians see, from sums over clients: of the columns
            of vectors, beside all other columns, or of all columns if there are no vectors. ``None`` means
            all inputs. Learners always see all inputs. Use it for vectors of an encoder, because a full
            covariance of hundreds of columns has too many numbers.
        reg_covar: added to every variance; inputs are standardised.
        ridge: ridge penalty of Newton steps.
        independence: number of rows that a client's overall learner weights count for within each
            Gaussian of FedGMM. With 0 every Gaussian has its own learner weights; a large number makes
            learners independent of Gaussians.
        personal_labels: after the last round, count how frequent each label is at each client
            (methods of ``SHARED_LEARNERS``), see :meth:`FederatedModel.learn_labels`. ``"auto"`` uses
            the frequencies if validation rows gain by them more than by chance, or without such rows the
            training rows, each left out of its client's counts; the model's options say whether it
            did. The history and ``patience`` use the model without these frequencies.
        refit: after the last round, train linear learners with exact steps on the validation rows as
            well. Gaussians, weights and label frequencies stay, and novelty is calibrated before, so
            its rows were not trained on. Scores of the validation rows then say nothing about new rows.
        server: ``"average"``, ``"momentum"`` or ``"adam"``; the last two follow ``schedule``, except
            with Newton steps, which have no schedule.
        server_lr: step size of the server; ``None`` is 1, and 0.01 for Adam.
        server_momentum: momentum of the server.
        participation: share of the clients that take part in a round.
        patience: stop after this many rounds without a better validation log-likelihood, and keep
            the best round; ``None`` does not stop early. A mixture (FedGMM, FedEM, ``"gmm"``) can rest
            on a plateau before its components separate. So it stops only if the validation
            log-likelihood is also 0.01 below the best, or the training log-likelihood stands still (it
            gained less than 3e-5 per round, and its changes do not grow).
        tol: stop when the training log-likelihood changes by less than this in a round; a mixture stops
            when three rounds in a row change it by less, and the changes do not grow. ``None`` never
            stops.
        proximal: strength of FedProx's penalty.
        finetune_epochs: passes over a client's rows in the fine-tuning of FedAvg+.
        penalty: ``λ`` of pFedMe.
        inner_steps: inner steps of pFedMe.
        mixing: ``β`` of pFedMe.
        standardise: scale columns to mean zero and variance one, using sums over clients; integers for a
            module with ``integer_inputs = True`` are never scaled.
        seed: seed of all random numbers.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        dtype: floating-point type of the learners and of the Gaussians' products.
        precision: ``"full"``, or ``"mixed"``: on a GPU, the products of convolutional learners use
            bfloat16, which takes two thirds of the time; parameters keep their type.
    """

    algorithm: Annotated[str, one_of(*ALGORITHMS, DENSITY)] = "fedgmm"
    rounds: Count = 100
    components: Count | Literal["auto"] = 3
    learners: Count | Literal["auto"] = 3
    learner: str | ModuleFactory = "linear"
    solver: Annotated[str, one_of("auto", "sgd", "newton")] = "auto"
    start: Annotated[str, one_of("auto", *LEARNER_STARTS)] = "auto"
    warmup: NonNegativeInt = 0
    lr: Positive = 0.1
    momentum: Annotated[float, number(least=0, below=1)] = 0.0
    weight_decay: NonNegative = 0.0
    clip_norm: Positive | None = None
    schedule: Annotated[str, one_of(*SCHEDULES)] = "constant"
    augment: Flag = False
    pretrained: str | None = None
    local_epochs: Count = 1
    batch_size: Count = 128
    covariance_type: Annotated[str, one_of(*COVARIANCE_TYPES)] = "full"
    aggregation: Annotated[str, one_of(*AGGREGATIONS)] = "exact"
    pca: Count | None = None
    reg_covar: NonNegative = 1e-2
    ridge: NonNegative = 1.0
    independence: NonNegative = 0.0
    personal_labels: Flag | Literal["auto"] = "auto"
    refit: Flag = False
    server: Annotated[str, one_of(*SERVER_KINDS)] = "average"
    server_lr: Positive | None = None
    server_momentum: Annotated[float, number(least=0, below=1)] = 0.9
    participation: Annotated[float, number(above=0, most=1)] = 1.0
    patience: Count | None = None
    tol: NonNegative | None = 1e-6
    proximal: NonNegative = 0.1
    finetune_epochs: NonNegativeInt = 1
    penalty: Positive = 15.0
    inner_steps: Count = 5
    mixing: NonNegative = 1.0
    standardise: Flag = True
    seed: Annotated[int, integer(0, below=2**32)] = 0
    device: str = "cpu"
    dtype: str = "float32"
    precision: Annotated[str, one_of("full", "mixed")] = "full"

    def check(self) -> None:
        """Raise ``ValueError`` or ``TypeError`` with the name and the value of a wrong option."""
        check_fields(self)
        if self.personal_labels is True and self.algorithm not in SHARED_LEARNERS:
            raise ValueError(
                f"personal_labels is for {', '.join(SHARED_LEARNERS)}, whose learners all clients share, "
                f"not for {self.algorithm!r}."
            )

    @property
    def open_sizes(self) -> list[str]:
        """The options among ``components`` and ``learners`` that the data are to choose."""
        return [name for name in ("components", "learners") if getattr(self, name) == "auto"]

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers ``M1`` and ``M2``; ``"auto"`` raises ``ValueError``, because rows choose it."""
        if self.components == "auto" or self.learners == "auto":
            raise ValueError(
                f"{self.open_sizes[0]}='auto' must be chosen first; use fedgmm.train, which chooses by "
                "the validation rows, or give a number."
            )
        return self.components, self.learners

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
        values = dict(vars(self))
        if not isinstance(self.learner, str):
            values["learner"] = "custom"
        return values
