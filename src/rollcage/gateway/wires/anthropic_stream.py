"""Anthropic's Messages: the way back from a chat answer, streamed or whole."""

from __future__ import annotations

from rollcage.gateway.message import CallDraft, object_in
from rollcage.gateway.wires.answer import ChatAnswer, arguments_text
from rollcage.gateway.wires.base import encoded, fault_in, problem_in, sse, text_or_none
from rollcage.types import JsonObject

SIGNATURE = "cm9sbGNhZ2U="
"""Thinking must bear one; nobody checks it, for it is never sent to Anthropic."""

_STOPS = {"tool_calls": "tool_use", "function_call": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class AnthropicAnswer:
    """An answer on its way to an agent that speaks Messages.

    Blocks cannot overlap on this wire and calls may in chat. So the first call's block opens as soon as it is known and
    stays open; what else comes waits for `finish`. Arguments are sent in one piece, because by then it is known whether
    they are JSON: clients break on arguments that are not.
    """

    def __init__(self, *, model: str, id: str) -> None:
        """`model` must be what the agent asked for: Claude Code forgets what another model thought."""
        self._model, self._id = model, id
        self._answer = ChatAnswer()
        self._index = -1
        self._open: str | CallDraft | None = None
        """The kind of the open block (`text`, `thinking`), or the call whose block it is."""
        self._late: list[tuple[str, str]] = []
        """Text and thinking that came while a call's block was open."""
        self._started = self._over = False

    def event(self, chunk: JsonObject) -> bytes:
        """What the agent is told of one parsed chunk."""
        if self._over:
            return b""
        if fault := fault_in(chunk):
            return self.cut(fault)
        delta = self._answer.add(chunk)
        out = [self._start(chunk)]
        if delta.reasoning:
            out.append(self._say("thinking", delta.reasoning))
        if delta.text:
            out.append(self._say("text", delta.text))
        # A name may come in pieces; once there are arguments it is complete.
        if any(piece for _, piece in delta.calls):
            out.append(self._touch())
        return b"".join(out)

    def finish(self) -> bytes:
        """The closing events."""
        if self._over:
            return b""
        self._over = True
        out = [self._start({})]
        for call in self._answer.calls:
            out += [self._begin(call), self._arguments(call)]
        out.append(self._end())
        # Now that no call is open, what waited can be said.
        late, self._late = self._late, []
        out += [self._say(kind, text) for kind, text in late]
        out.append(self._end())
        reason, stop = self._stop()
        ending = {"stop_reason": reason, "stop_sequence": stop}
        out.append(sse("message_delta", {"type": "message_delta", "delta": ending, "usage": self._usage()}))
        out.append(sse("message_stop", {"type": "message_stop"}))
        return b"".join(out)

    def cut(self, message: str) -> bytes:
        """The upstream broke in mid-stream."""
        if self._over:
            return b""
        self._over = True
        return sse("error", {"type": "error", "error": {"type": "api_error", "message": message}})

    def whole(self, answer: JsonObject) -> bytes:
        """A whole completion as a message."""
        delta = self._answer.add(answer)
        self._name(answer)
        content: list[JsonObject] = []
        if delta.reasoning:
            content.append({"type": "thinking", "thinking": delta.reasoning, "signature": SIGNATURE})
        if delta.text:
            content.append({"type": "text", "text": delta.text})
        for call in self._answer.calls:
            self._answer.settle(call)
            arguments = object_in(arguments_text(call.arguments))
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
        reason, stop = self._stop()
        return encoded({**self._message(), "content": content, "stop_reason": reason, "stop_sequence": stop})

    def error(self, status: int, body: bytes) -> bytes:
        """An error in Anthropic's shape."""
        kind = _ERRORS.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
        fault = {"type": kind, "message": problem_in(status, body).message}
        return encoded({"type": "error", "error": fault, "request_id": None})

    def ping(self) -> bytes:
        """An event that says nothing."""
        return b"" if self._over else sse("ping", {"type": "ping"})

    def _start(self, chunk: JsonObject) -> bytes:
        if self._started:
            return b""
        self._started = True
        self._name(chunk)
        return sse("message_start", {"type": "message_start", "message": self._message()})

    def _name(self, chunk: JsonObject) -> None:
        self._id = self._answer.id = self._id or (text_or_none(chunk.get("id")) or "").removeprefix("chatcmpl-") or "0"

    def _message(self) -> JsonObject:
        return {
            "id": f"msg_{self._id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _say(self, kind: str, text: str) -> bytes:
        if isinstance(self._open, CallDraft):
            self._late.append((kind, text))
            return b""
        return self._begin(kind) + self._delta({"type": f"{kind}_delta", kind: text})

    def _touch(self) -> bytes:
        """A sign of life while arguments are being written: client libraries swallow pings."""
        return self._begin(self._answer.calls[0]) + self._delta({"type": "input_json_delta", "partial_json": ""})

    def _begin(self, what: str | CallDraft) -> bytes:
        """Open a block, unless it is open; whatever else is open ends."""
        if self._open == what:
            return b""
        ended = self._end()
        self._open = what
        self._index += 1
        if isinstance(what, CallDraft):
            self._answer.settle(what)
            block: JsonObject = {"type": "tool_use", "id": what.id, "name": what.name, "input": {}}
        else:
            block = {"type": what, what: "", **({"signature": ""} if what == "thinking" else {})}
        return ended + self._event("content_block_start", {"content_block": block})

    def _arguments(self, call: CallDraft) -> bytes:
        return self._delta({"type": "input_json_delta", "partial_json": arguments_text(call.arguments)})

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        thought = self._open == "thinking"
        signed = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if thought else b""
        self._open = None
        return signed + self._event("content_block_stop", {})

    def _delta(self, delta: JsonObject) -> bytes:
        return self._event("content_block_delta", {"delta": delta})

    def _event(self, name: str, data: JsonObject) -> bytes:
        return sse(name, {"type": name, "index": self._index, **data})

    def _stop(self) -> tuple[str, str | None]:
        reason = self._answer.finish_reason or "stop"
        if reason == "stop" and self._answer.calls:
            return "tool_use", None
        if reason == "stop" and self._answer.stop is not None:
            return "stop_sequence", self._answer.stop
        return _STOPS.get(reason, "end_turn"), None

    def _usage(self) -> JsonObject:
        tokens = self._answer.tokens
        prompt, cached, completion = (tokens.prompt, tokens.cached, tokens.completion) if tokens else (0, 0, 0)
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": completion,
        }
