"""OpenCode: how it is installed, configured, started and read. No egress but to its model.

Two drivers: `run` is one process for one prompt that prints its events; `serve` is OpenCode's own server, driven over
HTTP, with a live transcript and an abort that stops generation at once (docs/agents.md).
"""

from __future__ import annotations

import json
import platform
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
from anyio.abc import TaskStatus

from rollcage.agents.base import AgentContext, AgentExit, Emit, ToolWords
from rollcage.agents.cli_agent import AgentRun, CliAgent, Command, Downloads, Reader, kept_mark
from rollcage.agents.lines import MAX_EVENTS
from rollcage.agents.opencode.config import (
    BINARY,
    EDIT_TOOLS,
    PROVIDER,
    TOOLS,
    config_of,
    environment_of,
    permissions_of,
)
from rollcage.agents.opencode.neutral import complaint_in, event_of
from rollcage.agents.opencode.package import cpu_flags, layer_of, package_for
from rollcage.agents.opencode.purpose import origin
from rollcage.agents.opencode.serve import Server, ServeSession
from rollcage.agents.opencode.transcript import messages_of
from rollcage.errors import UsageError
from rollcage.events import AgentStarted
from rollcage.sandboxes.base import Sandbox
from rollcage.sandboxes.layers import Layer
from rollcage.types import HOME, AgentSpec, JsonObject, ScriptedCall

DRIVERS = ("run", "serve")
DRIVER = "run"
"""The one that is used where nobody says (bench/drivers.py has the numbers)."""
MOST_CONFIG = 120_000
"""Bytes of configuration for `run`, which takes it in one variable: the kernel allows 128 kB, some of which is ours."""


class OpenCode(CliAgent):
    """The agent `opencode`. Exit code 0: it ended by itself; 1: its model failed, or its configuration is wrong."""

    name = "opencode"
    wire = "chat"
    program = (BINARY,)
    own_paths = tuple(
        f"{HOME}/{path}"
        for path in (
            ".rollcage/bin",
            ".rollcage/opencode.json",
            ".config/opencode",
            ".cache/opencode",
            ".local/share/opencode",
            ".local/state/opencode",
        )
    )
    accepts = frozenset(("driver", "system_prompt", "enabled_tools", "disabled_tools", "config"))
    tools = TOOLS
    takes_mcp = True
    tool_words = ToolWords(
        run=lambda command: ScriptedCall(name="bash", arguments={"command": command, "description": "do it"}),
        edit=lambda path, text: ScriptedCall(name="write", arguments={"filePath": path, "content": text}),
        delegate=lambda prompt: ScriptedCall(
            name="task", arguments={"description": "look", "prompt": prompt, "subagent_type": "general"}
        ),
        spare=tuple(sorted(EDIT_TOOLS)),
    )
    origin = staticmethod(origin)
    complaint_in = staticmethod(complaint_in)

    def __init__(self, downloads: Downloads) -> None:
        """`downloads`: where its package is kept, and comes from."""
        super().__init__(downloads)
        self._warm: dict[str, Server] = {}
        self._package = package_for(platform.machine(), cpu_flags())
        self.version = self._package.version

    def check(self, spec: AgentSpec) -> None:
        """Drivers and tools it does not have, or tools it cannot offer one without the other."""
        super().check(spec)
        if spec.driver not in ("", *DRIVERS):
            raise UsageError(f"no {spec.driver!r}: OpenCode has {' and '.join(DRIVERS)}", argument="driver")
        permissions_of(spec)
        size = len(json.dumps([spec.system_prompt, spec.config]))
        if (spec.driver or DRIVER) == "run" and size > MOST_CONFIG:
            most = MOST_CONFIG // 1000
            what = f"OpenCode takes {most} kB of system prompt and configuration in all, and this is {size // 1000}"
            raise UsageError(what, argument="system_prompt", remedy='with driver = "serve" it may be longer')

    def layers(self) -> Sequence[Layer]:
        """One layer: the binary, ripgrep (its search tools need it), and a seeded configuration."""
        package = self._package if self.pinned else self._package._replace(version=self.version, sha512="")
        return [layer_of(package, self.downloads)]

    def command(self, run: AgentRun) -> Command:
        """`opencode run` with the prompt on stdin: as an argument it would be quoted."""
        environment = environment_of(config_of(run.spec, run.model, run.tools_url))
        return Command(["run", "--format", "json", "--thinking"], environment, kept_mark(run.instruction))

    def reader(self) -> Reader:
        """Its events: those of `transcript.py`."""
        return lambda data: [event_of(data)]

    async def solve(
        self, box: Sandbox, instruction: str, context: AgentContext, spec: AgentSpec, *, workdir: str, emit: Emit
    ) -> AgentExit:
        """Work on the instruction with the driver that was asked for; a warm server is used where there is one."""
        async with self._warmth(box, spec) as warm:
            if warm is None and (spec.driver or DRIVER) == "run":
                return await super().solve(box, instruction, context, spec, workdir=workdir, emit=emit)
            await emit(AgentStarted(agent=self.name, version=self.version))
            prompt = {
                "model": {"providerID": PROVIDER, "modelID": context.model.model},
                "agent": "build",
                "parts": [{"type": "text", "text": instruction}],
            }
            async with AsyncExitStack() as stack:
                server = warm
                if server is None:
                    cold = Server.start(box, BINARY, environment_of() | spec.env)
                    server = await stack.enter_async_context(cold)
                self._printed[box] = server.printed
                if server.code is not None:
                    return AgentExit(code=server.code or 1, error=server.complaint or "its server did not start")
                config = config_of(spec, context.model, context.tools_url)
                return await ServeSession(server, workdir, emit, limit=MAX_EVENTS).solve(config, prompt)

    async def warm(self, box: Sandbox, *, task_status: TaskStatus[Server]) -> None:
        """Start a server in a box for whatever `solve` comes next there; returns when it is used up, or dead.

        It knows neither the task nor the model nor the configuration yet.
        """
        async with Server.start(box, BINARY, environment_of()) as server:
            self._warm[box.id] = server
            try:
                task_status.started(server)
                await server.used_up()
            finally:
                self._warm.pop(box.id, None)

    @asynccontextmanager
    async def _warmth(self, box: Sandbox, spec: AgentSpec) -> AsyncIterator[Server | None]:
        """The warm server of a box, where there is one that fits; it is dead at the end of the block at the latest."""
        server = self._warm.pop(box.id, None)
        if server is None:
            yield None
            return
        try:
            fits = server.alive and not spec.env and spec.driver != "run"
            if not fits:
                await server.stop()
            yield server if fits else None
        finally:
            with anyio.CancelScope(shield=True):
                await server.stop()

    def transcript(self, raw: Iterable[JsonObject], instruction: str) -> list[JsonObject]:
        """Its transcript, as its own server has it: `[{info, parts}]`."""
        return messages_of(raw, instruction)
