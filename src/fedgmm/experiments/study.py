"""The engine of all studies on images: tune and train every method with every seed, then tabulate.

A study consists of settings (:class:`ImageStudy` or a subclass), a function that prepares the clients of a
seed, and a function that trains and tests one trial. :func:`run_study` runs the trials that are missing in
the study's folder, so an interrupted study resumes where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch

from fedgmm.data.dataset import FederatedDataset, LabelledRows
from fedgmm.data.embeddings import EncodedFederation, Features, Progress, encode_federation
from fedgmm.data.encoders import encoder
from fedgmm.data.images.federated import FederatedImages, federated_images
from fedgmm.data.images.files import ImageData, load_images
from fedgmm.experiments.settings import ImageStudy, StudyT
from fedgmm.experiments.tables import write_results
from fedgmm.experiments.trials import (
    Federation,
    Record,
    StudyFolderError,
    Trial,
    TrialFolder,
    tuned_options,
)
from fedgmm.experiments.tuning import choose_options, chosen_before
from fedgmm.methods.base import TITLES
from fedgmm.model.model import FederatedModel
from fedgmm.nets.devices import environment, resolve_device
from fedgmm.runs.comparison import Notify
from fedgmm.training.in_process import check_training
from fedgmm.wording import counted

FederationT = TypeVar("FederationT", bound=Federation)
Lock = Callable[[int, FederatedDataset], None]
"""Locks the folder of a study; called with a seed and its clients when the data are ready."""


@dataclass(frozen=True)
class StudyContext:
    """The places and callbacks that a study uses; they do not influence its results."""

    # the data folder; ``None`` means the folder named by ``FEDGMM_DATA``
    data_dir: Path | None = None
    cache: Path | None = None  # folder for encoded images; ``None`` keeps none
    notify: Notify = lambda _: None  # called with a line before each step
    # called with each data set after it is loaded and before it is used
    on_images: Callable[[ImageData], None] = lambda _: None

    def load(self, name: str) -> ImageData:
        """Load a data set from the data folder."""
        images = load_images(name, self.data_dir)  # type: ignore[arg-type]
        self.on_images(images)
        return images

    @property
    def report_encoded(self) -> Progress | None:
        """A callback that reports encoded images client by client.

        ``None`` without a cache, because then all images are encoded in one call, which is faster.
        """
        if self.cache is None:
            return None
        return lambda done, total: self.notify(f"{done:,} of {total:,} images are encoded")


# ---------------------------------------------------------------------- the clients of a seed


def prepare_federation(
    study: ImageStudy, seed: int, context: StudyContext
) -> EncodedFederation | FederatedImages:
    """Return the clients of a seed, with features if a method has Gaussians that use them."""
    federation = deal_images(study, seed, context, shift=study.shift)
    check_trainable(study, seed, federation.dataset)
    if "fedgmm" not in study.methods:
        return federation
    return encode(study, federation.dataset, context)


def deal_images(
    study: ImageStudy, seed: int, context: StudyContext, *, shift: bool
) -> FederatedImages:
    """Distribute the images over the clients; ``shift`` transforms and relabels half of them."""
    federation = federated_images(
        context.load(study.dataset),
        clients=study.clients,
        shift=shift,
        fraction=study.fraction,
        seed=seed,
    )
    context.notify(federation.description.splitlines()[0])
    return federation


def encode(
    study: ImageStudy, dataset: FederatedDataset, context: StudyContext
) -> EncodedFederation:
    """Add the features that the study's Gaussians see to a data set of images."""
    check_rows(len(dataset.train), study.features)
    dtype = study.encoder_dtype
    if dtype == "auto":
        dtype = "float32" if resolve_device(study.device).type == "cpu" else "bfloat16"
    return encode_federation(
        dataset,
        encoder(
            study.encoder,
            context.data_dir,
            size=study.image_size,
            device=study.device,
            dtype=dtype,
        ),
        components=study.features,
        scale=True,
        cache=context.cache,
        progress=context.report_encoded,
    )


def check_trainable(study: ImageStudy, seed: int, dataset: FederatedDataset) -> None:
    """Raise ``ValueError`` before hours of encoding if a method cannot be trained and tested."""
    for method in study.methods:
        check_training(dataset, study.options(method, seed))
    for split in ("validation", "test"):
        if not len(dataset.split(split)):
            raise ValueError(
                f"The clients are too small: none has a {split} row. Use fewer clients or a larger "
                "fraction of the images (--clients and --fraction on the command line)."
            )


def check_rows(rows: int, features: int) -> None:
    """Raise ``ValueError`` if there are fewer training images than principal components.

    PCA's own error asks for fewer components, for which the command line has no option.
    """
    if rows < features:
        raise ValueError(
            f"{counted(features, 'principal component')} cannot be computed from "
            f"{counted(rows, 'training image')}; use more images: a larger fraction or, for FEMNIST, "
            "more clients (--fraction and --clients on the command line)."
        )


# ---------------------------------------------------------------------- results


@dataclass(frozen=True)
class Results(Generic[StudyT]):
    """Results of the methods whose trials are all in the folder, also if another program ran them."""

    folder: Path  # folder of the tables and figures
    trials: TrialFolder
    study: StudyT  # the settings, with these methods in their usual order
    details: list[Record]  # results of all trials, seed by seed

    @classmethod
    def complete(
        cls,
        folder: Path,
        trials: TrialFolder,
        study: StudyT,
        needed: Mapping[str, Sequence[str]] | None = None,
    ) -> Self:
        """Find every complete method; ``needed`` names further results that a method must have."""
        found = {}
        for method in TITLES:
            names = (needed or {}).get(method, ())
            records = _records_by_seed(trials, study, method)
            if records is not None and all(trials.read(name) is not None for name in names):
                found[method] = records
        details = [one for seed in study.seeds for own in found.values() for one in own[seed]]
        return cls(folder, trials, replace(study, methods=tuple(found)), details)

    def of(self, method: str) -> list[Record]:
        """Return the results of one method, in the order of the seeds."""
        return [one for one in self.details if one["method"] == method]

    def values(self, method: str, name: str) -> list[Any]:
        """Return a field of the results of one method, in the order of the seeds."""
        return [one[name] for one in self.of(method)]

    def accuracies(self) -> dict[str, list[float]]:
        """Return the test accuracy of each method by seed, mean over clients in the last round."""
        return {method: self.values(method, "mean_accuracy") for method in self.study.methods}

    @property
    def picture(self) -> Path:
        """The path of the figure."""
        return self.folder / f"{self.trials.path.name}.png"

    def divergence(self) -> str:
        """Return a sentence that names the trials that diverged, empty if none did."""
        lost = [
            f"{TITLES[one['method']]} (seed {one['seed']})"
            for one in self.details
            if one["stopped"]
        ]
        return f" Diverged, last good round reported: {', '.join(lost)}." if lost else ""

    def write(self, found: Record, markdown: str) -> Record:
        """Write the fields ``found`` and ``details`` as JSON, and the table as Markdown; return the fields.

        Both files also describe the clients.
        """
        clients = self.trials.clients(self.study)
        if clients:
            seed, text = next(iter(clients.items()))
            markdown += f"\nClients of {seed}, with the labels used in training: {text}.\n"
        found = {**found, "details": self.details}
        record = {"study": asdict(self.study), "clients": clients, **found}
        write_results(self.folder, self.trials.path.name, record, markdown)
        return found


def _records_by_seed(
    folder: TrialFolder, study: StudyT, method: str
) -> dict[int, list[Record]] | None:
    """Return a method's results by seed; ``None`` if one is missing or used other options."""
    chosen = chosen_before(folder, study, method)
    if chosen is None:
        return None
    records: dict[int, list[Record]] = {seed: [] for seed in study.seeds}
    for seed, (name, *_) in product(study.seeds, study.variants(method)):
        record = folder.read(f"{name}-{seed}")
        if record is None or tuned_options(record, *chosen) != chosen:
            return None
        records[seed].append(record)
    return records


def training_facts(model: FederatedModel) -> Record:
    """Return the fields of a trial's result that describe the training run."""
    return {
        "rounds": len(model.history),
        "stopped": model.stopped,
        "seconds": model.history[-1]["seconds"] if model.history else 0.0,
        "environment": environment(),
        "curve": [entry.get("validation_accuracy") for entry in model.history],
        "likelihood": [entry["log_likelihood"] for entry in model.history],
    }


def describe_options(record: Record) -> str:
    """Describe the tuned options of a trial for a table, learning rate first."""
    others = {"server_momentum": "server momentum", "independence": "independence"}
    parts = [f"{title} {record[name]:g}" for name, title in others.items() if name in record]
    if record.get("personal_labels"):
        parts.append("own label frequencies")
    return ", ".join([f"{record['lr']:.3g}", *parts])


# ---------------------------------------------------------------------- running the trials


def run_study(
    folder: Path,
    experiment: str,
    study: StudyT,
    context: StudyContext,
    prepare: Callable[[StudyT, int, StudyContext], FederationT],
    run: Callable[[Trial[StudyT], FederationT], Record],
    complete: Callable[[TrialFolder, StudyT, StudyContext, Lock], StudyT] | None = None,
) -> Results[StudyT]:
    """Run every trial of a study that is not yet in its folder, and return all complete methods.

    Args:
        folder: folder of the results; the trials have a folder of their own in it.
        experiment: first word of the names of the results and of the trials' folder.
        study: the settings.
        context: data folder, cache and progress.
        prepare: prepares the clients of a seed.
        run: trains and tests a trial and returns its result.
        complete: chooses settings that the study leaves open; must call its last argument with a seed
            and the clients before it writes a file.
    """
    trials = TrialFolder.open(folder / f"{experiment}-{study.label}", study)
    fingerprint: str | None = None

    def check_images(images: ImageData) -> None:
        nonlocal fingerprint
        fingerprint = images.fingerprint
        trials.check_data(fingerprint)

    def lock(seed: int, dataset: FederatedDataset) -> None:
        trials.lock(study, fingerprint)
        trials.describe_clients(seed, dataset)

    checked = replace(context, on_images=check_images)
    completed = study if complete is None else complete(trials, study, checked, lock)

    def prepare_seed(seed: int) -> FederationT:
        federation = prepare(completed, seed, checked)
        lock(seed, federation.dataset)
        return federation

    run_trials(trials, completed, prepare_seed, run, context.notify)
    return Results.complete(folder, trials, completed)


def run_trials(
    folder: TrialFolder,
    study: StudyT,
    prepare: Callable[[int], FederationT],
    run: Callable[[Trial[StudyT], FederationT], Record],
    notify: Notify,
) -> list[Record]:
    """Run every variant of every method with every seed, except trials that are in the folder.

    ``prepare`` is called at most once per seed, and only if a trial has to be run.

    Returns:
        The results, seed by seed.

    Raises:
        StudyFolderError: a result was trained with other options than those that were chosen.
    """
    records = []
    for seed in study.seeds:
        # one federation at a time, because two may not fit into memory
        federation = cache(partial(prepare, seed))
        for method in study.methods:
            chosen = choose_options(folder, study, method, federation, notify)
            for prefix, title, settings in study.variants(method):
                notify(f"{title}, seed {seed}")
                name = f"{prefix}-{seed}"
                trial = Trial(folder, name, settings, method, seed, chosen)
                record = folder.run_once(
                    name,
                    lambda trial=trial, clients=federation: run(trial, clients()),  # type: ignore[misc]
                )
                if (used := tuned_options(record, *chosen)) != chosen:
                    raise StudyFolderError(
                        f"{folder.record_file(name)} was trained with {used}, but tuning chose {chosen}; "
                        "delete the file to train it again."
                    )
                records.append(record)
    return records


def features_of(rows: LabelledRows) -> Features:
    """Return the features that the Gaussians see, ``(n, k)``."""
    features: Features = torch.cat(rows.features.chunks).numpy()
    return features
