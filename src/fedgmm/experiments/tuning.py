"""Choice of the training options of a method, on validation rows of the first seed.

The search has three stages:

1. All choices are trained for a few rounds and ranked by log-likelihood, which separates them better than
   accuracy does at that point.
2. The better half is trained to a quarter of the rounds and compared by accuracy, which tables report.
3. The best two are trained to the end and compared by accuracy.

The first list is searched like this; if it has several starts of a mixture, each has its own three stages,
because their effect shows late, and their whole runs are compared. Later lists, and a list of only two
choices, go straight to the third stage, because the effect of independence shows late and label frequencies
are counted at the end. Training runs resume between stages, and the winner
becomes the trial of the first seed. Every step writes a file, so an interruption costs one training run at
most.

Mixtures start as one shared learner, usually for longer than the first two stages. These stages therefore
judge their options as FedAvg's, which is cheap, and only the third one compares whole mixtures.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedgmm.data.dataset import FederatedDataset
from fedgmm.experiments.settings import Choice, ImageStudy
from fedgmm.experiments.trials import Federation, Record, StudyFolderError, Trial, TrialFolder
from fedgmm.methods.base import TITLES
from fedgmm.model.model import FederatedModel
from fedgmm.runs.comparison import Notify, validation_accuracy, validation_score
from fedgmm.runs.folder import finite
from fedgmm.training.checkpoint import OtherTrainingError
from fedgmm.training.in_process import DivergenceWarning

_SEARCH = "all for a few rounds, half of them for a quarter, two in full"
_IN_FULL = 2

Metric = Literal["validation_score", "validation_accuracy"]
"""The metric of a stage; part of file names."""

Scores = dict[str, float]
"""Scores by the labels of choices, in the order of training; minus infinity if training diverged."""


def choose_options(
    folder: TrialFolder,
    study: ImageStudy,
    method: str,
    federation: Callable[[], Federation],
    notify: Notify,
) -> dict[str, Any]:
    """Return the best values of the options in :meth:`ImageStudy.choices`.

    ``federation`` returns the clients of the first seed; it is called only if training is needed.

    Raises:
        StudyFolderError: the folder holds options or checkpoints of another search.
        ValueError: every choice diverged.
    """
    record = folder.run_once(
        f"{method}-tuning",
        lambda: _search(Trial(folder, "", study, method, study.seeds[0], {}), federation(), notify),
        "chosen",
        "winner",
        "seed",
    )
    chosen = _chosen(study, method, record)
    if chosen is None:
        raise StudyFolderError(
            f"{folder.path} holds options of {TITLES[method]} that another search chose; choose "
            "another folder."
        )
    _hand_over_checkpoint(Trial(folder, record["winner"], study, method, record["seed"], chosen))
    return chosen


def chosen_before(folder: TrialFolder, study: ImageStudy, method: str) -> dict[str, Any] | None:
    """Return the options that :func:`choose_options` chose before; ``None`` if it did not."""
    record = folder.read(f"{method}-tuning", "chosen")
    return None if record is None else _chosen(study, method, record)


def _chosen(study: ImageStudy, method: str, record: Record) -> dict[str, Any] | None:
    """Return the options in a search's file; ``None`` if they come from another kind of search."""
    chosen: dict[str, Any] = record["chosen"]
    # options that were chosen in another order come from another search, too
    wanted = dict.fromkeys(name for choices in study.choices(method) for name in choices[0])
    return chosen if record.get("search") == _SEARCH and list(chosen) == list(wanted) else None


def _hand_over_checkpoint(winner: Trial[ImageStudy]) -> None:
    """Rename the winner's checkpoint for the trial with the same settings, or delete it."""
    for name, _, study in winner.study.variants(winner.method):
        own = f"{name}-{winner.seed}"
        if study == winner.study and winner.checkpoint.exists():
            if not winner.folder.record_file(own).exists():
                winner.checkpoint.replace(winner.folder.checkpoint(own))
            break
    winner.checkpoint.unlink(missing_ok=True)


def _search(trial: Trial[ImageStudy], federation: Federation, notify: Notify) -> Record:
    """Choose one list of options after the other and return the content of the file."""
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
        stages.append(finite(found))
    return {
        "search": _SEARCH,
        "chosen": best.chosen,
        "seed": trial.seed,
        "winner": best.name,
        "scores": stages,
    }


@dataclass(frozen=True)
class _Search:
    """The search among the choices of one list.

    ``start`` is the trial with the options chosen before; its name is empty for the first list.
    """

    start: Trial[ImageStudy]
    dataset: FederatedDataset
    notify: Notify

    def run(self, choices: Sequence[Choice]) -> dict[str, Scores]:
        """Return the scores of each stage; the first list has stages for each start of a mixture."""
        if self.start.name:
            return self._stages(choices, only_whole=True)
        found: dict[str, Scores] = {}
        for start in dict.fromkeys(choice.get("start") for choice in choices):
            own = [choice for choice in choices if choice.get("start") == start]
            for stage, scores in self._stages(own, only_whole=len(own) <= _IN_FULL).items():
                found.setdefault(stage, {}).update(scores)
        return found

    def _stages(self, choices: Sequence[Choice], *, only_whole: bool) -> dict[str, Scores]:
        """Return the scores of choices that are compared in all stages, or at the end only."""
        study = self.start.study
        labelled = {_label(choice): choice for choice in choices}

        def scores(labels: Iterable[str], wanted: int, until: int, metric: Metric) -> Scores:
            """Train choices in this order until ``wanted`` of them have not diverged."""
            found: Scores = {}
            order = list(labels)
            names = [f"{self._name(labelled[label])}-{metric}-{until}" for label in order]
            if names and not self.start.folder.record_file(names[0]).is_file():
                # the stage starts now, so other choices no longer need their checkpoints
                self.drop(labelled[label] for label in labelled if label not in order[:wanted])
            for label, name in zip(order, names, strict=True):
                if sum(map(math.isfinite, found.values())) == wanted:
                    break
                found[label] = self._score(name, labelled[label], until, metric)
            return found

        if only_whole:
            return {"whole": scores(labelled, len(choices), study.rounds, "validation_accuracy")}
        early, middle = study.tuning_stages
        half = -(-len(choices) // 2)
        short = scores(labelled, len(choices), early, "validation_score")
        ranked = _ranked(short)
        some = scores(ranked, half, middle, "validation_accuracy")
        last = [*_ranked(some), *(label for label in ranked if label not in some)]
        whole = scores(last or labelled, _IN_FULL, study.rounds, "validation_accuracy")
        return {"short": short, "middle": some, "whole": whole}

    def trial(self, choice: Choice) -> Trial[ImageStudy]:
        """Return the trial with a choice."""
        start = self.start
        chosen = replace(start, chosen={**start.chosen, **choice})
        # label frequencies are counted after the last round, so they need no training run
        same = replace(chosen.options, personal_labels=start.options.personal_labels)
        if start.name and same == start.options:
            return chosen
        return replace(chosen, name=self._name(choice))

    def drop(self, choices: Iterable[Choice]) -> None:
        """Delete the checkpoints of choices; a choice that is needed later starts again."""
        for choice in choices:
            self.trial(choice).checkpoint.unlink(missing_ok=True)

    def _name(self, choice: Choice) -> str:
        return f"{self.start.method}-{_label(choice).replace(' ', '-')}-{self.start.seed}"

    def _score(self, name: str, choice: Choice, until: int, metric: Metric) -> float:
        """Return the score of a choice after some rounds, keeping its checkpoint."""
        trial = self.trial(choice)

        def run() -> Record:
            self.notify(f"{TITLES[trial.method]}: {_label(choice)}, to round {until}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DivergenceWarning)
                model = _train_until(trial, self.dataset, until)
            judge = validation_score if metric == "validation_score" else validation_accuracy
            return {"score": finite(judge(model))}

        score = trial.folder.run_once(name, run, "score", keep_checkpoint=True)["score"]
        return -math.inf if score is None else float(score)


def _train_until(trial: Trial[ImageStudy], dataset: FederatedDataset, until: int) -> FederatedModel:
    """Train up to a round.

    Raises:
        StudyFolderError: the checkpoint belongs to another training run or is past this round. Since
            a stage writes its scores before the next one starts, another search must have left it.
    """
    try:
        model = trial.train(dataset, until)
        if model.history and model.history[-1]["round"] > until:
            raise OtherTrainingError(f"it is past round {until}")
    except OtherTrainingError as error:
        raise StudyFolderError(
            f"{trial.checkpoint} belongs to another search ({error}); choose another folder."
        ) from error
    return model


def _label(choice: Choice) -> str:
    """Return a label for messages and file names, such as ``"lr 0.1 server_momentum 0.9"``."""
    return " ".join(
        f"{name} {value if isinstance(value, str) else f'{value:.6g}'}"
        for name, value in choice.items()
    )


def _ranked(scores: Scores) -> list[str]:
    """Return the labels by score, best first, without those that diverged."""
    converged = [label for label, score in scores.items() if math.isfinite(score)]
    return sorted(converged, key=lambda label: -scores[label])
