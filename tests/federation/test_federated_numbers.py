"""A federation that predicts numbers ends with the parameters of the run in one process."""

from __future__ import annotations

import numpy as np
import pytest

from fedgmm.data.tables.summaries import ClientSummary, ColumnSummary
from fedgmm.federation.summaries import SummaryError, summary_from_record, summary_record
from fedgmm.runs import fit, open_run
from in_memory_sites import InMemorySites, federate
from small_runs import write_csv

pytestmark = pytest.mark.usefixtures("blank_reports")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("numbers"), np.random.default_rng(0)
    paths = []
    for sign, name in ((1, "oslo"), (-1, "bergen"), (1, "tromso")):
        age, dose = 50 + 10 * rng.normal(size=60), rng.random(60)
        cost = 1000 + 20 * sign * (age - 50) + 300 * dose + 30 * rng.normal(size=60)
        rows = [
            {"age": f"{a:.2f}", "dose": f"{d:.3f}", "cost": f"{c:.2f}"}
            for a, d, c in zip(age.tolist(), dose.tolist(), cost.tolist(), strict=True)
        ]
        paths.append(write_csv(folder / f"{name}.csv", rows))
    return paths


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"algorithm": "fedgmm", "dtype": "float64"}, 1e-10),
        ({"algorithm": "fedem", "dtype": "float64"}, 1e-10),
        ({"algorithm": "fedgmm", "learner": "mlp"}, 1e-5),
        ({"algorithm": "fedavg+"}, 1e-5),
        ({"algorithm": "local"}, 1e-5),
        ({"algorithm": "clustered"}, 1e-5),
        ({"algorithm": "pfedme"}, 1e-5),
    ],
)
def test_numbers_over_a_federation(files, tmp_path, options, tolerance):
    options = {"components": 1, "learners": 2, "rounds": 4, "covariance_type": "full", **options}
    table = {"task": "regression"}
    reference = fit(files, "cost", tmp_path / "reference", task="regression", **options)
    federate(files, tmp_path, label="cost", table=table, **options)
    for path in files:
        own = open_run(tmp_path / "sites" / path.stem)
        assert own.model.task == "regression"
        # a site calibrates intervals by its own held-out rows; by the model alone they are the same
        own.model.interval_scores = reference.model.interval_scores = None
        wanted = reference.predict(path, path.stem)
        found = own.predict(path, path.stem)
        scale = np.abs(wanted.labels).max()
        assert np.abs(found.labels - wanted.labels).max() < tolerance * scale
        assert np.abs(found.interval - wanted.interval).max() < tolerance * scale


def test_patience_scores_numbers(files, tmp_path):
    options = {"components": 1, "learners": 2, "rounds": 15, "patience": 5}
    sites = InMemorySites(files, tmp_path, share_metrics=True)
    federate(files, tmp_path, sites=sites, label="cost", table={"task": "regression"}, **options)
    assert open_run(tmp_path / "sites" / "oslo").metrics["test"]["r2"] > 0.9


def test_a_blurred_score_of_numbers_is_their_density(tmp_path):
    """A density may be larger than one, and then its log-loss is negative."""
    rng, replies = np.random.default_rng(0), []
    age = rng.normal(size=60)
    rows = [
        {"age": f"{a:.6f}", "cost": f"{2 * a + 0.01 * e:.6f}"}
        for a, e in zip(age, rng.normal(size=60), strict=True)
    ]
    path = write_csv(tmp_path / "oslo.csv", rows)

    def look(name, request, reply):
        if request.kind == "score":
            replies.append(reply.arrays)
        return reply

    sites = InMemorySites([path], tmp_path, blur=0.1)
    sites.tamper = look
    options = {"components": 1, "learners": 1, "rounds": 3, "patience": 2}
    federate([path], tmp_path, sites=sites, label="cost", table={"task": "regression"}, **options)
    last = replies[-1]
    assert last["log_loss"] < -1.0
    assert last["log_loss"] == pytest.approx(-last["labels"] / last["rows"])


def test_no_number_leaves_a_site():
    own = ColumnSummary("number", 0, 9, 5.0, 2.0)
    record = summary_record(ClientSummary(9, 1, {"x": own}, {"(none)": 9}, own))
    assert record["target"]["mean"] == 5.0
    assert summary_from_record(record).target == own
    with pytest.raises(SummaryError, match="numbers"):
        summary_from_record({**record, "target": [1.0]})
