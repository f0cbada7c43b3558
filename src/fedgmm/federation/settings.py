"""Settings that the server and the sites of a federation start with."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from fedgmm.federation.messages import LARGEST_MESSAGE
from fedgmm.privacy.settings import ROBUST, Privacy, Robust
from fedgmm.privacy.site_sets import FEWEST_SITES
from fedgmm.support.checks import (
    Count,
    Flag,
    NonNegative,
    NonNegativeInt,
    Positive,
    Text,
    Texts,
    check_fields,
    integer,
    number,
    one_of,
)
from fedgmm.wording import counted

if TYPE_CHECKING:
    from fedgmm.data.embed import Embedding
    from fedgmm.runs.config import RunConfig
else:
    # the real classes need torch; the checks of the other fields do not
    Embedding = RunConfig = Any

WirePrecision = Literal["float32", "float16"]
WIRE_PRECISIONS: tuple[str, ...] = get_args(WirePrecision)

MIN_COUNT = 5
"""Fewest rows of a category whose text a site sends, unless its owner chooses another number."""

MIN_ROWS = 5
"""Fewest rows behind a number that a site sends; the smallest cell that official statistics publish."""

BLUR = 0.1
"""Spread of the random weights of rows, see ``SiteSettings.blur``."""

_ONLY_AT_SITES = {
    "files": "each site names its own with --data",
    "client": "each site has its own name",
    "client_column": "a site is one client",
}
"""Options of ``[data]`` that the server must not set, with the reason."""


class FederationError(RuntimeError):
    """A federation cannot start or continue; the message says why and what to do."""


@dataclass(frozen=True)
class FederationSettings:
    """Settings of a federation, as its server knows them.

    Attributes:
        config: how tables are read and what is trained. It names no files, because sites have their own.
        clients: number of sites that are expected at the start.
        min_clients: fewest sites that a round closes with; ``None`` means all that are expected.
        round_timeout: seconds after which a round closes without the sites that have not replied.
        min_rows: sites withhold moments, learners and centroids with fewer expected rows than this. A
            site with fewer rows in total cannot take part.
        precision: floating-point type of the learners' weights in messages.
        largest_message: largest size of a message in bytes.
        start_timeout: seconds to wait for the sites at the start; ``None`` waits without limit.
        max_share: largest share of all rows that one site counts for; ``None`` lets a site count for three
            times the median site, from six sites on, see :func:`fedgmm.privacy.influence.row_weights`.
        max_norm: a site whose sums per row are more than this many times as large as the median of the
            sites counts less; ``None`` means 3, and 10 with fewer than six sites, see
            :class:`fedgmm.privacy.influence.Cohort`.
        robust: ``"none"`` adds the sums of the sites, ``"trimmed"`` and ``"centred"`` take robust means of
            them (:func:`fedgmm.privacy.influence.combine`), for which the server holds all replies of a
            round.
        privacy: protection of the sites' sums.
    """

    config: RunConfig
    clients: Count
    min_clients: Count | None = None
    round_timeout: Positive = 60.0
    min_rows: NonNegativeInt = 0
    precision: Annotated[WirePrecision, one_of(*WIRE_PRECISIONS)] = "float32"
    largest_message: Annotated[int, integer(65_536)] = LARGEST_MESSAGE
    start_timeout: NonNegative | None = None
    max_share: Annotated[float, number(above=0, most=1)] | None = None
    max_norm: Annotated[float, number(least=1)] | None = None
    robust: Annotated[Robust, one_of(*ROBUST)] = "none"
    privacy: Privacy = field(default_factory=Privacy)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.config.options().personal_labels == "auto":  # sites do not exchange label counts
            plain = self.config.with_training(personal_labels=False)
            object.__setattr__(self, "config", plain)
        if self.robust != "none" and self.config.options().algorithm == "clustered":
            raise ValueError(
                f"robust={self.robust!r} needs sums, but clustered compares single clients; "
                "leave robust out."
            )
        if self.quorum > self.clients:
            raise ValueError(
                f"min_clients={self.min_clients} is more than the "
                f"{counted(self.clients, 'client that is', 'clients that are')} expected; lower "
                "min_clients or raise clients."
            )
        if self.is_masked:
            self._check_masks()
        if self.privacy.is_noised:  # noise decides no stopping rule
            from fedgmm.training.private import private_rounds

            rounds = private_rounds(self.config.options(), self.privacy)
            noised = self.config.with_training(rounds=rounds, tol=None)
            object.__setattr__(self, "config", noised)

    @property
    def is_masked(self) -> bool:
        """Whether the server sees sums over sites only."""
        return self.privacy.secure_aggregation

    def _check_masks(self) -> None:
        """Raise ``ValueError`` for settings that secure aggregation cannot have."""
        if self.quorum < FEWEST_SITES:
            raise ValueError(
                f"secure_aggregation needs at least {FEWEST_SITES} clients in every round, got "
                f"{self.quorum}: with two, each could subtract its own sums from the total."
            )
        if self.robust != "none" or self.max_share is not None or self.max_norm is not None:
            raise ValueError(
                "robust, max_share and max_norm compare single clients, which secure_aggregation hides; "
                "leave them out, or leave secure_aggregation out."
            )
        if self.config.options().participation < 1:
            raise ValueError(
                "secure_aggregation needs all clients in every round, because sums over changing sets of "
                "clients would show single ones; leave participation out."
            )

    def record(self) -> dict[str, Any]:
        """Return the section ``[federation]`` of a TOML file."""
        left_out = ("config", "privacy")
        values = {
            one.name: getattr(self, one.name) for one in fields(self) if one.name not in left_out
        }
        return {name: value for name, value in values.items() if value is not None}

    def plan(self) -> dict[str, Any]:
        """Return what sites agree to before they send anything about their rows."""
        options = self.config.options()
        trials = bool({"components", "learners"} & set(self.config.open_choices()))
        plan = {"algorithm": options.algorithm, "rounds": options.rounds, "trials": trials}
        return {**plan, **self.privacy_facts()}

    def privacy_facts(self) -> dict[str, Any]:
        """Return the facts about privacy that requests have; none without protection."""
        return {} if self.privacy == Privacy() else {"privacy": self.privacy.record()}

    @property
    def quorum(self) -> int:
        """Fewest sites that a round closes with."""
        return self.clients if self.min_clients is None else self.min_clients


def read_settings(path: Path, **given: Any) -> FederationSettings:
    """Return the settings of a federation from the sections of a TOML file, or raise ``ValueError``.

    ``given`` options replace those of ``[federation]``, unless they are ``None``.
    """
    from fedgmm.methods.base import DENSITY
    from fedgmm.runs.config import config_from, read_config

    sections = read_config(Path(path))
    for name, why in _ONLY_AT_SITES.items():
        if name in sections["data"]:
            raise ValueError(f"{path}: remove {name} from [data]; in a federation {why}.")
    if not sections["data"].get("label") and sections["training"].get("algorithm") != DENSITY:
        raise ValueError(
            f'{path}: [data] must name the column to predict, label = "COLUMN"; for tables without '
            'labels set [training] algorithm = "gmm".'
        )
    values = {**sections["federation"], **{k: v for k, v in given.items() if v is not None}}
    try:
        config = config_from(sections, files_needed=False)
        privacy = Privacy.from_record(sections["privacy"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if "clients" not in values:
        raise ValueError(
            f"{path}: [federation] must say how many clients to expect, such as clients = 4."
        )
    try:
        return FederationSettings(replace(config, files=()), **values, privacy=privacy)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: [federation] {error}") from None


@dataclass(frozen=True)
class SiteSettings:
    """Settings of one site.

    Attributes:
        data: the site's file or files.
        out: the site's folder.
        name: the site's name; ``None`` uses the name of the file.
        share_metrics: send the metrics of the held-out rows to the server.
        adapt_only: learn the weights for a finished model and send nothing about the rows.
        min_rows: send no sum that stands for fewer rows than this. Components with fewer rows take no
            part in what the site sends, and rows that dominate a gradient count for less. If the
            federation's number is larger, moments, learners and centroids with fewer expected rows than
            that are withheld as well. Zero switches the rule off.
        blur: standard deviation of the weight of a row around one. Each reply draws new weights, so
            that the difference of two replies never is one row. Zero sends exact sums.
        categorical: columns whose texts the site sends even if they look like names.
        no_header: the first line of the file holds values.
        names: names of the columns of a file without a header.
        missing_values: further texts or numbers that mean a missing value.
        date_format: format of dates.
        min_count: categories of fewer rows than this are not sent; their rows count as "other".
        labels: texts of labels that the site sends even if fewer rows than ``min_count`` have them.
        max_rounds: rounds that the owner allows; ``None`` allows those of the server's first plan.
        forget: forget the plan that the site agreed to earlier, and agree to a new one.
        key: the site's private key; the witness of its ledger lies beside it.
        max_epsilon: limit of ``ε`` for all runs together; such a site refuses runs without noise.
        max_delta: largest ``δ`` of a run, and the one at which ``max_epsilon`` counts; 1e-5 if only
            ``max_epsilon`` is given.
        peers: folder with the public keys of the other sites. With secure aggregation, the server cannot
            invent sites then.
        min_sites: fewest sites in a sum; a larger number also refuses runs without masks.
        embedding: how the site made its vectors, so that its run embeds later images or texts, too.

    ``no_header``, ``names``, ``missing_values`` and ``date_format`` replace those of the federation if they
    are given.
    """

    data: tuple[Path, ...]
    out: Path
    name: str | None = None
    share_metrics: Flag = False
    adapt_only: Flag = False
    min_rows: NonNegativeInt = MIN_ROWS
    categorical: Texts = ()
    no_header: Flag = False
    names: Texts = ()
    missing_values: Texts = ()
    date_format: Text | None = None
    min_count: NonNegativeInt = MIN_COUNT
    labels: Texts = ()
    max_rounds: Count | None = None
    forget: Flag = False
    key: Path | None = None
    max_epsilon: Positive | None = None
    max_delta: Annotated[float, number(above=0, below=1)] | None = None
    blur: Annotated[float, number(least=0, most=0.5)] = BLUR
    peers: Path | None = None
    min_sites: Annotated[int, integer(FEWEST_SITES)] | None = None
    embedding: Embedding | None = None

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("No data file was given; name one with --data.")
        object.__setattr__(self, "data", tuple(Path(path) for path in self.data))
        object.__setattr__(self, "out", Path(self.out))
        check_fields(self)

    @property
    def file_format(self) -> dict[str, Any]:
        """The options about the format of the file that were given."""
        names = ("no_header", "names", "missing_values", "date_format")
        return {name: getattr(self, name) for name in names if getattr(self, name)}
