"""The commands on files, from the first look to the report, as a friendly and as a hostile user."""

from __future__ import annotations

import csv
import gzip
import json
import socket
import string
import tomllib
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedgmm
from small_runs import (
    SITES,
    SMALL_OPTIONS,
    bytes_of,
    draw_rows,
    fails,
    invoke,
    start,
    works,
    write_csv,
    write_sites,
)


def strict(text):
    """One JSON document and nothing else, without NaN."""
    return json.loads(text, parse_constant=pytest.fail)


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def fit(tmp_path, *arguments, label="state"):
    return works(
        "fit", *arguments, "--label", label, "--out", tmp_path / "run", *SMALL_OPTIONS, "--json"
    )


# ---------------------------------------------------------------------- the whole chain


def test_a_run_without_labels_names_detect_as_the_next_step(tmp_path):
    sites = map(str, write_sites(tmp_path / "data"))
    options = ["--set", "algorithm=gmm", "--ignore", "state", "--components", "2", "--rounds", "2"]
    result = works("fit", *sites, *options, "--out", str(tmp_path / "my run"))
    assert f"Next: fedgmm detect '{tmp_path / 'my run'}' FILE" in result.stdout


def test_from_files_to_answers(tmp_path, monkeypatch):
    def no_network(*_, **__):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "socket", no_network)
    monkeypatch.setattr(socket, "create_connection", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.chdir(tmp_path)
    write_sites(tmp_path)
    rows = draw_rows(np.random.default_rng(1), 40)
    (tmp_path / "later").mkdir()
    write_csv("later/newcomer.csv", rows)
    write_csv("later/batch.csv", rows, without=("state",))
    sites = [f"{name}.csv" for name in SITES]
    assert "oslo" in works("inspect", *sites, "--label", "state").stdout
    result = works("fit", *sites, "--label", "state", *SMALL_OPTIONS)
    assert "accuracy" in result.stdout
    assert "Run: run" in result.stdout
    assert "Next: fedgmm report run" in result.stdout
    assert "mean over clients" in works("evaluate", "run").stdout
    assert (
        "40 rows"
        in works("predict", "run", "--client", "oslo", "later/batch.csv", "--out", "p.csv").stderr
    )
    assert "narvik joined with 40 labelled rows" in " ".join(
        works("adapt", "run", "--client", "narvik", "later/newcomer.csv").stdout.split()
    )
    assert "of 40 rows" in works("detect", "run", "later/batch.csv", "--out", "scores.csv").stderr
    assert "report.html" in works("report", "run").stdout
    assert "4 rounds" in works("resume", "run").stdout
    written = read_csv(tmp_path / "p.csv")
    run = fedgmm.open_run("run")
    expected = run.predict("later/batch.csv", "oslo")
    assert [row["prediction"] for row in written] == expected.labels.tolist()
    # what is written is what the model says, to the last bit
    assert [float(row["p(ill)"]) for row in written] == expected.probabilities[:, 0].tolist()
    assert [float(row["log_density"]) for row in written] == expected.log_density.tolist()
    scores = read_csv(tmp_path / "scores.csv")
    assert [float(row["score"]) for row in scores] == (
        run.detect("later/batch.csv").result.scores.tolist()
    )


def test_json_is_one_document_everywhere(tmp_path, finished_home):
    data = finished_home / "data"
    new, newcomer, home = (
        finished_home / "new.csv",
        finished_home / "newcomer.csv",
        tmp_path / "run",
    )
    found = strict(works("inspect", data, "--label", "state", "--json").stdout)
    assert found
    metrics = strict(fit(tmp_path, data).stdout)
    assert metrics["run"] == str(home)
    assert metrics["rounds"] == 4
    assert strict(works("resume", home, "--json").stdout) == metrics
    evaluation = strict(works("evaluate", home, "--json").stdout)
    assert evaluation["summary"] == metrics["test"]
    assert evaluation["clients"] == metrics["clients"]
    predicted = strict(works("predict", home, new, "--json").stdout)
    assert predicted["rows"] == 40
    assert sum(predicted["predicted"].values()) == 40
    assert [row["row"] for row in predicted["predictions"]] == list(range(1, 41))
    written = strict(works("predict", home, new, "--json", "--out", tmp_path / "p.csv").stdout)
    assert written["out"] == str(tmp_path / "p.csv")
    assert "predictions" not in written
    joined = strict(works("adapt", home, newcomer, "--client", "narvik", "--json").stdout)
    assert np.sum(joined["weights"]) == pytest.approx(1)
    detected = strict(works("detect", home, new, "--json").stdout)
    assert detected["novel"] == sum(row["novel"] for row in detected["scores"])
    assert strict(works("report", home, "--json").stdout)["report"] == str(home / "report.html")


def test_rows_of_other_files_are_of_no_split(finished, finished_home):
    files = finished_home / "data"
    rows = [
        sum(own["rows"] for own in strict(result.stdout)["clients"].values())
        for result in (
            works("evaluate", finished / "run", "--split", "train", "--json"),
            works("evaluate", finished / "run", files, "--json"),
        )
    ]
    assert rows[0] < rows[1]
    assert "--split" in fails("evaluate", finished / "run", files, "--split", "train", code=2)
    assert "files" in fails("evaluate", finished / "run", "--client", "oslo", code=2)


def test_a_configuration_file_holds_every_option_and_the_command_line_wins(tmp_path):
    write_sites(tmp_path / "data")
    (tmp_path / "run.toml").write_text(
        f"""
        [data]
        files = ["{tmp_path}/data/*.csv"]
        label = "nothing"
        ignore = ["ward"]
        split = [0.5, 0.25, 0.25]
        [training]
        rounds = 9
        components = 2
        [run]
        checkpoint_every = 3
        """
    )
    works(
        *["fit", "--config", tmp_path / "run.toml", "--label", "state", "--rounds", "2"],
        *["--out", tmp_path / "run", "--set", "lr=0.03", "--set", "schedule=cosine", "--seed", "4"],
    )
    config = fedgmm.open_run(tmp_path / "run").config
    assert config.table.label == "state"
    assert config.table.ignore == ("ward",)
    assert config.table.split == (0.5, 0.25, 0.25)
    assert config.checkpoint_every == 3
    options = config.options()
    assert (options.rounds, options.components, options.lr, options.seed) == (2, 2, 0.03, 4)
    assert options.schedule == "cosine"
    works("fit", "--config", tmp_path / "run" / "config.toml", "--out", tmp_path / "again")
    assert bytes_of(tmp_path / "again" / "model") == bytes_of(tmp_path / "run" / "model")


def test_one_learner_is_named_first(tmp_path):
    files = write_sites(tmp_path)
    home = tmp_path / "run"
    options = ("--label", "state", "--learners", "1", "--rounds", "2", "--out", home)
    options = (*options, "--set", "personal_labels=false")
    for result in (works("fit", *files, *options), works("evaluate", home)):
        first = " ".join(result.stderr.split("Note: ")[1].split())
        assert first.startswith("Nothing is personalised")
        assert "--learners 3" in first


def test_numbers_are_chosen_on_request(tmp_path):
    write_sites(tmp_path / "data")
    arguments = ["--components", "auto", "--learners", "auto", "--rounds", "4", "--json"]
    command = ["fit", tmp_path / "data", "--label", "state", "--out", tmp_path / "run"]
    found = strict(works(*command, *arguments).stdout)
    assert len(found["selection"]["tried"]) > 1
    text = (tmp_path / "run" / "config.toml").read_text()
    for name in ("components", "learners", "covariance_type"):
        assert f"{name} = " in text
        assert f'{name} = "auto"' not in text


# ---------------------------------------------------------------------- messy files


def messy_sites(folder):
    """Files as people send them, all with the columns age, dose, ward and state."""
    folder.mkdir()
    rng = np.random.default_rng(7)
    rows = {name: draw_rows(rng, 40) for name in ("quoted", "gaps", "one", "empty", "win", "mark")}
    write_csv(folder / "quoted.csv", rows["quoted"], quoting=csv.QUOTE_ALL)
    for row in rows["gaps"][::3]:
        row["age"], row["dose"] = "?", "NA"
    for row in rows["gaps"][1::3]:
        row["age"] = str(round(float(row["age"])))  # whole numbers among fractions
    write_csv(folder / "gaps.csv", rows["gaps"], lineterminator="\n")
    write_csv(folder / "one_class.csv", [{**row, "state": "ill"} for row in rows["one"]])
    write_csv(folder / "no_dose.csv", [{**row, "dose": ""} for row in rows["empty"]])
    write_csv(folder / "tiny.csv", draw_rows(rng, 3))
    write_csv(folder / "windows.csv", rows["win"], lineterminator="\r\n", delimiter=";")
    path = write_csv(folder / "mark.csv", rows["mark"])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    path = write_csv(folder / "tabs.tsv", draw_rows(rng, 40), delimiter="\t")
    (folder / "packed.csv.gz").write_bytes(
        gzip.compress(write_csv(folder / "x.csv", draw_rows(rng, 40)).read_bytes())
    )
    (folder / "x.csv").unlink()


def test_messy_files_go_through_the_whole_chain(tmp_path):
    messy_sites(tmp_path / "data")
    metrics = strict(fit(tmp_path, tmp_path / "data").stdout)
    assert metrics["test"]["mean_accuracy"] > 0.6
    home = tmp_path / "run"
    assert len(fedgmm.open_run(home).model.names) == 9
    works("evaluate", home, "--json")
    for number, path in enumerate(sorted((tmp_path / "data").iterdir())):
        client = path.name.split(".")[0]
        works("predict", home, path, "--client", client, "--out", tmp_path / "p.csv")
        works("evaluate", home, path, "--json")
        if number % 3 == 0:  # all commands read files by the same function
            works("adapt", home, path, "--client", f"again {path.name}")
            works("detect", home, path, "--out", tmp_path / "s.parquet")
    works("report", home)


def test_a_thousand_columns(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        x = rng.normal(size=(25, 1000))
        rows = [
            {**{f"x{i}": f"{v:.3f}" for i, v in enumerate(row)}, "y": int(row[0] > 0)} for row in x
        ]
        write_csv(tmp_path / f"{name}.csv", rows)
    works("inspect", tmp_path / "a.csv", "--label", "y")
    sizes = ["--components", "2", "--learners", "2", "--rounds", "2"]
    works("fit", tmp_path, "--label", "y", "--out", tmp_path / "run", *sizes)
    works("predict", tmp_path / "run", tmp_path / "a.csv", "--out", tmp_path / "p.csv")
    works("adapt", tmp_path / "run", tmp_path / "a.csv", "--client", "c")
    works("detect", tmp_path / "run", tmp_path / "a.csv", "--out", tmp_path / "s.csv")


@pytest.mark.parametrize("label", ["row", "prediction"])
def test_labels_and_classes_with_unlucky_names(tmp_path, label):
    rng = np.random.default_rng(0)
    classes = ['say "aah", please', "a,b", "row", "p(x)", "[bold]"]
    for name in ("a", "b"):
        rows = [
            {"x": f"{v:.3f}", "probability": f"{v:.2f}", label: classes[int(5 * rng.random())]}
            for v in rng.normal(size=60)
        ]
        write_csv(tmp_path / f"{name}.csv", rows)
    fit(tmp_path, tmp_path / "*.csv", label=label)
    works("inspect", tmp_path / "a.csv", tmp_path / "b.csv", "--label", label)
    works("evaluate", tmp_path / "run")
    works("predict", tmp_path / "run", tmp_path / "a.csv", "--out", tmp_path / "p.csv")
    rows = read_csv(tmp_path / "p.csv")
    assert {f"p({name})" for name in classes} < set(rows[0])
    assert {row["prediction"] for row in rows} <= set(classes)
    works("report", tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "empty"),
        (b"x,y\n", "no rows"),
        (b"x,y\n1,2\n1\n", "1 value"),
        (b"x,y\n1,a\n2,a\n", "only the class"),
        (b"x,x,y\n1,2,a\n", "appears twice"),
        (b"1,2\n3,4\n", "no header"),
        (b"x,z\n1,2\n", "no label column 'y'"),
        (b"x,Y\n1,2\n", "did you mean 'Y'?"),
        (b"y\na\nb\n", "no column to learn from"),
        (b"x,y\n\x00\x00,a\n", "not a text file"),
    ],
)
def test_files_that_cannot_be_used_get_a_sentence(tmp_path, text, message):
    (tmp_path / "site.csv").write_bytes(text)
    command = ["fit", tmp_path / "site.csv", "--label", "y", "--out", tmp_path / "run"]
    assert message in fails(*command)


CELL = st.one_of(
    st.sampled_from(["", "?", "NA", "1", "0", "-1.5", "1e3", "ja", "nein", "2024-01-01", "true"]),
    st.text(string.printable, max_size=6),
    st.floats(width=32).map(str),
    st.text(max_size=3),
)


ANY_FILE = (
    st.lists(st.sampled_from(["a", "b", "ü", "", "a b", "y", '"']), min_size=1, max_size=4),
    st.lists(st.lists(CELL, min_size=1, max_size=4), max_size=12),
    st.sampled_from([",", ";", "\t", "|"]),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "cp1252"]),
    st.booleans(),
)


@pytest.fixture(scope="module")
def sane_run(tmp_path_factory):
    """A run on a column ``a``, for files whose own run fails."""
    folder = tmp_path_factory.mktemp("sane")
    rows = [{"a": number, "label": "ab"[number % 2]} for number in range(12)]
    fit(folder, write_csv(folder / "sane.csv", rows), label="label")
    return folder / "run"


def check_any_file(folder, sane_run, header, rows, mark, encoding, regular):
    path = folder / "site.csv"
    with path.open("w", newline="", encoding=encoding, errors="replace") as file:
        writer = csv.writer(file, delimiter=mark)
        writer.writerow([*header, "label"])
        for number, row in enumerate(rows):
            cells = (row * 4)[: len(header)] if regular else row
            writer.writerow([*cells, "ab"[number % 2]])
    command = ["--label", "label", "--out", folder / "run", "--rounds", "1", "--components", "1"]
    fitted = invoke("fit", path, *command)
    home = sane_run if fitted.exit_code else folder / "run"
    results = [
        fitted,
        invoke("inspect", path, "--label", "label", "--json"),
        invoke("evaluate", home, path, "--json"),
        invoke("predict", home, path, "--json"),
        invoke("adapt", home, path, "--client", "new", "--json"),
        invoke("detect", home, path, "--json"),
    ]
    for result in results:
        assert result.exit_code in (0, 1)
        assert "Traceback" not in result.output
        if result.exit_code:
            assert result.stderr.startswith("Error: ")
        elif result is not fitted:
            strict(result.stdout)


@given(*ANY_FILE)
@settings(max_examples=8)
def test_no_file_causes_a_traceback(
    tmp_path_factory, sane_run, header, rows, mark, encoding, regular
):
    folder = tmp_path_factory.mktemp("any")
    check_any_file(folder, sane_run, header, rows, mark, encoding, regular)


@pytest.mark.slow
@given(*ANY_FILE)
def test_none_of_many_files_causes_a_traceback(
    tmp_path_factory, sane_run, header, rows, mark, encoding, regular
):
    folder = tmp_path_factory.mktemp("any")
    check_any_file(folder, sane_run, header, rows, mark, encoding, regular)


# ---------------------------------------------------------------------- a hostile user


def test_a_folder_with_blanks_and_brackets(tmp_path):
    write_sites(tmp_path / "my [data]")
    home = tmp_path / "my [bold]run[/] 1"
    files = sorted((tmp_path / "my [data]").iterdir())
    result = works("fit", *files, "--label", "state", "--out", home, *SMALL_OPTIONS)
    assert str(home) in result.stdout
    assert str(home / "report.html") in works("report", home).stdout
    works("predict", home, files[0], "--out", tmp_path / "[p].csv")


def test_out_is_a_file_or_in_the_way(tmp_path):
    write_sites(tmp_path / "data")
    (tmp_path / "file").write_text("")
    command = ["fit", tmp_path / "data", "--label", "state", *SMALL_OPTIONS, "--out"]
    assert "is a file" in fails(*command, tmp_path / "file")
    assert "Cannot write into" in fails(*command, tmp_path / "file" / "run")
    assert "is not empty" in fails(*command, tmp_path)
    for name in ("evaluate", "resume", "report"):
        assert "There is no folder" in fails(name, tmp_path / "file")


def test_a_full_disk_is_told(tmp_path):
    """A limit on the size of files stands for it."""
    resource = pytest.importorskip("resource")
    write_sites(tmp_path / "data")
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, most[1]))
    try:
        command = ["fit", tmp_path / "data", "--label", "state", *SMALL_OPTIONS]
        error = fails(*command, "--out", tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert "File too large" in error
    works("resume", tmp_path / "run")  # with room again


@pytest.mark.parametrize("text", ["nonsense", "=3", "magic=1", "standardise=true"])
def test_options_that_do_not_exist(tmp_path, text):
    write_sites(tmp_path / "data")
    command = ["fit", tmp_path / "data", "--label", "state", "--out", tmp_path / "run"]
    assert "--set" in fails(*command, "--set", text, code=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["rounds=many", "rounds=", "rounds=[1", "lr=1e400", "device=none"])
def test_values_that_make_no_sense(tmp_path, text):
    write_sites(tmp_path / "data")
    command = ["fit", tmp_path / "data", "--label", "state", "--out", tmp_path / "run"]
    assert text.split("=")[0] in fails(*command, "--set", text)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments", [["--components", "0"], ["--learners", "²"], ["--rounds", "x"]]
)
def test_numbers_that_are_none(tmp_path, arguments):
    fails("fit", tmp_path, "--label", "state", "--out", tmp_path / "run", *arguments, code=2)


def test_without_files_or_a_label(tmp_path):
    assert "No files were given" in fails("fit", "--out", tmp_path / "run")
    write_sites(tmp_path / "data")
    assert "--label" in fails("fit", tmp_path / "data", "--out", tmp_path / "run")
    assert "No such file" in fails("fit", "--config", tmp_path / "nowhere.toml")


@pytest.mark.parametrize("name", ["p.txt", "p.xlsx", "folder.csv"])
def test_outputs_that_cannot_be_written_are_reported_before_any_work(finished, name):
    (finished / "folder.csv").mkdir()
    for command in ("predict", "detect"):
        sentence = fails(command, finished / "run", finished / "new.csv", "--out", finished / name)
        assert name in sentence


@pytest.mark.parametrize(
    "damage",
    ["config.toml", "metrics.json", "model/model.json", "clients/preprocessing.json"],
)
@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[]", b"{}"])
def test_damaged_files_get_a_sentence(finished, damage, content):
    (finished / "run" / damage).write_bytes(content)
    for command in (
        ["evaluate", finished / "run"],
        ["predict", finished / "run", finished / "new.csv"],
        ["adapt", finished / "run", finished / "newcomer.csv", "--client", "a"],
        ["detect", finished / "run", finished / "new.csv"],
        ["report", finished / "run"],
        ["resume", finished / "run"],
    ):
        result = invoke(*command)
        if result.exit_code:
            assert result.exit_code == 1
            assert result.stderr.startswith("Error: ")
            assert result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_reader_of_predictions_that_has_seen_enough(finished, extra):
    check_closed_pipe(start("predict", *extra, finished / "run", finished / "new.csv"))


def test_a_reader_that_has_seen_enough():
    """A command that prints columns as predict does, and loads no model."""
    code = (
        "import numpy as np; from fedgmm.cli import app; from fedgmm.cli.output import write_columns; "
        "app.command('show')(lambda: write_columns({'x': np.arange(9)}, None)); app(['show'])"
    )
    check_closed_pipe(start(code=code))


def check_closed_pipe(process):
    process.stdout.close()  # before anything was written
    process.wait(timeout=60)
    assert process.stderr.read() == ""
    assert process.returncode == 0
    process.stderr.close()


def test_divergence_is_reported_once(tmp_path):
    write_sites(tmp_path / "data")
    arguments = ["--algorithm", "fedavg", "--learner", "mlp", "--set", "lr=1e12", "--rounds", "4"]
    result = works(
        "fit", tmp_path / "data", "--label", "state", "--out", tmp_path / "r", *arguments
    )
    assert result.stderr.count("Note: Training stopped early") == 1
    assert result.stderr.count("Note: ") == 2  # the other is about the one learner


def test_warnings_are_notes_without_a_place_in_the_code(finished, monkeypatch):
    def warn(*_, **__):
        warnings.warn("Something is odd.", RuntimeWarning, stacklevel=1)
        raise ValueError("And something is wrong.")

    monkeypatch.setattr("fedgmm.runs.run.open_run", warn)
    result = invoke("report", finished / "run")
    assert result.stderr == "Note: Something is odd.\nError: And something is wrong.\n"


# ---------------------------------------------------------------------- speed


@pytest.mark.slow
def test_a_hundred_thousand_rows_take_less_than_five_seconds(finished):
    import time

    rows = draw_rows(np.random.default_rng(0), 1000)
    path = write_csv(finished / "many.csv", rows * 100)
    works("predict", finished / "run", finished / "new.csv", "--json")  # imports
    for command in (
        ["predict", finished / "run", path, "--client", "oslo", "--out", finished / "p.csv"],
        ["detect", finished / "run", path, "--out", finished / "s.csv"],
        ["adapt", finished / "run", path, "--client", "many"],
    ):
        began = time.perf_counter()
        works(*command)
        assert time.perf_counter() - began < 5.0, command[0]


# ---------------------------------------------------------------------- files as they are sent


def test_a_table_without_header_from_inspect_to_detect(tmp_path):
    for name in ("oslo", "bergen"):
        rows = [
            f"p{i} {-9 if i % 4 == 0 else i % 7}  {i % 28 + 1}.{i % 12 + 1}.2020   {'ab'[i % 2]}"
            for i in range(60)
        ]
        (tmp_path / f"{name}.txt").write_text("\n".join(rows) + "\n")
    files = [tmp_path / "oslo.txt", tmp_path / "bergen.txt"]
    assert "no header" in fails("inspect", *files, "--label", "state")
    written = ["--names", "patient,dose", "--names", "seen,state", "--missing-values", "-9"]
    common = [*files, "--label", "state", *written, "--id", "patient"]
    found = strict(works("inspect", *common, "--json").stdout)
    roles = {column["name"]: column["role"] for column in found["columns"]}
    assert roles == {"dose": "number", "seen": "date", "patient": "ignored"}
    small = ["--rounds", 2, "--components", 1, "--learners", 1]
    works("fit", *common, *small, "--out", tmp_path / "run")
    new = tmp_path / "new.txt"
    new.write_text("x7 3 5.6.2020\nx8 -9 7.8.2020\n")
    for command in ("predict", "detect"):
        found = works(command, tmp_path / "run", new, "--out", tmp_path / "out.csv")
        lines = (tmp_path / "out.csv").read_text().splitlines()
        assert lines[0].startswith('"row","patient"')
        assert lines[2].startswith('2,"x8"')
    works("evaluate", tmp_path / "run", files[0])
    works("adapt", tmp_path / "run", files[0], "--client", "new")
    again = ["--config", tmp_path / "run" / "config.toml", "--out", tmp_path / "again"]
    works("fit", *again)
    first, second = (tmp_path / name / "clients/preprocessing.json" for name in ("run", "again"))
    assert first.read_text() == second.read_text()


def test_file_options_of_a_configuration(tmp_path):
    rows = "".join(f"{-9 if i % 4 == 0 else i},{i % 3},{'ab'[i % 2]}\n" for i in range(60))
    (tmp_path / "a.csv").write_text(rows)
    (tmp_path / "b.csv").write_text(rows)
    (tmp_path / "run.toml").write_text(
        f"""
        [data]
        files = ["{tmp_path}/*.csv"]
        label = "column_3"
        no_header = true
        missing_values = -9
        id = "column_1"
        [training]
        rounds = 1
        components = 1
        learners = 1
        """
    )
    works("fit", "--config", tmp_path / "run.toml", "--out", tmp_path / "run")
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert config["data"]["missing_values"] == ["-9"]
    assert config["data"]["id"] == ["column_1"]


def test_inspection_of_numbers_to_predict(tmp_path):
    for name, mean in (("a", 100.0), ("b", 200.0)):
        rows = [{"x": f"{i}", "dose": f"{mean + i / 7:.3f}"} for i in range(60)]
        write_csv(tmp_path / f"{name}.csv", rows)
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    found = works("inspect", *files, "--label", "dose", "--task", "regression")
    assert "mean of the label" in " ".join(found.stdout.split())
    assert "measurement" not in found.stderr
    unsure = works("inspect", *files, "--label", "dose")
    assert "--task regression" in unsure.stderr
    assert "class" not in unsure.stdout
