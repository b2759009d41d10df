"""OpenAI's Responses: the way back from a chat answer, streamed or whole."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from functools import cached_property

from rollcage.gateway.message import CallDraft
from rollcage.gateway.wires.answer import ChatAnswer
from rollcage.gateway.wires.base import dict_or_empty, encoded, fault_in, problem_in, sse, text_or_none
from rollcage.gateway.wires.responses_tools import AgentTool, Toolbox, free_text
from rollcage.types import JsonObject

SEALED = "rollcage-"
"""Opens what clients that keep nothing get as `encrypted_content`: the reasoning itself in base64, to send back."""

_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}
_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}
_ECHOED = ("instructions", "max_output_tokens", "temperature", "tools", "top_p")
_CUT_SHORT = {"length": "max_output_tokens", "content_filter": "content_filter"}


@dataclass
class _Item:
    """An output item in the making."""

    kind: str
    place: int
    id: str
    call: CallDraft | None = None
    tool: AgentTool | None = None
    texts: list[str] = field(default_factory=list)
    """Of reasoning and messages."""
    status: str = "in_progress"

    @property
    def closed(self) -> bool:
        """Whether the agent has been told that it is complete."""
        return self.status != "in_progress"

    def value(self, *, seal: bool) -> JsonObject:
        """The item as the agent may know it: calls have nothing in them until they are closed."""
        head: JsonObject = {"id": self.id, "type": self.kind, "status": self.status}
        if self.call is not None and self.tool is not None:
            head |= {"call_id": self.call.id, "name": self.tool.name}
            if self.tool.namespace is not None:
                head["namespace"] = self.tool.namespace
            if self.tool.custom:
                return head | {"input": free_text(self.call.arguments) if self.closed else ""}
            return head | {"arguments": self.call.arguments if self.closed else ""}
        text = "".join(self.texts)
        content = [self.part(text)] if self.texts else []
        if self.kind == "message":
            return head | {"role": "assistant", "content": content}
        sealed = SEALED + base64.b64encode(text.encode("utf-8", "replace")).decode() if seal and text else None
        return head | {"summary": [], "content": content, "encrypted_content": sealed}

    def part(self, text: str) -> JsonObject:
        """Its one content part, holding a text."""
        part: JsonObject = {"type": _PARTS[self.kind], "text": text}
        return part | {"annotations": [], "logprobs": []} if self.kind == "message" else part


class ResponsesAnswer:
    """An answer on its way to an agent that speaks Responses. Calls may overlap on this wire as they may in chat."""

    def __init__(self, body: JsonObject, *, model: str, id: str, created: int) -> None:
        self._body, self._model, self._id, self._created = body, model, id, created
        include = body.get("include")
        self._seal = isinstance(include, list) and "reasoning.encrypted_content" in include
        self._answer = ChatAnswer()
        self._items: list[_Item] = []
        self._sequence = 0
        self._started = self._over = False

    @cached_property
    def toolbox(self) -> Toolbox:
        """The agent's tools. Raises BadRequest."""
        return Toolbox(self._body)

    def event(self, chunk: JsonObject) -> bytes:
        """What the agent is told of one parsed chunk."""
        if self._over:
            return b""
        if fault := fault_in(chunk):
            return self.cut(fault)
        delta = self._answer.add(chunk)
        out = [self._start(chunk)]
        if delta.reasoning:
            out.append(self._say("reasoning", delta.reasoning))
        if delta.text:
            out.append(self._say("message", delta.text))
        for call, piece in delta.calls:
            # A name may come in pieces; once there are arguments it is complete.
            if piece:
                out.append(self._write(call, piece))
        return b"".join(out)

    def finish(self) -> bytes:
        """The closing events."""
        if self._over:
            return b""
        out = [self._start({})]
        out += [self._open_call(call) for call in self._answer.calls]
        out += [self._close(item) for item in self._items[:-1]]
        ending = self._ending()
        out += [self._close(item, ending) for item in self._items[-1:]]
        self._over = True
        out.append(self._event(f"response.{ending}", response=self._response(ending, full=True)))
        return b"".join(out)

    def cut(self, message: str) -> bytes:
        """The upstream broke in mid-stream."""
        if self._over:
            return b""
        start = self._start({})
        self._over = True
        failed = self._response("failed", full=True) | {"error": {"code": "server_error", "message": message}}
        return start + self._event("response.failed", response=failed)

    def whole(self, answer: JsonObject) -> bytes:
        """A whole completion as a response."""
        delta = self._answer.add(answer)
        self._name(answer)
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.text)):
            if text:
                self._new(kind).texts.append(text)
        for call in self._answer.calls:
            self._new_call(call)
        ending = self._ending()
        for item in self._items:
            item.status = ending if item is self._items[-1] else "completed"
        return encoded(self._response(ending, full=True))

    def error(self, status: int, body: bytes) -> bytes:
        """An error in OpenAI's shape."""
        problem = problem_in(status, body)
        kind = problem.kind or ("server_error" if status >= 500 else "invalid_request_error")
        fault = {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}
        return encoded({"error": fault})

    def ping(self) -> bytes:
        """An event that says nothing new. Before the answer has a name, a comment."""
        if self._over:
            return b""
        if not self._started:
            return self._start({}) if self._id else b": ping\n\n"
        return self._event("response.in_progress", response=self._response("in_progress", full=False))

    def _start(self, chunk: JsonObject) -> bytes:
        if self._started:
            return b""
        self._started = True
        self._name(chunk)
        opening = self._response("in_progress", full=False)
        created = self._event("response.created", response=opening)
        return created + self._event("response.in_progress", response=opening)

    def _name(self, chunk: JsonObject) -> None:
        self._id = self._answer.id = self._id or (text_or_none(chunk.get("id")) or "").removeprefix("chatcmpl-") or "0"
        created = chunk.get("created")
        self._created = self._created or (created if isinstance(created, int) else 0)

    def _say(self, kind: str, text: str) -> bytes:
        item = self._items[-1] if self._items else None
        begun = b""
        if item is None or item.kind != kind or item.closed:
            begun = self._close_words() + self._added(item := self._new(kind))
            begun += self._of(item, "response.content_part.added", content_index=0, part=item.part(""))
        item.texts.append(text)
        if kind == "reasoning":
            return begun + self._of(item, "response.reasoning_text.delta", content_index=0, delta=text)
        return begun + self._of(item, "response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _write(self, call: CallDraft, piece: str) -> bytes:
        # In the order of the calls, even where an earlier one has no arguments yet.
        before = self._answer.calls[: self._answer.calls.index(call) + 1]
        begun = b"".join(self._open_call(each) for each in before)
        item = next(item for item in self._items if item.call is call)
        if item.tool is not None and item.tool.custom:
            return begun
        return begun + self._of(item, "response.function_call_arguments.delta", delta=piece)

    def _open_call(self, call: CallDraft) -> bytes:
        if any(item.call is call for item in self._items):
            return b""
        return self._close_words() + self._added(self._new_call(call))

    def _close_words(self) -> bytes:
        words = [item for item in self._items if item.call is None and not item.closed]
        return b"".join(self._close(item) for item in words)

    def _close(self, item: _Item, status: str = "completed") -> bytes:
        if item.closed:
            return b""
        item.status = status
        value = item.value(seal=self._seal)
        out = []
        if item.kind == "function_call":
            out.append(self._of(item, "response.function_call_arguments.done", arguments=value["arguments"]))
        elif item.kind == "custom_tool_call":
            out.append(self._of(item, "response.custom_tool_call_input.delta", delta=value["input"]))
            out.append(self._of(item, "response.custom_tool_call_input.done", input=value["input"]))
        else:
            text = "".join(item.texts)
            if item.kind == "reasoning":
                out.append(self._of(item, "response.reasoning_text.done", content_index=0, text=text))
            else:
                out.append(self._of(item, "response.output_text.done", content_index=0, text=text, logprobs=[]))
            out.append(self._of(item, "response.content_part.done", content_index=0, part=item.part(text)))
        out.append(self._event("response.output_item.done", output_index=item.place, item=value))
        return b"".join(out)

    def _new(self, kind: str, call: CallDraft | None = None, tool: AgentTool | None = None) -> _Item:
        place = len(self._items)
        self._items.append(_Item(kind, place, f"{_PREFIXES[kind]}_{self._id}_{place}", call, tool))
        return self._items[-1]

    def _new_call(self, call: CallDraft) -> _Item:
        tool = self.toolbox.tool(self._answer.settle(call).name)
        return self._new("custom_tool_call" if tool.custom else "function_call", call, tool)

    def _added(self, item: _Item) -> bytes:
        value = item.value(seal=False)
        return self._event("response.output_item.added", output_index=item.place, item=value)

    def _of(self, item: _Item, name: str, **data: object) -> bytes:
        return self._event(name, item_id=item.id, output_index=item.place, **data)

    def _event(self, name: str, **data: object) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return sse(name, {"type": name, "sequence_number": number, **data})

    def _response(self, status: str, *, full: bool) -> JsonObject:
        """The response object. What the agent sent is repeated only at the end: it can be long, and pings carry it."""
        body = self._body if full else {}
        short = _CUT_SHORT.get(self._answer.finish_reason or "") if status == "incomplete" else None
        echo = {name: body.get(name) for name in _ECHOED}
        reasoning, text = dict_or_empty(body.get("reasoning")), dict_or_empty(body.get("text"))
        return echo | {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None if short is None else {"reason": short},
            "metadata": dict_or_empty(body.get("metadata")),
            "model": self._model,
            "output": [item.value(seal=self._seal) for item in self._items] if full else [],
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "store": False,
            "text": text or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "truncation": "disabled",
            "usage": self._usage() if full else None,
        }

    def _ending(self) -> str:
        return "incomplete" if self._answer.finish_reason in _CUT_SHORT else "completed"

    def _usage(self) -> JsonObject | None:
        tokens = self._answer.tokens
        if tokens is None:
            return None
        return {
            "input_tokens": tokens.prompt,
            "input_tokens_details": {"cached_tokens": tokens.cached, "cache_write_tokens": 0},
            "output_tokens": tokens.completion,
            "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
            "total_tokens": tokens.prompt + tokens.completion,
        }
