"""A fraud-like table, one percent positive at thirty sites: what the commands lead with and decide."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from small_runs import fails, works


@pytest.fixture(scope="module")
def fraud(tmp_path_factory):
    """A finished run; the amount decides, and its column has an indicator of missing values."""
    home = tmp_path_factory.mktemp("fraud")
    rng = np.random.default_rng(0)
    rows = 30 * 150
    amount, age = rng.normal(size=(2, rows))
    shop = rng.choice(["market", "web", "bar"], size=rows)
    odds = 2.0 * amount + 1.0 * (shop == "web") - 7.0
    is_fraud = rng.random(rows) < 1 / (1 + np.exp(-odds))
    with (home / "all.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["site", "amount", "age", "shop", "fraud"])
        for i in range(rows):
            value = "" if rng.random() < 0.03 else f"{amount[i]:.3f}"
            site = f"s{i % 30:02d}"
            writer.writerow([site, value, f"{age[i]:.3f}", shop[i], "yes" if is_fraud[i] else "no"])
    options = [
        "--label",
        "fraud",
        "--client-column",
        "site",
        "--components",
        "1",
        "--learners",
        "1",
    ]
    shown = works("fit", home / "all.csv", *options, "--rounds", "6", "--out", home / "run")
    assert 0.005 < is_fraud.mean() < 0.02
    return home, shown.stdout


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_average_precision_leads_against_the_base_rate(fraud):
    home, fitted = fraud
    found = json.loads(works("evaluate", home / "run", "--json").stdout)
    assert found["leading_metric"] == "average_precision"
    assert found["positive"] == "yes"
    pooled = found["pooled"]
    assert 0.005 < pooled["base_rate"] < 0.03
    assert pooled["average_precision"] > 4 * pooled["base_rate"]
    low, high = pooled["intervals"]["average_precision"]
    assert low <= pooled["average_precision"] <= high
    assert (
        pooled["confusion_matrix"]
        == np.add.reduce([own["confusion_matrix"] for own in found["clients"].values()]).tolist()
    )
    shown = works("evaluate", home / "run").stdout
    lead = f"Average precision {pooled['average_precision']:.3f}"
    assert shown.startswith(lead)
    assert f"{pooled['base_rate']:.3f}, the base rate" in shown.splitlines()[0]
    assert fitted.startswith(lead)
    titles = fitted.split("rounds", 1)[1]  # on a narrow screen they are folded
    assert titles.index("average") < titles.index("base rate") < titles.index("accuracy")
    metrics = json.loads((home / "run" / "metrics.json").read_text())
    assert metrics["pooled"] == pooled
    # a site without fraud among its test rows has a reason instead of a number
    undefined = [own for own in found["clients"].values() if own["auc"] is None]
    assert undefined
    assert all("same class" in own["undefined"]["auc"] for own in undefined)


def test_a_threshold_finds_more_of_the_rare_class(fraud):
    home, _ = fraud
    usual = json.loads(works("evaluate", home / "run", "--json").stdout)["pooled"]
    at = ["--threshold", "0.02", "--json"]
    low = json.loads(works("evaluate", home / "run", *at).stdout)
    assert low["threshold"] == 0.02
    assert low["pooled"]["sensitivity"] > usual["sensitivity"] + 0.3
    assert low["pooled"]["specificity"] < usual["specificity"]
    assert low["pooled"]["auc"] == usual["auc"]
    other = ["--positive", "no", "--json"]
    swapped = json.loads(works("evaluate", home / "run", *other).stdout)
    assert swapped["leading_metric"] == "accuracy"
    assert swapped["pooled"]["specificity"] == usual["sensitivity"]


def test_predictions_follow_the_threshold_or_the_costs(fraud):
    home, _ = fraud
    for options, threshold in (
        (["--threshold", "0.02"], 0.02),
        (["--cost", "49"], 0.02),
        (["--cost", "fn=98,fp=2"], 0.02),
        (["--cost", "yes=49"], 0.02),
        ([], 0.5),
    ):
        result = works("predict", home / "run", home / "all.csv", *options, "--out", home / "p.csv")
        rows = table(home / "p.csv")
        p = np.array([float(row["p(yes)"]) for row in rows])
        predicted = np.array([row["prediction"] == "yes" for row in rows])
        clear = abs(p - threshold) > 1e-6
        assert (predicted == (p >= threshold))[clear].all()
        own = np.array([float(row["probability"]) for row in rows])
        assert own == pytest.approx(np.where(predicted, p, 1 - p))
        assert ("probability of 0.02 on" in result.stderr) == (options[1:] not in ([], ["yes=49"]))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--threshold", "2"], "between"),
        (["--positive", "maybe"], "maybe"),
        (["--cost", "maybe=3"], "maybe"),
        (["--cost", "3", "--threshold", "0.1"], "exclude"),
    ],
)
def test_decisions_that_do_not_fit(fraud, options, word):
    home, _ = fraud
    assert word in fails("predict", home / "run", home / "all.csv", *options)
    assert word in fails("evaluate", home / "run", *options)


def test_costs_that_are_not_numbers(fraud):
    home, _ = fraud
    assert "number" in fails("predict", home / "run", home / "all.csv", "--cost", "much", code=2)


def test_the_columns_that_decide(fraud):
    home, _ = fraud
    found = json.loads(works("evaluate", home / "run", "--importance", "--json").stdout)[
        "importance"
    ]
    assert found["kind"] == "coefficients"
    assert list(found["columns"]) == ["amount", "shop", "age"]  # no categories, no indicators
    assert found["columns"]["amount"]["mean"] > 2 * found["columns"]["age"]["mean"]
    assert found["coefficients"]["amount"] > 0
    assert "amount=(missing)" in found["coefficients"]
    shown = works("evaluate", home / "run", "--importance").stdout
    assert "which columns decide" in shown
    assert f"{found['columns']['amount']['mean']:.3f}" in shown
    assert f"web {found['coefficients']['shop=web']:+.2f}" in shown
    assert "│ +" in next(line for line in shown.splitlines() if "(missing)" in line)


def test_the_report_leads_with_it_too(fraud):
    home, _ = fraud
    works("report", home / "run")
    page = (home / "run" / "report.html").read_text(encoding="utf-8")
    assert page.index("Average precision") < page.index("Mean accuracy")
    assert "One class is rare" in page
    assert 'id="chart-columns"' in page


def test_the_inspection_mentions_it(fraud):
    home, _ = fraud
    options = ["--label", "fraud", "--client-column", "site", "--json"]
    notes = json.loads(works("inspect", home / "all.csv", *options).stdout)["warnings"]
    assert any("average precision" in note and "yes" in note for note in notes)


def test_no_row_above_the_threshold_is_said_with_a_remedy(fraud):
    home, _ = fraud
    assert "--cost" in works("evaluate", home / "run", "--threshold", "0.999").stderr
