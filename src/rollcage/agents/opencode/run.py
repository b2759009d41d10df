"""The `run` driver: one `opencode run` process for one prompt, which prints its events as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping

import anyio
from anyio.abc import ByteReceiveStream

from rollcage.agents.base import AgentExit, Emit
from rollcage.agents.lines import feed, told
from rollcage.agents.opencode.config import BINARY
from rollcage.agents.opencode.neutral import error_line, event_of
from rollcage.agents.opencode.printed import Printed
from rollcage.events import AgentEmitted
from rollcage.sandboxes.base import Sandbox


async def run(
    box: Sandbox, instruction: str, environment: Mapping[str, str], *, workdir: str, emit: Emit, printed: Printed
) -> AgentExit:
    """`opencode run` with the prompt on stdin, its JSON events into the log as they come."""
    argv = [BINARY, "run", "--format", "json", "--thinking"]
    reader = _StdoutReader(emit)
    async with box.spawn(argv, env=environment, cwd=workdir) as process:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed, process, instruction)  # it waits for the end of its input
            tasks.start_soon(printed.drain, process.stderr)
            await reader.events(process.stdout)
        code = await process.wait()
    return AgentExit(code=code, error=reader.error or (printed.complaint if code else None))


class _StdoutReader:
    """Reads what OpenCode prints."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.error: str | None = None

    async def events(self, stream: ByteReceiveStream) -> None:
        async for line in told(stream, self._emit):
            try:
                data = json.loads(line)
            except (ValueError, RecursionError):
                data = None
            if not isinstance(data, dict):
                data = {"type": "stdout", "text": line.decode("utf-8", "replace")}
            if data.get("type") == "error":
                self.error = error_line(data.get("error"))
            await self._emit(AgentEmitted(event=event_of(data), raw=data))
