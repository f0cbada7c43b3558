"""Options that several commands have, and how the given ones become settings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer import Argument, Option

Files = Annotated[list[str], Argument(help="Files (CSV, TSV, Parquet, npz), folders or patterns.")]
RunFolderArgument = Annotated[Path, Argument(help="The run folder.", metavar="RUN")]
ClientColumn = Annotated[
    str | None,
    Option(help="Column with the client's name, if a file holds several clients."),
]
Categorical = Annotated[
    list[str] | None,
    Option(
        help="Column to treat as categories, even if it has numbers or looks like names. May be repeated."
    ),
]
Task = Annotated[
    str | None,
    Option(
        help="classification, regression, or auto: classification, with an error if the label looks "
        "like a measurement. Default: auto."
    ),
]
Ignore = Annotated[list[str] | None, Option(help="Column to leave out. May be repeated.")]
Positive = Annotated[
    str | None,
    Option(
        help="Positive class of two. Default: 1, true or yes if the other class is 0, false or no; "
        "otherwise the rarer one in training."
    ),
]
Threshold = Annotated[
    float | None,
    Option(
        help="Probability from which on the positive class is predicted, such as 0.2. Default: the most "
        "likely class."
    ),
]
CostOption = Annotated[
    str | None,
    Option(
        "--cost",
        help="Cost of a missed positive row if a false alarm costs 1, such as 10; or fn=10,fp=1; or the "
        "cost of missing a class, such as ill=10,well=1. Predicts the class of smallest expected cost.",
    ),
]
NoHeader = Annotated[
    bool,
    Option(
        "--no-header",
        help="The first line holds values; the columns are called column_1, column_2 and so on.",
    ),
]
Names = Annotated[
    list[str] | None,
    Option(help="Names of the columns of files without a header: a,b,c. May be repeated."),
]
MissingValues = Annotated[
    list[str] | None,
    Option(
        "--missing-values",
        help="Text or number that means a missing value, such as -9. May be repeated.",
    ),
]
DateFormat = Annotated[
    str | None, Option(help="How dates are written, such as %d.%m.%Y or %m/%d/%y.")
]
Ids = Annotated[
    list[str] | None,
    Option(
        "--id",
        help="Column that identifies rows. It is not an input, but predict and detect repeat it in their "
        "output. May be repeated.",
    ),
]
OutFile = Annotated[
    Path | None, Option("--out", help="CSV, TSV or Parquet file; default: standard output.")
]
EncoderName = Annotated[
    str | None,
    Option(
        "--encoder",
        help="resnet18, pixels, timm:NAME, wordllama, or sentence-transformers:NAME_OR_FOLDER. Default: "
        "resnet18 for images, wordllama for texts.",
    ),
]
TextColumn = Annotated[str | None, Option("--text", help="Column of texts of the tables.")]
ImageColumn = Annotated[
    str | None,
    Option(help="Column of the tables that names files of images, relative to the table."),
]
Weights = Annotated[
    Path | None,
    Option(
        help="File of the network's weights. Default for resnet18: "
        "weights/resnet18_imagenet.safetensors in the folder that FEDGMM_DATA names."
    ),
]
Size = Annotated[
    int | None, Option(min=8, help="Side in pixels that the network sees. Default: 224.")
]
Download = Annotated[bool, Option("--download", help="Allow the download of missing weights.")]


def with_help(command: Callable[..., None]) -> Callable[..., None]:
    """Give each option of a command the text that the docstring has about it, and return the command.

    The section ``Options`` of the docstring has one entry per option. So a command is declared like any
    other function. Options of this module, which several commands have, bring their own help.
    """
    about, _, listing = (inspect.getdoc(command) or "").partition("\n\nOptions:\n")
    hints = get_type_hints(command, include_extras=True)
    for entry in re.split(r"\n(?=    \w)", listing.rstrip()) if listing else ():
        name, text = entry.strip().split(": ", 1)
        kind, *found = (
            get_args(hints[name]) if get_origin(hints[name]) is Annotated else [hints[name]]
        )
        required = inspect.signature(command).parameters[name].default is inspect.Parameter.empty
        info = copy(found[0]) if found else Argument() if required else Option()  # as in Typer
        info.help = " ".join(text.split())
        hints[name] = Annotated[kind, info]
    command.__doc__, command.__annotations__ = about, hints
    return command


def given(ctx: typer.Context, *names: str) -> dict[str, Any]:
    """Return those of the named options that were given; the others have defaults elsewhere.

    The values are those of the parser, in which paths are texts.
    """
    return {name: ctx.params[name] for name in names if ctx.params.get(name) is not None}


def file_options(ctx: typer.Context) -> dict[str, Any]:
    """Return the options about files that were given, as fields of ``TableOptions``."""
    found = given(ctx, "no_header", "names", "missing_values", "date_format", "id_columns")
    found["names"] = [one.strip() for text in found.get("names", ()) for one in text.split(",")]
    found["id"] = found.pop("id_columns", ())
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in found.items()
        if value
    }


def table_options(ctx: typer.Context) -> dict[str, Any]:
    """Return the options about columns and files that were given, as fields of ``TableOptions``."""
    from fedgmm.data.tables.preprocessing import TableOptions

    found = given(ctx, *(one.name for one in fields(TableOptions)))
    found = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in found.items()
        if value is not False and value not in ((), [])
    }
    return found | file_options(ctx)


def embedding_options(ctx: typer.Context) -> dict[str, Any] | None:
    """Return the options that were given as those of an ``Embedding``; ``None`` if nothing is embedded."""
    found = given(ctx, "encoder", "weights", "size", "text", "image_column")
    if not (ctx.params["images"] or "text" in found or "image_column" in found):
        return None
    found.setdefault("encoder", default_encoder(found.get("text")))
    if "weights" in found:
        found["weights"] = str(Path(found["weights"]).resolve())
    if "image_column" in found:
        found["image"] = found.pop("image_column")
    return found | ({"download": True} if ctx.params["download"] else {})


def default_encoder(text: str | None) -> str:
    """Return the encoder of images, or of texts if their column is given."""
    return "resnet18" if text is None else "wordllama"
