"""The relay: connections out of a box over nothing but a process's standard streams, however the box behaves."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollcage.errors import SandboxError
from rollcage.gateway import Gateway
from rollcage.sandboxes.base import Sandbox
from rollcage.sandboxes.egress import egress
from rollcage.sandboxes.inside import relay as frames
from rollcage.sandboxes.relay import relayed
from rollcage.simulators import ScriptedModel
from rollcage.types import Limits, ScriptedTurn, Turn
from support.boxes import a_box, python
from support.hand_made import LOOPS, until

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

CALL = """
import socket, sys, threading, hashlib, urllib.request, time
def call(): return socket.create_connection(("127.0.0.1", 7000))
def rest(s):
    data = b""
    while piece := s.recv(1 << 16): data += piece
    return data
"""


@pytest.fixture(scope="module", params=LOOPS, ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Sandbox]:
    async with a_box(tmp_path, pids=600) as opened:
        yield opened


@asynccontextmanager
async def served(box: Sandbox, serve: Serve, port: int = 7000) -> AsyncIterator[socket.socket]:
    """A server of ours that the box reaches by a relay."""
    async with relayed(box, port) as sock:
        server = await asyncio.start_unix_server(serve, sock=sock)
        try:
            yield sock
        finally:
            server.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_a_streamed_answer_of_the_real_gateway_reaches_the_box(box: Sandbox, model: ScriptedModel) -> None:
    recorded: list[Turn] = []

    async def record(turn: Turn) -> None:
        recorded.append(turn)

    ask = """
request = urllib.request.Request(sys.argv[1] + "/chat/completions", headers={"Authorization": "Bearer " + sys.argv[2],
    "Content-Type": "application/json"}, data=b'{"model": "model", "stream": true, "messages": '
    b'[{"role": "user", "content": "hi"}]}')
print(urllib.request.urlopen(request).read().decode())
"""
    endpoint = model.endpoint((ScriptedTurn(text="one two three"),))
    async with (
        Gateway.open() as gateway,
        relayed(box, 7000) as sock,
        gateway.lend(endpoint, sock, limits=Limits(), mode="transparent_proxy", record=record) as lease,
    ):
        assert lease.endpoint.base_url == "http://127.0.0.1:7000/v1"
        key = lease.endpoint.key.get_secret_value()
        script = (CALL + ask).replace("sys.argv[1]", repr(lease.endpoint.base_url)).replace("sys.argv[2]", repr(key))
        said = await python(box, script)
        assert said.code == 0, said.stderr.text
        assert "[DONE]" in said.stdout.text
    assert [turn.message["content"] for turn in recorded] == ["one two three"]


async def test_each_piece_arrives_before_the_next_is_sent(box: Sandbox) -> None:
    async def in_turns(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(20):
            writer.write(b"%d;" % number)
            assert await reader.readexactly(3) == b"got"
        writer.close()

    async with served(box, in_turns):
        said = await python(box, CALL + "s = call()\nwhile s.recv(100): s.sendall(b'got')\nprint('end')")
    assert said.stdout.text == "end\n", said.stderr.text


async def test_sixty_four_streams_at_once_keep_their_bytes_apart(box: Sandbox) -> None:
    script = """
def one(number):
    data = hashlib.sha256(b"%d" % number).digest() * 4096
    s = call()
    threading.Thread(target=lambda: (s.sendall(data), s.shutdown(1))).start()
    good.append(rest(s) == data)
good = []
threads = [threading.Thread(target=one, args=(n,)) for n in range(64)]
for t in threads: t.start()
for t in threads: t.join()
print(len(good), all(good))
"""
    async with served(box, echo):
        said = await python(box, CALL + script)
    assert said.stdout.text == "64 True\n", said.stderr.text


async def test_a_client_that_does_not_read_stalls_only_itself_and_memory_stays_bounded(box: Sandbox) -> None:
    written, total = 0, 64 << 20

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        if await reader.readexactly(4) == b"echo":
            return await echo(reader, writer)
        while written < total:
            writer.write(bytes(1 << 16))
            await writer.drain()
            written += 1 << 16
        writer.close()
        return None

    script = """
slow = call(); slow.sendall(b"pour")
for n in range(50):
    s = call(); s.sendall(b"echo" + bytes(100000)); s.shutdown(1)
    assert len(rest(s)) == 100000
print("others", flush=True)
sys.stdin.read(1)
size = 0
while piece := slow.recv(1 << 16): size += len(piece)
print(size)
"""
    async with served(box, pour), box.spawn(["python3", "-I", "-c", CALL + script]) as process:
        assert await process.stdout.receive() == b"others\n"
        held = written
        assert held < 16 << 20, "what a stalled client may have us take on is bounded"
        await process.stdin.send(b"\n")
        assert await process.stdout.receive() == b"%d\n" % total


async def test_a_server_that_does_not_read_holds_its_client_up(box: Sandbox) -> None:
    go = asyncio.Event()
    got = asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.set()
        await go.wait()
        writer.write(b"%d" % len(await reader.read(-1)))
        writer.close()

    script = """
s = call(); s.setblocking(False); sent = 0
import select
while select.select([], [s], [], 0.5)[1]: sent += s.send(bytes(1 << 16))
print(sent, flush=True)
sys.stdin.read(1)
s.setblocking(True); s.shutdown(1); print(rest(s).decode())
"""
    async with served(box, late), box.spawn(["python3", "-I", "-c", CALL + script]) as process:
        await got.wait()
        sent = int(await process.stdout.receive())
        assert sent < 16 << 20
        go.set()
        await process.stdin.send(b"\n")
        assert int(await process.stdout.receive()) == sent


async def test_either_side_may_say_its_last_and_go_on_listening(box: Sandbox) -> None:
    uploaded = b""

    async def half_closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal uploaded
        if await reader.readexactly(1) == b"c":  # the client ends first
            asked = await reader.read(-1)
            writer.write(asked[::-1])
        else:
            writer.write(b"first")
            writer.write_eof()
            uploaded = await reader.read(-1)
        writer.close()

    script = """
s = call(); s.sendall(b"cabc"); s.shutdown(1); print(rest(s).decode())
s = call(); s.sendall(b"s"); print(rest(s).decode()); s.sendall(b"x" * 300000); s.close()
"""
    async with served(box, half_closing):
        said = await python(box, CALL + script)
        assert said.stdout.text == "cba\nfirst\n", said.stderr.text
        await until(lambda: len(uploaded) == 300000)


async def test_connections_that_break_break_at_the_other_end_too(box: Sandbox) -> None:
    ended = asyncio.Event()

    async def breaking(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readexactly(1) == b"a":
            writer.transport.abort()
            return
        with suppress(ConnectionError):
            while True:
                writer.write(b"x" * 1000)
                await writer.drain()
                await asyncio.sleep(0)
        ended.set()

    script = """
import struct
s = call(); s.sendall(b"a"); print(repr(rest(s)))
s = call(); s.sendall(b"b"); s.recv(10); s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
s.close()
"""
    async with served(box, breaking):
        said = await python(box, CALL + script)
        assert said.code == 0 or "ConnectionReset" in said.stderr.text
        with anyio.fail_after(120):
            await ended.wait()


async def test_a_flood_of_connections_is_held_within_bounds_and_passes(box: Sandbox) -> None:
    most = now = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await reader.read(-1)
        now -= 1
        writer.write(b"ok")
        writer.close()

    script = """
import resource
held = [call() for _ in range(400)]
for s in held: s.shutdown(1)
print(sum(rest(s) == b"ok" for s in held))
"""
    async with served(box, count):
        said = await python(box, CALL + script)
    assert said.stdout.text == "400\n", said.stderr.text
    assert most <= frames.MOST_STREAMS


async def test_a_killed_relay_ends_everything_in_flight_and_is_told_at_the_end(box: Sandbox) -> None:
    connected, ended = asyncio.Event(), asyncio.Event()
    port = random.randrange(20000, 60000)

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read(-1)
        ended.set()
        writer.close()

    script = CALL.replace("7000", str(port)) + "s = call()\ntry: print(rest(s))\nexcept OSError as e: print(e)"
    with pytest.raises(SandboxError, match=r"the relay for port .* broke: it ended"), anyio.fail_after(120):
        async with served(box, hold, port) as sock, box.spawn(["python3", "-I", "-c", script]) as process:
            await connected.wait()
            for pid in _listening(port):
                os.kill(pid, signal.SIGKILL)
            await ended.wait()
            assert await process.stdout.receive()
            assert await process.wait() == 0
            with socket.socket(socket.AF_UNIX) as client, pytest.raises(OSError):
                client.connect(sock.getsockname())
            refused = await python(box, CALL.replace("7000", str(port)) + "call()")
            assert "ConnectionRefused" in refused.stderr.text


def _listening(port: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit():
                line = (folder / "cmdline").read_bytes()
                if line.startswith(b"python3\0-I\0-S") and line.endswith(b"\0%d\0" % port):
                    found.append(int(folder.name))
    return found


async def test_a_port_that_is_taken_is_a_clear_error(box: Sandbox) -> None:
    async with relayed(box, 7000):
        with pytest.raises(SandboxError, match="cannot listen on port 7000 in the box: it is already in use"):
            async with relayed(box, 7000):
                pass


async def test_the_port_is_free_again_when_the_block_is_left(box: Sandbox) -> None:
    for _ in range(3):
        async with served(box, echo):
            said = await python(box, CALL + "s = call(); s.sendall(b'x'); s.shutdown(1); print(rest(s))")
            assert said.stdout.text == "b'x'\n"


async def test_nobody_else_on_this_machine_can_use_the_listener(box: Sandbox) -> None:
    async with relayed(box, 7000) as sock:
        folder = Path(sock.getsockname()).parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


async def test_the_proxy_for_setup_commands_works_by_relay_too(box: Sandbox) -> None:
    class Relayed:
        """The same box, listening by relay."""

        def __getattr__(self, name: str) -> Any:
            return getattr(box, name)

        def listen(self, port: int) -> Any:
            return relayed(box, port)

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    script = f"""
s = socket.create_connection(("127.0.0.1", 7003)); s.sendall(b"CONNECT 127.0.0.1:{port} HTTP/1.1\\r\\n\\r\\n")
print(s.recv(100)); s.sendall(b"hi"); print(s.recv(2))
"""
    async with egress(Relayed(), ["127.0.0.1"]):
        said = await python(box, CALL + script)
    assert said.stdout.text.endswith("b'hi'\n"), said.stderr.text
    server.close()
