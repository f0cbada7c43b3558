"""Which options a method of a study on images is trained with, chosen on validation rows of the first seed.

All choices are trained for a few rounds and ranked by log-likelihood, which tells more there than accuracy
does. The better half goes on to a quarter of the rounds and is compared by accuracy, which is what tables
report: what is fastest in the first rounds need not be best later. The best two of those are trained to the
end. Where there are but two choices they are trained in full from the start: how far learners are
independent of Gaussians shows late, and clients' label frequencies are counted at the end. Trainings go on
where they were left, and the one that wins is that of the first seed. Every step leaves a file: an
interruption costs no more than the training that it hit.

Mixtures begin as one shared learner, mostly for longer than the first two stages: there their options are
judged as FedAvg's, which is cheap, and only the best two are compared as whole mixtures.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fedgmm.data.dataset import FederatedDataset
from fedgmm.experiments.image_study import Choice, ImageStudy
from fedgmm.experiments.trial_files import (
    Trial,
    checkpoint_of,
    on_file,
    record_of,
    recorded,
    trained,
)
from fedgmm.methods.base import TITLES
from fedgmm.model.model import FederatedModel
from fedgmm.runs.comparison import Notify, validation_accuracy, validation_score
from fedgmm.training.checkpoint import OtherTrainingError
from fedgmm.training.local import DivergenceWarning

_SEARCH = "all for a few rounds, half of them for a quarter, two in full"
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
    notify: Notify,
) -> dict[str, Any]:
    """The learning rate of a method, and whatever else :meth:`ImageStudy.choices` leaves open.

    Args:
        trials: the folder of the study's trials.
        study: its settings.
        method: what is tuned.
        federation: the clients of the first seed, asked for only where something has to be run.
        notify: called with a line before each step.

    Raises:
        ValueError: everything diverged, or the folder holds choices or trainings of another search.
    """
    record = recorded(
        trials,
        f"{method}-tuning",
        lambda: _search(Trial(trials, "", study, method, study.seeds[0], {}), federation(), notify),
        "chosen",
        "winner",
        "seed",
    )
    chosen = _chosen(study, method, record)
    if chosen is None:
        raise ValueError(
            f"{trials} holds options of {TITLES[method]} that were chosen in another way; choose "
            "another folder."
        )
    _tidy(Trial(trials, record["winner"], study, method, record["seed"], chosen))
    return chosen


def options_on_file(trials: Path, study: ImageStudy, method: str) -> dict[str, Any] | None:
    """What :func:`chosen_options` chose before; ``None`` where it chose nothing, or in another way."""
    record = on_file(trials, f"{method}-tuning", "chosen")
    return None if record is None else _chosen(study, method, record)


def _chosen(study: ImageStudy, method: str, record: dict[str, Any]) -> dict[str, Any] | None:
    """The options in a search's file; ``None`` if they are of another kind of search."""
    chosen: dict[str, Any] = record["chosen"]
    wanted = {name for choices in study.choices(method) for name in choices[0]}
    return chosen if record.get("search") == _SEARCH and chosen.keys() == wanted else None


def _search(trial: Trial[ImageStudy], federation: Federation, notify: Notify) -> dict[str, Any]:
    """Choose one option after the other; returns what is written to the file."""
    best = trial
    stages: list[dict[str, Any]] = []
    for choices in trial.study.choices(trial.method):
        search = _Search(best, federation.dataset, notify)
        found = search.run(choices)
        finals = found["whole"]
        label = max(finals, key=lambda label: finals[label])
        if not math.isfinite(finals[label]):
            raise ValueError(
                f"{TITLES[trial.method]} diverged with every choice of the {trial.study.track} track "
                f"({'; '.join(finals)}); leave it out of the methods."
            )
        best = next(search.trial(choice) for choice in choices if _label(choice) == label)
        search.drop(choice for choice in choices if search.trial(choice).name != best.name)
        stages.append({stage: _plain_scores(ranked) for stage, ranked in found.items()})
    return {
        "search": _SEARCH,
        "chosen": best.chosen,
        "seed": trial.seed,
        "winner": best.name,
        "scores": stages,
    }


Judge = Callable[[FederatedModel], float]
Scores = dict[str, float]
"""By the labels of choices, in the order of trainings; minus infinity where one diverged."""


@dataclass(frozen=True)
class _Search:
    """The search among some choices.

    Attributes:
        start: the training with what was chosen before; it has a name if something was.
        dataset: the clients.
        notify: called with a line before each step.
    """

    start: Trial[ImageStudy]
    dataset: FederatedDataset
    notify: Notify

    def run(self, choices: Sequence[Choice]) -> dict[str, Scores]:
        """Scores after each stage."""
        study = self.start.study
        labelled = {_label(choice): choice for choice in choices}

        def scores(labels: Iterable[str], wanted: int, until: int, judge: Judge) -> Scores:
            """Of choices in their order, until so many of them have not diverged."""
            found: Scores = {}
            order = list(labels)
            if order and not self._is_scored(labelled[order[0]], until, judge):  # the stage begins
                self.drop(labelled[label] for label in labelled if label not in order[:wanted])
            for label in order:
                if sum(map(math.isfinite, found.values())) == wanted:
                    break
                found[label] = self._score(labelled[label], until, judge)
            return found

        if len(choices) <= _IN_FULL:
            return {"whole": scores(labelled, _IN_FULL, study.rounds, validation_accuracy)}
        early, middle = study.tuning_stages
        half = -(-len(choices) // 2)
        short = scores(labelled, len(choices), early, validation_score)
        ranked = _ranked(short)
        some = scores(ranked, half, middle, validation_accuracy)
        last = [*_ranked(some), *(label for label in ranked if label not in some)]
        whole = scores(last or labelled, _IN_FULL, study.rounds, validation_accuracy)
        return {"short": short, "middle": some, "whole": whole}

    def trial(self, choice: Choice) -> Trial[ImageStudy]:
        """The training with a choice."""
        start = self.start
        chosen = replace(start, chosen={**start.chosen, **choice})
        # label frequencies are counted after the last round: the same training serves both
        same = replace(chosen.options, personal_labels=start.options.personal_labels)
        if start.name and same == start.options:
            return chosen  # what was chosen before was trained with it
        return replace(chosen, name=self._name(choice))

    def _name(self, choice: Choice) -> str:
        return f"{self.start.method}-{_label(choice).replace(' ', '-')}-{self.start.seed}"

    def drop(self, choices: Iterable[Choice]) -> None:
        """Checkpoints of choices that are out of the race; one that is needed after all starts again."""
        for choice in choices:
            checkpoint_of(self.start.folder, self.trial(choice).name).unlink(missing_ok=True)

    def _score(self, choice: Choice, until: int, judge: Judge) -> float:
        """Of a training after some rounds; its checkpoint stays while it is in the race."""
        trial = self.trial(choice)

        def run() -> dict[str, Any]:
            self.notify(f"{TITLES[trial.method]}: {_label(choice)}, to round {until}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DivergenceWarning)
                return {"score": _plain(judge(_trained_until(trial, self.dataset, until)))}

        name = self._score_name(choice, until, judge)
        score = recorded(trial.folder, name, run, "score", keep_checkpoint=True)["score"]
        return -math.inf if score is None else float(score)

    def _score_name(self, choice: Choice, until: int, judge: Judge) -> str:
        return f"{self._name(choice)}-{judge.__name__}-{until}"

    def _is_scored(self, choice: Choice, until: int, judge: Judge) -> bool:
        name = self._score_name(choice, until, judge)
        return record_of(self.start.folder, name).is_file()


def _trained_until(
    trial: Trial[ImageStudy], dataset: FederatedDataset, until: int
) -> FederatedModel:
    """The training after that round.

    Raises:
        ValueError: its checkpoint is of another training or stands later, though the score of every
            stage is on file before the next one begins: another search left it.
    """
    try:
        model = trained(trial, dataset, until)
    except OtherTrainingError as error:
        raise _other_search(trial, str(error)) from error
    if model.history and model.history[-1]["round"] > until:
        raise _other_search(trial, f"it is past round {until} already.")
    return model


def _other_search(trial: Trial[ImageStudy], reason: str) -> ValueError:
    return ValueError(
        f"{checkpoint_of(trial.folder, trial.name)} holds a training of another search; choose another "
        f"folder. ({reason})"
    )


def _label(choice: Choice) -> str:
    """A choice for people and file names, such as ``"lr 0.1 server_momentum 0.9"``."""
    return " ".join(f"{name} {value:.6g}" for name, value in choice.items())


def _ranked(scores: Scores) -> list[str]:
    """Labels by their scores, best first, without those that diverged."""
    finite = [label for label, score in scores.items() if math.isfinite(score)]
    return sorted(finite, key=lambda label: -scores[label])


def _tidy(winner: Trial[ImageStudy]) -> None:
    """The winner's checkpoint becomes that of the study's own trial, which is the same, or goes."""
    source = checkpoint_of(winner.folder, winner.name)
    for variant in winner.study.variants(winner.method):
        own = f"{variant.name}-{winner.seed}"
        if variant.study == winner.study and source.exists():
            if not record_of(winner.folder, own).exists():
                source.replace(checkpoint_of(winner.folder, own))
            break
    source.unlink(missing_ok=True)


def _plain_scores(scores: Scores) -> dict[str, float | None]:
    return {label: _plain(score) for label, score in scores.items()}


def _plain(score: float) -> float | None:
    """For JSON, which knows no infinity."""
    return score if math.isfinite(score) else None
