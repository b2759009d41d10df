"""The HTTP API of a real server process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from support.served import Served, served, shell

ASK = """python3 - <<'EOF'
import json, os, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "stream": True, "messages": [{"role": "user", "content": "speak"}]}
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(address, json.dumps(body).encode(), headers)
print(len(urllib.request.urlopen(request).read()))
EOF"""
"""What an agent that is a shell script does to ask its model."""


LOADED = re.compile(r"""(?:src|href|action)=["']?([^"'> ]+)|@import|url\(""")
"""What a page would fetch, or lead to."""


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served(tmp_path_factory.mktemp("home"), "--max-body-mb", "1") as running:
        yield running


async def started(http: httpx.AsyncClient, arguments: dict[str, Any], status: int = 201) -> str:
    answer = await http.post("/rollouts", json=arguments)
    assert answer.status_code == status, answer.text
    return str(answer.json()["rollout_id"])


async def result(http: httpx.AsyncClient, rollout_id: str) -> dict[str, Any]:
    answer = await http.get(f"/rollouts/{rollout_id}/result", params={"wait_s": 60})
    assert answer.status_code == 200
    return dict(answer.json())


def frames(text: str) -> list[dict[str, str]]:
    blocks = [block.split("\n") for block in text.split("\n\n") if block and not block.startswith((":", "retry"))]
    return [dict(line.split(": ", 1) for line in block if line) for block in blocks]


async def test_health_needs_nothing_and_unknown_addresses_say_so(server: Served) -> None:
    async with server.http() as http:
        health = await http.get("/health")
        assert health.json()["status"] == "healthy"
        assert health.headers["x-request-id"]
        mine = await http.get("/health", headers={"X-Request-ID": "mine-1"})
        assert mine.headers["x-request-id"] == "mine-1"
        odd = await http.get("/health", headers={"X-Request-ID": 'a"b'})
        assert odd.headers["x-request-id"] != 'a"b'
        assert (await http.head("/health")).status_code == 200
        nothing = await http.get("/rollouts/x/y/z")
        assert (nothing.status_code, nothing.json()["error_code"]) == (404, "not_found")
        method = await http.put("/rollouts")
        assert (method.status_code, method.json()["error_code"]) == (405, "method_not_allowed")
        assert method.headers["allow"] == "GET, POST"


@pytest.mark.parametrize(
    ("arguments", "argument", "said"),
    [
        ({}, "instruction", "instruction: is missing"),
        ({"instruction": "  "}, "instruction", "is empty"),
        ({"instruction": "x"}, "endpoint", "no model endpoint is named"),
        ({"instruction": "x", "endpont": "vllm"}, "endpont", "did you mean 'endpoint'"),
        ({"instruction": "x", "endpoint": "vlm"}, "endpoint", "did you mean 'vllm'"),
        ({"instruction": "x", "endpoint": "vllm"}, "base_url", "VLLM_URL"),
        ({"instruction": "x", "endpoint": "openai"}, "api_key", "OPENAI_API_KEY"),
        ({"instruction": "x", "model_key": "nope://y"}, "model_key", "vllm://"),
        ({"instruction": "x", "endpoint": "scripted", "mode": "open"}, "mode", "transparent_proxy"),
        (
            {"instruction": "x", "endpoint": "scripted", "agent": "vim"},
            "agent",
            "known: claude-code, codex, loop, mini, mini-swe-agent, nop, opencode, oracle, pi, qwen-code, shell",
        ),
        ({"instruction": "x", "endpoint": "scripted", "sandbox": "moon"}, "sandbox", "known:"),
        ({"instruction": "x", "endpoint": "scripted", "agent_timeout_s": 0}, "agent_timeout_s", "greater than 0"),
        ({"instruction": "x", "endpoint": "scripted", "upload_files": {"../../x": "y"}}, "upload_files", "not name"),
        ({"instruction": "x", "endpoint": "scripted", "environment": "shop"}, "environment", "it offers none"),
        ({"instruction": "x", "api_key": ["secret-value"]}, "api_key", "valid string"),
    ],
)
async def test_a_mistake_names_its_argument_and_starts_nothing(
    server: Served, arguments: dict[str, Any], argument: str, said: str
) -> None:
    async with server.http() as http:
        before = (await http.get("/rollouts", params={"limit": 200})).json()["rollouts"]
        answer = await http.post("/rollouts", json=arguments)
        assert answer.status_code == 422
        problem = answer.json()
        assert (problem["argument"] or "") == argument, problem
        assert said in problem["error"]
        assert problem["error_code"] == "bad_argument"
        assert "secret-value" not in answer.text
        assert (await http.get("/rollouts", params={"limit": 200})).json()["rollouts"] == before


async def test_bodies_that_are_no_arguments_are_refused_by_kind(server: Served) -> None:
    async with server.http() as http:
        for body, status in ((b"{", 400), (b"[1]", 422), (b'"x"', 422), (b"", 422)):
            answer = await http.post("/rollouts", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == status, body
            assert set(answer.json()) == {"error", "error_code", "argument"}
        # What a web page of another site can send without asking the browser first is not taken for JSON.
        plain = await http.post("/rollouts", content=json.dumps(shell("true")), headers={"content-type": "text/plain"})
        assert plain.status_code == 422

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(64):
                yield b"x" * (64 << 10)

        assert (await http.post("/rollouts", content=b"x" * (2 << 20))).status_code == 413
        large = await http.post("/rollouts", content=endless(), headers={"content-type": "application/json"})
        assert (large.status_code, large.json()["error_code"]) == (413, "too_large")


async def test_without_keys_only_this_machine_s_user_may_ask(server: Served) -> None:
    async with server.http() as http:
        for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}):
            for request in (http.build_request("GET", "/rollouts"), http.build_request("POST", "/rollouts", json={})):
                request.headers.update(headers)
                answer = await http.send(request)
                assert (answer.status_code, answer.json()["error_code"]) == (403, "forbidden"), headers
        unseen = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
        assert (await http.get("/page/board", headers=unseen)).status_code == 403
        followed_a_link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        assert (await http.get("/health", headers=followed_a_link)).status_code == 200
        same = await http.get("/rollouts", headers={"Origin": server.url})
        assert same.status_code == 200
        local = await http.get("/rollouts", headers={"Host": f"localhost:{httpx.URL(server.url).port}"})
        assert local.status_code == 200


async def test_a_stream_has_ids_resumes_after_any_of_them_and_ends(server: Served) -> None:
    async with server.http() as http:
        rollout_id = await started(http, shell("echo hello"))
        whole = frames((await http.get(f"/rollouts/{rollout_id}/events")).text)
        assert whole[-1]["event"] == "end"
        assert json.loads(whole[-1]["data"]) == {"rollout_id": rollout_id, "outcome": "finished"}
        ids = [int(each["id"]) for each in whole[:-1]]
        assert ids == list(range(1, len(ids) + 1))
        for seen in (1, 7, ids[-1] - 1):
            rest = await http.get(f"/rollouts/{rollout_id}/events", headers={"Last-Event-ID": str(seen)})
            assert frames(rest.text) == whole[seen:]
            assert frames((await http.get(f"/rollouts/{rollout_id}/events?after={seen}")).text) == whole[seen:]
        over = await http.get(f"/rollouts/{rollout_id}/events", headers={"Last-Event-ID": str(ids[-1])})
        assert over.status_code == 204
        headers = {"Accept": "application/json"}
        page = (await http.get(f"/rollouts/{rollout_id}/events?after=2&limit=3", headers=headers)).json()
        assert [entry["seq"] for entry in page["events"]] == [3, 4, 5]
        assert (page["next_after"], page["ended"]) == (5, False)
        assert (await http.get("/rollouts/0000/events")).status_code == 404


async def test_what_a_model_says_is_heard_while_it_says_it_and_kept_token_by_token(server: Served) -> None:
    said = "one two three four five six seven"
    turn = {"text": said, "token_delay_s": 0.15}
    async with server.http() as http:
        rollout_id = await started(http, shell(ASK, solution=[turn]))
        live = frames((await http.get(f"/rollouts/{rollout_id}/events?live=1")).text)
        deltas = [json.loads(each["data"]) for each in live if each["event"] == "delta"]
        assert "".join(delta.get("content", "") for delta in deltas) == said
        assert len([delta for delta in deltas if delta.get("content")]) > 1
        assert all("id" not in each for each in live if each["event"] == "delta")
        plain = frames((await http.get(f"/rollouts/{rollout_id}/events")).text)
        assert [each for each in live if each["event"] != "delta"] == plain
        turns = (await http.get(f"/rollouts/{rollout_id}/turns")).json()
        assert turns["turns"][0]["message"]["content"] == said
        trace = (await http.get(f"/rollouts/{rollout_id}/trace")).json()["turns"][0]
        assert trace["trainable"]
        assert trace["completion_token_ids"] == turns["turns"][0]["completion_token_ids"]
        assert len(trace["completion_token_ids"]) == len(trace["per_token_logps"]) > 3
        lengths = len(trace["prompt_token_ids"]), len(trace["completion_token_ids"])
        assert trace["loss_mask"] == [0] * lengths[0] + [1] * lengths[1]
        state = (await http.get(f"/rollouts/{rollout_id}")).json()
        assert (state["proxy_turns_so_far"], state["tokens_so_far"]) == (1, lengths[1])


async def test_turns_come_in_pages(server: Served) -> None:
    async with server.http() as http:
        rollout_id = await started(http, shell("\n".join([ASK] * 3), solution=[{"text": "said"}]))
        await result(http, rollout_id)
        seen, after = [], 0
        for _ in range(3):
            page = (await http.get(f"/rollouts/{rollout_id}/turns", params={"after": after, "limit": 1})).json()
            seen += [turn["turn"] for turn in page["turns"]]
            after = page["next_after"]
        assert seen == [0, 1, 2]
        assert after is None


async def test_an_idempotency_key_joins_the_first_even_in_another_server(tmp_path: Path) -> None:
    arguments = shell("true", idempotency_key="k1", task_id="a")
    async with served(tmp_path) as first, first.http() as http:
        answers: list[dict[str, Any]] = [{}] * 8

        async def start(number: int) -> None:
            answers[number] = (await http.post("/rollouts", json=arguments)).json()

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(start, number)
        ids = {answer["rollout_id"] for answer in answers}
        assert len(ids) == 1
        assert sum(not answer["joined"] for answer in answers) == 1
        (rollout_id,) = ids
        await result(http, rollout_id)
    async with served(tmp_path) as second, second.http() as http:
        assert await started(http, arguments, 200) == rollout_id
        assert await started(http, {**arguments, "api_key": "another-key", "max_turns": 0}, 200) == rollout_id
        for name, value in {"instruction": "false", "verify": ["true"], "seed": 1, "agent": "opencode"}.items():
            other = await http.post("/rollouts", json={**arguments, name: value})
            assert (other.status_code, other.json()["error_code"]) == (409, "conflict")
            assert other.json()["argument"] == name
            assert f"another {name}" in other.json()["error"]
        listed = (await http.get("/rollouts")).json()["rollouts"]
        assert [each["rollout_id"] for each in listed] == [rollout_id]


async def test_a_queue_shows_places_and_a_full_one_says_when_to_ask_again(tmp_path: Path) -> None:
    async with served(tmp_path, "--at-once", "1", "--queue", "2") as server, server.http() as http:
        ids = [await started(http, shell("sleep 1000")) for _ in range(3)]
        full = await http.post("/rollouts", json=shell("true"))
        assert (full.status_code, full.json()["error_code"]) == (429, "queue_full")
        assert int(full.headers["retry-after"]) >= 1
        states = [(await http.get(f"/rollouts/{each}")).json() for each in ids]
        assert [state["queue_position"] for state in states] == [None, 1, 2]
        assert [state["status"] for state in states[1:]] == ["queued", "queued"]
        await http.delete(f"/rollouts/{ids[0]}", params={"wait_s": 60})
        assert (await http.get(f"/rollouts/{ids[2]}")).json()["queue_position"] == 1
        metrics = (await http.get("/metrics")).text
        assert "rollcage_rollouts_queued 1.0" in metrics
        assert "rollcage_rollouts_running 1.0" in metrics
        assert 'rollcage_rollouts_ended_total{outcome="aborted"} 1.0' in metrics
        # One that waits can be stopped too, and never began.
        assert (await http.delete(f"/rollouts/{ids[2]}", params={"wait_s": 60})).json()["aborted"]
        assert "before it began" in (await result(http, ids[2]))["error"]


async def test_the_document_says_all_of_it(server: Served) -> None:
    async with server.http() as http:
        document = (await http.get("/openapi.json")).json()
        below = ("", "/events", "/turns", "/trace", "/files", "/messages", "/result")
        wanted = {f"/rollouts/{{rollout_id}}{each}" for each in below} | {"/rollouts", "/health", "/metrics"}
        assert wanted <= set(document["paths"])
        assert document["components"]["schemas"]["Problem"]["properties"].keys() == {"error", "error_code", "argument"}
        undescribed = [
            name
            for name, schema in document["components"]["schemas"]["RolloutRequest"]["properties"].items()
            if not schema.get("description")
        ]
        assert undescribed == []
        for address in ("/nowhere", "/docs/x"):
            nothing = await http.get(address)
            assert (nothing.status_code, nothing.json()["error_code"]) == (404, "not_found"), address


async def test_the_reference_loads_nothing_of_another_site(server: Served) -> None:
    async with server.http() as http:
        page = await http.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert "http" not in policy
        loaded = LOADED.findall(page.text)
        assert "web/vendor/swagger-ui.js" in loaded
        for address in loaded:
            assert not re.match(r"[a-z]+:|//", address), address
            assert (await http.get(f"/{address}")).status_code == 200, address
        assert (await http.post("/docs")).status_code == 405


async def test_many_follow_at_once_and_all_see_the_same(server: Served) -> None:
    async with server.http() as http:
        rollout_id = await started(http, shell("for i in 1 2 3 4 5; do sleep 0.1; done", verify=["true"] * 10))
        heard: list[str] = []

        async def follow() -> None:
            # A connection of its own, as each of many users has.
            async with server.http() as mine:
                heard.append((await mine.get(f"/rollouts/{rollout_id}/events")).text)

        async def ask() -> None:
            async with server.http() as mine:
                for _ in range(5):
                    assert (await mine.get(f"/rollouts/{rollout_id}")).status_code == 200

        async with anyio.create_task_group() as tasks:
            for _ in range(64):
                tasks.start_soon(follow)
                tasks.start_soon(ask)
        assert len(heard) == 64
        assert len(set(heard)) == 1
        assert frames(heard[0])[-1]["event"] == "end"


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_the_server_keeps_to_its_document_whatever_is_sent(tmp_path: Path) -> None:
    # Arguments can be well-formed and still ask for what this server does not have; and "3" is taken for 3.
    apart = "positive_data_acceptance,negative_data_rejection"
    async with served(tmp_path, "--at-once", "1", "--queue", "2") as server, server.http() as http:
        await http.get("/openapi.json")  # it waits for slow imports, longer than schemathesis does
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--workers", "1"]
        command += ["--include-path-regex", "^/(rollouts|health|metrics)", "--exclude-path-regex", "/events$"]
        command += ["--exclude-checks", apart, "--request-timeout", "100", "--max-examples", "30"]
        # The same requests in every run: what it finds is found by whoever changed something.
        command += ["--generation-deterministic"]
        done = await anyio.to_thread.run_sync(
            lambda: subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False, cwd=tmp_path)
        )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
