"""Local: every client trains alone. Also helpers of methods whose clients have own learners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgmm.core.params import Params, count_learners, expand_clients, take_clients
from fedgmm.core.sums import Declaration, Sum, Sums, SumsError, row_counts
from fedgmm.data.dataset import LabelledRows
from fedgmm.methods.base import Personal, Prediction, RoundInfo, Shared, SupervisedMethod
from fedgmm.methods.local_training import LocalTraining
from fedgmm.nets.learners import largest_log_likelihood, log_likelihoods
from fedgmm.nets.networks import Network, as_numbers
from fedgmm.nets.sgd import plan_batches

_ROWS_AT_ONCE = 512
_LARGEST_LOG_LIKELIHOOD = 1e18  # of one row's label, in absolute value

FIT: dict[str, Sum] = {
    "rows": row_counts(),
    "log_likelihood": Sum((), largest=_LARGEST_LOG_LIKELIHOOD),
}
"""The sums that say how well the clients' own learners fit."""


def fit_of_own_learners(
    training: LocalTraining, personal: Params, rows: LabelledRows
) -> dict[str, Tensor]:
    """Return the sums of ``FIT``, for each client's own learner, ``(C, 1, ...)``."""
    total = torch.zeros((), dtype=torch.float64, device=rows.device)
    one = {name: value[0] for name, value in personal.items()}
    order = torch.arange(len(rows), device=rows.device)
    with torch.inference_mode():
        for clients in training.groups(rows, one):
            plan = plan_batches(rows.offsets, clients, [order], _ROWS_AT_ONCE)
            own = take_clients(personal, plan.clients)
            for step in plan.steps:
                active = take_clients(own, step.clients)
                inputs = as_numbers(rows.inputs[step.rows], training.dtype)
                fit = log_likelihoods(training.net, active, inputs, rows.labels[step.rows])
                counted = step.mask if rows.weights is None else step.mask * rows.weights[step.rows]
                total += (fit[..., 0] * counted).sum()
    # cloned, because tensors of inference mode cannot be added to in place later
    return {"rows": rows.features.weight_per_client.sum().double(), "log_likelihood": total.clone()}


def check_log_likelihood(sums: Sums, rows: int, net: Network) -> None:
    """Raise :class:`SumsError` if labels are more likely than ``rows`` rows can be."""
    if float(sums["log_likelihood"]) > rows * (largest_log_likelihood(net) + 1e-3):
        problem = "positive" if net.classes else "larger than possible"
        raise SumsError(f"the log-likelihood of its labels is {problem}")


def fit_info(sums: Sums) -> RoundInfo:
    """Return the mean log-likelihood over rows."""
    return RoundInfo(float(sums["log_likelihood"]) / max(float(sums["rows"].sum()), 1.0))


class OwnLearners(SupervisedMethod[Shared, Personal]):
    """A method whose clients send how well their own learners fit, the sums of ``FIT``."""

    def check(self, sums: Sums, rows: int, declaration: Declaration) -> None:
        """Check each sum by itself, and the fit."""
        super().check(sums, rows, declaration)
        check_log_likelihood(sums, rows, self.training.net)
        if abs(float(sums["rows"].sum()) - rows) > 1e-6:
            raise SumsError(f"it counts {float(sums['rows'].sum()):g} rows, not {rows}")


@dataclass(frozen=True)
class Local(OwnLearners[None, Params]):
    """No federation: a client's learner sees the client's own rows only."""

    training: LocalTraining
    shares_start = False

    def init(self, rows: LabelledRows, learner: Params | None = None) -> tuple[None, Params]:
        """Return the same start for every client."""
        start = self.training.initial(1, rows.device, learner)
        return None, expand_clients(start, len(rows.names))

    def client_step(
        self, shared: None, personal: Params, rows: LabelledRows, round_number: int = 1
    ) -> tuple[Params, Sums]:
        """Train every client's learner for one more round."""
        fit = fit_of_own_learners(self.training, personal, rows)
        return self.training.train_personal(personal, rows, round_number), Sums(fit)

    def server_step(
        self, shared: None, sums: Sums, round_number: int = 1
    ) -> tuple[None, RoundInfo]:
        """Return the fit; the server has no model."""
        return None, fit_info(sums)

    def newcomer(self, shared: None, learner: Params | None = None) -> Params:
        """Return the start that every client has, ``(1, 1, ...)``."""
        return expand_clients(self.training.initial(1, torch.device("cpu"), learner), 1)

    def prediction(self, shared: None, personal: Params) -> Prediction:
        """Return each client's own learner."""
        learners = {name: value[:, 0] for name, value in personal.items()}
        assignment = torch.arange(count_learners(learners))
        return Prediction(self.training.net, learners, assignment=assignment)

    def with_fewest_rows(self, rows: float) -> Local:
        """Return the method, whose sums run over all rows of a client."""
        return self

    def declare_sums(self, columns: int) -> dict[str, Sum]:
        """Declare the fit; no learner leaves its client."""
        return FIT

    def declare_broadcast(self, columns: int) -> dict[str, Sum]:
        """Declare an empty broadcast."""
        return {}

    def received(self, arrays: Mapping[str, Tensor], columns: int) -> None:
        """Return nothing, because nothing is shared."""
