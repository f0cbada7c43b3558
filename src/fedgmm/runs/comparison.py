"""Comparison of several methods on the same rows, each tuned with the same grid on validation rows."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.tables.loading import load_federation
from fedgmm.data.tables.preprocessing import TableOptions
from fedgmm.methods.base import SHARED_LEARNERS
from fedgmm.model.metrics import Evaluation
from fedgmm.model.model import FederatedModel
from fedgmm.runs.folder import RunFolder, write_json
from fedgmm.runs.run import open_run
from fedgmm.training.build import solver_of
from fedgmm.training.local import INTERRUPTED, DivergenceWarning, train
from fedgmm.training.options import ALGORITHMS, TrainingOptions
from fedgmm.training.selection import choose_sizes, local_score

BUILT_IN = ("digits", "synthetic")

PAPER_GRID = tuple(10.0**exponent for exponent in (-0.5, -1.0, -1.5, -2.0, -2.5, -3.0))
"""Learning rates of the paper."""

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Tuning:
    """A learning rate that was chosen on validation rows.

    Attributes:
        best: the chosen rate.
        scores: mean validation log-likelihood of every rate; minus infinity if training diverged.
    """

    best: float
    scores: dict[float, float]

    def record(self) -> dict[str, float | None]:
        """Return the score of every rate, for JSON; ``None`` if training diverged."""
        return {
            str(lr): score if math.isfinite(score) else None for lr, score in self.scores.items()
        }


@dataclass(frozen=True)
class Contestant:
    """Result of one method.

    Attributes:
        algorithm: name of the method.
        model: trained with the chosen options.
        evaluation: metrics of every client on the test rows, at the last round.
        seconds: duration of the final training run.
        tuning: choice of the learning rate; ``None`` if there was none to choose.
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
        """Return the accuracy of every client."""
        clients = map(str, self.evaluation.clients)
        return dict(zip(clients, self.evaluation.accuracy.tolist(), strict=True))


@dataclass(frozen=True)
class Comparison:
    """Results of all methods, in the order of their runs."""

    contestants: list[Contestant] = field(default_factory=list)

    def record(self, clients: bool = False) -> list[dict[str, Any]]:
        """Return plain values, for JSON; with ``clients`` also the accuracy of every client."""
        return [
            {
                "algorithm": one.algorithm,
                **one.summary,
                "rounds": len(one.model.history),
                "seconds": one.seconds,
                "lr": one.tuning.best if one.tuning else None,
                "tuning": one.tuning.record() if one.tuning else None,
                **({"clients": one.accuracies()} if clients else {}),
            }
            for one in self.contestants
        ]

    def write(self, folder: Path) -> Path:
        """Write ``comparison.json`` into a folder, with the accuracy of every client."""
        path = RunFolder(folder).comparison
        write_json(path, self.record(clients=True))
        return path


# ------------------------------------------------------------------ methods


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
        algorithms: the methods.
        grid: learning rates to try for every method that has one; ``None`` keeps the given rate.
        tuning_rounds: rounds of a trial.
        options: training options of all methods.
        notify: called with a line before each step.
        **changes: fields of :class:`TrainingOptions` that replace those of ``options``.
    """
    from fedgmm.nets.networks import network

    result = Comparison()
    for algorithm in algorithms:
        chosen = replace(options or TrainingOptions(), algorithm=algorithm, **changes)
        if algorithm not in SHARED_LEARNERS:  # a client's own learners already know its labels
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


def tune(
    dataset: FederatedDataset,
    algorithm: str,
    *,
    grid: Sequence[float] = PAPER_GRID,
    rounds: int = 10,
    options: TrainingOptions | None = None,
    **changes: Any,
) -> Tuning:
    """Return the learning rate with the best validation log-likelihood. Test rows are not used.

    Args:
        dataset: the clients.
        algorithm: the method.
        grid: learning rates.
        rounds: rounds of the short run with each rate.
        options: the other options; the warm-up is shortened in proportion to the rounds.
        **changes: fields of :class:`TrainingOptions` that replace those of ``options``.
    """
    whole = options or TrainingOptions()
    short = replace(whole, warmup=whole.warmup * rounds // whole.rounds)
    scores: dict[float, float] = {}
    for lr in grid:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)
            model = train(
                dataset, algorithm, options=short, **{**changes, "lr": lr, "rounds": rounds}
            )
        pass_on_interrupt(model)
        scores[lr] = validation_score(model)
    if not any(map(math.isfinite, scores.values())):
        raise ValueError(
            f"{algorithm} diverged with every lr of the grid {tuple(grid)}; try smaller rates."
        )
    return Tuning(max(scores, key=lambda lr: scores[lr]), scores)


def pass_on_interrupt(model: FederatedModel) -> None:
    """Raise ``KeyboardInterrupt`` if Ctrl-C ended a run, because the whole series should end."""
    if model.stopped == INTERRUPTED:
        raise KeyboardInterrupt


def validation_score(model: FederatedModel) -> float:
    """Return the mean log-likelihood of validation labels; minus infinity if training diverged."""
    score = -math.inf if model.stopped else -model.evaluate("validation").mean_log_loss
    return -math.inf if math.isnan(score) else score


def validation_accuracy(model: FederatedModel) -> float:
    """Return the mean accuracy over clients on validation rows; minus infinity after divergence."""
    return -math.inf if model.stopped else model.evaluate("validation").mean_accuracy


# ------------------------------------------------------------------ rows


@dataclass(frozen=True)
class DataToCompare:
    """Rows that methods are compared on.

    Attributes:
        dataset: the rows.
        title: name of the data.
        options: training options of all methods.
        bayes: accuracy of the Bayes classifier, if it is known.
        home: run folder that the results belong to, if there is one.
        notes: remarks about the files.
    """

    dataset: FederatedDataset
    title: str
    options: TrainingOptions = field(default_factory=TrainingOptions)
    bayes: float | None = None
    home: Path | None = None
    notes: list[str] = field(default_factory=list)


def data_to_compare(
    sources: Sequence[str],
    *,
    label: str | None = None,
    client_column: str | None = None,
    categorical: Sequence[str] = (),
    ignore: Sequence[str] = (),
    seed: int | None = None,
    sizes: Mapping[str, int] | None = None,
    notify: Notify = lambda _: None,
) -> DataToCompare:
    """Load rows from files, from a run folder, or from built-in data.

    Args:
        sources: files, folders or patterns; or one run folder; or one of ``BUILT_IN``.
        label: column to predict, for files.
        client_column: column that names the client, for files.
        categorical: number columns whose values are names of groups, for files.
        ignore: columns to leave out, for files.
        seed: seed of the split and of training; ``None`` is the run's own seed, or 0.
        sizes: ``components`` and ``learners``, if they were given. Otherwise those of the run are used,
            and files choose them as ``fit`` does.
        notify: called with a line before each step.
    """
    given: dict[str, Any] = {**(sizes or {})}
    source = sources[0] if len(sources) == 1 else ""
    of_columns = [client_column, categorical, ignore]
    if source and RunFolder(Path(source)).is_run:
        if label or any(of_columns):
            raise ValueError(
                f"{source} is a run, which has its own label and columns; leave out --label, "
                "--client-column, --categorical and --ignore."
            )
        run = open_run(source)
        run.need_labels()
        options = replace(run.config.options(), algorithm="fedgmm", **given)
        options = options if seed is None else replace(options, seed=seed)
        return DataToCompare(run.data(notify), source, options, home=run.folder.home)
    if source in BUILT_IN and label is None:
        if any(of_columns):
            raise ValueError(
                f"{source} is built in and has no columns; leave out --client-column, --categorical "
                "and --ignore."
            )
        dataset, bayes = built_in_data(source, seed or 0)
        return DataToCompare(dataset, source, TrainingOptions(seed=seed or 0, **given), bayes)
    if label is None:
        raise ValueError("No label column was given; name it with --label COLUMN.")
    table = TableOptions(label, client_column, tuple(categorical), tuple(ignore), seed=seed or 0)
    dataset, _, tables = load_federation(sources, table, notify)
    options, _ = choose_sizes(
        TrainingOptions(standardise=False, seed=seed or 0, **given),
        ["covariance_type"],
        rows=len(dataset.train),
        columns=dataset.input_shape[0],
        score=local_score(dataset),
        sizes_given=bool(given),
        notify=notify,
    )
    return DataToCompare(dataset, "Files", options, notes=tables.notes)


def built_in_data(name: str, seed: int) -> tuple[FederatedDataset, float | None]:
    """Return a built-in data set and the accuracy of its Bayes classifier, if it is known."""
    if name == "digits":
        from fedgmm.data.examples import heterogeneous_digits

        return heterogeneous_digits(seed=seed).dataset, None
    from fedgmm.data.synthetic import synthetic

    federation = synthetic(60, 1000, seed=seed)
    return federation.dataset, federation.bayes_accuracy()
