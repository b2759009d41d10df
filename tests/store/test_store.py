"""The log: what is appended comes back as it was, in order, once, to everybody who follows it."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import zstandard
from pydantic import SecretStr

from rollcage.errors import StoreError, UnknownRollout, UsageError
from rollcage.events import (
    AbortRequested,
    AgentEmitted,
    CommandEnded,
    Ended,
    Entry,
    Event,
    FilesCollected,
    Queued,
    Scored,
    StageEnded,
    StageStarted,
    TurnEnded,
)
from rollcage.store import Store
from rollcage.store.sqlite import MIGRATIONS
from rollcage.types import Alternative, CommandResult, Endpoint, Job, Outcome, Reward, Stage, Task, Token, Turn

KEY = "sk-not-for-any-disk-0123456789"


def queued(instruction: str = "Fix the bug", owner: str = "me") -> Queued:
    model = Endpoint(base_url="http://127.0.0.1:1/v1", model="tiny", key=SecretStr(KEY))
    return Queued(job=Job(task=Task(id="t1", instruction=instruction), model=model), owner=owner)


def said(number: int) -> AgentEmitted:
    return AgentEmitted(raw={"number": number})


def turn(index: int = 0, tokens: int = 3) -> TurnEnded:
    top = (Alternative(" a", 1, -0.5), Alternative(" b", 2, -1.25))
    rows = tuple(Token(f" {n}", n, -n / 8, top[: n % 3]) for n in range(tokens))
    request = {"messages": [{"role": "user", "content": "long " * 300}], "temperature": 0.1}
    return TurnEnded(turn=Turn(index=index, request=request, prompt_ids=tuple(range(2000)), tokens=rows))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store.open(tmp_path / "state" / "log.db") as store:
        yield store


async def test_what_was_appended_is_read_back_as_it_was(store: Store) -> None:
    events: list[Event] = [
        queued(),
        StageStarted(stage=Stage.AGENT),
        turn(tokens=700),
        AgentEmitted(
            raw={"$blob": "mine", "text": "half a smile \ud83d", "big": 2**80, "deep": [[[1.5], []], [["$list"]]]}
        ),
        AgentEmitted(raw={"$plain": {"$blob": "mine too"}}),
        FilesCollected(files={"a.py": "print()\n" * 500, "b.py": "\x00"}),
        CommandEnded(stage=Stage.VERIFY, result=CommandResult(command="true", exit_code=0, stdout="x" * 5000)),
        Scored(reward=Reward(total=float("-inf"), parts={"a": 0.1})),
        Ended(outcome=Outcome.FINISHED),
    ]
    appended = [await store.append("r", event) for event in events]
    read = await store.read("r")
    assert [entry.event for entry in read[1:]] == events[1:]
    assert [entry.seq for entry in read] == [entry.seq for entry in appended] == list(range(1, len(events) + 1))
    assert [entry.time for entry in read] == [entry.time for entry in appended]
    assert read[0].event == queued().model_copy(
        update={
            "job": queued().job.model_copy(update={"model": Endpoint(base_url="http://127.0.0.1:1/v1", model="tiny")})
        }
    )


async def test_reading_starts_after_a_seq_and_stops_at_a_limit(store: Store) -> None:
    await store.append("r", queued())
    for number in range(5):
        await store.append("r", said(number))
    assert [entry.seq for entry in await store.read("r", after=2, limit=3)] == [3, 4, 5]
    assert await store.read("r", after=6) == []
    assert await store.read("nobody") == []


async def test_a_rollout_starts_once_and_nothing_follows_its_end(store: Store) -> None:
    with pytest.raises(UnknownRollout, match="queued"):
        await store.append("r", said(1))
    await store.append("r", queued())
    with pytest.raises(StoreError, match="already"):
        await store.append("r", queued())
    await store.append("r", Ended(outcome=Outcome.ABORTED))
    with pytest.raises(StoreError, match="rollout r has ended"):
        await store.append("r", said(2))
    assert [entry.seq for entry in await store.read("r")] == [1, 2]


async def test_a_refused_append_takes_neither_its_neighbours_nor_its_content_with_it(store: Store) -> None:
    await store.append("good", queued())
    long = AgentEmitted(raw={"text": "a text that only the refused append has so far " * 50})
    async with anyio.create_task_group() as tasks:

        async def refused() -> None:
            with pytest.raises(UnknownRollout):
                await store.append("bad", long)

        for number in range(20):
            tasks.start_soon(store.append, "good", said(number))
            tasks.start_soon(refused)
    await store.append("good", long)
    log = await store.read("good")
    assert [entry.seq for entry in log] == list(range(1, 23))
    assert log[-1].event == long


async def test_an_event_that_is_no_json_is_refused_and_the_next_one_is_not(store: Store) -> None:
    await store.append("r", queued())
    with pytest.raises(StoreError, match="agent_event"):
        await store.append("r", AgentEmitted(raw={"thing": object()}))
    assert (await store.append("r", said(1))).seq == 2


async def test_appends_that_come_together_are_numbered_in_the_order_they_came(store: Store) -> None:
    await store.append("r", queued())
    async with anyio.create_task_group() as tasks:
        for number in range(200):
            tasks.start_soon(store.append, "r", said(number))
    assert [entry.event for entry in (await store.read("r"))[1:]] == [said(number) for number in range(200)]


async def test_a_cancelled_append_is_there_whole_or_not_at_all(store: Store) -> None:
    await store.append("r", queued())
    for number in range(50):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await store.append("r", turn(number, tokens=100))
    await store.append("r", said(1))
    log = await store.read("r")
    assert [entry.seq for entry in log] == list(range(1, len(log) + 1))
    assert log[-1].event == said(1)
    assert all(
        entry.event == turn(entry.event.turn.index, tokens=100) for entry in log if entry.event.kind == "turn_ended"
    )


async def test_entries_and_blobs_can_neither_be_changed_nor_deleted(store: Store) -> None:
    await store.append("r", queued("long " * 500))
    connection = sqlite3.connect(store.path)
    for statement in (
        "UPDATE entries SET body = '{}'",
        "DELETE FROM entries",
        "UPDATE blobs SET codec = 0",
        "DELETE FROM blobs",
    ):
        with pytest.raises(sqlite3.IntegrityError, match="never"):
            connection.execute(statement)
    connection.close()


async def test_the_state_of_a_rollout_is_the_fold_of_its_log(store: Store) -> None:
    for event in (queued(), turn(0), turn(1), Scored(reward=Reward(total=0.5)), Ended(outcome=Outcome.FINISHED)):
        await store.append("r", event)
    rollout = await store.rollout("r")
    assert (rollout.id, rollout.ended, rollout.score) == ("r", True, Reward(total=0.5))
    assert [one.index for one in rollout.turns] == [0, 1]
    with pytest.raises(UnknownRollout, match="no rollout nobody"):
        await store.rollout("nobody")


async def test_the_list_tells_each_rollout_in_a_line_newest_first(store: Store) -> None:
    await store.append("a", queued("x" * 500 + "\ud83d"))
    await store.append("b", queued("half \ud83d"))
    await store.append("c", queued())
    for event in (StageStarted(stage=Stage.AGENT), turn(tokens=3), turn(tokens=4), Scored(reward=Reward(total=1))):
        await store.append("a", event)
        await store.append("b", event)
    usage = {"completion_tokens": 11}
    await store.append("c", TurnEnded(turn=Turn(index=0, request={}, usage=usage)))
    await store.append("a", Ended(outcome=Outcome.FINISHED))
    await store.append("b", Ended(outcome=Outcome.CRASHED, error="gone"))
    c, b, a = await store.list()
    assert (a.id, a.task_id, a.instruction, a.agent, a.model) == ("a", "t1", "x" * 200, "opencode", "tiny")
    assert (a.stage, a.outcome, a.reward, a.turns, a.tokens, a.owner) == ("ended", "finished", 1.0, 2, 7, "me")
    assert (b.outcome, b.reward, b.error, b.instruction) == (Outcome.CRASHED, None, "gone", "half ?")
    assert (c.stage, c.outcome, c.ended_at, c.tokens) == (Stage.QUEUED, None, None, 11)
    assert (await store.rollout("a")).created_at == a.created_at
    assert (await store.rollout("a")).ended_at == a.ended_at
    assert await store.list(open_only=True) == [c]
    assert await store.list(limit=1, before=c.created_at) == [b]


async def test_the_list_can_be_made_anew_from_the_log(store: Store) -> None:
    for number in range(30):
        await store.append(f"r{number}", queued())
        for index in range(10):
            await store.append(f"r{number}", turn(index))
        if number % 2:
            await store.append(f"r{number}", Scored(reward=Reward(total=number)))
            await store.append(f"r{number}", Ended(outcome=Outcome.FINISHED))
    before = await store.list()
    connection = sqlite3.connect(store.path, isolation_level=None)
    connection.execute("DELETE FROM rollouts WHERE id < 'r2'")
    connection.execute("UPDATE rollouts SET turns = 99, reward = 7")
    connection.close()
    assert await store.list() != before
    await store.rebuild()
    assert await store.list() == before


async def test_a_rollout_is_found_by_the_start_of_its_id(store: Store) -> None:
    for name in ("abc1", "abc2", "abc", "x_%"):
        await store.append(name, queued())
    assert await store.find("x") == "x_%"
    assert await store.find("abc1") == "abc1"
    assert await store.find("abc") == "abc"
    with pytest.raises(UsageError, match="abc, abc1, abc2"):
        await store.find("ab")
    for nothing in ("y", "%", "a_c"):
        with pytest.raises(UnknownRollout):
            await store.find(nothing)


async def test_a_follower_gets_the_past_then_the_news_and_ends_with_the_rollout(store: Store) -> None:
    await store.append("r", queued())
    await store.append("other", queued())
    got: list[int] = []
    async with anyio.create_task_group() as tasks:
        caught_up = anyio.Event()

        async def follow() -> None:
            async for entry in store.follow("r"):
                got.append(entry.seq)
                caught_up.set()

        tasks.start_soon(follow)
        await caught_up.wait()
        for number in range(300):
            tasks.start_soon(store.append, "other", said(number))
            await store.append("r", said(number))
        await store.append("r", Ended(outcome=Outcome.FINISHED))
    assert got == list(range(1, 303))
    assert [entry.seq async for entry in store.follow("r", after=300)] == [301, 302]
    assert [entry.seq async for entry in store.follow("r", after=302)] == []
    with pytest.raises(UnknownRollout):
        await anext(store.follow("nobody"))


async def test_a_slow_follower_loses_nothing_and_holds_nobody_up(store: Store) -> None:
    await store.append("r", queued())
    follower = store.follow("r")
    assert (await anext(follower)).seq == 1
    for number in range(500):
        await store.append("r", said(number))
    await store.append("r", Ended(outcome=Outcome.ABORTED))
    assert [entry.seq async for entry in follower] == list(range(2, 503))


async def test_many_followers_share_one_inotify_instance(store: Store) -> None:
    await store.append("r", queued())
    followers = [store.follow("r") for _ in range(100)]
    for follower in followers:
        await anext(follower)
    links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _still_open(name)]
    assert sum("inotify" in link for link in links) == 1
    await store.append("r", Ended(outcome=Outcome.ABORTED))
    for follower in followers:
        assert (await anext(follower)).seq == 2


def _still_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


async def test_a_kind_is_followed_over_all_rollouts_from_the_call_on(store: Store) -> None:
    for name in ("a", "b"):
        await store.append(name, queued())
        await store.append(name, AbortRequested(reason="too early"))
    aborts = store.follow_kind("abort_requested")
    for number in range(3):
        await store.append("a", said(number))
        await store.append("b", AbortRequested(reason=str(number)))
    await store.append("a", AbortRequested(reason="last"))
    got = [await anext(aborts) for _ in range(4)]
    assert [(entry.rollout_id, entry.event) for entry in got] == [
        *(("b", AbortRequested(reason=str(number))) for number in range(3)),
        ("a", AbortRequested(reason="last")),
    ]


async def test_followers_of_a_store_that_closes_are_told(tmp_path: Path) -> None:
    caught_up = anyio.Event()

    async def follow(store: Store) -> None:
        with pytest.raises(StoreError, match="closed"):
            async for _ in store.follow("r"):
                caught_up.set()

    async with anyio.create_task_group() as tasks, Store.open(tmp_path / "log.db") as store:
        await store.append("r", queued())
        tasks.start_soon(follow, store)
        await caught_up.wait()
    with pytest.raises(StoreError, match="closed"):
        await store.append("r", said(1))
    with pytest.raises(StoreError, match="closed"):
        await store.read("r")


async def test_an_error_in_the_block_comes_out_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        async with Store.open(tmp_path / "log.db"):
            raise ZeroDivisionError


async def test_only_its_owner_may_look_at_the_log(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        async with Store.open(tmp_path / "a" / "b" / "log.db") as store:
            await store.append("r", queued())
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*")}
            assert modes.pop("b") == stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
            assert {"log.db", "log.db-wal"} < modes.keys() and set(modes.values()) == {0o600}
    finally:
        os.umask(old)


async def test_the_key_is_nowhere_in_the_file(tmp_path: Path) -> None:
    async with Store.open(tmp_path / "log.db") as store:
        entry = await store.append("r", queued("long " * 1000))
        assert isinstance(entry.event, Queued) and entry.event.job.model.key.get_secret_value() == KEY
        connection = sqlite3.connect(store.path)
        texts = [row[0].encode() for row in connection.execute("SELECT body FROM entries")]
        texts += [zstandard.decompress(row[0]) for row in connection.execute("SELECT data FROM blobs")]
        connection.close()
        assert any(b"long long" in text for text in texts)
        texts += [path.read_bytes() for path in tmp_path.iterdir()]
    texts += [path.read_bytes() for path in tmp_path.iterdir()]
    assert not any(KEY.encode() in text for text in texts)


async def test_a_log_of_an_older_schema_is_migrated_and_one_of_a_newer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    connection = sqlite3.connect(path)
    connection.executescript(MIGRATIONS[0] + "PRAGMA user_version = 1;")
    connection.execute(
        "INSERT INTO entries (rollout_id, seq, time, kind, body) VALUES ('r', 1, 5.0, 'queued', ?)",
        (queued().model_dump_json(),),
    )
    connection.commit()
    connection.close()
    later = (
        *MIGRATIONS,
        """
        ALTER TABLE rollouts ADD COLUMN colour TEXT;
        CREATE TRIGGER t AFTER INSERT ON entries BEGIN UPDATE rollouts SET colour = 'red'; SELECT 1; END;
        """,
        "CREATE TABLE more (x INTEGER);",
    )
    async with Store.open(path, migrations=later) as store:
        await store.rebuild()
        await store.append("r", said(1))
        assert [entry.seq for entry in await store.read("r")] == [1, 2]
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(later),)
    assert connection.execute("SELECT colour FROM rollouts").fetchone() == ("red",)
    connection.close()
    with pytest.raises(StoreError, match=rf"version {len(later)} .* only {len(MIGRATIONS)}: upgrade rollcage"):
        async with Store.open(path):
            pass


async def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    async with Store.open(path) as store:
        await store.append("r", queued())
    with pytest.raises(StoreError, match="nonsense"):
        async with Store.open(
            path, migrations=(*MIGRATIONS, "CREATE TABLE more (x INTEGER); INSERT INTO nonsense VALUES (1);")
        ):
            pass
    async with Store.open(path) as store:
        assert len(await store.read("r")) == 1


async def test_a_file_that_is_no_log_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    path.write_bytes(b"something else entirely " * 1000)
    with pytest.raises(StoreError, match=rf"^cannot open {re.escape(str(path))}: it is no rollcage log: move it away"):
        async with Store.open(path):
            pass


@pytest.mark.parametrize(
    "damage", ["data = zeroblob(9)", "data = (SELECT data FROM blobs ORDER BY rowid LIMIT 1)", "digest = x'00'"]
)
async def test_content_that_is_not_what_it_was_is_not_handed_out(store: Store, damage: str) -> None:
    await store.append("fine", queued("other " * 500))
    await store.append("r", queued("long " * 500))
    connection = sqlite3.connect(store.path, isolation_level=None)
    connection.execute("DROP TRIGGER blobs_keep")
    connection.execute(f"UPDATE blobs SET {damage} WHERE rowid = (SELECT max(rowid) FROM blobs)")
    connection.close()
    with pytest.raises(StoreError, match="damaged"):
        await store.read("r")
    assert len(await store.read("fine")) == 1


async def test_a_conversation_that_grows_takes_space_in_proportion_to_what_is_new(tmp_path: Path) -> None:
    sizes: list[int] = []
    whole = 0
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are an agent. " * 100}]
    ids = list(range(3000))
    for index in range(200):
        noise = os.urandom(700).hex()
        messages += [
            {"role": "assistant", "content": noise},
            {"role": "tool", "content": noise[::-1], "id": str(index)},
        ]
        ids += range(index * 977, index * 977 + 300)
        event = TurnEnded(turn=Turn(index=index, request={"messages": list(messages)}, prompt_ids=tuple(ids)))
        whole += len(event.model_dump_json())
        if index in (0, 100):
            sizes.append((tmp_path / "log.db").stat().st_size if index else 0)
        async with Store.open(tmp_path / "log.db") as store:
            if index == 0:
                await store.append("r", queued())
            await store.append("r", event)
    sizes.append((tmp_path / "log.db").stat().st_size)
    first, second = sizes[1] - sizes[0], sizes[2] - sizes[1]
    assert second < 1.3 * first
    assert sizes[2] * 20 < whole
    async with Store.open(tmp_path / "log.db") as store:
        rollout = await store.rollout("r")
    assert rollout.turns[-1] == event.turn
    assert [len(one.request["messages"]) for one in rollout.turns] == [3 + 2 * index for index in range(200)]


async def test_entries_carry_what_readers_expect(store: Store) -> None:
    entry = await store.append("r", queued())
    await store.append("r", StageEnded(stage=Stage.SETUP, seconds=0.25))
    assert isinstance(entry, Entry) and entry.rollout_id == "r"
    assert Entry.model_validate(entry.model_dump()).seq == 1


async def test_two_who_write_one_rollout_in_turn_number_its_entries_as_one(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    async with Store.open(path) as one, Store.open(path) as other:
        await one.append("r", queued())
        for number in range(6):
            writer = one if number % 3 else other
            await writer.append("r", StageEnded(stage=Stage.SETUP, seconds=number))
        entries = await one.read("r")
    assert [entry.seq for entry in entries] == [1, 2, 3, 4, 5, 6, 7]
