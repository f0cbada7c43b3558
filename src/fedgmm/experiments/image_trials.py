"""The trials of a study on images: every method tuned, and trained with every seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache as once
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch

from fedgmm.data.dataset import FederatedDataset, LabelledRows
from fedgmm.data.embeddings import Features
from fedgmm.data.images.files import ImageData
from fedgmm.experiments.image_study import ImageStudy, StudyT
from fedgmm.experiments.image_tuning import Federation, chosen_options, options_on_file
from fedgmm.experiments.results import write_results
from fedgmm.experiments.trial_files import (
    Trial,
    bind_trials,
    check_data,
    chosen_of,
    clients_on_file,
    describe_clients,
    on_file,
    open_trials,
    recorded,
)
from fedgmm.experiments.workplace import Workplace
from fedgmm.methods.base import TITLES
from fedgmm.model.model import FederatedModel
from fedgmm.nets.devices import environment
from fedgmm.runs.comparison import Notify

FederationT = TypeVar("FederationT", bound=Federation)
Bind = Callable[[int, FederatedDataset], None]
"""From now on a folder is for one study: called with a seed and its clients."""


def run_study(
    folder: Path,
    experiment: str,
    study: StudyT,
    workplace: Workplace,
    prepare: Callable[[StudyT, int, Workplace], FederationT],
    run: Callable[[Trial[StudyT], FederationT], dict[str, Any]],
    settle: Callable[[Path, StudyT, Workplace, Bind], StudyT] | None = None,
) -> tuple[Path, list[dict[str, Any]]]:
    """How every reproduction on images begins: its folder is opened, and what is missing there is run.

    Args:
        folder: of the results; trials are in a folder of their own below it.
        experiment: the first word of its name, and of the names of the results.
        study: what is run.
        workplace: where data are found and kept, and who is told.
        prepare: makes the federation of a seed.
        run: trains and tests, see :func:`run_trials`.
        settle: chooses what a study leaves open before it is run; called with the folder of the trials,
            and calls back with the seed and the clients before its first file.

    Returns:
        The folder of the trials, which is called as the results are, and what is in their files.
    """
    trials = open_trials(folder / f"{experiment}-{study.label}", study)
    data: str | None = None

    def look(images: ImageData) -> None:
        nonlocal data
        data = images.fingerprint
        check_data(trials, data)

    def bind(seed: int, dataset: FederatedDataset) -> None:
        bind_trials(trials, study, data)
        describe_clients(trials, seed, dataset)

    watched = replace(workplace, on_images=look)
    settled = study if settle is None else settle(trials, study, watched, bind)

    def federation(seed: int) -> FederationT:
        found = prepare(settled, seed, watched)
        bind(seed, found.dataset)
        return found

    return trials, run_trials(trials, settled, federation, run, workplace.notify)


def run_trials(
    folder: Path,
    study: StudyT,
    prepare: Callable[[int], FederationT],
    run: Callable[[Trial[StudyT], FederationT], dict[str, Any]],
    notify: Notify,
) -> list[dict[str, Any]]:
    """Every variant of every method with every seed; what is in ``folder`` already is not run again.

    Args:
        folder: of the trials, from :func:`open_trials`.
        study: what is run.
        prepare: makes the federation of a seed; called once a seed at the most, where it is needed.
        run: trains and tests, and returns what is written to the trial's file.
        notify: called with a line before each step.

    Returns:
        What is in the files, seed by seed.
    """
    details = []
    for seed in study.seeds:
        federation = once(partial(prepare, seed))
        for method in study.methods:
            chosen = chosen_options(folder, study, method, federation, notify)
            for variant in study.variants(method):
                notify(f"{variant.title}, seed {seed}")
                name = f"{variant.name}-{seed}"
                trial = Trial(folder, name, variant.study, method, seed, chosen)
                record = recorded(folder, name, partial(_run, run, trial, federation))
                if chosen_of(record) != chosen:
                    raise ValueError(
                        f"{folder / name}.json was trained with {chosen_of(record)}, but {chosen} are "
                        "the options that were chosen; delete it to train it again."
                    )
                details.append(record)
    return details


def _run(
    run: Callable[[Trial[StudyT], FederationT], dict[str, Any]],
    trial: Trial[StudyT],
    federation: Callable[[], FederationT],
) -> dict[str, Any]:
    """The federation is prepared only now: a trial that is on file needs none."""
    return run(trial, federation())


# ---------------------------------------------------------------------- what is told of them


def write_study(
    folder: Path, trials: Path, study: ImageStudy, found: dict[str, Any], markdown: str
) -> None:
    """Write the results of a study, with what its clients had.

    Args:
        folder: of the results.
        trials: the folder of the trials; the results are called as it is.
        study: what was run.
        found: for the JSON file.
        markdown: the table.
    """
    clients = clients_on_file(trials, study)
    if clients:
        seed, text = next(iter(clients.items()))
        markdown += f"\nClients of {seed}, with the labels that they train with: {text}.\n"
    record = {"study": asdict(study), "clients": clients, **found}
    write_results(folder, trials.name, record, markdown)


def tabulated(
    folder: Path, study: StudyT, needed: Mapping[str, Sequence[str]] | None = None
) -> tuple[StudyT, list[dict[str, Any]]]:
    """A study with every method that is whole on file, in the usual order, and what is in the files.

    Programs that share a folder run different methods: whichever ends tells of all that is there.

    Args:
        folder: of the trials.
        study: what was run; its own trials are all on file.
        needed: further files without which a method is not whole.

    Returns:
        The study with these methods, and the trials, seed by seed.
    """
    further = needed or {}
    found = {
        method: trials
        for method in TITLES
        if (trials := _whole(folder, study, method)) is not None
        and all(on_file(folder, name) is not None for name in further.get(method, ()))
    }
    details = [one for seed in study.seeds for own in found.values() for one in own[seed]]
    return replace(study, methods=tuple(found)), details


def _whole(folder: Path, study: StudyT, method: str) -> dict[int, list[dict[str, Any]]] | None:
    """The trials of a method by their seeds; ``None`` if one is missing or has other options."""
    chosen = options_on_file(folder, study, method)
    if chosen is None:
        return None
    trials: dict[int, list[dict[str, Any]]] = {seed: [] for seed in study.seeds}
    for seed, variant in product(study.seeds, study.variants(method)):
        record = on_file(folder, f"{variant.name}-{seed}")
        if record is None or chosen_of(record) != chosen:
            return None
        trials[seed].append(record)
    return trials


def facts_of(model: FederatedModel) -> dict[str, Any]:
    """How a training went, for a trial's file."""
    return {
        "rounds": len(model.history),
        "stopped": model.stopped,
        "seconds": model.history[-1]["seconds"] if model.history else 0.0,
        "environment": environment(),
        "curve": [entry.get("validation_accuracy") for entry in model.history],
        "likelihood": [entry["log_likelihood"] for entry in model.history],
    }


def chosen(record: dict[str, Any]) -> str:
    """The learning rate of a trial, and what else was chosen."""
    others = {"server_momentum": "server momentum", "independence": "independence"}
    parts = [f"{title} {record[name]:g}" for name, title in others.items() if name in record]
    if record.get("personal_labels"):
        parts.append("own label frequencies")
    return ", ".join([f"{record['lr']:.3g}", *parts])


def stopped_early(details: Sequence[dict[str, Any]]) -> str:
    """A sentence on trainings that diverged, empty where there are none."""
    lost = [f"{TITLES[one['method']]} (seed {one['seed']})" for one in details if one["stopped"]]
    return f" Training diverged and kept its last good round: {', '.join(lost)}." if lost else ""


def of_method(details: Sequence[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    """The trials of a method, in the order of the seeds."""
    return [one for one in details if one["method"] == method]


def features_of(rows: LabelledRows) -> Features:
    """What the Gaussians see of rows, ``(n, k)``."""
    features: Features = torch.cat(rows.features.chunks).numpy()
    return features
