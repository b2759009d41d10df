"""The catalog: every way to name a model ends in one endpoint, or in an error that says what to set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollcage.cli.request import as_option
from rollcage.endpoints import CATALOG, NEUTRAL_SCRIPT, EndpointRequest, opened, resolve
from rollcage.errors import UsageError
from rollcage.settings import Settings
from rollcage.types import Endpoint, ScriptedTurn, Task

NOTHING = Settings.from_environ({"ROLLCAGE_HOME": "/nowhere"})


def settings(**environ: str) -> Settings:
    return Settings.from_environ({"ROLLCAGE_HOME": "/nowhere", **environ})


def request(**fields: Any) -> EndpointRequest:
    return EndpointRequest.model_validate(fields)


def complaint(asked: EndpointRequest, told: Settings = NOTHING, task: Task | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        resolve(asked, told, task)
    assert "\n" not in str(caught.value) and "--" not in str(caught.value), "Python has no options"
    # Every name that is asserted below stands in one of the two: as Python has it, and as a command has it.
    return f"{caught.value}; {caught.value.told(as_option)}"


def test_vllm_has_a_key_a_model_and_thinking_off_by_default_but_no_address() -> None:
    found = resolve(request(endpoint="vllm", base_url="http://127.0.0.1:8000"), NOTHING)
    assert (found.base_url, found.model) == ("http://127.0.0.1:8000/v1", "Qwen/Qwen3.5-4B")
    assert (found.key.get_secret_value(), found.sampling.thinking) == ("intercepted", False)
    message = complaint(request(endpoint="vllm"))
    assert "base_url" in message and "VLLM_URL" in message and "--base-url" in message


def test_openai_needs_only_a_key() -> None:
    found = resolve(request(endpoint="openai", api_key="sk-1"), NOTHING)
    assert (found.base_url, found.model, found.kind) == ("https://api.openai.com/v1", "gpt-4o-mini", "openai")
    assert found.sampling.thinking is None
    message = complaint(request(endpoint="openai"))
    assert "api_key" in message and "OPENAI_API_KEY" in message


def test_the_router_needs_only_a_key() -> None:
    found = resolve(request(endpoint="hf_router", api_key="hf_1"), NOTHING)
    assert found.base_url == "https://router.huggingface.co/v1"
    assert found.model == "Qwen/Qwen3-4B-Instruct-2507:nscale"
    message = complaint(request(endpoint="hf-router"))
    assert "HF_ROUTER_API_KEY" in message and "hf_token" in message


@pytest.mark.parametrize(
    ("kind", "prefix", "url"), [("vllm", "VLLM", "VLLM_URL"), ("openai", "OPENAI", ""), ("hf_router", "HF_ROUTER", "")]
)
def test_each_field_comes_from_the_argument_then_the_variable_then_the_default(
    kind: str, prefix: str, url: str
) -> None:
    told = settings(
        **{url or f"{prefix}_BASE_URL": "http://env/v1", f"{prefix}_API_KEY": "env-key", f"{prefix}_MODEL": "env-model"}
    )
    found = resolve(request(endpoint=kind), told)
    assert (found.base_url, found.model, found.key.get_secret_value()) == ("http://env/v1", "env-model", "env-key")
    explicit = {"base_url": "http://arg/v1", "model": "arg-model", "api_key": "arg-key"}
    for name, value in explicit.items():
        found = resolve(request(endpoint=kind, **{name: value}), told)
        got = {"base_url": found.base_url, "model": found.model, "api_key": found.key.get_secret_value()}
        assert got == {"base_url": "http://env/v1", "model": "env-model", "api_key": "env-key", name: value}


def test_local_is_what_the_settings_name() -> None:
    told = settings(ROLLCAGE_BASE_URL="http://gpu:9000", ROLLCAGE_API_KEY="k", ROLLCAGE_MODEL="mine")
    found = resolve(request(endpoint="local"), told)
    assert (found.base_url, found.model) == ("http://gpu:9000/v1", "mine")
    for field in ("base_url", "api_key", "model"):
        partly = {"base_url": "http://x", "api_key": "k", "model": "m"}
        del partly[field]
        assert f"ROLLCAGE_{field.upper()}" in complaint(request(endpoint="local", **partly))


def test_an_explicit_address_needs_no_shorthand() -> None:
    found = resolve(request(base_url="http://h:1/v1/", api_key="k", model="m"), NOTHING)
    assert (found.kind, found.base_url) == ("custom", "http://h:1/v1")
    assert "--model" in complaint(request(base_url="http://h:1", api_key="k"))
    assert "--api-key" in complaint(request(base_url="http://h:1", model="m"))


def test_a_key_in_the_environment_never_goes_to_an_address_it_was_not_meant_for() -> None:
    told = settings(ROLLCAGE_API_KEY="secret", OPENAI_API_KEY="secret", VLLM_API_KEY="secret")
    message = complaint(request(base_url="http://h:1", model="m"), told)
    assert "api_key" in message and "secret" not in message


def test_the_older_shape_for_vllm() -> None:
    found = resolve(request(model_key="vllm://org/repo", vllm_url="http://h:8000"), NOTHING)
    assert (found.kind, found.base_url, found.model) == ("vllm", "http://h:8000/v1", "org/repo")
    message = complaint(request(model_key="vllm://org/repo"))
    assert "vllm_url" in message and "VLLM_URL" in message
    assert resolve(request(model_key="vllm://org/repo"), settings(VLLM_URL="http://e")).base_url == "http://e/v1"


def test_the_older_shape_for_the_router() -> None:
    found = resolve(request(model_key="hf-router://org/repo:nscale", hf_token="hf_1"), NOTHING)
    assert (found.kind, found.model) == ("hf_router", "org/repo:nscale")
    assert found.key.get_secret_value() == "hf_1"
    assert "hf_token" in complaint(request(model_key="hf-router://org/repo:nscale"))


@pytest.mark.parametrize("key", ["gpt-4", "vllm:/x", "ftp://x", "vllm://", "://x"])
def test_a_model_key_of_another_form_is_refused(key: str) -> None:
    assert "model_key" in complaint(request(model_key=key, vllm_url="http://h"))


def test_arguments_that_mean_different_kinds_are_refused() -> None:
    assert "model_key" in complaint(request(endpoint="openai", model_key="vllm://x", vllm_url="http://h"))
    assert "hf_token" in complaint(request(vllm_url="http://h", hf_token="t"))


@pytest.mark.parametrize(
    ("thinking", "disable", "want"),
    [(None, None, False), (True, None, True), (False, None, False), (None, True, False), (None, False, None)],
)
def test_thinking_in_both_shapes(thinking: bool | None, disable: bool | None, want: bool | None) -> None:
    asked = request(endpoint="vllm", base_url="http://h", thinking=thinking, disable_thinking=disable)
    assert resolve(asked, NOTHING).sampling.thinking is want


@pytest.mark.parametrize("named", [{"model_key": "vllm://m", "vllm_url": "http://h"}, {"model_key": "hf-router://m:p"}])
def test_with_a_model_key_thinking_is_off_unless_asked_for(named: dict[str, str]) -> None:
    given = {**named, "hf_token": "t"} if "hf-router" in named["model_key"] else named
    assert resolve(request(**given), NOTHING).sampling.thinking is False
    assert resolve(request(**given, thinking=True), NOTHING).sampling.thinking is True
    assert resolve(request(**given, disable_thinking=False), NOTHING).sampling.thinking is None


def test_thinking_that_contradicts_itself_is_refused() -> None:
    asked = request(endpoint="vllm", base_url="http://h", thinking=True, disable_thinking=True)
    assert "disable_thinking" in complaint(asked)


def test_sampling_goes_along() -> None:
    asked = request(endpoint="vllm", base_url="http://h", temperature=0.5, seed=7, top_logprobs=0, extra_body={"a": 1})
    found = resolve(asked, NOTHING).sampling
    assert (found.temperature, found.seed, found.top_logprobs, found.extra_body) == (0.5, 7, 0, {"a": 1})
    assert (found.history, found.keep_reasoning) == ("as_sent", True)
    exact = resolve(
        request(endpoint="vllm", base_url="http://h", history="exact", keep_reasoning=False), NOTHING
    ).sampling
    assert (exact.history, exact.keep_reasoning) == ("exact", False)


@pytest.mark.parametrize(("typo", "meant"), [("vlm", "vllm"), ("open-ai", "openai"), ("scriptd", "scripted")])
def test_an_unknown_kind_is_answered_with_the_nearest(typo: str, meant: str) -> None:
    message = complaint(request(endpoint=typo))
    assert typo in message and f"did you mean {meant!r}" in message


def test_a_kind_that_resembles_nothing_is_answered_with_all() -> None:
    message = complaint(request(endpoint="zzz"))
    assert all(kind in message for kind in CATALOG)


def test_no_word_about_a_model_is_answered_with_how_to_name_one() -> None:
    message = complaint(request(), task=Task(instruction="x"))
    assert "--endpoint" in message and "--base-url" in message


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("http://h", "http://h/v1"),
        ("http://h/", "http://h/v1"),
        ("http://h/v1", "http://h/v1"),
        ("http://h/v1//", "http://h/v1"),
        ("http://h:80/proxy", "http://h:80/proxy/v1"),
        ("http://h/v1/chat/completions", "http://h/v1"),
        ("https://h/api/paas/v4", "https://h/api/paas/v4"),
        ("https://h/v1beta/openai", "https://h/v1beta/openai"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_v1_is_added_where_no_version_is_named(given: str, want: str) -> None:
    assert resolve(request(endpoint="vllm", base_url=given), NOTHING).base_url == want


@pytest.mark.parametrize(
    "url",
    ["h:8000", "ftp://h", "http://", "http://h:99999", "http://h:x", "http://h/v1?a=b", "http://h/a b", "http://[x"],
)
def test_what_is_no_address_is_refused_by_the_name_of_its_argument(url: str) -> None:
    assert complaint(request(endpoint="vllm", base_url=url)).startswith("base_url: ")
    assert complaint(request(endpoint="vllm"), settings(VLLM_URL=url)).startswith("VLLM_URL: ")


def test_an_address_with_a_password_is_refused_without_repeating_it() -> None:
    message = complaint(request(endpoint="vllm", base_url="http://me:hunter2@h/v1"))
    assert "hunter2" not in message and "api_key" in message


@pytest.mark.parametrize("key", ["a\nb", "schlüssel", "a\x00b"])
def test_a_key_that_no_header_can_carry_is_refused_without_repeating_it(key: str) -> None:
    message = complaint(request(endpoint="openai", api_key=key))
    assert "api_key" in message and key not in message


def test_keys_show_nowhere() -> None:
    asked = request(endpoint="openai", api_key="sk-hidden", hf_token="")
    found = resolve(asked, NOTHING)
    assert "sk-hidden" not in repr(asked) + repr(found) + asked.model_dump_json() + found.model_dump_json()


SOLVED = Task(instruction="x", solution=(ScriptedTurn(text="done"),))


class Lender:
    """Stands where a running scripted model would."""

    def __init__(self) -> None:
        self.turns: Sequence[ScriptedTurn] = ()

    def __call__(self, turns: Sequence[ScriptedTurn]) -> Endpoint:
        self.turns = turns
        return Endpoint(base_url="http://127.0.0.1:1/v1", model="scripted")


def test_a_task_with_a_solution_runs_scripted_where_nothing_else_is_named() -> None:
    lender = Lender()
    found = resolve(request(seed=3), NOTHING, SOLVED, scripted=lender)
    assert (found.kind, found.sampling.seed, lender.turns) == ("scripted", 3, SOLVED.solution)
    assert resolve(request(endpoint="vllm", base_url="http://h"), NOTHING, SOLVED, scripted=lender).kind == "vllm"
    assert "--endpoint" in complaint(request(model="m"), task=SOLVED)


def test_a_task_without_a_solution_gets_a_script_that_does_nothing() -> None:
    lender = Lender()
    resolve(request(endpoint="scripted"), NOTHING, Task(instruction="x"), scripted=lender)
    assert lender.turns == NEUTRAL_SCRIPT


def test_an_address_for_the_scripted_model_is_refused() -> None:
    assert "base_url" in complaint(request(endpoint="scripted", base_url="http://h"), task=SOLVED)
    assert "not offered here" in complaint(request(endpoint="scripted"), task=SOLVED)


async def test_a_bad_request_is_refused_before_anything_is_opened() -> None:
    with pytest.raises(UsageError, match="VLLM_URL"):
        async with opened(request(endpoint="vllm"), NOTHING, SOLVED):
            raise AssertionError("it must not get here")
