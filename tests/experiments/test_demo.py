"""The demo finds what its clients were made of."""

import numpy as np
import pytest
from rich.console import Console

from fedgmm.cli.run_tables import demo_table
from fedgmm.experiments.demo import make_clients, plot_demo, run_demo


@pytest.fixture(scope="module")
def result():
    return run_demo(clients=8, seed=0)


def test_clients_are_reproducible_and_differ_between_seeds():
    first, again, other = make_clients(4, 7), make_clients(4, 7), make_clients(4, 8)
    assert list(first.rows) == ["client 1", "client 2", "client 3", "client 4"]
    for name in first.rows:
        np.testing.assert_array_equal(first.rows[name], again.rows[name])
    assert not np.array_equal(first.weights, other.weights)


def test_fresh_rows_are_not_the_fitted_rows():
    data = make_clients(3, 0)
    for name, rows in data.rows.items():
        assert data.fresh_rows[name].shape == rows.shape
        assert not np.array_equal(data.fresh_rows[name], rows)


def test_rows_follow_the_weights_and_means():
    data = make_clients(50, 0)
    expected = np.array([len(rows) for rows in data.rows.values()]) @ data.weights @ data.means
    total = np.concatenate(list(data.rows.values())).sum(0)
    rows = sum(map(len, data.rows.values()))
    np.testing.assert_allclose(total / rows, expected / rows, atol=0.1)


def test_weights_and_means_are_found(result):
    assert result.converged
    assert result.weight_errors.max() < 0.1
    np.testing.assert_allclose(result.means, result.data.means, atol=0.3)
    np.testing.assert_allclose(result.weights.sum(-1), 1.0)


def test_labels_fit_the_order_of_the_components(result):
    rows = np.concatenate(list(result.data.rows.values()))
    assert result.labels.shape == (len(rows),)
    for component, mean in enumerate(result.data.means):
        np.testing.assert_allclose(rows[result.labels == component].mean(0), mean, atol=0.4)


def test_equals_the_pooled_fit_and_gains_from_private_weights(result):
    assert result.pooled_difference < 1e-10
    assert result.log_likelihood > result.common_log_likelihood + 0.1


def test_every_round_is_reported():
    seen = []
    result = run_demo(clients=2, seed=0, on_round=[lambda number, info: seen.append(number)])
    assert seen == list(range(1, result.rounds + 1))


# ---------------------------------------------------------------------- table and picture


def text_of(table):
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_table_has_a_line_per_client_and_the_mean_error(result):
    text = text_of(demo_table(result))
    for name, error in zip(result.data.rows, result.weight_errors, strict=True):
        (line,) = [line for line in text.splitlines() if f" {name} " in line]
        assert f"{error:.3f}" in line
    assert f"{result.weight_errors.mean():.3f}" in text


def test_the_table_leaves_out_clients_beyond_a_number(result):
    text = text_of(demo_table(result, most=2))
    assert "client 2" in text
    assert "client 3" not in text
    assert "6 more" in text


@pytest.mark.parametrize("clients", [2, 20])
def test_plot_demo_writes_a_png(clients, tmp_path):
    path = plot_demo(run_demo(clients=clients, seed=0), tmp_path / "new" / "picture.png")
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(header[k : k + 4], "big") for k in (16, 20))
    assert width > height > 300
