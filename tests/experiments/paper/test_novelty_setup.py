"""Setup of Table 3: novel images, the federations, and the choice of the density."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_novelty import FIXED, SMALL

from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.encoders import PixelEncoder
from fedgmm.data.images.federated import federated_images
from fedgmm.data.images.files import load_images
from fedgmm.data.partition import transform_images
from fedgmm.experiments import study as engine
from fedgmm.experiments.paper import novelty_setup
from fedgmm.experiments.paper.novelty_setup import (
    NoveltyStudy,
    changed_separately,
    choose_density,
    known_images,
    leave_out,
    missing_class_auroc,
    novel_images,
    other_labels,
    prepare_novelty,
    resized_about_centre,
    slightly_changed,
    study_encoder,
)
from fedgmm.experiments.study import StudyContext
from fedgmm.experiments.trials import TrialFolder
from fedgmm.nets.backbones import ResNet18


@pytest.fixture(scope="module", autouse=True)
def short_fits():
    """Compare densities after a few rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(novelty_setup, "_DENSITY_ROUNDS", 5)
        yield


# ---------------------------------------------------------------------- settings


def test_candidates_of_the_density():
    seen, sizes = SMALL.density_choices
    assert seen == [
        {"representation": "plain", "features": 4},
        {"representation": "direction", "features": 4},
    ]
    assert sizes == [{"components": 2, "reg_covar": 0.01}]
    assert SMALL.density_is_chosen


def test_an_empty_choice_is_the_study_s_own_value():
    """And does not change the choice beside it."""
    study = replace(SMALL, representation_choices=("direction",), feature_choices=(), features=7)
    study = replace(study, component_choices=(), components=5, reg_covar_choices=(0.1,))
    assert study.density_choices == (
        [{"representation": "direction", "features": 7}],
        [{"components": 5, "reg_covar": 0.1}],
    )
    assert not study.density_is_chosen


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"changes": "all"}, "changes"),
        ({"representation": "round"}, "representation"),
        ({"representation_choices": ("round",)}, "representation"),
        ({"left_out": -1}, "left_out"),
        ({"scatter_rows": 0}, "scatter_rows"),
    ],
)
def test_bad_settings_are_refused_by_name(change, name):
    with pytest.raises(ValueError, match=name):
        NoveltyStudy(**change)


# ---------------------------------------------------------------------- novel images


@pytest.mark.parametrize(("scale", "edge"), [(0.5, 7), (0.8, 3)])
@pytest.mark.parametrize("background", [0, 255])
def test_smaller_images_lie_in_the_middle_of_their_background(rng, scale, edge, background):
    images = np.full((3, 1, 28, 28), background, dtype=np.uint8)
    images[:, :, 2:26, 2:26] = rng.integers(100, 156, size=(3, 1, 24, 24))
    small = resized_about_centre(images, scale)
    assert small.dtype == np.uint8
    assert small.shape == images.shape
    frame = np.ones((28, 28), dtype=bool)
    frame[edge:-edge, edge:-edge] = False
    assert (small[:, 0, frame] == background).all()
    inside = small[:, 0, edge + 2 : -edge - 2, edge + 2 : -edge - 2]
    assert (np.abs(inside.astype(int) - 128) < 40).all()


def test_half_the_size_is_the_mean_of_four_pixels_except_for_smoothing():
    images = np.zeros((1, 1, 28, 28), dtype=np.uint8)
    images[..., 8:20, 4:16] = 200
    small = resized_about_centre(images, 0.5)[0, 0]
    blocks = images[0, 0].reshape(14, 2, 14, 2).mean((1, 3))
    flat = np.abs(small[7:21, 7:21] - blocks)
    assert flat.max() <= 48  # an eighth of the step leaks over each edge
    assert (small[12:16, 10:14] == 200).all()


def centre_of(image):
    """Return line and column of the centre of the bright pixels, relative to the image's centre."""
    return [float(places.mean()) - 13.5 for places in np.nonzero(image > 100)]


def test_novel_images_are_rotated_and_flipped():
    images = np.zeros((1, 1, 28, 28), dtype=np.uint8)
    images[0, 0, 4:8, 16:20] = 255
    assert centre_of(images[0, 0]) == [-8, 4]
    # rotated counterclockwise: 4 above, 8 to the left; flipped: to the right; at half the distance
    assert centre_of(novel_images(images)[0, 0]) == [-2, 4]
    changed = centre_of(slightly_changed(images)[0, 0])  # not flipped
    np.testing.assert_allclose(changed, [-4 * 22 / 28, -8 * 22 / 28], atol=0.5)


def test_other_scales_are_refused():
    with pytest.raises(ValueError, match="scale"):
        resized_about_centre(np.zeros((1, 1, 4, 4), dtype=np.uint8), 1.5)


def test_other_labels_differ_for_every_class(rng):
    for classes in (2, 5, 10):
        for _ in range(20):
            renamed = other_labels(classes, rng)
            assert sorted(renamed) == list(range(classes))
            assert (renamed != np.arange(classes)).all()


# ---------------------------------------------------------------------- the federations


def test_a_quarter_is_transformed_and_another_relabelled(mnist):
    images = load_images("mnist", mnist)
    made = federated_images(images, clients=4, shift=False, seed=1)
    dataset = changed_separately(made, 1)
    transformed = relabelled = both = 0
    renaming = set()
    for split in ("train", "validation", "test"):
        rows, source = dataset.split(split), made.rows[split]
        for image, label, row in zip(
            rows.inputs.numpy(), rows.labels.tolist(), source, strict=True
        ):
            plain = np.array_equal(image, images.images[row])
            if not plain:
                np.testing.assert_array_equal(
                    image, transform_images(images.images[row][None], 255)[0]
                )
            transformed += not plain
            relabelled += label != images.labels[row]
            both += not plain and label != images.labels[row]
            if label != images.labels[row]:
                renaming.add((int(images.labels[row]), label))
    assert transformed == len(images) // 4
    assert 0 < relabelled <= len(images) // 4
    assert not both
    assert len(renaming) == len(dict(renaming))  # one permutation for all
    np.testing.assert_array_equal(
        made.dataset.train.inputs.numpy(), images.images[made.rows["train"]]
    )


@pytest.mark.parametrize(("changes", "share"), [("separate", 0.25), ("joint", 0.5), ("none", 0)])
def test_share_of_changed_images(mnist, changes, share):
    dataset = known_images(replace(SMALL, changes=changes), 0, StudyContext(mnist))
    inverted = [
        int((dataset.split(split).inputs[:, 0, 0, 0] == 255).sum())
        for split in ("train", "validation", "test")
    ]
    assert sum(inverted) == 240 * share


def test_no_client_has_the_class_that_is_left_out(mnist):
    case = leave_out(SMALL, 0, StudyContext(mnist))
    dataset = case.encoded.dataset
    assert len(dataset.names) == 3
    sizes = sum(dataset.split(s).features.rows_per_client for s in ("train", "validation", "test"))
    assert sizes.tolist() == [30, 30, 30]
    images = load_images("mnist", mnist)
    strange = {image.tobytes() for image in images.images[images.labels == SMALL.left_out]}
    assert {image.tobytes() for image in case.strangers} <= strange
    assert len(case.strangers) == len(dataset.test)
    for split in ("train", "validation", "test"):
        rows = dataset.split(split)
        assert not strange & {image.tobytes() for image in rows.inputs.numpy()}
        assert not (rows.labels == SMALL.left_out).any()
    assert case.new_labels[SMALL.left_out] == SMALL.left_out
    others = np.delete(case.new_labels, SMALL.left_out)
    assert (others != np.delete(np.arange(10), SMALL.left_out)).all()
    assert SMALL.left_out not in others


def test_more_images_than_there_are(mnist):
    with pytest.raises(ValueError, match="1,500 images"):
        leave_out(replace(SMALL, scatter_rows=500), 0, StudyContext(mnist))
    with pytest.raises(ValueError, match="left_out"):
        leave_out(replace(SMALL, left_out=10), 0, StudyContext(mnist))


def test_fewer_clients_are_fewer_without_a_class_as_well(mnist):
    study = replace(SMALL, scatter_rows=20)
    for clients, expected in ((None, 3), (80, 3), (2, 2)):
        case = leave_out(replace(study, clients=clients), 0, StudyContext(mnist))
        assert len(case.encoded.dataset.names) == expected


def test_precision_of_the_encoder(tmp_path):
    (tmp_path / "weights").mkdir()
    file = tmp_path / "weights" / "resnet18_imagenet.safetensors"
    weights = ResNet18().state_dict()
    save_file({name: torch.zeros_like(value) for name, value in weights.items()}, file)
    for asked, used in {"auto": "float32", "float32": "float32", "bfloat16": "bfloat16"}.items():
        study = replace(SMALL, encoder="resnet18", encoder_dtype=asked, image_size=32)
        assert f" {used} " in study_encoder(study, tmp_path).name


# ---------------------------------------------------------------------- the choice of the density


@pytest.fixture(scope="module")
def chosen(tmp_path_factory, mnist):
    """The folder of a choice, the study with the chosen density, and the file of the choice."""
    folder = tmp_path_factory.mktemp("chosen")
    study = choose_density(TrialFolder(folder), SMALL, StudyContext(mnist))
    return folder, study, json.loads((folder / "density.json").read_text())


def test_the_density_is_chosen_by_missing_classes(chosen, mnist):
    _, study, record = chosen
    dataset = known_images(SMALL, 0, StudyContext(mnist))
    base = PixelEncoder()
    codes = {split: base.encode(dataset.split(split).inputs) for split in ("train", "validation")}
    direction = replace(SMALL, representation="direction")
    scores = {one["representation"]: one["auroc"] for one in record["tried"]}
    assert tuple(scores) == SMALL.representation_choices
    assert scores["direction"] == missing_class_auroc(direction, dataset, codes, base)
    assert study.representation == max(scores, key=lambda how: scores[how])
    assert (study.features, study.components, study.reg_covar) == (4, 2, 1e-2)


def test_a_missing_class_is_separated_from_the_others(rng):
    """The density is fitted without this class; otherwise all rows would score alike."""
    labels = np.repeat([0, 1, 2], 100)
    x = (8 * np.eye(3, 5)[labels] + rng.normal(size=(300, 5))).astype(np.float32)
    dataset = FederatedDataset.from_arrays(x, labels, np.arange(300) % 3)
    codes = {split: dataset.split(split).inputs for split in ("train", "validation")}
    assert missing_class_auroc(SMALL, dataset, codes, PixelEncoder()) > 0.99


def test_one_class_cannot_be_left_out(rng):
    x = rng.normal(size=(60, 5)).astype(np.float32)
    dataset = FederatedDataset.from_arrays(x, np.arange(60) % 2, np.arange(60) % 3)
    for split in ("train", "validation"):
        dataset.split(split).labels.fill_(0)
    codes = {split: dataset.split(split).inputs for split in ("train", "validation")}
    with pytest.raises(ValueError, match="more images"):
        missing_class_auroc(SMALL, dataset, codes, PixelEncoder())


def test_test_rows_and_novel_images_do_not_influence_the_choice(
    tmp_path, mnist, chosen, monkeypatch
):
    def without_test_rows(*args, **kwargs):
        dataset = known_images(*args, **kwargs)
        dataset.test.inputs.fill_(77)
        dataset.test.labels.fill_(0)
        return dataset

    monkeypatch.setattr(novelty_setup, "known_images", without_test_rows)
    monkeypatch.setattr(novelty_setup, "resized_about_centre", None)
    _, before, tried = chosen
    assert choose_density(TrialFolder(tmp_path), SMALL, StudyContext(mnist)) == before
    assert json.loads((tmp_path / "density.json").read_text()) == tried


def test_one_candidate_needs_no_choice(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "load_images", None)
    study = choose_density(TrialFolder(tmp_path), FIXED, StudyContext())
    assert study == replace(FIXED, representation="direction", features=4, components=2)
    assert not (tmp_path / "density.json").exists()


@pytest.fixture
def judged(monkeypatch):
    """Give candidates a score by hand, which depends on the seed, and list them."""
    candidates = []

    def score(study, *_):
        candidates.append(study.density)
        return 0.5 + 0.1 * study.seeds[0] + 0.01 * (study.representation == "direction")

    monkeypatch.setattr(novelty_setup, "missing_class_auroc", score)
    return candidates


@pytest.mark.usefixtures("judged")
def test_with_a_cache_the_clients_are_encoded_once_for_choice_and_training(
    tmp_path, mnist, monkeypatch
):
    encoded = []
    plain = PixelEncoder.encode

    def counted(self, images):
        encoded.append(len(images))
        return plain(self, images)

    monkeypatch.setattr(PixelEncoder, "encode", counted)
    lines = []
    context = StudyContext(mnist, tmp_path / "cache", lines.append)
    study = choose_density(TrialFolder(tmp_path), SMALL, context)
    assert sum(encoded) == 240
    assert "240 of 240 images are encoded" in lines
    assert len(encoded) == SMALL.clients  # an interruption costs one client at most
    encoded.clear()
    prepare_novelty(study, 0, context)
    prepare_novelty(replace(study, representation="plain"), 0, context)
    assert not encoded


def test_too_few_images_for_the_features(tmp_path, mnist):
    """A class is left out of each density, so there are fewer images than in training."""
    study = replace(SMALL, feature_choices=(140, 4))  # of 240 images 144 are training rows
    with pytest.raises(ValueError, match="140 principal components"):
        choose_density(TrialFolder(tmp_path), study, StudyContext(mnist))
    with pytest.raises(ValueError, match="200 principal components"):
        prepare_novelty(replace(FIXED, features=200), 0, StudyContext(mnist))


def test_an_interrupted_choice_resumes(tmp_path, mnist, chosen, monkeypatch):
    """After a stop before every candidate, none is judged twice."""
    folder, expected, record = chosen
    scores = {one["representation"]: one["auroc"] for one in record["tried"]}
    judged = []

    def until(most):
        def one_more(study, *_):
            if len(judged) == most:
                raise KeyboardInterrupt
            judged.append(study.density)
            return scores[study.representation]

        monkeypatch.setattr(novelty_setup, "missing_class_auroc", one_more)

    trials = TrialFolder(tmp_path)
    for most in range(len(scores)):
        until(most)
        with pytest.raises(KeyboardInterrupt):
            choose_density(trials, SMALL, StudyContext(mnist))
    until(len(scores))
    assert choose_density(trials, SMALL, StudyContext(mnist)) == expected
    assert len(judged) == len(scores) == 2
    assert (tmp_path / "density.json").read_text() == (folder / "density.json").read_text()


def test_candidates_that_another_seed_judged_are_judged_again(tmp_path, mnist, judged):
    other = replace(SMALL, seeds=(1,))
    for name, studies in {"fresh": [other], "used": [SMALL, other]}.items():
        (tmp_path / name).mkdir()
        for study in studies:
            (tmp_path / name / "density.json").unlink(missing_ok=True)
            choose_density(TrialFolder(tmp_path / name), study, StudyContext(mnist))
    fresh, used = ((tmp_path / name / "density.json").read_text() for name in ("fresh", "used"))
    assert fresh == used
    assert len(judged) == 6
