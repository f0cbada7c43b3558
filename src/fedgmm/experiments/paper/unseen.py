"""Table 4: clients that did not take part in training, and the accuracy of learning only their weights.

A share of the clients is held out completely: none of their rows is used to train learners, Gaussians or
principal components. Then each of them learns its weights on half of its rows and is tested on the other.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedgmm.core.labels import LabelFrequencies
from fedgmm.core.params import expand_clients
from fedgmm.data.dataset import SPLITS, FederatedDataset, LabelledRows
from fedgmm.data.federated import ClientRows
from fedgmm.experiments.settings import ImageStudy
from fedgmm.experiments.study import (
    Results,
    StudyContext,
    check_trainable,
    deal_images,
    describe_options,
    encode,
    features_of,
    run_study,
    training_facts,
)
from fedgmm.experiments.tables import markdown_table, mean_and_spread, paper_value
from fedgmm.experiments.trials import Record, Trial
from fedgmm.methods.base import TITLES, Prediction
from fedgmm.methods.batch_statistics import recompute_statistics
from fedgmm.model.model import FederatedModel
from fedgmm.support.checks import check_choice, check_integer
from fedgmm.support.randomness import client_keys
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
    "labels, frequencies": "also label frequencies, from labelled rows",
    "no labels": "weights from rows without labels",
    "no labels, frequencies": "also label frequencies, from rows without labels",
}
"""Preparations of an unseen client before it is tested: name in the files, text in the table."""

_FREQUENCIES = ", frequencies"
_PRINTED = {"fedavg": "as it is", "fedavg+": "tuned", "fedem": "labels", "fedgmm": "labels"}


@dataclass(frozen=True)
class UnseenStudy(ImageStudy):
    """Settings of the study; see :class:`ImageStudy` for the other attributes."""

    # among ``METHODS``; the paper does not define new clients for the others
    methods: tuple[str, ...] = METHODS
    held_out: float = 0.2  # share of the clients that do not train
    # numbers of EM iterations of the weights at which the curve is evaluated
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
    """A client that does not train."""

    name: Hashable  # name of the client
    adaptation: LabelledRows  # rows that it learns its weights from
    test: LabelledRows  # rows that it is tested on; disjoint from ``adaptation``


@dataclass(frozen=True)
class HeldOut:
    """A federation and its held-out clients."""

    dataset: FederatedDataset  # the clients that train
    adaptation: LabelledRows  # rows that the held-out clients learn from
    test: LabelledRows  # rows of the same clients for the test

    @property
    def newcomers(self) -> list[Newcomer]:
        """The held-out clients one by one."""
        return [
            Newcomer(name, self.adaptation.client(code), self.test.client(code))
            for code, name in enumerate(self.test.names)
        ]


def hold_out_clients(study: UnseenStudy, seed: int, context: StudyContext) -> HeldOut:
    """Return the clients of a seed; features are computed without the held-out clients."""
    everyone = deal_images(study, seed, context, shift=study.shift).dataset
    clients = len(everyone.names)
    count = round(study.held_out * clients)
    if not 0 < count < clients:
        raise ValueError(
            f"held_out={study.held_out:g} of {counted(clients, 'client')} leaves no client to train "
            "or none to hold out; use more clients."
        )
    training, unseen = divide_clients(everyone, count, seed)
    rows = torch.stack([unseen.split(split).features.rows_per_client for split in SPLITS]).sum(0)
    for name, own in zip(unseen.names, rows.tolist(), strict=True):
        if own < 2:
            raise ValueError(
                f"Unseen client {name!r} has {counted(own, 'row')}, too few for two halves; use fewer "
                "clients or more images."
            )
    check_trainable(study, seed, training)
    if "fedgmm" not in study.methods:  # no method has Gaussians that use features
        return HeldOut(training, *halves(unseen, seed))
    known = encode(study, training, context)
    attached = known.feature_map.attach(unseen, context.report_encoded)
    return HeldOut(known.dataset, *halves(attached, seed))


def divide_clients(
    everyone: FederatedDataset, away: int, seed: int
) -> tuple[FederatedDataset, FederatedDataset]:
    """Return the clients that train, and a number of clients, drawn at random, that do not."""
    names = np.array(everyone.names, dtype=object)
    drawn = np.sort(np.random.default_rng([seed, len(names)]).permutation(len(names))[:away])
    return everyone.select(np.delete(names, drawn).tolist()), everyone.select(names[drawn].tolist())


def halves(unseen: FederatedDataset, seed: int) -> tuple[LabelledRows, LabelledRows]:
    """Divide all rows of each client, regardless of their split, into two random halves."""
    parts = [unseen.split(split) for split in SPLITS]
    features = torch.cat([chunk for part in parts for chunk in part.features.chunks])
    inputs = torch.cat([part.inputs for part in parts])
    labels = torch.cat([part.labels for part in parts])
    codes = torch.cat([part.codes for part in parts])
    halves: tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]] = ([], [])
    for code, key in enumerate(client_keys(unseen.names).tolist()):
        order = np.random.default_rng([seed, key]).permutation(np.flatnonzero(codes == code))
        for half, rows in zip(halves, np.split(order, [len(order) // 2]), strict=True):
            half.append(rows)

    def labelled(which: list[NDArray[np.int64]]) -> LabelledRows:
        places = torch.from_numpy(np.concatenate(which))
        own = ClientRows((features[places],), codes[places], unseen.names)
        return LabelledRows(own, inputs[places], labels[places], features_are_inputs=False)

    return labelled(halves[0]), labelled(halves[1])


# ---------------------------------------------------------------------- adaptation


def accuracy_of(model: FederatedModel, rows: LabelledRows, client: Hashable | None) -> float:
    """Return the accuracy for a client of the model, or with the federation's weights for ``None``."""
    predicted = model.predict(rows.inputs.numpy(), client, features=features_of(rows))
    return float((predicted == model.classes[rows.labels.numpy()]).mean())


def adapted_accuracy(
    model: FederatedModel, newcomer: Newcomer, labels: bool, iterations: int = 200
) -> float:
    """Return the test accuracy after a client has learned its weights ``π``.

    Args:
        model: the federation's model, which is not changed; if it uses label frequencies, the client
            learns these as well.
        newcomer: the client.
        labels: whether the client uses the labels of its adaptation rows.
        iterations: number of EM iterations.
    """
    rows = newcomer.adaptation
    y = np.asarray(model.classes[rows.labels.numpy()]) if labels else None
    known = replace(model)  # a copy, because the client is not kept
    known.adapt(
        newcomer.name, rows.inputs.numpy(), y, features=features_of(rows), max_rounds=iterations
    )
    return accuracy_of(known, newcomer.test, newcomer.name)


def tuned_model(
    model: FederatedModel, adaptation: LabelledRows, options: TrainingOptions
) -> FederatedModel:
    """Return FedAvg+ for new clients: each tunes the global learner on its adaptation rows.

    ``model`` was trained by FedAvg+ with ``options``.
    """
    prediction = model.prediction
    place = prediction.default_learner
    assert place is not None
    start = {name: value[place : place + 1] for name, value in prediction.learners.items()}
    device = next(iter(start.values())).device
    rows = adaptation.to(device)
    if model.scaling is not None:
        rows = rows.with_inputs(model.scaling.apply(rows.inputs, next(iter(start.values())).dtype))
    training = build(options, prediction.net).training
    tuned = training.train_personal(
        expand_clients(start, len(rows.names)),
        rows,
        training.rounds + 1,
        replace(training.sgd, epochs=options.finetune_epochs),
    )
    own = Prediction(
        prediction.net,
        {name: value[:, 0] for name, value in tuned.items()},
        assignment=torch.arange(len(rows.names)),
    )
    return replace(model, prediction=recompute_statistics(own, rows), names=list(rows.names))


# ---------------------------------------------------------------------- the study


def reproduce_unseen(folder: Path, study: UnseenStudy, context: StudyContext) -> Record:
    """Run the study and write one row of Table 4 and its curve into ``folder``.

    Returns:
        The results, with the mean test accuracy of the unseen clients by method, way and seed.
    """
    from fedgmm.report.plots import plot_adaptation

    results = run_study(folder, "unseen", study, context, hold_out_clients, _run_trial)
    accuracy, curves = {}, {}
    for method in results.study.methods:
        own = results.of(method)
        accuracy[method] = {
            way: [_mean(one["unseen"][way]) for one in own] for way in _common_ways(own, "unseen")
        }
        for way in _common_ways(own, "adaptation_curves"):
            runs = [
                [_mean(one["unseen"]["as it is"]), *one["adaptation_curves"][way]] for one in own
            ]
            curves[TITLES[method], way] = np.mean(runs, axis=0).tolist()
    found = results.write({"accuracy": accuracy}, _markdown(results, accuracy))
    if curves:
        title = f"{study.dataset}: clients that did not take part in training"
        plot_adaptation([0, *study.iterations], curves, title, results.picture)
    return found


def _run_trial(trial: Trial[UnseenStudy], held_out: HeldOut) -> Record:
    """Train on the other clients, then adapt and test the held-out clients one by one."""
    model = trial.train(held_out.dataset)
    newcomers = held_out.newcomers
    started = time.perf_counter()
    unseen = {"as it is": [accuracy_of(model, one.test, None) for one in newcomers]}
    curves: dict[str, list[float]] = {}
    if trial.method == "fedavg+":
        tuned = tuned_model(model, held_out.adaptation, trial.options)
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
        **training_facts(model),
    }


def _adaptations(method: str, frequencies: LabelFrequencies | None) -> list[str]:
    """Return the ways in which a newcomer adapts: by weights, and by label frequencies if used."""
    ways = {"fedem": ["labels"], "fedgmm": ["labels", "no labels"]}.get(method, [])
    if frequencies is not None:
        ways = [*ways, f"labels{_FREQUENCIES}"]
        if frequencies.guess_rows:
            ways = [*ways, f"no labels{_FREQUENCIES}"]
    return ways


def _common_ways(trials: list[Record], field: str) -> list[str]:
    """Return the ways that all seeds have, because labels can be guessed with some seeds only."""
    return [way for way in trials[0][field] if all(way in one[field] for one in trials)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _markdown(results: Results[UnseenStudy], accuracy: dict[str, dict[str, list[float]]]) -> str:
    study = results.study
    paper = PAPER_ACCURACY.get(study.dataset, {}) if study.shift else {}
    rows, missing = [], ""
    for method, ways in accuracy.items():
        own = results.of(method)
        seen = mean_and_spread([one["seen"]["mean_accuracy"] for one in own])
        options = describe_options(own[0])
        for way, values in ways.items():
            given = paper_value(paper.get(method) if way == _PRINTED[method] else None)
            rows.append([TITLES[method], WAYS[way], mean_and_spread(values), given, seen, options])
        for way in (way for way in WAYS if way not in ways):
            if seeds := [str(one["seed"]) for one in own if way in one["unseen"]]:
                missing += (
                    f" {TITLES[method]}: {WAYS[way]} has no row, because only seed {', '.join(seeds)} "
                    "has it."
                )
    newcomers = counted(len(results.details[0]["newcomers"]), "unseen client")
    header = ["method", "a new client has", "accuracy (%)", "paper (%)", "training clients (%)"]
    return (
        f"# {study.dataset}: test accuracy of {newcomers} ({study.track} track)\n\n"
        + markdown_table([*header, "learning rate"], rows)
        + f"\n{100 * study.held_out:g} % of the clients are held out: no training run and no principal "
        "component uses their rows. Each learns on half of its rows and is tested on the other half; "
        "mean over clients. Training clients are tested on their own test rows. "
        f"{study.protocol()}{missing}{results.divergence()}\n"
    )
