"""Modules of one's own in training: frozen layers, buffers, batch normalisation, token ids."""

from __future__ import annotations

import warnings
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from fedgmm import load
from fedgmm.core.params import is_statistic
from fedgmm.data.dataset import FederatedDataset
from fedgmm.model.saving import LearnerError
from fedgmm.training.build import build, learner_network
from fedgmm.training.checkpoint import Checkpoint, OtherTrainingError
from fedgmm.training.in_process import train
from fedgmm.training.options import ALGORITHMS, TrainingOptions
from supervised import FAST, federation, predictions

SETTINGS = {
    "random": {"start": "random"},
    "split, warm-up, momentum": {"start": "split", "warmup": 1, "server": "momentum"},
    "adam": {"server": "adam", "weight_decay": 0.1, "momentum": 0.5, "clip_norm": 1.0},
}

WHOLE = ("fedgmm", "pfedme")
"""Methods with all settings by default: one with all kinds of state, and one with personal learners."""


class Frozen(nn.Module):
    """A random layer that is not trained, with normalisation, and buffers."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).requires_grad_(False)
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("order", torch.randperm(3), persistent=False)
        self.out = nn.Linear(5, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.frozen((x * self.scale)[:, self.order])))


@pytest.fixture(scope="module")
def data():
    return federation(np.random.default_rng(0), sizes=(30, 20, 12))


def made_by_factory(seed):
    """The module of the first learner's draw."""
    generator = torch.Generator().manual_seed(seed)
    draw = int(torch.randint(2**62, (), generator=generator))
    with torch.random.fork_rng():
        torch.manual_seed(draw)
        module = Frozen()
    return {**module.state_dict(), "order": module.order}


@pytest.mark.parametrize(
    ("algorithm", "setting"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case[0] not in WHOLE and case[1] != "adam"))
        for case in product(ALGORITHMS, SETTINGS)
    ],
)
def test_frozen_layers_stay_as_the_factory_made_them(data, algorithm, setting, tmp_path):
    options = {**FAST, **SETTINGS[setting], "rounds": 2, "learner": Frozen, "seed": 4}
    model = train(data, algorithm, **options)
    made = made_by_factory(4)
    assert set(model.prediction.learners) == {"out.weight", "out.bias"}
    again = load(model.save(tmp_path), learner=Frozen)
    for one in (model, again):
        constants = one.prediction.net.constants
        assert set(constants) == set(made) - {"out.weight", "out.bias"}
        for name, value in constants.items():
            assert torch.equal(value, made[name]), name
    assert np.array_equal(predictions(again, data), predictions(model, data))
    trained = model.prediction.learners["out.weight"][0]
    assert not torch.equal(trained, made["out.weight"])


class Blind(nn.Module):
    """A frozen layer of zeros, behind which no row can be seen."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(3, 4).requires_grad_(False)
        with torch.no_grad():
            for parameter in self.frozen.parameters():
                parameter.zero_()
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.frozen(x))


@pytest.mark.parametrize("start", ["random", "split"])
@pytest.mark.parametrize("algorithm", ["fedem", "fedavg"])
def test_neither_training_nor_the_start_changes_a_frozen_layer(data, algorithm, start):
    model = train(data, algorithm, **{**FAST, "start": start, "rounds": 3, "learner": Blind})
    proba = model.predict_proba(data.test.inputs.numpy(), data.names[0])
    np.testing.assert_allclose(proba, proba[:1].repeat(len(proba), 0), atol=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_frozen_layers_are_not_sent(algorithm):
    options = TrainingOptions(algorithm, learner=Frozen)
    method = build(options, learner_network(options, (3,), np.arange(2)))
    for declared in (method.declare_sums(3), method.declare_broadcast(3)):
        assert not any("frozen" in name or "scale" in name for name in declared)


def test_one_learner_trains_as_torch_does(data):
    """FedAvg of one client, full batches: a plain loop with torch's own optimiser."""
    one = data.select([data.names[0]])
    options = {"standardise": False, "dtype": "float64", "tol": None, "seed": 4, "lr": 0.3}
    model = train(one, "fedavg", rounds=3, weight_decay=0.1, learner=Frozen, **options)
    module = Frozen()
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            value.copy_(made_by_factory(4)[name])
    module.double().train().frozen[1].eval()
    optimiser = torch.optim.SGD(module.out.parameters(), lr=0.3, weight_decay=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(one.train.inputs), one.train.labels).backward()
        optimiser.step()
    found = model.prediction.learners["out.weight"][0]
    torch.testing.assert_close(found, module.out.weight.detach(), rtol=1e-12, atol=1e-12)


class OtherEachTime(Frozen):
    """Frozen numbers that torch's seed does not determine."""

    def __init__(self):
        super().__init__()
        self.scale.fill_(float(np.random.default_rng().random()))


def test_frozen_layers_without_a_seed_are_saved_and_hinder_resuming(data, tmp_path):
    options = {**FAST, "learner": OtherEachTime, "checkpoint": Checkpoint(tmp_path / "progress")}
    model = train(data, **options)
    again = load(model.save(tmp_path / "model"), learner=OtherEachTime)
    assert np.array_equal(predictions(again, data), predictions(model, data))
    with pytest.raises(OtherTrainingError, match="frozen"):
        train(data, **{**options, "rounds": 4})


def test_a_run_with_frozen_layers_resumes(data, tmp_path):
    options = {**FAST, "learner": Frozen, "rounds": 4, "tol": None}
    whole = train(data, **options)
    progress = Checkpoint(tmp_path / "progress")
    train(data, **options, checkpoint=progress, until=2)
    resumed = train(data, **options, checkpoint=progress)
    for name, value in whole.prediction.learners.items():
        assert torch.equal(resumed.prediction.learners[name], value)


def test_another_module_is_refused_by_its_constants(data, tmp_path):
    model = train(data, "fedavg", **FAST, learner=Frozen)
    model.save(tmp_path)

    class Wider(Frozen):
        def __init__(self):
            super().__init__()
            self.register_buffer("more", torch.zeros(2))

    with pytest.raises(LearnerError, match="'more'"):
        load(tmp_path, learner=Wider)


def two_layers(frozen):
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    module[0].requires_grad_(not frozen)
    return module


def test_files_of_versions_that_trained_frozen_layers_still_load(data, tmp_path):
    """They hold a copy of the frozen layers per learner."""
    model = train(data, **FAST, learner=lambda: two_layers(frozen=False))
    again = load(model.save(tmp_path), learner=lambda: two_layers(frozen=True))
    assert np.array_equal(predictions(again, data), predictions(model, data))


# ---------------------------------------------------------------------- batch normalisation and loops


def normalised():
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.filterwarnings("ignore:.*slower")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_batch_normalisation_in_every_method(data, algorithm, tmp_path):
    model = train(data, algorithm, **FAST, learner=normalised)
    assert any(map(is_statistic, model.prediction.learners))
    again = load(model.save(tmp_path), learner=normalised)
    assert np.array_equal(predictions(again, data), predictions(model, data))


@pytest.mark.filterwarnings("ignore:.*slower")
def test_running_statistics_are_those_of_the_final_weights(data):
    one = data.select([data.names[0]])
    model = train(one, "fedavg", **FAST, learner=normalised, standardise=False, dtype="float64")
    own = {name: value[0] for name, value in model.prediction.learners.items()}
    hidden = one.train.inputs @ own["0.weight"].mT + own["0.bias"]
    torch.testing.assert_close(own["1.running_mean"], hidden.mean(0))
    torch.testing.assert_close(own["1.running_var"], hidden.var(0))


class Dropping(nn.Module):
    """A recurrent network with dropout, which vmap cannot evaluate."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.layer(x[..., None])[0][:, -1]
        return self.out(nn.functional.dropout(hidden, 0.5, self.training))


@pytest.mark.filterwarnings("ignore:.*slower")
def test_a_loop_with_dropout_depends_on_the_seed_only(data):
    first, second, other = (
        train(data, "fedem", **FAST, learner=Dropping, seed=seed).prediction.learners["out.weight"]
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_a_loop_is_noted_once(data):
    with pytest.warns(UserWarning, match="slower") as notes:
        train(data, "fedem", **FAST, learner=Dropping)
    assert sum("slower" in str(note.message) for note in notes) == 1


@pytest.mark.parametrize(("last", "notes"), [(nn.Softmax(-1), 1), (nn.LogSoftmax(-1), 0)])
def test_probabilities_in_place_of_logits_are_noted(data, last, notes):
    """Logarithms of probabilities are logits."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(data, "fedavg", **FAST, learner=lambda: nn.Sequential(nn.Linear(3, 2), last))
    assert sum("softmax" in str(note.message) for note in found) == notes


# ---------------------------------------------------------------------- token ids


class Tokens(nn.Module):
    integer_inputs = True

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 2)

    def forward(self, x):
        return self.words(x).mean(1)


def sentences(rng, dtype=np.int64):
    """Words below 5 mean the first label, the others the second."""
    x = rng.integers(10, size=(200, 7)).astype(dtype)
    return x, (x >= 5).mean(1) > 0.5


@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [
        ("fedavg", np.int64),
        *(("fedgmm", kind) for kind in (np.int32, np.int64, np.uint8, np.float64)),
    ],
)
def test_token_ids_reach_an_embedding(rng, algorithm, dtype):
    x, y = sentences(rng, dtype)
    data = FederatedDataset.from_arrays(x, y, np.arange(200) % 2)
    model = train(data, algorithm, components=1, learners=1, learner=Tokens, rounds=30, lr=5.0)
    assert model.scaling is None
    assert model.evaluate().mean_accuracy > 0.8
    assert (model.predict(x) == y).mean() > 0.8
    with pytest.raises(ValueError, match="integers"):
        model.predict(x + 0.5)
    with pytest.raises(ValueError, match="from 10 to"):
        model.predict(x + 10)


def test_an_embedding_without_the_declaration_is_explained(rng):
    class Undeclared(Tokens):
        integer_inputs = False

    x, y = sentences(rng)
    with pytest.raises(ValueError, match="integer_inputs"):
        train(FederatedDataset.from_arrays(x, y), learner=Undeclared, **FAST)


def test_a_module_is_checked_before_training(rng):
    with pytest.raises(ValueError, match=r"\(n, 2\)"):
        train(federation(rng), learner=lambda: nn.Linear(3, 5), **FAST)


def test_bytes_with_two_axes_per_row_are_not_images(rng):
    """They would be scaled in training and not in the E-step."""
    x = rng.integers(3, size=(20, 2, 2)).astype(np.uint8)
    data = FederatedDataset.from_arrays(x, np.arange(20) % 2)
    assert data.train.inputs.dtype == torch.float64
