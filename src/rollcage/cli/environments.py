"""Rollouts on a Fleet's environments from the command line: one's own task, or the demonstration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from rollcage.cli import rollouts
from rollcage.cli.output import Style, environment
from rollcage.cli.request import wanted
from rollcage.errors import SetupError
from rollcage.settings import FleetSettings, Settings
from rollcage.tasks import TaskFile
from rollcage.types import AgentSpec

if TYPE_CHECKING:
    from rollcage.testing.fleet_runtime import FleetRuntime


def run(env_key: str, task: str | None, options: dict[str, Any], style: Style) -> int:
    """`rollcage fleet run KEY TASK`: `rollcage run --environment fleet:KEY TASK`."""
    file = wanted(task, {**options, "environment": f"fleet:{env_key}"})
    return anyio.run(rollouts.run_file, environment(), file, style, backend_options={"use_uvloop": True})


def demo(agent: str, seed: int, style: Style) -> int:
    """`rollcage fleet demo --agent NAME`: a real agent, a scripted model, a local Fleet."""
    return anyio.run(_demo, agent, seed, style, backend_options={"use_uvloop": True})


async def _demo(agent: str, seed: int, style: Style) -> int:
    try:
        from rollcage.testing.fleet_runtime import FleetRuntime
        from rollcage.testing.fleet_runtime.task import desk_task
    except ImportError as error:
        raise SetupError("the local Fleet needs more packages: pip install 'rollcage[fleet]'") from error
    task = desk_task(seed, prefix="" if agent == "loop" else "env_")
    file = TaskFile(path=Path(), task=task, agent=AgentSpec(name=agent), environment="fleet:ticket-desk")
    async with FleetRuntime() as fleet:
        return await rollouts.run_file(settings_for(fleet, environment()), file, style)


def settings_for(fleet: FleetRuntime, settings: Settings) -> Settings:
    """The settings, with this local Fleet in place of any other."""
    from pydantic import SecretStr

    known = FleetSettings(api_key=SecretStr(fleet.key), base_url=fleet.base_url)
    return settings.model_copy(update={"fleet": known})
