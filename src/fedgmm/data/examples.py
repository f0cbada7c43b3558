"""Example data without a download: handwritten digits, and files of a network of hospitals.

In both, clients differ in their rows and in the meaning of the labels, as in the paper.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.partition import dirichlet_by_label, joint_shift

# ---------------------------------------------------------------------- digits

WHITE = 16.0
"""Largest grey value of scikit-learn's digits."""

SIDE = 8
"""Side of an image of a digit, in pixels."""


@dataclass(frozen=True)
class Digits:
    """The digits of several clients.

    Attributes:
        dataset: rows are images of 8 × 8 pixels, flattened.
        newcomer: rows and labels of a client that is not in ``dataset``.
        images: all images as the clients hold them, ``(N, 64)``.
        changed: which images were transformed and relabelled, ``(N,)``.
    """

    dataset: FederatedDataset
    newcomer: tuple[NDArray[np.float32], NDArray[np.int64]]
    images: NDArray[np.float32]
    changed: NDArray[np.bool_]


def heterogeneous_digits(clients: int = 12, alpha: float = 0.4, seed: int = 0) -> Digits:
    """Return scikit-learn's digits, dealt over clients and made heterogeneous as in the paper.

    Half of the images are rotated, flipped and inverted, and their labels permuted. The shares of each
    digit, and of changed images, differ between clients. One more client is kept apart as a newcomer.

    Args:
        clients: number of clients.
        alpha: parameter of the Dirichlet distribution over clients, per digit and kind of image.
        seed: seed of all draws.
    """
    from sklearn.datasets import load_digits

    raw = load_digits()
    images = raw.images.astype(np.float32)
    shifted, labels, changed = joint_shift(images, raw.target, WHITE, seed)
    kinds = labels + 10 * changed
    owner = dirichlet_by_label(kinds, clients + 1, alpha, seed)
    x = shifted.reshape(len(shifted), -1).astype(np.float32)
    apart = owner == clients
    dataset = FederatedDataset.from_arrays(
        x[~apart],
        labels[~apart],
        np.array([f"client {c + 1:02d}" for c in owner[~apart]]),
        seed=seed,
    )
    return Digits(dataset, (x[apart], labels[apart]), x, changed)


# ---------------------------------------------------------------------- hospitals

SITES = {
    "oslo": 420,
    "trondheim": 350,
    "stavanger": 300,
    "tromso": 260,
    "drammen": 330,
    "bodo": 180,
}
"""Number of patients of each hospital that takes part."""

NEWCOMER, NEWCOMER_ROWS = "bergen", 240
LABEL = "diagnosis"

_COLUMNS = ("age", "systolic", "heart_rate", "glucose", "cholesterol", "bmi")
_SCALES = np.array([12.0, 15.0, 9.0, 1.1, 0.9, 3.5])
_CENTRES = np.array(
    [
        [38.0, 118.0, 82.0, 4.9, 4.4, 23.5],
        [66.0, 148.0, 70.0, 6.2, 5.9, 27.0],
        [55.0, 131.0, 92.0, 8.4, 5.1, 33.0],
    ]
)
_MEANING = np.array(
    [
        [0.4, 1.6, 1.1, -0.3, 0.2, 0.1],
        [-0.2, -1.4, 0.9, 1.2, 0.3, -0.2],
        [0.3, 0.2, -1.5, -1.1, 0.9, 0.4],
    ]
)
_WARDS = ("emergency", "medical", "surgical")
_WARD_SHARES = np.array([[0.6, 0.2, 0.2], [0.2, 0.6, 0.2], [0.2, 0.5, 0.3]])
_SHARPNESS = 3.0  # the odds of the diagnosis are exp(sharpness · margin)


@dataclass(frozen=True)
class Patients:
    """Rows of one file: texts as they are written, and whether each patient is ill."""

    rows: list[dict[str, str]]
    ill: NDArray[np.bool_]


def draw_patients(rng: np.random.Generator, shares: NDArray[np.float64], rows: int) -> Patients:
    """Draw the patients of a hospital.

    There are three kinds of patients, with ``shares`` ``(3,)``. The same measurements suggest an illness
    in one kind and health in another.
    """
    kinds = rng.choice(3, size=rows, p=shares)
    deviations = rng.standard_normal((rows, len(_COLUMNS)))
    values = _CENTRES[kinds] + deviations * _SCALES
    margin = (deviations * _MEANING[kinds]).sum(1)
    ill = rng.random(rows) < 1.0 / (1.0 + np.exp(-_SHARPNESS * margin))
    smokes = rng.random(rows) < np.array([0.2, 0.3, 0.4])[kinds]
    wards = [rng.choice(_WARDS, p=_WARD_SHARES[kind]) for kind in kinds]
    days = rng.integers(0, 365, rows)
    written = []
    for row in range(rows):
        texts = {
            name: f"{value:.1f}" for name, value in zip(_COLUMNS, values[row].tolist(), strict=True)
        }
        if rng.random() < 0.04:
            texts["cholesterol"] = "NA"
        texts["smoker"] = "yes" if smokes[row] else "no"
        texts["ward"] = str(wards[row])
        texts["admitted"] = str(np.datetime64("2025-01-01") + days[row])
        written.append(texts)
    return Patients(written, ill)


def write_hospitals(folder: Path, seed: int = 0) -> list[Path]:
    """Write one file per hospital and three files for later; return their paths.

    ====================  ============================================================
    ``site_*.csv``        six hospitals with diagnoses
    ``new_patients.csv``  patients of Oslo without diagnoses
    ``bergen.csv``        a hospital that did not take part
    ``batch.csv``         patients, every fourth of them unlike any seen in training
    ====================  ============================================================
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    shares = {site: rng.dirichlet(np.full(3, 0.6)) for site in (*SITES, NEWCOMER)}
    written = [
        _write(folder / f"site_{site}.csv", draw_patients(rng, shares[site], rows), True)
        for site, rows in SITES.items()
    ]
    coming = draw_patients(rng, shares["oslo"], 50)
    written.append(_write(folder / "new_patients.csv", coming, False))
    newcomer = draw_patients(rng, shares[NEWCOMER], NEWCOMER_ROWS)
    written.append(_write(folder / f"{NEWCOMER}.csv", newcomer, True))
    batch = draw_patients(rng, np.full(3, 1 / 3), 200)
    for row in batch.rows[::4]:  # a combination of measurements that no patient has
        row["heart_rate"], row["glucose"] = (
            f"{rng.normal(150, 5):.1f}",
            f"{rng.normal(1.5, 0.2):.1f}",
        )
    written.append(_write(folder / "batch.csv", batch, False))
    return written


def _write(path: Path, patients: Patients, labelled: bool) -> Path:
    names = [*patients.rows[0], *([LABEL] if labelled else [])]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for row, ill in zip(patients.rows, patients.ill.tolist(), strict=True):
            writer.writerow({**row, LABEL: "ill" if ill else "healthy"} if labelled else row)
    return path
