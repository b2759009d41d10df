"""Logs that an older rollcage wrote: every view reads them as if they were written today.

`data/log_v1.db.gz` was written by the version before agents' events were neutral: OpenCode by both drivers, the shell,
a model that refuses, and the loop on a remote environment.
"""

from __future__ import annotations

import gzip
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollcage.agent_events import AgentEvent, AgentReportedError, AgentText, AgentToolCall, AgentUsage
from rollcage.agents.cli_agent import Downloads
from rollcage.agents.opencode import OpenCode
from rollcage.agents.opencode.neutral import event_of
from rollcage.cli.narrator import FANCY, Narrator
from rollcage.errors import StoreError
from rollcage.events import AgentEmitted, Queued
from rollcage.results.fold import Rollout
from rollcage.results.result import result_of
from rollcage.server.compact import compact
from rollcage.server.transcript import KINDS, transcript_of
from rollcage.store import Query, Store
from rollcage.store.sqlite import MIGRATIONS
from rollcage.store.upcast import UPCASTS, VERSION, upcast
from rollcage.types import Endpoint, Job, Outcome, Task

OLD_LOG = Path(__file__).parents[1] / "data" / "log_v1.db.gz"
JOB = Job(task=Task(instruction="x"), model=Endpoint(base_url="http://127.0.0.1:9/v1", model="m"))


@pytest.fixture
async def old(tmp_path: Path) -> AsyncIterator[Store]:
    path = tmp_path / "rollouts.db"
    path.write_bytes(gzip.decompress(OLD_LOG.read_bytes()))
    async with Store.open(path) as store:
        yield store


async def rollouts_of(store: Store) -> list[Rollout]:
    """In the order in which they were run: OpenCode by `run` and by `serve`, shell, refused, loop."""
    return [await store.rollout(row.id) for row in reversed(await store.list())]


def events_of(rollout: Rollout) -> list[AgentEvent]:
    return [emitted.event for emitted in rollout.agent_events]


async def test_an_old_log_is_brought_to_the_newest_schema_and_its_entries_stay_as_they_were(old: Store) -> None:
    with sqlite3.connect(old.path) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
        assert file.execute("SELECT DISTINCT version FROM entries").fetchall() == [(1,)]
        kinds = {row[0] for row in file.execute("SELECT DISTINCT kind FROM entries")}
        assert {"agent_said", "noticed"} <= kinds and not kinds & {"agent_event", "suspicion"}
        words = {row[0] for row in file.execute("SELECT outcome FROM rollouts")}
        assert words == {"finished", "agent_failed"}
        old_ends = "SELECT count(*) FROM entries WHERE kind = 'ended' AND instr(body, '\"succeeded\"')"
        assert file.execute(old_ends).fetchone() == (4,), "an entry is never changed"
    found, _ = await old.page(Query(outcome=Outcome.FINISHED))
    assert len(found) == 4
    first = (await old.list())[0].id
    assert {entry.event.kind for entry in await old.read(first, kinds=KINDS)} == {"queued", "agent_event"}


async def test_what_every_agent_said_in_an_old_log_is_neutral_now(old: Store) -> None:
    run, serve, shell, refused, loop = await rollouts_of(old)
    for rollout in (run, serve):
        calls = [event for event in events_of(rollout) if isinstance(event, AgentToolCall) and event.ended]
        assert [(call.name, call.kind, call.status) for call in calls] == [
            ("write", "edit", "completed"),
            ("edit", "edit", "completed"),
            ("bash", "execute", "completed"),
            ("read", "read", "error"),
        ]
        assert calls[0].edits[0].added == "print('helo')\n" and calls[0].edits[0].change == "write"
        assert (calls[1].edits[0].removed, calls[1].edits[0].added) == ("helo", "hello")
        assert calls[2].exit_code == 3 and calls[2].title.startswith("python3 hello.py")
        assert calls[2].seconds is not None and calls[2].seconds >= 1
        assert "not found" in calls[3].error
        texts = [event for event in events_of(rollout) if isinstance(event, AgentText) and event.final]
        assert [text.text for text in texts if text.role == "assistant"] == ["I will write it.", "All of it is done."]
        assert len([event for event in events_of(rollout) if isinstance(event, AgentUsage)]) == 5
        assert [suspicion.paths for suspicion in rollout.suspicions] == [("/home/user/planted",)]
    users = [event.text for event in events_of(serve) if isinstance(event, AgentText) and event.role == "user"]
    assert users == [serve.job.task.instruction]
    assert {event.type for event in events_of(serve)} >= {"session", "delta", "reasoning", "raw"}
    assert sorted(event.text for event in events_of(shell) if event.type == "output") == ["err\n", "out\n"]
    [error] = [event for event in events_of(refused) if isinstance(event, AgentReportedError)]
    assert (error.name, error.text) == ("APIError", "no such model")
    assert [event.type for event in events_of(loop)] == ["tool_call"] * 5 + ["text"]


async def test_an_old_event_reads_as_todays_adapter_would_write_it(old: Store) -> None:
    for rollout in (await rollouts_of(old))[:2]:
        for emitted in rollout.agent_events:
            assert emitted.raw is not None
            user = isinstance(emitted.event, AgentText) and emitted.event.role == "user"
            now = event_of(emitted.raw, by_user=user)
            if isinstance(now, AgentToolCall):  # an edit's diff is kept since
                now = now.model_copy(update={"edits": tuple(e.model_copy(update={"diff": ""}) for e in now.edits)})
            assert emitted.event == now


async def test_every_view_reads_an_old_log(old: Store, tmp_path: Path) -> None:
    agents = {"opencode": OpenCode(Downloads(tmp_path))}
    run, serve, shell, _, loop = await rollouts_of(old)
    for rollout in (run, serve, shell, loop):
        entries = await old.read(rollout.id)
        narrator = Narrator(FANCY, 100)
        told = "\n".join(line.plain for entry in entries for line in narrator.tell(entry))
        assert "is at work" in told and (rollout is loop or "changed outside the workdir" in told)
        assert [compact(entry)["seq"] for entry in entries] == list(range(1, len(entries) + 1))
        assert result_of(rollout).reward == 1.0
        assert rollout.outcome is Outcome.FINISHED
        assert len(result_of(rollout).suspicions) == (0 if rollout is loop else 1)
        messages = transcript_of(entries, agents)
        assert messages[0].parts[0]["text"] == rollout.job.task.instruction
        assert len(messages) > 1
        if rollout in (run, serve):
            assert "exit 3" in told and "+ hello" in told and "All of it is done." in told
            assert messages[-1].parts[-1]["type"] == "step-finish", "in OpenCode's own shape"
    sessions = [row.session for row in await old.list()]
    await old.rebuild()
    assert [row.session for row in await old.list()] == sessions
    assert (await old.summary(serve.id)).session.startswith("ses_")


async def test_a_transcript_of_neutral_events_has_the_shape_of_all_transcripts(old: Store) -> None:
    run, _, _, _, loop = await rollouts_of(old)
    messages = transcript_of(await old.read(loop.id), {})
    assert [message.info["role"] for message in messages] == ["user"] + ["assistant"] * 6
    assert messages[1].parts[0]["tool"] == "search_tickets"
    assert messages[1].parts[0]["state"]["status"] == "completed"
    told = transcript_of(await old.read(run.id), {})
    own = transcript_of(await old.read(run.id), {"opencode": OpenCode(Downloads(Path()))})
    visible = [[part for part in message.parts if not part["type"].startswith("step-")] for message in own]
    assert [[part["type"] for part in parts] for parts in visible] == [[p["type"] for p in m.parts] for m in told]


async def test_old_and_new_entries_stand_side_by_side(old: Store) -> None:
    await old.append("new", Queued(job=JOB))
    await old.append("new", AgentEmitted(event=AgentText(text="hello")))
    with sqlite3.connect(old.path) as file:
        file.execute(
            "INSERT INTO entries (rollout_id, seq, time, kind, body) VALUES ('new', 3, 1.0, 'agent_said', ?)",
            ('{"kind":"agent_said","data":{"type":"text","part":{"type":"text","text":"bye"}}}',),
        )
    texts = [emitted.event for emitted in (await old.rollout("new")).agent_events]
    assert [event.text for event in texts if isinstance(event, AgentText)] == ["hello", "bye"]


async def test_an_entry_of_a_version_to_come_is_refused_in_words(tmp_path: Path) -> None:
    async with Store.open(tmp_path / "log.db") as store:
        await store.append("r", Queued(job=JOB))
        with sqlite3.connect(store.path) as file:
            file.execute(
                "INSERT INTO entries (rollout_id, seq, time, kind, body, version) VALUES ('r', 2, 1.0, 'news', ?, ?)",
                ('{"kind":"news"}', VERSION + 1),
            )
        with pytest.raises(StoreError, match=r"entry 2 of rollout r.*newer rollcage"):
            await store.read("r")


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"type": []},
        {"type": "text", "part": 3},
        {"type": "tool_use", "part": {"state": {"input": {"a": "\ud800"}}}},
    ],
)
def test_old_words_of_any_shape_are_borne(data: dict[str, Any]) -> None:
    event = upcast({"kind": "agent_said", "data": data}, 1)
    assert AgentEmitted.model_validate(event).raw == data


def test_what_is_of_today_is_left_alone() -> None:
    body = {"kind": "agent_said", "data": {}}
    assert upcast(body, VERSION) is body
    assert len(UPCASTS) + 1 == VERSION
