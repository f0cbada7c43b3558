"""Checks of parameters: each error names the parameter, its value and the values that are allowed.

A dataclass of options states its checks once, in the annotations of its fields::

    rounds: Count = 100
    momentum: Annotated[float, number(least=0, below=1)] = 0.0
    tol: NonNegative | None = 1e-6

:func:`check_fields` then checks them all. pydantic was tried for this: its strict mode refuses NumPy
integers and its lax mode takes ``True``, ``"3"`` and ``3.0`` for integers, so every number needed a
validator of our own as well as a translation of pydantic's errors.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import ArrayLike, NDArray

Check = Callable[[str, Any], None]
"""Raises unless a value is allowed; called with the name of the parameter and the value."""


def check_integer(name: str, value: Any, least: int, below: int | None = None) -> None:
    """Raise unless ``value`` is an integer of at least ``least`` and less than ``below``."""
    flag = isinstance(value, (bool, np.bool_))
    if flag and least == 0:
        return  # verbose=True is common
    if flag or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__}).")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}.")
    if below is not None and int(value) >= below:
        raise ValueError(f"{name} must be less than {below}, got {value!r}.")


def check_number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> None:
    """Raise unless ``value`` is a finite number within the bounds."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__}).")
    if least <= float(value) <= most and above < float(value) < below:
        return
    bounds = {"at least": least, "more than": above, "at most": most, "less than": below}
    words = [f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound)]
    if not math.isfinite(most) and not math.isfinite(below):
        plain = {"at least 0": "not negative", "more than 0": "positive"}
        words = ["finite", *(plain.get(word, word) for word in words)]
    raise ValueError(f"{name} must be {' and '.join(words)}, got {value!r}.")


def check_flag(name: str, value: Any) -> None:
    """Raise unless ``value`` is true or false."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__}).")


def check_text(name: str, value: Any) -> None:
    """Raise unless ``value`` is a text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, got {value!r} ({type(value).__name__}).")


def check_texts(name: str, value: Any) -> None:
    """Raise unless ``value`` is a list or a tuple of texts."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"{name} must be a list of texts, got {value!r}.")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise unless ``value`` is one of ``choices``, with the nearest choice if one is near."""
    if not isinstance(value, str) or value not in choices:
        near = difflib.get_close_matches(str(value).lower(), choices, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}.{hint}")


def check_distinct(name: str, values: Sequence[Any]) -> None:
    """Raise if a value occurs more than once in ``values``."""
    twice = [value for place, value in enumerate(values) if value in values[:place]]
    if twice:
        raise ValueError(f"{name} contains {twice[0]!r} more than once; list every value once.")


def check_known(
    what: str, name: str, known: Collection[str], error: type[Exception] = ValueError
) -> None:
    """Raise unless ``name`` is one of the ``known`` names, with the nearest one or all of them.

    ``what`` starts the error, such as ``"There is no training option"``.
    """
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(sorted(known))}."
        raise error(f"{what} {name!r}; {hint}")


# ------------------------------------------------------------------ checks in annotations


def integer(least: int, below: int | None = None) -> Check:
    """Return :func:`check_integer` with these bounds."""
    return partial(check_integer, least=least, below=below)


def number(**bounds: float) -> Check:
    """Return :func:`check_number` with these bounds."""
    return lambda name, value: check_number(name, value, **bounds)


def one_of(*choices: str) -> Check:
    """Return :func:`check_choice` of these texts."""
    return partial(check_choice, choices=choices)


Count = Annotated[int, integer(1)]
NonNegativeInt = Annotated[int, integer(0)]
Positive = Annotated[float, number(above=0)]
NonNegative = Annotated[float, number(least=0)]
Flag = Annotated[bool, check_flag]
Text = Annotated[str, check_text]
Texts = Annotated[tuple[str, ...], check_texts]


def check_fields(options: Any) -> None:
    """Check every field of a dataclass by the check in its annotation.

    ``None`` and the texts of a ``Literal`` are allowed where the annotation has them. A wrong type
    raises ``TypeError``, and any other wrong value ``ValueError``.
    """
    rules = _rules(type(options))  # type: ignore[arg-type]  # mypy does not know classes as hashable
    for name, optional, words, checks in rules:
        value = getattr(options, name)
        if (value is None and optional) or (isinstance(value, str) and value in words):
            continue
        for check in checks:
            try:
                check(name, value)
            except (TypeError, ValueError) as error:
                if not words:
                    raise
                also = " or ".join(map(repr, words))
                raise type(error)(f"{error} {also} is allowed, too.") from None


@cache
def _rules(options: type) -> list[tuple[str, bool, list[str], list[Check]]]:
    """Return for each field: its name, whether it may be ``None``, allowed texts, and checks.

    Reading annotations takes longer than all checks together, so the rules of a class are kept.
    """
    found = []
    for name, hint in get_type_hints(options, include_extras=True).items():
        parts = get_args(hint) if not hasattr(hint, "__metadata__") else (hint,)
        words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
        checks = [check for part in parts for check in getattr(part, "__metadata__", ())]
        found.append((name, type(None) in parts, words, checks))
    return found


def optional_fields(options: type) -> set[str]:
    """Return the names of the fields of a dataclass that may be ``None``."""
    hints = get_type_hints(options).items()
    return {name for name, hint in hints if type(None) in get_args(hint)}


# ------------------------------------------------------------------ arrays and names


def given_array(name: str, value: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return a float64 copy of ``value``, which must be finite and have this shape."""
    try:
        array = np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be numeric: {error}.") from None
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}.")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} contains NaN or infinity.")
    return array


def array_of_names(names: Sequence[Any]) -> NDArray[Any]:
    """Return client names as an array; an array of objects if they have several types."""
    kinds = {type(name) for name in names}
    if len(kinds) == 1 and kinds <= {str, int, np.str_, np.int64}:
        return np.array(names)
    array = np.empty(len(names), dtype=object)
    array[:] = names
    return array
