"""A remote environment for agents that work in no box: its tools act in a box of its own, so they too have work."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rollcage.agents.base import ToolWords
from rollcage.environments.base import Environment
from rollcage.mcp.convert import Union
from rollcage.mcp.errors import ToolNotFound
from rollcage.mcp.types import ListToolsAction, ToolResult
from rollcage.sandboxes.base import Provider, Sandbox, sh
from rollcage.types import SandboxSpec, ScriptedCall, Task

ADDRESS = "conformance:box"
TOOL_WORDS = ToolWords(
    run=lambda command: ScriptedCall(name="run", arguments={"command": command}),
    spare=("look",),
)
_COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
_TOOLS = (
    {"name": "run", "description": "Runs a command.", "inputSchema": _COMMAND},
    {"name": "look", "description": "Lists the files.", "inputSchema": {"type": "object", "properties": {}}},
)


class BoxEnvironments:
    """Opens one for each rollout."""

    secrets: tuple[str, ...] = ()

    def __init__(self, provider: Provider, spec: SandboxSpec, workdir: str, verify: str) -> None:
        """`verify`: the command that decides what the agent has earned."""
        self._provider, self._spec, self._workdir, self._verify = provider, spec, workdir, verify

    def check(self, place: str, task: Task) -> None:
        """There is one place, and every task fits."""

    @asynccontextmanager
    async def open(self, place: str) -> AsyncIterator[Environment]:
        """A new box behind two tools."""
        async with self._provider.open(self._spec) as box:
            yield _BoxEnvironment(box, self._workdir, self._verify)


class _BoxEnvironment:
    """The environment, and its tools."""

    name = "conformance"

    def __init__(self, box: Sandbox, workdir: str, verify: str) -> None:
        self._box, self._workdir, self._verify = box, workdir, verify
        self.instance_id, self.tools = box.id, self

    async def reset(self, seed: int | None) -> None:
        """Its workdir is there."""
        await sh(self._box, f"mkdir -p {self._workdir}")

    async def reward(self, task: Task) -> float | None:
        """1 where the verifying command ends well."""
        return float((await sh(self._box, self._verify, cwd=self._workdir)).code == 0)

    async def list_tools(self) -> ListToolsAction:
        """Both."""
        union = Union("first")
        union.add("box", _TOOLS)
        offered = list(union.tools.values())
        return ListToolsAction(tools=[tool.openai for tool in offered], offered=offered)

    async def call_tool(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        """Run what is asked for, in the box."""
        commands = {"run": str((arguments or {}).get("command")), "look": "ls"}
        if name not in commands:
            raise ToolNotFound(f"there is no tool {name!r}")
        ended = await sh(self._box, commands[name], cwd=self._workdir)
        said = ended.stdout.text + ended.stderr.text
        return ToolResult(tool=name, endpoint="box", content=[{"type": "text", "text": said}], is_error=ended.code != 0)
