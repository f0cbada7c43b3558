"""Which options a method of a study on images is trained with, chosen on validation rows of the first seed.

All values of a grid are trained for a few rounds and ranked by log-likelihood, which tells more there than
accuracy does. The best three go on to a quarter of the rounds and are compared by accuracy, which is what
tables report: what is fastest in the first rounds need not be best later. The best two of them are trained
to the end: a rate that is level with another after a quarter can be ten points ahead by then. A grid of two
is trained in full from the start: how far learners are independent of Gaussians shows late. Trainings go on
where they were left, and the one that wins is that of the first seed. Every step leaves a file: an
interruption costs no more than the training that it hit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fedgmm.data.dataset import FederatedDataset
from fedgmm.experiments.comparison import Tell, validation_accuracy, validation_score
from fedgmm.experiments.image_study import ImageStudy
from fedgmm.experiments.results import TITLES
from fedgmm.experiments.trial_files import Trial, checkpoint_of, recorded, trained
from fedgmm.inference.model import FederatedModel
from fedgmm.training import DivergenceWarning

_SEARCH = "all for a few rounds, three for a quarter of them, two in full"
_MIDDLE_SHARE = 4
_IN_THE_MIDDLE = 3
_IN_FULL = 2


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
        raise ValueError(
            f"{trials} holds options of {TITLES[method]} that were chosen in another way; choose "
            "another folder."
        )
    _tidy(Trial(trials, record["winner"], study, method, record["seed"], chosen), record["trained"])
    return chosen


def _search(trial: Trial[ImageStudy], federation: Federation, tell: Tell) -> dict[str, Any]:
    """Choose one option after the other; returns what is written to the file."""
    best = trial
    scores: dict[str, Any] = {}
    names: list[str] = []
    for option, grid in trial.study.grids(trial.method).items():
        search = _Search(best, option, federation.dataset, tell)
        found = search.run(grid)
        finals = found["whole"]
        value = max(finals, key=lambda value: finals[value])
        if not math.isfinite(finals[value]):
            raise ValueError(
                f"{TITLES[trial.method]} diverged with every {option} of "
                f"{', '.join(f'{value:.3g}' for value in finals)}, the grid of the "
                f"{trial.study.track} track; leave it out of the methods."
            )
        best = search.trial(value)
        scores[option] = {stage: _printed(ranked) for stage, ranked in found.items()}
        names += [search.trial(value).name for value in grid]
    return {
        "search": _SEARCH,
        "chosen": best.chosen,
        "seed": trial.seed,
        "winner": best.name,
        "trained": names,
        "scores": scores,
    }


@dataclass(frozen=True)
class _Search:
    """The search for one option.

    Attributes:
        start: the training with what was chosen before; it has a name if something was.
        option: what is chosen.
        dataset: the clients.
        tell: called with a line before each step.
    """

    start: Trial[ImageStudy]
    option: str
    dataset: FederatedDataset
    tell: Tell

    def run(self, grid: Sequence[float]) -> dict[str, dict[float, float]]:
        """Scores after each stage, in the order of trainings; minus infinity where one diverged."""
        study = self.start.study
        whole = partial(self._score, study.rounds, validation_accuracy)
        if len(grid) <= _IN_FULL:
            return {"whole": _scores(grid, len(grid), whole)}
        early = min(study.tuning_rounds, study.rounds)
        middle = min(max(early, study.rounds // _MIDDLE_SHARE), study.rounds)
        short = _scores(grid, len(grid), partial(self._score, early, validation_score))
        ranked = _ranked(short)
        some = _scores(ranked, _IN_THE_MIDDLE, partial(self._score, middle, validation_accuracy))
        last = dict.fromkeys([*_ranked(some), *(v for v in ranked if v not in some)])
        return {"short": short, "middle": some, "whole": _scores(last or grid, _IN_FULL, whole)}

    def trial(self, value: float) -> Trial[ImageStudy]:
        """The training with one value of the option."""
        start = self.start
        chosen = replace(start, chosen={**start.chosen, self.option: value})
        if start.name and chosen.options == start.options:
            return chosen  # the option before was trained with it
        return replace(chosen, name=f"{start.method}-{self.option}-{value:.6g}-{start.seed}")

    def _score(self, until: int, judge: Callable[[FederatedModel], float], value: float) -> float:
        """Of a training after some rounds; its checkpoint stays until the choice is made."""
        trial = self.trial(value)

        def run() -> dict[str, Any]:
            self.tell(f"{TITLES[trial.method]}: {self.option} {value:.3g}, to round {until}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DivergenceWarning)
                return {"score": _plain(judge(trained(trial, self.dataset, until)))}

        name = f"{trial.name}-{judge.__name__}-{until}"
        score = recorded(trial.folder, name, run, keep_checkpoint=True)["score"]
        return -math.inf if score is None else float(score)


def _scores(
    values: Iterable[float], wanted: int, score: Callable[[float], float]
) -> dict[float, float]:
    """Scores of values in their order, until so many of them have not diverged."""
    found: dict[float, float] = {}
    for value in values:
        if sum(map(math.isfinite, found.values())) == wanted:
            break
        found[value] = score(value)
    return found


def _ranked(scores: Mapping[float, float]) -> list[float]:
    """Values by their scores, best first, without those that diverged."""
    finite = [value for value, score in scores.items() if math.isfinite(score)]
    return sorted(finite, key=lambda value: -scores[value])


def _tidy(winner: Trial[ImageStudy], names: Iterable[str]) -> None:
    """The winner's checkpoint becomes that of the study's own trial, which is the same; others go."""
    for variant in winner.study.variants(winner.method):
        own = f"{variant.name}-{winner.seed}"
        source = checkpoint_of(winner.folder, winner.name)
        if variant.study == winner.study and source.exists():
            if not (winner.folder / f"{own}.json").exists():
                source.replace(checkpoint_of(winner.folder, own))
            break
    for name in names:
        checkpoint_of(winner.folder, name).unlink(missing_ok=True)


def _printed(scores: Mapping[float, float]) -> dict[str, float | None]:
    """For people who read the file."""
    return {f"{value:.6g}": _plain(score) for value, score in scores.items()}


def _plain(score: float) -> float | None:
    """For JSON, which knows no infinity."""
    return score if math.isfinite(score) else None
