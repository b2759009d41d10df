"""The scripted model's chat template: ChatML with tools. Messages in, the real ids of the prompt out.

Each segment is tokenized by itself, so that a longer conversation's prompt starts with the ids of the shorter one's,
and an answer that comes back unchanged has the ids it was sampled with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from rollcage.simulators.scripted.tokenizer import default_tokenizer

TAGS = default_tokenizer().specials

Segment = str | int
"""Ordinary text, or the id of a special token."""


class Call(NamedTuple):
    """A tool call as the model writes it."""

    name: str
    arguments: str


class BadMessages(ValueError):
    """Messages that no chat template could render."""


def call_text(call: Call) -> str:
    """What stands between the tags of a tool call."""
    return f'\n{{"name": {dump(call.name)}, "arguments": {call.arguments}}}\n'


def dump(value: Any) -> str:
    """JSON the way chat templates and vLLM write it."""
    return json.dumps(value, ensure_ascii=False)


def answer_segments(reasoning: str, content: str, calls: Iterable[Call]) -> list[Segment]:
    """An assistant message as it is sampled, the end token included."""
    segments: list[Segment] = []
    if reasoning:
        segments += [TAGS["<think>"], reasoning, TAGS["</think>"]]
    segments.append(content)
    for n, call in enumerate(calls):
        if n:
            segments.append("\n")
        segments += [TAGS["<tool_call>"], call_text(call), TAGS["</tool_call>"]]
    segments.append(TAGS["<|im_end|>"])
    return segments


def prompt_ids(messages: Sequence[Any], tools: Sequence[Any] = (), *, generate: bool = True) -> list[int]:
    """Ids of the whole prompt; with `generate`, it ends where the assistant begins to speak."""
    segments: list[Segment] = []
    rest = list(messages)
    if tools:
        first = rest.pop(0) if rest and _role(rest[0]) == "system" else {"content": ""}
        text = _text(first.get("content"))
        _block(segments, "system", [f"{text}\n\n" if text else "", _tools_text(tools)])
    for message in rest:
        _message(segments, message)
    if generate:
        segments += [TAGS["<|im_start|>"], "assistant\n"]
    ids: list[int] = []
    for segment in segments:
        ids.extend((segment,) if isinstance(segment, int) else segment_ids(segment))
    return ids


@lru_cache(maxsize=256)
def segment_ids(text: str) -> tuple[int, ...]:
    """Ids of one segment; agents send the same long system prompt and tools with every turn."""
    return tuple(default_tokenizer().encode(text))


def answers_in(ids: Sequence[int]) -> int:
    """How many assistant messages a rendered prompt already holds."""
    header = (TAGS["<|im_start|>"], *segment_ids("assistant\n"))
    starts = sum(1 for at in range(len(ids)) if tuple(ids[at : at + len(header)]) == header)
    return max(0, starts - 1)


def _message(segments: list[Segment], message: Any) -> None:
    role = _role(message)
    content = _text(message.get("content"))
    if role == "assistant":
        reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
        calls = [_call(call) for call in message.get("tool_calls") or ()]
        segments += [TAGS["<|im_start|>"], "assistant\n", *answer_segments(_text(reasoning), content, calls), "\n"]
    elif role == "tool":
        _block(segments, "user", ["<tool_response>\n", content, "\n</tool_response>"])
    else:
        _block(segments, role, [content])


def _block(segments: list[Segment], role: str, texts: Iterable[str]) -> None:
    segments += [TAGS["<|im_start|>"], f"{role}\n", *texts, TAGS["<|im_end|>"], "\n"]


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise BadMessages("each message is an object with a role")
    return "system" if role == "developer" else role


def _text(content: Any) -> str:
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "".join(_part(part) for part in content)
        case _:
            raise BadMessages("content is neither text nor a list of parts")


def _part(part: Any) -> str:
    match part:
        case str() as text:
            return text
        case {"text": str() as text}:
            return text
        case {"type": str() as kind}:
            return f"[{kind}]"
        case _:
            raise BadMessages("a part of a message's content has no type")


def _call(call: Any) -> Call:
    match call:
        case {"function": {"name": str() as name, **rest}}:
            arguments = rest.get("arguments") or "{}"
        case _:
            raise BadMessages("a tool call has no function with a name")
    if not isinstance(arguments, str):
        return Call(name, dump(arguments))
    try:
        return Call(name, dump(json.loads(arguments)))
    except ValueError:
        return Call(name, arguments)


def _tools_text(tools: Sequence[Any]) -> str:
    lines = "\n".join(dump(tool) for tool in tools)
    return (
        "# Tools\n\nEach line below describes one function you can call.\n"
        f"<tools>\n{lines}\n</tools>\n\n"
        "Call a function by writing its name and its arguments as one JSON object between tags:\n"
        '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
    )
