"""Chat completions as a wire of their own: what an agent is told that speaks the engine's own language.

Agents see what they asked for. What the gateway asked for besides (ids, logprobs, the count of tokens) is taken out of
whatever is put together here; a stream that is passed on byte by byte goes through `UsageFilter` at most.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from rollcage.gateway.hold import LARGE
from rollcage.gateway.shapes import object_of
from rollcage.gateway.wires.base import CHAT_PATH, Wire, encoded, problem_in
from rollcage.types import JsonObject

PING = b": still at work\n\n"
DONE = b"data: [DONE]\n\n"

_CAPTURED = ("token_ids", "prompt_token_ids", "response_token_ids", "prompt_text", "sglext", "logprobs", "__verbose")
"""Members of an answer that hold what was captured."""
_ASKED_BY = {
    "token_ids": ("return_token_ids",),
    "prompt_token_ids": ("return_token_ids", "return_prompt_token_ids"),
    "response_token_ids": ("return_token_ids",),
    "prompt_text": ("return_prompt_text",),
    "sglext": ("return_input_ids_in_sglext", "return_output_ids_in_sglext"),
    "logprobs": ("logprobs",),
    "__verbose": ("verbose",),
}
_COUNTING = (b'"choices":[]', b'"choices": []')
_GAPS = (b"\n\n", b"\r\n\r\n")
_THOUGHTS = frozenset({"reasoning", "reasoning_content"})

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OBJECTS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


class ChatWire(Wire):
    """One request of an agent that speaks chat (or text) completions, and its answer."""

    translates = False

    def __init__(self, body: JsonObject, path: str = CHAT_PATH) -> None:
        """`path`: where the agent sent it, below `/v1`."""
        self.path = path
        self._body = body
        self.rewrites = body.get("include_reasoning") is False
        self.counts = counts(body)
        """Whether it asked for the count of tokens at the end of a stream."""

    @cached_property
    def unasked(self) -> frozenset[str]:
        """Members of an answer that this agent does not expect."""
        body = self._body
        return frozenset(name for name in _CAPTURED if not any(body.get(field) for field in _ASKED_BY[name]))

    @property
    def notes(self) -> tuple[str, ...]:
        """Nothing is left out."""
        return ()

    def chat_request(self) -> JsonObject:
        """The agent's body, as it is."""
        return self._body

    def event(self, chunk: JsonObject) -> bytes:
        """One event, without what the agent did not ask for."""
        choices = chunk.get("choices")
        if not choices and not chunk.get("error") and not self.counts:
            return b""
        lean = {name: value for name, value in chunk.items() if name not in self.unasked}
        if isinstance(choices, list):
            lean["choices"] = [self._lean(choice) for choice in choices]
        return b"data: %b\n\n" % encoded(lean)

    def finish(self) -> bytes:
        """The end of a stream."""
        return DONE

    def cut(self, message: str) -> bytes:
        """The stream broke: an error event, as engines send it."""
        return self._broken({"message": message, "type": "upstream_error", "param": None, "code": None})

    def cut_by(self, status: int, body: bytes) -> bytes:
        """The same, in the words of an engine that refused once the stream had begun."""
        said = object_of(body) or {}
        fault = said.get("error", said)
        if isinstance(fault, dict) and fault:
            return self._broken({**fault, "code": fault.get("code") or status})
        return self.cut(problem_in(status, body).message)

    def whole(self, answer: JsonObject) -> bytes:
        """An answer that was not streamed."""
        return self.trimmed(encoded(answer))

    def ending(self, *, broken: bool, faulty: bool) -> bytes | None:
        """The end of a stream. One that broke upstream breaks for the agent too; an error event speaks for itself."""
        return None if broken else self.finish()

    def whole_body(self, body: bytes) -> bytes:
        """The answer as it is, but for what the agent did not ask for."""
        return self.trimmed(body)

    def filter(self, sent: JsonObject) -> UsageFilter | None:
        """Takes out the count of tokens where we asked for it and the agent did not."""
        return UsageFilter() if counts(sent) and not self.counts else None

    def trimmed(self, answer: bytes) -> bytes:
        """A whole answer without what the agent did not ask for; as it is where there is nothing to take out."""
        try:
            value = _OBJECT.decode(answer)
            choices = _OBJECTS.decode(value["choices"])
        except (msgspec.DecodeError, KeyError):
            return answer
        found = [name for one in (value, *choices) for name in one if name in self.unasked]
        if self.rewrites:
            choices = [self._thoughtless(choice) for choice in choices]
        elif not found:
            return answer
        lean = {name: each for name, each in value.items() if name not in self.unasked}
        rows = [{name: each for name, each in one.items() if name not in self.unasked} for one in choices]
        return msgspec.json.encode({**lean, "choices": rows})

    def error(self, status: int, body: bytes) -> bytes:
        """An error body, as it is."""
        return body

    def ping(self) -> bytes:
        """A comment, which readers of event streams skip."""
        return PING

    def _broken(self, error: JsonObject) -> bytes:
        return b"data: %b\n\n" % encoded({"error": error}) + DONE

    def _lean(self, choice: object) -> object:
        if not isinstance(choice, dict):
            return choice
        kept = {name: value for name, value in choice.items() if name not in self.unasked}
        if self.rewrites:
            for name in ("delta", "message"):
                if isinstance(piece := kept.get(name), dict):
                    kept[name] = {each: value for each, value in piece.items() if each not in _THOUGHTS}
        return kept

    def _thoughtless(self, choice: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
        """A choice of a whole answer, without the reasoning that the agent does not want."""
        try:
            said = _OBJECT.decode(choice["message"])
        except (msgspec.DecodeError, KeyError):
            return choice
        kept = {name: value for name, value in said.items() if name not in _THOUGHTS}
        return {**choice, "message": msgspec.Raw(msgspec.json.encode(kept))}


class UsageFilter:
    """Takes the chunk that only counts tokens out of a stream whose agent did not ask for it.

    Such a chunk has no choices, and agents that never asked for one trip over that. No event is parsed but those that
    may be it; one that is large is none, and leaves as it comes.
    """

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        """Pieces of an event that has not ended."""
        self._size = 0
        """How long they are."""
        self._large = False
        """Whether it is longer than any that only counts, and leaves as it comes."""
        self._tail = b""
        """Its last bytes, in which a gap may have begun."""

    @property
    def idle(self) -> bool:
        """Whether no event has begun."""
        return not self._size

    def feed(self, data: bytes) -> bytes:
        """The events that are complete with this portion, without the ones that only count."""
        if not self._size and data.endswith(b"\n\n") and not _may_count(data):
            return data  # several that came together
        # Joined only when an event ends: one of many megabytes costs no more than its length.
        near = self._tail + data
        find = near.find if self._large else near.rfind
        ends = [at + len(gap) for gap in _GAPS if b"\n" in near and (at := find(gap)) >= 0]
        if not ends:
            self._rest.append(data)
            self._size, self._tail = self._size + len(data), near[-3:]
            self._large = self._size > LARGE
            return self._taken() if self._large else b""
        at = (min if self._large else max)(ends) - len(self._tail)
        rest, large = data[at:], self._large
        self._rest.append(data[:at])
        whole = self._taken()
        self._size, self._large, self._tail = 0, False, b""
        if large:
            return whole + (self.feed(rest) if rest else b"")
        if rest:
            self._rest, self._size, self._tail = [rest], len(rest), rest[-3:]
        return _countless(whole)

    def _taken(self) -> bytes:
        taken, self._rest = b"".join(self._rest), []
        return taken

    def end(self) -> bytes:
        """What is left when the stream is over."""
        rest = self._taken()
        return b"" if _only_counts(rest) else rest


def counts(request: JsonObject) -> bool:
    """Whether a request asks for the count of tokens at the end of a stream."""
    options = request.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _countless(events: bytes) -> bytes:
    """These events without those that only count."""
    gap = b"\r\n\r\n" if b"\r\n\r\n" in events else b"\n\n"
    kept: list[bytes] = []
    start = end = 0
    while found := [at for mark in _COUNTING if (at := events.find(mark, end)) >= 0]:
        at = min(found)
        before, after = events.rfind(gap, end, at), events.find(gap, at)
        begin = before + len(gap) if before >= 0 else end
        end = after + len(gap) if after >= 0 else len(events)
        if _only_counts(events[begin:end]):
            kept.append(events[start:begin])
            start = end
    return b"".join((*kept, events[start:])) if kept else events


def _may_count(data: bytes) -> bool:
    return _COUNTING[0] in data or _COUNTING[1] in data


def _only_counts(event: bytes) -> bool:
    if not _may_count(event):
        return False
    value = object_of(event.partition(b"data:")[2])
    return value is not None and value.get("choices") == [] and not value.get("error")
