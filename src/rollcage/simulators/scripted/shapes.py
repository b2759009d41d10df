"""Answers in the exact shapes of vLLM 0.32.0, chunk by chunk and whole. Other engines vary these: see profiles."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple

from rollcage.simulators.scripted.generation import Answer, End, Piece, pieces
from rollcage.simulators.scripted.request import ParsedRequest, Refused
from rollcage.simulators.scripted.scores import Score
from rollcage.simulators.scripted.tokenizer import default_tokenizer
from rollcage.types import JsonObject

FINGERPRINT = "rollcage-scripted-1"
"""Says in every whole answer that no model was behind it."""


class Event(NamedTuple):
    """One server-sent event."""

    data: JsonObject
    name: str = ""


@dataclass(frozen=True)
class Reply:
    """All there is to say to one request; the engines differ in how they say it."""

    asked: ParsedRequest
    model: str
    answer: Answer
    end: End
    scores: Sequence[Score]
    id: str
    created: int

    @property
    def reasoned(self) -> bool:
        """Whether it thought first."""
        return any(span.kind == "reasoning" for span in self.answer.spans)

    @property
    def parsed(self) -> bool:
        """Whether an engine's parsers look at this answer."""
        return bool(self.asked.body.get("tools") or self.answer.calls or self.reasoned)

    def visible(self, kind: str) -> str:
        """What an answer that comes whole shows of one kind of text."""
        spans = (span for span in self.answer.spans if span.kind == kind)
        return "".join(self.answer.text[span.start : min(span.end, self.end.visible)] for span in spans)

    def tool_id(self, index: int, call: int) -> str:
        """A call's id: the same for the same request, different within a conversation."""
        return blake2b(self.asked.seed + bytes((index % 256, call % 256)), digest_size=8).hexdigest()


class Shapes:
    """vLLM 0.32.0. A subclass says where another engine differs."""

    name: ClassVar[str] = "vllm-0.32"
    version: ClassVar[str] = "0.32.0"
    owner: ClassVar[str] = "vllm"
    """How the engine signs its list of models."""
    reasoning_fields: ClassVar[tuple[str, ...]] = ("reasoning",)
    interval: ClassVar[int | None] = None
    """Tokens per chunk, where the engine has a fixed number."""
    counts_end: ClassVar[bool] = True
    """Whether the end token is counted and has a score."""
    tool_id_prefix: ClassVar[str] = "chatcmpl-tool-"
    sends_ids: ClassVar[bool] = True
    """Whether choices carry token ids."""

    def about(self, path: str) -> JsonObject | None:
        """What the engine says of itself on a path beside `/v1`; None where it has no such path."""
        return {"version": self.version} if path == "/version" else None

    def given_prompt(self, body: JsonObject) -> Any:
        """The prompt's ids, where a chat request gives them itself; None where it does not."""
        given = body.get("kv_transfer_params")
        return given.get("prompt_token_ids") if isinstance(given, dict) else None

    def check(self, body: JsonObject, headers: Mapping[str, str], model: str) -> None:
        """Raise Refused for what this engine refuses and vLLM does not."""

    def error(self, refused: Refused) -> JsonObject:
        """The body of an error."""
        kinds = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError"}
        kinds |= {500: "InternalServerError", 503: "ServiceUnavailableError"}
        kind = kinds.get(refused.status, "BadRequestError" if refused.status < 500 else "InternalServerError")
        code = refused.status if refused.code is None else refused.code
        return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": code}}

    # A stream

    def stream(self, reply: Reply) -> Iterator[Event]:
        """Every event of a stream but the last, `[DONE]`."""
        indices = range(reply.asked.choices)
        for index in indices:
            yield Event(self.role_chunk(reply, index))
        chance = random.Random(reply.asked.seed)  # noqa: S311 - the order only has to be reproducible
        open_streams = {index: self.choice_chunks(reply, index) for index in indices}
        while open_streams:
            index = chance.choice(list(open_streams))
            chunk = next(open_streams[index], None)
            if chunk is None:
                del open_streams[index]
            else:
                yield Event(chunk)
        if reply.asked.usage:
            yield Event(self.usage_chunk(reply))

    def role_chunk(self, reply: Reply, index: int) -> JsonObject:
        """The first chunk of a choice: no token yet, but the prompt's ids."""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        chunk = self.chunk(reply, {**choice, "finish_reason": None}, tokens=0)
        return {**chunk, **self.prompt_fields(reply)}

    def prompt_fields(self, reply: Reply) -> JsonObject:
        """What is told about the prompt."""
        asked = reply.asked
        ids = list(asked.prompt) if asked.wants("return_token_ids") else None
        text = default_tokenizer().decode(asked.prompt) if asked.wants("return_prompt_text") else None
        return {"prompt_token_ids": ids, "prompt_text": text}

    def choice_chunks(self, reply: Reply, index: int) -> Iterator[JsonObject]:
        """Every later chunk of one choice."""
        for piece in self.pieces(reply, index):
            choice = self.choice(reply, index, piece)
            if choice is not None:
                yield self.chunk(reply, choice, tokens=piece.first + len(piece.tokens))

    def pieces(self, reply: Reply, index: int) -> Iterator[Piece]:
        """The answer in portions."""
        return pieces(reply.answer, reply.end, reply.asked.portions(index, self.interval))

    def choice(self, reply: Reply, index: int, piece: Piece) -> JsonObject | None:
        """One entry of `choices`; None where the engine sends nothing for these tokens."""
        delta = self.delta(reply, index, piece)
        if not delta and piece.end is None and not self.sends_silent(reply):
            return None
        choice: JsonObject = {"index": index, "delta": delta, "logprobs": self.logprobs(reply, piece)}
        choice["finish_reason"] = piece.end.finish_reason if piece.end else None
        if piece.end:
            choice["stop_reason"] = piece.end.stop_reason
        if self.sends_ids:
            choice["token_ids"] = [token.id for token in piece.tokens] if reply.asked.ids else None
        return choice

    def sends_silent(self, reply: Reply) -> bool:
        """Whether tokens that a parser swallowed still get a chunk."""
        return reply.asked.ids or reply.asked.top is not None

    def delta(self, reply: Reply, index: int, piece: Piece) -> JsonObject:
        """What a client sees of a portion."""
        delta: JsonObject = {}
        if piece.reasoning and reply.asked.body.get("include_reasoning", True) is not False:
            delta.update(dict.fromkeys(self.reasoning_fields, piece.reasoning))
        if piece.content or piece.calls:
            delta["content"] = piece.content or None
        if piece.calls:
            delta["tool_calls"] = [self.call_delta(reply, index, *call) for call in piece.calls]
        return delta

    def call_delta(self, reply: Reply, index: int, kind: str, call: int, text: str) -> JsonObject:
        """One entry of a delta's `tool_calls`."""
        if kind == "arguments":
            return {"index": call, "function": {"arguments": text}}
        id = self.tool_id_prefix + reply.tool_id(index, call)
        return {"id": id, "type": "function", "index": call, "function": {"name": text}}

    def chunk(self, reply: Reply, choice: JsonObject | None, *, tokens: int) -> JsonObject:
        """The frame of a chunk."""
        chunk = {**self.head(reply, "chat.completion.chunk"), "choices": [] if choice is None else [choice]}
        if choice is not None and reply.asked.running_usage:
            chunk["usage"] = {**self.usage(reply, tokens), "completion_tokens_details": None}
        return chunk

    def usage_chunk(self, reply: Reply) -> JsonObject:
        """The last chunk, where a count was asked for."""
        usage = self.usage(reply, self.completion_tokens(reply))
        if reply.reasoned:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens(reply)}
        return {**self.chunk(reply, None, tokens=0), "usage": usage, "system_fingerprint": FINGERPRINT}

    # Parts of both

    def head(self, reply: Reply, kind: str) -> JsonObject:
        """The members every answer starts with."""
        return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": reply.model}

    def usage(self, reply: Reply, tokens: int) -> JsonObject:
        """The engine's count."""
        prompt = len(reply.asked.prompt)
        return {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}

    def completion_tokens(self, reply: Reply) -> int:
        """Tokens of all choices."""
        uncounted = not self.counts_end and reply.end.tokens == len(reply.answer.tokens)
        return (reply.end.tokens - uncounted) * reply.asked.choices

    def reasoning_tokens(self, reply: Reply) -> int:
        """Tokens spent on thinking, tags not counted."""
        span = next(span for span in reply.answer.spans if span.kind == "reasoning")
        tokens = reply.answer.tokens[: reply.end.tokens]
        return sum(1 for token in tokens if span.start < token.end <= span.end) * reply.asked.choices

    def logprobs(self, reply: Reply, piece: Piece) -> JsonObject | None:
        """The scores of a portion's tokens."""
        return self.scored(reply, reply.scores[piece.first : piece.first + len(piece.tokens)])

    def scored(self, reply: Reply, scores: Sequence[Score]) -> JsonObject | None:
        """Scores as the wire has them; None where none were asked for."""
        if reply.asked.top is None:
            return None
        if not self.counts_end:
            scores = [score for score in scores if score.id != default_tokenizer().eos]
        return {"content": [self.entry(reply, score) for score in scores]}

    def entry(self, reply: Reply, score: Score) -> JsonObject:
        """One token's score; the sampled token leads its own list of candidates."""
        as_ids = reply.asked.wants("return_tokens_as_token_ids")
        top = ((score.id, score.logprob), *score.others)[: reply.asked.top]
        entry = self.candidate(score.id, score.logprob, as_ids=as_ids)
        entry["bytes"] = self.bytes_of(score.id)
        entry["top_logprobs"] = [self.candidate(id, logprob, as_ids=as_ids) for id, logprob in top]
        return entry

    def candidate(self, id: int, logprob: float, *, as_ids: bool) -> JsonObject:
        """A token and its score."""
        text = f"token_id:{id}" if as_ids else default_tokenizer().token_text(id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def bytes_of(self, id: int) -> list[int]:
        """vLLM gives the bytes of the token's text, in which half a character is already U+FFFD."""
        return list(default_tokenizer().token_text(id).encode())

    # A whole answer

    def response(self, reply: Reply) -> JsonObject:
        """The answer to a request that does not stream."""
        usage = {**self.usage(reply, self.completion_tokens(reply)), "prompt_tokens_details": None}
        details = {"reasoning_tokens": self.reasoning_tokens(reply)} if reply.reasoned else None
        return {
            **self.head(reply, "chat.completion"),
            "choices": [self.whole_choice(reply, index) for index in range(reply.asked.choices)],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {**usage, "completion_tokens_details": details},
            "prompt_logprobs": None,
            **self.prompt_fields(reply),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def whole_choice(self, reply: Reply, index: int) -> JsonObject:
        """One entry of `choices`."""
        return {
            "index": index,
            "message": self.message(reply, index),
            "logprobs": self.scored(reply, reply.scores),
            "finish_reason": reply.end.finish_reason,
            "stop_reason": reply.end.stop_reason,
            "token_ids": [score.id for score in reply.scores] if reply.asked.ids else None,
            "routed_experts": None,
        }

    def message(self, reply: Reply, index: int) -> JsonObject:
        """The assistant message."""
        content, calls = self.content_and_calls(reply, index)
        message: JsonObject = {"role": "assistant", "content": content, "refusal": None, "annotations": None}
        message |= {"audio": None, "function_call": None}
        if calls:
            message["tool_calls"] = calls
        shown = reply.asked.body.get("include_reasoning", True) is not False
        reasoning = reply.visible("reasoning") if shown else ""
        return {**message, **dict.fromkeys(self.reasoning_fields, reasoning or None)}

    def content_and_calls(self, reply: Reply, index: int) -> tuple[str, list[JsonObject]]:
        """Text and tool calls; with a call that was cut, a parser that sees only the end makes it all text."""
        content = reply.visible("content")
        last = max((span.end for span in reply.answer.spans if span.kind == "arguments"), default=0)
        if reply.answer.calls and reply.end.visible < last:
            start = next(span.start for span in reply.answer.spans if span.kind == "content")
            return reply.answer.text[start : reply.end.visible], []
        return content, [self.whole_call(reply, index, n) for n in range(len(reply.answer.calls))]

    def whole_call(self, reply: Reply, index: int, call: int) -> JsonObject:
        """One tool call."""
        name, arguments = reply.answer.calls[call]
        id = self.tool_id_prefix + reply.tool_id(index, call)
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def strip_nulls(value: dict[str, Any]) -> JsonObject:
    """Without the members that are None."""
    return {key: item for key, item in value.items() if item is not None}
