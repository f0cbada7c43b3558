"""One FedGMM round with all clients stacked, beside a plain loop over clients.

In the plain loop every client reads its rows through a ``DataLoader``, once for the E-step and once for
each learner, which is an ``nn.Module`` with its own optimiser. Moments are computed on the client's
tensors and averaged on the server. A leaner loop takes all rows of a client at once in the E-step. All
sides do the same work: same rows, same batch size, one local epoch, same start. Their log-likelihoods
and Gaussians must agree.

    python benchmarks/rounds.py            # the paper's size, 10,000 small clients, and the scaling
    python benchmarks/rounds.py --quick    # seconds
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setting:
    clients: int
    rows: int  # training rows per client
    threads: int
    dimensions: int = 32
    components: int = 3
    batch_size: int = 128
    repeats: int = 5


@dataclass(frozen=True)
class Timing:
    seconds: float
    cpu_seconds: float
    peak_megabytes: float
    log_likelihood: float
    mean_norm: float


def measure(side: str, setting: Setting, repeats: int) -> Timing:
    """Run one side in a process of its own and return its median round."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return Timing(**pool.apply(_worker, (side, asdict(setting), repeats)))


def _worker(side: str, values: dict[str, Any], repeats: int) -> dict[str, float]:
    setting = Setting(**values)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(setting.threads)
    import torch

    torch.set_num_threads(setting.threads)
    import fedgmm.training.in_process  # noqa: F401 - imports are not part of a round's memory

    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows, start = _data(setting)
    if side == "stacked":
        step = _stacked(setting, rows, start)
    else:
        step = _looped(setting, rows, start, lean=side == "lean")
    log_likelihood, mean_norm = step()  # warms up; the sides are compared by this step
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - imported
    return {
        "seconds": statistics.median(walls),
        "cpu_seconds": statistics.median(cpus),
        "peak_megabytes": peak / 1024,
        "log_likelihood": log_likelihood,
        "mean_norm": mean_norm,
    }


def _data(setting: Setting) -> tuple[Any, Any]:
    """Return training rows in one block, and the start parameters of both sides."""
    import torch

    from fedgmm.core.gaussians import gaussians
    from fedgmm.data.dataset import LabelledRows
    from fedgmm.data.federated import client_rows
    from fedgmm.nets.networks import Dense

    generator = torch.Generator().manual_seed(0)
    n, d, m = setting.clients * setting.rows, setting.dimensions, setting.components
    means = torch.rand(m, d, generator=generator) * 2 - 1
    directions = torch.rand(m, d, generator=generator) * 2 - 1
    z = torch.randint(m, (n,), generator=generator)
    x = torch.randn(n, d, generator=generator).add_(means[z])
    y = (((x - means[z]) * directions[z]).sum(1) > 0).long()
    codes = torch.arange(setting.clients).repeat_interleave(setting.rows)
    rows = LabelledRows(client_rows([x.numpy()], codes.numpy(), range(setting.clients)), x, y)
    net = Dense(d, 2)
    learners = [net.initial(generator) for _ in range(m)]
    shared = gaussians(
        (means + 0.3).double(), torch.eye(d, dtype=torch.float64).repeat(m, 1, 1), "full"
    )
    return rows, (net, learners, shared)


def _stacked(setting: Setting, rows: Any, start: Any) -> Any:
    import torch

    from fedgmm.core.params import stack
    from fedgmm.core.server_optimisers import ServerState
    from fedgmm.methods.fedgmm import FedGMM, FedGMMShared
    from fedgmm.methods.gmm import FederatedGMM, MixtureShared
    from fedgmm.methods.local_training import LocalTraining
    from fedgmm.nets.sgd import SGD

    net, learners, shared = start
    m = setting.components
    training = LocalTraining(net, SGD(lr=0.1, batch_size=setting.batch_size))
    method = FedGMM(training, m, FederatedGMM(m, dtype=torch.float32))
    weights = torch.full((m * m,), 1.0 / m**2, dtype=torch.float64)
    state = FedGMMShared(MixtureShared(shared, weights), stack(learners), ServerState())
    personal = weights.expand(setting.clients, -1)

    def step() -> tuple[float, float]:
        _, update = method.client_step(state, personal, rows, 1)
        new, info = method.server_step(state, update)
        return info.log_likelihood, float(torch.linalg.norm(new.mixture.gaussians.means))

    return step


def _looped(setting: Setting, rows: Any, start: Any, lean: bool) -> Any:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    net, learners, shared = start
    m, d = setting.components, setting.dimensions
    factors = torch.linalg.cholesky(shared.covariances.float())
    means = shared.means.float()
    log_pi = torch.full((m, m), -math.log(m * m))

    def module(params: dict[str, Any]) -> Any:
        layer = nn.Linear(d, net.classes)
        layer.load_state_dict({"weight": params["0.weight"], "bias": params["0.bias"]})
        return layer

    densities = [
        torch.distributions.MultivariateNormal(mean, scale_tril=factor)
        for mean, factor in zip(means, factors, strict=True)
    ]

    def log_joint(modules: list[Any], x: Any, y: Any) -> Any:
        log_x = torch.stack([density.log_prob(x) for density in densities], dim=1)
        losses = [nn.functional.cross_entropy(own(x), y, reduction="none") for own in modules]
        return (log_pi + log_x[:, :, None] - torch.stack(losses, dim=1)[:, None, :]).flatten(1)

    def train(own: Any, loader: Any) -> None:
        optimiser = torch.optim.SGD(own.parameters(), lr=0.1)
        for x, y, weights in loader:
            loss = nn.functional.cross_entropy(own(x), y, reduction="none")
            optimiser.zero_grad()
            ((weights * loss).sum() / weights.sum()).backward()
            optimiser.step()

    def one_client(x: Any, y: Any) -> tuple[Any, ...]:
        modules = [module(params) for params in learners]
        with torch.no_grad():
            if lean:
                joint = log_joint(modules, x, y)
            else:
                batches = DataLoader(TensorDataset(x, y), setting.batch_size)
                joint = torch.cat([log_joint(modules, *batch) for batch in batches])
            evidence = joint.logsumexp(1)
            q = torch.exp(joint - evidence[:, None]).reshape(-1, m, m)
            gamma, q_x, q_y = q.sum(0), q.sum(2), q.sum(1)
            client_means = (q_x.T @ x) / q_x.sum(0)[:, None]
            client_covariances = torch.stack(
                [
                    ((x - client_means[k]) * q_x[:, k : k + 1]).T
                    @ (x - client_means[k])
                    / q_x[:, k].sum()
                    for k in range(m)
                ]
            )
        for own, weights in zip(modules, q_y.unbind(1), strict=True):
            train(own, DataLoader(TensorDataset(x, y, weights), setting.batch_size, shuffle=True))
        return evidence.sum(), gamma, client_means, client_covariances, modules

    def step() -> tuple[float, float]:
        offsets = rows.offsets.tolist()
        results = [
            one_client(rows.inputs[first:last], rows.labels[first:last])
            for first, last in itertools.pairwise(offsets)
        ]
        gammas = torch.stack([result[1] for result in results])
        by_component, by_learner = gammas.sum(2), gammas.sum(1)
        total = by_component.sum(0)
        new_means = sum(g[:, None] * a[2] for g, a in zip(by_component, results, strict=True))
        new_means = new_means / total[:, None]
        covariances = sum(
            g[:, None, None] * a[3] for g, a in zip(by_component, results, strict=True)
        )
        covariances = covariances / total[:, None, None]
        with torch.no_grad():
            for k in range(m):
                weight = by_learner[:, k] / by_learner[:, k].sum()
                sum(w * a[4][k].weight for w, a in zip(weight, results, strict=True))
        likelihood = float(sum(result[0].double() for result in results)) / len(rows)
        return likelihood, float(torch.linalg.norm(new_means))

    return step


def side_by_side(setting: Setting, loop_repeats: int) -> dict[str, Any]:
    """Measure the sides in turns, each in its own processes, and compare their results."""
    timings: dict[str, list[Timing]] = {"stacked": [], "looped": [], "lean": []}
    for repeat in range(3):
        timings["stacked"].append(measure("stacked", setting, setting.repeats))
        if repeat < loop_repeats:
            timings["looped"].append(measure("looped", setting, 1))
            timings["lean"].append(measure("lean", setting, 1))
    median = {side: _median(own) for side, own in timings.items()}
    ours = median["stacked"]
    for theirs in (median["looped"], median["lean"]):
        apart = abs(ours.log_likelihood - theirs.log_likelihood) / abs(theirs.log_likelihood)
        if apart > 1e-4 or abs(ours.mean_norm / theirs.mean_norm - 1) > 1e-3:
            raise SystemExit(f"The two sides disagree: {ours} and {theirs}.")
    return {"setting": asdict(setting)} | {side: asdict(own) for side, own in median.items()}


def _median(timings: list[Timing]) -> Timing:
    middle = statistics.median(timing.seconds for timing in timings)
    return min(timings, key=lambda timing: abs(timing.seconds - middle))


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, some seconds")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()

    sizes = [(20, 200), (100, 20)] if arguments.quick else [(300, 1800), (10_000, 60)]
    results = [
        side_by_side(Setting(clients, rows, threads), loop_repeats=1 if clients > 1000 else 2)
        for clients, rows in sizes
        for threads in arguments.threads
    ]
    table = Table(title="One FedGMM round, d = 32, M1 = M2 = 3, batch 128, one epoch")
    for column in ("clients x rows", "threads", "stacked s", "CPU s", "peak MB", "looped s", "CPU s",
                   "peak MB", "wall ratio", "CPU ratio", "lean loop s", "lean ratio"):  # fmt: skip
        table.add_column(column, justify="right")
    for result in results:
        setting, ours, theirs = result["setting"], result["stacked"], result["looped"]
        table.add_row(
            f"{setting['clients']} x {setting['rows']}",
            str(setting["threads"]),
            f"{ours['seconds']:.3f}",
            f"{ours['cpu_seconds']:.3f}",
            f"{ours['peak_megabytes']:.0f}",
            f"{theirs['seconds']:.2f}",
            f"{theirs['cpu_seconds']:.2f}",
            f"{theirs['peak_megabytes']:.0f}",
            f"{theirs['seconds'] / ours['seconds']:.1f}x",
            f"{theirs['cpu_seconds'] / ours['cpu_seconds']:.1f}x",
            f"{result['lean']['seconds']:.2f}",
            f"{result['lean']['seconds'] / ours['seconds']:.1f}x",
        )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)

    totals = (10_000, 20_000, 40_000) if arguments.quick else (67_500, 135_000, 270_000, 540_000)
    curve = Table(title="Cost of a stacked round grows with the rows alone (1 thread)")
    for column in ("rows", "clients", "seconds", "ns per row"):
        curve.add_column(column, justify="right")
    scaling = []
    for total in totals:
        for rows in (1800, 60):
            setting = Setting(max(1, total // rows), rows, 1)
            timing = measure("stacked", setting, 3)
            done = setting.clients * rows
            scaling.append({"rows": done, "clients": setting.clients, **asdict(timing)})
            curve.add_row(f"{done}", f"{setting.clients}", f"{timing.seconds:.3f}",
                          f"{timing.seconds / done * 1e9:.0f}")  # fmt: skip
    console.print(curve)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rounds": results, "scaling": scaling}, indent=1))
    worst = min(r["looped"]["seconds"] / r["stacked"]["seconds"] for r in results)
    print(f"ratio: min {worst:.1f}x")


if __name__ == "__main__":
    main()
