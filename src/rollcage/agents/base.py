"""What an agent is: what its box must contain, and how it works on an instruction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from rollcage.errors import UsageError
from rollcage.events import AgentEmitted, AgentStarted
from rollcage.sandboxes.base import Sandbox
from rollcage.sandboxes.layers import Layer
from rollcage.types import AgentSpec, CallOrigin, Endpoint, JsonObject, ScriptedCall, Task

Emit = Callable[[AgentStarted | AgentEmitted], Awaitable[object]]
"""Puts what the agent says and does into the log, as it comes."""


def takes_only(agent: str, spec: AgentSpec, *accepted: str) -> None:
    """Refuse by its name whatever else of its configuration is set."""
    for field, known in AgentSpec.model_fields.items():
        if field not in ("name", *accepted) and getattr(spec, field) != known.default:
            can = ", ".join(sorted(accepted)) or "none"
            raise UsageError(f"{agent} cannot be given one", argument=field, remedy=f"it takes {can}")


def one_version(agent: Agent) -> UsageError:
    """Why it cannot be had in another version."""
    return UsageError(
        f"{agent.name} has one version, {agent.version}", argument="agent", remedy=f"name it: {agent.name}"
    )


class AgentContext(NamedTuple):
    """What an agent is given to work with: addresses in its box, served by this process."""

    model: Endpoint
    """Its model: lent by the gateway, with a key that is worth nothing elsewhere."""
    tools_url: str = ""
    """An MCP endpoint with the tools of a remote environment; empty where there is none. It needs no key."""


class AgentExit(NamedTuple):
    """How an agent ended by itself."""

    code: int
    """Its exit code."""
    error: str | None
    """The last error it spoke of, in one line."""
    last_words: str = ""
    """The last thing it printed, whatever it is."""


class ToolWords(NamedTuple):
    """How a model calls an agent's tools: for models that play a script."""

    run: Callable[[str], ScriptedCall]
    """Runs a command."""
    edit: Callable[[str, str], ScriptedCall] | None = None
    """Writes a file, by its whole path, with the agent's own tool for that; None where it has none."""
    delegate: Callable[[str], ScriptedCall] | None = None
    """Hands a prompt to a subagent; None where it has none."""
    submit: str = ""
    """The command that ends its work, where it does not simply stop calling tools."""
    spare: tuple[str, ...] = ()
    """Tools that can be left out, all together; empty: that of `edit`."""


class Agent(Protocol):
    """One agent CLI: how to install, configure, start it and read its events."""

    @property
    def name(self) -> str:
        """`opencode`, ..."""

    @property
    def version(self) -> str:
        """The exact version that is run."""

    @property
    def own_paths(self) -> Sequence[str]:
        """Where below home it keeps its own state: changes there are no news."""

    def check(self, spec: AgentSpec) -> None:
        """Raise UsageError for a configuration it cannot follow, before anything is started."""

    def layers(self) -> Sequence[Layer]:
        """What its boxes start with."""

    async def solve(
        self, box: Sandbox, instruction: str, context: AgentContext, spec: AgentSpec, *, workdir: str, emit: Emit
    ) -> AgentExit:
        """Work on the instruction until the agent ends by itself. Cancelled when its time is up."""

    async def log_tail(self, box: Sandbox) -> str:
        """The end of the agent's own log, read when its processes are dead; empty where it kept none."""


class BareAgent:
    """An agent of our own: nothing is installed in its box, it has no state there, and it keeps no log."""

    name: str
    version = "1"
    own_paths: Sequence[str] = ()
    accepts: tuple[str, ...] = ()
    """What of `AgentSpec` it can be given."""

    def check(self, spec: AgentSpec) -> None:
        """Whatever else is set is refused by its name."""
        takes_only(self.name, spec, *self.accepts)

    def layers(self) -> Sequence[Layer]:
        """None."""
        return ()

    async def log_tail(self, box: Sandbox) -> str:
        """It keeps no log."""
        return ""


@runtime_checkable
class InProcess(Protocol):
    """An agent that is no program: it works in this process, on a remote environment's tools, and gets no box."""

    in_process: bool


@runtime_checkable
class TakesTools(Protocol):
    """An agent that says whether it can be given the tools of a remote environment; those that do not say can."""

    takes_mcp: bool


@runtime_checkable
class AsksNoModel(Protocol):
    """An agent that works without a model; it may be lent one all the same."""

    asks_no_model: bool


@runtime_checkable
class RunsScript(Protocol):
    """An agent whose work is commands that its task names; one that asks no model and has none does nothing."""

    script_field: str
    """The field of `Task` that they are in."""


@runtime_checkable
class TaskBound(Protocol):
    """An agent that works by something of the task's that agents are not shown, such as its reference solution."""

    def bound_to(self, task: Task) -> Agent:
        """The agent for this task; UsageError where the task lacks what it needs."""


@runtime_checkable
class ClassifiesCalls(Protocol):
    """An agent that can tell what it makes each of its model calls for."""

    def origin(self, headers: Mapping[str, str], body: JsonObject) -> CallOrigin:
        """By the call's headers (names in lower case) and its body (as one of chat completions)."""


@runtime_checkable
class Scriptable(Protocol):
    """An agent whose tools a scripted model can call."""

    tool_words: ToolWords


@runtime_checkable
class Versioned(Protocol):
    """An agent that is there in other versions than the one that is run where none is named."""

    pinned: bool
    """Whether what is fetched is checked against a hash."""

    def at_version(self, version: str) -> Agent:
        """The same agent in another version, of which no hash is known; UsageError where it has none."""


@runtime_checkable
class HasTranscript(Protocol):
    """An agent with a transcript of its own shape; that of the others is made from their neutral events."""

    def transcript(self, raw: Iterable[JsonObject], instruction: str) -> list[JsonObject]:
        """`[{info, parts}]`, oldest first, from its own events (`AgentEmitted.raw`); pure."""
