"""Networks under differential privacy: every round is one step along a noised sum of clipped gradients.

The releases and the units are those of :class:`~fedgmm.privacy.private_method.PrivateMixture`; only the
gradient of a row differs. It is that of all learners together, weighted by the row's responsibilities under
the released parameters, and shortened to ``clip_norm`` (DP-SGD of Abadi et al., 2016, with all rows in
every step, so the closed form of the accountant holds)::

    g_i = (q_i1 ∇_θ1 ℓ_i1, …, q_iM ∇_θM ℓ_iM),      Σ_i w_i g_i · min(1, C/‖g_i‖) + noise

Gradients of single rows come from stacked parameters: each row gets the parameters along a leading axis, as
a client of one row. So every network that trains here can be private, except for batch normalisation,
which mixes rows.

Linear learners are trained this way with ``solver="sgd"``. Their steps are as long as the noise allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedgmm.core.gaussians import gaussians
from fedgmm.core.moments import Scaling
from fedgmm.core.params import Params, is_statistic
from fedgmm.core.sums import Sums
from fedgmm.data.dataset import LabelledRows
from fedgmm.methods.fedgmm import FedGMM
from fedgmm.nets.learners import at_labels
from fedgmm.nets.networks import Dense, function_of
from fedgmm.privacy.noisy_sums import NoisySums, clip_rows
from fedgmm.privacy.private_em import PrivateRows, radius, round_sums
from fedgmm.privacy.private_method import ROUND, PrivateMixture, PrivateShared
from fedgmm.privacy.settings import NETWORK_ROUNDS, Privacy, PrivacyError

_CLIP, _LINEAR_CLIP = 1.0, 0.25  # length of a row's gradient, if the options name none
_MOMENTUM = 0.9
# gradients get most of it, because the start has found the Gaussians
_LINEAR_SHARES = {
    "gradient": 0.94,
    "first": 0.03,
    "second": 0.01,
    "counts": 0.01,
    "log_likelihood": 0.01,
}
_START_ERROR = 0.01  # variance of the first means
_LONGER = 10.0  # steps of linear learners, relative to the learning rate
_WANDER = 0.3  # deviation of a linear learner's weights by all noise, which limits its steps
_LARGEST_LOGIT = 1e4
_NUMBERS = 8_000_000  # in the gradients of a block of rows


def private_method(
    base: FedGMM, privacy: Privacy, *, columns: bool = True, descent: bool = False
) -> PrivateMixture:
    """Return the private form of a method.

    With ``columns``, inputs are those of a table, and not images. ``descent`` trains linear learners by
    gradient steps, too.
    """
    net = function_of(base.training.net)
    if isinstance(net, Dense) and not net.hidden and columns and not descent:
        return PrivateMixture(base, privacy)
    if any(map(is_statistic, net.parameter_shapes)):
        raise PrivacyError(
            "epsilon needs the gradient of each row, and batch normalisation mixes rows; use GroupNorm or "
            "LayerNorm."
        )
    return PrivateNetworks(base, privacy, columns)


def centres_of(shared: PrivateShared) -> Tensor:
    """Return the mean input of each learner by the released Gaussians, ``(M2, d)``."""
    joint = shared.weights.reshape(len(shared.gaussians.means), -1)
    whitened = (joint / joint.sum(0)).mT @ shared.gaussians.means
    # learners see inputs that are standardised, but not whitened
    longest = radius(whitened.shape[1])  # also if a server sends parameters that cannot be
    centres: Tensor = whitened @ torch.linalg.pinv(shared.coordinates.whitener)
    return centres.clamp(-longest, longest)


@dataclass(frozen=True)
class NetworkShared(PrivateShared):
    """The public parameters of networks, which see standardised inputs.

    Attributes:
        velocity: moving average of the noised gradients, ``(M2 · P,)``; only the server uses it.
    """

    velocity: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))


@dataclass(frozen=True)
class PrivateNetworks(PrivateMixture):
    """FedAvg, FedEM and FedGMM with networks, whose clients send nothing but noised sums.

    Attributes:
        columns: inputs are columns of a table, which are standardised by a release of their moments.
    """

    columns: bool = True

    sums_up_gradients: ClassVar[bool] = True

    @property
    def clip(self) -> float:
        """Length to which a row's gradient is shortened."""
        return float(self.training.sgd.clip_norm or (_LINEAR_CLIP if self.linear else _CLIP))

    @property
    def linear(self) -> bool:
        """Whether the learners have no hidden layer."""
        net = function_of(self.training.net)
        return isinstance(net, Dense) and not net.hidden

    # ------------------------------------------------------------------ the releases

    def plan(self) -> list[tuple[str, float]]:
        """Return the releases of a run, with equal shares of ``μ²`` for all rounds."""
        own = replace(self, privacy=replace(self.privacy, unit="row", rounds=1))
        start = [one for one in PrivateMixture.plan(own) if one[0] != ROUND]
        if not self.base.density:
            start = start[:1] if self.columns else []  # the columns alone
        rounds = self.privacy.rounds or NETWORK_ROUNDS
        rest = (1.0 - sum(share for _, share in start)) / rounds
        return self.with_lengths([*start, *[(ROUND, rest)] * rounds])

    def layout(self, name: str, columns: int) -> NoisySums:
        """Return the parts of a release, with bounds for one row."""
        found = super().layout(name, columns)
        if name != ROUND:
            return found
        numbers = sum(map(math.prod, self.training.net.parameter_shapes.values()))
        shape = (self.base.learners * numbers,)
        return NoisySums(
            tuple(
                replace(one, shape=shape, bound=self.clip) if one.name == "gradient" else one
                for one in found.parts
            )
        )

    def round_shares(self) -> Mapping[str, float]:
        """Return how the parts of a round share its budget, before those that it lacks are left out."""
        if self.linear and not self.centred:
            return _LINEAR_SHARES
        return super().round_shares()

    def round_sums(self, shared: PrivateShared, rows: PrivateRows) -> dict[str, Tensor]:
        """Return the sums of a round over some rows, in blocks."""
        numbers = sum(value.numel() for value in shared.learners.values())
        size = max(1, _NUMBERS // numbers)
        total: dict[str, Tensor] = {}
        for first in range(0, len(rows.labels), size):
            found = self._block_sums(shared, PrivateRows(*(v[first : first + size] for v in rows)))
            total = {n: total[n] + value for n, value in found.items()} if total else found
        return total

    def _block_sums(self, shared: PrivateShared, rows: PrivateRows) -> dict[str, Tensor]:
        """Return the sums of a round over a block of rows."""
        n, seen = len(rows.labels), self._seen(shared, rows.inputs)
        each = dict(shared.learners)
        if self.linear:
            logits = self.training.net.logits(each, seen)
        else:
            each = {k: v.expand(n, *v.shape).requires_grad_() for k, v in each.items()}
            logits = self.training.net.logits(each, seen[:, None])[:, 0]
        # every sum stays finite and bounded, with any parameters that a client may receive
        logits = logits.nan_to_num().clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)
        log_y = at_labels(torch.log_softmax(logits, -1), rows.labels)
        sums, q = round_sums(
            shared.gaussians,
            shared.weights,
            shared.coordinates.apply(rows.inputs) if self.base.density else None,
            log_y.detach(),
            rows.weights,
            self._limits(rows.inputs.shape[1]),
            centred=self.centred,
        )
        of_learner = q.sum(1)
        if self.linear:
            centred = seen[:, None] - centres_of(shared)
            sums["gradient"] = self._linear_gradient(centred, logits, of_learner, rows)
            return sums
        gradients = torch.autograd.grad(-(of_learner * log_y).sum(), list(each.values()))
        flat = torch.cat([one.flatten(1) for one in gradients], 1).nan_to_num()
        sums["gradient"] = rows.weights @ clip_rows(flat, self.clip * (1.0 - 1e-12))
        return sums

    def _linear_gradient(self, z: Tensor, logits: Tensor, q: Tensor, rows: PrivateRows) -> Tensor:
        """Return the sum of shortened gradients of ``W z + b``; that of a row is an outer product.

        ``z`` are inputs around the centre of each learner, ``(n, M2, d)``: what all rows of a learner have
        in common would only make their gradients longer.
        """
        error = torch.softmax(logits, -1) - one_hot(rows.labels, logits.shape[-1])[:, None]
        error = error * q[..., None]
        length = (error.square().sum(-1) * (1.0 + z.square().sum(-1))).sum(1).sqrt()
        shorter = (self.clip * (1.0 - 1e-12) / length.clamp_min(1e-300)).clamp_max(1.0)
        error = error * (rows.weights * shorter)[:, None, None]
        weight = torch.einsum("nmk,nmd->mkd", error, z)
        return torch.cat([weight.flatten(), error.sum(0).flatten()])

    def _seen(self, shared: PrivateShared, inputs: Tensor) -> Tensor:
        """Return inputs ``(n, d)`` as the networks see them, ``(n, *shape)``."""
        where = shared.coordinates
        return ((inputs - where.mean) / where.scale).reshape(-1, *self.training.net.input_shape)

    def _after_round(
        self, shared: PrivateShared, noisy: Sums, deviation: Mapping[str, float]
    ) -> PrivateShared:
        """Return the Gaussians of noisy moments, and the learners after one step of SGD."""
        assert isinstance(shared, NetworkShared)
        rest = Sums({name: value for name, value in noisy.items() if name != "gradient"})
        number = [name for name, _ in self.plan()[: len(shared.spent)]].count(ROUND)
        gain = 1.0
        if self.linear and self.base.density:
            # the mean over the rounds and the start, which counts for as many rounds as are as exact
            noise = deviation["first"] * self.components / max(float(noisy["counts"].sum()), 1.0)
            gain = 1.0 / (number + noise**2 / _START_ERROR)
        averaged = {name: value * math.sqrt(gain) for name, value in deviation.items()}
        moved = super()._after_round(shared, rest, averaged)
        assert isinstance(moved, NetworkShared)
        if gain < 1.0:  # the noise of many rounds is averaged
            old, new = shared.gaussians, moved.gaussians
            means = torch.lerp(old.means, new.means, gain)
            covariances = torch.lerp(old.covariances, new.covariances, gain)
            averages = gaussians(means, covariances, old.covariance_type)
            weights = torch.lerp(shared.weights, moved.weights, gain)
            moved = replace(moved, gaussians=averages, weights=weights)
        counts = noisy["counts"].reshape(-1, self.base.learners).sum(0)
        # rows of a learner that lost nearly all of them would be too few to divide by
        counts = counts.clamp_min(max(1.0, 0.1 * float(counts.mean())))
        rate, per_row = torch.full_like(counts, self.training.options(number).lr), counts
        if self.linear:
            # momentum multiplies a step by ten, and the noise of many steps adds up by its squares
            rounds = self.privacy.rounds or NETWORK_ROUNDS
            noise = deviation["gradient"] / self.clip * math.sqrt(rounds) / (1.0 - _MOMENTUM)
            # noisy numbers of rows are not in the velocity, where a small one would stay
            rate, per_row = _LONGER * rate / counts, torch.ones_like(counts)
            rate = rate.clamp_max(_WANDER / max(noise, 1e-300))
        gradients = noisy["gradient"]
        if self.linear:
            gradients = self._around_zero(gradients, centres_of(shared))
        learners, velocity, first = {}, [], 0
        for name, value in shared.learners.items():
            gradient = gradients[first : first + value.numel()].reshape(value.shape)
            step, own = (one.reshape(-1, *(1,) * (value.dim() - 1)) for one in (rate, per_row))
            past = shared.velocity[first : first + value.numel()].reshape(value.shape)
            speed = _MOMENTUM * past + gradient / (self.clip * own)
            decay = self.training.sgd.weight_decay * value * (counts.mean() if self.linear else 1.0)
            learners[name] = value - step * (speed + decay)
            velocity.append(speed.reshape(-1))
            first += value.numel()
        return replace(moved, learners=learners, velocity=torch.cat(velocity))

    def _around_zero(self, gradients: Tensor, centres: Tensor) -> Tensor:
        """Return the steps of ``W`` and ``b`` that are those of ``W (z - c) + b'``, flattened."""
        m2, d = centres.shape
        split = gradients.numel() * d // (d + 1)
        weight, bias = gradients[:split], gradients[split:]
        common = torch.einsum("mkd,md->mk", weight.reshape(m2, -1, d), centres)
        return torch.cat([weight, bias - common.flatten()])

    # ------------------------------------------------------------------ the method

    def blank(self, columns: int) -> NetworkShared:
        """Return the public parameters before any release."""
        shared = super().blank(columns)
        drawn = self.training.initial(self.base.learners, torch.device("cpu"))
        learners = {name: value.double() for name, value in drawn.items()}
        if self.linear and (self.base.density or self.base.learners == 1):
            learners = {name: torch.zeros_like(value) for name, value in learners.items()}
        velocity = torch.zeros(sum(value.numel() for value in learners.values())).double()
        return NetworkShared(**{**vars(shared), "learners": learners}, velocity=velocity)

    def init(
        self, rows: LabelledRows, learner: Params | None = None
    ) -> tuple[NetworkShared, Tensor]:
        """Return the parameters before any release; checkpoints read the types of this signature."""
        shared, personal = super().init(rows, learner)
        assert isinstance(shared, NetworkShared)
        return shared, personal

    def _logits(self, shared: PrivateShared, inputs: Tensor) -> Tensor:
        """Return the logits of every network for inputs ``(n, d)``, ``(n, M2, K)``."""
        found: Tensor = self.training.net.logits(shared.learners, self._seen(shared, inputs))
        return found

    def standardised_learners(self, shared: PrivateShared) -> Params:
        """Return the learners, which see standardised inputs in training, too."""
        return shared.learners

    def scaling(self, shared: PrivateShared, declared: Scaling) -> Scaling:
        """Return the scaling of columns that :meth:`prediction` expects; images keep the declared one."""
        return super().scaling(shared, declared) if self.columns else declared

    def received(self, arrays: Mapping[str, Tensor], columns: int) -> NetworkShared:
        """Return the public parameters from the arrays of a broadcast."""
        return NetworkShared(**vars(super().received(arrays, columns)))
