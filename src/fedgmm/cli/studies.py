"""Commands that demonstrate, compare and tune methods."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgmm.cli.output import (
    JsonFlag,
    RoundsBar,
    escaped,
    print_json,
    print_notes,
    screen,
    working,
)
from fedgmm.cli.runs import (
    Categorical,
    ClientColumn,
    DateFormat,
    Ids,
    Ignore,
    MissingValues,
    Names,
    NoHeader,
    Task,
    table_options,
)
from fedgmm.wording import counted

if TYPE_CHECKING:
    from rich.console import Console

    from fedgmm.experiments.demo import DemoResult


class DataSet(StrEnum):
    """Built-in data sets."""

    DIGITS = "digits"
    SYNTHETIC = "synthetic"


SeedOption = Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")]


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("demo"),
    clients: Annotated[int, typer.Option(min=2, max=1000, help="Clients of the first part.")] = 8,
    seed: SeedOption = 0,
    write_files: Annotated[
        Path | None,
        typer.Option(help="Only write example files of a hospital network into this folder."),
    ] = None,
) -> None:
    """Show densities, a comparison of methods, new clients and novel samples, in under a minute.

    Nothing is downloaded.

    Example: fedgmm demo --out demo

    Example: fedgmm demo --write-files hospitals
    """
    if write_files is not None:
        from fedgmm.data.examples import write_hospitals

        for path in write_hospitals(write_files, seed):
            typer.echo(str(path))
        return
    from rich.console import Console

    out.mkdir(parents=True, exist_ok=True)  # fail before any work
    console = Console()
    console.rule("1. A density for clients that do not share their rows")
    result = _run_demo_with_progress(clients, seed)

    from fedgmm.experiments.demo import plot_demo

    _print_demo(result, plot_demo(result, out / "demo.png"), console)
    _run_story(seed, out, console)


def _run_story(seed: int, out: Path, console: Console) -> None:
    """Run and print parts 2 to 4 of the demo."""
    from fedgmm.experiments.story import plot_story, run_story
    from fedgmm.experiments.tables import comparison_table

    with console.status("three federations") as status:
        story = run_story(seed, lambda line: status.update(line))
    console.rule("2. Methods compared, each tuned on validation rows")
    for ranking, title, bayes in (
        (story.synthetic, "Synthetic mixture", story.bayes),
        (story.digits, "Handwritten digits, half of them changed", None),
    ):
        console.print(comparison_table(ranking, title, bayes))
        console.print(f"[bold]{ranking.headline()}[/]", highlight=False)
    new, offices, novelty = story.newcomer, story.offices, story.novelty
    console.rule("3. Clients that did not take part in training")
    labelled, unlabelled, alone = offices.at(5)
    console.print(
        f"{offices.offices} new offices give the same digits other labels. With the federation's weights "
        f"{100 * offices.before:.0f} % are right; with weights from 5 labelled images "
        f"[bold]{100 * labelled:.0f} %[/], learned in {offices.milliseconds:.0f} ms; from 5 images "
        f"without labels {100 * unlabelled:.0f} %, because images do not show who labels them. A model of "
        f"their own from the 5 images reaches {100 * alone:.0f} %."
    )
    console.print(
        "Where inputs show the kind of a row, weights matter little: on the digits of part 2 a new client "
        f"has {100 * new.before:.1f} % with the federation's weights, {100 * new.labelled:.1f} % with its "
        f"own from {counted(new.rows, 'labelled row')}."
    )
    console.rule("4. Samples that no client has seen")
    console.print(
        f"log P(x) separates them from known ones with AUROC [bold]{novelty.metrics.auroc:.3f}[/]; at a "
        f"nominal false alarm rate of {100 * novelty.asked:.0f} % (measured: "
        f"{100 * novelty.false_alarms:.1f} %) it finds {100 * novelty.found:.0f} %."
    )
    picture = plot_story(story, out / "story.png")
    console.print(f"Picture: [bold]{picture}[/]", soft_wrap=True)


def compare(
    ctx: typer.Context,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files of clients, a run folder, or the built-in digits or synthetic data."
        ),
    ] = None,
    label: Annotated[str | None, typer.Option(help="The column to predict, for files.")] = None,
    client_column: ClientColumn = None,
    categorical: Categorical = None,
    ignore: Ignore = None,
    no_header: NoHeader = False,
    names: Names = None,
    missing_values: MissingValues = None,
    date_format: DateFormat = None,
    id_columns: Ids = None,
    task: Task = None,
    methods: Annotated[
        str | None, typer.Option(help="Methods, separated by commas. Default: all.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Largest number of rounds. Default: that of the run, or 100."),
    ] = None,
    tuning_rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds of a trial. Default: a quarter of the rounds."),
    ] = None,
    learner: Annotated[
        str | None,
        typer.Option(help="Kinds of learners, separated by commas. Default: linear,mlp."),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            min=1, help="Number of splits, 1 or at least 3; methods are tuned and trained on each."
        ),
    ] = 1,
    components: Annotated[
        int | None, typer.Option(min=1, help="Number of Gaussians. Default: as for fit.")
    ] = None,
    learners: Annotated[
        int | None, typer.Option(min=1, help="Number of learners. Default: as for fit.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of all random numbers. Default: that of the run, or 0."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for comparison.json. Default: the run folder, if given."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Tune and train several methods on the same rows and compare them on test rows.

    Every method is tried with every kind of learner; validation rows choose the learner and the
    learning rate. Differences within noise are called ties. scikit-learn on the pooled rows is shown
    for orientation. The results on a run folder are stored there and shown in its report.

    Example: fedgmm compare site_*.csv --label diagnosis --seeds 5

    Example: fedgmm compare run/ --methods local,fedavg,fedem,fedgmm

    Example: fedgmm compare digits
    """
    from fedgmm.experiments.tables import comparison_table
    from fedgmm.methods.base import TITLES
    from fedgmm.runs.comparison import LEARNERS, data_to_compare
    from fedgmm.runs.ranking import compare_splits

    chosen = [name.strip() for name in methods.split(",")] if methods else list(TITLES)
    unknown = [name for name in chosen if name not in TITLES]
    if unknown:
        raise ValueError(f"Unknown method {unknown[0]!r}; choose among {', '.join(TITLES)}.")
    kinds = [kind.strip() for kind in learner.split(",")] if learner else list(LEARNERS)
    asked = {"components": components, "learners": learners}
    sizes = {name: size for name, size in asked.items() if size is not None}
    with working(as_json) as notify:
        data = data_to_compare(
            sources or ["digits"],
            seed=seed,
            sizes=sizes,
            notify=notify,
            **{name: value for name, value in table_options(ctx).items() if name != "seed"},
        )
        if not as_json:
            screen().print(str(data.dataset), markup=False)
        ranking = compare_splits(
            data,
            chosen,
            seeds,
            learner_kinds=kinds,
            tuning_rounds=tuning_rounds,
            pooled=True,
            notify=notify,
            # with the rounds of the run, its own metrics are repeated
            rounds=rounds or data.options.rounds,
            device=device,
        )
    folder = out or data.home
    written = ranking.write(folder) if folder is not None else None
    if as_json:
        print_json(ranking.record())
        return
    print_notes(data.notes)
    console = screen()
    console.print(comparison_table(ranking, f"{data.title}: test rows, last round", data.bayes))
    console.print(f"[bold]{escaped(ranking.headline())}[/]", highlight=False)
    if ranking.pooled:
        console.print(
            "pooled (rows shared; for orientation): scikit-learn's logistic or ridge regression and "
            "gradient boosting on all training rows.",
            highlight=False,
        )
    if written is not None:
        console.print(f"Results: [bold]{escaped(written)}[/]", soft_wrap=True, highlight=False)


def tune(
    data: Annotated[DataSet, typer.Argument(help="The data set.")] = DataSet.DIGITS,
    method: Annotated[str, typer.Option(help="The method.")] = "fedavg",
    grid: Annotated[
        str | None,
        typer.Option(help="Learning rates, separated by commas. Default: those of the paper."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each trial.")] = 25,
    learner: Annotated[str, typer.Option(help="The kind of learners.")] = "linear",
    seed: SeedOption = 0,
    as_json: JsonFlag = False,
) -> None:
    """Choose a learning rate on validation rows; test rows are not used.

    While the best rate is at an edge of the grid, the next one beyond it is tried, too.

    Example: fedgmm tune digits --method fedprox
    """
    from fedgmm.experiments.tables import tuning_table
    from fedgmm.runs.comparison import PAPER_GRID, built_in_data
    from fedgmm.runs.comparison import tune as tune_method

    rates = _rates(grid) if grid else PAPER_GRID
    dataset, _ = built_in_data(data.value, seed)
    with working(as_json) as notify:
        found = tune_method(
            dataset,
            method,
            grid=rates,
            rounds=rounds,
            notify=lambda line: notify(f"{method}: {line}"),
            learner=learner,
            solver="sgd",
            seed=seed,
        )
    if as_json:
        print_json({"lr": found.best, "scores": found.record()})
        return
    screen().print(tuning_table(found, f"{method} on {data.value}"))


def _rates(text: str) -> tuple[float, ...]:
    """Parse learning rates."""
    try:
        return tuple(float(rate) for rate in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"--grid takes learning rates separated by commas, got {text!r}."
        ) from None


def _run_demo_with_progress(clients: int, seed: int) -> DemoResult:
    """Run part 1 of the demo with a progress bar."""
    with RoundsBar(quiet=False) as bar:
        from fedgmm.experiments.demo import MOST_ROUNDS, run_demo
        from fedgmm.methods.base import RoundInfo

        def show(number: int, info: RoundInfo) -> None:
            bar.show({"round": number, "log_likelihood": info.log_likelihood})

        bar.begin(MOST_ROUNDS)
        return run_demo(clients, seed, on_round=[show])


def _print_demo(result: DemoResult, picture: Path, console: Console) -> None:
    """Print part 1 of the demo."""
    from fedgmm.experiments.demo import demo_table

    gain = result.log_likelihood - result.common_log_likelihood
    console.print(demo_table(result))
    console.print(
        "The same model without pooling rows: with common weights, the federated fit differs from "
        f"scikit-learn on the pooled rows by at most [bold]{result.pooled_difference:.1e}[/] in "
        "log-likelihood per row, in every round."
    )
    console.print(
        f"Personal weights: log-likelihood of held-out rows {result.log_likelihood:.3f} per row, with "
        f"common weights {result.common_log_likelihood:.3f}: [bold]{gain:+.3f}[/]."
    )
    console.print(f"Picture: [bold]{picture}[/]", soft_wrap=True)
