"""Documentation pages: their blocks run, their links lead to files and headings, figures are small."""

import ast
import os
import re
import shlex
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from small_runs import works

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)")
REFERENCE = re.compile(r"`([a-z0-9_/]+(?:/|\.py))(?:::([\w.]+))?`")
RESULTS = ROOT / "docs" / "results" / "README.md"
LINKED = [*PAGES, RESULTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def python_of(page: Path) -> str:
    """Return all Python blocks of a page, padded so that errors have the line numbers of the page."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        code = block.group(1).splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(python_of(page), str(page), "exec"), {"__name__": "__page__"})


def shell_of(page: Path) -> str:
    return "".join(SHELL.findall(page.read_text(encoding="utf-8")))


def test_commands_of_the_readme_work(tmp_path, monkeypatch):
    """Run the printed commands in this process, which need not import torch for each of them."""
    monkeypatch.chdir(tmp_path)
    for line in shell_of(ROOT / "README.md").splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
        else:
            assert words[0] == "fedgmm"
            files = [sorted(Path().glob(word)) if "*" in word else [word] for word in words[1:]]
            # slow tests run the blocks as printed
            fewer = ["--rounds", "5"] if words[1] == "compare" else []
            works(*chain.from_iterable(files), *fewer)
    assert (tmp_path / "hospitals" / "run" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if shell_of(page)], ids=lambda page: page.name
)
def test_shell_blocks_run(page, tmp_path):
    """Run them exactly as printed, in an empty folder, with the command on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-e", "-c", shell_of(page)],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hospitals" / "run" / "report.html").is_file()
    assert "Traceback" not in done.stderr


def test_the_shell_blocks_show_every_command():
    text = shell_of(ROOT / "README.md") + shell_of(ROOT / "docs" / "files.md")
    shown = set(re.findall(r"^fedgmm (\w+) ", text, re.MULTILINE))
    assert shown >= {"demo", "inspect", "fit", "evaluate", "predict", "adapt", "detect", "compare"}
    assert "report" in shown


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    missing = []
    for link, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / link if link else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            missing.append(f"{link}#{anchor}")
    assert not missing


def names_in(path: Path) -> set[str]:
    """Return the functions, classes and methods of a module, methods as ``Class.method``."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
            found.update(f"{node.name}.{name}" for name in methods)
    return found


def test_the_code_that_the_architecture_names_exists():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "TODO(verify)" not in line]
    references = REFERENCE.findall("\n".join(lines))
    missing = []
    for module, name in references:
        path = ROOT / module if module.startswith("tests/") else ROOT / "src" / "fedgmm" / module
        if not path.exists() or (name and name not in names_in(path)):
            missing.append(f"{module}::{name}")

    assert len(references) > 60
    assert not missing


def test_results_are_short_and_every_file_is_cited():
    text = RESULTS.read_text(encoding="utf-8")
    cited = {Path(link).stem for link, _ in LINK.findall(text)}
    kept = {path.stem for path in RESULTS.parent.iterdir() if path != RESULTS}

    assert text.count("\n") <= 150
    assert kept <= cited


def test_there_is_something_to_run():
    assert "FederatedGaussianMixture" in python_of(ROOT / "docs" / "federated-gmm.md")
    assert "FederatedGaussianMixture" in python_of(ROOT / "README.md")


@pytest.mark.parametrize(
    ("name", "most_kilobytes"), [("demo.png", 200), ("aggregation.png", 150)], ids=str
)
def test_pictures_are_small(name, most_kilobytes):
    picture = ROOT / "docs" / "images" / name
    assert 0 < picture.stat().st_size < most_kilobytes * 1024
