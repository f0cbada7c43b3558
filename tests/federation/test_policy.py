"""A hostile server and an unmodified site: it learns no row, no label and no rare text."""

import contextlib
import json

import numpy as np
import pytest

from fedgmm.data.tables.errors import TableError
from fedgmm.federation.messages import ERROR_CODES, Message, coded
from fedgmm.federation.policy import (
    LimitError,
    Policy,
    RefusedRequestError,
    read_record,
)
from fedgmm.federation.server import check_start
from fedgmm.federation.settings import FederationError, SiteSettings
from fedgmm.federation.site import Site, SiteError, UnfitError
from fedgmm.federation.summaries import SummaryError
from fedgmm.federation.wire import WireError
from fedgmm.methods.base import DivergedError
from fedgmm.privacy.accounting import Release, mu_of
from fedgmm.privacy.ledger import LedgerError
from fedgmm.privacy.settings import Privacy
from fedgmm.runs.folder import RunError
from fedgmm.training.selection import MOST_TRIALS
from in_memory_sites import InMemorySites, federate, federation_settings
from small_runs import works

pytestmark = pytest.mark.usefixtures("blank_reports", "no_metrics", "quick_looks")

SIZE = {"components": 2, "learners": 2, "covariance_type": "full", "rounds": 3}


@pytest.fixture(scope="module")
def honest(files, tmp_path_factory):
    """The requests of an honest run to the site oslo, in their order."""
    requests = []

    def look(name, request, reply):
        if name == "oslo":
            requests.append(request)
        return reply

    home = tmp_path_factory.mktemp("honest")
    sites = InMemorySites(files, home)
    sites.tamper = look
    federate(files, home, sites=sites, **SIZE)
    return requests


@pytest.fixture
def site(files, tmp_path):
    return Site(SiteSettings((files[0],), tmp_path / "oslo"))


def ask(site, request, arrays=None, **facts):
    return site.reply(Message(request.kind, arrays or request.arrays, {**request.facts, **facts}))


def policy_of(home, **limits):
    return Policy(SiteSettings((home / "oslo.csv",), home, **limits))


def of_kind(requests, kind):
    return [one for one in requests if one.kind == kind]


def test_an_honest_run_is_served_and_may_be_repeated(site, honest):
    """A lost reply is sent again, and it is the same."""
    for request in honest:
        first, second = ask(site, request), ask(site, request)
        for name, array in first.arrays.items():
            np.testing.assert_array_equal(array, second.arrays[name])


def test_a_split_that_leaves_one_row_is_refused(site, honest):
    (hello, *_) = of_kind(honest, "hello")
    table = {**hello.facts["table"], "split": [1e-9, 0.0, 1.0 - 1e-9]}
    with pytest.raises(SiteError, match="third of its rows"):
        ask(site, hello, table=table)


def test_another_split_or_seed_is_refused_after_the_first(site, honest):
    (hello, *_) = of_kind(honest, "hello")
    ask(site, hello)
    for change in ({"seed": 1}, {"split": [0.5, 0.2, 0.3]}, {"ignore": ["age"]}):
        with pytest.raises(SiteError, match="read and split"):
            ask(site, hello, table={**hello.facts["table"], **change})


def test_a_thousand_shifted_half_spaces_get_one_reply(site, honest):
    """Two half-spaces that differ by one row would give that row away."""
    for request in honest[: [one.kind for one in honest].index("assigned")]:
        ask(site, request)
    assigned, replies = of_kind(honest, "assigned")[0], 0
    for shift in np.linspace(-3.0, 3.0, 1000):
        means = np.zeros_like(assigned.arrays["means"])
        means[:, 0] = shift - 1e6, shift + 1e6
        with contextlib.suppress(SiteError):
            ask(site, assigned, {"means": means})
            replies += 1
    assert replies == 1


def test_a_round_is_asked_once_in_order_and_not_beyond_the_plan(site, honest):
    rounds = of_kind(honest, "round")
    for request in honest:
        if request is rounds[1]:
            break
        ask(site, request)
    means = {**rounds[0].arrays}
    name = next(name for name in means if name.endswith("means"))
    means[name] = means[name] + 1e-3
    with pytest.raises(SiteError, match="again, with other numbers"):
        ask(site, rounds[0], means)
    ask(site, rounds[1])
    with pytest.raises(SiteError, match="again, with other numbers"):
        ask(site, rounds[0], means)
    with pytest.raises(SiteError, match="beyond the last"):
        ask(site, rounds[1], round=4)


def test_a_finished_site_does_not_judge_another_model(site, honest):
    """Each model would say how many labels of the test rows it gets right, if metrics are shared."""
    for request in honest:
        ask(site, request)
    finish = of_kind(honest, "finish")[0]
    name = next(name for name in finish.arrays if name.endswith("means"))
    with pytest.raises(SiteError, match="twice"):
        ask(site, finish, {**finish.arrays, name: finish.arrays[name] + 1.0})


def test_more_centroids_than_gaussians_are_refused(site, honest):
    """Many centroids would be means of two rows each."""
    with pytest.raises(SiteError, match="more centroids"):
        ask(site, of_kind(honest, "start")[0], clusters=27)


def test_other_options_preprocessing_or_more_rounds_are_refused(site, honest):
    for request in honest[:3]:
        ask(site, request)
    start = of_kind(honest, "start")[0]
    options = start.facts["options"]
    with pytest.raises(SiteError, match="other training options"):
        ask(site, start, options={**options, "seed": 7})
    with pytest.raises(SiteError, match="--max-rounds 50"):
        ask(site, start, options={**options, "rounds": 50})
    columns = json.loads(json.dumps(start.facts["preprocessing"]))
    columns["columns"][0]["mean"] = 1e9
    with pytest.raises(SiteError, match="another preprocessing"):
        ask(site, start, preprocessing=columns)


def test_a_second_run_needs_the_owner(site, honest, files):
    for request in honest:
        ask(site, request)
    other = {"run": "ab" * 8}
    with pytest.raises(SiteError, match="--forget"):
        ask(site, of_kind(honest, "round")[0], **other)
    again = Site(SiteSettings((files[0],), site.settings.out))  # a restart forgets nothing
    with pytest.raises(SiteError, match="--forget"):
        ask(again, of_kind(honest, "round")[0], **other)
    told = Site(SiteSettings((files[0],), site.settings.out, forget=True))
    assert ask(told, of_kind(honest, "round")[0], **other).kind == "reply"


def test_a_server_may_restart_a_few_times_before_the_first_round(site, honest):
    start = of_kind(honest, "start")[0]
    for k in range(3):
        ask(site, start, run=f"{k:016x}")
    with pytest.raises(SiteError, match="another run"):
        ask(site, start, run="f" * 16)


def test_a_plan_with_automatic_sizes_has_room_for_every_short_run(site, honest):
    """The server would otherwise wait without end in a search that finds a gain in every step."""
    hello, first = of_kind(honest, "hello")[0], of_kind(honest, "round")[0]
    ask(site, hello, plan={**hello.facts["plan"], "trials": True})
    for trial in range(MOST_TRIALS + 1):
        assert ask(site, first, run=f"{trial:016x}").kind == "reply"
    with pytest.raises(SiteError, match="another run"):
        ask(site, first, run="f" * 16)


def test_rare_texts_do_not_leave_the_site(tmp_path, honest):
    """A remark that one patient has is not a category for all sites."""
    rows = ["dose,remark,state"]
    rng = np.random.default_rng(0)
    for k in range(60):
        remark = "Mr. Smith called" if k == 7 else ("calm", "anxious")[k % 2]
        rows.append(f"{rng.normal():.3f},{remark},{('ill', 'well')[k % 2]}")
    (tmp_path / "oslo.csv").write_text("\n".join(rows))
    (hello, *_) = of_kind(honest, "hello")
    site = Site(SiteSettings((tmp_path / "oslo.csv",), tmp_path / "out"))
    reply = ask(site, hello)
    (remark,) = [c for c in reply.facts["summary"]["columns"] if c["name"] == "remark"]
    assert set(remark["categories"]) == {"calm", "anxious"}
    assert "Smith" not in json.dumps(reply.facts)


def test_rare_labels_do_not_leave_the_site_unless_their_owner_lists_them(tmp_path, honest):
    rng = np.random.default_rng(0)
    states = ["ill", "well"] * 30 + ["canary"]
    lines = [f"{rng.normal():.3f},{state}" for state in states]
    (tmp_path / "oslo.csv").write_text("\n".join(["dose,state", *lines]))
    (hello, *_) = of_kind(honest, "hello")
    site = Site(SiteSettings((tmp_path / "oslo.csv",), tmp_path / "out"))
    with pytest.raises(SiteError, match="--labels") as refusal:
        ask(site, hello)
    assert "canary" not in str(refusal.value)
    listed = Site(SiteSettings((tmp_path / "oslo.csv",), tmp_path / "other", labels=("canary",)))
    assert ask(listed, hello).facts["summary"]["labels"]["canary"] == 1


def test_no_file_of_the_server_holds_a_value_of_a_row(tmp_path):
    """Rare texts, values that cannot be read, rare labels: at most the site's own log quotes them."""
    rng = np.random.default_rng(1)
    header = "age,dose,remark,state"
    for name, value, remark, state in (
        ("oslo", "1.5", "canaryremark", "ill"),
        ("bergen", "canaryvalue", "calm", "ill"),
        ("tromso", "1.5", "calm", "canarylabel"),
    ):
        rows = []
        for k in range(60):
            mood, own = ("calm", "anxious")[k % 2], ("ill", "well")[k % 3 % 2]
            rows.append(f"{rng.normal():.3f},{rng.normal():.3f},{mood},{own}")
        rows.append(f"0.987654321,{value},{remark},{state}")
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *rows]))
    files = sorted(tmp_path.glob("*.csv"))
    sites = InMemorySites(files, tmp_path, min_rows=5, blur=0.1)
    lines = []
    with contextlib.suppress(RuntimeError):  # the server waits for all three
        federate(files, tmp_path, sites=sites, notify=lines.append, start_timeout=0.2, **SIZE)
    written = "\n".join(lines)
    for path in (tmp_path / "server").rglob("*"):
        if path.is_file():
            written += path.read_text(errors="replace")
    assert "bergen" in written
    for secret in ("canary", "987654321"):
        assert secret not in written


def test_too_few_training_rows_are_refused(files, tmp_path, honest):
    site = Site(SiteSettings((files[0],), tmp_path / "oslo", min_rows=60))  # 54 of 90 rows train
    with pytest.raises(SiteError, match="training rows than min_rows"):
        ask(site, of_kind(honest, "start")[0])


def test_the_owner_sees_every_request_and_what_left(site, honest):
    for request in honest[:3]:
        ask(site, request)
    with pytest.raises(SiteError):
        ask(site, honest[2], options={**honest[2].facts["options"], "seed": 7})
    entries = list(read_record(site.settings.out))
    assert [one["request"] for one in entries[:3]] == [one.kind for one in honest[:3]]
    assert "other training options" in entries[-1]["refused"]
    assert entries[0]["texts"]
    assert entries[0]["bytes"] > 100
    printed = works("audit", site.settings.out).stdout
    assert "refused" in printed
    assert "hello" in printed


def test_nothing_leaves_without_a_record(site, honest):
    (site.settings.out / "audit.jsonl").mkdir(parents=True)  # a folder is in the way
    with pytest.raises(SiteError, match="folder"):
        ask(site, honest[0])


def test_a_damaged_agreement_is_reported(tmp_path):
    (tmp_path / "agreement.json").write_text("{")
    with pytest.raises(ValueError, match="--forget"):
        policy_of(tmp_path)


def test_a_refusal_changes_nothing(tmp_path, honest):
    policy = policy_of(tmp_path)
    policy.check(honest[0])
    before = (tmp_path / "agreement.json").read_bytes()
    bad = Message("hello", {}, {**honest[0].facts, "table": {"split": [0.9, 0, 0.1]}})
    with pytest.raises(RefusedRequestError):
        policy.check(bad)
    assert (tmp_path / "agreement.json").read_bytes() == before


# ---------------------------------------------------------------------- privacy

BUDGET = {"epsilon": 2.0, "delta": 1e-5, "unit": "row", "bounds": {"age": [-5.0, 5.0]}}
BUDGET |= {"secure_aggregation": True}


def with_privacy(request, **privacy):
    """A request of a run with this privacy."""
    privacy = {**BUDGET, **privacy}
    facts = {**request.facts, "privacy": privacy}
    if "plan" in facts:
        facts["plan"] = {**facts["plan"], "privacy": privacy}
    return Message(request.kind, request.arrays, facts)


def release_in(honest):
    """The first release of a run like an honest one."""
    start = of_kind(honest, "start")[0]
    return Message("release", {}, {**start.facts, "round": 0})


def agreed(home, honest, limits=None, **privacy):
    home.mkdir(exist_ok=True)
    policy = policy_of(home, **(limits or {}))
    policy.check(with_privacy(honest[0], **privacy))
    return policy


def test_a_site_with_a_limit_refuses_a_run_without_noise(files, tmp_path, honest):
    site = Site(SiteSettings((files[0],), tmp_path / "oslo", max_epsilon=4.0))
    for request in (honest[0], of_kind(honest, "start")[0]):
        with pytest.raises(SiteError, match="no differential privacy"):
            site.reply(request)
    assert "--max-epsilon" in site.unusable  # the client ends with this sentence


@pytest.mark.parametrize(
    ("limits", "word"),
    [({"max_epsilon": 1.5}, "max-epsilon"), ({"max_epsilon": 8, "max_delta": 1e-6}, "max-delta")],
)
def test_the_owners_limits_beat_the_server(tmp_path, honest, limits, word):
    with pytest.raises(LimitError, match=word):
        agreed(tmp_path, honest, limits)


def test_a_limit_of_epsilon_alone_allows_no_large_delta(tmp_path, honest):
    with pytest.raises(LimitError, match="max-delta"):
        agreed(tmp_path, honest, {"max_epsilon": 8}, delta=0.9)


def test_the_limit_counts_earlier_runs(tmp_path, honest):
    limits = {"max_epsilon": 2.5}
    policy = agreed(tmp_path / "oslo", honest, limits)
    start = with_privacy(release_in(honest))
    policy.check(start)
    policy.charge(start, Release(mu_of(2.0, 1e-5)), "table")
    policy = policy_of(tmp_path / "oslo", **limits)
    policy.forget()
    with pytest.raises(LimitError, match="of which 2 is spent"):
        policy.check(with_privacy(honest[0]))
    policy.check(with_privacy(honest[0], epsilon=0.5))


def test_a_run_does_not_release_more_than_its_plan(tmp_path, honest):
    policy = agreed(tmp_path / "oslo", honest)  # without limits of the owner
    start = with_privacy(release_in(honest))
    policy.check(start)
    policy.charge(start, Release(mu_of(2.0, 1e-5)), "table")
    with pytest.raises(LimitError, match="run's budget"):
        policy.charge(start, Release(0.05), "table")


def test_a_server_cannot_leave_out_the_noise_of_its_plan(tmp_path, honest):
    policy = agreed(tmp_path, honest, {"max_epsilon": 4.0})
    release = release_in(honest)
    for request in (
        release,
        with_privacy(release, epsilon=3.0),
        with_privacy(release, unit="client"),
    ):
        with pytest.raises(RefusedRequestError, match="other privacy"):
            policy.check(request)
    for kind in ("start", "round", "moments", "score"):
        with pytest.raises(RefusedRequestError, match="noisy sums only"):
            policy.check(with_privacy(Message(kind, {}, release.facts)))
    with pytest.raises(RefusedRequestError, match="plan"):
        policy.check(with_privacy(honest[0], epsilon=3.0))


def test_a_release_needs_agreed_privacy(tmp_path, honest):
    policy = policy_of(tmp_path)
    policy.check(honest[0])
    with pytest.raises(RefusedRequestError, match="no differential privacy"):
        policy.charge(of_kind(honest, "round")[0], Release(0.1), "table")


def test_invalid_privacy_is_refused(tmp_path, honest):
    for wrong in ({"epsilon": -1.0}, {"epsilon": 0}, {"noise": 0}, {"bounds": None}, {"delta": 2}):
        with pytest.raises(RefusedRequestError, match="not valid"):
            agreed(tmp_path, honest, **wrong)


def test_a_damaged_ledger_is_refused_before_anything_is_sent(files, tmp_path, honest):
    policy = agreed(tmp_path / "oslo", honest)
    policy.charge(with_privacy(release_in(honest)), Release(0.1), "table")
    policy.ledger.path.write_bytes(policy.ledger.path.read_bytes()[:-30])
    with pytest.raises(LedgerError, match="shortened"):
        Site(SiteSettings((files[0],), tmp_path / "oslo"))
    policy.forget()
    with pytest.raises(LedgerError, match="shortened"):
        policy.check(with_privacy(honest[0]))


SECRET = "Mr. Smith of row 7"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(f"invalid value {SECRET}"), "table"),
        (TableError("a.csv", SECRET, public=SECRET), "table"),
        (UnfitError(f"it has fewer rows than {SECRET}"), "table"),
        (WireError(SECRET), "sums"),
        (SummaryError(SECRET), "sums"),
        (OSError(SECRET), "folder"),
        (RunError(SECRET), "folder"),
        (LedgerError(SECRET), "ledger"),
        (KeyError(SECRET), "internal"),
        (ZeroDivisionError(SECRET), "internal"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_errors_of_a_protected_run_are_codes(site, honest, monkeypatch, error, code):
    """The text of an error could hold a value of a row; the owner's log has it."""
    lines = []
    site.notify = lines.append
    hello = with_privacy(honest[0], epsilon=None, delta=None, secure_aggregation=True)

    def fails(request):
        raise error

    monkeypatch.setattr(site, "_hello", fails)
    with pytest.raises(SiteError) as found:
        site.reply(hello)
    assert str(found.value) == coded(code)
    assert SECRET not in str(found.value)
    assert any(SECRET in line for line in lines)


def test_a_diverged_round_of_a_protected_run_is_a_code(site, honest, monkeypatch):
    def fails(request):
        raise DivergedError(reason=SECRET)

    monkeypatch.setattr(site, "_hello", fails)
    hello = with_privacy(honest[0], epsilon=None, delta=None, secure_aggregation=True)
    assert site.reply(hello).facts["diverged"] == coded("diverged")
    assert set(ERROR_CODES) >= {"diverged", "internal"}


def test_a_site_does_not_send_plain_sums_where_the_plan_has_noise(site, honest):
    with pytest.raises(SiteError, match="noise"):
        site.reply(with_privacy(honest[0], secure_aggregation=False))


def test_a_server_does_not_promise_noise_without_masks(tmp_path):
    settings = federation_settings(3, privacy=Privacy(**{**BUDGET, "secure_aggregation": False}))
    with pytest.raises(FederationError, match="secure_aggregation"):
        check_start(settings, tmp_path)
