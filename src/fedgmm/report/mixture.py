"""Clients' weights and the shared Gaussians as the report shows them; both come from parameters alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedgmm.report.contents import (
    MOST_CLIENTS_IN_HEAT_MAP,
    ClientTable,
    Projection,
    WeightMap,
    evenly,
)
from fedgmm.wording import counted

if TYPE_CHECKING:
    from fedgmm.data.dataset import FederatedDataset
    from fedgmm.model.model import FederatedModel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_NAMED_PER_AXIS = 3
_MISSING = "=(missing)"  # ends the name of a column that marks missing values


# ---------------------------------------------------------------------- weights


def has_mixture_weights(model: FederatedModel) -> bool:
    """Return whether clients mix several pairs; the weight of a single pair is always one."""
    weights = model.prediction.client_weights
    return weights is not None and weights.shape[1] > 1


def _weights_of(model: FederatedModel, dataset: FederatedDataset) -> FloatArray:
    """Return ``π_c(m1, m2)`` of the data set's clients, ``(C, M1, M2)``."""
    position = {name: code for code, name in enumerate(model.names)}
    return np.asarray(model.client_weights[[position[name] for name in dataset.names]])


def pair_names(components: int, learners: int) -> tuple[str, ...]:
    """Return names of all ``(m1, m2)``, counted from one; a single component or learner is omitted."""
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
    """Return the heat map, and the table with each client's strongest pair."""
    if not has_mixture_weights(model):
        absent["weights"] = (
            "Clients have no mixture weights under this method: there is a single learner, or each "
            "client is assigned to one."
        )
        return None, clients
    weights = _weights_of(model, dataset)
    pairs = pair_names(*weights.shape[1:])
    flat = weights.reshape(len(weights), -1)
    strongest = tuple(pairs[pair] for pair in flat.argmax(-1))
    shown = evenly(len(flat), MOST_CLIENTS_IN_HEAT_MAP)
    shown = shown[order_by_similarity(flat[shown])]
    return (
        WeightMap(shown, pairs, flat[shown]),
        replace(clients, strongest=strongest, share=flat.max(-1)),
    )


def order_by_similarity(values: FloatArray) -> IntArray:
    """Return an order of the rows ``(n, k)`` in which similar rows are neighbours, ``(n,)``."""
    from scipy.cluster.hierarchy import leaves_list, linkage

    if len(values) < 3:
        return np.arange(len(values))
    tree = linkage(values, method="average", optimal_ordering=True)
    return np.asarray(leaves_list(tree), dtype=np.int64)


# ---------------------------------------------------------------------- the plane of the Gaussians


def projection_of(
    model: FederatedModel,
    dataset: FederatedDataset,
    feature_names: Sequence[str] | None,
    absent: dict[str, str],
) -> Projection | None:
    """Return Gaussians and clients in a plane; ``None`` if the model has no such plane."""
    gaussians = model.prediction.gaussians
    if gaussians is None:
        absent["projection"] = "This method has no Gaussians to show."
        return None
    means = gaussians.means.cpu().numpy()
    if means.shape[1] < 2:
        absent["projection"] = "The Gaussians see a single column, so there is no plane to show."
        return None
    if model.projection is not None:
        known = dataset.column_names or [f"x{j}" for j in range(model.projection.mean.shape[0])]
        beside = model.projection.components[model.options["pca"] :].argmax(1).tolist()
        feature_names = [f"component {j + 1} of the vectors" for j in range(model.options["pca"])]
        feature_names += [known[column] for column in beside]
    elif feature_names is None and model.features_are_inputs:
        feature_names = dataset.column_names
    if feature_names is not None and len(feature_names) != means.shape[1]:
        raise ValueError(
            f"feature_names has {counted(len(feature_names), 'name')}, but the Gaussians see "
            f"{counted(means.shape[1], 'column')}; give one name per column."
        )
    return project(
        means,
        gaussians.covariances.cpu().numpy(),
        gaussians.covariance_type,
        model.weights.sum(-1),
        _weights_of(model, dataset).sum(-1),
        feature_names,
    )


def project(
    means: FloatArray,
    covariances: FloatArray,
    covariance_type: str,
    shares: FloatArray,
    client_shares: FloatArray,
    feature_names: Sequence[str] | None = None,
) -> Projection:
    """Project Gaussians and clients onto the plane in which the means differ most.

    Means that span only a line or a point leave directions open; those of the largest variance are
    taken then.

    Args:
        means: ``(M1, d)``, with at least two columns.
        covariances: shaped by their type as in :class:`fedgmm.core.gaussians.Gaussians`.
        covariance_type: one of its types.
        shares: the federation's ``π(m1)``, ``(M1,)``.
        client_shares: each client's ``π_c(m1)``, ``(C, M1)``.
        feature_names: of the ``d`` columns, for the titles of the axes.
    """
    shares = shares / shares.sum()
    centre = shares @ means
    deviations = (means - centre) * np.sqrt(shares)[:, None]
    _, spreads, directions = np.linalg.svd(deviations, full_matrices=False)
    rank = int((spreads > 1e-9 * (1.0 + np.abs(means).max())).sum())
    axes = directions[: min(rank, 2)].T
    within = _pooled_covariance(covariances, covariance_type, shares, means.shape[1])
    if rank < 2:
        axes = np.hstack([axes, _widest_directions(within, axes)[:, : 2 - rank]])
    # An axis and its mirror image are equivalent: make the largest entry positive.
    largest = axes[np.abs(axes).argmax(0), [0, 1]]
    axes = np.asarray(axes * np.where(largest < 0, -1.0, 1.0))
    spread = deviations.T @ deviations if rank else within
    captured = np.trace(axes.T @ spread @ axes) / max(float(np.trace(spread)), 1e-300)
    first, second = (_axis_title(axes[:, k], k + 1, feature_names) for k in (0, 1))
    of_missing = [j for j, name in enumerate(feature_names or ()) if name.endswith(_MISSING)]
    between = np.square(deviations).sum(0)  # how much each column separates the means
    follows = rank > 0 and between[of_missing].sum() > between.sum() / 2
    largest_first = sorted(of_missing, key=lambda j: -between[j])[
        : _NAMED_PER_AXIS if follows else 0
    ]
    return Projection(
        axes=axes,
        means=(means - centre) @ axes,
        covariances=_covariances_in_plane(covariances, covariance_type, axes, len(means)),
        shares=shares,
        clients=(client_shares @ means - centre) @ axes,
        strongest=client_shares.argmax(-1),
        captured=float(min(captured, 1.0)),
        separates=rank > 0,
        axis_titles=(first, second),
        missing=tuple((feature_names or ())[j].removesuffix(_MISSING) for j in largest_first),
    )


def _pooled_covariance(
    covariances: FloatArray, covariance_type: str, shares: FloatArray, columns: int
) -> FloatArray:
    """Return ``Σ_m π(m) Σ_m``, ``(d, d)``."""
    match covariance_type:
        case "full":
            return np.asarray(np.tensordot(shares, covariances, 1))
        case "tied":
            return covariances
        case _:  # one variance per column, or one for all columns
            return np.asarray(np.diag(np.ones(columns) * (shares @ covariances)))


def _covariances_in_plane(
    covariances: FloatArray, covariance_type: str, axes: FloatArray, components: int
) -> FloatArray:
    """Return ``Aᵀ Σ_m A`` for axes ``A`` ``(d, 2)``: ``(M1, 2, 2)``."""
    match covariance_type:
        case "full" | "tied":
            inside = axes.T @ covariances @ axes
        case "diag":
            inside = (axes.T * covariances[:, None]) @ axes
        case _:
            inside = covariances[:, None, None] * np.eye(2)
    return np.asarray(np.broadcast_to(inside, (components, 2, 2)))


def _widest_directions(covariance: FloatArray, taken: FloatArray) -> FloatArray:
    """Return directions orthogonal to ``taken`` ``(d, k)``, those of the largest variance first."""
    others = np.eye(len(covariance)) - taken @ taken.T
    values, vectors = np.linalg.eigh(others @ covariance @ others)
    # A taken direction and a constant column both have variance zero here: put the taken ones last.
    order = np.argsort(-(values - np.square(taken.T @ vectors).sum(0)))
    return np.asarray(vectors[:, order])


def _axis_title(axis: FloatArray, number: int, feature_names: Sequence[str] | None) -> str:
    if feature_names is None:
        return f"direction {number}"
    strongest = np.argsort(-np.abs(axis))[:_NAMED_PER_AXIS]
    named = [k for k in strongest if abs(axis[k]) > 0.3 * abs(axis[strongest[0]])]
    names = {k: feature_names[k].replace(_MISSING, " missing") for k in named}
    more = ", ".join(names[k] for k in named if axis[k] > 0)
    less = ", ".join(names[k] for k in named if axis[k] < 0)
    return " · ".join(f"{word} {text}" for word, text in (("more", more), ("less", less)) if text)


def ellipse(mean: FloatArray, covariance: FloatArray, deviations: float = 2.0) -> FloatArray:
    """Return points ``(61, 2)`` that lie ``deviations`` standard deviations from ``mean``."""
    values, vectors = np.linalg.eigh(covariance)
    angle = np.linspace(0.0, 2.0 * np.pi, 61)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    radii = deviations * np.sqrt(values.clip(min=0.0))
    return np.asarray(mean + (circle * radii) @ vectors.T)
