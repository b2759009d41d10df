"""`rollcage agent`: which coding agents there are, fetch one, try one out. Heavy parts are imported when used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from rollcage.cli import codes
from rollcage.cli.options import JSON

if TYPE_CHECKING:
    from rollcage.settings import Settings


@click.group()
def agent() -> None:
    """The coding agents.

    \b
    Examples:
      rollcage agent ls
      rollcage agent install codex
      rollcage agent check codex
    """


@agent.command("ls")
@JSON
def list_agents(as_json: bool) -> int:
    """List the agents: version, wire, size, and what a run costs.

    The wire is what an agent speaks to its model. CPU is that of a rollout of three model calls, as `agent install` or
    `agent check` measured it on this machine.

    \b
    Example:
      rollcage agent ls --json
    """
    from rollcage.cli.output import environment, write_json
    from rollcage.cli.prepare import describe
    from rollcage.cli.screen import screen

    settings = environment()
    rows = describe(settings)
    if as_json:
        write_json({"agents": rows})
        return codes.OK
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("agent", "version", "wire", "installed", "size", "CPU"):
        table.add_column(title)
    for row in rows:
        here = {True: "yes", False: "no", None: "needs nothing"}[row["installed"]]
        size = f"{row['bytes'] / 1e6:.0f} MB" if row["bytes"] else ""
        cpu = f"{row['start_cpu_s']:.1f} s" if row["start_cpu_s"] is not None else ""
        table.add_row(row["name"], row["version"], row["wire"], here, size, cpu)
    screen(settings).print(table)
    return codes.OK


@agent.command()
@click.argument("names", nargs=-1, required=True)
@JSON
def install(names: Sequence[str], as_json: bool) -> int:
    """Fetch agents and build their layers, once.

    Then what a rollout with each costs in CPU is measured.

    \b
    Examples:
      rollcage agent install codex pi
      rollcage agent install codex@0.169.0
    """
    import anyio

    from rollcage.cli.output import environment, write_json
    from rollcage.cli.prepare import known_agent, prepare, tell
    from rollcage.cli.start_cost import measure_start

    settings, costs = environment(), {}

    async def install() -> list[str]:
        built = []
        for name in names:
            built += [layer.name for layer in await prepare(settings, name)]
            known = known_agent(settings, name)
            costs[name] = cost = await measure_start(settings, known)
            cpu = f"; a rollout of three model calls takes {cost} s of CPU" if cost is not None else ""
            tell(f"{name} {'is here' if known.layers() else 'needs nothing'}{cpu}")
        return built

    built = anyio.run(install)
    if as_json:
        write_json({"built": built, "start_cpu_s": costs})
    return codes.OK


@agent.command()
@click.argument("name")
@click.option("--only", multiple=True, metavar="CHECK", help="Only this check, or those whose names begin with this.")
@click.option("--sandbox", "backend", default="local", metavar="NAME", help="The backend whose boxes it is tried in.")
@JSON
def check(name: str, only: Sequence[str], backend: str, as_json: bool) -> int:
    """Try out an agent with a scripted model.

    Everything that an agent must hold is checked.

    Exit code 0: it is fit for use. 1: a check failed. 3: no box can be opened here.

    \b
    Examples:
      rollcage agent check codex
      rollcage agent check path/to/agent.py:MyAgent --only prompt --json
    """
    import anyio

    from rollcage.cli.output import environment

    return anyio.run(_check, environment(), name, only, backend, as_json)


async def _check(settings: Settings, name: str, only: Sequence[str], backend: str, as_json: bool) -> int:
    from rollcage.agents.base import InProcess
    from rollcage.cli.prepare import known_agent, prepare
    from rollcage.cli.sandbox import report
    from rollcage.cli.start_cost import measure_start
    from rollcage.conformance.agents import check as verdicts
    from rollcage.conformance.agents import chosen
    from rollcage.conformance.sandboxes.backends import traits_of
    from rollcage.errors import UsageError
    from rollcage.types import SandboxSpec
    from rollcage.wiring import providers

    tried, backends = known_agent(settings, name), providers(settings)
    if backend not in backends:
        raise UsageError(f"no sandbox backend is called {backend!r}; there are {', '.join(backends)}")
    chosen(only)
    if backend == "local":
        await prepare(settings, name)
        await measure_start(settings, tried)
    async with backends[backend]() as provider:
        traits = traits_of(provider)
        if not isinstance(tried, InProcess):
            # Where no box can be opened, nothing is tried; what it lacks of the agent is built now.
            async with provider.open(SandboxSpec(backend=backend, template=traits.template), tried.layers()):
                pass
        tries = verdicts(tried, provider, only=only, pace=traits.pace, template=traits.template)
        return await report(settings, {"agent": name, "version": tried.version}, tries, as_json)
