"""Vectors of a frozen encoder: rows meet their own vectors, and left-out rows are never trained on."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedgmm.data.encoders import encoder
from fedgmm.data.images.federated import federated_images
from fedgmm.data.images.files import WHITE, load_images
from fedgmm.data.partition import transform_images
from fedgmm.experiments import embeddings, tuning
from fedgmm.experiments.embeddings import (
    EmbeddingStudy,
    embedded_clients,
    encode_data_set,
    encode_reviews,
    leaders,
    reproduce_embeddings,
    with_interval,
)
from fedgmm.experiments.study import StudyContext
from tiny_images import FAST, write_femnist, write_mnist

SMALL = EmbeddingStudy(
    dataset="femnist",
    **{**FAST, "encoder_dtype": "float32", "learner": "auto", "methods": ("fedavg", "fedgmm")},
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data folder with both data sets of writing."""
    write_femnist(tmp_path, writers=6, rows=60)
    write_mnist(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture
def few_choices(monkeypatch):
    """A short search."""
    monkeypatch.setattr(embeddings, "_RATES", (1.0, 0.1))
    sizes = {
        "fedgmm": [{"components": m, "learners": m} for m in (2, 1)],
        "fedem": [{"learners": m} for m in (2, 1)],
    }
    monkeypatch.setattr(embeddings, "_SIZES", sizes)


@pytest.mark.parametrize("seed", [0, 3])
def test_every_row_has_the_vector_of_its_own_image(folder, seed):
    clients = embedded_clients(encode_data_set, SMALL, seed, StudyContext(folder))
    data = load_images("femnist", folder)
    dealt = federated_images(data, seed=seed)
    pixels = encoder("pixels")
    for name in ("train", "validation", "test"):
        pictures = data.images[dealt.rows[name]].copy()
        changed = dealt.changed[name]
        assert changed.any()
        pictures[changed] = transform_images(pictures[changed], WHITE)
        rows = clients.dataset.split(name)
        assert torch.equal(rows.inputs, pixels.encode(torch.from_numpy(pictures)))
        assert torch.equal(rows.labels, dealt.dataset.split(name).labels)
        assert torch.equal(rows.codes, dealt.dataset.split(name).codes)
        assert rows.features.chunks[0].shape == (len(rows), SMALL.features)


def test_left_out_clients_and_the_left_out_class_are_not_in_the_second_run(folder):
    seed = 1
    clients = embedded_clients(encode_data_set, SMALL, seed, StudyContext(folder))
    training = clients.held_out.dataset
    away = {one.name for one in clients.held_out.newcomers}
    assert len(away) == 1
    assert not away & set(training.names)
    data = load_images("femnist", folder)
    dealt = federated_images(data, seed=seed)
    known = {
        row.numpy().tobytes()
        for name in ("train", "validation", "test")
        for row, image in zip(clients.dataset.split(name).inputs, dealt.rows[name], strict=True)
        if data.labels[image] != seed
    }
    seen = {
        row.numpy().tobytes()
        for name in ("train", "validation", "test")
        for row in training.split(name).inputs
    }
    assert seen <= known
    novel = {row.numpy().tobytes() for row in clients.novel["a class left out"]}
    assert novel
    assert not novel & seen


def test_the_study_writes_both_tables_and_resumes(folder, tmp_path, few_choices, monkeypatch):
    out = tmp_path / "out"
    found = reproduce_embeddings(out, SMALL, StudyContext(folder))
    assert list(found) == ["fedavg", "fedgmm"]
    own = found["fedgmm"][0]
    assert set(own["auroc"]) == {"a class left out", "mnist"}
    assert {"as it is", "labels", "no labels"} <= set(own["unseen"])
    # white ink on black is unlike all of FEMNIST's training images but the inverted half
    assert 0.0 <= own["auroc"]["mnist"] <= 1.0
    text = (out / "embeddings-femnist.md").read_text()
    assert "FedGMM" in text
    assert "AUROC, novel: mnist" in text
    record = json.loads((out / "embeddings-femnist.json").read_text())
    assert len(record["details"]) == 2

    def refuse(*_):
        raise AssertionError("trained again")

    monkeypatch.setattr(embeddings, "_run_trial", refuse)
    assert reproduce_embeddings(out, SMALL, StudyContext(folder)) == found


@pytest.mark.parametrize("method", ["fedem", "fedgmm"])
def test_sizes_are_chosen_with_the_start_and_the_rate_again_after_them(
    folder, tmp_path, few_choices, monkeypatch, method
):
    """The best rate depends on the start, which looks bad until the end, and both on the sizes."""
    by_size = {
        2: {(1.0, "auto"): 50, (0.1, "auto"): 30, (1.0, "split"): 40, (0.1, "split"): 70},
        1: {(1.0, "auto"): 90, (0.1, "auto"): 80, (1.0, "split"): 95, (0.1, "split"): 75},
    }

    def early(model):
        return float(model.options["start"] == "auto") + model.options["lr"]

    def late(model):
        own = model.options
        if len(model.history) < SMALL.rounds:
            return early(model)
        score = by_size[own["learners"]][own["lr"], own["start"]]
        return float(score + own["personal_labels"])

    monkeypatch.setattr(tuning, "validation_score", early)
    monkeypatch.setattr(tuning, "validation_accuracy", late)
    study = replace(SMALL, methods=(method,), learner="linear", components=2, learners=2)
    own = reproduce_embeddings(tmp_path / "out", study, StudyContext(folder))[method][0]
    assert (own["lr"], own["start"], own["learners"]) == (1.0, "auto", 1)
    assert own["personal_labels"]


def test_bytes_count_every_number_that_a_client_sends(folder, few_choices):
    data = embedded_clients(encode_data_set, SMALL, 0, StudyContext(folder)).dataset
    options = replace(SMALL.options("fedavg", 0), learner="linear")
    classes, columns = len(data.classes), data.input_shape[0]
    sent = embeddings._bytes_per_round(options, data) // 4
    assert classes * (columns + 1) <= sent <= classes * (columns + 1) + 4


def test_reviews_keep_their_sites(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "reviews").mkdir()
    for site, words in {"books": "a fine book", "films": "a dull film"}.items():
        table = pa.table({"text": [words, words + " indeed"], "sentiment": [1, 0]})
        pq.write_table(table, tmp_path / "reviews" / f"{site}.parquet")
    x, labels, sites = encode_reviews(tmp_path)
    assert x.shape == (4, 256)
    assert labels.tolist() == [1, 0, 1, 0]
    assert sites.tolist() == ["books", "books", "films", "films"]
    with pytest.raises(ValueError, match="no reviews"):
        encode_reviews(tmp_path / "reviews")


def test_differences_within_noise_are_ties():
    def trials(*values):
        return [{"mean_accuracy": value} for value in values]

    found = {
        "fedavg": trials(0.70, 0.72, 0.71),
        "fedem": trials(0.80, 0.79, 0.81),
        "fedgmm": trials(0.79, 0.81, 0.81),
    }
    assert leaders(found) == ["fedem", "fedgmm"]
    assert with_interval(np.array([70.0, 72.0, 71.0])) == "71.0 ± 2.5"
    assert with_interval(np.array([70.0])) == "70.0"
    assert with_interval(None) == ""
