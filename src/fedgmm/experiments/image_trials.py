"""The trials of a study on images: tuned, trained, and each written to a file of its own.

Trainings write checkpoints too, so that a study goes on where an interruption ended it.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from fedgmm.data.dataset import FederatedDataset, LabelledRows
from fedgmm.data.encoder import Features
from fedgmm.experiments.comparison import Tell, pass_on_interrupt, tune, validation_score
from fedgmm.experiments.image_study import ImageStudy, StudyT
from fedgmm.experiments.results import TITLES
from fedgmm.federation.checkpoint import Checkpoint
from fedgmm.files import write_atomically
from fedgmm.inference.model import FederatedModel
from fedgmm.training import DivergenceWarning, TrainingOptions, train

_MAY_GROW = ("methods", "seeds", "device")
_ROUNDS_A_CHECKPOINT = 25
_WATCHED_ROUNDS = 5
_FINALISTS = 2


class Federation(Protocol):
    """Whatever a study prepares for a seed: it holds the clients that train."""

    @property
    def dataset(self) -> FederatedDataset:
        """The clients."""
        ...


FederationT = TypeVar("FederationT", bound=Federation)


@dataclass(frozen=True)
class Trial(Generic[StudyT]):
    """One training of a study.

    Attributes:
        folder: of all trials.
        name: of its files.
        study: its settings.
        method: what is trained.
        seed: of the federation and of the training.
        chosen: options that were tuned.
    """

    folder: Path
    name: str
    study: StudyT
    method: str
    seed: int
    chosen: dict[str, Any]

    @property
    def options(self) -> TrainingOptions:
        """How it is trained."""
        return replace(self.study.options(self.method, self.seed), **self.chosen)

    @property
    def facts(self) -> dict[str, Any]:
        """What its file begins with."""
        return {"method": self.method, "seed": self.seed, **self.chosen}


def run_trials(
    folder: Path,
    study: StudyT,
    prepare: Callable[[int], FederationT],
    run: Callable[[Trial[StudyT], FederationT], dict[str, Any]],
    tell: Tell,
) -> list[dict[str, Any]]:
    """Every variant of every method with every seed; what is in ``folder`` already is not run again.

    Args:
        folder: of the trials, from :func:`open_trials`.
        study: what is run.
        prepare: makes the federation of a seed; called once a seed at the most, where it is needed.
        run: trains and tests, and returns what is written to the trial's file.
        tell: called with a line before each step.

    Returns:
        What is in the files, seed by seed.
    """
    details = []
    for seed in study.seeds:
        federation = once(partial(prepare, seed))
        for method in study.methods:
            chosen = chosen_options(folder, study, method, federation, tell)
            for variant in study.variants(method):
                tell(f"{variant.title}, seed {seed}")
                name = f"{variant.name}-{seed}"
                trial = Trial(folder, name, variant.study, method, seed, chosen)
                details.append(recorded(folder, name, partial(_run, run, trial, federation)))
    return details


def _run(
    run: Callable[[Trial[StudyT], FederationT], dict[str, Any]],
    trial: Trial[StudyT],
    federation: Callable[[], FederationT],
) -> dict[str, Any]:
    """The federation is prepared only now: a trial that is on file needs none."""
    return run(trial, federation())


# ---------------------------------------------------------------------- files


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


# ---------------------------------------------------------------------- tuning and training


def chosen_options(
    trials: Path,
    study: ImageStudy,
    method: str,
    federation: Callable[[], Federation],
    tell: Tell,
) -> dict[str, Any]:
    """What trainings on the first seed choose, by the validation log-likelihood.

    The learning rate of every method; and of FedGMM, at that rate, how far learners are independent of
    Gaussians. Short runs rank a long grid; the best of it are trained in full, since what is fastest in
    the first rounds need not be best in the end. The training that wins is that of the first seed.
    """

    def run() -> dict[str, Any]:
        first = study.seeds[0]
        dataset = federation().dataset
        options = study.options(method, first)
        best = Trial(trials, "", study, method, first, {})
        best_score = -math.inf
        scores: dict[str, Any] = {}
        for option, grid in study.grids(method).items():
            tell(f"{TITLES[method]}: choosing {option}")
            ranked = _ranked(dataset, best, option, grid, study.tuning_rounds)
            known = {getattr(options, option): best} if best.chosen else {}
            finals = {}
            for value in list(ranked)[:_FINALISTS]:
                chosen = {**best.chosen, option: value}
                name = f"{method}-{option}-{value:.3g}"
                finals[value] = replace(known.get(value, replace(best, name=name)), chosen=chosen)
            outcome = {
                value: best_score if value in known else _final_score(trial, dataset)
                for value, trial in finals.items()
            }
            winner = max(outcome, key=lambda value: outcome[value])
            best, best_score = finals[winner], outcome[winner]
            _forget(trial for value, trial in finals.items() if value != winner)
            scores[option] = {"short": _printed(ranked), "whole": _printed(outcome)}
        if not math.isfinite(best_score):
            raise ValueError(f"{TITLES[method]} diverged with {best.chosen}; try smaller rates.")
        _hand_on(best)
        return {"chosen": best.chosen, "scores": scores}

    chosen: dict[str, Any] = recorded(trials, f"{method}-tuning", run)["chosen"]
    return chosen


def _ranked(
    dataset: FederatedDataset,
    trial: Trial[ImageStudy],
    option: str,
    grid: Sequence[float],
    rounds: int,
) -> dict[float, float]:
    """The values of an option with their scores in short runs, best first; a few need none."""
    if len(grid) <= _FINALISTS:
        return dict.fromkeys(grid, math.nan)
    found = tune(
        dataset, trial.method, option=option, grid=grid, rounds=rounds, options=trial.options
    )
    return dict(sorted(found.scores.items(), key=lambda item: -item[1]))


def _final_score(trial: Trial[ImageStudy], dataset: FederatedDataset) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)
        return validation_score(trained(trial, dataset))


def _forget(trials: Iterable[Trial[ImageStudy]]) -> None:
    """Remove the checkpoints of trainings that lost."""
    for trial in trials:
        _checkpoint(trial.folder, trial.name).unlink(missing_ok=True)


def _hand_on(trial: Trial[ImageStudy]) -> None:
    """Make the checkpoint of a training that won that of the study's own trial: it is the same."""
    for variant in trial.study.variants(trial.method):
        if variant.study == trial.study:
            own = _checkpoint(trial.folder, f"{variant.name}-{trial.seed}")
            _checkpoint(trial.folder, trial.name).replace(own)
            return
    _forget([trial])


def _printed(scores: Mapping[float, float]) -> dict[str, float | None]:
    """For JSON, which knows no infinity; what was not run is left out."""
    return {
        f"{value:.6g}": score if math.isfinite(score) else None
        for value, score in scores.items()
        if not math.isnan(score)
    }


def chosen_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The chosen options in a trial's file."""
    return {name: record[name] for name in ("lr", "independence") if name in record}


def trained(trial: Trial[StudyT], dataset: FederatedDataset) -> FederatedModel:
    """Train, or go on from the checkpoint of a trial that was interrupted."""
    checkpoint = Checkpoint(_checkpoint(trial.folder, trial.name), _ROUNDS_A_CHECKPOINT)
    model = train(
        dataset, options=trial.options, checkpoint=checkpoint, watch_accuracy=_WATCHED_ROUNDS
    )
    pass_on_interrupt(model)
    return model


# ---------------------------------------------------------------------- what is told of them


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


def of_method(details: Sequence[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    """The trials of a method, in the order of the seeds."""
    return [one for one in details if one["method"] == method]


def features_of(rows: LabelledRows) -> Features:
    """What the Gaussians see of rows, ``(n, k)``."""
    features: Features = torch.cat(rows.features.chunks).numpy()
    return features
