"""A fitted model: predictions, densities, new clients, novel samples."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedgmm.core.moments import Scaling
from fedgmm.core.predictive import adapt_weights
from fedgmm.data.dataset import FederatedDataset, LabelledRows
from fedgmm.data.inputs import NO_CLIENT, codes_of_known_clients
from fedgmm.methods.base import DENSITY, SHARED_LEARNERS, Prediction, count_learners
from fedgmm.model.adaptation import (
    Adaptation,
    learn_from_inputs,
    learn_from_labels,
    with_client,
)
from fedgmm.model.label_counting import ClientLabels, count_labels
from fedgmm.model.likelihoods import (
    assigned_classes,
    log_density,
    log_gaussians,
    mixed_classes,
)
from fedgmm.model.metrics import Evaluation, evaluate
from fedgmm.model.novelty import NoveltyResult, conformal_p_values, detect
from fedgmm.model.rows import RowReader, class_positions, client_codes
from fedgmm.wording import counted

FloatArray = NDArray[np.float64]
Score = Literal["x", "y", "joint", "confidence"]
SCORES = ("x", "y", "joint", "confidence")
CALIBRATIONS = (*SCORES, "clients")
"""Scores that are kept of held-out rows; the last are means over each client's rows."""


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
        size = f"{counted(self.n_learners, 'learner')} of {counted(len(self.classes), 'class', 'classes')}"
        if self.prediction.gaussians is not None:
            size = f"{counted(self.n_components, 'Gaussian')}, {size}"
        ended = "" if self.stopped is None else f", stopped: {self.stopped}"
        return (
            f"FederatedModel: {self.algorithm}, {counted(len(self.names), 'client')} "
            f"{'with weights of their own' if mixed else 'with an assigned learner'}\n"
            f"  {size}, rows of shape {self.input_shape}\n"
            f"  {counted(len(self.history), 'round')}{ended}"
        )

    # ------------------------------------------------------------------ shapes

    @property
    def n_learners(self) -> int:
        """``M2``, or the number of assigned learners."""
        return count_learners(self.prediction)

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
        x, seen = self._reader.of_arrays(X, features)
        return self._log_density(seen, self._codes(client, len(x)))

    def log_conditional(
        self, X: ArrayLike, y: ArrayLike, client: Any = None, *, features: ArrayLike | None = None
    ) -> FloatArray:
        """``log P_c(y|x)`` of given labels, ``(n,)``."""
        log_proba = self._log_proba(X, client, features)
        labels = class_positions(y, len(log_proba), self.classes)
        return np.asarray(log_proba[np.arange(len(labels)), labels])

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
        log_proba = self._classes_of(*self._reader.of_split(rows), client_codes(rows, self.names))
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

        Where label frequencies count, see :meth:`learn_labels`, the client gets its own: by counting its
        labels or, if it is new and has none, by what the learners say of its rows, where that would have
        helped the clients that were there.

        Args:
            client: a new name; a known one gets new weights.
            X: its rows, ``(n, *input_shape)``.
            y: their labels; ``None`` learns the part of ``π`` that the inputs decide and takes the
                learners' shares within each Gaussian from the federation. Methods without Gaussians
                need labels, or a model that counts label frequencies.
            features: what the Gaussians see, if that is not the inputs.
            max_rounds: most iterations.
        """
        self._mixed("weights")  # or it is refused
        x, seen = self._reader.of_arrays(X, features)
        if not len(x):
            raise ValueError(f"Client {client!r} has no rows to adapt to.")
        if y is not None:
            labels = torch.from_numpy(class_positions(y, len(x), self.classes)).to(x.device)
            prior = float(self.options.get("independence", 0.0))
            found = learn_from_labels(self.prediction, x, seen, labels, max_rounds, prior)
        elif self._tells_without_labels:
            found = learn_from_inputs(self.prediction, x, seen, max_rounds)
        else:
            raise ValueError(
                f"{self.algorithm} has no density, and no label frequencies that its learners could guess "
                "(learn_labels), so it cannot adapt without labels; give y."
            )
        place = self.names.index(client) if client in self.names else None
        if place is None:
            self.names = [*self.names, client]
        self.prediction = with_client(self.prediction, place, found)
        return Adaptation(client, found.weights.cpu().numpy(), found.log_likelihoods)

    @property
    def _tells_without_labels(self) -> bool:
        labels = self.prediction.labels
        return self.prediction.gaussians is not None or (
            labels is not None and labels.guess_rows > 0
        )

    # ------------------------------------------------------------------ labels' frequencies

    def learn_labels(self, dataset: FederatedDataset | None = None) -> None:
        """Let it count how frequent labels are at each client, within each Gaussian and learner.

        Learners are shared, and so is their idea of which labels are frequent. This corrects it for
        every client by its own training rows, see :mod:`fedgmm.core.labels`. Nothing is trained. How much
        a client's own count is decided by validation rows, or by the training rows where there are none.
        Rows without a client stay as they are, and so do clients without rows here. The model, and its
        files, then hold how frequent labels are at each client.

        Args:
            dataset: another data set than the one of the training, with rows of all clients; they
                must be known.
        """
        if self.algorithm == DENSITY:
            raise ValueError(f"A model without labels ({DENSITY!r}) has no label frequencies.")
        if self.algorithm not in SHARED_LEARNERS:
            raise ValueError(
                f"The learners of {self.algorithm} are each client's own, and know its labels; label "
                f"frequencies are for {', '.join(SHARED_LEARNERS)}."
            )
        data = self._data(dataset)

        def known(rows: LabelledRows) -> ClientLabels:
            x, seen = self._reader.of_split(rows)
            given = class_positions(
                data.classes[rows.labels.cpu().numpy()], len(rows), self.classes
            )
            codes = client_codes(rows, self.names)
            return ClientLabels(
                x, seen, *(torch.from_numpy(n).to(x.device) for n in (given, codes))
            )

        held = known(data.validation) if len(data.validation) else None
        counted = count_labels(self.prediction, known(data.train), held)
        self.prediction = replace(self.prediction, labels=counted)
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
        x, seen = self._reader.of_split(rows)
        log_proba = self._classes_of(x, seen, nobody)
        wide, labels = self._with_unseen_classes(log_proba, rows, data)
        own = wide[np.arange(len(labels)), labels]
        scores = {"confidence": log_proba.max(-1), "y": own}
        if self.prediction.gaussians is not None:
            density = self._log_density(seen, nobody)
            scores |= {"x": density, "joint": density + own}
            codes = rows.codes.cpu().numpy()
            at_home = self._log_density(seen, client_codes(rows, self.names))
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
        x, seen = self._reader.of_arrays(X, features)
        if len(x) < 2:
            raise ValueError("client_novelty needs at least two rows.")
        log_x = log_gaussians(self.prediction, seen)
        assert log_x is not None
        start = self._mixed("weights").reshape(-1, self.n_learners).sum(-1)
        own, _ = adapt_weights(log_x[::2], start)
        held_out = torch.logsumexp(log_x[1::2] + own.log(), -1) - self._reader.log_volume
        p = conformal_p_values(self.calibration["clients"], [float(held_out.mean())])
        return float(p[0])

    # ------------------------------------------------------------------ on disk

    def save(self, folder: str | Path) -> Path:
        """Write the model into a folder (safetensors and JSON); see :func:`fedgmm.load`."""
        from fedgmm.model.saving import save

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

    @property
    def _reader(self) -> RowReader:
        return RowReader(self.prediction, self.input_shape, self.scaling, self.features_are_inputs)

    def _log_proba(self, X: ArrayLike, client: Any, features: ArrayLike | None) -> FloatArray:
        x, seen = self._reader.of_arrays(X, features)
        return self._classes_of(x, seen, self._codes(client, len(x)))

    def _classes_of(self, x: Tensor, seen: Tensor, codes: NDArray[np.int64]) -> FloatArray:
        """``log P_c(y|x)`` of every class, ``(n, K)``."""
        prediction = self.prediction
        if prediction.assignment is None:
            return mixed_classes(prediction, x, seen, codes)
        if (codes == NO_CLIENT).any() and prediction.default_learner is None:
            raise ValueError(f"{self.algorithm} has no global model; name a client.")
        return assigned_classes(prediction, x, codes)

    def _log_density(self, seen: Tensor, codes: NDArray[np.int64]) -> FloatArray:
        """``log P_c(x)`` in the original coordinates, ``(n,)``."""
        return log_density(self.prediction, seen, codes) - self._reader.log_volume
