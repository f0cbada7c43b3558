"""Forecasts of noise, against accuracies that were measured."""

from __future__ import annotations

import numpy as np
import pytest

from fedgmm import train
from fedgmm.data.synthetic import synthetic
from fedgmm.privacy.forecast import forecast
from fedgmm.privacy.private_method import PrivateMixture
from fedgmm.privacy.settings import Privacy, PrivacyError
from fedgmm.training.build import build, learner_network
from fedgmm.training.options import TrainingOptions
from fedgmm.training.private import NoiseWarning


def forecast_of(clients, rows, kind, columns=32, size=3, epsilon=1.0, unit="row", **options):
    chosen = TrainingOptions(
        **{"algorithm": "fedgmm", "components": size, "learners": size, "covariance_type": kind}
        | options
    )
    base = build(chosen, learner_network(chosen, (columns,), np.arange(2)))
    privacy = Privacy(epsilon, 1e-5, unit=unit, bounds=(-6.0, 6.0))
    return forecast(PrivateMixture(base, privacy), columns, clients, clients * rows)


# Test accuracy of private FedGMM on synthetic data with 1,800 training rows per client, mean of two
# seeds, at epsilon 1, 2, 4 and 8. Six components reach 97.5 without noise.
MEASURED = {
    (4, "diag", 32, 3): (71.8, 77.0, 89.0, 96.0),
    (10, "diag", 32, 3): (67.4, 97.8, 98.4, 98.8),
    (10, "full", 32, 3): (76.3, 79.4, 75.5, 94.0),
    (30, "full", 32, 3): (79.0, 86.2, 99.0, 99.1),
    (10, "diag", 64, 3): (73.0, 60.9, 98.2, 98.8),
    (10, "diag", 32, 6): (63.0, 74.3, 88.6, 93.0),
}


@pytest.mark.parametrize("setting", MEASURED, ids=str)
def test_forecasts_agree_with_measured_accuracies(setting):
    clients, kind, columns, size = setting
    for epsilon, accuracy in zip((1.0, 2.0, 4.0, 8.0), MEASURED[setting], strict=True):
        found = forecast_of(clients, 1800, kind, columns, size, epsilon)
        if found.is_hopeless:
            assert accuracy < 89
        elif found.is_fine:
            assert accuracy > 95
        else:
            assert 80 < accuracy < 98


# Units are clients: (clients, training rows per client, kind, epsilon): accuracy of one seed.
MEASURED_CLIENTS = {
    (300, 360, "full", 4.0): 67.7,
    (300, 360, "full", 8.0): 78.9,
    (1500, 90, "full", 1.0): 71.4,
    (1500, 90, "full", 8.0): 98.7,
    (300, 360, "diag", 2.0): 53.6,
    (300, 1800, "full", 4.0): 66.7,
}


@pytest.mark.parametrize("setting", MEASURED_CLIENTS, ids=str)
def test_forecasts_for_clients_agree_with_measured_accuracies(setting):
    clients, rows, kind, epsilon = setting
    found = forecast_of(clients, rows, kind, epsilon=epsilon, unit="client")
    assert found.is_hopeless == (MEASURED_CLIENTS[setting] < 80)
    assert found.is_fine == (MEASURED_CLIENTS[setting] > 95)


def test_a_hopeless_budget_is_named_with_remedies():
    found = forecast_of(4, 1800, "diag")
    text = str(found)
    assert text.startswith("4 clients with 7,200 training rows at epsilon=1 per row")
    assert "little use" in text
    assert "epsilon=4.9 or 17 clients" in text
    assert forecast_of(17, 1800, "diag").is_fine
    assert forecast_of(4, 1800, "diag", epsilon=5.0).is_fine
    assert "little accuracy is lost" in str(forecast_of(300, 1800, "full"))


def test_more_rows_and_larger_budgets_have_less_noise():
    few, many = forecast_of(4, 1800, "full"), forecast_of(8, 1800, "full")
    assert many.noise == pytest.approx(few.noise / 2)
    assert forecast_of(4, 1800, "full", epsilon=8.0).noise < few.noise
    assert forecast_of(4, 1800, "full", unit="client").noise > few.noise


def test_methods_without_gaussians_and_without_budget():
    assert forecast_of(30, 1800, "diag", algorithm="fedem").is_fine
    base = forecast_of(4, 1800, "diag")
    assert base.needed_epsilon > base.epsilon
    chosen = TrainingOptions(algorithm="fedgmm")
    method = build(chosen, learner_network(chosen, (4,), np.arange(2)))
    with pytest.raises(PrivacyError, match="epsilon"):
        forecast(PrivateMixture(method, Privacy()), 4, 3, 30)


def test_a_run_warns_before_training():
    dataset = synthetic(4, 60, dimensions=4, components=2, seed=0).dataset
    privacy = Privacy(0.5, 1e-5, bounds=(-6.0, 6.0), rounds=1)
    with pytest.warns(NoiseWarning, match="little use"):
        train(dataset, "fedgmm", components=2, learners=2, privacy=privacy)
