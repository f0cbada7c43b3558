"""Commands on files and run folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from fedgmm.cli.embedding import (
    Download,
    EncoderName,
    ImageColumn,
    Size,
    Weights,
    embedding_options,
)
from fedgmm.cli.output import (
    JsonFlag,
    RoundsBar,
    as_rows,
    check_output,
    escaped,
    print_json,
    print_notes,
    screen,
    sidelines,
    working,
    write_columns,
)
from fedgmm.wording import counted

Files = Annotated[
    list[str], typer.Argument(help="Files (CSV, TSV, Parquet, npz), folders or patterns.")
]
RunFolderArgument = Annotated[Path, typer.Argument(help="The run folder.", metavar="RUN")]
ClientColumn = Annotated[
    str | None,
    typer.Option(help="Column with the client's name, if a file holds several clients."),
]
Categorical = Annotated[
    list[str] | None,
    typer.Option(
        help="Column to treat as categories, even if it has numbers or looks like names. May be repeated."
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        help="classification, regression, or auto: classification, with an error if the label looks "
        "like a measurement. Default: auto."
    ),
]
Ignore = Annotated[list[str] | None, typer.Option(help="Column to leave out. May be repeated.")]
Positive = Annotated[
    str | None,
    typer.Option(
        help="Positive class of two. Default: 1, true or yes beside 0, false or no; otherwise the rarer "
        "one in training."
    ),
]
Threshold = Annotated[
    float | None,
    typer.Option(
        help="Probability from which on the positive class is predicted, such as 0.2. Default: the most "
        "likely class."
    ),
]
CostOption = Annotated[
    str | None,
    typer.Option(
        "--cost",
        help="Cost of a missed positive row if a false alarm costs 1, such as 10; or fn=10,fp=1; or the "
        "cost of missing a class, such as ill=10,well=1. Predicts the class of smallest expected cost.",
    ),
]
NoHeader = Annotated[
    bool,
    typer.Option(
        "--no-header",
        help="The first line holds values; the columns are called column_1, column_2 and so on.",
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Option(help="Names of the columns of files without a header: a,b,c. May be repeated."),
]
MissingValues = Annotated[
    list[str] | None,
    typer.Option(
        "--missing-values",
        help="Text or number that means a missing value, such as -9. May be repeated.",
    ),
]
DateFormat = Annotated[
    str | None, typer.Option(help="How dates are written, such as %d.%m.%Y or %m/%d/%y.")
]
Ids = Annotated[
    list[str] | None,
    typer.Option(
        "--id",
        help="Column that identifies rows: never an input, but in the output of predict and detect. May "
        "be repeated.",
    ),
]
OutFile = Annotated[
    Path | None, typer.Option("--out", help="CSV, TSV or Parquet file; default: standard output.")
]


def table_options(ctx: typer.Context) -> dict[str, Any]:
    """Return the options about columns and files that were given, as fields of ``TableOptions``."""
    from fedgmm.data.tables.preprocessing import TableOptions

    found: dict[str, Any] = {one.name: ctx.params.get(one.name) for one in fields(TableOptions)}
    found |= file_options(*(ctx.params.get(one) for one in _FILE_OPTIONS))
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in found.items()
        if value is not None and value is not False and value not in ((), [])
    }


_FILE_OPTIONS = ("no_header", "names", "missing_values", "date_format", "id_columns")


def file_options(
    no_header: bool | None,
    names: Sequence[str] | None,
    missing_values: Sequence[str] | None,
    date_format: str | None,
    id_columns: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the options about files that were given, as fields of ``TableOptions``."""
    found = {
        "no_header": no_header,
        "names": tuple(name.strip() for text in names or () for name in text.split(",")),
        "missing_values": tuple(missing_values or ()),
        "date_format": date_format,
        "id": tuple(id_columns or ()),
    }
    return {name: value for name, value in found.items() if value}


def inspect(
    ctx: typer.Context,
    files: Files,
    label: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    client_column: ClientColumn = None,
    categorical: Categorical = None,
    ignore: Ignore = None,
    no_header: NoHeader = False,
    names: Names = None,
    missing_values: MissingValues = None,
    date_format: DateFormat = None,
    id_columns: Ids = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the clients and columns of files, how much clients differ, and possible problems.

    Example: fedgmm inspect site_*.csv --label diagnosis
    """
    from fedgmm.cli.run_tables import inspection_tables
    from fedgmm.data.tables.inspection import inspect_tables
    from fedgmm.data.tables.loading import read_tables
    from fedgmm.data.tables.preprocessing import TableOptions

    options = TableOptions(**{"label": None, **table_options(ctx)})
    with working(as_json) as notify:
        found = inspect_tables(read_tables(files, options, notify))
    if as_json:
        print_json(found.record())
        return
    console = screen()
    for table in inspection_tables(found):
        console.print(table)
    print_notes(found.warnings)


def fit(
    ctx: typer.Context,
    files: Annotated[
        list[str] | None,
        typer.Argument(help="Files (CSV, TSV, Parquet, npz), folders or patterns."),
    ] = None,
    label: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    out: Annotated[Path, typer.Option(help="The run folder.")] = Path("run"),
    client_column: ClientColumn = None,
    categorical: Categorical = None,
    ignore: Ignore = None,
    no_header: NoHeader = False,
    names: Names = None,
    missing_values: MissingValues = None,
    date_format: DateFormat = None,
    id_columns: Ids = None,
    task: Task = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Tables that need more memory than this, such as 2GB, are read in blocks from scratch "
            "files in the run folder. Default: half of the available memory."
        ),
    ] = None,
    images: Annotated[
        bool,
        typer.Option(
            "--images",
            help="The files are folders of images, one per client, with one folder per class, or tables "
            "with --image-column; they are embedded first.",
        ),
    ] = False,
    label_from_folder: Annotated[
        bool,
        typer.Option(
            "--label-from-folder",
            help="The label of an image is the name of its folder. Default with --images.",
        ),
    ] = False,
    text: Annotated[
        str | None, typer.Option(help="Column of texts, which are embedded first.")
    ] = None,
    encoder: EncoderName = None,
    image_column: ImageColumn = None,
    weights: Weights = None,
    size: Size = None,
    download: Download = False,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with options; options given here replace its own."),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="fedgmm, fedem, fedavg, fedprox, fedavg+, local, clustered, pfedme, or gmm (no labels). "
            "Default: fedgmm."
        ),
    ] = None,
    components: Annotated[
        str | None,
        typer.Option(
            help="Number of Gaussians, or auto to choose it on validation rows. Default: auto for small "
            "data, otherwise 3."
        ),
    ] = None,
    learners: Annotated[
        str | None,
        typer.Option(
            help="Number of learners, or auto to choose it on validation rows. Default: auto for small "
            "data, otherwise 3."
        ),
    ] = None,
    learner: Annotated[str | None, typer.Option(help="Kind of learner: linear or mlp.")] = None,
    pca: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Principal components of vectors that the Gaussians see beside other columns (without "
            "vectors: of all inputs). Default: 48 for longer vectors, else no reduction.",
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Largest number of rounds.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all random numbers.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another training option, as name=value. May be repeated."),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Rounds between two checkpoints.")
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="Budget of differential privacy; needs --delta, --bounds and --categories."
        ),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Probability with which the budget may fail, such as 1e-5.")
    ] = None,
    unit: Annotated[
        str | None,
        typer.Option(help="What a budget protects: row, person or client. Default: row."),
    ] = None,
    person_column: Annotated[
        str | None,
        typer.Option(
            help="Column that names the person of a row, for --unit person; not an input."
        ),
    ] = None,
    bounds: Annotated[
        list[str] | None,
        typer.Option(
            help="Declared smallest and largest value: LOW:HIGH for all columns, or COLUMN=LOW:HIGH. May "
            "be repeated."
        ),
    ] = None,
    categories: Annotated[
        list[str] | None,
        typer.Option(
            help="Declared values of a column or of the label: COLUMN=A,B,C. May be repeated."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option(help="Replace a run that is already in the folder.")
    ] = False,
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
    """
    from fedgmm.runs.config import config_from, read_config
    from fedgmm.runs.fitting import fit_config

    sections: dict[str, dict[str, Any]] = (
        read_config(config) if config is not None else {"data": {}, "training": {}, "run": {}}
    )
    data: dict[str, Any] = {"files": files or None, **table_options(ctx)}
    training = {
        "algorithm": algorithm,
        "components": _count("--components", components),
        "learners": _count("--learners", learners),
        "learner": learner,
        "pca": pca,
        "rounds": rounds,
        "seed": seed,
        "device": device,
        **dict(_assignment(text) for text in set_ or ()),
    }
    embedding = embedding_options(images, text, encoder, image_column, weights, size, download)
    if embedding is not None:
        sections["embedding"] = embedding | ({} if device is None else {"device": device})
        if label_from_folder and label is not None:
            raise ValueError("Give either --label or --label-from-folder, not both.")
        data["label"] = label or (None if image_column or text else "label")
        data.setdefault("id", ("id",) if image_column is None else (image_column,))
    sections["data"] |= {name: value for name, value in data.items() if value is not None}
    sections["training"] |= {name: value for name, value in training.items() if value is not None}
    if checkpoint_every is not None:
        sections["run"]["checkpoint_every"] = checkpoint_every
    privacy = {
        "epsilon": epsilon,
        "delta": delta,
        "unit": unit,
        "person": person_column,
        "bounds": _bounds(bounds or []),
        "categories": dict(_categories(text) for text in categories or ()) or None,
    }
    given = {name: value for name, value in privacy.items() if value is not None}
    if given:
        sections["privacy"] = sections.get("privacy", {}) | given
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


def _count(option: str, text: str | None) -> int | str | None:
    """Parse a number or ``auto``."""
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{option} must be a number or auto, got {text!r}.")
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
    return found.get("") or found or None


def _categories(text: str) -> tuple[str, list[str]]:
    """Parse ``sex=f,m`` into a column and its values."""
    name, equals, values = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"--categories takes COLUMN=A,B,C, got {text!r}.")
    return name, [value.strip() for value in values.split(",")]


def _assignment(text: str) -> tuple[str, Any]:
    """Parse ``lr=0.03`` into a name and a value, written as in TOML; texts need no quotes."""
    import tomllib

    from fedgmm.runs.config import TRAINING

    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or name not in TRAINING:
        raise typer.BadParameter(
            f"--set takes name=value, got {text!r}; the names are {', '.join(sorted(TRAINING))}."
        )
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
    """Print the metrics of a finished run."""
    from fedgmm.cli.run_tables import metrics_table

    metrics = run.metrics
    if as_json:
        print_json({"run": str(run.folder.home), **metrics})
        return
    print_notes(metrics["notes"])
    console = screen()
    if metrics.get("headline"):
        console.print(escaped(metrics["headline"]), style="bold", soft_wrap=True, highlight=False)
    console.print(metrics_table(metrics))
    console.print(f"Run: [bold]{escaped(run.folder.home)}[/]", soft_wrap=True, highlight=False)


def resume(
    run: RunFolderArgument,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="New total number of rounds, larger than before.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Resume a run after a crash or Ctrl-C; the result is the same as without the interruption.

    Example: fedgmm resume run/
    """
    from fedgmm.runs.fitting import resume as resume_run

    with _resume_hint(run), RoundsBar(as_json) as bar:
        found = resume_run(
            run, rounds=rounds, notify=bar.notify, on_start=bar.begin, on_round=[bar.show]
        )
    _show_finished(found, as_json)


def evaluate(
    run: RunFolderArgument,
    files: Annotated[
        list[str] | None,
        typer.Argument(help="Labelled files of known clients; default: the files of the run."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Rows of the run: train, validation or test. Default: test."),
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(
            help="Client whose rows the files hold; default: the client column, otherwise the file's name."
        ),
    ] = None,
    positive: Positive = None,
    threshold: Threshold = None,
    cost: CostOption = None,
    importance: Annotated[
        bool,
        typer.Option(
            "--importance", help="Show which columns decide, on the rows of the run, as well."
        ),
    ] = False,
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
        chosen = _decision(opened, positive, threshold, cost)
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


def _decision(
    run: Any, positive: str | None, threshold: float | None, cost: str | None
) -> dict[str, Any]:
    """Return the options that decide on a class, with the classes as the run knows them."""
    chosen: dict[str, Any] = {"threshold": threshold}
    if positive is not None:
        chosen["positive"] = run.class_named(positive)
    if cost is None:
        return chosen
    costs: dict[Any, float] = {}
    for part in cost.split(","):
        name, equals, value = part.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            raise typer.BadParameter(
                f"--cost takes a number, or name=number separated by commas, got {part!r}."
            ) from None
        if not equals:
            return {**chosen, "cost": number}
        name = name.strip()
        costs[name if name in ("fn", "fp") else run.class_named(name)] = number
    return {**chosen, "cost": costs}


def predict(
    run: RunFolderArgument,
    file: Annotated[Path, typer.Argument(help="Rows to predict; labels are not needed.")],
    client: Annotated[
        str | None,
        typer.Option(help="Client whose weights are used; default: the federation's weights."),
    ] = None,
    positive: Positive = None,
    threshold: Threshold = None,
    cost: CostOption = None,
    id_columns: Ids = None,
    out: OutFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict the class or number of every row of a file with the model of a client.

    A number comes with the ends of its 90 % interval (lower, upper).

    Example: fedgmm predict run/ --client oslo new_patients.csv --out p.csv

    Example: fedgmm predict run/ --client oslo new_patients.csv --threshold 0.2

    Example: fedgmm predict run/ --client oslo new_patients.csv --cost fn=10,fp=1
    """
    import numpy as np

    from fedgmm.runs.run import open_run

    check_output(out)
    with working(as_json) as notify:
        opened = open_run(run)
        chosen = _decision(opened, positive, threshold, cost)
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
    file: Annotated[Path, typer.Argument(help="Rows of the client, with or without labels.")],
    client: Annotated[str, typer.Option(help="Name of the new client.")],
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Learn new weights for a client that took part in training."
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Add a new client by learning only its weights; other clients stay the same.

    The weights are shrunk towards those of the federation, so a few rows do no harm.

    Example: fedgmm adapt run/ --client bergen bergen.csv
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
    file: Annotated[Path, typer.Argument(help="Rows to check.")],
    client: Annotated[
        str | None,
        typer.Option(
            help="Client whose weights and held-out rows are used; default: the client column of the file, "
            "otherwise all clients."
        ),
    ] = None,
    false_alarm_rate: Annotated[
        float, typer.Option(help="Share of ordinary rows that may be flagged.")
    ] = 0.05,
    score: Annotated[
        str,
        typer.Option(
            help="x: inputs; y: labels given inputs; joint: both; confidence: largest class probability."
        ),
    ] = "x",
    id_columns: Ids = None,
    out: OutFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Find rows of a file that are unlike the training data.

    The p-value of all rows together tests whether they are drawn like held-out rows: of the client, or
    within each Gaussian of all clients. It is at most 5 % for 5 % of such files. It is at least
    1 / C(m + n, n) for n rows and m held-out rows, so with 19 held-out rows one row can speak at 5 %.

    Example: fedgmm detect run/ batch.csv --false-alarm-rate 0.05 --out scores.csv

    Example: fedgmm detect run/ --client oslo batch.csv
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
    pictures: Annotated[
        bool,
        typer.Option(
            "--pictures",
            help="Put thumbnails of the images, or excerpts of the texts, into the page, for all "
            "readers of the page.",
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write an HTML report about the run that opens in any browser, offline.

    Example: fedgmm report run/

    Example: fedgmm report run/ --pictures
    """
    from fedgmm.runs.run import open_run

    with working(as_json) as notify:
        path = open_run(run).report(pictures=pictures, notify=notify)
    if as_json:
        print_json({"report": path})
        return
    screen().print(f"Report: [bold]{escaped(path)}[/]", soft_wrap=True, highlight=False)


def watch(
    run: RunFolderArgument,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port of the page. Default: 8642, or another if taken."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    as_json: JsonFlag = False,
) -> None:
    """Serve a live page about a run: rounds, likelihood, accuracy, clients, bytes, ε spent.

    It reads the run folder of fit or server, before, during and after training. Ctrl-C ends it. With
    --json the state is printed once. The page has no password, so other machines see it only with --host.

    Example: fedgmm watch run/
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
    out: Annotated[
        Path | None, typer.Option(help="Markdown file; default: card.md in the run folder.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a model card: use, data, method, results with intervals, limits, privacy, reproduction.

    It names clients and columns but contains no path of this machine.

    Example: fedgmm card run/ --out card.md
    """
    from fedgmm.runs.card import write_card
    from fedgmm.runs.run import open_run

    with working(as_json):
        path = write_card(open_run(run), out)
    if as_json:
        print_json({"card": path})
        return
    screen().print(f"Model card: [bold]{escaped(path)}[/]", soft_wrap=True, highlight=False)


def export(
    run: RunFolderArgument,
    out: Annotated[Path, typer.Option(help="The ONNX file; an existing one is replaced.")],
    client: Annotated[
        str | None,
        typer.Option(help="Client whose model is exported; default: the federation's weights."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write the model of a client as an ONNX file, for programs without fedgmm.

    Its input X is the matrix after preprocessing (float32); the metadata of the file names the columns.
    The outputs are label, label_index, probabilities and log_density, or mean and log_density for
    numbers. Learners linear, mlp and cnn can be exported. Needs the package onnx (fedgmm[onnx]).

    Example: fedgmm export run/ --client oslo --out oslo.onnx
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
