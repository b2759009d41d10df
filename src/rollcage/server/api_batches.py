"""Batches over HTTP: start, cancel, which there are, what each came to, rollouts, events, and two compared."""

from __future__ import annotations

import time
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from rollcage.evaluation.batches import BatchReport, BatchView
from rollcage.evaluation.comparison import Comparison, compare
from rollcage.events import Entry
from rollcage.runner.batch import is_running
from rollcage.schema.batches import BatchRequest
from rollcage.schema.writing import json_of
from rollcage.server.auth import Caller, caller_of
from rollcage.server.batches import BatchReader, BatchService
from rollcage.server.problems import documented
from rollcage.store.batches import LIGHT, batch_events, batch_names
from rollcage.types import JsonObject, Value

LOOK_S = 0.2
"""How often a caller's wait for events looks."""


class BatchPage(Value):
    """Some batches, newest first; without their tasks and what broke."""

    batches: list[BatchReport]


class BatchEvent(Value):
    """One entry of one rollout of a batch."""

    cursor: int
    """Give the last one as `after` to get what follows."""
    entry: Entry


class BatchEvents(Value):
    """Some entries of all rollouts of a batch, in the order in which they were logged."""

    events: list[BatchEvent]
    cursor: int
    """Where to go on."""


class BatchRows(Value):
    """The latest rollout of each cell of a batch."""

    rollouts: list[JsonObject]
    total: int
    """How many there are in all."""


def _caller(request: Request) -> Caller:
    return caller_of(request.scope)


By = Annotated[Caller, Depends(_caller)]
Name = Annotated[str, Path(max_length=200, description="Names the batch.")]
REFUSALS = documented(404, 422, 503)


async def _answer(work: Any, status: int = 200) -> Any:
    # Statistics of ten thousand rollouts take a while; meanwhile the others go on.
    body = await anyio.to_thread.run_sync(lambda: json_of(work()))
    return Response(body, status_code=status, media_type="application/json")


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _light(report: BatchReport) -> BatchReport:
    return report.model_copy(update={"tasks": (), "broken": ()})


def router(batches: BatchService) -> APIRouter:
    """Batches as resources."""
    router = APIRouter(tags=["batches"])

    @router.post(
        "/batches",
        status_code=201,
        responses={200: {"model": BatchReport, "description": "Joined"}, **documented(409, 413, 422, 503)},
    )
    async def start_batch(body: BatchRequest, by: By) -> BatchReport:
        """Run every task x model x agent, n times.

        201 when it is new; 200 when it was there already, and goes on with what is missing; 409 when there is one of
        that name that was made of something else.
        """
        report, is_new = await batches.start(body, by)
        return await _answer(lambda: report, 201 if is_new else 200)  # type: ignore[no-any-return]

    @router.post("/batches/{name}/cancel", responses={**REFUSALS, **documented(409)})
    async def cancel_batch(name: Name, by: By) -> BatchReport:
        """Stop what runs of a batch, and begin nothing more of it; one that is over stays as it is."""
        report = await batches.cancel(name, by)
        return await _answer(lambda: report)  # type: ignore[no-any-return]

    router.include_router(reading_router(batches))
    return router


def reading_router(batches: BatchReader) -> APIRouter:
    """What there is to know of them."""
    router, store, ask = APIRouter(), batches.store, batches.ask

    @router.get("/batches", responses=documented(422, 503))
    async def list_batches(by: By, limit: Annotated[int, Query(ge=1, le=100)] = 20) -> BatchPage:
        """The newest batches, with their statistics by model."""
        found: list[bytes] = []
        for name, _ in await batch_names(store, caller=None if by.admin else by.name, limit=limit):
            running = is_running(store, name)
            found.append(await ask(by, [name], lambda view: json_of(_light(view.report(running=running)))))  # noqa: B023
        return _json(b'{"batches":[' + b",".join(found) + b"]}")  # type: ignore[return-value]

    @router.get("/batches/{name}", responses=REFUSALS)
    async def get_batch(name: Name, by: By) -> BatchReport:
        """A batch: where it is, and its statistics by model and by task."""
        running = is_running(store, name)
        return _json(await ask(by, [name], lambda view: json_of(view.report(running=running))))  # type: ignore[return-value]

    @router.get("/batches/{name}/results", responses=REFUSALS)
    async def list_batch_rollouts(
        name: Name,
        by: By,
        offset: Annotated[int, Query(ge=0, lt=2**31)] = 0,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> BatchRows:
        """Its rollouts, one row each: the latest attempt of every cell."""

        def some(view: BatchView) -> bytes:
            rows = view.current
            found = [row.to_dict() for row in rows[offset : offset + limit]]
            return json_of(BatchRows(rollouts=found, total=len(rows)))

        return _json(await ask(by, [name], some))  # type: ignore[return-value]

    @router.get("/batches/{name}/events", responses=REFUSALS)
    async def follow_batch(
        name: Name,
        by: By,
        after: Annotated[int, Query(ge=0, lt=1 << 53, description="The cursor of the last answer.")] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 200,
        wait_s: Annotated[float, Query(ge=0, le=600, description="Wait so long where there is nothing yet.")] = 0,
        whole: Annotated[bool, Query(description="Every kind of event; else how each rollout goes.")] = False,
    ) -> BatchEvents:
        """What its rollouts do, over the whole batch, with one cursor."""
        await ask(by, [name], lambda view: None)
        until = time.monotonic() + wait_s
        while True:
            found = await batch_events(store, name, after=after, limit=limit, kinds=() if whole else LIGHT)
            if found or time.monotonic() >= until:
                break
            await anyio.sleep(LOOK_S)
        events = [BatchEvent.model_construct(cursor=cursor, entry=entry) for cursor, entry in found]
        last = found[-1][0] if found else after
        return await _answer(lambda: BatchEvents.model_construct(events=events, cursor=last))  # type: ignore[no-any-return]

    @router.get("/batches/{name}/compare/{other}", responses=REFUSALS)
    async def compare_batches(name: Name, other: Annotated[str, Path(max_length=200)], by: By) -> Comparison:
        """Two batches, paired by task: `other` less `name`."""
        return _json(await ask(by, [name, other], lambda first, second: json_of(compare(first, second))))  # type: ignore[return-value]

    return router
