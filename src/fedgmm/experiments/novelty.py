"""Novel images: Table 3, likelihoods of known and novel ones, a digit left out, and small changes.

The federation is that of the paper's appendix: MNIST dealt by label, a quarter of the images turned,
flipped and inverted, another quarter relabelled. Novel images are test images at half their size, turned
and flipped. FedGMM is asked for ``log P(x)``, which needs no label; all others for their highest class
probability.

An encoder's numbers shrink with the object in the picture, so plain features of small digits lie near the
middle of everything and look familiar. Here they have length one: directions count. And principal
components that are dropped cannot tell anything, so more of them are kept than for classification. Both
were settled without a threshold or a fit to novel images; the number of Gaussians and the width of their
covariances are chosen by the likelihood of validation rows.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from fedgmm.core.checks import check_choice, check_flag, check_integer
from fedgmm.data.dataset import SPLITS, FederatedDataset
from fedgmm.data.encoder import (
    EncodedFederation,
    Encoder,
    Features,
    Images,
    encode_federation,
    encoder,
)
from fedgmm.data.federated_images import FederatedImages, federated_images
from fedgmm.data.images import WHITE, ImageData, load_images
from fedgmm.data.partition import transform_images
from fedgmm.experiments.classification import (
    ImageStudy,
    chosen_rate,
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

_WITH_HISTOGRAM = ("fedgmm", "fedem", "fedavg")
_DENSITY_ROUNDS = 30


@dataclass(frozen=True)
class NoveltyStudy(ImageStudy):
    """What is run; attributes not named here are those of its base.

    Attributes:
        dataset: the paper has MNIST.
        changes: what clients know beside plain images: ``"separate"`` as in the paper's appendix, a
            quarter transformed and another quarter relabelled; ``"joint"``, half of them both, as for
            classification; or ``"none"``.
        features: numbers that federated PCA keeps.
        unit_length: divide what the encoder says of an image by its length.
        component_choices: values of ``M1`` among which validation rows choose, for FedGMM.
        reg_covar_choices: likewise of ``reg_covar``.
        left_out: the class that is not in the training of the scatter plot.
        scatter_clients: clients of that training.
        scatter_rows: images that each of them has.
    """

    dataset: str = "mnist"
    changes: Changes = "separate"
    features: int = 256
    unit_length: bool = True
    component_choices: tuple[int, ...] = (3, 5, 10)
    reg_covar_choices: tuple[float, ...] = (1e-2, 1e-3)
    left_out: int = 1
    scatter_clients: int = 50
    scatter_rows: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("changes", self.changes, CHANGES)
        check_flag("unit_length", self.unit_length)
        check_integer("left_out", self.left_out, 0)
        check_integer("scatter_clients", self.scatter_clients, 1)
        check_integer("scatter_rows", self.scatter_rows, 1)
        for name in ("component_choices", "reg_covar_choices"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give at least one number.")


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


class UnitLength:
    """An encoder whose rows are divided by their length.

    Attributes:
        base: the encoder.
    """

    def __init__(self, base: Encoder) -> None:
        self.base = base
        self.name = f"unit length {base.name}"

    def encode(self, images: Images) -> Features:
        """Rows ``(n, d)`` of length one; a row of zeros stays what it is."""
        rows = self.base.encode(images)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return np.asarray(rows / np.where(lengths > 0, lengths, 1), dtype=np.float32)


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
    return replace(made.dataset, **splits)


def prepare_novelty(
    study: NoveltyStudy,
    seed: int,
    data_dir: Path | None,
    tell: Tell = lambda _: None,
    cache: Path | None = None,
) -> EncodedFederation:
    """The clients of a seed, with features, and the way to features of novel images."""
    images = load_images(study.dataset, data_dir)  # type: ignore[arg-type]
    made = federated_images(
        images,
        clients=study.clients,
        shift=study.changes == "joint",
        fraction=study.fraction,
        seed=seed,
    )
    tell(made.description.splitlines()[0])
    separate = study.changes == "separate"
    dataset = changed_separately(made, seed) if separate else made.dataset
    return _encoded(study, dataset, data_dir, cache)


def _encoded(
    study: NoveltyStudy, dataset: FederatedDataset, data_dir: Path | None, cache: Path | None
) -> EncodedFederation:
    base = encoder(study.encoder, data_dir, size=study.image_size, device=study.device)
    return encode_federation(
        dataset,
        UnitLength(base) if study.unit_length else base,
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
        _encoded(study, made.dataset, data_dir, cache),
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
    name = f"novelty-{study.dataset}-{study.track}"
    trials = open_trials(folder / name, study)
    details: list[dict[str, Any]] = []
    for seed in study.seeds:
        clients = once(partial(prepare_novelty, study, seed, data_dir, tell, cache))
        for method in study.methods:
            sized = _with_density(trials, study, clients, tell) if method == "fedgmm" else study
            lr = chosen_rate(trials, sized, method, partial(_dataset, clients), tell)
            tell(f"{TITLES[method]}, seed {seed}")
            run = partial(_one_trial, trials, sized, method, seed, lr, clients)
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
    choice: dict[str, Any] = {}
    if "fedgmm" in study.methods:
        first = study.seeds[0]
        own = next(one for one in details if one["method"] == "fedgmm" and one["seed"] == first)
        choice = {key: own[key] for key in ("components", "reg_covar")}
        perturbed = own["perturbed"]
        tell(f"class {study.left_out} left out")
        sized = replace(study, **choice)
        run = partial(_left_out_trial, trials, sized, own["lr"], data_dir, cache)
        left_out = recorded(trials, f"left-out-{first}", run)["auroc"]
    outcome = NoveltyOutcome(metrics, left_out, perturbed, details)
    record = {"study": asdict(study), "chosen": choice, **asdict(outcome)}
    write_results(folder, name, record, _markdown(study, outcome, choice))
    _figures(folder, name, study)
    return outcome


def _dataset(clients: Callable[[], EncodedFederation]) -> FederatedDataset:
    return clients().dataset


def _with_density(
    trials: Path, study: NoveltyStudy, clients: Callable[[], EncodedFederation], tell: Tell
) -> NoveltyStudy:
    """The study with the Gaussians that make validation rows of the first seed most likely."""

    def run() -> dict[str, Any]:
        dataset = clients().dataset
        tried = []
        for components in study.component_choices:
            for reg_covar in study.reg_covar_choices:
                tell(f"trying {components} Gaussians, reg_covar {reg_covar:g}")
                score = _validation_likelihood(study, dataset, components, reg_covar)
                tried.append(
                    {"components": components, "reg_covar": reg_covar, "log_likelihood": score}
                )
        return {"best": max(tried, key=lambda one: one["log_likelihood"]), "tried": tried}

    best = recorded(trials, "density", run)["best"]
    return replace(study, components=best["components"], reg_covar=best["reg_covar"])


def _validation_likelihood(
    study: NoveltyStudy, dataset: FederatedDataset, components: int, reg_covar: float
) -> float:
    """Mean ``log P(x)`` of validation rows under Gaussians alone, with the federation's weights."""
    from sklearn.exceptions import ConvergenceWarning

    from fedgmm.estimators import FederatedGaussianMixture

    mixture = FederatedGaussianMixture(
        components,
        covariance_type=study.covariance_type,
        reg_covar=reg_covar,
        max_iter=_DENSITY_ROUNDS,
        random_state=study.seeds[0],
        device=study.device,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a comparison of short fits
        mixture.fit(_features(dataset, "train"), clients=dataset.train.codes.numpy())
    return float(mixture.score(_features(dataset, "validation")))


def _one_trial(
    trials: Path,
    study: NoveltyStudy,
    method: str,
    seed: int,
    lr: float,
    clients: Callable[[], EncodedFederation],
) -> dict[str, Any]:
    """Train, then score test images as they are and as novel ones."""
    federation = clients()
    dataset, feature_map = federation.dataset, federation.feature_map
    trial = f"{method}-{seed}"
    model = trained(trials, trial, dataset, replace(study.options(method, seed), lr=lr))
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
        "lr": lr,
        "components": study.components,
        "reg_covar": study.reg_covar,
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
    trials: Path, study: NoveltyStudy, lr: float, data_dir: Path | None, cache: Path | None
) -> dict[str, Any]:
    """FedGMM without one class: ``log P(x)`` and ``log P(y|x)`` of normal rows and two kinds of outliers."""
    seed = study.seeds[0]
    trial = f"left-out-{seed}"
    case = leave_out(study, seed, data_dir, cache)
    dataset = case.encoded.dataset
    model = trained(trials, trial, dataset, replace(study.options("fedgmm", seed), lr=lr))
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
            TITLES[method]: {"known": own["known"], "novel": own["novel"]}
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


def _markdown(study: NoveltyStudy, outcome: NoveltyOutcome, choice: dict[str, Any]) -> str:
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
    length = ", each image's divided by their length" if study.unit_length else ""
    text = (
        f"# {study.dataset}: known test images against novel ones ({study.track} track)\n\n"
        + markdown_table(["method", *(f"{title} (%)" for title in METRICS.values()), "paper"], rows)
        + f"\nNovel images are test images at half their size, turned by 90 degrees and flipped. {known} "
        "FedGMM scores by log P(x) under the federation's weights, without a label; the others by their "
        "highest class probability, personalised ones by the highest among clients. "
        f"{study.protocol()}{stopped_early(outcome.details)}\n"
    )
    if choice:
        text += (
            f"\nThe Gaussians see {study.features} principal components of {study.encoder} "
            f"features{length}. Validation rows of the first seed chose "
            f"{choice['components']} Gaussians and reg_covar {choice['reg_covar']:g} among "
            f"{', '.join(map(str, study.component_choices))} and "
            f"{', '.join(f'{value:g}' for value in study.reg_covar_choices)}, by their likelihood.\n"
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
                [[kind, f"{100 * value:.2f}"] for kind, value in table.items()],
            )
    return text
