from __future__ import annotations

import numpy as np
import pytest

from fedgmm import FederatedGaussianMixture, FedGMMClassifier, Privacy

LOOSE = Privacy(epsilon=200.0, delta=1e-5, bounds=(-8, 8), rounds=3)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    z = rng.integers(0, 2, 1500)
    x = rng.normal(0, 1, (1500, 2)) + np.where(z, 3.0, -3.0)[:, None]
    return x, (x[:, 0] > 0).astype(int), rng.integers(0, 3, 1500)


@pytest.mark.parametrize("kind", ["full", "tied", "diag"])
def test_a_private_mixture_finds_the_components(rows, kind):
    x, _, clients = rows
    model = FederatedGaussianMixture(2, covariance_type=kind, privacy=LOOSE, random_state=0)
    model.fit(x, clients=clients)
    plain = FederatedGaussianMixture(2, covariance_type=kind, random_state=0).fit(
        x, clients=clients
    )
    np.testing.assert_allclose(np.sort(model.means_[:, 0]), np.sort(plain.means_[:, 0]), atol=0.3)
    assert model.score(x, clients=clients) == pytest.approx(
        plain.score(x, clients=clients), abs=0.1
    )
    assert model.privacy_["spent"] == pytest.approx(200.0, rel=1e-6)
    assert model.n_iter_ == 3
    assert model.lower_bounds_[-1] == pytest.approx(plain.lower_bound_, abs=0.3)


def test_a_private_classifier(rows):
    x, y, clients = rows
    model = FedGMMClassifier(2, 2, privacy=LOOSE, random_state=0, device="cpu")
    model.fit(x, y, clients=clients)
    assert model.score(x, y, clients=clients) > 0.95
    assert model.model_.privacy["spent"] == pytest.approx(200.0, rel=1e-6)
    assert model.history_[-1]["epsilon"] == pytest.approx(200.0, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"covariance_type": "spherical"}, "spherical"),
        ({"warm_start": True}, "warm_start"),
        ({"means_init": np.zeros((2, 2))}, "start"),
    ],
)
def test_what_a_private_mixture_cannot_do_is_refused(rows, options, word):
    x, _, clients = rows
    with pytest.raises(ValueError, match=word):
        FederatedGaussianMixture(2, privacy=LOOSE, **options).fit(x, clients=clients)
