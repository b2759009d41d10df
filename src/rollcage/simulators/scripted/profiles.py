"""How other engines and versions differ from vLLM 0.32.0: each difference is one attribute or one small method."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from rollcage.simulators.scripted.generation import Piece
from rollcage.simulators.scripted.request import Refused
from rollcage.simulators.scripted.scores import Score
from rollcage.simulators.scripted.shapes import FINGERPRINT, Event, Reply, Shapes, strip_nulls
from rollcage.simulators.scripted.tokenizer import default_tokenizer
from rollcage.types import JsonObject


class Vllm020(Shapes):
    """vLLM 0.16 to 0.30: swallowed tokens get a chunk only where ids were asked for; logprobs alone lose them."""

    name: ClassVar[str] = "vllm-0.20"
    version: ClassVar[str] = "0.20.0"

    def given_prompt(self, body: JsonObject) -> Any:
        """Not taken yet."""
        return None

    def sends_silent(self, reply: Reply) -> bool:
        """Only for ids."""
        return reply.asked.ids

    def delta(self, reply: Reply, index: int, piece: Piece) -> JsonObject:
        """Where no parser is at work, a token without text is a delta with empty content."""
        delta = super().delta(reply, index, piece)
        return delta or ({} if reply.parsed else {"content": ""})

    def prompt_fields(self, reply: Reply) -> JsonObject:
        """The prompt's text is not told yet."""
        return {"prompt_token_ids": super().prompt_fields(reply)["prompt_token_ids"]}


class Vllm012(Vllm020):
    """vLLM 0.11.2 and 0.12: what a parser swallowed is lost, ids and logprobs alike; both names for reasoning."""

    name: ClassVar[str] = "vllm-0.12"
    version: ClassVar[str] = "0.12.0"
    reasoning_fields: ClassVar[tuple[str, ...]] = ("reasoning", "reasoning_content")

    def sends_silent(self, reply: Reply) -> bool:
        """Never."""
        return False


class Sglang(Shapes):
    """SGLang 0.5: ids in whole answers, and once at the end of a stream where that was asked for."""

    name: ClassVar[str] = "sglang"
    version: ClassVar[str] = "0.5.23"
    owner: ClassVar[str] = "sglang"
    reasoning_fields: ClassVar[tuple[str, ...]] = ("reasoning_content",)
    tool_id_prefix: ClassVar[str] = "call_"
    sends_ids: ClassVar[bool] = False

    def about(self, path: str) -> JsonObject | None:
        """Its own paths."""
        if path == "/get_model_info":
            return {"model_path": "scripted", "tokenizer_path": "scripted", "is_generation": True}
        return {"version": self.version, "status": "ready"} if path == "/server_info" else None

    def given_prompt(self, body: JsonObject) -> Any:
        """Under a name of its own."""
        return body.get("input_ids")

    def check(self, body: JsonObject, headers: Mapping[str, str], model: str) -> None:
        """No ids within a stream."""
        for name in ("return_token_ids", "return_prompt_token_ids", "return_meta_info"):
            if body.get("stream") and body.get(name):
                raise Refused(400, f"{name} is not supported with stream=true", param=name)

    def error(self, refused: Refused) -> JsonObject:
        """Flat, without a wrapper."""
        return {"object": "error", **super().error(refused)["error"]}

    def prompt_fields(self, reply: Reply) -> JsonObject:
        """Nothing at the top level."""
        return {}

    def sends_silent(self, reply: Reply) -> bool:
        """Never."""
        return False

    def delta(self, reply: Reply, index: int, piece: Piece) -> JsonObject:
        """All members, null where there is nothing."""
        delta = super().delta(reply, index, piece)
        return {"role": None, "content": None, "reasoning_content": None, "tool_calls": None, **delta} if delta else {}

    def choice(self, reply: Reply, index: int, piece: Piece) -> JsonObject | None:
        """Why it ended is a chunk of its own."""
        delta = self.delta(reply, index, piece)
        if not delta:
            return None
        logprobs = self.logprobs(reply, piece)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None, "matched_stop": None}

    def choice_chunks(self, reply: Reply, index: int) -> Iterator[JsonObject]:
        """The pieces, then the reason."""
        yield from super().choice_chunks(reply, index)
        delta = dict.fromkeys(("role", "content", "reasoning_content", "tool_calls"))
        choice: JsonObject = {"index": index, "delta": delta, "logprobs": None}
        choice |= {"finish_reason": reply.end.finish_reason, "matched_stop": _matched_stop(reply)}
        yield self.chunk(reply, choice, tokens=reply.end.tokens)

    def stream(self, reply: Reply) -> Iterator[Event]:
        """The ids come last, in a chunk without choices."""
        yield from super().stream(reply)
        asked = reply.asked
        ids: JsonObject = {}
        if asked.wants("return_input_ids_in_sglext") or asked.headers.get("x-sglext-return-input-ids") == "1":
            ids["input_ids"] = list(asked.prompt)
        if asked.wants("return_output_ids_in_sglext") or asked.headers.get("x-sglext-return-output-ids") == "1":
            ids["output_ids"] = [[score.id for score in reply.scores]] * asked.choices
        if ids:
            framed = asked.headers.get("x-sglext-ids-framed") == "1"
            yield Event({**self.chunk(reply, None, tokens=0), "sglext": ids}, "sglext_ids" if framed else "")

    def whole_choice(self, reply: Reply, index: int) -> JsonObject:
        """Ids by choice, under other names."""
        choice = super().whole_choice(reply, index)
        for name in ("stop_reason", "token_ids", "routed_experts"):
            del choice[name]
        choice["matched_stop"] = _matched_stop(reply)
        if reply.asked.wants("return_prompt_token_ids"):
            choice["prompt_token_ids"] = list(reply.asked.prompt)
        if reply.asked.wants("return_token_ids"):
            choice["response_token_ids"] = [score.id for score in reply.scores]
        return choice

    def response(self, reply: Reply) -> JsonObject:
        """Fewer members."""
        return _only(super().response(reply), "id", "object", "created", "model", "choices", "usage")


class LlamaCpp(Shapes):
    """llama.cpp's server: one chunk per token, ids within the logprob entries, in streams none for the end token."""

    name: ClassVar[str] = "llamacpp"
    version: ClassVar[str] = "b11434"
    owner: ClassVar[str] = "llamacpp"
    reasoning_fields: ClassVar[tuple[str, ...]] = ("reasoning_content",)
    interval: ClassVar[int | None] = 1
    tool_id_prefix: ClassVar[str] = ""
    sends_ids: ClassVar[bool] = False

    def about(self, path: str) -> JsonObject | None:
        """Its own paths."""
        return {"default_generation_settings": {}, "build_info": self.version} if path == "/props" else None

    def given_prompt(self, body: JsonObject) -> Any:
        """Not taken."""
        return None

    def check(self, body: JsonObject, headers: Mapping[str, str], model: str) -> None:
        """No logprobs where tools are parsed in a stream."""
        if body.get("logprobs") and body.get("tools") and body.get("stream"):
            raise Refused(400, "logprobs is not supported with tools + stream")

    def error(self, refused: Refused) -> JsonObject:
        """Three members, in their own order."""
        kind = "invalid_request_error" if refused.status < 500 else "server_error"
        return {"error": {"code": refused.status, "message": refused.message, "type": kind}}

    def head(self, reply: Reply, kind: str) -> JsonObject:
        """Says what it is in every chunk."""
        return {**super().head(reply, kind), "system_fingerprint": FINGERPRINT}

    def role_chunk(self, reply: Reply, index: int) -> JsonObject:
        """Content is null, and the prompt is not told."""
        delta = {"role": "assistant", "content": None}
        return self.chunk(reply, {"finish_reason": None, "index": index, "delta": delta}, tokens=0)

    def prompt_fields(self, reply: Reply) -> JsonObject:
        """Not told."""
        return {}

    def sends_silent(self, reply: Reply) -> bool:
        """Never."""
        return False

    def choice(self, reply: Reply, index: int, piece: Piece) -> JsonObject | None:
        """Members that say nothing are left out; the last chunk has no logprobs."""
        choice = super().choice(reply, index, piece)
        if choice is None:
            return None
        logprobs = None if choice["finish_reason"] else choice["logprobs"]
        kept = {"finish_reason": choice["finish_reason"], "index": index, "delta": choice["delta"]}
        return kept if logprobs is None else {**kept, "logprobs": logprobs}

    def choice_chunks(self, reply: Reply, index: int) -> Iterator[JsonObject]:
        """An answer that was cut ends with a chunk of its own, as one that ended by itself does."""
        for chunk in super().choice_chunks(reply, index):
            (choice,) = chunk["choices"]
            if choice["finish_reason"] and choice["delta"]:
                yield {**chunk, "choices": [{**choice, "finish_reason": None}]}
                choice = {**choice, "delta": {}}
            yield {**chunk, "choices": [choice]}

    def call_delta(self, reply: Reply, index: int, kind: str, call: int, text: str) -> JsonObject:
        """A call starts with empty arguments."""
        delta = super().call_delta(reply, index, kind, call, text)
        return {**delta, "function": {**delta["function"], "arguments": text if kind == "arguments" else ""}}

    def scored(self, reply: Reply, scores: Sequence[Score]) -> JsonObject | None:
        """In a stream the end token is counted but has no entry; a whole answer has one."""
        eos = default_tokenizer().eos
        return super().scored(reply, [score for score in scores if score.id != eos or not reply.asked.stream])

    def candidate(self, id: int, logprob: float, *, as_ids: bool) -> JsonObject:
        """Each entry carries its id; the end token has no text."""
        entry = {"id": id, **super().candidate(id, logprob, as_ids=False), "bytes": self.bytes_of(id)}
        return entry if id != default_tokenizer().eos else {**entry, "token": "", "bytes": []}

    def bytes_of(self, id: int) -> list[int]:
        """The token's own bytes."""
        return list(default_tokenizer().token_bytes(id))

    def usage_chunk(self, reply: Reply) -> JsonObject:
        """With timings."""
        return {**super().usage_chunk(reply), "timings": self.timings(reply)}

    def timings(self, reply: Reply) -> JsonObject:
        """Made up, like all else."""
        return {"prompt_n": len(reply.asked.prompt), "predicted_n": reply.end.tokens, "predicted_per_second": 100.0}

    def whole_choice(self, reply: Reply, index: int) -> JsonObject:
        """Few members."""
        choice = super().whole_choice(reply, index)
        choice["message"] = strip_nulls(choice["message"])
        return strip_nulls(_only(choice, "index", "message", "logprobs")) | {"finish_reason": choice["finish_reason"]}

    def response(self, reply: Reply) -> JsonObject:
        """Few members, and timings."""
        whole = super().response(reply)
        kept = _only(whole, "choices", "created", "model", "system_fingerprint", "object", "usage", "id")
        return {**kept, "usage": strip_nulls(whole["usage"]), "timings": self.timings(reply)}


class OpenAi(Shapes):
    """OpenAI's own service: no ids ever, no scores for tool calls, and fields it does not know are an error."""

    name: ClassVar[str] = "openai"
    version: ClassVar[str] = "2026-10-01"
    owner: ClassVar[str] = "system"
    reasoning_fields: ClassVar[tuple[str, ...]] = ()
    counts_end: ClassVar[bool] = False
    tool_id_prefix: ClassVar[str] = "call_"
    sends_ids: ClassVar[bool] = False
    known: ClassVar[frozenset[str]] = frozenset(
        "audio echo best_of suffix prompt frequency_penalty function_call functions logit_bias logprobs"
        " max_completion_tokens max_tokens messages metadata modalities model n parallel_tool_calls prediction"
        " presence_penalty prompt_cache_key reasoning_effort response_format safety_identifier seed service_tier stop"
        " store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity"
        " web_search_options".split()
    )

    def about(self, path: str) -> JsonObject | None:
        """Nothing."""
        return None

    def given_prompt(self, body: JsonObject) -> Any:
        """Not taken."""
        return None

    def check(self, body: JsonObject, headers: Mapping[str, str], model: str) -> None:
        """Unknown fields; and what its reasoning models cannot do."""
        unknown = [name for name in body if name not in self.known]
        if unknown:
            plural = "s" if len(unknown) > 1 else ""
            raise Refused(400, f"Unrecognized request argument{plural} supplied: {', '.join(unknown)}")
        if not re.match(r"o\d|gpt-5", model):
            return
        remedies = {"max_tokens": " Use 'max_completion_tokens' instead.", "logprobs": "", "top_logprobs": ""}
        for name, remedy in remedies.items():
            if body.get(name) is not None:
                message = f"Unsupported parameter: '{name}' is not supported with this model.{remedy}"
                raise Refused(400, message, param=name, code="unsupported_parameter")

    def error(self, refused: Refused) -> JsonObject:
        """Codes are words."""
        kind = "invalid_request_error" if refused.status < 500 else "server_error"
        code = refused.code if isinstance(refused.code, str) else None
        return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": code}}

    def head(self, reply: Reply, kind: str) -> JsonObject:
        """Says what it is in every chunk."""
        return {**super().head(reply, kind), "service_tier": "default", "system_fingerprint": FINGERPRINT}

    def prompt_fields(self, reply: Reply) -> JsonObject:
        """Not told."""
        return {}

    def role_chunk(self, reply: Reply, index: int) -> JsonObject:
        """With a place for refusals."""
        chunk = super().role_chunk(reply, index)
        chunk["choices"][0]["delta"]["refusal"] = None
        return chunk

    def sends_silent(self, reply: Reply) -> bool:
        """Never."""
        return False

    def delta(self, reply: Reply, index: int, piece: Piece) -> JsonObject:
        """Half a character is an empty text with a score."""
        delta = super().delta(reply, index, piece)
        unfinished = not reply.answer.calls and any(token.id != default_tokenizer().eos for token in piece.tokens)
        return delta or ({"content": ""} if unfinished else {})

    def choice(self, reply: Reply, index: int, piece: Piece) -> JsonObject | None:
        """Why it ended is a chunk of its own, and has no logprobs."""
        delta = self.delta(reply, index, piece)
        if not delta:
            return None
        logprobs = None if piece.calls else self.logprobs(reply, piece)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def choice_chunks(self, reply: Reply, index: int) -> Iterator[JsonObject]:
        """The pieces, then the reason."""
        yield from super().choice_chunks(reply, index)
        choice: JsonObject = {"index": index, "delta": {}, "logprobs": None, "finish_reason": reply.end.finish_reason}
        yield self.chunk(reply, choice, tokens=reply.end.tokens)

    def chunk(self, reply: Reply, choice: JsonObject | None, *, tokens: int) -> JsonObject:
        """Usage is null until the last chunk."""
        chunk = super().chunk(reply, choice, tokens=tokens)
        return {**chunk, "usage": None} if reply.asked.usage else chunk

    def call_delta(self, reply: Reply, index: int, kind: str, call: int, text: str) -> JsonObject:
        """A call starts with empty arguments."""
        delta = super().call_delta(reply, index, kind, call, text)
        return {**delta, "function": {**delta["function"], "arguments": text if kind == "arguments" else ""}}

    def bytes_of(self, id: int) -> list[int]:
        """The token's own bytes."""
        return list(default_tokenizer().token_bytes(id))

    def whole_choice(self, reply: Reply, index: int) -> JsonObject:
        """Content is null beside tool calls, which have no scores."""
        choice = _only(super().whole_choice(reply, index), "index", "message", "logprobs", "finish_reason")
        message = _only(choice["message"], "role", "content", "refusal", "tool_calls")
        called = "tool_calls" in message
        message["content"] = (message["content"] or None) if called else message["content"]
        return {**choice, "message": message, "logprobs": None if called else choice["logprobs"]}

    def response(self, reply: Reply) -> JsonObject:
        """Its own members only."""
        whole = super().response(reply)
        names = ("id", "object", "created", "model", "choices", "usage", "service_tier", "system_fingerprint")
        return {**_only(whole, *names), "usage": strip_nulls(whole["usage"])}


def _matched_stop(reply: Reply) -> str | int | None:
    if reply.end.finish_reason == "length":
        return None
    return default_tokenizer().eos if reply.end.stop_reason is None else reply.end.stop_reason


def _only(value: JsonObject, *names: str) -> JsonObject:
    return {name: value[name] for name in names if name in value}


PROFILES: Mapping[str, Shapes] = {
    shapes.name: shapes for shapes in (Shapes(), Vllm020(), Vllm012(), Sglang(), LlamaCpp(), OpenAi())
}
"""The engines and versions the scripted model can pass for, by name."""
