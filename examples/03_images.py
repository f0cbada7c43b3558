"""Folders of images, embedded at each site.

Three sites hold digits as PNG files, one folder per class. Here the encoder is ``pixels``, which
needs no weights; a pretrained network is ``encoder("resnet18", weights="resnet18.safetensors")``.
Vectors, not images, are trained on.
"""

import argparse
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import fedgmm
from fedgmm.data.embed import embed
from fedgmm.data.encoders import encoder


def write_sites(folder: Path, images: int = 450) -> list[Path]:
    """Write ``site/class/number.png``."""
    digits = load_digits()
    sites = [folder / name for name in ("oslo", "bergen", "tromso")]
    for number in range(images):
        path = sites[number % 3] / str(digits.target[number]) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((15 * digits.images[number]).astype(np.uint8)).save(path)
    return sites


def write_new_images(folder: Path, first: int = 500) -> Path:
    """Write ten other images, without classes."""
    folder.mkdir()
    for number, image in enumerate(load_digits().images[first : first + 10]):
        Image.fromarray((15 * image).astype(np.uint8)).save(folder / f"{number}.png")
    return folder


def main(out: Path) -> None:
    """Embed the folders, train, and draw images with their predictions."""
    folder = Path(tempfile.mkdtemp())
    sites = write_sites(folder / "sites")
    pixels = encoder("pixels", size=8)
    vectors = [embed(site, folder / "vectors", pixels).path for site in sites]
    run = fedgmm.fit(
        vectors, "label", folder / "run", id=["id"], components=2, learners=1, rounds=20
    )
    print(run.evaluate().headline())

    new = write_new_images(folder / "new")
    found = run.predict(embed(new, folder / "vectors", pixels).path, "oslo")
    figure, axes = plt.subplots(1, 10, figsize=(8, 1.5), layout="constrained")
    for one, name, label in zip(axes, found.ids["id"], found.labels, strict=True):
        one.imshow(Image.open(new / str(name)), cmap="gray_r")
        one.set_title(f"{label}", fontsize=11)
        one.axis("off")
    figure.suptitle("New images of Oslo and their predicted digits", fontsize=11)
    figure.savefig(out, dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("images.png"), help="the picture")
    main(parser.parse_args().out)
