"""The command line: parses, calls, prints. What is heavy is imported inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer.core import TyperGroup

from fedgmm import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from fedgmm.experiments.demo import DemoResult


class _OneSentenceErrors(TyperGroup):
    """Turns an error of a command into one sentence; ``--debug`` shows where it came from."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if ctx.params["debug"]:
                raise
            raise click.ClickException(_sentence(error)) from None


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}"
    return str(error) or type(error).__name__


app = typer.Typer(
    cls=_OneSentenceErrors,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
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
    """Personalised federated learning under mixtures of distributions."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("demo"),
    clients: Annotated[int, typer.Option(min=2, max=1000, help="How many clients.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data and the fit.")] = 0,
) -> None:
    """Fit a federated Gaussian mixture to synthetic clients, in seconds."""
    from rich.console import Console

    out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made is told before any work
    console = Console()
    result = _run_demo_with_progress(clients, seed, console)

    from fedgmm.report.plots import plot_demo

    picture = plot_demo(result, out / "demo.png")
    _print_demo(result, picture, console)


def _run_demo_with_progress(clients: int, seed: int, console: Console) -> DemoResult:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("round {task.completed}"),
        TextColumn("log-likelihood {task.fields[log_likelihood]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("federated EM", total=None, log_likelihood="-")

        from fedgmm.algorithms.base import RoundInfo
        from fedgmm.experiments.demo import MOST_ROUNDS, run_demo

        progress.update(task, total=MOST_ROUNDS)

        def show(number: int, info: RoundInfo) -> None:
            progress.update(
                task, completed=number, log_likelihood=f"{info.log_likelihood:.4f}", refresh=True
            )

        result = run_demo(clients, seed, on_round=[show])
        progress.update(task, total=result.rounds)
    return result


def _print_demo(result: DemoResult, picture: Path, console: Console) -> None:
    from fedgmm.report.tables import demo_table

    gain = result.log_likelihood - result.common_log_likelihood
    console.print(demo_table(result))
    console.print(
        "Same model, no pooling: with one common set of weights the federated fit differs from "
        "scikit-learn on the pooled rows by at most "
        f"[bold]{result.pooled_difference:.1e}[/] in log-likelihood a row, over every round."
    )
    console.print(
        f"Personal weights: log-likelihood of rows no fit saw {result.log_likelihood:.3f}, with "
        f"common weights {result.common_log_likelihood:.3f}: [bold]{gain:+.3f}[/] a row."
    )
    console.print(f"Picture: [bold]{picture}[/]", soft_wrap=True)
