"""Several ranks train the same model as one process."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from fedgmm.data.dataset import FederatedDataset
from fedgmm.training.checkpoint import Checkpoint
from fedgmm.training.distributed import deal, follow, leading
from fedgmm.training.in_process import train
from fedgmm.training.options import ALGORITHMS
from fedgmm.training.ranks import Ranks, RanksError
from supervised import FAST, federation, images
from thread_ranks import on_ranks

SIZES = (30, 40, 17, 26, 50)


@pytest.fixture(scope="module")
def data():
    return federation(np.random.default_rng(0), sizes=SIZES)


def numbers(model):
    """All parameters of a model by name."""
    prediction = model.prediction
    found = dict(prediction.learners)
    for name in ("client_weights", "weights", "assignment"):
        if getattr(prediction, name) is not None:
            found[name] = getattr(prediction, name)
    if prediction.gaussians is not None:
        found |= {"means": prediction.gaussians.means, "covs": prediction.gaussians.covariances}
    if prediction.labels is not None:
        found["labels"] = prediction.labels.clients
    return found


def assert_same(model, expected):
    found, wanted = numbers(model), numbers(expected)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)
    assert len(model.history) == len(expected.history)
    assert model.options == expected.options


def compare(monkeypatch, data, size=3, **options):
    """Train on several ranks and in one process; the model of every rank is the same."""
    options = {**FAST, "dtype": "float64", **options}
    expected = train(data, **options)
    for model in on_ranks(monkeypatch, size, lambda _: train(data, **options)):
        if isinstance(model, Exception):
            raise model
        assert_same(model, expected)
    return expected


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "gmm"])
def test_ranks_train_the_model_of_one_process(monkeypatch, data, algorithm):
    compare(monkeypatch, data, algorithm=algorithm, rounds=3)


@pytest.mark.parametrize("algorithm", ["fedgmm", "fedavg", "clustered", "pfedme"])
def test_a_rank_without_a_client_in_a_round_adds_nothing(monkeypatch, data, algorithm):
    compare(monkeypatch, data, algorithm=algorithm, participation=0.2, rounds=4)


def test_more_ranks_than_clients(monkeypatch):
    few = federation(np.random.default_rng(1), sizes=(20, 30))
    for algorithm in ("fedgmm", "clustered"):
        compare(monkeypatch, few, size=4, algorithm=algorithm)


@pytest.mark.parametrize(
    "options",
    [
        {"learner": "mlp", "warmup": 2, "rounds": 4, "server": "momentum"},
        {"patience": 1, "tol": None, "rounds": 5},
        {"algorithm": "fedavg+", "patience": 1, "rounds": 3},
        {"components": "auto", "learners": "auto", "rounds": 2},
        {"personal_labels": True, "refit": True, "aggregation": "paper"},
        {"learner": lambda: nn.Linear(3, 2), "solver": "sgd"},
        {"pca": 2, "rounds": 3},
    ],
    ids=["mlp", "patience", "tuning", "auto", "labels", "module", "pca"],
)
def test_ranks_support_the_option(monkeypatch, data, options):
    compare(monkeypatch, data, size=2, **options)


def test_ranks_support_numbers_and_weights(monkeypatch, rng):
    x, clients = rng.normal(size=(90, 3)), rng.integers(4, size=90)
    y, weights = x @ rng.normal(size=3) + rng.normal(size=90), rng.integers(0, 4, size=90)
    weighted = FederatedDataset.from_arrays(
        x, y, clients, task="regression", sample_weight=weights.astype(float)
    )
    compare(monkeypatch, weighted, size=2)


def test_ranks_support_images_with_own_features(monkeypatch, rng):
    pictures = images(rng, rows=10)
    rows = [pictures.train.inputs, pictures.train.labels, pictures.train.codes]
    x, y, clients = (part.numpy() for part in rows)
    features = x.reshape(len(x), -1)[:, :5].astype(np.float64)
    made = FederatedDataset.from_arrays(x, y, clients, features=features)
    compare(monkeypatch, made, size=2, learner="cnn")


def test_a_run_resumes_with_another_number_of_ranks(monkeypatch, data, tmp_path):
    options = {**FAST, "dtype": "float64", "rounds": 4}
    for algorithm in ("fedgmm", "local", "clustered"):
        expected = train(data, algorithm, **options)
        file = Checkpoint(tmp_path / f"{algorithm}.ckpt", every=1)
        for size, until in ((3, 1), (2, 2)):
            on_ranks(
                monkeypatch,
                size,
                lambda _, last=until, file=file, method=algorithm: train(
                    data, method, checkpoint=file, until=last, **options
                ),
            )
        assert_same(train(data, algorithm, checkpoint=file, **options), expected)


def test_divergence_on_another_rank_ends_the_run_like_in_one_process(monkeypatch, data):
    options = {**FAST, "learner": "mlp", "lr": 1e30}
    # the warning itself may be lost, because ranks that are threads share the filters of warnings
    found = on_ranks(monkeypatch, 2, lambda _: train(data, "local", **options))
    assert all("diverged on client" in model.stopped for model in found)


def test_an_error_of_one_rank_ends_all(monkeypatch, data):
    def work(rank):
        learner = (lambda: nn.Linear(3, 2)) if rank == 0 else "linear"
        return train(data, learner=learner, **FAST)

    first, second = on_ranks(monkeypatch, 2, work)
    assert isinstance(first, RanksError)
    assert "Rank 1" in str(first)
    assert isinstance(second, RanksError)


def test_an_error_of_rank_0_reaches_the_others(monkeypatch, data):
    def fail(_):
        raise ZeroDivisionError("in a callback")

    first, second = on_ranks(monkeypatch, 2, lambda _: train(data, on_round=fail, **FAST))
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, RanksError)
    assert "in a callback" in str(second)


def test_rank_0_keeps_a_model_that_cannot_be_sent(monkeypatch, rng):
    names = [(0, 1), (1, 0)]  # JSON cannot hold tuples
    made = FederatedDataset.from_clients(
        {name: (rng.normal(size=(20, 2)), np.arange(20) % 2) for name in names}
    )
    first, second = on_ranks(monkeypatch, 2, lambda _: train(made, **FAST))
    assert first.names == names
    assert isinstance(second, RanksError)
    assert "saved" in str(second)


def test_one_process_does_not_use_the_modules(monkeypatch, data):
    for name in ("distributed", "ranks"):
        monkeypatch.setitem(sys.modules, f"fedgmm.training.{name}", None)
    train(data, **FAST)


def test_clients_are_dealt_in_order_and_by_rows(rng):
    assert deal([10, 10, 10, 10], 2) == [0, 2, 4]
    assert deal([100, 1, 1, 1], 2) == [0, 1, 4]
    assert deal([1, 1, 1, 100], 2) == [0, 3, 4]
    assert deal([5], 3) == [0, 1, 1, 1]
    for ranks in (1, 2, 3, 8):
        sizes = rng.integers(1, 50, size=40)
        edges = deal(sizes.tolist(), ranks)
        assert edges == sorted(edges)
        assert (edges[0], edges[-1]) == (0, 40)
        shares = [sizes[a:b].sum() for a, b in pairwise(edges)]
        assert max(shares) - min(shares) <= 2 * sizes.max()


def test_the_start_draws_the_same_clients_and_rows(monkeypatch, data):
    monkeypatch.setattr("fedgmm.methods.centroids._MOST_CENTROIDS", 6)
    monkeypatch.setattr("fedgmm.methods.centroids._MOST_START_ROWS", 30)
    monkeypatch.setattr("fedgmm.methods.centroids.FEWEST_ROWS_A_CLUSTER", 4)
    compare(monkeypatch, data, algorithm="gmm", rounds=1)


def test_only_one_thread_of_a_process_trains():
    ranks = Ranks(0, 2)
    ranks.lost = True  # so that nothing is sent at the end
    with leading(ranks) as outermost, leading(ranks) as nested, ThreadPoolExecutor(1) as pool:
        assert (outermost, nested) == (True, False)
        for call in (lambda: leading(ranks).__enter__(), lambda: follow(ranks)):
            with pytest.raises(RanksError, match="thread"):
                pool.submit(call).result()
    with leading(ranks) as outermost:
        assert outermost
