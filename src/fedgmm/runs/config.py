"""What decides a run, as a TOML file says it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import tomli_w

from fedgmm.data.tabular.preprocessing import TableOptions
from fedgmm.training import TrainingOptions

Auto = Literal["auto"]

_AUTO = ("components", "learners", "covariance_type")
"""Training options that may be ``"auto"``: chosen from the data before training."""

_NONE = "none"  # TOML has no word for nothing


@dataclass(frozen=True)
class RunConfig:
    """Files, how they are read, and how a model is trained on them.

    Attributes:
        files: files, folders or patterns.
        table: how they are read.
        training: any fields of :class:`TrainingOptions`; ``components`` and ``learners`` may be
            ``"auto"`` (chosen by validation likelihood), and so may ``covariance_type`` (full where
            there are rows enough).
        checkpoint_every: rounds between two checkpoints.
    """

    files: tuple[str, ...]
    table: TableOptions
    training: Mapping[str, Any] = field(default_factory=dict)
    checkpoint_every: int = 5

    def __post_init__(self) -> None:
        known = {one.name for one in fields(TrainingOptions)} - {"standardise"}
        for name, value in self.training.items():
            if name not in known:
                raise ValueError(
                    f"There is no training option {name!r}; there are {', '.join(sorted(known))}."
                )
            if name == "learner" and not isinstance(value, str):
                raise ValueError("learner must be a name: linear, mlp or cnn.")
        if not isinstance(self.checkpoint_every, int) or self.checkpoint_every < 1:
            raise ValueError(
                f"checkpoint_every must be a whole number of rounds, got {self.checkpoint_every!r}."
            )
        self.options().check()

    def options(self, **chosen: Any) -> TrainingOptions:
        """The training options, with what was left open filled in."""
        values = {**self.training, **chosen}
        values = {name: None if value == _NONE else value for name, value in values.items()}
        defaults = TrainingOptions()
        for name in _AUTO:
            if values.get(name) == "auto":
                values[name] = getattr(defaults, name)
        # tables are standardised when they are read; one seed serves both unless two are given
        return replace(defaults, **{"seed": self.table.seed, **values, "standardise": False})

    def open_choices(self) -> list[str]:
        """Options that are still to be chosen from the data."""
        values = {"covariance_type": "auto", **self.training}
        return [name for name in _AUTO if values.get(name) == "auto"]

    def with_training(self, **changes: Any) -> RunConfig:
        """The same run with some training options changed."""
        return replace(self, training={**self.training, **changes})

    def complete(self) -> RunConfig:
        """The same run with every option written out, so that later defaults change nothing."""
        return replace(self, training=self._training_record(self.options().record()))

    def _training_record(self, values: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in values.items() if name != "standardise"}
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
    """The sections ``data``, ``training`` and ``run`` of a TOML file.

    Raises:
        ValueError: text that is not TOML, or an option that does not exist.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}.") from None
    known = {
        "data": {"files", *(one.name for one in fields(TableOptions))},
        "training": {one.name for one in fields(TrainingOptions)},
        "run": {"checkpoint_every"},
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


def config_from(sections: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """A run from the sections of a TOML file.

    Raises:
        ValueError: something that is missing or of the wrong type.
    """
    data = dict(sections.get("data", {}))
    sources = data.pop("files", None)
    if isinstance(sources, str):
        sources = [sources]
    if not sources:
        raise ValueError("No files were given; name at least one, such as site_*.csv.")
    if not data.get("label"):
        raise ValueError("No label column was given; say --label COLUMN.")
    for name in ("categorical", "ignore", "split"):
        if name in data:
            data[name] = (data[name],) if isinstance(data[name], str) else tuple(data[name])
    if "split" in data and (len(data["split"]) != 3 or abs(sum(data["split"]) - 1.0) > 1e-9):
        raise ValueError(f"split must be three shares that sum to 1, got {list(data['split'])}.")
    return RunConfig(
        tuple(map(str, sources)),
        TableOptions(**data),
        dict(sections.get("training", {})),
        **dict(sections.get("run", {})),
    )


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is not there has its default, which is nothing."""
    return {name: value for name, value in values.items() if value is not None}
