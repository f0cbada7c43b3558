"""Membership inference on released models, with and without differential privacy.

Every model is trained on a random half of the rows. The attacker has the shared model, without any
client's weights, and the rows; it says which rows the model was trained on (:mod:`fedgmm.privacy.attacks`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedgmm.data.dataset import SPLITS, FederatedDataset
from fedgmm.data.examples import WHITE, heterogeneous_digits
from fedgmm.data.synthetic import synthetic
from fedgmm.experiments.tables import markdown_table, write_results
from fedgmm.privacy.attacks import Success, attack_all, random_halves
from fedgmm.privacy.settings import Privacy
from fedgmm.runs.comparison import Notify
from fedgmm.support.checks import Count, check_fields, integer
from fedgmm.training.in_process import train
from fedgmm.wording import counted

_DELTA = 1e-5


class AttackedRows(NamedTuple):
    """All rows of a federation, without splits."""

    inputs: NDArray[Any]  # ``(N, d)``
    labels: NDArray[Any]  # ``(N,)``
    clients: NDArray[np.int64]  # ``(N,)``
    bounds: tuple[float, float]  # smallest and largest value that a column can have
    size: tuple[int, int]  # number of Gaussians and of learners


@dataclass(frozen=True)
class MembershipStudy:
    """Size of the study."""

    clients: Count = 10  # number of clients of each data set
    rows: Count = 3000  # rows per client of the synthetic data
    # models per setting; each is attacked with the others as shadow models
    models: Annotated[int, integer(6)] = 8
    rounds: Count = 20  # rounds of training without noise
    epsilons: tuple[float | None, ...] = (None, 8.0, 1.0)  # budgets; ``None`` means no noise
    seed: int = 0  # seed of the data and of the halves

    def __post_init__(self) -> None:
        check_fields(self)


def attacked(
    rows: AttackedRows, models: int, seed: int, notify: Notify = lambda _: None, **training: Any
) -> tuple[float, dict[str, Success]]:
    """Train models on halves of the rows and attack them.

    Returns:
        Mean accuracy on the other halves, with each client's own weights, and the success of each attack.
    """
    members = random_halves(models, len(rows.labels), seed)
    statistics, right = [], []
    for number, own in enumerate(members, 1):
        notify(f"model {number} of {models}")
        dataset = FederatedDataset.from_arrays(
            rows.inputs[own],
            rows.labels[own],
            rows.clients[own],
            task="classification",
            split=(1.0, 0.0, 0.0),
        )
        model = train(dataset, "fedgmm", seed=number, tol=None, **training)
        statistics.append(model.log_joint(rows.inputs, rows.labels))
        known = ~own & np.isin(rows.clients, rows.clients[own])
        found = model.predict(rows.inputs[known], clients=rows.clients[known])
        right.append(float((found == rows.labels[known]).mean()))
    return float(np.mean(right)), attack_all(np.array(statistics), members)


def reproduce_membership(
    folder: Path, study: MembershipStudy, notify: Notify = lambda _: None
) -> None:
    """Attack models of two data sets at every budget, and write ``membership.md`` and ``.json``."""
    table, record = [], []
    for (name, rows), epsilon in product(_data(study).items(), study.epsilons):
        budget, training = "no noise", dict[str, Any](rounds=study.rounds)
        if epsilon is not None:
            budget = f"epsilon={epsilon:g}"
            training = {"privacy": Privacy(epsilon, _DELTA, bounds=rows.bounds)}
        accuracy, success = attacked(
            rows,
            study.models,
            study.seed,
            lambda line, here=f"{name}, {budget}": notify(f"{here}: {line}"),  # type: ignore[misc]
            components=rows.size[0],
            learners=rows.size[1],
            covariance_type="full",
            **training,
        )
        successes = {attack: asdict(one) for attack, one in success.items()}
        record.append({"data": name, "epsilon": epsilon, "accuracy": accuracy, **successes})
        cells = [name, "∞" if epsilon is None else f"{epsilon:g}", f"{100 * accuracy:.1f}"]
        for attack in ("threshold", "likelihood ratio"):
            cells += [f"{success[attack].auc:.3f}", f"{100 * success[attack].found:.1f}"]
        table.append(cells)
        notify(" | ".join(cells))
    header = ["data, rows per model", "ε", "accuracy", "threshold: AUC", "found at 1 %"]
    text = markdown_table([*header, "likelihood ratio: AUC", "found at 1 %"], table)
    write_results(folder, "membership", {"study": asdict(study), "settings": record}, text)


def _data(study: MembershipStudy) -> dict[str, AttackedRows]:
    """Return few rows of many columns, which a model remembers, and many rows, which allow for noise."""
    digits = heterogeneous_digits(study.clients, seed=study.seed).dataset
    drawn = synthetic(study.clients, study.rows, seed=study.seed).dataset
    images = _all_rows(digits, (0.0, WHITE), (2, 1))
    found = {
        "digits, odd or even": images._replace(labels=images.labels % 2),
        "synthetic": _all_rows(drawn, (-6.0, 6.0), (3, 3)),
    }
    return {f"{n}, {counted(len(r.labels) // 2, 'row')}": r for n, r in found.items()}


def _all_rows(
    dataset: FederatedDataset, bounds: tuple[float, float], size: tuple[int, int]
) -> AttackedRows:
    splits = [dataset.split(name) for name in SPLITS]
    return AttackedRows(
        np.concatenate([one.inputs.numpy() for one in splits]),
        np.concatenate([dataset.labels_of(one) for one in splits]),
        np.concatenate([one.codes.numpy() for one in splits]),
        bounds,
        size,
    )
