"""Documentation pages: links lead to files and headings, the site and the API are complete.

``test_page_blocks.py`` runs their blocks.
"""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedgmm

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import check_site  # noqa: E402
import generate  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)")
REFERENCE = re.compile(r"`([a-z0-9_/]+(?:/|\.py))(?:::([\w.]+))?`")
RESULTS = ROOT / "docs" / "results" / "README.md"
LINKED = [*PAGES, RESULTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


@pytest.fixture(scope="session")
def generated(tmp_path_factory):
    """A folder with the pages that are written when the site is built."""
    folder = tmp_path_factory.mktemp("generated")
    generate.write_pages(folder)
    return folder


# ---------------------------------------------------------------------- the site

AUTO = re.compile(r"^\.\. auto(class|function|exception|module):: (fedgmm[\w.]*)$", re.MULTILINE)
API = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))


def test_the_api_has_every_public_name():
    listed = {name for _, name in AUTO.findall(API)}
    public = {f"fedgmm.{name}" for name in fedgmm.__all__ if name != "__version__"}
    assert public <= listed
    for kind, name in AUTO.findall(API):
        module, _, last = name.rpartition(".")
        found = (
            importlib.import_module(name)
            if kind == "module"
            else getattr(importlib.import_module(module), last)
        )
        assert found.__doc__, name


def objects_of_the_api():
    """Return every documented class and function by name; of a module, those that it defines."""
    found = {}
    for kind, name in AUTO.findall(API):
        if kind == "module":
            module = importlib.import_module(name)
            own = {f"{name}.{one}": thing for one, thing in vars(module).items() if one[0] != "_"}
            found |= {
                full: thing
                for full, thing in own.items()
                if getattr(thing, "__module__", None) == name
                and (inspect.isclass(thing) or inspect.isfunction(thing))
            }
        else:
            module, _, last = name.rpartition(".")
            found[name] = getattr(importlib.import_module(module), last)
    return found


def functions_of(name, thing):
    """Return a function, or the public methods and properties of a class, by full name."""
    if not inspect.isclass(thing):
        return {name: thing}
    members = {one: getattr(value, "fget", value) for one, value in vars(thing).items()}
    members = {one: getattr(value, "__func__", value) for one, value in members.items()}
    return {
        f"{name}.{one}": value
        for one, value in members.items()
        if one[0] != "_" and inspect.isfunction(value)
    }


def test_public_functions_and_what_they_return_are_in_the_api():
    """A member without a docstring would be left out of the page."""
    things = objects_of_the_api()
    classes = {thing.__name__ for thing in things.values() if inspect.isclass(thing)}
    classes |= {name for _, _, code in generate.equations() for _, name in code}
    functions = {}
    for name, thing in things.items():
        assert thing.__doc__, name
        functions |= functions_of(name, thing)
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    own = {one for one in re.findall(r"^class (\w+)", source, re.MULTILINE) if one[0] != "_"}
    own = {one for one in own if not one.endswith("Error")}  # errors.md has them
    assert len(functions) > 60
    for name, function in functions.items():
        assert function.__doc__, name
        if function.__qualname__ != function.__name__ and name.split(".")[1] not in fedgmm.__all__:
            continue  # a method of what another one returns
        returned = set(re.findall(r"\w+", str(function.__annotations__.get("return", ""))))
        assert returned & own <= classes, name


def test_names_that_pages_and_examples_import_are_in_the_api():
    known = {id(thing) for thing in objects_of_the_api().values()}
    missing = []
    for path in [*PAGES, *sorted((ROOT / "examples").glob("*.py"))]:
        text = path.read_text(encoding="utf-8")
        for module, names in re.findall(
            r"^from (fedgmm[\w.]*) import ([\w, ]+)$", text, re.MULTILINE
        ):
            for name in names.replace(" ", "").split(","):
                thing = getattr(importlib.import_module(module), name)
                if id(thing) not in known and not inspect.ismodule(thing):
                    missing.append(f"{path.name}: {module}.{name}")
    assert not missing


def test_names_that_pages_mention_are_in_the_api():
    modules = {name for kind, name in AUTO.findall(API) if kind == "module"}
    names = {name for _, name in AUTO.findall(API)}
    pages = [
        page for page in PAGES if page.name != "deployment.md"
    ]  # it names modules of operation
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    mentioned = set(re.findall(r"`(fedgmm(?:\.[a-z_]+)+\.[A-Za-z_]+)[`(]", text))
    package = ROOT / "src"
    mentioned = {one for one in mentioned if not (package / f"{one.replace('.', '/')}.py").exists()}
    missing = {one for one in mentioned - names if one.rpartition(".")[0] not in modules}
    assert len(mentioned) >= 4
    assert not missing


def test_every_error_class_has_a_remedy():
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    classes = set(re.findall(r"^class ([A-Za-z]\w*(?:Error|Warning))\(", source, re.MULTILINE))
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert listed == classes
    assert all(len(cell.strip()) > 3 for row in rows for cell in row.split("|")[1:4])


def test_the_page_of_commands_has_every_command_and_option():
    page = generate.commands_page()
    for name, command in generate.commands():
        section = page.split(f"### {name}\n", 1)[1].split("\n### ", 1)[0]
        for parameter in command.params:
            if parameter.name != "help" and not parameter.hidden:
                assert all(f"`{one}`" in section for one in parameter.opts if one.startswith("-"))


def test_every_equation_has_its_function():
    rows = generate.equations()
    assert len(rows) > 18
    page = generate.equations_page()
    for _, _, code in rows:
        assert all(f"{module}.{name}" in page for module, name in code)


def test_every_page_is_in_the_navigation():
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    shown = set("\n".join(re.findall(r"```{toctree}(.*?)```", text, re.DOTALL)).split())
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"} <= shown


def test_the_check_finds_broken_links_and_requests(tmp_path):
    (tmp_path / "other.html").write_text("<h1 id='here'>x</h1>")
    (tmp_path / "index.html").write_text(
        "<a href='other.html#here'>a</a><a href='https://example.org'>b</a>"
        "<a href='other.html#gone'>c</a><a href='gone.html'>d</a>"
        "<script src='https://example.org/x.js'></script>"
    )
    found = check_site.problems_of(tmp_path)
    assert [
        key in line for key, line in zip(("#gone", "gone.html", "x.js"), found, strict=True)
    ] == [True] * 3


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_every_public_name_is_in_its_index(tmp_path):
    pytest.importorskip("sphinx")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "trees"), str(ROOT / "docs"), str(site)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not check_site.problems_of(site)
    text = "\n".join(path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html"))
    assert all(f'id="fedgmm.{name}"' in text for name in fedgmm.__all__ if name != "__version__")
    assert (site / "searchindex.js").stat().st_size > 100_000


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page, generated):
    missing = []
    for link, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / link if link else page
        if link.startswith("generated/"):  # written when the site is built
            target = generated / link.removeprefix("generated/")
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


@pytest.mark.parametrize(
    ("name", "most_kilobytes"), [("demo.png", 200), ("aggregation.png", 150)], ids=str
)
def test_pictures_are_small(name, most_kilobytes):
    picture = ROOT / "docs" / "images" / name
    assert 0 < picture.stat().st_size < most_kilobytes * 1024
