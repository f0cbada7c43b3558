"""Options that several commands have, and the help of all options from docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from fedgmm.runs.run import FederatedRun

Files = Annotated[list[str], Argument(help="Files (CSV, TSV, Parquet, npz), folders or patterns.")]
RunFolderArgument = Annotated[Path, Argument(help="The run folder.", metavar="RUN")]
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


def given(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the values that were given, lists as tuples; the others have defaults elsewhere.

    Args:
        values: options by name, for example the parameters of a command.
        *names: the options to look at; all without any.
    """
    return {
        name: tuple(values[name]) if isinstance(values[name], list) else values[name]
        for name in names or values
        if not (values[name] is None or values[name] is False or values[name] in ([], ()))
    }


def comma_separated(text: str) -> list[str]:
    """Return the parts of a text between its commas."""
    return [part.strip() for part in text.split(",")]


@dataclass(frozen=True)
class FileOptions:
    """Format of files.

    Options:
        no_header: The first line holds values; the columns are called column_1, column_2 and so on.
        names: Names of the columns of files without a header: a,b,c. May be repeated.
        missing_values: Text or number that means a missing value, such as -9. May be repeated.
        date_format: Format of dates, such as %d.%m.%Y or %m/%d/%y.
    """

    no_header: Annotated[bool, Option("--no-header")] = False
    names: list[str] | None = None
    missing_values: list[str] | None = None
    date_format: str | None = None

    def given(self) -> dict[str, Any]:
        """Return the options that were given, as fields of ``TableOptions``."""
        names = [one for text in self.names or () for one in comma_separated(text)]
        return given({**vars(self), "names": names})


@dataclass(frozen=True)
class ColumnOptions:
    """Columns of files, and the format of the files.

    Options:
        client_column: Column with the client's name, if a file holds several clients.
        categorical: Column to treat as categories, even if it has numbers or looks like names. May be
            repeated.
        ignore: Column to leave out. May be repeated.
        task: classification, regression, or auto: classification, with an error if the label looks like a
            measurement. Default: auto.
    """

    client_column: str | None = None
    categorical: list[str] | None = None
    ignore: list[str] | None = None
    files: FileOptions = field(default_factory=FileOptions)
    id_columns: Ids = None
    task: str | None = None

    def given(self) -> dict[str, Any]:
        """Return the options that were given, as fields of ``TableOptions``."""
        found = given({**vars(self), "id": self.id_columns, "files": None, "id_columns": None})
        return found | self.files.given()


@dataclass(frozen=True)
class EmbeddingOptions:
    """Encoder of images or texts.

    Options:
        encoder: resnet18, pixels, timm:NAME, wordllama, or sentence-transformers:NAME_OR_FOLDER. Default:
            resnet18 for images, wordllama for texts.
        image_column: Column of the tables that names files of images, relative to the table.
        weights: File of the network's weights. Default for resnet18:
            weights/resnet18_imagenet.safetensors in the folder that FEDGMM_DATA names.
        size: Side in pixels that the network sees. Default: 224.
        download: Allow the download of missing weights.
    """

    encoder: str | None = None
    image_column: str | None = None
    weights: Path | None = None
    size: Annotated[int | None, Option(min=8)] = None
    download: Annotated[bool, Option("--download")] = False

    def given(self, text: str | None, images: bool) -> dict[str, Any]:
        """Return the options as fields of an ``Embedding``; nothing if nothing is embedded.

        Args:
            text: the column of texts.
            images: whether the files are images.
        """
        if not images and text is None and self.image_column is None:
            return {}
        return given(
            {
                "encoder": self.encoder or ("resnet18" if text is None else "wordllama"),
                "weights": None if self.weights is None else str(self.weights.resolve()),
                "size": self.size,
                "text": text,
                "image": self.image_column,
                "download": self.download,
            }
        )


@dataclass(frozen=True)
class DecisionOptions:
    """Choice of a class by its probability.

    Options:
        positive: Positive class of two. Default: 1, true or yes if the other class is 0, false or no;
            otherwise the rarer one in training.
        threshold: Probability from which on the positive class is predicted, such as 0.2. Default: the most
            likely class.
        cost: Cost of a missed positive row if a false alarm costs 1, such as 10; or fn=10,fp=1; or the cost
            of missing a class, such as ill=10,well=1. Predicts the class of smallest expected cost.
    """

    positive: str | None = None
    threshold: float | None = None
    cost: str | None = None

    def of(self, run: FederatedRun) -> dict[str, Any]:
        """Return the options with the classes as the run knows them."""
        chosen: dict[str, Any] = {"threshold": self.threshold}
        if self.positive is not None:
            chosen["positive"] = run.class_named(self.positive)
        if self.cost is None:
            return chosen
        costs: dict[Any, float] = {}
        for part in self.cost.split(","):
            name, equals, value = part.rpartition("=")
            try:
                number = float(value)
            except ValueError:
                raise typer.BadParameter(
                    f"--cost takes a number, or name=number separated by commas, got {part!r}."
                ) from None
            if not equals:
                return {**chosen, "cost": number}
            name = name.strip()
            costs[name if name in ("fn", "fp") else run.class_named(name)] = number
        return {**chosen, "cost": costs}


# ---------------------------------------------------------------------- functions as commands

_LISTING = "\n\nOptions:\n"


def with_help(command: Callable[..., None]) -> Callable[..., None]:
    """Return a function as a command.

    The section ``Options`` of the docstring has the help of its options, one entry each. A parameter of one
    of the classes above stands for their fields, which are options, too.
    """
    options = list(_options(command))

    def call(**values: Any) -> None:
        _build(command, values)

    call.__name__ = command.__name__
    call.__doc__ = (inspect.getdoc(command) or "").partition(_LISTING)[0]
    call.__annotations__ = {one.name: one.annotation for one in options}
    call.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return call


def _options(owner: Any) -> Iterator[inspect.Parameter]:
    """Return the parameters of a function or class with their help, and fields in place of classes."""
    listing = (inspect.getdoc(owner) or "").partition(_LISTING)[2]
    entries = re.split(r"\n(?=    \w)", listing.rstrip()) if listing else []
    helps = dict(entry.strip().split(": ", 1) for entry in entries)
    for name, kind, parameter in _parameters(owner):
        if is_dataclass(kind):
            yield from _options(kind)
            continue
        if name in helps:
            kind, *found = get_args(kind) if get_origin(kind) is Annotated else [kind]
            required = parameter.default is parameter.empty
            info = copy(found[0]) if found else Argument() if required else Option()  # as in Typer
            info.help = " ".join(helps[name].split())
            kind = Annotated[kind, info]
        yield parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=kind)


def _build(owner: Any, values: dict[str, Any]) -> Any:
    """Call a function or class with its values; groups of options are built first."""
    return owner(
        **{
            name: _build(kind, values) if is_dataclass(kind) else values[name]
            for name, kind, _ in _parameters(owner)
        }
    )


def _parameters(owner: Any) -> Iterator[tuple[str, Any, inspect.Parameter]]:
    hints = get_type_hints(owner, include_extras=True)
    for name, parameter in inspect.signature(owner).parameters.items():
        yield name, hints[name], parameter
