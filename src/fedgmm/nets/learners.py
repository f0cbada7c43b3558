"""The likelihood ``P_θ(y|x)`` of learners.

Clients train ``θ_mc`` in :mod:`fedgmm.nets.sgd`, and the server averages these to ``θ_m`` in
:func:`fedgmm.core.em.average_learners`. Exact steps of linear learners are in :mod:`fedgmm.core.newton`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fedgmm.core.gaussians import log_normal
from fedgmm.core.params import Params, count_learners
from fedgmm.nets.networks import SMALLEST_VARIANCE, Dense, Network
from fedgmm.support.linalg import matmul

_MAX_ACTIVATIONS = 512 * 1024 * 1024  # of the rows that shared learners evaluate in one block
_LARGER_ON_ACCELERATORS = 4
_TRAINING_FACTOR = 8  # training holds about this many times the activations of evaluation


def log_likelihoods(net: Network, params: Params, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return ``log P_θm(y_i|x_i)`` of every learner, ``(*C, n, M)``.

    Parameters are ``(*C, M, ...)``, inputs ``(*C, n, *shape)``, labels (class indices or numbers)
    ``(*C, n)``. Shared learners are evaluated in blocks of rows that fit in memory.
    """
    learners = count_learners(params)
    # activations_per_row is for training; evaluation needs a fraction of it
    most = _MAX_ACTIVATIONS * _TRAINING_FACTOR // (learners * net.activations_per_row)
    most *= 1 if inputs.device.type == "cpu" else _LARGER_ON_ACCELERATORS
    if inputs.dim() == len(net.input_shape) + 1 and len(inputs) > most:
        size = max(1, most)
        parts = [slice(first, first + size) for first in range(0, len(inputs), size)]
        return torch.cat([log_likelihoods(net, params, inputs[p], labels[p]) for p in parts])
    if isinstance(net, Dense) and not net.hidden and net.classes == 2:
        return _of_margins(class_margins(params, inputs), labels)
    return likelihoods_of_logits(net.logits(params, inputs), labels)


def likelihoods_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return ``log P(y_i|x_i)``, ``(*C, n, M)``, of logits ``(*C, n, M, K)`` and labels ``(*C, n)``."""
    if labels.is_floating_point():
        return at_labels(logits, labels)
    if logits.shape[-1] == 2:
        return _of_margins(logits[..., 1] - logits[..., 0], labels)
    return at_labels(torch.log_softmax(logits, dim=-1), labels)


def _of_margins(margins: Tensor, labels: Tensor) -> Tensor:
    """Return ``log P(y|x) = log σ(±(z₁ - z₀))``, faster than a softmax over two numbers."""
    return logsigmoid((margins * label_signs(labels, margins.dtype)).mT).mT


def dominance_parts(
    net: Network, params: Params, inputs: Tensor, labels: Tensor, curvature: bool
) -> Tensor:
    """Return the sizes of what each row adds to the gradient, per unit of the network, ``(n, M, k)``.

    The gradient of a unit's weights is ``Σ_i δ_i x_i``, and ``δ_i`` is the gradient of its bias.
    Parameters are ``(M, ...)``, inputs ``(n, *shape)``, labels ``(n,)``. ``curvature`` adds, for
    classes, ``1 - Σ_k p_k²`` as the last entry. The sizes are float64.
    """
    outputs = net.logits(params, inputs).double()
    if labels.is_floating_point():
        found = [(outputs[..., :1] - labels[:, None, None]).abs()]
    else:
        p = torch.softmax(outputs, -1)
        truth = torch.nn.functional.one_hot(labels, p.shape[-1])
        found = [(p - truth[:, None]).abs()]
        if curvature:
            found.append(1.0 - (p**2).sum(-1, keepdim=True))
    hidden = [name for name in params if name.endswith(".bias")][:-1]
    if hidden:
        others = {name: value for name, value in params.items() if name not in hidden}

        def loss(biases: Params, x: Tensor, y: Tensor) -> Tensor:
            own = likelihoods_of_logits(net.logits({**others, **biases}, x[None]), y[None])
            return own.sum()

        per_row = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        deltas = per_row({name: params[name] for name in hidden}, inputs, labels)
        found += [deltas[name].abs().double() for name in hidden]
    return torch.cat(found, -1)


def log_outputs(net: Network, params: Params, inputs: Tensor) -> Tensor:
    """Return what :func:`at_labels` needs, in float64.

    ``log P_θm(y|x_i)`` of every class, ``(n, M, K)``, or ``f_θm(x_i)`` and ``σ²_m``, ``(n, M, 2)``.
    """
    outputs = net.logits(params, inputs).double()
    return torch.log_softmax(outputs, -1) if net.classes else outputs


def largest_log_likelihood(net: Network) -> float:
    """Return the largest possible ``log P_θ(y|x)``: zero for classes, but not for a density."""
    return 0.0 if net.classes else -0.5 * math.log(2.0 * math.pi * SMALLEST_VARIANCE)


def at_labels(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """Select the labels' values: ``(*C, n, M, K)`` at labels ``(*C, n)`` gives ``(*C, n, M)``.

    Labels that are numbers get ``log N(y_i; f_θm(x_i), σ²_m)`` from outputs ``(*C, n, M, 2)``.
    """
    if labels.is_floating_point():
        return log_normal(labels.unsqueeze(-1), *log_probabilities.unbind(-1))
    index = labels[..., None, None].expand(*log_probabilities.shape[:-1], 1)
    return log_probabilities.gather(-1, index).squeeze(-1)


def class_margins(params: Params, inputs: Tensor) -> Tensor:
    """Return ``z₁ - z₀`` of linear learners of two classes, ``(*C, n, M)``.

    This is one product with the difference of the two weight vectors.
    """
    weight, bias = params["0.weight"], params["0.bias"]
    x = inputs.flatten(weight.dim() - 2)
    difference = weight[..., 1, :] - weight[..., 0, :]
    # rows are last in memory, so the operations that follow run along many rows, not a few learners
    products = matmul(difference, x.mT) if x.dim() > 2 else difference @ x.mT
    return (products + (bias[..., 1] - bias[..., 0]).unsqueeze(-1)).mT


def label_signs(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the labels 0 and 1 as ``-1`` and ``+1``, ``(*C, n, 1)``."""
    return (2 * labels - 1).to(dtype).unsqueeze(-1)
