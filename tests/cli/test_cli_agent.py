"""`rollcage agent ls`, `install` and `check`, in processes of their own: an agent from a registry of the test's."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import IO

import pytest

from support.commands import environ, rollcage

PROGRAM = """#!/usr/bin/env python3
import json, os, subprocess, sys, urllib.request
messages = [{"role": "user", "content": sys.stdin.read()}]
while True:
    body = json.dumps({"model": "model", "messages": messages, "tools": []}).encode()
    headers = {"Authorization": "Bearer " + os.environ["KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["URL"] + "/chat/completions", body, headers)
    messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
    print(json.dumps({"text": messages[-1].get("content") or ""}), flush=True)
    if not messages[-1].get("tool_calls"):
        break
    for call in messages[-1]["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})
"""
AGENT = """
from rollcage.agent_events import AgentText
from rollcage.agents.base import ToolWords
from rollcage.agents.cli_agent import Command
from rollcage.agents.npm_agent import ANY, NpmAgent
from rollcage.agents.packages import Package
from rollcage.types import ScriptedCall

class Tiny(NpmAgent):
    name, version, wire = "tiny", "1.0.0", "chat"
    node, script = False, "bin/tiny"
    packages = {{ANY: Package("@rollcage-test/tiny", "{{version}}", "{hash}")}}
    tool_words = ToolWords(run=lambda command: ScriptedCall(name="bash", arguments={{"command": command}}))

    def command(self, run):
        return Command([], {{"URL": run.model.base_url, "KEY": run.key}}, run.instruction)

    def reader(self):
        return lambda data: [AgentText(text=data["text"])]
"""


def archive() -> bytes:
    """The package, with something in it that does not get smaller, so that it comes in pieces."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, data in {"bin/tiny": PROGRAM.encode(), "weight": Random(1).randbytes(2 << 20)}.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        manifest = b'{"name": "@rollcage-test/tiny", "version": "1.0.0"}'
        info = tarfile.TarInfo("package/package.json")
        info.size = len(manifest)
        tar.addfile(info, io.BytesIO(manifest))
    return packed.getvalue()


class Npm(ThreadingHTTPServer):
    """A registry with one package, in two versions. Half of an archive comes, the rest when `go_on` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        self.archive, self.go_on, self.asked = archive(), threading.Event(), list[str]()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.hash = base64.b64encode(hashlib.sha512(self.archive).digest()).decode()

    def about(self) -> bytes:
        """What npm asks for first."""
        versions = {
            version: {
                "name": "@rollcage-test/tiny",
                "version": version,
                "dist": {
                    "tarball": f"{self.address}/@rollcage-test/tiny/-/tiny-{version}.tgz",
                    "integrity": f"sha512-{self.hash}",
                },
            }
            for version in ("1.0.0", "1.1.0")
        }
        told = {"name": "@rollcage-test/tiny", "dist-tags": {"latest": "1.1.0"}, "versions": versions}
        return json.dumps(told).encode()


class _Handler(BaseHTTPRequestHandler):
    server: Npm

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        data = self.server.archive if self.path.endswith(".tgz") else self.server.about()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.path.endswith(".tgz"):
            self.wfile.write(data[: len(data) // 2])
            self.server.go_on.wait()
            data = data[len(data) // 2 :]
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def npm() -> Iterator[Npm]:
    with Npm() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.go_on.set()
        server.shutdown()


def offered(home: Path, npm: Npm, *, pinned: str) -> dict[str, str]:
    """An installed package offers the agent as an entry point; the environment that finds it."""
    about = home / "site" / "tiny_agent-1.dist-info"
    about.mkdir(parents=True)
    (home / "site" / "tiny_agent.py").write_text(AGENT.format(hash=pinned))
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-agent\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[rollcage.agents]\ntiny = tiny_agent:Tiny\n")
    return {"PYTHONPATH": str(home / "site"), "NPM_CONFIG_REGISTRY": npm.address}


def told_until(words: str, stream: IO[str]) -> str:
    """What it says up to the line with these words."""
    said = ""
    for line in stream:
        said += line
        if words in line:
            return said
    raise AssertionError(said)


def row(home: Path, env: dict[str, str]) -> dict[str, object]:
    listed = json.loads(rollcage(home, "agent", "ls", "--json", env=env).stdout)["agents"]
    (found,) = [agent for agent in listed if agent["name"] == "tiny"]
    return dict(found)


def test_an_agent_is_fetched_once_with_progress_in_a_pipe_and_listed_with_what_it_costs(
    tmp_path: Path, npm: Npm
) -> None:
    env = offered(tmp_path, npm, pinned=npm.hash)
    assert row(tmp_path, env)["installed"] is False
    command = [sys.executable, "-m", "rollcage", "agent", "install", "tiny", "--json"]
    with subprocess.Popen(
        command, env=environ(tmp_path, env), cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stderr
        said = told_until("MB fetched", process.stderr)
        npm.go_on.set()
        said += process.stderr.read()
        built = json.loads(process.stdout.read())
    assert process.returncode == 0, said
    assert built["built"] == ["tiny-1.0.0"]
    assert built["start_cpu_s"]["tiny"] > 0
    assert "setup: preparing tiny-1.0.0 (once)" in said and "setup: tiny-1.0.0 is ready" in said
    assert f"tiny is here; a rollout of three model calls takes {built['start_cpu_s']['tiny']} s of CPU" in said
    found = row(tmp_path, env)
    assert (found["version"], found["wire"], found["installed"]) == ("1.0.0", "chat", True)
    assert int(str(found["bytes"])) > 2 << 20
    assert found["start_cpu_s"] == built["start_cpu_s"]["tiny"]
    asked = len(npm.asked)
    again = rollcage(tmp_path, "agent", "install", "tiny", env=env)
    assert again.returncode == 0 and "preparing" not in again.stderr
    checked = rollcage(tmp_path, "agent", "check", "tiny", "--only", "install", "--only", "run.finishes", env=env)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.splitlines()[-1] == "tiny: all 3 checks hold"
    assert len(npm.asked) == asked, "nothing was asked of the registry again"


def test_another_version_is_taken_with_a_warning_and_a_package_that_is_not_the_pinned_one_is_not(
    tmp_path: Path, npm: Npm
) -> None:
    npm.go_on.set()
    env = offered(tmp_path, npm, pinned="somebody else's")
    ran = rollcage(tmp_path, "agent", "check", "tiny@1.1.0", "--only", "install", env=env)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("tiny 1.1.0: no hash of this version is known") == 1
    assert "setup: tiny-1.1.0 is ready" in ran.stderr
    refused = rollcage(tmp_path, "agent", "install", "tiny", env=env)
    assert refused.returncode != 0
    assert "@rollcage-test/tiny@1.0.0 is not what was pinned" in refused.stderr
    assert row(tmp_path, env)["installed"] is False


def test_an_agent_that_needs_nothing_says_so_and_one_that_nobody_knows_is_named(tmp_path: Path) -> None:
    ran = rollcage(tmp_path, "agent", "install", "shell")
    assert (ran.returncode, ran.stderr) == (0, "setup: shell needs nothing\n")
    ran = rollcage(tmp_path, "agent", "check", "nobody")
    assert ran.returncode == 2 and "no 'nobody' here; known: claude-code, codex, loop" in ran.stderr
    nowhere = {"DOCKER_HOST": f"unix://{tmp_path}/nowhere.sock"}
    ran = rollcage(tmp_path, "agent", "check", "nop", "--sandbox", "container", env=nowhere)
    assert (ran.returncode, ran.stdout) == (3, "") and "no container engine answers" in ran.stderr
    ran = rollcage(tmp_path, "agent", "check", "nop", "--only", "run.finishes", "--json")
    told = json.loads(ran.stdout)
    assert (ran.returncode, told["agent"], told["conforms"]) == (0, "nop", True)
    found = {agent["name"]: agent for agent in json.loads(rollcage(tmp_path, "agent", "ls", "--json").stdout)["agents"]}
    assert {name for name, agent in found.items() if agent["installed"] is None} == {
        "mini",
        "shell",
        "loop",
        "nop",
        "oracle",
    }
    assert {agent["wire"] for agent in found.values()} == {"chat", "messages", "responses", ""}
