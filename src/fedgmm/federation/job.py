"""The training run as server and sites know it: options, preprocessing, and the method they make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from fedgmm.core.moments import Scaling
from fedgmm.core.pca import PCA
from fedgmm.core.sums import Sum, row_counts
from fedgmm.data.tables.preprocessing import Preprocessing, TableOptions
from fedgmm.federation.declared import declared_preprocessing
from fedgmm.federation.messages import PROJECTION, Message, MessageError, digest_of
from fedgmm.federation.settings import WIRE_PRECISIONS, WirePrecision
from fedgmm.federation.summaries import SummaryError, table_from_record, table_record
from fedgmm.federation.wire import Arrays, as_array, as_tensor
from fedgmm.methods.base import AnyMethod
from fedgmm.model.decisions import default_positive
from fedgmm.model.model import FederatedModel
from fedgmm.nets.networks import Network
from fedgmm.privacy.accounting import compose, epsilon_of
from fedgmm.privacy.private_method import PrivateMixture
from fedgmm.privacy.private_networks import private_method
from fedgmm.privacy.settings import Privacy, PrivacyError
from fedgmm.training.build import build, build_warm_up, learner_network
from fedgmm.training.checkpoint import Phase
from fedgmm.training.options import TrainingOptions
from fedgmm.training.private import check_private_options, descends, private_rounds

if TYPE_CHECKING:
    from fedgmm.methods.fedgmm import FedGMM

SCORE: dict[str, Sum] = {
    "clients": row_counts(),
    "log_loss": Sum((), lowest=0.0, largest=1e15),
    "rows": row_counts(),
    "labels": Sum((), largest=1e15),
    "inputs": Sum((), largest=1e27),
}
"""Sums over sites that score a model on validation rows.

``log_loss`` is the site's mean, ``labels`` is ``Σ log P_c(y|x)`` and ``inputs`` is ``Σ log P_c(x)``.
"""

SHARED_METRICS = ("accuracy", "log_loss", "calibration_error")
"""Metrics of its test rows that a site sends if it shares metrics."""

_LEARNERS = ("linear", "mlp")
_PROJECTION = ("mean", "components", "variances")
_ORTHONORMAL = 1e-6
_FARTHEST = 1e3  # of the mean of standardised columns from zero


@dataclass(frozen=True)
class Job:
    """One training run, as server and sites know it.

    Attributes:
        preprocessing: that all sites agreed on.
        precision: of learners on the wire.
        min_rows: moments, learners and centroids with fewer expected rows are withheld.
        projection: principal components of the inputs, and columns beside them, that the Gaussians see;
            ``None`` means that they see the inputs, or that the components are not known yet.
        privacy: the budget of noised sums; ``None`` without noise.
    """

    options: TrainingOptions
    table: TableOptions
    preprocessing: Preprocessing
    precision: WirePrecision = "float32"
    min_rows: int = 0
    projection: PCA | None = None
    privacy: Privacy | None = None

    @property
    def columns(self) -> int:
        """Number of columns of the inputs."""
        return len(self.preprocessing.feature_names)

    @property
    def reduced(self) -> tuple[int, ...]:
        """Columns of the inputs that ``pca`` reduces: entries of vectors, or all columns without any."""
        return self.preprocessing.vectors or tuple(range(self.columns))

    @property
    def features(self) -> int:
        """Number of columns that the Gaussians see."""
        return self.columns if self.projection is None else len(self.projection.variances)

    @cached_property
    def _net(self) -> Network:
        return learner_network(self.options, (self.columns,), self.preprocessing.labels.array)

    @cached_property
    def method(self) -> AnyMethod:
        """The method to train."""
        return self.private or build(self.options, self._net)

    @cached_property
    def private(self) -> PrivateMixture | None:
        """The method whose sums have noise; ``None`` without noise."""
        if self.privacy is None:
            return None
        method = cast("FedGMM", build(self.options, self._net))
        budget = replace(self.privacy, rounds=private_rounds(self.options, self.privacy))
        return private_method(method, budget, descent=descends(self.options))

    @cached_property
    def warm_up(self) -> AnyMethod:
        """FedAvg with the same options, which trains the warm-up rounds."""
        return build_warm_up(self.options, self._net)

    def method_of(self, phase: Phase) -> AnyMethod:
        """Return the method of a phase."""
        return self.warm_up if phase == "warmup" else self.method

    @property
    def training_dtype(self) -> torch.dtype:
        """The precision of learners in local training."""
        return self.method.training.dtype

    @property
    def learner_dtype(self) -> torch.dtype:
        """The precision of learners on the wire."""
        return torch.float16 if self.precision == "float16" else self.training_dtype

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Plain values, for a request."""
        return {
            "options": self.options.record(),
            "table": table_record(self.table),
            "preprocessing": self.preprocessing.record(),
            "precision": self.precision,
            "min_rows": self.min_rows,
            **({} if self.privacy is None else {"privacy": self.privacy.record()}),
        }

    def model(self, prediction: Any, names: Iterable[str], **parts: Any) -> FederatedModel:
        """Return a model for clients with some names; ``parts`` are further fields of it."""
        labels = self.preprocessing.labels
        return FederatedModel(
            self.options.algorithm,
            prediction,
            list(names),
            labels.array,
            (self.columns,),
            options=self.options.record(),
            column_names=self.preprocessing.feature_names,
            target=labels.target,
            projection=self.projection,
            **parts,
        )

    def private_parts(self, shared: Any) -> dict[str, Any]:
        """Return the scaling, positive class and budget of a model of noised sums; empty without noise."""
        if self.private is None or self.privacy is None:
            return {}
        assert self.privacy.delta is not None
        zero = torch.zeros(self.columns, dtype=torch.float64)
        classes = list(self.preprocessing.labels.array.tolist())
        spent = shared.spent.tolist()
        return {
            "scaling": self.private.scaling(shared, Scaling(zero, torch.ones_like(zero))),
            # counts of labels must not decide
            "positive": classes[default_positive(classes, (1, 1))] if len(classes) == 2 else None,
            "privacy": {
                **self.privacy.record(),
                "spent": epsilon_of(compose(spent), self.privacy.delta) if spent else 0.0,
                "releases": len(spent),
            },
        }

    @cached_property
    def projection_arrays(self) -> Arrays:
        """The principal components as named arrays, for a request or a file."""
        if self.projection is None:
            return {}
        return {PROJECTION + name: as_array(getattr(self.projection, name)) for name in _PROJECTION}

    @cached_property
    def projection_digest(self) -> str | None:
        """The name by which requests refer to the principal components; ``None`` without them."""
        if not self.projection_arrays:
            return None
        return digest_of(Message("", self.projection_arrays), (), left_out=())

    def with_projection(self, arrays: Mapping[str, NDArray[Any]]) -> Job:
        """Return the job with the principal components among some arrays, if its options have ``pca``.

        Raises:
            MessageError: components that are missing, not finite, or not orthonormal, which could stretch
                the distance between single rows.
        """
        k, found = self.options.pca, {n: arrays.get(PROJECTION + n) for n in _PROJECTION}
        if k is None:
            return self
        seen = k + self.columns - len(self.reduced)
        shapes = {"mean": (self.columns,), "components": (seen, self.columns), "variances": (seen,)}
        values = {}
        for name, value in found.items():
            if value is None or value.dtype != np.float64 or value.shape != shapes[name]:
                raise MessageError(
                    f"the {name} of the principal components is missing or has the wrong shape."
                )
            if not np.isfinite(value).all():
                raise MessageError(f"the {name} of the principal components is not finite.")
            values[name] = as_tensor(value)
        components, largest = values["components"], float(values["mean"].abs().max())
        gap = (components @ components.mT - torch.eye(seen, dtype=torch.float64)).abs().max()
        if float(gap) > _ORTHONORMAL or largest > _FARTHEST or float(values["variances"].min()) < 0:
            raise MessageError("the principal components are not orthonormal, or too far away.")
        return replace(self, projection=PCA(**values))

    @classmethod
    def from_record(cls, record: Mapping[str, Any], client: str) -> Job:
        """Return the job of a record, as the site ``client`` sees it, or raise ``MessageError``."""
        try:
            options = options_from_record(record["options"])
            table = table_from_record(record["table"], client)
            preprocessing = Preprocessing.from_record(record["preprocessing"])
            precision, min_rows = record["precision"], record["min_rows"]
            privacy = Privacy.from_record(record.get("privacy") or {})
            if privacy.is_noised:
                check_noised(privacy, options, table)
                if preprocessing != declared_preprocessing(privacy, table):
                    raise PrivacyError("the preprocessing is not the one that [privacy] declares")
        except SummaryError as error:
            raise MessageError(f"{error}.") from None
        except (LookupError, TypeError, ValueError) as error:
            raise MessageError(f"the request is not complete: {error!r}.") from None
        if precision not in WIRE_PRECISIONS or type(min_rows) is not int or min_rows < 0:
            raise MessageError("the request has an invalid precision or min_rows.")
        noised = privacy if privacy.is_noised else None
        return cls(options, table, preprocessing, precision, min_rows, privacy=noised)


_LATER_OPTIONS = {"pca", "refit"}  # version 0.1 did not have them; their defaults change nothing


def options_from_record(record: Any) -> TrainingOptions:
    """Return the options that a server sent, or raise ``ValueError``."""
    known = {field.name for field in fields(TrainingOptions)}
    if not isinstance(record, Mapping) or not known - _LATER_OPTIONS <= set(record) <= known:
        raise ValueError(
            "the options belong to another version of fedgmm; install the same version at server and sites"
        )
    options = TrainingOptions(**record)
    options.check()
    check_for_tables(options)
    return options


def check_for_tables(options: TrainingOptions) -> None:
    """Raise ``ValueError`` for options that need images, or all rows in one place."""
    if options.learner not in _LEARNERS:
        raise ValueError(f"learner must be one of {list(_LEARNERS)}, got {options.learner!r}.")
    if options.pca is not None and not has_gaussians(options):
        raise ValueError(
            f"pca is for Gaussians, and algorithm={options.algorithm!r} has none; leave it out."
        )
    if options.augment or options.pretrained is not None:
        raise ValueError("augment and pretrained are for images; leave them out.")
    if options.refit:
        raise ValueError("refit needs the rows in one place; leave it out.")
    if options.personal_labels is True:
        raise ValueError(
            "personal_labels needs the label counts of every client, which a federation does not "
            "exchange; leave it out."
        )


def check_noised(privacy: Privacy, options: TrainingOptions, table: TableOptions) -> None:
    """Raise :class:`PrivacyError` unless sites can add noise to the sums of a run."""
    if not privacy.secure_aggregation:
        raise PrivacyError(
            "[privacy] epsilon: each site adds a part of the noise only, so its sums need "
            "secure_aggregation = true."
        )
    if privacy.unit == "person" and (privacy.person is None or privacy.person not in table.id):
        raise PrivacyError(
            "[privacy] unit = 'person' needs person, the column of the sites' tables that names the "
            "person of a row."
        )
    if table.task == "regression":
        raise PrivacyError("epsilon is for classes, not for numbers to predict.")
    check_private_options(options)


def check_additive(options: TrainingOptions) -> None:
    """Raise ``ValueError`` for a method that needs more than sums over clients."""
    if not _smallest(options).is_additive:
        raise ValueError(
            f"algorithm={options.algorithm!r} compares the updates of single clients, which "
            "secure_aggregation hides; choose another algorithm, such as 'fedgmm'."
        )


def has_gaussians(options: TrainingOptions) -> bool:
    """Return whether the method of some options has Gaussians."""
    return _smallest(options).mixture is not None


def _smallest(options: TrainingOptions) -> AnyMethod:
    """Return the method of some options for one column and two classes, to look at its properties."""
    return build(options, learner_network(options, (1,), np.arange(2)))


def shared_model(
    job: Job,
    method: AnyMethod,
    shared: Any,
    names: Sequence[str],
    history: Sequence[Mapping[str, float]] = (),
    stopped: str | None = None,
) -> FederatedModel | None:
    """Return a model without any client's own part; ``None`` if a method shares nothing.

    ``names`` are the clients in the order of their codes, kept if the server knows their clusters.
    """
    if shared is None:
        return None
    if method.is_additive:
        names = ()
        one = method.newcomer(shared)
        personal = {k: v[:0] for k, v in one.items()} if isinstance(one, dict) else one[:0]
    else:
        personal = torch.arange(len(names))
    parts = {"history": [dict(entry) for entry in history], "stopped": stopped}
    prediction = method.prediction(shared, personal)
    return job.model(prediction, names, **parts, **job.private_parts(shared))
