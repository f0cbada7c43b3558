"""The federated Gaussian mixture beside scikit-learn's GaussianMixture on the pooled rows.

Both sides get the same rows, the same start, the same number of EM iterations (``tol=0``) and the same
number of threads, in float64 with full covariances. Every measurement is a process of its own, and
the sides take turns, so that a slow moment of the machine affects both. A whole ``fit`` is timed, for
two numbers of iterations. Their difference is the cost of the iterations alone, because scikit-learn
runs one extra E-step at the end of a fit.

    python benchmarks/federated_gmm.py               # the full tables and the scaling curves
    python benchmarks/federated_gmm.py --quick       # small sizes, as a check
    python benchmarks/federated_gmm.py --setting 300x3000x32x3 --threads 1 --json results.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if TYPE_CHECKING:
    import numpy as np

PRIVATE, SHARED, REFERENCE = "fedgmm", "fedgmm, shared weights", "scikit-learn, pooled"
SIDES = (PRIVATE, REFERENCE, SHARED)  # in the order in which they take turns
LARGEST_DIFFERENCE = 1e-8  # of the lower bounds of SHARED and REFERENCE, which are the same model
GEMM_SIZE = 1024
QUIET = 0.05  # share of the machine that other processes may use
ROWS_MADE_AT_ONCE = 4096
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

Send = Callable[[int, Sequence[Mapping[str, Any]]], list[dict[str, Any]]]
"""Runs tasks in one worker process with the given number of threads."""


# ---------------------------------------------------------------------- settings and measurements


@dataclass(frozen=True)
class Setting:
    """A size of the problem; ``form`` is ``"ids"`` or ``"dict"``, the input format of the clients."""

    clients: int
    rows: int  # of each client
    columns: int
    components: int
    form: str = "ids"

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Parse ``300x3000x32x3`` or ``300x3000x32x3:dict``."""
        sizes, _, form = text.partition(":")
        numbers = [int(size) if size.isdigit() else 0 for size in sizes.split("x")]
        if len(numbers) != 4 or min(numbers) < 1 or form not in ("", "ids", "dict"):
            raise argparse.ArgumentTypeError(
                f"expected CLIENTSxROWSxCOLUMNSxCOMPONENTS or ...:dict, got {text!r}"
            )
        clients, rows, columns, components = numbers
        return cls(clients, rows, columns, components, form or "ids")

    @property
    def all_rows(self) -> int:
        """Number of rows of all clients together."""
        return self.clients * self.rows

    @property
    def flops_per_iteration(self) -> float:
        """Operations of a plain EM iteration: ``2 M d²`` per row in the E-step and in the moments."""
        return 4.0 * self.components * self.columns**2 * self.all_rows

    def __str__(self) -> str:
        form = " as a dict" if self.form == "dict" else ""
        return (
            f"{self.clients:,} clients{form} × {self.rows:,} rows, "
            f"d={self.columns}, M={self.components}"
        )


@dataclass(frozen=True)
class Measurement:
    """Results of one worker for one side; pairs are for the fewer and the more iterations."""

    wall: tuple[float, float]
    cpu: tuple[float, float]
    peak_over_data: float
    lower_bound: float
    start_wall: float | None = None  # of the side's own k-means start
    peak_with_start: float | None = None


@dataclass(frozen=True)
class Summary:
    """Medians over the repeats for one side of one setting."""

    setting: Setting
    threads: int
    side: str
    seconds_per_iteration: float
    cpu_seconds_per_iteration: float
    seconds_of_fit: float
    cpu_seconds_of_fit: float
    peak_over_data: float
    seconds_of_start: float  # once, of the side's own k-means start
    peak_with_start: float
    lower_bound: float
    gemm_gflops: float
    ratios: tuple[float, ...]  # rows per second over scikit-learn's, turn by turn

    @property
    def rows_per_second(self) -> float:
        """Rows times iterations per second."""
        return self.setting.all_rows / self.seconds_per_iteration

    @property
    def gflops(self) -> float:
        """Achieved rate, counting the operations of plain EM."""
        return self.setting.flops_per_iteration / self.seconds_per_iteration / 1e9


@dataclass(frozen=True)
class ScalingPoint:
    """Cost of one size, medians over the repeats."""

    setting: Setting
    threads: int
    seconds_per_iteration: float
    seconds_of_start: float

    @property
    def microseconds_per_row(self) -> float:
        """Cost of one iteration, divided by the rows."""
        return self.seconds_per_iteration / self.setting.all_rows * 1e6


def per_iteration(seconds: Sequence[float], iterations: Sequence[int]) -> float:
    """Return the seconds per iteration from two fits, or from the longer one if noise hides them."""
    difference = (seconds[1] - seconds[0]) / (iterations[1] - iterations[0])
    return difference if difference > 0 else seconds[1] / iterations[1]


# ---------------------------------------------------------------------- in a worker process


def measure(
    side: str, setting: Setting, iterations: Sequence[int], threads: int, with_start: bool
) -> Measurement:
    """Time a fit with fewer and one with more iterations, and measure the memory."""
    from threadpoolctl import threadpool_limits

    if side != REFERENCE:
        import torch

        torch.set_num_threads(threads)
    with threadpool_limits(threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with tol=0 nothing converges, so scikit-learn warns
        small = replace(setting, clients=2, rows=20 * setting.components)
        for small_start in (make_start(small), {}):  # imports modules that load late
            timed_fit(side, small, make_rows(small), small_start, 2)
        before = memory_now()
        rows, start = make_rows(setting), make_start(setting)
        timed_fit(side, setting, rows, start, 1)  # the first fit allocates memory
        fewer, more = (timed_fit(side, setting, rows, start, count) for count in iterations)
        peak = (memory_peak() - before) / rows.nbytes
        found = Measurement((fewer[0], more[0]), (fewer[1], more[1]), peak, more[2])
        if with_start:
            own_start = timed_fit(side, setting, rows, {}, iterations[0])
            found = replace(
                found,
                start_wall=max(0.0, own_start[0] - fewer[0]),
                peak_with_start=(memory_peak() - before) / rows.nbytes,
            )
    return found


def timed_fit(
    side: str, setting: Setting, rows: np.ndarray, start: Mapping[str, Any], iterations: int
) -> tuple[float, float, float]:
    """Return wall seconds, CPU seconds and the last lower bound of a whole ``fit``."""
    parameters = {**start, "tol": 0.0, "max_iter": iterations, "random_state": 0}
    inputs: dict[str, Any] = {"X": rows}
    if side == REFERENCE:
        from sklearn.mixture import GaussianMixture

        model = GaussianMixture(setting.components, **parameters)
    else:
        from fedgmm import FederatedGaussianMixture

        shared = side == SHARED
        model = FederatedGaussianMixture(setting.components, shared_weights=shared, **parameters)
        inputs = client_inputs(setting, rows)
    wall, cpu = time.perf_counter(), time.process_time()
    model.fit(**inputs)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return wall, cpu, float(model.lower_bound_)


def make_rows(setting: Setting) -> np.ndarray:
    """Draw rows of all clients in order: shared Gaussians, weights from a Dirichlet."""
    import numpy as np

    generator = np.random.default_rng(0)
    means = true_means(setting)
    edges = generator.dirichlet([0.4] * setting.components, size=setting.clients).cumsum(-1)
    rows = np.empty((setting.all_rows, setting.columns))
    for first in range(0, len(rows), ROWS_MADE_AT_ONCE):  # no temporary as large as the data
        block = rows[first : first + ROWS_MADE_AT_ONCE]
        generator.standard_normal(out=block)
        client = np.arange(first, first + len(block)) // setting.rows
        labels = (generator.uniform(size=(len(block), 1)) > edges[client, :-1]).sum(-1)
        block += means[labels]
    return rows


def true_means(setting: Setting) -> np.ndarray:
    import numpy as np

    return 1.5 * np.random.default_rng(1).standard_normal((setting.components, setting.columns))


def make_start(setting: Setting) -> dict[str, np.ndarray]:
    """Return a start for both sides, at some distance from the truth."""
    import numpy as np

    m, d = setting.components, setting.columns
    return {
        "weights_init": np.full(m, 1 / m),
        "means_init": true_means(setting) + 0.3,
        "precisions_init": np.tile(np.eye(d), (m, 1, 1)),
    }


def client_inputs(setting: Setting, rows: np.ndarray) -> dict[str, Any]:
    """Return the arguments of ``fit`` for the federated side."""
    import numpy as np

    if setting.form == "dict":
        return {"X": dict(enumerate(np.split(rows, setting.clients)))}
    return {"X": rows, "clients": np.repeat(np.arange(setting.clients), setting.rows)}


def gemm_gflops(threads: int, seconds: float = 0.5) -> float:
    """Return the best rate of NumPy's float64 matrix product within the given time."""
    import numpy as np
    from threadpoolctl import threadpool_limits

    a, b = np.random.default_rng(0).standard_normal((2, GEMM_SIZE, GEMM_SIZE))
    out, best, end = np.empty_like(a), 0.0, time.perf_counter() + seconds
    with threadpool_limits(threads):
        while time.perf_counter() < end:
            began = time.perf_counter()
            np.matmul(a, b, out=out)
            best = max(best, 2e-9 * GEMM_SIZE**3 / (time.perf_counter() - began))
    return best


def memory_now() -> int:
    """Return the bytes of memory that this process holds."""
    return _proc_status("VmRSS") or memory_peak()


def memory_peak() -> int:
    """Return the largest number of bytes that this process ever held."""
    if high_water := _proc_status("VmHWM"):
        return high_water
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _proc_status(field: str) -> int | None:
    """Return a field of Linux's ``/proc/self/status`` in bytes."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    values = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(values[field].split()[0]) * 1024


def run_worker() -> None:
    """Read tasks from standard input, write their results to standard output."""
    results: list[dict[str, Any]] = []
    for task in json.load(sys.stdin):
        if task["what"] == "gemm":
            results.append({"gflops": gemm_gflops(task["threads"])})
        else:
            setting = Setting(**task["setting"])
            found = measure(
                task["side"], setting, task["iterations"], task["threads"], task["with_start"]
            )
            results.append(asdict(found))
    json.dump(results, sys.stdout)


# ---------------------------------------------------------------------- in the main process


def send(threads: int, tasks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Run tasks one after the other in a fresh process with the given number of threads."""
    limits = dict.fromkeys(THREAD_VARIABLES, str(threads))
    done = subprocess.run(
        [sys.executable, __file__, "--worker"],
        input=json.dumps([{**task, "threads": threads} for task in tasks]),
        env={**os.environ, **limits},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"a worker failed:\n{done.stderr}")
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def fit_task(
    side: str, setting: Setting, iterations: Sequence[int], with_start: bool = False
) -> dict[str, Any]:
    return {
        "what": "fit",
        "side": side,
        "setting": asdict(setting),
        "iterations": list(iterations),
        "with_start": with_start,
    }


def compare(
    setting: Setting, threads: int, iterations: Sequence[int], repeats: int, send: Send
) -> list[Summary]:
    """Measure all sides in one setting, in turns."""
    found: dict[str, list[Measurement]] = {side: [] for side in SIDES}
    limit = 0.0
    for turn in range(repeats):
        limit = max(limit, send(threads, [{"what": "gemm"}])[0]["gflops"])
        for side in SIDES:
            result = send(threads, [fit_task(side, setting, iterations, with_start=turn == 0)])
            found[side].append(Measurement(**result[0]))
    return [
        Summary(
            setting=setting,
            threads=threads,
            side=side,
            seconds_per_iteration=median(per_iteration(f.wall, iterations) for f in runs),
            cpu_seconds_per_iteration=median(per_iteration(f.cpu, iterations) for f in runs),
            seconds_of_fit=median(f.wall[1] for f in runs),
            cpu_seconds_of_fit=median(f.cpu[1] for f in runs),
            peak_over_data=median(f.peak_over_data for f in runs),
            seconds_of_start=runs[0].start_wall or 0.0,
            peak_with_start=runs[0].peak_with_start or 0.0,
            lower_bound=runs[-1].lower_bound,
            gemm_gflops=limit,
            ratios=tuple(
                per_iteration(theirs.wall, iterations) / per_iteration(ours.wall, iterations)
                for ours, theirs in zip(runs, found[REFERENCE], strict=True)
            ),
        )
        for side, runs in found.items()
    ]


def scaling_curve(
    settings: Sequence[Setting], threads: int, iterations: Sequence[int], repeats: int, send: Send
) -> list[ScalingPoint]:
    """Measure the federated side at growing sizes."""
    tasks = [fit_task(PRIVATE, setting, iterations, with_start=True) for setting in settings]
    found = [[Measurement(**result) for result in send(threads, tasks)] for _ in range(repeats)]
    return [
        ScalingPoint(
            setting,
            threads,
            median(per_iteration(run.wall, iterations) for run in runs),
            median(run.start_wall or 0.0 for run in runs),
        )
        for setting, runs in zip(settings, zip(*found, strict=True), strict=True)
    ]


def check_same_numbers(summaries: Sequence[Summary]) -> float:
    """Return the largest relative difference of SHARED and REFERENCE; raise if it is not rounding."""
    bounds = {(str(s.setting), s.threads, s.side): s.lower_bound for s in summaries}
    largest = max(
        abs(bound / bounds[setting, threads, REFERENCE] - 1)
        for (setting, threads, side), bound in bounds.items()
        if side == SHARED
    )
    if not largest < LARGEST_DIFFERENCE:
        raise RuntimeError(
            f"the two sides did not compute the same: lower bounds differ by {largest}"
        )
    return largest


def ratio(ours: Summary, everything: Sequence[Summary]) -> float:
    """Return the speed over scikit-learn's fastest, with as many or fewer threads."""
    references = [
        s.seconds_per_iteration
        for s in everything
        if s.side == REFERENCE and s.setting == ours.setting and s.threads <= ours.threads
    ]
    return min(references) / ours.seconds_per_iteration


def busy_cpu_seconds() -> float | None:
    """Return the CPU seconds of all processes since the machine started; Linux only."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _, _, irq, softirq, *_ = stat.read_text().split("\n", 1)[0].split()[1:]
    ticks = sum(map(int, (user, nice, system, irq, softirq)))
    return ticks / os.sysconf("SC_CLK_TCK")


def own_cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its finished workers."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


# ---------------------------------------------------------------------- tables


def comparison_table(summaries: Sequence[Summary], everything: Sequence[Summary]) -> Table:
    """Return a table of all sides of one setting and number of threads."""
    reference = next(s for s in summaries if s.side == REFERENCE)
    threads = f"threads: {reference.threads}"
    limit = f"GEMM limit {reference.gemm_gflops:.1f} GFLOP/s"
    table = Table(title=f"{reference.setting}; {threads}; {limit}", title_justify="left")
    table.add_column("side", no_wrap=True)
    for heading in (
        "rows/s", "ratio", "each turn", "against best", "fit ratio", "s/iter", "CPU s/iter",
        "GFLOP/s", "of GEMM", "peak/data", "start s", "peak, start",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for s in sorted(summaries, key=lambda s: s.side == REFERENCE):
        table.add_row(
            s.side,
            f"{s.rows_per_second:,.0f}",
            f"{s.rows_per_second / reference.rows_per_second:.2f}x",
            f"{min(s.ratios):.1f}-{max(s.ratios):.1f}",
            f"{ratio(s, everything):.2f}x",
            f"{reference.seconds_of_fit / s.seconds_of_fit:.2f}x",
            f"{s.seconds_per_iteration:.4f}",
            f"{s.cpu_seconds_per_iteration:.4f}",
            f"{s.gflops:.1f}",
            f"{s.gflops / s.gemm_gflops:.0%}",
            f"{s.peak_over_data:.2f}x",
            f"{s.seconds_of_start:.2f}",
            f"{s.peak_with_start:.2f}x",
        )
    return table


def curve_table(title: str, points: Sequence[ScalingPoint]) -> Table:
    """Return a table of the cost per row along a curve, with bars."""
    table = Table(title=f"{title}; threads: {points[0].threads}", title_justify="left")
    for heading in (
        "clients",
        "rows",
        "s/iter",
        "µs per row",
        "against first",
        "",
        "k-means start s",
    ):
        table.add_column(heading, justify="left" if not heading else "right")
    costs = [point.microseconds_per_row for point in points]
    for point, cost in zip(points, costs, strict=True):
        table.add_row(
            f"{point.setting.clients:,}",
            f"{point.setting.all_rows:,}",
            f"{point.seconds_per_iteration:.4f}",
            f"{cost:.3f}",
            f"{cost / costs[0]:.2f}x",
            "█" * round(20 * cost / max(costs)),
            f"{point.seconds_of_start:.2f}",
        )
    return table


def share_of_others(busy_before: float | None, own_before: float, began: float) -> float | None:
    """Return the share of the cores that other processes used during the measurement."""
    busy_now = busy_cpu_seconds()
    if busy_before is None or busy_now is None:
        return None
    others = (busy_now - busy_before) - (own_cpu_seconds() - own_before)
    return max(0.0, others / (time.perf_counter() - began) / (os.cpu_count() or 1))


def print_quietness(others: float | None, console: Console) -> None:
    """Report the load of other processes, because a busy machine can slow BLAS threads tenfold."""
    if others is None:
        return
    verdict = "" if others < QUIET else ": too busy, do not quote these numbers"
    console.print(f"Other processes used {others:.0%} of the machine meanwhile{verdict}.")


def machine() -> dict[str, Any]:
    """Return the processor and the versions that the numbers belong to."""
    names = ("fedgmm", "numpy", "scikit-learn", "torch")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


# ---------------------------------------------------------------------- the command

SETTINGS = ("300x3000x32x3", "300x3000x48x10", "10000x90x32x3", "10000x90x32x3:dict")
QUICK_SETTINGS = ("20x200x8x2",)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="small sizes, some seconds")
    parser.add_argument(
        "--setting", type=Setting.parse, action="append", metavar="CxNxDxM[:dict]",
        help="clients, rows of each, columns, components; may be given several times",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, nargs="+", help="default: 1 2")
    parser.add_argument("--repeats", type=int, help="default: 3")
    parser.add_argument("--iterations", type=int, nargs=2, help="fewer and more; default: 2 6")
    parser.add_argument(
        "--scaling-rows", type=int, nargs="*", metavar="N",
        help="total rows, over 100 clients; default: 100000 200000 400000 800000 1600000",
    )  # fmt: skip
    parser.add_argument(
        "--scaling-clients", type=int, nargs="*", metavar="C",
        help="clients that share the rows of the last curve; default: 10 100 1000 10000 100000",
    )  # fmt: skip
    parser.add_argument("--split-rows", type=int, help="rows shared by them; default: 900000")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    chosen = parser.parse_args()
    fill_in(chosen)
    if min(*chosen.threads, chosen.repeats, chosen.iterations[0]) < 1:
        parser.error("--threads, --repeats and --iterations must be positive")
    if chosen.iterations[0] >= chosen.iterations[1]:
        parser.error("--iterations needs a smaller and a larger number")
    return chosen


def fill_in(chosen: argparse.Namespace) -> None:
    """Set the options that were not given, for a full or a quick run."""
    quick = chosen.quick
    for name, value in {
        "setting": [Setting.parse(text) for text in (QUICK_SETTINGS if quick else SETTINGS)],
        "threads": [1] if quick else [1, 2],
        "repeats": 1 if quick else 3,
        "iterations": [2, 6],
        "scaling_rows": [10_000, 20_000] if quick else [100_000 * 2**k for k in range(5)],
        "scaling_clients": [10, 100, 1000] if quick else [10**k for k in range(1, 6)],
        "split_rows": 18_000 if quick else 900_000,
    }.items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, value)


def curves(chosen: argparse.Namespace) -> dict[str, list[Setting]]:
    """Return the sizes of the scaling section."""
    size = chosen.setting[0]
    growing = [replace(size, clients=100, rows=max(1, n // 100)) for n in chosen.scaling_rows]
    split = [
        replace(size, clients=c, rows=max(1, chosen.split_rows // c))
        for c in chosen.scaling_clients
    ]
    found = {"Growing rows, 100 clients": growing, "The same rows, split over clients": split}
    return {title: settings for title, settings in found.items() if settings}


def main() -> None:
    chosen = arguments()
    if chosen.worker:
        run_worker()
        return
    console = Console(width=max(165, Console().width))
    facts = machine()
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    busy, own, began = busy_cpu_seconds(), own_cpu_seconds(), time.perf_counter()
    comparisons, scaling = run_all(chosen, console)
    others = share_of_others(busy, own, began)
    print_all(comparisons, scaling, console)
    print_quietness(others, console)
    if chosen.json:
        results = {
            "machine": facts,
            "iterations": chosen.iterations,
            "repeats": chosen.repeats,
            "share_of_other_processes": others,
            "comparisons": [asdict(s) for summaries in comparisons for s in summaries],
            "scaling": {title: [asdict(p) for p in points] for title, points in scaling.items()},
        }
        chosen.json.write_text(json.dumps(results, indent=2) + "\n")
    everything = [s for summaries in comparisons for s in summaries]
    smallest = min(ratio(s, everything) for s in everything if s.side != REFERENCE)
    console.print(f"ratio: min {smallest:.1f}x")


def run_all(
    chosen: argparse.Namespace, console: Console
) -> tuple[list[list[Summary]], dict[str, list[ScalingPoint]]]:
    """Run every measurement, with a progress bar over worker processes."""
    sizes = curves(chosen)
    pairs = [(setting, threads) for setting in chosen.setting for threads in chosen.threads]
    workers = chosen.repeats * (len(pairs) * (1 + len(SIDES)) + len(sizes))
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("measuring", total=workers)

        def send_and_count(
            threads: int, tasks: Sequence[Mapping[str, Any]]
        ) -> list[dict[str, Any]]:
            results = send(threads, tasks)
            progress.advance(bar)
            return results

        how = (chosen.iterations, chosen.repeats, send_and_count)
        comparisons = [compare(setting, threads, *how) for setting, threads in pairs]
        most = max(chosen.threads)
        scaling = {title: scaling_curve(points, most, *how) for title, points in sizes.items()}
    return comparisons, scaling


def print_all(
    comparisons: Sequence[Sequence[Summary]],
    scaling: Mapping[str, Sequence[ScalingPoint]],
    console: Console,
) -> None:
    everything = [s for summaries in comparisons for s in summaries]
    for summaries in comparisons:
        console.print(comparison_table(summaries, everything))
    for title, points in scaling.items():
        console.print(curve_table(title, points))
    largest = check_same_numbers(everything)
    console.print(
        "ratio: rows per second against scikit-learn, iterations alone; each turn: its range over "
        "the repeats;\nagainst best: where scikit-learn is faster with fewer threads, against that; "
        "fit ratio: whole fits.\n"
        "GFLOP/s counts 4 M d² per row and iteration for every side; fedgmm skips products with "
        "known zeros and mirrored halves.\n"
        "peak/data: most memory above that after the imports, in units of the rows themselves.\n"
        "start s and peak, start: the side's own k-means start, measured once.\n"
        f"Lower bounds of {SHARED!r} and {REFERENCE!r} differ by at most {largest:.1e}, relatively."
    )


if __name__ == "__main__":
    main()
