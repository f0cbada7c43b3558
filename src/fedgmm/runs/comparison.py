"""Comparison of several methods on the same rows, each tuned alike on validation rows.

Every method is tried with every kind of learner. A learning rate is chosen in two steps: all rates of a
grid, which grows while its best rate is at an edge, are tried for a quarter of the rounds; then the best of
them and its neighbours are trained in full, until no neighbour is better. Validation rows decide at each
step and between the learners. Test rows are used once, at the end.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedgmm.core.predictive import NumberPredictions
from fedgmm.data.dataset import FederatedDataset, LabelledRows
from fedgmm.data.tables.loading import load_federation
from fedgmm.data.tables.preprocessing import TableOptions
from fedgmm.methods.base import SHARED_LEARNERS, TITLES
from fedgmm.model.metrics import Evaluation, evaluate, evaluate_numbers
from fedgmm.model.model import FederatedModel
from fedgmm.runs.fitting import usual_pca
from fedgmm.runs.folder import RunFolder, finite
from fedgmm.runs.run import open_run
from fedgmm.training.build import solver_of
from fedgmm.training.in_process import INTERRUPTED, DivergenceWarning, train
from fedgmm.training.options import ALGORITHMS, TrainingOptions
from fedgmm.training.selection import choose_sizes, local_score, noise_in
from fedgmm.wording import counted

BUILT_IN = ("digits", "synthetic")

LEARNERS = ("linear", "mlp")
"""Kinds of learners that every method is tried with."""

LEARNER_TITLES = {"linear": "linear", "mlp": "MLP"}

PAPER_GRID = tuple(10.0**exponent for exponent in (-0.5, -1.0, -1.5, -2.0, -2.5, -3.0))
"""Learning rates of the paper."""

POOLED = ("logistic", "boosting")
"""Logistic regression and gradient boosting on the rows of all clients together, for orientation. Numbers
have ridge regression in place of the first."""

_SMALLEST_RATE, _LARGEST_RATE = 1e-5, 10.0  # a grid does not grow beyond them

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Tuning:
    """A learning rate that was chosen on validation rows."""

    best: float  # the chosen rate
    # mean validation log-likelihood of every rate after a short run; minus infinity if
    # training diverged
    scores: dict[float, float]
    # the same after all rounds, of the rates that were trained in full
    in_full: dict[float, float] = field(default_factory=dict)

    def record(self) -> dict[str, float | None]:
        """Return the score of every rate after a short run, for JSON; ``None`` after divergence."""
        return _by_rate(self.scores)


@dataclass(frozen=True)
class Contestant:
    """Result of one method."""

    algorithm: str  # name of the method
    learner: str  # kind of its learners
    model: FederatedModel  # trained with the chosen options
    evaluation: Evaluation  # metrics of every client on the test rows, at the last round
    score: float  # mean validation log-likelihood, by which the learner was chosen
    seconds: float  # duration of the final training run
    tuning: Tuning | None  # choice of the learning rate; ``None`` if there was none to choose
    others: tuple[Contestant, ...] = ()  # the same method with the other learners

    @property
    def summary(self) -> dict[str, float]:
        """Metrics over all clients."""
        return self.evaluation.summary()

    def record(self, clients: bool = False) -> dict[str, Any]:
        """Return plain values, for JSON; with ``clients`` also the accuracy, or RMSE, of every client."""
        tuning, found = self.tuning, self.evaluation
        values = found.metrics["rmse" if found.leading_metric == "rmse" else "accuracy"].tolist()
        by_client = dict(zip(map(str, found.clients), values, strict=True))
        return {
            "algorithm": self.algorithm,
            "learner": self.learner,
            **self.summary,
            "validation_log_likelihood": finite(self.score),
            "rounds": len(self.model.history),
            "seconds": self.seconds,
            "lr": tuning.best if tuning else None,
            "tuning": tuning.record() if tuning else None,
            "tuning_in_full": _by_rate(tuning.in_full) if tuning else None,
            **({"clients": by_client} if clients else {}),
            **({"others": [one.record() for one in self.others]} if self.others else {}),
        }


def _by_rate(scores: Mapping[float, float]) -> dict[str, float | None]:
    """Return scores of learning rates, for JSON; ``None`` after divergence."""
    return {str(lr): finite(score) for lr, score in scores.items()}


@dataclass(frozen=True)
class Comparison:
    """Results of all methods on one split of the rows, in the order of their runs."""

    contestants: list[Contestant] = field(default_factory=list)  # one per method
    test_per_training_row: float = 0.0  # number of test rows over that of training rows
    # metrics of the models of ``POOLED``; empty if they were not asked for
    pooled: dict[str, Evaluation] = field(default_factory=dict)

    def record(self, clients: bool = False) -> list[dict[str, Any]]:
        """Return plain values, for JSON; with ``clients`` also the accuracy, or RMSE, of every client."""
        return [one.record(clients) for one in self.contestants]


# ------------------------------------------------------------------ methods


def compare(
    dataset: FederatedDataset,
    algorithms: Iterable[str] = ALGORITHMS,
    *,
    learner_kinds: Sequence[str] = LEARNERS,
    grid: Sequence[float] | None = PAPER_GRID,
    extend: bool = True,
    tuning_rounds: int | None = None,
    pooled: bool = False,
    options: TrainingOptions | None = None,
    notify: Notify = lambda _: None,
    **changes: Any,
) -> Comparison:
    """Tune and train each method, then evaluate its last round on the test rows.

    Args:
        dataset: the clients.
        algorithms: the methods.
        learner_kinds: kinds of learners to try with every method; validation rows choose among them.
        grid: learning rates to try for every method that has one; ``None`` keeps the given rate.
        extend: search beyond the edges of the grid, and among full runs. ``False`` is the paper's
            protocol: the best rate of the grid after short runs. A grid of one rate never grows.
        tuning_rounds: rounds of a short run; ``None`` is a quarter of the rounds.
        pooled: also train the models of ``POOLED``.
        options: training options of all methods.
        notify: called with a line before each step.
        **changes: fields of :class:`TrainingOptions` that replace those of ``options``.
    """
    contestants = []
    for algorithm in algorithms:
        tried = []
        for kind in learner_kinds:
            chosen = replace(
                options or TrainingOptions(), **{**changes, "algorithm": algorithm, "learner": kind}
            )
            if algorithm not in SHARED_LEARNERS:  # a client's own learners already know its labels
                chosen = replace(chosen, personal_labels=False)
            name = f"{TITLES[algorithm]}, {LEARNER_TITLES.get(kind, kind)}"

            def named(line: str, name: str = name) -> None:
                notify(f"{name}: {line}")

            tried.append(_train_tuned(dataset, chosen, grid, extend, tuning_rounds, named))
        best, *others = sorted(tried, key=lambda one: -one.score)  # the first kind wins ties
        contestants.append(replace(best, others=tuple(others)))
    references = {}
    if pooled and len(dataset.input_shape) == 1:
        notify("scikit-learn on the pooled rows")
        references = pooled_references(dataset)
    return Comparison(contestants, len(dataset.test) / len(dataset.train), references)


def _train_tuned(
    dataset: FederatedDataset,
    options: TrainingOptions,
    grid: Sequence[float] | None,
    extend: bool,
    tuning_rounds: int | None,
    notify: Notify,
) -> Contestant:
    """Choose the learning rate of a method, if it has one; see the top of the module for the search."""
    from fedgmm.nets.networks import network

    def trained(options: TrainingOptions) -> Contestant:
        notify(f"training with rate {options.lr:.3g}")
        started = time.perf_counter()
        # without a warning if other rates are tried
        model = _trained(dataset, options, quiet=grid is not None and extend)
        seconds = time.perf_counter() - started
        score = validation_score(model) if len(dataset.validation) else 0.0
        found = model.evaluate("test")
        return Contestant(
            options.algorithm, str(options.learner), model, found, score, seconds, None
        )

    net = network(options.learner, dataset.input_shape, len(dataset.classes))
    mixture = options.algorithm in ("fedgmm", "fedem", "fedavg")
    exact = solver_of(options, net) == "newton" and mixture
    if grid is None or exact:
        return trained(options)
    short = max(1, options.rounds // 4) if tuning_rounds is None else tuning_rounds
    tuning = tune(dataset, options, grid=grid, rounds=short, extend=extend, notify=notify)
    best = trained(replace(options, lr=tuning.best))
    tried = {tuning.best: best.score}
    centre = None
    while extend and centre != best.model.options["lr"]:
        centre = best.model.options["lr"]
        for lr in neighbours(centre, {*tuning.scores, *tried}, len(grid) > 1):
            if lr not in tried:
                found = trained(replace(options, lr=lr))
                tried[lr] = found.score
                # after divergence only a smaller rate can help
                if (found.score, -lr) > (best.score, -best.model.options["lr"]):
                    best = found
    return replace(best, tuning=Tuning(best.model.options["lr"], tuning.scores, tried))


def tune(
    dataset: FederatedDataset,
    options: TrainingOptions,
    *,
    grid: Sequence[float] = PAPER_GRID,
    rounds: int = 10,
    extend: bool = True,
    notify: Notify = lambda _: None,
) -> Tuning:
    """Return the learning rate with the best validation log-likelihood. Test rows are not used.

    Args:
        dataset: the clients.
        options: the method and the other options; the warm-up is shortened like the rounds.
        grid: learning rates.
        rounds: rounds of the short run with each rate.
        extend: while the best rate is at an edge of the grid, try the next one beyond it.
        notify: called with a line before each short run.
    """
    short = replace(options, rounds=rounds, warmup=options.warmup * rounds // options.rounds)
    scores: dict[float, float] = {}
    wanted = list(dict.fromkeys(map(float, grid)))
    while wanted:
        for lr in wanted:
            notify(f"trying rate {lr:.3g} for {counted(rounds, 'round')}")
            scores[lr] = validation_score(_trained(dataset, replace(short, lr=lr)))
        best = max(scores, key=lambda lr: (scores[lr], -lr))
        beyond = neighbours(best, scores, extend and len(scores) > 1)
        wanted = [lr for lr in beyond if lr not in scores]
    if not any(map(math.isfinite, scores.values())):
        raise ValueError(
            f"{options.algorithm} diverged with every lr from {max(scores):g} to {min(scores):g}; "
            "scale the columns or limit gradients with clip_norm."
        )
    return Tuning(best, scores)


def neighbours(rate: float, rates: Iterable[float], extend: bool = True) -> list[float]:
    """Return the next smaller and the next larger rate.

    With ``extend``, a rate at the edge has a neighbour beyond it, at the distance of its neighbour
    within, between 1e-5 and 10.
    """
    known = sorted(rates)
    place = known.index(rate)
    found = known[max(place - 1, 0) : place] + known[place + 1 : place + 2]
    if extend and len(found) == 1:
        beyond = float(f"{rate * rate / found[0]:.12g}")  # 1 and not 1.0000000000000002
        if _SMALLEST_RATE <= beyond <= _LARGEST_RATE:
            found.append(beyond)
    return found


def _trained(
    dataset: FederatedDataset, options: TrainingOptions, quiet: bool = True
) -> FederatedModel:
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore", DivergenceWarning)
        model = train(dataset, options=options)
    pass_on_interrupt(model)
    return model


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


def pooled_references(dataset: FederatedDataset) -> dict[str, Evaluation]:
    """Train scikit-learn's models on the training rows of all clients together.

    They see what a federation cannot, so they are no part of a ranking. They do not know the client of
    a row. Numbers have normal noise with the variance of the training errors.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def arrays(rows: LabelledRows) -> tuple[NDArray[Any], NDArray[Any]]:
        return rows.inputs.cpu().numpy(), rows.labels.cpu().numpy()

    numbers = dataset.target is not None
    linear = Ridge() if numbers else LogisticRegression(max_iter=1000)
    boosting = HistGradientBoostingRegressor if numbers else HistGradientBoostingClassifier
    models = {
        "ridge" if numbers else POOLED[0]: make_pipeline(StandardScaler(), linear),
        POOLED[1]: boosting(random_state=0),
    }
    own_x, own_y = arrays(dataset.train)
    x, y = arrays(dataset.test)
    codes, names = dataset.test.codes.cpu().numpy(), dataset.test.names
    found: dict[str, Evaluation] = {}
    for name, model in models.items():
        model.fit(own_x, own_y)
        if numbers:
            mean = torch.from_numpy(np.asarray(model.predict(x), dtype=np.float64))[:, None]
            noise = torch.full_like(mean, ((own_y - model.predict(own_x)) ** 2).mean())
            predicted = NumberPredictions(torch.zeros_like(mean), mean, noise)
            found[name] = evaluate_numbers(predicted, torch.from_numpy(y), codes, names)
        else:
            log_proba = np.full((len(x), len(dataset.classes)), -np.inf)
            log_proba[:, model.classes_] = np.log(np.maximum(model.predict_proba(x), 1e-300))
            classes = tuple(dataset.classes.tolist())
            found[name] = evaluate(log_proba, y, codes, names, classes=classes)
    return found


# ------------------------------------------------------------------ rows


@dataclass(frozen=True)
class DataToCompare:
    """Rows that methods are compared on."""

    dataset: FederatedDataset  # the rows
    title: str  # name of the data
    options: TrainingOptions  # training options of all methods
    # returns the same data with another seed: another split, or another draw if built in
    again: Callable[[int], DataToCompare]
    bayes: float | None = None  # accuracy of the Bayes classifier, if it is known
    home: Path | None = None  # run folder that the results belong to, if there is one
    notes: list[str] = field(default_factory=list)  # remarks about the files


def data_to_compare(
    sources: Sequence[str],
    *,
    seed: int | None = None,
    sizes: Mapping[str, int] | None = None,
    notify: Notify = lambda _: None,
    **table: Any,
) -> DataToCompare:
    """Load rows from files, from a run folder, or from built-in data.

    Args:
        sources: files, folders or patterns; or one run folder; or one of ``BUILT_IN``.
        seed: seed of the split and of training; ``None`` is the run's own seed, or 0.
        sizes: ``components`` and ``learners``, if they were given. Otherwise those of the run are used,
            and files choose them as ``fit`` does.
        notify: called with a line before each step.
        **table: fields of :class:`TableOptions`, for files.
    """
    given: dict[str, Any] = {**(sizes or {})}

    def again(seed: int) -> DataToCompare:
        return data_to_compare(sources, seed=seed, sizes=sizes, notify=notify, **table)

    source = sources[0] if len(sources) == 1 else ""
    if source and RunFolder(Path(source)).is_run:
        if table:
            raise ValueError(
                f"{source} is a run, which has its own label and columns; leave out --label and the "
                "options about columns and files."
            )
        run = open_run(source)
        run.need_labels()
        options = replace(run.config.options(), algorithm="fedgmm", refit=False, **given)
        dataset = run.data(notify) if seed is None else run.split_anew(seed, notify)
        options = options if seed is None else replace(options, seed=seed)
        return DataToCompare(dataset, source, options, again, home=run.folder.home)
    if source in BUILT_IN and "label" not in table:
        if table:
            raise ValueError(
                f"{source} is built in and has no columns; leave out the options about columns and files."
            )
        dataset, bayes = built_in_data(source, seed or 0)
        options = TrainingOptions(seed=seed or 0, **given)
        return DataToCompare(dataset, source, options, again, bayes)
    if "label" not in table:
        raise ValueError("No label column was given; name it with --label COLUMN.")
    reading = TableOptions(seed=seed or 0, **table)
    dataset, _, tables = load_federation(sources, reading, notify)
    pca = usual_pca(len(dataset.vectors), len(dataset.train))
    options, _ = choose_sizes(
        TrainingOptions(standardise=False, seed=seed or 0, pca=pca, **given),
        ["covariance_type", "ridge"],  # without refit, because validation rows compare the methods
        rows=len(dataset.train),
        columns=dataset.input_shape[0],
        score=local_score(dataset),
        noise=noise_in(dataset),
        sizes_given=bool(given),
        notify=notify,
    )
    return DataToCompare(dataset, "Files", options, again, notes=tables.notes)


def built_in_data(name: str, seed: int) -> tuple[FederatedDataset, float | None]:
    """Return a built-in data set and the accuracy of its Bayes classifier, if it is known."""
    if name == "digits":
        from fedgmm.data.examples import heterogeneous_digits

        return heterogeneous_digits(seed=seed).dataset, None
    from fedgmm.data.synthetic import synthetic

    federation = synthetic(60, 1000, seed=seed)
    return federation.dataset, federation.bayes_accuracy()
