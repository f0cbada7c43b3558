"""Tables that are kept in scratch files give the same runs as tables in memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch

import fedgmm
from fedgmm.data.tables.files import memory_needed
from fedgmm.data.tables.loading import read_tables
from fedgmm.runs import open_run
from fedgmm.runs.fitting import resume
from fedgmm.support import scratch
from small_runs import draw_rows

SMALL = {"components": 2, "learners": 2, "rounds": 2, "dtype": "float64"}
BYTES_PER_ROW = 40
SITES = {"oslo": 900, "bergen": 500, "tromso": 600}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same rows as CSV files, as Parquet files, and as one file with a client column."""
    home = tmp_path_factory.mktemp("tables")
    rng = np.random.default_rng(0)
    tables = []
    for number, (name, rows) in enumerate(SITES.items()):
        drawn = draw_rows(rng, rows, turned=number % 2 == 1)
        table = pa.table({key: [row[key] for row in drawn] for key in drawn[0]})
        pyarrow.csv.write_csv(table, home / f"{name}.csv")
        numbers = {key: table[key].cast(pa.float64()) for key in ("age",)}
        typed = table.set_column(0, "age", numbers["age"])
        pyarrow.parquet.write_table(typed, home / f"{name}.parquet", row_group_size=200)
        tables.append(typed.append_column("site", pa.array([name] * rows)))
    everything = pa.concat_tables(tables).take(rng.permutation(sum(SITES.values())))
    pyarrow.parquet.write_table(everything, home / "together.pq.parquet")
    return home


@pytest.fixture
def small_blocks(monkeypatch):
    """All files are streamed, and all arrays of these small tables are in files."""
    monkeypatch.setattr("fedgmm.data.tables.text_files._WHOLE_FILE_BYTES", 0)
    monkeypatch.setattr("fedgmm.data.tables.text_files._BLOCK_BYTES", 2048)
    monkeypatch.setattr("fedgmm.data.tables.files._BATCH_ROWS", 128)
    monkeypatch.setattr(scratch, "_SMALLEST", 64)
    monkeypatch.setattr(scratch, "_BLOCK_ROWS", 100)
    monkeypatch.setattr(scratch, "_MOST_MAPPED", 10_000)


CASES = {
    "text": ("{}.csv", {}),
    "parquet": ("{}.parquet", {}),
    "client column": ("together.pq.parquet", {"client_column": "site"}),
    "gradient steps": ("{}.csv", {"solver": "sgd", "participation": 0.7}),
    "mlp": ("{}.csv", {"learner": "mlp", "algorithm": "fedavg"}),
    "refit": ("{}.csv", {"refit": True, "personal_labels": True}),
    "no label": ("{}.parquet", {"algorithm": "gmm", "ignore": ["state"], "label": None}),
    "numbers": ("{}.parquet", {"label": "age", "task": "regression"}),
}


def files_of(folder, pattern):
    return [folder / pattern.format(name) for name in SITES] if "{" in pattern else folder / pattern


@pytest.mark.parametrize("case", CASES)
def test_a_run_from_scratch_files_is_the_same(folder, tmp_path, case, small_blocks, monkeypatch):
    pattern, options = CASES[case]
    files, options = files_of(folder, pattern), {"label": "state", **SMALL, **options}
    label = options.pop("label")
    runs = {}
    for memory in ("10GB", "1kB"):
        runs[memory] = fedgmm.fit(files, label, tmp_path / memory, memory=memory, **options)
    here, there = runs["10GB"], runs["1kB"]
    assert scratch.folder_of(here.dataset.train.inputs) is None
    assert scratch.folder_of(there.dataset.train.inputs) == tmp_path / "1kB"
    assert there.dataset.train.inputs.shape == here.dataset.train.inputs.shape
    for name, value in here.model.prediction.learners.items():
        torch.testing.assert_close(there.model.prediction.learners[name], value, rtol=0, atol=1e-10)
    if here.model.prediction.gaussians is not None:
        found, expected = (run.model.prediction.gaussians for run in (there, here))
        torch.testing.assert_close(found.means, expected.means, rtol=0, atol=1e-10)
        torch.testing.assert_close(found.covariances, expected.covariances, rtol=0, atol=1e-10)
    skipped = ("seconds", "notes")
    metrics = [{k: v for k, v in run.metrics.items() if k not in skipped} for run in (here, there)]
    assert metrics[0] == metrics[1]
    written = [sorted(path.name for path in (tmp_path / memory).iterdir()) for memory in runs]
    assert written[0] == written[1]


def test_a_stored_run_reads_its_rows_the_same_way(folder, tmp_path, small_blocks):
    files = files_of(folder, "{}.csv")
    done = fedgmm.fit(files, "state", tmp_path / "run", memory="1kB", **SMALL)
    run = open_run(tmp_path / "run")
    assert scratch.folder_of(run.data().test.inputs) == tmp_path / "run"
    assert run.evaluate().mean_accuracy == done.model.evaluate().mean_accuracy
    again = resume(tmp_path / "run", rounds=3)
    assert scratch.folder_of(again.dataset.train.inputs) == tmp_path / "run"
    assert len(again.model.history) == 3


def test_each_text_file_is_parsed_once(folder, tmp_path, small_blocks, monkeypatch):
    opened, written = [], []
    read, on_disk = pyarrow.csv.read_csv, fedgmm.data.tables.text_files.table_on_disk
    monkeypatch.setattr("pyarrow.csv.read_csv", lambda *a, **k: opened.append(a) or read(*a, **k))
    monkeypatch.setattr(
        "fedgmm.data.tables.text_files.table_on_disk",
        lambda *given: written.append(given) or on_disk(*given),
    )
    files = files_of(folder, "{}.csv")
    fedgmm.fit(files, "state", tmp_path / "run", memory="1kB", **SMALL)
    assert (len(opened), len(written)) == (0, len(SITES))


def test_tables_below_the_limit_stay_in_memory(folder, tmp_path):
    needed = sum(map(memory_needed, files_of(folder, "{}.csv")))
    assert 0 < needed < 10**6
    run = fedgmm.fit(files_of(folder, "{}.csv"), "state", tmp_path / "run", **SMALL)
    assert run.config.table.memory is None
    assert scratch.folder_of(run.dataset.train.inputs) is None


def test_the_limit_does_not_belong_to_what_clients_agree_on(folder):
    from fedgmm.data.tables.preprocessing import TableOptions
    from fedgmm.federation.summaries import table_record

    options = TableOptions("state", memory="2GB")
    assert options == TableOptions("state")
    assert "memory" not in table_record(options)
    with pytest.raises(ValueError, match="memory"):
        TableOptions("state", memory="much")
    assert len(read_tables([folder / "oslo.csv"], options).summaries) == 1


PEAK = """
import os, resource, sys
import numpy as np, pyarrow as pa, pyarrow.parquet
import fedgmm, fedgmm.runs
from fedgmm.support import scratch
from fedgmm.data import dataset
from fedgmm.data.tables import columns, files, preprocessing, summaries
from fedgmm.methods import centroids
from fedgmm.model import adaptation, bootstrap, metrics
from fedgmm.training import in_process
# blocks and samples that are small beside the rows
for module in (columns, preprocessing, summaries):
    module._BLOCK_ROWS = files._BATCH_ROWS = 4000
scratch._MOST_MAPPED = 2**21
scratch._BLOCK_ROWS = scratch._SORTED_AT_ONCE = scratch._SUMMED_AT_ONCE = 4000
dataset._ROWS_AT_ONCE = metrics._ROWS_AT_ONCE = bootstrap._MOST_PLANNED = 4000
centroids._MOST_START_ROWS = in_process._WATCHED_ROWS = adaptation._TRIED_ROWS = 4000
bootstrap._MOST_WORK, bootstrap._FEWEST_RESAMPLES = 1, 5

def peak(rows):
    home = os.path.join(sys.argv[1], str(rows))
    reading, writing = os.pipe()
    if not os.fork():
        os.makedirs(home)
        rng = np.random.default_rng(0)
        for site in range(4):
            x = rng.normal(size=(6, rows // 4))
            label = x[0] + x[1] ** 2 if sys.argv[3] == "regression" else np.where(x[0] > 0, "yes", "no")
            table = pa.table({**{f"x{j}": v for j, v in enumerate(x)}, "label": label})
            pyarrow.parquet.write_table(table, f"{home}/{site}.parquet", row_group_size=5000)
        os._exit(0)
    os.wait()
    if not os.fork():
        options = {"memory": sys.argv[2], "task": sys.argv[3], "components": 2, "learners": 2}
        fedgmm.fit(home, "label", home + "/run", rounds=2, **options)
        os.write(writing, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss).encode())
        os._exit(0)
    os.wait()
    return int(os.read(reading, 100)) * 1024

few, many = 200_000, 1_000_000
print((peak(many) - peak(few)) / (many - few))
"""


def grown(folder, memory, task):
    """Return how much the peak memory of ``fit`` grows with the rows, in bytes per row."""
    folder.mkdir()
    command = [sys.executable, "-c", PEAK, str(folder), memory, task]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_peak_memory_does_not_grow_with_the_rows(tmp_path, task):
    """The bound is above the noise of the peak, which is some megabytes for 800,000 rows."""
    assert grown(tmp_path / "files", "1kB", task) < BYTES_PER_ROW
    assert grown(tmp_path / "memory", "10GB", task) > 2 * BYTES_PER_ROW
