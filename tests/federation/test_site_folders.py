"""The folders of a site and of the server, and the messages that leave a site."""

import json
import shutil

import numpy as np
import pytest

from fedgmm.federation.job import SHARED_METRICS
from fedgmm.federation.messages import PROTOCOL, Message
from fedgmm.federation.server import run_federation, serve_model
from fedgmm.federation.settings import SiteSettings, read_settings
from fedgmm.federation.site import Site
from fedgmm.runs import open_run
from in_memory_sites import InMemorySites, federate, federation_settings
from small_runs import draw_rows, fails, works, write_csv

pytestmark = pytest.mark.usefixtures("quick_looks")

SIZE = {"components": 2, "learners": 2, "covariance_type": "full", "rounds": 4}


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory):
    home = tmp_path_factory.mktemp("finished")
    sites = InMemorySites(files, home)
    sites.settings["node-0"] = SiteSettings(
        sites.settings["node-0"].data, sites.settings["node-0"].out, share_metrics=True
    )
    sent = []
    sites.tamper = lambda name, request, reply: sent.append((name, request, reply)) or reply
    federate(files, home, sites=sites, **SIZE)
    return home, sites, sent


# ---------------------------------------------------------------------- the site's folder


def test_the_commands_work_on_a_sites_folder(finished, files, tmp_path):
    home = shutil.copytree(finished[0] / "sites/oslo", tmp_path / "oslo")
    out = tmp_path / "out.csv"
    works("predict", home, files[0], "--client", "oslo", "--out", out)
    assert len(out.read_text().splitlines()) == 91
    assert "oslo" in works("evaluate", home).output
    works("evaluate", home, files[0])
    works("detect", home, files[0], "--out", tmp_path / "novel.csv")
    works("report", home)
    assert (home / "report.html").stat().st_size > 10_000
    new = write_csv(tmp_path / "new.csv", draw_rows(np.random.default_rng(3), 30))
    works("adapt", home, new, "--client", "new")


def test_a_sites_folder_holds_its_own_part_only(finished):
    home = finished[0] / "sites/oslo"
    model = open_run(home).model
    assert model.names == ["oslo"]
    assert model.client_weights.shape == (1, 2, 2)
    assert [entry["round"] for entry in map(json.loads, (home / "history.jsonl").open())] == [
        1,
        2,
        3,
        4,
    ]
    metrics = json.loads((home / "metrics.json").read_text())
    assert set(metrics["clients"]) == {"oslo"}
    assert {"train", "validation", "test"} <= set(metrics)
    text = "".join(path.read_text() for path in home.rglob("*.json"))
    assert "bergen" not in text


def test_a_second_run_writes_over_the_first(finished, files, tmp_path):
    federate(files, tmp_path, **SIZE)
    first = (tmp_path / "sites/oslo/model/model.json").read_bytes()
    settings = federation_settings(3, **{**SIZE, "components": 3})
    run_federation(
        settings, InMemorySites(files, tmp_path, forget=True, fresh=False), tmp_path / "second"
    )
    assert (tmp_path / "sites/oslo/model/model.json").read_bytes() != first
    assert len(list((tmp_path / "sites/oslo/federation").iterdir())) == 1


# ---------------------------------------------------------------------- the server's folder


def test_the_commands_work_on_the_servers_folder(finished, files, tmp_path):
    home = shutil.copytree(finished[0] / "server", tmp_path / "server")
    works("predict", home, files[0], "--out", tmp_path / "out.csv")
    new = write_csv(tmp_path / "new.csv", draw_rows(np.random.default_rng(3), 30))
    works("adapt", home, new, "--client", "new")
    assert "the rows are at its sites" in fails("evaluate", home)
    assert "Rows stay with the clients" in (home / "report.html").read_text()


@pytest.mark.parametrize(
    "algorithm", ["fedem", "fedavg", "fedprox", "fedavg+", "local", "clustered", "pfedme"]
)
def test_the_common_model_of_every_method(files, tmp_path, algorithm):
    federate(files, tmp_path, **SIZE, algorithm=algorithm)
    if algorithm == "local":
        assert not (tmp_path / "server/model").exists()
        metrics = json.loads((tmp_path / "server/metrics.json").read_text())
        assert any("shares no model" in note for note in metrics["notes"])
    else:
        works("predict", tmp_path / "server", files[0], "--out", tmp_path / "out.csv")
    works("evaluate", tmp_path / "sites/oslo")
    works(
        "predict",
        tmp_path / "sites/oslo",
        files[0],
        "--client",
        "oslo",
        "--out",
        tmp_path / "own.csv",
    )


def test_only_figures_that_were_shared_reach_the_server(finished):
    home, _, sent = finished
    metrics = json.loads((home / "server/metrics.json").read_text())
    assert set(metrics["clients"]) == {"oslo"}
    own = json.loads((home / "sites/oslo/metrics.json").read_text())
    assert metrics["clients"]["oslo"]["accuracy"] == own["clients"]["oslo"]["accuracy"]
    assert metrics["test"]["mean_accuracy"] == own["test"]["mean_accuracy"]
    for name, _, reply in sent:
        assert ("metrics" in reply.facts or "validation" in reply.facts) <= (name == "oslo")
        if "metrics" in reply.facts:  # of the test rows only
            assert set(reply.facts["metrics"]) == {"clients"}
            assert set(reply.facts["metrics"]["clients"]) == {"rows", *SHARED_METRICS}
        assert set(reply.facts.get("validation", {})) <= {"rows", "right"}
    rounds = [json.loads(line) for line in (home / "server/history.jsonl").open()]
    assert all(0 <= entry["validation_accuracy"] <= 1 for entry in rounds[:-1])


def test_no_row_leaves_a_site(finished, files):
    """Numbers of the files do not appear in what was sent, and nothing has as many rows as they."""
    _, _, sent = finished
    for name, request, reply in sent:
        rows = reply.facts.get("rows")
        for array in reply.arrays.values():
            assert rows not in array.shape
            assert array.size < 400
        assert str(files[0].parent) not in reply.facts_text
        path = next(path for path in files if path.stem == name)
        # the summary holds names of columns and of categories, but no value of a measurement
        values = {row.split(",")[1] for row in path.read_text().splitlines()[1:]} - {""}
        assert not any(f'"{value}"' in reply.facts_text for value in values), request.kind


@pytest.mark.parametrize("command", ["evaluate", "report", "resume"])
def test_commands_that_need_rows_say_where_these_are(finished, command):
    home, _, _ = finished
    assert "the rows are at its sites" in " ".join(fails(command, home / "server").split())


# ---------------------------------------------------------------------- adapt only


def test_a_site_that_only_adapts_sends_nothing(finished, tmp_path):
    home, _, _ = finished
    new = write_csv(tmp_path / "new.csv", draw_rows(np.random.default_rng(3), 60))
    sites, sent = InMemorySites([], tmp_path), []
    sites.add(new, adapt_only=True)
    sites.tamper = lambda name, request, reply: sent.append((request, reply)) or reply
    settings = federation_settings(3, **SIZE)
    lines, looks = [], iter(range(50))
    serve_model(
        settings,
        sites,
        home / "server",
        notify=lines.append,
        stop=lambda: (tmp_path / "sites/new/clients/weights").exists() or next(looks) > 40,
    )
    serve_model(settings, sites, home / "server", stop=lambda: next(looks) > 41)
    assert "new has the model and adapts" in lines
    for request, reply in sent:
        assert not reply.arrays
        assert set(reply.facts) <= {"name", "ticket", "version", "adapt_only", "share_metrics"}, (
            request
        )
    run = open_run(tmp_path / "sites/new")
    assert run.model.names == ["new"]
    shared = open_run(home / "server").model
    assert np.array_equal(run.model.prediction.gaussians.means, shared.prediction.gaussians.means)
    assert not np.allclose(run.model.client_weights[0], shared.weights)
    works("evaluate", tmp_path / "sites/new")
    works("predict", tmp_path / "sites/new", new, "--client", "new", "--out", tmp_path / "p.csv")


def test_a_site_that_only_adapts_takes_part_in_no_training(files, tmp_path):
    from fedgmm.federation.site import SiteError

    site = Site(SiteSettings((files[0],), tmp_path / "out", adapt_only=True))
    with pytest.raises(SiteError, match="only adapts"):
        site.reply(Message("round", {}, {"protocol": PROTOCOL}))


def test_it_waits_for_the_model_during_a_training(files, tmp_path):
    new = write_csv(tmp_path / "new.csv", draw_rows(np.random.default_rng(3), 60))
    sites = InMemorySites(files, tmp_path)
    sites.add(new, adapt_only=True)
    lines = []
    settings = federation_settings(3, **SIZE)
    run_federation(settings, sites, tmp_path / "server", notify=lines.append)
    assert "new waits for the finished model" in lines
    assert open_run(tmp_path / "sites/new").model.names == ["new"]


def test_a_client_that_wants_to_train_after_the_end_is_refused(finished, files, tmp_path):
    home, _, _ = finished
    new = write_csv(tmp_path / "new.csv", draw_rows(np.random.default_rng(3), 60))
    sites = InMemorySites([], tmp_path)
    sites.add(new)
    lines, looks = [], iter(range(10))
    serve_model(
        federation_settings(3, **SIZE),
        sites,
        home / "server",
        notify=lines.append,
        stop=lambda: next(looks) > 5,
    )
    assert "new is refused: the training is over; start again with --adapt-only" in lines
    assert any("--adapt-only" in line for line in sites.lines["new"])


def test_a_method_without_weights_cannot_be_adapted_to(files, tmp_path):
    new = write_csv(tmp_path / "new.csv", draw_rows(np.random.default_rng(3), 60))
    sites = InMemorySites(files, tmp_path, fresh=False)
    node = sites.add(new, adapt_only=True)
    lines = []
    settings = federation_settings(3, **SIZE, algorithm="pfedme")
    run_federation(settings, sites, tmp_path / "server", notify=lines.append)
    assert any("new has not received the model" in line and "no weights" in line for line in lines)
    assert "no weights" in sites.sites[node].unusable  # so that its client ends


# ---------------------------------------------------------------------- settings


def test_settings_from_a_file(tmp_path):
    path = tmp_path / "federation.toml"
    path.write_text(
        '[data]\nlabel = "state"\n\n[training]\nrounds = 5\ncomponents = 2\n\n'
        "[federation]\nclients = 4\nmin_clients = 2\nround_timeout = 30\n"
    )
    settings = read_settings(path, min_clients=3, min_rows=None)
    assert (settings.clients, settings.quorum, settings.round_timeout) == (4, 3, 30)
    assert settings.config.options().rounds == 5
    assert settings.config.table.label == "state"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[data]\nlabel = "y"', "how many clients"),
        ("[federation]\nclients = 3", "label"),
        ('[data]\nlabel = "y"\n[federation]\nclients = 0', "clients must be at least 1"),
        ('[data]\nlabel = "y"\n[federation]\nclients = "3"', "clients must be an integer"),
        ('[data]\nlabel = "y"\n[federation]\nclients = 3\nprecision = "int8"', "precision"),
        ('[data]\nlabel = "y"\n[federation]\nclients = 3\nspeed = 3', "has no option 'speed'"),
        ('[data]\nlabel = "y"\nclient_column = "c"\n[federation]\nclients = 3', "a site is one"),
        ("no toml", "is not a TOML file"),
    ],
)
def test_settings_that_make_no_sense(tmp_path, text, reason):
    path = tmp_path / "federation.toml"
    path.write_text(text)
    with pytest.raises((ValueError, TypeError), match=reason):
        read_settings(path)


def test_a_site_needs_one_table(files, tmp_path):
    with pytest.raises(ValueError, match="one table"):
        Site(SiteSettings((files[0].parent,), tmp_path / "out"))
    with pytest.raises(ValueError, match="no such file"):
        Site(SiteSettings((tmp_path / "nothing.csv",), tmp_path / "out"))
    with pytest.raises(ValueError, match="name"):
        Site(SiteSettings((files[0],), tmp_path / "out", name=" "))
