"""FedGMM rounds on images on one GPU: stacked clients and learners, compared with a loop over both.

The loop is the reference: one module and one client at a time, on tensors that are already on the GPU. Both
sides run the same round from the same start. Before the measurement both must agree:

- a few clients, one round in float64: learners to 1e-6 of their change, losses to 1e-4;
- a few clients, one step in float32: learners to a twentieth of their change;
- all clients, one round in float32: losses to 1e-4, or to 0.05 for MobileNet-V2.

The tolerance of an untrained MobileNet-V2 is wider because one step in float32 differs by one percent from
the same step in float64, on either side and on any machine, and further steps multiply the difference. The
comparison in float64 shows that both sides compute the same. The stacked side is also timed in mixed
precision; its loss there is printed but not compared.

    python benchmarks/gpu_rounds.py                       # random images of the real sizes
    python benchmarks/gpu_rounds.py --device cpu --quick  # runs anywhere, in a minute

The memory limit is the time of a round that only reads and writes every number as often as necessary, at
the speed at which this GPU copies memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedgmm.core.params import is_statistic
from fedgmm.data.dataset import LabelledRows
from fedgmm.data.federated import ClientRows
from fedgmm.methods.fedgmm import FedGMM, FedGMMShared
from fedgmm.methods.gmm import FederatedGMM
from fedgmm.methods.local_training import LocalTraining
from fedgmm.nets.backbones import MobileNetV2
from fedgmm.nets.learners import log_likelihoods
from fedgmm.nets.networks import as_numbers, network
from fedgmm.nets.sgd import SGD
from fedgmm.nets.stacked import Stacked

FEATURES = 48
LEARNERS = 3
FEW_CLIENTS = 8
FLOAT32_TOLERANCE = 0.05  # of an untrained MobileNet-V2


@dataclass(frozen=True)
class Setting:
    name: str
    learner: str
    shape: tuple[int, int, int]
    classes: int
    clients: int
    rows: int  # training rows of all clients
    smallest: int
    largest: int
    target: float  # seconds per round on one H200
    losses_apart: float = 1e-4  # after a round in float32


SETTINGS = (
    Setting("FEMNIST", "cnn", (1, 28, 28), 62, 539, 70_848, 23, 261, 1.0),
    Setting("CIFAR-10", "mobilenet", (3, 32, 32), 10, 80, 36_000, 77, 1062, 2.5, FLOAT32_TOLERANCE),
)
QUICK = (
    Setting("FEMNIST, small", "cnn", (1, 12, 12), 5, 4, 60, 10, 20, 0.0),
    Setting("CIFAR-10, small", "mobilenet", (3, 32, 32), 5, 2, 24, 10, 14, 0.0, FLOAT32_TOLERANCE),
)


def rows_of(setting: Setting, device: torch.device) -> LabelledRows:
    """Return random images; the sizes of clients vary as in the real data."""
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(setting.clients, 4.0))
    sizes = np.clip((shares * setting.rows).astype(int), setting.smallest, setting.largest)
    codes = torch.from_numpy(np.repeat(np.arange(setting.clients), sizes)).to(device)
    generator = torch.Generator().manual_seed(0)
    total = len(codes)
    images = torch.randint(0, 256, (total, *setting.shape), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, setting.classes, (total,), generator=generator)
    features = torch.randn(total, FEATURES, generator=generator)
    seen = ClientRows((features.to(device),), codes, tuple(range(setting.clients)))
    return LabelledRows(seen, images.to(device), labels.to(device), features_are_inputs=False)


def method_of(
    setting: Setting, compute: torch.dtype | None, dtype: torch.dtype = torch.float32
) -> FedGMM:
    net: Any = network(setting.learner, setting.shape, setting.classes, compute)
    if (
        setting.learner == "mobilenet"
    ):  # without dropout, because random numbers of two sides differ
        make = partial(MobileNetV2, setting.classes, dropout=0.0)
        net = Stacked(make, setting.shape, setting.classes, compute)
    training = LocalTraining(net, SGD(lr=0.01, batch_size=128), dtype=dtype)
    return FedGMM(training, LEARNERS, FederatedGMM(LEARNERS, dtype=torch.float32), start="random")


def looped(
    setting: Setting, method: FedGMM, shared: FedGMMShared, personal: Tensor, rows: LabelledRows
) -> Callable[[], dict[str, Tensor]]:
    """Return a function that runs the same round, one client and learner at a time."""
    training = method.training
    make = training.net.factory if hasattr(training.net, "factory") else training.net.module

    def module(learner: int) -> nn.Module:
        own = make().to(rows.device, training.dtype)
        state = {name: value[learner] for name, value in shared.learners.items()}
        own.load_state_dict(state, strict=False)
        return own

    def log_joint(modules: list[nn.Module], part: slice) -> Tensor:
        x = as_numbers(rows.inputs[part], training.dtype)
        seen, y = rows.features.chunks[0][part], rows.labels[part]
        gaussians = shared.mixture.gaussians
        log_x = torch.stack(
            [
                torch.distributions.MultivariateNormal(mean, covariance).log_prob(seen.double())
                for mean, covariance in zip(gaussians.means, gaussians.covariances, strict=True)
            ],
            dim=1,
        )
        log_y = torch.stack(
            [-nn.functional.cross_entropy(own.eval()(x), y, reduction="none") for own in modules],
            dim=1,
        ).double()
        code = int(rows.codes[part.start])
        log_pi = personal[code].log().reshape(-1, LEARNERS)
        return (log_pi + log_x[:, :, None] + log_y[:, None]).flatten(1)

    def step() -> dict[str, Tensor]:
        options = training.options(1)
        order = rows.shuffled(training.seed, 1, 0)
        sums: dict[str, Tensor] = {}
        counts = torch.zeros(LEARNERS, dtype=torch.float64, device=rows.device)
        for begin, end in pairwise(rows.offsets.tolist()):
            modules = [module(learner) for learner in range(LEARNERS)]
            with torch.no_grad():
                joint = log_joint(modules, slice(begin, end))
                q = joint.softmax(1).reshape(end - begin, -1, LEARNERS).sum(1).to(training.dtype)
            gamma = q.double().sum(0)
            counts += gamma
            for learner, own in enumerate(modules):
                _train(own.train(), rows, order[begin:end], q[:, learner], begin, options)
                state = dict(own.named_parameters())
                state |= {n: v for n, v in own.named_buffers() if is_statistic(n)}
                for name, value in state.items():
                    total = sums.setdefault(name, torch.zeros_like(shared.learners[name]).double())
                    total[learner] += gamma[learner] * value.detach().double()
        return {
            name: value / counts.reshape(-1, *[1] * (value.dim() - 1))
            for name, value in sums.items()
        }

    return step


def _train(
    own: nn.Module, rows: LabelledRows, order: Tensor, weights: Tensor, begin: int, options: SGD
) -> None:
    optimiser = torch.optim.SGD(own.parameters(), lr=options.lr)
    batches = -(-len(order) // options.batch_size)
    if isinstance(
        own, MobileNetV2
    ):  # its batches have equal sizes, because it uses their statistics
        edges = [len(order) * k // batches for k in range(1, batches)]
        parts = torch.tensor_split(order, edges)
    else:
        parts = order.split(options.batch_size)
    norms = [layer for layer in own.modules() if isinstance(layer, nn.BatchNorm2d)]
    for number, picked in enumerate(parts, 1):
        for layer in norms:  # running statistics are the mean over the first batches of a round
            layer.momentum = max(0.1, 1 / number)
        x = as_numbers(rows.inputs[picked], weights.dtype)
        loss = nn.functional.cross_entropy(own(x), rows.labels[picked], reduction="none")
        share = weights[picked - begin]
        optimiser.zero_grad()
        ((share * loss).sum() / share.sum()).backward()
        optimiser.step()


def seconds_of(step: Callable[[], Any], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        step()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_speed(device: torch.device) -> float:
    """Return the bytes per second that a copy reads and writes."""
    numbers = torch.empty(
        256 * 1024 * 1024 if device.type == "cuda" else 1024 * 1024, device=device
    )
    other = torch.empty_like(numbers)
    seconds = seconds_of(lambda: other.copy_(numbers), device, 5)
    return 2 * numbers.numel() * 4 / seconds


def fewest_bytes(setting: Setting, rows: LabelledRows, method: FedGMM) -> float:
    """Return the bytes that a round must move: parameters five times per step, activations four times.

    A parameter is read in the forward and the backward pass, its gradient is written and read, and the
    parameter is written. An activation and its gradient are written and read once each. In mixed
    precision a parameter has 4 bytes and an activation 2.
    """
    parameters = sum(
        int(np.prod(shape))
        for name, shape in method.training.net.parameter_shapes.items()
        if not is_statistic(name)
    )
    steps = sum(-(-size // 128) for size in rows.features.rows_per_client.tolist())
    activations = _activations(setting, method)
    return LEARNERS * (steps * parameters * 5 * 4 + len(rows) * activations * 4 * 2)


def _activations(setting: Setting, method: FedGMM) -> int:
    """Return the number of outputs of all layers of a module for one image."""
    net = method.training.net
    module = (net.factory if hasattr(net, "factory") else net.module)().eval()
    found = []
    for layer in module.modules():
        if not list(layer.children()):
            layer.register_forward_hook(lambda _, __, out: found.append(out.numel()))
    with torch.no_grad():
        module(torch.zeros(1, *setting.shape))
    return sum(found)


def stacked(
    method: FedGMM, shared: FedGMMShared, personal: Tensor, rows: LabelledRows
) -> FedGMMShared:
    """Run one round of the package."""
    _, update = method.client_step(shared, personal, rows, 1)
    return method.server_step(shared, update)[0]


class Difference(NamedTuple):
    """Differences of the two sides: learners relative to their change, and losses."""

    learners: float
    losses: float


def compare(setting: Setting, device: torch.device) -> dict[str, Difference]:
    """Compare a few clients with the loop in float64, and exit if the difference is too large.

    A round in float64 checks that both sides compute the same; a step in float32 checks the kernels.
    """
    few = min(FEW_CLIENTS, setting.clients)
    small = replace(setting, clients=few, rows=setting.rows * few // setting.clients)
    one_step = replace(small, rows=100 * few, largest=min(128, setting.largest))
    found = {
        "round": _difference(small, device, torch.float64),
        "step": _difference(one_step, device, torch.float32),
    }
    whole, step = found["round"], found["step"]
    close = whole.learners <= 1e-6 and whole.losses <= 1e-4 and step.learners <= FLOAT32_TOLERANCE
    if not close:  # also for NaN
        raise SystemExit(f"{setting.name}: with {few} clients the two sides differ: {found}.")
    return found


def _difference(setting: Setting, device: torch.device, dtype: torch.dtype) -> Difference:
    rows = rows_of(setting, device)
    method, oracle = method_of(setting, None, dtype), method_of(setting, None, torch.float64)
    start = oracle.init(rows)
    theirs = looped(setting, oracle, *start, rows)()
    right = _loss(oracle, theirs, rows)
    differences = []
    for _ in range(3):  # on a GPU the second round is recorded and the third is a replay
        ours = stacked(method, *method.init(rows), rows).learners
        distance = _distance(ours, theirs, start[0].learners)
        differences.append(Difference(distance, abs(_loss(method, ours, rows) - right)))
    worst = np.max(differences, axis=0)  # NaN if any is NaN
    return Difference(*worst.tolist())


def measure(setting: Setting, device: torch.device, repeats: int) -> dict[str, Any]:
    few = compare(setting, device)
    rows = rows_of(setting, device)
    method = method_of(setting, None)
    shared, personal = method.init(rows)

    def stacked_step(own: FedGMM) -> FedGMMShared:
        return stacked(own, shared, personal, rows)

    loop = looped(setting, method, shared, personal, rows)
    theirs = loop()
    for _ in range(3):  # recorded, and replayed
        ours = stacked_step(method).learners
        losses = [_loss(method, learners, rows) for learners in (ours, theirs)]
        if not abs(losses[0] - losses[1]) <= setting.losses_apart:
            raise SystemExit(f"{setting.name}: the losses of the two sides are {losses}.")
    mixed = method_of(setting, torch.bfloat16)
    for _ in range(2):
        mixed_loss = _loss(mixed, stacked_step(mixed).learners, rows)
    times = {
        "full": seconds_of(lambda: stacked_step(method), device, repeats),
        "mixed": seconds_of(lambda: stacked_step(mixed), device, repeats),
        "looped": seconds_of(loop, device, 1),  # the first run has loaded the GPU's libraries
    }
    limit = fewest_bytes(setting, rows, method) / memory_speed(device)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return {
        "setting": asdict(setting),
        "rows": len(rows),
        "seconds": times,
        "few_clients_apart": {name: difference._asdict() for name, difference in few.items()},
        "losses": losses,
        "mixed_loss": mixed_loss,
        "limit": limit,
        "peak_gigabytes": peak,
    }


def _loss(method: FedGMM, learners: dict[str, Tensor], rows: LabelledRows) -> float:
    """Return the mean cross-entropy of the learners on the first rows."""
    some = slice(0, 4096)
    own = {name: value.float() for name, value in learners.items()}
    inputs = as_numbers(rows.inputs[some], torch.float32)
    return -float(log_likelihoods(method.training.net, own, inputs, rows.labels[some]).mean())


def _distance(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], start: dict[str, Tensor]
) -> float:
    """Return the distance between the learners, relative to their change in the round."""
    trained = [name for name in theirs if not is_statistic(name)]
    apart = sum(float((ours[n].double() - theirs[n]).square().sum()) for n in trained)
    moved = sum(float((theirs[n] - start[n].double()).square().sum()) for n in trained)
    return (apart / moved) ** 0.5


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    # otherwise the loop's convolutions round their inputs to ten bits, too coarse for a reference
    torch.backends.cudnn.allow_tf32 = False
    settings = QUICK if arguments.quick else SETTINGS
    results = [measure(setting, device, arguments.repeats) for setting in settings]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    table = Table(title=f"One FedGMM round, 3 Gaussians, 3 learners, batch 128, on {name}")
    for column in ("data", "clients", "rows", "full s", "mixed s", "loop s", "ratio", "target s",
                   "limit s", "of the limit", "learner diff", "loss diff", "peak GB"):  # fmt: skip
        table.add_column(column, justify="right")
    for result in results:
        setting, seconds = result["setting"], result["seconds"]
        best = min(seconds["full"], seconds["mixed"])
        table.add_row(
            setting["name"],
            str(setting["clients"]),
            str(result["rows"]),
            f"{seconds['full']:.3f}",
            f"{seconds['mixed']:.3f}",
            f"{seconds['looped']:.2f}",
            f"{seconds['looped'] / best:.1f}x",
            f"{setting['target']:g}",
            f"{result['limit']:.3f}",
            f"{100 * result['limit'] / best:.0f} %",
            f"{result['few_clients_apart']['round']['learners']:.0e}",
            f"{abs(result['losses'][0] - result['losses'][1]):.0e}",
            f"{result['peak_gigabytes']:.0f}",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    worst = min(
        r["seconds"]["looped"] / min(r["seconds"]["full"], r["seconds"]["mixed"]) for r in results
    )
    print(f"ratio: min {worst:.1f}x")


if __name__ == "__main__":
    main()
