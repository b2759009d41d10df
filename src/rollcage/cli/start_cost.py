"""What an agent's start costs on this machine: measured when it is installed or checked, and kept beside its layers.

It is the CPU of the agent's own processes in a rollout of three scripted model calls, in a local box.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from rollcage.agents.base import Agent, Scriptable
from rollcage.errors import RollcageError
from rollcage.settings import Settings
from rollcage.wiring import provider


def start_costs(settings: Settings) -> dict[str, float]:
    """CPU seconds by `name@version`, of those that were measured here."""
    with suppress(OSError, ValueError):
        kept = json.loads(_file(settings).read_text(encoding="utf-8"))
        return {str(name): float(cost) for name, cost in kept.items()}
    return {}


async def measure_start(settings: Settings, agent: Agent) -> float | None:
    """Measure it and keep what was found; None where it needs nothing, or cannot be run here."""
    from rollcage.conformance.agents import opened_subject

    if not agent.layers() or not isinstance(agent, Scriptable) or agent.tool_words is None:
        return None
    try:
        async with provider(settings) as boxes, opened_subject(agent, boxes) as subject:
            cost = await subject.start_cost()
            cost = None if cost is None else round(cost, 2)
    except RollcageError:
        return None
    if cost is not None:
        kept = {**start_costs(settings), f"{agent.name}@{agent.version}": cost}
        draft = _file(settings).with_suffix(".draft")
        draft.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        draft.replace(_file(settings))
    return cost


def _file(settings: Settings) -> Path:
    return settings.home / "agent-costs.json"
