"""What can be typed after `rollcage fleet`. Only click is imported here: help must come at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

JSON = click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout, and nothing else.")
KEY = click.argument("env_key", metavar="KEY")
SEED = click.option("--seed", type=int, help="The environment is reset with it first.")


def _instance_options(command: F) -> F:
    """How the instance is provisioned, and which of its tools are offered."""
    for option in reversed(
        (
            click.option("--data-key", metavar="KEY", help="Which data it starts with (KEY:VERSION pins one)."),
            click.option("--region", metavar="NAME", help="Where to run it."),
            click.option("--image-type", metavar="NAME", help="mcp: the image with the aggregating endpoint."),
            click.option(
                "--ttl", "ttl_seconds", type=click.IntRange(min=1), help="Seconds after which it ends anyway."
            ),
            click.option(
                "--boot-timeout",
                "boot_timeout_s",
                type=click.FloatRange(min=0, min_open=True),
                help="Seconds until it must run.  [default: 900]",
            ),
            click.option(
                "--endpoint",
                "endpoints",
                multiple=True,
                metavar="NAME=URL",
                help="An MCP endpoint; may be repeated.  [default: discovered]",
            ),
            click.option(
                "--on-conflict",
                type=click.Choice(["first", "error", "prefix"]),
                help="Two endpoints have a tool of one name.  [default: first]",
            ),
        )
    ):
        command = option(command)
    return command


@click.group()
def fleet() -> None:
    """Remote environments: provision them, look at their tools, call them.

    The key is FLEET_API_KEY. Whatever a command provisions is released when it ends. Without a key:

    \b
      rollcage fleet demo
    """


@fleet.command()
@click.option("--instances", is_flag=True, help="What runs now, instead of what could.")
@JSON
def ls(instances: bool, as_json: bool) -> int:
    """List the environments this key may use."""
    from rollcage.cli import fleet_commands

    return fleet_commands.ls(instances, as_json)


@fleet.command()
@KEY
@SEED
@_instance_options
@JSON
def run(env_key: str, seed: int | None, as_json: bool, **options: Any) -> int:
    """Provision an environment, reset it, list its tools, release it: is it usable?"""
    from rollcage.cli import fleet_commands

    return fleet_commands.run(env_key, seed, options, as_json)


@fleet.command()
@KEY
@_instance_options
@JSON
def tools(env_key: str, as_json: bool, **options: Any) -> int:
    """Show the tools of an environment; with --json in OpenAI's format."""
    from rollcage.cli import fleet_commands

    return fleet_commands.tools(env_key, options, as_json)


@fleet.command()
@KEY
@click.argument("tool", metavar="TOOL")
@click.argument("arguments", metavar="[ARGS]", default="{}")
@click.option(
    "--timeout",
    "call_timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds for the call.  [default: 90]",
)
@SEED
@_instance_options
@JSON
def call(env_key: str, tool: str, arguments: str, seed: int | None, as_json: bool, **options: Any) -> int:
    """Call one tool of a fresh instance. ARGS is a JSON object; - reads it from stdin."""
    from rollcage.cli import fleet_commands

    return fleet_commands.call(env_key, (tool, arguments), seed, options, as_json)


@fleet.command()
@click.option("--seed", type=int, default=7, show_default=True, help="Decides who was charged twice.")
@click.option("--serve", is_flag=True, help="Keep the local Fleet running and say how to reach it.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="With --serve; 0: any free one.")
@JSON
def demo(seed: int, serve: bool, port: int, as_json: bool) -> int:
    """Try it all without a key, on a local Fleet: a ticket desk on this machine.

    A small script plays the agent: it works on a task through the tools, the environment's verifier scores it, a server
    is restarted under it, and the instance is released. The same seed gives the same output.
    """
    if port and not serve:
        raise click.UsageError("--port goes with --serve")
    from rollcage.cli import fleet_demo

    return fleet_demo.serve(port, as_json) if serve else fleet_demo.demo(seed, as_json)
