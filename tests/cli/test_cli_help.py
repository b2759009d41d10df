"""What every command's help has: an example that it takes itself, and `--json` where there is data to print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest

from rollcage.cli import rollcage


def commands(group: click.Command = rollcage, path: str = "rollcage") -> Iterator[tuple[str, click.Command]]:
    yield path, group
    if isinstance(group, click.Group):
        for name, command in group.commands.items():
            yield from commands(command, f"{path} {name}")


ALL = dict(commands())
LEAVES = {path: command for path, command in ALL.items() if not isinstance(command, click.Group)}


def help_of(path: str) -> str:
    command = ALL[path]
    return command.get_help(click.Context(command, info_name=path))


def examples(path: str) -> list[str]:
    return re.findall(r"^ +(rollcage .*?)$", help_of(path).partition("xample")[2], re.MULTILINE)


@pytest.mark.parametrize("path", [path for path in ALL if path != "rollcage"])
def test_every_command_has_an_example(path: str) -> None:
    name = path.removeprefix("rollcage ")
    text = help_of(path)
    assert re.search(r"Examples?(, without a key)?:", text) and f"rollcage {name}" in text.partition("xample")[2], text


@pytest.mark.parametrize("path", list(LEAVES))
def test_every_example_is_one_that_the_command_takes(path: str) -> None:
    for line in examples(path):
        words = shlex.split(re.split(r" (?:\||&&|>) ", line)[0])[1:]
        context = rollcage.make_context("rollcage", words, resilient_parsing=False)
        while isinstance(context.command, click.Group):
            rest = [*context._protected_args, *context.args]
            name, command, more = context.command.resolve_command(context, rest)
            assert command is not None and name
            context = command.make_context(name, more, parent=context)


@pytest.mark.parametrize("path", [path for path in LEAVES if path != "rollcage completion"])
def test_every_command_that_prints_data_has_json(path: str) -> None:
    assert any("--json" in parameter.opts for parameter in LEAVES[path].params)


def test_help_fits_an_ordinary_terminal_without_being_cut() -> None:
    text = rollcage.get_help(click.Context(rollcage, info_name="rollcage", terminal_width=80))
    assert "..." not in text.partition("Commands:")[2]
