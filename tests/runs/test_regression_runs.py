"""Runs on files whose label is a number: every command works, or says why not."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

import fedgmm
from small_runs import fails, works, write_csv

NOISE = 30.0


def draw(rng, rows, sign):
    """A cost that rises with age at some sites and falls at others; the first one is missing."""
    age, dose = 50 + 10 * rng.normal(size=rows), rng.random(rows)
    cost = 1000 + 20 * sign * (age - 50) + 300 * dose + NOISE * rng.normal(size=rows)
    columns = zip(age.tolist(), dose.tolist(), cost.tolist(), strict=True)
    written = [{"age": f"{a:.2f}", "dose": f"{d:.3f}", "cost": f"{c:.2f}"} for a, d, c in columns]
    written[0]["cost"] = ""
    return written


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("numbers"), np.random.default_rng(0)
    for sign, name in ((1, "oslo"), (-1, "bergen"), (1, "tromso")):
        write_csv(folder / f"{name}.csv", draw(rng, 100, sign))
    files = sorted(map(str, folder.glob("*.csv")))
    options = ["--components", "1", "--learners", "2", "--rounds", "30"]
    works(
        "fit", *files, "--label", "cost", "--task", "regression", "--out", folder / "run", *options
    )
    write_csv(folder / "new.csv", draw(rng, 60, -1))
    return folder


def test_measurements_need_the_task(sites, tmp_path):
    sentence = fails("fit", sites / "oslo.csv", "--label", "cost", "--out", tmp_path / "run")
    assert "--task regression" in sentence
    assert "--task classification" in sentence


def test_metrics_and_evaluation(sites):
    metrics = json.loads((sites / "run" / "metrics.json").read_text())
    assert metrics["test"]["rmse"] < 1.3 * NOISE
    assert 0.75 < metrics["test"]["coverage"] <= 1.0
    assert set(metrics["clients"]) == {"bergen", "oslo", "tromso"}
    found = json.loads(works("evaluate", sites / "run", sites / "oslo.csv", "--json").stdout)
    assert found["pooled"]["rows"] == 99
    assert found["pooled"]["r2"] > 0.9
    assert "R²" in works("evaluate", sites / "run").stdout


def test_predictions_have_intervals(sites, tmp_path):
    works(
        "predict",
        sites / "run",
        sites / "new.csv",
        "--client",
        "bergen",
        "--out",
        tmp_path / "p.csv",
    )
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert list(rows[0])[:4] == ["row", "prediction", "lower", "upper"]
    truth = [float(row["cost"] or "nan") for row in csv.DictReader((sites / "new.csv").open())]
    held = [float(r["lower"]) <= y <= float(r["upper"]) for r, y in zip(rows, truth, strict=True)]
    assert np.mean(held[1:]) > 0.75
    run = fedgmm.open_run(sites / "run")
    numbers = [float(row["prediction"]) for row in rows]
    np.testing.assert_allclose(run.predict(sites / "new.csv", "bergen").labels, numbers)


def test_a_new_client_joins_and_novel_numbers_are_found(sites):
    found = json.loads(
        works("adapt", sites / "run", sites / "new.csv", "--client", "bodo", "--json").stdout
    )
    assert found["rows"] == 59
    assert np.max(np.sum(found["weights"], 0)) > 0.9
    labelled = [row for row in csv.DictReader((sites / "new.csv").open()) if row["cost"]]
    for row in labelled[:20]:
        row["cost"] = "9000"
    strange = write_csv(sites / "strange.csv", labelled)
    found = json.loads(works("detect", sites / "run", strange, "--score", "y", "--json").stdout)
    assert 20 <= found["novel"] < 40


def test_resumed_runs_keep_their_task(sites):
    works("resume", sites / "run", "--rounds", "32")
    assert fedgmm.open_run(sites / "run").model.task == "regression"


def test_methods_are_compared_by_r2(sites, tmp_path):
    """Sites disagree, so FedEM with two learners beats one learner and the pooled rows."""
    arguments = ["--methods", "fedavg,fedem", "--learner", "linear", "--rounds", "20"]
    arguments += ["--learners", "2", "--tuning-rounds", "2"]
    record = json.loads(works("compare", sites / "run", *arguments, "--json").stdout)
    assert record["metric"] == "r2"
    assert record["tied"] == ["fedem"]
    assert "R²" in record["headline"]
    average, mixture = record["methods"]
    assert mixture["r2"] > 0.9 > average["r2"]
    assert mixture["interval"][0] < mixture["r2"] < mixture["interval"][1]
    assert mixture["clients"]["oslo"] < 2 * NOISE
    assert set(record["pooled"]) == {"ridge", "boosting"}
    assert record["pooled"]["ridge"]["r2"] < 0.5
    files = [sites / "oslo.csv", "--label", "cost", "--task", "regression", *arguments]
    shown = works("compare", *files).stdout
    assert "RMSE" in shown
    assert "pooled: ridge" in shown


def test_the_report_of_numbers(sites):
    works("report", sites / "run")
    page = (sites / "run" / "report.html").read_text(encoding="utf-8")
    metrics = json.loads((sites / "run" / "metrics.json").read_text())
    assert f"RMSE {metrics['test']['rmse']:.4g}" in page
    for section in ("accuracy", "calibration", "columns", "weights", "adaptation", "clients"):
        assert f'id="{section}"' in page
    for words in ("explains (R²)", "80% interval should hold", "inside 90% intervals", "numbers"):
        assert words in page
    assert "test accuracy" not in page


def test_commands_for_classes_say_so(sites):
    assert "numbers" in fails("evaluate", sites / "run", "--threshold", "0.5")
    assert "classes" in fails("predict", sites / "run", sites / "new.csv", "--threshold", "0.5")
    assert "classes" in fails("predict", sites / "run", sites / "new.csv", "--positive", "ill")


def test_a_label_of_texts_is_refused(sites, tmp_path):
    path = write_csv(
        tmp_path / "a.csv", [{"age": "1", "cost": "low"}, {"age": "2", "cost": "high"}]
    )
    assert "numbers" in fails(
        "fit", path, "--label", "cost", "--task", "regression", "--out", tmp_path / "run"
    )
    same = write_csv(tmp_path / "b.csv", [{"age": str(i), "cost": "5"} for i in range(9)])
    assert "one value" in fails(
        "fit", same, "--label", "cost", "--task", "regression", "--out", tmp_path / "run"
    )
