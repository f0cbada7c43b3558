"""Five honest sites and a malicious one: the models of the honest ones stay as good as without it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fedgmm.runs import open_run
from in_memory_sites import InMemorySites, federate, federation_settings, with_arrays, with_facts
from small_runs import write_csv

pytestmark = pytest.mark.usefixtures("blank_reports", "quick_looks")

HONEST = ("bergen", "bodo", "molde", "oslo", "tromso")
LIAR = "alta"  # the first by name
TIMES = 10**6

METHODS = {
    "fedgmm": {"components": 2, "learners": 2},
    "fedgmm-sgd": {"components": 2, "learners": 2, "solver": "sgd", "lr": 0.5},
    "fedgmm-mlp": {"components": 2, "learners": 2, "learner": "mlp", "lr": 0.5},
    "fedem": {"algorithm": "fedem", "learners": 2},
    "fedavg": {"algorithm": "fedavg", "solver": "sgd", "lr": 0.5},
    "fedavg-mlp": {"algorithm": "fedavg", "learner": "mlp", "lr": 0.5},
}
EXACT = {"fedgmm", "fedem"}
QUICK = {"rounds": 4}


def draw_tables(seed, rows, classes=2):
    """Tables of six sites whose labels follow a linear rule with noise; the sites differ in their means."""
    rng = np.random.default_rng(seed)
    rule = 2 * rng.normal(size=(classes, 4))
    tables = {}
    for name in (LIAR, *HONEST):
        x = rng.normal(size=(rows, 4)) + 0.5 * rng.normal(size=4)
        labels = (x @ rule.T + 0.6 * rng.gumbel(size=(rows, classes))).argmax(1)
        tables[name] = [
            {**{f"x{i}": f"{v:.4f}" for i, v in enumerate(row)}, "state": f"class {k}"}
            for row, k in zip((3 * x + 10).tolist(), labels.tolist(), strict=True)
        ]
    return tables


def flipped(rows, classes=2):
    return [{**row, "state": f"class {(int(row['state'][-1]) + 1) % classes}"} for row in rows]


# ---------------------------------------------------------------------- lies


def many_rows(request, reply):
    """A million times its rows, in every number from the first summary on."""
    facts, arrays = json.loads(json.dumps(reply.facts)), dict(reply.arrays)
    if "rows" in facts:
        facts["rows"] *= TIMES
    if summary := facts.get("summary"):
        summary["rows"] *= TIMES
        summary["labels"] = {text: TIMES * n for text, n in summary["labels"].items()}
        for column in summary["columns"]:
            for name in ("missing", "count", "squares"):
                column[name] *= TIMES
    for name, value in arrays.items():
        if value.dtype == np.float64 and name != "centroids/points":
            arrays[name] = np.asarray(TIMES * value)
    return replace(reply, arrays=arrays, facts=facts)


def turned_learners(request, reply):
    if request.kind != "round":
        return reply
    turned = {n: -100 * a for n, a in reply.arrays.items() if n.startswith("learners/")}
    return replace(reply, arrays={**reply.arrays, **turned})


def wide_summary(request, reply):
    if "summary" not in reply.facts:
        return reply
    summary = json.loads(json.dumps(reply.facts["summary"]))
    for column in summary["columns"]:
        column["squares"] = 1e40
    return with_facts(reply, summary=summary)


def likely(request, reply):
    if request.kind != "round":
        return reply
    value = 1e29 if "gaussians/first" in reply.arrays else -1e17
    return with_arrays(reply, log_likelihood=np.array(value))


def far_away(request, reply):
    """Rows that lie a thousand deviations away, with moments that agree with each other."""
    arrays = dict(reply.arrays)
    if "gaussians/first" not in arrays:
        return reply
    counts, first = arrays["gaussians/counts"], arrays["gaussians/first"]
    shift = np.full(first.shape[1], 1e3)
    second = arrays["gaussians/second"]
    if second.shape == first.shape:  # Σ q (x + s)² = Σ q x² + 2 s Σ q x + n s²
        more = 2 * shift * first + counts[:, None] * shift**2
    else:
        i, j = np.tril_indices(len(shift))
        more = first[:, i] * shift[j] + first[:, j] * shift[i]
        more = more + counts[:, None] * shift[i] * shift[j]
    arrays["gaussians/first"] = first + counts[:, None] * shift
    arrays["gaussians/second"] = second + more
    if "centroids/points" in arrays:
        arrays["centroids/points"] = arrays["centroids/points"] + 1e3
    return replace(reply, arrays=arrays)


def steep(request, reply):
    """The largest gradient that its inputs allow, always in the same direction, without curvature."""
    if "learners/gradient" not in reply.arrays:
        return reply
    second, gradient = reply.arrays["learners/second"], reply.arrays["learners/gradient"]
    size = 5
    diagonal = second[:, [i * (i + 3) // 2 for i in range(size)]]
    longest = np.sqrt(reply.arrays["learner_counts"][:, None] * diagonal)
    signs = np.where(np.arange(gradient.shape[1]) % 2, 1.4, -1.4)
    return with_arrays(
        reply,
        learners__gradient=np.ascontiguousarray(
            signs * np.tile(longest, gradient.shape[1] // size)
        ),
        learners__hessian=0 * reply.arrays["learners/hessian"],
    )


def no_numbers(request, reply):
    if request.kind != "round":
        return reply
    name = next(n for n in reply.arrays if n.startswith("learners/"))
    return replace(reply, arrays={**reply.arrays, name: np.nan * reply.arrays[name]})


LIES = {
    "many rows": many_rows,
    "turned learners": turned_learners,
    "wide summary": wide_summary,
    "likely": likely,
    "far away": far_away,
    "steep": steep,
    "NaN": no_numbers,
    "wrong labels": lambda request, reply: reply,
}
WRONG_LABELS = {"many rows", "wrong labels"}


def applies(lie, method):
    if lie == "turned learners":
        return method not in EXACT
    if lie == "steep":
        return method in EXACT
    return lie != "far away" or method.startswith("fedgmm")


# ---------------------------------------------------------------------- runs


def run(home, tables, method, lie=None, classes=2, **options):
    """The mean test accuracy of the honest sites, the log, and the history."""
    own = {**tables, LIAR: flipped(tables[LIAR], classes)} if lie in WRONG_LABELS else tables
    home.mkdir(parents=True)
    sites = InMemorySites(
        [write_csv(home / f"{n}.csv", rows) for n, rows in own.items()], home, fresh=False
    )
    if lie is not None:
        sites.tamper = lambda name, request, reply: (
            LIES[lie](request, reply) if name == LIAR else reply
        )
    options = {"rounds": 8, "min_clients": 5, **METHODS[method], **options}
    _, lines = federate([], home, sites=sites, **options)
    found = [
        json.loads((home / "sites" / name / "metrics.json").read_text())["clients"][name][
            "accuracy"
        ]
        for name in HONEST
    ]
    history = [json.loads(line) for line in (home / "server/history.jsonl").open()]
    return float(np.mean(found)), lines, history


@pytest.fixture(scope="module")
def tables():
    return draw_tables(1, 200)


@pytest.fixture(scope="module")
def undisturbed(tables, tmp_path_factory):
    """The accuracy without a lie, by method."""
    found = {}

    def accuracy(method):
        if method not in found:
            home = tmp_path_factory.mktemp(method) / "run"
            found[method], _, history = run(home, tables, method, **QUICK)
            assert not any("bounded" in entry for entry in history)
        return found[method]

    return accuracy


CASES = [
    ("many rows", "fedgmm"),
    pytest.param("many rows", "fedavg", marks=pytest.mark.slow),
    ("turned learners", "fedgmm-sgd"),
    pytest.param("turned learners", "fedavg-mlp", marks=pytest.mark.slow),
    ("wide summary", "fedgmm"),
    pytest.param("wide summary", "fedavg", marks=pytest.mark.slow),
    ("far away", "fedgmm"),
    ("steep", "fedem"),
    ("NaN", "fedgmm"),
    ("wrong labels", "fedgmm"),
]


@pytest.mark.parametrize(("lie", "method"), CASES)
def test_honest_sites_keep_their_accuracy(tables, tmp_path, undisturbed, lie, method):
    accuracy, lines, history = run(tmp_path / "run", tables, method, lie, **QUICK)
    assert accuracy > undisturbed(method) - 0.03
    if lie != "wrong labels":  # as many as others have: a site with unusual rows
        assert any(LIAR in line and ("count" in line or "dropped" in line) for line in lines)
    if lie in ("turned learners", "far away", "steep"):
        assert all(list(entry["bounded"]) == [LIAR] for entry in history)


def test_rows_of_a_round_must_be_those_of_the_summary(tables, tmp_path, monkeypatch):
    def more(request, reply):
        return with_facts(reply, rows=2 * reply.facts["rows"]) if "rows" in reply.facts else reply

    monkeypatch.setitem(LIES, "more", more)
    _, lines, history = run(tmp_path / "run", tables, "fedavg", "more", rounds=2)
    assert "it declares 240 rows, but had declared 120" in " ".join(lines)
    assert all(set(entry["dropped"]) == {LIAR} for entry in history)


def test_a_log_likelihood_beyond_belief_does_not_stop_training(tables, tmp_path):
    options = {"rounds": 12, "tol": 0.02}
    _, _, honest = run(tmp_path / "honest", tables, "fedgmm", **options)
    _, _, history = run(tmp_path / "run", tables, "fedgmm", "likely", **options)
    assert 2 < len(history) == len(honest) < 12
    for here, there in zip(history, honest, strict=True):
        assert here["log_likelihood"] == pytest.approx(there["log_likelihood"], abs=0.1)
        assert list(here["bounded"]) == [LIAR]


def test_the_first_site_with_another_schema_is_refused(tables, tmp_path):
    own = {
        name: [{**row, "day": "12/31/2020" if name == LIAR else "31/12/2020"} for row in rows]
        for name, rows in tables.items()
    }
    _, lines, history = run(tmp_path / "run", own, "fedavg", min_clients=1, rounds=2)
    assert any(line.startswith(f"{LIAR} is refused: the column 'day'") for line in lines)
    assert sum("refused" in line for line in lines) == 1
    assert [entry["answered"] for entry in history] == [5, 5]


def test_clustered_learning_has_no_robust_means():
    with pytest.raises(ValueError, match="clustered"):
        federation_settings(6, algorithm="clustered", robust="trimmed")


@pytest.mark.parametrize(
    ("method", "robust"),
    [
        ("fedgmm", "centred"),
        ("fedavg-mlp", "trimmed"),
        pytest.param("fedgmm", "trimmed", marks=pytest.mark.slow),
        pytest.param("fedavg-mlp", "centred", marks=pytest.mark.slow),
    ],
)
def test_robust_means_train_and_bound_wrong_labels(tables, tmp_path, undisturbed, robust, method):
    options = {**QUICK, "robust": robust}
    honest, _, _ = run(tmp_path / "honest", tables, method, **options)
    accuracy, _, _ = run(tmp_path / "run", tables, method, "wrong labels", **options)
    assert min(honest, accuracy) > undisturbed(method) - 0.03
    prediction = open_run(tmp_path / "run/server").model.prediction
    assert all(np.isfinite(value.numpy()).all() for value in prediction.learners.values())


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_honest_sites_keep_their_accuracy_in_other_federations(tmp_path, method, classes):
    for seed in (11, 12):
        tables = draw_tables(seed, 400, classes)
        options = {"rounds": 20, "classes": classes}
        honest, _, _ = run(tmp_path / str(seed), tables, method, **options)
        for lie in LIES:
            if applies(lie, method) and lie != "wrong labels":
                home = tmp_path / f"{seed} {lie}"
                accuracy, _, _ = run(home, tables, method, lie, **options)
                assert accuracy > honest - 0.03, (seed, lie)
