"""FedGMM on 1, 2 and 4 processes of ``torchrun``, one after the other, on the same rows.

Rank 0 makes the rows and trains; the other ranks help. All runs must end with the same log-likelihood. One
process uses one thread, so two ranks on a machine with two cores can be twice as fast.

    python benchmarks/ranks.py            # minutes
    python benchmarks/ranks.py --quick    # seconds
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "exact steps": {"learner": "linear"},
    "networks": {"learner": "mlp", "lr": 0.05},
}


def measure(ranks: int, clients: int, rows: int, options: dict[str, Any]) -> dict[str, float]:
    """Train on some ranks, and return seconds, bytes and peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        job = json.dumps({"clients": clients, "rows": rows, "options": options, "out": folder})
        done = subprocess.run(
            [*command, __file__, "--job", job],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        found = [json.loads((Path(folder) / f"{rank}").read_text()) for rank in range(ranks)]
    others = [own["peak_megabytes"] for own in found[1:]]
    return {**found[0], "peak_of_others": max(others, default=0.0)}


def work(clients: int, rows: int, options: dict[str, Any], out: str) -> None:
    """Take the part of one process."""
    from fedgmm.training.distributed import follow
    from fedgmm.training.in_process import several_ranks, train
    from fedgmm.training.ranks import join

    imported, found = _peak(), {}
    group = join() if several_ranks() else None
    if group is not None and group.rank:
        follow(group)
    else:
        dataset = _data(clients, rows)
        sent: list[int] = []
        used: list[float] = []

        def note(_: dict[str, float]) -> None:
            sent.append(0 if group is None else group.bytes)
            used.append(time.process_time())

        started = time.perf_counter()
        model = train(dataset, on_round=note, **options)
        ends = [entry["seconds"] for entry in model.history]
        found = {
            "round": min(b - a for a, b in pairwise(ends)),
            "cpu": statistics.median(b - a for a, b in pairwise(used)),
            "rest": time.perf_counter() - started - ends[-1],
            "bytes": statistics.median(b - a for a, b in pairwise(sent)),
            "log_likelihood": model.history[-1]["log_likelihood"],
        }
    found["peak_megabytes"] = _peak() - imported
    rank = 0 if group is None else group.rank
    (Path(out) / f"{rank}").write_text(json.dumps(found))


def _data(clients: int, rows: int) -> Any:
    """Return clients whose rows come from three Gaussians, with a rule for labels in each."""
    import numpy as np

    from fedgmm.data.dataset import FederatedDataset

    rng, d = np.random.default_rng(0), 32
    means, rules = rng.uniform(-2, 2, (3, d)), rng.normal(size=(3, d))
    z = rng.integers(3, size=clients * rows)
    x = rng.standard_normal((len(z), d), dtype=np.float32) + means[z].astype(np.float32)
    y = (((x - means[z]) * rules[z]).sum(1) > 0).astype(np.int64)
    owners = np.repeat(np.arange(clients), rows)
    return FederatedDataset.from_arrays(x, y, owners, split=(0.9, 0.05, 0.05))


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, some seconds")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        work(**arguments.job)
        return
    clients, rows, rounds = (20, 100, 4) if arguments.quick else (300, 2000, 8)
    common = {"rounds": rounds, "tol": None, "dtype": "float64", "personal_labels": False}
    print(f"FedGMM, {clients} clients, {rows} rows each, 32 columns, float64, one thread per rank")
    print(
        "s: fastest round; CPU s: median round of rank 0; bytes: of rank 0; peak MB: beyond imports"
    )
    print("setting       ranks        s    CPU s  s besides  bytes/round  peak MB rank 0  others")
    results = []
    for name, options in SETTINGS.items():
        for ranks in arguments.ranks:
            found = measure(ranks, clients, rows, {**common, **options})
            results.append({"setting": name, "ranks": ranks, **found})
            print(
                f"{name:12s} {ranks:6d} {found['round']:8.3f} {found['cpu']:8.3f} "
                f"{found['rest']:10.2f} {found['bytes']:12,.0f} "
                f"{found['peak_megabytes']:15.0f} {found['peak_of_others']:7.0f}",
                flush=True,
            )
            first = next(one for one in results if one["setting"] == name)
            if abs(found["log_likelihood"] - first["log_likelihood"]) > 1e-9:
                raise SystemExit("The runs disagree.")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
