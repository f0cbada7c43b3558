"""Which options a method of a study on images is trained with, chosen on validation rows of the first seed.

Short runs rank a long grid, by log-likelihood, which tells more in the first rounds than accuracy does.
The best of it are trained in full, since what is fastest in the first rounds need not be best in the end;
so are the neighbours in the grid of whatever is best so far, until they are worse. Whole trainings are
compared by accuracy, which is what tables report: a learner that overfits, as one trained at home does, is
right more often than its likelihood suggests. The training that wins is that of the first seed. Every step
leaves a file: an interruption costs no more than the training that it hit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedgmm.data.dataset import FederatedDataset
from fedgmm.experiments.comparison import Tell, tune, validation_accuracy
from fedgmm.experiments.image_study import ImageStudy
from fedgmm.experiments.results import TITLES
from fedgmm.experiments.trial_files import Trial, checkpoint_of, recorded, trained
from fedgmm.training import DivergenceWarning

_SEARCH = "short runs, then the best two and neighbours of the best in full, by accuracy"
_FINALISTS = 2


class Federation(Protocol):
    """Whatever a study prepares for a seed: it holds the clients that train."""

    @property
    def dataset(self) -> FederatedDataset:
        """The clients."""
        ...


def chosen_options(
    trials: Path,
    study: ImageStudy,
    method: str,
    federation: Callable[[], Federation],
    tell: Tell,
) -> dict[str, Any]:
    """The learning rate of a method; and of FedGMM how far learners are independent of Gaussians.

    Args:
        trials: the folder of the study's trials.
        study: its settings.
        method: what is tuned.
        federation: the clients of the first seed, asked for only where something has to be run.
        tell: called with a line before each step.

    Raises:
        ValueError: everything diverged, or the folder holds choices of another search.
    """
    record = recorded(
        trials,
        f"{method}-tuning",
        lambda: _search(Trial(trials, "", study, method, study.seeds[0], {}), federation(), tell),
    )
    chosen: dict[str, Any] = record["chosen"]
    if record.get("search") != _SEARCH or chosen.keys() != study.grids(method).keys():
        raise _of_another_search(trials, method)
    _tidy(Trial(trials, record["winner"], study, method, record["seed"], chosen), record["finals"])
    return chosen


def _of_another_search(trials: Path, method: str) -> ValueError:
    return ValueError(
        f"{trials} holds options of {TITLES[method]} that were chosen in another way; choose "
        "another folder."
    )


class _Final(NamedTuple):
    """A whole training, and its accuracy on validation rows."""

    trial: Trial[ImageStudy]
    score: float


def _search(trial: Trial[ImageStudy], federation: Federation, tell: Tell) -> dict[str, Any]:
    """Choose one option after the other; returns what is written to the file."""
    best = _Final(trial, math.nan)
    scores: dict[str, Any] = {}
    names: list[str] = []
    for option, grid in trial.study.grids(trial.method).items():
        ranked = _ranked(best.trial, option, grid, federation.dataset, tell)
        finals = _finals(best, option, ranked, federation.dataset, tell)
        best = max(finals.values(), key=lambda final: final.score)
        if not math.isfinite(best.score):
            raise ValueError(
                f"{TITLES[trial.method]} diverged with every {option} of "
                f"{', '.join(f'{value:.3g}' for value in finals)}, the grid of the "
                f"{trial.study.track} track; leave it out of the methods."
            )
        scores[option] = {
            "short": _printed(ranked),
            "whole": _printed({value: final.score for value, final in finals.items()}),
        }
        names += [final.trial.name for final in finals.values()]
    return {
        "search": _SEARCH,
        "chosen": best.trial.chosen,
        "seed": trial.seed,
        "winner": best.trial.name,
        "finals": names,
        "scores": scores,
    }


def _finals(
    best: _Final, option: str, ranked: Iterable[float], dataset: FederatedDataset, tell: Tell
) -> dict[float, _Final]:
    """The first of the ranked values, trained in full, and then neighbours of the best of them.

    Values that diverge make room for the next. In the end the best has no neighbour in the grid that
    was not trained, but for those that diverged in their short runs.
    """
    start = best.trial
    default = getattr(start.study.options(start.method, start.seed), option)
    found: dict[float, _Final] = {}

    def run(value: float) -> None:
        trial = replace(start, chosen={**start.chosen, option: value})
        if start.chosen and value == default:  # the option before was trained with it
            found[value] = _Final(trial, best.score)
            return
        trial = replace(trial, name=f"{trial.method}-{option}-{value:.6g}-{trial.seed}")
        tell(f"{TITLES[trial.method]}: {option} {value:.3g} in full")
        found[value] = _Final(trial, _final_score(trial, dataset))

    values = list(ranked)
    for value in values:
        if sum(math.isfinite(final.score) for final in found.values()) == _FINALISTS:
            break
        run(value)
    while missing := _untrained_neighbours(sorted(values), found):
        run(missing[0])
    return found


def _untrained_neighbours(values: Sequence[float], found: Mapping[float, _Final]) -> list[float]:
    """Neighbours of the best value so far, in ascending order, that were not trained in full."""
    place = values.index(max(found, key=lambda value: found[value].score))
    return [value for value in values[max(0, place - 1) : place + 2] if value not in found]


def _ranked(
    trial: Trial[ImageStudy],
    option: str,
    grid: Sequence[float],
    dataset: FederatedDataset,
    tell: Tell,
) -> dict[float, float]:
    """Values with their scores in short runs, best first, without those that diverged; a few need none."""
    if len(grid) <= _FINALISTS:
        return dict.fromkeys(grid, math.nan)

    def run() -> dict[str, Any]:
        tell(f"{TITLES[trial.method]}: {option} in short runs")
        found = tune(
            dataset,
            trial.method,
            option=option,
            grid=grid,
            rounds=trial.study.tuning_rounds,
            options=trial.options,
        )
        return {"scores": [_plain(found.scores[value]) for value in grid]}

    name = f"{trial.method}-{option}-ranking-{trial.seed}"
    found = recorded(trial.folder, name, run)["scores"]
    if len(found) != len(grid):
        raise _of_another_search(trial.folder, trial.method)
    scores = dict(zip(grid, found, strict=True))
    finite = {value: score for value, score in scores.items() if score is not None}
    return dict(sorted(finite.items(), key=lambda item: -item[1]))


def _final_score(trial: Trial[ImageStudy], dataset: FederatedDataset) -> float:
    """Of a whole training; its checkpoint stays until the choice is made."""

    def run() -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)
            return {"accuracy": _plain(validation_accuracy(trained(trial, dataset)))}

    record = recorded(trial.folder, trial.name, run, keep_checkpoint=True)
    if "accuracy" not in record:
        raise _of_another_search(trial.folder, trial.method)
    return -math.inf if record["accuracy"] is None else float(record["accuracy"])


def _tidy(winner: Trial[ImageStudy], finals: Iterable[str]) -> None:
    """The winner's checkpoint becomes that of the study's own trial, which is the same; others go."""
    for variant in winner.study.variants(winner.method):
        own = f"{variant.name}-{winner.seed}"
        source = checkpoint_of(winner.folder, winner.name)
        if variant.study == winner.study and source.exists():
            if not (winner.folder / f"{own}.json").exists():
                source.replace(checkpoint_of(winner.folder, own))
            break
    for name in finals:
        checkpoint_of(winner.folder, name).unlink(missing_ok=True)


def _printed(scores: Mapping[float, float]) -> dict[str, float | None]:
    """For people who read the file; what was not run is left out."""
    return {
        f"{value:.6g}": _plain(score) for value, score in scores.items() if not math.isnan(score)
    }


def _plain(score: float) -> float | None:
    """For JSON, which knows no infinity."""
    return score if math.isfinite(score) else None
