"""The HTTP API of remote environments: what there is, its tools, and calls on an instance of one's own."""

from __future__ import annotations

from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Body, Depends, Path, Request
from pydantic import BaseModel
from starlette.responses import Response

from rollcage.schema.views import CalledTool, OfferedEnvironments, OfferedTools, ReleasedEnvironment
from rollcage.server.auth import Caller, caller_of
from rollcage.server.environments import RemoteEnvironments
from rollcage.server.problems import documented


def _caller(request: Request) -> Caller:
    return caller_of(request.scope)


By = Annotated[Caller, Depends(_caller)]
Name = Annotated[str, Path(max_length=200, description="As `GET /environments` names it.")]
Tool = Annotated[str, Path(max_length=200, description="As the list of tools names it.")]
Arguments = Annotated[dict[str, Any], Body(description="The tool's arguments, as its schema wants them.")]


def router(environments: RemoteEnvironments) -> APIRouter:
    """Look, call, release."""
    router = APIRouter(prefix="/environments", tags=["environments"])
    refusals = documented(404, 422, 429, 502, 503)

    @router.get("", responses=documented(422, 503))
    async def list_environments() -> OfferedEnvironments:
        """The remote environments whose tools a rollout can be given (`environment`)."""
        return await _json(await environments.offered())  # type: ignore[return-value]

    @router.get("/{name}/tools", responses=refusals)
    async def list_environment_tools(name: Name, by: By) -> OfferedTools:
        """The tools of an environment, with their schemas. Provisions an instance of your own, if you have none."""
        return await _json(await environments.tools(name, by))  # type: ignore[return-value]

    @router.post("/{name}/tools/{tool}", responses=refusals)
    async def call_environment_tool(name: Name, tool: Tool, by: By, arguments: Arguments) -> CalledTool:
        """Call a tool on your instance. A tool that fails is an answer too: `is_error`."""
        return await _json(await environments.call(name, tool, arguments, by))  # type: ignore[return-value]

    @router.delete("/{name}", responses=documented(404, 422, 503))
    async def release_environment(name: Name, by: By) -> ReleasedEnvironment:
        """Give your instance back; the next call gets a new one, at its start."""
        environments.address(name)
        return await _json(ReleasedEnvironment(name=name, released=await environments.release(name, by)))  # type: ignore[return-value]

    return router


async def _json(value: BaseModel) -> Response:
    body = await anyio.to_thread.run_sync(value.__pydantic_serializer__.to_json, value)
    return Response(body, media_type="application/json")
