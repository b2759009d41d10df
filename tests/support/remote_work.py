"""Runs rollouts on a local Fleet, and serves small environments of other kinds, for the tests of remote work."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from pydantic import SecretStr

from rollcage.agents.loop import Loop
from rollcage.environments.fleet.provider import FleetEnvironments
from rollcage.environments.mcp import McpEnvironments
from rollcage.environments.openenv import OpenEnvEnvironments
from rollcage.mcp.bridge import serve_tools
from rollcage.mcp.convert import Union
from rollcage.mcp.types import ListToolsAction, ToolResult, Tools
from rollcage.runner import Registry
from rollcage.settings import FleetSettings
from rollcage.simulators import FleetRuntime
from rollcage.types import ScriptedCall, ScriptedTurn

DESK = "fleet:ticket-desk"


def tool(name: str, /, **arguments: Any) -> ScriptedTurn:
    """The model calls one tool."""
    return ScriptedTurn(tool_calls=(ScriptedCall(name=name, arguments=arguments),))


def with_environments(backends: Registry, fleet: FleetRuntime) -> Registry:
    """The same parts, the agent `loop`, and this Fleet among the environments."""
    known = FleetSettings(api_key=SecretStr(fleet.key), base_url=fleet.base_url)
    return Registry(
        providers=backends.providers,
        agents={**backends.agents, "loop": Loop()},
        gateway=backends.gateway,
        environments={
            "fleet": FleetEnvironments(known.api_key, known.base_url),
            "mcp": McpEnvironments(),
            "openenv": OpenEnvEnvironments(),
        },
    )


class Greeter:
    """One tool, for an MCP server."""

    def __init__(self) -> None:
        self.greeted: list[str] = []

    async def list_tools(self) -> ListToolsAction:
        union = Union("first")
        schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        union.add("here", [{"name": "greet", "description": "Says hello.", "inputSchema": schema}])
        tools = list(union.tools.values())
        return ListToolsAction(tools=[one.openai for one in tools], offered=tools)

    async def call_tool(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        self.greeted.append(str((arguments or {}).get("name")))
        return ToolResult(tool=name, endpoint="here", content=[{"type": "text", "text": f"Hello {self.greeted[-1]}."}])


@asynccontextmanager
async def mcp_server(tools: Tools) -> AsyncIterator[str]:
    """An MCP server on this machine; its address."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        async with serve_tools(tools, sock):
            yield f"http://127.0.0.1:{sock.getsockname()[1]}/mcp"


@contextmanager
def openenv_server() -> Iterator[str]:
    """A real OpenEnv server in a process of its own: a counter. Its address."""
    with subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def _counter() -> None:
    import uvicorn
    from fastmcp import FastMCP
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from openenv.core.env_server.types import Observation, State

    class Counter(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            server = FastMCP("counter")
            self._total = 0

            @server.tool
            def add(number: int) -> int:
                """Adds to the total."""
                if number < 0:
                    raise ValueError("only upwards")
                self._total += number
                return self._total

            super().__init__(server)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
            self._total = seed or 0
            return Observation(done=False, reward=None)

        def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
            return Observation(done=False, reward=None)

        async def step_async(self, action: Any, timeout_s: float | None = None, **more: Any) -> Observation:
            observation = await super().step_async(action, timeout_s=timeout_s, **more)
            observation.reward = self._total / 10
            return observation

        @property
        def state(self) -> State:
            return State(episode_id="one", step_count=self._total)

    app = create_fastapi_app(Counter, CallToolAction, CallToolObservation, max_concurrent_envs=4)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error", ws="websockets-sansio")).run([listener])


if __name__ == "__main__":
    _counter()
