"""Reads a completion request: what was asked, in one value, or why an engine would refuse it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollcage.simulators.scripted.generation import Truncation
from rollcage.simulators.scripted.template import BadMessages, answers_in, prompt_ids
from rollcage.simulators.scripted.tokenizer import default_tokenizer
from rollcage.types import JsonObject

_AUXILIARY = ("You are a title generator", "You are a context summarization agent")


class Refused(Exception):
    """The engine answers with an error and samples nothing."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


@dataclass(frozen=True)
class ParsedRequest:
    """A request that can be answered."""

    body: JsonObject
    headers: Mapping[str, str]
    prompt: tuple[int, ...]
    turn: int
    """Which turn of the script it asks for: the number of answers that the conversation already holds."""
    chat: bool
    auxiliary: bool
    """A title or a summary for the agent's own use, which is no turn."""
    truncation: Truncation

    def wants(self, name: str) -> bool:
        """Whether a flag of the body is set."""
        return bool(self.body.get(name))

    @property
    def stream(self) -> bool:
        """Whether the answer is to come in chunks."""
        return self.wants("stream")

    @property
    def ids(self) -> bool:
        """Whether token ids were asked for, and vLLM would show them."""
        return self.wants("return_token_ids") and self.body.get("include_reasoning", True) is not False

    @property
    def top(self) -> int | None:
        """How many candidates per token; None: no logprobs at all."""
        if self.body.get("include_reasoning", True) is False:
            return None
        if not self.chat:
            return _integer(self.body, "logprobs")
        return (_integer(self.body, "top_logprobs") or 0) if self.wants("logprobs") else None

    @property
    def usage(self) -> bool:
        """Whether the stream ends with a count of tokens."""
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    @property
    def running_usage(self) -> bool:
        """Whether each chunk carries the count so far."""
        return self.usage and bool(self.body["stream_options"].get("continuous_usage_stats"))

    @property
    def named_tool(self) -> bool:
        """Whether the request says which tool to call."""
        return isinstance(self.body.get("tool_choice"), dict)

    @property
    def forced_tool(self) -> bool:
        """Whether the request says that a tool must be called."""
        return self.named_tool or self.body.get("tool_choice") == "required"

    @property
    def choices(self) -> int:
        """How many answers."""
        return _integer(self.body, "n") or 1

    @property
    def seed(self) -> bytes:
        """The same for the same request."""
        return self.truncation.seed

    def portions(self, index: int, interval: int | None) -> Truncation:
        """How one choice is cut into chunks; `interval` overrules where the engine has a fixed number of tokens."""
        seed = self.seed + index.to_bytes(2, "big")
        return replace(self.truncation, seed=seed, interval=interval or self.truncation.interval)


def read_request(
    raw: bytes, body: JsonObject, headers: Mapping[str, str], *, chat: bool, given_prompt: Any = None
) -> ParsedRequest:
    """What a body asks for. Raises Refused, worded as vLLM would. `given_prompt`: ids that a chat brings itself."""
    _check(body, chat=chat)
    if chat:
        prompt, turn, auxiliary = _chat_prompt(body)
        if given_prompt is not None and _only_text(body["messages"]):
            prompt = _given_ids(given_prompt)
    else:
        prompt = _plain_prompt(body.get("prompt"))
        turn, auxiliary = answers_in(prompt), False
    stop = body.get("stop") or ()
    truncation = Truncation(
        max_tokens=_integer(body, "max_completion_tokens") or _integer(body, "max_tokens"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.get("stop_token_ids") or ()),
        keep_stop=bool(body.get("include_stop_str_in_output")),
        interval=_integer(body, "stream_interval"),
        seed=hashlib.blake2b(raw, digest_size=16).digest(),
    )
    return ParsedRequest(body, headers, tuple(prompt), turn, chat, auxiliary, truncation)


def _chat_prompt(body: JsonObject) -> tuple[list[int], int, bool]:
    messages, tools = body["messages"], body.get("tools") or ()
    try:
        prompt = prompt_ids(messages, () if body.get("tool_choice") == "none" else tools)
    except BadMessages as error:
        raise Refused(400, str(error), param="messages") from error
    turn = sum(1 for message in messages if message["role"] == "assistant")
    first = messages[0].get("content")
    auxiliary = not tools and isinstance(first, str) and first.lstrip().startswith(_AUXILIARY)
    return prompt, turn, auxiliary


def _only_text(messages: list[Any]) -> bool:
    """Beside anything else vLLM looks at the messages after all."""
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    return all(isinstance(part, str) or part.get("type") == "text" for part in parts)


def _given_ids(ids: Any) -> list[int]:
    size = default_tokenizer().size
    if not isinstance(ids, list) or not ids or not all(type(id) is int and 0 <= id < size for id in ids):
        message = f"prompt_token_ids must be a non-empty list of token ids from 0 to {size - 1}"
        raise Refused(400, message, param="prompt_token_ids")
    return ids


def _plain_prompt(prompt: Any) -> list[int]:
    size = default_tokenizer().size
    match prompt:
        case str() | [str()]:
            text = prompt if isinstance(prompt, str) else prompt[0]
            return default_tokenizer().encode(text, specials=True)
        case [[*ids]] | [*ids] if ids and all(type(id) is int and 0 <= id < size for id in ids):
            return ids
        case _:
            raise Refused(400, "prompt must be one text or one list of token ids of this model", param="prompt")


def _check(body: JsonObject, *, chat: bool) -> None:
    if chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refused(400, "messages: a list with at least one message is required", param="messages")
        if not isinstance(body.get("tools") or [], list):
            raise Refused(400, "tools: a list is required", param="tools")
        if body.get("top_logprobs") and not body.get("logprobs"):
            raise Refused(400, "when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
        if body.get("tool_choice") not in (None, "none", "auto") and not body.get("tools"):
            raise Refused(400, "When using `tool_choice`, `tools` must be set.", param="tool_choice")
    for name, least in (("max_tokens", 1), ("max_completion_tokens", 1), ("n", 1), ("stream_interval", 1)):
        value = _integer(body, name)
        if value is not None and value < least:
            raise Refused(400, f"{name} must be at least {least}, got {value}.", param=name)
    top = _integer(body, "top_logprobs" if chat else "logprobs")
    if top is not None and not 0 <= top <= 20:
        raise Refused(400, f"logprobs: {top} per token were asked for, 0 to 20 are possible", param="logprobs")
    options = body.get("stream_options")
    if options is not None and not (isinstance(options, dict) and body.get("stream")):
        raise Refused(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
    stop = body.get("stop") or []
    if not isinstance(stop, str) and not (isinstance(stop, list) and all(isinstance(s, str) and s for s in stop)):
        raise Refused(400, "stop: a text or a list of texts that are not empty", param="stop")


def _integer(body: JsonObject, name: str) -> int | None:
    value = body.get(name)
    if name == "logprobs" and isinstance(value, bool):
        return None
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise Refused(400, f"{name}: Input should be a valid integer", param=name)
    return value
