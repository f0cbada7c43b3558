"""``train``: options, every method on tiny data, and bad input."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import fedgmm
from fedgmm.core.networks import network
from fedgmm.core.recording import recorder_of
from fedgmm.data.dataset import SPLITS, FederatedDataset
from fedgmm.training import ALGORITHMS, TrainingOptions, _solver, build, train
from supervised import federation, images, predictions, tiny, two_groups

FAST = {"rounds": 2, "components": 2, "learners": 2}


# ---------------------------------------------------------------------- every method


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("server", ["average", "momentum", "adam"])
def test_every_method_runs_with_every_server(rng, algorithm, server):
    data = federation(rng, sizes=(20, 40, 1), classes=3)
    model = train(data, algorithm, server=server, **FAST)
    assert model.algorithm == algorithm
    assert [entry["round"] for entry in model.history] == [1, 2]
    assert np.isfinite(predictions(model, data)).all()
    assert model.stopped is None
    assert model.evaluate().mean_accuracy >= 0


@pytest.mark.parametrize("server", ["momentum", "adam"])
@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a != "local"])
def test_the_server_s_optimiser_reaches_every_method(rng, algorithm, server):
    """Not only the methods that average: an option that does nothing is a lie."""
    data = federation(rng, sizes=(20, 40, 30))
    plain = train(data, algorithm, tol=None, **{**FAST, "rounds": 3})
    other = train(data, algorithm, tol=None, server=server, **{**FAST, "rounds": 3})
    assert not np.allclose(predictions(plain, data), predictions(other, data))


@pytest.mark.parametrize("kind", ["average", "momentum", "adam"])
def test_every_server_learns_with_its_own_default_step(rng, kind):
    x = rng.normal(size=(300, 3))
    data = FederatedDataset.from_arrays(x, (x[:, 0] > 0).astype(int), np.arange(300) % 3)
    model = train(data, "fedavg", server=kind, rounds=60, lr=0.3, tol=None)
    assert model.evaluate().mean_accuracy > 0.9
    assert model.evaluate().mean_log_loss < 0.5


@pytest.mark.parametrize(("kind", "lr"), [("momentum", 1.0), ("adam", 0.01)])
def test_the_server_s_default_step(rng, kind, lr):
    data = federation(rng)
    default, given = (
        train(data, "fedavg", server=kind, **step, **FAST) for step in ({}, {"server_lr": lr})
    )
    assert np.array_equal(predictions(default, data), predictions(given, data))


@pytest.mark.parametrize("learner", ["linear", "mlp", "cnn"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_learner_runs_in_every_method(rng, algorithm, learner):
    data = images(rng, rows=12)
    model = train(data, algorithm, learner=learner, **FAST)
    assert np.isfinite(predictions(model, data)).all()


def test_a_cnn_learns_small_pictures(rng):
    data = images(rng, rows=40)
    model = train(data, "fedavg", learner="cnn", rounds=8, lr=0.3, batch_size=16)
    assert model.evaluate().mean_accuracy > 0.9


def test_a_module_of_ones_own(rng):
    data = federation(rng, sizes=(60, 50))
    model = train(
        data, learner=lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), **FAST
    )
    assert set(model.prediction.learners) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert model.options["learner"] == "custom"


def test_dropout_is_off_when_a_model_is_asked(rng):
    data = federation(rng, sizes=(60, 50))
    model = train(
        data,
        "fedavg",
        learner=lambda: nn.Sequential(nn.Linear(3, 30), nn.Dropout(0.5), nn.Linear(30, 2)),
        rounds=2,
    )
    x = data.test.inputs.numpy()
    assert np.array_equal(model.predict_proba(x), model.predict_proba(x))


def test_fedgmm_beats_what_knows_one_rule(rng):
    data = two_groups(rng, clients=8, rows=150)
    ours = train(data, components=1, learners=2, start="random", rounds=30).evaluate()
    assert ours.mean_accuracy > 0.85
    assert train(data, "fedavg", rounds=30).evaluate().mean_accuracy < 0.7


def test_it_is_the_package_s_own_door(rng):
    assert fedgmm.train is train
    assert fedgmm.TrainingOptions is TrainingOptions


# ---------------------------------------------------------------------- options


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


def test_an_unknown_option_is_named(rng):
    with pytest.raises(TypeError, match="no option 'epochs'"):
        train(federation(rng), epochs=3)


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
    assert _solver(chosen, network(chosen.learner, (columns,), 2)) == expected


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


@pytest.mark.parametrize("start", ["tied", "split", "random"])
@pytest.mark.parametrize("algorithm", ["fedgmm", "fedem"])
def test_learners_can_start_in_every_way(rng, algorithm, start):
    data = federation(rng, sizes=(40, 40))
    assert np.isfinite(predictions(train(data, algorithm, start=start, **FAST), data)).all()


# ---------------------------------------------------------------------- warm-up


def test_warm_up_rounds_are_fedavg_and_count(rng):
    data = federation(rng, sizes=(40, 50, 30))
    seen = []
    model = train(
        data,
        components=2,
        learners=2,
        rounds=6,
        warmup=4,
        tol=None,
        on_round=[lambda entry: seen.append(entry["round"])],
    )
    assert seen == [1, 2, 3, 4, 5, 6]
    average = train(data, "fedavg", rounds=4, tol=None)
    expected = [entry["log_likelihood"] for entry in average.history]
    np.testing.assert_allclose(
        [entry["log_likelihood"] for entry in model.history[:4]], expected, rtol=1e-6
    )
    seconds = [entry["seconds"] for entry in model.history]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_method_can_start_from_a_shared_learner(rng, algorithm):
    data = federation(rng, sizes=(40, 50, 30))
    common = {"dtype": "float64", "tol": None, "lr": 0.3}
    first = train(data, "fedavg", rounds=5, **common).prediction.learners["0.weight"][0]
    # one round with a rate of nearly nothing leaves the learners at their start
    model = train(
        data,
        algorithm,
        rounds=6,
        warmup=5,
        answers=lambda number, _: number <= 5,
        finetune_epochs=0,
        components=2,
        **common,
    )
    for learner in model.prediction.learners["0.weight"]:
        spread = 0.2 if algorithm in ("fedgmm", "fedem") else 1e-12
        assert float((learner - first).abs().max()) <= spread


def test_a_warm_up_longer_than_the_run_leaves_one_round(rng):
    model = train(federation(rng), warmup=99, tol=None, **{**FAST, "rounds": 3})
    assert len(model.history) == 3


# ---------------------------------------------------------------------- what is watched


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_watched_accuracy_is_that_of_the_validation_rows(rng, algorithm):
    data = federation(rng, sizes=(60, 50, 40), classes=3)
    options = {**FAST, "rounds": 5, "warmup": 2, "tol": None, "finetune_epochs": 0}
    seen = []
    model = train(
        data,
        algorithm,
        watch_accuracy=True,
        on_round=[lambda entry: seen.append(entry["validation_accuracy"])],
        **options,
    )
    assert seen == [entry["validation_accuracy"] for entry in model.history]
    assert len(seen) == 5
    assert seen[-1] == pytest.approx(model.evaluate("validation").weighted_accuracy)
    after_warm_up = train(data, "fedavg", **{**options, "rounds": 2, "warmup": 0})
    assert seen[1] == pytest.approx(after_warm_up.evaluate("validation").weighted_accuracy)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_watching_changes_nothing(rng, algorithm):
    data = federation(rng, sizes=(60, 50, 40))

    def learner():
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    options = {**FAST, "rounds": 3, "learner": learner}
    torch.manual_seed(0)
    plain = train(data, algorithm, **options)
    torch.manual_seed(0)
    watched = train(data, algorithm, watch_accuracy=True, **options)
    for name, value in plain.prediction.learners.items():
        assert torch.equal(value, watched.prediction.learners[name])
    for entry, other in zip(plain.history, watched.history, strict=True):
        assert set(other) - set(entry) == {"validation_accuracy"}
        assert entry["log_likelihood"] == other["log_likelihood"]


def test_watching_looks_at_a_bounded_sample(rng, monkeypatch):
    """Every k-th row, so that the sample is the same every time and all clients are in it."""
    monkeypatch.setattr("fedgmm.training_run._WATCHED_ROWS", 10)
    x = rng.normal(size=(200, 3))
    data = FederatedDataset.from_arrays(
        x, (x[:, 0] > 0).astype(int), np.arange(200) % 4, features=x[:, :2]
    )
    model = train(data, watch_accuracy=True, tol=None, **FAST)
    rows = data.validation
    assert len(rows) == 40
    picked = slice(0, None, 4)
    right = [
        model.predict(x[None], name, features=seen[None])[0] == label
        for x, seen, label, name in zip(
            rows.inputs.numpy()[picked],
            torch.cat(rows.features.chunks).numpy()[picked],
            rows.labels.numpy()[picked],
            [rows.names[code] for code in rows.codes[picked]],
            strict=True,
        )
    ]
    assert len(right) == 10
    assert model.history[-1]["validation_accuracy"] == pytest.approx(np.mean(right))


def test_without_validation_rows_there_is_nothing_to_watch(rng):
    data = federation(rng, split=(0.8, 0.0, 0.2))
    model = train(data, watch_accuracy=True, **FAST)
    assert all(set(e) == {"round", "log_likelihood", "seconds"} for e in model.history)


# ---------------------------------------------------------------------- what is left alone


def test_training_leaves_the_data_alone(rng):
    data = federation(rng)
    before = [data.split(name).inputs.clone() for name in SPLITS]
    train(data, **FAST)
    for old, name in zip(before, SPLITS, strict=True):
        assert torch.equal(old, data.split(name).inputs)


def test_test_rows_do_not_touch_training(rng):
    """Other test and validation rows: the same bits."""
    data = federation(rng)
    first = train(data, **FAST)
    data.test.inputs.mul_(-7.0)
    data.validation.inputs.add_(100.0)
    again = train(data, **FAST)
    for name, value in first.prediction.learners.items():
        assert torch.equal(value, again.prediction.learners[name])


def test_standardising_uses_the_training_rows_of_all_clients(rng):
    data = federation(rng)
    model = train(data, **FAST)
    x = data.train.inputs.numpy()
    np.testing.assert_allclose(model.scaling.mean, x.mean(0), atol=1e-9)
    np.testing.assert_allclose(model.scaling.scale, x.std(0), rtol=1e-9)
    assert train(data, standardise=False, **FAST).scaling is None


def test_selected_clients_train_as_if_there_were_no_others(rng):
    """Rows that were picked out are copies; what the Gaussians see must be scaled like the inputs."""
    pairs = {
        name: (rng.normal(size=(40, 3)) * 50 + 500, np.arange(40) % 2) for name in ("a", "b", "c")
    }
    whole = FederatedDataset.from_clients(pairs)
    some = train(whole.select(["a", "c"]), **FAST)
    del pairs["b"]
    alone = train(FederatedDataset.from_clients(pairs), **FAST)
    assert float(some.prediction.gaussians.means.abs().max()) < 5.0  # scaled
    np.testing.assert_allclose(
        some.prediction.gaussians.means, alone.prediction.gaussians.means, atol=1e-6
    )


# ---------------------------------------------------------------------- clients of every kind


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_strange_clients_are_no_problem(rng, algorithm):
    """One class only, a single row, a class that lives on one client only, a constant column."""
    x = rng.normal(size=(30, 3))
    x[:, 2] = 5.0
    clients = {
        "one class": (x, np.zeros(30, dtype=int)),
        "one row": (x[:1], np.array([1])),
        "own class": (x, np.where(x[:, 0] > 0, 2, 1)),
        "usual": (x, (x[:, 0] > 0).astype(int)),
    }
    data = FederatedDataset.from_clients(clients)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # covariances of so few rows are repaired
        model = train(data, algorithm, rounds=5, components=2, learners=2, lr=0.5)
    result = model.evaluate("train")
    assert result.clients == data.names
    assert np.isfinite(result.log_loss).all()
    for name in data.names:
        np.testing.assert_allclose(model.predict_proba(x, name).sum(1), 1.0, atol=1e-9)
    test = model.evaluate("test")
    assert "one row" not in test.clients  # it has nothing to be tested on


def test_personal_weights_learn_a_client_of_one_class(rng):
    x = rng.normal(size=(80, 2))
    clients = {"usual": (x, (x[:, 0] > 0).astype(int)), "turned": (x, (x[:, 0] < 0).astype(int))}
    data = FederatedDataset.from_clients(clients)
    model = train(data, "fedem", learners=2, start="random", rounds=40, seed=1)
    assert model.evaluate().accuracy.min() > 0.85


def test_one_class_in_all_is_refused(rng):
    data = FederatedDataset.from_arrays(rng.normal(size=(20, 2)), np.full(20, "only"))
    with pytest.raises(ValueError, match=r"only one class.*only"):
        train(data)


def test_more_components_and_learners_than_rows(rng):
    data = FederatedDataset.from_arrays(rng.normal(size=(6, 2)), np.arange(6) % 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = train(data, components=8, learners=8, rounds=5)
    assert np.isfinite(model.predict_proba(rng.normal(size=(3, 2)))).all()


def test_labels_at_evaluation_that_training_never_saw(rng):
    data = tiny(3, 60)
    model = train(data, rounds=2)
    x = data.test.inputs.numpy()
    other = FederatedDataset.from_arrays(x, np.full(len(x), 8), data.test.codes.numpy())
    result = model.evaluate("train", other)
    assert result.mean_accuracy == 0.0
    assert np.isfinite(result.mean_log_loss)


@pytest.mark.parametrize("algorithm", ["fedgmm", "fedavg"])
def test_one_client_alone_is_a_federation_too(rng, algorithm):
    x = rng.normal(size=(100, 2))
    data = FederatedDataset.from_arrays(x, (x[:, 0] > 0).astype(int))
    assert train(data, algorithm, rounds=30, lr=0.5).evaluate().mean_accuracy > 0.85


def test_watching_now_and_then(rng):
    model = train(federation(rng), watch_accuracy=2, tol=None, **{**FAST, "rounds": 5})
    assert ["validation_accuracy" in e for e in model.history] == [False, True, False, True, False]


# ---------------------------------------------------------------------- images, starts, priors


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


def test_crops_and_flips_change_training_and_need_images(rng):
    data = images(rng)
    options = {**FAST, "learner": "cnn", "start": "random"}
    plain, changed = (train(data, "fedavg", augment=a, **options) for a in (False, True))
    again = train(data, "fedavg", augment=True, **options)
    name = next(iter(plain.prediction.learners))
    of = [m.prediction.learners[name] for m in (plain, changed, again)]
    assert not torch.equal(of[0], of[1])
    assert torch.equal(of[1], of[2])  # draws belong to the seed
    with pytest.raises(ValueError, match="augment=True crops and flips images"):
        train(federation(rng), augment=True, **FAST)


def test_pretrained_weights_are_for_mobilenet(rng, tmp_path):
    with pytest.raises(ValueError, match="needs learner='mobilenet'"):
        train(federation(rng), pretrained="weights.safetensors", **FAST)


@pytest.mark.usefixtures("thin_mobilenet")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_learners_start_from_given_weights(rng, tmp_path, algorithm):
    from safetensors.torch import save_file

    from fedgmm.core.backbones import MobileNetV2, read_plain_pixels

    torch.manual_seed(3)
    module = MobileNetV2(2)
    save_file(module.state_dict(), tmp_path / "weights.safetensors")
    read_plain_pixels(module)
    pictures = rng.integers(0, 256, size=(16, 3, 32, 32)).astype(np.uint8)
    data = FederatedDataset.from_arrays(
        pictures, np.arange(16) % 2, np.arange(16) % 2, features=rng.normal(size=(16, 2))
    )
    model = train(
        data,
        algorithm,
        learner="mobilenet",
        pretrained=str(tmp_path / "weights.safetensors"),
        **{**FAST, "rounds": 1, "lr": 1e-9, "components": 1, "finetune_epochs": 0},
    )
    weight = module.state_dict()["features.4.conv.1.0.weight"]
    for own in model.prediction.learners["features.4.conv.1.0.weight"]:
        # copies are apart by a fiftieth of the weights' spread
        assert (own - weight).std() < 0.05 * weight.std()


@pytest.mark.usefixtures("thin_mobilenet")
def test_a_model_that_is_kept_keeps_no_recordings(rng, monkeypatch):
    """They hold as much memory of a card as training did."""
    forgotten = []
    monkeypatch.setattr("fedgmm.training.forget_recordings", forgotten.append)
    data = FederatedDataset.from_arrays(
        rng.integers(0, 256, size=(12, 3, 8, 8)).astype(np.uint8),
        np.arange(12) % 2,
        np.arange(12) // 6,
    )
    options = {**FAST, "learner": "mobilenet", "lr": 1e-4, "rounds": 1}
    model = train(data, "fedavg", **options)
    assert forgotten == [model.prediction.net]
    with pytest.raises(ZeroDivisionError):
        train(data, "fedavg", on_round=[lambda entry: entry["round"] / 0], **options)
    assert len(forgotten) == 2


@dataclass
class Factory:
    """Makes learners; such an object has no hash."""

    classes: int = 2

    def __call__(self):
        return nn.Linear(3, self.classes)


def test_learners_from_a_factory_without_a_hash(rng):
    held = type("Network", (), {})()
    recorder_of(held)  # as if a network was being trained on a card
    model = train(federation(rng), "fedavg", **{**FAST, "learner": Factory()})
    assert len(model.history) == FAST["rounds"]
