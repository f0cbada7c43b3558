"""Differential privacy over a federation: each site adds its part of the noise under its mask."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from fedgmm import fit, load, train
from fedgmm.data.tables.loading import read_tables
from fedgmm.federation import private
from fedgmm.federation.messages import Message
from fedgmm.federation.policy import Policy
from fedgmm.federation.private import PrivateTraining, noise_share
from fedgmm.federation.server import FederationError, check_start
from fedgmm.federation.site import Site, SiteError
from fedgmm.federation.wire import decode
from fedgmm.privacy.accounting import compose, epsilon_of
from fedgmm.privacy.disclosure import ImplausibleModelError
from fedgmm.privacy.fixed_point import from_fixed
from fedgmm.privacy.ledger import Ledger
from fedgmm.privacy.private_em import PrivateRows
from fedgmm.privacy.settings import Privacy
from fedgmm.runs.watch import state_of
from fedgmm.training import private as in_process
from in_memory_sites import InMemorySites, Killed, federate, federation_settings
from small_runs import draw_rows, write_csv

pytestmark = pytest.mark.usefixtures("quick_looks", "blank_reports")

DECLARED = {
    "bounds": {"age": (10, 110), "dose": (-4, 6)},
    "categories": {"state": ["ill", "well"], "ward": ["north", "south", "west"]},
}
BUDGET = Privacy(epsilon=50.0, delta=1e-4, rounds=2, secure_aggregation=True, **DECLARED)
SMALL = {"components": 2, "learners": 2}
SITES = 6


@pytest.fixture(scope="module")
def six_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("six")
    return [
        write_csv(
            folder / f"site_{u}.csv",
            draw_rows(np.random.default_rng(u), 60 + 5 * u, turned=u % 2 == 1),
        )
        for u in range(SITES)
    ]


def noised(home, sites, **options):
    """Run a federation with noise; return the lines of its log."""
    privacy = options.pop("privacy", BUDGET)
    return federate(None, home, sites=sites, privacy=privacy, **{**SMALL, **options})[1]


def usual_sites(files, home):
    """Sites with the rules that an owner gets by default."""
    return InMemorySites(files, home, fresh=False, min_rows=5, blur=0.1)


class Honest:
    """An honest run, with its requests to the first site and all replies."""

    def __init__(self, files, home):
        self.home, self.sites = home, usual_sites(files, home)
        self.requests, self.replies, self.trainings = [], [], []
        self.lines, self.watched = [], []
        self.sites.tamper = self._look
        whole = PrivateTraining.accepted

        def accepted(training, number, info):
            self.trainings.append(training)
            return whole(training, number, info)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedgmm.federation.members.POLL", 0.001)
            patch.setattr(PrivateTraining, "accepted", accepted)
            noised(home, self.sites, notify=self._line)

    def _line(self, line):
        self.lines.append(line)
        self.watched.append(state_of(self.home / "server"))

    def _look(self, name, request, reply):
        if name == "site_0":
            self.requests.append(request)
        self.replies.append(reply)
        return reply

    @property
    def releases(self):
        return [one for one in self.requests if one.kind == "release"]

    @property
    def training(self):
        return self.trainings[-1]


@pytest.fixture(scope="module")
def honest(six_files, tmp_path_factory, blank_reports):
    return Honest(six_files, tmp_path_factory.mktemp("honest"))


def ledger(home, name="site_0"):
    return Ledger.found(home / "sites" / name)


def plan_of(training):
    return [mu for _, mu in training.job.method.releases()]


# ---------------------------------------------------------------------- an honest run


def test_every_ledger_has_the_plan_and_no_more(honest):
    names = [name for name, _ in honest.training.job.method.releases()]
    assert names == ["columns", "covariance", "histogram", "round", "round"]
    for number in range(SITES):
        own = ledger(honest.home, f"site_{number}")
        assert [one.release.mu for one in own.entries()] == plan_of(honest.training)
        assert [one.what for one in own.entries()] == [f"release {place}" for place in range(5)]
        assert 49.9 < own.spent("row", BUDGET.delta) <= 50.0 * (1 + 1e-9)


def test_nothing_but_masked_vectors_leaves(honest):
    kinds = [kinds[0] for kinds in honest.sites.asked]
    assert kinds == ["hello", "keys", "shares", *["release", "unmask"] * 5, "finish"]
    for reply in honest.replies:
        assert set(reply.facts) <= {"name", "ticket", "version", "adapt_only", "share_metrics"}
        assert all(name.startswith("mask/") for name in reply.arrays)


def test_models_and_history_have_the_budget(honest):
    assert any("noise is" in line for line in honest.lines)  # the forecast
    shared = load(honest.home / "server" / "model")
    assert shared.budget == "ε = 50 of 50 (δ = 0.0001, per row), 5 releases"
    entries = [json.loads(one) for one in (honest.home / "server/history.jsonl").open()]
    first = epsilon_of(compose(plan_of(honest.training)[:4]), BUDGET.delta)
    assert [one["epsilon"] for one in entries] == pytest.approx([first, 50.0])
    own = load(honest.home / "sites/site_0/model")
    assert own.budget == shared.budget
    assert own.names == ["site_0"]
    assert len(own.history) == 2
    assert not torch.allclose(own.prediction.client_weights, shared.prediction.weights)
    assert torch.equal(own.prediction.gaussians.means, shared.prediction.gaussians.means)


def test_the_live_page_of_the_server_has_clients_bytes_and_the_budget(honest):
    live = [one for one in honest.watched if one["status"] == "training"]
    assert [len(one["history"]) for one in live][-1] == BUDGET.rounds
    assert (live[0]["method"], live[0]["federated"]) == ("FedGMM", True)
    for state in live:
        last = state["history"][-1]
        assert last["answered"] == SITES
        assert 0 < last["epsilon"] <= 50.0 * (1 + 1e-9)
        assert [one["name"] for one in state["clients"]] == [f"site_{k}" for k in range(SITES)]
        assert all(one["bytes"] > 0 and not one["problem"] for one in state["clients"])
        assert state["bytes"] == sum(one["bytes"] for one in state["clients"])


@pytest.mark.slow
def test_accuracy_is_that_of_one_process(tmp_path):
    """Every second site has its labels the other way round."""
    files = [
        write_csv(
            tmp_path / f"site_{u}.csv",
            draw_rows(np.random.default_rng(u), 500, turned=u % 2 == 1),
            without=("ward",),
        )
        for u in range(4)
    ]
    classes = {"state": DECLARED["categories"]["state"]}
    budget = replace(BUDGET, epsilon=100.0, rounds=4, categories=classes)
    options = {**SMALL, "covariance_type": "full"}
    noised(tmp_path, usual_sites(files, tmp_path), privacy=budget, **options)
    found = [tmp_path / f"sites/site_{u}/metrics.json" for u in range(4)]
    own = [json.loads(one.read_text())["test"]["mean_accuracy"] for one in found]
    alone = fit(files, "state", tmp_path / "alone", privacy=budget, **options)
    assert np.mean(own) > 0.9
    assert np.mean(own) == pytest.approx(alone.metrics["test"]["mean_accuracy"], abs=0.05)


@pytest.fixture(scope="module")
def files_with_patients(tmp_path_factory):
    """Six tables in which patients have several rows; none is at two sites."""
    folder = tmp_path_factory.mktemp("patients")
    files = []
    for u in range(SITES):
        rng = np.random.default_rng(u)
        rows = draw_rows(rng, 50 + 5 * u, turned=u % 2 == 1)
        people = np.sort(rng.integers(0, 15, len(rows)))
        rows = [{**row, "patient": f"{u}-{who}"} for row, who in zip(rows, people, strict=True)]
        files.append(write_csv(folder / f"site_{u}.csv", rows))
    return files


@pytest.mark.parametrize(
    ("unit", "options"),
    [
        ("row", {}),
        ("person", {"learner": "mlp", "algorithm": "fedem"}),
        ("client", {"learner": "mlp", "algorithm": "fedavg"}),
        ("row", {"algorithm": "fedavg", "solver": "sgd"}),
        ("row", {"algorithm": "gmm", "label": None}),
        pytest.param("person", {}, marks=pytest.mark.slow),
        pytest.param("client", {}, marks=pytest.mark.slow),
        pytest.param("row", {"learner": "mlp"}, marks=pytest.mark.slow),
        pytest.param("client", {"algorithm": "fedem"}, marks=pytest.mark.slow),
        pytest.param("row", {"algorithm": "fedavg"}, marks=pytest.mark.slow),
    ],
    ids=lambda one: one if isinstance(one, str) else "-".join(map(str, one.values())) or "linear",
)
def test_without_noise_it_is_the_run_of_one_process(
    files_with_patients, tmp_path, monkeypatch, unit, options
):
    """Noise is switched off in both, and counts as large as in one process."""
    jobs, whole = [], PrivateTraining.accepted

    def accepted(training, number, info):
        jobs.append(training.job)
        return whole(training, number, info)

    monkeypatch.setattr(PrivateTraining, "accepted", accepted)
    monkeypatch.setattr(
        private, "noise_elements", lambda count, *_: np.zeros(count, dtype=np.uint64)
    )
    monkeypatch.setattr(private, "noise_share", lambda sigma, sites, _: sigma / np.sqrt(sites))
    monkeypatch.setattr(in_process, "noisy", lambda total, *_: total)
    budget = replace(BUDGET, unit=unit, person="patient", delta=1e-3)
    table = {"id": ("patient",)}
    if options.get("algorithm") == "gmm":
        table["ignore"] = ("state",)
        budget = replace(budget, categories={"ward": DECLARED["categories"]["ward"]})
    sites = usual_sites(files_with_patients, tmp_path)
    noised(tmp_path, sites, privacy=budget, table=table, **options)
    federated, job = load(tmp_path / "server" / "model"), jobs[0]
    assert federated.privacy["unit"] == unit
    own = ledger(tmp_path)
    assert {one.unit for one in own.entries()} == {unit}
    assert own.spent(unit, budget.delta) == pytest.approx(50.0)
    tables = read_tables(files_with_patients, job.table)
    persons = tables.persons(job.preprocessing, "patient")
    dataset = replace(tables.load(job.preprocessing), persons=persons)
    alone = train(dataset, options=job.options, privacy=replace(budget, bounds=(-1.0, 1.0)))
    learners = federated.prediction.learners
    pairs = [(learners[name], alone.prediction.learners[name]) for name in learners]
    pairs.append((federated.prediction.weights, alone.prediction.weights))
    if federated.prediction.gaussians is not None:
        pairs.append((federated.prediction.gaussians.means, alone.prediction.gaussians.means))
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=1e-4)


def test_a_site_without_the_person_of_a_row_sends_a_code(files_with_patients, tmp_path):
    text = files_with_patients[0].read_text().replace(",0-3", ",")
    odd = tmp_path / "odd.csv"
    odd.write_text(text)
    sites = usual_sites([odd, *files_with_patients[1:]], tmp_path)
    budget = replace(BUDGET, unit="person", person="patient", rounds=1, delta=1e-3)
    options = {"table": {"id": ("patient",)}, "min_clients": 3}
    lines = noised(tmp_path, sites, privacy=budget, **options)
    assert any("odd" in line and "table" in line for line in lines)
    assert not (tmp_path / "sites/odd/ledger.jsonl").exists()


# ---------------------------------------------------------------------- a dishonest server


def test_clients_are_not_clipped_to_bounds_that_rounding_exceeds(honest):
    """Numbers near the smallest float are rounded up, so a client would count for more than one."""
    job = replace(honest.training.job, privacy=replace(BUDGET, unit="client"))
    method, d = job.method, job.columns
    arrays = method.broadcast(method.blank(d))
    for smallest, refused in ((0.0, False), (1e-9, False), (5e-324, True), (-1.0, True)):
        wild = {**arrays, "bounds": torch.full((5,), smallest, dtype=torch.float64)}
        if refused:
            with pytest.raises(ImplausibleModelError):
                method.received(wild, d)
            continue
        layout = method.clipped_layout("columns", method.received(wild, d))
        sums = {one.name: torch.full(one.shape, 0.6).double() for one in layout.parts}
        assert np.linalg.norm(layout.vector(layout.clipped(sums))) <= 1.0 + 1e-9


def changed(request, arrays=None, **facts):
    return Message(request.kind, arrays or request.arrays, {**request.facts, **facts})


def other_numbers(request):
    return {**request.arrays, "means": request.arrays["means"] + 0.1}


ATTACKS = {
    "one release more": (lambda r: changed(r[-1], round=5), "no release 5"),
    "the first one again": (lambda r: changed(r[0], other_numbers(r[0])), "with other numbers"),
    "the last one again": (lambda r: changed(r[-1], other_numbers(r[-1])), "with other numbers"),
    "a second start": (lambda r: changed(r[0], run="ab" * 8), "another run"),
    "another name": (lambda r: changed(r[1], release="round"), "another release"),
    "less noise": (lambda r: changed(r[-1], mu=r[-1].facts["mu"] * 1.01), "less noise"),
    "a budget of its own": (
        lambda r: changed(r[-1], privacy={**r[-1].facts["privacy"], "epsilon": 60.0}),
        "other privacy",
    ),
    "fewer rounds": (
        lambda r: changed(r[-1], options={**r[-1].facts["options"], "rounds": 1}),
        "no release 4",
    ),
    "sums without noise": (
        lambda r: Message("round", r[-1].arrays, {**r[-1].facts, "round": 1}),
        "noisy sums only",
    ),
    "no masks": (
        lambda r: Message("release", {}, {k: v for k, v in r[-1].facts.items() if k != "mask"}),
        "other numbers",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_dishonest_request_is_refused_and_costs_nothing(honest, attack):
    make, reason = ATTACKS[attack]
    with pytest.raises(SiteError, match=reason):
        honest.sites.site("node-0").reply(make(honest.releases))
    assert len(ledger(honest.home).entries()) == 5


def test_the_preprocessing_is_the_declared_one(honest, six_files, tmp_path):
    """With a scale of zero, whether a sum is finite would show whether a value occurs."""
    own = usual_sites(six_files[:1], tmp_path).site("node-0")
    own.reply(honest.requests[0])
    request = honest.releases[0]
    record = json.loads(json.dumps(request.facts["preprocessing"]))
    record["columns"][0]["mean"] = 51.0
    with pytest.raises(SiteError, match="declares"):
        own.reply(changed(request, preprocessing=record))
    with pytest.raises(SiteError, match="less noise"):
        own.reply(changed(request, mu=2.0))
    assert not own._policy.ledger.entries()


@pytest.mark.parametrize("extreme", [1.0, 1e3, 1e6])
def test_one_row_counts_for_one_with_any_model_that_a_site_accepts(honest, extreme):
    job, rng = honest.training.job, np.random.default_rng(0)
    method, d = job.method, job.columns
    arrays = {n: a for n, a in honest.releases[-1].arrays.items() if not n.startswith("mask/")}
    spread = {
        name: array * rng.uniform(-extreme, extreme, array.shape)
        for name, array in arrays.items()
        if name in ("means", "coordinates/whitener", "coordinates/projection")
        or name.startswith("learners/")
    }
    wild = {**arrays, **{n: a.clip(-1e6, 1e6) for n, a in spread.items()}}
    wild["coordinates/scale"] = np.full(d, 1.0 / extreme)
    declaration = method.declare_broadcast(d)
    shared = method.received(decode(wild, declaration, torch.float32, torch.float32), d)
    for place, (name, _) in enumerate(method.releases()):
        layout = method.layout(name, d)
        for x in rng.uniform(-1, 1, (5, d)):
            row = PrivateRows(
                torch.tensor(x)[None], torch.tensor([place % 2]), torch.ones(1).double()
            )
            vector = layout.vector(method.contributions(name, shared, row))
            assert np.linalg.norm(vector) <= 1.0 + 1e-9
    for name, value in (("coordinates/scale", 0.0), ("means", 1e7), ("covariances", 0.0)):
        bad = {**arrays, name: np.full_like(arrays[name], value)}
        with pytest.raises(ImplausibleModelError):
            method.received(decode(bad, declaration, torch.float32, torch.float32), d)


# ---------------------------------------------------------------------- noise with dropouts


@pytest.fixture
def histogram_noise(six_files, tmp_path, monkeypatch):
    """Run a federation; return the noise of the total of its largest release, and its settings."""

    def draw(dropped):
        exact, found = [], {}
        vector_of, whole = private.vector_of, PrivateTraining.release

        def record(method, name, *rest):
            vector = vector_of(method, name, *rest)
            if name == "histogram":
                exact.append(vector)
            return vector

        def release(self, method, shared, place):
            noisy = whole(self, method, shared, place)
            if method.releases()[place][0] == "histogram":
                mu, layout = method.releases()[place][1], method.layout("histogram", 5)
                found["noise"] = from_fixed(self._last.total) - np.sum(exact, axis=0)
                found["sigma"] = layout.sensitivity / mu
                found["claimed"] = float(noisy["deviation/cells"])
                found["sites"] = len(self._last.found)
            return noisy

        monkeypatch.setattr(private, "vector_of", record)
        monkeypatch.setattr(PrivateTraining, "release", release)
        sites = usual_sites(six_files, tmp_path)

        def die(number, requests):
            if any(r.kind == "release" and r.facts["round"] == 2 for r in requests.values()):
                sites.gone |= {f"site_{u}" for u in range(dropped)}

        sites.before_ask = die
        budget = replace(BUDGET, rounds=1)
        options = {"components": 4, "min_clients": 3, "round_timeout": 0.2}
        noised(tmp_path, sites, privacy=budget, **options)
        return found

    return draw


@pytest.mark.parametrize(("dropped", "excess"), [(0, np.sqrt(6 / 4)), (2, 1.0), (3, 1.0)])
def test_the_total_has_the_declared_noise(histogram_noise, dropped, excess):
    """Two of six may drop. With three, the sum is asked again, and the sites add what is missing."""
    found = histogram_noise(dropped)
    assert found["sites"] == SITES - dropped
    expected = excess * found["sigma"]
    assert found["claimed"] == pytest.approx(expected)
    assert kstest(found["noise"], "norm", (0.0, expected)).pvalue > 1e-6
    assert found["noise"].std() > 0.9 * found["sigma"]


def test_parts_that_count_on_every_site_are_caught(histogram_noise, monkeypatch):
    monkeypatch.setattr(private, "noise_share", lambda sigma, sites, _: sigma / np.sqrt(sites))
    found = histogram_noise(2)
    assert found["noise"].std() < 0.9 * found["sigma"]


def test_sites_that_collude_are_replaced_by_more_noise():
    assert noise_share(1.0, 6, 0) == pytest.approx(1 / np.sqrt(4))
    assert noise_share(1.0, 6, 2) == pytest.approx(1 / np.sqrt(2))


# ---------------------------------------------------------------------- kills and repetitions


def kill_before_the_ledger(patch, sites):
    whole = Policy.charge

    def charge(self, request, *rest):
        if request.facts["round"] == 3 and "site_2" in str(self.log):
            patch.setattr(Policy, "charge", whole)
            raise Killed
        whole(self, request, *rest)

    patch.setattr(Policy, "charge", charge)


def kill_after_the_ledger(patch, sites, name="site_2"):
    whole = Policy.charge

    def charge(self, request, *rest):
        whole(self, request, *rest)
        if request.facts["round"] == 1 and name in str(self.log):
            patch.setattr(Policy, "charge", whole)
            raise Killed

    patch.setattr(Policy, "charge", charge)


def kill_before_the_sum_is_open(patch, sites):
    def die(number, requests):
        if any(r.kind == "unmask" for r in requests.values()) and number > 7:
            sites.before_ask = lambda number, requests: None
            raise Killed

    sites.before_ask = die


@pytest.mark.parametrize(
    "kill", [kill_before_the_ledger, kill_after_the_ledger, kill_before_the_sum_is_open]
)
def test_a_kill_never_counts_too_little_and_draws_no_noise_twice(
    six_files, tmp_path, monkeypatch, kill
):
    """All processes are killed, and start again."""
    drawn, whole = [], private.noise_elements

    def noise_elements(*arguments):
        drawn.append(arguments)
        return whole(*arguments)

    monkeypatch.setattr(private, "noise_elements", noise_elements)
    sites, budget = usual_sites(six_files[:4], tmp_path), replace(BUDGET, rounds=1)
    kill(monkeypatch, sites)
    with pytest.raises(Killed):
        noised(tmp_path, sites, privacy=budget)
    sites.sites.clear()
    noised(tmp_path, sites, privacy=budget)
    assert len(drawn) == 4 * 4
    for number in range(4):
        entries = ledger(tmp_path, f"site_{number}").entries()
        assert [one.what for one in entries] == [f"release {place}" for place in range(4)]
    assert load(tmp_path / "server" / "model").privacy["releases"] == 4


def test_lost_noise_is_not_drawn_again(six_files, tmp_path, monkeypatch):
    """The ledger counted a vector that is no longer there, so the site leaves the release out."""
    sites, budget = usual_sites(six_files[:4], tmp_path), replace(BUDGET, rounds=1)

    kill_after_the_ledger(monkeypatch, sites, "site_3")  # no site was asked to open the sum
    with pytest.raises(Killed):
        noised(tmp_path, sites, privacy=budget, min_clients=3)
    for path in (tmp_path / "sites/site_2").rglob("release-*"):
        path.unlink()
    sites.sites.clear()
    lines = noised(tmp_path, sites, privacy=budget, min_clients=3)
    assert any("site_2" in line and "lost" in line for line in lines)
    assert len(ledger(tmp_path, "site_2").entries()) == 4


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("privacy", "options", "reason"),
    [
        ({"secure_aggregation": False}, {}, "secure_aggregation"),
        ({"unit": "person"}, {}, "person"),
        ({"unit": "person", "person": "age"}, {}, "person"),
        ({"tolerated": 4}, {}, "collude"),
        ({}, {"algorithm": "fedprox"}, "fedprox"),
        ({}, {"algorithm": "clustered"}, "clustered"),
        ({"bounds": (0, 1)}, {}, "name the columns"),
        ({}, {"patience": 2}, "patience"),
        ({}, {"warmup": 1}, "warmup"),
    ],
)
def test_settings_that_noise_cannot_have(tmp_path, privacy, options, reason):
    settings = federation_settings(6, privacy=replace(BUDGET, **privacy), **SMALL, **options)
    with pytest.raises(FederationError, match=reason):
        check_start(settings, tmp_path / "run")


def test_a_site_with_few_rows_takes_part(six_files, tmp_path):
    """A refusal would show that it has few; noise hides it."""
    few = write_csv(tmp_path / "few.csv", draw_rows(np.random.default_rng(9), 3))
    noised(
        tmp_path, usual_sites([*six_files[:2], few], tmp_path), privacy=replace(BUDGET, rounds=1)
    )
    assert len(ledger(tmp_path, "few").entries()) == 4


def test_a_delta_that_allows_to_publish_a_row_stops_the_run(six_files, tmp_path):
    """It is less than one over the rows of each site, but not of all together."""
    with pytest.raises(FederationError, match="delta"):
        noised(tmp_path, usual_sites(six_files, tmp_path), privacy=replace(BUDGET, delta=0.01))


def test_a_site_refuses_a_delta_that_allows_to_publish_its_row(six_files, tmp_path):
    lines = []
    with pytest.raises(FederationError, match="0 of 6 clients"):
        federate(
            None,
            tmp_path,
            sites=usual_sites(six_files, tmp_path),
            privacy=replace(BUDGET, delta=0.1),
            start_timeout=0.5,
            notify=lines.append,
            **SMALL,
        )
    assert any("delta=0.1" in line for line in lines)
    assert not list((tmp_path / "sites").rglob("ledger.jsonl"))  # nothing was sent


@pytest.mark.parametrize("unit", ["row", "person"])
def test_a_usual_delta_is_refused_too_for_a_site_with_so_many_units(
    files_with_patients, tmp_path, monkeypatch, unit
):
    """The server only warns of a usual delta, because no one knows the number of all units."""
    monkeypatch.setattr("fedgmm.privacy.settings.USUAL_DELTA", 0.5)

    def notify(line):
        if f"training {unit}s" in line:
            raise Killed

    with pytest.raises(Killed):
        federate(
            None,
            tmp_path,
            sites=usual_sites(files_with_patients, tmp_path),
            privacy=replace(BUDGET, unit=unit, person="patient", delta=0.2),
            table={"id": ("patient",)},
            start_timeout=0.5,
            notify=notify,
            **SMALL,
        )
    assert not list((tmp_path / "sites").rglob("ledger.jsonl"))  # nothing was sent


def test_an_owner_who_allows_less_does_not_take_part(honest, six_files, tmp_path):
    own = Site(replace(honest.sites.settings["node-0"], out=tmp_path / "strict", max_epsilon=4.0))
    with pytest.raises(SiteError, match="max-epsilon"):
        own.reply(honest.requests[0])
