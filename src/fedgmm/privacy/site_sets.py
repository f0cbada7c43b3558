"""Sets of sites in secure aggregation: who shares pads, how many must survive, which sums may be opened."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

FEWEST_SITES = 3
"""With two sites, each could subtract its own vector from the sum."""

FEW_SITES = 5
"""Below this number of sites a run warns."""

LARGEST_COMPLETE = 100
"""Up to this number of sites every pair of them shares a pad."""

_COLLUDING, _DROPPING = 0.2, 0.1  # shares of sites that a sparse graph tolerates
_FAILURE_BITS = 30
_SECURITY_BITS = 100  # 40, after a server has tried 2^60 seeds of a graph to find a weak one


class MaskError(ValueError):
    """A message that breaks the protocol, with the reason."""


class TooFewSitesError(MaskError):
    """Too few sites are left to open a sum; the aggregation is discarded."""


# ---------------------------------------------------------------------- graphs and thresholds


@lru_cache(maxsize=64)
def graph_sizes(sites: int) -> tuple[int, int]:
    """Return the number of neighbours of a site, and how many holders open its secrets.

    A site and its ``k`` neighbours hold the shares of its secrets. With a complete graph a third of the
    sites may drop. A server that names two sets of survivors needs ``t`` holders for each, so
    ``2t - (k + 1)`` of them must collude with it. In a sparse graph, with 20 % colluding sites, no site has
    so many of them, except with probability ``2^-100``. The seed of the graph depends on numbers that the
    server and colluding sites choose, so the probability is small enough for any number of seeds that they
    can try. With 10 % dropped sites the threshold is reached, except with probability ``2^-30``.
    """
    if sites <= LARGEST_COMPLETE:
        return sites - 1, fewest_survivors(sites)
    from scipy.stats import hypergeom

    colluding, others = math.ceil(_COLLUDING * sites), sites - 1
    staying = others - math.ceil(_DROPPING * sites)
    for k in range(2, others, 2):
        thresholds = np.arange(k // 2 + 1, k + 1)
        both = sites * hypergeom.sf(2 * thresholds - (k + 1) - 1, others, colluding, k)
        if both[-1] > 2.0**-_SECURITY_BITS:
            continue
        threshold = int(thresholds[np.argmax(both <= 2.0**-_SECURITY_BITS)])
        if sites * hypergeom.cdf(threshold - 1, others, staying, k) <= 2.0**-_FAILURE_BITS:
            return k, threshold
    return sites - 1, fewest_survivors(sites)


def fewest_survivors(sites: int) -> int:
    """Return how many sites must survive: two thirds, and at least three."""
    return max(min(FEWEST_SITES, sites), sites - sites // 3)


def neighbours_of(sites: int, seed: bytes) -> list[tuple[int, ...]]:
    """Return the neighbours of every site, sorted; the public ``seed`` orders sites in a circle.

    In a sparse graph a site's neighbours are the nearest ``k`` on the circle (Harary's graph).
    """
    k, _ = graph_sizes(sites)
    if k == sites - 1:
        return [tuple(v for v in range(sites) if v != u) for u in range(sites)]
    draws = [hashlib.sha256(seed + u.to_bytes(4, "big")).digest() for u in range(sites)]
    circle = sorted(range(sites), key=draws.__getitem__)
    place = {u: at for at, u in enumerate(circle)}
    steps = [s for d in range(1, k // 2 + 1) for s in (d, -d)]
    return [tuple(sorted(circle[(place[u] + s) % sites] for s in steps)) for u in range(sites)]


# ---------------------------------------------------------------------- opened sums


@dataclass
class Released:
    """Sums that a site has helped to open; it belongs on the site's disk.

    Attributes:
        purposes: names of the survivors by purpose, such as ``round 3``.
        sets: all different sets of survivors.
    """

    purposes: dict[str, list[str]] = field(default_factory=dict)
    sets: list[list[str]] = field(default_factory=list)

    def check(self, purpose: str, survivors: Sequence[str], min_change: int) -> None:
        """Raise ``MaskError`` unless the sum over ``survivors`` reveals no single site.

        The difference between two sums over almost the same sites would show the few sites in which they
        differ. More sums can be solved for one site, such as those without a and b, without a and c,
        and without b and c.
        """
        names = sorted(survivors)
        if self.purposes.get(purpose, names) != names:
            raise MaskError(f"{purpose} was opened for other sites already")
        for known in self.sets:
            changed = len(set(known) ^ set(names))
            if 0 < changed < min_change:
                raise MaskError(
                    f"the sites changed by {changed}, but sums over sets that differ by fewer than "
                    f"{min_change} sites would show single sites"
                )
        if min_change > 1 and names not in self.sets and _shows_single_sites([*self.sets, names]):
            raise MaskError("the sums over these sets of sites together would show single sites")

    def add(self, purpose: str, survivors: Sequence[str]) -> None:
        """Note that a sum is opened."""
        names = sorted(survivors)
        self.purposes[purpose] = names
        if names not in self.sets:
            self.sets.append(names)


def _shows_single_sites(sets: Sequence[Sequence[str]]) -> bool:
    """Return whether the sums over some sets of sites can be solved for the numbers of one site.

    Row ``j`` of a matrix ``A`` marks the sites of set ``j``. Site ``i`` shows if the unit vector ``e_i`` is
    in the row space of ``A``: if its projection onto that space has length one.
    """
    places = {name: at for at, name in enumerate(sorted(set().union(*sets)))}
    marks = np.zeros((len(sets), len(places)))
    for row, names in zip(marks, sets, strict=True):
        row[[places[name] for name in names]] = 1.0
    _, sizes, directions = np.linalg.svd(marks, full_matrices=False)
    basis = directions[sizes > 1e-9 * sizes[0]]
    return bool((np.square(basis).sum(0) > 1.0 - 1e-6).any())
