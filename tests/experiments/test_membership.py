"""Membership inference on released models, on few rows."""

from __future__ import annotations

import numpy as np
import pytest

from fedgmm.experiments import membership
from fedgmm.experiments.membership import (
    AttackedRows,
    MembershipStudy,
    attacked,
    reproduce_membership,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def few():
    """Few rows of many columns, which full covariances remember."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(120, 12)).astype(np.float32)
    return AttackedRows(
        inputs, (inputs[:, 0] > 0).astype(int), np.arange(120) % 3, (-6.0, 6.0), (2, 2)
    )


def test_members_of_an_overfitted_model_are_found(few):
    options = {"components": 2, "learners": 2, "covariance_type": "full", "rounds": 3}
    accuracy, success = attacked(few, 6, 0, **options)
    assert 0.5 < accuracy <= 1.0
    assert success["likelihood ratio"].auc > 0.7
    assert success["likelihood ratio"].auc > success["threshold"].auc - 0.05


def test_the_table_has_a_row_per_setting(few, tmp_path, monkeypatch):
    monkeypatch.setattr(membership, "_data", lambda study: {"few": few})
    study = MembershipStudy(models=6, rounds=2, epsilons=(None,))
    reproduce_membership(tmp_path, study)
    assert "| few | ∞ |" in (tmp_path / "membership.md").read_text()
    with pytest.raises(ValueError, match="models"):
        MembershipStudy(models=2)
