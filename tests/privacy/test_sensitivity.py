"""One unit changes no release by more than its declared bound, through whole rounds.

The clients of a whole run are compared with those of a run with one unit more, at public parameters that
hypothesis draws. If rows or persons are protected, an E-step with a client's own weights fails this test,
because one row then changes the responsibilities of the others.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgmm import FederatedDataset, Privacy
from fedgmm.core.gaussians import gaussians
from fedgmm.data.federated import ClientRows
from fedgmm.methods.gmm import FederatedGMM, MixtureShared
from fedgmm.privacy.noisy_sums import NoisySums, Part, from_triangle, shorten, triangle
from fedgmm.privacy.private_networks import private_method
from fedgmm.training import private
from fedgmm.training.build import build, learner_network
from fedgmm.training.options import TrainingOptions
from fedgmm.training.private import Account, PrivateClients, unit_weights

COLUMNS, CLASSES = 3, 3


@pytest.fixture(scope="module", autouse=True)
def few_draws():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedgmm.privacy.private_em._SAMPLES", 20)
        patch.setattr("fedgmm.privacy.private_em._FEWEST_SAMPLES", 20)
        patch.setattr("fedgmm.privacy.private_em._STEPS", 3)
        patch.setattr("fedgmm.privacy.private_em._CELL_ROUNDS", 3)
        yield


def totals_of_a_run(rows, unit, algorithm, kind, noise, patch, learner="linear", descent=False):
    """Return the totals that every release of a run would add noise to.

    The noise comes from ``noise``, one vector per release, so that runs on two data sets see the same
    public parameters: the output of the first run is replayed to the second.
    """
    x, y, codes, persons = rows
    data = FederatedDataset.from_arrays(x, y, codes, persons=persons, split=(1, 0, 0))
    # classes are declared: they stay the same if the only row of a class goes
    train = replace(data.train, labels=torch.from_numpy(data.labels_of(data.train)).long())
    data = replace(data, train=train)
    data_classes = np.arange(CLASSES)
    budget = Privacy(epsilon=5.0, delta=1e-5, bounds=(-1, 1), unit=unit, rounds=2)
    options = TrainingOptions(
        algorithm=algorithm,
        components=2,
        learners=2,
        covariance_type=kind,
        dtype="float64",
        learner=learner,
    )
    net = learner_network(options, (COLUMNS,), data_classes[: 1 if algorithm == "gmm" else CLASSES])
    method = private_method(build(options, net), budget, descent=descent)
    weights = unit_weights(budget, data.train.codes, data.persons)
    clients = PrivateClients(data.train, budget, Account(budget), weights)
    run = SimpleNamespace()
    clients.loop = SimpleNamespace(run=run, save=lambda: None)
    totals, outputs = [], []

    def recorded(total, sigma, source):
        totals.append(total)
        place = len(totals) - 1
        out = noise[place] if place < len(noise) else total + sigma * np.sin(np.arange(len(total)))
        outputs.append(out)
        return out

    patch.setattr(private, "noisy", recorded)
    run.shared, personal = clients.start(method, None)
    for number in (1, 2):
        replies = clients.step(method, run.shared, personal, number)
        run.shared, _ = method.server_step(run.shared, replies.sums, number)
    return totals, outputs


@st.composite
def two_neighbours(draw, unit):
    """Rows, and the same rows without one unit; values may lie far outside the bounds."""
    seed = draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    n, clients = draw(st.integers(6, 14)), 3
    x = generator.normal(0, draw(st.sampled_from([0.3, 1.0, 50.0])), (n, COLUMNS))
    y = generator.integers(0, CLASSES, n)
    y[:CLASSES] = np.arange(CLASSES)
    codes = np.arange(n) % clients
    persons = generator.integers(0, 4, n)
    persons[0] = 9
    units = {"row": np.arange(n), "person": persons, "client": codes}[unit]
    gone = units == units[-1]
    x[gone] *= draw(st.sampled_from([1.0, 20.0]))
    return (x, y, codes, persons), gone


METHODS = [("fedgmm", "full"), ("fedgmm", "diag"), ("fedem", "full"), ("gmm", "tied")]


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["row", "person", "client"])
@pytest.mark.parametrize(("algorithm", "kind"), METHODS)
def test_sensitivity_of_all_methods(unit, algorithm, kind):
    check_sensitivity(unit, algorithm, kind, examples=30)


@pytest.mark.parametrize("unit", ["row", "person", "client"])
def test_sensitivity_through_whole_rounds(unit):
    check_sensitivity(unit, "fedgmm", "full", examples=3)


@pytest.mark.parametrize("unit", ["row", "person", "client"])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedem", "fedgmm"])
def test_sensitivity_of_networks(unit, algorithm):
    check_sensitivity(unit, algorithm, "full", examples=2, learner="mlp")


@pytest.mark.parametrize("unit", ["row", "person", "client"])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedgmm"])
def test_sensitivity_of_gradient_steps(unit, algorithm):
    check_sensitivity(unit, algorithm, "spherical", examples=2, descent=True)


def check_sensitivity(unit, algorithm, kind, examples, learner="linear", descent=False):
    @settings(max_examples=examples, deadline=None)
    @given(two_neighbours(unit))
    def check(drawn):
        (x, y, codes, persons), gone = drawn
        if algorithm == "gmm":
            y = np.zeros_like(y)
        stay = ~gone
        with pytest.MonkeyPatch.context() as patch:
            all_rows = (x, y, codes, persons)
            run = (unit, algorithm, kind)
            totals, outputs = totals_of_a_run(all_rows, *run, [], patch, learner, descent)
            fewer = (x[stay], y[stay], codes[stay], persons[stay])
            others, _ = totals_of_a_run(fewer, *run, outputs, patch, learner, descent)
        steps = descent or learner != "linear"
        releases = 5 if algorithm in ("fedgmm", "gmm") else (3 if steps else 4)
        assert len(totals) == releases * (2 if unit == "client" else 1)
        for one, other in zip(totals, others, strict=True):
            assert np.linalg.norm(one - other) <= 1.0 + 1e-9

    check()


def test_a_bound_is_nearly_reached():
    """The bound of a row is not much larger than needed: a row at the edge uses most of it."""
    x = np.array([[0.0, 0, 0], [0.1, 0, 0], [0.2, 0.3, 0], [9, 9, 9]])
    rows = (x, np.array([0, 1, 2, 0]), np.zeros(4, dtype=int), np.arange(4))
    with pytest.MonkeyPatch.context() as patch:
        totals, outputs = totals_of_a_run(rows, "row", "fedgmm", "full", [], patch)
        fewer = tuple(part[:-1] for part in rows)
        others, _ = totals_of_a_run(fewer, "row", "fedgmm", "full", outputs, patch)
    moved = [np.linalg.norm(one - other) for one, other in zip(totals, others, strict=True)]
    assert moved[0] > 0.99  # columns: the row lies in a corner
    assert moved[2] == pytest.approx(1.0)  # histogram: one cell


def test_own_weights_in_the_e_step_would_break_the_bound():
    """The mistake that this room avoids: with ``π_c`` of a client's rows, one row moves other rows."""
    means = torch.tensor([[-0.3], [0.3]], dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.float64)
    shared = MixtureShared(gaussians(means, ones, "spherical"), ones / 2)
    method = FederatedGMM(2, "spherical")
    x = torch.zeros(3, 1, dtype=torch.float64)

    def counts_after_three_rounds(rows):
        held = ClientRows((rows,), torch.zeros(len(rows), dtype=torch.int64), ("a",))
        personal = torch.full((1, 2), 0.5, dtype=torch.float64)
        for _ in range(3):
            personal, sums = method.client_step(shared, personal, held)
        return sums["counts"]

    more = torch.cat([x, torch.tensor([[5.0]], dtype=torch.float64)])
    moved = counts_after_three_rounds(more) - counts_after_three_rounds(x)
    assert float(moved.norm()) > 1.2  # a row may move counts by one


def test_triangles_keep_lengths():
    matrix = torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = matrix + matrix.mT
    vectors = triangle(matrix)
    torch.testing.assert_close(vectors.norm(dim=-1), matrix.norm(dim=(-2, -1)))
    torch.testing.assert_close(from_triangle(vectors, 4), matrix)


def test_a_vector_is_read_back():
    layout = NoisySums((Part("a", (2,), 3.0, 0.25), Part("b", (1, 2), 0.5, 0.75)))
    sums = {"a": torch.tensor([1.0, 2.0]).double(), "b": torch.tensor([[0.1, 0.2]]).double()}
    found = layout.read(layout.vector(sums))
    torch.testing.assert_close(found["a"], sums["a"])
    torch.testing.assert_close(found["b"], sums["b"])
    longest = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[0.0, -0.5]])}
    assert np.linalg.norm(layout.vector(longest)) == pytest.approx(1.0)
    assert layout.deviations(2.0) == {"a": 12.0, "b": pytest.approx(2 * 0.5 / np.sqrt(0.75))}
    with pytest.raises(ValueError, match="shares"):
        NoisySums((Part("a", (1,), 1.0, 0.5),))
    assert float(shorten(torch.tensor([3.0, 4.0]), 1.0).norm()) == pytest.approx(1.0)
