"""OpenCode's transcript, folded from what it said: `[{info, parts}]`, the shape of `GET /session/:id/message`. Pure.

Both drivers log in one vocabulary. From `opencode run --format json`: `step_start`, `text`, `reasoning`, `tool_use`,
`step_finish` (each a finished part) and `error`. The `serve` driver adds what only a server tells: `session` (its id,
at the start), `message` (a message's info), `part` (a part that is not finished, or the user's), `delta` (text that was
added to a part).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollcage.types import JsonObject

FINISHED = {
    "step-start": "step_start",
    "text": "text",
    "reasoning": "reasoning",
    "tool": "tool_use",
    "step-finish": "step_finish",
}
"""What a finished part of each type is logged as."""


def session_of(said: Iterable[JsonObject]) -> str:
    """The id of the agent's own session; empty where it has not said one yet."""
    return next((_text(data.get("sessionID")) for data in said if data.get("sessionID")), "")


def messages_of(said: Iterable[JsonObject], instruction: str = "") -> list[JsonObject]:
    """The transcript so far. `instruction` stands for the user's message where the agent did not repeat it (`run`)."""
    transcript = Transcript()
    for data in said:
        transcript.add(data)
    return transcript.messages(instruction)


class Transcript:
    """A transcript that grows with what the agent says. Never trusts the shape of it."""

    def __init__(self) -> None:
        self.session = ""
        self._infos: dict[str, JsonObject] = {}
        self._parts: dict[str, dict[str, JsonObject]] = {}

    def add(self, data: JsonObject) -> None:
        """Take in one event."""
        session = _text(data.get("sessionID"))
        self.session = self.session or session
        if session != self.session:
            return
        kind = data.get("type")
        if kind == "message":
            self._inform(_table(data.get("info")))
        elif kind == "delta":
            self._append(data)
        elif part := _table(data.get("part")):
            self._put(part, data)

    def messages(self, instruction: str = "") -> list[JsonObject]:
        """The transcript so far, oldest message first; a copy."""
        rows: list[JsonObject] = []
        if instruction and not any(info.get("role") == "user" for info in self._infos.values()):
            info = {"id": "", "sessionID": self.session, "role": "user"}
            rows.append({"info": info, "parts": [{"type": "text", "text": instruction, "sessionID": self.session}]})
        # The ids of OpenCode ascend with time; what comes out of a box may have any order.
        for name in sorted(self._infos):
            parts = self._parts.get(name, {})
            rows.append({"info": dict(self._infos[name]), "parts": [dict(parts[part]) for part in sorted(parts)]})
        return rows

    def _inform(self, info: JsonObject) -> None:
        if name := _text(info.get("id")):
            self._infos[name] = info

    def _put(self, part: JsonObject, data: JsonObject) -> None:
        message, name = _text(part.get("messageID")), _text(part.get("id"))
        info = self._infos.get(message)
        if info is None:
            created = data.get("timestamp")
            info = {"id": message, "sessionID": self.session, "role": "assistant", "time": {"created": created}}
            self._infos[message] = info
        if part.get("type") == "step-finish" and "finish" not in info:
            completed = {**_table(info.get("time")), "completed": data.get("timestamp")}
            more = {"finish": part.get("reason"), "tokens": part.get("tokens"), "time": completed}
            self._infos[message] = {**info, **more}
        self._parts.setdefault(message, {})[name] = part

    def _append(self, data: JsonObject) -> None:
        parts = self._parts.get(_text(data.get("messageID")), {})
        name, field = _text(data.get("partID")), _text(data.get("field"))
        if name in parts:
            parts[name] = {**parts[name], field: _text(parts[name].get(field)) + _text(data.get("text"))}


def _table(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
