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


def _part(name: str) -> Any:
    """What carries a command out; it needs packages that come with an extra."""
    from importlib import import_module

    try:
        return import_module(f"rollcage.cli.{name}")
    except ModuleNotFoundError as error:
        from rollcage.errors import SetupError

        if (error.name or "").startswith("rollcage"):
            raise
        raise SetupError(f"remote environments need the package {error.name}: pip install 'rollcage[fleet]'") from error


AGENT_OPTIONS = {
    "instruction": click.option("--instruction", "-i", metavar="TEXT", help="What the agent shall do there."),
    "endpoint": click.option("--endpoint-kind", "-e", "endpoint", metavar="KIND", help="Who thinks: vllm, openai, ..."),
    "base_url": click.option("--base-url", metavar="URL", help="The model's address."),
    "model": click.option("--model", "-m", metavar="NAME", help="The model's name there."),
    "agent": click.option("--agent", metavar="NAME", help="opencode, or loop, which needs no box."),
    "verifier": click.option("--verifier", metavar="FILE", help="Python that judges the environment's data."),
}


def _agent_options(command: F) -> F:
    """Who works on the environment, and how that is judged."""
    for option in reversed(AGENT_OPTIONS.values()):
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
    code: int = _part("fleet_commands").ls(instances, as_json)
    return code


@fleet.command()
@KEY
@click.argument("task", required=False, metavar="[TASK.toml]")
@SEED
@_agent_options
@_instance_options
@JSON
def run(env_key: str, task: str | None, seed: int | None, as_json: bool, **options: Any) -> int:
    """Let an agent work on an environment; without a task: is it usable?

    With a task file or --instruction this is rollcage run --environment fleet:KEY. Without, the environment is
    provisioned, reset and released, and its tools are listed.
    """
    rollout = {name: options.pop(name) for name in AGENT_OPTIONS}
    if task is not None or rollout["instruction"] is not None:
        if given := [name for name, value in options.items() if value not in (None, ())]:
            option = given[0].removesuffix("_s").replace("_", "-")
            raise click.UsageError(f"--{option}: goes without a task only; a rollout provisions with the defaults")
        style = "json" if as_json else "view"
        worked: int = _part("environments").run(env_key, task, {**rollout, "environment_seed": seed}, style)
        return worked
    if given := [name for name, value in rollout.items() if value is not None]:
        raise click.UsageError(f"--{given[0].replace('_', '-')}: goes with a task or --instruction")
    code: int = _part("fleet_commands").run(env_key, seed, options, as_json)
    return code


@fleet.command()
@KEY
@_instance_options
@JSON
def tools(env_key: str, as_json: bool, **options: Any) -> int:
    """Show the tools of an environment; with --json in OpenAI's format."""
    code: int = _part("fleet_commands").tools(env_key, options, as_json)
    return code


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
    code: int = _part("fleet_commands").call(env_key, (tool, arguments), seed, options, as_json)
    return code


@fleet.command()
@click.option("--seed", type=int, default=7, show_default=True, help="Decides who was charged twice.")
@click.option("--serve", is_flag=True, help="Keep the local Fleet running and say how to reach it.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="With --serve; 0: any free one.")
@click.option("--agent", type=click.Choice(["opencode", "loop"]), help="A rollout: this agent, a scripted model.")
@JSON
def demo(seed: int, serve: bool, port: int, agent: str | None, as_json: bool) -> int:
    """Try it all without a key, on a local Fleet: a ticket desk on this machine.

    A small script plays the agent: it works on a task through the tools, the environment's verifier scores it, a server
    is restarted under it, and the instance is released. The same seed gives the same output. With --agent it is a whole
    rollout: the real OpenCode in a box (or the plain loop) does the work, and every turn is captured.
    """
    if port and not serve:
        raise click.UsageError("--port goes with --serve")
    if agent is not None:
        if serve:
            raise click.UsageError("--agent and --serve do not go together")
        rollout: int = _part("environments").demo(agent, seed, "json" if as_json else "view")
        return rollout
    part = _part("fleet_demo")
    code: int = part.serve(port, as_json) if serve else part.demo(seed, as_json)
    return code
