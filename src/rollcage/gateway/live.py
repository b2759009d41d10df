"""Follow what models say while they say it.

Whoever watches looks at what the calls keep anyway, some times a second, and reads what is new. The calls know nothing
of it: an unwatched one costs nothing, and a slow watcher only sees things later, or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

from rollcage.gateway.capture import ModelCall, Spoken
from rollcage.gateway.shapes import Choice, chunk_of
from rollcage.sse import EventReader
from rollcage.types import Purpose, Value

LOOK_S = 0.05
STRETCH = 64 << 10
"""Read at a stretch."""


class Delta(Value):
    """What a running turn has said since the last look."""

    turn: int
    """The index that the turn will have in the log."""
    purpose: Purpose = Purpose.AGENT
    """What the agent made this call for."""
    session: str = ""
    """The agent's own session id, where it sends one."""
    content: str = ""
    """What it said."""
    reasoning: str = ""
    """What it thought."""
    calls: str = ""
    """What it wrote of tool calls: names and arguments."""
    tokens: int = 0
    """How many tokens it has said in all, as far as the engine tells."""
    ended: bool = False
    """Whether the turn is over; its whole is in the log."""


class RunningCall(Protocol):
    """A call that can be watched."""

    @property
    def call(self) -> ModelCall:
        """Which it is, who made it, and what for."""

    @property
    def settled(self) -> bool:
        """Whether no more will come."""

    @property
    def pieces(self) -> list[bytes]:
        """What came so far and is not in `spoken`; another list once some of it is, or the engine was asked again."""

    @property
    def spoken(self) -> Spoken:
        """What was said before these pieces."""


async def deltas(running: Callable[[], Iterable[RunningCall]], over: Callable[[], bool]) -> AsyncIterator[Delta]:
    """What calls say from now on, until `over` and everything is told."""
    readers: dict[RunningCall, _CallReader] = {}
    while True:
        for call in list(running()):
            if call not in readers:
                readers[call] = _CallReader(call)
        for call, reader in list(readers.items()):
            settled = call.settled
            if (delta := reader.read()) is not None:
                yield delta
            elif settled:
                del readers[call]
                yield reader.delta(ended=True)
        if over() and not readers:
            return
        await asyncio.sleep(LOOK_S)


class _CallReader:
    """Reads one call."""

    def __init__(self, call: RunningCall) -> None:
        self._call = call
        self._pieces: list[bytes] | None = None
        self._at = self._tokens = 0
        self._told = (0, 0, 0)
        """Characters of content, reasoning and calls."""
        self._events = EventReader()

    def read(self) -> Delta | None:
        """What is new; None where nothing is."""
        missed = ("", "", "")
        if self._call.pieces is not self._pieces:
            self._pieces, self._at, self._events = self._call.pieces, 0, EventReader()
            before = self._call.spoken
            self._tokens = before.tokens
            content, reasoning, calls = self._told
            missed = before.content[content:], before.reasoning[reasoning:], before.calls[calls:]
        fresh = self._fresh(self._pieces)
        if not fresh and not any(missed):
            return None
        choices = [choice for data in fresh for choice in self._choices(data)]
        words = [choice.delta or choice.message for choice in choices]
        said = [each for each in words if each is not None]
        functions = [call.function for each in said for call in each.tool_calls or () if call.function]
        news = (
            "".join([missed[0], *((each.content or "") for each in said), *((c.text or "") for c in choices)]),
            missed[1] + "".join(each.thought for each in said),
            missed[2] + "".join((f"{f.name} " if f.name else "") + (f.arguments or "") for f in functions),
        )
        content, reasoning, calls = self._told
        self._told = (content + len(news[0]), reasoning + len(news[1]), calls + len(news[2]))
        return self.delta(content=news[0], reasoning=news[1], calls=news[2])

    def delta(self, **said: object) -> Delta:
        """A delta of this call."""
        call = self._call.call
        fields = {"turn": call.index, "tokens": self._tokens, "purpose": call.purpose, "session": call.session}
        return Delta.model_validate({**fields, **said})

    def _fresh(self, pieces: list[bytes]) -> list[bytes]:
        if pieces and pieces[0][:1] == b"{":  # an answer that comes whole says nothing before its end
            if not self._call.settled or self._at:
                return []
            self._at = len(pieces)
            return [b"".join(pieces)]
        events: list[bytes] = []
        size = 0
        while self._at < len(pieces) and size < STRETCH:
            events += [event.data for event in self._events.feed(pieces[self._at])]
            size += len(pieces[self._at])
            self._at += 1
        return events

    def _choices(self, data: bytes) -> list[Choice]:
        chunk = chunk_of(data)
        choices = [choice for choice in (chunk.choices or () if chunk else ()) if not choice.index]
        for choice in choices:
            ids = choice.token_ids or choice.response_token_ids
            rows = choice.logprobs.content if choice.logprobs is not None else None
            self._tokens += len(ids or rows or ())
        return choices
