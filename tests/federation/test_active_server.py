"""A server that chooses every model learns no row of an unmodified site, and no label of an unknown row."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fedgmm.core.gaussians import gaussians
from fedgmm.federation.messages import Message
from fedgmm.federation.settings import SiteSettings
from fedgmm.federation.site import Site, SiteError
from fedgmm.federation.start import separable
from fedgmm.methods.base import Prediction
from fedgmm.nets.networks import Dense, network
from fedgmm.privacy.disclosure import ImplausibleModelError, RowWeights, check_model
from fedgmm.privacy.private_em import PrivateRows
from fedgmm.privacy.private_networks import private_method
from fedgmm.privacy.settings import Privacy
from fedgmm.training.build import build
from fedgmm.training.options import TrainingOptions
from hostile_server import HostileServer, LabelThief, LinearLabels
from in_memory_sites import InMemorySites, federate

pytestmark = pytest.mark.usefixtures("blank_reports", "no_metrics", "quick_looks")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def hostile(home):
    return HostileServer(home)


@pytest.mark.slow
def test_a_thousand_requests_give_no_row_away(hostile):
    hostile.attack(1000)
    assert hostile.asked == 1000
    assert hostile.answered > 400  # the others are refused
    assert hostile.recovered(1e-3) == 0


def test_the_same_attacks_find_rows_if_the_owner_trusts_the_server(tmp_path):
    """The attacks are real: without the rules they work."""
    server = HostileServer(tmp_path, min_rows=0, blur=0.0)
    server.shift_half_spaces(24)
    server.certain_learners(24)
    assert server.recovered(1e-6) >= 3


def test_the_attacks_find_nothing_by_default(hostile):
    hostile.shift_half_spaces(24)
    hostile.certain_learners(24)
    hostile.average_two(20)
    hostile.small_starts(3)
    hostile.nearest_means(3)
    assert hostile.recovered(1e-2) == 0


@pytest.mark.slow
def test_a_thousand_requests_give_no_label_of_unknown_rows_away(tmp_path):
    """The replies say how labels depend on inputs, and no more about the rows than about others."""
    thief = LabelThief(tmp_path, groups=24)
    right, of_others = thief.without_inputs(1000)
    assert thief.asked == 1000
    assert right < max(of_others, honest_share(thief)) + 0.05


def honest_share(thief):
    """The share of labels that a model predicts, which is what honest training reveals."""
    return LogisticRegression().fit(thief.inputs, thief.labels).score(thief.inputs, thief.labels)


def test_labels_of_known_inputs_are_not_protected_without_noise(tmp_path):
    """If this fails, the limit in docs/deployment.md has gone."""
    thief = LabelThief(tmp_path)
    found = thief.with_inputs(100)
    assert found.right(thief.labels) > 0.95
    assert found.certain() > 150


def test_masks_hide_labels_of_known_inputs_from_a_hundred_requests(tmp_path):
    """The rows of the other sites are unknown; many more requests average them away."""
    thief = LabelThief(tmp_path, sites=3)
    assert thief.with_inputs(100).right(thief.labels) < honest_share(thief) + 0.08


@pytest.mark.parametrize(("epsilon", "learned"), [(1.0, False), (1e6, True)])
def test_noise_hides_labels_of_known_inputs(epsilon, learned):
    """Also from a server that knows all other rows, and places the Gaussians as it likes."""
    rng, groups, rows = np.random.default_rng(0), 3, 30
    inputs = torch.from_numpy(rng.uniform(-0.5, 0.5, size=(rows, 2)))
    labels = (inputs[:, 0] + 0.3 * torch.from_numpy(rng.normal(size=rows)) > 0).long()
    options = TrainingOptions(components=groups, learners=groups)
    privacy = Privacy(epsilon, 1e-5, rounds=12, bounds=(-1.0, 1.0))
    method = private_method(build(options, network("linear", (2,), 2)), privacy)
    found = LinearLabels(rows)
    covariances = torch.diag_embed(torch.full((groups, 2), 1e-4, dtype=torch.float64))
    own = replace(method.blank(2), weights=torch.eye(groups).double().reshape(-1) / groups)
    for name, mu in method.releases():
        if name != "round":
            continue
        means = inputs[rng.choice(rows, groups, replace=False)]
        own = replace(own, gaussians=gaussians(means, covariances, "full"))

        def gradient(place, y, own=own, name=name):
            some = PrivateRows(inputs[place], y, torch.ones(len(y), dtype=torch.float64))
            return method.contributions(name, own, some)["gradient"].reshape(-1).numpy()

        ill, well = (
            np.stack([gradient([k], torch.tensor([one])) for k in range(rows)], 1) for one in (1, 0)
        )
        sigma = method.layout(name, 2).sensitivity / mu
        noisy = gradient(slice(None), labels) + sigma * rng.normal(size=len(ill))
        noise = (sigma**2 + 1e-9) * np.eye(len(ill))
        found.add(ill - well, noisy - (ill + well).sum(1) / 2, noise)
    assert (found.certain() > rows / 2) == learned
    assert (found.right(labels.numpy()) > 0.9) == learned


def test_counts_are_zero_or_at_least_min_rows_and_nothing_can_be_subtracted(hostile):
    site = hostile._site()
    for number, at in enumerate((-2.2, 0.0, 2.2), start=1):
        model = hostile.half_space(0, at, 0.01)
        reply = hostile.ask(site, "round", model, round=number, since=0)
        for name in ("counts", "gaussians/counts"):
            counts = reply[name]
            assert ((counts == 0) | (counts >= 5)).all()
            assert counts.sum() == pytest.approx(len(hostile.rows))


def test_a_repeated_request_has_the_same_random_weights_and_another_has_not(hostile):
    site = hostile._site()
    first, again = (hostile.ask(site, "round", since=0) for _ in range(2))
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name])
    other = hostile.ask(site, "round", since=0, round=2)
    assert not np.allclose(first["gaussians/first"], other["gaussians/first"], atol=1e-3)


def test_random_weights_add_up_and_stay_near_one(tmp_path):
    own = RowWeights(tmp_path / "secret.key", 0.1)
    weights = own.draw("a request", 4000)
    assert float(weights.sum()) == pytest.approx(4000)
    assert float(weights.std()) == pytest.approx(0.1, rel=0.05)
    assert float(weights.min()) > 0.8
    assert not torch.equal(weights, own.draw("another", 4000))
    assert (tmp_path / "secret.key").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("means", "variance", "weight", "word"),
    [
        (0.0, 1e-6, 1.0, "variance"),
        (1e6, 1.0, 1.0, "mean"),
        (0.0, 1.0, 1e7, "learner"),
    ],
)
def test_models_that_single_out_rows_are_refused(means, variance, weight, word):
    learner = {"0.weight": torch.full((1, 2, 3), weight), "0.bias": torch.zeros(1, 2)}
    two = gaussians(
        torch.full((2, 3), means).double(), torch.full((2, 3), variance).double(), "diag"
    )
    with pytest.raises(ImplausibleModelError, match=word):
        check_model(Prediction(Dense(3, 2), learner, two))


def test_starts_of_few_rows_are_refused(hostile):
    few = Message("start", {}, {**hostile.honest["start"].facts, "most_rows": 3})
    with pytest.raises(SiteError, match="so few rows"):
        hostile._site().reply(few)


def test_a_site_outside_the_sample_of_a_large_federation_sends_no_centroids(hostile):
    without = Message("start", {}, {**hostile.honest["start"].facts, "most_rows": 0})
    reply = hostile._site().reply(without)
    assert len(reply.arrays["centroids/points"]) == 0


def test_rows_without_a_centroid_are_none_or_enough():
    """All rows without those of the centroids would otherwise be an outlier."""
    assert separable(np.array([20.0, 30.0, 1.0]), 51, 5).tolist() == [False, True, False]
    assert separable(np.array([20.0, 30.0]), 50, 5).tolist() == [True, True]
    assert separable(np.array([20.0, 30.0, 6.0]), 90, 5).tolist() == [True, True, True]


def test_scores_need_a_plan_with_patience(hostile):
    site, request = hostile._site(), hostile.honest["round"]
    with pytest.raises(SiteError, match="neither patience"):
        site.reply(Message("score", request.arrays, request.facts))


@pytest.mark.parametrize("algorithm", ["pfedme", "clustered"])
def test_methods_whose_learners_cannot_be_bounded_need_the_owner(files, tmp_path, algorithm):
    requests = []

    def look(name, request, reply):
        requests.append(request)
        return reply

    sites = InMemorySites(files, tmp_path)
    sites.tamper = look
    federate(files, tmp_path, sites=sites, algorithm=algorithm, rounds=1)
    (request, *_) = [one for one in requests if one.kind == "round"]
    with pytest.raises(SiteError, match="--min-rows 0"):
        Site(SiteSettings((files[0],), tmp_path / "careful")).reply(request)


@pytest.mark.parametrize(
    "options",
    [
        {"components": 3, "learners": 2},
        {"algorithm": "fedem", "learners": 2, "learner": "mlp"},
        {"algorithm": "fedavg", "patience": 2},
        {"algorithm": "local"},
        {"algorithm": "gmm", "label": None, "table": {"ignore": ("state",)}},
    ],
    ids=str,
)
def test_careful_sites_train_a_model(files, tmp_path, options):
    sites = InMemorySites(files, tmp_path, min_rows=5, blur=0.1)
    sites, lines = federate(files, tmp_path, sites=sites, rounds=3, **options)
    assert not [line for line in lines if "dropped" in line or "no update" in line]
    assert all((one.out / "metrics.json").is_file() for one in sites.settings.values())
