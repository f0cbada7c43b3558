"""A finished run: evaluate, predict, adapt, detect, report."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.core.checks import check_choice
from fedgmm.data.tables.files import Notify, TableError, client_name, find_tables
from fedgmm.data.tables.labels import UNKNOWN
from fedgmm.data.tables.loading import Rows, read_rows
from fedgmm.data.tables.preprocessing import Preprocessing
from fedgmm.methods.base import DENSITY
from fedgmm.model.adaptation import Adaptation
from fedgmm.model.metrics import Evaluation, evaluate
from fedgmm.model.model import FederatedModel
from fedgmm.model.novelty import SCORES, NoveltyResult, Score
from fedgmm.model.saving import load
from fedgmm.runs.config import RunConfig, config_from, read_config
from fedgmm.runs.folder import (
    RunError,
    RunFolder,
    check_files_unchanged,
    read_json,
    write_json,
)
from fedgmm.wording import counted

if TYPE_CHECKING:
    from fedgmm.data.dataset import FederatedDataset

_CURVE = (5, 10, 20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True)
class Predictions:
    """Predictions for the rows of a file.

    Attributes:
        labels: the most likely class, ``(n,)``.
        probabilities: of every class, ``(n, K)``.
        classes: ``(K,)``.
        log_density: ``log P(x)``, ``(n,)``; ``None`` without Gaussians.
        notes: what is worth knowing.
    """

    labels: NDArray[Any]
    probabilities: NDArray[np.float64]
    classes: NDArray[Any]
    log_density: NDArray[np.float64] | None
    notes: list[str]

    def columns(self) -> dict[str, NDArray[Any]]:
        """What is written to a file, one column after the other."""
        probability = self.probabilities.max(1)
        columns: dict[str, NDArray[Any]] = {
            "row": np.arange(1, len(self.labels) + 1),
            "prediction": self.labels,
            "probability": probability,
        }
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
        score: which score it is.
        batch_p_value: how strange the rows are as a whole, as a client of their own; ``None`` where
            there are too few.
        notes: what is worth knowing.
    """

    result: NoveltyResult
    score: str
    batch_p_value: float | None
    notes: list[str]

    def columns(self) -> dict[str, NDArray[Any]]:
        """What is written to a file, one column after the other."""
        return {
            "row": np.arange(1, len(self.result.scores) + 1),
            "score": self.result.scores,
            "p_value": self.result.p_values,
            "novel": self.result.novel,
        }


@dataclass(frozen=True)
class Adapted:
    """A client that joined a finished run.

    Attributes:
        adaptation: its weights and how they were found.
        rows: how many rows were used.
        labelled: whether their labels were.
        curve: accuracy on rows that were held out, for growing numbers of rows that were used.
        notes: what is worth knowing.
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
        folder: where everything is.
        model: the trained model, with clients that joined later.
        preprocessing: what turns later files into what the model expects.
        dataset: the rows of the training, if they are in memory.
    """

    folder: RunFolder
    model: FederatedModel
    preprocessing: Preprocessing
    dataset: FederatedDataset | None = None

    @property
    def config(self) -> RunConfig:
        """What the run was asked for."""
        return config_from(read_config(self.folder.config))

    @property
    def metrics(self) -> dict[str, Any]:
        """``metrics.json``."""
        return dict(read_json(self.folder.metrics))

    def data(self, notify: Notify = lambda _: None) -> FederatedDataset:
        """The rows of the training; their files are read again if they are not in memory."""
        if self.dataset is None:
            from fedgmm.data.tables.loading import read_tables

            check_files_unchanged(self.folder)
            config = self.config
            tables = read_tables(config.files, config.table, notify)
            self.dataset = tables.load(self.preprocessing, notify)
            self.model.dataset = self.dataset
        return self.dataset

    # ------------------------------------------------------------------ what a model is for

    def evaluate(
        self,
        files: Sequence[str | Path] = (),
        *,
        split: str = "test",
        notify: Notify = lambda _: None,
    ) -> Evaluation:
        """Accuracy, log-loss and calibration of every client.

        Args:
            files: labelled files of known clients; none means the training's own files.
            split: of the training's own rows: ``"train"``, ``"validation"`` or ``"test"``.
            notify: called with a line before each step.
        """
        self.need_labels()
        if not files:
            return self.model.evaluate(split, self.data(notify))
        codes, log_proba, labels = [], [], []
        names: list[str] = []
        for path in find_tables(files):
            rows = read_rows(path, self.preprocessing, label_needed=True, notify=notify)
            assert rows.labels is not None
            kept = self._labelled(rows, path)
            owners = self._full_names(self._owners(rows, path), path)
            found = self.model.predict_log_proba(
                rows.matrix[kept], np.array(owners, dtype=object)[kept]
            )
            place = {name: names.index(name) for name in names}
            for name in owners:
                if name not in place:
                    place[name] = len(names)
                    names.append(name)
            codes.append(np.array([place[name] for name in owners], dtype=np.int64)[kept])
            log_proba.append(found)
            labels.append(rows.labels[kept])
        return evaluate(
            np.concatenate(log_proba), np.concatenate(labels), np.concatenate(codes), tuple(names)
        )

    def predict(
        self, file: str | Path, client: str | None = None, *, notify: Notify = lambda _: None
    ) -> Predictions:
        """Classes and their probabilities for the rows of a file.

        Args:
            file: a table with the columns of the training; labels are not needed.
            client: whose weights to use; ``None`` takes the client column of the file, if it has
                one, or else the federation's weights.
            notify: called with a line before each step.
        """
        self.need_labels()
        rows = read_rows(Path(file), self.preprocessing, notify=notify)
        owner: Any = None
        if client is not None:
            owner = self.client_named(client)
        elif rows.clients is not None:
            owner = np.array(self._full_names(rows.clients, Path(file)), dtype=object)
        elif not has_common_model(self.model):
            raise ValueError(
                f"{self.model.algorithm} has no common model; say whose to use: --client NAME."
            )
        notes = list(rows.notes)
        namesake = client_name(Path(file))
        if owner is None and namesake in self.model.names:
            notes.append(
                f"The federation's weights were used; for those of {namesake} say --client {namesake}."
            )
        notify("predicting")
        found = self.model.log_predictions(rows.matrix, owner)
        probabilities, classes = np.exp(found.log_proba), np.asarray(self.model.classes)
        labels = classes[probabilities.argmax(1)]
        return Predictions(labels, probabilities, classes, found.log_density, notes)

    def detect(
        self,
        file: str | Path,
        *,
        false_alarm_rate: float = 0.05,
        score: Score = "x",
        notify: Notify = lambda _: None,
    ) -> Detection:
        """Which rows of a file are unlike anything that the federation has seen.

        Args:
            file: a table with the columns of the training.
            false_alarm_rate: share of ordinary rows that may be flagged.
            score: ``"x"`` looks at the inputs, ``"y"`` at the labels given the inputs, ``"joint"`` at
                both, ``"confidence"`` at the largest class probability.
            notify: called with a line before each step.
        """
        check_choice("score", score, SCORES)
        if not has_common_model(self.model):
            raise RunError(
                f"{self.model.algorithm} has no common model to compare rows with; train with fedgmm."
            )
        if score != "x" and self.model.algorithm == DENSITY:
            raise RunError(
                f"{self.folder.home} was trained without labels, so --score {score} has nothing to see; "
                "say --score x."
            )
        if score in ("x", "joint") and self.model.prediction.gaussians is None:
            raise RunError(
                f"{self.model.algorithm} has no density of the inputs; say --score confidence, or train "
                "with fedgmm."
            )
        if not self.model.calibration:
            raise RunError(
                "The run has no held-out rows to calibrate on; train again with more rows a client."
            )
        needs_labels = score in ("y", "joint")
        path = Path(file)
        rows = read_rows(path, self.preprocessing, label_needed=needs_labels, notify=notify)
        labels = None
        if needs_labels:
            assert rows.labels is not None
            missing = np.flatnonzero(rows.labels == UNKNOWN)
            if len(missing):
                raise TableError(
                    path, f"row {missing[0] + 1} has no label or one that training never saw."
                )
            labels = np.asarray(self.model.classes)[rows.labels]
        notify("looking for novel rows")
        result = self.model.novelty(
            rows.matrix,
            labels,
            score=score,
            false_alarm_rate=false_alarm_rate,
            batch="clients" in self.model.calibration and len(rows.matrix) >= 2,
        )
        return Detection(result, score, result.batch_p_value, rows.notes)

    def need_labels(self) -> None:
        """Raise :class:`RunError` for a run that was trained without labels."""
        if self.model.algorithm == DENSITY:
            raise RunError(
                f"{self.folder.home} was trained without labels, so it predicts none; use fedgmm detect."
            )

    def adapt(
        self,
        client: str,
        file: str | Path,
        *,
        replace_known: bool = False,
        notify: Notify = lambda _: None,
    ) -> Adapted:
        """Bring in a new client by learning only its weights; nobody else changes.

        Args:
            client: its name.
            file: its rows, labelled or not.
            replace_known: give new weights to a client that took part in the training.
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
            self.model = _loaded(self.folder)  # as another process may have left it
            record = self.folder.client(client)
            if client in self.model.names and not replace_known and _took_part(record):
                raise RunError(
                    f"Client {client!r} took part in the training; say --replace to learn its weights "
                    "anew."
                )
            adapted = self._adapt(client, Path(file), notify)
            # first the record: a client without one is taken for one that took part
            write_json(
                record,
                {
                    "client": client,
                    "rows": adapted.rows,
                    "weights": adapted.adaptation.weights.tolist(),
                    "took_part": False,
                    "labelled": adapted.labelled,
                    "log_likelihoods": adapted.adaptation.log_likelihoods,
                    "curve": adapted.curve,
                },
            )
            self.model.save(self.folder.model)
        return adapted

    def _adapt(self, client: str, path: Path, notify: Notify) -> Adapted:
        rows = _rows_of(client, read_rows(path, self.preprocessing, notify=notify), path)
        notes = list(rows.notes)
        labelled = rows.labels is not None and bool((rows.labels != UNKNOWN).any())
        matrix, labels = rows.matrix, None
        if labelled:
            assert rows.labels is not None
            kept = rows.labels != UNKNOWN
            if not kept.all():
                notes.append(
                    f"{path.name}: left out {counted(int((~kept).sum()), 'row')} without a label that "
                    "training knows."
                )
            matrix, labels = matrix[kept], np.asarray(self.model.classes)[rows.labels[kept]]
        notify("learning the client's weights")
        curve = self._curve(matrix, labels) if labels is not None else []
        adaptation = self.model.adapt(client, matrix, labels)
        return Adapted(adaptation, len(matrix), labelled, curve, notes)

    def _curve(self, matrix: NDArray[np.float32], labels: NDArray[Any]) -> list[dict[str, float]]:
        """Accuracy on every other row, from growing numbers of the rows between."""
        learn, held = slice(0, None, 2), slice(1, None, 2)
        x, y = matrix[learn], labels[learn]
        if len(matrix) < 10:
            return []
        trial = replace(self.model)
        curve = []
        sizes = [size for size in _CURVE if size < len(x)] + [min(len(x), 2 * _CURVE[-1])]
        truth, rows = labels[held][:5000], matrix[held][:5000]
        before = float((self.model.predict(rows) == truth).mean())
        curve.append({"rows": 0, "accuracy": before})
        for size in sizes:
            trial.adapt("", x[:size], y[:size])
            accuracy = float((trial.predict(rows, "") == truth).mean())
            curve.append({"rows": size, "accuracy": accuracy})
        return curve

    def report(self, *, notify: Notify = lambda _: None) -> Path:
        """Write ``report.html`` and return where it is."""
        self.need_labels()
        from fedgmm.runs.reporting import write_run_report

        return write_run_report(self, notify)

    # ------------------------------------------------------------------ helpers

    def client_named(self, client: str) -> str:
        """The full name of a client: ``oslo`` also finds ``site_oslo``, if no other ends like it.

        Raises:
            ValueError: nobody is called so, or several are.
        """
        if client in self.model.names:
            return client
        names = [str(name) for name in self.model.names]
        ends = [name for name in names if name.endswith((f"_{client}", f"-{client}"))]
        if client and len(ends) == 1:
            return ends[0]
        close = difflib.get_close_matches(client, names, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {_some(names)}."
        raise ValueError(
            f"Client {client!r} is not known; {hint} A new one joins with fedgmm adapt."
        )

    def _full_names(self, clients: list[str], path: Path) -> list[str]:
        if "" in clients:
            raise TableError(
                path,
                f"row {clients.index('') + 1} below the header has no client: the column "
                f"{self.preprocessing.client_column!r} is empty there.",
            )
        full = {name: self.client_named(name) for name in dict.fromkeys(clients)}
        return [full[name] for name in clients]

    def _owners(self, rows: Rows, path: Path) -> list[str]:
        return rows.clients if rows.clients is not None else [client_name(path)] * len(rows.matrix)

    def _labelled(self, rows: Rows, path: Path) -> NDArray[np.bool_]:
        assert rows.labels is not None
        kept = np.asarray(rows.labels != UNKNOWN)
        if rows.unknown_labels:
            raise TableError(
                path, f"the label {rows.unknown_labels[0]!r} is no class that training knows."
            )
        if not kept.any():
            raise TableError(path, "it has no rows with a label.")
        return kept


def open_run(home: str | Path) -> FederatedRun:
    """A finished run.

    Raises:
        RunError: no run, or one that is not finished.
    """
    folder = RunFolder(Path(home))
    folder.need_finished()
    try:
        preprocessing = Preprocessing.from_record(read_json(folder.preprocessing))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{folder.preprocessing} is damaged: {error}.") from None
    model = _loaded(folder)
    if model.input_shape != (len(preprocessing.feature_names),):
        raise RunError(f"{folder.preprocessing} does not fit the model in {folder.model}.")
    return FederatedRun(folder, model, preprocessing)


def has_common_model(model: FederatedModel) -> bool:
    """Whether there is an answer for rows of nobody in particular."""
    return model.prediction.weights is not None or model.prediction.default_learner is not None


def _rows_of(client: str, rows: Rows, path: Path) -> Rows:
    """The rows of one client, where the file names several."""
    if rows.clients is None or len(set(rows.clients)) == 1:
        return rows
    own = np.array([name == client for name in rows.clients])
    if not own.any():
        raise TableError(path, f"it has rows of several clients, but none of {client!r}.")
    labels = None if rows.labels is None else rows.labels[own]
    return replace(rows, matrix=rows.matrix[own], labels=labels, clients=[client] * int(own.sum()))


def _loaded(folder: RunFolder) -> FederatedModel:
    return load(folder.model)


def _took_part(record: Path) -> bool:
    return not record.is_file() or bool(read_json(record).get("took_part", True))


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
