"""The older route, `/v1/completions`: raw text, parsers not at work. Shapes of vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollcage.simulators.scripted.generation import Sampled
from rollcage.simulators.scripted.scores import Score
from rollcage.simulators.scripted.shapes import FINGERPRINT, Event, Reply, Shapes
from rollcage.simulators.scripted.tokenizer import default_tokenizer
from rollcage.types import JsonObject


def completion_stream(shapes: Shapes, reply: Reply) -> Iterator[Event]:
    """Every event of a stream but the last, `[DONE]`."""
    asked = reply.asked
    for index in range(asked.choices):
        for piece in shapes.pieces(reply, index):
            scores = reply.scores[piece.first : piece.first + len(piece.tokens)]
            choice = _choice(shapes, reply, index, piece.content, piece.tokens)
            choice["logprobs"] = _logprobs(shapes, reply, scores, _offset(reply, piece.first))
            if piece.end is None:
                choice |= {"finish_reason": None, "stop_reason": None}
            if piece.first and shapes.sends_ids:
                choice["prompt_token_ids"] = None
            count = piece.first + len(piece.tokens)
            usage = shapes.usage(reply, count) if asked.running_usage else None
            yield Event({**_head(reply), "choices": [choice], "usage": usage})
    if asked.usage:
        usage = shapes.usage(reply, shapes.completion_tokens(reply))
        yield Event({**_head(reply), "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT})


def completion_response(shapes: Shapes, reply: Reply) -> JsonObject:
    """The answer to a request that does not stream."""
    tokens = reply.answer.tokens[: reply.end.tokens]
    choices = []
    for index in range(reply.asked.choices):
        choice = _choice(shapes, reply, index, reply.visible("content"), tokens)
        choice["logprobs"] = _logprobs(shapes, reply, reply.scores, 0)
        choices.append(choice | {"prompt_logprobs": None, "routed_experts": None})
    usage = shapes.usage(reply, shapes.completion_tokens(reply))
    return {
        **_head(reply),
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": {**usage, "prompt_tokens_details": None, "completion_tokens_details": None},
        "kv_transfer_params": None,
    }


def _head(reply: Reply) -> JsonObject:
    return {"id": f"cmpl-{reply.id}", "object": "text_completion", "created": reply.created, "model": reply.model}


def _choice(shapes: Shapes, reply: Reply, index: int, text: str, tokens: Sequence[Sampled]) -> JsonObject:
    # The raw text has no tool calls in it, whatever it looks like.
    finish = "stop" if reply.end.finish_reason == "tool_calls" else reply.end.finish_reason
    choice: JsonObject = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
    choice["stop_reason"] = reply.end.stop_reason
    if shapes.sends_ids:
        choice["token_ids"] = [token.id for token in tokens] if reply.asked.ids else None
        choice["prompt_token_ids"] = list(reply.asked.prompt) if reply.asked.ids else None
    return choice


def _offset(reply: Reply, first: int) -> int:
    return reply.answer.tokens[first - 1].end if first else 0


def _logprobs(shapes: Shapes, reply: Reply, scores: Sequence[Score], offset: int) -> JsonObject | None:
    top = reply.asked.top
    if top is None:
        return None
    as_ids = reply.asked.wants("return_tokens_as_token_ids")
    out: JsonObject = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for score in scores:
        if score.id == default_tokenizer().eos and not shapes.counts_end:
            continue
        entry = shapes.candidate(score.id, score.logprob, as_ids=as_ids)
        # This route counts the sampled token besides the number of candidates that was asked for.
        others = [shapes.candidate(id, logprob, as_ids=as_ids) for id, logprob in score.others[:top]]
        out["text_offset"].append(offset)
        out["token_logprobs"].append(score.logprob)
        out["tokens"].append(entry["token"])
        out["top_logprobs"].append({one["token"]: one["logprob"] for one in (entry, *others)})
        offset += len(entry["token"])
    return out
