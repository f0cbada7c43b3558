"""What all studies on images have in common: their settings, and the clients of a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, Literal, Self, TypeVar, get_args

from fedgmm.core.checks import check_choice, check_integer
from fedgmm.core.gaussians import COVARIANCE_TYPES
from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.embeddings import (
    ENCODERS,
    PRECISIONS,
    EncodedFederation,
    encode_federation,
    encoder,
)
from fedgmm.data.images.federated import FederatedImages, check_fraction, federated_images
from fedgmm.experiments.results import check_methods_and_seeds
from fedgmm.experiments.workplace import Workplace
from fedgmm.methods.base import SHARED_LEARNERS, TITLES
from fedgmm.nets.devices import resolve_device
from fedgmm.nets.networks import LEARNERS
from fedgmm.runs.comparison import PAPER_GRID
from fedgmm.training.local import check_training
from fedgmm.training.options import TrainingOptions
from fedgmm.wording import counted

Track = Literal["paper", "tuned"]
TRACKS: tuple[str, ...] = get_args(Track)
DATA_SETS = ("femnist", "cifar10", "cifar100", "mnist")

MIXTURES = ("fedgmm", "fedem")
_TUNED_GRID = (1.0, 10.0**-0.5, 0.1, 10.0**-1.5, 0.01)
_SERVER_MOMENTA = (0.9, 0.0)
_MIDDLE_SHARE = 4  # the middle stage of a search is a quarter of the rounds
_INDEPENDENCE_GRID = (0.0, 1e4)  # the paper's FedGMM, and FedEM with a density
_CHOSEN_LATE = {
    "independence": "FedGMM's independence",
    "personal_labels": "whether clients' own label frequencies count",
}

Choice = dict[str, float]
"""Values of training options that are tried together."""

StudyT = TypeVar("StudyT", bound="ImageStudy")


@dataclass(frozen=True)
class Variant(Generic[StudyT]):
    """One way to train a method in a study; most studies have one for each method.

    Attributes:
        name: its files are called so, with the seed behind it.
        title: for people.
        study: its settings.
    """

    name: str
    title: str
    study: StudyT


@dataclass(frozen=True)
class ImageStudy:
    """What is run; the defaults are the paper's.

    Attributes:
        dataset: one of ``DATA_SETS``.
        track: ``"paper"`` has its optimiser, batch, epochs, rounds and grid; ``"tuned"`` gives every
            method momentum at the clients, and at the server if that is better, rates that cool down
            (but pFedMe, whose personal learners start anew in every round), and mixtures a shared start.
        methods: which methods.
        seeds: one federation each.
        rounds: of the final training.
        tuning_rounds: of each choice of options, on the first seed; the better half goes on to a
            quarter of the rounds, and the best two of those to the end.
        clients: how many; ``None`` means the paper's number.
        fraction: share of the images.
        shift: half of the images transformed and relabelled.
        encoder: what the Gaussians see of an image.
        image_size: pixels a side that the encoder sees.
        features: numbers that federated PCA keeps.
        encoder_dtype: ``"float32"``, ``"bfloat16"``, or ``"auto"``: the latter on an accelerator.
        learner: of every method; ``"auto"`` means the paper's, MobileNet-V2 for CIFAR and the small
            convolutional network for FEMNIST and MNIST.
        pretrained: a file with the ImageNet weights that MobileNet-V2 starts from; ``None`` draws them.
        components: ``M1``.
        learners: ``M2``.
        covariance_type: of the Gaussians.
        reg_covar: added to every variance of theirs; the first feature has variance one.
        device: where to train.
    """

    dataset: str = "femnist"
    track: Track = "paper"
    methods: tuple[str, ...] = tuple(TITLES)
    seeds: tuple[int, ...] = (0, 1, 2)
    rounds: int = 200
    tuning_rounds: int = 10
    clients: int | None = None
    fraction: float = 1.0
    shift: bool = True
    encoder: str = "resnet18"
    image_size: int = 224
    features: int = 48
    encoder_dtype: str = "auto"
    learner: str = "auto"
    pretrained: str | None = None
    components: int = 3
    learners: int = 3
    covariance_type: str = "full"
    reg_covar: float = 1e-2
    device: str = "auto"

    def __post_init__(self) -> None:
        check_choice("dataset", self.dataset, DATA_SETS)
        check_choice("track", self.track, TRACKS)
        check_choice("encoder", self.encoder, ENCODERS)
        check_choice("encoder_dtype", self.encoder_dtype, ("auto", *PRECISIONS))
        check_choice("covariance_type", self.covariance_type, COVARIANCE_TYPES)
        check_choice("learner", self.learner, ("auto", *LEARNERS))
        check_fraction(self.fraction)
        check_methods_and_seeds(self.methods, self.seeds)
        for name in ("rounds", "tuning_rounds", "features", "components", "learners"):
            check_integer(name, getattr(self, name), 1)

    @property
    def tuning_stages(self) -> tuple[int, int]:
        """After how many rounds all choices are ranked, and the better half of them again."""
        short = min(self.tuning_rounds, self.rounds)
        return short, max(short, self.rounds // _MIDDLE_SHARE)

    @property
    def grid(self) -> tuple[float, ...]:
        """Learning rates, the same for every method."""
        return PAPER_GRID if self.track == "paper" else _TUNED_GRID

    def choices(self, method: str) -> list[list[Choice]]:
        """What is chosen on validation rows, one list after the other."""
        found: list[list[Choice]] = [[{"lr": rate} for rate in self.grid]]
        if self.track == "paper":
            return found
        if method != "local":  # which has no server
            found[0] = [
                {**rate, "server_momentum": momentum}
                for momentum in _SERVER_MOMENTA
                for rate in found[0]
            ]
        if method == "fedgmm" and self.components > 1 and self.learners > 1:
            found.append([{"independence": rows} for rows in _INDEPENDENCE_GRID])
        if method in SHARED_LEARNERS:
            found.append([{"personal_labels": own} for own in (False, True)])
        return found

    def variants(self, method: str) -> list[Variant[Self]]:
        """What is trained with a method and each seed, with the same chosen options."""
        return [Variant(method, TITLES[method], self)]

    @property
    def label(self) -> str:
        """What the files of the study are called."""
        start = "-pretrained" if self.pretrained else ""
        return f"{self.dataset}-{self.track}{start}{'' if self.shift else '-plain'}"

    @property
    def network(self) -> str:
        """The learner's name."""
        colour = self.dataset.startswith("cifar")
        return ("mobilenet" if colour else "cnn") if self.learner == "auto" else self.learner

    def options(self, method: str, seed: int) -> TrainingOptions:
        """How a method is trained, but for its learning rate."""
        common = TrainingOptions(
            algorithm=method,
            rounds=self.rounds,
            learner=self.network,
            pretrained=self.pretrained,
            augment=self.dataset.startswith("cifar") and self.network in ("mobilenet", "cnn"),
            components=self.components,
            learners=self.learners,
            covariance_type=self.covariance_type,
            reg_covar=self.reg_covar,
            seed=seed,
            device=self.device,
            precision="mixed",
            tol=None,
        )
        if self.track == "paper":
            # FedGMM's learners are tied to its Gaussians; FedEM's need a start of their own
            early = replace(common, start="split", warmup=self.rounds // 4)
            return early if method == "fedem" else common
        tuned = replace(common, momentum=0.9, server="momentum", schedule="cooldown")
        if method == "pfedme":
            # its personal learners start anew in every round: the last rate has to be a whole one
            return replace(tuned, schedule="constant")
        if method not in MIXTURES:
            return tuned
        # one shared learner first, then slightly different copies of it
        return replace(tuned, warmup=self.rounds // 2, start="split")

    def protocol(self) -> str:
        """How everything was trained, in sentences for a table's footnote."""
        kept = " (pFedMe's stay)" if "pfedme" in self.methods else ""
        early = (
            "; FedEM starts as one shared learner for a quarter of the rounds"
            if "fedem" in self.methods
            else ""
        )
        track = (
            f"The paper's protocol: SGD, batch 128, one local epoch, learning rates of its grid{early}."
            if self.track == "paper"
            else "Every method with momentum 0.9 at the clients, the same or none at the server, and rates "
            f"that fall towards zero in the last fifth of the rounds{kept}; mixtures start as one shared "
            "learner for half of the rounds."
        )
        short, middle = self.tuning_stages
        warming = [
            TITLES[method]
            for method in self.methods
            if self.options(method, self.seeds[0]).warmup >= middle
        ]
        shared = (
            f" The first two comparisons see {' and '.join(warming)} as one shared learner."
            if warming
            else ""
        )
        later = {
            name
            for method in self.methods
            for found in self.choices(method)[1:]
            for name in found[0]
        }
        late = [text for name, text in _CHOSEN_LATE.items() if name in later]
        last = f" Whole trainings choose {' and '.join(late)}." if late else ""
        what = "Learning rates" if self.track == "paper" else "Learning rates and server momentum"
        return (
            f"{track} {counted(self.rounds, 'round')}, the last one is reported; seeds "
            f"{', '.join(map(str, self.seeds))}. {what} are chosen on validation rows of the first "
            f"seed: {counted(short, 'round ranks', 'rounds rank')} them, the better half is compared "
            f"by accuracy after {middle}, and the best two of those after all.{shared}{last}"
        )


# ---------------------------------------------------------------------- the clients of a seed


def dealt(study: ImageStudy, seed: int, workplace: Workplace, *, shift: bool) -> FederatedImages:
    """The images of a study on their clients; ``shift`` transforms and relabels half of them."""
    federation = federated_images(
        workplace.load(study.dataset),
        clients=study.clients,
        shift=shift,
        fraction=study.fraction,
        seed=seed,
    )
    workplace.notify(federation.description.splitlines()[0])
    return federation


def prepare_federation(
    study: ImageStudy, seed: int, workplace: Workplace
) -> EncodedFederation | FederatedImages:
    """The clients of a seed: images dealt, shifted, and encoded if a method has Gaussians to see them."""
    federation = dealt(study, seed, workplace, shift=study.shift)
    check_trainable(study, seed, federation.dataset)
    if "fedgmm" not in study.methods:
        return federation
    return encoded(study, federation.dataset, workplace)


def encoded(
    study: ImageStudy, dataset: FederatedDataset, workplace: Workplace
) -> EncodedFederation:
    """A data set of images with the features that the study's Gaussians see."""
    check_rows(len(dataset.train), study.features)
    return encode_federation(
        dataset,
        encoder(
            study.encoder,
            workplace.data_dir,
            size=study.image_size,
            device=study.device,
            dtype=_encoder_dtype(study),
        ),
        components=study.features,
        scale=True,
        cache=workplace.cache,
        progress=workplace.tell_encoded,
    )


def check_trainable(study: ImageStudy, seed: int, dataset: FederatedDataset) -> None:
    """Raise what can be told before hours of encoding and training, not after.

    Args:
        study: its methods and options must suit the data.
        seed: of the training.
        dataset: must have rows to judge trainings by.
    """
    for method in study.methods:
        check_training(dataset, study.options(method, seed))
    for split in ("validation", "test"):
        if not len(dataset.split(split)):
            raise ValueError(
                f"Clients are so small that none has a {split} row; use fewer clients or a larger fraction "
                "of the images (--clients and --fraction on the command line)."
            )


def check_rows(rows: int, features: int) -> None:
    """Raise unless so many training images can have so many principal components.

    PCA itself would ask for fewer components, which no option of a study on the command line is.
    """
    if rows < features:
        raise ValueError(
            f"The Gaussians see {counted(features, 'principal component')}, but "
            f"{counted(rows, 'training image')} can have no more "
            f"than {rows}; use more images: a larger fraction or, of FEMNIST, more clients (--fraction "
            "and --clients on the command line)."
        )


def _encoder_dtype(study: ImageStudy) -> str:
    if study.encoder_dtype != "auto":
        return study.encoder_dtype
    return "float32" if resolve_device(study.device).type == "cpu" else "bfloat16"
