"""Rounds on vectors of an encoder, beside scikit-learn's LogisticRegression and a plain torch loop.

FedGMM trains linear learners on all numbers of a vector and Gaussians on 48 principal components. The plain
loop trains one linear learner per epoch with a ``DataLoader``, on the pooled rows. LogisticRegression fits
the pooled rows to the end. All three see the same rows; the accuracy is on rows that none has seen.

    python benchmarks/embeddings.py            # 100,000 rows of 512 numbers, ten classes
    python benchmarks/embeddings.py --device cuda
    python benchmarks/embeddings.py --quick    # seconds
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

CLASSES, CLIENTS, TEST_SHARE = 10, 60, 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="where FedGMM trains: cpu or cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.columns, options.rounds = 3000, 64, 2
    import torch

    torch.set_num_threads(options.threads)
    X, y, clients, seen = _rows(options.rows, options.columns)
    results = [
        _fedgmm(X, y, clients, seen, options.rounds, options.device),
        _plain_loop(X, y, seen, options.rounds),
        _logistic_regression(X, y, seen),
    ]
    print(f"{options.rows} rows of {options.columns} numbers, {options.threads} threads")
    print(f"{'':34}{'s':>9}{'CPU s':>9}{'accuracy':>10}")
    for one in results:
        print(f"{one['what']:34}{one['seconds']:9.3f}{one['cpu']:9.3f}{one['accuracy']:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def _rows(rows: int, columns: int) -> tuple[Any, Any, Any, Any]:
    """Return vectors around one centre per class, labels, clients, and which rows are trained on."""
    import numpy as np

    rng = np.random.default_rng(0)
    y = rng.integers(CLASSES, size=rows)
    centres = rng.normal(size=(CLASSES, columns)) * 3 / np.sqrt(columns)
    X = (centres[y] + rng.normal(size=(rows, columns))).astype(np.float32)
    return X, y, rng.integers(CLIENTS, size=rows), rng.random(rows) > TEST_SHARE


def _fedgmm(X: Any, y: Any, clients: Any, seen: Any, rounds: int, device: str) -> dict[str, Any]:
    from fedgmm import FederatedDataset, train

    data = FederatedDataset.from_arrays(X[seen], y[seen], clients[seen], split=(1, 0, 0))
    walls, cpus = [time.perf_counter()], [time.process_time()]

    def tick(entry: dict[str, float]) -> None:
        walls.append(time.perf_counter())
        cpus.append(time.process_time())

    options: dict[str, Any] = {"personal_labels": False, "tol": None, "pca": min(48, X.shape[1])}
    options["device"] = device
    model = train(data, components=3, learners=3, rounds=rounds, on_round=tick, **options)
    right = model.predict(X[~seen], clients=clients[~seen]) == y[~seen]
    # the first round also includes the start
    return _result(f"FedGMM 3 × 3, a round, {device}", walls[1:], cpus[1:], right)


def _plain_loop(X: Any, y: Any, seen: Any, epochs: int) -> dict[str, Any]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    rows = TensorDataset(torch.from_numpy(X[seen]), torch.from_numpy(y[seen]))
    learner = torch.nn.Linear(X.shape[1], CLASSES)
    optimiser = torch.optim.SGD(learner.parameters(), lr=0.1)
    walls, cpus = [time.perf_counter()], [time.process_time()]
    for _ in range(epochs):
        for batch, labels in DataLoader(rows, 128, shuffle=True):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(learner(batch), labels).backward()
            optimiser.step()
        walls.append(time.perf_counter())
        cpus.append(time.process_time())
    with torch.no_grad():
        right = learner(torch.from_numpy(X[~seen])).argmax(1).numpy() == y[~seen]
    return _result("one learner, plain loop, an epoch", walls, cpus, right)


def _logistic_regression(X: Any, y: Any, seen: Any) -> dict[str, Any]:
    from sklearn.linear_model import LogisticRegression

    walls, cpus = [time.perf_counter()], [time.process_time()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not converged
        fitted = LogisticRegression(max_iter=100).fit(X[seen], y[seen])
    walls.append(time.perf_counter())
    cpus.append(time.process_time())
    return _result(
        "LogisticRegression, whole fit", walls, cpus, fitted.predict(X[~seen]) == y[~seen]
    )


def _result(what: str, walls: list[float], cpus: list[float], right: Any) -> dict[str, Any]:
    """Return the median of the differences of some times."""

    def median(times: list[float]) -> float:
        return statistics.median(b - a for a, b in itertools.pairwise(times))

    return {
        "what": what,
        "seconds": median(walls),
        "cpu": median(cpus),
        "accuracy": float(right.mean()),
    }


if __name__ == "__main__":
    main()
