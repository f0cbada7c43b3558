"""The help of options: all have one, from the docstring of their command or from their type."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from fedgmm.cli import app
from fedgmm.cli.options import Ids, with_help


def commands(group, name=""):
    """All commands of a group and of the groups within it, by name."""
    for own, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name}{own} ")
        else:
            yield f"{name}{own}", command


@pytest.mark.parametrize(("name", "command"), list(commands(get_command(app))))
def test_every_option_has_help(name, command):
    assert command.help
    assert "Options:" not in command.help
    assert [option.name for option in command.params if not getattr(option, "help", None)] == []


@pytest.mark.parametrize("options", [["--date-format", "%d.%m.%Y"], ["--label", "y"]])
def test_an_option_with_one_value_is_given_once(options):
    result = CliRunner().invoke(app, ["fit", "a.csv", *options, *options])
    assert result.exit_code == 2
    assert "twice" in result.stderr
    many = ["--ignore", "a", "--ignore", "b", "--overwrite", "--overwrite"]
    assert "twice" not in CliRunner().invoke(app, ["fit", "a.csv", "--label", "y", *many]).stderr


@pytest.mark.parametrize("option", ["--components", "--learners"])
def test_a_size_of_zero_is_refused_with_the_least(option):
    result = CliRunner().invoke(app, ["fit", "a.csv", "--label", "y", option, "0"])
    assert result.exit_code == 2
    assert "at least 1" in result.stderr


def test_a_misspelt_command_is_corrected_once():
    result = CliRunner().invoke(app, ["fti"])
    assert result.exit_code == 2
    assert result.stderr.count("'fit'") == 1


@pytest.mark.parametrize(
    ("text", "message"), [("compnents=3", "did you mean 'components'"), ("rounds", "name=value")]
)
def test_a_misspelt_training_option_is_corrected(text, message):
    result = CliRunner().invoke(app, ["fit", "a.csv", "--label", "y", "--set", text])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_help_comes_from_the_docstring():
    def show(
        file: Path,
        label: Annotated[str, typer.Option()],
        ids: Ids = None,
        rounds: Annotated[int, typer.Option(min=1)] = 3,
    ) -> None:
        """Show a file.

        Options:
            file: The file: a table.
            label: The column to predict, such as
                diagnosis.
            rounds: Number of rounds.
        """
        print(file, label, ids, rounds)

    small = typer.Typer()
    small.command()(with_help(show))
    command = get_command(small)
    helps = {option.name: getattr(option, "help", None) for option in command.params}
    assert helps["file"] == "The file: a table."
    assert helps["label"] == "The column to predict, such as diagnosis."
    assert helps["rounds"] == "Number of rounds."
    assert "identifies rows" in helps["ids"]
    assert command.help == "Show a file."
    result = CliRunner().invoke(small, ["a.csv", "--label", "y", "--id", "id"])
    assert result.stdout.split() == ["a.csv", "y", "['id']", "3"]
    assert CliRunner().invoke(small, ["a.csv", "--label", "y", "--rounds", "0"]).exit_code == 2
