"""Named clients with labelled rows: splits, kinds of input, and what is refused."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgmm.data import dataset
from fedgmm.data.dataset import SPLITS, FederatedDataset, split_rows
from fedgmm.support import scratch
from fedgmm.support.randomness import client_keys, row_uniforms
from fedgmm.support.scratch import folder_of
from fedgmm.training.in_process import train
from supervised import federation


def numbered(sizes, columns=2):
    """Clients whose first column is a number that no other row has."""
    names = [f"c{i}" for i in range(len(sizes))]
    ids = np.repeat(names, sizes)
    x = np.zeros((len(ids), columns))
    x[:, 0] = np.arange(len(ids))
    y = np.arange(len(ids)) % 2
    return x, y, ids


def numbers(rows):
    return rows.inputs[:, 0].numpy().astype(int)


# ---------------------------------------------------------------------- splits


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    shares=st.sampled_from([(0.6, 0.2, 0.2), (1.0, 0.0, 0.0), (0.5, 0.5, 0.0), (0.0, 0.5, 0.5)]),
    seed=st.integers(0, 5),
)
def test_splits_are_disjoint_complete_and_of_the_right_size(sizes, shares, seed):
    codes = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    keys = client_keys(range(len(sizes)))
    parts = split_rows(codes, keys, shares, seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(codes)))
    for client, size in enumerate(sizes):
        train, validation, test = ((codes[rows] == client).sum() for rows in parts)
        assert train == max(1, round(shares[0] * size))
        assert train + validation == max(train, round((shares[0] + shares[1]) * size))
        assert train + validation + test == size
    for rows in parts:  # a client's rows stand together, in the order they came
        assert (np.diff(codes[rows]) >= 0).all()
        for client in range(len(sizes)):
            assert (np.diff(rows[codes[rows] == client]) > 0).all()


def test_large_federations_are_split_and_shuffled_in_groups(rng, monkeypatch):
    sizes = [7, 300, 1, 40, 80, 0, 2]
    codes = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    keys = client_keys(range(len(sizes)))
    x, y, ids = numbered([size for size in sizes if size])
    expected = split_rows(codes, keys, (0.6, 0.2, 0.2), 3)
    rows = FederatedDataset.from_arrays(x, y, ids).train
    order = rows.shuffled(4, 2, 1)
    for at_once in (1, 50, 400):
        monkeypatch.setattr("fedgmm.data.dataset._ROWS_AT_ONCE", at_once)
        for found, rows_of in zip(
            split_rows(codes, keys, (0.6, 0.2, 0.2), 3), expected, strict=True
        ):
            np.testing.assert_array_equal(found, rows_of)
        again = FederatedDataset.from_arrays(x, y, ids).train
        np.testing.assert_array_equal(again.shuffled(4, 2, 1), order)


def rounded(*args):
    """Return draws of which many are equal."""
    return np.floor(16 * row_uniforms(*args)) / 16


@given(
    rows=st.integers(1, 400),
    ends=st.tuples(st.integers(0, 400), st.integers(0, 400)),
    draw=st.sampled_from([row_uniforms, rounded]),
    in_file=st.booleans(),
    seed=st.integers(0, 3),
)
def test_a_large_client_is_split_by_the_ranks_of_its_draws(rows, ends, draw, in_file, seed):
    first, last = sorted(min(end, rows) for end in ends)
    key = client_keys(["oslo"])[0]
    order = np.argsort(draw(seed, dataset._SPLIT_STREAM, key, np.arange(rows)), kind="stable")
    expected = np.empty(rows, dtype=int)
    expected[order] = (np.arange(rows) >= first).astype(int) + (np.arange(rows) >= last)
    with (
        pytest.MonkeyPatch.context() as patch,
        scratch.scratch(tempfile.gettempdir() if in_file else None),
    ):
        patch.setattr(dataset, "row_uniforms", draw)
        patch.setattr(scratch, "_BLOCK_ROWS", 50)
        patch.setattr(scratch, "_SMALLEST", 100)
        patch.setattr(scratch, "_COMMON_FILE", 4096)
        patch.setattr(scratch, "_SORTED_AT_ONCE", 70)
        part = np.empty(rows, dtype=np.int8)
        dataset._split_client(part, seed, key, (first, last))
    np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("draw", [row_uniforms, rounded])
def test_large_clients_in_a_file_are_shuffled_like_those_in_memory(
    rng, tmp_path, monkeypatch, draw
):
    ids = np.repeat([0, 1, 2], [3000, 2900, 100])
    monkeypatch.setattr(dataset, "row_uniforms", draw)
    rows = FederatedDataset.from_arrays(np.zeros((6000, 1)), ids % 2, ids, split=(1, 0, 0)).train
    expected = rows.shuffled(3, 2, 1)
    np.testing.assert_array_equal(np.sort(expected), np.arange(6000))
    for name in ("_BLOCK_ROWS", "_SORTED_AT_ONCE"):
        monkeypatch.setattr(scratch, name, 700)
    monkeypatch.setattr(dataset, "_ROWS_AT_ONCE", 500)
    with scratch.scratch(tmp_path):
        labels = torch.from_numpy(scratch.copied(rows.labels.numpy()))
    order = replace(rows, labels=labels).shuffled(3, 2, 1)
    assert folder_of(order) == tmp_path
    np.testing.assert_array_equal(order, expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_arrays_in_files_are_not_copied_into_memory(rng, tmp_path, monkeypatch, weighted):
    x, ids = rng.normal(size=(3000, 4)).astype(np.float32), np.arange(3000) % 3
    y = (x[:, 0] > 0).astype(int)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    weights = {"sample_weight": rng.integers(0, 3, 3000)} if weighted else {}
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    options = {"components": 2, "learners": 2, "rounds": 2, "dtype": "float64"}
    models = []
    for array in (x, mapped):
        data = FederatedDataset.from_arrays(array, y, ids, **weights)
        place = folder_of(data.train.inputs)
        assert place == (tmp_path if array is mapped else None)
        models.append(train(data, **options))
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]
    for name, value in models[0].prediction.learners.items():
        torch.testing.assert_close(models[1].prediction.learners[name], value, rtol=0, atol=1e-10)
    scores = [model.evaluate().mean_log_loss for model in models]
    assert scores[1] == pytest.approx(scores[0], abs=1e-10)


def test_the_paper_splits_60_20_20():
    x, y, ids = numbered([100, 50])
    data = FederatedDataset.from_arrays(x, y, ids)
    sizes = [data.split(name).features.rows_per_client.tolist() for name in SPLITS]
    assert sizes == [[60, 30], [20, 10], [20, 10]]


def test_rows_labels_and_clients_stay_together():
    x, y, ids = numbered([30, 1, 12])
    order = np.random.default_rng(1).permutation(len(x))
    data = FederatedDataset.from_arrays(x[order], y[order], ids[order])
    for name in SPLITS:
        rows = data.split(name)
        here = numbers(rows)
        assert (data.classes[rows.labels.numpy()] == y[here]).all()
        assert [data.names[code] for code in rows.codes] == ids[here].tolist()
        assert rows.offsets.tolist() == [0, *np.cumsum(np.bincount(rows.codes, minlength=3))]


def test_a_split_depends_on_the_seed_and_on_no_other_client():
    x, y, ids = numbered([40, 25, 33])
    whole = FederatedDataset.from_arrays(x, y, ids, seed=7)
    for name in ("c0", "c2"):
        here = ids == name
        alone = FederatedDataset.from_arrays(x[here], y[here], ids[here], seed=7)
        code = whole.names.index(name)
        for split in SPLITS:
            both = whole.split(split)
            assert (numbers(both)[both.codes == code] == numbers(alone.split(split))).all()
    other = FederatedDataset.from_arrays(x, y, ids, seed=8)
    assert numbers(other.train).tolist() != numbers(whole.train).tolist()


def test_a_client_with_one_row_only_trains():
    x, y, ids = numbered([1, 1, 10])
    data = FederatedDataset.from_arrays(x, y, ids)
    assert data.train.features.rows_per_client.tolist() == [1, 1, 6]
    assert data.test.features.rows_per_client.tolist() == [0, 0, 2]
    assert data.names == ("c0", "c1", "c2")
    assert len(data.test.client(0)) == 0


def test_without_ids_there_is_one_client():
    x, y, _ = numbered([10])
    assert FederatedDataset.from_arrays(x, y).names == (0,)


# ---------------------------------------------------------------------- the two doors


def test_arrays_and_clients_make_the_same_data_set():
    x, y, ids = numbered([12, 7, 30])
    a = FederatedDataset.from_arrays(x, y, ids)
    b = FederatedDataset.from_clients({n: (x[ids == n], y[ids == n]) for n in ("c0", "c1", "c2")})
    c = FederatedDataset.from_clients([(n, (x[ids == n], y[ids == n])) for n in ("c0", "c1", "c2")])
    for other in (b, c):
        assert other.names == a.names
        for name in SPLITS:
            assert torch.equal(other.split(name).inputs, a.split(name).inputs)
            assert torch.equal(other.split(name).labels, a.split(name).labels)
            assert torch.equal(other.split(name).codes, a.split(name).codes)


def test_tables_keep_the_names_of_their_columns():
    x, y, ids = numbered([10, 10])
    table = pd.DataFrame(x, columns=["age", "dose"])
    data = FederatedDataset.from_arrays(table, pd.Series(y), pd.Series(ids))
    assert data.column_names == ("age", "dose")
    split = {n: (table[ids == n], y[ids == n]) for n in ("c0", "c1")}
    assert FederatedDataset.from_clients(split).column_names == ("age", "dose")
    mixed = {**split, "c1": (split["c1"][0][["dose", "age"]], split["c1"][1])}
    ordered, expected = FederatedDataset.from_clients(mixed), FederatedDataset.from_clients(split)
    assert torch.equal(ordered.train.inputs, expected.train.inputs)
    split["c1"] = (split["c1"][0].rename(columns={"dose": "Dose"}), split["c1"][1])
    with pytest.raises(ValueError, match=r"'c1'.*'dose'"):
        FederatedDataset.from_clients(split)


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (["no", "yes"], "U"),
        ([False, True], "b"),
        ([3, 7], "i"),
        ([0.5, 1.5], "f"),
        (pd.Series(["a", "b"], dtype=object), "O"),
        (pd.Categorical(["x", "y"]), "O"),
        (np.array(["p", "q"], dtype="S1"), "S"),
    ],
)
def test_labels_of_any_kind(labels, kind):
    values = np.asarray(labels)
    y = values[np.arange(20) % 2]
    data = FederatedDataset.from_arrays(np.random.default_rng(0).normal(size=(20, 2)), y)
    assert data.classes.dtype.kind == kind
    assert data.classes.tolist() == values.tolist()
    x, _, _ = numbered([20])
    data = FederatedDataset.from_arrays(x, y)
    assert (data.classes[data.train.labels.numpy()] == y[numbers(data.train)]).all()


def test_integers_and_bytes_as_inputs():
    rng = np.random.default_rng(0)
    counts = FederatedDataset.from_arrays(rng.integers(9, size=(20, 3)), np.arange(20) % 2)
    assert counts.train.inputs.dtype == torch.float64
    pixels = rng.integers(256, size=(20, 1, 4, 4)).astype(np.uint8)
    data = FederatedDataset.from_arrays(pixels, np.arange(20) % 2)
    assert data.train.inputs.dtype == torch.uint8  # a byte a pixel
    assert data.train.features.chunks[0].dtype == torch.float32
    assert data.input_shape == (1, 4, 4)
    assert torch.equal(data.train.features.chunks[0], data.train.inputs.flatten(1).float())


def test_features_of_their_own():
    x, y, ids = numbered([20, 20])
    seen = np.column_stack([x[:, 0], -x[:, 0], x[:, 0] ** 2])
    data = FederatedDataset.from_arrays(x, y, ids, features=seen)
    assert not data.train.features_are_inputs
    chunk = torch.cat(data.train.features.chunks)
    assert chunk.shape[1] == 3
    assert torch.equal(chunk[:, 0], data.train.inputs[:, 0])
    some = data.select(["c1"]).train
    assert torch.equal(torch.cat(some.features.chunks)[:, 1], -some.inputs[:, 0])


# ---------------------------------------------------------------------- rows of some clients


@pytest.mark.parametrize("kind", ["float", "bytes", "features"])
def test_selected_clients_keep_their_rows(rng, kind):
    x, y, ids = numbered([9, 5, 14])
    features = x * 2 if kind == "features" else None
    data = FederatedDataset.from_arrays(
        x.astype(np.uint8) if kind == "bytes" else x, y, ids, features=features
    )
    some = data.select(["c2", "c0"])
    assert some.names == ("c0", "c2")  # in the order they have
    for name in SPLITS:
        rows, whole = some.split(name), data.split(name)
        keep = whole.codes != 1
        assert torch.equal(rows.inputs, whole.inputs[keep])
        assert torch.equal(rows.labels, whole.labels[keep])
        assert rows.codes.tolist() == [c // 2 for c in whole.codes[keep].tolist()]
        assert rows.features_are_inputs == (kind != "features")
        expected = torch.cat(whole.features.chunks)[keep]
        assert torch.equal(torch.cat(rows.features.chunks), expected)


def test_selected_rows_share_the_memory_of_features_and_inputs(rng):
    data = federation(rng)
    kept = data.train.keep(data.train.labels == 0)
    for rows in (data.train, data.select(["oslo", "kiev"]).train, kept):
        assert rows.features.chunks[0].data_ptr() == rows.inputs.data_ptr()


def test_other_inputs_take_the_features_along(rng):
    rows = federation(rng).train
    moved = rows.with_inputs(rows.inputs * 2)
    assert torch.equal(moved.features.chunks[0], rows.inputs * 2)
    assert torch.equal(moved.labels, rows.labels)


@pytest.mark.parametrize(("clients", "message"), [(["c0", "mars"], "mars"), ([], "at least one")])
def test_clients_that_cannot_be_selected(clients, message):
    x, y, ids = numbered([9, 5])
    with pytest.raises(ValueError, match=message):
        FederatedDataset.from_arrays(x, y, ids).select(clients)


# ---------------------------------------------------------------------- shuffles


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), seed=st.integers(0, 9))
def test_a_shuffle_mixes_rows_within_their_client(sizes, seed):
    x, y, ids = numbered(sizes)
    rows = FederatedDataset.from_arrays(x, y, ids, split=(1.0, 0.0, 0.0)).train
    order = rows.shuffled(seed, 1, 0)
    assert sorted(order.tolist()) == list(range(len(rows)))
    assert torch.equal(rows.codes[order], rows.codes)


def test_a_shuffle_belongs_to_seed_round_epoch_and_client():
    x, y, ids = numbered([50, 40, 60])
    whole = FederatedDataset.from_arrays(x, y, ids, split=(1.0, 0.0, 0.0))
    alone = whole.select(["c1"]).train
    draws = set()
    for key in ((0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)):
        order = whole.train.shuffled(*key)
        assert torch.equal(order, whole.train.shuffled(*key))
        own = order[50:90] - 50
        assert torch.equal(own, alone.shuffled(*key))  # the other clients change nothing
        draws.add(tuple(own.tolist()))
    assert len(draws) == 4


def test_equal_draws_do_not_leave_the_order_to_the_sort(monkeypatch):
    """Rows with the same draw must keep their order, or it would depend on what stands beside."""
    draws = np.random.default_rng(0).choice([0.2, 0.5, 0.8], size=500)
    x, y, ids = numbered([300, 200])
    rows = FederatedDataset.from_arrays(x, y, ids, split=(1.0, 0.0, 0.0)).train
    monkeypatch.setattr("fedgmm.data.dataset.row_uniforms", lambda *_: draws)
    expected = np.lexsort((np.arange(500), draws, rows.codes.numpy()))
    assert rows.shuffled(0, 1, 0).tolist() == expected.tolist()


def test_every_order_of_three_rows_is_about_as_likely():
    x, y, ids = numbered([3] * 60)
    rows = FederatedDataset.from_arrays(x, y, ids, split=(1.0, 0.0, 0.0)).train
    seen = np.zeros(6)
    for round_number in range(40):
        order = rows.shuffled(0, round_number, 0).reshape(60, 3) % 3
        seen += np.bincount(order[:, 0] * 2 + (order[:, 1] > order[:, 2]), minlength=6)
    assert np.abs(seen / seen.sum() - 1 / 6).max() < 0.03


# ---------------------------------------------------------------------- how it reads


def test_it_prints_itself_on_one_screen():
    x, y, ids = numbered([10, 5, 7, 20, 3])
    text = repr(FederatedDataset.from_arrays(x, np.where(y, "sick", "well"), ids))
    assert "5 clients ('c0', 'c1', 'c2', 'c3', …)" in text
    assert "rows     45 (train 27, validation 9, test 9); 3 to 20 per client" in text
    assert "inputs   2 float64" in text
    assert "classes  2: sick, well" in text
    many = repr(FederatedDataset.from_arrays(x, np.arange(45) % 12, ids))
    assert "12: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …" in many


# ---------------------------------------------------------------------- what is refused


def spoiled(**changes):
    x, y, ids = numbered([6, 5])
    parts = {"X": x, "y": y, "clients": ids}
    for name, change in changes.items():
        parts[name] = change(parts[name])
    return parts


def put(row, column, value):
    def change(x):
        x = x.copy()
        x[row, column] = value
        return x

    return change


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"X": put(7, 1, np.nan)}, "NaN: client 'c1', column 1, row 7"),
        ({"X": put(2, 0, np.inf)}, "infinity: client 'c0', column 0, row 2"),
        ({"y": lambda y: np.where(np.arange(11) == 8, np.nan, y)}, "client 'c1', row 8"),
        ({"y": lambda y: np.array(["a", None] * 5 + ["b"], dtype=object)}, "client 'c0', row 1"),
        ({"y": lambda y: pd.Series([0, 1] * 5 + [None], dtype="Int64")}, "client 'c1', row 10"),
        ({"y": lambda y: np.array([0, "a"] * 5 + [1], dtype=object)}, "int, str"),
        ({"y": lambda y: y[:-1]}, r"\(10,\)"),
        ({"y": lambda y: y[:, None]}, r"\(11, 1\)"),
        ({"clients": lambda c: c[:-1]}, "10 entries"),
        ({"clients": lambda c: [None, *c[1:]]}, "Row 0"),
        ({"X": lambda x: x[:, 0]}, r"\(11,\)"),
        ({"X": lambda x: 3.0}, "columns"),
        ({"X": lambda x: x[:, :0]}, "no columns"),
        ({"X": lambda x: np.full((11, 2), "a")}, "not numeric"),
        ({"X": lambda x: x + 1j}, "not numeric.*complex"),
        ({"X": lambda x: x.astype("datetime64[s]")}, "not numeric.*datetime"),
        ({"X": lambda x: x[:0], "y": lambda y: y[:0], "clients": lambda c: c[:0]}, "no rows"),
    ],
)
def test_arrays_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        FederatedDataset.from_arrays(**spoiled(**changes))


def test_a_missing_value_names_the_column_of_a_table():
    parts = spoiled(X=put(7, 1, np.nan))
    table = pd.DataFrame(parts.pop("X"), columns=["age", "dose"])
    with pytest.raises(ValueError, match="client 'c1', column 'dose', row 7"):
        FederatedDataset.from_arrays(table, **parts)


def test_nan_is_found_in_features_and_in_inputs_beside_features():
    x, y, ids = numbered([6, 5])
    seen = np.ones((11, 3))
    with pytest.raises(ValueError, match="NaN: client 'c1', column 2, row 9"):
        FederatedDataset.from_arrays(x, y, ids, features=put(9, 2, np.nan)(seen))
    with pytest.raises(ValueError, match="NaN: client 'c0', column 1, row 3"):
        FederatedDataset.from_arrays(put(3, 1, np.nan)(x), y, ids, features=seen)


@pytest.mark.parametrize("shape", [(10, 3), (11,), (11, 3, 2)])
def test_features_need_a_row_each(shape):
    x, y, ids = numbered([6, 5])
    with pytest.raises(ValueError, match="features must"):
        FederatedDataset.from_arrays(x, y, ids, features=np.ones(shape))


def pair(rows=4, columns=2, labels=None):
    x = np.arange(rows * columns, dtype=float).reshape(rows, columns)
    return x, np.arange(rows if labels is None else labels) % 2


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ({}, "clients"),
        ({"a": pair(), "b": pair(0)}, "'b' is empty"),
        ({"a": pair(), "b": ([], [])}, "'b' is empty"),
        ({"a": pair(), "b": pair(columns=3)}, r"'b'.*shape \(3,\)"),
        ({"a": pair(), "b": pair(labels=5)}, "'b'.*labels"),
        ([("a", pair()), ("a", pair())], "'a'.*once"),
        ({"a": pair(), None: pair()}, "name"),
        ({"a": ([["x", "y"]], [0])}, "'a'.*numeric"),
    ],
)
def test_clients_that_are_refused(clients, message):
    with pytest.raises(ValueError, match=message):
        FederatedDataset.from_clients(clients)


@pytest.mark.parametrize("split", [(0.6, 0.4), (0.5, 0.2, 0.2), (1.2, -0.1, -0.1)])
def test_shares_must_sum_to_one(split):
    x, y, ids = numbered([6, 5])
    with pytest.raises(ValueError, match="split"):
        FederatedDataset.from_arrays(x, y, ids, split=split)


def test_an_unknown_split_is_named(rng):
    with pytest.raises(ValueError, match="dev"):
        federation(rng).split("dev")


# ---------------------------------------------------------------------- classes or numbers


def labelled(y, **changes):
    return FederatedDataset.from_arrays(np.zeros((len(y), 1)), y, **changes)


CONTINUOUS = {
    "measurements": np.linspace(0.0, 1.0, 60),
    "few rows": np.linspace(0.0, 1.0, 21),
    "objects": np.linspace(0.0, 1.0, 60).astype(object),
    "rounded": np.arange(5000) % 40 / 10,
    "whole numbers": np.arange(300.0),
    "many whole numbers": np.arange(6000) % 1500,
    "texts of fractions": np.array([f"{i / 7}" for i in range(200)]),
    "texts among objects": np.array([f"{i / 4}" for i in range(200)], dtype=object),
}
CLASSES = {
    "digits": np.arange(10),
    "letters and digits": np.arange(62),
    "a hundred": np.arange(100.0),
    "years": 1900 + np.arange(600) % 120,
    "counts": np.arange(2000) % 200,
    "thousand": np.arange(4000) % 1000,
    "half stars": np.arange(30) % 10 / 2,
    "texts": np.array([f"{i / 7}a" for i in range(200)]),
    "texts of codes": np.array([f"{i:04}" for i in range(200)]),
    "texts of half stars": np.array([f"{i % 10 / 2}" for i in range(30)]),
    "dates": np.datetime64("2024-01-01") + np.arange(300),
}


@pytest.mark.parametrize("kind", CONTINUOUS)
def test_continuous_labels_are_refused_with_both_remedies(kind):
    y = CONTINUOUS[kind]
    with pytest.raises(ValueError, match=r"task='regression'.*task='classification'"):
        labelled(y)
    with pytest.raises(ValueError, match="continuous"):
        FederatedDataset.from_clients({"a": (np.zeros((len(y), 1)), y)})
    assert len(labelled(y, task="classification").classes) == len(np.unique(y))


@pytest.mark.parametrize("kind", CLASSES)
def test_classes_are_not_taken_for_measurements(kind):
    y = CLASSES[kind]
    assert len(labelled(y).classes) == len(np.unique(y))


def test_numbers_to_predict():
    y = np.linspace(3.0, 9.0, 40)
    data = labelled(y, task="regression", split=(0.5, 0.25, 0.25))
    assert data.task == "regression"
    assert not len(data.classes)
    assert data.train.labels.dtype == torch.float64
    together = torch.cat([data.train.labels, data.validation.labels, data.test.labels])
    np.testing.assert_array_equal(np.sort(together), y)
    assert float(data.target.mean) == pytest.approx(float(data.train.labels.mean()))
    assert float(data.target.scale) == pytest.approx(float(data.train.labels.std(correction=0)))
    assert "numbers" in repr(data)
    assert labelled(np.arange(3), task="regression").task == "regression"
    texts = labelled(y.astype(str), task="regression", split=(0.5, 0.25, 0.25))
    np.testing.assert_array_equal(texts.train.labels, data.train.labels)
    assert labelled(np.arange(3)).task == "classification"


@pytest.mark.parametrize("y", [["a", "b"], [True, False], np.array(["2024-01-01"] * 2, "M8[D]")])
def test_regression_needs_numbers(y):
    with pytest.raises(ValueError, match="numbers"):
        labelled(np.array(y), task="regression")
    with pytest.raises(ValueError, match="missing"):
        labelled(np.array([1.0, np.nan]), task="regression")
    with pytest.raises(ValueError, match="task"):
        labelled(np.array(y), task="ranking")


# ---------------------------------------------------------------------- wrong calls


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ({"a": np.zeros((2, 3))}, "'a' has one ndarray, without labels"),
        ({"a": (np.zeros((4, 3)),)}, "'a' has one tuple of length 1"),
        ({"a": {"X": np.zeros((4, 3)), "y": np.zeros(4)}}, "dictionary with the keys 'X', 'y'"),
        ([(np.zeros((4, 3)), np.zeros(4))], "ndarray in place of a client's name"),
        ([np.zeros((4, 3))], "an entry of type ndarray"),
    ],
)
def test_clients_that_are_not_pairs(clients, message):
    with pytest.raises(TypeError, match=rf"\{{client: \(X, y\)\}}.*{message}"):
        FederatedDataset.from_clients(clients)


def test_a_column_of_texts_is_named():
    table = pd.DataFrame({"age": np.arange(6.0), "sex": list("mfmfmf")})
    with pytest.raises(ValueError, match=r"column 'sex'.*Encode"):
        FederatedDataset.from_arrays(table, np.arange(6) % 2)


def test_a_missing_number_of_pandas_is_a_missing_value():
    table = pd.DataFrame({"age": np.arange(6.0), "dose": pd.array([1, 2, pd.NA, 3, 4, 5])})
    with pytest.raises(ValueError, match=r"NaN.*column 'dose', row 2"):
        FederatedDataset.from_arrays(table, np.arange(6) % 2)


def test_a_mapping_in_place_of_rows():
    with pytest.raises(TypeError, match="X is a mapping"):
        FederatedDataset.from_arrays({"a": np.eye(6)}, np.arange(6) % 2)


@pytest.mark.parametrize("kind", [scipy.sparse.csr_matrix, scipy.sparse.coo_array])
def test_sparse_rows(kind):
    x, y = kind(np.eye(6)), np.arange(6) % 2
    with pytest.raises(TypeError, match=r"X is a sparse matrix.*toarray"):
        FederatedDataset.from_arrays(x, y)
    with pytest.raises(TypeError, match=r"Client 'a' is a sparse matrix.*toarray"):
        FederatedDataset.from_clients({"a": (x, y)})


@pytest.mark.parametrize("split", [None, 0.8, "train"])
def test_a_split_that_is_not_shares(split):
    with pytest.raises(TypeError, match=f"three shares.*{split!r}"):
        FederatedDataset.from_arrays(np.eye(6), np.arange(6) % 2, split=split)


def test_a_data_set_in_place_of_the_name_of_a_split():
    data = FederatedDataset.from_arrays(np.eye(6), np.arange(6) % 2)
    with pytest.raises(TypeError, match=r"FederatedDataset.*dataset="):
        data.split(data)
