"""Setup of Table 3: settings, novel images, the federations, and the choice of FedGMM's density.

The first federation is that of the paper's appendix: MNIST distributed by label, with a quarter of the
images rotated, flipped and inverted and another quarter relabelled. The second one leaves out one class.

The density is chosen without novel images: each known class in turn is left out of a density, which must
then separate the validation rows of this class from the others.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.data.dataset import SPLITS, FederatedDataset
from fedgmm.data.embeddings import (
    EncodedFederation,
    FeatureMap,
    Images,
    encode_federation,
    encode_splits,
    federated_pca,
)
from fedgmm.data.encoders import Encoder, ResNet18Encoder, encoder
from fedgmm.data.images.federated import FederatedImages, federated_images
from fedgmm.data.images.files import WHITE, ImageData
from fedgmm.data.partition import transform_images
from fedgmm.experiments.paper.representations import (
    REPRESENTATIONS,
    Represented,
    StageEncoder,
    layout_of,
    represented,
)
from fedgmm.experiments.settings import ImageStudy
from fedgmm.experiments.study import (
    Lock,
    StudyContext,
    check_rows,
    check_trainable,
    deal_images,
)
from fedgmm.experiments.trials import Record, TrialFolder
from fedgmm.model.novelty import novelty_metrics
from fedgmm.support.checks import check_choice, check_integer
from fedgmm.wording import counted

IntArray = NDArray[np.int64]
Changes = Literal["separate", "joint", "none"]
CHANGES: tuple[str, ...] = get_args(Changes)

DENSITY = "density"
"""The name of the file that holds the chosen density."""

_DENSITY_OPTIONS = ("representation", "features", "components", "reg_covar")
_DENSITY_ROUNDS = 30
_DENSITY_ROWS = 20_000  # number of training rows that densities are compared on


@dataclass(frozen=True)
class NoveltyStudy(ImageStudy):
    """Settings of the study; see :class:`ImageStudy` for the other attributes.

    ``changes`` replaces the setting ``shift``, which is not used, and ``encoder_dtype="auto"`` means
    ``"float32"`` here, on every device. FedGMM uses ``representation``, ``features``, ``components`` and
    ``reg_covar`` where their choices are empty.
    """

    dataset: str = "mnist"  # that of the paper
    # changed images that the clients know: ``"separate"``, as in the paper's appendix, a
    # quarter transformed and another quarter relabelled; ``"joint"``, half of them both
    # transformed and relabelled, as for classification; or ``"none"``
    changes: Changes = "separate"
    representation: str = "plain"  # one of ``REPRESENTATIONS``
    # candidates, first tried with all of ``feature_choices``
    representation_choices: tuple[str, ...] = REPRESENTATIONS
    feature_choices: tuple[int, ...] = (48, 128, 256)  # candidates for ``features``
    # candidates, then tried with all of ``reg_covar_choices``
    component_choices: tuple[int, ...] = (3, 10, 30)
    reg_covar_choices: tuple[float, ...] = (1e-2, 1e-3)  # candidates for ``reg_covar``
    left_out: int = 1  # the class that is left out for the scatter plot
    scatter_clients: int = 50  # number of clients for the scatter plot, at most ``clients``
    scatter_rows: int = 500  # number of images of each of them

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("changes", self.changes, CHANGES)
        for name in (self.representation, *self.representation_choices):
            check_choice("representation", name, REPRESENTATIONS)
        for name, least in (("left_out", 0), ("scatter_clients", 1), ("scatter_rows", 1)):
            check_integer(name, getattr(self, name), least)

    @property
    def density(self) -> dict[str, Any]:
        """The settings of FedGMM's density that can be chosen."""
        return {key: getattr(self, key) for key in _DENSITY_OPTIONS}

    @property
    def density_choices(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Candidates for representation and features, then for components and ``reg_covar``.

        Both lists have at least one entry.
        """
        seen = product(
            self.representation_choices or (self.representation,),
            self.feature_choices or (self.features,),
        )
        sizes = product(
            self.component_choices or (self.components,),
            self.reg_covar_choices or (self.reg_covar,),
        )
        return (
            [{"representation": how, "features": count} for how, count in seen],
            [{"components": count, "reg_covar": ridge} for count, ridge in sizes],
        )

    @property
    def density_is_chosen(self) -> bool:
        """Whether there is more than one candidate."""
        return any(len(stage) > 1 for stage in self.density_choices)


# ---------------------------------------------------------------------- novel images, wrong labels


def resized_about_centre(images: Images, scale: float) -> Images:
    """Shrink images and place them in the middle of their own background.

    The background is black or white, whichever is closer to the median of an image's border.

    Args:
        images: ``(n, channels, side, side)`` uint8.
        scale: in (0, 1].
    """
    if not 0 < scale <= 1:
        raise ValueError(f"scale must be above 0 and at most 1, got {scale!r}.")
    side = images.shape[-1]
    edge = (side - round(side * scale)) // 2  # the same on all sides
    inner = side - 2 * edge
    small = torch.nn.functional.interpolate(
        torch.from_numpy(images).float(), (inner, inner), mode="bilinear", antialias=True
    )
    border = np.concatenate(
        [images[..., 0, :], images[..., -1, :], images[..., :, 0], images[..., :, -1]], axis=-1
    )
    light = np.median(border, axis=-1) > WHITE / 2  # (n, channels)
    canvas = np.where(light[..., None, None], WHITE, 0) * np.ones((side, side))
    canvas[..., edge : side - edge, edge : side - edge] = small.round().numpy()
    return canvas.astype(np.uint8)


def slightly_changed(images: Images) -> Images:
    """Return images at four fifths of their size, rotated by 90 degrees."""
    return _rotated(resized_about_centre(images, 0.8))


def novel_images(images: Images) -> Images:
    """Return images at half their size, rotated by 90 degrees and flipped left to right."""
    return np.ascontiguousarray(_rotated(resized_about_centre(images, 0.5))[..., ::-1])


def _rotated(images: Images) -> Images:
    return np.ascontiguousarray(np.rot90(images, axes=(-2, -1)))


def other_labels(classes: int, generator: np.random.Generator) -> IntArray:
    """Draw a permutation ``(K,)`` without a fixed point."""
    order = generator.permutation(classes)
    renamed = np.empty(classes, dtype=np.int64)
    renamed[order] = np.roll(order, 1)
    return renamed


# ---------------------------------------------------------------------- the federations


@dataclass(frozen=True)
class KnownImages:
    """A federation, and the map from further images to features."""

    dataset: FederatedDataset  # the clients
    feature_map: FeatureMap | None  # ``None`` if no method has Gaussians that use features


def prepare_novelty(study: NoveltyStudy, seed: int, context: StudyContext) -> KnownImages:
    """Return the clients of a seed, with features if a method has Gaussians that use them."""
    dataset = known_images(study, seed, context)
    if "fedgmm" not in study.methods:
        return KnownImages(dataset, None)
    encoded = with_study_features(study, dataset, context)
    return KnownImages(encoded.dataset, encoded.feature_map)


def known_images(study: NoveltyStudy, seed: int, context: StudyContext) -> FederatedDataset:
    """Return the clients of a seed, without features."""
    made = deal_images(study, seed, context, shift=study.changes == "joint")
    check_trainable(study, seed, made.dataset)
    return changed_separately(made, seed) if study.changes == "separate" else made.dataset


def changed_separately(made: FederatedImages, seed: int) -> FederatedDataset:
    """Transform a random quarter of the images and relabel another quarter."""
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


def study_encoder(study: NoveltyStudy, data_dir: Path | None) -> Encoder:
    """Return the study's encoder; the module ``representations`` makes features of its output."""
    base = encoder(
        study.encoder,
        data_dir,
        size=study.image_size,
        device=study.device,
        dtype="float32" if study.encoder_dtype == "auto" else study.encoder_dtype,
    )
    return StageEncoder(base) if isinstance(base, ResNet18Encoder) else base


def with_study_features(
    study: NoveltyStudy, dataset: FederatedDataset, context: StudyContext
) -> EncodedFederation:
    """Add the study's features to the clients."""
    check_rows(len(dataset.train), study.features)
    return encode_federation(
        dataset,
        Represented(study_encoder(study, context.data_dir), study.representation, context.cache),
        components=study.features,
        scale=True,
        progress=context.report_encoded,  # client by client, like the cache
    )


@dataclass(frozen=True)
class LeftOut:
    """A federation without one class."""

    # its clients, each with the same number of images of the other classes
    encoded: EncodedFederation
    strangers: Images  # images of the class that was left out, ``(n, channels, side, side)``
    # the wrong label of each class in relabelled rows, ``(K,)``; only the class that was left out
    # keeps its own
    new_labels: IntArray


def leave_out(study: NoveltyStudy, seed: int, context: StudyContext) -> LeftOut:
    """Distribute images of all classes but one at random, the same number to every client."""
    images = context.load(study.dataset)
    if study.left_out >= len(images.class_names):
        raise ValueError(
            f"left_out must be a class from 0 to {len(images.class_names) - 1}, got {study.left_out}."
        )
    generator = np.random.default_rng([seed, 3])
    known = generator.permutation(np.flatnonzero(images.labels != study.left_out))
    # a study with fewer clients has fewer here, too
    clients = min(study.scatter_clients, study.clients or study.scatter_clients)
    wanted = clients * study.scatter_rows
    if len(known) < wanted:
        raise ValueError(
            f"{counted(clients, 'client')} with {counted(study.scatter_rows, 'image')} each need "
            f"{wanted:,} images, but there are {len(known):,}; use fewer clients or rows."
        )
    used = known[:wanted]
    equal = ImageData(
        images.name,
        images.images[used],
        images.labels[used],
        images.class_names,
        writers=np.repeat(np.arange(clients), study.scatter_rows),
        writer_names=tuple(f"client {code + 1:03d}" for code in range(clients)),
    )
    made = federated_images(equal, shift=False, seed=seed)
    strange = generator.permutation(np.flatnonzero(images.labels == study.left_out))
    others = np.flatnonzero(np.arange(len(images.class_names)) != study.left_out)
    new_labels = np.arange(len(images.class_names))
    new_labels[others] = others[other_labels(len(others), generator)]
    return LeftOut(
        with_study_features(study, made.dataset, context),
        images.images[strange[: len(made.dataset.test)]],
        new_labels,
    )


# ---------------------------------------------------------------------- the choice of the density


def choose_density(
    trials: TrialFolder, study: NoveltyStudy, context: StudyContext, lock: Lock = lambda *_: None
) -> NoveltyStudy:
    """Return the study with the density that best detects a missing class, on the first seed.

    First the representation and the number of features are chosen, then the number of Gaussians and
    ``reg_covar``. Every candidate writes a file. Test rows are encoded, because the cache keeps all rows
    of a client together, but neither they nor novel images influence the choice. ``lock`` is called
    before anything is encoded or written.
    """
    if (known := density_on_file(trials, study)) is not None:
        return known

    @cache
    def prepared() -> tuple[FederatedDataset, dict[str, Tensor], Encoder]:
        dataset = known_images(study, study.seeds[0], context)
        base = study_encoder(study, context.data_dir)
        lock(study.seeds[0], dataset)
        return dataset, encode_splits(dataset, base, context.cache, context.report_encoded), base

    def judge(candidate: NoveltyStudy) -> Record:
        return {**candidate.density, "auroc": missing_class_auroc(candidate, *prepared())}

    def run() -> Record:
        best: NoveltyStudy = study
        tried: list[Record] = []
        for stage in study.density_choices:
            if len(stage) == 1:
                best = replace(best, **stage[0])
                continue
            scores = []
            for choice in stage:
                text = ", ".join(f"{key} {value}" for key, value in choice.items())
                context.notify(f"density: {text}")
                candidate = replace(best, **choice)
                values = map(str, candidate.density.values())
                name = "-".join([DENSITY, *values, str(study.seeds[0])])
                tried.append(trials.run_once(name, partial(judge, candidate), "auroc"))
                scores.append(tried[-1]["auroc"])
            best = replace(best, **stage[int(np.argmax(scores))])
        return {"best": best.density, "tried": tried}

    return replace(study, **trials.run_once(DENSITY, run, "best")["best"])


def density_on_file(trials: TrialFolder, study: NoveltyStudy) -> NoveltyStudy | None:
    """Return the study with its only candidate or the density chosen before; ``None`` otherwise."""
    if not study.density_is_chosen:
        seen, sizes = study.density_choices
        return replace(study, **seen[0], **sizes[0])
    record = trials.read(DENSITY, "best")
    return None if record is None else replace(study, **record["best"])


def missing_class_auroc(
    study: NoveltyStudy,
    dataset: FederatedDataset,
    codes: dict[str, Tensor],
    base: Encoder,
) -> float:
    """Return how well ``log P(x)`` separates validation rows of a missing class from the others.

    Args:
        study: the settings of the density.
        dataset: the clients.
        codes: output of the encoder for the training and the validation rows, ``(N, d)`` each.
        base: the encoder.

    Returns:
        Mean AUROC over the classes that can be left out: those with validation rows, and with rows of
        other classes in both splits.
    """
    from sklearn.exceptions import ConvergenceWarning

    from fedgmm.estimators import FederatedGaussianMixture

    step = -(-len(dataset.train) // _DENSITY_ROWS)
    rows = represented(codes["train"][::step], study.representation, layout_of(base))
    held = represented(codes["validation"], study.representation, layout_of(base))
    labels, owners = dataset.train.labels.numpy()[::step], dataset.train.codes.numpy()[::step]
    held_labels = dataset.validation.labels.numpy()
    found = []
    for label in np.unique(held_labels).tolist():
        present, missing = labels != label, held_labels == label
        if not present.any() or missing.all():
            continue
        check_rows(int(present.sum()), study.features)
        pca = federated_pca([rows[torch.from_numpy(present)]], study.features)
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
            warnings.simplefilter("ignore", ConvergenceWarning)  # short fits suffice to compare
            seen = features.project(rows[torch.from_numpy(present)])
            mixture.fit(seen.cpu().numpy(), clients=owners[present])
        scores = mixture.score_samples(features.project(held).cpu().numpy())
        found.append(novelty_metrics(scores[~missing], scores[missing]).auroc)
    if not found:
        raise ValueError(
            "The density cannot be chosen, because training and validation rows have too few classes to "
            "leave one out; use more images."
        )
    return float(np.mean(found))
