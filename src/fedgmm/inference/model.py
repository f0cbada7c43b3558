"""A fitted model: predictions, densities, new clients, novel samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedgmm.algorithms.base import Prediction
from fedgmm.core.estep import responsibilities
from fedgmm.core.gaussians import log_densities, residuals
from fedgmm.core.labels import label_answers, label_counts, label_frequencies
from fedgmm.core.learners import at_labels
from fedgmm.core.mstep import towards_independence
from fedgmm.core.pixels import as_numbers
from fedgmm.core.predictive import adapt_weights, log_class_probabilities, log_marginal
from fedgmm.core.scaling import Scaling
from fedgmm.core.streaming import Block, accumulate, blocks_of
from fedgmm.data.dataset import FederatedDataset, LabelledRows, numeric
from fedgmm.data.inputs import NO_CLIENT, codes_of_known_clients
from fedgmm.inference.metrics import Evaluation, evaluate
from fedgmm.inference.novelty import NoveltyResult, conformal_p_values, detect

FloatArray = NDArray[np.float64]
Score = Literal["x", "y", "joint", "confidence"]
SCORES = ("x", "y", "joint", "confidence")
CALIBRATIONS = (*SCORES, "clients")
"""Scores that are kept of held-out rows; the last are means over each client's rows."""

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Adaptation:
    """A client that joined by its weights alone.

    Attributes:
        client: its name.
        weights: ``π_c(m1, m2)``, ``(M1, M2)``.
        log_likelihoods: mean log-likelihood before each iteration.
    """

    client: Hashable
    weights: FloatArray
    log_likelihoods: list[float]


@dataclass(repr=False)
class FederatedModel:
    """What training leaves behind.

    Attributes:
        algorithm: the method's name.
        prediction: parameters, in the scaled coordinates.
        names: the clients, in the order of their weights.
        classes: the labels, ``(K,)``.
        input_shape: of one row.
        scaling: of the inputs, or ``None``.
        options: what the model was trained with.
        history: one dictionary a round.
        stopped: why training ended before its last round, or ``None``.
        calibration: scores of held-out rows, per kind of score; filled on first use.
        features_are_inputs: the Gaussians see the inputs, not features of their own.
        dataset: the data set of the training, if it is still at hand; never saved.
    """

    algorithm: str
    prediction: Prediction
    names: list[Hashable]
    classes: NDArray[Any]
    input_shape: tuple[int, ...]
    scaling: Scaling | None = None
    options: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    stopped: str | None = None
    calibration: dict[str, FloatArray] = field(default_factory=dict)
    features_are_inputs: bool = True
    dataset: FederatedDataset | None = None

    def __repr__(self) -> str:
        """One screen: the method, its size, how long it was trained."""
        mixed = self.prediction.client_weights is not None
        size = f"{self.n_learners} learner(s) of {len(self.classes)} classes"
        if self.prediction.gaussians is not None:
            size = f"{self.n_components} Gaussian(s), {size}"
        ended = "" if self.stopped is None else f", stopped: {self.stopped}"
        return (
            f"FederatedModel: {self.algorithm}, {len(self.names)} clients "
            f"{'with weights of their own' if mixed else 'with an assigned learner'}\n"
            f"  {size}, rows of shape {self.input_shape}\n"
            f"  {len(self.history)} rounds{ended}"
        )

    # ------------------------------------------------------------------ shapes

    @property
    def n_learners(self) -> int:
        """``M2``, or the number of assigned learners."""
        return len(next(iter(self.prediction.learners.values())))

    @property
    def n_components(self) -> int:
        """``M1``; one without Gaussians."""
        gaussians = self.prediction.gaussians
        return 1 if gaussians is None else len(gaussians.means)

    @property
    def client_weights(self) -> FloatArray:
        """``π_c(m1, m2)``, ``(C, M1, M2)``."""
        weights = self._mixed("client_weights")
        return np.asarray(weights.cpu().numpy().reshape(len(self.names), -1, self.n_learners))

    @property
    def weights(self) -> FloatArray:
        """The federation's weights ``π(m1, m2)``, ``(M1, M2)``."""
        return np.asarray(self._mixed("weights").cpu().numpy().reshape(-1, self.n_learners))

    def _mixed(self, name: str) -> Tensor:
        value: Tensor | None = getattr(self.prediction, name)
        if value is None:
            raise ValueError(
                f"{self.algorithm} does not mix learners, so it has no mixture weights."
            )
        return value

    # ------------------------------------------------------------------ predictions

    def predict_proba(
        self, X: ArrayLike, client: Any = None, *, features: ArrayLike | None = None
    ) -> FloatArray:
        """``P_c(y|x)`` of every class, ``(n, K)``.

        Args:
            X: rows, ``(n, *input_shape)``.
            client: a known client, one a row, or ``None`` for the federation's own weights.
            features: what the Gaussians see, if that is not the inputs.
        """
        return np.exp(self._log_proba(X, client, features))

    def predict(
        self, X: ArrayLike, client: Any = None, *, features: ArrayLike | None = None
    ) -> NDArray[Any]:
        """The most likely class of every row, ``(n,)``."""
        return np.asarray(self.classes[self._log_proba(X, client, features).argmax(-1)])

    def score_samples(
        self, X: ArrayLike, client: Any = None, *, features: ArrayLike | None = None
    ) -> FloatArray:
        """``log P(x)`` of every row, ``(n,)``: low for rows unlike anything seen."""
        self._need_density()
        x, seen = self._prepare(X, features)
        return self._log_density(seen, self._codes(client, len(x)))

    def log_conditional(
        self, X: ArrayLike, y: ArrayLike, client: Any = None, *, features: ArrayLike | None = None
    ) -> FloatArray:
        """``log P_c(y|x)`` of given labels, ``(n,)``."""
        log_proba = self._log_proba(X, client, features)
        return np.asarray(log_proba[np.arange(len(log_proba)), self._encode(y, len(log_proba))])

    def log_joint(
        self, X: ArrayLike, y: ArrayLike, client: Any = None, *, features: ArrayLike | None = None
    ) -> FloatArray:
        """``log P_c(x, y)`` of rows with given labels, ``(n,)``."""
        return self.score_samples(X, client, features=features) + self.log_conditional(
            X, y, client, features=features
        )

    def evaluate(self, split: str = "test", dataset: FederatedDataset | None = None) -> Evaluation:
        """Accuracy, log-loss and calibration of every client's own predictions.

        Args:
            split: ``"train"``, ``"validation"`` or ``"test"``.
            dataset: another data set than the one of the training; its clients must be known.
        """
        data = self._data(dataset)
        rows = data.split(split)
        if not len(rows):
            raise ValueError(f"The {split} split has no rows.")
        log_proba = self._classes_of(*self._rows(rows), self._codes_of(rows))
        log_proba, labels = self._with_unseen_classes(log_proba, rows, data)
        return evaluate(log_proba, labels, rows.codes.cpu().numpy(), rows.names)

    def _with_unseen_classes(
        self, log_proba: FloatArray, rows: LabelledRows, data: FederatedDataset
    ) -> tuple[FloatArray, NDArray[np.int64]]:
        """Add a column for classes that training never saw, and index the labels into the columns.

        Such a class has probability zero: its rows count as wrong, at the largest loss.
        """
        known = len(self.classes)
        position = {label: index for index, label in enumerate(self.classes.tolist())}
        lookup = np.array([position.get(label, known) for label in data.classes.tolist()])
        impossible = np.full((len(log_proba), 1), -np.inf)
        return np.hstack([log_proba, impossible]), lookup[rows.labels.cpu().numpy()]

    # ------------------------------------------------------------------ unseen clients

    def adapt(
        self,
        client: Hashable,
        X: ArrayLike,
        y: ArrayLike | None = None,
        *,
        features: ArrayLike | None = None,
        max_rounds: int = 200,
    ) -> Adaptation:
        """Bring in a client by learning only its weights ``π``; nobody else changes.

        Where label frequencies count, see :meth:`learn_labels`, its labels are counted, too.

        Args:
            client: a new name; a known one gets new weights.
            X: its rows, ``(n, *input_shape)``.
            y: their labels; ``None`` learns the part of ``π`` that the inputs decide and takes the
                learners' shares within each Gaussian from the federation.
            features: what the Gaussians see, if that is not the inputs.
            max_rounds: most iterations.
        """
        # weights of zero could never grow: start a little above
        weights = self._mixed("weights").reshape(-1, self.n_learners)
        weights = (weights + 1e-3 / weights.numel()) / (1.0 + 1e-3)
        x, seen = self._prepare(X, features)
        if not len(x):
            raise ValueError(f"Client {client!r} has no rows to adapt to.")
        log_x = self._log_gaussians(seen) if self.prediction.gaussians is not None else None
        counts = None
        if y is None:
            if log_x is None:
                raise ValueError(
                    f"{self.algorithm} has no density, so it cannot adapt without labels; give y."
                )
            marginal, history = adapt_weights(log_x, weights.sum(-1), max_rounds)
            own = marginal[:, None] * weights / weights.sum(-1, keepdim=True)
        else:
            labels = torch.from_numpy(self._encode(y, len(x))).to(x.device)
            log_y = at_labels(self._log_learners(x), labels)
            joint = log_y[:, None] if log_x is None else log_x[..., None] + log_y[:, None]
            own, history = adapt_weights(
                joint.flatten(1), weights.reshape(-1), max_rounds, pull=self._pull()
            )
            if self.prediction.labels is not None:
                q, _ = responsibilities(joint.flatten(1) + own.log())
                counts = torch.zeros_like(self.prediction.labels.federation)[None]
                label_counts(q, labels, torch.zeros_like(labels), counts)
        self._register(client, own.reshape(-1), None if counts is None else counts[0])
        return Adaptation(client, own.reshape(weights.shape).cpu().numpy(), history)

    def _pull(self) -> Callable[[Tensor], Tensor] | None:
        """The prior that clients' weights were trained with."""
        rows = float(self.options.get("independence", 0.0))
        if not rows or self.prediction.gaussians is None:
            return None
        return lambda counts: towards_independence(counts, self.n_learners, rows)

    def _register(self, client: Hashable, weights: Tensor, label_rows: Tensor | None) -> None:
        table, labels = self._mixed("client_weights"), self.prediction.labels
        place = self.names.index(client) if client in self.names else None
        if place is not None:
            table = table.clone()
            table[place] = weights
        else:
            self.names = [*self.names, client]
            table = torch.cat([table, weights[None]])
        if labels is not None:
            labels = labels.with_client(place, label_rows)
        self.prediction = replace(self.prediction, client_weights=table, labels=labels)

    # ------------------------------------------------------------------ labels' frequencies

    def learn_labels(self, dataset: FederatedDataset | None = None) -> None:
        """Let it count how frequent labels are at each client, within each Gaussian and learner.

        Learners are shared, and so is their idea of which labels are frequent. This corrects it for
        every client by its own training rows, see :mod:`fedgmm.core.labels`. Nothing is trained. Rows
        without a client stay as they are, and so do clients without rows here. The model, and its
        files, then hold how frequent labels are at each client.

        Args:
            dataset: another data set than the one of the training, with rows of all clients; they
                must be known.
        """
        log_pi, before = self._log_weights(), self.prediction.labels
        if self.algorithm == "gmm":
            raise ValueError("A model without labels ('gmm') has no label frequencies.")
        data = self._data(dataset)
        rows = data.train
        x, seen = self._rows(rows)
        who = torch.from_numpy(self._codes_of(rows)).to(x.device)
        given = data.classes[rows.labels.cpu().numpy()]
        known = torch.from_numpy(self._encode(given, len(rows))).to(x.device)
        pairs, classes = log_pi[0].numel(), len(self.classes)
        counts = log_pi.new_zeros(len(self.names), pairs, classes)
        answers = log_pi.new_zeros(pairs, classes)
        for start in range(0, len(x), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            joint, log_y = log_pi[who[part]], self._log_learners(x[part])
            if self.prediction.gaussians is not None:
                joint = joint + self._log_gaussians(seen[part])[..., None]
            answers += label_answers(joint, log_y)
            q, _ = responsibilities((joint + at_labels(log_y, known[part])[:, None]).flatten(1))
            label_counts(q, known[part], who[part], counts)
        labels = label_frequencies(counts, answers if before is None else before.federation)
        if before is not None:
            present = counts.sum((1, 2))[:, None, None] > 0
            labels = replace(labels, clients=torch.where(present, labels.clients, before.clients))
        self.prediction = replace(self.prediction, labels=labels)
        self.options = {**self.options, "personal_labels": True}

    # ------------------------------------------------------------------ novel samples

    def novelty_scores(
        self,
        X: ArrayLike,
        y: ArrayLike | None = None,
        client: Any = None,
        *,
        score: Score = "x",
        features: ArrayLike | None = None,
    ) -> FloatArray:
        """Scores that are low for novel rows, ``(n,)``.

        Args:
            X: rows.
            y: labels, which ``"y"`` and ``"joint"`` need.
            client: as in :meth:`predict_proba`.
            score: ``"x"`` is ``log P(x)``, ``"y"`` is ``log P(y|x)``, ``"joint"`` is ``log P(x, y)``;
                ``"confidence"`` is the largest class probability, for methods without a density.
            features: what the Gaussians see, if that is not the inputs.
        """
        if score not in SCORES:
            raise ValueError(f"score must be one of {list(SCORES)}, got {score!r}.")
        if score in ("y", "joint") and y is None:
            raise ValueError(f"score={score!r} needs labels; pass y, or use score='x'.")
        match score:
            case "x":
                return self.score_samples(X, client, features=features)
            case "confidence":
                return np.asarray(self._log_proba(X, client, features).max(-1))
            case "y":
                assert y is not None
                return self.log_conditional(X, y, client, features=features)
            case _:
                assert y is not None
                return self.log_joint(X, y, client, features=features)

    def calibrate(self, dataset: FederatedDataset | None = None, split: str = "validation") -> None:
        """Remember the scores of held-out rows, globally weighted; :meth:`novelty` needs them."""
        data = self._data(dataset)
        rows = data.split(split)
        if not len(rows):
            raise ValueError(f"The {split} split has no rows to calibrate on.")
        nobody = np.full(len(rows), NO_CLIENT, dtype=np.int64)
        x, seen = self._rows(rows)
        log_proba = self._classes_of(x, seen, nobody)
        wide, labels = self._with_unseen_classes(log_proba, rows, data)
        own = wide[np.arange(len(labels)), labels]
        scores = {"confidence": log_proba.max(-1), "y": own}
        if self.prediction.gaussians is not None:
            density = self._log_density(seen, nobody)
            scores |= {"x": density, "joint": density + own}
            codes = rows.codes.cpu().numpy()
            at_home = self._log_density(seen, self._codes_of(rows))
            sums, sizes = np.bincount(codes, weights=at_home), np.bincount(codes)
            scores["clients"] = sums[sizes > 0] / sizes[sizes > 0]
        self.calibration = scores

    def novelty(
        self,
        X: ArrayLike,
        y: ArrayLike | None = None,
        *,
        score: Score = "x",
        false_alarm_rate: float = 0.05,
        features: ArrayLike | None = None,
    ) -> NoveltyResult:
        """Which rows are novel, at a chosen false-alarm rate.

        Scores use the federation's own weights. The threshold comes from held-out rows of all
        clients; the rate holds for new rows drawn like them.
        """
        if not self.calibration:
            self.calibrate()
        if score not in self.calibration:
            self._need_density()
        scores = self.novelty_scores(X, y, score=score, features=features)
        return detect(self.calibration[score], scores, false_alarm_rate)

    def client_novelty(self, X: ArrayLike, *, features: ArrayLike | None = None) -> float:
        """Is this a kind of client that the federation has not seen? A conformal p-value.

        Half of the rows adapt the client's weights, the other half is scored; the mean
        log-likelihood is compared with those of the federation's clients on held-out rows. Small
        means strange; it cannot be smaller than ``1 / (1 + clients)``.
        """
        if not self.calibration:
            self.calibrate()
        self._need_density()
        x, seen = self._prepare(X, features)
        if len(x) < 2:
            raise ValueError("client_novelty needs at least two rows.")
        log_x = self._log_gaussians(seen)
        start = self._mixed("weights").reshape(-1, self.n_learners).sum(-1)
        own, _ = adapt_weights(log_x[::2], start)
        held_out = torch.logsumexp(log_x[1::2] + own.log(), -1) - self._log_volume()
        p = conformal_p_values(self.calibration["clients"], [float(held_out.mean())])
        return float(p[0])

    # ------------------------------------------------------------------ on disk

    def save(self, folder: str | Path) -> Path:
        """Write the model into a folder (safetensors and JSON); see :func:`fedgmm.load`."""
        from fedgmm.inference.saving import save

        return save(self, folder)

    # ------------------------------------------------------------------ inside

    def _data(self, dataset: FederatedDataset | None) -> FederatedDataset:
        data = dataset or self.dataset
        if data is None:
            raise ValueError("The model has no data set at hand (it was loaded); pass dataset=.")
        return data

    def _need_density(self) -> None:
        if self.prediction.gaussians is None:
            raise ValueError(
                f"{self.algorithm} has no density of the inputs; use 'fedgmm', or score='confidence'."
            )

    def _codes(self, client: Any, rows: int) -> NDArray[np.int64]:
        return codes_of_known_clients(client if rows else None, rows, self.names)

    def _encode(self, y: ArrayLike, rows: int) -> NDArray[np.int64]:
        labels = np.asarray(y)
        if labels.shape != (rows,):
            raise ValueError(
                f"y must hold one label per row: {rows} rows, y has shape {labels.shape}."
            )
        position = {label: index for index, label in enumerate(self.classes.tolist())}
        unknown = [label for label in labels.tolist() if label not in position]
        if unknown:
            raise ValueError(
                f"Label {unknown[0]!r} was not seen in training; the classes are "
                f"{self.classes.tolist()[:20]}."
            )
        return np.array([position[label] for label in labels.tolist()], dtype=np.int64)

    def _codes_of(self, rows: LabelledRows) -> NDArray[np.int64]:
        """The model's code of each row's client, ``(N,)``."""
        position = {name: code for code, name in enumerate(self.names)}
        unknown = [name for name in rows.names if name not in position]
        if unknown:
            raise ValueError(
                f"Unknown client {unknown[0]!r}: the model knows {len(self.names)} client(s). "
                "Use adapt() to bring it in."
            )
        codes = np.array([position[name] for name in rows.names], dtype=np.int64)
        return np.asarray(codes[rows.codes.cpu().numpy()])

    def _rows(self, rows: LabelledRows) -> tuple[Tensor, Tensor]:
        """Scaled inputs and features of a split's rows."""
        if rows.inputs.shape[1:] != self.input_shape:
            raise ValueError(
                f"Rows must have shape {self.input_shape}, got {tuple(rows.inputs.shape[1:])}."
            )
        own = not (rows.features_are_inputs or self.prediction.gaussians is None)
        self._check_features(own)
        here = rows.to(self._device)
        return self._scaled(here.inputs, torch.cat(here.features.chunks) if own else None)

    def _check_features(self, own: bool) -> None:
        if self.prediction.gaussians is None or own != self.features_are_inputs:
            return
        if own:
            raise ValueError("The Gaussians of this model see the inputs; leave features out.")
        raise ValueError("The Gaussians of this model see features of their own; pass features=.")

    def _prepare(self, X: ArrayLike, features: ArrayLike | None) -> tuple[Tensor, Tensor]:
        """Checked, scaled inputs ``(n, *shape)`` and features ``(n, d)``."""
        inputs = numeric(X, "X")
        if inputs.shape[1:] != self.input_shape:
            raise ValueError(f"Rows must have shape {self.input_shape}, got {inputs.shape[1:]}.")
        self._check_features(features is not None)
        x = _tensor(inputs, "X").to(self._device)
        gaussians = self.prediction.gaussians
        if features is None or gaussians is None:
            return self._scaled(x, None)
        seen = numeric(features, "features")
        if seen.shape != (len(x), gaussians.means.shape[1]):
            raise ValueError(
                f"features must have shape {(len(x), gaussians.means.shape[1])}, got {seen.shape}."
            )
        return self._scaled(x, _tensor(seen, "features").to(self._device))

    def _scaled(self, inputs: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows as the learners and as the Gaussians see them; features of their own are not scaled."""
        x = inputs if self.scaling is None else self.scaling.apply(inputs, self._dtype)
        return x, x.flatten(1) if features is None else features

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self.prediction.learners.values())).dtype

    @property
    def _device(self) -> torch.device:
        return next(iter(self.prediction.learners.values())).device

    def _log_volume(self) -> float:
        """What scaling takes from ``log P(x)``; features of their own are not scaled."""
        if self.scaling is None or not self.features_are_inputs:
            return 0.0
        return self.scaling.log_volume

    def _log_proba(self, X: ArrayLike, client: Any, features: ArrayLike | None) -> FloatArray:
        x, seen = self._prepare(X, features)
        return self._classes_of(x, seen, self._codes(client, len(x)))

    def _classes_of(self, x: Tensor, seen: Tensor, codes: NDArray[np.int64]) -> FloatArray:
        if self.prediction.assignment is not None:
            return self._classes_of_assigned(x, codes)
        out = np.empty((len(x), len(self.classes)))
        log_pi, labels = self._log_weights(), self.prediction.labels
        ratios = None if labels is None else labels.log_ratios().reshape(*log_pi.shape, -1)
        who = torch.from_numpy(codes).to(x.device)

        def write(rows: slice) -> None:
            log_x = None if self.prediction.gaussians is None else self._log_gaussians(seen[rows])
            own = None if ratios is None else ratios[who[rows]]
            log_y = self._log_learners(x[rows])
            mixed = log_class_probabilities(log_pi[who[rows]], log_x, log_y, own)
            out[rows] = mixed.cpu().numpy()

        _in_blocks(len(x), write, x.device)
        return out

    def _classes_of_assigned(self, x: Tensor, codes: NDArray[np.int64]) -> FloatArray:
        """Each client's own learner; the default one for rows without a client."""
        assignment, default = self.prediction.assignment, self.prediction.default_learner
        assert assignment is not None
        if (codes == NO_CLIENT).any() and default is None:
            raise ValueError(f"{self.algorithm} has no global model; name a client.")
        table = np.append(assignment.cpu().numpy(), -1 if default is None else default)
        learner_of = table[codes]
        out = np.empty((len(x), len(self.classes)))
        order = np.argsort(learner_of, kind="stable")
        edges = np.flatnonzero(np.diff(learner_of[order])) + 1
        for rows in np.split(order, edges) if len(x) else ():
            own = slice(int(learner_of[rows[0]]), int(learner_of[rows[0]]) + 1)
            learner = {name: value[own] for name, value in self.prediction.learners.items()}
            out[rows] = self._log_learners(x[torch.from_numpy(rows)], learner)[:, 0].cpu().numpy()
        return out

    def _log_density(self, seen: Tensor, codes: NDArray[np.int64]) -> FloatArray:
        """``log P_c(x)`` in the original coordinates, ``(n,)``."""
        out = np.empty(len(seen))
        log_pi = self._log_weights()
        who = torch.from_numpy(codes).to(seen.device)

        def write(rows: slice) -> None:
            out[rows] = (
                log_marginal(log_pi[who[rows]], self._log_gaussians(seen[rows])).cpu().numpy()
            )

        _in_blocks(len(seen), write, seen.device)
        return out - self._log_volume()

    def _log_weights(self) -> Tensor:
        """``log π`` of every client and, last, of the federation: ``(C + 1, M1, M2)``."""
        table = torch.cat([self._mixed("client_weights"), self._mixed("weights")[None]])
        return table.log().reshape(len(table), -1, self.n_learners)

    def _log_gaussians(self, seen: Tensor) -> Tensor:
        """``log N(x_i; μ_m1, Σ_m1)`` in scaled coordinates, ``(n, M1)``."""
        gaussians = self.prediction.gaussians
        assert gaussians is not None
        if len(seen) > _ROWS_AT_ONCE:  # residuals are large: components × columns for each row
            starts = range(0, len(seen), _ROWS_AT_ONCE)
            parts = [self._log_gaussians(seen[start : start + _ROWS_AT_ONCE]) for start in starts]
            return torch.cat(parts)
        return log_densities(residuals(seen, gaussians.means, torch.float64), gaussians)

    def _log_learners(self, x: Tensor, learners: dict[str, Tensor] | None = None) -> Tensor:
        """``log P_θm2(y|x_i)`` of every class, ``(n, M2, K)`` float64."""
        with torch.inference_mode():
            logits = self.prediction.net.logits(
                self.prediction.learners if learners is None else learners,
                as_numbers(x, self._dtype),
            )
            return torch.log_softmax(logits.double(), -1)


def _tensor(rows: NDArray[Any], what: str) -> Tensor:
    """Finite rows as a tensor."""
    if not np.isfinite(rows).all():
        row, column = np.argwhere(~np.isfinite(rows.reshape(len(rows), -1)))[0].tolist()
        raise ValueError(f"Input {what} contains NaN or infinity: row {row}, column {column}.")
    return torch.from_numpy(np.ascontiguousarray(rows))


def _in_blocks(rows: int, write: Callable[[slice], None], device: torch.device) -> None:
    """Call ``write`` for runs of rows that keep temporaries small, on all threads."""

    def visit(_: None, block: Block) -> None:
        write(slice(block[1], block[2]))

    accumulate(blocks_of([rows], _ROWS_AT_ONCE), lambda: None, visit, device)
