"""FedGMM, FedEM, FedAvg and the federated GMM by noised sums, as a method behind the round loop.

A run is a list of releases: ``columns``, ``covariance``, ``histogram``, then one ``round`` after the other.
For each the method gives three things, which are the same in one process and over a network:

- :meth:`PrivateMixture.contributions`: what a client adds up over its rows, given public parameters;
- :meth:`PrivateMixture.layout`: the parts of the sum, with the largest contribution of one unit;
- :meth:`PrivateMixture.advance`: the next public parameters, from the noisy total.

If whole clients are protected, a release of lengths comes before each of these and decides how far clients
are clipped (:class:`NormBins`).

Nothing else leaves a client. Its weights ``π_c`` are learned after the last round, from its own rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedgmm.core.gaussians import CovarianceType, Gaussians, gaussians
from fedgmm.core.moments import Scaling
from fedgmm.core.params import Params, count_learners
from fedgmm.core.sums import Sum, Sums
from fedgmm.data.dataset import LabelledRows
from fedgmm.methods.base import (
    LEARNERS,
    Prediction,
    RoundInfo,
    SupervisedMethod,
    learners_in,
)
from fedgmm.methods.fedgmm import FedGMM
from fedgmm.nets.learners import at_labels
from fedgmm.nets.networks import as_numbers
from fedgmm.privacy.accounting import mu_of
from fedgmm.privacy.disclosure import ImplausibleModelError
from fedgmm.privacy.noisy_sums import NoisySums, Part
from fedgmm.privacy.private_em import (
    Coordinates,
    MeanGradient,
    Mixture,
    PrivateRows,
    cells,
    clustered,
    column_sums,
    covariance_sums,
    gradient_radius,
    histogram_sums,
    linear_gradient,
    log_joint,
    log_likelihood_range,
    next_gaussians,
    next_learners,
    own_weights,
    radius,
    round_sums,
    standardised,
    unscaled,
    whitened,
)
from fedgmm.privacy.settings import LINEAR_ROUNDS, Privacy

ROUND = "round"
LENGTHS = "lengths of "
"""Names of the releases that decide how far clients are clipped start with this."""
DEVIATION = "deviation/"
"""Names of noise deviations start with this among noisy sums."""
MUS = "mus"
"""Name of the ``μ`` of the releases behind noisy sums."""

_START_SHARES = {"columns": 0.04, "covariance": 0.05, "histogram": 0.02}
_GROWTH = 1.25  # each round's share of the budget, relative to the one before
_SHARES = {"gradient": 0.75, "second": 0.14, "first": 0.08, "counts": 0.02, "log_likelihood": 0.01}
# one Gaussian and one learner need no responsibilities, so moments do not help to predict
_SINGLE_SHARES = {**_SHARES, "gradient": 0.92, "second": 0.03, "first": 0.02}
# clients are fewer than rows, so the many numbers of their covariances suffer most
_CLIENT_SHARES = {
    "gradient": 0.43,
    "second": 0.45,
    "first": 0.06,
    "counts": 0.05,
    "log_likelihood": 0.01,
}
_HOME_ROUNDS = 30  # of EM for a client's own weights after the last round
_ROUNDS_OF_WEIGHTS = 10  # of EM for them in each round, if whole clients are protected
_TIE = 0.999  # share of a Gaussian's weight that its own learner starts with
_LARGEST = 1e6  # number among public parameters that a client accepts
_LENGTHS = 0.1  # share of a release's budget that decides how far clients are clipped
_QUANTILE = 0.8  # of the lengths of clients' contributions, to which the others are clipped
_MOST_PARTS = 5


@dataclass(frozen=True)
class PrivateShared:
    """Everything that is public during a run.

    Attributes:
        coordinates: of the rows that sums run over.
        gaussians: in these coordinates.
        weights: ``π(m1, m2)``, flattened, ``(M1 · M2,)``.
        learners: in these coordinates, float64.
        spent: ``μ`` of every release so far.
        left: gradient at the learners by the rounds so far; only the server uses it.
        noise: variance of the noise in a value of the means and of the covariances, ``(2, M1)``; only the
            server uses it.
        bounds: of the parts of the next release, by which clients are clipped, ``(5,)``; zeros, or none,
            if it is not clipped further.
    """

    coordinates: Coordinates
    gaussians: Gaussians
    weights: Tensor
    learners: Params
    spent: Tensor
    left: MeanGradient | None = None
    noise: Tensor | None = None
    bounds: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    @property
    def mixture(self) -> Mixture:
        """The parameters that an E-step uses."""
        return Mixture(self.gaussians, self.weights, self.learners)


@dataclass(frozen=True)
class PrivateMixture(SupervisedMethod[PrivateShared, Tensor]):
    """A mixture whose clients send nothing but noised sums.

    Attributes:
        base: the method without privacy, whose sizes and penalties are used; its learners are linear.
        privacy: the budget.
    """

    base: FedGMM
    privacy: Privacy

    sums_up_gradients: ClassVar[bool] = False
    """Whether the noise of gradients is averaged over the rounds, because every round is a small step."""

    @property
    def training(self) -> Any:  # type: ignore[override]
        """Local training of the base, for its network."""
        return self.base.training

    @property
    def mixture(self) -> Any:  # type: ignore[override]
        """Settings of the Gaussians; ``None`` without a density."""
        return self.base.mixture

    @property
    def centred(self) -> bool:
        """Whether moments are taken relative to the current model: a client's sums are clipped as one."""
        return self.privacy.unit == "client"

    @property
    def components(self) -> int:
        """``M1``."""
        return self.base.gaussians.components if self.base.density else 1

    @property
    def _kind(self) -> CovarianceType:
        return self.base.gaussians.covariance_type if self.base.density else "full"

    @property
    def directions(self) -> int:
        """Number of directions of the histogram; zero for one Gaussian, which needs no histogram."""
        return min(self.components - 1, 3)

    # ------------------------------------------------------------------ the releases

    def plan(self) -> list[tuple[str, float]]:
        """Return the releases of a run, in order, with their shares of ``μ²``; the shares sum to one."""
        start = dict(_START_SHARES)
        if not self.directions:
            del start["histogram"]
        growth = [_GROWTH**number for number in range(self.privacy.rounds or LINEAR_ROUNDS)]
        rest = (1.0 - sum(start.values())) / sum(growth)
        return self.with_lengths([*start.items(), *((ROUND, rest * one) for one in growth)])

    def with_lengths(self, plan: list[tuple[str, float]]) -> list[tuple[str, float]]:
        """Return a plan with a release of lengths before each, if whole clients are protected."""
        if not self.centred:
            return plan
        pairs = [
            ((LENGTHS + name, _LENGTHS * share), (name, (1.0 - _LENGTHS) * share))
            for name, share in plan
        ]
        return [one for pair in pairs for one in pair]

    def releases(self) -> list[tuple[str, float]]:
        """Return the releases of a run, in order, with the ``μ`` of each; together they cost ``ε``."""
        assert self.privacy.epsilon is not None
        assert self.privacy.delta is not None
        budget = mu_of(self.privacy.epsilon, self.privacy.delta)
        return [(name, budget * math.sqrt(share)) for name, share in self.plan()]

    def clipped_layout(self, name: str, shared: PrivateShared) -> NoisySums:
        """Return the parts of a release with the bounds to which contributions are clipped."""
        found = self.layout(name, len(shared.coordinates.mean))
        bounds = shared.bounds.tolist()
        if name.startswith(LENGTHS) or not any(bounds):
            return found
        pairs = zip(found.parts, bounds, strict=False)
        return NoisySums(tuple(replace(one, bound=own or one.bound) for one, own in pairs))

    def layout(self, name: str, columns: int) -> NoisySums:
        """Return the parts of a release, with bounds for one row; for a client they are clipped further."""
        if name.startswith(LENGTHS):
            return self._bins(name, columns).release
        d, r = columns, radius(columns)
        triangle = d * (d + 1) // 2
        if name == "columns":
            whole = math.sqrt(d)
            return NoisySums(
                (
                    Part("rows", (1,), 1.0, 0.02),
                    Part("first", (d,), whole, 0.68),
                    Part("second", (d,), whole, 0.3),
                )
            )
        if name == "covariance":
            # ‖z zᵀ - I‖ ≤ max(R², d)
            return NoisySums(
                (
                    Part("rows", (1,), 1.0, 0.02),
                    Part("first", (d,), r, 0.18),
                    Part("second", (triangle,), r**2 + self.centred * math.sqrt(d), 0.8),
                )
            )
        if name == "histogram":
            return NoisySums((Part("cells", (cells(min(self.directions, d)),), 1.0, 1.0),))
        m1, m2, kind = self.components, self.base.learners, self.base.gaussians.covariance_type
        classes = self._classes
        _, half = self._limits(d)
        # the responsibilities of a row have length one at most, and those of a Gaussian, too
        found: dict[str, tuple[tuple[int, ...], float]] = {
            "counts": ((m1 * m2,), 1.0),
            "log_likelihood": ((1,), half),
        }
        if self.base.density:
            shapes = {"full": (m1, triangle), "tied": (triangle,), "diag": (m1, d)}
            # relative moments can be larger by what the model expects, but are clipped for a client
            found["first"] = ((m1, d), r * (1 + self.centred))
            found["second"] = (shapes.get(kind, (m1,)), r**2 * (1 + 4 * self.centred))
        if classes > 1:
            # both factors of (p - y) zᵀ are shortened
            found["gradient"] = ((m2, classes - 1, d + 1), gradient_radius(d))
        shares = self.round_shares()
        total = sum(shares[name] for name in found)
        return NoisySums(
            tuple(Part(n, *one, share=shares[n] / total) for n, one in sorted(found.items()))
        )

    def _bins(self, name: str, columns: int) -> NormBins:
        return NormBins(self.layout(name.removeprefix(LENGTHS), columns))

    def round_shares(self) -> Mapping[str, float]:
        """Return how the parts of a round share its budget, before those that it lacks are left out."""
        if self.components == self.base.learners == 1 and self._classes > 1:
            return _SINGLE_SHARES
        return _CLIENT_SHARES if self.centred else _SHARES

    def contributions(
        self, name: str, shared: PrivateShared, rows: PrivateRows
    ) -> dict[str, Tensor]:
        """Return the sums of a release over some rows, which are those of one client for lengths."""
        where = shared.coordinates
        if name.startswith(LENGTHS):
            own = self.contributions(name.removeprefix(LENGTHS), shared, rows)
            return self._bins(name, len(where.mean)).contributions(own)
        match name:
            case "columns":
                return column_sums(rows)
            case "covariance":
                return covariance_sums(where, rows, self.centred)
            case "histogram":
                return histogram_sums(where, rows)
            case _:
                return self.round_sums(shared, rows)

    def round_sums(self, shared: PrivateShared, rows: PrivateRows) -> dict[str, Tensor]:
        """Return the sums of a round over some rows."""
        z = shared.coordinates.apply(rows.inputs)
        log_p = torch.log_softmax(shared.mixture.logits(z), -1)
        log_y = at_labels(log_p, rows.labels)
        seen = z if self.base.density else None
        weights = shared.weights
        if self.centred:  # all rows are those of one client
            codes = torch.zeros(len(z), dtype=torch.int64)
            likelihoods = log_joint(shared.gaussians, torch.ones_like(weights), seen, log_y)
            weights = own_weights(likelihoods, codes, weights[None], _ROUNDS_OF_WEIGHTS)[0]
        found, q = round_sums(
            shared.gaussians,
            weights,
            seen,
            log_y,
            rows.weights,
            self._limits(z.shape[1]),
            centred=self.centred,
        )
        if self._classes > 1:
            of_learner = (q * rows.weights[:, None, None]).sum(1)
            found["gradient"] = linear_gradient(z, log_p, rows.labels, of_learner)
        return found

    def advance(self, name: str, shared: PrivateShared, noisy: Sums) -> PrivateShared:
        """Return the public parameters after a release.

        ``noisy`` has the total with noise, the deviations of the noise, and the ``μ`` that were spent.
        """
        deviation = {n: float(v) for n, v in noisy.below(DEVIATION).items()}
        shared = replace(shared, spent=torch.cat([shared.spent, noisy[MUS]]))
        where = shared.coordinates
        if name.startswith(LENGTHS):
            bins = self._bins(name, len(where.mean))
            parts = bins.clipped_layout(noisy, deviation, _QUANTILE).parts
            found = [one.bound for one in parts] + [0.0] * (_MOST_PARTS - len(parts))
            return replace(shared, bounds=torch.tensor(found, dtype=torch.float64))
        if name == "columns":
            return replace(shared, coordinates=standardised(where, noisy, deviation))
        if name == "covariance":
            whiten = self._kind in ("full", "tied")
            where = whitened(where, noisy, deviation, centred=self.centred, whiten=whiten)
            shared = replace(shared, coordinates=where)
            return shared if self.directions else self._with_start(shared, {}, {})
        if name == "histogram":
            return self._with_start(shared, noisy, deviation)
        return self._after_round(shared, noisy, deviation)

    def _with_start(
        self, shared: PrivateShared, noisy: Mapping[str, Tensor], deviation: Mapping[str, float]
    ) -> PrivateShared:
        """Return the first Gaussians, with weights that tie learners to them."""
        m1, m2 = self.components, self.base.learners
        own, of_gaussians = clustered(
            shared.coordinates, noisy, deviation, m1, self._kind, self.training.seed
        )
        tied = torch.arange(m1)[:, None] % m2 == torch.arange(m2)
        share = torch.where(tied, _TIE + (1.0 - _TIE) / m2, (1.0 - _TIE) / m2)
        if not self.base.density:
            share = torch.full((m1, m2), 1.0 / m2, dtype=torch.float64)
        weights = (of_gaussians[:, None] * share).reshape(-1)
        return replace(shared, gaussians=own, weights=weights / weights.sum())

    def _after_round(
        self, shared: PrivateShared, noisy: Sums, deviation: Mapping[str, float]
    ) -> PrivateShared:
        m2 = self.base.learners
        # a pair without rows would never get any
        counts = noisy["counts"].clamp_min(max(1e-6, float(noisy["counts"].sum()) * 1e-4))
        joint = counts.reshape(-1, m2)
        weights = counts / counts.sum()
        own, noise = shared.gaussians, shared.noise
        if self.base.density:
            own, noise = next_gaussians(
                noisy,
                deviation,
                joint.sum(1),
                own,
                None if self.sums_up_gradients else noise,
                self.base.gaussians.reg_covar,
                centred=self.centred,
            )
        learners, left = shared.learners, shared.left
        if "gradient" in noisy:
            learners, left = next_learners(
                Mixture(own, weights, learners),
                noisy["gradient"],
                deviation["gradient"],
                joint.sum(0),
                left,
                self.base.ridge,
                self.training.seed,
            )
        return replace(
            shared, gaussians=own, weights=weights, learners=learners, left=left, noise=noise
        )

    # ------------------------------------------------------------------ the method

    def blank(self, columns: int) -> PrivateShared:
        """Return the public parameters before any release."""
        m1, m2 = self.components, self.base.learners
        where = unscaled(columns, self.directions)
        own, weights = clustered(
            replace(where, projection=where.projection[:, :0]), {}, {}, m1, self._kind, 0
        )
        if self.base.density:
            first = self.training.net.parameter_shapes
            learners = {n: torch.zeros(m2, *s, dtype=torch.float64) for n, s in first.items()}
        else:  # equal learners would stay equal
            drawn = self.training.initial(m2, torch.device("cpu"))
            learners = {name: value.double() for name, value in drawn.items()}
        pairs = (weights / weights.sum())[:, None].expand(m1, m2).reshape(-1) / m2
        nothing, bounds = torch.zeros(0).double(), torch.zeros(_MOST_PARTS * self.centred).double()
        return PrivateShared(where, own, pairs, learners, nothing, bounds=bounds)

    def init(
        self, rows: LabelledRows, learner: Params | None = None
    ) -> tuple[PrivateShared, Tensor]:
        """Return the parameters before any release, and the same weights for all clients."""
        shared = self.blank(rows.features.columns)
        return shared, shared.weights.expand(len(rows.names), -1)

    def client_step(
        self, shared: PrivateShared, personal: Tensor, rows: LabelledRows, round_number: int = 1
    ) -> tuple[Tensor, Sums]:
        """Refuse: sums of a round leave clients with noise only, see :mod:`fedgmm.training.private`."""
        raise NotImplementedError("Private sums are made with noise, by contributions().")

    def server_step(
        self, shared: PrivateShared, sums: Sums, round_number: int = 1
    ) -> tuple[PrivateShared, RoundInfo]:
        """Return the new public parameters from the noisy total of a round."""
        fit = self.mean_log_likelihood(shared, sums)
        return self.advance(ROUND, shared, sums), RoundInfo(fit)

    def mean_log_likelihood(self, shared: PrivateShared, sums: Mapping[str, Tensor]) -> float:
        """Return the mean log-likelihood of the rows behind the sums of a round."""
        d = len(shared.coordinates.mean)
        rows = max(float(sums["counts"].sum()), 1.0)
        middle, _ = self._limits(d)
        volume = torch.linalg.slogdet(shared.coordinates.whitener).logabsdet
        fit = float(sums["log_likelihood"]) / rows + middle
        return fit + (float(volume) if self.base.density else 0.0)

    def newcomer(self, shared: PrivateShared, learner: Params | None = None) -> Tensor:
        """Return the federation's weights, ``(1, M1 · M2)``."""
        return shared.weights[None]

    def finish(self, shared: PrivateShared, personal: Tensor, rows: LabelledRows) -> Tensor:
        """Return the weights ``π_c`` of every client, learned at home; they never leave it."""
        inputs = as_numbers(rows.inputs, torch.float64).flatten(1).cpu()
        with torch.no_grad():
            log_p = torch.log_softmax(self._logits(shared, inputs), -1)
        log_y = at_labels(log_p, rows.labels.cpu())
        z = shared.coordinates.apply(inputs) if self.base.density else None
        log_p = log_joint(shared.gaussians, torch.ones_like(shared.weights), z, log_y)
        weights = shared.weights.expand(len(rows.names), -1)
        return own_weights(log_p, rows.codes.cpu(), weights, _HOME_ROUNDS)

    def _logits(self, shared: PrivateShared, inputs: Tensor) -> Tensor:
        """Return the logits of every learner for inputs ``(n, d)``, ``(n, M2, K)``."""
        return shared.mixture.logits(shared.coordinates.apply(inputs))

    def standardised_learners(self, shared: PrivateShared) -> Params:
        """Return the learners in the coordinates of :meth:`scaling`."""
        # logits are W z + b with z = A x, so W A x + b
        return {
            "0.weight": shared.learners["0.weight"] @ shared.coordinates.whitener,
            "0.bias": shared.learners["0.bias"],
        }

    def prediction(self, shared: PrivateShared, personal: Tensor) -> Prediction:
        """Return the parameters in the coordinates of :meth:`scaling`."""
        learners, whitener = self.standardised_learners(shared), shared.coordinates.whitener
        own = None
        if self.base.density:
            back = torch.linalg.inv(whitener)
            kind = shared.gaussians.covariance_type
            covariances = shared.gaussians.covariances
            if kind in ("full", "tied"):
                covariances = back @ covariances @ back.mT
                covariances = (covariances + covariances.mT) / 2
            own = gaussians(shared.gaussians.means @ back.mT, covariances, kind)
        dtype = self.training.dtype
        return Prediction(
            self.training.net,
            {name: value.to(dtype) for name, value in learners.items()},
            own,
            personal,
            shared.weights,
        )

    def scaling(self, shared: PrivateShared, declared: Scaling) -> Scaling:
        """Return the scaling of columns that :meth:`prediction` expects.

        ``declared`` is the scaling of the declared bounds to ``[-1, 1]``.
        """
        where, half = shared.coordinates, declared.scale
        return Scaling(declared.mean + half * where.mean, half * where.scale)

    def check_state(self, shared: PrivateShared, personal: Tensor) -> None:
        """Raise ``ValueError`` unless the state has as many Gaussians and learners as the method."""
        m1, m2 = self.components, self.base.learners
        if len(shared.gaussians.means) != m1 or count_learners(shared.learners) != m2:
            raise ValueError(
                f"the state has {len(shared.gaussians.means)} Gaussians and "
                f"{count_learners(shared.learners)} learners, but the method has {m1} and {m2}."
            )
        if shared.weights.numel() != m1 * m2:
            raise ValueError(
                f"the state has {shared.weights.numel()} weights, but the method has {m1 * m2}."
            )

    @property
    def _classes(self) -> int:
        return max(1, int(self.training.net.classes))

    def _limits(self, columns: int) -> tuple[float, float]:
        return log_likelihood_range(columns, self._classes, self.base.density)

    # ------------------------------------------------------------------ sums and broadcasts

    def declare_sums(self, columns: int) -> dict[str, Sum]:
        """Declare the noisy sums of a round."""
        return {one.name: Sum(one.shape) for one in self.layout(ROUND, columns).parts}

    def declare_broadcast(self, columns: int) -> dict[str, Sum]:
        """Declare the public parameters, all of which are float64."""
        return {n: Sum(tuple(v.shape)) for n, v in self.broadcast(self.blank(columns)).items()}

    def broadcast(self, shared: PrivateShared, client: int | None = None) -> dict[str, Tensor]:
        """Return the public parameters, which are the same for all clients."""
        spent = torch.zeros(len(self.plan()), dtype=torch.float64)
        spent[: len(shared.spent)] = shared.spent
        return {
            **{f"coordinates/{name}": value for name, value in vars(shared.coordinates).items()},
            "means": shared.gaussians.means,
            "covariances": shared.gaussians.covariances,
            "weights": shared.weights,
            "spent": spent,
            **({"bounds": shared.bounds} if self.centred else {}),
            **{LEARNERS + name: value for name, value in shared.learners.items()},
        }

    def received(self, arrays: Mapping[str, Tensor], columns: int) -> PrivateShared:
        """Return the public parameters from the arrays of :meth:`broadcast`.

        Raises:
            ImplausibleModelError: parameters with which sums over rows might not be finite, so that the
                bounds of their noise would not hold.
        """
        where = Coordinates(
            **{n.removeprefix("coordinates/"): v for n, v in arrays.items() if "coord" in n}
        )
        covariances, weights = arrays["covariances"], arrays["weights"]
        bounds = arrays["bounds"] if self.centred else torch.zeros(0).double()
        kind = self._kind
        own = torch.linalg.eigvalsh(covariances) if kind in ("full", "tied") else covariances
        if (
            any(float(value.abs().max()) > _LARGEST for value in arrays.values() if value.numel())
            or float(where.scale.min()) < 1.0 / _LARGEST
            or float(own.min()) < 1.0 / _LARGEST
            or float(weights.min()) < 1.0 / _LARGEST**2
            # numbers near the smallest float would be rounded up to more than the bound
            or not bool(((bounds == 0.0) | (bounds >= 1.0 / _LARGEST**2)).all())
        ):
            raise ImplausibleModelError("the model has numbers that no honest server makes.")
        return PrivateShared(
            where,
            gaussians(arrays["means"], covariances, kind),
            weights,
            learners_in(arrays),
            arrays["spent"][arrays["spent"] > 0],
            bounds=bounds,
        )


@dataclass(frozen=True)
class NormBins:
    """A histogram of the lengths of clients' contributions, which decides how far to clip them.

    Attributes:
        layout: of the release that will be clipped, with its largest possible lengths.
    """

    layout: NoisySums

    _BINS = 48  # lengths fall by a factor of 2^(1/4) per bin

    @property
    def release(self) -> NoisySums:
        """The histogram as a release: each part of each client falls into one bin."""
        share = 1.0 / len(self.layout.parts)
        return NoisySums(
            tuple(Part(one.name, (self._BINS,), 1.0, share) for one in self.layout.parts)
        )

    def contributions(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return one client's bins."""
        found = {}
        for one in self.layout.parts:
            length = float(torch.linalg.vector_norm(sums[one.name])) / one.bound
            place = math.floor(-4.0 * math.log2(max(length, 1e-30)))
            bins = torch.zeros(self._BINS, dtype=torch.float64)
            bins[min(max(place, 0), self._BINS - 1)] = 1.0
            found[one.name] = bins
        return found

    def clipped_layout(
        self, noisy: Mapping[str, Tensor], deviation: Mapping[str, float], quantile: float
    ) -> NoisySums:
        """Return the layout with bounds below which about a share ``quantile`` of the lengths lies."""
        parts = []
        for one in self.layout.parts:
            counts = noisy[one.name].clamp_min(0.0)
            counts = torch.where(counts > 2.0 * deviation[one.name], counts, 0.0)
            if not float(counts.sum()):
                parts.append(one)
                continue
            longer = torch.cumsum(counts, 0) / counts.sum()  # bins run from long to short
            place = int(torch.searchsorted(longer, 1.0 - quantile))
            # the bin's upper edge
            parts.append(replace(one, bound=one.bound * 2.0 ** (-place / 4.0)))
        return NoisySums(tuple(parts))
