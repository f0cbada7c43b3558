"""Sensitivity to the numbers of Gaussians and learners: test accuracy over a grid of both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Self

import numpy as np

from fedgmm.experiments.settings import Choice, ImageStudy
from fedgmm.experiments.study import (
    StudyContext,
    prepare_federation,
    run_study,
    training_facts,
)
from fedgmm.experiments.tables import markdown_table, mean_and_spread
from fedgmm.experiments.trials import Federation, Record, Trial
from fedgmm.support.checks import check_integer
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

    def variants(self, method: str) -> list[tuple[str, str, Self]]:
        """Return every cell of the grid; all use the rate chosen at ``components`` and ``learners``."""
        return [
            (
                f"{method}-{m1}x{m2}",
                f"{counted(m1, 'Gaussian')}, {counted(m2, 'learner')}",
                replace(self, components=m1, learners=m2),
            )
            for m1, m2 in product(self.component_choices, self.learner_choices)
        ]


def reproduce_sensitivity(folder: Path, study: SensitivityStudy, context: StudyContext) -> Record:
    """Run the study and write the grid as a table and a heat map into ``folder``.

    Returns:
        The results, with accuracies ``(seeds, M1 choices, M2 choices)``.
    """
    from fedgmm.report.plots import plot_heat_map

    results = run_study(folder, "sensitivity", study, context, prepare_federation, _run_trial)
    shape = (len(study.seeds), len(study.component_choices), len(study.learner_choices))
    accuracy, validation = (
        np.array(results.values("fedgmm", name)).reshape(shape)
        for name in ("mean_accuracy", "validation_accuracy")
    )
    header = ["Gaussians", *(counted(m2, "learner") for m2 in study.learner_choices)]
    rows = [
        [str(m1), *map(mean_and_spread, accuracy[:, i].T.tolist())]
        for i, m1 in enumerate(study.component_choices)
    ]
    mean = accuracy.mean(0)
    i, j = np.unravel_index(validation.mean(0).argmax(), mean.shape)
    markdown = (
        f"# {study.dataset}: FedGMM's test accuracy (%) by its numbers of Gaussians and learners "
        f"({study.track} track)\n\n"
        + markdown_table(header, rows)
        + f"\nMean over clients. The best and the worst cell differ by "
        f"{100 * (mean.max() - mean.min()):.2f} points. Validation rows choose "
        f"{counted(study.component_choices[i], 'Gaussian')} and "
        f"{counted(study.learner_choices[j], 'learner')} ({100 * mean[i, j]:.2f} % on test "
        "rows). The paper prints a figure without numbers and names two and two as the best. "
        f"{study.protocol()} The whole grid has one learning rate, chosen at {study.components} and "
        f"{study.learners}.{results.divergence()}\n"
    )
    title = f"{study.dataset}: test accuracy (%), mean over clients"
    choices = study.component_choices, study.learner_choices
    found = results.write({"accuracy": accuracy.tolist()}, markdown)
    plot_heat_map(100 * mean, *choices, title, results.picture)
    return found


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
