"""Features of images for the Gaussians: encoders, the cache, and federated PCA on training rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn import decomposition
from torch.nn import functional

from fedgmm.data.dataset import SPLITS, FederatedDataset
from fedgmm.data.embeddings import (
    encode_federation,
    encode_images,
    federated_pca,
    with_features,
)
from fedgmm.data.encoders import NetworkEncoder, PixelEncoder, ResNet18Encoder, encoder
from fedgmm.nets.backbones import ResNet18, WeightsError
from fedgmm.training.in_process import train


def bytes_of(rng, n=10, channels=3, size=6):
    return rng.integers(256, size=(n, channels, size, size), dtype=np.uint8)


def encode(own, images):
    return own.encode(torch.from_numpy(images)).numpy()


def cached(images, own, cache=None):
    return encode_images(torch.from_numpy(images), own, cache).numpy()


@pytest.fixture(scope="module")
def module():
    """A network with weights that only a test may use."""
    torch.manual_seed(5)
    module = ResNet18(None).eval()
    for name, value in module.state_dict().items():
        if name.endswith(("running_mean", "bn2.bias")):
            value.normal_(std=0.2)
    return module


@pytest.fixture(scope="module")
def folder(module, tmp_path_factory):
    """A data folder with its weights."""
    home = tmp_path_factory.mktemp("data")
    (home / "weights").mkdir()
    save_file(module.state_dict(), home / "weights" / "resnet18_imagenet.safetensors")
    return home


@pytest.fixture(scope="module")
def weights(folder):
    return folder / "weights" / "resnet18_imagenet.safetensors"


@pytest.fixture(scope="module")
def resnet(weights):
    return ResNet18Encoder(weights, size=32, device="cpu", batch_size=4)


# ---------------------------------------------------------------------- encoders


def test_pixels_are_scaled_to_one(rng):
    images = bytes_of(rng)
    images[0, 0, 0, 0] = 255
    rows = encode(PixelEncoder(), images)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, images.reshape(10, -1).astype(np.float32) / 255)
    assert rows[0, 0] == 1.0


def by_hand(module, images, size, antialias=False):
    mean = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)
    deviation = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)
    x = torch.from_numpy(images).float() / 255
    x = functional.interpolate(x, (size, size), mode="bilinear", antialias=antialias)
    with torch.no_grad():
        return module((x - mean) / deviation).numpy()


def test_resnet_sees_resized_and_normalised_images(rng, resnet, module):
    images = bytes_of(rng, size=12)
    rows = encode(resnet, images)
    assert rows.shape == (10, 512)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, by_hand(module, images, 32), atol=1e-4, rtol=1e-4)
    assert rows.std(0).max() > 0.01  # the images differ, and the rows show it


def test_images_that_shrink_are_smoothed(rng, resnet, module):
    images = bytes_of(rng, n=2, size=100)
    expected = by_hand(module, images, 32, antialias=True)
    np.testing.assert_allclose(encode(resnet, images), expected, atol=1e-4, rtol=1e-4)


def test_grey_images_count_as_three_equal_channels(rng, resnet):
    grey = bytes_of(rng, channels=1)
    np.testing.assert_array_equal(encode(resnet, grey), encode(resnet, np.repeat(grey, 3, axis=1)))


def test_batches_and_company_do_not_matter(rng, resnet, module):
    images = bytes_of(rng)
    rows = encode(resnet, images)
    np.testing.assert_allclose(rows[7:8], encode(resnet, images[7:8]), atol=1e-4, rtol=1e-4)
    usual = NetworkEncoder(module, "resnet18", size=32, device="cpu")
    assert usual.batch_size == 64
    np.testing.assert_allclose(rows, encode(usual, images), atol=1e-4, rtol=1e-4)
    np.testing.assert_array_equal(rows, encode(resnet, images))  # frozen: no statistic has moved


def test_bfloat16_is_near(rng, resnet, module):
    images = bytes_of(rng, n=2)
    own = NetworkEncoder(module, "resnet18", size=32, device="cpu", dtype="bfloat16")
    half = encode(own, images)
    full = encode(resnet, images)
    assert half.dtype == np.float32
    assert 0 < np.abs(half - full).max() < 0.1 * np.abs(full).max()


def test_no_images_give_no_rows(resnet):
    assert encode(resnet, np.empty((0, 3, 8, 8), dtype=np.uint8)).shape == (0, 512)


def test_the_name_depends_on_weights_size_and_precision(weights, resnet, tmp_path):
    one_changed = load_file(weights)
    one_changed["bn1.bias"] += 1e-3
    save_file(one_changed, tmp_path / "other.safetensors")
    other = ResNet18Encoder(tmp_path / "other.safetensors", size=32, device="cpu")
    assert other.name.split()[:-1] == resnet.name.split()[:-1] == ["resnet18", "32px", "float32"]
    assert other.name != resnet.name
    settings = ({}, {"size": 33}, {"dtype": "bfloat16"}, {"batch_size": 9})
    names = [
        NetworkEncoder(torch.nn.Identity(), "resnet18 5f", device="cpu", **own).name
        for own in settings
    ]
    assert len(set(names)) == 3
    assert names[3] == names[0]


@pytest.mark.parametrize(
    "images",
    [np.zeros((2, 3, 4, 4)), np.zeros((2, 3, 4), dtype=np.uint8), np.zeros((2, 48), np.float32)],
)
@pytest.mark.parametrize("kind", ["pixels", "resnet18"])
def test_only_bytes_are_images(kind, images, resnet):
    with pytest.raises(ValueError, match="uint8"):
        encode(resnet if kind == "resnet18" else PixelEncoder(), images)


def test_two_channels_are_refused(rng, resnet):
    with pytest.raises(ValueError, match="channels"):
        encode(resnet, bytes_of(rng, channels=2))


# ---------------------------------------------------------------------- encoders by name


def test_encoders_by_name(folder, resnet, monkeypatch):
    assert encoder("pixels").name == "pixels"
    monkeypatch.setenv("FEDGMM_DATA", str(folder))
    assert encoder("resnet18", size=32, device="cpu").name == resnet.name
    with pytest.raises(ValueError, match="vgg"):
        encoder("vgg")


def test_without_weights_there_is_an_error_that_offers_pixels(tmp_path, monkeypatch):
    with pytest.raises(WeightsError, match="'pixels'") as caught:
        encoder("resnet18", tmp_path)
    assert str(tmp_path / "weights" / "resnet18_imagenet.safetensors") in str(caught.value)
    monkeypatch.delenv("FEDGMM_DATA", raising=False)
    with pytest.raises(WeightsError, match=r"FEDGMM_DATA.*resnet18_imagenet.*'pixels'"):
        encoder("resnet18")
    with pytest.raises(WeightsError, match="pretrained"):
        ResNet18Encoder(None)


def test_broken_weights_are_an_error_too(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "resnet18_imagenet.safetensors").write_bytes(b"nonsense")
    with pytest.raises(WeightsError, match="'pixels'"):
        encoder("resnet18", tmp_path)


# ---------------------------------------------------------------------- the cache


class Counting:
    """A user's encoder: means and maxima of the channels; it counts the images it has seen."""

    def __init__(self, name="counting"):
        self.name, self.seen = name, 0

    def encode(self, images):
        self.seen += len(images)
        flat = images.flatten(2).float()
        return torch.cat([flat.mean(2), flat.amax(2)], dim=1)


def test_images_are_encoded_once_in_any_order(rng, tmp_path):
    images, own = bytes_of(rng), Counting()
    rows = cached(images, own, tmp_path / "cache")
    np.testing.assert_array_equal(rows, encode(Counting(), images))
    order = rng.permutation(10)
    again = cached(images[order], own, tmp_path / "cache")
    np.testing.assert_array_equal(again, rows[order])
    assert own.seen == 10
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_repeated_images_are_encoded_once(rng):
    images, own = bytes_of(rng, n=3), Counting()
    rows = cached(images[[0, 1, 0, 2, 1]], own)
    np.testing.assert_array_equal(rows, encode(Counting(), images)[[0, 1, 0, 2, 1]])
    assert own.seen == 3


def test_other_images_shapes_or_encoders_are_another_file(rng, tmp_path):
    images = bytes_of(rng, n=4, channels=1, size=4)
    own = Counting()
    cached(images, own, tmp_path)
    changed = images.copy()
    changed[2, 0, 3, 3] ^= 1
    for other in (changed, images[:3], images.reshape(4, 1, 2, 8)):
        before = own.seen
        cached(other, own, tmp_path)
        assert own.seen == before + len(other)
    stranger = Counting("another")
    cached(images, stranger, tmp_path)
    assert stranger.seen == 4


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "nonsense", "rows", "keys"])
def test_a_damaged_cache_is_computed_and_written_again(rng, tmp_path, damage):
    images, own = bytes_of(rng), Counting()
    rows = cached(images, own, tmp_path)
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[-60] ^= 1
    if damage == "rows":
        save_file({"codes": torch.zeros(3, 6), "sha256": torch.zeros(32, dtype=torch.uint8)}, file)
    elif damage == "keys":
        save_file({"rows": torch.from_numpy(rows)}, file)
    else:
        cut = {"empty": b"", "cut": data[:-7], "flipped": data, "nonsense": b"x" * 500}
        file.write_bytes(cut[damage])
    np.testing.assert_array_equal(cached(images, own, tmp_path), rows)
    assert own.seen == 20
    np.testing.assert_array_equal(cached(images, own, tmp_path), rows)
    assert own.seen == 20  # the file is whole again


def test_a_cache_that_cannot_be_written_costs_only_time(rng, tmp_path):
    (tmp_path / "file").write_text("in the way")
    images = bytes_of(rng)
    with pytest.warns(UserWarning, match="kept"):
        rows = cached(images, Counting(), tmp_path / "file")
    np.testing.assert_array_equal(rows, encode(Counting(), images))


@pytest.mark.parametrize(
    ("rows", "word"),
    [(torch.zeros(10), "shape"), (torch.full((10, 2), torch.nan), "NaN")],
)
def test_an_encoder_that_misbehaves_is_named(rng, tmp_path, rows, word):
    own = Counting("odd")
    own.encode = lambda images: rows
    with pytest.raises(ValueError, match=f"'odd'.*{word}"):
        cached(bytes_of(rng), own, tmp_path)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- federations


def cameras(rng, sizes=(30, 1, 17, 42), size=4, seed=0):
    """Clients with photographs of different brightness; one has a single one."""
    names = ["rome", "oslo", "bonn", "kiev"][: len(sizes)]
    ids = np.repeat(names, sizes)
    images = bytes_of(rng, n=len(ids), channels=1, size=size) // 2
    images += np.repeat(np.arange(len(sizes), dtype=np.uint8) * 20, sizes)[:, None, None, None]
    mixed = rng.permutation(len(ids))
    labels = (images.mean((1, 2, 3)) > images.mean()).astype(int)
    return FederatedDataset.from_arrays(images[mixed], labels[mixed], ids[mixed], seed=seed)


def seen(rows):
    return torch.cat(rows.features.chunks).numpy()


def pixels(rows):
    return rows.inputs.numpy().reshape(len(rows), -1).astype(np.float64) / 255


@pytest.mark.parametrize("whiten", [False, True])
def test_features_are_the_pca_of_the_pooled_training_rows(rng, whiten):
    data = cameras(rng)
    encoded = encode_federation(data, PixelEncoder(), components=5, whiten=whiten)
    pooled = decomposition.PCA(5, whiten=whiten, svd_solver="full").fit(pixels(data.train))
    signs = np.sign((pooled.components_ * encoded.feature_map.pca.components.numpy()).sum(1))
    for name in SPLITS:
        rows = encoded.dataset.split(name)
        assert seen(rows).dtype == np.float32
        assert not rows.features_are_inputs
        expected = pooled.transform(pixels(data.split(name))) * signs
        np.testing.assert_allclose(seen(rows), expected, atol=1e-5)
        # the learners see what they saw, and rows are whose they were
        assert torch.equal(rows.inputs, data.split(name).inputs)
        assert torch.equal(rows.labels, data.split(name).labels)
        assert torch.equal(rows.codes, data.split(name).codes)
        assert rows.names == data.names


def test_48_features_are_the_default(rng):
    data = cameras(rng, sizes=(60, 60), size=8)
    assert encode_federation(data, PixelEncoder()).dataset.train.features.columns == 48


def test_scaled_features_keep_their_proportions(rng):
    data = cameras(rng)
    plain = seen(encode_federation(data, PixelEncoder(), components=5).dataset.train)
    scaled = seen(encode_federation(data, PixelEncoder(), components=5, scale=True).dataset.train)
    np.testing.assert_allclose(scaled * plain[:, 0].std(ddof=1), plain, rtol=1e-4, atol=1e-6)
    assert scaled[:, 0].std(ddof=1) == pytest.approx(1, rel=1e-5)
    assert scaled[:, 4].std(ddof=1) < 0.9


def test_clients_sums_are_enough(rng):
    """One client at a time, in any order, and a client without rows: the pooled components."""
    clients = [torch.from_numpy(rng.normal(size=(n, 6)) + 1e6) for n in (5, 0, 20, 9)]
    pooled = decomposition.PCA(3, svd_solver="full").fit(torch.cat(clients).numpy())
    for order in ([0, 1, 2, 3], [2, 3, 1, 0]):
        pca = federated_pca([clients[k] for k in order], 3)
        np.testing.assert_allclose(pca.variances, pooled.explained_variance_, rtol=1e-8)
        np.testing.assert_allclose(pca.mean, pooled.mean_, rtol=1e-12)


def test_validation_and_test_rows_have_no_say(rng):
    data = cameras(rng)
    other = cameras(np.random.default_rng(99))
    mixed = FederatedDataset(data.train, other.validation, other.test, data.names, data.classes)
    first = encode_federation(data, PixelEncoder(), components=3).feature_map.pca
    second = encode_federation(mixed, PixelEncoder(), components=3).feature_map.pca
    assert torch.equal(first.components, second.components)
    assert torch.equal(first.mean, second.mean)


def test_a_client_is_encoded_once_for_any_split(tmp_path):
    own, calls = Counting(), []
    data = cameras(np.random.default_rng(4))
    first = encode_federation(
        data,
        own,
        components=2,
        cache=tmp_path,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert own.seen == 90
    assert len(list(tmp_path.iterdir())) == 4  # one file per client
    assert calls == [(17, 90), (59, 90), (60, 90), (90, 90)]
    again = encode_federation(data, own, components=2, cache=tmp_path)
    resplit = cameras(np.random.default_rng(4), seed=1)
    encode_federation(resplit, own, components=2, cache=tmp_path)
    assert own.seen == 90
    np.testing.assert_array_equal(seen(first.dataset.test), seen(again.dataset.test))


def test_unseen_clients_get_the_features_of_those_who_trained(rng):
    data = cameras(rng)
    encoded = encode_federation(data.select(["rome", "kiev"]), PixelEncoder(), components=4)
    unseen = data.select(["bonn", "oslo"])
    attached = encoded.feature_map.attach(unseen)
    for name in SPLITS:
        rows = attached.split(name)
        images = unseen.split(name).inputs.numpy()
        np.testing.assert_allclose(seen(rows), encoded.feature_map(images), atol=1e-6)
        assert rows.names == ("bonn", "oslo")


def test_resnet_features_train_a_model(rng, resnet, tmp_path):
    data = cameras(rng, sizes=(12, 1, 7, 12), size=8)
    encoded = encode_federation(data, resnet, components=3, scale=True, cache=tmp_path)
    model = train(
        encoded.dataset,
        "fedgmm",
        components=2,
        learners=1,
        learner="linear",
        rounds=2,
        reg_covar=1e-2,
    )
    images = data.test.inputs.numpy()
    chances = model.predict_proba(images, "rome", features=encoded.feature_map(images))
    assert chances.shape == (len(images), 2)
    np.testing.assert_allclose(chances.sum(1), 1, atol=1e-6)


def test_a_federation_without_images_is_an_error(rng):
    data = FederatedDataset.from_arrays(rng.normal(size=(20, 4)), np.arange(20) % 2)
    with pytest.raises(ValueError, match="uint8"):
        encode_federation(data, PixelEncoder(), components=2)


def test_too_many_components_are_an_error(rng):
    with pytest.raises(ValueError, match="components=48"):
        encode_federation(cameras(rng), PixelEncoder())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda f: f.update(test=f["test"][1:]), "'test'.*matrix"),
        (lambda f: f.update(train=f["train"][:, 0]), "'train'.*matrix"),
        (lambda f: f.update(validation=f["validation"][:, :1]), "column"),
        (lambda f: f["test"].fill_(torch.inf), "infinity"),
    ],
)
def test_features_must_fit_the_rows(rng, change, word):
    data = cameras(rng)
    features = {name: torch.ones(len(data.split(name)), 2) for name in SPLITS}
    assert with_features(data, **features).train.features.columns == 2
    change(features)
    with pytest.raises(ValueError, match=word):
        with_features(data, **features)
