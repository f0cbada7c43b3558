"""The pages do what they say: their blocks run and their links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]+)[^)]*\)")


def python_of(page: Path) -> str:
    """All Python blocks of a page, with blank lines between so that errors give the page's lines."""
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


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page.name == "README.md" else [pytest.mark.slow])
        for page in PAGES
        if shell_of(page)
    ],
    ids=lambda page: page.name,
)
def test_shell_blocks_run(page, tmp_path):
    """Exactly as they are printed, in an empty folder, with the command on the path."""
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    text = page.read_text(encoding="utf-8")
    missing = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert not missing


def test_there_is_something_to_run():
    assert "FederatedGaussianMixture" in python_of(ROOT / "docs" / "federated-gmm.md")
    assert "FederatedGaussianMixture" in python_of(ROOT / "README.md")


@pytest.mark.parametrize(
    ("name", "most_kilobytes"), [("demo.png", 200), ("aggregation.png", 150)], ids=str
)
def test_pictures_are_small(name, most_kilobytes):
    picture = ROOT / "docs" / "images" / name
    assert 0 < picture.stat().st_size < most_kilobytes * 1024
