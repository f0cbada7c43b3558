"""How frequent labels are at the clients of a fitted model, from their rows; nothing is trained."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedgmm.algorithms.base import Prediction
from fedgmm.core.estep import add_likelihoods, responsibilities
from fedgmm.core.labels import (
    LabelFrequencies,
    label_answers,
    label_counts,
    label_frequencies,
)
from fedgmm.core.learners import at_labels
from fedgmm.inference.likelihoods import ROWS_AT_ONCE, log_gaussians, log_learners, log_weights


def count_labels(
    prediction: Prediction, x: Tensor, seen: Tensor, labels: Tensor, codes: Tensor
) -> LabelFrequencies:
    """``P_c(y|m)`` of clients, see :mod:`fedgmm.core.labels`; of those without rows it stays as it is.

    Args:
        prediction: learners of labels, mixed or assigned.
        x: rows as learners see them, ``(n, *shape)``.
        seen: as the Gaussians see them, ``(n, d)``.
        labels: their classes, ``(n,)``.
        codes: of their clients, ``(n,)``.
    """
    log_pi, before = log_weights(prediction), prediction.labels
    pairs, classes = log_pi[0].numel(), prediction.net.classes
    counts = log_pi.new_zeros(len(log_pi) - 1, pairs, classes)
    answers = torch.zeros_like(counts)
    for start in range(0, len(x), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        log_y = log_learners(prediction, x[part])
        joint = add_likelihoods(log_pi[codes[part]], log_gaussians(prediction, seen[part]))
        label_answers(joint, log_y, codes[part], answers)
        add_likelihoods(joint, None, at_labels(log_y, labels[part]))
        q, _ = responsibilities(joint.flatten(1))
        label_counts(q, labels[part], codes[part], counts)
    if before is None:
        return label_frequencies(counts, answers)
    # what learners have in mind does not change by counting again
    present = counts.sum((1, 2))[:, None, None] > 0
    return replace(before, clients=torch.where(present, before.of_counts(counts), before.clients))
