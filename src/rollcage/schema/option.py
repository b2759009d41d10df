"""How an argument of a rollout is typed on the command line; it stands in the annotation of the argument's field."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """An argument with one of these has an option; its help is the docstring under the field."""

    short: str = ""
    """A second name of one letter, such as `-e`."""
    metavar: str = ""
    """What stands for the value in the help; without: what follows from the type."""
    is_file: bool = False
    """The option names a file, whose text is the value."""
    more: str = ""
    """What the help says beyond the docstring."""


def option_name(argument: str) -> str:
    """What is typed for an argument: `--agent-timeout` for `agent_timeout_s`."""
    return "--" + argument.removesuffix("_s").replace("_", "-")
