"""Examples of clients, Gaussians and learners are the rows that they should be."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from pages import contents_of, named_clients
from PIL import Image

from fedgmm.report.contents import Example, ExampleGroup
from fedgmm.report.examples import SiteRows, gather_examples, thumbnail
from fedgmm.report.page import render
from fedgmm.training.in_process import train

NAMES = ["client 0", "client 1", "client 2"]


@pytest.fixture(scope="module")
def dataset():
    return named_clients(NAMES, rows=60)


@pytest.fixture(scope="module")
def model(dataset):
    return train(dataset, rounds=8, components=2, learners=2)


def site_of(model, dataset, load):
    inputs = dataset.train.inputs.numpy().copy()
    inputs[5] = 40.0  # far from all Gaussians
    codes = dataset.train.codes.numpy()
    ids = [f"row {k}" for k in range(len(inputs))]
    return SiteRows(inputs, codes, dataset.train.labels.numpy(), ids, load)


@pytest.fixture(scope="module")
def found(model, dataset):
    site = site_of(model, dataset, lambda name: f"the text   of {name}")
    return site, {group.title: group for group in gather_examples(model, [site])}


def rows_in(group, title):
    return [int(one.name.removeprefix("row ")) for one in group.rows[title]]


def test_every_client_gaussian_and_learner_has_examples(found):
    site, groups = found
    assert list(groups) == ["Gaussian G1", "Gaussian G2", "Learner L1", "Learner L2", *NAMES]
    for code, name in enumerate(NAMES):
        for title in ("samples", "most novel"):
            rows = rows_in(groups[name], title)
            assert len(rows) == 6
            assert {int(site.codes[row]) for row in rows} == {code}


def test_the_most_novel_rows_are_the_least_likely_under_the_client_s_weights(found, model):
    site, groups = found
    owner = NAMES[site.codes[5]]
    assert rows_in(groups[owner], "most novel")[0] == 5
    own = np.flatnonzero(site.codes == 0)
    scores = model.score_samples(site.inputs[own], NAMES[0])
    assert rows_in(groups[NAMES[0]], "most novel") == own[np.argsort(scores)[:6]].tolist()


def test_weights_stand_beside_the_pictures(found, model):
    _, groups = found
    weights = groups[NAMES[1]].weights
    assert sum(weights.values()) == pytest.approx(1.0)  # all four pairs fit
    assert max(weights, key=weights.get) == next(iter(weights))
    assert next(iter(weights.values())) == pytest.approx(model.client_weights[1].max())
    assert groups["Gaussian G2"].weights["of all rows"] == pytest.approx(model.weights[1].sum())


def test_typical_rows_of_a_gaussian_lie_near_its_mean(found, model):
    site, groups = found
    inputs = model.scaling.apply(torch.from_numpy(site.inputs), torch.float64)
    means = model.prediction.gaussians.means
    for number in range(2):
        rows = rows_in(groups[f"Gaussian G{number + 1}"], "most typical")
        distances = torch.cdist(inputs[rows], means)
        assert (distances.argmin(1) == number).all()
        assert distances[:, number].mean() < torch.cdist(inputs, means[[number]]).mean() / 2


def test_typical_rows_of_a_learner_have_labels_that_it_expects(found, model):
    from fedgmm.model.predictions import log_learners

    site, groups = found
    inputs = model.scaling.apply(torch.from_numpy(site.inputs), torch.float32)
    log_y = log_learners(model.prediction, inputs)
    log_y = log_y[torch.arange(len(log_y)), :, torch.from_numpy(site.labels)]
    for number in range(2):
        rows = rows_in(groups[f"Learner L{number + 1}"], "most typical")
        assert (log_y[rows].argmax(1) == number).all()


def test_a_method_without_gaussians_has_no_novel_examples(dataset):
    model = train(dataset, "fedem", rounds=2, learners=2)
    groups = gather_examples(model, [site_of(model, dataset, str)])
    assert [group.kind for group in groups] == ["learner"] * 2 + ["client"] * 3
    assert list(groups[-1].rows) == ["samples"]
    local = train(dataset, "local", rounds=2)
    assert {one.kind for one in gather_examples(local, [site_of(local, dataset, str)])} == {
        "client"
    }


def test_texts_are_cut_and_what_cannot_be_read_is_said(model, dataset):
    def load(name):
        if name == "row 0":
            raise ValueError("there is no such file")
        return "word " * 100

    groups = gather_examples(model, [site_of(model, dataset, load)])
    samples = groups[4].rows["samples"]
    assert samples[0].text == "It cannot be shown: there is no such file."
    assert len(samples[1].text) == 221
    assert samples[1].text.endswith("…")


@pytest.mark.parametrize("channels", [1, 3])
def test_a_thumbnail_is_the_image(channels):
    image = np.zeros((channels, 300, 200), dtype=np.uint8)
    image[0, 150:] = 255
    head, data = thumbnail(image).split(",")
    assert head == "data:image/jpeg;base64"
    small = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
    assert small.shape == (96, 64, 3)
    assert small[10, 10].max() < 30
    assert small[80, 10, 0] > 200


def test_names_and_texts_of_examples_are_only_shown():
    hostile = "<script>alert(1)</script>"
    example = Example(hostile, hostile, "", hostile, hostile)
    group = ExampleGroup(hostile, "client", {hostile: 0.5}, {hostile: (example,)})
    page = render(contents_of(named_clients("abc"), examples=[group]))
    assert hostile not in page
    assert 'id="examples"' in page
    assert 'id="examples"' not in render(contents_of(named_clients("abc")))
