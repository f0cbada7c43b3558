"""Table 2 on real images: eight methods, tuned alike, on clients that differ in inputs and labels.

Every trial leaves a file of its own, and a training writes checkpoints, so that a study goes on where an
interruption ended it. The other studies on images are built from the same pieces.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from fedgmm.core.checks import check_choice, check_integer
from fedgmm.core.devices import resolve_device
from fedgmm.core.gaussians import COVARIANCE_TYPES
from fedgmm.data.encoder import ENCODERS, EncodedFederation, encode_federation, encoder
from fedgmm.data.federated_images import federated_images
from fedgmm.data.images import load_images
from fedgmm.experiments.comparison import PAPER_GRID, Tell
from fedgmm.experiments.results import TITLES, markdown_table, mean_and_spread, write_results
from fedgmm.federation.checkpoint import Checkpoint
from fedgmm.files import write_atomically
from fedgmm.training import TrainingOptions, train

if TYPE_CHECKING:
    from fedgmm.data.dataset import FederatedDataset
    from fedgmm.inference.model import FederatedModel

Track = Literal["paper", "tuned"]
TRACKS: tuple[str, ...] = get_args(Track)
DATA_SETS = ("femnist", "cifar10", "cifar100", "mnist")

PAPER_ACCURACY = {
    "cifar10": {"local": 19.96, "fedavg": 45.53, "fedprox": 37.0, "fedavg+": 34.33,
                "clustered": 38.81, "pfedme": 23.51, "fedem": 49.12, "fedgmm": 52.96},
    "cifar100": {"local": 13.36, "fedavg": 17.71, "fedprox": 7.95, "fedavg+": 11.51,
                 "clustered": 12.46, "pfedme": 9.92, "fedem": 17.28, "fedgmm": 22.33},
    "femnist": {"local": 62.39, "fedavg": 75.08, "fedprox": 32.84, "fedavg+": 57.99,
                "clustered": 75.04, "pfedme": 39.45, "fedem": 75.56, "fedgmm": 79.49},
}  # fmt: skip
"""Test accuracy in the paper's Table 2."""

_MIXTURES = ("fedgmm", "fedem")
_TUNED_GRID = (1.0, 10.0**-0.5, 0.1, 10.0**-1.5)
_INDEPENDENCE_GRID = (0.0, 30.0, 1e4)
_MAY_GROW = ("methods", "seeds", "device")
_ROUNDS_A_CHECKPOINT = 25
_WATCHED_ROUNDS = 5
_FINALISTS = 3


@dataclass(frozen=True)
class ImageStudy:
    """What is run; the defaults are the paper's.

    Attributes:
        dataset: one of ``DATA_SETS``.
        track: ``"paper"`` has its optimiser, batch, epochs, rounds and grid; ``"tuned"`` gives every
            method momentum at the clients and at the server, and mixtures a shared start.
        methods: which methods.
        seeds: one federation each.
        rounds: of the final training.
        tuning_rounds: of each trial of a learning rate, on the first seed; the best three of them run
            again, three times as long.
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
        check_choice("covariance_type", self.covariance_type, COVARIANCE_TYPES)
        for name in ("methods", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give at least one.")
        for method in self.methods:
            check_choice("methods", method, tuple(TITLES))
        for name in ("rounds", "tuning_rounds", "features", "components", "learners"):
            check_integer(name, getattr(self, name), 1)

    @property
    def grid(self) -> tuple[float, ...]:
        """Learning rates, the same for every method."""
        return PAPER_GRID if self.track == "paper" else _TUNED_GRID

    def grids(self, method: str) -> dict[str, tuple[float, ...]]:
        """What is chosen on validation rows, one after the other."""
        found = {"lr": self.grid}
        if method == "fedgmm" and self.components > 1 and self.learners > 1:
            found["independence"] = _INDEPENDENCE_GRID
        return found

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
        tuned = replace(common, momentum=0.9, server="momentum", schedule="constant")
        if method not in _MIXTURES:
            return tuned
        # one shared learner first, then slightly different copies of it
        return replace(tuned, warmup=self.rounds // 2, start="split")

    def protocol(self) -> str:
        """How everything was trained, in sentences for a table's footnote."""
        track = (
            "The paper's protocol: SGD, batch 128, one local epoch, learning rates of its grid; FedEM "
            "starts as one shared learner for a quarter of the rounds."
            if self.track == "paper"
            else "Every method with momentum 0.9 at clients and server; mixtures start as one shared "
            "learner for half of the rounds."
        )
        return (
            f"{track} {self.rounds} rounds, the last one is reported; seeds "
            f"{', '.join(map(str, self.seeds))}; learning rates, and FedGMM's independence, chosen on "
            f"validation rows of the first seed after {self.tuning_rounds} rounds, and among the best "
            f"three after {3 * self.tuning_rounds}."
        )


@dataclass(frozen=True)
class ImageOutcome:
    """Test accuracies of a study: one value a seed, mean over clients, last round."""

    accuracy: dict[str, list[float]]
    details: list[dict[str, Any]]


def prepare_federation(
    study: ImageStudy,
    seed: int,
    data_dir: Path | None,
    tell: Tell = lambda _: None,
    cache: Path | None = None,
) -> FederatedDataset:
    """The clients of a seed: images dealt, shifted, and encoded for the Gaussians."""
    images = load_images(study.dataset, data_dir)  # type: ignore[arg-type]
    federation = federated_images(
        images, clients=study.clients, shift=study.shift, fraction=study.fraction, seed=seed
    )
    tell(federation.description.splitlines()[0])
    return encoded(study, federation.dataset, data_dir, cache).dataset


def encoded(
    study: ImageStudy, dataset: FederatedDataset, data_dir: Path | None, cache: Path | None
) -> EncodedFederation:
    """A data set of images with the features that the study's Gaussians see."""
    return encode_federation(
        dataset,
        encoder(
            study.encoder,
            data_dir,
            size=study.image_size,
            device=study.device,
            dtype=_encoder_dtype(study),
        ),
        components=study.features,
        scale=True,
        cache=cache,
    )


def _encoder_dtype(study: ImageStudy) -> str:
    if study.encoder_dtype != "auto":
        return study.encoder_dtype
    return "float32" if resolve_device(study.device).type == "cpu" else "bfloat16"


def reproduce_classification(
    folder: Path,
    study: ImageStudy | None = None,
    *,
    data_dir: Path | None = None,
    cache: Path | None = None,
    tell: Tell = lambda _: None,
) -> ImageOutcome:
    """One row of Table 2; what is in ``folder`` already is not done again.

    Args:
        folder: for JSON, Markdown and the figure.
        study: what is run.
        data_dir: the data folder; ``None`` means the one that ``FEDGMM_DATA`` names.
        cache: a folder for encoded images; ``None`` keeps nothing.
        tell: called with a line before each step.
    """
    from fedgmm.report.image_figures import plot_curves

    study = study or ImageStudy()
    name = f"classification-{study.label}"
    trials = open_trials(folder / name, study)
    details: list[dict[str, Any]] = []
    for seed in study.seeds:
        federation = once(partial(prepare_federation, study, seed, data_dir, tell, cache))
        for method in study.methods:
            chosen = chosen_options(trials, study, method, federation, tell)
            tell(f"{TITLES[method]}, seed {seed}")
            run = partial(_one_training, trials, study, method, seed, chosen, federation)
            details.append(recorded(trials, f"{method}-{seed}", run))
    accuracy = {
        method: [one["mean_accuracy"] for one in details if one["method"] == method]
        for method in study.methods
    }
    outcome = ImageOutcome(accuracy, details)
    record = {"study": asdict(study), "accuracy": accuracy, "details": details}
    write_results(folder, name, record, _markdown(study, outcome))
    curves = {
        TITLES[method]: [one["curve"] for one in details if one["method"] == method]
        for method in study.methods
    }
    plot_curves(curves, f"{study.dataset}: accuracy on validation rows", folder / f"{name}.png")
    return outcome


# ---------------------------------------------------------------------- pieces of every study


def open_trials(trials: Path, study: ImageStudy) -> Path:
    """The folder of a study's trials: all of one study, but for what may grow.

    Raises:
        ValueError: the folder holds trials of a study with other settings.
    """
    trials.mkdir(parents=True, exist_ok=True)
    file = trials / "study.json"
    facts = _settings(study)
    if file.is_file():
        # settings that are younger than the file had their defaults
        held = {**_settings(type(study)()), **json.loads(file.read_text())}
        for setting, value in facts.items():
            if held[setting] != value:
                raise ValueError(
                    f"{trials} holds results of a study with {setting}={held[setting]!r}, not "
                    f"{value!r}; choose another folder."
                )
    _write_json(file, facts)
    return trials


def _settings(study: ImageStudy) -> dict[str, Any]:
    """What all trials of a folder have in common, as JSON gives it back."""
    facts = {name: value for name, value in asdict(study).items() if name not in _MAY_GROW}
    facts["pretrained"] = study.pretrained is not None  # wherever the file lies
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return plain


def _write_json(file: Path, record: dict[str, Any]) -> None:
    write_atomically(file, (json.dumps(record, indent=1) + "\n").encode())


def recorded(trials: Path, trial: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a trial left behind; where it left nothing it is run, and its checkpoint goes."""
    file = trials / f"{trial}.json"
    if not file.is_file():
        _write_json(file, run())
        _checkpoint(trials, trial).unlink(missing_ok=True)
    record: dict[str, Any] = json.loads(file.read_text())
    return record


def _checkpoint(trials: Path, trial: str) -> Path:
    return trials / f"{trial}.safetensors"


def chosen_options(
    trials: Path,
    study: ImageStudy,
    method: str,
    federation: Callable[[], FederatedDataset],
    tell: Tell,
) -> dict[str, Any]:
    """What short runs on the first seed choose, by the validation log-likelihood.

    The learning rate of every method; and of FedGMM, at that rate, how far learners are independent of
    Gaussians.
    """
    from fedgmm.experiments.comparison import tune

    def run() -> dict[str, Any]:
        options = study.options(method, study.seeds[0])
        options = replace(options, warmup=min(options.warmup, study.tuning_rounds // 2))
        chosen: dict[str, Any] = {}
        scores: dict[str, Any] = {}
        for option, grid in study.grids(method).items():
            tell(f"{TITLES[method]}: choosing {option}")
            found = tune(
                federation(),
                method,
                option=option,
                grid=grid,
                rounds=study.tuning_rounds,
                finalists=_FINALISTS,
                options=replace(options, **chosen),
            )
            chosen[option] = found.best
            scores[option] = {
                f"{value:.6g}": score if math.isfinite(score) else None
                for value, score in found.scores.items()
            }
        return {"chosen": chosen, "scores": scores}

    chosen: dict[str, Any] = recorded(trials, f"{method}-tuning", run)["chosen"]
    return chosen


def chosen_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The chosen options in a trial's file."""
    return {name: record[name] for name in ("lr", "independence") if name in record}


def trained(
    trials: Path, trial: str, dataset: FederatedDataset, options: TrainingOptions
) -> FederatedModel:
    """Train, or go on from the checkpoint of a trial that was interrupted."""
    checkpoint = Checkpoint(_checkpoint(trials, trial), _ROUNDS_A_CHECKPOINT)
    model = train(dataset, options=options, checkpoint=checkpoint, watch_accuracy=_WATCHED_ROUNDS)
    if model.stopped == "interrupted":
        raise KeyboardInterrupt
    return model


def facts_of(model: FederatedModel) -> dict[str, Any]:
    """How a training went, for a trial's file."""
    return {
        "rounds": len(model.history),
        "stopped": model.stopped,
        "seconds": model.history[-1]["seconds"] if model.history else 0.0,
        "curve": [entry.get("validation_accuracy") for entry in model.history],
        "likelihood": [entry["log_likelihood"] for entry in model.history],
    }


def stopped_early(details: Sequence[dict[str, Any]]) -> str:
    """A sentence on trainings that diverged, empty where there are none."""
    lost = [f"{TITLES[one['method']]} (seed {one['seed']})" for one in details if one["stopped"]]
    return f" Training diverged and kept its last good round: {', '.join(lost)}." if lost else ""


# ---------------------------------------------------------------------- this study


def _one_training(
    trials: Path,
    study: ImageStudy,
    method: str,
    seed: int,
    chosen: dict[str, Any],
    federation: Callable[[], FederatedDataset],
) -> dict[str, Any]:
    started = time.perf_counter()
    options = replace(study.options(method, seed), **chosen)
    model = trained(trials, f"{method}-{seed}", federation(), options)
    evaluation = model.evaluate("test")
    return {
        "method": method,
        "seed": seed,
        **chosen,
        "wall_seconds": time.perf_counter() - started,
        **evaluation.summary(),
        **facts_of(model),
    }


def _learner(study: ImageStudy) -> str:
    if study.network != "mobilenet":
        return study.network
    start = "pretrained on ImageNet" if study.pretrained else "from a random start"
    return f"MobileNet-V2 {start}, random crops and flips"


def _markdown(study: ImageStudy, outcome: ImageOutcome) -> str:
    paper = PAPER_ACCURACY.get(study.dataset, {})
    rows = []
    for method, values in outcome.accuracy.items():
        own = [one for one in outcome.details if one["method"] == method]
        seconds = sum(one["seconds"] for one in own) / max(1, sum(one["rounds"] for one in own))
        printed = f"{paper[method]:.2f}" if method in paper and study.shift else "not given"
        lr = f"{own[0]['lr']:.3g}"
        rows.append([TITLES[method], mean_and_spread(values), printed, lr, f"{seconds:.2f}"])
    shift = (
        "Half of the images are turned by 90 degrees, flipped and inverted, with permuted labels."
        if study.shift
        else "Images and labels as they are."
    )
    return (
        f"# {study.dataset}: test accuracy, mean over clients ({study.track} track)\n\n"
        + markdown_table(
            ["method", "accuracy (%)", "paper (%)", "learning rate", "s a round"], rows
        )
        + f"\n{study.protocol()} {shift} {study.components} Gaussians on {study.features} principal "
        f"components of {study.encoder} features, {study.learners} learners ({_learner(study)})."
        f"{stopped_early(outcome.details)}\n"
    )
