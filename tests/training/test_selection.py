from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from fedgmm import ComponentSelection, FederatedGaussianMixture, select_components
from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.synthetic import synthetic
from fedgmm.nets.networks import network
from fedgmm.training.build import build
from fedgmm.training.checkpoint import Checkpoint
from fedgmm.training.in_process import train
from fedgmm.training.options import TrainingOptions
from fedgmm.training.selection import (
    MOST_TRIALS,
    MixtureSelection,
    choose_sizes,
    label_noise,
    local_score,
    select_mixture,
    suitable_covariance,
)
from oracles import as_dict, ragged_ids


@pytest.fixture
def planted(rng):
    """Three far-apart heaps over five clients that see them in different shares."""
    places = np.array([[0.0, 0.0], [30.0, 0.0], [0.0, 30.0]])
    X = np.repeat(places, 60, axis=0) + rng.normal(size=(180, 2))
    return X, ragged_ids(rng, 180, 5)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # 5 for 3 heaps
@pytest.mark.parametrize("criterion", ["bic", "aic"])
@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
def test_the_planted_number_is_chosen(planted, kind, criterion):
    X, ids = planted
    chosen = select_components(
        X,
        clients=ids,
        candidates=range(1, 6),
        criterion=criterion,
        covariance_type=kind,
        shared_weights=True,
        random_state=0,
        max_iter=300,
    )
    assert isinstance(chosen, ComponentSelection)
    if criterion == "bic":
        assert chosen.n_components == 3
    assert chosen.criterion == criterion
    assert sorted(chosen.scores) == [1, 2, 3, 4, 5]
    assert chosen.scores[chosen.n_components] == min(chosen.scores.values())
    # The winner is fitted, and its score is its own.
    assert chosen.best.n_components == chosen.n_components
    own = getattr(chosen.best, criterion)(X, clients=ids)
    assert own == chosen.scores[chosen.n_components]
    assert chosen.best.get_params()["covariance_type"] == kind


def test_private_weights(planted):
    X, ids = planted
    chosen = select_components(X, clients=ids, candidates=(5, 1, 3), random_state=0, max_iter=300)
    assert chosen.n_components == 3
    assert chosen.best.client_weights_.shape == (5, 3)
    refit = FederatedGaussianMixture(1, random_state=0).fit(X, clients=ids)
    assert chosen.scores[1] == pytest.approx(refit.bic(X, clients=ids), rel=1e-12)


def test_dictionaries_and_generators(planted):
    X, ids = planted
    clients = as_dict(X, ids)
    options = {"candidates": (1, 3), "random_state": 0}
    direct = select_components(X, clients=ids, **options)
    for form in (clients, iter(clients.items()), list(clients.items())):
        chosen = select_components(form, **options)
        assert chosen.n_components == direct.n_components
        assert chosen.scores == pytest.approx(direct.scores, rel=1e-9)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"candidates": []}, ValueError, "candidates is empty"),
        ({"candidates": [0, 2]}, ValueError, "candidates must be at least 1, got 0"),
        ({"candidates": [2.5]}, TypeError, r"candidates must be an integer, got 2\.5"),
        ({"candidates": ["3"]}, TypeError, "candidates must be an integer, got '3'"),
        ({"criterion": "mdl"}, ValueError, r"criterion must be one of \['bic', 'aic'\], got 'mdl'"),
        ({"n_components": 3}, ValueError, "pass candidates instead"),
    ],
)
def test_errors_come_before_any_fit(planted, monkeypatch, options, error, message):
    monkeypatch.setattr(
        FederatedGaussianMixture, "fit", lambda *_, **__: pytest.fail("a model was fitted")
    )
    with pytest.raises(error, match=message):
        select_components(planted[0], **options)


def test_candidates_must_be_numbers_that_can_be_tried(planted):
    X, _ = planted
    with pytest.raises(ValueError, match="n_components=181"):
        select_components(X, candidates=[181])
    with pytest.raises(TypeError, match="candidates"):
        select_components(X, candidates=3)
    with pytest.raises(TypeError, match="candidates"):
        select_components(X, candidates=[1, "3"])


# ---------------------------------------------------------------------- Gaussians and learners


@pytest.mark.usefixtures("folds")
@pytest.mark.parametrize(
    ("size", "seed"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case != (3, 0)))
        for case in product((1, 2, 3), range(3))
    ],
)
def test_the_planted_mixture_is_found(size, seed):
    data = synthetic(12, 200, components=size, dimensions=4, seed=seed).dataset
    options = TrainingOptions(rounds=8)
    found = select_mixture(local_score(data), options, candidates=(1, 2, 3, 4))
    assert (found.components, found.learners) == (size, size)
    assert found.scores[size, size] >= max(found.scores.values()) - 2e-3


def test_a_number_that_is_given_is_kept():
    data = synthetic(8, 200, components=2, dimensions=4, seed=0).dataset
    told = []
    score, options = local_score(data), TrainingOptions(rounds=5)
    found = select_mixture(score, options, components=2, candidates=(1, 2, 3), notify=told.append)
    assert (found.components, found.learners) == (2, 2)
    assert {m1 for m1, _ in found.scores} == {2}
    learners = {1: "1 learner", 2: "2 learners", 3: "3 learners"}
    assert told == [f"trying 2 Gaussians and {learners[m2]}" for _, m2 in found.scores]
    found = select_mixture(score, options, learners=2, candidates=(1, 2, 3))
    assert {m2 for _, m2 in found.scores} == {2}
    assert found.components == 2
    # one learner: labels say nothing about the Gaussians, the inputs do
    assert select_mixture(score, options, learners=1, candidates=(1, 2, 3)).components == 2
    found = select_mixture(score, options, components=1, learners=3)
    assert (found.components, found.learners, list(found.scores)) == (1, 3, [(1, 3)])


def choose(data, options, open_choices=(), sizes_given=True):
    return choose_sizes(
        options,
        open_choices,
        rows=len(data.train),
        columns=data.input_shape[0],
        score=local_score(data),
        sizes_given=sizes_given,
    )


def test_train_chooses_sizes():
    data = synthetic(4, 200, components=2, dimensions=4, seed=0).dataset
    model = train(data, components="auto", learners="auto", rounds=8)
    assert (model.n_components, model.n_learners) == (2, 2)
    assert (model.options["components"], model.options["learners"]) == (2, 2)
    ridge = model.options["ridge"]
    expected = train(data, components=2, learners=2, rounds=8, ridge=ridge)
    assert model.history[-1]["log_likelihood"] == expected.history[-1]["log_likelihood"]


def test_a_run_that_resumes_keeps_its_sizes(tmp_path, monkeypatch):
    data = synthetic(4, 60, components=1, dimensions=2, seed=0).dataset
    file = Checkpoint(tmp_path / "run")
    first = train(data, learners="auto", rounds=3, checkpoint=file)

    def refuse(*args, **options):
        raise AssertionError

    monkeypatch.setattr("fedgmm.training.selection.select_mixture", refuse)
    again = train(data, learners="auto", rounds=4, checkpoint=file)
    assert again.n_learners == first.n_learners
    assert len(again.history) == 4


def test_options_with_open_sizes_cannot_build_a_method():
    options = TrainingOptions(learners="auto")
    options.check()
    with pytest.raises(ValueError, match="auto"):
        build(options, network("linear", (2,), 2))


@pytest.mark.parametrize(
    ("algorithm", "tried"),
    [("fedavg", set()), ("fedem", {(3, 1), (3, 2), (3, 3), (3, 4), (3, 5), (3, 6)})],
)
def test_methods_choose_only_sizes_that_they_have(algorithm, tried):
    calls = set()

    def score(options, evidence):
        calls.add((options.components, options.learners))
        return -abs(options.learners - 4)

    options = TrainingOptions(algorithm, components="auto", learners="auto", patience=3)
    chosen, _ = choose_sizes(options, (), rows=100, columns=4, score=score)
    assert calls == tried
    assert chosen.sizes == (3, 4 if tried else 3)
    assert chosen.patience == 3


def test_few_rows_need_more_evidence_for_a_larger_size():
    def score(options, evidence):
        return 0.01 * options.learners

    options = TrainingOptions()
    assert select_mixture(score, options, rows=100).learners == 1
    assert select_mixture(score, options, rows=1_000_000).learners == 10


def test_the_noise_of_labels_is_that_of_their_variance():
    assert label_noise([50, 50]) == pytest.approx(1.0)
    assert label_noise([990, 10]) == pytest.approx(2 * np.sqrt(0.01 * 0.99))
    assert label_noise([10] * 5) == 1.0
    assert label_noise([9]) == label_noise([]) == 1.0


def test_shops_that_differ_get_two_learners_also_if_fraud_is_rare():
    """All sizes gain little if one row in fifty is positive, but so does chance."""

    def shops(sign):
        rng = np.random.default_rng(0)
        x, owners = rng.normal(size=(4000, 3)), np.arange(4000) % 8
        z = x[:, 0] * np.where(owners % 2, 1.0, sign) * 2 + rng.logistic(size=4000)
        return FederatedDataset.from_arrays(x, z > np.quantile(z, 0.98), owners)

    options = {"components": 1, "learners": "auto", "rounds": 8}
    assert train(shops(-1), **options).n_learners > 1
    assert train(shops(1), **options).n_learners == 1


def test_ridge_and_refit_are_chosen_with_the_sizes():
    def score(options, evidence):
        assert not options.refit
        return -abs(options.ridge - 10.0)

    many = {"rows": 100, "columns": 4, "score": score}
    open_choices = ["ridge", "refit"]
    chosen, _ = choose_sizes(TrainingOptions(), open_choices, **many, sizes_given=False)
    assert (chosen.ridge, chosen.refit) == (10.0, True)
    for options in (TrainingOptions(), TrainingOptions(algorithm="fedavg", learners="auto")):
        chosen, _ = choose_sizes(options, open_choices, **many)  # nothing is tried
        assert (chosen.ridge, chosen.refit) == (1.0, False)
    chosen, _ = choose_sizes(TrainingOptions(), (), **many, sizes_given=False)
    assert (chosen.ridge, chosen.refit) == (1.0, False)
    for options in (TrainingOptions(learner="mlp"), TrainingOptions(solver="sgd")):
        chosen, _ = choose_sizes(options, open_choices, **many, sizes_given=False)
        assert (chosen.ridge, chosen.refit) == (1.0, False)


@pytest.mark.usefixtures("folds")
def test_folds_may_have_fewer_rows_than_principal_components(rng):
    x, y, who = rng.normal(size=(40, 30)), np.arange(40) % 2, np.arange(40) % 2
    data = FederatedDataset.from_arrays(x, y, who)
    few = len(data.train)
    model = train(data, components="auto", learners=1, rounds=2, pca=few)
    assert model.options["pca"] == few


def test_names_of_clients_may_be_tuples():
    rows = synthetic(3, 60, components=2, dimensions=3, seed=0).dataset.train
    names = [("ward", int(code)) for code in rows.codes]
    clients = np.fromiter(names, dtype=object, count=len(names))
    data = FederatedDataset.from_arrays(rows.inputs.numpy(), rows.labels.numpy(), clients)
    assert train(data, components="auto", learners=1, rounds=2).names[0] == ("ward", 0)


def test_the_longest_search_keeps_to_the_number_of_trials():
    """Sites of a federation agree to this many short runs."""
    tried = []

    def score(options, evidence):
        tried.append((options, evidence))
        return float(len(tried))

    options = TrainingOptions(components="auto", learners="auto")
    choose_sizes(options, ["ridge"], rows=10**6, columns=4, score=score)
    assert 16 < len(tried) <= MOST_TRIALS


def test_trials_run_without_patience():
    def score(options, evidence):
        assert options.patience is None
        return 0.0

    select_mixture(score, TrainingOptions(patience=1))


def test_small_data_choose_if_no_size_was_given(monkeypatch):
    data = synthetic(4, 200, components=2, dimensions=4, seed=0).dataset
    options = TrainingOptions(rounds=8)
    chosen, found = choose(data, options, sizes_given=False)
    assert found is not None
    assert chosen == replace(options, components=2, learners=2)
    for other in (TrainingOptions(algorithm="fedavg"), TrainingOptions(algorithm="gmm")):
        assert choose(data, other, sizes_given=False) == (other, None)
    assert choose(data, options) == (options, None)
    monkeypatch.setattr("fedgmm.training.selection._SMALL", len(data.train) * 4 - 1)
    assert choose(data, options, sizes_given=False) == (options, None)


def test_one_learner_does_not_make_the_density_coarse():
    data = synthetic(8, 200, components=1, dimensions=4, seed=0).dataset
    chosen, found = choose(data, TrainingOptions(rounds=8), sizes_given=False)
    assert found is not None
    assert (chosen.components, chosen.learners) == (3, 1)


def test_without_validation_rows_the_defaults_stay():
    rows = {"a": (np.arange(20.0)[:, None], np.arange(20) % 2)}
    data = FederatedDataset.from_clients(rows, split=(0.8, 0.0, 0.2))
    options = TrainingOptions()
    assert choose(data, options, sizes_given=False) == (options, None)
    with pytest.raises(ValueError, match="validation rows"):
        choose(data, options, ["components"])


def test_only_open_options_are_chosen():
    calls = []

    def score(options, evidence):
        calls.append((options.components, options.learners, evidence))
        return -abs(options.components - 2) - abs(options.learners - 3)

    options = TrainingOptions(components=4, learners=5)
    sizes = {"rows": 100, "columns": 4, "score": score}
    chosen, found = choose_sizes(options, ["components"], **sizes)
    assert chosen == replace(options, components=2)
    assert found.components == 2
    assert {(m2, evidence) for _, m2, evidence in calls} == {(5, "labels")}
    calls.clear()
    chosen, _ = choose_sizes(options, ["learners", "covariance_type"], **sizes)
    assert chosen == replace(options, learners=3, covariance_type="diag")
    assert {m1 for m1, _, _ in calls} == {4}
    calls.clear()
    choose_sizes(replace(options, algorithm="gmm"), ["components"], **sizes)
    assert {(m2, evidence) for _, m2, evidence in calls} == {(1, "inputs")}


@pytest.mark.parametrize("name", ["components", "learners"])
def test_sizes_beyond_the_rows_are_refused(name):
    options = TrainingOptions(**{name: 11})
    with pytest.raises(ValueError, match=name):
        choose_sizes(options, (), rows=10, columns=2)
    assert choose_sizes(options, (), rows=11, columns=2) == (options, None)
    few = TrainingOptions(**{name: 10})
    assert choose_sizes(few, (), rows=3, columns=2) == (few, None)


def test_test_rows_play_no_part_in_the_choice():
    data = synthetic(6, 100, components=2, dimensions=3, seed=0).dataset
    options = TrainingOptions(rounds=3)
    first = select_mixture(local_score(data), options, candidates=(1, 2))
    data.test.inputs.fill_(1e6)
    data.test.labels.copy_(1 - data.test.labels)
    assert select_mixture(local_score(data), options, candidates=(1, 2)).scores == first.scores


def test_the_record_is_strict_json():
    record = MixtureSelection(1, 2, {(1, 1): -float("inf"), (1, 2): -0.5}).record()
    read = json.loads(json.dumps(record, allow_nan=False))
    assert read["tried"][0]["validation_log_likelihood"] is None
    assert read["tried"][1] == {"components": 1, "learners": 2, "validation_log_likelihood": -0.5}


def test_nothing_to_choose_from():
    with pytest.raises(ValueError, match="candidates"):
        select_mixture(lambda *_: 0.0, TrainingOptions(), candidates=())


@pytest.mark.parametrize(
    ("rows", "columns", "components", "kind"),
    [
        (5 * 3 * 10, 4, 3, "full"),  # five rows for each of 3 times 10 parameters
        (5 * 3 * 10 - 1, 4, 3, "diag"),
        (10**9, 200, 1, "full"),
        (10**9, 201, 1, "diag"),
    ],
)
def test_covariances_follow_the_rows(rows, columns, components, kind):
    assert suitable_covariance(rows, columns, components) == kind


@pytest.mark.usefixtures("folds")
def test_few_rows_choose_by_cross_validation(monkeypatch):
    """Every row but test rows is held out once, by a model that did not see it."""
    data = synthetic(4, 60, components=1, dimensions=2, seed=0).dataset
    seen = []

    def spy(part, **options):
        seen.append(part)
        return train(part, **options)

    monkeypatch.setattr("fedgmm.training.selection.train", spy)
    options = TrainingOptions(components=1, learners=1, rounds=2)
    assert np.isfinite(local_score(data)(options, "labels"))
    rows = [{tuple(row) for row in part.validation.inputs.tolist()} for part in seen]
    others = {tuple(row) for row in data.train.inputs.tolist() + data.validation.inputs.tolist()}
    assert len(rows) > 1
    assert set.union(*rows) == others
    assert sum(map(len, rows)) == len(others)
    for part, held_out in zip(seen, rows, strict=True):
        assert not held_out & {tuple(row) for row in part.train.inputs.tolist()}
        assert part.validation.features.rows_per_client.min() > 0
    monkeypatch.setattr("fedgmm.training.selection._FEW_ROWS", 1)
    seen.clear()
    local_score(data)(options, "labels")
    assert seen == [data]


@pytest.mark.usefixtures("folds")
def test_sites_that_differ_in_their_labels_alone_get_several_learners():
    """Inputs say nothing about the site, so several Gaussians would only take rows away."""
    rng = np.random.default_rng(0)
    sites, slopes = np.repeat(np.arange(4), 250), 1.2 * rng.normal(size=(4, 8))
    x = rng.normal(size=(1000, 8))
    y = (x * slopes[sites]).sum(1) + rng.logistic(size=1000) > 0
    data = FederatedDataset.from_arrays(x, y, sites)
    options = TrainingOptions(ridge=10.0, rounds=8)
    sizes = {"rows": len(data.train), "candidates": (1, 2, 3, 6)}
    found = select_mixture(local_score(data), options, **sizes)
    assert found.components == 1
    assert (2, 1) in found.scores  # both sizes together would have chosen two Gaussians
    assert found.learners > 1


def test_the_smallest_size_near_the_best_is_taken():
    def score(options, evidence):
        return {1: 0.0, 2: 0.03, 3: 0.05, 4: 0.055}.get(options.learners, -1.0)

    given = {"components": 1, "candidates": (1, 2, 3, 4, 5, 6)}
    assert select_mixture(score, TrainingOptions(), **given, rows=10_000).learners == 3
    assert select_mixture(score, TrainingOptions(), **given, rows=1_000_000).learners == 4
