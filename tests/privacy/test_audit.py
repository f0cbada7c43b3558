"""An audit with canaries: releases are as private as they claim, and about as private as they claim.

The same release runs many times with and without a canary, a row that changes the sum as much as any row
can. The best attack on Gaussian releases projects the output on the canary's own contribution. With many
runs its errors bound ``μ`` from below, ``μ̂ = Φ⁻¹(TP) - Φ⁻¹(FP)`` (Nasr et al., 2023), and so ``ε``. Noise
that is too small, rows that are not clipped, and noise that is used twice are seeded as bugs, and a test
finds each of them.
"""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from scipy import stats

from fedgmm import FederatedDataset, Privacy
from fedgmm.privacy import noisy_sums, private_em
from fedgmm.privacy.accounting import epsilon_of
from fedgmm.privacy.noise import noisy
from fedgmm.privacy.private_method import PrivateMixture
from fedgmm.training import private
from fedgmm.training.build import build, learner_network
from fedgmm.training.options import TrainingOptions
from fedgmm.training.private import Account, PrivateClients, unit_weights

DELTA = 1e-5
RUNS = 5000


def release_of(rows, budget):
    """Return a function that makes the first two releases of a run, each as one vector in bounds' units."""
    x, y = rows
    data = FederatedDataset.from_arrays(x, y, np.zeros(len(y)), split=(1, 0, 0))
    options = TrainingOptions(components=1, learners=1, dtype="float64")
    net = learner_network(options, (x.shape[1],), np.arange(2))
    method = PrivateMixture(build(options, net), budget)
    layout = method.layout("columns", x.shape[1])

    def release():
        weights = unit_weights(budget, data.train.codes, None)
        clients = PrivateClients(data.train, budget, Account(budget), weights)
        shared = method.blank(x.shape[1])
        sums, again = (clients.release(method, shared, 0) for _ in range(2))
        mu = math.hypot(*clients.account.mus)
        values = [layout.vector(one) for one in (sums, again)]
        return np.concatenate([v * m for v, m in zip(values, clients.account.mus, strict=True)]), mu

    return release


def audited_epsilon(runs=RUNS):
    """Return ``ε̂`` of two releases, the ``ε`` that their account claims, and the deviation of the noise."""
    budget = Privacy(epsilon=8.0, delta=DELTA, bounds=(-1, 1), rounds=1)
    generator = np.random.default_rng(0)
    x = generator.uniform(-0.2, 0.2, (6, 4))
    y = np.array([0, 1, 0, 1, 0, 1])
    rows = {
        "in": (np.vstack([x, np.full(4, 9.0)]), np.append(y, 1)),  # far outside the bounds
        "out": (x, y),
    }
    outputs, exact = {}, {}
    for name, own in rows.items():
        release = release_of(own, budget)
        made = [release() for _ in range(runs)]
        outputs[name] = np.array([one for one, _ in made])
        claimed = epsilon_of(made[0][1], DELTA)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(private, "noisy", lambda total, *_: total)
            exact[name] = release()[0]
    # the attacker knows all rows but does not know whether the canary is among them
    direction, middle = exact["in"] - exact["out"], (exact["in"] + exact["out"]) / 2
    guesses = {name: int(((one - middle) @ direction > 0).sum()) for name, one in outputs.items()}
    # Clopper and Pearson: the best rates of true and false positives that 99.9 % confidence excludes
    false = stats.beta.ppf(0.999, guesses["out"] + 1, runs - guesses["out"])
    true = stats.beta.ppf(0.001, guesses["in"], runs - guesses["in"] + 1)
    mu = max(stats.norm.ppf(true) - stats.norm.ppf(false), 0.0)
    return epsilon_of(mu, DELTA), claimed, outputs["out"].std(0).mean()


@pytest.mark.slow
def test_the_audit_finds_at_least_half_of_epsilon_and_never_more():
    found, claimed, spread = audited_epsilon()
    assert found <= claimed
    assert found >= 0.5 * claimed
    assert spread == pytest.approx(1.0, abs=0.02)  # each number has the noise that was paid for


# ---------------------------------------------------------------------- seeded bugs


def halved(total, sigma, source):
    return noisy(total, sigma / 2, source)


def repeated(total, sigma, source):
    generator = np.random.default_rng(repeated.run // 2)  # one noise for both releases of a run
    repeated.run += 1
    return total + sigma * generator.standard_normal(total.size)


def noise_of(release, times):
    """Return the deviation of the noise in units of what was paid, and the correlation of two releases."""
    made = np.array([release()[0] for _ in range(times)])
    made = made - made.mean(0)
    first, second = np.split(made, 2, axis=1)
    correlation = (first * second).mean() / (first.std() * second.std())
    return made.std() / 1.0, abs(correlation)


@pytest.fixture
def rows():
    return np.full((3, 4), 0.5), np.array([0, 1, 0])


BUDGET = Privacy(epsilon=8.0, delta=DELTA, bounds=(-1, 1), rounds=1)


def is_noised_as_paid(rows, times=150):
    deviation, correlation = noise_of(release_of(rows, BUDGET), times)
    return abs(deviation - 1.0) < 0.1 and correlation < 0.15


def is_bounded(rows):
    """Whether a row far outside the bounds moves a total by one at most."""
    x, y = rows
    totals = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private, "noisy", lambda total, *_: totals.append(total) or total)
        release_of((x, y), BUDGET)()
        release_of((np.vstack([x, np.full(4, 1e3)]), np.append(y, 1)), BUDGET)()
    return np.linalg.norm(totals[2] - totals[0]) <= 1.0 + 1e-9


def test_releases_have_the_noise_that_is_paid_for(rows):
    assert is_noised_as_paid(rows)
    assert is_bounded(rows)


def test_halved_noise_is_caught(rows, monkeypatch):
    monkeypatch.setattr(private, "noisy", halved)
    assert not is_noised_as_paid(rows)


def test_repeated_noise_is_caught(rows, monkeypatch):
    repeated.run = 0
    monkeypatch.setattr(private, "noisy", repeated)
    assert not is_noised_as_paid(rows)


def test_missing_clipping_is_caught(rows, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "clamp", lambda x, *_, **__: x)
    assert not is_bounded(rows)


def test_missing_clipping_to_the_ball_is_caught(monkeypatch):
    rows = torch.full((1, 4), 100.0, dtype=torch.float64)
    assert float(noisy_sums.clip_rows(rows, 3.0).norm()) <= 3.0 + 1e-9
    where = private_em.unscaled(4, 0)
    one = private_em.PrivateRows(rows, torch.zeros(1, dtype=torch.int64), torch.ones(1).double())
    bound = private_em.radius(4) ** 2 + 1e-9
    assert float(private_em.covariance_sums(where, one, centred=False)["second"].norm()) <= bound
    monkeypatch.setattr(private_em, "clip_rows", lambda x, _: x)
    assert float(private_em.covariance_sums(where, one, centred=False)["second"].norm()) > bound


@pytest.mark.slow
def test_halved_noise_breaks_the_audit(monkeypatch):
    monkeypatch.setattr(private, "noisy", halved)
    found, claimed, _ = audited_epsilon()
    assert found > claimed


def test_noise_comes_from_the_operating_system():
    source = PrivateClients.__dataclass_fields__["source"].default
    assert source is os.urandom
