"""The environment's class by its published place: made without arguments, it runs rollouts in this process.

It fits `create_app(OpenCodeEnvironment, CallToolAction, CallToolObservation)`, and can be reset and stepped directly.
The server has sessions of its own (`rollcage.server.openenv`).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import anyio.to_thread
from fastmcp.client.client import CallToolResult
from mcp.types import TextContent
from openenv.core.env_server.mcp_types import CallToolObservation
from openenv.core.env_server.types import Action, Observation

from opencode_env._loop import loop
from opencode_env.paths import (
    AGENT_LOG,
    INSTRUCTION_PATH,
    PROXY_LOG,
    REMOTE_REWARD_PATH,
    REMOTE_TEST_PATH,
    REWARD_FILE,
    VERIFY_TIMEOUT_S,
    WORKDIR,
    WORKDIR_PATH,
)
from rollcage.server.openenv import STEP_BUDGET_S
from rollcage.server.openenv import OpenCodeEnvironment as Session
from rollcage.server.openenv_sessions import Episodes
from rollcage.server.service import Service
from rollcage.types import HOME, Value


class OpenCodeEnvironment(Session):
    """One session. All sessions of a process share one service, which is opened with the first tool call.

    It keeps its log where `rollcage` does, and ends with the process; rollouts that still run are aborted then.
    """

    def __init__(self, *, budget_s: float = STEP_BUDGET_S) -> None:
        """`budget_s`: how long a step may take where its caller does not say."""
        super().__init__(None, Episodes(), budget_s)

    def step(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        """Call a tool or list the tools, and wait for the answer. For callers without an event loop."""
        return loop().call(partial(self.step_async, action, timeout_s, **more))

    async def step_async(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        """The same, on the caller's own loop. What goes wrong is in the observation; nothing is raised."""
        observed = await super().step_async(action, timeout_s, **more)
        if isinstance(observed, CallToolObservation) and isinstance(observed.result, dict):
            # In process the published environment gives an object; on the wire it is the same.
            text = [TextContent(type="text", text=part["text"]) for part in observed.result["content"]]
            observed.result = CallToolResult(**{**observed.result, "content": text, "meta": None})
        return observed

    async def perform(self, name: str, arguments: object, timeout_s: float | None) -> Value:
        """Call a tool on the loop that all sessions of this process share, from whichever loop."""
        on = await anyio.to_thread.run_sync(loop)
        if on.here:
            return await super().perform(name, arguments, timeout_s)
        call = partial(super().perform, name, arguments, timeout_s)
        return await asyncio.wrap_future(on.portal.start_task_soon(call))

    async def opened(self) -> Service:
        """The service of this process."""
        return await loop().service()


__all__ = [
    "AGENT_LOG",
    "HOME",
    "INSTRUCTION_PATH",
    "PROXY_LOG",
    "REMOTE_REWARD_PATH",
    "REMOTE_TEST_PATH",
    "REWARD_FILE",
    "VERIFY_TIMEOUT_S",
    "WORKDIR",
    "WORKDIR_PATH",
    "OpenCodeEnvironment",
]
