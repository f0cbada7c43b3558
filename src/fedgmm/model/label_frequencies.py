"""Label frequencies of the clients of a fitted model, estimated from their rows without training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgmm.core.em import add_likelihoods, responsibilities
from fedgmm.core.labels import (
    PRIORS,
    LabelFrequencies,
    add_label_counts,
    label_frequencies,
    predicted_label_counts,
    prior_scores,
)
from fedgmm.core.predictive import log_class_probabilities
from fedgmm.core.scratch import touched
from fedgmm.methods.base import Prediction
from fedgmm.model.adaptation import adapt_without_labels
from fedgmm.model.predictions import log_learners, log_weights
from fedgmm.nets.learners import at_labels

_ROWS_AT_ONCE = 4096
_BLOCK_BYTES = 4 * 1024 * 1024  # about as many are read from scratch files
_TRIED_CLIENTS = 100  # clients on which guesses are tried; more would hardly change the estimate
_TRIED_ROWS = 20_000  # of each of them
_ADAPTATION_ROUNDS = 200
_STANDARD_ERRORS = 2.0  # by which a mean gain must exceed zero


@dataclass(frozen=True)
class ClientLabels:
    """Labelled rows of clients.

    Attributes:
        x: scaled inputs of the learners, ``(n, *shape)``.
        log_x: ``log N(x_i; μ_m1, Σ_m1)``, ``(n, M1)``; ``None`` without Gaussians.
        labels: ``y_i``, ``(n,)``.
        codes: the client of each row, ``(n,)``.
        weights: how many rows each row counts for, ``(n,)``; ``None`` means one.
    """

    x: Tensor
    log_x: Tensor | None
    labels: Tensor
    codes: Tensor
    weights: Tensor | None = None

    def take(self, which: slice | Tensor) -> ClientLabels:
        """Return some of the rows."""
        touched(_BLOCK_BYTES)
        arrays = (self.x, self.log_x, self.labels, self.codes, self.weights)
        return ClientLabels(*(None if one is None else one[which] for one in arrays))  # type: ignore[arg-type]

    def blocks(self) -> Iterator[ClientLabels]:
        """Yield blocks of rows."""
        for start in range(0, len(self.x), _ROWS_AT_ONCE):
            yield self.take(slice(start, start + _ROWS_AT_ONCE))


def estimate_label_frequencies(
    prediction: Prediction,
    rows: ClientLabels,
    held_out: ClientLabels | None = None,
    *,
    if_better: bool = False,
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
    predicted = torch.zeros_like(counts[0])
    for block in rows.blocks():
        joint, log_y = _terms(prediction, log_pi, block)
        predicted += predicted_label_counts(joint, log_y, block.weights)
        q = _responsibilities(joint, log_y, block)
        add_label_counts(counts, q, block.labels, block.codes)
    if known is not None:
        present = counts.sum((1, 2))[:, None, None] > 0
        counted = known.from_counts(counts)
        return replace(known, clients=torch.where(present, counted, known.clients))

    judges = held_out or rows
    uncorrected = label_frequencies(counts, predicted, PRIORS[0])
    own = gains = _prior_gains(prediction, uncorrected, counts, judges, leave_out=held_out is None)
    if if_better and held_out is not None:
        gains = own + _prior_gains(prediction, uncorrected, counts, rows, leave_out=True)
    rows_seen, sums, squares = gains
    mean = sums / rows_seen
    scatter = (squares - sums * mean).clamp_min(0.0)
    error = (scatter / (rows_seen * (rows_seen - 1))).sqrt()
    best = int(mean.argmax())
    beyond_chance = mean[best] > _STANDARD_ERRORS * error[best]
    if if_better and not (own[1, best] > 0 and beyond_chance):
        return None
    found = label_frequencies(counts, predicted, PRIORS[best])
    return replace(found, guess_rows=_guess_rows(replace(prediction, labels=found), judges))


def _prior_gains(
    prediction: Prediction,
    frequencies: LabelFrequencies,
    counts: Tensor,
    rows: ClientLabels,
    *,
    leave_out: bool,
) -> Tensor:
    """Return rows, gains in ``log P_c(y|x)`` by each of ``PRIORS`` and squared gains, summed, ``(3, P)``.

    ``counts`` are ``n_c(m, y)``, ``(C, M, K)``; with ``leave_out`` the rows are among them, so each is left
    out of them.
    """
    log_pi = log_weights(prediction)
    sums = log_pi.new_zeros(3, len(PRIORS))
    for block in rows.blocks():
        joint, log_y = _terms(prediction, log_pi, block)
        own = counts[block.codes]
        if leave_out:
            place = torch.arange(len(own), device=own.device)
            own[place, :, block.labels] -= _responsibilities(joint, log_y, block)
            own.clamp_min_(0.0)
        scores = prior_scores(frequencies, own, joint, log_y, block.labels)
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
    clients = torch.nonzero(torch.bincount(rows.codes)).flatten()
    tried = clients[:: 1 + (len(clients) - 1) // _TRIED_CLIENTS]
    if labels is None or prediction.client_weights is None or len(tried) < 2:
        return 0.0  # only mixtures adapt, and the gain of one client has no standard error
    guessing = replace(prediction, labels=replace(labels, guess_rows=float(len(rows.x))))
    gains = []
    for code in tried:
        places = torch.nonzero(rows.codes == code).flatten()
        own = rows.take(places[:: 1 + (len(places) - 1) // _TRIED_ROWS])
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
