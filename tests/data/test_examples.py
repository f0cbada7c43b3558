"""The example files of hospitals: their content, and that FedGMM has an advantage on them."""

from __future__ import annotations

import csv

import numpy as np
import pytest

import fedgmm
from fedgmm.data.examples import LABEL, NEWCOMER, SITES, draw_patients, write_hospitals
from small_runs import bytes_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files") / "hospitals"
    write_hospitals(folder)
    return folder


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_one_file_per_hospital_and_three_for_later(folder, tmp_path):
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *(f"site_{site}.csv" for site in SITES),
        "new_patients.csv",
        f"{NEWCOMER}.csv",
        "batch.csv",
    }
    for site, rows in SITES.items():
        patients = read(folder / f"site_{site}.csv")
        assert len(patients) == rows
        assert {patient[LABEL] for patient in patients} == {"ill", "healthy"}
    for later in ("new_patients.csv", "batch.csv"):
        assert LABEL not in read(folder / later)[0]
    assert any(patient["cholesterol"] == "NA" for patient in read(folder / "site_oslo.csv"))


def test_the_seed_decides_the_files(folder, tmp_path):
    again, other = tmp_path / "again", tmp_path / "other"
    written = write_hospitals(again)
    assert sorted(written) == sorted(again.iterdir())
    write_hospitals(other, seed=1)
    assert bytes_of(again) == bytes_of(folder)
    assert bytes_of(other)["site_oslo.csv"] != bytes_of(folder)["site_oslo.csv"]


def test_the_same_values_mean_different_things_to_different_kinds():
    rng = np.random.default_rng(0)
    slopes = []
    for kind in (0, 1):
        patients = draw_patients(rng, np.eye(3)[kind], 2000)
        systolic = np.array([float(row["systolic"]) for row in patients.rows])
        slopes.append(np.corrcoef(systolic, patients.ill)[0, 1])
    assert slopes[0] > 0.2
    assert slopes[1] < -0.2


def test_fedgmm_beats_one_model_for_all_and_finds_the_novel_patients(folder, tmp_path):
    files = [folder / "site_*.csv"]
    sizes = {"components": 3, "learners": 3}  # as there are kinds of patients
    run = fedgmm.fit(files, LABEL, tmp_path / "run", rounds=6, **sizes)
    one = fedgmm.fit(files, LABEL, tmp_path / "one", algorithm="fedavg", rounds=6)
    ours, theirs = run.metrics["test"]["mean_accuracy"], one.metrics["test"]["mean_accuracy"]
    assert ours > 0.84
    assert ours > theirs + 0.1
    novel = run.detect(folder / "batch.csv").result.novel
    strange = np.arange(len(novel)) % 4 == 0
    assert novel[strange].mean() > 0.9
    assert novel[~strange].mean() < 0.15
