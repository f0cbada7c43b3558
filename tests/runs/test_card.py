"""The model card of a run: every section, no path of this machine, and names that cannot act."""

from __future__ import annotations

import json

import numpy as np

import fedgmm
from fedgmm.privacy.accounting import Release, epsilon_of
from fedgmm.privacy.ledger import Entry, Ledger
from fedgmm.runs.reporting import render_card, write_card
from in_memory_sites import federate
from small_runs import SMALL, draw_rows, write_csv, write_sites

SECTIONS = ["Use", "Data", "Method", "Results", "Limits", "Privacy", "Version and reproduction"]


def sections_of(text):
    """The sections of a card by heading."""
    parts = text.split("\n## ")[1:]
    return {part.split("\n")[0]: part for part in parts}


def test_the_card_is_about_the_run(finished):
    run = fedgmm.open_run(finished / "run")
    run.adapt("narvik", finished / "newcomer.csv")
    path = write_card(run)
    assert path == finished / "run" / "card.md"
    found = sections_of(path.read_text(encoding="utf-8"))
    assert list(found) == SECTIONS
    metrics = run.metrics["clients"]["oslo"]
    low, high = metrics["intervals"]["accuracy"]
    line = next(one for one in found["Results"].splitlines() if one.startswith("| oslo |"))
    assert f"| {metrics['rows']} | {metrics['accuracy']:.1%} ({low:.1%} to {high:.1%}) |" in line
    assert "3 clients, 200 rows" in found["Data"]
    assert "narvik (40 rows)" in found["Data"]
    assert "60% training, 20% validation, 20% test" in found["Data"]
    assert "| ward | 3 categories |" in found["Data"]
    assert "FedGMM, 2 Gaussians" in found["Method"]
    assert "rounds = 4" in found["Method"]
    assert "uncertain: bergen, oslo, tromso" in found["Limits"]
    assert "No differential privacy" in found["Privacy"]
    assert f"fedgmm {fedgmm.__version__}" in found["Version and reproduction"]
    assert "fedgmm fit --config config.toml" in found["Version and reproduction"]


def test_no_path_of_this_machine_even_in_notes(finished_home, finished):
    run = fedgmm.open_run(finished / "run")
    record = json.loads(run.folder.metrics.read_text())
    record["notes"] = [f"{finished_home}/data/oslo.csv has no rows of the class ill."]
    run.folder.metrics.write_text(json.dumps(record))
    text = render_card(run)
    assert "oslo.csv has no rows" in text
    for folder in (finished_home, finished, finished_home.parent):
        assert folder.name not in text.replace("\\", "")


def test_names_cannot_act_in_markdown(tmp_path):
    rows = [{**row, "<b>a|ge</b>": row["age"]} for row in draw_rows(np.random.default_rng(0), 40)]
    files = [write_csv(tmp_path / name, rows) for name in ("[x](y)|`z.csv", "oslo.csv")]
    text = render_card(fedgmm.fit(files, "state", tmp_path / "run", **SMALL))
    assert "<b>" not in text.replace("\\<", "")
    assert r"\[x\](y)\|\`z" in text
    width = {line.replace(r"\|", "").count("|") for line in text.splitlines() if line[:2] == "| "}
    assert width == {3, 6}


def test_regression_density_and_noise(tmp_path):
    files = write_sites(tmp_path / "data")
    numbers = fedgmm.fit(files, "age", tmp_path / "numbers", task="regression", **SMALL)
    text = sections_of(render_card(numbers))
    assert "| client | rows | RMSE |" in text["Results"]
    assert "Predicted number: age" in text["Data"]
    options = {"algorithm": "gmm", "components": 2, "rounds": 3}
    density = fedgmm.fit(files, None, tmp_path / "density", ignore=["state"], **options)
    text = sections_of(render_card(density))
    assert "log density" in text["Results"]
    assert "Federated Gaussian mixture" in text["Method"]
    model = numbers.model
    model.privacy = {"epsilon": 4.0, "delta": 1e-5, "unit": "row", "spent": 3.2, "releases": 22}
    assert "ε = 3.2 of 4" in sections_of(render_card(numbers))["Privacy"]


def test_without_test_rows_the_results_are_said_to_be_too_good(finished):
    run = fedgmm.open_run(finished / "run")
    record = json.loads(run.folder.metrics.read_text())
    del record["test"]
    run.folder.metrics.write_text(json.dumps(record))
    assert "too good" in sections_of(render_card(run))["Results"]


def test_server_and_site_of_a_federation(tmp_path):
    federate(write_sites(tmp_path / "data"), tmp_path, **SMALL)
    home = tmp_path / "sites" / "oslo"
    Ledger(home, tmp_path / "witness").charge(Entry(Release(0.5), "round", "a", "t", "row"))
    server, site = (
        render_card(fedgmm.open_run(tmp_path / "server")),
        render_card(fedgmm.open_run(home)),
    )
    for text in (server, site):
        assert list(sections_of(text)) == SECTIONS
        assert str(tmp_path) not in text
    assert "a federation of 3 sites" in server
    assert "There are no results" in sections_of(server)["Results"]
    assert "fedgmm server --config config.toml" in server
    assert "one site" in site
    assert "fedgmm fit" not in site
    assert f"ε = {epsilon_of(0.5, 1e-5):.3g} (δ = 1e-05, per row), 1 release" in site
    assert "No differential" not in site
