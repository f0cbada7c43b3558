"""From what a caller gives to what a fitted model sees: checked, scaled, as numbers on its device."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedgmm.core.moments import Scaling
from fedgmm.data.dataset import LabelledRows, numeric
from fedgmm.methods.base import Prediction
from fedgmm.wording import counted

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class RowReader:
    """Makes rows ready for a model's learners and Gaussians.

    Attributes:
        prediction: whose rows they are to be.
        input_shape: of one row.
        scaling: of the inputs, or ``None``.
        features_are_inputs: the Gaussians see the inputs, not features of their own.
    """

    prediction: Prediction
    input_shape: tuple[int, ...]
    scaling: Scaling | None
    features_are_inputs: bool

    def of_arrays(self, X: ArrayLike, features: ArrayLike | None) -> tuple[Tensor, Tensor]:
        """Inputs ``(n, *shape)``, and what the Gaussians see, ``(n, d)``."""
        inputs = numeric(X, "X")
        self._check_shape(inputs.shape[1:])
        self._check_features(features is not None)
        x = _finite(inputs, "X").to(self._device)
        gaussians = self.prediction.gaussians
        if features is None or gaussians is None:
            return self._scaled(x, None)
        seen = numeric(features, "features")
        if seen.shape != (len(x), gaussians.means.shape[1]):
            raise ValueError(
                f"features must have shape {(len(x), gaussians.means.shape[1])}, got {seen.shape}."
            )
        return self._scaled(x, _finite(seen, "features").to(self._device))

    def of_split(self, rows: LabelledRows) -> tuple[Tensor, Tensor]:
        """The same of a data set's rows, which were checked when it was made."""
        self._check_shape(tuple(rows.inputs.shape[1:]))
        own = not (rows.features_are_inputs or self.prediction.gaussians is None)
        self._check_features(own)
        here = rows.to(self._device)
        return self._scaled(here.inputs, torch.cat(here.features.chunks) if own else None)

    @property
    def log_volume(self) -> float:
        """What scaling takes from ``log P(x)``; features of their own are not scaled."""
        if self.scaling is None or not self.features_are_inputs:
            return 0.0
        return self.scaling.log_volume

    def _scaled(self, inputs: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows as the learners and as the Gaussians see them."""
        x = inputs if self.scaling is None else self.scaling.apply(inputs, self._parameter.dtype)
        return x, x.flatten(1) if features is None else features

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if shape != self.input_shape:
            raise ValueError(f"Rows must have shape {self.input_shape}, got {shape}.")

    def _check_features(self, own: bool) -> None:
        if self.prediction.gaussians is None or own != self.features_are_inputs:
            return
        if own:
            raise ValueError("The Gaussians of this model see the inputs; leave features out.")
        raise ValueError("The Gaussians of this model see features of their own; pass features=.")

    @property
    def _parameter(self) -> Tensor:
        """Any one of the learners': all have the same dtype and device."""
        return next(iter(self.prediction.learners.values()))

    @property
    def _device(self) -> torch.device:
        return self._parameter.device


def class_positions(y: ArrayLike, rows: int, classes: NDArray[Any]) -> IntArray:
    """The place of each row's label among ``classes``, ``(n,)``; an unknown label is an error."""
    labels = np.asarray(y)
    if labels.shape != (rows,):
        raise ValueError(
            f"y must hold one label per row: {counted(rows, 'row')}, y has shape {labels.shape}."
        )
    position = {label: index for index, label in enumerate(classes.tolist())}
    unknown = [label for label in labels.tolist() if label not in position]
    if unknown:
        raise ValueError(
            f"Label {unknown[0]!r} was not seen in training; the classes are "
            f"{classes.tolist()[:20]}."
        )
    return np.array([position[label] for label in labels.tolist()], dtype=np.int64)


def client_codes(rows: LabelledRows, names: Sequence[Hashable]) -> IntArray:
    """The place of each row's client among ``names``, ``(n,)``; an unknown client is an error."""
    position = {name: code for code, name in enumerate(names)}
    unknown = [name for name in rows.names if name not in position]
    if unknown:
        raise ValueError(
            f"Unknown client {unknown[0]!r}: the model knows {counted(len(names), 'client')}. "
            "Use adapt() to bring it in."
        )
    codes = np.array([position[name] for name in rows.names], dtype=np.int64)
    return np.asarray(codes[rows.codes.cpu().numpy()])


def _finite(rows: NDArray[Any], what: str) -> Tensor:
    """Rows as a tensor, if all of their numbers are finite."""
    if not np.isfinite(rows).all():
        row, column = np.argwhere(~np.isfinite(rows.reshape(len(rows), -1)))[0].tolist()
        raise ValueError(f"Input {what} contains NaN or infinity: row {row}, column {column}.")
    return torch.from_numpy(np.ascontiguousarray(rows))
