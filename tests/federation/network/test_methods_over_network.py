"""Every method gives the same parameters over real processes as in one process."""

import json

import numpy as np
import pytest

from fedgmm.runs import fit, open_run
from loopback import Federation

SITES = ("bergen", "oslo")
METHODS = ("fedgmm", "fedem", "fedavg", "fedprox", "fedavg+", "local", "clustered", "pfedme")
OPTIONS = {"components": 2, "learners": 2, "rounds": 3}


@pytest.fixture
def federation(tmp_path):
    federation = Federation(tmp_path, SITES)
    yield federation
    federation.clean_up()


def run_over_network(federation, **training):
    """Run a federation with TLS and keys; every process must succeed."""
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in training.items())
    federation.configure(len(SITES), rounds=OPTIONS["rounds"], training=lines)
    federation.server()
    for name in SITES:
        federation.client(name)
    for name in ("server", *SITES):
        assert federation.ends(name, 90) == 0, federation.all_said()


def own_numbers(model, name):
    """Return all parameters that a client's predictions depend on."""
    prediction, code = model.prediction, model.names.index(name)
    if prediction.assignment is not None:
        own = int(prediction.assignment[code])
        return {key: value[own].numpy() for key, value in prediction.learners.items()}
    numbers = {key: value.numpy() for key, value in prediction.learners.items()}
    numbers["pi"] = prediction.client_weights[code].numpy()
    if prediction.gaussians is not None:
        numbers["means"] = prediction.gaussians.means.numpy()
        numbers["covariances"] = prediction.gaussians.covariances.numpy()
    return numbers


def assert_same_models(federation, tolerance, label="state", **training):
    files = [federation.home / f"{name}.csv" for name in SITES]
    reference = fit(files, label, federation.home / "here", **OPTIONS, **training).model
    for name in SITES:
        wanted = own_numbers(reference, name)
        found = own_numbers(open_run(federation.home / name).model, name)
        assert wanted.keys() == found.keys()
        for key, value in wanted.items():
            np.testing.assert_allclose(found[key], value, rtol=0, atol=tolerance, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", METHODS)
def test_gradient_steps_of_every_method(federation, algorithm):
    training = {"algorithm": algorithm, "solver": "sgd"}
    run_over_network(federation, **training)
    assert_same_models(federation, 1e-5, **training)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedgmm", "fedem", "fedavg", "fedavg+"])
def test_exact_steps(federation, algorithm):
    training = {"algorithm": algorithm, "solver": "newton", "dtype": "float64"}
    run_over_network(federation, **training)
    assert_same_models(federation, 1e-10, **training)


@pytest.mark.slow
def test_the_mixture_of_tables_without_labels(federation):
    for name in SITES:
        path = federation.home / f"{name}.csv"
        rows = [line.rsplit(",", 1)[0] for line in path.read_text().splitlines()]
        path.write_text("\n".join(rows) + "\n")
    training = {"algorithm": "gmm", "dtype": "float64"}
    run_over_network(federation, **training)
    assert_same_models(federation, 1e-10, label=None, **training)
