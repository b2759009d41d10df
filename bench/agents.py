"""What each agent from a registry costs: CPU of its own processes in a rollout with three model calls, prompt, size.

    python bench/agents.py [NAME ...]

CPU is what bash's `time` says in the box of the agent and all it waited for: the median of three rounds, in turn.
OpenCode's is in `bench/drivers.py`.
"""

from __future__ import annotations

import os
import statistics
import sys
from typing import Any

import anyio

from rollcage.agents.cli_agent import CliAgent
from rollcage.agents.conformance import opened_subject
from rollcage.settings import Settings
from rollcage.wiring import agents, provider

ROUNDS = 3
TIMED = "TIMEFORMAT='cpu %U %S'; time \"$@\""


def timed(agent: CliAgent) -> CliAgent:
    """The same agent, which also prints what it cost."""
    kind = type(agent)
    program: Any = property(lambda self: ["bash", "-c", TIMED, "timed", *kind.program.__get__(self)])
    made: CliAgent = type(kind.__name__, (kind,), {"program": program})(agent.downloads)
    return made


async def main() -> None:
    """Print one line per agent."""
    settings = Settings.from_environ(os.environ)
    known = {name: agent for name, agent in agents(settings).items() if isinstance(agent, CliAgent)}
    names = sys.argv[1:] or list(known)
    cpu: dict[str, list[float]] = {name: [] for name in names}
    prompt: dict[str, int] = {}
    async with provider(settings) as boxes:
        for _ in range(ROUNDS):
            for name in names:
                async with opened_subject(timed(known[name]), boxes) as subject:
                    played = await subject.play("Write a note.", subject.script("echo written 42 > note.txt", "true"))
                rollout = played.rollout
                assert (rollout.reward, len(rollout.turns)) == (1.0, 3), rollout.error
                spent = rollout.agent_stderr_tail.rpartition("cpu ")[2].split()
                cpu[name].append(float(spent[0]) + float(spent[1]))
                prompt[name] = rollout.turns[0].usage["prompt_tokens"]
    print("| agent | CPU of three model calls | prompt tokens of the first |\n|---|---|---|")
    for name in names:
        print(f"| `{name}` | {statistics.median(cpu[name]):.2f} s | {prompt[name]:,} |")


if __name__ == "__main__":
    anyio.run(main)
