"""`rollcage fleet`: provision remote environments, list and call their tools. Heavy parts are imported when used.

Each command provisions at most one instance and releases it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rollcage.cli import codes
from rollcage.cli.fleet_demo import demo
from rollcage.cli.options import JSON, Derived
from rollcage.errors import UsageError, needs_extra

if TYPE_CHECKING:
    from rollcage.cli.output import Style
    from rollcage.environments.fleet import RemoteEnvironment
    from rollcage.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])

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


AGENT_ARGUMENTS = ("instruction", "endpoint", "base_url", "model", "agent", "verifier")
"""Arguments of a rollout on an environment; their options are made by `cli.request.fleet_options`."""


@click.group()
def fleet() -> None:
    """Remote environments: provision them, call their tools.

    The key is FLEET_API_KEY. Whatever a command provisions is released when it ends.

    \b
    Example, without a key:
      rollcage fleet demo
    """


@fleet.command()
@click.option("--instances", is_flag=True, help="List the instances that run now.")
@JSON
def ls(instances: bool, as_json: bool) -> int:
    """List the environments this key may use.

    \b
    Example:
      rollcage fleet ls --json | jq -r '.[].key'
    """
    import anyio

    from rollcage.cli.output import environment

    _need_packages()
    return anyio.run(_ls, environment(), instances, as_json)


@fleet.command(cls=Derived, made_by="fleet_options")
@KEY
@click.argument("task", required=False, metavar="[TASK.toml]")
@SEED
@_instance_options
@JSON
def run(env_key: str, task: str | None, seed: int | None, as_json: bool, **options: Any) -> int:
    """Let an agent work on an environment; without a task: is it usable?

    With a task file or --instruction this is rollcage run --environment fleet:KEY. Without, the environment is
    provisioned, reset and released, and its tools are listed.

    \b
    Examples:
      rollcage fleet run ticket-desk
      rollcage fleet run ticket-desk TASK.toml --seed 7 --agent loop
    """
    import anyio

    from rollcage.cli.interrupts import stoppable
    from rollcage.cli.output import environment
    from rollcage.cli.request import typed_task
    from rollcage.cli.run import run_file

    rollout = {name: options.pop(name) for name in AGENT_ARGUMENTS}
    if task is not None or rollout["instruction"] is not None:
        if given := [name for name, value in options.items() if value not in (None, ())]:
            option = given[0].removesuffix("_s").replace("_", "-")
            raise click.UsageError(f"--{option}: goes without a task only; a rollout provisions with the defaults")
        style: Style = "json" if as_json else "view"
        file = typed_task(task, {**rollout, "environment_seed": seed, "environment": f"fleet:{env_key}"})
        return anyio.run(run_file, environment(), file, style, backend_options={"use_uvloop": True})
    if given := [name for name, value in rollout.items() if value is not None]:
        raise click.UsageError(f"--{given[0].replace('_', '-')}: goes with a task or --instruction")
    _need_packages()
    return anyio.run(stoppable, lambda: _try_out(environment(), env_key, seed, options, as_json))


@fleet.command()
@KEY
@_instance_options
@JSON
def tools(env_key: str, as_json: bool, **options: Any) -> int:
    """Show the tools of an environment; with --json in OpenAI's format.

    \b
    Example:
      rollcage fleet tools ticket-desk
    """
    import anyio

    from rollcage.cli.interrupts import stoppable
    from rollcage.cli.output import environment

    _need_packages()
    return anyio.run(stoppable, lambda: _tools(environment(), env_key, options, as_json))


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
    """Call one tool of a fresh instance. ARGS is a JSON object; - reads it from stdin.

    \b
    Example:
      rollcage fleet call ticket-desk list_tickets '{"limit": 3}'
    """
    import anyio

    from rollcage.cli.interrupts import stoppable
    from rollcage.cli.output import environment

    _need_packages()
    what = (tool, arguments_of(arguments))
    return anyio.run(stoppable, lambda: _call(environment(), env_key, what, seed, options, as_json))


fleet.add_command(demo)


def _need_packages() -> None:
    """SetupError where the packages of the extra are missing."""
    with needs_extra("a remote environment", "fleet"):
        import rollcage.environments.fleet
        import rollcage.mcp.guarded  # noqa: F401


async def _ls(settings: Settings, instances: bool, as_json: bool) -> int:
    from rollcage.cli.fleet_tables import table_of
    from rollcage.cli.output import write_json
    from rollcage.cli.screen import screen
    from rollcage.environments.fleet import sdk
    from rollcage.mcp import guarded

    async with guarded.client(timeout=30) as http:
        client = sdk.fleet(settings.fleet.api_key, settings.fleet.base_url, http)
        if instances:
            rows = [
                {"instance_id": one.instance_id, "env_key": one.env_key, "version": one.version, "status": one.status}
                for one in await sdk.instances(client)
            ]
        else:
            rows = [
                {"key": one.key, "version": one.default_version, "description": one.description}
                for one in await sdk.environments(client)
            ]
    if as_json:
        write_json(rows)
    elif rows:
        screen(settings).put([table_of(list(rows[0]), [list(row.values()) for row in rows])])
    else:
        screen(settings).print("nothing runs" if instances else "this key may use no environment")
    return codes.OK


async def _try_out(settings: Settings, env_key: str, seed: int | None, given: dict[str, Any], as_json: bool) -> int:
    from rollcage.cli.fleet_tables import plain, plane
    from rollcage.cli.output import write_json
    from rollcage.cli.screen import screen
    from rollcage.cli.text import one_line

    async with _open(settings, env_key, given) as env:
        reset = await env.reset(seed)
        listed = await env.tools.list_tools()
        report = env.tools.report()
    if as_json:
        found = {"key": env.key, "instance_id": env.instance_id, "reset": reset.message, "released": True}
        write_json({**found, "tools": listed.names, "report": plain(report)})
    else:
        console = screen(settings)
        console.print(f"provisioned  {one_line(env.key, 90)}, instance {one_line(env.instance_id, 90)}")
        console.print(f"reset        {one_line(reset.message, 90) or 'done'}")
        console.put(plane(listed, report))
        console.print("released")
    return codes.OK


async def _tools(settings: Settings, env_key: str, given: dict[str, Any], as_json: bool) -> int:
    from rich.text import Text

    from rollcage.cli.fleet_tables import details, plain, plane
    from rollcage.cli.output import write_json
    from rollcage.cli.screen import screen

    async with _open(settings, env_key, given) as env:
        listed = await env.tools.list_tools()
        report = env.tools.report()
    if as_json:
        raw = {tool.name: {"endpoint": tool.endpoint, "tool": tool.raw} for tool in listed.offered}
        write_json({"tools": listed.tools, "raw": raw, "report": plain(report)})
    else:
        screen(settings).put([*plane(listed, report), Text(""), *details(listed)])
    return codes.OK


async def _call(
    settings: Settings,
    env_key: str,
    what: tuple[str, dict[str, Any]],
    seed: int | None,
    given: dict[str, Any],
    as_json: bool,
) -> int:
    from rollcage.cli.output import write_json
    from rollcage.cli.screen import screen
    from rollcage.cli.text import clean, one_line, seconds_of

    tool, arguments = what
    async with _open(settings, env_key, given) as env:
        if seed is not None:
            await env.reset(seed)
        result = await env.tools.call_tool(tool, arguments)
    if as_json:
        write_json(result)
    else:
        # To a person, and to whatever reads stdout: the answer alone.
        screen(settings).out(clean(result.text), highlight=False)
        where = f"{result.tool} on {result.endpoint}, {seconds_of(result.seconds)}; {env.instance_id} released"
        print(f"rollcage: {one_line(where, 200)}", file=sys.stderr)
    return codes.OK


def arguments_of(text: str) -> dict[str, Any]:
    """The JSON object of the command line, or of stdin."""
    try:
        arguments = json.loads(sys.stdin.read() if text == "-" else text)
    except ValueError as error:
        raise UsageError(
            f"ARGS: this is no JSON ({error})", remedy="an object is needed, such as '{\"limit\": 3}'"
        ) from error
    if not isinstance(arguments, dict):
        raise UsageError("ARGS: a JSON object is needed, such as '{\"limit\": 3}'")
    return arguments


def _open(settings: Settings, env_key: str, given: dict[str, Any]) -> AbstractAsyncContextManager[RemoteEnvironment]:
    from rollcage.environments import fleet as fleets

    options = {name: value for name, value in given.items() if value is not None and value != ()}
    if "endpoints" in options:
        options["endpoints"] = dict(_endpoint(text) for text in options["endpoints"])
    known = settings.fleet
    return fleets.open(env_key, api_key=known.api_key, **{"base_url": known.base_url, **options})


def _endpoint(text: str) -> tuple[str, str]:
    name, found, url = text.partition("=")
    if not found or not name or "/" in name:
        raise UsageError(f"--endpoint: {text!r} is not NAME=URL")
    return name, url
