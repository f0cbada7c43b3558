"""The paper's generators: their draws, their labels, and the best possible accuracy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import norm

from fedgmm.data.dataset import SPLITS
from fedgmm.data.synthetic import DISTRIBUTIONS, Components, synthetic


def everything(truth):
    """All rows of a federation: inputs, labels, codes."""
    rows = [truth.dataset.split(name) for name in SPLITS]
    return (
        np.concatenate([r.inputs.numpy() for r in rows]).astype(float),
        np.concatenate([r.labels.numpy() for r in rows]),
        np.concatenate([r.codes.numpy() for r in rows]),
    )


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_components_draw_what_they_say(distribution):
    truth = synthetic(2, 5, dimensions=3, distribution=distribution, seed=1)
    (components,) = truth.components
    x = components.draw(np.repeat(np.arange(3), 40_000), np.random.default_rng(0))
    x = x.reshape(3, 40_000, 3)
    np.testing.assert_allclose(x.mean(1), components.means, atol=0.03)
    a, b = components.first, components.second
    variances = {
        "gaussian": np.ones((3, 3)),
        "laplace": np.full((3, 3), 2.0),
        "beta": a * b / ((a + b) ** 2 * (a + b + 1)),
    }[distribution]
    np.testing.assert_allclose(x.var(1), variances, rtol=0.06)


def test_densities_are_those_of_the_draws(rng):
    components = synthetic(2, 5, dimensions=3, seed=1).components[0]
    x = rng.normal(size=(7, 3))
    expected = [[norm(mean, 1).logpdf(row).sum() for mean in components.means] for row in x]
    np.testing.assert_allclose(components.log_densities(x), expected)


def test_labels_are_the_step_of_the_text(rng):
    mu, v = rng.normal(size=(2, 3)), rng.normal(size=(2, 3))
    components = Components("gaussian", mu, np.ones((2, 3)), v)
    x = rng.normal(size=(30, 3))
    for m in range(2):
        expected = [int((row - mu[m]) @ v[m] > 0) for row in x]
        assert components.labels(x)[:, m].tolist() == expected


def test_a_row_has_the_label_of_the_component_that_drew_it():
    """Components far apart: the nearest mean is the one that drew the row."""
    truth = synthetic(6, 200, dimensions=8, separation=30.0, seed=2)
    x, y, _ = everything(truth)
    (components,) = truth.components
    z = np.linalg.norm(x[:, None] - components.means, axis=-1).argmin(1)
    assert (components.labels(x)[np.arange(len(x)), z] == y).all()
    assert truth.bayes_accuracy() == 1.0


def test_clients_mix_components_with_their_own_weights():
    truth = synthetic(6, 3000, dimensions=8, separation=30.0, seed=2)
    x, _, codes = everything(truth)
    z = np.linalg.norm(x[:, None] - truth.components[0].means, axis=-1).argmin(1)
    for client in range(6):
        shares = np.bincount(z[codes == client], minlength=3) / (codes == client).sum()
        np.testing.assert_allclose(shares, truth.client_weights[client], atol=0.03)


def test_weights_are_dirichlet():
    weights = synthetic(3000, 1, dimensions=1, alpha=0.4, seed=0).client_weights
    np.testing.assert_allclose(weights.sum(1), 1.0)
    np.testing.assert_allclose(weights.mean(0), 1 / 3, atol=0.03)
    np.testing.assert_allclose(weights.var(0), (1 / 3) * (2 / 3) / (3 * 0.4 + 1), rtol=0.1)


def test_means_and_directions_are_uniform():
    (components,) = synthetic(1, 1, dimensions=3000, separation=2.5, seed=0).components
    for values, bound in ((components.means, 2.5), (components.directions, 1.0)):
        assert np.abs(values).max() <= bound
        np.testing.assert_allclose(values.std(), bound / np.sqrt(3), rtol=0.05)
        np.testing.assert_allclose(values.mean(), 0.0, atol=0.05 * bound)


def test_sizes_are_around_what_was_asked():
    truth = synthetic(40, 300, dimensions=2, seed=0)
    sizes = np.bincount(everything(truth)[2], minlength=40)
    assert sizes.min() >= 1
    np.testing.assert_allclose(sizes.mean(), 300, rtol=0.05)
    assert sizes.std() > 5


def test_the_same_seed_draws_the_same_and_another_does_not():
    first, again, other = (synthetic(3, 30, dimensions=2, seed=s) for s in (4, 4, 5))
    assert torch.equal(first.dataset.train.inputs, again.dataset.train.inputs)
    assert torch.equal(first.dataset.train.labels, again.dataset.train.labels)
    assert first.dataset.train.inputs.shape != other.dataset.train.inputs.shape or not torch.equal(
        first.dataset.train.inputs, other.dataset.train.inputs
    )


# ---------------------------------------------------------------------- the ceiling


def test_bayes_probabilities_are_bayes_rule():
    truth = synthetic(4, 60, dimensions=2, seed=5)
    rows = truth.dataset.test
    x, codes = rows.inputs.numpy().astype(float), rows.codes.numpy()
    (components,) = truth.components
    actual = truth.bayes_probabilities(rows)
    for i in range(len(x)):
        joint = np.log(truth.client_weights[codes[i]]) + components.log_densities(x[i : i + 1])[0]
        q = np.exp(joint - logsumexp(joint))
        np.testing.assert_allclose(actual[i, 1], q @ components.labels(x[i : i + 1])[0], atol=1e-12)
    np.testing.assert_allclose(actual.sum(1), 1.0)


def test_the_bayes_accuracy_is_what_bayes_rule_expects_to_get_right():
    """The mean of ``max_y P(y|x)`` estimates the same number, without looking at labels."""
    truth = synthetic(30, 400, dimensions=2, seed=6)
    rows = truth.dataset.train
    codes = rows.codes.numpy()
    sure = truth.bayes_probabilities(rows).max(-1)
    expected = np.mean([sure[codes == c].mean() for c in range(30)])
    assert truth.bayes_accuracy("train") == pytest.approx(expected, abs=0.01)
    assert 0.5 < expected < 0.97


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_no_rule_beats_bayes(distribution):
    truth = synthetic(10, 400, dimensions=4, distribution=distribution, seed=7)
    x, y, codes = everything(truth)
    (components,) = truth.components
    best = truth.bayes_accuracy("train")
    nearest = np.linalg.norm(x[:, None] - components.means, axis=-1).argmin(1)
    by_nearest = components.labels(x)[np.arange(len(x)), nearest]
    by_largest = components.labels(x)[np.arange(len(x)), truth.client_weights[codes].argmax(1)]
    for guess in (by_nearest, by_largest):
        right = np.mean([(guess == y)[codes == c].mean() for c in range(10)])
        assert right <= best + 0.01


def test_components_that_are_far_apart_are_easier():
    accuracies = [
        synthetic(20, 200, dimensions=4, separation=s, seed=8).bayes_accuracy() for s in (0.1, 1, 5)
    ]
    assert accuracies[0] < accuracies[1] < accuracies[2]


def test_beta_rows_have_finite_densities():
    """A Beta with β < 1 rounds to exactly one in float32, where it has no density."""
    truth = synthetic(30, 400, dimensions=32, distribution="beta", seed=0)
    x, _, _ = everything(truth)
    assert x.min() > 0
    assert x.max() < 1
    assert np.isfinite(truth.components[0].log_densities(x)).all()
    assert np.isfinite(truth.bayes_probabilities(truth.dataset.test)).all()


# ---------------------------------------------------------------------- some clients wholly different


@pytest.mark.parametrize("other", ["laplace", "beta"])
def test_the_last_clients_come_from_another_family(other):
    truth = synthetic(9, 200, dimensions=6, other=other, other_clients=3, seed=9)
    assert truth.family.tolist() == [0] * 6 + [1] * 3
    assert [family.distribution for family in truth.components] == ["gaussian", other]
    x, y, codes = everything(truth)
    strange = codes >= 6
    if other == "beta":
        assert x[strange].min() >= 0
        assert x[strange].max() <= 1
        assert x[~strange].min() < 0
    own = [family.labels(x) for family in truth.components]
    # each row has the label that some component of its own family gives it
    given = np.where(strange[:, None], own[1], own[0])
    assert (given == y[:, None]).any(1).all()
    probability = truth.bayes_probabilities(truth.dataset.test)
    np.testing.assert_allclose(probability.sum(1), 1.0)
    assert truth.bayes_accuracy() > 0.8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distribution": "cauchy"}, "distribution.*'cauchy'"),
        ({"other": "cauchy", "other_clients": 1}, "other.*'cauchy'"),
        ({"other": "beta", "other_clients": 9}, "other_clients"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        synthetic(3, 10, **options)
