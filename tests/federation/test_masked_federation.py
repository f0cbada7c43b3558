"""Secure aggregation through a whole federation of files, in one process."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedgmm import load
from fedgmm.data.tables.loading import load_federation
from fedgmm.data.tables.preprocessing import TableOptions
from fedgmm.federation.declared import DeclaredColumns
from fedgmm.federation.masking import purpose_of
from fedgmm.federation.members import Members
from fedgmm.federation.messages import PROTOCOL, Message
from fedgmm.federation.policy import Policy
from fedgmm.federation.server import FederationError, _Server, check_start
from fedgmm.federation.settings import SiteSettings
from fedgmm.federation.site import Site, SiteError
from fedgmm.methods.gmm import FederatedGMM
from fedgmm.privacy.masks import is_committed
from fedgmm.privacy.settings import Privacy, PrivacyError
from fedgmm.privacy.site_sets import MaskError
from in_memory_sites import (
    InMemorySites,
    Killed,
    federate,
    federation_settings,
    with_arrays,
)
from small_runs import draw_rows, write_csv

pytestmark = pytest.mark.usefixtures("quick_looks", "blank_reports", "no_metrics")

DECLARED = {
    "bounds": {"age": (0, 120), "dose": (-10, 10)},
    "categories": {"state": ["ill", "well"], "ward": ["north", "south", "west"]},
}
MASKED = Privacy(secure_aggregation=True, **DECLARED)
SMALL = {"components": 2, "learners": 2}


@pytest.fixture(scope="module")
def six_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("six")
    return [
        write_csv(
            folder / f"site_{u}.csv",
            draw_rows(np.random.default_rng(u), 60 + 5 * u, turned=u % 2 == 1),
        )
        for u in range(6)
    ]


@pytest.fixture
def finished(monkeypatch):
    """Collect the training runs of servers that finish."""
    found = []
    whole = _Server._finish

    def finish(self, training):
        found.append(training)
        whole(self, training)

    monkeypatch.setattr(_Server, "_finish", finish)
    return found


def masked(files, home, **options):
    """Run a federation with masks; return its sites and the lines of its log."""
    sites = options.pop("sites", None) or InMemorySites(files, home, fresh=False)
    privacy = options.pop("privacy", MASKED)
    return federate(None, home, sites=sites, privacy=privacy, **{**SMALL, **options})


def broadcast(training):
    return {
        n: v.double().numpy()
        for n, v in training.job.method.broadcast(training.loop.outcome[0]).items()
    }


def learners_at_home(home):
    """Return the learners of all sites' models."""
    return {
        f"{folder.name} {name}": value.double().numpy()
        for folder in (home / "sites").iterdir()
        for name, value in load(folder / "model").prediction.learners.items()
    }


UNLABELLED = Privacy(secure_aggregation=True, bounds=DECLARED["bounds"])
SUMMED = [
    {"algorithm": "fedgmm"},
    {"algorithm": "fedgmm", "aggregation": "paper"},
    {"algorithm": "fedgmm", "learner": "mlp", "lr": 0.05},
    {"algorithm": "fedgmm", "covariance_type": "tied"},
    {"algorithm": "fedem"},
    {"algorithm": "fedavg"},
    {"algorithm": "fedavg", "warmup": 3},
    {"algorithm": "fedprox", "proximal": 0.1},
    {"algorithm": "fedavg+"},
    {"algorithm": "pfedme"},
    {"algorithm": "local"},
    {
        "algorithm": "gmm",
        "label": None,
        "learners": 1,
        "table": {"ignore": ("state", "ward")},
        "privacy": UNLABELLED,
    },
]


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "fedgmm", "rounds": 2},
        *({**one, "rounds": 3} for one in SUMMED[-2:]),
        *(pytest.param({**one, "rounds": 20}, marks=pytest.mark.slow) for one in SUMMED),
    ],
    ids=lambda one: " ".join(str(one[name]) for name in one if name not in ("privacy", "table")),
)
def test_masked_and_plain_runs_are_equal(six_files, tmp_path, finished, monkeypatch, options):
    starts, whole = [], FederatedGMM.start

    def start(self, *arguments):
        if len(finished) == 0:
            starts.append(whole(self, *arguments))
        return starts[0]

    monkeypatch.setattr(
        FederatedGMM, "start", start
    )  # the plain run starts where the masked one did
    masked(six_files, tmp_path / "masked", **options)
    plain_options = {name: value for name, value in options.items() if name != "privacy"}
    federate(six_files, tmp_path / "plain", **{**SMALL, **plain_options})
    if options["algorithm"] == "local":  # nothing is shared, but the preprocessing
        under_masks, plain = (learners_at_home(tmp_path / home) for home in ("masked", "plain"))
    else:
        under_masks, plain = map(broadcast, finished)
    assert plain
    for name, value in plain.items():
        np.testing.assert_allclose(under_masks[name], value, atol=1e-6, err_msg=name)


def test_a_federated_mixture_without_labels(six_files, tmp_path, finished):
    masked(
        six_files,
        tmp_path,
        label=None,
        privacy=UNLABELLED,
        algorithm="gmm",
        rounds=2,
        learners=1,
        table={"ignore": ("state", "ward")},
    )
    assert finished[0].job.columns == 3  # one of them shows missing values


def test_patience_uses_masked_scores(six_files, tmp_path, finished):
    sites, _ = masked(six_files, tmp_path, patience=2, rounds=2)
    assert ["score"] * 6 in sites.asked
    assert finished[0].loop.history


@pytest.mark.slow
def test_open_sizes_are_chosen_by_masked_scores(six_files, tmp_path, finished):
    masked(six_files, tmp_path, components="auto", learners=1, rounds=2)
    assert finished[0].job.options.components > 0


# ---------------------------------------------------------------------- the messages


def test_a_round_is_two_exchanges(six_files, tmp_path):
    sites, lines = masked(six_files, tmp_path, rounds=3)
    kinds = [asked[0] for asked in sites.asked]
    first = kinds.index("round")
    assert kinds[first : first + 6] == ["round", "unmask"] * 3
    assert kinds[1:3] == ["keys", "shares"]
    assert kinds.count("keys") == 1
    assert any("round 3" in line and "6 clients" in line for line in lines)


def test_replies_hold_no_rows_no_weights_and_no_texts(six_files, tmp_path):
    sites = InMemorySites(six_files, tmp_path, fresh=False, share_metrics=True)
    replies = []
    sites.tamper = lambda name, request, reply: replies.append((request, reply)) or reply
    masked(six_files, tmp_path, sites=sites, rounds=2)
    sizes = {}
    for request, reply in replies:
        assert set(reply.facts) <= {"name", "ticket", "version", "adapt_only", "share_metrics"}
        text = json.dumps(reply.facts)
        assert not any(word in text for word in ("north", "south", "west", "well"))
        shapes = {name: array.shape for name, array in reply.arrays.items()}
        assert all(name.startswith("mask/") for name in shapes)
        if request.kind != "shares":
            sizes.setdefault(purpose(request), set()).add(json.dumps(shapes))
    assert all(len(found) == 1 for found in sizes.values())  # the same size from every site


def purpose(request):
    return (request.kind, request.facts.get("round"), str(request.facts.get("mask")))


def test_the_total_is_that_of_all_rows(six_files, tmp_path, finished):
    masked(six_files, tmp_path, rounds=1)
    job = finished[0].job
    _, tables, _ = load_federation(six_files, job.table)
    for ours, theirs in zip(job.preprocessing.columns, tables.columns, strict=True):
        assert (ours.name, ours.categories) == (theirs.name, theirs.categories)
        assert ours.mean == pytest.approx(theirs.mean, abs=1e-6)
        assert ours.scale == pytest.approx(theirs.scale, abs=1e-6)


def test_values_outside_the_declared_bounds_are_clipped_before_masks(six_files, tmp_path, finished):
    """A typing error at one site would spoil every sum, and masks would hide whose it is."""
    shared = []
    for age in ("1e9", "120"):  # the declared bound of age
        header, first, *rest = six_files[0].read_text().splitlines()
        changed = tmp_path / age / "site_0.csv"
        changed.parent.mkdir()
        first = ",".join([age, *first.split(",")[1:]])
        changed.write_text("\n".join([header, first, *rest]) + "\n")
        masked([changed, *six_files[1:]], tmp_path / f"run {age}", rounds=2)
        shared.append(broadcast(finished[-1]))
    for name, value in shared[0].items():
        np.testing.assert_allclose(value, shared[1][name], atol=1e-9, err_msg=name)


def test_sites_commit_to_their_vectors(six_files, tmp_path):
    """The server keeps signed hashes; a site can open its own, and no other vector fits."""
    masked(six_files, tmp_path, rounds=1)
    lines = (tmp_path / "server" / "commitments.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    entry = next(one for one in found if one["purpose"] == "round main 1")
    kept = load_file(tmp_path / "sites" / entry["site"] / "commitments/round-main-1.safetensors")
    commitment, secret = bytes.fromhex(entry["commitment"]), kept["secret"].tobytes()
    assert is_committed(commitment, secret, kept["vector"])
    assert not is_committed(commitment, secret, kept["vector"] + np.uint64(1))
    assert len({one["commitment"] for one in found}) == len(found)


def test_a_total_that_no_rows_could_have_made_stops_the_run(six_files, tmp_path, finished):
    """One site adds a number of rows that is negative; masks hide which site it is."""
    sites = InMemorySites(six_files, tmp_path, fresh=False)

    def spoil(name, request, reply):
        if name == "site_2" and request.kind == "round" and request.facts["round"] == 2:
            wrong = reply.arrays["mask/vector"] - np.uint64(10**6 << 24)
            return with_arrays(reply, mask__vector=wrong)
        return reply

    sites.tamper = spoil
    masked(six_files, tmp_path, sites=sites, rounds=3)
    assert "not plausible" in finished[0].stopped
    assert len(finished[0].loop.history) == 1


def test_a_restarted_server_continues_with_the_same_sites(six_files, tmp_path, finished):
    sites = InMemorySites(six_files, tmp_path, fresh=False)

    def die(number, requests):
        if any(r.kind == "round" and r.facts["round"] == 3 for r in requests.values()):
            raise Killed

    sites.before_ask = die
    with pytest.raises(Killed):
        masked(six_files, tmp_path, sites=sites, rounds=3)
    sites.before_ask = lambda number, requests: None
    masked(six_files, tmp_path, sites=sites, rounds=3)
    assert [entry["answered"] for entry in finished[0].loop.history] == [6, 6, 6]


def test_a_server_that_lost_its_memory_opens_no_sum_without_one_site(six_files, tmp_path, finished):
    """Sums over tables are the same in every run, so the sets of sites of all runs count."""
    sites = InMemorySites(six_files, tmp_path, fresh=False)

    def die(number, requests):
        if any(request.kind == "start" for request in requests.values()):
            raise Killed

    sites.before_ask = die
    with pytest.raises(Killed):  # before the first checkpoint
        masked(six_files, tmp_path, sites=sites, rounds=1)
    policy = Policy(sites.settings["node-0"])
    five = [f"site_{u}" for u in range(5)]
    with pytest.raises(MaskError, match="changed by 1"):
        policy.released("another run").check("moments", five, 2)

    def lose(number, requests):
        if any(request.kind == "keys" for request in requests.values()):
            sites.gone = {"site_5"}

    sites.before_ask = lose
    masked(six_files, tmp_path, sites=sites, rounds=1, min_clients=4, round_timeout=0.2)
    assert finished[0].loop.history[0]["answered"] == 4


def test_a_sum_has_one_name():
    """A server that names another phase does not get the same sum of other sites."""
    one, other = (Message("cells", {}, {"phase": p, "round": 0}) for p in ("main", "warmup"))
    assert purpose_of(one) == purpose_of(other)


def test_a_limit_of_epsilon_holds_for_moments(six_files, tmp_path):
    """Also if the server never asks the site to agree to a summary."""
    site = Site(SiteSettings((six_files[0],), tmp_path / "site", max_epsilon=1.0))
    facts = {"protocol": PROTOCOL, "run": "0" * 32, "plan": {"privacy": MASKED.record()}}
    site.reply(Message("hello", {}, facts))
    table = {"label": "state", "split": [0.8, 0.1, 0.1]}
    with pytest.raises(SiteError, match="no differential privacy"):
        site.reply(Message("moments", {}, {**facts, "table": table}))


def test_a_plan_cannot_ask_for_sums_that_differ_by_one_site():
    with pytest.raises(PrivacyError, match="min_change"):
        Privacy(secure_aggregation=True, min_change=1)


# ---------------------------------------------------------------------- sites that die


@pytest.mark.parametrize("kind", ["keys", "shares", "moments", "cells", "round", "unmask"])
def test_a_third_of_the_sites_may_die_in_any_phase(six_files, tmp_path, kind, finished):
    sites = InMemorySites(six_files, tmp_path, fresh=False)
    seen = []

    def die(number, requests):
        kinds = {request.kind for request in requests.values()}
        seen.extend(kinds)
        if kind in kinds and (kind != "unmask" or "round" in seen):
            sites.gone |= {"site_1", "site_4"}

    sites.before_ask = die
    masked(six_files, tmp_path, sites=sites, rounds=2, min_clients=4, round_timeout=0.2)
    assert len(finished[0].loop.history) == 2
    assert finished[0].loop.history[-1]["answered"] == 4


def test_one_lost_site_takes_another_one_with_it(six_files, tmp_path, finished):
    """The difference of two sums would show a single site, so another site is left out."""
    sites = InMemorySites(six_files, tmp_path, fresh=False)

    def die(number, requests):
        if any(r.kind == "round" and r.facts["round"] == 2 for r in requests.values()):
            sites.gone.add("site_3")

    sites.before_ask = die
    _, lines = masked(six_files, tmp_path, sites=sites, rounds=3, min_clients=4, round_timeout=0.2)
    assert [entry["answered"] for entry in finished[0].loop.history] == [6, 4, 4]
    assert any("left out" in line for line in lines)


def test_lost_sites_come_back_together(six_files, tmp_path, finished):
    sites = InMemorySites(six_files, tmp_path, fresh=False)

    def come_and_go(number, requests):
        rounds = [r.facts["round"] for r in requests.values() if r.kind == "round"]
        if 2 in rounds:
            sites.gone = {"site_0", "site_3"}
        if 3 in rounds:
            sites.gone = set()

    sites.before_ask = come_and_go
    masked(six_files, tmp_path, sites=sites, rounds=5, min_clients=4)
    assert [entry["answered"] for entry in finished[0].loop.history] == [6, 4, 4, 6, 6]


def test_a_round_below_the_threshold_waits_for_the_same_sites(six_files, tmp_path, finished):
    sites = InMemorySites(six_files, tmp_path, fresh=False)
    state = {"dead": False, "looks": 0}

    def die(number, requests):
        kinds = {request.kind for request in requests.values()}
        if "unmask" in kinds and not state["dead"] and any("round" in k for k in sites.asked[-2]):
            state["dead"] = True
            sites.gone = {"site_0", "site_1", "site_2"}

    whole = sites.nodes

    def nodes():
        if state["dead"] and sites.gone:
            state["looks"] += 1
            if state["looks"] > 8:
                sites.gone = set()
        return whole()

    sites.before_ask, sites.nodes = die, nodes
    _, lines = masked(six_files, tmp_path, sites=sites, rounds=2, min_clients=3)
    assert any("discarded" in line for line in lines)
    assert [entry["answered"] for entry in finished[0].loop.history] == [6, 6]


def test_restarted_sites_take_part_again(six_files, tmp_path, finished):
    """A restarted process has lost its keys, so its site drops and joins with the next keys."""
    sites = InMemorySites(six_files, tmp_path, fresh=False)

    def restart(number, requests):
        if any(r.kind == "round" and r.facts["round"] == 2 for r in requests.values()):
            sites.sites.pop("node-0", None)
            sites.sites.pop("node-1", None)
            sites.before_ask = lambda number, requests: None

    sites.before_ask = restart
    masked(six_files, tmp_path, sites=sites, rounds=4, min_clients=4)
    assert [entry["answered"] for entry in finished[0].loop.history] == [6, 4, 6, 6]


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"algorithm": "clustered"}, "single clients"),
        ({"privacy": Privacy(secure_aggregation=True)}, "classes"),
        (
            {
                "privacy": Privacy(
                    secure_aggregation=True, categories=DECLARED["categories"], bounds=(0, 1)
                )
            },
            "name the columns",
        ),
        (
            {"privacy": Privacy(secure_aggregation=True, categories={"state": ["ill", "well"]})},
            "declared columns",
        ),
    ],
)
def test_settings_that_masks_cannot_have_are_refused_before_the_start(tmp_path, options, reason):
    settings = federation_settings(6, **{**SMALL, "privacy": MASKED, **options})
    with pytest.raises(FederationError, match=reason):
        check_start(settings, tmp_path / "run")


@pytest.mark.parametrize(
    ("clients", "options", "reason"),
    [
        (2, {}, "at least 3"),
        (6, {"min_clients": 2}, "at least 3"),
        (6, {"participation": 0.5}, "participation"),
        (6, {"robust": "trimmed"}, "single clients"),
    ],
)
def test_too_few_sites_are_refused(clients, options, reason):
    with pytest.raises(ValueError, match=reason):
        federation_settings(clients, **SMALL, privacy=MASKED, **options)


def test_a_site_that_agreed_to_masks_never_answers_without_them(six_files, tmp_path):
    requests = []
    sites = InMemorySites(six_files, tmp_path, fresh=False)
    sites.tamper = lambda name, request, reply: requests.append(request) or reply
    masked(six_files, tmp_path, sites=sites, rounds=1)
    asked = next(r for r in requests if r.kind == "round")
    plain = Message(
        "round",
        {n: a for n, a in asked.arrays.items() if not n.startswith("mask/")},
        {n: v for n, v in asked.facts.items() if n != "mask"},
    )
    with pytest.raises(SiteError, match="secure aggregation"):
        sites.site("node-0").reply(plain)
    without = {n: v for n, v in plain.facts.items() if n != "privacy"}
    with pytest.raises(SiteError, match="other privacy"):
        sites.site("node-0").reply(Message("round", plain.arrays, without))
    hello = next(r for r in requests if r.kind == "hello")
    plan = {n: v for n, v in hello.facts["plan"].items() if n != "privacy"}
    with pytest.raises(SiteError, match="another plan"):
        sites.site("node-0").reply(Message("hello", {}, {**hello.facts, "plan": plan}))


def test_a_site_with_min_sites_refuses_a_run_without_masks(six_files, tmp_path):
    sites = InMemorySites(six_files[:1], tmp_path, min_sites=5)
    settings = federation_settings(1, **SMALL)
    hello = Members(settings, sites, print, run="00" * 8).hello(True)
    with pytest.raises(SiteError, match="min-sites"):
        sites.site("node-0").reply(hello)


def test_a_site_wants_a_number_of_sites(six_files, tmp_path):
    sites = InMemorySites(six_files[:4], tmp_path, fresh=False, min_sites=5)
    lines = []

    def note(line):
        lines.append(line)
        if "fewer than 5" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        masked(None, tmp_path, sites=sites, rounds=1, notify=note)


def test_columns_are_declared_once():
    both = Privacy(bounds={"a": (0, 1)}, categories={"a": ["x", "y"], "y": ["0", "1"]})
    with pytest.raises(PrivacyError, match="bounds and categories"):
        DeclaredColumns.of(both, TableOptions("y"))


def test_a_server_may_die_many_times_with_masks(six_files, tmp_path, finished):
    """Before the first round, too: sums that were asked for are opened for the same sites only."""
    masked(six_files, tmp_path / "whole", rounds=2)
    sites = InMemorySites(six_files, tmp_path / "died", fresh=False)
    for kind in ("moments", "unmask", "start", "cells", "assigned", "round"):
        for when in ("before", "after"):

            def die(_, requests, kind=kind):
                if any(request.kind == kind for request in requests.values()):
                    raise Killed

            setattr(sites, f"{when}_ask", die)
            with pytest.raises(Killed):
                masked(None, tmp_path / "died", sites=sites, rounds=2)
            setattr(sites, f"{when}_ask", lambda *_: None)
    masked(None, tmp_path / "died", sites=sites, rounds=2)
    whole, died = map(broadcast, finished)
    for name, value in whole.items():
        np.testing.assert_allclose(died[name], value, rtol=0, atol=1e-10)


def test_a_site_names_the_columns_that_are_not_declared(six_files, tmp_path):
    declared = Privacy(
        secure_aggregation=True, bounds={"age": (0, 120)}, categories=DECLARED["categories"]
    )
    sites = InMemorySites(six_files[:3], tmp_path, fresh=False)
    masked(None, tmp_path, sites=sites, privacy=declared, rounds=1, table={"ignore": ("id",)})
    lines = [line for line in sites.lines["site_0"] if "does not declare" in line]
    assert len(lines) == 1
    assert "dose" in lines[0]
    assert "age" not in lines[0]


@pytest.mark.parametrize("noise", [{}, {"epsilon": 50.0, "delta": 1e-4, "rounds": 2}])
def test_a_site_counts_the_values_that_are_not_declared(six_files, tmp_path, noise):
    """A category that the server has forgotten would otherwise be lost silently."""
    categories = {**DECLARED["categories"], "ward": ["north", "south"]}
    declared = Privacy(
        secure_aggregation=True, bounds={"age": (0, 120)}, categories=categories, **noise
    )
    sites = InMemorySites(six_files[:3], tmp_path, fresh=False)
    rounds = {} if noise else {"rounds": 1}
    masked(None, tmp_path, sites=sites, privacy=declared, table={"ignore": ("id",)}, **rounds)
    west = six_files[0].read_text().count("west")
    lines = [line for line in sites.lines["site_0"] if "declare" in line]
    assert len(lines) == 2
    assert "dose" in lines[0]
    assert f"'ward': {west} values" in lines[1]
