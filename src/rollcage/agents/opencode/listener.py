"""Turns the events of OpenCode's server into the log: each finished part once, unfinished ones now and then."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio

from rollcage.agents.base import Emit
from rollcage.agents.opencode import http as opencode_http
from rollcage.agents.opencode.neutral import error_line, event_of
from rollcage.agents.opencode.transcript import FINISHED
from rollcage.events import AgentEmitted
from rollcage.types import JsonObject

EVERY_S = 0.5
"""How often text that is still being written goes into the log."""
MAX_HELD = 32
"""How many parts may be unfinished at once; nobody writes more."""
MAX_HELD_BYTES = 256 << 10
"""An unfinished part larger than this is not held; it is in the log once it is finished."""
MAX_ERROR = 2000


@dataclass
class _Tool:
    """A tool that runs, and when it is to be looked at next."""

    part: JsonObject
    due: float = 0.0
    wait: float = EVERY_S


class Listener:
    """What the log has heard of one session, and what it has not yet.

    The log grows with what is said, not with how often it is repeated: text goes in as what was added, and a tool that
    runs on is looked at in intervals that double.
    """

    def __init__(self, session: str, emit: Emit, limit: int) -> None:
        """`limit`: bytes that may go into the log; a runaway cannot fill the disk."""
        self._session, self._emit, self._left = session, emit, limit
        self._lock = anyio.Lock()
        self._users: set[str] = set()
        self._texts: dict[str, JsonObject] = {}
        self._added: dict[str, list[str]] = {}
        self._tools: dict[str, _Tool] = {}
        self._seen: dict[str, bytes] = {}
        self._noted: set[str] = set()
        self.stream_limit_reached = False
        """No more events are heard: whether the session is over must be asked for."""
        self.idle = anyio.Event()
        """The session has nothing more to do."""
        self.error: str | None = None
        """The last error of the session, in one line."""

    async def begin(self) -> None:
        """The session exists."""
        await self._put({"type": "session"})

    async def hear(self, event: JsonObject) -> None:
        """Take in one event of the server."""
        match event.get("type"):
            case opencode_http.SKIPPED:
                await self.note(f"an event of more than {opencode_http.MAX_EVENT >> 20} MB was left out")
            case opencode_http.STREAM_LIMIT:
                self.stream_limit_reached = True
                await self.note(f"more than {opencode_http.MAX_STREAM >> 20} MB of events; the rest was left out")
        properties = _table(event.get("properties"))
        if properties.get("sessionID") != self._session:
            return
        # Whoever nests things so deeply that they can be read but not written is no server of OpenCode's.
        with suppress(RecursionError):
            await self._take(event.get("type"), properties)

    async def _take(self, kind: object, properties: JsonObject) -> None:
        async with self._lock:
            match kind:
                case "session.idle":
                    self.idle.set()
                case _ if self._left < 0:
                    return
                case "message.updated":
                    await self._message(_table(properties.get("info")))
                case "message.part.updated":
                    await self._part(_table(properties.get("part")))
                case "message.part.delta":
                    self._delta(properties)
                case "session.error":
                    await self._failed(properties.get("error"))
                case _:
                    pass

    async def note(self, text: str) -> None:
        """Say once in the log that something is not in it."""
        if text not in self._noted:
            self._noted.add(text)
            await self._put({"type": "note", "text": text})

    async def tell(self) -> None:
        """Every now and then, log what is still being written. Runs until cancelled."""
        while True:
            await anyio.sleep(EVERY_S)
            with suppress(RecursionError):
                async with self._lock:
                    await self._flush()

    async def settle(self, messages: Any) -> None:
        """Log what differs from the server's own final word."""
        async with self._lock:
            for message in messages if isinstance(messages, list) else ():
                with suppress(RecursionError):
                    await self._settle(_table(message))

    async def _settle(self, message: JsonObject) -> None:
        await self._message(_table(message.get("info")))
        parts = message.get("parts")
        for part in parts if isinstance(parts, list) else ():
            await self._log(_table(part))

    async def _message(self, info: JsonObject) -> None:
        name = str(info.get("id", ""))
        if info.get("role") == "user":
            self._users.add(name)
        if self._news(name, info):
            await self._put({"type": "message", "info": info})

    async def _part(self, part: JsonObject) -> None:
        name, kind = str(part.get("id", "")), part.get("type")
        if _finished(part) or self._of_user(part):
            self._texts.pop(name, None)
            self._added.pop(name, None)
            self._tools.pop(name, None)
            await self._log(part)
        elif kind in ("text", "reasoning"):
            # The text so far is in the part; what was added before is in it already.
            self._added.pop(name, None)
            if len(self._texts) < MAX_HELD and _small(part):
                self._texts[name] = part
        elif kind == "tool" and _table(part.get("state")).get("status") == "running":
            if len(self._tools) < MAX_HELD and _small(part):
                self._tools.setdefault(name, _Tool(part)).part = part
                await self._look(name)
        elif kind != "tool":
            await self._log(part)

    def _delta(self, properties: JsonObject) -> None:
        name, text = str(properties.get("partID", "")), properties.get("delta")
        if name in self._texts and properties.get("field") == "text" and isinstance(text, str):
            self._added.setdefault(name, []).append(text)

    async def _flush(self) -> None:
        for name, part in list(self._texts.items()):
            added = "".join(self._added.pop(name, ()))
            if name not in self._seen:
                text = f"{part.get('text') or ''}{added}"
                if text:
                    await self._log({**part, "text": text})
            elif added:
                message = part.get("messageID")
                await self._put({"type": "delta", "messageID": message, "partID": name, "field": "text", "text": added})
        for name in list(self._tools):
            await self._look(name)

    async def _look(self, name: str) -> None:
        tool, now = self._tools[name], time.monotonic()
        if tool.due <= now and self._seen.get(name) != _digest(tool.part):
            tool.due, tool.wait = now + tool.wait, tool.wait * 2
            await self._log(tool.part)

    async def _log(self, part: JsonObject) -> None:
        name = str(part.get("id", ""))
        if not self._news(name, part):
            return
        done = _finished(part) and not self._of_user(part)
        await self._put({"type": FINISHED.get(str(part.get("type")), "part") if done else "part", "part": part})

    def _news(self, name: str, value: JsonObject) -> bool:
        """Whether this is not what was logged last under that name; from now on it is."""
        # Not the value itself: a hostile one can take hundreds of megabytes.
        before, self._seen[name] = self._seen.get(name), _digest(value)
        return before != self._seen[name]

    def _of_user(self, part: JsonObject) -> bool:
        return str(part.get("messageID", "")) in self._users

    async def _failed(self, error: Any) -> None:
        self.error = error_line(error)[:MAX_ERROR]
        await self._put({"type": "error", "error": error})

    async def _put(self, data: JsonObject) -> None:
        row = {"type": data["type"], "timestamp": int(time.time() * 1000), "sessionID": self._session, **data}
        self._left -= len(json.dumps(row))
        if self._left >= 0:
            by_user = self._of_user(_table(row.get("part")))
            await self._emit(AgentEmitted(event=event_of(row, by_user=by_user), raw=row))


def _digest(value: JsonObject) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def _small(part: JsonObject) -> bool:
    return len(json.dumps(part)) <= MAX_HELD_BYTES


def _finished(part: JsonObject) -> bool:
    match part.get("type"):
        case "tool":
            return _table(part.get("state")).get("status") in ("completed", "error")
        case "text" | "reasoning":
            return "end" in _table(part.get("time"))
        case "step-start" | "step-finish":
            return True
        case _:
            return False


def _table(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}
