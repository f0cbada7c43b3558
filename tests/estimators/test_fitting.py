"""Starts, stopping, warm starts, and the forms of rows."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils._param_validation import InvalidParameterError

from fedgmm import FederatedGaussianMixture
from oracles import (
    KINDS,
    as_dict,
    assert_close,
    blobs,
    log_joint,
    looped_em,
    ragged_ids,
    random_start,
)

quiet = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
PARAMETERS = ("means_", "covariances_", "precisions_cholesky_", "weights_", "client_weights_")


@pytest.fixture
def federation(rng):
    X, _ = blobs(rng, rows=240)
    return X, ragged_ids(rng, 240, 12)


def mixture(**options):
    return FederatedGaussianMixture(
        options.pop("n_components", 3), **{"random_state": 0, "max_iter": 6, **options}
    )


def same_bits(a, b):
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in PARAMETERS)


def same_fit(a, b, rtol=1e-9):
    """Equal up to rounding, clients matched by name."""
    order = [b.clients_.tolist().index(name) for name in a.clients_.tolist()]
    for name in ("means_", "covariances_", "weights_"):
        assert_close(getattr(a, name), getattr(b, name), rtol)
    assert_close(a.client_weights_, b.client_weights_[order], rtol)
    assert_close(a.lower_bounds_, b.lower_bounds_, rtol)


# ---------------------------------------------------------------------- stopping


@pytest.mark.parametrize("tol", [0.1, 1e-3, 1e-6])
def test_it_stops_at_the_first_change_below_tol(federation, tol):
    X, ids = federation
    model = mixture(tol=tol, max_iter=500).fit(X, clients=ids)
    changes = np.abs(np.diff(model.lower_bounds_))
    assert model.converged_
    assert changes[-1] < tol
    assert (changes[:-1] >= tol).all()
    assert model.n_iter_ == len(model.lower_bounds_)
    assert model.lower_bound_ == model.lower_bounds_[-1]


def test_not_converged_warns(federation):
    X, ids = federation
    with pytest.warns(ConvergenceWarning, match="converge") as caught:
        model = mixture(tol=1e-12, max_iter=3).fit(X, clients=ids)
    assert not model.converged_
    assert model.n_iter_ == 3
    assert caught[0].filename == __file__  # the warning points at the caller's line


def test_zero_tolerance_asks_for_all_rounds_and_does_not_warn(federation):
    X, ids = federation
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = mixture(tol=0.0, max_iter=4).fit(X, clients=ids)
    assert model.n_iter_ == 4


@quiet
def test_lower_bounds_are_the_scores_of_the_parameters_that_entered(federation):
    X, ids = federation
    for rounds in (1, 2, 3):
        before = mixture(tol=0.0, max_iter=rounds).fit(X, clients=ids)
        after = mixture(tol=0.0, max_iter=rounds + 1).fit(X, clients=ids)
        assert after.lower_bounds_[rounds] == pytest.approx(before.score(X, clients=ids), rel=1e-12)
        assert after.lower_bounds_[:rounds] == before.lower_bounds_


# ---------------------------------------------------------------------- starts and seeds


@quiet
@pytest.mark.parametrize("init", ["kmeans", "k-means++", "random"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_same_seed_gives_the_same_bits(federation, init, dtype):
    X, ids = federation
    first, again = (mixture(init_params=init, dtype=dtype).fit(X, clients=ids) for _ in range(2))
    assert same_bits(first, again)
    other = mixture(init_params=init, dtype=dtype, random_state=1, max_iter=1).fit(X, clients=ids)
    first = mixture(init_params=init, dtype=dtype, max_iter=1).fit(X, clients=ids)
    assert init == "kmeans" or not same_bits(first, other)  # k-means finds the same centres


@quiet
@pytest.mark.usefixtures("small_blocks", "small_chunks")
def test_the_same_seed_gives_the_same_bits_on_two_threads(federation, threads):
    threads(2)
    X, ids = federation
    assert same_bits(mixture().fit(X, clients=ids), mixture().fit(X, clients=ids))


@quiet
def test_a_random_state_advances_and_none_is_allowed(federation):
    X, ids = federation
    generator = np.random.RandomState(3)
    first = mixture(random_state=generator, init_params="random").fit(X, clients=ids)
    second = mixture(random_state=generator, init_params="random").fit(X, clients=ids)
    assert not same_bits(first, second)
    again = mixture(random_state=np.random.RandomState(3), init_params="random")
    assert same_bits(first, again.fit(X, clients=ids))
    assert mixture(random_state=None).fit(X, clients=ids).n_iter_ > 0


@pytest.mark.parametrize("init", ["kmeans", "k-means++"])
@pytest.mark.parametrize("kind", KINDS)
def test_planted_clusters_are_recovered(rng, init, kind):
    places = np.array([[0.0, 0.0], [40.0, 0.0], [0.0, 40.0], [40.0, 40.0]])
    labels = rng.integers(4, size=400)
    X = places[labels] + rng.normal(size=(400, 2))
    model = mixture(n_components=4, covariance_type=kind, init_params=init, max_iter=50)
    found = model.fit(X, clients=ragged_ids(rng, 400, 20)).predict(X)
    assert len({(a, b) for a, b in zip(labels, found, strict=True)}) == 4  # one to one
    order = [found[labels == k][0] for k in range(4)]
    expected = [X[labels == k].mean(0) for k in range(4)]
    assert_close(model.means_[order], expected, 1e-6)


@quiet
def test_n_init_keeps_the_best(federation):
    X, ids = federation
    ends, bounds = [], []

    def watch(number, info):
        if number == 1 and bounds:
            ends.append(bounds[-1])
        bounds.append(info.log_likelihood)

    model = mixture(init_params="random", n_init=6, max_iter=20)
    model.fit_with_callbacks(X, clients=ids, on_round=[watch])
    ends.append(bounds[-1])
    assert len(ends) == 6
    assert len(set(np.round(ends, 6))) > 1  # the starts do differ
    assert model.lower_bound_ == max(ends)
    # The parameters that are kept are the best run's, too.
    assert model.score(X, clients=ids) == pytest.approx(max(ends), abs=0.05)
    assert model.score(X, clients=ids) >= max(ends) - 1e-9


@quiet
def test_given_starts_are_used(federation):
    X, ids = federation
    start = random_start(np.random.default_rng(1), X, "full", 3)
    expected = looped_em(
        list(as_dict(X, ids).values()),
        start["weights_init"],
        start["means_init"],
        np.linalg.inv(start["precisions_init"]),
        "full",
        rounds=1,
    )
    model = mixture(max_iter=1, **start).fit(X, clients=ids)
    assert_close(model.means_, expected.means)
    for part in start:  # each on its own is accepted as well
        assert mixture(max_iter=1, **{part: start[part]}).fit(X, clients=ids).n_iter_ == 1


@quiet
def test_given_starts_are_neither_changed_nor_kept(federation):
    X, ids = federation
    start = random_start(np.random.default_rng(1), X, "full", 3)
    copies = {name: value.copy() for name, value in start.items()}
    model = mixture(**start).fit(X, clients=ids)
    for name, value in start.items():
        assert np.array_equal(value, copies[name])
        assert getattr(model, name) is value
    assert not np.shares_memory(model.means_, start["means_init"])


# ---------------------------------------------------------------------- warm starts


@quiet
@pytest.mark.parametrize("shared_weights", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "identity"])
def test_twice_five_rounds_are_ten(federation, kind, shared_weights):
    X, ids = federation
    options = {"covariance_type": kind, "shared_weights": shared_weights, "tol": 0.0}
    warm = mixture(max_iter=5, warm_start=True, **options).fit(X, clients=ids)
    first = warm.lower_bounds_
    warm.fit(X, clients=ids)
    straight = mixture(max_iter=10, **options).fit(X, clients=ids)
    assert first + warm.lower_bounds_ == straight.lower_bounds_
    assert same_bits(warm, straight)


@quiet
def test_without_warm_start_a_fit_starts_again(federation):
    X, ids = federation
    model = mixture().fit(X, clients=ids)
    before = model.means_
    assert np.array_equal(model.fit(X, clients=ids).means_, before)


@quiet
def test_warm_start_with_other_clients(federation):
    X, ids = federation
    model = mixture(warm_start=True, max_iter=5, tol=0.0).fit(X[ids < 6], clients=ids[ids < 6])
    start, weights, own = model.means_, model.weights_, model.client_weights_
    covariances = model.covariances_
    model.set_params(max_iter=1).fit(X, clients=ids)
    assert model.client_weights_.shape == (12, 3)
    # Known clients go on with their weights, new ones begin with the federation's.
    personal = np.vstack([own, np.tile(weights, (6, 1))])
    bound = sum(
        logsumexp(log_joint(x, personal[c], start, covariances), axis=1).sum()
        for c, x in as_dict(X, ids).items()
    )
    assert model.lower_bound_ == pytest.approx(bound / len(X), rel=1e-10)


@quiet
def test_warm_start_needs_the_same_model(federation):
    X, ids = federation
    model = mixture(warm_start=True, covariance_type="tied").fit(X, clients=ids)
    with pytest.raises(ValueError, match="covariance_type"):
        model.set_params(covariance_type="diag").fit(X, clients=ids)
    with pytest.raises(ValueError, match="n_components=4"):
        model.set_params(covariance_type="tied", n_components=4).fit(X, clients=ids)
    with pytest.raises(ValueError, match="2 columns"):
        model.set_params(n_components=3).fit(X[:, :2], clients=ids)
    assert model.predict(X).shape == (240,)  # the old fit is whole


@quiet
def test_a_refused_fit_leaves_the_last_one_whole(federation):
    X, ids = federation
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    model = mixture().fit(frame, clients=ids)
    before = {name: getattr(model, name).copy() for name in PARAMETERS}
    refused = [
        (X[:, :2] * np.nan, None),
        (X[:2, :2], None),
        ({"a": X[:, :2]}, ids),
        ({"a": X[:, :2] * np.inf}, None),
    ]
    for bad, clients in refused:
        with pytest.raises(ValueError):
            model.fit(bad, clients=clients)
        assert model.n_features_in_ == 3
        assert model.feature_names_in_.tolist() == ["a", "b", "c"]
        assert all(np.array_equal(getattr(model, name), old) for name, old in before.items())
        assert model.predict(frame, clients=ids).shape == (240,)


# ---------------------------------------------------------------------- what is printed


@quiet
def test_verbose(federation, capsys):
    X, ids = federation
    mixture(tol=0.0, max_iter=12).fit(X, clients=ids)
    assert capsys.readouterr().out == ""
    model = mixture(tol=0.0, max_iter=12, verbose=2, n_init=2).fit(X, clients=ids)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 24
    assert lines[0].startswith("start 1, round 1: log-likelihood ")
    assert f"{model.lower_bound_:.6f}" in "\n".join(lines)
    mixture(tol=0.0, max_iter=12, verbose=True).fit(X, clients=ids)
    assert 1 <= len(capsys.readouterr().out.splitlines()) < 12


# ---------------------------------------------------------------------- forms of the rows


@quiet
def test_dictionaries_pairs_and_ids_are_the_same(federation):
    X, ids = federation
    names = np.array([f"c{k:02}" for k in ids])
    expected = mixture().fit(X, clients=names)
    clients = as_dict(X, names)
    forms = [
        clients,
        dict(reversed(clients.items())),
        list(clients.items()),
        tuple(clients.items()),
        clients.items(),
        iter(clients.items()),
        ((name, rows) for name, rows in clients.items()),
        [[name, rows.tolist()] for name, rows in clients.items()],
        {name: pd.DataFrame(rows) for name, rows in clients.items()},
    ]
    for form in forms:
        same_fit(mixture().fit(form), expected)
    assert mixture().fit(dict(reversed(clients.items()))).clients_.tolist() == list(clients)[::-1]


@quiet
@pytest.mark.parametrize(
    "convert",
    [
        np.asfortranarray,
        lambda X: np.ascontiguousarray(X[::-1])[::-1],
        lambda X: np.ascontiguousarray(X[:, ::-1])[:, ::-1],
        lambda X: np.repeat(X, 2, axis=0)[::2],
        lambda X: X.tolist(),
        lambda X: pd.DataFrame(X),
        lambda X: X.astype(">f8"),
        torch.from_numpy,
    ],
    ids=["Fortran", "rows", "columns", "strided", "list", "frame", "big-endian", "tensor"],
)
@pytest.mark.parametrize("pairs", [False, True])
def test_layouts_of_the_same_rows(federation, convert, pairs):
    X, ids = federation
    expected = mixture().fit(X, clients=ids)
    if pairs:
        found = mixture().fit({name: convert(rows) for name, rows in as_dict(X, ids).items()})
    else:
        found = mixture().fit(convert(X), clients=ids)
    same_fit(found, expected)
    assert_close(found.score_samples(convert(X)), expected.score_samples(X), 1e-9)


@quiet
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.int8, np.uint16, bool])
def test_other_numbers_are_the_same_as_their_float64(federation, dtype):
    X, ids = federation
    X = np.abs(X * 5).astype(dtype)
    same_fit(mixture().fit(X, clients=ids), mixture().fit(X.astype(np.float64), clients=ids))


@quiet
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_callers_arrays_are_not_changed(federation, dtype):
    X, ids = federation
    for rows in (X.copy(), X.astype(np.float32)):
        before = rows.copy()
        model = mixture(dtype=dtype).fit(rows, clients=ids)
        model.predict_proba(rows, clients=ids)
        model.score_samples(rows)
        assert np.array_equal(rows, before)


@quiet
def test_read_only_arrays(federation):
    X, ids = federation
    expected = mixture().fit(X, clients=ids)
    X, ids = X.copy(), ids.copy()
    X.flags.writeable = ids.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = mixture().fit(X, clients=ids)
        model.predict(X, clients=ids)
    assert same_bits(model, expected)


@quiet
@pytest.mark.usefixtures("small_blocks", "small_chunks")
@settings(max_examples=8)
@given(
    seed=st.integers(0, 10_000), constant=st.booleans(), init=st.sampled_from(["kmeans", "random"])
)
def test_the_order_of_clients_and_of_rows_between_clients_does_not_matter(seed, constant, init):
    rng = np.random.default_rng(seed)
    X, _ = blobs(rng, rows=150, separation=4.0)
    if constant:  # known only up to rounding once it has been summed
        X[:, 0] = 0.1
    ids = ragged_ids(rng, 150, 10)
    clients = as_dict(X, ids)
    here = mixture(init_params=init, random_state=seed).fit(clients)

    names = rng.permutation(list(clients)).tolist()
    permuted = mixture(init_params=init, random_state=seed)
    same_fit(permuted.fit({name: clients[name] for name in names}), here, 1e-8)
    shuffled = rng.permutation(ids)
    waiting = {name: list(rows) for name, rows in clients.items()}
    mixed = np.array([waiting[name].pop(0) for name in shuffled.tolist()])
    interleaved = mixture(init_params=init, random_state=seed).fit(mixed, clients=shuffled)
    same_fit(interleaved, here, 1e-8)


@quiet
def test_names_of_every_kind(federation):
    X, _ = federation
    names = ["oslo", 3, ("a", 1), 2.5, b"x", True, "3"]
    clients = {name: X[k::7] for k, name in enumerate(names)}
    model = mixture().fit(clients)
    assert model.clients_.tolist() == names
    for k, (name, rows) in enumerate(clients.items()):
        ids = np.empty(len(rows), dtype=object)
        ids[:] = [name] * len(rows)
        own = model.score_samples(rows, clients=ids)
        assert np.array_equal(model.score_samples({name: rows}), own)
        expected = logsumexp(
            log_joint(rows, model.client_weights_[k], model.means_, model.covariances_), axis=1
        )
        assert_close(own, expected, 1e-10)


# ---------------------------------------------------------------------- as scikit-learn's mixture


@quiet
@pytest.mark.parametrize("rounds", [1, 2, 50])
def test_a_warm_start_converges(federation, rounds):
    X, ids = federation
    model = mixture(max_iter=rounds, warm_start=True)
    for _ in range(200):
        model.fit(X, clients=ids)
        if model.converged_:
            break
    assert model.converged_
    assert model.n_iter_ <= rounds
    assert len(model.lower_bounds_) == model.n_iter_
    assert model.lower_bound_ == model.lower_bounds_[-1]


@quiet
def test_warm_rounds_one_by_one_equal_one_run(federation):
    X, ids = federation
    whole = mixture(tol=0.0, max_iter=4).fit(X, clients=ids)
    steps = mixture(tol=0.0, max_iter=1, warm_start=True)
    bounds = [steps.fit(X, clients=ids).lower_bound_ for _ in range(4)]
    assert np.array_equal(steps.means_, whole.means_)
    assert np.array_equal(steps.client_weights_, whole.client_weights_)
    assert bounds == whole.lower_bounds_


def test_no_rounds_keep_the_start(federation):
    X, ids = federation
    start = X[:3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = mixture(max_iter=0, means_init=start).fit(X, clients=ids)
    assert np.array_equal(model.means_, start)
    assert (model.n_iter_, model.lower_bounds_, model.lower_bound_) == (0, [], -np.inf)
    assert not model.converged_
    assert np.isfinite(model.score(X, clients=ids))


@quiet
@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical", "identity"])
def test_precisions_invert_covariances(federation, kind):
    X, ids = federation
    model = mixture(covariance_type=kind, max_iter=3).fit(X, clients=ids)
    if kind in ("full", "tied"):
        product = model.precisions_ @ model.covariances_
        np.testing.assert_allclose(product, np.broadcast_to(np.eye(3), product.shape), atol=1e-9)
    else:
        np.testing.assert_allclose(model.precisions_ * model.covariances_, 1.0)


@quiet
def test_log_probabilities_do_not_underflow(federation):
    X, ids = federation
    model = mixture(max_iter=3).fit(X, clients=ids)
    found = model.predict_log_proba(X, clients=ids)
    np.testing.assert_allclose(np.exp(found), model.predict_proba(X, clients=ids), atol=1e-14)
    far = model.predict_log_proba(X[:1] + 1e4, client=ids[0])
    assert np.isfinite(far).all()
    assert far.min() < -1000


@quiet
def test_callbacks_printed_rounds_and_threads(federation, capsys):
    X, ids = federation
    seen = []
    model = mixture(tol=0.0, max_iter=4, verbose=1, verbose_interval=2, n_jobs=1)
    model.set_params(on_round=lambda number, info: seen.append((number, info.log_likelihood)))
    model.fit(X, clients=ids)
    assert seen == list(enumerate(model.lower_bounds_, 1))
    assert len(capsys.readouterr().out.splitlines()) == 3  # rounds 1, 2 and 4


@pytest.mark.parametrize(
    "parameters", [{"tol": -1.0}, {"n_init": "two"}, {"init_params": "random_from_data"}]
)
def test_parameters_are_refused_with_scikit_learns_error(federation, parameters):
    with pytest.raises(InvalidParameterError, match=next(iter(parameters))):
        mixture(**parameters).fit(federation[0])


def test_sample_needs_a_positive_number(federation):
    X, ids = federation
    with pytest.raises(ValueError, match="Invalid value for 'n_samples'"):
        mixture(max_iter=0).fit(X, clients=ids).sample(0)
