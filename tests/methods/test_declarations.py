"""Every method declares its sums: names, shapes, what rows can make of them, what one row can change.

Messages, checks, masks and noise rely on the declaration alone, so it must be true of every method.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fedgmm.core.gaussians import gaussians
from fedgmm.core.params import take_clients
from fedgmm.core.sums import Sums, SumsError, Total, withhold
from fedgmm.data.dataset import LabelledRows
from fedgmm.data.federated import client_rows
from fedgmm.methods.base import DENSITY
from fedgmm.methods.clustered import CLIENTS
from fedgmm.methods.gmm import equal_covariances
from fedgmm.nets.networks import Dense, Regression
from fedgmm.training.build import build
from fedgmm.training.options import ALGORITHMS, TrainingOptions
from fedgmm.training.state_arrays import take_apart
from oracles import ALL_KINDS, assert_close

COLUMNS = 3
COMPONENTS = 3  # as many as columns, so that shapes alone do not say which axis is which
SIZES = (1, 12, 5, 30)
AGGREGATIONS = ("exact", "paper")
SOLVERS = ("sgd", "newton")


def with_solvers(algorithm, **options):
    return {
        " ".join((algorithm, *options.values(), solver)): {
            "algorithm": algorithm,
            "solver": solver,
            **options,
        }
        for solver in SOLVERS
    }


GAUSSIANS = [
    {"covariance_type": kind, "aggregation": aggregation}
    for kind, aggregation in product(ALL_KINDS, AGGREGATIONS)
]
FEDGMM = {k: v for one in GAUSSIANS for k, v in with_solvers("fedgmm", **one).items()}
GMM = {" ".join((DENSITY, *one.values())): {"algorithm": DENSITY, **one} for one in GAUSSIANS}
EXACT = {k: v for name in ("fedem", "fedavg", "fedavg+") for k, v in with_solvers(name).items()}
GRADIENTS = {name: {"algorithm": name} for name in ("fedprox", "local", "clustered", "pfedme")}
CLASSES = {**FEDGMM, **GMM, **EXACT, **GRADIENTS}
NUMBERS = {
    f"{name} numbers": CLASSES[name]
    for name in ("fedgmm full exact sgd", "fedgmm full exact newton", "fedem newton", *GRADIENTS)
}
METHODS = {**CLASSES, **NUMBERS}

# The kind of covariance does not depend on the solver, so one of the two is enough by default.
SLOW = {name for name in FEDGMM if "sgd" in name} - {"fedgmm full exact sgd"}


def each(names):
    marked = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in names]
    return pytest.mark.parametrize("name", marked)


every_method = each(METHODS)
additive = each(name for name in METHODS if "clustered" not in name)
with_gaussians = each([*FEDGMM, *GMM])


def test_no_method_is_missing():
    found = {options["algorithm"] for options in METHODS.values()}
    assert found == {*ALGORITHMS, DENSITY}


def method_of(name, dtype="float64", lr=0.2):
    options = TrainingOptions(
        **METHODS[name], components=COMPONENTS, learners=2, batch_size=8, lr=lr, dtype=dtype
    )
    if name in NUMBERS:
        return build(options, Regression(Dense(COLUMNS, 1)))
    return build(options, Dense(COLUMNS, 1 if options.algorithm == DENSITY else 3))


def rows_of(method, clients, labels=None):
    """Rows of ``{client: rows}``, with labels that depend on them, or with given ones."""
    x = np.concatenate(list(clients.values())).astype(str(method.training.dtype)[6:])
    classes = method.training.net.classes
    if labels is None:
        labels = np.floor(np.abs(x[:, 0]) * 7) % classes if classes else np.sin(x.sum(1))
    labels = labels.astype(int if classes else x.dtype)
    codes = np.repeat(np.arange(len(clients)), [len(own) for own in clients.values()])
    features = client_rows([x], codes, clients)
    return LabelledRows(features, torch.from_numpy(x), torch.from_numpy(labels))


def ragged(rng, sizes=SIZES):
    return {
        f"c{k}": rng.normal(size=(n, COLUMNS)) + rng.normal(size=COLUMNS)
        for k, n in enumerate(sizes)
    }


@cache
def after_a_round(name):
    """A method, its rows, and the state after a round: clients differ, and no part is at its start."""
    method = method_of(name)
    rows = rows_of(method, ragged(np.random.default_rng(20230723)))
    shared, personal = method.init(rows)
    personal, sums = method.client_step(shared, personal, rows, 1)
    shared, _ = method.server_step(shared, sums, 1)
    return method, rows, shared, personal


def of_client(personal, code):
    if isinstance(personal, dict):
        return take_clients(personal, slice(code, code + 1))
    return personal[code : code + 1]


def at_home(method, shared, personal, code):
    """A client's state on its own machine: the broadcast that it received, and its own part."""
    received = method.received(method.broadcast(shared, code), COLUMNS)
    if method.is_additive:
        return received, of_client(personal, code)
    return received, method.newcomer(received)  # only the server knows its code


def one_by_one(method, shared, personal, rows, round_number):
    """Personal parts and sums of every client on its own machine, as the server gets them."""
    own, sent = [], []
    for code in range(len(rows.names)):
        state = at_home(method, shared, personal, code)
        moved, sums = method.client_step(*state, rows.client(code), round_number)
        own.append(moved)
        sent.append(method.of_client(sums, code))
    return own, sent


@cache
def second_round(name):
    """Personal parts and sums of the second round: of all clients at once, and one by one."""
    method, rows, shared, personal = after_a_round(name)
    return (
        *method.client_step(shared, personal, rows, 2),
        *one_by_one(method, shared, personal, rows, 2),
    )


def flat(state):
    tensors = {}
    take_apart("state", state, tensors, {})
    return tensors


# ---------------------------------------------------------------------- names and shapes


@every_method
def test_sums_have_the_declared_names_and_shapes(name):
    method = method_of(name)
    declaration = method.declare_sums(COLUMNS)
    _, together, _, sent = second_round(name)
    for sums, clients in [(together, len(SIZES)), *((own, 1) for own in sent)]:
        assert set(sums) - {CLIENTS} == set(declaration)
        assert sums.gathered - {CLIENTS} == {n for n, one in declaration.items() if one.gathered}
        assert (CLIENTS in sums) == (not method.is_additive)
        for key, one in declaration.items():
            shape = (clients, *one.shape[1:]) if one.gathered else one.shape
            assert tuple(sums[key].shape) == shape, key
            assert one.gathered or sums[key].dtype == torch.float64, key
    for one in declaration.values():
        assert one.rows is None or one.rows in declaration


@every_method
def test_broadcasts_have_the_declared_names_and_shapes(name):
    method, _, shared, _ = after_a_round(name)
    declaration = method.declare_broadcast(COLUMNS)
    for client in (None, 0, len(SIZES) - 1):
        arrays = method.broadcast(shared, client)
        assert {key: tuple(value.shape) for key, value in arrays.items()} == {
            key: one.shape for key, one in declaration.items()
        }


@every_method
def test_all_methods_but_clustered_learning_need_sums_alone(name):
    assert method_of(name).is_additive == ("clustered" not in name)


# ---------------------------------------------------------------------- clients one by one


@every_method
def test_sums_of_single_clients_add_up_to_those_of_stacked_clients(name):
    method, _, shared, _ = after_a_round(name)
    moved, together, own, sent = second_round(name)
    total = Total()
    for sums in sent:
        total.add(sums)
    apart = total.result()
    plain = sum(sent[1:], sent[0])
    assert set(together) == set(apart) == set(plain)
    for key, value in together.items():
        assert_close(apart[key], value, 1e-10)
        assert_close(plain[key], value, 1e-10)
    if method.is_additive:
        for code, mine in enumerate(own):
            for key, value in flat(of_client(moved, code)).items():
                assert_close(flat(mine)[key], value, 1e-10)
    expected, info = method.server_step(shared, together, 2)
    found, same_info = method.server_step(shared, apart, 2)
    for key, value in flat(expected).items():
        assert_close(flat(found)[key], value, 1e-10)
    assert same_info.log_likelihood == pytest.approx(info.log_likelihood, rel=1e-10)
    assert same_info.empty_components == info.empty_components


@every_method
def test_the_server_s_memory_grows_with_clients_only_where_the_declaration_says_so(name):
    method = method_of(name)
    sizes, total = [], Total()
    for sums in second_round(name)[3]:
        total.add(sums)
        sizes.append(sum(value.numel() for value in total.result().values()))
    assert (len(set(sizes)) == 1) == method.is_additive


# ---------------------------------------------------------------------- what rows can make


def awkward_client(seed, rows, scale, offset, constant):
    """Rows of any size and place; ``constant`` rows have no spread at all."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, COLUMNS)) * 10.0**scale
    if constant:
        x[:] = x[0]
    return x + offset * 10.0**scale


def check_rounds(method, clients, min_rows):
    """Two rounds in which the server checks what every client sends, whole and in part."""
    rows, declaration = rows_of(method, dict(enumerate(clients))), method.declare_sums(COLUMNS)
    shared, personal = method.init(rows)
    for round_number in (1, 2):
        _, sent = one_by_one(method, shared, personal, rows, round_number)
        total = Total()
        for sums, x in zip(sent, clients, strict=True):
            method.check(sums, len(x), declaration)
            some = withhold(sums, declaration, min_rows)
            method.check(some, len(x), declaration)
            total.add(some)
        if round_number == 1:
            personal, _ = method.client_step(shared, personal, rows, round_number)
        shared, _ = method.server_step(shared, total.result(), round_number)
        for value in flat(shared).values():
            assert torch.isfinite(value).all()


@pytest.mark.filterwarnings("ignore:The covariance")
@pytest.mark.parametrize("dtype", [pytest.param("float64", marks=pytest.mark.slow), "float32"])
@every_method
def test_sums_of_awkward_clients_are_accepted(name, dtype):
    """One row, rows that are all equal, rows far from all others, tiny and huge numbers."""
    clients = [
        awkward_client(1, 1, 0, 0.0, False),
        awkward_client(2, 9, 2, 1.0, True),
        awkward_client(3, 20, 0, -300.0, False),
        awkward_client(4, 7, -3, 0.0, False),
        awkward_client(5, 15, 4, 1.0, False),
    ]
    # steps so small that no learner diverges on such rows
    check_rounds(method_of(name, dtype, lr=1e-12), clients, min_rows=3)


awkward_clients = st.lists(
    st.builds(
        awkward_client,
        seed=st.integers(0, 10_000),
        rows=st.integers(1, 30),
        scale=st.integers(-3, 4),
        offset=st.sampled_from([0.0, 1.0, -300.0]),
        constant=st.booleans(),
    ),
    min_size=2,
    max_size=4,
)


@pytest.mark.filterwarnings("ignore:The covariance")
@given(
    name=st.sampled_from(list(METHODS)),
    dtype=st.sampled_from(["float64", "float32"]),
    clients=awkward_clients,
    min_rows=st.sampled_from([0, 3]),
)
def test_sums_of_real_clients_are_accepted(name, dtype, clients, min_rows):
    # In float32, scatters within clients far away are rounding errors larger than reg_covar.
    assume(dtype == "float64" or METHODS[name].get("aggregation") != "paper")
    check_rounds(method_of(name, dtype, lr=1e-12), clients, min_rows)


@additive
def test_a_round_in_which_all_clients_withhold_changes_no_learner_and_no_gaussian(name):
    method, _, shared, _ = after_a_round(name)
    declaration, total = method.declare_sums(COLUMNS), Total()
    for sums in second_round(name)[3]:
        total.add(withhold(sums, declaration, 1e6))
    new, _ = method.server_step(shared, total.result(), 2)
    for key, value in flat(shared).items():
        if "learners" in key or "gaussians" in key:
            assert_close(flat(new)[key], value, 1e-12)


@with_gaussians
def test_moments_that_no_rows_have_are_refused(rng, name):
    """Second moments must not be less than the squared means of the same rows."""
    method = method_of(name)
    rows = rows_of(method, ragged(rng, sizes=(30,)))
    declaration = method.declare_sums(COLUMNS)
    shared, personal = method.init(rows)
    _, sums = method.client_step(shared, personal, rows, 1)
    method.check(sums, 30, declaration)
    kind = METHODS[name]["covariance_type"]
    second = sums["gaussians/second"]
    if METHODS[name]["aggregation"] == "exact":
        # around the client's own means: nothing but rounding errors, and then less
        own = sums["gaussians/first"] / sums["gaussians/counts"][:, None]
        full = torch.einsum("m,md,me->mde", sums["gaussians/counts"], own, own)
        none = {
            "full": full,
            "tied": full.sum(0),
            "diag": full.diagonal(dim1=-2, dim2=-1),
        }.get(kind, full.diagonal(dim1=-2, dim2=-1).sum(-1))
    else:
        none = torch.zeros_like(second)
    method.check(Sums({**sums, "gaussians/second": none}), 30, declaration)
    if kind == "identity":
        return  # no equation uses these second moments
    lower = Sums({**sums, "gaussians/second": none - 0.05 * second})
    with pytest.raises(SumsError, match="gaussians/second"):
        method.check(lower, 30, declaration)


# ---------------------------------------------------------------------- sensitivity


def added_by_the_last_row(method, shared, personal, x, y):
    """The Euclidean norm of what a client's last row adds to each of its sums."""

    def sums_of(count):
        rows = rows_of(method, {"c": x[:count]}, y[:count])
        return method.client_step(shared, personal, rows, 1)[1]

    whole = sums_of(len(x))
    before = sums_of(len(x) - 1) if len(x) > 1 else dict.fromkeys(whole, 0.0)
    return {
        key: float(torch.linalg.vector_norm(whole[key] - before[key]))
        for key, one in method.declare_sums(COLUMNS).items()
        if one.sensitivity is not None
    }


def bounds_of(method, shared, x, y):
    """The declared bounds: rows are within ``clip`` of all means, or of zero for the learners.

    Residuals of numbers are within ``clip``, too.
    """
    clips = {"learners": np.linalg.norm(x, axis=-1).max(), "gaussians": 0.0}
    if not method.training.net.classes and method.is_additive and shared is not None:
        outputs = method.training.net.logits(shared.learners, torch.from_numpy(x))[..., 0]
        clips["learners"] = max(clips["learners"], np.abs(y[:, None] - outputs.numpy()).max())
    if method.mixture is not None:
        means = shared.mixture.gaussians.means.numpy()
        clips["gaussians"] = np.linalg.norm(x[:, None] - means, axis=-1).max()
    return {
        key: one.sensitivity(float(clips.get(key.split("/")[0], 1.0)))
        for key, one in method.declare_sums(COLUMNS).items()
        if one.sensitivity is not None
    }


@every_method
def test_one_row_changes_no_sum_by_more_than_is_declared(rng, name):
    method, _, shared, personal = after_a_round(name)
    for others in (0, 1, 9):
        x = rng.normal(size=(others + 1, COLUMNS)) * 3.0
        y = rng.integers(method.training.net.classes or 9, size=others + 1)
        state = at_home(method, shared, personal, 1)
        found = added_by_the_last_row(method, *state, x, y)
        bounds = bounds_of(method, shared, x, y)
        assert found.keys() == bounds.keys()
        for key, bound in bounds.items():
            assert found[key] <= bound * (1 + 1e-9), (key, others)


def worst_states(method):
    """Shared and personal parts in which one row weighs as much as it can.

    All means are at zero, and all rows belong to the first Gaussian and to the first learner, which is
    once undecided and once certain that every row has the first label.
    """
    rows = rows_of(method, ragged(np.random.default_rng(0)))
    shared, personal = method.init(rows)
    if not hasattr(shared, "mixture"):
        return [at_home(method, shared, personal, 0)]
    if method.mixture is not None:
        kind = method.mixture.covariance_type
        means = torch.zeros(COMPONENTS, COLUMNS, dtype=torch.float64)
        variances = torch.ones(COLUMNS, dtype=torch.float64)
        own = gaussians(means, equal_covariances(variances, COMPONENTS, kind), kind)
        shared = replace(shared, mixture=replace(shared.mixture, gaussians=own))
    first = torch.zeros_like(personal[:1])
    first[:, 0] = 1.0
    undecided = {key: torch.zeros_like(value) for key, value in shared.learners.items()}
    certain = {key: value.clone() for key, value in undecided.items()}
    certain["0.bias"][:, 0] = 30.0
    if not method.training.net.classes:  # a residual may be as large as the clip
        return [(replace(shared, learners=undecided), first)]
    return [(replace(shared, learners=own), first) for own in (undecided, certain)]


@pytest.mark.parametrize("clip", [pytest.param(0.5, marks=pytest.mark.slow), 20.0])
@additive
def test_declared_sensitivities_are_within_ten_times_the_worst_case(name, clip):
    method = method_of(name, lr=1e-4)
    x = np.zeros((10, COLUMNS))
    x[:, 0] = -clip
    x[-1, 0] = clip  # on the other side of the mean than all other rows of the client
    classes = method.training.net.classes
    y = np.full(10, classes - 1 if classes else clip)
    largest = {}
    for (shared, personal), rows in product(worst_states(method), (slice(None), slice(-1, None))):
        bounds = bounds_of(method, shared, x, y)
        found = added_by_the_last_row(method, shared, personal, x[rows], y[rows])
        for key, value in found.items():
            largest[key] = max(largest.get(key, 0.0), value / bounds[key])
    assert largest
    for key, share in largest.items():
        assert 0.1 <= share <= 1 + 1e-9, key


@every_method
def test_what_no_clip_bounds_is_declared_without_a_sensitivity(name):
    """Trained learners and log-likelihoods: noise cannot be sized for them."""
    method = method_of(name)
    for key, one in method.declare_sums(COLUMNS).items():
        unbounded = key == "log_likelihood" or one.as_mean or one.gathered
        assert (one.sensitivity is None) == unbounded, key


# ---------------------------------------------------------------------- broadcasts


def used_by(prediction, client):
    """All numbers that a client's predictions depend on, with those of rows without a client."""
    learners = prediction.learners
    if prediction.assignment is not None:
        return take_clients(learners, prediction.assignment[client])
    found = dict(learners)
    found["client weights"] = prediction.client_weights[client]
    found["weights"] = prediction.weights
    if prediction.gaussians is not None:
        found |= flat(prediction.gaussians)
    return found


@every_method
def test_a_broadcast_gives_the_same_prediction(name):
    method, _, shared, personal = after_a_round(name)
    stacked = method.prediction(shared, personal)
    for code in range(len(SIZES)):
        home = method.prediction(*at_home(method, shared, personal, code))
        expected, found = used_by(stacked, code), used_by(home, 0)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(found[key], value, 1e-12)
    if stacked.default_learner is not None:  # a client that does not take part
        received = method.received(method.broadcast(shared, None), COLUMNS)
        home = method.prediction(received, method.newcomer(received))
        for key, value in stacked.learners.items():
            expected = value[stacked.default_learner]
            assert torch.equal(home.learners[key][home.default_learner], expected)
