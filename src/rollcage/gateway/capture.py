"""Bytes in, a turn out: pure, and at ease with half an answer.

An answer is one JSON object or a stream of events; which of the two is told by its first byte, because content types
lie. Tokens go into columns of one length (`token_draft`); where an engine's own lists disagree, the turn says so and is
not trainable. Events of the usual shape are taken many at a time (`usual`), all others one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from rollcage.gateway.message import MessageDraft
from rollcage.gateway.shapes import Choice, Chunk, Logprobs, chunk_of, object_of, piece_of, spellings
from rollcage.gateway.token_draft import TOKEN_ID, TokenDraft
from rollcage.gateway.usual import Piece, singles, take_usual
from rollcage.sse import EventReader
from rollcage.types import JsonObject, Purpose, Turn

_EMPTY = Turn(index=0, request={})
"""Copied with other fields: what the gateway itself has made needs no check, which would cost as much as all else."""
PORTION = 48 << 10
"""Parsed at a stretch, about: a fifth of a millisecond."""


@dataclass(slots=True)
class ModelCall:
    """What is known of a model call before its answer comes; in the end also what was sent, and to whom."""

    index: int
    request: JsonObject
    """The body as sent upstream."""
    streamed: bool = True
    purpose: Purpose = Purpose.AGENT
    session: str = ""
    parent_session: str = ""
    started_at: float = 0.0
    replaces: int | None = None
    """The attempt that this one repeats."""
    policy_version: str = ""
    """The weights that are asked."""
    advice: str = ""
    """Why the engine may not tell all, where that is known."""


class AnswerEnd(NamedTuple):
    """How the answer ended, as the transport saw it."""

    status: int
    error: str | None = None
    """What broke the transport before the end of the answer; None where it ended as announced."""
    first_token_s: float | None = None
    seconds: float = 0.0
    cut: bool = False
    """Whether the agent never got the end of it, because it left or its time was over."""


def turn_of(call: ModelCall, body: bytes, end: AnswerEnd) -> Turn:
    """The turn that these bytes are the answer of."""
    answer = TurnBuilder()
    answer.feed(body)
    return answer.turn(call, end)


def portions(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """An answer in portions, which end with an event wherever they can."""
    some: list[bytes] = []
    size = 0
    for piece in pieces:
        some.append(piece)
        size += len(piece)
        if size >= PORTION and (size > 2 * PORTION or piece.endswith(b"\n\n")):
            yield from _portions(b"".join(some))
            some, size = [], 0
    yield from _portions(b"".join(some))


def _portions(body: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(body):
        end = body.rfind(b"\n\n", start, start + PORTION) + 2
        end = end if end > start + 1 else start + PORTION
        yield body[start:end]
        start = end


class Spoken(NamedTuple):
    """What an answer has said so far."""

    content: str = ""
    reasoning: str = ""
    calls: str = ""
    tokens: int = 0


class TurnBuilder:
    """An answer in the making: feed it portions of any size, ask for the turn at the end."""

    def __init__(self) -> None:
        self._kind = ""
        self._head = b""
        self._json: list[bytes] = []
        self._events = EventReader()
        self._message = MessageDraft()
        self._tokens = TokenDraft()
        self._prompt_ids: Sequence[int] = ()
        self._output_ids: list[int] | None = None
        self._all_ids: list[int] | None = None
        self._usage: JsonObject = {}
        self._finish_reason: str | None = None
        self._choices: set[int] = set()
        self._error: str | None = None
        self._garbled: str | None = None
        self._misfit = ""
        self._done = self._recorded = False

    @property
    def half(self) -> int:
        """Bytes of an event that has not ended: it is read at a stretch when it does."""
        return self._events.waiting

    @property
    def unread(self) -> int:
        """Bytes that `turn` is left to read."""
        return self.half + sum(map(len, self._json))

    def rest(self) -> Spoken:
        """What was said in all that was fed; until more is, this takes little memory."""
        with suppress(OverflowError):
            self._prompt_ids = array("i", self._prompt_ids)
        return Spoken(*self._message.spoken(), len(self._tokens))

    def feed(self, data: bytes) -> None:
        """Take in a portion."""
        if not self._kind:
            data = self._head + data
            start = data.lstrip(b"\xef\xbb\xbf \t\r\n")
            if not start:
                self._head = data
                return
            self._kind = "json" if start.startswith((b"{", b"[")) else "events"
        if self._kind == "json":
            self._json.append(data)
        elif self._events.between and data.endswith(b"\n\n") and b"\r" not in data:
            self._on_events(data)
        else:
            self._on_portion(data)

    def turn(self, call: ModelCall, end: AnswerEnd, prompt_ids: tuple[int, ...] = ()) -> Turn:
        """The turn, with whatever came until now. Nothing may be fed afterwards.

        `prompt_ids` were asked for beside the call; they count only where the engine told none, and as many as it says.
        """
        raw = b"".join(self._json)
        if self._kind == "json":
            self._on_object(raw)
        else:
            for event in self._events.end():
                self._on_event(event.name, event.data)
        if self._output_ids is not None:
            self._misfit = self._tokens.name(self._output_ids) or self._misfit
        if self._all_ids is not None and len(self._all_ids) != len(self._tokens):
            self._misfit = self._tokens.fill_gaps(self._all_ids) or self._misfit
        if prompt_ids and not self._prompt_ids and self._usage.get("prompt_tokens") == len(prompt_ids):
            self._prompt_ids = prompt_ids
        error = self._verdict(end, raw)
        reason = self._untrainable(call, error)
        fields = {
            "index": call.index,
            "replaces": call.replaces,
            "purpose": call.purpose,
            "session": call.session,
            "parent_session": call.parent_session,
            "policy_version": call.policy_version,
            "request": call.request,
            "message": self._message.value() if self._choices else {},
            "prompt_ids": tuple(self._prompt_ids),
            "tokens": self._tokens.columns(singles),
            "finish_reason": self._finish_reason,
            "usage": self._usage,
            "status": end.status,
            "error": error,
            "trainable": not reason,
            "untrainable_reason": reason,
            "recorded": self._recorded,
            "streamed": call.streamed,
            "started_at": call.started_at,
            "first_token_s": end.first_token_s,
            "seconds": end.seconds,
        }
        return _EMPTY.model_copy(update=fields)

    def _on_events(self, data: bytes) -> None:
        """Take in whole events: those of the usual shape together, each other by itself."""
        at = 0
        while at < len(data):
            pieces: list[Piece] = []
            before = len(self._tokens)
            at = take_usual(data, at, self._tokens, pieces)
            if len(self._tokens) > before:
                self._choices.add(0)
            for piece in pieces:
                if isinstance(piece, str):
                    self._message.add_text(piece)
                else:
                    self._message.add(piece_of(piece) if isinstance(piece, bytes) else piece)
            if at < len(data):
                found = data.find(b"\n\n", at)
                end = found + 2 if found >= 0 else len(data)  # a line feed too many is no event
                if data.startswith(b"data: ", at) and data.find(b"\n", at) == found:
                    self._on_event("", data[at + 6 : found])
                else:
                    self._on_portion(data[at:end])
                at = end

    def _on_portion(self, data: bytes) -> None:
        for event in self._events.feed(data):
            self._on_event(event.name, event.data)

    def _on_event(self, name: str, data: bytes) -> None:
        if not data:
            return  # it says nothing, as the standard has it
        if data.strip() == b"[DONE]":
            self._done = True
            return
        chunk = chunk_of(data)
        if chunk is None:
            self._garbled = "an event of the stream is no JSON object"
        elif name == "sglext_ids":
            self._on_sglext(chunk.sglext or object_of(data) or {})
        elif name == "error" and chunk.error is None:
            self._error = _reported(object_of(data))
        else:
            self._on_chunk(chunk, data)

    def _on_object(self, data: bytes) -> None:
        chunk = chunk_of(data)
        if chunk is None:
            self._garbled = "the answer is no whole JSON object"
            return
        self._on_chunk(chunk, data)
        self._done = bool(self._choices) and self._error is None

    def _on_chunk(self, chunk: Chunk, data: bytes) -> None:
        if chunk.error is not None:
            # vLLM ends a stream that broke with an error event and `[DONE]`: the error stands.
            self._error = _reported(chunk.error)
        if chunk.usage:
            self._usage = chunk.usage
        self._recorded = self._recorded or chunk.recorded is True
        if chunk.prompt_token_ids and not self._prompt_ids:
            self._prompt_ids = chunk.prompt_token_ids
        if chunk.sglext:
            self._on_sglext(chunk.sglext)
        if chunk.verbose and chunk.verbose.tokens:
            self._all_ids = chunk.verbose.tokens
        for choice in chunk.choices or ():
            index = choice.index or 0
            self._choices.add(index)
            if index == 0:
                self._on_choice(choice, data)

    def _on_choice(self, choice: Choice, data: bytes) -> None:
        if choice.delta is not None:
            self._message.add(choice.delta)
        elif choice.message is not None:
            self._message.add(choice.message, whole=True)
        if choice.text:
            self._message.add_text(choice.text)
        if choice.finish_reason:
            self._finish_reason = choice.finish_reason
        if choice.prompt_token_ids and not self._prompt_ids:
            self._prompt_ids = choice.prompt_token_ids
        ids = choice.token_ids or choice.response_token_ids
        if choice.logprobs is not None:
            spelled = spellings(data) if _spells_ids(choice.logprobs) else None
            misfit = self._tokens.add(choice.logprobs, ids, spelled)
            self._misfit = self._misfit or misfit
        elif ids:
            self._tokens.add_ids(ids)

    def _on_sglext(self, extension: JsonObject) -> None:
        inputs, outputs = extension.get("input_ids"), extension.get("output_ids")
        if prompt := _flat(inputs):
            self._prompt_ids = self._prompt_ids or prompt
        self._output_ids = _flat(outputs) or self._output_ids

    def _verdict(self, end: AnswerEnd, raw: bytes) -> str | None:
        """What broke, in one line; None for a whole turn."""
        if end.status and not 200 <= end.status < 300:
            said = _one_line(_message_of(object_of(raw)) if raw else "")
            return f"upstream answered {end.status}" + (f": {said}" if said else "")
        if self._error is not None:
            return self._error
        if self._done and self._finish_reason and self._garbled is None and not end.cut:
            return None  # complete, whatever happened to the connection afterwards
        if end.error is not None or self._garbled is not None:
            return end.error or self._garbled
        if not self._choices:
            return "the answer holds no choices"
        return None if self._finish_reason else "the answer ended without a finish reason"

    def _untrainable(self, call: ModelCall, error: str | None) -> str:
        """Why the turn cannot be trained on; empty where it can."""
        tokens, counted = self._tokens, self._usage.get("completion_tokens")
        missing = [
            (error is not None, f"not whole: {error}"),
            (len(self._choices) > 1, f"{len(self._choices)} choices: only choice 0 is kept"),
            (bool(self._misfit), self._misfit),
            (not tokens, "the engine gave neither token ids nor logprobs"),
            (tokens.ids.holes, "the engine gave no token ids"),
            (tokens.logprobs.holes, "the engine gave no logprobs"),
            (not self._prompt_ids, "the engine gave no prompt token ids"),
            (counted is None, "the engine gave no usage to check the count of tokens against"),
            (counted != len(tokens), f"{len(tokens)} tokens captured, but the engine counted {counted}"),
        ]
        reason = next((reason for wrong, reason in missing if wrong), "")
        return f"{reason} ({call.advice})" if reason and call.advice and error is None else reason


def _spells_ids(logprobs: Logprobs) -> bool:
    first = logprobs.content[0].token if logprobs.content else (logprobs.tokens or ("",))[0]
    return bool(first) and first.startswith(TOKEN_ID)


def _flat(value: object) -> list[int] | None:
    """Ids of choice 0, given flat or once per choice."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        value = value[0]
    if isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        return value
    return None


def _message_of(value: object) -> str:
    """The words in an error, whatever its shape."""
    if isinstance(value, dict):
        inner = next((value[key] for key in ("error", "message", "detail") if value.get(key)), None)
        return _message_of(inner) if inner is not None else str(value)
    return str(value) if value is not None else ""


def _reported(value: object) -> str:
    return f"the engine reported an error: {_one_line(_message_of(value))}"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:299] + "…"
