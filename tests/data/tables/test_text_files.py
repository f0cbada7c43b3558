"""Dialects of text files: separators, encodings, quotes, blocks."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from fedgmm.data.tables.errors import ConversionError
from fedgmm.data.tables.files import read_batches, read_header
from fedgmm.data.tables.text_files import sniff

ROWS = "a,b,y\n1,2.5,x\n2,,z\n"


def columns(path, **options):
    found: dict[str, list] = {}
    for batch in read_batches(path, **options):
        for name, values in batch.to_pydict().items():
            found.setdefault(name, []).extend(values)
    return found


EXPECTED = {"a": [1, 2], "b": [2.5, None], "y": ["x", "z"]}


@pytest.mark.parametrize(
    "content",
    [
        ROWS,
        ROWS.replace("\n", "\r\n"),
        ROWS.replace("\n", "\r"),
        ROWS.rstrip("\n"),
        "\n\n" + ROWS,
        "  \n" + ROWS,
        ROWS.replace("\n", "\n\n"),
        "\ufeff" + ROWS,
        ROWS.replace(",", ";"),
        ROWS.replace(",", "\t"),
        ROWS.replace(",", "|"),
        "a;b;y\n1;2,5;x\n2;;z\n",
        'a;b;y\n"1";"2,5";x\n"2";"";z\n',
        '"a","b","y"\n"1","2.5","x"\n"2","NA","z"\n',
        "a, b, y\n1, 2.5, x\n2, ?, z\n",
        ROWS.encode("utf-16"),
        ROWS.encode("utf-16-be").join([b"\xfe\xff", b""]),
        ",a,b,y\n0,1,2.5,x\n1,2,nan,z\n",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_dialect_gives_the_same_rows(write, content, stream, monkeypatch):
    if stream:
        monkeypatch.setattr("fedgmm.data.tables.text_files._WHOLE_FILE_BYTES", 0)
        if isinstance(content, str) and content.startswith("  "):
            content = (
                content.lstrip()
            )  # blanks before it are forgiven in files that are read at once
    path = write("site.csv", content)
    found = columns(path)
    if found["b"][0] == "2.5":  # as text; looked at as numbers later
        found = {**found, "b": [2.5, None], "a": [int(float(v)) for v in found["a"]]}
    assert found == EXPECTED


def test_gzip_and_tsv(write):
    assert columns(write("a.csv.gz", gzip.compress(ROWS.encode()))) == EXPECTED
    assert columns(write("b.TSV", ROWS.replace(",", "\t"))) == EXPECTED
    assert columns(write("c.tsv.gz", gzip.compress(ROWS.replace(",", "\t").encode()))) == EXPECTED


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "cp1252"])
def test_letters_of_europe(write, encoding):
    path = write("site.csv", "größe,y\n1,Malmö\n2,Tromsø\n".encode(encoding))
    assert columns(path) == {"größe": [1, 2], "y": ["Malmö", "Tromsø"]}


def test_a_letter_that_is_not_utf8_far_down(write, monkeypatch, fails):
    monkeypatch.setattr("fedgmm.data.tables.text_files._SAMPLE_BYTES", 64)
    rows = b"a,y\n" + b"1,x\n" * 100
    assert columns(write("a.csv", rows + "2,Malmö\n".encode("latin-1")))["y"][-1] == "Malmö"
    mixed = "grün,y\n".encode() + b"1,x\n" * 100 + "2,Malmö\n".encode("latin-1")
    assert "UTF-8" in fails(columns, write("b.csv", mixed))
    monkeypatch.setattr("fedgmm.data.tables.text_files._WHOLE_FILE_BYTES", 0)
    assert "UTF-8" in fails(columns, write("c.csv", mixed))


def test_quotes(write):
    content = 'a,"the ""name""",y\n1,"two\nlines",x\n2,"a, b",x\n3,5" disk,z\n'
    found = columns(write("site.csv", content))
    assert found['the "name"'] == ["two\nlines", "a, b", '5" disk']


@pytest.mark.parametrize("stream", [False, True])
def test_quoted_line_breaks_far_down(write, monkeypatch, stream):
    """Some of them fall on the end of a block."""
    monkeypatch.setattr("fedgmm.data.tables.text_files._SAMPLE_BYTES", 64)
    monkeypatch.setattr("fedgmm.data.tables.text_files._BLOCK_BYTES", 256)
    if stream:
        monkeypatch.setattr("fedgmm.data.tables.text_files._WHOLE_FILE_BYTES", 0)
    value = "four\nlines\nof\ntext"
    content = "a,y\n" + "1,x\n" * 100 + f'2,"{value}"\n' * 100
    assert columns(write("site.csv", content))["y"] == ["x"] * 100 + [value] * 100


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "empty"),
        (b"\n\n  \n", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b"\xff\xfe", "empty"),
        (bytes(range(256)) * 4, "not a text file"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "not a text file"),
        (gzip.compress(b"a,y\n1,2\n"), "not a text file"),
        ("a,y\n1,2\n".encode("utf-16-le"), "not a text file"),
        (b"a,b\n1,2,3\n", "3 values where the header has 2 columns"),
        (b"a,b\n1,2\n3\n", "1 value where the header has 2 columns"),
        (b"a,a\n1,2\n", "'a' appears twice"),
        (b"a, a \n1,2\n", "'a' appears twice"),
        (b"1.5,2\n1,2\n", "no header"),
        (b",\n1,2\n", "no column has a name"),
        (b'a,b\n1,"x\n2,y\n3,z\n', "never closed"),
        (b'a,b\n1,"x\n' + b"2,y\n" * 40_000, "never closed"),
        (b'"a,b\n1,x\n', "never closed"),
    ],
)
def test_files_that_cannot_be_read(write, fails, content, told):
    message = fails(columns, write("site.csv", content))
    assert "site.csv" in message
    assert told in message


def test_blanks_before_the_header_of_a_stream(write, fails, streaming):
    assert "the first line" in fails(columns, write("site.csv", "  \n" + ROWS))


def test_a_quote_that_is_never_closed_in_a_stream(write, fails, streaming):
    assert "never closed" in fails(columns, write("site.csv", 'a,b\n1,"x\n' + "2,y\n" * 500))


def test_broken_gzip(write, fails):
    whole = gzip.compress(ROWS.encode() * 50)
    assert "gzip" in fails(columns, write("a.csv.gz", whole[:40]))
    assert "gzip" in fails(columns, write("b.csv.gz", b"a,b\n1,2\n"))


def test_header_only(write):
    for content in ("a,y", "a,y\n"):
        assert columns(write("site.csv", content)) == {}
        assert list(read_header(write("site.csv", content))) == ["a", "y"]


def test_strange_column_names(write):
    names = ["with blank", "with, comma", 'with "quote"', "größe", "two\nlines"]
    header = ",".join('"' + name.replace('"', '""') + '"' for name in names)
    assert list(columns(write("site.csv", header + "\n1,2,3,4,5\n"))) == names


def test_only_some_columns_by_their_clean_names(write):
    path = write("site.csv", " a , b \n1,2\n")
    assert columns(path, only=["b", "zz"]) == {"b": [2]}
    assert columns(path, as_text=["b"]) == {"a": [1], "b": ["2"]}


def test_decimal_commas_far_down(write, monkeypatch):
    monkeypatch.setattr("fedgmm.data.tables.text_files._SAMPLE_BYTES", 64)
    for late, number in (("4,5", 4.5), ("4.5", "4.5")):  # the text is looked at again as numbers
        path = write("a.csv", "a;b;y\n" + "1;2;x\n" * 300 + f"3;{late};x\n")
        assert columns(path)["b"][-1] == number


def test_decimal_commas(write):
    late = "a;b;y\n" + "1;2;x\n" * 300 + "3;4,5;x\n"
    assert sniff(write("a.csv", late)).decimal_point == ","
    assert sniff(write("b.csv", "a;b;y\n1;2.5;x\n")).decimal_point == "."
    # text with commas in a file with semicolons stays text
    assert columns(write("c.csv", "a;y\n1,5;b,c\n"))["y"] == ["b,c"]
    # as text they are written like those of other files
    assert columns(write("d.csv", "a;y\n1,5;x\n"), as_text=["a"])["a"] == ["1.5"]


def test_streamed_blocks_may_break_the_type_of_the_first(write, streaming):
    path = write("site.csv", "a,y\n" + "1,2\n" * 300 + "1.5,2\n")
    assert columns(path)["a"][-1] == 1.5
    path = write("site.csv", "a,y\n" + "1,2\n" * 300 + "many,2\n")
    with pytest.raises(ConversionError) as caught:
        columns(path)
    assert (caught.value.column, caught.value.value) == ("a", "many")
    assert columns(path, as_text=["a"])["a"][-1] == "many"
    empty_first = write("b.csv", "a,y\n" + ",2\n" * 300 + "many,2\n")
    assert columns(empty_first)["a"][-1] == "many"


def test_long_values(write, monkeypatch):
    monkeypatch.setattr("fedgmm.data.tables.text_files._BLOCK_BYTES", 1000)
    long = "v" * 5000
    assert columns(write("site.csv", f"a,y\n1,2\n{long},3\n"))["a"] == ["1", long]


def test_thousand_columns(write, rng):
    values = rng.normal(size=(5, 1000))
    header = ",".join(f"c{j}" for j in range(1000))
    rows = "\n".join(",".join(map(repr, row)) for row in values.tolist())
    found = columns(write("site.csv", f"{header}\n{rows}\n"))
    assert np.array_equal(np.array(list(found.values())).T, values)
