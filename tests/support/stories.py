"""Made-up rollouts, and what the view says about them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollcage.cli.narrator import FANCY, Narrator
from rollcage.cli.screen import Screen
from rollcage.events import (
    AgentEnded,
    AgentStarted,
    BoxOpened,
    CommandEnded,
    CommandStarted,
    Ended,
    Entry,
    Event,
    FilesCollected,
    Queued,
    Scored,
    StageEnded,
    StageStarted,
    Suspicion,
    TurnEnded,
)
from rollcage.types import CommandResult, Endpoint, Job, Outcome, Reward, Stage, Task, Token, Turn
from support.opencode_events import opencode

LOG = Path("/nowhere/rollouts.db")


def log_of(events: Sequence[Event]) -> list[Entry]:
    return [Entry(rollout_id="0a1b2c3d", seq=n, time=100 + n / 10, event=e) for n, e in enumerate(events, 1)]


def turn(index: int, text: str = "hi", **fields: Any) -> Turn:
    values = {
        "index": index,
        "request": {},
        "message": {"role": "assistant", "content": text},
        "tokens": (Token("h", 1, -0.5), Token("i", 2, -0.25)),
        "prompt_ids": tuple(range(1200)),
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 1200, "completion_tokens": 2},
        "status": 200,
        "trainable": True,
        "seconds": 0.25,
        **fields,
    }
    return Turn.model_validate(values)


def tool(
    name: str, asked: dict[str, Any], output: str = "", code: int | None = None, status: str = "completed"
) -> Event:
    state = {"status": status, "input": asked, "output": output, "error": output, "metadata": {"exit": code}}
    return opencode({"type": "tool_use", "part": {"type": "tool", "tool": name, "state": state}})


def words(text: str, kind: str = "text") -> Event:
    return opencode({"type": kind, "part": {"type": kind, "text": text}})


def command(stage: Stage, text: str, code: int = 0, stderr: str = "", timed_out: bool = False) -> list[Event]:
    result = CommandResult(command=text, exit_code=code, stderr=stderr, seconds=0.012, timed_out=timed_out)
    return [CommandStarted(stage=stage, command=text), CommandEnded(stage=stage, result=result)]


def rollout_log(kind: str = "scripted") -> list[Entry]:
    task = Task(id="t1", instruction="Make it so.\nPlease.", files={"a.py": "1\n", "b.py": "2\n"})
    job = Job(task=task, model=Endpoint(base_url="http://h/v1", model="m1", kind=kind))
    edit = {"filePath": "/home/user/workdir/a.py", "oldString": "one", "newString": "two"}
    return log_of(
        [
            Queued(job=job, owner="o"),
            StageStarted(stage=Stage.PROVISION),
            BoxOpened(sandbox_id="box-1", backend="local", notes=("memory is not limited here",)),
            StageEnded(stage=Stage.PROVISION, seconds=0.02),
            StageStarted(stage=Stage.SETUP),
            *command(Stage.SETUP, "git init"),
            StageEnded(stage=Stage.SETUP, seconds=0.1),
            StageStarted(stage=Stage.AGENT),
            AgentStarted(agent="opencode", version="1.0"),
            TurnEnded(turn=turn(0)),
            words("I think so.", "reasoning"),
            words("I will fix it."),
            tool("bash", {"command": "make"}, "\n".join(f"row {n}" for n in range(20)), code=2),
            tool("edit", edit),
            TurnEnded(turn=turn(1, trainable=False, untrainable_reason="ids are missing", finish_reason="length")),
            AgentEnded(exit_code=0),
            StageEnded(stage=Stage.AGENT, seconds=61),
            StageStarted(stage=Stage.VERIFY),
            Suspicion(what="changed outside the workdir", paths=("/home/user/.bashrc",)),
            FilesCollected(files={"a.py": "two\n", "b.py": "2\n", "c.py": "3\n"}, extra=("big.bin",)),
            *command(Stage.VERIFY, "pytest", 1, "E\nassert 1 == 2"),
            Scored(reward=Reward(total=0.5)),
            StageEnded(stage=Stage.VERIFY, seconds=0.5),
            Ended(outcome=Outcome.FINISHED),
        ]
    )


def shown(pieces: Any, **options: Any) -> str:
    out = io.StringIO()
    screen_options: dict[str, Any] = {"width": 110, "markup": False, "highlight": False, "emoji": False, **options}
    Screen(file=out, **screen_options).put(pieces)
    return out.getvalue()


def told(entries: Sequence[Entry]) -> str:
    narrator = Narrator(FANCY, 100)
    return "\n".join(line.plain for entry in entries for line in narrator.tell(entry))
