"""What a wire is: one protocol that agents speak, before engines that speak chat completions."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec

from rollcage.errors import RollcageError
from rollcage.gateway.shapes import object_of
from rollcage.types import JsonObject

CHAT_PATH = "/chat/completions"
"""Where every translated request goes, below the engine's `/v1`."""
BROKE_OFF = "the model's answer broke off"


class BadRequest(RollcageError):
    """The agent asked for what chat completions cannot express; the answer is status 400."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """Which member of the body is to blame."""

    @property
    def body(self) -> bytes:
        """The refusal in OpenAI's shape, as an engine would have put it; `Wire.error` gives it the wire's own."""
        fault = {"message": str(self), "type": "invalid_request_error", "param": self.param, "code": None}
        return encoded({"error": fault})


class StreamFilter(Protocol):
    """Takes something out of a stream whose other bytes are passed on as they are."""

    @property
    def idle(self) -> bool:
        """Whether no event has begun."""

    def feed(self, data: bytes) -> bytes:
        """What may be passed on with this portion."""

    def end(self) -> bytes:
        """What is left when the stream is over."""


class Wire(ABC):
    """One request of an agent and its answer. Pure: bytes and values in, bytes and values out.

    What is not abstract here is how a translation does it; chat, which needs none, has its own ways.
    """

    translates: ClassVar[bool] = True
    """Whether the agent speaks another language than the engine; where not, bytes may be passed on as they are."""
    rewrites: bool = False
    """Whether an agent that speaks the engine's language must not see all of its words."""
    path: str = CHAT_PATH
    """Where the request goes, below the engine's `/v1`."""

    @property
    @abstractmethod
    def notes(self) -> tuple[str, ...]:
        """What the translation had to leave out, a line each; known once `chat_request` has returned."""

    @abstractmethod
    def chat_request(self) -> JsonObject:
        """The agent's body as one of chat completions, `stream` kept. Raises BadRequest."""

    @abstractmethod
    def event(self, chunk: JsonObject) -> bytes:
        """What the agent is told of one parsed chunk: zero or more events.

        No tool call is ever closed here, so that no agent can act on a turn before `finish` lets it.
        """

    @abstractmethod
    def finish(self) -> bytes:
        """The closing events, after `[DONE]` or the end of the stream. Empty where an error has closed it."""

    @abstractmethod
    def cut(self, message: str) -> bytes:
        """The upstream broke in mid-stream: the wire's own error event."""

    @abstractmethod
    def whole(self, answer: JsonObject) -> bytes:
        """A chat completion that was not streamed, as the wire's JSON body."""

    @abstractmethod
    def error(self, status: int, body: bytes) -> bytes:
        """An upstream's error body (or one of the gateway's) in the wire's own shape."""

    @abstractmethod
    def ping(self) -> bytes:
        """An event that says nothing and that the wire's clients accept at any point of a stream."""

    def ending(self, *, broken: bool, faulty: bool) -> bytes | None:
        """The end of a stream that was told event by event; None where its connection is to be cut.

        `broken`: whether the transport broke; `faulty`: whether the answer is not whole.
        """
        return self.cut(BROKE_OFF) if faulty else self.finish()

    def cut_by(self, status: int, body: bytes) -> bytes:
        """An engine refused once the stream had begun: the wire's own error event, in the engine's words."""
        return self.cut(problem_in(status, body).message)

    def whole_body(self, body: bytes) -> bytes | None:
        """The same as `whole`, of a completion that is not decoded; None where it is no JSON object."""
        answer = object_of(body)
        return None if answer is None else self.whole(answer)

    def filter(self, sent: JsonObject) -> StreamFilter | None:
        """What a stream that is passed on goes through, given the request as sent; None where nothing is taken out."""
        return None


class ErrorBody(NamedTuple):
    """What an error body says, whoever wrote it."""

    message: str
    kind: str
    param: str | None
    code: str | None


def problem_in(status: int, body: bytes) -> ErrorBody:
    """Read an error body: OpenAI's shape, older vLLM's flat one, FastAPI's `detail`, or no JSON at all."""
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    fault = value.get("error") if isinstance(value, dict) and "error" in value else value
    if isinstance(fault, str):
        fault = {"message": fault}
    if not isinstance(fault, dict):
        text = body[:500].decode("utf-8", "replace").strip()
        return ErrorBody(text or f"the model answered with status {status}", "", None, None)
    message = fault.get("message") or fault.get("detail") or f"the model answered with status {status}"
    return ErrorBody(
        message if isinstance(message, str) else json.dumps(message),
        text_or_none(fault.get("type")) or "",
        text_or_none(fault.get("param")),
        text_or_none(fault.get("code")),
    )


def fault_in(chunk: JsonObject) -> str | None:
    """The message of an error that came as a chunk; None for an ordinary one."""
    fault = chunk.get("error")
    if not fault:
        return None
    message = fault.get("message") if isinstance(fault, dict) else fault
    return message if isinstance(message, str) and message else BROKE_OFF


def encoded(value: object) -> bytes:
    """JSON. Half a surrogate pair, which no UTF-8 can carry, is escaped."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def sse(name: str, data: JsonObject) -> bytes:
    """One server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encoded(data))


def text_or_none(value: object) -> str | None:
    """A text, or nothing."""
    return value if isinstance(value, str) else None


def dict_or_empty(value: object) -> JsonObject:
    """An object, or an empty one."""
    return value if isinstance(value, dict) else {}


def dicts_in(value: object, where: str) -> list[JsonObject]:
    """A list of objects; None is an empty one. Raises BadRequest for anything else."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(f"{where}: must be a list", where)
    for n, each in enumerate(value):
        if not isinstance(each, dict):
            raise BadRequest(f"{where}.{n}: must be an object", f"{where}.{n}")
    return value


def text_at(value: JsonObject, name: str, where: str) -> str:
    """A text that must be there. Raises BadRequest."""
    found = value.get(name)
    if not isinstance(found, str):
        raise BadRequest(f"{where}.{name}: must be a string", f"{where}.{name}")
    return found
