"""A lean agent in the box: one tool, bash, and a prompt of a few lines. For small models, demos and tests.

Its history is honest: every message of the model goes back to it as it came, thoughts included.
"""

from __future__ import annotations

import json
import secrets
from importlib import resources

import anyio
from anyio.abc import ByteReceiveStream
from pydantic import Field, ValidationError

from rollcage.agent_events import AGENT_EVENT, AgentEvent, AgentOutput, AgentReportedError
from rollcage.agents.base import AgentContext, AgentExit, BareAgent, Emit, ToolWords
from rollcage.agents.lines import feed, told
from rollcage.errors import AgentError, UsageError
from rollcage.events import AgentEmitted, AgentStarted
from rollcage.json_safe import json_safe
from rollcage.sandboxes.base import Sandbox, Tail
from rollcage.types import AgentSpec, JsonObject, ScriptedCall, Value

SYSTEM_PROMPT = """\
You work on a task in a Linux box, with one tool: bash. Each command runs in a new shell in the working folder.
Work step by step and look at what the commands print. When the task is done, answer in words and call no tool."""
NO_PYTHON = 91
_START = f'command -v python3 >/dev/null || exit {NO_PYTHON}; exec python3 -I -c "$0"'


class MiniConfig(Value):
    """What `AgentSpec.config` may set."""

    command_timeout_s: float = Field(default=120, gt=0)
    """How long one command may take."""
    output_limit: int = Field(default=16_000, ge=200, le=1 << 20)
    """Bytes of a command's output that the model is shown: its beginning and its end."""


class Mini(BareAgent):
    """The agent `mini`. It needs python3 in its box, and nothing else."""

    name = "mini"
    wire = "chat"
    takes_mcp = False
    accepts = ("system_prompt", "env", "config")
    tool_words = ToolWords(run=lambda command: ScriptedCall(name="bash", arguments={"command": command}))

    def check(self, spec: AgentSpec) -> None:
        """Its configuration bounds its commands."""
        super().check(spec)
        _config(spec)

    async def solve(
        self, box: Sandbox, instruction: str, context: AgentContext, spec: AgentSpec, *, workdir: str, emit: Emit
    ) -> AgentExit:
        """Run its program in the workdir until the model calls no more tools, or a call to it fails."""
        await emit(AgentStarted(agent=self.name, version=self.version))
        reader, complaint = _EventReader(emit), Tail(8000)
        async with box.spawn(["sh", "-c", _START, _program()], env=spec.env, cwd=workdir) as process:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(feed, process, json.dumps(_orders(instruction, context, spec)))
                tasks.start_soon(complaint.drain, process.stderr)
                await reader.read(process.stdout)
            code = await process.wait()
        said = complaint.output.text.strip().splitlines()[-1:]
        if not reader.started:
            raise _not_started(code, said)
        return AgentExit(code=code, error=reader.error or (said[0] if code and said else None))


class _EventReader:
    """Reads what the program prints. Whatever is in the box could print there: what is no event is output."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.started = False
        self.error: str | None = None

    async def read(self, stream: ByteReceiveStream) -> None:
        async for line in told(stream, self._emit):
            await self._tell(_event(line))

    async def _tell(self, event: AgentEvent) -> None:
        self.started = self.started or not isinstance(event, AgentOutput)
        if isinstance(event, AgentReportedError):
            self.error = event.text
        await self._emit(AgentEmitted(event=event))


def _event(line: bytes) -> AgentEvent:
    try:
        return AGENT_EVENT.validate_python(json_safe(json.loads(line)))
    except (ValueError, RecursionError):
        return AgentOutput(text=line.decode("utf-8", "replace"))


def _program() -> str:
    return resources.files(__package__).joinpath("inside.py").read_text(encoding="utf-8")


def _orders(instruction: str, context: AgentContext, spec: AgentSpec) -> JsonObject:
    prompt = {"role": "system", "content": spec.system_prompt or SYSTEM_PROMPT}
    model = context.model
    return {
        "base_url": model.base_url,
        "key": model.key.get_secret_value(),
        "model": model.model,
        "session": f"ses_{secrets.token_hex(8)}",
        "messages": [prompt, {"role": "user", "content": instruction}],
        **_config(spec).model_dump(),
    }


def _config(spec: AgentSpec) -> MiniConfig:
    try:
        return MiniConfig.model_validate(spec.config)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        known = ", ".join(MiniConfig.model_fields)
        raise UsageError(f"config {where}: {problem['msg']}", argument="agent", remedy=f"known are {known}") from None


def _not_started(code: int, said: list[str]) -> AgentError:
    if code == NO_PYTHON:
        return AgentError("the agent mini needs python3, which this box lacks", remedy="choose an image that has it")
    return AgentError(f"python3 of this box did not start mini (exit code {code}): {''.join(said)}".rstrip(": "))
