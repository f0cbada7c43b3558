"""Accuracy against ``ε``: noised sums beside DP-FedAvg, on synthetic data and on a real table.

DP-FedAvg is gradient descent on the same linear learner: every round adds up the rows' clipped gradients
with noise. Its clipping bound, rate and number of rounds are chosen on validation rows for every ``ε``, and
this choice is not charged to its budget. Noised sums have no such choice.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedgmm.core.gaussians import CovarianceType
from fedgmm.data.dataset import FederatedDataset, LabelledRows
from fedgmm.data.examples import WHITE, heterogeneous_digits
from fedgmm.data.synthetic import synthetic
from fedgmm.experiments.tables import markdown_table, mean_and_spread, write_results
from fedgmm.privacy.accounting import mu_of
from fedgmm.privacy.noise import noisy
from fedgmm.privacy.settings import Privacy
from fedgmm.report.plots import new_figure, save_figure
from fedgmm.runs.comparison import Notify
from fedgmm.support.checks import Count, check_fields, one_of
from fedgmm.support.paired import over_splits
from fedgmm.training.in_process import train

METHODS = {
    "fedgmm": "FedGMM, noised sums",
    "fedavg": "FedAvg, noised sums",
    "dp-fedavg": "DP-FedAvg, tuned",
}
_CLIPS, _RATES, _ROUNDS = (0.1, 0.3, 1.0, 3.0), (0.3, 1.0, 3.0, 10.0), (10, 25, 50)
_MOMENTUM = 0.9

Accuracies = dict[str, dict[str, dict[float, list[float]]]]
"""Mean test accuracy of the clients by data set, method and ``ε``, one value per seed."""


@dataclass(frozen=True)
class PrivacyStudy:
    """Settings of the study."""

    clients: Count = 300  # number of clients of the synthetic data; the digits have at most 100
    rows: Count = 3000  # mean number of rows per synthetic client
    seeds: tuple[int, ...] = (0, 1, 2)  # of the data
    epsilons: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)  # budgets, per row
    delta: float = 1e-5  # of every budget
    # ``"synthetic"``, ``"digits"`` or ``"all"``
    dataset: Annotated[str, one_of("all", "synthetic", "digits")] = "all"

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Table:
    """A data set with what is publicly known about its columns."""

    title: str
    dataset: FederatedDataset
    bounds: tuple[float, float]
    components: int
    covariance_type: CovarianceType = "spherical"
    solver: str = "sgd"


def digits(clients: int, seed: int) -> Table:
    """Return scikit-learn's 1,797 digits of 8 × 8 pixels, dealt to clients by label."""
    from sklearn.datasets import load_digits

    from fedgmm.data.partition import dirichlet_by_label

    x, y = load_digits(return_X_y=True)
    codes = dirichlet_by_label(y, clients, 0.4, seed=seed)
    data = FederatedDataset.from_arrays(x.astype(np.float32), y, codes, seed=seed)
    return Table(f"digits, {len(data.names)} clients", data, (0.0, 16.0), 1)


def changed_digits(clients: int, seed: int) -> Table:
    """Return the digits after the paper's shift: half are rotated and inverted, with permuted labels."""
    data = heterogeneous_digits(clients, seed=seed).dataset
    return Table(f"digits, half changed, {clients} clients", data, (0.0, WHITE), 2)


def reproduce_privacy(
    out: Path, study: PrivacyStudy, notify: Notify = lambda _: None
) -> Accuracies:
    """Run the study and write ``privacy.json``, ``privacy.md`` and ``privacy.png``."""
    found: Accuracies = {}
    for seed in study.seeds:
        tables = []
        if study.dataset != "digits":
            data = synthetic(study.clients, study.rows, seed=seed).dataset
            title = f"synthetic, {study.clients} × {study.rows}"
            tables.append(Table(title, data, (-6.0, 6.0), 3, "full", "auto"))
        if study.dataset != "synthetic":
            clients = min(100, study.clients)
            tables += [digits(clients, seed), changed_digits(clients, seed)]
        for table, epsilon, method in product(tables, study.epsilons, METHODS):
            notify(f"{table.title}, seed {seed}: {METHODS[method]} with ε = {epsilon:g}")
            per_seed = found.setdefault(table.title, {}).setdefault(method, {})
            budget = Privacy(epsilon=epsilon, delta=study.delta, bounds=table.bounds)
            per_seed.setdefault(epsilon, []).append(_accuracy(method, table, budget, seed))
    _write(out, study, found)
    return found


def _accuracy(method: str, table: Table, budget: Privacy, seed: int) -> float:
    """Return the mean accuracy of the clients on their test rows."""
    data = table.dataset
    if method == "dp-fedavg":
        return dp_fedavg(data, budget)
    model = train(
        data,
        method,
        components=table.components,
        learners=table.components,
        covariance_type=table.covariance_type,
        solver=table.solver,
        seed=seed,
        dtype="float64",
        privacy=budget,
    )
    return model.evaluate("test", data).mean_accuracy


# ---------------------------------------------------------------------- DP-FedAvg


def dp_fedavg(dataset: FederatedDataset, budget: Privacy) -> float:
    """Return the test accuracy of DP-FedAvg with the settings that are best on validation rows."""
    assert budget.epsilon is not None
    assert budget.delta is not None
    mu = mu_of(budget.epsilon, budget.delta)
    low, high = (torch.from_numpy(one) for one in budget.limits(dataset.input_shape[0]))

    def inputs(rows: LabelledRows) -> Tensor:
        x = (rows.inputs.flatten(1).double() - (low + high) / 2) / (high - low) * 2
        x = x.clamp(-1.0, 1.0)
        return torch.cat([x, x.new_ones(len(x), 1)], dim=1)

    x, classes = inputs(dataset.train), len(dataset.classes)
    truth = one_hot(dataset.train.labels, classes).double()
    held_out, test = inputs(dataset.validation), inputs(dataset.test)
    most, best = -1.0, x
    for clip, rate, rounds in product(_CLIPS, _RATES, _ROUNDS):
        weights = _descend(x, truth, clip, rate, rounds, mu)
        right = (held_out @ weights).argmax(1) == dataset.validation.labels
        if (share := float(right.double().mean())) > most:
            most, best = share, weights
    return _per_client(test @ best, dataset.test)


def _descend(x: Tensor, truth: Tensor, clip: float, rate: float, rounds: int, mu: float) -> Tensor:
    """Return the weights ``(p, K)`` after noised gradient steps of equal budgets."""
    weights = x.new_zeros(x.shape[1], truth.shape[1])
    velocity = torch.zeros_like(weights)
    sigma = clip * math.sqrt(rounds) / mu
    lengths = torch.linalg.vector_norm(x, dim=1)
    for _ in range(rounds):
        error = torch.softmax(x @ weights, 1) - truth
        # the gradient of a row is an outer product, so its length is a product, too
        length = lengths * torch.linalg.vector_norm(error, dim=1)
        scale = (clip / length.clamp_min(1e-12)).clamp_max(1.0)
        total = x.mT @ (error * scale[:, None])
        gradient = torch.from_numpy(noisy(total.numpy().reshape(-1), sigma)).reshape(total.shape)
        velocity = _MOMENTUM * velocity + gradient / len(x)
        weights = weights - rate * velocity
    return weights


def _per_client(logits: Tensor, rows: LabelledRows) -> float:
    """Return the accuracy, averaged over clients."""
    right = (logits.argmax(1) == rows.labels).double()
    clients = torch.unique(rows.codes)
    return float(torch.stack([right[rows.codes == code].mean() for code in clients]).mean())


# ---------------------------------------------------------------------- table and figure


def _write(out: Path, study: PrivacyStudy, found: Accuracies) -> None:
    header = ["", *(f"ε = {epsilon:g}" for epsilon in study.epsilons)]
    text = ["# Accuracy against ε\n"]
    for title, methods in found.items():
        rows = [
            [METHODS[name], *(mean_and_spread(values) for values in per_seed.values())]
            for name, per_seed in methods.items()
        ]
        rows += [
            [
                f"{METHODS[name]}: points ahead, 95 %",
                *(_ahead(methods[name][e], methods["dp-fedavg"][e]) for e in study.epsilons),
            ]
            for name in ("fedgmm", "fedavg")
        ]
        text.append(f"## {title}, per row, δ = {study.delta:g}\n\n{markdown_table(header, rows)}")
    record = {
        "study": asdict(study),
        "accuracy": {
            title: {name: {f"{e:g}": v for e, v in one.items()} for name, one in methods.items()}
            for title, methods in found.items()
        },
    }
    write_results(out, "privacy", record, "\n".join(text))
    _draw(out / "privacy.png", found)


def _ahead(own: list[float], other: list[float]) -> str:
    """Return by how many points one method is ahead, with the 95 % interval over seeds."""
    found = over_splits(100 * (np.array(own) - np.array(other)))
    return f"{found.mean:+.1f} ({found.low:.1f} to {found.high:.1f})"


def _draw(path: Path, found: Accuracies) -> None:
    figure, grid = new_figure((4.5 * len(found), 3.5), 1, len(found), squeeze=False)
    for axes, (title, methods) in zip(grid[0], found.items(), strict=True):
        for name, per_seed in methods.items():
            means = [100 * float(np.mean(values)) for values in per_seed.values()]
            axes.plot(list(per_seed), means, marker="o", label=METHODS[name])
        axes.set(title=title, xlabel="ε", ylabel="test accuracy (%)", xscale="log")
    axes.legend()
    save_figure(figure, path, dpi=150)
