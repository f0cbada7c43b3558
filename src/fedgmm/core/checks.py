"""Checks of parameters: what is wrong, with which value, and what would be right."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def check_integer(name: str, value: Any, smallest: int) -> None:
    """Raise unless ``value`` is an integer of at least ``smallest``."""
    if isinstance(value, (bool, np.bool_)) and smallest == 0:
        return  # verbose=True is common
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__}).")
    if value < smallest:
        raise ValueError(f"{name} must be at least {smallest}, got {value!r}.")


def check_non_negative(name: str, value: Any) -> None:
    """Raise unless ``value`` is a finite number that is not negative."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__}).")
    if not (0 <= float(value) < np.inf):
        raise ValueError(f"{name} must be finite and not negative, got {value!r}.")


def check_flag(name: str, value: Any) -> None:
    """Raise unless ``value`` is true or false."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__}).")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}.")


def check_distinct(name: str, values: Sequence[Any]) -> None:
    """Raise where one of ``values`` comes twice."""
    twice = [value for place, value in enumerate(values) if value in values[:place]]
    if twice:
        raise ValueError(f"{name} must differ from each other, got {twice[0]!r} more than once.")


def given_array(name: str, value: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """A finite float64 copy of ``value``, which must have this shape."""
    try:
        array = np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be numeric: {error}.") from None
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}.")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} contains NaN or infinity.")
    return array


def inverse_of_precisions(
    precisions: NDArray[np.float64], covariance_type: str
) -> NDArray[np.float64]:
    """Covariances from precisions of the same shape, which must be positive definite."""
    if covariance_type in ("diag", "spherical"):
        if (precisions <= 0).any():
            raise ValueError(f"precisions_init must be positive for {covariance_type!r}.")
        return 1.0 / precisions
    if not np.allclose(precisions, np.swapaxes(precisions, -1, -2)):
        raise ValueError("precisions_init must be symmetric.")
    try:
        np.linalg.cholesky(precisions)
    except np.linalg.LinAlgError:
        raise ValueError("precisions_init must be positive definite.") from None
    return np.asarray(np.linalg.inv(precisions))


def array_of_names(names: Sequence[Any]) -> NDArray[Any]:
    """Clients as an array; names of several kinds stay as they are."""
    kinds = {type(name) for name in names}
    if len(kinds) == 1 and kinds <= {str, int, np.str_, np.int64}:
        return np.array(names)
    array = np.empty(len(names), dtype=object)
    array[:] = names
    return array
