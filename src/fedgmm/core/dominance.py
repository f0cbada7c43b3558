"""Sums that no single row dominates, so that a sum does not give a row away.

A sum ``Σ_i a_i x_i`` with ``a_1`` much larger than the other ``a_i`` is the row ``x_1``. In a mixture the
``a_i`` are responsibilities, and in the gradient of a learner they are errors, so a server that
chooses the model chooses them. The rule is the dominance rule of official statistics: at least ``n`` rows
stand behind a sum if no row has more than ``1/n`` of ``Σ_i |a_i|``.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PASSES = 8


def common_entries(counts: Tensor, fewest: float) -> Tensor:
    """Return which entries of ``counts`` ``(M,)`` to keep, so that rows move to the other entries.

    Of the entries with fewer rows than ``fewest`` the smaller half is left out, because the others may
    get enough rows from it; the largest entry is always kept.
    """
    rare = (counts > 0) & (counts < fewest)
    rare[counts.argmax()] = False
    if not bool(rare.any()):
        return counts > 0
    return (counts > 0) & ~(rare & (counts <= counts[rare].median()))


def cap_shares(weights: Tensor, parts: Tensor, fewest: float, rounding: Tensor) -> Tensor:
    """Lower weights of rows until no row makes more than ``1/fewest`` of any sum of a learner.

    ``weights`` are ``w_i(m)``, ``(n, M)``, and ``parts`` the sizes of what one unit of weight adds
    to each of ``k`` sums, ``(n, M, k)``. ``rounding``, ``(k,)``, is the size of each sum's rounding
    errors: parts that have to be cut to less would give rows away. A learner whose sums cannot be
    made so gets weights of zero.
    """
    for _ in range(_PASSES):
        added = weights[..., None] * parts
        caps = _caps(added, fewest)
        lost = (caps < rounding).any(-1)
        weights = torch.where(lost, 0.0, weights)
        added = torch.where(lost[:, None], 0.0, added)
        # rounding must not count as dominance
        share = torch.where(added > caps * (1.0 + 1e-9), caps / added, 1.0).amin(-1)
        if bool((share == 1.0).all()):
            return weights
        weights = weights * share
    dominated = (share < 1.0).any(0)
    return torch.where(dominated, 0.0, weights)


def _caps(added: Tensor, fewest: float) -> Tensor:
    """Return the largest ``c`` with ``fewest · c ≤ Σ_i min(a_i, c)`` for ``a`` ``(n, ...)``.

    If the ``j`` largest entries are cut to ``c``, the others add up to ``(fewest - j) c``.
    """
    ordered = added.sort(0).values
    rests = ordered.cumsum(0)  # sums of all but the j largest, for j = n-1, n-2, …
    cap = torch.zeros_like(rests[0])
    for j in range(min(len(added), int(-(-fewest // 1)))):
        place = len(added) - 1 - j
        found = rests[place] / (fewest - j)
        cap = torch.where((cap == 0) & (ordered[place] <= found), found, cap)
    return cap
