"""Table 4: clients that were not there in training, and what learning only their weights is worth.

A share of the clients is held out whole: no row of theirs trains a learner, a Gaussian or the principal
components. Then each of them learns its weights on half of its rows and is tested on the other half.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedgmm.core.checks import check_choice, check_integer
from fedgmm.core.labels import LabelFrequencies
from fedgmm.core.params import expand_clients
from fedgmm.core.randomness import client_keys
from fedgmm.data.dataset import SPLITS, FederatedDataset, LabelledRows
from fedgmm.data.federated import ClientRows
from fedgmm.experiments.image_study import ImageStudy, check_trainable, dealt, encoded
from fedgmm.experiments.image_trials import (
    chosen,
    facts_of,
    features_of,
    of_method,
    run_study,
    stopped_early,
    tabulated,
    write_study,
)
from fedgmm.experiments.results import markdown_table, mean_and_spread, printed
from fedgmm.experiments.trial_files import Trial, trained
from fedgmm.experiments.workplace import Workplace
from fedgmm.methods.base import TITLES, Prediction
from fedgmm.methods.batch_statistics import recompute_statistics
from fedgmm.model.model import FederatedModel
from fedgmm.training.build import build
from fedgmm.training.options import TrainingOptions
from fedgmm.wording import counted

PAPER_ACCURACY = {
    "femnist": {"fedavg": 74.50, "fedavg+": 51.00, "fedem": 72.00, "fedgmm": 78.51},
    "cifar10": {"fedavg": 44.51, "fedavg+": 32.25, "fedem": 47.51, "fedgmm": 50.25},
    "cifar100": {"fedavg": 11.50, "fedavg+": 7.75, "fedem": 16.50, "fedgmm": 21.25},
}
"""Test accuracy of unseen clients in the paper's Table 4."""

METHODS = ("fedavg", "fedavg+", "fedem", "fedgmm")

WAYS = {
    "as it is": "the federation's own model",
    "tuned": "global learner tuned on the adaptation rows",
    "labels": "weights from labelled rows",
    "labels, frequencies": "label frequencies, too, from labelled rows",
    "no labels": "weights from rows without labels",
    "no labels, frequencies": "label frequencies, too, from rows without labels",
}
"""What an unseen client may do before it is tested."""

_FREQUENCIES = ", frequencies"
_PRINTED = {"fedavg": "as it is", "fedavg+": "tuned", "fedem": "labels", "fedgmm": "labels"}


@dataclass(frozen=True)
class UnseenStudy(ImageStudy):
    """What is run; the defaults are the paper's, and attributes not named here are those of its base.

    Attributes:
        methods: among ``METHODS``; nobody says how the others would take in a new client.
        held_out: share of the clients that are not there in training.
        iterations: after how many EM iterations of the weights to test, for the curve.
    """

    methods: tuple[str, ...] = METHODS
    held_out: float = 0.2
    iterations: tuple[int, ...] = (1, 2, 3, 5, 10, 20, 50)

    def __post_init__(self) -> None:
        super().__post_init__()
        for method in self.methods:
            check_choice("methods", method, METHODS)
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must lie between 0 and 1, got {self.held_out!r}.")
        for count in self.iterations:
            check_integer("iterations", count, 1)


@dataclass(frozen=True)
class Newcomer:
    """A client that was not there in training.

    Attributes:
        name: of the client.
        adaptation: what it learns its weights from.
        test: what it is tested on; no row is in both.
    """

    name: Hashable
    adaptation: LabelledRows
    test: LabelledRows


@dataclass(frozen=True)
class HeldOut:
    """A federation, and clients that it never saw.

    Attributes:
        dataset: the clients that train.
        newcomers: the others.
    """

    dataset: FederatedDataset
    newcomers: list[Newcomer]


@dataclass(frozen=True)
class UnseenOutcome:
    """Mean test accuracy of the unseen clients: for each method and way, one value a seed."""

    accuracy: dict[str, dict[str, list[float]]]
    details: list[dict[str, Any]]


def hold_out_clients(study: UnseenStudy, seed: int, workplace: Workplace) -> HeldOut:
    """The clients of a seed; principal components know nothing of those that are held out."""
    everyone = dealt(study, seed, workplace, shift=study.shift).dataset
    names = list(everyone.names)
    count = round(study.held_out * len(names))
    if not 0 < count < len(names):
        raise ValueError(
            f"held_out={study.held_out:g} of {counted(len(names), 'client')} leaves nobody to "
            "train or nobody to hold out; use more clients."
        )
    drawn = np.random.default_rng([seed, len(names)]).permutation(len(names))[:count].tolist()
    away = [names[code] for code in sorted(drawn)]
    at_home = [name for name in names if name not in set(away)]
    training, unseen = everyone.select(at_home), everyone.select(away)
    _check_halves(unseen)
    check_trainable(study, seed, training)
    if "fedgmm" not in study.methods:  # nobody has Gaussians that would see features
        return HeldOut(training, _newcomers(unseen, seed))
    known = encoded(study, training, workplace)
    attached = known.feature_map.attach(unseen, workplace.tell_encoded)
    return HeldOut(known.dataset, _newcomers(attached, seed))


def _check_halves(unseen: FederatedDataset) -> None:
    """Raise unless every client has rows to learn from and others to be tested on."""
    rows = torch.stack([unseen.split(split).features.rows_per_client for split in SPLITS]).sum(0)
    for name, count in zip(unseen.names, rows.tolist(), strict=True):
        if count < 2:
            raise ValueError(
                f"Unseen client {name!r} has {counted(count, 'row')}, too few for two halves; use fewer "
                "clients or more images."
            )


def _newcomers(unseen: FederatedDataset, seed: int) -> list[Newcomer]:
    """All rows of each client, whatever their split, in two random halves."""
    parts = [unseen.split(split) for split in SPLITS]
    seen = torch.cat([chunk for part in parts for chunk in part.features.chunks])
    inputs = torch.cat([part.inputs for part in parts])
    labels = torch.cat([part.labels for part in parts])
    codes = torch.cat([part.codes for part in parts]).numpy()

    def rows(which: NDArray[np.int64], name: Hashable) -> LabelledRows:
        own = ClientRows((seen[which],), torch.zeros(len(which), dtype=torch.int64), (name,))
        return LabelledRows(own, inputs[which], labels[which], features_are_inputs=False)

    newcomers = []
    for code, name in enumerate(unseen.names):
        generator = np.random.default_rng([seed, int(client_keys([name])[0])])
        order = generator.permutation(np.flatnonzero(codes == code))
        half = len(order) // 2
        newcomers.append(Newcomer(name, rows(order[:half], name), rows(order[half:], name)))
    return newcomers


# ---------------------------------------------------------------------- what newcomers do


def accuracy_of(model: FederatedModel, rows: LabelledRows, client: Hashable | None) -> float:
    """Share of the rows that are predicted right, for a known client or by the federation's weights."""
    x, features = _arrays(rows)
    return float((model.predict(x, client, features=features) == _labels(model, rows)).mean())


def _arrays(rows: LabelledRows) -> tuple[NDArray[Any], NDArray[Any]]:
    return rows.inputs.numpy(), features_of(rows)


def _labels(model: FederatedModel, rows: LabelledRows) -> NDArray[Any]:
    return np.asarray(model.classes[rows.labels.numpy()])


def adapted_accuracy(
    model: FederatedModel, newcomer: Newcomer, labels: bool, iterations: int = 200
) -> float:
    """Test accuracy after the client has learned its weights ``π``, and label frequencies that count."""
    x, features = _arrays(newcomer.adaptation)
    y = _labels(model, newcomer.adaptation) if labels else None
    known = replace(model)  # a copy: the client does not stay
    known.adapt(newcomer.name, x, y, features=features, max_rounds=iterations)
    return accuracy_of(known, newcomer.test, newcomer.name)


def tuned_model(
    model: FederatedModel, newcomers: list[Newcomer], options: TrainingOptions
) -> FederatedModel:
    """FedAvg+ on new clients: each tunes the global learner on its adaptation rows.

    Args:
        model: trained by FedAvg+.
        newcomers: who tunes.
        options: of the training.
    """
    prediction = model.prediction
    place = prediction.default_learner
    assert place is not None
    start = {name: value[place : place + 1] for name, value in prediction.learners.items()}
    device = next(iter(start.values())).device
    rows = _side_by_side([newcomer.adaptation for newcomer in newcomers]).to(device)
    training = build(options, prediction.net).training
    tuned = training.train_personal(
        expand_clients(start, len(newcomers)),
        rows,
        training.rounds + 1,
        replace(training.sgd, epochs=options.finetune_epochs),
    )
    own = Prediction(
        prediction.net,
        {name: value[:, 0] for name, value in tuned.items()},
        assignment=torch.arange(len(newcomers)),
    )
    return replace(model, prediction=recompute_statistics(own, rows), names=list(rows.names))


def _side_by_side(clients: list[LabelledRows]) -> LabelledRows:
    """One client's rows after the other's."""
    counts = torch.tensor([len(rows) for rows in clients])
    codes = torch.repeat_interleave(torch.arange(len(clients)), counts)
    features = torch.cat([torch.cat(rows.features.chunks) for rows in clients])
    names = tuple(name for rows in clients for name in rows.names)
    return LabelledRows(
        ClientRows((features,), codes, names),
        torch.cat([rows.inputs for rows in clients]),
        torch.cat([rows.labels for rows in clients]),
        features_are_inputs=False,
    )


# ---------------------------------------------------------------------- the study


def reproduce_unseen(folder: Path, study: UnseenStudy, workplace: Workplace) -> UnseenOutcome:
    """One row of Table 4 and its curve; what is in ``folder`` already is not done again.

    Args:
        folder: for JSON, Markdown and the figure.
        study: what is run.
        workplace: where data are found and kept, and who is told.
    """
    from fedgmm.report.plots import plot_adaptation

    trials, _ = run_study(folder, "unseen", study, workplace, hold_out_clients, _one_trial)
    study, details = tabulated(trials, study)
    accuracy = {
        method: {
            way: [_mean(one["unseen"][way]) for one in of_method(details, method)]
            for way in _ways_of_all(of_method(details, method), "unseen")
        }
        for method in study.methods
    }
    outcome = UnseenOutcome(accuracy, details)
    write_study(folder, trials, study, asdict(outcome), _markdown(study, outcome))
    if curves := _curves(study, details):
        plot_adaptation(
            [0, *study.iterations],
            curves,
            f"{study.dataset}: clients that were not there in training",
            folder / f"{trials.name}.png",
        )
    return outcome


def _adaptations(method: str, frequencies: LabelFrequencies | None) -> list[str]:
    """Ways in which a newcomer adapts: by weights alone, and with label frequencies where they count."""
    ways = {"fedem": ["labels"], "fedgmm": ["labels", "no labels"]}.get(method, [])
    if frequencies is not None:
        ways = [*ways, f"labels{_FREQUENCIES}"]
        if frequencies.guess_rows:
            ways = [*ways, f"no labels{_FREQUENCIES}"]
    return ways


def _ways_of_all(trials: list[dict[str, Any]], entry: str) -> list[str]:
    """The ways that every seed has: whether labels can be guessed may differ."""
    return [way for way in trials[0][entry] if all(way in one[entry] for one in trials)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _one_trial(trial: Trial[UnseenStudy], held_out: HeldOut) -> dict[str, Any]:
    """Train on the clients that are there, then let the others in, one by one."""
    model = trained(trial, held_out.dataset)
    newcomers = held_out.newcomers
    started = time.perf_counter()
    unseen = {"as it is": [accuracy_of(model, one.test, None) for one in newcomers]}
    curves: dict[str, list[float]] = {}
    if trial.method == "fedavg+":
        tuned = tuned_model(model, newcomers, trial.options)
        unseen["tuned"] = [accuracy_of(tuned, one.test, one.name) for one in newcomers]
    weights_alone = replace(model, prediction=replace(model.prediction, labels=None))
    for way in _adaptations(trial.method, model.prediction.labels):
        labels = way.startswith("labels")
        start = model if way.endswith(_FREQUENCIES) else weights_alone
        unseen[way] = [adapted_accuracy(start, one, labels) for one in newcomers]
        curves[way] = [
            _mean([adapted_accuracy(start, one, labels, count) for one in newcomers])
            for count in trial.study.iterations
        ]
    return {
        **trial.facts,
        "seen": model.evaluate("test").summary(),
        "newcomers": [str(one.name) for one in newcomers],
        "test_rows": [len(one.test) for one in newcomers],
        "unseen": unseen,
        "adaptation_curves": curves,
        "adaptation_seconds": time.perf_counter() - started,
        **facts_of(model),
    }


def _curves(
    study: UnseenStudy, details: list[dict[str, Any]]
) -> dict[tuple[str, str], list[float]]:
    """Mean over seeds after each number of iterations, from none on, for each method and way."""
    curves = {}
    for method in study.methods:
        own = of_method(details, method)
        for way in _ways_of_all(own, "adaptation_curves"):
            runs = [
                [_mean(one["unseen"]["as it is"]), *one["adaptation_curves"][way]] for one in own
            ]
            curves[TITLES[method], way] = np.mean(runs, axis=0).tolist()
    return curves


def _in_some_seeds(outcome: UnseenOutcome) -> str:
    """Which ways have no row, since not every seed has them."""
    sentences = []
    for method, ways in outcome.accuracy.items():
        own = of_method(outcome.details, method)
        for way in WAYS:
            seeds = [one["seed"] for one in own if way in one["unseen"]]
            if seeds and way not in ways:
                sentences.append(
                    f" {TITLES[method]} has {WAYS[way]} with seed {', '.join(map(str, seeds))} alone, "
                    "so there is no row."
                )
    return "".join(sentences)


def _markdown(study: UnseenStudy, outcome: UnseenOutcome) -> str:
    paper = PAPER_ACCURACY.get(study.dataset, {}) if study.shift else {}
    rows = []
    for method, ways in outcome.accuracy.items():
        own = of_method(outcome.details, method)
        seen = mean_and_spread([one["seen"]["mean_accuracy"] for one in own])
        for way, values in ways.items():
            given = printed(paper.get(method) if way == _PRINTED[method] else None)
            rows.append(
                [TITLES[method], WAYS[way], mean_and_spread(values), given, seen, chosen(own[0])]
            )
    newcomers = counted(
        len(outcome.details[0]["newcomers"]),
        "client that was not there in training",
        "clients that were not there in training",
    )
    return (
        f"# {study.dataset}: test accuracy of {newcomers} "
        f"({study.track} track)\n\n"
        + markdown_table(
            [
                "method",
                "a new client has",
                "accuracy (%)",
                "paper (%)",
                "training clients (%)",
                "learning rate",
            ],
            rows,
        )
        + f"\n{100 * study.held_out:g} % of the clients are held out whole: their rows are in no "
        "training and in no principal component. Each learns on half of its rows and is tested on the "
        "other half; mean over clients. Training clients are tested on their own test rows. "
        f"{study.protocol()}{_in_some_seeds(outcome)}{stopped_early(outcome.details)}\n"
    )
