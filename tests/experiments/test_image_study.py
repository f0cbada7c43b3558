"""Settings of studies on images."""

from __future__ import annotations

import pytest

from fedgmm.experiments.image_study import ImageStudy
from fedgmm.experiments.results import TITLES


def test_tracks():
    paper, tuned = ImageStudy(), ImageStudy(track="tuned", reg_covar=1e-3)
    assert len(paper.grid) == 6
    options = paper.options("fedgmm", 3)
    assert (options.momentum, options.server, options.warmup, options.seed) == (0, "average", 0, 3)
    assert (options.batch_size, options.local_epochs, options.rounds) == (128, 1, 200)
    for method in TITLES:
        options = tuned.options(method, 0)
        assert (options.momentum, options.server) == (0.9, "momentum")
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
        ({"encoder": "vgg"}, "encoder must be one of"),
        ({"encoder_dtype": "half"}, "encoder_dtype must be one of"),
        ({"covariance_type": "round"}, "covariance_type must be one of"),
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
    for method in ("fedem", "fedavg", "pfedme", "clustered"):
        assert tuned.choices(method) == tuned.choices("fedgmm")[:1]  # the same care for all
    assert tuned.choices("local") == [[{"lr": rate} for rate in tuned.grid]]
    assert len(ImageStudy(track="tuned", components=1).choices("fedgmm")) == 1
