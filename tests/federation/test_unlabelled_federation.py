"""Tables without labels: the federated Gaussian mixture, in one process and over sites."""

import json

import numpy as np
import pytest

from fedgmm.federation.server import run_federation
from fedgmm.federation.settings import read_settings
from fedgmm.runs import fit, open_run
from in_memory_sites import InMemorySites, federate, mixture_at_hand
from small_runs import draw_rows, fails, works, write_csv

pytestmark = pytest.mark.usefixtures("quick_looks")

TRAINING = {"algorithm": "gmm", "components": 3, "rounds": 5, "covariance_type": "full"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    home, rng = tmp_path_factory.mktemp("unlabelled"), np.random.default_rng(0)
    return [
        write_csv(home / f"{name}.csv", draw_rows(rng, rows, turned=rows == 60), without=("state",))
        for name, rows in {"bergen": 60, "oslo": 90, "tromso": 50}.items()
    ]


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory):
    home = tmp_path_factory.mktemp("finished")
    sites = InMemorySites(files, home, share_metrics=True)
    sites.add(files[2], node="later", name="later", adapt_only=True)
    sites.sent = []
    sites.tamper = lambda name, request, reply: sites.sent.append((name, request, reply)) or reply
    settings = home / "federation.toml"
    text = '[training]\nalgorithm = "gmm"\ncomponents = 3\nrounds = 5\ncovariance_type = "full"\n'
    settings.write_text(text + 'dtype = "float64"\n[federation]\nclients = 3\n')
    run_federation(read_settings(settings), sites, home / "server")
    return home, sites


def mixture_of(home):
    found = open_run(home).model.prediction
    parts = found.gaussians.means, found.gaussians.covariances, found.client_weights
    return tuple(part.numpy() for part in parts)


def test_a_federation_ends_with_the_mixture_of_one_process(finished, files, tmp_path):
    home, _ = finished
    fit(files, None, tmp_path / "here", **TRAINING, dtype="float64")
    means, covariances, weights = mixture_of(tmp_path / "here")
    for place, name in enumerate(("bergen", "oslo", "tromso")):
        own = mixture_of(home / "sites" / name)
        np.testing.assert_allclose(own[0], means, atol=1e-10)
        np.testing.assert_allclose(own[1], covariances, atol=1e-10)
        np.testing.assert_allclose(own[2][0], weights[place], atol=1e-10)


def test_it_is_the_federated_mixture_of_the_paper(finished, files):
    shared = mixture_at_hand(files, None, rounds=5)
    means, covariances, _ = mixture_of(finished[0] / "server")
    np.testing.assert_allclose(means, shared.gaussians.means, atol=1e-10)
    np.testing.assert_allclose(covariances, shared.gaussians.covariances, atol=1e-10)


def test_a_site_finds_novel_rows_with_it(finished, files, tmp_path):
    far = [dict(row, age="900") for row in draw_rows(np.random.default_rng(1), 30)]
    strange = write_csv(tmp_path / "far.csv", far, without=("state",))
    rate = (
        "--json",
        "--false-alarm-rate",
        0.2,
    )  # fewer need more held-out rows than a site has here
    for site in ("oslo", "bergen"):
        found = works("detect", finished[0] / "sites" / site, strange, *rate).stdout
        assert json.loads(found)["novel"] == 30
    usual = works("detect", finished[0] / "sites/oslo", files[0], *rate).stdout
    assert 0 < json.loads(usual)["novel"] < 30


def test_a_new_site_adapts_to_it(finished, files):
    model = open_run(finished[0] / "sites/later").model
    assert model.names == ["later"]
    assert model.client_weights.sum() == pytest.approx(1.0)


def test_there_are_densities_and_no_accuracies(finished):
    home, sites = finished
    for place in ("sites/oslo", "server"):
        text = (home / place / "metrics.json").read_text()
        assert "accuracy" not in text
    assert json.loads((home / "sites/oslo/metrics.json").read_text())["clients"]["oslo"].keys() == {
        "rows",
        "log_density",
    }
    assert not any("validation" in reply.facts for _, _, reply in sites.sent)
    assert "No client shared" in (home / "server/report.html").read_text()


def test_what_needs_labels_says_so(finished, files):
    run = finished[0] / "sites/oslo"
    commands = [("evaluate", run), ("predict", run, files[0]), ("report", run), ("compare", run)]
    commands += [
        ("detect", run, files[0], "--score", score) for score in ("y", "joint", "confidence")
    ]
    for command in commands:
        assert "trained without labels" in fails(*command)


def test_labels_and_mixture_do_not_go_together(files, tmp_path):
    assert "without a label" in fails(
        "fit", *files, "--algorithm", "gmm", "--label", "age", "--out", tmp_path / "run"
    )
    assert "No label column" in fails("fit", *files, "--out", tmp_path / "run")
    with pytest.raises(ValueError, match="No label column"):
        fit(files, None, tmp_path / "run")


def test_the_command_without_labels(files, tmp_path):
    result = works("fit", *files, "--algorithm", "gmm", "--rounds", 2, "--out", tmp_path / "run")
    assert "log-density" in result.output
    assert "accuracy" not in result.output


def test_the_number_of_gaussians_is_chosen_by_the_inputs(tmp_path):
    rng = np.random.default_rng(0)
    for site in range(3):
        x = np.array([-9.0, 0.0, 9.0])[rng.integers(0, 3, 150)] + rng.normal(size=150)
        write_csv(tmp_path / f"{site}.csv", [{"x": value} for value in x.tolist()])
    run = fit(tmp_path / "*.csv", None, tmp_path / "run", algorithm="gmm", components="auto")
    assert run.model.n_components == 3


@pytest.mark.parametrize("array", ["counts", "gaussians/second", "gaussians/first"])
def test_a_liar_is_left_out_here_too(files, tmp_path, array):
    sites = InMemorySites(files, tmp_path)

    def lie(name, request, reply):
        if name == "oslo" and request.kind == "round" and request.facts["round"] > 1:
            reply.arrays[array][:] = np.nan
        return reply

    sites.tamper = lie
    _, lines = federate([], tmp_path, sites=sites, label=None, min_clients=2, **TRAINING)
    assert f"round 2: the update of oslo is dropped: {array} is not finite" in lines
    assert np.isfinite(mixture_of(tmp_path / "server")[1]).all()
