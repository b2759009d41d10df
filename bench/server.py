"""Measures the server: start-up, the round trip of a tool call, rollouts accepted, events to many followers.

    python bench/server.py [--json] [--calls 30]

Tool calls are measured beside OpenEnv's own way: an echo environment of OpenEnv's, served by OpenEnv's app, in the same
run, by the same client, over the same wires (a WebSocket step; a POST to /mcp). Every server is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
from websockets.asyncio.client import ClientConnection, connect

from rollcage.events import AgentEmitted, Ended, Queued
from rollcage.runner import Owners
from rollcage.store import Store
from rollcage.types import Endpoint, Job, Outcome, Task

SESSIONS = (1, 16, 64)
ECHO = """
import sys
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State

class Echo(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        server = FastMCP("echo")
        @server.tool
        async def echo_message(message: str) -> str:
            "Says it again."
            return message
        super().__init__(server)
        self._state = State(episode_id="e", step_count=0)
    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(done=False, reward=0.0)
    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation(done=False, reward=0.0)
    @property
    def state(self):
        return self._state

app = create_app(Echo, CallToolAction, CallToolObservation, env_name="echo", max_concurrent_envs=200)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""

Call = Callable[[], Awaitable[None]]


def free_port() -> int:
    """A port that nobody has."""
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@asynccontextmanager
async def running(command: list[str], port: int) -> AsyncIterator[tuple[str, float, int]]:
    """A server process: its address, the seconds until it answered /health, its process id."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(verify=False) as http:
            while True:
                try:
                    if (await http.get(f"{address}/health")).status_code == 200:
                        break
                except httpx.TransportError:
                    await anyio.sleep(0.01)
        yield address, time.perf_counter() - began, process.pid
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def cpu_of(pid: int) -> float:
    """CPU seconds a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def round_trips(calls: list[Call], each: int, pid: int) -> dict[str, float]:
    """Every caller calls `each` times, all at once; milliseconds."""
    times: list[float] = []

    async def work(call: Call) -> None:
        for _ in range(each):
            began = time.perf_counter()
            await call()
            times.append((time.perf_counter() - began) * 1000)

    used, began = cpu_of(pid), time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(work, call)
    took = time.perf_counter() - began
    cuts = statistics.quantiles(times, n=100)
    return {
        "p50_ms": round(cuts[49], 2),
        "p99_ms": round(cuts[98], 2),
        "per_s": round(len(times) / took, 1),
        "cpu_ms": round((cpu_of(pid) - used) * 1000 / len(times), 2),
    }


async def web_socket(address: str, tool: str, arguments: dict[str, Any], stack: AsyncExitStack) -> Call:
    """A session of OpenEnv's protocol; each call is one step."""
    socket: ClientConnection = await stack.enter_async_context(connect(address.replace("http", "ws") + "/ws"))
    await socket.send(json.dumps({"type": "reset", "data": {}}))
    await socket.recv()
    action = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
    frame = json.dumps({"type": "step", "data": action})

    async def call() -> None:
        await socket.send(frame)
        answer = json.loads(await socket.recv())
        assert answer["type"] == "observation", answer

    return call


async def posted(address: str, tool: str, arguments: dict[str, Any], stack: AsyncExitStack) -> Call:
    """A client that posts tool calls to /mcp over a connection of its own."""
    # Servers drop connections that are idle for 5 s; one that is about to be dropped is not used again.
    limits = httpx.Limits(keepalive_expiry=3)
    client = httpx.AsyncClient(base_url=address, verify=False, timeout=120, limits=limits)
    http = await stack.enter_async_context(client)
    headers = {"accept": "application/json, text/event-stream"}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}
    opening = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}
    opened = await http.post(
        "/mcp", headers=headers, json={"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": opening}
    )
    if "error" in opened.text:  # OpenEnv's own: it knows sessions of its own making
        create = {"jsonrpc": "2.0", "id": 0, "method": "openenv/session/create", "params": {}}
        session = (await http.post("/mcp", json=create)).json()["result"]["session_id"]
        body["params"] = {"name": tool, "arguments": arguments, "session_id": session}
    elif "mcp-session-id" in opened.headers:
        headers["mcp-session-id"] = opened.headers["mcp-session-id"]

    async def call() -> None:
        answer = await http.post("/mcp", headers=headers, json=body)
        assert answer.status_code == 200, answer.text
        assert '"error":{' not in answer.text, answer.text

    return call


async def tool_calls(address: str, pid: int, tool: str, arguments: dict[str, Any], each: int) -> dict[str, Any]:
    """Round trips over both wires, at several numbers of sessions."""
    told: dict[str, Any] = {}
    for name, opened in (("websocket", web_socket), ("mcp", posted)):
        for sessions in SESSIONS:
            async with AsyncExitStack() as stack:
                calls = [await opened(address, tool, arguments, stack) for _ in range(sessions)]
                await calls[0]()
                count = max(5, each * 4 // sessions)
                told[f"{name} x{sessions}"] = await round_trips(calls, count, pid)
    return told


async def started_per_s(http: httpx.AsyncClient, count: int) -> float:
    """How many rollouts are accepted per second: on the disk, and in the queue."""
    body = {"instruction": "true", "agent": "shell", "endpoint": "scripted"}
    began = time.perf_counter()

    async def start(limit: anyio.CapacityLimiter) -> None:
        async with limit:
            assert (await http.post("/rollouts", json=body)).status_code == 201

    limit = anyio.CapacityLimiter(32)
    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(start, limit)
    return round(count / (time.perf_counter() - began), 1)


async def follower(address: str, rollout_id: str, ready: Callable[[], None]) -> int:
    """Follows a rollout to its end over a bare socket, so that the client costs little; how many entries came."""
    url = httpx.URL(address)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        f"GET /rollouts/{rollout_id}/events HTTP/1.1\r\nHost: {url.host}\r\nConnection: close\r\n\r\n".encode()
    )
    seen, rest = 0, b""
    while data := await reader.read(1 << 16):
        if not seen:
            ready()
        rest += data
        seen += rest.count(b"event: entry\n")
        rest = rest[-12:] if not rest.endswith(b"event: entry\n") else b""
    writer.close()
    return seen


async def events_per_s(address: str, home: Path, followers: int, events: int) -> tuple[float, float]:
    """Events per second that all followers of one rollout get together: while it is written, and afterwards."""
    job = Job(task=Task(instruction="bench"), model=Endpoint(base_url="http://127.0.0.1:1/v1", model="none"))
    async with Store.open(home / "rollouts.db") as store:
        with Owners.beside(store).hold() as owner:
            await store.append("bench", Queued(job=job, owner=owner))
            waiting = followers
            counts: list[int] = []
            all_there = anyio.Event()

            def ready() -> None:
                nonlocal waiting
                waiting -= 1
                if not waiting:
                    all_there.set()

            async def follow() -> None:
                counts.append(await follower(address, "bench", ready))

            async def say(number: int) -> None:
                text = {"type": "text", "part": {"id": f"p{number}", "text": "words " * 20}}
                await store.append("bench", AgentEmitted(raw=text))

            async with anyio.create_task_group() as tasks:
                for _ in range(followers):
                    tasks.start_soon(follow)
                await all_there.wait()
                began = time.perf_counter()
                for _ in range(events // 10):
                    async with anyio.create_task_group() as some:
                        for number in range(10):
                            some.start_soon(say, number)
                await store.append("bench", Ended(outcome=Outcome.FINISHED))
            live = (sum(counts) - followers) / (time.perf_counter() - began)
            assert set(counts) == {events // 10 * 10 + 2}, set(counts)
            counts.clear()
            began = time.perf_counter()
            async with anyio.create_task_group() as tasks:
                for _ in range(followers):
                    tasks.start_soon(follow)
            return round(live), round(sum(counts) / (time.perf_counter() - began))


async def main(calls: int, home: Path) -> dict[str, Any]:
    """All of it."""
    told: dict[str, Any] = {}
    port = free_port()
    command = [sys.executable, "-m", "rollcage", "serve", "--port", str(port), "--home", str(home), "--quiet"]
    command += ["--queue", "100000"]
    starts: list[float] = []
    used: list[float] = []
    for _ in range(3):
        async with running(command, port) as (_, seconds, pid):
            starts.append(round(seconds, 2))
            used.append(round(cpu_of(pid), 2))
    told["start-up to /health, s"] = starts
    told["the same in CPU s"] = used
    limits = httpx.Limits(max_connections=None)
    async with (
        running(command, port) as (address, _, pid),
        httpx.AsyncClient(base_url=address, verify=False, timeout=120, limits=limits) as http,
    ):
        await http.get("/openapi.json")  # everything is there
        body = {"instruction": "true", "agent": "shell", "endpoint": "scripted"}
        rollout_id = (await http.post("/rollouts", json=body)).json()["rollout_id"]
        await http.get(f"/rollouts/{rollout_id}/result?wait_s=60")
        told["get_state of rollcage"] = await tool_calls(address, pid, "get_state", {"rollout_id": rollout_id}, calls)
        live, replay = await events_per_s(address, home, 100, 500)
        told["events/s to 100 followers, live"] = live
        told["events/s to 100 followers, afterwards"] = replay
        told["rollouts accepted/s"] = await started_per_s(http, 300)
    port = free_port()
    async with running([sys.executable, "-c", ECHO, str(port)], port) as (address, seconds, pid):
        told["start-up of OpenEnv's echo, s"] = round(seconds, 2)
        told["echo of OpenEnv"] = await tool_calls(address, pid, "echo_message", {"message": "hello"}, calls)
    return told


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--calls", type=int, default=30)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = anyio.run(main, given.calls, Path(folder), backend_options={"use_uvloop": True})
    if given.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name}:" if isinstance(value, dict) else f"{name}: {value}")
            for what, numbers in value.items() if isinstance(value, dict) else ():
                print(f"  {what:14} " + "  ".join(f"{key} {number}" for key, number in numbers.items()))
