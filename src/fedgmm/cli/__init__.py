"""The command line: parses, calls, prints. What is heavy is imported inside the commands."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from fedgmm import __version__
from fedgmm.cli import federation, reproduce, runs, studies

_INTERRUPTED = 130


class _OneSentenceErrors(TyperGroup):
    """Turns an error of a command into one sentence; ``--debug`` shows where it came from."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _note  # type: ignore[assignment]
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(_INTERRUPTED) from None
        except BrokenPipeError:  # whoever reads our output has seen enough
            # what is still in Python's buffer has to go somewhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except Exception as error:
            if ctx.params["debug"]:
                raise
            typer.echo(f"Error: {_sentence(error)}", err=True)
            raise typer.Exit(1) from None


def _note(message: Warning | str, *_: Any) -> None:
    """A warning without the place in the code that it came from."""
    typer.echo(f"Note: {message}", err=True)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        # Arrow names the file within its own words
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    if isinstance(error, MemoryError):
        return "There is not enough memory; use fewer columns, components or rows."
    if type(error).__name__ == "OutOfMemoryError" and str(error).startswith("CUDA"):  # torch's own
        from fedgmm.nets.devices import what_ran_out

        return (
            f"{what_ran_out(error)}. End other programs that use the card, or use another --device."
        )
    return str(error) or type(error).__name__


app = typer.Typer(
    cls=_OneSentenceErrors,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def main() -> None:
    """Entry point of the ``fedgmm`` command."""
    app(prog_name="fedgmm")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedgmm {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Personalised federated learning under mixtures of distributions.

    Exit codes: 0 all is well, 1 something is wrong with the data or the request, 2 a wrong option,
    130 interrupted.
    """


_FILES, _STUDIES = "From files to answers", "Demonstrations and experiments"
_MACHINES = "Over several machines"
_ON_FILES: tuple[Callable[..., None], ...] = (
    runs.inspect,
    runs.fit,
    runs.resume,
    runs.evaluate,
    runs.predict,
    runs.adapt,
    runs.detect,
    runs.report,
    studies.compare,
)
_OTHERS: tuple[Callable[..., None], ...] = (studies.demo, studies.tune, reproduce.reproduce)
for command in _ON_FILES:
    app.command(rich_help_panel=_FILES)(command)
for command in _OTHERS:
    app.command(rich_help_panel=_STUDIES)(command)
for command in (federation.server, federation.client):
    app.command(rich_help_panel=_MACHINES)(command)
app.add_typer(federation.keys, name="keys", rich_help_panel=_MACHINES)
