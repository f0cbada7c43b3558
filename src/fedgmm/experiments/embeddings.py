"""Frozen encoders: all methods on vectors of images and of texts, tuned alike.

Every image is encoded twice, as it is and after the paper's transform, so that all seeds share one cache.
A seed draws the clients and the half of the images that is transformed and relabelled. Texts keep their
sites. Learners see the whole vector, Gaussians its principal components.

All clients and classes give the accuracy of a method. The methods of the paper's Table 4 have a second
training run, without a fifth of the clients and without one class, which are used to test adaptation and
novelty.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.data.dataset import SPLITS, FederatedDataset
from fedgmm.data.embeddings import FeatureMap, encode_images, federated_pca, with_features
from fedgmm.data.encoders import encoded, encoder
from fedgmm.data.images.federated import federated_images
from fedgmm.data.images.files import WHITE, ImageData, load_images
from fedgmm.data.partition import transform_images
from fedgmm.experiments.paper.unseen import (
    METHODS,
    HeldOut,
    accuracy_of,
    adapted_accuracy,
    divide_clients,
    halves,
    tuned_model,
)
from fedgmm.experiments.settings import DATA_SETS, Choice, ImageStudy
from fedgmm.experiments.study import (
    Results,
    StudyContext,
    check_rows,
    check_trainable,
    run_study,
    training_facts,
)
from fedgmm.experiments.tables import markdown_table
from fedgmm.experiments.trials import Record, Trial
from fedgmm.methods.base import SHARED_LEARNERS, TITLES
from fedgmm.model.model import FederatedModel
from fedgmm.nets.networks import network
from fedgmm.support.paired import over_splits
from fedgmm.training.build import build
from fedgmm.training.in_process import train
from fedgmm.training.options import TrainingOptions

REVIEWS = "reviews"
_PIXELS = {"cifar100": 128, "femnist": 112, "mnist": 64}  # for the encoder; others have 224
_OTHER = {"cifar10": "cifar100", "cifar100": "cifar10", "femnist": "mnist", "mnist": "femnist"}
_BLOCK_ROWS = 2000  # images in a file of the cache, and of another data set

_RATES = tuple(10.0**exponent for exponent in (0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -2.5))
_LEARNERS = (3, 2, 6, 10, 20, 40)
_SIZES: dict[str, list[Choice]] = {
    "fedgmm": [
        {"components": m1, "learners": m2}
        for m1, m2 in (
            *((3, m2) for m2 in _LEARNERS if m2 > 2),
            *((2, 2), (6, 3), (6, 6), (10, 10)),
            *((1, m2) for m2 in _LEARNERS),
        )
    ],
    "fedem": [{"learners": m2} for m2 in _LEARNERS],
}
_OWN_OPTIONS: dict[str, list[Choice]] = {
    "fedprox": [{"proximal": strength} for strength in (0.1, 0.01)],
    "fedavg+": [{"finetune_epochs": epochs} for epochs in (1, 5, 20)],
    "pfedme": [{"penalty": strength} for strength in (15.0, 1.0)],
}
"""Choices that only one method has, after its learner, its rate and label frequencies."""

WAYS = {
    "as it is": "nothing",
    "tuned": "the learner, from labelled rows",
    "labels": "its weights and label frequencies, from labelled rows",
    "no labels": "the same, from rows without labels",
}
"""What a new client learns: name in the files, text in the table."""


@dataclass(frozen=True)
class EmbeddingStudy(ImageStudy):
    """Settings of the study; see :class:`ImageStudy` for the other attributes."""

    data_sets: ClassVar[tuple[str, ...]] = (*DATA_SETS, REVIEWS)

    dataset: str = "cifar10"
    track: Any = "tuned"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    rounds: int = 60
    tuning_rounds: int = 8
    encoder_dtype: str = "bfloat16"
    learner: str = "auto"  # ``"auto"`` tries linear learners and MLPs; a kind tries that kind only
    held_out: float = 0.2  # share of the clients without whom the second training run is

    @property
    def label(self) -> str:
        """The data set, and the kind of learners if there is no choice."""
        return self.dataset if self.learner == "auto" else f"{self.dataset}-{self.learner}"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of learners that are tried."""
        return ("linear", "mlp") if self.learner == "auto" else (self.learner,)

    def choices(self, method: str) -> list[list[Choice]]:
        """Return the lists of options that are chosen one after the other.

        First learner, rate and, for mixtures, start; then label frequencies; then the method's own
        options, for mixtures sizes with each start; and last the rate again, given all others.
        """
        rates: list[Choice] = [{"lr": rate} for rate in _RATES]
        starts: list[Choice] = [{}]
        own_options = _OWN_OPTIONS.get(method, [])
        if method in _SIZES:  # a mixture may start as one learner, which sees all rows
            starts = [
                {"start": "auto", "warmup": 0},
                {"start": "split", "warmup": self.rounds // 2},
            ]
            own_options = [{**start, **sizes} for start in starts for sizes in _SIZES[method]]
        found: list[list[Choice]] = [
            [
                {"learner": kind, **rate, **start}
                for start in starts
                for kind in self.kinds
                for rate in rates
            ]
        ]
        if method in SHARED_LEARNERS:
            found.append([{"personal_labels": own} for own in (False, True)])
        if own_options:
            found.append(own_options)
        return [*found, rates]

    def options(self, method: str, seed: int) -> TrainingOptions:
        """Return the training options of a method, without those that are tuned."""
        return TrainingOptions(
            algorithm=method,
            rounds=self.rounds,
            components=self.components,
            learners=self.learners,
            covariance_type=self.covariance_type,
            reg_covar=self.reg_covar,
            schedule="constant" if method == "pfedme" else "cooldown",
            seed=seed,
            device=self.device,
            tol=None,
            personal_labels=False,
        )


# ---------------------------------------------------------------------- vectors and clients


@dataclass(frozen=True, eq=False)
class EmbeddedClients:
    """The clients of a seed, with features for the Gaussians."""

    dataset: FederatedDataset  # all clients and classes
    held_out: HeldOut  # the clients of the second training run, and those held out of it
    # vectors of images unlike those of the second run, ``(n, d)``, by their kind
    novel: dict[str, Tensor]
    feature_map: FeatureMap  # gives the features of vectors in the second run


Encoded = tuple[ImageData, Tensor, Tensor, Tensor]
"""Images, their vectors, those of the changed images, and some of another data set."""


def embedded_clients(
    encode: Callable[[EmbeddingStudy, StudyContext], Encoded],
    study: EmbeddingStudy,
    seed: int,
    context: StudyContext,
) -> EmbeddedClients:
    """Return the clients of a seed; ``encode`` is :func:`encode_data_set`, or a cache of it."""
    if study.dataset == REVIEWS:
        x, labels, sites = encode_reviews(context.data_dir)
        everyone = fewer = FederatedDataset.from_arrays(x.numpy(), labels, sites, seed=seed)
        novel: dict[str, Tensor] = {}
    else:
        images, plain, changed, other = encode(study, context)
        everyone, fewer, left_out = deal_vectors(study, seed, images, plain, changed)
        novel = {"a class left out": left_out, _OTHER[study.dataset]: other}
    check_trainable(study, seed, everyone)
    dataset, _ = _with_components(study, everyone)
    away = max(1, round(study.held_out * len(fewer.names)))
    training, unseen = divide_clients(fewer, away, seed)
    known, feature_map = _with_components(study, training)
    adaptation, test = halves(_attach(feature_map, unseen), seed)
    return EmbeddedClients(dataset, HeldOut(known, adaptation, test), novel, feature_map)


def encode_data_set(study: EmbeddingStudy, context: StudyContext) -> Encoded:
    """Return the images, their vectors, those of the changed images, and some of another data set."""
    images = context.load(study.dataset)
    others = load_images(_OTHER[study.dataset], context.data_dir)  # type: ignore[arg-type]
    frozen = encoder(
        study.encoder,
        context.data_dir,
        size=_PIXELS.get(study.dataset, study.image_size),
        device=study.device,
        dtype=study.encoder_dtype,
    )

    def rows_of(some: NDArray[np.uint8]) -> Tensor:
        return encode_images(
            torch.from_numpy(np.ascontiguousarray(some)), frozen, context.cache
        ).cpu()

    plain, changed = [], []
    for first in range(0, len(images), _BLOCK_ROWS):
        block = images.images[first : first + _BLOCK_ROWS]
        plain.append(rows_of(block))
        changed.append(rows_of(transform_images(block, WHITE)))
        done = min(first + _BLOCK_ROWS, len(images))
        context.notify(f"{done:,} of {len(images):,} images are encoded")
    other = rows_of(others.images[:_BLOCK_ROWS])
    return images, torch.cat(plain), torch.cat(changed), other


def encode_reviews(data_dir: Path | None) -> tuple[Tensor, NDArray[Any], NDArray[Any]]:
    """Return vectors ``(n, 256)``, labels and sites of the texts in ``reviews/*.parquet``."""
    import pyarrow.parquet as pq

    folder = Path(data_dir or os.environ.get("FEDGMM_DATA", "")) / REVIEWS
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise ValueError(
            f"There are no reviews in {folder}; put a Parquet file for each site there, with the "
            "columns text and sentiment."
        )
    tables = [pq.read_table(file, columns=["text", "sentiment"]) for file in files]
    words = encoder("wordllama")
    x = torch.cat([encoded(table["text"].to_pylist(), words) for table in tables])
    labels = np.concatenate([table["sentiment"].to_numpy() for table in tables])
    return x, labels, np.repeat([file.stem for file in files], [len(table) for table in tables])


def deal_vectors(
    study: EmbeddingStudy, seed: int, images: ImageData, plain: Tensor, changed: Tensor
) -> tuple[FederatedDataset, FederatedDataset, Tensor]:
    """Deal vectors to clients as the paper deals images; half of the rows are changed and relabelled.

    Args:
        study: the settings.
        seed: of all draws; it also names the class that is left out.
        images: the data set.
        plain: vectors of the images, ``(n, d)``.
        changed: vectors of the changed images, ``(n, d)``.

    Returns:
        All clients; the same clients without one class; and that class's vectors, of the test rows.
    """
    dealt = federated_images(images, clients=study.clients, fraction=study.fraction, seed=seed)
    everyone = fewer = dealt.dataset
    left_out = seed % len(dealt.class_names)
    for name in SPLITS:
        rows = torch.from_numpy(dealt.rows[name])
        moved = torch.from_numpy(dealt.changed[name])[:, None]
        own = everyone.split(name).with_inputs(torch.where(moved, changed[rows], plain[rows]))
        known = torch.from_numpy(images.labels[dealt.rows[name]] != left_out)
        everyone = replace(everyone, **{name: own})  # type: ignore[arg-type]
        fewer = replace(fewer, **{name: own.keep(known)})  # type: ignore[arg-type]
        novel = own.inputs[~known]
    return everyone, fewer, novel


def _with_components(
    study: EmbeddingStudy, dataset: FederatedDataset
) -> tuple[FederatedDataset, FeatureMap]:
    """Add the principal components of the training rows as features."""
    rows = dataset.train
    check_rows(len(rows), study.features)
    sizes: list[int] = rows.features.rows_per_client.tolist()
    pca = federated_pca(torch.split(rows.inputs, sizes), study.features)
    feature_map = FeatureMap(encoder("pixels"), pca, scale=True)
    return _attach(feature_map, dataset), feature_map


def _attach(feature_map: FeatureMap, dataset: FederatedDataset) -> FederatedDataset:
    project = feature_map.project
    return with_features(dataset, *(project(dataset.split(name).inputs) for name in SPLITS))


# ---------------------------------------------------------------------- the study


def reproduce_embeddings(folder: Path, study: EmbeddingStudy, context: StudyContext) -> Record:
    """Run the study and write its table into ``folder``; return the results of all trials by method."""
    encode_once = cache(
        lambda: encode_data_set(study, context)
    )  # seeds share the vectors of all images
    prepare = partial(embedded_clients, lambda *_: encode_once())
    results = run_study(folder, "embeddings", study, context, prepare, _run_trial)
    found = {method: results.of(method) for method in results.study.methods}
    results.write({}, _markdown(results, found))
    return found


def _run_trial(trial: Trial[EmbeddingStudy], clients: EmbeddedClients) -> Record:
    model = trial.train(clients.dataset)
    record = {
        **trial.facts,
        **model.evaluate("test").summary(),
        **training_facts(model),
        "bytes_per_round": _bytes_per_round(trial.options, clients.dataset),
    }
    if trial.method not in METHODS:
        return record
    again = train(clients.held_out.dataset, options=trial.options)
    return {
        **record,
        "unseen": _unseen_accuracies(again, clients.held_out, trial),
        "auroc": _novelty(again, clients),
    }


def _bytes_per_round(options: TrainingOptions, dataset: FederatedDataset) -> int:
    """Return the size of what a client sends in a round, four bytes per number."""
    net = network(options.learner, dataset.input_shape, len(dataset.classes))
    declared = build(options, net).declare_sums(dataset.train.features.chunks[0].shape[1])
    return 4 * sum(int(np.prod(one.shape)) for one in declared.values())


def _unseen_accuracies(
    model: FederatedModel, held_out: HeldOut, trial: Trial[EmbeddingStudy]
) -> dict[str, float]:
    """Return the mean test accuracy of the held-out clients, for each way to adapt."""
    newcomers = held_out.newcomers

    def mean(accuracy: Callable[[Any], float]) -> float:
        return float(np.mean([accuracy(one) for one in newcomers]))

    found = {"as it is": mean(lambda one: accuracy_of(model, one.test, None))}
    if trial.method == "fedavg+":
        tuned = tuned_model(model, held_out.adaptation, trial.options)
        return {**found, "tuned": mean(lambda one: accuracy_of(tuned, one.test, one.name))}
    frequencies = model.prediction.labels
    if trial.method != "fedavg" or frequencies is not None:
        found["labels"] = mean(lambda one: adapted_accuracy(model, one, True))
    if trial.method == "fedgmm" or (frequencies is not None and frequencies.guess_rows):
        found["no labels"] = mean(lambda one: adapted_accuracy(model, one, False))
    return found


def _novelty(model: FederatedModel, clients: EmbeddedClients) -> dict[str, float]:
    """Return how well novel images are found among the test rows: by density, or by confidence."""
    from sklearn.metrics import roc_auc_score

    score = "x" if model.prediction.gaussians is not None else "confidence"

    def scores(rows: Tensor) -> NDArray[np.float64]:
        features = clients.feature_map.project(rows).numpy()
        return model.novelty_scores(rows.numpy(), score=score, features=features)  # type: ignore[arg-type]

    known = scores(clients.held_out.dataset.test.inputs)
    found = {}
    for kind, rows in clients.novel.items():
        novel = scores(rows)
        truth = np.repeat([0, 1], [len(known), len(novel)])
        found[kind] = float(roc_auc_score(truth, -np.concatenate([known, novel])))
    return found


# ---------------------------------------------------------------------- the table


def _values(trials: Sequence[Record], *path: str) -> NDArray[np.float64] | None:
    """Return a number of every trial, in percent; ``None`` if a trial lacks it."""
    found = []
    for one in trials:
        value: Any = one
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if value is None:
            return None
        found.append(100.0 * value)
    return np.array(found)


def with_interval(values: NDArray[np.float64] | None) -> str:
    """Format a mean with half of its 95 % interval over seeds; empty without values."""
    if values is None:
        return ""
    estimate = over_splits(values)
    reach = "" if len(values) < 2 else f" ± {(estimate.high - estimate.low) / 2:.1f}"
    return f"{estimate.mean:.1f}{reach}"


def leaders(found: dict[str, list[Record]]) -> list[str]:
    """Return the best method, and all whose difference from it over the seeds is within noise."""
    values = {method: _values(own, "mean_accuracy") for method, own in found.items()}
    known = {method: own for method, own in values.items() if own is not None}
    best = max(known, key=lambda method: float(known[method].mean()))
    return [
        method
        for method, own in known.items()
        if method == best or over_splits(known[best] - own).within_noise
    ]


def _chosen(record: Record) -> str:
    """Describe the options that were chosen."""
    names = {"proximal": "penalty", "penalty": "penalty", "finetune_epochs": "epochs of tuning"}
    parts = [f"{record['learner']}, rate {record['lr']:.2g}"]
    if "components" in record:
        parts.append(f"{record['components']} × {record['learners']}")
    elif "learners" in record:
        parts.append(f"{record['learners']} learners")
    parts += [f"{text} {record[name]:g}" for name, text in names.items() if name in record]
    if record.get("warmup"):
        parts.append("one shared learner first")
    if record.get("personal_labels"):
        parts.append("label frequencies")
    return ", ".join(parts)


def _markdown(results: Results[EmbeddingStudy], found: dict[str, list[Record]]) -> str:
    study, first = results.study, leaders(found)
    rows = []
    for method, own in found.items():
        mark = "**" if method in first else ""
        rows.append(
            [
                TITLES[method],
                f"{mark}{with_interval(_values(own, 'mean_accuracy'))}{mark}",
                _chosen(own[0]),
                f"{np.mean([one['seconds'] for one in own]):.0f}",
                f"{own[0]['bytes_per_round'] / 1e3:,.0f}",
            ]
        )
    edges = {max(_RATES), min(_RATES)}
    at_edge = [TITLES[method] for method, own in found.items() if own[0]["lr"] in edges]
    early, middle = study.tuning_stages
    sentences = [
        f"Test accuracy, mean over clients, after {study.rounds} rounds, ± half of the 95 % interval over",
        f"seeds {', '.join(map(str, study.seeds))}. Bold: the best method, and those within noise of it,",
        "paired over seeds. Every method is tuned alike on validation rows of the first seed: learners",
        f"({', '.join(study.kinds)}) with rates from {max(_RATES):.2g} to {min(_RATES):.2g} (all for",
        f"{early} rounds, the better half for {middle}, two in full; a mixture's for each of two starts),",
        "then label frequencies, then options of its own (a mixture's sizes with both starts), then the",
        "rate again.",
        f"At the edge of the grid: {', '.join(at_edge)}." if at_edge else "",
        "Seconds of a training run, and what a client sends in a round.",
        ""
        if study.dataset == REVIEWS
        else "Half of the images are rotated by 90 degrees, flipped and inverted, with permuted labels.",
        results.divergence(),
    ]
    header = ["method", "accuracy (%)", "chosen on validation rows", "seconds", "kB per round"]
    text = f"# {study.dataset}: vectors of a frozen encoder\n\n{markdown_table(header, rows)}\n"
    text += " ".join(sentence for sentence in sentences if sentence) + "\n"
    twice = {method: own for method, own in found.items() if method in METHODS}
    return text + (_second_table(study, twice) if twice else "")


def _second_table(study: EmbeddingStudy, found: dict[str, list[Record]]) -> str:
    """Return the table of new clients and novel images."""
    novel = list(next(iter(found.values()))[0]["auroc"])
    rows = [
        [
            TITLES[method],
            *(with_interval(_values(own, "unseen", way)) for way in WAYS),
            *(with_interval(_values(own, "auroc", kind)) for kind in novel),
        ]
        for method, own in found.items()
    ]
    learned = [f"new client learns {way}" for way in WAYS.values()]
    header = ["method", *learned, *(f"AUROC, novel: {kind}" for kind in novel)]
    sentences = [
        f"Another training run with the same options leaves {100 * study.held_out:g} % of the clients",
        "and one class out." if novel else "out.",
        "Each of these clients learns on half of its rows and is tested on the other half.",
        "FedGMM finds novel images by `log P(x)`, the others by their largest class probability."
        if novel
        else "",
    ]
    return f"\n{markdown_table(header, rows)}\n{' '.join(filter(None, sentences))}\n"
