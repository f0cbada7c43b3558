"""A site's own table: its summary, and its rows as numbers after all sites agreed on the columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.tables.columns import PLAIN, FileFormat
from fedgmm.data.tables.errors import HeaderError, TableError, quoted
from fedgmm.data.tables.files import TableFile, client_name, find_tables
from fedgmm.data.tables.loading import ONE_CLIENT, ClientsFile, Tables, summarise_files
from fedgmm.data.tables.preprocessing import Preprocessing, TableOptions
from fedgmm.data.tables.summaries import ClientSummary
from fedgmm.federation.messages import Notify
from fedgmm.privacy.settings import Privacy


@dataclass
class SiteTable:
    """The file of one site, parsed once and kept while the process lives.

    Attributes:
        file: the file with the columns that were read; ``None`` before it is known how to read it.
        categorical: columns whose texts the site sends even if they look like names. The server cannot
            ask for that.
        bounds: declared smallest and largest values of number columns, to which they are clipped, so that
            no value of this table can spoil a sum under masks.
    """

    path: Path
    file: TableFile | None
    name: str
    notify: Notify
    categorical: tuple[str, ...] = ()
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    _loaded: tuple[TableOptions, Preprocessing, FederatedDataset, Tables] | None = field(
        default=None, repr=False
    )

    @classmethod
    def found(
        cls,
        data: tuple[Path, ...],
        name: str | None,
        notify: Notify,
        written: FileFormat = PLAIN,
        categorical: tuple[str, ...] = (),
    ) -> SiteTable:
        """Return the table of the one file that the settings lead to, with its header read.

        Raises ``ValueError`` unless there is one file, which can be read.
        """
        paths = find_tables(data)
        if len(paths) > 1:
            raise ValueError(
                f"A site has one table, but {len(paths)} were given, such as {paths[0]} and {paths[1]}; "
                "join them first, or start one client for each."
            )
        own = client_name(paths[0]) if name is None else name
        if not own.strip() or not own.isprintable():
            raise ValueError("The site needs a printable name; use --name NAME.")
        try:
            file = TableFile(paths[0], notify, written)
        except HeaderError:  # the server may know how it is written
            file = None
        return cls(paths[0], file, own, notify, categorical)

    def summary(self, options: TableOptions, as_categories: list[str]) -> ClientSummary:
        """Return the summary that the site sends; ``as_categories`` names columns to take as text."""
        wanted = replace(options, categorical=(*options.categorical, *as_categories))
        return self._tables(wanted).summaries[self.name]

    def load(
        self, options: TableOptions, preprocessing: Preprocessing
    ) -> tuple[FederatedDataset, Tables]:
        """Return the rows as numbers, in their splits; the last result is kept."""
        if self._loaded is not None and self._loaded[:2] == (options, preprocessing):
            return self._loaded[2:]
        file = self._current_file(options)
        notes = preprocessing.check_header(
            self.path,
            file.header,
            label_needed=options.label is not None,
            vectors=file.vectors,
        )
        texts = preprocessing.text_columns(file.columns)
        names = set(file.header) - set(options.left_out)
        file.read(names, texts if options.label is None else {*texts, options.label})
        tables = self._tables(options)
        _, unknown = preprocessing.labels.encode(tables.summaries[self.name].labels)
        if unknown and preprocessing.labels.scaling is None:
            problem = "it has a label that the federation does not know"
            raise TableError(self.path, f"{problem}: {quoted(unknown[0])}.", public=problem)
        if ONE_CLIENT in tables.notes:  # a site is always one client
            tables.notes.remove(ONE_CLIENT)
        tables.notes.extend(notes)
        dataset = tables.load(preprocessing, self.notify, keep_columns=True)
        self._loaded = (options, preprocessing, dataset, tables)
        return dataset, tables

    def persons(
        self, options: TableOptions, preprocessing: Preprocessing, privacy: Privacy
    ) -> Tensor | None:
        """Return the person of each training row, ``(N,)``, if persons are protected."""
        if privacy.unit != "person" or privacy.person is None:
            return None
        return self._tables(options).persons(preprocessing, privacy.person)

    def _current_file(self, options: TableOptions) -> TableFile:
        """Return the file; one that changed on disk is read again from its header on."""
        file = self.file
        if file is None or file.written != options.written or not file.is_unchanged():
            file = self.file = TableFile(self.path, self.notify, options.written)
        return file

    def _tables(self, options: TableOptions) -> Tables:
        own = ClientsFile(self._current_file(options), options, self.categorical)
        for name, (low, high) in self.bounds.items():
            values = own.file.columns.get(name)
            if values is not None and values.kind == "number" and values.numbers is not None:
                clipped = replace(values, numbers=np.clip(np.asarray(values.numbers), low, high))
                own.file.columns[name] = clipped.on_disk()
        return summarise_files([own], options)
