"""Choice of covariances and of the numbers of Gaussians and learners from what clients can sum up."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedgmm.core.gaussians import CovarianceType
from fedgmm.data.dataset import FederatedDataset
from fedgmm.methods.base import DENSITY
from fedgmm.model.model import FederatedModel
from fedgmm.support.scratch import counts_of
from fedgmm.training.checkpoint import read_checkpoint
from fedgmm.training.in_process import INTERRUPTED, DivergenceWarning, train
from fedgmm.training.options import TrainingOptions
from fedgmm.wording import counted

Notify = Callable[[str], None]

Evidence = Literal["labels", "inputs"]

Score = Callable[[TrainingOptions, Evidence], float]
"""Trains with the options and returns the mean validation log-likelihood of the labels,
``log P_c(y|x)``, or of the inputs, ``log P_c(x)``; minus infinity if training diverged."""

_ROWS_PER_PARAMETER = 5.0
_WIDEST_FULL = 200  # columns
_PATIENCE = 2  # sizes without a gain before the search ends
_GAIN = 1e-3  # nats per row that a larger size must gain, however many rows there are
_NOISE = 1.0  # a larger size must also gain this over the square root of the training rows
_RIDGES = (1.0, 3.0, 10.0, 30.0)
_SMALL = 1_000_000  # numbers in the training rows; trials on fewer take well under a minute
_TRIAL_ROUNDS = 30
_FEW_ROWS = 1000  # validation rows; fewer choose by chance too often
_FOLDED_NOISE = 0.25  # of cross-validated scores: about one standard error of a difference
_FOLDS = 3  # parts of the training and validation rows that are held out in turn
_ALWAYS_ALLOWED = 10  # Gaussians or learners, even if there are fewer rows
_CANDIDATES = (1, 2, 3, 4, 5, 6, 8, 10)  # numbers of Gaussians and of learners

MOST_TRIALS = 2 * len(_RIDGES) + 3 * len(_CANDIDATES)
"""Largest number of short runs of :func:`choose_sizes`: two choices of ``ridge``, three searches."""


@dataclass(frozen=True)
class MixtureSelection:
    """Result of :func:`select_mixture`."""

    components: int  # ``M1``
    learners: int  # ``M2``
    # mean validation log-likelihood of each pair that was tried
    scores: dict[tuple[int, int], float]

    def record(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        tried: list[dict[str, Any]] = []
        for (m1, m2), score in self.scores.items():
            known = score if math.isfinite(score) else None
            tried.append({"components": m1, "learners": m2, "validation_log_likelihood": known})
        return {"components": self.components, "learners": self.learners, "tried": tried}


def choose_sizes(
    options: TrainingOptions,
    open_choices: Collection[str],
    *,
    rows: int,
    columns: int,
    score: Score | None = None,
    noise: float = 1.0,
    sizes_given: bool = True,
    notify: Notify = lambda _: None,
) -> tuple[TrainingOptions, MixtureSelection | None]:
    """Choose the options that were left open; also return the trials if there were any.

    If no size was given at all, only small data choose: a few hundred rows are easily divided among
    too many learners, and trials on them are quick. Otherwise the defaults stay.

    Args:
        options: the training options; open choices have their defaults, or are ``"auto"``.
        open_choices: any of ``"components"``, ``"learners"`` and ``"covariance_type"``; if trials are
            run, also ``"ridge"`` and ``"refit"``.
        rows: training rows of all clients.
        columns: columns of the inputs.
        score: runs one trial, see :data:`Score`; ``None`` if there are no validation rows.
        noise: see :func:`label_noise`.
        sizes_given: ``False`` if neither ``components`` nor ``learners`` was mentioned.
        notify: called with a line before each trial.
    """
    open_choices = {*open_choices, *options.open_sizes}
    defaults: dict[str, Any] = vars(TrainingOptions())
    options = replace(options, **{name: defaults[name] for name in options.open_sizes})
    components, learners = options.sizes
    if "covariance_type" in open_choices:
        kind = suitable_covariance(rows, columns, components)
        options = replace(options, covariance_type=kind)
    if sizes_given:  # other methods have no Gaussians, or a number of learners of their own
        try_components = "components" in open_choices and options.algorithm in ("fedgmm", DENSITY)
        try_learners = "learners" in open_choices and options.algorithm in ("fedgmm", "fedem")
        if (try_components or try_learners) and score is None:
            raise ValueError(
                "There are no validation rows to choose by; give the numbers of components and "
                "learners yourself, or keep validation rows (split)."
            )
    else:
        try_components = options.algorithm == "fedgmm" and rows * columns <= _SMALL
        try_learners = try_components
    found = None
    if score is not None and (try_components or try_learners):
        mixture = options.algorithm in ("fedgmm", "fedem")
        exact = mixture and options.learner == "linear" and options.solver != "sgd"
        try_ridge = exact and "ridge" in open_choices
        if try_ridge:  # under a weak penalty large sizes would fit too closely
            one = replace(options, components=1, learners=1)
            options = replace(options, ridge=_best_ridge(score, one, notify))
        found = select_mixture(
            score,
            options,
            components=None if try_components else components,
            learners=None if try_learners else learners,
            rows=rows,
            noise=noise,
            notify=notify,
        )
        if not sizes_given and found.learners == 1:
            # labels do not depend on the Gaussians then, but novelty needs more than one of them
            found = replace(found, components=max(found.components, components))
        options = replace(options, components=found.components, learners=found.learners)
        if try_ridge and found.learners > 1:
            options = replace(options, ridge=_best_ridge(score, options, notify))
        if exact and "refit" in open_choices:
            options = replace(options, refit=True)
    check_sizes(options, rows)
    return options, found


def with_sizes(
    options: TrainingOptions, dataset: FederatedDataset, checkpoint: Path | None, free: list[str]
) -> TrainingOptions:
    """Return the options with numbers in place of ``"auto"``; a run that resumes keeps its numbers.

    ``free`` options are chosen with the sizes.
    """
    rows, columns = len(dataset.train), dataset.train.features.columns
    if not options.open_sizes:
        check_sizes(options, rows)
        return options
    if checkpoint is not None and checkpoint.exists():
        stored = read_checkpoint(checkpoint).facts["options"]
        return replace(options, **{name: stored[name] for name in [*options.open_sizes, *free]})
    score, noise = local_score(dataset), noise_in(dataset)
    return choose_sizes(options, free, rows=rows, columns=columns, score=score, noise=noise)[0]


def check_sizes(options: TrainingOptions, rows: int) -> None:
    """Raise if there are more Gaussians or learners than training rows: they would learn nothing."""
    for name, size in zip(("components", "learners"), options.sizes, strict=True):
        if size > max(rows, _ALWAYS_ALLOWED):
            raise ValueError(
                f"{name}={size} is more than the {counted(rows, 'training row')}; ask for fewer."
            )


def select_mixture(
    score: Score,
    options: TrainingOptions,
    *,
    components: int | None = None,
    learners: int | None = None,
    candidates: Sequence[int] = _CANDIDATES,
    rows: int | None = None,
    noise: float = 1.0,
    notify: Notify = lambda _: None,
) -> MixtureSelection:
    """Choose ``M1`` and ``M2`` by the likelihood of validation rows after short runs.

    The runs have no ``patience``, in one process as over a federation, so the last round is scored.
    First both grow together until the score stops rising; then the number of learners is searched
    alone, and once more beside the smallest number of Gaussians, because clients may differ in their
    labels alone. Smaller numbers win ties, and differences that few rows make by chance count as ties.
    Numbers in ``options`` are not used, but ``components`` or ``learners`` may be given, and
    ``candidates`` are tried in their order. The other arguments are those of :func:`choose_sizes`.

    Labels decide, by ``log P_c(y|x)``, because the likelihood of the inputs keeps growing with more
    Gaussians if columns are categories. With one given learner the labels do not depend on the
    Gaussians, so the inputs decide, by ``log P_c(x)``; likewise without labels (``"gmm"``).
    """
    if not candidates:
        raise ValueError("candidates is empty; give at least one number.")
    options = _for_trials(options)
    if options.algorithm == DENSITY:
        learners = 1
    evidence: Evidence = "inputs" if learners == 1 else "labels"
    chance = _NOISE * (noise if evidence == "labels" else 1.0)
    gain = _GAIN if rows is None else max(_GAIN, chance / math.sqrt(rows))
    scores: dict[tuple[int, int], float] = {}

    def try_sizes(m1: int, m2: int) -> float:
        if (m1, m2) not in scores:
            notify(f"trying {counted(m1, 'Gaussian')} and {counted(m2, 'learner')}")
            scores[m1, m2] = score(replace(options, components=m1, learners=m2), evidence)
        return scores[m1, m2]

    most, both = max(candidates), components is None and learners is None
    if components is None:
        components = most = _climb(candidates, lambda m: try_sizes(m, learners or m), gain)
    if learners is None:
        chosen = components
        smaller = [m for m in candidates if m <= max(most, candidates[0])]
        learners = _climb(smaller, lambda m: try_sizes(chosen, m), gain)
    if both:
        first = min(candidates)
        alone = _climb(candidates, lambda m: try_sizes(first, m), gain)
        if try_sizes(first, alone) > try_sizes(components, learners) + gain:
            components, learners = first, alone
    try_sizes(components, learners)
    return MixtureSelection(components, learners, scores)


def label_noise(counts: Sequence[int] | NDArray[np.int64]) -> float:
    """Return how much log-likelihoods of labels vary by chance, relative to two balanced classes.

    They vary with the labels, whose variance is ``1 - Σ_k p_k²``: 1/2 for two balanced classes, and
    little if one class is rare. A rare class also limits what a larger size can gain, so without
    this factor no gain would be large enough. The result is at most 1. ``counts`` are the numbers of rows
    of each class; without classes there are fewer than two counts, and the result is 1.
    """
    if len(counts) < 2:
        return 1.0
    shares = np.asarray(counts) / np.sum(counts)
    return float(min(1.0, math.sqrt(2.0 * (1.0 - (shares**2).sum()))))


def noise_in(dataset: FederatedDataset) -> float:
    """Return :func:`label_noise` of all rows, or 1 for numbers; less if scores are cross-validated."""
    factor = _FOLDED_NOISE if _is_folded(dataset) else 1.0
    if dataset.target is not None:
        return factor
    splits = (dataset.train, dataset.validation, dataset.test)
    counts = [counts_of(rows.labels.cpu().numpy(), len(dataset.classes)) for rows in splits]
    return label_noise(np.sum(counts, axis=0)) * factor


def _for_trials(options: TrainingOptions) -> TrainingOptions:
    rounds = min(_TRIAL_ROUNDS, options.rounds)
    return replace(options, rounds=rounds, patience=None, refit=False)


def _best_ridge(score: Score, options: TrainingOptions, notify: Notify) -> float:
    """Return the penalty of exact steps under which the labels of validation rows are most likely."""
    options, scores = _for_trials(options), {}
    for ridge in _RIDGES:
        notify(f"trying ridge {ridge:g}")
        scores[ridge] = score(replace(options, ridge=ridge), "labels")
    return max(_RIDGES, key=lambda ridge: scores[ridge])


def _climb(candidates: Sequence[int], score: Callable[[int], float], gain: float) -> int:
    """Try candidates until the score stops rising; return the first within ``gain`` of the best."""
    found, best, behind = dict[int, float](), -math.inf, 0
    for candidate in candidates:
        found[candidate] = score(candidate)
        behind = 0 if found[candidate] > best else behind + 1
        best = max(best, found[candidate])
        if behind >= _PATIENCE:
            break
    return next(candidate for candidate in found if found[candidate] >= best - gain)


def suitable_covariance(rows: int, columns: int, components: int) -> CovarianceType:
    """Return ``"full"`` if there are enough rows for the parameters, otherwise ``"diag"``."""
    parameters = components * columns * (columns + 1) / 2
    enough = rows >= _ROWS_PER_PARAMETER * parameters
    return "full" if enough and columns <= _WIDEST_FULL else "diag"


def local_score(dataset: FederatedDataset) -> Score | None:
    """Return a score that trains in this process; ``None`` if there are no validation rows.

    Few validation rows would choose by chance. Then the score is cross-validated: training and validation
    rows of every client are dealt to folds, each of which is held out in turn.
    """
    if not len(dataset.validation):
        return None
    parts = _folds(dataset) if _is_folded(dataset) else [dataset]
    fewest = min(len(part.train) for part in parts)

    def score(options: TrainingOptions, evidence: Evidence) -> float:
        total = 0.0
        if options.pca is not None:  # a fold may have fewer rows than the training rows
            options = replace(options, pca=min(options.pca, fewest))
        for part in parts:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DivergenceWarning)
                model = train(part, options=options)
            if model.stopped == INTERRUPTED:
                raise KeyboardInterrupt
            if model.stopped:
                return -math.inf
            total += float(_held_out_scores(model, part, evidence).sum())
        return total / sum(len(part.validation) for part in parts)

    return score


def _is_folded(dataset: FederatedDataset) -> bool:
    return 0 < len(dataset.validation) < _FEW_ROWS and dataset.train.features_are_inputs


def _folds(dataset: FederatedDataset) -> list[FederatedDataset]:
    """Return data sets whose validation rows are in turn a third of each client's rows but test rows."""
    rows = dataset.train.join(dataset.validation)
    lots = np.random.default_rng(0).random(len(rows))
    order = torch.from_numpy(np.lexsort((lots, rows.codes.cpu().numpy())))
    fold = torch.empty_like(order)
    fold[order] = torch.arange(len(rows)) % _FOLDS
    fold = fold.to(rows.device)
    return [
        replace(dataset, train=rows.keep(fold != k), validation=rows.keep(fold == k), persons=None)
        for k in range(_FOLDS)
    ]


def _held_out_scores(
    model: FederatedModel, dataset: FederatedDataset, evidence: Evidence
) -> NDArray[np.float64]:
    """Return ``log P_c(y|x)``, or ``log P_c(x)``, of the validation rows, ``(n,)``."""
    rows = dataset.validation
    x, labels = rows.inputs.cpu().numpy(), dataset.labels_of(rows)
    own = None if rows.features_are_inputs else torch.cat(rows.features.chunks).cpu().numpy()
    if evidence == "inputs" and model.prediction.gaussians is not None:
        return model.score_samples(x, rows.owners, features=own)
    return model.log_conditional(x, labels, rows.owners, features=own)
