"""The demonstration's acts on small data."""

import io

import numpy as np
import pytest
from rich.console import Console

from fedgmm.cli import studies
from fedgmm.data.examples import WHITE, heterogeneous_digits
from fedgmm.data.synthetic import synthetic
from fedgmm.experiments import story as story_module
from fedgmm.experiments.story import (
    adapt_newcomer,
    find_novel_images,
    plot_story,
    run_story,
    shrink,
)
from fedgmm.training.in_process import train


@pytest.fixture(scope="module")
def story():
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(story_module, "_GRID", (0.316,))  # rates are tuned in other tests
        patch.setattr(story_module, "synthetic", lambda *_, seed: synthetic(20, 300, seed=seed))
        patch.setattr(story_module, "LABELLED_ROWS", (1, 5, 10))
        found = run_story(seed=1, notify=lines.append, methods=("fedavg", "fedgmm"), rounds=16)
    return found, lines


def test_story_shows_what_it_claims(story, tmp_path, monkeypatch):
    shown, lines = story
    monkeypatch.setattr(story_module, "LABELLED_ROWS", (1, 5, 10))
    average, mixture = shown.digits.standings
    # linear learners gain from the density, and validation rows may prefer a network
    assert mixture.by_learner["linear"] > average.by_learner["linear"] + 0.03
    assert set(average.by_learner) == {"linear", "mlp"}
    on_synthetic = shown.synthetic.standings[1]
    assert shown.bayes > on_synthetic.value.mean > shown.bayes - 0.03
    assert any("digits, FedAvg, MLP" in line for line in lines)
    picture = plot_story(shown, tmp_path / "story.png")
    assert picture.stat().st_size > 10_000


def test_the_demo_says_what_it_computed(story, tmp_path, monkeypatch):
    shown, _ = story
    monkeypatch.setattr(story_module, "LABELLED_ROWS", (1, 5, 10))
    monkeypatch.setattr(story_module, "plot_story", lambda _, path: path)  # drawn above
    monkeypatch.setattr("fedgmm.experiments.story.run_story", lambda *_: shown)
    console = Console(record=True, width=100, file=io.StringIO())
    studies._run_story(1, tmp_path, console)
    words = " ".join(console.export_text().split())
    for ranking in (shown.synthetic, shown.digits):
        assert ranking.headline() in words
    labelled, unlabelled, _ = shown.offices.at(5)
    for value in (shown.offices.before, labelled, unlabelled):
        assert f"{100 * value:.0f} %" in words


def test_newcomer_and_novelty(story):
    shown, _ = story
    assert shown.newcomer.labelled > 0.8
    assert shown.offices.milliseconds < 50
    assert shown.novelty.metrics.auroc > 0.95
    assert shown.novelty.false_alarms < 0.12
    assert shown.novelty.found > 0.9


def test_labels_of_a_new_office_decide_and_images_alone_cannot(story):
    """Half of the offices use other labels, so weights from labels double the accuracy."""
    offices = story[0].offices
    labelled, unlabelled, alone = offices.labelled[1], offices.unlabelled[1], offices.alone[1]
    assert 0.3 < offices.before < 0.6
    assert labelled > 0.9
    assert abs(unlabelled - offices.before) < 0.03
    assert alone < labelled - 0.2


def test_newcomer_is_not_in_training():
    digits = heterogeneous_digits(clients=5, seed=3)
    x, y = digits.newcomer
    assert len(x) == len(y) > 0
    rows = sum(len(digits.dataset.split(name)) for name in ("train", "validation", "test"))
    assert rows + len(x) == len(digits.images)
    assert abs(digits.changed.mean() - 0.5) < 0.01


def test_adaptation_does_not_touch_other_clients():
    digits = heterogeneous_digits(clients=4, seed=0)
    model = train(digits.dataset, rounds=3, components=2, learners=2)
    before = model.client_weights.copy()
    adapt_newcomer(model, digits)
    assert np.array_equal(model.client_weights[:4], before)
    find_novel_images(model, digits)


def test_shrink_keeps_background_and_ink():
    image = np.full((1, 8, 8), WHITE, dtype=np.float32)
    image[0, 2:6, 2:6] = 0.0
    small = shrink(image.reshape(1, -1)).reshape(8, 8)
    assert (small[0] == WHITE).all()
    assert (small[3:5, 3:5] == 0).all()
    assert small.sum() > image.sum()
