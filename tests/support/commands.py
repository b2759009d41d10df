"""Runs the command `rollcage` in processes of its own, with a state folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import Process


def environ(home: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The whole environment of a command: its state is `home`/state."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "ROLLCAGE_HOME": str(home / "state"), **(more or {})}


def rollcage(
    home: Path, *arguments: str, env: Mapping[str, str] | None = None, stdin: str = "", under: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run it to its end; `under`: a command that runs it."""
    return subprocess.run(
        [*under, sys.executable, "-m", "rollcage", *arguments],
        env=environ(home, env),
        cwd=home,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
    )


@asynccontextmanager
async def rollcage_running(home: Path, *arguments: str, under: Sequence[str] = ()) -> AsyncIterator[Process]:
    """Run it while the block lasts; `under`: a command that runs it."""
    command = [*under, sys.executable, "-m", "rollcage", *arguments]
    async with await anyio.open_process(command, env=environ(home), cwd=home) as process:
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()


async def until(process: Process, words: str) -> str:
    """What it has printed once these words are in it."""
    assert process.stdout
    seen = b""
    while words.encode() not in seen:
        seen += await process.stdout.receive()
    return seen.decode()


async def rest(process: Process) -> tuple[int, str, str]:
    """Its exit code, and what it still printed to stdout and stderr."""
    assert process.stdout and process.stderr
    out = b"".join([chunk async for chunk in process.stdout])
    error = b"".join([chunk async for chunk in process.stderr])
    return await process.wait(), out.decode(), error.decode()
