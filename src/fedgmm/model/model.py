"""The fitted model: predict, evaluate, adapt to new clients, find novel rows, save."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedgmm.core.moments import Scaling
from fedgmm.core.params import count_learners
from fedgmm.core.pca import PCA
from fedgmm.core.predictive import NumberPredictions
from fedgmm.data.dataset import FederatedDataset, LabelledRows
from fedgmm.data.inputs import NO_CLIENT, codes_of_known_clients, column_order
from fedgmm.methods.base import DENSITY, SHARED_LEARNERS, Prediction
from fedgmm.model.adaptation import (
    Adaptation,
    ClientLabels,
    estimate_label_frequencies,
    learn_client,
    note_on,
    with_client,
)
from fedgmm.model.decisions import Cost, Decision, default_positive
from fedgmm.model.importance import Importance, importance_of
from fedgmm.model.metrics import Evaluation, evaluate, evaluate_numbers, interval_of
from fedgmm.model.novelty import (
    SCORES,
    FalseAlarms,
    NoveltyResult,
    Score,
    calibration_of,
    client_p_values,
    compare_file,
    count_false_alarms,
    flag_novel_rows,
)
from fedgmm.model.predictions import (
    EvaluatedRows,
    evaluate_arrays,
    evaluate_split,
    given_labels,
    labels_of,
    probabilities,
)
from fedgmm.support.checks import check_choice, check_number
from fedgmm.support.scratch import counts_of
from fedgmm.wording import counted

if TYPE_CHECKING:
    from sklearn.mixture import GaussianMixture

FloatArray = NDArray[np.float64]
Rows = ArrayLike
Given = ArrayLike | None
"""An array that may be left out."""


class LogPredictions(NamedTuple):
    """``log P_c(y|x)`` of every class, ``(n, K)``, and ``log P_c(x)``, ``(n,)``, if there are Gaussians."""

    log_proba: FloatArray
    log_density: FloatArray | None


@dataclass(repr=False)
class FederatedModel:
    """The result of training.

    Most methods take rows, with these arguments:

    - ``X``: rows, ``(n, *input_shape)``. A table with the column names of the fit may have them in another
      order; an array is taken by position.
    - ``y``: labels of the rows, ``(n,)``.
    - ``client``: a known client for all rows; ``None`` uses the federation's own weights.
    - ``clients``: one known client per row, instead of ``client``.
    - ``features``: input of the Gaussians, if the model uses separate features, ``(n, d)``.

    Others take a ``dataset`` of known clients, by default the training data, and its ``split``:
    ``"train"``, ``"validation"`` or ``"test"``.

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
        column_names: of the inputs, or ``None``.
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
        if self.dataset is None:
            return
        held_out, trained = self.dataset.validation, self.dataset.train
        if self.target is not None and self.interval_scores is None and len(held_out):
            rows = evaluate_split(self, held_out)
            self.interval_scores = rows.numbers().normal_scores(held_out.labels).cpu().numpy()
        if self.positive is None and len(self.classes) == 2:
            classes, known = self.classes.tolist(), self.dataset.classes.tolist()
            counts = counts_of(trained.labels.cpu().numpy(), len(known)).tolist()
            own = [counts[known.index(one)] if one in known else 0 for one in classes]
            self.positive = classes[default_positive(classes, own)]

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
        classes = self.target is None
        method = "" if self.algorithm in ("fedgmm", "fedem") else "--algorithm fedgmm "
        labels = "or label frequencies (--set personal_labels=true) " * classes
        return (
            f"Nothing is personalised: the model has one learner{' and no label frequencies' * classes}, "
            "so all clients get the same predictions. If clients differ, several learners "
            f"({method}--learners 3) {labels}may help."
        )

    @property
    def task(self) -> Literal["classification", "regression"]:
        """``"regression"`` if the model predicts numbers, else ``"classification"``."""
        return "classification" if self.target is None else "regression"

    @property
    def has_common_model(self) -> bool:
        """Whether the model can predict rows that belong to no known client."""
        return self.prediction.weights is not None or self.prediction.default_learner is not None

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
        self, X: Rows, client: Any = None, *, clients: Given = None, features: Given = None
    ) -> FloatArray:
        """Return ``P_c(y|x)`` of every class, equation (3), ``(n, K)``; each row sums to one."""
        return probabilities(self._rows(X, client, clients, features).log_proba())

    def predict_log_proba(
        self, X: Rows, client: Any = None, *, clients: Given = None, features: Given = None
    ) -> FloatArray:
        """Return ``log P_c(y|x)`` of every class, ``(n, K)``."""
        return self._rows(X, client, clients, features).log_proba()

    def predict(
        self,
        X: Rows,
        client: Any = None,
        *,
        clients: Given = None,
        features: Given = None,
        threshold: float | None = None,
        cost: Cost | None = None,
        positive: Hashable | None = None,
    ) -> NDArray[Any]:
        """Return the class of every row, ``(n,)``: the most likely one without threshold and cost.

        A model of numbers returns the mean ``E[y|x]`` of every row. The positive class of two is
        predicted from the probability ``threshold`` on. ``cost`` is that of missing the positive class,
        where a false alarm costs 1; or costs of missing each class, by its name, where the others cost 1.
        Then the class with the smallest expected cost is predicted. ``positive`` may replace the model's
        positive class.
        """
        if self.target is not None:
            self.check_decision(threshold=threshold, cost=cost, positive=positive)
            return self._rows(X, client, clients, features).numbers().mean.cpu().numpy()
        decision = self.decision(positive=positive, threshold=threshold, cost=cost)
        log_proba = self._rows(X, client, clients, features).log_proba()
        return np.asarray(self.classes[decision.choose(log_proba)])

    def predict_interval(
        self,
        X: Rows,
        client: Any = None,
        level: float = 0.9,
        *,
        clients: Given = None,
        features: Given = None,
    ) -> FloatArray:
        """Return the interval that holds ``y`` with probability ``level``, ``(n, 2)``, for numbers.

        As much of ``P_c(y|x)`` lies below the interval as above it. If rows were held out in training, the
        interval is as wide as they need, see :meth:`~fedgmm.core.predictive.NumberPredictions.interval`.
        """
        check_number("level", level, above=0, below=1)
        return interval_of(self._rows(X, client, clients, features).numbers(), level)

    def predict_distribution(
        self, X: Rows, client: Any = None, *, clients: Given = None, features: Given = None
    ) -> NumberPredictions:
        """Return ``P_c(y|x)`` of numbers."""
        return self._rows(X, client, clients, features).numbers()

    def log_predictions(
        self, X: Rows, client: Any = None, *, clients: Given = None, features: Given = None
    ) -> LogPredictions:
        """Return ``log P_c(y|x)`` and ``log P_c(x)``, with the Gaussians evaluated once for both."""
        rows = self._rows(X, client, clients, features)
        density = None if rows.log_x is None else rows.log_density()
        return LogPredictions(rows.log_proba(), density)

    def score_samples(
        self, X: Rows, client: Any = None, *, clients: Given = None, features: Given = None
    ) -> FloatArray:
        """Return ``log P_c(x)`` of every row, ``(n,)``: low for rows unlike anything seen."""
        return self.novelty_scores(X, None, client, clients=clients, features=features)

    def log_conditional(
        self, X: Rows, y: Rows, client: Any = None, *, clients: Given = None, features: Given = None
    ) -> FloatArray:
        """Return ``log P_c(y|x)`` of given labels, ``(n,)``."""
        return self.novelty_scores(X, y, client, score="y", clients=clients, features=features)

    def log_joint(
        self, X: Rows, y: Rows, client: Any = None, *, clients: Given = None, features: Given = None
    ) -> FloatArray:
        """Return ``log P_c(x, y)`` of rows with given labels, ``(n,)``."""
        return self.novelty_scores(X, y, client, score="joint", clients=clients, features=features)

    def decision(
        self, *, positive: Any = None, threshold: float | None = None, cost: Cost | None = None
    ) -> Decision:
        """Return the rule that turns probabilities into a class; arguments as in :meth:`predict`."""
        known = self.positive if positive is None else positive
        classes = self.classes.tolist()
        return Decision.of(classes, positive=known, threshold=threshold, cost=cost)

    @staticmethod
    def check_decision(**chosen: Any) -> None:
        """Raise if a rule for classes is given, such as a threshold, but numbers are predicted."""
        if any(value is not None for value in chosen.values()):
            raise ValueError(
                "threshold, cost and positive are for classes, but this model predicts numbers; leave "
                "them out."
            )

    # ------------------------------------------------------------------ evaluation

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

        A model of numbers returns a :class:`~fedgmm.model.metrics.RegressionEvaluation`. Thresholds and
        costs are those of :meth:`predict`.
        """
        data, rows = self._split(dataset, split)
        if (data.target is None) != (self.target is None):
            raise ValueError(f"The model is for {self.task}, but the data are for {data.task}.")
        codes = rows.codes.cpu().numpy()
        if self.target is not None:
            self.check_decision(threshold=threshold, cost=cost, positive=positive)
            found = evaluate_split(self, rows).numbers()
            return evaluate_numbers(found, rows.labels, codes, rows.names)
        decision = self.decision(positive=positive, threshold=threshold, cost=cost)
        return evaluate(
            evaluate_split(self, rows).log_proba(),
            labels_of(self, rows, data).numpy(),
            codes,
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

        Linear learners have coefficients, which the weights of a client mix. For other learners, and for
        ``kind="permutation"``, each column is shuffled ``repeats`` times among the rows of each client,
        and the growth of the log-loss is measured. ``columns`` names columns of the inputs that belong
        together, such as one-hot categories; by default each column stands on its own.
        """
        data, rows = self._split(dataset, split)
        labels = labels_of(self, rows, data)
        return importance_of(self, rows, labels, columns, kind, repeats, seed)

    # ------------------------------------------------------------------ new clients

    def adapt(
        self,
        client: Hashable,
        X: Rows,
        y: Given = None,
        *,
        features: Given = None,
        max_rounds: int = 200,
    ) -> Adaptation:
        """Add a client by learning only its weights ``π_c``; other clients do not change.

        The weights are shrunk towards the federation's, more strongly if the training clients differ
        little (``prediction.prior_rows``). Labels decide how much the client's own weights count, by
        cross-validation, so a few rows do no harm. The result has a note if nothing could change, and
        if a known client has new weights.

        If the model has label frequencies, see :meth:`learn_labels`, the client gets its own. They are
        counted from its labels. For a new client without labels they are guessed from the learners'
        predictions, if guesses helped the known clients.

        Args:
            client: a new name. A known client gets new weights from these rows alone, in place of its
                earlier ones.
            X: rows of the client.
            y: their labels. Without them only the weights of the Gaussians are learned, and
                learners keep the federation's shares within each Gaussian. Methods without Gaussians
                need labels, or label frequencies that can be guessed.
            features: see the class.
            max_rounds: largest number of iterations.
        """
        self._mixture_weights("weights")
        rows = evaluate_arrays(self, X, features)
        if not len(rows):
            raise ValueError(f"Client {client!r} has no rows to adapt to.")
        labels = None if y is None else given_labels(self, y, len(rows))
        before, found = self.prediction, learn_client(rows, labels, max_rounds)
        code = self.names.index(client) if client in self.names else None
        if code is None:
            self.names = [*self.names, client]
        self.prediction = with_client(before, code, found)
        notes = [] if code is None else [f"Client {client!r} was known: its weights were replaced."]
        if self.algorithm != DENSITY and (about := note_on(before, found)) is not None:
            notes.append(about)
        weights, note = found.weights.cpu().numpy(), " ".join(notes) or None
        return Adaptation(client, weights, found.log_likelihoods, note)

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

        With ``if_better`` nothing changes unless the labels of held-out rows become more likely, by more
        than two standard errors. Returns whether the predictions are corrected.
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
            labels, rows = labels_of(self, split, data), evaluate_split(self, split)
            if bool((labels == len(self.classes)).any()):
                given_labels(self, data.labels_of(split), len(split))  # raises
            device = rows.x.device
            weights = None if split.weights is None else split.weights.to(device)
            return ClientLabels(rows.x, rows.log_x, labels.to(device), rows.codes, weights)

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
        X: Rows,
        y: Given = None,
        client: Any = None,
        *,
        score: Score = "x",
        clients: Given = None,
        features: Given = None,
    ) -> FloatArray:
        """Return scores that are low for novel rows, ``(n,)``.

        ``score="x"`` is ``log P(x)``, ``"y"`` is ``log P(y|x)``, ``"joint"`` is ``log P(x, y)``; these two
        need labels. ``"confidence"`` is the largest ``log P(y|x)`` of any class, which needs no density.
        """
        self._check_score(score, y)
        return self._score(self._rows(X, client, clients, features), y, score)

    def _check_score(self, score: str, y: Given) -> None:
        check_choice("score", score, SCORES)
        if score == "confidence" and self.target is not None:
            raise ValueError("score='confidence' is for classes; use 'x', 'y' or 'joint'.")
        if score in ("y", "joint") and y is None:
            raise ValueError(f"score={score!r} needs labels; pass y, or use score='x'.")
        if score in ("x", "joint") and self.prediction.gaussians is None:
            raise ValueError(
                f"{self.algorithm} has no density of the inputs; use 'fedgmm', or score='confidence'."
            )

    def _score(self, rows: EvaluatedRows, y: Given, score: Score) -> FloatArray:
        if score == "x":
            return rows.log_density()
        if score == "confidence":
            return np.asarray(rows.log_proba().max(-1))
        assert y is not None
        conditional, _ = rows.log_conditional(given_labels(self, y, len(rows)))
        return conditional if score == "y" else rows.log_density() + conditional

    def calibrate(self, dataset: FederatedDataset | None = None, split: str = "validation") -> None:
        """Store the scores of held-out rows, from which :meth:`novelty` takes its thresholds.

        Clients with few held-out rows use their training rows, too; each is scored as if it had not been
        trained on.
        """
        data, held_out = self._split(dataset, split)
        trained = data.train if split != "train" and len(data.train) else None
        self.calibration = calibration_of(self, held_out, labels_of(self, held_out, data), trained)

    def novelty(
        self,
        X: Rows,
        y: Given = None,
        *,
        client: Any = None,
        clients: Given = None,
        score: Score = "x",
        false_alarm_rate: float = 0.05,
        features: Given = None,
        batch: bool = False,
    ) -> NoveltyResult:
        """Flag novel rows at a chosen false-alarm rate.

        Without a client, scores use the federation's weights, and the threshold comes from held-out rows
        of all clients. The rate then holds for new rows drawn like all of them together, but a small
        client with a region of its own may have many more. With a client, scores use its weights and the
        threshold its own rows, see :func:`fedgmm.model.novelty.client_p_values`.

        ``false_alarm_rate`` is the share of ordinary rows that may be flagged; ``score`` and ``y`` are
        those of :meth:`novelty_scores`. With ``batch`` all rows are tested together as well, see
        :meth:`client_novelty`.
        """
        check_number("false_alarm_rate", false_alarm_rate, above=0, below=1)
        self._check_score(score, y)
        if not self.calibration:
            self.calibrate()
        rows = self._rows(X, client, clients, features)
        scores = self._score(rows, y, score)
        result = flag_novel_rows(
            self.calibration, score, scores, rows.codes.cpu().numpy(), false_alarm_rate, self.names
        )
        if not batch:
            return result
        return replace(result, batch=compare_file(self.calibration, score, scores, rows))

    def client_novelty(self, X: Rows, *, client: Any = None, features: Given = None) -> float:
        """Return one p-value for all rows together; a small one means that they are novel.

        With a client the null hypothesis is that the rows are drawn like its held-out rows. Without a
        client it is that the rows of each Gaussian are drawn like held-out rows of that Gaussian. The
        shares of the Gaussians do not matter, so a client that only has other weights is not novel.

        The false-alarm rate of the test is exact, see :func:`fedgmm.model.novelty.file_test`.
        :func:`fedgmm.model.novelty.smallest_file` returns the fewest rows that can be found novel.
        """
        self._check_score("x", None)
        if not self.calibration:
            self.calibrate()
        rows = self._rows(X, client, None, features)
        if not len(rows):
            raise ValueError("The test of a client needs at least one row.")
        return compare_file(self.calibration, "x", rows.log_density(), rows).p_value

    def has_own_threshold(self, client: Hashable, score: Score = "x") -> bool:
        """Return whether ``novelty(client=...)`` has held-out scores of a known client."""
        code = self.names.index(client)
        return client_p_values(self.calibration, score, np.zeros(0), code) is not None

    def false_alarm_rates(
        self,
        dataset: FederatedDataset | None = None,
        *,
        split: str = "test",
        score: Score = "x",
        false_alarm_rate: float = 0.05,
    ) -> dict[Hashable, FalseAlarms]:
        """Return the share of each client's held-out rows that :meth:`novelty` flags by mistake.

        Thresholds come from the validation rows, so ``split`` should name others.
        """
        data, held_out = self._split(dataset, split)
        if not self.calibration:
            self.calibrate(data)
        y = data.labels_of(held_out) if score in ("y", "joint") else None
        self._check_score(score, y)
        check_number("false_alarm_rate", false_alarm_rate, above=0, below=1)
        rows = evaluate_split(self, held_out)
        pooled, own = self._score(rows.of(NO_CLIENT), y, score), self._score(rows, y, score)
        codes = rows.codes.cpu().numpy()
        found = count_false_alarms(self.calibration, score, pooled, own, codes, false_alarm_rate)
        return {self.names[code]: alarms for code, alarms in found.items()}

    # ------------------------------------------------------------------ files

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

        Raises:
            ValueError: an unknown client, or a model without Gaussians.
        """
        from fedgmm.model.export import to_gaussian_mixture

        return to_gaussian_mixture(self, self._code(client))

    # ------------------------------------------------------------------ rows and clients

    def _rows(self, X: Rows, client: Any, clients: Given, features: Given) -> EvaluatedRows:
        """Return checked rows with their clients; the Gaussians are evaluated."""
        rows = evaluate_arrays(self, X, features)
        if client is not None and clients is not None:
            raise ValueError(
                "Pass client, one name for all rows, or clients, one per row; not both."
            )
        if clients is not None and np.ndim(clients) == 0:
            raise ValueError(
                f"clients must hold one name per row, got {clients!r}; use client= for all rows."
            )
        owner = client if clients is None else clients  # client may hold one name per row, too
        return rows.of(codes_of_known_clients(owner if len(rows) else None, len(rows), self.names))

    def _code(self, client: Any) -> int:
        """Return the code of one client."""
        code = int(codes_of_known_clients(client, 1, self.names)[0])
        if code == NO_CLIENT and not self.has_common_model:
            raise ValueError(f"{self.algorithm} has no common model; name a client.")
        return code

    def _data(self, dataset: FederatedDataset | None) -> FederatedDataset:
        """Return the data with the columns in the model's order."""
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
        splits = {
            name: rows.with_inputs(rows.inputs[:, order])
            for name in ("train", "validation", "test")
            for rows in [data.split(name)]
        }
        return replace(data, **splits, column_names=self.column_names)  # type: ignore[arg-type]

    def _split(
        self, dataset: FederatedDataset | None, split: str
    ) -> tuple[FederatedDataset, LabelledRows]:
        """Return the data and the rows of a split."""
        data = self._data(dataset)
        rows = data.split(split)
        if not len(rows):
            raise ValueError(f"The {split} split has no rows.")
        return data, rows
