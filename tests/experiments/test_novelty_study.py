"""Novel images in little: what makes them novel, how they are scored, and that nothing peeks at them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedgmm.core.backbones import ResNet18
from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.encoder import PixelEncoder, ResNet18Encoder
from fedgmm.data.federated_images import federated_images
from fedgmm.data.images import load_images
from fedgmm.data.partition import transform_images
from fedgmm.experiments import classification, novelty
from fedgmm.experiments.novelty import (
    REPRESENTATIONS,
    NoveltyStudy,
    Represented,
    StageEncoder,
    changed_separately,
    choose_density,
    deal_images,
    familiarity,
    leave_out,
    missing_class_auroc,
    novel_images,
    other_labels,
    represented,
    reproduce_novelty,
    resized_about_centre,
    slightly_changed,
    with_study_features,
)
from fedgmm.experiments.results import TITLES
from fedgmm.training import train
from tiny_images import FAST, write_mnist

NAME = "novelty-mnist-tuned"
SMALL = NoveltyStudy(
    track="tuned",
    clients=4,
    representation_choices=("plain", "direction"),
    feature_choices=(4,),
    component_choices=(2,),
    reg_covar_choices=(1e-2,),
    scatter_clients=3,
    scatter_rows=30,
    **FAST,
)
FIXED = replace(SMALL, representation_choices=("direction",))


@pytest.fixture
def data(tmp_path, monkeypatch):
    write_mnist(tmp_path / "data", monkeypatch)
    return tmp_path / "data"


def auroc_by_counting(known, novel):
    """How often a novel row scores below a known one; ties count half."""
    below = (novel[:, None] < known).mean()
    return below + 0.5 * (novel[:, None] == known).mean()


# ---------------------------------------------------------------------- images


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


def test_half_the_size_is_the_mean_of_four_pixels_but_for_smoothing():
    images = np.zeros((1, 1, 28, 28), dtype=np.uint8)
    images[..., 8:20, 4:16] = 200
    small = resized_about_centre(images, 0.5)[0, 0]
    blocks = images[0, 0].reshape(14, 2, 14, 2).mean((1, 3))
    flat = np.abs(small[7:21, 7:21] - blocks)
    assert flat.max() <= 48  # an eighth of the step leaks over each edge
    assert (small[12:16, 10:14] == 200).all()


def centre_of(image):
    """Line and column of the bright pixels' middle, counted from the middle of the image."""
    return [float(places.mean()) - 13.5 for places in np.nonzero(image > 100)]


def test_novel_images_are_turned_and_flipped():
    images = np.zeros((1, 1, 28, 28), dtype=np.uint8)
    images[0, 0, 4:8, 16:20] = 255
    assert centre_of(images[0, 0]) == [-8, 4]
    # turned against the clock: 4 above, 8 to the left; flipped: to the right; at half the distance
    assert centre_of(novel_images(images)[0, 0]) == [-2, 4]
    changed = centre_of(slightly_changed(images)[0, 0])  # not flipped
    np.testing.assert_allclose(changed, [-4 * 22 / 28, -8 * 22 / 28], atol=0.5)


def test_other_sizes_are_refused():
    with pytest.raises(ValueError, match="scale must lie above 0"):
        resized_about_centre(np.zeros((1, 1, 4, 4), dtype=np.uint8), 1.5)


def test_other_labels_are_other_for_every_class(rng):
    for classes in (2, 5, 10):
        for _ in range(20):
            renamed = other_labels(classes, rng)
            assert sorted(renamed) == list(range(classes))
            assert (renamed != np.arange(classes)).all()


def test_representations(rng):
    codes = rng.normal(size=(6, 5)).astype(np.float32)
    codes[0] = 0
    direction = represented(codes, "direction")
    np.testing.assert_allclose(np.linalg.norm(direction[1:], axis=1), 1, rtol=1e-6)
    both = represented(codes, "direction and length")
    # nothing is lost
    np.testing.assert_allclose(both[:, :-1] * np.exp(both[:, -1:]), codes, atol=1e-6)
    np.testing.assert_array_equal(represented(codes, "plain"), codes)
    # of two stages
    np.testing.assert_array_equal(represented(codes, "plain", (2, 3)), codes[:, 2:])
    np.testing.assert_array_equal(
        represented(codes, "direction", (2, 3)), represented(codes[:, 2:], "direction")
    )
    how = "direction and length"
    np.testing.assert_array_equal(
        represented(codes, "stages", (2, 3)),
        np.hstack([represented(codes[:, :2], how), represented(codes[:, 2:], how)]),
    )
    np.testing.assert_array_equal(represented(codes, "stages"), represented(codes, how))
    assert all(np.isfinite(represented(codes, how)).all() for how in REPRESENTATIONS)


def test_a_representation_has_a_name_of_its_own():
    """Or the cache would take one for the other."""
    base = PixelEncoder()
    assert len({base.name, *(Represented(base, how).name for how in REPRESENTATIONS)}) == 5


def test_stages_of_the_network(rng, tmp_path):
    torch.manual_seed(0)
    network = ResNet18(classes=10)
    save_file(dict(network.state_dict()), tmp_path / "weights.safetensors")
    base = ResNet18Encoder(tmp_path / "weights.safetensors", size=32, device="cpu")
    images = rng.integers(256, size=(3, 1, 28, 28)).astype(np.uint8)
    stages = StageEncoder(base)
    found = stages.encode(images)
    assert found.shape == (3, sum(stages.widths))
    np.testing.assert_allclose(found[:, -512:], base.encode(images), rtol=1e-5, atol=1e-6)
    assert stages.name != base.name
    seen = {}
    for name in ("layer2", "layer3"):
        getattr(base._network, name).register_forward_hook(
            lambda _, __, out, name=name: seen.update({name: out.mean((2, 3)).numpy()})
        )
    base.encode(images)
    np.testing.assert_allclose(found[:, :128], seen["layer2"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[:, 128:384], seen["layer3"], rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- federations


def test_a_quarter_is_transformed_and_another_relabelled(data):
    images = load_images("mnist", data)
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
def test_what_clients_know(data, changes, share):
    dataset = deal_images(replace(SMALL, changes=changes), 0, data)
    inverted = [
        int((dataset.split(split).inputs[:, 0, 0, 0] == 255).sum())
        for split in ("train", "validation", "test")
    ]
    assert sum(inverted) == 240 * share


def test_the_class_that_is_left_out_is_nowhere(data):
    case = leave_out(SMALL, 0, data)
    dataset = case.encoded.dataset
    assert len(dataset.names) == 3
    sizes = sum(dataset.split(s).features.rows_per_client for s in ("train", "validation", "test"))
    assert sizes.tolist() == [30, 30, 30]
    images = load_images("mnist", data)
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


# ---------------------------------------------------------------------- scores


@pytest.mark.parametrize("method", list(TITLES))
def test_scores_by_hand(data, method):
    federation = with_study_features(FIXED, deal_images(FIXED, 0, data), data, None)
    model = train(federation.dataset, options=FIXED.options(method, 0))
    rows = federation.dataset.test
    images = rows.inputs.numpy()
    features = torch.cat(rows.features.chunks).numpy()
    found = familiarity(model, images, features)
    if method == "fedgmm":
        expected = model.score_samples(images, features=features)
    elif method in ("fedavg", "fedprox"):
        expected = np.log(model.predict_proba(images).max(-1))
    else:
        by_client = [model.predict_proba(images, client).max(-1) for client in model.names]
        assert len({tuple(own) for own in by_client}) > 1 or method in ("clustered", "fedem")
        expected = np.log(np.max(by_client, axis=0))
    np.testing.assert_allclose(found, expected, atol=1e-6)


# ---------------------------------------------------------------------- the density


def test_the_density_is_chosen_by_classes_that_are_missing(tmp_path, data):
    chosen = choose_density(tmp_path, SMALL, data)
    record = json.loads((tmp_path / "density.json").read_text())
    dataset = deal_images(SMALL, 0, data)
    base = PixelEncoder()
    codes = {
        split: base.encode(dataset.split(split).inputs.numpy()) for split in ("train", "validation")
    }
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
    codes = {split: dataset.split(split).inputs.numpy() for split in ("train", "validation")}
    auroc = missing_class_auroc(SMALL, dataset, codes, PixelEncoder())
    assert auroc > 0.99


def test_test_rows_and_novel_images_have_no_part_in_the_choice(tmp_path, data, monkeypatch):
    (tmp_path / "first").mkdir()
    before = choose_density(tmp_path / "first", SMALL, data)
    tried = json.loads((tmp_path / "first" / "density.json").read_text())

    def without_test_rows(*args, **kwargs):
        dataset = deal_images(*args, **kwargs)
        dataset.test.inputs.fill_(77)
        dataset.test.labels.fill_(0)
        return dataset

    monkeypatch.setattr(novelty, "deal_images", without_test_rows)
    monkeypatch.setattr(novelty, "novel_images", None)
    (tmp_path / "second").mkdir()
    assert choose_density(tmp_path / "second", SMALL, data) == before
    assert json.loads((tmp_path / "second" / "density.json").read_text()) == tried


def test_with_one_candidate_there_is_nothing_to_choose(tmp_path, monkeypatch):
    monkeypatch.setattr(novelty, "load_images", None)
    chosen = choose_density(tmp_path, FIXED, None)
    assert chosen == replace(FIXED, representation="direction", features=4, components=2)
    assert not (tmp_path / "density.json").exists()


# ---------------------------------------------------------------------- the study


def test_table_and_figures(tmp_path, data, monkeypatch):
    study = replace(FIXED, methods=("fedavg", "fedem", "fedgmm"))
    outcome = reproduce_novelty(tmp_path / "out", study, data_dir=data)
    trials = tmp_path / "out" / NAME
    for method, metrics in outcome.metrics.items():
        with np.load(trials / f"{method}-0.npz") as scores:
            counted = auroc_by_counting(scores["known"], scores["novel"])
            assert len(scores["known"]) == len(scores["novel"])
        assert metrics["auroc"][0] == pytest.approx(counted, abs=1e-6)
    with np.load(trials / "left-out-0.npz") as scores:
        assert outcome.left_out["class 1, log P(x)"] == pytest.approx(
            auroc_by_counting(scores["normal_x"], scores["stranger_x"])
        )
        assert outcome.left_out["other labels, log P(y|x)"] == pytest.approx(
            auroc_by_counting(scores["normal_y"], scores["relabelled_y"])
        )
    with np.load(trials / "fedgmm-0.npz") as scores:
        joint = auroc_by_counting(
            scores["known"] + scores["known_y"], scores["changed_x"] + scores["changed_x_y"]
        )
        assert outcome.perturbed["changed images, log P(x, y)"] == pytest.approx(joint, abs=1e-3)

    table = (tmp_path / "out" / f"{NAME}.md").read_text()
    assert "99.21 / 99.60 / 99.49" in table
    for line in table.splitlines():
        if line.startswith("| "):
            assert line.replace("\\|", "").count("|") in (3, 6), line  # no cell is torn
    record = json.loads((tmp_path / "out" / f"{NAME}.json").read_text())
    assert record["chosen"]["representation"] == "direction"
    pictures = sorted((tmp_path / "out").glob("*.png"))
    assert [picture.stem.removeprefix(f"{NAME}-") for picture in pictures] == [
        "left-out",
        "likelihoods",
        "perturbed",
        "relabelled",
    ]
    assert all(3_000 < picture.stat().st_size < 150_000 for picture in pictures)

    monkeypatch.setattr(classification, "train", None)
    monkeypatch.setattr(novelty, "load_images", None)
    assert reproduce_novelty(tmp_path / "out", study, data_dir=data) == outcome


def test_what_is_scored(tmp_path, data):
    study = replace(FIXED, methods=("fedgmm",))
    outcome = reproduce_novelty(tmp_path, study, data_dir=data)
    chosen = choose_density(tmp_path, study, data)
    federation = with_study_features(chosen, deal_images(chosen, 0, data), data, None)
    options = replace(chosen.options("fedgmm", 0), lr=outcome.details[0]["lr"])
    model = train(federation.dataset, options=options)
    images = federation.dataset.test.inputs.numpy()
    with np.load(tmp_path / NAME / "fedgmm-0.npz") as scores:
        for name, changed in (
            ("known", images),
            ("novel", novel_images(images)),
            ("changed_x", slightly_changed(images)),
        ):
            expected = model.score_samples(changed, features=federation.feature_map(changed))
            np.testing.assert_allclose(scores[name], expected, rtol=1e-4, atol=1e-3)
        labels = federation.dataset.test.labels.numpy()
        features = federation.feature_map(images)
        expected = model.log_conditional(images, labels, features=features)
        np.testing.assert_allclose(scores["known_y"], expected, rtol=1e-4, atol=1e-3)
        assert not np.allclose(scores["relabelled_y"], expected, atol=1e-2)


def test_a_class_nobody_knew_is_found(data, tmp_path):
    """Its bar lies where no other has one."""
    outcome = reproduce_novelty(
        tmp_path, replace(FIXED, methods=("fedgmm",), rounds=4), data_dir=data
    )
    assert outcome.left_out["class 1, log P(x)"] > 0.95


def test_baselines_alone(tmp_path, data):
    study = replace(SMALL, methods=("local",))
    outcome = reproduce_novelty(tmp_path, study, data_dir=data)
    assert list(outcome.metrics) == ["local"]
    assert not outcome.left_out
    assert not (tmp_path / NAME / "density.json").exists()
    assert not list(tmp_path.glob("*.png"))


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


def test_more_images_than_there_are(data):
    with pytest.raises(ValueError, match=r"3 clients with 500 images need 1,500 images, but there"):
        leave_out(replace(SMALL, scatter_rows=500), 0, data)
    with pytest.raises(ValueError, match="left_out must be below the 10 classes"):
        leave_out(replace(SMALL, left_out=10), 0, data)
