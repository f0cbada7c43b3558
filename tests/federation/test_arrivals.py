"""Replies are added as they arrive: few are held at a time, and their order makes no difference."""

import json
import random
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedgmm.federation.messages import Failure
from fedgmm.federation.remote import RemoteTraining
from fedgmm.runs import open_run
from in_memory_sites import InMemorySites, federate
from small_runs import write_sites

pytestmark = pytest.mark.usefixtures("blank_reports", "no_metrics", "quick_looks")

NAMES = ("a", "b", "c", "d", "e", "f", "g")
SIZE = {"components": 2, "learners": 2, "covariance_type": "full", "rounds": 2, "tol": "none"}

CENTROIDS = {"centroids/points", "centroids/counts"}
"""All of them are kept until k-means has run, because it needs them together; they are few and small."""


class Counting(InMemorySites):
    """Sites whose replies are counted for as long as the server holds any of their arrays.

    Attributes:
        most: largest number of replies in memory, by the kind of request.
    """

    def __init__(self, files, home):
        super().__init__([], home, fresh=False)
        for number in range(files[1]):
            self.add(files[0], name=f"site-{number:03d}")
        self.most = {}

    def ask(self, requests, timeout):
        alive = set()
        for number, (node, reply) in enumerate(super().ask(requests, timeout)):
            kind = requests[node].kind
            for name in reply.arrays.keys() - CENTROIDS:
                alive.add((number, name))
                weakref.finalize(reply.arrays[name], alive.discard, (number, name))
            self.most[kind] = max(self.most.get(kind, 0), len({number for number, _ in alive}))
            yield node, reply
            del reply


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write_sites(tmp_path_factory.mktemp("one"), {"all": 40})[0]


@pytest.fixture
def sums_alive(monkeypatch):
    """The largest number of decoded replies that were in memory at once."""
    alive, most = weakref.WeakSet(), []
    read = RemoteTraining.read_sums

    def count(self, reply, declaration):
        sums = read(self, reply, declaration)
        alive.add(sums)
        most.append(len(alive))
        return sums

    monkeypatch.setattr(RemoteTraining, "read_sums", count)
    return most


# Sums compare by their values, so each is counted by its identity.
@pytest.fixture(autouse=True)
def _by_identity(monkeypatch):
    from fedgmm.core.sums import Sums

    monkeypatch.setattr(Sums, "__hash__", object.__hash__, raising=False)
    monkeypatch.setattr(Sums, "__eq__", object.__eq__, raising=False)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"solver": "sgd", "learner": "mlp"}, marks=pytest.mark.slow)]
)
def test_the_server_holds_few_replies_at_a_time(table, tmp_path, sums_alive, options):
    most = {}
    for count in (3, 9):
        sites = Counting((table, count), tmp_path / str(count))
        federate([], sites.home, sites=sites, **{**SIZE, "patience": 2, **options})
        most[count] = sites.most
    for kind in ("start", "assigned", "round", "score"):
        # one that arrives, and at most one that the server has not let go
        assert most[9][kind] <= 2, kind
    assert most[9] == most[3]
    assert 1 <= max(sums_alive) <= 2


class Shuffled(InMemorySites):
    """Sites whose replies arrive in another order every time."""

    def __init__(self, files, home, seed):
        super().__init__(files, home, fresh=False)
        self.random = random.Random(seed)
        self.orders = set()

    def ask(self, requests, timeout):
        nodes = list(requests)
        self.random.shuffle(nodes)
        self.orders.add(tuple(nodes))
        yield from super().ask({node: requests[node] for node in nodes}, timeout)


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    return write_sites(tmp_path_factory.mktemp("seven"), dict.fromkeys(NAMES, 60))


def numbers_of(home):
    """All tensors of the server's checkpoint and of the models of the sites."""
    from safetensors.torch import load_file

    found = dict(load_file(home / "server/checkpoint/progress.safetensors"))
    for name in NAMES:
        prediction = open_run(home / "sites" / name).model.prediction
        found |= {f"{name}/{key}": value for key, value in prediction.learners.items()}
        if prediction.client_weights is not None:
            found[f"{name}/weights"] = prediction.client_weights
    return found


def sorted_run(files, home, **options):
    """The numbers of a run whose replies arrive in the order of the sites."""
    home = home / "sorted"
    federate(files, home, **options)
    return numbers_of(home)


@pytest.fixture(scope="module")
def in_order(seven, tmp_path_factory, blank_reports, no_metrics):
    return sorted_run(seven, tmp_path_factory.mktemp("run"), **SIZE)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"solver": "sgd", "learner": "mlp"},
        {"algorithm": "clustered", "rounds": 12, "lr": 0.5},
        {"patience": 2},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"aggregation": "paper", "covariance_type": "diag"},
                {"algorithm": "fedavg", "server": "adam"},
                {"algorithm": "pfedme"},
            )
        ),
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "newton",
)
def test_the_order_of_arrival_does_not_change_a_bit(seven, in_order, tmp_path, options):
    options = {**SIZE, **options}
    wanted = in_order if options == SIZE else sorted_run(seven, tmp_path, **options)
    if options.get("algorithm") == "clustered":
        assert len(wanted["shared/learners/0.weight"]) > 1  # a cluster was split
    home = tmp_path / "shuffled"
    sites = Shuffled(seven, home, seed=1)
    federate(seven, home, sites=sites, **options)
    assert len(sites.orders) > options["rounds"] / 2
    found = numbers_of(home)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    "size", [64, pytest.param(64 * 1024**2, marks=pytest.mark.slow)], ids=["file", "memory"]
)
def test_the_order_of_arrival_does_not_decide_what_a_bounded_site_counts(
    seven, tmp_path, monkeypatch, size
):
    """Two sites are beyond the bound, and their medians differ with every order of arrival."""
    monkeypatch.setattr("fedgmm.privacy.influence._IN_MEMORY", size)

    def tamper(name, request, reply):
        factor = {"b": 4.0, "c": 40.0}.get(name, 1.0)
        learners = [one for one in reply.arrays if one.startswith("learners/")]
        if request.kind != "round" or factor == 1.0:
            return reply
        return replace(
            reply,
            arrays=reply.arrays | {one: np.float32(factor) * reply.arrays[one] for one in learners},
        )

    found = []
    for seed in range(2):
        home = tmp_path / str(seed)
        sites = Shuffled(seven, home, seed)
        sites.tamper = tamper
        federate(seven, home, sites=sites, **SIZE, solver="sgd")
        entries = [json.loads(line) for line in (home / "server/history.jsonl").open()]
        found.append((numbers_of(home), [entry.get("bounded") for entry in entries]))
    (numbers, bounded), (other_numbers, other_bounded) = found
    assert "c" in bounded[0]
    assert other_bounded == bounded
    assert all(torch.equal(other_numbers[name], value) for name, value in numbers.items())


def test_replies_that_arrive_twice_or_from_unknown_nodes_are_ignored(seven, in_order, tmp_path):
    class Twice(InMemorySites):
        def ask(self, requests, timeout):
            for node, reply in super().ask(requests, timeout):
                yield "node-99", reply
                yield node, reply
                yield node, Failure("no reply")
                yield node, reply

    federate(seven, tmp_path / "twice", sites=Twice(seven, tmp_path / "twice"), **SIZE)
    found = numbers_of(tmp_path / "twice")
    assert all(torch.equal(found[name], value) for name, value in in_order.items())
    answered = [json.loads(s)["answered"] for s in (tmp_path / "twice/server/history.jsonl").open()]
    assert answered == [7] * 2


def test_a_site_without_any_reply_does_not_count(seven, tmp_path):
    """A transport that forgets a node has not received its reply."""

    class Forgetful(InMemorySites):
        def ask(self, requests, timeout):
            for node, reply in super().ask(requests, timeout):
                if node != "node-0" or requests[node].kind != "round":
                    yield node, reply

    sites = Forgetful(seven, tmp_path)
    _, lines = federate(seven, tmp_path, sites=sites, **SIZE, min_clients=6)
    entries = [json.loads(line) for line in (tmp_path / "server/history.jsonl").open()]
    assert [entry["answered"] for entry in entries] == [6] * 2
    assert any("a: there was no reply" in line for line in lines)
