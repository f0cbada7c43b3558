"""The live page of a run: what its state says, and what its server refuses."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest

import fedgmm
from fedgmm.cli import app
from fedgmm.runs.folder import RunFolder, write_history
from fedgmm.runs.watch import WatchServer, _Handler, state_of
from small_runs import RUNNER

ROUND = {"round": 1.0, "log_likelihood": -2.5, "seconds": 0.5}


def started(home, text="[training]\nrounds = 9\n"):
    folder = RunFolder(home)
    folder.home.mkdir()
    folder.config.write_text(text)
    return folder


def make_old(folder):
    """Let all files be an hour old, as after a crash."""
    for path in [*folder.home.rglob("*"), folder.home]:
        os.utime(path, (path.stat().st_mtime - 3600,) * 2)


# ---------------------------------------------------------------------- the state


def test_before_there_is_a_run(tmp_path):
    state = state_of(tmp_path / "run")
    assert state["status"] == "waiting"
    assert state["history"] == []
    assert not (tmp_path / "run").exists()  # watching creates nothing


def test_before_the_first_round(tmp_path):
    folder = started(tmp_path / "run")
    state = state_of(folder.home)
    assert (state["status"], state["rounds"]) == ("preparing", 9)


def test_a_process_at_work_is_seen_by_its_lock(tmp_path):
    folder = started(tmp_path / "run")
    write_history(folder.history, [ROUND])
    with folder.lock():
        make_old(folder)  # a round may take an hour
        assert state_of(folder.home)["status"] == "training"
    make_old(folder)
    assert state_of(folder.home)["status"] == "stopped"


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path):
    folder = started(tmp_path / "run")
    write_history(folder.history, [ROUND, {**ROUND, "round": 2.0}])
    with folder.history.open("a") as file:
        file.write('{"round": 3.0, "log_li')
    folder.config.write_text("[train")  # being replaced
    state = state_of(folder.home)
    assert [entry["round"] for entry in state["history"]] == [1.0, 2.0]
    assert state["status"] == "training"


def test_a_long_run_is_thinned_out_and_keeps_its_last_round(tmp_path):
    folder = started(tmp_path / "run")
    write_history(folder.history, [{**ROUND, "round": float(k)} for k in range(1, 1302)])
    rounds = [entry["round"] for entry in state_of(folder.home)["history"]]
    assert len(rounds) <= 400
    assert rounds[-1] == 1301
    assert rounds == sorted(rounds)


def test_a_finished_run(finished):
    state = state_of(finished / "run")
    metrics = json.loads((finished / "run" / "metrics.json").read_text())
    assert state["status"] == "finished"
    assert state["test"] == metrics["headline"]
    assert len(state["history"]) == metrics["rounds"]
    assert state["method"] == "FedGMM"
    assert state["clients"] == []


def test_a_federation_says_who_answered_and_what_it_sent(tmp_path):
    text = "[training]\nrounds = 3\n[federation]\nmin_clients = 2\n[privacy]\nepsilon = 4.0\n"
    folder = started(tmp_path / "run", text)
    first = {
        **ROUND,
        "answered": 2.0,
        "bytes_sent": 30.0,
        "bytes_received": 12.0,
        "bytes": {"oslo": [10, 5], "rome": [20, 7]},
        "epsilon": 0.5,
    }
    second = {
        **first,
        "round": 2.0,
        "answered": 1.0,
        "dropped": {"rome": "its update is too large"},
        "epsilon": 0.75,
    }
    write_history(folder.history, [first, second])
    state = state_of(folder.home)
    assert (state["federated"], state["budget"], state["bytes"]) == (True, 4.0, 84.0)
    assert [entry["epsilon"] for entry in state["history"]] == [0.5, 0.75]
    assert [entry["answered"] for entry in state["history"]] == [2.0, 1.0]
    oslo, rome = state["clients"]
    assert oslo == {"name": "oslo", "answered": 2, "last": 2.0, "bytes": 30, "problem": None}
    assert (rome["answered"], rome["last"], rome["bytes"]) == (1, 1.0, 54)
    assert rome["problem"] == "round 2: its update is too large"


# ---------------------------------------------------------------------- the server


@pytest.fixture
def server(finished):
    with WatchServer(finished / "run", port=0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def ask(server, path="/", host=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    reply = connection.getresponse()
    return reply.status, reply.read().decode(), reply.headers


def test_the_page_and_its_state(server):
    status, page, headers = ask(server)
    assert status == 200
    assert "<h1>run</h1>" in page
    assert "http" not in re.sub(r"<!--.*?-->", "", page).replace("http-equiv", "")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "script-src 'sha256-" in policy
    status, text, headers = ask(server, "/state")
    assert json.loads(text)["status"] == "finished"
    assert headers["Cache-Control"] == "no-store"
    assert ask(server, host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1.evil.example", "127.0.0.1", ""])
def test_another_host_is_refused(server, name):
    """A site whose name was made to lead here must not read the state."""
    port = "" if name == "127.0.0.1" else f":{server.server_port}"
    status, text, _ = ask(server, "/state", host=name + port)
    assert status == 403
    assert "round" not in text


@pytest.mark.parametrize(
    "path", ["/metrics.json", "/../config.toml", "/state/", "/state?x", "/%2e%2e/", "/x"]
)
def test_other_paths_are_not_found(server, path):
    assert ask(server, path)[0] == 404


def test_nothing_can_be_sent(server):
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
        assert ask(server, method=method)[0] == 501


def test_a_connection_that_says_nothing_is_closed(server, monkeypatch):
    assert _Handler.timeout
    monkeypatch.setattr(_Handler, "timeout", 0.1)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as idle:
        idle.sendall(b"GET / HT")
        assert idle.recv(100) == b""


def test_a_taken_port_is_replaced_only_if_it_was_not_chosen(server, monkeypatch):
    monkeypatch.setattr("fedgmm.runs.watch.PORT", server.server_port)
    with WatchServer(server.home) as other:
        assert other.server_port not in (0, server.server_port)
    with pytest.raises(OSError, match="in use"):
        WatchServer(server.home, port=server.server_port)


# ---------------------------------------------------------------------- the command


def test_the_state_as_json(finished):
    found = RUNNER.invoke(app, ["watch", str(finished / "run"), "--json"])
    assert json.loads(found.stdout)["status"] == "finished"


def test_ctrl_c_ends_the_command(tmp_path, monkeypatch):
    # the server calls this between two requests
    monkeypatch.setattr(
        WatchServer, "service_actions", lambda _: signal.raise_signal(signal.SIGINT)
    )
    found = RUNNER.invoke(app, ["watch", str(tmp_path / "later"), "--port", "0"])
    assert found.exit_code == 0
    assert re.fullmatch(r"Watching .* at http://127\.0\.0\.1:\d+/ \(Ctrl-C ends\)\n", found.stderr)


@pytest.mark.slow
def test_ctrl_c_ends_a_process(tmp_path):
    command = [sys.executable, "-m", "fedgmm", "watch", str(tmp_path / "later"), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    line = process.stderr.readline()
    assert re.search(r"http://127\.0\.0\.1:\d+/", line)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 0
    assert "Traceback" not in process.stderr.read()


def test_training_is_watched_while_it_runs(finished, tmp_path):
    seen, again = [], tmp_path / "again"
    config = fedgmm.open_run(finished / "run").config
    fedgmm.fit(
        config.files,
        config.table.label,
        again,
        rounds=3,
        components=2,
        learners=2,
        on_round=[lambda _: seen.append(state_of(again))],
    )
    assert [len(state["history"]) for state in seen] == [1, 2, 3]
    assert {state["status"] for state in seen} == {"training"}
    assert state_of(again)["status"] == "finished"
