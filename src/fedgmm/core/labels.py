"""Label frequencies of clients, and the correction of equation (3) by them.

Clients that share ``P(x|y, m)``, the inputs of a class, may still have the classes in different shares.
A pair ``m`` of a Gaussian and a learner predicts with the federation's label frequencies ``P(y|m)``, so
``Σ_m P_c(m|x) P_m(y|x) P_c(y|m) / P(y|m)``, normalised over labels, predicts with the client's own.
``P(y|m)`` is the mean of the learner's predictions and not a count of labels, because the two differ by
orders of magnitude for a label that is rare within a Gaussian, and their ratio would then decide alone.

This assumes that clients share ``P(x|y, m)``. If they share ``P(y|x, m)`` up to a factor of each label
instead, which is a constant in the logits, labels are compared with those that the learners expect from
the client's own inputs (``relative``). Both do harm where clients differ in something else, so rows that
were not counted decide which one is used, and how much a client's own frequencies count.

Shapes: ``n`` rows, ``C`` clients, ``M1`` Gaussians, ``M2`` learners, ``M = M1 · M2``, ``K`` classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgmm.core.em import responsibilities
from fedgmm.core.predictive import log_class_probabilities

PRIORS: tuple[float, ...] = tuple(10.0 ** (power / 2) for power in range(10, 0, -1))
"""Candidates for the rows that the federation's frequencies count for; the first is no correction.

None is below three, because otherwise a label that a client has not had yet would be nearly impossible.
"""

CANDIDATES = tuple((relative, prior) for relative in (False, True) for prior in PRIORS)
"""Candidates for ``relative`` and the prior."""

_TINY_COUNT = 1e-9  # keeps the frequencies of a pair without rows defined
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class LabelFrequencies:
    """``P_c(y|m)`` of every client, and the ``P(y|m)`` that the learners assume."""

    clients: Tensor  # ``P_c(y|m)``, ``(C, M, K)``
    federation: Tensor  # ``P(y|m)``, ``(M, K)``
    prior_rows: float  # ``a``, the number of rows that the federation's frequencies count for
    # the number of rows that the guessed labels of a new client count for at most, see
    # :func:`guess_label_counts`; zero where guesses do not help
    guess_rows: float = 0.0
    # whether labels are compared with those that learners expect from the client's own inputs
    relative: bool = False

    def log_ratios(self, codes: Tensor) -> Tensor:
        """Return ``log P_c(y|m) - log P(y|m)`` of clients ``(n,)``: ``(n, M, K)``; zero for code -1."""
        own = self.clients[codes].log() - self.federation.log()
        return own.masked_fill_((codes < 0)[:, None, None], 0.0)

    def from_counts(self, counts: Tensor, expected: Tensor | None = None) -> Tensor:
        """Return ``P_c(y|m) = (n_c(m, y) + a P(y|m)) / (n_c(m) + a)`` of counts ``(..., M, K)``.

        If ``relative``, and with the counts ``e_c(m, y)`` that learners expect,
        ``P_c(y|m) ∝ P(y|m) (n_c(m, y) + a P(y|m)) / (e_c(m, y) + a P(y|m))``: the same if these are
        ``n_c(m) P(y|m)``.
        """
        prior = self.prior_rows * self.federation
        own = counts + prior
        if self.relative and expected is not None:
            own = self.federation * own / (expected + prior)
        return own / own.sum(-1, keepdim=True)

    def log_ratios_from_counts(self, counts: Tensor, expected: Tensor | None = None) -> Tensor:
        """Return ``log P_c(y|m) - log P(y|m)`` of counts ``(..., M, K)``."""
        return self.from_counts(counts, expected).log_().sub_(self.federation.log())

    def with_client(
        self, code: int | None, counts: Tensor | None, expected: Tensor | None = None
    ) -> LabelFrequencies:
        """Return a copy with a new client (``code`` is ``None``), or with new frequencies of a known one.

        ``counts`` are ``n_c(m, y)``, ``(M, K)``; if they are unknown, the federation's frequencies
        are used. ``expected`` are those of :meth:`from_counts`.
        """
        counts = torch.zeros_like(self.federation) if counts is None else counts
        own = self.from_counts(counts[None], expected)
        if code is None:
            return replace(self, clients=torch.cat([self.clients, own]))
        clients = self.clients.clone()
        clients[code] = own[0]
        return replace(self, clients=clients)


def add_label_counts(counts: Tensor, q: Tensor, labels: Tensor, codes: Tensor) -> None:
    """Add expected rows ``n_c(m, y) = Σ_i q_i(m) [y_i = y]`` to ``counts``, ``(C, M, K)``, in place.

    ``q`` is ``(n, M)``; ``labels`` and the clients' ``codes`` are ``(n,)``.
    """
    clients, pairs, classes = counts.shape
    place = codes * classes + labels
    flat = counts.new_zeros(clients * classes, pairs).index_add_(0, place, q.to(counts))
    counts += flat.reshape(clients, classes, pairs).mT


def predicted_labels(log_joint: Tensor, log_y: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return ``w_i P(m1, m2|x_i) P_θm2(y|x_i)``, the labels that learners expect, ``(n, M, K)``.

    From ``log π_c(m1, m2) + log N(x_i; μ_m1, Σ_m1)``, ``(n, M1, M2)``, ``log P_θm2(y|x_i)``,
    ``(n, M2, K)``, and ``w_i``, ``(n,)``; ``None`` means one.
    """
    q, _ = responsibilities(log_joint.flatten(1))
    if weights is not None:
        q = q * weights[:, None].to(q)
    return (q.view_as(log_joint).unsqueeze(-1) * log_y.exp().unsqueeze(1)).flatten(1, 2)


def label_frequencies(
    counts: Tensor, expected: Tensor, prior_rows: float, *, relative: bool = False
) -> LabelFrequencies:
    """Return label frequencies from ``n_c(m, y)`` of all clients, ``(C, M, K)``.

    ``expected`` are the sums of :func:`predicted_labels` over each client's rows, ``(C, M, K)``, and the
    federation's frequencies count for ``prior_rows`` rows.
    """
    total = expected.sum(0) + _TINY_COUNT
    shared = total / total.sum(-1, keepdim=True)
    found = LabelFrequencies(counts, shared, prior_rows, relative=relative)
    return replace(found, clients=found.from_counts(counts, expected))


def prior_scores(
    frequencies: LabelFrequencies,
    counts: Tensor,
    expected: Tensor,
    log_joint: Tensor,
    log_y: Tensor,
    labels: Tensor,
) -> Tensor:
    """Return ``log P_c(y_i|x_i)`` of each row for each of ``CANDIDATES``, ``(P, n)``.

    ``counts`` and ``expected`` are those of each row's client, without the row itself, ``(n, M, K)``.
    ``log_joint`` and ``log_y`` are those of :func:`predicted_labels`, and ``labels`` are
    ``y_i``, ``(n,)``.
    """
    scores = []
    for relative, prior in CANDIDATES:
        own = replace(frequencies, prior_rows=prior, relative=relative)
        ratios = own.log_ratios_from_counts(counts, expected)
        ratios = ratios.view(*log_joint.shape, -1)
        log_proba = log_class_probabilities(log_joint, None, log_y, ratios)
        scores.append(log_proba.gather(-1, labels[:, None])[:, 0])
    return torch.stack(scores)


def guess_label_counts(
    frequencies: LabelFrequencies, log_joint: Tensor, log_y: Tensor, rounds: int
) -> Tensor:
    """Guess ``n_c(m, y)`` of a client without labels from the learners' predictions, ``(M, K)``.

    Run a few iterations of EM, starting from the federation's frequencies, on
    ``P_c(x) ∝ Σ_m π_c(m) N(x; μ_m1, Σ_m1) Σ_y P_θm2(y|x) P_c(y|m) / P(y|m)``. A few suffice where
    the learners are sure of the labels, and more would amplify their errors. The result counts for
    at most ``guess_rows`` rows, because many rows would amplify errors as well. ``log_joint`` and
    ``log_y`` are those of :func:`predicted_labels`.
    """
    counts = torch.zeros_like(frequencies.federation)
    for _ in range(rounds):
        log_ratios = frequencies.log_ratios_from_counts(counts).view(*log_joint.shape[1:], -1)
        counts = torch.zeros_like(counts)
        for first in range(0, len(log_y), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            pairs = log_joint[rows].unsqueeze(-1) + log_y[rows].unsqueeze(1) + log_ratios
            q, _ = responsibilities(pairs.flatten(1))
            counts += q.sum(0).view_as(counts)
        counts *= min(1.0, frequencies.guess_rows / len(log_y))
    return counts
