"""`openenv:http://host:port`: any OpenEnv server, over its WebSocket. One socket is one environment of one's own.

Agents get its tools, which are carried out as steps; reset, step and state stay out here. This speaks the wire format
itself: importing the `openenv` package takes seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from rollcage.environments.base import Environment, check_address, check_package
from rollcage.errors import EnvironmentFailed, EnvironmentLost, ResetFailed, UsageError
from rollcage.json_safe import json_safe
from rollcage.mcp.types import Tools
from rollcage.types import JsonObject, Task

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

    from rollcage.mcp.convert import Union
    from rollcage.mcp.types import ListToolsAction, ToolResult

CONNECT_S = 30.0
RESET_S = 300.0
CALL_S = 900.0
"""OpenEnv's own budget for one step."""
LARGEST = 64 << 20
"""Bytes of one answer."""
MOST = 10_000
"""Tools that a server may have."""


class OpenEnvEnvironments:
    """Every OpenEnv server."""

    secrets: tuple[str, ...] = ()

    def check(self, place: str, task: Task) -> None:
        """An address is needed; rewards are the server's own."""
        check_address("openenv", place)
        check_package("websockets", "fleet")
        if task.verifier:
            raise UsageError("an OpenEnv server runs none; its own reward is what counts", argument="verifier")

    @asynccontextmanager
    async def open(self, place: str) -> AsyncIterator[Environment]:
        """A session on the server; it ends with the block."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake, InvalidURI

        class Direct(connect):
            """Goes where it was sent, and nowhere else: a redirect could lead to any address that we can reach."""

            def process_redirect(self, exc: Exception) -> Exception | str:
                return exc

        url = "ws" + place.removeprefix("http").rstrip("/") + "/ws"
        try:
            socket = await Direct(url, open_timeout=CONNECT_S, max_size=LARGEST, proxy=None)
        except (OSError, EOFError, InvalidHandshake, InvalidURI) as error:
            message = f"openenv:{place} does not answer ({type(error).__name__}: {error})"
            raise EnvironmentFailed(message, remedy="check that the server runs and speaks OpenEnv") from error
        try:
            yield _OpenEnvSession(place, socket)
        finally:
            with anyio.move_on_after(5, shield=True):
                await socket.close()


class _OpenEnvSession:
    """One environment behind one socket: frames go out one at a time, and each has one answer."""

    instance_id = ""

    def __init__(self, place: str, socket: ClientConnection) -> None:
        self._address, self._socket = f"openenv:{place}", socket
        self._turn = anyio.Lock()
        self._owed = 0
        self._reward: Any = None
        self._tools = _Tools(self)

    @property
    def name(self) -> str:
        return self._address

    @property
    def tools(self) -> Tools:
        return self._tools

    async def reset(self, seed: int | None) -> None:
        try:
            await self.ask("reset", {} if seed is None else {"seed": seed}, RESET_S)
        except EnvironmentLost:
            raise
        except EnvironmentFailed as error:
            raise ResetFailed(f"{error}; not every environment takes a seed") from error

    async def reward(self, task: Task) -> float | None:
        """The last reward that a step gave; else what the state calls one."""
        from rollcage.environments.failures import reward_of

        state = await self.ask("state", None, RESET_S)
        said = (self._reward, state.get("reward"), state.get("last_reward"))
        return reward_of(self._address, next((one for one in said if one is not None), None))

    async def step(self, action: JsonObject) -> JsonObject:
        """One step; its observation."""
        answer = await self.ask("step", action, CALL_S)
        if action["type"] == "call_tool" and answer.get("reward") is not None:
            self._reward = answer["reward"]
        observation = answer.get("observation")
        return observation if isinstance(observation, dict) else {}

    async def ask(self, kind: str, data: JsonObject | None, seconds: float) -> JsonObject:
        """Send a frame; the data of its answer. EnvironmentLost where the socket broke."""
        from websockets.exceptions import ConnectionClosed

        frame = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            async with self._turn:
                with anyio.fail_after(seconds):
                    # Answers to frames that nobody waits for any more come first.
                    while self._owed:
                        await self._socket.recv()
                        self._owed -= 1
                    self._owed += 1
                    await self._socket.send(json.dumps(frame))
                    text = await self._socket.recv()
                    self._owed -= 1
            answer = json.loads(text)
        except ConnectionClosed as error:
            raise EnvironmentLost(f"{self._address} closed the connection: {error}") from error
        except TimeoutError:
            raise EnvironmentFailed(f"{self._address} gave no answer to {kind} within {seconds:g} s") from None
        except (ValueError, RecursionError) as error:
            raise EnvironmentFailed(f"{self._address} answered {kind} with something that is no JSON") from error
        data = answer.get("data") if isinstance(answer, dict) else None
        data = data if isinstance(data, dict) else {}
        if not isinstance(answer, dict) or answer.get("type") == "error":
            said = str(data.get("message", "no reason"))[:500]
            raise EnvironmentFailed(f"{self._address} refused {kind}: {said}")
        return data


class _Tools:
    """The agent's plane: every call is a step."""

    def __init__(self, session: _OpenEnvSession) -> None:
        self._session = session
        self._union: Union | None = None

    async def list_tools(self) -> ListToolsAction:
        from rollcage.mcp.types import ListToolsAction

        tools = list((await self._listed()).tools.values())
        return ListToolsAction(tools=[tool.openai for tool in tools], offered=tools)

    async def _listed(self) -> Union:
        from rollcage.mcp.convert import Union

        if self._union is None:
            # Listing is a step too: it is made once.
            listed = (await self._session.step({"type": "list_tools"})).get("tools")
            listed = listed if isinstance(listed, list) else []
            if len(listed) > MOST:
                raise EnvironmentFailed(f"{self._session.name} has more than {MOST} tools")
            union = Union("first")
            union.add("openenv", [_raw(tool) for tool in listed if isinstance(tool, dict)])
            self._union = union
        return self._union

    async def call_tool(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        from rollcage.mcp.errors import EndpointDown, ToolFailed, ToolNotFound
        from rollcage.mcp.types import ToolResult

        # Only what was offered: a step could be something else too.
        tool = (await self._listed()).find(name)
        if tool is None:
            raise ToolNotFound(f"no tool {name!r} on {self._session.name}")
        started = time.monotonic()
        action = {"type": "call_tool", "tool_name": tool.original, "arguments": dict(arguments or {})}
        try:
            observation = await self._session.step(action)
        except EnvironmentLost as error:
            raise EndpointDown(str(error), endpoint="openenv", may_have_run=True) from error
        except EnvironmentFailed as error:
            observation = {"error": {"message": str(error)}}
        # Nobody vouches for what a tool says: what is nested too deep, or no text, could not be passed on.
        observation = json_safe(observation)
        failure = observation.get("error")
        content, structured = _content(observation.get("result"))
        if failure:
            said = failure.get("message") if isinstance(failure, dict) else failure
            content, structured = [{"type": "text", "text": str(said)}], None
        result = ToolResult(
            tool=name,
            endpoint="openenv",
            content=content,
            structured=structured,
            is_error=bool(failure),
            seconds=time.monotonic() - started,
        )
        if result.is_error:
            raise ToolFailed(f"tool {name!r} failed: {result.text}", endpoint="openenv", result=result)
        return result


def _raw(tool: JsonObject) -> JsonObject:
    """A tool as MCP writes it."""
    schema = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object"}
    return {"name": tool.get("name"), "description": tool.get("description") or "", "inputSchema": schema}


def _content(result: Any) -> tuple[list[JsonObject], Any]:
    """The blocks and the structured content in a step's result, which may be any JSON."""
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        blocks = [block for block in result["content"] if isinstance(block, dict)]
        return blocks, result.get("structured_content") or result.get("structuredContent")
    text = result if isinstance(result, str) else json.dumps(result)
    return [{"type": "text", "text": text}], None
