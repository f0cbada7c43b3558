"""Small tables on disk, and streaming of small files."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fedgmm.data.tables.errors import TableError
from fedgmm.data.tables.files import TableFile
from fedgmm.data.tables.loading import load_federation, read_tables
from fedgmm.data.tables.preprocessing import TableOptions


@pytest.fixture
def write(tmp_path):
    """Write text or bytes to a named file and return its path."""

    def to(name, content):
        path = tmp_path / name
        data = content if isinstance(content, bytes) else content.encode()
        path.write_bytes(data)
        return path

    return to


@pytest.fixture
def load():
    """The data set, the preprocessing and the summaries of some files; the label is ``y``."""

    def from_files(*paths, label="y", **options):
        return load_federation(paths, TableOptions(label, **options))

    return from_files


@pytest.fixture
def read():
    """The parsed and summarised files; the label is ``y``."""

    def from_files(*paths, label="y", **options):
        return read_tables(paths, TableOptions(label, **options))

    return from_files


@pytest.fixture
def fails():
    """Call something that must fail with one sentence, and return the sentence."""

    def with_message(call, *args, error=TableError, **options):
        with pytest.raises(ValueError) as caught:
            call(*args, **options)
        assert type(caught.value) in (error, *TableError.__subclasses__()), repr(caught.value)
        assert_one_sentence(str(caught.value))
        return str(caught.value)

    return with_message


def assert_one_sentence(message):
    assert "\n" not in message
    assert message.endswith((".", "?")), message
    assert len(message) < 700, message
    for jargon in ("Arrow", "Traceback", "codec", "CSV conversion", "pyarrow", "dtype=", "block"):
        assert jargon not in message, message


@pytest.fixture
def columns():
    return columns_of


def columns_of(path, only=None, as_text=()):
    """The values of a file's columns as lists, ``None`` where missing."""
    file = TableFile(path)
    file.read(file.header if only is None else only, as_text)
    found = {}
    for name in file.header:
        values = file.columns.get(name)
        if values is None:
            continue
        if name in as_text or values.kind in ("text", "boolean"):
            texts = values.texts.to_pylist()
            found[name] = [texts[code] if code >= 0 else None for code in values.codes]
        else:
            found[name] = [None if np.isnan(v) else v for v in np.asarray(values.numbers).tolist()]
    return found


@pytest.fixture
def streaming(monkeypatch):
    """Every text file is streamed, in small blocks."""
    monkeypatch.setattr("fedgmm.data.tables.text_files._WHOLE_FILE_BYTES", 0)
    monkeypatch.setattr("fedgmm.data.tables.text_files._BLOCK_BYTES", 512)


@pytest.fixture
def frame(rng):
    """Pooled rows of three sites with every kind of column."""
    n = 240
    colour = rng.choice(["red", "green", "blue", "dark, green", "grün"], n).astype(object)
    colour[rng.random(n) < 0.1] = None
    height = rng.normal(170.0, 10.0, n)
    height[rng.random(n) < 0.2] = np.nan
    return pd.DataFrame(
        {
            "site": rng.choice(["oslo", "bergen", "tromsø"], n, p=[0.6, 0.3, 0.1]),
            "height": height,
            "age": rng.integers(0, 90, n),
            "colour": colour,
            "smoker": rng.choice([True, False], n),
            "seen": pd.Timestamp("2021-01-01") + pd.to_timedelta(rng.integers(0, 900, n), unit="D"),
            "y": rng.choice(["ill", "well"], n),
        }
    )


@pytest.fixture
def sites(frame, tmp_path):
    """The same rows as one CSV file per site."""
    return split_by_site(frame, tmp_path)


def split_by_site(frame, folder):
    paths = []
    for name, own in frame.groupby("site"):
        paths.append(folder / f"{name}.csv")
        own.drop(columns="site").to_csv(paths[-1], index=False)
    return paths
