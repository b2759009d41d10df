"""What agents tell of the tools they call: what sort each is, what says most about a call, what it edits. Calls are
remembered until their results come, which do not repeat what was asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from rollcage.agent_events import AgentFileEdit, AgentToolCall
from rollcage.agents.fields import tables, text
from rollcage.types import JsonObject

ToolKind = Literal["execute", "read", "edit", "search", "fetch", "other"]
_TELLING = ("command", "file_path", "filePath", "absolute_path", "pattern", "url", "path", "description", "prompt")
"""Arguments that say what a call is about, the most telling first."""
_MOST_OPEN = 10_000


class RunningCalls:
    """The calls of one run."""

    def __init__(self, kinds: Mapping[str, ToolKind]) -> None:
        """`kinds`: what sort of tool each is."""
        self._kinds = kinds
        self._open: dict[str, AgentToolCall] = {}

    def begun(self, call_id: str, name: str, arguments: JsonObject, **place: str) -> AgentToolCall:
        """A call that runs now. `place`: its session and message, where the agent names them."""
        kind = self._kinds.get(name, "other")
        call = AgentToolCall(
            **place,
            id=call_id,
            call_id=call_id,
            name=name,
            kind=kind,
            title=title_of(arguments),
            arguments=arguments,
            status="running",
            edits=edits_of(arguments) if kind == "edit" else (),
        )
        if len(self._open) < _MOST_OPEN:
            self._open[call_id] = call
        return call

    def ended(
        self, call_id: str, said: str, *, failed: bool = False, exit_code: int | None = None
    ) -> Iterable[AgentToolCall]:
        """The call with what came of it; nothing where nobody has heard of it."""
        if call := self._open.pop(call_id, None):
            outcome = {"status": "error", "error": said} if failed else {"status": "completed", "result": said}
            yield call.model_copy(update={**outcome, "exit_code": exit_code})

    def rest(self) -> Iterable[AgentToolCall]:
        """Those whose results never come, since they end the agent's work."""
        for call_id in list(self._open):
            yield from self.ended(call_id, "")


def title_of(arguments: JsonObject) -> str:
    """The argument that says most about a call."""
    return next((value for key in _TELLING if isinstance(value := arguments.get(key), str) and value), "")


def edits_of(arguments: JsonObject) -> tuple[AgentFileEdit, ...]:
    """What a tool that edits files is told to do."""
    path = text(arguments.get("file_path") or arguments.get("filePath") or arguments.get("path"))
    if pieces := tables(arguments.get("edits")):
        return tuple(edit for piece in pieces for edit in edits_of({"path": path, **piece}))
    old, new = (_first(arguments, f"{word}_string", f"{word}String", f"{word}Text") for word in ("old", "new"))
    if old or new:
        return (AgentFileEdit(path=path, removed=old, added=new),)
    content = text(arguments.get("content"))
    return (AgentFileEdit(path=path, change="write", added=content),) if content else ()


def _first(arguments: JsonObject, *names: str) -> str:
    return next((said for name in names if (said := text(arguments.get(name)))), "")
