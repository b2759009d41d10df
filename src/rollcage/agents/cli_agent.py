"""What agents that are a program have in common: started in the box with the prompt, they print their events.

`NpmAgent` and `PythonAgent` add where the program comes from. A subclass says how it is started and what it prints
means (docs/agents.md shows one being written).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self
from weakref import WeakKeyDictionary

import anyio
from anyio.abc import ByteReceiveStream

from rollcage.agent_events import (
    AgentEvent,
    AgentOutput,
    AgentRaw,
    AgentReportedError,
    AgentText,
    AgentToolCall,
)
from rollcage.agents.base import AgentContext, AgentExit, Emit, ToolWords, takes_only
from rollcage.agents.fields import text
from rollcage.agents.lines import feed, told
from rollcage.errors import UsageError
from rollcage.events import AgentEmitted, AgentStarted
from rollcage.json_safe import DEEPEST, json_safe
from rollcage.sandboxes.base import CapturedOutput, Sandbox, Tail
from rollcage.sandboxes.layers import Layer
from rollcage.types import HOME, AgentSpec, Endpoint, JsonObject

INSTALLED = ".rollcage/agents"
"""Where agents are, below the home directory of a box."""

KEPT = 8000
"""Bytes: the end of what an agent prints to stderr."""
Wire = Literal["chat", "messages", "responses"]
"""The API that an agent speaks to its model: OpenAI's chat completions or responses, or Anthropic's messages."""
Reader = Callable[[JsonObject], Iterable[AgentEvent]]
"""Puts one printed JSON object into neutral words. Made anew for each run, so it may remember."""


class Downloads(NamedTuple):
    """Where what is fetched is kept, and where it comes from."""

    folder: Path
    registry: str = ""
    """npm's registry, for machines without npm."""


def kept_mark(prompt: str) -> str:
    """A prompt for programs that take a byte order mark off what they read: of two, one stays."""
    return f"\ufeff{prompt}" if prompt.startswith("\ufeff") else prompt


class AgentRun(NamedTuple):
    """What an agent is started for."""

    instruction: str
    model: Endpoint
    """Lent by the gateway: `base_url` ends with /v1."""
    tools_url: str
    """An MCP endpoint with the tools of a remote environment; empty where there is none."""
    spec: AgentSpec
    workdir: str

    @property
    def key(self) -> str:
        """The lent key: worth nothing outside this rollout."""
        return self.model.key.get_secret_value()


class Command(NamedTuple):
    """How an agent is started."""

    argv: Sequence[str]
    """Its arguments; the program itself is put before them."""
    env: Mapping[str, str]
    """Its environment; what the job sets is added."""
    stdin: str
    """What it reads: usually the prompt, which no argument could carry beyond 128 kB."""
    files: Mapping[str, str] = {}
    """Texts of files that it finds in its home directory."""


class CliAgent:
    """An agent that is a program: one run of it per rollout."""

    name: str
    """What jobs call it."""
    version: str
    """The exact version that is run."""
    wire: Wire
    """What it speaks to its model."""
    own_paths: Sequence[str] = ()
    """Where below home it keeps its own state: changes there are no news."""
    accepts: ClassVar[frozenset[str]] = frozenset()
    """Fields of `AgentSpec` that it can follow, beside `env`; the others are refused by name."""
    tools: ClassVar[frozenset[str]] = frozenset()
    """Its tools, where it can be told which of them to offer: other names are refused."""
    tool_words: ClassVar[ToolWords | None] = None
    """How a scripted model calls its tools: `rollcage agent check` needs to know."""
    takes_mcp: ClassVar[bool] = False
    """Whether it can be given the tools of a remote environment."""

    def __init__(self, downloads: Downloads) -> None:
        """`downloads`: where its package is kept, and comes from."""
        self.downloads = downloads
        self.pinned = True
        """Whether what is fetched is checked against a hash."""
        self._printed: WeakKeyDictionary[Sandbox, Tail] = WeakKeyDictionary()

    def at_version(self, version: str) -> Self:
        """The same agent in another version, of which no hash is known."""
        other = type(self)(self.downloads)
        if version != self.version:
            other.version, other.pinned = version, False
        return other

    @property
    def home(self) -> str:
        """Where its program is in a box."""
        return f"{HOME}/{INSTALLED}/{self.name}"

    @property
    def program(self) -> Sequence[str]:
        """What starts it: the beginning of its command line."""
        raise NotImplementedError

    def layers(self) -> Sequence[Layer]:
        """What its boxes start with."""
        raise NotImplementedError

    def command(self, run: AgentRun) -> Command:
        """How it is started for this."""
        raise NotImplementedError

    def reader(self) -> Reader:
        """What its printed JSON means."""
        return lambda data: [AgentRaw(name=text(data.get("type")))]

    def complaint_in(self, printed: CapturedOutput) -> str:
        """Why it cannot start or go on, out of what it printed to stderr: the last line."""
        return "".join(printed.text.strip().splitlines()[-1:])

    def check(self, spec: AgentSpec) -> None:
        """Refuse by name what it cannot follow."""
        takes_only(self.name, spec, "env", *self.accepts)
        for field in ("enabled_tools", "disabled_tools"):
            if unknown := sorted(set(getattr(spec, field) or ()) - self.tools):
                known = ", ".join(sorted(self.tools))
                raise UsageError(f"{self.name} has no {', '.join(unknown)}", argument=field, remedy=f"it has {known}")

    async def solve(
        self, box: Sandbox, instruction: str, context: AgentContext, spec: AgentSpec, *, workdir: str, emit: Emit
    ) -> AgentExit:
        """Run its program in the workdir to its end; what it prints goes into the log as it comes."""
        await emit(AgentStarted(agent=self.name, version=self.version))
        command = self.command(AgentRun(instruction, context.model, context.tools_url, spec, workdir))
        for path, content in command.files.items():
            await box.write(f"{HOME}/{path}", content.encode())
        self._printed[box] = complaint = Tail(KEPT)
        printed = _Printed(emit, self.reader())
        env = {"SHELL": "/bin/bash", "TERM": "dumb", **command.env, **spec.env}
        async with box.spawn([*self.program, *command.argv], env=env, cwd=workdir) as process:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(feed, process, command.stdin)
                tasks.start_soon(complaint.drain, process.stderr)
                await printed.read(process.stdout)
            code = await process.wait()
        # Some agents tell of an error at their very end, and leave with 0 all the same.
        code = code or (1 if printed.error else 0)
        complained = self.complaint_in(complaint.output)
        error = (printed.error or complained or printed.last or None) if code else None
        return AgentExit(code=code, error=error, last_words=complained or printed.last)

    async def log_tail(self, box: Sandbox) -> str:
        """The end of what it printed to stderr."""
        printed = self._printed.pop(box, None)
        return "" if printed is None else printed.output.text


class _Printed:
    """Reads what an agent prints: JSON lines are events, anything else is output."""

    def __init__(self, emit: Emit, reader: Reader) -> None:
        self._emit, self._reader = emit, reader
        self._session, self._count = "", 0
        self.error: str | None = None
        """The error that it ended with; one that it went on after does not count."""
        self.last = ""
        """The last thing that it said, or printed beside its events."""

    async def read(self, stream: ByteReceiveStream) -> None:
        async for line in told(stream, self._emit):
            await self._tell(line)

    async def _tell(self, line: bytes) -> None:
        data = _object(line)
        if data is None:
            self.last = line.decode("utf-8", "replace").strip() or self.last
            await self._emit(AgentEmitted(event=AgentOutput(text=line.decode("utf-8", "replace"))))
            return
        raw: JsonObject | None = data
        for said in self._reader(data):
            event = self._placed(said)
            if isinstance(event, AgentReportedError):
                self.error = event.text or event.name or "an error that it does not name"
            elif isinstance(event, AgentText | AgentToolCall):
                self.error = None
                self.last = event.text if isinstance(event, AgentText) else self.last
            await self._emit(AgentEmitted(event=event, raw=raw))
            raw = None  # once is enough

    def _placed(self, event: AgentEvent) -> AgentEvent:
        """In its session, and in a message of its own, where the agent names none."""
        self._count += 1
        self._session = self._session or event.session
        message = event.message or event.id or f"#{self._count:09}"
        return event.model_copy(update={"session": event.session or self._session, "message": message})


def _object(line: bytes) -> JsonObject | None:
    try:
        data = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    # Half a character can only come by an escape, and what is nested too deep has many brackets.
    plain = b"\\ud" not in line.lower() and line.count(b"{") + line.count(b"[") < DEEPEST
    return data if plain else json_safe(data)
