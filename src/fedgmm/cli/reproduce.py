"""``fedgmm reproduce``: the experiments of the paper."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fedgmm.cli.output import screen, working


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


_ON_IMAGES = (
    Experiment.CLASSIFICATION,
    Experiment.UNSEEN,
    Experiment.NOVELTY,
    Experiment.SENSITIVITY,
    Experiment.EMBEDDINGS,
)
_SIZES = {"clients", "seeds", "rounds", "tuning_rounds", "methods", "device"}
_OF_IMAGES = {
    "dataset",
    "track",
    "learner",
    "encoder",
    "encoder_dtype",
    "image_size",
    "components",
    "learners",
    "pretrained",
    "fraction",
    "data_dir",
    "download",
    "cache",
}
_OPTIONS = {
    Experiment.SYNTHETIC: {*_SIZES, "rows"},
    Experiment.NON_GAUSSIAN: {*_SIZES, "rows"},
    Experiment.ILLUSTRATION: set[str](),
    Experiment.CLASSIFICATION: {*_SIZES, *_OF_IMAGES, "shift"},
    Experiment.UNSEEN: {*_SIZES, *_OF_IMAGES, "shift"},
    Experiment.NOVELTY: {*_SIZES, *_OF_IMAGES},  # its shifts are separate settings
    Experiment.SENSITIVITY: {*_SIZES, *_OF_IMAGES, "shift"},
    Experiment.EMBEDDINGS: {*_SIZES, *_OF_IMAGES} - {"track", "pretrained"},
    Experiment.MEMBERSHIP: {"clients", "rows", "rounds"},
    Experiment.PRIVACY: {"clients", "rows", "seeds", "dataset"},
}
"""Options of each experiment, besides the folder for its results."""


def reproduce(
    ctx: typer.Context,
    experiment: Annotated[Experiment, typer.Argument(help="The experiment.")],
    out: Annotated[Path, typer.Option(help="Folder for JSON, Markdown and figures.")] = Path(
        "results"
    ),
    clients: Annotated[
        int | None, typer.Option(min=3, help="Number of clients. Default: as in the paper.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=10, help="Synthetic data: rows per client. Default: 3000.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds. Default: 3, or 1 for sensitivity.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds. Default: 100, or 200 for images.")
    ] = None,
    tuning_rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds of the short runs that compare learning rates."),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Methods, separated by commas. Default: all.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="femnist, cifar10, cifar100, mnist; embeddings: reviews, too; privacy: synthetic, digits."
        ),
    ] = None,
    track: Annotated[
        str | None,
        typer.Option(help="Images: paper (the paper's protocol) or tuned (every method tuned)."),
    ] = None,
    learner: Annotated[
        str | None, typer.Option(help="Images: linear, mlp, cnn or mobilenet.")
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help="Images: input of the Gaussians, resnet18 or pixels.")
    ] = None,
    encoder_dtype: Annotated[
        str | None, typer.Option(help="Images: type of the encoder, float32, bfloat16 or auto.")
    ] = None,
    image_size: Annotated[
        int | None,
        typer.Option(min=8, help="Images: width and height for the encoder. Default: 224."),
    ] = None,
    components: Annotated[
        int | None,
        typer.Option(min=1, help="Images: number of Gaussians. Default: 3; novelty chooses it."),
    ] = None,
    learners: Annotated[
        int | None, typer.Option(min=1, help="Images: number of learners. Default: 3.")
    ] = None,
    pretrained: Annotated[
        Path | None, typer.Option(help="Images: file with ImageNet weights for MobileNet-V2.")
    ] = None,
    shift: Annotated[
        bool | None,
        typer.Option(help="Images: transform and relabel half of them. Default: --shift."),
    ] = None,
    fraction: Annotated[
        float | None, typer.Option(help="Images: share of the images to use.")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(envvar="FEDGMM_DATA", help="Folder of the image data sets and weights."),
    ] = None,
    download: Annotated[
        bool,
        typer.Option("--download", help="Images: download missing data from its official source."),
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option(help="Images: folder for encoded images. Default: OUT/encoded."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto.")] = None,
) -> None:
    """Repeat an experiment of the paper and write its table next to the paper's numbers.

    An interrupted experiment on images is resumed when the command is run again.

    Example: fedgmm reproduce synthetic --clients 30 --rows 600 --seeds 1

    Example: fedgmm reproduce classification --dataset femnist --track tuned --data-dir data
    """
    from rich.markdown import Markdown

    _check_options(ctx, experiment)
    common = {
        "clients": clients,
        "seeds": None if seeds is None else tuple(range(seeds)),
        "rounds": rounds,
        "tuning_rounds": tuning_rounds,
        "methods": None if methods is None else tuple(m.strip() for m in methods.split(",")),
        "device": device,
    }
    images = {
        "dataset": dataset,
        "track": track,
        "learner": learner,
        "encoder": encoder,
        "encoder_dtype": encoder_dtype,
        "image_size": image_size,
        "components": components,
        "learners": learners,
        "pretrained": None if pretrained is None else str(pretrained),
        "shift": shift,
        "fraction": fraction,
    }
    with working() as notify:
        if experiment in _ON_IMAGES:
            from fedgmm.experiments.study import StudyContext

            make, run = _study(experiment)
            given = _given({**common, **images})
            if experiment is Experiment.NOVELTY and components is not None:
                given[
                    "component_choices"
                ] = ()  # the number is given, so novelty does not choose it
            study = make(**given)
            if download:
                from fedgmm.data.images.files import load_images

                notify(f"looking for {study.dataset}")
                load_images(study.dataset, data_dir, download=True)
            if cache is None and study.encoder != "pixels":  # pixels need no cache
                cache = out / "encoded"
            run(out, study, StudyContext(data_dir, cache, notify))
            table = out / f"{experiment.value}-{study.label}.md"
        else:
            _without_images(
                experiment, out, _given({**common, "rows": rows, "dataset": dataset}), notify
            )
            table = out / f"{experiment.value}.md"
    console = screen()
    console.print(Markdown(table.read_text(encoding="utf-8")))
    console.print(f"Results: [bold]{out}[/]", soft_wrap=True, highlight=False)


def _check_options(ctx: typer.Context, experiment: Experiment) -> None:
    """Raise if an option was given that the experiment does not have."""
    for option in ctx.command.params:
        name = option.name or ""
        if name in ("experiment", "out") or name in _OPTIONS[experiment]:
            continue
        # environment variables may be meant for other commands
        source = ctx.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        off = ctx.params[name] is False
        flag = (option.secondary_opts if off else option.opts)[0]
        takers = ", ".join(other.value for other in Experiment if name in _OPTIONS[other])
        raise typer.BadParameter(f"{flag} is for {takers}, not for {experiment.value}.")


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given; the study has defaults for the others."""
    return {name: value for name, value in values.items() if value is not None}


def _study(experiment: Experiment) -> tuple[Any, Any]:
    """Return the class of a study on images and the function that runs it."""
    match experiment:
        case Experiment.CLASSIFICATION:
            from fedgmm.experiments.paper.classification import reproduce_classification
            from fedgmm.experiments.settings import ImageStudy

            return ImageStudy, reproduce_classification
        case Experiment.UNSEEN:
            from fedgmm.experiments.paper.unseen import UnseenStudy, reproduce_unseen

            return UnseenStudy, reproduce_unseen
        case Experiment.EMBEDDINGS:
            from fedgmm.experiments.embeddings import EmbeddingStudy, reproduce_embeddings

            return EmbeddingStudy, reproduce_embeddings
        case Experiment.NOVELTY:
            from fedgmm.experiments.paper.novelty import reproduce_novelty
            from fedgmm.experiments.paper.novelty_setup import NoveltyStudy

            return NoveltyStudy, reproduce_novelty
        case _:
            from fedgmm.experiments.paper.sensitivity import SensitivityStudy, reproduce_sensitivity

            return SensitivityStudy, reproduce_sensitivity


def _without_images(experiment: Experiment, out: Path, given: dict[str, Any], notify: Any) -> None:
    """Run an experiment without images."""
    if experiment is Experiment.ILLUSTRATION:
        from fedgmm.experiments.paper.illustration import reproduce_illustration

        reproduce_illustration(out)
        return
    if experiment is Experiment.PRIVACY:
        from fedgmm.experiments.privacy import PrivacyStudy, reproduce_privacy

        reproduce_privacy(out, PrivacyStudy(**given), notify)
        return
    if experiment is Experiment.MEMBERSHIP:
        from fedgmm.experiments.membership import MembershipStudy, reproduce_membership

        reproduce_membership(out, MembershipStudy(**given), notify)
        return
    from fedgmm.experiments.paper.synthetic import Size, reproduce_gaussian, reproduce_non_gaussian

    if experiment is Experiment.SYNTHETIC:
        reproduce_gaussian(out, Size(**given), notify)
    else:
        reproduce_non_gaussian(out, Size(**{"clients": 30, **given}), notify)
