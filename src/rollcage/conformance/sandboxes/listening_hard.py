"""`listen` when somebody is slow, vanishes or runs wild: the others go on, and nothing piles up."""

from __future__ import annotations

import os
from contextlib import suppress

import anyio

from rollcage.conformance.sandboxes.daemons import until
from rollcage.conformance.sandboxes.peers import CONNECT, KNOCK, PORT, Peer, echo, served
from rollcage.conformance.sandboxes.values import BoxSubject, Family, expect, python, said, same
from rollcage.sandboxes.base import Sandbox, sh

family = Family("listen")

_MUCH = 64 << 20
_HELD = 48 << 20
"""What may be on its way, in the buffers of all who pass it on, while nobody takes it."""


async def _alive(box: Sandbox) -> None:
    """Another connection is answered meanwhile."""
    script = CONNECT + "s = connect(7001); s.sendall(b'hello'); print(s.recv(9))"
    same(await said(box, script, timeout_s=20), "b'hello'\n", "another connection, while one stands still,")


@family.check("a client that does not read holds us back and nobody else; all is there when it reads", deadline_s=90)
async def slow_reader(subject: BoxSubject) -> None:
    block = os.urandom(1 << 16)
    peers: list[Peer] = []

    async def answer(peer: Peer) -> None:
        peers.append(peer)
        for _ in range(_MUCH >> 16):
            await peer.send(block)

    script = (
        CONNECT
        + """
s, count = connect(), 0
sys.stdin.readline()
while data := s.recv(1 << 18):
    count += len(data)
print(count)
"""
    )
    async with (
        subject.open() as box,
        served(box, PORT, answer),
        served(box, PORT + 1, echo),
        box.spawn(["python3", "-I", "-c", script]) as process,
    ):
        before = -1
        while not peers or peers[0].sent != before:
            before = peers[0].sent if peers else -1
            await anyio.sleep(1)
        expect(before < _HELD, f"{before >> 20} MB were taken from us though nobody reads them")
        await _alive(box)
        await process.stdin.send(b"go\n")
        await until(process, b"%d\n" % _MUCH)


@family.check("while we do not read, a client in the box must wait, and nobody else; then all arrives", deadline_s=90)
async def slow_server(subject: BoxSubject) -> None:
    may_read = anyio.Event()
    count = 0

    async def answer(peer: Peer) -> None:
        nonlocal count
        await may_read.wait()
        while data := await peer.receive():
            count += len(data)
        await peer.send(b"thanks")

    script = (
        CONNECT
        + """
s, sent, much, block = connect(), 0, int(sys.argv[1]), bytes(1 << 16)
s.setblocking(False)
while sent < much:
    try:
        sent += s.send(block[:much - sent])
    except BlockingIOError:
        if not select.select([], [s], [], 1)[1]:
            break
print("sent", sent, flush=True)
s.settimeout(80)
s.sendall(bytes(much - sent))
s.shutdown(socket.SHUT_WR)
print(s.recv(9), flush=True)
"""
    )
    async with (
        subject.open() as box,
        served(box, PORT, answer),
        served(box, PORT + 1, echo),
        box.spawn(["python3", "-I", "-c", script, str(_MUCH)]) as process,
    ):
        sent = int((await until(process, b"\n")).split()[1])
        expect(sent < _HELD, f"{sent >> 20} MB were taken from the client though we read nothing")
        await _alive(box)
        may_read.set()
        await until(process, b"b'thanks'\n")
        same(count, _MUCH, "bytes that arrived")


@family.check("when one side vanishes, the other learns of it")
async def vanished(subject: BoxSubject) -> None:
    told = anyio.Event()

    async def answer(peer: Peer) -> None:
        if await peer.exactly(1) == b"c":
            return
        with suppress(ConnectionError):
            await peer.send(b"hello")
            await peer.rest()
        told.set()

    hold = CONNECT + "s = connect(); s.sendall(b's'); print(s.recv(9), flush=True); sys.stdin.read()"
    async with subject.open() as box, served(box, PORT, answer):
        async with box.spawn(["python3", "-I", "-c", hold]) as process:
            await until(process, b"b'hello'\n")
        with anyio.move_on_after(20):
            await told.wait()
        expect(told.is_set(), "the client was killed and we were not told")
        script = CONNECT + "s = connect(); s.sendall(b'c'); print(s.recv(9))"
        same(await said(box, script, timeout_s=20), "b''\n", "a client whose connection we closed saw")


@family.check("a command that kills all it can reach cannot make others hang: they are answered, or refused at once")
async def rampage(subject: BoxSubject) -> None:
    held, over = anyio.Event(), anyio.Event()

    async def answer(peer: Peer) -> None:
        with suppress(ConnectionError):
            data = await peer.receive()
            await peer.send(data)
            if data == b"hold":
                held.set()
                await peer.rest()
                over.set()

    hold = CONNECT + "s = connect(); s.sendall(b'hold'); s.recv(9); sys.stdin.read()"
    async with subject.open() as box, served(box, PORT, answer):
        async with box.spawn(["python3", "-I", "-c", hold]):
            await held.wait()
            await sh(box, "kill -TERM -1; kill -9 -1; sleep 0.2", timeout_s=10)
            seen = (await python(box, KNOCK, str(PORT))).stdout.text
            expect(seen and "hangs" not in seen, f"the next client saw {seen.strip() or 'nothing'}")
        with anyio.move_on_after(20):
            await over.wait()
        expect(over.is_set(), "a connection of a client that is dead stays open on our side")
