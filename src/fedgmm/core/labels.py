"""How frequent labels are at a client, and what that says of a row's label.

Clients that share what a class looks like, ``P(x|y, m)``, may still differ in how often they have it. A
pair ``m`` of a Gaussian and a learner answers with the frequencies of the federation in mind; then
``Σ_m P_c(m|x) P_m(y|x) P_c(y|m) / P(y|m)``, divided by its sum over labels, has those of the client. What
a learner has in mind, ``P(y|m)``, is the mean of its own answers, not a count of labels: where a label is
rare within a Gaussian the two differ by orders of magnitude, and their ratio would drown what it says.

A client's frequencies are drawn from a Dirichlet distribution around ``P(y|m)``. How far they lie from it
is learned from all clients: where these are alike, or have few rows for many labels, little is corrected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgmm.core.estep import responsibilities

_NO_ROWS = 1e-9  # for pairs that no row belongs to
_PRIORS = 10.0 ** torch.linspace(-1, 5, 61, dtype=torch.float64)  # tenths of a decade will do
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class LabelFrequencies:
    """``P_c(y|m)`` of every client, and ``P(y|m)`` that the learners have in mind.

    Attributes:
        clients: ``(C, M, K)``.
        federation: ``(M, K)``.
        prior_rows: ``a``, how many rows of a client the federation's frequencies count for.
        learners_tell: whether the learners' answers to a client's rows tell which labels it has.
    """

    clients: Tensor
    federation: Tensor
    prior_rows: float
    learners_tell: bool

    def log_ratios(self) -> Tensor:
        """``log P_c(y|m) - log P(y|m)`` of every client and, last, of nobody: ``(C + 1, M, K)``."""
        own = self.clients.log() - self.federation.log()
        return torch.cat([own, torch.zeros_like(self.federation)[None]])

    def of_counts(self, counts: Tensor) -> Tensor:
        """``P_c(y|m) = (n_c(m, y) + a P(y|m)) / (n_c(m) + a)`` of expected rows, ``(..., M, K)``."""
        own = counts + self.prior_rows * self.federation
        return own / own.sum(-1, keepdim=True)

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


def label_answers(log_joint: Tensor, log_y: Tensor, codes: Tensor, answers: Tensor) -> None:
    """Add ``Σ_i P(m1, m2|x_i) P_m2(y|x_i)``, the labels that learners expect, to ``answers``, in place.

    Args:
        log_joint: ``log π_c(m1, m2) + log N(x_i; μ_m1, Σ_m1)``, ``(n, M1, M2)``.
        log_y: ``log P_θm2(y|x_i)``, ``(n, M2, K)``.
        codes: of the clients, ``(n,)``.
        answers: ``(C, M, K)``.
    """
    asked, _ = responsibilities(log_joint.flatten(1))
    said = asked.view_as(log_joint).unsqueeze(-1) * log_y.exp().unsqueeze(1)
    answers.index_add_(0, codes, said.flatten(1, 2))


def label_frequencies(counts: Tensor, answers: Tensor) -> LabelFrequencies:
    """Frequencies from sums over rows.

    Args:
        counts: expected rows ``n_c(m, y)`` of all clients, ``(C, M, K)``.
        answers: the labels that learners expect of them, ``(C, M, K)``.
    """
    total = answers.sum(0) + _NO_ROWS
    federation = total / total.sum(-1, keepdim=True)
    found = LabelFrequencies(counts, federation, prior_rows(counts, federation), False)
    # are the labels that there are likelier by the answers to a client's rows than by those to all?
    gain = (counts * (found.of_counts(answers).log() - federation.log())).sum()
    return replace(found, clients=found.of_counts(counts), learners_tell=bool(gain > 0))


def prior_rows(counts: Tensor, federation: Tensor) -> float:
    """``a`` of the Dirichlet distributions ``Dir(a P(·|m))`` under which the counts are most likely.

    It is large where clients have the federation's frequencies, and small where they have their own.

    Args:
        counts: expected rows ``n_c(m, y)``, ``(C, M, K)``.
        federation: ``P(y|m)``, ``(M, K)``.
    """
    rows = counts.sum(-1)

    def log_likelihood(prior: Tensor) -> float:
        drawn = prior * federation
        labels = (torch.lgamma(counts + drawn) - torch.lgamma(drawn)).sum()
        return float(labels - (torch.lgamma(rows + prior) - torch.lgamma(prior)).sum())

    return float(max(_PRIORS.to(counts.device), key=log_likelihood))


def guessed_labels(
    labels: LabelFrequencies, log_joint: Tensor, log_y: Tensor, rounds: int
) -> Tensor:
    """Expected rows of each label at a client that does not tell any, ``(M, K)``: a few EM iterations.

    ``P_c(x) ∝ Σ_m π_c(m) N(x; μ_m1, Σ_m1) Σ_y P_m2(y|x) P_c(y|m) / P(y|m)``: what the learners say of its
    rows tells which labels it has, starting from the federation's. EM goes far in few iterations where
    learners know the labels, and hardly moves where they do not; many would make much of their errors.

    Args:
        labels: of the federation.
        log_joint: ``log π_c(m1, m2) + log N(x_i; μ_m1, Σ_m1)``, ``(n, M1, M2)``.
        log_y: ``log P_θm2(y|x_i)``, ``(n, M2, K)``.
        rounds: how many iterations.
    """
    rows = torch.zeros_like(labels.federation)
    for _ in range(rounds):
        log_ratios = labels.of_counts(rows).log() - labels.federation.log()
        log_ratios = log_ratios.view(*log_joint.shape[1:], -1)
        rows = torch.zeros_like(rows)
        for joint, said in zip(
            *(torch.split(x, _ROWS_AT_ONCE) for x in (log_joint, log_y)), strict=True
        ):
            pairs = joint.unsqueeze(-1) + said.unsqueeze(1) + log_ratios
            q, _ = responsibilities(pairs.flatten(1))
            rows += q.sum(0).view_as(rows)
    return rows
