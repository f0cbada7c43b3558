"""Table 2 on real images: eight methods, tuned alike, on clients that differ in inputs and labels.

Every trial leaves a file of its own, and a training writes checkpoints, so that a study goes on where an
interruption ended it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from fedgmm.core.checks import check_choice, check_integer
from fedgmm.data.encoder import encode_federation, encoder
from fedgmm.data.federated_images import federated_images
from fedgmm.data.images import load_images
from fedgmm.experiments.comparison import PAPER_GRID, Tell, tune
from fedgmm.experiments.results import TITLES, markdown_table, mean_and_spread, write_results
from fedgmm.federation.checkpoint import Checkpoint
from fedgmm.files import write_atomically
from fedgmm.training import TrainingOptions, train

if TYPE_CHECKING:
    from fedgmm.data.dataset import FederatedDataset

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
_TUNED_GRID = (10.0**-0.5, 0.1, 10.0**-1.5)


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
        tuning_rounds: of each trial of a learning rate, on the first seed.
        clients: how many; ``None`` means the paper's number.
        fraction: share of the images.
        shift: half of the images transformed and relabelled.
        encoder: what the Gaussians see of an image.
        features: numbers that federated PCA keeps.
        learner: of every method.
        components: ``M1``.
        learners: ``M2``.
        device: where to train.
    """

    dataset: str = "femnist"
    track: Track = "paper"
    methods: tuple[str, ...] = tuple(TITLES)
    seeds: tuple[int, ...] = (0, 1, 2)
    rounds: int = 200
    tuning_rounds: int = 20
    clients: int | None = None
    fraction: float = 1.0
    shift: bool = True
    encoder: str = "resnet18"
    features: int = 48
    learner: str = "cnn"
    components: int = 3
    learners: int = 3
    device: str = "auto"

    def __post_init__(self) -> None:
        check_choice("dataset", self.dataset, DATA_SETS)
        check_choice("track", self.track, TRACKS)
        for method in self.methods:
            check_choice("methods", method, tuple(TITLES))
        check_integer("rounds", self.rounds, 1)

    @property
    def grid(self) -> tuple[float, ...]:
        """Learning rates, the same for every method."""
        return PAPER_GRID if self.track == "paper" else _TUNED_GRID

    def options(self, method: str, seed: int) -> TrainingOptions:
        """How a method is trained, but for its learning rate."""
        common = TrainingOptions(
            algorithm=method,
            rounds=self.rounds,
            learner=self.learner,
            components=self.components,
            learners=self.learners,
            seed=seed,
            device=self.device,
            precision="mixed",
            tol=None,
        )
        if self.track == "paper":
            return common
        tuned = replace(common, momentum=0.9, server="momentum", schedule="constant")
        if method not in _MIXTURES:
            return tuned
        # one shared learner first, then slightly different copies of it
        return replace(tuned, warmup=self.rounds // 2, start="split")


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
    encoded = encode_federation(
        federation.dataset,
        encoder(study.encoder, data_dir, device=study.device),
        components=study.features,
        scale=True,
        cache=cache,
    )
    return encoded.dataset


def reproduce_classification(
    folder: Path,
    study: ImageStudy | None = None,
    *,
    data_dir: Path | None = None,
    tell: Tell = lambda _: None,
) -> ImageOutcome:
    """One row of Table 2; what is in ``folder`` already is not done again."""
    study = study or ImageStudy()
    name = f"classification-{study.dataset}-{study.track}"
    trials = folder / name
    trials.mkdir(parents=True, exist_ok=True)
    _check_same_study(trials, study)
    rates: dict[str, float] = {}
    details: list[dict[str, Any]] = []
    for seed in study.seeds:
        federation = _Lazily(lambda seed=seed: prepare_federation(study, seed, data_dir, tell))  # type: ignore[misc]
        for method in study.methods:
            if method not in rates:
                rates[method] = _chosen_rate(trials, study, method, federation, tell)
            tell(f"{TITLES[method]}, seed {seed}")
            file = trials / f"{method}-{seed}.json"
            if not file.is_file():
                record = _one_training(trials, study, method, seed, rates[method], federation)
                write_atomically(file, (json.dumps(record, indent=1) + "\n").encode())
            details.append(json.loads(file.read_text()))
    accuracy = {
        method: [one["mean_accuracy"] for one in details if one["method"] == method]
        for method in study.methods
    }
    outcome = ImageOutcome(accuracy, details)
    record = {"study": asdict(study), "accuracy": accuracy, "details": details}
    write_results(folder, name, record, _markdown(study, outcome))
    return outcome


class _Lazily:
    """A federation that is made when somebody needs it, once."""

    def __init__(self, make: Callable[[], FederatedDataset]) -> None:
        self._make, self._made = make, None

    def __call__(self) -> FederatedDataset:
        if self._made is None:
            self._made = self._make()  # type: ignore[assignment]
        return self._made  # type: ignore[return-value]


def _check_same_study(trials: Path, study: ImageStudy) -> None:
    """Results of one folder must come from one study, but for methods and seeds, which may grow."""
    file = trials / "study.json"
    facts = {k: v for k, v in asdict(study).items() if k not in ("methods", "seeds", "device")}
    facts = json.loads(json.dumps(facts))
    if file.is_file() and json.loads(file.read_text()) != facts:
        raise ValueError(f"{trials} holds results of another study; choose another folder.")
    write_atomically(file, (json.dumps(facts, indent=1) + "\n").encode())


def _chosen_rate(
    trials: Path, study: ImageStudy, method: str, federation: _Lazily, tell: Tell
) -> float:
    """The learning rate with the best validation log-likelihood after short runs on the first seed."""
    file = trials / f"{method}-tuning.json"
    if not file.is_file():
        tell(f"{TITLES[method]}: choosing the learning rate")
        options = study.options(method, study.seeds[0])
        options = replace(options, warmup=min(options.warmup, study.tuning_rounds // 2))
        found = tune(
            federation(), method, grid=study.grid, rounds=study.tuning_rounds, options=options
        )
        scores = {f"{rate:.6g}": repr(score) for rate, score in found.scores.items()}
        write_atomically(file, json.dumps({"lr": found.lr, "scores": scores}, indent=1).encode())
    return float(json.loads(file.read_text())["lr"])


def _one_training(
    trials: Path, study: ImageStudy, method: str, seed: int, lr: float, federation: _Lazily
) -> dict[str, Any]:
    checkpoint = trials / f"{method}-{seed}.safetensors"
    started = time.perf_counter()
    model = train(
        federation(),
        options=replace(study.options(method, seed), lr=lr),
        checkpoint=Checkpoint(checkpoint, 25),
        watch_accuracy=True,
    )
    if model.stopped == "interrupted":
        raise KeyboardInterrupt
    evaluation = model.evaluate("test")
    checkpoint.unlink(missing_ok=True)
    return {
        "method": method,
        "seed": seed,
        "lr": lr,
        "rounds": len(model.history),
        "stopped": model.stopped,
        "seconds": model.history[-1]["seconds"] if model.history else 0.0,
        "wall_seconds": time.perf_counter() - started,
        **evaluation.summary(),
        "curve": [entry.get("validation_accuracy") for entry in model.history],
        "likelihood": [entry["log_likelihood"] for entry in model.history],
    }


def _markdown(study: ImageStudy, outcome: ImageOutcome) -> str:
    paper = PAPER_ACCURACY.get(study.dataset, {})
    rows = []
    for method, values in outcome.accuracy.items():
        own = [one for one in outcome.details if one["method"] == method]
        seconds = sum(one["seconds"] for one in own) / sum(one["rounds"] for one in own)
        printed = f"{paper[method]:.2f}" if method in paper and study.shift else "not given"
        lr = f"{own[0]['lr']:.3g}"
        rows.append([TITLES[method], mean_and_spread(values), printed, lr, f"{seconds:.2f}"])
    track = (
        "The paper's protocol: SGD, batch 128, one local epoch, learning rates of its grid."
        if study.track == "paper"
        else "Every method with momentum 0.9 at clients and server; mixtures start as one shared "
        "learner for half of the rounds."
    )
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
        + f"\n{track} {shift} {study.rounds} rounds, the last one is reported; seeds "
        f"{', '.join(map(str, study.seeds))}; learning rates chosen on validation rows of the first seed "
        f"after {study.tuning_rounds} rounds. {study.components} Gaussians on {study.features} principal "
        f"components of {study.encoder} features, {study.learners} learners ({study.learner}).\n"
    )
