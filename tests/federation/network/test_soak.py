"""Sixty rounds in which a client is killed every five: the run ends, and memory does not grow."""

import random

import psutil
import pytest

from fedgmm.runs.folder import read_json
from loopback import Federation
from small_runs import works

SITES = ("bergen", "bodo", "drammen", "oslo", "stavanger", "tromso")
ROUNDS = 60


@pytest.mark.slow
def test_a_long_run_with_many_deaths(tmp_path):
    federation = Federation(tmp_path, SITES)
    federation.configure(
        6, rounds=ROUNDS, training="tol = 0.0", federation="min_clients = 4\nround_timeout = 6.0"
    )
    chance = random.Random(0)
    sizes = []
    try:
        server = psutil.Process(federation.server().pid)
        for name in SITES:
            federation.client(name)
        for number in range(5, ROUNDS, 5):
            federation.wait_for("server", f"round {number}: log-likelihood", timeout=200)
            family = [server, *server.children(recursive=True)]
            sizes.append(sum(one.memory_info().rss for one in family))
            victim = chance.choice(SITES)
            federation.kill(victim)
            federation.client(victim)
        assert federation.ends("server", 300) == 0, federation.all_said()
        for name in SITES:
            assert federation.ends(name) == 0, federation.all_said()
    finally:
        federation.clean_up()
    files = [federation.home / f"{name}.csv" for name in SITES]
    options = ["--components", 2, "--learners", 2, "--rounds", ROUNDS, "--set", "tol=0.0"]
    works("fit", *files, "--label", "state", "--out", tmp_path / "here", *options)

    print("megabytes of the server:", [round(size / 1e6) for size in sizes])
    assert sizes[-1] < 1.1 * sizes[1]
    here = read_json(tmp_path / "here" / "metrics.json")["clients"]
    there = {name: read_json(tmp_path / name / "metrics.json")["clients"][name] for name in SITES}
    mean = [
        sum(one["accuracy"] for one in found.values()) / len(SITES)
        for found in ({name: here[name] for name in SITES}, there)
    ]
    assert abs(mean[0] - mean[1]) <= 0.005 + 1e-9
