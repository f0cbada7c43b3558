"""Output of commands: notes, progress, JSON, and tables on disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
_MOST_NOTES = 20


def screen() -> Console:
    """Return the console for results: standard output."""
    from rich.console import Console

    return Console()


def sidelines() -> Console:
    """Return the console for progress and notes: standard error, so that results can be piped."""
    from rich.console import Console

    return Console(stderr=True)


def print_json(value: Any) -> None:
    """Print one JSON document to standard output; NaN and infinity become ``null``."""
    from fedgmm.runs.folder import finite

    text = json.dumps(finite(value), indent=1, allow_nan=False, default=_plain)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()  # notice a closed pipe here and not at exit


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def print_notes(notes: list[str]) -> None:
    """Print notes to standard error."""
    console = sidelines()
    for note in notes[:_MOST_NOTES]:
        console.print(f"[yellow]Note:[/] {escaped(note)}", soft_wrap=True, highlight=False)
    if len(notes) > _MOST_NOTES:
        console.print(f"[yellow]Note:[/] … and {len(notes) - _MOST_NOTES} more.")


def print_place(title: str, place: Path | str) -> None:
    """Print where a result is, or which command uses it, in one line that can be copied."""
    screen().print(f"{title}: [bold]{escaped(place)}[/]", soft_wrap=True, highlight=False)


def escaped(text: Any) -> str:
    """Escape square brackets, which are markup for rich."""
    from rich.markup import escape

    return escape(str(text))


@contextmanager
def working(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show a spinner; the value takes a line about the current step."""
    if quiet:
        yield lambda _: None
        return
    with sidelines().status("starting") as status:
        yield lambda line: status.update(escaped(line))


class RoundsBar:
    """A progress bar with round, likelihood, accuracy and time left."""

    def __init__(self, quiet: bool) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = sidelines()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._progress.add_task("reading", total=None, status="")

    def __enter__(self) -> RoundsBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def notify(self, line: str) -> None:
        """Show the current step before and after the rounds."""
        self._progress.update(self._task, description=escaped(line))

    def begin(self, rounds: int) -> None:
        """Start counting rounds."""
        self._progress.reset(self._task, total=rounds, description="training", status="")

    def show(self, entry: dict[str, float]) -> None:
        """Show a finished round."""
        status = f"log-likelihood {entry['log_likelihood']:.4f}"
        if "validation_accuracy" in entry:
            status += f", accuracy {100 * entry['validation_accuracy']:.1f} %"
        self._progress.update(self._task, completed=entry["round"], status=status)


def write_columns(columns: Mapping[str, Any], out: Path | None) -> None:
    """Write columns to a CSV, TSV or Parquet file, or as CSV to standard output.

    In CSV and TSV, texts that a spreadsheet would run as a formula get an apostrophe in front.
    """
    import pyarrow as pa
    from pyarrow import csv

    if out is None or not out.name.lower().endswith(".parquet"):
        columns = {without_formula(name): _plain_texts(values) for name, values in columns.items()}
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    if out is None:
        buffer = pa.BufferOutputStream()
        csv.write_csv(table, buffer)
        sys.stdout.buffer.write(buffer.getvalue())
        sys.stdout.buffer.flush()  # notice a closed pipe here and not at exit
        return
    lowered = out.name.lower()
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(out.name + ".part")
    if lowered.endswith(".parquet"):
        from pyarrow import parquet

        parquet.write_table(table, draft)
    else:
        tabs = lowered.endswith((".tsv", ".tsv.gz"))
        options = csv.WriteOptions(delimiter="\t" if tabs else ",")
        compression = "gzip" if lowered.endswith(".gz") else None
        with pa.output_stream(str(draft), compression=compression) as stream:
            csv.write_csv(table, stream, options)
    draft.replace(out)


def _plain_texts(values: Any) -> Any:
    """Return a column whose texts are not formulas."""
    if values.dtype.kind not in "OU":
        return values
    return [without_formula(one) if isinstance(one, str) else one for one in values.tolist()]


def without_formula(text: str) -> str:
    """Return a text that no spreadsheet takes as a formula; numbers such as -1.5 stay as they are."""
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return text
    try:
        float(text)
    except ValueError:
        return "'" + text
    return text


def as_rows(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return columns as one dictionary per row, for JSON."""
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]


def check_output(out: Path | None) -> None:
    """Raise if an output file cannot be written; called before any work is done."""
    if out is None:
        return
    endings = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")
    if not out.name.lower().endswith(endings):
        raise ValueError(f"{out} must end in one of {', '.join(endings)}.")
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name a file.")
