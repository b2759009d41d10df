"""Prompts that continue the sampled tokens: pure. Ids of earlier turns stay as they were, under the new messages' ids.

A chat template makes other ids of an answer that comes back than those that were sampled: text splits in another way,
JSON is written anew, thoughts are left out. Here the ids of each answer are kept under a key of the conversation that
led to it. When a later request holds that conversation, its prompt is those ids and what the template made of the rest.
Where the seam is not certain, there is no such prompt.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

from rollcage.gateway.message import object_in
from rollcage.types import JsonObject, Turn, TurnHistory

MOST_IDS = 16 << 20
"""Ids that are kept of one rollout; beyond that all are forgotten, and the next prompt is the template's."""
_MAKE_PROMPTS = ("tools", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort")
"""What a prompt is made of beside the messages."""


class Seam(NamedTuple):
    """How an engine's template ends an answer."""

    end: int
    """The token that the model ends an answer with."""
    after: tuple[int, ...]
    """What the template puts behind it, before the next message."""
    text: str
    """How the end token is spelled: an answer that has it as text cannot be told from two."""


def seam_of(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """What two conversations end with that differ in the last word of their answers; the first is the end token."""
    same = 0
    while same < min(len(one), len(other)) and one[-1 - same] == other[-1 - same]:
        same += 1
    return tuple(one[len(one) - same :])


@dataclass(frozen=True)
class Answered:
    """A turn whose ids are kept: what its prompt adds to those of the turn that it continues, and its answer."""

    index: int
    parent: Answered | None
    own: array[int]
    ends: int
    """End tokens in its prompt, as the template makes it."""
    whole: bool
    """Whether it ended by itself, and so with an end token."""
    said: tuple[bytes, ...]
    """Digests of what the agent was told, one for each of `PARTS`."""
    thought: str = ""

    def ids(self) -> list[int]:
        """Its prompt and its answer."""
        parts, answered = [self.own], self.parent
        while answered is not None:
            parts.append(answered.own)
            answered = answered.parent
        return [id for part in reversed(parts) for id in part]


@dataclass(frozen=True)
class PromptPlan:
    """What is to be a request's prompt, and what is needed to keep the answer to it."""

    note: TurnHistory
    ids: list[int]
    """To be sent as the prompt; empty: the engine makes its own."""
    rendered: Sequence[int]
    """The prompt as the template makes it."""
    key: bytes
    """Stands for the request's conversation."""
    ends: int
    stops: bool
    """Whether the answer may end otherwise than by itself."""
    parent: Answered | None = None

    def plain(self, reason: str) -> PromptPlan:
        """The same request with the prompt that the engine makes."""
        return replace(self, note=TurnHistory(reason=reason), ids=[], parent=None)


class History:
    """The ids of one rollout's turns, by the conversations that led to them."""

    def __init__(self) -> None:
        self._known: dict[bytes, Answered] = {}
        self._size = 0

    def plan(self, request: JsonObject, rendered: Sequence[int], seam: Seam) -> PromptPlan:
        """The prompt of a request that `refused` has nothing against. `rendered`: what the template makes of it."""
        keys = _keys(request)
        stops = any(request.get(name) for name in ("stop", "stop_token_ids", "ignore_eos"))
        plan = PromptPlan(TurnHistory(), [], rendered, keys[-1], list(rendered).count(seam.end), stops)
        found = self._answers(request, keys)
        if not found:
            spoken = any(message.get("role") == "assistant" for message in request["messages"])
            return plan.plain("no answer in it is as the model gave it" if spoken else "it begins a conversation")
        at, known = found[-1]
        message = request["messages"][at]
        if any(seam.text in text for text in _answer_texts(request["messages"][: at + 1], found)):
            return plan.plain("an answer in it spells the end token")
        cut = _after(rendered, seam.end, known.ends + 1)
        if cut is None or tuple(rendered[cut : cut + len(seam.after)]) != seam.after:
            return plan.plain("the template's prompt has no seam where that answer ends")
        ids = known.ids()
        kept, ended = len(ids), ids[-1] == seam.end
        if known.whole and not ended:
            return plan.plain("that answer ended with another token than the template's")
        if not ended:
            ids.append(seam.end)
        ids += rendered[cut:]
        told = zip(PARTS, known.said, _said(message), strict=True)
        note = TurnHistory(
            exact=True,
            turn=known.index,
            kept=kept,
            rendered=len(rendered),
            differs_at=_first_difference(ids, rendered),
            changed=tuple(name for name, was, now in told if was != now),
        )
        return replace(plan, note=note, ids=ids, parent=known)

    def learn(self, plan: PromptPlan, turn: Turn) -> TurnHistory:
        """Keep a whole turn's ids, where its prompt was the one that was planned. What there is to say of it."""
        if not turn.trainable:
            return plan.note
        if list(turn.prompt_ids) != list(plan.ids or plan.rendered):
            sent = "that was sent" if plan.ids else "that it tells of when it is asked"
            return TurnHistory(reason=f"the engine's prompt is not the one {sent}")
        parent = plan.parent
        begun = plan.note.kept if parent is not None else 0
        own = array("i", turn.prompt_ids[begun:])
        own.extend(token.id for token in turn.tokens if token.id is not None)
        if self._size + len(own) > MOST_IDS:
            self._known, self._size = {}, 0
            parent, own = None, array("i", turn.prompt_ids[:begun]) + own
        self._size += len(own)
        thought = turn.message.get("reasoning_content")
        self._known[_next(plan.key, turn.message)] = Answered(
            index=turn.index,
            parent=parent,
            own=own,
            ends=plan.ends,
            whole=turn.finish_reason != "length" and not plan.stops,
            said=_said(turn.message),
            thought=thought if isinstance(thought, str) else "",
        )
        return plan.note

    def thoughts(self, request: JsonObject) -> tuple[JsonObject, JsonObject] | None:
        """A request with the thoughts of all known answers in it, and without them; None where they had none.

        A template that makes the same of both leaves them out.
        """
        found = [(at, known) for at, known in self._answers(request, _keys(request)) if known.thought]
        if not found:
            return None
        full, bare = list(request["messages"]), list(request["messages"])
        for at, known in found:
            bare[at] = {name: value for name, value in full[at].items() if name not in _THOUGHTS}
            full[at] = bare[at] | {"reasoning": known.thought, "reasoning_content": known.thought}
        return {**request, "messages": full}, {**request, "messages": bare}

    def _answers(self, request: JsonObject, keys: Sequence[bytes]) -> list[tuple[int, Answered]]:
        """The answers in a request whose ids are kept, and where they are in it."""
        places = [at for at, message in enumerate(request["messages"]) if message.get("role") == "assistant"]
        return [(at, known) for at in places if (known := self._known.get(keys[at + 1])) is not None]


def refused(request: JsonObject) -> str:
    """Why a request's prompt is not given as ids; empty where it may be."""
    messages = request.get("messages")
    if "prompt" in request or not isinstance(messages, list):
        return "it is no chat"
    if not all(isinstance(message, dict) and _is_text(message.get("content")) for message in messages):
        return "not all of its messages are text"
    if request.get("continue_final_message") or request.get("add_generation_prompt") is False:
        return "it continues a message"
    return "it asks for several answers" if request.get("n") not in (None, 1) else ""


def _encode(value: object) -> bytes:
    # The standard library's: half a character, which a model may write in JSON, is nothing to stumble over.
    return json.dumps(value, sort_keys=True).encode()


PARTS = ("content", "arguments", "reasoning")
"""What of an answer may come back in other words without being another answer."""
_THOUGHTS = ("reasoning", "reasoning_content")


def _said(message: JsonObject) -> tuple[bytes, ...]:
    thought = message.get("reasoning") or message.get("reasoning_content") or ""
    told = (_text(message.get("content")), [call[1] for call in _calls(message)], thought)
    return tuple(blake2b(_encode(part), digest_size=8).digest() for part in told)


def _keys(request: JsonObject) -> list[bytes]:
    """One for each beginning of the conversation, the empty one included."""
    beside = {name: request[name] for name in _MAKE_PROMPTS if request.get(name)}
    key = blake2b(_encode([beside, request.get("tool_choice") == "none"]), digest_size=16).digest()
    keys = [key]
    for message in request["messages"]:
        keys.append(_next(keys[-1], message))
    return keys


def _next(key: bytes, message: JsonObject) -> bytes:
    """A conversation with one more message. Blanks around an answer, how its JSON is written, its thoughts and the
    names of its calls make no difference: agents change them.
    """
    text = _text(message.get("content"))
    if message.get("role") == "assistant":
        text = text.strip()
    calls = [[name, _meant(arguments)] for name, arguments in _calls(message)]
    return blake2b(_encode([message.get("role"), text, calls]), digest_size=16, key=key).digest()


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)
    return content if isinstance(content, str) else ""


def _is_text(content: object) -> bool:
    if not isinstance(content, list):
        return content is None or isinstance(content, str)
    return all(isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in content)


def _calls(message: JsonObject) -> list[tuple[str, str]]:
    """Names and arguments, as they are written."""
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [
        (str(function.get("name", "")), arguments if isinstance(arguments, str) else _encode(arguments).decode())
        for function in functions
        if isinstance(function, dict)
        for arguments in (function.get("arguments") or "",)
    ]


def _meant(arguments: str) -> object:
    """What arguments say, however they are written."""
    value = object_in(arguments)
    return arguments if value is None else _plain_numbers(value)


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain_numbers(each) for each in value]
    return {name: _plain_numbers(each) for name, each in value.items()} if isinstance(value, dict) else value


def _answer_texts(messages: Sequence[JsonObject], found: Sequence[tuple[int, Answered]]) -> Iterator[str]:
    """All that a template may put, or once have put, into the answers of a conversation."""
    yield from (known.thought for _, known in found)
    for message in messages:
        if message.get("role") == "assistant":
            yield _text(message.get("content"))
            yield from (thought for name in _THOUGHTS if isinstance(thought := message.get(name), str))
            yield from (text for call in _calls(message) for text in call)


def _after(ids: Sequence[int], end: int, count: int) -> int | None:
    """Where the ids behind the end token of that number begin; None where there are not so many."""
    at = -1
    try:
        for _ in range(count):
            at = ids.index(end, at + 1)
    except ValueError:
        return None
    return at + 1


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return None if at == len(one) == len(other) else at
