"""What a model says can be heard while it says it, from another process too."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import anyio

from rollcage.events import AgentStarted
from rollcage.runner import Owners, Runner
from rollcage.runner.live import subscribe
from rollcage.simulators import ScriptedModel
from rollcage.store import Store
from rollcage.types import Job, Outcome, ScriptedTurn, Task


async def test_a_turn_is_heard_before_it_is_in_the_log(runner: Runner, store: Store, model: ScriptedModel) -> None:
    slow = ScriptedTurn(text="one two three four five six seven eight nine ten", token_delay_s=0.1)
    rollout_id = await runner.start(Job(task=Task(instruction="count"), model=model.endpoint((slow,))))
    owner = (await store.rollout(rollout_id)).owner
    words, turns_then = "", -1
    async for entry in store.follow(rollout_id):
        if isinstance(entry.event, AgentStarted):
            async for delta in subscribe(Owners.beside(store).socket(owner), rollout_id):
                words += delta.content
                if turns_then < 0 and words:
                    turns_then = len((await store.rollout(rollout_id)).turns)
                if delta.ended:
                    break
    assert turns_then == 0, "heard while the log had nothing of it"
    assert words == slow.text
    rollout = await runner.wait(rollout_id)
    assert rollout.outcome is Outcome.FINISHED
    assert rollout.turns[0].message["content"] == slow.text


async def test_nobody_speaks_where_nobody_runs_it(store: Store, tmp_path: Path) -> None:
    assert [delta async for delta in subscribe(tmp_path / "nobody.live", "x")] == []


async def test_watching_from_another_terminal_shows_the_words_as_they_come(
    runner: Runner, store: Store, model: ScriptedModel, state_dir: Path
) -> None:
    """`rollcage watch` on a pseudo-terminal, in a process of its own, on the log of this one."""
    slow = ScriptedTurn(text="apple banana cherry durian elderberry fig grape honeydew", token_delay_s=0.4)
    home = store.path.parent
    rollout_id = await runner.start(Job(task=Task(instruction="fruit"), model=model.endpoint((slow,))))
    main, side = pty.openpty()
    environment = {**os.environ, "ROLLCAGE_HOME": str(home), "TERM": "xterm", "COLUMNS": "200", "LINES": "40"}
    watcher = subprocess.Popen(
        [sys.executable, "-m", "rollcage", "watch", rollout_id], stdout=side, stderr=side, env=environment
    )
    os.close(side)
    seen = await anyio.to_thread.run_sync(_all_of, main)
    assert watcher.wait() == 0
    assert "so far: " in seen
    assert "apple banana" in seen.split("so far: ", 1)[1]
    assert (await runner.wait(rollout_id)).outcome is Outcome.FINISHED


def _all_of(terminal: int) -> str:
    seen = b""
    try:
        while chunk := os.read(terminal, 65536):
            seen += chunk
    except OSError:  # the other side is closed
        pass
    os.close(terminal)
    return seen.decode("utf-8", "replace")
