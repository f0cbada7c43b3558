"""The configuration of a run, and the TOML files that hold it."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedgmm.data.embed import Embedding
from fedgmm.data.tables.preprocessing import TableOptions
from fedgmm.methods.base import DENSITY
from fedgmm.privacy.settings import Privacy
from fedgmm.support.checks import (
    Count,
    Texts,
    check_choice,
    check_fields,
    check_known,
    check_text,
    optional_fields,
)
from fedgmm.training.options import TrainingOptions

_SIZES = ("components", "learners")

_AUTO = (*_SIZES, "covariance_type", "ridge", "refit")
"""Training options that may be ``"auto"``: chosen from the data before training."""

_NONE = "none"  # TOML has no null
_OPTIONAL = optional_fields(TrainingOptions)

TRAINING = {one.name for one in fields(TrainingOptions)} - {"standardise"}
"""Training options that can be set; tables are always standardised when they are read."""

FEDERATION = {
    "clients",
    "min_clients",
    "round_timeout",
    "min_rows",
    "precision",
    "largest_message",
    "start_timeout",
    "max_share",
    "max_norm",
    "robust",
}
"""Options of a federation over several machines; a run in one process ignores them."""

SERVER = {
    "host": str,
    "port": int,
    "tls_cert": str,
    "tls_key": str,
    "tls_ca": str,
    "keys": str,
    "insecure": bool,
}
"""Options of a federation's server and the type of each: its address and the sites it accepts."""

_SECTIONS: dict[str, Collection[str]] = {
    "data": {"files", *(one.name for one in fields(TableOptions))},
    "training": TRAINING,
    "run": {"checkpoint_every"},
    "embedding": {one.name for one in fields(Embedding)},
    "federation": FEDERATION,
    "server": SERVER,
    "privacy": {one.name for one in fields(Privacy)},
}


@dataclass(frozen=True)
class RunConfig:
    """Files, how they are read, and how a model is trained on them.

    Attributes:
        files: files, folders or patterns.
        table: how the files are read.
        training: any fields of :class:`TrainingOptions`. ``components`` and ``learners`` may be
            ``"auto"`` (chosen by validation likelihood), and so may ``covariance_type`` (full if there
            are enough rows). If neither size is given, small data choose both.
        checkpoint_every: rounds between two checkpoints.
        embedding: how images or texts become vectors; ``None`` if the files are tables of inputs.
        privacy: settings of differential privacy and masks; ``None`` without.
    """

    files: Texts
    table: TableOptions
    training: Mapping[str, Any] = field(default_factory=dict)
    checkpoint_every: Count = 5
    embedding: Embedding | None = None
    privacy: Privacy | None = None

    def __post_init__(self) -> None:
        for name in self.training:
            check_known("There is no training option", name, TRAINING)
        check_fields(self)
        person = None if self.privacy is None else self.privacy.person
        if person is not None and person not in self.table.left_out:  # it is never an input
            table = replace(self.table, id=(*self.table.id, person))
            object.__setattr__(self, "table", table)
        options = self.options()
        options.check()
        check_choice("learner", options.learner, ("linear", "mlp"))  # the others need images
        check_text("device", options.device)
        check_choice("dtype", options.dtype, ("float32", "float64"))
        if self.table.label is None and options.algorithm != DENSITY:
            raise ValueError("No label column was given; name the column to predict.")
        if self.table.label is not None and options.algorithm == DENSITY:
            raise ValueError(
                "algorithm='gmm' is for tables without a label; leave the label out, or ignore its "
                "column."
            )

    def options(self) -> TrainingOptions:
        """Return the training options, with defaults for those that are still ``"auto"``."""
        values: dict[str, Any] = {
            name: None if name in _OPTIONAL and value == _NONE else value
            for name, value in self.training.items()
            if not (name in _AUTO and value == "auto")
        }
        values.setdefault("seed", self.table.seed)  # one seed for the split and for training
        return TrainingOptions(**values, standardise=False)

    def open_choices(self) -> list[str]:
        """Return the options that are still to be chosen from the data."""
        values = {"covariance_type": "auto", "ridge": "auto", "refit": "auto", **self.training}
        return [name for name in _AUTO if values.get(name) == "auto"]

    @property
    def sizes_are_open(self) -> bool:
        """Whether neither the number of components nor that of learners was given."""
        return not any(name in self.training for name in _SIZES)

    def with_training(self, **changes: Any) -> RunConfig:
        """Return the same configuration with some training options changed."""
        return replace(self, training={**self.training, **changes})

    def complete(self) -> RunConfig:
        """Return the configuration with every option written out, so that new defaults change nothing.

        Options that are still to be chosen stay ``"auto"``. Sizes and ``pca`` that were not given stay
        out, because the data decide about them.
        """
        left_out = {"standardise", *(_SIZES if self.sizes_are_open else ())}
        left_out |= {"pca"} - set(self.training)
        values = {k: v for k, v in self.options().record().items() if k not in left_out}
        return replace(self, training={**values, **dict.fromkeys(self.open_choices(), "auto")})

    def toml(self) -> str:
        """Return the text of ``config.toml``."""
        table = {name: value for name, value in asdict(self.table).items() if value is not None}
        training = {
            name: _NONE if value is None else value for name, value in sorted(self.training.items())
        }
        sections = {
            "data": {"files": self.files, **table},
            "training": training,
            "run": {"checkpoint_every": self.checkpoint_every},
        }
        if self.embedding is not None:
            sections["embedding"] = {
                name: value for name, value in asdict(self.embedding).items() if value is not None
            }
        if self.privacy is not None:
            sections["privacy"] = self.privacy.record()
        import tomli_w

        return tomli_w.dumps(sections)


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    """Read the sections of a TOML file: ``data``, ``training``, ``run``, ``privacy`` and so on.

    Raises:
        ValueError: the file is not TOML, or has a section or an option that does not exist.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}.") from None
    for section, values in document.items():
        if section not in _SECTIONS or not isinstance(values, dict):
            raise ValueError(
                f"{path}: there is no section [{section}]; use {', '.join(_SECTIONS)}."
            )
        for name in values:
            check_known(f"{path}: [{section}] has no option", name, _SECTIONS[section])
    return {section: dict(document.get(section, {})) for section in _SECTIONS}


def config_from(
    sections: Mapping[str, Mapping[str, Any]], *, files_needed: bool = True
) -> RunConfig:
    """Make a configuration from the sections of a TOML file.

    Args:
        sections: the result of :func:`read_config`.
        files_needed: whether files must be named; the server of a federation has none.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: an option is missing or has a wrong value.
    """
    data: dict[str, Any] = dict(sections.get("data", {}))
    for name in ("files", "categorical", "ignore", "names", "missing_values", "id"):
        if isinstance(data.get(name), (str, int, float)):  # a single name needs no list
            data[name] = (data[name],)
    if isinstance(data.get("missing_values"), (list, tuple)):  # numbers need no quotes
        data["missing_values"] = tuple(map(str, data["missing_values"]))
    data = {
        name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
    }
    files = data.pop("files", ())
    if not files and files_needed:
        raise ValueError(
            "This run belongs to the server of a federation, and the rows are at its sites: evaluate and "
            "report there. The server wrote its own report.html; resume it with fedgmm server."
            if sections.get("federation")
            else "No files were given; name at least one, such as site_*.csv."
        )
    training = dict(sections.get("training", {}))
    if data.get("label", "") == "" and training.get("algorithm") != DENSITY:
        raise ValueError("No label column was given; name it with --label COLUMN.")
    table = TableOptions(**{"label": None, **data})
    own, given = sections.get("embedding"), sections.get("privacy")
    embedding = Embedding(**own) if own else None
    privacy = Privacy.from_record(given) if given else None
    return RunConfig(
        files, table, training, **sections.get("run", {}), embedding=embedding, privacy=privacy
    )
