"""Weights ``π_c`` of new clients and label frequencies of all; shared parameters stay fixed.

The EM on ``π_c`` is :func:`fedgmm.core.predictive.new_client_weights`. This module chooses its prior.

Few rows say little about the weights of a client that joins a fitted model, so these are shrunk towards
the federation's. How strongly depends on how much the training clients differ, and on how well labels of
the new client are predicted from its other rows. Label frequencies are counted in the rows of the clients,
without training.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.core.em import add_likelihoods, responsibilities, towards_independence
from fedgmm.core.labels import (
    CANDIDATES,
    PRIORS,
    LabelFrequencies,
    add_label_counts,
    guess_label_counts,
    label_frequencies,
    predicted_labels,
    prior_scores,
)
from fedgmm.core.params import count_learners
from fedgmm.core.predictive import (
    log_class_probabilities,
    log_learner_weights,
    new_client_weights,
    prior_strength,
    shares_of_models,
)
from fedgmm.methods.base import Prediction
from fedgmm.model.predictions import EvaluatedRows, log_learners, log_weights
from fedgmm.nets.learners import at_labels
from fedgmm.support.scratch import counts_of, folder_of, row_blocks, stable_order, touched

_GUESS_ROUNDS = 3  # iterations that guess label frequencies
_RAISED = 1e-3  # share of the start that is uniform, because a weight of zero could never grow
_PRIOR_ROWS = 4.0  # of models without an estimate: a server does not know its clients' π
_STRONGER = 10.0  # factor of the second prior that is tried
_FOLDS = 10  # parts of the labelled rows that are left out in turn
_FOLD_ROUNDS = 30  # iterations without a part, which need not converge to the last digit
_MOST_FOLDED = 500  # labelled rows that decide between priors; with more the prior hardly matters
_UNCHANGED = 5e-3  # largest difference of weights that are called the same
_ROWS_AT_ONCE = 4096
_BLOCK_BYTES = 4 * 1024 * 1024  # about as many are read from scratch files
_APART_AT_ONCE = 500  # rows of scratch files that are far apart
_BYTES_AROUND = 64 * 1024  # that the system maps around each of them
_MOST_JUDGES = 20_000  # rows that decide between priors of label frequencies; a mean needs no more
_TRIED_CLIENTS = 100  # clients on which guesses are tried; more would hardly change the estimate
_TRIED_ROWS = 20_000  # of each of them
_ADAPTATION_ROUNDS = 200
_STANDARD_ERRORS = 2.0  # by which a mean gain must exceed zero


@dataclass(frozen=True)
class Adaptation:
    """The weights of a client that joined a fitted model.

    Attributes:
        client: name of the client.
        weights: ``π_c(m1, m2)``, ``(M1, M2)``.
        log_likelihoods: mean log-likelihood before each iteration.
        note: for the user if nothing could change, if nothing has, or if a known client has new weights;
            ``None`` otherwise.
    """

    client: Hashable
    weights: NDArray[np.float64]
    log_likelihoods: list[float]
    note: str | None = None


@dataclass(frozen=True)
class NewClient:
    """Everything that was learned about a client: weights and log-likelihoods as in :class:`Adaptation`."""

    weights: Tensor
    log_likelihoods: list[float]
    # expected rows ``n_c(m, y)``, ``(M1 · M2, K)``; ``None`` if unknown, or if the model has no
    # label frequencies
    label_counts: Tensor | None = None
    # labels that the learners expect from its inputs, ``(M1 · M2, K)``
    expected_labels: Tensor | None = None
    labelled: bool = False  # whether the counts come from given labels and not from guesses


def with_prior(prediction: Prediction, rows: Tensor) -> Prediction:
    """Return a mixture with the prior of new clients, from the spread of its clients with ``N_c`` rows."""
    weights = prediction.client_weights
    if weights is None or len(weights) < 2:  # one client says nothing about differences
        return prediction
    mean = _initial_weights(prediction).reshape(-1)
    return replace(prediction, prior_rows=prior_strength(weights * rows.to(weights)[:, None], mean))


def learn_client(rows: EvaluatedRows, labels: Tensor | None, max_rounds: int) -> NewClient:
    """Learn the weights of a client of a mixture from its rows, and from labels ``(n,)`` if it has any."""
    model, prediction = rows.model, rows.model.prediction
    log_y, known = None, prediction.labels
    if labels is not None or (known is not None and known.guess_rows > 0):  # or may be guessed
        log_y = log_learners(prediction, rows.x)
    if labels is None:
        if rows.log_x is None and log_y is None:
            raise ValueError(
                f"{model.algorithm} cannot adapt without labels: it has no density of the inputs and no "
                "label frequencies that can be guessed; pass y."
            )
        return adapt_without_labels(prediction, rows.log_x, log_y, max_rounds)
    assert log_y is not None
    if model.target is not None:
        labels = model.target.apply(labels, torch.float64)
    labels, independence = labels.to(rows.x.device), float(model.options.get("independence", 0.0))
    return adapt_with_labels(prediction, rows.log_x, log_y, labels, max_rounds, independence)


def adapt_without_labels(
    prediction: Prediction, log_x: Tensor | None, log_y: Tensor | None, max_rounds: int
) -> NewClient:
    """Learn the weights of the Gaussians; within each, learners keep the federation's shares.

    Label frequencies are guessed from ``log P_θm2(y|x_i)``, ``(n, M2, K)``; ``None`` leaves that out.
    """
    weights, history, counts = _initial_weights(prediction), list[float](), None
    if log_x is not None:
        weights, history = _by_inputs(prediction, log_x, max_rounds)
    if log_y is not None:
        assert prediction.labels is not None
        joint = add_likelihoods(weights.log().expand(len(log_y), -1, -1).clone(), log_x)
        rounds = min(max_rounds, _GUESS_ROUNDS)
        counts = guess_label_counts(prediction.labels, joint, log_y, rounds)
    return NewClient(weights, history, counts)


def _by_inputs(
    prediction: Prediction, log_x: Tensor, max_rounds: int, rows: Tensor | None = None
) -> tuple[Tensor, list[float]]:
    """Return ``π_c(m1) π(m2|m1)``, ``(..., M1, M2)``, with ``π_c(m1)`` learned from ``rows``."""
    start = _initial_weights(prediction)
    marginal, history = new_client_weights(
        log_x, start.sum(-1), max_rounds, strength=_prior_rows(prediction), rows=rows
    )
    return marginal[..., None] * start / start.sum(-1, keepdim=True), history


def adapt_with_labels(
    prediction: Prediction,
    log_x: Tensor | None,
    log_y: Tensor,
    labels: Tensor,
    max_rounds: int,
    independence: float,
) -> NewClient:
    """Learn all of ``π_c`` from labelled rows, and count their labels.

    Three fits are averaged: learners with the federation's shares in each Gaussian, own weights with a
    strong prior, and own weights with the prior of the training clients. Each counts for as much as it
    makes labels likely that were left out, so a client keeps the federation's learners unless its own
    labels speak against them. In the same way label frequencies count for as much as they help.

    ``log_y`` is ``log P_θm2(y|x_i)``, ``(n, M2, K)``; for numbers ``f_θm2(x_i)`` and ``σ²_m2``.
    ``independence`` is the prior that the other clients were trained with, in rows, see
    :func:`fedgmm.core.em.towards_independence`.
    """
    start, learners = _initial_weights(prediction), count_learners(prediction.learners)
    zeros = start.new_zeros(len(labels), *start.shape)
    log_likelihood = add_likelihoods(zeros, log_x, at_labels(log_y, labels)).flatten(1)
    strengths = start.new_tensor([_STRONGER, 1.0])[:, None] * _prior_rows(prediction)

    def pull(counts: Tensor) -> Tensor:
        return towards_independence(counts, learners, independence)

    pulled = pull if independence and log_x is not None else None

    def fit(rows: Tensor, rounds: int) -> tuple[Tensor, list[float]]:
        """Return the three fits to rows ``(F, n)`` of the first ``n``: ``(3, F, M)``."""
        first = slice(0, rows.shape[1])
        own, history = new_client_weights(
            log_likelihood[first],
            start.reshape(-1),
            rounds,
            strength=strengths,
            rows=rows.expand(len(strengths), *rows.shape),
            prior=pulled,
        )
        by_inputs = start.expand(len(rows), -1, -1)
        if log_x is not None:
            by_inputs, _ = _by_inputs(prediction, log_x[first], rounds, rows)
        return torch.cat([by_inputs.flatten(1)[None], own]), history

    fits, history = fit(start.new_ones(1, len(labels)), max_rounds)
    judges = slice(0, _MOST_FOLDED)
    fold = torch.arange(len(labels[judges]), device=start.device) % _FOLDS
    left_out = fold == torch.arange(int(fold.max()) + 1, device=start.device)[:, None]
    folded, _ = fit((~left_out).to(start), min(max_rounds, _FOLD_ROUNDS))
    folded = folded.reshape(3, len(left_out), *start.shape)

    def log_p(weights: Tensor, ratios: Tensor | None = None) -> Tensor:
        """Return ``log P(y_i|x_i)`` of the judging rows under the weights of each, ``(n, M1, M2)``."""
        some_x = None if log_x is None else log_x[judges]
        if labels.is_floating_point():
            own = log_learner_weights(weights.log(), some_x)
            return torch.logsumexp(own + at_labels(log_y[judges], labels[judges]), dim=-1)
        log_proba = log_class_probabilities(weights.log(), some_x, log_y[judges], ratios)
        return log_proba.gather(-1, labels[judges, None]).squeeze(-1)

    shares = shares_of_models(torch.stack([log_p(own[fold]) for own in folded], -1))
    own = torch.einsum("k,km->m", shares, fits[:, 0])
    if pulled is not None:
        own = pulled(len(labels) * own) / len(labels)
    counts = expected = None
    if prediction.labels is not None:
        q, _ = responsibilities(log_likelihood + own.log())
        counts = torch.zeros_like(prediction.labels.federation)
        add_label_counts(counts[None], q, labels, torch.zeros_like(labels))
        in_fold = counts.new_zeros(len(left_out), *counts.shape)
        add_label_counts(in_fold, q[judges], labels[judges], fold)
        joint = add_likelihoods(own.log().view_as(start).expand(len(labels), -1, -1).clone(), log_x)
        each = predicted_labels(joint[judges], log_y[judges])
        expected = each.sum(0)
        for some in row_blocks(len(labels) - len(each)):  # (n, M, K) of all rows may be large
            later = slice(some.start + len(each), some.stop + len(each))
            expected += predicted_labels(joint[later], log_y[later]).sum(0)
        others = expected - torch.zeros_like(in_fold).index_add_(0, fold, each)
        ratios = prediction.labels.log_ratios_from_counts(
            (counts - in_fold).clamp_min(0.0), others.clamp_min(0.0)
        )
        without = torch.einsum("k,kfab->fab", shares, folded)[fold]
        with_ratios = log_p(without, ratios.view(len(left_out), *start.shape, -1)[fold])
        share = shares_of_models(torch.stack([log_p(without), with_ratios], -1))[1]
        counts, expected = share * counts, share * expected
    return NewClient(own.reshape(start.shape), history, counts, expected, labelled=True)


def note_on(prediction: Prediction, client: NewClient) -> str | None:
    """Return a sentence if the client's predictions could not change, or did not; else ``None``."""
    assert prediction.weights is not None
    learners = client.weights.shape[1]
    if client.weights.numel() == 1 and prediction.labels is None:
        return (
            "Nothing can change: with one Gaussian and one learner there are no weights to learn. Train "
            "with several learners."
        )
    if learners == 1 and prediction.labels is None:
        return (
            "Predicted labels do not change, because there is one learner; only the density is the "
            "client's own. Train with several learners or with personal_labels."
        )
    change = (client.weights.reshape(-1) - prediction.weights).abs().max()
    if float(change) < _UNCHANGED and client.label_counts is None:
        return "Nothing has changed: the rows agree with the weights of the federation."
    return None


def with_client(prediction: Prediction, code: int | None, client: NewClient) -> Prediction:
    """Return a copy with a new client, or with new weights of the known client ``code``.

    A known client without labels keeps its label frequencies, because counts are better than guesses.
    """
    table, labels = prediction.client_weights, prediction.labels
    assert table is not None
    own = client.weights.reshape(-1)
    if code is None:
        table = torch.cat([table, own[None]])
    else:
        table = table.clone()
        table[code] = own
    if labels is not None and (code is None or client.labelled):
        labels = labels.with_client(code, client.label_counts, client.expected_labels)
    return replace(prediction, client_weights=table, labels=labels)


def _prior_rows(prediction: Prediction) -> float:
    return _PRIOR_ROWS if prediction.prior_rows is None else prediction.prior_rows


def _initial_weights(prediction: Prediction) -> Tensor:
    """Return the federation's weights, mixed with a few uniform ones, ``(M1, M2)``."""
    assert prediction.weights is not None
    weights = prediction.weights.reshape(-1, count_learners(prediction.learners))
    return (weights + _RAISED / weights.numel()) / (1.0 + _RAISED)


# ---------------------------------------------------------------------- label frequencies of known clients


@dataclass(frozen=True)
class ClientLabels:
    """Labelled rows of clients."""

    x: Tensor  # scaled inputs of the learners, ``(n, *shape)``
    log_x: Tensor | None  # ``log N(x_i; μ_m1, Σ_m1)``, ``(n, M1)``; ``None`` without Gaussians
    labels: Tensor  # ``y_i``, ``(n,)``
    codes: Tensor  # the client of each row, ``(n,)``
    weights: Tensor | None = None  # how many rows each row counts for, ``(n,)``; ``None`` means one

    def take(self, which: slice | Tensor) -> ClientLabels:
        """Return some of the rows."""
        arrays = (self.x, self.log_x, self.labels, self.codes, self.weights)
        return ClientLabels(*(None if one is None else _taken(one, which) for one in arrays))  # type: ignore[arg-type]

    def blocks(self, every: int = 1) -> Iterator[ClientLabels]:
        """Yield blocks of all rows, or of every k-th row."""
        step = every * _ROWS_AT_ONCE
        for start in range(0, len(self.x), step):
            yield self.take(slice(start, start + step, every))


def _taken(values: Tensor, which: slice | Tensor) -> Tensor:
    """Return some rows; rows of a file that are far apart are read in small parts."""
    if isinstance(which, slice) and (which.step or 1) == 1:
        touched(_BLOCK_BYTES)
    elif folder_of(values) is not None:
        if isinstance(which, slice):
            which = torch.arange(*which.indices(len(values)))
        parts = []
        for part in torch.split(which, _APART_AT_ONCE):
            parts.append(values[part])
            touched(_BYTES_AROUND * len(part))
        return torch.cat(parts)
    return values[which]


def estimate_label_frequencies(
    prediction: Prediction,
    rows: ClientLabels,
    held_out: ClientLabels | None,
    *,
    if_better: bool,
) -> LabelFrequencies | None:
    """Estimate ``P_c(y|m)`` of clients, see :mod:`fedgmm.core.labels`.

    Labels of ``rows`` are counted. A model that has label frequencies keeps its ``P(y|m)``, its prior, and
    the frequencies of clients without rows. For others ``held_out`` rows choose the prior and decide
    whether labels of new clients are guessed; ``None`` uses ``rows``, each left out of the counts of its
    client. With ``if_better`` the result is ``None`` unless labels become more likely beyond chance; then
    ``rows``, each left out, choose the prior as well, because held-out rows may be few. These must gain,
    too.
    """
    log_pi, known = log_weights(prediction), prediction.labels
    counts = log_pi.new_zeros(len(log_pi) - 1, log_pi[0].numel(), prediction.net.classes)
    expected = torch.zeros_like(counts)
    for block in rows.blocks():
        joint, log_y = _terms(prediction, log_pi, block)
        each = predicted_labels(joint, log_y, block.weights)
        expected.index_add_(0, block.codes, each.to(expected))
        q = _responsibilities(joint, log_y, block)
        add_label_counts(counts, q, block.labels, block.codes)
    if known is not None:
        present = counts.sum((1, 2))[:, None, None] > 0
        counted = known.from_counts(counts, expected)
        return replace(known, clients=torch.where(present, counted, known.clients))

    judges = held_out or rows
    uncorrected = label_frequencies(counts, expected, PRIORS[0])
    arguments = prediction, uncorrected, (counts, expected)
    own = gains = _prior_gains(*arguments, judges, leave_out=held_out is None)
    if if_better and held_out is not None:
        gains = own + _prior_gains(*arguments, rows, leave_out=True)
    rows_seen, sums, squares = gains
    mean = sums / rows_seen
    scatter = (squares - sums * mean).clamp_min(0.0)
    error = (scatter / (rows_seen * (rows_seen - 1))).sqrt()
    best = int(mean.argmax())
    beyond_chance = mean[best] > _STANDARD_ERRORS * error[best]
    if if_better and not (own[1, best] > 0 and beyond_chance):
        return None
    relative, prior = CANDIDATES[best]
    found = label_frequencies(counts, expected, prior, relative=relative)
    return replace(found, guess_rows=_guess_rows(replace(prediction, labels=found), judges))


def _prior_gains(
    prediction: Prediction,
    frequencies: LabelFrequencies,
    sums_of_clients: tuple[Tensor, Tensor],
    rows: ClientLabels,
    *,
    leave_out: bool,
) -> Tensor:
    """Return rows, gains in ``log P_c(y|x)`` by ``CANDIDATES`` and squared gains, summed, ``(3, P)``.

    Of many rows every k-th is visited. ``sums_of_clients`` are counted and expected labels, ``(C, M, K)``;
    with ``leave_out`` the rows are among them, so each is left out of them.
    """
    log_pi = log_weights(prediction)
    sums = log_pi.new_zeros(3, len(CANDIDATES))
    for block in rows.blocks(every=-(-len(rows.x) // _MOST_JUDGES)):
        joint, log_y = _terms(prediction, log_pi, block)
        own, expected = (one[block.codes] for one in sums_of_clients)
        if leave_out:
            place = torch.arange(len(own), device=own.device)
            own[place, :, block.labels] -= _responsibilities(joint, log_y, block)
            expected -= predicted_labels(joint, log_y, block.weights).to(expected)
            own.clamp_min_(0.0)
            expected.clamp_min_(0.0)
        scores = prior_scores(frequencies, own, expected, joint, log_y, block.labels)
        gain = scores - scores[0]
        gain = gain if block.weights is None else gain * block.weights.to(gain)
        sums += torch.stack([torch.ones_like(gain).sum(1), gain.sum(1), gain.square().sum(1)])
    return sums


def _guess_rows(prediction: Prediction, rows: ClientLabels) -> float:
    """Return the number of rows that guessed labels may count for; zero if guesses do not help.

    Known clients are treated as new ones without labels. Guesses are allowed only if these clients
    gain beyond chance, because harm to a client without labels could not be noticed.
    """
    labels = prediction.labels
    codes = rows.codes.cpu().numpy()
    counts = counts_of(codes, len(log_weights(prediction)))
    order, ends, clients = stable_order(codes, len(counts)), counts.cumsum(), counts.nonzero()[0]
    tried = clients[:: 1 + (len(clients) - 1) // _TRIED_CLIENTS]
    if labels is None or prediction.client_weights is None or len(tried) < 2:
        return 0.0  # only mixtures adapt, and the gain of one client has no standard error
    guessing = replace(prediction, labels=replace(labels, guess_rows=float(len(rows.x))))
    gains = []
    for code in tried:
        places = order[ends[code] - counts[code] : ends[code]]
        some = torch.from_numpy(places[:: 1 + (len(places) - 1) // _TRIED_ROWS])
        own = rows.take(some.to(rows.codes.device))
        log_y = log_learners(prediction, own.x)
        found = adapt_without_labels(guessing, own.log_x, log_y, _ADAPTATION_ROUNDS)
        assert found.label_counts is not None
        shape = found.weights.shape
        ratios = labels.log_ratios_from_counts(found.label_counts).view(*shape, -1)
        terms = (found.weights.log().expand(len(own.x), *shape), own.log_x, log_y)
        gain = log_class_probabilities(*terms, ratios) - log_class_probabilities(*terms)
        gains.append(gain.gather(-1, own.labels[:, None]).mean())
    gain = torch.stack(gains)
    if gain.mean() < _STANDARD_ERRORS * gain.std() / len(gain) ** 0.5:
        return 0.0
    return len(rows.x) / len(clients)


def _terms(prediction: Prediction, log_pi: Tensor, rows: ClientLabels) -> tuple[Tensor, Tensor]:
    """Return ``log π_c(m1, m2) + log N(x_i; μ_m1, Σ_m1)``, ``(n, M1, M2)``, and ``log P_θm2(y|x_i)``."""
    joint = add_likelihoods(log_pi[rows.codes], rows.log_x)
    return joint, log_learners(prediction, rows.x)


def _responsibilities(joint: Tensor, log_y: Tensor, rows: ClientLabels) -> Tensor:
    """Return ``q_i(m)`` of labelled rows times their weights, ``(n, M)``."""
    log_joint = add_likelihoods(joint.clone(), None, at_labels(log_y, rows.labels))
    q = responsibilities(log_joint.flatten(1))[0]
    return q if rows.weights is None else q * rows.weights[:, None].to(q)
