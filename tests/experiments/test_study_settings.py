"""Settings of studies on images, and their description in tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedgmm.experiments.settings import ImageStudy
from fedgmm.methods.base import TITLES


def test_tracks():
    paper, tuned = ImageStudy(), ImageStudy(track="tuned", reg_covar=1e-3)
    assert len(paper.grid) == 6
    options = paper.options("fedgmm", 3)
    assert (options.momentum, options.server, options.warmup, options.seed) == (0, "average", 0, 3)
    assert (options.batch_size, options.local_epochs, options.rounds) == (128, 1, 200)
    for method in TITLES:
        options = tuned.options(method, 0)
        assert (options.momentum, options.server) == (0.9, "momentum")
        # pFedMe's personal learners restart in every round, so their rate must not fall to zero
        assert options.schedule == ("constant" if method == "pfedme" else "cooldown")
        assert paper.options(method, 0).schedule == "constant"
        assert options.warmup == (100 if method in ("fedem", "fedgmm") else 0)
        assert options.reg_covar == 1e-3


@pytest.mark.parametrize(
    "change",
    [
        {"dataset": "imagenet"},
        {"track": "fast"},
        {"methods": ("fedsgd",)},
        {"methods": ()},
        {"seeds": ()},
        {"methods": ("fedavg", "fedem", "fedavg")},
        {"seeds": (0, 1, 1)},
        {"encoder": "vgg"},
        {"encoder_dtype": "half"},
        {"covariance_type": "round"},
        {"learner": "mpl"},
        {"fraction": 0.0},
        {"fraction": 1.5},
        {"rounds": 0},
        {"features": 0},
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_name(change):
    (name,) = change
    with pytest.raises(ValueError, match=name):
        ImageStudy(**change)


def test_only_the_tuned_track_goes_beyond_the_paper_s_method():
    (rates,) = ImageStudy().choices("fedgmm")
    assert [set(choice) for choice in rates] == [{"lr"}] * 6
    tuned = ImageStudy(track="tuned")
    assert tuned.choices("fedgmm")[1] == [{"independence": 0.0}, {"independence": 1e4}]
    rates, _, labels = tuned.choices("fedgmm")
    for method in ("fedem", "fedavg", "fedprox", "clustered"):
        assert tuned.choices(method) == [rates, labels]  # all methods are tuned alike
    for method in ("fedavg+", "pfedme"):  # their personal learners know the client's labels
        assert tuned.choices(method) == [rates]
    assert tuned.choices("local") == [[{"lr": rate} for rate in tuned.grid]]
    assert ImageStudy(track="tuned", components=1).choices("fedgmm") == [rates, labels]


# ---------------------------------------------------------------------- description in tables


def test_the_protocol_describes_the_search():
    paper, tuned = ImageStudy(seeds=(4, 7)).protocol(), ImageStudy(track="tuned").protocol()
    assert "200 rounds, the last one is reported; seeds 4, 7. Learning rates are chosen" in paper
    assert "Learning rates and server momentum are chosen" in tuned
    for text in (paper, tuned):
        assert "ranked after 10 rounds, the better half is compared by accuracy after 50," in text
    assert "fall towards zero" in tuned
    assert "fall towards zero" not in paper
    assert "independence" in tuned
    assert "independence" not in paper


@pytest.mark.parametrize(
    ("rounds", "tuning_rounds", "stages"),
    [(200, 10, (10, 50)), (200, 60, (60, 60)), (12, 1, (1, 3)), (5, 9, (5, 5)), (1, 1, (1, 1))],
)
def test_no_stage_of_the_search_is_longer_than_the_training_run(rounds, tuning_rounds, stages):
    study = ImageStudy(rounds=rounds, tuning_rounds=tuning_rounds)
    assert study.tuning_stages == stages
    short, middle = stages
    assert f"ranked after {short} {'round' if short == 1 else 'rounds'}," in study.protocol()
    assert f"by accuracy after {middle}," in study.protocol()


def test_the_protocol_names_methods_that_are_one_learner_when_rates_are_compared():
    sentence = "The first two stages use one shared learner for {}."
    both = ImageStudy(track="tuned")
    assert sentence.format("FedEM and FedGMM") in both.protocol()
    assert sentence.format("FedEM") in ImageStudy().protocol()  # the paper's FedGMM has no warm-up
    for study in (replace(both, methods=("fedavg",)), replace(both, tuning_rounds=150)):
        assert "The first two stages" not in study.protocol()


def test_the_protocol_says_that_pfedme_s_rates_are_constant():
    study = ImageStudy(track="tuned", methods=("fedavg", "pfedme"))
    assert "(except pFedMe's)" in study.protocol()
    for other in (replace(study, methods=("fedavg",)), replace(study, track="paper")):
        assert "pFedMe" not in other.protocol()
