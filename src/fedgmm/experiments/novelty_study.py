"""The settings of the study on novel images, and its two federations.

The first is that of the paper's appendix: MNIST dealt by label, a quarter of the images turned, flipped and
inverted, another quarter relabelled. The second never sees one of the classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from fedgmm.core.checks import check_choice, check_integer
from fedgmm.data.dataset import SPLITS, FederatedDataset
from fedgmm.data.embeddings import (
    EncodedFederation,
    Encoder,
    FeatureMap,
    Images,
    ResNet18Encoder,
    encode_federation,
    encoder,
)
from fedgmm.data.images.federated import FederatedImages, federated_images
from fedgmm.data.images.files import WHITE, ImageData
from fedgmm.data.partition import transform_images
from fedgmm.data.representations import REPRESENTATIONS, Represented, StageEncoder
from fedgmm.experiments.image_study import ImageStudy, check_rows, check_trainable, dealt
from fedgmm.experiments.novel_images import IntArray, other_labels
from fedgmm.experiments.workplace import Workplace
from fedgmm.wording import counted

Changes = Literal["separate", "joint", "none"]
CHANGES: tuple[str, ...] = get_args(Changes)

_CHOSEN = ("representation", "features", "components", "reg_covar")


@dataclass(frozen=True)
class NoveltyStudy(ImageStudy):
    """What is run; attributes not named here are those of its base.

    Attributes:
        dataset: the paper has MNIST; the base's ``shift`` has no part here, ``changes`` has.
        changes: what clients know beside plain images: ``"separate"`` as in the paper's appendix, a
            quarter transformed and another quarter relabelled; ``"joint"``, half of them both, as for
            classification; or ``"none"``.
        encoder_dtype: ``"auto"`` means ``"float32"`` here, on every device.
        representation: one of ``REPRESENTATIONS``; this and the three after it are what FedGMM has
            where its choices below are empty.
        features: numbers that federated PCA keeps.
        components: ``M1``.
        reg_covar: added to every variance.
        representation_choices: what is tried for FedGMM, first with all of ``feature_choices``.
        feature_choices: likewise.
        component_choices: what is tried then, with all of ``reg_covar_choices``.
        reg_covar_choices: likewise.
        left_out: the class that is not in the training of the scatter plot.
        scatter_clients: clients of that training, but no more than ``clients``.
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

    @property
    def density(self) -> dict[str, Any]:
        """The settings of FedGMM's density that are chosen."""
        return {key: getattr(self, key) for key in _CHOSEN}

    @property
    def density_choices(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """What is tried for them: first what the Gaussians see, then how many there are and their ridge.

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
        """Whether there is more than one density to choose from."""
        return any(len(stage) > 1 for stage in self.density_choices)


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


def deal_images(study: NoveltyStudy, seed: int, workplace: Workplace) -> FederatedDataset:
    """The clients of a seed, without features."""
    made = dealt(study, seed, workplace, shift=study.changes == "joint")
    check_trainable(study, seed, made.dataset)
    return changed_separately(made, seed) if study.changes == "separate" else made.dataset


def study_encoder(study: NoveltyStudy, data_dir: Path | None) -> Encoder:
    """The study's encoder, before its numbers are represented."""
    base = encoder(
        study.encoder,
        data_dir,
        size=study.image_size,
        device=study.device,
        dtype="float32" if study.encoder_dtype == "auto" else study.encoder_dtype,
    )
    return StageEncoder(base) if isinstance(base, ResNet18Encoder) else base


def with_study_features(
    study: NoveltyStudy, dataset: FederatedDataset, workplace: Workplace
) -> EncodedFederation:
    """The clients with features, and the way to features of novel images."""
    check_rows(len(dataset.train), study.features)
    return encode_federation(
        dataset,
        Represented(
            study_encoder(study, workplace.data_dir), study.representation, workplace.cache
        ),
        components=study.features,
        scale=True,
        progress=workplace.tell_encoded,  # client by client, as the cache keeps what was encoded
    )


@dataclass(frozen=True)
class KnownImages:
    """A federation, and the way to features of images that it does not know.

    Attributes:
        dataset: the clients.
        feature_map: gives the features of further images; ``None`` where no method has Gaussians that
            would see them.
    """

    dataset: FederatedDataset
    feature_map: FeatureMap | None


def prepare_novelty(study: NoveltyStudy, seed: int, workplace: Workplace) -> KnownImages:
    """The clients of a seed, with features if a method has Gaussians to see them."""
    dataset = deal_images(study, seed, workplace)
    if "fedgmm" not in study.methods:
        return KnownImages(dataset, None)
    encoded = with_study_features(study, dataset, workplace)
    return KnownImages(encoded.dataset, encoded.feature_map)


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


def leave_out(study: NoveltyStudy, seed: int, workplace: Workplace) -> LeftOut:
    """Deal images of all classes but one at random, the same number to every client."""
    images = workplace.load(study.dataset)
    if study.left_out >= len(images.class_names):
        raise ValueError(
            f"left_out must be below the {len(images.class_names)} classes, got {study.left_out}."
        )
    generator = np.random.default_rng([seed, 3])
    known = generator.permutation(np.flatnonzero(images.labels != study.left_out))
    # a study that is scaled down is so in all of its trainings
    clients = min(study.scatter_clients, study.clients or study.scatter_clients)
    wanted = clients * study.scatter_rows
    if len(known) < wanted:
        raise ValueError(
            f"For {counted(clients, 'client')} with {counted(study.scatter_rows, 'image')} each {wanted:,} "
            f"images are needed, but there are {len(known):,}; use fewer clients or rows."
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
        with_study_features(study, made.dataset, workplace),
        images.images[strange[: len(made.dataset.test)]],
        new_labels,
    )
