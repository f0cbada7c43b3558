"""Private training in one process: clients whose sums leave with noise, and the account of a run."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgmm.core.moments import Scaling
from fedgmm.core.params import Params
from fedgmm.core.sums import Sums
from fedgmm.data.dataset import FederatedDataset, LabelledRows
from fedgmm.files import write_atomically
from fedgmm.methods.base import DENSITY, RoundInfo
from fedgmm.privacy.accounting import compose, epsilon_of, mu_of
from fedgmm.privacy.forecast import forecast
from fedgmm.privacy.noise import RandomBytes, noisy
from fedgmm.privacy.noisy_sums import FloatArray, NoisySums
from fedgmm.privacy.private_em import Rows
from fedgmm.privacy.private_method import (
    DEVIATION,
    MUS,
    ROUND,
    NormBins,
    PrivateMixture,
    PrivateShared,
)
from fedgmm.privacy.settings import Privacy, PrivacyError
from fedgmm.training.loop import Replies
from fedgmm.training.options import TrainingOptions

_BLOCK = 32_768  # rows whose contributions are computed at once
_LENGTHS = 0.1  # share of a release's budget that decides how far clients are clipped
_QUANTILE = 0.8  # of the lengths of clients' contributions, to which the others are clipped

_METHODS = ("fedgmm", "fedem", "fedavg", DENSITY)


def check_private(dataset: FederatedDataset, options: TrainingOptions, privacy: Privacy) -> None:
    """Raise :class:`PrivacyError` unless a run can be differentially private.

    Args:
        dataset: the clients.
        options: of the run.
        privacy: with a budget.
    """
    check_private_options(options)
    if dataset.task == "regression":
        raise PrivacyError("epsilon is for classes, not for numbers to predict.")
    if len(dataset.input_shape) != 1 or not dataset.train.features_are_inputs:
        raise PrivacyError("epsilon is for rows of columns, without separate features.")
    if dataset.train.weights is not None:
        raise PrivacyError("epsilon cannot be combined with weights of rows; leave them out.")
    units = {"row": len(dataset.train), "client": len(dataset.names)}
    largest = {"row": int(torch.bincount(dataset.train.codes).max()), "client": 1}
    if privacy.unit == "person":
        if dataset.persons is None:
            raise PrivacyError(
                "unit='person' needs the person of each row: FederatedDataset.from_arrays(persons=...)."
            )
        units["person"] = len(torch.unique(dataset.persons))
        pairs = torch.unique(torch.stack([dataset.train.codes, dataset.persons]), dim=1)
        largest["person"] = int(torch.bincount(pairs[0]).max())
    privacy.check_units(units[privacy.unit], largest[privacy.unit])


def check_private_options(options: TrainingOptions) -> None:
    """Raise :class:`PrivacyError` for options that noised sums cannot have."""
    if options.algorithm not in _METHODS:
        raise PrivacyError(
            f"epsilon is for {', '.join(_METHODS)}, not for {options.algorithm!r}, whose clients send "
            "more than sums over rows."
        )
    if options.learner != "linear" and options.algorithm != DENSITY:
        raise PrivacyError(
            f"epsilon is for linear learners, not for learner={options.learner!r}; train a network on "
            "noised gradients with another tool, or use learner='linear' on its features."
        )
    refused = {
        "components='auto' or learners='auto'": bool(options.open_sizes),
        "personal_labels=True": options.personal_labels is True,
        "refit=True": options.refit,
        "patience": options.patience is not None,
        "warmup": options.warmup > 0,
        "participation below 1": options.participation < 1,
        "aggregation='paper'": options.aggregation != "exact",
        "pca": options.pca is not None,
    }
    for what, given in refused.items():
        if given:
            raise PrivacyError(
                f"epsilon cannot be combined with {what}, which would need rows without noise."
            )


class NoiseWarning(UserWarning):
    """A private run whose noise is large against its signal."""


def warn_of_noise(method: PrivateMixture, dataset: FederatedDataset) -> None:
    """Warn before training if the noise will cost accuracy, with what would help."""
    persons = None if dataset.persons is None else len(torch.unique(dataset.persons))
    columns, clients = dataset.input_shape[0], len(dataset.names)
    found = forecast(method, columns, clients, len(dataset.train), persons)
    if not found.is_fine:
        warnings.warn(str(found), NoiseWarning, stacklevel=4)


def private_options(options: TrainingOptions, privacy: Privacy) -> TrainingOptions:
    """Return the options of a private run: few rounds, and no end by a log-likelihood full of noise."""
    return replace(options, rounds=min(options.rounds, privacy.rounds), tol=None)


def declared_scaling(privacy: Privacy, dataset: FederatedDataset) -> Scaling:
    """Return the scaling of columns from the declared bounds to ``[-1, 1]``."""
    low, high = privacy.limits(dataset.input_shape[0], dataset.column_names)
    return Scaling(torch.from_numpy((low + high) / 2), torch.from_numpy((high - low) / 2))


def account_file(checkpoint: Path) -> Path:
    """Return the file of a run's account, beside its checkpoint."""
    return checkpoint.with_name(checkpoint.name + ".privacy.jsonl")


class Account:
    """The releases of one run, written to a file before any noise is drawn.

    A run that is killed after a release and before its checkpoint resumes with fresh noise. The file has
    counted the lost release, so what is left of the budget is shared by the releases that are left, and
    the total never exceeds it.

    Args:
        privacy: the budget.
        path: of the file; ``None`` keeps the account in memory.
    """

    def __init__(self, privacy: Privacy, path: Path | None = None) -> None:
        assert privacy.epsilon is not None
        assert privacy.delta is not None
        self.delta, self.path = privacy.delta, path
        self.budget = mu_of(privacy.epsilon, privacy.delta)
        self.mus: list[float] = []
        if path is not None and path.exists():
            # a line without its end was being written when the process was killed, before its release
            complete, _, rest = path.read_bytes().rpartition(b"\n")
            if rest:
                write_atomically(path, complete + b"\n" if complete else b"")
            self.mus = [float(json.loads(line)["mu"]) for line in complete.splitlines()]

    def include(self, spent: Tensor) -> None:
        """Count the releases of a checkpoint whose file of the account was lost."""
        if compose(spent.tolist()) > compose(self.mus):
            self.mus = spent.tolist()

    @property
    def left(self) -> float:
        """``μ²`` that is left."""
        return max(self.budget**2 - compose(self.mus) ** 2, 0.0)

    @property
    def epsilon(self) -> float:
        """``ε`` of all releases so far."""
        return epsilon_of(compose(self.mus), self.delta) if self.mus else 0.0

    def charge(self, name: str, share: float) -> float:
        """Count a release that uses a share of what is left; return its ``μ``.

        Raises:
            PrivacyError: nothing is left.
        """
        mu = math.sqrt(share * self.left)
        if mu < 1e-6 * self.budget:
            raise PrivacyError(
                f"The privacy budget is spent before release {name!r}"
                + ("." if self.path is None else f"; {self.path} lists the releases so far.")
            )
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"release": name, "mu": mu}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self.mus.append(mu)
        return mu


def unit_weights(privacy: Privacy, codes: Tensor, persons: Tensor | None) -> Tensor:
    """Return the weight of each row, ``(N,)``: those of one unit add up to one.

    A row, a person or a client counts as one, however many rows it has. Counting a person with several
    rows more often would need as much more noise.

    Args:
        privacy: names the unit.
        codes: the client of each row, ``(N,)``.
        persons: code of the person of each row, ``(N,)``.
    """
    if privacy.unit == "row":
        return torch.ones(len(codes), dtype=torch.float64)
    units = codes
    if privacy.unit == "person":
        if persons is None:
            raise PrivacyError(
                "unit='person' needs the person of each row: FederatedDataset.from_arrays(persons=...)."
            )
        units = persons
    return 1.0 / torch.bincount(units)[units].double()


@dataclass
class PrivateClients:
    """Clients in this process that send noised sums, for :class:`~fedgmm.training.loop.Training`.

    Attributes:
        rows: of all clients, within ``[-1, 1]``.
        privacy: the budget.
        account: of the run.
        weights: of the rows, see :func:`unit_weights`.
        source: of random bytes; ``None`` is the operating system.
    """

    rows: LabelledRows
    privacy: Privacy
    account: Account
    weights: Tensor
    source: RandomBytes = field(default=os.urandom)

    def facts(self) -> dict[str, Any]:
        """Return the budget and what was spent of it, for the model and its files."""
        return {
            **self.privacy.record(),
            "spent": self.account.epsilon,
            "releases": len(self.account.mus),
        }

    def start(self, method: Any, learner: Params | None) -> tuple[Any, Any]:
        """Run the releases before the first round."""
        shared, _ = method.init(self.rows)
        plan = method.plan()
        for place, (name, _) in enumerate(plan):
            if name == ROUND:
                break
            shared = method.advance(name, shared, self._release(method, name, shared, place))
        return shared, shared.weights.expand(len(self.rows.names), -1)

    def step(self, method: Any, shared: PrivateShared, personal: Any, number: int) -> Replies:
        """Return the noisy total of a round; clients have no personal part before the end."""
        self.account.include(shared.spent)
        plan = method.plan()
        first = next(place for place, (name, _) in enumerate(plan) if name == ROUND)
        sums = self._release(method, ROUND, shared, first + number - 1)
        return Replies(personal, sums)

    def accepted(self, number: int, info: RoundInfo) -> dict[str, Any]:
        """Return ``ε`` of all releases so far, for the history."""
        return {"epsilon": self.account.epsilon}

    def score(self, method: Any, shared: Any, personal: Any) -> float:
        """Refuse: scores of validation rows are not noised."""
        raise PrivacyError("patience compares scores of rows, which are not private; leave it out.")

    def finish(self, method: Any, shared: PrivateShared, personal: Any) -> Any:
        """Return the weights of the clients, learned at home after the last round."""
        return method.finish(shared, personal, self.rows)

    def remember_best(self) -> None:
        """Do nothing, because no round is compared with another."""

    # ------------------------------------------------------------------ one release

    def _release(
        self, method: PrivateMixture, name: str, shared: PrivateShared, place: int
    ) -> Sums:
        """Return a noisy total, with the deviations of its noise and the ``μ`` that it costs."""
        plan = method.plan()
        share = plan[place][1] / sum(one for _, one in plan[place:])
        layout = method.layout(name, self.rows.features.columns)
        spent: list[float] = []
        if self.privacy.unit == "client":
            units = [method.contributions(name, shared, rows) for rows in self._clients()]
            bins = NormBins(layout)
            mu = self.account.charge(f"lengths of {name}", _LENGTHS * share)
            spent.append(mu)
            sums = [bins.release.vector(bins.contributions(one)) for one in units]
            values, deviations = self._noised(bins.release, np.sum(sums, axis=0), mu)
            layout = bins.clipped_layout(values, deviations, _QUANTILE)
            total = np.sum([layout.vector(layout.clipped(one)) for one in units], axis=0)
            share *= (1.0 - _LENGTHS) / (1.0 - _LENGTHS * share)
        else:
            total = vector_of(method, name, shared, self.rows, self.weights)
        mu = self.account.charge(name, share)
        spent.append(mu)
        values, deviations = self._noised(layout, total, mu)
        return Sums(
            {
                **values,
                **{DEVIATION + n: torch.tensor(one) for n, one in deviations.items()},
                MUS: torch.tensor(spent, dtype=torch.float64),
            }
        )

    def _noised(
        self, layout: NoisySums, total: Any, mu: float
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        sigma = layout.sensitivity / mu
        return layout.read(noisy(total, sigma, self.source)), layout.deviations(sigma)

    def _clients(self) -> Iterator[Rows]:
        offsets = self.rows.offsets.tolist()
        for code in range(len(self.rows.names)):
            if offsets[code + 1] > offsets[code]:
                place = slice(offsets[code], offsets[code + 1])
                yield _within_bounds(self.rows, self.weights, place)


def vector_of(
    method: PrivateMixture,
    name: str,
    shared: PrivateShared,
    rows: LabelledRows,
    weights: Tensor,
) -> FloatArray:
    """Return the vector of a release without noise, block by block of rows.

    Args:
        method: the private method.
        name: of the release.
        shared: the public parameters.
        rows: of one client or of all; they are clipped to ``[-1, 1]``.
        weights: of the rows, see :func:`unit_weights`.
    """
    layout = method.layout(name, rows.features.columns)
    total = np.zeros(layout.numbers)
    for first in range(0, len(rows), _BLOCK):
        block = _within_bounds(rows, weights, slice(first, first + _BLOCK))
        total += layout.vector(method.contributions(name, shared, block))
    return total


def _within_bounds(rows: LabelledRows, weights: Tensor, place: slice) -> Rows:
    inputs = rows.inputs[place].flatten(1).double().cpu().clamp(-1.0, 1.0)
    return Rows(inputs, rows.labels[place].cpu(), weights[place])
