"""The app on separate SuperLink and SuperNodes, started with ``flwr run``."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedgmm.federation.demo import free_port
from fedgmm.federation.flower import APP_FOLDER
from loopback import Federation

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}


def command(name):
    return str(Path(sys.executable).with_name(name))


@pytest.fixture
def flower(tmp_path):
    """Return a function that starts Flower's own programs; they end with the test."""
    federation = Federation(tmp_path, sites=("bergen", "oslo"))
    federation.configure(clients=2, rounds=2)
    home = tmp_path / "flower_home"
    home.mkdir()
    started = []

    def start(name, *arguments):
        process = subprocess.Popen(
            [command(name), *map(str, arguments)],
            cwd=tmp_path,
            env={
                **os.environ,
                **QUIET,
                "FLWR_HOME": str(home),
                "OMP_NUM_THREADS": "1",
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            },
            stdout=(tmp_path / f"{name}.txt").open("ab"),
            stderr=subprocess.STDOUT,
        )
        started.append(process)
        return process

    yield tmp_path, home, start
    for process in reversed(started):
        process.terminate()
    for process in started:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.mark.slow
def test_flwr_run_trains_with_nodes_that_hold_only_their_settings(flower):
    folder, home, start = flower
    port = free_port()
    start("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", port)
    for name in ("bergen", "oslo"):
        settings = f'data="{folder / name}.csv" out="{folder / name}"'
        start(
            "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--host",
            "127.0.0.1", "--port", free_port(), "--node-config", settings,
        )  # fmt: skip
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "mine"\n[superlink.mine]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    deadline = time.monotonic() + 120
    while True:  # until the SuperLink listens
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            break
        assert time.monotonic() < deadline, (folder / "flower-superlink.txt").read_text()
        time.sleep(0.2)
    time.sleep(4.0)  # until the nodes are registered
    run = f'config="{folder / "federation.toml"}" out="{folder / "run"}"'
    command_line = start("flwr", "run", APP_FOLDER, "mine", "-c", run)

    assert command_line.wait(60) == 0, (folder / "flwr.txt").read_text()
    deadline = time.monotonic() + 200
    while not (folder / "run" / "metrics.json").is_file():
        assert time.monotonic() < deadline, [
            path.read_text(errors="replace")[-3000:] for path in folder.glob("fl*.txt")
        ]
        time.sleep(0.5)
    assert json.loads((folder / "run" / "metrics.json").read_text())["rounds"] == 2
    for name in ("bergen", "oslo"):
        assert (folder / name / "metrics.json").is_file()
