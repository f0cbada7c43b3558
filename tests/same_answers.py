"""Parameters of every method on small data, as a few numbers per array.

``python tests/same_answers.py FILE`` writes them. The file ``same_answers.json`` was written by the
version before the second edition of the architecture, and later versions must agree with it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np

METHODS = ("fedgmm", "fedem", "fedavg", "fedprox", "fedavg+", "local", "clustered", "pfedme")
SMALL = {"rounds": 5, "dtype": "float64", "tol": None}
NUMBERS = 6


def digest(name, array):
    """A few projections of an array on fixed random directions; each has the scale of its norm."""
    values = np.asarray(array, dtype=np.float64).ravel()
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return (rng.normal(size=(NUMBERS, values.size)) @ values).tolist()


def model_arrays(model):
    """The parameters of a fitted model by name."""
    prediction = model.prediction
    found = {f"learners/{name}": value for name, value in prediction.learners.items()}
    if prediction.gaussians is not None:
        found["means"] = prediction.gaussians.means
        found["covariances"] = prediction.gaussians.covariances
    for name in ("client_weights", "weights", "assignment"):
        if getattr(prediction, name) is not None:
            found[name] = getattr(prediction, name)
    return {name: value.detach().cpu().numpy() for name, value in found.items()}


def digests(models):
    """Digests of all arrays of named models."""
    return {
        f"{label}/{name}": digest(name, array)
        for label, model in models.items()
        for name, array in model_arrays(model).items()
    }


def of_synthetic():
    """All methods and the variants of FedGMM on synthetic clients."""
    import fedgmm
    from fedgmm.data.synthetic import synthetic

    dataset = synthetic(clients=12, rows=60, dimensions=4, seed=3).dataset
    models = {m: fedgmm.train(dataset, m, **SMALL) for m in METHODS}
    variants = {
        "gmm": {"algorithm": "gmm"},
        "paper": {"aggregation": "paper"},
        "diag": {"covariance_type": "diag"},
        "tied": {"covariance_type": "tied", "aggregation": "paper"},
        "spherical": {"covariance_type": "spherical"},
        "mlp": {"learner": "mlp", "local_epochs": 2},
        "sgd": {"solver": "sgd", "server": "momentum", "schedule": "cosine"},
        "warmup": {"warmup": 2, "start": "split"},
        "patience": {"patience": 2, "rounds": 12},
        "half": {"participation": 0.5},
        "independence": {"independence": 10.0, "personal_labels": True},
    }
    models |= {name: fedgmm.train(dataset, **{**SMALL, **v}) for name, v in variants.items()}
    return digests(models)


def of_digits():
    """All methods on digits."""
    import fedgmm
    from fedgmm.data.examples import heterogeneous_digits

    dataset = heterogeneous_digits(clients=6, seed=1).dataset
    return digests({m: fedgmm.train(dataset, m, covariance_type="diag", **SMALL) for m in METHODS})


def of_hospitals():
    """All methods on files."""
    import fedgmm
    from fedgmm.data.examples import LABEL, write_hospitals

    with tempfile.TemporaryDirectory() as home:
        write_hospitals(Path(home) / "data", seed=2)
        files = sorted((Path(home) / "data").glob("site_*.csv"))
        models = {}
        for method in METHODS:
            # what version 0.1 chose here; later versions may choose otherwise
            chosen = {"ridge": 1.0, "refit": False}
            if method == "fedgmm":
                chosen |= {"components": 6, "learners": 3}
            out = Path(home) / method
            run = fedgmm.fit(files, LABEL, out, algorithm=method, **chosen, **SMALL)
            models[method] = run.model
        return digests(models)


def of_federation():
    """All methods over sites that answer in this process: the server's model and each site's own."""
    import fedgmm
    from in_memory_sites import federate
    from small_runs import write_sites

    variants = {m: {"algorithm": m} for m in METHODS}
    variants["gmm"] = {"algorithm": "gmm", "label": None, "table": {"ignore": ("state",)}}
    variants["paper"] = {"algorithm": "fedgmm", "aggregation": "paper"}
    variants["warmup"] = {"algorithm": "fedem", "warmup": 2}
    variants["withheld"] = {"algorithm": "fedgmm", "min_rows": 12}
    with tempfile.TemporaryDirectory() as home:
        files = write_sites(Path(home) / "data", seed=4)
        models = {}
        for name, options in variants.items():
            base = Path(home) / name.replace("+", "plus")
            sites, _ = federate(files, base, components=2, learners=2, **SMALL, **options)
            if (base / "server" / "model").exists():
                models[f"{name}/server"] = fedgmm.load(base / "server" / "model")
            for node in sites.settings:
                own = fedgmm.open_run(sites.settings[node].out).model
                models[f"{name}/{sites.name_of(node)}"] = own
        return digests(models)


PARTS = {
    "synthetic": of_synthetic,
    "digits": of_digits,
    "hospitals": of_hospitals,
    "federation": of_federation,
}


if __name__ == "__main__":
    found = {part: make() for part, make in PARTS.items()}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=0) + "\n")
