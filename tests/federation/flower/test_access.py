"""Access control in front of Flower's SuperLink, called as the web server calls it."""

import asyncio
import json

import pytest

from fedgmm.federation.flower.access import (
    LARGEST_REQUEST,
    SECRET_HEADER,
    LocalAccess,
    PublicAccess,
)


def call(access, path, headers=None, kind="http", client=None):
    """Return status and body of a request; 299 means that Flower received it."""
    sent = []

    async def send(event):
        sent.append(event)

    async def receive():
        return {"type": "http.request"}

    raw = [(k.encode(), v.encode()) for k, v in (headers or {}).items()]
    asyncio.run(
        access({"type": kind, "path": path, "headers": raw, "client": client}, receive, send)
    )
    if kind == "websocket":
        return sent[0]["type"]
    return sent[0]["status"], sent[1]["body"]


async def flower(_, __, send):
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b"flower"})


def public(known=frozenset({b"good"}), most=10**9, window=10.0):
    return PublicAccess(flower, known, most, window)


NODE = {"flwr-public-key": "good", "content-length": "10"}


def test_a_node_with_a_known_key_reaches_the_fleet():
    assert call(public(), "/v1/fleet/pull-messages", NODE)[0] == 299


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/docs",
        "/openapi.json",
        "/v1/fleet",
        "/v1/fleetx/",
        "//v1/fleet/",
        "/v1/control/../fleet/",
        "/",
    ],
)
def test_only_the_fleet_interface_is_public(path):
    assert call(public(), path, NODE)[0] == 404


def test_web_sockets_are_refused():
    assert call(public(), "/v1/fleet/x", NODE, kind="websocket") == "websocket.close"


@pytest.mark.parametrize("key", ["bad", "", "goo", "good2"])
def test_an_unknown_key_is_refused_before_anything_is_read(key):
    status, body = call(public(), "/v1/fleet/activate-node", {**NODE, "flwr-public-key": key})

    assert status == 400
    assert "registered" in json.loads(body)["public_message"]


def test_without_keys_every_node_is_accepted():
    assert call(public(known=None), "/v1/fleet/x", {"content-length": "0"})[0] == 299


@pytest.mark.parametrize("length", [None, "", "-1", "abc", str(LARGEST_REQUEST + 1), "9" * 30])
def test_a_request_that_is_too_large_or_has_no_length_is_refused(length):
    headers = dict(NODE)
    del headers["content-length"]
    if length is not None:
        headers["content-length"] = length

    assert call(public(), "/v1/fleet/push-object", headers)[0] == 413


def test_the_limit_counts_per_key():
    access = public(known=None, most=100, window=60)
    large = {**NODE, "content-length": "60"}

    assert call(access, "/v1/fleet/push-object", large)[0] == 299
    assert call(access, "/v1/fleet/push-object", large)[0] == 413
    assert call(access, "/v1/fleet/push-object", {**large, "flwr-public-key": "x"})[0] == 299


def test_the_limit_of_a_key_counts_per_address():
    access = public(most=100, window=60)
    large = {**NODE, "content-length": "90"}

    assert call(access, "/v1/fleet/push-object", large, client=("6.6.6.6", 1))[0] == 299
    assert call(access, "/v1/fleet/push-object", large, client=("6.6.6.6", 2))[0] == 413
    assert call(access, "/v1/fleet/push-object", large, client=("10.0.0.1", 1))[0] == 299


def test_keys_may_change_while_the_server_runs():
    known = {b"good"}
    access = public(known)
    known.clear()

    assert call(access, "/v1/fleet/pull-messages", NODE)[0] == 400


def test_the_limit_is_reset_after_the_window():
    access = public(most=100, window=0.0)

    for _ in range(3):
        assert call(access, "/v1/fleet/push-object", {**NODE, "content-length": "60"})[0] == 299


def test_health_needs_no_key():
    assert call(public(), "/health") == (200, b"fedgmm")


@pytest.mark.parametrize("secret", [None, "", "wrong"])
def test_starting_runs_requires_the_secret_on_this_machine(secret):
    access = LocalAccess(flower, "right")
    headers = {} if secret is None else {SECRET_HEADER: secret}

    assert call(access, "/v1/control/start-run", headers)[0] == 403
    assert call(access, "/v1/fleet/activate-node", headers)[0] == 403
    assert call(access, "/v1/runtime/acquire-task", headers)[0] == 299  # Flower has its own secret
    assert call(access, "/v1/control/start-run", {SECRET_HEADER: "right"})[0] == 299


def test_the_server_is_reached_without_a_proxy(tmp_path, monkeypatch):
    from fedgmm.federation.flower.processes import FlowerFolder, environment

    monkeypatch.setenv("NO_PROXY", "intranet,127.0.0.1")

    found = environment(FlowerFolder(tmp_path), "server.org")["NO_PROXY"].split(",")

    assert sorted(found) == ["127.0.0.1", "::1", "intranet", "localhost", "server.org"]
