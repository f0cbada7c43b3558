"""Files without a header, separated by blanks, with codes for missing values, other dates, and ids."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedgmm.data.tables.columns import PLAIN, FileFormat
from fedgmm.data.tables.errors import HeaderError, TableError
from fedgmm.data.tables.files import TableFile
from fedgmm.data.tables.loading import load_federation, read_rows
from fedgmm.data.tables.preprocessing import Preprocessing, TableOptions
from fedgmm.data.tables.text_files import sniff

CLINIC = (
    "63,male,typical,145,?,y\n67,male,none,160,286,n\n41,female,typical,?,204,n\n"
    "62,female,none,140,268,y\n"
)
NAMES = ("age", "sex", "pain", "pressure", "chol", "sick")


def stored(preprocessing):
    """The preprocessing after it was written to a run folder and read again."""
    return Preprocessing.from_record(json.loads(json.dumps(preprocessing.record())))


# ---------------------------------------------------------------------- headers


@pytest.mark.parametrize(
    "text",
    [
        CLINIC,
        "1,2,3\n4,5,6\n",
        "p,x,s,p\ne,x,s,a\np,f,s,p\n",  # categories only, one twice
        "P001,63,1.5\nP002,41,0.5\nP003,70,2.5\n",
        "?,3.5,no\n1,2.5,yes\n2,4.5,no\n",
        "1,5;2,5;a\n2,5;3,5;b\n0,5;1,5;a\n",
    ],
)
def test_a_first_line_that_looks_like_data(write, text):
    path = write("a.csv", text)
    with pytest.raises(HeaderError, match="no header") as caught:
        load_federation([path], TableOptions("sick"))
    assert "--no-header" in str(caught.value)
    assert "--names" in str(caught.value)
    assert text.split(",")[0] not in caught.value.public  # a value of a row


@pytest.mark.parametrize(
    "text",
    [
        "id,2019,2020,2021\na,1.5,2.5,3.5\nb,2.5,3.5,0.5\n",
        "0,1,2,label\n0.5,1.5,2.5,a\n-1,2,3,b\n",
        "age,sex,sick\n63,male,y\n41,female,n\n",
        ",a,b\n0,1,2\n1,3,4\n",
        "a,b\n",
        "name,colour\nanna,red\nberta,blue\n",
    ],
)
def test_a_first_line_that_holds_names(write, text):
    assert not sniff(write("a.csv", text)).looks_headless


def test_a_header_that_looks_like_data_is_kept_if_it_has_the_label(write, load):
    path = write("a.csv", "a1,b1,y\na2,1,p\na3,2,q\na1,4,y\n")
    dataset, _, tables = load(path)
    assert sum(len(dataset.split(s)) for s in ("train", "validation", "test")) == 3
    assert any("--no-header" in note for note in tables.notes)


def test_no_header(write, load):
    a, b = write("a.csv", CLINIC), write("b.csv", CLINIC)
    dataset, preprocessing, _ = load(a, b, label="column_6", no_header=True)
    assert {c.name for c in preprocessing.columns} == {f"column_{i}" for i in range(1, 6)}
    assert preprocessing.columns[0].mean == np.mean([63, 67, 41, 62])  # the first line counts
    assert dataset.classes.tolist() == ["n", "y"]


def test_names_of_columns(write, load):
    header = ",".join(NAMES) + "\n"
    files = [write("a.csv", CLINIC), write("b.csv", CLINIC), write("c.csv", header + CLINIC)]
    _, preprocessing, tables = load(*files, label="sick", names=NAMES)
    assert [s.rows for s in tables.summaries.values()] == [4, 4, 4]
    assert [c.name for c in preprocessing.columns] == list(NAMES[:-1])
    unlabelled = write("later.csv", "63,male,typical,145,?\n")
    rows = read_rows(unlabelled, stored(preprocessing))
    assert rows.labels is None
    assert rows.matrix.shape == (1, len(preprocessing.feature_names))
    assert read_rows(files[2], stored(preprocessing)).labels.tolist() == [1, 0, 0, 1]


def test_later_files_without_a_header_and_label(write, load):
    swapped = "".join(f"{line[-1]},{line[:-2]}\n" for line in CLINIC.splitlines())
    a, b = write("a.csv", swapped), write("b.csv", swapped)
    _, preprocessing, _ = load(a, b, label="column_1", no_header=True)
    rows = read_rows(write("later.csv", "63,male,typical,145,?\n"), stored(preprocessing))
    whole = read_rows(a, stored(preprocessing))
    assert np.array_equal(rows.matrix[0], whole.matrix[0])


def test_names_that_do_not_fit(write, load, fails):
    path = write("a.csv", CLINIC)
    assert "6 columns" in fails(load, path, names=("a", "b", "y"))
    assert "'a'" in fails(load, path, names=("a", "a", "y"), error=ValueError)


# ---------------------------------------------------------------------- blanks


@pytest.mark.parametrize(
    "text",
    [
        "a b y\n1 2 p\n3 4 q\n",
        "  a   b\ty\n 1  2   p \n\n3   4   q\n".replace("\t", "  "),
        '"a" "b" "y"\n1 "2" "p"\n3 4  "q"\n',
        "a   b   y\r\n1   2   p\r\n3   4   q",
    ],
)
def test_files_separated_by_blanks(write, columns, text):
    for name in ("site.txt", "site.csv"):
        found = columns(write(name, text))
        assert found == {"a": [1, 3], "b": [2, 4], "y": ["p", "q"]}


def test_blanks_within_quotes_stay(write, columns):
    text = 'a  y\n"new  york"   p\n"rome"  q\n'
    assert columns(write("site.data", text))["a"] == ["new  york", "rome"]


def test_a_large_file_separated_by_blanks(write, columns, streaming):
    text = "a  y\n" + "".join(f"{i}   p\n" for i in range(500))
    assert columns(write("site.txt", text))["a"] == list(range(500))


def test_one_column_whose_name_has_blanks(write, columns):
    assert columns(write("site.csv", "blood pressure\n120\n130\n")) == {
        "blood pressure": [120, 130]
    }


# ---------------------------------------------------------------------- missing values


def read_as(path, as_text=(), **written):
    file = TableFile(path, written=FileFormat(**written))
    file.read(file.header, as_text)
    return file.columns


@pytest.mark.parametrize("as_text", [(), ("a", "b")])
def test_codes_for_missing_values(write, as_text):
    path = write("a.csv", "a,b,c,d\n-9,u,-9,unknown\n1,-9.0,-9,3\n-9.00,v,-9,4\n-99,-90,-9,5\n")
    found = read_as(path, as_text, missing_values=("-9", "unknown"))
    if as_text:
        assert [a is None for a in found["a"].as_texts()] == [True, False, True, False]
    assert np.isnan(np.asarray(found["a"].numbers)).tolist() == [True, False, True, False]
    assert found["b"].as_texts().tolist() == ["u", None, "v", "-90"]
    assert found["c"].kind == "empty"
    assert (found["d"].kind, np.isnan(np.asarray(found["d"].numbers)[0])) == ("number", True)


def test_codes_in_parquet_and_streamed_files(write, frame, tmp_path, streaming):
    frame["age"] = np.where(frame["age"] < 40, -9, frame["age"])
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_csv(tmp_path / "a.csv", index=False)
    for name in ("a.parquet", "a.csv"):
        found = np.asarray(read_as(tmp_path / name, missing_values=("-9",))["age"].numbers)
        assert np.array_equal(np.isnan(found), frame["age"] == -9)


def test_codes_are_remembered_and_apply_to_labels(write, load):
    rows = "".join(f"{-9 if i % 4 == 0 else i},{i % 2 if i % 5 else -9}\n" for i in range(40))
    a, b = write("a.csv", "x,y\n" + rows), write("b.csv", "x,y\n" + rows)
    dataset, preprocessing, tables = load(a, b, missing_values=("-9",))
    assert dataset.classes.tolist() == [0, 1]
    assert preprocessing.columns[0].indicator
    assert tables.summaries["a"].unlabelled == 8
    later = read_rows(a, stored(preprocessing))
    assert (later.labels == -1).sum() == 8
    assert later.matrix[:, 1].sum() == 10
    assert not later.unknown_labels


# ---------------------------------------------------------------------- dates


def dated(write, load, *sites, **options):
    files = [
        write(f"{name}.csv", "d,y\n" + "".join(f"{d},{'pq'[i % 2]}\n" for i, d in enumerate(dates)))
        for name, dates in zip("abc", sites, strict=False)
    ]
    _, preprocessing, tables = load(*files, **options)
    return preprocessing.columns[0], tables, files


DAYS = ["31.12.1960", "1.2.1961", "03.04.1960"]
AMBIGUOUS = ["03/04/2020", "5/6/2020", "07/08/2020"]


def test_dates_with_the_day_first(write, load):
    column, tables, files = dated(write, load, DAYS, ["3.4.1960", "5.6.1970", "7.8.1960"])
    assert (column.role, column.order) == ("date", "day first")
    days = np.array([*DAYS, "3.4.1960", "5.6.1970", "7.8.1960"])
    iso = ["-".join(reversed([part.zfill(2) for part in d.split(".")])) for d in days]
    expected = np.array(iso, dtype="datetime64[D]").astype(float)
    assert column.mean == pytest.approx(expected.mean())
    assert column.scale == pytest.approx(expected.std())
    assert not tables.notes
    later = write("later.csv", "d\n5.6.1970\n")
    _, preprocessing, _ = load(*files)
    found = read_rows(later, stored(preprocessing)).matrix[0, 0]
    assert found == pytest.approx((expected[4] - expected.mean()) / expected.std(), rel=1e-5)


def test_dates_with_the_month_first_and_times(write, load):
    column, *_ = dated(write, load, ["12/31/1960 8:30", "1/2/1961 08:45:30"], ["1960-12-31"] * 3)
    assert (column.role, column.order) == ("date", "month first")


def test_ambiguous_dates_are_named_and_not_used(write, load):
    path = write(
        "z.csv", "d,x,y\n" + "".join(f"{d},{i},{'pq'[i % 2]}\n" for i, d in enumerate(AMBIGUOUS))
    )
    _, preprocessing, tables = load(path)
    assert [c.role for c in preprocessing.columns] == ["ignored", "number"]
    (note,) = [note for note in tables.notes if "'d'" in note]
    assert "--date-format" in note
    _, preprocessing, _ = load(path, date_format="%m/%d/%Y")
    assert preprocessing.columns[0].role == "date"
    again = stored(preprocessing)
    assert again.written.date_format == "%m/%d/%Y"
    assert read_rows(path, again).matrix[:, 0].argmax() == 2


def test_ambiguous_dates_of_one_site_are_decided_by_another(write, load):
    column, *_ = dated(write, load, AMBIGUOUS, ["3/4/2020", "31/12/2020"])
    assert column.order == "day first"


def test_sites_with_different_orders_are_an_error(write, load, fails):
    message = fails(dated, write, load, AMBIGUOUS, ["31/12/2020"] * 3, ["12/31/2020"] * 3)
    assert "c.csv" in message
    assert "month first" in message


def test_the_order_of_dates_of_most_sites_counts(write, load, fails):
    odd, usual = ["12/31/2020"] * 3, ["31/12/2020"] * 3
    for sites in ([odd, usual, usual], [usual, odd, usual], [usual, usual, odd]):
        assert "month first" in fails(dated, write, load, *sites).split("but")[0]


def test_later_dates_in_another_order_are_an_error(write, load):
    _, _, files = dated(write, load, DAYS, DAYS)
    _, preprocessing, _ = load(*files)
    with pytest.raises(TableError, match="month first"):
        read_rows(write("later.csv", "d\n12/31/1960\n"), preprocessing)


@pytest.mark.parametrize(
    ("date_format", "dates"),
    [
        ("%d.%m.%y", ["31.12.60", "01.02.24"]),
        ("%Y%m%d", ["20241231", "20240201"]),
        ("%d %b %Y", ["3 Jan 2020", "4 May 2021"]),
    ],
)
def test_dates_in_a_given_format(write, load, date_format, dates):
    column, *_ = dated(write, load, dates, dates, date_format=date_format)
    assert column.role == "date"
    assert column.scale < 20_000


def test_a_date_format_without_a_field(fails):
    assert "%d" in fails(TableOptions, "y", date_format="dd.mm.yyyy", error=ValueError)


def test_dates_in_both_orders_agree_with_files_of_one_client(write, load):
    a = write("a.csv", "who,d,y\n1,3/4/2020,p\n2,5/6/2020,q\n1,1/2/2020,q\n")
    b = write("b.csv", "who,d,y\n1,31/4/2020,p\n".replace("31/4", "30/4"))
    _, preprocessing, _ = load(a, b, client_column="who")
    assert preprocessing.columns[0].order == "day first"


def test_summaries_of_dates_travel(write, load):
    from fedgmm.federation.summaries import SummaryError, summary_from_record, summary_record

    *_, tables, _ = dated(write, load, DAYS, ["3/4/2020", "5/6/2021"])
    for own in tables.summaries.values():
        record = json.loads(json.dumps(summary_record(own)))
        assert summary_from_record(record) == own
    record["columns"][0]["orders"]["day first"][2] = -1.0
    with pytest.raises(SummaryError, match="negative"):
        summary_from_record(record)


# ---------------------------------------------------------------------- ids


def test_ids_are_never_inputs_and_are_carried_through(write, load):
    text = "patient,x,y\n" + "".join(f"{i:03},{i % 7},{'pq'[i % 2]}\n" for i in range(60))
    a, b = write("a.csv", text), write("b.csv", text.replace("patient", "x2"))
    _, preprocessing, tables = load(a, b, id=("patient",), ignore=("x2",))
    assert preprocessing.feature_names == ("x",)
    assert not tables.notes
    rows = read_rows(a, stored(preprocessing))
    assert rows.ids["patient"][:2].tolist() == ["000", "001"]
    assert read_rows(b, stored(preprocessing)).ids == {}
    assert list(read_rows(b, stored(preprocessing), ids=["x2"]).ids) == ["x2"]
    with pytest.raises(TableError, match="zz"):
        read_rows(b, stored(preprocessing), ids=["zz"])


def test_the_label_is_not_an_id(fails):
    assert "'y'" in fails(TableOptions, "y", id=("y",), error=ValueError)


def test_records_of_earlier_versions(write, load):
    path = write("a.csv", "x,y\n1,p\n2,q\n3,q\n")
    _, preprocessing, _ = load(path)
    record = json.loads(json.dumps(preprocessing.record()))
    for name in ("ids", "written"):
        del record[name]
    for column in record["columns"]:
        for name in ("optional", "order"):
            del column[name]
    old = Preprocessing.from_record(record)
    assert (old.written, old.ids) == (PLAIN, ())
    assert np.array_equal(read_rows(path, old).matrix, read_rows(path, preprocessing).matrix)
