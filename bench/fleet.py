"""What a tool call of a remote environment costs: a session that is kept against one per call; in one run.

    python bench/fleet.py [--json] [--quick]

The local Fleet runs in a process of its own; the client's CPU is that of this process alone. `persistent` is
FleetMCPTools. `per call` opens a session for each call with the `mcp` package's client, as the published sketch does:
connect, initialize, call, close. Rounds alternate, and of each kind the round with the least CPU counts, which is the
one that others disturbed least: compare rows, not absolute times.

`64 at once` are concurrent calls on one session. `reconnect` is the first call after the endpoint's server was
restarted and has forgotten the session. `union` is list_tools over both endpoints from nothing.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from rollcage.environments.fleet import FleetMCPTools, RemoteEnvironment, open
from rollcage.simulators import FleetRuntime

# This file has the name of Fleet's SDK, and Python looks beside it first.
sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]

KEY = "ticket-desk"
ARGUMENTS = {"limit": 1}
Row = dict[str, float]


async def timed(work: Callable[[], Awaitable[object]], count: int) -> Row:
    """So many calls, one after the other."""
    seconds: list[float] = []
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        started = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - started)
    cpu, whole = time.process_time() - cpu, time.perf_counter() - began
    return {"p50_ms": 1000 * statistics.median(seconds), "per_s": count / whole, "cpu_ms": 1000 * cpu / count}


def best(rows: list[Row]) -> Row:
    """The round that was disturbed least."""
    return min(rows, key=lambda row: row["cpu_ms"])


async def session_per_call(url: str, key: str) -> None:
    """As the published sketch does it, with the `mcp` package's own client."""
    from mcp.client.streamable_http import streamablehttp_client

    from mcp import ClientSession

    async with (
        streamablehttp_client(url, headers={"Authorization": f"Bearer {key}"}) as (reading, writing, _),
        ClientSession(reading, writing) as session,
    ):
        await session.initialize()
        await session.call_tool("list_tickets", ARGUMENTS)


@asynccontextmanager
async def environment() -> AsyncIterator[tuple[RemoteEnvironment, str]]:
    """A desk in another process."""
    command = [sys.executable, "-m", "rollcage", "fleet", "demo", "--serve", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        said = json.loads(process.stdout.readline())
        async with open(KEY, api_key=said["api_key"], base_url=said["base_url"]) as env:
            yield env, said["api_key"]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)


async def calls(env: RemoteEnvironment, key: str, rounds: int, count: int) -> dict[str, Row]:
    """Both kinds, in alternating rounds."""
    url = env.tools.report().endpoints[0].url
    await env.tools.list_tools()
    await session_per_call(url, key)
    kept: list[Row] = []
    fresh: list[Row] = []
    for _ in range(rounds):
        kept.append(await timed(lambda: env.tools.call_tool("list_tickets", ARGUMENTS), count))
        fresh.append(await timed(lambda: session_per_call(url, key), max(5, count // 10)))
    return {"persistent": best(kept), "per call": best(fresh), "64 at once": await at_once(env, 64, rounds)}


async def at_once(env: RemoteEnvironment, many: int, rounds: int) -> Row:
    """Many callers on one session, each calling again as soon as it is answered."""
    rows: list[Row] = []
    for _ in range(rounds):
        seconds: list[float] = []

        async def caller(seconds: list[float] = seconds) -> None:
            for _ in range(5):
                started = time.perf_counter()
                await env.tools.call_tool("list_tickets", ARGUMENTS)
                seconds.append(time.perf_counter() - started)

        began, cpu = time.perf_counter(), time.process_time()
        async with anyio.create_task_group() as tasks:
            for _ in range(many):
                tasks.start_soon(caller)
        cpu, whole = time.process_time() - cpu, time.perf_counter() - began
        n = len(seconds)
        rows.append({"p50_ms": 1000 * statistics.median(seconds), "per_s": n / whole, "cpu_ms": 1000 * cpu / n})
    assert env.tools.report().endpoints[0].connects == 1
    return best(rows)


async def restarts(rounds: int) -> Row:
    """The first call after a restart, and from nothing to the union; here both sides share this process."""
    first: list[float] = []
    union: list[float] = []
    async with (
        FleetRuntime() as fleet,
        open(KEY, api_key=fleet.key, base_url=fleet.base_url) as env,
    ):
        await env.tools.list_tools()
        for _ in range(rounds):
            await fleet.instance().restart()
            started = time.perf_counter()
            await env.tools.call_tool("list_tickets", ARGUMENTS)
            first.append(time.perf_counter() - started)
            addresses = {one.name: one.url for one in env.tools.report().endpoints}
            async with FleetMCPTools(fleet.key, addresses) as tools:
                started = time.perf_counter()
                await tools.list_tools()
                union.append(time.perf_counter() - started)
    return {"reconnect_ms": 1000 * statistics.median(first), "union_ms": 1000 * statistics.median(union)}


async def main(quick: bool) -> dict[str, Any]:
    """Everything, in one run."""
    rounds, count = (2, 50) if quick else (5, 300)
    async with environment() as (env, key):
        rows = await calls(env, key, rounds, count)
    ratio = {name: rows["per call"][name] / rows["persistent"][name] for name in ("p50_ms", "cpu_ms")}
    return {"rows": rows, "times": ratio, **await restarts(3 * rounds)}


def show(found: dict[str, Any]) -> None:
    """As a table."""
    print(f"{'':<12}{'p50 ms':>9}{'calls/s':>9}{'client CPU ms':>15}")
    for name, row in found["rows"].items():
        print(f"{name:<12}{row['p50_ms']:>9.1f}{row['per_s']:>9.0f}{row['cpu_ms']:>15.2f}")
    times = found["times"]
    print(
        f"a kept session is {times['cpu_ms']:.0f} x cheaper in CPU and {times['p50_ms']:.0f} x faster (goal: 15 x CPU)"
    )
    print(f"reconnect {found['reconnect_ms']:.0f} ms, union {found['union_ms']:.0f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    result = anyio.run(main, asked.quick)
    print(json.dumps(result)) if asked.json else show(result)
