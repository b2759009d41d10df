"""Options and arguments that several commands share. Only click is imported here: help must come at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from rollcage.cli.completion import rollout_ids

F = TypeVar("F", bound=Callable[..., Any])

JSON = click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout, and nothing else.")
ROLLOUT = click.argument("rollout_id", metavar="ID", shell_complete=rollout_ids)


def all_of(*options: Callable[[F], F]) -> Callable[[F], F]:
    """One decorator for many options, shown in this order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


OTLP = all_of(
    click.option("--otlp", metavar="URL", help="Send a trace of each rollout to this OTLP collector (ROLLCAGE_OTLP)."),
    click.option("--otlp-content", is_flag=True, help="Include prompts, answers and outputs in the traces."),
)


RAY = all_of(
    click.option("--ray", metavar="ADDRESS", help="Run on the nodes of this Ray cluster: auto, local or HOST:PORT."),
    click.option("--ray-places", type=click.IntRange(1), metavar="N", help="With --ray: most rollouts on one node."),
    click.option(
        "--ray-resource", multiple=True, metavar="NAME=N", help="With --ray: what a rollout takes of a node; CPU=0.25."
    ),
    click.option("--ray-label", multiple=True, metavar="NAME=VALUE", help="With --ray: only nodes labelled so."),
    click.option(
        "--ray-lease",
        type=click.FloatRange(0.5),
        metavar="SECONDS",
        help="With --ray: a node that hears nothing for so long stops.",
    ),
    click.option("--ray-autoscale", is_flag=True, help="With --ray: ask for nodes, let idle ones go."),
    click.option("--node-home", metavar="FOLDER", help="With --ray: where nodes keep layers and boxes."),
)


REPLICAS = click.option(
    "--endpoint-replicas",
    multiple=True,
    metavar="URL",
    help="Addresses of one model that answer alike, or @FILE with one per line, or serve:NAME; may be repeated.",
)


class Derived(click.Command):
    """A command with options that are made from the arguments of a rollout, when they are first needed."""

    def __init__(self, *arguments: Any, made_by: str = "run_options", **more: Any) -> None:
        """`made_by`: the function of `cli.request` that makes them."""
        super().__init__(*arguments, **more)
        self._made_by = made_by

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """All of them. Help of another command does not come here, so it need not wait for them."""
        if self._made_by:
            from rollcage.cli import request

            self.params = [*getattr(request, self._made_by)(), *self.params]
            self._made_by = ""
        return super().get_params(ctx)


def seconds(text: str) -> float:
    """A duration: a finite number greater than zero."""
    return _seconds(text, zero=False)


def seconds_or_zero(text: str) -> float:
    """A duration: a finite number, 0 included."""
    return _seconds(text, zero=True)


def reward(text: str) -> float:
    """A reward: a finite number."""
    number = _number(text)
    if not math.isfinite(number):
        raise click.BadParameter(f"{text!r} is not a number")
    return number


REQUIRE = click.option(
    "--require",
    type=reward,
    metavar="REWARD",
    help="Exit with 4 unless the reward is at least this; --require 1 is good for CI.",
)


def _seconds(text: str, *, zero: bool) -> float:
    number = _number(text)
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise click.BadParameter(f"{text!r} is not a number of seconds" + ("" if zero else " greater than 0"))
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
