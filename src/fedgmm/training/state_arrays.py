"""States of methods as named arrays and plain values, and back.

There are no class names: type hints say how arrays and values become a state again. Names are paths,
such as ``shared/mixture/gaussians/means``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from fedgmm.core.params import is_statistic
from fedgmm.core.server_optimisers import ServerState

hints_of = cache(get_type_hints)
"""Type hints of a class or function; they are resolved once, because every state needs them."""


class StateError(ValueError):
    """Arrays and values that do not make the requested state."""


def take_apart(path: str, value: Any, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Add every tensor and every plain value of a state under its path."""
    if isinstance(value, Tensor):
        tensors[path] = value
    elif isinstance(value, dict):
        values[path] = list(value)  # also of an empty one; the order of names is kept
        for name, item in value.items():
            tensors[f"{path}/{name}"] = item
    elif is_dataclass(value):
        for part in fields(value):
            take_apart(f"{path}/{part.name}", getattr(value, part.name), tensors, values)
    elif isinstance(value, float):
        values[path] = {"float": value.hex()}
    elif value is None or isinstance(value, (bool, int, str)):
        values[path] = value
    else:
        raise TypeError(
            f"{path} is a {type(value).__name__}, which no checkpoint or message can hold."
        )


def laid_out(value: Tensor, strides: list[int] | None) -> Tensor:
    """Return a tensor with its former layout in memory; repeated axes are stored once."""
    if strides is None:
        return value
    once = value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    order = sorted(range(value.dim()), key=lambda axis: -strides[axis])
    back = sorted(range(value.dim()), key=lambda place: order[place])
    return once.permute(order).contiguous().permute(back).expand(value.shape)


@dataclass(frozen=True)
class StateDecoder:
    """Makes a state from tensors and values, by type hints."""

    tensors: Mapping[str, Tensor]  # by path
    values: Mapping[str, Any]  # all other values, by path
    # of a learner's parameters; dictionaries in a state hold learners
    shapes: Mapping[str, tuple[int, ...]]

    def decode(self, hint: Any, path: str) -> Any:
        """Return the value at ``path``, which must have the type ``hint``."""
        kind = get_origin(hint) or hint
        if kind in (Union, UnionType):
            for one in get_args(hint):
                with suppress(StateError):
                    return self.decode(one, path)
            raise StateError(f"{path} fits none of the types {hint}.")
        if kind is Tensor:
            if path not in self.tensors:
                raise StateError(f"the numbers {path} are missing.")
            return self.tensors[path]
        if kind is dict:
            return self._parameters(path)
        if is_dataclass(kind) and isinstance(kind, type):
            own, hints = self, hints_of(kind)
            if kind is ServerState:  # running statistics have no moving averages
                own = replace(
                    self, shapes={n: s for n, s in self.shapes.items() if not is_statistic(n)}
                )
            # older files lack some parts that have a default
            parts = [
                part.name
                for part in fields(kind)
                if part.default_factory is MISSING or own._has(f"{path}/{part.name}")
            ]
            return kind(**{name: own.decode(hints[name], f"{path}/{name}") for name in parts})
        return self._plain(hint, path)

    def _has(self, path: str) -> bool:
        """Return whether the file has something at a path or below it."""
        paths = (*self.tensors, *self.values)
        return any(one == path or one.startswith(f"{path}/") for one in paths)

    def _parameters(self, path: str) -> dict[str, Tensor]:
        """Return stacked parameters of learners, or an empty dictionary."""
        names = self.values.get(path)
        if not isinstance(names, list) or (names and set(names) != set(self.shapes)):
            raise StateError(f"{path} does not hold the parameters of this learner.")
        params = {name: self.decode(Tensor, f"{path}/{name}") for name in names}
        for name, value in params.items():
            own = self.shapes[name]
            stacked = value.shape[: value.dim() - len(own)]
            if not stacked or tuple(value.shape) != (*stacked, *own):
                raise StateError(
                    f"{path}/{name} has shape {tuple(value.shape)}, which does not end in {own}."
                )
        return params

    def _plain(self, hint: Any, path: str) -> Any:
        if path not in self.values:
            raise StateError(f"the value {path} is missing.")
        value = self.values[path]
        if hint is float and isinstance(value, dict):
            return float.fromhex(value["float"])
        if get_origin(hint) is Literal:
            fits = value in get_args(hint)
        else:
            fits = hint in (NoneType, None, bool, int, str) and type(value) is (hint or NoneType)
        if not fits:
            raise StateError(f"{path} is a {type(value).__name__}, not {hint}.")
        return value


def all_finite(state: Any) -> bool:
    """Return whether all numbers of a state are finite."""
    tensors: dict[str, Tensor] = {}
    take_apart("", state, tensors, {})
    numbers = [value for value in tensors.values() if value.is_floating_point()]
    if not numbers:
        return True
    # one call per tensor, and a GPU is waited for only once; finite numbers may have an infinite sum
    if math.isfinite(torch.stack([value.sum() for value in numbers]).sum().item()):
        return True
    return all(bool(torch.isfinite(value).all()) for value in numbers)
