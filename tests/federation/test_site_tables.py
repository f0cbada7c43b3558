"""Sites whose files are written differently, and texts that look like names."""

from __future__ import annotations

import numpy as np
import pytest

from fedgmm.data.tables.preprocessing import TableOptions
from fedgmm.federation.settings import SiteSettings
from fedgmm.federation.site import Site
from fedgmm.runs.run import open_run
from in_memory_sites import InMemorySites, federate

NAMES = ("patient", "age", "seen", "state")
SIZE = {"components": 1, "learners": 1, "rounds": 2}


def rows(rng, missing, date):
    lines = []
    for i in range(40):
        age = missing if i % 5 == 0 else rng.integers(30, 80)
        day = date.format(d=rng.integers(1, 28), m=rng.integers(1, 12))
        lines.append(f"p{i},{age},{day},{('ill', 'well')[i % 2]}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def differently_written(tmp_path, rng):
    """Three sites: without a header, with one, and with another code for missing values."""
    header = ",".join(NAMES) + "\n"
    texts = {
        "bergen": rows(rng, -9, "{d}/{m}/2020"),
        "oslo": header + rows(rng, -9, "2020-{m:02}-{d:02}"),
        "tromso": rows(rng, -7, "2020-{m:02}-{d:02}"),
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.csv").write_text(text)
    return {name: tmp_path / f"{name}.csv" for name in texts}


def test_sites_read_their_files_with_the_options_of_the_server_and_their_own(
    differently_written, tmp_path
):
    sites = InMemorySites([], tmp_path)
    for name, path in differently_written.items():
        sites.add(path, **({"missing_values": ("-7",)} if name == "tromso" else {}))
    table = {"names": NAMES, "missing_values": ("-9",), "id": ("patient",)}
    table["date_format"] = "%d/%m/%Y"
    _, lines = federate([], tmp_path, sites=sites, table=table, **SIZE)
    run = open_run(tmp_path / "sites/tromso")
    assert [c.name for c in run.preprocessing.used] == ["age", "seen"]
    age, seen = run.preprocessing.used
    assert age.mean > 30  # no code is among the numbers
    assert (age.indicator, seen.role) == (True, "date")
    assert run.config.table.missing_values == ("-7",)
    found = run.predict(differently_written["tromso"], "tromso")
    assert found.columns()["patient"][0] == "p0"
    assert len(found.labels) == 40
    assert not any("p0" in line for line in lines)


@pytest.fixture
def site_of_names(tmp_path):
    """A site whose texts hardly repeat."""
    path = tmp_path / "small.csv"
    text = "".join(f"{i},name{i},{'pq'[i % 2]}\n" for i in range(30))
    path.write_text("x,who,y\n" + text)
    return path


@pytest.mark.parametrize("consent", [False, True])
def test_only_the_site_itself_lets_texts_leave_that_look_like_names(
    site_of_names, tmp_path, consent
):
    settings = SiteSettings(
        (site_of_names,), tmp_path / "out", categorical=("who",) if consent else ()
    )
    options = TableOptions("y", categorical=("who",))  # as the server asks
    summary = Site(settings).table.summary(options, ["who"])
    column = summary.columns["who"]
    assert (column.categories is not None) == consent
    assert column.unlisted == (0 if consent else 30)


def test_a_small_site_does_not_delete_a_column_of_the_federation(tmp_path):
    for name, shops in {"a": np.arange(200) % 25, "b": np.arange(200) % 25}.items():
        text = "".join(f"{i % 7},s{s},{'pq'[s % 2]}\n" for i, s in enumerate(shops))
        (tmp_path / f"{name}.csv").write_text("x,shop,y\n" + text)
    text = "".join(f"{s % 7},s{s},{'pq'[s % 2]}\n" for s in range(21))
    (tmp_path / "c.csv").write_text("x,shop,y\n" + text)
    files = [tmp_path / f"{name}.csv" for name in "abc"]
    _, lines = federate(files, tmp_path, label="y", **SIZE)
    assert any("'shop'" in line and "at c" in line for line in lines)
    run = open_run(tmp_path / "sites/c")
    assert sum(name.startswith("shop=") for name in run.preprocessing.feature_names) == 25
