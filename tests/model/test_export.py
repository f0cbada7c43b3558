"""Models for other programs: ONNX against the model itself, and scikit-learn's mixture."""

from __future__ import annotations

import json
import sys

import numpy as np
import onnxruntime
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import nn

from fedgmm.data.dataset import FederatedDataset
from fedgmm.model.saving import load
from fedgmm.training.in_process import train
from fedgmm.training.options import ALGORITHMS
from supervised import FAST, federation, images

TIGHT = {"rtol": 1e-5, "atol": 1e-5}


def answers(path, **inputs):
    """Outputs of an ONNX file by name."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(None, inputs), strict=True))


def agrees(model, path, x, client=None, **inputs):
    """Compare a file with the model it was made from, and return the file's outputs."""
    found = answers(path, X=x, **inputs)
    if model.target is not None:
        np.testing.assert_allclose(found["mean"], model.predict(x, client, **inputs), **TIGHT)
    else:
        proba = model.predict_proba(x, client, **inputs)
        np.testing.assert_allclose(found["probabilities"], proba, **TIGHT)
        assert found["label"].tolist() == model.classes[found["label_index"]].tolist()
        clear = np.sort(proba)[:, -1] - np.sort(proba)[:, -2] > 1e-4
        assert (found["label_index"] == proba.argmax(1))[clear].all()
    none = answers(path, X=x[:0], **{name: value[:0] for name, value in inputs.items()})
    assert {name: value.shape for name, value in none.items()} == {
        name: (0, *value.shape[1:]) for name, value in found.items()
    }
    assert ("log_density" in found) == (model.prediction.gaussians is not None)
    if "log_density" in found:
        density = model.score_samples(x, client, **inputs)
        np.testing.assert_allclose(found["log_density"], density, **TIGHT)
    return found


@pytest.fixture(scope="module")
def data():
    return federation(np.random.default_rng(0), columns=4, classes=3)


def rows_of_test(data):
    return data.test.inputs.float().numpy()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_method(data, tmp_path, algorithm):
    model = train(data, algorithm, rounds=2, lr=0.5)
    agrees(model, model.export_onnx(tmp_path / "a.onnx", "oslo"), rows_of_test(data), "oslo")
    if algorithm == "local":
        with pytest.raises(ValueError, match="client"):
            model.export_onnx(tmp_path / "b.onnx")
    else:
        agrees(model, model.export_onnx(tmp_path / "b.onnx"), rows_of_test(data))


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical", "identity"])
def test_every_covariance_with_an_mlp_and_label_frequencies(data, tmp_path, kind):
    options = {"covariance_type": kind, "learner": "mlp", "personal_labels": True}
    model = train(data, **FAST, **options)
    assert model.prediction.labels is not None
    x = 50 * rows_of_test(data)  # far rows, where densities underflow
    for client in ("oslo", None):
        agrees(model, model.export_onnx(tmp_path / "a.onnx", client), x, client)


@pytest.mark.parametrize("options", [{"pca": 2}, {"standardise": False}, {"dtype": "float64"}])
def test_every_preparation_of_inputs(data, tmp_path, options):
    model = train(data, **FAST, **options)
    agrees(model, model.export_onnx(tmp_path / "a.onnx", "kiev"), rows_of_test(data), "kiev")


def test_numbers_far_from_zero_need_many_digits(data, tmp_path):
    x, names = data.train.inputs.double().numpy() + 1e7, np.array(data.train.names, dtype=object)
    far = FederatedDataset.from_arrays(x, data.train.labels.numpy(), names[data.train.codes])
    model = train(far, **FAST)
    agrees(model, model.export_onnx(tmp_path / "a.onnx", "oslo", dtype="float64"), x, "oslo")


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_a_cnn_reads_numbers_and_bytes(rng, tmp_path, dtype):
    model = train(images(rng), "fedem", learner="cnn", rounds=1, learners=2)
    x = (rng.integers(256, size=(6, 1, 8, 8)) / (1 if dtype == "uint8" else 255)).astype(dtype)
    path = model.export_onnx(tmp_path / "a.onnx", "camera 1", dtype=dtype)
    agrees(model, path, x, "camera 1")


def test_separate_features_are_a_second_input(rng, tmp_path):
    x, y = rng.normal(size=(60, 3)).astype(np.float32), rng.integers(2, size=60)
    features = rng.normal(size=(60, 2)).astype(np.float32)
    owners = np.repeat(["a", "b"], 30)
    model = train(FederatedDataset.from_arrays(x, y, owners, features=features), **FAST)
    path = model.export_onnx(tmp_path / "a.onnx", "a")
    agrees(model, path, x[:9], "a", features=features[:9])


def test_regression_gives_the_mean(rng, tmp_path):
    x = rng.normal(size=(80, 2)).astype(np.float32)
    y = 40 + 7 * x[:, 0] + rng.normal(size=80)
    owners = np.repeat(["a", "b"], 40)
    made = FederatedDataset.from_arrays(x, y, owners, task="regression")
    model = train(made, **FAST)
    found = agrees(model, model.export_onnx(tmp_path / "a.onnx", "b"), x, "b")
    assert found.keys() == {"mean", "log_density"}


def test_a_mixture_without_labels_gives_the_density_only(data, tmp_path):
    model = train(data, "gmm", components=2, rounds=2)
    found = answers(model.export_onnx(tmp_path / "a.onnx", "oslo"), X=rows_of_test(data))
    density = model.score_samples(rows_of_test(data), "oslo")
    np.testing.assert_allclose(found.pop("log_density"), density, **TIGHT)
    assert not found


@pytest.mark.parametrize("classes", [["ill", "well"], [7, 3], [True, False]])
def test_labels_keep_their_type_through_saving(rng, tmp_path, classes):
    x, owners = rng.normal(size=(40, 2)).astype(np.float32), np.repeat(["a", "b"], 20)
    y = np.array(classes)[(x[:, 0] > 0).astype(int)]
    model = train(FederatedDataset.from_arrays(x, y, owners), **FAST)
    model = load(model.save(tmp_path / "model"))
    found = agrees(model, model.export_onnx(tmp_path / "a.onnx", "a"), x, "a")
    assert set(found["label"].tolist()) <= set(classes)


def test_the_file_names_client_and_columns_but_no_other_client(rng, tmp_path):
    import pandas as pd

    x = pd.DataFrame(rng.normal(size=(40, 2)), columns=["age", "dose"])
    y, owners = (x["age"] > 0).to_numpy().astype(int), np.repeat(["oslo", "bergen"], 20)
    path = train(FederatedDataset.from_arrays(x, y, owners), **FAST).export_onnx(
        tmp_path / "a.onnx", "oslo"
    )
    facts = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    assert (facts["client"], json.loads(facts["columns"])) == ("oslo", ["age", "dose"])
    assert b"bergen" not in path.read_bytes()


def test_weights_of_zero_leave_no_nan(data, tmp_path):
    model = train(data, rounds=2, components=2, learners=2)
    weights = model.prediction.client_weights
    weights[model.names.index("oslo")] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    agrees(model, model.export_onnx(tmp_path / "a.onnx", "oslo"), rows_of_test(data), "oslo")
    assert model.to_gaussian_mixture("oslo").weights_.tolist() == [1.0]


def test_errors_are_sentences(data, tmp_path, monkeypatch):
    model = train(data, "fedavg", learner=lambda: nn.Sequential(nn.Linear(4, 3)), rounds=1)
    path = tmp_path / "a.onnx"
    with pytest.raises(ValueError, match="linear, mlp and cnn"):
        model.export_onnx(path)
    with pytest.raises(ValueError, match="paris"):
        model.export_onnx(path, "paris")
    with pytest.raises(ValueError, match="dtype"):
        model.export_onnx(path, dtype="int8")
    with pytest.raises(ValueError, match="Gaussians"):
        model.to_gaussian_mixture()
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match="fedgmm\\[onnx\\]"):
        model.export_onnx(path)
    assert not path.exists()


# ---------------------------------------------------------------------- scikit-learn


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical", "identity"])
@pytest.mark.parametrize("standardise", [True, False])
def test_the_mixture_of_scikit_learn_scores_alike(data, kind, standardise):
    dtype = "float64" if standardise else "float32"  # scaled rows are rounded to this type
    model = train(data, **FAST, covariance_type=kind, standardise=standardise, dtype=dtype)
    x = data.test.inputs.double().numpy()
    for client in ("oslo", None):
        mixture = model.to_gaussian_mixture(client)
        np.testing.assert_allclose(mixture.score_samples(x), model.score_samples(x, client), 1e-8)
        np.testing.assert_allclose(mixture.predict_proba(x).sum(1), 1.0)
        assert mixture.sample(5)[0].shape == (5, 4)
    by_hand = 0.0
    covariances = np.broadcast_to(mixture.covariances_, (2, *mixture.covariances_.shape[-2:]))
    if mixture.covariance_type == "diag":
        covariances = [np.diag(own) for own in mixture.covariances_]
    elif mixture.covariance_type == "spherical":
        covariances = [own * np.eye(4) for own in mixture.covariances_]
    for share, mean, own in zip(mixture.weights_, mixture.means_, covariances, strict=True):
        by_hand = by_hand + share * multivariate_normal(mean, own).pdf(x)
    np.testing.assert_allclose(mixture.score_samples(x), np.log(by_hand), 1e-8)


def test_with_principal_components_the_mixture_has_their_coordinates(data):
    model = train(data, **FAST, pca=2, dtype="float64")
    x = data.test.inputs
    seen = model.projection.apply(model.scaling.apply(x, torch.float64)).numpy()
    found = model.to_gaussian_mixture("oslo").score_samples(seen)
    np.testing.assert_allclose(found, model.score_samples(x.numpy(), "oslo"), 1e-8)
