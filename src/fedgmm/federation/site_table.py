"""A site's own table: its summary, and its rows as numbers once all agreed on the preprocessing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.tables.errors import ConversionError, TableError, quoted
from fedgmm.data.tables.files import Notify, client_name, find_tables, read_header
from fedgmm.data.tables.loading import ONE_CLIENT, Tables, read_tables
from fedgmm.data.tables.preprocessing import Preprocessing, TableOptions
from fedgmm.data.tables.summaries import ClientSummary

_EXAMPLE = re.compile(r" such as ('[^']*'|\"[^\"]*\"|\S+)")


@dataclass
class SiteTable:
    """The file of one site.

    Attributes:
        path: the file.
        name: of the site.
        notify: called with a line before each step.
    """

    path: Path
    name: str
    notify: Notify
    _known: tuple[TableOptions, Preprocessing, FederatedDataset, Tables] | None = field(
        default=None, repr=False
    )

    @classmethod
    def found(cls, data: tuple[Path, ...], name: str | None, notify: Notify) -> SiteTable:
        """The one file that the settings lead to.

        Raises:
            ValueError: no file, or several.
        """
        paths = find_tables(data)
        if len(paths) > 1:
            raise ValueError(
                f"A site has one table, but {len(paths)} were given, such as {paths[0]} and {paths[1]}; "
                "join them first, or start one client for each."
            )
        own = client_name(paths[0]) if name is None else name
        if not own.strip() or not own.isprintable():
            raise ValueError("The site needs a name that can be read; say --name NAME.")
        read_header(paths[0])  # a file that nobody can read is told of at once
        return cls(paths[0], own, notify)

    def summary(self, options: TableOptions, as_categories: list[str]) -> ClientSummary:
        """What the site tells before training; some columns may be wanted as categories."""
        wanted = replace(options, categorical=(*options.categorical, *as_categories))
        return read_tables([self.path], wanted, self.notify).summaries[self.name]

    def load(
        self, options: TableOptions, preprocessing: Preprocessing
    ) -> tuple[FederatedDataset, Tables]:
        """Rows as numbers, in their splits; read once and kept."""
        known = self._known
        if known is not None and known[:2] == (options, preprocessing):
            return known[2], known[3]
        preprocessing.check_header(
            self.path, read_header(self.path), label_needed=options.label is not None
        )
        as_text = [column.name for column in preprocessing.columns if column.role == "category"]
        wanted = replace(options, categorical=(*options.categorical, *as_text))
        tables = read_tables([self.path], wanted, self.notify)
        summary = tables.summaries[self.name]
        strange = [text for text in summary.labels if not _is_class(text, preprocessing)]
        if strange:
            raise TableError(
                self.path,
                f"it has a label that the federation does not know: {quoted(strange[0])}.",
            )
        if ONE_CLIENT in tables.notes:  # as it should be here
            tables.notes.remove(ONE_CLIENT)
        dataset = tables.load(preprocessing, self.notify)
        self._known = (options, preprocessing, dataset, tables)
        return dataset, tables


def _is_class(text: str, preprocessing: Preprocessing) -> bool:
    import pyarrow as pa

    _, strange = preprocessing.labels.encode(pa.array([text], pa.string()))
    return not strange


def public_reason(error: Exception) -> str:
    """What the server may know of a table that cannot be used: no path, and no value of a row."""
    if isinstance(error, ConversionError):
        return f"the column {quoted(error.column)} holds text where numbers belong"
    text = str(error)
    if isinstance(error, TableError):
        text = text.removeprefix(f"{error.path}: ")
        if "a label that the federation does not know" in text:
            return "it has a label that the federation does not know"
    return _EXAMPLE.sub("", text).rstrip(".")
