"""The paper's synthetic data, and the best possible accuracy on them.

A client draws its weights ``π_c`` from a Dirichlet distribution. A row draws a component, then its
inputs from the component's distribution, and gets the component's label, ``1{(x - μ_m)ᵀ v_m > 0}``.
The paper does not publish ``μ`` and ``v``, so they are drawn uniformly here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import logsumexp

from fedgmm.data.dataset import PAPER_SPLIT, FederatedDataset, LabelledRows
from fedgmm.support.checks import check_choice

FloatArray = NDArray[np.float64]
Distribution = Literal["gaussian", "laplace", "beta"]
DISTRIBUTIONS: tuple[str, ...] = get_args(Distribution)

_SMALLEST = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Components:
    """Base distributions with independent columns, and their labels.

    Attributes:
        distribution: the distribution of each column.
        first: means of Gaussians and Laplacians, or ``α`` of Betas, ``(M, d)``.
        second: ``β`` of Betas, else scales of one, ``(M, d)``.
        directions: ``v_m``, ``(M, d)``.
    """

    distribution: Distribution
    first: FloatArray
    second: FloatArray
    directions: FloatArray

    @property
    def means(self) -> FloatArray:
        """``μ_m``, ``(M, d)``."""
        if self.distribution == "beta":
            return self.first / (self.first + self.second)
        return self.first

    def draw(self, labels: NDArray[np.int64], generator: np.random.Generator) -> FloatArray:
        """Draw one row per entry of ``labels``, which are components: ``(n, d)``."""
        first, second = self.first[labels], self.second[labels]
        match self.distribution:
            case "gaussian":
                return generator.normal(first, second)
            case "laplace":
                return generator.laplace(first, second)
            case _:
                # the density at exactly zero or one may be infinite
                return generator.beta(first, second).clip(_SMALLEST, 1.0 - _SMALLEST)

    def log_densities(self, x: FloatArray) -> FloatArray:
        """Return ``log P^(m)(x_i)``, ``(n, M)``."""
        family = {"gaussian": stats.norm, "laplace": stats.laplace, "beta": stats.beta}
        density = family[self.distribution].logpdf
        columns = [
            density(x, first, second).sum(-1)
            for first, second in zip(self.first, self.second, strict=True)
        ]
        return np.stack(columns, axis=-1)

    def labels(self, x: FloatArray) -> NDArray[np.int64]:
        """Return the label that each component gives to each row, ``(n, M)``."""
        scores: FloatArray = np.einsum("nmd,md->nm", x[:, None] - self.means, self.directions)
        return (scores > 0).astype(np.int64)


@dataclass(frozen=True)
class SyntheticFederation:
    """A data set with known parameters.

    Attributes:
        dataset: the clients.
        components: one set of components per family; most federations have one family.
        family: the family of each client, an index into ``components``, ``(C,)``.
        client_weights: true ``π_c``, ``(C, M)``.
    """

    dataset: FederatedDataset
    components: tuple[Components, ...]
    family: NDArray[np.int64]
    client_weights: FloatArray

    def bayes_accuracy(self, split: str = "test") -> float:
        """Return the accuracy of Bayes' rule with the true parameters, averaged over clients."""
        rows = self.dataset.split(split)
        right = self.bayes_probabilities(rows).argmax(-1) == rows.labels.numpy()
        codes = rows.codes.numpy()
        present = np.unique(codes)
        return float(np.mean([right[codes == code].mean() for code in present]))

    def bayes_probabilities(self, rows: LabelledRows) -> FloatArray:
        """Return the true ``P_c(y|x)``, ``(N, 2)``."""
        x, codes = rows.inputs.numpy().astype(np.float64), rows.codes.numpy()
        result = np.empty((len(x), 2))
        for index, family in enumerate(self.components):
            here = self.family[codes] == index
            with np.errstate(divide="ignore"):
                joint = np.log(self.client_weights[codes[here]]) + family.log_densities(x[here])
            q = np.exp(joint - logsumexp(joint, axis=-1, keepdims=True))
            result[here, 1] = (q * family.labels(x[here])).sum(-1)
        result[:, 0] = 1.0 - result[:, 1]
        return result


def synthetic(
    clients: int = 300,
    rows: int = 3000,
    *,
    dimensions: int = 32,
    components: int = 3,
    alpha: float = 0.4,
    separation: float = 1.0,
    distribution: Distribution = "gaussian",
    other: Distribution | None = None,
    other_clients: int = 0,
    seed: int = 0,
) -> SyntheticFederation:
    """Draw the paper's synthetic data.

    Args:
        clients: number of clients, ``C``.
        rows: mean number of rows per client, before the split.
        dimensions: number of columns, ``d``.
        components: number of components, ``M``.
        alpha: parameter of the Dirichlet distribution of the clients' weights.
        separation: means are uniform in ``[-separation, separation]``.
        distribution: distribution of the components.
        other: distribution of the components of the last ``other_clients`` clients (setting 2 of the
            paper).
        other_clients: number of clients with components of their own.
        seed: seed of all draws.
    """
    for name, kind in (("distribution", distribution), ("other", other or distribution)):
        check_choice(name, kind, DISTRIBUTIONS)
    if not 0 <= other_clients <= clients:
        raise ValueError(f"other_clients must lie between 0 and {clients}, got {other_clients!r}.")
    generator = np.random.default_rng(seed)
    families = [_components(distribution, components, dimensions, separation, generator)]
    family = np.zeros(clients, dtype=np.int64)
    if other is not None and other_clients:
        families.append(_components(other, components, dimensions, separation, generator))
        family[clients - other_clients :] = 1
    weights = generator.dirichlet(np.full(components, alpha), size=clients)
    sizes = generator.poisson(rows, size=clients).clip(min=1)
    inputs, labels, codes = [], [], []
    for client in range(clients):
        own = families[family[client]]
        z = generator.choice(components, size=sizes[client], p=weights[client])
        x = own.draw(z, generator).astype(np.float32)
        inputs.append(x)
        labels.append(own.labels(x.astype(np.float64))[np.arange(len(z)), z])
        codes.append(np.full(len(z), client))
    dataset = FederatedDataset.from_arrays(
        np.concatenate(inputs),
        np.concatenate(labels),
        np.concatenate(codes),
        split=PAPER_SPLIT,
        seed=seed,
    )
    return SyntheticFederation(dataset, tuple(families), family, weights)


def _components(
    distribution: Distribution,
    components: int,
    dimensions: int,
    separation: float,
    generator: np.random.Generator,
) -> Components:
    shape = (components, dimensions)
    directions = generator.uniform(-1.0, 1.0, shape)
    if distribution == "beta":
        first, second = generator.uniform(0.5, 3.0, (2, *shape))
    else:
        first, second = generator.uniform(-separation, separation, shape), np.ones(shape)
    return Components(distribution, first, second, directions)
