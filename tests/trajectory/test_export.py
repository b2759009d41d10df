"""Rollouts as files: what is written comes back, and trainers' own libraries take it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rollcage
from rollcage.errors import UsageError
from rollcage.events import AgentStarted, Ended, Event, Queued, Scored, TurnEnded
from rollcage.results.fold import Rollout
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.trajectory import sequences
from rollcage.trajectory.export import COLUMNS, Format, load, open_export, rows_of
from rollcage.types import BatchPlace, Endpoint, Job, Outcome, Purpose, Reward, Task, Turn
from support.turns import turn

USER = {"role": "user", "content": "Fix it."}
CALLED = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "hm",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}],
}
ODD = {"id": "c2", "type": "function", "function": {"name": "read", "arguments": "{not json"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "a.py"}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def turns() -> list[Turn]:
    def asked(*messages: dict[str, Any]) -> dict[str, Any]:
        return {"messages": list(messages), "tools": TOOLS, "temperature": 1.0}

    odd = {"role": "assistant", "content": "look", "tool_calls": [ODD]}
    sub: dict[str, Any] = {"session": "b", "parent_session": "a", "purpose": Purpose.SUBAGENT}
    return [
        turn(0, [1, 2], [3, 4], session="a", request=asked(USER), message=CALLED),
        turn(1, [7], [8], request=asked(USER), message={"role": "assistant", "content": "sub"}, **sub),
        turn(2, [1, 2, 3, 4, 5], [6], session="a", request=asked(USER, CALLED, RESULT), message=odd),
    ]


def queued(group: str = "g") -> Queued:
    model = Endpoint(base_url="http://x/v1", model="m")
    place = BatchPlace(name=f"batch-{group}", cell="c", task="t", digest="d", model="m", agent="opencode", sample=1)
    return Queued(job=Job(task=Task(id="t", instruction="Fix it."), model=model, group_id=group), batch=place)


def log_of(home: Path) -> Path:
    return Settings.from_environ({"ROLLCAGE_HOME": str(home)}).log_path


async def logged(home: Path, *, count: int = 3) -> list[str]:
    """A log with some rollouts, of which the last earned nothing and is of another group."""
    names = [f"r{place:03}" for place in range(count)]
    async with Store.open(log_of(home)) as store:
        for place, name in enumerate(names):
            last = place == count - 1
            events: list[Event] = [queued("h" if last else "g"), AgentStarted(agent="opencode", version="1.18")]
            events += [TurnEnded(turn=each) for each in turns()]
            events += [Scored(reward=Reward(total=0.0 if last else 1.0)), Ended(outcome=Outcome.FINISHED)]
            for event in events:
                await store.append(name, event)
    return names


@pytest.fixture
async def rollout(tmp_path: Path) -> Rollout:
    (name,) = await logged(tmp_path, count=1)
    async with Store.open(log_of(tmp_path)) as store:
        return await store.rollout(name)


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("format", list(COLUMNS))
async def test_what_is_written_comes_back(format: Format, ending: str, rollout: Rollout, tmp_path: Path) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow", reason="rollcage[export] is not installed")
    path = tmp_path / f"out.{ending}"
    rows = rows_of(rollout, format)
    assert rows and all(list(row) == list(COLUMNS[format]) for row in rows)
    with open_export(path, format) as file:
        file.add(rollout.id, rows)
    back = load(path)
    if format == "sequences":
        merged = sequences(rollout)
        assert [each.model_copy(update={"logprobs": ()}) for each in back] == [
            each.model_copy(update={"logprobs": ()}) for each in merged
        ]
        assert [each.logprobs for each in back] == [pytest.approx(each.logprobs, abs=1e-6) for each in merged]
    elif format == "turns":
        assert [row["request"] for row in back] == [each.request for each in rollout.turns]
        assert [row["message"] for row in back] == [each.message for each in rollout.turns]
    else:
        assert back == plain(rows)
    assert rollcage.load(path) == back and [file.name for file in tmp_path.glob("out*")] == [path.name]


async def test_a_parquet_file_has_narrow_types_and_no_structs(rollout: Rollout, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="rollcage[export] is not installed")
    with open_export(tmp_path / "x.parquet", "turns") as file:
        file.add(rollout.id, rows_of(rollout, "turns"))
    types = {field.name: str(field.type) for field in parquet.read_schema(tmp_path / "x.parquet")}
    assert (types["prompt_token_ids"], types["logprobs"]) == ("list<element: int32>", "list<element: float>")
    assert types["request"] == types["message"] == "string" and not any("struct" in each for each in types.values())


async def test_half_a_record_is_not_in_a_file_of_turns(rollout: Rollout) -> None:
    half = rollout.turns[0].model_copy(update={"trainable": False, "untrainable_reason": "half"})
    (row,) = rows_of(rollout.model_copy(update={"turns": (half,)}), "turns")
    assert (row["prompt_token_ids"], row["completion_token_ids"], row["logprobs"]) == ((), [], [])
    assert row["untrainable_reason"] == "half"


async def test_sft_rows_train_exactly_what_was_sampled(rollout: Rollout) -> None:
    first, _ = rows_of(rollout, "sft")
    assert first["labels"] == (-100, -100, 3, 4, -100, 6) and first["assistant_masks"] == (0, 0, 1, 1, 0, 1)


async def test_messages_are_the_last_request_and_its_answer(rollout: Rollout) -> None:
    sub, agent = rows_of(rollout, "messages")
    assert [message["role"] for message in agent["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert agent["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"command": "ls"}'
    assert (sub["purpose"], agent["tools"]) == ("subagent", TOOLS)


async def test_the_published_validator_takes_our_trajectories(rollout: Rollout) -> None:
    atif = pytest.importorskip("atif", reason="the package atif is not installed")
    (row,) = rows_of(rollout, "atif")
    document = plain(row["trajectory"])
    checked = atif.Trajectory.model_validate(document)
    assert [step.source for step in checked.steps] == ["user", "agent", "agent"]
    first, second = document["steps"][1:]
    assert first["tool_calls"][0]["arguments"] == {"command": "ls"}
    assert first["observation"]["results"] == [{"source_call_id": "c1", "content": "a.py"}]
    assert first["metrics"]["completion_token_ids"] == [3, 4] and first["reasoning_content"] == "hm"
    assert second["extra"]["unparsed_arguments"] == {"c2": "{not json"}
    assert document["extra"]["reward"] == 0.0 and len(document["subagent_trajectories"]) == 1


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
async def test_an_interrupted_export_goes_on_where_it_stopped(rollout: Rollout, tmp_path: Path, ending: str) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow", reason="rollcage[export] is not installed")
    path = tmp_path / f"out.{ending}"

    def rows(name: str) -> list[dict[str, Any]]:
        return [{**row, "rollout_id": name} for row in rows_of(rollout, "sequences")]

    with pytest.raises(KeyboardInterrupt), open_export(path, "sequences") as file:
        for name in ("r1", "r2"):
            file.add(name, rows(name))
            file.finish()
        raise KeyboardInterrupt
    assert not path.exists()
    with open_export(path, "sequences") as file:
        # Of lines, the last rollout may be half of one: it is written again.
        assert file.done == ({"r1"} if ending == "jsonl" else {"r1", "r2"})
        for name in ("r1", "r2", "r3"):
            if name not in file.done:
                file.add(name, rows(name))
    assert [row.rollout_id for row in load(path)] == ["r1", "r1", "r2", "r2", "r3", "r3"]


def test_a_name_that_says_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must end in"), open_export(tmp_path / "x.csv", "turns"):
        pass


def ended(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollcage", "export", *arguments]
    environment = {**os.environ, "ROLLCAGE_HOME": str(home)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def run(home: Path, *arguments: str) -> str:
    """What the command prints; it must end well."""
    done = ended(home, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--group", "nope", "-o", "out.jsonl"], "no rollout has ended of group nope"),
        (["-o", "nowhere/out.jsonl"], "no such folder"),
        (["abc", "--group", "g"], "not both"),
    ],
)
async def test_what_cannot_be_meant_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    await logged(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    refused = ended(tmp_path, *arguments)
    assert refused.returncode == 2, refused.stderr
    assert words in refused.stderr
    assert {path for path in tmp_path.iterdir() if path.suffix != ".db"} <= before


async def test_the_command_exports_a_group(tmp_path: Path) -> None:
    names = await logged(tmp_path)
    out = tmp_path / "out.jsonl"
    assert "4 sequences of 2 rollouts" in run(tmp_path, "--group", "g", "-o", str(out))
    assert [row.rollout_id for row in rollcage.load(out)] == [names[0], names[0], names[1], names[1]]
    assert {row.reward for row in rollcage.load(out)} == {1.0}


async def test_the_command_exports_a_batch(tmp_path: Path) -> None:
    names = await logged(tmp_path)
    out = tmp_path / "out.jsonl"
    assert "2 sequences of 1 rollouts" in run(tmp_path, "--batch", "batch-h", "-o", str(out))
    assert {row.rollout_id for row in rollcage.load(out)} == {names[2]}


async def test_the_command_filters_by_reward_and_by_id(tmp_path: Path) -> None:
    names = await logged(tmp_path)
    out = tmp_path / "out.jsonl"
    told = json.loads(run(tmp_path, "--min-reward", "1", "--per-turn", "-o", str(out), "--json"))
    assert (told["rows"], told["rollouts"]) == (6, 2)
    printed = run(tmp_path, names[2], "--format", "sft")
    assert {json.loads(line)["rollout_id"] for line in printed.splitlines()} == {names[2]}
