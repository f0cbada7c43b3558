from __future__ import annotations

import subprocess
import sys

import pytest

import fedgmm


def test_public_names_are_there():
    for name in fedgmm.__all__:
        assert getattr(fedgmm, name) is not None
    assert set(fedgmm.__all__) <= set(dir(fedgmm))


def test_unknown_names_are_not():
    with pytest.raises(AttributeError, match="no attribute 'FederatedTeapot'"):
        _ = fedgmm.FederatedTeapot


def test_importing_the_package_loads_nothing_heavy():
    script = (
        "import sys, fedgmm; print([m for m in ('torch', 'sklearn', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
