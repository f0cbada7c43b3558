"""``fit`` and ``resume``: train on files and write a run folder."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgmm.data.tables.agreement import declared
from fedgmm.data.tables.errors import listed, quoted
from fedgmm.data.tables.files import Notify, find_tables
from fedgmm.data.tables.loading import Tables, agreement, on_disk_if_large, read_tables
from fedgmm.data.tables.preprocessing import Preprocessing, TableOptions
from fedgmm.files import write_atomically
from fedgmm.methods.base import DENSITY
from fedgmm.nets.devices import environment, resolve_device
from fedgmm.privacy.settings import Privacy, PrivacyError
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
    write_metrics,
)
from fedgmm.runs.run import FederatedRun, has_common_model, open_run
from fedgmm.training.checkpoint import Checkpoint, read_checkpoint
from fedgmm.training.in_process import (
    INTERRUPTED,
    DivergenceWarning,
    OnTrainingRound,
    several_ranks,
    train,
)
from fedgmm.training.selection import choose_sizes, local_score, noise_in
from fedgmm.wording import counted

if TYPE_CHECKING:
    from fedgmm.data.dataset import FederatedDataset
    from fedgmm.model.model import FederatedModel

_VECTOR_COMPONENTS = 48  # principal components of vectors that the Gaussians see by default

NOT_COVERED = "Weights of clients, metrics and this report are not covered; keep them at home."

OnStart = Callable[[int], None]
"""Called with the number of rounds before training begins."""

_ROWS_AT_ONCE = 250_000


def fit(
    files: str | Path | Sequence[str | Path],
    label: str | None,
    out: str | Path,
    *,
    client_column: str | None = None,
    categorical: Iterable[str] = (),
    ignore: Iterable[str] = (),
    no_header: bool = False,
    names: Iterable[str] = (),
    missing_values: Iterable[str | float] = (),
    date_format: str | None = None,
    id: Iterable[str] = (),
    task: str = "auto",
    memory: str | None = None,
    checkpoint_every: int = 5,
    overwrite: bool = False,
    privacy: Privacy | None = None,
    notify: Notify = lambda _: None,
    on_round: Iterable[OnTrainingRound] = (),
    **training: Any,
) -> FederatedRun:
    """Train a model on the files of many clients and write everything about it into a folder.

    Args:
        files: one file per client (CSV, TSV, Parquet, npz), folders or patterns.
        label: the column to predict; ``None`` with ``algorithm="gmm"``.
        out: the run folder.
        client_column: the column that names the client, if files hold several clients.
        categorical: number columns whose values are names of groups.
        ignore: columns to leave out.
        no_header: the first line of the files holds values; columns are called ``column_1`` and so on.
        names: names of the columns of files without a header, in their order.
        missing_values: further texts or numbers that mean a missing value, such as -9.
        date_format: how dates are written, such as ``%d.%m.%Y``.
        id: columns that identify rows: never an input, but in the output of predictions.
        task: ``"classification"``, ``"regression"``, or ``"auto"``: classification, with an error if the
            label looks like a measurement.
        memory: tables that need more memory, such as ``"2GB"``, are read in blocks from scratch files
            beside the run folder; ``None`` means half of the memory that is available.
        checkpoint_every: rounds between two checkpoints.
        overwrite: replace a run that is already in the folder.
        privacy: train with differential privacy, see :func:`fedgmm.train`. Bounds and categories that it
            declares replace standardisation by the rows, and must include the classes of the label.
        notify: called with a line before each step.
        on_round: called after every round with its entry of the history.
        **training: fields of :class:`fedgmm.TrainingOptions`. ``components`` and ``learners`` may be
            ``"auto"``; if neither is given, small data choose both.
    """
    if isinstance(files, (str, Path)):
        files = [files]
    # TOML cannot hold NumPy's numbers
    training = {k: v.item() if isinstance(v, np.generic) else v for k, v in training.items()}
    table = TableOptions(
        label,
        client_column,
        tuple(categorical),
        tuple(ignore),
        no_header=no_header,
        names=tuple(names),
        missing_values=tuple(map(str, missing_values)),
        date_format=date_format,
        id=tuple(id),
        task=task,
        memory=memory,
        seed=training.get("seed", 0),
    )
    config = RunConfig(tuple(map(str, files)), table, training, checkpoint_every, privacy=privacy)
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
    """Train a model from a configuration, like :func:`fit`."""
    folder = RunFolder(Path(out))

    def work() -> FederatedRun:
        resolve_device(config.options().device)
        chosen = config
        if config.embedding is not None:
            with folder.lock():  # vectors are kept, so an attempt that was interrupted resumes
                chosen = _with_vectors(config, folder, notify)
        paths = [path.resolve() for path in find_tables(chosen.files)]
        for path in paths:
            try:
                path.name.encode()  # the client's name is written to JSON
            except UnicodeEncodeError:
                raise ValueError(
                    f"The name of the file {str(path)!r} is not UTF-8; rename it."
                ) from None
        chosen = replace(chosen, files=tuple(map(str, paths))).complete()
        with folder.lock(), on_disk_if_large(chosen.files, chosen.table, folder.home):
            tables = None
            if folder.has_progress:
                if not overwrite:
                    raise RunError(
                        f"{folder.home} already holds a run; resume it with fedgmm resume, choose another "
                        "folder, or replace it with --overwrite."
                    )
                # read the files first, because the old run must survive if they cannot be used
                tables = read_tables(chosen.files, chosen.table, notify)
                agreement(tables)
            elif not folder.is_run and folder.other_files:
                raise RunError(f"{folder.home} is not empty and not a run; choose another folder.")
            folder.clear()
            return _run(folder, chosen, notify, on_start, on_round, tables)

    return _on_first_rank(out, work)


def _with_vectors(config: RunConfig, folder: RunFolder, notify: Notify) -> RunConfig:
    """Embed the files of a configuration; return it with tables of vectors in their place."""
    assert config.embedding is not None
    found = config.embedding.sites(
        config.files, folder.vectors, lambda site, n, of: notify(f"embedding {site}: {n} of {of}")
    )
    for note in (note for site in found for note in site.notes):
        warnings.warn(note, stacklevel=3)
    return replace(config, files=tuple(str(site.path) for site in found))


def resume(
    home: str | Path,
    *,
    rounds: int | None = None,
    notify: Notify = lambda _: None,
    on_start: OnStart = lambda _: None,
    on_round: Iterable[OnTrainingRound] = (),
) -> FederatedRun:
    """Resume a run after a crash or Ctrl-C; the result is the same as without the interruption.

    Args:
        home: the run folder.
        rounds: a larger number of rounds; a finished run then continues, too.
        notify: called with a line before each step.
        on_start: called with the number of rounds before training begins.
        on_round: called after every round with its entry of the history.

    Raises:
        RunError: there is no run, or its files changed.
    """
    folder = RunFolder(Path(home))

    def work() -> FederatedRun:
        folder.need_run()
        with folder.lock():
            config = config_from(read_config(folder.config))
            planned = config.options().rounds
            if rounds is not None and rounds < planned:
                raise ValueError(
                    f"The run is set to {counted(planned, 'round')}; --rounds can only add rounds."
                )
            if rounds is not None and rounds > planned:
                config = config.with_training(rounds=rounds)
            elif folder.is_finished:
                return open_run(folder.home)
            check_files_unchanged(folder)
            if folder.checkpoint.is_file():
                read_checkpoint(
                    folder.checkpoint
                )  # stop here if it is damaged, and keep the old model
            with on_disk_if_large(config.files, config.table, folder.home):
                return _run(folder, config, notify, on_start, on_round)

    return _on_first_rank(home, work)


def _on_first_rank(home: str | Path, run: Callable[[], FederatedRun]) -> FederatedRun:
    """Call ``run``; of several processes of ``torchrun`` the first one does, and the others help."""
    if not several_ranks():
        return run()
    from fedgmm.training.distributed import lead_or_follow

    return lead_or_follow(run, lambda _: open_run(home))


def _run(
    folder: RunFolder,
    config: RunConfig,
    notify: Notify,
    on_start: OnStart,
    on_round: Iterable[OnTrainingRound],
    tables: Tables | None = None,
) -> FederatedRun:
    """Read, choose, train and write everything, starting wherever an earlier attempt ended."""
    started = time.perf_counter()
    folder.metrics.unlink(missing_ok=True)
    folder.report.unlink(missing_ok=True)
    write_atomically(folder.config, config.toml().encode())
    tables = tables or read_tables(config.files, config.table, notify)
    privacy = config.privacy if config.privacy is not None and config.privacy.is_noised else None
    preprocessing = agreement(tables) if privacy is None else _declared(tables, privacy)
    write_json(folder.environment, {**environment(), "files": fingerprints(tables.paths)})
    persons = None
    if privacy is not None and privacy.unit == "person":
        persons = tables.persons(preprocessing, str(privacy.person))
    dataset = replace(tables.load(preprocessing, notify), persons=persons)
    write_json(folder.preprocessing, preprocessing.record())
    seconds = {"reading": time.perf_counter() - started}

    if "pca" not in config.training:
        usual = usual_pca(len(dataset.vectors), len(dataset.train))
        config = config.with_training(pca=usual)
    options, selection = config.options(), None
    if privacy is None:
        options, selection = choose_sizes(
            options,
            config.open_choices(),
            rows=len(dataset.train),
            columns=dataset.input_shape[0],
            score=local_score(dataset),
            noise=noise_in(dataset),
            sizes_given=not config.sizes_are_open,
            notify=notify,
        )
    if selection is not None:  # a run that is resumed does not choose again
        write_json(folder.selection, selection.record())
    chosen = ("components", "learners", "covariance_type", "ridge", "refit")
    config = config.with_training(**{name: getattr(options, name) for name in chosen})
    write_atomically(folder.config, config.toml().encode())
    seconds["choosing"] = time.perf_counter() - started - seconds["reading"]

    on_start(options.rounds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)  # the notes report it
        model = train(
            dataset,
            options=options,
            checkpoint=Checkpoint(folder.checkpoint, config.checkpoint_every),
            watch_accuracy=options.algorithm != DENSITY and privacy is None,
            # encoded columns lie within [-1, 1]
            privacy=None if privacy is None else replace(privacy, bounds=(-1.0, 1.0)),
            on_round=[_history_writer(folder.history), *on_round],
        )
    write_history(folder.history, model.history)
    if model.stopped == INTERRUPTED:
        raise KeyboardInterrupt
    seconds["training"] = model.history[-1]["seconds"] if model.history else 0.0

    notify("calibrating and evaluating")
    notes = [*([model.impersonal] if model.impersonal else []), *tables.notes]
    if model.stopped:
        notes.append(f"Training stopped early: {model.stopped}")
    if privacy is not None and model.privacy is not None:
        model.privacy |= {"bounds": privacy.record()["bounds"]}
        notes.insert(0, f"Differential privacy: {model.budget}. {NOT_COVERED}")
    joined = _remove_joined_clients(folder)
    if joined:
        notes.append(
            f"The model is new, so these clients must join again with fedgmm adapt: {', '.join(joined)}."
        )
    facts = {
        "selection": read_json(folder.selection) if folder.selection.is_file() else None,
        "notes": notes,
        "seconds": seconds,
    }
    finish_run(folder, model, dataset, tables, facts)
    return FederatedRun(folder, model, preprocessing, dataset)


def _declared(tables: Tables, privacy: Privacy) -> Preprocessing:
    """Return the preprocessing of declared bounds and categories, which no row decides."""
    if privacy.unit == "person" and privacy.person is None:
        raise PrivacyError("unit='person' needs the column of the person (--person-column COLUMN).")
    bounds = privacy.bounds
    if not isinstance(bounds, dict) and isinstance(bounds[0], tuple):
        raise PrivacyError("Name the columns of bounds, such as age = [0, 110], or give one pair.")
    header = list(dict.fromkeys(name for own in tables.files for name in own.file.header))
    found = declared(header, tables.options, bounds, privacy.categories or {})
    ignored = [one.name for one in found.columns if one.role == "ignored"]
    ignored = [name for name in ignored if name != privacy.person]
    if ignored:
        tables.notes.append(
            f"Columns without declared bounds or categories are not used: {listed(ignored)}."
        )
    for column in found.used:
        own = [
            one.columns[column.name]
            for one in tables.summaries.values()
            if column.name in one.columns
        ]
        texts = [one.categories or {} for one in own if one.kind == "text"]
        others = sum(n for one in texts for text, n in one.items() if text not in column.categories)
        if column.role == "category" and others:
            tables.notes.append(
                f"Column {quoted(column.name)}: {counted(others, 'value is', 'values are')} not among its "
                "declared categories and count as none of them."
            )
    return found


def usual_pca(vectors: int, rows: int) -> int | None:
    """Return the default of ``pca`` for so many columns of vectors and training rows.

    A Gaussian of hundreds of columns would have too many numbers.
    """
    components = min(_VECTOR_COMPONENTS, rows)
    return components if components < vectors else None


def _history_writer(path: Path) -> OnTrainingRound:
    """Return a callback that appends rounds to a file; a resumed run replaces rounds that it repeats."""
    first = True

    def write(entry: dict[str, float]) -> None:
        nonlocal first
        if first:
            first = False
            write_history(path, [e for e in read_history(path) if e["round"] < entry["round"]])
        with path.open("a", encoding="utf-8") as file:
            file.write(history_line(entry))

    return write


def _remove_joined_clients(folder: RunFolder) -> list[str]:
    """Delete the weights of clients that joined an earlier model, and return their names."""
    joined = []
    for path in sorted(folder.weights.glob("*.json")):
        try:
            record = read_json(path)
        except RunError:  # finish_run writes it again
            continue
        if not record.get("took_part", True):
            joined.append(str(record.get("client")))
            path.unlink()
    return joined


def finish_run(
    folder: RunFolder,
    model: FederatedModel,
    dataset: FederatedDataset,
    tables: Tables,
    facts: dict[str, Any],
) -> None:
    """Calibrate, evaluate and write the model, the clients' weights and, last, the metrics."""
    # held-out scores in the file of a private model would be rows without noise
    calibrates = has_common_model(model) and model.privacy is None
    if len(dataset.validation) and calibrates and not model.calibration:
        model.calibrate()
    # history.jsonl has the times; without them the same run writes the same bytes
    timeless = [{k: v for k, v in entry.items() if k != "seconds"} for entry in model.history]
    replace(model, history=timeless).save(folder.model)
    weights = model.client_weights if model.prediction.client_weights is not None else None
    folder.weights.mkdir(parents=True, exist_ok=True)
    for code, name in enumerate(dataset.names):
        record = {
            "client": name,
            "rows": tables.summaries[str(name)].rows,
            "weights": None if weights is None else weights[code].tolist(),
            "took_part": True,
        }
        # not flushed one by one: the model holds the same numbers, and there may be thousands
        folder.client(str(name)).write_text(as_json(record), encoding="utf-8")
    named = [one for one in ("train", "validation", "test") if len(dataset.split(one))]
    if model.options.get("refit") and "validation" in named:
        named.remove("validation")  # the learners were trained on them
    held_out = "test" if "test" in named else "train"
    found: dict[str, Any]
    if model.algorithm == DENSITY:
        splits, found = {}, {"clients": client_densities(model, dataset, held_out)}
    else:
        splits = {split: model.evaluate(split).summary() for split in named if split != held_out}
        held = model.evaluate(held_out)
        splits = {split: splits.get(split) or held.summary() for split in named}
        found = held.record()
    write_metrics(
        folder,
        algorithm=model.algorithm,
        rounds=len(model.history),
        stopped=model.stopped,
        splits=splits,
        clients=found.pop("clients"),
        facts={**found, **facts},
    )


def client_densities(
    model: FederatedModel, dataset: FederatedDataset, split: str
) -> dict[str, dict[str, float]]:
    """Return each client's mean log-density, for JSON; used if there are no labels."""
    rows = dataset.split(split)
    codes, names = rows.codes.cpu().numpy(), np.array(rows.names, dtype=object)
    counts, totals = np.bincount(codes, minlength=len(names)), np.zeros(len(names))
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        place = slice(first, first + _ROWS_AT_ONCE)
        owners = names[codes[place]]
        density = model.score_samples(rows.inputs[place].cpu().numpy(), owners)
        totals += np.bincount(codes[place], density, minlength=len(names))
    return {
        str(name): {"rows": int(count), "log_density": float(total / count)}
        for name, count, total in zip(names, counts, totals, strict=True)
        if count
    }
