"""Settings of a study on images: which methods, how they are tuned and how they are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, TypeVar, get_args

from fedgmm.core.gaussians import COVARIANCE_TYPES
from fedgmm.data.encoders import ENCODERS, PRECISIONS
from fedgmm.data.images.federated import check_fraction
from fedgmm.methods.base import SHARED_LEARNERS, TITLES
from fedgmm.nets.networks import LEARNERS
from fedgmm.runs.comparison import PAPER_GRID
from fedgmm.support.checks import check_choice, check_distinct, check_integer
from fedgmm.training.options import TrainingOptions
from fedgmm.wording import counted

Track = Literal["paper", "tuned"]
TRACKS: tuple[str, ...] = get_args(Track)
DATA_SETS = ("femnist", "cifar10", "cifar100", "mnist")

MIXTURES = ("fedgmm", "fedem")
_TUNED_GRID = (1.0, 10.0**-0.5, 0.1, 10.0**-1.5, 0.01)
_SERVER_MOMENTA = (0.9, 0.0)
_MIDDLE_SHARE = 4  # the middle stage of a search has a quarter of the rounds
_INDEPENDENCE_GRID = (0.0, 1e4)  # the paper's FedGMM, and FedEM with a density
_CHOSEN_LATE = {
    "independence": "FedGMM's independence",
    "personal_labels": "the use of each client's label frequencies",
}

Choice = dict[str, float | str]
"""Values of training options that are tried together."""

StudyT = TypeVar("StudyT", bound="ImageStudy")


def check_methods_and_seeds(methods: Sequence[str], seeds: Sequence[int]) -> None:
    """Raise ``ValueError`` if either is empty, has a value twice, or names an unknown method."""
    for name, values in (("methods", methods), ("seeds", seeds)):
        if not values:
            raise ValueError(f"{name} is empty; give at least one.")
        # a trial that is counted twice would make the spread over seeds too small
        check_distinct(name, values)
    for method in methods:
        check_choice("methods", method, tuple(TITLES))


@dataclass(frozen=True)
class ImageStudy:
    """Settings of a study on images; the defaults are the paper's."""

    data_sets: ClassVar[tuple[str, ...]] = DATA_SETS

    dataset: str = "femnist"  # one of ``data_sets``
    # ``"paper"`` uses the paper's optimiser, batch size, epochs, rounds and grid. ``"tuned"`` adds
    # momentum at the clients, momentum at the server where it helps, learning rates that fall to
    # zero (except pFedMe, because its personal learners restart in every round), and a shared start
    # for mixtures.
    track: Track = "paper"
    methods: tuple[str, ...] = tuple(TITLES)  # names of the methods
    seeds: tuple[int, ...] = (0, 1, 2)  # one federation per seed
    rounds: int = 200  # rounds of the final training run
    tuning_rounds: int = 10  # rounds of the first stage of tuning, on the first seed
    clients: int | None = None  # number of clients; ``None`` means the paper's
    fraction: float = 1.0  # share of the images to use
    shift: bool = True  # whether to transform and relabel half of the images
    encoder: str = "resnet18"  # encoder of the features that the Gaussians see
    image_size: int = 224  # side in pixels of the images given to the encoder
    features: int = 48  # number of features that federated PCA keeps
    # ``"float32"``, ``"bfloat16"``, or ``"auto"``: ``"bfloat16"`` on an accelerator
    encoder_dtype: str = "auto"
    # network of every method; ``"auto"`` means the paper's: MobileNet-V2 for CIFAR, the small
    # convolutional network for FEMNIST and MNIST
    learner: str = "auto"
    # file with ImageNet weights for MobileNet-V2; ``None`` starts from random weights
    pretrained: str | None = None
    components: int = 3  # number of Gaussians, ``M1``
    learners: int = 3  # number of learners, ``M2``
    covariance_type: str = "full"  # covariance type of the Gaussians
    reg_covar: float = 1e-2  # added to every variance; the first feature has variance one
    device: str = "auto"  # device to train on

    def __post_init__(self) -> None:
        check_choice("dataset", self.dataset, self.data_sets)
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
        """Rounds after which all choices are ranked, and rounds after which the better half is."""
        short = min(self.tuning_rounds, self.rounds)
        return short, max(short, self.rounds // _MIDDLE_SHARE)

    @property
    def grid(self) -> tuple[float, ...]:
        """Learning rates, the same for every method."""
        return PAPER_GRID if self.track == "paper" else _TUNED_GRID

    def choices(self, method: str) -> list[list[Choice]]:
        """Return the lists of options that are chosen on validation rows, one list after the other."""
        found: list[list[Choice]] = [[{"lr": rate} for rate in self.grid]]
        if self.track == "paper":
            return found
        if method != "local":  # local training has no server
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

    def variants(self, method: str) -> list[tuple[str, str, Self]]:
        """Return the ways to train a method with each seed, all with the same chosen options.

        Each has a prefix of its file names, a title for messages, and settings.
        """
        return [(method, TITLES[method], self)]

    @property
    def label(self) -> str:
        """The part of the file names that identifies the study."""
        start = "-pretrained" if self.pretrained else ""
        return f"{self.dataset}-{self.track}{start}{'' if self.shift else '-plain'}"

    @property
    def network(self) -> str:
        """The name of the learner's network."""
        colour = self.dataset.startswith("cifar")
        return ("mobilenet" if colour else "cnn") if self.learner == "auto" else self.learner

    def options(self, method: str, seed: int) -> TrainingOptions:
        """Return the training options of a method, without the options that are tuned."""
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
            personal_labels=False,
        )
        if self.track == "paper":
            # FedGMM's learners are tied to its Gaussians, but FedEM's would all start alike
            early = replace(common, start="split", warmup=self.rounds // 4)
            return early if method == "fedem" else common
        tuned = replace(common, momentum=0.9, server="momentum", schedule="cooldown")
        if method == "pfedme":
            # personal learners restart in every round, so the last rate must not be near zero
            return replace(tuned, schedule="constant")
        if method not in MIXTURES:
            return tuned
        # first one shared learner, then slightly different copies of it
        return replace(tuned, warmup=self.rounds // 2, start="split")

    def protocol(self) -> str:
        """Describe tuning and training in sentences for a table's footnote."""
        constant = " (except pFedMe's)" if "pfedme" in self.methods else ""
        early = (
            "; FedEM starts as one shared learner for a quarter of the rounds"
            if "fedem" in self.methods
            else ""
        )
        track = (
            f"The paper's protocol: SGD, batch 128, one local epoch, learning rates of its grid{early}."
            if self.track == "paper"
            else "Every method has momentum 0.9 at the clients, 0.9 or none at the server, and learning "
            f"rates that fall towards zero in the last fifth of the rounds{constant}; mixtures start as "
            "one shared learner for half of the rounds."
        )
        short, middle = self.tuning_stages
        warming = [
            TITLES[method]
            for method in self.methods
            if self.options(method, self.seeds[0]).warmup >= middle
        ]
        shared = (
            f" The first two stages use one shared learner for {' and '.join(warming)}."
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
        last = f" Complete training runs choose {' and '.join(late)}." if late else ""
        tuned = "Learning rates" if self.track == "paper" else "Learning rates and server momentum"
        return (
            f"{track} {counted(self.rounds, 'round')}, the last one is reported; seeds "
            f"{', '.join(map(str, self.seeds))}. {tuned} are chosen on validation rows of the first "
            f"seed: all are ranked after {counted(short, 'round')}, the better half is compared by "
            f"accuracy after {middle}, and the best two after the last round.{shared}{last}"
        )
