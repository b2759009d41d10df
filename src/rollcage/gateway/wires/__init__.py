"""The protocols that agents speak: chat, Anthropic's Messages, OpenAI's Responses. All engines are asked in chat."""

from __future__ import annotations

from rollcage.gateway.wires.anthropic import AnthropicWire, token_count
from rollcage.gateway.wires.base import BadRequest, Wire
from rollcage.gateway.wires.chat import ChatWire
from rollcage.gateway.wires.responses import ResponsesWire
from rollcage.types import JsonObject

__all__ = ["COUNT_PATH", "PATHS", "BadRequest", "ChatWire", "Wire", "token_count", "wire_for"]

PATHS = ("/v1/messages", "/v1/responses")
"""What is translated."""
COUNT_PATH = "/v1/messages/count_tokens"
"""What `token_count` answers; no model is asked."""


def wire_for(path: str, body: JsonObject, *, model: str, id: str = "", created: int = 0) -> Wire | None:
    """The wire that a request came on; None where it needs no translation.

    `model` is what the engine is asked for; answers bear the name that the agent asked for. `id` and `created` (Unix
    time) name and date the answer; without them they are those of the engine's answer.
    """
    path = path.partition("?")[0]
    if path == "/v1/messages":
        return AnthropicWire(body, model=model, id=id)
    if path == "/v1/responses":
        return ResponsesWire(body, model=model, id=id, created=created)
    return None
