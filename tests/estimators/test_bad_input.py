"""Bad input raises an error that names the client, column or parameter, before any computation."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from fedgmm import FederatedGaussianMixture

X = np.random.default_rng(0).normal(size=(12, 3))
IDS = np.repeat(["oslo", "bergen", "bodø"], 4)


@pytest.fixture
def no_work(monkeypatch):
    """Fail if anything is computed: neither the start nor the round loop may be reached."""

    def reached(*_, **__):
        pytest.fail("work began before the input was checked")

    monkeypatch.setattr("fedgmm.estimators.gaussian_mixture.run_rounds", reached)
    monkeypatch.setattr("fedgmm.estimators.gaussian_mixture.FederatedGMM.start", reached)


def with_value(value, row=5, column=1):
    bad = X.copy()
    bad[row, column] = value
    return bad


# ---------------------------------------------------------------------- rows


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("value", "what"),
    [(np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "infinity"), (1e160, "too large")],
)
def test_a_bad_number_is_named_with_client_and_column(value, what):
    bad = with_value(value)
    frame = pd.DataFrame(bad, columns=["age", "height", "weight"])
    for rows, clients, column in (
        (bad, IDS, "column 1"),
        ({name: bad[name == IDS] for name in ("oslo", "bergen")}, None, "column 1"),
        (frame, IDS, "'height'"),
        (dict(iter(frame.groupby(IDS))), None, "'height'"),
    ):
        with pytest.raises(ValueError, match=what) as caught:
            FederatedGaussianMixture(2).fit(rows, clients=clients)
        assert "'bergen'" in str(caught.value)
        assert column in str(caught.value)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("rows", "clients", "error", "message"),
    [
        ({"a": X, "b": X[:, :2]}, None, ValueError, "'b'"),
        ({"a": X, "b": X[:0]}, None, ValueError, "empty"),
        ([("a", X), ("b", [])], None, ValueError, "empty"),
        ([("b", []), ("a", X)], None, ValueError, "empty"),
        ({}, None, ValueError, "no client"),
        (iter([]), None, ValueError, "no client"),
        ([("a", X), ("a", X)], None, ValueError, "more than once"),
        ({"a": X[0]}, None, ValueError, "2D"),
        ([("a", X[0])], None, ValueError, "2D"),
        ({"a": X, None: X}, None, ValueError, "None"),
        ({float("nan"): X}, None, ValueError, "nan"),
        ({"a": np.empty((3, 0))}, None, ValueError, "no columns"),
        (X[:1], None, ValueError, "n_components=2"),
        ({"a": X[:1]}, None, ValueError, "n_components=2"),
        ({"a": [["x", "y"]]}, None, ValueError, "numeric"),
        ({"a": X * 1j}, None, ValueError, "complex"),
        ([["x", "y"], ["z", "w"]], None, ValueError, "'x'"),
        (X * 1j, None, ValueError, "Complex data"),
        (pd.DataFrame({"city": ["oslo", "bergen"]}), None, ValueError, "'oslo'"),
        (sparse.csr_matrix(X), None, TypeError, "[Ss]parse"),
        ({"a": sparse.csr_matrix(X)}, None, TypeError, "toarray"),
        (X[0], None, ValueError, "2D"),
        (X[None], None, ValueError, "dim 3"),
        (X[:0], None, ValueError, "0 sample"),
        (X[:, :0], None, ValueError, "0 feature"),
        (None, None, ValueError, "scalar"),
        ("rows", None, ValueError, "rows"),
        (iter(X), None, TypeError, "pairs"),
        (X, IDS[:-1], ValueError, "11 entries"),
        (X, [*IDS, "oslo"], ValueError, "13 entries"),
        (X, "oslo", ValueError, "one id per row"),
        (X, IDS.reshape(-1, 1), ValueError, "one id per row"),
        (X, [*IDS[:7], None, *IDS[8:]], ValueError, "Row 7"),
        (X, [*IDS[:7], np.nan, *IDS[8:]], ValueError, "Row 7"),
        (X, [None] * 12, ValueError, "Row 0"),
        ({"a": X}, IDS, ValueError, "already"),
    ],
)
def test_bad_rows_and_clients(rows, clients, error, message):
    with pytest.raises(error, match=message):
        FederatedGaussianMixture(2).fit(rows, clients=clients)


@pytest.mark.usefixtures("no_work")
def test_tables_whose_columns_are_swapped():
    table = pd.DataFrame(X, columns=["x", "y", "z"])
    with pytest.raises(ValueError, match="'b'"):
        FederatedGaussianMixture(2).fit({"a": table, "b": table[["z", "y", "x"]]})


# ---------------------------------------------------------------------- parameters


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"n_components": 0}, ValueError, "n_components"),
        ({"n_components": -2}, ValueError, "n_components"),
        ({"n_components": 2.0}, TypeError, "n_components"),
        ({"n_components": "3"}, TypeError, "n_components"),
        ({"n_components": True}, TypeError, "n_components"),
        ({"n_components": None}, TypeError, "n_components"),
        ({"max_iter": -1}, ValueError, "max_iter"),
        ({"max_iter": 1.5}, TypeError, "max_iter"),
        ({"n_init": 0}, ValueError, "n_init"),
        ({"n_init": 1.0}, TypeError, "n_init"),
        ({"verbose": -1}, ValueError, "verbose"),
        ({"tol": -1e-3}, ValueError, "tol"),
        ({"tol": np.nan}, ValueError, "tol"),
        ({"tol": "small"}, TypeError, "tol"),
        ({"reg_covar": -1.0}, ValueError, "reg_covar"),
        ({"reg_covar": np.inf}, ValueError, "reg_covar"),
        ({"reg_covar": None}, TypeError, "reg_covar"),
        ({"covariance_type": "round"}, ValueError, "covariance_type"),
        ({"covariance_type": None}, ValueError, "covariance_type"),
        ({"aggregation": "mean"}, ValueError, "aggregation"),
        ({"init_params": "magic"}, ValueError, "init_params"),
        ({"shared_weights": "no"}, TypeError, "shared_weights"),
        ({"warm_start": 1}, TypeError, "warm_start"),
        ({"verbose_interval": 0}, ValueError, "verbose_interval"),
        ({"client_column": 1.5}, TypeError, "client_column"),
        ({"unknown_clients": "guess"}, ValueError, "unknown_clients"),
        ({"n_jobs": 0}, ValueError, "n_jobs"),
        ({"on_round": 3}, TypeError, "on_round"),
        ({"dtype": "float16"}, ValueError, "dtype"),
        ({"device": "abacus"}, ValueError, "abacus"),
        ({"random_state": "dice"}, ValueError, "dice"),
        ({"random_state": -1}, ValueError, "Seed"),
        ({"weights_init": [0.5, 0.5, 0.0]}, ValueError, "shape"),
        ({"weights_init": [0.5, 0.6]}, ValueError, "sum to 1"),
        ({"weights_init": [1.5, -0.5]}, ValueError, "non-negative"),
        ({"weights_init": [np.nan, 1.0]}, ValueError, "NaN"),
        ({"weights_init": ["a", "b"]}, ValueError, "numeric"),
        ({"means_init": X[:3]}, ValueError, "shape"),
        ({"means_init": X[:2, :2]}, ValueError, "shape"),
        ({"means_init": X[:2] * np.inf}, ValueError, "infinity"),
        (
            {"precisions_init": np.eye(3)},
            ValueError,
            "shape",
        ),
        (
            {"precisions_init": np.eye(3)[None] * [[[1.0]], [[-1.0]]]},
            ValueError,
            "definite",
        ),
        (
            {"precisions_init": np.triu(np.ones((3, 3))), "covariance_type": "tied"},
            ValueError,
            "symmetric",
        ),
        (
            {"precisions_init": [[1.0, 0.0, 1.0]] * 2, "covariance_type": "diag"},
            ValueError,
            "positive",
        ),
        (
            {"precisions_init": [1.0, -1.0], "covariance_type": "spherical"},
            ValueError,
            "positive",
        ),
        (
            {"precisions_init": [1.0, 1.0], "covariance_type": "identity"},
            ValueError,
            "identity",
        ),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_bad_parameters(parameters, error, message):
    model = FederatedGaussianMixture(**{"n_components": 2, **parameters})
    with pytest.raises(error, match=message) as caught:
        model.fit(X, clients=IDS)
    (name, *_) = parameters
    assert name in str(caught.value) or name == "random_state"  # scikit-learn checks the seed


def test_numpy_numbers_are_numbers():
    model = FederatedGaussianMixture(
        np.int64(2),
        max_iter=np.int32(3),
        tol=np.float32(0),
        reg_covar=np.float64(1e-6),
        n_init=np.uint8(1),
        shared_weights=np.True_,
        verbose=False,
    )
    assert model.fit(X, clients=IDS).means_.shape == (2, 3)


# ---------------------------------------------------------------------- prediction


@pytest.fixture(scope="module")
def fitted():
    return FederatedGaussianMixture(2, tol=0.0, max_iter=3, random_state=0).fit(X, clients=IDS)


METHODS = ["predict", "predict_proba", "score_samples", "score", "bic", "aic"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("rows", "clients", "message"),
    [
        (
            X,
            "paris",
            "paris",
        ),
        (X, [*IDS[:-1], "paris"], "paris"),
        (X, [*IDS[:-1], 7], "client 7"),
        (X, 1.5, r"1\.5"),
        ({"paris": X}, None, "paris"),
        ({"oslo": X, "paris": X}, None, "paris"),
        (X, IDS[:-1], "11 entries"),
        (X[:, :2], None, "2 features"),
        ({"oslo": X[:, :2]}, None, "2 columns"),
        ({"oslo": X, "bodø": X[:, :2]}, None, "bodø"),
        ({"oslo": X}, IDS, "already"),
        (with_value(np.nan), IDS, "bergen"),
        (with_value(np.inf), None, "row 5"),
        ({}, None, "no client"),
    ],
)
def test_bad_input_to_predictions(fitted, method, rows, clients, message):
    with pytest.raises(ValueError, match=message):
        getattr(fitted, method)(rows, clients=clients)


def test_a_long_list_of_clients_is_cut_short():
    model = FederatedGaussianMixture(1).fit(X, clients=np.arange(12))
    with pytest.raises(ValueError, match="4, …"):
        model.predict(X, clients=99)
