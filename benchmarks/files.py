"""Time and memory of ``fit``, ``predict``, ``adapt`` and ``detect`` on CSV files of many clients.

Writes CSV files into a temporary folder, then runs each command in its own process. Memory is the peak
of the process minus that of a process that only imports the package, relative to the rows as float32.

    python benchmarks/files.py            # 1,000,000 rows x 50 columns over 100 files
    python benchmarks/files.py --quick    # some seconds
    python benchmarks/files.py --gigabytes 1 10 --folder /tmp    # tables larger than memory

With ``--gigabytes``, tables of float64 numbers in Parquet files (20 clients, 50 columns) are written
below ``--folder``, ``fedgmm fit`` runs with ``--memory 500MB`` and 2 rounds, and everything is deleted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROUNDS = 20


@dataclass(frozen=True)
class Size:
    files: int
    rows: int  # per file
    columns: int  # with the label
    later_rows: int  # for predict, adapt and detect


def write_files(folder: Path, size: Size) -> None:
    """Write one file per client: two groups of rows, in shares that differ between clients."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import csv

    rng = np.random.default_rng(0)
    names = [f"x{j}" for j in range(size.columns - 1)]
    centres = rng.normal(size=(2, len(names)))

    def write(path: Path, rows: int) -> None:
        kinds = rng.random(rows) < rng.beta(0.5, 0.5)
        values = rng.normal(size=(rows, len(names))) + centres[kinds.astype(int)]
        labels = np.where((values[:, 0] > centres[0, 0]) ^ kinds, "yes", "no")
        columns = {name: np.round(values[:, j], 5) for j, name in enumerate(names)}
        csv.write_csv(pa.table({**columns, "label": labels}), path)

    for number in range(size.files):
        write(folder / f"site_{number:03d}.csv", size.rows)
    write(folder / "later.csv", size.later_rows)


def fit_large(gigabytes: float, folder: Path) -> dict[str, float]:
    """Write a table of that many gigabytes; return seconds and peak memory of ``fedgmm fit``."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    files, columns, at_once = 20, 50, 50_000
    rows = round(gigabytes * 1e9 / (8 * columns * files))
    rng = np.random.default_rng(0)
    schema = pa.schema([*((f"x{j}", pa.float64()) for j in range(columns)), ("label", pa.string())])
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for number in range(files):
            path = f"{place}/site_{number:02d}.parquet"
            options = {"compression": "none", "use_dictionary": ["label"]}
            with parquet.ParquetWriter(path, schema, **options) as writer:
                for first in range(0, rows, at_once):
                    x = rng.normal(size=(columns, min(at_once, rows - first)))
                    label = np.where(x[0] + (-1) ** number * x[1] > 0, "yes", "no")
                    writer.write_table(pa.table([*x, label], schema=schema))
        command = [sys.executable, "-m", "fedgmm", "fit", place, "--label", "label"]
        command += ["--out", f"{place}/run", "--memory", "500MB", "--rounds", "2"]
        command += ["--set", "tol=none", "--json"]
        wall = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = json.loads(Path(place, "run", "metrics.json").read_text())["seconds"]
        return {
            "gigabytes": gigabytes,
            "rows": rows * files,
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": used.ru_utime + used.ru_stime,
            "peak_megabytes": used.ru_maxrss / 1024,
            **{name: seconds[name] for name in ("reading", "training")},
        }


def in_process(job: str, *arguments: Any) -> dict[str, float]:
    """Run a job in a new process; return its wall and CPU seconds after imports, and its peak memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_work, (job, arguments))


def _work(job: str, arguments: tuple[Any, ...]) -> dict[str, float]:
    if job == "large":
        return fit_large(*arguments)
    threads = arguments[0]
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(threads)
    import torch

    torch.set_num_threads(threads)
    # imported by every command
    import sklearn.cluster  # noqa: F401

    from fedgmm.cli.output import write_columns
    from fedgmm.runs import fit, open_run

    imported = _peak()
    wall, cpu = time.perf_counter(), time.process_time()
    seconds: dict[str, float] = {}
    match job:
        case "fit":
            _, folder, run = arguments
            done = fit([f"{folder}/site_*.csv"], "label", run, rounds=ROUNDS, tol=None)
            seconds = dict(done.metrics["seconds"])
        case "predict":
            _, run, later, out = arguments
            write_columns(open_run(run).predict(later, "site_000").columns(), Path(out))
        case "adapt":
            _, run, later = arguments
            open_run(run).adapt("later", later)
        case "detect":
            _, run, later, out = arguments
            write_columns(open_run(run).detect(later).columns(), Path(out))
    return {
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "peak_megabytes": _peak(),
        "imports_megabytes": imported,
        **seconds,
    }


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, some seconds")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--gigabytes", type=float, nargs="+", help="fit tables of these sizes only")
    parser.add_argument("--folder", type=Path, help="where these are written")
    arguments = parser.parse_args()
    if arguments.gigabytes:
        for gigabytes in arguments.gigabytes:
            found = in_process("large", gigabytes, arguments.folder)
            print(json.dumps({name: round(value, 2) for name, value in found.items()}), flush=True)
        return
    size = Size(5, 500, 10, 1000) if arguments.quick else Size(100, 10_000, 50, 100_000)
    results = []
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(
        title=f"{size.files} files of {size.rows} rows x {size.columns} columns; {ROUNDS} rounds; "
        f"then {size.later_rows} rows"
    )
    for column in ("command", "threads", "seconds", "CPU s", "reading s", "training s", "peak MB",
                   "of that imports", "x float32"):  # fmt: skip
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_files(folder, size)
        later = str(folder / "later.csv")
        for threads in arguments.threads:
            run = str(folder / f"run-{threads}")
            out = str(folder / "out.csv")
            jobs = [
                ("fit", (threads, str(folder), run)),
                ("predict", (threads, run, later, out)),
                ("adapt", (threads, run, later)),
                ("detect", (threads, run, later, out)),
            ]
            for job, details in jobs:
                found = in_process(job, *details)
                rows = size.files * size.rows if job == "fit" else size.later_rows
                data = rows * (size.columns - 1) * 4 / 2**20
                own = (found["peak_megabytes"] - found["imports_megabytes"]) / data
                results.append({"command": job, "threads": threads, "x_float32": own, **found})
                table.add_row(
                    job,
                    str(threads),
                    f"{found['seconds']:.2f}",
                    f"{found['cpu_seconds']:.2f}",
                    f"{found['reading']:.2f}" if job == "fit" else "",
                    f"{found['training']:.2f}" if job == "fit" else "",
                    f"{found['peak_megabytes']:.0f}",
                    f"{found['imports_megabytes']:.0f}",
                    f"{own:.2f}" if job == "fit" else "",
                )
    console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    fits = [result for result in results if result["command"] == "fit"]
    worst = max(result["reading"] / result["training"] for result in fits)
    print(f"reading / {ROUNDS} rounds: at most {worst:.2f}", file=sys.stdout)


if __name__ == "__main__":
    main()
