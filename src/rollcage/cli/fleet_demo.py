"""`rollcage fleet demo`: remote environments on a local Fleet, from provisioning to release, without a key.

Heavy parts are imported when used.
"""

from __future__ import annotations

import json
import logging
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollcage.cli import codes
from rollcage.cli.options import JSON
from rollcage.errors import needs_extra

if TYPE_CHECKING:
    from rollcage.cli.output import Style
    from rollcage.cli.screen import Screen
    from rollcage.environments.fleet import RemoteEnvironment
    from rollcage.settings import Settings
    from rollcage.simulators.fleet import FleetRuntime

KEY = "ticket-desk"


@click.command()
@click.option("--seed", type=int, default=7, show_default=True, help="Decides who was charged twice.")
@click.option("--serve", is_flag=True, help="Keep the local Fleet running and print how to reach it.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="With --serve; 0: any free one.")
@click.option("--agent", type=click.Choice(["opencode", "loop"]), help="A rollout: this agent, a scripted model.")
@JSON
def demo(seed: int, serve: bool, port: int, agent: str | None, as_json: bool) -> int:
    """Try it all without a key: a ticket desk on this machine.

    A small script plays the agent: it works on a task through the tools, the environment's verifier scores it, a server
    is restarted under it, and the instance is released. The same seed gives the same output. With --agent it is a whole
    rollout: the real OpenCode in a box (or the plain loop) does the work, and every turn is captured.

    \b
    Examples:
      rollcage fleet demo
      rollcage fleet demo --agent loop --json | jq .reward
    """
    if port and not serve:
        raise click.UsageError("--port goes with --serve")
    if agent is not None and serve:
        raise click.UsageError("--agent and --serve do not go together")
    import anyio

    from rollcage.cli.output import write_json
    from rollcage.cli.screen import screen

    settings = _quiet()
    if agent is not None:
        style: Style = "json" if as_json else "view"
        return anyio.run(_rollout, settings, agent, seed, style, backend_options={"use_uvloop": True})
    if serve:
        return anyio.run(_serve, port, as_json)
    transcript = _Transcript(screen(settings), as_json)
    anyio.run(_demo, seed, transcript)
    facts = transcript.facts
    if as_json:
        write_json({"seed": seed, **facts})
    return codes.OK if facts["reward"] == 1.0 and facts["left_running"] == 0 else codes.BROKEN


class _Transcript:
    """What the demo shows: words for people, facts for programs."""

    def __init__(self, console: Screen, as_json: bool) -> None:
        self._console, self._silent = console, as_json
        self.facts: dict[str, Any] = {"calls": []}

    def title(self, text: str) -> None:
        """A new part."""
        from rich.text import Text

        if not self._silent:
            self._console.print(Text(f"\n{text}", style="bold"))

    def line(self, name: str, text: str) -> None:
        """One thing that happened."""
        from rich.table import Table
        from rich.text import Text

        if self._silent:
            return
        row = Table.grid(padding=(0, 2))
        row.add_column(width=14)
        row.add_column(overflow="fold")
        row.add_row(Text(f"  {name}"), Text(text))
        self._console.put([row])


async def _demo(seed: int, show: _Transcript) -> None:
    from rollcage.cli.text import reward_text
    from rollcage.environments import fleet as fleets
    from rollcage.environments.fleet import NotOffered
    from rollcage.simulators.fleet import INSTRUCTION, VERIFIER, FleetRuntime

    async with FleetRuntime() as fleet:
        async with fleets.open(KEY, api_key=fleet.key, base_url=fleet.base_url) as env:
            show.title("HTTP plane: the orchestrator's (a local Fleet, driven by Fleet's own SDK)")
            show.line("provisioned", f"{env.key}, instance {env.instance_id}")
            show.line("reset", f"{(await env.reset(seed)).message} with seed {seed}")
            try:
                await env.step({})
            except NotOffered as error:
                show.line("step", str(error))
            show.title("MCP plane: the agent's (it holds the tools and nothing else)")
            listed = await env.tools.list_tools()
            for endpoint in env.tools.report().endpoints:
                names = [tool.name for tool in listed.offered if tool.endpoint == endpoint.name]
                show.line(endpoint.name, ", ".join(names))
            show.title("The task")
            show.line("instruction", INSTRUCTION)
            show.facts["reward_before"] = await env.verify(VERIFIER)
            show.line("verifier", f"reward {reward_text(show.facts['reward_before'])}, before anything is done")
            ticket = await _work(env, show)
            show.title("What can break")
            await fleet.instance().restart()
            await _call(env, show, "read_ticket", {"ticket_id": ticket})
            connects = env.tools.report().endpoints[0].connects
            show.line("", f"(its server had been restarted; session {connects} was opened, the call made once)")
            await _call(env, show, "read_ticket", {"ticket_id": "one"})
            await _call(env, show, "delete_ticket", {"ticket_id": ticket})
            show.title("The end")
            show.facts["reward"] = await env.verify(VERIFIER)
            show.line("verifier", f"reward {reward_text(show.facts['reward'])}")
        show.facts["left_running"] = len(fleet.running)
        show.line("released", f"{show.facts['left_running']} instances left running")


async def _work(env: RemoteEnvironment, show: _Transcript) -> int:
    """What an agent would do; here a script does it."""
    found = await _call(env, show, "search_tickets", {"search": {"text": "charged twice", "status": "open"}})
    ticket: int = found["tickets"][0]["id"]
    await _call(env, show, "read_ticket", {"ticket_id": ticket})
    await _call(env, show, "assign_ticket", {"ticket_id": ticket, "assignee": "billing"})
    text = "Sorry about that. The second charge is refunded today."
    await _call(env, show, "reply_to_ticket", {"ticket_id": ticket, "text": text})
    await _call(env, show, "resolve_ticket", {"ticket_id": ticket})
    return ticket


async def _call(env: RemoteEnvironment, show: _Transcript, tool: str, arguments: dict[str, Any]) -> Any:
    from rollcage.cli.text import one_line
    from rollcage.environments.fleet import ToolError

    show.line("call", f"{tool} {json.dumps(arguments)}")
    try:
        result = await env.tools.call_tool(tool, arguments)
    except ToolError as error:
        show.line(f"  {type(error).__name__}", one_line(str(error), 400))
        show.facts["calls"].append({"tool": tool, "arguments": arguments, "error": type(error).__name__})
        return None
    show.line("  answer", one_line(result.text, 240))
    show.facts["calls"].append({"tool": tool, "arguments": arguments, "answer": result.structured})
    return result.structured


async def _serve(port: int, as_json: bool) -> int:
    import anyio

    from rollcage.cli.output import program, write_json
    from rollcage.simulators.fleet import ENVIRONMENTS, FleetRuntime

    async with FleetRuntime(port=port) as fleet:
        values = {"FLEET_BASE_URL": fleet.base_url, "FLEET_API_KEY": fleet.key}
        # From here on, being stopped is how it ends: so listen for that before its address is printed.
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            if as_json:
                write_json({"base_url": fleet.base_url, "api_key": fleet.key, "environments": list(ENVIRONMENTS)})
            else:
                exports = [f"  export {name}={shlex.quote(value)}" for name, value in values.items()]
                tries = [f"  {program()} fleet ls", f"  {program()} fleet call {KEY} list_tickets '{{\"limit\": 3}}'"]
                head = f"a local Fleet answers at {fleet.base_url}: a test server for this machine only"
                print("\n".join([head, "", "In another shell:", *exports, *tries, "", "Ctrl-C stops it."]), flush=True)
            async for _ in signals:
                break
    return codes.OK


async def _rollout(settings: Settings, agent: str, seed: int, style: Style) -> int:
    """A real agent, a scripted model, a local Fleet."""
    from rollcage.cli.run import run_file
    from rollcage.simulators.fleet import FleetRuntime
    from rollcage.simulators.fleet.task import desk_task
    from rollcage.tasks import TaskFile
    from rollcage.types import AgentSpec

    task = desk_task(seed, prefix="" if agent == "loop" else "env_")
    file = TaskFile(path=Path(), task=task, agent=AgentSpec(name=agent), environment=f"fleet:{KEY}")
    async with FleetRuntime() as fleet:
        return await run_file(_settings_for(fleet, settings), file, style)


def _settings_for(fleet: FleetRuntime, settings: Settings) -> Settings:
    """The settings, with this local Fleet in place of any other."""
    from pydantic import SecretStr

    from rollcage.settings import FleetSettings

    known = FleetSettings(api_key=SecretStr(fleet.key), base_url=fleet.base_url)
    return settings.model_copy(update={"fleet": known})


def _quiet() -> Settings:
    """The settings; SetupError where the packages of the extra are missing."""
    from rollcage.cli.output import environment

    settings = environment()
    with needs_extra("the local Fleet", "fleet"):
        import fastmcp  # noqa: F401 - it sets up its own logging when it is imported

        import rollcage.simulators.fleet  # noqa: F401
    if not settings.debug:
        # It writes every tool that fails to stderr, with a traceback.
        logging.getLogger("fastmcp").setLevel(logging.CRITICAL + 1)
    return settings
