"""Example files: a network of hospitals whose patients differ, and whose diagnoses do too.

Three kinds of patients are spread over the hospitals in different shares. What the measurements mean
differs between the kinds: the same values speak for an illness in one and against it in another.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SITES = {
    "oslo": 420,
    "trondheim": 350,
    "stavanger": 300,
    "tromso": 260,
    "drammen": 330,
    "bodo": 180,
}
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
_SHARPNESS = 3.0  # of the diagnosis; its odds are e to this times the margin


@dataclass(frozen=True)
class Patients:
    """Rows of one file: texts as they are written, and whether the patient is ill."""

    rows: list[dict[str, str]]
    ill: NDArray[np.bool_]


def draw_patients(rng: np.random.Generator, shares: NDArray[np.float64], rows: int) -> Patients:
    """Patients of a hospital with the given shares of the three kinds, ``(3,)``."""
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
    """Write one file a hospital, and three that come after the training; returns all of them.

    ==================  ==============================================================
    ``site_*.csv``      six hospitals with diagnoses
    ``new_patients.csv`` patients of Oslo without diagnoses
    ``bergen.csv``      a hospital that did not take part
    ``batch.csv``       patients of whom every fourth is unlike anything seen
    ==================  ==============================================================
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
    for row in batch.rows[::4]:  # measurements that no patient of the three kinds has together
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
