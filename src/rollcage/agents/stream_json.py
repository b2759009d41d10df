"""The events of Claude Code and of what took after it (`--output-format stream-json`), in neutral words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from rollcage.agent_events import (
    AgentEvent,
    AgentFileEdit,
    AgentRaw,
    AgentReasoning,
    AgentReportedError,
    AgentSession,
    AgentText,
    AgentToolCall,
    AgentUsage,
)
from rollcage.agents.fields import count, table, tables, text
from rollcage.types import JsonObject

ToolKind = Literal["execute", "read", "edit", "search", "fetch", "other"]
_TELLING = ("command", "file_path", "absolute_path", "path", "pattern", "url", "description", "prompt")
"""Arguments that say what a call is about, the most telling first."""


class StreamJson:
    """Remembers calls until their results come: those are told in messages of their own."""

    def __init__(self, kinds: Mapping[str, ToolKind]) -> None:
        """`kinds`: what sort of tool each is."""
        self._kinds = kinds
        self._calls: dict[str, AgentToolCall] = {}
        self._sessions: set[str] = set()

    def __call__(self, data: JsonObject) -> Iterable[AgentEvent]:
        """One printed object."""
        main = text(data.get("session_id"))[:200]
        parent = text(data.get("parent_tool_use_id"))[:200]
        session = parent or main  # a subagent is known by the call that started it
        message = table(data.get("message"))
        place = {"session": session, "message": text(message.get("id") or data.get("uuid"))}
        match kind := text(data.get("type")):
            case "system" if data.get("subtype") == "init":
                yield AgentSession(session=main)
            case "assistant":
                if parent and parent not in self._sessions:
                    self._sessions.add(parent)
                    yield AgentSession(session=parent, parent=main)
                yield from self._said(place, message)
            case "user":
                yield from self._results(message)
            case "result":
                yield from _result(place, data)
            case _:
                yield AgentRaw(**place, name=kind)

    def _said(self, place: dict[str, str], message: JsonObject) -> Iterable[AgentEvent]:
        for number, block in enumerate(tables(message.get("content"))):
            match text(block.get("type")):
                case "text":
                    yield AgentText(**place, text=text(block.get("text")))
                case "thinking":
                    yield AgentReasoning(**place, text=text(block.get("thinking")))
                case "tool_use":
                    yield self._call(place, block)
                case other:
                    yield AgentRaw(**place, id=f"{other}-{number}", name=other)

    def _call(self, place: dict[str, str], block: JsonObject) -> AgentToolCall:
        arguments, name, call_id = table(block.get("input")), text(block.get("name")), text(block.get("id"))
        call = AgentToolCall(
            **place,
            id=call_id,
            call_id=call_id,
            name=name,
            kind=self._kinds.get(name, "other"),
            title=title_of(arguments),
            arguments=arguments,
            status="running",
            edits=edits_of(arguments) if self._kinds.get(name) == "edit" else (),
        )
        if len(self._calls) < 10_000:
            self._calls[call_id] = call
        return call

    def _results(self, message: JsonObject) -> Iterable[AgentEvent]:
        for block in tables(message.get("content")):
            call = self._calls.pop(text(block.get("tool_use_id")), None)
            if block.get("type") == "tool_result" and call is not None:
                said, failed = _words(block.get("content")), block.get("is_error") is True
                news = {"status": "error", "error": said} if failed else {"status": "completed", "result": said}
                yield call.model_copy(update=news)


def _words(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(text(part.get("text")) for part in tables(content) if part.get("type") == "text")
    return text(content)


def title_of(arguments: JsonObject) -> str:
    """The argument that says most about a call."""
    return next((value for key in _TELLING if isinstance(value := arguments.get(key), str) and value), "")


def edits_of(arguments: JsonObject) -> tuple[AgentFileEdit, ...]:
    """What a tool that edits files is told to do."""
    path = text(arguments.get("file_path") or arguments.get("path"))
    if pieces := tables(arguments.get("edits")):
        return tuple(edit for piece in pieces for edit in edits_of({"path": path, **piece}))
    old, new = (text(arguments.get(f"{word}_string") or arguments.get(f"{word}Text")) for word in ("old", "new"))
    if old or new:
        return (AgentFileEdit(path=path, removed=old, added=new),)
    content = text(arguments.get("content"))
    return (AgentFileEdit(path=path, change="write", added=content),) if content else ()


def _result(place: dict[str, str], data: JsonObject) -> Iterable[AgentEvent]:
    usage = table(data.get("usage"))
    yield AgentUsage(
        **place,
        input_tokens=count(usage.get("input_tokens")),
        output_tokens=count(usage.get("output_tokens")),
        cached_tokens=count(usage.get("cache_read_input_tokens")),
        finish_reason=text(data.get("subtype")),
    )
    if data.get("is_error") is True:
        said = text(data.get("result")) or text(table(data.get("error")).get("message"))
        yield AgentReportedError(**place, name=text(data.get("subtype")), text=said)
