"""Models on disk: the same bits come back, no code runs, and damage is reported."""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import nn

import fedgmm
from fedgmm.data.dataset import FederatedDataset
from fedgmm.model.model import FederatedModel
from fedgmm.model.saving import FORMAT, LearnerError, ModelFileError, _checksum, load, save
from fedgmm.training.in_process import train
from fedgmm.training.options import ALGORITHMS
from supervised import federation, images, tiny


def numbers_of(folder):
    (path,) = folder.glob("*.safetensors")
    return path


def assert_same_predictions(loaded, model, x, clients):
    for client in clients:
        assert np.array_equal(loaded.predict_proba(x, client), model.predict_proba(x, client))
        if model.prediction.gaussians is not None:
            assert np.array_equal(loaded.score_samples(x, client), model.score_samples(x, client))


# ---------------------------------------------------------------------- round trips


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_loaded_model_predicts_the_same_bits(rng, tmp_path, algorithm, dtype):
    data = federation(rng, classes=3)
    model = train(data, algorithm, rounds=2, dtype=dtype, components=2)
    assert model.save(tmp_path / "deep" / "down") == tmp_path / "deep" / "down"
    loaded = fedgmm.load(tmp_path / "deep" / "down")
    x = data.test.inputs.numpy()
    clients = [*data.names] + ([] if algorithm == "local" else [None])
    assert_same_predictions(loaded, model, x, clients)
    assert loaded.names == model.names
    assert loaded.classes.tolist() == model.classes.tolist()
    assert loaded.classes.dtype == model.classes.dtype
    assert loaded.history == model.history
    assert loaded.options == model.options
    assert loaded.algorithm == algorithm
    assert np.array_equal(loaded.evaluate("test", data).log_loss, model.evaluate("test").log_loss)


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical", "identity"])
def test_every_kind_of_covariance_comes_back(rng, tmp_path, kind):
    data = federation(rng)
    model = train(data, rounds=2, components=2, covariance_type=kind)
    x = data.test.inputs.numpy()
    assert_same_predictions(load(model.save(tmp_path)), model, x, ["oslo", None])


@pytest.mark.parametrize("learner", ["mlp", "cnn"])
def test_other_networks_come_back(rng, tmp_path, learner):
    data = images(rng)
    model = train(data, rounds=1, components=2, learners=2, learner=learner, personal_labels=False)
    x = data.test.inputs.numpy()
    assert_same_predictions(load(model.save(tmp_path)), model, x, [data.names[0], None])


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        return self.out(torch.tanh(x))


def test_a_custom_learner_must_be_passed(rng, tmp_path):
    data = federation(rng)
    model = train(data, rounds=1, components=2, learners=2, learner=Custom)
    model.save(tmp_path)
    with pytest.raises(ModelFileError, match="custom learner") as caught:
        load(tmp_path)
    assert "valid" not in str(caught.value)  # nothing is wrong with the file
    x = data.test.inputs.numpy()
    assert_same_predictions(load(tmp_path, learner=Custom), model, x, ["oslo", None])
    with pytest.raises(LearnerError, match=r"'bias' is unknown in the model and has shape \(2,\)"):
        load(tmp_path, learner=lambda: nn.Linear(3, 2))
    with pytest.raises(LearnerError, match="function"):
        load(tmp_path, learner=Custom())
    with pytest.raises(LearnerError, match="function"):
        load(tmp_path, learner="mlp")


def test_a_learner_is_refused_where_the_model_has_a_named_one(rng, tmp_path):
    train(federation(rng), rounds=1).save(tmp_path)
    with pytest.raises(LearnerError, match="'linear'; leave"):
        load(tmp_path, learner=Custom)


def test_what_was_learned_later_is_saved_too(rng, tmp_path):
    """Clients that joined, and the scores of held-out rows."""
    data = tiny(5, 60)
    model = train(data, rounds=3)
    x = data.test.inputs.numpy()
    model.adapt("late", x, data.test.labels.numpy())
    expected = model.novelty(x, false_alarm_rate=0.1)
    strange = model.client_novelty(x)
    loaded = load(model.save(tmp_path))
    assert_same_predictions(loaded, model, x, ["late", 0, None])
    actual = loaded.novelty(x, false_alarm_rate=0.1)  # without any data set at hand
    assert np.array_equal(actual.p_values, expected.p_values)
    assert loaded.client_novelty(x) == strange
    loaded.adapt("later still", x)
    with pytest.raises(ValueError, match="dataset"):
        loaded.evaluate()


def test_features_of_their_own_come_back(rng, tmp_path):
    x, seen = rng.normal(size=(90, 3)), rng.normal(size=(90, 2))
    data = FederatedDataset.from_arrays(x, (x[:, 0] > 0).astype(int), features=seen)
    model = train(data, rounds=2, components=2, learners=2)
    loaded = load(model.save(tmp_path))
    assert np.array_equal(
        loaded.predict_proba(x, features=seen), model.predict_proba(x, features=seen)
    )
    assert np.array_equal(
        loaded.score_samples(x, features=seen), model.score_samples(x, features=seen)
    )
    with pytest.raises(ValueError, match="features"):
        loaded.predict(x)


@pytest.mark.parametrize(
    "names", [["a", "b"], [3, 7], [0.5, 1.5], [True, False], np.array([4, 5]), ["ü", "名"]]
)
def test_names_of_clients_keep_their_kind(rng, tmp_path, names):
    x = rng.normal(size=(20, 2))
    y = (x[:, 0] > 0).astype(int)
    data = FederatedDataset.from_clients([(name, (x, y)) for name in names])
    loaded = load(train(data, "fedem", rounds=1, learners=2).save(tmp_path))
    assert loaded.names == list(names)
    loaded.predict(x, names[1])


@pytest.mark.parametrize(
    "classes",
    [["no", "yes"], [False, True], [3, 7], [0.5, 1.5], np.array(["a", "b"], dtype=object)],
)
def test_classes_keep_their_kind(rng, tmp_path, classes):
    x = rng.normal(size=(20, 2))
    data = FederatedDataset.from_arrays(x, np.asarray(classes)[(x[:, 0] > 0).astype(int)])
    model = train(data, "fedavg", rounds=1)
    loaded = load(model.save(tmp_path))
    assert loaded.classes.dtype == model.classes.dtype
    assert loaded.predict(x).tolist() == model.predict(x).tolist()


def test_options_of_numpy_types_can_be_saved(rng, tmp_path):
    model = train(federation(rng), rounds=np.int64(2), lr=np.float32(0.1), seed=np.int32(3))
    assert load(model.save(tmp_path)).options["rounds"] == 2


def test_a_model_that_never_trained_can_be_saved(rng, tmp_path):
    """Its weights are one row seen as many, which shares memory."""
    data = federation(rng).select(["oslo"])
    model = train(data, rounds=1, answers=lambda *_: False, components=2)
    x = data.test.inputs.numpy()
    assert_same_predictions(load(model.save(tmp_path)), model, x, ["oslo", None])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": [("oslo", 1), "b"]}, "Client name"),
        ({"classes": np.array(["2020", "2021"], dtype="M8[Y]")}, "Labels of type"),
        ({"classes": np.array([(1, 2), "a"], dtype=object)}, "Label"),
    ],
)
def test_unsuitable_values_are_refused_before_anything_is_written(rng, tmp_path, change, message):
    data = federation(rng, sizes=(20, 20))
    model = replace(train(data, "fedavg", rounds=1), **change)
    with pytest.raises(ValueError, match=message):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


# ---------------------------------------------------------------------- nothing can run


def test_no_pickle_on_the_way_out_or_in(rng, tmp_path, monkeypatch):
    model = train(federation(rng), rounds=1, components=2)

    def forbidden(*_, **__):
        raise AssertionError("pickle was used")

    for module, names in (
        (pickle, ("load", "loads", "dump", "dumps", "Unpickler", "Pickler")),
        (torch, ("load", "save")),
        (builtins, ("eval", "exec")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, forbidden)
    model.save(tmp_path)
    load(tmp_path)
    monkeypatch.undo()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]
    for path in tmp_path.iterdir():
        data = path.read_bytes()
        assert not data.startswith((b"\x80", b"PK"))
        assert b"__reduce__" not in data
        assert b"fedgmm." not in data  # no names of classes either


def test_the_name_of_the_numbers_file_cannot_leave_the_folder(rng, tmp_path):
    model = train(federation(rng), rounds=1, components=2)
    home = model.save(tmp_path / "model")
    forge(home, lambda facts: facts.update(numbers="../../../../etc/passwd"))
    with pytest.raises(ModelFileError, match="checksum"):
        load(home)


# ---------------------------------------------------------------------- crashes


@pytest.mark.parametrize("at", [1, 2])
def test_a_crash_while_saving_leaves_the_old_model(rng, tmp_path, monkeypatch, at):
    """At either of the two renames; and the next save cleans up."""
    data = federation(rng)
    old, new = (train(data, rounds=1, components=2, seed=seed) for seed in (0, 1))
    old.save(tmp_path)
    calls = []
    original = type(tmp_path).replace

    def fails(self, target):
        calls.append(target)
        if len(calls) == at:
            raise OSError("the disk is full")
        return original(self, target)

    monkeypatch.setattr(type(tmp_path), "replace", fails)
    with pytest.raises(OSError, match="disk is full"):
        new.save(tmp_path)
    monkeypatch.undo()
    x = data.test.inputs.numpy()
    assert_same_predictions(load(tmp_path), old, x, ["oslo"])
    new.save(tmp_path)
    assert_same_predictions(load(tmp_path), new, x, ["oslo"])
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_saving_again_replaces_the_model(rng, tmp_path):
    data = federation(rng)
    for seed in (0, 1):
        model = train(data, rounds=1, components=2, seed=seed)
        model.save(tmp_path)
    assert_same_predictions(load(tmp_path), model, data.test.inputs.numpy(), ["oslo"])
    assert len(list(tmp_path.iterdir())) == 2


# ---------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = train(federation(np.random.default_rng(0)), rounds=1, components=2, learners=2)
    model.calibrate()
    home = tmp_path_factory.mktemp("saved") / "model"
    return save(model, home)


@pytest.fixture
def home(saved, tmp_path):
    """A copy that may be damaged."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def forge(folder, change_facts=lambda facts: None, change_tensors=lambda tensors: None):
    """Change a saved model and make its checksums right again."""
    path = numbers_of(folder)
    tensors = tensors_of(path.read_bytes())
    change_tensors(tensors)
    data = bytes_of(tensors)
    facts = json.loads((folder / "model.json").read_text())
    facts["numbers"] = hashlib.sha256(data).hexdigest()
    path.unlink()
    (folder / f"weights-{facts['numbers'][:16]}.safetensors").write_bytes(data)
    change_facts(facts)
    facts["checksum"] = _checksum(facts)
    (folder / "model.json").write_text(json.dumps(facts))


def test_a_forged_but_consistent_model_loads(home):
    """The tool of the tests below is itself sound."""
    forge(home)
    assert isinstance(load(home), FederatedModel)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(home, share):
    for path in (numbers_of(home), home / "model.json"):
        data = path.read_bytes()
        path.write_bytes(data[: int(share * len(data))])
        with pytest.raises(ModelFileError, match="damaged"):
            load(home)
        path.write_bytes(data)


def test_a_flipped_bit_in_the_numbers_is_refused(home):
    path = numbers_of(home)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ModelFileError, match="checksum"):
        load(home)


def test_a_changed_label_in_the_json_is_refused(home):
    path = home / "model.json"
    text = path.read_text()
    path.write_text(text.replace('"oslo"', '"oslp"'))
    with pytest.raises(ModelFileError, match="checksum"):
        load(home)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("labels/clients"),
        lambda tensors: tensors.pop("labels/federation"),
        lambda tensors: tensors["labels/clients"].mul_(2.0),
        lambda tensors: tensors["labels/federation"].fill_(0.0),
        lambda tensors: tensors.update({"labels/clients": tensors["labels/clients"][:-1]}),
        lambda tensors: tensors.update({"labels/clients": tensors["labels/clients"].float()}),
    ],
)
def test_label_frequencies_that_make_no_sense(tmp_path, rng, change):
    model = train(federation(rng), rounds=2, personal_labels=True)
    home = model.save(tmp_path / "model")
    assert load(home).prediction.labels is not None
    forge(home, change_tensors=change)
    with pytest.raises(ModelFileError, match="labels"):
        load(home)


def test_a_newer_format_is_refused_with_advice(home):
    forge(home, lambda facts: facts.update(format=FORMAT + 1))
    with pytest.raises(ModelFileError, match="upgrade"):
        load(home)


def test_folders_without_a_model_are_refused(tmp_path, home):
    for folder in (tmp_path / "nowhere", tmp_path, home / "model.json"):
        with pytest.raises(ModelFileError, match="Cannot read"):
            load(folder)
    (tmp_path / "model.json").write_text("[1, 2]")
    with pytest.raises(ModelFileError, match="saved model"):
        load(tmp_path)
    numbers_of(home).unlink()
    with pytest.raises(ModelFileError, match="weights-"):
        load(home)


@pytest.mark.parametrize(
    "name",
    ["names", "classes", "class_dtype", "input_shape", "options", "history", "covariance_type"],
)
def test_a_missing_fact_is_refused(home, name):
    forge(home, lambda facts: facts.pop(name))
    with pytest.raises(ModelFileError, match=name):
        load(home)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.update(names=f["names"][:-1]),
        lambda f: f.update(names=[f["names"][0]] * 4),
        lambda f: f.update(classes=[0, 1, 2]),
        lambda f: f.update(classes=[0, 0]),
        lambda f: f.update(classes=["a", "b"]),
        lambda f: f.update(class_dtype="O,O"),
        lambda f: f.update(class_dtype="<U999999999"),
        lambda f: f.update(input_shape=[4]),
        lambda f: f.update(input_shape=[]),
        lambda f: f.update(input_shape=[-3]),
        lambda f: f.update(covariance_type="diag"),
        lambda f: f.update(covariance_type="round"),
        lambda f: f.update(options={**f["options"], "learner": "mlp"}),
        lambda f: f.update(options={**f["options"], "learner": "forest"}),
        lambda f: f.update(options=[1]),
        lambda f: f.update(history=3),
        lambda f: f.update(input_shape=[1, 200_000, 200_000]) or f["options"].update(learner="cnn"),
    ],
)
def test_facts_that_do_not_fit_the_numbers_are_refused(home, change):
    forge(home, change)
    with pytest.raises(ModelFileError, match="valid model"):
        load(home)


def spoil(name, value):
    def change(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[0] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("weights"),
        lambda t: t.pop("client_weights"),
        lambda t: t.pop("gaussians/means"),
        lambda t: t.pop("learners/0.bias"),
        lambda t: t.pop("scaling/scale"),
        lambda t: t.update({"learners/2.weight": torch.zeros(2, 2)}),
        lambda t: t.update({"assignment": torch.zeros(4, dtype=torch.int64)}),
        lambda t: t.update({"calibration/nonsense": torch.zeros(4)}),
        lambda t: t.update({"calibration/x": torch.zeros(4, 2)}),
        lambda t: t.update({"calibration/location": torch.zeros(9)}),
        lambda t: t.update(
            {f"calibration/{one}": torch.zeros(4) for one in ("location", "scale", "standard")}
            | {"calibration/standard_client": torch.zeros(3)}
        ),
        lambda t: t.update({"client_weights": t["client_weights"][:, :-1].contiguous()}),
        lambda t: t.update({"gaussians/covariances": torch.zeros(2, 3)}),
        lambda t: t.update({"learners/0.weight": torch.zeros(2, 2, 4)}),
        spoil("weights", -0.5),
        spoil("client_weights", float("nan")),
        spoil("learners/0.weight", float("inf")),
        spoil("gaussians/means", float("nan")),
        spoil("gaussians/precisions_cholesky", -1.0),
        spoil("scaling/scale", 0.0),
    ],
)
def test_numbers_that_do_not_fit_are_refused(home, change):
    forge(home, change_tensors=change)
    with pytest.raises(ModelFileError, match="valid model"):
        load(home)


def test_an_assignment_to_an_unknown_learner_is_refused(rng, tmp_path):
    home = train(federation(rng), "clustered", rounds=1).save(tmp_path)
    for change in (spoil("assignment", 5), spoil("assignment", -1)):
        forge(home, change_tensors=change)
        with pytest.raises(ModelFileError, match="assignment"):
            load(home)
        forge(home, change_tensors=spoil("assignment", 0))
    forge(home, lambda facts: facts.update(default_learner=9))
    with pytest.raises(ModelFileError, match="default_learner"):
        load(home)


# ---------------------------------------------------------------------- fuzzing

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


def loads_or_raises_model_file_error(folder):
    with contextlib.suppress(ModelFileError):
        assert isinstance(load(folder), FederatedModel)


@given(data=st.data())
def test_damaged_bytes_never_cause_another_error(saved, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz")
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    path = data.draw(st.sampled_from([folder / "model.json", numbers_of(folder)]))
    content = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "random"]))
    place = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        content[place] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del content[place : place + data.draw(st.integers(1, 200))]
    elif kind == "insert":
        content[place:place] = data.draw(st.binary(min_size=1, max_size=20))
    else:
        content = data.draw(st.binary(max_size=200))
    path.write_bytes(bytes(content))
    loads_or_raises_model_file_error(folder)


@given(field=st.integers(0, 20), value=JSON_VALUES)
@example(field=9, value={"learner": []})
@example(field=0, value=10**400)
@example(field=5, value=[10**12])
def test_forged_facts_never_cause_another_error(saved, tmp_path_factory, field, value):
    """Any fact replaced by any JSON, with checksums that are right."""
    folder = tmp_path_factory.mktemp("fuzz")
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())

    def change(facts):
        names = sorted(set(facts) - {"checksum"})
        facts[names[field % len(names)]] = value

    forge(folder, change)
    loads_or_raises_model_file_error(folder)


@given(
    name=st.integers(0, 20),
    shape=st.lists(st.integers(0, 4), max_size=4),
    kind=st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.float16]),
    number=st.sampled_from([0.0, 1.0, -1.0, float("nan"), float("inf")]),
)
def test_forged_numbers_never_cause_another_error(
    saved, tmp_path_factory, name, shape, kind, number
):
    folder = tmp_path_factory.mktemp("fuzz")
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())

    def change(tensors):
        names = sorted(tensors)
        safe = number if kind.is_floating_point or (number == number and abs(number) < 2) else 0
        tensors[names[name % len(names)]] = torch.full(shape, safe).to(kind)

    forge(folder, change_tensors=change)
    loads_or_raises_model_file_error(folder)


def test_bytes_that_are_not_numbers_are_refused_even_with_the_right_checksum(home):
    numbers_of(home).unlink()
    data = b"\xff" * 100
    facts = json.loads((home / "model.json").read_text())
    facts["numbers"] = hashlib.sha256(data).hexdigest()
    facts["checksum"] = _checksum(facts)
    (home / "model.json").write_text(json.dumps(facts))
    (home / f"weights-{facts['numbers'][:16]}.safetensors").write_bytes(data)
    with pytest.raises(ModelFileError, match="damaged"):
        load(home)


def test_deeply_nested_json_is_refused(home):
    (home / "model.json").write_text("[" * 200_000)
    with pytest.raises(ModelFileError, match="damaged"):
        load(home)
