"""The density is chosen by classes that are missing, and nothing peeks at novel images."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from small_novelty import FIXED, SMALL

from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.embeddings import PixelEncoder
from fedgmm.experiments import novel_images, novelty_density, workplace
from fedgmm.experiments.novelty_density import choose_density, missing_class_auroc
from fedgmm.experiments.novelty_study import deal_images, prepare_novelty
from fedgmm.experiments.workplace import Workplace


def test_the_density_is_chosen_by_classes_that_are_missing(tmp_path, mnist):
    chosen = choose_density(tmp_path, SMALL, Workplace(mnist))
    record = json.loads((tmp_path / "density.json").read_text())
    dataset = deal_images(SMALL, 0, Workplace(mnist))
    base = PixelEncoder()
    codes = {split: base.encode(dataset.split(split).inputs) for split in ("train", "validation")}
    scores = {
        how: missing_class_auroc(replace(SMALL, representation=how), dataset, codes, base)
        for how in SMALL.representation_choices
    }
    assert [one["auroc"] for one in record["tried"][:2]] == list(scores.values())
    assert chosen.representation == max(scores, key=lambda how: scores[how])
    assert (chosen.features, chosen.components, chosen.reg_covar) == (4, 2, 1e-2)


def test_a_missing_class_is_told_from_those_that_are_there(rng):
    """By a density that was not shown it: all would look alike otherwise."""
    labels = np.repeat([0, 1, 2], 100)
    x = (8 * np.eye(3, 5)[labels] + rng.normal(size=(300, 5))).astype(np.float32)
    dataset = FederatedDataset.from_arrays(x, labels, np.arange(300) % 3)
    codes = {split: dataset.split(split).inputs for split in ("train", "validation")}
    auroc = missing_class_auroc(SMALL, dataset, codes, PixelEncoder())
    assert auroc > 0.99


def test_test_rows_and_novel_images_have_no_part_in_the_choice(tmp_path, mnist, monkeypatch):
    (tmp_path / "first").mkdir()
    before = choose_density(tmp_path / "first", SMALL, Workplace(mnist))
    tried = json.loads((tmp_path / "first" / "density.json").read_text())

    def without_test_rows(*args, **kwargs):
        dataset = deal_images(*args, **kwargs)
        dataset.test.inputs.fill_(77)
        dataset.test.labels.fill_(0)
        return dataset

    monkeypatch.setattr(novelty_density, "deal_images", without_test_rows)
    monkeypatch.setattr(novel_images, "resized_about_centre", None)
    (tmp_path / "second").mkdir()
    assert choose_density(tmp_path / "second", SMALL, Workplace(mnist)) == before
    assert json.loads((tmp_path / "second" / "density.json").read_text()) == tried


def test_with_one_candidate_there_is_nothing_to_choose(tmp_path, monkeypatch):
    monkeypatch.setattr(workplace, "load_images", None)
    chosen = choose_density(tmp_path, FIXED, Workplace())
    assert chosen == replace(FIXED, representation="direction", features=4, components=2)
    assert not (tmp_path / "density.json").exists()


def test_with_a_cache_the_clients_are_encoded_once_for_choice_and_training(
    tmp_path, mnist, monkeypatch
):
    encoded = []
    plain = PixelEncoder.encode

    def counted(self, images):
        encoded.append(len(images))
        return plain(self, images)

    monkeypatch.setattr(PixelEncoder, "encode", counted)
    told = []
    workplace = Workplace(mnist, tmp_path / "cache", told.append)
    sized = choose_density(tmp_path, SMALL, workplace)
    assert sum(encoded) == 240
    assert "240 of 240 images are encoded" in told
    assert len(encoded) == SMALL.clients  # an interruption costs no more than one of them
    encoded.clear()
    prepare_novelty(sized, 0, workplace)
    prepare_novelty(replace(sized, representation="plain"), 0, workplace)
    assert not encoded


def test_too_few_images_for_the_features(tmp_path, mnist):
    """A class is left out of each density, so that there are fewer images than in training."""
    study = replace(SMALL, feature_choices=(4, 140))  # of 240 images 144 are there to train
    with pytest.raises(ValueError, match=r"see 140 principal components, but \d+ training images"):
        choose_density(tmp_path, study, Workplace(mnist))
    with pytest.raises(ValueError, match=r"see 200 principal components, but \d+ training images"):
        prepare_novelty(replace(FIXED, features=200), 0, Workplace(mnist))


def test_a_choice_of_the_density_goes_on_where_it_was_interrupted(tmp_path, mnist, monkeypatch):
    """After a power cut before every candidate, none is judged twice."""
    whole = tmp_path / "whole"
    whole.mkdir()
    expected = choose_density(whole, SMALL, Workplace(mnist))
    candidates = len(json.loads((whole / "density.json").read_text())["tried"])
    judged = []
    parts = tmp_path / "parts"
    parts.mkdir()

    def until(most):
        def one_more(study, *rest):
            if len(judged) == most:
                raise KeyboardInterrupt
            judged.append(study.density)
            return missing_class_auroc(study, *rest)

        monkeypatch.setattr(novelty_density, "missing_class_auroc", one_more)

    for most in range(candidates):
        until(most)
        with pytest.raises(KeyboardInterrupt):
            choose_density(parts, SMALL, Workplace(mnist))
    until(candidates)
    assert choose_density(parts, SMALL, Workplace(mnist)) == expected
    assert len(judged) == candidates
    assert (parts / "density.json").read_text() == (whole / "density.json").read_text()


def test_candidates_that_another_seed_judged_are_judged_again(tmp_path, mnist):
    other = replace(SMALL, seeds=(1,))
    for name, studies in {"fresh": [other], "used": [SMALL, other]}.items():
        (tmp_path / name).mkdir()
        for study in studies:
            (tmp_path / name / "density.json").unlink(missing_ok=True)
            choose_density(tmp_path / name, study, Workplace(mnist))
    fresh, used = ((tmp_path / name / "density.json").read_text() for name in ("fresh", "used"))
    assert fresh == used
