"""A known client joins once more, for the report: how many rows a newcomer needs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fedgmm.report.contents import AdaptationRecord
from fedgmm.report.predictions import features_of
from fedgmm.report.weights import mixes_learners

if TYPE_CHECKING:
    from fedgmm.data.dataset import FederatedDataset
    from fedgmm.model.model import FederatedModel

_ROWS_OF_A_NEWCOMER = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def replay_newcomer(
    model: FederatedModel, dataset: FederatedDataset, absent: dict[str, str]
) -> AdaptationRecord | None:
    """A known client of usual size joins once more, with more and more of its training rows."""
    if not mixes_learners(model):
        absent["adaptation"] = (
            "This method has no mixture weights, and those are all that a new client would learn."
        )
        return None
    known = np.isin(dataset.classes, model.classes)
    sizes = dataset.train.features.rows_per_client.cpu().numpy()
    candidates = np.flatnonzero(dataset.test.features.rows_per_client.cpu().numpy() > 0)
    if not len(candidates):
        absent["adaptation"] = "No client has test rows on which a newcomer could be checked."
        return None
    by_size = candidates[np.argsort(sizes[candidates], kind="stable")]
    code = int(by_size[(len(by_size) - 1) // 2])
    name = dataset.names[code]
    train, test = dataset.train.client(code), dataset.test.client(code)
    labels, truth = (dataset.classes[rows.labels.cpu().numpy()] for rows in (train, test))
    inputs, features = train.inputs.cpu().numpy(), features_of(model, train)
    # rows may be sorted by label: mix them, the same way every time
    order = np.random.default_rng(0).permutation(len(train))
    order = order[known[train.labels.cpu().numpy()[order]]]
    counts = sorted({min(n, len(order)) for n in (*_ROWS_OF_A_NEWCOMER, len(order))} - {0})
    visited = replace(model)  # the client's trained weights stay in the other copy

    def accuracy(client: Hashable | None) -> float:
        seen = features_of(model, test)
        owners = np.fromiter([client] * len(test), dtype=object, count=len(test))
        predicted = visited.predict(test.inputs.cpu().numpy(), owners, features=seen)
        return float((predicted == truth).mean())

    accuracies, log_likelihoods = [accuracy(None)], list[float]()
    for count in counts:
        some = order[:count]
        own = None if features is None else features[some]
        joined = visited.adapt(name, inputs[some], labels[some], features=own)
        log_likelihoods = joined.log_likelihoods
        accuracies.append(accuracy(name))
    return AdaptationRecord(str(name), [0, *counts], accuracies, log_likelihoods, labelled=True)
