"""Commands that demonstrate, compare and tune methods, and repeat the paper's experiments."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fedgmm.cli.options import ColumnOptions, comma_separated, given
from fedgmm.cli.output import (
    JsonFlag,
    RoundsBar,
    escaped,
    print_json,
    print_notes,
    print_place,
    screen,
    working,
)
from fedgmm.wording import counted

if TYPE_CHECKING:
    from rich.console import Console

    from fedgmm.methods.base import RoundInfo


class DataSet(StrEnum):
    """Built-in data sets."""

    DIGITS = "digits"
    SYNTHETIC = "synthetic"


SeedOption = Annotated[int, Option(min=0, help="Seed of all random numbers.")]


def demo(
    out: Path = Path("demo"),
    clients: Annotated[int, Option(min=2, max=1000)] = 8,
    seed: SeedOption = 0,
    write_files: Path | None = None,
) -> None:
    """Show densities, a comparison of methods, new clients and novel samples, in under a minute.

    Nothing is downloaded.

    Example: fedgmm demo --out demo

    Example: fedgmm demo --write-files hospitals

    Options:
        out: Folder for the pictures.
        clients: Clients of the first part.
        write_files: Only write example files of a hospital network into this folder.
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
    with RoundsBar(quiet=False) as bar:
        from fedgmm.cli.run_tables import demo_table
        from fedgmm.experiments.demo import MOST_ROUNDS, plot_demo, run_demo

        def show(number: int, info: RoundInfo) -> None:
            bar.show({"round": number, "log_likelihood": info.log_likelihood})

        bar.begin(MOST_ROUNDS)
        result = run_demo(clients, seed, on_round=[show])
    console.print(demo_table(result))
    gain = result.log_likelihood - result.common_log_likelihood
    console.print(
        "The same model without pooling rows: with common weights, the federated fit differs from "
        f"scikit-learn on the pooled rows by at most [bold]{result.pooled_difference:.1e}[/] in "
        "log-likelihood per row, in every round."
    )
    console.print(
        f"Personal weights: log-likelihood of held-out rows {result.log_likelihood:.3f} per row, with "
        f"common weights {result.common_log_likelihood:.3f}: [bold]{gain:+.3f}[/]."
    )
    print_place("Picture", plot_demo(result, out / "demo.png"))
    _run_story(seed, out, console)


def _run_story(seed: int, out: Path, console: Console) -> None:
    """Run and print parts 2 to 4 of the demo."""
    from fedgmm.cli.run_tables import comparison_table
    from fedgmm.experiments.story import plot_story, run_story

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
    print_place("Picture", plot_story(story, out / "story.png"))


def compare(
    ctx: typer.Context,
    sources: Annotated[list[str] | None, Argument()] = None,
    label: str | None = None,
    *,
    columns: ColumnOptions,
    methods: str | None = None,
    rounds: Annotated[int | None, Option(min=1)] = None,
    tuning_rounds: Annotated[int | None, Option(min=1)] = None,
    learner: str | None = None,
    seeds: Annotated[int, Option(min=1)] = 1,
    components: Annotated[int | None, Option(min=1)] = None,
    learners: Annotated[int | None, Option(min=1)] = None,
    seed: Annotated[int | None, Option(min=0)] = None,
    device: str = "cpu",
    out: Path | None = None,
    as_json: JsonFlag = False,
) -> None:
    """Tune and train several methods on the same rows and compare them on test rows.

    Every method is tried with every kind of learner; validation rows choose the learner and the
    learning rate. Differences within noise are called ties. scikit-learn on the pooled rows is shown
    for orientation. The results on a run folder are stored there and shown in its report.

    Example: fedgmm compare site_*.csv --label diagnosis --seeds 5

    Example: fedgmm compare run/ --methods local,fedavg,fedem,fedgmm

    Example: fedgmm compare digits

    Options:
        sources: Files of clients, a run folder, or the built-in digits or synthetic data.
        label: The column to predict, for files.
        methods: Methods, separated by commas. Default: all.
        rounds: Largest number of rounds. Default: that of the run, or 100.
        tuning_rounds: Rounds of a trial. Default: a quarter of the rounds.
        learner: Kinds of learners, separated by commas. Default: linear,mlp.
        seeds: Number of splits, 1 or at least 3; methods are tuned and trained on each.
        components: Number of Gaussians. Default: as for fit.
        learners: Number of learners. Default: as for fit.
        seed: Seed of all random numbers. Default: that of the run, or 0.
        device: cpu, cuda or auto.
        out: Folder for comparison.json. Default: the run folder, if given.
    """
    from fedgmm.cli.run_tables import comparison_table
    from fedgmm.methods.base import TITLES
    from fedgmm.runs.comparison import LEARNERS, data_to_compare
    from fedgmm.runs.ranking import compare_splits

    chosen = comma_separated(methods) if methods else list(TITLES)
    unknown = [name for name in chosen if name not in TITLES]
    if unknown:
        raise ValueError(f"Unknown method {unknown[0]!r}; choose among {', '.join(TITLES)}.")
    kinds = comma_separated(learner) if learner else list(LEARNERS)
    with working(as_json) as notify:
        data = data_to_compare(
            sources or ["digits"],
            seed=seed,
            sizes=given(ctx.params, "components", "learners"),
            notify=notify,
            **columns.given(),
            **given(ctx.params, "label"),
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
        print_place("Results", written)


def tune(
    data: Annotated[DataSet, Argument()] = DataSet.DIGITS,
    method: str = "fedavg",
    grid: str | None = None,
    rounds: Annotated[int, Option(min=1)] = 25,
    learner: str = "linear",
    seed: SeedOption = 0,
    as_json: JsonFlag = False,
) -> None:
    """Choose a learning rate on validation rows; test rows are not used.

    While the best rate is at an edge of the grid, the next one beyond it is tried, too.

    Example: fedgmm tune digits --method fedprox

    Options:
        data: The data set.
        method: The method.
        grid: Learning rates, separated by commas. Default: those of the paper.
        rounds: Rounds of each trial.
        learner: The kind of learners.
    """
    from fedgmm.cli.run_tables import tuning_table
    from fedgmm.runs.comparison import PAPER_GRID, built_in_data
    from fedgmm.runs.comparison import tune as tune_method
    from fedgmm.training.options import TrainingOptions

    try:
        rates = tuple(map(float, grid.split(","))) if grid else PAPER_GRID
    except ValueError:
        raise typer.BadParameter(
            f"--grid takes learning rates separated by commas, got {grid!r}."
        ) from None
    dataset, _ = built_in_data(data.value, seed)
    with working(as_json) as notify:
        found = tune_method(
            dataset,
            TrainingOptions(algorithm=method, learner=learner, solver="sgd", seed=seed),
            grid=rates,
            rounds=rounds,
            notify=lambda line: notify(f"{method}: {line}"),
        )
    if as_json:
        print_json({"lr": found.best, "scores": found.record()})
        return
    screen().print(tuning_table(found, f"{method} on {data.value}"))


class Experiment(StrEnum):
    """Experiments of the paper, membership inference, and accuracy against the budget of privacy."""

    SYNTHETIC = "synthetic"
    NON_GAUSSIAN = "nongaussian"
    ILLUSTRATION = "illustration"
    CLASSIFICATION = "classification"
    UNSEEN = "unseen"
    NOVELTY = "novelty"
    SENSITIVITY = "sensitivity"
    MEMBERSHIP = "membership"
    PRIVACY = "privacy"
    EMBEDDINGS = "embeddings"


_SIZES = {"clients", "seeds", "rounds", "tuning_rounds", "methods", "device"}
_FILES = {"data_dir", "download", "cache"}
_IMAGES = _SIZES | _FILES | {
    "dataset", "track", "learner", "encoder", "encoder_dtype", "image_size", "components", "learners",
    "pretrained", "fraction",
}  # fmt: skip
_OPTIONS = {
    Experiment.SYNTHETIC: {*_SIZES, "rows"},
    Experiment.NON_GAUSSIAN: {*_SIZES, "rows"},
    Experiment.ILLUSTRATION: set[str](),
    Experiment.CLASSIFICATION: {*_IMAGES, "shift"},
    Experiment.UNSEEN: {*_IMAGES, "shift"},
    Experiment.NOVELTY: _IMAGES,  # its shifts are separate settings
    Experiment.SENSITIVITY: {*_IMAGES, "shift"},
    Experiment.EMBEDDINGS: _IMAGES - {"track", "pretrained"},
    Experiment.MEMBERSHIP: {"clients", "rows", "rounds"},
    Experiment.PRIVACY: {"clients", "rows", "seeds", "dataset"},
}
"""Options of each experiment, besides the folder for its results."""

_CODE = {
    Experiment.SYNTHETIC: ("paper.synthetic", "Size", "reproduce_gaussian"),
    Experiment.NON_GAUSSIAN: ("paper.synthetic", "Size", "reproduce_non_gaussian"),
    Experiment.ILLUSTRATION: ("paper.synthetic", "", "reproduce_illustration"),
    Experiment.CLASSIFICATION: ("paper.classification", "ImageStudy", "reproduce_classification"),
    Experiment.UNSEEN: ("paper.unseen", "UnseenStudy", "reproduce_unseen"),
    Experiment.NOVELTY: ("paper.novelty", "NoveltyStudy", "reproduce_novelty"),
    Experiment.SENSITIVITY: ("paper.sensitivity", "SensitivityStudy", "reproduce_sensitivity"),
    Experiment.EMBEDDINGS: ("embeddings", "EmbeddingStudy", "reproduce_embeddings"),
    Experiment.MEMBERSHIP: ("membership", "MembershipStudy", "reproduce_membership"),
    Experiment.PRIVACY: ("privacy", "PrivacyStudy", "reproduce_privacy"),
}
"""Module, class of settings and function of each experiment; an empty name means no settings."""


def reproduce(
    ctx: typer.Context,
    experiment: Experiment,
    out: Path = Path("results"),
    clients: Annotated[int | None, Option(min=3)] = None,
    rows: Annotated[int | None, Option(min=10)] = None,
    seeds: Annotated[int | None, Option(min=1)] = None,
    rounds: Annotated[int | None, Option(min=1)] = None,
    tuning_rounds: Annotated[int | None, Option(min=1)] = None,
    methods: str | None = None,
    dataset: str | None = None,
    track: str | None = None,
    learner: str | None = None,
    encoder: str | None = None,
    encoder_dtype: str | None = None,
    image_size: Annotated[int | None, Option(min=8)] = None,
    components: Annotated[int | None, Option(min=1)] = None,
    learners: Annotated[int | None, Option(min=1)] = None,
    pretrained: Path | None = None,
    shift: bool | None = None,
    fraction: float | None = None,
    data_dir: Annotated[Path | None, Option(envvar="FEDGMM_DATA")] = None,
    download: Annotated[bool, Option("--download")] = False,
    cache: Path | None = None,
    device: str | None = None,
) -> None:
    """Repeat an experiment of the paper and write its table next to the paper's numbers.

    An interrupted experiment on images is resumed when the command is run again.

    Example: fedgmm reproduce synthetic --clients 30 --rows 600 --seeds 1

    Example: fedgmm reproduce classification --dataset femnist --track tuned --data-dir data

    Options:
        experiment: The experiment.
        out: Folder for JSON, Markdown and figures.
        clients: Number of clients. Default: as in the paper.
        rows: Synthetic data: rows per client. Default: 3000.
        seeds: Number of seeds. Default: 3, or 1 for sensitivity.
        rounds: Number of rounds. Default: 100, or 200 for images.
        tuning_rounds: Rounds of the short runs that compare learning rates.
        methods: Methods, separated by commas. Default: all.
        dataset: femnist, cifar10, cifar100, mnist; embeddings: reviews, too; privacy: synthetic, digits.
        track: Images: paper (the paper's protocol) or tuned (every method tuned).
        learner: Images: linear, mlp, cnn or mobilenet.
        encoder: Images: input of the Gaussians, resnet18 or pixels.
        encoder_dtype: Images: type of the encoder's numbers, float32, bfloat16 or auto.
        image_size: Images: width and height for the encoder. Default: 224.
        components: Images: number of Gaussians. Default: 3; novelty chooses it.
        learners: Images: number of learners. Default: 3.
        pretrained: Images: file with ImageNet weights for MobileNet-V2.
        shift: Images: transform and relabel half of them. Default: --shift.
        fraction: Images: share of the images to use.
        data_dir: Folder of the image data sets and weights.
        download: Images: download missing data from its official source.
        cache: Images: folder for encoded images. Default: OUT/encoded.
        device: cpu, cuda or auto.
    """
    from importlib import import_module

    from rich.markdown import Markdown

    _check_options(ctx, experiment)
    settings = given(ctx.params, *_OPTIONS[experiment] - _FILES)
    if shift is not None:
        settings["shift"] = shift
    if seeds is not None:
        settings["seeds"] = tuple(range(seeds))
    if methods is not None:
        settings["methods"] = tuple(comma_separated(methods))
    if experiment is Experiment.NON_GAUSSIAN:
        settings.setdefault("clients", 30)
    if experiment is Experiment.NOVELTY and components is not None:
        settings["component_choices"] = ()  # the number is given, so novelty does not choose it
    table = out / f"{experiment.value}.md"
    with working() as notify:
        name, settings_class, function = _CODE[experiment]
        code = import_module(f"fedgmm.experiments.{name}")
        study: Any = getattr(code, settings_class)(**settings) if settings_class else None
        context: Any = notify
        if "cache" in _OPTIONS[experiment]:
            from fedgmm.experiments.study import StudyContext

            if download:
                from fedgmm.data.images.files import load_images

                notify(f"looking for {study.dataset}")
                load_images(study.dataset, data_dir, download=True)
            if cache is None and study.encoder != "pixels":  # pixels need no cache
                cache = out / "encoded"
            context = StudyContext(data_dir, cache, notify)
            table = out / f"{experiment.value}-{study.label}.md"
        getattr(code, function)(out, *([] if study is None else [study, context]))
    screen().print(Markdown(table.read_text(encoding="utf-8")))
    print_place("Results", out)


def _check_options(ctx: typer.Context, experiment: Experiment) -> None:
    """Raise if an option was given that the experiment does not have."""
    for option in ctx.command.params:
        name = option.name or ""
        # environment variables may be meant for other commands
        source = ctx.get_parameter_source(name)
        typed = source is not None and source.name == "COMMANDLINE"
        if not typed or name in {"experiment", "out", *_OPTIONS[experiment]}:
            continue
        flag = (option.secondary_opts if ctx.params[name] is False else option.opts)[0]
        takers = ", ".join(other.value for other in Experiment if name in _OPTIONS[other])
        raise typer.BadParameter(f"{flag} is for {takers}, not for {experiment.value}.")
