"""Novel images: Table 3, likelihoods of known and novel ones, a digit left out, and small changes.

The federation is that of the paper's appendix: MNIST dealt by label, a quarter of the images turned,
flipped and inverted, another quarter relabelled. Novel images are test images at half their size, turned
and flipped. FedGMM is asked for ``log P(x)``, which needs no label; all others for their highest class
probability.

What the Gaussians see and how many there are is chosen without novel images: each known class in turn is
left out of a density, which must then tell its validation rows from the others'. It matters: an encoder's
numbers shrink with the object in the picture, so small digits lie near the middle of plain features and
look familiar there, while the direction of the numbers gives them away.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from fedgmm.core.backbones import ResNet18
from fedgmm.core.checks import check_choice, check_integer
from fedgmm.data.dataset import SPLITS, FederatedDataset
from fedgmm.data.encoder import (
    EncodedFederation,
    Encoder,
    FeatureMap,
    Features,
    Images,
    ResNet18Encoder,
    encode_federation,
    encode_images,
    encoder,
    federated_pca,
)
from fedgmm.data.federated_images import FederatedImages, federated_images
from fedgmm.data.images import WHITE, ImageData, load_images
from fedgmm.data.partition import transform_images
from fedgmm.experiments.classification import (
    ImageStudy,
    chosen_of,
    chosen_options,
    facts_of,
    open_trials,
    recorded,
    stopped_early,
    trained,
)
from fedgmm.experiments.comparison import Tell
from fedgmm.experiments.results import TITLES, markdown_table, mean_and_spread, write_results
from fedgmm.files import write_atomically
from fedgmm.inference.model import FederatedModel
from fedgmm.inference.novelty import novelty_metrics

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Scores = dict[str, FloatArray]
Changes = Literal["separate", "joint", "none"]
CHANGES: tuple[str, ...] = get_args(Changes)
REPRESENTATIONS = ("plain", "direction", "direction and length", "stages")
"""What becomes of an encoder's numbers: nothing; length one; length one, and the length's logarithm; the
last of these for each stage of the network, where the encoder tells of several."""
METRICS = {"auroc": "AUROC", "average_precision": "AP", "max_f1": "Max-F1"}

PAPER_METRICS = {
    "local": (50.74, 60.14, 66.67),
    "fedavg": (66.55, 68.05, 66.67),
    "fedprox": (75.23, 76.24, 71.90),
    "fedavg+": (66.65, 68.09, 66.67),
    "clustered": (50.74, 60.14, 66.67),
    "pfedme": (73.32, 77.91, 68.30),
    "fedem": (86.04, 90.02, 80.25),
    "fedgmm": (99.21, 99.60, 99.49),
}
"""AUROC, average precision and Max-F1 in the paper's Table 3."""

_CHOSEN = ("representation", "features", "components", "reg_covar")
_WITH_HISTOGRAM = ("fedgmm", "fedem", "fedavg")
_SCORE = {"fedgmm": "log P(x)"}
_DENSITY_ROUNDS = 30
_DENSITY_ROWS = 20_000  # training rows that densities are compared on
_NO_LENGTH = 1e-6
_STAGE_WIDTHS = (128, 256, 512)


@dataclass(frozen=True)
class NoveltyStudy(ImageStudy):
    """What is run; attributes not named here are those of its base.

    Attributes:
        dataset: the paper has MNIST; the base's ``shift`` has no part here, ``changes`` has.
        changes: what clients know beside plain images: ``"separate"`` as in the paper's appendix, a
            quarter transformed and another quarter relabelled; ``"joint"``, half of them both, as for
            classification; or ``"none"``.
        representation: one of ``REPRESENTATIONS``; this and the three after it are what FedGMM has if
            its choices below hold nothing else.
        features: numbers that federated PCA keeps.
        components: ``M1``.
        reg_covar: added to every variance.
        representation_choices: what is tried for FedGMM, first with all of ``feature_choices``.
        feature_choices: likewise.
        component_choices: what is tried then, with all of ``reg_covar_choices``.
        reg_covar_choices: likewise.
        left_out: the class that is not in the training of the scatter plot.
        scatter_clients: clients of that training.
        scatter_rows: images that each of them has.
    """

    dataset: str = "mnist"
    changes: Changes = "separate"
    representation: str = "plain"
    representation_choices: tuple[str, ...] = REPRESENTATIONS
    feature_choices: tuple[int, ...] = (48, 128, 256)
    component_choices: tuple[int, ...] = (3, 10, 30)
    reg_covar_choices: tuple[float, ...] = (1e-2, 1e-3)
    left_out: int = 1
    scatter_clients: int = 50
    scatter_rows: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("changes", self.changes, CHANGES)
        for name in (self.representation, *self.representation_choices):
            check_choice("representation", name, REPRESENTATIONS)
        check_integer("left_out", self.left_out, 0)
        check_integer("scatter_clients", self.scatter_clients, 1)
        check_integer("scatter_rows", self.scatter_rows, 1)


@dataclass(frozen=True)
class NoveltyOutcome:
    """What was found.

    Attributes:
        metrics: of each method: AUROC, average precision and Max-F1, a value a seed each.
        left_out: AUROC of each score against each kind of outlier of the scatter plot.
        perturbed: AUROC of FedGMM's scores against small changes, first seed.
        details: everything that was recorded.
    """

    metrics: dict[str, dict[str, list[float]]]
    left_out: dict[str, float]
    perturbed: dict[str, float]
    details: list[dict[str, Any]]


# ---------------------------------------------------------------------- images


def resized_about_centre(images: Images, scale: float) -> Images:
    """Images at ``scale`` times their size, at most one, in the middle of their own background.

    The background is black or white, whatever most of an image's rim is closer to.

    Args:
        images: ``(n, channels, side, side)`` uint8.
        scale: in (0, 1].
    """
    if not 0 < scale <= 1:
        raise ValueError(f"scale must lie above 0 and not above 1, got {scale!r}.")
    side = images.shape[-1]
    edge = (side - round(side * scale)) // 2  # the same on all sides
    inner = side - 2 * edge
    small = torch.nn.functional.interpolate(
        torch.from_numpy(images).float(), (inner, inner), mode="bilinear", antialias=True
    )
    rim = np.concatenate(
        [images[..., 0, :], images[..., -1, :], images[..., :, 0], images[..., :, -1]], axis=-1
    )
    light = np.median(rim, axis=-1) > WHITE / 2  # (n, channels)
    canvas = np.where(light[..., None, None], WHITE, 0) * np.ones((side, side))
    canvas[..., edge : side - edge, edge : side - edge] = small.round().numpy()
    return canvas.astype(np.uint8)


def turned(images: Images) -> Images:
    """Images turned by 90 degrees."""
    return np.ascontiguousarray(np.rot90(images, axes=(-2, -1)))


def novel_images(images: Images) -> Images:
    """Half the size, turned by 90 degrees, flipped left to right."""
    return np.ascontiguousarray(turned(resized_about_centre(images, 0.5))[..., ::-1])


def slightly_changed(images: Images) -> Images:
    """Four fifths of the size, turned by 90 degrees."""
    return turned(resized_about_centre(images, 0.8))


def other_labels(classes: int, generator: np.random.Generator) -> IntArray:
    """A random permutation ``(K,)`` that leaves no class where it was."""
    order = generator.permutation(classes)
    renamed = np.empty(classes, dtype=np.int64)
    renamed[order] = np.roll(order, 1)
    return renamed


class _Stages(torch.nn.Module):
    """The averages over all places after the last three stages of a ResNet-18."""

    def __init__(self, network: ResNet18) -> None:
        super().__init__()
        self.network = network
        self.feature_size = sum(_STAGE_WIDTHS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows ``(n, 896)`` of images ``(n, 3, height, width)``; the last 512 are the encoder's own."""
        net = self.network
        x = net.layer1(net.maxpool(torch.relu(net.bn1(net.conv1(x)))))
        second = net.layer2(x)
        third = net.layer3(second)
        fourth = net.layer4(third)
        return torch.cat([stage.mean((2, 3)) for stage in (second, third, fourth)], dim=1)


class StageEncoder:
    """A ResNet-18 encoder that tells what three stages of the network see, not only the last.

    Attributes:
        widths: numbers of each stage.
    """

    widths = _STAGE_WIDTHS

    def __init__(self, base: ResNet18Encoder) -> None:
        self._encoder = copy(base)
        self._encoder._network = _Stages(base._network)  # type: ignore[assignment]
        self.name = f"stages 2 to 4 of {base.name}"

    def encode(self, images: Images) -> Features:
        """Rows ``(n, 896)`` of images ``(n, channels, height, width)``."""
        return self._encoder.encode(images)


def represented(codes: Features, how: str, widths: tuple[int, ...] = ()) -> Features:
    """An encoder's rows as one of ``REPRESENTATIONS``, ``(n, k)``.

    Args:
        codes: ``(n, d)``.
        how: which representation; all but ``"stages"`` take the last stage only.
        widths: numbers of each stage; none means that all are of one.
    """
    widths = widths or (codes.shape[1],)
    stages = np.split(codes, np.cumsum(widths)[:-1], axis=1)
    if how == "plain":
        return stages[-1]
    parts = []
    for stage in stages if how == "stages" else stages[-1:]:
        lengths = np.maximum(np.linalg.norm(stage, axis=1, keepdims=True), _NO_LENGTH)
        parts += [stage / lengths] + ([] if how == "direction" else [np.log(lengths)])
    return np.hstack(parts).astype(np.float32)


class Represented:
    """An encoder with another representation of its rows.

    Attributes:
        base: the encoder.
        how: one of ``REPRESENTATIONS``.
    """

    def __init__(self, base: Encoder, how: str) -> None:
        self.base, self.how = base, how
        self.name = f"{how}, {base.name}"

    def encode(self, images: Images) -> Features:
        """Rows of images ``(n, channels, height, width)``."""
        return represented(self.base.encode(images), self.how, _widths(self.base))


def _widths(base: Encoder) -> tuple[int, ...]:
    return base.widths if isinstance(base, StageEncoder) else ()


# ---------------------------------------------------------------------- the federations


def changed_separately(made: FederatedImages, seed: int) -> FederatedDataset:
    """A quarter of the images transformed, another quarter relabelled, drawn image by image."""
    sizes = [len(made.dataset.split(name)) for name in SPLITS]
    generator = np.random.default_rng([seed, 2])
    quarter = generator.permutation(sum(sizes)) * 4 // sum(sizes)
    renamed = generator.permutation(len(made.class_names))
    splits = {}
    for name, own in zip(SPLITS, np.split(quarter, np.cumsum(sizes)[:-1]), strict=True):
        rows = made.dataset.split(name)
        images, labels = rows.inputs.numpy().copy(), rows.labels.numpy().copy()
        images[own == 2] = transform_images(images[own == 2], WHITE)
        labels[own == 3] = renamed[labels[own == 3]]
        splits[name] = replace(
            rows.with_inputs(torch.from_numpy(images)), labels=torch.from_numpy(labels)
        )
    return replace(made.dataset, **splits)  # type: ignore[arg-type]


def deal_images(
    study: NoveltyStudy, seed: int, data_dir: Path | None, tell: Tell = lambda _: None
) -> FederatedDataset:
    """The clients of a seed, without features."""
    images = load_images(study.dataset, data_dir)  # type: ignore[arg-type]
    made = federated_images(
        images,
        clients=study.clients,
        shift=study.changes == "joint",
        fraction=study.fraction,
        seed=seed,
    )
    tell(made.description.splitlines()[0])
    return changed_separately(made, seed) if study.changes == "separate" else made.dataset


def _encoder(study: NoveltyStudy, data_dir: Path | None) -> Encoder:
    base = encoder(study.encoder, data_dir, size=study.image_size, device=study.device)
    return StageEncoder(base) if isinstance(base, ResNet18Encoder) else base


def with_study_features(
    study: NoveltyStudy, dataset: FederatedDataset, data_dir: Path | None, cache: Path | None
) -> EncodedFederation:
    """The clients with features, and the way to features of novel images."""
    return encode_federation(
        dataset,
        Represented(_encoder(study, data_dir), study.representation),
        components=study.features,
        scale=True,
        cache=cache,
    )


@dataclass(frozen=True)
class LeftOut:
    """A federation that never saw one class.

    Attributes:
        encoded: its clients, each with as many images of the other classes.
        strangers: images of the class that was left out, ``(n, channels, side, side)``.
        new_labels: what each class is called in relabelled rows, ``(K,)``; the class that was left out
            keeps its name, and no other does.
    """

    encoded: EncodedFederation
    strangers: Images
    new_labels: IntArray


def leave_out(
    study: NoveltyStudy, seed: int, data_dir: Path | None, cache: Path | None = None
) -> LeftOut:
    """Deal images of all classes but one at random, the same number to every client."""
    images = load_images(study.dataset, data_dir)  # type: ignore[arg-type]
    if study.left_out >= len(images.class_names):
        raise ValueError(
            f"left_out must be below the {len(images.class_names)} classes, got {study.left_out}."
        )
    generator = np.random.default_rng([seed, 3])
    known = generator.permutation(np.flatnonzero(images.labels != study.left_out))
    wanted = study.scatter_clients * study.scatter_rows
    if len(known) < wanted:
        raise ValueError(
            f"{study.scatter_clients} clients with {study.scatter_rows} images need {wanted:,} images, "
            f"but there are {len(known):,}; use fewer clients or rows."
        )
    used = known[:wanted]
    dealt = ImageData(
        images.name,
        images.images[used],
        images.labels[used],
        images.class_names,
        writers=np.repeat(np.arange(study.scatter_clients), study.scatter_rows),
        writer_names=tuple(f"client {code + 1:03d}" for code in range(study.scatter_clients)),
    )
    made = federated_images(dealt, shift=False, seed=seed)
    strange = generator.permutation(np.flatnonzero(images.labels == study.left_out))
    others = np.flatnonzero(np.arange(len(images.class_names)) != study.left_out)
    new_labels = np.arange(len(images.class_names))
    new_labels[others] = others[other_labels(len(others), generator)]
    return LeftOut(
        with_study_features(study, made.dataset, data_dir, cache),
        images.images[strange[: len(made.dataset.test)]],
        new_labels,
    )


# ---------------------------------------------------------------------- scores


def familiarity(model: FederatedModel, images: Images, features: Features) -> FloatArray:
    """Scores that are low for novel images, ``(n,)``, without labels and without a client.

    ``log P(x)`` where there is a density. Otherwise the logarithm of the highest class probability: of
    the global model where that is all there is, else the highest among clients.
    """
    prediction = model.prediction
    if prediction.gaussians is not None:
        return model.score_samples(images, features=features)
    if prediction.assignment is None and model.n_learners == 1:
        return model.novelty_scores(images, score="confidence")
    clients = range(len(model.names))
    if prediction.assignment is not None:  # clients that share a learner say the same
        clients = np.unique(prediction.assignment.cpu().numpy(), return_index=True)[1].tolist()
    best = np.full(len(images), -np.inf)
    for client in clients:
        own = model.novelty_scores(images, client=model.names[client], score="confidence")
        best = np.maximum(best, own)
    return best


def _features(dataset: FederatedDataset, split: str) -> Features:
    features: Features = torch.cat(dataset.split(split).features.chunks).numpy()
    return features


def _save_scores(path: Path, scores: Scores) -> None:
    content = io.BytesIO()
    np.savez_compressed(content, **{name: own.astype(np.float32) for name, own in scores.items()})  # type: ignore[arg-type]
    write_atomically(path, content.getvalue())


def _load_scores(path: Path) -> Scores:
    with np.load(path, allow_pickle=False) as held:
        return {name: held[name].astype(np.float64) for name in held.files}


# ---------------------------------------------------------------------- the study


def reproduce_novelty(
    folder: Path,
    study: NoveltyStudy | None = None,
    *,
    data_dir: Path | None = None,
    cache: Path | None = None,
    tell: Tell = lambda _: None,
) -> NoveltyOutcome:
    """Table 3 and its figures; what is in ``folder`` already is not done again.

    Args:
        folder: for JSON, Markdown and the figures.
        study: what is run.
        data_dir: the data folder; ``None`` means the one that ``FEDGMM_DATA`` names.
        cache: a folder for encoded images; ``None`` keeps nothing.
        tell: called with a line before each step.
    """
    study = study or NoveltyStudy()
    name = f"novelty-{study.label}"
    trials = open_trials(folder / name, study)
    sized = study
    if "fedgmm" in study.methods:
        sized = choose_density(trials, study, data_dir, cache, tell)
    details: list[dict[str, Any]] = []
    for seed in study.seeds:
        clients = once(partial(_prepared, sized, seed, data_dir, cache, tell))
        for method in study.methods:
            chosen = chosen_options(trials, sized, method, partial(_dataset, clients), tell)
            tell(f"{TITLES[method]}, seed {seed}")
            run = partial(_one_trial, trials, sized, method, seed, chosen, clients)
            details.append(recorded(trials, f"{method}-{seed}", run))
    metrics = {
        method: {
            metric: [one[metric] for one in details if one["method"] == method]
            for metric in METRICS
        }
        for method in study.methods
    }
    left_out: dict[str, float] = {}
    perturbed: dict[str, float] = {}
    if "fedgmm" in study.methods:
        first = study.seeds[0]
        own = next(one for one in details if one["method"] == "fedgmm" and one["seed"] == first)
        perturbed = own["perturbed"]
        tell(f"class {study.left_out} left out")
        run = partial(_left_out_trial, trials, sized, chosen_of(own), data_dir, cache)
        left_out = recorded(trials, f"left-out-{first}", run)["auroc"]
    outcome = NoveltyOutcome(metrics, left_out, perturbed, details)
    chosen = {key: getattr(sized, key) for key in _CHOSEN}
    record = {"study": asdict(study), "chosen": chosen, **asdict(outcome)}
    write_results(folder, name, record, _markdown(sized, outcome))
    _figures(folder, name, study)
    return outcome


def _prepared(
    study: NoveltyStudy, seed: int, data_dir: Path | None, cache: Path | None, tell: Tell
) -> EncodedFederation:
    return with_study_features(study, deal_images(study, seed, data_dir, tell), data_dir, cache)


def _dataset(clients: Callable[[], EncodedFederation]) -> FederatedDataset:
    return clients().dataset


# ---------------------------------------------------------------------- which density


def choose_density(
    trials: Path,
    study: NoveltyStudy,
    data_dir: Path | None,
    cache: Path | None = None,
    tell: Tell = lambda _: None,
) -> NoveltyStudy:
    """The study with the density that knows best when a known class is missing, on the first seed.

    First the representation and the number of features are chosen, then the number of Gaussians and
    the ridge. Test rows and novel images are not looked at.
    """
    stages: list[list[dict[str, Any]]] = [
        [
            {"representation": how, "features": count}
            for how in study.representation_choices
            for count in study.feature_choices
        ],
        [
            {"components": count, "reg_covar": ridge}
            for count in study.component_choices
            for ridge in study.reg_covar_choices
        ],
    ]

    def run() -> dict[str, Any]:
        dataset = deal_images(study, study.seeds[0], data_dir, tell)
        base = _encoder(study, data_dir)
        codes = {
            split: encode_images(dataset.split(split).inputs.numpy(), base, cache)
            for split in ("train", "validation")
        }
        best: NoveltyStudy = study
        tried: list[dict[str, Any]] = []
        for stage in stages:
            scores = []
            for choice in stage if len(stage) > 1 else []:
                tell("density: " + ", ".join(f"{key} {value}" for key, value in choice.items()))
                sized = replace(best, **choice)
                scores.append(missing_class_auroc(sized, dataset, codes, base))
                facts = {key: getattr(sized, key) for key in _CHOSEN}
                tried.append({**facts, "auroc": scores[-1]})
            if stage:
                best = replace(best, **stage[int(np.argmax(scores)) if scores else 0])
        return {"best": {key: getattr(best, key) for key in _CHOSEN}, "tried": tried}

    if all(len(stage) <= 1 for stage in stages):  # nothing to choose
        settled = {key: value for stage in stages for one in stage for key, value in one.items()}
        return replace(study, **settled)
    return replace(study, **recorded(trials, "density", run)["best"])


def missing_class_auroc(
    study: NoveltyStudy,
    dataset: FederatedDataset,
    codes: dict[str, Features],
    base: Encoder,
) -> float:
    """How well ``log P(x)`` tells validation rows of a class that was left out from the others.

    Args:
        study: what the Gaussians see, and how many there are.
        dataset: the clients.
        codes: what the encoder says of the training and the validation rows, ``(N, d)`` each.
        base: the encoder.

    Returns:
        Mean AUROC over the classes.
    """
    from sklearn.exceptions import ConvergenceWarning

    from fedgmm.estimators import FederatedGaussianMixture

    step = -(-len(dataset.train) // _DENSITY_ROWS)
    rows = represented(codes["train"][::step], study.representation, _widths(base))
    held = represented(codes["validation"], study.representation, _widths(base))
    labels, owners = dataset.train.labels.numpy()[::step], dataset.train.codes.numpy()[::step]
    held_labels = dataset.validation.labels.numpy()
    found = []
    for label in _classes_to_miss(labels, held_labels):
        there = labels != label
        pca = federated_pca([torch.from_numpy(rows[there])], study.features)
        features = FeatureMap(base, pca, scale=True)
        mixture = FederatedGaussianMixture(
            study.components,
            covariance_type=study.covariance_type,
            reg_covar=study.reg_covar,
            max_iter=_DENSITY_ROUNDS,
            random_state=study.seeds[0],
            device=study.device,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a comparison of short fits
            mixture.fit(features.project(rows[there]), clients=owners[there])
        scores = mixture.score_samples(features.project(held))
        missing = held_labels == label
        found.append(novelty_metrics(scores[~missing], scores[missing]).auroc)
    if not found:
        raise ValueError(
            "The density cannot be chosen: no class is in both training and validation rows beside "
            "another one; use more images."
        )
    return float(np.mean(found))


def _classes_to_miss(labels: IntArray, held_labels: IntArray) -> Iterable[int]:
    """Classes with validation rows, beside which others remain in both splits."""
    for label in np.unique(held_labels).tolist():
        if (labels != label).any() and (held_labels != label).any():
            yield label


# ---------------------------------------------------------------------- trials


def _one_trial(
    trials: Path,
    study: NoveltyStudy,
    method: str,
    seed: int,
    chosen: dict[str, Any],
    clients: Callable[[], EncodedFederation],
) -> dict[str, Any]:
    """Train, then score test images as they are and as novel ones."""
    federation = clients()
    dataset, feature_map = federation.dataset, federation.feature_map
    trial = f"{method}-{seed}"
    model = trained(trials, trial, dataset, replace(study.options(method, seed), **chosen))
    images, features = dataset.test.inputs.numpy(), _features(dataset, "test")
    strange = novel_images(images)
    dense = model.prediction.gaussians is not None
    scores = {
        "known": familiarity(model, images, features),
        "novel": familiarity(model, strange, feature_map(strange) if dense else features),
    }
    record = {
        "method": method,
        "seed": seed,
        **chosen,
        **({key: getattr(study, key) for key in _CHOSEN} if dense else {}),
        **asdict(novelty_metrics(scores["known"], scores["novel"])),
        "test": model.evaluate("test").summary(),
        **facts_of(model),
    }
    if dense:
        scores |= _perturbed_scores(model, federation, seed)
        record["perturbed"] = _perturbed_auroc(scores)
    _save_scores(trials / f"{trial}.npz", scores)
    return record


def _perturbed_scores(
    model: FederatedModel, federation: EncodedFederation, seed: int
) -> dict[str, FloatArray]:
    """``log P(x)`` and ``log P(y|x)`` of test rows, of changed images, and under other labels."""
    rows = federation.dataset.test
    images, features = rows.inputs.numpy(), _features(federation.dataset, "test")
    labels = rows.labels.numpy()
    changed = slightly_changed(images)
    changed_features = federation.feature_map(changed)
    renamed = other_labels(len(model.classes), np.random.default_rng([seed, 4]))

    def conditional(x: Images, y: IntArray, seen: Features) -> FloatArray:
        return model.log_conditional(x, model.classes[y], features=seen)

    return {
        "known_y": conditional(images, labels, features),
        "changed_x": model.score_samples(changed, features=changed_features),
        "changed_x_y": conditional(changed, labels, changed_features),
        "relabelled_y": conditional(images, renamed[labels], features),
    }


def _joint(scores: Scores) -> Scores:
    """``log P(x, y)`` of the three groups of small changes."""
    return {
        "known": scores["known"] + scores["known_y"],
        "changed": scores["changed_x"] + scores["changed_x_y"],
        "relabelled": scores["known"] + scores["relabelled_y"],
    }


def _perturbed_auroc(scores: Scores) -> dict[str, float]:
    joint = _joint(scores)
    return {
        "changed images, log P(x)": novelty_metrics(scores["known"], scores["changed_x"]).auroc,
        "changed images, log P(x, y)": novelty_metrics(joint["known"], joint["changed"]).auroc,
        "other labels, log P(y|x)": novelty_metrics(
            scores["known_y"], scores["relabelled_y"]
        ).auroc,
        "other labels, log P(x, y)": novelty_metrics(joint["known"], joint["relabelled"]).auroc,
    }


def _left_out_trial(
    trials: Path,
    study: NoveltyStudy,
    chosen: dict[str, Any],
    data_dir: Path | None,
    cache: Path | None,
) -> dict[str, Any]:
    """FedGMM without one class, and what it says of normal rows and of two kinds of outliers."""
    seed = study.seeds[0]
    trial = f"left-out-{seed}"
    case = leave_out(study, seed, data_dir, cache)
    dataset = case.encoded.dataset
    model = trained(trials, trial, dataset, replace(study.options("fedgmm", seed), **chosen))
    images, features = dataset.test.inputs.numpy(), _features(dataset, "test")
    labels = dataset.test.labels.numpy()
    strange_features = case.encoded.feature_map(case.strangers)
    strange_labels = np.full(len(case.strangers), study.left_out)
    scores = {
        "normal_x": model.score_samples(images, features=features),
        "normal_y": model.log_conditional(images, model.classes[labels], features=features),
        "relabelled_y": model.log_conditional(
            images, model.classes[case.new_labels[labels]], features=features
        ),
        "stranger_x": model.score_samples(case.strangers, features=strange_features),
        "stranger_y": model.log_conditional(
            case.strangers, model.classes[strange_labels], features=strange_features
        ),
    }
    _save_scores(trials / f"{trial}.npz", scores)
    return {
        "auroc": {
            f"class {study.left_out}, log P(x)": novelty_metrics(
                scores["normal_x"], scores["stranger_x"]
            ).auroc,
            "other labels, log P(y|x)": novelty_metrics(
                scores["normal_y"], scores["relabelled_y"]
            ).auroc,
        },
        "test": model.evaluate("test").summary(),
        **facts_of(model),
    }


# ---------------------------------------------------------------------- tables and figures


def _figures(folder: Path, name: str, study: NoveltyStudy) -> None:
    from fedgmm.report.image_figures import plot_groups, plot_likelihoods

    trials, seed = folder / name, study.seeds[0]
    shown = [method for method in _WITH_HISTOGRAM if method in study.methods]
    held = {method: _load_scores(trials / f"{method}-{seed}.npz") for method in shown}
    if held:
        panels = {
            f"{TITLES[method]}: {_SCORE.get(method, 'highest log-probability')}": {
                "known": own["known"],
                "novel": own["novel"],
            }
            for method, own in held.items()
        }
        plot_likelihoods(panels, folder / f"{name}-likelihoods.png")
    if "fedgmm" not in held:
        return
    own, joint = held["fedgmm"], _joint(held["fedgmm"])
    plot_likelihoods(
        {
            "smaller and turned: log P(x, y)": {"known": joint["known"], "novel": joint["changed"]},
            "other labels: log P(x, y)": {"known": joint["known"], "novel": joint["relabelled"]},
        },
        folder / f"{name}-perturbed.png",
    )
    plot_groups(
        {
            "known": (own["known"], own["known_y"]),
            "other labels": (own["known"], own["relabelled_y"]),
        },
        "Known images under their own and under other labels",
        folder / f"{name}-relabelled.png",
    )
    left = _load_scores(trials / f"left-out-{seed}.npz")
    plot_groups(
        {
            "normal": (left["normal_x"], left["normal_y"]),
            "other labels": (left["normal_x"], left["relabelled_y"]),
            f"class {study.left_out}, never seen": (left["stranger_x"], left["stranger_y"]),
        },
        f"FedGMM trained without class {study.left_out}",
        folder / f"{name}-left-out.png",
    )


def _markdown(study: NoveltyStudy, outcome: NoveltyOutcome) -> str:
    rows = [
        [
            TITLES[method],
            *(mean_and_spread(values) for values in own.values()),
            " / ".join(f"{value:.2f}" for value in PAPER_METRICS[method]),
        ]
        for method, own in outcome.metrics.items()
    ]
    known = {
        "separate": "A quarter of the known images is turned, flipped and inverted, another quarter "
        "relabelled (the paper's appendix).",
        "joint": "Half of the known images is turned, flipped, inverted and relabelled.",
        "none": "Known images and labels as they are.",
    }[study.changes]
    text = (
        f"# {study.dataset}: known test images against novel ones ({study.track} track)\n\n"
        + markdown_table(["method", *(f"{title} (%)" for title in METRICS.values()), "paper"], rows)
        + f"\nNovel images are test images at half their size, turned by 90 degrees and flipped. {known} "
        "FedGMM scores by log P(x) under the federation's weights, without a label; the others by their "
        "highest class probability, personalised ones by the highest among clients. "
        f"{study.protocol()}{stopped_early(outcome.details)}\n"
    )
    if "fedgmm" in outcome.metrics:
        text += (
            f"\nFedGMM has {study.components} Gaussians (reg_covar {study.reg_covar:g}) on "
            f"{study.features} principal components of {study.encoder} features "
            f"({study.representation}). What the Gaussians see and how many there are was chosen on "
            "validation rows of the first seed, by how well the density tells a known class that it "
            "was not shown from the others; novel images had no part in it.\n"
        )
    for title, table in (
        (f"FedGMM without class {study.left_out} in training", outcome.left_out),
        (
            "FedGMM against images at 0.8 of their size and turned, or other labels",
            outcome.perturbed,
        ),
    ):
        if table:
            text += f"\n## {title}\n\n" + markdown_table(
                ["outliers and score", "AUROC (%)"],
                [[kind.replace("|", "\\|"), f"{100 * value:.2f}"] for kind, value in table.items()],
            )
    return text
