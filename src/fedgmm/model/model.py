"""The fitted model: predictions, densities, new clients, novel rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedgmm.core.checks import check_choice, check_number
from fedgmm.core.moments import Scaling
from fedgmm.core.params import count_learners
from fedgmm.core.pca import PCA
from fedgmm.core.predictive import NumberPredictions
from fedgmm.core.scratch import empty_beside, touched
from fedgmm.data.dataset import FederatedDataset, LabelledRows
from fedgmm.data.inputs import NO_CLIENT, codes_of_known_clients, column_order
from fedgmm.methods.base import DENSITY, SHARED_LEARNERS, Prediction
from fedgmm.model.adaptation import (
    Adaptation,
    adapt_with_labels,
    adapt_without_labels,
    can_guess_labels,
    note_on,
    with_client,
)
from fedgmm.model.decisions import Cost, Decision, default_positive
from fedgmm.model.importance import (
    KINDS,
    Importance,
    from_coefficients,
    from_permutations,
    is_linear,
    some_rows,
)
from fedgmm.model.label_frequencies import ClientLabels, estimate_label_frequencies
from fedgmm.model.metrics import (
    Evaluation,
    evaluate,
    evaluate_numbers,
    finite_losses,
    interval_of,
)
from fedgmm.model.novelty import (
    OWN,
    SCORES,
    FalseAlarms,
    NoveltyResult,
    Score,
    check_rate,
    client_p_values,
    compare_file,
    count_false_alarms,
    few_held_out,
    flag_novel_rows,
    standardise,
)
from fedgmm.model.predictions import (
    EvaluatedRows,
    RowEvaluator,
    class_codes,
    client_codes,
    log_learners,
    numbers_of,
    probabilities,
)
from fedgmm.wording import counted

if TYPE_CHECKING:
    from sklearn.mixture import GaussianMixture

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_ROWS_AT_ONCE = 250_000


@dataclass(frozen=True)
class LogPredictions:
    """Predictions of rows, in log space.

    Attributes:
        log_proba: ``log P_c(y|x)`` of every class, ``(n, K)``.
        log_density: ``log P_c(x)``, ``(n,)``; ``None`` without Gaussians.
    """

    log_proba: FloatArray
    log_density: FloatArray | None


@dataclass(repr=False)
class FederatedModel:
    """The result of training.

    Attributes:
        algorithm: name of the method.
        prediction: fitted parameters, for scaled inputs.
        names: the clients, in the order of their weights.
        classes: the labels, ``(K,)``; empty if the model predicts numbers.
        input_shape: shape of one row.
        scaling: scaling of the inputs, or ``None``.
        options: training options.
        history: one dictionary per round.
        stopped: reason why training ended before its last round, or ``None``.
        calibration: scores of held-out rows by kind, see :mod:`fedgmm.model.novelty`; computed on
            first use.
        features_are_inputs: whether the Gaussians use the inputs and not separate features.
        projection: principal components of the scaled inputs, and columns beside them, that the Gaussians
            see; ``None`` means that they see all inputs.
        column_names: of the inputs, or ``None``. A table is put into this order; an array is taken by
            position.
        dataset: training data, if it is in memory; never saved.
        target: mean and deviation of the numbers that the model predicts; ``None`` for classes.
        interval_scores: normal scores of held-out numbers ``(h,)``, by which intervals are calibrated, see
            :meth:`~fedgmm.core.predictive.NumberPredictions.interval`; ``None`` if no number was held out.
        positive: the positive class of two, see :func:`~fedgmm.model.decisions.default_positive`; ``None``
            if it is not known.
        privacy: settings of differential privacy, with ``spent`` (``ε`` of all releases) and ``releases``;
            ``None`` if the model was trained without. Covers everything but ``client_weights``.
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
    calibration: dict[str, NDArray[Any]] = field(default_factory=dict)
    features_are_inputs: bool = True
    dataset: FederatedDataset | None = None
    column_names: tuple[str, ...] | None = None
    positive: Any = None
    target: Scaling | None = None
    interval_scores: NDArray[np.float64] | None = None
    projection: PCA | None = None
    privacy: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Find the positive class of two, or score the held-out numbers, if there are rows in memory.

        Numbers are scored now, because learners may be trained on the held-out rows later (``refit``).
        """
        if self.target is not None and self.interval_scores is None and self.dataset is not None:
            held_out = self.dataset.validation
            if len(held_out):
                rows, codes = (
                    self._evaluator.from_split(held_out),
                    client_codes(held_out, self.names),
                )
                numbers = held_out.labels.to(rows.x.device)
                self.interval_scores = (
                    self._numbers(rows, codes).normal_scores(numbers).cpu().numpy()
                )
        if self.positive is None and self.dataset is not None and len(self.classes) == 2:
            labels = self.dataset.classes[self.dataset.train.labels.cpu().numpy()]
            classes = self.classes.tolist()
            counts = [int((labels == one).sum()) for one in self.classes]
            self.positive = classes[default_positive(classes, counts)]

    def __repr__(self) -> str:
        """Return three lines: the method, its size, and the number of rounds."""
        mixed = self.prediction.client_weights is not None
        labels = counted(len(self.classes), "class", "classes") if len(self.classes) else "numbers"
        size = f"{counted(self.n_learners, 'learner')} of {labels}"
        if self.prediction.gaussians is not None:
            size = f"{counted(self.n_components, 'Gaussian')}, {size}"
        ended = "" if self.stopped is None else f", stopped: {self.stopped}"
        return (
            f"FederatedModel: {self.algorithm}, {counted(len(self.names), 'client')} "
            f"{'with weights of their own' if mixed else 'with an assigned learner'}\n"
            f"  {size}, rows of shape {self.input_shape}\n"
            f"  {counted(len(self.history), 'round')}{ended}"
            + ("" if self.privacy is None else f"\n  {self.budget}")
        )

    @property
    def budget(self) -> str:
        """A line about the privacy budget, such as ``ε = 3.2 of 4 (δ = 1e-05, per row), 22 releases``."""
        if self.privacy is None:
            return ""
        facts = self.privacy
        return (
            f"ε = {facts['spent']:.3g} of {facts['epsilon']:g} (δ = {facts['delta']:g}, per "
            f"{facts['unit']}), {counted(facts['releases'], 'release')}"
        )

    @property
    def impersonal(self) -> str:
        """A sentence that says why all clients get the same predictions; empty if they do not."""
        mixed = self.prediction.client_weights is not None and self.algorithm != DENSITY
        if not mixed or self.n_learners > 1 or self.prediction.labels or len(self.names) < 2:
            return ""
        if self.target is not None:
            return (
                "Nothing is personalised: the model has one learner, so all clients get the same "
                "predictions. If clients differ, several learners (--learners 3) may help."
            )
        return (
            "Nothing is personalised: the model has one learner and no label frequencies, so all clients "
            "get the same predictions. If clients differ, several learners (--learners 3) or "
            "label frequencies (--set personal_labels=true) may help."
        )

    @property
    def task(self) -> Literal["classification", "regression"]:
        """``"regression"`` if the model predicts numbers, else ``"classification"``."""
        return "classification" if self.target is None else "regression"

    @property
    def n_learners(self) -> int:
        """``M2``, or the number of assigned learners."""
        return count_learners(self.prediction.learners)

    @property
    def n_components(self) -> int:
        """``M1``; one without Gaussians."""
        gaussians = self.prediction.gaussians
        return 1 if gaussians is None else len(gaussians.means)

    @property
    def client_weights(self) -> FloatArray:
        """``π_c(m1, m2)``, ``(C, M1, M2)``."""
        weights = self._mixture_weights("client_weights")
        return np.asarray(weights.cpu().numpy().reshape(len(self.names), -1, self.n_learners))

    @property
    def weights(self) -> FloatArray:
        """The federation's weights ``π(m1, m2)``, ``(M1, M2)``."""
        weights = self._mixture_weights("weights")
        return np.asarray(weights.cpu().numpy().reshape(-1, self.n_learners))

    def _mixture_weights(self, name: str) -> Tensor:
        value: Tensor | None = getattr(self.prediction, name)
        if value is None:
            raise ValueError(
                f"{self.algorithm} does not mix learners, so it has no mixture weights."
            )
        return value

    # ------------------------------------------------------------------ predictions

    def predict_proba(
        self,
        X: ArrayLike,
        client: Any = None,
        *,
        clients: ArrayLike | None = None,
        features: ArrayLike | None = None,
    ) -> FloatArray:
        """Return ``P_c(y|x)`` of every class, equation (3), ``(n, K)``; each row sums to one.

        Args:
            X: rows, ``(n, *input_shape)``. A table with the column names of the fit may have them in
                another order; an array is taken by position.
            client: a known client for all rows; ``None`` uses the federation's own weights.
            clients: one known client per row, instead of ``client``.
            features: input of the Gaussians, if the model uses separate features, ``(n, d)``.
        """
        return probabilities(self.predict_log_proba(X, client, clients=clients, features=features))

    def predict_log_proba(
        self,
        X: ArrayLike,
        client: Any = None,
        *,
        clients: ArrayLike | None = None,
        features: ArrayLike | None = None,
    ) -> FloatArray:
        """Return ``log P_c(y|x)`` of every class, ``(n, K)``; arguments as in :meth:`predict_proba`."""
        rows = self._evaluator.from_arrays(X, features)
        return self._log_proba(rows, self._codes(client, clients, len(rows)))

    def predict(
        self,
        X: ArrayLike,
        client: Any = None,
        *,
        clients: ArrayLike | None = None,
        features: ArrayLike | None = None,
        threshold: float | None = None,
        cost: Cost | None = None,
        positive: Hashable | None = None,
    ) -> NDArray[Any]:
        """Return the class of every row, ``(n,)``: the most likely one without threshold and cost.

        A model of numbers returns the mean ``E[y|x]`` of every row.

        Args:
            X: rows, ``(n, *input_shape)``.
            client: as in :meth:`predict_proba`.
            clients: as in :meth:`predict_proba`.
            features: input of the Gaussians, if the model uses separate features, ``(n, d)``.
            threshold: probability of the positive class of two from which on it is predicted.
            cost: cost of missing the positive class, where a false alarm costs 1; or a cost for missing
                each class, by its name, where the others cost 1. The class with the smallest expected cost
                is predicted.
            positive: the positive class of two; ``None`` means that of the model.
        """
        if self.target is not None:
            self.check_decision(threshold=threshold, cost=cost, positive=positive)
            found = self.predict_distribution(X, client, clients=clients, features=features)
            return found.mean.cpu().numpy()
        decision = self.decision(positive=positive, threshold=threshold, cost=cost)
        log_proba = self.predict_log_proba(X, client, clients=clients, features=features)
        return np.asarray(self.classes[decision.choose(log_proba)])

    def predict_interval(
        self,
        X: ArrayLike,
        client: Any = None,
        level: float = 0.9,
        *,
        clients: ArrayLike | None = None,
        features: ArrayLike | None = None,
    ) -> FloatArray:
        """Return the interval that holds ``y`` with probability ``level``, ``(n, 2)``, for numbers.

        As much of ``P_c(y|x)`` lies below the interval as above it. If rows were held out in training, the
        interval is as wide as they need, see :meth:`~fedgmm.core.predictive.NumberPredictions.interval`.

        Args:
            X: rows, ``(n, *input_shape)``.
            client: as in :meth:`predict_proba`.
            level: between 0 and 1.
            clients: as in :meth:`predict_proba`.
            features: input of the Gaussians, if the model uses separate features, ``(n, d)``.
        """
        check_number("level", level, above=0, below=1)
        found = self.predict_distribution(X, client, clients=clients, features=features)
        return interval_of(found, level)

    @staticmethod
    def check_decision(**chosen: Any) -> None:
        """Raise if a rule for classes is given, such as a threshold, but numbers are predicted."""
        if any(value is not None for value in chosen.values()):
            raise ValueError("threshold, cost and positive are for classes, not for numbers.")

    def predict_distribution(
        self,
        X: ArrayLike,
        client: Any = None,
        *,
        clients: ArrayLike | None = None,
        features: ArrayLike | None = None,
    ) -> NumberPredictions:
        """Return ``P_c(y|x)`` of numbers; arguments as in :meth:`predict_proba`."""
        rows = self._evaluator.from_arrays(X, features)
        return self._numbers(rows, self._codes(client, clients, len(rows)))

    def decision(
        self,
        *,
        positive: Hashable | None = None,
        threshold: float | None = None,
        cost: Cost | None = None,
    ) -> Decision:
        """Return the rule that turns probabilities into a class; arguments as in :meth:`predict`."""
        known = positive if positive is not None else self.positive
        classes = self.classes.tolist()
        return Decision.of(classes, positive=known, threshold=threshold, cost=cost)

    def log_predictions(
        self,
        X: ArrayLike,
        client: Any = None,
        *,
        clients: ArrayLike | None = None,
        features: ArrayLike | None = None,
    ) -> LogPredictions:
        """Return ``log P_c(y|x)`` and ``log P_c(x)``, with the Gaussians evaluated once for both."""
        rows = self._evaluator.from_arrays(X, features)
        codes = self._codes(client, clients, len(rows))
        density = None if rows.log_x is None else rows.log_density(codes)
        return LogPredictions(self._log_proba(rows, codes), density)

    def score_samples(
        self,
        X: ArrayLike,
        client: Any = None,
        *,
        clients: ArrayLike | None = None,
        features: ArrayLike | None = None,
    ) -> FloatArray:
        """Return ``log P_c(x)`` of every row, ``(n,)``: low for rows unlike anything seen."""
        return self.novelty_scores(X, None, client, score="x", clients=clients, features=features)

    def log_conditional(
        self,
        X: ArrayLike,
        y: ArrayLike,
        client: Any = None,
        *,
        clients: ArrayLike | None = None,
        features: ArrayLike | None = None,
    ) -> FloatArray:
        """Return ``log P_c(y|x)`` of given labels, ``(n,)``."""
        return self.novelty_scores(X, y, client, score="y", clients=clients, features=features)

    def log_joint(
        self,
        X: ArrayLike,
        y: ArrayLike,
        client: Any = None,
        *,
        clients: ArrayLike | None = None,
        features: ArrayLike | None = None,
    ) -> FloatArray:
        """Return ``log P_c(x, y)`` of rows with given labels, ``(n,)``."""
        return self.novelty_scores(X, y, client, score="joint", clients=clients, features=features)

    def evaluate(
        self,
        split: str = "test",
        dataset: FederatedDataset | None = None,
        *,
        positive: Hashable | None = None,
        threshold: float | None = None,
        cost: Cost | None = None,
    ) -> Evaluation:
        """Return the metrics of every client's own predictions, and of all rows together.

        A model of numbers returns a :class:`~fedgmm.model.metrics.RegressionEvaluation`.

        Args:
            split: ``"train"``, ``"validation"`` or ``"test"``.
            dataset: data of known clients; ``None`` means the training data.
            positive: as in :meth:`predict`.
            threshold: as in :meth:`predict`.
            cost: as in :meth:`predict`.
        """
        data, rows, codes = self._split(dataset, split)
        if (data.target is None) != (self.target is None):
            raise ValueError(f"The model is for {self.task}, but the data are for {data.task}.")
        if self.target is not None:
            self.check_decision(threshold=threshold, cost=cost, positive=positive)
            found = self._numbers(self._evaluator.from_split(rows), codes)
            return evaluate_numbers(found, rows.labels, rows.codes.cpu().numpy(), rows.names)
        decision = self.decision(positive=positive, threshold=threshold, cost=cost)
        log_proba = self._log_proba(self._evaluator.from_split(rows), codes)
        return evaluate(
            _with_impossible(log_proba),
            self._labels_of(rows, data).numpy(),
            rows.codes.cpu().numpy(),
            rows.names,
            classes=tuple(self.classes.tolist()),
            decision=decision,
        )

    def importance(
        self,
        split: str = "test",
        dataset: FederatedDataset | None = None,
        *,
        columns: Mapping[str, Sequence[int]] | None = None,
        kind: str = "auto",
        repeats: int = 5,
        seed: int = 0,
    ) -> Importance:
        """Return which columns decide, for every client.

        Linear learners have coefficients, which the weights of a client mix. For other learners each
        column is shuffled among the rows of each client, and the growth of the log-loss is measured.

        Args:
            split: ``"train"``, ``"validation"`` or ``"test"``.
            dataset: data of known clients; ``None`` means the training data.
            columns: columns of the inputs that belong together, by name, such as one-hot categories; by
                default each column on its own.
            kind: ``"coefficients"``, ``"permutation"``, or ``"auto"`` for coefficients if learners are
                linear.
            repeats: number of shuffles of each column.
            seed: of the shuffles.
        """
        check_choice("kind", kind, KINDS)
        if len(self.input_shape) != 1 or not self.features_are_inputs:
            raise ValueError(
                f"importance needs rows of columns, not inputs of shape {self.input_shape}."
            )
        linear = is_linear(self.prediction)  # of classes
        if kind == "coefficients" and not linear:
            raise ValueError(
                "Only linear learners of classes have coefficients; use kind='permutation'."
            )
        data, rows, codes = self._split(dataset, split)
        features = self.column_names or tuple(f"x{j}" for j in range(self.input_shape[0]))
        groups = {name: [j] for j, name in enumerate(features)} if columns is None else columns
        present, clients = np.unique(codes, return_inverse=True)
        names = tuple(self.names[code] for code in present)
        if kind != "permutation" and linear:
            x = self._evaluator.from_split(rows).x.double().cpu().numpy()
            positive = self.decision().positive
            if len(self.classes) == 2 and positive is None:
                positive = 1
            values, signed = from_coefficients(self.prediction, x, groups, present, positive)
            return Importance("coefficients", tuple(groups), names, values, features, signed)
        shown = some_rows(len(rows), repeats * len(groups))
        labels = self._labels_of(rows, data)[torch.from_numpy(shown)]

        def losses_of(inputs: NDArray[Any]) -> FloatArray:
            evaluated = self._evaluator.from_arrays(inputs, None)
            log_p, _ = self._log_conditional(evaluated, codes[shown], labels)
            return -log_p if self.target is not None else finite_losses(log_p)

        values = from_permutations(
            losses_of,
            rows.inputs.cpu().numpy()[shown],
            groups,
            clients[shown],
            len(names),
            repeats=repeats,
            seed=seed,
        )
        return Importance("permutation", tuple(groups), names, values, features)

    # ------------------------------------------------------------------ new clients

    def adapt(
        self,
        client: Hashable,
        X: ArrayLike,
        y: ArrayLike | None = None,
        *,
        features: ArrayLike | None = None,
        max_rounds: int = 200,
    ) -> Adaptation:
        """Add a client by learning only its weights ``π_c``; other clients do not change.

        The weights are shrunk towards the federation's, more strongly if the training clients differ
        little (``prediction.prior_rows``). Labels decide how much the client's own weights count, by
        cross-validation, so a few rows do no harm. The result has a note if nothing could change.

        If the model has label frequencies, see :meth:`learn_labels`, the client gets its own. They are
        counted from its labels. For a new client without labels they are guessed from the learners'
        predictions, if guesses helped the known clients.

        Args:
            client: a new name; a known client gets new weights.
            X: rows of the client, ``(n, *input_shape)``.
            y: labels of the rows. Without them only the weights of the Gaussians are learned, and
                learners keep the federation's shares within each Gaussian. Methods without Gaussians
                need labels, or label frequencies that can be guessed.
            features: input of the Gaussians, if the model uses separate features, ``(n, d)``.
            max_rounds: maximal number of iterations.
        """
        self._mixture_weights("weights")
        rows = self._evaluator.from_arrays(X, features)
        prediction = self.prediction
        if not len(rows):
            raise ValueError(f"Client {client!r} has no rows to adapt to.")
        if y is not None:
            labels = self._labels(y, len(rows)).to(rows.x.device)
            log_y = log_learners(prediction, rows.x)
            independence = float(self.options.get("independence", 0.0))
            found = adapt_with_labels(
                prediction, rows.log_x, log_y, labels, max_rounds, independence
            )
        elif rows.log_x is not None or can_guess_labels(prediction):
            guessed = log_learners(prediction, rows.x) if can_guess_labels(prediction) else None
            found = adapt_without_labels(prediction, rows.log_x, guessed, max_rounds)
        else:
            raise ValueError(
                f"{self.algorithm} cannot adapt without labels: it has no density of the inputs and no "
                "label frequencies that can be guessed; pass y."
            )
        code = self.names.index(client) if client in self.names else None
        if code is None:
            self.names = [*self.names, client]
        self.prediction = with_client(prediction, code, found)
        note = None if self.algorithm == DENSITY else note_on(prediction, found)
        return Adaptation(client, found.weights.cpu().numpy(), found.log_likelihoods, note)

    def learn_labels(
        self, dataset: FederatedDataset | None = None, *, if_better: bool = False
    ) -> bool:
        """Estimate the label frequencies of every client, and correct its predictions by them.

        Shared learners assume the label frequencies of the federation. The correction replaces these by
        the frequencies of the client within each Gaussian and learner, see :mod:`fedgmm.core.labels`.
        Nothing is trained. Training rows are counted, and validation rows decide how much a client's own
        frequencies count; without validation rows the training rows decide. Clients without rows, and
        rows without a client, keep their predictions. The model and its files then contain how frequent
        each label is at each client.

        Args:
            dataset: data of known clients; ``None`` means the training data.
            if_better: change nothing unless the labels of held-out rows become more likely, by more
                than two standard errors.

        Returns:
            Whether the predictions are corrected.
        """
        if self.target is not None:
            raise ValueError("A model of numbers has no label frequencies.")
        if self.algorithm == DENSITY:
            raise ValueError(f"A model without labels ({DENSITY!r}) has no label frequencies.")
        if self.algorithm not in SHARED_LEARNERS:
            raise ValueError(
                f"{self.algorithm} trains learners of each client's own, which already know its label "
                f"frequencies; learn_labels is for {', '.join(SHARED_LEARNERS)}."
            )
        data = self._data(dataset)

        def labelled(split: LabelledRows) -> ClientLabels:
            labels = self._labels_of(split, data)
            if bool((labels == len(self.classes)).any()):
                self._labels(data.labels_of(split), len(split))  # raises
            codes = torch.from_numpy(client_codes(split, self.names))
            rows = self._evaluator.from_split(split)
            device = rows.x.device
            weights = None if split.weights is None else split.weights.to(device)
            return ClientLabels(rows.x, rows.log_x, labels.to(device), codes.to(device), weights)

        held_out = labelled(data.validation) if len(data.validation) else None
        found = estimate_label_frequencies(
            self.prediction, labelled(data.train), held_out, if_better=if_better
        )
        if found is not None:
            self.prediction = replace(self.prediction, labels=found)
            self.options = {**self.options, "personal_labels": True}
        return found is not None

    # ------------------------------------------------------------------ novel rows

    def novelty_scores(
        self,
        X: ArrayLike,
        y: ArrayLike | None = None,
        client: Any = None,
        *,
        score: Score = "x",
        clients: ArrayLike | None = None,
        features: ArrayLike | None = None,
    ) -> FloatArray:
        """Return scores that are low for novel rows, ``(n,)``.

        Args:
            X: rows, ``(n, *input_shape)``.
            y: labels, required by ``"y"`` and ``"joint"``.
            client: as in :meth:`predict_proba`.
            clients: as in :meth:`predict_proba`.
            score: ``"x"`` is ``log P(x)``, ``"y"`` is ``log P(y|x)``, ``"joint"`` is ``log P(x, y)``, and
                ``"confidence"`` is the largest ``log P(y|x)`` of any class, which needs no density.
            features: input of the Gaussians, if the model uses separate features, ``(n, d)``.
        """
        self._check_score(score, y)
        rows = self._evaluator.from_arrays(X, features)
        return self._score(rows, y, self._codes(client, clients, len(rows)), score)

    def _check_score(self, score: str, y: ArrayLike | None) -> None:
        check_choice("score", score, SCORES)
        if score == "confidence" and self.target is not None:
            raise ValueError("score='confidence' is for classes; use 'x', 'y' or 'joint'.")
        if score in ("y", "joint") and y is None:
            raise ValueError(f"score={score!r} needs labels; pass y, or use score='x'.")
        if score in ("x", "joint"):
            self._need_density()

    def _score(
        self, rows: EvaluatedRows, y: ArrayLike | None, codes: IntArray, score: Score
    ) -> FloatArray:
        if score == "x":
            return rows.log_density(codes)
        if score == "confidence":
            return np.asarray(self._log_proba(rows, codes).max(-1))
        assert y is not None
        labels: NDArray[Any] = (
            class_codes(y, len(rows), self.classes)
            if self.target is None
            else numbers_of(y, len(rows))
        )
        conditional, _ = self._log_conditional(rows, codes, torch.from_numpy(labels))
        return conditional if score == "y" else rows.log_density(codes) + conditional

    def calibrate(self, dataset: FederatedDataset | None = None, split: str = "validation") -> None:
        """Store the scores of held-out rows, from which :meth:`novelty` takes its thresholds.

        Clients with few held-out rows use their training rows, too; each is scored as if it had not been
        trained on.

        Args:
            dataset: data of known clients; ``None`` means the training data.
            split: the held-out rows.
        """
        data, held_out, codes = self._split(dataset, split)
        rows, labels = self._evaluator.from_split(held_out), self._labels_of(held_out, data)
        scores: dict[str, NDArray[Any]] = {"client": codes}
        for prefix, who in (("", np.full_like(codes, NO_CLIENT)), (OWN, codes)):
            conditional, confidence = self._log_conditional(rows, who, labels)
            scores[prefix + "y"] = conditional
            if confidence is not None:
                scores[prefix + "confidence"] = confidence
            if rows.log_x is not None:
                density = rows.log_density(who)
                scores |= {prefix + "x": density, prefix + "joint": density + conditional}
        if rows.log_x is not None:
            scores["gaussian"] = rows.most_likely_gaussians()
            own, clients = [scores["own_x"]], [codes]
            few = few_held_out(codes, len(self.names))
            if split != "train" and len(data.train) and few.any():
                trained = client_codes(data.train, self.names)
                some = few[trained]
                evaluated = self._evaluator.from_split(data.train)
                own.append(evaluated.log_density_without_itself(trained)[some])
                clients.append(trained[some])
            found = standardise(np.concatenate(own), np.concatenate(clients), len(self.names))
            if len(found[2]):
                scores |= dict(zip(("location", "scale", "standard"), found, strict=True))
        self.calibration = scores

    def novelty(
        self,
        X: ArrayLike,
        y: ArrayLike | None = None,
        *,
        client: Any = None,
        clients: ArrayLike | None = None,
        score: Score = "x",
        false_alarm_rate: float = 0.05,
        features: ArrayLike | None = None,
        batch: bool = False,
    ) -> NoveltyResult:
        """Flag novel rows at a chosen false-alarm rate.

        Without a client, scores use the federation's weights, and the threshold comes from held-out rows
        of all clients. The rate then holds for new rows drawn like all of them together, but a small
        client with a region of its own may have many more. With a client, scores use its weights and the
        threshold its own rows, see :func:`fedgmm.model.novelty.client_p_values`.

        Args:
            X: rows, ``(n, *input_shape)``.
            y: labels, required by ``"y"`` and ``"joint"``.
            client: a known client for all rows.
            clients: one known client per row, or ``None`` for rows without a client.
            score: as in :meth:`novelty_scores`.
            false_alarm_rate: share of ordinary rows that may be flagged.
            features: input of the Gaussians, if the model uses separate features, ``(n, d)``.
            batch: whether to test all rows together as well, see :meth:`client_novelty`.
        """
        check_rate(false_alarm_rate)
        self._check_score(score, y)
        if not self.calibration:
            self.calibrate()
        rows = self._evaluator.from_arrays(X, features)
        codes = self._codes(client, clients, len(rows))
        scores = self._score(rows, y, codes, score)
        result = flag_novel_rows(
            self.calibration, score, scores, codes, false_alarm_rate, self.names
        )
        if not batch:
            return result
        gaussians = None if rows.log_x is None else rows.most_likely_gaussians()
        found = compare_file(self.calibration, score, scores, codes, gaussians)
        return replace(result, batch=found)

    def has_own_threshold(self, client: Hashable, score: Score = "x") -> bool:
        """Return whether ``novelty(client=...)`` has held-out scores of a known client."""
        code = self.names.index(client)
        return client_p_values(self.calibration, score, np.zeros(0), code) is not None

    def client_novelty(
        self, X: ArrayLike, *, client: Any = None, features: ArrayLike | None = None
    ) -> float:
        """Return the p-value of rows together; small means that they are novel.

        The null hypothesis without a client: within each Gaussian the rows are drawn like the held-out
        rows of all clients, in any shares of the Gaussians. So a client with other weights is not
        novel. With a client: the rows are drawn like its held-out rows. The size of the test is
        exact, see :func:`fedgmm.model.novelty.file_test`, which also says how few rows can speak.
        """
        self._need_density()
        if not self.calibration:
            self.calibrate()
        rows = self._evaluator.from_arrays(X, features)
        if not len(rows):
            raise ValueError("The test of a client needs at least one row.")
        codes = self._codes(client, None, len(rows))
        scores, gaussians = rows.log_density(codes), rows.most_likely_gaussians()
        return compare_file(self.calibration, "x", scores, codes, gaussians).p_value

    def false_alarm_rates(
        self,
        dataset: FederatedDataset | None = None,
        *,
        split: str = "test",
        score: Score = "x",
        false_alarm_rate: float = 0.05,
    ) -> dict[Hashable, FalseAlarms]:
        """Return the share of each client's held-out rows that :meth:`novelty` flags by mistake.

        Args:
            dataset: data of known clients; ``None`` means the training data.
            split: the held-out rows; thresholds come from the validation rows.
            score: as in :meth:`novelty_scores`.
            false_alarm_rate: share of ordinary rows that may be flagged.
        """
        data, held_out, codes = self._split(dataset, split)
        if not self.calibration:
            self.calibrate(data)
        y = data.labels_of(held_out) if score in ("y", "joint") else None
        self._check_score(score, y)
        check_rate(false_alarm_rate)
        rows = self._evaluator.from_split(held_out)
        pooled = self._score(rows, y, np.full_like(codes, NO_CLIENT), score)
        own = self._score(rows, y, codes, score)
        found = count_false_alarms(self.calibration, score, pooled, own, codes, false_alarm_rate)
        return {self.names[code]: alarms for code, alarms in found.items()}

    # ------------------------------------------------------------------ files and helpers

    def public(self) -> FederatedModel:
        """Return the model without anything of single clients or rows, for those who may see no more.

        It lacks the clients' names, weights and label frequencies, the scores of held-out rows, and the
        data; it predicts with the federation's weights. If the model was trained with ``privacy``, all
        that is left is covered by ``ε``.

        Raises:
            ValueError: every client has a learner of its own, and none is shared.
        """
        own = replace(self.prediction, labels=None)
        if own.client_weights is not None:
            own = replace(own, client_weights=own.client_weights[:0])
        elif own.default_learner is None or own.assignment is None:
            raise ValueError(f"{self.algorithm} has learners of single clients only.")
        else:
            first = own.default_learner
            learners = {name: value[first : first + 1] for name, value in own.learners.items()}
            none = own.assignment[:0]
            own = replace(own, learners=learners, assignment=none, default_learner=0)
        kept = ("round", "log_likelihood", "epsilon")
        return replace(
            self,
            prediction=own,
            names=[],
            history=[{k: v for k, v in entry.items() if k in kept} for entry in self.history],
            calibration={},
            dataset=None,
            interval_scores=None,
        )

    def save(self, folder: str | Path) -> Path:
        """Write the model into a folder (safetensors and JSON); see :func:`fedgmm.load`.

        The folder holds the weights of all clients, and scores of held-out rows if they were computed;
        ``model.public().save(folder)`` leaves them out.
        """
        from fedgmm.model.saving import save

        return save(self, folder)

    def export_onnx(self, path: str | Path, client: Any = None, *, dtype: str = "float32") -> Path:
        """Write the model of one client as an ONNX file, for linear learners, MLPs and ``"cnn"``.

        The graph takes unscaled rows ``X``, ``(n, *input_shape)``, as :meth:`predict_proba` does, and
        ``features`` if the Gaussians use separate ones. Its outputs are ``label``, ``label_index``,
        ``probabilities`` ``(n, K)`` and, with Gaussians, ``log_density``, which is ``log P_c(x)``. A
        model of numbers has ``mean`` in place of labels and probabilities. The file holds the shared
        parameters and the weights of this client, but no weights of other clients. Rows are not
        checked: NaN and infinity give meaningless outputs.

        Args:
            path: the file, which is replaced if it exists.
            client: a known client; ``None`` uses the federation's own weights.
            dtype: type of ``X``: ``"float32"``, ``"float64"`` for numbers with many digits, or
                ``"uint8"`` for images whose pixels are bytes.

        Raises:
            ImportError: the package ``onnx`` is not installed (``fedgmm[onnx]``).
            ValueError: an unknown client, or a learner that cannot be exported.
        """
        from fedgmm.model.export import export_onnx

        return export_onnx(self, path, self._code(client), dtype)

    def to_gaussian_mixture(self, client: Any = None) -> GaussianMixture:
        """Return the Gaussians as a fitted ``GaussianMixture`` of scikit-learn.

        It has the coordinates of unscaled inputs, so its ``score_samples`` of float64 rows is that of
        this model, up to the rounding of scaled rows to ``dtype``. With ``pca`` it has the coordinates of
        the principal components, ``projection.apply`` of the scaled inputs, and with separate features
        those of the features. Gaussians of weight zero are left out.

        Args:
            client: a known client; ``None`` uses the federation's own weights.

        Raises:
            ValueError: an unknown client, or a model without Gaussians.
        """
        from fedgmm.model.export import to_gaussian_mixture

        return to_gaussian_mixture(self, self._code(client))

    def _code(self, client: Any) -> int:
        """Return the code of one client."""
        codes = self._codes(client, None, 1)
        self._check_common(codes)
        return int(codes[0])

    def _data(self, dataset: FederatedDataset | None) -> FederatedDataset:
        if dataset is not None and not isinstance(dataset, FederatedDataset):
            raise TypeError(
                f"dataset must be a FederatedDataset, got {type(dataset).__name__}. To use arrays, make "
                "one of them: FederatedDataset.from_arrays(X, y, clients, split=(1, 0, 0)) has all rows "
                "in its split 'train'."
            )
        data = dataset or self.dataset
        if data is None:
            raise ValueError("The model was loaded without its training data; pass dataset=.")
        names = data.column_names
        if names is None or self.column_names is None or names == self.column_names:
            return data
        order = column_order(names, self.column_names, "dataset")
        train, validation, test = (
            rows.with_inputs(rows.inputs[:, order])
            for rows in (data.train, data.validation, data.test)
        )
        return replace(
            data, train=train, validation=validation, test=test, column_names=self.column_names
        )

    def _split(
        self, dataset: FederatedDataset | None, split: str
    ) -> tuple[FederatedDataset, LabelledRows, IntArray]:
        """Return the data, the rows of a split, and the code of each row's client."""
        data = self._data(dataset)
        rows = data.split(split)
        if not len(rows):
            raise ValueError(f"The {split} split has no rows.")
        return data, rows, client_codes(rows, self.names)

    def _need_density(self) -> None:
        if self.prediction.gaussians is None:
            raise ValueError(
                f"{self.algorithm} has no density of the inputs; use 'fedgmm', or score='confidence'."
            )

    def _codes(self, client: Any, clients: ArrayLike | None, rows: int) -> IntArray:
        """Return the code of each row's client; ``client`` may hold one name per row, as well."""
        if client is not None and clients is not None:
            raise ValueError(
                "Pass client, one name for all rows, or clients, one per row; not both."
            )
        if clients is not None and np.ndim(clients) == 0:
            raise ValueError(
                f"clients must hold one name per row, got {clients!r}; use client= for all rows."
            )
        owner = client if clients is None else clients
        return codes_of_known_clients(owner if rows else None, rows, self.names)

    @property
    def _evaluator(self) -> RowEvaluator:
        return RowEvaluator(
            self.prediction,
            self.input_shape,
            self.scaling,
            self.features_are_inputs,
            self.column_names,
            self.projection,
        )

    def _labels_of(self, rows: LabelledRows, data: FederatedDataset) -> Tensor:
        """Return the number or the position among the classes of each row's label, ``(n,)``.

        Position ``K`` stands for a class that is not in the training data. It has probability zero, so its
        rows count as wrong, with the largest loss.
        """
        if self.target is not None:
            return rows.labels
        position = {label: index for index, label in enumerate(self.classes.tolist())}
        lookup = [position.get(label, len(self.classes)) for label in data.classes.tolist()]
        return torch.tensor(lookup)[rows.labels.cpu()]

    def _labels(self, y: ArrayLike, rows: int) -> Tensor:
        """Return given labels as the learners see them: class indices or standardised numbers."""
        if self.target is None:
            return torch.from_numpy(class_codes(y, rows, self.classes))
        return self.target.apply(torch.from_numpy(numbers_of(y, rows)), torch.float64)

    def _log_proba(self, rows: EvaluatedRows, codes: IntArray) -> FloatArray:
        """Return ``log P_c(y|x)`` of every class, ``(n, K)``."""
        if self.target is not None:
            raise ValueError(
                "The model predicts numbers, not classes; use predict or predict_interval."
            )
        self._check_common(codes)
        return rows.log_proba(codes)

    def _numbers(self, rows: EvaluatedRows, codes: IntArray) -> NumberPredictions:
        """Return ``P_c(y|x)`` of numbers."""
        if self.target is None:
            raise ValueError("The model predicts classes, not numbers; use predict_proba.")
        self._check_common(codes)
        found = rows.numbers(codes).unscaled(self.target)
        scores = self.interval_scores
        return found if scores is None else replace(found, held_out=torch.from_numpy(scores))

    def _log_conditional(
        self, rows: EvaluatedRows, codes: IntArray, labels: Tensor
    ) -> tuple[FloatArray, FloatArray | None]:
        """Return ``log P_c(y|x)`` of given labels ``(n,)``, and the largest of any class.

        Args:
            rows: the rows.
            codes: their clients.
            labels: numbers, for which there is no largest one; or positions among the classes, where
                ``K`` has probability zero.
        """
        if self.target is not None:
            density = self._numbers(rows, codes).log_density(labels.to(rows.x.device))
            return density.cpu().numpy(), None
        log_proba = _with_impossible(self._log_proba(rows, codes))
        return log_proba[np.arange(len(rows)), labels.numpy()], log_proba.max(-1)

    def _check_common(self, codes: IntArray) -> None:
        common = self.prediction.weights is not None or self.prediction.default_learner is not None
        if not common and (codes == NO_CLIENT).any():
            raise ValueError(f"{self.algorithm} has no common model; name a client.")


def _with_impossible(log_proba: FloatArray) -> FloatArray:
    """Return the same columns, and a last one of probability zero."""
    shape = (len(log_proba), log_proba.shape[1] + 1)
    out = empty_beside(torch.from_numpy(log_proba), shape, torch.float64).numpy()
    out[:, -1] = -np.inf
    for first in range(0, len(out), _ROWS_AT_ONCE):
        out[first : first + _ROWS_AT_ONCE, :-1] = log_proba[first : first + _ROWS_AT_ONCE]
        touched(2 * log_proba[:_ROWS_AT_ONCE].nbytes)
    return out
