"""The contents of a small report, shared by the tests of its charts and of its page."""

from __future__ import annotations

import pytest
from pages import contents_of, named_clients


@pytest.fixture(scope="session")
def contents():
    """Six clients, and two other methods to compare with."""
    names = [f"client {k}" for k in range(6)]
    return contents_of(named_clients(names), baselines=("fedavg", "local"))
