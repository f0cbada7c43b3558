"""How frequent labels are at a client, and what that says of a row's label.

Clients that share what a class looks like, ``P(x|y, m)``, may still differ in how often they have it. A
pair ``m`` of a Gaussian and a learner answers with the frequencies of the federation in mind; then
``Σ_m P_c(m|x) P_m(y|x) P_c(y|m) / P(y|m)``, divided by its sum over labels, has those of the client. What
a learner has in mind, ``P(y|m)``, is the mean of its own answers, not a count of labels: where a label is
rare within a Gaussian the two differ by orders of magnitude, and their ratio would drown what it says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgmm.core.estep import responsibilities

PRIOR_ROWS = 10.0
"""How many rows of a client the federation's frequencies count for."""

_NO_ROWS = 1e-9  # for pairs that no row belongs to


@dataclass(frozen=True)
class LabelFrequencies:
    """``P_c(y|m)`` of every client, and ``P(y|m)`` that the learners have in mind.

    Attributes:
        clients: ``(C, M, K)``.
        federation: ``(M, K)``.
    """

    clients: Tensor
    federation: Tensor

    def log_ratios(self) -> Tensor:
        """``log P_c(y|m) - log P(y|m)`` of every client and, last, of nobody: ``(C + 1, M, K)``."""
        own = self.clients.log() - self.federation.log()
        return torch.cat([own, torch.zeros_like(self.federation)[None]])

    def with_client(self, place: int | None, counts: Tensor | None) -> LabelFrequencies:
        """The same with another client, or with other frequencies for a known one.

        Args:
            place: the client's code; ``None`` puts it behind the others.
            counts: expected rows of its labels, ``(M, K)``; ``None`` means that they are not known.
        """
        nothing = torch.zeros_like(self.federation)
        own = _frequencies((nothing if counts is None else counts)[None], self.federation)
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


def label_frequencies(counts: Tensor, answers: Tensor) -> LabelFrequencies:
    """Frequencies from sums over rows.

    ``P_c(y|m) = (n_c(m, y) + a P(y|m)) / (n_c(m) + a)``, with ``a`` rows' worth of the federation's.

    Args:
        counts: expected rows ``n_c(m, y)`` of all clients, ``(C, M, K)``.
        answers: of the learners, over the rows of all clients, ``(M, K)``.
    """
    total = answers + _NO_ROWS
    return counted(counts, total / total.sum(-1, keepdim=True))


def counted(counts: Tensor, federation: Tensor) -> LabelFrequencies:
    """The same where ``P(y|m)`` is known already, ``(M, K)``."""
    return LabelFrequencies(_frequencies(counts, federation), federation)


def _frequencies(counts: Tensor, federation: Tensor) -> Tensor:
    own = counts + PRIOR_ROWS * federation
    return own / own.sum(-1, keepdim=True)
