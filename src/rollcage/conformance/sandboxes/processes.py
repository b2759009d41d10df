"""Commands run as they were asked to, end as they say they did, and leave nothing that runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import anyio

from rollcage.conformance.sandboxes.daemons import Swarm, until
from rollcage.conformance.sandboxes.values import BoxSubject, Failed, Family, expect, python, said, same
from rollcage.errors import SandboxError
from rollcage.sandboxes.base import PATH, Sandbox, run, sh, tail
from rollcage.types import HOME

family = Family("processes")

ENVIRONMENT = {"PATH": PATH, "HOME": HOME, "USER": "user", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}  # noqa: S108
"""What every command gets, and nothing else unless its caller says so."""
_MUCH = 100 << 20
_BOUND = 64 << 20
"""Our own memory may grow by this much while more than that goes by."""


@family.check(
    "exit codes are a shell's: the program's own, 128+n for signal n, 127 for a missing program, 126 for no program"
)
async def exit_codes(subject: BoxSubject) -> None:
    async with subject.open() as box:
        for script, code in (
            ("exit 0", 0),
            ("exit 7", 7),
            ("exit 255", 255),
            ("kill -9 $$", 137),
            ("kill -TERM $$", 143),
        ):
            same((await sh(box, script)).code, code, f"`{script}` ended with")
        crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
        same((await python(box, crash)).code, 139, "a crash ended with")
        same((await run(box, ["no-such-program"])).code, 127, "a missing program ended with")
        same((await run(box, ["/etc/passwd"])).code, 126, "a file that is no program ended with")


@family.check("arguments arrive exactly as given; nothing is expanded, split or lost")
async def arguments(subject: BoxSubject) -> None:
    given = ["a b", "", "$HOME", "*", "'\"\\", "line\nend", "日本", "--", "-x", "{}", ";", "\t", "x" * 100_000]
    async with subject.open() as box:
        seen = await said(box, "import sys; sys.stdout.write('\\0'.join(sys.argv[1:]))", *given, limit=1 << 20)
        same(seen.split("\0"), given, "the arguments were")


@family.check("the environment is PATH, HOME, USER, LANG, TMPDIR and what was given, and nothing else")
async def environment(subject: BoxSubject) -> None:
    async with subject.open() as box:
        more = {"A": "b=c\nd", "EMPTY": "", "ÜMLAUT": "é", "PATH": "/usr/bin:/bin", "lower": "$HOME `x`"}
        given: Mapping[str, str]
        for given in ({}, more):
            ran = await run(box, ["/usr/bin/env", "-0"], env=given)
            seen = dict(line.split("=", 1) for line in ran.stdout.text.split("\0") if line)
            same(seen, {**ENVIRONMENT, **given}, "the environment")


@family.check("a command starts in the folder it was given, home by default")
async def folder(subject: BoxSubject) -> None:
    async with subject.open() as box:
        await sh(box, "mkdir 'a b' $'日本\\n'")
        same((await run(box, ["pwd"])).stdout.text, f"{HOME}\n", "by default")
        for path in (f"{HOME}/a b", f"{HOME}/日本\n", "/tmp", "/"):  # noqa: S108 (a path in the box)
            same((await run(box, ["/bin/pwd"], cwd=path)).stdout.text, f"{path}\n", "the folder")


@family.check("a folder that is not there and a command that cannot be are clear errors that name them")
async def nonsense(subject: BoxSubject) -> None:
    async with subject.open() as box:
        for cwd in (f"{HOME}/nowhere", "/etc/passwd"):
            try:
                ran = await run(box, ["true"], cwd=cwd)
            except SandboxError as error:
                expect(cwd in str(error), f"the error does not name {cwd}: {error}")
            else:
                raise Failed(f"a command in {cwd} ended with {ran.code} and no error")
        for argv in ([], [""], ["echo", "a\0b"], ["echo", "x" * (8 << 20)]):
            try:
                ran = await run(box, argv)
            except SandboxError as error:
                expect(str(error), "an error says nothing")
            else:
                raise Failed(f"{str(argv)[:40]} was run and ended with {ran.code}")
        same((await sh(box, "echo alive")).stdout.text, "alive\n", "the next command said")


@family.check("standard output and error are apart, and what was printed last is not lost")
async def streams(subject: BoxSubject) -> None:
    async with subject.open() as box:
        ran = await sh(box, "for i in 1 2 3; do echo out$i; echo err$i >&2; done; printf last; printf end >&2")
        same(ran.stdout.text, "out1\nout2\nout3\nlast", "standard output")
        same(ran.stderr.text, "err1\nerr2\nerr3\nend", "standard error")
        for _ in range(5):
            ran = await sh(box, "head -c 200000 /dev/zero | tr '\\0' x; echo done", limit=1 << 20)
            same(len(ran.stdout.data), 200_005, "bytes of a quick command")
        await sh(box, "printf '\\xff\\xfe\\x00\\x80' > file")
        same((await run(box, ["cat", "file"])).stdout.data, b"\xff\xfe\0\x80", "bytes that are no text")


@family.check("input arrives whole, and its end is the end of file")
async def stdin(subject: BoxSubject) -> None:
    data = os.urandom(5 << 20)
    async with subject.open() as box:
        ran = await run(box, ["sha256sum"], stdin=data)
        same(ran.stdout.text[:64], hashlib.sha256(data).hexdigest(), "the hash of 5 MB of input")
        ran = await run(box, ["cat"], stdin=data, limit=8 << 20)
        expect(ran.stdout.data == data, "input that went through `cat` came back changed")
        same((await run(box, ["wc", "-c"])).stdout.text.strip(), "0", "bytes of no input")
        same((await run(box, ["true"], stdin=data)).code, 0, "a command that reads nothing ended with")


@family.check("a command and its caller can talk: each line arrives before the next is sent")
async def conversation(subject: BoxSubject) -> None:
    async with (
        subject.open() as box,
        box.spawn(["bash", "-c", "while read -r x; do echo got $x; done; echo over"]) as p,
    ):
        for number in range(5):
            await p.stdin.send(f"{number}\n".encode())
            await until(p, f"got {number}\n".encode())
        await p.stdin.aclose()
        await until(p, b"over\n")
        same(await p.wait(), 0, "exit code")


@family.check("100 MB of output goes by and our own memory does not grow with it", deadline_s=90)
async def output(subject: BoxSubject) -> None:
    async with subject.open() as box:
        before = _resident()
        async with box.spawn(["head", "-c", str(_MUCH), "/dev/zero"]) as process, anyio.create_task_group() as tasks:
            most = before
            size = 0
            tasks.start_soon(tail, process.stderr, 1000)
            async for chunk in process.stdout:
                size += len(chunk)
                most = max(most, _resident())
            same(await process.wait(), 0, "exit code")
        same(size, _MUCH, "bytes that came")
        expect(most - before < _BOUND, f"our memory grew by {(most - before) >> 20} MB")


@family.check("output that nobody reads makes the command wait; it fills no memory, and is all there when read later")
async def unread(subject: BoxSubject) -> None:
    async with subject.open() as box:
        before = _resident()
        async with box.spawn(["head", "-c", str(_MUCH), "/dev/zero"]) as process:
            same((await sh(box, "sleep 1; echo done")).stdout.text, "done\n", "another command said")
            expect(_resident() - before < _BOUND, f"our memory grew by {(_resident() - before) >> 20} MB")
            size = 0
            async for chunk in process.stdout:
                size += len(chunk)
            same(size, _MUCH, "bytes that came")
            same(await process.wait(), 0, "exit code")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@family.check("a command that ignores every signal ends at its time limit, with all it started")
async def timeouts(subject: BoxSubject) -> None:
    async with subject.open() as box:
        ended = await sh(box, "trap '' TERM INT HUP; echo begun; while :; do :; done", timeout_s=3)
        same((ended.code, ended.timed_out, ended.stdout.text), (124, True, "begun\n"), "a stubborn loop")
        swarm = Swarm(box)
        ended = await run(box, swarm.argv(), timeout_s=3)
        expect(ended.timed_out, f"it ended by itself with {ended.code}: {ended.stderr.text[-200:]}")
        await swarm.all_dead()


@family.check("nothing a command started is alive when its block is left: children, sessions, orphans, ever new ones")
async def daemons(subject: BoxSubject) -> None:
    async with subject.open() as box:
        swarm = Swarm(box)
        async with swarm.started():
            pass
        await swarm.all_dead()
        swarm = Swarm(box)
        try:
            async with swarm.started():
                raise KeyError("left by an exception")
        except KeyError:
            pass
        await swarm.all_dead()


@family.check("when a command has ended, `wait` returns its code and all it left running is dead")
async def leftovers(subject: BoxSubject) -> None:
    async with subject.open() as box:
        swarm = Swarm(box)
        async with swarm.started("exit") as process:
            same(await process.wait(), 3, "exit code")
            await swarm.all_dead()
        ran = await sh(box, "sleep 1000 & (setsid sleep 1000 &) ; echo done", timeout_s=30)
        same((ran.code, ran.stdout.text), (0, "done\n"), "a command whose children hold its output open")


@family.check("cancelling kills the command and all it started before the block is left")
async def cancellation(subject: BoxSubject) -> None:
    async with subject.open() as box:
        swarm = Swarm(box)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, box, swarm.argv())
            await swarm.running()
            tasks.cancel_scope.cancel()
        await swarm.all_dead()
        with anyio.move_on_after(0.001):
            await sh(box, "sleep 100")
        same((await sh(box, "echo alive")).stdout.text, "alive\n", "the next command said")


@family.check("commands of one box run side by side and share home, /tmp and loopback")
async def parallel(subject: BoxSubject) -> None:
    async with subject.open() as box:
        await sh(box, "mkfifo /tmp/pipe; echo kept > ~/file")
        codes: list[int] = []

        async def note(script: str) -> None:
            codes.append((await sh(box, script)).code)

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(note, f"echo {number} > ~/n{number}; [ $(cat ~/file) = kept ]")
            tasks.start_soon(note, "read x < /tmp/pipe; [ $x = hello ]")
            tasks.start_soon(note, "echo hello > /tmp/pipe")
        same(codes, [0] * 10, "exit codes")
        same((await sh(box, "ls ~ | wc -l")).stdout.text, "9\n", "files in home")
        await _talk_over_loopback(box)


async def _talk_over_loopback(box: Sandbox) -> None:
    serve = (
        "import socket\ns = socket.create_server(('127.0.0.1', 5055))\nprint('up', flush=True)\n"
        "c, _ = s.accept()\nc.sendall(c.recv(9).upper())"
    )
    talk = "import socket\ns = socket.create_connection(('127.0.0.1', 5055))\ns.sendall(b'ping')\nprint(s.recv(9))"
    async with box.spawn(["python3", "-I", "-c", serve]) as server:
        await until(server, b"up\n")
        same(await said(box, talk), "b'PING'\n", "a server in the box answered")


@family.check("a command that kills all it can reach harms only commands; the box goes on")
async def rampage(subject: BoxSubject) -> None:
    async with subject.open() as box:
        await box.write(f"{HOME}/file", b"kept")
        ran = await sh(box, "kill -STOP 1; kill -9 1; kill -TERM -1; kill -9 -1; sleep 0.2; echo still", timeout_s=10)
        expect(ran.seconds < 30, "it could not be ended")
        same((await sh(box, "cat ~/file")).stdout.text, "kept", "the next command said")
