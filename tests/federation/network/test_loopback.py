"""A federation of real processes: TLS, keys, folders, equal results, later sites."""

import json
import os
import socket
import time
from contextlib import chdir, contextmanager
from unittest import mock

import numpy as np
import psutil
import pytest

from fedgmm.federation.network.certificates import trial_certificates
from fedgmm.federation.network.keys import new_pair
from loopback import Federation, parameters
from small_runs import fails, invoke, works

SITES = ("bergen", "oslo")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A server that waits for the second of two sites."""
    federation = Federation(tmp_path_factory.mktemp("loopback"), SITES)
    federation.configure(clients=2, rounds=3, training='dtype = "float64"')
    federation.server("--serve")
    federation.client("bergen", "--share-metrics")
    federation.wait_for("server", "bergen is here")
    yield federation
    federation.clean_up()


@pytest.fixture(scope="module")
def finished(federation):
    """The same federation after the second site has joined, from this process, and training has ended."""
    with at_home_of(federation):
        works("client", *federation.client_options("oslo"))
    federation.wait_for("server", "serving its model")
    return federation


@contextmanager
def at_home_of(federation):
    """Run commands in this process with the folder and the environment of the federation's own."""
    with chdir(federation.home), mock.patch.dict(os.environ, federation.environment):
        yield


# ---------------------------------------------------------------------- access


@pytest.fixture
def at_home(federation):
    with at_home_of(federation):
        yield


@pytest.fixture
def refused(federation, at_home):
    """Run a client in this process, and return the error it ends with."""

    def run(*security, host="127.0.0.1", out="refused"):
        place = ["--server", f"{host}:{federation.port}", "--data", "oslo.csv", "--out", out]
        return fails("client", *place, *security)

    return run


def test_a_client_with_an_unknown_key_is_refused(federation, refused):
    new_pair("stranger", federation.home / "private")

    error = refused("--key", "private/stranger.key", "--ca", federation.tls.authority)

    assert "does not know this site's key" in error
    assert "stranger.pub" in error
    assert "stranger" not in federation.said("server")


def test_a_client_refuses_a_server_that_another_authority_signed(federation, refused):
    other = trial_certificates(["127.0.0.1"], federation.home / "other")

    error = refused("--key", "private/oslo.key", "--ca", other.authority)

    assert "cannot be trusted" in error


def test_a_client_refuses_a_server_under_another_name(federation, refused):
    key = ["--key", "private/oslo.key", "--ca", federation.tls.authority]

    assert "cannot be trusted" in refused(*key, host="localhost")


def test_a_client_with_plain_text_is_refused(refused):
    assert "does not respond to plain text" in refused("--insecure")


def test_the_server_does_not_respond_to_plain_text(federation):
    with socket.create_connection(("127.0.0.1", federation.port), 5) as line:
        line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert line.recv(9)[3:4] != b"\x04"  # an alert, or the end, but no HTTP/2 settings


def test_all_connections_are_local(federation):
    """All connections of all processes are on the loopback address."""
    for process in federation.processes.values():
        if process.poll() is None:
            top = psutil.Process(process.pid)
            for one in [top, *top.children(recursive=True)]:
                for line in one.net_connections():
                    assert line.laddr.ip.removeprefix("::ffff:") == "127.0.0.1"
                    assert not line.raddr or line.raddr.ip.removeprefix("::ffff:") == "127.0.0.1"


def test_a_second_process_in_the_same_folder_is_refused(federation, refused):
    key = ["--key", "private/oslo.key", "--ca", federation.tls.authority]

    assert "Another client is running" in refused(*key, out="bergen")

    second = invoke("server", *federation.server_options)
    assert second.exit_code == 1
    assert "Another server is running" in second.stderr


@pytest.mark.usefixtures("at_home")
def test_a_port_in_use_is_reported(federation):
    options = ["other_run" if one == "run" else one for one in federation.server_options]
    late = invoke("server", *options)

    assert late.exit_code == 1
    assert "choose another --port" in late.stderr


# ---------------------------------------------------------------------- the end


def test_all_clients_end(finished):
    assert finished.ends("bergen") == 0, finished.said("bergen")


def test_one_process_per_server_and_site(finished):
    assert not psutil.Process(finished.processes["server"].pid).children(recursive=True)


def test_the_model_equals_that_of_the_run_in_one_process(finished, tmp_path):
    files = [finished.home / f"{name}.csv" for name in SITES]
    options = ["--components", 2, "--learners", 2, "--rounds", 3, "--set", "dtype=float64"]
    works("fit", *files, "--label", "state", "--out", tmp_path / "here", *options)

    here, there = parameters(tmp_path / "here"), parameters(finished.home / "run")
    for name in (
        "gaussians/means",
        "gaussians/covariances",
        "learners/0.weight",
        "learners/0.bias",
    ):
        np.testing.assert_allclose(there[name], here[name], rtol=1e-10, atol=1e-10)
    for place, site in enumerate(SITES):
        mine = parameters(finished.home / site)["client_weights"][0]
        np.testing.assert_allclose(mine, here["client_weights"][place], rtol=1e-10, atol=1e-10)


def test_every_site_has_its_own_model_ready_for_predictions(finished, tmp_path):
    for name in SITES:
        out = tmp_path / f"{name}.csv"
        works("predict", finished.home / name, finished.home / f"{name}.csv", "--out", out)
        assert len(out.read_text().splitlines()) > 30


def test_the_server_has_metrics_only_of_sites_that_share_them(finished):
    metrics = json.loads((finished.home / "run" / "metrics.json").read_text())

    assert set(metrics["clients"]) == {"bergen"}
    assert (finished.home / "run" / "report.html").stat().st_size > 10_000


def test_the_folder_of_the_server_has_no_rows_and_no_programs(finished):
    """No text of the tables is in the server's folder, and no file there is a program."""
    ages = [
        line.split(",")[0] for line in (finished.home / "oslo.csv").read_text().splitlines()[1:9]
    ]
    for path in (finished.home / "run").rglob("*"):
        if path.is_file():
            assert path.suffix not in (".pkl", ".pickle", ".pt", ".py", ".joblib"), path
            content = path.read_bytes()
            assert sum(age.encode() in content for age in ages) < 4, path
    for site in SITES:
        assert not list((finished.home / site).rglob("*.py"))


def test_no_files_are_written_elsewhere(finished):
    assert not (finished.home / "nobody").exists()  # $HOME of the processes


@pytest.mark.usefixtures("at_home")
def test_a_new_site_receives_the_finished_model_and_learns_its_weights(finished):
    """Its key is added to the folder while the server runs."""
    finished.add_site("bodo", 7)
    finished.wait_for("server", "The key of bodo is now accepted")

    works("client", *finished.client_options("bodo"), "--adapt-only")

    assert "bodo has the model and adapts" in finished.said("server")
    out = finished.home / "bodo_answers.csv"
    works("predict", finished.home / "bodo", finished.home / "bodo.csv", "--out", out)
    assert len(out.read_text().splitlines()) > 30


@pytest.mark.slow
def test_a_deleted_key_is_refused_at_once(finished):
    finished.add_site("hamar", 8)
    finished.wait_for("server", "The key of hamar is now accepted")
    (finished.home / "keys" / "hamar.pub").unlink()
    finished.wait_for("server", "The key of hamar is no longer accepted")

    finished.client("hamar", "--adapt-only")

    assert finished.ends("hamar") == 1
    assert "does not know this site's key" in finished.said("hamar")


def test_sigterm_ends_the_server(finished):
    started = time.monotonic()
    finished.processes["server"].terminate()

    assert finished.ends("server") == 130
    assert time.monotonic() - started < 15
