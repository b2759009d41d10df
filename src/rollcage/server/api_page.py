"""What the web page reads beyond the API: the board of all rollouts, a log without its bulk, the tokens of one turn.

The page looks on, often at many long rollouts at once; it gets what it shows and no more.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

import anyio
from fastapi import APIRouter, Depends, Header, Path, Query, Request
from starlette.responses import Response, StreamingResponse

from rollcage.errors import UnknownRollout
from rollcage.events import AgentEmitted, ToolCalled, TurnEnded
from rollcage.schema.request import RolloutRequest
from rollcage.schema.views import RolloutState
from rollcage.schema.writing import json_of, on_one_line
from rollcage.server.auth import Caller, caller_of
from rollcage.server.compact import compact, compact_turn
from rollcage.server.feeds import FeedLine
from rollcage.server.service import Service
from rollcage.server.stream import HEARTBEAT_S, EventStream, frame
from rollcage.store import Query as StoreQuery
from rollcage.types import Stage

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


def router(service: Service) -> APIRouter:
    """The page's own addresses. They change with the page; programs use the API."""
    router = APIRouter(prefix="/page", include_in_schema=False)

    @router.get("/arguments")
    async def arguments() -> Response:
        """The arguments of a rollout as JSON Schema: what the form is made from."""
        return Response(json.dumps(RolloutRequest.model_json_schema()), media_type="application/json")

    @router.get("/board")
    async def board(by: By) -> Response:
        """Every rollout's row, then those that change, as server-sent events."""
        headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
        return StreamingResponse(_board(service, by), media_type="text/event-stream", headers=headers)

    @router.get("/nodes")
    async def nodes(by: By) -> Response:
        """The machines of the cluster, for those who may see them, and whether there is a cluster."""
        found = service.runner.nodes if by.admin else []
        body = {"cluster": service.clustered and by.admin, "nodes": [node.model_dump(mode="json") for node in found]}
        return Response(json.dumps(body), media_type="application/json")

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
        state, _ = await service.reached(rollout_id, by)
        pages = _compact(await service.lines(rollout_id, by, after=after))
        return EventStream(pages, live=lambda: service.live(rollout_id, by), stage=state.stage)

    @router.get("/rollouts/{rollout_id}/turns/{seq}")
    async def turn(rollout_id: Id, by: By, seq: Annotated[int, Path(ge=1, le=1 << 53)]) -> Response:
        """The turn in that entry of the log: its tokens with their alternatives, and what was asked."""
        page = await service.events(rollout_id, by, after=seq - 1, limit=1)
        event = page.events[0].event if page.events else None
        if not isinstance(event, TurnEnded) or page.events[0].seq != seq:
            raise UnknownRollout(f"rollout {rollout_id} has no turn in entry {seq}")
        found = event.turn
        body = {**compact_turn(found), "tokens": found.tokens, "request": found.request, "message": found.message}
        return Response(await anyio.to_thread.run_sync(json.dumps, body), media_type="application/json")

    return router


async def _compact(pages: AsyncGenerator[list[FeedLine], None]) -> AsyncGenerator[list[FeedLine], None]:
    async with aclosing(pages):
        async for lines in pages:
            yield [
                FeedLine(line.entry, json.dumps(compact(line.entry)).encode()) if _bulky(line) else line
                for line in lines
            ]


def _bulky(line: FeedLine) -> bool:
    return isinstance(line.entry.event, AgentEmitted | TurnEnded | ToolCalled) or line.entry.seq == 1


async def _board(service: Service, caller: Caller) -> AsyncGenerator[bytes, None]:
    """All rows, newest first, then each that is new or has changed."""
    known: dict[str, RolloutState] = {}
    cursor: str | None = ""
    while cursor is not None and len(known) < MOST:
        page = await service.list(StoreQuery(), caller, cursor=cursor, limit=PAGE)
        known |= {row.rollout_id: row for row in page.rollouts}
        yield _rows(page.rollouts)
        cursor = page.next_cursor
    yield frame("ready", b"{}")
    quiet = 0.0
    while True:
        await anyio.sleep(LOOK_S)
        seen = await _look(service, caller, known)
        changed = [row for row in seen if known.get(row.rollout_id) != row]
        known |= {row.rollout_id: row for row in changed}
        quiet = 0.0 if changed else quiet + LOOK_S
        if changed:
            yield _rows(changed)
        elif quiet >= HEARTBEAT_S:
            quiet = 0.0
            yield b":\n\n"


async def _look(service: Service, caller: Caller, known: dict[str, RolloutState]) -> list[RolloutState]:
    """The newest rollouts, those that run, and those that ran at the last look."""
    rows: dict[str, RolloutState] = {}
    cursor: str | None = ""
    while cursor is not None and len(rows) < MOST:
        newest = await service.list(StoreQuery(), caller, cursor=cursor, limit=100)
        rows |= {row.rollout_id: row for row in newest.rollouts}
        # Where many began since the last look, some of them ended too: go back to what was seen then.
        reached = any(row.rollout_id in known for row in newest.rollouts)
        cursor = None if reached else newest.next_cursor
    cursor = ""
    while cursor is not None:
        page = await service.list(_OPEN, caller, cursor=cursor, limit=PAGE)
        rows |= {row.rollout_id: row for row in page.rollouts}
        cursor = page.next_cursor
    for row in known.values():
        if row.outcome is None and row.rollout_id not in rows:
            rows[row.rollout_id] = await service.state(row.rollout_id, caller)
    return list(rows.values())


def _rows(rows: list[RolloutState]) -> bytes:
    return frame("rollouts", b"[" + b",".join(on_one_line(json_of(row)) for row in rows) + b"]")
