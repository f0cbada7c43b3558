"""Dialects of text files: separators, encodings, quotes, blocks."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from fedgmm.data.tables.files import TableFile
from fedgmm.data.tables.text_files import sniff

ROWS = "a,b,y\n1,2.5,x\n2,,z\n"

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
def test_every_dialect_gives_the_same_rows(write, content, stream, monkeypatch, columns):
    if stream:
        monkeypatch.setattr("fedgmm.data.tables.text_files._WHOLE_FILE_BYTES", 0)
        if isinstance(content, str) and content.startswith("  "):
            content = content.lstrip()  # only files that are read at once may begin with blanks
    assert columns(write("site.csv", content)) == EXPECTED


def test_gzip_and_tsv(write, columns):
    assert columns(write("a.csv.gz", gzip.compress(ROWS.encode()))) == EXPECTED
    assert columns(write("b.TSV", ROWS.replace(",", "\t"))) == EXPECTED
    assert columns(write("c.tsv.gz", gzip.compress(ROWS.replace(",", "\t").encode()))) == EXPECTED


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "cp1252"])
def test_letters_of_europe(write, encoding, columns):
    path = write("site.csv", "größe,y\n1,Malmö\n2,Tromsø\n".encode(encoding))
    assert columns(path) == {"größe": [1, 2], "y": ["Malmö", "Tromsø"]}


def test_a_letter_that_is_not_utf8_far_down(write, monkeypatch, fails, columns):
    monkeypatch.setattr("fedgmm.data.tables.text_files._SAMPLE_BYTES", 64)
    rows = b"a,y\n" + b"1,x\n" * 100
    assert columns(write("a.csv", rows + "2,Malmö\n".encode("latin-1")))["y"][-1] == "Malmö"
    mixed = "grün,y\n".encode() + b"1,x\n" * 100 + "2,Malmö\n".encode("latin-1")
    assert "UTF-8" in fails(columns, write("b.csv", mixed))
    monkeypatch.setattr("fedgmm.data.tables.text_files._WHOLE_FILE_BYTES", 0)
    assert "UTF-8" in fails(columns, write("c.csv", mixed))


def test_quotes(write, columns):
    content = 'a,"the ""name""",y\n1,"two\nlines",x\n2,"a, b",x\n3,5" disk,z\n'
    found = columns(write("site.csv", content))
    assert found['the "name"'] == ["two\nlines", "a, b", '5" disk']


@pytest.mark.parametrize("stream", [False, True])
def test_quoted_line_breaks_far_down(write, monkeypatch, stream, columns):
    """Some of them fall on the end of a block."""
    monkeypatch.setattr("fedgmm.data.tables.text_files._SAMPLE_BYTES", 64)
    monkeypatch.setattr("fedgmm.data.tables.text_files._BLOCK_BYTES", 256)
    if stream:
        monkeypatch.setattr("fedgmm.data.tables.text_files._WHOLE_FILE_BYTES", 0)
    value = "four\nlines\nof\ntext"
    content = "a,y\n" + "1,x\n" * 100 + f'2,"{value}"\n' * 100
    assert columns(write("site.csv", content))["y"] == ["x"] * 100 + [value] * 100


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"\n\n  \n", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b"\xff\xfe", "empty"),
        (bytes(range(256)) * 4, "text"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "text"),
        (gzip.compress(b"a,y\n1,2\n", mtime=0), "text"),
        ("a,y\n1,2\n".encode("utf-16-le"), "text"),
        (b"a,b\n1,2,3\n", "3 values"),
        (b"a,b\n1,2\n3\n", "1 value"),
        (b"a,a\n1,2\n", "twice"),
        (b"a, a \n1,2\n", "twice"),
        (b"1.5,2\n1,2\n", "header"),
        (b",\n1,2\n", "name"),
        (b'a,b\n1,"x\n2,y\n3,z\n', "quote"),
        (b'a,b\n1,"x\n' + b"2,y\n" * 40_000, "quote"),
        (b'"a,b\n1,x\n', "quote"),
    ],
)
def test_files_that_cannot_be_read(write, fails, content, word, columns):
    message = fails(columns, write("site.csv", content))
    assert "site.csv" in message
    assert word in message


def test_blanks_before_the_header_of_a_stream(write, fails, streaming, columns):
    assert "header" in fails(columns, write("site.csv", "  \n" + ROWS))


def test_a_quote_that_is_never_closed_in_a_stream(write, fails, streaming, columns):
    assert "quote" in fails(columns, write("site.csv", 'a,b\n1,"x\n' + "2,y\n" * 500))


def test_broken_gzip(write, fails, columns):
    whole = gzip.compress(ROWS.encode() * 50)
    assert "gzip" in fails(columns, write("a.csv.gz", whole[:40]))
    assert "gzip" in fails(columns, write("b.csv.gz", b"a,b\n1,2\n"))


def test_header_only(write, fails, columns):
    for content in ("a,y", "a,y\n"):
        assert list(TableFile(write("site.csv", content)).header) == ["a", "y"]
        assert "rows" in fails(columns, write("site.csv", content))


def test_strange_column_names(write, columns):
    names = ["with blank", "with, comma", 'with "quote"', "größe", "two\nlines"]
    header = ",".join('"' + name.replace('"', '""') + '"' for name in names)
    assert list(columns(write("site.csv", header + "\n1,2,3,4,5\n"))) == names


def test_only_some_columns_by_their_clean_names(write, columns):
    path = write("site.csv", " a , b \n1,2\n")
    assert columns(path, only=["b", "zz"]) == {"b": [2]}
    assert columns(path, as_text=["b"]) == {"a": [1], "b": ["2"]}


def test_text_is_read_again_only_where_numbers_lost_it(write, columns):
    file = TableFile(write("site.csv", "id,n,word,y\n007,1.50,x,1\n008,2,,1\n"))
    file.read(file.header, ["y"])
    assert [values.as_written for values in file.columns.values()] == [False, False, True, True]
    word = file.columns["word"]
    file.read(file.header, ["id", "word"])
    assert file.columns["word"] is word
    assert file.columns["id"].texts.to_pylist() == ["007", "008"]
    assert file.columns["n"].codes is None


def test_decimal_commas_far_down(write, monkeypatch, columns):
    monkeypatch.setattr("fedgmm.data.tables.text_files._SAMPLE_BYTES", 64)
    for late in ("4,5", "4.5"):
        path = write("a.csv", "a;b;y\n" + "1;2;x\n" * 300 + f"3;{late};x\n")
        assert columns(path)["b"][-1] == 4.5


def test_decimal_commas(write, columns):
    late = "a;b;y\n" + "1;2;x\n" * 300 + "3;4,5;x\n"
    assert sniff(write("a.csv", late)).decimal_point == ","
    assert sniff(write("b.csv", "a;b;y\n1;2.5;x\n")).decimal_point == "."
    # text with commas in a file with semicolons stays text
    assert columns(write("c.csv", "a;y\n1,5;b,c\n"))["y"] == ["b,c"]
    # as text they are written like those of other files
    assert columns(write("d.csv", "a;y\n1,5;x\n"), as_text=["a"])["a"] == ["1.5"]


def test_streamed_blocks_may_break_the_type_of_the_first(write, streaming, columns):
    path = write("site.csv", "a,y\n" + "1,2\n" * 300 + "1.5,2\n")
    assert columns(path)["a"][-1] == 1.5
    path = write("site.csv", "a,y\n" + "1,2\n" * 300 + "many,2\n")
    assert columns(path)["a"][-2:] == ["1", "many"]
    empty_first = write("b.csv", "a,y\n" + ",2\n" * 300 + "many,2\n")
    assert columns(empty_first)["a"][-1] == "many"


def test_long_values(write, monkeypatch, columns):
    monkeypatch.setattr("fedgmm.data.tables.text_files._BLOCK_BYTES", 1000)
    long = "v" * 5000
    assert columns(write("site.csv", f"a,y\n1,2\n{long},3\n"))["a"] == ["1", long]


def test_thousand_columns(write, rng, columns):
    values = rng.normal(size=(5, 1000))
    header = ",".join(f"c{j}" for j in range(1000))
    rows = "\n".join(",".join(map(repr, row)) for row in values.tolist())
    found = columns(write("site.csv", f"{header}\n{rows}\n"))
    assert np.array_equal(np.array(list(found.values())).T, values)
