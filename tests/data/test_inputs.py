from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from fedgmm.data.inputs import (
    NO_CLIENT,
    as_pairs,
    checked_rows,
    columns_of_pairs,
    encode_clients,
    is_missing,
    matrices_of_pairs,
)

NAN = float("nan")
X = np.arange(12.0).reshape(4, 3)

# ---------------------------------------------------------------------- ids

ids_of_one_kind = st.one_of(
    st.lists(st.integers(-5, 5), min_size=1, max_size=30),
    st.lists(st.sampled_from(["oslo", "bergen", "", "nan", "1"]), min_size=1, max_size=30),
    st.lists(st.one_of(st.floats(-2, 2), st.just(NAN)), min_size=1, max_size=30),
)
mixed_ids = st.lists(
    st.sampled_from(["a", "b", "nan", 1, 2, 2.5, None, NAN, True, b"x", pd.NA, pd.NaT]),
    min_size=1,
    max_size=30,
)


def check_encoding(ids, codes, names):
    assert codes.dtype == np.int64
    assert len(codes) == len(ids)
    assert len(set(names)) == len(names)
    for code, name in zip(codes.tolist(), ids, strict=True):
        if is_missing(name):
            assert code == NO_CLIENT
        else:
            assert names[code] == name
            assert isinstance(names[code], str) == isinstance(name, str)
    assert set(codes.tolist()) - {NO_CLIENT} == set(range(len(names)))


@given(st.one_of(ids_of_one_kind, mixed_ids))
def test_codes_lead_back_to_the_ids_given_as_a_list(ids):
    check_encoding(ids, *encode_clients(ids, len(ids)))


@given(ids_of_one_kind)
def test_codes_lead_back_to_the_ids_given_as_an_array(ids):
    codes, names = encode_clients(np.array(ids), len(ids))
    check_encoding(ids, codes, names)
    assert names == sorted(names)


@given(mixed_ids)
def test_codes_lead_back_to_the_ids_given_as_objects(ids):
    array = np.empty(len(ids), dtype=object)
    array[:] = ids
    check_encoding(ids, *encode_clients(array, len(ids)))
    check_encoding(ids, *encode_clients(pd.Series(ids, dtype=object), len(ids)))


@pytest.mark.parametrize(
    "ids",
    [
        pd.Series(["b", "a", None, "b"]),
        pd.Series(["b", "a", None, "b"], index=[9, 8, 7, 6]),
        pd.array(["b", "a", pd.NA, "b"], dtype="string"),
        pd.Categorical(["b", "a", None, "b"]),
        np.array(["b", "a", None, "b"], dtype=object),
        ["b", "a", NAN, "b"],
        ("b", "a", None, "b"),
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_containers_of_strings_with_a_missing_one(ids):
    codes, names = encode_clients(ids, 4)
    assert names == ["a", "b"]
    assert codes.tolist() == [1, 0, NO_CLIENT, 1]


@pytest.mark.parametrize(
    "ids", [pd.array([7, 3, pd.NA, 7], dtype="Int64"), [7, 3, None, 7], [7.0, 3.0, NAN, 7.0]]
)
def test_containers_of_numbers_with_a_missing_one(ids):
    codes, names = encode_clients(ids, 4)
    assert names == [3, 7]
    assert codes.tolist() == [1, 0, NO_CLIENT, 1]


def test_numbers_and_strings_stay_apart():
    codes, names = encode_clients(["1", 1, "1", 1], 4)
    assert names == ["1", 1]
    assert codes.tolist() == [0, 1, 0, 1]


def test_all_ids_missing():
    codes, names = encode_clients([None, NAN, pd.NA], 3)
    assert names == []
    assert codes.tolist() == [NO_CLIENT] * 3


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, 3], "3 entries"),
        ([], "0 entries"),
        ([[1], [2], [3], [4]], r"\(4, 1\)"),
        ("oslo", r"\(\)"),
    ],
)
def test_not_one_id_per_row(ids, message):
    with pytest.raises(ValueError, match=message):
        encode_clients(ids, 4)


@pytest.mark.parametrize("name", [None, NAN, np.nan, np.float32("nan"), pd.NA, pd.NaT])
def test_missing(name):
    assert is_missing(name)


@pytest.mark.parametrize("name", ["", "nan", "None", 0, 0.0, False, ("a", 1), b""])
def test_not_missing(name):
    assert not is_missing(name)


# ---------------------------------------------------------------------- pairs


@pytest.mark.parametrize(
    "value",
    [
        X,
        X.tolist(),
        [[1.0, 2.0], [3.0, 4.0]],
        [(1.0, 2.0), (3.0, 4.0)],
        np.array([["a", "b"]], dtype=object),
        pd.DataFrame(X),
        torch.from_numpy(X),
        sparse.csr_matrix(X),
        sparse.dok_matrix(X),
        [],
        "rows",
        3,
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_these_are_not_pairs(value):
    assert as_pairs(value) is None


@pytest.mark.parametrize(
    "value",
    [
        {"a": X, "b": X},
        [("a", X), ("b", X)],
        (("a", X), ("b", X)),
        [["a", X], ["b", X]],
        iter([("a", X), ("b", X)]),
        (pair for pair in [("a", X), ("b", X)]),
        {"a": X, "b": X}.items(),
        [("a", X.tolist()), ("b", X.tolist())],
        [("a", pd.DataFrame(X)), ("b", pd.DataFrame(X))],
        zip(["a", "b"], [X, X], strict=True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_these_are_pairs(value):
    pairs = as_pairs(value)
    assert [name for name, _ in pairs] == ["a", "b"]
    assert all(np.array_equal(np.asarray(rows), X) for _, rows in pairs)


def test_a_list_with_an_empty_or_flat_client_is_still_one_of_pairs():
    assert as_pairs([("a", []), ("b", X)]) is not None
    assert as_pairs([("a", np.arange(3.0))]) is not None


@given(
    st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), st.integers(1, 5), min_size=1)
)
def test_matrices_of_pairs_keep_names_and_order(sizes):
    pairs = [(name, np.full((n, 2), float(n))) for name, n in sizes.items()]
    matrices, names = matrices_of_pairs(pairs)
    assert names == list(sizes)
    assert all(matrix is rows for matrix, (_, rows) in zip(matrices, pairs, strict=True))


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        ([], ValueError, "client"),
        ([("a", X), ("a", X)], ValueError, "'a'.*once"),
        ([("a", X), ("b", np.empty((0, 3)))], ValueError, "'b' is empty"),
        ([("a", X), ("b", [])], ValueError, "'b' is empty"),
        ([("a", np.empty((4, 0)))], ValueError, "'a'.*columns"),
        ([("a", X), ("b", X[:, :2])], ValueError, "'b'.*2 columns"),
        ([("a", X), ("b", X[0])], ValueError, "'b'.*1D"),
        ([("a", X), ("b", 7)], ValueError, "'b'.*0D"),
        ([("a", X), ("b", [["x", "y", "z"]])], ValueError, "'b'.*numeric.*'x'"),
        ([("b", [[1, 2], [3]])], ValueError, "'b'.*numeric"),
        ([("b", X + 1j)], ValueError, "'b'.*complex"),
        ([("b", X.astype("M8[D]"))], ValueError, "'b'.*datetime"),
        ([("b", sparse.csr_matrix(X))], TypeError, "'b'.*sparse"),
        ([("a", X), X], TypeError, "ndarray"),
        ([("a", X, 1)], TypeError, "tuple"),
    ],
)
def test_bad_pairs(pairs, error, message):
    with pytest.raises(error, match=message):
        matrices_of_pairs(pairs)


@pytest.mark.parametrize(
    "rows",
    [X.astype(int), X.astype(bool), X.astype(np.float16), X.astype(">f8"), X.tolist()],
    ids=["int", "bool", "float16", "big-endian", "list"],
)
def test_other_numbers_become_float64(rows):
    matrices, _ = matrices_of_pairs([("a", rows)])
    assert matrices[0].dtype == np.float64
    assert matrices[0].dtype.isnative
    assert np.array_equal(matrices[0], np.asarray(rows))


def test_column_names_must_agree_between_tables():
    table = pd.DataFrame(X, columns=["x", "y", "z"])
    assert columns_of_pairs([("a", X), ("b", table), ("c", table)]) == ["x", "y", "z"]
    assert columns_of_pairs([("a", X)]) is None
    assert columns_of_pairs([("a", pd.DataFrame(X))]) is None  # numbers are not names
    with pytest.raises(ValueError, match=r"'b'.*'z'"):
        columns_of_pairs([("a", table), ("b", table[["z", "y", "x"]])])


# ---------------------------------------------------------------------- checked rows


@pytest.mark.parametrize(
    ("value", "what", "dtype"),
    [
        (np.nan, "NaN", np.float64),
        (np.nan, "NaN", np.float32),
        (np.inf, "infinity", np.float64),
        (-np.inf, "infinity", np.float32),
        (-1e200, r"-1e\+200", np.float64),
    ],
)
def test_bad_values_are_named_with_client_column_and_row(value, what, dtype):
    matrices = [np.zeros((2, 3), dtype=dtype), np.zeros((3, 3), dtype=dtype)]
    matrices[1][2, 1] = value
    codes, names = np.array([0, 0, 1, 1, 1]), ["oslo", "bergen"]
    with pytest.raises(ValueError, match=f"contains .*{what}.*client 'bergen', column 1, row 4"):
        checked_rows(matrices, codes, names)
    with pytest.raises(ValueError, match="client 'bergen', column 'height'"):
        checked_rows(matrices, codes, names, ["weight", "height", "age"])


def test_float32_products_allow_smaller_numbers():
    big = np.full((2, 1), 1e17)
    checked_rows([big], np.zeros(2, dtype=np.int64), ["a"])
    with pytest.raises(ValueError, match="float32"):
        checked_rows([big], np.zeros(2, dtype=np.int64), ["a"], dtype=torch.float32)


def test_bad_value_in_a_later_chunk_of_a_large_client():
    large = np.zeros((3000, 2))
    large[2, 1] = np.nan
    with pytest.raises(ValueError, match="client 'c', column 1, row 13"):
        checked_rows([np.zeros((11, 2)), large], np.repeat([0, 1], [11, 3000]), ["b", "c"])


def test_a_row_without_a_client():
    with pytest.raises(ValueError, match="Row 2"):
        checked_rows([X], np.array([0, 0, NO_CLIENT, 0]), ["a"])
