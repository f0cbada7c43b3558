"""Small federations, and independent answers for learners: plain modules, one client at a time.

The loops use torch's own modules and optimisers or NumPy; nothing of fedgmm computes in them.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.synthetic import synthetic

FAST = {"rounds": 2, "components": 2, "learners": 2}
"""Options of a training that is over in no time."""

# ---------------------------------------------------------------------- data


def federation(rng, sizes=(3, 40, 17, 26), columns=3, classes=2, split=(0.6, 0.2, 0.2), shift=1.0):
    """Ragged clients whose rows and whose rule for labels differ; names are of no special order."""
    names = ["rome", "oslo", "bonn", "kiev", "riga", "bern", "lima", "cork", "graz"][: len(sizes)]
    clients = {}
    for name, size in zip(names, sizes, strict=True):
        x = rng.normal(size=(size, columns)) + shift * rng.normal(size=columns)
        y = (x @ rng.normal(size=(columns, classes))).argmax(-1)
        y[: min(size, classes)] = np.arange(min(size, classes))  # every class lives somewhere
        clients[name] = (x, y)
    return FederatedDataset.from_clients(clients, split=split)


def tiny(clients=6, rows=60, columns=3, seed=0, **options):
    """The paper's generator, small."""
    return synthetic(clients, rows, dimensions=columns, seed=seed, **options).dataset


def two_groups(rng, clients=6, rows=60, columns=4):
    """Half of the clients use the opposite labels: the planted groups of clustered learning."""
    v = rng.normal(size=columns)
    data = {}
    for c in range(clients):
        x = rng.normal(size=(rows, columns))
        data[f"c{c}"] = (x, ((x @ v > 0) ^ (c % 2 == 1)).astype(int))
    return FederatedDataset.from_clients(data)


def images(rng, clients=3, rows=24, size=8, classes=3):
    """Tiny pictures whose class is the quarter that is bright."""
    data = {}
    for c in range(clients):
        y = rng.integers(classes, size=rows)
        y[:classes] = np.arange(classes)
        x = 0.1 * rng.random((rows, 1, size, size))
        half = size // 2
        corners = [(0, 0), (0, half), (half, 0)]
        for i, label in enumerate(y):
            top, left = corners[label % 3]
            x[i, 0, top : top + half, left : left + half] += 1.0
        data[f"camera {c}"] = (x.astype(np.float32), y)
    return FederatedDataset.from_clients(data)


def rows_of(rows, code):
    """Inputs ``(N_c, d)`` and labels ``(N_c,)`` of one client, as NumPy arrays."""
    here = (rows.codes == code).numpy()
    return rows.inputs.numpy()[here], rows.labels.numpy()[here]


# ---------------------------------------------------------------------- learners


def module_of(widths):
    """Fully connected layers as a plain module."""
    layers = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def load_dense(module, params, *index):
    """Fill a plain module with the parameters ``params[...][index]`` of stacked dense learners."""
    linear = [layer for layer in module if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for i, layer in enumerate(linear):
            layer.weight.copy_(params[f"{i}.weight"][index])
            layer.bias.copy_(params[f"{i}.bias"][index])
    return module


def dense_params(module):
    """The parameters of a plain module under the names of stacked learners."""
    linear = [layer for layer in module if isinstance(layer, nn.Linear)]
    params = {}
    for i, layer in enumerate(linear):
        params[f"{i}.weight"] = layer.weight.detach().clone()
        params[f"{i}.bias"] = layer.bias.detach().clone()
    return params


def plain_sgd(
    module,
    x,
    y,
    batches,
    *,
    lr,
    momentum=0.0,
    weight_decay=0.0,
    proximal=0.0,
    clip_norm=None,
    weights=None,
):
    """Weighted SGD with torch's optimiser on one client's rows; ``batches`` are row numbers."""
    anchor = [value.detach().clone() for value in module.parameters()]
    optimiser = torch.optim.SGD(
        module.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay
    )
    for rows in batches:
        optimiser.zero_grad()
        losses = cross_entropy(module(x[rows]), y[rows], reduction="none")
        w = torch.ones(len(losses), dtype=x.dtype) if weights is None else weights[rows]
        ((w * losses).sum() / w.sum()).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        for value, start in zip(module.parameters(), anchor, strict=True):
            value.grad += proximal * (value.detach() - start)
        optimiser.step()
    return module


def batches_of(order, batch_size):
    """Row numbers cut into batches."""
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


def client_orders(rows, code, seed, round_number, epochs):
    """A client's own row numbers, counted from its first, in the order of each epoch."""
    first, last = rows.offsets[code], rows.offsets[code + 1]
    return [rows.shuffled(seed, round_number, e)[first:last] - first for e in range(epochs)]


def predictions(model, data):
    """Class probabilities of all test rows, as every client sees them."""
    return np.concatenate(
        [model.predict_proba(data.test.inputs.numpy(), name) for name in data.names]
    )


def log_softmax(logits):
    """In NumPy, over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
