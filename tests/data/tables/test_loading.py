"""Files of many clients to one data set, and later files to rows."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import os

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from fedgmm.data.tables.inspection import inspect_tables
from fedgmm.data.tables.loading import agreement, load_federation, read_rows, read_tables
from fedgmm.data.tables.preprocessing import Preprocessing, TableOptions

SPLITS = ("train", "validation", "test")


def assert_one_sentence(message):
    assert "\n" not in message
    assert message.endswith((".", "?")), message
    assert "Arrow" not in message


def same(first, second):
    """Whether two data sets hold the same bits in the same splits."""
    return (
        first.names == second.names
        and first.column_names == second.column_names
        and list(first.classes) == list(second.classes)
        and all(
            np.array_equal(getattr(a, part).numpy(), getattr(b, part).numpy())
            for a, b in ((first.split(name), second.split(name)) for name in SPLITS)
            for part in ("inputs", "labels", "codes")
        )
    )


def all_rows(dataset):
    """All rows of a data set with their labels, sorted: clients and splits are forgotten."""
    rows = [
        np.column_stack([split.labels.numpy(), split.inputs.numpy()])
        for split in map(dataset.split, SPLITS)
    ]
    together = np.concatenate(rows)
    return together[np.lexsort(together.T)]


def pooled(frame):
    """The same preprocessing of the pooled rows with pandas and scikit-learn, ``(n, 1 + d)``."""
    numeric = frame[["height", "age"]].astype(float)
    days = (frame["seen"] - pd.Timestamp("1970-01-01")).dt.total_seconds() / 86400
    scaled = StandardScaler().fit_transform(pd.concat([numeric, days], axis=1))
    colour = OneHotEncoder(sparse_output=False).fit_transform(frame[["colour"]].fillna("zz"))
    height, age, seen = np.where(np.isnan(scaled), 0.0, scaled).T
    return np.column_stack(
        [
            frame["y"] == "well",
            height,
            frame["height"].isna(),
            age,
            colour,  # its last column says that it is missing
            frame["smoker"],
            seen,
        ]
    )


# ---------------------------------------------------------------------- equal to pooled rows


@pytest.mark.parametrize("stream", [False, True])
def test_equal_to_the_same_preprocessing_of_pooled_rows(frame, sites, load, stream, request):
    if stream:
        request.getfixturevalue("streaming")
    dataset, preprocessing, _ = load(*sites)
    expected = pooled(frame)
    scale = {column.name: column for column in preprocessing.columns}
    for name in ("height", "age"):
        assert scale[name].mean == pytest.approx(frame[name].mean(), rel=1e-12)
        assert scale[name].scale == pytest.approx(frame[name].std(ddof=0), rel=1e-12)
    assert scale["colour"].categories == tuple(sorted(frame["colour"].dropna().unique()))
    expected = expected.astype(np.float32)
    np.testing.assert_allclose(
        all_rows(dataset), expected[np.lexsort(expected.T)], rtol=1e-6, atol=1e-6
    )


def test_equal_to_one_client_that_holds_all_rows(frame, sites, load, tmp_path):
    frame.drop(columns="site").to_csv(tmp_path / "all.csv", index=False)
    apart, apart_preprocessing, _ = load(*sites)
    together, preprocessing, _ = load(tmp_path / "all.csv")
    for one, other in zip(preprocessing.columns, apart_preprocessing.columns, strict=True):
        assert one.mean == pytest.approx(other.mean, rel=1e-12)
        assert one.scale == pytest.approx(other.scale, rel=1e-12)
        assert (one.categories, one.indicator) == (other.categories, other.indicator)
    np.testing.assert_allclose(all_rows(apart), all_rows(together), atol=1e-6)


def test_numbers_far_from_zero_equal_pooled_ones(rng, load, tmp_path):
    values = 1e9 + rng.normal(size=300)
    frame = pd.DataFrame({"a": values, "y": rng.choice(["p", "q"], 300)})
    for site in range(5):
        frame[site::5].to_csv(tmp_path / f"{site}.csv", index=False)
    _, preprocessing, _ = load(tmp_path)
    assert preprocessing.columns[0].scale == pytest.approx(values.std(), rel=1e-10)
    assert preprocessing.columns[0].mean == pytest.approx(values.mean(), rel=1e-15)


def test_clients_of_one_file_equal_the_same_clients_in_files_of_their_own(
    frame, sites, load, tmp_path
):
    frame.to_csv(tmp_path / "together.csv", index=False)
    frame[:100].to_csv(tmp_path / "part1.csv", index=False)
    frame[100:].to_csv(tmp_path / "part2.csv", index=False)
    apart, _, _ = load(*sites)
    together, _, _ = load(tmp_path / "together.csv", client_column="site")
    parts, _, _ = load(tmp_path / "part2.csv", tmp_path / "part1.csv", client_column="site")
    assert same(apart, together)
    assert same(apart, parts)


def test_the_kind_of_file_does_not_matter(frame, sites, load, tmp_path):
    text, _, _ = load(*sites)
    folder = tmp_path / "binary"
    folder.mkdir()
    for index, (name, own) in enumerate(frame.groupby("site")):
        own = own.drop(columns="site")
        if index == 0:
            own.to_parquet(folder / f"{name}.parquet")
        elif index == 1:
            own.to_csv(folder / f"{name}.tsv", index=False, sep="\t")
        else:
            own.to_csv(folder / f"{name}.csv.gz", index=False, sep=";", decimal=",")
    assert same(load(folder)[0], text)


def test_the_order_of_files_does_not_matter(sites, load):
    assert same(load(*sites)[0], load(*reversed(sites))[0])


def test_columns_in_another_order_are_found_by_name(frame, sites, load):
    before, _, _ = load(*sites)
    own = pd.read_csv(sites[1])
    own[own.columns[::-1]].to_csv(sites[1], index=False)
    assert same(load(*sites)[0], before)


def test_streaming_gives_the_same_bits(sites, load, request):
    whole, _, _ = load(*sites)
    request.getfixturevalue("streaming")
    assert same(load(*sites)[0], whole)


# ---------------------------------------------------------------------- privacy


def test_no_row_leaves_a_client(rng, write, load):
    rows = "".join(f"person {i},{rng.normal():.6f},{'ab'[i % 2]}\n" for i in range(40))
    _, preprocessing, tables = load(write("site.csv", "name,a,y\n" + rows))
    assert "person" not in repr(tables.summaries)
    assert any("look like names" in note for note in tables.notes)
    assert preprocessing.feature_names == ("a",)


# ---------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("first", "second", "classes"),
    [
        (["1", "2"], ["1.0", "3.0"], [1, 2, 3]),
        (["True", "False"], ["true", "true"], [False, True]),
        (['"yes"', "no"], [" yes ", "no"], ["no", "yes"]),
        (["007", "008"], ["007", "007"], ["007", "008"]),
        (["yes", "yes"], ["no", "no"], ["no", "yes"]),
        (["yes", "?"], ["no", "  "], ["no", "yes"]),
    ],
)
def test_labels(write, load, first, second, classes):
    a = write("a.csv", "x,y\n" + "".join(f"{i},{label}\n" for i, label in enumerate(first)))
    b = write("b.csv", "x,y\n" + "".join(f"{i},{label}\n" for i, label in enumerate(second, 5)))
    dataset, _, tables = load(a, b)
    assert dataset.classes.tolist() == classes
    unlabelled = sum(label.strip() in ("?", "") for label in (*first, *second))
    assert sum(s.unlabelled for s in tables.summaries.values()) == unlabelled
    assert sum(len(dataset.split(name)) for name in SPLITS) == 4 - unlabelled
    (note,) = [note for note in tables.notes if "no label" in note] or ["0"]
    assert note.startswith(str(unlabelled))


def test_labels_that_cannot_be_learned(write, load, fails):
    assert "'z'" in fails(load, write("a.csv", "x,y\n1,2\n"), label="z")
    assert "class" in fails(load, write("a.csv", "x,y\n1,1\n2,1\n"), error=ValueError)
    rows = "".join(f"{i},{i / 7}\n" for i in range(1, 40))
    assert "measurement" in fails(load, write("a.csv", f"x,y\n{rows}"), error=ValueError)
    assert "label" in fails(load, write("a.csv", "x,y\n1,\n2,NA\n"))
    assert "column" in fails(load, write("a.csv", "y\na\nb\n"))


# ---------------------------------------------------------------------- columns of several kinds


def features(write, load, first, second, **options):
    """The preprocessing of one column of two sites."""
    a = write("a.csv", "x,y\n" + "".join(f"{v},{'pq'[i % 2]}\n" for i, v in enumerate(first)))
    b = write("b.csv", "x,y\n" + "".join(f"{v},{'pq'[i % 2]}\n" for i, v in enumerate(second)))
    dataset, preprocessing, _ = load(a, b, **options)
    return preprocessing.columns[0], dataset


def test_numbers_beside_few_words_are_categories(write, load):
    column, dataset = features(write, load, [1, 2, 1, 3], ["1", "high", "2.0", "high"])
    assert column.categories == ("1", "2", "3", "high")
    assert all_rows(dataset)[:, 1:].sum() == 8


def test_numbers_beside_many_words_are_an_error(write, load, fails):
    words = [f"w{i % 60}" for i in range(240)]
    message = fails(features, write, load, range(240), words)
    assert "b.csv" in message or "a.csv" in message
    assert "'x'" in message


def test_a_typing_error_in_a_site_of_few_rows_is_named(write, load, fails):
    message = fails(features, write, load, [i / 7 for i in range(200)], ["1.5", "abc", "3"])
    assert "b.csv" in message
    assert "'abc'" in message


def test_the_right_column_is_blamed(write, load, fails):
    rows = "".join(f"{i / 7},{i % 2},{'pq'[i % 2]}\n" for i in range(200))
    a = write("a.csv", "x,few,y\n" + rows)
    b = write("b.csv", "x,few,y\n1.5,no,p\nabc,yes,q\n")
    message = fails(load, a, b)
    assert "b.csv" in message
    assert "'abc'" in message


def test_numbers_as_categories(write, load):
    column, _ = features(write, load, [1, 2, 1], ["1.0", "", "3.0"], categorical=("x",))
    assert column.categories == ("1", "2", "3")
    assert column.indicator


@pytest.mark.parametrize("stream", [False, True])
def test_truth_values(write, load, stream, request):
    if stream:
        request.getfixturevalue("streaming")
    column, dataset = features(write, load, ["True", "false"], ["TRUE", "True"])
    assert column.categories == ("false", "true")
    assert all_rows(dataset)[:, 1].sum() == 3
    column, dataset = features(write, load, ["True", "False"], [1, 0])
    assert (column.role, column.mean, column.scale) == ("number", 0.5, 0.5)
    assert sorted(all_rows(dataset)[:, 1]) == [-1, -1, 1, 1]
    column, dataset = features(write, load, ["True", "False"], ["True", "maybe"])
    assert column.categories == ("False", "True", "maybe")
    assert all_rows(dataset)[:, 1:].sum() == 4


def test_dates_beside_numbers_are_an_error(write, load, fails):
    dates = [f"2020-01-{i:02}" for i in range(1, 29)]
    message = fails(features, write, load, dates, range(28))
    assert "'x'" in message


def test_times_and_zones(write, load):
    column, _ = features(write, load, ["12:30", "13:30"], ["01:00:00", "02:00"])
    assert column.role == "date"
    column, _ = features(
        write, load, ["2020-01-01T00:00Z", "2020-01-02T00:00Z"], ["2020-01-03", ""]
    )
    assert column.role == "date"


def test_infinities_are_missing_and_huge_numbers_harmless(write, load):
    column, dataset = features(write, load, [1, "inf", 2], [3, "-inf", 4])
    assert column.mean == 2.5
    assert column.indicator
    assert np.isfinite(all_rows(dataset)).all()
    rows = "".join(
        f"{v},{i},{'pq'[i % 2]}\n" for i, v in enumerate(["1e308", "1e-308", "-1e308", 1])
    )
    dataset, preprocessing, _ = load(write("c.csv", "x,z,y\n" + rows))
    assert preprocessing.feature_names == ("x", "x=(missing)", "z")
    assert np.isfinite(all_rows(dataset)).all()


def test_whole_numbers_with_many_digits(write, load):
    column, _ = features(write, load, [2**60 + 1, 2**60 + 3], [2**61, 2**62])
    assert column.role == "number"


def test_a_column_without_values_at_one_site(write, load):
    column, dataset = features(write, load, ["", "NA", "?", "nan"], [1, 2, 3, 4])
    assert (column.mean, column.indicator) == (2.5, True)
    assert all_rows(dataset)[:, 2].sum() == 4
    column, _ = features(write, load, ["", "NA", "?", "nan"], ["u", "v", "u", "v"])
    assert column.categories == ("u", "v")


def test_missing_values_are_counted_once_when_streamed(write, load, streaming):
    column, _ = features(write, load, ["", *[f"2020-01-{i:02}" for i in range(1, 20)]] * 5, [""])
    assert column.role == "date"
    *_, tables = load(write("c.csv", "x,y\n,p\nu,q\n"), write("d.csv", "x,y\nv,q\nu,q\n"))
    assert tables.summaries["c"].columns["x"].missing == 1


def test_rare_missing_values_have_no_indicator(write, load):
    values = [*range(199), ""]
    assert not features(write, load, values, values, indicator_from=0.01)[0].indicator
    assert features(write, load, values, values, indicator_from=0.004)[0].indicator


def test_more_categories_than_columns_are_wanted(write, load):
    values = [f"c{i % 60:02}" for i in range(240)]
    column, dataset = features(write, load, values, values)
    assert len(column.categories) == 50
    assert column.categories[-1] == "(other)"
    assert (all_rows(dataset)[:, 1:].sum(1) == 1).all()


def test_a_list_is_an_error_unless_it_is_ignored(load, fails, tmp_path):
    frame = pd.DataFrame({"a": [1.0, 2.0], "l": [["u"], ["v"]], "y": ["p", "q"]})
    frame.to_parquet(tmp_path / "site.parquet")
    assert "'l'" in fails(load, tmp_path / "site.parquet")
    _, preprocessing, _ = load(tmp_path / "site.parquet", ignore=("l",))
    assert preprocessing.feature_names == ("a",)


def test_a_column_of_vectors_can_be_ignored_by_its_name(load, tmp_path):
    frame = pd.DataFrame({"a": [1.0, 2.0], "v": [[1, 2], [2, 4]], "y": ["p", "q"]})
    frame.to_parquet(tmp_path / "site.parquet")
    assert load(tmp_path / "site.parquet")[1].feature_names == ("a", "v_0", "v_1")
    assert load(tmp_path / "site.parquet", ignore=("v",))[1].feature_names == ("a",)


@pytest.mark.parametrize("client_column", [None, "who"])
def test_a_column_that_is_ignored_may_be_at_some_sites_only(write, load, fails, client_column):
    a = write("a.csv", "who,x,y\na,1,p\na,2,q\na,4,q\n")
    b = write("b.csv", "id,who,note,x,y\n1,b,good,1,p\n2,b,,3,q\n3,b,bad,5,p\n")
    ignore = ("note", "id") if client_column else ("note", "id", "who")
    dataset, preprocessing, _ = load(a, b, ignore=ignore, client_column=client_column)
    assert preprocessing.feature_names == ("x",)
    assert len(all_rows(dataset)) == 6
    for path in (a, b):  # later files may have them or not
        assert len(read_rows(path, preprocessing).matrix) == 3
    ignore = (*ignore, "zz")
    assert "'zz'" in fails(load, a, b, ignore=ignore, client_column=client_column, error=ValueError)


def test_npz_sites(rng, load, tmp_path):
    for site in "ab":
        np.savez(
            tmp_path / f"{site}.npz", X=rng.normal(size=(20, 3)), y=rng.integers(0, 2, 20) == 1
        )
    dataset, preprocessing, _ = load(tmp_path)
    assert preprocessing.feature_names == ("X_0", "X_1", "X_2")
    assert dataset.classes.tolist() == [False, True]


# ---------------------------------------------------------------------- sites that do not fit


@pytest.mark.parametrize(
    ("second", "word"),
    [
        ("u,y\n1,p\n", "'u'"),
        ("x,z\n1,2\n", "label"),
        ("x,z,y\n", "no rows"),
        ("x,z,y", "no rows"),
        ("", "empty"),
    ],
)
def test_a_site_that_does_not_fit(write, load, fails, second, word):
    a, b = write("a.csv", "x,z,y\n1,2,p\n2,3,q\n"), write("b.csv", second)
    message = fails(load, a, b, write("c.csv", "x,z,y\n1,4,p\n"))
    assert "b.csv" in message
    assert word in message


def test_two_files_of_one_name(write, load, fails):
    a = write("a.csv", "x,y\n1,p\n")
    b = write("a.csv.gz", gzip.compress(b"x,y\n1,p\n"))
    assert "same name" in fails(load, a, b)


def test_client_columns(write, load, fails):
    path = write("whole.csv", "who,x,y\n1,1,p\n2,2,q\n1,3,q\n")
    dataset, _, _ = load(path, client_column="who")
    assert dataset.names == ("1", "2")
    assert "row 2" in fails(load, write("all.csv", "who,x,y\n1,1,p\n,2,q\n"), client_column="who")
    message = fails(load, write("all.csv", "who,x,y\n1,1,p\n1,2,q\n2,2,\n"), client_column="who")
    assert "client '2'" in message
    assert "'who'" in fails(load, write("all.csv", "x,y\n1,p\n"), client_column="who")
    other = write("more.csv", "who,x,z,y\n1,1,1,p\n3,1,2,p\n")
    *_, tables = load(path, other, client_column="who")
    assert "Column 'z' is absent at 2; the values count as missing there." in tables.notes
    assert tables.summaries["1"].columns["z"].missing == 2


def test_a_client_whose_files_have_columns_of_several_kinds(write, load):
    first = write("a.csv", "who,x,y\n1,1,p\n2,2,q\n1,2,q\n")
    second = write("b.csv", "who,x,y\n1,high,p\n2,1.0,q\n")
    dataset, preprocessing, _ = load(first, second, client_column="who")
    assert preprocessing.columns[0].categories == ("1", "2", "high")
    assert all_rows(dataset)[:, 1:].sum() == 5


def test_unknown_options(write, load, fails):
    path = write("a.csv", "x,y\n1,p\n2,q\n")
    assert "'z'" in fails(load, path, ignore=("z",), error=ValueError)
    assert "'z'" in fails(load, path, categorical=("z",), error=ValueError)
    assert "a.csv" in fails(load, path, ignore=("x",))


def test_a_file_that_changes_before_it_is_loaded(write, fails):
    rows = "x,y\n1,p\n2,q\n3,p\n"
    for change in (
        rows + "4,q\n",
        "x,y\n1,p\n",
        "z,y\n1,p\n2,q\n3,p\n",
        rows.replace("3", "5"),
        None,
    ):
        path = write("a.csv", rows)
        tables = read_tables([path], TableOptions("y"))
        preprocessing = agreement(tables)
        if change is None:
            path.unlink()
        else:
            path.write_text(change)
            os.utime(path, ns=(1, 1))
        assert "a.csv" in fails(tables.load, preprocessing)


def test_values_that_break_a_type_in_a_later_block(write, load, streaming):
    rows = "1,x,2020-01-01,,p\n2,x,2020-01-02,,q\n" * 100
    path = write("a.csv", f"n,c,d,e,y\n{rows}1.5,z,2020-01-01 12:00,7,p\n")
    _, preprocessing, _ = load(path)
    roles = {column.name: column.role for column in preprocessing.columns}
    assert roles == {"n": "number", "c": "category", "d": "date", "e": "number"}
    path = write("b.csv", f"n,c,d,e,y\n{rows}many,z,2020-01-01 12:00,7,p\n")
    _, preprocessing, _ = load(path)
    assert preprocessing.columns[0].categories == ("1", "2", "many")


# ---------------------------------------------------------------------- later files


@pytest.fixture
def trained(sites, load):
    dataset, preprocessing, _ = load(*sites)
    return dataset, Preprocessing.from_record(json.loads(json.dumps(preprocessing.record())))


@pytest.mark.parametrize("stream", [False, True])
def test_later_files_get_the_same_bits(sites, trained, load, stream, request):
    if stream:
        request.getfixturevalue("streaming")
    dataset, preprocessing = trained
    assert preprocessing.feature_names == dataset.column_names
    rows = [read_rows(path, preprocessing, label_needed=True) for path in sites]
    found = np.concatenate([np.column_stack([own.labels, own.matrix]) for own in rows])
    assert np.array_equal(found[np.lexsort(found.T)], all_rows(dataset))
    assert not any(own.notes or own.unknown_labels or own.clients for own in rows)


def changed(path, change, name="later.csv"):
    frame = change(pd.read_csv(path))
    later = path.with_name(name)
    frame.to_csv(later, index=False)
    return later


def test_later_files_in_another_order_or_without_labels(sites, trained):
    _, preprocessing = trained
    whole = read_rows(sites[0], preprocessing)
    turned = read_rows(changed(sites[0], lambda f: f[f.columns[::-1]]), preprocessing)
    bare = read_rows(changed(sites[0], lambda f: f.drop(columns="y")), preprocessing)
    assert np.array_equal(whole.matrix, turned.matrix)
    assert np.array_equal(whole.matrix, bare.matrix)
    assert bare.labels is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda f: f.drop(columns="age"), "'age'"),
        (lambda f: f.assign(age="old"), "'old'"),
        (lambda f: f.assign(age=[*f["age"][:-1].astype(object), "old"]), "'old'"),
        (lambda f: f.assign(age="2020-01-01"), "dates"),
        (lambda f: f.assign(seen=3), "'seen'"),
        (lambda f: f.assign(colour=3.5), "'colour'"),
        (lambda f: f.drop(columns="y"), "label"),
        (lambda f: f[:0], "rows"),
    ],
)
def test_later_files_that_do_not_fit(sites, trained, fails, change, word, stream, request):
    if stream:
        request.getfixturevalue("streaming")
    later = changed(sites[0], change)
    message = fails(read_rows, later, trained[1], label_needed=True)
    assert "later.csv" in message
    assert word in message


def test_later_files_with_something_new(sites, trained):
    _, preprocessing = trained
    later = changed(sites[0], lambda f: f.assign(colour="pink", y="dead", smoker=1, age=np.nan))
    rows = read_rows(later, preprocessing)
    assert rows.unknown_labels == ["dead"]
    assert (rows.labels == -1).all()
    assert "'colour'" in rows.notes[0]
    again = read_rows(changed(sites[0], lambda f: f.assign(extra=1)), preprocessing)
    assert "extra not used" in again.notes[0]
    names = preprocessing.feature_names
    assert (rows.matrix[:, [n.startswith("colour=") for n in names]] == 0).all()
    assert (rows.matrix[:, names.index("smoker=true")] == 1).all()
    assert (rows.matrix[:, names.index("age")] == 0).all()


def test_later_files_with_the_client_column(frame, load, tmp_path):
    frame.to_csv(tmp_path / "together.csv", index=False)
    _, preprocessing, _ = load(tmp_path / "together.csv", client_column="site")
    rows = read_rows(tmp_path / "together.csv", preprocessing)
    assert rows.clients == frame["site"].tolist()


def test_later_files_of_another_dialect(frame, sites, trained, tmp_path):
    _, preprocessing = trained
    own = pd.read_csv(sites[0], keep_default_na=False)
    own.to_csv(tmp_path / "later.csv", index=False, sep=";")
    pd.read_csv(sites[0]).to_csv(tmp_path / "comma.csv", index=False, sep=";", decimal=",")
    before = read_rows(sites[0], preprocessing).matrix
    assert np.array_equal(read_rows(tmp_path / "later.csv", preprocessing).matrix, before)
    assert np.array_equal(read_rows(tmp_path / "comma.csv", preprocessing).matrix, before)


# ---------------------------------------------------------------------- anything at all

cells = st.one_of(
    st.sampled_from(
        ["", "NA", "?", "1", "2.5", "1e308", "-inf", "true", "2020-01-01", "a", "b", "12:30"]
    ),
    st.text(max_size=6),
)
tables = st.builds(
    lambda header, rows, mark, end: end.join(mark.join(row) for row in [header, *rows]),
    st.lists(st.sampled_from(["y", "a", "b", "", "a b", '"q"', "1"]), min_size=1, max_size=4),
    st.lists(st.lists(cells, min_size=1, max_size=4), max_size=8),
    st.sampled_from([",", ";", "\t", "|"]),
    st.sampled_from(["\n", "\r\n", "\r"]),
)
labels = st.sampled_from(["p", "q", "1", "1.0", "", "?"])


def pair_of_sites(width):
    rows = st.lists(st.tuples(*[cells] * width, labels), min_size=1, max_size=12)
    return st.tuples(rows, rows)


def works_or_fails_with_a_sentence(call, *args):
    """The result of a call, or ``None`` if it fails with one sentence."""
    try:
        return call(*args)
    except ValueError as error:
        complaint = error
    assert type(complaint).__name__ in ("TableError", "HeaderError", "ValueError"), repr(complaint)
    assert_one_sentence(str(complaint))
    return None


@given(
    content=st.one_of(
        tables.map(str.encode),
        st.binary(max_size=60),
        tables.map("\ufeff{}".format).map(str.encode),
    )
)
def test_no_file_yields_a_traceback(tmp_path, content):
    path = tmp_path / "site.csv"
    path.write_bytes(content)
    works_or_fails_with_a_sentence(load_federation, [path], TableOptions("y"))


@given(pair=st.integers(1, 3).flatmap(pair_of_sites), stream=st.booleans())
def test_no_pair_of_sites_yields_a_traceback(tmp_path, pair, stream, monkeypatch):
    for name, rows in zip(("s.csv", "t.csv"), pair, strict=True):
        with (tmp_path / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([[*"abc"[: len(rows[0]) - 1], "y"], *rows])
    with monkeypatch.context() as patch:
        if stream:
            patch.setattr("fedgmm.data.tables.text_files._WHOLE_FILE_BYTES", 0)
            patch.setattr("fedgmm.data.tables.text_files._BLOCK_BYTES", 64)
        found = works_or_fails_with_a_sentence(
            load_federation, [tmp_path / "s.csv", tmp_path / "t.csv"], TableOptions("y")
        )
        if found is None:
            return
        dataset, preprocessing, _ = found
        assert np.isfinite(all_rows(dataset)).all()
        record = json.loads(json.dumps(preprocessing.record(), allow_nan=False))
        later = Preprocessing.from_record(record)
        rows = [read_rows(tmp_path / name, later) for name in ("s.csv", "t.csv")]
    kept = np.concatenate([np.column_stack([r.labels, r.matrix])[r.labels >= 0] for r in rows])
    assert np.array_equal(kept[np.lexsort(kept.T)], all_rows(dataset))


def test_a_note_about_a_single_client(tmp_path):
    (tmp_path / "all.csv").write_text("site,x,y\na,1,0\nb,2,1\n")
    (note,) = read_tables([tmp_path], TableOptions("y")).notes
    assert "--client-column" in note
    assert read_tables([tmp_path], TableOptions("y", "site")).notes == []


# ---------------------------------------------------------------------- no client has a veto


@pytest.fixture
def shops(write):
    """Sites of 500, 500 and 22 rows, the last with 21 different shops; the shop decides the label."""

    def rows(shops):
        return "x,shop,y\n" + "".join(f"{i % 7},s{s},{'pq'[s % 2]}\n" for i, s in enumerate(shops))

    return [
        write("bergen.csv", rows(np.arange(500) % 30)),
        write("oslo.csv", rows(np.arange(500) % 30)),
        write("tromso.csv", rows([*range(21), 0])),
    ]


def test_a_small_site_does_not_delete_a_column(shops, load):
    dataset, preprocessing, tables = load(*shops)
    assert sum(name.startswith("shop=") for name in preprocessing.feature_names) == 30
    inputs = dataset.train.inputs[:, 1:]
    assert (inputs.sum(1) == 1).all()  # also at the small site, where every shop is known elsewhere
    (note,) = [note for note in tables.notes if "shop" in note]
    assert "tromso" in note
    declared, same, tables = load(*shops, categorical=("shop",))
    assert same.feature_names == preprocessing.feature_names
    assert tables.summaries["tromso"].columns["shop"].categories["s20"] == 1
    assert not tables.notes
    assert (declared.train.inputs == dataset.train.inputs).all()


def test_one_huge_number_does_not_delete_a_column(write, load):
    a = write("a.csv", "x,z,y\n" + "".join(f"{i},{i % 5},{'pq'[i % 2]}\n" for i in range(100)))
    b = write("b.csv", "x,z,y\n1e200,1,p\n5,2,q\n")
    dataset, preprocessing, _ = load(a, b)
    assert preprocessing.columns[0].mean == pytest.approx(sum(range(100), 5) / 101)
    assert np.isfinite(all_rows(dataset)).all()
    assert np.abs(all_rows(dataset)).max() < 10


def test_a_site_without_a_column_trains_and_predicts(write, load):
    files = [
        write(
            f"{name}.csv", "x,z,y\n" + "".join(f"{i},{i % 5},{'pq'[i % 2]}\n" for i in range(300))
        )
        for name in "ab"
    ]
    small = write("c.csv", "x,y\n1,p\n2,q\n")
    _, preprocessing, tables = load(*files, small)
    assert "Column 'z' is absent at c; the values count as missing there." in tables.notes
    assert preprocessing.feature_names == ("x", "z")  # too rare for an indicator
    rows = read_rows(small, preprocessing)
    assert (rows.matrix[:, 1] == 0).all()
    assert "z not in the file" in rows.notes[0]


def test_a_word_in_a_column_of_numbers_is_shown(write, load, fails):
    rows = "".join(f"{i / 7:.3f},{'pq'[i % 2]}\n" for i in range(80))
    a, b = write("a.csv", "x,y\n<5,p\n" + rows), write("b.csv", "x,y\n" + rows)
    message = fails(load, a, b)
    assert "'<5'" in message
    assert "--missing-values" in message
    assert load(a, b, missing_values=("<5",))[1].columns[0].role == "number"


@pytest.mark.parametrize(
    "values",
    [
        [str(20 + i) for i in range(40)],  # few: they would become categories
        [f"{100 + i / 8}" for i in range(200)],  # many: they would look like names
        [f"{1 + i % 28:02d}.{1 + i % 12:02d}.1999" for i in range(84)],
    ],
)
@pytest.mark.parametrize("client_column", [None, "site"])
def test_numbers_that_few_words_make_text_have_a_note(write, load, values, client_column):
    def table(word):
        rows = zip([word, word, *values[2:]], itertools.count(), strict=False)
        return "bp,x,site,y\n" + "".join(f"{v},{i},{i % 2},{i % 3 % 2}\n" for v, i in rows)

    names = "a" if client_column else "ab"
    paths = [write(f"{name}.csv", table("unknown")) for name in names]
    _, _, tables = load(*paths, client_column=client_column)
    (note,) = [note for note in tables.notes if "--missing-values 'unknown'" in note]
    assert "'bp'" in note
    _, preprocessing, tables = load(
        *paths, missing_values=("unknown",), client_column=client_column
    )
    assert preprocessing.columns[0].role in ("number", "date")
    assert not any("unknown" in note for note in tables.notes)


def test_classes_and_categories_that_differ_only_in_case_have_a_note(write, load):
    def table(no, yes, ward):
        rows = (f"{i},{ward if i % 3 else 'B'},{yes if i % 2 else no}\n" for i in range(30))
        return "x,ward,y\n" + "".join(rows)

    paths = [write("a.csv", table("No", "Yes", "A")), write("b.csv", table("no", "YES", "a"))]
    dataset, _, tables = load(*paths)
    assert list(dataset.classes) == ["No", "YES", "Yes", "no"]
    label, ward = (note for note in tables.notes if "upper and lower case" in note)
    assert "'ward'" in ward or "'ward'" in label
    assert any("'y' has classes" in note and "'No' and 'no'" in note for note in (label, ward))
    assert {label, ward} <= set(inspect_tables(read_tables(paths, TableOptions("y"))).warnings)


def test_words_beside_few_numbers_are_categories_without_a_note(write, load):
    table = "k,x,y\n" + "".join(f"{k},{i},{i % 2}\n" for i, k in enumerate(["A1", "B", "3"] * 8))
    _, _, tables = load(write("a.csv", table), write("b.csv", table))
    assert not any("'k'" in note for note in tables.notes)


def test_many_classes_of_few_rows_have_a_note(tmp_path):
    for site in "ab":
        rows = [f"{n % 7},c{n % 60}\n" for n in range(180)]
        (tmp_path / f"{site}.csv").write_text("x,y\n" + "".join(rows))
    tables = read_tables([tmp_path], TableOptions("y"))
    agreement(tables)
    assert any("60 classes" in note and "--label" in note for note in tables.notes)


def test_a_folder_of_images_is_not_a_folder_of_tables(tmp_path):
    (tmp_path / "one.png").write_bytes(b"")
    with pytest.raises(ValueError, match="--images") as raised:
        read_tables([tmp_path], TableOptions("y"))
    assert_one_sentence(str(raised.value))
