"""Each text file is sniffed once and parsed once, in a fit and in the life of a federation's site."""

from __future__ import annotations

import csv

import numpy as np
import pyarrow.csv
import pytest

import fedgmm
from fedgmm.data.tables.errors import TableError
from fedgmm.data.tables.files import TableFile
from fedgmm.data.tables.loading import ClientsFile, load_federation, read_rows, summarise_files
from fedgmm.data.tables.preprocessing import TableOptions
from fedgmm.federation.site_table import SiteTable
from in_memory_sites import InMemorySites, federate

SIZE = {"components": 2, "learners": 2, "rounds": 2}


@pytest.fixture
def counts(monkeypatch):
    """Columns of every full parse, and the files that were sniffed."""
    found = {"parses": [], "sniffs": []}
    parse, sniff = pyarrow.csv.read_csv, fedgmm.data.tables.files.sniff

    def counted_parse(source, **options):
        found["parses"].append(list(options["convert_options"].include_columns))
        return parse(source, **options)

    def counted_sniff(path, *written):
        found["sniffs"].append(path.name)
        return sniff(path, *written)

    monkeypatch.setattr("pyarrow.csv.read_csv", counted_parse)
    monkeypatch.setattr("fedgmm.data.tables.files.sniff", counted_sniff)
    return found


@pytest.fixture
def three_sites(tmp_path, rng):
    """Numbers, categories, truth values and dates at three sites."""

    def write(name, code):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["age", "ward", "smoker", "seen", "code", "state"])
            for i in range(40):
                ward, smoker = "abc"[i % 3], ("True", "False")[i % 2]
                day = f"2024-01-{1 + i % 28:02}"
                state = ("ill", "well")[int(rng.random() < 0.5)]
                rows.writerow([rng.normal(), ward, smoker, day, code(i), state])
        return tmp_path / f"{name}.csv"

    return [write(name, lambda i: i % 4) for name in ("oslo", "bergen", "tromso")], write


def test_a_fit_parses_and_sniffs_each_file_once(three_sites, tmp_path, counts):
    files, _ = three_sites
    fedgmm.fit(files, "state", tmp_path / "run", **SIZE)
    assert sorted(counts["sniffs"]) == ["bergen.csv", "oslo.csv", "tromso.csv"]
    assert len(counts["parses"]) == 3


def test_streamed_files_are_parsed_once(three_sites, counts, streaming):
    load_federation(three_sites[0], TableOptions("state"))
    assert (len(counts["sniffs"]), len(counts["parses"])) == (3, 3)


def test_a_later_file_is_parsed_once(three_sites, counts):
    files, _ = three_sites
    _, preprocessing, _ = load_federation(files, TableOptions("state"))
    before = len(counts["parses"])
    read_rows(files[0], preprocessing)
    assert (len(counts["parses"]) - before, counts["sniffs"].count("oslo.csv")) == (1, 2)


def test_a_site_parses_its_file_once_in_its_life(three_sites, tmp_path, counts):
    files, _ = three_sites
    sites = InMemorySites(files, tmp_path, fresh=False)
    federate(files, tmp_path, sites=sites, **SIZE)
    assert sorted(counts["sniffs"]) == ["bergen.csv", "oslo.csv", "tromso.csv"]
    assert len(counts["parses"]) == 3


def test_a_restarted_site_parses_categories_as_text_at_once(three_sites, counts):
    files, write = three_sites
    files[1] = write("bergen", lambda i: "none" if i % 2 else i % 4)
    _, preprocessing, _ = load_federation(files, TableOptions("state"))
    counts["parses"].clear()
    table = SiteTable.found((files[0],), None, lambda _: None)
    table.load(TableOptions("state"), preprocessing)
    assert len(counts["parses"]) == 1


def test_only_a_column_that_is_text_elsewhere_is_read_again(three_sites, tmp_path, counts):
    files, write = three_sites
    files[1] = write("bergen", lambda i: "none" if i % 2 else i % 4)
    sites = InMemorySites(files, tmp_path, fresh=False)
    federate(files, tmp_path, sites=sites, **SIZE)
    assert [names for names in counts["parses"] if len(names) == 1] == [["code"], ["code"]]
    assert len(counts["parses"]) == 5
    counts["parses"].clear()
    lines = []
    load_federation(files, TableOptions("state"), lines.append)
    assert len(counts["parses"]) == 5
    assert [line for line in lines if "again" in line] == [
        "reading oslo.csv again: code is needed as text",
        "reading tromso.csv again: code is needed as text",
    ]


def test_columns_are_released_after_they_are_loaded(three_sites):
    _, preprocessing, tables = load_federation(three_sites[0], TableOptions("state"))
    assert not any(own.file.columns for own in tables.files)
    again = tables.load(preprocessing, keep_columns=True)
    assert len(again.train) == len(load_federation(three_sites[0], TableOptions("state"))[0].train)
    assert all(own.file.columns for own in tables.files)


def test_a_site_reads_a_file_that_changed(three_sites, counts):
    files, write = three_sites
    table = SiteTable.found((files[0],), None, lambda _: None)
    options = TableOptions("state")
    before = table.summary(options, [])
    assert table.summary(options, []) == before
    assert len(counts["parses"]) == 1
    write("oslo", lambda i: 7 * i)
    assert table.summary(options, []) != before
    assert len(counts["parses"]) == 2


@pytest.mark.parametrize(
    "content",
    [
        "a,y\n1,secret\n",
        "secret,b\n1,2\n",
        "a,y\n1,x\nsecret,secret,secret\n",
        'a,y\n1,"secret\n',
        "a,y\nsecret,p\n3,q\n",
    ],
)
def test_public_texts_hold_no_path_and_no_value(write, content):
    numbers = write("numbers.csv", "a,y\n1,p\n2,q\n3,q\n")
    options = TableOptions("y")
    _, preprocessing, _ = load_federation([numbers], options)
    path = write("site.csv", content)
    with pytest.raises(TableError) as caught:
        SiteTable.found((path,), None, lambda _: None).load(options, preprocessing)
    assert "site.csv" in str(caught.value)
    assert "site.csv" not in caught.value.public
    # a name in the header is not a value of a row
    assert "secret" not in caught.value.public.replace("'secret' was not there", "")
    assert not caught.value.public.endswith(".")


def test_files_that_are_read_can_be_summarised_with_other_options(three_sites, counts):
    file = TableFile(three_sites[0][0])
    for ignore in ((), ("ward",)):
        options = TableOptions("state", ignore=ignore)
        (summary,) = summarise_files([ClientsFile(file, options)], options).summaries.values()
        assert summary.rows == 40
        assert np.isclose(summary.columns["age"].mean, np.mean(file.columns["age"].numbers))
    assert len(counts["parses"]) == 1
