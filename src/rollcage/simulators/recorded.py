"""A model that answers from the record of a rollout, request by request; by choice a live model takes over.

It speaks chat completions, which is what the gateway asks every engine in, so agents of all wires are served alike.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import httpx
from pydantic import SecretStr

from rollcage.simulators.loopback import Loopback, Receive, Scope, Send, read_body, send_json, start
from rollcage.types import Endpoint, JsonObject, Turn

OnDifference = Literal["stop", "position", "live"]
"""What to do where the agent asks something else than it did: refuse, answer by position, or ask a live model."""

IGNORED = frozenset(
    "model stream stream_options logprobs top_logprobs return_token_ids return_prompt_token_ids return_tokens verbose"
    " return_tokens_as_token_ids max_tokens max_completion_tokens kv_transfer_params input_ids".split()
)
"""Fields of a request that depend on the engine and on what is captured, and say nothing of what the agent asks."""

_VOLATILE = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?)?"  # dates and times
    r"|\bChunk ID: [0-9a-f]{4,}\b"  # Codex numbers what its commands print
    r"|\b\d\d:\d\d(?::\d\d(?:\.\d+)?)?\b"
    r"|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,? (?:[A-Z][a-z]{2,8} \d{1,2}|\d{1,2} [A-Z][a-z]{2,8}),? \d{4}"
    r"|\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* +\d{1,2}\b"
    r"|\b\d+(?:\.\d+)? ?(?:ms|s|sec|seconds)\b"  # durations
    r"|\b(?=[0-9a-f]*\d)[0-9a-f]{7,}\b"  # ids, git's short ones too
    r"|\bsk-[\w-]{20,}"  # the key that an agent is lent
    r"|/tmp/[\w.-]+"
)


class Difference(NamedTuple):
    """Where two requests differ first."""

    path: str
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.path}: was {self.was}, is {self.now}"


def asked(request: Mapping[str, Any]) -> JsonObject:
    """What the agent asks, without what depends on the engine."""
    return {name: value for name, value in request.items() if name not in IGNORED}


def normalized(value: Any) -> Any:
    """The same without dates, durations and ids, which differ from run to run."""
    if isinstance(value, str):
        return _VOLATILE.sub("~", value)
    if isinstance(value, dict):
        # Some agents send a whole answer back as their engine shaped it: null and an empty list are the same as not
        # said, and a call's number in its list says nothing more.
        unsaid = ("id", "tool_call_id", "index") if "function" in value else ("id", "tool_call_id")
        said = {name: each for name, each in value.items() if each not in (None, [], ()) and name not in unsaid}
        return {name: normalized(each) for name, each in said.items()}
    return [normalized(each) for each in value] if isinstance(value, list | tuple) else value


def difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> Difference | None:
    """Where two requests ask something else; None where they differ in nothing but times and ids."""
    return _difference(normalized(asked(was)), normalized(asked(now)), "")


def _difference(was: Any, now: Any, path: str) -> Difference | None:
    if was == now:
        return None
    if isinstance(was, dict) and isinstance(now, dict):
        for name in [*was, *(each for each in now if each not in was)]:
            if found := _difference(was.get(name), now.get(name), f"{path}.{name}" if path else name):
                return found
    if isinstance(was, list) and isinstance(now, list):
        for n, (one, other) in enumerate(zip(was, now, strict=False)):
            if found := _difference(one, other, f"{path}[{n}]"):
                return found
        return Difference(path, f"{len(was)} long", f"{len(now)} long")
    if isinstance(was, str) and isinstance(now, str):
        at = next((n for n, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
        start_at = max(0, at - 20)
        return Difference(path, _short(was[start_at:]), _short(now[start_at:]))
    return Difference(path, _short(was), _short(now))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else text[:99] + "…"


@dataclass
class Record:
    """What is answered from: the turns of a rollout up to one, and who speaks afterwards."""

    turns: Sequence[Turn]
    """Those that may be answered from."""
    on_difference: OnDifference = "stop"
    edited: JsonObject | None = None
    """A message that is said where the record ends, before the live model speaks."""
    later: Sequence[Turn] = ()
    """Those that the live model is asked again: they may come beside the last of `turns`."""
    stop: Callable[[str], Awaitable[object]] | None = None
    """Ends the rollout where a call is refused; None: the agent is told, and sees what it makes of it."""
    live: Endpoint | None = None
    """Who speaks where the record ends, and where the agent asks something else, if that is to be `live`."""
    differences: list[tuple[int, Difference]] = field(default_factory=list)
    """By turn, from 1."""
    handed_over: bool = False
    """Whether the live model speaks from now on."""
    _used: set[int] = field(default_factory=set)

    def answer(self, request: JsonObject) -> Turn | JsonObject | str | None:
        """The turn that answers; a message by hand; a refusal in words; None: the live model is to be asked."""
        left = [turn for turn in self.turns if turn.index not in self._used]
        turn = next((each for each in left if asked(each.request) == asked(request)), None)
        turn = turn or next((each for each in left if difference(each.request, request) is None), None)
        if turn is None and any(difference(each.request, request) is None for each in self.later):
            left = []
        if turn is None and left and not self.handed_over:
            turn, found = left[0], difference(left[0].request, request)
            if found is not None:
                self.differences.append((turn.index + 1, found))
                if self.on_difference == "stop":
                    return f"the replay differs from turn {turn.index + 1} on: {found}"
                if self.on_difference == "live":
                    self.handed_over = True
                    return None
        if turn is not None and not (self.handed_over and self.on_difference == "live" and self.differences):
            self._used.add(turn.index)
            return turn
        if self.edited is not None:
            message, self.edited = self.edited, None
            return message
        return None if self.live else "the record has no further answer"


class RecordedModel(Loopback):
    """`async with RecordedModel(record) as model:` serves on loopback until the block ends."""

    def __init__(self, record: Record, *, model: str) -> None:
        super().__init__(self._serve)
        self.record, self._model = record, model
        self._key = f"recorded-{secrets.token_urlsafe(24)}"

    def endpoint(self, like: Endpoint) -> Endpoint:
        """Its address, with the sampling of the endpoint that it stands for."""
        sampling = like.sampling.model_copy(update={"history": "as_sent"})
        return Endpoint(
            base_url=self.base_url, model=self._model, key=SecretStr(self._key), kind="recorded", sampling=sampling
        )

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        headers = dict(scope["headers"])
        if headers.get(b"authorization", b"").decode("latin-1") != f"Bearer {self._key}":
            await send_json(send, {"error": {"message": "wrong key"}}, 401)
        elif scope["method"] == "POST" and scope["path"].endswith("completions"):
            await self._complete(scope, body, send)
        elif self.record.live is not None:
            await self._forward(scope, body, send, self.record.live)
        elif scope["path"] == "/v1/models":
            row = {"id": self._model, "object": "model", "created": 0, "owned_by": "recorded"}
            await send_json(send, {"object": "list", "data": [row]})
        else:
            await send_json(send, {"detail": "Not Found"}, 404)

    async def _complete(self, scope: Scope, body: bytes, send: Send) -> None:
        request: JsonObject = json.loads(body)
        found = self.record.answer(request)
        if found is None and self.record.live is not None:
            await self._forward(scope, body, send, self.record.live)
            return
        if isinstance(found, str) and self.record.stop is not None:
            await self.record.stop(found)
        if found is None or isinstance(found, str):
            await send_json(send, {"error": {"message": found or "no answer", "type": "replay"}}, 400)
            return
        turn = found if isinstance(found, Turn) else Turn(index=0, request={}, message=found, status=200)
        end = {"usage": turn.usage, "__recorded": turn is found}
        if turn.status not in (0, 200):
            await send_json(send, {"error": {"message": turn.error or "it failed then, too"}}, turn.status)
        elif request.get("stream") is True:
            await start(send, 200, [(b"content-type", b"text/event-stream")])
            for chunk in _chunks(turn, self._model, end, legacy="prompt" in request):
                data = b"data: " + json.dumps(chunk).encode() + b"\n\n"
                await send({"type": "http.response.body", "body": data, "more_body": True})
            done = b"" if turn.error else b"data: [DONE]\n\n"
            await send({"type": "http.response.body", "body": done})
        else:
            await send_json(send, _whole(turn, self._model, end, legacy="prompt" in request))

    async def _forward(self, scope: Scope, body: bytes, send: Send, live: Endpoint) -> None:
        """Ask the live model, and pass on what it says as it comes."""
        root = live.base_url if scope["path"].startswith("/v1/") else live.base_url.removesuffix("/v1")
        url = root + scope["path"].removeprefix("/v1")
        headers = {"Authorization": f"Bearer {live.key.get_secret_value()}", "Content-Type": "application/json"}
        if body:
            body = json.dumps({**json.loads(body), "model": live.model}).encode()
        async with httpx.AsyncClient(timeout=httpx.Timeout(None, connect=10)) as client:
            try:
                async with client.stream(scope["method"], url, content=body or None, headers=headers) as answer:
                    kind = answer.headers.get("content-type", "application/json").encode("latin-1")
                    await start(send, answer.status_code, [(b"content-type", kind)])
                    async for piece in answer.aiter_bytes():
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
            except httpx.TransportError as error:
                await send_json(send, {"error": {"message": f"the live model: {error}"}}, 502)


def _choice(turn: Turn, legacy: bool) -> JsonObject:
    choice: JsonObject = {"index": 0, "finish_reason": turn.finish_reason or ("stop" if not turn.error else None)}
    if not turn.finish_reason and not turn.error and turn.message.get("tool_calls"):
        choice["finish_reason"] = "tool_calls"
    if turn.tokens and all(token.logprob is not None for token in turn.tokens):
        rows = [
            {
                "token": token.text,
                "logprob": token.logprob,
                "top_logprobs": [{"token": each.text, "logprob": each.logprob, "id": each.id} for each in token.top],
            }
            for token in turn.tokens
        ]
        columns = {
            "tokens": [token.text for token in turn.tokens],
            "token_logprobs": [token.logprob for token in turn.tokens],
            "top_logprobs": [{each.text: each.logprob for each in token.top} for token in turn.tokens],
        }
        choice["logprobs"] = columns if legacy else {"content": rows}
    if turn.tokens and all(token.id is not None for token in turn.tokens):
        choice["token_ids"] = [token.id for token in turn.tokens]
    return choice


def _whole(turn: Turn, model: str, end: JsonObject, *, legacy: bool) -> JsonObject:
    said: JsonObject = {"text": turn.message.get("content") or ""} if legacy else {"message": _message(turn)}
    return {
        **_head(model, "text_completion" if legacy else "chat.completion"),
        "choices": [{**_choice(turn, legacy), **said}],
        **end,
        **({"prompt_token_ids": list(turn.prompt_ids)} if turn.prompt_ids else {}),
    }


def _chunks(turn: Turn, model: str, end: JsonObject, *, legacy: bool) -> Iterator[JsonObject]:
    """The same as a stream. The first event says who speaks, the second all, the last the usage."""
    head = _head(model, "text_completion" if legacy else "chat.completion.chunk")
    prompt = {"prompt_token_ids": list(turn.prompt_ids)} if turn.prompt_ids else {}
    if legacy:
        yield {**head, **prompt, "choices": [{**_choice(turn, legacy), "text": turn.message.get("content") or ""}]}
    else:
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        yield {**head, **prompt, "choices": [first]}
        delta = _message(turn)
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{**call, "index": n} for n, call in enumerate(calls)]
        choice = _choice(turn, legacy)
        yield {**head, "choices": [{**choice, "delta": delta, "finish_reason": None}]}
        if choice["finish_reason"]:
            yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    yield {**head, "choices": [], **end}


def _message(turn: Turn) -> JsonObject:
    return {"role": "assistant", **{name: value for name, value in turn.message.items() if value is not None}}


def _head(model: str, kind: str) -> JsonObject:
    return {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": kind, "created": 0, "model": model}
