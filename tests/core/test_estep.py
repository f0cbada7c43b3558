from __future__ import annotations

import mpmath
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedgmm.core.em import add_likelihoods, responsibilities
from oracles import assert_close

mpmath.mp.dps = 60


def exact(log_joint):
    """Responsibilities and log-evidence with sixty digits, ``(N, M)`` and ``(N,)``."""
    q, evidence = np.empty(log_joint.shape), np.empty(len(log_joint))
    for i, row in enumerate(log_joint):
        terms = [
            mpmath.exp(mpmath.mpf(value)) if np.isfinite(value) else mpmath.mpf(0) for value in row
        ]
        total = mpmath.fsum(terms)
        q[i] = [float(term / total) for term in terms]
        evidence[i] = float(mpmath.log(total))
    return q, evidence


values = st.one_of(st.floats(-50, 50), st.floats(-1e5, 1e3), st.just(-np.inf))


@given(arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 5)), elements=values))
def test_responsibilities_are_bayes_rule(log_joint):
    log_joint[:, 0] = np.where(np.isneginf(log_joint[:, 0]), -3.0, log_joint[:, 0])
    q, evidence = responsibilities(torch.from_numpy(log_joint.copy()))
    expected_q, expected_evidence = exact(log_joint)
    np.testing.assert_allclose(q, expected_q, rtol=1e-10, atol=1e-300)
    np.testing.assert_allclose(evidence, expected_evidence, rtol=1e-14, atol=1e-14)


def test_moderate_values_equal_a_plain_softmax(rng):
    log_joint = rng.normal(size=(2, 3, 20, 4))
    q, evidence = responsibilities(torch.from_numpy(log_joint.copy()))
    plain = np.exp(log_joint)
    assert_close(q, plain / plain.sum(-1, keepdims=True), 1e-14)
    assert_close(evidence, np.log(plain.sum(-1)), 1e-14)


def test_underflow_everywhere_is_no_division_by_zero():
    q, evidence = responsibilities(torch.tensor([[-1e5, -1e5 - 1.0, -2e5]], dtype=torch.float64))
    sigmoid = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(q.numpy()[0], [sigmoid, 1 - sigmoid, 0.0], rtol=1e-12)
    np.testing.assert_allclose(evidence.item(), -1e5 + np.log1p(np.exp(-1.0)), rtol=1e-14)


def test_a_component_that_is_switched_off_gets_exactly_nothing():
    q, _ = responsibilities(torch.tensor([[-torch.inf, -1.0, -2.0]], dtype=torch.float64))
    assert q[0, 0].item() == 0.0
    assert abs(q.sum().item() - 1) < 1e-15


def test_the_input_is_not_changed(rng):
    log_joint = torch.from_numpy(rng.normal(size=(5, 3)))
    before = log_joint.clone()
    responsibilities(log_joint)
    assert torch.equal(log_joint, before)


def test_likelihoods_are_added_in_place_whatever_the_order_in_memory(rng):
    pi, x, y = rng.normal(size=(7, 2, 3)), rng.normal(size=(7, 2)), rng.normal(size=(7, 3))
    log_x, log_y = torch.from_numpy(x), torch.from_numpy(y)
    for joint in (
        torch.from_numpy(pi.copy()),
        torch.from_numpy(pi.copy().transpose(1, 2, 0)).permute(2, 0, 1),
    ):
        start = joint.clone()
        assert add_likelihoods(joint, None) is joint
        assert torch.equal(joint, start)
        add_likelihoods(joint, log_x)
        assert_close(joint, pi + x[:, :, None])
        add_likelihoods(joint, None, log_y)
        assert_close(joint, pi + x[:, :, None] + y[:, None, :])
        assert torch.equal(add_likelihoods(start, log_x, log_y), joint)
