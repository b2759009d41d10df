"""Groups over HTTP, and what trainers need beside them: capacity, and a pause of the gateway while weights change."""

from __future__ import annotations

import json
from typing import Annotated, Any

import anyio
import msgspec
from fastapi import APIRouter, Depends, Header, Path, Query, Request
from starlette.responses import Response

from rollcage.schema.groups import (
    GROUPS_AT_ONCE,
    AbortedRollouts,
    Capacity,
    GatewayPause,
    GatewayResume,
    GatewayState,
    Group,
    GroupPage,
    GroupRequest,
    Until,
)
from rollcage.schema.nodes import Nodes
from rollcage.schema.writing import json_of
from rollcage.server.auth import Caller, caller_of
from rollcage.server.groups import GroupService
from rollcage.server.problems import documented, refusal
from rollcage.trajectory.export.columns import as_columns, schema
from rollcage.trajectory.export.rows import sequence_row
from rollcage.types import JsonObject

ARROW, MSGPACK = "application/vnd.apache.arrow.stream", "application/msgpack"
FORMS = {"application/json": "json", ARROW: "arrow", MSGPACK: "msgpack", "application/x-msgpack": "msgpack"}
"""What sequences can be had as, by the `Accept` of the request."""


def _caller(request: Request) -> Caller:
    return caller_of(request.scope)


By = Annotated[Caller, Depends(_caller)]
GroupId = Annotated[str, Path(max_length=200, description="Names the group.")]
Wait = Annotated[float, Query(ge=0, le=3600, description="Answer at the latest after so many seconds.")]
Reason = Annotated[str, Query(max_length=1000, description="Kept in the log.")]
Named = Annotated[
    list[str], Query(min_length=1, max_length=GROUPS_AT_ONCE, description="Groups; may be given many times.")
]


def _answer(value: Any, status: int = 200) -> Any:
    return Response(json_of(value), status_code=status, media_type="application/json")


def router(groups: GroupService) -> APIRouter:
    """Groups as resources."""
    router = APIRouter(tags=["groups"])

    @router.post(
        "/groups",
        status_code=201,
        responses={200: {"model": Group, "description": "Joined"}, **documented(409, 413, 422, 429, 503)},
    )
    async def start_group(body: GroupRequest, by: By) -> Group:
        """Start n rollouts of one task, all or none; 200 where the `idempotency_key` names a group that is there."""
        group = await groups.start(body, by)
        return _answer(group, 200 if group.joined else 201)  # type: ignore[no-any-return]

    @router.get("/groups", responses=documented(404, 422, 503))
    async def wait_groups(
        by: By,
        group_id: Named,
        cursor: Annotated[int, Query(ge=0, le=1 << 53, description="What the last answer said.")] = 0,
        until: Annotated[Until, Query(description="Answer when a rollout has ended, or when all is done.")] = "any",
        wait_s: Wait = 0,
    ) -> GroupPage:
        """What has ended in some groups since the cursor, and where each of them is."""
        return _answer(await groups.wait(group_id, by, until=until, cursor=cursor, wait_s=wait_s))  # type: ignore[no-any-return]

    @router.delete("/groups", responses=documented(422, 503))
    async def abort_older(
        by: By,
        policy_version_below: Annotated[str, Query(max_length=200, description="The first version to keep.")],
        reason: Reason = "",
    ) -> AbortedRollouts:
        """Stop open rollouts of older weights: `step-9` is older than `step-10`; one without version never is."""
        return _answer(await groups.abort_older(policy_version_below, by, reason))  # type: ignore[no-any-return]

    @router.get(
        "/groups/{group_id:path}/sequences",
        response_class=Response,
        responses={200: {"content": {form: {} for form in FORMS}}, **documented(404, 406, 422, 503)},
    )
    async def get_group_sequences(
        group_id: GroupId,
        by: By,
        usable_only: Annotated[bool, Query(description="Leave out what was not scored.")] = False,
        per_turn: Annotated[bool, Query(description="One sequence per turn.")] = False,
        accept: Annotated[str, Header()] = "",
    ) -> Response:
        """The ended rollouts of a group as merged sequences: JSON, msgpack or an Arrow stream, by `Accept`."""
        form = accepted(accept)
        if form is None:
            return refusal(406, "not_acceptable", f"sequences can be had as {', '.join(FORMS)}")
        group, rows = await groups.sequences(group_id, by, usable_only=usable_only, per_turn=per_turn)
        return await anyio.to_thread.run_sync(_written, form, group, [sequence_row(row) for row in rows])

    @router.get("/groups/{group_id:path}", responses=documented(404, 422, 503))
    async def get_group(group_id: GroupId, by: By) -> Group:
        """Where a group is, with its rollouts."""
        return _answer(await groups.get(group_id, by))  # type: ignore[no-any-return]

    @router.delete("/groups/{group_id:path}", responses=documented(404, 422, 503))
    async def abort_group(group_id: GroupId, by: By, reason: Reason = "") -> AbortedRollouts:
        """Stop what still runs of a group."""
        return _answer(await groups.abort(group_id, by, reason))  # type: ignore[no-any-return]

    @router.get("/capacity", responses=documented())
    async def get_capacity(by: By) -> Capacity:
        """How much more can be started."""
        return _answer(groups.capacity(by))  # type: ignore[no-any-return]

    @router.get("/nodes", responses=documented())
    async def get_nodes(by: By) -> Nodes:
        """The machines of the cluster that runs the rollouts, for admins; none: the server runs them itself."""
        return _answer(groups.nodes(by))  # type: ignore[no-any-return]

    return router


def gateway_router(groups: GroupService) -> APIRouter:
    """The gateway between agents and models; for admins."""
    router = APIRouter(tags=["server"], prefix="/gateway")

    @router.post("/pause", responses=documented(422))
    async def pause_gateway(body: GatewayPause, by: By) -> GatewayState:
        """Let no model call begin; answers when none runs any more. New calls wait."""
        return _answer(await groups.pause(body, by))  # type: ignore[no-any-return]

    @router.post("/resume", responses=documented(422))
    async def resume_gateway(body: GatewayResume, by: By) -> GatewayState:
        """Let calls begin again, with the weights that are named here."""
        return _answer(groups.resume(body, by))  # type: ignore[no-any-return]

    return router


def accepted(accept: str) -> str | None:
    """The form that a request wants; None where there is no such one. JSON where it does not say."""
    wanted = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    for name in wanted:
        if name in FORMS:
            return FORMS[name]
    return "json" if not accept.strip() or {"*/*", "application/*"} & set(wanted) else None


def _written(form: str, group: Group, rows: list[JsonObject]) -> Response:
    about = group.model_dump(mode="json")
    if form == "arrow":
        return Response(_arrow(about, rows), media_type=ARROW)
    encode = msgspec.json.encode if form == "json" else msgspec.msgpack.encode
    return Response(encode({**about, "sequences": rows}), media_type="application/json" if form == "json" else MSGPACK)


def _arrow(about: JsonObject, rows: list[JsonObject]) -> bytes:
    """The columns of the parquet export as an Arrow stream; the group is in the metadata of its schema."""
    try:
        import pyarrow as pa
    except ImportError as error:
        from rollcage.errors import SetupError

        raise SetupError("Arrow needs pyarrow", remedy="pip install 'rollcage[export]', or ask for msgpack") from error
    columns = schema("sequences")
    told = {**(columns.metadata or {}), b"rollcage_group": json.dumps(about).encode()}
    table = pa.Table.from_pylist([as_columns("sequences", row) for row in rows], schema=columns.with_metadata(told))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
