"""The command line: parse, call, print. Heavy modules are imported inside the commands."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from fedgmm import __version__
from fedgmm.cli import federation, runs, studies
from fedgmm.cli.options import with_help

_INTERRUPTED = 130


class _OneSentenceErrors(TyperGroup):
    """Print an error of a command as one sentence; ``--debug`` shows the traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _note  # type: ignore[assignment]
                return self._invoke_on_first_rank(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(_INTERRUPTED) from None
        except BrokenPipeError:  # the reader of our output has closed it
            # Python flushes its buffer at exit, which must not fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except Exception as error:
            # Typer prints its own errors about wrong options
            if ctx.params["debug"] or hasattr(error, "format_message"):
                raise
            typer.echo(f"Error: {_sentence(error)}", err=True)
            raise typer.Exit(1) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            # typer and click (8.4 and newer) suggest the same command
            if "Did you mean" in str(error) and getattr(error, "possibilities", None):
                error.possibilities = None  # type: ignore[attr-defined]
            raise

    def _invoke_on_first_rank(self, ctx: Any) -> Any:
        """Run the command; of several processes of ``torchrun``, the first runs it and the others help."""
        if os.environ.get("WORLD_SIZE", "1") == "1":  # before the heavy imports
            return super().invoke(ctx)
        from fedgmm.training.distributed import follow, leading
        from fedgmm.training.in_process import several_ranks
        from fedgmm.training.ranks import LeaderError, join

        if not several_ranks():
            return super().invoke(ctx)
        ranks = join()
        if ranks.rank:
            with suppress(LeaderError):  # rank 0 prints it
                follow(ranks)
            return None
        with leading(ranks):
            return super().invoke(ctx)


class _EachOptionOnce(TyperCommand):
    """Refuse an option that is given twice, because the first value would be lost silently."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        seen = set()
        for option in self.make_parser(ctx).parse_args(list(args))[2]:
            several = option.multiple or option.nargs != 1 or getattr(option, "is_flag", False)
            if option in seen and not several:
                raise typer.BadParameter(f"{option.opts[0]} was given twice; give one value.")
            seen.add(option)
        return super().parse_args(ctx, args)


def _note(message: Warning | str, *_: Any) -> None:
    """Print a warning without its place in the code."""
    typer.echo(f"Note: {message}", err=True)


def _sentence(error: Exception) -> str:
    """Return the error as one sentence."""
    if isinstance(error, OSError) and error.strerror:
        # Arrow puts the file name into strerror
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    if isinstance(error, MemoryError):
        return "There is not enough memory; use fewer columns, components or rows."
    # torch's class
    if type(error).__name__ == "OutOfMemoryError" and str(error).startswith("CUDA"):
        from fedgmm.nets.devices import out_of_memory_reason

        return f"{out_of_memory_reason(error)}. Close other programs on the GPU, or use another --device."
    return str(error) or type(error).__name__


def _keep_help_of_arguments() -> None:
    """Restore the help of arguments: click 8.5 resets it after typer 0.20 has set it."""
    make = TyperArgument.__init__

    def make_and_set(self: TyperArgument, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.help = options.get("help")

    TyperArgument.__init__ = make_and_set  # type: ignore[method-assign]


_keep_help_of_arguments()

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
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Personalised federated learning under mixtures of distributions.

    Exit codes: 0 success, 1 an error in the data or the request, 2 a wrong option, 130 interrupted.
    """


_FEDERATION = "Federation over several machines"
_COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Train and use models": (
        runs.inspect, runs.embed, runs.fit, runs.resume, runs.evaluate, runs.predict, runs.adapt,
        runs.detect, runs.report, runs.watch, runs.card, runs.export, studies.compare,
    ),
    "Demonstrations and experiments": (studies.demo, studies.tune, studies.reproduce),
    _FEDERATION: (federation.server, federation.client, federation.audit, federation.ledger),
}  # fmt: skip
for panel, commands in _COMMANDS.items():
    for command in commands:
        app.command(cls=_EachOptionOnce, rich_help_panel=panel)(with_help(command))
app.add_typer(federation.keys, name="keys", rich_help_panel=_FEDERATION)
