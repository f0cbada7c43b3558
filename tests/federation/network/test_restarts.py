"""A server that is killed again and again: all clients come back, with the same parameters."""

import random
import time

import numpy as np
import pytest

from loopback import SITES, Federation, parameters

ROUNDS = 25


def finish(federation):
    assert federation.ends("server", 120) == 0, federation.all_said()
    for name in SITES:
        assert federation.ends(name) == 0, federation.all_said()
    return parameters(federation.home / "run")


@pytest.mark.slow
def test_a_server_killed_in_start_up_and_in_rounds_ends_the_same(tmp_path):
    found, chance = [], random.Random(0)
    for deaths in (0, 8):
        home = tmp_path / f"deaths-{deaths}"
        home.mkdir()
        federation = Federation(home)
        federation.configure(3, rounds=ROUNDS, training="tol = 0.0")
        try:
            federation.server()
            for name in SITES:
                federation.client(name)
            for death in range(deaths):
                if death < 5:  # more than the starts that a site allows
                    path = home / "run" / "federation-start.json"
                    deadline = time.monotonic() + 60
                    while not path.exists() and time.monotonic() < deadline:
                        time.sleep(0.02)
                    time.sleep(chance.uniform(0.0, 1.0))
                else:
                    federation.wait_for("server", f"round {3 * death - 12}: log-likelihood")
                federation.kill("server")
                federation.server()
            found.append(finish(federation))
        finally:
            federation.clean_up()
    whole, restarted = found
    assert whole.keys() == restarted.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(restarted[name], value, rtol=0, atol=1e-10)
