"""What a rollout costs that waits for a slow model: memory and processor time, ours and its agent's, by agent.

    python bench/density.py [--json] [--waiting 8] [--seconds 10] [AGENT ...]

So many rollouts of one agent are brought to their first model call, which is never answered. Then everything that this
process has started is looked at for a while: what runs in the boxes that is not the agent (bubblewrap, the fork server,
whatever passes bytes on) and the growth of this process are ours, the rest is the agent's. Memory is PSS: what is
shared is divided among those who share it. Where the agent is OpenCode, as many naked ones are brought to the same
point.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
from pydantic import SecretStr

from rollcage.agents.opencode.config import BINARY, config_of, environment_of
from rollcage.runner import Runner
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.types import HOME, AgentSpec, Endpoint, Job, Limits, Task
from rollcage.wiring import agent as default_agent
from rollcage.wiring import opened_registry

AGENTS = ("opencode", "claude-code", "codex", "pi", "qwen-code", "mini-swe-agent", "mini")
OURS = ("bwrap", "cat", "socat")
"""Programs in boxes that are ours; besides, whatever runs with this very interpreter."""
TASK = Task(instruction="Write hello to hello.txt.", verify=("true",), limits=Limits(agent_timeout_s=3600))

SILENT = """
import http.server, socketserver, sys, threading
calls = 0
class Silent(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = str(calls).encode() if self.path == "/calls" else b'{"object":"list","data":[{"id":"silent"}]}'
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        global calls
        self.rfile.read(int(self.headers["Content-Length"])); calls += 1
        threading.Event().wait()
    def log_message(self, *_): pass
class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads, request_queue_size = True, 512
server = Server(("127.0.0.1", 0), Silent)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def silent_model() -> Iterator[tuple[Endpoint, int]]:
    """A model that takes every call and never answers, in a process of its own; and that process."""
    with subprocess.Popen([sys.executable, "-c", SILENT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        address = f"http://127.0.0.1:{int(process.stdout.readline())}"
        try:
            yield Endpoint(base_url=f"{address}/v1", model="silent", key=SecretStr("none")), process.pid
        finally:
            process.kill()


def calls(endpoint: Endpoint) -> int:
    """How many calls the model holds."""
    return int(urllib.request.urlopen(f"{endpoint.base_url.removesuffix('/v1')}/calls", timeout=30).read())


async def reached(endpoint: Endpoint, count: int, limit_s: float = 600) -> None:
    """Wait until the model holds so many."""
    with anyio.fail_after(limit_s):
        while await anyio.to_thread.run_sync(calls, endpoint) < count:
            await anyio.sleep(0.3)


def below(apart: int) -> dict[int, str]:
    """Processes that this one has started, however far down, by their program; but for one and what it started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {}
    for pid in parents:
        above = pid
        while above in parents and above not in (os.getpid(), apart):
            above = parents[above]
        if above == os.getpid() and pid != above:
            try:
                found[pid] = os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")
            except OSError:
                continue
    return found


def pss_mb(pid: int) -> float:
    """Its share of memory."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def cpu_s(pid: int) -> float:
    """Processor seconds of all its threads, those that have ended among them."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def is_ours(program: str) -> bool:
    """Whether a program in a box is not the agent's."""
    return Path(program).name in OURS or os.path.realpath(program) == os.path.realpath(sys.executable)


class Look:
    """Memory and processor time over a while, ours and theirs."""

    def __init__(self, apart: int, own_mb: float) -> None:
        self._apart, self._own_mb = apart, own_mb

    async def over(self, seconds: float, count: int) -> dict[str, float]:
        """Per rollout."""
        programs = below(self._apart)
        before = {pid: cpu_s(pid) for pid in (*programs, os.getpid())}
        began = time.monotonic()
        await anyio.sleep(seconds)
        elapsed = time.monotonic() - began
        spent = {pid: cpu_s(pid) - cpu for pid, cpu in before.items()}
        ours = [pid for pid, program in programs.items() if is_ours(program)]
        theirs = [pid for pid in programs if pid not in ours]
        grown = pss_mb(os.getpid()) - self._own_mb
        own_mb = grown + sum(map(pss_mb, ours))
        own_cpu = spent[os.getpid()] + sum(spent[pid] for pid in ours)
        return {
            "own_mb": own_mb / count,
            "own_process_mb": grown / count,
            "own_core_percent": 100 * own_cpu / elapsed / count,
            "own_processes": len(ours) / count,
            "agent_mb": sum(map(pss_mb, theirs)) / count,
            "agent_core_percent": 100 * sum(spent[pid] for pid in theirs) / elapsed / count,
            "agent_processes": len(theirs) / count,
        }


async def caged(name: str, settings: Settings, waiting: int, seconds: float) -> dict[str, float]:
    """Rollouts of an agent that wait."""
    with silent_model() as (endpoint, model), tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            registry = await stack.enter_async_context(opened_registry(settings))
            store = await stack.enter_async_context(Store.open(Path(folder) / "log.db"))
            runner = await stack.enter_async_context(Runner.open(store, registry, at_once=waiting))
            job = Job(task=TASK, model=endpoint, agent=AgentSpec(name=name))
            first = await runner.start(job)  # what is built once is there from here on
            await reached(endpoint, 1)
            own = pss_mb(os.getpid())
            ids = [first, *[await runner.start(job) for _ in range(waiting - 1)]]
            await reached(endpoint, waiting)
            await anyio.sleep(seconds / 2)
            row = await Look(model, own).over(seconds, waiting)
            for each in ids:
                await runner.abort(each)
            for each in ids:
                await runner.wait(each)
            return row


async def naked(settings: Settings, waiting: int, seconds: float) -> dict[str, float]:
    """As many naked OpenCodes that wait."""
    async with LocalProvider(settings.home) as provider:
        layer = await provider.layers.ensure(next(iter(default_agent(settings).layers())))
        with silent_model() as (endpoint, model), tempfile.TemporaryDirectory() as folder:
            processes = [_start_naked(layer, endpoint, Path(folder) / str(number)) for number in range(waiting)]
            try:
                await reached(endpoint, waiting)
                await anyio.sleep(seconds / 2)
                return await Look(model, pss_mb(os.getpid())).over(seconds, waiting)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()


def _start_naked(layer: Path, endpoint: Endpoint, home: Path) -> subprocess.Popen[bytes]:
    home.mkdir()
    environment = environment_of(config_of(AgentSpec(), endpoint))
    environment = {name: value.replace(HOME, str(home)) for name, value in environment.items()}
    environment |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8"}
    subprocess.run(["cp", "-r", str(layer / ".config"), str(home)], check=True)
    binary = str(layer / Path(BINARY).relative_to(HOME))
    return subprocess.Popen(
        [binary, "run", "--format", "json", TASK.instruction],
        env=environment,
        cwd=home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


async def main(names: list[str], waiting: int, seconds: float, *, as_json: bool) -> None:
    """Measure and print."""
    settings = Settings.from_environ(os.environ)
    rows: dict[str, Any] = {}
    for name in names:
        rows[name] = await caged(name, settings, waiting, seconds)
        if name == "opencode":
            rows["opencode, naked"] = await naked(settings, waiting, seconds)
        print(f"{name}: done", file=sys.stderr)
    if as_json:
        print(json.dumps({name: {key: round(value, 4) for key, value in row.items()} for name, row in rows.items()}))
        return
    keys = list(rows[names[0]])
    print(f"{waiting} waiting, each:\n{'':18}" + "".join(f"{key.replace('_', ' '):>20}" for key in keys))
    for name, row in rows.items():
        print(f"{name:18}" + "".join(f"{row[key]:20.3f}" for key in keys))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="AGENT")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--waiting", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    wanted = options.names or list(AGENTS)
    anyio.run(
        lambda: main(wanted, options.waiting, options.seconds, as_json=options.json),
        backend_options={"use_uvloop": True},
    )
