"""The federation pages stay true: options exist, settings are read, key words of messages exist."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
import typer

from fedgmm.cli import app
from fedgmm.federation.settings import read_settings
from fedgmm.runs.config import FEDERATION

ROOT = Path(__file__).parents[1]
DEPLOYMENT = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")


def section(title):
    """Return the text below a heading."""
    return DEPLOYMENT.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def options_of(*path):
    command = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    return {one for parameter in command.params for one in parameter.opts if one.startswith("--")}


@pytest.mark.parametrize(("name", "title"), [("server", "The server"), ("client", "The client")])
def test_the_table_of_options_is_complete(name, title):
    cells = re.findall(r"^\| (`--.*?) \|", section(title), re.MULTILINE)
    shown = {option for cell in cells for option in re.findall(r"`(--[a-z-]+)`", cell)}

    assert shown == options_of(name) - {"--help"}


def texts_of_the_source():
    """Return the strings of the modules that run a federation, without docstrings, in lowercase."""
    package = ROOT / "src" / "fedgmm"
    found = []
    for path in [*(package / "training").rglob("*.py"), *(package / "federation").rglob("*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        found += [
            " ".join(node.value.split())
            for node in nodes
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ]
    return "\n".join(found).lower()


def key_words(page):
    """Return the words in backticks in the second column of a table, without options and paths."""
    cells = re.findall(r"^\| \*\*.*?\| (.*?) \|", page, re.MULTILINE)
    spans = [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
    return [span.lower() for span in spans if not re.search(r"^--|[/_=]", span)]


def test_key_words_of_messages_stand_in_the_source():
    words, texts = key_words(section("Troubleshooting")), texts_of_the_source()

    assert len(words) > 18
    assert [word for word in words if word not in texts] == []


def test_a_word_that_no_message_has_would_be_found():
    row = "| **A client left** | server: `went home`; `--min-rows` and `run/log.txt` | wait |"

    assert key_words(row) == ["went home"]
    assert "went home" not in texts_of_the_source()


def test_the_settings_of_the_page_are_read(tmp_path):
    (text,) = re.findall(r"^```toml\n(.*?)^```$", DEPLOYMENT, re.MULTILINE | re.DOTALL)
    path = tmp_path / "federation.toml"
    path.write_text(text)

    settings = read_settings(path)

    assert (settings.clients, settings.quorum, settings.min_rows) == (4, 3, 10)
    assert set(tomllib.loads(text)["federation"]) == FEDERATION
