"""Settings of studies on images."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedgmm.experiments.image_study import ImageStudy, prepare_federation
from fedgmm.experiments.workplace import Workplace
from fedgmm.methods.base import TITLES
from tiny_images import FAST, write_femnist


def test_tracks():
    paper, tuned = ImageStudy(), ImageStudy(track="tuned", reg_covar=1e-3)
    assert len(paper.grid) == 6
    options = paper.options("fedgmm", 3)
    assert (options.momentum, options.server, options.warmup, options.seed) == (0, "average", 0, 3)
    assert (options.batch_size, options.local_epochs, options.rounds) == (128, 1, 200)
    for method in TITLES:
        options = tuned.options(method, 0)
        assert (options.momentum, options.server) == (0.9, "momentum")
        # pFedMe's personal learners begin at the global one in every round: they need a whole rate
        assert options.schedule == ("constant" if method == "pfedme" else "cooldown")
        assert paper.options(method, 0).schedule == "constant"
        assert options.warmup == (100 if method in ("fedem", "fedgmm") else 0)
        assert options.reg_covar == 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "imagenet"}, "dataset must be one of"),
        ({"track": "fast"}, "track must be one of"),
        ({"methods": ("fedsgd",)}, "methods must be one of"),
        ({"methods": ()}, "methods is empty"),
        ({"seeds": ()}, "seeds is empty"),
        ({"methods": ("fedavg", "fedem", "fedavg")}, "methods must differ .* 'fedavg' more than"),
        ({"seeds": (0, 1, 1)}, "seeds must differ from each other, got 1 more than once"),
        ({"encoder": "vgg"}, "encoder must be one of"),
        ({"encoder_dtype": "half"}, "encoder_dtype must be one of"),
        ({"covariance_type": "round"}, "covariance_type must be one of"),
        ({"learner": "mpl"}, "learner must be one of"),
        ({"fraction": 0.0}, "fraction must lie above 0"),
        ({"fraction": 1.5}, "fraction must lie above 0 and not above 1"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"features": 0}, "features must be at least 1"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ValueError, match=message):
        ImageStudy(**change)


def test_only_the_tuned_track_goes_beyond_the_paper_s_method():
    (rates,) = ImageStudy().choices("fedgmm")
    assert [set(choice) for choice in rates] == [{"lr"}] * 6
    tuned = ImageStudy(track="tuned")
    assert tuned.choices("fedgmm")[1] == [{"independence": 0.0}, {"independence": 1e4}]
    rates, _, labels = tuned.choices("fedgmm")
    for method in ("fedem", "fedavg", "fedprox", "clustered"):
        assert tuned.choices(method) == [rates, labels]  # the same care for all
    for method in ("fedavg+", "pfedme"):  # they learn at home which labels they have
        assert tuned.choices(method) == [rates]
    assert tuned.choices("local") == [[{"lr": rate} for rate in tuned.grid]]
    assert ImageStudy(track="tuned", components=1).choices("fedgmm") == [rates, labels]


# ---------------------------------------------------------------------- what a table says of them


def test_the_protocol_tells_the_search():
    paper, tuned = ImageStudy(seeds=(4, 7)).protocol(), ImageStudy(track="tuned").protocol()
    assert "200 rounds, the last one is reported; seeds 4, 7. Learning rates are chosen" in paper
    assert "Learning rates and server momentum are chosen" in tuned
    for text in (paper, tuned):
        assert "10 rounds rank them, the better half is compared by accuracy after 50," in text
    assert "fall towards zero" in tuned
    assert "fall towards zero" not in paper
    assert "independence" in tuned
    assert "independence" not in paper


@pytest.mark.parametrize(
    ("rounds", "tuning_rounds", "stages"),
    [(200, 10, (10, 50)), (200, 60, (60, 60)), (12, 1, (1, 3)), (5, 9, (5, 5)), (1, 1, (1, 1))],
)
def test_no_stage_of_the_search_is_longer_than_the_training(rounds, tuning_rounds, stages):
    study = ImageStudy(rounds=rounds, tuning_rounds=tuning_rounds)
    assert study.tuning_stages == stages
    short, middle = stages
    ranking = "1 round ranks" if short == 1 else f"{short} rounds rank"
    assert f": {ranking} them" in study.protocol()
    assert f"by accuracy after {middle}," in study.protocol()


def test_the_protocol_tells_who_is_one_learner_when_rates_are_compared():
    told = "The first two comparisons see {} as one shared learner."
    both = ImageStudy(track="tuned")
    assert told.format("FedEM and FedGMM") in both.protocol()
    assert told.format("FedEM") in ImageStudy().protocol()  # its FedGMM warms up in no round
    for study in (replace(both, methods=("fedavg",)), replace(both, tuning_rounds=150)):
        assert "shared learner." not in study.protocol()


def test_the_protocol_tells_that_pfedme_s_rates_stay():
    study = ImageStudy(track="tuned", methods=("fedavg", "pfedme"))
    assert "rounds (pFedMe's stay);" in study.protocol()
    for other in (replace(study, methods=("fedavg",)), replace(study, track="paper")):
        assert "pFedMe" not in other.protocol()


# ---------------------------------------------------------------------- the clients of a seed


def test_too_few_images_for_the_features(femnist):
    """An option for the number of features is not among those of the command."""
    study = ImageStudy(**{**FAST, "features": 121})  # of 200 images 120 are there to train
    message = r"see 121 principal components, but 120 training images .*use more images"
    with pytest.raises(ValueError, match=message):
        prepare_federation(study, 0, Workplace(femnist))
    prepare_federation(replace(study, features=120), 0, Workplace(femnist))


@pytest.mark.parametrize(("rows", "split"), [(1, "validation"), (2, "test")])
def test_clients_too_small_for_a_test_are_told_before_training(tmp_path, rows, split):
    write_femnist(tmp_path, writers=5, rows=rows)
    with pytest.raises(ValueError, match=f"none has a {split} row; use fewer clients"):
        prepare_federation(ImageStudy(methods=("fedavg",), **FAST), 0, Workplace(tmp_path))
