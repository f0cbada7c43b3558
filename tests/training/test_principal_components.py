"""Gaussians that see principal components of the inputs, while learners see all inputs."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.decomposition import PCA

from fedgmm.data.dataset import FederatedDataset
from fedgmm.model.saving import load
from fedgmm.runs.fitting import fit
from fedgmm.training.local import train

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


def test_every_use_of_a_run_takes_vectors(run):
    home = run.folder.home.parent
    assert len(run.predict(home / "a.parquet", client="a").columns()["id"]) == ROWS // 3
    assert run.detect(home / "b.parquet").columns()
    run.adapt("new", home / "c.parquet")
    assert "new" in run.model.names
    assert run.evaluate().mean_accuracy > 0.5
    assert run.report().is_file()
