"""A site's protection of single rows against a server that chooses the model of every round.

:mod:`fedgmm.core.dominance` keeps a sum from resting on few rows. Here are random weights of rows, so
that two sums that differ by one row do not give it away, and bounds on the models that a site evaluates.
Neither is differential privacy: a server that asks often enough can average the weights away.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedgmm.data.dataset import LabelledRows
from fedgmm.files import private_folder, write_once
from fedgmm.methods.base import Prediction

SMALLEST_VARIANCE = 1e-4
"""Smallest eigenvalue of a covariance, of standardised columns; narrower Gaussians pick single rows."""

LARGEST_PARAMETER = 1e3
"""Largest absolute parameter of a learner, and of a mean, of standardised columns; larger ones cut
rows apart that hardly differ."""


class ImplausibleModelError(ValueError):
    """A model that no honest server makes; the text says why."""


@dataclass(frozen=True)
class RowWeights:
    """Secret weights of rows, new for every request and the same for a repeated one.

    Weights are uniform around one and add up to the number of rows. They change a mean over ``n`` rows
    by ``spread / √n`` deviations, which is ``spread`` times its standard error.

    Attributes:
        secret: file with the key; it is made when it is needed.
        spread: standard deviation of the weights; zero leaves rows as they are.
    """

    secret: Path
    spread: float

    def draw(self, request: str, rows: int) -> torch.Tensor:
        """Return the weights of a request, ``(rows,)`` float64; ``request`` is its digest."""
        if not self.secret.is_file():
            private_folder(self.secret.parent)
            write_once(self.secret, secrets.token_bytes(32))
            self.secret.chmod(0o600)
        seed = hmac.digest(self.secret.read_bytes(), request.encode(), hashlib.sha256)
        generator = np.random.Generator(np.random.Philox(int.from_bytes(seed, "big") >> 128))
        half = np.sqrt(3.0) * self.spread
        weights = 1.0 + generator.uniform(-half, half, rows)
        return torch.from_numpy(weights * (rows / weights.sum()))

    def apply(self, rows: LabelledRows, request: str) -> LabelledRows:
        """Return the rows of one client with their weights for a request."""
        if not self.spread:
            return rows
        own = self.draw(request, len(rows)).to(rows.device)
        return replace(rows, features=replace(rows.features, weights=own))


def check_model(prediction: Prediction) -> None:
    """Raise ``ImplausibleModelError`` unless a model's Gaussians and learners are smooth enough."""
    for name, value in prediction.learners.items():
        if value.numel() and float(value.abs().max()) > LARGEST_PARAMETER:
            raise ImplausibleModelError(
                f"the server sent a learner with a parameter above {LARGEST_PARAMETER:g} ({name}), which "
                "could single out a row"
            )
    current = prediction.gaussians
    if current is None or current.covariance_type == "identity":
        return
    if float(current.means.abs().max()) > LARGEST_PARAMETER:
        raise ImplausibleModelError(
            f"the server sent a mean above {LARGEST_PARAMETER:g}, which could single out a row"
        )
    own = current.covariances
    full = current.covariance_type in ("full", "tied")
    smallest = torch.linalg.eigvalsh(own) if full else own
    if float(smallest.min()) < SMALLEST_VARIANCE * (1.0 - 1e-6):
        raise ImplausibleModelError(
            f"the server sent a Gaussian with a variance below {SMALLEST_VARIANCE:g}, which could single "
            "out a row; train with a larger reg_covar"
        )
