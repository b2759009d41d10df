"""Which turn of a script answers a request. Without memory but for the faults that pass after some times."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rollcage.simulators.scripted.shapes import Shapes
from rollcage.types import JsonObject, ScriptedTurn

OVER = ScriptedTurn(text="The script is over.")
"""Answers whatever is asked after the last turn."""

AUXILIARY = ScriptedTurn(text="A scripted rollout")
"""Answers what an agent asks for its own use: titles, summaries."""


class RecordedRequest(NamedTuple):
    """One request as it arrived."""

    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    raw: bytes
    """The body, byte for byte."""

    @property
    def body(self) -> JsonObject:
        """The body, read as JSON."""
        body: JsonObject = json.loads(self.raw)
        return body


@dataclass
class Script:
    """The turns behind one key, and what was asked of it."""

    turns: Sequence[ScriptedTurn]
    shapes: Shapes
    model: str
    requests: deque[RecordedRequest] = field(default_factory=deque)
    generated: int = 0
    """Chunks of answers so far."""
    _faults: Counter[int] = field(default_factory=Counter)

    def turn(self, answers: int) -> ScriptedTurn:
        """The turn for a conversation that holds this many answers; counts a passing fault that it hands out."""
        position = 0
        for n, turn in enumerate(self.turns):
            if turn.times is not None and is_fault(turn):
                # A passing fault leaves no answer in the conversation: it stands before the turn that follows it.
                if position == answers and self._faults[n] < turn.times:
                    self._faults[n] += 1
                    return turn
                continue
            if position == answers:
                return turn
            position += 1
        return OVER


def is_fault(turn: ScriptedTurn) -> bool:
    """Whether a client gets no whole answer from this turn."""
    return turn.status != 200 or turn.cut_after is not None or turn.error_after is not None
