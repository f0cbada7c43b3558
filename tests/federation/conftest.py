"""Quick federations of files."""

from __future__ import annotations

import signal

import pytest

from fedgmm.model.metrics import Evaluation
from small_runs import write_sites


@pytest.fixture(autouse=True)
def _limited():
    """Fail a test that waits, because an exchange below its quorum waits without a limit."""

    def give_up(*_):
        raise TimeoutError("the test took longer than 300 s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One CSV file per site."""
    return write_sites(tmp_path_factory.mktemp("data"))


@pytest.fixture
def quick_looks(monkeypatch):
    """Let the server hardly wait between two looks at the connected nodes."""
    monkeypatch.setattr("fedgmm.federation.members.POLL", 0.001)


@pytest.fixture(scope="module")
def no_metrics():
    """Let sites write their models without metrics, which take longer than a round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluation, "summary", lambda _: {})
        patch.setattr(Evaluation, "record", lambda _: {"clients": {}})
        yield


@pytest.fixture(scope="module")
def blank_reports():
    """Gather the contents of a report and write its file, but leave the page blank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedgmm.report.page.render", lambda contents: "")
        yield
