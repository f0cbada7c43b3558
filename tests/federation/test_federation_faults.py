"""Sites and servers that die, come late, come back or do not fit."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fedgmm.federation.server import run_federation, serve_model
from fedgmm.federation.settings import FederationError
from fedgmm.runs import open_run
from in_memory_sites import InMemorySites, Killed, federate, federation_settings
from small_runs import draw_rows, write_csv

pytestmark = pytest.mark.usefixtures("blank_reports", "no_metrics", "quick_looks")

SIZE = {"components": 2, "learners": 2, "covariance_type": "full", "dtype": "float64"}


def history(home):
    return [json.loads(line) for line in (home / "server/history.jsonl").open()]


def shared_numbers(home):
    prediction = open_run(home / "server").model.prediction
    numbers = dict(prediction.learners)
    if prediction.gaussians is not None:
        numbers |= {
            "means": prediction.gaussians.means,
            "covariances": prediction.gaussians.covariances,
        }
    return {name: value.double().numpy() for name, value in numbers.items()}


def assert_same_end(home, other):
    here, there = shared_numbers(home), shared_numbers(other)
    assert here.keys() == there.keys()
    for name, value in here.items():
        np.testing.assert_array_equal(value, there[name], err_msg=name)
    for name in ("oslo", "bergen", "tromso"):
        a, b = (open_run(place / "sites" / name).model for place in (home, other))
        if a.prediction.client_weights is not None:
            np.testing.assert_array_equal(a.client_weights, b.client_weights)


# ---------------------------------------------------------------------- dead servers


def dies_at(exchange):
    """Return a callback that kills the server at an exchange."""

    def die(number, _):
        if number == exchange:
            raise Killed

    return die


@pytest.mark.parametrize(
    "algorithm",
    [
        "fedgmm",
        *(pytest.param(a, marks=pytest.mark.slow) for a in ("pfedme", "clustered", "fedavg+")),
    ],
)
@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_a_server_that_dies_in_any_exchange_ends_the_same(files, tmp_path, algorithm, when):
    options = {**SIZE, "rounds": 2, "algorithm": algorithm}
    sites, _ = federate(files, tmp_path / "whole", **options)
    for exchange in range(1, len(sites.asked) + 1):
        home = tmp_path / f"died-{exchange}"
        broken = InMemorySites(files, home)
        setattr(broken, f"{when}_ask", dies_at(exchange))
        with pytest.raises(Killed):
            federate(files, home, sites=broken, **options)
        again = InMemorySites(files, home)
        federate(files, home, sites=again, **options)
        assert_same_end(home, tmp_path / "whole")
        lost = len(broken.asked) + len(again.asked) - len(sites.asked)
        assert lost <= 1 + (exchange if exchange <= 3 else 1)  # at most one round, and a greeting
        assert [entry["round"] for entry in history(home)] == [1.0, 2.0]


def with_known_keys(files, home, **settings):
    """Sites whose random weights of rows are the same in every folder."""
    sites = InMemorySites(files, home, **settings)
    for own in sites.settings.values():
        own.out.mkdir(parents=True, exist_ok=True)
        (own.out / "row_weights.key").write_bytes(bytes(32))
    return sites


def dies_with(kind):
    """Return a callback that kills the server at requests of a kind."""

    def die(_, requests):
        if any(request.kind == kind for request in requests.values()):
            raise Killed

    return die


def dies_again_and_again(make_sites, home, kinds, **options):
    """Kill the server at its requests, four times per kind, and let it finish; return all requests."""
    requests = []

    def look(name, request, reply):
        facts = {n: v for n, v in request.facts.items() if n not in ("ticket", "mask")}
        arrays = {n: v.tobytes() for n, v in request.arrays.items() if not n.startswith("mask/")}
        requests.append((name, request.kind, facts, arrays))
        return reply

    for kind in kinds:
        for attempt in range(4):
            sites = make_sites()
            sites.tamper = look
            setattr(sites, f"{('before', 'after')[attempt % 2]}_ask", dies_with(kind))
            with pytest.raises(Killed):
                federate(None, home, sites=sites, **options)
    sites = make_sites()
    sites.tamper = look
    federate(None, home, sites=sites, **options)
    return requests


@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.slow), {"min_rows": 5, "blur": 0.1}]
)
def test_a_server_may_die_many_times_at_every_request(files, tmp_path, monkeypatch, settings):
    # the id of the run decides the random weights of rows
    same_id = SimpleNamespace(token_hex=lambda size: "ab" * size)
    monkeypatch.setattr("fedgmm.federation.server.secrets", same_id)
    options = {**SIZE, "rounds": 2}
    whole = with_known_keys(files, tmp_path / "whole", **settings)
    federate(files, tmp_path / "whole", sites=whole, **options)
    home = tmp_path / "died"
    requests = dies_again_and_again(
        lambda: with_known_keys(files, home, **settings),
        home,
        ("hello", "start", "assigned", "round", "finish"),
        **options,
    )
    assert_same_end(home, tmp_path / "whole")
    for kind in ("start", "assigned"):
        asked = [one for one in requests if one[:2] == ("oslo", kind)]
        assert asked
        assert all(one == asked[0] for one in asked)
    assert not (home / "server/federation-start.json").exists()


def test_a_start_is_repeated_unchanged_if_other_sites_are_there(files, tmp_path):
    """The means of the start were made without bergen, which then replies, while oslo does not."""
    options = {**SIZE, "rounds": 2, "min_clients": 2}
    first = InMemorySites(files, tmp_path)
    first.down = {"bergen"}
    first.before_ask = dies_with("assigned")
    hello = first.ask

    def all_say_hello(requests, timeout):
        first.down = set() if any(q.kind == "hello" for q in requests.values()) else {"bergen"}
        return hello(requests, timeout)

    first.ask = all_say_hello
    with pytest.raises(Killed):
        federate(files, tmp_path, sites=first, **options)
    replies = []
    again = InMemorySites(files, tmp_path)
    again.down = {"oslo"}
    again.after_ask = lambda number, requests: (
        again.down.clear() if "assigned" in again.asked[-1] else None
    )
    again.tamper = lambda name, request, reply: replies.append(request.kind) or reply
    federate(files, tmp_path, sites=again, **options)
    assert "start" not in replies  # its totals are in the server's folder
    assert replies.count("assigned") == 2
    assert replies.count("round") >= 4


def test_other_settings_before_the_first_round_start_a_new_run(files, tmp_path):
    sites = InMemorySites(files, tmp_path)
    sites.before_ask = dies_at(1)
    with pytest.raises(Killed):
        federate(files, tmp_path, sites=sites, **SIZE, rounds=2)
    _, lines = federate(files, tmp_path, **{**SIZE, "components": 3}, rounds=2)
    assert any("settings changed" in line for line in lines)
    (tmp_path / "server/federation-start.json").write_text("{")
    (tmp_path / "server/checkpoint/progress.safetensors").unlink()
    (tmp_path / "server/metrics.json").unlink()
    with pytest.raises(FederationError, match="damaged"):
        federate(files, tmp_path, **SIZE, rounds=2)


def test_a_server_that_dies_in_a_score_asks_for_the_same_score(files, tmp_path):
    """The sites reply in another order and one is away, so the repeated round differs."""
    options = {**SIZE, "rounds": 3, "patience": 3, "min_clients": 2}
    for attempt in range(8):
        sites = InMemorySites(files, tmp_path)
        sites.down = {"bergen"} if attempt % 2 else set()
        sites.after_ask = dies_with(("score", "round")[attempt // 2 % 2])
        with pytest.raises(Killed):
            federate(files, tmp_path, sites=sites, **options, round_timeout=0.1)
    federate(files, tmp_path, **options)
    assert [entry["round"] for entry in history(tmp_path)] == [1.0, 2.0, 3.0]


def test_a_server_that_dies_in_short_runs_repeats_them(files, tmp_path, monkeypatch):
    """A short run has no checkpoint, so it is repeated from its first round, under its own id."""

    def two_trials(options, choices, *, score, **_):
        fixed = replace(options, components=2, learners=2, rounds=2)
        scores = [score(replace(fixed, components=m), "labels") for m in (1, 2)]
        assert all(np.isfinite(scores))
        return fixed, None

    monkeypatch.setattr("fedgmm.federation.server.choose_sizes", two_trials)
    options = {"rounds": 2, "components": "auto", "learners": "auto", "dtype": "float64"}
    federate(files, tmp_path / "whole", **options)
    home = tmp_path / "died"
    for _ in range(3):
        sites = InMemorySites(files, home)
        sites.after_ask = dies_with("score")
        with pytest.raises(Killed):
            federate(files, home, sites=sites, **options)
    federate(files, home, **options)
    assert_same_end(home, tmp_path / "whole")


@pytest.mark.slow
def test_a_server_that_dies_during_a_warm_up_ends_the_same(files, tmp_path):
    options = {**SIZE, "rounds": 4, "warmup": 2, "solver": "sgd"}
    sites, _ = federate(files, tmp_path / "whole", **options)
    for exchange in range(2, len(sites.asked) + 1):
        home = tmp_path / f"died-{exchange}"
        broken = InMemorySites(files, home)
        broken.after_ask = dies_at(exchange)
        with pytest.raises(Killed):
            federate(files, home, sites=broken, **options)
        federate(files, home, **options)
        assert_same_end(home, tmp_path / "whole")


def test_a_finished_run_is_left_alone(files, tmp_path):
    federate(files, tmp_path, **SIZE, rounds=2)
    before = (tmp_path / "server/metrics.json").read_bytes()
    sites, lines = federate(files, tmp_path, **SIZE, rounds=2)
    assert lines == ["the run is finished already"]
    assert sites.asked == []
    assert (tmp_path / "server/metrics.json").read_bytes() == before


def test_a_run_goes_on_with_its_own_settings_only(files, tmp_path):
    sites = InMemorySites(files, tmp_path)
    sites.before_ask = dies_at(5)
    with pytest.raises(Killed):
        federate(files, tmp_path, sites=sites, **SIZE, rounds=4)
    with pytest.raises(FederationError, match=r"holds a federation with components=2, not 3"):
        federate(files, tmp_path, **{**SIZE, "components": 3}, rounds=4)
    with pytest.raises(FederationError, match="tables were read with other options"):
        federate(files, tmp_path, **SIZE, rounds=4, table={"ignore": ("dose",)})
    checkpoint = tmp_path / "server/checkpoint/progress.safetensors"
    data = bytearray(checkpoint.read_bytes())
    data[-3] ^= 1
    checkpoint.write_bytes(data)
    with pytest.raises(FederationError, match="checksum"):
        federate(files, tmp_path, **SIZE, rounds=4)


def test_a_folder_with_other_things_is_refused(files, tmp_path):
    (tmp_path / "server").mkdir()
    (tmp_path / "server/thesis.txt").write_text("all my work")
    with pytest.raises(FederationError, match="not empty"):
        federate(files, tmp_path, **SIZE)
    with pytest.raises(FederationError, match="finished"):
        serve_model(federation_settings(3), InMemorySites(files, tmp_path), tmp_path / "none")


# ---------------------------------------------------------------------- dead clients


def test_a_round_closes_without_the_dead(files, tmp_path):
    sites = InMemorySites(files, tmp_path)

    def fail(_, requests):
        rounds = [q.facts["round"] for q in requests.values() if q.kind == "round"]
        sites.down = {"bergen"} if rounds and rounds[0] in (2, 3) else set()

    sites.before_ask = fail
    _, lines = federate(files, tmp_path, sites=sites, **SIZE, rounds=5, min_clients=2)
    entries = history(tmp_path)
    assert [entry["answered"] for entry in entries] == [3, 2, 2, 3, 3]
    assert entries[1]["dropped"] == {"bergen": "no reply within 5 s"}
    assert "dropped" not in entries[3]
    assert "round 2: no update from bergen: no reply within 5 s" in lines


def test_those_who_miss_rounds_end_as_in_one_process(files, tmp_path):
    """A client that misses rounds keeps its weights, even if its reply came too late to count."""
    from fedgmm.data.tables.loading import load_federation
    from fedgmm.data.tables.preprocessing import TableOptions
    from fedgmm.federation.messages import Failure
    from fedgmm.training.in_process import train

    missed = {("bergen", 2), ("bergen", 3), ("oslo", 4)}
    sites = InMemorySites(files, tmp_path)

    def lose(name, request, reply):
        late = request.kind == "round" and (name, request.facts["round"]) in missed
        return Failure("no reply within 5 s") if late else reply

    sites.tamper = lose
    federate(files, tmp_path, sites=sites, **SIZE, rounds=6, min_clients=2)
    dataset, _, _ = load_federation(files, TableOptions("state"))
    model = train(
        dataset,
        rounds=6,
        standardise=False,
        answers=lambda number, name: (name, number) not in missed,
        **SIZE,
    )
    for name in model.names:
        own = open_run(tmp_path / "sites" / name).model
        wanted = model.client_weights[model.names.index(name)]
        np.testing.assert_allclose(own.client_weights[0], wanted, atol=1e-10)


def test_a_quorum_of_one_is_reported_in_the_singular(files, tmp_path):
    sites, waited = InMemorySites(files, tmp_path), []

    def fail(number, _):
        sites.down = {"bergen", "oslo", "tromso"} if 5 <= number < 9 else set()

    sites.before_ask = fail
    federate(files, tmp_path, sites=sites, **SIZE, rounds=4, min_clients=1, notify=waited.append)
    assert any("0 of at least 1 client has replied; waiting for bergen" in line for line in waited)


def test_below_the_quorum_the_server_waits_and_says_for_whom(files, tmp_path):
    sites, waited = InMemorySites(files, tmp_path), []

    def fail(number, _):
        sites.down = {"oslo", "tromso"} if 5 <= number < 9 else set()

    sites.before_ask = fail
    federate(files, tmp_path, sites=sites, **SIZE, rounds=4, min_clients=2, notify=waited.append)
    assert "round 2: 1 of at least 2 clients have replied; waiting for oslo, tromso" in waited
    assert [entry["answered"] for entry in history(tmp_path)] == [3, 3, 3, 3]
    # bergen's reply of the round was kept meanwhile
    assert sites.asked[5] == ["round", "round"]
    federate(files, tmp_path / "whole", **SIZE, rounds=4)
    assert_same_end(tmp_path, tmp_path / "whole")


def test_a_site_that_is_not_connected_is_waited_for(files, tmp_path):
    sites, lines = InMemorySites(files, tmp_path), []

    def leave(number, _):
        if number == 5:
            sites.gone = {"oslo"}

    def notify(line):
        lines.append(line)
        if "waiting for oslo" in line:
            sites.gone = set()

    sites.before_ask = leave
    federate(files, tmp_path, sites=sites, **SIZE, rounds=3, notify=notify)
    assert any(line.startswith("round 2: 2 of at least 3") for line in lines)
    assert len(history(tmp_path)) == 3


def test_a_site_that_comes_back_as_another_node_goes_on_with_its_weights(files, tmp_path):
    sites = InMemorySites(files, tmp_path)

    def restart(number, _):
        if number == 5:  # in the middle of round 2
            sites.settings["node-9"] = sites.settings.pop("node-0")

    sites.before_ask = restart
    _, lines = federate(files, tmp_path, sites=sites, **SIZE, rounds=4)
    assert "oslo is back" in lines
    federate(files, tmp_path / "whole", **SIZE, rounds=4)
    assert_same_end(tmp_path, tmp_path / "whole")


def test_a_name_is_free_again_once_its_dead_connection_is_gone(files, tmp_path):
    """A site that starts again while its old connection still seems alive."""
    sites = InMemorySites(files, tmp_path)

    def restart(number, _):
        if number == 5:  # the old connection stays in the list, but does not reply
            sites.settings["node-9"] = sites.settings["node-0"]
            sites.dead = {"node-0"}
        if number == 9:
            del sites.settings["node-0"]

    sites.before_ask = restart
    lines = []
    settings = federation_settings(3, **SIZE, rounds=9, min_clients=2)
    run_federation(settings, sites, tmp_path / "server", notify=lines.append)
    assert "a second client with the name 'oslo' is refused" in lines
    assert lines.index("oslo is back") > lines.index(
        "a second client with the name 'oslo' is refused"
    )
    answered = [entry["answered"] for entry in history(tmp_path)]
    assert answered[0] == answered[-1] == 3
    assert 2 in answered


def test_a_site_that_lost_its_disk_starts_as_a_newcomer(files, tmp_path):
    import shutil

    sites = InMemorySites(files, tmp_path)

    def burn(number, _):
        if number == 6:
            shutil.rmtree(tmp_path / "sites/oslo")

    sites.before_ask = burn
    federate(files, tmp_path, sites=sites, **SIZE, rounds=4)
    assert any("the state after round 2 is missing" in line for line in sites.lines["oslo"])
    assert len(history(tmp_path)) == 4


def test_a_site_keeps_two_states_at_most(files, tmp_path):
    federate(files, tmp_path, **SIZE, rounds=5)
    states = [path.name for path in (tmp_path / "sites/oslo/federation").rglob("*.safetensors")]
    assert sorted(states) == ["main-000004.safetensors", "main-000005.safetensors"]


# ---------------------------------------------------------------------- newcomers


def test_late_joiners_take_part_from_the_next_round(files, tmp_path):
    late = write_csv(tmp_path / "late.csv", draw_rows(np.random.default_rng(8), 40))
    sites = InMemorySites(files, tmp_path)

    def join(_, requests):
        if any(q.facts.get("round") == 2 for q in requests.values()) and len(sites.settings) == 3:
            sites.add(late)

    sites.after_ask = join
    settings = federation_settings(3, **SIZE, rounds=5)
    lines = []
    run_federation(settings, sites, tmp_path / "server", notify=lines.append)
    assert "late is here" in lines
    assert [entry["answered"] for entry in history(tmp_path)] == [3, 3, 3, 4, 4]
    assert open_run(tmp_path / "sites/late").model.names == ["late"]


@pytest.mark.parametrize("algorithm", ["clustered", "pfedme", "local", "fedavg+"])
def test_late_joiners_of_other_methods(files, tmp_path, algorithm):
    late = write_csv(tmp_path / "a-late-one.csv", draw_rows(np.random.default_rng(8), 40))
    sites = InMemorySites(files, tmp_path)

    def join(number, _):
        if number == 3:
            sites.add(late)

    sites.before_ask = join
    settings = federation_settings(3, **SIZE, rounds=5, algorithm=algorithm)
    run_federation(settings, sites, tmp_path / "server")
    assert history(tmp_path)[-1]["answered"] == 4
    assert open_run(tmp_path / "sites/a-late-one").model.names == ["a-late-one"]


@pytest.mark.parametrize("killed", [False, True])
def test_codes_of_clusters_stay_when_a_client_joins_late(files, tmp_path, monkeypatch, killed):
    """A client whose name comes first joins while a round is below its quorum."""
    from fedgmm.methods.clustered import CLIENTS, ClusteredFL

    late = write_csv(tmp_path / "a-late-one.csv", draw_rows(np.random.default_rng(8), 40))
    sites, seen = InMemorySites(files, tmp_path), []

    def join(number, _):
        sites.down = {"tromso"} if number in (3, 4) else set()
        if number == 3:
            sites.add(late)

    step = ClusteredFL.server_step

    def look(self, shared, sums, number):
        rows = dict(zip(sums[CLIENTS].tolist(), sums["rows"].tolist(), strict=True))
        seen.append((rows, len(shared.clusters)))
        return step(self, shared, sums, number)

    sites.before_ask = join
    monkeypatch.setattr(ClusteredFL, "server_step", look)
    settings = federation_settings(3, **SIZE, rounds=3, algorithm="clustered")
    if killed:  # in the last round, after the late client was admitted
        sites.after_ask = lambda _, requests: dies_at(3)(
            max(r.facts.get("round", 0) for r in requests.values()), requests
        )
        with pytest.raises(Killed):
            run_federation(settings, sites, tmp_path / "server")
        sites.after_ask = lambda *_: None
    run_federation(settings, sites, tmp_path / "server")
    assert [clients for _, clients in seen] == [3, 4, 4]
    bergen, oslo, tromso = (seen[0][0][code] for code in range(3))
    assert [rows for rows, _ in seen] == [
        {0: bergen, 1: oslo, 2: tromso},
        {0: bergen, 1: oslo, 2: tromso, 3: 24.0},
        {0: bergen, 1: oslo, 2: tromso, 3: 24.0},
    ]
    model = open_run(tmp_path / "server").model
    assert model.names == ["bergen", "oslo", "tromso", "a-late-one"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"without": ("age",)}, "'age'"),
        ({"text": "age"}, "'age'"),
        ({"label": "dying"}, "label"),
    ],
)
def test_a_late_table_that_does_not_fit_is_refused(files, tmp_path, change, word):
    rows = draw_rows(np.random.default_rng(8), 40)
    for row in rows:
        row |= {change["text"]: "secret"} if "text" in change else {}
        row |= {"state": change["label"]} if "label" in change else {}
    late = write_csv(tmp_path / "late.csv", rows, change.get("without", ()))
    sites = InMemorySites(files, tmp_path)

    def join(number, _):
        if number == 5:
            sites.add(late)

    sites.before_ask = join
    lines = []
    settings = federation_settings(3, **SIZE, rounds=6)
    run_federation(settings, sites, tmp_path / "server", notify=lines.append)
    (refusal,) = (line for line in lines if "late is refused" in line)
    assert word in refusal
    assert not any(
        "secret" in line or "dying" in line or str(tmp_path / "late") in line for line in lines
    )
    assert any("refused" in line for line in sites.lines["late"])
    assert [entry["answered"] for entry in history(tmp_path)] == [3] * 6
    assert any("refused" in kinds for kinds in sites.asked)


def test_a_second_site_of_one_name_is_refused(files, tmp_path):
    sites = InMemorySites(files, tmp_path)
    sites.add(files[0], name="bergen", out=tmp_path / "sites/impostor")
    lines = []
    settings = federation_settings(3, **SIZE, rounds=3)
    run_federation(settings, sites, tmp_path / "server", notify=lines.append)
    assert "a second client with the name 'bergen' is refused" in lines
    assert [entry["answered"] for entry in history(tmp_path)] == [3] * 3


def test_a_table_that_disagrees_at_the_start_is_refused_where_enough_are_left(files, tmp_path):
    rows = draw_rows(np.random.default_rng(8), 40)
    odd = write_csv(tmp_path / "zz.csv", [{**row, "dose": "2020-01-01"} for row in rows])
    sites = InMemorySites([*files, odd], tmp_path)
    _, lines = federate([], tmp_path, sites=sites, **SIZE, rounds=2, min_clients=3)
    assert any(line.startswith("zz is refused: the column 'dose'") for line in lines)
    with pytest.raises(FederationError, match=r"Client 'zz': the column 'dose'"):
        federate([*files, odd], tmp_path / "strict", **SIZE, rounds=2)


def test_too_few_clients_within_the_time(files, tmp_path):
    sites = InMemorySites(files[:2], tmp_path)
    settings = federation_settings(3, **SIZE, start_timeout=0.05)
    with pytest.raises(FederationError, match="Only 2 of 3 clients came within"):
        run_federation(settings, sites, tmp_path / "server")


def test_a_table_that_cannot_be_read_is_reported_without_its_path(files, tmp_path):
    (tmp_path / "broken.csv").write_text("age,dose\n1,2\n")
    sites = InMemorySites([*files, tmp_path / "broken.csv"], tmp_path)
    lines = []
    settings = federation_settings(4, **SIZE, start_timeout=0.2)
    with pytest.raises(FederationError, match="Only 3 of 4"):
        run_federation(settings, sites, tmp_path / "server", notify=lines.append)
    (line,) = (line for line in lines if line.startswith("a client cannot take part"))
    assert "'state'" in line
    assert "broken" not in line


# ---------------------------------------------------------------------- after the end


def test_a_site_that_missed_the_end_fetches_its_model_later(files, tmp_path):
    sites = InMemorySites(files, tmp_path)

    def leave(_, requests):
        sites.gone = {"oslo"} if any(q.kind == "finish" for q in requests.values()) else sites.gone

    sites.before_ask = leave
    _, lines = federate(files, tmp_path, sites=sites, **SIZE, rounds=3, round_timeout=0.05)
    assert "These clients have not fetched their model yet: oslo." in lines
    assert not (tmp_path / "sites/oslo/metrics.json").exists()
    back = InMemorySites(files, tmp_path)
    ends = time.monotonic() + 1
    settings = federation_settings(3, **SIZE, rounds=3)
    serve_model(
        settings,
        back,
        tmp_path / "server",
        stop=lambda: (tmp_path / "sites/oslo/metrics.json").exists() or time.monotonic() > ends,
    )
    federate(files, tmp_path / "whole", **SIZE, rounds=3)
    assert_same_end(tmp_path, tmp_path / "whole")


def test_diverging_training_ends_with_the_last_good_state(files, tmp_path):
    options = {**SIZE, "dtype": "float32", "solver": "sgd", "lr": 1e30, "learner": "mlp"}
    _, lines = federate(files, tmp_path, **options, rounds=5)
    assert any("training diverged on client" in line for line in lines)
    metrics = json.loads((tmp_path / "server/metrics.json").read_text())
    assert "A smaller learning rate" in metrics["stopped"]
    model = open_run(tmp_path / "sites/oslo").model
    assert np.isfinite(model.predict_proba(np.zeros((2, model.input_shape[0])))).all()
