"""Statistics of batch normalisation, recomputed for the final learners.

Clients train with the statistics of their own batches while their weights move; then the server averages
both. The averaged weights are another network than the one that the statistics describe, above all with
momentum at the server. So before prediction the clients recompute the statistics with the final weights.
Nothing is trained, and only sums leave the clients.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedgmm.core.params import Params, count_learners, is_statistic
from fedgmm.data.dataset import LabelledRows
from fedgmm.methods.base import Prediction
from fedgmm.nets.networks import OfModules, as_numbers
from fedgmm.nets.sgd import plan_batches

_ROWS_AT_ONCE = 512
_IMAGES_AT_ONCE = 4096
_BYTES_AT_ONCE = 512 * 1024 * 1024  # of copies of the learners, one per client


def recompute_statistics(prediction: Prediction, rows: LabelledRows) -> Prediction:
    """Return the prediction with running statistics of its own learners on the clients' training rows.

    The statistics of a learner are the mean over its clients, weighted by the rows that each client
    has for the learner. Networks without batch normalisation, and learners without clients, do not
    change.
    """
    net, learners = prediction.net, prediction.learners
    if not (isinstance(net, OfModules) and any(map(is_statistic, learners))):
        return prediction
    counts = rows.offsets.diff()
    own, shares = _learners_of_clients(prediction, counts)
    statistics = [name for name in learners if is_statistic(name)]
    totals = {name: torch.zeros_like(learners[name], dtype=torch.float64) for name in statistics}
    weight_of = counts.new_zeros(count_learners(learners), 1, dtype=torch.float64)
    there = counts.nonzero().flatten()
    everything = torch.arange(len(rows.inputs), device=rows.device)
    plan = plan_batches(rows.offsets, there, [everything], _ROWS_AT_ONCE, even=True)
    learner_bytes = sum(value[0].numel() * value.element_size() for value in learners.values())
    for step in plan.steps:
        clients, width = step.rows.shape
        # images need memory, and so do clients, because each has copies of its learners
        most = min(_IMAGES_AT_ONCE // width, _BYTES_AT_ONCE // learner_bytes) // own.shape[1]
        most = max(1, most)
        for first in range(0, clients, most):
            some = slice(first, min(first + most, clients))
            codes = plan.clients[some]
            seen = step.mask[some].sum(1)
            weights = (shares[codes] * (seen / counts[codes])[:, None]).flatten()[:, None]
            which = own[codes].flatten()
            params = {name: value[own[codes]] for name, value in learners.items()}
            images = rows.inputs[step.rows[some]]
            for name, value in _statistics(net, params, images, seen).items():
                totals[name].index_add_(0, which, weights * value.flatten(0, 1))
            weight_of.index_add_(0, which, weights)
    means = {
        name: torch.where(weight_of > 0, total / weight_of, learners[name]).to(learners[name].dtype)
        for name, total in totals.items()
    }
    return replace(prediction, learners={**learners, **means})


def _learners_of_clients(prediction: Prediction, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return each client's learners, ``(C, k)``, and the rows of each, ``(C, k)`` float64."""
    learners, rows = count_learners(prediction.learners), counts.double()[:, None]
    if prediction.assignment is None:
        assert prediction.client_weights is not None
        table = prediction.client_weights.to(rows)
        weights = table.reshape(len(rows), -1, learners).sum(1)
        return torch.arange(learners, device=rows.device).expand(len(rows), -1), rows * weights
    own = prediction.assignment.to(rows.device)[:, None]
    default = prediction.default_learner
    if default is not None and not (own == default).any():
        # the learner for rows without a client belongs to all clients
        own = torch.cat([own, torch.full_like(own, default)], 1)
    return own, rows.expand(own.shape)


def _statistics(net: OfModules, learners: Params, images: Tensor, counts: Tensor) -> Params:
    """Return means and variances of the learners' channels per client, ``(A, k, c)`` float64.

    ``learners`` are ``(A, k, ...)``; of ``images`` ``(A, n, ...)`` the first ``counts`` are used.
    """
    gpus = [images.device] if images.device.type != "cpu" else []
    # dropout draws from the global generator, which gets its own state back
    with torch.no_grad(), torch.random.fork_rng(gpus):
        torch.manual_seed(0)
        inputs = as_numbers(images, next(iter(learners.values())).dtype)
        _, found = net.forward(learners, inputs, training=True, counts=counts)
    return {name: value.double() for name, value in found.items()}
