"""Commands on files and run folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from fedgmm.cli.options import (
    ColumnOptions,
    DecisionOptions,
    EmbeddingOptions,
    Files,
    Ids,
    OutFile,
    RunFolderArgument,
    comma_separated,
    given,
)
from fedgmm.cli.output import (
    JsonFlag,
    RoundsBar,
    as_rows,
    check_output,
    escaped,
    print_json,
    print_notes,
    print_place,
    screen,
    sidelines,
    working,
    write_columns,
)
from fedgmm.wording import counted


def inspect(
    files: Files,
    label: str | None = None,
    *,
    columns: ColumnOptions,
    as_json: JsonFlag = False,
) -> None:
    """Show the clients and columns of files, how much clients differ, and possible problems.

    Example: fedgmm inspect site_*.csv --label diagnosis

    Options:
        label: The column to predict.
    """
    from fedgmm.cli.run_tables import inspection_tables
    from fedgmm.data.tables.inspection import inspect_tables
    from fedgmm.data.tables.loading import read_tables
    from fedgmm.data.tables.preprocessing import TableOptions

    options = TableOptions(label, **columns.given())
    with working(as_json) as notify:
        found = inspect_tables(read_tables(files, options, notify))
    if as_json:
        print_json(found.record())
        return
    console = screen()
    for table in inspection_tables(found):
        console.print(table)
    print_notes(found.warnings)


def embed(
    sources: list[Path],
    out: Annotated[Path, Option()],
    text: str | None = None,
    device: str = "auto",
    *,
    embedding: EmbeddingOptions,
    as_json: JsonFlag = False,
) -> None:
    """Turn images or texts into vectors with a frozen encoder, once.

    All other commands read the Parquet files that it writes. If it is interrupted, run it again: it
    reuses the finished batches.

    Example: fedgmm embed sites/* --out vectors --weights resnet18.safetensors

    Example: fedgmm embed notes_*.csv --text note --out vectors

    Options:
        sources: One source per site: a folder of images with one folder per class, a table, or an npz file
            with an array images.
        out: Folder for one Parquet file per site.
        text: Column of texts of the tables.
        device: cpu, cuda or auto.
    """
    from rich.progress import Progress, TaskID

    from fedgmm.data.embed import Embedding

    settings = Embedding(**embedding.given(text, images=True), device=device)
    notes = sidelines()
    with Progress(console=notes, transient=True, disable=as_json or not notes.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def show(site: str, done: int, total: int) -> None:
            if site not in tasks:
                tasks[site] = bar.add_task(escaped(site), total=total)
            bar.update(tasks[site], completed=done)

        found = settings.sites(sources, out, show)
    print_notes([note for site in found for note in site.notes])
    if as_json:
        print_json([vars(site) for site in found])
        return
    console = screen()
    for site in found:
        console.print(f"{escaped(site.name)}: {counted(site.rows, 'row')} in {escaped(site.path)}")


def fit(
    ctx: typer.Context,
    files: Annotated[list[str] | None, Argument()] = None,
    label: str | None = None,
    out: Path = Path("run"),
    *,
    columns: ColumnOptions,
    memory: str | None = None,
    images: Annotated[bool, Option("--images")] = False,
    label_from_folder: Annotated[bool, Option("--label-from-folder")] = False,
    text: str | None = None,
    embedding: EmbeddingOptions,
    config: Path | None = None,
    algorithm: str | None = None,
    components: str | None = None,
    learners: str | None = None,
    learner: str | None = None,
    pca: Annotated[int | None, Option(min=1)] = None,
    rounds: Annotated[int | None, Option(min=1)] = None,
    seed: Annotated[int | None, Option(min=0)] = None,
    device: str | None = None,
    set_: Annotated[list[str] | None, Option("--set")] = None,
    checkpoint_every: Annotated[int | None, Option(min=1)] = None,
    epsilon: float | None = None,
    delta: float | None = None,
    unit: str | None = None,
    person_column: str | None = None,
    bounds: list[str] | None = None,
    categories: list[str] | None = None,
    overwrite: bool = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a personalised model on the files of many clients.

    Example: fedgmm fit site_*.csv --label diagnosis --out run/

    Example: fedgmm fit all.parquet --client-column site --label diagnosis --components auto --learners auto

    Example: fedgmm fit sites/* --images --weights resnet18.safetensors --out run/

    Example: fedgmm fit --config run/config.toml --out again/

    Example, with privacy: fedgmm fit site_*.csv --label sick --epsilon 2 --delta 1e-6 --bounds 0:200
    --categories sick=no,yes

    Example, on eight processes: torchrun --nproc-per-node 8 -m fedgmm fit site_*.csv --label diagnosis

    Options:
        files: Files (CSV, TSV, Parquet, npz), folders or patterns.
        label: The column to predict.
        out: The run folder.
        memory: Tables that need more memory than this, such as 2GB, are read in blocks from scratch files
            in the run folder. Default: half of the available memory.
        images: The files are folders of images, one per client, with one folder per class, or tables with
            --image-column; they are embedded first.
        label_from_folder: With --images, the label of an image is the name of its folder, as by default.
            Excludes --label.
        text: Column of texts, which are embedded first.
        config: TOML file with options; options given here replace its own.
        algorithm: fedgmm, fedem, fedavg, fedprox, fedavg+, local, clustered, pfedme, or gmm (no labels).
            Default: fedgmm.
        components: Number of Gaussians, or auto to choose it on validation rows. Default: auto for small
            data, otherwise 3.
        learners: Number of learners, or auto to choose it on validation rows. Default: auto for small data,
            otherwise 3.
        learner: Kind of learner: linear or mlp. Default: linear.
        pca: Number of principal components of the vectors (without vectors: of all columns) that the
            Gaussians use. Default: 48 for longer vectors, else no reduction.
        rounds: Largest number of rounds; training ends earlier once the likelihood has converged. Default:
            100.
        seed: Seed of all random numbers. Default: 0.
        device: cpu, cuda or auto. Default: cpu.
        set_: Another training option, as name=value. May be repeated.
        checkpoint_every: Rounds between two checkpoints. Default: 5.
        epsilon: Budget of differential privacy; needs --delta, --bounds and --categories.
        delta: Probability with which the budget may fail, such as 1e-5.
        unit: Unit that the budget protects: row, person or client. Default: row.
        person_column: Column that names the person of a row, for --unit person; not an input.
        bounds: Declared smallest and largest value: LOW:HIGH for all columns, or COLUMN=LOW:HIGH. May be
            repeated.
        categories: Declared values of a column or of the label: COLUMN=A,B,C. May be repeated.
        overwrite: Replace a run that is already in the folder.
    """
    from fedgmm.runs.config import config_from, read_config
    from fedgmm.runs.fitting import fit_config

    sections: dict[str, dict[str, Any]] = (
        read_config(config) if config is not None else {"data": {}, "training": {}, "run": {}}
    )
    data = columns.given() | given(ctx.params, "files", "label", "memory", "seed")
    training = given(ctx.params, "algorithm", "learner", "pca", "rounds", "seed", "device")
    training |= {
        **({} if components is None else {"components": _count("--components", components)}),
        **({} if learners is None else {"learners": _count("--learners", learners)}),
        **dict(_assignment(text) for text in set_ or ()),
    }
    vectors = embedding.given(text, images)
    if vectors:
        sections["embedding"] = vectors | given(ctx.params, "device")
        if label_from_folder and label is not None:
            raise ValueError("Give either --label or --label-from-folder, not both.")
        if label is None and not (embedding.image_column or text):
            data["label"] = "label"
        data.setdefault("id", (embedding.image_column or "id",))
    sections["data"] |= data
    sections["training"] |= training
    sections["run"] |= given(ctx.params, "checkpoint_every")
    privacy = given(ctx.params, "epsilon", "delta", "unit")
    if person_column is not None:
        privacy["person"] = person_column
    if bounds:
        privacy["bounds"] = _bounds(bounds)
    if categories:
        privacy["categories"] = dict(map(_categories, categories))
    if privacy:
        sections["privacy"] = sections.get("privacy", {}) | privacy
    chosen = config_from(sections)
    with _resume_hint(out), RoundsBar(as_json) as bar:
        run = fit_config(
            chosen,
            out,
            overwrite=overwrite,
            notify=bar.notify,
            on_start=bar.begin,
            on_round=[bar.show],
        )
    _show_finished(run, as_json)


def _count(option: str, text: str) -> int | str:
    """Parse a number or ``auto``."""
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{option} must be at least 1, or auto, got {text!r}.")
    return int(text)


def _bounds(texts: list[str]) -> Any:
    """Parse ``0:10`` into a pair for all columns, or ``age=0:110`` and others into pairs by name."""
    found: dict[str, tuple[float, float]] = {}
    for text in texts:
        name, _, pair = text.rpartition("=")
        try:
            low, high = map(float, pair.split(":"))
        except ValueError:
            raise typer.BadParameter(
                f"--bounds takes LOW:HIGH or COLUMN=LOW:HIGH, got {text!r}."
            ) from None
        found[name] = (low, high)
    if "" in found and len(found) > 1:
        raise typer.BadParameter("--bounds takes one pair for all columns, or a pair per column.")
    return found.get("") or found


def _categories(text: str) -> tuple[str, list[str]]:
    """Parse ``sex=f,m`` into a column and its values."""
    name, equals, values = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"--categories takes COLUMN=A,B,C, got {text!r}.")
    return name, comma_separated(values)


def _assignment(text: str) -> tuple[str, Any]:
    """Parse ``lr=0.03`` into a name and a value, written as in TOML; texts need no quotes."""
    import tomllib

    from fedgmm.runs.config import TRAINING
    from fedgmm.support.checks import check_known

    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise typer.BadParameter(f"--set takes name=value, such as rounds=50, got {text!r}.")
    check_known("--set: there is no training option", name, TRAINING, typer.BadParameter)
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


@contextmanager
def _resume_hint(home: Path) -> Iterator[None]:
    """Print how to resume the run after Ctrl-C."""
    from fedgmm.runs.folder import RunFolder

    try:
        yield
    except KeyboardInterrupt:
        if RunFolder(home).is_run:
            typer.echo(f"Resume with: fedgmm resume {home}", err=True)
        raise


def _show_finished(run: Any, as_json: bool) -> None:
    """Print the metrics of a finished run, and the command that most users need next."""
    import shlex

    from fedgmm.cli.run_tables import metrics_table
    from fedgmm.methods.base import DENSITY

    metrics = run.metrics
    if as_json:
        print_json({"run": str(run.folder.home), **metrics})
        return
    print_notes(metrics["notes"])
    console = screen()
    if metrics.get("headline"):
        console.print(escaped(metrics["headline"]), style="bold", soft_wrap=True, highlight=False)
    console.print(metrics_table(metrics))
    home = run.folder.home
    print_place("Run", home)
    place = shlex.quote(str(home))
    use = f"detect {place} FILE" if metrics["algorithm"] == DENSITY else f"report {place}"
    print_place("Next", f"fedgmm {use}")


def resume(
    run: RunFolderArgument,
    rounds: Annotated[int | None, Option(min=1)] = None,
    as_json: JsonFlag = False,
) -> None:
    """Resume a run after a crash or Ctrl-C; the result is the same as without the interruption.

    Example: fedgmm resume run/

    Options:
        rounds: New total number of rounds, larger than before.
    """
    from fedgmm.runs.fitting import resume as resume_run

    with _resume_hint(run), RoundsBar(as_json) as bar:
        found = resume_run(
            run, rounds=rounds, notify=bar.notify, on_start=bar.begin, on_round=[bar.show]
        )
    _show_finished(found, as_json)


def evaluate(
    run: RunFolderArgument,
    files: Annotated[list[str] | None, Argument()] = None,
    split: str | None = None,
    client: str | None = None,
    *,
    decision: DecisionOptions,
    importance: Annotated[bool, Option("--importance")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show how good the predictions are, for every client and for all rows together.

    The first line has the main metric: average precision if the positive class is rare (below 20 %),
    otherwise accuracy. The tables have AUC, log-loss, Brier score, sensitivity, specificity, calibration
    and the confusion matrix, with 95 % bootstrap intervals; --json has all of them per client.

    Example: fedgmm evaluate run/

    Example: fedgmm evaluate run/ --positive ill --threshold 0.2

    Example: fedgmm evaluate run/ --importance

    Example: fedgmm evaluate run/ --client oslo oslo_2025.csv

    Options:
        files: Labelled files of known clients; default: the files of the run.
        split: Rows of the run: train, validation or test. Default: test.
        client: Client whose rows the files hold; default: the client column, otherwise the file's name.
        importance: Also show how much each column matters for the predictions, on the rows of the run.
    """
    from fedgmm.cli.run_tables import (
        confusion_table,
        evaluation_table,
        importance_table,
        pooled_table,
    )
    from fedgmm.runs.run import open_run

    if files and split is not None:
        raise typer.BadParameter(
            "--split selects rows of the run; leave out either --split or the files."
        )
    if client is not None and not files:
        raise typer.BadParameter("--client says whose rows the files hold; name the files, too.")
    with working(as_json) as notify:
        opened = open_run(run)
        chosen = decision.of(opened)
        found = opened.evaluate(files or (), client, split=split or "test", notify=notify, **chosen)
        columns = opened.importance(split or "test", notify=notify) if importance else None
    if as_json:
        more = {} if columns is None else {"importance": columns.record()}
        print_json({"summary": found.summary(), **found.record(), **more})
        return
    print_notes([note for note in (opened.model.impersonal, found.silence) if note])
    console = screen()
    console.print(escaped(found.headline()), style="bold", soft_wrap=True, highlight=False)
    for table in (evaluation_table(found), pooled_table(found), confusion_table(found)):
        if table is not None:
            console.print(table)
    if columns is not None:
        console.print(importance_table(columns))


def predict(
    run: RunFolderArgument,
    file: Path,
    client: str | None = None,
    *,
    decision: DecisionOptions,
    id_columns: Ids = None,
    out: OutFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict the class or number of every row of a file with the model of a client.

    A number comes with the ends of its 90 % interval (lower, upper).

    Example: fedgmm predict run/ --client oslo new_patients.csv --out p.csv

    Example: fedgmm predict run/ --client oslo new_patients.csv --threshold 0.2

    Example: fedgmm predict run/ --client oslo new_patients.csv --cost fn=10,fp=1

    Options:
        file: Rows to predict; labels are not needed.
        client: Client whose weights are used; default: the client column of the file, otherwise the
            federation's weights.
    """
    import numpy as np

    from fedgmm.runs.run import open_run

    check_output(out)
    with working(as_json) as notify:
        opened = open_run(run)
        chosen = decision.of(opened)
        found = opened.predict(file, client, ids=id_columns or (), notify=notify, **chosen)
        if out is not None or not as_json:
            write_columns(found.columns(), out)
    print_notes(found.notes)
    shares: dict[str, int | float]
    if found.interval is None:
        names, counts = np.unique(found.labels, return_counts=True)
        shares = {str(name): int(count) for name, count in zip(names, counts, strict=True)}
    else:
        ends = found.labels.min(), found.labels.mean(), found.labels.max()
        numbers = (float(f"{value:.6g}") for value in ends)
        shares = dict(zip(("smallest", "mean", "largest"), numbers, strict=True))
    if as_json:
        record = {"rows": len(found.labels), "predicted": shares, "out": out}
        print_json(record if out else {**record, "predictions": as_rows(found.columns())})
    elif out is not None:
        text = ", ".join(f"{name}: {count}" for name, count in shares.items())
        typer.echo(f"{counted(len(found.labels), 'row')} ({text}) in {out}", err=True)


def adapt(
    run: RunFolderArgument,
    file: Path,
    client: Annotated[str, Option()],
    replace: Annotated[bool, Option("--replace")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Add a new client by learning only its weights; other clients stay the same.

    The weights are shrunk towards those of the federation, so a few rows do no harm.

    Example: fedgmm adapt run/ --client bergen bergen.csv

    Options:
        file: Rows of the client, with or without labels.
        client: Name of the new client.
        replace: Learn new weights for a client that took part in training.
    """
    from fedgmm.cli.run_tables import adaptation_table
    from fedgmm.runs.run import open_run

    with working(as_json) as notify:
        found = open_run(run).adapt(client, file, replace_known=replace, notify=notify)
    print_notes(found.notes)
    if as_json:
        record = {
            "client": client,
            "rows": found.rows,
            "labelled": found.labelled,
            "weights": found.adaptation.weights.tolist(),
            "curve": found.curve,
            "note": found.adaptation.note,
        }
        print_json(record)
        return
    screen().print(adaptation_table(found))


def detect(
    run: RunFolderArgument,
    file: Path,
    client: str | None = None,
    false_alarm_rate: float = 0.05,
    score: str = "x",
    id_columns: Ids = None,
    out: OutFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Find rows of a file that are unlike the training data.

    The command also tests all rows together. If they are drawn like the held-out rows (with --client: of
    the client; otherwise: of all clients, within each Gaussian), the p-value of the file is at most 5 % in
    5 % of cases. It is at least 1 / C(m + n, n) for n rows and m held-out rows, so a file of one row
    needs 19 held-out rows to reach 5 %.

    Example: fedgmm detect run/ batch.csv --false-alarm-rate 0.05 --out scores.csv

    Example: fedgmm detect run/ --client oslo batch.csv

    Options:
        file: Rows to check.
        client: Client whose weights and held-out rows are used; default: the client column of the file,
            otherwise all clients.
        false_alarm_rate: Share of ordinary rows that may be flagged.
        score: x: inputs; y: labels given inputs; joint: both; confidence: largest class probability.
    """
    from fedgmm.runs.run import open_run

    check_output(out)
    with working(as_json) as notify:
        found = open_run(run).detect(
            file,
            client,
            false_alarm_rate=false_alarm_rate,
            score=score,  # type: ignore[arg-type]
            ids=id_columns or (),
            notify=notify,
        )
        if out is not None or not as_json:
            write_columns(found.columns(), out)
    print_notes(found.notes)
    rows, novel = len(found.result.novel), int(found.result.novel.sum())
    if as_json:
        record = {
            "rows": rows,
            "novel": novel,
            "false_alarm_rate": false_alarm_rate,
            "client": client,
            "clients": found.clients,
            "batch_p_value": found.batch_p_value,
            "smallest_batch_p_value": found.result.batch and found.result.batch.smallest,
            "out": out,
        }
        print_json(record if out else {**record, "scores": as_rows(found.columns())})
        return
    typer.echo(
        f"Novel: {novel} of {counted(rows, 'row')} ({100 * novel / rows:.1f} %); about "
        f"{100 * false_alarm_rate:g} % of ordinary rows are flagged by mistake.",
        err=True,
    )
    like = f"of {client}" if client else "of their clients" if found.clients else "of all clients"
    typer.echo(
        f"All rows together have p-value {found.batch_p_value:.2g}; a small value means that they are less "
        f"familiar than held-out rows {like}.",
        err=True,
    )
    if found.clients:
        from fedgmm.cli.run_tables import detection_table

        sidelines().print(detection_table(found))
    if out is not None:
        typer.echo(f"Scores: {out}", err=True)


def report(
    run: RunFolderArgument,
    pictures: Annotated[bool, Option("--pictures")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write an HTML report about the run that opens in any browser, offline.

    Example: fedgmm report run/

    Example: fedgmm report run/ --pictures

    Options:
        pictures: Put thumbnails of the images, or excerpts of the texts, into the page, for all readers of
            the page.
    """
    from fedgmm.runs.run import open_run

    with working(as_json) as notify:
        path = open_run(run).report(pictures=pictures, notify=notify)
    if as_json:
        print_json({"report": path})
    else:
        print_place("Report", path)


def watch(
    run: RunFolderArgument,
    port: Annotated[int | None, Option(min=0, max=65535)] = None,
    host: str = "127.0.0.1",
    as_json: JsonFlag = False,
) -> None:
    """Serve a live page about a run: rounds, likelihood, accuracy, clients, bytes, ε spent.

    It reads the run folder of fit or server, before, during and after training. Ctrl-C ends it. With
    --json the state is printed once. The page has no password, so other machines see it only with --host.

    Example: fedgmm watch run/

    Options:
        port: Port of the page. Default: 8642, or another if taken.
        host: Address to listen on.
    """
    from fedgmm.runs.watch import WatchServer, state_of

    if as_json:
        print_json(state_of(run))
        return
    with suppress(KeyboardInterrupt), WatchServer(run, host, port) as server:
        typer.echo(f"Watching {run} at {server.address} (Ctrl-C ends)", err=True)
        server.serve_forever()


def card(
    run: RunFolderArgument,
    out: Path | None = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a model card: use, data, method, results with intervals, limits, privacy, reproduction.

    It names clients and columns but contains no path of this machine.

    Example: fedgmm card run/ --out card.md

    Options:
        out: Markdown file; default: card.md in the run folder.
    """
    from fedgmm.runs.reporting import write_card
    from fedgmm.runs.run import open_run

    with working(as_json):
        path = write_card(open_run(run), out)
    if as_json:
        print_json({"card": path})
    else:
        print_place("Model card", path)


def export(
    run: RunFolderArgument,
    out: Annotated[Path, Option()],
    client: str | None = None,
    as_json: JsonFlag = False,
) -> None:
    """Write the model of a client as an ONNX file, for programs without fedgmm.

    Its input X is the matrix after preprocessing (float32); the metadata of the file names the columns.
    The outputs are label, label_index, probabilities and log_density, or mean and log_density for
    numbers. Learners linear, mlp and cnn can be exported. Needs the package onnx (fedgmm[onnx]).

    Example: fedgmm export run/ --client oslo --out oslo.onnx

    Options:
        out: The ONNX file; an existing one is replaced.
        client: Client whose model is exported; default: the federation's weights.
    """
    from fedgmm.runs.run import open_run

    with working(as_json):
        opened = open_run(run)
        name = None if client is None else opened.client_named(client)
        path = opened.model.export_onnx(out, name)
    columns = opened.preprocessing.feature_names
    if as_json:
        print_json({"out": path, "client": name, "columns": list(columns)})
        return
    owner = "the federation" if name is None else name
    typer.echo(f"Model of {owner}, {counted(len(columns), 'input column')}: {path}", err=True)
