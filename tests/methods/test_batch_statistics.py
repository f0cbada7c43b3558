"""Running statistics of the learners as they are, against torch's own layers, client by client."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedgmm import train
from fedgmm.core.params import is_statistic
from fedgmm.data.dataset import FederatedDataset
from fedgmm.methods import batch_statistics as statistics
from fedgmm.methods.base import Prediction
from fedgmm.methods.batch_statistics import recompute_statistics
from fedgmm.model.model import FederatedModel
from fedgmm.nets.networks import Dense
from fedgmm.nets.stacked import Stacked


class Small(nn.Module):
    """A network with two layers of batch normalisation, the second behind what the first makes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.second, self.other = nn.Conv2d(4, 3, 3, bias=False), nn.BatchNorm2d(3)
        self.pool, self.flat, self.out = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.out(self.flat(self.pool(torch.relu(self.other(self.second(x))))))


NET = Stacked(Small, (1, 8, 8), 2)
SIZES = (7, 3, 5)


@pytest.fixture
def rows(rng):
    who = np.repeat(np.arange(len(SIZES)), SIZES)
    pictures = rng.normal(size=(sum(SIZES), 1, 8, 8)) + who[:, None, None, None]
    data = FederatedDataset.from_arrays(
        pictures, np.arange(sum(SIZES)) % 2, who, split=(1.0, 0.0, 0.0)
    )
    assert (data.train.offsets.diff() == torch.tensor(SIZES)).all()
    return data.train


def drawn(learners):
    params = [NET.initial(torch.Generator().manual_seed(seed)) for seed in range(learners)]
    return {name: torch.stack([own[name].double() for own in params]) for name in params[0]}


def statistics_of(rows, params, learner, client):
    """What torch's layers keep of a client's rows in one batch."""
    module = Small().double().train()
    module.load_state_dict({name: value[learner] for name, value in params.items()}, strict=False)
    for layer in (module.norm, module.other):
        layer.momentum = 1.0
    first, last = rows.offsets[client : client + 2].tolist()
    module(rows.inputs[first:last])
    return {name: value for name, value in module.state_dict().items() if is_statistic(name)}


def mean_of(rows, params, learner, weights):
    """Over clients, with these weights."""
    own = [statistics_of(rows, params, learner, client) for client in range(len(SIZES))]
    total = sum(weights)
    return {n: sum(w * s[n] for w, s in zip(weights, own, strict=True)) / total for n in own[0]}


def assert_statistics(found, learner, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found.learners[name][learner], value, msg=name)


def test_learners_that_are_mixed(rows):
    params, weights = drawn(2), torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.0, 1.0]])
    # two Gaussians: a learner's share is that of both
    four = torch.cat([weights / 4, 3 * weights / 4], 1)
    before = Prediction(NET, params, client_weights=four, weights=torch.full((4,), 0.25))
    found = recompute_statistics(before, rows)
    for learner in range(2):
        shares = [n * float(w) for n, w in zip(SIZES, weights[:, learner], strict=True)]
        assert_statistics(found, learner, mean_of(rows, params, learner, shares))
    for name, value in params.items():
        assert is_statistic(name) or torch.equal(found.learners[name], value)
    assert torch.equal(before.learners["norm.running_var"], params["norm.running_var"])


def test_learners_of_some_clients_of_everybody_and_of_nobody(rows):
    params = drawn(4)
    before = Prediction(NET, params, assignment=torch.tensor([1, 0, 1]), default_learner=3)
    found = recompute_statistics(before, rows)
    assert_statistics(found, 0, statistics_of(rows, params, 0, 1))
    assert_statistics(found, 1, mean_of(rows, params, 1, [7, 0, 5]))
    assert_statistics(found, 3, mean_of(rows, params, 3, SIZES))
    nobody = {name: value[2] for name, value in params.items()}
    assert_statistics(found, 2, nobody)
    shared = recompute_statistics(replace(before, default_learner=1), rows)
    assert_statistics(shared, 1, mean_of(rows, params, 1, [7, 0, 5]))


def test_many_rows_are_seen_in_parts(rows, monkeypatch):
    """Before the first normalisation the mean over parts is the mean over all rows."""
    params = drawn(1)
    monkeypatch.setattr(statistics, "_ROWS_AT_ONCE", 4)
    before = Prediction(NET, params, assignment=torch.zeros(3, dtype=torch.int64))
    channels = nn.functional.conv2d(rows.inputs, params["first.weight"][0])
    found = recompute_statistics(before, rows).learners["norm.running_mean"][0]
    torch.testing.assert_close(found, channels.mean((0, 2, 3)))


@pytest.mark.parametrize("images", [1, 8, 30])
def test_clients_come_a_few_at_a_time(rows, monkeypatch, images):
    weights = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.5, 0.5]])
    before = Prediction(NET, drawn(2), client_weights=weights, weights=torch.full((2,), 0.5))
    expected = recompute_statistics(before, rows)
    monkeypatch.setattr(statistics, "_IMAGES_AT_ONCE", images)
    found = recompute_statistics(before, rows)
    for name, value in expected.learners.items():
        torch.testing.assert_close(found.learners[name], value, msg=name)


def small_pictures(rng, count):
    pictures = rng.integers(0, 256, size=(count, 3, 16, 16)).astype(np.uint8)
    return FederatedDataset.from_arrays(pictures, np.arange(count) % 2, np.arange(count) % 2)


def test_networks_without_statistics_stay(rows):
    net = Dense(64, 2)
    params = net.initial(torch.Generator().manual_seed(0))
    before = Prediction(net, {name: value[None] for name, value in params.items()})
    assert recompute_statistics(before, rows) is before


@pytest.mark.usefixtures("thin_mobilenet")
@pytest.mark.parametrize("algorithm", ["fedem", "local", "fedavg+"])
def test_a_trained_model_has_statistics_of_its_own_weights(rng, algorithm):
    """Training leaves those of the clients' weights on the way, which are others."""
    data = small_pictures(rng, 30)
    model = train(data, algorithm, learner="mobilenet", lr=0.01, rounds=1, learners=2)
    again = recompute_statistics(model.prediction, data.train)
    for name, value in model.prediction.learners.items():
        torch.testing.assert_close(again.learners[name], value, msg=name)


@pytest.mark.usefixtures("thin_mobilenet")
def test_rounds_are_watched_with_the_statistics_that_their_model_would_have(rng):
    data = small_pictures(rng, 30)
    options = {"learner": "mobilenet", "lr": 0.05, "server": "momentum", "patience": 3}
    model = train(data, "fedavg", rounds=3, watch_accuracy=True, **options)
    found = model.evaluate("validation")
    last = max(model.history, key=lambda entry: entry["validation_log_likelihood"])
    assert last["validation_accuracy"] == pytest.approx(found.weighted_accuracy)
    assert last["validation_log_likelihood"] == pytest.approx(-found.mean_log_loss)


@pytest.mark.usefixtures("thin_mobilenet")
def test_whoever_interrupts_waits_for_no_statistics(rng, monkeypatch):
    def interrupt(entry):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        "fedgmm.training.in_process.recompute_statistics", lambda *_: pytest.fail("waits")
    )
    data = small_pictures(rng, 20)
    with pytest.warns(RuntimeWarning, match="interrupted"):
        train(data, "fedavg", learner="mobilenet", rounds=3, on_round=[interrupt])


@pytest.mark.usefixtures("thin_mobilenet")
def test_ctrl_c_while_statistics_are_taken_loses_nothing(rng, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedgmm.training.in_process.recompute_statistics", interrupt)
    data = small_pictures(rng, 20)
    with pytest.warns(RuntimeWarning, match="interrupted"):
        model = train(data, "fedavg", learner="mobilenet", rounds=1)
    assert model.stopped == "interrupted"
    assert len(model.history) == 1


@pytest.mark.usefixtures("thin_mobilenet")
def test_the_random_numbers_of_the_program_are_left_alone(rng):
    """MobileNet-V2 has dropout, which draws some."""
    data = small_pictures(rng, 20)
    before = torch.get_rng_state()
    train(data, "fedavg", learner="mobilenet", rounds=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_small_clients_are_not_copied_all_at_once(rows, monkeypatch):
    """Each has copies of its learners, however few its rows are."""
    before = Prediction(NET, drawn(1), assignment=torch.zeros(3, dtype=torch.int64))
    expected, seen = recompute_statistics(before, rows), list[int]()
    forward = Stacked.forward

    def watched(net, params, inputs, *args, **named):
        seen.append(len(inputs))
        return forward(net, params, inputs, *args, **named)

    monkeypatch.setattr(Stacked, "forward", watched)
    monkeypatch.setattr(statistics, "_BYTES_AT_ONCE", 1)
    found = recompute_statistics(before, rows)
    assert seen == [1, 1, 1]
    for name, value in expected.learners.items():
        torch.testing.assert_close(found.learners[name], value, msg=name)


@pytest.mark.usefixtures("thin_mobilenet")
def test_ctrl_c_while_labels_are_counted_keeps_the_model(rng, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(FederatedModel, "learn_labels", interrupt)
    data = small_pictures(rng, 20)
    options = {"learner": "mobilenet", "rounds": 1, "personal_labels": True}
    with pytest.warns(RuntimeWarning, match="interrupted"):
        model = train(data, "fedavg", **options)
    assert model.stopped == "interrupted"
