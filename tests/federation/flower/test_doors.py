"""The two doors before Flower's SuperLink, called as the web server calls them."""

import asyncio
import json

import pytest

from fedgmm.federation.flower.guard import LARGEST_REQUEST, SECRET_HEADER, PrivateDoor, PublicDoor


def call(door, path, headers=None, kind="http", client=None):
    """Status and body of a request; 299 says that it got through."""
    sent = []

    async def send(event):
        sent.append(event)

    async def receive():
        return {"type": "http.request"}

    raw = [(k.encode(), v.encode()) for k, v in (headers or {}).items()]
    asyncio.run(door({"type": kind, "path": path, "headers": raw, "client": client}, receive, send))
    if kind == "websocket":
        return sent[0]["type"]
    return sent[0]["status"], sent[1]["body"]


async def inside(_, __, send):
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b"flower"})


def public(known=frozenset({b"good"}), most=10**9, window=10.0):
    return PublicDoor(inside, known, most, window)


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
def test_nothing_but_the_fleet_is_reached_from_outside(path):
    assert call(public(), path, NODE)[0] == 404


def test_no_web_sockets():
    assert call(public(), "/v1/fleet/x", NODE, kind="websocket") == "websocket.close"


@pytest.mark.parametrize("key", ["bad", "", "goo", "good2"])
def test_an_unknown_key_is_refused_before_anything_is_read(key):
    status, body = call(public(), "/v1/fleet/activate-node", {**NODE, "flwr-public-key": key})

    assert status == 400
    assert "not registered" in json.loads(body)["public_message"]


def test_without_keys_every_node_is_let_in():
    assert call(public(known=None), "/v1/fleet/x", {"content-length": "0"})[0] == 299


@pytest.mark.parametrize("length", [None, "", "-1", "abc", str(LARGEST_REQUEST + 1), "9" * 30])
def test_a_request_that_is_too_large_or_hides_its_length_is_refused(length):
    headers = dict(NODE)
    del headers["content-length"]
    if length is not None:
        headers["content-length"] = length

    assert call(public(), "/v1/fleet/push-object", headers)[0] == 413


def test_one_node_cannot_fill_the_memory_and_does_not_hold_up_another():
    door = public(known=None, most=100, window=60)
    large = {**NODE, "content-length": "60"}

    assert call(door, "/v1/fleet/push-object", large)[0] == 299
    assert call(door, "/v1/fleet/push-object", large)[0] == 413
    assert call(door, "/v1/fleet/push-object", {**large, "flwr-public-key": "x"})[0] == 299


def test_a_stranger_cannot_use_up_what_the_owner_of_a_key_may_send():
    door = public(most=100, window=60)
    large = {**NODE, "content-length": "90"}

    assert call(door, "/v1/fleet/push-object", large, client=("6.6.6.6", 1))[0] == 299
    assert call(door, "/v1/fleet/push-object", large, client=("6.6.6.6", 2))[0] == 413
    assert call(door, "/v1/fleet/push-object", large, client=("10.0.0.1", 1))[0] == 299


def test_keys_may_change_while_the_door_is_open():
    known = {b"good"}
    door = public(known)
    known.clear()

    assert call(door, "/v1/fleet/pull-messages", NODE)[0] == 400


def test_after_a_while_a_node_may_send_again():
    door = public(most=100, window=0.0)

    for _ in range(3):
        assert call(door, "/v1/fleet/push-object", {**NODE, "content-length": "60"})[0] == 299


def test_health_tells_that_a_server_is_there():
    assert call(public(), "/health") == (200, b"fedgmm")


@pytest.mark.parametrize("secret", [None, "", "wrong"])
def test_starting_runs_needs_the_secret_even_on_this_machine(secret):
    door = PrivateDoor(inside, "right")
    headers = {} if secret is None else {SECRET_HEADER: secret}

    assert call(door, "/v1/control/start-run", headers)[0] == 403
    assert call(door, "/v1/fleet/activate-node", headers)[0] == 403
    assert call(door, "/v1/runtime/acquire-task", headers)[0] == 299  # Flower asks for its own
    assert call(door, "/v1/control/start-run", {SECRET_HEADER: "right"})[0] == 299


def test_the_server_is_reached_without_a_proxy_as_it_is_knocked_at(tmp_path, monkeypatch):
    from fedgmm.federation.flower.processes import FlowerFolder, environment

    monkeypatch.setenv("NO_PROXY", "intranet,127.0.0.1")

    found = environment(FlowerFolder(tmp_path), "server.org")["NO_PROXY"].split(",")

    assert sorted(found) == ["127.0.0.1", "::1", "intranet", "localhost", "server.org"]
