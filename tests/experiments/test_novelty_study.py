"""The settings of the study on novel images, and who knows what in its federations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_novelty import SMALL

from fedgmm.data.images.federated import federated_images
from fedgmm.data.images.files import load_images
from fedgmm.data.partition import transform_images
from fedgmm.experiments.novelty_study import (
    NoveltyStudy,
    changed_separately,
    deal_images,
    leave_out,
    study_encoder,
)
from fedgmm.experiments.workplace import Workplace
from fedgmm.nets.backbones import ResNet18


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
def test_what_clients_know(mnist, changes, share):
    dataset = deal_images(replace(SMALL, changes=changes), 0, Workplace(mnist))
    inverted = [
        int((dataset.split(split).inputs[:, 0, 0, 0] == 255).sum())
        for split in ("train", "validation", "test")
    ]
    assert sum(inverted) == 240 * share


def test_the_class_that_is_left_out_is_nowhere(mnist):
    case = leave_out(SMALL, 0, Workplace(mnist))
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
    with pytest.raises(ValueError, match=r"3 clients with 500 images each 1,500 images are needed"):
        leave_out(replace(SMALL, scatter_rows=500), 0, Workplace(mnist))
    with pytest.raises(ValueError, match="left_out must be below the 10 classes"):
        leave_out(replace(SMALL, left_out=10), 0, Workplace(mnist))


def test_fewer_clients_are_fewer_in_the_training_without_a_class(mnist):
    study = replace(SMALL, scatter_rows=20)
    for clients, expected in ((None, 3), (80, 3), (2, 2)):
        case = leave_out(replace(study, clients=clients), 0, Workplace(mnist))
        assert len(case.encoded.dataset.names) == expected


@pytest.mark.parametrize(
    ("asked", "used"), [("auto", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")]
)
def test_the_encoder_has_the_precision_that_was_asked_for(tmp_path, asked, used):
    torch.manual_seed(0)
    (tmp_path / "weights").mkdir()
    file = tmp_path / "weights" / "resnet18_imagenet.safetensors"
    save_file(dict(ResNet18().state_dict()), file)
    study = replace(SMALL, encoder="resnet18", encoder_dtype=asked, image_size=32)
    assert f" {used} " in study_encoder(study, tmp_path).name


def test_what_is_tried_for_the_density():
    seen, sizes = SMALL.density_choices
    assert seen == [
        {"representation": "plain", "features": 4},
        {"representation": "direction", "features": 4},
    ]
    assert sizes == [{"components": 2, "reg_covar": 0.01}]
    assert SMALL.density_is_chosen


def test_an_empty_choice_is_the_study_s_own_value():
    """And takes nothing from the choice beside it."""
    study = replace(SMALL, representation_choices=("direction",), feature_choices=(), features=7)
    study = replace(study, component_choices=(), components=5, reg_covar_choices=(0.1,))
    assert study.density_choices == (
        [{"representation": "direction", "features": 7}],
        [{"components": 5, "reg_covar": 0.1}],
    )
    assert not study.density_is_chosen


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"changes": "all"}, "changes must be one of"),
        ({"representation": "round"}, "representation must be one of"),
        ({"representation_choices": ("round",)}, "representation must be one of"),
        ({"left_out": -1}, "left_out must be at least 0"),
        ({"scatter_rows": 0}, "scatter_rows must be at least 1"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ValueError, match=message):
        NoveltyStudy(**change)
