"""How frequent labels are at a client, and what that says of a row's label.

Clients that share what a class looks like, ``P(x|y, m)``, may still differ in how often they have it. A
pair ``m`` of a Gaussian and a learner answers with the frequencies of the federation in mind; then
``Σ_m P_c(m|x) P_m(y|x) P_c(y|m) / P(y|m)``, divided by its sum over labels, has those of the client. What
a learner has in mind, ``P(y|m)``, is the mean of its own answers, not a count of labels: where a label is
rare within a Gaussian the two differ by orders of magnitude, and their ratio would drown what it says.

All of that rests on ``P(x|y, m)`` being shared. Where clients differ in something else, frequencies of
their own do harm; so how much they count is decided by rows that took no part in counting.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgmm.core.em import responsibilities
from fedgmm.core.predictive import log_class_probabilities

PRIORS: tuple[float, ...] = tuple(10.0 ** (power / 2) for power in range(10, -2, -1))
"""Rows of a client that the federation's frequencies may count for; the first changes nothing."""

_NO_ROWS = 1e-9  # for pairs that no row belongs to
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class LabelFrequencies:
    """``P_c(y|m)`` of every client, and ``P(y|m)`` that the learners have in mind.

    Attributes:
        clients: ``(C, M, K)``.
        federation: ``(M, K)``.
        prior_rows: ``a``, how many rows of a client the federation's frequencies count for.
        guess_rows: how many rows at most the guessed labels of a newcomer count for, see
            :func:`guessed_labels`; zero where guesses do not help.
    """

    clients: Tensor
    federation: Tensor
    prior_rows: float
    guess_rows: float = 0.0

    def log_ratios(self, codes: Tensor) -> Tensor:
        """``log P_c(y|m) - log P(y|m)`` of clients ``(n,)``: ``(n, M, K)``; nobody, code -1, has zeros."""
        own = self.clients[codes].log() - self.federation.log()
        return own.masked_fill_((codes < 0)[:, None, None], 0.0)

    def of_counts(self, counts: Tensor) -> Tensor:
        """``P_c(y|m) = (n_c(m, y) + a P(y|m)) / (n_c(m) + a)`` of expected rows, ``(..., M, K)``."""
        own = counts + self.prior_rows * self.federation
        return own / own.sum(-1, keepdim=True)

    def log_ratios_of(self, counts: Tensor) -> Tensor:
        """``log P_c(y|m) - log P(y|m)`` of expected rows, ``(..., M, K)``."""
        return self.of_counts(counts).log_().sub_(self.federation.log())

    def with_client(self, place: int | None, counts: Tensor | None) -> LabelFrequencies:
        """The same with another client, or with other frequencies for a known one.

        Args:
            place: the client's code; ``None`` puts it behind the others.
            counts: expected rows of its labels, ``(M, K)``; ``None`` means that they are not known.
        """
        nothing = torch.zeros_like(self.federation)
        own = self.of_counts((nothing if counts is None else counts)[None])
        if place is None:
            return replace(self, clients=torch.cat([self.clients, own]))
        clients = self.clients.clone()
        clients[place] = own[0]
        return replace(self, clients=clients)


def label_counts(q: Tensor, labels: Tensor, codes: Tensor, counts: Tensor) -> None:
    """Add the expected rows of each client, pair and label to ``counts``, in place.

    Args:
        q: responsibilities, ``(n, M)``.
        labels: ``(n,)``.
        codes: of the clients, ``(n,)``.
        counts: ``(C, M, K)``.
    """
    clients, pairs, classes = counts.shape
    place = codes * classes + labels
    flat = counts.new_zeros(clients * classes, pairs).index_add_(0, place, q.to(counts))
    counts += flat.reshape(clients, classes, pairs).mT


def label_answers(log_joint: Tensor, log_y: Tensor) -> Tensor:
    """``Σ_i P(m1, m2|x_i) P_m2(y|x_i)``: which labels the learners expect of rows, ``(M, K)``.

    Args:
        log_joint: ``log π_c(m1, m2) + log N(x_i; μ_m1, Σ_m1)``, ``(n, M1, M2)``.
        log_y: ``log P_θm2(y|x_i)``, ``(n, M2, K)``.
    """
    asked, _ = responsibilities(log_joint.flatten(1))
    return torch.einsum("nab,nbk->abk", asked.view_as(log_joint), log_y.exp()).flatten(0, 1)


def label_frequencies(counts: Tensor, answers: Tensor, prior_rows: float) -> LabelFrequencies:
    """Frequencies from sums over rows.

    Args:
        counts: expected rows ``n_c(m, y)`` of all clients, ``(C, M, K)``.
        answers: of the learners, over the rows of all clients, ``(M, K)``.
        prior_rows: how many rows of a client the federation's frequencies count for.
    """
    total = answers + _NO_ROWS
    found = LabelFrequencies(counts, total / total.sum(-1, keepdim=True), prior_rows)
    return replace(found, clients=found.of_counts(counts))


def prior_scores(
    labels: LabelFrequencies, counts: Tensor, log_joint: Tensor, log_y: Tensor, truth: Tensor
) -> Tensor:
    """``Σ_i log P_c(y_i|x_i)`` with each of ``PRIORS``, ``(P,)``; their best is to be taken.

    Args:
        labels: whose ``P(y|m)`` counts.
        counts: expected rows ``n_c(m, y)`` of each row's client, without the row, ``(n, M, K)``.
        log_joint: ``log π_c(m1, m2) + log N(x_i; μ_m1, Σ_m1)``, ``(n, M1, M2)``.
        log_y: ``log P_θm2(y|x_i)``, ``(n, M2, K)``.
        truth: ``y_i``, ``(n,)``.
    """
    shape = (*log_joint.shape, -1)

    def score(prior: float) -> Tensor:
        ratios = replace(labels, prior_rows=prior).log_ratios_of(counts).view(shape)
        found = log_class_probabilities(log_joint, None, log_y, ratios)
        return found.gather(-1, truth[:, None]).sum()

    return torch.stack([score(prior) for prior in PRIORS])


def guessed_labels(
    labels: LabelFrequencies, log_joint: Tensor, log_y: Tensor, rounds: int
) -> Tensor:
    """Expected rows of each label at a client that does not tell any, ``(M, K)``: a few EM iterations.

    ``P_c(x) ∝ Σ_m π_c(m) N(x; μ_m1, Σ_m1) Σ_y P_m2(y|x) P_c(y|m) / P(y|m)``: what the learners say of its
    rows tells which labels it has, starting from the federation's. EM goes far in few iterations where
    learners know the labels, and hardly moves where they do not; many would make much of their errors.
    So would many rows, where the learners' answers differ for another reason than labels: they count
    for no more than ``guess_rows``.

    Args:
        labels: of the federation.
        log_joint: ``log π_c(m1, m2) + log N(x_i; μ_m1, Σ_m1)``, ``(n, M1, M2)``.
        log_y: ``log P_θm2(y|x_i)``, ``(n, M2, K)``.
        rounds: how many iterations.
    """
    rows = torch.zeros_like(labels.federation)
    for _ in range(rounds):
        log_ratios = labels.log_ratios_of(rows).view(*log_joint.shape[1:], -1)
        rows = torch.zeros_like(rows)
        for joint, said in zip(
            *(torch.split(x, _ROWS_AT_ONCE) for x in (log_joint, log_y)), strict=True
        ):
            pairs = joint.unsqueeze(-1) + said.unsqueeze(1) + log_ratios
            q, _ = responsibilities(pairs.flatten(1))
            rows += q.sum(0).view_as(rows)
        rows *= min(1.0, labels.guess_rows / len(log_y))
    return rows
