"""The OpenEnv environment: reset, step and state over the rollout tools, served by OpenEnv's own app.

It imports `openenv`, which costs seconds: `app` fetches it when everything else serves already.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, cast

import anyio
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastmcp import FastMCP
from fastmcp.tools import Tool as ServerTool
from fastmcp.tools import ToolResult as ServedResult
from openenv.core.env_server.exceptions import SessionCapacityError
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import (
    CallToolObservation,
    ListToolsObservation,
    ToolError,
    ToolErrorType,
)
from openenv.core.env_server.mcp_types import Tool as ListedTool
from openenv.core.env_server.types import Action, ConcurrencyConfig, EnvironmentMetadata, Observation, ResetRequest
from pydantic import Field

from rollcage.results.result import RolloutResult
from rollcage.schema.openenv import OpenCodeState, RolloutAction, RolloutObservation, published_outcome
from rollcage.schema.request import RolloutRequest
from rollcage.schema.views import RolloutState
from rollcage.schema.writing import json_of
from rollcage.server.auth import current_caller
from rollcage.server.mcp_call import CallProgress, RolloutTool, ToolFailure, call
from rollcage.server.mcp_tools import TOOLS, find
from rollcage.server.openenv_sessions import (
    ClientConnection,
    ConnectionMiddleware,
    Episode,
    Episodes,
    Sessions,
    connection,
)
from rollcage.server.service import Service
from rollcage.types import JsonObject, Value

STEP_BUDGET_S = 900.0
"""How long a step may take where the caller does not say."""
SESSIONS = 1024
"""Sessions at once; one that waits for a rollout costs a socket and no thread."""
IDLE_S = 3600.0
"""A session that nobody used for so long is closed."""

NAME = "opencode_env"
ABOUT = "Runs coding agents on tasks in isolated boxes: each tool call to run_rollout is one scored rollout."
READY = "opencode_env is ready: call run_rollout with an instruction."
USAGE = (
    'send {"type": "call_tool", "tool_name": "run_rollout", "arguments": {"instruction": ...}} (CallToolAction) '
    'or {"type": "list_tools"} (ListToolsAction)'
)

_ERROR_TYPES = {
    "bad_argument": ToolErrorType.INVALID_ARGS,
    "unknown_tool": ToolErrorType.TOOL_NOT_FOUND,
    "unknown_rollout": ToolErrorType.INVALID_ARGS,
    "timeout": ToolErrorType.TIMEOUT,
    "gone": ToolErrorType.TRANSPORT_ERROR,
}


def build(service: Service, *, sessions: int = SESSIONS, budget_s: float = STEP_BUDGET_S) -> FastAPI:
    """OpenEnv's app over this service: /ws, /reset, /step, /state, /schema, /metadata, /mcp (OpenEnv's own) ..."""
    # OpenEnv looks through a partial at the class, which says that one thread is enough for all sessions.
    app: FastAPI = create_app(
        partial(OpenCodeEnvironment, service, Episodes(), budget_s, Sessions(sessions)),
        RolloutAction,
        RolloutObservation,
        env_name=NAME,
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=sessions, session_timeout=IDLE_S),
        state_cls=OpenCodeState,
        reset_observation_cls=Observation,
    )
    app.add_middleware(ConnectionMiddleware)
    app.add_exception_handler(RequestValidationError, _refuse)
    return app


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    """What is wrong with a request, without repeating it: there may be a key in it."""
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    return JSONResponse({"detail": [{key: each[key] for key in ("type", "loc", "msg")} for each in problems]}, 422)


class OpenCodeEnvironment(MCPEnvironment):
    """One session. It owns no rollout: the service runs them, and goes on when a session ends."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    REQUIRES_SINGLE_THREAD_EXECUTOR = True

    def __init__(
        self,
        service: Service | None,
        episodes: Episodes,
        budget_s: float = STEP_BUDGET_S,
        sessions: Sessions | None = None,
    ) -> None:
        """`service`: None where `opened` finds one when the first tool is called."""
        super().__init__(mcp_server(self.answered))
        self._service, self._episodes, self._budget_s = service, episodes, budget_s
        here = connection.get()
        # OpenEnv makes those of sessions in a thread, where there is no connection.
        self._sessions, self._held = sessions if here is None else None, 0
        self._owner = here.owner if here else None
        self._episode = Episode.new()
        if here and here.owner is not None:
            self._episode = episodes.find(here.owner, here.episode_id)
        self._calls = self.mcp_client = cast("Any", ToolCalls(self))
        """What OpenEnv's own /mcp calls: the tools without the detour over a session of MCP."""

    @asynccontextmanager
    async def mcp_session(self) -> AsyncIterator[ToolCalls]:
        """OpenEnv enters it when a session begins, perhaps twice, and leaves it when the session is over.

        SessionCapacityError, which OpenEnv tells the client, where the caller has as many sessions as it may.
        """
        caller, sessions = current_caller.get(), self._sessions
        if sessions is not None and self._held == 0 and (full := sessions.enter(caller)):
            raise SessionCapacityError(*full, message=f"{full[0]} sessions of this key are open, and no more may be")
        self._held += 1
        try:
            yield self._calls
        finally:
            self._held -= 1
            if sessions is not None and self._held == 0:
                sessions.leave(caller)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        """Begin an episode. `seed` is the sampling seed of its rollouts that name none; ValidationError where it is no
        number, which OpenEnv tells the client.
        """
        # OpenEnv checks them only for plain HTTP.
        ResetRequest.model_validate({"seed": seed, "episode_id": episode_id}, strict=True)
        self._episode = Episode.new(episode_id, seed)
        if self._owner is not None:
            self._episodes.keep(self._owner, self._episode)
        episode = str(self._episode.state.episode_id)
        ready = {"status": "ready", "message": READY, "episode_id": episode, "tools": list(TOOLS)}
        return Observation(done=False, reward=None, metadata=ready)

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Observation:
        """The same, on the loop."""
        return self.reset(seed, episode_id, **more)

    def step(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        """Not without a loop: rollouts run on the server's own."""
        raise RuntimeError("this environment is asynchronous: await step_async(action)")

    async def step_async(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        """Call a tool or list the tools. What goes wrong is in the observation; nothing is raised."""
        named = more.get("episode_id")
        if self._owner is not None and isinstance(named, str) and named:
            self._episode = self._episodes.find(self._owner, named[:255])
        self._episode.state.step_count += 1
        kind = getattr(action, "type", "")
        if kind == "list_tools":
            return ListToolsObservation(tools=listed(), reward=0.0)
        name = getattr(action, "tool_name", "")
        if kind != "call_tool" or not name:
            return self._step_impl(action, timeout_s)
        return await self._observed(name, getattr(action, "arguments", {}), timeout_s or _asked(action))

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        """What is neither a call nor a listing: an error, and no reward, for nothing was scored."""
        kind = getattr(action, "type", "") or type(action).__name__
        wrong = f"Unknown action type: {kind!r}" if kind != "call_tool" else "the action names no tool"
        return Observation(done=False, reward=None, metadata={"status": "error", "error": f"{wrong}: {USAGE}"})

    async def _observed(self, name: str, arguments: object, timeout_s: float | None) -> CallToolObservation:
        try:
            answer = await self.perform(name, arguments, timeout_s)
        except ToolFailure as failure:
            kind = _ERROR_TYPES.get(failure.code, ToolErrorType.EXECUTION_ERROR)
            # A rollout that could not be run was not scored; a zero would say that it was.
            return CallToolObservation(
                tool_name=name,
                error=ToolError(error_type=kind, message=failure.message),
                reward=None if name in ("run_rollout", "finalize_rollout") else 0.0,
                metadata=failure.problem,
            )
        reward = answer.reward if isinstance(answer, RolloutResult) else 0.0
        return CallToolObservation(tool_name=name, result=shaped(answer), reward=reward)

    async def perform(self, name: str, arguments: object, timeout_s: float | None) -> Value:
        """Call a tool; the episode takes note of rollouts that ended. ToolFailure where it comes to nothing."""
        tool = find(name)
        given = self._seeded(tool, arguments)
        here, progress = connection.get(), CallProgress()
        answer: Value | ToolFailure | None = None
        budget = timeout_s or self._budget(given)
        async with anyio.create_task_group() as tasks:
            tasks.cancel_scope.deadline = anyio.current_time() + budget
            if here is not None:
                tasks.start_soon(_leave_with, here, tasks.cancel_scope)
            try:
                service = await self.opened()
                answer = await call(tool, given, service, current_caller.get(), progress, older=True)
            except ToolFailure as failure:  # raised below: a task group would put it into a group of its own
                answer = failure
            tasks.cancel_scope.cancel()
        if answer is None:
            raise _unfinished(name, given, progress, budget, gone=here is not None and here.gone.is_set())
        if isinstance(answer, ToolFailure):
            raise answer
        if isinstance(answer, RolloutResult):
            self._count(answer)
        return answer

    async def answered(self, name: str, arguments: JsonObject) -> JsonObject:
        """The answer of a tool, in OpenEnv's shape."""
        return shaped(await self.perform(name, arguments, None))

    async def opened(self) -> Service:
        """The service that runs the rollouts."""
        if self._service is None:
            raise RuntimeError("this environment was made without a service")
        return self._service

    def _seeded(self, tool: RolloutTool, arguments: object) -> object:
        if self._episode.seed is None or not isinstance(arguments, dict):
            return arguments
        if not issubclass(tool.arguments, RolloutRequest) or arguments.get("seed") is not None:
            return arguments
        return {**arguments, "seed": self._episode.seed}

    def _budget(self, arguments: object) -> float:
        """Whoever gives a rollout more time than a step has, means the step to wait for it."""
        asked = arguments.get("timeout_s") if isinstance(arguments, dict) else None
        if isinstance(asked, int | float) and asked > 0:
            return max(self._budget_s, float(asked) + 60)
        return self._budget_s

    def _count(self, result: RolloutResult) -> None:
        if result.outcome is None or result.rollout_id in self._episode.counted:
            return
        self._episode.counted.add(result.rollout_id)
        state = self._episode.state
        state.rollouts_completed += 1
        state.last_reward = result.reward
        state.last_task_id, state.last_sandbox_id = result.task_id or None, result.sandbox_id or None

    @property
    def state(self) -> OpenCodeState:
        """The episode so far."""
        return self._episode.state

    def get_metadata(self) -> EnvironmentMetadata:
        """What this environment is."""
        return EnvironmentMetadata(name=NAME, description=ABOUT, version=version("rollcage"), author="rollcage")


class ToolCalls:
    """The tools as OpenEnv's /mcp wants them: an object that looks like a connected MCP client."""

    def __init__(self, environment: OpenCodeEnvironment) -> None:
        self._environment = environment

    async def __aenter__(self) -> ToolCalls:
        """There is nothing to connect to."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nor to close."""

    def is_connected(self) -> bool:
        """Always."""
        return True

    async def list_tools(self) -> list[ListedTool]:
        """Every tool."""
        return listed()

    async def call_tool(self, name: str, arguments: JsonObject | None = None) -> JsonObject:
        """Call one; what goes wrong is raised, and OpenEnv makes a JSON-RPC error of it."""
        return await self._environment.answered(name, arguments or {})


class ServedTool(ServerTool):
    """One rollout tool of an environment's own MCP server."""

    answer: Callable[[str, JsonObject], Awaitable[JsonObject]] = Field(exclude=True)

    async def run(self, arguments: JsonObject) -> ServedResult:
        """Call it; what goes wrong is raised, and the server makes an error of it."""
        given = await self.answer(self.name, arguments)
        return ServedResult(content=given["content"][0]["text"], structured_content=given["structured_content"])


def mcp_server(answer: Callable[[str, JsonObject], Awaitable[JsonObject]]) -> FastMCP[Any]:
    """The tools as an MCP server in this process, which is what OpenEnv's MCP environments are made of."""
    tools = [
        ServedTool(name=tool.name, description=tool.description, parameters=tool.input_schema, answer=answer)
        for tool in TOOLS.values()
    ]
    return FastMCP(NAME, tools=tools)


def listed() -> list[ListedTool]:
    """The tools in OpenEnv's words."""
    return [
        ListedTool(name=tool.name, description=tool.description, input_schema=tool.input_schema)
        for tool in TOOLS.values()
    ]


def shaped(answer: Value) -> JsonObject:
    """An answer as OpenEnv's clients read it: `data` is the value, the text block the same in JSON."""
    written = json_of(answer, exclude={"outcome"})
    if isinstance(answer, RolloutResult | RolloutState):
        written = written[:-1] + b',"outcome":' + json.dumps(published_outcome(answer.outcome)).encode() + b"}"
    data = json.loads(written)
    text = {"type": "text", "text": written.decode()}
    return {"content": [text], "structured_content": data, "data": data, "is_error": False}


def _asked(action: Action) -> float | None:
    """The budget that came with the action: a socket's frames have no other place for it."""
    asked = action.metadata.get("timeout_s")
    return float(asked) if isinstance(asked, int | float) and asked > 0 else None


async def _leave_with(here: ClientConnection, scope: anyio.CancelScope) -> None:
    await here.gone.wait()
    scope.cancel()


def _unfinished(name: str, arguments: object, progress: CallProgress, budget: float, *, gone: bool) -> ToolFailure:
    why = "the client went away" if gone else f"not over after {budget:g} s"
    after = ""
    if progress.rollout_id:
        stopped = isinstance(arguments, dict) and arguments.get("on_disconnect") == "abort"
        how = "was aborted" if stopped else "goes on"
        after = f"; rollout {progress.rollout_id} {how}: finalize_rollout gives what it comes to"
    return ToolFailure(f"{name}: {why}{after}", "gone" if gone else "timeout")
