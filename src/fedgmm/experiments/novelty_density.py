"""Which density: what the Gaussians see of an image, how many there are, and their ridge.

It is chosen without novel images: each known class in turn is left out of a density, which must then tell
its validation rows from the others'.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.embeddings import Encoder, FeatureMap, encode_splits, federated_pca
from fedgmm.data.representations import layout_of, represented
from fedgmm.experiments.image_study import check_rows
from fedgmm.experiments.image_trials import Bind
from fedgmm.experiments.novel_images import IntArray
from fedgmm.experiments.novelty_study import NoveltyStudy, deal_images, study_encoder
from fedgmm.experiments.trial_files import on_file, recorded
from fedgmm.experiments.workplace import Workplace
from fedgmm.model.novelty import novelty_metrics

DENSITY = "density"
"""Under this name the choice is on file."""

_DENSITY_ROUNDS = 30
_DENSITY_ROWS = 20_000  # training rows that densities are compared on


def choose_density(
    trials: Path, study: NoveltyStudy, workplace: Workplace, bind: Bind = lambda *_: None
) -> NoveltyStudy:
    """The study with the density that knows best when a known class is missing, on the first seed.

    First the representation and the number of features are chosen, then the number of Gaussians and
    the ridge. Every choice leaves a file. Test rows are encoded, since the cache keeps a client's rows
    together, and not looked at; nor are novel images.

    Args:
        trials: the folder of the study's trials.
        study: its settings.
        workplace: where data are found and kept, and who is told.
        bind: called with the seed and the clients, before anything is encoded or written.
    """
    settled = density_on_file(trials, study)
    if settled is not None:
        return settled

    @once
    def prepared() -> tuple[FederatedDataset, dict[str, Tensor], Encoder]:
        dataset = deal_images(study, study.seeds[0], workplace)
        base = study_encoder(study, workplace.data_dir)
        bind(study.seeds[0], dataset)
        return dataset, encode_splits(dataset, base, workplace.cache, workplace.tell_encoded), base

    def judged(sized: NoveltyStudy) -> dict[str, Any]:
        return {**sized.density, "auroc": missing_class_auroc(sized, *prepared())}

    def run() -> dict[str, Any]:
        best: NoveltyStudy = study
        tried: list[dict[str, Any]] = []
        for stage in study.density_choices:
            if len(stage) == 1:
                best = replace(best, **stage[0])
                continue
            scores = []
            for choice in stage:
                told = ", ".join(f"{key} {value}" for key, value in choice.items())
                workplace.notify(f"density: {told}")
                sized = replace(best, **choice)
                name = "-".join([DENSITY, *map(str, sized.density.values()), str(study.seeds[0])])
                tried.append(recorded(trials, name, partial(judged, sized), "auroc"))
                scores.append(tried[-1]["auroc"])
            best = replace(best, **stage[int(np.argmax(scores))])
        return {"best": best.density, "tried": tried}

    return replace(study, **recorded(trials, DENSITY, run, "best")["best"])


def density_on_file(trials: Path, study: NoveltyStudy) -> NoveltyStudy | None:
    """The study with the only density there is, or with the one that was chosen before, if one was."""
    if not study.density_is_chosen:
        seen, sizes = study.density_choices
        return replace(study, **seen[0], **sizes[0])
    record = on_file(trials, DENSITY, "best")
    return None if record is None else replace(study, **record["best"])


def missing_class_auroc(
    study: NoveltyStudy,
    dataset: FederatedDataset,
    codes: dict[str, Tensor],
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
    rows = represented(codes["train"][::step], study.representation, layout_of(base))
    held = represented(codes["validation"], study.representation, layout_of(base))
    labels, owners = dataset.train.labels.numpy()[::step], dataset.train.codes.numpy()[::step]
    held_labels = dataset.validation.labels.numpy()
    found = []
    for label in _classes_to_miss(labels, held_labels):
        there = labels != label
        check_rows(int(there.sum()), study.features)
        pca = federated_pca([rows[torch.from_numpy(there)]], study.features)
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
            seen = features.project(rows[torch.from_numpy(there)])
            mixture.fit(seen.cpu().numpy(), clients=owners[there])
        scores = mixture.score_samples(features.project(held).cpu().numpy())
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
