"""What fitted Gaussians and learners say of rows that are ready for them: scaled, on their device.

Names, labels as the user writes them and the original units are the model's business, not known here.
Shapes: ``n`` rows, ``C`` clients, ``M1`` Gaussians, ``M2`` learners, ``K`` classes. A client's code is
its place among the model's; the last row of what is said of clients belongs to nobody, code ``-1``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.core.gaussians import log_densities, residuals
from fedgmm.core.params import Params
from fedgmm.core.predictive import log_class_probabilities, log_marginal
from fedgmm.core.streaming import Block, accumulate, blocks_of
from fedgmm.methods.base import Prediction, count_learners
from fedgmm.nets.networks import as_numbers

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

ROWS_AT_ONCE = 4096


# ---------------------------------------------------------------------- the terms of equation (3)


def log_weights(prediction: Prediction) -> Tensor:
    """``log π`` of every client and, last, of the federation: ``(C + 1, M1, M2)``.

    A client that is assigned to a learner has all its weight there, ``M1 = 1``.
    """
    if prediction.assignment is not None:
        places = torch.arange(count_learners(prediction), device=prediction.assignment.device)
        return (_assigned(prediction)[:, None] == places).double().log()[:, None]
    assert prediction.client_weights is not None
    assert prediction.weights is not None
    table = torch.cat([prediction.client_weights, prediction.weights[None]])
    return table.log().reshape(len(table), -1, count_learners(prediction))


def log_gaussians(prediction: Prediction, seen: Tensor) -> Tensor | None:
    """``log N(x_i; μ_m1, Σ_m1)`` in scaled coordinates, ``(n, M1)``; ``None`` without Gaussians."""
    gaussians = prediction.gaussians
    if gaussians is None:
        return None
    # residuals are large: components × columns for each row
    parts = [
        log_densities(residuals(some, gaussians.means, torch.float64), gaussians)
        for some in torch.split(seen, ROWS_AT_ONCE)
    ]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def log_learners(prediction: Prediction, x: Tensor, learners: Params | None = None) -> Tensor:
    """``log P_θm2(y|x_i)`` of every class, ``(n, M2, K)`` float64; of all learners, or of some."""
    params = prediction.learners if learners is None else learners
    with torch.inference_mode():
        inputs = as_numbers(x, next(iter(params.values())).dtype)
        return torch.log_softmax(prediction.net.logits(params, inputs).double(), -1)


# ---------------------------------------------------------------------- what they make together


def log_density(prediction: Prediction, seen: Tensor, codes: IntArray) -> FloatArray:
    """``log P_c(x)`` in scaled coordinates, ``(n,)``; there must be Gaussians."""
    out = np.empty(len(seen))
    log_pi = log_weights(prediction)
    who = torch.from_numpy(codes).to(seen.device)

    def write(rows: slice) -> None:
        log_x = log_gaussians(prediction, seen[rows])
        assert log_x is not None
        out[rows] = log_marginal(log_pi[who[rows]], log_x).cpu().numpy()

    _in_blocks(len(seen), write, seen.device)
    return out


def mixed_classes(prediction: Prediction, x: Tensor, seen: Tensor, codes: IntArray) -> FloatArray:
    """``log P_c(y|x)`` of every class, ``(n, K)``, where learners are mixed."""
    out = np.empty((len(x), prediction.net.classes))
    log_pi, labels = log_weights(prediction), prediction.labels
    who = torch.from_numpy(codes).to(x.device)
    own: Tensor | None = None
    if labels is not None:  # of those who are there: there may be many more clients than rows
        present, place = torch.unique(who, return_inverse=True)
        own = labels.log_ratios(present).view(len(present), *log_pi.shape[1:], -1)

    def write(rows: slice) -> None:
        log_x, log_y = log_gaussians(prediction, seen[rows]), log_learners(prediction, x[rows])
        ratios = None if own is None else own[place[rows]]
        out[rows] = log_class_probabilities(log_pi[who[rows]], log_x, log_y, ratios).cpu().numpy()

    _in_blocks(len(x), write, x.device)
    return out


def assigned_classes(prediction: Prediction, x: Tensor, codes: IntArray) -> FloatArray:
    """The same by each client's own learner; by the default one for rows without a client."""
    learner_of = _assigned(prediction).cpu().numpy()[codes]
    out = np.empty((len(x), prediction.net.classes))
    order = np.argsort(learner_of, kind="stable")
    edges = np.flatnonzero(np.diff(learner_of[order])) + 1
    for rows in np.split(order, edges) if len(x) else ():
        place = int(learner_of[rows[0]])
        learner = {name: value[place : place + 1] for name, value in prediction.learners.items()}
        answers = log_learners(prediction, x[torch.from_numpy(rows)], learner)[:, 0]
        if prediction.labels is not None:
            own = prediction.labels.log_ratios(torch.from_numpy(codes[rows]).to(x.device))
            answers = torch.log_softmax(answers + own[:, place], -1)
        out[rows] = answers.cpu().numpy()
    return out


def _assigned(prediction: Prediction) -> Tensor:
    """The learner of every client and, last, of rows without one: ``(C + 1,)``; -1 is nobody."""
    assignment, default = prediction.assignment, prediction.default_learner
    assert assignment is not None
    return torch.cat([assignment, assignment.new_tensor([-1 if default is None else default])])


def _in_blocks(rows: int, write: Callable[[slice], None], device: torch.device) -> None:
    """Call ``write`` for runs of rows that keep temporaries small, on all threads."""

    def visit(_: None, block: Block) -> None:
        write(slice(block[1], block[2]))

    accumulate(blocks_of([rows], ROWS_AT_ONCE), lambda: None, visit, device)
