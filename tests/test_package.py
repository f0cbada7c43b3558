from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

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


@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        ("cryptography", "46.0.7"),  # CVE-2026-39892, CVE-2026-34073, CVE-2026-26007
        ("filelock", "3.20.3"),  # CVE-2026-22701, CVE-2025-68146
        ("grpcio", "1.66.2"),  # CVE-2024-11407, CVE-2024-7246
        ("jinja2", "3.1.6"),  # CVE-2025-27516
        ("pillow", "12.1.1"),  # CVE-2026-25990
        ("pyarrow", "23.0.1"),  # CVE-2026-25087, CVE-2023-47248
        ("torch", "2.10"),  # CVE-2026-24747, CVE-2025-32434
    ],
)
def test_the_oldest_versions_that_are_allowed_have_no_known_holes(name, fixed):
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    named = [Requirement(one) for one in project["dependencies"]]
    named += [Requirement(one) for one in project["optional-dependencies"]["dev"]]
    (own,) = [one for one in named if one.name == name]
    (floor,) = [one.version for one in own.specifier if one.operator == ">="]
    assert Version(floor) >= Version(fixed)
    assert Version(version(name)) >= Version(floor)


def test_the_lowest_versions_that_are_tried_are_those_that_are_allowed():
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = (root / "packaging" / "lowest.txt").read_text().splitlines()
    tried = dict(line.split("==") for line in lines if not line.startswith("#"))
    allowed = {}
    for own in map(Requirement, project["dependencies"]):
        (allowed[own.name],) = [one.version for one in own.specifier if one.operator == ">="]
    del allowed["torch"]  # see the file
    assert tried == allowed
