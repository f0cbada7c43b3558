"""From folders of images, or tables of texts, to predictions."""

import csv
import io
import json
import re
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedgmm.cli import app
from in_memory_sites import InMemorySites, federate
from small_runs import RUNNER
from tiny_images import write_folders

SIZE = ["--encoder", "pixels", "--size", "8"]


def call(*args):
    result = RUNNER.invoke(app, list(map(str, args)))
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("images")
    for seed, site in enumerate(("oslo", "rome", "lima")):
        write_folders(home / "sites" / site, seed)
    (home / "sites" / "oslo" / "left" / "bad.png").write_bytes(b"?")
    sites = [home / "sites" / site for site in ("oslo", "rome")]
    options = ["--components", "2", "--learners", "2", "--rounds", "3", "--pca", "4"]
    call("fit", *sites, "--images", "--label-from-folder", *SIZE, "--out", home / "run", *options)
    return home


def test_fit_takes_folders_of_images(home):
    metrics = json.loads((home / "run" / "metrics.json").read_text())
    assert "oslo" in json.dumps(metrics)
    assert sorted(p.name for p in (home / "run" / "vectors").glob("*.parquet")) == [
        "oslo.parquet",
        "rome.parquet",
    ]


def test_later_commands_take_images_again(home):
    found = call("predict", home / "run", home / "sites" / "lima", "--client", "oslo").stdout
    rows = list(csv.DictReader(io.StringIO(found)))
    assert len(rows) == 24
    assert sum(row["prediction"] == row["id"].split("/")[0] for row in rows) >= 22
    call("detect", home / "run", home / "sites" / "lima")
    call("adapt", home / "run", home / "sites" / "lima", "--client", "lima")


def test_the_configuration_of_a_run_repeats_it(home):
    call("fit", "--config", home / "run" / "config.toml", "--out", home / "again")
    first, again = (
        json.loads((home / name / "metrics.json").read_text())["test"] for name in ("run", "again")
    )
    assert first == again


def test_embed_writes_tables_that_fit_takes(home):
    sites = [home / "sites" / site for site in ("oslo", "rome")]
    result = call("embed", *sites, *SIZE, "--out", home / "vectors")
    assert "bad.png" in result.stderr
    table = pq.read_table(home / "vectors" / "rome.parquet")
    assert table.column_names[:2] == ["id", "label"]
    call(
        "fit", home / "vectors", "--label", "label", "--id", "id", "--rounds", "1", "--components",
        "1", "--learners", "1", "--out", home / "plain",
    )  # fmt: skip


def test_texts_are_embedded_on_the_way(tmp_path):
    pytest.importorskip("wordllama")
    for site in ("a", "b"):
        texts = ["a lovely film", "terrible and boring", "great joy", "an awful waste"] * 8
        table = pa.table({"note": texts, "mood": ["good", "bad", "good", "bad"] * 8})
        pq.write_table(table, tmp_path / f"{site}.parquet")
    call(
        "fit", tmp_path / "a.parquet", tmp_path / "b.parquet", "--text", "note", "--label", "mood",
        "--components", "1", "--learners", "1", "--rounds", "2", "--out", tmp_path / "run",
    )  # fmt: skip
    pq.write_table(pa.table({"note": ["what a great film", ""]}), tmp_path / "new.parquet")
    result = call("predict", tmp_path / "run", tmp_path / "new.parquet")
    (row,) = csv.DictReader(io.StringIO(result.stdout))
    assert (row["id"], row["prediction"]) == ("row 1", "good")
    assert "row 2" in result.stderr


def test_a_label_column_and_folders_of_classes_exclude_each_other(tmp_path):
    args = ["fit", str(tmp_path), "--images", "--label-from-folder", "--label", "y"]
    result = RUNNER.invoke(app, args)
    assert result.exit_code == 1
    assert "not both" in result.stderr


def test_missing_weights_are_explained(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDGMM_DATA", raising=False)
    write_folders(tmp_path / "oslo", 0, 2)
    result = RUNNER.invoke(app, ["embed", str(tmp_path / "oslo"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "weights" in result.stderr


def test_fit_knows_its_weights_by_their_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folders(tmp_path / "oslo", 0, 2)
    result = RUNNER.invoke(app, ["fit", "oslo", "--images", "--weights", "mine.safetensors"])
    assert result.exit_code == 1
    assert str(tmp_path / "mine.safetensors") in result.stderr


def test_sites_of_a_federation_embed_at_home(home, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "fedgmm.federation.network.client.take_part", lambda site, *_, **__: seen.append(site)
    )
    for name in ("oslo", "rome"):
        data = ["--data", home / "sites" / name, "--images", *SIZE, "--out", tmp_path / name]
        call("client", "--server", "127.0.0.1:9", "--insecure", *data, "--min-rows", 0)
    assert [site.name for site in seen] == ["oslo", "rome"]
    sites = InMemorySites((), tmp_path)
    for site in seen:
        sites.settings[site.name] = replace(site.settings, name=site.name)
    size = {"components": 1, "learners": 1, "rounds": 2, "pca": 4}
    federate((), tmp_path, sites=sites, label="label", table={"id": ("id",)}, **size)
    found = call("predict", tmp_path / "oslo", home / "sites" / "lima", "--client", "oslo").stdout
    rows = list(csv.DictReader(io.StringIO(found)))
    assert sum(row["prediction"] == row["id"].split("/")[0] for row in rows) >= 22


def test_the_report_shows_pictures_only_if_they_are_wanted(home):
    call("report", home / "run")
    page = home / "run" / "report.html"
    assert "data:image/jpeg" not in page.read_text(encoding="utf-8")
    call("report", home / "run", "--pictures")
    shown = page.read_text(encoding="utf-8")
    # two Gaussians, two learners, and two clients with samples and novel images
    assert 6 * 4 <= shown.count("data:image/jpeg;base64,") <= 6 * 8
    assert re.search(r'alt="(left|right)/\d+.png, (left|right)"', shown)
    assert "All inputs are one column or one vector" in shown  # single entries have no meaning
    assert str(home) not in shown


def test_the_report_shows_excerpts_of_texts(tmp_path):
    pytest.importorskip("wordllama", reason="wordllama is not installed")
    for site, words in {"a": ("good", "bad"), "b": ("fine", "poor")}.items():
        lines = [f"this is {words[k % 2]} number {k},{k % 2}" for k in range(24)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["note,label", *lines]))
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    options = ["--components", "2", "--learners", "2", "--rounds", "2", "--pca", "4"]
    call("fit", *files, "--text", "note", "--label", "label", "--out", tmp_path / "run", *options)
    call("report", tmp_path / "run", "--pictures")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert re.search(r"<blockquote>this is (good|bad) number \d+</blockquote>", page)


def test_pictures_need_images_that_are_still_there(home, tmp_path):
    copy = tmp_path / "sites" / "paris"
    write_folders(copy, 7)
    options = ["--components", "2", "--learners", "2", "--rounds", "2", "--pca", "4"]
    call(
        "fit", copy, home / "sites" / "rome", "--images", *SIZE, "--out", tmp_path / "run", *options
    )
    (copy / "left" / "1.png").unlink()
    call("report", tmp_path / "run", "--pictures")
    copy.rename(tmp_path / "gone")
    failed = RUNNER.invoke(app, ["report", str(tmp_path / "run"), "--pictures"])
    assert failed.exit_code == 1
    assert "there is no such file or folder" in failed.stderr


def test_a_run_without_images_has_no_pictures(tmp_path):
    for site in ("a", "b"):
        rows = [f"{k},{k % 3},{k % 2}" for k in range(40)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["x,y,label", *rows]))
    files = [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    call(
        "fit",
        *files,
        "--label",
        "label",
        "--rounds",
        "2",
        "--learners",
        "2",
        "--out",
        tmp_path / "run",
    )
    failed = RUNNER.invoke(app, ["report", str(tmp_path / "run"), "--pictures"])
    assert failed.exit_code == 1
    assert "does not name images or texts" in failed.stderr
