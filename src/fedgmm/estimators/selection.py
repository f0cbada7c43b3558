"""Choose the number of Gaussians by an information criterion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from numpy.typing import ArrayLike

from fedgmm.data.inputs import as_pairs
from fedgmm.estimators.gaussian_mixture import FederatedGaussianMixture, Rows
from fedgmm.support.checks import check_choice, check_integer

Criterion = Literal["bic", "aic"]


@dataclass(frozen=True)
class ComponentSelection:
    """Result of :func:`select_components`.

    Attributes:
        n_components: the chosen number.
        best: the estimator fitted with that number.
        scores: criterion of every candidate; lower is better.
        criterion: ``"bic"`` or ``"aic"``.
    """

    n_components: int
    best: FederatedGaussianMixture
    scores: dict[int, float]
    criterion: Criterion


def select_components(
    X: Rows,
    *,
    clients: ArrayLike | None = None,
    candidates: Iterable[int] = range(1, 11),
    criterion: Criterion = "bic",
    **parameters: Any,
) -> ComponentSelection:
    """Fit one mixture per candidate and keep the one with the lowest criterion.

    The criterion uses only sums over clients: log-likelihoods and numbers of rows.

    Args:
        X: rows, as in :meth:`FederatedGaussianMixture.fit`.
        clients: one client id per row.
        candidates: numbers of components to try.
        criterion: ``"bic"`` or ``"aic"``.
        **parameters: passed to :class:`FederatedGaussianMixture`.
    """
    check_choice("criterion", criterion, get_args(Criterion))
    if not isinstance(candidates, Iterable):
        raise TypeError(f"candidates must be an iterable of integers, got {candidates!r}.")
    sizes = list(candidates)
    if not sizes:
        raise ValueError("candidates is empty; pass at least one number of components.")
    for size in sizes:
        check_integer("candidates", size, 1)
    sizes = sorted(set(sizes))
    if "n_components" in parameters:
        raise ValueError("n_components is chosen and cannot be given; pass candidates instead.")
    rows = as_pairs(X) or X
    fitted = {
        size: FederatedGaussianMixture(size, **parameters).fit(rows, clients=clients)
        for size in sizes
    }
    scores = {size: getattr(m, criterion)(rows, clients=clients) for size, m in fitted.items()}
    best = min(scores, key=lambda size: scores[size])
    return ComponentSelection(best, fitted[best], scores, criterion)
