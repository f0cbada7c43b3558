"""``fit`` and ``resume``: files in, a run folder out."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgmm.data.tables.files import Notify, find_tables
from fedgmm.data.tables.loading import Tables, agreement, read_tables
from fedgmm.data.tables.preprocessing import TableOptions
from fedgmm.files import write_atomically
from fedgmm.methods.base import DENSITY
from fedgmm.nets.devices import environment, resolve_device
from fedgmm.runs.config import RunConfig, config_from, read_config
from fedgmm.runs.folder import (
    RunError,
    RunFolder,
    as_json,
    check_files_unchanged,
    fingerprints,
    history_line,
    read_history,
    read_json,
    write_history,
    write_json,
)
from fedgmm.runs.run import FederatedRun, has_common_model, open_run
from fedgmm.training.checkpoint import Checkpoint, read_checkpoint
from fedgmm.training.local import INTERRUPTED, DivergenceWarning, OnTrainingRound, train
from fedgmm.training.selection import select_for_small_data, select_mixture, suitable_covariance
from fedgmm.wording import counted

if TYPE_CHECKING:
    from fedgmm.data.dataset import FederatedDataset
    from fedgmm.model.metrics import Evaluation
    from fedgmm.model.model import FederatedModel

_LEFTOVERS = (".lock", "config.toml.part")
"""What an attempt that ended before its first step may leave behind."""

_ALWAYS_ALLOWED = 10  # parts of a mixture, however few rows there are

OnStart = Callable[[int], None]
"""Called with the number of rounds before training begins."""


def fit(
    files: str | Path | Sequence[str | Path],
    label: str | None,
    out: str | Path,
    *,
    client_column: str | None = None,
    categorical: Iterable[str] = (),
    ignore: Iterable[str] = (),
    checkpoint_every: int = 5,
    overwrite: bool = False,
    notify: Notify = lambda _: None,
    on_round: Iterable[OnTrainingRound] = (),
    **training: Any,
) -> FederatedRun:
    """Train a model on the files of many clients and keep everything about it in a folder.

    Args:
        files: one file a client (CSV, TSV, Parquet, npz), folders or patterns.
        label: the column to predict; ``None`` with ``algorithm="gmm"``.
        out: the run folder.
        client_column: the column that names the client, where several are in one file.
        categorical: number columns whose values are names of groups.
        ignore: columns to leave out.
        checkpoint_every: rounds between two checkpoints.
        overwrite: replace a run that is already there.
        notify: called with a line before each step.
        on_round: called after every round with its entry of the history.
        **training: fields of :class:`fedgmm.TrainingOptions`; ``components`` and ``learners`` may be
            ``"auto"``, and small data choose them where neither is given.
    """
    if isinstance(files, (str, Path)):
        files = [files]
    # NumPy's numbers are not written to TOML
    training = {k: v.item() if isinstance(v, np.generic) else v for k, v in training.items()}
    table = TableOptions(
        label,
        client_column,
        tuple(categorical),
        tuple(ignore),
        seed=training.get("seed", 0),
    )
    config = RunConfig(tuple(map(str, files)), table, training, checkpoint_every)
    return fit_config(config, out, overwrite=overwrite, notify=notify, on_round=on_round)


def fit_config(
    config: RunConfig,
    out: str | Path,
    *,
    overwrite: bool = False,
    notify: Notify = lambda _: None,
    on_start: OnStart = lambda _: None,
    on_round: Iterable[OnTrainingRound] = (),
) -> FederatedRun:
    """The same from a configuration."""
    folder = RunFolder(Path(out))
    resolve_device(config.options().device)
    paths = [path.resolve() for path in find_tables(config.files)]
    for path in paths:
        _check_name(path)
    config = replace(config, files=tuple(map(str, paths))).complete()
    with folder.lock():
        tables = None
        if folder.has_progress:
            if not overwrite:
                raise RunError(
                    f"{folder.home} already holds a run; go on with fedgmm resume, choose another "
                    "folder, or say --overwrite."
                )
            # files that cannot be used must not cost the run that is there
            tables = read_tables(config.files, config.table, notify)
            agreement(tables)
        elif not folder.is_run and any(
            child.name not in _LEFTOVERS for child in folder.home.iterdir()
        ):
            raise RunError(f"{folder.home} is not empty and holds no run; choose another folder.")
        _clear(folder)
        return _run(folder, config, notify, on_start, tuple(on_round), tables)


def resume(
    home: str | Path,
    *,
    rounds: int | None = None,
    notify: Notify = lambda _: None,
    on_start: OnStart = lambda _: None,
    on_round: Iterable[OnTrainingRound] = (),
) -> FederatedRun:
    """Go on after a crash or Ctrl-C; the end is the same as without it.

    Args:
        home: the run folder.
        rounds: train to this round instead, also where the run had come to its end.
        notify: called with a line before each step.
        on_start: called with the number of rounds before training begins.
        on_round: called after every round with its entry of the history.

    Raises:
        RunError: no run, or one whose files changed.
    """
    folder = RunFolder(Path(home))
    folder.need_run()
    with folder.lock():
        config = config_from(read_config(folder.config))
        if rounds is not None and rounds != config.options().rounds:
            if rounds < config.options().rounds:
                raise ValueError(
                    f"The run was to have {counted(config.options().rounds, 'round')}; --rounds "
                    "can only add some."
                )
            config = config.with_training(rounds=rounds)
        elif folder.is_finished:
            return open_run(home)
        check_files_unchanged(folder)
        if folder.checkpoint.is_file():
            read_checkpoint(folder.checkpoint)  # a damaged one must not cost a model that is there
        return _run(folder, config, notify, on_start, tuple(on_round))


def _check_name(path: Path) -> None:
    """Names of clients are written to JSON and shown, so they must be text."""
    try:
        path.name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"The name of the file {str(path)!r} is not UTF-8; rename it.") from None


def _clear(folder: RunFolder) -> None:
    """Take away what an earlier run wrote: first the sign that it was finished, last that it was."""
    folder.metrics.unlink(missing_ok=True)
    for path in (folder.checkpoint.parent, folder.model, folder.clients):
        shutil.rmtree(path, ignore_errors=True)
    for path in (
        folder.environment,
        folder.selection,
        folder.history,
        folder.comparison,
        folder.report,
        folder.config,
    ):
        path.unlink(missing_ok=True)


def _run(
    folder: RunFolder,
    config: RunConfig,
    notify: Notify,
    on_start: OnStart,
    on_round: tuple[OnTrainingRound, ...],
    tables: Tables | None = None,
) -> FederatedRun:
    """Everything from reading to the last file, wherever an earlier attempt ended."""
    started = time.perf_counter()
    folder.metrics.unlink(missing_ok=True)
    folder.report.unlink(missing_ok=True)
    write_atomically(folder.config, config.toml().encode())
    tables = tables or read_tables(config.files, config.table, notify)
    preprocessing = agreement(tables)
    write_json(folder.environment, {**environment(), "files": fingerprints(tables.paths)})
    dataset = tables.load(preprocessing, notify)
    write_json(folder.preprocessing, preprocessing.record())
    seconds_reading = time.perf_counter() - started
    config, selection = _choose(config, dataset, notify)
    seconds_choosing = time.perf_counter() - started - seconds_reading
    _check_size(config, dataset)
    if selection is not None:  # a run that is resumed does not choose again
        write_json(folder.selection, selection)
    write_atomically(folder.config, config.toml().encode())
    options = config.options()
    history = _HistoryFile(folder.history)
    on_start(options.rounds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)  # told in the notes
        model = train(
            dataset,
            options=options,
            checkpoint=Checkpoint(folder.checkpoint, config.checkpoint_every),
            watch_accuracy=options.algorithm != DENSITY,
            on_round=[history.append, *on_round],
        )
    history.replace(model.history)
    if model.stopped == INTERRUPTED:
        raise KeyboardInterrupt
    notify("calibrating and evaluating")
    notes = [
        *tables.notes,
        *([f"Training stopped early: {model.stopped}"] if model.stopped else []),
        *_forget_joined(folder),
    ]
    facts = {
        "selection": read_json(folder.selection) if folder.selection.is_file() else None,
        "notes": notes,
        "seconds": {
            "reading": seconds_reading,
            "choosing": seconds_choosing,
            "training": model.history[-1]["seconds"] if model.history else 0.0,
        },
    }
    finish_run(folder, model, dataset, tables, facts)
    return FederatedRun(folder, model, preprocessing, dataset)


def _choose(
    config: RunConfig, dataset: FederatedDataset, notify: Notify
) -> tuple[RunConfig, dict[str, Any] | None]:
    """Fill in what was left open, from training and validation rows."""
    choices = config.open_choices()
    if "covariance_type" in choices:
        kind = suitable_covariance(
            len(dataset.train), dataset.input_shape[0], config.options().components
        )
        config = config.with_training(covariance_type=kind)
    found = None
    if config.sizes_are_open and config.options().algorithm != DENSITY:
        found = select_for_small_data(dataset, config.options(), notify)
    elif {"components", "learners"} & set(choices):
        found = select_mixture(
            dataset,
            options=config.options(),
            components=None if "components" in choices else config.options().components,
            learners=None if "learners" in choices else config.options().learners,
            notify=notify,
        )
    if found is not None:
        config = config.with_training(components=found.components, learners=found.learners)
    # sizes that were left to the defaults are written out, too
    options = config.options()
    config = config.with_training(components=options.components, learners=options.learners)
    return config, None if found is None else found.record()


def _check_size(config: RunConfig, dataset: FederatedDataset) -> None:
    """A large mixture with more parts than rows would learn nothing, and take forever."""
    for name in ("components", "learners"):
        wanted = getattr(config.options(), name)
        if wanted > max(len(dataset.train), _ALWAYS_ALLOWED):
            raise ValueError(
                f"{name}={wanted} is more than the "
                f"{counted(len(dataset.train), 'training row')}; ask for fewer."
            )


class _HistoryFile:
    """One line a round; a resumed run writes over the rounds that it repeats."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first = True

    def append(self, entry: dict[str, float]) -> None:
        if self._first:
            self._first = False
            before = read_history(self._path)
            self.replace([one for one in before if one["round"] < entry["round"]])
        with self._path.open("a", encoding="utf-8") as file:
            file.write(history_line(entry))

    def replace(self, history: Iterable[dict[str, float]]) -> None:
        write_history(self._path, history)


def _forget_joined(folder: RunFolder) -> list[str]:
    """Take away the weights of clients that joined an earlier model; what is worth knowing of it."""
    joined = []
    for path in sorted(folder.client("").parent.glob("*.json")):
        try:
            record = read_json(path)
        except RunError:  # is written anew
            continue
        if not record.get("took_part", True):
            joined.append(str(record.get("client")))
            path.unlink()
    if not joined:
        return []
    return [f"The model is new, so these must join again with fedgmm adapt: {', '.join(joined)}."]


def finish_run(
    folder: RunFolder,
    model: FederatedModel,
    dataset: FederatedDataset,
    tables: Tables,
    facts: dict[str, Any],
) -> None:
    """Write model, clients and, as the sign that all is there, the metrics."""
    if len(dataset.validation) and has_common_model(model):
        model.calibrate()
    # times are in history.jsonl; without them the same run leaves the same bytes
    timeless = [{k: v for k, v in entry.items() if k != "seconds"} for entry in model.history]
    replace(model, history=timeless).save(folder.model)
    named = [one for one in ("train", "validation", "test") if len(dataset.split(one))]
    labelled = model.algorithm != DENSITY
    splits = {split: model.evaluate(split) for split in named} if labelled else {}
    weights = model.client_weights if model.prediction.client_weights is not None else None
    folder.client("").parent.mkdir(parents=True, exist_ok=True)
    for code, name in enumerate(dataset.names):
        record = {
            "client": name,
            "rows": tables.summaries[str(name)].rows,
            "weights": None if weights is None else weights[code].tolist(),
            "took_part": True,
        }
        # not flushed one by one: the model holds the same numbers, and there may be thousands
        folder.client(str(name)).write_text(as_json(record), encoding="utf-8")
    metrics = {
        "algorithm": model.algorithm,
        "rounds": len(model.history),
        "stopped": model.stopped,
        **{split: own.summary() for split, own in splits.items()},
        "clients": (
            client_metrics(splits["test"] if "test" in splits else splits["train"])
            if labelled
            else client_densities(model, dataset, "test" if "test" in named else "train")
        ),
        **facts,
    }
    write_json(folder.metrics, metrics)


def client_densities(
    model: FederatedModel, dataset: FederatedDataset, split: str
) -> dict[str, dict[str, float]]:
    """Each client's mean log-density, for JSON; what is known where there are no labels."""
    rows = dataset.split(split)
    codes = rows.codes.cpu().numpy()
    owners = np.array(rows.names, dtype=object)[codes]
    density = model.score_samples(rows.inputs.cpu().numpy(), owners)
    return {
        str(name): {
            "rows": int((codes == code).sum()),
            "log_density": float(density[codes == code].mean()),
        }
        for code, name in enumerate(rows.names)
        if (codes == code).any()
    }


def client_metrics(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Each client's figures, for JSON."""
    return {
        str(name): {
            "rows": int(evaluation.rows[i]),
            "accuracy": float(evaluation.accuracy[i]),
            "log_loss": float(evaluation.log_loss[i]),
            "calibration_error": float(evaluation.calibration_error[i]),
        }
        for i, name in enumerate(evaluation.clients)
    }
