"""The pages of a federation stay true: options exist, quoted messages exist, settings are read."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
import typer

from fedgmm.cli import app
from fedgmm.federation.flower.processes import QUIET
from fedgmm.federation.settings import read_settings
from fedgmm.runs.config import FEDERATION

ROOT = Path(__file__).parents[1]
DEPLOYMENT = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
SCALE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")

# what a message is filled with
FILLED = re.compile(
    r"fed\.hospital\.org(?::\d+)?|0\.0\.0\.0:\d+|certificate has expired"
    r"|connection refused|gaussians/first|\boslo\.pub\b"
    r"|\b(?:oslo|tromso|trondheim|bodo|run|components)\b|\d+(?: clients?\b)?|…|[,;]"
)


def section(title):
    """The text below a heading."""
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


@pytest.mark.parametrize("page", [DEPLOYMENT, SCALE, README], ids=["deployment", "scale", "README"])
def test_commands_have_the_options_that_they_are_shown_with(page):
    blocks = re.findall(r"^```\w*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    lines = [
        line.split("#")[0] for line in text.splitlines() if re.search(r"\bfedgmm \w+ .*--", line)
    ]
    for line in lines:
        words = line.split("fedgmm ", 1)[1].split()
        path = words[:2] if words[0] == "keys" else words[:1]
        assert set(re.findall(r"(--[a-z-]+)", line)) <= options_of(*path), line


def texts_of_the_source():
    """All texts of a federation's modules; what a text is filled with becomes a zero byte."""
    package = ROOT / "src" / "fedgmm"
    modules = [package / "training.py"]
    for folder in ("federation", "flower"):
        modules += (package / folder).glob("*.py")
    found = []
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def pieces(message):
    """The parts of a message that do not depend on who and how many."""
    cut = (piece.strip(" :;.=()") for piece in FILLED.split(message))
    return [piece for piece in cut if len(piece) > 5]


def quoted_messages():
    rows = re.findall(r"^\| \*\*.*?\*\*.*?\| (.*?) \|", section("When something breaks"), re.M)
    spans = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
    for title in ("Certificates", "Keys", "Backup"):
        spans += [
            " ".join(span.split())
            for span in re.findall(r"`([^`]+)`", section(title))
            if re.match(r"(The |Clients |nothing is left|oslo has)", span)
        ]
    return [span for span in spans if not span.startswith("--") and " " in span]


def test_quoted_messages_stand_in_the_source():
    messages, texts = quoted_messages(), [" ".join(one.split()) for one in texts_of_the_source()]

    assert len(messages) > 18
    for message in messages:
        for piece in pieces(message):
            assert any(piece in text for text in texts), (message, piece)


def test_a_message_that_nobody_says_would_be_found():
    assert pieces("round 4: no update from oslo: it went home") == [
        "no update from",
        "it went home",
    ]


def test_the_settings_of_the_page_are_read(tmp_path):
    (text,) = re.findall(r"^```toml\n(.*?)^```$", DEPLOYMENT, re.MULTILINE | re.DOTALL)
    path = tmp_path / "federation.toml"
    path.write_text(text)

    settings = read_settings(path)

    assert (settings.clients, settings.quorum, settings.min_rows) == (4, 3, 10)
    assert set(tomllib.loads(text)["federation"]) == FEDERATION


def test_the_page_names_what_flower_is_told():
    block = section("Offline").split("```")[1]
    shown = dict(line.split("=", 1) for line in block.split())

    assert shown.pop("FLWR_HOME") == "OUT/flower/home"
    assert shown.items() <= QUIET.items()
