"""Several methods on one data set, each tuned by the same grid on validation rows."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedgmm.data.dataset import FederatedDataset
from fedgmm.methods.base import SHARED_LEARNERS
from fedgmm.model.metrics import Evaluation
from fedgmm.model.model import FederatedModel
from fedgmm.training.build import solver_of
from fedgmm.training.local import INTERRUPTED, DivergenceWarning, train
from fedgmm.training.options import ALGORITHMS, TrainingOptions

PAPER_GRID = tuple(10.0**exponent for exponent in (-0.5, -1.0, -1.5, -2.0, -2.5, -3.0))
"""The paper's learning rates."""

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Tuning:
    """A learning rate, chosen on validation rows.

    Attributes:
        best: the choice.
        scores: mean validation log-likelihood of every rate; minus infinity where it diverged.
    """

    best: float
    scores: dict[float, float]


@dataclass(frozen=True)
class Contestant:
    """One method's outcome.

    Attributes:
        algorithm: its name.
        model: trained with the chosen options.
        evaluation: of every client on the test rows, at the last round.
        seconds: of the final training.
        tuning: of the learning rate; ``None`` where there is none to tune.
    """

    algorithm: str
    model: FederatedModel
    evaluation: Evaluation
    seconds: float
    tuning: Tuning | None

    @property
    def summary(self) -> dict[str, float]:
        """Metrics over all clients."""
        return self.evaluation.summary()

    def accuracies(self) -> dict[str, float]:
        """The accuracy of every client."""
        clients = map(str, self.evaluation.clients)
        return dict(zip(clients, self.evaluation.accuracy.tolist(), strict=True))


@dataclass(frozen=True)
class Comparison:
    """All methods, in the order they were run."""

    contestants: list[Contestant] = field(default_factory=list)

    def record(self, clients: bool = False) -> list[dict[str, Any]]:
        """Plain values, for JSON; on request with the accuracy of every client."""
        return [
            {
                "algorithm": one.algorithm,
                **one.summary,
                "rounds": len(one.model.history),
                "seconds": one.seconds,
                "lr": one.tuning.best if one.tuning else None,
                "tuning": {
                    str(lr): score if math.isfinite(score) else None
                    for lr, score in one.tuning.scores.items()
                }
                if one.tuning
                else None,
                **({"clients": one.accuracies()} if clients else {}),
            }
            for one in self.contestants
        ]


def pass_on_interrupt(model: FederatedModel) -> None:
    """Training keeps its last round on Ctrl-C; a series of trainings should end."""
    if model.stopped == INTERRUPTED:
        raise KeyboardInterrupt


def tune(
    dataset: FederatedDataset,
    algorithm: str,
    *,
    grid: Sequence[float] = PAPER_GRID,
    rounds: int = 10,
    options: TrainingOptions | None = None,
    **changes: Any,
) -> Tuning:
    """The learning rate with the best validation log-likelihood.

    Every method goes through the same grid; test rows are not looked at.

    Args:
        dataset: the clients.
        algorithm: the method.
        grid: learning rates.
        rounds: of a short run with each of them.
        options: the others; their warm-up is shortened as much as their rounds are.
        **changes: laid over them.
    """
    scores = _scores(dataset, algorithm, grid, rounds, options, changes)
    if not any(map(math.isfinite, scores.values())):
        raise ValueError(
            f"{algorithm} diverged with every lr of the grid {tuple(grid)}; try smaller ones."
        )
    return Tuning(max(scores, key=lambda lr: scores[lr]), scores)


def _scores(
    dataset: FederatedDataset,
    algorithm: str,
    grid: Sequence[float],
    rounds: int,
    options: TrainingOptions | None,
    changes: Mapping[str, Any],
) -> dict[float, float]:
    """Validation log-likelihood after some rounds with each rate; minus infinity where it diverged."""
    whole = options or TrainingOptions()
    short = replace(whole, warmup=whole.warmup * rounds // whole.rounds)
    scores: dict[float, float] = {}
    for lr in grid:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)
            changed = {**changes, "lr": lr, "rounds": rounds}
            run = train(dataset, algorithm, options=short, **changed)
        pass_on_interrupt(run)
        scores[lr] = validation_score(run)
    return scores


def validation_score(model: FederatedModel) -> float:
    """Mean log-likelihood of validation labels; minus infinity where training diverged."""
    score = -float("inf") if model.stopped else -model.evaluate("validation").mean_log_loss
    return -float("inf") if math.isnan(score) else score


def validation_accuracy(model: FederatedModel) -> float:
    """Mean accuracy over clients on validation rows; minus infinity where training diverged."""
    return -float("inf") if model.stopped else model.evaluate("validation").mean_accuracy


def compare(
    dataset: FederatedDataset,
    algorithms: Iterable[str] = ALGORITHMS,
    *,
    grid: Sequence[float] | None = PAPER_GRID,
    tuning_rounds: int = 10,
    options: TrainingOptions | None = None,
    notify: Notify = lambda _: None,
    **changes: Any,
) -> Comparison:
    """Tune and train each method, then evaluate its last round on the test rows.

    Args:
        dataset: the clients.
        algorithms: which methods.
        grid: learning rates to try for every method that has one; ``None`` keeps the given rate.
        tuning_rounds: length of a trial.
        options: common options.
        notify: called with a line before each step.
        **changes: laid over ``options``.
    """
    from fedgmm.nets.networks import network

    result = Comparison()
    for algorithm in algorithms:
        chosen = replace(options or TrainingOptions(), algorithm=algorithm, **changes)
        if algorithm not in SHARED_LEARNERS:  # learners of each client's own know its labels
            chosen = replace(chosen, personal_labels=False)
        net = network(chosen.learner, dataset.input_shape, len(dataset.classes))
        exact = solver_of(chosen, net) == "newton" and algorithm in ("fedgmm", "fedem", "fedavg")
        tuning = None
        if grid is not None and not exact:
            notify(f"{algorithm}: choosing the learning rate")
            tuning = tune(dataset, algorithm, grid=grid, rounds=tuning_rounds, options=chosen)
            chosen = replace(chosen, lr=tuning.best)
        notify(f"{algorithm}: training")
        started = time.perf_counter()
        model = train(dataset, algorithm, options=chosen)
        pass_on_interrupt(model)
        seconds = time.perf_counter() - started
        evaluation = model.evaluate("test")
        result.contestants.append(Contestant(algorithm, model, evaluation, seconds, tuning))
    return result
