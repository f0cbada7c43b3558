"""Private training: the walk over the releases of a plan, and clients in one process that make them."""

from __future__ import annotations

import math
import os
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgmm.core.moments import Scaling
from fedgmm.core.params import Params
from fedgmm.core.sums import Sums
from fedgmm.data.dataset import FederatedDataset, LabelledRows
from fedgmm.methods.base import DENSITY, RoundInfo
from fedgmm.nets.modules import ModuleNetwork
from fedgmm.nets.networks import as_numbers, function_of
from fedgmm.privacy.accounting import Release, compose, epsilon_of, mu_of
from fedgmm.privacy.forecast import forecast
from fedgmm.privacy.ledger import Budget, Entry, Ledger
from fedgmm.privacy.noise import RandomBytes, noisy
from fedgmm.privacy.noisy_sums import FloatArray, NoisySums
from fedgmm.privacy.private_em import PrivateRows
from fedgmm.privacy.private_method import (
    DEVIATION,
    MUS,
    ROUND,
    PrivateMixture,
    PrivateShared,
)
from fedgmm.privacy.settings import LINEAR_ROUNDS, NETWORK_ROUNDS, Privacy, PrivacyError
from fedgmm.training.build import learner_network
from fedgmm.training.loop import Replies, Training
from fedgmm.training.options import TrainingOptions

_BLOCK = 32_768  # rows whose contributions are computed at once
_ROUNDING = 1e-9  # relative, of a budget

_METHODS = ("fedgmm", "fedem", "fedavg", DENSITY)


def check_private(dataset: FederatedDataset, options: TrainingOptions, privacy: Privacy) -> None:
    """Raise :class:`PrivacyError` unless a run can be differentially private."""
    check_private_options(options)
    if dataset.task == "regression":
        raise PrivacyError("epsilon is for classes, not for numbers to predict.")
    images = len(dataset.input_shape) != 1
    if (images and options.algorithm in ("fedgmm", DENSITY)) or (
        not dataset.train.features_are_inputs and options.algorithm != "fedavg"
    ):
        raise PrivacyError(
            "epsilon with Gaussians is for rows of columns, without separate features; images can be "
            "trained by fedavg or fedem."
        )
    net = function_of(learner_network(options, dataset.input_shape, dataset.classes))
    if isinstance(net, ModuleNetwork) and net.integer_inputs:
        raise PrivacyError("epsilon is for inputs with bounds, not for integers such as tokens.")
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
    refused = {
        "components='auto' or learners='auto'": bool(options.open_sizes),
        "personal_labels=True": options.personal_labels is True,
        "refit=True": options.refit,
        "patience": options.patience is not None,
        "warmup": options.warmup > 0,
        "participation below 1": options.participation < 1,
        "aggregation='paper'": options.aggregation != "exact",
        "pca": options.pca is not None,
        "augment": options.augment,
        "pretrained": options.pretrained is not None,
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
    columns, clients = dataset.train.features.columns, len(dataset.names)
    found = forecast(method, columns, clients, len(dataset.train), persons)
    if not found.is_fine:
        warnings.warn(str(found), NoiseWarning, stacklevel=4)


def private_rounds(options: TrainingOptions, privacy: Privacy) -> int:
    """Return the number of noised rounds of a run."""
    linear = options.learner == "linear" or options.algorithm == DENSITY
    usual = LINEAR_ROUNDS if linear and not descends(options) else NETWORK_ROUNDS
    return min(options.rounds, privacy.rounds or usual)


def descends(options: TrainingOptions) -> bool:
    """Return whether linear learners are trained by noised gradient steps, as networks are."""
    return options.solver == "sgd" and options.algorithm != DENSITY


def declared_scaling(privacy: Privacy, dataset: FederatedDataset) -> Scaling | None:
    """Return the scaling of columns from the declared bounds to ``[-1, 1]``; bytes need none."""
    if dataset.train.inputs.dtype == torch.uint8:
        return None
    if len(dataset.input_shape) > 1:  # one pair for all pixels
        low, high = (one[0].reshape(()) * np.ones(dataset.input_shape) for one in privacy.limits(1))
    else:
        low, high = privacy.limits(dataset.input_shape[0], dataset.column_names)
    return Scaling(torch.from_numpy((low + high) / 2), torch.from_numpy((high - low) / 2))


class Account:
    """The releases of one run in one process, counted before any noise is drawn.

    A run that is killed after a release and before its checkpoint resumes with fresh noise. The ledger has
    counted the lost release, so what is left of the budget is shared by the releases that are left, and
    the total never exceeds it.

    Args:
        privacy: the budget.
        checkpoint: of the run; the ledger is in its folder. ``None`` keeps the account in memory.
        table: fingerprint of the rows.

    Raises:
        LedgerError: the ledger is damaged, or an older copy.
    """

    def __init__(self, privacy: Privacy, checkpoint: Path | None = None, table: str = "") -> None:
        assert privacy.epsilon is not None
        assert privacy.delta is not None
        self._budget = Budget(privacy.epsilon, privacy.delta)
        self._unit, self._table = privacy.unit, table
        self._run = "" if checkpoint is None else checkpoint.name
        self.budget = mu_of(privacy.epsilon, privacy.delta)
        self.ledger = None if checkpoint is None else Ledger.of_runs(checkpoint.parent)
        known = [] if self.ledger is None else self.ledger.entries()
        self.mus = [one.release.mu for one in known if one.run == self._run]

    def include(self, spent: Tensor) -> None:
        """Count the releases of a checkpoint that the ledger does not know."""
        missing = compose(spent.tolist()) ** 2 - compose(self.mus) ** 2
        if missing > _ROUNDING * self.budget**2:
            self._count("releases of the checkpoint", math.sqrt(missing))

    @property
    def left(self) -> float:
        """``μ²`` that is left."""
        return max(self.budget**2 - compose(self.mus) ** 2, 0.0)

    @property
    def epsilon(self) -> float:
        """``ε`` of all releases so far."""
        return epsilon_of(compose(self.mus), self._budget.delta) if self.mus else 0.0

    def charge(self, name: str, share: float) -> float:
        """Count a release that uses a share of what is left; return its ``μ``.

        Raises:
            PrivacyError: nothing is left.
        """
        mu = math.sqrt(share * self.left)
        if mu < 1e-6 * self.budget:
            raise PrivacyError(
                f"The privacy budget is spent before release {name!r}"
                + ("." if self.ledger is None else f"; {self.ledger.path} lists the releases.")
            )
        self._count(name, mu)
        return mu

    def _count(self, name: str, mu: float) -> None:
        if self.ledger is not None:
            entry = Entry(Release(mu), name, self._run, self._table, self._unit)
            self.ledger.charge(entry, plan=self._budget)
        self.mus.append(mu)


def unit_weights(privacy: Privacy, codes: Tensor, persons: Tensor | None) -> Tensor:
    """Return the weight of each row, ``(N,)``: those of one unit add up to one.

    A row, a person or a client counts as one, however many rows it has. Counting a person with several
    rows more often would need as much more noise. ``codes`` and ``persons`` are the client and the person
    of each row.
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


# ---------------------------------------------------------------------- the walk over the plan


class PrivateWalk(ABC):
    """Clients of a private run behind the round loop: they make the releases of the plan in order."""

    loop: Training  # of the run; it saves the state after every release, so none is asked for twice

    @abstractmethod
    def release(self, method: PrivateMixture, shared: PrivateShared, place: int) -> Sums:
        """Return a noisy total, see :func:`noisy_sums`; ``place`` is its place in the plan."""

    def step(self, method: Any, shared: PrivateShared, personal: Any, number: int) -> Replies:
        """Make all releases up to a round; return its total. Clients have no personal part yet."""
        names = [name for name, _ in method.plan()]
        place = [at for at, name in enumerate(names) if name == ROUND][number - 1]
        for before in range(len(shared.spent), place):
            noisy = self.release(method, shared, before)
            shared = self.loop.run.shared = method.advance(names[before], shared, noisy)
            self.loop.save()
        return Replies(personal, self.release(method, shared, place))

    def score(self, method: Any, shared: Any, personal: Any) -> float:
        """Refuse: scores of validation rows are not noised."""
        raise PrivacyError("patience compares scores of rows, which are not private; leave it out.")


def noisy_sums(layout: NoisySums, total: FloatArray, sigma: float, mu: float) -> Sums:
    """Return a noisy total as sums, with the deviations of its noise and the ``μ`` that it costs."""
    deviations = layout.deviations(sigma)
    return Sums(
        {
            **layout.read(total),
            **{DEVIATION + name: torch.tensor(one) for name, one in deviations.items()},
            MUS: torch.tensor([mu], dtype=torch.float64),
        }
    )


@dataclass
class PrivateClients(PrivateWalk):
    """Clients in this process that send noised sums, for :class:`~fedgmm.training.loop.Training`."""

    rows: LabelledRows  # of all clients, within ``[-1, 1]``
    privacy: Privacy  # the budget
    account: Account  # of the run
    weights: Tensor  # of the rows, see :func:`unit_weights`
    # of random bytes; ``None`` is the operating system
    source: RandomBytes = field(default=os.urandom)

    def facts(self) -> dict[str, Any]:
        """Return the budget and what was spent of it, for the model and its files."""
        return {
            **self.privacy.record(),
            "spent": self.account.epsilon,
            "releases": len(self.account.mus),
        }

    def start(self, method: Any, learner: Params | None) -> tuple[Any, Any]:
        """Return the parameters before any release; the first round makes the releases before it."""
        return method.init(self.rows)  # type: ignore[no-any-return]

    def release(self, method: PrivateMixture, shared: PrivateShared, place: int) -> Sums:
        """Return a noisy total; the account counts it before its noise is drawn."""
        self.account.include(shared.spent)
        plan = method.plan()
        name, share = plan[place]
        layout = method.clipped_layout(name, shared)
        total = vector_of(method, name, shared, self.rows, self.weights)
        mu = self.account.charge(name, share / sum(one for _, one in plan[place:]))
        sigma = layout.sensitivity / mu
        return noisy_sums(layout, noisy(total, sigma, self.source), sigma, mu)

    def accepted(self, number: int, info: RoundInfo) -> dict[str, Any]:
        """Return ``ε`` of all releases so far, for the history."""
        return {"epsilon": self.account.epsilon}

    def finish(self, method: Any, shared: PrivateShared, personal: Any) -> Any:
        """Return the weights of the clients, learned at home after the last round."""
        return method.finish(shared, personal, self.rows)

    def remember_best(self) -> None:
        """Do nothing, because no round is compared with another."""


def vector_of(
    method: PrivateMixture,
    name: str,
    shared: PrivateShared,
    rows: LabelledRows,
    weights: Tensor,
) -> FloatArray:
    """Return the vector of the release ``name`` without noise, over the rows of one client or of all.

    Rows are clipped to ``[-1, 1]``. If whole clients are protected, each one's sums are clipped, too.
    """
    layout = method.clipped_layout(name, shared)
    whole = method.privacy.unit == "client"
    edges = rows.offsets.tolist() if whole else [*range(0, len(rows), _BLOCK), len(rows)]
    total = np.zeros(layout.numbers)
    for first, last in pairwise(edges):
        if last > first:
            inputs = as_numbers(rows.inputs[first:last], torch.float64).flatten(1).cpu()
            block = PrivateRows(
                inputs.clamp(-1.0, 1.0), rows.labels[first:last].cpu(), weights[first:last]
            )
            sums = method.contributions(name, shared, block)
            total += layout.vector(layout.clipped(sums) if whole else sums)
    return total
