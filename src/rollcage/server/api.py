"""The HTTP API: rollouts as resources, their events as a stream. `/docs` shows all of it."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse

from rollcage.results.result import RolloutResult
from rollcage.schema.request import RolloutRequest
from rollcage.schema.views import (
    STATUS,
    Aborted,
    EventPage,
    Files,
    Health,
    Messages,
    Readiness,
    RolloutPage,
    RolloutState,
    Started,
    Status,
    Trace,
    TurnPage,
)
from rollcage.schema.writing import json_of
from rollcage.server import api_batches, api_environments, api_groups, api_page, problems
from rollcage.server.auth import Caller, caller_of
from rollcage.server.batches import BatchReader
from rollcage.server.problems import documented
from rollcage.server.reading import LogReader
from rollcage.server.service import Service
from rollcage.server.stream import EventStream
from rollcage.store import Query as StoreQuery
from rollcage.trajectory import MergeView
from rollcage.types import Outcome, Stage

ABOUT = """Runs real coding agents in isolated boxes and brings back training-grade rollouts.

Start one with `POST /rollouts`, follow it with `GET /rollouts/{rollout_id}/events`, and fetch what it came to with
`GET /rollouts/{rollout_id}/result`. Refusals all have one shape: `{error, error_code, argument}`."""

TAGS: list[dict[str, Any]] = [
    {"name": "rollouts", "description": "Start, list, look, stop."},
    {"name": "one rollout", "description": "What it does, as it happens, and what it came to."},
    {"name": "environments", "description": "Remote environments whose tools a rollout can be given."},
    {"name": "server", "description": "The server itself."},
    {"name": "batches", "description": "Whole task sets: start, look, cancel, compare."},
    {"name": "groups", "description": "n rollouts of one task, for trainers."},
]
"""In the order in which /docs shows them; what OpenEnv serves follows."""

BIG = 1 << 53
"""No number in a request may be larger: JSON cannot carry it safely."""

EXAMPLE = {
    "instruction": "Write hello.py that prints hello.",
    "endpoint": "vllm",
    "verify": ["python3 hello.py | grep -x hello"],
    "task_id": "hello",
    "agent_timeout_s": 300,
}
STREAM = (
    "id: 1\nevent: entry\ndata: {...}\n\nevent: delta\ndata: {...}\n\n"
    'event: end\ndata: {"rollout_id": "...", "outcome": "finished"}\n\n'
)


def _caller(request: Request) -> Caller:
    return caller_of(request.scope)


By = Annotated[Caller, Depends(_caller)]
Id = Annotated[str, Path(max_length=100, description="Names the rollout.")]
After = Annotated[int, Query(ge=0, le=BIG, description="Only what comes after this.")]
Some = Annotated[int, Query(ge=1, le=200, description="How many at most.")]
Few = Annotated[int, Query(ge=1, le=100, description="How many at most.")]


def build(service: Service) -> FastAPI:
    """The app. It has no lifespan of its own: whoever opened the service closes it."""
    app = FastAPI(
        title="rollcage",
        version=version("rollcage"),
        description=ABOUT,
        docs_url=None,
        redoc_url=None,
        openapi_tags=TAGS,
        generate_unique_id_function=lambda route: route.name,
    )
    problems.install(app)
    app.include_router(_rollouts(service))
    app.include_router(_listing(service))
    app.include_router(_following(service))
    app.include_router(_reading(service))
    app.include_router(api_environments.router(service.environments))
    app.include_router(api_groups.router(service.groups))
    app.include_router(api_batches.router(service.batches))
    app.include_router(api_groups.gateway_router(service.groups))
    app.include_router(_machine(service))
    app.include_router(api_page.router(service))
    app.include_router(api_page.trying_router(service))
    return app


def build_reading(reader: LogReader, batches: BatchReader) -> FastAPI:
    """The part of it that only reads: nothing can be started or stopped."""
    app = FastAPI(title="rollcage", version=version("rollcage"), docs_url=None, redoc_url=None, openapi_url=None)
    problems.install(app)
    app.include_router(_listing(reader))
    app.include_router(_following(reader))
    app.include_router(_reading(reader))
    app.include_router(api_batches.reading_router(batches))
    app.include_router(api_page.router(reader))
    return app


async def _json(value: BaseModel) -> Response:
    # Large answers take a while to write; meanwhile the others go on.
    return Response(await anyio.to_thread.run_sync(json_of, value), media_type="application/json")


def _small(value: BaseModel, status: int = 200, **headers: str) -> Response:
    return Response(json_of(value), status_code=status, media_type="application/json", headers=headers)


def _rollouts(service: Service) -> APIRouter:
    """Start, list, look, stop."""
    router = APIRouter(tags=["rollouts"])

    @router.post(
        "/rollouts",
        status_code=201,
        responses={200: {"model": Started, "description": "Joined"}, **documented(409, 413, 422, 429, 503)},
        openapi_extra={"requestBody": {"content": {"application/json": {"example": EXAMPLE}}}},
    )
    async def start_rollout(body: RolloutRequest, by: By) -> Started:
        """Start a rollout.

        201 when it was accepted; 200 when its `idempotency_key` named one that was there already, which it joins;
        409 when that one was asked for with other arguments.
        """
        started = await service.start(body, by)
        location = f"/rollouts/{started.rollout_id}"
        return _small(started, 200 if started.joined else 201, Location=location)  # type: ignore[return-value]

    @router.delete("/rollouts/{rollout_id}", responses=documented(404, 422, 503))
    async def abort_rollout(
        rollout_id: Id,
        by: By,
        reason: Annotated[str, Query(max_length=1000, description="Kept in the log.")] = "",
        wait_s: Annotated[float, Query(ge=0, le=600, description="Answer only when it has ended.")] = 0,
    ) -> Aborted:
        """Stop a rollout: the model call in flight is cut, the agent dies, the box is gone."""
        aborted = await service.abort(rollout_id, by, reason=reason)
        if aborted.aborted and wait_s:
            await service.over(rollout_id, by, wait_s)
        return _small(aborted)  # type: ignore[return-value]

    return router


def _listing(service: LogReader) -> APIRouter:
    """Which there are, and where each is."""
    router = APIRouter(tags=["rollouts"])

    @router.get("/rollouts", responses=documented(422, 503))
    async def list_rollouts(
        by: By,
        filters: Annotated[Filters, Query()],
    ) -> RolloutPage:
        """List rollouts, newest first; with keys, each key sees its own."""
        page = await service.list(filters.query(), by, cursor=filters.cursor, limit=filters.limit)
        return await _json(page)  # type: ignore[return-value]

    @router.get("/rollouts/{rollout_id}", responses=documented(404, 422, 503))
    async def get_rollout(rollout_id: Id, by: By) -> RolloutState:
        """Where a rollout is: its stage, its place in the queue, its turns so far."""
        return _small(await service.state(rollout_id, by))  # type: ignore[return-value]

    return router


class Filters(BaseModel, use_attribute_docstrings=True, extra="forbid"):
    """Which rollouts are listed."""

    status: Status | None = None
    """Where it is."""
    stage: Stage | None = None
    """The stage it is in."""
    outcome: Outcome | None = None
    """How it ended."""
    task_id: str = ""
    """The caller's own name for the task."""
    agent: str = ""
    """The agent CLI."""
    model: str = ""
    """The model's name."""
    text: str = ""
    """Found in the beginning of the instruction, the task's id, or the error."""
    cursor: str = ""
    """`next_cursor` of the page before."""
    limit: Annotated[int, Query(ge=1, le=200)] = 50
    """How many at most."""

    def query(self) -> StoreQuery:
        """The same, as the store asks it."""
        stages = [stage for stage, status in STATUS.items() if self.status in (None, status)]
        stages = [stage for stage in stages if self.stage in (None, stage)]
        narrowed = self.status is not None or self.stage is not None
        if narrowed and not stages:  # they contradict each other, or nothing is `unknown` here
            return StoreQuery(outcome=Outcome.FINISHED, stages=(Stage.QUEUED,))
        texts = {name: getattr(self, name) for name in ("task_id", "agent", "model", "text")}
        return StoreQuery(stages=tuple(stages) if narrowed else (), outcome=self.outcome, **texts)


REFUSALS = documented(404, 422, 503)
"""What every request about one rollout may come to."""
FOLLOWED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The stream, or a page of it",
        "content": {
            "text/event-stream": {"schema": {"type": "string"}, "example": STREAM},
            "application/json": {"schema": {"$ref": "#/components/schemas/EventPage"}},
        },
    },
    204: {"description": "The rollout has ended, and there is nothing after that id: do not ask again"},
    **REFUSALS,
}


def _following(service: LogReader) -> APIRouter:
    """What one rollout does, as it happens."""
    router = APIRouter(prefix="/rollouts/{rollout_id}", tags=["one rollout"])

    @router.get("/events", response_class=Response, responses=FOLLOWED)
    async def follow_events(
        request: Request,
        rollout_id: Id,
        by: By,
        after: After = 0,
        last_event_id: Annotated[str, Header(description="Where a broken stream goes on.")] = "",
        live: Annotated[bool, Query(description="Also what a running turn says, as it says it.")] = False,
        limit: Annotated[int, Query(ge=1, le=1000, description="Entries in a page.")] = 200,
    ) -> Response:
        """Every entry of the log as it happens, as server-sent events; over after `event: end`.

        `id:` is the entry's seq: a reader that lost the stream sends it as `Last-Event-ID`, and misses nothing.
        With `Accept: application/json`, a page of entries at once.
        """
        if last_event_id.isascii() and last_event_id.isdecimal() and len(last_event_id) < 16:
            after = int(last_event_id)
        if "application/json" in request.headers.get("accept", ""):
            return await _json(await service.events(rollout_id, by, after=after, limit=limit))
        state, last = await service.reached(rollout_id, by)
        if state.stage is Stage.ENDED and after >= last:
            return Response(status_code=204)
        pages = await service.lines(rollout_id, by, after=after)
        return EventStream(pages, live=(lambda: service.live(rollout_id, by)) if live else None, stage=state.stage)

    @router.get("/messages", responses=REFUSALS)
    async def get_messages(rollout_id: Id, by: By) -> Messages:
        """The agent's own transcript, live, in the shape of OpenCode's `GET /session/:id/message`."""
        return await _json(await service.messages(rollout_id, by))  # type: ignore[return-value]

    return router


def _reading(service: LogReader) -> APIRouter:
    """What one rollout came to."""
    router = APIRouter(prefix="/rollouts/{rollout_id}", tags=["one rollout"])

    @router.get("/turns", responses=REFUSALS)
    async def list_turns(rollout_id: Id, by: By, after: After = 0, limit: Few = 20) -> TurnPage:
        """The model calls, whole: requests, messages, token ids, logprobs."""
        return await _json(await service.turns(rollout_id, by, after=after, limit=limit))  # type: ignore[return-value]

    @router.get("/trace", responses=REFUSALS)
    async def get_trace(rollout_id: Id, by: By, after: After = 0, limit: Some = 50) -> Trace:
        """The model calls token by token, as trainers need them: ids, logprobs, masks."""
        return await _json(await service.trace(rollout_id, by, after=after, limit=limit))  # type: ignore[return-value]

    @router.get("/merge", responses=REFUSALS)
    async def get_merge(rollout_id: Id, by: By) -> MergeView:
        """How its turns join into sequences, what is trained, and where and why a sequence breaks."""
        return await _json(await service.merge(rollout_id, by))  # type: ignore[return-value]

    @router.get("/files", responses=REFUSALS)
    async def get_files(rollout_id: Id, by: By) -> Files:
        """What the agent left in the workdir."""
        return await _json(await service.files(rollout_id, by))  # type: ignore[return-value]

    @router.get("/result", responses=REFUSALS)
    async def get_result(
        rollout_id: Id,
        by: By,
        wait_s: Annotated[float, Query(ge=0, le=3600, description="Wait so long for its end.")] = 0,
    ) -> RolloutResult:
        """What it came to. `outcome` is null while it runs; asking again gives the same answer."""
        pieces = await service.written(rollout_id, by, wait_s=wait_s)
        return StreamingResponse(pieces, media_type="application/json")  # type: ignore[return-value]

    return router


def _machine(service: Service) -> APIRouter:
    """The server itself."""
    router = APIRouter(tags=["server"])

    @router.get("/health", openapi_extra={"security": []})
    async def health() -> Health:
        """Whether it serves. Needs no key."""
        problem = await service.log_problem()
        health = Health(
            status="degraded" if problem else "healthy",
            problem=problem,
            version=version("rollcage"),
            running=service.running,
            waiting=service.waiting,
        )
        return _small(health)  # type: ignore[return-value]

    @router.get(
        "/ready",
        responses={503: {"model": Readiness, "description": "Not now"}},
        openapi_extra={"security": []},
    )
    async def ready() -> Readiness:
        """Whether it takes rollouts: 503 while it stops, or cannot write its log. Needs no key."""
        problem = "the server stops" if service.stopping else await service.log_problem()
        return _small(Readiness(ready=not problem, problem=problem), 503 if problem else 200)  # type: ignore[return-value]

    router.add_api_route("/ready", ready, methods=["HEAD"], include_in_schema=False)
    # Some load balancers ask so.
    router.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **documented()},
    )
    async def metrics() -> Response:
        """Queue, running, outcomes, stage times, tokens: for Prometheus."""
        await service.measure_log()
        return Response(service.metrics.page(), media_type=service.metrics.content_type)

    return router


def document(app: FastAPI, others: tuple[FastAPI, ...] = (), *, keyed: bool = False) -> dict[str, Any]:
    """The OpenAPI document of this app and of those beside it; where two say something, this one is right."""
    whole: dict[str, Any] = app.openapi()
    whole.setdefault("components", {}).setdefault("schemas", {}).setdefault(
        "EventPage", _plain_schema(EventPage, whole["components"]["schemas"])
    )
    whole = {**whole, "paths": dict(whole["paths"]), "components": {**whole["components"]}}
    if keyed:
        whole["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        whole["security"] = [{"key": []}]
    for other in others:
        theirs = other.openapi()
        whole["paths"] |= {path: each for path, each in theirs.get("paths", {}).items() if path not in whole["paths"]}
        for kind, known in theirs.get("components", {}).items():
            whole["components"][kind] = {**known, **whole["components"].get(kind, {})}
    return whole


def _plain_schema(model: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    """A schema whose definitions are put beside the others'."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}", mode="serialization")
    for name, definition in schema.pop("$defs", {}).items():
        schemas.setdefault(name, definition)
    return schema
