"""`listen`: a port in the box that our process answers, as good as a socket of the same machine."""

from __future__ import annotations

import hashlib
import os

import anyio

from rollcage.conformance.sandboxes import host
from rollcage.conformance.sandboxes.daemons import until
from rollcage.conformance.sandboxes.peers import CONNECT, KNOCK, PORT, Peer, echo, served
from rollcage.conformance.sandboxes.values import BoxSubject, Failed, Family, expect, python, said, same
from rollcage.errors import SandboxError
from rollcage.sandboxes.base import Sandbox

family = Family("listen")

_STREAMS = 64
_BODY = 32 << 20


@family.check("HTTP out of the box is answered by our process, and each part of a streamed answer arrives at once")
async def http(subject: BoxSubject) -> None:
    printed = [anyio.Event() for _ in range(3)]

    async def answer(peer: Peer) -> None:
        head = await peer.until(b"\r\n\r\n")
        if head.startswith(b"POST"):
            body = await peer.exactly(300_000)
            text = hashlib.sha256(body).hexdigest().encode()
            await peer.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 64\r\n\r\n" + text)
            return
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number, event in enumerate(printed):
            await peer.send(b"7\r\npart %d\n\r\n" % number)
            await event.wait()
        await peer.send(b"0\r\n\r\n")

    script = (
        CONNECT
        + """
c = http.client.HTTPConnection("127.0.0.1", 7000, timeout=50)
c.request("GET", "/stream")
answer = c.getresponse()
for _ in range(3):
    print(answer.readline(), flush=True)
answer.read()
c.close()
body = os.urandom(300000)
c.request("POST", "/body", body)
print(c.getresponse().read().decode() == hashlib.sha256(body).hexdigest())
"""
    )
    async with (
        subject.open() as box,
        served(box, PORT, answer),
        box.spawn(["python3", "-I", "-c", script]) as process,
    ):
        for number, event in enumerate(printed):
            await until(process, b"b'part %d\\n'\n" % number)
            event.set()
        expect(b"True" in await until(process, b"rue\n"), "a body that was posted arrived changed")


@family.check("64 connections are open at once, and each gets its own answer")
async def concurrent(subject: BoxSubject) -> None:
    arrived = 0
    all_here = anyio.Event()

    async def answer(peer: Peer) -> None:
        nonlocal arrived
        name = await peer.exactly(4)
        arrived += 1
        if arrived == _STREAMS:
            all_here.set()
        await all_here.wait()
        await peer.send(name * 5000)

    script = (
        CONNECT
        + """
right = []
def talk(number):
    name = b"%04d" % number
    with connect() as s:
        s.sendall(name)
        right.append(rest(s) == name * 5000)

threads = [threading.Thread(target=talk, args=(number,)) for number in range(64)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(right), all(right))
"""
    )
    async with subject.open() as box, served(box, PORT, answer):
        same(await said(box, script), "64 True\n", "the client in the box saw")


@family.check("a large body goes through unchanged, both ways at the same time", deadline_s=90)
async def bodies(subject: BoxSubject) -> None:
    script = (
        CONNECT
        + """
s, block = connect(), os.urandom(1 << 20)
sent, got, count = hashlib.sha256(), hashlib.sha256(), 0
def send():
    for _ in range(int(sys.argv[1]) >> 20):
        s.sendall(block)
        sent.update(block)
    s.shutdown(socket.SHUT_WR)

thread = threading.Thread(target=send)
thread.start()
while data := s.recv(1 << 18):
    got.update(data)
    count += len(data)
thread.join()
print(count, sent.digest() == got.digest())
"""
    )
    async with subject.open() as box, served(box, PORT, echo):
        same(
            await said(box, script, str(_BODY)),
            f"{_BODY} True\n",
            "bytes that came back, and whether they are the same",
        )


@family.check("either side may say that it is done and still be answered")
async def half_closed(subject: BoxSubject) -> None:
    heard: list[bytes] = []

    async def answer(peer: Peer) -> None:
        if await peer.exactly(1) == b"a":
            data = await peer.rest()
            await peer.send(b"got %d" % len(data))
            return
        await peer.send(b"first")
        peer.finish()
        heard.append(await peer.rest())

    script = (
        CONNECT
        + """
s = connect()
s.sendall(b"a" + b"x" * 100000)
s.shutdown(socket.SHUT_WR)
print(rest(s))
s = connect()
s.sendall(b"b")
print(rest(s))
s.sendall(b"second" * 1000)
s.close()
"""
    )
    async with subject.open() as box, served(box, PORT, answer):
        same(await said(box, script), "b'got 100000'\nb'first'\n", "the client in the box saw")
        with anyio.move_on_after(20):
            while not heard:  # noqa: ASYNC110 (the answer may also never come)
                await anyio.sleep(0.02)
        same(b"".join(heard), b"second" * 1000, "what came after our end of file")


@family.check("hundreds of short connections, one after the other, leave nothing behind")
async def many(subject: BoxSubject) -> None:
    script = (
        CONNECT
        + """
for number in range(300):
    with connect() as s:
        s.sendall(b"%d" % number)
        s.shutdown(socket.SHUT_WR)
        assert rest(s) == b"%d" % number
print("all")
"""
    )
    async with subject.open() as box, served(box, PORT, echo):
        same(await said(box, script), "all\n", "the client in the box said")
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (no Path is wanted)
        same(await said(box, script), "all\n", "the client in the box said")
        grown = len(os.listdir("/proc/self/fd")) - before  # noqa: PTH208
        expect(grown < 50, f"{grown} more descriptors after 300 more connections")


@family.check("a port that is taken is a clear error, whoever took it; other ports go on side by side")
async def taken(subject: BoxSubject) -> None:
    async def refused(box: Sandbox, port: int) -> None:
        try:
            async with box.listen(port):
                pass
        except SandboxError as error:
            expect(str(port) in str(error), f"the error does not name the port: {error}")
        else:
            raise Failed(f"port {port} was given out twice")

    take = (
        "import socket, sys\ns = socket.create_server(('127.0.0.1', 7002))\nprint('up', flush=True)\nsys.stdin.read()"
    )
    talk = CONNECT + "s = connect(int(sys.argv[1])); s.sendall(b'hello'); print(s.recv(9))"
    async with subject.open() as box, served(box, PORT, echo), served(box, PORT + 1, echo):
        await refused(box, PORT)
        async with box.spawn(["python3", "-I", "-c", take]) as process:
            await until(process, b"up\n")
            await refused(box, 7002)
        for port in (PORT, PORT + 1):
            same(await said(box, talk, str(port)), "b'hello'\n", f"port {port} answered")


@family.check("after the block nobody answers any more, and the port can be used again")
async def closed(subject: BoxSubject) -> None:
    async with subject.open() as box:
        for _ in range(3):
            async with served(box, PORT, echo):
                same(await said(box, KNOCK, str(PORT)), "b'hello'\n", "within the block, the client saw")
            after = await said(box, KNOCK, str(PORT))
            expect(after in ("refused\n", "b''\n"), f"after the block, the client saw {after.strip()}")


@family.check("the port is there in this box only: not on this machine, not in another box")
async def private(subject: BoxSubject) -> None:
    port = host.free_port()
    async with subject.open() as box, subject.open() as other, served(box, port, echo):
        same(await said(box, KNOCK, str(port)), "b'hello'\n", "in its own box, the client saw")
        seen = (await python(other, KNOCK, str(port))).stdout.text
        expect("hello" not in seen, "another box reached it")
        expect(not host.answers(port), f"it is answered on this machine's port {port} too")
