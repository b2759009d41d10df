"""Keys: who may ask, what each may use and see, and that no key is ever kept or said again."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import anyio
import httpx
import pytest

from rollcage.errors import UsageError
from rollcage.schema.errors import Unauthorized
from rollcage.server.auth import ANYONE, Keys, digest_of, load_keys, loopback, new_key
from rollcage.server.serving import ServeOptions, checked
from rollcage.settings import Settings
from support.commands import rollcage
from support.served import served, shell

SECRET = "sk-caller-secret-0123456789abcdef"
SERVERS_OWN = "sk-the-servers-own-key-9876543210"


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def test_a_key_file_has_hashes_only_and_each_key_its_name_and_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    alice, boss = new_key(path, "alice"), new_key(path, "boss", admin=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert alice not in path.read_text()
    path.write_text(path.read_text().replace('[keys."alice"]', '[keys."alice"]\nat_once = 2\nqueue = 3'))
    keys = load_keys(path)
    assert keys.caller(bearer(alice)).quota == ("alice", 2, 3, False)
    assert keys.caller([(b"x-api-key", boss.encode())]).admin
    for wrong in ("", "x", alice + "x", digest_of(alice)):
        with pytest.raises(Unauthorized):
            keys.caller(bearer(wrong))
    with pytest.raises(UsageError, match="already"):
        new_key(path, "alice")
    with pytest.raises(UsageError, match="no name"):
        new_key(path, 'x"]\n')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no keys"),
        ("x =", "not TOML"),
        ('[keys.a]\nsha256 = "zz"', "keys.a.sha256"),
        ('[keys.a]\nkey = "plain"', "keys.a"),
    ],
)
def test_a_key_file_that_makes_no_sense_says_where(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(UsageError, match=said) as error:
        load_keys(tmp_path / "keys.toml")
    assert "plain" not in str(error.value)


def test_without_keys_anyone_may_ask_and_listening_beyond_loopback_is_refused_unless_told_so() -> None:
    assert Keys().caller([]) is ANYONE
    settings = Settings.from_environ({"ROLLCAGE_HOME": "/nowhere"})
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        assert loopback(host)
        assert not checked(settings, ServeOptions(host=host))
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(UsageError, match="there is no key"):
            checked(settings, ServeOptions(host=host))
        checked(settings, ServeOptions(host=host, insecure_no_key=True))
    keyed = Settings.from_environ({"ROLLCAGE_HOME": "/nowhere", "ROLLCAGE_SERVER_KEY": "k" * 20})
    assert checked(keyed, ServeOptions(host="0.0.0.0")).caller(bearer("k" * 20)).admin
    with pytest.raises(UsageError, match="allow-endpoint"):
        checked(settings, ServeOptions.model_validate({"limits": {"allow_endpoints": ["host:80"]}}))


async def test_each_key_sees_its_own_rollouts_and_an_admin_all(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    alice, bob, boss = new_key(path, "alice"), new_key(path, "bob"), new_key(path, "boss", admin=True)
    async with (
        served(tmp_path / "home", "--api-key-file", str(path)) as server,
        server.http(alice) as by_alice,
        server.http(bob) as by_bob,
        server.http(boss) as by_boss,
        httpx.AsyncClient(base_url=server.url, timeout=120) as by_nobody,
    ):
        assert (await by_nobody.get("/health")).status_code == 200
        for method, address in (("GET", "/rollouts"), ("POST", "/rollouts"), ("GET", "/metrics"), ("POST", "/reset")):
            refused = await by_nobody.request(method, address)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer"), address
        rollout_id = (await by_alice.post("/rollouts", json=shell("sleep 1000", idempotency_key="k"))).json()[
            "rollout_id"
        ]
        for below in ("", "/events", "/turns", "/trace", "/files", "/messages", "/result"):
            assert (await by_bob.get(f"/rollouts/{rollout_id}{below}")).status_code == 404, below
        assert (await by_bob.delete(f"/rollouts/{rollout_id}")).status_code == 404
        assert (await by_bob.get("/rollouts")).json()["rollouts"] == []
        assert len((await by_alice.get("/rollouts")).json()["rollouts"]) == 1
        # The same word of another caller is another key.
        other = (await by_bob.post("/rollouts", json=shell("true", idempotency_key="k"))).json()
        assert not other["joined"]
        assert len((await by_boss.get("/rollouts")).json()["rollouts"]) == 2
        assert (await by_boss.delete(f"/rollouts/{rollout_id}", params={"wait_s": 60})).json()["aborted"]
        text = server.log.read_text()
        assert '"caller": "alice"' in text
        assert not [key for key in (alice, bob, boss) if key in text]


async def test_a_key_at_its_limit_waits_without_holding_up_the_others(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    alice, bob = new_key(path, "alice"), new_key(path, "bob")
    path.write_text(path.read_text().replace('[keys."alice"]', '[keys."alice"]\nat_once = 1\nqueue = 1'))
    async with (
        served(tmp_path / "home", "--api-key-file", str(path), "--at-once", "4") as server,
        server.http(alice) as by_alice,
        server.http(bob) as by_bob,
    ):
        first, second = [(await by_alice.post("/rollouts", json=shell("sleep 1000"))).json() for _ in range(2)]
        third = await by_alice.post("/rollouts", json=shell("true"))
        assert (third.status_code, third.json()["error_code"]) == (429, "queue_full")
        mine = (await by_bob.post("/rollouts", json=shell("true"))).json()["rollout_id"]
        assert (await by_bob.get(f"/rollouts/{mine}/result?wait_s=60")).json()["outcome"] == "finished"
        waiting = (await by_alice.get(f"/rollouts/{second['rollout_id']}")).json()
        assert (waiting["status"], waiting["queue_position"]) == ("queued", 1)
        await by_alice.delete(f"/rollouts/{first['rollout_id']}?wait_s=60")
        with anyio.fail_after(120):
            while (await by_alice.get(f"/rollouts/{second['rollout_id']}")).json()["status"] != "running":
                await anyio.sleep(0.05)


async def test_one_key_cannot_fill_the_queue_for_the_others(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    alice, bob = new_key(path, "alice"), new_key(path, "bob")
    async with (
        served(tmp_path / "home", "--api-key-file", str(path), "--at-once", "1", "--queue", "4") as server,
        server.http(alice) as by_alice,
        server.http(bob) as by_bob,
    ):
        answers = [await by_alice.post("/rollouts", json=shell("sleep 1000")) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [201, 201, 201, 429]
        assert "the last 2 of 4 places in the queue are kept for others" in answers[-1].json()["error"]
        assert int(answers[-1].headers["retry-after"]) >= 1
        mine = await by_bob.post("/rollouts", json=shell("sleep 1000"))
        assert mine.status_code == 201
        # What waits for longer does not come first: bob has nothing that runs.
        assert (await by_bob.get(f"/rollouts/{mine.json()['rollout_id']}")).json()["queue_position"] == 1


ASK = """python3 - <<'EOF'
import json, os, urllib.error, urllib.request
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "speak"}]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
try:
    urllib.request.urlopen(request)
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
EOF"""
"""An agent that asks its model once, and prints the refusal."""


class Echo(BaseHTTPRequestHandler):
    """A model server that repeats, in its refusal, the key it was sent."""

    seen: list[str] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self._refuse()

    def do_GET(self) -> None:
        self._answer(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})

    def _refuse(self) -> None:
        key = self.headers.get("authorization", "")
        Echo.seen.append(key)
        self._answer(401, {"error": {"message": f"wrong key: {key}", "type": "invalid_request_error"}})

    def _answer(self, status: int, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def echo() -> Iterator[str]:
    Echo.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


async def test_a_key_in_the_arguments_is_never_stored_logged_or_said_again(tmp_path: Path, echo: str) -> None:
    home, said = tmp_path / "home", []
    async with served(home) as server, server.http() as http:
        bodies = [
            {"instruction": ASK, "base_url": echo, "api_key": SECRET, "model": "m", "agent": "shell"},
            {
                "instruction": ASK,
                "model_key": "hf-router://a:b",
                "hf_token": SECRET,
                "base_url": echo,
                "agent": "shell",
            },
            {"instruction": "x", "base_url": echo, "api_key": SECRET, "model": "m", "agent": "nonsense"},
            {"instruction": "x", "base_url": "nonsense", "api_key": SECRET, "model": "m"},
            {"instruction": "x", "base_url": echo, "api_key": [SECRET]},
            {"instruction": "x", "api_key": SECRET, "nonsense": SECRET},
        ]
        for body in bodies:
            answer = await http.post("/rollouts", json=body)
            said.append(answer.text)
            if answer.status_code == 201:
                rollout_id = answer.json()["rollout_id"]
                said.append((await http.get(f"/rollouts/{rollout_id}/result?wait_s=60")).text)
                said += [
                    (await http.get(f"/rollouts/{rollout_id}{below}")).text
                    for below in ("", "/events", "/turns", "/trace", "/files", "/messages")
                ]
        broken = await http.post(
            "/rollouts", content=f'{{"api_key": "{SECRET}", ', headers={"content-type": "application/json"}
        )
        said += [broken.text, (await http.get("/rollouts")).text, (await http.get("/metrics")).text]
        kept = [path.read_bytes() for path in home.rglob("*") if path.is_file()]
    kept += [path.read_bytes() for path in home.rglob("*") if path.is_file()]
    assert f"Bearer {SECRET}" in Echo.seen, "the model was never asked, so nothing was tried"
    assert not [text for text in said if SECRET in text]
    assert not [data for data in kept if SECRET.encode() in data]


async def test_the_server_s_own_key_never_goes_to_an_address_that_a_caller_names(tmp_path: Path, echo: str) -> None:
    own = {"OPENAI_API_KEY": SERVERS_OWN, "VLLM_API_KEY": SERVERS_OWN, "HF_ROUTER_API_KEY": SERVERS_OWN}
    async with served(tmp_path / "home", environment=own) as server, server.http() as http:
        for body in (
            {"endpoint": "openai", "base_url": echo},
            {"endpoint": "hf_router", "base_url": echo},
            {"model_key": "hf-router://a:b", "base_url": echo},
        ):
            answer = await http.post("/rollouts", json={"instruction": "x", "agent": "shell", **body})
            assert (answer.status_code, answer.json()["argument"]) == (422, "api_key"), answer.text
            assert "goes only to the server's own address" in answer.json()["error"]
        for body in ({"endpoint": "vllm", "base_url": echo}, {"model_key": "vllm://a", "vllm_url": echo}):
            answer = await http.post("/rollouts", json={"instruction": ASK, "agent": "shell", **body})
            assert answer.status_code == 201
            await http.get(f"/rollouts/{answer.json()['rollout_id']}/result?wait_s=60")
    assert Echo.seen
    assert not [key for key in Echo.seen if SERVERS_OWN in key]


async def test_addresses_can_be_limited_to_those_the_operator_allows(tmp_path: Path, echo: str) -> None:
    allowed = f"{echo}/models"
    async with served(tmp_path / "home", "--allow-endpoint", allowed) as server, server.http() as http:
        for base_url, status in (
            (echo, 422),
            (f"{allowed}/v1", 201),
            (f"{allowed}/../other/v1", 422),
            (f"{allowed}x/v1", 422),
            ("http://169.254.169.254/v1", 422),
        ):
            body = {"instruction": "x", "agent": "shell", "base_url": base_url, "api_key": "none", "model": "m"}
            answer = await http.post("/rollouts", json=body)
            assert answer.status_code == status, base_url


async def test_a_port_that_is_taken_and_a_server_without_keys_are_refused_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = rollcage(tmp_path, "serve", "--port", str(port))
        assert answer.returncode == 3
        assert "choose another --port" in answer.stderr
    answer = rollcage(tmp_path, "serve", "--host", "0.0.0.0")
    assert answer.returncode == 2
    assert "there is no key" in answer.stderr


async def test_pages_that_are_not_there_are_told_plainly_to_whoever_has_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    new_key(path, "alice")
    async with (
        served(tmp_path / "home", "--api-key-file", str(path)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=120) as by_nobody,
    ):
        for address in ("/web/nothing", "/web/%2e%2e/app.py", "/web//etc/passwd", "/web/%00"):
            answer = await by_nobody.get(address)
            assert (answer.status_code, answer.json()["error_code"]) == (404, "not_found"), address
        assert (await by_nobody.post("/web/reset")).status_code == 405
        assert "Traceback" not in server.log.read_text()


async def test_a_key_cannot_cancel_the_calls_of_another_by_naming_its_session(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    alice, bob = new_key(path, "alice"), new_key(path, "bob")
    session = {"mcp-session-id": "the-same", "accept": "application/json, text/event-stream"}
    arguments = shell("sleep 2", on_disconnect="abort")
    call = {"name": "run_rollout", "arguments": arguments}
    async with (
        served(tmp_path / "home", "--api-key-file", str(path)) as server,
        server.http(alice) as by_alice,
        server.http(bob) as by_bob,
        anyio.create_task_group() as tasks,
    ):
        answers: list[httpx.Response] = []

        async def run() -> None:
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
            answers.append(await by_alice.post("/mcp", json=body, headers=session))

        tasks.start_soon(run)
        with anyio.fail_after(120):
            while not (await by_alice.get("/rollouts")).json()["rollouts"]:
                await anyio.sleep(0.05)
        cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}
        assert (await by_bob.post("/mcp", json=cancel, headers=session)).status_code == 202
        assert (await by_bob.delete("/mcp", headers=session)).status_code == 204
        with anyio.fail_after(120):
            while not answers:
                await anyio.sleep(0.05)
        assert answers[0].json()["result"]["structuredContent"]["outcome"] == "finished"
