"""How frequent labels are at the clients of a fitted model, from their rows; nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgmm.core.em import add_likelihoods, responsibilities
from fedgmm.core.labels import (
    PRIORS,
    LabelFrequencies,
    label_answers,
    label_counts,
    label_frequencies,
    prior_scores,
)
from fedgmm.core.predictive import log_class_probabilities
from fedgmm.methods.base import Prediction
from fedgmm.model.adaptation import learn_from_answers
from fedgmm.model.likelihoods import ROWS_AT_ONCE, log_gaussians, log_learners, log_weights
from fedgmm.nets.learners import at_labels

_ASKED_CLIENTS = 100  # how many stand for newcomers; more would tell hardly more
_NEWCOMER_ROUNDS = 200
_SURE = 2.0  # standard errors by which clients have to gain


@dataclass(frozen=True)
class ClientLabels:
    """Labelled rows of clients.

    Attributes:
        x: rows as learners see them, ``(n, *shape)``.
        seen: as the Gaussians see them, ``(n, d)``.
        labels: their classes, ``(n,)``.
        codes: of their clients, ``(n,)``.
    """

    x: Tensor
    seen: Tensor
    labels: Tensor
    codes: Tensor

    def take(self, which: slice | Tensor) -> ClientLabels:
        """Some of the rows."""
        return ClientLabels(self.x[which], self.seen[which], self.labels[which], self.codes[which])

    def parts(self) -> Iterator[ClientLabels]:
        """A few rows at a time."""
        for start in range(0, len(self.x), ROWS_AT_ONCE):
            yield self.take(slice(start, start + ROWS_AT_ONCE))


def count_labels(
    prediction: Prediction, rows: ClientLabels, held: ClientLabels | None = None
) -> LabelFrequencies:
    """``P_c(y|m)`` of clients, see :mod:`fedgmm.core.labels`; of those without rows it stays as it is.

    Args:
        prediction: learners of labels, mixed or assigned.
        rows: whose labels are counted.
        held: rows that decide how much that counts, and whether newcomers' labels can be guessed;
            ``None`` means ``rows``, each of them left out of the counts while it is asked.
    """
    log_pi, before = log_weights(prediction), prediction.labels
    counts = log_pi.new_zeros(len(log_pi) - 1, log_pi[0].numel(), prediction.net.classes)
    answers = torch.zeros_like(counts[0])
    for part in rows.parts():
        joint, log_y = _terms(prediction, log_pi, part)
        answers += label_answers(joint, log_y)
        label_counts(_responsible(joint, log_y, part.labels), part.labels, part.codes, counts)
    if before is not None:  # what was decided by the first count stays
        present = counts.sum((1, 2))[:, None, None] > 0
        own = before.of_counts(counts)
        return replace(before, clients=torch.where(present, own, before.clients))

    found = label_frequencies(counts, answers, PRIORS[0])
    asked = held or rows
    prior = _best_prior(prediction, found, counts, asked, leave_out=held is None)
    found = label_frequencies(counts, answers, prior)
    return replace(found, guess_rows=_guess_rows(replace(prediction, labels=found), asked))


def _best_prior(
    prediction: Prediction,
    labels: LabelFrequencies,
    counts: Tensor,
    rows: ClientLabels,
    *,
    leave_out: bool,
) -> float:
    """The one of ``PRIORS`` with which labels of rows are likeliest.

    Args:
        prediction: learners of labels.
        labels: whose ``P(y|m)`` counts.
        counts: expected rows ``n_c(m, y)``, ``(C, M, K)``.
        rows: which are asked.
        leave_out: whether they were counted, and are left out one by one.
    """
    log_pi = log_weights(prediction)
    scores = log_pi.new_zeros(len(PRIORS))
    for part in rows.parts():
        joint, log_y = _terms(prediction, log_pi, part)
        own = counts[part.codes]
        if leave_out:
            place = torch.arange(len(own), device=own.device)
            own[place, :, part.labels] -= _responsible(joint, log_y, part.labels)
            own.clamp_min_(0.0)
        scores += prior_scores(labels, own, joint, log_y, part.labels)
    return PRIORS[int(scores.argmax())]


def _guess_rows(prediction: Prediction, rows: ClientLabels) -> float:
    """How many rows guessed labels may count for: as many as clients have here, if these would gain.

    Every client is taken for a newcomer without labels. Guesses that gain nothing for sure are not to be
    made: nobody would notice that they do harm.
    """
    labels = prediction.labels
    clients = torch.unique(rows.codes)
    asked = clients[:: 1 + (len(clients) - 1) // _ASKED_CLIENTS]
    if labels is None or prediction.client_weights is None or len(asked) < 2:
        return 0.0  # newcomers are for mixtures, and one client would tell nothing of others
    able = replace(prediction, labels=replace(labels, guess_rows=float(len(rows.x))))
    gains = []
    for code in asked:
        own = rows.take(rows.codes == code)
        log_x, log_y = log_gaussians(prediction, own.seen), log_learners(prediction, own.x)
        found = learn_from_answers(able, log_x, log_y, _NEWCOMER_ROUNDS)
        assert found.label_rows is not None
        shape = found.weights.shape
        ratios = labels.log_ratios_of(found.label_rows).view(*shape, -1)
        said = (found.weights.log().expand(len(own.x), *shape), log_x, log_y)
        gain = log_class_probabilities(*said, ratios) - log_class_probabilities(*said)
        gains.append(gain.gather(-1, own.labels[:, None]).mean())
    each = torch.stack(gains)
    if each.mean() < _SURE * each.std() / len(each) ** 0.5:
        return 0.0
    return len(rows.x) / len(clients)


def _terms(prediction: Prediction, log_pi: Tensor, rows: ClientLabels) -> tuple[Tensor, Tensor]:
    """``log π_c(m1, m2) + log N(x_i; μ_m1, Σ_m1)``, ``(n, M1, M2)``, and ``log P_θm2(y|x_i)``."""
    joint = add_likelihoods(log_pi[rows.codes], log_gaussians(prediction, rows.seen))
    return joint, log_learners(prediction, rows.x)


def _responsible(joint: Tensor, log_y: Tensor, labels: Tensor) -> Tensor:
    """``q_i(m)`` of rows with labels, ``(n, M)``."""
    with_labels = add_likelihoods(joint.clone(), None, at_labels(log_y, labels))
    return responsibilities(with_labels.flatten(1))[0]
