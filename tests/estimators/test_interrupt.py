"""Ctrl-C during fit leaves the best parameters so far, with a warning."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch

from fedgmm import FederatedGaussianMixture
from oracles import assert_finite, blobs, ragged_ids

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture
def federation(rng):
    X, _ = blobs(rng, rows=300)
    return X, ragged_ids(rng, 300, 9)


def interrupt_in(round_number, start=1):
    """A callback that presses Ctrl-C in a round of a start, both counted from one."""
    starts = []

    def press(number, info):
        if number == 1:
            starts.append(number)
        if len(starts) == start and number == round_number:
            raise KeyboardInterrupt

    return press


def test_the_finished_rounds_are_kept(federation):
    X, ids = federation
    options = {"tol": 0.0, "random_state": 0}
    model = FederatedGaussianMixture(3, max_iter=50, **options)
    with pytest.warns(RuntimeWarning, match="round 4"):
        model.fit_with_callbacks(X, clients=ids, on_round=[interrupt_in(4)])
    expected = FederatedGaussianMixture(3, max_iter=4, **options).fit(X, clients=ids)
    assert model.n_iter_ == 4
    assert not model.converged_
    assert model.lower_bounds_ == expected.lower_bounds_
    for name in ("means_", "covariances_", "weights_", "client_weights_", "clients_"):
        assert np.array_equal(getattr(model, name), getattr(expected, name))
    assert np.array_equal(model.predict(X, clients=ids), expected.predict(X, clients=ids))


def test_the_best_of_the_starts_so_far_is_kept(federation):
    X, ids = federation
    options = {"init_params": "random", "tol": 0.0, "random_state": 0}
    whole = FederatedGaussianMixture(3, max_iter=30, **options).fit(X, clients=ids)
    model = FederatedGaussianMixture(3, max_iter=30, n_init=5, **options)
    with pytest.warns(RuntimeWarning, match="interrupted"):
        model.fit_with_callbacks(X, clients=ids, on_round=[interrupt_in(1, start=2)])
    # One round of the second start is worse than thirty of the first.
    assert model.lower_bound_ == pytest.approx(whole.lower_bound_, rel=1e-12)
    assert model.n_iter_ == 30


def test_during_the_first_round_the_start_is_kept(federation, monkeypatch):
    X, ids = federation

    def press(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedgmm.methods.gmm.FederatedGMM.client_step", press)
    model = FederatedGaussianMixture(3, random_state=0)
    with pytest.warns(RuntimeWarning, match="interrupted"):
        model.fit(X, clients=ids)
    assert model.n_iter_ == 0
    assert model.lower_bounds_ == []
    assert model.lower_bound_ == -np.inf
    assert_finite(model)
    assert model.predict(X, clients=ids).shape == (300,)


def test_before_the_first_start_is_ready_there_is_nothing_to_keep(federation, monkeypatch):
    X, ids = federation
    fitted = FederatedGaussianMixture(3, random_state=0).fit(X, clients=ids)
    before = fitted.means_.copy()

    def press(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedgmm.methods.gmm.FederatedGMM.start", press)
    with pytest.raises(KeyboardInterrupt):
        FederatedGaussianMixture(3).fit(X, clients=ids)
    with pytest.raises(KeyboardInterrupt):
        fitted.fit(X[:, :2], clients=ids)
    assert np.array_equal(fitted.means_, before)  # an earlier fit survives
    assert fitted.predict(X, clients=ids).shape == (300,)


def test_during_a_later_start_the_best_run_is_kept(federation, monkeypatch):
    X, ids = federation
    from fedgmm.methods.gmm import FederatedGMM

    real, calls = FederatedGMM.start, []

    def second_is_interrupted(self, *args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, *args, **options)

    monkeypatch.setattr(FederatedGMM, "start", second_is_interrupted)
    model = FederatedGaussianMixture(3, n_init=4, random_state=0, max_iter=5, tol=0.0)
    with pytest.warns(RuntimeWarning, match="interrupted"):
        model.fit(X, clients=ids)
    assert len(calls) == 2
    assert model.n_iter_ == 5


@pytest.fixture
def heeded():
    """Ctrl-C is heeded, also by the children, where a shell has the tests ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded", "small_blocks")
@pytest.mark.parametrize("number", [1, 2])
def test_a_real_signal(federation, threads, number):
    threads(number)
    X, ids = federation
    main, started = threading.main_thread().ident, threading.Event()

    def press():
        started.wait(20)
        time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGINT)

    def running(round_number, info):
        started.set()
        assert round_number < 90_000, "the signal never came"

    finger = threading.Thread(target=press)
    finger.start()
    model = FederatedGaussianMixture(3, tol=0.0, max_iter=100_000, random_state=0)
    with pytest.warns(RuntimeWarning, match="interrupted"):
        model.fit_with_callbacks(X, clients=ids, on_round=[running])
    finger.join()
    assert 1 <= model.n_iter_ < 100_000
    assert len(model.lower_bounds_) == model.n_iter_
    assert_finite(model)
    assert model.predict(X, clients=ids).shape == (300,)
    assert torch.get_num_threads() == number


@pytest.mark.slow
@pytest.mark.usefixtures("heeded")
def test_ctrl_c_in_a_script():
    script = textwrap.dedent(
        """
        import warnings
        import numpy as np
        from fedgmm import FederatedGaussianMixture

        X = np.random.default_rng(0).normal(size=(40_000, 8))
        model = FederatedGaussianMixture(4, tol=0.0, max_iter=10**6, random_state=0)
        running = lambda number, info: print("round", number, flush=True) if number < 3 else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit_with_callbacks(X, clients=np.arange(40_000) % 50, on_round=[running])
        assert any(issubclass(w.category, RuntimeWarning) for w in caught), caught
        assert model.n_iter_ >= 1 and np.isfinite(model.means_).all()
        print("predicted", len(model.predict(X[:10], clients=3)), flush=True)
        """
    )
    # should it abort, it shows the stacks of all threads
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    try:
        assert "round 1" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "predicted 10" in out
