"""OpenAI's Responses (`POST /v1/responses`), which Codex speaks: the way to chat completions."""

from __future__ import annotations

import base64
import binascii

from rollcage.gateway.message import CallDraft
from rollcage.gateway.wires.answer import arguments_text, spelled
from rollcage.gateway.wires.base import BadRequest, Wire, dict_or_empty, dicts_in, text_at, text_or_none
from rollcage.gateway.wires.history import ChatHistory, Part, image_part, text_part
from rollcage.gateway.wires.responses_stream import SEALED, ResponsesAnswer
from rollcage.gateway.wires.responses_tools import INPUT, MORE_TOOLS
from rollcage.types import JsonObject

_SAME = ("temperature", "top_p", "parallel_tool_calls", "stream")
_STATEFUL = {
    "previous_response_id": "no answers are kept here: send the whole conversation as input",
    "conversation": "no conversations are kept here: send the whole conversation as input",
    "prompt": "no prompt templates are kept here: send instructions and input",
}
_TEXTS = ("input_text", "output_text", "text")


class ResponsesWire(ResponsesAnswer, Wire):
    """One Responses request and its answer."""

    def __init__(self, body: JsonObject, *, model: str, id: str = "", created: int = 0) -> None:
        """`model` is what the engine is asked for; `id` and `created` name and date the answer."""
        super().__init__(body, model=text_or_none(body.get("model")) or model, id=id, created=created)
        self._chat_model = model
        self._notes: list[str] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """What the translation had to leave out, a line each."""
        return tuple(dict.fromkeys(self._notes))

    def chat_request(self) -> JsonObject:
        """The agent's body as one of chat completions. Raises BadRequest."""
        body = self._body
        self._notes = [f"tool left out: {kind}" for kind in self.toolbox.left_out]
        for name, remedy in _STATEFUL.items():
            if body.get(name):
                raise BadRequest(f"{name}: {remedy}", name)
        if body.get("background"):
            raise BadRequest("background: answers are given at once or not at all", "background")
        chat: JsonObject = {"model": self._chat_model, "messages": self._messages()}
        chat |= self.toolbox.chosen(body.get("tool_choice"))
        chat |= {name: body[name] for name in _SAME if body.get(name) is not None}
        if "tools" not in chat:
            chat.pop("parallel_tool_calls", None)
        if body.get("max_output_tokens") is not None:
            chat["max_tokens"] = body["max_output_tokens"]
        if body.get("stream") is True:
            chat["stream_options"] = {"include_usage": True}
        if effort := dict_or_empty(body.get("reasoning")).get("effort"):
            chat["reasoning_effort"] = effort
        return chat | self._format()

    def _format(self) -> JsonObject:
        form = dict_or_empty(dict_or_empty(self._body.get("text")).get("format"))
        kind = form.get("type", "text")
        if kind == "text":
            return {}
        if kind == "json_object":
            return {"response_format": {"type": "json_object"}}
        if kind != "json_schema":
            raise BadRequest("text.format.type: must be text, json_object or json_schema", "text.format.type")
        schema = {name: value for name, value in form.items() if name != "type" and value is not None}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}

    def _messages(self) -> list[JsonObject]:
        messages = ChatHistory()
        messages.system(text_or_none(self._body.get("instructions")) or "")
        given = self._body.get("input")
        if isinstance(given, str):
            messages.user([text_part(given)])
            return messages.value()
        items = dicts_in(given, "input")
        if not items:
            raise BadRequest("input: must be a string or a list with at least one item", "input")
        for n, item in enumerate(items):
            self._item(messages, item, f"input.{n}")
        return messages.value()

    def _item(self, messages: ChatHistory, item: JsonObject, where: str) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(messages, item, where)
        elif kind == "reasoning":
            messages.assistant(reasoning=_reasoning(item, where))
        elif kind in ("function_call", "custom_tool_call"):
            messages.assistant(call=self._call(item, where))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.tool(text_at(item, "call_id", where), self._parts(item.get("output"), f"{where}.output"))
        elif kind == "agent_message":  # what Codex's agents write to each other
            messages.user(self._parts(item.get("content"), f"{where}.content"))
        elif kind == "item_reference":
            raise BadRequest(f"{where}: no items are kept here: send the item itself", where)
        elif kind != MORE_TOOLS:
            self._notes.append(f"left out of the conversation: {kind}")

    def _message(self, messages: ChatHistory, item: JsonObject, where: str) -> None:
        parts = self._parts(item.get("content"), f"{where}.content")
        role = item.get("role")
        if role == "user":
            messages.user(parts)
        elif role == "assistant":
            messages.assistant(text="".join(part.get("text", "") for part in parts))
        elif role in ("system", "developer"):
            messages.system("\n\n".join(part["text"] for part in parts if part["type"] == "text"))
        else:
            raise BadRequest(f"{where}.role: must be user, assistant, system or developer", f"{where}.role")

    def _call(self, item: JsonObject, where: str) -> CallDraft:
        name = self.toolbox.called(text_at(item, "name", where), text_or_none(item.get("namespace")))
        if item["type"] == "custom_tool_call":
            arguments = spelled({INPUT: text_at(item, "input", where)})
        else:
            arguments = arguments_text(text_at(item, "arguments", where))
        return CallDraft(text_at(item, "call_id", where), name, [arguments])

    def _parts(self, content: object, where: str) -> list[Part]:
        """Content as chat has it. What chat has no shape for is named in its place, so that the model knows of it."""
        if isinstance(content, str):
            return [text_part(content)] if content else []
        parts = [self._part(part, f"{where}.{n}") for n, part in enumerate(dicts_in(content, where))]
        return [part for part in parts if part.get("text") != ""]

    def _part(self, part: JsonObject, where: str) -> Part:
        kind = part.get("type")
        if kind in _TEXTS:
            return text_part(text_at(part, "text", where))
        if kind == "refusal":
            return text_part(text_at(part, "refusal", where))
        if kind == "encrypted_content":
            # Codex marks words between agents so; here nobody has encrypted them.
            return text_part(text_at(part, "encrypted_content", where))
        if kind == "input_image" and isinstance(part.get("image_url"), str):
            detail = part.get("detail")
            return image_part(part["image_url"], detail if detail in ("low", "high") else None)
        self._notes.append(f"left out of the conversation: {kind}")
        return text_part(f"[{kind}: cannot be shown to this model]")


def _reasoning(item: JsonObject, where: str) -> str:
    """What the model thought: in the open, or in the sealed form that we gave it, or what else is told of it."""
    if content := dicts_in(item.get("content"), f"{where}.content"):
        return "".join(text_at(part, "text", f"{where}.content") for part in content)
    sealed = text_or_none(item.get("encrypted_content")) or ""
    if sealed.startswith(SEALED):
        try:
            return base64.b64decode(sealed.removeprefix(SEALED), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise BadRequest(f"{where}.encrypted_content: was altered", f"{where}.encrypted_content") from error
    return "\n\n".join(text_at(part, "text", where) for part in dicts_in(item.get("summary"), f"{where}.summary"))
