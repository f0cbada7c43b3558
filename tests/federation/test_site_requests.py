"""Requests that a site cannot serve get a reason, and a score holds only the declared sums."""

import numpy as np
import pytest
import torch

from fedgmm.core.sums import Sums, SumsError
from fedgmm.federation.job import SCORE
from fedgmm.federation.messages import PROTOCOL, Message
from fedgmm.federation.remote import check_score
from fedgmm.federation.site import SiteError
from in_memory_sites import InMemorySites, federate

pytestmark = pytest.mark.usefixtures("blank_reports", "no_metrics", "quick_looks")

SIZE = {"components": 2, "learners": 2, "covariance_type": "full", "rounds": 2, "patience": 2}


class Seen:
    """A small federation, and the requests and replies of its site oslo by their kinds."""

    def __init__(self, files, home, **options):
        self.requests, self.replies = {}, {}

        def look(name, request, reply):
            if name == "oslo":
                self.requests.setdefault(request.kind, request)
                self.replies.setdefault(request.kind, reply)
            return reply

        self.sites = InMemorySites(files, home)
        self.sites.tamper = look
        federate(files, home, sites=self.sites, **SIZE, **options)
        self.site = self.sites.site("node-0")

    def reply(self, kind, like="round", **facts):
        """The reply to a request with the arrays and facts of another."""
        request = self.requests[like]
        self.site._policy.forget()  # so that only the content of the request matters
        return self.site.reply(Message(kind, request.arrays, {**request.facts, **facts}))


@pytest.fixture(scope="module")
def seen(files, tmp_path_factory):
    return Seen(files, tmp_path_factory.mktemp("fedgmm"))


@pytest.fixture(scope="module")
def without_gaussians(files, tmp_path_factory):
    return Seen(files, tmp_path_factory.mktemp("fedem"), algorithm="fedem")


def test_unknown_requests_get_a_reason(seen):
    for kind in ("steal", "reply", "validation"):
        with pytest.raises(SiteError, match=f"unknown.*'{kind}'"):
            seen.reply(kind)
    with pytest.raises(SiteError, match="kind"):
        seen.reply("../round")
    with pytest.raises(SiteError, match="protocol"):
        seen.reply("hello", protocol=99)


@pytest.mark.parametrize("kind", ["start", "assigned", "round", "score", "finish", "model"])
def test_requests_without_a_job_get_a_reason(seen, kind):
    with pytest.raises(SiteError, match="not complete"):
        seen.site.reply(Message(kind, {}, {"protocol": PROTOCOL, "run": "0123456789abcdef"}))


@pytest.mark.parametrize("kind", ["round", "score", "finish", "model"])
@pytest.mark.parametrize("run", ["../../etc", "", None, 7])
def test_a_run_is_not_a_path(seen, kind, run):
    with pytest.raises(SiteError, match="run"):
        seen.reply(kind, run=run)


def test_gaussians_of_a_method_without_them_get_a_reason(without_gaussians):
    with pytest.raises(SiteError, match="no Gaussians"):
        without_gaussians.reply("assigned")
    assert "assigned" not in without_gaussians.requests


@pytest.mark.parametrize("shape", [None, (3, 6), (2, 5), (2,)])
def test_means_of_another_shape_get_a_reason(seen, shape):
    request = seen.requests["assigned"]
    arrays = {} if shape is None else {"means": np.zeros(shape)}
    seen.site._policy.forget()
    with pytest.raises(SiteError, match="means"):
        seen.site.reply(Message("assigned", arrays, request.facts))


@pytest.mark.parametrize("change", [{"round": -1}, {"round": "2"}, {"since": 1.5}, {"keep": True}])
def test_places_of_a_round_are_whole_numbers(seen, change):
    (name,) = change
    with pytest.raises(SiteError, match=name):
        seen.reply("round", **change)


def test_a_broadcast_of_another_shape_gets_a_reason(seen):
    request = seen.requests["round"]
    arrays = {**request.arrays, "means": request.arrays["means"][:, :-1].copy()}
    for kind in ("round", "score", "finish", "model"):
        seen.site._policy.forget()
        with pytest.raises(SiteError, match="means"):
            seen.site.reply(Message(kind, arrays, request.facts))


def test_a_site_outlives_every_request(seen):
    """A site that raised reasons still replies as it did before."""
    seen.site._policy.forget()
    again = seen.site.reply(seen.requests["score"])
    for name, array in seen.replies["score"].arrays.items():
        np.testing.assert_array_equal(again.arrays[name], array)


def test_a_score_holds_only_the_declared_sums(seen, without_gaussians):
    for one in (seen, without_gaussians):
        reply = one.replies["score"]
        assert reply.kind == "reply"
        assert set(reply.arrays) == set(SCORE)
        assert set(reply.facts) == {"name", "ticket"}
        for name, array in reply.arrays.items():
            assert array.dtype == np.float64
            assert array.shape == SCORE[name].shape == ()
        assert reply.arrays["clients"] == 1
        assert reply.arrays["rows"] == 18  # a fifth of the 90 rows of oslo
        assert reply.arrays["log_loss"] == pytest.approx(-reply.arrays["labels"] / 18)
    assert seen.replies["score"].arrays["inputs"] != 0
    assert without_gaussians.replies["score"].arrays["inputs"] == 0


@pytest.mark.parametrize(
    "lie", [{"rows": 1e300}, {"rows": 0.5}, {"log_loss": 1e16}, {"rows": -1.0}]
)
def test_impossible_scores_are_refused(lie):
    honest = {"clients": 1.0, "log_loss": 0.5, "rows": 20.0, "labels": -10.0, "inputs": -40.0}

    def sums(values):
        return Sums({name: torch.tensor(value).double() for name, value in values.items()})

    check_score(sums(honest))
    with pytest.raises(SumsError):
        check_score(sums({**honest, **lie}))
