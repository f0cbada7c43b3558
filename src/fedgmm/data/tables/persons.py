"""The person of each training row of some tables, for privacy of persons with several rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedgmm.core.randomness import client_keys
from fedgmm.data.dataset import split_rows
from fedgmm.data.tables.errors import TableError, quoted
from fedgmm.data.tables.loading import Tables
from fedgmm.data.tables.preprocessing import Preprocessing


def training_persons(tables: Tables, preprocessing: Preprocessing, column: str) -> Tensor:
    """Return the person of each training row as a number, ``(N,)``, in the order of the loaded rows.

    Rows of different files with the same text in the column are of one person.

    Args:
        tables: the files.
        preprocessing: decides which labels are known; other rows are left out.
        column: names the person of a row.

    Raises:
        TableError: a file without the column, or a row without a person.
    """
    clients = {name: code for code, name in enumerate(tables.summaries)}
    numbers: dict[str, int] = {}
    persons, codes = [], []
    for own in tables.files:
        if column not in own.file.header:
            problem = f"there is no person column {quoted(column)}"
            raise TableError(own.file.path, f"{problem}.", public=problem)
        own.file.read({column}, {column})
        found, texts = own.file.columns[column].categories()
        if (found < 0).any():
            row, problem = int(np.argmax(found < 0)) + 1, "a row has no person"
            raise TableError(
                own.file.path,
                f"row {row} below the header has no person: the column {quoted(column)} is empty there.",
                public=problem,
            )
        own.read()
        labels, classes = own.labels()
        kept = np.append(preprocessing.labels.encode(classes)[0], -1)[labels] >= 0
        known = np.array([numbers.setdefault(text, len(numbers)) for text in texts])
        persons.append(known[found[kept]])
        codes.append(np.array([clients[name] for name in own.names])[own.clients[kept]])
    options = tables.options
    training = split_rows(
        np.concatenate(codes), client_keys(list(clients)), options.split, options.seed
    )[0]
    return torch.from_numpy(np.concatenate(persons)[training])
