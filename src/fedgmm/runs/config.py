"""What decides a run, as a TOML file says it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import tomli_w

from fedgmm.core.checks import check_choice, check_integer, check_non_negative
from fedgmm.data.tables.preprocessing import TableOptions
from fedgmm.methods.base import DENSITY
from fedgmm.training.options import TrainingOptions

Auto = Literal["auto"]

_AUTO = ("components", "learners", "covariance_type")
"""Training options that may be ``"auto"``: chosen from the data before training."""

_SIZES = ("components", "learners")

_NONE = "none"  # TOML has no word for nothing
_MAY_BE_NONE = {one.name for one in fields(TrainingOptions) if "None" in str(one.type)}
_LEARNERS = ("linear", "mlp")  # the others are for images


TRAINING = {one.name for one in fields(TrainingOptions)} - {"standardise"}
"""Training options that can be set; tables are standardised when they are read."""


FEDERATION = {
    "clients",
    "min_clients",
    "round_timeout",
    "min_rows",
    "precision",
    "largest_message",
    "start_timeout",
}
"""Options of a federation over several machines; runs in one process do not look at them."""

SERVER = {
    "host": str,
    "port": int,
    "tls_cert": str,
    "tls_key": str,
    "tls_ca": str,
    "keys": str,
    "insecure": bool,
}
"""Where the server of a federation listens and whom it lets in, with the type of each option."""


@dataclass(frozen=True)
class RunConfig:
    """Files, how they are read, and how a model is trained on them.

    Attributes:
        files: files, folders or patterns.
        table: how they are read.
        training: any fields of :class:`TrainingOptions`; ``components`` and ``learners`` may be
            ``"auto"`` (chosen by validation likelihood), and so may ``covariance_type`` (full where
            there are rows enough). Where neither size is given, small data choose, too.
        checkpoint_every: rounds between two checkpoints.
    """

    files: tuple[str, ...]
    table: TableOptions
    training: Mapping[str, Any] = field(default_factory=dict)
    checkpoint_every: int = 5

    def __post_init__(self) -> None:
        for name in self.training:
            if name not in TRAINING:
                raise ValueError(
                    f"There is no training option {name!r}; there are {', '.join(sorted(TRAINING))}."
                )
        check_integer("checkpoint_every", self.checkpoint_every, 1)
        options = self.options()
        if (self.table.label is None) != (options.algorithm == DENSITY):
            raise ValueError(
                "algorithm='gmm' is for tables without a label; leave the label out, or ignore its "
                "column."
                if options.algorithm == DENSITY
                else "No label column was given; say which one is to be predicted."
            )
        check_choice("learner", options.learner, _LEARNERS)
        if not isinstance(options.device, str):
            raise ValueError(f"device must be cpu, cuda or auto, got {options.device!r}.")
        check_choice("dtype", options.dtype, ("float32", "float64"))
        options.check()

    def options(self, **chosen: Any) -> TrainingOptions:
        """The training options, with what was left open filled in."""
        values = {**self.training, **chosen}
        for name in _MAY_BE_NONE:
            if values.get(name) == _NONE:
                values[name] = None
        defaults = TrainingOptions()
        for name in _AUTO:
            if values.get(name) == "auto":
                values[name] = getattr(defaults, name)
        # one seed serves the split and the training unless two are given
        return replace(defaults, **{"seed": self.table.seed, **values, "standardise": False})

    def open_choices(self) -> list[str]:
        """Options that are still to be chosen from the data."""
        values = {"covariance_type": "auto", **self.training}
        return [name for name in _AUTO if values.get(name) == "auto"]

    @property
    def sizes_are_open(self) -> bool:
        """Whether nothing was said about the numbers of components and learners."""
        return not any(name in self.training for name in _SIZES)

    def with_training(self, **changes: Any) -> RunConfig:
        """The same run with some training options changed."""
        return replace(self, training={**self.training, **changes})

    def complete(self) -> RunConfig:
        """The same run with every option written out, so that later defaults change nothing.

        Sizes of which nothing was said stay unsaid, until the data are there.
        """
        return replace(self, training=self._training_record(self.options().record()))

    def _training_record(self, values: Mapping[str, Any]) -> dict[str, Any]:
        unsaid = {"standardise", *(_SIZES if self.sizes_are_open else ())}
        kept = {name: value for name, value in values.items() if name not in unsaid}
        # what is still to be chosen stays open
        return {**kept, **dict.fromkeys(self.open_choices(), "auto")}

    def toml(self) -> str:
        """The text of ``config.toml``."""
        table = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.table).items()}
        document = {
            "data": {"files": list(self.files), **_without_none(table)},
            "training": {
                name: _NONE if value is None else value
                for name, value in sorted(self.training.items())
            },
            "run": {"checkpoint_every": self.checkpoint_every},
        }
        return tomli_w.dumps(document)


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    """The sections ``data``, ``training``, ``run``, ``federation`` and ``server`` of a TOML file.

    Raises:
        ValueError: text that is not TOML, or an option that does not exist.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}.") from None
    known = {
        "data": {"files", *(one.name for one in fields(TableOptions))},
        "training": TRAINING,
        "run": {"checkpoint_every"},
        "federation": FEDERATION,
        "server": SERVER,
    }
    for section, values in document.items():
        if section not in known or not isinstance(values, dict):
            raise ValueError(f"{path}: there is no section [{section}]; use {', '.join(known)}.")
        for name in values:
            if name not in known[section]:
                raise ValueError(
                    f"{path}: [{section}] has no option {name!r}; there are "
                    f"{', '.join(sorted(known[section]))}."
                )
    return {section: dict(document.get(section, {})) for section in known}


def config_from(
    sections: Mapping[str, Mapping[str, Any]], *, files_needed: bool = True
) -> RunConfig:
    """A run from the sections of a TOML file.

    Args:
        sections: as :func:`read_config` gives them.
        files_needed: whether it must name files; the server of a federation has none.

    Raises:
        ValueError: something that is missing or of the wrong type.
    """
    data = dict(sections.get("data", {}))
    files = _texts("files", data.pop("files", []))
    if not files and files_needed and sections.get("federation"):
        raise ValueError(
            "This is a federation's server, and the rows are at its sites: evaluate and report there. "
            "Its own report.html was written at the end; fedgmm server goes on with it."
        )
    if not files and files_needed:
        raise ValueError("No files were given; name at least one, such as site_*.csv.")
    unlabelled = dict(sections.get("training", {})).get("algorithm") == DENSITY
    if data.get("label", "") == "" and not unlabelled:
        raise ValueError("No label column was given; say --label COLUMN.")
    return RunConfig(
        files,
        _table_options(data),
        dict(sections.get("training", {})),
        **dict(sections.get("run", {})),
    )


def _table_options(data: dict[str, Any]) -> TableOptions:
    """Values of a TOML file, which may be of any type, as options."""
    for name in ("label", "client_column"):
        if not isinstance(data.get(name, ""), str):
            raise ValueError(f"{name} must be the name of a column in quotes, got {data[name]!r}.")
    if not isinstance(data.get("client", ""), str):
        raise ValueError(f"client must be a name in quotes, got {data['client']!r}.")
    for name in ("categorical", "ignore"):
        data[name] = _texts(name, data.get(name, []))
    if "split" in data:
        data["split"] = _shares(data["split"])
    check_integer("max_categories", data.get("max_categories", 2), 2)
    check_non_negative("indicator_from", data.get("indicator_from", 0.0))
    check_integer("seed", data.get("seed", 0), 0)
    return TableOptions(**{"label": None, **data})


def _texts(name: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(one, str) for one in values):
        raise ValueError(f"{name} must be a list of names in quotes, got {value!r}.")
    return tuple(values)


def _shares(value: Any) -> tuple[float, float, float]:
    fits = isinstance(value, (list, tuple)) and len(value) == 3
    numbers = fits and all(type(one) in (int, float) and one >= 0 for one in value)
    if not numbers or abs(sum(value) - 1.0) > 1e-9 or not value[0]:
        raise ValueError(
            "split must be three shares, of training, validation and test rows, that sum to 1, "
            f"got {value!r}."
        )
    return float(value[0]), float(value[1]), float(value[2])


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is not there has its default, which is nothing."""
    return {name: value for name, value in values.items() if value is not None}
