"""Results and streams of rollouts that are long, or that hold what no JSON tool will carry."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest
from starlette.types import Message

from rollcage.errors import StoreError
from rollcage.events import AgentEmitted, Ended, FilesCollected, Queued, Scored, StageEnded, TurnEnded
from rollcage.gateway.live import Delta
from rollcage.results.result import RolloutResult, result_of
from rollcage.runner import Owners
from rollcage.server.feeds import PORTION_BYTES, FeedLine, Feeds
from rollcage.server.mcp import tool_result
from rollcage.server.reading import written
from rollcage.server.stream import EventStream
from rollcage.store import Store
from rollcage.types import Endpoint, Job, JsonObject, Outcome, Reward, Stage, Task, Token, Turn
from support.served import Served, served

JOB = Job(task=Task(id="t", instruction="x"), model=Endpoint(base_url="http://x/v1", model="m"))
HALF = "half a character: \ud83d"
LINES = "one\x85two\u2028three\u2029four\r\nfive"


def turn(index: int, **more: object) -> TurnEnded:
    said: JsonObject = {"role": "assistant", "content": f"step {index} " + "word " * 20}
    request = {"model": "m", "messages": [said] * (index + 1)}
    tokens = tuple(Token(f"w{number}", number, -0.5) for number in range(5))
    values = {"index": index, "request": request, "status": 200, "tokens": tokens, "message": said, **more}
    return TurnEnded(turn=Turn.model_validate(values))


async def a_rollout(store: Store, turns: int, *, ended: bool = True) -> None:
    await store.append("r", Queued(job=JOB))
    await store.append("r", AgentEmitted(raw={"type": "text"}))
    for index in range(turns):
        await store.append("r", turn(index, **({"error": f"broke {index}"} if index % 5 == 1 else {})))
    await store.append("r", StageEnded(stage=Stage.AGENT, seconds=1))
    await store.append("r", FilesCollected(files={"a.py": "print()"}, extra=("b",), why={"b": "binary"}))
    if ended:
        await store.append("r", Scored(reward=Reward(total=0.5)))
        await store.append("r", Ended(outcome=Outcome.FINISHED))


@pytest.mark.parametrize("turns", [0, 1, 27])
async def test_a_result_written_in_pieces_is_the_same_as_in_one(store: Store, turns: int) -> None:
    await a_rollout(store, turns)
    pieces = [piece async for piece in written(store, "r", 0)]
    assert len(pieces) == turns + 2
    whole = result_of(await store.rollout("r"))
    assert json.loads(b"".join(pieces)) == json.loads(whole.model_dump_json())
    assert RolloutResult.model_validate_json(b"".join(pieces)) == whole


async def test_what_comes_while_a_result_is_written_is_not_in_it(store: Store) -> None:
    await a_rollout(store, 3, ended=False)
    text = b""
    async with aclosing(written(store, "r", 1.5)) as pieces:
        async for piece in pieces:
            if not text:
                await store.append("r", turn(3))
                await store.append("r", Ended(outcome=Outcome.FINISHED))
            text += piece
    result = json.loads(text)
    assert [each["turn"] for each in result["proxy_turns"]] == [0, 1, 2]
    assert (result["outcome"], result["error_code"]) == (None, "still_running")
    assert "1.5 s" in result["error"]


async def test_a_log_with_large_turns_is_followed_in_small_portions(store: Store) -> None:
    await store.append("r", Queued(job=JOB))
    for index in range(6):
        await store.append("r", turn(index, request={"messages": [f"{index}" * (PORTION_BYTES * 2 // 3)]}))
    await store.append("r", Ended(outcome=Outcome.FINISHED))
    async with anyio.create_task_group() as tasks, aclosing(Feeds(store, tasks).follow("r")) as pages:
        portions = [[line.entry.seq for line in page] async for page in pages]
    assert portions == [[1, 2, 3], [4, 5], [6, 7], [8]]


async def test_a_rollout_that_cannot_be_told_takes_nobody_else_down(store: Store) -> None:
    """The reader behind all followers is one of the server's own tasks: it must not break."""
    await store.append("r", Queued(job=JOB))

    class Damaged(Store):
        async def follow(self, rollout_id: str, *, after: int = 0):  # type: ignore[no-untyped-def]
            raise ValueError("nobody foresaw this")
            yield

    damaged = Damaged.__new__(Damaged)
    damaged.__dict__ = store.__dict__
    async with anyio.create_task_group() as tasks:
        with pytest.raises(StoreError, match="ValueError"):
            async with aclosing(Feeds(damaged, tasks).follow("r", after=1)) as pages:
                await anext(pages)


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    async with served(tmp_path_factory.mktemp("home")) as running:
        yield running


async def test_halves_of_characters_and_odd_line_ends_reach_every_reader(server: Served) -> None:
    async with Store.open(server.home / "rollouts.db") as store, server.http() as http, server.client() as client:
        with Owners.beside(store).hold() as owner:
            await store.append("odd", Queued(job=JOB, owner=owner))
            async with aclosing(client.follow("odd")) as entries:
                assert (await anext(entries)).seq == 1
                # From here on they come as they happen, through the one reader of all followers.
                await store.append("odd", AgentEmitted(raw={"type": "text", "part": {"text": HALF}, "lines": LINES}))
                await store.append("odd", turn(0, message={"role": "assistant", "content": HALF + LINES}))
                await store.append("odd", FilesCollected(files={"a.txt": "x"}))
                await store.append("odd", Ended(outcome=Outcome.FINISHED))
                followed = [entry async for entry in entries]
        assert [entry.seq for entry in followed] == [2, 3, 4, 5]
        assert isinstance(said := followed[0].event, AgentEmitted) and said.raw is not None
        assert said.raw["lines"] == LINES
        assert said.raw["part"]["text"] == HALF.replace("\ud83d", "?")
        for below in ("/result", "/turns", "/trace", "/messages", "/files"):
            answer = await http.get(f"/rollouts/odd{below}")
            assert answer.status_code == 200, below
            answer.json()
        page = (await http.get("/rollouts/odd/events", headers={"Accept": "application/json"})).json()
        assert page["events"][1]["event"]["raw"]["lines"] == LINES
        assert (await http.get("/health")).status_code == 200


async def test_what_a_model_says_is_one_line_while_it_says_it() -> None:
    sent, told = b"", anyio.Event()

    async def said() -> AsyncIterator[Delta]:
        yield Delta(turn=0, content=LINES)

    async def live() -> AsyncIterator[Delta]:
        return said()

    async def pages() -> AsyncGenerator[list[FeedLine], None]:
        nothing: list[list[FeedLine]] = []
        await told.wait()
        for lines in nothing:
            yield lines

    async def receive() -> Message:
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal sent
        sent += message.get("body", b"")
        if b"event: delta" in sent:
            told.set()

    await EventStream(pages(), live=live, stage=Stage.AGENT)({"type": "http"}, receive, send)
    data = [line.removeprefix("data: ") for line in sent.decode().splitlines() if line.startswith("data: ")]
    assert [json.loads(line)["content"] for line in data] == [LINES]


def test_a_tool_s_answer_holds_halves_of_characters_too() -> None:
    answer = RolloutResult(rollout_id="r", files={"a": HALF + LINES})
    told = json.loads(tool_result(1, answer, {}))["result"]
    assert told["structuredContent"]["files"]["a"] == HALF.replace("\ud83d", "?") + LINES
    assert json.loads(told["content"][0]["text"]) == told["structuredContent"]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_long_rollout_s_result_needs_little_memory(tmp_path: Path) -> None:
    def peak_mb() -> int:
        status = Path(f"/proc/{running.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) >> 10

    async with Store.open(tmp_path / "rollouts.db") as store:
        await store.append("r", Queued(job=JOB))
        long: JsonObject = {"role": "user", "content": "word " * 250}
        for index in range(300):
            await store.append("r", turn(index, request={"messages": [long] * index}))
        await store.append("r", Ended(outcome=Outcome.FINISHED))
    async with served(tmp_path) as running, running.http() as http:
        await http.get("/openapi.json")  # all parts are there
        before, size = peak_mb(), 0
        async with http.stream("GET", "/rollouts/r/result") as answer:
            async for piece in answer.aiter_raw():
                size += len(piece)
        assert size > 40 << 20
        assert peak_mb() - before < 24
