"""The command that turns images or texts into tables of vectors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgmm.cli.output import JsonFlag, escaped, print_json, print_notes, screen, sidelines
from fedgmm.wording import counted

if TYPE_CHECKING:
    from fedgmm.data.embed import EmbeddedSite

EncoderName = Annotated[
    str | None,
    typer.Option(
        "--encoder",
        help="resnet18, pixels, timm:NAME, wordllama, or sentence-transformers:NAME_OR_FOLDER. Default: "
        "resnet18 for images, wordllama for texts.",
    ),
]
TextColumn = Annotated[str | None, typer.Option("--text", help="Column of texts of the tables.")]
ImageColumn = Annotated[
    str | None,
    typer.Option(help="Column of the tables that names files of images, relative to the table."),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        help="File of the network's weights. Default for resnet18: "
        "weights/resnet18_imagenet.safetensors in the folder that FEDGMM_DATA names."
    ),
]
Size = Annotated[
    int | None, typer.Option(min=8, help="Side in pixels that the network sees. Default: 224.")
]
Download = Annotated[
    bool, typer.Option("--download", help="Allow the download of weights that are not there.")
]


def embedding_options(
    images: bool,
    text: str | None,
    encoder: str | None,
    image_column: str | None,
    weights: Path | None,
    size: int | None,
    download: bool,
) -> dict[str, Any] | None:
    """Return the options that were given as those of an ``Embedding``; ``None`` if nothing is embedded."""
    if not (images or image_column is not None or text is not None):
        return None
    given = {
        "encoder": encoder or ("resnet18" if text is None else "wordllama"),
        "weights": None if weights is None else str(weights.resolve()),
        "size": size,
        "text": text,
        "image": image_column,
        "download": download or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def embed(
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="One source per site: a folder of images with one folder per class, a table, or an npz "
            "file with an array images."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for one Parquet file per site.")],
    encoder: EncoderName = None,
    text: TextColumn = None,
    image_column: ImageColumn = None,
    weights: Weights = None,
    size: Size = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    download: Download = False,
    as_json: JsonFlag = False,
) -> None:
    """Turn images or texts into vectors with a frozen encoder, once.

    Every other command takes the Parquet files. If the command is interrupted, run it again: batches
    that are finished are used.

    Example: fedgmm embed sites/* --out vectors --weights resnet18.safetensors

    Example: fedgmm embed notes_*.csv --text note --out vectors
    """
    from fedgmm.data.encoders import encoder as encoder_named

    chosen = encoder or ("wordllama" if text is not None else "resnet18")
    made = encoder_named(chosen, weights=weights, size=size, device=device, download=download)
    found = embed_sources(sources, out, made, text, image_column, quiet=as_json)
    if as_json:
        print_json([vars(site) for site in found])
        return
    console = screen()
    for site in found:
        console.print(f"{escaped(site.name)}: {counted(site.rows, 'row')} in {escaped(site.path)}")


def embed_sources(
    sources: list[Path],
    out: Path,
    encoder: Any,
    text: str | None,
    image_column: str | None,
    quiet: bool = False,
) -> list[EmbeddedSite]:
    """Embed every source with a progress bar, and print notes about rows that were skipped."""
    from rich.progress import Progress

    from fedgmm.data.embed import embed

    found = []
    console = sidelines()
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def show(site: str, done: int, total: int) -> None:
            if site not in tasks:
                tasks[site] = bar.add_task(escaped(site), total=total)
            bar.update(tasks[site], completed=done)

        for source in sources:
            site = embed(source, out, encoder, text=text, image=image_column, progress=show)
            found.append(site)
    print_notes([f"{site.name}: skipped {line}." for site in found for line in site.skipped])
    return found
