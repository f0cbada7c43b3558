"""Results on a GPU equal those on the CPU; skipped without a GPU."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from fedgmm import FedGMMClassifier
from fedgmm.core.params import is_statistic
from fedgmm.data.dataset import FederatedDataset
from fedgmm.methods.base import SHARED_LEARNERS, Prediction
from fedgmm.methods.batch_statistics import recompute_statistics
from fedgmm.methods.local_training import LocalTraining
from fedgmm.model.saving import load
from fedgmm.nets import devices, sgd, stacked
from fedgmm.nets.backbones import MobileNetV2
from fedgmm.nets.learners import log_likelihoods
from fedgmm.nets.networks import as_numbers
from fedgmm.nets.sgd import SGD
from fedgmm.training.in_process import train
from fedgmm.training.options import ALGORITHMS
from supervised import federation, images

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

OPTIONS = {
    "rounds": 5,
    "dtype": "float64",
    "components": 2,
    "learners": 2,
    "batch_size": 8,
    "participation": 0.8,
    "tol": None,
    "patience": 9,
}


def data_set(**options):
    return federation(np.random.default_rng(0), sizes=(20, 40, 17, 26), classes=3, **options)


def pair(data, algorithm, **options):
    return (
        train(data, algorithm, device=name, **{**OPTIONS, **options}) for name in ("cpu", "cuda")
    )


@pytest.mark.parametrize(
    ("algorithm", "solver"),
    [*product(ALGORITHMS, ["sgd"]), *product(["fedgmm", "fedem", "fedavg"], ["newton"])],
)
def test_training_and_prediction(tmp_path, algorithm, solver):
    data = data_set()
    here, there = pair(data, algorithm, solver=solver)
    back = load(there.save(tmp_path))
    x = data.test.inputs.numpy()
    for name in data.names:
        expected = here.predict_proba(x, name)
        np.testing.assert_allclose(there.predict_proba(x, name), expected, atol=1e-8)
        np.testing.assert_allclose(back.predict_proba(x, name), expected, atol=1e-8)
    assert there.evaluate().mean_log_loss == pytest.approx(here.evaluate().mean_log_loss)


@pytest.mark.parametrize("algorithm", SHARED_LEARNERS)
def test_label_frequencies(tmp_path, algorithm):
    data = data_set()
    here, there = pair(data, algorithm, personal_labels=True, participation=1.0)
    x, y = data.test.inputs.numpy(), data.classes[data.test.labels.numpy()]
    if algorithm != "clustered":
        for model in (here, there):
            model.adapt("labelled", x, y)
            if model.prediction.labels.guess_rows or model.prediction.gaussians is not None:
                model.adapt("unlabelled", x)
    assert there.names == here.names
    back = load(there.save(tmp_path))
    for model, name in product((there, back), here.names):
        expected = here.predict_proba(x, name)
        np.testing.assert_allclose(model.predict_proba(x, name), expected, atol=1e-8)


@pytest.mark.parametrize("own", [False, True])
def test_densities_novelty_and_new_clients(own):
    rng = np.random.default_rng(1)
    x = 50.0 + 20.0 * rng.normal(size=(200, 3))
    y = (x[:, 0] > 50).astype(int)
    seen = rng.normal(size=(200, 2)) if own else None
    data = FederatedDataset.from_arrays(x, y, np.arange(200) % 4, features=seen)
    here, there = pair(data, "fedgmm")
    extra = {"features": seen}
    np.testing.assert_allclose(
        there.score_samples(x, **extra), here.score_samples(x, **extra), atol=1e-7
    )
    np.testing.assert_allclose(
        there.novelty(x, **extra).p_values, here.novelty(x, **extra).p_values, atol=1e-9
    )
    assert there.client_novelty(x, **extra) == here.client_novelty(x, **extra)
    for labels in (y, None):
        found, expected = (m.adapt("new", x, labels, **extra) for m in (there, here))
        np.testing.assert_allclose(found.weights, expected.weights, atol=1e-8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_images_train_on_a_gpu(algorithm):
    data = images(np.random.default_rng(0))
    options = {**OPTIONS, "rounds": 2, "dtype": "float32", "learner": "cnn"}
    model = train(data, algorithm, device="cuda", **options)
    assert np.isfinite(model.evaluate().log_loss).all()


def test_selected_clients_and_the_estimator():
    data = data_set()
    here, there = pair(data.select(["oslo", "kiev"]), "fedgmm")
    x = data.test.inputs.numpy()
    np.testing.assert_allclose(
        there.predict_proba(x, "oslo"), here.predict_proba(x, "oslo"), atol=1e-8
    )
    labels = data.test.labels.numpy()
    model = FedGMMClassifier(2, 2, rounds=3).fit(x, labels)  # device="auto" finds the GPU
    assert next(iter(model.model_.prediction.learners.values())).device.type == "cuda"
    assert model.predict(x).shape == labels.shape


# ---------------------------------------------------------------------- deep networks, recorded rounds

DEVICE = torch.device("cuda")


def relative_distance(found, expected):
    """Return the relative distance in the norm."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-12))


def stacked_mobilenet():
    return stacked.Stacked(partial(MobileNetV2, 3, dropout=0.0), (3, 32, 32), 3)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("schedule", ["constant", "cooldown"])
def test_recorded_rounds_equal_rounds_that_are_not_recorded(monkeypatch, schedule, clip_norm):
    """The first round is not recorded, the second is recorded, later ones are replayed at any rate."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, size=(40, 3, 32, 32)).astype(np.uint8)
    data = FederatedDataset.from_arrays(
        pixels, np.arange(40) % 3, np.arange(40) % 2, features=rng.normal(size=(40, 2))
    )
    rows = data.train.to(torch.device("cuda"))
    counts = torch.ones(2, 2, dtype=torch.float64, device="cuda")
    results = []
    for recorded in (True, False):
        if not recorded:
            monkeypatch.setattr(sgd, "recorder_of", lambda _: NoRecorder())
        options = SGD(lr=0.01, batch_size=8, momentum=0.9, clip_norm=clip_norm)
        training = LocalTraining(stacked_mobilenet(), options, schedule, rounds=4)
        params = training.initial(2, torch.device("cuda"))
        for number in (1, 2, 3, 4):
            sums = training.train_shared(params, rows, None, counts, number)
            params = {name: (value / 2).float() for name, value in sums.items()}
        results.append(params)
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_trained_model_frees_the_memory_of_the_gpu():
    rng = np.random.default_rng(0)
    data = FederatedDataset.from_arrays(
        rng.integers(0, 256, size=(40, 3, 32, 32)).astype(np.uint8),
        np.arange(40) % 3,
        np.arange(40) % 2,
        features=rng.normal(size=(40, 2)),
    )
    options = {"learner": "mobilenet", "rounds": 4, "lr": 1e-3, "device": "cuda", "tol": None}
    kept = [train(data, "fedavg", **options)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept.append(train(data, "fedavg", **options))
    own = torch.cuda.memory_allocated() - before
    assert own < (torch.cuda.max_memory_allocated() - before) / 4
    assert len(kept) == 2


def test_a_full_gpu_trains_in_smaller_groups(monkeypatch):
    """Rounds that are run, recorded and replayed while other programs use most of the memory."""
    monkeypatch.setattr(devices, "_smaller_shares", {})
    rng, gpu = np.random.default_rng(0), torch.device("cuda")
    pixels = rng.integers(0, 256, size=(320, 3, 32, 32)).astype(np.uint8)
    data = FederatedDataset.from_arrays(pixels, np.arange(320) % 3, np.arange(320) // 10)
    rows, counts = data.train.to(gpu), torch.ones(32, 1, dtype=torch.float64, device=gpu)
    options = SGD(lr=0.01, batch_size=8)
    total = torch.cuda.get_device_properties(gpu).total_memory
    results, room = [], total
    for _ in range(2):
        training = LocalTraining(stacked_mobilenet(), options, dtype=torch.float64)
        params = training.initial(1, gpu)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_per_process_memory_fraction(min(1.0, (before + room) / total))
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                sums = [training.train_shared(params, rows, None, counts, 1) for _ in range(4)]
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        room = (torch.cuda.max_memory_allocated() - before) // 3
        results.append(sums[0])
        ran_out = any("ran out" in str(one.message) for one in caught)
        assert ran_out == (len(results) == 2)
        for again in sums[1:]:
            assert_close(again, sums[0])
    assert devices._smaller_shares
    assert_close(results[1], results[0])


def assert_close(found, expected):
    """Compare by norm, because some values are zero except for rounding."""
    for name, value in expected.items():
        assert (found[name] - value).norm() < 1e-9 * max(1.0, value.norm()), name


class NoRecorder:
    """Run the work without a recording."""

    def run(self, _key, work, inputs, keep_alive):
        return work(inputs)


def test_a_step_of_a_deep_network_equals_the_cpu():
    """In float32 one step of an untrained network has an error of one percent, on a CPU too."""
    net, generator = stacked_mobilenet(), torch.Generator().manual_seed(0)
    own = [net.initial(generator) for _ in range(2)]
    start = {n: torch.stack([one[n] for one in own]).expand(2, 2, *own[0][n].shape) for n in own[0]}
    inputs = torch.randint(0, 256, (60, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.randint(3, (60,), generator=generator)
    weights = torch.rand(60, 2, generator=generator)
    offsets, clients, order = torch.tensor([0, 32, 60]), torch.arange(2), torch.arange(60)
    moves = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        params = {name: value.to(device, dtype).clone() for name, value in start.items()}
        plan = sgd.plan_batches(
            offsets.to(device), clients.to(device), [order.to(device)], 64, even=True
        )
        rows = sgd.TrainingRows(inputs.to(device), labels.to(device), weights.to(device, dtype))
        after = sgd.train_local(net, params, rows, plan, SGD(lr=0.05))
        moves.append({name: (after[name] - params[name]).cpu() for name in after})
    for statistics, bound in ((False, 0.05), (True, 1e-4)):
        expected, found = (
            torch.cat([v.flatten() for n, v in move.items() if is_statistic(n) == statistics])
            for move in moves
        )
        assert relative_distance(found, expected) < bound


@pytest.mark.parametrize("assigned", [False, True])
def test_batch_statistics_of_the_final_weights_equal_the_cpu(assigned):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, size=(60, 3, 32, 32)).astype(np.uint8)
    rows = FederatedDataset.from_arrays(pixels, np.arange(60) % 3, np.arange(60) % 2).train
    net, generator = stacked_mobilenet(), torch.Generator().manual_seed(0)
    drawn = [net.initial(generator) for _ in range(2)]
    learners = {name: torch.stack([one[name] for one in drawn]) for name in drawn[0]}
    weights = torch.tensor([[0.9, 0.1], [0.4, 0.6]], dtype=torch.float64)
    mixed = {"client_weights": weights, "weights": weights.mean(0)}
    found = [
        recompute_statistics(
            Prediction(
                net,
                {name: value.to(device) for name, value in learners.items()},
                **({"assignment": torch.tensor([1, 0])} if assigned else mixed),
            ),
            rows.to(torch.device(device)),
        ).learners
        for device in ("cpu", "cuda")
    ]
    of_cpu, of_gpu = ({name: value.cpu() for name, value in one.items()} for one in found)
    for name, value in of_cpu.items():
        if name.endswith("running_mean"):  # some are zero except for rounding
            deviation = of_cpu[name.replace("_mean", "_var")].sqrt()
            assert ((of_gpu[name] - value) / deviation).abs().max() < 1e-3, name
        else:
            assert relative_distance(of_gpu[name], value) < 1e-3, name


class Small(torch.nn.Module):
    """A classifier of bright and dark images."""

    def __init__(self):
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU6(),
            torch.nn.Dropout(0.2),
        )
        self.classifier = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


@pytest.mark.parametrize("compute", [None, torch.bfloat16], ids=str)
def test_recorded_rounds_draw_new_crops_and_dropout_and_learn(compute):
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 2
    pixels = rng.integers(0, 100, size=(60, 3, 8, 8)).astype(np.uint8)
    pixels[labels == 1] += 120
    data = FederatedDataset.from_arrays(
        pixels, labels, np.arange(60) // 30, features=rng.normal(size=(60, 2))
    )
    rows = data.train.to(DEVICE)
    net = stacked.Stacked(Small, (3, 8, 8), 2, compute)
    training = LocalTraining(net, SGD(lr=0.5, batch_size=16, augment=True))
    counts = torch.ones(2, 1, dtype=torch.float64, device=DEVICE)

    def after(params, number):
        sums = training.train_shared(params, rows, None, counts, number)
        return {name: (value / 2).float() for name, value in sums.items()}

    params = training.initial(1, DEVICE)
    for number in range(1, 25):
        params = after(params, number)
    inputs = as_numbers(rows.inputs, torch.float32)
    assert log_likelihoods(net, params, inputs, rows.labels).mean() > -0.3
    same, again, other = (after(params, number) for number in (30, 30, 31))
    weight = "classifier.weight"
    torch.testing.assert_close(same[weight], again[weight])
    assert not torch.allclose(same[weight], other[weight], atol=1e-4)
