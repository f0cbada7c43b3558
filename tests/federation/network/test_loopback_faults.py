"""A federation of real processes that are killed with ``kill -9``."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from hostile_site import LIES
from loopback import Federation, parameters


@pytest.fixture
def federation(tmp_path):
    federation = Federation(tmp_path)
    yield federation
    federation.clean_up()


def rounds(federation):
    """Return the history of the server."""
    path = federation.home / "run" / "history.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for_round(federation, number, server="server"):
    federation.wait_for(server, f"round {number}: log-likelihood", timeout=90)


@pytest.mark.slow
def test_a_round_ends_without_a_killed_client_which_can_rejoin(federation):
    federation.configure(3, rounds=20_000, training="tol = 0.0", federation="min_clients = 2")
    federation.server("--round-timeout", 20)
    for name in ("bergen", "oslo", "tromso"):
        federation.client(name)
    wait_for_round(federation, 2)

    federation.freeze("oslo")  # it takes no more requests, so it dies in the middle of a round
    time.sleep(1.0)
    before = federation.said("server").count("log-likelihood")
    started = time.monotonic()
    federation.kill("oslo")
    federation.wait_for("server", "no update from oslo")
    federation.wait_for("server", "log-likelihood", times=before + 2)
    assert time.monotonic() - started < 10  # noticed at once, not at the deadline
    replied = federation.said("oslo").count("replied in")
    federation.client("oslo")
    federation.wait_for("oslo", "replied in", times=replied + 3)

    answered = [entry["answered"] for entry in rounds(federation)]
    assert min(answered) == 2
    assert answered[0] == answered[-1] == 3  # it took part before and after
    assert "starting as a newcomer" not in federation.said("oslo")  # its π was on its own disk


@pytest.mark.slow
def test_a_killed_server_resumes_with_the_same_result(federation, tmp_path_factory):
    other = Federation(tmp_path_factory.mktemp("undisturbed"))
    try:
        for one in (federation, other):
            one.configure(3, rounds=8)
            one.server()
            for name in ("bergen", "oslo", "tromso"):
                one.client(name)
            if one is federation:
                wait_for_round(one, 3)
                one.kill("server")
                one.server(name="again")
                assert one.ends("again", 120) == 0, one.all_said()
            else:
                assert one.ends("server", 120) == 0, one.all_said()
            for name in ("bergen", "oslo", "tromso"):
                assert one.ends(name) == 0, one.all_said()
    finally:
        other.clean_up()

    assert [entry["round"] for entry in rounds(federation)] == [
        entry["round"] for entry in rounds(other)
    ]
    for place in ("run", "oslo", "bergen", "tromso"):
        mine, theirs = parameters(federation.home / place), parameters(other.home / place)
        assert set(mine) == set(theirs)
        for name, array in mine.items():
            np.testing.assert_allclose(array, theirs[name], rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.slow
def test_a_late_site_takes_part_from_the_next_round(federation):
    federation.configure(3, rounds=300, training="tol = 0.0", federation="min_clients = 2")
    federation.server("--clients", 2)
    federation.client("bergen")
    federation.client("tromso")
    wait_for_round(federation, 1)

    federation.client("oslo")
    federation.wait_for("oslo", "replied in", times=3)

    assert "oslo is here" in federation.said("server")
    answered = [entry["answered"] for entry in rounds(federation)]
    assert answered[0] == 2
    assert answered[-1] == 3


@pytest.mark.slow
def test_below_quorum_the_server_waits_and_reports_for_whom(federation):
    federation.configure(2, rounds=8, training="tol = 0.0")
    federation.server("--round-timeout", 4)
    federation.client("bergen")

    federation.wait_for("server", "waiting for 1 more of 2 clients; connected: bergen")

    federation.client("oslo")
    wait_for_round(federation, 2)
    federation.kill("oslo")
    federation.wait_for("server", "1 of at least 2 clients have replied; waiting for oslo")
    federation.client("oslo")
    assert federation.ends("server") == 0, federation.all_said()
    assert federation.ends("oslo") == 0
    assert [entry["answered"] for entry in rounds(federation)] == [2] * 8


@pytest.mark.slow
def test_a_site_that_lies_in_every_round_is_named_and_left_out(federation):
    federation.configure(
        3,
        rounds=len(LIES) + 400,
        training="tol = 0.0",
        federation="min_clients = 2\nlargest_message = 1_000_000",
    )
    federation.server()
    program = Path(__file__).parents[2] / "hostile_site.py"
    federation.start_program("liar", program, federation.port, "oslo", federation.tls.authority)
    federation.client("bergen")
    federation.client("tromso")

    assert federation.ends("server", 200) == 0, federation.all_said()
    for name in ("bergen", "tromso"):
        assert federation.ends(name) == 0

    history, reasons = rounds(federation), {}
    for place, lie in enumerate(LIES):
        entry = history[place + 1]
        assert entry["answered"] == 2, lie
        reasons[lie] = entry["dropped"]["oslo"]
    assert history[0]["answered"] == history[-1]["answered"] == 3
    for lie, words in {
        "nan": "counts is not finite",
        "infinite": "gaussians/second is not finite",
        "negative": "counts is less than 0",
        "above its rows": "counts exceeds",
        "shape": "gaussians/first has shape",
        "dtype": "gaussians/first is float32",
        "gigantic": "at most 1000000 are allowed",
        "not semidefinite": "gaussians/second is less than 0",
        "replayed": "belongs to another request",
    }.items():
        assert words in reasons[lie]
        assert words in federation.said("server")
    for array in parameters(federation.home / "run").values():
        assert np.isfinite(array).all()
