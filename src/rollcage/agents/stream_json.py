"""The events of Claude Code and of what took after it (`--output-format stream-json`), in neutral words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rollcage.agent_events import (
    AgentEvent,
    AgentRaw,
    AgentReasoning,
    AgentReportedError,
    AgentSession,
    AgentText,
    AgentUsage,
)
from rollcage.agents.fields import count, table, tables, text
from rollcage.agents.tool_calls import RunningCalls, ToolKind
from rollcage.types import JsonObject


class StreamJson:
    """Results of calls are told in messages of their own."""

    def __init__(self, kinds: Mapping[str, ToolKind]) -> None:
        """`kinds`: what sort of tool each is."""
        self._calls = RunningCalls(kinds)
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
                    arguments, name = table(block.get("input")), text(block.get("name"))
                    yield self._calls.begun(text(block.get("id")), name, arguments, **place)
                case other:
                    yield AgentRaw(**place, id=f"{other}-{number}", name=other)

    def _results(self, message: JsonObject) -> Iterable[AgentEvent]:
        for block in tables(message.get("content")):
            if block.get("type") == "tool_result":
                said, failed = _words(block.get("content")), block.get("is_error") is True
                yield from self._calls.ended(text(block.get("tool_use_id")), said, failed=failed)


def _words(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(text(part.get("text")) for part in tables(content) if part.get("type") == "text")
    return text(content)


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
