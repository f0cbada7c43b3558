"""What a question tells about the training: options, preprocessing, and the method they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from fedgmm.data.tables.preprocessing import Preprocessing, TableOptions
from fedgmm.federation.messages import MessageError
from fedgmm.federation.settings import WIRE_PRECISIONS, WirePrecision
from fedgmm.federation.summaries_on_wire import SummaryError, table_from_record, table_record
from fedgmm.training.build import build
from fedgmm.training.checkpoint import AnyMethod, Phase
from fedgmm.training.options import TrainingOptions

PROTOCOL = 1
"""Version of the questions and answers; both sides must have the same."""

_LEARNERS = ("linear", "mlp")


@dataclass(frozen=True)
class Job:
    """One training, as server and sites know it.

    Attributes:
        options: everything that decides the training.
        table: how tables are read.
        preprocessing: what all agreed on.
        precision: of learners on the wire.
        min_rows: moments of components with fewer expected rows are withheld.
    """

    options: TrainingOptions
    table: TableOptions
    preprocessing: Preprocessing
    precision: WirePrecision = "float32"
    min_rows: int = 0

    @property
    def columns(self) -> int:
        """Of the inputs."""
        return len(self.preprocessing.feature_names)

    @cached_property
    def method(self) -> AnyMethod:
        """What is trained."""
        return self._build(self.options)

    @cached_property
    def warm_up(self) -> AnyMethod:
        """FedAvg with the same options, for the rounds before."""
        return self._build(replace(self.options, algorithm="fedavg", solver="sgd"))

    def method_of(self, phase: Phase) -> AnyMethod:
        """The method of a phase."""
        return self.warm_up if phase == "warmup" else self.method

    def _build(self, options: TrainingOptions) -> AnyMethod:
        from fedgmm.nets.networks import network

        classes = len(self.preprocessing.labels.classes)
        return build(options, network(options.learner, (self.columns,), classes, None))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The same as :meth:`record`, made once."""
        return self.record()

    def record(self) -> dict[str, Any]:
        """Plain values, for a question."""
        return {
            "options": self.options.record(),
            "table": table_record(self.table),
            "preprocessing": self.preprocessing.record(),
            "precision": self.precision,
            "min_rows": self.min_rows,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], client: str) -> Job:
        """The inverse of :meth:`record`, as the site ``client`` sees it.

        Raises:
            MessageError: values that are no training.
        """
        try:
            options = options_from_record(record["options"])
            table = table_from_record(record["table"], client)
            preprocessing = Preprocessing.from_record(record["preprocessing"])
            precision, min_rows = record["precision"], record["min_rows"]
        except SummaryError as error:
            raise MessageError(f"{error}.") from None
        except (LookupError, TypeError, ValueError) as error:
            raise MessageError(f"the question is not complete: {error!r}.") from None
        if precision not in WIRE_PRECISIONS or type(min_rows) is not int or min_rows < 0:
            raise MessageError("the question's precision or min_rows make no sense.")
        return cls(options, table, preprocessing, precision, min_rows)


def options_from_record(record: Any) -> TrainingOptions:
    """Options that a server sent.

    Raises:
        ValueError: values that are none.
    """
    known = {field.name for field in fields(TrainingOptions)}
    if not isinstance(record, Mapping) or set(record) != known:
        raise ValueError("options of another version of fedgmm")
    options = TrainingOptions(**record)
    options.check()
    check_for_tables(options)
    return options


def check_for_tables(options: TrainingOptions) -> None:
    """Raise ``ValueError`` for options that belong to images, or that need all rows in one place."""
    if options.learner not in _LEARNERS:
        raise ValueError(f"learner must be one of {list(_LEARNERS)}, got {options.learner!r}.")
    if options.augment or options.pretrained is not None:
        raise ValueError("augment and pretrained are for images; leave them out.")
    if options.personal_labels:
        raise ValueError(
            "personal_labels needs the label counts of every client, which a federation does not exchange "
            "yet; leave it out."
        )
    if options.patience is not None:
        raise ValueError(
            "patience needs the validation figures of every client, which a federation does not have; "
            "leave it out, or use tol."
        )
