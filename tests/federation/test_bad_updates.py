"""Hostile and broken clients: what they send is dropped, or leaves the model finite."""

import json
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch
from fedgmm.federation.updates import UpdateError, checked_update
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedgmm.federation.job import Job
from fedgmm.federation.messages import Failure, Message
from fedgmm.federation.wire import received
from fedgmm.runs import open_run
from in_memory_sites import InMemorySites, federate, with_arrays, with_facts

pytestmark = pytest.mark.usefixtures("blank_reports", "quick_looks")

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
SIZE = {"components": 2, "learners": 2, "covariance_type": "full", "rounds": 3}


class Honest:
    """The answers that honest sites gave in the second round, and the server that got them."""

    def __init__(self, files, home, options):
        self.rounds = {}

        def keep(name, question, answer):
            if question.kind == "round" and question.facts["round"] == 2:
                self.rounds[name] = (question, answer)
            return answer

        sites = InMemorySites(files, home)
        sites.tamper = keep
        federate(files, home, sites=sites, **{**SIZE, **options})
        question, self.answer = self.rounds["oslo"]
        self.job = Job.from_record(question.facts, "oslo")
        self.method = self.job.method
        self.shared = received(self.method, question.arrays, self.job.columns)
        self.rows = self.answer.facts["rows"]
        self.others = [self.checked(self.rounds[name][1]) for name in ("bergen", "tromso")]

    def checked(self, answer):
        return checked_update(
            self.method,
            answer.arrays,
            rows=answer.facts["rows"],
            columns=self.job.columns,
            precision=self.job.precision,
        )

    def outcome(self, arrays):
        """``"dropped"``, or the shared state after a round with this update."""
        try:
            update = self.checked(Message("answer", arrays, {"rows": self.rows}))
        except UpdateError as error:
            return "dropped" if str(error) else "dropped without a reason"
        shared, info = self.method.server_step(
            self.shared, self.method.combine([*self.others, update])
        )
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


@pytest.fixture(scope="module", params=KINDS)
def honest(request, files, tmp_path_factory):
    return Honest(files, tmp_path_factory.mktemp(request.param), KINDS[request.param])


def test_honest_updates_pass(honest):
    shared = honest.outcome(honest.answer.arrays)
    assert not isinstance(shared, str)
    assert finite(shared)


@given(data=st.data())
def test_one_entry_that_is_not_finite_is_enough(honest, data):
    floats = [n for n, a in honest.answer.arrays.items() if a.dtype.kind == "f" and a.size]
    name = data.draw(st.sampled_from(sorted(floats)))
    array = honest.answer.arrays[name].copy()
    array.flat[data.draw(st.integers(0, array.size - 1))] = data.draw(
        st.sampled_from([np.nan, np.inf, -np.inf])
    )
    assert honest.outcome({**honest.answer.arrays, name: array}) == "dropped"


@given(data=st.data())
def test_other_shapes_dtypes_and_names_are_dropped(honest, data):
    arrays = dict(honest.answer.arrays)
    name = data.draw(st.sampled_from(sorted(arrays)))
    array = arrays[name]
    match data.draw(st.sampled_from(["missing", "extra", "dtype", "longer", "axis", "giant"])):
        case "missing":
            del arrays[name]
        case "extra":
            arrays[data.draw(st.sampled_from(["more", "learners/9.weight", "gaussians/third"]))] = (
                array
            )
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
def test_whatever_is_sent_the_model_stays_finite(honest, data):
    arrays = dict(honest.answer.arrays)
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


def newton(files, tmp_path_factory, **options):
    return Honest(files, tmp_path_factory.mktemp("lies"), options)


@pytest.fixture(scope="module")
def exact(files, tmp_path_factory):
    return newton(files, tmp_path_factory, dtype="float64")


def reason(honest, **arrays):
    with pytest.raises(UpdateError) as caught:
        honest.checked(with_arrays(honest.answer, **arrays))
    return str(caught.value)


def test_counts_must_be_those_of_the_declared_rows(exact):
    counts = exact.answer.arrays["counts"]
    more = counts.copy()
    more[0], more[1] = more[0] - 5 * more.sum(), more[1] + 5 * more.sum()
    assert "negative" in reason(exact, counts=more)
    assert f"declared {exact.rows} rows" in reason(exact, counts=2 * counts)
    assert "add up to" in reason(exact, counts=0.9 * counts)
    swapped = counts[::-1].copy()
    assert "not those of its responsibilities" in reason(exact, counts=swapped)


def test_moments_must_be_those_of_some_rows(exact):
    first = exact.answer.arrays["gaussians/first"]
    second = exact.answer.arrays["gaussians/second"]
    assert "not positive semidefinite" in reason(exact, gaussians__second=-second)
    assert "not positive semidefinite" in reason(exact, gaussians__second=0 * second)
    assert "not positive semidefinite" in reason(exact, gaussians__first=100 * first)
    bent = second.copy()
    bent[0, 1] += 1e3  # a covariance above the product of the deviations
    assert "not positive semidefinite" in reason(exact, gaussians__second=bent)
    assert "beyond all bounds" in reason(exact, gaussians__first=first + 1e30)
    assert "beyond all bounds" in reason(exact, gaussians__second=1e60 * second)
    counts = exact.answer.arrays["gaussians/counts"].copy()
    counts[0] = 0.0
    assert "moments but no rows" in reason(exact, gaussians__counts=counts)


def test_curvature_must_be_that_of_some_rows(exact):
    arrays = exact.answer.arrays
    hessian, gradient = arrays["newton/hessian"], arrays["newton/gradient"]
    assert "not positive semidefinite" in reason(exact, newton__hessian=-hessian)
    assert "larger than its inputs allow" in reason(exact, newton__hessian=1e3 * hessian)
    assert "larger than its inputs allow" in reason(exact, newton__gradient=gradient + 1e6)
    bent = arrays["newton/second"].copy()
    bent[0, 1] += 1e3
    assert "newton/second is not positive semidefinite" in reason(exact, newton__second=bent)
    assert "not those of its responsibilities" in reason(
        exact, newton__weight=2 * arrays["newton/weight"]
    )
    assert "sums but no rows" in reason(exact, newton__weight=0 * arrays["newton/weight"])


def test_learners_beyond_all_bounds_are_dropped(files, tmp_path_factory):
    honest = newton(files, tmp_path_factory, solver="sgd", learner="mlp")
    weights = honest.answer.arrays["learners/0.weight"].copy()
    weights[0, 0, 0] = 2e8
    with pytest.raises(UpdateError, match=r"learners/0.weight is beyond all bounds"):
        honest.checked(
            Message(
                "answer",
                {**honest.answer.arrays, "learners/0.weight": weights},
                honest.answer.facts,
            )
        )


def test_a_log_likelihood_of_labels_is_not_positive(files, tmp_path_factory):
    honest = newton(files, tmp_path_factory, algorithm="fedem")
    assert "is positive" in reason(honest, log_likelihood=np.array(1000.0))


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
    """The model of a run in which oslo never answered after the first round."""
    home = tmp_path_factory.mktemp("silent")
    sites = InMemorySites(files, home)
    sites.tamper = lambda name, question, answer: (
        Failure("none")
        if name == "oslo" and question.kind == "round" and question.facts["round"] > 1
        else answer
    )
    federate(files, home, sites=sites, **IN_A_RUN)
    return open_run(home / "server").model.prediction


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_is_left_out_and_named(files, tmp_path, silent, lie):
    sites, recorded = InMemorySites(files, tmp_path), []

    def tamper(name, question, answer):
        if name != "oslo" or question.kind != "round":
            return answer
        recorded.append(answer)
        if question.facts["round"] == 1:
            return answer
        return recorded[0] if LIES[lie] is None else LIES[lie](answer)

    sites.tamper = tamper
    _, lines = federate(files, tmp_path, sites=sites, **IN_A_RUN)
    entries = [json.loads(line) for line in (tmp_path / "server/history.jsonl").open()]
    assert [entry["answered"] for entry in entries] == [3, 2, 2]
    assert set(entries[1]["dropped"]) == {"oslo"}
    assert any("oslo" in line and "round 2" in line for line in lines)
    # the others end as if it had never answered
    here = open_run(tmp_path / "server").model.prediction
    assert torch.equal(here.gaussians.means, silent.gaussians.means)
    assert all(torch.equal(v, silent.learners[n]) for n, v in here.learners.items())


def test_liars_in_the_start_are_left_out(files, tmp_path):
    for kind, name, value in (
        ("start", "overall__mean", np.full(6, 1e300)),
        ("start", "overall__variances", np.full(6, -1.0)),
        ("start", "centroids__counts", np.full(2, 1e9)),
        ("assigned", "counts", np.full(2, 1e9)),
        ("assigned", "gaussians__second", np.full((2, 21), -1.0)),
    ):
        home = tmp_path / f"{kind}-{name}"
        sites = InMemorySites(files, home)

        def tamper(who, question, answer, kind=kind, name=name, value=value):
            lies = who == "oslo" and question.kind == kind
            return with_arrays(answer, **{name: value}) if lies else answer

        sites.tamper = tamper
        _, lines = federate(files, home, sites=sites, **SIZE, min_clients=2)
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

    def tamper(name, question, answer):
        if name != "oslo" or question.kind != "hello":
            return answer
        return with_facts(answer, summary={**answer.facts["summary"], **change})

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

    def look(name, question, answer):
        if question.kind in ("round", "assigned"):
            arrays = answer.arrays
            own = arrays["counts"].reshape(len(arrays["gaussians/counts"]), -1).sum(-1)
            few = own < 10
            assert (arrays["gaussians/counts"][few] == 0).all()
            assert (arrays["gaussians/first"][few] == 0).all()
            assert (arrays["gaussians/second"][few] == 0).all()
            assert (arrays["gaussians/counts"][~few] >= 10).all()
            withheld.extend(few.tolist())
        if question.kind == "start":
            assert (answer.arrays["centroids/counts"] >= 10).all()
        return answer

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
    def look(name, question, answer):
        if question.kind == "round":
            counts = answer.arrays["gaussians/counts"]
            assert (counts == 0).all() or (counts >= least).all()
            assert (counts > 0).all() or (answer.arrays["gaussians/second"] == 0).all()
        return answer

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
    assert (
        "a client cannot take part: the client reports: it has fewer rows than min_rows=70" in lines
    )
