"""A whole answer as the stream it would have been, for agents that stream before engines that tell all only at the end.

Pure. The chunks say what the whole answer says, in the order in which engines send it: who speaks, what it thought,
what it said, what it calls, why it ended, what it cost.
"""

from __future__ import annotations

from rollcage.types import JsonObject

_HEAD = ("id", "created", "model", "service_tier", "system_fingerprint")
_THOUGHTS = ("reasoning_content", "reasoning")
_ENDINGS = ("stop_reason", "matched_stop")


def chunks_of(answer: JsonObject, *, usage: bool) -> list[JsonObject]:
    """The chunks of a stream that amounts to this answer. `usage`: whether its count is to be among them."""
    choices = [choice for choice in _list(answer.get("choices")) if isinstance(choice, dict)]
    head = {name: answer[name] for name in _HEAD if answer.get(name) is not None}
    text = str(answer.get("object", "")).startswith("text_completion")
    head["object"] = "text_completion" if text else "chat.completion.chunk"
    if answer.get("error"):
        return [{"error": answer["error"]}]
    pieces = [piece for choice in choices for piece in (_text(choice) if text else _chat(choice))]
    chunks = [{**head, "choices": [piece]} for piece in pieces]
    if usage and answer.get("usage") is not None:
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    return chunks


def _chat(choice: JsonObject) -> list[JsonObject]:
    message = choice.get("message")
    said: JsonObject = message if isinstance(message, dict) else {}
    deltas: list[JsonObject] = [{"role": said.get("role") or "assistant", "content": ""}]
    thought = {name: said[name] for name in _THOUGHTS if said.get(name)}
    if thought:
        deltas.append(thought)
    deltas += [{name: said[name]} for name in ("content", "refusal") if said.get(name)]
    for place, call in enumerate(_list(said.get("tool_calls"))):
        if isinstance(call, dict):
            deltas.append({"tool_calls": [{**call, "index": place}]})
    index = choice.get("index") or 0
    pieces: list[JsonObject] = [{"index": index, "delta": delta, "finish_reason": None} for delta in deltas]
    # Not beside the text: where all the tokens are told at once, they belong to no piece in particular.
    if choice.get("logprobs") is not None:
        pieces[-1]["logprobs"] = choice["logprobs"]
    return [*pieces, {"index": index, "delta": {}, **_ending(choice)}]


def _text(choice: JsonObject) -> list[JsonObject]:
    index = choice.get("index") or 0
    piece = {"index": index, "text": choice.get("text") or "", "finish_reason": None}
    if choice.get("logprobs") is not None:
        piece["logprobs"] = choice["logprobs"]
    return [piece, {"index": index, "text": "", **_ending(choice)}]


def _ending(choice: JsonObject) -> JsonObject:
    known = {name: choice[name] for name in _ENDINGS if name in choice}
    return {"finish_reason": choice.get("finish_reason"), **known}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
