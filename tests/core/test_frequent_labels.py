"""Label frequencies against counting by hand, Bayes' rule, and limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgmm.core import labels as module
from fedgmm.core.labels import (
    CANDIDATES,
    PRIORS,
    LabelFrequencies,
    add_label_counts,
    guess_label_counts,
    label_frequencies,
    prior_scores,
)
from fedgmm.core.predictive import log_class_probabilities


def drawn(seed, rows=40, clients=3, pairs=4, classes=5):
    generator = torch.Generator().manual_seed(seed)
    q = torch.rand(rows, pairs, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (rows,), generator=generator)
    codes = torch.randint(clients, (rows,), generator=generator)
    counts = torch.zeros(clients, pairs, classes, dtype=torch.float64)
    return q / q.sum(1, keepdim=True), labels, codes, counts


def test_counts_by_a_plain_loop():
    q, labels, codes, counts = drawn(0)
    add_label_counts(counts, q[:25], labels[:25], codes[:25])
    add_label_counts(counts, q[25:], labels[25:], codes[25:])  # rows may come in parts
    expected = torch.zeros_like(counts)
    for row, label, code in zip(q, labels, codes, strict=True):
        expected[code, :, label] += row
    torch.testing.assert_close(counts, expected)


@given(st.integers(0, 1000))
def test_frequencies_are_frequencies(seed):
    q, labels, codes, counts = drawn(seed)
    add_label_counts(counts, q, labels, codes)
    found = label_frequencies(counts, counts, 10.0)
    for value in (found.clients, found.federation):
        assert (value > 0).all()
        torch.testing.assert_close(value.sum(-1), torch.ones_like(value[..., 0]))
    assert not found.log_ratios(torch.tensor([0, -1]))[1].any()  # rows without a client


def test_frequencies_by_hand():
    counts = torch.tensor([[[30.0, 10.0]], [[0.0, 0.0]]], dtype=torch.float64)
    found = label_frequencies(counts, torch.tensor([[[3.0, 1.0]]], dtype=torch.float64), 10.0)
    np.testing.assert_allclose(found.federation, [[0.75, 0.25]], atol=1e-4)
    np.testing.assert_allclose(found.clients[0], [[0.75, 0.25]], atol=1e-4)
    np.testing.assert_allclose(found.log_ratios(torch.tensor([1])), 0.0, atol=1e-12)  # without rows
    more = found.with_client(None, torch.tensor([[0.0, 30.0]], dtype=torch.float64))
    own = (found.prior_rows * 0.75) / (30 + found.prior_rows)
    np.testing.assert_allclose(more.clients[2], [[own, 1 - own]], atol=1e-4)
    again = more.with_client(2, None)
    np.testing.assert_allclose(again.log_ratios(torch.tensor([2])), 0.0, atol=1e-12)
    torch.testing.assert_close(more.clients[:2], found.clients)


@pytest.mark.parametrize("density", [True, False])
def test_corrected_classes_by_brute_force(density):
    rows, m1, m2, classes = 7, 2 if density else 1, 3, 4
    generator = torch.Generator().manual_seed(1)
    log_pi, log_x, log_y, log_ratios = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((rows, m1, m2), (rows, m1), (rows, m2, classes), (rows, m1, m2, classes))
    )
    log_pi, log_y = log_pi.flatten(1).log_softmax(-1).view_as(log_pi), log_y.log_softmax(-1)
    seen = log_x if density else None
    found = log_class_probabilities(log_pi, seen, log_y, log_ratios)
    expected = torch.zeros(rows, classes, dtype=torch.float64)
    for i in range(rows):
        for a in range(m1):
            for b in range(m2):
                weight = log_pi[i, a, b] + (log_x[i, a] if density else 0.0)
                expected[i] += (weight + log_y[i, b] + log_ratios[i, a, b]).exp()
    expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(found.exp(), expected)
    plain = log_class_probabilities(log_pi, seen, log_y)
    nothing = torch.zeros_like(log_ratios)
    torch.testing.assert_close(log_class_probabilities(log_pi, seen, log_y, nothing), plain)


def test_the_correction_is_bayes_rule():
    """One learner that is right for the federation becomes right for a client with other classes."""
    frequency, own = torch.tensor([0.5, 0.5]).double(), torch.tensor([0.9, 0.1]).double()
    likelihood = torch.tensor([[0.2, 0.7], [0.6, 0.1]]).double()  # P(x|y) of two values of x
    shared = (likelihood * frequency) / (likelihood * frequency).sum(-1, keepdim=True)
    right = (likelihood * own) / (likelihood * own).sum(-1, keepdim=True)
    ratios = (own.log() - frequency.log()).expand(2, 1, 1, 2)
    zero = torch.zeros(2, 1, 1, dtype=torch.float64)
    found = log_class_probabilities(zero, None, shared.log()[:, None], ratios)
    torch.testing.assert_close(found.exp(), right)


# ---------------------------------------------------------------------- how much they count


def test_scores_of_priors_by_brute_force():
    generator = torch.Generator().manual_seed(2)
    n, m1, m2, classes = 6, 2, 2, 3
    joint = torch.randn(n, m1, m2, generator=generator, dtype=torch.float64)
    log_y = torch.randn(n, m2, classes, generator=generator, dtype=torch.float64).log_softmax(-1)
    counts, answers = (
        9 * torch.rand(n, m1 * m2, classes, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    shared = torch.rand(m1 * m2, classes, generator=generator, dtype=torch.float64)
    shared /= shared.sum(-1, keepdim=True)
    truth = torch.randint(classes, (n,), generator=generator)
    known = LabelFrequencies(shared[None], shared, 1.0)
    found = prior_scores(known, counts, answers, joint, log_y, truth)
    assert found.shape == (2 * len(PRIORS), n)
    for (relative, prior), score in zip(CANDIDATES, found.sum(1), strict=True):
        expected = 0.0
        for i in range(n):
            own = (counts[i] + prior * shared) / (counts[i].sum(-1, keepdim=True) + prior)
            if relative:
                own = shared * (counts[i] + prior * shared) / (answers[i] + prior * shared)
                own = own / own.sum(-1, keepdim=True)
            said = torch.zeros(classes, dtype=torch.float64)
            for a in range(m1):
                for b in range(m2):
                    ratio = own[a * m2 + b] / shared[a * m2 + b]
                    said += joint[i, a, b].exp() * log_y[i, b].exp() * ratio
            expected += float((said[truth[i]] / said.sum()).log())
        np.testing.assert_allclose(score, expected)


def test_relative_frequencies_find_the_constant_of_a_client():
    """A client whose labels have other odds for the same inputs, wherever its inputs lie."""
    generator = torch.Generator().manual_seed(0)
    logits = 0.3 * torch.randn(200_000, generator=generator, dtype=torch.float64) + 1.0
    own = torch.sigmoid(logits + 0.7)
    labels = torch.stack([1 - own, own], -1).sum(0)[None, None]
    said = torch.sigmoid(logits)
    said = torch.stack([1 - said, said], -1).sum(0)[None, None]
    rest = torch.full_like(
        said, said.sum() / 2
    )  # another client makes the federation's labels even
    sums = torch.cat([labels, rest]), torch.cat([said, rest])
    found = label_frequencies(*sums, 10.0, relative=True).log_ratios(torch.tensor([0]))[0, 0]
    np.testing.assert_allclose(found[1] - found[0], 0.7, atol=0.02)
    found = label_frequencies(*sums, 10.0).log_ratios(torch.tensor([0]))[0, 0]
    assert found[1] - found[0] > 1.2


def test_the_strongest_prior_changes_nothing():
    counts = torch.tensor([[[30.0, 0.0]]], dtype=torch.float64)
    even = torch.ones(1, 1, 2, dtype=torch.float64)
    ratios = label_frequencies(counts, even, PRIORS[0]).log_ratios(torch.tensor([0]))
    assert ratios.abs().max() < 1e-3
    assert list(PRIORS) == sorted(PRIORS, reverse=True)


# ---------------------------------------------------------------------- new clients without labels


def spoken(rng, frequencies, rows=600):
    """Rows of one Gaussian and one learner that is right for labels of equal frequency."""
    labels = rng.choice(3, size=rows, p=frequencies)
    x = rng.normal(size=rows) + 2.5 * labels
    likelihood = np.exp(-0.5 * (x[:, None] - 2.5 * np.arange(3)) ** 2)
    log_y = torch.from_numpy(np.log(likelihood / likelihood.sum(1, keepdims=True)))[:, None]
    return labels, log_y


def federation(prior, m1=1, m2=1, guess_rows=1e9):
    pairs = torch.full((m1 * m2, 3), 1 / 3, dtype=torch.float64)
    return LabelFrequencies(pairs[None], pairs, prior, guess_rows)


def test_learners_guess_the_labels_of_a_new_client(rng):
    labels, log_y = spoken(rng, [0.7, 0.0, 0.3])
    joint = torch.zeros(len(labels), 1, 1, dtype=torch.float64)
    rows = guess_label_counts(federation(3.0), joint, log_y, 30)
    np.testing.assert_allclose(rows.sum(), len(labels))
    np.testing.assert_allclose(rows[0] / len(labels), [0.7, 0.0, 0.3], atol=0.06)
    few = guess_label_counts(federation(3.0), joint, log_y, 3)
    np.testing.assert_allclose(few[0], rows[0], atol=0.1 * len(labels))
    assert not guess_label_counts(federation(3.0), joint, log_y, 0).any()
    half = guess_label_counts(federation(3.0, guess_rows=len(labels) / 2), joint, log_y, 30)
    np.testing.assert_allclose(half.sum(), len(labels) / 2)
    # a prior that knows better than the rows, and learners that know nothing
    kept = guess_label_counts(federation(1e5), joint, log_y, 30)
    np.testing.assert_allclose(kept[0], log_y.exp().sum(0)[0], rtol=0.02)
    nothing = torch.full_like(log_y, np.log(1 / 3))
    kept = guess_label_counts(federation(0.1), joint, nothing, 30)
    np.testing.assert_allclose(kept[0], len(labels) / 3)


def guessing(rng, rows, m1=2, m2=3, classes=4, prior=5.0):
    log_joint = torch.from_numpy(rng.normal(size=(rows, m1, m2)))
    log_y = torch.from_numpy(2 * rng.normal(size=(rows, m2, classes))).log_softmax(-1)
    shared = torch.from_numpy(rng.dirichlet(np.ones(classes), size=m1 * m2))
    return LabelFrequencies(shared[None], shared, prior, 1e9), log_joint, log_y


def test_guesses_by_a_plain_loop(rng, monkeypatch):
    known, log_joint, log_y = guessing(rng, 11)
    shared, (n, m1, m2) = known.federation, log_joint.shape
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 4)  # in parts
    found = guess_label_counts(known, log_joint, log_y, 2)
    own = shared.clone()
    for _ in range(2):
        expected = torch.zeros_like(shared)
        for i in range(n):
            r = torch.zeros(m1, m2, 4, dtype=torch.float64)
            for a in range(m1):
                for b in range(m2):
                    ratio = own[a * m2 + b] / shared[a * m2 + b]
                    r[a, b] = log_joint[i, a, b].exp() * ratio * log_y[i, b].exp()
            expected += (r / r.sum()).view_as(expected)
        own = (expected + 5 * shared) / (expected.sum(-1, keepdim=True) + 5)
    torch.testing.assert_close(found, expected)


def test_guesses_become_likelier(rng):
    """EM: the likelihood of the rows and the prior together never falls."""
    known, log_joint, log_y = guessing(rng, 60)
    values = []
    for count in range(30):
        own = known.from_counts(guess_label_counts(known, log_joint, log_y, count))
        ratios = (own.log() - known.federation.log()).view(2, 3, -1)
        rows = (log_joint[..., None] + log_y[:, None] + ratios).flatten(1).logsumexp(-1).sum()
        values.append(float(rows + known.prior_rows * (known.federation * own.log()).sum()))
    assert (np.diff(values) > -1e-9).all()
    assert values[-1] > values[0]
