"""What becomes of a request on its way up: pure functions, so mostly properties."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import support.steady  # noqa: F401
from rollcage.gateway.engines import (
    CallShape,
    Engine,
    KnownEngines,
    ProbeAnswer,
    engine_of,
    guess,
    refused_field,
    rejects_stream,
    signed,
    wants_modern_cap,
)
from rollcage.gateway.policy import SMUGGLED, added, limit_reached, outgoing, problem
from rollcage.types import Endpoint, Limits

ENGINES = st.sampled_from(["unknown", "vllm", "sglang", "llamacpp", "openai", "hf_router"]).map(Engine)
VALUES = st.none() | st.booleans() | st.integers(-5, 100_000) | st.floats(allow_nan=False) | st.text(max_size=5)
NAMES = [
    "max_tokens",
    "max_completion_tokens",
    "n_predict",
    "temperature",
    "seed",
    "logprobs",
    "top_logprobs",
    "stream",
]
BODIES: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from([*NAMES, "stream_options", "tools", "return_token_ids", "x"]), VALUES
).map(lambda body: {"model": "model", "messages": [], **body})
CAPS = {"max_tokens", "max_completion_tokens", "n_predict"}


def endpoint(**sampling: Any) -> Endpoint:
    return Endpoint.model_validate({"base_url": "http://h/v1", "model": "real", "sampling": sampling})


def sent(body: dict[str, Any], engine: Engine | None = None, cap: int = 4096, **sampling: Any) -> dict[str, Any]:
    limits = Limits(max_tokens_cap=cap)
    return outgoing(body, endpoint=endpoint(**sampling), limits=limits, engine=engine or Engine("vllm"))


@given(BODIES, ENGINES, st.integers(1, 5000), st.integers(0, 5000), st.integers(0, 6000))
def test_no_answer_is_ever_longer_than_the_cap_or_the_budget(
    body: dict[str, Any], engine: Engine, cap: int, budget: int, spent: int
) -> None:
    limits = Limits(max_tokens_cap=cap, token_budget=budget)
    out = outgoing(body, endpoint=endpoint(), limits=limits, engine=engine, spent=spent)
    ceiling = min(cap, max(budget - spent, 1)) if budget else cap
    given_caps = {name: out[name] for name in CAPS if out.get(name) is not None}
    assert given_caps.keys() & {"max_tokens", "max_completion_tokens"}
    assert all(type(value) is int and 0 <= value <= ceiling for value in given_caps.values())


@given(BODIES, ENGINES)
def test_the_agents_own_body_is_never_changed_and_what_is_not_ours_is_passed_on(
    body: dict[str, Any], engine: Engine
) -> None:
    before = dict(body)
    out = sent(body, engine)
    assert body == before
    ours = CAPS | {"model", *engine.asks(_everything(out))}
    if engine.unstreams(_everything(body)):
        ours |= {"stream", "stream_options"}
        assert out["stream"] is False
    assert {k: v for k, v in out.items() if k not in ours} == {k: v for k, v in body.items() if k not in ours}
    assert out["model"] == "real"


def _everything(out: dict[str, Any]) -> Any:
    return CallShape(chat=True, stream=out.get("stream") is True, tools=bool(out.get("tools")), alternatives=5)


@given(BODIES, ENGINES)
def test_a_quiet_engine_is_asked_for_nothing(body: dict[str, Any], engine: Engine) -> None:
    out = sent(body, engine.silenced())
    assert out.keys() - body.keys() <= {"max_tokens", "max_completion_tokens"}
    for name in ("logprobs", "top_logprobs", "stream_options", "return_token_ids"):
        assert (name in out, out.get(name)) == (name in body, body.get(name))


@given(BODIES, ENGINES)
def test_what_was_added_is_what_may_be_taken_away_again(body: dict[str, Any], engine: Engine) -> None:
    extra = added(body, sent(body, engine), engine)
    assert not extra.keys() & body.keys()
    for name in extra:
        assert name not in sent(body, engine.without(name))


@pytest.mark.parametrize("quiet", [False, True], ids=["recorded", "black_box"])
@pytest.mark.parametrize("prompt", [{"messages": []}, {"prompt": "x"}], ids=["chat", "text"])
def test_a_box_cannot_prompt_the_model_past_its_messages(prompt: dict[str, Any], quiet: bool) -> None:
    hidden: dict[str, Any] = {
        "kv_transfer_params": {"prompt_token_ids": [1, 2], "remote_host": "10.0.0.1"},
        "ec_transfer_params": {"x": 1},
        "prompt_token_ids": [1, 2],
        "input_ids": [1, 2],
    }
    engine = Engine("vllm").silenced() if quiet else Engine("vllm")
    assert hidden.keys() <= SMUGGLED
    assert not sent({**prompt, **hidden}, engine).keys() & hidden.keys()
    allowed = {"kv_transfer_params": {"do_remote_decode": True}}
    assert sent({**prompt, **hidden}, engine, extra_body=allowed)["kv_transfer_params"] == {"do_remote_decode": True}


def test_vllm_is_asked_for_every_token() -> None:
    out = sent({"messages": [], "stream": True, "stream_options": {"x": 1}}, Engine("vllm"), top_logprobs=3)
    assert (out["logprobs"], out["top_logprobs"], out["return_token_ids"]) == (True, 3, True)
    assert out["stream_options"] == {"x": 1, "include_usage": True}
    assert "stream_options" not in sent({"messages": []})


def test_an_agent_that_wants_more_alternatives_or_said_no_logprobs_is_still_captured() -> None:
    out = sent({"messages": [], "logprobs": False, "top_logprobs": 8})
    assert (out["logprobs"], out["top_logprobs"]) == (True, 8)


def test_each_engine_is_asked_in_its_own_words() -> None:
    chat = {"messages": [], "stream": True, "stream_options": {"include_usage": True}, "tools": [{}]}
    assert sent({"messages": []}, Engine("llamacpp"), top_logprobs=0)["top_logprobs"] == 1
    assert sent({"messages": []}, Engine("sglang"))["return_prompt_token_ids"] is True
    assert sent(chat, Engine("hf_router"), top_logprobs=20)["top_logprobs"] == 5
    hosted = sent({**chat, "max_tokens": 9}, Engine("openai"))
    assert ("return_token_ids" in hosted, "max_tokens" in hosted, hosted["max_completion_tokens"]) == (False, False, 9)
    old = sent(chat, Engine("vllm", (0, 9, 1)))
    assert (old["return_tokens_as_token_ids"], "return_token_ids" in old) == (True, False)
    text = sent({"prompt": "x"}, Engine("vllm"))
    assert (text["logprobs"], "top_logprobs" in text) == (5, False)


@pytest.mark.parametrize(
    ("engine", "with_tools", "without"),
    [
        (Engine("sglang"), True, True),
        (Engine("llamacpp"), True, True),
        (Engine("vllm", (0, 10, 1)), False, False),
        (Engine("vllm", (0, 10, 2)), True, False),
        (Engine("vllm", (0, 12, 0)), True, False),
        (Engine("vllm", (0, 13, 0)), False, False),
        (Engine("vllm", (0, 32, 0)), False, False),
        (Engine("vllm"), False, False),
        (Engine("unknown"), False, False),
        (Engine("unknown").without("stream"), True, True),
        (Engine("sglang").silenced(), False, False),
    ],
)
def test_engines_that_tell_all_only_at_the_end_are_asked_for_no_stream(
    engine: Engine, with_tools: bool, without: bool
) -> None:
    chat = {"messages": [], "stream": True, "stream_options": {"include_usage": True}}
    for count, unstreamed in ((1, with_tools), (0, without)):
        tools: list[dict[str, Any]] = [{}] * count
        out = sent({**chat, "tools": tools}, engine)
        assert (out["stream"], "stream_options" in out) == (not unstreamed, not unstreamed)
        assert sent({"messages": [], "tools": tools}, engine).get("stream") is None


def test_an_engine_that_cannot_tell_all_says_since_when_it_can() -> None:
    assert Engine("vllm", (0, 9, 1)).advice == "vLLM 0.9.1 cannot tell them all, 0.13 and later can"
    assert Engine("vllm", (0, 12, 0)).advice.startswith("vLLM 0.12.0 drops tokens of a stream")
    assert [Engine(*who).advice for who in (("vllm",), ("vllm", (0, 13, 0)), ("unknown",), ("sglang",))] == [""] * 4
    assert Engine("openai").advice == "OpenAI tells no token ids"


def test_sampling_of_the_endpoint_wins_and_no_cap_means_no_cap() -> None:
    out = sent({"messages": [], "temperature": 1, "seed": 1, "max_tokens": 99999}, cap=0, temperature=0.2, seed=7)
    assert (out["temperature"], out["seed"], out["max_tokens"]) == (0.2, 7, 99999)
    assert "max_tokens" not in sent({"messages": []}, cap=0)


def test_thinking_and_extra_fields_are_merged_into_what_is_there() -> None:
    body = {"messages": [], "chat_template_kwargs": {"a": 1}}
    out = sent(body, thinking=False, extra_body={"chat_template_kwargs": {"b": 2}, "min_p": 0.1, "max_tokens": 10**6})
    assert out["chat_template_kwargs"] == {"a": 1, "enable_thinking": False, "b": 2}
    assert (out["min_p"], out["max_tokens"]) == (0.1, 4096)
    assert "chat_template_kwargs" not in sent({"messages": []})


def test_a_refusal_gives_agents_no_reason_to_try_again() -> None:
    for limits, turns, spent in ((Limits(max_turns=3), 3, 0), (Limits(token_budget=500), 0, 500)):
        body = problem(limit_reached(limits, turns=turns, spent=spent)).decode()
        assert "invalid_request_error" in body
        assert not re.search(r"\d|rate|limit exceeded|server_error|overloaded|timeout|unavailable", body)
        assert not limit_reached(limits, turns=turns - 1, spent=spent - 1)
    assert not limit_reached(Limits(), turns=10**6, spent=10**9)


def said(body: bytes, **headers: str) -> ProbeAnswer:
    return ProbeAnswer(200, body, headers)


def test_an_engine_is_known_by_its_signature() -> None:
    def told(owner: str, **fields: str) -> str:
        where = Endpoint.model_validate({"base_url": "http://h/v1", "model": "m", **fields})
        listed = f'{{"data": [{{"id": "other", "owned_by": "x"}}, {{"id": "m", "owned_by": "{owner}"}}]}}'
        return signed(where, said(listed.encode()))

    assert [told(owner) for owner in ("vllm", "sglang", "llamacpp", "openai")] == [
        "vllm",
        "sglang",
        "llamacpp",
        "unknown",
    ]
    assert told("vllm", kind="openai") == "vllm"
    assert told("who", kind="hf_router") == "hf_router"
    assert told("system", base_url="https://api.openai.com/v1") == "openai"
    assert signed(endpoint(), said(b"<html>")) == "unknown"
    assert signed(endpoint(), said(b"{}", server="llama.cpp")) == "llamacpp"
    assert signed(endpoint(), ProbeAnswer(404, b'{"data": [{"owned_by": "vllm"}]}')) == "unknown"
    assert guess(endpoint()).name == "unknown"


def test_an_engine_that_signs_nothing_is_known_by_its_other_answers() -> None:
    assert engine_of("vllm", {"/version": said(b'{"version": "0.11.2.dev3+cpu"}')}) == Engine("vllm", (0, 11, 2))
    assert engine_of("sglang", {"/server_info": said(b'{"version": "0.5.23"}')}) == Engine("sglang", (0, 5, 23))
    assert engine_of("unknown", {"/props": said(b'{"default_generation_settings": {}}')}) == Engine("llamacpp")
    assert engine_of("unknown", {"/get_model_info": said(b'{"model_path": "x"}')}).name == "sglang"
    # Half the field has a route for its version: a number alone is nobody's signature.
    assert engine_of("unknown", {"/version": said(b'{"version": "0.5.1"}'), "/props": ProbeAnswer(404)}) == Engine()
    assert engine_of("vllm", {"/version": said(b"nonsense")}) == Engine("vllm")


def test_what_is_known_of_an_engine_outlives_a_probe_that_learns_less_and_is_not_kept_for_ever() -> None:
    known = KnownEngines()
    known.found(endpoint(), Engine("vllm", (0, 12, 0)))
    known.learn(endpoint(), known.get(endpoint()).without("logprobs"))
    known.found(endpoint(), Engine("vllm"))
    known.found(endpoint(), Engine())
    assert known.get(endpoint()) == Engine("vllm", (0, 12, 0), frozenset({"logprobs"}))
    known.found(endpoint(), Engine("vllm", (0, 13, 0)))
    assert known.get(endpoint()).version == (0, 13, 0)
    for n in range(2000):
        known.found(endpoint().model_copy(update={"model": str(n)}), Engine("sglang"))
    assert known.get(endpoint()) == Engine()


def test_a_refused_field_is_found_by_name() -> None:
    ours = {"logprobs": True, "top_logprobs": 5, "return_token_ids": True}
    assert refused_field(b"logprobs is not supported with tools + stream", ours) == "logprobs"
    assert refused_field(b'{"param":"top_logprobs"}', ours) == "top_logprobs"
    assert refused_field(b"Extra inputs: return_token_ids, logprobs", ours) == "return_token_ids"
    assert rejects_stream(b"logprobs is not supported with tools + stream")
    assert rejects_stream(b"return_token_ids is not supported with stream=true")
    assert not rejects_stream(b"Unrecognized request argument supplied: stream_options")
    assert refused_field(b"the logprobs_mode is wrong", ours) is None
    assert refused_field(b"maximum context length is 8192 tokens", ours) is None
    assert "top_logprobs" not in sent({"messages": []}, Engine("vllm").without("logprobs"))
    assert wants_modern_cap(b"Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
    assert not wants_modern_cap(b"'max_tokens' or 'max_completion_tokens' is too large: 4096")
