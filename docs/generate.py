"""Pages of the site that are made from the code: commands, equations, and the gallery of examples.

``conf.py`` writes them into ``docs/generated`` before Sphinx reads the pages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
REFERENCE = re.compile(r"`([a-z0-9_/]+)\.py::([\w.]+)`")


def write_pages(folder: Path) -> None:
    """Write all generated pages; a page that has not changed keeps its time, so builds stay short."""
    folder.mkdir(exist_ok=True)
    pages = {
        "cli.md": commands_page(),
        "equations.md": equations_page(),
        "gallery.md": gallery_page(),
        **{f"example_{path.stem}.md": example_page(path) for path in examples()},
    }
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in folder.glob("*.md"):
        if path.name not in pages:
            path.unlink()


# ---------------------------------------------------------------------- commands


def commands() -> Iterator[tuple[str, Any]]:
    """Return the full name and the click command of every command, groups left out."""
    import typer

    from fedgmm.cli import app

    def below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        children = getattr(command, "commands", None)
        if children is None:
            yield name, command
        for child, inner in (children or {}).items():
            yield from below(f"{name} {child}", inner)

    return below("fedgmm", typer.main.get_command(app))


def commands_page() -> str:
    """Return the reference of the command line: every command with every argument and option."""
    found = dict(commands())
    panels: dict[str, list[str]] = {}
    for name, command in found.items():
        panel = getattr(command, "rich_help_panel", None)
        panels.setdefault(panel if isinstance(panel, str) else "Keys", []).append(name)
    parts = [
        "# Commands\n",
        "This page is made from the commands themselves; `fedgmm COMMAND --help` prints the same. "
        "`fedgmm --debug COMMAND …` adds the traceback of an error, `fedgmm --version` prints the "
        "version. Exit codes: 0 success, 1 an error in the data or the request, 2 a wrong option, "
        "130 interrupted.\n",
    ]
    for panel, names in panels.items():
        parts.append(f"## {panel}\n")
        parts += [_command(name, found[name]) for name in names]
    return "\n".join(parts)


def _command(name: str, command: Any) -> str:
    """Return the section of one command."""
    prose, examples_shown = [], []
    for paragraph in re.split(r"\n\s*\n", (command.help or "").strip()):
        line = " ".join(paragraph.split())
        example = re.match(r"Example(?:, ([^:]*))?: (.*)", line)
        if example:
            examples_shown.append(example[2] + (f"  # {example[1]}" if example[1] else ""))
        else:
            prose.append(line)
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    usage = " ".join([name, *(_argument(one) for one in arguments), "[OPTIONS]"])
    parts = [f"### {name}\n", "\n\n".join(prose), f"\n```text\n{usage}\n```\n"]
    if examples_shown:
        parts += ["Examples:\n", "```text", *examples_shown, "```\n"]
    rows = [_parameter(one) for one in command.params if one.name != "help" and not one.hidden]
    if rows:
        parts += ["| argument or option | value | default | meaning |", "|---|---|---|---|", *rows]
    return "\n".join(parts) + "\n"


def _argument(one: Any) -> str:
    name = (one.metavar or one.name).upper() + ("..." if one.nargs == -1 else "")
    return name if one.required else f"[{name}]"


def _parameter(one: Any) -> str:
    """Return one row of the table of a command."""
    names = (
        [_argument(one)] if one.param_type_name == "argument" else [*one.opts, *one.secondary_opts]
    )
    flag = getattr(one, "is_flag", False)
    value = (
        ""
        if flag
        else _cell(one.type.name if one.type.name != "choice" else "|".join(one.type.choices))
    )
    default = one.default
    if one.required:
        shown = "required"
    elif default is None or flag or callable(default) or default in ((), []):
        shown = ""
    else:
        shown = f"`{_cell(getattr(default, 'value', default))}`"
    meaning = _cell(" ".join((one.help or "").split()))
    return f"| {', '.join(f'`{_cell(name)}`' for name in names)} | {value} | {shown} | {meaning} |"


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


# ---------------------------------------------------------------------- the paper beside the code


def equations() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return the rows of the table in ``architecture.md``: name, formula, (module, name) of its code."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    table = text.split("## The paper beside the code\n", 1)[1].split("\n\n", 1)[0].strip()
    rows = []
    for line in table.splitlines()[2:]:
        paper, formula, code = re.split(r"(?<!\\)\|", line)[1:4]
        found = [
            (f"fedgmm.{path.replace('/', '.')}", name) for path, name in REFERENCE.findall(code)
        ]
        rows.append((paper.strip(), formula.strip(), found))
    return rows


def equations_page() -> str:
    """Return the equations of the paper, each with the functions that compute it."""
    parts = [
        "# The paper beside the code\n",
        "Each equation of the paper with the functions that compute it. *[source]* opens the code, in "
        "which the formula stands above its line. "
        "[Architecture](../architecture.md#the-paper-beside-the-code) has the table on one screen, and the "
        "differences from the paper.\n",
    ]
    seen: set[str] = set()
    for paper, formula, code in equations():
        if not code:
            continue
        parts += [
            f"## {paper[0].upper()}{paper[1:]}\n",
            f"{formula}\n".replace("\\|", "|").replace("](", "](../"),
        ]
        for module, name in code:
            again = "\n   :no-index:" if f"{module}.{name}" in seen else ""
            seen.add(f"{module}.{name}")
            kind = "class" if name[0].isupper() and "." not in name else "function"
            kind = "method" if "." in name else kind
            parts += [f"```{{eval-rst}}\n.. auto{kind}:: {module}.{name}{again}\n```\n"]
    return "\n".join(parts)


# ---------------------------------------------------------------------- gallery


def examples() -> list[Path]:
    """Return the scripts of the gallery, in the order of their names."""
    return sorted(path for path in EXAMPLES.glob("*.py") if not path.name.startswith("_"))


def _title_and_text(path: Path) -> tuple[str, str]:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    title, _, text = docstring.partition("\n")
    return title.rstrip("."), text.strip()


def gallery_page() -> str:
    """Return the page with all examples and their pictures."""
    parts = [
        "# Examples\n",
        "Short scripts, each ends with a picture. `make examples` runs all of them, "
        "`python examples/NAME.py --out picture.png` one. Nothing is downloaded.\n",
        "::::{container} gallery\n",
    ]
    for path in examples():
        title, _ = _title_and_text(path)
        parts += [
            ":::{container}",
            f"[![{title}](../images/examples/{path.stem}.png)](example_{path.stem}.md)\n",
            f"[{title}](example_{path.stem}.md)",
            ":::\n",
        ]
    names = "\n".join(f"example_{path.stem}" for path in examples())
    parts += ["::::\n", f"```{{toctree}}\n:hidden:\n\n{names}\n```\n"]
    return "\n".join(parts)


def example_page(path: Path) -> str:
    """Return the page of one example: its text, its picture and its code."""
    title, text = _title_and_text(path)
    code = path.read_text(encoding="utf-8").split('"""', 2)[2].strip()
    return (
        f"# {title}\n\n{text}\n\n![{title}](../images/examples/{path.stem}.png)\n\n"
        f"`python examples/{path.name}`\n\n```{{code-block}} python\n{code}\n```\n"
    )
