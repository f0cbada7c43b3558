"""What clients' weights and the Gaussians look like, for the report: from parameters alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedgmm.report.contents import MOST_CLIENTS_IN_HEAT_MAP, ClientTable, WeightMap, evenly
from fedgmm.report.projection import Projection, project
from fedgmm.wording import counted

if TYPE_CHECKING:
    from fedgmm.data.dataset import FederatedDataset
    from fedgmm.model.model import FederatedModel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def mixes_learners(model: FederatedModel) -> bool:
    """Whether clients have weights that say something: a single pair always has weight one."""
    weights = model.prediction.client_weights
    return weights is not None and weights.shape[1] > 1


def _own_weights(model: FederatedModel, dataset: FederatedDataset) -> FloatArray:
    """``π_c(m1, m2)`` of the data set's clients, ``(C, M1, M2)``."""
    position = {name: code for code, name in enumerate(model.names)}
    return np.asarray(model.client_weights[[position[name] for name in dataset.names]])


def pair_names(components: int, learners: int) -> tuple[str, ...]:
    """Names of ``(m1, m2)``, counted from one; what there is only one of is left out."""
    if components == 1:
        return tuple(f"L{m2 + 1}" for m2 in range(learners))
    if learners == 1:
        return tuple(f"G{m1 + 1}" for m1 in range(components))
    return tuple(f"G{m1 + 1}·L{m2 + 1}" for m1 in range(components) for m2 in range(learners))


def weight_map(
    model: FederatedModel,
    dataset: FederatedDataset,
    clients: ClientTable,
    absent: dict[str, str],
) -> tuple[WeightMap | None, ClientTable]:
    """The heat map, and the table with each client's strongest pair."""
    if not mixes_learners(model):
        absent["weights"] = (
            "This method gives no client weights of its own: there is nothing to mix, "
            "or every client is assigned to one learner."
        )
        return None, clients
    weights = _own_weights(model, dataset)
    pairs = pair_names(*weights.shape[1:])
    flat = weights.reshape(len(weights), -1)
    strongest = flat.argmax(-1)
    clients = replace(clients, strongest=tuple(pairs[k] for k in strongest), share=flat.max(-1))
    shown = evenly(len(flat), MOST_CLIENTS_IN_HEAT_MAP)
    shown = shown[similar_beside_each_other(flat[shown])]
    return WeightMap(shown, pairs, flat[shown]), clients


def similar_beside_each_other(values: FloatArray) -> IntArray:
    """An order of the rows ``(n, k)`` in which similar ones are neighbours."""
    from scipy.cluster.hierarchy import leaves_list, linkage

    if len(values) < 3:
        return np.arange(len(values))
    tree = linkage(values, method="average", optimal_ordering=True)
    return np.asarray(leaves_list(tree), dtype=np.int64)


def projection_of(
    model: FederatedModel,
    dataset: FederatedDataset,
    feature_names: Sequence[str] | None,
    absent: dict[str, str],
) -> Projection | None:
    """Gaussians and clients in a plane, where there is one."""
    gaussians = model.prediction.gaussians
    if gaussians is None:
        absent["projection"] = "This method has no Gaussians to show."
        return None
    means = gaussians.means.cpu().numpy()
    if means.shape[1] < 2:
        absent["projection"] = "The Gaussians see a single column, so there is no plane to show."
        return None
    if feature_names is None and model.features_are_inputs:
        feature_names = dataset.column_names
    if feature_names is not None and len(feature_names) != means.shape[1]:
        raise ValueError(
            f"feature_names has {counted(len(feature_names), 'name')}, but the Gaussians see "
            f"{counted(means.shape[1], 'column')}; give one name a column."
        )
    return project(
        means,
        gaussians.covariances.cpu().numpy(),
        gaussians.covariance_type,
        model.weights.sum(-1),
        _own_weights(model, dataset).sum(-1),
        feature_names,
    )
