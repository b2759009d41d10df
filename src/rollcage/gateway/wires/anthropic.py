"""Anthropic's Messages (`POST /v1/messages`), which Claude Code speaks: the way to chat completions."""

from __future__ import annotations

from rollcage.gateway.message import CallDraft
from rollcage.gateway.wires.answer import spelled
from rollcage.gateway.wires.anthropic_stream import AnthropicAnswer
from rollcage.gateway.wires.base import BadRequest, Wire, dict_or_empty, dicts_in, encoded, text_at, text_or_none
from rollcage.gateway.wires.history import ChatHistory, Part, image_part, text_part
from rollcage.types import JsonObject

BILLING = "x-anthropic-billing-header:"
"""Opens a system block that Claude Code writes for Anthropic's accounts: no words for a model."""
BYTES_PER_TOKEN = 4

_SAME = ("max_tokens", "temperature", "top_p", "top_k")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class AnthropicWire(AnthropicAnswer, Wire):
    """One Messages request and its answer."""

    def __init__(self, body: JsonObject, *, model: str, id: str = "") -> None:
        """`model` is what the engine is asked for; `id` names the answer (empty: as the engine names it)."""
        super().__init__(model=text_or_none(body.get("model")) or model, id=id)
        self._body, self._chat_model = body, model
        self._notes: list[str] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """What the translation had to leave out, a line each."""
        return tuple(dict.fromkeys(self._notes))

    def chat_request(self) -> JsonObject:
        """The agent's body as one of chat completions. Raises BadRequest.

        `thinking`, effort, context management, metadata and cache marks have no bearing on an engine that is not
        Anthropic's: whether the model thinks is decided by whoever chose the endpoint.
        """
        body = self._body
        self._notes.clear()
        chat: JsonObject = {"model": self._chat_model, "messages": self._messages()}
        chat |= {name: body[name] for name in _SAME if body.get(name) is not None}
        if stops := body.get("stop_sequences"):
            chat["stop"] = stops
        if (stream := body.get("stream")) is not None:
            chat["stream"] = stream
        if stream is True:
            chat["stream_options"] = {"include_usage": True}
        form = dict_or_empty(dict_or_empty(body.get("output_config")).get("format") or body.get("output_format"))
        if form.get("type") == "json_schema":
            schema = {"name": "output", "schema": form.get("schema"), "strict": True}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        if tools := self._tools():
            chat["tools"] = tools
            chat |= self._tool_choice()
        return chat

    def _messages(self) -> list[JsonObject]:
        messages = ChatHistory()
        messages.system(self._system(self._body.get("system"), "system"))
        given = dicts_in(self._body.get("messages"), "messages")
        if not given:
            raise BadRequest("messages: at least one message is required", "messages")
        for n, message in enumerate(given):
            where = f"messages.{n}"
            role = message.get("role")
            if role == "user":
                self._user(messages, message, where)
            elif role == "assistant":
                self._assistant(messages, message, where)
            elif role == "system":
                messages.system(self._system(message.get("content"), f"{where}.content"))
            else:
                raise BadRequest(f"{where}.role: must be user, assistant or system", f"{where}.role")
        return messages.value()

    def _system(self, value: object, where: str) -> str:
        texts = [part["text"] for part in self._parts(value, where) if part["type"] == "text"]
        return "\n\n".join(text for text in texts if not text.startswith(BILLING))

    def _user(self, messages: ChatHistory, message: JsonObject, where: str) -> None:
        content = message.get("content")
        if isinstance(content, list):
            # Results first, as both protocols demand; what else is said comes after them.
            for n, block in enumerate(dicts_in(content, f"{where}.content")):
                if block.get("type") == "tool_result":
                    here = f"{where}.content.{n}"
                    parts = self._parts(block.get("content"), f"{here}.content")
                    messages.tool(text_at(block, "tool_use_id", here), parts, failed=block.get("is_error") is True)
            content = [block for block in content if block.get("type") != "tool_result"]
        messages.user(self._parts(content, f"{where}.content"))

    def _assistant(self, messages: ChatHistory, message: JsonObject, where: str) -> None:
        content = message.get("content")
        if isinstance(content, str):
            messages.assistant(text=content)
            return
        messages.assistant()
        for n, block in enumerate(dicts_in(content, f"{where}.content")):
            here, kind = f"{where}.content.{n}", block.get("type")
            if kind == "text":
                messages.assistant(text=text_at(block, "text", here))
            elif kind == "thinking":
                messages.assistant(reasoning=text_at(block, "thinking", here))
            elif kind == "tool_use":
                arguments = spelled(dict_or_empty(block.get("input")))
                messages.assistant(
                    call=CallDraft(text_at(block, "id", here), text_at(block, "name", here), [arguments])
                )
            else:
                self._notes.append(f"left out of what the model said: {kind}")

    def _parts(self, content: object, where: str) -> list[Part]:
        """Content as chat has it. What chat has no shape for is named in its place, so that the model knows of it."""
        if isinstance(content, str):
            return [text_part(content)] if content else []
        parts = [self._part(block, f"{where}.{n}") for n, block in enumerate(dicts_in(content, where))]
        return [part for part in parts if part.get("text") != ""]

    def _part(self, block: JsonObject, where: str) -> Part:
        kind, source = block.get("type"), dict_or_empty(block.get("source"))
        if kind == "text":
            return text_part(text_at(block, "text", where))
        if kind == "image" and source.get("type") == "url":
            return image_part(text_at(source, "url", f"{where}.source"))
        if kind == "image" and source.get("type") == "base64":
            media, data = text_at(source, "media_type", f"{where}.source"), text_at(source, "data", f"{where}.source")
            return image_part(f"data:{media};base64,{data}")
        if kind == "document" and source.get("type") == "text":
            return text_part(text_at(source, "data", f"{where}.source"))
        if kind == "search_result":
            found = self._parts(block.get("content"), f"{where}.content")
            return text_part("\n".join([str(block.get("title", "")), *(part.get("text", "") for part in found)]))
        if kind == "tool_reference":
            return text_part(f"[tool: {block.get('tool_name')}]")
        self._notes.append(f"left out of the conversation: {kind}")
        return text_part(f"[{kind}: cannot be shown to this model]")

    def _tools(self) -> list[JsonObject]:
        tools: list[JsonObject] = []
        given = dicts_in(self._body.get("tools"), "tools")
        for n, tool in enumerate(given):
            # Everything else is run by Anthropic's servers, or has a schema that only Anthropic's models know.
            if tool.get("type") not in (None, "custom"):
                self._notes.append(f"tool left out: {tool.get('type')}")
                continue
            schema = tool.get("input_schema")
            function = {"name": text_at(tool, "name", f"tools.{n}"), "description": tool.get("description")}
            function |= {"parameters": schema if isinstance(schema, dict) else {"type": "object", "properties": {}}}
            function |= {"strict": tool["strict"]} if isinstance(tool.get("strict"), bool) else {}
            function = {name: value for name, value in function.items() if value is not None}
            tools.append({"type": "function", "function": function})
        if given and not tools:
            kinds = ", ".join(str(tool.get("type")) for tool in given)
            raise BadRequest(f"tools: this model has none of the provider's own tools ({kinds})", "tools")
        return tools

    def _tool_choice(self) -> JsonObject:
        choice = dict_or_empty(self._body.get("tool_choice"))
        if not choice:
            return {}
        kind = choice.get("type")
        if kind == "tool":
            function = {"name": text_at(choice, "name", "tool_choice")}
            chosen: JsonObject = {"tool_choice": {"type": "function", "function": function}}
        elif isinstance(kind, str) and kind in _CHOICES:
            chosen = {"tool_choice": _CHOICES[kind]}
        else:
            raise BadRequest("tool_choice.type: must be auto, any, tool or none", "tool_choice.type")
        if choice.get("disable_parallel_tool_use") is True:
            chosen["parallel_tool_calls"] = False
        return chosen


def token_count(body: JsonObject) -> bytes:
    """The answer to `POST /v1/messages/count_tokens`: an estimate from the length of what the model would be sent.

    Agents ask it to judge how full the context is, for which this will do. Raises BadRequest.
    """
    chat = AnthropicWire(body, model="").chat_request()
    length = len(encoded([chat["messages"], chat.get("tools", [])]))
    return encoded({"input_tokens": -(-length // BYTES_PER_TOKEN)})
