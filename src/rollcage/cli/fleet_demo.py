"""`rollcage fleet demo`: both planes on a local Fleet, from provisioning to release, without a key."""

from __future__ import annotations

import json
import logging
import shlex
import signal
from typing import Any

import anyio
from rich.table import Table
from rich.text import Text

import rollcage.fleet
from rollcage.cli import codes
from rollcage.cli.output import environment, program, write_json
from rollcage.cli.screen import Screen, screen
from rollcage.cli.text import one_line, reward_text
from rollcage.errors import SetupError
from rollcage.fleet import NotOffered, RemoteEnvironment, ToolError
from rollcage.settings import Settings

KEY = "ticket-desk"


def demo(seed: int, as_json: bool) -> int:
    """`rollcage fleet demo`."""
    settings = _quiet()
    show = _Transcript(screen(settings), as_json)
    anyio.run(_demo, seed, show)
    if as_json:
        write_json({"seed": seed, **show.facts})
    return codes.SUCCEEDED if show.facts["reward"] == 1.0 and show.facts["left_running"] == 0 else codes.OTHER


def serve(port: int, as_json: bool) -> int:
    """`rollcage fleet demo --serve`."""
    _quiet()
    return anyio.run(_serve, port, as_json)


class _Transcript:
    """What the demo shows: words for people, facts for programs."""

    def __init__(self, console: Screen, as_json: bool) -> None:
        self._console, self._silent = console, as_json
        self.facts: dict[str, Any] = {"calls": []}

    def title(self, text: str) -> None:
        """A new part."""
        if not self._silent:
            self._console.print(Text(f"\n{text}", style="bold"))

    def line(self, name: str, text: str) -> None:
        """One thing that happened."""
        if self._silent:
            return
        row = Table.grid(padding=(0, 2))
        row.add_column(width=14)
        row.add_column(overflow="fold")
        row.add_row(Text(f"  {name}"), Text(text))
        self._console.put([row])


async def _demo(seed: int, show: _Transcript) -> None:
    from rollcage.testing.fleet_runtime import INSTRUCTION, VERIFIER, FleetRuntime

    async with FleetRuntime() as fleet:
        async with rollcage.fleet.open(KEY, api_key=fleet.key, base_url=fleet.base_url) as env:
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
    from rollcage.testing.fleet_runtime import ENVIRONMENTS, FleetRuntime

    async with FleetRuntime(port=port) as fleet:
        values = {"FLEET_BASE_URL": fleet.base_url, "FLEET_API_KEY": fleet.key}
        # From here on, being stopped is how it ends: so listen for that before anybody is told.
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
    return codes.SUCCEEDED


def _quiet() -> Settings:
    settings = environment()
    try:
        import fastmcp  # noqa: F401 - it sets up its own logging when it is imported
    except ImportError as error:
        raise SetupError("the local Fleet needs more packages: pip install 'rollcage[fleet]'") from error
    if not settings.debug:
        # It writes every tool that fails to stderr, with a traceback.
        logging.getLogger("fastmcp").setLevel(logging.CRITICAL + 1)
    return settings
