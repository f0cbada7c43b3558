"""The report of a run: its contents and its errors."""

from __future__ import annotations

import json

import pytest

import fedgmm
from fedgmm.runs import reporting
from fedgmm.runs.folder import RunError


@pytest.fixture
def gathered(monkeypatch):
    """The contents of the page."""
    seen = {}
    gather = reporting.gather

    def look(*args, **kwargs):
        seen.update(kwargs)
        return gather(*args, **kwargs)

    monkeypatch.setattr(reporting, "gather", look)
    return seen


def test_the_page_is_about_the_run(finished, gathered):
    run = fedgmm.open_run(finished / "run")
    run.adapt("narvik", finished / "newcomer.csv")
    run.adapt("alta", finished / "new.csv")
    comparison = [
        {"algorithm": "fedavg", "clients": {"oslo": 0.5, "bergen": 0.25, "tromso": 0.75}},
        {"algorithm": "fedgmm", "clients": {"oslo": 1.0, "bergen": 1.0, "tromso": 1.0}},
    ]
    run.folder.comparison.write_text(json.dumps(comparison))
    path = run.report()
    assert path == finished / "run" / "report.html"
    text = path.read_text(encoding="utf-8")
    assert "oslo" in text
    assert "narvik" in text
    assert str(finished) not in text  # no path of this machine
    assert [entry["round"] for entry in gathered["history"]] == [1, 2, 3, 4]
    assert gathered["baselines"] == {"fedavg": comparison[0]["clients"]}
    assert gathered["configuration"]["data"]["files"] == 3
    joined = {one.client: one for one in gathered["adaptations"]}
    assert set(joined) == {"narvik", "alta"}
    assert joined["narvik"].rows == [0, 5, 10, 20]
    assert joined["alta"].accuracy is None
    assert joined["alta"].rows == [40]


def test_the_tests_of_a_comparison_are_in_the_report(finished, gathered):
    run = fedgmm.open_run(finished / "run")
    clients = {"oslo": 0.5, "bergen": 0.25, "tromso": 0.75}
    tie = {"difference": 0.02, "low": -0.1, "high": 0.12, "p_value": 0.7, "tie": True}
    methods = [
        {"algorithm": "fedavg", "learner": "mlp", "clients": clients, "mean_accuracy": 0.5},
        {"algorithm": "fedgmm", "learner": "mlp", "clients": clients, "mean_accuracy": 0.5},
    ]
    methods[1]["against"] = {"fedavg": tie}
    record = {"methods": methods, "intervals": "Intervals: over 5 splits.", "seeds": [0, 1, 2]}
    run.folder.comparison.write_text(json.dumps(record))
    text = run.report().read_text(encoding="utf-8")
    assert gathered["differences"]["fedavg"].within_noise
    assert "A tie: FedGMM and FedAvg" in text
    assert "over 5 splits" in text
    assert "those of 3 splits" in text
    assert "this run has linear learners" in text


def test_a_record_without_a_client_is_not_shown(finished, gathered):
    """A crash may leave the record of a client that the model does not know."""
    run = fedgmm.open_run(finished / "run")
    record = {"client": "ghost", "took_part": False, "rows": 1, "weights": [], "labelled": False}
    run.folder.client("ghost").write_text(json.dumps({**record, "log_likelihoods": []}))
    run.report()
    assert gathered["adaptations"] == []


@pytest.mark.parametrize("name", ["metrics.json", "comparison.json"])
def test_damaged_files_are_named(finished, name):
    (finished / "run" / name).write_text("{")
    with pytest.raises(RunError, match=name.replace(".", r"\.")):
        fedgmm.open_run(finished / "run").report()


def test_another_process_in_the_folder_is_an_error(finished):
    run = fedgmm.open_run(finished / "run")
    with run.folder.lock(), pytest.raises(RunError, match="Another process"):
        run.report()
