"""A federation ends with the parameters of the run in one process, method by method."""

import json

import numpy as np
import pytest
import torch

from fedgmm.federation.job import check_for_tables
from fedgmm.federation.settings import FederationError
from fedgmm.runs import fit, open_run
from in_memory_sites import InMemorySites, federate, federation_settings, mixture_at_hand
from small_runs import draw_rows, write_csv, write_sites

pytestmark = pytest.mark.usefixtures("blank_reports")

METHODS = ("fedgmm", "fedem", "fedavg", "fedprox", "fedavg+", "local", "clustered", "pfedme")
SIZE = {"components": 2, "learners": 2, "rounds": 3, "covariance_type": "full"}


def own_parts(model, name):
    """All numbers that decide a client's predictions."""
    prediction, code = model.prediction, model.names.index(name)
    parts = {}
    if prediction.assignment is not None:
        own = int(prediction.assignment[code])
        parts |= {key: value[own] for key, value in prediction.learners.items()}
    else:
        parts |= prediction.learners
        parts |= {"pi": prediction.client_weights[code], "weights": prediction.weights}
    if prediction.gaussians is not None:
        parts["means"] = prediction.gaussians.means
        parts["covariances"] = prediction.gaussians.covariances
    return {key: value.double() for key, value in parts.items()}


def assert_same_model(files, home, tolerance, sites=None, **options):
    reference = fit(files, "state", home / "reference", **options).model
    # a site may lose its memory at any time, so every request meets a new one
    sites, lines = federate(files, home, sites=sites, fresh=True, **options)
    for name in reference.names:
        own = open_run(home / "sites" / name).model
        wanted, found = own_parts(reference, name), own_parts(own, name)
        assert wanted.keys() == found.keys()
        for key, value in wanted.items():
            assert float((value - found[key]).abs().max()) < tolerance, (name, key)
    return reference, sites, lines


@pytest.mark.parametrize(
    ("algorithm", "learner"),
    [
        ("fedgmm", "linear"),
        *((algorithm, "mlp") for algorithm in METHODS),
        *(pytest.param(algorithm, "linear", marks=pytest.mark.slow) for algorithm in METHODS[1:]),
    ],
)
def test_gradient_steps_end_with_the_same_parameters(files, tmp_path, algorithm, learner):
    options = {**SIZE, "algorithm": algorithm, "solver": "sgd", "learner": learner}
    assert_same_model(files, tmp_path, 1e-5, **options)


@pytest.mark.parametrize("algorithm", ["fedgmm", "fedem", "fedavg", "fedavg+"])
def test_exact_steps_end_with_the_same_parameters(files, tmp_path, algorithm):
    options = {**SIZE, "algorithm": algorithm, "solver": "newton", "dtype": "float64"}
    assert_same_model(files, tmp_path, 1e-10, **options)


@pytest.mark.parametrize(
    ("kind", "aggregation"),
    [
        *((kind, "exact") for kind in ("full", "tied", "diag", "spherical")),
        ("full", "paper"),
        *(pytest.param(k, "paper", marks=pytest.mark.slow) for k in ("tied", "diag", "spherical")),
    ],
)
def test_all_covariances_and_aggregations(files, tmp_path, kind, aggregation):
    options = {**SIZE, "covariance_type": kind, "aggregation": aggregation, "dtype": "float64"}
    assert_same_model(files, tmp_path, 1e-10, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"participation": 0.6, "rounds": 5},
        {"warmup": 2, "rounds": 5, "solver": "sgd"},
        {"schedule": "cosine", "server": "momentum", "server_lr": 0.5, "solver": "sgd"},
        {"components": 40, "learners": 3, "covariance_type": "diag"},
        {"components": 1, "learners": 1},
        {"seed": 7, "tol": 0.5, "rounds": 30},
    ],
)
def test_other_options(files, tmp_path, options):
    reference, _, _ = assert_same_model(
        files, tmp_path, 1e-10, **{**SIZE, "dtype": "float64", **options}
    )
    rounds = [json.loads(line) for line in (tmp_path / "server/history.jsonl").open()]
    assert [entry["round"] for entry in rounds] == [entry["round"] for entry in reference.history]
    for here, there in zip(rounds, reference.history, strict=True):
        assert here["log_likelihood"] == pytest.approx(there["log_likelihood"], abs=1e-10)


@pytest.mark.parametrize("algorithm", ["local", "pfedme", "clustered"])
def test_personal_learners_after_a_warm_up_and_with_few_who_take_part(files, tmp_path, algorithm):
    options = {**SIZE, "algorithm": algorithm, "warmup": 2, "rounds": 6, "participation": 0.6}
    assert_same_model(files, tmp_path, 1e-5, **options)


def test_a_run_has_few_exchanges(files, tmp_path):
    sites, _ = federate(files, tmp_path, **SIZE)
    kinds = [kinds[0] for kinds in sites.asked]
    assert kinds == ["hello", "start", "assigned", "round", "round", "round", "finish"]
    sites, _ = federate(files, tmp_path / "em", **SIZE, algorithm="fedem")
    assert [kinds[0] for kinds in sites.asked] == ["hello", "round", "round", "round", "finish"]


def test_tables_that_differ_in_kind_agree_as_in_one_process(tmp_path):
    rng = np.random.default_rng(5)
    data = tmp_path / "data"
    data.mkdir()
    tables = {name: draw_rows(rng, 60) for name in ("a", "b", "c")}
    for number, (name, rows) in enumerate(tables.items()):
        for row in rows:
            # numbers in two tables, text in the third; truth values beside 0 and 1
            row["kind"] = str(rng.integers(0, 3)) if name != "b" else str(rng.choice(["x", "1"]))
            flag = rng.integers(0, 2)
            row["flag"] = ("false", "true")[flag] if name == "c" else str(flag)
            row["day"] = f"2024-0{rng.integers(1, 9)}-1{number}"
    files = [write_csv(data / f"{name}.csv", rows) for name, rows in tables.items()]
    _, sites, _ = assert_same_model(files, tmp_path, 1e-10, **{**SIZE, "dtype": "float64"})
    assert sites.asked[:2] == [["hello"] * 3, ["hello"] * 2]
    here, there = (
        json.loads((tmp_path / home / "clients/preprocessing.json").read_text())
        for home in ("server", "reference")
    )
    assert here == there


def test_a_site_may_have_another_name_than_its_file(files, tmp_path):
    renamed = {"oslo": "a hospital", "bergen": "b/2", "tromso": "tromso"}
    sites = InMemorySites([], tmp_path)
    for path in files:
        sites.add(path, name=renamed[path.stem], out=tmp_path / "sites" / path.stem)
    federate(files, tmp_path, sites=sites, **SIZE)
    run = open_run(tmp_path / "sites" / "oslo")
    assert run.model.names == ["a hospital"]
    assert run.evaluate().clients == ("a hospital",)


def test_one_learner_is_the_federated_mixture(files, tmp_path):
    options = {**SIZE, "learners": 1, "components": 3, "dtype": "float64", "tol": "none"}
    federate(files, tmp_path, **options)
    shared = mixture_at_hand(files, "state", rounds=3)
    found = open_run(tmp_path / "server").model.prediction
    assert float((found.gaussians.means - shared.gaussians.means).abs().max()) < 1e-10
    assert float((found.gaussians.covariances - shared.gaussians.covariances).abs().max()) < 1e-10
    assert float((found.weights - shared.weights).abs().max()) < 1e-10


# ---------------------------------------------------------------------- on the wire


def test_learners_travel_in_half_precision_on_request(files, tmp_path):
    options = {**SIZE, "solver": "sgd", "learner": "mlp"}
    federate(files, tmp_path / "whole", **options)
    federate(files, tmp_path / "half", **options, precision="float16")
    last = [
        json.loads((tmp_path / home / "server/history.jsonl").read_text().splitlines()[-1])
        for home in ("whole", "half")
    ]
    numbers = sum(
        value.numel()
        for value in open_run(tmp_path / "whole/server").model.prediction.learners.values()
    )
    for way in (0, 1):
        saved = last[0]["bytes"]["oslo"][way] - last[1]["bytes"]["oslo"][way]
        assert saved == pytest.approx(2 * numbers, abs=200)
    a, b = (open_run(tmp_path / home / "server").model for home in ("whole", "half"))
    x = np.random.default_rng(0).normal(size=(40, a.input_shape[0]))
    assert np.abs(a.predict_proba(x) - b.predict_proba(x)).max() < 0.05


def test_a_learner_without_rows_is_not_sent_back(files, tmp_path):
    seen = []

    def look(name, request, reply):
        if request.kind == "round":
            sent = reply.arrays["learner_counts"] > 0
            assert len(reply.arrays["learners/0.weight"]) == sent.sum()
            seen.append(sent.tolist())
        return reply

    sites = InMemorySites(files, tmp_path)
    sites.tamper = look
    # with one Gaussian per learner and no share of others, some learner has no rows on some client
    federate(files, tmp_path, sites=sites, **{**SIZE, "solver": "sgd", "min_rows": 8, "rounds": 8})
    assert any(False in sent for sent in seen)
    assert any(True in sent for sent in seen)


def test_bytes_are_recorded_per_client_and_round(files, tmp_path):
    _, lines = federate(files, tmp_path, **SIZE)
    rounds = [json.loads(line) for line in (tmp_path / "server/history.jsonl").open()]
    for entry in rounds:
        assert set(entry["bytes"]) == {"oslo", "bergen", "tromso"}
        assert entry["bytes_sent"] == sum(sent for sent, _ in entry["bytes"].values()) > 1000
        assert entry["bytes_received"] == sum(got for _, got in entry["bytes"].values()) > 1000
    assert any("kB to and" in line for line in lines)
    metrics = json.loads((tmp_path / "server/metrics.json").read_text())
    assert metrics["traffic"]["oslo"][0] > sum(e["bytes"]["oslo"][0] for e in rounds)


# ---------------------------------------------------------------------- options


def test_sizes_that_were_not_given_are_reported(files, tmp_path):
    _, lines = federate(files, tmp_path, rounds=1)
    assert any("3 Gaussians and 3 learners are used" in line for line in lines)
    metrics = json.loads((tmp_path / "server/metrics.json").read_text())
    assert any("not given" in note for note in metrics["notes"])


def test_sizes_are_chosen_as_in_one_process(files, tmp_path):
    options = {"components": "auto", "learners": "auto", "rounds": 1, "ridge": 1.0}
    alone = fit(files, "state", tmp_path / "alone", **options, refit=False).model
    _, lines = federate(files, tmp_path, **options)
    together = open_run(tmp_path / "sites" / "oslo").model
    found, wanted = ((own.n_components, own.n_learners) for own in (together, alone))
    assert found == wanted
    assert any("were chosen by the validation rows" in line for line in lines)


def test_too_many_components_are_refused(files, tmp_path):
    with pytest.raises(FederationError, match="components=500"):
        federate(files, tmp_path, components=500)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="min_clients=4 is more than the 3"):
        federation_settings(3, min_clients=4)
    with pytest.raises(ValueError, match="more than the 1 client that is expected"):
        federation_settings(1, min_clients=2)
    with pytest.raises(ValueError, match="precision"):
        federation_settings(3, precision="int8")
    with pytest.raises(ValueError, match="round_timeout"):
        federation_settings(3, round_timeout=0)


def test_torch_threads_are_left_alone(files, tmp_path):
    before = torch.get_num_threads()
    federate(files, tmp_path, **SIZE)
    assert torch.get_num_threads() == before


def test_clusters_split_as_in_one_process(tmp_path):
    """Sites whose labels are the other way round leave for a cluster of their own."""
    sizes = dict.fromkeys(("a", "b", "c", "d", "e", "f"), 90)
    files = write_sites(tmp_path / "data", sizes)
    options = {"algorithm": "clustered", "rounds": 12, "tol": "none", "lr": 0.5}
    reference, _, _ = assert_same_model(files, tmp_path, 1e-4, **options)
    assert reference.n_learners > 1
    own = open_run(tmp_path / "server").model
    assert own.names == reference.names
    assert torch.equal(own.prediction.assignment, reference.prediction.assignment)


def test_tiny_and_uniform_sites(tmp_path):
    """One row, two rows, equal rows, or one class only."""
    rng = np.random.default_rng(2)
    data = tmp_path / "data"
    data.mkdir()
    tables = {
        "one": draw_rows(rng, 1),
        "two": draw_rows(rng, 2),
        "same": draw_rows(rng, 1) * 12,
        "ill": [row for row in draw_rows(rng, 60) if row["state"] == "ill"],
        "many": draw_rows(rng, 150),
    }
    files = [write_csv(data / f"{name}.csv", rows) for name, rows in tables.items()]
    assert_same_model(files, tmp_path, 1e-10, **{**SIZE, "dtype": "float64", "rounds": 5})
    assert_same_model(files, tmp_path / "sgd", 1e-5, **{**SIZE, "algorithm": "pfedme"})


def test_label_frequencies_are_left_out_over_a_federation():
    assert federation_settings(2).config.options().personal_labels is False
    asked = federation_settings(2, personal_labels=True).config.options()
    with pytest.raises(ValueError, match="personal_labels"):
        check_for_tables(asked)
