"""What the two sides of a federation are told at their start."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from fedgmm.core.checks import check_choice, check_flag, check_integer, check_non_negative
from fedgmm.federation.messages import LARGEST_MESSAGE
from fedgmm.wording import counted

if TYPE_CHECKING:
    from fedgmm.runs.config import RunConfig

WirePrecision = Literal["float32", "float16"]
WIRE_PRECISIONS: tuple[str, ...] = get_args(WirePrecision)


_AT_SITES = {
    "files": "each site names its own with --data",
    "client": "each site has its own name",
    "client_column": "a site is one client",
}
"""Options of one machine that would do nothing here, and why."""


class FederationError(RuntimeError):
    """Why a federation cannot start or go on, in plain words."""


@dataclass(frozen=True)
class FederationSettings:
    """What decides a federation.

    Attributes:
        config: how tables are read and what is trained; its files stay empty, sites have their own.
        clients: how many sites are expected at the start.
        min_clients: a round closes with at least so many; ``None`` means all that are expected.
        round_timeout: seconds until a round closes without those that have not answered.
        min_rows: sites withhold the moments of components in which they have fewer expected rows.
        precision: of the learners' weights on the wire.
        largest_message: bytes.
        start_timeout: seconds to wait for the sites at the start; ``None`` waits for ever.
    """

    config: RunConfig
    clients: int
    min_clients: int | None = None
    round_timeout: float = 60.0
    min_rows: int = 0
    precision: WirePrecision = "float32"
    largest_message: int = LARGEST_MESSAGE
    start_timeout: float | None = None

    def __post_init__(self) -> None:
        check_integer("clients", self.clients, 1)
        if self.min_clients is not None:
            check_integer("min_clients", self.min_clients, 1)
            if self.min_clients > self.clients:
                raise ValueError(
                    f"min_clients={self.min_clients} is more than the "
                    f"{counted(self.clients, 'client that is', 'clients that are')} expected."
                )
        check_non_negative("round_timeout", self.round_timeout)
        if self.round_timeout == 0:
            raise ValueError("round_timeout must be positive.")
        check_integer("min_rows", self.min_rows, 0)
        check_choice("precision", self.precision, WIRE_PRECISIONS)
        check_integer("largest_message", self.largest_message, 65_536)
        if self.start_timeout is not None:
            check_non_negative("start_timeout", self.start_timeout)

    def record(self) -> dict[str, Any]:
        """The section ``federation`` of a TOML file."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "config"}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def quorum(self) -> int:
        """Fewest sites that a round closes with."""
        return self.clients if self.min_clients is None else self.min_clients


def read_settings(path: Path, **given: Any) -> FederationSettings:
    """The settings of a federation from a TOML file.

    Args:
        path: with the sections ``data`` (without files), ``training`` and ``federation``.
        **given: options of the section ``federation`` that count more than the file's; ``None`` means
            that nothing was given.

    Raises:
        ValueError: something that is missing, unknown or of the wrong type.
    """
    from fedgmm.methods.base import DENSITY
    from fedgmm.runs.config import config_from, read_config

    sections = read_config(Path(path))
    for name, why in _AT_SITES.items():
        if name in sections["data"]:
            raise ValueError(f"{path}: [data] {name} has no place in a federation: {why}.")
    if not sections["data"].get("label") and sections["training"].get("algorithm") != DENSITY:
        raise ValueError(
            f'{path}: [data] must say which column is to be predicted, label = "COLUMN", or '
            '[training] algorithm = "gmm" for tables without labels.'
        )
    try:
        config = config_from(sections, files_needed=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    values = {**sections["federation"], **{k: v for k, v in given.items() if v is not None}}
    if "clients" not in values:
        raise ValueError(f"{path}: [federation] must say how many clients there are: clients = 4.")
    try:
        return FederationSettings(replace(config, files=()), **values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: [federation] {error}") from None


@dataclass(frozen=True)
class SiteSettings:
    """What a site is told at its start.

    Attributes:
        data: its file or files.
        out: its own folder.
        name: what it is called; ``None`` takes the name of the file.
        share_metrics: the server may have the figures of its held-out rows.
        adapt_only: learn the weights for a finished model, and send nothing about the rows.
        min_rows: withhold the moments of components with fewer expected rows than this, or than the
            federation asks for.
    """

    data: tuple[Path, ...]
    out: Path
    name: str | None = None
    share_metrics: bool = False
    adapt_only: bool = False
    min_rows: int = 0

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("No data were given; name a file.")
        object.__setattr__(self, "data", tuple(Path(path) for path in self.data))
        object.__setattr__(self, "out", Path(self.out))
        check_flag("share_metrics", self.share_metrics)
        check_flag("adapt_only", self.adapt_only)
        check_integer("min_rows", self.min_rows, 0)
