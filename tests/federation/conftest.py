"""Quick federations of files."""

from __future__ import annotations

import pytest

from small_runs import write_sites


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One CSV file a site."""
    return write_sites(tmp_path_factory.mktemp("data"))


@pytest.fixture
def quick_looks(monkeypatch):
    """The server hardly waits between two looks at who is there."""
    monkeypatch.setattr("fedgmm.federation.server._POLL", 0.001)


@pytest.fixture(scope="module")
def blank_reports():
    """What a report shows is gathered and its file written, but the page is blank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedgmm.report.page.render", lambda contents: "")
        yield
