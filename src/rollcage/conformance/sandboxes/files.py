"""Files go in and come out exactly, and whatever an agent puts in the way, neither leads out of the box nor hangs."""

from __future__ import annotations

import hashlib
import os
import secrets

import anyio

from rollcage.conformance.sandboxes import host
from rollcage.conformance.sandboxes.values import BoxSubject, Failed, Family, expect, same
from rollcage.errors import FileMissing, SandboxError
from rollcage.sandboxes.base import Sandbox, run, sh
from rollcage.types import HOME

family = Family("files")

LARGE = 64 << 20
_SOON_S = 20


async def _missing(box: Sandbox, path: str) -> None:
    """Reading this path must say that there is no such file, and soon."""
    try:
        with anyio.fail_after(_SOON_S):
            data = await box.read(path)
    except FileMissing:
        return
    except TimeoutError:
        raise Failed(f"reading {path} hung") from None
    raise Failed(f"reading {path} gave {data[:80]!r} and no FileMissing")


@family.check("bytes of every value come back exactly as they were written, none and many")
async def binary(subject: BoxSubject) -> None:
    async with subject.open() as box:
        for data in (b"", b"\0", b"\r\n\x1a\xff\xfe", bytes(range(256)) * 999, "é日本\n".encode()):
            await box.write(f"{HOME}/data", data)
            same(await box.read(f"{HOME}/data"), data, "read back")
            ran = await run(box, ["sha256sum", f"{HOME}/data"])
            same(ran.stdout.text[:64], hashlib.sha256(data).hexdigest(), "its hash in the box")
        await sh(box, "head -c 300000 /dev/urandom > made; sha256sum < made > sum")
        made = await box.read(f"{HOME}/made")
        same(hashlib.sha256(made).hexdigest(), (await box.read(f"{HOME}/sum"))[:64].decode(), "a file made in the box")


@family.check("a file of 64 MB goes in and comes out whole", deadline_s=90)
async def large(subject: BoxSubject) -> None:
    data = os.urandom(1 << 20) * (LARGE >> 20)
    async with subject.open() as box:
        await box.write(f"{HOME}/large", data)
        ran = await run(box, ["sha256sum", f"{HOME}/large"])
        same(ran.stdout.text[:64], hashlib.sha256(data).hexdigest(), "its hash in the box")
        expect(await box.read(f"{HOME}/large", limit=2 * LARGE) == data, "what was read back is something else")


@family.check("what is not there, or is no regular file, is FileMissing, and never hangs: FIFOs, devices, folders")
async def missing(subject: BoxSubject) -> None:
    async with subject.open() as box:
        await sh(
            box, "mkfifo fifo; mkdir folder; echo in > file; ln -s /dev/zero zero; ln -s fifo through; ln -s no to"
        )
        for name in ("none", "none/deeper", "fifo", "through", "folder", "zero", "to", "file/below", "folder/../fifo"):
            await _missing(box, f"{HOME}/{name}")
        await _missing(box, "/dev/zero")
        same(await box.read(f"{HOME}/file"), b"in\n", "the file beside them")


@family.check("a symlink is read within the box: it leads to the box's own files and never to the host's")
async def links(subject: BoxSubject) -> None:
    with host.a_secret() as secret:
        async with subject.open() as box:
            made = await sh(
                box,
                f"ln -s {secret} out; ln -s {secret.parent} folder; ln -s ../../../../../..{secret} up; "
                f"echo in > file; ln -s file near; ln -s {HOME}/file far; "
                f"ln -s /proc/1/root{secret} proc; ln -s loop loop",
            )
            same(made.code, 0, "making links ended with")
            for path in ("out", f"folder/{secret.name}", "up", "proc"):
                await _missing(box, f"{HOME}/{path}")
            await _missing(box, str(secret))
            for path in ("near", "far"):
                same(await box.read(f"{HOME}/{path}"), b"in\n", f"the link {path} read")
            try:
                await box.read(f"{HOME}/loop")
            except SandboxError:
                return
            raise Failed("a link to itself could be read")


@family.check("a write follows no link out of the box and does not hang on a FIFO; the host is as it was")
async def replace(subject: BoxSubject) -> None:
    with host.a_folder() as outside:
        async with subject.open() as box:
            await sh(box, f"mkfifo fifo; mkdir folder; ln -s {outside} out; ln -s {outside}/file file")
            for path, data in (("fifo", b"1"), ("file", b"2"), ("out/deep/file", b"3"), ("folder", b"4")):
                try:
                    with anyio.fail_after(_SOON_S):
                        await box.write(f"{HOME}/{path}", data)
                except TimeoutError:
                    raise Failed(f"writing {path} hung") from None
                except SandboxError:
                    continue
                expect(path != "folder", "a folder was replaced by a file")
                same(await box.read(f"{HOME}/{path}"), data, f"{path} after it was written")
        expect(host.is_empty(outside), "a write in the box made something on the host")


@family.check("names of any kind work: spaces, quotes, line ends, dashes, other scripts, 255 bytes, many folders")
async def names(subject: BoxSubject) -> None:
    async with subject.open() as box:
        odd = (
            "a b",
            "-rf",
            "$HOME",
            "'\"`;&|",
            "line\nend",
            "日本 é\u0301",
            "*?[x]",
            "%41\\n",
            "x" * 255,
            ".hidden",
            "🦊",
        )
        for number, name in enumerate(odd):
            path = f"{HOME}/folder {number}/{name}"
            await box.write(path, name.encode())
            same(await box.read(path), name.encode(), f"the file named {name!r}")
        seen = await run(box, ["find", ".", "-type", "f", "-printf", "%f\\0"], limit=1 << 20)
        same(sorted(seen.stdout.text.split("\0")[:-1]), sorted(odd), "the names in the box")
        deep = f"{HOME}/{'/'.join(['deep'] * 100)}/file"
        await box.write(deep, b"deep")
        same(await box.read(deep), b"deep", "a file below 100 folders")


@family.check("a read takes no more than its limit, however large the file is")
async def limit(subject: BoxSubject) -> None:
    async with subject.open() as box:
        await sh(box, "printf 0123456789 > file; truncate -s 900M sparse")
        for most, wanted in ((3, b"012"), (10, b"0123456789"), (11, b"0123456789"), (0, b"")):
            same(await box.read(f"{HOME}/file", limit=most), wanted, f"with a limit of {most}")
        same(await box.read(f"{HOME}/sparse", limit=10), b"\0" * 10, "the start of a huge file")


@family.check("a written file has its mode and its folders, belongs to the commands, and replaces what was there")
async def mode(subject: BoxSubject) -> None:
    async with subject.open() as box:
        path = f"{HOME}/a/b/c/run.sh"
        await box.write(path, b"#!/bin/sh\necho ran\n", mode=0o755)
        same((await run(box, [path])).stdout.text, "ran\n", "a script that was written said")
        same((await run(box, ["stat", "-c", "%a", path])).stdout.text, "755\n", "its mode")
        await box.write(path, b"x")
        same((await run(box, ["stat", "-c", "%a %s", path])).stdout.text, "644 1\n", "mode and size when replaced")
        await box.write(f"{HOME}/key", b"k", mode=0o600)
        same((await run(box, ["stat", "-c", "%a", f"{HOME}/key"])).stdout.text, "600\n", "the mode of a secret")
        ran = await sh(box, f"echo more >> {path} && touch a/b/c/new a/b/new a/new && rm -r a && echo done")
        same(ran.stdout.text, "done\n", "a command that changes and removes what was written said")
        await box.write("/tmp/file", b"t")  # noqa: S108 (a path in the box)
        same((await sh(box, "cat /tmp/file")).stdout.text, "t", "a file in /tmp")


@family.check("a path that cannot be is a clear SandboxError, and the box goes on")
async def nonsense(subject: BoxSubject) -> None:
    async with subject.open() as box:
        for path in ("relative", "", f"{HOME}/nul\0nul", f"{HOME}/{'x' * 300}", f"/{'y/' * 5000}"):
            for use in (box.read(path), box.write(path, b"")):
                try:
                    await use
                except SandboxError as error:
                    expect(str(error), f"the error for {path[:40]!r} says nothing")
                else:
                    raise Failed(f"{path[:40]!r} was taken for a path")
        for path in (f"/proc/{secrets.token_hex(4)}/x", "/"):
            try:
                await box.write(path, b"")
            except SandboxError:
                continue
            raise Failed(f"{path} could be written")
        same((await sh(box, "echo alive")).stdout.text, "alive\n", "the next command said")
