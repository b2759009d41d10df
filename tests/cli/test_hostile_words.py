"""Models and agents that say what no JSON tool will carry: the rollout goes on, and the log has the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollcage.events import Queued
from rollcage.store import Store
from rollcage.types import Endpoint, Job, Outcome, ScriptedCall, ScriptedTurn, Task
from support.opencode_events import opencode
from support.playing import Play

JOB = Job(task=Task(instruction="x"), model=Endpoint(base_url="http://127.0.0.1:9/v1", model="m"))


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "data",
    [{"deep": nested(300)}, {"deep": nested(900)}, {"a": {"\ud800": 1}}, {"a": {"b": "\udfff"}}, {"a": float("nan")}],
    ids=["deep", "deeper", "broken key", "broken text", "no number"],
)
async def test_whatever_an_agent_says_can_be_logged_and_read(data: dict[str, Any], store: Store) -> None:
    await store.append("r", Queued(job=JOB, owner="o"))
    await store.append("r", opencode({"type": "odd", **data}))
    [said] = (await store.rollout("r")).agent_raw
    assert said["type"] == "odd"
    assert set(said) == {"type", *data}


async def test_a_model_that_nests_its_arguments_does_not_end_its_rollout(play: Play) -> None:
    deep = ScriptedCall(name="bash", raw_arguments='{"command": "true", "x": ' + "[" * 300 + "]" * 300 + "}")
    rollout = await play(
        Task(instruction="x", verify=("true",)),
        script=(ScriptedTurn(tool_calls=(deep,)), ScriptedTurn(text="Done.")),
    )
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    assert rollout.reward is not None


async def test_an_agent_that_hangs_up_on_its_model_is_scored_all_the_same(play: Play) -> None:
    body = json.dumps({"model": "model", "messages": [{"role": "user", "content": "x"}], "stream": True})
    hang_up = f"""
import os, socket
request = {body!r}
s = socket.create_connection(("127.0.0.1", 7000))
head = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Authorization: Bearer " + os.environ["OPENAI_API_KEY"]]
head += ["Content-Type: application/json", "Content-Length: " + str(len(request)), "", request]
s.sendall("\\r\\n".join(head).encode())
s.recv(10)
"""
    task = Task(instruction=f"python3 - <<'E'\n{hang_up}\nE\nexit 1", verify=("false",))
    slow = ScriptedTurn(text="a long answer that nobody will hear to its end", token_delay_s=0.5)
    rollout = await play(task, agent="shell", script=(slow,))
    assert rollout.outcome is Outcome.AGENT_FAILED, rollout.error
    assert rollout.reward == 0
    assert rollout.turns[0].error is not None


async def test_an_agent_that_asks_for_what_its_engine_does_not_have_is_scored_all_the_same(play: Play) -> None:
    ask = """
import json, os, urllib.error, urllib.request
chat = {"model": "model", "messages": [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]}
for path, body in (("chat/completions", chat), ("completions", {"model": "model", "prompt": "x"})):
    request = urllib.request.Request("http://127.0.0.1:7000/v1/" + path, json.dumps(body).encode())
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    request.add_header("Content-Type", "application/json")
    try:
        urllib.request.urlopen(request).read()
    except urllib.error.HTTPError:
        pass
"""
    task = Task(instruction=f"python3 - <<'E'\n{ask}\nE\nexit 1", verify=("false",))
    rollout = await play(task, agent="shell", script=(ScriptedTurn(status=404), ScriptedTurn(text="x")))
    assert [turn.status for turn in rollout.turns] == [200, 404]
    assert rollout.outcome is Outcome.AGENT_FAILED, rollout.error
    assert rollout.reward == 0
