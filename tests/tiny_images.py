"""Image data sets in little, in the files of the real ones: bars whose place tells their class."""

from __future__ import annotations

import numpy as np
from PIL import Image

from fedgmm.data.images import files as images

SIDE = 28
FAST = {
    "rounds": 2,
    "tuning_rounds": 1,
    "seeds": (0,),
    "encoder": "pixels",
    "features": 4,
    "learner": "mlp",
    "components": 2,
    "learners": 2,
    "device": "cpu",
}
"""Settings with which a training takes a blink."""


def bars(labels, seed=0):
    """Bright bars on black, ``(n, 28, 28)``: class ``k`` has its bar at line ``4 + 4 k``."""
    generator = np.random.default_rng(seed)
    pictures = np.zeros((len(labels), SIDE, SIDE), dtype=np.uint8)
    for picture, label in zip(pictures, labels, strict=True):
        top, left, width = 4 + 4 * label, generator.integers(4, 8), generator.integers(10, 16)
        shape = (3, width)
        picture[top : top + 3, left : left + width] = generator.integers(120, 256, size=shape)
    return pictures


def write_femnist(folder, writers=5, rows=40, classes=4, seed=0):
    """FEMNIST in little, black on white; returns its images, labels and writers."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(classes, size=writers * rows)
    owners = np.repeat(np.arange(writers), rows)
    pictures = 255 - bars(labels, seed)
    (folder / "femnist").mkdir(parents=True, exist_ok=True)
    names = np.array([f"f{writer:04d}" for writer in range(writers)])
    np.savez(
        folder / "femnist" / "little.npz",
        images=pictures,
        labels=labels,
        writers=owners,
        writer_names=names,
    )
    return pictures, labels, owners


def write_mnist(folder, monkeypatch, rows=240, classes=4, seed=0):
    """MNIST in little, white on black; returns its images and labels."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(classes, size=rows)
    pictures = bars(labels, seed)
    sizes = {"train": rows - 40, "t10k": 40}
    monkeypatch.setattr(images, "_MNIST_ROWS", sizes)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    edges = [0, sizes["train"], rows]
    for place, part in enumerate(sizes):
        own = slice(edges[place], edges[place + 1])
        for kind, array in (("images-idx3", pictures[own]), ("labels-idx1", labels[own])):
            header = np.array([0x800 + array.ndim, *array.shape], dtype=">u4").tobytes()
            (raw / f"{part}-{kind}-ubyte").write_bytes(header + array.astype(np.uint8).tobytes())
    return pictures, labels


def write_cifar10(folder, monkeypatch, rows=160, classes=4, seed=0):
    """CIFAR-10 in little, bars in all three colours."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(classes, size=rows).astype(np.uint8)
    planes = np.zeros((rows, 3, 32, 32), dtype=np.uint8)
    planes[:, :, 2:30, 2:30] = bars(labels.astype(int), seed)[:, None]
    records = np.concatenate([labels[:, None], planes.reshape(rows, -1)], axis=1)
    sizes = {"data_batch_1.bin": rows - 40, "test_batch.bin": 40}
    monkeypatch.setattr(images, "_CIFAR10_ROWS", sizes)
    own = folder / "cifar-10-batches-bin"
    own.mkdir(parents=True, exist_ok=True)
    for name, part in zip(sizes, np.split(records, [rows - 40]), strict=True):
        part.tofile(own / name)


def write_folders(folder, seed, images=24):
    """A site's images, 10 × 10, in a folder per class: its left or its right half is bright."""
    rng = np.random.default_rng(seed)
    for number in range(images):
        label = "left" if number % 2 else "right"
        pixels = rng.integers(60, size=(10, 10, 3))
        pixels[:, :5] += 120 * (label == "left")
        pixels[:, 5:] += 120 * (label == "right")
        (folder / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / label / f"{number}.png")
