"""``fit`` with privacy: declared preprocessing, the section ``[privacy]``, options of the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedgmm import Privacy, fit, load, open_run
from fedgmm.cli import app
from fedgmm.data.tables.agreement import declared
from fedgmm.data.tables.loading import read_tables
from fedgmm.data.tables.preprocessing import TableOptions
from fedgmm.privacy.settings import PrivacyError
from fedgmm.runs.config import config_from, read_config


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sites")
    rng = np.random.default_rng(0)
    for site in ("oslo", "bergen"):
        age, sex = rng.uniform(0, 100, 400), rng.choice(["f", "m"], 400)
        sick = np.where(age > 50, "yes", "no")
        rows = enumerate(zip(age, sex, sick, strict=True))
        lines = [f"{a:.1f},{s},secret{i},{y}" for i, (a, s, y) in rows]
        (folder / f"{site}.csv").write_text("\n".join(["age,sex,name,sick", *lines]) + "\n")
    return folder


DECLARED = {
    "bounds": {"age": (0, 110)},
    "categories": {"sex": ("f", "m"), "sick": ("no", "yes")},
}


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    privacy = Privacy(epsilon=100.0, delta=1e-4, rounds=2, **DECLARED)
    out = tmp_path_factory.mktemp("run") / "run"
    return fit(str(files / "*.csv"), "sick", out, components=1, learners=1, privacy=privacy)


def test_fit_uses_what_is_declared(run):
    columns = {one.name: one for one in run.preprocessing.columns}
    assert (columns["age"].mean, columns["age"].scale) == (55, 55)
    assert columns["sex"].categories == ("f", "m")
    assert columns["name"].role == "ignored"
    assert run.preprocessing.labels.classes == ("no", "yes")
    assert run.metrics["test"]["mean_accuracy"] > 0.9


def test_the_budget_is_in_the_files_of_the_run(run):
    assert "ε = 100 of 100 (δ = 0.0001, per row), 4 releases" in run.metrics["notes"][0]
    model = load(run.folder.model)
    assert model.privacy["spent"] == pytest.approx(100.0, rel=1e-6)
    assert model.calibration == {}
    assert config_from(read_config(run.folder.config)).privacy.bounds == {"age": (0.0, 110.0)}
    assert "secret" not in run.folder.preprocessing.read_text()
    history = [json.loads(line) for line in run.folder.history.read_text().splitlines()]
    assert history[-1]["epsilon"] == pytest.approx(100.0, rel=1e-6)


def test_the_command_takes_a_budget(files, tmp_path):
    options = [
        "--epsilon",
        "100",
        "--delta",
        "1e-4",
        "--bounds",
        "age=0:110",
        "--categories",
        "sex=f,m",
    ]
    more = ["--categories", "sick=no,yes", "--components", "1", "--learners", "1", "--rounds", "1"]
    command = ["fit", str(files / "*.csv"), "--label", "sick", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, [*command, *options, *more])
    assert result.exit_code == 0, result.output
    assert open_run(tmp_path / "run").model.privacy["releases"] == 3


@pytest.fixture(scope="module")
def visits(tmp_path_factory):
    """Two sites, patients with one to many visits, one of them at both sites; all ages differ."""
    folder = tmp_path_factory.mktemp("visits")
    rng = np.random.default_rng(0)
    ages = rng.permutation(400) / 4
    for number, site in enumerate(("oslo", "bergen")):
        age, patient = ages[number::2], rng.integers(0, 15, 200)
        names = np.where(patient == 3, "both", [f"{site}{one}" for one in patient])
        lines = [
            f"{n},{a:.2f},{'yes' if a > 50 else 'no'}" for n, a in zip(names, age, strict=True)
        ]
        text = "\n".join(["patient,age,sick", *lines]) + "\n"
        (folder / f"{number}_{site}.csv").write_text(text)
    return folder


def test_persons_of_files(visits, tmp_path):
    """The command names the person's column, whose rows count as one unit and which is no input."""
    command = ["fit", str(visits / "*.csv"), "--label", "sick", "--out", str(tmp_path / "run")]
    budget = ["--epsilon", "100", "--delta", "1e-3", "--unit", "person", "--bounds", "0:110"]
    more = ["--person-column", "patient", "--categories", "sick=no,yes", "--rounds", "1"]
    sizes = ["--components", "1", "--learners", "1"]
    result = CliRunner().invoke(app, [*command, *budget, *more, *sizes])
    assert result.exit_code == 0, result.output
    run = open_run(tmp_path / "run")
    assert run.preprocessing.feature_names == ("age",)
    assert "per person" in run.model.budget
    printed = CliRunner().invoke(app, ["ledger", str(tmp_path / "run"), "--delta", "1e-3"])
    assert "person" in printed.output
    assert "100" in printed.output


def test_rows_belong_to_the_persons_of_the_files(visits):
    privacy = {"sick": ("no", "yes")}
    options = TableOptions("sick", id=("patient",))
    tables = read_tables([str(visits / "*.csv")], options)
    preprocessing = declared(["patient", "age", "sick"], options, (0, 110), privacy)
    persons = tables.persons(preprocessing, "patient")
    dataset = tables.load(preprocessing)
    assert len(persons) == len(dataset.train)
    lines = [line.split(",") for file in sorted(visits.iterdir()) for line in file.open()]
    by_age = {float(age): name for name, age, _ in lines if age != "age"}
    ages = [round(4 * (55 + 55 * float(x))) / 4 for x in dataset.train.inputs[:, 0]]
    pairs = {(int(person), by_age[age]) for person, age in zip(persons, ages, strict=True)}
    assert len(pairs) == len(torch.unique(persons)) == len({name for _, name in pairs})
    assert "both" in {name for _, name in pairs}


@pytest.mark.parametrize("header", ["name,age,sick", "patient,age,sick"])
def test_a_row_without_a_person_is_refused(tmp_path, header):
    lines = [f",{age},{'yes' if age > 50 else 'no'}" for age in range(100)]
    (tmp_path / "oslo.csv").write_text("\n".join([header, *lines]))
    privacy = Privacy(
        epsilon=1.0,
        delta=1e-3,
        unit="person",
        person="patient",
        bounds=(0, 110),
        categories={"sick": ("no", "yes")},
    )
    with pytest.raises(ValueError, match="person"):
        fit(str(tmp_path / "oslo.csv"), "sick", tmp_path / "run", privacy=privacy)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"categories": {"sex": ("f", "m")}}, "sick"),
        ({"bounds": {"height": (0, 1)}}, "height"),
        ({"unit": "person"}, "person"),
        ({"bounds": [(0, 1), (0, 1)]}, "columns"),
    ],
)
def test_missing_declarations_are_refused(files, tmp_path, change, word):
    privacy = Privacy(**{"epsilon": 1.0, "delta": 1e-4, **DECLARED, **change})
    with pytest.raises(ValueError, match=word):
        fit(str(files / "*.csv"), "sick", tmp_path / "run", privacy=privacy)


def test_a_section_of_the_configuration(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(
        '[data]\nfiles = "a.csv"\nlabel = "y"\n[privacy]\nepsilon = 0.5\ndelta = 1e-6\nbounds = [-1, 1]\n'
    )
    config = config_from(read_config(path))
    assert config.privacy == Privacy(epsilon=0.5, delta=1e-6, bounds=(-1, 1))
    (tmp_path / "again.toml").write_text(config.toml())
    assert config_from(read_config(tmp_path / "again.toml")).privacy == config.privacy
    path.write_text('[data]\nfiles = "a.csv"\nlabel = "y"\n[privacy]\nepsilon = 0.5\n')
    with pytest.raises(PrivacyError, match="delta"):
        config_from(read_config(path))


def test_what_is_not_declared_gets_a_note(files, tmp_path):
    categories = {"sex": ("f",), "sick": ("no", "yes")}
    privacy = Privacy(
        epsilon=1e4, delta=1e-4, rounds=1, bounds={"age": (0, 110)}, categories=categories
    )
    sizes = {"components": 1, "learners": 1}
    found = fit(str(files / "*.csv"), "sick", tmp_path / "run", **sizes, privacy=privacy)
    others = sum(path.read_text().count(",m,") for path in files.iterdir())
    notes = found.metrics["notes"]
    assert any("not used: name." in note for note in notes)
    assert any(f"'sex': {others} values" in note for note in notes)


def test_one_pair_declares_all_numbers():
    found = declared(
        ["a", "b", "y"], TableOptions("y"), (0.0, 4.0), {"y": ("0", "1"), "b": ("u", "v")}
    )
    assert [one.role for one in found.columns] == ["number", "category"]
    assert found.columns[0].mean == found.columns[0].scale == 2.0
    assert found.labels.classes == (0, 1)
