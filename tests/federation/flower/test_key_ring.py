"""Public keys that come and go while the server runs, without a SuperLink."""

import json
import shutil

import pytest

from fedgmm.federation.flower import key_ring
from fedgmm.federation.flower.key_ring import KeyRing
from fedgmm.federation.flower.keys import new_pair, read_public_keys


class SuperLink:
    """Says yes, and gives each key a node."""

    def __init__(self):
        self.told = []

    def say(self, line):
        self.told.append(json.loads(line)["keys"])

    def next_line(self, _):
        nodes = {f"node of {pem[-60:-40]}": name for name, pem in self.told[-1].items()}
        return json.dumps({"nodes": nodes})


@pytest.fixture
def keys(tmp_path, monkeypatch):
    monkeypatch.setattr(key_ring, "_EVERY", 0.0)
    for name in ("bergen", "oslo", "tromso"):
        new_pair(name, tmp_path / "made")
    folder = tmp_path / "keys"
    folder.mkdir()
    shutil.copy(tmp_path / "made/oslo.pub", folder)
    link, lines = SuperLink(), []
    ring = KeyRing(folder, link, read_public_keys(folder), {"1": "oslo"}, lines.append)
    return tmp_path / "made", folder, ring, link, lines


def test_a_folder_that_does_not_change_is_left_alone(keys):
    _, _, ring, link, lines = keys
    for _ in range(3):
        ring.refresh()
    assert link.told == lines == []
    assert ring.names == {"1": "oslo"}


def test_a_new_key_is_let_in_and_one_that_is_gone_is_not(keys):
    made, folder, ring, link, lines = keys
    names = ring.names
    shutil.copy(made / "bergen.pub", folder)
    ring.refresh()
    assert lines == ["The key of bergen is let in from now on."]
    assert sorted(link.told[-1]) == sorted(names.values()) == ["bergen", "oslo"]
    (folder / "oslo.pub").unlink()
    ring.refresh()
    assert lines[1:] == ["The key of oslo is not let in any more."]
    assert list(names.values()) == ["bergen"]


def test_a_site_gets_a_new_key(keys):
    made, folder, ring, link, lines = keys
    shutil.copy(made / "tromso.pub", folder / "oslo.pub")
    ring.refresh()
    assert lines == ["oslo has a new key; the old one is not let in any more."]
    assert list(link.told[-1]) == ["oslo"]


def test_a_file_that_is_no_key_changes_nothing(keys):
    made, folder, ring, link, lines = keys
    (folder / "bergen.pub").write_text("half of it")
    ring.refresh()
    ring.refresh()
    assert link.told == []
    (line,) = lines
    assert line.startswith("The keys stay as they are: ")
    shutil.copy(made / "bergen.pub", folder)
    ring.refresh()
    assert sorted(link.told[-1]) == ["bergen", "oslo"]


def test_an_engine_that_does_not_answer_is_told_of(keys):
    made, folder, ring, link, lines = keys
    link.next_line = lambda _: ""
    shutil.copy(made / "bergen.pub", folder)
    ring.refresh()
    assert "start the server again" in lines[0]
    assert ring.names == {"1": "oslo"}


def test_without_a_folder_nothing_is_watched():
    KeyRing(None, None, [], {}, print).refresh()
