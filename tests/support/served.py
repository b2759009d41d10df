"""A real server process for the tests: `rollcage serve` on a free port, its home, its log, its end."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import httpx

from rollcage import Client


@dataclass
class Served:
    """One server process."""

    process: subprocess.Popen[bytes]
    url: str
    home: Path
    log: Path
    key: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def client(self, key: str = "") -> Client:
        return Client(self.url, key=key or self.key)

    def http(self, key: str = "") -> httpx.AsyncClient:
        shown = key or self.key
        headers = {"Authorization": f"Bearer {shown}"} if shown else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=120, verify=False)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    async def ended(self) -> int:
        """Its exit code, once it is gone."""
        with anyio.fail_after(120):
            return await anyio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)


def steady_port() -> int:
    """A free port for a server that is to come back to it: below those that the system gives to whoever asks."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, lowest)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@asynccontextmanager
async def served(
    home: Path, *options: str, environment: Mapping[str, str] | None = None, key: str = ""
) -> AsyncIterator[Served]:
    """`rollcage serve` in a process of its own, until the end of the block."""
    home.mkdir(parents=True, exist_ok=True)
    log = home / "server.log"
    settings = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "OPENAI_", "HF_ROUTER_", "ROLLCAGE_"))
    }
    # The signal is for the case that we are killed.
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "rollcage", "serve", "--port", "0"]
    command += ["--home", str(home), "--json", *options]
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, env=settings | dict(environment or {})
        )
    try:
        assert process.stdout is not None
        with anyio.fail_after(120):
            line = await anyio.to_thread.run_sync(process.stdout.readline, abandon_on_cancel=True)
        assert line, log.read_text()
        yield Served(process, json.loads(line)["url"], home, log, key)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
        with anyio.move_on_after(10, shield=True):
            await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def shell(script: str, **more: object) -> dict[str, object]:
    """The cheapest rollout there is: bash runs the instruction."""
    return {"instruction": script, "agent": "shell", "endpoint": "scripted", **more}
