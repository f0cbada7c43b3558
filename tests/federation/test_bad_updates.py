"""Hostile and broken clients: the server drops their updates, or the model stays finite."""

import json
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedgmm.core.sums import Sums, SumsError, Total
from fedgmm.federation.job import Job
from fedgmm.federation.messages import Failure, Message
from fedgmm.federation.wire import WireError, decode
from fedgmm.runs import open_run
from in_memory_sites import InMemorySites, Killed, federate, with_arrays, with_facts

pytestmark = pytest.mark.usefixtures("blank_reports", "no_metrics", "quick_looks")

KINDS = {
    "newton": {},
    "newton-float64": {"dtype": "float64"},
    "tied": {"covariance_type": "tied"},
    "diag": {"covariance_type": "diag"},
    "spherical": {"covariance_type": "spherical"},
    "mlp": {"solver": "sgd", "learner": "mlp"},
    "float16": {"solver": "sgd", "precision": "float16"},
    "fedem": {"algorithm": "fedem"},
    "fedavg": {"algorithm": "fedavg"},
    "clustered": {"algorithm": "clustered"},
    "pfedme": {"algorithm": "pfedme"},
    "local": {"algorithm": "local"},
}
SIZE = {"components": 2, "learners": 2, "covariance_type": "full", "rounds": 2}


class Honest:
    """The replies of honest sites in the second round, and the server that received them.

    The server dies after the last round, because no test looks at the models.
    """

    def __init__(self, files, home, options):
        self.rounds = {}

        def keep(name, request, reply):
            if request.kind == "round" and request.facts["round"] == 2:
                self.rounds[name] = (request, reply)
            return reply

        sites = InMemorySites(files, home, fresh=False)

        def die(_, requests):
            if any(request.kind == "finish" for request in requests.values()):
                raise Killed

        sites.tamper, sites.before_ask = keep, die
        with pytest.raises(Killed):
            federate(files, home, sites=sites, **{**SIZE, **options})
        request, self.reply = self.rounds["oslo"]
        self.job = Job.from_record(request.facts, "oslo")
        self.method = self.job.method
        self.dtypes = (self.job.learner_dtype, self.job.training_dtype)
        declared = self.method.declare_broadcast(self.job.columns)
        sent = {name: request.arrays[name] for name in declared}
        arrays = decode(sent, declared, *self.dtypes)
        self.shared = self.method.received(arrays, self.job.columns)
        self.declaration = self.method.declare_sums(self.job.columns)
        self.rows = self.reply.facts["rows"]
        self.others = [self.rounds[name][1] for name in ("bergen", "tromso")]

    def checked(self, reply):
        """The sums of a reply as the server reads and checks them."""
        gathered = [name for name, one in self.declaration.items() if one.gathered]
        sums = Sums(decode(reply.arrays, self.declaration, *self.dtypes), gathered)
        self.method.check(sums, reply.facts["rows"], self.declaration)
        return sums

    def outcome(self, arrays):
        """``"dropped"``, or the shared state after a round with this update."""
        try:
            sums = self.checked(Message("reply", arrays, {"rows": self.rows}))
        except (WireError, SumsError) as error:
            return "dropped" if str(error) else "dropped without a reason"
        total = Total()
        for code, own in enumerate([*map(self.checked, self.others), sums]):
            total.add(self.method.of_client(own, code))
        shared = self.method.admit(self.shared, len(self.others) + 1)
        shared, info = self.method.server_step(shared, total.result(), 2)
        assert np.isfinite(info.log_likelihood)
        return shared


def finite(value):
    if isinstance(value, torch.Tensor):
        return bool(torch.isfinite(value.double()).all())
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if is_dataclass(value):
        return all(finite(getattr(value, field.name)) for field in fields(value))
    return True


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    """Return the honest run with some options; each runs once."""
    found = {}

    def honest(**options):
        key = tuple(sorted(options.items()))
        if key not in found:
            found[key] = Honest(files, tmp_path_factory.mktemp("honest"), options)
        return found[key]

    return honest


@pytest.fixture(scope="module", params=KINDS)
def honest(request, run):
    return run(**KINDS[request.param])


def test_honest_updates_pass(honest):
    shared = honest.outcome(honest.reply.arrays)
    assert not isinstance(shared, str)
    assert finite(shared)


@given(data=st.data())
def test_one_entry_that_is_not_finite_is_enough(honest, data):
    floats = [n for n, a in honest.reply.arrays.items() if a.dtype.kind == "f" and a.size]
    name = data.draw(st.sampled_from(sorted(floats)))
    array = honest.reply.arrays[name].copy()
    array.flat[data.draw(st.integers(0, array.size - 1))] = data.draw(
        st.sampled_from([np.nan, np.inf, -np.inf])
    )
    assert honest.outcome({**honest.reply.arrays, name: array}) == "dropped"


@given(data=st.data())
def test_other_shapes_dtypes_and_names_are_dropped(honest, data):
    arrays = dict(honest.reply.arrays)
    name = data.draw(st.sampled_from(sorted(arrays)))
    array = arrays[name]
    match data.draw(st.sampled_from(["missing", "extra", "dtype", "longer", "axis", "giant"])):
        case "missing":
            del arrays[name]
        case "extra":
            arrays[
                data.draw(
                    st.sampled_from(["more", "learners/9.weight", "gaussians/third", "clients"])
                )
            ] = array
        case "dtype":
            kinds = {"float64", "float32", "float16", "int64", "uint8", "bool"} - {array.dtype.name}
            arrays[name] = array.astype(data.draw(st.sampled_from(sorted(kinds))))
        case "longer":
            arrays[name] = np.concatenate([np.atleast_1d(array)] * 2)
        case "axis":
            arrays[name] = array[None]
        case _:
            arrays[name] = np.zeros(10**7, dtype=array.dtype)
    assert honest.outcome(arrays) == "dropped"


@given(data=st.data())
def test_the_model_stays_finite_after_any_update(honest, data):
    arrays = dict(honest.reply.arrays)
    for name in data.draw(st.lists(st.sampled_from(sorted(arrays)), min_size=1, max_size=3)):
        array = arrays[name]
        if array.dtype == bool:
            arrays[name] = data.draw(hnp.arrays(bool, array.shape))
            continue
        match data.draw(st.sampled_from(["entry", "scale", "noise", "drawn"])):
            case "entry":
                array = array.copy()
                value = data.draw(st.floats(width=64, allow_nan=True, allow_infinity=True))
                with np.errstate(over="ignore"):
                    if array.size:
                        array.flat[data.draw(st.integers(0, array.size - 1))] = value
            case "scale":
                factors = [-1.0, 0.0, 1e-300, 1e-8, 0.5, 3.0, 1e4, 1e20, 1e160]
                with np.errstate(over="ignore", invalid="ignore"):
                    array = (array * data.draw(st.sampled_from(factors))).astype(array.dtype)
            case "noise":
                rng = np.random.default_rng(data.draw(st.integers(0, 100)))
                size = data.draw(st.sampled_from([1e-9, 1e-3, 1.0, 1e6]))
                array = (array + size * rng.normal(size=array.shape)).astype(array.dtype)
            case _:
                array = data.draw(
                    hnp.arrays(array.dtype, array.shape, elements={"allow_subnormal": False})
                )
        arrays[name] = np.asarray(array)
    shared = honest.outcome(arrays)
    assert isinstance(shared, str) or finite(shared)


# ---------------------------------------------------------------------- lies with a name


@pytest.fixture(scope="module")
def exact(run):
    return run(dtype="float64")


def reason(honest, error=SumsError, **arrays):
    with pytest.raises(error) as caught:
        honest.checked(with_arrays(honest.reply, **arrays))
    return str(caught.value)


def test_counts_must_be_those_of_the_declared_rows(exact):
    counts = exact.reply.arrays["counts"]
    more = counts.copy()
    more[0], more[1] = more[0] - 5 * more.sum(), more[1] + 5 * more.sum()
    assert "counts is less than 0" in reason(exact, counts=more)
    assert f"{exact.rows} rows" in reason(exact, counts=2 * counts)
    assert "add up to" in reason(exact, counts=0.9 * counts)
    swapped = counts[::-1].copy()
    assert "differ from those of its responsibilities" in reason(exact, counts=swapped)
    own = exact.reply.arrays["gaussians/counts"]
    assert "gaussians/counts is less than 0" in reason(exact, gaussians__counts=own - 100)
    assert "differ from those" in reason(exact, gaussians__counts=own + np.array([-5.0, 5.0]))


def test_counts_of_learners_must_be_those_of_the_responsibilities(run):
    honest = run(solver="sgd")
    own = honest.reply.arrays["learner_counts"]
    assert "exceed those" in reason(honest, learner_counts=own + np.array([-5.0, 5.0]))
    negative = own - np.array([0.0, 100.0])
    left = {name: value[:1] for name, value in honest.reply.arrays.items() if "learners/" in name}
    lie = {**honest.reply.arrays, **left, "learner_counts": negative}
    with pytest.raises(SumsError, match="learner_counts is less than 0"):
        honest.checked(Message("reply", lie, honest.reply.facts))


def test_moments_must_be_those_of_some_rows(exact):
    first = exact.reply.arrays["gaussians/first"]
    second = exact.reply.arrays["gaussians/second"]
    assert "semidefinite" in reason(exact, gaussians__second=-second)
    assert "semidefinite" in reason(exact, gaussians__second=0 * second)
    assert "semidefinite" in reason(exact, gaussians__first=100 * first)
    bent = second.copy()
    bent[0, 1] += 1e3  # a covariance above the product of the deviations
    assert "semidefinite" in reason(exact, gaussians__second=bent)
    assert "gaussians/first exceeds" in reason(exact, gaussians__first=first + 1e30)
    assert "gaussians/second exceeds" in reason(exact, gaussians__second=1e60 * second)
    counts = exact.reply.arrays["gaussians/counts"].copy()
    counts[0] = 0.0
    assert "without rows" in reason(exact, gaussians__counts=counts)


def test_a_mean_of_hardly_any_row_is_bounded_too(run):
    """In the paper's aggregation second moments do not bound the means, so the counts must."""
    honest = run(aggregation="paper", dtype="float64")
    arrays = honest.reply.arrays
    counts, moments = arrays["counts"].copy().reshape(2, 2), arrays["gaussians/counts"].copy()
    tiny = 1e-9
    counts[1] += counts[0] - tiny / 2
    counts[0] = tiny / 2
    moments[:] = counts.sum(-1)
    first = arrays["gaussians/first"].copy()
    first[0] = 1e9  # 1e18 deviations from the mean
    second = arrays["gaussians/second"].copy()
    lie = {"counts": counts.reshape(-1), "gaussians__counts": moments}
    of_learners = {
        "learner_counts": counts.sum(0),
        "learners__weight": counts.sum(0),
    }
    lie |= {"gaussians__first": first, "gaussians__second": second, **of_learners}
    assert "gaussians/first exceeds" in reason(honest, **lie)


def test_curvature_must_be_that_of_some_rows(exact):
    arrays = exact.reply.arrays
    hessian, gradient = arrays["learners/hessian"], arrays["learners/gradient"]
    assert "semidefinite" in reason(exact, learners__hessian=-hessian)
    assert "larger than its inputs allow" in reason(exact, learners__hessian=1e3 * hessian)
    assert "larger than its inputs allow" in reason(exact, learners__gradient=gradient + 1e6)
    assert "learners/gradient exceeds" in reason(exact, learners__gradient=gradient + 1e30)
    second = arrays["learners/second"]
    bent = second.copy()
    bent[0, 1] += 1e3
    assert "learners/second is not positive semidefinite" in reason(exact, learners__second=bent)
    assert "learners/second exceeds" in reason(exact, learners__second=1e30 * second)
    assert "does not count the rows" in reason(exact, learners__second=2 * second)
    weight = arrays["learners/weight"]
    assert "learners/weight exceeds" in reason(exact, learners__weight=2 * weight)
    assert "differ from their counts" in reason(exact, learners__weight=0.5 * weight)
    assert "differ from their counts" in reason(exact, learners__weight=0 * weight)
    assert "without rows" in reason(exact, learner_counts=0 * weight)


def test_arrays_that_were_not_requested_are_dropped(exact):
    counts = exact.reply.arrays["counts"]
    assert "more was not requested" in reason(exact, WireError, more=counts)
    assert "float32, not float64" in reason(exact, WireError, counts=counts.astype("float32"))
    assert "shape" in reason(exact, WireError, counts=counts[:-1].copy())
    assert "not finite" in reason(exact, WireError, counts=counts * np.nan)
    left = {name: value for name, value in exact.reply.arrays.items() if name != "counts"}
    with pytest.raises(WireError, match="counts is missing"):
        exact.checked(Message("reply", left, exact.reply.facts))


@pytest.mark.parametrize("algorithm", ["fedgmm", "fedavg", "pfedme", "clustered"])
def test_learners_above_their_limit_are_dropped(run, algorithm):
    options = {"solver": "sgd", "learner": "mlp", "algorithm": algorithm}
    honest = run(**options)
    name = "learners/0.weight"
    weights = honest.reply.arrays[name].copy()
    weights[0, 0, 0] = 2e8
    lie = Message("reply", {**honest.reply.arrays, name: weights}, honest.reply.facts)
    with pytest.raises(SumsError, match=f"{name} exceeds"):
        honest.checked(lie)


def test_a_learner_of_hardly_any_row_is_bounded_too(run):
    honest = run(solver="sgd", learner="mlp")
    arrays, tiny = honest.reply.arrays, 1e-12
    counts = arrays["counts"].copy().reshape(2, 2)
    counts[:, 1] += counts[:, 0] - tiny / 2
    counts[:, 0] = tiny / 2
    weights = arrays["learners/0.weight"].copy()
    weights[0] = 2e8
    lie = {"counts": counts.reshape(-1), "learner_counts": counts.sum(0)}
    lie["learners/0.weight"] = weights
    with pytest.raises(SumsError, match=r"learners/0.weight exceeds"):
        honest.checked(Message("reply", {**arrays, **lie}, honest.reply.facts))


def test_a_log_likelihood_of_labels_is_not_positive(run):
    for algorithm in ("fedem", "local", "clustered", "pfedme"):
        honest = run(algorithm=algorithm)
        assert "is positive" in reason(honest, log_likelihood=np.array(1000.0))


def test_a_density_cannot_be_beyond_every_distance(exact):
    assert "log_likelihood exceeds" in reason(exact, log_likelihood=np.array(1e35))


@pytest.mark.parametrize("algorithm", ["clustered", "pfedme", "local"])
def test_rows_weigh_as_declared(run, algorithm):
    honest = run(algorithm=algorithm)
    rows = honest.reply.arrays["rows"]
    for lie in (2 * rows, 0.5 * rows, -rows, 0 * rows):
        with pytest.raises(SumsError, match="rows"):
            honest.checked(with_arrays(honest.reply, rows=lie))


# ---------------------------------------------------------------------- in a run


LIES = {
    "NaN": lambda a: with_arrays(a, counts=np.full_like(a.arrays["counts"], np.nan)),
    "missing": lambda a: Message(a.kind, {}, a.facts),
    "rows": lambda a: with_facts(a, rows=10**9),
    "text for rows": lambda a: with_facts(a, rows="many"),
    "no facts": lambda a: Message(a.kind, a.arrays, {}),
    "another name": lambda a: with_facts(a, name="bergen"),
    "replay": None,
    "gigantic": lambda a: with_arrays(a, counts=np.zeros(2_000_000)),
    "an object": lambda a: with_arrays(a, counts=np.array([{"a": 1}], dtype=object)),
    "a list": lambda a: Message(a.kind, {"counts": [1.0, 2.0]}, a.facts),
    "no JSON": lambda a: Message(a.kind, a.arrays, {**a.facts, "x": {1, 2}}),
    "NaN in JSON": lambda a: Message(a.kind, a.arrays, {**a.facts, "x": float("nan")}),
    "deep JSON": lambda a: Message(a.kind, a.arrays, {**a.facts, "x": deep(50)}),
    "another kind": lambda a: Message("round", a.arrays, a.facts),
}


def deep(levels):
    return [deep(levels - 1)] if levels else []


IN_A_RUN = {**SIZE, "min_clients": 2, "largest_message": 1_000_000}


@pytest.fixture(scope="module")
def silent(files, tmp_path_factory):
    """The model of a run in which oslo never replied after the first round."""
    home = tmp_path_factory.mktemp("silent")
    sites = InMemorySites(files, home)
    sites.tamper = lambda name, request, reply: (
        Failure("none")
        if name == "oslo" and request.kind == "round" and request.facts["round"] > 1
        else reply
    )
    federate(files, home, sites=sites, **IN_A_RUN)
    return open_run(home / "server").model.prediction


# One lie of each kind; what else is not JSON or not an array is refused in test_messages.py, too.
SIMILAR = {"an object", "a list", "no JSON", "NaN in JSON"}


@pytest.mark.parametrize(
    "lie", [pytest.param(lie, marks=[pytest.mark.slow] * (lie in SIMILAR)) for lie in LIES]
)
def test_a_liar_is_left_out_and_named(files, tmp_path, silent, lie):
    sites, recorded = InMemorySites(files, tmp_path), []

    def tamper(name, request, reply):
        if name != "oslo" or request.kind != "round":
            return reply
        recorded.append(reply)
        if request.facts["round"] == 1:
            return reply
        return recorded[0] if LIES[lie] is None else LIES[lie](reply)

    sites.tamper = tamper
    _, lines = federate(files, tmp_path, sites=sites, **IN_A_RUN)
    entries = [json.loads(line) for line in (tmp_path / "server/history.jsonl").open()]
    assert [entry["answered"] for entry in entries] == [3, 2]
    assert set(entries[1]["dropped"]) == {"oslo"}
    assert any("oslo" in line and "round 2" in line for line in lines)
    # the others end as if it had never replied
    here = open_run(tmp_path / "server").model.prediction
    assert torch.equal(here.gaussians.means, silent.gaussians.means)
    assert all(torch.equal(v, silent.learners[n]) for n, v in here.learners.items())


def test_liars_in_the_start_are_left_out(files, tmp_path):
    for kind, name, value in (
        ("start", "counts", np.full(1, 1e9)),
        ("start", "gaussians__first", np.full((1, 6), 1e300)),
        ("start", "gaussians__second", np.full((1, 6), -1.0)),
        ("start", "centroids__points", np.full((2, 6), np.nan)),
        ("start", "centroids__counts", np.full(2, 1e9)),
        ("assigned", "counts", np.full(2, 1e9)),
        ("assigned", "gaussians__second", np.full((2, 21), -1.0)),
    ):
        home = tmp_path / f"{kind}-{name}"
        sites = InMemorySites(files, home)

        def tamper(who, request, reply, kind=kind, name=name, value=value):
            lies = who == "oslo" and request.kind == kind
            return with_arrays(reply, **{name: value}) if lies else reply

        sites.tamper = tamper
        _, lines = federate(files, home, sites=sites, **{**SIZE, "rounds": 1}, min_clients=2)
        assert any(line.startswith("start: the update of oslo is dropped") for line in lines)
        prediction = open_run(home / "server").model.prediction
        assert torch.isfinite(prediction.gaussians.covariances).all()


@pytest.mark.parametrize(
    "change",
    [
        {"rows": -5},
        {"rows": 10**6},
        {"columns": []},
        {"columns": "age"},
        {"labels": {"ill": -1}},
        {"labels": {"ill" * 5000: 1}},
        {"unlabelled": None},
    ],
)
def test_summaries_that_make_no_sense_are_not_admitted(files, tmp_path, change):
    sites = InMemorySites(files, tmp_path)

    def tamper(name, request, reply):
        if name != "oslo" or request.kind != "hello":
            return reply
        return with_facts(reply, summary={**reply.facts["summary"], **change})

    sites.tamper = tamper
    with pytest.raises(Exception, match="Only 2 of 3 clients came"):
        federate(files, tmp_path, sites=sites, **SIZE, start_timeout=0.1)


@given(
    facts=st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(2**70), 2**70)
            | st.floats()
            | st.text(max_size=9),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
            max_leaves=8,
        ),
        max_size=5,
    )
)
def test_any_summary_is_admitted_or_refused_in_words(facts):
    from fedgmm.federation.summaries import SummaryError, summary_from_record

    reasons = []
    for record in (facts, {"rows": 3, "labels": {"a": 3}, "unlabelled": 0, "columns": [facts]}):
        try:
            summary_from_record(record)
        except SummaryError as error:
            reasons.append(str(error))
    assert all(reasons)


# ---------------------------------------------------------------------- few rows in a component


def test_moments_of_few_rows_are_withheld(files, tmp_path):
    withheld = []

    def look(name, request, reply):
        if request.kind in ("round", "assigned"):
            arrays = reply.arrays
            own = arrays["counts"].reshape(len(arrays["gaussians/counts"]), -1).sum(-1)
            few = own < 10
            assert (arrays["gaussians/counts"][few] == 0).all()
            assert (arrays["gaussians/first"][few] == 0).all()
            assert (arrays["gaussians/second"][few] == 0).all()
            assert (arrays["gaussians/counts"][~few] >= 10).all()
            withheld.extend(few.tolist())
        if request.kind == "start":
            assert (reply.arrays["centroids/counts"] >= 10).all()
        return reply

    sites = InMemorySites(files, tmp_path)
    sites.tamper = look
    options = {**SIZE, "components": 3, "min_rows": 10, "rounds": 6}
    federate(files, tmp_path, sites=sites, **options)
    assert any(withheld)
    assert not all(withheld)
    prediction = open_run(tmp_path / "server").model.prediction
    assert torch.isfinite(prediction.gaussians.covariances).all()


@pytest.mark.parametrize("least", [5, 20])
def test_tied_moments_are_withheld_as_a_whole(files, tmp_path, least):
    def look(name, request, reply):
        if request.kind == "round":
            counts = reply.arrays["gaussians/counts"]
            assert (counts == 0).all() or (counts >= least).all()
            assert (counts > 0).all() or (reply.arrays["gaussians/second"] == 0).all()
        return reply

    sites = InMemorySites(files, tmp_path)
    sites.tamper = look
    federate(files, tmp_path, sites=sites, **{**SIZE, "covariance_type": "tied", "min_rows": least})
    prediction = open_run(tmp_path / "server").model.prediction
    assert torch.isfinite(prediction.gaussians.covariances).all()


def test_a_site_of_few_rows_does_not_take_part(files, tmp_path):
    sites = InMemorySites(files, tmp_path, min_rows=70)
    lines = []
    with pytest.raises(Exception, match="Only 1 of 3"):
        federate(files, tmp_path, sites=sites, **SIZE, start_timeout=0.1, notify=lines.append)
    (reason,) = {line for line in lines if "cannot take part" in line}
    assert "fewer rows than min_rows=70" in reason
    assert "smaller --min-rows" in reason
