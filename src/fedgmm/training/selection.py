"""How many components, how many learners? Chosen from what a federation can compute: log-likelihoods."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedgmm.core.gaussians import CovarianceType
from fedgmm.data.dataset import FederatedDataset
from fedgmm.methods.base import DENSITY
from fedgmm.training.local import INTERRUPTED, DivergenceWarning, train
from fedgmm.training.options import TrainingOptions
from fedgmm.wording import counted


@dataclass(frozen=True)
class MixtureSelection:
    """The outcome of :func:`select_mixture`.

    Attributes:
        components: ``M1``.
        learners: ``M2``.
        scores: mean log-likelihood of the validation rows for each pair that was tried.
    """

    components: int
    learners: int
    scores: dict[tuple[int, int], float]

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        tried = [
            {
                "components": m1,
                "learners": m2,
                "validation_log_likelihood": score if math.isfinite(score) else None,
            }
            for (m1, m2), score in self.scores.items()
        ]
        return {"components": self.components, "learners": self.learners, "tried": tried}


_ROWS_A_PARAMETER = 5.0
_WIDEST_FULL = 200  # columns
_PATIENCE = 2  # sizes without a gain before the search ends
_GAIN = 1e-3  # nats a row that one more of them must bring
_SMALL = 1_000_000  # numbers in the training rows, for which trials take well under a minute


def select_mixture(
    dataset: FederatedDataset,
    *,
    options: TrainingOptions | None = None,
    components: int | None = None,
    learners: int | None = None,
    candidates: Sequence[int] = (1, 2, 3, 4, 5, 6, 8, 10),
    rounds: int = 30,
    notify: Callable[[str], None] = lambda _: None,
) -> MixtureSelection:
    """Choose ``M1`` and ``M2`` by the likelihood of validation rows after short runs.

    First both grow together, until more brings no gain; then the number of learners is looked at
    alone. Smaller numbers win ties. Test rows are not looked at.

    The likelihood is that of the labels, ``log P_c(y|x)``: that of the inputs keeps growing with more
    Gaussians wherever columns are categories. With one learner, fixed, the Gaussians do not touch the
    labels, and ``log P_c(x)`` decides; so it does where there are no labels (``"gmm"``).

    Args:
        dataset: the clients.
        options: of the training; its numbers of components and learners are not used.
        components: a number that is fixed already.
        learners: likewise.
        candidates: numbers to try, in this order.
        rounds: length of a trial.
        notify: called with a line before each trial.
    """
    if not candidates:
        raise ValueError("candidates is empty; give at least one number.")
    if not len(dataset.validation):
        raise ValueError("There are no validation rows to choose by; give the numbers yourself.")
    base = options or TrainingOptions()
    base = replace(base, rounds=min(rounds, base.rounds))
    scores: dict[tuple[int, int], float] = {}
    if base.algorithm == DENSITY:
        learners = 1  # there are no labels to tell one from another
    of_inputs = learners == 1

    def score(m1: int, m2: int) -> float:
        if (m1, m2) not in scores:
            notify(f"trying {counted(m1, 'Gaussian')} and {counted(m2, 'learner')}")
            trial = replace(base, components=m1, learners=m2)
            scores[m1, m2] = _validation_score(dataset, trial, of_inputs)
        return scores[m1, m2]

    if components is None:
        components = _climb(candidates, lambda m: score(m, learners or m))
    if learners is None:
        chosen = components
        learners = _climb(
            [m for m in candidates if m <= max(chosen, candidates[0])],
            lambda m: score(chosen, m),
        )
    score(components, learners)
    return MixtureSelection(components, learners, scores)


def select_for_small_data(
    dataset: FederatedDataset,
    options: TrainingOptions,
    notify: Callable[[str], None] = lambda _: None,
) -> MixtureSelection | None:
    """Choose ``M1`` and ``M2`` where nobody did and where a wrong number costs most.

    Where one learner is best, the number of Gaussians stays the default or grows: labels cannot tell.
    A few hundred rows are easily divided among more learners than they can teach, and trials on them
    are quick.

    Returns:
        The choice, or ``None`` where the defaults will do: much data, no validation rows, or a method
        without Gaussians.
    """
    small = len(dataset.train) * dataset.input_shape[0] <= _SMALL
    if not small or not len(dataset.validation) or options.algorithm != "fedgmm":
        return None
    found = select_mixture(dataset, options=options, notify=notify)
    if found.learners == 1:
        # one learner: Gaussians do not touch the labels, but novelty needs more than one of them
        return replace(found, components=max(found.components, options.components))
    return found


def suitable_covariance(rows: int, columns: int, components: int) -> CovarianceType:
    """Full covariances where there are rows enough for their parameters, diagonal ones elsewhere."""
    parameters = components * columns * (columns + 1) / 2
    enough = rows >= _ROWS_A_PARAMETER * parameters
    return "full" if enough and columns <= _WIDEST_FULL else "diag"


def _climb(candidates: Sequence[int], score: Callable[[int], float]) -> int:
    """The first candidate that the next ones do not beat."""
    best, best_score, behind = candidates[0], score(candidates[0]), 0
    for candidate in candidates[1:]:
        found = score(candidate)
        if found > best_score + _GAIN:
            best, best_score, behind = candidate, found, 0
        else:
            behind += 1
            if behind >= _PATIENCE:
                break
    return best


def _validation_score(
    dataset: FederatedDataset, options: TrainingOptions, of_inputs: bool
) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)
        model = train(dataset, options=options)
    if model.stopped == INTERRUPTED:
        raise KeyboardInterrupt
    if model.stopped:
        return -float("inf")
    rows = dataset.validation
    x, labels = rows.inputs.numpy(), dataset.classes[rows.labels.numpy()]
    owners = np.array([rows.names[code] for code in rows.codes.tolist()], dtype=object)
    if of_inputs and model.prediction.gaussians is not None:
        return float(model.score_samples(x, owners).mean())
    return float(model.log_conditional(x, labels, owners).mean())
