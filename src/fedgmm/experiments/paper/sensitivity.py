"""Sensitivity to the numbers of Gaussians and learners: test accuracy over a grid of both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fedgmm.core.checks import check_integer
from fedgmm.experiments.settings import Choice, ImageStudy, Variant
from fedgmm.experiments.study import (
    StudyContext,
    describe_divergence,
    prepare_federation,
    run_study,
    training_facts,
    write_study,
)
from fedgmm.experiments.tables import markdown_table, mean_and_spread
from fedgmm.experiments.trials import Federation, Record, Trial
from fedgmm.wording import counted


@dataclass(frozen=True)
class SensitivityStudy(ImageStudy):
    """Settings of the study; see :class:`ImageStudy` for the other attributes."""

    methods: tuple[str, ...] = ("fedgmm",)  # only FedGMM, because it alone has both numbers
    seeds: tuple[int, ...] = (0,)  # one federation per seed
    component_choices: tuple[int, ...] = (1, 2, 3, 4, 5)  # values of ``M1``
    learner_choices: tuple[int, ...] = (1, 2, 3, 4, 5)  # values of ``M2``

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.methods != ("fedgmm",):
            raise ValueError(f"methods must be ('fedgmm',), got {self.methods!r}.")
        for name in ("component_choices", "learner_choices"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give at least one number.")
            for choice in getattr(self, name):
                check_integer(name, choice, 1)

    def choices(self, method: str) -> list[list[Choice]]:
        """Return learning rates only, because tuning independence would hide the effect of the grid."""
        return super().choices(method)[:1]

    def variants(self, method: str) -> list[Variant[Self]]:
        """Return every cell of the grid; all use the rate chosen at ``components`` and ``learners``."""
        return [
            Variant(
                f"{method}-{m1}x{m2}",
                f"{counted(m1, 'Gaussian')}, {counted(m2, 'learner')}",
                replace(self, components=m1, learners=m2),
            )
            for m1, m2 in product(self.component_choices, self.learner_choices)
        ]


@dataclass(frozen=True)
class SensitivityOutcome:
    """Accuracies over the grid, mean over clients, ``(seeds, M1 choices, M2 choices)``."""

    accuracy: NDArray[np.float64]  # accuracy on test rows
    validation: NDArray[np.float64]  # accuracy on validation rows
    details: list[Record]  # results of all trials


def reproduce_sensitivity(
    folder: Path, study: SensitivityStudy, context: StudyContext
) -> SensitivityOutcome:
    """Run the study and write the grid as a table and a heat map into ``folder``."""
    from fedgmm.report.plots import plot_heat_map

    trials, details = run_study(
        folder, "sensitivity", study, context, prepare_federation, _run_trial
    )
    shape = (len(study.seeds), len(study.component_choices), len(study.learner_choices))
    outcome = SensitivityOutcome(
        np.array([one["mean_accuracy"] for one in details]).reshape(shape),
        np.array([one["validation_accuracy"] for one in details]).reshape(shape),
        details,
    )
    found = {"accuracy": outcome.accuracy.tolist(), "details": details}
    write_study(folder, trials, study, found, _markdown(study, outcome))
    plot_heat_map(
        100 * outcome.accuracy.mean(0),
        study.component_choices,
        study.learner_choices,
        f"{study.dataset}: test accuracy (%), mean over clients",
        folder / f"{trials.path.name}.png",
    )
    return outcome


def _run_trial(trial: Trial[SensitivityStudy], federation: Federation) -> Record:
    model = trial.train(federation.dataset)
    return {
        "method": trial.method,
        "seed": trial.seed,
        "components": trial.study.components,
        "learners": trial.study.learners,
        **trial.chosen,
        "validation_accuracy": model.evaluate("validation").mean_accuracy,
        **model.evaluate("test").summary(),
        **training_facts(model),
    }


def _markdown(study: SensitivityStudy, outcome: SensitivityOutcome) -> str:
    header = ["Gaussians", *(counted(m2, "learner") for m2 in study.learner_choices)]
    rows = [
        [
            str(m1),
            *(mean_and_spread(outcome.accuracy[:, i, j].tolist()) for j in range(len(header) - 1)),
        ]
        for i, m1 in enumerate(study.component_choices)
    ]
    mean = outcome.accuracy.mean(0)
    i, j = np.unravel_index(outcome.validation.mean(0).argmax(), mean.shape)
    return (
        f"# {study.dataset}: FedGMM's test accuracy (%) by its numbers of Gaussians and learners "
        f"({study.track} track)\n\n"
        + markdown_table(header, rows)
        + f"\nMean over clients. The best and the worst cell differ by "
        f"{100 * (mean.max() - mean.min()):.2f} points. Validation rows choose "
        f"{counted(study.component_choices[i], 'Gaussian')} and "
        f"{counted(study.learner_choices[j], 'learner')} ({100 * mean[i, j]:.2f} % on test "
        "rows). The paper prints a figure without numbers and names two and two as the best. "
        f"{study.protocol()} The whole grid has one learning rate, chosen at {study.components} and "
        f"{study.learners}.{describe_divergence(outcome.details)}\n"
    )
