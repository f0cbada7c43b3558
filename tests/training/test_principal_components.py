"""Gaussians that see principal components of the inputs, while learners see all inputs."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import multivariate_normal
from sklearn.decomposition import PCA

from fedgmm.data.dataset import FederatedDataset, split_rows
from fedgmm.data.tables.preprocessing import Preprocessing
from fedgmm.model.saving import load
from fedgmm.runs.comparison import data_to_compare
from fedgmm.runs.fitting import fit
from fedgmm.support.randomness import client_keys
from fedgmm.training.in_process import train

RNG = np.random.default_rng(0)
ROWS, COLUMNS = 240, 12
GROUPS = RNG.integers(2, size=ROWS)
X = RNG.normal(size=(ROWS, 3)) @ RNG.normal(size=(3, COLUMNS)) + 0.1 * RNG.normal(
    size=(ROWS, COLUMNS)
)
X[:, 0] += 6 * GROUPS
Y = (X[:, 1] * np.where(GROUPS, 1, -1) > 0).astype(int)
CLIENTS = np.repeat(["a", "b", "c"], ROWS // 3)
SMALL = {"components": 2, "learners": 2, "rounds": 8, "dtype": "float64"}


@pytest.fixture(scope="module")
def dataset():
    return FederatedDataset.from_arrays(X, Y, CLIENTS)


@pytest.fixture(scope="module")
def model(dataset):
    return train(dataset, pca=3, **SMALL)


def test_gaussians_see_the_components_of_the_standardised_training_rows(dataset, model):
    rows = dataset.train.inputs.double().numpy()
    z = (rows - rows.mean(0)) / rows.std(0)
    expected = PCA(3).fit(z)
    assert model.prediction.gaussians.means.shape == (2, 3)
    sizes = [value.shape[1:] for value in model.prediction.learners.values()]
    assert any(COLUMNS in size or COLUMNS + 1 in size for size in sizes)
    agreement = np.abs(expected.components_ @ model.projection.components.numpy().T)
    np.testing.assert_allclose(agreement, np.eye(3), atol=1e-6)


def test_all_components_give_the_same_density_ratios_as_all_inputs(dataset):
    # a rotation changes neither distances nor determinants
    full, rotated = (
        train(dataset, "gmm", pca=pca, covariance_type="spherical", **SMALL)
        for pca in (None, COLUMNS)
    )
    difference = full.score_samples(X, clients=CLIENTS) - rotated.score_samples(X, clients=CLIENTS)
    np.testing.assert_allclose(difference, difference[0], atol=1e-6)


def test_a_saved_model_predicts_and_scores_the_same(model, tmp_path):
    model.save(tmp_path)
    again = load(tmp_path)
    for name in ("predict_proba", "score_samples"):
        ours = getattr(model, name)(X[:9], clients=CLIENTS[:9])
        np.testing.assert_array_equal(ours, getattr(again, name)(X[:9], clients=CLIENTS[:9]))


def test_refit_uses_the_components_of_the_training_rows(dataset, model):
    again = train(dataset, pca=3, refit=True, **SMALL)
    np.testing.assert_array_equal(again.projection.components, model.projection.components)
    assert again.evaluate("test").mean_accuracy > 0.6


@pytest.mark.parametrize(("pca", "word"), [(13, "at most 12"), (0, "pca"), (2.5, "pca")])
def test_a_number_that_is_not_possible_is_refused(dataset, pca, word):
    with pytest.raises((ValueError, TypeError), match=word):
        train(dataset, pca=pca, **SMALL)


def test_images_cannot_be_projected():
    images = RNG.integers(256, size=(20, 1, 4, 4), dtype=np.uint8)
    data = FederatedDataset.from_arrays(images, np.arange(20) % 2, np.arange(20) // 10)
    with pytest.raises(ValueError, match="rows of numbers"):
        train(data, pca=2, **SMALL)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    home = tmp_path_factory.mktemp("vectors")
    width = 60
    mixing = RNG.normal(size=(COLUMNS, width))
    for client in "abc":
        own = np.flatnonzero(client == CLIENTS)
        vectors = pa.array((X[own] @ mixing).astype(np.float16).ravel())
        column = pa.FixedSizeListArray.from_arrays(vectors, width)
        table = pa.table({"id": [f"n{i}" for i in own], "vector": column, "label": Y[own]})
        pq.write_table(table, home / f"{client}.parquet")
    options = {"components": 2, "learners": 2, "rounds": 4}
    return fit([home], "label", home / "run", id=["id"], **options)


def test_tables_of_vectors_are_reduced_by_default(run):
    assert run.model.projection.components.shape == (48, 60)
    assert "pca = 48" in run.folder.config.read_text()


def test_a_comparison_of_files_reduces_vectors_as_fit_does(run):
    files = [str(run.folder.home.parent / f"{client}.parquet") for client in "abc"]
    found = data_to_compare(files, label="label", id=("id",), sizes={"components": 2})
    assert found.options.pca == 48


def test_every_use_of_a_run_takes_vectors(run):
    home = run.folder.home.parent
    assert len(run.predict(home / "a.parquet", client="a").columns()["id"]) == ROWS // 3
    assert run.detect(home / "b.parquet").columns()
    run.adapt("new", home / "c.parquet")
    assert "new" in run.model.names
    assert run.evaluate().mean_accuracy > 0.5
    assert run.report().is_file()


# ---------------------------------------------------------------------- vectors beside other columns

WIDTH = 20


@pytest.fixture(scope="module")
def patients(tmp_path_factory):
    """The files of three clients with age, vector and sex; ages, sexes and vectors of all rows."""
    home = tmp_path_factory.mktemp("patients")
    rng = np.random.default_rng(3)
    vectors = (X @ rng.normal(size=(COLUMNS, WIDTH))).astype(np.float32)
    ages, sexes = rng.normal(50, 10, ROWS), rng.choice(["f", "m"], ROWS)
    for client in "abc":
        own = np.flatnonzero(client == CLIENTS)
        column = pa.FixedSizeListArray.from_arrays(vectors[own].ravel(), WIDTH)
        columns = {"age": ages[own], "v": column, "sex": sexes[own], "label": Y[own]}
        pq.write_table(pa.table(columns), home / f"{client}.parquet")
    return home, ages, sexes, vectors


def test_columns_beside_vectors_are_features_as_they_are(patients, tmp_path):
    home, ages, sexes, vectors = patients
    model = fit([home], "label", tmp_path / "run", pca=4, covariance_type="full", **SMALL).model
    numbers = np.column_stack([ages, vectors.astype(float)])
    inputs = np.column_stack([(numbers - numbers.mean(0)) / numbers.std(0), sexes == "m"])
    codes = np.repeat([0, 1, 2], ROWS // 3)
    training = split_rows(codes, client_keys("abc"), (0.6, 0.2, 0.2), 0)[0]
    np.testing.assert_allclose(model.dataset.train.inputs, inputs[training], atol=1e-5)
    expected = PCA(4).fit(inputs[training, 1 : 1 + WIDTH])
    components = expected.transform(inputs[:, 1 : 1 + WIDTH])
    projection = model.projection
    signs = np.sign(
        (projection.components[:4, 1 : 1 + WIDTH].numpy() * expected.components_).sum(1)
    )
    features = np.column_stack([components * signs, inputs[:, 0], inputs[:, -1]])

    gaussians = model.prediction.gaussians
    assert gaussians.means.shape == (2, 6)
    pi = model.client_weights.sum(-1)[list(model.names).index("b")]
    density = sum(
        weight * multivariate_normal(mean, covariance).pdf(features)
        for weight, mean, covariance in zip(pi, gaussians.means, gaussians.covariances, strict=True)
    )
    np.testing.assert_allclose(model.score_samples(inputs, client="b"), np.log(density), atol=1e-4)
    assert next(iter(model.prediction.learners.values())).shape[-1] in (WIDTH + 2, WIDTH + 3)


def test_no_more_components_than_entries_of_the_vectors(patients, tmp_path):
    with pytest.raises(ValueError, match=f"at most {WIDTH}"):
        fit([patients[0]], "label", tmp_path / "run", pca=WIDTH + 1, **SMALL)


def test_short_vectors_are_not_reduced_by_default(patients, tmp_path):
    run = fit([patients[0]], "label", tmp_path / "run", **SMALL)
    assert run.model.projection is None


def test_a_vector_is_one_column_of_the_report(patients, tmp_path):
    run = fit([patients[0]], "label", tmp_path / "run", pca=3, **SMALL)
    assert list(run.preprocessing.feature_groups) == ["age", "v", "sex"]
    assert len(run.preprocessing.feature_groups["v"]) == WIDTH
    page = run.report().read_text()
    assert "component 1 of the vectors" in page


def test_a_model_of_components_of_all_inputs_still_loads_and_scores(dataset, model, tmp_path):
    # models of earlier versions reduced all inputs; a data set without vectors still does
    assert model.projection.components.shape == (3, COLUMNS)
    model.save(tmp_path)
    again = load(tmp_path)
    np.testing.assert_array_equal(
        again.score_samples(X[:9], clients=CLIENTS[:9]),
        model.score_samples(X[:9], clients=CLIENTS[:9]),
    )


def test_a_preprocessing_of_an_earlier_version_reduces_all_inputs(patients, tmp_path):
    run = fit([patients[0]], "label", tmp_path / "run", pca=3, **SMALL)
    record = run.preprocessing.record()
    for column in record["columns"]:
        del column["vector"]
    assert Preprocessing.from_record(record).vectors == ()
    assert len(run.preprocessing.vectors) == WIDTH


def test_missing_vectors_have_one_indicator(patients, tmp_path):
    rows = pq.read_table(patients[0] / "a.parquet")
    lists = [None if i % 4 == 0 else v for i, v in enumerate(rows.column("v").to_pylist())]
    for client in "ab":
        changed = rows.set_column(1, "v", pa.array(lists, pa.list_(pa.float32(), WIDTH)))
        pq.write_table(changed, tmp_path / f"{client}.parquet")
    run = fit([tmp_path / "a.parquet", tmp_path / "b.parquet"], "label", tmp_path / "run", **SMALL)
    names = run.preprocessing.feature_names
    assert [name for name in names if "missing" in name] == ["v_0=(missing)"]
    assert len(run.preprocessing.vectors) == WIDTH
    pq.write_table(rows.drop_columns(["v"]), tmp_path / "later.parquet")
    found = run.predict(tmp_path / "later.parquet", client="a")
    assert any("v not in the file" in note for note in found.notes)


def test_a_matrix_of_npz_is_a_column_of_vectors(tmp_path):
    for client in "ab":
        own = np.flatnonzero(client == CLIENTS)
        np.savez(tmp_path / f"{client}.npz", v=X[own], age=RNG.normal(size=len(own)), label=Y[own])
    run = fit([tmp_path], "label", tmp_path / "run", pca=2, **SMALL)
    assert len(run.preprocessing.vectors) == COLUMNS
    assert run.model.prediction.gaussians.means.shape == (2, 2 + 1)
