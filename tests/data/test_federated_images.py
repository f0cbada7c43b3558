"""Images in the hands of clients: every row once, shifted as drawn, bytes throughout."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgmm.data.dataset import SPLITS, FederatedDataset
from fedgmm.data.images.federated import federated_images
from fedgmm.data.images.files import ImageData, ImageFileError, load_images
from fedgmm.data.partition import transform_images
from fedgmm.training.in_process import train


def some_images(name="cifar10", rows=240, classes=4, channels=3, seed=0):
    """Random images, so that no two are alike."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(classes, size=rows)
    return ImageData(
        name,
        generator.integers(256, size=(rows, channels, 6, 6)).astype(np.uint8),
        labels,
        tuple(f"class {k}" for k in range(classes)),
        coarse=labels // 2 if name == "cifar100" else None,
        writers=generator.integers(12, size=rows) if name == "femnist" else None,
        writer_names=tuple(f"writer {11 - w}" for w in range(12)) if name == "femnist" else None,
    )


def assert_same_rows(ours, theirs):
    np.testing.assert_array_equal(ours.inputs.numpy(), theirs.inputs.numpy())
    np.testing.assert_array_equal(ours.labels.numpy(), theirs.labels.numpy())
    np.testing.assert_array_equal(ours.codes.numpy(), theirs.codes.numpy())


@given(
    name=st.sampled_from(["mnist", "cifar10", "cifar100", "femnist"]),
    rows=st.integers(60, 200),
    clients=st.integers(1, 10),
    alpha=st.sampled_from([1e-3, 0.4, 100.0]),
    fraction=st.sampled_from([1.0, 0.9]),
    shift=st.booleans(),
    seed=st.integers(0, 5),
)
def test_no_row_is_in_two_places(name, rows, clients, alpha, fraction, shift, seed):
    data = some_images(name, rows)
    options = {"clients": clients, "alpha": alpha, "fraction": fraction, "seed": seed}
    made = federated_images(data, shift=shift, **options)
    used = np.concatenate([made.rows[split] for split in SPLITS])
    assert len(np.unique(used)) == len(used)
    if name != "femnist":
        assert len(used) == round(fraction * rows)
    assert len(made.dataset.names) == clients
    for split in SPLITS:
        part, changed, source = made.dataset.split(split), made.changed[split], made.rows[split]
        assert len(part) == len(changed) == len(source)
        assert part.inputs.dtype == torch.uint8
        images, labels = part.inputs.numpy(), part.labels.numpy()
        # a row is the image it came from, or the transform of that, with the label that goes with it
        np.testing.assert_array_equal(images[~changed], data.images[source[~changed]])
        np.testing.assert_array_equal(labels[~changed], data.labels[source[~changed]])
        turned = transform_images(data.images[source[changed]], 255)
        np.testing.assert_array_equal(images[changed], turned)
        np.testing.assert_array_equal(
            labels[changed], made.new_labels[data.labels[source[changed]]]
        )
    total = sum(changed.sum() for changed in made.changed.values())
    assert total == (len(used) // 2 if shift else 0)
    again = federated_images(data, shift=shift, **options)
    for split in SPLITS:
        assert_same_rows(made.dataset.split(split), again.dataset.split(split))


def test_the_data_that_came_in_stays_as_it_was():
    data = some_images()
    before = data.images.copy()
    federated_images(data, clients=5)
    np.testing.assert_array_equal(data.images, before)


def test_the_gaussians_see_the_memory_of_the_inputs():
    made = federated_images(some_images(), clients=5)
    (seen,) = made.dataset.train.features.chunks
    assert seen.dtype == torch.uint8
    assert seen.data_ptr() == made.dataset.train.inputs.data_ptr()


def from_arrays(data, made, seed):
    """The same federation through the general door, which also keeps pixels as floats."""
    inputs, labels, names = np.empty_like(data.images), np.empty(len(data), int), [""] * len(data)
    for split in SPLITS:
        rows, source = made.dataset.split(split), made.rows[split]
        inputs[source], labels[source] = rows.inputs.numpy(), rows.labels.numpy()
        for place, code in zip(source, rows.codes.tolist(), strict=True):
            names[place] = made.dataset.names[code]
    return FederatedDataset.from_arrays(inputs, labels, names, seed=seed)


def test_splits_are_those_of_the_general_door():
    data = some_images()
    made = federated_images(data, clients=7, seed=3)
    general = from_arrays(data, made, seed=3)
    assert made.dataset.names == general.names
    for split in SPLITS:
        assert_same_rows(made.dataset.split(split), general.split(split))


def test_every_client_is_split_60_20_20():
    made = federated_images(some_images("cifar100", rows=1000), clients=10, seed=1)
    sizes = [made.dataset.split(split).features.rows_per_client.tolist() for split in SPLITS]
    assert sizes == [[60] * 10, [20] * 10, [20] * 10]


def flat(dataset):
    """Linear learners take rows, not pictures; what the Gaussians see stays as it is."""
    parts = {split: dataset.split(split) for split in SPLITS}
    return replace(
        dataset,
        **{name: replace(rows, inputs=rows.inputs.flatten(1)) for name, rows in parts.items()},
    )


def test_a_model_trains_on_the_bytes_as_on_floats():
    data = some_images(rows=300, classes=2, channels=1)
    made = federated_images(data, clients=4, alpha=5.0, seed=2)
    general = from_arrays(data, made, seed=2)
    first, second = (
        train(
            flat(dataset), "fedgmm", components=2, learners=2, rounds=3, standardise=False, seed=0
        )
        for dataset in (made.dataset, general)
    )
    rows = flat(made.dataset).test.inputs.numpy()
    np.testing.assert_allclose(
        first.predict_proba(rows), second.predict_proba(rows), rtol=1e-6, atol=1e-9
    )


def test_the_gaussians_fit_bytes_as_they_fit_floats():
    from fedgmm.methods.gmm import overall_gaussian

    data = some_images(rows=200)
    made = federated_images(data, clients=4, seed=2)
    general = from_arrays(data, made, seed=2)
    ours, theirs = (overall_gaussian(own.train.features) for own in (made.dataset, general))
    torch.testing.assert_close(ours.means, theirs.means)
    torch.testing.assert_close(ours.covariances, theirs.covariances)


# ---------------------------------------------------------------------- the partitions of the paper


@pytest.mark.parametrize(
    ("name", "clients", "how"),
    [
        ("mnist", 80, "by label, Dirichlet (alpha 0.4)"),
        ("cifar10", 80, "by label, Dirichlet (alpha 0.4)"),
        ("cifar100", 100, "by Pachinko allocation (alpha 0.4 and 10)"),
        ("femnist", 12, "by writer"),
    ],
)
def test_each_data_set_is_dealt_in_its_own_way(name, clients, how):
    made = federated_images(some_images(name, rows=1200))
    assert len(made.dataset.names) == clients
    assert how in made.description
    assert f"{clients} clients with 1,200 rows" in made.description
    assert "600 images" in made.description
    assert len(repr(made).splitlines()) <= 5
    assert (
        "images unchanged"
        in federated_images(some_images(name), clients=5, shift=False).description
    )


def test_writers_stay_whole():
    data = some_images("femnist", rows=600)
    made = federated_images(data, shift=False)
    for split in SPLITS:
        rows, source = made.dataset.split(split), made.rows[split]
        names = [made.dataset.names[code] for code in rows.codes.tolist()]
        assert names == [data.writer_names[w] for w in data.writers[source]]


def test_a_fraction_of_writers_is_whole_writers():
    data = some_images("femnist", rows=600)
    made = federated_images(data, fraction=0.5, seed=4)
    used = np.concatenate([made.rows[split] for split in SPLITS])
    writers = np.unique(data.writers[used])
    assert len(used) == np.isin(data.writers, writers).sum() <= 300
    assert 3 <= len(writers) == len(made.dataset.names) <= 8
    assert len(federated_images(data, clients=5).dataset.names) == 5
    other = federated_images(data, fraction=0.5, seed=5)
    assert set(other.dataset.names) != set(made.dataset.names)


def test_the_partition_sees_the_classes_before_they_are_renamed():
    """With one class per client, the changed rows of a client have exactly one new label."""
    data = some_images(rows=400, classes=4)
    made = federated_images(data, clients=4, alpha=1e-6, seed=3)
    rows, changed = made.dataset.train, made.changed["train"]
    for client in range(4):
        own = rows.codes.numpy() == client
        old = data.labels[made.rows["train"]][own]
        new = rows.labels.numpy()[own & changed]
        if len(np.unique(old)) == 1 and len(new):
            assert set(new) == {made.new_labels[old[0]]}


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("cifar10", {"fraction": 0.0}, "fraction"),
        ("cifar10", {"fraction": 1.1}, "fraction"),
        ("cifar10", {"clients": 241}, "240 rows"),
        ("femnist", {"clients": 13}, "12 writers"),
        ("cifar100", {"clients": 5, "alpha": 0.0}, "alpha_coarse"),
    ],
)
def test_options_that_are_refused(name, options, problem):
    with pytest.raises(ValueError, match=problem):
        federated_images(some_images(name), **options)


def test_femnist_of_the_paper():
    if not os.environ.get("FEDGMM_DATA"):
        pytest.skip("FEDGMM_DATA does not name a folder with the real data sets")
    try:
        data = load_images("femnist")
    except ImageFileError as error:
        pytest.skip(str(error))
    made = federated_images(data)
    if len(data.writer_names) == 539:
        assert "539 clients" in made.description
    sizes = [len(made.dataset.split(split)) / len(data) for split in SPLITS]
    np.testing.assert_allclose(sizes, (0.6, 0.2, 0.2), atol=0.005)
