"""The logs of sites and servers, and sites that cannot take part."""

import json

import numpy as np
import pytest

from fedgmm.federation.members import Members
from fedgmm.federation.messages import Failure, one_line
from fedgmm.federation.server import check_start, run_federation
from fedgmm.federation.settings import FederationError, SiteSettings
from fedgmm.federation.site import Site, SiteError
from fedgmm.runs import fit
from in_memory_sites import InMemorySites, federate, federation_settings, with_facts
from small_runs import bytes_of, draw_rows, write_csv

pytestmark = pytest.mark.usefixtures("blank_reports", "quick_looks")

SIZE = {"components": 2, "learners": 2, "covariance_type": "full", "rounds": 2}
FORGED = "oslo\n2026-01-01 12:00:00 round 9: all is well\x1b[2J"


@pytest.mark.parametrize("text", [FORGED, "a\rb", "a\u2028b", "\x00", "\u202eevil", "a\x85b"])
def test_no_text_begins_a_new_line_or_moves_the_cursor(text):
    assert one_line(text).isprintable()


def test_plain_text_stays_as_it_is():
    text = "møre og romsdal: 2 % of 'π' – done"
    assert one_line(text) == text


def test_a_site_cannot_forge_lines_of_the_log(files, tmp_path):
    sites, lines = InMemorySites(files, tmp_path), []

    def forge(name, request, reply):
        if name == "oslo" and request.kind == "round":
            return Failure(f"the client reports: {FORGED}")
        return reply

    sites.tamper = forge
    federate([], tmp_path, sites=sites, **SIZE, min_clients=2, notify=lines.append)
    assert any("all is well" in line for line in lines)
    assert all(line.isprintable() for line in lines)


def test_a_name_that_cannot_be_read_is_not_admitted(files, tmp_path):
    sites, lines = InMemorySites(files, tmp_path), []
    sites.tamper = lambda name, request, reply: (
        with_facts(reply, name=FORGED) if name == "oslo" else reply
    )
    with pytest.raises(FederationError, match="Only 2 of 3"):
        federate([], tmp_path, sites=sites, **SIZE, start_timeout=0.1, notify=lines.append)
    assert "a client cannot take part: it does not give a readable name" in lines


def test_who_cannot_take_part_is_named_where_its_key_is_known(files, tmp_path):
    sites, lines = InMemorySites(files, tmp_path), []
    sites.tamper = lambda name, request, reply: (
        Failure("the client reports: no label", name) if name == "oslo" else reply
    )
    with pytest.raises(FederationError, match="Only 2 of 3"):
        federate([], tmp_path, sites=sites, **SIZE, start_timeout=0.1, notify=lines.append)
    assert "oslo cannot take part: the client reports: no label" in lines


def test_sites_hear_why_there_is_no_training(files, tmp_path):
    rows = draw_rows(np.random.default_rng(8), 40)
    renamed = [{n if n == "state" else f"{n} (new)": v for n, v in row.items()} for row in rows]
    odd = write_csv(tmp_path / "zz.csv", renamed)
    sites = InMemorySites([*files, odd], tmp_path)
    with pytest.raises(FederationError, match="do not fit together"):
        federate([], tmp_path, sites=sites, **SIZE)
    assert sites.asked[-1] == ["refused"] * 4
    for name in ("oslo", "zz"):
        assert any("no other client has any of its columns" in line for line in sites.lines[name])


def test_a_site_whose_table_cannot_be_used_knows_it(tmp_path):
    table = write_csv(tmp_path / "oslo.csv", draw_rows(np.random.default_rng(0), 9))
    sites = InMemorySites([table], tmp_path, fresh=False)
    settings = federation_settings(1, label="diagnosis", start_timeout=0.1)
    with pytest.raises(FederationError, match="Only 0 of 1"):
        run_federation(settings, sites, tmp_path / "server")
    site = sites.site("node-0")
    assert site.unusable is None  # the last request was the server's refusal
    assert any("there is no label column 'diagnosis'" in line for line in site_lines(sites))


def site_lines(sites):
    return sites.lines["oslo"]


@pytest.mark.parametrize(
    ("settings", "facts", "words"),
    [
        ({"min_rows": 100}, {}, "fewer rows than min_rows=100"),
        ({}, {"label": "diagnosis"}, "no label column 'diagnosis'"),
        ({}, {"label": "age"}, "label column 'age'"),
    ],
)
def test_a_site_that_cannot_take_part_knows_why(tmp_path, settings, facts, words):
    rows = draw_rows(np.random.default_rng(0), 60)
    table = write_csv(tmp_path / "oslo.csv", rows)
    site = Site(SiteSettings((table,), tmp_path / "out", **settings))
    members = Members(federation_settings(1, **facts), None, print)
    with pytest.raises(SiteError) as caught:
        site.reply(members.hello(True))
    assert words in site.unusable
    assert not any(row["age"] in str(caught.value) for row in rows)
    assert site.reply(members.hello(False)).kind == "reply"
    assert site.unusable is None


def test_an_accelerator_that_a_site_does_not_have(files, tmp_path):
    sites, lines = InMemorySites(files[:1], tmp_path, fresh=False), []

    def give_up(line):
        lines.append(line)
        if "accelerator" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federate([], tmp_path, sites=sites, **SIZE, device="cuda", notify=give_up)
    assert "the federation wants an accelerator" in sites.site("node-0").unusable


def test_a_site_counts_its_rounds(files, tmp_path):
    federate(files, tmp_path, **{**SIZE, "rounds": 3})
    metrics = json.loads((tmp_path / "sites/oslo/metrics.json").read_text())
    assert metrics["rounds"] == 3


def test_a_run_of_one_machine_is_not_written_over(files, tmp_path):
    fit(files, "state", tmp_path / "mine", **SIZE)
    before = bytes_of(tmp_path / "mine")
    with pytest.raises(ValueError, match="holds a run of one machine"):
        Site(SiteSettings((files[0],), tmp_path / "mine"))
    with pytest.raises(FederationError, match="holds a run of one machine"):
        check_start(federation_settings(3), tmp_path / "mine")
    assert bytes_of(tmp_path / "mine") == before
