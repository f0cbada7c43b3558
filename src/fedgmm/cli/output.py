"""What commands share: notes, progress, tables on disk, JSON for machines."""

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

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print JSON for machines, and nothing else.")
]
_MOST_NOTES = 20


def screen() -> Console:
    """Where people read."""
    from rich.console import Console

    return Console()


def sidelines() -> Console:
    """Where progress and warnings go, so that the output itself can be piped."""
    from rich.console import Console

    return Console(stderr=True)


def print_json(value: Any) -> None:
    """One JSON document on standard output; numbers that are not finite become ``null``."""
    from fedgmm.runs.folder import finite

    text = json.dumps(finite(value), indent=1, allow_nan=False, default=_plain)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()  # a closed pipe is noticed here and not at the end


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def print_notes(notes: list[str]) -> None:
    """Warnings, on the side."""
    console = sidelines()
    for note in notes[:_MOST_NOTES]:
        console.print(f"[yellow]Note:[/] {escaped(note)}", soft_wrap=True, highlight=False)
    if len(notes) > _MOST_NOTES:
        console.print(f"[yellow]Note:[/] … and {len(notes) - _MOST_NOTES} more.")


def escaped(text: Any) -> str:
    """Text that may hold square brackets."""
    from rich.markup import escape

    return escape(str(text))


@contextmanager
def working(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A spinner with a line of what is going on."""
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
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._progress.add_task("reading", total=None, told="")

    def __enter__(self) -> RoundsBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def notify(self, line: str) -> None:
        """Say what is going on before and after the rounds."""
        self._progress.update(self._task, description=escaped(line))

    def begin(self, rounds: int) -> None:
        """The number of rounds is known."""
        self._progress.reset(self._task, total=rounds, description="training", told="")

    def show(self, entry: dict[str, float]) -> None:
        """A round is done."""
        told = f"log-likelihood {entry['log_likelihood']:.4f}"
        if "validation_accuracy" in entry:
            told += f", accuracy {100 * entry['validation_accuracy']:.1f} %"
        self._progress.update(self._task, completed=entry["round"], told=told)


def write_columns(columns: Mapping[str, Any], out: Path | None) -> None:
    """Columns to a CSV, TSV or Parquet file, or as CSV to standard output."""
    import pyarrow as pa
    from pyarrow import csv

    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    if out is None:
        buffer = pa.BufferOutputStream()
        csv.write_csv(table, buffer)
        sys.stdout.buffer.write(buffer.getvalue())
        sys.stdout.buffer.flush()  # a closed pipe is noticed here and not at the end
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


def as_rows(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Columns as one dictionary a row, for JSON."""
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]


def check_output(out: Path | None) -> None:
    """Complain about an output file that cannot be written before any work is done."""
    if out is None:
        return
    endings = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")
    if not out.name.lower().endswith(endings):
        raise ValueError(f"{out} must end in one of {', '.join(endings)}.")
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name a file.")
