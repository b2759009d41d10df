"""What becomes of a request on its way to the model: pure functions, request in, request out.

Also what is refused without asking the model at all, and what to ask instead of what an engine refuses.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from rollcage.gateway.engines import CallShape, Engine, refused_field, rejects_stream, wants_modern_cap
from rollcage.types import Endpoint, JsonObject, Limits

_CAPS = ("max_tokens", "max_completion_tokens", "n_predict")
"""Every name under which some engine takes the ceiling of an answer."""
SMUGGLED = frozenset(
    "kv_transfer_params ec_transfer_params prompt_token_ids input_ids token_ids prompt_embeds input_embeds image_data"
    " session_params bootstrap_host bootstrap_port bootstrap_room required_prefix_token_ids".split()
)
"""Fields by which some engine is prompted with other than the messages, or told where to fetch a cache from: a box may
not send them, or the turn would not show what the model read. The endpoint's own `extra_body` may."""


def outgoing(body: JsonObject, *, endpoint: Endpoint, limits: Limits, engine: Engine, spent: int = 0) -> JsonObject:
    """The request as it goes upstream. `spent` is what the model has generated so far, of `limits.token_budget`."""
    sampling = endpoint.sampling
    chat = "prompt" not in body
    sent = {name: value for name, value in body.items() if name not in SMUGGLED} | {"model": endpoint.model}
    if sampling.temperature is not None:
        sent["temperature"] = sampling.temperature
    if sampling.seed is not None:
        sent["seed"] = sampling.seed
    if chat and sampling.thinking is not None:
        sent["chat_template_kwargs"] = _dict(body, "chat_template_kwargs") | {"enable_thinking": sampling.thinking}
    for name, value in sampling.extra_body.items():
        merged = isinstance(value, dict) and isinstance(sent.get(name), dict)
        sent[name] = {**sent[name], **value} if merged else value
    _cap(sent, _ceiling(limits, spent), engine.cap_field if chat else "max_tokens")
    wanted = _wanted(sent, chat, sampling.top_logprobs)
    if engine.unstreams(wanted):
        sent["stream"] = False
        sent.pop("stream_options", None)
        wanted = wanted._replace(stream=False)
    _ask(sent, engine.asks(wanted))
    if sent.get("include_reasoning") is False and engine.hides_with_reasoning:
        del sent["include_reasoning"]  # what the agent does not want is taken out on its way back
    return sent


def added(body: JsonObject, sent: JsonObject, engine: Engine) -> JsonObject:
    """What `outgoing` put in for the sake of capture and the agent had not sent itself."""
    asked = engine.asks(_wanted(sent, "prompt" not in body, 0))
    return {name: sent[name] for name in asked if name in sent and name not in body}


def milder(engine: Engine, known: Engine, body: JsonObject, sent: JsonObject, answer: bytes) -> Engine | None:
    """What to ask for instead, where a refusal names a field that we put in; None where it is the agent's affair.

    `known` is the engine as it was before this call, `answer` the body of its refusal.
    """
    if "max_tokens" in sent and "max_tokens" not in engine.refused and wants_modern_cap(answer):
        return engine.without("max_tokens")
    field = refused_field(answer, added(body, sent, engine))
    if field is None:
        return None
    if sent.get("stream") is True and field != "stream_options" and rejects_stream(answer):
        return engine.without("stream")
    if "stream" in engine.refused - known.refused:
        # It was not the stream after all.
        engine = replace(engine, refused=engine.refused - {"stream"})
    return engine.without(field)


def limit_reached(limits: Limits, *, turns: int, spent: int) -> str:
    """Which limit a further call would go beyond, in words; empty where it may go on.

    The words matter: agents retry on errors that look passing, by status or by text, and this one must make them stop.
    """
    if limits.max_turns and turns >= limits.max_turns:
        return "turn limit reached"
    if limits.token_budget and spent >= limits.token_budget:
        return "token budget used up"
    return ""


def problem(message: str, kind: str = "invalid_request_error") -> bytes:
    """An error body in OpenAI's shape."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": None}})


def _ceiling(limits: Limits, spent: int) -> int:
    """Tokens this answer may have; 0 means as many as it likes."""
    left = max(limits.token_budget - spent, 1) if limits.token_budget else 0
    return min(filter(None, (limits.max_tokens_cap, left)), default=0)


def _cap(sent: JsonObject, ceiling: int, name: str) -> None:
    given = [each for each in _CAPS if sent.get(each) is not None]
    if name == "max_completion_tokens" and "max_tokens" in given:
        # Models that know only the modern name refuse the old one.
        sent.setdefault(name, sent["max_tokens"])
        del sent["max_tokens"]
        given = [name if each == "max_tokens" else each for each in given]
    if not ceiling:
        return
    for each in given if {"max_tokens", "max_completion_tokens"} & set(given) else [*given, name]:
        asked = sent.get(each)
        # Engines coerce strings and floats, and read -1 as "no end": whatever is no plain count is replaced.
        plain = isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0
        sent[each] = min(asked, ceiling) if plain and asked is not None else ceiling


def _ask(sent: JsonObject, asked: JsonObject) -> None:
    for name, value in asked.items():
        before = sent.get(name)
        if isinstance(value, dict):
            sent[name] = _dict(sent, name) | value
        elif _is_count(value) and _is_count(before):
            sent[name] = max(value, before)
        else:
            sent[name] = value


def _wanted(sent: JsonObject, chat: bool, alternatives: int) -> CallShape:
    return CallShape(
        chat=chat,
        stream=sent.get("stream") is True,
        tools=bool(sent.get("tools")),
        alternatives=alternatives,
        echo=bool(sent.get("echo")),
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _dict(body: JsonObject, name: str) -> JsonObject:
    value = body.get(name)
    return value if isinstance(value, dict) else {}
