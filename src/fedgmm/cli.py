"""The command line: parses, calls, prints. What is heavy is imported inside the commands."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer.core import TyperGroup

from fedgmm import __version__

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from fedgmm.data.dataset import FederatedDataset
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


class DataSet(StrEnum):
    """Data that need no file."""

    DIGITS = "digits"
    SYNTHETIC = "synthetic"


class Experiment(StrEnum):
    """What can be reproduced."""

    SYNTHETIC = "synthetic"
    NON_GAUSSIAN = "nongaussian"
    ILLUSTRATION = "illustration"


SeedOption = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("demo"),
    clients: Annotated[int, typer.Option(min=2, max=1000, help="Clients of the first act.")] = 8,
    seed: SeedOption = 0,
) -> None:
    """Show the whole story in under a minute: densities, methods, a new client, novel samples.

    Nothing is downloaded. Example: fedgmm demo --out demo
    """
    from rich.console import Console

    out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made is told before any work
    console = Console()
    console.rule("1. A density for clients that do not pool their rows")
    result = _run_demo_with_progress(clients, seed, console)

    from fedgmm.report.plots import plot_demo

    _print_demo(result, plot_demo(result, out / "demo.png"), console)
    _run_story(seed, out, console)


def _run_story(seed: int, out: Path, console: Console) -> None:
    from fedgmm.experiments.story import tell_story
    from fedgmm.report.story import plot_story
    from fedgmm.report.tables import comparison_table

    with console.status("two federations") as status:
        story = tell_story(seed, _teller(status))
    console.rule("2. Methods compared, each tuned on validation rows")
    console.print(comparison_table(story.synthetic, "Synthetic mixture", story.bayes))
    console.print(comparison_table(story.digits, "Handwritten digits, half of them changed"))
    new, novelty = story.newcomer, story.novelty
    console.rule("3. A client that was not there in training")
    console.print(
        f"Its weights, learned from {new.rows} rows in [bold]{new.milliseconds:.1f} ms[/]: accuracy "
        f"{100 * new.labelled:.1f} % with labels, {100 * new.unlabelled:.1f} % without, "
        f"{100 * new.before:.1f} % with the federation's weights."
    )
    console.rule("4. Samples that nobody has seen")
    console.print(
        f"log P(x) tells them from known ones with AUROC [bold]{novelty.metrics.auroc:.3f}[/]; at "
        f"{100 * novelty.asked:.0f} % false alarms asked ({100 * novelty.false_alarms:.1f} % seen) "
        f"it finds {100 * novelty.found:.0f} %."
    )
    picture = plot_story(story, out / "story.png")
    console.print(f"Picture: [bold]{picture}[/]", soft_wrap=True)


@app.command()
def compare(
    data: Annotated[DataSet, typer.Argument(help="Which data.")] = DataSet.DIGITS,
    methods: Annotated[
        str | None, typer.Option(help="Methods, separated by commas; all by default.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Most rounds of the training.")] = 50,
    tuning_rounds: Annotated[int, typer.Option(min=1, help="Rounds of each trial.")] = 10,
    components: Annotated[int, typer.Option(min=1, help="Gaussians.")] = 3,
    learners: Annotated[int, typer.Option(min=1, help="Learners.")] = 3,
    seed: SeedOption = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    json_file: JsonOption = None,
) -> None:
    """Train several methods on one data set, tuned alike, and compare them on test rows.

    Example: fedgmm compare digits --methods fedavg,fedem,fedgmm
    """
    import json

    from rich.console import Console

    from fedgmm.experiments.comparison import compare as compare_methods
    from fedgmm.experiments.results import TITLES
    from fedgmm.report.tables import comparison_table

    chosen = [name.strip() for name in methods.split(",")] if methods else list(TITLES)
    unknown = [name for name in chosen if name not in TITLES]
    if unknown:
        raise ValueError(f"Unknown method {unknown[0]!r}; choose among {', '.join(TITLES)}.")
    console = Console()
    dataset, bayes = _data_set(data, seed)
    console.print(str(dataset))
    with console.status("starting") as status:
        comparison = compare_methods(
            dataset,
            chosen,
            tuning_rounds=tuning_rounds,
            tell=_teller(status),
            rounds=rounds,
            components=components,
            learners=learners,
            seed=seed,
            device=device,
        )
    console.print(comparison_table(comparison, f"{data.value}: test rows, last round", bayes))
    if json_file is not None:
        json_file.write_text(json.dumps(comparison.record(), indent=1) + "\n")
        console.print(f"Results: [bold]{json_file}[/]", soft_wrap=True)


@app.command()
def tune(
    data: Annotated[DataSet, typer.Argument(help="Which data.")] = DataSet.DIGITS,
    method: Annotated[str, typer.Option(help="Which method.")] = "fedavg",
    grid: Annotated[
        str | None,
        typer.Option(help="Learning rates, separated by commas; the paper's by default."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each trial.")] = 10,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Choose a learning rate on validation rows; test rows are not looked at.

    Example: fedgmm tune digits --method fedprox
    """
    import json

    from rich.console import Console

    from fedgmm.experiments.comparison import PAPER_GRID
    from fedgmm.experiments.comparison import tune as tune_method
    from fedgmm.report.tables import tuning_table

    rates = tuple(float(rate) for rate in grid.split(",")) if grid else PAPER_GRID
    console = Console()
    dataset, _ = _data_set(data, seed)
    with console.status(f"{method}: {len(rates)} learning rates"):
        found = tune_method(dataset, method, grid=rates, rounds=rounds, solver="sgd", seed=seed)
    console.print(tuning_table(found, f"{method} on {data.value}"))
    if json_file is not None:
        scores = {str(rate): score for rate, score in found.scores.items()}
        json_file.write_text(json.dumps({"lr": found.lr, "scores": scores}, indent=1) + "\n")


@app.command()
def reproduce(
    experiment: Annotated[Experiment, typer.Argument(help="Which experiment of the paper.")],
    out: Annotated[Path, typer.Option(help="Folder for JSON, Markdown and figures.")] = Path(
        "results"
    ),
    clients: Annotated[
        int | None, typer.Option(min=3, help="The paper's number by default.")
    ] = None,
    rows: Annotated[int, typer.Option(min=10, help="Rows a client.")] = 3000,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Most rounds.")] = 100,
    tuning_rounds: Annotated[int, typer.Option(min=1, help="Rounds of each trial.")] = 10,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
) -> None:
    """Repeat an experiment of the paper and write its table beside the paper's figures.

    Example: fedgmm reproduce synthetic --clients 30 --rows 600 --seeds 1
    """
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    with console.status("starting") as status:
        if experiment is Experiment.ILLUSTRATION:
            from fedgmm.experiments.illustration import reproduce_illustration

            reproduce_illustration(out)
        else:
            from fedgmm.experiments.synthetic import (
                Size,
                reproduce_gaussian,
                reproduce_non_gaussian,
            )

            gaussian = experiment is Experiment.SYNTHETIC
            size = Size(
                clients=clients or (300 if gaussian else 30),
                rows=rows,
                seeds=tuple(range(seeds)),
                rounds=rounds,
                tuning_rounds=tuning_rounds,
                device=device,
            )
            run = reproduce_gaussian if gaussian else reproduce_non_gaussian
            run(out, size, _teller(status))
    table = out / f"{experiment.value}.md"
    console.print(Markdown(table.read_text()))
    console.print(f"Results: [bold]{out}[/]", soft_wrap=True)


def _data_set(data: DataSet, seed: int) -> tuple[FederatedDataset, float | None]:
    """The data set and the accuracy nobody can beat, where it is known."""
    if data is DataSet.DIGITS:
        from fedgmm.experiments.digits import heterogeneous_digits

        return heterogeneous_digits(seed=seed).dataset, None
    from fedgmm.data.synthetic import synthetic

    federation = synthetic(60, 1000, seed=seed)
    return federation.dataset, federation.bayes_accuracy()


def _teller(status: Status) -> Callable[[str], None]:
    """Shows what is going on beside the spinner."""
    return lambda line: status.update(line)


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
