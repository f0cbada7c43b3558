"""Bad input gets a clear error that names the culprit, before any work is done."""

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
    pattern = f"contains .*{what}.*client 'bergen', column 1"
    with pytest.raises(ValueError, match=pattern):
        FederatedGaussianMixture(2).fit(bad, clients=IDS)
    with pytest.raises(ValueError, match=pattern):
        FederatedGaussianMixture(2).fit({name: bad[name == IDS] for name in ("oslo", "bergen")})
    frame = pd.DataFrame(bad, columns=["age", "height", "weight"])
    with pytest.raises(ValueError, match=f"{what}.*client 'bergen', column 'height'"):
        FederatedGaussianMixture(2).fit(frame, clients=IDS)
    with pytest.raises(ValueError, match=f"{what}.*client 'bergen', column 'height'"):
        FederatedGaussianMixture(2).fit(dict(iter(frame.groupby(IDS))))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("rows", "clients", "error", "message"),
    [
        ({"a": X, "b": X[:, :2]}, None, ValueError, "'b' has 2 columns, but client 'a' has 3"),
        ({"a": X, "b": X[:0]}, None, ValueError, "Client 'b' is empty"),
        ([("a", X), ("b", [])], None, ValueError, "Client 'b' is empty"),
        ([("b", []), ("a", X)], None, ValueError, "Client 'b' is empty"),
        ({}, None, ValueError, "holds no client"),
        (iter([]), None, ValueError, "holds no client"),
        ([("a", X), ("a", X)], None, ValueError, "Client 'a' appears more than once"),
        ({"a": X[0]}, None, ValueError, "Client 'a': expected a 2D array.*1D"),
        ([("a", X[0])], None, ValueError, "Client 'a': expected a 2D array.*1D"),
        ({"a": X, None: X}, None, ValueError, "None cannot name a client"),
        ({float("nan"): X}, None, ValueError, "nan cannot name a client"),
        ({"a": np.empty((3, 0))}, None, ValueError, "Client 'a' has no columns"),
        (X[:1], None, ValueError, r"n_components=2 rows over all clients, got n_samples = 1"),
        ({"a": X[:1]}, None, ValueError, r"n_components=2 rows over all clients"),
        ({"a": [["x", "y"]]}, None, ValueError, "Client 'a' holds data.*not numeric.*'x'"),
        ({"a": X * 1j}, None, ValueError, "Client 'a' holds data.*not numeric.*complex"),
        ([["x", "y"], ["z", "w"]], None, ValueError, "could not convert string to float: 'x'"),
        (X * 1j, None, ValueError, "Complex data"),
        (pd.DataFrame({"city": ["oslo", "bergen"]}), None, ValueError, "'oslo'"),
        (sparse.csr_matrix(X), None, TypeError, "[Ss]parse"),
        ({"a": sparse.csr_matrix(X)}, None, TypeError, "Client 'a': sparse"),
        (X[0], None, ValueError, "Expected 2D array, got 1D"),
        (X[None], None, ValueError, "dim 3"),
        (X[:0], None, ValueError, r"Found array with 0 sample"),
        (X[:, :0], None, ValueError, r"0 feature"),
        (None, None, ValueError, "Expected 2D array, got scalar"),
        ("rows", None, ValueError, "rows"),
        (iter(X), None, TypeError, r"Expected \(client, rows\) pairs, got ndarray"),
        (X, IDS[:-1], ValueError, "clients has 11 entries, but X has 12 rows"),
        (X, [*IDS, "oslo"], ValueError, "clients has 13 entries, but X has 12 rows"),
        (X, "oslo", ValueError, r"one id per row \(1D\), got shape \(\)"),
        (X, IDS.reshape(-1, 1), ValueError, r"got shape \(12, 1\)"),
        (X, [*IDS[:7], None, *IDS[8:]], ValueError, "Row 7 has no client"),
        (X, [*IDS[:7], np.nan, *IDS[8:]], ValueError, "Row 7 has no client"),
        (X, [None] * 12, ValueError, "Row 0 has no client"),
        ({"a": X}, IDS, ValueError, "already names its clients"),
    ],
)
def test_bad_rows_and_clients(rows, clients, error, message):
    with pytest.raises(error, match=message):
        FederatedGaussianMixture(2).fit(rows, clients=clients)


@pytest.mark.usefixtures("no_work")
def test_tables_whose_columns_are_swapped():
    table = pd.DataFrame(X, columns=["x", "y", "z"])
    with pytest.raises(ValueError, match=r"Client 'b' has the columns \['z', 'y', 'x'\]"):
        FederatedGaussianMixture(2).fit({"a": table, "b": table[["z", "y", "x"]]})


# ---------------------------------------------------------------------- parameters


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"n_components": 0}, ValueError, "n_components must be at least 1, got 0"),
        ({"n_components": -2}, ValueError, "n_components must be at least 1, got -2"),
        ({"n_components": 2.0}, TypeError, r"n_components must be an integer, got 2\.0"),
        ({"n_components": "3"}, TypeError, "n_components must be an integer, got '3'"),
        ({"n_components": True}, TypeError, "n_components must be an integer, got True"),
        ({"n_components": None}, TypeError, "n_components must be an integer, got None"),
        ({"max_iter": 0}, ValueError, "max_iter must be at least 1, got 0"),
        ({"max_iter": -1}, ValueError, "max_iter must be at least 1, got -1"),
        ({"max_iter": 1.5}, TypeError, r"max_iter must be an integer, got 1\.5"),
        ({"n_init": 0}, ValueError, "n_init must be at least 1, got 0"),
        ({"n_init": 1.0}, TypeError, r"n_init must be an integer, got 1\.0"),
        ({"verbose": -1}, ValueError, "verbose must be at least 0, got -1"),
        ({"tol": -1e-3}, ValueError, r"tol must be finite and not negative, got -0\.001"),
        ({"tol": np.nan}, ValueError, "tol must be finite and not negative, got nan"),
        ({"tol": "small"}, TypeError, "tol must be a number, got 'small'"),
        ({"reg_covar": -1.0}, ValueError, r"reg_covar must be finite and not negative, got -1\.0"),
        ({"reg_covar": np.inf}, ValueError, "reg_covar must be finite and not negative, got inf"),
        ({"reg_covar": None}, TypeError, "reg_covar must be a number, got None"),
        ({"covariance_type": "round"}, ValueError, "covariance_type must be one of .*got 'round'"),
        ({"covariance_type": None}, ValueError, "covariance_type must be one of .*got None"),
        ({"aggregation": "mean"}, ValueError, "aggregation must be one of .*got 'mean'"),
        ({"init_params": "magic"}, ValueError, "init_params must be one of .*got 'magic'"),
        ({"shared_weights": "no"}, TypeError, "shared_weights must be True or False, got 'no'"),
        ({"warm_start": 1}, TypeError, "warm_start must be True or False, got 1"),
        ({"dtype": "float16"}, ValueError, "dtype must be one of .*got 'float16'"),
        ({"device": "abacus"}, ValueError, "device='abacus' cannot be used"),
        ({"random_state": "dice"}, ValueError, "'dice' cannot be used to seed"),
        ({"random_state": -1}, ValueError, "Seed"),
        ({"weights_init": [0.5, 0.5, 0.0]}, ValueError, r"weights_init must have shape \(2,\)"),
        ({"weights_init": [0.5, 0.6]}, ValueError, "weights_init must be .*sum to 1"),
        ({"weights_init": [1.5, -0.5]}, ValueError, "weights_init must be non-negative"),
        ({"weights_init": [np.nan, 1.0]}, ValueError, "weights_init contains NaN"),
        ({"weights_init": ["a", "b"]}, ValueError, "weights_init must be numeric"),
        ({"means_init": X[:3]}, ValueError, r"means_init must have shape \(2, 3\), got \(3, 3\)"),
        ({"means_init": X[:2, :2]}, ValueError, r"shape \(2, 3\), got \(2, 2\)"),
        ({"means_init": X[:2] * np.inf}, ValueError, "means_init contains NaN or infinity"),
        (
            {"precisions_init": np.eye(3)},
            ValueError,
            r"precisions_init must have shape \(2, 3, 3\)",
        ),
        (
            {"precisions_init": np.eye(3)[None] * [[[1.0]], [[-1.0]]]},
            ValueError,
            "precisions_init must be positive definite",
        ),
        (
            {"precisions_init": np.triu(np.ones((3, 3))), "covariance_type": "tied"},
            ValueError,
            "precisions_init must be symmetric",
        ),
        (
            {"precisions_init": [[1.0, 0.0, 1.0]] * 2, "covariance_type": "diag"},
            ValueError,
            "precisions_init must be positive",
        ),
        (
            {"precisions_init": [1.0, -1.0], "covariance_type": "spherical"},
            ValueError,
            "precisions_init must be positive",
        ),
        (
            {"precisions_init": [1.0, 1.0], "covariance_type": "identity"},
            ValueError,
            "precisions_init cannot be given",
        ),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_bad_parameters(parameters, error, message):
    model = FederatedGaussianMixture(**{"n_components": 2, **parameters})
    with pytest.raises(error, match=message):
        model.fit(X, clients=IDS)


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
            r"Unknown client 'paris': the model knows 3 clients \('bergen', 'bodø', 'oslo'\)",
        ),
        (X, [*IDS[:-1], "paris"], "Unknown client 'paris'"),
        (X, [*IDS[:-1], 7], "Unknown client 7"),
        (X, 1.5, r"Unknown client 1\.5"),
        ({"paris": X}, None, "Unknown client 'paris'"),
        ({"oslo": X, "paris": X}, None, "Unknown client 'paris'"),
        (X, IDS[:-1], "clients has 11 entries, but X has 12 rows"),
        (X[:, :2], None, "2 features.*expecting 3"),
        ({"oslo": X[:, :2]}, None, "X has 2 columns, but the model was fitted on 3"),
        ({"oslo": X, "bodø": X[:, :2]}, None, "'bodø' has 2 columns"),
        ({"oslo": X}, IDS, "already names its clients"),
        (with_value(np.nan), IDS, "NaN: client 'bergen', column 1, row 5"),
        (with_value(np.inf), None, "infinity: .*column 1, row 5"),
        ({}, None, "holds no client"),
    ],
)
def test_bad_input_to_predictions(fitted, method, rows, clients, message):
    with pytest.raises(ValueError, match=message):
        getattr(fitted, method)(rows, clients=clients)


def test_a_long_list_of_clients_is_cut_short():
    model = FederatedGaussianMixture(1).fit(X, clients=np.arange(12))
    with pytest.raises(ValueError, match=r"12 clients \(0, 1, 2, 3, 4, …\)"):
        model.predict(X, clients=99)
