"""Builds the messages of a chat request so that the strictest chat templates take them.

One system message, at the start; no two messages of one role in a row (but tool results); text as plain strings.
What is built depends only on what came before, so a longer conversation begins with the messages of a shorter one.
"""

from __future__ import annotations

from rollcage.gateway.message import CallDraft
from rollcage.types import JsonObject

BREAK = "\n\n"
"""Between pieces of text that were separate blocks."""
IMAGE_FOLLOWS = "[image: shown in the next message]"
"""Stands in a tool's result for its image: only users may send images."""

Part = JsonObject
"""A content part of chat completions: text or image."""


class ChatHistory:
    """A conversation in the making."""

    def __init__(self) -> None:
        self._messages: list[JsonObject] = []
        self._images: list[Part] = []

    def value(self) -> list[JsonObject]:
        """The messages so far."""
        self._flush()
        return self._messages

    def system(self, text: str) -> None:
        """Words of whoever runs the agent. In mid-conversation, where templates refuse them, a tagged user message."""
        if not text:
            return
        if self._messages and self._messages[-1]["role"] != "system":
            self.user([text_part(f"<system-reminder>\n{text}\n</system-reminder>")])
        elif self._messages:
            self._messages[-1]["content"] += BREAK + text
        else:
            self._messages.append({"role": "system", "content": text})

    def user(self, parts: list[Part]) -> None:
        """What the user says or shows."""
        parts = [*self._images, *parts]
        self._images = []
        if not parts:
            return
        if self._messages and self._messages[-1]["role"] == "user":
            parts = _parts(self._messages.pop()["content"]) + parts
        self._messages.append({"role": "user", "content": _content(parts)})

    def assistant(self, *, text: str = "", reasoning: str = "", call: CallDraft | None = None) -> None:
        """A piece of what the model said; consecutive pieces are one message."""
        self._flush()
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": ""})
        message = self._messages[-1]
        message["content"] += text
        if reasoning:
            message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
        if call is not None:
            message.setdefault("tool_calls", []).append(call.value())

    def tool(self, call_id: str, parts: list[Part], *, failed: bool = False) -> None:
        """The result of a tool call."""
        texts = [part["text"] if part["type"] == "text" else IMAGE_FOLLOWS for part in parts]
        self._images += [part for part in parts if part["type"] != "text"]
        content = BREAK.join(texts)
        if failed and not content.lstrip().lower().startswith(("error", "<tool_use_error>")):
            content = f"Error: {content}" if content else "Error"
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _flush(self) -> None:
        if self._images:
            self.user([])


def text_part(text: str) -> Part:
    """Text as a content part."""
    return {"type": "text", "text": text}


def image_part(url: str, detail: str | None = None) -> Part:
    """An image as a content part: an address, or the image itself as a `data:` URL."""
    return {"type": "image_url", "image_url": {"url": url, "detail": detail} if detail else {"url": url}}


def _parts(content: str | list[Part]) -> list[Part]:
    return [text_part(content)] if isinstance(content, str) else content


def _content(parts: list[Part]) -> str | list[Part]:
    if all(part["type"] == "text" for part in parts):
        return BREAK.join(part["text"] for part in parts)
    return parts
