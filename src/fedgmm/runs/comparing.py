"""Several methods on the same rows: of files, of a run, or of built-in data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgmm.data.tables.files import Notify
from fedgmm.data.tables.loading import load_federation
from fedgmm.data.tables.preprocessing import TableOptions
from fedgmm.runs.folder import RunFolder, write_json
from fedgmm.runs.run import open_run
from fedgmm.training.options import TrainingOptions
from fedgmm.training.selection import select_for_small_data, suitable_covariance

if TYPE_CHECKING:
    from fedgmm.data.dataset import FederatedDataset
    from fedgmm.runs.comparison import Comparison

BUILT_IN = ("digits", "synthetic")


@dataclass(frozen=True)
class DataToCompare:
    """Rows that methods are compared on.

    Attributes:
        dataset: the rows.
        title: what they are called.
        options: common options of the training.
        bayes: the accuracy that nobody can beat, where it is known.
        home: the run folder that the results belong to, if there is one.
        notes: what is worth knowing.
    """

    dataset: FederatedDataset
    title: str
    options: TrainingOptions = field(default_factory=TrainingOptions)
    bayes: float | None = None
    home: Path | None = None
    notes: list[str] = field(default_factory=list)


def data_to_compare(
    sources: Sequence[str],
    label: str | None,
    client_column: str | None,
    seed: int | None = None,
    notify: Notify = lambda _: None,
    sizes: Mapping[str, Any] | None = None,
    *,
    categorical: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> DataToCompare:
    """Rows from files, from a run folder, or built in.

    Args:
        sources: files, folders or patterns; or one run folder; or one of ``BUILT_IN``.
        label: the column to predict, for files.
        client_column: the column that names the client, for files.
        seed: of the split and the training; a run's own, or 0, where it is ``None``.
        notify: called with a line before each step.
        sizes: ``components`` and ``learners``, where they were given; where neither was, a run's own
            hold, and files choose as ``fit`` does.
        categorical: number columns whose values are names of groups, for files.
        ignore: columns to leave out, for files.
    """
    sizes = sizes or {}
    if len(sources) == 1 and RunFolder(Path(sources[0])).is_run:
        if label or client_column or categorical or ignore:
            raise ValueError(
                f"{sources[0]} is a run, which knows its label and its columns; leave out --label, "
                "--client-column, --categorical and --ignore."
            )
        run = open_run(sources[0])
        run.need_labels()
        # methods differ; what they have in common is the size of the mixture and the seed
        options = replace(run.config.options(), algorithm="fedgmm", **sizes)
        options = options if seed is None else replace(options, seed=seed)
        return DataToCompare(run.data(notify), sources[0], options, home=run.folder.home)
    if len(sources) == 1 and sources[0] in BUILT_IN and label is None:
        if client_column or categorical or ignore:
            raise ValueError(
                f"{sources[0]} is built in and has no columns; leave out --client-column, --categorical "
                "and --ignore."
            )
        dataset, bayes = built_in_data(sources[0], seed or 0)
        return DataToCompare(dataset, sources[0], TrainingOptions(seed=seed or 0, **sizes), bayes)
    if label is None:
        raise ValueError("No label column was given; say --label COLUMN.")
    table = TableOptions(label, client_column, tuple(categorical), tuple(ignore), seed=seed or 0)
    dataset, _, tables = load_federation(sources, table, notify)
    options = TrainingOptions(standardise=False, seed=seed or 0, **sizes)
    kind = suitable_covariance(len(dataset.train), dataset.input_shape[0], options.components)
    options = replace(options, covariance_type=kind)
    found = None if sizes else select_for_small_data(dataset, options, notify)
    if found is not None:
        options = replace(options, components=found.components, learners=found.learners)
    return DataToCompare(dataset, "Files", options, notes=tables.notes)


def built_in_data(name: str, seed: int) -> tuple[FederatedDataset, float | None]:
    """The data set and the accuracy nobody can beat, where it is known."""
    if name == "digits":
        from fedgmm.data.digits import heterogeneous_digits

        return heterogeneous_digits(seed=seed).dataset, None
    from fedgmm.data.synthetic import synthetic

    federation = synthetic(60, 1000, seed=seed)
    return federation.dataset, federation.bayes_accuracy()


def write_comparison(comparison: Comparison, home: Path) -> Path:
    """``comparison.json`` in a folder, with every client's accuracy under every method."""
    path = RunFolder(home).comparison
    write_json(path, comparison.record(clients=True))
    return path
