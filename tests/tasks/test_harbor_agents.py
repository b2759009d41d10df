"""Tasks in Harbor's format with a real agent, a verifier that fetches something, and code that cheats."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollcage.sandboxes import mirrors
from rollcage.simulators import ScriptedModel
from rollcage.tasks import TaskFile, load
from rollcage.types import Limits, ScriptedCall, ScriptedTurn
from support.paths import ROOT
from support.playing import Play

FOLDERS = ROOT / "tests" / "data" / "harbor"
DONE = ScriptedTurn(text="Done.")
INDEX = "127.0.0.2"
"""As in test_setup_network."""


def bash(command: str) -> ScriptedTurn:
    return ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": command, "description": "work"}),))


def judged_by(tmp_path: Path, script: str) -> TaskFile:
    """The plainest task of them, with this verifier."""
    folder = Path(shutil.copytree(FOLDERS / "greeting", tmp_path / "task"))
    (folder / "tests" / "test.sh").write_text(f"#!/bin/bash\nmkdir -p /logs/verifier\n{script}\n")
    return load(folder)


async def test_opencode_works_at_the_task_s_own_paths_as_root(play: Play, model: ScriptedModel) -> None:
    file = load(FOLDERS / "own-paths")
    look = bash("pwd | tee /app/where; id -u; echo $HOME; touch /etc/made /root/made")
    rollout = await play(file.task, endpoint=model.endpoint((look, DONE)), sandbox=file.sandbox)
    assert (rollout.reward, rollout.error) == (1, None)
    assert "/app\n0\n/root" in str(rollout.turns[1].request["messages"][-1]["content"])
    asked = json.dumps(rollout.turns[0].request)
    assert "/app" in asked and "/home/user/workdir" not in asked, "its prompt names the task's path"
    assert all(turn.trainable for turn in rollout.turns)


async def test_opencode_calls_the_tools_of_a_server_in_its_box(play: Play, model: ScriptedModel) -> None:
    file = load(FOLDERS / "mcp-server")
    call = ScriptedTurn(tool_calls=(ScriptedCall(name="env_stamp", arguments={"text": "paper"}),))
    rollout = await play(file.task, endpoint=model.endpoint((call, DONE)), sandbox=file.sandbox)
    assert (rollout.reward, rollout.error) == (1, None)
    assert "paper is stamped" in str(rollout.turns[1].request["messages"][-1]["content"])


async def test_turns_of_all_steps_are_numbered_through_and_counted_together(play: Play, model: ScriptedModel) -> None:
    file = load(FOLDERS / "several-steps")
    script = (bash("echo one > /app/first; touch /etc/kept; echo two > /app/second"), DONE)
    rollout = await play(file.task, agent="mini", endpoint=model.endpoint(script), sandbox=file.sandbox)
    assert (rollout.reward, rollout.error) == (1, None)
    assert [turn.index for turn in rollout.turns] == [0, 1, 2, 3]
    asked = [str(turn.request["messages"]) for turn in rollout.turns]
    assert "Write one" in asked[0] and "Write two" in asked[2] and "Write one" not in asked[2], "a session of its own"
    fewer = file.task.model_copy(update={"limits": Limits(max_turns=3)})
    cut = await play(fewer, agent="mini", endpoint=model.endpoint(script), sandbox=file.sandbox)
    assert len(cut.turns) == 3 and cut.outcome == "limit_reached" and cut.reward == 1, cut.error


class _Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"1")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nobody reads it."""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package index, which this machine's pip is configured with."""
    server = ThreadingHTTPServer((INDEX, 0), _Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://{INDEX}:{server.server_address[1]}"
    for name, value in {"PIP_INDEX_URL": address, "PIP_NO_INDEX": "0", "PIP_EXTRA_INDEX_URL": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mirrors, "_known", [])
    yield address
    server.shutdown()
    server.server_close()


async def test_a_verifier_reaches_the_hosts_that_it_is_allowed_and_no_others(
    play: Play, tmp_path: Path, index: str
) -> None:
    get = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read().decode())"
    script = f'python3 -c "{get}" {index}/x > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt'
    file = judged_by(tmp_path, script)
    closed = await play(file.task, agent="nop", sandbox=file.sandbox)
    opened = file.sandbox.model_copy(update={"verify_hosts": ("packages",)})
    allowed = await play(file.task, agent="nop", sandbox=opened)
    other = file.sandbox.model_copy(update={"verify_hosts": ("index.example",)})
    refused = await play(file.task, agent="nop", sandbox=other)
    assert (closed.reward, allowed.reward, refused.reward) == (0, 1, 0)
    assert refused.verify[0].refused_hosts == (INDEX,)


async def test_code_that_the_verifier_launches_reaches_nothing_of_it_there_either(play: Play, tmp_path: Path) -> None:
    cheat = "echo 1 > /logs/verifier/reward.txt; cat /tests/test.sh > /app/seen; echo stray > /etc/stray"
    script = (
        "cd /app; untrusted --timeout 20 bash ./work.sh; [ ! -s seen ] && [ ! -e /etc/stray ] || exit 1\n"
        "[ ! -e /logs/verifier/reward.txt ] || exit 1\necho 0.5 > /logs/verifier/reward.txt"
    )
    file = judged_by(tmp_path, script)
    task = file.task.model_copy(update={"instruction": f"printf '%s\\n' '{cheat}' > /app/work.sh"})
    rollout = await play(task, agent="shell", sandbox=file.sandbox)
    assert (rollout.reward, rollout.error) == (0.5, None), rollout.verify
