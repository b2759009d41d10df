"""Relays that are not ours: whatever comes out of a box over one, it ends in an error and holds nobody up."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollcage.errors import SandboxError
from rollcage.sandboxes.base import Sandbox
from rollcage.sandboxes.inside import relay as frames
from rollcage.sandboxes.relay import Link
from support.boxes import a_box
from support.hand_made import LOOPS, until


@pytest.fixture(scope="module", params=LOOPS, ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Sandbox]:
    async with a_box(tmp_path) as opened:
        yield opened


def frame(kind: int, number: int = 0, data: bytes = b"") -> bytes:
    return frames.HEAD.pack(kind, number, len(data)) + data


READY = frame(frames.READY)
OPENED = READY + frame(frames.OPEN, 1)
HOSTILE = {
    "noise": b"\xff" * 100_000,
    "text": b"HTTP/1.1 200 OK\r\n\r\n",
    "a frame without end": READY + struct.pack("!BII", frames.DATA, 1, 1 << 31),
    "data for nobody": READY + frame(frames.DATA, 7, b"x"),
    "a stream opened twice": OPENED + frame(frames.OPEN, 1),
    "ready twice": READY + READY,
    "too many streams": READY + b"".join(frame(frames.OPEN, n) for n in range(1, 5000)),
    "more than the window": OPENED + frame(frames.DATA, 1, bytes(1 << 16)) * 5000,
    "credit nobody gave": OPENED + frame(frames.CREDIT, 1, struct.pack("!I", 1 << 30)) * 2,
    "half a credit": OPENED + frame(frames.CREDIT, 1, b"x"),
    "data after the end": OPENED + frame(frames.EOF, 1) + frame(frames.DATA, 1, b"x"),
}


@pytest.mark.parametrize("said", HOSTILE.values(), ids=HOSTILE.keys())
async def test_a_relay_that_sends_garbage_is_cut_off(box: Sandbox, said: bytes, tmp_path: Path) -> None:
    await box.write("/home/user/said", said)
    path = tmp_path / "7000"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(256)
        async with box.spawn(["sh", "-c", "cat said; sleep 600"]) as process:
            link = Link(process, str(path))
            await until(lambda: link.failure)
            assert link.failure.startswith("it sent garbage")
            assert not path.exists(), "nothing can come in any more"
            await link.close()


async def test_a_box_that_provokes_answers_and_reads_none_is_cut_off(box: Sandbox, tmp_path: Path) -> None:
    script = f"""
import os, struct
os.write(1, {READY!r}); n = 0
while True:
    n += 1
    os.write(1, struct.pack("!BII", {frames.OPEN}, n, 0))
"""
    async with box.spawn(["python3", "-I", "-c", script]) as process:
        # Nobody listens at that path: each stream is answered with a reset, which nobody reads.
        link = Link(process, str(tmp_path / "nobody"))
        await until(lambda: link.failure)
        await link.close()


async def test_a_box_without_python_is_a_clear_error(box: Sandbox) -> None:
    async with box.spawn(["sh", "-c", "echo python3: not found >&2; exit 127"]) as process:
        link = Link(process, "/nowhere")
        with pytest.raises(SandboxError, match=r"cannot listen on port 7000 .* needs python3"):
            await link.ready(7000)
        await link.close()
