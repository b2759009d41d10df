"""What the web page reads beyond the API: the board of all rollouts, a log without its bulk, a turn's tokens.

The page looks on, often at many long rollouts at once; it gets what it shows and no more.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

import anyio
from fastapi import APIRouter, Depends, Header, Path, Query, Request
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from rollcage.errors import UnknownRollout
from rollcage.events import AgentEmitted, ToolCalled, TurnEnded
from rollcage.schema.request import RolloutRequest
from rollcage.schema.views import RolloutState
from rollcage.schema.writing import json_of, on_one_line
from rollcage.server.auth import Caller, caller_of
from rollcage.server.checking import all_problems
from rollcage.server.compact import compact, compact_turn
from rollcage.server.feeds import FeedLine
from rollcage.server.prompts import PromptText, ask_engine, prompt_text
from rollcage.server.reading import LogReader, state_of
from rollcage.server.service import Service
from rollcage.server.stream import EventStream, Frames, frame
from rollcage.store import Query as StoreQuery
from rollcage.store import Summary
from rollcage.trajectory.export import Format, rows_of
from rollcage.types import Blame, JsonObject, Stage, Turn, Value

LOOK_S = 0.5
"""How often the board is read while somebody looks at it."""
PAGE = 500
MOST = 20_000
"""Rollouts that a board shows at most, the newest."""

_OPEN = StoreQuery(stages=tuple(stage for stage in Stage if stage is not Stage.ENDED))


def _caller(request: Request) -> Caller:
    return caller_of(request.scope)


By = Annotated[Caller, Depends(_caller)]
Id = Annotated[str, Path(max_length=100)]
Seq = Annotated[int, Path(ge=1, le=1 << 53)]


class BoardRow(RolloutState):
    """A rollout in the page's list."""

    blame: Blame | None = None
    batch: str = ""
    batch_task: str = ""
    batch_model: str = ""
    sample: int = 0
    group_id: str = ""
    origin: str = ""
    """The rollout that it replays or was forked from."""
    origin_how: str = ""


def board_row(summary: Summary, position: int | None = None) -> BoardRow:
    """A rollout as the page lists it."""
    names = ("blame", "batch", "batch_task", "batch_model", "sample", "group_id", "origin", "origin_how")
    more = {name: getattr(summary, name) for name in names}
    return BoardRow(**dict(state_of(summary, position)), **more)


class ExportRequest(Value):
    """Rollouts that are wanted as a file."""

    ids: tuple[str, ...] = Field(min_length=1, max_length=10_000)
    format: Format = "sequences"


class CheckedRequest(Value):
    """What is wrong with the arguments of a rollout: all of it."""

    problems: list[JsonObject]
    """`{argument, message, remedy}` each; names of arguments stand in a remedy in braces."""


def router(reader: LogReader) -> APIRouter:
    """The page's own addresses that only read. They change with the page; programs use the API."""
    router = APIRouter(prefix="/page", include_in_schema=False)

    @router.get("/board")
    async def board(by: By) -> Response:
        """Every rollout's row, then those that change, as server-sent events."""
        return Frames(_board(reader, by))

    @router.get("/rollouts/{rollout_id}/events")
    async def events(
        rollout_id: Id,
        by: By,
        after: Annotated[int, Query(ge=0, le=1 << 53)] = 0,
        last_event_id: Annotated[str, Header()] = "",
    ) -> Response:
        """A rollout's log without its bulk, and what its model says while it says it."""
        if last_event_id.isascii() and last_event_id.isdecimal() and len(last_event_id) < 16:
            after = int(last_event_id)
        state, _ = await reader.reached(rollout_id, by)
        pages = _compact(await reader.lines(rollout_id, by, after=after))
        return EventStream(pages, live=lambda: reader.live(rollout_id, by), stage=state.stage)

    @router.get("/rollouts/{rollout_id}/turns/{seq}")
    async def turn(rollout_id: Id, by: By, seq: Seq) -> Response:
        """The turn in that entry of the log: its tokens with their alternatives, and what was asked."""
        found = await _turn(reader, rollout_id, by, seq)
        return Response(await anyio.to_thread.run_sync(whole_turn, found), media_type="application/json")

    @router.get("/rollouts/{rollout_id}/turns/{seq}/prompt")
    async def prompt(rollout_id: Id, by: By, seq: Seq) -> PromptText:
        """What the model saw, token by token, as far as the log tells the texts."""
        await _turn(reader, rollout_id, by, seq)
        return await prompt_text(reader.store, rollout_id, seq)

    @router.post("/rollouts/{rollout_id}/turns/{seq}/prompt")
    async def spelled_prompt(rollout_id: Id, by: By, seq: Seq) -> PromptText:
        """The same; the engine is asked for the texts that the log does not tell."""
        await _turn(reader, rollout_id, by, seq)
        return await ask_engine(reader.store, rollout_id, seq)

    @router.post("/export")
    async def export(body: ExportRequest, by: By) -> Response:
        """These rollouts as JSON lines of one format."""
        for rollout_id in body.ids:
            await reader.visible(rollout_id, by)
        return StreamingResponse(_exported(reader, body), media_type="application/x-ndjson")

    return router


def trying_router(service: Service) -> APIRouter:
    """The page's own addresses for its form, and for the machines of a cluster."""
    router = APIRouter(prefix="/page", include_in_schema=False)

    @router.get("/arguments")
    async def arguments() -> Response:
        """The arguments of a rollout as JSON Schema: what the form is made from."""
        return Response(json.dumps(RolloutRequest.model_json_schema()), media_type="application/json")

    @router.get("/nodes")
    async def nodes(by: By) -> Response:
        """The machines of the cluster, for those who may see them, and whether there is a cluster."""
        found = service.runner.nodes if by.admin else []
        body = {"cluster": service.clustered and by.admin, "nodes": [node.model_dump(mode="json") for node in found]}
        return Response(json.dumps(body), media_type="application/json")

    @router.post("/check")
    async def check(body: JsonObject, by: By) -> CheckedRequest:
        """Everything that is wrong with these arguments; nothing is started."""
        found = await all_problems(service, body)
        told = [{"argument": each.argument, "message": each.message, "remedy": each.remedy} for each in found]
        return CheckedRequest(problems=told)

    return router


async def _turn(reader: LogReader, rollout_id: str, caller: Caller, seq: int) -> Turn:
    page = await reader.events(rollout_id, caller, after=seq - 1, limit=1)
    event = page.events[0].event if page.events else None
    if not isinstance(event, TurnEnded) or page.events[0].seq != seq:
        raise UnknownRollout(f"rollout {rollout_id} has no turn in entry {seq}")
    return event.turn


def whole_turn(turn: Turn) -> str:
    """A turn as the page shows it, as JSON."""
    return json.dumps(
        {**compact_turn(turn), "tokens": list(turn.tokens), "request": turn.request, "message": turn.message}
    )


async def _exported(reader: LogReader, wanted: ExportRequest) -> AsyncGenerator[bytes, None]:
    for rollout_id in wanted.ids:
        rollout = await reader.store.rollout(rollout_id)
        rows = await anyio.to_thread.run_sync(rows_of, rollout, wanted.format)
        yield await anyio.to_thread.run_sync(lambda: b"".join(json.dumps(row).encode() + b"\n" for row in rows))  # noqa: B023


async def _compact(pages: AsyncGenerator[list[FeedLine], None]) -> AsyncGenerator[list[FeedLine], None]:
    async with aclosing(pages):
        async for lines in pages:
            yield [
                FeedLine(line.entry, json.dumps(compact(line.entry)).encode()) if _bulky(line) else line
                for line in lines
            ]


def _bulky(line: FeedLine) -> bool:
    return isinstance(line.entry.event, AgentEmitted | TurnEnded | ToolCalled) or line.entry.seq == 1


async def _board(reader: LogReader, caller: Caller) -> AsyncGenerator[bytes, None]:
    """All rows, newest first, then each that is new or has changed."""
    known: dict[str, BoardRow] = {}
    before: int | None = None
    while len(known) < MOST:
        page, before = await reader.page(StoreQuery(), caller, before=before, limit=PAGE)
        rows = [board_row(row, reader.position(row.id)) for row in page]
        known |= {row.rollout_id: row for row in rows}
        yield _rows(rows)
        if before is None:
            break
    yield frame("ready", b"{}")
    while True:
        await anyio.sleep(LOOK_S)
        seen = await _look(reader, caller, known)
        changed = [row for row in seen if known.get(row.rollout_id) != row]
        known |= {row.rollout_id: row for row in changed}
        if changed:
            yield _rows(changed)


async def _look(reader: LogReader, caller: Caller, known: dict[str, BoardRow]) -> list[BoardRow]:
    """The newest rollouts, those that run, and those that ran at the last look."""
    rows: dict[str, Summary] = {}
    before: int | None = None
    while len(rows) < MOST:
        newest, before = await reader.page(StoreQuery(), caller, before=before, limit=100)
        rows |= {row.id: row for row in newest}
        # Where many began since the last look, some of them ended too: go back to what was seen then.
        if before is None or any(row.id in known for row in newest):
            break
    before = None
    while True:
        page, before = await reader.page(_OPEN, caller, before=before, limit=PAGE)
        rows |= {row.id: row for row in page}
        if before is None:
            break
    for row in known.values():
        if row.outcome is None and row.rollout_id not in rows:
            rows[row.rollout_id] = await reader.visible(row.rollout_id, caller)
    return [board_row(row, reader.position(row.id)) for row in rows.values()]


def _rows(rows: list[BoardRow]) -> bytes:
    return frame("rollouts", b"[" + b",".join(on_one_line(json_of(row)) for row in rows) + b"]")
