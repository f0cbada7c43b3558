"""How frequent labels are at a client, and what that says of a row's label.

Clients that share what a class looks like, ``P(x|y, m)``, may still differ in how often they have it.
Then ``P_c(y|x, m) ∝ P(y|x, m) P_c(y|m) / P(y|m)``: the shared learner's answer, corrected by how much more
frequent a label is at the client than in the federation, for each pair ``m`` of a Gaussian and a learner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

PRIOR_ROWS = 10.0
"""How many rows of a client the federation's frequencies count for."""

_NO_ROWS = 1e-3  # keeps frequencies of labels that nobody has above zero


@dataclass(frozen=True)
class LabelFrequencies:
    """``P_c(y|m)`` of every client, and ``P(y|m)`` of the federation.

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


def label_frequencies(counts: Tensor) -> LabelFrequencies:
    """Frequencies from the expected rows of all clients, ``(C, M, K)``.

    ``P_c(y|m) = (n_c(m, y) + a P(y|m)) / (n_c(m) + a)``, with ``a`` rows' worth of the federation's.
    """
    total = counts.sum(0) + _NO_ROWS
    federation = total / total.sum(-1, keepdim=True)
    return LabelFrequencies(_frequencies(counts, federation), federation)


def expected_label_counts(
    log_joint: Tensor, federation: Tensor, max_rounds: int = 200, tol: float = 1e-6
) -> Tensor:
    """Labels of rows that have none, counted by EM: frequencies tell of labels, labels of frequencies.

    Args:
        log_joint: ``log P(m|x_i) + log P_m(y|x_i)`` under the federation's frequencies, ``(n, M, K)``.
        federation: ``P(y|m)``, ``(M, K)``, where EM starts and what it is drawn to.
        max_rounds: most iterations.
        tol: stop when no count changes by more rows than this.

    Returns:
        Expected rows of each pair and label, ``(M, K)``.
    """
    counts = torch.zeros_like(federation)
    for _ in range(max_rounds):
        ratios = _frequencies(counts, federation).log() - federation.log()
        before, counts = counts, (log_joint + ratios).flatten(1).softmax(1).sum(0).view_as(counts)
        if float((counts - before).abs().max()) < tol:
            break
    return counts


def _frequencies(counts: Tensor, federation: Tensor) -> Tensor:
    own = counts + PRIOR_ROWS * federation
    return own / own.sum(-1, keepdim=True)
