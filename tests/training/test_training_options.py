"""What training can be told: bad values, solvers, schedules, and the pull towards independence."""

from __future__ import annotations

import inspect
import re
from typing import get_type_hints

import numpy as np
import pytest
import torch

from fedgmm.core.server_optimisers import ServerOptimiser
from fedgmm.data.dataset import FederatedDataset
from fedgmm.nets.networks import network
from fedgmm.training.build import build, solver_of
from fedgmm.training.checkpoint import Checkpoint
from fedgmm.training.in_process import UNSET, train
from fedgmm.training.options import TrainingOptions
from supervised import FAST, federation, predictions, two_groups

# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_type_of_numbers(rng, dtype):
    model = train(federation(rng), dtype=dtype, **FAST)
    assert next(iter(model.prediction.learners.values())).dtype == getattr(torch, dtype)
    assert model.prediction.gaussians.means.dtype == torch.float64


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("algorithm", "FedGMM", ValueError),
        ("rounds", 0, ValueError),
        ("rounds", 2.5, TypeError),
        ("components", 0, ValueError),
        ("components", "many", TypeError),
        ("learners", -1, ValueError),
        ("learner", "forest", ValueError),
        ("learner", 3, ValueError),
        ("solver", "lbfgs", ValueError),
        ("start", "warm", ValueError),
        ("warmup", -1, ValueError),
        ("lr", 0.0, ValueError),
        ("lr", -0.1, ValueError),
        ("lr", "fast", TypeError),
        ("lr", float("nan"), ValueError),
        ("momentum", 1.0, ValueError),
        ("weight_decay", -1.0, ValueError),
        ("clip_norm", 0.0, ValueError),
        ("clip_norm", -1.0, ValueError),
        ("clip_norm", "small", TypeError),
        ("schedule", "step", ValueError),
        ("local_epochs", 0, ValueError),
        ("batch_size", 0, ValueError),
        ("covariance_type", "round", ValueError),
        ("aggregation", "median", ValueError),
        ("reg_covar", -1e-3, ValueError),
        ("ridge", -1.0, ValueError),
        ("server", "sgd", ValueError),
        ("server_lr", 0.0, ValueError),
        ("server_momentum", 1.5, ValueError),
        ("participation", 0.0, ValueError),
        ("participation", 1.5, ValueError),
        ("participation", "all", TypeError),
        ("patience", 0, ValueError),
        ("tol", -1.0, ValueError),
        ("tol", "small", TypeError),
        ("proximal", -1.0, ValueError),
        ("finetune_epochs", -1, ValueError),
        ("penalty", 0.0, ValueError),
        ("inner_steps", 0, ValueError),
        ("mixing", -1.0, ValueError),
        ("standardise", "yes", TypeError),
        ("seed", -1, ValueError),
        ("seed", 2**40, ValueError),
        ("device", "gpu", ValueError),
        ("dtype", "float16", ValueError),
    ],
)
def test_a_bad_option_is_named_with_its_value(rng, option, value, error):
    with pytest.raises(error, match=f"{option}.*{re.escape(repr(value))}"):
        train(federation(rng), **{option: value})


@pytest.mark.parametrize(
    ("name", "meant"),
    [("n_components", "components"), ("n_learners", "learners"), ("max_rounds", "rounds")],
)
def test_an_unknown_option_is_named_with_the_nearest_one(rng, name, meant):
    with pytest.raises(TypeError, match=f"no option {name!r}; did you mean {meant!r}"):
        train(federation(rng), **{name: 3})


@pytest.mark.parametrize(("name", "ours"), [("random_state", "seed"), ("max_iter", "rounds")])
def test_names_of_scikit_learn_are_translated(rng, name, ours):
    with pytest.raises(TypeError, match=f"no option {name!r}; use {ours!r}"):
        train(federation(rng), **{name: 3})


@pytest.mark.parametrize(("name", "meant"), [("FedGMM", "fedgmm"), ("fedprx", "fedprox")])
def test_an_unknown_algorithm_is_answered_with_the_nearest_one(rng, name, meant):
    with pytest.raises(ValueError, match=f"algorithm.*Did you mean {meant!r}"):
        train(federation(rng), name)


def test_arrays_in_place_of_a_data_set(rng):
    x = rng.normal(size=(10, 2))
    with pytest.raises(TypeError, match=r"got tuple; .*from_arrays"):
        train((x, x[:, 0] > 0, ["a"] * 10))


def test_a_module_in_place_of_a_learner(rng):
    with pytest.raises(TypeError, match=r"lambda: Linear\(\.\.\.\)"):
        train(federation(rng), learner=torch.nn.Linear(3, 2))


def test_a_learner_that_is_always_the_same_module(rng):
    module = torch.nn.Linear(3, 2)
    with pytest.raises(TypeError, match="the same Linear twice"):
        train(federation(rng), learner=lambda: module, **FAST)


def test_a_class_with_arguments_in_place_of_a_learner(rng):
    with pytest.raises(TypeError, match=r"lambda: Linear\(\.\.\.\)"):
        train(federation(rng), learner=torch.nn.Linear)


@pytest.mark.parametrize(
    "slip", [{"on_round": "x"}, {"on_round": 3}, {"on_round": [3]}, {"checkpoint": 3}]
)
def test_a_callback_or_checkpoint_of_another_type_is_named(rng, slip):
    with pytest.raises(TypeError, match=f"{next(iter(slip))} must be"):
        train(federation(rng), **slip, **FAST)


def test_one_class_is_named_as_it_was_given(rng):
    data = FederatedDataset.from_arrays(rng.normal(size=(20, 2)), np.zeros(20, dtype=int))
    with pytest.raises(ValueError, match=r"one class \(0\)"):
        train(data, **FAST)


def test_one_function_or_several_are_called_after_a_round(rng):
    seen = []
    data = federation(rng)
    train(data, on_round=seen.append, **FAST)
    train(data, on_round=[seen.append, seen.append], **FAST)
    assert [entry["round"] for entry in seen] == [1, 2, 1, 1, 2, 2]


def test_a_checkpoint_may_be_a_path(rng, tmp_path):
    data = federation(rng)
    for path in (str(tmp_path / "a"), tmp_path / "b"):
        train(data, checkpoint=path, **FAST)
        assert Checkpoint(path).path.is_file()


def test_every_option_is_a_keyword_of_train():
    parameters = inspect.signature(train).parameters
    keywords = [p.name for p in parameters.values() if p.default is UNSET]
    assert ["algorithm", *keywords] == list(TrainingOptions.__dataclass_fields__)
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in keywords)
    declared = get_type_hints(TrainingOptions)
    assert {name: get_type_hints(train)[name] for name in keywords} == {
        name: declared[name] for name in keywords
    }


def test_none_is_a_value_of_an_option(rng):
    options = TrainingOptions(tol=1e3, rounds=3)
    data = federation(rng)
    assert len(train(data, "fedavg", options=options).history) == 2
    assert len(train(data, "fedavg", options=options, tol=None).history) == 3


def test_options_changes_and_the_algorithm_are_laid_over_each_other(rng):
    data = federation(rng)
    options = TrainingOptions(algorithm="fedavg", rounds=2, lr=0.3)
    model = train(data, options=options)
    assert model.algorithm == "fedavg"  # the options' own
    assert len(model.history) == 2
    model = train(data, "local", options=options, rounds=3)
    assert model.algorithm == "local"
    assert (model.options["rounds"], model.options["lr"]) == (3, 0.3)
    assert options.algorithm == "fedavg"
    assert train(data, rounds=1).algorithm == "fedgmm"


# ---------------------------------------------------------------------- solvers


def test_newton_is_for_linear_learners(rng):
    with pytest.raises(ValueError, match="linear learners only"):
        train(federation(rng), solver="newton", learner="mlp")


@pytest.mark.parametrize(
    ("options", "columns", "expected"),
    [
        ({"algorithm": "fedgmm"}, 32, "newton"),
        ({"algorithm": "fedem"}, 32, "newton"),
        ({"algorithm": "fedgmm"}, 5000, "sgd"),  # a system too large to solve
        ({"algorithm": "fedgmm", "learner": "mlp"}, 32, "sgd"),
        ({"algorithm": "fedavg"}, 32, "sgd"),
        ({"algorithm": "fedavg", "solver": "newton"}, 32, "newton"),
        ({"algorithm": "fedprox", "solver": "newton"}, 32, "sgd"),  # or its penalty would be lost
        ({"algorithm": "local", "solver": "newton"}, 32, "sgd"),
        ({"algorithm": "fedgmm", "solver": "sgd"}, 32, "sgd"),
    ],
)
def test_who_takes_exact_steps(options, columns, expected):
    chosen = TrainingOptions(**options)
    assert solver_of(chosen, network(chosen.learner, (columns,), 2)) == expected


# ---------------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1, 1, 1, 1]),
        ("sqrt", [1, 2**-0.5, 3**-0.5, 0.5]),
        ("cosine", [1, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2]),
        ("cooldown", [1, 1, 1, 1 / 2]),  # of four rounds the last alone is a fifth
    ],
)
def test_schedules_of_the_learning_rate(schedule, factors):
    options = TrainingOptions(algorithm="local", rounds=4, lr=0.3, schedule=schedule)
    training = build(options, network("linear", (3,), 2)).training
    rates = [training.options(number).lr for number in (1, 2, 3, 4)]
    np.testing.assert_allclose(rates, 0.3 * np.array(factors))


@pytest.mark.parametrize(
    "algorithm", ["fedgmm", "fedem", "fedavg", "fedprox", "fedavg+", "clustered", "pfedme"]
)
def test_every_server_is_told_how_far_the_rate_has_fallen(rng, monkeypatch, algorithm):
    """In every round of a run, by the loop and through the method."""
    shares = []
    step = ServerOptimiser.step

    def look(self, current, average, state, share):
        shares.append(share)
        return step(self, current, average, state, share)

    monkeypatch.setattr(ServerOptimiser, "step", look)
    options = {"schedule": "cooldown", "server": "momentum", "solver": "sgd", "rounds": 4}
    train(two_groups(rng), algorithm, components=2, learners=2, tol=None, **options)
    assert shares == [1.0, 1.0, 1.0, 0.5]


def test_a_cosine_stays_at_its_last_rate_beyond_the_end():
    options = TrainingOptions(algorithm="local", rounds=4, lr=0.3, schedule="cosine")
    training = build(options, network("linear", (3,), 2)).training
    assert training.rate_share(4) == training.rate_share(5) == training.rate_share(9) > 0.0


def test_a_rate_that_cools_down_falls_in_the_last_fifth():
    options = TrainingOptions(algorithm="local", rounds=15, lr=0.3, schedule="cooldown")
    training = build(options, network("linear", (3,), 2)).training
    rates = [training.options(number).lr for number in range(1, 17)]
    np.testing.assert_allclose(rates, 0.3 * np.array([1] * 12 + [3 / 4, 1 / 2, 1 / 4, 1 / 4]))


def test_a_schedule_reaches_the_clients(rng):
    """With a decaying rate, a round moves the learner less than with a constant one."""
    data = federation(rng, sizes=(40, 40))
    steps = {}
    for schedule in ("constant", "sqrt"):
        early, late = (
            train(data, "fedavg", rounds=n, schedule=schedule, tol=None, dtype="float64")
            for n in (8, 9)
        )
        gap = early.prediction.learners["0.weight"] - late.prediction.learners["0.weight"]
        steps[schedule] = float(gap.abs().sum())
    assert steps["sqrt"] < 0.8 * steps["constant"]


# ---------------------------------------------------------------------- independence


def test_independent_learners_predict_as_without_a_density(rng):
    """With an infinite pull FedGMM's labels are FedEM's, whatever its Gaussians do."""
    data = two_groups(rng)
    options = {**FAST, "rounds": 6, "start": "split", "solver": "sgd", "dtype": "float64"}
    with_density = train(data, "fedgmm", independence=1e12, **options)
    without = train(data, "fedem", **options)
    x = data.test.inputs.numpy()
    for name in data.names:
        np.testing.assert_allclose(
            with_density.predict_proba(x, name), without.predict_proba(x, name), atol=1e-7
        )
    assert not np.allclose(predictions(train(data, **options), data), predictions(without, data))


def test_a_newcomer_is_adapted_with_the_same_pull(rng):
    data = two_groups(rng)
    model = train(data, independence=1e12, **{**FAST, "rounds": 4})
    rows = data.test
    found = model.adapt("new", rows.inputs.numpy(), data.classes[rows.labels.numpy()]).weights
    np.testing.assert_allclose(found, np.outer(found.sum(1), found.sum(0)), atol=1e-9)


@pytest.mark.parametrize("name", ["components", "learners"])
def test_more_parts_than_rows_are_refused(rng, name):
    with pytest.raises(ValueError, match=f"{name}=5000"):
        train(federation(rng), **{**FAST, name: 5000})
