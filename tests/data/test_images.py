"""Image files are read as their makers wrote them, and what is wrong with one is named."""

from __future__ import annotations

import gzip
import json
import os

import numpy as np
import pytest

from fedgmm.data.images import files as images
from fedgmm.data.images.files import (
    DamagedFileError,
    ImageData,
    ImageFileError,
    MissingFileError,
    load_images,
)

ROWS = {"train": 5, "t10k": 3}


def write_idx(path, array, magic=None):
    header = np.array([magic or 0x800 + array.ndim, *array.shape], dtype=">u4").tobytes()
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def mnist(tmp_path, rng, monkeypatch):
    """A data folder with MNIST in little; returns the pooled images and labels."""
    monkeypatch.setattr(images, "_MNIST_ROWS", ROWS)
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    pictures, labels = [], []
    for part, rows in ROWS.items():
        pictures.append(rng.integers(256, size=(rows, 28, 28)).astype(np.uint8))
        labels.append(rng.integers(10, size=rows))
        write_idx(raw / f"{part}-images-idx3-ubyte.gz", pictures[-1])
        write_idx(raw / f"{part}-labels-idx1-ubyte", labels[-1])
    return np.concatenate(pictures), np.concatenate(labels)


@pytest.fixture
def cifar10(tmp_path, rng, monkeypatch):
    rows = {"data_batch_1.bin": 4, "test_batch.bin": 3}
    monkeypatch.setattr(images, "_CIFAR10_ROWS", rows)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    pictures = rng.integers(256, size=(7, 3, 32, 32)).astype(np.uint8)
    labels = rng.integers(10, size=7)
    records = np.concatenate([labels[:, None].astype(np.uint8), pictures.reshape(7, -1)], axis=1)
    for name, part in zip(rows, np.split(records, [4]), strict=True):
        part.tofile(folder / name)
    return pictures, labels


@pytest.fixture
def cifar100(tmp_path, rng, monkeypatch):
    rows = {"train.bin": 4, "test.bin": 2}
    monkeypatch.setattr(images, "_CIFAR100_ROWS", rows)
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    pictures = rng.integers(256, size=(6, 3, 32, 32)).astype(np.uint8)
    fine = np.array([0, 99, 7, 7, 20, 0])
    coarse = fine // 5
    heads = np.stack([coarse, fine], axis=1).astype(np.uint8)
    records = np.concatenate([heads, pictures.reshape(6, -1)], axis=1)
    for name, part in zip(rows, np.split(records, [4]), strict=True):
        part.tofile(folder / name)
    (folder / "fine_label_names.txt").write_text("\n".join(f"thing_{k}" for k in range(100)) + "\n")
    return pictures, coarse, fine


# ---------------------------------------------------------------------- the formats


def test_mnist_packed_or_not_is_pooled(tmp_path, mnist):
    data = load_images("mnist", tmp_path)
    pictures, labels = mnist
    assert data.images.shape == (8, 1, 28, 28)
    np.testing.assert_array_equal(data.images[:, 0], pictures)
    np.testing.assert_array_equal(data.labels, labels)
    assert data.images.dtype == np.uint8
    assert data.labels.dtype == np.int64


def test_cifar_planes_become_channels(tmp_path, cifar10):
    data = load_images("cifar10", tmp_path)
    pictures, labels = cifar10
    np.testing.assert_array_equal(data.images, pictures)
    np.testing.assert_array_equal(data.labels, labels)
    # by hand, from the file: after the label 1024 bytes of red, of green, of blue, line by line
    raw = (tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin").read_bytes()
    assert data.images[0, 0, 0, 1] == raw[1 + 1]
    assert data.images[0, 0, 1, 0] == raw[1 + 32]
    assert data.images[0, 1, 0, 0] == raw[1 + 1024]
    assert data.images[0, 2, 31, 31] == raw[3072]
    assert data.images[1, 0, 0, 0] == raw[3073 + 1]


def test_cifar100_has_coarse_and_fine_labels(tmp_path, cifar100):
    data = load_images("cifar100", tmp_path)
    pictures, coarse, fine = cifar100
    np.testing.assert_array_equal(data.images, pictures)
    np.testing.assert_array_equal(data.labels, fine)
    np.testing.assert_array_equal(data.coarse, coarse)
    assert data.class_names[99] == "thing_99"


def write_femnist(folder, **changes):
    generator = np.random.default_rng(0)
    arrays = {
        "images": generator.integers(256, size=(5, 28, 28)).astype(np.uint8),
        "labels": np.array([0, 10, 36, 61, 5], dtype=np.uint8),
        "writers": np.array([0, 0, 1, 1, 1], dtype=np.int16),
        "writer_names": np.array(["f1", "f0"]),
    } | changes
    folder.mkdir(exist_ok=True)
    np.savez_compressed(folder / "some.npz", **arrays)
    return arrays


def test_femnist_npz(tmp_path):
    arrays = write_femnist(tmp_path / "femnist")
    data = load_images("femnist", tmp_path)
    np.testing.assert_array_equal(data.images[:, 0], arrays["images"])
    np.testing.assert_array_equal(data.writers, arrays["writers"])
    assert data.writer_names == ("f1", "f0")
    assert [data.class_names[k] for k in data.labels] == ["0", "A", "a", "z", "5"]


def leaf(**users):
    rows = {
        user: {"x": x.reshape(-1, x[0].size).tolist() if len(x) else [], "y": y}
        for user, (x, y) in users.items()
    }
    counts = [len(y) for _, y in users.values()]
    return {"users": list(users), "num_samples": counts, "user_data": rows}


def test_leaf_json_has_a_writer_a_user(tmp_path, rng):
    pictures = rng.integers(256, size=(4, 28, 28))
    x = np.round(pictures / 255, 4)  # a file may keep fewer digits than a byte needs
    for part, content in {
        "train": leaf(f2=(x[:2], [1, 2]), f1=(x[2:3], [61])),
        "test": leaf(f2=(x[3:], [3])),
    }.items():
        folder = tmp_path / "femnist" / "data" / part
        folder.mkdir(parents=True)
        (folder / "all_data_0_niid.json").write_text(json.dumps(content))
    data = load_images("femnist", tmp_path)
    np.testing.assert_array_equal(data.images[:, 0], pictures)
    assert [data.writer_names[w] for w in data.writers] == ["f2", "f2", "f1", "f2"]
    np.testing.assert_array_equal(data.labels, [1, 2, 61, 3])


# ---------------------------------------------------------------------- what is wrong with a file


def edit(path, change):
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("file", "change", "problem"),
    [
        ("train-labels-idx1-ubyte", lambda b: b[:-1], "12 bytes"),
        ("train-labels-idx1-ubyte", lambda b: b[:-1] + b"\x0a", "labels .* to 10"),
        ("t10k-labels-idx1-ubyte", lambda b: b"\x00\x00\x08\x03" + b[4:], "00000803"),
        ("train-images-idx3-ubyte.gz", lambda b: b[:-30], "decompressed"),
        ("train-images-idx3-ubyte.gz", lambda b: b"no archive at all", "decompressed"),
        (
            "train-images-idx3-ubyte.gz",
            lambda b: gzip.compress(gzip.decompress(b)[:-1]),
            "3,920",
        ),
        (
            "train-images-idx3-ubyte.gz",
            lambda b: gzip.compress(gzip.decompress(b) + b"x"),
            "3,920",
        ),
        (
            "t10k-images-idx3-ubyte.gz",
            lambda b: gzip.compress(gzip.decompress(b)[:7] + b"\x02" + gzip.decompress(b)[8:]),
            "3 × 28 × 28",
        ),
        (
            "train-images-idx3-ubyte.gz",
            lambda b: gzip.compress(gzip.decompress(b)[: -2 * 784] + bytes(2 * 784)),
            "last 2 images",
        ),
        (
            "train-images-idx3-ubyte.gz",
            lambda b: gzip.compress(gzip.decompress(b)[:16] + bytes(5 * 784)),
            "last 5 images",
        ),
    ],
)
def test_a_damaged_mnist_file_is_named(tmp_path, mnist, file, change, problem):
    edit(tmp_path / "MNIST" / "raw" / file, change)
    with pytest.raises(DamagedFileError, match=problem) as caught:
        load_images("mnist", tmp_path)
    assert file in str(caught.value)
    assert "https" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda b: b[:-3073], "9,219"),
        (lambda b: b[:-1], "12,291"),
        (lambda b: b"\xff" + b[1:], "255"),
        (lambda b: b[:4000] + bytes(len(b) - 4000), "zeros"),
    ],
)
def test_a_damaged_cifar_file_is_named(tmp_path, cifar10, change, problem):
    edit(tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin", change)
    with pytest.raises(DamagedFileError, match=problem) as caught:
        load_images("cifar10", tmp_path)
    assert "data_batch_1.bin" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "row"),
    [
        ("train.bin", 2),  # of class 7, like the next
        ("test.bin", 1),  # of class 0, like the first of the other file
    ],
)
def test_a_cifar100_class_with_two_superclasses_is_damage(tmp_path, cifar100, file, row):
    edit(
        tmp_path / "cifar-100-binary" / file,
        lambda b: b[: row * 3074] + b"\x05" + b[row * 3074 + 1 :],
    )
    # either file may be the wrong one
    with pytest.raises(DamagedFileError, match=r"train.bin and test.bin.*superclass"):
        load_images("cifar100", tmp_path)


def test_cifar100_needs_the_names_of_its_classes(tmp_path, cifar100):
    path = tmp_path / "cifar-100-binary" / "fine_label_names.txt"
    path.write_text("apple\npear\n")
    with pytest.raises(DamagedFileError, match=r"fine_label_names.txt.* 2 "):
        load_images("cifar100", tmp_path)
    path.write_text("\n".join([*(f"thing_{k}" for k in range(100)), "thing_7"]))
    with pytest.raises(DamagedFileError, match="101"):
        load_images("cifar100", tmp_path)
    path.unlink()
    with pytest.raises(MissingFileError, match=r"fine_label_names.txt"):
        load_images("cifar100", tmp_path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"labels": np.array([0, 1, 2, 3, 62])}, "labels 0 to 62"),
        ({"labels": np.array([0, 1, 2, 3])}, "labels.*integers"),
        ({"labels": np.zeros(5)}, "labels.*integers"),
        ({"writers": np.array([0, 0, 0, 0, 2])}, "writers 0 to 2"),
        ({"writers": np.array([0, 0, 0, 0, -1])}, "writers -1 to 0"),
        ({"images": np.zeros((5, 28, 28))}, "float64"),
        ({"images": np.eye(28, dtype=np.uint8)[None].repeat(5, 0)}, "pixels"),
        ({"images": np.zeros((5, 784), dtype=np.uint8)}, r"\(5, 784\)"),
        ({"writer_names": np.array(["a", None])}, "read"),  # it would need pickle
        ({"writer_names": np.array("a")}, "writer_names"),
        ({"writer_names": np.array(["a", "a"])}, "writer_names"),
    ],
)
def test_a_damaged_npz_is_named(tmp_path, changes, problem):
    write_femnist(tmp_path / "femnist", **changes)
    with pytest.raises(DamagedFileError, match=problem) as caught:
        load_images("femnist", tmp_path)
    assert "some.npz" in str(caught.value)
    assert "LEAF" in str(caught.value)


def test_a_warning_about_images_of_one_colour(tmp_path):
    images = np.full((5, 28, 28), 200, dtype=np.uint8)
    images[0, 3] = 7
    write_femnist(tmp_path / "femnist", images=images)
    with pytest.warns(UserWarning, match=r"some.npz.*colour"):
        assert len(load_images("femnist", tmp_path)) == 5


@pytest.mark.parametrize("missing", ["train", "test"])
def test_one_half_of_leaf_s_files_is_not_all(tmp_path, rng, missing):
    for part in ("train", "test"):
        folder = tmp_path / "femnist" / part
        folder.mkdir(parents=True)
        if part != missing:
            content = leaf(a=(rng.random((1, 784)), [0]))
            (folder / "part.json").write_text(json.dumps(content))
    with pytest.raises(MissingFileError, match=rf"{missing}/\*\.json"):
        load_images("femnist", tmp_path)


def test_an_npz_cut_short_is_named(tmp_path):
    write_femnist(tmp_path / "femnist")
    edit(tmp_path / "femnist" / "some.npz", lambda b: b[: len(b) // 2])
    with pytest.raises(DamagedFileError, match=r"some.npz"):
        load_images("femnist", tmp_path)


def test_an_npz_with_a_single_array_is_named(tmp_path):
    (tmp_path / "femnist").mkdir()
    with (tmp_path / "femnist" / "some.npz").open("wb") as file:
        np.save(file, np.zeros((5, 28, 28), dtype=np.uint8))
    with pytest.raises(DamagedFileError, match=r"some.npz.*archive"):
        load_images("femnist", tmp_path)


def test_two_npz_files_are_one_too_many(tmp_path):
    write_femnist(tmp_path / "femnist")
    (tmp_path / "femnist" / "other.npz").touch()
    with pytest.raises(ImageFileError, match="several"):
        load_images("femnist", tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (leaf(a=(np.full((1, 784), 1.5), [0])), "outside"),
        (leaf(a=(np.full((1, 784), np.nan), [0])), "outside"),
        (leaf(a=(np.full((1, 784), "0.5"), [0])), "number"),
        (leaf(a=(np.zeros((1, 784)), [62])), "labels 62 to 62"),
        (leaf(a=(np.zeros((1, 784)), [0])) | {"num_samples": [2]}, "user a"),
        (leaf(a=(np.zeros((2, 784)), [0])), "1 label"),
        (leaf(a=(np.zeros((1, 783)), [0])), "JSON"),
        (leaf(a=(np.zeros((1, 784)), [0])) | {"users": ["b"]}, "agree"),
        (leaf(a=(np.zeros((1, 784)), [0])) | {"num_samples": []}, "agree"),
        (leaf(a=(np.zeros((1, 784)), [0])) | {"users": None}, "JSON"),
        (leaf(a=(np.zeros((1, 784)), [0])) | {"users": ["a", 1]}, "agree"),
        (leaf(a=(np.zeros((1, 784)), [0])) | {"num_samples": 1}, "JSON"),
        (leaf(a=(np.zeros((1, 784)), [0])) | {"num_samples": ["2"]}, "JSON"),
        (leaf(a=(np.zeros((1, 784)), [0])) | {"num_samples": [None]}, "JSON"),
        (leaf(a=(np.zeros((1, 784)), [0.5])), "integer"),
        (leaf(a=(np.zeros((1, 784)), ["0"])), "integer"),
        (leaf(a=(np.zeros((1, 784)), [10**30])), "integer"),
        (leaf(a=(np.zeros((1, 1568)), [0, 1])), "784 pixels"),
        (leaf(), "users"),
        (leaf(a=(np.zeros((0, 784)), [])), "users"),
        ({"users": []}, "JSON"),
        ([1], "JSON"),
    ],
)
def test_a_damaged_leaf_file_is_named(tmp_path, content, problem):
    (tmp_path / "femnist").mkdir()
    (tmp_path / "femnist" / "part.json").write_text(json.dumps(content))
    with pytest.raises(DamagedFileError, match=problem) as caught:
        load_images("femnist", tmp_path)
    assert "part.json" in str(caught.value)


def test_a_leaf_file_nested_too_deeply_is_named(tmp_path):
    (tmp_path / "femnist").mkdir()
    (tmp_path / "femnist" / "part.json").write_text("[" * 100_000)
    with pytest.raises(DamagedFileError, match=r"part.json"):
        load_images("femnist", tmp_path)


def test_a_leaf_user_without_images_is_not_a_writer(tmp_path):
    (tmp_path / "femnist").mkdir()
    content = leaf(a=(np.zeros((2, 784)), [0, 1]), b=(np.zeros((0, 784)), []))
    (tmp_path / "femnist" / "part.json").write_text(json.dumps(content))
    assert load_images("femnist", tmp_path).writer_names == ("a",)


def test_a_wrong_label_in_a_packed_file_names_the_packed_file(tmp_path, mnist):
    path = tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    path.unlink()
    write_idx(path.with_name(path.name + ".gz"), np.array([0, 10, 1]))
    with pytest.raises(DamagedFileError, match=r"labels-idx1-ubyte.gz"):
        load_images("mnist", tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "remedy"),
    [
        ("mnist", "train-images-idx3-ubyte.gz", "download=True"),
        ("mnist", "train-images-idx3-ubyte.gz", "--download"),
        ("cifar10", "data_batch_1.bin", "cifar-10-binary.tar.gz"),
        ("cifar100", "train.bin", "cifar-100-binary.tar.gz"),
        ("femnist", "femnist", "preprocess.sh"),
    ],
)
def test_a_missing_file_is_named_with_a_remedy(tmp_path, name, file, remedy):
    with pytest.raises(MissingFileError) as caught:
        load_images(name, tmp_path)
    assert file in str(caught.value)
    assert remedy in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_data_folder_comes_from_the_environment(tmp_path, mnist, monkeypatch):
    monkeypatch.setenv("FEDGMM_DATA", str(tmp_path))
    assert len(load_images("mnist")) == 8
    monkeypatch.delenv("FEDGMM_DATA")
    with pytest.raises(ImageFileError, match="FEDGMM_DATA"):
        load_images("mnist")


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="imagenet"):
        load_images("imagenet", tmp_path)


# ---------------------------------------------------------------------- ImageData


def test_repr_fits_one_screen(tmp_path):
    write_femnist(tmp_path / "femnist")
    text = repr(load_images("femnist", tmp_path))
    assert "5 images of 1×28×28 bytes" in text
    assert "62: 0, 1, 2" in text
    assert "writers  2: f1, f0" in text
    assert len(text.splitlines()) <= 5


@pytest.mark.parametrize(
    "changes",
    [
        {"images": np.zeros((2, 1, 4, 4))},
        {"images": np.zeros((2, 4, 4), dtype=np.uint8)},
        {"labels": np.array([0, 2])},
        {"labels": np.array([0, -1])},
        {"labels": np.array([0])},
        {"writers": np.array([0, 0])},
        {"writers": np.array([0, 1]), "writer_names": ("a",)},
        {"coarse": np.array([0])},
    ],
)
def test_image_data_is_checked(changes):
    good = {
        "name": "own",
        "images": np.zeros((2, 1, 4, 4), dtype=np.uint8),
        "labels": np.array([0, 1]),
        "class_names": ("a", "b"),
    }
    ImageData(**good)
    with pytest.raises(ValueError, match="own"):
        ImageData(**(good | changes))


def test_any_other_image_label_or_writer_has_another_fingerprint():
    good = {
        "name": "own",
        "images": np.arange(32, dtype=np.uint8).reshape(2, 1, 4, 4),
        "labels": np.array([0, 1]),
        "class_names": ("a", "b"),
        "coarse": np.array([0, 0]),
        "writers": np.array([0, 1]),
        "writer_names": ("f0", "f1"),
    }
    changes = [
        {},
        {"images": good["images"][::-1]},
        {"labels": np.array([1, 0])},
        {"class_names": ("b", "a")},
        {"coarse": np.array([0, 1])},
        {"coarse": None},
        {"writers": np.array([1, 0])},
        {"writer_names": ("f0", "f2")},
    ]
    found = [ImageData(**(good | change)).fingerprint for change in changes]
    assert len(set(found)) == len(changes)
    assert ImageData(**good).fingerprint == found[0]


def test_unpacked_mnist_files_are_not_fetched_again(tmp_path, mnist, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", None)  # a call would fail
    assert len(load_images("mnist", tmp_path, download=True)) == 8


# ---------------------------------------------------------------------- the real files


def real_images(name):
    if not os.environ.get("FEDGMM_DATA"):
        pytest.skip("FEDGMM_DATA does not name a folder with the real data sets")
    try:
        return load_images(name)
    except ImageFileError as error:
        if "is missing" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("mnist", (70_000, 1, 28, 28), 10),
        ("cifar10", (60_000, 3, 32, 32), 10),
        ("cifar100", (60_000, 3, 32, 32), 100),
        ("femnist", (None, 1, 28, 28), 62),
    ],
)
def test_the_real_data_sets(name, shape, classes):
    data = real_images(name)
    assert data.images.shape[1:] == shape[1:]
    assert shape[0] is None or len(data) == shape[0]
    counts = np.bincount(data.labels, minlength=classes)
    assert (counts > 0).all()
    assert (int(data.images[:2000].min()), int(data.images[:2000].max())) == (0, 255)
    if name.startswith("cifar"):
        assert (counts == 60_000 // classes).all()
        # neighbours in a photograph are alike; bytes read in another order are not
        pixels = data.images[::50].astype(float)
        assert np.abs(np.diff(pixels, axis=-1)).mean() < 0.35 * pixels.std()
        assert np.abs(np.diff(pixels, axis=-2)).mean() < 0.35 * pixels.std()
    else:
        edge, middle = data.images[:, 0, 0, :].mean(), data.images[:, 0, 10:18, 10:18].mean()
        assert (edge < middle) == (name == "mnist")  # FEMNIST has a white background
