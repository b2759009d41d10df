"""Network in setup: what a task allows, what the machine's package indexes are, and what is said of a refusal."""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollcage.results.fold import Rollout
from rollcage.sandboxes import mirrors
from rollcage.types import SandboxSpec, Task
from support.environment_server import served, shell
from support.playing import Play

INDEX = "127.0.0.2"
"""An address that is no public one, and that programs do not take for their own machine's."""
FETCH = "import urllib.request as u; print(u.urlopen('http://{host}/').status)"


def fetch(host: str) -> str:
    """A setup command that asks for an address."""
    return f'python3 -c "{FETCH.format(host=host)}"'


def setup_task(*commands: str) -> Task:
    return Task(instruction="true", setup=commands)


async def test_a_command_that_needed_a_network_says_whom_it_asked_for_and_the_remedy(play: Play) -> None:
    rollout: Rollout = await play(setup_task(fetch("index.example")), agent="shell")
    assert rollout.error_code == "setup_failed" and rollout.error
    assert "the box has no network, and it asked for index.example" in rollout.error
    assert 'setup_hosts=["index.example"]' in rollout.error and 'setup_hosts=["packages"]' in rollout.error
    assert rollout.setup[0].refused_hosts == ("index.example",)


async def test_a_host_that_is_not_on_the_list_is_named(play: Play) -> None:
    spec = SandboxSpec(setup_hosts=("other.example",))
    rollout: Rollout = await play(setup_task("true", fetch("index.example:81")), agent="shell", sandbox=spec)
    assert rollout.error
    assert 'may not reach index.example; allow that: setup_hosts=["other.example", "index.example"]' in rollout.error
    assert [result.refused_hosts for result in rollout.setup] == [(), ("index.example",)]


async def test_a_command_that_fails_for_another_reason_hears_nothing_of_networks(play: Play) -> None:
    rollout: Rollout = await play(setup_task(f"{fetch('index.example')} || true", "exit 3"), agent="shell")
    assert rollout.error and "network" not in rollout.error and "index.example" not in rollout.error


async def test_the_agent_and_the_verifier_have_no_proxy(play: Play) -> None:
    task = Task(instruction="env > seen.txt", setup=("env > before.txt",), verify=("! env | grep -i proxy",))
    rollout: Rollout = await play(task, agent="shell")
    assert rollout.reward == 1.0
    assert "HTTP_PROXY" in rollout.files["before.txt"] and "PROXY" not in rollout.files["seen.txt"].upper()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package index with one package, which this machine's pip is configured with; npm's registry has nothing."""
    server = ThreadingHTTPServer((INDEX, 0), _Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://{INDEX}:{server.server_address[1]}"
    for name, value in {
        "PIP_INDEX_URL": f"{address.replace('//', '//user:secret@')}/simple",
        "PIP_TRUSTED_HOST": INDEX,
        "PIP_NO_INDEX": "0",
        "PIP_FIND_LINKS": "",
        "PIP_EXTRA_INDEX_URL": "",
        "npm_config_registry": f"{address}/npm",
        "npm_config_fetch_retries": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mirrors, "_known", [])
    yield address
    server.shutdown()
    server.server_close()


class _Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answers = {"/simple/mine/": b"<a href='/files/mine-1-py3-none-any.whl'>mine-1-py3-none-any.whl</a>"}
        answers["/files/mine-1-py3-none-any.whl"] = _wheel()
        body = answers.get(self.path)
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/octet-stream")
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nobody reads it."""


def _wheel() -> bytes:
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        archive.writestr("mine.py", "WORD = 42\n")
        archive.writestr("mine-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
        archive.writestr("mine-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("mine-1.dist-info/RECORD", "")
    return output.getvalue()


async def test_the_machine_s_tools_are_asked_for_its_indexes(index: str) -> None:
    found = await mirrors.mirrors()
    assert INDEX in found.hosts
    assert found.env["PIP_INDEX_URL"] == f"{index}/simple", "without the name and password"
    assert found.env["npm_config_registry"].rstrip("/") == f"{index}/npm"


def test_packages_leads_pip_to_the_machine_s_index_over_the_server_s_door(index: str, tmp_path: Path) -> None:
    install = "pip install --user --break-system-packages mine && env > env.txt"
    look = "python3 -c 'import mine; print(mine.WORD)' && ! env | grep PIP_ && test ! -e ~/.rollcage-mirrors.crt"
    arguments = shell(look, setup=[install], setup_hosts=["packages"], verify=["grep -q PIP_INDEX_URL env.txt"])
    with served(tmp_path / "home", sessions=0) as url:
        result = _run_rollout(url, arguments)
        assert (result["error"], result["agent_exit_code"], result["reward"]) == (None, 0, 1.0), result
        assert "secret" not in result["files"]["/home/user/workdir/env.txt"]
        # The rest of the machine's network stays shut: the same address, not by that name.
        other = shell("true", setup=[install], setup_hosts=["index.example"])
        refused = _run_rollout(url, other)
        assert refused["error_code"] == "setup_failed" and "may not reach" in refused["error"], refused["error"]


def _run_rollout(url: str, arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"name": "run_rollout", "arguments": arguments}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
    accept = {"Accept": "application/json, text/event-stream"}
    answer = httpx.post(f"{url}/mcp", json=body, headers=accept, timeout=240)
    result: dict[str, Any] = answer.json()["result"]["structuredContent"]
    return result
