"""The table of the study on novel images: what it claims, and what it does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_novelty import FIXED, SMALL

from fedgmm.experiments.novelty_results import (
    METRICS,
    NoveltyOutcome,
    joint_scores,
    load_scores,
    results_in_markdown,
    save_scores,
)
from fedgmm.experiments.trial_files import DamagedRecordError


def table_of(study):
    outcome = NoveltyOutcome({"fedgmm": {metric: [0.5] for metric in METRICS}}, {}, {}, [])
    return results_in_markdown(study, outcome)


@pytest.mark.parametrize(
    ("change", "given"),
    [
        ({}, "99.21 / 99.60 / 99.49"),
        ({"dataset": "femnist"}, "not given"),  # the paper's are of MNIST
        ({"changes": "none"}, "not given"),
    ],
)
def test_the_paper_s_figures_stand_beside_its_own_setting_only(change, given):
    table = table_of(replace(SMALL, **change))
    row = next(line for line in table.splitlines() if line.startswith("| FedGMM"))
    assert row.split(" | ")[-1] == f"{given} |"


def test_a_choice_is_told_where_there_was_one():
    assert "was chosen on validation rows" in table_of(SMALL)
    assert "was chosen on validation rows" not in table_of(FIXED)


def test_scores_come_back(tmp_path, rng):
    scores = {"known": rng.normal(size=5), "novel": np.array([-np.inf, -1e30])}
    save_scores(tmp_path / "scores.npz", scores)
    held = load_scores(tmp_path / "scores.npz")
    assert list(held) == list(scores)
    for name, own in scores.items():
        assert held[name].dtype == np.float64
        np.testing.assert_allclose(held[name], own, rtol=1e-6)


def test_joint_scores_are_sums_of_logarithms():
    scores = {"known": 1, "known_y": 10, "changed_x": 2, "changed_x_y": 20, "relabelled_y": 40}
    scores = {name: np.array([float(value)]) for name, value in scores.items()}
    joint = {name: own.item() for name, own in joint_scores(scores).items()}
    assert joint == {"known": 11, "changed": 22, "relabelled": 41}


@pytest.mark.parametrize("content", [None, b"", b"abc", b"PK\x03\x04 no archive"])
def test_scores_that_are_gone_are_named_with_their_remedy(tmp_path, content):
    file = tmp_path / "fedgmm-0.npz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DamagedRecordError, match=r"fedgmm-0\.npz is .* delete fedgmm-0\.json"):
        load_scores(file)
