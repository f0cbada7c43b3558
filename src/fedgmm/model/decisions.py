"""Decision for a class: from probabilities, a threshold or the costs of errors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

Cost = float | Mapping[Any, float]
"""Cost of missing the positive class, or of missing each class; see :meth:`Decision.of`."""

_CODED = ((0, 1), ("0", "1"), ("false", "true"), ("no", "yes"))  # negative and positive class


def default_positive(classes: Sequence[Hashable], counts: Sequence[int]) -> int:
    """Return the index of the positive class of two, from their names and numbers of rows.

    It is 1, true or yes beside 0, false or no. Otherwise it is the rarer class, and the second one if
    both are equally frequent.
    """
    names = [name.lower() if isinstance(name, str) else name for name in classes]
    for pair in _CODED:
        if set(names) == set(pair):
            return names.index(pair[1])
    return int(counts[1] <= counts[0])


@dataclass(frozen=True)
class Decision:
    """The rule that turns probabilities into a class; by default the most likely class."""

    # index of the positive class if there are two classes and it is known
    positive: int | None = None
    threshold: float | None = None  # probability from which on the positive class is predicted
    # cost of missing a row of each class, ``(K,)``, for any number of classes
    costs: tuple[float, ...] | None = None

    @classmethod
    def of(
        cls,
        classes: Sequence[Hashable],
        *,
        positive: Hashable | None = None,
        threshold: float | None = None,
        cost: Cost | None = None,
    ) -> Decision:
        """Check a threshold or costs against the names of the classes, ``(K,)``.

        ``cost`` is that of missing the positive class of two, where a false alarm costs 1; or the cost of
        missing each class, by its name, where classes that are not named cost 1. ``"fn"`` and ``"fp"`` are
        misses and false alarms of the positive class. The threshold is then ``fp / (fp + fn)``.
        """
        names = list(classes)
        binary = len(names) == 2
        if positive is not None and not binary:
            raise ValueError(f"positive needs two classes; there are {len(names)}.")
        if positive is not None and positive not in names:
            raise ValueError(f"positive must be one of {names}, got {positive!r}.")
        found = cls(None if positive is None else names.index(positive))
        if threshold is not None and cost is not None:
            raise ValueError("threshold and cost exclude each other; leave out one of them.")
        if threshold is None and cost is None:
            return found
        if threshold is not None and not binary:
            raise ValueError(
                f"A threshold needs two classes; there are {len(names)}. Give the cost of each class."
            )
        by_class = isinstance(cost, Mapping) and (
            set(cost) <= set(names) or not set(cost) <= {"fn", "fp"}
        )
        if found.positive is None and not by_class:
            raise ValueError(
                "The positive class is not known; name it with positive (--positive LABEL)."
                if binary
                else f"Name the classes that cost more than others, as in {names[0]}=10."
            )
        if threshold is not None:
            if not 0 < threshold < 1:
                raise ValueError(f"threshold must lie between 0 and 1, got {threshold}.")
            return replace(found, threshold=float(threshold))
        assert cost is not None
        given: dict[Any, float] = dict(cost) if isinstance(cost, Mapping) else {"fn": cost}
        for value in given.values():
            if isinstance(value, bool) or not 0 < float(value) < np.inf:
                raise ValueError(f"A cost must be a positive number, got {value!r}.")
        if not by_class:
            missed, alarm = float(given.get("fn", 1.0)), float(given.get("fp", 1.0))
            return replace(found, threshold=alarm / (alarm + missed))
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ValueError(
                f"Costs name the unknown class {unknown[0]!r}; the classes are {names}."
            )
        return replace(found, costs=tuple(float(given.get(name, 1.0)) for name in names))

    def choose(self, log_probabilities: FloatArray) -> IntArray:
        """Return the class of each row ``(n,)`` from ``log P(y|x)`` of each class, ``(n, K)``."""
        if self.threshold is not None:
            assert self.positive is not None
            above = np.exp(log_probabilities[:, self.positive]) >= self.threshold
            return np.where(above, self.positive, 1 - self.positive)
        if self.costs is not None:
            # Predicting k costs Σ_{j ≠ k} cost_j P(j|x), which is least where cost_k P(k|x) is largest.
            weighted = log_probabilities[:, : len(self.costs)] + np.log(self.costs)
            return np.asarray(weighted.argmax(-1))
        return np.asarray(log_probabilities.argmax(-1))
