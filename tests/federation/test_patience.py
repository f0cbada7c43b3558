"""Patience over a federation: the best round and its model are those of one process."""

import json

import numpy as np
import pytest

from fedgmm.data.tables.loading import load_federation
from fedgmm.data.tables.preprocessing import TableOptions
from fedgmm.federation.messages import Failure
from fedgmm.federation.server import run_federation
from fedgmm.federation.settings import FederationError
from fedgmm.runs import open_run
from fedgmm.training.checkpoint import read_checkpoint
from fedgmm.training.in_process import train
from in_memory_sites import InMemorySites, Killed, federate, federation_settings, with_arrays
from small_runs import draw_rows, write_csv

pytestmark = pytest.mark.usefixtures("blank_reports", "no_metrics", "quick_looks")

NAMES = ("bergen", "oslo", "tromso")
OPTIONS = {
    "components": 2,
    "learners": 2,
    "covariance_type": "full",
    "dtype": "float64",
    "rounds": 20,
    "patience": 2,
    "tol": "none",
}
# options with which the validation rows are predicted best long before the last round
METHODS = {
    "fedgmm": {"ridge": 1e-3},
    "fedgmm-sgd": {"solver": "sgd", "lr": 5.0},
    "fedgmm-warmup": {"solver": "sgd", "lr": 2.0, "learner": "mlp", "warmup": 2},
    "fedem": {"algorithm": "fedem", "ridge": 1e-3},
    "fedavg+": {"algorithm": "fedavg+", "solver": "sgd", "lr": 3.0, "learner": "mlp"},
    "local": {"algorithm": "local", "lr": 1.0, "learner": "mlp"},
    "pfedme": {"algorithm": "pfedme", "lr": 1.0, "learner": "mlp", "patience": 1},
    "clustered": {"algorithm": "clustered", "lr": 1.0, "learner": "mlp"},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Tables with wrong labels, so that learners fit the training rows too well."""
    home, rng = tmp_path_factory.mktemp("noisy"), np.random.default_rng(4)
    found = []
    for number, (name, count) in enumerate({"oslo": 60, "bergen": 45, "tromso": 40}.items()):
        rows = draw_rows(rng, count, turned=number % 2 == 1)
        for row, wrong in zip(rows, rng.random(count) < 0.25, strict=True):
            if wrong:
                row["state"] = {"ill": "well", "well": "ill"}[row["state"]]
        found.append(write_csv(home / f"{name}.csv", rows))
    return found


def in_one_process(files, **options):
    dataset, _, _ = load_federation(files, TableOptions("state"))
    options = {**options, "tol": None, "standardise": False}
    return train(dataset, **options)


def history(home):
    return [json.loads(line) for line in (home / "server/history.jsonl").open()]


def scores_of(entries):
    name = "validation_log_likelihood"
    return [entry[name] for entry in entries if name in entry]


def own_parts(model, name):
    """All numbers that decide a client's predictions."""
    prediction, code = model.prediction, model.names.index(name)
    parts = {}
    if prediction.assignment is not None:
        own = int(prediction.assignment[code])
        parts |= {key: value[own] for key, value in prediction.learners.items()}
    else:
        parts |= prediction.learners
        parts |= {"pi": prediction.client_weights[code], "weights": prediction.weights}
    if prediction.gaussians is not None:
        parts["means"] = prediction.gaussians.means
        parts["covariances"] = prediction.gaussians.covariances
    return {key: value.double().numpy() for key, value in parts.items()}


def assert_same_models(home, model, tolerance=1e-8):
    for name in NAMES:
        wanted = own_parts(model, name)
        found = own_parts(open_run(home / "sites" / name).model, name)
        assert wanted.keys() == found.keys()
        for key, value in wanted.items():
            np.testing.assert_allclose(found[key], value, rtol=0, atol=tolerance, err_msg=key)


def best_round(home):
    """The best round by the server's checkpoint, and the last round."""
    facts = read_checkpoint(home / "server/checkpoint/progress.safetensors").facts
    return facts["best"]["round"], facts["round"]


def states_of(home, name):
    folder = home / "sites" / name / "federation"
    return sorted(int(path.stem.split("-")[1]) for path in folder.rglob("main-*.safetensors"))


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """A federation with patience that nothing disturbed."""
    home = tmp_path_factory.mktemp("whole")
    sites, lines = federate(files, home, **{**OPTIONS, **METHODS["fedgmm-sgd"]})
    return home, sites, lines


# The others are alike: exact steps, learners without Gaussians, and learners of the sites.
SLOW = ("fedgmm", "fedem", "local")


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[pytest.mark.slow] * (m in SLOW)) for m in METHODS]
)
def test_the_best_round_is_that_of_one_process(files, tmp_path, method):
    options = {**OPTIONS, **METHODS[method]}
    model = in_one_process(files, **options)
    federate(files, tmp_path, **options)
    entries = history(tmp_path)
    assert [e["round"] for e in entries] == [e["round"] for e in model.history]
    here, there = scores_of(entries), scores_of(model.history)
    np.testing.assert_allclose(here, there, rtol=0, atol=1e-8)
    best, last = best_round(tmp_path)
    first = len(entries) - len(here) + 1
    assert best == first + int(np.argmax(here))
    assert best + options["patience"] == last < OPTIONS["rounds"]  # it stopped early
    assert_same_models(tmp_path, model)


def test_every_round_is_scored_once(whole):
    home, sites, _ = whole
    rounds = len(history(home))
    kinds = [kinds[0] for kinds in sites.asked]
    assert kinds == ["hello", "start", "assigned", *["round", "score"] * rounds, "finish"]


def test_a_site_keeps_the_state_of_the_best_round(whole):
    home, _, _ = whole
    best, last = best_round(home)
    assert last - best == 2
    for name in NAMES:
        assert states_of(home, name) == [best, last - 1, last]


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_a_killed_server_finds_the_same_best_round(files, tmp_path, whole, when):
    home, sites, _ = whole
    options = {**OPTIONS, **METHODS["fedgmm-sgd"]}
    best, _ = best_round(home)
    round_of_best = 3 + 2 * best - 1  # number of its exchange; the score is the next
    for exchange in (round_of_best, round_of_best + 1, round_of_best + 2, len(sites.asked)):
        died = tmp_path / f"{exchange}"
        broken = InMemorySites(files, died)

        def die(number, _, exchange=exchange):
            if number == exchange:
                raise Killed

        setattr(broken, f"{when}_ask", die)
        with pytest.raises(Killed):
            federate(files, died, sites=broken, **options)
        federate(files, died, **options)
        assert best_round(died) == best_round(home)
        assert scores_of(history(died)) == scores_of(history(home))
        for name in NAMES:
            found, wanted = (
                own_parts(open_run(place / "sites" / name).model, name) for place in (died, home)
            )
            for key, value in wanted.items():
                np.testing.assert_array_equal(found[key], value, err_msg=key)


MISSED = {
    "fedgmm": ("tromso", 2),
    "fedgmm-sgd": ("tromso", 4),
    "fedgmm-warmup": ("oslo", 10),
    "pfedme": ("oslo", 1),
    "local": ("oslo", 6),
}


@pytest.mark.parametrize(
    ("method", "killed"),
    [
        ("fedgmm", False),
        ("pfedme", False),
        ("fedgmm-sgd", True),
        ("local", True),
        *(
            pytest.param(method, False, marks=pytest.mark.slow)
            for method in ("fedgmm-sgd", "local")
        ),
        *(pytest.param(method, True, marks=pytest.mark.slow) for method in ("fedgmm", "pfedme")),
        *(
            pytest.param("fedgmm-warmup", killed, marks=pytest.mark.slow)
            for killed in (False, True)
        ),
    ],
)
def test_a_site_that_missed_the_best_round(files, tmp_path, method, killed):
    """It ends with its own part from before, as a client does that did not reply in one process."""
    options = {**OPTIONS, **METHODS[method], "min_clients": 2}
    missed = site, best = MISSED[method]
    training = {name: value for name, value in options.items() if name != "min_clients"}
    model = in_one_process(files, answers=lambda number, name: (name, number) != missed, **training)
    scores = scores_of(model.history)
    assert best == len(model.history) - len(scores) + 1 + int(np.argmax(scores))

    home = tmp_path / "missed"
    sites, dead = InMemorySites(files, home), set()

    def lose(name, request, reply):
        late = request.kind == "round" and (name, request.facts["round"]) == missed
        return Failure("no reply within 5 s") if late else reply

    def die(_, requests):
        scored = {r.facts["round"] for r in requests.values() if r.kind == "score"}
        if killed and scored == {best + 1} and not dead:
            dead.add(True)
            raise Killed

    sites.tamper, sites.before_ask = lose, die
    if killed:
        with pytest.raises(Killed):
            federate(files, home, sites=sites, **options)
    federate(files, home, sites=sites, **options)
    assert best_round(home)[0] == best
    np.testing.assert_allclose(scores_of(history(home)), scores, rtol=0, atol=1e-8)
    assert best not in states_of(home, site)
    assert best == 1 or best - 1 in states_of(home, site)
    assert_same_models(home, model)


def test_a_federation_without_validation_rows_says_so(files, tmp_path):
    with pytest.raises(FederationError, match="validation"):
        federate(files, tmp_path, **OPTIONS, table={"split": (0.8, 0.0, 0.2)})


SCORED = {**OPTIONS, "rounds": 1, "min_clients": 2}


@pytest.fixture(scope="module")
def scores_without_oslo(files, tmp_path_factory):
    home = tmp_path_factory.mktemp("alone")
    sites = InMemorySites(files, home)
    sites.tamper = lambda name, request, reply: (
        Failure("no reply") if name == "oslo" and request.kind == "score" else reply
    )
    federate(files, home, sites=sites, **SCORED)
    return scores_of(history(home))


@pytest.mark.parametrize(
    "lie",
    [
        {"clients": 30.0},
        {"clients": 0.5},
        {"clients": 0.0},
        {"clients": -1.0},
        {"log_loss": -5.0},
        {"log_loss": np.inf},
        {"log_loss": np.nan},
        {"rows": -1.0},
        {"rows": 0.0},
        {"more": 1.0},
    ],
)
def test_a_site_cannot_weigh_more_in_a_score(files, tmp_path, scores_without_oslo, lie):
    def lies(name, request, reply):
        if name != "oslo" or request.kind != "score":
            return reply
        return with_arrays(reply, **{key: np.array(value) for key, value in lie.items()})

    sites = InMemorySites(files, tmp_path)
    sites.tamper = lies
    _, lines = federate(files, tmp_path, sites=sites, **SCORED)
    assert any("update of oslo is dropped" in line for line in lines)
    assert scores_of(history(tmp_path)) == scores_without_oslo


def test_a_late_client_does_not_move_the_best_round(files, tmp_path):
    """It joins after the best round, so it ends with the best model as a newcomer."""
    late = write_csv(tmp_path / "zz.csv", draw_rows(np.random.default_rng(3), 60))
    options = {**OPTIONS, **METHODS["fedgmm-sgd"]}
    sites = InMemorySites(files, tmp_path)

    def join(_, requests):
        rounds = {r.facts["round"] for r in requests.values() if r.kind == "round"}
        if rounds == {6} and len(sites.settings) == 3:
            sites.add(late)

    sites.before_ask = join
    settings = federation_settings(3, **options)
    run_federation(settings, sites, tmp_path / "server")
    best, last = best_round(tmp_path)
    assert open_run(tmp_path / "sites/zz").model.names == ["zz"]
    shared = open_run(tmp_path / "server").model.prediction
    own = open_run(tmp_path / "sites/zz").model.prediction
    assert last > best
    np.testing.assert_array_equal(own.gaussians.means, shared.gaussians.means)
