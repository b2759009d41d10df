"""The scripted model's ASGI application: routes, keys, and answers sent as the script says, faults included."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import anyio
import msgspec

from rollcage.simulators.scripted.completions import completion_response, completion_stream
from rollcage.simulators.scripted.generation import compose, end_of
from rollcage.simulators.scripted.profiles import PROFILES
from rollcage.simulators.scripted.request import ParsedRequest, Refused, read_request
from rollcage.simulators.scripted.scores import scores
from rollcage.simulators.scripted.script import AUXILIARY, RecordedRequest, Script
from rollcage.simulators.scripted.shapes import Event, Reply
from rollcage.simulators.scripted.template import BadMessages, prompt_ids
from rollcage.simulators.scripted.tokenizer import default_tokenizer
from rollcage.types import JsonObject, ScriptedTurn

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_MAX_BODY = 64 << 20
_TURN_TAKING = 32
_RENDERED = 64
"""Prompts of `/apply-template` whose ids are remembered."""
_MARK = (b"x-rollcage-scripted", b"1")
_encode = msgspec.json.Encoder().encode


class Gone(Exception):
    """The client left."""


class ScriptedApp:
    """Serves the scripts that are registered with it, each under its own key."""

    def __init__(self, *, context_length: int, hang_up: Callable[[Scope], None]) -> None:
        self.scripts: dict[str, Script] = {}
        self._context_length = context_length
        self._hang_up = hang_up
        self._rendered: dict[str, list[int]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        shapes = PROFILES["vllm-0.32"]
        try:
            script = self._script(scope)
            shapes = script.shapes if script else shapes
            await self._route(scope, receive, send, script)
        except Refused as refused:
            headers = [(b"retry-after", b"1")] if refused.status == 429 else []
            await _send_json(send, shapes.error(refused), status=refused.status, headers=headers)
        except Gone:
            pass

    async def _route(self, scope: Scope, receive: Receive, send: Send, script: Script | None) -> None:
        match scope["method"], scope["path"]:
            case "GET", "/health":
                await _send(send, b"")
            case "GET", "/version" | "/props" | "/get_model_info" | "/server_info":
                said = (script.shapes if script else PROFILES["vllm-0.32"]).about(scope["path"])
                await _send_json(send, said or {"detail": "Not Found"}, status=200 if said else 404)
            case "POST", "/tokenize":
                await _send_json(send, self._tokenize(_parse(await _read(receive))))
            case "POST", "/detokenize":
                await _send_json(send, _detokenized(_parse(await _read(receive))))
            case "POST", "/apply-template" if script and script.shapes.owner == "llamacpp":
                await _send_json(send, self._template(_parse(await _read(receive))))
            case "GET", "/v1/models":
                await _send_json(send, self._models(_known(script)))
            case "POST", "/v1/chat/completions" | "/v1/completions":
                await self._complete(scope, receive, send, _known(script))
            case _, "/health" | "/version" | "/tokenize" | "/v1/models" | "/v1/chat/completions" | "/v1/completions":
                await _send_json(send, {"detail": "Method Not Allowed"}, status=405)
            case _:
                await _send_json(send, {"detail": "Not Found"}, status=404)

    def _script(self, scope: Scope) -> Script | None:
        for name, value in scope["headers"]:
            if name == b"authorization":
                return self.scripts.get(value.decode("latin-1").removeprefix("Bearer ").strip())
        return None

    async def _complete(self, scope: Scope, receive: Receive, send: Send, script: Script) -> None:
        raw = await _read(receive)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        script.requests.append(RecordedRequest(scope["path"], headers, raw))
        body = _parse(raw)
        model = body.get("model") or script.model
        if model != script.model:
            message = f"The model `{model}` does not exist. Valid aliases: {script.model}."
            raise Refused(404, message, param="model")
        script.shapes.check(body, headers, script.model)
        chat, given = scope["path"] == "/v1/chat/completions", script.shapes.given_prompt(body)
        asked = read_request(raw, body, headers, chat=chat, given_prompt=given)
        asked = self._fit(asked)
        turn = AUXILIARY if asked.auxiliary else script.turn(asked.turn)
        if turn.status != 200:
            await _pause(receive, turn.delay_s)
            raise Refused(turn.status, turn.text or "scripted failure")
        reply = _reply(asked, turn, script)
        if asked.stream:
            await self._send_stream(scope, receive, send, _PreparedAnswer(script, reply, turn))
        else:
            await self._send_whole(scope, receive, send, _PreparedAnswer(script, reply, turn))

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send, stream: _PreparedAnswer) -> None:
        await _pause(receive, stream.turn.delay_s)
        if stream.turn.cut_after is not None:
            await self._cut(scope, receive)
        if stream.turn.error_after is not None:
            raise Refused(500, "scripted failure")
        for n, _ in enumerate(stream.events() if stream.turn.token_delay_s else ()):
            await _pause(receive, stream.turn.token_delay_s if n else 0)
            stream.script.generated += 1
        await _send_json(send, stream.whole())

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send, stream: _PreparedAnswer) -> None:
        turn = stream.turn
        await _start(send, 200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        await _pause(receive, turn.delay_s)
        for n, event in enumerate(stream.events()):
            if n == turn.cut_after:
                await self._cut(scope, receive)
            if n == turn.error_after:
                await _send_event(send, Event(stream.shapes.error(Refused(500, turn.text or "scripted failure"))))
                break
            if n:
                await _pause(receive, turn.token_delay_s)
            if n % _TURN_TAKING == 0:
                # Sending alone does not let others run while the client reads as fast as we write.
                await _let_others_run(receive)
            await _send_event(send, event)
            stream.script.generated += 1
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _cut(self, scope: Scope, receive: Receive) -> None:
        self._hang_up(scope)
        while (await receive())["type"] != "http.disconnect":
            pass
        raise Gone

    def _fit(self, asked: ParsedRequest) -> ParsedRequest:
        """What a real context window allows: a prompt that is too long is refused, an answer is cut."""
        room = self._context_length - len(asked.prompt)
        wanted = asked.truncation.max_tokens
        if room < 1 or (wanted is not None and wanted > room):
            message = (
                f"This model's maximum context length is {self._context_length} tokens. However, you requested "
                f"{wanted or 0} output tokens and your prompt contains {len(asked.prompt)} input tokens."
            )
            raise Refused(400, message, param="input_tokens")
        return replace(asked, truncation=replace(asked.truncation, max_tokens=min(room, wanted or room)))

    def _tokenize(self, body: JsonObject) -> JsonObject:
        tokenizer = default_tokenizer()
        prompt = body.get("prompt", body.get("content"))  # vLLM's name for it, and llama.cpp's
        try:
            if isinstance(prompt, str):
                ids = self._rendered.get(prompt) or tokenizer.encode(prompt, specials=True)
            else:
                generate = body.get("add_generation_prompt", True)
                ids = prompt_ids(body["messages"], body.get("tools") or (), generate=generate)
        except (BadMessages, KeyError, TypeError) as error:
            raise Refused(400, "tokenize needs `prompt` or `messages`") from error
        texts = [tokenizer.token_text(id) for id in ids] if body.get("return_token_strs") else None
        return {"count": len(ids), "max_model_len": self._context_length, "tokens": ids, "token_strs": texts}

    def _template(self, body: JsonObject) -> JsonObject:
        try:
            ids = prompt_ids(body["messages"], () if body.get("tool_choice") == "none" else body.get("tools") or ())
        except (BadMessages, KeyError, TypeError) as error:
            raise Refused(400, "apply-template needs `messages`") from error
        prompt = default_tokenizer().decode(ids)
        # The text alone does not tell a tag from what merely looks like one.
        self._rendered[prompt] = ids
        while len(self._rendered) > _RENDERED:
            del self._rendered[next(iter(self._rendered))]
        return {"prompt": prompt}

    def _models(self, script: Script) -> JsonObject:
        model = {"id": script.model, "object": "model", "created": int(time.time()), "owned_by": script.shapes.owner}
        model |= {"root": script.model, "parent": None, "max_model_len": self._context_length, "permission": []}
        return {"object": "list", "data": [{**model, "scripted": True}]}


class _PreparedAnswer:
    """One answer, ready to be sent whole or in events."""

    def __init__(self, script: Script, reply: Reply, turn: ScriptedTurn) -> None:
        self.script, self.shapes = script, script.shapes
        self.turn = turn
        self._reply = reply

    def events(self) -> Iterator[Event]:
        if self._reply.asked.chat:
            return self.shapes.stream(self._reply)
        return completion_stream(self.shapes, self._reply)

    def whole(self) -> JsonObject:
        if self._reply.asked.chat:
            return self.shapes.response(self._reply)
        return completion_response(self.shapes, self._reply)


def _reply(asked: ParsedRequest, turn: ScriptedTurn, script: Script) -> Reply:
    think = (asked.body.get("chat_template_kwargs") or {}).get("enable_thinking") is not False
    parse = asked.chat and asked.body.get("tool_choice") != "none"
    answer = compose(turn, parse=parse, think=think)
    end = end_of(answer, asked.truncation, named=asked.named_tool)
    if turn.finish_reason:
        end = replace(end, finish_reason=turn.finish_reason)
    ids = [token.id for token in answer.tokens[: end.tokens]]
    forced = 1 if asked.forced_tool and turn.tool_calls else 0
    scored = scores(asked.prompt, ids, others=asked.top or 0, forced=forced)
    return Reply(asked, script.model, answer, end, scored, secrets.token_hex(8), int(time.time()))


def _detokenized(body: JsonObject) -> JsonObject:
    try:
        return {"prompt": default_tokenizer().decode(body["tokens"])}
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(400, "detokenize needs `tokens` of this model") from error


def _known(script: Script | None) -> Script:
    if script is None:
        raise Refused(401, "Incorrect API key provided: no script is registered under it.", code="invalid_api_key")
    return script


def _parse(raw: bytes) -> JsonObject:
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        try:
            # The standard library lets lone surrogates pass, which agents do send.
            body = json.loads(raw)
        except ValueError as error:
            raise Refused(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    return body


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > _MAX_BODY:
            raise Refused(413, f"the body is larger than {_MAX_BODY} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


async def _pause(receive: Receive, seconds: float) -> None:
    """Wait, unless the client leaves first."""
    if seconds <= 0:
        return
    with anyio.move_on_after(seconds):
        while (await receive())["type"] != "http.disconnect":
            pass
        raise Gone


async def _let_others_run(receive: Receive) -> None:
    with anyio.move_on_after(0):
        await receive()
        raise Gone


async def _start(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [*headers, _MARK]})


async def _send(send: Send, body: bytes, *, status: int = 200, headers: Mapping[bytes, bytes] | None = None) -> None:
    lines = [*(headers or {}).items(), (b"content-length", str(len(body)).encode())]
    await _start(send, status, lines)
    await send({"type": "http.response.body", "body": body})


async def _send_json(
    send: Send, value: JsonObject, *, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    lines = {b"content-type": b"application/json", **dict(headers or [])}
    await _send(send, _encode(value), status=status, headers=lines)


async def _send_event(send: Send, event: Event) -> None:
    name = f"event: {event.name}\n".encode() if event.name else b""
    await send(
        {"type": "http.response.body", "body": name + b"data: " + _encode(event.data) + b"\n\n", "more_body": True}
    )
