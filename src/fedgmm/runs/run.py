"""A finished run: evaluate, predict, adapt, detect, report."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedgmm.data.embed import Embedding
from fedgmm.data.tables.errors import TableError
from fedgmm.data.tables.files import Notify, client_name, find_tables, path_of
from fedgmm.data.tables.loading import Rows, read_rows
from fedgmm.data.tables.preprocessing import Preprocessing
from fedgmm.methods.base import DENSITY
from fedgmm.model.adaptation import Adaptation
from fedgmm.model.decisions import Cost
from fedgmm.model.importance import Importance
from fedgmm.model.metrics import INTERVAL, Evaluation, evaluate, evaluate_numbers, interval_of
from fedgmm.model.model import FederatedModel
from fedgmm.model.novelty import SCORES, NoveltyResult, Score
from fedgmm.model.predictions import probabilities
from fedgmm.model.saving import load
from fedgmm.runs.config import RunConfig, config_from, read_config
from fedgmm.runs.folder import (
    RunError,
    RunFolder,
    check_files_unchanged,
    is_data_file,
    read_json,
    write_json,
)
from fedgmm.support.checks import check_choice
from fedgmm.wording import counted, first_few

if TYPE_CHECKING:
    from fedgmm.data.dataset import FederatedDataset

_CURVE_ROWS = (5, 10, 20, 50, 100, 200, 500, 1000)
_MOST_TEST_ROWS = 5000  # of an adaptation curve


@dataclass(frozen=True)
class Predictions:
    """Predictions for the rows of a file.

    Attributes:
        labels: the predicted class or number of each row, ``(n,)``.
        probabilities: probabilities of the classes, ``(n, K)``.
        classes: ``(K,)``.
        log_density: ``log P(x)``, ``(n,)``; ``None`` without Gaussians.
        notes: remarks for the user.
        codes: index of the predicted class, ``(n,)``.
        ids: the columns that identify rows, ``(n,)`` each.
        interval: lower and upper end of the interval of each number, ``(n, 2)``; ``None`` for classes.
    """

    labels: NDArray[Any]
    probabilities: NDArray[np.float64]
    classes: NDArray[Any]
    log_density: NDArray[np.float64] | None
    notes: list[str]
    codes: NDArray[np.int64]
    ids: dict[str, NDArray[Any]] = field(default_factory=dict)
    interval: NDArray[np.float64] | None = None

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns of an output file."""
        columns: dict[str, NDArray[Any]] = {
            "row": np.arange(1, len(self.labels) + 1),
            **self.ids,
            "prediction": self.labels,
        }
        if self.interval is not None:
            columns |= {"lower": self.interval[:, 0], "upper": self.interval[:, 1]}
        else:
            columns["probability"] = self.probabilities[np.arange(len(self.codes)), self.codes]
        for index, label in enumerate(self.classes.tolist()):
            columns[f"p({label})"] = self.probabilities[:, index]
        if self.log_density is not None:
            columns["log_density"] = self.log_density
        return columns


@dataclass(frozen=True)
class Detection:
    """Novel rows of a file.

    Attributes:
        result: scores, p-values and flags of the rows.
        score: name of the score.
        notes: remarks for the user.
        ids: the columns that identify rows, ``(n,)`` each.
        clients: for each client in the client column its rows, how many are novel, and how many
            would be by the threshold of all clients.
    """

    result: NoveltyResult
    score: str
    notes: list[str]
    ids: dict[str, NDArray[Any]] = field(default_factory=dict)
    clients: list[dict[str, Any]] = field(default_factory=list)

    @property
    def batch_p_value(self) -> float | None:
        """The p-value of all rows together."""
        return self.result.batch_p_value

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns of an output file."""
        return {
            "row": np.arange(1, len(self.result.scores) + 1),
            **self.ids,
            "score": self.result.scores,
            "p_value": self.result.p_values,
            "novel": self.result.novel,
        }


@dataclass(frozen=True)
class Adapted:
    """A client that joined a finished run.

    Attributes:
        adaptation: the client's weights, and the likelihoods on the way to them.
        rows: number of rows that were used.
        labelled: whether their labels were used.
        curve: accuracy on held-out rows, for growing numbers of rows that were used.
        notes: remarks for the user.
    """

    adaptation: Adaptation
    rows: int
    labelled: bool
    curve: list[dict[str, float]]
    notes: list[str]


@dataclass
class FederatedRun:
    """A run folder with its model.

    Attributes:
        folder: the run folder.
        model: the trained model, including clients that joined later.
        preprocessing: turns new files into the inputs of the model.
        dataset: the rows that the model was trained on, if they are in memory.
    """

    folder: RunFolder
    model: FederatedModel
    preprocessing: Preprocessing
    dataset: FederatedDataset | None = None

    def __repr__(self) -> str:
        """Return the folder and a description of the model."""
        return f"FederatedRun in {self.folder.home}\n{self.model!r}"

    @property
    def config(self) -> RunConfig:
        """The configuration of the run."""
        return config_from(read_config(self.folder.config))

    @property
    def metrics(self) -> dict[str, Any]:
        """The content of ``metrics.json``."""
        return dict(read_json(self.folder.metrics))

    def data(self, notify: Notify = lambda _: None) -> FederatedDataset:
        """Return the rows of the run; their files are read again if they are not in memory."""
        if self.dataset is None:
            self.dataset = self.split_anew(self.config.table.seed, notify)
            self.model.dataset = self.dataset
        return self.dataset

    def split_anew(self, seed: int, notify: Notify = lambda _: None) -> FederatedDataset:
        """Read the rows of the run and split them by a seed; the run itself does not change."""
        from fedgmm.data.tables.loading import on_disk_if_large, read_tables

        check_files_unchanged(self.folder)
        config = self.config
        with on_disk_if_large(config.files, config.table, self.folder.home):
            tables = read_tables(config.files, replace(config.table, seed=seed), notify)
            return tables.load(self.preprocessing, notify)

    # ------------------------------------------------------------------ commands

    def evaluate(
        self,
        files: Sequence[str | Path] = (),
        client: str | None = None,
        *,
        split: str = "test",
        positive: Any = None,
        threshold: float | None = None,
        cost: Cost | None = None,
        notify: Notify = lambda _: None,
    ) -> Evaluation:
        """Return the metrics of every client, and of all rows together.

        Args:
            files: labelled files of known clients; without any, the rows of the run are used.
            client: the client whose files these are; ``None`` means the client column of a file, or its
                name if there is no such column.
            split: which rows of the run: ``"train"``, ``"validation"`` or ``"test"``.
            positive: the positive class of two; ``None`` means that of the model.
            threshold: probability of the positive class from which on it is predicted.
            cost: cost of missing the positive class, or each class, see :meth:`FederatedModel.predict`.
            notify: called with a line before each step.
        """
        self.need_labels()
        chosen: dict[str, Any] = {"positive": positive, "threshold": threshold, "cost": cost}
        if not files:
            return self.model.evaluate(split, self.data(notify), **chosen)
        owners, matrices, labels = [], [], []
        for path in find_tables(files) if self._embedding is None else map(Path, files):
            rows = self._read(path, label_needed=True, notify=notify)
            notes = list(rows.notes)
            if is_data_file(self.folder, Path(path)):
                notes.append(
                    f"{Path(path).name} is a file of this run, so most of its rows were used in training; "
                    "evaluate without files for the test rows alone."
                )
            for note in notes:
                warnings.warn(note, stacklevel=2)
            assert rows.labels is not None
            if rows.unknown_labels:
                raise TableError(
                    path,
                    f"the label {rows.unknown_labels[0]!r} is not a class of the training data; "
                    "correct the label or remove the row.",
                )
            kept = rows.labelled
            if not kept.any():
                raise TableError(path, "no row has a label; evaluation needs labels.")
            names = rows.clients
            if names is None or client is not None:
                names = [client or client_name(path)] * len(rows.matrix)
            own = np.array(self._full_names(names, path), dtype=object)[kept]
            owners += own.tolist()
            matrices.append(rows.matrix[kept])
            labels.append(rows.labels[kept])
        code_of = {name: code for code, name in enumerate(dict.fromkeys(owners))}
        codes = np.array([code_of[name] for name in owners], dtype=np.int64)
        matrix, truth = np.concatenate(matrices), np.concatenate(labels)
        clients = np.array(owners, dtype=object)
        if self.model.target is not None:
            self.model.check_decision(**chosen)
            numbers = self.model.predict_distribution(matrix, clients=clients)
            return evaluate_numbers(numbers, torch.from_numpy(truth), codes, tuple(code_of))
        return evaluate(
            self.model.predict_log_proba(matrix, clients=clients),
            truth.astype(np.int64),
            codes,
            tuple(code_of),
            classes=tuple(self.model.classes.tolist()),
            decision=self.model.decision(**chosen),
        )

    def importance(
        self, split: str = "test", *, notify: Notify = lambda _: None, **options: Any
    ) -> Importance:
        """Return which columns of the files decide, for every client.

        Args:
            split: which rows of the run: ``"train"``, ``"validation"`` or ``"test"``.
            notify: called with a line before each step.
            **options: of :meth:`FederatedModel.importance`.
        """
        self.need_labels()
        data = self.data(notify)
        notify("measuring which columns decide")
        groups = self.preprocessing.feature_groups
        found = self.model.importance(split, data, columns=groups, **options)
        return replace(found, features=self.preprocessing.feature_names)

    def predict(
        self,
        file: str | Path,
        client: str | None = None,
        *,
        positive: Any = None,
        threshold: float | None = None,
        cost: Cost | None = None,
        ids: Sequence[str] = (),
        notify: Notify = lambda _: None,
    ) -> Predictions:
        """Predict the class of each row of a file.

        Args:
            file: a table with the columns of the training data; labels are not needed.
            client: the client whose weights are used; ``None`` uses the client column of the file, or
                the federation's weights if there is no such column.
            positive: the positive class of two; ``None`` means that of the model.
            threshold: probability of the positive class from which on it is predicted.
            cost: cost of missing the positive class, or each class, see :meth:`FederatedModel.predict`.
            ids: columns that identify rows, besides those that training declared.
            notify: called with a line before each step.
        """
        self.need_labels()
        chosen: dict[str, Any] = {"positive": positive, "threshold": threshold, "cost": cost}
        decision = None
        if self.model.target is None:
            decision = self.model.decision(**chosen)
        else:
            self.model.check_decision(**chosen)
        path = path_of(file)
        rows = self._read(path, ids=ids, notify=notify)
        notes = list(rows.notes)
        owner: Any = None
        if client is not None:
            owner = self.client_named(client)
        elif rows.clients is not None:
            owner = np.array(self._full_names(rows.clients, path), dtype=object)
        elif not has_common_model(self.model):
            raise ValueError(
                f"{self.model.algorithm} has no common model; choose a client with --client NAME."
            )
        else:
            notes += self._unused_name(path, "The federation's weights were used; for those of")
        notify("predicting")
        if decision is None:
            numbers = self.model.predict_distribution(rows.matrix, owner)
            density = None
            if self.model.prediction.gaussians is not None:
                density = self.model.score_samples(rows.matrix, owner)
            ends = interval_of(numbers, INTERVAL)
            return Predictions(
                numbers.mean.cpu().numpy(),
                np.empty((len(ends), 0)),
                np.empty(0),
                density,
                notes,
                np.zeros(len(ends), dtype=np.int64),
                rows.ids,
                ends,
            )
        found = self.model.log_predictions(rows.matrix, owner)
        proba, classes = probabilities(found.log_proba), np.asarray(self.model.classes)
        codes = decision.choose(found.log_proba)
        if decision.threshold is not None:
            notes.append(
                f"{self.model.positive if positive is None else positive} is predicted from a "
                f"probability of {decision.threshold:.3g} on"
                f"{'; --positive names another class' if positive is None else ''}."
            )
        return Predictions(
            classes[codes], proba, classes, found.log_density, notes, codes, rows.ids
        )

    def detect(
        self,
        file: str | Path,
        client: str | None = None,
        *,
        false_alarm_rate: float = 0.05,
        score: Score = "x",
        ids: Sequence[str] = (),
        notify: Notify = lambda _: None,
    ) -> Detection:
        """Find the rows of a file that are unlike the training data.

        Args:
            file: a table with the columns of the training data.
            client: the client whose weights and held-out rows are used; ``None`` uses the client column
                of the file, or all clients if there is no such column.
            false_alarm_rate: share of ordinary rows that may be flagged.
            score: ``"x"`` uses the inputs, ``"y"`` the labels given the inputs, ``"joint"`` both,
                ``"confidence"`` the largest class probability.
            ids: columns that identify rows, besides those that training declared.
            notify: called with a line before each step.
        """
        check_choice("score", score, SCORES)
        if not has_common_model(self.model):
            raise RunError(
                f"{self.model.algorithm} has no common model to compare rows with; train with fedgmm."
            )
        if score != "x" and self.model.algorithm == DENSITY:
            raise RunError(
                f"{self.folder.home} was trained without labels, which --score {score} needs; use "
                "--score x."
            )
        if score in ("x", "joint") and self.model.prediction.gaussians is None:
            raise RunError(
                f"{self.model.algorithm} has no density of the inputs; use --score confidence, or train "
                "with fedgmm."
            )
        if not self.model.calibration:
            raise RunError(
                "The run has no held-out rows to calibrate on; train again with more rows per client."
            )
        path = path_of(file)
        needs_labels = score in ("y", "joint")
        rows = self._read(path, label_needed=needs_labels, ids=ids, notify=notify)
        labels = None
        if needs_labels:
            assert rows.labels is not None
            missing = np.flatnonzero(~rows.labelled)
            if len(missing):
                raise TableError(
                    path,
                    f"row {missing[0] + 1} has no label, or one that is not in the training data.",
                )
            labels = self._labels_as_given(rows.labels)
        notify("looking for novel rows")
        notes = list(rows.notes)
        if "client" not in self.model.calibration and (client is not None or rows.clients):
            self.model.calibrate(self.data(notify))  # the run was written by an earlier version
        owners: list[str | None] | None = None
        if client is not None:
            name = self.client_named(client)
            if not self.model.has_own_threshold(name, score):
                raise RunError(
                    f"{name} has no held-out rows of its own: it joined later, or has too few rows. Leave "
                    "out --client to compare with the rows of all clients."
                )
            owners = [name] * len(rows.matrix)
        elif rows.clients is not None:
            owners = self._owners_with_threshold(rows.clients, score, notes)
        else:
            notes += self._unused_name(path, "The rows are compared with all clients; for")
        of_rows = None if owners is None else np.array(owners, dtype=object)
        options: dict[str, Any] = {"score": score, "false_alarm_rate": false_alarm_rate}
        result = self.model.novelty(rows.matrix, labels, clients=of_rows, batch=True, **options)
        if result.batch is not None and result.batch.smallest > false_alarm_rate:
            notes.append(
                "There are too few rows to say whether the file as a whole is novel: its p-value is at "
                f"least {result.batch.smallest:.2g}."
            )
        table = []
        if client is None and owners is not None:
            pooled = self.model.novelty(rows.matrix, labels, **options).novel
            for name in dict.fromkeys(rows.clients or ()):
                here = np.array([own == name for own in rows.clients or ()])
                table.append(
                    {
                        "client": name,
                        "rows": int(here.sum()),
                        "novel": int(result.novel[here].sum()),
                        "novel_for_all_clients": int(pooled[here].sum()),
                    }
                )
        return Detection(result, score, notes, rows.ids, table)

    def _owners_with_threshold(
        self, clients: list[str], score: Score, notes: list[str]
    ) -> list[str | None]:
        """Return the full name of each row's client, or ``None`` where the client has no threshold."""
        full: dict[str, str | None] = {}
        for name in dict.fromkeys(clients):
            try:
                full[name] = self.client_named(name)
            except ValueError:
                full[name] = None
        for name, own in full.items():
            if own is None or not self.model.has_own_threshold(own, score):
                full[name] = None
                notes.append(
                    f"{name or 'A row without a client'} has no held-out rows of its own, so its rows are "
                    "compared with those of all clients."
                )
        return [full[name] for name in clients]

    def adapt(
        self,
        client: str,
        file: str | Path,
        *,
        replace_known: bool = False,
        notify: Notify = lambda _: None,
    ) -> Adapted:
        """Add a client by learning only its weights; other clients stay the same.

        Args:
            client: name of the client.
            file: rows of the client, with or without labels.
            replace_known: learn new weights also for a client that took part in training.
            notify: called with a line before each step.
        """
        if not client.strip():
            raise ValueError("The client needs a name.")
        if self.model.prediction.client_weights is None:
            raise RunError(
                f"{self.model.algorithm} has no weights that a new client could learn; train with "
                "fedgmm or fedem."
            )
        with self.folder.lock():
            self.model = load(self.folder.model)  # another process may have added a client
            path = self.folder.client(client)
            took_part = not path.is_file() or read_json(path).get("took_part", True)
            if client in self.model.names and took_part and not replace_known:
                raise RunError(
                    f"Client {client!r} took part in training; add --replace to learn new weights."
                )
            adapted = self._adapt(client, path_of(file), notify)
            record = {
                "client": client,
                "rows": adapted.rows,
                "weights": adapted.adaptation.weights.tolist(),
                "took_part": False,
                "labelled": adapted.labelled,
                "log_likelihoods": adapted.adaptation.log_likelihoods,
                "curve": adapted.curve,
            }
            # the record first: a client in the model without a record counts as one that took part
            write_json(path, record)
            self.model.save(self.folder.model)
        return adapted

    def _adapt(self, client: str, path: Path, notify: Notify) -> Adapted:
        rows = _rows_of(client, self._read(path, notify=notify), path)
        notes = list(rows.notes)
        matrix, labels = rows.matrix, None
        known = rows.labelled
        if rows.unknown_labels and not known.any():
            notes.append(
                f"{path.name}: no label is a class of the training data, such as "
                f"{rows.unknown_labels[0]!r}, so the client learned without labels."
            )
        if rows.labels is not None and known.any():
            if not known.all():
                notes.append(
                    f"{path.name}: left out {counted(int((~known).sum()), 'row')} without a label that "
                    "is in the training data."
                )
            matrix, labels = matrix[known], self._labels_as_given(rows.labels[known])
        notify("learning the client's weights")
        curve = [] if labels is None else self._adaptation_curve(matrix, labels)
        adaptation = self.model.adapt(client, matrix, labels)
        notes += [] if adaptation.note is None else [adaptation.note]
        return Adapted(adaptation, len(matrix), labels is not None, curve, notes)

    def _adaptation_curve(
        self, matrix: NDArray[np.float32], labels: NDArray[Any]
    ) -> list[dict[str, float]]:
        """Return the accuracy on every second row, after learning from some of the other rows."""
        if len(matrix) < 10 or self.model.target is not None:
            return []
        x, y = matrix[::2], labels[::2]
        rows, truth = matrix[1::2][:_MOST_TEST_ROWS], labels[1::2][:_MOST_TEST_ROWS]
        trial = replace(self.model)
        curve: list[dict[str, float]] = [
            {"rows": 0, "accuracy": float((trial.predict(rows) == truth).mean())}
        ]
        sizes = [size for size in _CURVE_ROWS if size < len(x)]
        for size in [*sizes, min(len(x), 2 * _CURVE_ROWS[-1])]:
            trial.adapt("", x[:size], y[:size])
            accuracy = float((trial.predict(rows, "") == truth).mean())
            curve.append({"rows": size, "accuracy": accuracy})
        return curve

    def report(self, *, pictures: bool = False, notify: Notify = lambda _: None) -> Path:
        """Write ``report.html`` and return its path.

        Args:
            pictures: put thumbnails of the images, or excerpts of the texts, into the page.
            notify: called with a line before each step.
        """
        self.need_labels()
        from fedgmm.runs.reporting import write_run_report

        return write_run_report(self, notify, pictures=pictures)

    @property
    def _embedding(self) -> Embedding | None:
        """Settings of the embedding; ``None`` if the files of the run are tables of numbers."""
        own = read_config(self.folder.config)["embedding"]
        return Embedding(**own) if own else None

    def _read(self, path: Path, *, notify: Notify, **options: Any) -> Rows:
        """Read a later file; images or texts are embedded as in training, if the run embeds."""
        embedding, notes = self._embedding, []
        if embedding is not None:
            (site,) = embedding.sites(
                [path],
                self.folder.vectors / "later",
                lambda site, done, total: notify(f"embedding {site}: {done} of {total}"),
            )
            path, notes = site.path, site.notes
        rows = read_rows(path, self.preprocessing, notify=notify, **options)
        return replace(rows, notes=[*notes, *rows.notes])

    def _labels_as_given(self, labels: NDArray[Any]) -> NDArray[Any]:
        """Return the classes of class indices, or numbers as they are."""
        return labels if self.model.target is not None else np.asarray(self.model.classes)[labels]

    # ------------------------------------------------------------------ checks and names

    def class_named(self, text: str) -> Any:
        """Return the class that a text stands for.

        Raises:
            ValueError: no class has this name.
        """
        if self.model.target is not None:
            raise RunError("The model predicts numbers, so it has no classes to choose.")
        codes, unknown = self.preprocessing.labels.encode([text])
        if unknown:
            known = ", ".join(map(str, self.model.classes.tolist()[:20]))
            raise ValueError(f"{text!r} is not a class; the classes are {known}.")
        return self.model.classes.tolist()[codes[0]]

    def need_labels(self) -> None:
        """Raise :class:`RunError` if the run was trained without labels."""
        if self.model.algorithm == DENSITY:
            raise RunError(
                f"{self.folder.home} was trained without labels, so it cannot predict them; use fedgmm "
                "detect."
            )

    def client_named(self, client: str) -> str:
        """Return the full name of a client; ``oslo`` also finds ``site_oslo`` if no other ends so.

        Raises:
            ValueError: no client or several clients have the name.
        """
        if client in self.model.names:
            return client
        names = [str(name) for name in self.model.names]
        ends = [name for name in names if name.endswith((f"_{client}", f"-{client}"))]
        if client and len(ends) == 1:
            return ends[0]
        close = difflib.get_close_matches(client, names, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {first_few(names, 8)}."
        raise ValueError(
            f"Client {client!r} is not known; {hint} A new client joins with fedgmm adapt."
        )

    def _unused_name(self, path: Path, what: str) -> list[str]:
        """Return a note if the name of a file is that of a client, which was not asked for."""
        name = client_name(path)
        return [f"{what} {name} add --client {name}."] if name in self.model.names else []

    def _full_names(self, clients: list[str], path: Path) -> list[str]:
        if "" in clients:
            raise TableError(
                path,
                f"row {clients.index('') + 1} below the header has no client: the column "
                f"{self.preprocessing.client_column!r} is empty there.",
            )
        full = {name: self.client_named(name) for name in dict.fromkeys(clients)}
        return [full[name] for name in clients]


def open_run(home: str | Path) -> FederatedRun:
    """Open a finished run.

    Raises:
        RunError: there is no run, or it is not finished.
    """
    folder = RunFolder(Path(home))
    folder.need_finished()
    record = read_json(folder.preprocessing)
    try:
        preprocessing = Preprocessing.from_record(record)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{folder.preprocessing} is damaged: {error}.") from None
    model = load(folder.model)
    if model.input_shape != (len(preprocessing.feature_names),):
        raise RunError(f"{folder.preprocessing} does not fit the model in {folder.model}.")
    return FederatedRun(folder, model, preprocessing)


def has_common_model(model: FederatedModel) -> bool:
    """Whether the model can predict rows that belong to no known client."""
    return model.prediction.weights is not None or model.prediction.default_learner is not None


def _rows_of(client: str, rows: Rows, path: Path) -> Rows:
    """Return the rows of one client if the file names several."""
    if rows.clients is None or len(set(rows.clients)) == 1:
        return rows
    own = np.array([name == client for name in rows.clients])
    if not own.any():
        raise TableError(path, f"it has rows of several clients, but none of {client!r}.")
    labels = None if rows.labels is None else rows.labels[own]
    return replace(rows, matrix=rows.matrix[own], labels=labels, clients=[client] * int(own.sum()))
