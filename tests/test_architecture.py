"""The rooms of the house: imports point up the list only, and method knowledge stays in its room."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fedgmm"

# A room may import from the rooms above it and from itself.
ROOMS = (
    "support",
    "core",
    "nets",
    "data",
    "methods",
    "model",
    "privacy",
    "training",
    "estimators",
    "report",
    "runs",
    "federation",
    "experiments",
    "cli",
)

# Small modules beside the rooms that import no room, so every room may import them.
GROUND = ("files", "wording")

# The package's face and its command: they lead into the rooms, and no room imports them.
FACE = ("__init__", "__main__")


@cache
def nodes_of(path):
    """All nodes of a module's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def room_of(path, source):
    """The room that a module lies in, or the name of a module beside the rooms."""
    return path.relative_to(source).with_suffix("").parts[0]


def imported_rooms(path, source):
    """Pairs of line and room for every import of the package in a module, wherever it stands."""
    here = ("fedgmm", *path.relative_to(source).parent.parts)
    for node in nodes_of(path):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "fedgmm" and len(parts) > 1 and parts[1] != "__version__":
                yield node.lineno, parts[1]


def forbidden_imports(source):
    """Every import that points down the list, as readable lines."""
    found = []
    for path in sorted(source.rglob("*.py")):
        room = room_of(path, source)
        if room in FACE:
            continue
        if room in GROUND:
            allowed = set(GROUND)
        elif room in ROOMS:
            allowed = {*GROUND, *ROOMS[: ROOMS.index(room) + 1]}
        else:
            found.append(f"{path.relative_to(source)}: not in any room")
            continue
        found += [
            f"{path.relative_to(source)}:{line}: {room} imports {other}"
            for line, other in imported_rooms(path, source)
            if other not in allowed
        ]
    return found


def test_imports_point_up():
    assert forbidden_imports(SOURCE) == []


@pytest.mark.parametrize(
    "line",
    [
        "from fedgmm.training.loop import run_rounds",
        "import fedgmm.cli",
        "from fedgmm import train",
        "def late():\n    from fedgmm.report import page",
        "from ..federation import site",
    ],
)
def test_a_forbidden_import_is_found(tmp_path, line):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "em.py").write_text(line + "\n")
    assert len(forbidden_imports(tmp_path)) == 1


def test_rooms_exist():
    rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert rooms <= set(ROOMS)


def calls(name):
    """Modules outside ``methods`` that call a function or method of this name."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if room_of(path, SOURCE) == "methods":
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == name:
                found.append(str(path.relative_to(SOURCE)))  # noqa: PERF401
    return found


def test_there_is_one_round_loop():
    assert calls("server_step") == ["training/loop.py"]


def test_no_isinstance_over_methods_outside_their_room():
    homes = {*SOURCE.glob("methods/*.py"), *SOURCE.glob("privacy/private_*.py")}
    known = {
        node.name for path in homes for node in nodes_of(path) if isinstance(node, ast.ClassDef)
    }
    assert {"FedGMM", "PrivateMixture", "PrivateNetworks"} <= known
    found = []
    for path in sorted({*SOURCE.rglob("*.py")} - homes):
        for node in nodes_of(path):
            tested = []
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "isinstance":
                tested = [n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)]
            elif isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name):
                tested = [node.cls.id]
            found += [
                f"{path.relative_to(SOURCE)}:{node.lineno}: {name}"
                for name in tested
                if name in known
            ]
    assert found == []


def test_names_of_test_files_are_unique():
    """pytest refuses to collect two files of one name from folders that are not packages."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted({*names})
